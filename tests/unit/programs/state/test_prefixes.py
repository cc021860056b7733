"""The prefix tree against a union that is counted from scratch each time."""

from __future__ import annotations

from math import inf

from hypothesis import given
from hypothesis import strategies as st

from thunderagent.programs.state.accounts import Ledger
from thunderagent.programs.state.prefixes import MOVED_RATIO, SIZE_SLACK_RATIO, PrefixTree, SharedPrefixes, chain_of
from thunderagent.programs.state.program import Branch, Chain, Kind, Place, Program

REPLICAS = ("r0", "r1")
PATHS = st.lists(st.integers(0, 2), max_size=4).map(tuple)
STEPS = st.lists(
    st.one_of(
        st.tuples(st.just("enter"), PATHS, st.sampled_from(REPLICAS), st.just(0)),
        st.tuples(st.just("leave"), st.integers(0, 20), st.just(""), st.just(0)),
        st.tuples(st.just("resize"), PATHS, st.just(""), st.integers(0, 50)),
    ),
    max_size=60,
)


class Union:
    """Keeps the chains on replicas as a list, and the size of each cut's part."""

    def __init__(self) -> None:
        self.sizes_tokens: dict[tuple[int, ...], int] = {}
        self.chains: list[tuple[tuple[int, ...], str]] = []
        self.measured: set[tuple[int, ...]] = set()

    def size_tokens(self, path: tuple[int, ...]) -> int:
        return self.sizes_tokens.setdefault(path, 7 * len(path) + sum(path))

    def cuts_of(self, path: tuple[int, ...]) -> list[tuple[int, ...]]:
        return [path[: length + 1] for length in range(len(path))]

    def chain(self, path: tuple[int, ...]) -> Chain:
        tokens, chain = 0, []
        for cut in self.cuts_of(path):
            tokens += self.size_tokens(cut)
            chain.append((hash(cut), tokens))
        return tuple(chain)

    def counted(self) -> set[tuple[int, ...]]:
        return {cut for path, _ in self.chains for cut in self.cuts_of(path)}

    def resize(self, cut: tuple[int, ...], size_tokens: int) -> Chain:
        """Return a chain that ends with a cut of another size, and take that; all of it, until it is measured."""
        chain, counted, moved_tokens = self.chain(cut), self.counted(), size_tokens - self.size_tokens(cut)
        if cut not in counted or abs(moved_tokens) > SIZE_SLACK_RATIO * size_tokens:
            taken_ratio = MOVED_RATIO if cut in self.measured else 1
            self.sizes_tokens[cut] += int(taken_ratio * moved_tokens)
        self.measured |= counted.intersection(self.cuts_of(cut))
        return (*chain[:-1], (chain[-1][0], chain[-1][1] + moved_tokens))

    def shared_tokens(self, replica_id: str) -> int:
        paths = [path for path, where in self.chains if where == replica_id]
        union = {cut for path in paths for cut in self.cuts_of(path)}
        claimed_tokens = sum(self.size_tokens(cut) for path in paths for cut in self.cuts_of(path))
        return claimed_tokens - sum(self.size_tokens(cut) for cut in union)

    def tokens_of_others(self, path: tuple[int, ...], replica_id: str, count: int) -> int:
        paths = [other for other, where in self.chains if where == replica_id]
        tokens = 0
        for cut in self.cuts_of(path):
            if sum(other[: len(cut)] == cut for other in paths) >= count:
                tokens += self.size_tokens(cut)
        return tokens


@given(STEPS)
def test_shared_tokens_are_the_sum_of_claims_minus_their_union(steps: list[tuple]) -> None:
    """This holds for entries, exits and changes of size on every replica; nothing is left in the end."""
    tree, union = PrefixTree(), Union()
    shared_tokens = dict.fromkeys(REPLICAS, 0)
    for kind, what, replica_id, size_tokens in steps:
        if kind == "enter":
            shared_tokens[replica_id] += tree.enter(union.chain(what), replica_id)
            union.chains.append((what, replica_id))
        elif kind == "leave" and union.chains:
            path, where = union.chains.pop(what % len(union.chains))
            shared_tokens[where] -= tree.leave(union.chain(path), where)
            union.measured &= union.counted()
        elif kind == "resize" and what:
            for where, grown_tokens in tree.resize(union.resize(what, size_tokens)).items():
                shared_tokens[where] += grown_tokens
        assert shared_tokens == {each: union.shared_tokens(each) for each in REPLICAS}
        assert len(tree) == len({cut for path, _ in union.chains for cut in union.cuts_of(path)})
    for path, where in union.chains:
        shared_tokens[where] -= tree.leave(union.chain(path), where)
    assert len(tree) == 0
    assert set(shared_tokens.values()) == {0}


@given(st.lists(st.tuples(PATHS, st.sampled_from(REPLICAS)), max_size=12), PATHS, st.integers(1, 3))
def test_others_claims_of_a_chain_are_counted(chains: list[tuple], path: tuple[int, ...], count: int) -> None:
    """These are the tokens at its begin that at least `count` chains there have in common."""
    tree, union = PrefixTree(), Union()
    for each, where in chains:
        tree.enter(union.chain(each), where)
        union.chains.append((each, where))
    for where in REPLICAS:
        expected_tokens = union.tokens_of_others(path, where, count)
        assert tree.shared_tokens(union.chain(path), where, with_count=count) == expected_tokens


@given(st.lists(PATHS, max_size=4), st.lists(PATHS, min_size=1, max_size=4))
def test_a_program_is_measured_by_what_it_adds_to_the_demand_and_takes_from_it(
    others: list[tuple], own: list[tuple]
) -> None:
    """Its branches may share with others, and with one another: what they have in common is claimed once."""
    shared, union = SharedPrefixes(), Union()
    for path in others:
        shared.tree.enter(union.chain(path), "r0")
    program, account = Program("p", 1, 0.0), Ledger(inf).open("r0", 0.0)
    for number, path in enumerate(own):
        program.branches[str(number) if number else ""] = branch = Branch()
        branch.prefix = union.chain(path)
    tokens = sum(union.size_tokens(cut) for path in own for cut in union.cuts_of(path))
    would_add_tokens = shared.own_tokens(program, tokens, "r0")
    alone_tokens = shared.own_tokens(program, tokens, "r1")
    program.place, program.replica_id = Place(Kind.ACTING, "r0"), "r0"
    shared.enter(program, account)
    assert would_add_tokens == shared.own_tokens(program, tokens, "r0") == tokens - account.shared_tokens
    own_cuts = {cut for path in own for cut in union.cuts_of(path)}
    assert alone_tokens == shared.own_tokens(program, tokens, "r1") == sum(map(union.size_tokens, own_cuts))
    of_others = {cut for path in others for cut in union.cuts_of(path)}
    assert shared.tokens_on(program, "r0") == sum(
        union.size_tokens(cut) for path in own for cut in union.cuts_of(path) if cut in of_others
    )


def test_three_programs_with_one_system_prompt_match_a_calculation_by_hand() -> None:
    """100 tokens are common to all, 50 more to two of them: 250 are claimed too often."""
    tree = PrefixTree()
    two, one = ((1, 100), (2, 150)), ((1, 100), (3, 180))
    assert [tree.enter(chain, "r0") for chain in (two, two, one)] == [0, 150, 100]
    assert tree.enter(one, "r1") == 0
    assert tree.shared_tokens(((1, 100), (2, 150), (9, 900)), "r0") == 150
    assert tree.leave(two, "r0") == 150
    assert tree.leave(two, "r0") == 100
    assert tree.leave(one, "r0") == 0


def test_a_cut_has_the_size_that_it_was_counted_with_first() -> None:
    """Two estimates of one prefix differ; a program leaves with the one it entered with, in any order."""
    tree = PrefixTree()
    first, second = ((1, 100),), ((1, 140),)
    tree.enter(first, "r0")
    assert tree.enter(second, "r0") == 100
    assert tree.sized(second) == first
    assert tree.leave(first, "r0") == 100
    assert tree.leave(second, "r0") == 0


def test_cuts_that_do_not_ascend_have_no_size() -> None:
    """A falling estimate gives no negative tokens."""
    tree = PrefixTree()
    tree.enter(((1, 100), (2, 60)), "r0")
    assert tree.enter(((1, 100), (2, 60)), "r0") == 100


def test_cuts_come_in_bytes() -> None:
    """They are counted in tokens."""
    assert chain_of([(7, 400), (8, 1000)], 0.25) == ((7, 100), (8, 250))
    assert chain_of(((7, 400), (8, 1000)), 0.25, 150) == ((7, 100), (8, 150))
