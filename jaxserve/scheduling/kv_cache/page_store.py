"""PageStore: all pages of a pool, from allocation to eviction, and the content by which requests find them.

A page is free; computing, while requests that own it fill it; or cached: found by the hash of everything up to its last
token, by whoever begins alike. A cached page that loses its last owner keeps its content until no free page is left.

Device memory is the first of the tiers that keep content by its hash. Where there are lower ones, a cached page without
owners is storing first, and found meanwhile; and a request whose prefix lies lower gets pages that are loading. Either
is nobody else's until its transfer has ended, whoever owned it has ended or not. Then it is cached, or, if it failed
to load or its content was forgotten meanwhile, free.

Each KV group has pages of its own, and what a token sees of them depends on the kind of the group (`group_kinds.py`). A
prefix is cached if all kinds find what the next token sees.
"""

from __future__ import annotations

from collections.abc import Container, Iterable, Sequence

from jaxserve.scheduling.kv_cache.eviction import EvictionOrder
from jaxserve.scheduling.kv_cache.group_kinds import (
    FullAttention,
    GroupKind,
    RecurrentState,
    SlidingWindow,
    longest_hit,
    pages_seen,
)
from jaxserve.scheduling.kv_cache.groups import RELEASED, KVGroups
from jaxserve.scheduling.kv_cache.pages import (
    CACHED,
    COMPUTING,
    LOADING,
    STORING,
    Pages,
)
from jaxserve.scheduling.kv_cache.prefix_hashes import PrefixHashes
from jaxserve.scheduling.kv_cache.transfers import Transfers
from jaxserve.scheduling.request import Request, RequestStatus

TOKENS_AT_ONCE = 64  # output tokens whose pages are registered together: one by one they take twice as long


class _Anywhere:
    """Hashes of the pages of a group that are cached, or can be loaded."""

    def __init__(self, group: int, cached: Container[bytes], transfers: Transfers) -> None:
        self._group, self._cached, self._transfers = group, cached, transfers

    def __contains__(self, page_hash: object) -> bool:
        return page_hash in self._cached or self._transfers.reaches(self._group, page_hash)


class PageStore:
    """Pages of a pool, owned by running requests or cached.

    Args:
        num_pages: pages in the pool.
        groups: groups of layers with pages of their own.
        transfers: moves to lower tiers and from them.

    Attributes:
        page_size: tokens per page.
        order: order in which cached pages are evicted.
        has_tiers: True if there are tiers below device memory.
        blocks_at_once: blocks of output tokens that are registered together; the rest when their request stops.
        states: snapshots of states; None if all layers have attention.
        unshared: running requests that were there when the cache was reset last: nobody finds what they compute.
    """

    def __init__(self, num_pages: int, groups: KVGroups, transfers: Transfers) -> None:
        self.page_size, self._groups = groups.page_size, groups
        self.blocks_at_once = max(TOKENS_AT_ONCE // groups.page_size, 1)
        self._pages = Pages(num_pages)
        self.order = EvictionOrder()
        self.has_tiers = bool(transfers.tiers)
        self._transfers = transfers
        self._hashes = PrefixHashes(groups.page_size)
        self._page_by_hash: list[dict[bytes, int]] = [{} for _ in groups.windows]
        self._cached: list[Container[bytes]] = [*self._page_by_hash]  # pages of each group, then of states
        self._anywhere: list[Container[bytes]] = [
            _Anywhere(group, cached, transfers) for group, cached in enumerate(self._page_by_hash)
        ]
        self._full = FullAttention(groups)
        self._first = groups.full[0] if groups.full else 0  # group that `has` asks
        self._kinds: list[GroupKind] = [self._full]
        self.states: RecurrentState | None = None
        if groups.sliding:
            self._kinds.append(SlidingWindow(groups))
            self.blocks_at_once = 1  # pages before the window are released, and a window may be smaller
        if groups.num_snapshots is not None:
            self.states = RecurrentState(groups.num_snapshots)
            self._kinds.append(self.states)
            self._cached.append(self.states.cached)
            self._anywhere.append(self.states.cached)
        self.unshared: set[Request] = set()

    @property
    def num_available(self) -> int:
        """Pages that can be allocated: free and evictable ones."""
        return len(self._pages.free_pages) + self.order.num_evictable

    # Hits

    def hashes(self, request: Request) -> list[bytes]:
        """Return the hashes of a request's full pages of known tokens."""
        return self._hashes.full_pages(request)

    def has(self, page_hash: bytes) -> bool:
        """Return whether a page with this hash is cached."""
        return page_hash in self._page_by_hash[self._first]

    def may_match(self, request: Request, num_blocks: int) -> bool:
        """Return False if a single look-up shows that `match` would find fewer blocks than this."""
        if num_blocks > _num_matchable(request, self.page_size):
            return False
        return not self._full.groups or num_blocks < 1 or self.has(self.hashes(request)[num_blocks - 1])

    def match(self, request: Request) -> list[int]:
        """Return the pages of a request's longest cached prefix, block by block; takes no references.

        At least one known token is left over, because sampling needs the hidden state of the last one.
        """
        hashes = self.hashes(request)[: _num_matchable(request, self.page_size)]
        hashes = hashes[: longest_hit(self._kinds, hashes, self._cached)]
        size = self._groups.size
        if size == 1 and self._full.groups:
            return [self._page_by_hash[0][page_hash] for page_hash in hashes]
        pages = [RELEASED] * (len(hashes) * size)
        for block, group in pages_seen(self._kinds, len(hashes)):
            pages[block * size + group] = self._page_by_hash[group][hashes[block]]
        return pages

    def num_full_blocks(self, request: Request) -> int:
        """Return the blocks of a request's prefix whose pages all groups of full attention have."""
        return self._full.longest_hit(
            self.hashes(request)[: _num_matchable(request, self.page_size)], self._page_by_hash
        )

    def match_last(self, request: Request, num_blocks: int) -> list[int]:
        """Return the pages, one per group, that hold the `num_last_tokens` of a request after its cached blocks.

        Empty if there are none: they are partly filled, and cached if a request whose last page is shared ended so, or
        if this one was swapped out.
        """
        page_hash = self._last_hash(request, num_blocks)
        pages = [
            pages_of[page_hash] for pages_of in self._page_by_hash if page_hash is not None and page_hash in pages_of
        ]
        return pages if len(pages) == self._groups.size else []

    def _last_hash(self, request: Request, num_blocks: int) -> bytes | None:
        """Return the hash of a request's partly filled page after so many blocks; None if it is not to be found."""
        num_tokens = num_last_tokens(request)
        if self.states is not None or not (request.shares_last_page or request.num_kept_tokens):
            return None  # snapshots of states are taken after full pages
        if num_tokens // self.page_size != num_blocks or not num_tokens % self.page_size:
            return None
        return self._hashes.last_page(request, num_tokens)

    def num_evictable(self, pages: Iterable[int]) -> int:
        """Return how many of these cached pages nobody owns."""
        states, num_owners = self._pages.states, self._pages.num_owners
        return sum(page != RELEASED and states[page] is CACHED and not num_owners[page] for page in pages)

    # Owners

    def allocate(self, num_pages: int, tenant: str = "") -> list[int] | None:
        """Return new pages with one owner each and no content, or None (and no change) if there are too few.

        Args:
            num_pages: number of pages.
            tenant: tenant that they are for. Its own cached pages go before those of others that have as many.
        """
        num_lacking = num_pages - len(self._pages.free_pages)
        if num_lacking > 0:
            if num_lacking > self.order.num_evictable:
                return None
            content, page_by_hash = self._pages.content, self._page_by_hash
            for _ in range(num_lacking):
                page = self.order.pop(tenant)
                group, page_hash, _ = content.pop(page)
                del page_by_hash[group][page_hash]
                self._pages.free(page)
        return self._pages.take(num_pages)

    def acquire(self, request: Request, cached: list[int], num_new: int, num_kept: int) -> list[int] | None:
        """Take `cached` pages and `num_new` after them; None, and no change, unless `num_kept` stay free.

        Args:
            request: request that they are for.
            cached: cached pages of its prefix.
            num_new: number of further pages.
            num_kept: number of pages that stay free.
        """
        self.retain(cached)  # first of all, lest the allocation evicts them
        new = self.allocate(num_new, request.tenant) if num_new + num_kept <= self.num_available else None
        if new is None:
            self.release(cached)
            return None
        return cached + new

    def grow(self, request: Request, num_tokens: int) -> int | None:
        """Give a running request the pages of its next `num_tokens`, and return how many are new; None if too few."""
        pages, groups = request.pages, self._groups
        num_new = -(-(request.num_computed_tokens + num_tokens) // self.page_size) * groups.size - len(pages)
        if num_new <= 0:
            return 0
        if num_new <= len(self._pages.free_pages):  # nearly always: nothing is evicted
            pages += self._pages.take(num_new)
            return num_new
        new = self.allocate(num_new, request.tenant)
        if new is None:
            return None
        pages += new
        return num_new

    def retain(self, pages: Iterable[int]) -> None:
        """Add an owner to each of these pages."""
        states, num_owners, content = self._pages.states, self._pages.num_owners, self._pages.content
        for page in pages:
            if page != RELEASED:
                if not num_owners[page] and states[page] is CACHED:
                    self.order.remove(page, content[page][-1])
                num_owners[page] += 1

    def release(self, pages: Sequence[int]) -> None:
        """Take an owner from each of a request's pages, given in token order.

        Goes from the last page to the first, so that tails are evicted before the heads that more requests share.
        """
        states, num_owners, content = self._pages.states, self._pages.num_owners, self._pages.content
        for page in reversed(pages):
            if page == RELEASED:
                continue
            num_owners[page] = num_left = num_owners[page] - 1
            assert num_left >= 0, f"page {page} is released more often than retained"
            if num_left:
                continue
            state = states[page]
            if state is CACHED:
                if self.has_tiers and self._transfers.wants(content[page]):
                    states[page] = STORING
                    self._transfers.store(page, content[page])
                else:
                    self.order.add(page, content[page][-1])
            elif state is COMPUTING:
                self._pages.free(page)

    def release_unseen(self, request: Request) -> None:
        """Release the pages of a running request that no later token sees.

        The next owner of a page writes to it in a later step or in the plan being made. In that plan the request must
        not have a row yet, so that its row no longer reads the page.
        """
        for kind in self._kinds:
            self.release(kind.release_unseen(request))

    def leave(self, request: Request, *, keep: bool = False) -> None:
        """Take all pages from a request that stops running; what it has computed stays cached.

        Args:
            request: the request.
            keep: True if it will continue from its last token for which this is possible, partly filled pages included.
        """
        num_certain = request.num_known_tokens - bool(request.output_token_ids)  # the last output may not be computed
        num_tokens = min(request.num_computed_tokens, num_certain)
        # The last output of a preempted request may be at the end of a page that is registered already.
        num_tokens = max(num_tokens, request.num_registered_blocks * self.page_size)
        block, size = num_tokens // self.page_size, self._groups.size
        self.register_blocks(request, block)
        is_found = (request.shares_last_page or keep) and request not in self.unshared
        if is_found and num_tokens % self.page_size:
            page_hash = self._hashes.last_page(request, num_tokens)
            for group, page in enumerate(request.pages[block * size : (block + 1) * size]):
                if page != RELEASED:
                    self.register(page_hash, page, group, request.tenant)
        self.unshared.discard(request)
        self.release(request.pages)
        request.pages = []
        request.num_released_blocks = request.num_registered_blocks = 0
        request.num_kept_tokens = num_tokens if keep else 0

    # Lower tiers

    def pages_below(self, request: Request) -> list[tuple[int, int, bytes]]:
        """Return block, group and hash of the pages of a waiting request's longest prefix that any tiers have.

        Empty if device memory has them all. What was loaded may be evicted before the request starts; then it loads it
        again, but not after a failure.
        """
        if not self.has_tiers or request.has_failed or request.pages or not request.read_prefix_cache:
            return []
        hashes = self.hashes(request)[: _num_matchable(request, self.page_size)]
        num_blocks = longest_hit(self._kinds, hashes, self._anywhere)
        wanted = [(block, group, hashes[block]) for block, group in pages_seen(self._kinds, num_blocks)]
        last = self._last_hash(request, num_blocks)
        if last is not None and all(last in self._anywhere[group] for group in range(self._groups.size)):
            wanted += [(num_blocks, group, last) for group in range(self._groups.size)]
        return wanted if any(page_hash not in self._cached[group] for _, group, page_hash in wanted) else []

    def load(self, request: Request, wanted: Sequence[tuple[int, int, bytes]], num_kept: int) -> bool:
        """Begin to load pages of a waiting request's prefix; False, and no change, unless `num_kept` stay free.

        Args:
            request: the request.
            wanted: block, group and hash of the pages.
            num_kept: number of pages that stay free.
        """
        size, missing = self._groups.size, []
        pages = [RELEASED] * (max(block + 1 for block, *_ in wanted) * size)
        for block, group, page_hash in wanted:
            page = self._page_by_hash[group].get(page_hash)
            page = self._transfers.loading.get((group, page_hash)) if page is None else page
            if page is None:
                missing.append((block * size + group, (group, page_hash, request.tenant)))
            else:
                pages[block * size + group] = page
        taken = self.acquire(request, pages, len(missing), num_kept)
        if taken is None:
            return False
        request.pages, request.status = pages, RequestStatus.LOADING
        for (index, content), page in zip(missing, taken[len(pages) :], strict=True):
            pages[index] = page
            self._pages.states[page] = LOADING
            self._transfers.load(page, content)
        self._transfers.wait(request)
        return True

    def transferred(self, keys: Iterable[int], *, ok: bool) -> None:
        """Note that moves have ended; requests that wait for no others may start."""
        for key in keys:
            transfer = self._transfers.end(key, ok=ok)
            if transfer is None:
                continue
            page, content, is_of_use = transfer.move.page, transfer.content, transfer.is_of_use
            self._pages.states[page] = COMPUTING
            if transfer.move.is_load and is_of_use:
                self.register(content[1], page, content[0], content[-1])
            elif page in self._pages.content:
                self._pages.states[page] = CACHED
            if not self._pages.num_owners[page]:
                if page in self._pages.content:
                    self.order.add(page, content[-1])
                else:
                    self._pages.free(page)
            for request in transfer.waiting:
                request.has_failed |= not is_of_use
                if not request.num_transfers:
                    self.abandon(request)

    def abandon(self, request: Request) -> None:
        """Have a request load no more: it waits, and has no pages. What is under way will be cached."""
        self._transfers.abandon(request)
        self.release(request.pages)
        request.pages, request.status = [], RequestStatus.WAITING

    # Content

    def register(self, page_hash: bytes, page: int, group: int = 0, tenant: str = "") -> None:
        """Make an owned page findable. If another page has the same content already, that one stays the cached one.

        The caller vouches that the content is in the pool before any row that could find the page attends to it.

        Args:
            page_hash: hash of everything up to the page's last token.
            page: the page.
            group: its KV group.
            tenant: tenant whose share of the cache it counts for.
        """
        page_by_hash = self._page_by_hash[group]
        if page_hash in page_by_hash:
            return
        assert self._pages.states[page] is COMPUTING, f"page {page} is {self._pages.states[page]}, not computing"
        page_by_hash[page_hash] = page
        self._pages.states[page] = CACHED
        self._pages.content[page] = group, page_hash, tenant
        self.order.cached(tenant)

    def register_blocks(self, request: Request, stop: int) -> None:
        """Register the pages of the blocks before `stop` that were not yet; all their tokens are known and certain."""
        first = request.num_registered_blocks
        if first >= stop or request in self.unshared:
            return
        pages, size, register, tenant = request.pages, self._groups.size, self.register, request.tenant
        hashes = self.hashes(request)
        for index in range(first * size, stop * size):
            if (page := pages[index]) != RELEASED:
                register(hashes[index // size], page, index % size, tenant)
        request.num_registered_blocks = stop

    def reset(self, running: Iterable[Request]) -> None:
        """Forget all content. Pages in use stay with their owners, of which `running` are all."""
        evictable = self.order.clear()
        for page in self._pages.content:
            if self._pages.states[page] is CACHED:
                self._pages.states[page] = COMPUTING
        self._pages.content.clear()
        for page_by_hash in self._page_by_hash:
            page_by_hash.clear()
        for page in evictable:
            self._pages.free(page)
        if self.states is not None:
            self.states.reset()
        self._transfers.clear()
        self.unshared.update(running)

    def check_integrity(self, owners: dict[int, int], loading: Sequence[Request] = ()) -> None:
        """Assert that pages are conserved.

        Args:
            owners: number of owners of each page in use.
            loading: requests that wait for pages to be loaded.
        """
        content = self._pages.content
        self._pages.check_integrity(owners)
        by_page = {page: (g, key) for g, pages_of in enumerate(self._page_by_hash) for key, page in pages_of.items()}
        assert by_page == {page: each[:2] for page, each in content.items()}
        idle = {page for page in self._pages.in_state(CACHED) if page not in owners}
        self.order.check_integrity(content, idle)
        if self.states is not None:
            self.states.check_integrity()
        self._transfers.check_integrity(self._pages.in_state(LOADING), self._pages.in_state(STORING), loading)


def num_last_tokens(request: Request) -> int:
    """Return the tokens after which a partly filled page of a waiting request may be cached."""
    return request.num_kept_tokens or request.num_known_tokens - 1


def _num_matchable(request: Request, page_size: int) -> int:
    """Return the full pages before the last known token."""
    return (request.num_known_tokens - 1) // page_size
