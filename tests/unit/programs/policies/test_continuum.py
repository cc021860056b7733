"""`continuum`: the time to live of Eq. 2, the times that it learns from, and the order of programs."""

from __future__ import annotations

from math import e, exp, log

import pytest

from tests.builders import Driver, of_kind
from thunderagent.errors import ConfigurationError
from thunderagent.policy_loader import load_policy
from thunderagent.programs.messages import Grant, Pause, Reason
from thunderagent.programs.policies.papers.continuum import (
    DELAYS_COUNT,
    DURATIONS_COUNT,
    Continuum,
    Durations,
    Memoryfulness,
    best_ttl_s,
    cold_ttl_s,
)

PREFILL_TOKEN_S = 5e-5


def driver_with(**settings: float) -> Driver:
    policy = Continuum(reserve_tokens=0, prefill_token_s=PREFILL_TOKEN_S, **settings)  # type: ignore[arg-type]
    return Driver(policy, replicas={"r0": 100_000})


def pinned_s(driver: Driver, program_id: str) -> float:
    program = driver.program(program_id)
    return program.hold_until_s - program.acting_since_s


def takes_turns(driver: Driver, program_id: str, durations_s: list[float], tool: str, tokens: int = 100) -> None:
    """Take one turn more than there are durations, each of which is that of a tool."""
    driver.takes_turn(program_id, tokens, tool=tool)
    for duration_s in durations_s:
        driver.passes(duration_s)
        driver.takes_turn(program_id, tokens, tool=tool)


def test_the_time_to_live_maximises_benefit_less_cost() -> None:
    """For 1, 2 and 10 s with B = 4 s: 1/3, 2/3 and 1 of 4, less the times, are 0.33, 0.67 and -6."""
    assert best_ttl_s([1.0, 2.0, 10.0], 4.0) == 2.0
    assert best_ttl_s([1.0, 2.0, 10.0], 40.0) == 10.0
    assert best_ttl_s([1.0, 2.0, 10.0], 3.0) == 0.0  # 1/3 · 3 - 1 is no gain
    assert best_ttl_s([1.0, 1.0, 1.0], 1.5) == 1.0
    assert best_ttl_s([], 4.0) == 0.0
    assert best_ttl_s([0.5], -1.0) == 0.0


def test_the_cold_start_of_the_paper_is_ln_b() -> None:
    """The 2 s of the authors' code are the best for B = e², better than the times beside it."""
    assert cold_ttl_s(e**2) == pytest.approx(2.0)
    assert cold_ttl_s(1.0) == cold_ttl_s(0.3) == 0.0

    def reward_s(ttl_s: float) -> float:
        return (1 - exp(-ttl_s)) * 5.0 - ttl_s

    assert reward_s(cold_ttl_s(5.0)) > max(reward_s(cold_ttl_s(5.0) + step_s) for step_s in (-0.1, 0.1))


def test_eta_is_one_for_equal_programs_and_none_where_turns_are_memoryless() -> None:
    """It is below 0 if many turns done mean many to come."""
    equal, geometric, heavy = Memoryfulness(), Memoryfulness(), Memoryfulness()
    assert equal.eta == 1.0
    equal.add(1)
    assert equal.eta == 1.0
    for _ in range(3):
        equal.add(10)
    for turn_count in range(1, 14):
        for _ in range(2 ** (13 - turn_count)):
            geometric.add(turn_count)
    for turn_count in [*[2] * 50, 400]:
        heavy.add(turn_count)
    assert equal.eta == pytest.approx(0.9, abs=0.15)
    assert geometric.eta == pytest.approx(0.0, abs=0.02)
    fixed = Memoryfulness()
    fixed.add(10)
    assert fixed.eta == pytest.approx(1.0)
    mixed = Memoryfulness()
    pairs = [(turn, count - turn) for count in (3, 5) for turn in range(1, count + 1)]
    mixed.add(3)
    mixed.add(5)
    assert mixed.eta == pytest.approx(-_correlation(pairs))


def _correlation(pairs: list[tuple[int, int]]) -> float:
    done_mean = sum(done for done, _ in pairs) / len(pairs)
    left_mean = sum(left for _, left in pairs) / len(pairs)
    together = sum((done - done_mean) * (left - left_mean) for done, left in pairs)
    done_spread = sum((done - done_mean) ** 2 for done, _ in pairs)
    left_spread = sum((left - left_mean) ** 2 for _, left in pairs)
    return float(together / (done_spread * left_spread) ** 0.5)


def test_durations_are_forgotten_the_oldest_first() -> None:
    """Only the newest are kept; the mean is of all."""
    durations = Durations()
    for number in range(DURATIONS_COUNT + 2):
        durations.add(float(number))
    assert len(durations.sorted_s) == DURATIONS_COUNT
    assert durations.sorted_s[0] == 2.0
    assert durations.mean_s == pytest.approx((DURATIONS_COUNT + 1) / 2)
    assert Durations().mean_s == 0.0


def test_the_fixed_time_is_two_seconds_and_slow_tools_get_none() -> None:
    """The authors' code does that: 2 s also for an unknown tool, and none where the mean is over 2 s."""
    driver = driver_with(dynamic=False)
    takes_turns(driver, "a", [1.0, 1.5], "quick")
    assert pinned_s(driver, "a") == 2.0
    assert driver.ticks(1.9) == []
    assert driver.ticks(0.2) == [Pause("a", "r0", Reason.EXPIRED)]
    takes_turns(driver, "b", [1.0, 4.0], "slow")
    assert of_kind(Pause, driver.decisions) == ["b"]
    assert load_policy("continuum-fixed", {}).name == "continuum-fixed"


def test_a_cold_start_pins_for_the_constant_or_by_the_formula() -> None:
    """Until more than 100 times are known it is 2 s, or ln B, which is zero for 100 tokens and no delay."""
    driver = driver_with()
    takes_turns(driver, "a", [0.5] * 99, "make")
    assert pinned_s(driver, "a") == 2.0
    by_formula = driver_with(cold_formula=True)
    by_formula.takes_turn("a", 100, tool="make")
    assert of_kind(Pause, by_formula.decisions) == ["a"]
    by_formula.takes_turn("b", 90_000, tool="make")
    assert pinned_s(by_formula, "b") == pytest.approx(log(90_000 * PREFILL_TOKEN_S))


def test_known_tools_are_pinned_by_their_own_times_and_others_by_all() -> None:
    """With B = 60,000 tokens · 5e-5 s = 3 s quick tools return within 0.5 s; slow ones take 50 s and are not held."""
    driver = driver_with(cold_count=2)
    takes_turns(driver, "a", [0.5] * 3, "quick", tokens=60_000)
    assert pinned_s(driver, "a") == pytest.approx(0.5)
    driver.releases("a")
    takes_turns(driver, "b", [50.0] * 2, "slow", tokens=60_000)
    assert pinned_s(driver, "b") == pytest.approx(0.5)  # by all, of which three in five return
    driver.passes(50.0)
    driver.takes_turn("b", 60_000, tool="slow")
    assert of_kind(Pause, driver.decisions) == ["b"]


def test_the_delay_of_who_lost_its_memory_is_worth_holding_for() -> None:
    """T: a turn of a paused program waited 8 s for room, so holding 8 s longer pays; before that T is 0."""
    policy = Continuum(reserve_tokens=0, prefill_token_s=PREFILL_TOKEN_S, ttl_s=0.0)
    driver = Driver(policy, replicas={"r0": 1000})
    driver.takes_turn("a", 600)
    blocker = driver.arrives("blocker", 900)
    driver.passes(3.0)
    waiting = driver.arrives("a", 600)
    assert driver.held(waiting)
    view = driver.scheduler.view
    assert policy.benefit_s(view, driver.program("a")) == pytest.approx(600 * PREFILL_TOKEN_S)
    driver.passes(8.0)
    driver.finishes(blocker, 900)
    assert not driver.held(waiting)
    assert policy.benefit_s(view, driver.program("a")) == pytest.approx(8.0 + 600 * PREFILL_TOKEN_S)
    assert policy._delays_s.maxlen == DELAYS_COUNT
    driver.finishes(waiting, 600)
    for turn_count in (1, 40):
        for _ in range(turn_count):
            driver.passes(1.0)
            driver.takes_turn("c", 10)
        driver.releases("c")
    eta = Memoryfulness()
    eta.add(1)
    eta.add(40)
    expected_s = sum(policy._delays_s) / len(policy._delays_s) * eta.eta
    assert policy.benefit_s(view, driver.program("a")) == pytest.approx(expected_s + 600 * PREFILL_TOKEN_S)


def test_programs_are_served_as_they_came_also_by_engines() -> None:
    """Waiting programs are restored by age, the youngest is paused first, and the priority is the age."""
    driver = Driver(Continuum(ttl_s=100.0, reserve_tokens=0), replicas={"r0": 1000})
    driver.takes_turn("first", 400)
    driver.passes(1.0)
    driver.takes_turn("second", 400)
    turn_id = driver.arrives("third", 200)
    grant = next(decision for decision in driver.decisions if isinstance(decision, Grant))
    assert grant.engine_priority == 1010
    assert of_kind(Pause, driver.progresses(turn_id, 100) + driver.ticks(0.1)) == ["second"]


def test_pins_do_not_let_a_replica_stand_still() -> None:
    """If nothing runs and the head of the queue does not fit, the latest arrivals are unpinned until it fits."""
    driver = Driver(Continuum(ttl_s=100.0, reserve_tokens=0), replicas={"r0": 1000})
    for program_id in ("first", "second", "third"):
        driver.takes_turn(program_id, 300)
        driver.passes(1.0)
    waiting = driver.arrives("waiting", 500)
    assert driver.held(waiting)
    assert of_kind(Pause, driver.ticks(0.1)) == ["third", "second"]
    assert not driver.held(waiting)
    driver.takes_turn("first", 300)
    later = driver.arrives("later", 600)
    driver.ticks(0.1)
    assert driver.held(later)  # a turn runs: its pin stays
    assert driver.home("first") == "r0"


@pytest.mark.parametrize("setting", ["ttl_s", "cold_count", "prefill_token_s", "reserve_tokens"])
def test_negative_settings_are_refused(setting: str) -> None:
    """The error has the name of the setting."""
    with pytest.raises(ConfigurationError, match=setting):
        Continuum(**{setting: -1})  # type: ignore[arg-type]


def test_memory_of_tools_is_bounded() -> None:
    """The names that were unused for longest are forgotten."""
    policy = Continuum()
    for number in range(300):
        policy._tool_ended(f"tool-{number}", 1.0)
    policy._tool_ended("tool-299", 3.0)
    assert len(policy._by_tool) == 256
    assert policy._by_tool["tool-299"].mean_s == 2.0


def test_a_turn_that_was_left_while_it_was_held_is_no_delay() -> None:
    """Only the hold of a granted turn counts, not the time since the arrival of an abandoned one."""
    policy = Continuum(reserve_tokens=0, prefill_token_s=PREFILL_TOKEN_S)
    driver = Driver(policy, replicas={"r0": 1000})
    driver.takes_turn("a", 600)
    driver.ticks(500.0)
    assert driver.home("a") is None
    other = driver.arrives("b", 900)
    left = driver.arrives("a", 600)
    assert driver.held(left)
    driver.passes(10.0)
    driver.is_abandoned(left)
    driver.passes(1000.0)
    again = driver.arrives("a", 600)
    driver.passes(7.0)
    driver.finishes(other, 900)
    driver.releases("b")
    assert again in driver.granted_on
    assert list(policy._delays_s) == [pytest.approx(7.0)]
