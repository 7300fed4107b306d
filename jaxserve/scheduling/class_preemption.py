"""Preemption for requests of a higher class, before a plan has any rows.

A waiting request need not wait for running requests of lower classes. If slots or pages are full, the last admitted
lowest-class request is preempted, then the next, until the waiting request can start in the current plan. A victim
loses no tokens: it moves to the head of its tenant's queue, its full pages stay cached until they are evicted, and it
continues from there. Preemption never happens in vain: if all rows of lower classes hold too few pages, or the request
would have to wait for prompts of its own class or for a slot of its LoRA adapter, nothing changes.
"""

from __future__ import annotations

from contextlib import closing

from jaxserve.scheduling.ledger import Ledger, in_prefill, num_remaining
from jaxserve.scheduling.policy import Policy
from jaxserve.scheduling.request import Request, RequestStatus
from jaxserve.scheduling.step_plan import StepPlan


def preempt_lower_classes(ledger: Ledger, policy: Policy, plan: StepPlan) -> None:
    """Preempt running lower-class requests until higher ones can continue, or start, in this plan.

    Args:
        ledger: a shard's requests and pages.
        policy: policy that chooses victims.
        plan: new plan without rows, which lists preempted requests.
    """
    running = ledger.running
    if len(ledger.num_running_of) > 1:
        for request in list(running.values()):
            if request.priority < ledger.lowest_priority and in_prefill(request):
                _preempt_for_prompt(request, ledger, policy, plan)
    if not ledger.waiting or not running or ledger.waiting.first_priority >= ledger.lowest_priority:
        return
    num_rows = len(running) - sum(map(in_prefill, running.values()))
    budget_left = max(ledger.max_num_batched_tokens - num_rows, policy.reserved_prefill_tokens)
    num_starts = num_pages = 0
    capacity: _ClassCapacity | None = None  # belongs to the current class
    ledger.waiting.settle()
    with closing(ledger.waiting.in_order()) as order:
        for request in ledger.adapters.startable(order):  # a row that gives way to another request would be in vain
            if not running or request.priority >= ledger.lowest_priority or request.num_pending_tokens:
                return
            if request.status is RequestStatus.LOADING:
                continue
            if capacity is None or capacity.priority != request.priority:
                capacity = _ClassCapacity(request.priority, ledger, policy)
            max_left = budget_left - capacity.num_prompt_tokens
            if max_left <= 0 or capacity.has_to_wait(request, max_left):
                return
            num_starts += 1
            num_pages += ledger.num_pages_taken(request) + ledger.groups.size  # plus a block to grow
            if not capacity.preempt_for(num_starts, num_pages, plan):
                return
            budget_left -= policy.first_chunk(request.num_tokens, max_left)


class _ClassCapacity:
    """Slots and pages that waiting requests in one class can get: free ones, and the rows of lower classes.

    All rows are counted once per class; each preemption then updates the counts.

    Args:
        priority: class of the waiting requests.
        policy: policy that chooses victims.

    Attributes:
        priority: class of the waiting requests.
        num_prompt_tokens: remaining tokens in unfinished prompts of this class and above.
    """

    def __init__(self, priority: int, ledger: Ledger, policy: Policy) -> None:
        self.priority, self._ledger, self._policy = priority, ledger, policy
        left = list(map(num_remaining, _unfinished_prompts(priority, ledger)))
        self.num_prompt_tokens = sum(left)
        self._num_unfinished, self._num_long = len(left), sum(map(policy.is_long, left))
        self._num_short = ledger.num_pages_short(1)
        self._num_kept = _num_pages_kept(priority, ledger)
        self._num_lower, self._num_freed = _count_lower(priority, ledger)

    def has_to_wait(self, request: Request, budget_left: int) -> bool:
        """Return whether a waiting request must wait for unfinished prompts, even if slots and pages are free.

        Args:
            request: waiting request.
            budget_left: tokens left in the step.
        """
        return request.num_tokens > self._policy.max_left_to_start(budget_left, self._num_unfinished, self._num_long)

    def preempt_for(self, num_starts: int, num_pages: int, plan: StepPlan) -> bool:
        """Preempt lower classes until enough slots and pages are free; return False, without a change, if there are too
        few.

        Args:
            num_starts: number of requests to start, each in a slot.
            num_pages: pages that they need.
            plan: new plan without rows.
        """
        ledger = self._ledger
        if len(ledger.free_slots) + self._num_lower < num_starts or self._num_free + self._num_freed < num_pages:
            return False
        while len(ledger.free_slots) < num_starts or self._num_free < num_pages:
            if not ledger.running or ledger.lowest_priority <= self.priority:
                return False
            victim = self._policy.victim(ledger.running)
            self._num_lower -= 1
            self._num_freed -= _num_pages_freed(victim, ledger)
            self._num_short -= ledger.num_pages_short(1, [victim])
            ledger.preempt(victim, plan)
        return True

    @property
    def _num_free(self) -> int:
        """Number of free pages after running rows got theirs in this plan, except those kept for rows and prompts."""
        ledger = self._ledger
        return ledger.num_available - self._num_short - ledger.num_pages_to_grow - self._num_kept


def _unfinished_prompts(priority: int, ledger: Ledger) -> list[Request]:
    """Return the running requests in this class or a higher one whose prompts are unfinished."""
    return [other for other in ledger.running.values() if other.priority <= priority and in_prefill(other)]


def _preempt_for_prompt(request: Request, ledger: Ledger, policy: Policy, plan: StepPlan) -> None:
    """Preempt rows in lower classes until enough pages are free for an unfinished prompt's next chunk."""
    num_tokens = policy.first_chunk(num_remaining(request), ledger.max_num_batched_tokens)
    num_wanted = ledger.groups.num_blocks(request.num_computed_tokens + num_tokens) * ledger.groups.size
    num_wanted -= len(request.pages)
    while num_wanted > _num_free_pages(ledger) and ledger.lowest_priority > request.priority:
        ledger.preempt(policy.victim(ledger.running), plan)


def fits_after_preemption(priority: int, num_starts: int, num_pages: int, ledger: Ledger) -> bool:
    """Return whether enough slots and pages would be free after preempting all rows in classes below `priority`.

    Args:
        priority: class for the requests to start.
        num_starts: number of requests to start.
        num_pages: pages that they need.
        ledger: a shard's requests and pages.
    """
    num_lower, num_freed = _count_lower(priority, ledger)
    num_free = _num_free_pages(ledger) - _num_pages_kept(priority, ledger) + num_freed
    return len(ledger.free_slots) + num_lower >= num_starts and num_free >= num_pages


def _count_lower(priority: int, ledger: Ledger) -> tuple[int, int]:
    """Return the number of running rows in classes below `priority`, and the pages that preempting them frees."""
    lower = [other for other in ledger.running.values() if other.priority > priority]
    return len(lower), sum(_num_pages_freed(other, ledger) for other in lower)


def _num_pages_freed(request: Request, ledger: Ledger) -> int:
    """Return the number of pages that preempting a row frees: its own, a block that it would need in this plan, and a
    block kept for its growth.
    """
    return len(request.pages) + 2 * ledger.groups.size


def _num_pages_kept(priority: int, ledger: Ledger) -> int:
    """Return the number of pages kept for unfinished prompts in this class or higher ones, beyond blocks to grow."""
    return sum(map(ledger.num_prompt_pages_kept, _unfinished_prompts(priority, ledger)))


def _num_free_pages(ledger: Ledger) -> int:
    """Return the number of free pages after all running rows got theirs in this plan and kept a block to grow."""
    return ledger.num_available - ledger.num_pages_short(1) - ledger.num_pages_to_grow
