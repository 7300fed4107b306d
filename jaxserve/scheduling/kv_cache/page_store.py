"""PageStore: all pages of a pool, from allocation to eviction, and the hashes by which requests find cached pages.

A page is free; computing, while its owners fill it; or cached: requests with the same prefix find it by the hash of all
tokens up to its last one. A cached page without owners keeps its content until no free page is left.

Device memory is the first of several tiers that store content by hash. With lower tiers, a cached page is
also stored in the next one: a full page as soon as it is cached, others without owners. Meanwhile it is storing, and
can still be found. A request whose prefix lies in a lower tier gets pages that are loading. Neither can be reused
before its transfer has ended. Then it is cached, or free if it failed to load or its content was forgotten meanwhile.

Each KV group has pages of its own, and the kind of the group decides which of them a token sees (`group_kinds.py`). A
prefix is cached if every kind finds all pages that the next token sees (`prefix_index.py`).

With lower tiers, a preempted request is swapped out. Until the tokens of steps in flight are read, it keeps its tail:
the pages with these tokens, and a copy of its recurrent state. They are then cached, too, and nothing is recomputed.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from jaxserve.scheduling.kv_cache.eviction import EvictionOrder
from jaxserve.scheduling.kv_cache.groups import RELEASED, KVGroups
from jaxserve.scheduling.kv_cache.page_events import PageEvents
from jaxserve.scheduling.kv_cache.pages import CACHED, COMPUTING, LOADING, STORING, Pages, PageState
from jaxserve.scheduling.kv_cache.prefix_index import Prefix, PrefixIndex
from jaxserve.scheduling.kv_cache.state_snapshots import StateSnapshots
from jaxserve.scheduling.kv_cache.transfers import NO_PAGE, Place, Transfer, Transfers
from jaxserve.scheduling.request import Request, RequestStatus, Tail

TOKENS_AT_ONCE = 64  # output tokens whose pages are registered together: one by one takes twice as long


class PageStore:
    """Pages of a pool, owned by running requests or cached.

    Args:
        num_pages: pages in the pool.
        groups: layer groups that have pages of their own.
        transfers: moves between tiers.

    Attributes:
        page_size: tokens per page.
        index: hashes of cached pages.
        order: eviction order of cached pages.
        has_tiers: True if there are tiers below device memory.
        blocks_at_once: blocks of output tokens that are registered together; the rest when their request stops.
        states: state snapshots; None if no layer is recurrent.
        events: where changes of cached blocks are noted; None if nobody wants them.
        unshared: running requests from before the last reset: nobody finds their pages.
    """

    def __init__(self, num_pages: int, groups: KVGroups, transfers: Transfers) -> None:
        self.events: PageEvents | None = None
        self.page_size, self._groups = groups.page_size, groups
        self.blocks_at_once = max(TOKENS_AT_ONCE // groups.page_size, 1)
        self._pages = Pages(num_pages)
        self.order = EvictionOrder()
        self.has_tiers = bool(transfers.tiers)
        self._transfers = transfers
        self.states = None if groups.num_snapshots is None else StateSnapshots(groups.num_snapshots, transfers)
        self.index = PrefixIndex(groups, self.states, transfers)
        self._page_by_hash = self.index.page_by_hash
        if groups.sliding:
            self.blocks_at_once = 1  # pages before the window are released, and a window may be smaller
        self._tails: dict[Request, None] = {}  # waiting requests that have one
        self.unshared: set[Request] = set()

    @property
    def num_available(self) -> int:
        """Number of free and evictable pages."""
        return self._pages.num_free + self.order.num_evictable

    def num_evictable(self, pages: Iterable[int]) -> int:
        """Return the number of pages among `pages` that are cached without an owner."""
        states, num_owners = self._pages.states, self._pages.num_owners
        return sum(page != RELEASED and states[page] is CACHED and not num_owners[page] for page in pages)

    # Owners

    def allocate(self, num_pages: int, tenant: str = "") -> list[int] | None:
        """Return `num_pages` free pages, each with one owner; None, without a change, if too few are free or evictable.

        Args:
            num_pages: number of pages.
            tenant: tenant that gets the pages. On a tie its own cached pages are evicted first.
        """
        num_lacking = num_pages - self._pages.num_free
        if num_lacking > 0:
            if num_lacking > self.order.num_evictable:
                return None
            content, page_by_hash = self._pages.content, self._page_by_hash
            for _ in range(num_lacking):
                page = self.order.pop(tenant)
                group, page_hash, _ = content.pop(page)
                del page_by_hash[group][page_hash]
                if self.events is not None:
                    self.events.removed(page_hash, group)
                self._pages.free(page)
        return self._pages.take(num_pages)

    def fits(self, cached: Sequence[int], num_new: int, num_kept: int) -> bool:
        """Return whether `num_kept` pages stay free if a request gets cached pages and `num_new` new ones."""
        return self.num_evictable(cached) + num_new + num_kept <= self.num_available

    def acquire(self, request: Request, cached: list[int], num_new: int, num_kept: int) -> list[int] | None:
        """Return `cached` pages with a further owner, followed by new ones; None, without a change, if they do not fit.

        Args:
            request: request that gets the pages.
            cached: cached pages of its prefix.
            num_new: number of further pages.
            num_kept: number of pages that stay free.
        """
        if not self.fits(cached, num_new, num_kept):
            return None
        self.retain(cached)  # first, so that the allocation does not evict them
        new = self.allocate(num_new, request.tenant)
        assert new is not None, "they fit"
        return cached + new

    def grow(self, request: Request, num_tokens: int) -> int | None:
        """Give a running request the pages for its next tokens; return how many are new, None if too few are free."""
        pages, groups = request.pages, self._groups
        num_new = -(-(request.num_computed_tokens + num_tokens) // self.page_size) * groups.size - len(pages)
        if num_new <= 0:
            return 0
        if num_new <= self._pages.num_free:  # nearly always: nothing is evicted
            pages += self._pages.take(num_new)
            return num_new
        new = self.allocate(num_new, request.tenant)
        if new is None:
            return None
        pages += new
        return num_new

    def retain(self, pages: Iterable[int]) -> None:
        """Add an owner to each page, so that it is not evicted."""
        states, num_owners, content = self._pages.states, self._pages.num_owners, self._pages.content
        for page in pages:
            if page != RELEASED:
                if not num_owners[page] and states[page] is CACHED:
                    self.order.remove(page, content[page][-1])
                num_owners[page] += 1

    def release(self, pages: Sequence[int]) -> None:
        """Remove an owner from each of a request's pages, given in token order.

        Goes from the last page to the first, so that tails are evicted before more widely shared heads.
        """
        states, num_owners, content = self._pages.states, self._pages.num_owners, self._pages.content
        for page in reversed(pages):
            if page == RELEASED:
                continue
            num_owners[page] = num_left = num_owners[page] - 1
            assert num_left >= 0, f"page {page} is released more often than retained"
            if num_left:
                continue
            if self.has_tiers and page in content:
                self._transfers.touch(content[page])
                self._store_below([page])
            if states[page] is CACHED:
                self.order.add(page, content[page][-1])
            elif states[page] is COMPUTING:
                self._pages.free(page)

    def release_unseen(self, request: Request) -> None:
        """Release the pages of a running request that no later token sees.

        The next owner of a page writes to it in the current plan or a later one. The request must not have a row in the
        current plan yet, so that no row still reads the page.
        """
        for kind in self.index.paged_kinds:
            self.release(kind.remove_unseen(request))

    def leave(self, request: Request, *, keep: bool = False) -> None:
        """Take all pages from a request that stops running; its computed full pages stay cached.

        Args:
            request: request that ends or is preempted.
            keep: True to swap it out: nothing that it has computed is computed again if a tier keeps it.
        """
        # the last output token may not be computed
        num_certain = request.num_known_tokens - bool(request.output_token_ids)
        # A preempted request's last output token may end a page that is already registered.
        num_tokens = max(min(request.num_computed_tokens, num_certain), request.num_registered_blocks * self.page_size)
        num_tokens = self._groups.num_shareable(num_tokens, request.num_prompt_tokens)
        if request.sends_prompt:
            num_tokens = min(num_tokens, request.num_prompt_tokens - 1)
        block = num_tokens // self.page_size
        self.register_blocks(request, block)
        is_shared = not request.num_hidden_blocks and request not in self.unshared
        self.unshared.discard(request)
        request.num_kept_tokens = num_in_tail = 0
        if keep and is_shared:
            num_in_tail = self._keep_tail(request, block, num_tokens)
        elif (request.shares_last_page or request.sends_prompt) and is_shared:
            self._register_last(request, num_tokens, request.pages[block * self._groups.size :])
        if request.reuse is not None and not keep:
            self.order.hint(request, self.index.hashes(request), self._pages.content, self.page_size)
        self.release(request.pages[: len(request.pages) - num_in_tail])
        request.pages = []
        request.num_released_blocks = request.num_registered_blocks = request.num_hidden_blocks = 0

    def _keep_tail(self, request: Request, block: int, num_certain: int) -> int:
        """Keep the part of a request that is swapped out whose tokens may not be known; return its number of pages.

        Args:
            request: request that stops running.
            block: number of its leading blocks that are registered.
            num_certain: number of leading tokens that are computed and known.
        """
        num_tokens = request.num_computed_tokens if self._groups.sparsity is None else num_certain
        size = self._groups.size
        stop = self._groups.num_blocks(num_tokens) * size
        self.release(request.pages[stop:])
        del request.pages[stop:]
        state = self.states.hold() if self.states is not None and self._groups.sparsity is None else None
        if state is not None:
            self._transfers.keep_state(request.slot, state)
        request.num_kept_tokens = num_tokens
        request.tail = Tail(block, request.pages[block * size :], state)
        self._tails[request] = None
        self.settle(request)
        return len(request.pages) - block * size

    def settle(self, request: Request) -> None:
        """Cache the tail of a request if it has one, and no token of a step in flight is left."""
        if request.tail is None or (request.num_pending_tokens and self._groups.sparsity is None):
            return
        num_tokens, (block, pages, state) = request.num_kept_tokens, request.tail
        size, hashes = self._groups.size, self.index.hashes(request)
        stop = num_tokens // self.page_size
        for index, page in enumerate(pages[: (stop - block) * size]):
            if page != RELEASED:
                self.register(hashes[block + index // size], page, index % size, request.tenant)
        if self.events is not None:
            for group in range(size):
                self.events.stored(request, hashes, range(block, stop), group)
        self._register_last(request, num_tokens, pages[(stop - block) * size :])
        if state is not None and self.states is not None:
            self.states.name(state, self.index.hash_at(request, num_tokens))
            request.tail = Tail(block, pages)
        self.drop_tail(request)

    def drop_tail(self, request: Request) -> None:
        """Release the tail of a request, if it has one; pages that are not cached are free."""
        if request.tail is None:
            return
        if request.tail.state is not None and self.states is not None:
            self.states.drop(request.tail.state)
        self.release(request.tail.pages)
        request.tail = None
        del self._tails[request]

    def _register_last(self, request: Request, num_tokens: int, pages: Sequence[int]) -> None:
        """Make the pages findable that hold a request's last `num_tokens % page_size` tokens, one per group."""
        for group, page in enumerate(pages[: self._groups.size] if num_tokens % self.page_size else ()):
            if page != RELEASED:
                self.register(self.index.hash_at(request, num_tokens), page, group, request.tenant)

    # Lower tiers

    def prefix_below(self, request: Request) -> Prefix | None:
        """Return a waiting request's longest prefix found in any tier; None if device memory has all of it.

        If loaded pages are evicted before the request starts, it loads them again, except after a failure.
        """
        if not self.has_tiers or request.has_failed or request.pages or not request.read_prefix_cache:
            return None
        return self.index.below(request)

    def load(self, request: Request, prefix: Prefix, num_kept: int) -> bool:
        """Begin to load a waiting request's prefix; False, without a change, unless `num_kept` pages stay free.

        Args:
            request: waiting request without pages.
            prefix: prefix, as returned by `prefix_below`.
            num_kept: number of pages that stay free.
        """
        size, missing = self._groups.size, []
        pages = [RELEASED] * (prefix.num_blocks * size)
        for block, group, page_hash in prefix.pages:
            page = self._page_by_hash[group].get(page_hash)
            page = self._transfers.loading.get((group, page_hash)) if page is None else page
            if page is None:
                missing.append((block * size + group, (group, page_hash, request.tenant)))
            else:
                pages[block * size + group] = page
        if not self.fits(pages, len(missing), num_kept):
            return False
        if prefix.state is not None and self.states is not None and not self.states.has(prefix.state):
            tier = self.states.load(prefix.state)
            if tier is None:
                return False
            request.loaded_blocks[prefix.num_blocks - 1] = tier
        taken = self.acquire(request, pages, len(missing), num_kept)
        assert taken is not None, "they fit"
        request.pages, request.status = pages, RequestStatus.LOADING
        for (index, content), page in zip(missing, taken[len(pages) :], strict=True):
            pages[index] = page
            self._pages.states[page] = LOADING
            request.loaded_blocks[index // size] = self._transfers.load(page, content)
        self._transfers.wait(request, [(False, page) for page in pages])
        if prefix.state is not None and self.states is not None:
            self._transfers.wait(request, self.states.places(prefix.state))
        return True

    def transferred(self, keys: Iterable[int], *, ok: bool) -> None:
        """Update the pages whose moves have ended; requests that wait for no other moves can start.

        Args:
            keys: keys of the moves.
            ok: False if the moved content is lost.
        """
        for key in keys:
            transfer = self._transfers.end(key, ok=ok)
            if transfer is None or transfer.move.page == NO_PAGE:
                continue
            is_state, _ = transfer.move.place
            if is_state and self.states is not None:
                self.states.transferred(transfer)
            else:
                self._transferred(transfer)
            for request in transfer.waiting:
                request.has_failed |= not transfer.is_useful
                if not request.num_transfers:
                    self.abandon(request)

    def _transferred(self, transfer: Transfer) -> None:
        """Update a KV page whose move has ended."""
        page, content = transfer.move.page, transfer.content
        self._pages.states[page] = COMPUTING
        if transfer.move.is_load and transfer.is_useful:
            self.register(content[1], page, content[0], content[-1])
        elif page in self._pages.content:
            self._pages.states[page] = CACHED
        if not self._pages.num_owners[page]:
            if page in self._pages.content:
                self.order.add(page, content[-1])
            else:
                self._pages.free(page)

    def abandon(self, request: Request) -> None:
        """Release the pages of a request in status LOADING, which then waits without pages.

        Pages whose moves have not ended are cached when they end.
        """
        self._transfers.abandon(request)
        self.release(request.pages)
        request.pages, request.status = [], RequestStatus.WAITING

    # Content

    def register(self, page_hash: bytes, page: int, group: int = 0, tenant: str = "") -> None:
        """Make an owned page findable, unless another page with the same content is already cached.

        The caller guarantees that the content is in the pool before any row that could find the page attends to it.

        Args:
            page_hash: hash of all tokens up to the page's last one.
            page: the page, in state COMPUTING.
            group: its KV group.
            tenant: tenant whose part of the cache it counts towards.
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
        """Make the pages in a request's blocks before block `stop` findable; all their tokens are known and certain.

        A copy in the next tier leaves a crash little to lose, and a preemption little to store.
        """
        first = request.num_registered_blocks
        stop = self._groups.num_shareable(stop * self.page_size, request.num_prompt_tokens) // self.page_size
        if request.sends_prompt:  # its last page may become a partly filled one
            stop = min(stop, (request.num_prompt_tokens - 1) // self.page_size)
        if first >= stop or request in self.unshared:
            return
        pages, size, register, tenant = request.pages, self._groups.size, self.register, request.tenant
        hashes = self.index.hashes(request)
        for index in range(first * size, stop * size):
            if (page := pages[index]) != RELEASED:
                register(hashes[index // size], page, index % size, tenant)
        if self.events is not None:
            self.events.registered(request, hashes, range(first, stop), size)
        request.num_registered_blocks = stop
        if self.has_tiers:
            self._store_below(pages[first * size : stop * size])

    def forget(self, pages: Iterable[int]) -> None:
        """Let no request find some owned pages any more, so that their owner can continue them."""
        for page in pages:
            group, page_hash, tenant = self._pages.content.pop(page)
            del self._page_by_hash[group][page_hash]
            self._pages.states[page] = COMPUTING
            self.order.uncached(page, tenant)

    def _store_below(self, pages: Iterable[int]) -> None:
        """Begin to store cached pages in the next tier, if it lacks them and can take them."""
        states, content, store = self._pages.states, self._pages.content, self._transfers.store
        for page in pages:
            if page != RELEASED and states[page] is CACHED and store(page, content[page]):
                states[page] = STORING

    def reset(self, running: Iterable[Request]) -> None:
        """Forget all content. Pages in use stay with their owners; `running` are all owners."""
        for request in [*self._tails]:
            self.drop_tail(request)
            request.num_kept_tokens = 0
        evictable = self.order.clear()
        if self.events is not None:
            self.events.cleared()
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
            owners: number of owners by page in use.
            loading: requests that wait for pages to be loaded.
        """
        content = self._pages.content
        self._pages.check_integrity(owners)
        by_page = {page: (g, key) for g, pages_of in enumerate(self._page_by_hash) for key, page in pages_of.items()}
        assert by_page == {page: each[:2] for page, each in content.items()}
        idle = {page for page in self._pages.in_state(CACHED) if page not in owners}
        self.order.check_integrity(content, idle)
        if self.states is not None:
            self.states.check_integrity([r.tail.state for r in self._tails if r.tail and r.tail.state is not None])
        self._transfers.check_integrity(self._in_state(LOADING), self._in_state(STORING), loading)

    def _in_state(self, state: PageState) -> list[Place]:
        """Return all device pages in a state."""
        pages = ((False, page) for page in self._pages.in_state(state))
        return [*pages, *([] if self.states is None else self.states.in_state(state))]
