from __future__ import annotations

import pytest

from services.scheduler.block_pool import BlockPool


def test_blocks_are_consecutive_from_a_fresh_pool_and_never_the_padding() -> None:
    pool = BlockPool(6)
    assert pool.num_usable == 5
    assert pool.allocate(3) == [1, 2, 3]
    assert pool.allocate(2) == [4, 5]
    assert pool.num_free == 0
    with pytest.raises(ValueError, match="1 blocks wanted, 0 free"):
        pool.allocate(1)


def test_allocation_continues_after_the_last_block_when_it_can() -> None:
    pool = BlockPool(10)
    pool.allocate(9)
    pool.release([2, 7, 5, 8])
    assert pool.allocate(2, after=6) == [7, 8]
    assert sorted(pool.allocate(2, after=9)) == [2, 5]


def test_a_shared_block_is_free_after_its_last_owner() -> None:
    pool = BlockPool(4)
    first = pool.allocate(2)
    pool.share(first[:1])
    pool.check_invariants([first, first[:1]])
    pool.release(first)
    assert (pool.references(first[0]), pool.references(first[1])) == (1, 0)
    pool.release(first[:1])
    assert pool.num_free == 3
    with pytest.raises(ValueError, match="is free already"):
        pool.release(first[:1])
    with pytest.raises(ValueError, match="cannot be shared"):
        pool.share(first[:1])


def test_invariants_notice_a_leak_and_a_stolen_block() -> None:
    pool = BlockPool(4)
    table = pool.allocate(2)
    with pytest.raises(AssertionError, match="1 references, 0 uses"):
        pool.check_invariants([table[:1]])
    with pytest.raises(AssertionError, match="1 references, 2 uses"):
        pool.check_invariants([table, table[:1]])
    with pytest.raises(AssertionError, match="block 0 is owned"):
        pool.check_invariants([table, [0]])


def test_a_pool_needs_a_block_beside_the_padding() -> None:
    with pytest.raises(ValueError, match="block 0 is padding"):
        BlockPool(1)
