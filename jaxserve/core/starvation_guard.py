"""Backlog: the work that an engine has before it, and how long a request would wait behind it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, TypeVar

from jaxserve.core.events import Submitted
from jaxserve.scheduling.wait_estimate import OutputLengths, Sizes, Wait, Work, estimate_wait, remaining_work

if TYPE_CHECKING:
    from jaxserve.core.core import EngineCore
    from jaxserve.core.replica import Replica
    from jaxserve.scheduling.request import Request
    from jaxserve.scheduling.step_time import Rates

Item = TypeVar("Item")


class Backlog:
    """Estimates from the state of a core, which another thread may be changing meanwhile.

    What is read may be of two moments, a step apart, which is no more than an estimate is wrong by anyway.

    Args:
        core: the core.

    Attributes:
        lengths: lengths of outputs that have ended.
    """

    def __init__(self, core: EngineCore) -> None:
        self._core = core
        self.lengths = OutputLengths()

    def num_waiting_tokens(self) -> int:
        """Return the tokens to compute of requests that wait, in all queues, as far as is known."""
        return self._core.num_waiting_tokens + sum(request.num_tokens for request in self._sent())

    def wait(self, num_tokens: int = 1, priority: int | None = None) -> Wait | None:
        """Return how long a request that came now would wait; None before the first steps were measured.

        Args:
            num_tokens: tokens of its prompt.
            priority: its class: it overtakes or preempts requests of lower classes; None if it can do neither.
        """

        def is_ahead(request: Request) -> bool:
            return priority is None or request.priority <= priority

        waits = []
        later = [request for request in _copied(lambda: self._core.queued) + self._sent() if is_ahead(request)]
        replicas = self._core.replicas
        for index, replica in enumerate(replicas):
            wait = self._wait_in(replica, later[index :: len(replicas)], num_tokens, is_ahead)
            if wait is not None:
                waits.append(wait)
        return min(waits, key=lambda wait: wait.first_token_s, default=None)

    def prefill_s(self, num_tokens: int) -> float:
        """Return the time that a prompt takes beyond a step of one token, where nothing else is computed."""
        return prefill_s(num_tokens, self.rates(), self._core.replicas[0].scheduler.max_prompt_tokens)

    def rates(self) -> Rates | None:
        """Return the step times of a replica; None before any were measured."""
        found = (replica.step_stats.step_time.rates() for replica in self._core.replicas)
        return next((rates for rates in found if rates is not None), None)

    def _sent(self) -> list[Request]:
        events = _copied(lambda: list(self._core.inbox))
        return [request for event in events if isinstance(event, Submitted) for request in event.requests]

    def _wait_in(
        self, replica: Replica, later: Sequence[Request], num_tokens: int, is_ahead: Callable[[Request], bool]
    ) -> Wait | None:
        step_time, scheduler = replica.step_stats.step_time, replica.scheduler
        rates = step_time.rates()
        if rates is None:
            return None
        # Those of lower classes give way.
        running = remaining_work(filter(is_ahead, _copied(lambda: scheduler.running)), self.lengths)
        first = [request for request in _copied(lambda: scheduler.waiting) if is_ahead(request)]
        waiting = remaining_work([*first, *later], self.lengths, step_time.cached_fraction)
        num_requests = len(running) + len(waiting) + 1  # where rows are divided, so many shards have any at most
        mean = sum(sum(work) for work in running + waiting) / max(num_requests - 1, 1)
        schedule, groups = scheduler.sizes, scheduler.sizes.kv_groups
        tokens_per_page = mean / groups.num_pages(int(mean)) if groups.sliding and mean >= 1 else 0.0
        sizes = Sizes(
            num_slots=schedule.max_num_seqs,
            num_batched_tokens=min(schedule.max_num_batched_tokens, scheduler.max_prompt_tokens * num_requests),
            num_kv_tokens=schedule.num_pages * (tokens_per_page or groups.page_size / groups.size),
            page_size=groups.page_size,
            long_threshold=scheduler.policy.long_threshold,
            long_chunk=scheduler.policy.long_chunk,
        )
        return estimate_wait(rates, sizes, running, waiting, Work(float(max(num_tokens, 1)), 1.0))


def prefill_s(num_tokens: int, rates: Rates | None, max_step_tokens: int) -> float:
    """Return the time that a prompt takes beyond a step of one token, where nothing else is computed.

    Args:
        num_tokens: tokens of the prompt.
        rates: times of steps; None if they are not known.
        max_step_tokens: most tokens of a prompt in a step.
    """
    if rates is None:
        return 0.0
    return num_tokens * rates.prefill_token_s + (num_tokens - 1) // max_step_tokens * rates.prefill_step_s


def _copied(read: Callable[[], list[Item]]) -> list[Item]:
    """Return what `read` copies of a collection that another thread may be changing, which it may notice."""
    for _ in range(8):
        try:
            return read()
        except RuntimeError:  # changed while it was copied
            continue
    return []
