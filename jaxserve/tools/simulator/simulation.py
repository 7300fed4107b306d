"""Simulation: the engine's balancer and replicas, driven by a trace in virtual time.

Time passes from one event to the next: a request arrives, or a replica's dispatch ends. Host work takes no time. The
result is a function of the trace and the sizes only.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from struct import pack
from typing import TYPE_CHECKING

from jaxserve.api.sampling_params import SamplingParams
from jaxserve.errors import RequestError
from jaxserve.scheduling.balancer import Balancer
from jaxserve.scheduling.request import Request
from jaxserve.tools.simulator.replica import Balancing, Chooser, Dispatch, SimulatedReplica, UntilFirstEnd
from jaxserve.tools.simulator.summary import Totals

if TYPE_CHECKING:
    from jaxserve.core.events import Record
    from jaxserve.scheduling.schedule_config import ScheduleConfig
    from jaxserve.tools.simulator.step_times import StepTimes
    from jaxserve.tools.simulator.traces import TracedRequest

_PARAMS = SamplingParams(max_tokens=None, ignore_eos=True)


@dataclass(frozen=True)
class Limits:
    """Admission limits, as in a server's options of the same names.

    Attributes:
        max_queued_requests: waiting requests at which new ones are refused.
        max_queued_tokens: uncomputed waiting tokens at which new ones are refused.
    """

    max_queued_requests: int | None = None
    max_queued_tokens: int | None = None


@dataclass(slots=True)
class _Progress:
    """An unfinished request's times."""

    arrival_s: float
    latest_s: float = -1.0  # its latest token's time; negative before the first
    first_s: float = -1.0  # its first token's time


class Simulation:
    """Replicas behind a balancer.

    Args:
        schedule: each replica's step and pool sizes.
        times: step times, shared by all replicas.
        num_replicas: replica count.
        limits: admission limits.
        chooser: chooses the limits of each plan.
        step_ahead: True to plan a step while the previous one runs.
        shares_prefixes: False to disable the prefix cache.
        record: called with replica 0's events, for a log.
        new_balancer: creates the policy that chooses replicas; the engine's by default.

    Attributes:
        replicas: the replicas.
        totals: figures so far.
        now_s: virtual time.
        ending: index of the replica whose dispatch has ended last.
    """

    def __init__(
        self,
        schedule: ScheduleConfig,
        times: StepTimes,
        num_replicas: int = 1,
        *,
        limits: Limits = Limits(),
        chooser: Chooser | None = None,
        step_ahead: bool = True,
        shares_prefixes: bool = True,
        record: Record | None = None,
        new_balancer: Callable[[Simulation], Balancing] | None = None,
    ) -> None:
        chooser, max_in_flight = chooser or UntilFirstEnd(), 2 if step_ahead else 1
        self._touched: dict[int, None] = {}
        self.replicas = [
            SimulatedReplica(
                schedule, times, chooser, max_in_flight, None if index else record, index, touched=self._touched
            )
            for index in range(num_replicas)
        ]
        self.totals = Totals(num_replicas * schedule.num_pages)
        self.now_s, self.ending = 0.0, 0
        self._schedule, self._limits, self._shares_prefixes = schedule, limits, shares_prefixes
        self._balancer: Balancing = Balancer(self.replicas, {}) if new_balancer is None else new_balancer(self)
        self._progress: dict[str, _Progress] = {}
        self._ends: list[tuple[float, int]] = []  # heap of dispatch ends; a cut dispatch leaves an outdated end
        self._arrival = 0
        self._on_end: Callable[[int, float, float], None] | None = None

    def run(
        self,
        trace: Iterable[TracedRequest],
        on_progress: Callable[[Simulation], None] | None = None,
        on_end: Callable[[int, float, float], None] | None = None,
    ) -> Totals:
        """Serve a trace; return the totals.

        Args:
            trace: requests, sorted by arrival.
            on_progress: called after each arrival.
            on_end: called when a request has ended, with its number in the trace and the times of its first and last
                tokens.
        """
        self._on_end = on_end
        arrivals = iter(trace)
        arriving = next(arrivals, None)
        if arriving is not None:
            self.now_s = arriving.arrival_s
            self.totals.start(self.now_s)
        while arriving is not None or self._ends:
            if arriving is not None and (not self._ends or arriving.arrival_s <= self._ends[0][0]):
                self._advance(arriving.arrival_s)
                self._arrive(arriving)
                if on_progress is not None:
                    on_progress(self)
                arriving = next(arrivals, None)
                if arriving is not None and arriving.arrival_s == self.now_s:
                    continue  # requests that arrive together are routed together
                self._continue()
                continue
            end_s, index = heapq.heappop(self._ends)
            if self.replicas[index].next_end_s == end_s:
                self._advance(end_s)
                self._read(index)
                self._continue(index)
        assert not self._progress, "all requests end"
        self.totals.close(self.now_s)
        return self.totals

    @property
    def num_waiting(self) -> int:
        """Number of requests without pages, in all queues."""
        return self._balancer.num_queued + sum(replica.scheduler.num_waiting for replica in self.replicas)

    def _advance(self, to_s: int | float) -> None:
        """Advance the virtual time."""
        self.totals.passed(self.now_s, to_s)
        self.now_s = to_s

    def _arrive(self, traced: TracedRequest) -> None:
        """Queue a request, unless it is refused."""
        number = self._arrival
        self._arrival += 1
        request = self._request(number, traced)
        self.totals.arrived(traced.tenant, traced.priority)
        try:
            self.replicas[0].scheduler.check_fits(request)
        except RequestError:
            self.totals.num_too_long += 1
            return
        if self._is_full():
            self.totals.refused(traced.tenant, traced.priority)
            return
        self.totals.queued()
        self._progress[request.request_id] = _Progress(traced.arrival_s)
        self._balancer.add([request])

    def _is_full(self) -> bool:
        """Return whether a server would refuse a request that arrives now."""
        limits = self._limits
        if limits.max_queued_requests is not None and self.num_waiting >= limits.max_queued_requests:
            return True
        if limits.max_queued_tokens is None:
            return False
        on_replicas = sum(replica.scheduler.num_waiting_tokens for replica in self.replicas)
        return self._balancer.num_queued_tokens + on_replicas >= limits.max_queued_tokens

    def _request(self, number: int, traced: TracedRequest) -> Request:
        """Return a request whose pages are named by the trace's blocks, so that no tokens are hashed.

        All tokens are its number, so that no other request has the same last ones.
        """
        page_size, prompt_len = self._schedule.page_size, traced.prompt_len
        prompt = [number] * prompt_len
        ends = range(page_size, prompt_len + 1, page_size)
        if traced.blocks and self._shares_prefixes:
            blocks, size = traced.blocks, traced.block_len
            hashes = [pack("qq", blocks[(end - 1) // size], end) for end in ends]
        else:
            hashes = [pack("qq", -1 - number, end) for end in ends]
        return Request(
            str(number),
            prompt,
            _PARAMS,
            seed=0,
            max_total_tokens=prompt_len + traced.output_len,
            key=number,
            arrival=number,
            arrival_s=traced.arrival_s,
            priority=traced.priority,
            tenant=traced.tenant,
            page_hashes=hashes,
        )

    def _continue(self, ended: int | None = None) -> None:
        """Route queued requests, and plan on the replica whose dispatch has ended and on replicas that got requests.

        Args:
            ended: index of the replica whose dispatch has ended; None after an arrival.
        """
        self._balancer.dispatch()
        touched = sorted(self._touched)
        self._touched.clear()
        for index in touched if ended is None or ended in touched else [ended, *touched]:
            replica = self.replicas[index]
            before = replica.next_end_s
            for plan in replica.plan(self.now_s):
                self.totals.planned(plan)
            after = replica.next_end_s
            if after is not None and (after != before or index == ended):
                heapq.heappush(self._ends, (after, index))
            self.totals.pages_used(index, replica.scheduler.num_pages_used)

    def _read(self, index: int) -> None:
        """End a replica's oldest dispatch, and note when its tokens came."""
        self.ending = index
        dispatch, sampled, ended = self.replicas[index].update()
        self._note_tokens(dispatch, sampled)
        for request in ended:
            self._balancer.finish(request)
            progress = self._progress.pop(request.request_id)
            self.totals.ended_request(
                request, progress.latest_s - progress.arrival_s, request.num_tokens - request.num_prompt_tokens
            )
            if self._on_end is not None:
                self._on_end(request.key, progress.first_s, progress.latest_s)

    def _note_tokens(self, dispatch: Dispatch, sampled: Sequence[list[int]]) -> None:
        """Note when a dispatch's tokens came.

        Args:
            dispatch: dispatch that has ended.
            sampled: tokens by row.
        """
        totals, ends_s, progress_by_id = self.totals, dispatch.ends_s, self._progress
        first_s, num_later = ends_s[0], [0] * len(ends_s)
        totals.ran(dispatch.starts_s, ends_s)
        now = totals.timeline.now
        for request, token_ids in zip(dispatch.plan.requests, sampled, strict=True):
            num_tokens = len(token_ids)
            if not num_tokens:
                continue
            progress = progress_by_id[request.request_id]
            if progress.latest_s < 0:
                progress.first_s = first_s
                totals.began(request, first_s - progress.arrival_s)
            else:
                now.itl_s.add(first_s - progress.latest_s)
            progress.latest_s = ends_s[num_tokens - 1]
            num_later[num_tokens - 1] += 1
            now.num_output_tokens += num_tokens
        num_rows = 0
        for step in range(len(ends_s) - 1, 0, -1):
            num_rows += num_later[step]
            if num_rows:
                now.itl_s.add(ends_s[step] - ends_s[step - 1], num_rows)
