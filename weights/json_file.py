"""A checkpoint's JSON files, whose faults are CheckpointErrors, and the file names in them."""

import json
from pathlib import Path as FilePath
from typing import Any

from jaxserve.weights.errors import CheckpointError

_MAX_BYTES = 100_000_000  # like a safetensors header; a large model's index has a tenth
_MAX_NESTING = 64  # far below Python's recursion limit, which also applies to printing and copying


def read_json(file: FilePath) -> Any:
    """Return a file's content; CheckpointError if it is unreadable, not JSON, too large or too deep."""
    try:
        if (size := file.stat().st_size) > _MAX_BYTES:
            raise CheckpointError(
                f"{file} must have at most {_MAX_BYTES} bytes, got {size}; download or write it again"
            )
        value = json.loads(file.read_text(encoding="utf-8"))
    except CheckpointError:
        raise
    except (OSError, ValueError) as error:
        raise CheckpointError(f"{file} must be a readable JSON file, got a fault: {error}") from error
    except RecursionError:
        raise _too_deep(file) from None
    if _is_deep(value):
        raise _too_deep(file)
    return value


def read_object(file: FilePath) -> dict[str, Any]:
    """Return the object in a file; CheckpointError if it holds another type, and as for `read_json`."""
    value = read_json(file)
    if not isinstance(value, dict):
        raise CheckpointError(f"{file} must hold a JSON object, got a {type(value).__name__}")
    return value


def leaves_directory(name: str) -> bool:
    """Return whether a relative name leads out of its directory, links aside."""
    path = FilePath(name)
    return path.is_absolute() or ".." in path.parts


def _is_deep(value: Any) -> bool:
    """Return whether arrays and objects are nested more than 64 times."""
    level = [value]
    for _ in range(_MAX_NESTING):
        holders = [node.values() if isinstance(node, dict) else node for node in level if isinstance(node, dict | list)]
        level = [child for holder in holders for child in holder]
    return any(isinstance(node, dict | list) for node in level)


def _too_deep(file: FilePath) -> CheckpointError:
    """Return the error for a file with too deep nesting."""
    return CheckpointError(
        f"{file} must nest arrays and objects at most {_MAX_NESTING} times, got more; download or write it again"
    )
