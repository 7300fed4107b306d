"""One queue before the replicas of an engine: who gets which request, and whose turn it is."""

from __future__ import annotations

import time
from collections import OrderedDict
from collections.abc import Iterable, Sequence
from functools import partial
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
    than the wait, or one that would start others first, the request stays in the queue and later ones go on, a bounded
    number of times. No replica is idle
    while a request waits that it has room for: what one could not start after all, or had to preempt, comes back to
    the queue, and an idle replica takes what waits for others.

    Schedulers tell of every change, once for each step of a replica, so that placing a request looks at those replicas
    alone that it may go to.

    Args:
        cores: the replicas.
    """

    def __init__(self, cores: Sequence[R]) -> None:
        self._cores = cores
        self._router = Router(len(cores))
        self._queue: OrderedDict[str, Request] = OrderedDict()  # no replica has room for them yet
        self._core_of: dict[str, R] = {}  # by the id of each request that a replica has
        self._prefixes: dict[str, Prefix] = {}  # by the id of each queued request that was looked at
        self._idle = dict.fromkeys(range(len(cores)))  # replicas without requests
        self._with_waiting: dict[int, None] = {}  # those in which requests wait
        self._num_schedules = [0] * len(cores)  # of each of these, before the oldest of its requests began to wait
        self._num_cache_resets = [0] * len(cores)
        self._refusing: list[int] = []  # closed for a request that they had no room for; another one may fit
        if not self.is_lone:
            for index, core in enumerate(cores):
                core.scheduler.watcher = partial(self._note_change, index)
                self._note_change(index)

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
            self._prefixes.pop(request.request_id, None)
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
        while self._refusing:
            self._note_change(self._refusing.pop())
        if self._queue:
            self._give_to_idle(self._route_queue())

    def _note_change(self, index: int) -> None:
        """Let the router know of a replica that has changed."""
        scheduler = self._cores[index].scheduler
        self._router.set_load(index, scheduler.load, is_open=scheduler.has_room())
        if scheduler.has_unfinished():
            self._idle.pop(index, None)
        else:
            self._idle[index] = None
        if not scheduler.num_waiting:
            self._with_waiting.pop(index, None)
        elif index not in self._with_waiting:
            self._with_waiting[index] = None
            self._num_schedules[index] = scheduler.num_schedules
        if scheduler.num_cache_resets != self._num_cache_resets[index]:
            self._num_cache_resets[index] = scheduler.num_cache_resets
            self._router.forget(index)

    def _route_queue(self) -> list[Request]:
        """Bind requests to open replicas until none is; returns those that rather wait for a closed one."""
        passed_over: list[Request] = []
        bound: list[str] = []
        for request, route in self._router.assign(
            self._queue.values(), self._usable_prefix, self._fits, _load, self._must_wait
        ):
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
        has_room = self._cores[route.replica].scheduler.has_room(request)
        if not has_room:
            self._refusing.append(route.replica)
        return has_room

    def _must_wait(self, request: Request, route: Route) -> bool:
        request.num_shared_tokens = route.num_shared_tokens
        return self._cores[route.replica].scheduler.must_wait(request)

    def _give_to_idle(self, requests: Sequence[Request]) -> None:
        """Bind queued requests to idle replicas, one to each, wherever their prefixes are."""
        for index, request in zip(list(self._idle) if requests else (), requests, strict=False):
            request.num_shared_tokens = 0
            self._bind(request, index)
            del self._queue[request.request_id]

    def _bind(self, request: Request, index: int) -> None:
        core = self._cores[index]
        if not self.is_lone:
            self._router.note(index, self._prefix(request))
            del self._prefixes[request.request_id]
        core.add(request)
        self._core_of[request.request_id] = core

    def _prefix(self, request: Request) -> Prefix:
        prefix = self._prefixes.get(request.request_id)
        if prefix is None:
            scheduler = self._cores[0].scheduler
            hashes, page_size = scheduler.prefix_hashes(request), scheduler.page_size
            prefix = [(depth * page_size, hashes[depth - 1]) for depth in sample_depths(len(hashes))]
            self._prefixes[request.request_id] = prefix
        return prefix

    def _usable_prefix(self, request: Request) -> Prefix:
        return self._prefix(request) if request.read_prefix_cache else ()

    def _take_back(self) -> list[Request]:
        """Return to the queue what replicas failed to start, or all that waits in them if one is idle; returns it."""
        returned: list[Request] = []
        for index in list(self._with_waiting):
            core = self._cores[index]
            if self._idle or core.scheduler.num_schedules != self._num_schedules[index]:
                returned += core.withdraw()
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
