"""StateSnapshots: states of recurrent layers that later requests with the same prefix continue from.

Snapshots are the pages of recurrent layers, in a pool of their own. A plan owns the snapshots that it reads and takes.
New ones are written while its step runs, so only later plans find them, and no page that a plan reads is written by it.
Eviction is least recently used first.

With lower tiers, a snapshot is also stored in the next one when it is taken, and loaded from there. Its content hash is
the hash of the page that ends after the same token.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence

from jaxserve.scheduling.kv_cache.group_kinds import Cached, GroupKind
from jaxserve.scheduling.kv_cache.pages import CACHED, COMPUTING, LOADING, STATES, STORING, Pages, PageState
from jaxserve.scheduling.kv_cache.transfers import Place, Transfer, Transfers


class StateSnapshots(GroupKind):
    """The group of recurrent layers.

    Args:
        num_pages: snapshots in the pool.
        transfers: moves between tiers.

    Attributes:
        cached: pages by hash, the least recently used first.
        taken: pages by hash that later plans find.
    """

    groups: tuple[int, ...] = ()

    def __init__(self, num_pages: int, transfers: Transfers) -> None:
        self._transfers = transfers
        self.cached: OrderedDict[bytes, int] = OrderedDict()
        self.taken: dict[bytes, int] = {}
        self._read: list[int] = []  # pages that the last plan reads, once per row
        self._pages = Pages(num_pages)

    def reset(self) -> None:
        """Forget all snapshots; pages that move stay until their moves end."""
        pages = self._pages
        for page in (*self.taken.values(), *self._read):
            pages.num_owners[page] -= 1
        self.cached.clear()
        self.taken.clear()
        self._read.clear()
        pages.content.clear()
        for page, (state, num_owners) in enumerate(zip(pages.states, pages.num_owners, strict=True)):
            if state in (COMPUTING, CACHED) and not num_owners:
                pages.free(page)

    def longest_hit(self, hashes: Sequence[bytes], cached: Cached) -> int:
        """Return the number of blocks up to the last cached snapshot; 0 if there is none."""
        return next((count for count in range(len(hashes), 0, -1) if hashes[count - 1] in cached[STATES]), 0)

    def seen(self, num_blocks: int) -> range:
        """Return only the last of the first `num_blocks` blocks: its snapshot is the state after all of them."""
        return range(max(num_blocks - 1, 0), num_blocks)

    # Plans

    def begin_plan(self) -> None:
        """Let the new plan find the snapshots that the previous one has taken, and release those that it has read."""
        pages = self._pages
        for page_hash, page in self.taken.items():
            self._cache(page, page_hash)
        for page in (*self.taken.values(), *self._read):
            pages.num_owners[page] -= 1
        self.taken.clear()
        self._read.clear()

    def read(self, page_hash: bytes) -> int:
        """Return a snapshot's page, from which a row of the current plan continues; keep it until the next plan.

        Args:
            page_hash: prefix hash at the snapshot, which must be cached.
        """
        page = self.cached[page_hash]
        self.cached.move_to_end(page_hash)
        self._pages.num_owners[page] += 1
        self._read.append(page)
        self._transfers.touch((STATES, page_hash, ""))
        return page

    def take(self, page_hash: bytes) -> int | None:
        """Return the page for a snapshot that a row of the current plan will take.

        None if the snapshot already exists, or no page is free.

        Args:
            page_hash: prefix hash at the snapshot.
        """
        if page_hash in self.taken:
            return None
        if page_hash in self.cached:
            self.cached.move_to_end(page_hash)
            return None
        page = self.hold()
        if page is not None:
            self._take(page, page_hash)
        return page

    # Rows that are swapped out

    def hold(self) -> int | None:
        """Return a page for a state whose tokens may not be known yet, until `name` or `drop`; None if none is free."""
        pages = self._pages
        if not pages.num_free:
            oldest = next((key for key, page in self.cached.items() if self._is_idle(page)), None)
            if oldest is None:
                return None
            page = self.cached.pop(oldest)
            del pages.content[page]
            pages.free(page)
        (page,) = pages.take(1)
        return page

    def name(self, page: int, page_hash: bytes) -> None:
        """Let later plans find a page from `hold`, whose prefix hash is now known."""
        if self._has(page_hash):
            self.drop(page)
        else:
            self._take(page, page_hash)

    def drop(self, page: int) -> None:
        """Free a page from `hold`."""
        self._pages.num_owners[page] -= 1
        self._pages.free(page)

    # Lower tiers

    def has(self, page_hash: bytes) -> bool:
        """Return whether a snapshot is in device memory, or will be."""
        return self._has(page_hash) or (STATES, page_hash) in self._transfers.loading

    def places(self, page_hash: bytes) -> list[Place]:
        """Return the page into which a snapshot that no other page has is loaded."""
        page = None if self._has(page_hash) else self._transfers.loading.get((STATES, page_hash))
        return [] if page is None else [(True, page)]

    def load(self, page_hash: bytes) -> str | None:
        """Begin to load a snapshot from a lower tier that has it; return its name, or None if no page is free."""
        page = self.hold()
        if page is None:
            return None
        self._pages.num_owners[page], self._pages.states[page] = 0, LOADING
        return self._transfers.load(page, (STATES, page_hash, ""))

    def transferred(self, transfer: Transfer) -> None:
        """Update the page of a move that has ended."""
        pages, page, page_hash = self._pages, transfer.move.page, transfer.move.content.page_hash
        pages.states[page] = COMPUTING
        if page in pages.content:
            pages.states[page] = CACHED
        elif transfer.move.is_load and transfer.is_useful and not self._has(page_hash):
            self._cache(page, page_hash)
        elif not pages.num_owners[page]:
            pages.free(page)

    def in_state(self, state: PageState) -> list[Place]:
        """Return all pages in a state, as transfers know them."""
        return [(True, page) for page, each in enumerate(self._pages.states) if each is state]

    def check_integrity(self, held: Sequence[int]) -> None:
        """Assert that pages are conserved and match the snapshots.

        Args:
            held: pages from `hold` that were neither named nor dropped.
        """
        owned = [*self.taken.values(), *self._read, *held]
        self._pages.check_integrity({page: owned.count(page) for page in owned})
        assert {page: page_hash for page, (_, page_hash, _) in self._pages.content.items()} == {
            page: page_hash for page_hash, page in self.cached.items()
        }
        assert not self.taken.keys() & self.cached.keys(), "a snapshot is taken twice"

    def _has(self, page_hash: bytes) -> bool:
        """Return whether a page has a snapshot, or will have it after the last plan."""
        return page_hash in self.cached or page_hash in self.taken

    def _is_idle(self, page: int) -> bool:
        """Return whether a cached page can be evicted."""
        return not self._pages.num_owners[page] and self._pages.states[page] is CACHED

    def _take(self, page: int, page_hash: bytes) -> None:
        """Let later plans find a page, and begin to store it in the next tier."""
        self.taken[page_hash] = page
        if self._transfers.store(page, (STATES, page_hash, "")):
            self._pages.states[page] = STORING

    def _cache(self, page: int, page_hash: bytes) -> None:
        """Make a page findable, unless another one with the same content is."""
        pages = self._pages
        if pages.states[page] is not STORING:
            pages.states[page] = CACHED
        pages.content[page] = STATES, page_hash, ""
        self.cached[page_hash] = page
