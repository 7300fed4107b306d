from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from jaxserve.kv_cache import prefix_cache
from jaxserve.kv_cache.groups import KVGroups
from jaxserve.kv_cache.page_pool import PagePool
from jaxserve.kv_cache.prefix_cache import PrefixCache
from jaxserve.request import Request
from jaxserve.sampling_params import SamplingParams

PAGE_SIZE = 4


def make_cache(num_pages=8):
    return PrefixCache(PagePool(num_pages), KVGroups(PAGE_SIZE))


def make_request(token_ids, salt=b""):
    return Request("r", list(token_ids), SamplingParams(), seed=0, max_total_tokens=1000, salt=salt)


def fill(cache, request):
    """Does what computing all full pages of a request does; returns its pages, owned once."""
    hashes = cache.hashes(request)
    pages = cache.allocate(len(hashes))
    for page_hash, page in zip(hashes, pages, strict=True):
        cache.register(page_hash, page)
    return pages


def test_match_finds_the_longest_cached_run():
    cache = make_cache()
    pages = fill(cache, make_request(range(12)))
    assert cache.match(make_request(range(13))) == pages
    assert cache.match(make_request([*range(8), 99, 98, 97, 96, 95])) == pages[:2]
    assert cache.match(make_request([99, *range(12)])) == []
    assert cache.match(make_request([*range(4), 99, *range(5, 13)])) == pages[:1]


@pytest.mark.parametrize(("num_known", "num_pages"), [(1, 0), (3, 0), (4, 0), (5, 1), (8, 1), (9, 2), (12, 2), (13, 3)])
def test_match_leaves_at_least_one_token_to_compute(num_known, num_pages):
    cache = make_cache()
    pages = fill(cache, make_request(range(16)))
    assert cache.match(make_request(range(num_known))) == pages[:num_pages]


def test_match_counts_output_tokens_as_known():
    cache = make_cache()
    pages = fill(cache, make_request(range(8)))
    request = make_request(range(5))
    request.output_token_ids += [5, 6, 7, 8]
    assert cache.match(request) == pages


def test_hashes_grow_with_the_known_tokens_and_do_not_depend_on_when_they_were_taken():
    cache = make_cache()
    request = make_request(range(6))
    assert len(cache.hashes(request)) == 1
    request.output_token_ids += [6, 7, 8]
    assert cache.hashes(request) == cache.hashes(make_request(range(9)))
    assert request.page_hashes is cache.hashes(request)


def test_requests_with_one_prompt_hash_it_once(monkeypatch):
    cache, hashed, page_hash = make_cache(), [], prefix_cache._page_hash
    monkeypatch.setattr(prefix_cache, "_page_hash", lambda *args: hashed.append(args) or page_hash(*args))
    siblings = [make_request(range(11)) for _ in range(4)]
    first, *others = map(cache.hashes, siblings)
    assert len(hashed) == 2
    assert all(hashes == first and hashes is not first for hashes in others)
    siblings[0].output_token_ids += [7]
    siblings[1].output_token_ids += [8]
    a, b = (cache.hashes(sibling) for sibling in siblings[:2])
    assert (a[:2], len(a), len(others[-1])) == (b[:2], 3, 2)
    assert a[2] != b[2]
    assert cache.hashes(make_request(range(11), b"salt"))[0] != first[0]


@given(st.lists(st.integers(0, 1), max_size=12), st.lists(st.integers(0, 1), max_size=12), st.booleans())
def test_hashes_are_equal_exactly_where_prefixes_and_salts_are(a, b, same_salt):
    cache = make_cache()
    hashes_a, hashes_b = cache.hashes(make_request(a)), cache.hashes(make_request(b, b"" if same_salt else b"s"))
    for i, (hash_a, hash_b) in enumerate(zip(hashes_a, hashes_b, strict=False)):
        stop = (i + 1) * PAGE_SIZE
        assert (hash_a == hash_b) == (same_salt and a[:stop] == b[:stop])


def test_salts_do_not_share_pages():
    cache = make_cache()
    pages = fill(cache, make_request(range(8), b"tenant a"))
    assert cache.match(make_request(range(9), b"tenant a")) == pages
    assert cache.match(make_request(range(9), b"tenant b")) == []
    assert cache.match(make_request(range(9))) == []


def test_a_salt_cannot_pose_as_the_hash_of_a_page():
    cache = make_cache()
    victim = make_request(range(8))
    fill(cache, victim)
    attacker = make_request(range(4, 9), salt=cache.hashes(victim)[0])
    assert cache.match(attacker) == []


def test_released_pages_stay_findable_and_count_as_free():
    cache = make_cache(num_pages=4)
    request = make_request(range(9))
    pages = fill(cache, request)
    assert cache.num_available == 2
    cache.release(pages)
    assert cache.num_available == 4
    found = cache.match(make_request(range(9)))
    assert found == pages
    cache.retain(found)
    assert cache.num_available == 2
    cache.check_integrity(dict.fromkeys(pages, 1))


def test_blank_pages_are_used_before_cached_ones_are_evicted():
    cache = make_cache(num_pages=4)
    pages = fill(cache, make_request(range(8)))
    cache.release(pages)
    assert set(cache.allocate(2)).isdisjoint(pages)
    assert cache.match(make_request(range(9))) == pages


def test_tails_are_evicted_before_heads_and_old_releases_before_new_ones():
    cache = make_cache(num_pages=4)
    old, new = make_request(range(8)), make_request(range(100, 108))
    for pages in [fill(cache, old), fill(cache, new)]:
        cache.release(pages)
    lens = []
    for _ in range(4):
        lens.append((len(cache.match(make_request(range(9)))), len(cache.match(make_request(range(100, 109))))))
        assert cache.allocate(1) is not None
    assert lens == [(2, 2), (1, 2), (0, 2), (0, 1)]
    assert all(sum(a) > sum(b) for a, b in pairwise(lens))


def test_using_a_cached_page_makes_it_young_again():
    cache = make_cache(num_pages=2)
    for tokens in [range(4), range(100, 104)]:
        cache.release(fill(cache, make_request(tokens)))
    found = cache.match(make_request(range(5)))
    cache.retain(found)
    cache.release(found)
    cache.allocate(1)
    assert cache.match(make_request(range(5))) == found
    assert cache.match(make_request(range(100, 105))) == []


def test_pages_in_use_are_never_evicted():
    cache = make_cache(num_pages=3)
    pages = fill(cache, make_request(range(8)))
    assert cache.allocate(2) is None
    assert len(cache.allocate(1)) == 1
    assert cache.match(make_request(range(9))) == pages


def test_a_failed_allocation_changes_nothing():
    cache = make_cache(num_pages=2)
    cache.release(fill(cache, make_request(range(8))))
    assert cache.allocate(3) is None
    assert cache.num_available == 2
    assert len(cache.match(make_request(range(9)))) == 2


def test_shared_pages_are_freed_by_their_last_owner():
    cache = make_cache(num_pages=2)
    pages = fill(cache, make_request(range(8)))
    cache.retain(pages)
    cache.release(pages)
    assert cache.num_available == 0
    cache.check_integrity(dict.fromkeys(pages, 1))
    cache.release(pages)
    assert cache.num_available == 2


def test_the_first_of_two_equal_pages_stays_the_cached_one():
    cache = make_cache(num_pages=4)
    first, second = fill(cache, make_request(range(4))), fill(cache, make_request(range(4)))
    assert cache.match(make_request(range(5))) == first
    cache.release(second)
    cache.check_integrity({first[0]: 1})
    cache.release(first)
    assert cache.match(make_request(range(5))) == first


def test_only_owned_pages_can_be_registered():
    cache = make_cache()
    with pytest.raises(AssertionError, match="must be owned"):
        cache.register(b"h", 0)


def test_reset_forgets_everything_but_leaves_owners_their_pages():
    cache = make_cache(num_pages=4)
    used, unused = fill(cache, make_request(range(8))), fill(cache, make_request(range(100, 108)))
    cache.release(unused)
    cache.reset()
    assert cache.match(make_request(range(9))) == []
    assert cache.match(make_request(range(100, 109))) == []
    assert cache.num_available == 2
    cache.check_integrity(dict.fromkeys(used, 1))
    cache.release(used)
    assert cache.num_available == 4
    cache.check_integrity({})
