"""The ranked set against a sorted list."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from thunderagent.programs.state.ranked_set import RankedSet

MEMBERS = st.integers(0, 12)
STEPS = st.lists(
    st.one_of(
        st.tuples(st.just("add"), MEMBERS, st.integers(-3, 3) | st.floats(-2, 2)),
        st.tuples(st.just("discard"), MEMBERS, st.just(0)),
        st.tuples(st.just("discard lowest"), MEMBERS, st.just(0)),
        st.tuples(st.just("add many"), MEMBERS, st.integers(-3, 3)),
    ),
    max_size=300,
)


class SortedModel:
    """The reference of a ranked set: entries sorted by rank, then by order of entry."""

    def __init__(self) -> None:
        self.entries: list[tuple[float, int, int]] = []
        self.entered_count = 0

    def add(self, member: int, rank: float) -> None:
        if any(entry[0] == rank and entry[2] == member for entry in self.entries):
            return
        self.discard(member)
        self.entered_count += 1
        self.entries.append((rank, self.entered_count, member))

    def discard(self, member: int) -> None:
        self.entries = [entry for entry in self.entries if entry[2] != member]

    def __iter__(self):
        return (member for _, _, member in sorted(self.entries))


@given(STEPS, st.integers(1, 70))
def test_ranked_set_is_a_sorted_list(steps: list[tuple[str, int, float]], looked_at_each: int) -> None:
    """After adds, new ranks and discards it has the first, order, length and members of a sorted list.

    This holds however many came since the last look.
    """
    ranked, model = RankedSet[int](), SortedModel()
    for number, (name, member, rank) in enumerate(steps):
        if name == "add":
            ranked.add(member, rank)
            model.add(member, rank)
        elif name == "add many":  # none of them is in
            members = range(number * 100 + 100, number * 100 + 100 + 5 * member)
            ranks = [rank + each % 3 for each in members]
            ranked.add_all(members, ranks)
            for each, its_rank in zip(members, ranks, strict=True):
                model.add(each, its_rank)
        elif name == "discard lowest":
            lowest = ranked.lowest(member)
            assert lowest == list(model)[:member]
            ranked.discard_lowest(len(lowest))
            for each in lowest:
                model.discard(each)
        else:
            ranked.discard(member)
            model.discard(member)
        if number % looked_at_each:
            continue
        expected = list(model)
        assert ranked.first() == (expected[0] if expected else None)
        assert list(ranked) == expected
        assert len(ranked) == len(expected)
        assert all((each in ranked) == (each in expected) for each in range(13))


@given(STEPS, st.integers(0, 6), st.integers(-3, 3))
def test_the_lowest_end_before_the_first_that_is_not_wanted(
    steps: list[tuple[str, int, float]], count: int, highest: float
) -> None:
    """It gives the requested number at most, and none from the first too high rank on; the set stays as it was."""
    ranked, ranks = RankedSet[int](), dict[int, float]()
    for name, member, rank in steps:
        if name.startswith("add"):
            ranked.add(member, rank)
            ranks[member] = rank
        else:
            ranked.discard(member)
            ranks.pop(member, None)
    before = list(ranked)
    assert ranked.lowest(count) == before[:count]
    wanted = [member for member in before if ranks[member] <= highest]
    assert ranked.lowest(count, highest) == wanted[:count]
    assert list(ranked) == before


def test_the_dead_do_not_pile_up() -> None:
    """A member with a hundred thousand new ranks takes no more memory than a few hundred entries."""
    ranked = RankedSet[str]()
    ranked.add("stays", 0.0)
    for number in range(100_000):
        ranked.add("moves", float(number + 1))
        assert len(ranked._heap) + len(ranked._new) <= 130
    assert list(ranked) == ["stays", "moves"]


def test_those_that_ended_do_not_pile_up() -> None:
    """Of ten thousand members that are forgotten one by one few stay, while a hundred live."""
    ranked = RankedSet[int]()
    for number in range(10_000):
        ranked.add(number, float(number))
        if number >= 100:
            ranked.forget(number - 50)
            ranked.first()
        assert len(ranked._heap) + len(ranked._new) <= 9 / 8 * len(ranked) + 18
    assert list(ranked)[-1] == 9_999
    assert len(ranked) == 100
