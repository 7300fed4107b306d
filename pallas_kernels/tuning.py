"""Block sizes that measured best on a chip: one JSON file per chip, each entry with its evidence.

    {"entries": [{"shape": {"head_dim": 128, ...}, "sizes": {"tile_keys": 1024, ...}, "evidence": {...}}, ...]}

An entry is for one class of shapes. A size that it does not name keeps its default.
"""

from __future__ import annotations

import functools
import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

Shape = Mapping[str, int | str]


@dataclass(frozen=True)
class Entry:
    """Sizes for a class of shapes.

    Attributes:
        shape: facts that the whole class has in common.
        sizes: sizes that replace the defaults.
        evidence: measurements of these sizes and of those used before, with units in their names.
    """

    shape: dict[str, int | str]
    sizes: dict[str, int]
    evidence: dict[str, Any]


def measured_sizes(folder: Path, chip: str, shape: Shape) -> dict[str, int]:
    """Return the sizes that measured best for this class of shapes, or an empty dict without a measurement.

    Raises:
      ValueError: the chip's file is malformed.
    """
    return next((dict(entry.sizes) for entry in read_entries(folder, chip) if entry.shape == shape), {})


@functools.cache
def read_entries(folder: Path, chip: str) -> Sequence[Entry]:
    """Return all entries for a chip.

    Raises:
      ValueError: the chip's file is malformed.
    """
    path = _path(folder, chip)
    if not path.exists():
        return ()
    try:
        return [Entry(**entry) for entry in json.loads(path.read_text(encoding="utf-8"))["entries"]]
    except (KeyError, TypeError, ValueError) as error:
        raise ValueError(f"{path} must hold entries of shape, sizes and evidence, but: {error}") from error


def write_entries(folder: Path, chip: str, entries: Sequence[Entry]) -> Path:
    """Add entries to a chip's file; they replace those for the same shapes."""
    shapes = [entry.shape for entry in entries]
    kept = [entry for entry in read_entries(folder, chip) if entry.shape not in shapes]
    folder.mkdir(parents=True, exist_ok=True)
    path = _path(folder, chip)
    path.write_text(json.dumps({"entries": [asdict(x) for x in (*kept, *entries)]}, indent=1) + "\n", encoding="utf-8")
    read_entries.cache_clear()
    return path


def _path(folder: Path, chip: str) -> Path:
    return folder / f"{chip}.json"
