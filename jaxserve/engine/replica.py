"""Replica: one copy of the model, from requests to token ids. It knows neither texts nor users, and reads no clock."""

from __future__ import annotations

import logging
import math
from collections import deque
from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from jaxserve.engine.events import (
    Added,
    CacheReset,
    Extended,
    Finished,
    Record,
    Recovered,
    ReplicaEvent,
    Scheduled,
    Updated,
    Withdrawn,
)
from jaxserve.engine.step_stats import InFlight, StepStatsWriter
from jaxserve.execution.executor import Executor, StepResult
from jaxserve.request import FinishReason, Request, RequestStatus
from jaxserve.scheduling.draft_pacer import DISPATCH_S, DraftPacer
from jaxserve.scheduling.pacer import MAX_STEPS, Pacer
from jaxserve.scheduling.plan import StepShape
from jaxserve.scheduling.sharded import new_scheduler

if TYPE_CHECKING:
    from jaxserve.config import EngineConfig
    from jaxserve.metrics import EngineStats
    from jaxserve.models.arch import ArchConfig
    from jaxserve.scheduling.plan import StepPlan

logger = logging.getLogger(__name__)

TWO_ROUNDS = 2  # every multi-step program has that many


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


class Changing:
    """Context in which the scheduler, the record of its events and their owner's notes change together or not at all.

    Attributes:
        failure: error that interrupted a block; `Replica.forget_all` and `recover` must follow.
    """

    def __init__(self) -> None:
        self.failure: BaseException | None = None

    def __enter__(self) -> None:
        pass

    def __exit__(self, kind: object, error: BaseException | None, traceback: object) -> None:
        if error is not None:
            self.failure = self.failure or error


class Replica:
    """Scheduler and executor of one copy of the model, and the steps in flight between them.

    Args:
        config: model and options.
        arch: sizes of the whole model.
        executor: the device.
        stats: totals, to which those of this replica are added.
        record: called with every event, in order: for other processes to replay, or for a log.

    Attributes:
        scheduler: scheduler of the replica.
        executor: device of the replica.
        pacer: chooses how many decode steps go in one dispatch.
        draft_pacer: chooses how many tokens are drafted.
        step_stats: writer of the statistics of steps.
        in_flight: steps that were launched and not read, oldest first.
        changing: context of changes of the scheduler, which knows of one that broke off.
        may_draft: False to go on without drafts; any thread may change it.
    """

    def __init__(
        self,
        config: EngineConfig,
        arch: ArchConfig,
        executor: Executor,
        stats: EngineStats,
        record: Record | None = None,
    ) -> None:
        s = executor.schedule
        self.executor = executor
        self.scheduler = new_scheduler(s)
        self.pacer = Pacer(config.multi_step, lambda bucket: s.max_steps(bucket, config.max_steps))
        self.step_stats = StepStatsWriter(arch.local(config.tensor_parallel_size), executor, stats)
        self.in_flight: deque[InFlight] = deque()
        self.changing = Changing()
        self.may_draft = True
        self._stats = stats
        self._most_in_flight = 2 if config.step_ahead else 1
        speculation, is_timed = config.speculation, config.multi_step == "auto"
        self.draft_pacer = DraftPacer(
            s.max_drafts,
            s.max_num_seqs,
            adaptive=speculation is not None and speculation.adaptive,
            has_multi_step=is_timed,
            max_rounds=lambda bucket: s.max_rounds(bucket, config.max_steps),
            dispatch_s=DISPATCH_S if is_timed else math.inf,
        )
        self._forbid_compiles = config.forbid_compiles
        self._record = record
        self._digest = 0  # digest of all plans since the last recovery
        self._constrained: set[Request] = set()  # unfinished requests with a constraint
        self._is_stuck = False  # nothing can be planned before a step in flight is read
        self._has_dropped = False  # steps that may have failed without anybody having read it

    # Requests

    def add(self, request: Request) -> None:
        """Queue a request; RequestError where it could not run to its end even alone."""
        with self.changing:
            self.scheduler.add(request)
            self._note(Added(request))
        if request.constraint is not None:
            self._constrained.add(request)

    def finish(self, request_id: str, reason: FinishReason) -> None:
        """End a request if it has not ended already."""
        with self.changing:
            request = self.scheduler.finish(request_id, reason)
            if request is not None:
                self._note(Finished(request_id, reason))
                self._constrained.discard(request)

    def reset_prefix_cache(self) -> None:
        """Forget all cached pages."""
        with self.changing:
            self.scheduler.reset_prefix_cache()
            self._note(CacheReset())

    def withdraw(self) -> list[Request]:
        """Hand back the requests that wait here, as far as all their tokens are known, in their order."""
        with self.changing:
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
        return self._may_launch() and not self._is_stuck

    def launch(self, now_s: float) -> StepPlan | None:
        """Plan and start the next step; None where there is none, or where enough are in flight."""
        self._settle_dropped()
        if not self._may_launch():
            return None
        num_drafts, max_rounds = self._choose_drafts()
        may_split = not num_drafts and self._may_split()
        max_steps = 1 if may_split else max_rounds if num_drafts else self._max_steps(max_rounds)
        timing = self._timing(now_s)
        plan = self.scheduler.schedule(max_steps, num_drafts, timing, may_split=may_split)
        self._is_stuck = plan is None
        program = None if plan is None else self.executor.fit(plan.shape)
        if plan is not None and self._record is not None:
            self._digest = plan.digest(self._digest)
        self._note(Scheduled(max_steps, program, self._digest, num_drafts, timing, may_split))
        if plan is not None:
            assert program is not None, "what is planned has a program"
            handle = self.executor.launch(plan, program)
            is_scout = self.draft_pacer.launched(max(plan.num_drafts, default=0))
            self.in_flight.append(InFlight(plan, handle, program.num_tokens, now_s, is_scout))
            self._count_compiles(handle.num_compiles)
        return plan

    def read(self) -> StepResult:
        """Wait for the oldest step in flight. Interrupted, nothing is lost: it can be waited for again."""
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
        self._pace_drafts(plan, result, is_scout=step.is_scout)
        if plan.num_prefill_tokens or plan.num_drafts or plan.is_split:
            self.pacer.pause()
        else:
            bucket = self._bucket(StepShape(plan.num_even_rows, TWO_ROUNDS))
            self.pacer.ended(bucket, plan.num_steps, int(num_tokens.max()), result.ended_s)
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
                    self.finish(request.request_id, FinishReason.ABORT if error else FinishReason.STOP)
                    ended.append(request)
        self._constrained.difference_update(ended)
        return ended

    def drop_in_flight(self) -> None:
        """Forget steps whose requests have all ended: nobody waits for their tokens, or for how long they take."""
        with self.changing:
            while self.in_flight:
                step = self.in_flight[0]
                self.step_stats.ended(step, np.array(step.plan.max_new), step.handle.launched_s)
                if not self.executor.schedule.pools:
                    self._stats.num_sampled_tokens += sum(step.plan.max_new)
                self.take([[0] * most for most in step.plan.max_new])
                self._has_dropped = True
        self.pacer.pause()

    def forget_all(self) -> None:
        """Forget requests, pages and steps, whatever a failure has left of them; `recover` is due."""
        self.in_flight.clear()
        self.pacer.pause()
        self._constrained.clear()
        self.scheduler.restart()

    def recover(self) -> None:
        """Go on after `forget_all`, with nothing cached."""
        self._has_dropped = True  # the state is not known to be sound yet: waiting for it may be interrupted
        self._digest = 0
        self._note(Recovered())
        self.changing.failure = None
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

    def _may_launch(self) -> bool:
        if self.in_flight and self._constrained and len(self.scheduler.waiting_slots) == self.scheduler.num_running:
            can_split = self._may_split() and not any(request.may_be_extended for request in self._constrained)
            if not can_split:  # one step with all rows is faster than two, each with those that the other leaves
                return False
        return len(self.in_flight) < self._most_in_flight

    def _may_split(self) -> bool:
        """Return whether rows with a constraint can compute a token before the host has read it."""
        if not self._constrained or self._most_in_flight == 1 or not self.scheduler.has_split_rows:
            return False
        return self.executor.fit(StepShape(self.scheduler.num_even_rows, samples_late=True)) is not None

    def _bucket(self, step: StepShape) -> int | None:
        """Return the tokens of the program that runs a step; None if there is none."""
        program = self.executor.fit(step)
        return None if program is None else program.num_tokens

    def _max_steps(self, wanted: int) -> int:
        """Return the steps that the next dispatch may have: `wanted` as far as programs go, or as many as pay if 0."""
        bucket = self._bucket(StepShape(self.scheduler.num_even_rows, TWO_ROUNDS))
        if bucket is None or self._has_whole_logprobs():
            return 1
        return self.pacer.max_steps(bucket, wanted)

    def _has_whole_logprobs(self) -> bool:
        """Return whether a request may want log probabilities of the whole vocabulary: of one step at a time."""
        return self.executor.schedule.max_logprobs < 0 and self.scheduler.wants_logprobs

    def _timing(self, now_s: float) -> Sequence[float]:
        """Return the fields of the next plan's `Timing`; () without targets, or before steps were measured."""
        rates = self.step_stats.costs.rates() if self.scheduler.policy.targets else None
        if rates is None:
            return ()
        starts_s = now_s
        if self.in_flight:
            plan = self.in_flight[-1].plan
            step_s = plan.num_steps * rates.step_s(plan.num_prefill_tokens, plan.num_decode_tokens)
            starts_s = max(now_s, self.in_flight[-1].handle.launched_s + step_s)
        return (starts_s, rates.prefill_step_s, rates.prefill_token_s, rates.decode_token_s)

    def _choose_drafts(self) -> tuple[Sequence[int], int]:
        """Return the tokens to draft by slot and the most rounds, as `DraftPacer.choose` does; () for no tokens."""
        schedule, scheduler = self.executor.schedule, self.scheduler
        if not (schedule.max_drafts and scheduler.num_running and self.may_draft):
            return (), 0
        bucket = self._bucket(StepShape(scheduler.num_running, has_drafts=True))
        if bucket is None or self._has_whole_logprobs():
            return (), 0
        slots = scheduler.running_slots
        wanted, max_rounds = self.draft_pacer.choose(bucket, slots, self._max_steps(MAX_STEPS))
        if not wanted.any():
            return (), max_rounds
        by_slot = np.zeros(schedule.max_num_seqs, np.int64)
        by_slot[slots] = wanted
        by_slot[scheduler.waiting_slots] = 0
        if not by_slot.any():
            return (), max_rounds
        return by_slot.tolist(), max_rounds

    def _pace_drafts(self, plan: StepPlan, result: StepResult, *, is_scout: bool) -> None:
        """Let the pacer of drafts know how long a dispatch took, and what was accepted."""
        if not self.executor.schedule.max_drafts:
            return
        bucket, rounds = self._bucket(StepShape(plan.num_rows, has_drafts=True)), result.rounds
        if plan.admitted:
            self.draft_pacer.admit([r.slot for r in plan.admitted if r.slot >= 0])
        if plan.num_prefill_tokens or plan.is_split or bucket is None:
            self.draft_pacer.pause()
            return
        num_rows, num_drafts = plan.num_rows, max(plan.num_drafts, default=0)
        num_rounds = int(result.num_tokens[:num_rows].max())
        if rounds is not None:
            num_rounds = int(rounds.sampled[:num_rows].any(axis=0).sum())
            own = [row for row, request in enumerate(plan.requests) if request.slot == plan.slots[row]]
            slots = [plan.slots[row] for row in own]
            self.draft_pacer.accepted(slots, rounds.wanted[own], rounds.accepted[own])
        counted = np.array(plan.num_drafts) > 0 if is_scout else slice(num_rows)
        num_tokens = float(result.num_tokens[:num_rows][counted].mean())
        self.draft_pacer.ended(bucket, num_drafts, num_rounds, num_tokens, result.ended_s, is_scout=is_scout)

    def _count_compiles(self, count: int) -> None:
        self._stats.num_compiles += count
        if count and self._forbid_compiles:
            raise RuntimeError(f"a step compiled {count} programs after warm-up; every shape must be known beforehand")

    def _note(self, event: ReplicaEvent) -> None:
        if not isinstance(event, Scheduled):  # something can be planned again
            self._is_stuck = False
        if self._record is not None:
            self._record(event)
