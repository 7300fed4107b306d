"""EvictionOrder: chooses the cached page to evict, so that tenants get equal parts of the cache."""

from __future__ import annotations

from collections import Counter, OrderedDict
from heapq import heapify, heappop, heappush

from jaxserve.scheduling.kv_cache.pages import Content

_SPARE_ENTRIES = 256  # outdated heap entries that trigger a rebuild


class EvictionOrder:
    """Cached pages without owners, by tenant.

    The tenant with the most cached pages, in use or not, loses the page it released first. A tenant that fills the
    cache thus evicts others' pages only while they hold more than an equal part; with a single tenant, eviction follows
    release order.

    Attributes:
        num_evictable: number of evictable pages.
    """

    def __init__(self) -> None:
        # evictable pages by tenant, the first released in front
        self._evictable: dict[str, OrderedDict[int, None]] = {}
        self.num_evictable = 0
        # Heap of evictable tenants by number of cached pages, with outdated entries; None until an eviction needs it.
        self._by_size: list[tuple[int, str]] | None = None
        self._num_cached: Counter[str] = Counter()  # pages with content by tenant, in use or not

    def cached(self, tenant: str) -> None:
        """Count a page of a tenant that was registered in the prefix cache."""
        self._num_cached[tenant] += 1
        if self._by_size is not None:
            self._note_size(tenant)

    def add(self, page: int, tenant: str) -> None:
        """Make a tenant's cached page evictable, because it lost its last owner."""
        pages = self._evictable.get(tenant)
        if pages is None:
            pages = self._evictable[tenant] = OrderedDict()
            self._note_size(tenant)
        pages[page] = None
        self.num_evictable += 1

    def remove(self, page: int, tenant: str) -> None:
        """Remove a tenant's page from the evictable ones, because it is owned again or evicted."""
        pages = self._evictable[tenant]
        del pages[page]
        if not pages:
            del self._evictable[tenant]
        self.num_evictable -= 1

    def pop(self, tenant: str) -> int:
        """Remove and return the page to evict: of the tenant with the most cached pages, the one released first.

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
        page = next(iter(self._evictable[largest]))
        self.remove(page, largest)
        self._num_cached[largest] -= 1
        if not self._num_cached[largest]:
            del self._num_cached[largest]
        if self._by_size is not None:
            self._note_size(largest)
        return page

    def clear(self) -> list[int]:
        """Forget all pages; return the evictable ones."""
        pages = [page for pages in self._evictable.values() for page in pages]
        self._evictable.clear()
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
        assert self.num_evictable == len(evictable) == sum(map(len, self._evictable.values()))
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
