"""DecodePlanner: gives decoding rows their next token, before any prompt gets tokens."""

from __future__ import annotations

from collections.abc import Sequence
from operator import attrgetter

from jaxserve.scheduling.ledger import Ledger, in_prefill
from jaxserve.scheduling.policy import Policy
from jaxserve.scheduling.request import Request, RequestStatus
from jaxserve.scheduling.step_plan import StepPlan


class DecodePlanner:
    """Planner for decoding rows. Beyond a limit they take turns at being held back, so that prompts progress.

    Args:
        ledger: waiting and running requests, and their pages.
        policy: policy that reserves tokens for prompts and chooses victims.
        num_spare_tokens: number of tokens that a row with drafts may compute and discard, beyond the sampled ones.
    """

    def __init__(self, ledger: Ledger, policy: Policy, num_spare_tokens: int) -> None:
        self._ledger, self._policy, self._num_spare_tokens = ledger, policy, num_spare_tokens
        self._num_slots = len(ledger.free_slots)
        # maximum decoding rows while prompts wait
        self._decode_limit = ledger.max_num_batched_tokens - policy.reserved_prefill_tokens
        self._next_held_slot = 0  # slot from which rows are held back next

    def feasible_steps(self, limit: int, num_drafts: Sequence[int], *, has_queue: bool) -> int:
        """Return the number of decode steps that the free pages allow in one plan; 0 unless all rows are decoding.

        While requests wait, the first row that ends limits the steps, because a request could take its slot; if a
        request could start immediately, the number is 0.

        Args:
            limit: maximum number of steps.
            num_drafts: number of tokens to draft by slot; empty for a plan without drafts.
            has_queue: True if requests wait in the balancer.
        """
        ledger = self._ledger
        num_tokens, num_spare = 1 + max(num_drafts, default=0), self._num_spare_tokens if num_drafts else 0
        if not ledger.running or (ledger.waiting and ledger.free_slots) or ledger.num_prefill_tokens:
            return 0
        num_steps = min(limit, -(-min(self._left()) // num_tokens)) if ledger.waiting or has_queue else limit
        while num_steps and ledger.num_pages_short(num_steps * num_tokens + num_spare) > ledger.num_available:
            num_steps //= 2
        return num_steps

    def steps_left(self, num_drafts: Sequence[int]) -> int:
        """Return the number of steps until the last row ends, the minimum if rows draft; 0 without rows.

        Args:
            num_drafts: number of tokens to draft by slot; empty for steps without drafts.
        """
        return -(-max(self._left(), default=0) // (1 + max(num_drafts, default=0)))

    def _left(self) -> list[int]:
        """Return the number of tokens that each running row may still sample."""
        return [request.max_total_tokens - request.num_tokens for request in self._ledger.running.values()]

    def rows_to_hold_back(self) -> list[Request]:
        """Return the decoding rows to hold back in this plan, so that prompts get tokens; empty without prompts.

        Rows take turns.
        """
        ledger = self._ledger
        if len(ledger.running) <= self._decode_limit:
            return []
        rows = ledger.running.values()
        if not (ledger.waiting and ledger.free_slots) and not any(map(in_prefill, rows)):
            return []
        # Rows at their length limit compute nothing more: see `_can_decode`.
        decoding = [
            row
            for row in rows
            if row.status is RequestStatus.RUNNING and not in_prefill(row) and row.num_tokens < row.max_total_tokens
        ]
        decoding.sort(key=lambda request: (request.slot - self._next_held_slot) % self._num_slots)
        return decoding[: max(len(decoding) - self._decode_limit, 0)]

    def schedule(self, plan: StepPlan, held_back: list[Request], num_drafts: Sequence[int]) -> list[Request]:
        """Add the decoding rows to a plan; return the rows still in prefill, ordered by class and admission.

        If a row's pages do not fit, the request last admitted in the lowest class is preempted. It may be the row
        itself, or a returned one.

        Args:
            plan: empty plan with its number of steps.
            held_back: rows that miss this step.
            num_drafts: number of tokens to draft by slot; empty for a plan without drafts.
        """
        num_steps, rows_in_prefill = plan.num_steps, []
        num_spare = self._num_spare_tokens if num_drafts else 0
        requests, starts, limit = plan.requests, plan.starts, num_steps
        for request in self._rows(held_back):
            if num_drafts:
                limit = num_steps * (1 + num_drafts[request.slot])
            start = request.num_computed_tokens
            stop = start + limit
            if stop > request.quiet_until:
                if request.status is RequestStatus.BLOCKED and not (plan.is_split and may_sample_late(request)):
                    continue
                num_tokens = request.num_tokens
                if num_tokens - start > 1 or (request.images and in_prefill(request)):
                    rows_in_prefill.append(request)
                    continue
                num_new = min(limit, request.max_total_tokens - num_tokens)
                if request.waits_for_tokens or self._ledger.must_end_at_prompt(request):
                    num_new = min(num_new, 1)
                if not self._can_decode(request, num_new, plan, num_spare):
                    continue
                stop = start + num_new
            request.num_computed_tokens = stop
            requests.append(request)
            starts.append(start)
        plan.num_decode_tokens = plan.num_rows
        plan.counts = [1] * plan.num_rows
        plan.max_new = [1] * plan.num_rows
        if num_steps > 1 or num_drafts:
            plan.max_new = [r.num_computed_tokens - start for r, start in zip(requests, starts, strict=True)]
        if num_drafts:
            plan.num_drafts = [num_drafts[request.slot] for request in plan.requests]
        return rows_in_prefill

    def _rows(self, held_back: list[Request]) -> list[Request]:
        """Return the rows that are not held back, by class and admission; release unseen pages of held-back rows."""
        rows = list(self._ledger.running.values())
        if len(self._ledger.num_running_of) > 1:  # the lowest class last: its rows may be preempted
            rows.sort(key=attrgetter("priority"))
        if held_back:
            held = set(held_back)
            rows = [request for request in rows if request not in held]
            for request in held_back:  # release now, so that prompts can use the pages even if these rows get no token
                self._ledger.store.release_unseen(request)
        return rows

    def schedule_held_back(self, plan: StepPlan, held_back: list[Request]) -> None:
        """Give held-back rows the budget that prompts left over, beginning with those whose turn comes last.

        Preempts nobody: all others may have rows in this plan already.
        """
        num_missing = len(held_back)
        for request in reversed(held_back):
            if plan.num_tokens == self._ledger.max_num_batched_tokens:
                break
            num_missing -= 1
            ledger = self._ledger
            has_page = ledger.num_pages_short(1, [request]) <= ledger.num_available
            has_page &= not ledger.must_wait_to_compact(request, plan)
            num_new = min(1, request.max_total_tokens - request.num_tokens)
            if request.status is RequestStatus.RUNNING and has_page and self._can_decode(request, num_new, plan):
                plan.requests.append(request)
                plan.starts.append(request.num_computed_tokens)
                plan.counts.append(1)
                plan.max_new.append(1)
                plan.num_decode_tokens += 1
                request.num_computed_tokens += 1
        if num_missing:
            self._next_held_slot = (held_back[num_missing - 1].slot + 1) % self._num_slots

    def _can_decode(self, request: Request, num_new: int, plan: StepPlan, num_spare: int = 0) -> bool:
        """Allocate a decoding row's pages and set its `quiet_until`; return False if it gets no token in this plan.

        Args:
            request: decoding row.
            num_new: maximum tokens that the row samples; below 1 if a token on the device already reaches its limit, so
                that the next update ends it.
            plan: current plan.
            num_spare: further tokens that the row may compute and discard.
        """
        if num_new < 1:
            return False
        max_computed, num_tokens = request.max_total_tokens - 1, num_new
        if num_spare:
            num_tokens = max(min(num_new + num_spare, max_computed - request.num_computed_tokens), num_new)
        ledger = self._ledger
        if ledger.groups.releases_pages:
            ledger.store.release_unseen(request)
        while not ledger.allocate(request, num_tokens, plan):  # preempt until the row's pages fit
            victim = self._policy.victim(ledger.running)
            ledger.preempt(victim, plan)
            if victim is request:  # never the oldest request, which fits the pool by itself: progress is guaranteed
                return False
        if request.params.logprobs is not None:
            plan.wants_logprobs = True
        elif not request.waits_for_tokens and not ledger.num_pages_to_copy(request):
            # Spare tokens have pages although only steps with drafts compute them.
            request.quiet_until = min(ledger.num_tokens_held(request), max_computed) - self._num_spare_tokens
        if request.waits_for_tokens:
            request.status = RequestStatus.BLOCKED
        return True


def may_sample_late(request: Request) -> bool:
    """Return whether a blocked row can compute its latest token before the host has read this token."""
    return request.status is RequestStatus.BLOCKED and not request.may_be_extended
