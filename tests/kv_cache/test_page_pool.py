import pytest

from jaxserve.kv_cache.page_pool import PagePool


def test_allocates_every_page_once_low_ids_first():
    pool = PagePool(4)
    assert pool.allocate(3) == [0, 1, 2]
    assert pool.allocate(0) == []
    assert pool.allocate(1) == [3]
    assert pool.num_free == 0
    pool.check_integrity(owners=dict.fromkeys(range(4), 1), idle=set())


def test_release_reports_the_last_owner_and_recycle_makes_the_page_free():
    pool = PagePool(2)
    [page] = pool.allocate(1)
    pool.retain(page)
    assert pool.num_refs(page) == 2
    assert not pool.release(page)
    assert pool.release(page)
    assert pool.num_free == 1
    pool.check_integrity(owners={}, idle={page})
    pool.recycle(page)
    assert pool.num_free == 2
    pool.check_integrity(owners={}, idle=set())


def test_an_idle_page_can_be_owned_again():
    pool = PagePool(1)
    [page] = pool.allocate(1)
    pool.release(page)
    pool.retain(page)
    pool.check_integrity(owners={page: 1}, idle=set())


def test_reference_counts_never_become_negative():
    pool = PagePool(1)
    with pytest.raises(AssertionError, match="released more often"):
        pool.release(0)


def test_a_page_in_use_cannot_be_recycled():
    pool = PagePool(1)
    with pytest.raises(AssertionError, match="still in use"):
        pool.recycle(*pool.allocate(1))


@pytest.mark.parametrize(
    ("owners", "idle", "message"),
    [
        ({}, set(), "1 references, 0 owners"),
        ({0: 2}, set(), "1 references, 2 owners"),
        ({0: 1}, {0}, "in use while free"),
        ({0: 1}, {1}, "free and cached"),
    ],
)
def test_integrity_check_names_the_page(owners, idle, message):
    pool = PagePool(2)
    pool.allocate(1)
    with pytest.raises(AssertionError, match=message):
        pool.check_integrity(owners, idle)


def test_integrity_check_finds_a_lost_page():
    pool = PagePool(2)
    pool.release(*pool.allocate(1))
    with pytest.raises(AssertionError, match="lost"):
        pool.check_integrity(owners={}, idle=set())
