"""Shares of the prefix cache: whose cached pages are given up."""

from collections import OrderedDict

from hypothesis import given, settings
from hypothesis import strategies as st
from simulation import Loop, make_request, make_scheduler

from jaxserve.scheduling.kv_cache.groups import KVGroups
from jaxserve.scheduling.kv_cache.page_store import PageStore
from jaxserve.scheduling.kv_cache.transfers import Transfers
from tests.random_runs import examples

TENANTS = ["a", "b", "c"]
OPERATIONS = st.lists(
    st.tuples(st.sampled_from(TENANTS), st.integers(1, 5), st.sampled_from(["run", "hold", "drop", "find"])),
    max_size=60,
)


class Model:
    """The rule, as naively as it can be said."""

    def __init__(self, num_pages):
        self.num_free = num_pages
        self.cached = OrderedDict()  # page -> tenant and whether it is in use, the one released last at the end

    def allocate(self, count, tenant):
        """Give up pages, one after the other; returns them, or None where there are too few."""
        lacking = count - self.num_free
        if lacking > sum(not in_use for _, in_use in self.cached.values()):
            return None
        gone = []
        for _ in range(max(lacking, 0)):
            counts = {name: sum(owner == name for owner, _ in self.cached.values()) for name in TENANTS}
            able = {owner for owner, in_use in self.cached.values() if not in_use}
            victim = min(able, key=lambda name: (-counts[name], name != tenant, name))
            page = next(p for p, entry in self.cached.items() if entry == (victim, False))
            gone.append(page)
            del self.cached[page]
            self.num_free += 1
        self.num_free -= count
        return gone


@settings(max_examples=examples(100))
@given(num_pages=st.integers(4, 16), operations=OPERATIONS)
def test_the_tenant_with_the_most_pages_loses_its_oldest(num_pages, operations):
    store, model = PageStore(num_pages, KVGroups(4), Transfers()), Model(num_pages)
    held, released, number = [], [], 0
    for tenant, count, kind in operations:
        if kind == "drop" and held:
            pages = held.pop(0)
            release(store, model, pages)
            released.append(pages)
        elif kind == "find" and released:
            pages = [page for page in released[-1] if page in model.cached and not model.cached[page][1]]
            store.retain(pages)
            for page in pages:
                model.cached[page] = (model.cached[page][0], True)
            release(store, model, pages)
        elif kind in ("run", "hold"):
            before = set(model.cached)
            gone = model.allocate(count, tenant)
            pages = store.allocate(count, tenant)
            assert (pages is None) == (gone is None)
            if pages is None:
                continue
            assert before - set(store._pages.content) == set(gone)
            for page in pages:
                number += 1
                store.register(str(number).encode(), page, 0, tenant)
                model.cached[page] = (tenant, True)
            held.append(pages)
            if kind == "run":
                release(store, model, held.pop())
                released.append(pages)
        owners = {page: 1 for pages in held for page in pages}
        store.check_integrity(owners)
        assert {name: store.order._num_cached[name] for name in TENANTS} == {
            name: sum(owner == name for owner, _ in model.cached.values()) for name in TENANTS
        }


def release(store, model, pages):
    """Release pages here and there; the last goes first."""
    store.release(list(pages))
    for page in reversed(pages):
        model.cached[page] = (model.cached[page][0], False)
        model.cached.move_to_end(page)


@settings(max_examples=examples(20))
@given(
    victim=st.lists(st.integers(1, 16), min_size=1, max_size=3),
    flood=st.lists(st.integers(1, 40), min_size=1, max_size=40),
    num_tenants=st.integers(1, 3),
)
def test_a_flood_leaves_other_tenants_their_part_of_the_cache(victim, flood, num_tenants):
    num_pages, page_size = 32, 4
    loop = new_loop(max_num_seqs=1, num_pages=num_pages, page_size=page_size)
    for index in range(num_tenants):
        for number, length in enumerate(victim):
            name = f"quiet {index}"
            run(loop, [make_request(f"{name} {number}", [index, number] * length, tenant=name, salt=name.encode())])
    store = loop.scheduler.shards[0].ledger.store
    before = {f"quiet {index}": store.order._num_cached[f"quiet {index}"] for index in range(num_tenants)}
    longest = max(-(-(2 * length + 4) // page_size) for length in flood)  # pages that the flood has in use
    for number, length in enumerate(flood):
        run(loop, [make_request(f"flood {number}", [number, 7] * length, tenant="flood", salt=b"flood")])
        share = (num_pages - longest) // (num_tenants + 1)
        for tenant, count in before.items():
            assert store.order._num_cached[tenant] >= min(count, share)


def test_without_the_rule_the_flood_would_take_all():
    loop = new_loop(max_num_seqs=1, num_pages=32, page_size=4)
    run(loop, [make_request("quiet", range(40), tenant="quiet")])
    for number in range(20):  # under one name, the oldest pages go first, whoever asked for them
        run(loop, [make_request(f"flood {number}", [number] * 40, tenant="quiet")])
    again = make_request("again", range(41), tenant="quiet")
    run(loop, [again])
    assert again.num_cached_tokens == 0


def test_a_flood_leaves_a_prompt_cached():
    loop = new_loop(max_num_seqs=1, num_pages=32, page_size=4)
    run(loop, [make_request("quiet", range(40), tenant="quiet")])
    for number in range(20):
        run(loop, [make_request(f"flood {number}", [number] * 40, tenant="flood")])
    again = make_request("again", range(41), tenant="quiet")
    run(loop, [again])
    assert again.num_cached_tokens == 40


def new_loop(**sizes):
    """Return a scheduler over a device that checks what rows read."""
    return Loop(make_scheduler(**sizes))


def run(loop, requests):
    """Run requests to their end."""
    loop.add(*requests).drain()


def test_pages_found_again_and_again_leave_nothing_behind_while_none_is_evicted():
    store = PageStore(3, KVGroups(4), Transfers())
    [own], [other], [third] = (store.allocate(1, tenant) for tenant in "abc")
    for page, tenant in ((own, "a"), (other, "b"), (third, "c")):
        store.register(tenant.encode(), page, tenant=tenant)
        store.release([page])
    assert store.allocate(1, "d") == [own], "an eviction among several tenants"
    for _ in range(2000):
        store.retain([other])
        store.release([other])
    assert len(store.order._by_size or ()) < 1000
    assert store.allocate(1, "d") == [other]
