"""ORBIT's priorities: fewer turns first, or a judge's verdict; then shorter answers; then order of arrival."""

from __future__ import annotations

import pytest

from tests.builders import Driver
from thunderagent.errors import ConfigurationError
from thunderagent.policy_loader import load_policy
from thunderagent.programs.messages import Grant
from thunderagent.programs.policies.papers.orbit import MAX_LENGTH_TOKENS, MAX_LEVEL_COUNT, OrbitStep

STEP = 1 << 16


def driver_of(name: str, **settings: int) -> Driver:
    more = {f"{kind}.{key}": value for key, value in settings.items() for kind in ("order", "priority")}
    return Driver(load_policy("cap", {"n": 1, "order": name, "priority": name} | more), replicas={"r0": 10_000})


def priority_of(driver: Driver, turn_id: int) -> int | None:
    granted = [each for _, decisions in driver.events for each in decisions if isinstance(each, Grant)]
    return next(grant.engine_priority for grant in granted if grant.turn_id == turn_id)


def test_every_ten_turns_of_the_whole_program_are_a_step() -> None:
    """Branches count together; the turn itself does not count yet."""
    driver = driver_of("orbit-step")
    priorities = [
        priority_of(driver, driver.takes_turn("a", 10, branch=branch)) for branch in ["", "x", "y", "z", "x"] * 5
    ]
    assert priorities == [0] * 10 + [STEP] * 10 + [2 * STEP] * 5


def test_the_window_is_a_setting() -> None:
    """Here it is two turns."""
    driver = driver_of("orbit-step", window_count=2)
    assert [priority_of(driver, driver.takes_turn("a", 10)) for _ in range(4)] == [0, 0, STEP, STEP]


@pytest.mark.parametrize("name", ["orbit-step", "orbit-judge"])
def test_a_window_of_nothing_is_refused(name: str) -> None:
    """Both refuse it."""
    with pytest.raises(ConfigurationError, match="window_count must be a whole number, at least 1"):
        load_policy("cap", {"order": name, "order.window_count": 0})


def test_shorter_answers_go_first_within_a_step() -> None:
    """The learned mean of the role counts; a step weighs more than any length."""
    driver = driver_of("orbit-step")
    driver.finishes(driver.arrives("a", 10, role="planner"), 10, 400)
    driver.finishes(driver.arrives("a", 10, role="browser"), 10, 50)
    assert priority_of(driver, driver.takes_turn("a", 10, branch="planner")) == 400
    long = driver.arrives("b", 10, role="planner")
    short = driver.arrives("c", 10, role="browser")
    also_short = driver.arrives("d", 10, role="browser")
    order = []
    for program_id in ("a", "c", "d", "b"):
        granted = [each.turn_id for each in driver.releases(program_id) if isinstance(each, Grant)]
        order += granted
        for turn_id in granted:
            driver.finishes(turn_id, 10)
    assert order == [short, also_short, long]


def test_program_with_more_turns_waits_behind_one_with_fewer() -> None:
    """This holds in the paused queue and in the engine."""
    driver = driver_of("orbit-step")
    for _ in range(12):
        driver.takes_turn("old", 10)
    driver.is_judged("old", will_succeed=True)
    driver.ticks(301.0)  # its tool takes longer than the idle limit
    driver.arrives("holder", 10)
    again, new = driver.arrives("old", 10), driver.arrives("new", 10)
    assert not {again, new} & set(driver.granted_on)
    driver.releases("holder")
    assert new in driver.granted_on
    assert again not in driver.granted_on


def test_verdicts_take_the_place_of_steps() -> None:
    """Until a verdict comes, steps count; then the level does, whatever the turns."""
    driver = driver_of("orbit-judge")
    for _ in range(30):
        driver.takes_turn("a", 10)
    assert priority_of(driver, driver.takes_turn("a", 10)) == 3 * STEP
    driver.is_judged("a", will_succeed=True)
    assert priority_of(driver, driver.takes_turn("a", 10)) == 0
    for number, expected in enumerate([1, *[2] * 9, 3, 3]):
        driver.is_judged("a", will_succeed=False, at_turn=32 + number)
        assert priority_of(driver, driver.takes_turn("a", 10)) == expected * STEP


def test_a_verdict_moves_who_waits() -> None:
    """It acts at once: the next place goes to a program that is expected to succeed."""
    driver = driver_of("orbit-judge")
    driver.takes_turn("doubtful", 10)
    driver.ticks(301.0)  # its tool takes longer than the idle limit
    driver.takes_turn("holder", 10)
    first, second = driver.arrives("doubtful", 10), driver.arrives("other", 10)
    assert not {first, second} & set(driver.granted_on)
    assert [program.program_id for program in driver.scheduler.queue.waiting.order] == ["doubtful", "other"]
    driver.is_judged("doubtful", will_succeed=False)
    assert [program.program_id for program in driver.scheduler.queue.waiting.order] == ["other", "doubtful"]
    driver.releases("holder")
    assert second in driver.granted_on


def test_numbers_fit_into_what_engines_take() -> None:
    """They have 31 bits, however many turns and tokens there are."""
    driver = Driver()
    driver.finishes(driver.arrives("a", 10, role="r"), 10, 10**7)
    driver.arrives("a", 10, role="r")
    program = driver.program("a")
    program.turn_count = 10**9
    encoded = OrbitStep(1).restore_rank(program)
    assert encoded == (MAX_LEVEL_COUNT << 16) + MAX_LENGTH_TOKENS == 2**31 - 1
