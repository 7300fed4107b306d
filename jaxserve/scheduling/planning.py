"""Planning: makes the plan of a step in three parts, from one token budget: begin, decode, fill.

The budget. Rows in decode come first, with a token each; then prompts, as the module `prefill` says. Where that would
leave prompts less than `prefill_share` of the budget, some rows in decode are held back: they get what the prompts did
not need, and otherwise take turns to miss a step. That can only be where max_num_batched_tokens is less than 8/7 of
max_num_seqs; everywhere else no row in decode ever waits.

Progress. A row in decode that lacks a page preempts the last admitted, which has no row in the plan yet, because rows
in decode enter it in the order of admission; if that is itself, it gives way. A row in prefill takes only pages that
nobody needs, or those of younger rows in prefill. Still the oldest running request ends after finitely many steps, and
with it, one after the other, every request:

- In decode it gets its page in any step, for alone it fits the pool. If others are held back before it, it is its turn
  again after as many steps as there are slots; and at least one row in decode is never held back.
- In prefill it lacks pages only while there are rows in decode that own them, or for which the last free ones are kept:
  without any, it takes all that are free, and then those of all others in prefill, and alone it fits the pool. While it
  lacks them nobody is admitted, so that those rows get fewer: by the same argument the oldest of them, who preempts
  only younger ones, ends after finitely many steps. What they leave goes to the oldest prompt first.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from jaxserve.request import Request, RequestStatus
from jaxserve.scheduling.classes import make_room
from jaxserve.scheduling.decode import Decodes, may_sample_late
from jaxserve.scheduling.ledger import Ledger
from jaxserve.scheduling.plan import StepPlan
from jaxserve.scheduling.policy import Policy
from jaxserve.scheduling.prefill import Prefills


class Decoded(NamedTuple):
    """A plan with its rows in decode, which lacks those in prefill.

    Attributes:
        plan: the plan.
        num_displaced: rows preempted for requests of higher classes.
        held_back: rows in decode that get what prompts leave.
        in_prefill: running rows between two chunks.
        beside_decode: True if any row in decode waits for the step.
    """

    plan: StepPlan
    num_displaced: int
    held_back: list[Request]
    in_prefill: list[Request]
    beside_decode: bool


class Planning:
    """The parts of a plan. Each plan begun is decoded and filled before the ledger changes otherwise.

    They are apart because the shards of a `ShardedScheduler` agree after each on what the next may do.

    Args:
        ledger: ledger of all requests.
        policy: order of requests, and a prompt's share of a step.
        prefills: prompts between two chunks, and the start of requests.
        num_spare_tokens: tokens that a row with drafts may compute, and not keep, beyond those it may sample.
    """

    def __init__(self, ledger: Ledger, policy: Policy, prefills: Prefills, num_spare_tokens: int) -> None:
        self._ledger, self._policy, self._prefills = ledger, policy, prefills
        self._decodes = Decodes(ledger, policy, num_spare_tokens)

    def begin(self, step_id: int) -> StepPlan:
        """Begin a plan: rows give way to waiting requests of higher classes."""
        if (states := self._ledger.store.states) is not None:
            states.begin_plan()
        plan = StepPlan(step_id)
        make_room(self._ledger, self._policy, plan)
        return plan

    def most_steps(self, limit: int, num_drafts: Sequence[int] = ()) -> int:
        """Return the most steps that the plan begun may have; see `Decodes.most_steps`."""
        return self._decodes.most_steps(limit, num_drafts)

    def steps_left(self, num_drafts: Sequence[int] = ()) -> int:
        """Return the steps until all running rows have ended; see `Decodes.steps_left`."""
        return self._decodes.steps_left(num_drafts)

    def decode(
        self, plan: StepPlan, num_steps: int, num_drafts: Sequence[int] = (), *, may_split: bool = False
    ) -> Decoded:
        """Give rows in decode `num_steps` steps of the plan begun, at most what `most_steps` allows.

        Args:
            plan: the plan.
            num_steps: number of steps.
            num_drafts: tokens to draft by slot; empty for a plan without drafts.
            may_split: True if the plan may be split for rows that wait for tokens.
        """
        num_displaced = len(plan.preempted)
        rows = self._ledger.running.values()
        plan.num_steps = num_steps
        plan.is_split = may_split and self._decodes.most_steps(1) > 0 and any(map(may_sample_late, rows))
        held_back = self._decodes.rows_to_hold_back()
        in_prefill_before = self._decodes.schedule(plan, held_back, num_drafts)
        beside_decode = bool(plan.num_rows or held_back) or any(row.status is RequestStatus.BLOCKED for row in rows)
        return Decoded(plan, num_displaced, held_back, in_prefill_before, beside_decode)

    def fill(self, decoded: Decoded, most_prefill_tokens: int) -> StepPlan | None:
        """Return the plan with rows in prefill of so many tokens at most; None if it has no rows."""
        plan = decoded.plan
        self._prefills.schedule(
            plan,
            decoded.in_prefill,
            beside_decode=decoded.beside_decode,
            num_displaced=decoded.num_displaced,
            most_tokens=most_prefill_tokens,
        )
        if decoded.held_back:
            self._decodes.schedule_held_back(plan, decoded.held_back)
        if not plan.requests:
            return None
        if plan.num_steps > 1 and not plan.num_drafts:
            plan.num_steps = max(plan.max_new)
        plan.slots = [request.slot for request in plan.requests]
        plan.num_pages_used = self._ledger.num_pages_used
        return plan
