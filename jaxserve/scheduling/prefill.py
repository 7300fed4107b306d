"""Prefills: gives prompts what rows in decode leave of a step: those between two chunks, then those that start.

Order. Prompts between two chunks come first, oldest first, then the waiting requests in their order, while there are
slots, budget and pages. A long prompt leaves others half of that, and gets at the end what they did not take; while
rows decode, no more than its chunk may have (`Policy`).

Pages. A prompt that lacks any takes as many tokens as the free pages hold, but for those of the rest of older prompts,
and a page for each row in decode that can grow: these would otherwise take them back, perhaps from this very prompt. If
that is no token, younger rows in prefill give way, the last first. None of them has a row in the plan, which is made in
the order of their age; rows in decode never give way to a prompt. If that does not help either, the prompt waits a
step. Nobody is admitted in a step in which a running row lacks pages.

States. Layers without attention keep a state of a sequence in its slot, which goes on from zeros, or from a snapshot
that an earlier plan took behind a cached page. A snapshot is taken inside a row's tokens, at the last full page of its
prompt, or where others were seen to begin alike though there was none.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from itertools import count, groupby
from operator import attrgetter

from jaxserve.scheduling.ledger import RUNS, Ledger, num_remaining
from jaxserve.scheduling.policy import Policy
from jaxserve.scheduling.prompts import Prompts
from jaxserve.scheduling.request import Request
from jaxserve.scheduling.starts import Starts
from jaxserve.scheduling.step_plan import StepPlan


class Prefills:
    """The prompts between two chunks, and what they leave to requests that start.

    Args:
        ledger: ledger of all requests.
        policy: policy that says how much of a step a prompt has.
        prompts: unfinished prompts.
        starts: start of requests.
    """

    def __init__(self, ledger: Ledger, policy: Policy, prompts: Prompts, starts: Starts) -> None:
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
        """Add rows to a plan that has those in decode.

        Args:
            plan: plan to add to.
            in_prefill_before: running rows between two chunks, in the order of classes and of admission; some may be
                preempted.
            decode_waits: True if any row in decode waits for this step.
            num_displaced: rows preempted by `preempt_lower_classes`, for requests of higher classes.
            max_tokens: most tokens of prompts, so that rows in decode get theirs in time.
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
        """Give rows in prefill of one class their first share, oldest first; returns whether one of them lacks pages.

        Args:
            rows: all rows in prefill; those behind `stop` are of lower classes.
            start: index of the first row of the class.
            stop: index behind its last.
            plan: plan to add to.
        """
        ledger, is_short = self._ledger, False
        own = [request for request in rows[start:stop] if request.status in RUNS]
        kept = _Kept(ledger, own, self._prompts.num_pages_kept - ledger.num_pages_to_grow)
        self._prompts.unfinished += own
        for index, request in enumerate(rows[start:stop], start):
            budget_left = self._prompts.budget_left(plan)
            if request.status not in RUNS or not budget_left:  # preempted for an older one
                continue
            wanted = self._policy.first_chunk(num_remaining(request), budget_left)
            ledger.store.release_unseen(request)
            kept.begin_turn(request)
            num_tokens = kept.num_affordable(request, wanted)
            while not num_tokens and (victim := _last_running(rows[index + 1 :])) is not None:
                if victim.priority == request.priority:
                    kept.forget(victim)
                ledger.preempt(victim, plan)
                num_tokens = kept.num_affordable(request, wanted)
            is_short |= num_tokens < wanted
            if num_tokens and ledger.allocate(request, num_tokens, plan):
                self._prompts.compute(self._prompts.add_row(request, plan), num_tokens, plan)
        self._prompts.settle()
        return is_short

    def _distribute_rest(self, plan: StepPlan, first_row: int, *, decode_waits: bool) -> None:
        """Give unfinished prompts that are in the plan what nobody else took, oldest first."""
        unfinished = self._prompts.unfinished
        row_of = dict(zip(plan.requests[first_row:], count(first_row), strict=False))
        kept = _Kept(self._ledger, unfinished)
        for request in unfinished:
            budget_left = self._prompts.budget_left(plan)
            if not budget_left:
                return
            kept.begin_turn(request)
            row = row_of.get(request)
            if row is None:
                continue
            wanted = self._policy.further_chunk(
                num_remaining(request), plan.counts[row], budget_left, decode_waits=decode_waits
            )
            num_tokens = kept.num_affordable(request, wanted)
            if num_tokens and self._ledger.allocate(request, num_tokens, plan):
                self._prompts.compute(row, num_tokens, plan)

    def _take_snapshots(self, plan: StepPlan, first_row: int) -> None:
        """Have rows from one on take snapshots of their states where they are worth it."""
        ledger = self._ledger
        if (states := ledger.store.states) is None:
            return
        for row in range(first_row, plan.num_rows):
            request, start = plan.requests[row], plan.starts[row]
            stop, num_known = start + plan.counts[row], request.num_tokens - plan.max_new[row]
            last = (num_known - 1) // ledger.page_size * ledger.page_size  # its last token is computed in any case
            num_tokens = next((place for place in (request.branch_tokens, last) if start < place <= stop), None)
            if num_tokens is None or request in ledger.store.unshared:
                continue
            entry = states.take(ledger.store.hashes(request)[num_tokens // ledger.page_size - 1])
            if entry is not None:
                plan.snapshots.append((row, num_tokens - start, entry))


class _Kept:
    """Pages kept from each prompt in turn, oldest first: for older prompts, and for decoding rows to grow.

    The sums go along with the turns: tokens may be appended to many rows at once, all of which are prompts then.

    Args:
        ledger: ledger of all requests.
        prompts: prompts whose turn comes.
        num_older_pages: pages kept for the rest of prompts before these.
    """

    def __init__(self, ledger: Ledger, prompts: Sequence[Request], num_older_pages: int = 0) -> None:
        self._ledger, self._size = ledger, ledger.groups.size
        self._num_older_pages = num_older_pages
        self._num_growing = sum(map(ledger.can_grow, prompts))  # prompts whose turn is now or later
        self._last: Request | None = None
        self._can_last_grow = False  # it could when its turn came

    def begin_turn(self, request: Request) -> None:
        """Go on to the next prompt."""
        ledger, last = self._ledger, self._last
        if last is not None:
            self._num_growing -= self._can_last_grow
            self._num_older_pages += ledger.num_pages_kept(last) - self._size * ledger.can_grow(last)
        self._last, self._can_last_grow = request, ledger.can_grow(request)

    def forget(self, request: Request) -> None:
        """Forget a prompt that is preempted before its turn."""
        self._num_growing -= self._ledger.can_grow(request)

    def num_affordable(self, request: Request, most: int) -> int:
        """Return the tokens that the prompt whose turn it is may have, and leave others the pages they need."""
        ledger, size = self._ledger, self._size
        num_kept = ledger.num_pages_to_grow + self._num_older_pages - size * self._num_growing
        num_blocks = (len(request.pages) + max(ledger.num_available - num_kept, 0)) // size
        return max(min(most, num_blocks * ledger.page_size - request.num_computed_tokens), 0)


def _last_running(rows: Sequence[Request]) -> Request | None:
    return next((request for request in reversed(rows) if request.status in RUNS), None)
