"""The index of a pool compared with a model that keeps everything and scans all of it."""

from __future__ import annotations

from dataclasses import dataclass, field

from hypothesis import given
from hypothesis import strategies as st

from thunderagent.backends import kv_blocks
from thunderagent.backends.kv_blocks import KvBlocks
from thunderagent.backends.kv_messages import BlocksRemoved, BlocksStored, PoolCleared

BLOCK_TOKENS = 16


def stored(*hashes: int, parent: int | None = None, program: str | None = "p", group_id: int = 0) -> BlocksStored:
    return BlocksStored(hashes, parent, BLOCK_TOKENS, program, group_id)


def removed(*hashes: int, group_id: int = 0) -> BlocksRemoved:
    return BlocksRemoved(hashes, group_id)


def after(*events: BlocksStored | BlocksRemoved | PoolCleared) -> KvBlocks:
    blocks = KvBlocks()
    for event in events:
        blocks.apply(event)
    return blocks


def figure(blocks: KvBlocks, program: str = "p") -> int | None:
    """A program's figure in blocks."""
    tokens = blocks.resident_tokens(program)
    return None if tokens is None else tokens // BLOCK_TOKENS


def test_a_program_has_what_it_stored_and_all_before() -> None:
    """A turn stores only new blocks; its hits are the blocks before."""
    assert figure(after(stored(1, 2, 3), stored(4, 5, parent=3))) == 5


def test_shared_blocks_count_for_each_who_used_them() -> None:
    """The second program names only the blocks that it added, and the block before them."""
    blocks = after(stored(1, 2, 3, program="a"), stored(7, parent=2, program="b"))
    assert (figure(blocks, "a"), figure(blocks, "b")) == (3, 3)
    blocks.apply(removed(2))
    assert (figure(blocks, "a"), figure(blocks, "b")) == (1, 1)


def test_blocks_of_nobody_are_there_for_those_who_go_on_from_them() -> None:
    """A request without a session leaves blocks behind too."""
    assert figure(after(stored(1, 2, program=None), stored(3, parent=2))) == 3


def test_a_tail_that_goes_shortens_the_figure_block_by_block() -> None:
    """Engines take blocks in this order."""
    blocks = after(stored(1, 2, 3))
    for left in (2, 1, 0):
        blocks.apply(removed(left + 1))
        assert figure(blocks) == left


def test_blocks_behind_a_gap_do_not_count_until_it_is_filled() -> None:
    """A hit needs every block before it; a request that continues behind a filled gap has all blocks."""
    blocks = after(stored(1, 2, 3, 4), removed(2))
    assert figure(blocks) == 1
    blocks.apply(stored(2, parent=1, program="other"))
    blocks.apply(stored(5, parent=4))
    assert figure(blocks) == 5


def test_a_block_is_gone_with_its_last_copy() -> None:
    """An engine computes the last block of a prompt again, into a second copy."""
    blocks = after(stored(1, 2), stored(2, parent=1), removed(2))
    assert figure(blocks) == 2
    blocks.apply(removed(2))
    assert figure(blocks) == 1


def test_a_report_of_hits_adds_no_copies() -> None:
    """It looks like a store of the whole chain from the root."""
    blocks = after(stored(1, 2), stored(1, 2, program="q"))
    assert figure(blocks, "q") == 2
    blocks.apply(removed(2))
    assert (figure(blocks), figure(blocks, "q")) == (1, 1)


def test_a_chain_whose_beginning_is_not_known_has_no_figure() -> None:
    """Unknown is not zero; a later report of the beginning makes it known."""
    blocks = after(stored(3, 4, parent=2))
    assert figure(blocks) is None
    assert blocks.take_changes(9) == []
    blocks.apply(stored(1, 2, program="q"))
    blocks.apply(stored(5, parent=4))
    assert figure(blocks) == 5


def test_a_side_question_counts_beside_the_main_chain() -> None:
    """Blocks that both share count once."""
    blocks = after(stored(1, 2, 3, 4), stored(8, parent=1), stored(5, parent=4))
    assert figure(blocks) == 6
    blocks.apply(removed(8))
    assert figure(blocks) == 5


def test_only_one_group_of_layers_is_followed() -> None:
    """A model with two groups stores each block twice, under the same hash."""
    blocks = after(stored(1, 2), stored(1, 2, group_id=1), removed(1, 2, group_id=1))
    assert figure(blocks) == 2


def test_changes_are_given_once_and_only_if_they_are_some() -> None:
    """A program that came and went in between gives no change; a cleared pool is zero for all reported programs."""
    blocks = after(stored(1, program="a"), stored(2, program="b"), removed(2))
    assert blocks.take_changes(9) == [("a", 16)]
    assert blocks.take_changes(9) == []
    blocks.apply(stored(3, parent=1, program="a"))
    blocks.apply(removed(3))
    assert blocks.take_changes(9) == []
    blocks.apply(PoolCleared())
    assert blocks.take_changes(9) == [("a", 0)]
    assert blocks.resident_tokens("a") is None
    assert blocks.blocks_count == 0


def test_changes_are_taken_a_few_at_a_time() -> None:
    """Otherwise a report of many programs would block the loop."""
    blocks = after(*(stored(n, program=f"p{n}") for n in range(5)))
    assert [len(blocks.take_changes(2)) for _ in range(4)] == [2, 2, 1, 0]
    assert not blocks.has_changes


def test_programs_and_chains_are_bounded(monkeypatch: object) -> None:
    """Each program that ever lived has the system prompt: those longest without a new block go."""
    blocks = after(stored(0, program=None))
    for n in range(1, kv_blocks.MAX_PROGRAMS + 3):
        blocks.apply(stored(n, parent=0, program=f"p{n}"))
        blocks.apply(removed(n))
    assert figure(blocks, "p1") is None
    assert figure(blocks, f"p{kv_blocks.MAX_PROGRAMS}") == 1
    for n in range(1, 20):
        blocks.apply(stored(n, parent=0, program="wide"))
    assert figure(blocks, "wide") == 1 + kv_blocks.MAX_CHAINS


def test_hashes_that_go_round_in_a_circle_end() -> None:
    """Such rubbish is survived."""
    blocks = after(stored(1, parent=2), stored(2, parent=1), stored(3, parent=3), stored(4), stored(1, parent=4))
    assert figure(blocks) is None
    blocks.apply(removed(1, 2, 3, 4, 1))
    assert blocks.blocks_count == 0


# --- against a naive model --------------------------------------------------------------------------------------

# A tree of 30 blocks: the parent of each is fixed, as a hash covers all before it.
PARENTS = {n: None if n % 10 == 0 else n - 1 - (n % 3 == 0) for n in range(30)}


def chain_of(block: int) -> list[int]:
    chain = [block]
    while (parent := PARENTS[chain[-1]]) is not None:
        chain.append(parent)
    return chain[::-1]


@dataclass
class Naive:
    """All copies, and every chain that each program ever stored, as far as its blocks are in memory without a gap."""

    copies: dict[int, int] = field(default_factory=dict)
    chains: dict[str, list[list[int]]] = field(default_factory=dict)

    def store(self, hashes: list[int], program: str | None) -> None:
        for block in hashes:
            self.copies[block] = self.copies.get(block, 0) + 1
        chain = chain_of(hashes[-1])
        if program is not None and all(self.copies.get(block) for block in chain):
            self.chains.setdefault(program, []).append(chain)
        elif program is not None:
            self.chains.pop(program, None)

    def remove(self, block: int) -> None:
        if not self.copies.get(block):
            return
        self.copies[block] -= 1
        if not self.copies[block]:
            for chains in self.chains.values():
                chains[:] = [chain[: chain.index(block)] if block in chain else chain for chain in chains]

    def figure(self, program: str) -> int | None:
        if program not in self.chains:
            return None
        return len({block for chain in self.chains[program] for block in chain})


steps = st.lists(
    st.one_of(
        st.tuples(
            st.just("store"),
            st.integers(0, 29),
            st.integers(1, 6),
            st.sampled_from(["a", "b", "c", None]),
        ),
        st.tuples(st.just("remove"), st.integers(0, 29)),
        st.tuples(st.just("clear")),
    ),
    max_size=60,
)


@given(steps=steps)
def test_any_sequence_of_events_gives_what_the_naive_model_gives(steps: list[tuple[object, ...]]) -> None:
    """Stores of parts of chains, copies, removals in any order, unknown beginnings; and the changes add up."""
    blocks, naive, told = KvBlocks(), Naive(), dict[str, int]()
    for step in steps:
        match step:
            case ("store", int(end), int(count), program):
                hashes = chain_of(end)[-count:]
                parent = PARENTS[hashes[0]]
                if parent is None and naive.copies.get(hashes[0]):
                    continue  # counts as a report of hits, which has its own test
                blocks.apply(BlocksStored(tuple(hashes), parent, BLOCK_TOKENS, program))  # type: ignore[arg-type]
                naive.store(hashes, program)  # type: ignore[arg-type]
            case ("remove", int(block)):
                blocks.apply(removed(block))
                naive.remove(block)
            case _:
                blocks.apply(PoolCleared())
                naive.copies.clear()
                naive.chains = {program: [] for program in naive.chains}
        assert blocks.blocks_count == sum(count > 0 for count in naive.copies.values())
        for program in "abc":
            assert figure(blocks, program) == naive.figure(program), program
    told.update(blocks.take_changes(9))
    assert told == {p: n * BLOCK_TOKENS for p in "abc" if (n := naive.figure(p))}
