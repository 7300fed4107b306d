"""LoneReplica: what `LoadBalancer` is before several replicas, before a single one. It gets each request at once."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

from jaxserve.request import FinishReason, Request

if TYPE_CHECKING:
    from jaxserve.engine.replica import Replica


class LoneReplica:
    """No queue: the scheduler of the replica has the order of requests to itself.

    Args:
        replica: the replica.
    """

    num_queued = 0

    def __init__(self, replica: Replica) -> None:
        self._replica = replica
        self._ids: dict[str, None] = {}

    @property
    def queued(self) -> list[Request]:
        """Requests in no replica."""
        return []

    def add(self, requests: Iterable[Request]) -> None:
        """Give the replica new requests, for which it is large enough."""
        for request in requests:
            self._ids[request.request_id] = None
            self._replica.add(request)

    def place(self) -> None:
        """Do nothing: no request waits here."""

    def finish(self, request: Request, reason: FinishReason | None = None) -> None:
        """Forget a request that has ended, or end it for `reason`."""
        self._ids.pop(request.request_id, None)
        if reason is not None:
            self._replica.finish(request.request_id, reason)

    def ids_on(self, replica: Replica) -> list[str]:
        """Return the ids of the requests in a replica."""
        return list(self._ids)

    def check_integrity(self, unfinished: Iterable[str]) -> None:
        """Raise AssertionError unless these requests are in the replica."""
        assert set(unfinished) == self._ids.keys()
