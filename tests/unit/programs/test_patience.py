"""Turns whose clients would give up are let in before that, and a second attempt replaces the first."""

from __future__ import annotations

from dataclasses import replace

import pytest

from tests.builders import Driver, of_kind
from thunderagent.programs.messages import Grant, Hold, Reason, Restore, SchedulerSettings
from thunderagent.programs.policies.baselines.cap import Cap
from thunderagent.programs.policies.baselines.sticky import Sticky

SETTINGS = SchedulerSettings(idle_limit_s=1000.0, patience_margin_s=2.0, patience_ratio=0.25)


def full(**replicas: int) -> Driver:
    """One program has the only place; others are held."""
    driver = Driver(Cap(n=1), replicas=replicas or {"r0": 1000}, settings=SETTINGS)
    driver.takes_turn("first", 100)
    return driver


@pytest.mark.parametrize(("patience_s", "held_s"), [(600.0, 450.0), (20.0, 15.0), (6.0, 4.0), (3.0, 1.5), (0.2, 0.1)])
def test_a_turn_is_let_in_before_its_client_gives_up(patience_s: float, held_s: float) -> None:
    """A quarter of the patience is left for the answer, the margin at least, but never more than half."""
    driver = full()
    turn_id = driver.arrives("second", 5000, patience_s=patience_s)
    driver.ticks(held_s - 0.01)
    assert driver.held(turn_id)
    decisions = driver.ticks(0.02)
    assert [type(decision) for decision in decisions] == [Restore, Grant]
    assert {decision.reason for decision in decisions} == {Reason.PATIENCE}


def test_any_event_lets_an_impatient_turn_in() -> None:
    """It need not be a tick."""
    driver = full()
    turn_id = driver.arrives("second", 100, patience_s=10.0)
    driver.passes(8.0)
    driver.arrives(None, 10)
    assert turn_id in driver.granted_on


@pytest.mark.parametrize("patience_s", [0.0, -5.0])
def test_a_client_without_patience_is_let_in_at_once(patience_s: float) -> None:
    """One event holds and grants it."""
    driver = full()
    turn_id = driver.arrives("second", 100, patience_s=patience_s)
    assert turn_id in driver.granted_on
    assert of_kind(Hold, driver.decisions) == ["second"]


def test_a_turn_without_a_deadline_waits_for_ever() -> None:
    driver = full()
    turn_id = driver.arrives("second", 100)
    for _ in range(20):
        driver.ticks(10.0)
        driver.is_polled()
    assert driver.held(turn_id)


def test_the_whole_program_is_let_in() -> None:
    """A program's turns are never held beside one another's leases."""
    driver = full()
    patient, impatient = driver.arrives("second", 50), driver.arrives("second", 50, branch="sub", patience_s=4.0)
    driver.ticks(3.0)
    assert {patient, impatient} <= set(driver.granted_on)


def test_impatient_program_goes_where_most_of_it_lies_then_where_least_is_overclaimed() -> None:
    """It goes home if its history is still there; otherwise to the replica that it overloads least."""
    driver = Driver(Cap(n=2), replicas={"r0": 1000, "r1": 1000, "r2": 4000}, settings=SETTINGS)
    driver.takes_turn("second", 500)
    home = driver.home("second")
    driver.releases("second")
    driver.takes_turn("one", 900)
    driver.takes_turn("two", 900)
    assert {driver.home("one"), driver.home("two")} == {"r0", "r1"}
    new = driver.arrives("new", 800, patience_s=4.0)
    driver.ticks(3.0)
    assert driver.granted_on[new] == "r2"
    assert home is not None


def test_its_history_decides() -> None:
    """A paused program returns to its tokens, though another replica is empty."""
    driver = Driver(Cap(n=1), replicas={"r0": 1000, "r1": 5000}, settings=replace(SETTINGS, idle_limit_s=1.5))
    driver.takes_turn("second", 500)
    home = driver.home("second")
    assert home is not None
    other = "r1" if home == "r0" else "r0"
    driver.ticks(2.0)
    assert driver.home("second") is None
    driver.takes_turn("first", 10)
    again = driver.arrives("second", 600, patience_s=4.0)
    assert driver.held(again)
    driver.passes(3.0)
    driver.is_polled(other)
    assert driver.granted_on[again] == home


def test_a_turn_that_was_lost_and_is_tried_again_counts_once() -> None:
    """It was abandoned or failed with a lease; one that was only held never counted; another turn is another one."""
    driver = Driver(Cap(n=1), settings=SETTINGS)
    first = driver.arrives("a", 10)
    driver.is_abandoned(first)
    second = driver.arrives("a", 10, instead_of=first, waiting_since_s=driver.now_s)
    driver.fails(second)
    third = driver.arrives("a", 10, instead_of=second, waiting_since_s=driver.now_s)
    assert driver.program("a").turn_count == 1
    driver.finishes(third, 10)
    driver.takes_turn("a", 20)
    assert driver.program("a").turn_count == 2
    held = driver.arrives("b", 10)
    driver.is_abandoned(held)
    again = driver.arrives("b", 10, instead_of=held, waiting_since_s=driver.now_s)
    driver.releases("a")
    assert again in driver.granted_on
    assert driver.program("b").turn_count == 1


@pytest.mark.parametrize("heard", ["before", "after", "never"])
def test_a_turn_whose_replica_was_lost_and_is_tried_again_counts_once(heard: str) -> None:
    """This holds if its client retries before or after the report of the failure."""
    driver = Driver(replicas={"r0": 1000, "r1": 1000})
    first = driver.arrives("a", 10)
    driver.goes_down(driver.granted_on[first])
    if heard == "before":
        driver.fails(first)
    driver.arrives("a", 10, instead_of=first)
    if heard == "after":
        driver.fails(first)
    assert driver.program("a").turn_count == 1


def test_a_turn_that_two_take_the_place_of_is_taken_off_once() -> None:
    """Both attempts run, so both count."""
    driver = Driver()
    first = driver.arrives("a", 10)
    driver.arrives("a", 10, instead_of=first)
    third = driver.arrives("a", 10, instead_of=first)
    assert driver.program("a").turn_count == 2
    driver.finishes(third, 10)
    driver.arrives("a", 10, instead_of=first)
    assert driver.program("a").turn_count == 3


def test_without_a_replica_nobody_is_let_in_until_one_comes() -> None:
    driver = Driver(Sticky(), replicas={}, settings=SETTINGS)
    turn_id = driver.arrives("a", 100, patience_s=4.0)
    driver.ticks(10.0)
    assert driver.held(turn_id)
    driver.comes_up("r0", 1000)
    assert turn_id in driver.granted_on


@pytest.mark.parametrize("ends", ["is_abandoned", "releases"])
def test_a_turn_that_ends_while_it_is_held_is_impatient_no_longer(ends: str) -> None:
    driver = full()
    turn_id = driver.arrives("second", 100, patience_s=4.0)
    if ends == "releases":
        driver.releases("second")
    else:
        driver.is_abandoned(turn_id)
    assert not driver.scheduler.deadlines
    driver.ticks(5.0)
    assert turn_id not in driver.granted_on


# --- a second attempt


def test_a_held_attempt_hands_its_age_on() -> None:
    """The second waits since the first arrived; the first is gone; the turn waits once."""
    driver = full()
    first = driver.arrives("second", 100)
    since_s = driver.now_s
    driver.ticks(5.0)
    second = driver.arrives("second", 100, instead_of=first)
    assert first not in driver.scheduler.turns
    assert driver.program("second").waiting_since_s == since_s
    assert driver.scheduler.ledger.waiting_count == 1
    driver.releases("first")
    assert set(driver.granted_on) >= {second}
    assert first not in driver.granted_on


def test_an_attempt_in_flight_hands_its_lease_on() -> None:
    """The next one gets it on the same replica, at once, with the claim, though others wait; the turn counts once."""
    driver = full()
    first = driver.arrives("first", 200)
    waiting = driver.arrives("second", 100)
    second = driver.arrives("first", 200, instead_of=first)
    assert driver.granted_on[second] == driver.granted_on[first]
    assert driver.held(waiting)
    program = driver.program("first")
    assert (program.turn_count, list(program.in_flight)) == (2, [second])
    driver.is_abandoned(first)  # the holder of its lease says so later
    assert list(program.in_flight) == [second]


@pytest.mark.parametrize("how", ["tripped", "draining"])
def test_an_attempt_on_a_replica_that_is_left_is_tried_again_elsewhere(how: str) -> None:
    """Only that attempt kept its program there; it is still one turn, as old as its first attempt."""
    driver = Driver(replicas={"r0": 1000, "r1": 1000})
    first = driver.arrives("a", 100)
    home = driver.granted_on[first]
    driver.trips(home) if how == "tripped" else driver.drains(home)
    driver.passes(7.0)
    second = driver.arrives("a", 100, instead_of=first)
    assert driver.granted_on[second] != home
    program = driver.program("a")
    assert (program.turn_count, list(program.in_flight), program.marked) == (1, [second], False)
    assert program.in_flight[second].waiting_since_s == driver.now_s - 7.0
    assert [driver.demand("r0"), driver.demand("r1")].count(0) == 1
    assert not driver.is_abandoned(first)  # the holder of its lease says so later


def test_an_attempt_on_a_replica_that_is_left_waits_for_its_program_s_other_turns() -> None:
    """The attempt before it is over; they move together, and no number of retries keeps one there."""
    driver = Driver(replicas={"r0": 1000, "r1": 1000})
    first = driver.arrives("a", 100)
    home = driver.granted_on[first]
    beside = driver.arrives("a", 100, branch="b")
    driver.drains(home)
    second = driver.arrives("a", 100, instead_of=first)
    third = driver.arrives("a", 100, instead_of=second)
    assert list(driver.program("a").held) == [third]
    driver.is_abandoned(beside)
    assert driver.granted_on[third] != home
    driver.drains(driver.granted_on[third])
    fourth = driver.arrives("a", 100, instead_of=third)
    assert driver.held(fourth)
    assert driver.home("a") is None


def test_an_attempt_that_ended_leaves_its_age() -> None:
    """An age in the future is never taken."""
    driver = full()
    driver.arrives("second", 100, waiting_since_s=driver.now_s - 30.0)
    assert driver.program("second").waiting_since_s == driver.now_s - 30.0
    driver.arrives("third", 100, waiting_since_s=driver.now_s + 30.0)
    assert driver.program("third").waiting_since_s == driver.now_s


def test_an_anonymous_attempt_is_superseded_too() -> None:
    driver = Driver()
    first = driver.arrives(None, 100)
    second = driver.arrives(None, 100, instead_of=first)
    assert list(driver.scheduler.turns) == [second]
    assert driver.demand() == 100


def test_an_attempt_whose_program_ended_is_superseded_by_the_next_incarnation() -> None:
    driver = Driver()
    first = driver.arrives("a", 100)
    driver.releases("a")
    second = driver.arrives("a", 100, instead_of=first)
    assert list(driver.scheduler.turns) == [second]
    assert driver.demand() == 100


def test_patience_overdraws_a_replica_by_no_more_than_the_ratio() -> None:
    """Fifty impatient turns cannot switch the scheduler off: turns that cannot be admitted are refused when due."""
    driver = full()
    turns = [driver.arrives(f"impatient {number}", 300, patience_s=10.0) for number in range(50)]
    driver.ticks(7.6)
    granted = [turn_id for turn_id in turns if turn_id in driver.granted_on]
    assert driver.scheduler.replicas["r0"].account.demand_tokens <= 1500
    assert len(granted) == 4
    assert {driver.rejected_for[turn_id] for turn_id in turns if turn_id not in granted} == {Reason.OVERDRAWN}


def test_single_impatient_program_is_always_let_in() -> None:
    """It may have any size, as long as no other was."""
    driver = full()
    first, second = (driver.arrives(name, 5000, patience_s=10.0) for name in "ab")
    driver.ticks(7.6)
    assert first in driver.granted_on
    assert driver.rejected_for[second] is Reason.OVERDRAWN
    driver.finishes(first, 5000)
    driver.releases("a")
    third = driver.arrives("c", 5000, patience_s=10.0)
    driver.ticks(7.6)
    assert third in driver.granted_on


def test_an_overdraft_of_nothing_lets_one_in_at_a_time() -> None:
    driver = Driver(Cap(n=1), settings=replace(SETTINGS, patience_overdraft_ratio=0.0))
    driver.takes_turn("first", 1000)
    one, two = (driver.arrives(name, 10, patience_s=10.0) for name in "ab")
    driver.ticks(7.6)
    assert one in driver.granted_on
    assert two in driver.rejected_for
