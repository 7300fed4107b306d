"""One queue before the replicas of an engine: who gets which request, and whose turn it is."""

from __future__ import annotations

import time
from collections import OrderedDict
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

from jaxserve.request import FinishReason, Request, RequestStatus

if TYPE_CHECKING:
    from jaxserve.engine.core import EngineCore

_POLL_S = 5e-5  # between looks at the devices of several replicas


class Placement:
    """Gives a request to a replica when that can start it at once; a lone one has them all, and the queue is its own.

    No replica is idle while a request waits that it has room for: what one could not start after all, or had to
    preempt, comes back to the queue.

    Args:
        cores: the replicas.
    """

    def __init__(self, cores: Sequence[EngineCore]) -> None:
        self._cores = cores
        self._queue: OrderedDict[str, Request] = OrderedDict()  # no replica has room for them yet
        self._core_of: dict[str, EngineCore] = {}  # by the id of each request that a replica has

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
        core = self._core_of.pop(request.request_id, None)
        if core is None:
            del self._queue[request.request_id]
            request.status, request.finish_reason = RequestStatus.FINISHED, reason
        elif reason is not None:
            core.finish(request.request_id, reason)

    def ids_on(self, core: EngineCore) -> list[str]:
        """The requests that a replica has."""
        return [request_id for request_id, owner in self._core_of.items() if owner is core]

    def place(self) -> None:
        """Give requests, in their order, to replicas that have room for them."""
        if not self.is_lone:
            self._take_back()
        while self._queue:
            request = next(iter(self._queue.values()))
            if (core := self._core_for(request)) is None:
                return
            core.add(request)
            self._core_of[request.request_id] = core
            del self._queue[request.request_id]

    def _take_back(self) -> None:
        returned = [request for core in self._cores for request in core.withdraw()]
        for request in sorted(returned, key=lambda request: request.arrival, reverse=True):
            del self._core_of[request.request_id]
            self._queue[request.request_id] = request
            self._queue.move_to_end(request.request_id, last=False)

    def _core_for(self, request: Request) -> EngineCore | None:
        """The replica that would give its first token after the least work, which cached pages save."""
        if self.is_lone:
            return self._cores[0]
        free = [core for core in self._cores if core.scheduler.has_room(request)]
        return min(free, key=lambda core: core.scheduler.work_before(request), default=None)

    def next_cores(self) -> Sequence[EngineCore]:
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
