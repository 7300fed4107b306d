"""Pages: each page's state, owners and content."""

from __future__ import annotations

import enum
from collections.abc import Mapping


class PageState(enum.Enum):
    """A page's state."""

    FREE = enum.auto()  # pages in the free list, without owner and content
    COMPUTING = enum.auto()  # has owners, and cannot be found
    CACHED = enum.auto()  # found by its content hash, with or without owners
    LOADING = enum.auto()  # being written from a lower tier, with or without owners
    STORING = enum.auto()  # being read by a lower tier, still cached or not, with or without owners


FREE, COMPUTING, CACHED, LOADING, STORING = PageState  # module globals are read faster than enum members


STATES = -1  # group of recurrent layers, whose pages are state snapshots in a pool of their own

# KV group of a cached page, hash up to its last token, and the tenant whose part of the cache it counts towards. A
# plain tuple is created in a tenth of a named tuple's time.
Content = tuple[int, bytes, str]

_LISTED = 256  # pages listed together when they are first needed


class Pages:
    """Pages 0 .. num_pages - 1 of a pool. Every operation takes constant time per page.

    Pages are listed when they are first needed, by ascending number: a simulator has thousands of pools.
    Asserts guard against double frees: they are bugs here, never a caller's mistake.

    Attributes:
        states: state of each listed page.
        num_owners: how many requests use each listed page.
        content: content by page, if it can be found.
        free_pages: listed free pages, the next one at the end.
        num_free: number of free pages, listed or not.
    """

    def __init__(self, num_pages: int) -> None:
        self.states: list[PageState] = []
        self.num_owners: list[int] = []
        self.content: dict[int, Content] = {}
        self.free_pages: list[int] = []
        self.num_free = self._num_pages = num_pages

    def take(self, num_pages: int) -> list[int]:
        """Return `num_pages` free pages, now with one owner each; they must exist."""
        if len(self.free_pages) < num_pages:
            self._list_more(num_pages - len(self.free_pages))
        self.num_free -= num_pages
        states, num_owners = self.states, self.num_owners
        if num_pages == 1:  # a decoding row takes one at a time
            page = self.free_pages.pop()
            assert states[page] is FREE, f"page {page} is in use while free"
            states[page], num_owners[page] = COMPUTING, 1
            return [page]
        rest = len(self.free_pages) - num_pages
        pages = self.free_pages[rest:]
        del self.free_pages[rest:]
        pages.reverse()
        for page in pages:
            assert states[page] is FREE, f"page {page} is in use while free"
            states[page], num_owners[page] = COMPUTING, 1
        return pages

    def free(self, page: int) -> None:
        """Return a page without owners to the free list."""
        assert not self.num_owners[page], f"page {page} is still in use"
        assert self.states[page] is not FREE, f"page {page} is freed twice"
        self.states[page] = FREE
        self.free_pages.append(page)
        self.num_free += 1

    def _list_more(self, num_pages: int) -> None:
        """List at least `num_pages` more pages, which are taken after all listed ones."""
        first = len(self.states)
        count = min(max(num_pages, _LISTED), self._num_pages - first)
        assert count >= num_pages, "too few pages are free"
        self.states += [FREE] * count
        self.num_owners += [0] * count
        self.free_pages[:0] = range(first + count - 1, first - 1, -1)

    def check_integrity(self, owners: Mapping[int, int]) -> None:
        """Assert consistency; `owners` maps each page in use to its owners' number."""
        free = set(self.free_pages)
        assert len(free) == len(self.free_pages), "a page is twice in the free list"
        assert self.num_free == len(free) + self._num_pages - len(self.states), "a free page is not counted"
        unlisted = [page for page in owners if page >= len(self.states)]
        assert not unlisted, f"page {unlisted[0]} is in use but not listed"
        for page, (state, num_owners) in enumerate(zip(self.states, self.num_owners, strict=True)):
            assert num_owners == owners.get(page, 0), f"page {page}: {num_owners} owners, not {owners.get(page, 0)}"
            assert (state is FREE) == (page in free), f"page {page} is {state} and in the free list: {page in free}"
            assert state is not FREE or not num_owners, f"page {page} is in use while free"
            assert state is not COMPUTING or num_owners, f"page {page} is lost"
            has_content = state is CACHED or (state is STORING and page in self.content)
            assert has_content == (page in self.content), f"page {page} is {state}: {self.content.get(page)}"

    def in_state(self, state: PageState) -> list[int]:
        """Return all pages in a state."""
        return [page for page, each in enumerate(self.states) if each is state]
