"""RowTurns: gives plans in flight different decoding rows, so that none waits for another plan's tokens.

A pipeline of S stages computes S plans simultaneously. If each has one S-th of the decoding rows, a row's token has
passed all stages when the first one begins the row's next plan.
"""

from __future__ import annotations

from collections.abc import Iterable, Set

from jaxserve.scheduling.ledger import in_prefill
from jaxserve.scheduling.request import Request
from jaxserve.scheduling.step_plan import StepPlan

MAX_REPEATED = 2  # maximum plans in flight that have all rows, if these are too few to take turns


class RowTurns:
    """Chooses the decoding rows that miss a plan.

    Args:
        num_turns: number of plans that take turns; with 1, no row misses a plan.
    """

    def __init__(self, num_turns: int) -> None:
        self._num_turns = num_turns
        self._latest: dict[int, int] = {}  # slot -> latest plan in which its row has sampled
        self._last_ended = -1  # latest plan that was read

    def resting(self, rows: Iterable[Request], step_id: int) -> Set[Request]:
        """Return the decoding rows to leave out of plan `step_id`, so that each plan has an equal part of them.

        Rows whose tokens are on the way rest, unless no row is ready and the stages would be idle. Among the others,
        those that have waited longest take part.
        """
        if self._num_turns == 1:
            return frozenset()
        decoding = [row for row in rows if not in_prefill(row)]
        ready = [row for row in decoding if self._is_ready(row, step_id)]
        if not ready and step_id - self._last_ended <= MAX_REPEATED:
            return frozenset()
        ready.sort(key=lambda row: self._latest.get(row.slot, -1))
        part = -(-len(decoding) // self._num_turns)
        return frozenset(decoding) - frozenset(ready[:part])

    def _is_ready(self, row: Request, step_id: int) -> bool:
        """Return whether a row's latest token has passed all stages when the first one begins a plan."""
        latest = self._latest.get(row.slot, -1)
        return latest <= self._last_ended or step_id - latest >= self._num_turns

    def planned(self, plan: StepPlan) -> None:
        """Note the sampling rows of a plan."""
        if self._num_turns > 1:
            self._latest.update((slot, plan.step_id) for slot, num in zip(plan.slots, plan.max_new, strict=True) if num)

    def ended(self, step_id: int) -> None:
        """Note that a plan was read, and all earlier ones."""
        self._last_ended = step_id
