"""Degradation ladder: features that a server disables one by one as its load grows."""

from __future__ import annotations

from collections.abc import Collection

RUNGS = ("speculation", "coalesce", "extras", "batch", "shed")  # rungs in their order
FIRST_AT, STEP = 0.5, 0.1  # load for the first rung, and between rungs
BAND = 0.2  # a rung goes off this far below its threshold
DWELL_S = 1.0  # least time between two rungs that go off


class Ladder:
    """Rungs that are on, by the load, which is 1 if requests must be refused. It reads no clock.

    Rungs come on in order, several together if the load needs them, and go off one by one.

    Args:
        enabled: rungs that may come on; the others are skipped.

    Attributes:
        height: number of rungs up to the last one that is on, skipped ones included.
        num_climbs: times that each rung has come on.
    """

    def __init__(self, enabled: Collection[str] = RUNGS) -> None:
        self._enabled = frozenset(enabled)
        self.height = 0
        self.num_climbs = dict.fromkeys(RUNGS, 0)
        self._calm_since_s: float | None = None

    def update(self, load: int | float, now_s: int | float) -> None:
        """Enable or disable features ("rungs") by the load at the time `now_s`."""
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
        """Return whether a rung is on, so that its feature is disabled."""
        return rung in self._enabled and RUNGS.index(rung) < self.height

    @property
    def on(self) -> list[str]:
        """Rungs that are on."""
        return [rung for rung in RUNGS[: self.height] if rung in self._enabled]


def threshold(index: int) -> int | float:
    """Return the load at which the rung with this index comes on."""
    return FIRST_AT + index * STEP
