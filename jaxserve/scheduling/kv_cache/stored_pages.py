"""StoredPages: the scheduler's index of the pages in one tier below device memory."""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Iterable, Iterator
from heapq import merge
from typing import NamedTuple

from jaxserve.scheduling.kv_cache.pages import STATES

NUM_LEVELS = 5  # further uses of a page do not count
NUM_NEW = 2  # levels of pages that at most one request has used
# The bias against these, a binary logarithm, changes by LEARNING over the capacity for each page that comes back, up to
# MAX_BIAS. A bias below CHANCE does not count.
LEARNING, MAX_BIAS, CHANCE = 2.0, 4.0, 0.5


class PageKey(NamedTuple):
    """A page's content: its KV group, STATES for a state snapshot, and the hash of all tokens up to its last one."""

    group: int
    page_hash: bytes


class StoredPages:
    """Pages of one tier.

    A full tier deletes the oldest page. Its age is the time since its last use, in uses of pages, halved for each use,
    up to NUM_LEVELS - 1 times. Prompts that nobody continues thus leave before conversations, and conversations that
    ended long ago leave in the end (`scripts/tier_hits.py` compares it with other rules). The tier remembers the number
    of uses of as many deleted pages as it holds, in case they are stored again. It learns from those that are, like ARC
    (Megiddo and Modha 2003): the more of them several requests had used, the faster other pages grow old.

    Its answers depend only on earlier calls and their order. A replay of the scheduler's events thus makes the same
    plans with an index of the same size and content. A page is stored as soon as its store was requested, because
    moves of a page run in the order of requests. Moves are identified by numbers, as others may have the same content,
    before and after `clear`.

    Args:
        name: one of `LOWER_TIERS`, under which its tokens are counted.
        num_pages: capacity.
        keys: pages that an earlier engine has stored and used, the one to delete first in front.
        outlives_device: True if a device failure leaves its content intact.
        state_pages: pages of the capacity that a state snapshot takes.
        is_read_only: True if no pages are copied to it.

    Attributes:
        name: the tier's name.
        num_pages: see above.
        outlives_device: see above.
        state_pages: see above.
        is_read_only: see above.
    """

    def __init__(
        self,
        name: str,
        num_pages: int,
        keys: Iterable[PageKey] = (),
        *,
        outlives_device: bool = False,
        state_pages: int = 1,
        is_read_only: bool = False,
    ) -> None:
        self.name, self.state_pages, self.is_read_only = name, state_pages, is_read_only
        self.num_pages, self.outlives_device = num_pages, outlives_device
        self._num_states = 0  # state snapshots among the stored pages
        self._stored: dict[PageKey, int | None] = {}  # move that stored each page
        self._levels: dict[PageKey, int] = {}  # number of uses of stored pages, bounded
        self._used: list[OrderedDict[PageKey, int]] = [OrderedDict() for _ in range(NUM_LEVELS)]  # last use, by level
        self._now = 0  # number of uses so far
        self._deleted: OrderedDict[PageKey, int] = OrderedDict()  # levels of pages deleted for others
        self._num_new = 0  # those among them that at most one request had used
        self._bias = 0.0
        self._sources: dict[int, tuple[PageKey, int | None]] = {}  # by load: its page, and the move that stored it
        self._num_loads: Counter[PageKey] = Counter()  # loads by page, without those that have none
        for key in keys:
            self._add(key, None)
            self._use(key, 1)

    def __contains__(self, key: object) -> bool:
        return key in self._stored

    @property
    def keys(self) -> list[PageKey]:
        """Stored pages, in the order in which they were first stored."""
        return [*self._stored]

    def fits(self, key: PageKey) -> bool:
        """Return whether another page fits without a deletion."""
        num_taken = len(self._stored) + self._num_states * (self.state_pages - 1)
        return num_taken + self.size(key) <= self.num_pages

    def size(self, key: PageKey) -> int:
        """Return the pages of the capacity that a page takes."""
        return self.state_pages if key.group == STATES else 1

    def victim(self) -> PageKey | None:
        """Return the page to delete first; None if there is none, or all are being loaded."""
        oldest = [next(self._aged(level)) for level, used in enumerate(self._used) if used]
        if not oldest or (key := min(oldest)[1]) not in self._num_loads:
            return key if oldest else None
        by_age = merge(*map(self._aged, range(NUM_LEVELS)))
        return next((key for _, key in by_age if key not in self._num_loads), None)

    def _aged(self, level: int) -> Iterator[tuple[float, PageKey]]:
        """Yield the pages on a level, the oldest first, after an age that is comparable between levels, negated."""
        factor = 2 ** (NUM_LEVELS - 1 - level + (max(self._bias - CHANCE, 0) if level < NUM_NEW else 0))
        return (((used - self._now) * factor, key) for key, used in self._used[level].items())

    def evict(self, key: PageKey) -> None:
        """Delete a page so that another one fits."""
        self._deleted[key] = level = self._levels[key]
        self._num_new += level < NUM_NEW
        if len(self._deleted) > self.num_pages:
            _, level = self._deleted.popitem(last=False)
            self._num_new -= level < NUM_NEW
        self.delete(key)

    def delete(self, key: PageKey) -> None:
        """Delete a page whose content is lost."""
        del self._stored[key], self._used[self._levels.pop(key)][key]
        self._num_states -= key.group == STATES

    def touch(self, key: PageKey) -> None:
        """Note that a page was used, if it is stored: its last owner has released it."""
        if key in self._stored:
            self._use(key, self._levels[key] + 1)

    def _use(self, key: PageKey, level: int) -> None:
        """Make a stored page the last one used, with a number of uses."""
        if (before := self._levels.get(key)) is not None:
            del self._used[before][key]
        self._now += 1
        self._levels[key] = level = min(level, NUM_LEVELS - 1)
        self._used[level][key] = self._now

    def load(self, move: int, key: PageKey) -> None:
        """Note that a stored page is read by a move until this has ended."""
        self._sources[move] = key, self._stored[key]
        self._num_loads[key] += 1

    def store(self, move: int, key: PageKey) -> None:
        """Note that a move stores a page."""
        self._add(key, move)
        self._use(key, self._earlier_level(key))

    def found(self, key: PageKey) -> None:
        """Note that another engine has stored a page."""
        self._add(key, None)
        self._use(key, 1)

    def _earlier_level(self, key: PageKey) -> int:
        """Return the level of a page when it was deleted, and learn that it has come back; 0 if it is new."""
        num_new, num_others = self._num_new, len(self._deleted) - self._num_new
        level = self._deleted.pop(key, None)
        if level is None:
            return 0
        is_new = level < NUM_NEW
        self._num_new -= is_new
        change = -max(1.0, num_others / num_new) if is_new else max(1.0, num_new / num_others)
        self._bias = min(max(self._bias + LEARNING * change / self.num_pages, 0.0), MAX_BIAS)
        return level

    def _add(self, key: PageKey, move: int | None) -> None:
        """Note a page that a move stores, or that an earlier engine has."""
        self._num_states += key.group == STATES and key not in self._stored
        self._stored[key] = move

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
        self._num_states = 0
        self._levels.clear()
        self._deleted.clear()
        self._bias, self._num_new = 0.0, 0
        for used in self._used:
            used.clear()

    def restart(self) -> None:
        """Forget all moves, and content that a device failure may have destroyed."""
        self._sources.clear()
        self._num_loads.clear()
        if not self.outlives_device:
            self.clear()
