"""The record of pages, and what its check finds."""

import random

import pytest

from jaxserve.scheduling.kv_cache.pages import CACHED, COMPUTING, FREE, Pages


def test_every_page_is_taken_once_low_ids_first():
    pages = Pages(4)
    assert pages.take(3) == [0, 1, 2]
    assert pages.take(0) == []
    assert pages.take(1) == [3]
    assert (pages.free_pages, pages.states) == ([], [COMPUTING] * 4)
    pages.check_integrity(dict.fromkeys(range(4), 1))


def test_pages_are_listed_when_they_are_needed_and_taken_as_if_all_were():
    rng, pages, free, taken = random.Random(0), Pages(1000), list(range(999, -1, -1)), []
    assert not pages.states
    for _ in range(400):
        if taken and rng.random() < 0.4:
            page = taken.pop(rng.randrange(len(taken)))
            pages.num_owners[page] = 0
            pages.free(page)
            free.append(page)
        else:
            count = min(rng.choice((1, 2, 9)), len(free))
            expected = [free.pop() for _ in range(count)]
            assert pages.take(count) == expected
            taken += expected
        assert pages.num_free == len(free)
        pages.check_integrity(dict.fromkeys(taken, 1))
    assert 256 < len(pages.states) <= 1000


def test_a_page_in_use_is_not_freed_and_a_free_one_not_again():
    pages = Pages(1)
    pages.take(1)
    with pytest.raises(AssertionError, match="still in use"):
        pages.free(0)
    pages.num_owners[0] = 0
    pages.free(0)
    with pytest.raises(AssertionError, match="freed twice"):
        pages.free(0)
    pages.check_integrity({})


@pytest.mark.parametrize(
    ("owners", "change", "message"),
    [
        ({}, lambda pages: None, "1 owners, not 0"),
        ({0: 2}, lambda pages: None, "1 owners, not 2"),
        ({0: 1}, lambda pages: pages.states.__setitem__(0, CACHED), "page 0 is .*CACHED: None"),
        ({0: 1}, lambda pages: pages.content.update({0: (0, b"h", "")}), "page 0 is .*COMPUTING"),
        ({0: 1}, lambda pages: pages.states.__setitem__(0, FREE), "page 0 is .*FREE and in the free list: False"),
        ({0: 1}, lambda pages: pages.states.__setitem__(1, COMPUTING), "page 1 is .* and in the free list: True"),
        ({}, lambda pages: pages.num_owners.__setitem__(0, 0), "page 0 is lost"),
        ({0: 1}, lambda pages: pages.free_pages.append(1), "twice in the free list"),
        ({0: 1, 2: 1}, lambda pages: None, "page 2 is in use but not listed"),
    ],
)
def test_the_check_names_the_page(owners, change, message):
    pages = Pages(2)
    pages.take(1)
    change(pages)
    with pytest.raises(AssertionError, match=message):
        pages.check_integrity(owners)
