"""Announced blocks: each group with a page, and adapters by their digests."""

from simulation import make_request

from jaxserve.scheduling.kv_cache.groups import RELEASED
from jaxserve.scheduling.kv_cache.page_events import PageEvents
from jaxserve.scheduling.kv_cache.prefix_hashes import PrefixHashes


def test_blocks_with_an_adapter_have_its_digest() -> None:
    request = make_request("a", range(17), adapter="digest", adapter_start=9)
    hashes, events = PrefixHashes(4).full_pages(request), PageEvents(4)
    events.stored(request, hashes, range(4), 0)
    base, adapted = events.take()
    assert (base.hashes, base.parent, base.adapter) == (hashes[:2], None, "")
    assert (adapted.hashes, adapted.parent, adapted.adapter) == (hashes[2:], hashes[1], "digest")
    assert [*base.token_ids, *adapted.token_ids] == [*range(16)]
    plain = PrefixHashes(4).full_pages(make_request("b", range(17)))
    assert plain[:2] == base.hashes
    assert not {*plain[2:]} & {*adapted.hashes}


def test_a_loaded_block_is_announced_for_the_groups_that_have_its_page() -> None:
    """The second group has a sliding window, in which only the last block lies."""
    request = make_request("a", range(9))
    request.loaded_blocks.update({0: "disk", 1: "disk"})
    events = PageEvents(4)
    events.loaded(request, PrefixHashes(4).full_pages(request), [5, RELEASED, 6, 7], 2)
    assert [(event.group, list(event.token_ids)) for event in events.take()] == [
        (0, [0, 1, 2, 3]),
        (0, [4, 5, 6, 7]),
        (1, [4, 5, 6, 7]),
    ]
