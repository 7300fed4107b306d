"""Transfers: page moves between the device and lower tiers, and the requests that wait for them.

The scheduler decides on moves and describes them by values; a connector moves the bytes, and emits a `Transferred`
event when moves have ended. A move requested while a plan is made runs after that plan's step, which may still copy
from a page to be loaded, and before later steps. Nobody reuses a page until its move has ended, because it is written
(load) or read (store) meanwhile.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple, Protocol, runtime_checkable

from jaxserve.scheduling.kv_cache.pages import Content
from jaxserve.scheduling.request import Request


class Move(NamedTuple):
    """A copy of a page's content from or to a lower tier.

    Attributes:
        key: unique number of the move.
        is_load: True if the page is written, False if it is read.
        page: device page.
        group: its KV group.
        page_hash: content hash.
    """

    key: int
    is_load: bool
    page: int
    group: int
    page_hash: bytes


@runtime_checkable
class Tier(Protocol):
    """A tier below device memory, as seen by the scheduler. Its answers depend only on earlier calls and their order.

    A replay of the scheduler's events thus makes the same plans with a tier of the same size. A move is identified by
    its key, because other moves may have the same content, before and after `clear`.

    Attributes:
        name: one of `LOWER_TIERS`, under which its tokens are counted.
    """

    name: str

    def has(self, group: int, page_hash: bytes) -> bool:
        """Return whether a page can be loaded."""

    def load(self, move: Move) -> None:
        """Note that a page's content will be copied from this tier to the device."""

    def store(self, move: Move) -> None:
        """Note that a page's content will be copied from the device to this tier."""

    def transferred(self, move: Move, *, ok: bool) -> None:
        """Note the end of a move: a stored page can now be loaded; a page that failed to load cannot."""

    def clear(self) -> None:
        """Forget all content, as after a change of weights; moves continue, but their results are useless."""

    def restart(self) -> None:
        """Forget all moves, and content that a device failure may have destroyed."""


class EndedMoves(NamedTuple):
    """Moves that have ended.

    Attributes:
        keys: their keys.
        ok: False if their content is lost.
    """

    keys: list[int]
    ok: bool


class PageMover(Protocol):
    """Copies the bytes of pages, for one replica."""

    @property
    def tier(self) -> Tier:
        """The scheduler's view of the pages that were copied."""

    def start_moves(self) -> None:
        """Start the moves requested from the tier; call it after the step that was planned meanwhile."""

    def take_ended(self) -> list[EndedMoves]:
        """Return the moves that have ended since the last call: steps launched from now on may read loaded pages."""

    def forget(self) -> None:
        """Forget all moves: none of them writes to a page any more."""

    def close(self) -> None:
        """Complete the stores and free all resources."""


@dataclass
class Transfer:
    """A move that has not ended.

    Attributes:
        tier: tier that makes it.
        content: content of the page after the move.
        waiting: requests that wait for its end.
        is_useful: False if it failed, or its content was forgotten.
    """

    move: Move
    tier: Tier
    content: Content
    waiting: list[Request] = field(default_factory=list)
    is_useful: bool = True


class Transfers:
    """Moves that have not ended.

    Args:
        tiers: lower tiers, the next one first.
        keys: unique move numbers, also across restarts.

    Attributes:
        tiers: lower tiers.
        loading: pages being loaded, by group and hash.
    """

    def __init__(self, tiers: Sequence[Tier], keys: Iterator[int]) -> None:
        self.tiers = tiers
        self.loading: dict[tuple[int, bytes], int] = {}
        self._keys = keys
        self._by_key: dict[int, Transfer] = {}
        self._by_page: dict[int, Transfer] = {}

    def reaches(self, group: int, page_hash: Any) -> bool:
        """Return whether a page can be loaded or is being loaded."""
        return (group, page_hash) in self.loading or any(tier.has(group, page_hash) for tier in self.tiers)

    def wants(self, content: Content) -> bool:
        """Return whether a page without owners should be stored before it is evicted."""
        return bool(self.tiers) and not self.reaches(*content[:2])

    def load(self, page: int, content: Content) -> str:
        """Begin to load a page from the first tier that has its content; return the tier's name."""
        tier = next(tier for tier in self.tiers if tier.has(*content[:2]))
        self.loading[content[:2]] = page
        tier.load(self._begin(page, content, tier, is_load=True))
        return tier.name

    def store(self, page: int, content: Content) -> None:
        """Begin to store a page in the first lower tier."""
        self.tiers[0].store(self._begin(page, content, self.tiers[0], is_load=False))

    def _begin(self, page: int, content: Content, tier: Tier, *, is_load: bool) -> Move:
        """Return a new move of a page, recorded until it ends."""
        move = Move(next(self._keys), is_load, page, *content[:2])
        self._by_key[move.key] = self._by_page[page] = Transfer(move, tier, content)
        return move

    def wait(self, request: Request) -> None:
        """Make a request wait for the moves that load its pages."""
        for page in request.pages:
            if (transfer := self._by_page.get(page)) is not None and transfer.move.is_load:
                transfer.waiting.append(request)
                request.num_transfers += 1

    def end(self, key: int, *, ok: bool) -> Transfer | None:
        """Remove and return the transfer with this key, which has ended; None if it began before a restart.

        Args:
            key: key of its move.
            ok: False if the moved content is lost.
        """
        transfer = self._by_key.pop(key, None)
        if transfer is None:
            return None
        move = transfer.move
        del self._by_page[move.page]
        transfer.is_useful &= ok
        if move.is_load and self.loading.get((move.group, move.page_hash)) == move.page:
            del self.loading[move.group, move.page_hash]
        transfer.tier.transferred(move, ok=transfer.is_useful)
        for request in transfer.waiting:
            request.num_transfers -= 1
        return transfer

    def abandon(self, request: Request) -> None:
        """Stop a request from waiting; its pages are loaded nevertheless."""
        for page in request.pages:
            if (transfer := self._by_page.get(page)) is not None and request in transfer.waiting:
                transfer.waiting.remove(request)
        request.num_transfers = 0

    def clear(self) -> None:
        """Forget the content of all tiers and of moving pages."""
        for transfer in self._by_key.values():
            transfer.is_useful = False
        self.loading.clear()
        for tier in self.tiers:
            tier.clear()

    def check_integrity(self, loading: Collection[int], storing: Collection[int], waiting: Sequence[Request]) -> None:
        """Assert that pages and requests match the moves.

        Args:
            loading: pages in state LOADING.
            storing: pages in state STORING.
            waiting: requests in status LOADING.
        """
        assert self._by_page == {transfer.move.page: transfer for transfer in self._by_key.values()}
        moves = [transfer.move for transfer in self._by_key.values()]
        assert sorted(move.page for move in moves if move.is_load) == sorted(loading), "a page loads by no or two moves"
        assert sorted(move.page for move in moves if not move.is_load) == sorted(storing), "a page is not being stored"
        assert set(self.loading.values()) <= set(loading)
        for request in waiting:
            pages = [t.move.page for t in self._by_key.values() if request in t.waiting]
            assert len(pages) == len(set(pages)) == request.num_transfers > 0, f"{request.request_id} waits for nothing"
            assert set(pages) == set(request.pages) & set(loading), f"{request.request_id} waits for others' pages"
        assert all(request in waiting for t in self._by_key.values() for request in t.waiting), "it waits no more"
