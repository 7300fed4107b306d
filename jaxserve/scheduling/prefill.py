"""PrefillPlanner: gives prompts the tokens that decoding rows leave: first prompts between two chunks, then new ones.

Order. Prompts between two chunks come first, oldest first, then waiting requests in their order, as long as slots,
budget and pages last. A long prompt leaves half the budget to others, and finally gets the tokens they did not take;
while rows decode, at most its chunk (`Policy`).

Pages. A prompt short of pages takes as many tokens as the free pages hold, not counting pages reserved for older
prompts and a block for each decoding row that can grow: those rows would otherwise take the pages back, perhaps from
this very prompt. If no token fits, younger rows in prefill are preempted, the last first. None of them has a row in the
plan yet, because rows are planned by age; decoding rows are never preempted for a prompt. If that does not help, the
prompt waits a step. Nobody is admitted in a step in which a running row lacks pages.

States. A recurrent layer keeps a sequence's state in its slot, starting from zeros or from a snapshot that an earlier
plan took after a cached page. A row takes a snapshot at the last full page of its prompt, or at a common prefix of
several requests that has no snapshot yet.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from itertools import count, groupby
from operator import attrgetter

from jaxserve.scheduling.ledger import RUNS, Ledger
from jaxserve.scheduling.policy import Policy
from jaxserve.scheduling.prompts import Prompts
from jaxserve.scheduling.request import Request
from jaxserve.scheduling.starts import StartPlanner
from jaxserve.scheduling.step_plan import StepPlan


class PrefillPlanner:
    """Planner of prompts: unfinished ones between two chunks, and prompts of requests that start.

    Args:
        policy: policy that sizes chunks.
        prompts: unfinished prompts.
        starts: starter of waiting requests.
    """

    def __init__(self, ledger: Ledger, policy: Policy, prompts: Prompts, starts: StartPlanner) -> None:
        self._ledger, self._policy, self._prompts, self._starts = ledger, policy, prompts, starts

    def schedule(
        self,
        plan: StepPlan,
        in_prefill_before: Sequence[Request],
        *,
        decode_waits: bool,
        num_displaced: int,
        max_tokens: int = sys.maxsize,
    ) -> None:
        """Add prompts, unfinished and new ones, to a plan that already has its decoding rows.

        Args:
            plan: plan to add to.
            in_prefill_before: running rows between two chunks, by class and admission; some may have been preempted.
            decode_waits: True if any decoding row waits for this step.
            num_displaced: rows preempted by `preempt_lower_classes`, for requests of higher classes.
            max_tokens: maximum prompt tokens, so that decoding rows meet their deadlines.
        """
        rows = [request for request in in_prefill_before if request.status in RUNS]
        self._prompts.begin(plan, max_tokens)
        first_row = plan.num_rows
        displaced = min(request.priority for request in plan.preempted[:num_displaced]) if num_displaced else None
        may_admit, num_before = len(plan.preempted) == num_displaced, 0
        for priority, group in groupby(rows, key=attrgetter("priority")):
            if may_admit:
                self._starts.start_waiting(plan, priority)
            num_after = num_before + len(list(group))
            is_short_of_pages = self._continue(rows, num_before, num_after, plan)
            may_admit &= not is_short_of_pages and len(plan.preempted) == num_displaced
            num_before = num_after
        if may_admit:
            self._starts.start_waiting(plan, displaced)
        if self._prompts.unfinished:
            self._distribute_rest(plan, first_row, decode_waits=decode_waits)
            self._prompts.settle()
        self._take_snapshots(plan, first_row)

    def _continue(self, rows: Sequence[Request], start: int, stop: int, plan: StepPlan) -> bool:
        """Plan this step's first chunk for each row in one priority class, oldest first.

        If the free pages hold no token for a row, later rows are preempted, the last first.

        Args:
            rows: all rows in prefill; those from `stop` on have lower classes.
            start: index of the first row in the class.
            stop: index after its last row.
            plan: plan to add to.

        Returns:
            True if any row got fewer tokens than wanted for lack of pages.
        """
        ledger, is_short = self._ledger, False
        in_class = [request for request in rows[start:stop] if request.status in RUNS]
        reserve = _PageReserve(ledger, in_class, self._prompts.num_pages_kept - ledger.num_pages_to_grow)
        self._prompts.unfinished += in_class
        for index, request in enumerate(rows[start:stop], start):
            budget_left = self._prompts.budget_left(plan)
            if request.status not in RUNS or not budget_left:  # preempted for an older one
                continue
            if ledger.must_wait_to_compact(request, plan):
                continue
            num_left = ledger.num_computable(request, request.num_computed_tokens)
            wanted = self._policy.first_chunk(num_left, budget_left)
            start = request.num_computed_tokens
            wanted = self._prompts.num_wanted(request, start, wanted, plan)
            if not wanted:  # its next image must wait for other images
                continue
            ledger.store.release_unseen(request)
            reserve.begin_turn(request)
            num_tokens = self._prompts.num_encodable(request, start, reserve.num_affordable(request, wanted))
            while not num_tokens and (victim := _last_running(rows[index + 1 :])) is not None:
                if victim.priority == request.priority:
                    reserve.forget(victim)
                ledger.preempt(victim, plan)
                num_tokens = self._prompts.num_encodable(request, start, reserve.num_affordable(request, wanted))
            is_short |= num_tokens < wanted
            if num_tokens and ledger.allocate(request, num_tokens, plan):
                self._prompts.compute(self._prompts.add_row(request, plan), num_tokens, plan)
        self._prompts.settle()
        return is_short

    def _distribute_rest(self, plan: StepPlan, first_row: int, *, decode_waits: bool) -> None:
        """Give unfinished prompts the rest of the token budget, oldest first, as further tokens of their rows.

        Args:
            plan: plan that holds the prompts' first chunks.
            first_row: index of the first prompt's row.
            decode_waits: True if decoding rows wait for the step.
        """
        unfinished = self._prompts.unfinished
        row_by_request = dict(zip(plan.requests[first_row:], count(first_row), strict=False))
        reserve = _PageReserve(self._ledger, unfinished)
        for request in unfinished:
            budget_left = self._prompts.budget_left(plan)
            if not budget_left:
                return
            reserve.begin_turn(request)
            row = row_by_request.get(request)
            if row is None:
                continue
            num_left = self._ledger.num_computable(request, plan.starts[row])
            wanted = self._policy.further_chunk(num_left, plan.counts[row], budget_left, decode_waits=decode_waits)
            num_tokens = reserve.num_affordable(request, wanted)
            num_tokens = self._prompts.num_encodable(request, request.num_computed_tokens, num_tokens)
            if num_tokens and self._ledger.allocate(request, num_tokens, plan):
                self._prompts.compute(row, num_tokens, plan)

    def _take_snapshots(self, plan: StepPlan, first_row: int) -> None:
        """Plan snapshots of recurrent states in the rows from `first_row` on.

        A row takes one after its last full page or at a common prefix of several requests, if the plan computes that
        position.
        """
        ledger = self._ledger
        if (states := ledger.store.states) is None:
            return
        for row in range(first_row, plan.num_rows):
            request, start = plan.requests[row], plan.starts[row]
            stop, num_known = start + plan.counts[row], request.num_tokens - plan.max_new[row]
            num_known = ledger.groups.num_shareable(num_known, request.num_prompt_tokens)
            last = (num_known - 1) // ledger.page_size * ledger.page_size  # the last token is computed in any case
            num_tokens = next((each for each in (request.branch_tokens, last) if start < each <= stop), None)
            if num_tokens is None or request in ledger.store.unshared:
                continue
            entry = states.take(ledger.store.index.hashes(request)[num_tokens // ledger.page_size - 1])
            if entry is not None:
                plan.snapshots.append((row, num_tokens - start, entry))


class _PageReserve:
    """Number of free pages that a prompt must leave for older prompts and for decoding rows that can grow.

    Prompts are visited oldest first, and the number is updated at each: `Scheduler.extend` may have turned many rows
    into prompts.

    Args:
        ledger: ledger of all requests.
        prompts: prompts that will be visited.
        num_older_pages: pages reserved for prompts before these.
    """

    def __init__(self, ledger: Ledger, prompts: Sequence[Request], num_older_pages: int = 0) -> None:
        self._ledger, self._size = ledger, ledger.groups.size
        self._num_older_pages = num_older_pages
        self._num_growing = sum(map(ledger.can_grow, prompts))  # prompts whose turn is now or later
        self._current: Request | None = None
        self._could_grow = False  # whether the current prompt could grow when its turn began

    def begin_turn(self, request: Request) -> None:
        """Make `request` the current prompt, and reserve the pages that the previous one still needs."""
        if self._current is not None:
            self._num_growing -= self._could_grow
            self._num_older_pages += self._ledger.num_prompt_pages_kept(self._current)
        self._current, self._could_grow = request, self._ledger.can_grow(request)

    def forget(self, request: Request) -> None:
        """Count a prompt that is preempted before its turn no longer among the growing ones."""
        self._num_growing -= self._ledger.can_grow(request)

    def num_affordable(self, request: Request, limit: int) -> int:
        """Return the number of tokens, up to `limit`, that the current prompt can compute without reserved pages."""
        ledger, size = self._ledger, self._size
        num_copied = ledger.num_pages_to_compact(request)
        num_kept = ledger.num_pages_to_grow + self._num_older_pages - size * self._num_growing
        num_free = ledger.num_available - num_kept - num_copied
        if num_copied:
            if num_free < 0:
                return 0
            num_free += ledger.num_pages_left_by(request)
        num_blocks = (len(request.pages) + max(num_free, 0)) // size
        return max(min(limit, num_blocks * ledger.page_size - request.num_computed_tokens), 0)


def _last_running(rows: Sequence[Request]) -> Request | None:
    """Return the last row that has not been preempted; None if there is none."""
    return next((request for request in reversed(rows) if request.status in RUNS), None)
