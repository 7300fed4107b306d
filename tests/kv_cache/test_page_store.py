from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from jaxserve.api.sampling_params import SamplingParams
from jaxserve.scheduling.kv_cache import prefix_hashes
from jaxserve.scheduling.kv_cache.groups import KVGroups
from jaxserve.scheduling.kv_cache.page_store import PageStore
from jaxserve.scheduling.kv_cache.transfers import Transfers
from jaxserve.scheduling.request import Request

PAGE_SIZE = 4


def make_store(num_pages=8):
    return PageStore(num_pages, KVGroups(PAGE_SIZE), Transfers())


def make_request(token_ids, salt=b""):
    return Request("r", list(token_ids), SamplingParams(), seed=0, max_total_tokens=1000, salt=salt)


def fill(store, request):
    """Do what computing all full pages of a request does; return its pages, owned once."""
    hashes = store.index.hashes(request)
    pages = store.allocate(len(hashes))
    for page_hash, page in zip(hashes, pages, strict=True):
        store.register(page_hash, page)
    return pages


def test_match_finds_the_longest_cached_run():
    store = make_store()
    pages = fill(store, make_request(range(12)))
    assert store.index.match(make_request(range(13))) == pages
    assert store.index.match(make_request([*range(8), 99, 98, 97, 96, 95])) == pages[:2]
    assert store.index.match(make_request([99, *range(12)])) == []
    assert store.index.match(make_request([*range(4), 99, *range(5, 13)])) == pages[:1]


@pytest.mark.parametrize(("num_known", "num_pages"), [(1, 0), (3, 0), (4, 0), (5, 1), (8, 1), (9, 2), (12, 2), (13, 3)])
def test_match_leaves_at_least_one_token_to_compute(num_known, num_pages):
    store = make_store()
    pages = fill(store, make_request(range(16)))
    assert store.index.match(make_request(range(num_known))) == pages[:num_pages]


def test_match_counts_output_tokens_as_known():
    store = make_store()
    pages = fill(store, make_request(range(8)))
    request = make_request(range(5))
    request.output_token_ids += [5, 6, 7, 8]
    assert store.index.match(request) == pages


def test_hashes_grow_with_the_known_tokens_and_do_not_depend_on_when_they_were_taken():
    store = make_store()
    request = make_request(range(6))
    assert len(store.index.hashes(request)) == 1
    request.output_token_ids += [6, 7, 8]
    assert store.index.hashes(request) == store.index.hashes(make_request(range(9)))
    assert request.page_hashes is store.index.hashes(request)


def test_requests_with_one_prompt_hash_it_once(monkeypatch):
    store, hashed, page_hash = make_store(), [], prefix_hashes._page_hash
    monkeypatch.setattr(prefix_hashes, "_page_hash", lambda *args: hashed.append(args) or page_hash(*args))
    siblings = [make_request(range(11)) for _ in range(4)]
    first, *others = map(store.index.hashes, siblings)
    assert len(hashed) == 2
    assert all(hashes == first and hashes is not first for hashes in others)
    siblings[0].output_token_ids += [7]
    siblings[1].output_token_ids += [8]
    a, b = (store.index.hashes(sibling) for sibling in siblings[:2])
    assert (a[:2], len(a), len(others[-1])) == (b[:2], 3, 2)
    assert a[2] != b[2]
    assert store.index.hashes(make_request(range(11), b"salt"))[0] != first[0]


@given(st.lists(st.integers(0, 1), max_size=12), st.lists(st.integers(0, 1), max_size=12), st.booleans())
def test_hashes_are_equal_exactly_if_prefixes_and_salts_are(a, b, same_salt):
    store = make_store()
    hashes_a, hashes_b = (
        store.index.hashes(make_request(a)),
        store.index.hashes(make_request(b, b"" if same_salt else b"s")),
    )
    for i, (hash_a, hash_b) in enumerate(zip(hashes_a, hashes_b, strict=False)):
        stop = (i + 1) * PAGE_SIZE
        assert (hash_a == hash_b) == (same_salt and a[:stop] == b[:stop])


def test_salts_do_not_share_pages():
    store = make_store()
    pages = fill(store, make_request(range(8), b"tenant a"))
    assert store.index.match(make_request(range(9), b"tenant a")) == pages
    assert store.index.match(make_request(range(9), b"tenant b")) == []
    assert store.index.match(make_request(range(9))) == []


def test_a_salt_cannot_pose_as_the_hash_of_a_page():
    store = make_store()
    victim = make_request(range(8))
    fill(store, victim)
    attacker = make_request(range(4, 9), salt=store.index.hashes(victim)[0])
    assert store.index.match(attacker) == []


def test_released_pages_stay_findable_and_count_as_free():
    store = make_store(num_pages=4)
    request = make_request(range(9))
    pages = fill(store, request)
    assert store.num_available == 2
    store.release(pages)
    assert store.num_available == 4
    found = store.index.match(make_request(range(9)))
    assert found == pages
    store.retain(found)
    assert store.num_available == 2
    store.check_integrity(dict.fromkeys(pages, 1))


def test_blank_pages_are_used_before_cached_ones_are_evicted():
    store = make_store(num_pages=4)
    pages = fill(store, make_request(range(8)))
    store.release(pages)
    assert set(store.allocate(2)).isdisjoint(pages)
    assert store.index.match(make_request(range(9))) == pages


def test_tails_are_evicted_before_heads_and_old_releases_before_new_ones():
    store = make_store(num_pages=4)
    old, new = make_request(range(8)), make_request(range(100, 108))
    for pages in [fill(store, old), fill(store, new)]:
        store.release(pages)
    lens = []
    for _ in range(4):
        found = [store.index.match(make_request(prompt)) for prompt in (range(9), range(100, 109))]
        lens.append((len(found[0]), len(found[1])))
        assert store.allocate(1) is not None
    assert lens == [(2, 2), (1, 2), (0, 2), (0, 1)]
    assert all(sum(a) > sum(b) for a, b in pairwise(lens))


def test_using_a_cached_page_makes_it_young_again():
    store = make_store(num_pages=2)
    for tokens in [range(4), range(100, 104)]:
        store.release(fill(store, make_request(tokens)))
    found = store.index.match(make_request(range(5)))
    store.retain(found)
    store.release(found)
    store.allocate(1)
    assert store.index.match(make_request(range(5))) == found
    assert store.index.match(make_request(range(100, 105))) == []


def test_pages_in_use_are_never_evicted():
    store = make_store(num_pages=3)
    pages = fill(store, make_request(range(8)))
    assert store.allocate(2) is None
    assert len(store.allocate(1)) == 1
    assert store.index.match(make_request(range(9))) == pages


def test_a_failed_allocation_changes_nothing():
    store = make_store(num_pages=2)
    store.release(fill(store, make_request(range(8))))
    assert store.allocate(3) is None
    assert store.num_available == 2
    assert len(store.index.match(make_request(range(9)))) == 2


def test_shared_pages_are_freed_by_their_last_owner():
    store = make_store(num_pages=2)
    pages = fill(store, make_request(range(8)))
    store.retain(pages)
    store.release(pages)
    assert store.num_available == 0
    store.check_integrity(dict.fromkeys(pages, 1))
    store.release(pages)
    assert store.num_available == 2


def test_the_first_of_two_equal_pages_stays_the_cached_one():
    store = make_store(num_pages=4)
    first, second = fill(store, make_request(range(4))), fill(store, make_request(range(4)))
    assert store.index.match(make_request(range(5))) == first
    store.release(second)
    store.check_integrity({first[0]: 1})
    store.release(first)
    assert store.index.match(make_request(range(5))) == first


def test_only_owned_pages_can_be_registered():
    store = make_store()
    store.release(store.allocate(1))
    with pytest.raises(AssertionError, match="not computing"):
        store.register(b"h", 0)


def test_reset_forgets_everything_but_leaves_owners_their_pages():
    store = make_store(num_pages=4)
    used, unused = fill(store, make_request(range(8))), fill(store, make_request(range(100, 108)))
    store.release(unused)
    store.reset([])
    assert store.index.match(make_request(range(9))) == []
    assert store.index.match(make_request(range(100, 109))) == []
    assert store.num_available == 2
    store.check_integrity(dict.fromkeys(used, 1))
    store.release(used)
    assert store.num_available == 4
    store.check_integrity({})
