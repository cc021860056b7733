"""For how long it pays to hold programs through their tools: what is predicted, and what is planned of it."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise
from math import inf, nan, sqrt
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.builders import Driver, ended, known_price
from thunderagent.programs.learned.holding import (
    CLAIMED_RATIO,
    ENOUGH_RETURNS_COUNT,
    ENOUGH_TURNS_COUNT,
    FILLED_GAIN_RATIO,
    HOLDING_GAIN_RATIO,
    NOTHING_HELD,
    REFRESH_S,
    SLACK_RATIO,
    SOFTLY_CLAIMED_RATIO,
    EngineCosts,
    HoldingPlan,
    Returns,
    plan_holding,
)
from thunderagent.programs.learned.knowledge import Knowledge
from thunderagent.programs.learned.sizes import TurnMeans
from thunderagent.programs.learned.tool_times import ToolTimes
from thunderagent.programs.messages import KnowledgeLoaded, LearnedRecord, ReplicaPriceRecord, TurnMeansRecord
from thunderagent.programs.policies.breakeven import BreakEven
from thunderagent.programs.policies.letting_in import LONGEST_HOLD_S

SEEN = TurnMeansRecord(
    count=100,
    held_tokens=1000.0,
    new_tokens=100.0,
    left_tokens=1000.0,
    output_tokens=10.0,
    program_count=0,
    program_turn_count=0.0,
    grown_tokens=256.0,
)
"""Turns of programs that never end: each brings 100 tokens, and loses 1,000 if it is not held."""

DEAR, CHEAP = EngineCosts(1e-3, 0.01, 0.0), EngineCosts(1e-6, 0.01, 0.0)
"""Of a prompt token, an iteration, and a sequence in it."""

QUICK = Returns((2.0,), (1.0,), (1.0,), 100.0)
"""All come back within two seconds: after one second in the mean."""

MEMORY_TOKENS = 10_000.0


def means_of(record: TurnMeansRecord = SEEN, **changes: float) -> TurnMeans:
    """Return these means over turns."""
    means = TurnMeans()
    means.adopt(replace(record, **changes))
    return means


def plan(
    costs: EngineCosts = DEAR,
    means: TurnMeans | None = None,
    returns: Returns = QUICK,
    *,
    memory_tokens: float = MEMORY_TOKENS,
    **more: Any,
) -> HoldingPlan:
    """Plan for this engine, these turns and tools."""
    return plan_holding(costs, means or means_of(), returns, memory_tokens=memory_tokens, **more)


# --- What is predicted


def test_an_engine_short_of_compute_holds_and_gains_what_two_equations_say() -> None:
    """Unheld, 10 turns at once compute 1,100 tokens each: 10 turns in 10 · 1.1 + 0.1 s.

    Held, B turns compute 100 each, so X = B / (0.1 · B + 0.1), and one second of each is held: B + X = 9.5.
    """
    planned = plan()
    running_count = (-1.5 + sqrt(1.5**2 + 4 * 9.5)) / 2
    assert planned.unheld_turns_per_s == pytest.approx(10 / 11.1)
    assert planned.turns_per_s == pytest.approx(running_count / (0.1 * running_count + 0.1))
    assert planned.threshold_s == pytest.approx(SLACK_RATIO)


def test_fewer_than_one_turn_at_once_leaves_the_engine_idle_meanwhile() -> None:
    """Half of a turn at once takes 1.1 + 0.1 s each."""
    planned = plan(returns=Returns((1.0,), (0.0,), (0.0,), 100.0), memory_tokens=500.0)
    assert planned.turns_per_s == pytest.approx(0.5 / 1.2)


def test_cost_of_a_sequence_counts_for_each_generated_token() -> None:
    """Ten sequences of 2 ms each for ten tokens."""
    planned = plan(replace_cost(DEAR, sequence_s=2e-3))
    assert planned.unheld_turns_per_s == pytest.approx(10 / (10 * (1.1 + 10 * 2e-3) + 0.1))


def replace_cost(costs: EngineCosts, **changes: float) -> EngineCosts:
    """Return the costs with these changes."""
    return costs._replace(**changes)


def test_an_engine_short_of_memory_holds_nothing_where_prefill_is_cheap() -> None:
    """A place is worth more than 1,000 tokens in a millisecond."""
    planned = plan(CHEAP)
    assert planned.threshold_s == 0.0
    assert planned.turns_per_s == planned.unheld_turns_per_s == pytest.approx(10 / (10 * 1.1e-3 + 0.1))


EVEN = EngineCosts(1e-4, 0.0, 0.05)
"""A sequence costs the same however many there are: half a second a turn; 1,000 lost tokens cost a fifth of that."""


def test_claims_may_exceed_the_memory_where_a_lost_token_surely_costs_little() -> None:
    """Unheld a turn takes 0.61 s, and a sixth of it is lost. Held it takes 0.51 s: as many turns as can be computed."""
    planned = plan(EVEN, most_token_s=1.5e-4)
    assert planned.claimed_ratio == SOFTLY_CLAIMED_RATIO
    assert planned.threshold_s == pytest.approx(SLACK_RATIO)
    assert planned.unheld_turns_per_s == pytest.approx(1 / 0.61)
    assert planned.turns_per_s == pytest.approx(1 / 0.51)


@pytest.mark.parametrize("most_token_s", [2e-4, inf])
def test_claims_stay_within_the_memory_where_a_lost_token_may_be_dear(most_token_s: float) -> None:
    """By the upper end of its price a third of the time would be lost."""
    planned = plan(EVEN, most_token_s=most_token_s)
    assert planned.threshold_s > 0.0
    assert planned.claimed_ratio == 1.0


def test_nothing_more_is_claimed_where_nothing_is_held() -> None:
    """An iteration costs the same however many sequences there are: a place is worth more than what is lost."""
    planned = plan(CHEAP, most_token_s=1e-6)
    assert (planned.threshold_s, planned.claimed_ratio) == (0.0, 1.0)


@pytest.mark.parametrize(
    ("least_token_s", "most_token_s", "is_filled"),
    [
        (1e-6, 1e-6, True),
        (1e-6, 5e-6, True),
        (0.0, 1e-6, True),
        (1e-6, 1e-4, False),
        (0.0, 1e-4, False),
        (1e-6, inf, False),
    ],
)
def test_more_than_fit_are_let_in_where_nothing_is_held_and_little_is_lost(
    least_token_s: float, most_token_s: float, is_filled: bool
) -> None:
    """Ninety turns a second lose 1,000 tokens each: at 2.8 us a quarter of the time. A price without an end says no."""
    planned = plan(CHEAP, least_token_s=least_token_s, most_token_s=most_token_s)
    assert (planned.threshold_s, planned.may_overfill) == (0.0, is_filled)
    held = plan(EVEN, least_token_s=least_token_s, most_token_s=most_token_s)
    assert held.threshold_s > 0.0
    assert not held.may_overfill


def test_holding_must_bring_more_where_turns_waited_in_the_engines_queue() -> None:
    """A turn's time has that wait in it, and the price takes it for time that each sequence costs."""
    prices, gains = [1e-6 * 1.05**step for step in range(200)], {}
    for was_filled in (False, True):
        plans = [plan(EngineCosts(each, 0.01, 0.0), was_filled=was_filled) for each in prices]
        gains[was_filled] = min(each.turns_per_s / each.unheld_turns_per_s for each in plans if each.threshold_s)
    assert HOLDING_GAIN_RATIO <= gains[False] < FILLED_GAIN_RATIO <= gains[True]


@pytest.mark.parametrize("costs", [DEAR, CHEAP])
def test_programs_that_never_come_back_are_not_held(costs: EngineCosts) -> None:
    planned = plan(costs, returns=Returns((1.0, 10.0), (0.0, 0.0), (0.0, 0.0), 100.0))
    assert planned.threshold_s == 0.0
    assert planned.turns_per_s == planned.unheld_turns_per_s > 0.0


def test_programs_of_one_turn_are_not_held() -> None:
    """A last turn loses nothing; where every second one is the last, half of that is lost."""
    planned = plan(means=means_of(program_count=5, program_turn_count=1.0))
    assert planned.threshold_s == 0.0
    assert planned.turns_per_s == pytest.approx(10 / (10 * 0.1 + 0.1))
    halved = plan(means=means_of(program_count=5, program_turn_count=2.0))
    assert halved.unheld_turns_per_s == pytest.approx(10 / (10 * 0.6 + 0.1))
    assert halved.threshold_s > 0.0


def test_tools_are_held_up_to_where_the_next_second_pays_no_more() -> None:
    """Half come back in a second, the others within hours: one over the rate of the first is the threshold."""
    returns = Returns((1.0, 10_000.0), (0.5, 0.5), (2 / 3, 1e-4), 100.0)
    planned = plan(returns=returns)
    assert planned.threshold_s == pytest.approx(1.5 * SLACK_RATIO)
    both_quick = Returns((1.0, 1.0), (0.5, 0.5), (2 / 3, 0.5), 100.0)
    assert plan(returns=both_quick).threshold_s == pytest.approx(2.0 * SLACK_RATIO)


def test_all_are_held_where_a_stretch_without_returns_is_passed_for_more() -> None:
    """No threshold is long enough to pass it."""
    assert plan(returns=Returns((0.1, 0.1, 0.1), (0.5, 0.0, 1.0), (5.0, 0.0, 20.0), 100.0)).threshold_s == inf


def test_of_times_that_bring_nearly_as_much_the_shortest_is_planned() -> None:
    """Nine of ten come back in a second, hardly one later: waiting for that one is predicted to bring 0.4 %."""
    returns = Returns((1.0, 1.0), (0.9, 0.02), (1.6, 0.07), 100.0)
    short, long = plan(returns=Returns((1.0,), (0.9,), (1.6,), 100.0)), plan(returns=returns)
    assert 1.0 < long.turns_per_s / short.turns_per_s < 1.01
    assert long.threshold_s == short.threshold_s == pytest.approx(SLACK_RATIO / 1.6)


def test_a_small_gain_is_no_reason_to_hold() -> None:
    """Memory is missing for sure, and a prediction is not exact: near to where nothing is gained, nothing is held."""
    held_prices = []
    for step in range(200):
        planned = plan(EngineCosts(1e-5 * 1.03**step, 0.01, 0.0))
        if planned.threshold_s:
            held_prices.append(step)
            assert planned.turns_per_s >= HOLDING_GAIN_RATIO * planned.unheld_turns_per_s
    assert held_prices == list(range(held_prices[0], 200))
    assert held_prices[0] > 0
    planned = plan(EngineCosts(1e-5 * 1.03 ** held_prices[0], 0.01, 0.0))
    assert planned.turns_per_s < 1.05 * HOLDING_GAIN_RATIO * planned.unheld_turns_per_s


def test_the_dearer_a_token_the_longer_tools_are_held() -> None:
    """On no step of the price is it shorter; in the end it is longer than at first."""
    returns = ToolTimes().returns()._replace(seen_count=100.0)
    thresholds_s = [plan(EngineCosts(1e-6 * 2**step, 0.01, 1e-4), returns=returns).threshold_s for step in range(20)]
    assert all(before <= after for before, after in pairwise(thresholds_s))
    assert 0.0 == thresholds_s[0] < thresholds_s[-1]
    assert len(set(thresholds_s)) > 3


def test_common_tokens_of_programs_are_held_and_lost_once() -> None:
    """Where half of it is shared, it is as if turns held and left half as much, and brought the same."""
    halved = means_of(held_tokens=500.0, left_tokens=500.0)
    assert plan(own_ratio=0.5) == pytest.approx(plan(means=halved))
    assert plan(own_ratio=0.5).unheld_turns_per_s > plan().unheld_turns_per_s


def test_claims_hold_a_reserve_and_of_the_corrected_memory_alone() -> None:
    """A reserve is in claims alone; memory that is not there is there for nobody."""
    assert plan(reserve_tokens=250.0).unheld_turns_per_s == plan().unheld_turns_per_s
    assert plan(corrected_ratio=0.8).unheld_turns_per_s < plan().unheld_turns_per_s
    for smaller in (plan(corrected_ratio=0.8), plan(reserve_tokens=250.0)):
        assert smaller.turns_per_s < plan().turns_per_s
    assert plan(corrected_ratio=0.8).turns_per_s == pytest.approx(plan(reserve_tokens=250.0).turns_per_s)
    assert CLAIMED_RATIO < 1.0


def test_while_too_little_is_known_nothing_is_held() -> None:
    """Cases are few turns, few returns, turns of nothing, and a memory of no size or an unknown one."""
    assert plan(means=means_of(count=ENOUGH_TURNS_COUNT - 1)) == NOTHING_HELD
    assert plan(means=means_of(count=ENOUGH_TURNS_COUNT)) == plan() != NOTHING_HELD
    assert plan(returns=QUICK._replace(seen_count=ENOUGH_RETURNS_COUNT - 1)) == NOTHING_HELD
    assert plan(returns=QUICK._replace(seen_count=ENOUGH_RETURNS_COUNT)) == plan()
    assert plan(means=TurnMeans()) == NOTHING_HELD
    assert plan(means=means_of(held_tokens=0.0)) == NOTHING_HELD
    for memory_tokens in (0.0, inf):
        assert plan(memory_tokens=memory_tokens) == NOTHING_HELD


@given(
    st.floats(1e-8, 1.0),
    st.floats(1e-5, 0.1),
    st.floats(0.0, 1e-2),
    st.floats(100.0, 1e7),
    st.floats(1.0, 30.0),
    st.lists(st.floats(0.0, 1e4), max_size=30),
)
def test_a_plan_is_never_worse_than_no_plan(
    token_s: float, iteration_s: float, sequence_s: float, memory_tokens: float, turns: float, tools_s: list[float]
) -> None:
    """It holds nothing, or is predicted to gain enough."""
    times = ToolTimes()
    for tool_s in tools_s:
        times.returned("", tool_s)
    planned = plan(
        EngineCosts(token_s, iteration_s, sequence_s),
        means_of(program_count=1, program_turn_count=turns),
        times.returns()._replace(seen_count=100.0),
        memory_tokens=memory_tokens,
    )
    if planned.threshold_s:
        assert planned.turns_per_s >= HOLDING_GAIN_RATIO * planned.unheld_turns_per_s
    else:
        assert planned.turns_per_s == planned.unheld_turns_per_s > 0.0


# --- Means over turns


def test_turn_matches_a_calculation_by_hand() -> None:
    """Of 900 tokens 600 were known; 100 more are generated, half of which is there in the mean."""
    means = TurnMeans()
    means.turn_ended(ended(prompt=900, output=100, context=600))
    assert (means.count, means.held_tokens, means.new_tokens) == (1, 950.0, 300.0)
    assert (means.left_tokens, means.output_tokens) == (1000.0, 100.0)
    means.turn_ended(ended(prompt=300, output=0))
    assert (means.count, means.held_tokens, means.new_tokens) == (2, 625.0, 300.0)
    assert (means.left_tokens, means.output_tokens) == (650.0, 50.0)


def test_later_turns_count_for_a_hundredth_each() -> None:
    """What was usual long ago is forgotten."""
    means = means_of(count=1_000_000)
    means.turn_ended(ended(prompt=2000))
    assert means.held_tokens == pytest.approx(1010.0)
    for _ in range(1000):
        means.turn_ended(ended(prompt=2000))
    assert means.held_tokens == pytest.approx(2000.0, rel=1e-3)


def test_programs_go_on_until_their_last_turn() -> None:
    """Until one ended, nobody knows of any end."""
    means = TurnMeans()
    assert means.goes_on_ratio == 1.0
    means.program_ended(1)
    assert means.goes_on_ratio == 0.0
    means.program_ended(7)
    assert (means.program_count, means.goes_on_ratio) == (2, 0.75)


def test_means_outlive_a_restart() -> None:
    """They go on as if nothing had happened."""
    means, again = means_of(), TurnMeans()
    means.turn_ended(ended(prompt=900, output=100, context=600))
    means.program_ended(5)
    again.adopt(means.export())
    for each in (means, again):
        each.turn_ended(ended(prompt=1000))
        each.program_ended(9)
    assert again.export() == means.export()
    assert means.export().count == 102


@pytest.mark.parametrize(
    "wrong",
    [
        *[
            {name: bad}
            for name in ("held_tokens", "new_tokens", "left_tokens", "output_tokens")
            for bad in (-1.0, 2e9, inf, nan)
        ],
        {"count": -1},
        {"program_count": -1},
        {"program_count": 3, "program_turn_count": 0.5},
        {"program_turn_count": 0.5},
        {"program_turn_count": -1.0},
        {"program_turn_count": inf},
        {"program_turn_count": nan},
    ],
)
def test_impossible_means_are_refused(wrong: dict[str, float]) -> None:
    """Nothing is adopted of them."""
    means = TurnMeans()
    with pytest.raises(ValueError, match="is not from"):
        means.adopt(replace(SEEN, **wrong))
    assert means.export() == TurnMeans().export()


def test_a_count_without_end_is_refused() -> None:
    """Compiled code refuses it by its type."""
    wrong, means = {"count": inf}, TurnMeans()
    with pytest.raises((ValueError, TypeError)):
        means.adopt(replace(SEEN, **wrong))
    assert means.export() == TurnMeans().export()


# --- What a scheduler makes of it


def restarted(
    token_s: float | None = 1e-3,
    *,
    seen: TurnMeansRecord | None = SEEN,
    iteration_s: float = 0.01,
    tools_count: int = 1000,
    replicas: dict[str, int | None] | None = None,
    **settings: float,
) -> Driver:
    """A driver whose scheduler learned all this before it was restarted, and that tools take a second."""
    knowledge = Knowledge()
    for _ in range(tools_count):
        knowledge.tool_times.returned("", 1.0)
    price: tuple[ReplicaPriceRecord, ...] = ()
    if token_s is not None:
        price = (replace(known_price("r0", token_s), iteration_s=iteration_s),)
    learned: LearnedRecord = replace(knowledge.export(), replica_prices=price, turn_means=seen)
    driver = Driver(BreakEven(**settings), replicas={}, token_s=None)
    driver.send(KnowledgeLoaded(driver.now_s, "r0", learned))
    for replica_id, capacity_tokens in (replicas or {"r0": 10_000}).items():
        driver.comes_up(replica_id, capacity_tokens)
    driver.ticks()
    return driver


def limit_ratio(driver: Driver, replica_id: str = "r0") -> float:
    """Return which part of a replica's capacity may be claimed."""
    account = driver.scheduler.replicas[replica_id].account
    assert account.capacity_tokens is not None
    return account.limit_tokens / account.capacity_tokens


def test_plan_uses_at_once_what_was_learned_before_a_restart() -> None:
    """All tools together take a second: they are held a while, and no more is claimed than fits."""
    driver = restarted()
    threshold_s = driver.scheduler.view.hold_threshold_s("r0")
    assert 0.5 < threshold_s < inf
    assert driver.scheduler.knowledge.last_plan("r0").threshold_s == threshold_s
    assert limit_ratio(driver) == 1.0
    driver.takes_turn("a", 100)
    hold_s = driver.program("a").hold_until_s - driver.now_s
    assert hold_s == pytest.approx(driver.scheduler.knowledge.tool_times.hold_s("", 1.5 * threshold_s))
    assert 1.0 < hold_s < 10.0


@pytest.mark.parametrize("seen", [None, replace(SEEN, count=ENOUGH_TURNS_COUNT - 1)])
def test_before_enough_turns_nobody_is_held(seen: TurnMeansRecord | None) -> None:
    driver = restarted(seen=seen)
    assert driver.scheduler.view.hold_threshold_s("r0") == 0.0


def test_without_a_price_nobody_is_held() -> None:
    """Nothing can be predicted then, however many turns were seen."""
    driver = restarted(None)
    assert driver.scheduler.view.hold_threshold_s("r0") == 0.0


def test_turns_alone_fill_the_memory_where_holding_does_not_pay() -> None:
    """Five fit. Three more wait in the engine's own queue, so that no memory is unused there."""
    driver = restarted(1e-6)
    assert driver.scheduler.view.hold_threshold_s("r0") == 0.0
    turns = [driver.arrives(f"p{number}", 1500) for number in range(12)]
    assert [turn in driver.granted_on for turn in turns].count(True) == 8
    driver.finishes(turns[0], 1500)
    assert turns[5] in driver.granted_on


def test_programs_of_one_turn_that_say_no_end_are_not_held() -> None:
    """Nobody has come back yet: a guess of when they will would keep newcomers out."""
    driver = restarted(1e-3, tools_count=0)
    for number in range(8):
        driver.takes_turn(f"done{number}", 1000)
    assert driver.scheduler.view.hold_threshold_s("r0") == 0.0
    turns = [driver.arrives(f"p{number}", 1000) for number in range(7)]
    assert all(turn in driver.granted_on for turn in turns)


def test_nobody_is_held_where_hardly_anybody_comes_back() -> None:
    """Ten came back after a second. 200 are away for a minute, and say no end: they are as good as over."""
    driver = restarted(2e-4, tools_count=10)
    assert driver.scheduler.view.hold_threshold_s("r0") > 0.0
    for number in range(200):
        driver.takes_turn(f"done{number}", 1000)
    driver.ticks(60.0)
    assert driver.scheduler.view.hold_threshold_s("r0") == 0.0


def test_held_programs_are_held_for_less_long_if_that_is_planned_and_others_wait() -> None:
    """One was to be held for ever. Then its tool is known to take a second; without anybody waiting it stays.

    It may be another one's tool for which the new plan is made.
    """
    for others_wait, planned_at_tool in ((False, False), (True, False), (True, True)):
        driver = restarted()
        driver.keeps_busy()
        driver.plans(inf, until_s=driver.now_s + 1.0)
        driver.takes_turn("a", 6000)
        waits = driver.arrives("b", 6000) if others_wait else None
        driver.passes(2.0)
        if planned_at_tool:
            driver.takes_turn("c", 10)
        driver.ticks()
        threshold_s = driver.scheduler.view.hold_threshold_s("r0")
        assert 0.5 < threshold_s < inf
        held_s = driver.program("a").hold_until_s - driver.program("a").acting_since_s
        if waits is None:
            assert held_s == LONGEST_HOLD_S
            continue
        assert held_s == pytest.approx(driver.scheduler.knowledge.tool_times.hold_s("", 1.5 * threshold_s))
        driver.ticks(held_s)
        assert waits in driver.granted_on


def test_a_hint_is_not_taken_back_when_less_is_planned() -> None:
    """The client said when its next turn comes."""
    driver = restarted(hint_ratio=1.0)
    driver.keeps_busy()
    driver.plans(inf, until_s=driver.now_s + 1.0)
    driver.takes_turn("a", 6000)
    driver.is_hinted("a", 100.0)
    until_s = driver.program("a").hold_until_s
    driver.arrives("b", 6000)
    driver.ticks(2.0)
    assert driver.program("a").hold_until_s == until_s


def test_a_plan_stays_for_a_while() -> None:
    """It is made anew when it is outdated, and not before."""
    driver = restarted(1e-6)
    assert driver.scheduler.view.hold_threshold_s("r0") == 0.0
    driver.scheduler.knowledge.prices.adopt((replace(known_price("r0", 1e-3), iteration_s=0.01),))
    driver.ticks(REFRESH_S - 0.1)
    assert driver.scheduler.view.hold_threshold_s("r0") == 0.0
    driver.ticks(0.2)
    assert driver.scheduler.view.hold_threshold_s("r0") > 0.0


def test_each_replica_has_a_plan_of_its_own() -> None:
    """One that is unknown, or was removed, has none."""
    driver = restarted(replicas={"r0": 10_000, "r1": 10_000})
    driver.scheduler.knowledge.prices.adopt((replace(known_price("r1", 1e-6), iteration_s=0.01),))
    driver.ticks(REFRESH_S)
    view = driver.scheduler.view
    assert view.hold_threshold_s("r0") > 0.0 == view.hold_threshold_s("r1")
    driver.is_removed("r0")
    assert view.hold_threshold_s("r0") == view.hold_threshold_s(None) == view.hold_threshold_s("never was") == 0.0
    assert driver.scheduler.knowledge.last_plan("r0") == NOTHING_HELD


def test_turns_and_ends_are_learned_from() -> None:
    """A driver that saw nothing plans after some turns of its own."""
    driver = restarted(seen=None)
    for number in range(ENOUGH_TURNS_COUNT):
        driver.finishes(driver.arrives(f"p{number % 4}", 1000), 1000, 10)
        driver.passes(1.0)
    driver.ticks(REFRESH_S)
    assert driver.scheduler.knowledge.last_plan("r0").turns_per_s > 0.0
    driver.releases_all("p0", "p1")
    means = driver.scheduler.knowledge.turn_means
    assert (means.count, means.program_count, means.program_turn_count) == (ENOUGH_TURNS_COUNT, 2, 4.0)


# --- Nothing is learned of the size while more is let in than fits


def loses_half(driver: Driver) -> None:
    """Let a program find half of what it kept, turn by turn for a while."""
    for _ in range(40):
        driver.finishes(driver.arrives("loses", 400), 400, 0, 200)
        driver.ticks(0.5)


def test_where_programs_may_exceed_the_memory_losses_say_nothing_of_the_size() -> None:
    """Nothing is held there: the engine evicts what nobody claims for long. Once programs are held, losses count."""
    driver = Driver(BreakEven(reserve_tokens=0), replicas={"r0": 1000}, threshold_s=20.0)
    plans = driver.scheduler.knowledge._plans
    plans["r0"] = (inf, HoldingPlan(0.0, 1.0, 1.0, may_overfill=True))
    loses_half(driver)
    assert limit_ratio(driver) == driver.scheduler.knowledge.corrections["r0"].ratio == 1.0
    plans["r0"] = (inf, HoldingPlan(20.0, 1.0, 1.0))
    loses_half(driver)
    assert limit_ratio(driver) == (corrected := driver.scheduler.knowledge.corrections["r0"].ratio) < 0.9
    plans["r0"] = (inf, HoldingPlan(0.0, 1.0, 1.0, may_overfill=True))
    driver.ticks(1.0)
    assert (limit_ratio(driver), driver.scheduler.knowledge.corrections["r0"].ratio) == (1.0, corrected)


def test_while_claims_are_far_above_the_limit_losses_say_nothing_of_the_size() -> None:
    """An engine that came back smaller has more turns than fit; it takes time until some end."""
    driver = Driver(BreakEven(reserve_tokens=0), replicas={"r0": 1600}, threshold_s=20.0)
    turns = [driver.arrives(f"p{number}", 300) for number in range(5)]
    assert not any(driver.held(turn) for turn in turns)
    driver.comes_up("r0", 1000)
    loses_half(driver)
    assert limit_ratio(driver) == driver.scheduler.knowledge.corrections["r0"].ratio == 1.0
    for turn in turns:
        driver.finishes(turn, 300)
    driver.releases_all(*(f"p{number}" for number in range(5)))
    loses_half(driver)
    assert limit_ratio(driver) == driver.scheduler.knowledge.corrections["r0"].ratio < 0.9
