"""`ttl`: claims live for a fixed time after each turn, and programs are let in where they fit."""

from __future__ import annotations

import pytest

from tests.builders import Driver, of_kind
from thunderagent.errors import ConfigurationError
from thunderagent.programs.messages import Mark, Pause, Reason
from thunderagent.programs.policies.baselines.ttl import Ttl


def driver_with(ttl_s: float = 10.0, **replicas: int | None) -> Driver:
    return Driver(Ttl(ttl_s=ttl_s, reserve_tokens=0), replicas=replicas or {"r0": 1000})


def test_a_claim_lives_for_its_time_and_no_longer() -> None:
    """At 9.9 s it exists, at 10 s it ends, and the next turn goes to its old replica."""
    driver = driver_with(r0=1000, r1=1000)
    driver.takes_turn("a", 400)
    home = driver.home("a")
    assert driver.ticks(9.9) == []
    assert driver.ticks(0.1) == [Pause("a", home, Reason.POLICY)]
    driver.takes_turn("b", 10)
    assert driver.granted_on[driver.arrives("a", 400)] == home


def test_a_turn_within_the_time_stays_and_begins_it_again() -> None:
    """The time runs from the end of the last turn."""
    driver = driver_with()
    driver.takes_turn("a", 400)
    driver.passes(9.0)
    driver.takes_turn("a", 450)
    assert driver.ticks(9.0) == []
    assert of_kind(Pause, driver.ticks(1.0)) == ["a"]


@pytest.mark.parametrize("inferred", [False, True])
def test_the_end_of_a_tool_begins_it_again_for_half_as_long_each_time(inferred: bool) -> None:
    """Whoever says so: otherwise a client could keep its claim for ever. A tool that begins shortens no hold."""
    driver = driver_with()
    driver.takes_turn("a", 400)
    driver.passes(9.0)
    driver.tool_ends("a", inferred=inferred)
    driver.ticks(8.0)
    driver.tool_starts("a", "make")
    driver.ticks(1.0)
    driver.tool_ends("a", inferred=inferred)
    assert driver.ticks(4.9) == []
    assert of_kind(Pause, driver.ticks(0.1)) == ["a"]


def test_the_first_begin_of_a_tool_begins_it_again_and_no_later_one() -> None:
    """It is held for 10 s from the first begin. What begins later lengthens nothing."""
    driver = driver_with()
    for program_id in ("once", "twice"):
        driver.takes_turn(program_id, 400)
    driver.passes(5.0)
    for program_id in ("once", "twice"):
        driver.tool_starts(program_id, "make")
    driver.passes(5.0)
    driver.tool_starts("twice", "make")
    assert driver.ticks(4.9) == []
    assert of_kind(Pause, driver.ticks(0.1)) == ["once", "twice"]


def test_the_end_of_a_claim_lets_in_who_waits_the_oldest_first() -> None:
    """A large old program is not passed by a small young one."""
    driver = driver_with()
    driver.takes_turn("a", 600)
    old = driver.arrives("old", 700)
    driver.passes(1.0)
    young = driver.arrives("young", 100)
    assert driver.held(old)
    assert driver.held(young)
    driver.ticks(9.0)
    assert not driver.held(old)
    assert not driver.held(young)


def test_growth_beyond_the_capacity_is_mended_at_once() -> None:
    """The longest idle is paused first; then the youngest with a turn is marked."""
    driver = driver_with(ttl_s=100.0)
    driver.takes_turn("idle", 100)
    driver.passes(1.0)
    driver.takes_turn("idler", 100)
    driver.passes(1.0)
    turns = [driver.arrives("first", 400)]
    driver.passes(1.0)
    turns.append(driver.arrives("second", 400))
    driver.progresses(turns[0], output=50)
    assert of_kind(Pause, driver.ticks(1.0)) == ["idle"]
    driver.progresses(turns[0], output=150)
    decisions = driver.ticks(1.0)
    assert of_kind(Pause, decisions) == ["idler"]
    assert of_kind(Mark, decisions) == []
    driver.progresses(turns[0], output=350)
    assert of_kind(Mark, driver.ticks(1.0)) == ["second"]


def test_program_larger_than_every_replica_goes_at_once() -> None:
    """The engine decides what happens to it."""
    driver = driver_with()
    driver.takes_turn("a", 900)
    assert not driver.held(driver.arrives("giant", 2000))


def test_without_a_capacity_nobody_waits() -> None:
    """An unknown capacity has room for everyone."""
    driver = driver_with(r0=None)
    assert not any(driver.held(driver.arrives(name, 10**6)) for name in "abcd")


@pytest.mark.parametrize("wrong", [{"ttl_s": -1.0}, {"ttl_s": float("nan")}, {"reserve_tokens": -1}])
def test_settings_that_mean_nothing_are_refused(wrong: dict[str, float]) -> None:
    """The message names the setting."""
    with pytest.raises(ConfigurationError, match=next(iter(wrong))):
        Ttl(**wrong)
