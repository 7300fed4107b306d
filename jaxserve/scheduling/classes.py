"""Preemption for requests of a higher class, before a plan has any rows.

A waiting request whose class is above that of running ones does not wait for them: where slots or pages are full, the
last admitted of the lowest class gives way, then the next, until the request can start in the plan that is being made.
A victim loses no tokens. It goes to the head of its tenant's queue, its full pages stay in the prefix cache as long as
nobody needs them, and it is computed again from there. Nobody gives way in vain: where all rows of lower classes have
too few pages, or the request would have to wait for prompts of its own class, nothing changes.
"""

from __future__ import annotations

from contextlib import closing

from jaxserve.request import Request, RequestStatus
from jaxserve.scheduling.ledger import Ledger, in_prefill, num_remaining
from jaxserve.scheduling.plan import StepPlan
from jaxserve.scheduling.policy import Policy


def make_room(ledger: Ledger, policy: Policy, plan: StepPlan) -> None:
    """Preempt running requests of lower classes until those of higher classes can go on, or start, in this plan."""
    running = ledger.running
    if len(ledger.num_running_of) > 1:
        for request in list(running.values()):
            if request.priority < ledger.lowest_priority and in_prefill(request):
                _let_go_on(request, ledger, policy, plan)
    if not ledger.waiting or not running or ledger.waiting.first_priority >= ledger.lowest_priority:
        return
    num_rows = len(running) - sum(map(in_prefill, running.values()))
    budget_left = max(ledger.max_num_batched_tokens - num_rows, policy.prefill_share)
    num_starts = num_pages = 0
    ledger.waiting.settle()
    with closing(ledger.waiting.in_order()) as order:
        for request in order:
            if not running or request.priority >= ledger.lowest_priority or request.num_pending_tokens:
                return
            if request.status is RequestStatus.LOADING:
                continue
            unfinished = _prompts_before(request.priority, ledger)
            most_left = budget_left - sum(map(num_remaining, unfinished))
            if most_left <= 0 or _must_wait(request, unfinished, most_left, policy):
                return
            num_starts += 1
            num_pages += ledger.num_pages_taken(request) + ledger.groups.size  # and a column to grow
            if not _yield_to(request, num_starts, num_pages, ledger, policy, plan):
                return
            budget_left -= policy.first_share(request.num_tokens, most_left)


def _prompts_before(priority: int, ledger: Ledger) -> list[Request]:
    """Unfinished prompts of a class or above."""
    return [other for other in ledger.running.values() if other.priority <= priority and in_prefill(other)]


def _must_wait(request: Request, unfinished: list[Request], budget_left: int, policy: Policy) -> bool:
    """Return whether a request must wait for unfinished prompts of its class or above, whatever is free."""
    num_long = sum(policy.is_long(num_remaining(other)) for other in unfinished)
    return request.num_tokens > policy.most_left_to_start(budget_left, len(unfinished), num_long)


def _let_go_on(request: Request, ledger: Ledger, policy: Policy, plan: StepPlan) -> None:
    """Preempt rows of classes below that of an unfinished prompt until it has the pages of its next share."""
    num_tokens = policy.first_share(num_remaining(request), ledger.max_num_batched_tokens)
    num_wanted = ledger.groups.num_columns(request.num_computed_tokens + num_tokens) * ledger.groups.size
    num_wanted -= len(request.pages)
    while num_wanted > _num_free_pages(ledger) and ledger.lowest_priority > request.priority:
        ledger.preempt(policy.victim(ledger.running), plan)


def _yield_to(
    request: Request, num_starts: int, num_pages: int, ledger: Ledger, policy: Policy, plan: StepPlan
) -> bool:
    """Preempt rows of classes below that of a request until there are slots and pages; False, and no change, if vain.

    Args:
        request: request of a higher class.
        num_starts: slots that it and those before it need.
        num_pages: pages that they take.
        ledger: all requests.
        policy: policy that chooses the victims.
        plan: plan being made.
    """
    num_kept = _num_kept(request.priority, ledger)

    def has_room() -> bool:
        return len(ledger.free_slots) >= num_starts and _num_free_pages(ledger) - num_kept >= num_pages

    if not has_room() and not would_yield(request.priority, num_starts, num_pages, ledger):
        return False
    while not has_room():
        if not ledger.running or ledger.lowest_priority <= request.priority:
            return False
        ledger.preempt(policy.victim(ledger.running), plan)
    return True


def would_yield(priority: int, num_starts: int, num_pages: int, ledger: Ledger) -> bool:
    """Return whether so many slots and pages are free when all rows of classes below one have given way."""
    lower = [other for other in ledger.running.values() if other.priority > priority]
    num_freed = sum(len(other.pages) + 2 * ledger.groups.size for other in lower)
    num_free = _num_free_pages(ledger) - _num_kept(priority, ledger) + num_freed
    return len(ledger.free_slots) + len(lower) >= num_starts and num_free >= num_pages


def _num_kept(priority: int, ledger: Ledger) -> int:
    """Pages that the rest of unfinished prompts of a class, or above, takes beyond what is kept for them to grow."""
    prompts, size = _prompts_before(priority, ledger), ledger.groups.size
    return sum(ledger.num_pages_kept(other) - size * ledger.can_grow(other) for other in prompts)


def _num_free_pages(ledger: Ledger) -> int:
    """Pages left when running rows have got what they need in this plan, and what is kept for them to grow."""
    return ledger.num_available - ledger.num_pages_short(1) - ledger.num_pages_to_grow
