"""`passthrough`: the plain load balancer."""

from __future__ import annotations

from tests.builders import Driver
from thunderagent.programs.messages import Grant, Pause, Reason
from thunderagent.programs.policies.baselines.passthrough import Passthrough


def test_every_turn_is_granted_at_once_however_full_the_replicas_are() -> None:
    """It never adds a wait: it is the lower bound of all policies."""
    driver = Driver(Passthrough(), replicas={"r0": 100, "r1": 100})
    turns = [driver.arrives(f"p{number}", 5000) for number in range(20)]
    assert all(turn in driver.granted_on for turn in turns)


def test_each_turn_goes_to_the_replica_with_the_fewest_turns_in_flight() -> None:
    """Turns, not tokens, are balanced; on a tie the smaller demand decides."""
    driver = Driver(Passthrough(), replicas={"r0": 1000, "r1": 1000, "r2": 1000})
    homes = [driver.granted_on[driver.arrives(f"p{number}", 100)] for number in range(9)]
    assert sorted(homes) == ["r0"] * 3 + ["r1"] * 3 + ["r2"] * 3
    driver.finishes(5, 100)
    assert driver.granted_on[driver.arrives("next", 100)] == homes[4]


def test_a_programs_turns_have_no_home() -> None:
    """A program's next turn goes to the emptiest replica, and its claim with it."""
    driver = Driver(Passthrough(), replicas={"r0": 1000, "r1": 1000})
    driver.takes_turn("a", 100)
    home = driver.home("a")
    other = driver.arrives("b", 10)
    driver.arrives("c", 10)
    driver.is_abandoned(other)
    busy_count = driver.scheduler.replicas[home or ""].account.turn_count
    driver.arrives("a", 100)
    away = "r1" if home == "r0" else "r0"
    assert busy_count == 1
    assert driver.home("a") == away
    assert Pause("a", home or "", Reason.MOVED) in driver.decisions
    assert Grant(4, "a", away, Reason.POLICY) in driver.decisions


def test_nobody_is_paused_for_memory() -> None:
    """Ticks decide nothing while replicas are three times overbooked."""
    driver = Driver(Passthrough(), replicas={"r0": 1000})
    for number in range(30):
        driver.takes_turn(f"p{number}", 100)
    assert [driver.ticks(1.0) for _ in range(60)] == [[]] * 60


def test_after_an_outage_the_oldest_program_goes_first() -> None:
    """Programs that waited for a replica are restored as soon as there is one, in order of age."""
    driver = Driver(Passthrough(), replicas={})
    turns = [driver.arrives(name, 10) for name in "cab"]
    driver.comes_up("r0", 1000)
    granted = [each.turn_id for each in driver.decisions if isinstance(each, Grant)]
    assert granted == turns
