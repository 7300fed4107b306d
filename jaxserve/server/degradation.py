"""Ladder of degradation: what a server does without, one thing after the other, as its load grows."""

from __future__ import annotations

from collections.abc import Collection

RUNGS = ("speculation", "coalesce", "extras", "batch", "shed")  # rungs in their order
FIRST_AT, STEP = 0.5, 0.1  # loads at which the first rung comes on, and by which each further one is later
BAND = 0.2  # fall of the load below its threshold with which a rung goes off
DWELL_S = 1.0  # least time between two rungs that go off


class Ladder:
    """Rungs that are on, by the load, which is 1 where requests have to be refused. It reads no clock.

    Rungs come on in their order, as many at once as the load asks for, and go off one by one.

    Args:
        enabled: rungs that may come on; the others are passed over.

    Attributes:
        height: rungs that are on, counted from the first, those that are passed over included.
        num_climbs: times that each rung has come on.
    """

    def __init__(self, enabled: Collection[str] = RUNGS) -> None:
        self._enabled = frozenset(enabled)
        self.height = 0
        self.num_climbs = dict.fromkeys(RUNGS, 0)
        self._calm_since_s: float | None = None

    def update(self, load: int | float, now_s: int | float) -> None:
        """Take the load."""
        wanted = sum(load >= threshold(index) for index in range(len(RUNGS)))
        if wanted > self.height:
            for rung in RUNGS[self.height : wanted]:
                self.num_climbs[rung] += rung in self._enabled
            self.height = wanted
        if not self.height or load > threshold(self.height - 1) - BAND:
            self._calm_since_s = None
        elif self._calm_since_s is None:
            self._calm_since_s = now_s
        elif now_s - self._calm_since_s >= DWELL_S:
            self.height -= 1
            self._calm_since_s = now_s

    def has(self, rung: str) -> bool:
        """Return whether a rung is on."""
        return rung in self._enabled and RUNGS.index(rung) < self.height

    @property
    def on(self) -> list[str]:
        """Rungs that are on."""
        return [rung for rung in RUNGS[: self.height] if rung in self._enabled]


def threshold(index: int) -> int | float:
    """Return the load at which a rung comes on."""
    return FIRST_AT + index * STEP
