"""The price of a lost token: found within a factor of 1.5 whatever an engine does, and small where it is unknown."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from heapq import heappop, heappush
from math import inf
from random import Random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.builders import Driver, known_price
from thunderagent.policy_loader import load_policy
from thunderagent.programs.learned.price import (
    COUNTERS,
    FIRST_TOKEN_S,
    GUESS,
    KEPT_COUNT,
    PREEMPTED_POLLS_COUNT,
    SIBLINGS,
    TURNS,
    Price,
    Prices,
    SeenTurn,
    busy_until_ends,
    not_negative,
)
from thunderagent.programs.messages import ReplicaPolled, TurnEnd
from thunderagent.simulator.engine.records import EngineConfig
from thunderagent.simulator.engine.timing import TimingProfile, profile
from thunderagent.simulator.runs.run import Simulation
from thunderagent.simulator.runs.scenario import Scenario
from thunderagent.simulator.workloads.distributions import AgentWorkload, Exponential, Uniform

PROFILES = {
    "light": TimingProfile("light", 5.5e-3, 2.1e-5, 2e-4, 2e-8),
    "demo": profile("demo"),
    "qwen3-32b-h200": profile("qwen3-32b-h200"),
    "llama-3.1-8b-h100-tp2": profile("llama-3.1-8b-h100-tp2"),
    "gpt-oss-120b-h100": profile("gpt-oss-120b-h100"),
}

SHORT = AgentWorkload(
    "short",
    "",
    turns=Uniform(6, 12),
    first_prompt_tokens=Uniform(400, 800),
    new_tokens=Uniform(150, 450),
    output_tokens=Uniform(24, 64),
    tool_s=Exponential(1.0),
)
LONG = AgentWorkload(
    "long",
    "",
    turns=Uniform(6, 12),
    first_prompt_tokens=Uniform(4000, 12000),
    new_tokens=Uniform(1000, 2000),
    output_tokens=Uniform(16, 48),
    tool_s=Exponential(2.0),
)
SLOWS = TimingProfile("slows-with-contexts", 5.74e-3, 1.7e-5, 0.0, 1.25e-6)

LOADS = {"short": SHORT, "long": LONG}
CONTEXT_TOKENS = {"short": 2000, "long": 13_000}


@dataclass(frozen=True)
class Seen:
    """A turn as an engine ran it, with what its usage says and what its branch sent for the first time."""

    granted_s: float
    first_s: float
    ended_s: float
    uncached_tokens: int
    output_tokens: int
    context_tokens: int


class _EnoughError(Exception):
    """Ends a run."""


@cache
def turns_on(profile_name: str, load: str, programs_count: int, memory_ratio: float) -> tuple[Seen, ...]:
    """Return 200 turns on a simulated engine with that part of the memory that all programs want, nobody held."""
    kv_tokens = max(CONTEXT_TOKENS[load] * 3, int(programs_count * CONTEXT_TOKENS[load] * memory_ratio))
    timing = SLOWS if profile_name == SLOWS.name else PROFILES[profile_name]
    engine = EngineConfig(kv_tokens, timing=timing, max_num_batched_tokens=8192)
    scenario = Scenario(engine, programs_count=programs_count, horizon_s=3000.0, seed=3)
    simulation = Simulation(scenario, LOADS[load], load_policy("passthrough", {}))
    seen: list[Seen] = []
    handle = simulation.handle

    def watch(event):  # type: ignore[no-untyped-def]
        if isinstance(event, TurnEnd) and event.outcome == "finished":
            turn = simulation.scheduler.turns[event.turn_id]
            assert turn.started_s is not None
            uncached_tokens = event.prompt_tokens - event.cached_tokens
            context_tokens = event.prompt_tokens + event.output_tokens // 2
            times_s = turn.granted_s, turn.started_s, event.now_s
            seen.append(Seen(*times_s, uncached_tokens, event.output_tokens, context_tokens))
            if len(seen) == 200:
                raise _EnoughError
        return handle(event)

    simulation.handle = watch  # type: ignore[method-assign]
    with pytest.raises(_EnoughError):
        simulation.run()
    return tuple(seen)


def price_after(seen: tuple[Seen, ...], count: int, *, streamed: bool) -> Price:
    """Return what the first `count` turns teach."""
    price = Price()
    grants_s = sorted(turn.granted_s for turn in seen)
    for number, turn in enumerate(seen[:count]):
        others_count = sum(granted_s <= turn.ended_s for granted_s in grants_s) - number - 1
        tokens = turn.uncached_tokens
        first_s = turn.first_s if streamed else None
        times_s, context_tokens = (turn.granted_s, first_s, turn.ended_s), turn.context_tokens
        told = SeenTurn(*times_s, tokens, tokens, turn.output_tokens, context_tokens=context_tokens)
        price.turn_ended(told, others_count)
    return price


GRID = [
    (name, load, programs_count, memory_ratio)
    for name in PROFILES
    for load in LOADS
    for programs_count, memory_ratio in ((1, 3.0), (4, 3.0), (16, 3.0), (16, 0.4), (64, 0.4))
]


@pytest.mark.parametrize(("name", "load", "programs_count", "memory_ratio"), GRID)
def test_the_price_is_found_where_answers_stream(
    name: str, load: str, programs_count: int, memory_ratio: float
) -> None:
    """After 60 turns, idle and overloaded, with memory for all and with far too little."""
    true_s = PROFILES[name].prefill_token_s
    price = price_after(turns_on(name, load, programs_count, memory_ratio), 60, streamed=True)
    assert true_s / 1.5 <= price.token_s <= true_s * 1.5
    assert price.source == TURNS
    assert price.low_token_s <= price.token_s <= price.high_token_s


@pytest.mark.parametrize(("name", "load", "programs_count", "memory_ratio"), GRID)
def test_the_price_is_found_where_answers_come_whole(
    name: str, load: str, programs_count: int, memory_ratio: float
) -> None:
    """Where turns wait inside of the engine for memory, their times say less, and the interval says so.

    What a prompt attends to is part of its price.
    """
    timing, seen = PROFILES[name], turns_on(name, load, programs_count, memory_ratio)
    true_s = timing.prefill_token_s
    attending_s = timing.attention_pair_s * sum(turn.context_tokens for turn in seen) / len(seen) / 2
    price = price_after(seen, 120, streamed=False)
    assert price.low_token_s <= (true_s + attending_s) * 1.5
    assert price.high_token_s >= true_s / 1.5
    if memory_ratio > 1:
        assert true_s / 1.6 <= price.token_s <= (true_s + attending_s) * 1.6


@pytest.mark.parametrize("streamed", [True, False])
def test_cost_of_contexts_is_not_taken_for_that_of_iterations(streamed: bool) -> None:
    """Turns alone fill the memory, so iterations take some 45 ms whatever runs; all but 6 ms of it is for contexts."""
    seen = turns_on("slows-with-contexts", "short", 40, 0.4)
    price = price_after(seen, 200, streamed=streamed)
    sequence_s = 1.25e-6 * sum(turn.context_tokens for turn in seen) / len(seen)
    assert price.iteration_s < 0.5 * 45e-3
    assert price.sequence_s == pytest.approx(sequence_s, rel=0.5)


COUNTED = [row for row in GRID[5:15] if row[2] < 64]


@pytest.mark.parametrize(("name", "load", "programs_count", "memory_ratio"), COUNTED)
def test_the_price_is_found_by_an_engine_s_own_counters(
    name: str, load: str, programs_count: int, memory_ratio: float
) -> None:
    """Read each second. They do not count what preempted requests compute again: then the turns tell more."""
    kv_tokens = max(CONTEXT_TOKENS[load] * 3, int(programs_count * CONTEXT_TOKENS[load] * memory_ratio))
    engine = EngineConfig(kv_tokens, timing=PROFILES[name], max_num_batched_tokens=8192)
    scenario = Scenario(engine, programs_count=programs_count, horizon_s=400.0, seed=3)
    simulation = Simulation(scenario, LOADS[load], load_policy("passthrough", {}))
    handle, price, before = simulation.handle, Price(), [0, 0, 0, 0]

    def watch(event):  # type: ignore[no-untyped-def]
        decisions = handle(event)
        if isinstance(event, TurnEnd) and event.outcome == "finished":
            price.turn_ended(SeenTurn(0.0, None, 0.0, 1, 1, 1), 0)
        if isinstance(event, ReplicaPolled):
            stats = simulation._replicas["r0"].stats
            counted = [stats.computed_tokens, stats.generated_tokens, stats.iteration_count, stats.preemption_count]
            computed, generated, iterations, preempted = (now - then for now, then in zip(counted, before, strict=True))
            busy_s = simulation.scheduler.replicas["r0"].account.busy_s
            if preempted:
                price.unknown_work(PREEMPTED_POLLS_COUNT)
            else:
                price.work_polled(busy_s, computed, generated, iterations)
            before[:] = counted
        return decisions

    simulation.handle = watch  # type: ignore[method-assign]
    simulation.run()
    true_s = PROFILES[name].prefill_token_s
    assert price.source == (COUNTERS if memory_ratio > 1 else price.source)
    if price.source == COUNTERS:
        assert true_s / 1.5 <= price.token_s <= true_s * 1.5
        assert price.low_token_s <= true_s * 1.2
        assert price.high_token_s >= true_s / 1.2


def test_until_it_is_seen_the_price_is_a_guess_that_nothing_is_held_for() -> None:
    price = Prices().of("r0")
    assert (price.token_s, price.low_token_s, price.high_token_s, price.source) == (FIRST_TOKEN_S, 0.0, inf, GUESS)


def test_a_replica_that_has_shown_nothing_is_expected_to_be_like_its_siblings() -> None:
    """The usual one is the median; the interval covers all of them, and more."""
    prices = Prices()
    prices.adopt([known_price(f"r{number}", 1e-5 * number) for number in (1, 2, 9)])
    new = prices.of("new")
    assert (new.token_s, new.source) == (2e-5, SIBLINGS)
    assert (new.low_token_s, new.high_token_s) == pytest.approx((5e-6, 1.8e-4))
    assert prices.of("r9").token_s == 9e-5
    assert prices.token_s == prices.of(None).token_s == 2e-5


def test_prompts_that_hardly_vary_leave_the_price_open() -> None:
    """All turns compute the same, beside what takes a second whatever they compute, and is not the same."""
    price, random = Price(), Random(1)
    for number in range(64):
        begin_s = 100.0 * number
        took_s = 1.0 + random.uniform(-0.5, 0.5)
        price.turn_ended(SeenTurn(begin_s, None, begin_s + took_s, 1000 + number % 2, 1000, 50), 0)
    assert price.low_token_s == 0.0
    assert price.high_token_s > 1e-4


def crowd(token_s: float, count: int) -> list[SeenTurn]:
    """Return the first turns to end of 64 programs at once, whole: prompts one by one, each answer after 6 s more."""
    random = Random(7)
    queue = [0.0] * 64
    free_s, ended = 0.0, []
    while len(ended) < 4 * count:
        arrived_s = heappop(queue)
        tokens = random.randrange(4000, 12_000)
        free_s = max(free_s, arrived_s) + token_s * tokens
        ended_s = free_s + 6.0
        heappush(queue, ended_s + 2.0)
        ended.append(SeenTurn(arrived_s, None, ended_s, tokens, tokens, random.randrange(16, 48)))
    return sorted(ended, key=lambda turn: turn.ended_s)[:count]


def test_what_all_turns_took_together_tells_the_price_where_they_wait_in_the_engine() -> None:
    """A stay is mostly what others computed before, at a time that whole answers do not tell."""
    price = Price()
    for turn in crowd(1e-4, 60):
        price.turn_ended(turn, 63)
    assert price.token_s == pytest.approx(1e-4, rel=0.25)
    assert price.low_token_s <= 1e-4 <= price.high_token_s
    assert price.cautious_token_s <= 1e-4


def test_the_time_in_which_any_turn_was_there_is_summed_until_each_end() -> None:
    spans = [(0.0, 1.0), (0.5, 2.0), (4.0, 5.0), (1.5, 6.0), (8.0, 9.0)]
    turns = [SeenTurn(begin_s, None, end_s, 1, 1, 1) for begin_s, end_s in spans]
    assert busy_until_ends(turns) == [1.0, 2.0, 5.0, 6.0, 7.0]


def test_stalls_teach_nothing() -> None:
    """Some turns ran while their engine was paused for a minute: their times do not count, what they computed does."""
    price, random, now_s = Price(), Random(1), 0.0
    for number in range(64):
        tokens, stalls = random.randrange(200, 4000), number % 4 == 0
        end_s = now_s + tokens * 1e-4 + (60.0 if stalls else 0.0)
        price.turn_ended(SeenTurn(now_s, end_s, end_s + 0.5, tokens, tokens, 50, is_row=not stalls), 0)
        now_s = end_s + 1.0
    assert price.token_s == pytest.approx(1e-4, rel=0.05)
    assert price.turn_count == 48


def test_stalls_that_nobody_told_of_hardly_count() -> None:
    """One turn in ten takes a minute more."""
    price, random, now_s = Price(), Random(1), 0.0
    for number in range(128):
        tokens = random.randrange(200, 4000)
        end_s = now_s + tokens * 1e-4 + (60.0 if number % 10 == 0 else 0.0)
        price.turn_ended(SeenTurn(now_s, end_s, end_s + 0.5, tokens, tokens, 50), 0)
        now_s = end_s + 1.0
    assert price.token_s == pytest.approx(1e-4, rel=0.1)


def test_an_engine_that_does_not_say_what_was_cached_widens_the_interval() -> None:
    """Three quarters of each prompt may have been cached: a token costs 1e-4 s, or 4e-4."""
    price, random, now_s = Price(), Random(1), 0.0
    for _ in range(64):
        tokens = random.randrange(400, 8000)
        end_s = now_s + tokens * 1e-4
        price.turn_ended(SeenTurn(now_s, end_s, end_s + 0.5, tokens, tokens // 4, 50), 0)
        now_s = end_s + 1.0
    assert price.low_token_s == pytest.approx(1e-4, rel=0.05)
    assert price.high_token_s == pytest.approx(4e-4, rel=0.05)


def test_only_so_many_turns_are_remembered() -> None:
    price = Price()
    for number in range(3 * KEPT_COUNT):
        price.turn_ended(SeenTurn(number, number + 0.1, number + 0.5, 100, 100, 10), 0)
    assert price.turn_count == KEPT_COUNT


def test_learned_price_is_kept_and_taken_over() -> None:
    driver = Driver(token_s=None)
    for number in range(32):
        turn_id = driver.arrives("a", 100 + 20 * number)
        driver.passes(0.01 * number + 0.05)
        driver.starts(turn_id)
        driver.passes(1.0)
        driver.finishes(turn_id, 100 + 20 * number, 20, 0)
    first = driver.scheduler.knowledge.prices
    again = Prices()
    again.adopt(first.export())
    assert again.export() == first.export()
    assert again.of("r0").token_s == first.of("r0").token_s == pytest.approx(5e-4, rel=0.2)


def test_decisions_count_on_the_same_price_before_and_after_a_restart() -> None:
    """Sums sharpen what is shown; what policies read and what is kept is without them."""
    driver = Driver(token_s=None)
    prices, again = driver.scheduler.knowledge.prices, Prices()
    for turn in crowd(1e-4, 128):
        prices.turn_ended("r0", turn, 60)
    price = prices.of("r0")
    assert price.token_s != price.decided_token_s
    assert (price.low_token_s, price.high_token_s) != (price.least_token_s, price.most_token_s)
    assert driver.scheduler.view.prefill_token_s == prices.of("new").decided_token_s == price.decided_token_s
    again.adopt(prices.export())
    taken = again.of("r0")
    assert (taken.least_token_s, taken.most_token_s) == (price.least_token_s, price.most_token_s)
    assert (taken.token_s, taken.cautious_token_s) == (price.decided_token_s, price.cautious_token_s)


def test_a_lost_replica_is_learned_anew_from_the_turns_after_it() -> None:
    price = Price()
    for number in range(20):
        price.turn_ended(SeenTurn(number, number + 0.1, number + 0.5, 100, 100, 10), 0)
    price.interrupted(50.0)
    assert price.turn_count == 0
    assert price.source == TURNS


def test_no_price_is_negative() -> None:
    """The least squares would have -1 and 2: without the negative one it is 1.5."""
    rows = [(1.0, 1.0), (1.0, 1.0), (0.0, 1.0)]
    times_s = [1.0, 1.0, 2.5]
    squares = [[sum(row[i] * row[j] for row in rows) for j in range(2)] for i in range(2)]
    products = [sum(row[i] * time_s for row, time_s in zip(rows, times_s, strict=True)) for i in range(2)]
    assert not_negative(squares, products) == pytest.approx([0.0, 1.5], rel=1e-4)


SEEN = st.tuples(
    st.floats(0.0, 1e5), st.floats(-10.0, 1e4), st.floats(0.0, 1e4), st.integers(0, 10**9), st.integers(0, 10**9)
)


@given(st.lists(SEEN, min_size=16, max_size=40), st.integers(0, 100))
def test_price_stays_possible_whatever_is_told(
    told: list[tuple[float, float, float, int, int]], others_count: int
) -> None:
    """Times are divided by it, and compared with it."""
    price = Price()
    for granted_s, first_s, took_s, tokens, output_tokens in told:
        first = granted_s + first_s if first_s > 0 else None
        price.turn_ended(
            SeenTurn(granted_s, first, granted_s + took_s, tokens, tokens // 2, output_tokens), others_count
        )
        assert 0 <= price.low_token_s <= price.token_s <= price.high_token_s
        assert 0 < price.token_s < inf
        assert 0 <= price.fixed_ratio(3.0) <= 1
