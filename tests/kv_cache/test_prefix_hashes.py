"""Page hashes: equal only if all that keys and values depend on is equal."""

from collections.abc import Iterator

import numpy as np
from simulation import make_request

from jaxserve.images.prepared import ImageSpan, PreparedImage
from jaxserve.scheduling.kv_cache.prefix_hashes import CachedSequence, PrefixHashes

TOKENS = list(range(12))


def hashes(**fields: object) -> list[bytes]:
    return PrefixHashes(4).full_pages(make_request("it", TOKENS, **fields))


def test_pages_belong_to_an_adapter_from_its_first_token_on() -> None:
    base, whole, late = hashes(), hashes(adapter="a"), hashes(adapter="a", adapter_start=5)
    assert not {*base} & {*whole}
    assert not {*whole} & {*hashes(adapter="b")}
    assert late[0] == base[0]
    assert not {*late[1:]} & {*base, *whole}
    assert hashes(adapter="a", adapter_start=12) == base


def test_sequences_have_the_hashes_of_requests() -> None:
    images = (image(1, 9),)
    sequence = CachedSequence(TOKENS, b"salt", images, "a", 5)
    assert PrefixHashes(4).sequence_pages(sequence) == hashes(salt=b"salt", images=images, adapter="a", adapter_start=5)


def test_pages_whose_adapters_begin_at_different_tokens_differ() -> None:
    first, second = (hashes(adapter="a", adapter_start=start) for start in (4, 6))
    assert first[0] == second[0]
    assert not {*first[1:]} & {*second[1:]}


def image(seed: int, start: int, size: int = 3) -> ImageSpan:
    own = PreparedImage(bytes([seed]) * 16, np.zeros((0, 0), np.float32), (1, size), size)
    return ImageSpan(own, start, np.arange(size, dtype=np.int32))


def test_pages_belong_to_their_images() -> None:
    """From the first page with a token of an image on, also if others begin in the same page."""
    base, one = hashes(), hashes(images=(image(1, 5),))
    assert one[0] == base[0]
    for images in ((), (image(2, 5),), (image(1, 4),), (image(1, 6),), (image(1, 5), image(2, 8))):
        others = hashes(images=images)
        assert others[0] == base[0]
        assert others[2] != one[2]
    assert hashes(images=(image(1, 3), image(2, 6)))[0] != hashes(images=(image(2, 3), image(2, 6)))[0]


def test_growing_requests_have_the_hashes_of_whole_prompts() -> None:
    images = (image(1, 2), image(2, 6))
    growing, pages = make_request("it", TOKENS[:7], images=images), PrefixHashes(4)
    pages.full_pages(growing)
    for token in TOKENS[7:]:
        growing.output_token_ids.append(token)
        pages.full_pages(growing)
    assert pages.full_pages(growing) == hashes(images=images)
    last = [PrefixHashes(4).last_page(make_request("it", TOKENS, images=own), 11) for own in (images, (), images[:1])]
    assert len({*last}) == 3


class Counted(tuple[ImageSpan, ...]):
    """Images that count how often they are read."""

    num_reads = 0

    def __iter__(self) -> Iterator[ImageSpan]:
        for each in super().__iter__():
            Counted.num_reads += 1
            yield each


def test_images_are_read_once_for_all_pages() -> None:
    images = Counted(image(1, 4 * index) for index in range(100))
    Counted.num_reads = 0
    PrefixHashes(4).full_pages(make_request("it", [0] * 800, images=images))
    assert Counted.num_reads <= 3 * len(images)
