"""LoadBalancer: the queue before the replicas of an engine, which chooses a replica for each request."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Iterator, Sequence
from functools import partial
from itertools import islice
from typing import TYPE_CHECKING

from jaxserve.request import FinishReason, Request
from jaxserve.scheduling.router import NO_PREFIX, ROW_CHARGE_TOKENS, Prefix, Route, Router
from jaxserve.scheduling.scheduler import Scheduler

if TYPE_CHECKING:
    from jaxserve.engine.replica import Replica

_CHUNK = 64  # queued requests that are looked up at a time


class LoadBalancer:
    """Queue before the replicas that gives a request to one when that can start it at once.

    There is nothing to choose before a single replica: it gets all requests, whose order its scheduler decides.

    The router chooses the replica. Where that is closed, because it holds a prefix whose computing costs more than the
    wait, or because it would start other requests first, the request stays in the queue and later ones are routed, a
    bounded number of times. No replica is idle while a request waits that it has room for: requests that a replica
    could not start after all, or had to preempt, come back to the queue, and an idle replica takes requests that wait
    for others.

    A scheduler that changes only marks its replica as changed. `place` looks once at each marked one, and then, for
    every request, only at the replicas that it may go to.

    Args:
        replicas: replicas of one model and one configuration.
    """

    def __init__(self, replicas: Sequence[Replica]) -> None:
        self._replicas = replicas
        self._router = Router(len(replicas))
        self._queue: OrderedDict[str, Request] = OrderedDict()  # no replica has room for them yet
        self._replica_of: dict[str, Replica] = {}  # keyed by request id
        self._prefixes: dict[str, Prefix] = {}  # prefixes of queued requests that were routed, keyed by request id
        self._idle = dict.fromkeys(range(len(replicas)))  # replicas without requests
        self._with_waiting: dict[int, None] = {}  # replicas with waiting requests
        self._overdue: set[int] = set()  # replicas of these that have made a plan since the oldest was added
        self._num_schedules = [0] * len(
            replicas
        )  # number of schedules of each replica when its oldest waiting request was added
        self._num_cache_resets = [0] * len(replicas)
        self._changed: set[int] = set()  # replicas whose state the router does not know
        self._has_choice = len(replicas) > 1
        for index in range(len(replicas) if self._has_choice else 0):
            self._changed.add(index)
            self._scheduler(index).watcher = partial(self._changed.add, index)

    def _scheduler(self, index: int) -> Scheduler:
        scheduler = self._replicas[index].scheduler
        assert isinstance(scheduler, Scheduler), "rows of one among several replicas are not divided; the config checks"
        return scheduler

    @property
    def num_queued(self) -> int:
        """Number of requests in no replica."""
        return len(self._queue)

    @property
    def queued(self) -> list[Request]:
        """Requests in no replica, in their order."""
        return list(self._queue.values())

    def add(self, requests: Iterable[Request]) -> None:
        """Queue new requests, for which every replica is large enough."""
        self._queue.update({request.request_id: request for request in requests})

    def finish(self, request: Request, reason: FinishReason | None = None) -> None:
        """Forget a request that has ended, or end it for `reason`."""
        self._queue.pop(request.request_id, None)
        self._prefixes.pop(request.request_id, None)
        replica = self._replica_of.get(request.request_id)
        if replica is not None and reason is not None:
            replica.finish(request.request_id, reason)
        self._replica_of.pop(request.request_id, None)

    def ids_on(self, replica: Replica) -> list[str]:
        """Return the ids of the requests in a replica."""
        return [request_id for request_id, owner in self._replica_of.items() if owner is replica]

    def place(self) -> None:
        """Give requests, in their order, to replicas that have room for them."""
        if not self._has_choice:
            while self._queue:
                self._give(next(iter(self._queue.values())), 0)
            return
        self._note_changes()
        if self._overdue or (self._idle and self._with_waiting):
            self._give_to_idle(self._take_back())
        if self._queue:
            self._give_to_idle(self._route_queue())

    def _note_changes(self) -> None:
        """Note the state of the replicas that have changed."""
        for index in self._changed:
            self._note_state(index, is_open=self._scheduler(index).admission.has_room())
        self._changed.clear()

    def _note_state(self, index: int, *, is_open: bool) -> None:
        """Report the load of a replica to the router, and note whether it has requests and whether any waits."""
        scheduler = self._scheduler(index)
        self._router.set_load(index, scheduler.admission.load, is_open=is_open)
        if scheduler.has_unfinished():
            self._idle.pop(index, None)
        else:
            self._idle[index] = None
        if not scheduler.num_waiting:
            self._with_waiting.pop(index, None)
            self._overdue.discard(index)
        elif index not in self._with_waiting:
            self._with_waiting[index] = None
            self._num_schedules[index] = scheduler.num_schedules
        elif scheduler.num_schedules != self._num_schedules[index]:
            self._overdue.add(index)
        if scheduler.num_cache_resets != self._num_cache_resets[index]:
            self._num_cache_resets[index] = scheduler.num_cache_resets
            self._router.forget(index)

    def _route_queue(self) -> list[Request]:
        """Bind requests to open replicas until none is; return those that wait for a closed one."""
        passed_over: list[Request] = []
        for request, route in self._router.assign(
            self._in_turn(), self._usable_prefix, self._fits, _load, self._must_wait
        ):
            if route.is_open:
                self._bind(request, route.replica)
            else:
                passed_over.append(request)
        return passed_over

    def _in_turn(self) -> Iterator[Request]:
        """Yield the queued requests in their order; those that were yielded may leave the queue."""
        num_left = 0  # requests yielded that are still queued
        while chunk := list(islice(self._queue.values(), num_left, num_left + _CHUNK)):
            for request in chunk:
                yield request
                num_left += request.request_id in self._queue
            if len(chunk) < _CHUNK:
                return

    def _fits(self, request: Request, route: Route) -> bool:
        request.num_shared_tokens = route.num_shared_tokens
        has_room = self._scheduler(route.replica).admission.has_room(request)
        if not has_room:
            self._changed.add(route.replica)  # it may have room for another request when the next call looks again
        return has_room

    def _must_wait(self, request: Request, route: Route) -> bool:
        request.num_shared_tokens = route.num_shared_tokens
        return self._scheduler(route.replica).admission.must_wait(request)

    def _give_to_idle(self, requests: Sequence[Request]) -> None:
        """Bind queued requests to idle replicas, one to each, wherever their prefixes are."""
        if not requests or not self._idle:
            return
        for index, request in zip(list(self._idle), requests, strict=False):
            request.num_shared_tokens = 0
            self._bind(request, index)

    def _give(self, request: Request, index: int) -> None:
        """Give a queued request to a replica."""
        replica = self._replicas[index]
        self._replica_of[request.request_id] = replica
        del self._queue[request.request_id]
        replica.add(request)

    def _bind(self, request: Request, index: int) -> None:
        """Give a queued request to the replica that was chosen, which will have its prefix."""
        self._give(request, index)
        self._router.note(index, self._prefix(request))
        del self._prefixes[request.request_id]
        self._note_state(index, is_open=True)  # `_fits` checks whether it still is

    def _prefix(self, request: Request) -> Prefix:
        prefix = self._prefixes.get(request.request_id)
        if prefix is None:
            prefix = self._prefixes[request.request_id] = self._scheduler(0).admission.prefix(request)
        return prefix

    def _usable_prefix(self, request: Request) -> Prefix:
        return self._prefix(request) if request.read_prefix_cache else NO_PREFIX

    def _take_back(self) -> list[Request]:
        """Take back requests that replicas did not start, or all waiting ones if a replica is idle; return them."""
        returned: list[Request] = []
        for index in list(self._with_waiting):
            replica = self._replicas[index]
            if self._idle or index in self._overdue:
                withdrawn = replica.withdraw()
                self._queue.update({request.request_id: request for request in withdrawn})
                for request in withdrawn:
                    del self._replica_of[request.request_id]
                returned += withdrawn
                self._note_changes()  # it may be idle now
        returned.sort(key=lambda request: request.arrival)
        for request in reversed(returned):
            self._queue.move_to_end(request.request_id, last=False)
        return returned

    def check_integrity(self, unfinished: Iterable[str]) -> None:
        """Raise AssertionError unless each of these requests is either queued or in a replica."""
        assert set(unfinished) == self._replica_of.keys() | self._queue.keys()
        assert not self._replica_of.keys() & self._queue.keys()


def _load(request: Request, route: Route) -> int:
    return request.num_tokens - route.num_shared_tokens + ROW_CHARGE_TOKENS
