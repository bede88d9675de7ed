"""The page pool: one owner for each page, and nothing lost or given twice."""

from __future__ import annotations

import pytest

from kvcache.errors import IntegrityError, PoolExhausted
from kvcache.pool import Owner, PagePool


def test_a_fresh_pool_gives_its_pages_in_order() -> None:
    pool = PagePool(4)
    assert pool.allocate(3) == [0, 1, 2]
    assert (pool.num_free, pool.num_live, pool.num_tree) == (1, 3, 0)


def test_pages_pass_from_free_to_live_to_tree_and_back() -> None:
    pool = PagePool(3)
    pages = pool.allocate(2)
    pool.seal(pages[:1])
    assert [pool.owner(page) for page in range(3)] == [Owner.TREE, Owner.LIVE, Owner.FREE]
    assert (pool.num_free, pool.num_live, pool.num_tree) == (1, 1, 1)
    pool.free(pages)
    assert (pool.num_free, pool.num_live, pool.num_tree) == (3, 0, 0)
    pool.check()


def test_no_page_is_taken_when_too_few_are_free() -> None:
    pool = PagePool(2)
    with pytest.raises(PoolExhausted, match="3 pages asked for, 2 of 2 free"):
        pool.allocate(3)
    assert pool.num_free == 2


def test_nothing_asked_for_is_nothing_given() -> None:
    pool = PagePool(2)
    assert pool.allocate(0) == [] == pool.allocate(-1)
    assert pool.num_free == 2


def test_a_page_freed_twice_is_named() -> None:
    pool = PagePool(2)
    pages = pool.allocate(1)
    pool.free(pages)
    with pytest.raises(IntegrityError, match="page 0 is freed twice"):
        pool.free(pages)


def test_only_a_live_page_can_be_sealed() -> None:
    pool = PagePool(2)
    with pytest.raises(IntegrityError, match="page 1 is sealed but it is FREE"):
        pool.seal([1])


def test_a_free_list_that_disagrees_with_the_owners_is_found() -> None:
    pool = PagePool(2)
    pool._free.append(1)
    with pytest.raises(IntegrityError, match="free list holds 3 pages"):
        pool.check()
