"""ReuseOrder: the order in which one tenant's unused pages are evicted, with hints about their next use.

1. Pages that only replaced turns have used: a later turn of the conversation continued from other pages. A later turn
   continues an earlier one if its prompt begins with the earlier prompt. So do pages that are not expected again.
2. Pages without a hint, or whose hint is too old, in the order of release.
3. Pages with a hint: the turn whose next use is farthest from now goes first (Belady, 1966). That is the time until the
   expected use, and after it the time since: the longer a conversation is late, the later it probably continues. A turn
   with an unknown time is late from its end on, so that the least recently used one goes first.

Time is the latest arrival of a request, so that a replay of events gives the same order.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections import OrderedDict
from collections.abc import Iterator
from itertools import count
from typing import NamedTuple

from jaxserve.api.reuse_hint import NOT_AGAIN, ReuseHint


class Turn:
    """Pages with the same hint, released by one request.

    Attributes:
        group: their conversation; empty if several have used them.
        due_s: expected time of the next use; infinite if none is expected.
        until_s: time after which the hint is too old.
        pages: those among them without owners, the one to evict first in front.
    """

    __slots__ = ("due_s", "group", "pages", "until_s")

    def __init__(self, hint: ReuseHint, now_s: float, *, is_common: bool = False) -> None:
        self.group = "" if is_common else hint.group
        self.due_s = now_s + hint.after_s
        self.until_s = now_s + hint.within_s
        self.pages: OrderedDict[int, None] = OrderedDict()


class _Entry(NamedTuple):
    """Place of a turn in a sorted list; the number keeps turns from being compared."""

    time_s: float
    number: int
    turn: Turn


class _Sorted(list[_Entry]):
    """Turns in order of a time."""

    def add(self, entry: _Entry) -> None:
        insort(self, entry)

    def discard(self, entry: _Entry) -> None:
        del self[bisect_left(self, entry)]


class ReuseOrder:
    """One tenant's evictable pages."""

    def __init__(self) -> None:
        self._replaced: OrderedDict[int, None] = OrderedDict()
        self._plain: OrderedDict[int, None] = OrderedDict()
        self._by_due, self._by_end = _Sorted(), _Sorted()
        self._entries: dict[Turn, tuple[_Entry, _Entry]] = {}  # of turns that have pages
        self._numbers = count()

    def __iter__(self) -> Iterator[int]:
        yield from self._replaced
        yield from self._plain
        for turn in self._entries:
            yield from turn.pages

    def __bool__(self) -> bool:
        return bool(self._plain or self._entries or self._replaced)

    def add(self, page: int, turn: Turn | None) -> None:
        """Add a page that lost its last owner; `turn` has its hint, None without one."""
        if turn is None:
            self._plain[page] = None
        elif turn.due_s == NOT_AGAIN:
            self._replaced[page] = None
        else:
            if not turn.pages:
                number = next(self._numbers)
                due, end = self._entries[turn] = _Entry(turn.due_s, number, turn), _Entry(turn.until_s, number, turn)
                self._by_due.add(due)
                self._by_end.add(end)
            turn.pages[page] = None

    def remove(self, page: int, turn: Turn | None) -> None:
        """Remove a page; `turn` has its hint, None without one."""
        if turn is not None and page in turn.pages:
            del turn.pages[page]
            if not turn.pages:
                self._forget(turn)
        elif page in self._plain:
            del self._plain[page]
        else:
            del self._replaced[page]

    def replace(self, turn: Turn) -> None:
        """Evict the pages of a turn before all others."""
        if turn.pages:
            self._forget(turn)
            self._replaced.update(turn.pages)
            turn.pages.clear()

    def first(self, now_s: float) -> int:
        """Return the page to evict first."""
        while self._by_end and self._by_end[0].time_s < now_s:
            self._expire(self._by_end[0].turn)
        if pages := self._replaced or self._plain:
            return next(iter(pages))
        late, early = self._by_due[0], self._by_due[-1]
        turn = early.turn if early.time_s - now_s > now_s - late.time_s else late.turn
        return next(iter(turn.pages))

    def _expire(self, turn: Turn) -> None:
        """Evict the pages of a turn before all others without a hint, which were released later."""
        self._forget(turn)
        for page in reversed(turn.pages):
            self._plain[page] = None
            self._plain.move_to_end(page, last=False)
        turn.pages.clear()

    def _forget(self, turn: Turn) -> None:
        """Remove a turn from the sorted lists."""
        due, end = self._entries.pop(turn)
        self._by_due.discard(due)
        self._by_end.discard(end)
