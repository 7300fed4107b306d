"""DiskTier: the scheduler's view of pages in a file."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable
from typing import NamedTuple

from jaxserve.scheduling.kv_cache.page_archive import PageKey
from jaxserve.scheduling.kv_cache.transfers import Move


class Requested(NamedTuple):
    """Work for the file and the device, in order.

    Attributes:
        forgotten: moves that end without a copy, because their content was forgotten before they started.
        is_cleared: all content before it is forgotten.
        evicted: pages to delete first.
        moves: pages to copy.
    """

    forgotten: list[Move]
    is_cleared: bool
    evicted: list[PageKey]
    moves: list[Move]


class DiskTier:
    """A tier that keeps the most recently used pages; the `Tier` protocol has the meaning of its methods.

    Args:
        keys: pages in the file, the one to evict first at the front.
        num_pages: capacity.
    """

    name = "disk"

    def __init__(self, keys: Iterable[PageKey], num_pages: int) -> None:
        self._num_pages = num_pages
        self._stored: OrderedDict[PageKey, int | None] = OrderedDict.fromkeys(keys)  # move that stored each page
        self._sources: dict[int, int | None] = {}  # of each load: the move that stored its page
        self._storing: set[int] = set()
        self._requested = Requested([], False, [], [])

    def has(self, group: int, page_hash: bytes) -> bool:
        return (group, page_hash) in self._stored

    def load(self, move: Move) -> None:
        key = PageKey(move.group, move.page_hash)
        self._stored.move_to_end(key)
        self._sources[move.key] = self._stored[key]
        self._requested.moves.append(move)

    def store(self, move: Move) -> None:
        """Request the copy, and evict pages first to make it fit."""
        while self._stored and len(self._stored) + len(self._storing) >= self._num_pages:
            self._requested.evicted.append(self._stored.popitem(last=False)[0])
        self._storing.add(move.key)
        self._requested.moves.append(move)

    def transferred(self, move: Move, *, ok: bool) -> None:
        key = PageKey(move.group, move.page_hash)
        if not move.is_load:
            self._storing.discard(move.key)
            if ok:
                self._stored[key] = move.key
                self._stored.move_to_end(key)
            return
        source = self._sources.pop(move.key)
        if not ok and self._stored.get(key, -1) == source:  # and not stored again meanwhile
            del self._stored[key]

    def clear(self) -> None:
        self._stored.clear()
        forgotten = self._requested.forgotten + self._requested.moves
        self._requested = Requested(forgotten, True, [], [])

    def restart(self) -> None:
        """Forget all moves; the content of the file does not depend on the device."""
        self._sources.clear()
        self._storing.clear()
        self._requested.forgotten.clear()
        self._requested.moves.clear()

    def take_requested(self) -> Requested:
        """Return the work requested since the last call."""
        requested, self._requested = self._requested, Requested([], False, [], [])
        return requested
