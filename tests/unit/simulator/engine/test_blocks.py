"""Blocks are shared, freed, and taken again in the order in which they were freed."""

from __future__ import annotations

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from tests.unit.simulator.engine.plain_pool import PlainPool
from thunderagent.simulator.engine.blocks import ROOT_HASH, BlockPool, Holding, hash_blocks


def fill(pool: BlockPool, *keys: int) -> Holding:
    """Compute the blocks of a context for a request."""
    holding = pool.allocate(len(keys))
    pool.publish(holding, keys, ROOT_HASH)
    return holding


def found(pool: BlockPool, *keys: int) -> list[int]:
    """Return the part of a context that can be found."""
    return [key for run in pool.find(keys, len(keys)) for key in run.keys]


def test_free_blocks_are_taken_in_the_order_in_which_they_were_freed() -> None:
    """Of one request the tail precedes the head."""
    pool = BlockPool(4)
    first, second = fill(pool, 1, 2), fill(pool, 3, 4)
    pool.release(second)
    pool.release(first)
    for left in (([1, 2], [3]), ([1, 2], []), ([1], []), ([], [])):
        pool.allocate(1)
        assert (found(pool, 1, 2), found(pool, 3, 4)) == left


def test_blocks_that_hold_nothing_are_taken_before_all_others() -> None:
    """They can never be found again."""
    pool = BlockPool(6)
    kept, first, second = fill(pool, 1, 2), pool.allocate(2), pool.allocate(2)
    pool.release(kept)
    pool.release(first)
    pool.release(second)
    pool.allocate(4)
    assert found(pool, 1, 2) == [1, 2]
    pool.allocate(1)
    assert found(pool, 1, 2) == [1]


def test_only_full_blocks_that_others_take_are_evicted() -> None:
    """Taking one that holds nothing, and freeing one, evicts nothing."""
    pool = BlockPool(4)
    kept, blank = fill(pool, 1, 2), pool.allocate(2)
    pool.release(kept)
    pool.release(blank)
    pool.allocate(2)
    assert pool.lost_count == 0
    pool.allocate(1)
    assert pool.lost_count == 1
    pool.allocate(1)
    assert pool.lost_count == 2


def test_expired_blocks_are_taken_first_unless_somebody_uses_them() -> None:
    """The last of them precedes all others; unknown keys are ignored."""
    pool = BlockPool(5)
    freed, used, other = fill(pool, 1, 2, 3), fill(pool, 4), fill(pool, 5)
    pool.release(other)
    pool.release(freed)
    pool.expire([2, 3, 4, 999])
    for left in ([1, 2], [1]):
        pool.allocate(1)
        assert (found(pool, 1, 2, 3), found(pool, 5)) == (left, [5])
    pool.allocate(1)
    assert (found(pool, 1), found(pool, 5)) == ([1], [])
    assert (used.count, found(pool, 4)) == (1, [4])


def test_a_block_that_is_referenced_twice_is_free_after_two_releases() -> None:
    pool = BlockPool(2)
    first, second = fill(pool, 1), Holding()
    pool.acquire(second, pool.find([1], 1))
    pool.release(first)
    assert pool.used_count == 1
    pool.release(second)
    assert pool.used_count == 0


SIZE = 2
CONTEXTS = [
    hash_blocks(tokens, SIZE)
    for tokens in (
        range(24),
        [*range(8), *range(100, 116)],
        [*range(8), *range(100, 104), *range(200, 220)],
        [*range(14), *range(300, 306)],
        range(400, 420),
    )
]


class SameAsPlain(RuleBasedStateMachine):
    """Whatever requests do, a pool of runs equals a pool of single blocks."""

    def __init__(self) -> None:
        super().__init__()
        self.pool, self.plain = BlockPool(20), PlainPool(20)
        self.held: list[
            tuple[list[int], Holding, list[int], list[int]]
        ] = []  # context, both kinds of blocks, and the published part

    @rule(number=st.sampled_from(range(len(CONTEXTS))), wanted_count=st.integers(0, 12))
    def begin(self, number: int, wanted_count: int) -> None:
        context = CONTEXTS[number]
        wanted_count = min(wanted_count, len(context))
        hits, plain_hits = self.pool.find(context, wanted_count), self.plain.find(context[:wanted_count])
        assert [key for run in hits for key in run.keys] == context[: len(plain_hits)]
        holding = Holding()
        self.pool.acquire(holding, hits)
        self.plain.acquire(plain_hits)
        self.held.append((context, holding, plain_hits, [len(plain_hits)]))

    @precondition(lambda self: self.held)
    @rule(data=st.data(), count=st.integers(1, 7))
    def grow(self, data: st.DataObject, count: int) -> None:
        _, holding, blocks, _ = data.draw(st.sampled_from(self.held))
        count = min(count, self.plain.free_count)
        self.pool.allocate(count, holding)
        blocks += self.plain.allocate(count)

    @precondition(lambda self: self.held)
    @rule(data=st.data(), count=st.integers(1, 7))
    def publish(self, data: st.DataObject, count: int) -> None:
        context, holding, blocks, published = data.draw(st.sampled_from(self.held))
        begin = published[0]
        end = min(begin + count, len(blocks), len(context))
        if end > begin:
            self.pool.publish(holding, context[begin:end], context[begin - 1] if begin else ROOT_HASH)
            for index in range(begin, end):
                self.plain.publish(blocks[index], context[index])
            published[0] = end

    @precondition(lambda self: self.held)
    @rule(data=st.data())
    def release(self, data: st.DataObject) -> None:
        _, holding, blocks, _ = self.held.pop(data.draw(st.integers(0, len(self.held) - 1)))
        self.pool.release(holding)
        self.plain.release(reversed(blocks))

    @rule(data=st.data(), number=st.sampled_from(range(len(CONTEXTS))), is_shuffled=st.booleans())
    def expire(self, data: st.DataObject, number: int, is_shuffled: bool) -> None:
        context = CONTEXTS[number]
        begin, end = sorted((data.draw(st.integers(0, len(context))), data.draw(st.integers(0, len(context)))))
        keys = context[begin:end]
        if is_shuffled:
            keys = data.draw(st.permutations(keys))
        self.pool.expire(keys)
        self.plain.expire(keys)

    @rule()
    def reset(self) -> None:
        assert self.pool.reset() == self.plain.reset()

    @invariant()
    def says_the_same(self) -> None:
        self.pool.check_invariants([holding for _, holding, _, _ in self.held])
        assert self.pool.free_count == self.plain.free_count
        for context in CONTEXTS:
            for key in context:
                assert self.pool.offers_no_more(self.pool.version, key) == (not self.plain.find([key]))


TestSameAsPlain = SameAsPlain.TestCase
TestSameAsPlain.settings = settings(max_examples=150, stateful_step_count=50, deadline=None)
