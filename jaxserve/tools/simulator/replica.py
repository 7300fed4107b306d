"""SimulatedReplica: a scheduler whose steps take predicted times.

A dispatch of decoding rows has several steps while nothing but counts can change: up to the first row that ends. If a
request arrives meanwhile, the dispatch is cut after the steps that an engine would already have planned, so that tokens
come at the same times as from single steps.
"""

from __future__ import annotations

from bisect import bisect_right
from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol, runtime_checkable

from jaxserve.core.events import Added, Finished, Record, Scheduled, Updated, Withdrawn
from jaxserve.scheduling.request import FinishReason, Request
from jaxserve.scheduling.scheduler import Scheduler
from jaxserve.scheduling.shard_view import ShardView
from jaxserve.scheduling.step_plan import StepChoice, StepPlan, StepShape

if TYPE_CHECKING:
    from jaxserve.scheduling.schedule_config import ScheduleConfig
    from jaxserve.tools.simulator.step_times import StepTimes

MAX_STEPS = 64  # maximum steps per dispatch: more would take pages long before their tokens are computed
TOKEN = 0  # token that every row samples


@runtime_checkable
class Chooser(Protocol):
    """Policy that chooses the limits of each plan."""

    def choose(self, scheduler: Scheduler, now_s: float) -> StepChoice:
        """Return the limits of the next plan of a scheduler at a time in seconds."""


@runtime_checkable
class Balancing(Protocol):
    """Policy that gives requests to replicas; the engine's is `Balancer`."""

    num_queued_tokens: int  # uncomputed tokens of requests without a replica

    @property
    def num_queued(self) -> int:
        """Number of requests without a replica."""

    def add(self, requests: Iterable[Request]) -> None:
        """Take new requests, for now or for later."""

    def dispatch(self) -> None:
        """Give requests to replicas after an arrival or the end of a step."""

    def finish(self, request: Request) -> None:
        """Forget a request that has ended."""


class UntilFirstEnd:
    """Chooser of the maximum steps in which no row ends."""

    def choose(self, scheduler: Scheduler, now_s: float) -> StepChoice:
        """Return the limits of the next plan."""
        left = min([request.max_total_tokens - request.num_tokens for request in scheduler.running], default=1)
        return StepChoice(max(min(left, MAX_STEPS), 1))


@dataclass(slots=True)
class Dispatch:
    """A plan on the simulated device.

    Attributes:
        plan: the plan.
        starts_s: start of its first step.
        ends_s: end of each step; shorter than planned if the dispatch was cut.
    """

    plan: StepPlan
    starts_s: float
    ends_s: list[float]


class SimulatedReplica:
    """A replica in virtual time; a `Target` of the balancer.

    Args:
        schedule: sizes of steps and page pool.
        times: step times.
        chooser: chooses the limits of each plan.
        max_in_flight: maximum plans in flight: 2 if the engine plans one step ahead, else 1.
        record: called with every event, for a log.
        index: its number.
        touched: numbers of the replicas that got requests; a dict that all replicas share, for their order.

    Attributes:
        scheduler: the engine's scheduler.
        in_flight: dispatches that have not ended, oldest first.
        is_touched: True if a request was added since the last call of `plan`.
        index: its number.
    """

    def __init__(
        self,
        schedule: ScheduleConfig,
        times: StepTimes,
        chooser: Chooser,
        max_in_flight: int,
        record: Record | None = None,
        index: int = 0,
        touched: dict[int, None] | None = None,
    ) -> None:
        self.index, self._touched = index, {} if touched is None else touched
        self.scheduler = Scheduler(schedule)
        self.in_flight: deque[Dispatch] = deque()
        self.is_touched = False
        self._times, self._chooser, self._max_in_flight, self._record = times, chooser, max_in_flight, record
        self._digest = 0

    # The balancer's view

    @property
    def view(self) -> ShardView:
        """Read-only answers for the balancer."""
        return self.scheduler.view

    @property
    def load(self) -> int:
        """Tokens to compute before a request added now, plus a charge per request."""
        return self.scheduler.view.load

    def add(self, request: Request) -> None:
        """Queue a request."""
        self.scheduler.add(request)
        self.is_touched = True
        self._touched[self.index] = None
        if self._record is not None:
            self._record(Added(request))

    def finish(self, request: Request, reason: FinishReason) -> None:
        """End a request unless it has ended already."""
        if self.scheduler.finish(request.request_id, reason) is request and self._record is not None:
            self._record(Finished(request.request_id, reason))

    def withdraw(self) -> list[Request]:
        """Remove and return the waiting requests in order."""
        withdrawn = self.scheduler.withdraw()
        if withdrawn and self._record is not None:
            self._record(Withdrawn())
        return withdrawn

    # Steps

    @property
    def next_end_s(self) -> float | None:
        """End of the oldest dispatch; None if none is in flight."""
        return self.in_flight[0].ends_s[-1] if self.in_flight else None

    def plan(self, now_s: float) -> list[StepPlan]:
        """Plan and launch as many dispatches as may be in flight; return their plans."""
        if self.is_touched:
            self._cut(now_s)
        self.is_touched = False
        plans: list[StepPlan] = []
        while len(self.in_flight) < self._max_in_flight and not self._is_long() and self.scheduler.has_unfinished():
            choice = self._chooser.choose(self.scheduler, now_s)
            plan = self.scheduler.schedule(choice)
            if self._record is not None:
                if plan is not None:
                    self._digest = plan.digest(self._digest)
                self._record(Scheduled(choice, None if plan is None else StepShape(plan.num_tokens), self._digest))
            if plan is None:
                break
            plans.append(plan)
            start_s = max(self.in_flight[-1].ends_s[-1], now_s) if self.in_flight else now_s
            ends_s, end_s = [], start_s
            for step_s in self._times.steps_s(plan.starts, plan.counts, plan.num_steps):
                end_s += step_s
                ends_s.append(end_s)
            self.in_flight.append(Dispatch(plan, start_s, ends_s))
        return plans

    def update(self) -> tuple[Dispatch, Sequence[list[int]], list[Request]]:
        """End the oldest dispatch; return it, its tokens by row, and the requests that ended."""
        dispatch = self.in_flight.popleft()
        num_steps = len(dispatch.ends_s)
        sampled = [[TOKEN] * min(max_new, num_steps) for max_new in dispatch.plan.max_new]
        if self._record is not None:
            self._record(Updated([list(token_ids) for token_ids in sampled]))
        ended = self.scheduler.update(dispatch.plan, sampled)
        return dispatch, sampled, ended

    def _is_long(self) -> bool:
        """Return whether the newest dispatch has several steps, so that its next plan need not be made ahead."""
        return bool(self.in_flight) and len(self.in_flight[-1].ends_s) > 1

    def _cut(self, now_s: float) -> None:
        """Cut the newest dispatch after the steps that single plans would have launched by now."""
        if not self._is_long():
            return
        newest = self.in_flight[-1]
        num_begun = 0
        if newest.starts_s <= now_s:
            num_begun = bisect_right(newest.ends_s, now_s) + 1
        num_ahead = self._max_in_flight - 1 if len(self.in_flight) == 1 else max(self._max_in_flight - 2, 0)
        del newest.ends_s[max(num_begun + num_ahead, 1) :]
