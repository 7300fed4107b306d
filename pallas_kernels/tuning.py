"""Sizes that were measured to be best on a chip, as data: a JSON file for each chip, each entry with its evidence.

    {"entries": [{"shape": {"head_dim": 128, ...}, "sizes": {"tile_keys": 1024, ...}, "evidence": {...}}, ...]}

An entry is for the one class of shapes that it names. What it does not name is as large as without it.
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
        shape: facts that are the same for all of the class.
        sizes: in place of those that are chosen without measuring.
        evidence: what was measured, with units in the names: of these sizes, and of those in use before.
    """

    shape: dict[str, int | str]
    sizes: dict[str, int]
    evidence: dict[str, Any]


def measured_sizes(folder: Path, chip: str, shape: Shape) -> dict[str, int]:
    """What was measured to be best for shapes of this class; empty where nothing was.

    Raises:
      ValueError: the chip's file is not one.
    """
    return next((dict(entry.sizes) for entry in read_entries(folder, chip) if entry.shape == shape), {})


@functools.cache
def read_entries(folder: Path, chip: str) -> Sequence[Entry]:
    """All that was measured on a chip.

    Raises:
      ValueError: the chip's file is not one.
    """
    path = _path(folder, chip)
    if not path.exists():
        return ()
    try:
        return [Entry(**entry) for entry in json.loads(path.read_text(encoding="utf-8"))["entries"]]
    except (KeyError, TypeError, ValueError) as error:
        raise ValueError(f"{path} must hold entries of shape, sizes and evidence, but: {error}") from error


def write_entries(folder: Path, chip: str, entries: Sequence[Entry]) -> Path:
    """Adds what was measured on a chip to its file, in place of what was there for the same shapes."""
    shapes = [entry.shape for entry in entries]
    kept = [entry for entry in read_entries(folder, chip) if entry.shape not in shapes]
    folder.mkdir(parents=True, exist_ok=True)
    path = _path(folder, chip)
    path.write_text(json.dumps({"entries": [asdict(x) for x in (*kept, *entries)]}, indent=1) + "\n", encoding="utf-8")
    read_entries.cache_clear()
    return path


def _path(folder: Path, chip: str) -> Path:
    return folder / f"{chip}.json"
