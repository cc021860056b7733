"""Turns that continue from a response of one replica run there, while a program may be there."""

from __future__ import annotations

import pytest

from tests.builders import Driver
from thunderagent.programs.messages import Reason, SchedulerSettings
from thunderagent.programs.policies.baselines.cap import Cap
from thunderagent.programs.policies.baselines.passthrough import Passthrough
from thunderagent.programs.policies.baselines.sticky import Sticky

TWO = {"r0": 1000, "r1": 1000}


@pytest.mark.parametrize("policy", [Passthrough, Sticky])
@pytest.mark.parametrize("wanted", TWO)
def test_a_turn_runs_where_the_response_is_that_it_goes_on_from(policy: type, wanted: str) -> None:
    """This overrides the policy, for a new program, one that is elsewhere, and an anonymous turn."""
    driver = Driver(policy(), replicas=TWO)
    assert driver.granted_on[driver.arrives("new", 10, wanted=wanted)] == wanted
    other = "r0" if wanted == "r1" else "r1"
    turn_id = driver.arrives("there", 10, wanted=other)
    driver.finishes(turn_id, 10)
    assert driver.granted_on[driver.arrives("there", 10, wanted=wanted)] == wanted
    for _ in range(4):
        assert driver.granted_on[driver.arrives(None, 10, wanted=wanted)] == wanted


def test_a_held_turn_is_restored_where_the_response_is() -> None:
    """It goes there though another replica is emptier at that time."""
    driver = Driver(Cap(n=2), replicas=TWO)
    driver.arrives("a", 10, wanted="r1")
    driver.arrives("b", 10, wanted="r1")
    held = driver.arrives("c", 10, wanted="r1")
    assert driver.held(held)
    driver.releases("a")
    assert driver.granted_on[held] == "r1"


def test_a_turn_goes_elsewhere_when_the_response_is_gone() -> None:
    """The engine there says that it knows no such response, which is better than waiting in vain."""
    driver = Driver(replicas=TWO)
    for leaves in (driver.drains, driver.trips, driver.goes_down):
        leaves("r1")
        assert driver.granted_on[driver.arrives("a", 10, wanted="r1")] == "r0"
        assert driver.granted_on[driver.arrives(None, 10, wanted="r1")] == "r0"
        driver.releases("a")
        driver.comes_up("r1", 1000)
        driver.trips("r1", tripped=False)
    assert driver.granted_on[driver.arrives("a", 10, wanted="nobody")] in TWO


def test_a_turn_waits_while_its_replica_is_paused() -> None:
    """An active program's turn waits where it is; an anonymous one waits, too."""
    driver = Driver(settings=SchedulerSettings(), replicas=TWO)
    turn_id = driver.arrives("a", 10, wanted="r1")
    driver.finishes(turn_id, 10)
    driver.suspends(replica_id="r1")
    waiting = [driver.arrives("a", 10, wanted="r1"), driver.arrives(None, 10, wanted="r1")]
    assert all(map(driver.held, waiting))
    assert driver.program("a").hold_reason == Reason.SUSPENDED
    driver.goes_on(replica_id="r1")
    assert {driver.granted_on[each] for each in waiting} == {"r1"}


def test_a_turn_stays_beside_those_of_its_program_in_flight() -> None:
    """A program is on one replica: its turns in flight are not broken off for the new one."""
    driver = Driver(replicas=TWO)
    home = driver.granted_on[driver.arrives("a", 10)]
    other = "r0" if home == "r1" else "r1"
    assert driver.granted_on[driver.arrives("a", 10, branch="b", wanted=other)] == home
