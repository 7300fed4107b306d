"""Points that a process measures independently, and the timing of calls."""

import gc
import statistics
import time
from collections.abc import Callable, Hashable
from dataclasses import dataclass
from typing import Any, Generic, NamedTuple, TypeVar

Figures = dict[str, Any]
K = TypeVar("K", bound=Hashable)
V = TypeVar("V")


class UnavailableError(Exception):
    """A point that cannot be measured here, for a reason known beforehand."""


@dataclass(frozen=True)
class Point:
    """One measurement.

    Attributes:
        kind: type of measurement.
        settings: sizes of the measurement; `kind` and `settings` together name the point.
        measure: returns the figures, with units in their names.
        needs_s: minimum seconds that it takes; left out if fewer are left.
    """

    kind: str
    settings: Figures
    measure: Callable[[], Figures]
    needs_s: Callable[[], float] = lambda: 0.0

    @property
    def name(self) -> str:
        """Unique name within a stage."""
        return " ".join([self.kind, *(f"{setting}={value}" for setting, value in self.settings.items())])


class Latest(Generic[K, V]):
    """Creates objects shared by points, and keeps only the last one: large objects never exist twice."""

    def __init__(self, make: Callable[[K], V]) -> None:
        self._make = make
        self._kept: dict[K, V] = {}

    def get(self, key: K) -> V:
        """Return this key's value, created now unless it was requested last."""
        if key not in self._kept:
            self._kept.clear()
            gc.collect()  # reference cycles, and arrays with them, live until then
            self._kept[key] = self._make(key)
        return self._kept[key]


class Effort(NamedTuple):
    """Lengths of a measurement."""

    sample_s: float  # minimum sample time, so that waiting for its end weighs little
    samples: int
    limit_s: float  # time after which no further sample begins


def effort(dry_run: bool) -> Effort:
    """Return the lengths of a real measurement, or of one that only shows that it works."""
    return Effort(0.0, 1, 0.0) if dry_run else Effort(0.02, 9, 2.0)


def median_s(run: Callable[[int], None], effort: Effort) -> float:
    """Return the median seconds per call; `run(n)` makes n calls and waits for the last one's end."""
    run(1)  # compiles
    started = time.perf_counter()
    once_s = _seconds(run, 1)
    count = max(1, round(effort.sample_s / once_s))
    times = [once_s if count == 1 else _seconds(run, count) / count]
    while len(times) < effort.samples and time.perf_counter() - started < effort.limit_s:
        times.append(_seconds(run, count) / count)
    return statistics.median(times)


def _seconds(run: Callable[[int], None], count: int) -> float:
    started = time.perf_counter()
    run(count)
    return time.perf_counter() - started
