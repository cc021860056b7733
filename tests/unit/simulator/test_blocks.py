"""Blocks are shared, freed, and taken again in the order in which they were freed."""

from __future__ import annotations

from thunderagent.simulator.blocks import BlockPool


def test_free_blocks_are_taken_in_the_order_in_which_they_were_freed() -> None:
    pool = BlockPool(4)
    first, second = pool.allocate(2), pool.allocate(2)
    for block in (*first, *second):
        pool.publish(block, 100 + block)
    pool.release(second)
    pool.release(first)
    assert pool.allocate(4) == [*second, *first]


def test_blocks_that_hold_nothing_are_taken_before_all_others() -> None:
    """Nobody can find them again: those freed last are taken first, in their order."""
    pool = BlockPool(6)
    kept, first, second = pool.allocate(2), pool.allocate(2), pool.allocate(2)
    for block in kept:
        pool.publish(block, 100 + block)
    pool.release(kept)
    pool.release(first)
    pool.release(second)
    assert pool.allocate(6) == [*second, *first, *kept]


def test_expired_blocks_are_taken_first_unless_somebody_uses_them() -> None:
    """The last of them before all others; a key that is not there is nothing."""
    pool = BlockPool(4)
    blocks = pool.allocate(4)
    for block in blocks:
        pool.publish(block, 100 + block)
    pool.release(blocks[:3])
    pool.expire([101, 102, 103, 999])
    assert pool.allocate(3) == [blocks[2], blocks[1], blocks[0]]


def test_a_block_that_is_referenced_twice_is_free_after_two_releases() -> None:
    pool = BlockPool(2)
    blocks = pool.allocate(1)
    pool.acquire(blocks)
    pool.release(blocks)
    assert pool.used_count == 1
    pool.release(blocks)
    assert pool.used_count == 0
