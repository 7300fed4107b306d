"""Block sizes that measured best on a chip, and settings of calls: other sizes, the interpreter.

There is one JSON file per chip, each entry with its evidence:

    {"entries": [{"shape": {"head_dim": 128, ...}, "sizes": {"tile_keys": 1024, ...}, "evidence": {...}}, ...]}

An entry is for one class of shapes. A size that it does not name keeps its default.
"""

from __future__ import annotations

import contextlib
import functools
import json
from collections.abc import Iterator, Mapping, Sequence
from contextvars import ContextVar
from dataclasses import asdict, dataclass, fields
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


class Settings:
    """Settings of the calls of a kernel that are traced inside a context: the interpreter, and block sizes.

    Args:
        folder: folder of measured block sizes, by chip; None where none are measured.

    Attributes:
        folder: the folder.
    """

    def __init__(self, folder: Path | None = None) -> None:
        self.folder = folder
        self._sizes: ContextVar[dict[str, int] | None] = ContextVar("sizes", default=None)
        self._interpreter: ContextVar[Any] = ContextVar("interpreter", default=None)

    @contextlib.contextmanager
    def interpreted(self, params: Any) -> Iterator[None]:
        """Run calls traced inside in the interpreter, on any machine, with these parameters."""
        token = self._interpreter.set(params)
        try:
            yield
        finally:
            self._interpreter.reset(token)

    @property
    def interpreter(self) -> Any:
        """Parameters of the interpreter; None to run on a chip."""
        return self._interpreter.get()

    @contextlib.contextmanager
    def sized(self, **sizes: int) -> Iterator[None]:
        """Make calls traced inside use these block sizes instead of those that measured best on their chip."""
        token = self._sizes.set(sizes)
        try:
            yield
        finally:
            self._sizes.reset(token)

    def sizes(self, kind: Any, chip: str, shape: Shape) -> dict[str, int]:
        """Return the sizes that replace defaults: requested ones, else those that measured best.

        Args:
            kind: dataclass of the sizes.
            chip: name of the chip.
            shape: facts that problems with the same best sizes have in common.

        Raises:
            ValueError: sizes have unknown names, or the chip's file is malformed.
        """
        given = self._sizes.get()
        if given is None:
            given = {} if self.folder is None else measured_sizes(self.folder, chip, shape)
        if unknown := sorted(given.keys() - {field.name for field in fields(kind)}):
            source = "`sized`" if self._sizes.get() is not None else f"{self.folder} for {chip}"
            raise ValueError(f"there are no sizes of blocks called {unknown}, which come from {source}")
        return given


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
