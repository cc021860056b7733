"""What the scheduler learns from events, and what it ignores."""

from __future__ import annotations

from dataclasses import dataclass
from math import inf

import pytest

from tests.builders import Driver, known_price
from thunderagent.policy_loader import load_policy
from thunderagent.programs.messages import SchedulerSettings, TurnUnverified
from thunderagent.programs.policies.baselines.passthrough import Passthrough
from thunderagent.programs.policy import ClaimRules

LEARNING = ClaimRules(growth_quantile=0.75, reserve_tokens=100, share_prefixes=True)


@dataclass(frozen=True)
class Claiming(Passthrough):
    """Admits all programs, with the claim rules that a test sets."""

    rules: ClaimRules = LEARNING

    @property
    def claim_rules(self) -> ClaimRules:
        return self.rules


def driver_with(capacity_tokens: int | None = 100_000, **rules: object) -> Driver:
    policy = Claiming(ClaimRules(**rules)) if rules else Claiming()
    settings = SchedulerSettings(idle_limit_s=1e6, forget_limit_s=1e7)
    return Driver(policy, replicas={"r0": capacity_tokens}, settings=settings)


def seen(driver: Driver, name: str) -> tuple[float, float, float]:
    """Of a tool: the number of returns and of pauses, and its rate at the begin."""
    table = driver.scheduler.knowledge.tool_times._by_name.get(name)
    return (sum(table.returned), sum(table.away), table.count) if table is not None else (0.0, 0.0, 0.0)


# --- Tools


def test_a_tool_is_learned_when_its_program_comes_back() -> None:
    """The turn before gave its name, and the time between the two turns is its time."""
    driver = driver_with()
    driver.takes_turn("a", 100, tool="ls")
    assert seen(driver, "ls") == (0, 0, 0)
    driver.passes(7.0)
    driver.arrives("a", 120)
    assert seen(driver, "ls") == (1, 0, 1)
    assert driver.program("a").away_s == pytest.approx(7.0)


def test_a_first_turn_tells_of_no_tool() -> None:
    """No program was away."""
    driver = driver_with()
    driver.arrives("a", 100)
    assert len(driver.scheduler.knowledge.tool_times) == 0


@pytest.mark.parametrize("end", ["fails", "is_abandoned"])
def test_a_turn_that_is_tried_again_tells_of_no_tool(end: str) -> None:
    """Neither this turn nor the next comes back from a tool."""
    driver = driver_with()
    driver.takes_turn("a", 100, tool="ls")
    driver.passes(7.0)
    turn = driver.arrives("a", 120)
    getattr(driver, end)(turn)
    for _ in range(3):
        driver.passes(1.0)
        getattr(driver, end)(driver.arrives("a", 120))
    assert seen(driver, "ls") == (1, 0, 1)
    assert len(driver.scheduler.knowledge.tool_times) == 1


def test_a_turn_beside_another_tells_of_no_tool() -> None:
    """The program was not away."""
    driver = driver_with()
    driver.takes_turn("a", 100, tool="ls")
    driver.arrives("a", 120)
    driver.arrives("a", 120)
    assert seen(driver, "ls") == (1, 0, 1)


def test_a_program_that_ends_in_its_tool_was_away_until_then() -> None:
    """That shows nothing about later."""
    driver = driver_with()
    driver.takes_turn("a", 100, tool="ls")
    driver.passes(7.0)
    driver.releases("a")
    assert seen(driver, "ls") == (0, 1, 1)


def test_a_program_that_ends_in_a_turn_tells_of_no_tool() -> None:
    """It was back already."""
    driver = driver_with()
    driver.takes_turn("a", 100, tool="ls")
    driver.arrives("a", 120)
    driver.releases("a")
    assert seen(driver, "ls") == (1, 0, 1)


def test_a_program_that_is_paused_and_comes_back_counts_once() -> None:
    """First it counts as one that was away until then, in the end as one that returned."""
    driver = driver_with()
    driver.takes_turn("a", 100, tool="ls")
    driver.passes(2.0)
    driver.drains("r0")
    assert seen(driver, "ls") == (0, 1, 1)
    driver.comes_up("r0", 100_000)
    driver.passes(5.0)
    driver.arrives("a", 120)
    assert seen(driver, "ls") == (1, 0, 1)
    assert driver.program("a").away_s == pytest.approx(7.0)


def test_a_program_that_is_paused_and_ends_was_away_until_it_was_paused() -> None:
    """It is not counted a second time."""
    driver = driver_with()
    driver.takes_turn("a", 100, tool="ls")
    driver.passes(2.0)
    driver.drains("r0")
    driver.passes(5.0)
    driver.releases("a")
    assert seen(driver, "ls") == (0, 1, 1)


# --- Residence, prefill, capacity


def test_the_median_residence_is_that_of_programs_that_ended() -> None:
    """It is infinite before the first end; programs without a turn do not count."""
    driver = driver_with()
    knowledge = driver.scheduler.knowledge
    for name in ("a", "b", "c"):
        driver.takes_turn(name, 100)
    assert knowledge.median_residence_s == inf
    driver.passes(60.0)
    for name in ("a", "b", "c"):
        driver.takes_turn(name, 100)
    driver.releases_all("a", "b", "c")
    assert 40.0 < knowledge.median_residence_s < 90.0


def test_the_median_residence_does_not_count_the_forget_limit() -> None:
    """An unreleased program is forgotten half an hour after its last turn: only the time of its turns counts."""
    driver = Driver()
    for name in ("a", "b", "c"):
        driver.takes_turn(name, 100)
        driver.passes(10.0)
        driver.takes_turn(name, 100)
    driver.ticks(5000.0)
    assert len(driver.scheduler.programs) == 0
    assert 5.0 < driver.scheduler.knowledge.median_residence_s < 20.0


def test_the_break_even_is_the_time_to_prefill_a_replica_s_own_memory() -> None:
    """It is 0 until a capacity is known; a replica of unknown size has that of the largest open one.

    A replica that has shown no price is held for half of what its siblings' say.
    """
    driver = driver_with(None)
    scheduler = driver.scheduler
    assert scheduler.view.break_even_s("r0") == 0
    teach = driver.scheduler.knowledge.prices.adopt
    teach([known_price(each, 5e-5) for each in ("r1", "r2")])
    driver.comes_up("r1", 100_000)
    driver.comes_up("r2", 40_000)
    expected_s = {"r0": 5.0, "r1": 5.0, "r2": 2.0, None: 5.0, "never-was": 2.5}
    assert {each: scheduler.view.break_even_s(each) for each in expected_s} == pytest.approx(expected_s)
    driver.goes_down("r1")
    assert scheduler.view.break_even_s("r0") == scheduler.view.break_even_s(None) == pytest.approx(2.0)
    driver.is_removed("r2")
    assert scheduler.view.break_even_s("r0") == 0


def test_the_break_even_is_that_of_the_memory_that_there_really_is() -> None:
    """A capacity that was reported twice too large would hold programs twice too long."""
    driver = driver_with(None)
    driver.comes_up("r1", 100_000)
    scheduler = driver.scheduler
    scheduler.knowledge.prices.adopt((known_price("r1", 5e-5),))
    scheduler.replicas["r1"].account.set_limit(100_000, 0.5)
    assert scheduler.view.break_even_s("r1") == scheduler.view.break_even_s(None) == pytest.approx(2.5)


def test_a_small_replica_holds_by_its_own_plan() -> None:
    """The other one is ten times as large, and what it loses is worth more."""
    driver = Driver(load_policy("breakeven", {"reserve_tokens": 0}), replicas={"small": 10_000, "large": 100_000})
    driver.plans(2.0, "small")
    driver.plans(20.0, "large")
    held_s = {}
    for name in ("a", "b"):
        driver.takes_turn(name, 100, tool="ls")
        program = driver.program(name)
        held_s[program.replica_id] = program.hold_until_s - driver.now_s
    driver.routes("program", "b", small=1)
    driver.passes(0.01)
    driver.takes_turn("b", 100, tool="ls")
    program = driver.program("b")
    held_s[program.replica_id] = program.hold_until_s - driver.now_s
    assert held_s["small"] < held_s["large"]


def test_prefill_is_learned_from_what_was_not_cached() -> None:
    """Of 10,000 tokens 8,000 and more were cached; the others took a tenth of a millisecond each."""
    driver = driver_with()
    for number in range(16):
        turn = driver.arrives(f"p{number}", 10_000)
        driver.passes(0.2 - 0.01 * number)
        driver.starts(turn)
        driver.passes(3.0)
        driver.finishes(turn, 10_000, 200, 8000 + 100 * number)
    assert driver.scheduler.knowledge.prices.of("r0").token_s == pytest.approx(1e-4, rel=0.2)


def test_an_engine_that_does_not_say_what_was_cached_is_taken_to_have_what_is_resident() -> None:
    """A program's second turn finds its first prompt; a first turn finds nothing, whatever its prefix."""
    driver = driver_with()
    turn = driver.arrives("a", 400, prefix={"system": 300})
    assert driver.scheduler.turns[turn].resident_tokens == 0
    driver.finishes(turn, 400, 20)
    turn = driver.arrives("a", 500, prefix={"system": 300})
    assert driver.scheduler.turns[turn].resident_tokens == 420
    turn = driver.arrives("b", 500, prefix={"system": 300})
    assert driver.scheduler.turns[turn].resident_tokens == 300


# --- Claims


def test_a_claim_holds_what_the_next_turn_is_expected_to_add() -> None:
    """At first that is the reserve, then the most that three in four turns added."""
    driver = driver_with(growth_quantile=0.75, reserve_tokens=100)
    turn = driver.arrives("a", 400)
    assert driver.demand() == 500
    driver.finishes(turn, 400, 20)
    assert driver.program("a").claim_tokens == 420 + 100
    for tokens in range(600, 3000, 200):
        driver.finishes(driver.arrives("a", tokens), tokens, 20)
    reserve_tokens = driver.program("a").reserve_tokens
    assert 140 <= reserve_tokens <= 290
    assert driver.demand() == 2800 + 20 + reserve_tokens


def test_a_claim_in_flight_holds_what_the_answer_is_expected_to_be() -> None:
    """It holds less of it the more was generated: the claim grows only beyond that."""
    driver = driver_with(growth_quantile=0.75, reserve_tokens=100)
    for number in range(20):
        driver.finishes(driver.arrives(f"p{number}", 200), 200, 64)
        driver.releases(f"p{number}")
    turn = driver.arrives("a", 400)
    expected_tokens = driver.demand() - 400
    assert 45 <= expected_tokens <= 91
    driver.progresses(turn, output=40)
    assert driver.demand() == 400 + expected_tokens
    driver.progresses(turn, output=500)
    assert driver.demand() == 900


def test_without_a_quantile_the_reserve_stays() -> None:
    """The policies of the paper use it this way."""
    driver = driver_with(reserve_tokens=100)
    for tokens in (400, 800, 1600):
        driver.finishes(driver.arrives("a", tokens), tokens, 50)
    assert driver.demand() == 1650 + 100


def test_a_failed_turn_teaches_no_growth() -> None:
    """Nothing is learned from it."""
    driver = driver_with()
    driver.takes_turn("a", 400)
    for _ in range(5):
        driver.fails(driver.arrives("a", 4000))
    assert driver.scheduler.knowledge.growth.turn_tokens(0.75, 77) == 77


def test_turns_that_teach_nothing_leave_the_mean_size_of_programs_as_it_is() -> None:
    """Failed turns and those that only a stranger tells of do not count, and neither do programs that had no others."""
    driver = driver_with()
    growth = driver.scheduler.knowledge.growth
    for number in range(10):
        program_id = f"p{number}"
        for tokens in (1000, 3000) if number < 5 else ():
            driver.takes_turn(program_id, tokens)
        for _ in range(3):
            driver.fails(driver.arrives(program_id, 3000))
            turn_id = driver.arrives(program_id, 3000)
            driver.send(TurnUnverified(driver.now_s, turn_id))
            driver.finishes(turn_id, 3000)
        driver.releases(program_id)
        assert (growth.whole_tokens == inf) == (number < 4)
    assert growth.whole_tokens == pytest.approx(1000)


# --- What strangers report


@pytest.mark.parametrize("verified", [True, False])
def test_a_turn_that_only_a_stranger_tells_of_changes_nothing_that_all_share(*, verified: bool) -> None:
    """Repeated reports of no cached tokens lower no capacity, and teach no speed, size or tool time."""
    driver = driver_with(adapt_capacity=True)
    knowledge = driver.scheduler.knowledge
    for _ in range(40):
        turn_id = driver.arrives("liar", 4000)
        if not verified:
            driver.send(TurnUnverified(driver.now_s, turn_id))
        driver.passes(1.0)
        driver.starts(turn_id)
        driver.finishes(turn_id, 8000, 100, 0, tool="ls")
        driver.ticks(1.0)
    assert (knowledge.corrections["r0"].ratio < 1.0) == verified
    assert (knowledge.prices.turn_count("r0") > 0) == verified
    assert (knowledge.tokens_per_byte_ratio > 0.25) == verified
    assert (seen(driver, "ls")[0] > 0) == verified
    assert driver.program("liar").context_tokens == 8100
