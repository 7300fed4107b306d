"""The pages of the KV pool as the host sees them: which are free, and how many owners each of the others has."""

from __future__ import annotations


class PagePool:
    """Page ids 0 .. num_pages - 1 with reference counts; every operation takes constant time for each page.

    A page is free (in the free list), referenced (one count per owning request), or idle: unreferenced but not
    free, because the prefix cache still values its content. Asserts guard against double frees: they are bugs here,
    never a caller's mistake.
    """

    def __init__(self, num_pages: int):
        self.num_pages = num_pages
        self._free = list(range(num_pages - 1, -1, -1))  # popped from the end: low ids first
        self._num_refs = [0] * num_pages

    @property
    def num_free(self) -> int:
        """Pages in the free list."""
        return len(self._free)

    def num_refs(self, page: int) -> int:
        """Owners of `page`."""
        return self._num_refs[page]

    def allocate(self, num_pages: int) -> list[int]:
        """Return so many free pages, now with one reference each. They must be there."""
        if num_pages == 1:  # a row in decode takes one at a time
            page = self._free.pop()
            assert self._num_refs[page] == 0, f"free page {page} has owners"
            self._num_refs[page] = 1
            return [page]
        rest = len(self._free) - num_pages
        pages = self._free[rest:]
        del self._free[rest:]
        pages.reverse()
        for page in pages:
            assert self._num_refs[page] == 0, f"free page {page} has owners"
            self._num_refs[page] = 1
        return pages

    def retain(self, page: int) -> None:
        """One more owner for a referenced or idle page."""
        self._num_refs[page] += 1

    def release(self, page: int) -> bool:
        """One owner less; True when it was the last and the page is now idle."""
        assert self._num_refs[page] > 0, f"page {page} released more often than retained"
        self._num_refs[page] -= 1
        return self._num_refs[page] == 0

    def recycle(self, page: int) -> None:
        """Puts an idle page back in the free list."""
        assert self._num_refs[page] == 0, f"page {page} is still in use"
        self._free.append(page)

    def check_integrity(self, owners: dict[int, int], idle: set[int]) -> None:
        """Asserts that counts equal `owners` (page -> number of owners) and that no page is lost or in two places."""
        free = set(self._free)
        assert len(free) == len(self._free), "a page is twice in the free list"
        assert not free & idle, f"pages {sorted(free & idle)} are free and cached"
        for page, num_refs in enumerate(self._num_refs):
            assert num_refs == owners.get(page, 0), f"page {page}: {num_refs} references, {owners.get(page, 0)} owners"
            assert (num_refs == 0) == (page in free or page in idle), f"page {page} is lost or in use while free"
