"""Replica: one copy of the model, from requests to token ids. It knows neither texts nor users, and reads no clock."""

from __future__ import annotations

import logging
from collections import deque
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from jaxserve.core.events import (
    Added,
    CacheReset,
    Extended,
    Finished,
    Record,
    Recovered,
    ReplicaEvent,
    Scheduled,
    Transferred,
    Updated,
    Withdrawn,
)
from jaxserve.core.step_chooser import NewChooser, StepChooser
from jaxserve.core.step_stats import InFlight, StepStatsWriter
from jaxserve.scheduling.admission import Admission
from jaxserve.scheduling.executor import Executor, StepResult
from jaxserve.scheduling.request import FinishReason, Request, RequestStatus
from jaxserve.scheduling.scheduler import Scheduler

if TYPE_CHECKING:
    from jaxserve.api.config import EngineConfig
    from jaxserve.api.metrics import EngineStats
    from jaxserve.models.arch import ArchConfig
    from jaxserve.scheduling.step_plan import StepPlan

logger = logging.getLogger(__name__)


class StepTokens(NamedTuple):
    """Tokens of a step that was read.

    Attributes:
        plan: the step.
        token_ids: new tokens of each row, without those behind one that ended it.
        ended: requests that these tokens ended.
        result: results of the device.
    """

    plan: StepPlan
    token_ids: list[list[int]]
    ended: list[Request]
    result: StepResult


class Replica:
    """Scheduler and executor of one copy of the model, and the steps in flight between them.

    Args:
        config: model and options.
        arch: sizes of the whole model.
        executor: the device.
        stats: totals, to which those of this replica are added.
        record: called with every event, in order: for other processes to replay, or for a log.
        new_chooser: makes the chooser of steps.

    Attributes:
        scheduler: scheduler of the replica.
        executor: device of the replica.
        chooser: chooses what each plan may be.
        step_stats: writer of the statistics of steps.
        in_flight: steps that were launched and not read, oldest first.
    """

    def __init__(
        self,
        config: EngineConfig,
        arch: ArchConfig,
        executor: Executor,
        stats: EngineStats,
        record: Record | None = None,
        new_chooser: NewChooser = StepChooser,
    ) -> None:
        self.executor = executor
        self.scheduler = Scheduler(executor.schedule)
        self.step_stats = StepStatsWriter(arch.local(config.tensor_parallel_size), executor, stats)
        self.chooser = new_chooser(config, self.scheduler, executor, self.step_stats.step_time)
        self.in_flight: deque[InFlight] = deque()
        self._stats = stats
        self._forbid_compiles = config.forbid_compiles
        self._record = record
        self._digest = 0  # digest of all plans since the last recovery
        self._constrained: set[Request] = set()  # unfinished requests with a constraint
        self._is_stuck = False  # nothing can be planned before a step in flight is read
        self._has_dropped = False  # steps that may have failed without anybody having read it

    @property
    def admission(self) -> Admission:
        """Answers to a balancer of several replicas."""
        return self.scheduler.admission

    @property
    def load(self) -> int:
        """Tokens to compute before those of a request added now."""
        return self.scheduler.admission.load

    # Requests

    def add(self, request: Request) -> None:
        """Queue a request; RequestError where it could not run to its end even alone."""
        self.scheduler.add(request)
        self._note(Added(request))
        if request.constraint is not None:
            self._constrained.add(request)

    def finish(self, request: Request, reason: FinishReason) -> None:
        """End a request if it has not ended already."""
        if self.scheduler.finish(request.request_id, reason) is request:
            self._note(Finished(request.request_id, reason))
            self._constrained.discard(request)

    def reset_prefix_cache(self) -> None:
        """Forget all cached pages."""
        self.scheduler.reset_prefix_cache()
        self._note(CacheReset())

    def transferred(self, event: Transferred) -> None:
        """Take the end of moves of pages between tiers; see `Scheduler.transferred`."""
        self.scheduler.transferred(event.keys, ok=event.ok)
        self._note(event)

    def withdraw(self) -> list[Request]:
        """Hand back the requests that wait here, as far as all their tokens are known, in their order."""
        withdrawn = self.scheduler.withdraw()
        if withdrawn:
            self._note(Withdrawn())
        self._constrained.difference_update(withdrawn)
        return withdrawn

    def has_work(self) -> bool:
        """Return whether a request is unfinished or a step was not read."""
        return bool(self.in_flight) or self.scheduler.has_unfinished()

    # Steps

    def is_ready(self) -> bool:
        """Return whether a step would get on without waiting for the device."""
        if self.in_flight and self.in_flight[0].handle.is_ready():
            return True
        return not self._is_stuck and self.chooser.may_launch(self.in_flight, self._constrained)

    def launch(self, now_s: float) -> StepPlan | None:
        """Plan and start the next step; None where there is none, or where enough are in flight."""
        self._settle_dropped()
        choice = self.chooser.choose(now_s, self.in_flight, self._constrained)
        if choice is None:
            return None
        plan = self.scheduler.schedule(choice)
        self._is_stuck = plan is None
        program = None if plan is None else self.executor.fit(plan.shape)
        if plan is not None and self._record is not None:
            self._digest = plan.digest(self._digest)
        self._note(Scheduled(choice, program, self._digest))
        if plan is not None:
            assert program is not None, "what is planned has a program"
            handle = self.executor.launch(plan, program)
            is_scout = self.chooser.launched(plan)
            self.in_flight.append(InFlight(plan, handle, program.num_tokens, now_s, is_scout))
            self._count_compiles(handle.num_compiles)
        return plan

    def read(self) -> StepResult:
        """Wait for the oldest step in flight."""
        return self.in_flight[0].handle.result()

    @property
    def num_running_steps(self) -> int:
        """Steps in flight that have not ended."""
        return sum(not step.handle.is_ready() for step in self.in_flight)

    def update(self, result: StepResult) -> StepTokens:
        """Let the scheduler know the tokens of the oldest step in flight; start the sampling that waits for them."""
        step = self.in_flight[0]
        plan = step.plan
        sampled, num_tokens = result.sampled(plan.num_rows), result.num_tokens[: plan.num_rows]
        self.step_stats.ended(step, num_tokens, result.ended_s, result.rounds, result.expert_tokens)
        self.chooser.ended(step, result)
        if not self.executor.schedule.pools:
            self._stats.num_sampled_tokens += int(num_tokens.sum())
        ended = self.take(sampled)
        if self.in_flight and self.in_flight[0].plan.is_split:
            self._count_compiles(self.executor.sample(self.in_flight[0].handle))
        return StepTokens(plan, sampled, ended, result)

    def take(self, sampled: list[list[int]]) -> list[Request]:
        """Let the scheduler know what each row of the oldest step in flight has sampled; see `Scheduler.update`."""
        self._note(Updated(sampled))
        plan = self.in_flight.popleft().plan
        ended = self.scheduler.update(plan, sampled)
        for row, request in enumerate(plan.requests) if self._constrained else ():
            if request.constraint is not None and request.status is not RequestStatus.FINISHED:
                request.constraint.advance(request.output_token_ids)
                if forced := request.constraint.forced:
                    self._note(Extended(request.request_id, forced))
                    sampled[row] = [*sampled[row], *self.scheduler.extend(request.request_id, forced)]
                    if request.finish_reason is not None:
                        ended.append(request)
                        continue
                if request.constraint.has_ended:  # no token may follow
                    if error := request.constraint.error:
                        logger.warning("request %s is ended, it cannot go on: %s", request.request_id, error)
                    self.finish(request, FinishReason.ABORT if error else FinishReason.STOP)
                    ended.append(request)
        self._constrained.difference_update(ended)
        return ended

    def drop_in_flight(self) -> None:
        """Forget steps whose requests have all ended: nobody waits for their tokens, or for how long they take."""
        while self.in_flight:
            step = self.in_flight[0]
            self.step_stats.ended(step, np.array(step.plan.max_new), step.handle.launched_s)
            if not self.executor.schedule.pools:
                self._stats.num_sampled_tokens += sum(step.plan.max_new)
            self.take([[0] * most for most in step.plan.max_new])
            self._has_dropped = True
        self.chooser.pause()

    def forget_all(self) -> None:
        """Forget requests, pages and steps, whatever a failure has left of them; `recover` is due."""
        self.in_flight.clear()
        self.chooser.pause()
        self._constrained.clear()
        self.scheduler.restart()

    def recover(self) -> None:
        """Go on after `forget_all`, with nothing cached."""
        self._has_dropped = True  # the state is not known to be sound yet: waiting for it may be interrupted
        self._digest = 0
        self._note(Recovered())
        self.executor.restore_state()
        self._has_dropped = False

    def close(self) -> None:
        """Forget the steps in flight and free the device's memory."""
        self.in_flight.clear()
        self.executor.close()

    # Parts

    def _settle_dropped(self) -> None:
        """Find out, ahead of the next request's first step, whether a step failed that was dropped unread."""
        if self.in_flight and all(r.status is RequestStatus.FINISHED for s in self.in_flight for r in s.plan.requests):
            self.drop_in_flight()
        if not (self._has_dropped and self.scheduler.has_unfinished()):
            return
        self._has_dropped = False
        if not self.executor.restore_state():
            return
        if self.scheduler.num_running:
            raise RuntimeError("a step has failed on the device, and the pages of running requests are lost")
        logger.warning("a step that no request waited for has failed on the device; its cached pages are lost")
        self.reset_prefix_cache()

    def _count_compiles(self, count: int) -> None:
        self._stats.num_compiles += count
        if count and self._forbid_compiles:
            raise RuntimeError(f"a step compiled {count} programs after warm-up; every shape must be known beforehand")

    def _note(self, event: ReplicaEvent) -> None:
        if not isinstance(event, Scheduled):  # something can be planned again
            self._is_stuck = False
        if self._record is not None:
            self._record(event)
