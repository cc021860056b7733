"""A program that is to leave its replica does so: within its turns in flight, and with all its turns."""

from __future__ import annotations

import pytest

from tests.builders import Driver, of_kind
from thunderagent.policy_loader import load_policy
from thunderagent.programs.messages import Hold, Mark, Pause, Reason, Reject, Restore, Unmark
from thunderagent.programs.policy import Policy

POLICIES = ("breakeven", "mars", "passthrough", "cap", "thunderagent", "ttl", "autellix", "continuum", "infercept")


def policy(name: str) -> Policy:
    return load_policy(name, {"n": 9} if name == "cap" else {"tool_cpu_count": 1} if name == "mars" else {})


def overlap(driver: Driver, turns_count: int = 30, **arrival: int) -> int:
    """Let a turn of program "a" begin before the other one ends; return how many began on r0."""
    last = driver.arrives("a", 100, branch="b0")
    for n in range(1, turns_count):
        beside = driver.arrives("a", 100, branch=f"b{n % 2}")
        driver.passes(1.0)
        if last in driver.granted_on:
            driver.finishes(last, 100)
        last = beside
    return sum(replica_id == "r0" for replica_id in driver.granted_on.values())


@pytest.mark.parametrize("name", POLICIES)
@pytest.mark.parametrize("way", ["drains", "trips"])
def test_a_program_whose_branches_overlap_leaves_a_replica(name: str, way: str) -> None:
    """The replica drains or trips: a turn that comes meanwhile waits, and all move when the one in flight ends."""
    driver = Driver(policy(name), replicas={"r0": 10_000})
    first = driver.arrives("a", 100)
    driver.comes_up("r1", 10_000)
    getattr(driver, way)("r0")
    waiting = [driver.arrives("a", 100, branch=branch) for branch in ("sub", "other")]
    assert all(map(driver.held, waiting))
    assert isinstance(driver.decisions[0], Hold)
    assert driver.decisions[0].reason is Reason.LEAVING
    driver.finishes(first, 100)
    assert {driver.granted_on[turn_id] for turn_id in waiting} == {"r1"}
    assert not driver.scheduler.replicas["r0"].programs


def test_a_drain_ends_though_branches_overlap_for_ever() -> None:
    """No turn begins there any more, however many come."""
    driver = Driver(replicas={"r0": 10_000})
    driver.arrives("a", 100)
    driver.comes_up("r1", 10_000)
    driver.drains("r0")
    assert overlap(driver) == 1


def test_pressure_ends_though_branches_overlap() -> None:
    """Programs claim 1,400 of 1,000 tokens: the marked one goes when its turns in flight have ended."""
    driver = Driver(load_policy("ttl", {"reserve_tokens": 0}), replicas={"r0": 1000})
    driver.arrives("old", 600)
    driver.passes(1.0)
    first = driver.arrives("young", 300)
    second = driver.arrives("young", 500, branch="sub")
    assert driver.demand() == 1400
    driver.ticks(1.0)
    assert driver.program("young").marked
    third = driver.arrives("young", 100, branch="other")
    assert driver.held(third)
    driver.finishes(first, 300)
    driver.finishes(second, 500)
    assert driver.home("young") is None
    assert driver.held(third)
    assert driver.demand() == 600


def test_a_mark_for_pressure_ends_with_the_pressure() -> None:
    """The other program ends before the marked one's turn: the marked one keeps its claim, whatever the policy."""
    for name in ("ttl", "thunderagent", "infercept", "continuum"):
        driver = Driver(load_policy(name, {"reserve_tokens": 0}), replicas={"r0": 1000})
        turn_ids = {}
        for program_id in ("a", "b"):
            turn_ids[program_id] = driver.arrives(program_id, 400)
            driver.passes(1.0)
        for turn_id in turn_ids.values():
            driver.progresses(turn_id, 200)
        driver.ticks(5.0)
        (marked,) = [program_id for program_id in turn_ids if driver.program(program_id).marked]
        driver.releases("b" if marked == "a" else "a")
        driver.finishes(next(turn_id for turn_id in driver.scheduler.turns if turn_id != turn_ids[marked]))
        driver.ticks(5.0)
        assert not driver.program(marked).marked, name


def test_a_turn_that_failed_is_not_tried_again_where_it_failed_beside_another_one() -> None:
    """It waits for the others in flight there, and then the program continues elsewhere with all its turns."""
    driver = Driver(replicas={"r0": 1000, "r1": 1000})
    failing = driver.arrives("a", 100)
    beside = driver.arrives("a", 100, branch="sub")
    driver.fails(failing)
    again = driver.arrives("a", 100, avoid="r0")
    assert Mark("a", "r0", Reason.TURN_FAILED) in driver.decisions
    assert driver.held(again)
    driver.finishes(beside, 100)
    assert driver.granted_on[again] == "r1"
    assert driver.home("a") == "r1"


def test_a_turn_that_failed_is_tried_again_there_if_there_is_nowhere_else() -> None:
    """It is tried at once, or at the other replica's loss; no program leaves for a turn whose client left."""
    driver = Driver(replicas={"r0": 1000})
    turn_id = driver.arrives("a", 100)
    assert driver.granted_on[driver.arrives("a", 100, branch="sub", avoid="r0")] == "r0"
    driver.comes_up("r1", 1000)
    waiting = driver.arrives("a", 100, branch="sub", avoid="r0")
    assert driver.held(waiting)
    driver.is_abandoned(waiting)
    assert Unmark("a", "r0", Reason.STAYS) in driver.decisions
    waiting = driver.arrives("a", 100, branch="sub", avoid="r0")
    driver.goes_down("r1")
    assert driver.granted_on[waiting] == "r0"
    driver.finishes(turn_id, 100)
    assert driver.home("a") == "r0"


@pytest.mark.parametrize("name", POLICIES)
def test_a_mark_ends_with_its_cause(name: str) -> None:
    """A replica that trips and recovers, or drains and is let in again, keeps its programs and their claims."""
    driver = Driver(policy(name), replicas={"r0": 10_000})
    turn_id = driver.arrives("a", 100)
    for began, ended in (
        (lambda: driver.trips("r0"), lambda: driver.trips("r0", tripped=False)),
        (lambda: driver.drains("r0"), lambda: driver.comes_up("r0", 10_000)),
    ):
        began()
        held = driver.arrives("a", 100, branch="sub")
        assert driver.held(held)
        ended()
        assert not driver.program("a").marked
        assert driver.granted_on[held] == "r0"
        driver.finishes(held, 100)
    driver.finishes(turn_id, 100)
    assert driver.home("a") == "r0"
    assert not of_kind(Pause, [decision for _, decisions in driver.events for decision in decisions])


def test_a_mark_with_two_causes_ends_with_the_last() -> None:
    """The program is to move and its replica trips: it moves, although that replica has recovered."""
    driver = Driver(replicas={"r0": 1000, "r1": 1000})
    turn_id = driver.arrives("a", 100)
    assert of_kind(Mark, driver.migrates("a", "r1")) == ["a"]
    assert of_kind(Mark, driver.trips("r0")) == []
    assert of_kind(Unmark, driver.trips("r0", tripped=False)) == []
    assert of_kind(Restore, driver.finishes(turn_id, 100)) == ["a"]
    assert driver.home("a") == "r1"


def test_policy_may_withdraw_its_own_marks_and_nothing_else() -> None:
    """The policy's own mark stays when another cause ends."""
    driver = Driver(replicas={"r0": 1000})
    driver.arrives("a", 100)
    view, program = driver.scheduler.view, driver.program("a")
    assert view.propose_mark(program, Reason.THRASHING)
    driver.trips("r0")
    assert not view.propose_unmark(program, Reason.RELIEVED)
    driver.trips("r0", tripped=False)
    assert program.marked
    assert view.propose_unmark(program, Reason.RELIEVED)
    assert not program.marked


def test_a_turn_of_a_leaving_program_is_told_before_its_client_gives_up() -> None:
    """Its other turn holds the program back for longer: its client is told in time, and nothing else is lost."""
    driver = Driver(replicas={"r0": 10_000})
    first = driver.arrives("a", 100)
    driver.comes_up("r1", 10_000)
    driver.drains("r0")
    waiting = driver.arrives("a", 100, branch="sub", patience_s=40.0)
    assert driver.held(waiting)
    driver.passes(29.0)
    driver.ticks(0.5)
    assert driver.held(waiting)
    driver.ticks(1.0)
    assert [each.reason for each in driver.decisions if isinstance(each, Reject)] == [Reason.LEAVING]
    assert waiting not in driver.scheduler.turns
    driver.finishes(first, 100)
    assert driver.home("a") is None


def test_a_turn_that_is_held_in_place_does_not_wait_for_room() -> None:
    """Unclaimed memory elsewhere does not count as idle for it until its program has left."""
    driver = Driver(replicas={"r0": 10_000})
    first = driver.arrives("a", 100)
    driver.drains("r0")
    driver.arrives("a", 100, branch="sub")
    assert driver.scheduler.ledger.waiting_count == 0
    driver.finishes(first, 100)
    assert driver.scheduler.ledger.waiting_count == 1
    driver.comes_up("r1", 10_000)
    assert driver.scheduler.ledger.waiting_count == 0
