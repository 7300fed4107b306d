"""Points that a process measures, each by itself; and how a time is taken."""

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
        kind: kind of measurement.
        facts: sizes of the measurement; kind and facts together name the point.
        measure: gives the figures, with units in their names.
        needs_s: seconds that it takes at least; left out where there are fewer.
    """

    kind: str
    facts: Figures
    measure: Callable[[], Figures]
    needs_s: Callable[[], float] = lambda: 0.0

    @property
    def name(self) -> str:
        """Unique within a stage."""
        return " ".join([self.kind, *(f"{fact}={value}" for fact, value in self.facts.items())])


class Latest(Generic[K, V]):
    """Makes what points share, and keeps the last of it alone: what takes the most memory is never there twice."""

    def __init__(self, make: Callable[[K], V]) -> None:
        self._make = make
        self._kept: dict[K, V] = {}

    def get(self, key: K) -> V:
        """The value of this key, made now unless it was the last one asked for."""
        if key not in self._kept:
            self._kept.clear()
            gc.collect()  # reference cycles live on until then, and arrays with them
            self._kept[key] = self._make(key)
        return self._kept[key]


class Effort(NamedTuple):
    """Lengths of a measurement."""

    sample_s: float  # least time of a sample, so that waiting for its end weighs little
    samples: int
    limit_s: float  # time after which no further sample is begun


def effort(dry_run: bool) -> Effort:
    """Return the lengths of a measurement that counts, or of one that only shows that it works."""
    return Effort(0.0, 1, 0.0) if dry_run else Effort(0.02, 9, 2.0)


def median_s(run: Callable[[int], None], effort: Effort) -> float:
    """Seconds of one call, the median of samples; `run(n)` makes n calls and waits for the last one's end."""
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
