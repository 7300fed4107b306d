"""WaitingQueue: waiting requests, ordered by class and then by the service that tenants have received.

Classes. A request has a `priority`; lower numbers always come first.

Tenants. Inside a class each tenant has a virtual token counter (VTC, arXiv 2401.00588): the service it has received,
one unit per computed prompt token and two per output token, divided by the tenant's weight. The tenant with the
smallest counter comes first, and its requests in arrival order. When a tenant returns from idling, its counter is
raised to the smallest counter among waiting tenants, so that idling gives no credit; if nobody waits, to the counter of
the tenant that left the queue last. As long as two tenants of a class have waiting requests, their service differs by
at most twice the larger of the longest prompt and of twice the maximum output tokens in all running rows.

Cost. A prompt is charged to its tenant when the request starts. Output tokens are charged only when the order matters:
when requests of several tenants of a class wait and one can start, not in every step. The tenants of a class are in a
heap whose entries are corrected when they reach its top. A plan that starts nobody therefore does nothing here, and one
that does examines its running rows and a few tenants, however many wait. A request after an idle time examines its
tenant's rows, and the rows of tenants with the smallest counters.
"""

from __future__ import annotations

import heapq
from bisect import insort
from collections import OrderedDict
from collections.abc import Generator, Iterator, Mapping

from jaxserve.scheduling.request import Request

PROMPT_COST = 1.0  # service per computed prompt token
OUTPUT_COST = 2.0  # service per output token
MAX_IDLE = 4096  # maximum idle tenants per class whose counters are kept


class _Tenant:
    """A tenant's requests in one class.

    Attributes:
        cost: counter increase per unit of service.
        counter: service received, divided by the weight.
        queue: waiting requests by id, in arrival order, preempted ones in front.
        charged: by running request, its tokens already charged.
        serial: serial number of its valid heap entry; -1 without one.
    """

    __slots__ = ("charged", "cost", "counter", "queue", "serial")

    def __init__(self, cost: float) -> None:
        self.cost = cost
        self.counter = 0.0
        self.queue: OrderedDict[str, Request] = OrderedDict()
        self.charged: dict[Request, int] = {}
        self.serial = -1

    @property
    def is_idle(self) -> bool:
        """True without waiting and running requests."""
        return not self.queue and not self.charged

    def charge(self, request: Request) -> int:
        """Add a running request's uncharged output tokens to the counter; return their number.

        It is negative if the request has fewer tokens than were charged, because the device did not compute them. The
        tenant's heap entry must then be pushed again, since it would reach the top too late.
        """
        num_new = request.num_tokens - self.charged[request]
        if num_new:
            self.counter += OUTPUT_COST * num_new * self.cost
            self.charged[request] += num_new
        return num_new

    def settle(self) -> bool:
        """Charge the output of all running requests; return whether the counter changed."""
        before = self.counter
        for request in self.charged:
            self.charge(request)
        return self.counter != before


_Entry = tuple[float, int, int, _Tenant]  # heap entry: counter, first arrival, serial number, tenant


class _PriorityClass:
    """Tenants with requests in one priority class, and a heap of those that wait.

    Attributes:
        tenants: all tenants with requests, and the latest idle ones.
        num_waiting: waiting requests.
        num_queued: tenants with waiting requests.
        num_active: tenants with requests.
    """

    def __init__(self) -> None:
        self.tenants: dict[str, _Tenant] = {}
        self.num_waiting = self.num_queued = self.num_active = 0
        self._idle: OrderedDict[str, None] = OrderedDict()
        self._heap: list[_Entry] = []
        self._num_pushes = 0
        self._last: _Tenant | None = None  # the tenant that left the queue last

    def enter(self, name: str, cost: float) -> _Tenant:
        """Return the tenant of an arriving request, created with `cost` if necessary, and count it as active."""
        tenant = self.tenants.get(name)
        if tenant is None:
            tenant = self.tenants[name] = _Tenant(cost)
        if tenant.is_idle:
            self._idle.pop(name, None)
            self.num_active += 1
        return tenant

    def leave(self, name: str, tenant: _Tenant) -> None:
        """If a tenant has no requests any more, count it as idle, and forget the tenant that is idle the longest if
        there are too many.
        """
        if tenant.is_idle:
            self.num_active -= 1
            self._idle[name] = None
            if len(self._idle) > MAX_IDLE:
                oldest, _ = self._idle.popitem(last=False)
                del self.tenants[oldest]

    def lift(self, tenant: _Tenant) -> None:
        """Raise the counter of a tenant without waiting requests to the smallest counter among waiting tenants.

        This removes the credit of the time in which it asked for nothing. If no tenant waits, the counter is raised to
        the last counter of the tenant that left the queue last.
        """
        if self.num_active > 1:
            tenant.settle()
        while (top := self._top()) is not None and top[3].settle():  # another one may be the first now
            pass
        if top is not None:
            tenant.counter = max(tenant.counter, top[0])
        elif self._last is not None:
            if self.num_active > 1:
                self._last.settle()
            tenant.counter = max(tenant.counter, self._last.counter)

    def push(self, tenant: _Tenant) -> None:
        """Add a heap entry for a tenant with waiting requests."""
        self._num_pushes += 1
        tenant.serial = self._num_pushes
        first = next(iter(tenant.queue.values()))
        heapq.heappush(self._heap, (tenant.counter, first.arrival, tenant.serial, tenant))

    def left_queue(self, tenant: _Tenant) -> None:
        """Take a tenant, whose last waiting request was removed, out of the heap and the count of queued tenants."""
        tenant.serial = -1
        self.num_queued -= 1
        self._last = tenant

    def _top(self) -> _Entry | None:
        """Return the entry of the tenant with the smallest counter, after correcting outdated entries."""
        heap = self._heap
        while heap:
            counter, _, serial, tenant = heap[0]
            if serial != tenant.serial:
                heapq.heappop(heap)
            elif counter != tenant.counter:
                heapq.heappop(heap)
                self.push(tenant)
            else:
                return heap[0]
        return None

    def in_order(self) -> Iterator[Request]:
        """Yield the waiting requests, each from the tenant with the smallest counter at that time."""
        if self.num_queued == 1:
            top = self._top()
            assert top is not None, "a tenant with waiting requests has an entry"
            yield from top[3].queue.values()
            return
        asked: dict[_Tenant, Iterator[Request]] = {}  # remaining requests by visited tenant
        # heap of these tenants, with their next requests
        again: list[tuple[float, int, int, _Tenant, Request]] = []
        try:
            while True:
                top = self._top()
                if again and (top is None or again[0][:2] <= top[:2]):
                    _, _, _, tenant, request = heapq.heappop(again)
                elif top is not None:
                    heapq.heappop(self._heap)
                    tenant = top[3]
                    asked[tenant] = iter(tenant.queue.values())
                    request = next(asked[tenant])
                else:
                    return
                yield request
                following = next(asked[tenant], None)
                if following is not None:
                    self._num_pushes += 1
                    entry = (tenant.counter, following.arrival, self._num_pushes, tenant, following)
                    heapq.heappush(again, entry)
        finally:
            for tenant in asked:
                self.push(tenant)

    def check_integrity(self, running: Mapping[str, int]) -> None:
        """Assert that the counts match the requests, given the running counts by tenant."""
        tenants = self.tenants
        assert {name: len(t.charged) for name, t in tenants.items() if t.charged} == running
        assert self.num_waiting == sum(len(t.queue) for t in tenants.values())
        assert self.num_queued == sum(bool(t.queue) for t in tenants.values())
        assert self.num_active == sum(not t.is_idle for t in tenants.values())
        assert self._idle.keys() == {name for name, t in tenants.items() if t.is_idle}
        valid = [entry[3] for entry in self._heap if entry[2] == entry[3].serial]
        assert set(valid) == {t for t in tenants.values() if t.queue}
        assert len(valid) == len(set(valid)), "a tenant has two entries"


class WaitingQueue:
    """Waiting requests in the order in which they may start.

    Args:
        weights: weights by tenant; 1 for others.
        running: running requests by id, owned by the caller.
    """

    def __init__(self, weights: Mapping[str, float], running: Mapping[str, Request]) -> None:
        self._weights, self._running = weights, running
        self._classes: dict[int, _PriorityClass] = {}
        self._priorities: list[int] = []  # sorted keys
        self._num_waiting = 0

    def __len__(self) -> int:
        return self._num_waiting

    def __iter__(self) -> Iterator[Request]:
        """Yield all waiting requests: by class, by tenant, in arrival order."""
        for priority in self._priorities:
            for tenant in self._classes[priority].tenants.values():
                yield from tenant.queue.values()

    def __contains__(self, request: Request) -> bool:
        group = self._classes.get(request.priority)
        tenant = None if group is None else group.tenants.get(request.tenant)
        return tenant is not None and tenant.queue.get(request.request_id) is request

    def in_order(self) -> Generator[Request]:
        """Yield the waiting requests in order, which charges change meanwhile.

        The queue must not change before the iterator is closed, except for classes below the last request's.
        """
        for priority in list(self._priorities):
            group = self._classes.get(priority)
            if group is not None and group.num_waiting:
                yield from group.in_order()

    @property
    def first_priority(self) -> int:
        """Highest class of a waiting request; there must be one."""
        return next(priority for priority in self._priorities if self._classes[priority].num_waiting)

    @property
    def last_priority(self) -> int:
        """Lowest class with waiting or running requests; there must be one."""
        return self._priorities[-1]

    @property
    def num_classes(self) -> int:
        """Number of classes with waiting or running requests."""
        return len(self._priorities)

    def num_ahead(self, priority: int) -> int:
        """Return the number of waiting requests in this class and higher ones."""
        return sum(self._classes[each].num_waiting for each in self._priorities if each <= priority)

    # Requests

    def append(self, request: Request) -> None:
        """Append a request to its tenant's queue."""
        group, tenant = self._enter(request)
        if not tenant.queue:
            group.lift(tenant)
        self._insert(request, group, tenant)

    def put_back(self, request: Request) -> None:
        """Put a request that has run at the head of its tenant's queue."""
        group, tenant = self._enter(request)
        self._insert(request, group, tenant)
        tenant.queue.move_to_end(request.request_id, last=False)
        group.push(tenant)  # its first request has changed

    def remove(self, request: Request) -> None:
        """Remove a waiting request, which starts or ends."""
        group = self._classes[request.priority]
        tenant = group.tenants[request.tenant]
        del tenant.queue[request.request_id]
        self._num_waiting -= 1
        group.num_waiting -= 1
        if not tenant.queue:
            group.left_queue(tenant)
        self._leave(request, group, tenant)

    def _enter(self, request: Request) -> tuple[_PriorityClass, _Tenant]:
        """Return a request's class and tenant, created if necessary."""
        group = self._classes.get(request.priority)
        if group is None:
            group = self._classes[request.priority] = _PriorityClass()
            insort(self._priorities, request.priority)
        return group, group.enter(request.tenant, 1 / self._weights.get(request.tenant, 1.0))

    def _insert(self, request: Request, group: _PriorityClass, tenant: _Tenant) -> None:
        """Append a request to its tenant's queue, and count it."""
        tenant.queue[request.request_id] = request
        self._num_waiting += 1
        group.num_waiting += 1
        if len(tenant.queue) == 1:
            group.num_queued += 1
            group.push(tenant)

    def _leave(self, request: Request, group: _PriorityClass, tenant: _Tenant) -> None:
        """Update the counts after a tenant's request was removed or stopped; delete a class without active tenants."""
        group.leave(request.tenant, tenant)
        if not group.num_active:  # no tenant has any claim left
            del self._classes[request.priority]
            self._priorities.remove(request.priority)

    # Service

    def started(self, request: Request, num_cached_tokens: int) -> None:
        """Charge a request's tenant for the prompt, except cached tokens, while the request is still queued."""
        tenant = self._classes[request.priority].tenants[request.tenant]
        num_tokens = request.num_tokens
        if not request.num_preemptions:
            num_tokens = request.num_prompt_tokens
            tenant.counter += PROMPT_COST * (num_tokens - num_cached_tokens) * tenant.cost
        tenant.charged[request] = num_tokens

    def stopped(self, request: Request) -> None:
        """Charge a stopped request's remaining tokens to its tenant."""
        group = self._classes[request.priority]
        tenant = group.tenants[request.tenant]
        if tenant.charge(request) < 0 and tenant.queue:
            group.push(tenant)
        del tenant.charged[request]
        self._leave(request, group, tenant)

    def take_back(self, request: Request, num_cached_tokens: int) -> None:
        """Return a started request to the head of its tenant's queue; refund the prompt if it never ran.

        Args:
            request: request that a target did not run.
            num_cached_tokens: the number passed to `started`.
        """
        self.put_back(request)
        self.stopped(request)
        if not request.num_preemptions:
            group = self._classes[request.priority]
            tenant = group.tenants[request.tenant]
            tenant.counter -= PROMPT_COST * (request.num_prompt_tokens - num_cached_tokens) * tenant.cost
            group.push(tenant)

    def settle(self) -> None:
        """Charge tenants for the output of running requests, in classes where several tenants wait."""
        classes = self._classes
        if self._num_waiting < 2 or all(group.num_queued < 2 for group in classes.values()):
            return
        for request in self._running.values():
            group = classes[request.priority]
            if group.num_queued > 1:
                tenant = group.tenants[request.tenant]
                if tenant.charge(request) < 0 and tenant.queue:
                    group.push(tenant)

    def check_integrity(self) -> None:
        """Assert that counts and heaps match the requests."""
        tenants = [tenant for group in self._classes.values() for tenant in group.tenants.values()]
        assert {request for tenant in tenants for request in tenant.charged} == set(self._running.values())
        assert self._priorities == sorted(self._classes)
        assert self._num_waiting == sum(group.num_waiting for group in self._classes.values())
        running: dict[int, dict[str, int]] = {}
        for request in self._running.values():
            by_tenant = running.setdefault(request.priority, {})
            by_tenant[request.tenant] = by_tenant.get(request.tenant, 0) + 1
        assert running.keys() <= self._classes.keys()
        for priority, group in self._classes.items():
            group.check_integrity(running.get(priority, {}))
            for name, tenant in group.tenants.items():
                for request in tenant.queue.values():
                    assert (request.priority, request.tenant) == (priority, name), "a request is in another's queue"
