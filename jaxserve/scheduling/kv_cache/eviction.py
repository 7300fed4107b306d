"""EvictionOrder: chooses the cached page to evict, so that tenants get equal parts of the cache.

Hints about a page's next use change the order within a tenant (`turns.py`).
"""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Mapping, Sequence
from heapq import heapify, heappop, heappush

from jaxserve.api.reuse_hint import NOT_AGAIN
from jaxserve.scheduling.kv_cache.pages import Content
from jaxserve.scheduling.kv_cache.turns import ReuseOrder, Turn
from jaxserve.scheduling.request import Request

_SPARE_ENTRIES = 256  # outdated heap entries that trigger a rebuild
_MAX_TURNS = 65_536  # latest turns of conversations, beyond which the oldest are forgotten


class EvictionOrder:
    """Cached pages without owners, by tenant.

    The tenant with the most cached pages, in use or not, loses the first page in its `ReuseOrder`: without hints, the
    page it released first. A tenant that fills the cache thus evicts others' pages only while they hold more than an
    equal part.

    Attributes:
        num_evictable: number of evictable pages.
        now_s: latest arrival of a request.
    """

    def __init__(self) -> None:
        self._evictable: dict[str, ReuseOrder] = {}  # evictable pages by tenant
        self.num_evictable = 0
        self.now_s = 0.0
        self._turns: dict[int, Turn] = {}  # of pages with a hint, owned or not
        # by tenant, group and hash of the prompt's last full page; the first one in front
        self._last_turns: OrderedDict[tuple[str, str, bytes], Turn] = OrderedDict()
        # Heap of evictable tenants by number of cached pages, with outdated entries; None until an eviction needs it.
        self._by_size: list[tuple[int, str]] | None = None
        self._num_cached: Counter[str] = Counter()  # pages with content by tenant, in use or not

    def cached(self, tenant: str) -> None:
        """Count a page of a tenant that was registered in the prefix cache."""
        self._num_cached[tenant] += 1
        if self._by_size is not None:
            self._note_size(tenant)

    def uncached(self, page: int, tenant: str) -> None:
        """Count a page of a tenant that is not in the prefix cache any more."""
        self._turns.pop(page, None)
        self._num_cached[tenant] -= 1
        if not self._num_cached[tenant]:
            del self._num_cached[tenant]
        if self._by_size is not None:
            self._note_size(tenant)

    def add(self, page: int, tenant: str) -> None:
        """Make a tenant's cached page evictable, because it lost its last owner."""
        pages = self._evictable.get(tenant)
        if pages is None:
            pages = self._evictable[tenant] = ReuseOrder()
            self._note_size(tenant)
        turn = self._turns.get(page) if self._turns else None
        if turn is not None and turn.until_s < self.now_s:  # used since without a hint
            del self._turns[page]
            turn = None
        pages.add(page, turn)
        self.num_evictable += 1

    def remove(self, page: int, tenant: str) -> None:
        """Remove a tenant's page from the evictable ones, because it is owned again or evicted."""
        pages = self._evictable[tenant]
        pages.remove(page, self._turns.get(page) if self._turns else None)
        if not pages:
            del self._evictable[tenant]
        self.num_evictable -= 1

    def pop(self, tenant: str) -> int:
        """Remove and return the page to evict, of the tenant with the most cached pages.

        Args:
            tenant: tenant that gets the page; on a tie, its own page is evicted.
        """
        if len(self._evictable) == 1:
            (largest,) = self._evictable
            self._by_size = None
        else:
            largest = self._largest_tenant()
            if tenant in self._evictable and self._num_cached[tenant] == self._num_cached[largest]:
                largest = tenant
        page = self._evictable[largest].first(self.now_s)
        self.remove(page, largest)
        self.uncached(page, largest)
        return page

    def hint(self, request: Request, hashes: Sequence[bytes], content: Mapping[int, Content], page_size: int) -> None:
        """Note the hint of a request that is about to release its pages.

        Pages that another conversation has used, too, outlive this one's: a hint that none of its own are needed again
        does not concern them.

        Args:
            request: the request, which has a hint.
            hashes: hashes of its full pages.
            content: content of all cached pages.
            page_size: tokens per page.
        """
        hint, tenant = request.reuse, request.tenant
        assert hint is not None, "the caller has checked it"
        turn, common = Turn(hint, self.now_s), Turn(hint, self.now_s, is_common=True)
        for page in request.pages:
            if page not in content or content[page][-1] != tenant:
                continue
            before = self._turns.get(page)
            if before is None or before.group == hint.group:
                self._turns[page] = turn
            elif hint.after_s != NOT_AGAIN:
                self._turns[page] = common
        if hint.group:
            self._replace_earlier(turn, tenant, hashes[: request.num_prompt_tokens // page_size])

    def _replace_earlier(self, turn: Turn, tenant: str, hashes: Sequence[bytes]) -> None:
        """Replace the latest turn that a new one continues; `hashes` covers its prompt's full pages."""
        for page_hash in reversed(hashes):
            earlier = self._last_turns.pop((tenant, turn.group, page_hash), None)
            if earlier is not None:
                if tenant in self._evictable:
                    self._evictable[tenant].replace(earlier)
                break
        if hashes:
            self._last_turns[tenant, turn.group, hashes[-1]] = turn
            if len(self._last_turns) > _MAX_TURNS:
                self._last_turns.popitem(last=False)

    def clear(self) -> list[int]:
        """Forget all pages; return the evictable ones."""
        pages = [page for pages in self._evictable.values() for page in pages]
        self._evictable.clear()
        self._turns.clear()
        self._last_turns.clear()
        self.num_evictable = 0
        self._num_cached.clear()
        self._by_size = None
        return pages

    def check_integrity(self, content: dict[int, Content], idle: set[int]) -> None:
        """Assert that `idle` are the evictable pages, and that tenants and their page counts agree with `content`.

        Args:
            content: content of each cached page; its last element is the tenant.
            idle: cached pages without owners.
        """
        evictable = {page: tenant for tenant, pages in self._evictable.items() for page in pages}
        assert evictable.keys() == idle, f"evictable and cached without owner differ: {evictable.keys() ^ idle}"
        assert all(content[page][-1] == tenant for page, tenant in evictable.items()), "a page changed hands"
        assert self.num_evictable == len(evictable) == sum(len(list(pages)) for pages in self._evictable.values())
        assert self._turns.keys() <= content.keys(), "a page without content has a hint"
        assert all(self._evictable.values()), "a tenant without evictable pages is remembered"
        assert all(self._num_cached.values()), "a tenant without cached pages is remembered"
        assert self._num_cached == Counter(tenant for *_, tenant in content.values())

    def _largest_tenant(self) -> str:
        """Return the evictable tenant with the most cached pages; on a tie, the first by name."""
        heap = self._by_size
        if heap is None:
            heap = self._by_size = [(-self._num_cached[name], name) for name in self._evictable]
            heapify(heap)
        while True:
            count, name = heap[0]
            if name in self._evictable and -count == self._num_cached[name]:
                return name
            heappop(heap)  # outdated: every change of a count adds an entry

    def _note_size(self, tenant: str) -> None:
        """Add a heap entry for a tenant if a heap exists.

        Pages may come and go for long without an eviction, and only evictions drop outdated entries.
        """
        if self._by_size is None or tenant not in self._evictable:
            return
        if len(self._by_size) > 2 * len(self._evictable) + _SPARE_ENTRIES:
            self._by_size = None
        else:
            heappush(self._by_size, (-self._num_cached[tenant], tenant))
