"""Files that sentence-transformers adds to a checkpoint: how embeddings are computed from hidden states."""

from __future__ import annotations

import os
from pathlib import Path as FilePath
from typing import Any, NamedTuple

from jaxserve.weights.errors import CheckpointError
from jaxserve.weights.json_file import leaves_directory, read_json

_MODULES = "modules.json"


class EmbeddingModules(NamedTuple):
    """Modules that follow the transformer.

    Attributes:
        pooling: mode of the pooling module: its field without `pooling_mode_` and `_tokens`, such as "lasttoken",
            "mean" or "cls_token".
        normalize: True if vectors are scaled to length 1.
        others: types of all other modules.
    """

    pooling: str
    normalize: bool
    others: tuple[str, ...]


def module_folders(path: str | os.PathLike[str]) -> tuple[str, ...]:
    """Return the folders of a directory's modules, except the transformer.

    Raises:
        CheckpointError: modules.json is malformed.
    """
    return tuple(folder for _, folder in _modules(FilePath(path)) if folder)


def _modules(directory: FilePath) -> list[tuple[str, str]]:
    """Return each module's type and folder from modules.json; none without this file."""
    if not (directory / _MODULES).is_file():
        return []
    entries = read_json(directory / _MODULES)
    try:
        modules = [(entry["type"].rpartition(".")[2], str(entry["path"])) for entry in entries]
    except (TypeError, KeyError, AttributeError):
        raise CheckpointError(f"{directory / _MODULES} must be a list of modules with type and path") from None
    if outside := [path for _, path in modules if leaves_directory(path)]:
        raise CheckpointError(f"{directory / _MODULES} must name folders inside its directory, got {outside[:8]}")
    return modules


def read_embedding_modules(path: str | os.PathLike[str]) -> EmbeddingModules | None:
    """Return a directory's modules; None if sentence-transformers has written none.

    Raises:
        CheckpointError: a file is malformed.
    """
    directory = FilePath(path)
    if not (directory / _MODULES).is_file():
        return None
    modules = _modules(directory)
    pooling = next((folder for name, folder in modules if name == "Pooling"), None)
    return EmbeddingModules(
        pooling="" if pooling is None else _mode(read_json(directory / pooling / "config.json")),
        normalize=any(name == "Normalize" for name, _ in modules),
        others=tuple(name for name, _ in modules if name not in ("Transformer", "Pooling", "Normalize")),
    )


def _mode(config: Any) -> str:
    """Return the mode in a pooling module's config, such as "mean"; several are joined by "+"."""
    if not isinstance(config, dict):
        return ""
    if isinstance(config.get("pooling_mode"), str):
        return str(config["pooling_mode"])
    prefix = "pooling_mode_"
    names = [name.removeprefix(prefix) for name, value in config.items() if name.startswith(prefix) and value is True]
    return "+".join(name.removesuffix("_tokens") for name in names)
