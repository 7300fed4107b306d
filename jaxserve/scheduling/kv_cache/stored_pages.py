"""StoredPages: the scheduler's index of the pages in one tier below device memory."""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Iterable
from typing import NamedTuple


class PageKey(NamedTuple):
    """A page's content: its KV group, and the hash that covers all tokens up to its last one."""

    group: int
    page_hash: bytes


class StoredPages:
    """Pages of one tier, the least recently used first.

    Its answers depend only on earlier calls and their order. A replay of the scheduler's events thus makes the same
    plans with an index of the same size and content. A page is stored as soon as its store was requested, because
    moves of a page run in the order of requests. Moves are identified by numbers, as others may have the same content,
    before and after `clear`.

    Args:
        name: one of `LOWER_TIERS`, under which its tokens are counted.
        num_pages: capacity.
        keys: pages in the tier, the one to evict first in front.
        outlives_device: True if a device failure leaves its content intact.

    Attributes:
        name: the tier's name.
        outlives_device: see above.
    """

    def __init__(
        self, name: str, num_pages: int, keys: Iterable[PageKey] = (), *, outlives_device: bool = False
    ) -> None:
        self.name = name
        self._num_pages, self.outlives_device = num_pages, outlives_device
        self._stored: OrderedDict[PageKey, int | None] = OrderedDict.fromkeys(keys)  # move that stored each page
        self._sources: dict[int, tuple[PageKey, int | None]] = {}  # by load: its page, and the move that stored it
        self._num_loads: Counter[PageKey] = Counter()  # loads by page, without those that have none

    def __contains__(self, key: object) -> bool:
        return key in self._stored

    @property
    def is_full(self) -> bool:
        """True if a page must be deleted before another one fits."""
        return len(self._stored) >= self._num_pages

    def victim(self) -> PageKey | None:
        """Return the page to delete first; None if all are being loaded."""
        return next((key for key in self._stored if key not in self._num_loads), None)

    def delete(self, key: PageKey) -> None:
        del self._stored[key]

    def touch(self, key: PageKey) -> None:
        """Note that a page is used, if it is stored."""
        if key in self._stored:
            self._stored.move_to_end(key)

    def load(self, move: int, key: PageKey) -> None:
        """Note that a stored page is read by a move until this has ended."""
        self._sources[move] = key, self._stored[key]
        self._num_loads[key] += 1

    def store(self, move: int, key: PageKey) -> None:
        """Note that a move stores a page."""
        self._stored[key] = move
        self._stored.move_to_end(key)

    def loaded(self, move: int) -> int | None:
        """Note the end of a move that reads a page; return the move that stored the page."""
        key, stored_by = self._sources.pop(move)
        self._num_loads[key] -= 1
        if not self._num_loads[key]:
            del self._num_loads[key]
        return stored_by

    def holds(self, key: PageKey, source: int | None) -> bool:
        """Return whether a page is still the one that the move `source` has stored."""
        return self._stored.get(key, -1) == source

    def clear(self) -> None:
        """Forget all content, as after a change of weights; moves continue, but their results are useless."""
        self._stored.clear()

    def restart(self) -> None:
        """Forget all moves, and content that a device failure may have destroyed."""
        self._sources.clear()
        self._num_loads.clear()
        if not self.outlives_device:
            self._stored.clear()
