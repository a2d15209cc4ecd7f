from __future__ import annotations

import random

import pytest

from services.scheduler.block_pool import BlockPool, BlockState
from tests.services.scheduler.simulation import exhaust


def test_blocks_are_consecutive_from_a_fresh_pool_and_never_the_padding() -> None:
    pool = BlockPool(6)
    assert pool.num_usable == 5
    assert pool.allocate(3, "a", "prompt") == [1, 2, 3]
    assert pool.allocate(2, "b", "prompt") == [4, 5]
    assert pool.num_free == 0
    with pytest.raises(ValueError, match="1 blocks wanted, 0 available"):
        pool.allocate(1, "c", "prompt")


def test_allocation_continues_after_the_last_block_when_it_can() -> None:
    pool = BlockPool(10)
    pool.allocate(9, "a", "prompt")
    pool.release([2, 5, 7, 8], "a")
    assert pool.allocate(2, "b", "output", after=6) == [7, 8]
    assert sorted(pool.allocate(2, "b", "output", after=9)) == [2, 5]


def test_otherwise_it_starts_in_the_longest_free_run() -> None:
    pool = BlockPool(20)
    pool.allocate(19, "a", "prompt")
    pool.release([2, 3, 7, 8, 9, 10, 15, 16, 17], "a")
    assert pool.run_lengths() == {2: 1, 3: 1, 4: 1}
    assert pool.allocate(6, "b", "prompt") == [7, 8, 9, 10, 15, 16]
    assert pool.run_lengths() == {1: 1, 2: 1}


def test_free_runs_join_on_both_sides() -> None:
    pool = BlockPool(8)
    pool.allocate(7, "a", "prompt")
    for block in (1, 3, 5, 7):
        pool.release([block], "a")
    assert pool.run_lengths() == {1: 4}
    pool.release([4], "a")
    assert pool.run_lengths() == {1: 2, 3: 1}
    pool.release([2, 6], "a")
    assert pool.run_lengths() == {7: 1}


def test_a_shared_block_is_free_after_its_last_owner() -> None:
    pool = BlockPool(4)
    blocks = pool.allocate(2, "a", "prompt")
    pool.share(blocks[:1], "b")
    exhaust(pool.audit([("a", blocks), ("b", blocks[:1])]))
    pool.release(blocks, "a")
    assert (pool.references(blocks[0]), pool.references(blocks[1])) == (1, 0)
    assert pool.owners(blocks[0]) == ["b"]
    pool.release(blocks[:1], "b")
    assert pool.num_free == 3
    with pytest.raises(ValueError, match="block 1 is not held by 'b'"):
        pool.release(blocks[:1], "b")
    with pytest.raises(ValueError, match="cannot be shared"):
        pool.share(blocks[:1], "b")


def test_a_pin_holds_a_block_but_is_no_holder() -> None:
    pool = BlockPool(4)
    (block,) = pool.allocate(1, "a", "prompt")
    pool.share([block], 7)
    assert (pool.references(block), pool.holders(block)) == (2, 1)
    pool.release([block], "a")
    assert (pool.state(block), pool.holders(block)) == (BlockState.USED, 0)
    pool.release([block], 7)
    assert pool.state(block) is BlockState.FREE


def test_kept_blocks_stay_cached_until_free_ones_run_out_the_oldest_and_last_in_their_table_first() -> None:
    evicted: list[int] = []
    pool = BlockPool(9, evicted.append)
    for owner in "ab":
        for block in pool.allocate(3, owner, "prompt"):
            pool.keep(block)
    pool.release([1, 2, 3], "a")
    pool.release([4, 5, 6], "b")
    assert (pool.num_free, pool.num_cached, pool.num_available, pool.num_used) == (2, 6, 8, 0)
    assert pool.cached() == [3, 2, 1, 6, 5, 4]
    pool.share([1, 2], "c")  # a hit takes them out of the queue, and back at its end
    pool.release([1, 2], "c")
    assert pool.cached() == [3, 6, 5, 4, 2, 1]
    assert pool.allocate(2, "d", "prompt") == [7, 8]
    assert evicted == []
    assert pool.allocate(3, "d", "output") == [5, 6, 3]  # the three least recently used, as runs
    assert evicted == [3, 6, 5]
    pool.release([5, 6, 3], "d")
    assert [pool.state(block) for block in (3, 5, 6)] == [BlockState.FREE] * 3, "evicted contents are not kept"
    exhaust(pool.audit([("d", [7, 8])]))


def test_each_block_knows_its_state_reason_and_since_when() -> None:
    pool = BlockPool(4)
    pool.now = 5.0
    (block,) = pool.allocate(1, "a", "prompt")
    pool.keep(block)
    assert (pool.state(block), pool.why(block), pool.since(block)) == (BlockState.USED, "prompt", 5.0)
    pool.now = 6.0
    pool.release([block], "a")
    assert (pool.state(block), pool.since(block)) == (BlockState.CACHED, 6.0)
    pool.now = 7.0
    pool.share([block], "b")
    assert (pool.state(block), pool.why(block), pool.since(block)) == (BlockState.USED, "prefix hit", 7.0)


def test_invariants_notice_a_leak_and_a_stolen_block() -> None:
    pool = BlockPool(4)
    table = pool.allocate(2, "a", "prompt")
    with pytest.raises(AssertionError, match="1 references, 0 uses"):
        exhaust(pool.audit([("a", table[:1])]))
    with pytest.raises(AssertionError, match="1 references, 2 uses"):
        exhaust(pool.audit([("a", table), ("b", table[:1])]))
    with pytest.raises(AssertionError, match="is held by"):
        exhaust(pool.audit([("b", table)]))
    with pytest.raises(AssertionError, match="block 0 is owned"):
        exhaust(pool.audit([("a", [*table, 0])]))


def test_a_pool_needs_a_block_beside_the_padding() -> None:
    with pytest.raises(ValueError, match="block 0 is padding"):
        BlockPool(1)


@pytest.mark.parametrize("seed", range(4))
def test_random_use_keeps_every_block_in_one_state(seed: int) -> None:
    rng = random.Random(seed)
    pool = BlockPool(33)
    holdings: list[tuple[int | str, list[int]]] = []
    for turn in range(400):
        pool.now = float(turn)
        match rng.choice(["allocate", "allocate", "share", "release", "keep"]):
            case "allocate" if pool.num_available:
                count = rng.randint(1, min(6, pool.num_available))
                owner = f"owner {turn}"
                holdings.append((owner, pool.allocate(count, owner, "prompt", after=rng.randint(0, 32))))
            case "share" if holdings:
                owner = rng.choice([turn, f"owner {turn}"])
                blocks = list(rng.choice(holdings)[1])
                pool.share(blocks, owner)
                holdings.append((owner, blocks))
            case "release" if holdings:
                owner, blocks = holdings.pop(rng.randrange(len(holdings)))
                pool.release(blocks, owner)
            case "keep" if holdings:
                pool.keep(rng.choice(rng.choice(holdings)[1]))
        exhaust(pool.audit(holdings))
    for owner, blocks in holdings:
        pool.release(blocks, owner)
    exhaust(pool.audit([]))
    assert pool.num_available == 32
