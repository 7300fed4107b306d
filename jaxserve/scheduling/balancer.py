"""Balancer: the queue before several targets (replicas or shards), which chooses a target for each request."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from contextlib import closing
from itertools import islice
from typing import Protocol, runtime_checkable

from jaxserve.scheduling.request import FinishReason, Request, RequestStatus
from jaxserve.scheduling.router import NO_PREFIX, ROW_CHARGE_TOKENS, Prefix, Route, Router, Start
from jaxserve.scheduling.shard_view import ShardView
from jaxserve.scheduling.waiting import WaitingQueue

MAX_ASKED = 8  # targets asked for waiting requests by one that becomes idle; more would give it a hardly better choice


@runtime_checkable
class Target(Protocol):
    """A replica or a shard, which queues and runs requests."""

    @property
    def view(self) -> ShardView:
        """Read-only answers about its load and whether requests could start."""

    @property
    def load(self) -> int:
        """Tokens to compute before a request added now."""

    def add(self, request: Request) -> None:
        """Queue a request, which fits by itself."""

    def finish(self, request: Request, reason: FinishReason) -> None:
        """End a request unless it has ended already."""

    def withdraw(self) -> list[Request]:
        """Remove and return, in order, the waiting requests whose tokens are all known."""


class Balancer:
    """Queue that gives a request to a target once the target can start it immediately.

    A single target leaves no choice: it gets all requests immediately and orders them itself.

    The router chooses the target. If that target is closed, because it holds a prefix that costs more to recompute than
    to wait for, or because it would start other requests first, the request stays queued and later ones are routed, up
    to a limit. No target idles while it could start a queued request: requests that a target did not start, or
    preempted, return to the queue, and a target that becomes idle takes requests that wait for other targets.

    The queue is ordered like a single target's: by class, then by the service that tenants have received. A request of
    a higher class than others does not wait for a prefix, because it could preempt their rows on another target.

    Args:
        targets: replicas with one model and configuration, or shards with equal sizes.
        weights: weights by tenant; 1 for others.

    Attributes:
        num_queued_tokens: number of uncomputed tokens in queued requests.
        num_deferred: requests that wait for a target with their prefix.
    """

    def __init__(self, targets: Sequence[Target], weights: Mapping[str, float]) -> None:
        self._targets, self._weights = targets, weights
        self._has_choice = len(targets) > 1
        self._changed: set[int] = set()  # targets whose state the router has not seen
        if self._has_choice:
            for index, target in enumerate(targets):
                target.view.changes.changed, target.view.changes.index = self._changed, index
        self.restart()

    def restart(self) -> None:
        """Forget all requests, even after a failure."""
        count = len(self._targets)
        self._router = Router(count)
        self._target_of: dict[str, int] = {}  # keyed by request id
        self._bound: dict[str, Request] = {}  # requests assigned by the router, by id
        self._queue = WaitingQueue(self._weights, self._bound)
        self.num_queued_tokens = 0
        self._prefixes: dict[str, Prefix] = {}  # prefixes of routed requests in the queue, by request id
        self._idle = dict.fromkeys(range(count))  # targets without requests
        self._waits_for: dict[str, tuple[Route, int]] = {}  # by request id: closed route, target's version
        self._versions = [0] * count  # changes of each target that the router has seen
        self._num_freed = 0  # targets that have become idle since requests were taken back
        self._with_waiting: dict[int, None] = {}  # targets with waiting requests
        self._changed.update(range(count))
        self.num_deferred = 0

    @property
    def num_queued(self) -> int:
        """Number of requests without a target."""
        return len(self._queue)

    @property
    def queued(self) -> list[Request]:
        """Requests without a target, by class and by tenant."""
        return list(self._queue)

    def locate(self, request: Request) -> int:
        """Return the index of a request's target; a request without one is first given to target 0."""
        if request in self._queue:
            request.num_shared_tokens = 0
            self.bind(request, 0)
            self._dequeue(request)
        return self._target_of[request.request_id]

    def ids_on(self, index: int) -> list[str]:
        """Return the ids of the requests on a target."""
        return [request_id for request_id, other in self._target_of.items() if other == index]

    def add(self, requests: Iterable[Request]) -> None:
        """Queue new requests, which fit every target by themselves; a single target gets them immediately."""
        for request in requests:
            if self._has_choice:
                self._queue.append(request)
                self.num_queued_tokens += request.num_tokens
            else:
                self._give(request, 0)

    def finish(self, request: Request, reason: FinishReason | None = None) -> None:
        """Forget a request; with a `reason`, first end it, on its target or in the queue."""
        index = self._target_of.pop(request.request_id, None)
        if self._bound.pop(request.request_id, None) is not None:
            self._queue.stopped(request)
        elif index is None and request in self._queue:
            self._prefixes.pop(request.request_id, None)
            self._dequeue(request)
        if reason is not None:
            if index is not None:
                self._targets[index].finish(request, reason)
            if request.status is not RequestStatus.FINISHED:  # no target has it
                request.status, request.finish_reason = RequestStatus.FINISHED, reason

    def lose(self, index: int) -> list[str]:
        """Forget all requests on a target that has failed; return their ids."""
        lost = self.ids_on(index)
        for request_id in lost:
            del self._target_of[request_id]
            if (request := self._bound.pop(request_id, None)) is not None:
                self._queue.stopped(request)
        return lost

    def dispatch(self) -> None:
        """Give queued requests, in order, to targets that could start them now."""
        if not self._has_choice:
            return
        self._give_to_idle(self._read_changes())
        if self._queue:
            self._give_to_idle(self._route())

    def bind(self, request: Request, index: int) -> None:
        """Give a queued request to a target, charge its tenant, and note that the target will hold its prefix.

        The caller must then remove it from the queue.
        """
        self._queue.started(request, request.num_shared_tokens)
        self._bound[request.request_id] = request
        self._give(request, index)
        self._router.note(index, self._prefix(request))
        del self._prefixes[request.request_id]
        self._update_router(index, is_open=True)  # `could_start` decides whether it is still open

    def _dequeue(self, request: Request) -> None:
        """Remove a request from the queue and its tokens from the count."""
        self._queue.remove(request)
        self._waits_for.pop(request.request_id, None)
        self.num_queued_tokens -= request.num_tokens

    def _give(self, request: Request, index: int) -> None:
        """Add a request to a target and remember which."""
        self._target_of[request.request_id] = index
        self._targets[index].add(request)

    def _read_changes(self) -> list[Request]:
        """Update the router for all changed targets, and take waiting requests back from some targets; return these.

        Requests are taken back from targets that made a plan without them, and for each target that has become idle
        from a few others.
        """
        asked: dict[int, None] = {}
        for index in sorted(self._changed):
            view = self._targets[index].view
            changes = view.changes
            if changes.has_lost_cache:
                self._router.forget(index)
            self._update_router(index, is_open=view.is_open())
            if changes.was_planned and index in self._with_waiting:
                asked[index] = None
            changes.was_planned = changes.has_lost_cache = False
        self._changed.clear()
        asked |= dict.fromkeys(islice(self._with_waiting, MAX_ASKED * self._num_freed))
        self._num_freed = 0
        return self._take_back(list(asked)) if asked else []

    def _update_router(self, index: int, *, is_open: bool) -> None:
        """Pass a target's load to the router; remember whether the target is idle and whether requests wait there."""
        target = self._targets[index]
        view = target.view
        self._versions[index] += 1
        self._router.set_load(index, target.load, is_open=is_open)
        if view.is_idle:
            self._num_freed += index not in self._idle
            self._idle[index] = None
        else:
            self._idle.pop(index, None)
        if view.num_waiting:
            self._with_waiting[index] = None
        else:
            self._with_waiting.pop(index, None)

    def _take_back(self, indices: Sequence[int]) -> list[Request]:
        """Return the waiting requests of some targets to the queue; return them in queue order."""
        returned: list[Request] = []
        for index in indices:
            withdrawn = self._targets[index].withdraw()
            for request in withdrawn:
                del self._target_of[request.request_id], self._bound[request.request_id]
            returned += withdrawn
            self._update_router(index, is_open=self._targets[index].view.is_open())  # it may be idle now
        returned.sort(key=lambda request: (request.priority, request.arrival))
        for request in reversed(returned):
            self._queue.take_back(request, request.num_shared_tokens)
            self.num_queued_tokens += request.num_tokens
        return returned

    def _route(self) -> list[Request]:
        """Assign queued requests until no target is open; return those that wait for a target with their prefix."""
        queue, bound, waiting = self._queue, [], []
        has_classes = queue.num_classes > 1
        if has_classes:
            for index, target in enumerate(self._targets):
                self._update_router(index, is_open=target.view.is_open(queue.first_priority))
        queue.settle()
        with closing(queue.in_order()) as order:
            for request, route in self._router.assign(
                order,
                lambda request: self._prefix(request) if request.read_prefix_cache else NO_PREFIX,
                self._could_start,
                lambda request, route: request.num_tokens - route.num_shared_tokens + ROW_CHARGE_TOKENS,
                lambda request: not has_classes or request.priority == queue.last_priority,
                self._unchanged_route,
            ):
                if route.is_open:
                    self.bind(request, route.replica)
                    bound.append(request)
                else:
                    self._waits_for[request.request_id] = route, self._versions[route.replica]
                    waiting.append(request)
        for request in bound:
            self._dequeue(request)
        self.num_deferred = len(waiting)
        return waiting

    def _unchanged_route(self, request: Request) -> Route | None:
        """Return the closed route that a request was given before, unless its target has changed since."""
        route, version = self._waits_for.get(request.request_id, (None, 0))
        return route if route is not None and version == self._versions[route.replica] else None

    def _could_start(self, request: Request, route: Route) -> Start:
        """Return whether a route's target could start a request now; if it is full, look at it again next time."""
        request.num_shared_tokens = route.num_shared_tokens
        answer = self._targets[route.replica].view.could_start(request)
        if answer is Start.FULL:  # a smaller request may fit at the next look
            self._changed.add(route.replica)
        return answer

    def _give_to_idle(self, requests: Sequence[Request]) -> None:
        """Give one of these queued requests to each idle target, whatever target holds its prefix."""
        if not requests:
            return
        for index, request in zip(list(islice(self._idle, len(requests))), requests, strict=False):
            request.num_shared_tokens = 0
            self.bind(request, index)
            self._dequeue(request)

    def _prefix(self, request: Request) -> Prefix:
        """Return a queued request's sampled prefixes, computed once."""
        prefix = self._prefixes.get(request.request_id)
        if prefix is None:
            prefix = self._prefixes[request.request_id] = self._targets[0].view.prefix(request)
        return prefix

    def check_integrity(self, unfinished: Iterable[str]) -> None:
        """Raise AssertionError unless each of these requests is either queued or on a target."""
        queued = {request.request_id for request in self._queue}
        assert set(unfinished) == self._target_of.keys() | queued
        assert not self._target_of.keys() & queued
        self._queue.check_integrity()
        assert self.num_queued_tokens == sum(request.num_tokens for request in self._queue)
