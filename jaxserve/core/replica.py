"""Replica: one copy of the model, from requests to token ids, without texts, users or a clock."""

from __future__ import annotations

import logging
import time
from collections import deque
from functools import partial
from itertools import takewhile
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from jaxserve.core.events import (
    Added,
    CacheReset,
    Extended,
    Finished,
    Found,
    Record,
    Recovered,
    ReplicaEvent,
    Scheduled,
    Transferred,
    Updated,
    Withdrawn,
    note_tiers,
)
from jaxserve.core.kv_publisher import KVPublisher
from jaxserve.core.step_chooser import StepChooser
from jaxserve.core.step_stats import InFlight, StepStatsWriter
from jaxserve.scheduling.executor_protocol import Executor, StepResult
from jaxserve.scheduling.kv_cache.page_events import PageEvents
from jaxserve.scheduling.kv_cache.pages import STATES
from jaxserve.scheduling.kv_cache.prefix_hashes import CachedSequence, PrefixHashes
from jaxserve.scheduling.kv_cache.stored_pages import PageKey
from jaxserve.scheduling.request import FinishReason, Request, RequestStatus
from jaxserve.scheduling.scheduler import Scheduler
from jaxserve.scheduling.shard_view import ShardView
from jaxserve.scheduling.step_plan import LoadCosts, StepPlan

if TYPE_CHECKING:
    from jaxserve.api.config import EngineConfig
    from jaxserve.api.metrics import EngineStats
    from jaxserve.core.energy import EnergyAccount
    from jaxserve.models.arch import ArchConfig
    from jaxserve.scheduling.kv_cache.transfers import PageMover

logger = logging.getLogger(__name__)

SYNC_S = 5.0  # time to wait for page moves that were requested and have not started


class StepTokens(NamedTuple):
    """Tokens of a step that was read.

    Attributes:
        plan: plan of the step.
        token_ids: new tokens per row, up to one that ended it.
        ended: requests ended by these tokens.
        result: device results.
    """

    plan: StepPlan
    token_ids: list[list[int]]
    ended: list[Request]
    result: StepResult


class Replica:
    """Scheduler and executor of one model copy, and the steps in flight between them.

    Args:
        config: model and options.
        arch: sizes of the whole model.
        executor: device that runs plans.
        stats: totals, updated by this replica.
        record: called with every event, in order, for other processes or a log.
        new_chooser: class of the step chooser.
        mover: copies pages between tiers; None without lower ones.
        publisher: publishes changes of the prefix cache; None to publish none.
        energy: distributes energy over requests; None without a meter.

    Attributes:
        executor: device that runs plans.
        mover: copies pages between tiers.
        publisher: publishes changes of the prefix cache.
        chooser: chooses the limits of each plan.
        step_stats: writer of step statistics.
        in_flight: launched steps that were not read, oldest first.
    """

    def __init__(
        self,
        config: EngineConfig,
        arch: ArchConfig,
        executor: Executor,
        stats: EngineStats,
        record: Record | None = None,
        new_chooser: type[StepChooser] = StepChooser,
        mover: PageMover | None = None,
        publisher: KVPublisher | None = None,
        energy: EnergyAccount | None = None,
    ) -> None:
        self.executor, self.mover = executor, mover
        self.publisher = publisher
        events = None if publisher is None else PageEvents(executor.schedule.page_size)
        self._tiers = [] if mover is None else mover.new_tiers()
        self.scheduler = Scheduler(executor.schedule, tiers=self._tiers, events=events)
        self.step_stats = StepStatsWriter(arch.local(config.tensor_parallel_size), executor, stats, energy)
        self.chooser = new_chooser(config, self.scheduler, executor, self.step_stats.step_time)
        self.in_flight: deque[InFlight] = deque()
        self._stats = stats
        self._forbid_compiles = config.forbid_compiles
        self._record = record
        self._digest = 0  # digest of all plans since the last recovery
        self._constrained: set[Request] = set()  # unfinished requests with a constraint
        self._is_stuck = False  # nothing can be planned before a step in flight is read
        self._has_dropped = False  # steps were dropped that may have failed unnoticed

    @property
    def view(self) -> ShardView:
        """Read-only answers for a balancer of several replicas."""
        return self.scheduler.view

    @property
    def load(self) -> int:
        """Tokens to compute before a request added now, plus a charge per request."""
        return self.scheduler.view.load

    # Requests

    def add(self, request: Request) -> None:
        """Queue a request; RequestError if it could not finish even by itself."""
        self.scheduler.add(request)
        self._record_event(Added(request))
        if request.constraint is not None:
            request.constraint.advance(request.output_token_ids)  # another engine may have sampled some
            self._constrained.add(request)

    def finish(self, request: Request, reason: FinishReason) -> None:
        """End a request unless it has ended already."""
        if self.scheduler.finish(request.request_id, reason) is request:
            self._record_event(Finished(request.request_id, reason))
            self._constrained.discard(request)

    def reset_prefix_cache(self, *, with_adapters: bool = False) -> None:
        """Forget all cached pages; see `Scheduler.reset_prefix_cache`."""
        self.scheduler.reset_prefix_cache(with_adapters=with_adapters)
        self._record_event(CacheReset(with_adapters))

    def note_tiers(self, event: Transferred | Found) -> None:
        """Pass an event about lower tiers to the scheduler."""
        note_tiers(event, self.scheduler)
        self._record_event(event)

    def move_pages(self) -> None:
        """Start the page moves that were requested, and note those that have ended.

        Ends may request further moves, to the next tier. They start now, too: an idle replica is not settled again.
        """
        if self.mover is None:
            return
        is_settled = False
        while not is_settled:
            self.mover.start_moves(self.scheduler.take_moves())
            for keys, ok in self.mover.take_ended():
                self.note_tiers(Transferred(keys, ok))
            is_settled = not self.scheduler.has_moves

    def publish_events(self) -> None:
        """Publish the changes of the prefix cache since the last call."""
        events = [] if self.scheduler.events is None else self.scheduler.events.take()
        if events and self.publisher is not None:
            self.publisher.publish(events)

    def save_pages(self, sequence: CachedSequence) -> int:
        """Write the stored pages durably; return how many of a sequence's first tokens have theirs in a tier that
        survives, 0 if writing fails.

        Callable from any thread.
        """
        if self.mover is None:
            return 0
        until_s = time.monotonic() + SYNC_S
        while self.scheduler.has_moves and time.monotonic() < until_s:  # the core's thread starts them after its step
            time.sleep(0.001)
        if not self.mover.sync():
            return 0
        groups = self.executor.schedule.kv_groups
        tiers = [tier for tier in self._tiers if tier.outlives_device]
        hashes = PrefixHashes(groups.page_size).sequence_pages(sequence)
        group = groups.full[0] if groups.full else 0

        def is_stored(group: int, page_hash: bytes) -> bool:
            return any(PageKey(group, page_hash) in tier for tier in tiers)

        stored = [*takewhile(partial(is_stored, group), hashes)]
        while groups.num_snapshots is not None and stored and not is_stored(STATES, stored[-1]):
            stored.pop()
        return groups.page_size * len(stored)

    def withdraw(self) -> list[Request]:
        """Remove and return, in order, the waiting requests whose tokens are all known."""
        withdrawn = self.scheduler.withdraw()
        if withdrawn:
            self._record_event(Withdrawn())
        self._constrained.difference_update(withdrawn)
        return withdrawn

    def has_work(self) -> bool:
        """Return whether a request is unfinished or a step is unread."""
        return bool(self.in_flight) or self.scheduler.has_unfinished()

    # Steps

    def is_ready(self) -> bool:
        """Return whether the oldest step can be read, or a new one started, without waiting for the device."""
        if self.in_flight and self.in_flight[0].handle.is_ready():
            return True
        return not self._is_stuck and self.chooser.may_launch(self.in_flight, self._constrained)

    def launch(self, now_s: float) -> StepPlan | None:
        """Plan and start the next step; None if nothing can be planned, or enough steps are in flight."""
        self._settle_dropped()
        choice = self.chooser.choose(now_s, self.in_flight, self._constrained)
        if choice is None:
            return None
        if self.mover is not None and self.scheduler.num_waiting:
            choice = choice._replace(loads=self._load_costs(self.mover))
        plan = self.scheduler.schedule(choice)
        if self.mover is not None:
            self.mover.keep_states(self.scheduler.take_kept_states())
        self._is_stuck = plan is None
        program = None if plan is None else self.executor.fit(plan.shape)
        if plan is not None and self._record is not None:
            self._digest = plan.digest(self._digest)
        self._record_event(Scheduled(choice, program, self._digest))
        if plan is not None:
            assert program is not None, "each plan has a program"
            handle = self.executor.launch(plan, program)
            is_scout = self.chooser.launched(plan)
            self.in_flight.append(InFlight(plan, handle, program.num_tokens, now_s, is_scout))
            self._count_compiles(handle.num_compiles)
        return plan

    @property
    def num_running_steps(self) -> int:
        """Number of steps in flight that have not ended."""
        return sum(not step.handle.is_ready() for step in self.in_flight)

    def update(self, result: StepResult) -> StepTokens:
        """Remove the oldest step in flight, pass its tokens to the scheduler, and start the sampling that waited for
        them.

        Args:
            result: result of that step.
        """
        step = self.in_flight[0]
        plan = step.plan
        sampled, num_tokens = result.sampled(plan.num_rows), result.num_tokens[: plan.num_rows]
        self.step_stats.ended(step, num_tokens, result.ended_s, result.rounds, result.expert_tokens)
        self.chooser.ended(step, result)
        if not self.executor.schedule.pools:
            self._stats.num_sampled_tokens += int(num_tokens.sum())
        ended = self._take(sampled)
        if self.in_flight and self.in_flight[0].plan.is_split:
            self._count_compiles(self.executor.sample(self.in_flight[0].handle))
        return StepTokens(plan, sampled, ended, result)

    def _take(self, sampled: list[list[int]]) -> list[Request]:
        """Remove the oldest step in flight and pass its tokens to the scheduler; then advance the constraints.

        Args:
            sampled: token ids per row; the tokens that constraints append are added, those after an end are deleted.

        Returns:
            Requests that ended.
        """
        self._record_event(Updated(sampled))
        plan = self.in_flight.popleft().plan
        ended = self.scheduler.update(plan, sampled)
        for row, request in enumerate(plan.requests) if self._constrained else ():
            if request.constraint is not None and request.status is not RequestStatus.FINISHED:
                request.constraint.advance(request.output_token_ids)
                if forced := request.constraint.forced:
                    self._record_event(Extended(request.request_id, forced))
                    sampled[row] = [*sampled[row], *self.scheduler.extend(request.request_id, forced)]
                    if request.finish_reason is not None:
                        ended.append(request)
                        continue
                if request.constraint.has_ended:  # no further token is allowed
                    if error := request.constraint.error:
                        logger.warning("request %s is ended, it cannot continue: %s", request.request_id, error)
                    self.finish(request, FinishReason.ABORT if error else FinishReason.STOP)
                    ended.append(request)
        self._constrained.difference_update(ended)
        return ended

    def drop_in_flight(self) -> None:
        """Forget the steps in flight, whose requests have all ended, without waiting for their results."""
        while self.in_flight:
            step = self.in_flight[0]
            self.step_stats.ended(step, np.array(step.plan.max_new), step.handle.launched_s)
            if not self.executor.schedule.pools:
                self._stats.num_sampled_tokens += sum(step.plan.max_new)
            self._take([[0] * max_new for max_new in step.plan.max_new])
            self._has_dropped = True
        self.chooser.pause()

    def forget_all(self) -> None:
        """Forget requests, pages and steps after a failure; `recover` must follow."""
        self.in_flight.clear()
        self.chooser.pause()
        self._constrained.clear()
        self.scheduler.restart()
        if self.mover is not None:
            self.mover.forget()

    def recover(self) -> None:
        """Continue after `forget_all`, with nothing cached."""
        self._has_dropped = True  # set first, because waiting for the state may be interrupted
        self._digest = 0
        self._record_event(Recovered())
        self.executor.restore_state()
        self._has_dropped = False

    def close(self) -> None:
        """Forget the steps in flight and free the device memory."""
        self.in_flight.clear()
        self.executor.close()

    # Components

    def _settle_dropped(self) -> None:
        """Drop the steps in flight if all their requests have ended; before new requests run, reset the prefix cache if
        a dropped step has failed.
        """
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
        self.reset_prefix_cache(with_adapters=True)

    def _load_costs(self, mover: PageMover) -> LoadCosts | None:
        """Return the measured times of computing and loading a prefix; None before steps were measured."""
        rates, num_tokens = self.step_stats.step_time.rates(), self.scheduler.max_prompt_tokens
        return None if rates is None else LoadCosts(rates.step_s(num_tokens, 0) / num_tokens, mover.page_s())

    def _count_compiles(self, count: int) -> None:
        """Add the number of programs that a step compiled to the totals; RuntimeError if compiling is forbidden."""
        self._stats.num_compiles += count
        if count and self._forbid_compiles:
            raise RuntimeError(f"a step compiled {count} programs after warm-up; every shape must be known beforehand")

    def _record_event(self, event: ReplicaEvent) -> None:
        """Pass an event to the recorder, if any; after any event but a plan, planning may succeed again."""
        if not isinstance(event, Scheduled):
            self._is_stuck = False
        if self._record is not None:
            self._record(event)
