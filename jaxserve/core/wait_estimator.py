"""WaitEstimator: the uncomputed work in an engine, and how long a new request would wait for it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, TypeVar

from jaxserve.core.events import Submitted
from jaxserve.scheduling.wait_estimate import OutputLengths, SchedulerSizes, Wait, Work, estimate_wait, remaining_work

if TYPE_CHECKING:
    from jaxserve.core.core import EngineCore
    from jaxserve.core.replica import Replica
    from jaxserve.scheduling.request import Request
    from jaxserve.scheduling.step_time import Rates

Item = TypeVar("Item")


class WaitEstimator:
    """Estimates of waiting work and times, from the state of a core that another thread may be changing.

    Its values may come from two moments, one step apart, which is within the estimate's error.

    Attributes:
        lengths: distribution of output lengths.
    """

    def __init__(self, core: EngineCore) -> None:
        self._core = core
        self.lengths = OutputLengths()

    def num_waiting_tokens(self) -> int:
        """Return the number of tokens known to be uncomputed in all waiting requests, in all queues."""
        return self._core.num_waiting_tokens + sum(request.num_tokens for request in self._sent())

    def wait(self, num_tokens: int = 1, priority: int | None = None) -> Wait | None:
        """Return how long a request that arrives now would wait, on the best replica; None before steps were measured.

        Args:
            num_tokens: tokens in its prompt.
            priority: its class, which overtakes or preempts lower classes; None if it can do neither.
        """

        def is_ahead(request: Request) -> bool:
            return priority is None or request.priority <= priority

        later = [request for request in _copied(lambda: self._core.queued) + self._sent() if is_ahead(request)]
        replicas = self._core.replicas
        estimates = (
            self._wait_in(replica, later[index :: len(replicas)], num_tokens, is_ahead)
            for index, replica in enumerate(replicas)
        )
        waits = [wait for wait in estimates if wait is not None]
        return min(waits, key=lambda wait: wait.first_token_s, default=None)

    def prefill_s(self, num_tokens: int) -> float:
        """Return the time in seconds that a prompt of `num_tokens` adds to one single-token step of an idle engine."""
        return prefill_s(num_tokens, self.rates(), self._core.replicas[0].scheduler.max_prompt_tokens)

    def rates(self) -> Rates | None:
        """Return a replica's step times; None before any were measured."""
        found = (replica.step_stats.step_time.rates() for replica in self._core.replicas)
        return next((rates for rates in found if rates is not None), None)

    def _sent(self) -> list[Request]:
        """Return the submitted requests that the core has not taken from its inbox yet."""
        events = _copied(lambda: list(self._core.inbox))
        return [request for event in events if isinstance(event, Submitted) for request in event.requests]

    def _wait_in(
        self, replica: Replica, later: Sequence[Request], num_tokens: int, is_ahead: Callable[[Request], bool]
    ) -> Wait | None:
        """Estimate a new request's wait in one replica; None before its first steps were measured.

        Args:
            replica: the replica.
            later: earlier requests that have not reached the replica's scheduler yet.
            num_tokens: tokens in the new request's prompt.
            is_ahead: function that returns whether a request is served before the new one.
        """
        step_time, scheduler = replica.step_stats.step_time, replica.scheduler
        rates = step_time.rates()
        if rates is None:
            return None
        # Lower classes can be preempted.
        running = remaining_work(filter(is_ahead, _copied(lambda: scheduler.running)), self.lengths)
        first = [request for request in _copied(lambda: scheduler.waiting) if is_ahead(request)]
        waiting = remaining_work([*first, *later], self.lengths, step_time.cached_fraction)
        num_requests = len(running) + len(waiting) + 1  # at most this many data-parallel shards have a request
        mean = sum(sum(work) for work in running + waiting) / max(num_requests - 1, 1)
        schedule, groups = scheduler.sizes, scheduler.sizes.kv_groups
        tokens_per_page = mean / groups.num_pages(int(mean)) if groups.sliding and mean >= 1 else 0.0
        sizes = SchedulerSizes(
            num_slots=schedule.max_num_seqs,
            num_batched_tokens=min(schedule.max_num_batched_tokens, scheduler.max_prompt_tokens * num_requests),
            num_kv_tokens=schedule.num_pages * (tokens_per_page or groups.page_size / groups.size),
            page_size=groups.page_size,
            long_threshold=scheduler.policy.long_threshold,
            long_chunk=scheduler.policy.long_chunk,
        )
        return estimate_wait(rates, sizes, running, waiting, Work(float(max(num_tokens, 1)), 1.0))


def prefill_s(num_tokens: int, rates: Rates | None, max_step_tokens: int) -> float:
    """Return the time in seconds that a prompt adds to one single-token step of an idle engine; 0 if unknown.

    Args:
        num_tokens: tokens in the prompt.
        rates: step times; None if unknown.
        max_step_tokens: maximum prompt tokens per step.
    """
    if rates is None:
        return 0.0
    return num_tokens * rates.prefill_token_s + (num_tokens - 1) // max_step_tokens * rates.prefill_step_s


def _copied(read: Callable[[], list[Item]]) -> list[Item]:
    """Return the result of `read`, which copies a collection that another thread may be changing.

    It is called again if the collection changed meanwhile, a few times; then the result is empty.
    """
    for _ in range(8):
        try:
            return read()
        except RuntimeError:  # changed while it was copied
            continue
    return []
