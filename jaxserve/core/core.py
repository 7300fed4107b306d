"""EngineCore: events in, deltas out. One thread at a time drives it; all others leave events in its inbox.

    Frontend (any thread) --inbox: events--> EngineCore (one thread) --outbox: deltas--> Frontend (one thread)

Nothing here reads a clock: each call of `step` passes the time, and executors report when their steps ended. A
replica's events and their order determine all of its plans (`events.py`).
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from jaxserve.core.deltas import Admitted, Delta, Ended, StepDelta
from jaxserve.core.events import CacheReset, Cancelled, DraftsAllowed, Event, Submitted, Transferred
from jaxserve.core.replica import Replica
from jaxserve.errors import ConfigError, PeerLostError, RequestError
from jaxserve.scheduling.balancer import Balancer
from jaxserve.scheduling.request import FinishReason, Request, RequestStatus

if TYPE_CHECKING:
    from jaxserve.api.metrics import StepStats
    from jaxserve.core.prefix_lookups import PrefixLookups
    from jaxserve.scheduling.step_plan import StepPlan


class EngineCore:
    """Replicas, and the queue in front of them.

    Args:
        step_ahead: True to leave a step in flight while the tokens of the previous one are read.
        on_failure: called with the exception that broke off a step; may raise a PeerLostError that explains it.

    Attributes:
        inbox: events appended by any thread, and taken by `step`.
        outbox: deltas in order, taken by `Frontend.deliver`; an exception means that all requests are lost.
        num_taken: number of events taken from the inbox.
        last_steps: step statistics of all replicas, written since the second last `step` that did anything.
        lookups: asks a shared store for new prompts' pages before they are queued; None without a store.
        hold_adapter: makes an adapter, by digest, ready for steps as long as a request has it; raises an error if it
            cannot.
    """

    def __init__(
        self, replicas: Sequence[Replica], *, step_ahead: bool, on_failure: Callable[[BaseException], None]
    ) -> None:
        self.replicas = replicas
        self.inbox: deque[Event] = deque()
        self.outbox: deque[Delta | BaseException] = deque()
        self.num_taken = 0
        self.last_steps: list[StepStats] = []
        self.hold_adapter: Callable[[str], object] = _hold_nothing
        self.lookups: PrefixLookups | None = None
        self._looking: dict[int, Request] = {}  # unfinished requests whose lookup has not ended
        self._step_ahead, self._on_failure = step_ahead, on_failure
        self._is_shared = len(replicas) > 1  # no replica may block this thread for the others
        self._balancer = Balancer(replicas, dict(replicas[0].scheduler.policy.weights))
        self._requests: dict[int, Request] = {}  # unfinished requests by key
        self._has_worked = False  # tells whether the last call of `step` did anything
        self._now_s = 0.0

    def has_work(self) -> bool:
        """Return whether `step` has anything to do."""
        return bool(self._requests or self.inbox)

    @property
    def num_unfinished(self) -> int:
        """Number of unfinished requests, according to the events taken."""
        return len(self._requests)

    def adapters_in_use(self) -> tuple[set[str], set[str]]:
        """Return the adapters' digests for running requests, and for waiting ones; callable on any thread."""
        untaken = [request for event in list(self.inbox) if isinstance(event, Submitted) for request in event.requests]
        unfinished = (*untaken, *list(self._requests.values()))
        running, waiting = set[str](), set[str]()
        for each in unfinished:
            if each.adapter:
                (waiting if each.slot < 0 else running).add(each.adapter)
        return running, waiting

    @property
    def num_waiting(self) -> int:
        """Number of requests without pages and slot, new or preempted, in all queues."""
        return self._balancer.num_queued + sum(replica.scheduler.num_waiting for replica in self.replicas)

    @property
    def num_waiting_tokens(self) -> int:
        """Number of tokens known to be uncomputed in waiting requests; callable on any thread."""
        on_replicas = sum(replica.scheduler.num_waiting_tokens for replica in self.replicas)
        return self._balancer.num_queued_tokens + on_replicas

    @property
    def num_in_flight(self) -> int:
        """Number of launched steps that were not read."""
        return sum(len(replica.in_flight) for replica in self.replicas)

    @property
    def queued(self) -> list[Request]:
        """Requests without a replica, in order."""
        return self._balancer.queued

    def step(self, now_s: float) -> bool:
        """Take events; then, on each replica that can continue, launch the next step and read one that has ended.

        It blocks on the device only with a single replica. With several, possibly none can continue yet, and the caller
        waits a moment.

        Args:
            now_s: current time.

        Returns:
            Whether any replica launched or read a step.
        """
        self._now_s = now_s
        if self._has_worked:  # idle calls may have written statistics, too
            self.last_steps = []
        self.take_events()
        self._balancer.dispatch()
        self._has_worked = False
        for replica in self.replicas:
            try:
                if not replica.has_work() or (self._is_shared and not replica.is_ready()):
                    continue
                plan = replica.launch(self._now_s)
                self._emit_admitted(replica, plan)
                self.last_steps += replica.step_stats.write(self.num_waiting)  # the device runs this plan meanwhile
                num_ahead = replica.executor.schedule.row_turns if plan is not None and self._step_ahead else 0
                num_kept = max(num_ahead, self._is_shared and replica.num_running_steps)
                if len(replica.in_flight) > num_kept:
                    self._read(replica)
                    # rows waited for these tokens; callers are notified meanwhile
                    if plan is None and not replica.in_flight:
                        self._emit_admitted(replica, replica.launch(self._now_s))
            except Exception as error:
                self._fail(replica, error)
            self._settle(replica)
        return self._has_worked

    def take_events(self) -> None:
        """Handle all events in the inbox, without a step."""
        while self.inbox:
            try:
                self._take(self.inbox.popleft())
            finally:
                self.num_taken += 1  # last, because `has_work` does not know of it before
        if self._looking:
            self._take_looked()
        for replica in self.replicas:
            self._settle(replica)

    def _take(self, event: Event) -> None:
        """Handle an event from the inbox."""
        match event:
            case Submitted(requests):
                self._requests.update({request.key: request for request in requests})
                self._queue([request for request in requests if self._has_adapter(request)])
            case Cancelled(keys, reason):
                self._finish(keys, reason)
            case CacheReset(with_adapters):
                for replica in self.replicas:
                    replica.reset_prefix_cache(with_adapters=with_adapters)
            case Transferred():
                self.replicas[event.replica].note_tiers(event)
            case DraftsAllowed(is_allowed):
                for replica in self.replicas:
                    replica.chooser.may_draft = is_allowed

    def _queue(self, requests: Sequence[Request]) -> None:
        """Queue new requests, after a lookup if there is a shared store."""
        if self.lookups is None or not requests:
            self._balancer.add(requests)
            return
        self._looking |= {request.key: request for request in requests}
        self.lookups.begin(requests)

    def _take_looked(self) -> None:
        """Queue the requests whose lookups have ended."""
        assert self.lookups is not None, "lookups have begun"
        for requests, found in self.lookups.take_ended():
            if found is not None:
                for replica in self.replicas:
                    replica.note_tiers(found)
            self._balancer.add([request for request in requests if self._looking.pop(request.key, None) is not None])

    def _has_adapter(self, request: Request) -> bool:
        """Return whether a new request's adapter is ready; otherwise end the request.

        A step that lacked the adapter would end the requests of all other rows, too.
        """
        try:
            if request.adapter:
                self.hold_adapter(request.adapter)
        except Exception as error:
            del self._requests[request.key]
            told = RequestError(str(error)) if isinstance(error, ConfigError) else error
            self.outbox.append(Delta(self._now_s, ended=[Ended(request.key, FinishReason.ABORT)], error=told))
            return False
        return True

    def abort_all(self, error: BaseException | None = None) -> None:
        """Take the events in the inbox, then end all requests, because of `error` if there was one."""
        self.take_events()
        self._finish(list(self._requests), FinishReason.ABORT, error)

    def recover(self, error: BaseException) -> None:
        """End all requests after an error at any point, and continue without them."""
        for replica in self.replicas:
            replica.forget_all()
        self._balancer.restart()
        self.abort_all(error)
        for replica in self.replicas:
            replica.recover()

    def lose_all(self, error: BaseException) -> None:
        """Forget all requests and events, and report `error` to the outbox, if requests cannot even be ended."""
        self._requests.clear()
        self._looking.clear()
        while self.inbox:
            self.inbox.popleft()
            self.num_taken += 1
        self.outbox.append(error)

    def check_integrity(self) -> None:
        """Raise AssertionError if a page, slot or request is lost or shared."""
        for replica in self.replicas:
            replica.scheduler.check_integrity()
        queued = (request for key, request in self._requests.items() if key not in self._looking)
        self._balancer.check_integrity(request.request_id for request in queued)

    def _read(self, replica: Replica) -> None:
        """Wait for a replica's oldest step in flight, put its tokens in the outbox, and forget the requests that they
        ended.
        """
        result = replica.in_flight[0].handle.result()
        step = replica.update(result)
        self._has_worked = True
        self._now_s = max(self._now_s, result.ended_s)
        self.outbox.append(
            Delta(result.ended_s, step=StepDelta.from_plan(*step, is_metered=replica.step_stats.is_metered))
        )
        for request in step.ended:
            del self._requests[request.key]
            self._balancer.finish(request)

    def _settle(self, replica: Replica) -> None:
        """Drop the steps in flight of a replica without requests; write its statistics if no step is in flight."""
        if not replica.scheduler.has_unfinished():
            replica.drop_in_flight()
        try:
            replica.move_pages()
            replica.publish_events()
        except Exception as error:
            self._fail(replica, error)
        if not replica.in_flight:
            self.last_steps += replica.step_stats.write(self.num_waiting)

    def _emit_admitted(self, replica: Replica, plan: StepPlan | None) -> None:
        """Report the requests that start with a launched plan to the outbox; do nothing if `plan` is None."""
        if plan is None:
            return
        self._has_worked = True
        self._now_s = max(self._now_s, replica.in_flight[-1].handle.launched_s)
        if plan.admitted:
            admitted = [Admitted(r.key, r.cached_tokens, r.num_preemptions) for r in plan.admitted]
            self.outbox.append(Delta(self._now_s, admitted=admitted))

    def _fail(self, replica: Replica, error: BaseException) -> None:
        """End a replica's requests because of `error` in a step, and reset it: plans, pages and device disagree."""
        self._has_worked = True
        ids = set(self._balancer.lose(self.replicas.index(replica)))
        # Requests ended by a token may not have been reported yet.
        keys = [r.key for r in self._requests.values() if r.request_id in ids or r.status is RequestStatus.FINISHED]
        try:
            self._on_failure(error)
        except PeerLostError as lost:
            error = lost
        replica.forget_all()  # first, because its scheduler may be half-changed and need not end them
        self._finish(keys, FinishReason.ABORT, error)
        replica.recover()

    def _finish(self, keys: Sequence[int], reason: FinishReason, error: BaseException | None = None) -> None:
        """End requests, and report an end for every key, even if the request has ended before or never arrived.

        The report comes first: after an error, known requests are ended again.

        Args:
            keys: keys of the requests.
            reason: reason to report.
            error: exception that caused the end; None if there was none.
        """
        known = {key: request for key in keys if (request := self._requests.get(key)) is not None}
        ended = [Ended(key, reason, known[key].num_preemptions if key in known else 0) for key in keys]
        self.outbox.append(Delta(self._now_s, ended=ended, error=error))
        for key, request in known.items():
            self._looking.pop(key, None)
            self._balancer.finish(request, reason)
            del self._requests[key]


def _hold_nothing(adapter: str) -> None:
    """Do nothing: an engine without a store of adapters has all that its requests name."""
