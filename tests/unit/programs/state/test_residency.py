"""The content of an engine's memory, against a list that is searched from its begin."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from tests.builders import Driver
from thunderagent.programs.policies.breakeven import BreakEven
from thunderagent.programs.state.replica import Residency

GENERATIONS = st.integers(1, 6)
TOKENS = st.integers(0, 120)
STEPS = st.lists(
    st.one_of(
        st.tuples(st.just("use"), GENERATIONS, TOKENS),
        st.tuples(st.just("leave"), GENERATIONS, TOKENS),
        st.tuples(st.just("report"), GENERATIONS, TOKENS),
        st.tuples(st.sampled_from(["clear", "size"]), st.just(0), st.integers(50, 300)),
    ),
    max_size=80,
)


class NaiveMemory:
    """Keeps tokens one by one: used ones, and idle ones, the oldest program first, each with its tail first."""

    def __init__(self) -> None:
        self.size_tokens: int | None = None
        self.used: dict[int, int] = {}
        self.idle: list[list[int]] = []

    def shrink(self) -> None:
        if self.size_tokens is None:
            return
        while self.idle and sum(self.used.values()) + sum(tokens for _, tokens in self.idle) > self.size_tokens:
            self.idle[0][1] -= 1
            if self.idle[0][1] <= 0:
                self.idle.pop(0)

    def use(self, generation: int, tokens: int) -> None:
        self.idle = [entry for entry in self.idle if entry[0] != generation]
        self.used[generation] = tokens
        self.shrink()

    def leave(self, generation: int, tokens: int) -> None:
        if self.used.pop(generation, None) is not None:
            self.idle.append([generation, tokens])
            self.shrink()

    def report(self, generation: int, tokens: int) -> None:
        if generation in self.used:
            return
        for entry in self.idle:
            if entry[0] == generation:
                entry[1] = tokens
                return
        if tokens:
            self.idle.append([generation, tokens])

    def tokens_of(self, generation: int) -> int:
        return self.used.get(generation) or sum(tokens for each, tokens in self.idle if each == generation)


@given(STEPS)
def test_residency_evicts_the_oldest_first(steps: list[tuple[str, int, int]]) -> None:
    """This holds whatever is used, left, reported or cleared, in a memory of any size."""
    residency, naive = Residency(), NaiveMemory()
    for kind, generation, tokens in steps:
        if kind == "clear":
            residency.clear()
            naive.used, naive.idle = {}, []
        elif kind == "size":
            residency.capacity_tokens = naive.size_tokens = tokens
        else:
            getattr(residency, kind)(generation, tokens)
            getattr(naive, kind)(generation, tokens)
        assert [residency.resident_tokens(each) for each in range(1, 7)] == [naive.tokens_of(e) for e in range(1, 7)]


def of_size(capacity_tokens: int | None) -> Residency:
    residency = Residency()
    residency.capacity_tokens = capacity_tokens
    return residency


def turn(residency: Residency, generation: int, tokens: int) -> None:
    residency.use(generation, tokens)
    residency.leave(generation, tokens)


def lies(residency: Residency, *generations: int) -> list[int]:
    return [residency.resident_tokens(generation) for generation in generations]


def test_residency_evicts_the_tail_of_the_oldest_first() -> None:
    """With 100, 200 and 300 in 500 the oldest goes, then a tail of the next."""
    residency = of_size(500)
    for generation in (1, 2, 3):
        turn(residency, generation, 100 * generation)
    assert lies(residency, 1, 2, 3) == [0, 200, 300]
    residency.use(4, 150)
    assert lies(residency, 1, 2, 3, 4) == [0, 50, 300, 150]


def test_used_context_becomes_the_newest() -> None:
    """Of two equals, the one that was not used again goes."""
    residency = of_size(500)
    for generation in (1, 2, 1):
        turn(residency, generation, 200)
    turn(residency, 3, 200)
    assert lies(residency, 1, 2, 3) == [200, 100, 200]


def test_context_in_use_is_never_evicted() -> None:
    """This holds even if more is used than fits."""
    residency = of_size(500)
    residency.use(1, 400)
    turn(residency, 2, 100)
    residency.use(3, 300)
    assert lies(residency, 1, 2, 3) == [400, 0, 300]


def test_an_engine_that_lost_its_memory_has_nothing() -> None:
    """Memory in use does not come back when its turn ends, either."""
    residency = of_size(500)
    residency.use(1, 100)
    turn(residency, 2, 100)
    residency.clear()
    residency.leave(1, 100)
    assert lies(residency, 1, 2) == [0, 0]
    assert repr(residency) == "<Residency 0 in use, 0 idle, of 500 tokens>"


def test_engine_report_replaces_the_estimate_of_idle_programs() -> None:
    """For a program with a turn the report is already old."""
    residency = of_size(500)
    turn(residency, 1, 100)
    residency.use(2, 100)
    for generation in (1, 2, 3):
        residency.report(generation, 30)
    residency.report(4, 0)
    assert lies(residency, 1, 2, 3, 4) == [30, 100, 30, 0]
    assert repr(residency) == "<Residency 100 in use, 60 idle, of 500 tokens>"


def test_an_engine_of_unknown_size_remembers_a_bounded_number_of_programs() -> None:
    """A proxy that runs for a year does not keep an entry for each past program."""
    residency = of_size(None)
    for generation in range(1, 30_001):
        turn(residency, generation, 10)
    assert len(residency) < 20_000
    assert lies(residency, 1, 30_000) == [0, 10]


def test_a_second_branch_counts_in_full_while_it_runs() -> None:
    """Residency is booked by the claim, which includes its turn: 1,000 tokens beside 10,000 are 11,000."""
    driver = Driver(replicas={"r0": 100_000})
    driver.arrives("a", 1000)
    driver.arrives("a", 10_000, branch="sub")
    program = driver.program("a")
    assert driver.scheduler.replicas["r0"].residency.resident_tokens(program.generation) == 11_000


def test_common_tokens_of_branches_are_not_shared_with_others() -> None:
    """Two branches claim it, and it is in memory once: the main turn finds none of it on its next replica."""
    driver = Driver(BreakEven(), replicas={"r0": 100_000, "r1": 100_000})
    prefix = {"system": 4000}
    driver.takes_turn("a", 20_000, prefix=prefix, tool="make")
    driver.takes_turn("a", 5000, branch="side", prefix=prefix, tool="make")
    replicas, generation = driver.scheduler.replicas, driver.program("a").generation
    assert replicas["r0"].residency.resident_tokens(generation) == 21_000
    driver.migrates("a", "r1")
    main = driver.arrives("a", 21_000, prefix=prefix)
    assert (driver.granted_on[main], driver.scheduler.turns[main].resident_tokens) == ("r1", 0)
    assert replicas["r1"].residency.resident_tokens(generation) == driver.demand("r1")
