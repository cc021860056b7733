"""`cap`: at most N programs at once."""

from __future__ import annotations

import pytest

from tests.builders import Driver
from thunderagent.errors import ConfigurationError
from thunderagent.programs.messages import Hold, Reason, SchedulerSettings
from thunderagent.programs.policies.baselines.cap import Cap


def capped(n: int, **replicas: int | None) -> Driver:
    settings = SchedulerSettings(idle_limit_s=50.0)
    return Driver(Cap(n=n), replicas=replicas or {"r0": None, "r1": None}, settings=settings)


def test_n_programs_run_and_the_next_waits_for_a_release() -> None:
    """The end of a turn frees no place; the end of a program frees one at once."""
    driver = capped(2)
    driver.takes_turn("a", 10)
    driver.takes_turn("b", 10)
    turn = driver.arrives("c", 10)
    assert driver.decisions == [Hold(turn, "c", Reason.NO_ROOM)]
    driver.takes_turn("a", 10)
    assert driver.held(turn)
    driver.releases("b")
    assert turn in driver.granted_on


def test_first_come_first_served() -> None:
    """Places go by the time of arrival, not by size."""
    driver = capped(1)
    driver.takes_turn("a", 10)
    turns = []
    for name, tokens in (("large", 900), ("middle", 500), ("small", 1)):
        driver.passes(1.0)
        turns.append(driver.arrives(name, tokens))
    for name, turn in zip(("a", "large", "middle"), turns, strict=True):
        assert driver.held(turn)
        driver.releases(name)
        assert turn in driver.granted_on


def test_a_program_stays_on_its_replica_and_new_ones_go_where_demand_is_smallest() -> None:
    """Tokens decide for new programs; none moves."""
    driver = capped(8)
    for name, tokens in (("a", 500), ("b", 300), ("c", 100)):
        driver.takes_turn(name, tokens)
    assert [driver.home(name) for name in "abc"] == ["r0", "r1", "r1"]
    driver.takes_turn("b", 900)
    assert driver.home("b") == "r1"
    driver.takes_turn("d", 10)
    assert driver.home("d") == "r0"


def test_a_program_whose_replica_failed_its_turn_keeps_its_place() -> None:
    """With every place taken, a turn that is retried elsewhere is granted there at once."""
    driver = capped(1)
    failed = driver.arrives("a", 10)
    waiting = driver.arrives("b", 10)
    driver.fails(failed)
    again = driver.arrives("a", 10, avoid=driver.granted_on[failed])
    assert driver.granted_on[again] == "r1"
    assert driver.held(waiting)


def test_the_idle_limit_frees_a_place() -> None:
    """A program that never releases keeps its place until then."""
    driver = capped(1)
    driver.takes_turn("a", 10)
    turn = driver.arrives("b", 10)
    driver.ticks(49.0)
    assert driver.held(turn)
    driver.ticks(2.0)
    assert turn in driver.granted_on


def test_the_places_of_a_lost_replica_are_given_anew() -> None:
    """The queue is served as soon as the loss frees places; the programs that lost theirs come back by age."""
    driver = capped(2)
    lost = [driver.arrives("a", 10), driver.arrives("b", 10)]
    driver.passes(1.0)
    waiting = driver.arrives("c", 10)
    driver.goes_down("r1")
    assert driver.granted_on[waiting] == "r0"
    driver.fails(lost[1])
    again = driver.arrives("b", 10, avoid="r1")
    assert driver.held(again)
    driver.releases("a")
    assert driver.granted_on[again] == "r0"


@pytest.mark.parametrize("n", [0, -1])
def test_a_cap_that_lets_nobody_in_is_refused(n: int) -> None:
    """The error comes at configuration time, with the number in the message."""
    with pytest.raises(ConfigurationError, match=f"at least 1, not {n}"):
        Cap(n=n)
