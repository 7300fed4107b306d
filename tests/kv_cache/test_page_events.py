"""Announced blocks: each group with a page, and adapters by their digests."""

import numpy as np
from simulation import make_request

from jaxserve.images.prepared import ImageSpan, PreparedImage
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


def test_blocks_name_their_images() -> None:
    """An image that began before the block has a negative offset."""
    spans = []
    for number, (start, size) in enumerate([(2, 7), (9, 2), (11, 4)], 1):
        image = PreparedImage(bytes([number]) * 16, np.zeros((0, 0), np.float32), (1, size), size)
        spans.append(ImageSpan(image, start, np.arange(size, dtype=np.int32)))
    request, events = make_request("a", range(20), images=tuple(spans)), PageEvents(4)
    hashes = PrefixHashes(4).full_pages(request)
    for blocks in (range(1, 3), range(3, 5)):
        events.stored(request, hashes, blocks, 0)
    one, two, three = (bytes([number]) * 16 for number in (1, 2, 3))
    found = [event.images for event in events.take()]
    assert found == [[[(one, -2)], [(one, -6), (two, 1), (three, 3)]], [[(three, -1)], []]]
