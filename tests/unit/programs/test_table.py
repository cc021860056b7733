"""The program table: incarnations of an id, the program whose tool has run longest, and the caps."""

from __future__ import annotations

from tests.builders import Driver, of_kind
from thunderagent.programs.messages import Reason, Release, SchedulerSettings

CAPS = SchedulerSettings(max_programs_count=6, tenant_max_programs_count=4)


def test_an_id_that_comes_back_has_a_new_generation() -> None:
    """Generations never repeat, though nothing is kept of an id that is gone."""
    driver = Driver()
    generations = []
    for program_id in ("a", "b", "a", "a"):
        driver.takes_turn(program_id, 1)
        generations.append(driver.program(program_id).generation)
        driver.releases(program_id)
    assert generations == [1, 2, 3, 4]
    assert not driver.scheduler.programs


def test_program_silent_for_longest_is_forgotten_first() -> None:
    """A tool's begin is an event of its program; a program with an unfinished turn is not forgotten."""
    driver = Driver(settings=SchedulerSettings(forget_limit_s=60.0))
    for name in "abcd":
        driver.takes_turn(name, 1)
        driver.passes(1.0)
    driver.arrives("b", 1)
    driver.passes(50.0)
    driver.tool_starts("a")
    assert of_kind(Release, driver.ticks(20.0)) == ["c", "d"]
    assert of_kind(Release, driver.ticks(60.0)) == ["a"]
    assert list(driver.scheduler.programs) == ["b"]


def test_programs_are_listed_in_the_order_of_their_opening() -> None:
    """A page of programs has the oldest first."""
    driver = Driver()
    for name in "cab":
        driver.opens(name)
    assert list(driver.scheduler.programs) == ["c", "a", "b"]


def flood(driver: Driver, tenant: str, count: int, name: str = "") -> list[int]:
    return [driver.arrives(f"{name or tenant} {n}", 1, tenant=tenant) for n in range(count)]


def test_table_past_its_cap_forgets_the_oldest_program_without_a_turn() -> None:
    """It is one of that tenant; then its new ones are rejected, and other tenants lose nothing."""
    driver = Driver(settings=CAPS)
    driver.takes_turn("other", 1, tenant="blue")
    for name in "abcd":
        driver.takes_turn(name, 1, tenant="red")
    busy = driver.arrives("b", 1)
    assert driver.arrives("e", 1, tenant="red") in driver.granted_on
    assert of_kind(Release, driver.decisions) == ["a"]
    flood(driver, "red", 2)
    assert driver.scheduler.limits.count_of("red") == 4
    refused = flood(driver, "red", 3, "more")
    assert {driver.rejected_for[turn_id] for turn_id in refused} == {Reason.TOO_MANY_PROGRAMS}
    assert driver.scheduler.programs.get("other") is not None
    driver.finishes(busy, 1)
    assert driver.arrives("again", 1, tenant="red") in driver.granted_on


def test_largest_tenant_forgets_its_oldest_past_the_cap_of_all() -> None:
    driver = Driver(settings=CAPS)
    for name in "ab":
        driver.takes_turn(name, 1, tenant="blue")
    for name in "cdef":
        driver.takes_turn(name, 1, tenant="red")
    driver.arrives("g", 1, tenant="green")
    assert of_kind(Release, driver.decisions) == ["c"]
    flood(driver, "red", 3)
    assert len(driver.scheduler.programs) == 6
    assert driver.rejected_for == {}
    assert {"a", "b", "g"} <= {program.program_id for program in driver.scheduler.programs.values()}


def test_announced_programs_are_forgotten_too() -> None:
    driver = Driver(settings=CAPS)
    for number in range(20):
        driver.opens(f"p{number}")
    assert [program.program_id for program in driver.scheduler.programs.values()] == ["p16", "p17", "p18", "p19"]


def test_a_program_that_was_announced_counts_for_the_tenant_of_its_first_turn() -> None:
    """Announced without a tenant, it would bypass that tenant's cap."""
    driver = Driver(settings=CAPS)
    driver.opens("announced")
    flood(driver, "red", 4)
    refused = driver.arrives("announced", 1, tenant="red")
    assert driver.rejected_for[refused] is Reason.TOO_MANY_PROGRAMS
    assert driver.arrives("announced", 1, tenant="blue") in driver.granted_on
    driver.opens("another")
    for n in range(4):
        driver.releases(f"red {n}")
    driver.takes_turn("idle", 1, tenant="red")
    flood(driver, "red", 3)
    assert driver.arrives("another", 1, tenant="red") in driver.granted_on
    assert of_kind(Release, driver.decisions) == ["idle"]
