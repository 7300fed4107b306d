"""Finds pages whose content a request would otherwise compute again, and decides which page to give up next."""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Iterable, Mapping, Sequence
from hashlib import blake2b
from heapq import heapify, heappop, heappush
from struct import calcsize, pack

from jaxserve.kv_cache.groups import RELEASED, KVGroups
from jaxserve.kv_cache.page_pool import PagePool
from jaxserve.kv_cache.snapshots import Snapshots
from jaxserve.request import Request, TokenIds

DIGEST_SIZE = 16
_TOKEN_BYTES = calcsize("i")
_NEW_HASH = blake2b(digest_size=DIGEST_SIZE, person=b"page")  # a copy takes half the time of a new one

_SPARE_ENTRIES = 256  # outdated entries of a heap beyond which it is made anew


class PrefixCache:
    """Full pages by the hash of everything up to their last token; allocation and release of all pages.

    A page's hash covers the hash of the page before it (the salt, for the first), so that equal hashes mean equal
    salts and equal token prefixes, which is what keys and values depend on. A registered page that loses its last owner
    keeps its content and joins the evictable pages; these are reused only when no free page is left: of the tenant
    with the most cached pages, the least recently released first. So whoever fills the cache evicts pages of others
    only as long as these have more than an equal share; with a single tenant, the order is that of release alone.

    Each KV group has pages of its own. A prefix is cached if every group has the pages that the next token sees: a
    group of full attention all of them, a group with a window the last ones. Where layers keep a state, there must also
    be a snapshot of it behind the prefix.

    Attributes:
        page_size: tokens per page.
        snapshots: snapshots of states; None where no layer keeps one.
    """

    def __init__(self, pool: PagePool, groups: KVGroups):
        self.page_size = groups.page_size
        self._pool = pool
        self._groups = groups
        self.snapshots = None if groups.num_snapshots is None else Snapshots(groups.num_snapshots)
        self._page_by_hash: list[dict[bytes, int]] = [{} for _ in groups.windows]
        # KV group, hash, and the tenant whose share it counts for, by page.
        self._content: dict[int, tuple[int, bytes, str]] = {}
        self._first = (*groups.full, 0)[0]  # the group that is asked for single pages
        self._evictable: dict[str, OrderedDict[int, None]] = {}  # pages by tenant, the page released first in front
        self._num_evictable = 0
        # Heap of evictable tenants by their cached pages, with outdated entries; None while there is but one.
        self._by_size: list[tuple[int, str]] | None = None
        self._num_cached: Counter[str] = Counter()  # pages with content by tenant, in use or not
        # The prompt hashed last: the samples of one prompt come one after the other, and need it hashed but once.
        self._last_prompt: TokenIds = []
        self._last_salt = b""
        self._last_hashes: list[bytes] = []  # hashes of the prompt's full pages

    @property
    def num_available(self) -> int:
        """Pages that can be allocated: free and evictable ones."""
        return self._pool.num_free + self._num_evictable

    def hashes(self, request: Request) -> list[bytes]:
        """Hashes of the request's full pages of known tokens; kept on the request, extended as tokens become known."""
        hashes, size = request.page_hashes, self.page_size
        num_full = (len(request.prompt_token_ids) + len(request.output_token_ids)) // size
        if len(hashes) < num_full:
            if not hashes:
                hashes += self._prompt_hashes(request)
            self._extend(hashes, request, num_full)
        return hashes

    def _prompt_hashes(self, request: Request) -> list[bytes]:
        """Hashes of the full pages of the request's prompt; computed once for requests in a row with one prompt."""
        prompt, salt = request.prompt_token_ids, request.salt
        if salt != self._last_salt or (prompt is not self._last_prompt and prompt != self._last_prompt):
            self._last_prompt, self._last_salt, self._last_hashes = prompt, salt, []
            self._extend(self._last_hashes, request, len(prompt) // self.page_size)
        return self._last_hashes

    def _extend(self, hashes: list[bytes], request: Request, num_pages: int) -> None:
        """Hash the request's pages that follow those of `hashes`, up to `num_pages` in all."""
        previous = hashes[-1] if hashes else _root_hash(request.salt)
        first, size = len(hashes), self.page_size
        token_ids = _packed(request.tokens(first * size, num_pages * size))
        size *= _TOKEN_BYTES
        for start in range(0, (num_pages - first) * size, size):
            previous = _page_hash(previous, token_ids[start : start + size])
            hashes.append(previous)

    def has(self, page_hash: bytes) -> bool:
        """Return whether a page with this hash is cached."""
        return page_hash in self._page_by_hash[self._first]

    def may_match(self, request: Request, num_columns: int) -> bool:
        """Return False if a single look-up shows that `match` would find fewer columns than this."""
        if num_columns > self._num_matchable(request):
            return False
        return not self._groups.full or num_columns < 1 or self.has(self.hashes(request)[num_columns - 1])

    def match(self, request: Request) -> list[int]:
        """Return the pages of a request's longest cached prefix, column by column; takes no references.

        At least one known token is left over, because sampling needs the hidden state of the last one.
        """
        hashes, groups = self.hashes(request)[: self.num_full_columns(request)], self._groups
        if groups.sliding:
            hashes = hashes[: self._num_seen(hashes)]
        while self.snapshots is not None and (num_kept := self.snapshots.longest(hashes)) < len(hashes):
            hashes = hashes[:num_kept]
            if groups.sliding:
                hashes = hashes[: self._num_seen(hashes)]
        if groups.size == 1 and groups.full:
            return [self._page_by_hash[0][page_hash] for page_hash in hashes]
        pages = [RELEASED] * (len(hashes) * groups.size)
        for group, pages_of in enumerate(self._page_by_hash):
            first = 0 if groups.windows[group] is None else max(len(hashes) - groups.num_window_columns, 0)
            for column in range(first, len(hashes)):
                pages[column * groups.size + group] = pages_of[hashes[column]]
        return pages

    def num_full_columns(self, request: Request) -> int:
        """Return the columns of a request's prefix whose pages all groups of full attention have."""
        hashes = self.hashes(request)[: self._num_matchable(request)]
        return min((_num_cached(self._page_by_hash[group], hashes) for group in self._groups.full), default=len(hashes))

    def last_page_hash(self, request: Request, num_tokens: int) -> bytes:
        """Return the hash of the page, partly filled, that the first `num_tokens` of a request end in."""
        column, hashes = num_tokens // self.page_size, self.hashes(request)
        previous = hashes[column - 1] if column else _root_hash(request.salt)
        return _page_hash(previous, _packed(request.tokens(column * self.page_size, num_tokens)))

    def match_last(self, request: Request, num_columns: int) -> list[int]:
        """Return the pages, one per group, that hold what lies between so many cached columns and the last known token.

        Empty if there are none: they are partly filled, and cached if a request whose last page is shared ended so.
        """
        num_tokens = request.num_known_tokens - 1
        if self.snapshots is not None:  # snapshots are taken behind full pages
            return []
        if num_tokens // self.page_size != num_columns or not num_tokens % self.page_size:
            return []
        page_hash = self.last_page_hash(request, num_tokens)
        pages = [pages_of[page_hash] for pages_of in self._page_by_hash if page_hash in pages_of]
        return pages if len(pages) == self._groups.size else []

    def _num_matchable(self, request: Request) -> int:
        return (request.num_known_tokens - 1) // self.page_size

    def _num_seen(self, hashes: list[bytes]) -> int:
        """Return the columns of the longest prefix that all sliding groups have as far as windows reach."""
        needed, num_last = self._groups.num_window_columns, 0  # columns cached without a gap
        tables = [self._page_by_hash[group] for group in self._groups.sliding]
        for column in range(len(hashes) - 1, -1, -1):
            if num_last == needed:
                return column + 1 + num_last
            num_last = num_last + 1 if all(hashes[column] in table for table in tables) else 0
        return num_last

    def num_evictable(self, pages: Iterable[int]) -> int:
        """Return how many of these cached pages nobody owns."""
        return sum(page in self._content and self._pool.num_refs(page) == 0 for page in pages)

    def num_cached(self, tenant: str) -> int:
        """Return how many pages with content a tenant has, in use or not."""
        return self._num_cached[tenant]

    def register(self, page_hash: bytes, page: int, group: int = 0, tenant: str = "") -> None:
        """Makes an owned page findable. If another page has the same content already, that one stays the cached one.

        The caller vouches that the content is in the pool before any row that could find the page attends to it.

        Args:
            page_hash: hash of everything up to the page's last token.
            page: the page.
            group: its KV group.
            tenant: tenant whose share of the cache it counts for.
        """
        assert self._pool.num_refs(page) > 0, f"page {page} must be owned while it is registered"
        page_by_hash = self._page_by_hash[group]
        if page_hash in page_by_hash:
            return
        assert page not in self._content, f"page {page} is registered with other content"
        page_by_hash[page_hash] = page
        self._content[page] = group, page_hash, tenant
        self._num_cached[tenant] += 1
        if self._by_size is not None:
            self._note_size(tenant)

    def allocate(self, num_pages: int, tenant: str = "") -> list[int] | None:
        """New pages with one reference each and no content, or None (and no change) when there are too few.

        Args:
            num_pages: number of pages.
            tenant: tenant that they are for. Its own cached pages go before those of others that have as many.
        """
        num_lacking = num_pages - self._pool.num_free
        if num_lacking > 0:
            if num_lacking > self._num_evictable:
                return None
            self._evict(num_lacking, tenant)
        return self._pool.allocate(num_pages)

    def retain(self, pages: Iterable[int]) -> None:
        """One more owner for each of these pages."""
        for page in pages:
            if page != RELEASED:
                if page in self._content and self._pool.num_refs(page) == 0:
                    self._forget_evictable(page)
                self._pool.retain(page)

    def release(self, pages: list[int]) -> None:
        """One owner less for a request's pages, given in token order.

        Goes from the last page to the first, so that tails are evicted before the heads that more requests share.
        """
        for page in reversed(pages):
            if page == RELEASED or not self._pool.release(page):
                continue
            if page in self._content:
                tenant = self._content[page][-1]
                is_new = tenant not in self._evictable
                self._evictable.setdefault(tenant, OrderedDict())[page] = None
                self._num_evictable += 1
                if is_new:
                    self._note_size(tenant)
            else:
                self._pool.recycle(page)

    def reset(self) -> None:
        """Forgets all content. Pages in use stay with their owners."""
        for pages in self._evictable.values():
            for page in pages:
                self._pool.recycle(page)
        self._evictable.clear()
        self._num_evictable = 0
        self._num_cached.clear()
        self._by_size = None
        for pages_of in self._page_by_hash:
            pages_of.clear()
        self._content.clear()
        if self.snapshots is not None:
            self.snapshots.reset()

    def check_integrity(self, owners: dict[int, int]) -> None:
        """Asserts that pages are conserved; `owners` maps each page in use to its number of owners."""
        evictable = {page: tenant for tenant, pages in self._evictable.items() for page in pages}
        self._pool.check_integrity(owners, set(evictable))
        if self.snapshots is not None:
            self.snapshots.check_integrity()
        by_page = {page: (g, key) for g, pages_of in enumerate(self._page_by_hash) for key, page in pages_of.items()}
        assert by_page == {page: content[:2] for page, content in self._content.items()}
        assert evictable.keys() <= self._content.keys(), "an evictable page has no content"
        assert all(self._content[page][-1] == tenant for page, tenant in evictable.items()), "a page changed hands"
        assert self._num_evictable == len(evictable) == sum(map(len, self._evictable.values()))
        assert all(self._evictable.values()), "a tenant without evictable pages is remembered"
        assert all(self._num_cached.values()), "a tenant without cached pages is remembered"
        assert self._num_cached == Counter(tenant for *_, tenant in self._content.values())

    def _evict(self, num_pages: int, tenant: str) -> None:
        """Free evictable pages, each of the tenant that then has the most cached ones, those released first in front.

        Args:
            num_pages: number of pages.
            tenant: tenant that they are for, which is taken first among equals.
        """
        for _ in range(num_pages):
            if len(self._evictable) == 1:
                (largest,) = self._evictable
                self._by_size = None
            else:
                largest = self._largest_tenant()
                if tenant in self._evictable and self._num_cached[tenant] == self._num_cached[largest]:
                    largest = tenant
            self._evict_oldest(largest)

    def _largest_tenant(self) -> str:
        """Return the tenant with evictable pages that has the most cached ones; of equal ones the first by name."""
        heap = self._by_size
        if heap is None or len(heap) > 2 * len(self._evictable) + _SPARE_ENTRIES:
            heap = self._by_size = [(-self._num_cached[name], name) for name in self._evictable]
            heapify(heap)
        while True:
            count, name = heap[0]
            if name in self._evictable and -count == self._num_cached[name]:
                return name
            heappop(heap)  # out of date: whenever a count changes, an entry is added

    def _note_size(self, tenant: str) -> None:
        """Add an entry for a tenant to the heap, if it is needed."""
        if self._by_size is not None and tenant in self._evictable:
            heappush(self._by_size, (-self._num_cached[tenant], tenant))

    def _evict_oldest(self, tenant: str) -> None:
        """Free the evictable page of a tenant that was released first."""
        page = next(iter(self._evictable[tenant]))
        self._forget_evictable(page)
        group, page_hash, _ = self._content.pop(page)
        del self._page_by_hash[group][page_hash]
        self._num_cached[tenant] -= 1
        if not self._num_cached[tenant]:
            del self._num_cached[tenant]
        self._note_size(tenant)
        self._pool.recycle(page)

    def _forget_evictable(self, page: int) -> None:
        """Take a page out of the evictable ones."""
        tenant = self._content[page][-1]
        pages = self._evictable[tenant]
        del pages[page]
        if not pages:
            del self._evictable[tenant]
        self._num_evictable -= 1


def _num_cached(pages_of: Mapping[bytes, int], hashes: Sequence[bytes]) -> int:
    """Return the length of the longest run of cached hashes from the first on."""
    return next((index for index, page_hash in enumerate(hashes) if page_hash not in pages_of), len(hashes))


def _root_hash(salt: bytes) -> bytes:
    # Hashed under another personalisation than pages: no salt that a user chooses can pose as a page's hash.
    return blake2b(salt, digest_size=DIGEST_SIZE, person=b"salt").digest()


def _packed(token_ids: TokenIds) -> bytes:
    return pack(f"{len(token_ids)}i", *token_ids)


def _page_hash(previous: bytes, token_ids: bytes) -> bytes:
    page_hash = _NEW_HASH.copy()
    page_hash.update(previous + token_ids)
    return page_hash.digest()
