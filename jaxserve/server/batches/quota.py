"""Quota: maximum size of a tenant's files, uploads in progress included."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

from jaxserve.openai.errors import BadRequestError

if TYPE_CHECKING:
    from jaxserve.server.batches.store import Store


class Quota:
    """Maximum total size of each tenant's files and uploads. Methods are called on the event loop.

    Args:
        store: stored files.
        max_bytes: maximum total size per tenant.
    """

    def __init__(self, store: Store, max_bytes: int) -> None:
        self._store, self._max_bytes = store, max_bytes
        self._uploads: dict[str, list[Reservation]] = {}  # reservations by tenant

    @contextmanager
    def upload(self, owner: str) -> Iterator[Reservation]:
        """Yield a reservation for an upload of a tenant, which counts until the end of the context."""
        reservation = Reservation(self, owner)
        self._uploads.setdefault(owner, []).append(reservation)
        try:
            yield reservation
        finally:
            self._uploads[owner].remove(reservation)
            if not self._uploads[owner]:
                del self._uploads[owner]

    def check(self, reservation: Reservation, num_bytes: int) -> None:
        """Raise BadRequestError (413) if an upload would exceed the quota."""
        others = sum(each.num_bytes for each in self._uploads[reservation.owner] if each is not reservation)
        total = self._store.num_bytes(reservation.owner) + others + num_bytes
        if total > self._max_bytes:
            beside = " and uploads that have not ended" if others else ""
            raise BadRequestError(
                f"the files of a key must have at most {self._max_bytes} bytes in all, got {total} with this "
                f"one{beside}; delete files that are not needed",
                "file",
                "storage_exceeded",
                413,
            )


class Reservation:
    """Part of a tenant's quota that an upload in progress holds.

    Attributes:
        owner: the tenant.
        num_bytes: size of the part.
    """

    def __init__(self, quota: Quota, owner: str) -> None:
        self._quota, self.owner, self.num_bytes = quota, owner, 0

    def hold(self, num_bytes: int) -> None:
        """Hold at least this many bytes; BadRequestError (413) if they exceed the quota."""
        if num_bytes > self.num_bytes:
            self.settle(num_bytes)

    def settle(self, num_bytes: int) -> None:
        """Hold exactly this many bytes; BadRequestError (413) if they exceed the quota."""
        self._quota.check(self, num_bytes)
        self.num_bytes = num_bytes
