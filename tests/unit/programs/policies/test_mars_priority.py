"""`mars`, the engine priority and the order: levels by tokens to compute and past service, and promotion."""

from __future__ import annotations

import pytest

from tests.builders import Driver
from thunderagent.errors import ConfigurationError
from thunderagent.policy_loader import load_policy
from thunderagent.programs.messages import Grant
from thunderagent.programs.policies.papers.mars_priority import MarsOrder, MarsPriority, level_of


def priority_of(driver: Driver, turn_id: int) -> int | None:
    """The engine's priority of a turn."""
    grants = [each for _, decisions in driver.events for each in decisions if isinstance(each, Grant)]
    return next(grant.engine_priority for grant in grants if grant.turn_id == turn_id)


def driver_with(**settings: float) -> Driver:
    chosen = {f"priority.{name}": value for name, value in settings.items()}
    return Driver(load_policy("passthrough", {"priority": "mars", **chosen}), replicas={"r0": 200_000})


@pytest.mark.parametrize(
    ("tokens", "level"), [(0, 0), (2048, 0), (2049, 1), (8192, 1), (8193, 2), (32_768, 2), (32_769, 3), (10**9, 3)]
)
def test_the_levels_are_those_of_the_authors_code(tokens: int, level: int) -> None:
    """Each level reaches to four times as many tokens as the one before."""
    assert level_of(tokens) == level


def test_a_warm_return_is_at_the_highest_level_however_long_its_history() -> None:
    """Only tokens that are still to be computed count; after enough time none of them counts as service."""
    driver = driver_with()
    assert priority_of(driver, driver.takes_turn("a", 50_000)) == 3
    driver.passes(31.0)
    assert priority_of(driver, driver.arrives("a", 50_500)) == 0


def test_recently_served_program_goes_behind() -> None:
    """A quarter of the window's tokens counts; after the window none does."""
    driver = driver_with()
    driver.takes_turn("a", 50_000)
    driver.passes(1.0)
    assert priority_of(driver, driver.arrives("a", 50_500)) == 2  # 12,500
    calm = driver_with(window_s=0.0)
    calm.takes_turn("a", 50_000)
    calm.passes(1.0)
    assert priority_of(calm, calm.arrives("a", 50_500)) == 0


def test_failed_turn_counts_what_it_computed() -> None:
    """It took the engine's time, too."""
    driver = driver_with()
    driver.fails(driver.arrives("a", 50_000))
    driver.passes(1.0)
    assert priority_of(driver, driver.arrives("a", 5000)) == 2


def test_waiting_program_rises_a_level_per_promotion_time() -> None:
    """It rises to level 0 at most, so the wait of the lowest level is bounded."""
    driver = driver_with()
    driver.suspends()
    turn_id = driver.arrives("a", 50_000)
    driver.passes(65.0)
    driver.goes_on()
    assert priority_of(driver, turn_id) == 1
    driver.finishes(turn_id, 50_000)
    driver.passes(40.0)
    driver.suspends()
    turn_id = driver.arrives("a", 190_000)
    driver.passes(29.0)
    driver.goes_on()
    assert priority_of(driver, turn_id) == 3


def test_programs_that_were_served_are_forgotten() -> None:
    """The kept state is bounded by the programs that were served in the window."""
    driver = driver_with()
    for number in range(50):
        driver.takes_turn(f"p{number}", 100)
        driver.releases(f"p{number}")
        driver.passes(10.0)
    priority = driver.scheduler.policy.priority  # type: ignore[attr-defined]
    assert len(priority._served) <= 4
    assert len(priority._served_tokens) <= 4


def test_the_order_is_the_begin_of_the_wait_and_a_time_for_each_level() -> None:
    """A small turn passes a large one that waits for less than the difference of their levels."""
    settings = {"order": "mars", "ttl_s": 100.0, "reserve_tokens": 0}
    driver = Driver(load_policy("ttl", settings), replicas={"r0": 60_000})
    driver.takes_turn("first", 59_000)
    large = driver.arrives("large", 50_000)
    driver.passes(20.0)
    small = driver.arrives("small", 2000)
    waiting = [program.program_id for program in driver.scheduler.queue.waiting.order]
    assert waiting == ["small", "large"]
    driver.passes(75.0)
    late = driver.arrives("late", 2000)
    assert [program.program_id for program in driver.scheduler.queue.waiting.order] == ["small", "large", "late"]
    driver.releases("first")
    assert all(turn_id in driver.granted_on for turn_id in (large, small, late))


def test_program_back_from_a_long_tool_overtakes_nobody_that_waited_meanwhile() -> None:
    """Its wait counts from now, not since its tool began; the check whether it may go at once uses that too."""
    driver = Driver(load_policy("ttl", {"order": "mars", "ttl_s": 1.0, "reserve_tokens": 0}), replicas={"r0": 1000})
    driver.takes_turn("back", 300)
    driver.ticks(5.0)
    driver.arrives("busy", 600)
    driver.passes(5.0)
    head = driver.arrives("head", 500)
    driver.passes(5.0)
    back = driver.arrives("back", 310)
    assert driver.held(head)
    assert driver.held(back)


@pytest.mark.parametrize(
    ("part", "wrong"),
    [
        (MarsOrder, {"promote_s": 0.0}),
        (MarsOrder, {"level_count": 0}),
        (MarsPriority, {"first_level_tokens": 0}),
        (MarsPriority, {"window_s": -1.0}),
        (MarsPriority, {"served_ratio": 0.0}),
    ],
)
def test_settings_that_mean_nothing_are_refused(part: type, wrong: dict[str, float]) -> None:
    """The message names the setting."""
    with pytest.raises(ConfigurationError, match=next(iter(wrong))):
        part(**wrong)
