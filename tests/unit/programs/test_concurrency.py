"""The number of useful programs: its bounds, and its steadiness."""

from __future__ import annotations

from itertools import pairwise
from random import Random

import pytest

from tests.builders import Driver
from thunderagent.policy_loader import load_policy
from thunderagent.programs.concurrency import DEAD_RATIO, FIRST_COUNT, SteadyCount, Why, concurrency
from thunderagent.programs.policies.breakeven import BreakEven


def driver_of(capacity_tokens: int | None = 10_000) -> Driver:
    return Driver(BreakEven(), replicas={"r0": capacity_tokens}, threshold_s=20.0)


def learns_sizes(driver: Driver, tokens: int) -> None:
    """Five programs come, reach this size, and end."""
    for number in range(5):
        for prompt_tokens in (tokens // 2, tokens):
            driver.finishes(driver.arrives(f"before-{number}", prompt_tokens), prompt_tokens, 10, 0)
        driver.releases(f"before-{number}")


def test_first_window_is_some_programs_per_replica() -> None:
    now = concurrency(driver_of().scheduler)
    assert (now.useful_count, now.programs_count, now.why) == (FIRST_COUNT, 0, Why.STEP)


def test_window_is_what_fits_with_growth_and_half_as_many_again() -> None:
    """The sizes of programs must be known."""
    driver = driver_of()
    learns_sizes(driver, 1000)
    for number in range(6):
        driver.finishes(driver.arrives(f"p{number}", 1000), 1000, 10, 0)
    now = concurrency(driver.scheduler)
    assert now.programs_count == 6
    account = driver.scheduler.replicas["r0"].account
    fitting_count = account.limit_tokens * 6 / (account.demand_tokens + account.growth_tokens)
    assert now.why is Why.MEMORY
    assert fitting_count * 1.5 <= now.useful_count < fitting_count * 1.5 + 1


def test_until_sizes_are_known_half_of_what_seems_to_fit() -> None:
    driver = driver_of(100_000)
    for number in range(8):
        driver.finishes(driver.arrives(f"p{number}", 1000), 1000, 10, 0)
    now = concurrency(driver.scheduler)
    account = driver.scheduler.replicas["r0"].account
    fitting_count = account.limit_tokens * 8 / (account.demand_tokens + account.growth_tokens)
    assert now.why is Why.SIZES
    assert now.useful_count == fitting_count / 2 < 2 * 8


def test_waiting_program_and_unclaimed_program_at_a_tool_count_as_present() -> None:
    driver = driver_of(3000)
    learns_sizes(driver, 1000)
    for number in range(8):
        driver.arrives(f"p{number}", 1000)
    now = concurrency(driver.scheduler)
    assert driver.scheduler.queue.waiting_count
    assert now.programs_count == 8
    assert now.useful_count < 8


def test_a_program_that_is_not_admitted_counts_once() -> None:
    driver = Driver(load_policy("passthrough", {"admission": "window", "admission.n": 1}), replicas={"r0": 10_000})
    for number in range(3):
        driver.arrives(f"p{number}", 1000)
    assert driver.scheduler.queue.unadmitted.count == 2
    assert concurrency(driver.scheduler).programs_count == 3


@pytest.mark.parametrize(("waiting_count", "why"), [(0, Why.MEMORY), (10, Why.ENGINE)])
def test_an_engine_with_turns_in_its_own_queue_needs_no_more(waiting_count: int, why: Why) -> None:
    driver = driver_of()
    learns_sizes(driver, 1000)
    for number in range(7):
        driver.arrives(f"p{number}", 1000)
    driver.scheduler.replicas["r0"].account.engine_waiting_count = waiting_count
    now = concurrency(driver.scheduler)
    assert now.why is why
    assert (now.useful_count > now.programs_count) is (why is Why.MEMORY)


def test_no_more_than_there_are_where_it_cannot_be_known() -> None:
    """Cases are a replica of unknown size, and none that grants."""
    driver = driver_of(None)
    driver.arrives("p", 1000)
    assert concurrency(driver.scheduler).why is Why.CAPACITY_UNKNOWN
    driver.goes_down("r0")
    now = concurrency(driver.scheduler)
    assert (now.useful_count, now.why) == (now.programs_count, Why.NO_REPLICA)


def test_noise_changes_nothing_that_is_said() -> None:
    """Counted every five seconds, a fifth off either way, it settles within nearly three hours, and stays."""
    steady, random = SteadyCount(), Random(0)
    said = [steady.update(20 * random.uniform(0.8, 1.2), 5.0 * number) for number in range(2000)]
    assert sum(before != now for before, now in pairwise(said)) <= 2


def test_lasting_change_is_reported_within_minutes() -> None:
    """A caller that asks rarely gets it at once."""
    steady = SteadyCount()
    assert steady.update(20, 0.0) == 20
    said = [steady.update(10, 5.0 * number) for number in range(1, 49)]
    assert said[0] > 10
    assert abs(said[-1] - 10) <= 1 + DEAD_RATIO * 10
    assert steady.update(30, 10_000.0) in (29, 30)


def test_one_program_is_always_useful() -> None:
    assert SteadyCount().update(0.0, 0.0) == 1
