"""One queue before the replicas of an engine: who gets which request, and whose turn it is."""

from __future__ import annotations

import time
from collections import OrderedDict
from collections.abc import Iterable, Sequence
from typing import Generic, Protocol, TypeVar, runtime_checkable

from jaxserve.engine.scheduler import Scheduler
from jaxserve.request import FinishReason, Request, RequestStatus
from jaxserve.router import ROW_CHARGE_TOKENS, Prefix, Route, Router, sample_depths

_POLL_S = 5e-5  # between looks at the devices of several replicas


@runtime_checkable
class Replica(Protocol):
    """The part of an `EngineCore` that the queue needs."""

    scheduler: Scheduler

    def add(self, request: Request) -> None:
        """Queue a request in the replica."""

    def finish(self, request_id: str, reason: FinishReason) -> None:
        """End a request."""

    def withdraw(self) -> list[Request]:
        """Hand back the requests that wait in the replica, as far as all their tokens are known."""

    def has_work(self) -> bool:
        """Whether a request is unfinished or a step was not read."""

    def is_ready(self) -> bool:
        """Whether a step would get on without waiting for the device."""


R = TypeVar("R", bound=Replica)


class Placement(Generic[R]):
    """Gives a request to a replica when that can start it at once; a lone one has them all, and the queue is its own.

    The router chooses the replica. Where that is a closed one, because it holds a prefix whose computing costs more
    than the wait, the request stays in the queue and later ones go on, a bounded number of times. No replica is idle
    while a request waits that it has room for: what one could not start after all, or had to preempt, comes back to
    the queue, and an idle replica takes what waits for others.

    Args:
        cores: the replicas.
    """

    def __init__(self, cores: Sequence[R]) -> None:
        self._cores = cores
        self._router = Router(len(cores))
        self._queue: OrderedDict[str, Request] = OrderedDict()  # no replica has room for them yet
        self._core_of: dict[str, R] = {}  # by the id of each request that a replica has
        self._num_schedules = [0] * len(cores)  # of each replica, when it last had no request that it failed to start
        self._num_cache_resets = [0] * len(cores)

    @property
    def is_lone(self) -> bool:
        """Whether there is but one replica."""
        return len(self._cores) == 1

    @property
    def num_queued(self) -> int:
        """Requests that no replica has."""
        return len(self._queue)

    def add(self, requests: Iterable[Request]) -> None:
        """Queue new requests, for which every replica is large enough."""
        self._queue.update({request.request_id: request for request in requests})
        if self.is_lone:
            self.place()

    def finish(self, request: Request, reason: FinishReason | None = None) -> None:
        """Let go of a request that has ended, or ends now for `reason`."""
        core = self._core_of.get(request.request_id)
        if core is None:
            self._queue.pop(request.request_id, None)  # an interrupted call may have done so
            request.status, request.finish_reason = RequestStatus.FINISHED, reason
            return
        if reason is not None:
            core.finish(request.request_id, reason)
        del self._core_of[request.request_id]

    def ids_on(self, core: R) -> list[str]:
        """The requests that a replica has."""
        return [request_id for request_id, owner in self._core_of.items() if owner is core]

    def place(self) -> None:
        """Give requests, in their order, to replicas that have room for them."""
        if self.is_lone:
            while self._queue:
                _, request = self._queue.popitem(last=False)
                self._bind(request, 0)
            return
        self._give_to_idle(self._take_back())
        if not self._queue:
            return
        for index, core in enumerate(self._cores):
            scheduler = core.scheduler
            self._router.set_load(index, scheduler.load, is_open=scheduler.has_room())
            if scheduler.num_cache_resets != self._num_cache_resets[index]:
                self._num_cache_resets[index] = scheduler.num_cache_resets
                self._router.forget(index)
        self._give_to_idle(self._route_queue())

    def _route_queue(self) -> list[Request]:
        """Bind requests to open replicas until none is; returns those that rather wait for a closed one."""
        passed_over: list[Request] = []
        bound: list[str] = []
        for request, route in self._router.assign(self._queue.values(), self._usable_prefix, self._fits, _load):
            if route.is_open:
                self._bind(request, route.replica)
                bound.append(request.request_id)
            else:
                passed_over.append(request)
        for request_id in bound:
            del self._queue[request_id]
        return passed_over

    def _fits(self, request: Request, route: Route) -> bool:
        request.num_shared_tokens = route.num_shared_tokens
        return self._cores[route.replica].scheduler.has_room(request)

    def _give_to_idle(self, requests: Sequence[Request]) -> None:
        """Bind queued requests to idle replicas, one to each, wherever their prefixes are."""
        idle = [index for index, core in enumerate(self._cores) if not core.scheduler.has_unfinished()]
        for index, request in zip(idle, requests, strict=False):
            request.num_shared_tokens = 0
            self._bind(request, index)
            del self._queue[request.request_id]

    def _bind(self, request: Request, index: int) -> None:
        core = self._cores[index]
        core.add(request)
        self._core_of[request.request_id] = core
        if not self.is_lone:
            self._router.note(index, self._prefix(request))
            self._router.set_load(index, core.scheduler.load, is_open=core.scheduler.has_room())

    def _prefix(self, request: Request) -> Prefix:
        scheduler = self._cores[0].scheduler
        hashes = scheduler.prefix_hashes(request)
        return [(depth * scheduler.page_size, hashes[depth - 1]) for depth in sample_depths(len(hashes))]

    def _usable_prefix(self, request: Request) -> Prefix:
        return self._prefix(request) if request.read_prefix_cache else ()

    def _take_back(self) -> list[Request]:
        """Return to the queue what replicas failed to start, or all that waits in them if one is idle; returns it."""
        is_one_idle = not all(core.scheduler.has_unfinished() for core in self._cores)
        returned: list[Request] = []
        for index, core in enumerate(self._cores):
            scheduler = core.scheduler
            if scheduler.num_waiting and (is_one_idle or scheduler.num_schedules != self._num_schedules[index]):
                returned += core.withdraw()
            if not scheduler.num_waiting:
                self._num_schedules[index] = scheduler.num_schedules
        returned.sort(key=lambda request: request.arrival)
        for request in reversed(returned):
            del self._core_of[request.request_id]
            self._queue[request.request_id] = request
            self._queue.move_to_end(request.request_id, last=False)
        return returned

    def next_cores(self) -> Sequence[R]:
        """Those whose next step need not wait for the device; the first that becomes so. A lone one may wait."""
        if self.is_lone:
            return self._cores
        working = [core for core in self._cores if core.has_work()]
        while working:
            if ready := [core for core in working if core.is_ready()]:
                return ready
            time.sleep(_POLL_S)
        return []

    def check_integrity(self, unfinished: Iterable[str]) -> None:
        """Raise AssertionError unless each of these requests is in one place."""
        assert set(unfinished) == self._core_of.keys() | self._queue.keys()
        assert not self._core_of.keys() & self._queue.keys()


def _load(request: Request, route: Route) -> int:
    return request.num_tokens - route.num_shared_tokens + ROW_CHARGE_TOKENS
