"""Grants stop while engines are paused, sleep or get new weights; these rules hold meanwhile."""

from __future__ import annotations

import pytest

from tests.builders import Driver, of_kind
from thunderagent.policy_loader import load_policy
from thunderagent.programs.messages import Grant, Hold, Pause, Reason, Reject, Release, Restore, SchedulerSettings
from thunderagent.programs.policies.baselines.cap import Cap

LIMITS = SchedulerSettings(idle_limit_s=10.0, forget_limit_s=30.0, no_replica_limit_s=5.0)


def two_replicas() -> Driver:
    return Driver(Cap(n=10), replicas={"r0": 1000, "r1": 1000}, settings=LIMITS)


# --- Where turns wait


def test_an_active_program_keeps_its_claim_and_its_place() -> None:
    """Its turns are held on its replica, and granted there without asking the policy."""
    driver = Driver(settings=LIMITS)
    driver.takes_turn("a", 100)
    driver.suspends()
    first, second = driver.arrives("a", 120), driver.arrives("a", 50, branch="sub")
    assert driver.held(first)
    assert driver.held(second)
    assert of_kind(Hold, driver.decisions) == ["a"]
    assert (driver.home("a"), driver.program("a").hold_reason) == ("r0", Reason.SUSPENDED)
    assert driver.demand() == 170
    driver.goes_on()
    assert [type(decision) for decision in driver.decisions] == [Grant, Grant]
    assert {decision.reason for decision in driver.decisions} == {Reason.HOME}
    assert driver.program("a").hold_reason == ""


def test_an_attempt_that_is_tried_again_elsewhere_is_not_granted() -> None:
    """It is held where grants stop, then retried when another replica grants: this is one turn, not two."""
    driver = two_replicas()
    turn_id = driver.takes_turn("a", 100)
    home = driver.granted_on[turn_id]
    driver.suspends(replica_id="r0")
    driver.suspends(replica_id="r1")
    first = driver.arrives("a", 120)
    assert driver.held(first)
    driver.goes_on(replica_id="r1" if home == "r0" else "r0")
    second = driver.arrives("a", 120, instead_of=first)
    assert second in driver.granted_on
    assert driver.granted_on[second] != home
    assert first not in driver.granted_on
    assert first not in driver.scheduler.turns


def test_a_marked_program_whose_other_turns_are_held_in_place_goes_when_its_turn_ends() -> None:
    """It waits for room elsewhere then, not for a replica that gets nothing new."""
    driver = two_replicas()
    flying = driver.arrives("a", 100)
    home = driver.granted_on[flying]
    driver.suspends(replica_id=home)
    held = driver.arrives("a", 50, branch="sub")
    assert driver.held(held)
    driver.drains(home)
    driver.finishes(flying, 100)
    assert driver.granted_on[held] != home


def test_a_branch_beside_a_turn_in_flight_waits_too() -> None:
    """The turn in flight continues with its engine; nothing is granted beside it."""
    driver = Driver(settings=LIMITS)
    parent = driver.arrives("a", 100)
    driver.suspends()
    child = driver.arrives("a", 50, branch="sub")
    driver.finishes(parent, 100, 20)
    assert driver.held(child)
    assert driver.home("a") == "r0"
    driver.goes_on()
    assert driver.granted_on[child] == "r0"


def test_longest_waiting_program_is_granted_first() -> None:
    """The order of arrival at the replica does not count."""
    driver = Driver(settings=LIMITS)
    driver.takes_turn("a", 10)
    driver.takes_turn("b", 10)
    driver.suspends()
    driver.arrives("b", 20)
    driver.passes(1.0)
    driver.arrives("a", 20)
    driver.goes_on()
    assert of_kind(Grant, driver.decisions) == ["b", "a"]


def test_new_programs_and_anonymous_turns_wait_in_the_queue() -> None:
    """They have the reason, and another one once only room is missing."""
    driver = Driver(Cap(n=1), settings=LIMITS)
    driver.suspends()
    first, second, anonymous = driver.arrives("a", 10), driver.arrives("b", 10), driver.arrives(None, 10)
    assert {driver.program(name).hold_reason for name in "ab"} == {Reason.SUSPENDED}
    assert driver.held(anonymous)
    driver.goes_on()
    assert not driver.held(first)
    assert not driver.held(anonymous)
    assert driver.held(second)
    assert driver.program("b").hold_reason == Reason.NO_ROOM


def test_a_program_goes_to_a_replica_that_grants_if_there_is_one() -> None:
    """A program with a turn in flight waits where it is."""
    driver = two_replicas()
    driver.takes_turn("a", 10)
    busy = driver.arrives("b", 10)
    assert (driver.home("a"), driver.home("b")) == ("r0", "r1")
    driver.suspends(replica_id="r0")
    driver.arrives("a", 20)
    assert driver.home("a") == "r1"
    driver.goes_on(replica_id="r0")
    driver.suspends(replica_id="r1")
    beside = driver.arrives("b", 20, branch="sub")
    assert driver.held(beside)
    driver.finishes(busy, 10)
    driver.goes_on(replica_id="r1")
    assert driver.granted_on[beside] == "r1"


@pytest.mark.parametrize("order", [("pause", "weights"), ("weights", "pause")])
def test_all_causes_must_be_over(order: tuple[str, str]) -> None:
    """Ending a cause that does not hold is no error."""
    driver = Driver(settings=LIMITS)
    driver.suspends("pause")
    driver.suspends("weights")
    turn_id = driver.arrives("a", 10)
    driver.goes_on("nothing")
    driver.goes_on(order[0])
    assert driver.held(turn_id)
    driver.goes_on(order[1])
    assert not driver.held(turn_id)


def test_program_outside_the_window_waits_for_admission_again_when_grants_resume() -> None:
    """Its reason says so as soon as any replica grants, though it came while none did."""
    policy = load_policy("passthrough", {"admission": "window", "admission.n": 1})
    driver = Driver(policy, replicas={"r0": 1000, "r1": 1000}, settings=LIMITS)
    driver.arrives("in", 100)
    driver.suspends()
    driver.suspends("weights", "r1")
    driver.arrives("outside", 100)
    assert driver.program("outside").hold_reason == Reason.SUSPENDED
    driver.goes_on("weights", "r1")
    assert driver.program("outside").hold_reason == Reason.SUSPENDED
    driver.suspends("weights", "r1")
    driver.goes_on()
    assert driver.program("outside").hold_reason == Reason.ADMISSION


def test_admitted_program_waits_for_room_when_grants_resume_in_part() -> None:
    """If one replica grants, a program without a route waits for room there."""
    driver = Driver(load_policy("ttl", {"ttl_s": 1000.0, "reserve_tokens": 0}), replicas={"r0": 1000, "r1": 1000})
    driver.arrives("there", 900)
    home = driver.home("there")
    driver.suspends()
    driver.arrives("a", 800)
    for replica_id in ("r0", "r1"):
        driver.suspends("weights", replica_id)
    driver.goes_on()
    assert driver.program("a").hold_reason == Reason.SUSPENDED
    driver.goes_on("weights", home)
    assert driver.program("a").hold_reason == Reason.NO_ROOM


def test_program_without_a_replica_waits_for_grants_when_a_suspended_one_comes() -> None:
    """It waits for room once that replica grants."""
    driver = Driver(Cap(n=1), replicas={}, settings=LIMITS)
    driver.arrives("a", 100)
    driver.arrives("b", 100)
    assert driver.program("b").hold_reason == Reason.NO_REPLICA
    driver.suspends("weights", "r0")
    driver.comes_up("r0", 1000)
    assert driver.program("b").hold_reason == Reason.SUSPENDED
    driver.goes_on("weights", "r0")
    assert driver.home("a") == "r0"
    assert driver.program("b").hold_reason == Reason.NO_ROOM


def test_a_cause_that_holds_for_all_holds_for_a_replica_that_comes_later() -> None:
    """It holds until it ends for all."""
    driver = Driver(settings=LIMITS)
    driver.suspends()
    driver.comes_up("r1", 1000)
    turn_id = driver.arrives("a", 10)
    assert driver.held(turn_id)
    driver.goes_on(replica_id="r1")
    assert driver.held(turn_id)
    driver.goes_on()
    assert not driver.held(turn_id)


def test_a_cause_for_all_and_the_same_one_of_a_replica_are_different_things() -> None:
    """Neither ends with the other, whatever their order."""
    for first, second in ((None, "r0"), ("r0", None)):
        driver = Driver(settings=LIMITS)
        driver.suspends("pause", first)
        driver.suspends("pause", second)
        turn_id = driver.arrives("a", 10)
        driver.goes_on("pause", first)
        assert driver.held(turn_id)
        assert list(driver.scheduler.replicas["r0"].suspended_for) == ["pause"]
        driver.goes_on("pause", second)
        assert not driver.held(turn_id)


def test_nobody_is_forgotten_on_a_suspended_replica_while_another_grants() -> None:
    """The forget limit is suspended there, and restarts when grants resume; elsewhere it holds."""
    driver = Driver(replicas={"r0": 1000, "r1": 1000}, settings=LIMITS)
    for name in ("a", "b"):
        driver.takes_turn(name, 10)
        driver.routes("program", name, **{"r0" if name == "a" else "r1": 1})
        driver.takes_turn(name, 10)
    driver.suspends("pause", "r0")
    for _ in range(3):
        driver.ticks(LIMITS.forget_limit_s)
    assert [program.program_id for program in driver.scheduler.programs.values()] == ["a"]
    assert driver.home("a") == "r0"
    driver.goes_on("pause", "r0")
    driver.ticks(LIMITS.forget_limit_s / 2)
    assert driver.scheduler.programs.get("a") is not None
    driver.ticks(LIMITS.forget_limit_s)
    assert driver.scheduler.programs.get("a") is None


def test_who_waits_for_room_waits_for_a_replica_once_none_is_up() -> None:
    """It said `no_room` beside a replica that was down."""
    driver = Driver(Cap(n=1), replicas={"r0": 1000}, settings=LIMITS)
    driver.arrives("a", 100)
    driver.arrives("b", 100)
    assert driver.program("b").hold_reason == Reason.NO_ROOM
    driver.goes_down("r0")
    assert driver.program("b").hold_reason == Reason.NO_REPLICA
    driver.suspends("weights", "r0")
    driver.comes_up("r0", 1000)
    assert driver.program("b").hold_reason == Reason.SUSPENDED


# --- What else may happen meanwhile


def test_a_replica_that_goes_down_takes_its_pause_with_it() -> None:
    """Its held turns go elsewhere: a restarted engine is no longer paused."""
    driver = two_replicas()
    driver.takes_turn("a", 10)
    driver.suspends("pause", "r0")
    driver.suspends("pause", "r1")
    waits = driver.arrives("a", 20)
    driver.goes_down("r0")
    assert driver.held(waits)
    assert driver.program("a").hold_reason == Reason.REPLICA_DOWN
    driver.comes_up("r0", 1000)
    assert driver.granted_on[waits] == "r0"


def test_turns_held_beside_one_in_flight_on_a_draining_replica_leave_with_it() -> None:
    """A turn that arrives after grants resume does so, too."""
    driver = two_replicas()
    first = driver.arrives("a", 10)
    home = driver.granted_on[first]
    driver.drains(home)
    driver.suspends()
    beside = driver.arrives("a", 10, branch="sub")
    assert driver.held(beside)
    driver.goes_on()
    assert driver.held(beside)
    assert driver.program("a").hold_reason == Reason.LEAVING
    driver.finishes(first, 10)
    assert driver.granted_on[beside] != home


def test_a_replica_that_drains_gives_its_waiting_programs_away() -> None:
    """Those with a turn in flight stay until that ends."""
    driver = two_replicas()
    driver.takes_turn("a", 10)
    driver.suspends()
    waits = driver.arrives("a", 20)
    driver.drains("r0")
    assert of_kind(Pause, driver.decisions) == ["a"]
    driver.goes_on()
    assert driver.granted_on[waits] == "r1"


def test_a_release_rejects_what_waits() -> None:
    """This includes turns that are held in place."""
    driver = Driver(settings=LIMITS)
    driver.takes_turn("a", 10)
    driver.suspends()
    waits = driver.arrives("a", 20)
    driver.releases("a")
    assert of_kind(Reject, driver.decisions) == ["a"]
    assert driver.rejected_for[waits] is Reason.RELEASED
    assert driver.demand() == 0


def test_a_turn_whose_client_leaves_is_gone() -> None:
    """The program acts again, with its claim."""
    driver = Driver(settings=LIMITS)
    driver.takes_turn("a", 10)
    driver.suspends()
    driver.is_abandoned(driver.arrives("a", 20))
    assert (driver.program("a").phase, driver.home("a")) == ("acting", "r0")
    driver.goes_on()


def test_turns_are_rejected_when_the_paused_replica_is_gone_for_good() -> None:
    """They are not rejected during a pause, but in an outage."""
    driver = Driver(settings=LIMITS)
    driver.suspends()
    waits = driver.arrives("a", 10)
    driver.ticks(60.0)
    assert driver.held(waits)
    driver.goes_down("r0")
    driver.ticks(6.0)
    assert driver.rejected_for[waits] is Reason.NO_REPLICA


# --- Limits


def test_no_limit_runs_while_nothing_is_granted() -> None:
    """The times before and after the pause add up; many short pauses do not let a turn stay for ever."""
    driver = Driver(settings=LIMITS)
    driver.takes_turn("a", 10)
    for _ in range(4):
        driver.ticks(2.4)
        driver.suspends()
        driver.ticks(100.0)
        assert driver.home("a") == "r0"
        driver.goes_on()
    driver.ticks(0.3)
    assert driver.home("a") == "r0"
    driver.ticks(0.2)
    assert driver.home("a") is None
    driver.suspends()
    driver.ticks(1000.0)
    driver.goes_on()
    driver.ticks(19.0)
    assert driver.scheduler.programs.get("a") is not None
    driver.ticks(2.0)
    assert driver.scheduler.programs.get("a") is None


def test_the_idle_limit_spares_the_programs_of_a_paused_replica() -> None:
    """Their limit restarts when grants resume there; elsewhere it keeps running."""
    driver = two_replicas()
    driver.takes_turn("a", 10)
    driver.arrives("b", 10)
    driver.finishes(2, 10)
    assert (driver.home("a"), driver.home("b")) == ("r0", "r1")
    driver.suspends(replica_id="r0")
    driver.ticks(11.0)
    driver.ticks(1.0)
    assert (driver.home("a"), driver.home("b")) == ("r0", None)
    driver.goes_on(replica_id="r0")
    driver.ticks(9.0)
    assert driver.home("a") == "r0"
    driver.ticks(2.0)
    assert driver.home("a") is None


# --- What is learned


def test_a_program_whose_limit_began_anew_keeps_nobody_else_from_being_forgotten() -> None:
    """It acts for longer than the other, but its last event is later: its replica granted nothing meanwhile."""
    driver = Driver(settings=LIMITS, replicas={"r0": 1000, "r1": 1000})
    driver.takes_turn("paused", 10)
    driver.takes_turn("gone", 10)
    assert (driver.home("paused"), driver.home("gone")) == ("r0", "r1")
    driver.suspends(replica_id="r0")
    driver.ticks(20.0)
    driver.goes_on(replica_id="r0")
    assert of_kind(Release, driver.ticks(11.0)) == ["gone"]
    assert driver.home("paused") is None


def test_a_flush_forgets_what_lay_there_and_nothing_else() -> None:
    """Claims stay; a turn in flight keeps its memory; the next turn is not expected to find anything."""
    driver = Driver(settings=LIMITS)
    driver.takes_turn("a", 100)
    running = driver.arrives("b", 50)
    driver.passes(1.0)
    driver.is_flushed()
    driver.passes(1.0)
    scheduler = driver.scheduler
    assert scheduler.book.resident_tokens(driver.program("a"), scheduler.replicas["r0"]) == 0
    assert scheduler.book.resident_tokens(driver.program("b"), scheduler.replicas["r0"]) == 50
    assert driver.demand() == 150
    again = driver.arrives("a", 120)
    assert scheduler.turns[again].kept_tokens == 0
    driver.finishes(again, 120, 0, 0)
    driver.passes(1.0)
    third = driver.arrives("a", 130)
    assert scheduler.turns[third].kept_tokens == 120
    driver.finishes(running, 50)


def test_a_tool_that_begins_after_a_flush_brings_nothing_back() -> None:
    """A client may say when its tool begins: what counts is when the turn before it ended."""
    driver = Driver(settings=LIMITS)
    driver.takes_turn("a", 100)
    driver.passes(1.0)
    driver.is_flushed()
    driver.passes(1.0)
    driver.tool_starts("a", "make")
    driver.passes(1.0)
    again = driver.arrives("a", 120)
    assert driver.scheduler.turns[again].kept_tokens == 0


def test_a_side_turn_after_a_flush_brings_nothing_back() -> None:
    """It brings only its own prompt, a title. The second short turn is believed, and what it sent is expected."""
    driver = Driver(settings=LIMITS)
    driver.takes_turn("a", 100)
    driver.passes(1.0)
    driver.is_flushed()
    expected_tokens = []
    for tokens in (30, 40, 50):
        driver.passes(1.0)
        turn_id = driver.arrives("a", tokens)
        expected_tokens.append(driver.scheduler.turns[turn_id].kept_tokens)
        driver.finishes(turn_id, tokens)
    assert expected_tokens == [0, 0, 40]


def test_a_side_turn_does_not_keep_its_branch_anew() -> None:
    """The history lies there since the turn before it: a loss before a step down would count after it otherwise."""
    driver = Driver(settings=LIMITS)
    driver.takes_turn("a", 100)
    ended_s = driver.now_s
    driver.passes(5.0)
    driver.takes_turn("a", 30)
    driver.passes(1.0)
    turn = driver.scheduler.turns[driver.arrives("a", 120)]
    assert (turn.kept_tokens, turn.kept_since_s) == (100, ended_s)


def test_memory_is_kept_since_the_last_turn_whenever_the_tool_began() -> None:
    """A loss before a step down of the capacity would count after it otherwise."""
    driver = Driver(settings=LIMITS)
    driver.takes_turn("a", 100)
    ended_s = driver.now_s
    driver.passes(5.0)
    driver.tool_starts("a", "make")
    driver.passes(1.0)
    again = driver.arrives("a", 120)
    assert driver.scheduler.turns[again].kept_since_s == ended_s


@pytest.mark.parametrize("cause", ["pause", "flush", "nothing"])
def test_an_unrepresentative_turn_teaches_nothing_but_its_size(cause: str) -> None:
    """Its time and its hits are not the engine's usual ones, and the time after it may be no tool."""
    driver = Driver(settings=LIMITS)
    first = driver.arrives("a", 1000)
    driver.passes(1.0)
    if cause == "pause":
        driver.suspends()
        driver.ticks(600.0)
        driver.goes_on()
    elif cause == "flush":
        driver.is_flushed()
    driver.finishes(first, 1000, 100, 0, tool="make")
    seen_count = driver.scheduler.knowledge.prices.turn_count("r0")
    assert driver.program("a").context_tokens == 1100
    assert driver.program("a").tool_runs == (cause == "nothing")
    assert seen_count == (cause == "nothing")


# --- Pinned turns


def test_a_pinned_turn_runs_on_its_replica_or_not_at_all() -> None:
    """It waits while nothing is granted there, whatever others do, and is rejected when its replica goes."""
    driver = two_replicas()
    assert driver.granted_on[driver.arrives_pinned("r1")] == "r1"
    driver.suspends(replica_id="r1")
    waits = driver.arrives_pinned("r1")
    assert driver.held(waits)
    driver.goes_down("r1")
    assert driver.rejected_for[waits] is Reason.NO_REPLICA
    assert driver.rejected_for[driver.arrives_pinned("r1")] is Reason.NO_REPLICA
    assert driver.rejected_for[driver.arrives_pinned("nowhere")] is Reason.NO_REPLICA


def test_a_restore_is_refused_where_nothing_is_granted() -> None:
    """A policy does not even see such a replica."""
    driver = Driver(Cap(n=2), settings=LIMITS)
    driver.takes_turn("a", 10)
    driver.ticks(11.0)
    assert driver.home("a") is None
    driver.suspends()
    for _ in range(3):
        assert of_kind(Restore, driver.ticks(1.0)) == []
