"""The scheduler in scenarios; the invariants are checked after every event of each."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import inf

import pytest

from tests.builders import Driver, of_kind, restored_on
from thunderagent.programs.learned.tool_times import EDGES_S
from thunderagent.programs.messages import (
    Grant,
    Hold,
    Mark,
    Pause,
    Reason,
    Reject,
    Release,
    ReplicaPolled,
    ReplicaUp,
    Restore,
    SchedulerSettings,
    Tick,
    TurnAdopted,
    TurnAsk,
    TurnEnd,
)
from thunderagent.programs.policies.baselines.cap import Cap
from thunderagent.programs.policies.baselines.passthrough import Passthrough
from thunderagent.programs.policies.baselines.sticky import Sticky
from thunderagent.programs.policies.breakeven import BreakEven
from thunderagent.programs.policies.papers.thunderagent import ThunderAgent
from thunderagent.programs.policy import ClaimRules, Moment, Placement, Policy, ProgramView, ReplicaView, View
from thunderagent.programs.scheduler import Scheduler
from thunderagent.programs.state.program import Phase, Status

PLAIN = ClaimRules()
LIMITS = SchedulerSettings(idle_limit_s=50.0, forget_limit_s=200.0, no_replica_limit_s=10.0)


def by_memory(**replicas: int | None) -> Driver:
    """A driver whose policy goes by memory and checks every second."""
    policy = ThunderAgent(delta_s=1.0, half_life_s=inf, reserve_tokens=0)
    return Driver(policy, replicas=replicas or {"r0": 1000}, settings=LIMITS)


def by_load(**replicas: int | None) -> Driver:
    """A driver whose policy admits all programs at once."""
    return Driver(Passthrough(), replicas=replicas or {"r0": 1000}, settings=LIMITS)


# --- Granted, held, restored ----------------------------------------------------------------------------------


def test_a_turn_that_fits_is_granted_at_once() -> None:
    """One event gives the lease, without a tick."""
    driver = by_memory()
    driver.arrives("a", 400)
    assert driver.decisions == [Restore("a", "r0", Reason.FITS), Grant(1, "a", "r0", Reason.FITS)]
    assert driver.demand() == 400


def test_a_turn_that_does_not_fit_is_held_and_restored_when_there_is_room() -> None:
    """The hold has its reason; a release makes room; the next check restores and grants."""
    driver = by_memory()
    driver.takes_turn("a", 700)
    driver.arrives("b", 400)
    assert driver.decisions == [Hold(2, "b", Reason.NO_ROOM)]
    assert driver.ticks(1.0) == []
    driver.releases("a")
    assert driver.ticks(1.0) == [Restore("b", "r0", Reason.FITS), Grant(2, "b", "r0", Reason.FITS)]
    assert driver.program("b").held_s_total == pytest.approx(2.0)


def test_an_active_programs_next_turn_is_granted_at_home() -> None:
    """A program with a claim needs no second one, even if the replica is full."""
    driver = by_memory()
    driver.takes_turn("a", 1000)
    driver.arrives("a", 1000)
    assert driver.decisions == [Grant(2, "a", "r0", Reason.HOME)]


def test_64_turns_of_one_program_at_once_are_all_granted_and_share_one_prompt() -> None:
    """Best-of-64 is never serialised, and counts as one prompt and 64 outputs."""
    driver = by_memory()
    turns = [driver.arrives("a", 500) for _ in range(64)]
    assert {driver.granted_on[turn] for turn in turns} == {"r0"}
    assert driver.demand() == 500
    for turn in turns:
        driver.progresses(turn, output=2)
    assert driver.demand() == 500 + 128
    for turn in turns:
        driver.finishes(turn, 500, 2)
        assert (driver.program("a").phase is Phase.ACTING) == (turn == turns[-1])
    assert driver.demand() == 502


def test_64_turns_of_a_paused_program_are_held_and_granted_together() -> None:
    """A restore grants every held turn at once."""
    driver = by_memory()
    driver.takes_turn("first", 900)
    turns = [driver.arrives("a", 500) for _ in range(64)]
    assert all(driver.held(turn) for turn in turns)
    assert driver.scheduler.ledger.waiting_count == 64
    decisions = driver.releases("first") + driver.ticks(1.0)
    assert [each.turn_id for each in decisions if isinstance(each, Grant)] == turns
    assert driver.scheduler.ledger.waiting_count == 0


@pytest.mark.parametrize("parent_paused", [False, True])
def test_a_parent_that_waits_for_five_sub_agents_with_room_for_one_never_deadlocks(parent_paused: bool) -> None:
    """All six contexts are one program: all its turns or none are granted, and all continue in the end."""
    driver = by_memory()
    driver.takes_turn("a", 100)
    if parent_paused:
        driver.ticks(51.0)
        driver.takes_turn("other", 950)
    children = [driver.arrives("a", 150 if parent_paused else 900, branch=f"sub-{number}") for number in range(5)]
    if parent_paused:
        assert all(driver.held(child) for child in children)
        driver.releases("other")
        driver.ticks(1.0)
    assert {driver.granted_on.get(child) for child in children} == {"r0"}
    for child in children:
        driver.finishes(child, 900)
        driver.ticks(1.0)
    parent = driver.arrives("a", 950)
    driver.ticks(1.0)
    assert driver.granted_on[parent] == "r0"


def test_a_sub_agent_of_a_reasoning_parent_is_granted_beside_it() -> None:
    """A turn that a turn in flight waits for is never held, however full the memory is."""
    driver = by_memory()
    driver.arrives("a", 900)
    driver.arrives("a", 900, branch="sub")
    assert driver.decisions == [Grant(2, "a", "r0", Reason.HOME)]
    assert driver.demand() == 1800


def test_ended_sub_agents_give_their_claim_back_when_the_parent_goes_on() -> None:
    """Their contexts count until the next main turn ends, and no longer."""
    driver = by_load()
    driver.takes_turn("a", 300)
    driver.takes_turn("a", 200, branch="sub")
    assert driver.demand() == 500
    driver.takes_turn("a", 350)
    assert driver.demand() == 350


def test_ended_sub_agents_of_a_sub_agent_give_their_claim_back_when_it_goes_on() -> None:
    """The sub-agent that the main branch waits for is then alone; a parent named for the main branch has no effect."""
    driver = by_load()
    driver.takes_turn("a", 300, parent_branch="nobody")
    driver.takes_turn("a", 200, branch="sub")
    driver.takes_turn("a", 50, branch="below", parent_branch="sub")
    driver.takes_turn("a", 25, branch="beside")
    assert driver.demand() == 575
    driver.takes_turn("a", 250, branch="sub")
    assert driver.demand() == 300 + 250 + 25
    driver.takes_turn("a", 350)
    assert driver.demand() == 350


# --- Released -------------------------------------------------------------------------------------------------


def test_a_release_while_held_rejects_and_never_grants() -> None:
    """The held turn gets one answer, which is a refusal."""
    driver = by_memory()
    driver.takes_turn("a", 900)
    turn = driver.arrives("b", 500)
    generation = driver.program("b").generation
    assert driver.releases("b") == [
        Reject(turn, "b", Reason.RELEASED),
        Release("b", generation, Reason.RELEASED),
    ]
    driver.releases("a")
    assert driver.ticks(1.0) == []
    assert turn not in driver.granted_on


def test_a_release_twice_is_a_release_once() -> None:
    """A second one, and one of an unknown id, change nothing."""
    driver = by_memory()
    driver.takes_turn("a", 900)
    assert of_kind(Release, driver.releases("a")) == ["a"]
    assert driver.releases("a") == []
    assert driver.releases("never-was") == []
    assert driver.demand() == 0
    assert driver.scheduler.book.active_count == 0


def test_several_programs_end_before_anybody_gets_their_room() -> None:
    """One event names all: no turn of a program in it is granted meanwhile; strangers do not matter."""
    driver = Driver(Cap(n=1))
    driver.takes_turn("a", 10)
    also_named, waits = driver.arrives("b", 10), driver.arrives("c", 10)
    decisions = driver.releases_all("a", "b", "never-was", "a")
    assert of_kind(Release, decisions) == ["a", "b"]
    assert driver.rejected_for == {also_named: Reason.RELEASED}
    assert driver.granted_on[waits] == "r0"


def test_a_late_release_of_an_old_generation_does_not_end_the_new_one() -> None:
    """Ids return every epoch: a release of an old generation changes nothing."""
    driver = by_memory()
    driver.takes_turn("a", 300)
    old = driver.program("a").generation
    driver.releases("a", old)
    driver.takes_turn("a", 400)
    assert driver.releases("a", old) == []
    assert driver.program("a").generation > old
    assert driver.demand() == 400
    assert of_kind(Release, driver.releases("a", driver.program("a").generation)) == ["a"]


def test_a_turn_in_flight_outlives_its_program_as_load() -> None:
    """It is released in mid-turn: the replica is charged until the turn ends; the new incarnation learns nothing."""
    driver = by_memory()
    old_turn = driver.arrives("a", 300)
    driver.releases("a")
    assert driver.demand() == 300
    driver.takes_turn("a", 100)
    driver.finishes(old_turn, 900, 50)
    assert driver.program("a").context_tokens == 100
    assert driver.demand() == 100


# --- Replicas come and go -------------------------------------------------------------------------------------


def test_a_lost_replicas_programs_are_paused_at_once_and_their_turns_arrive_again_elsewhere() -> None:
    """The turns fail, arrive again with `avoid`, and are granted on the other replica; nothing counts twice."""
    driver = by_memory(r0=1000, r1=2000)
    driver.takes_turn("a", 1200)
    turn = driver.arrives("a", 1300)
    assert driver.home("a") == "r1"
    decisions = driver.goes_down("r1")
    assert Pause("a", "r1", Reason.REPLICA_DOWN) in decisions
    driver.comes_up("r2", 2000)
    again = driver.arrives("a", 1300, avoid="r1")
    assert driver.granted_on[again] == "r2"
    assert driver.fails(turn) == []
    assert driver.demand("r2") == 1300
    driver.finishes(again, 1300)
    assert driver.program("a").phase is Phase.ACTING


def test_acting_programs_of_a_lost_replica_are_restored_elsewhere_at_once() -> None:
    """No tick passes between the loss and the new home."""
    driver = by_memory(r0=1000, r1=1000)
    driver.takes_turn("a", 600)
    driver.takes_turn("b", 300)
    assert (driver.home("a"), driver.home("b")) == ("r0", "r1")
    decisions = driver.goes_down("r1")
    assert decisions == [Pause("b", "r1", Reason.REPLICA_DOWN), Restore("b", "r0", Reason.FITS)]
    assert driver.scheduler.replicas["r1"].account.demand_tokens == 0


def test_a_turn_is_kept_off_the_replica_that_failed_it_if_there_is_another() -> None:
    """`avoid` is obeyed, unless only that replica is left."""
    driver = by_load(r0=1000, r1=1000)
    first = driver.arrives("a", 100)
    driver.fails(first)
    second = driver.arrives("a", 100, avoid=driver.granted_on[first])
    assert driver.granted_on[second] != driver.granted_on[first]
    driver.fails(second)
    driver.goes_down(driver.granted_on[first])
    third = driver.arrives("a", 100, avoid=driver.granted_on[second])
    assert driver.granted_on[third] == driver.granted_on[second]


def test_a_removed_replica_is_forgotten_and_what_was_in_flight_there_is_lost() -> None:
    """Its programs are paused, its turns' ends count nowhere, and nothing refers to it any more."""
    driver = by_memory(r0=1000, r1=900)
    turn = driver.arrives("reasons", 500)
    anonymous = driver.arrives(None, 100)
    driver.takes_turn("acts", 300)
    homes = {name: driver.home(name) for name in ("reasons", "acts")}
    gone = homes["reasons"]
    assert gone is not None
    decisions = driver.is_removed(gone)
    assert {each.reason for each in decisions if isinstance(each, Pause)} == {Reason.REPLICA_REMOVED}
    assert gone not in driver.scheduler.replicas
    assert gone not in driver.scheduler.ledger.accounts
    assert [replica.replica_id for replica in driver.scheduler.open_replicas] == [{"r0": "r1", "r1": "r0"}[gone]]
    driver.fails(turn)
    driver.finishes(anonymous, 100)
    assert driver.is_removed(gone) == []
    driver.reports(gone, reasons=500)
    assert gone not in driver.scheduler.replicas, "a report that comes late brings nothing back"
    again = driver.arrives("reasons", 500, avoid=gone)
    assert driver.granted_on[again] != gone


@pytest.mark.parametrize("late", ["polled", "down", "draining", "suspended", "residency"])
def test_late_news_of_a_removed_replica_do_not_bring_it_back(late: str) -> None:
    """Only a report that it is up does, with its size at that time."""
    driver = by_memory(r0=1000, r1=900)
    driver.is_removed("r0")
    {
        "polled": lambda: driver.send(ReplicaPolled(driver.now_s, "r0", 500)),
        "down": lambda: driver.goes_down("r0"),
        "draining": lambda: driver.drains("r0"),
        "suspended": lambda: driver.suspends("pause", "r0"),
        "residency": lambda: driver.reports("r0", a=10),
    }[late]()
    assert list(driver.scheduler.replicas) == list(driver.scheduler.ledger.accounts) == ["r1"]
    driver.send(ReplicaUp(driver.now_s, "r0", 700))
    assert driver.scheduler.replicas["r0"].account.capacity_tokens == 700
    assert driver.granted_on[driver.arrives("small", 10)] == "r1"


def test_a_draining_replica_gets_nothing_new_and_keeps_what_is_in_flight() -> None:
    """Acting programs leave at once, reasoning ones at the end of their turn; new ones go elsewhere."""
    driver = by_memory(r0=1000, r1=900)
    turn = driver.arrives("reasons", 500)
    driver.takes_turn("acts", 850)
    driver.releases("acts")
    driver.takes_turn("acts", 450)
    assert (driver.home("reasons"), driver.home("acts")) == ("r0", "r1")
    decisions = driver.drains("r1") + driver.drains("r0")
    assert of_kind(Pause, decisions) == ["acts", "acts"]
    assert of_kind(Mark, decisions) == ["reasons"]
    new = driver.arrives("new", 10)
    assert driver.decisions == [Hold(new, "new", Reason.NO_REPLICA)]
    assert Pause("reasons", "r0", Reason.MARKED) in driver.finishes(turn, 500)
    assert restored_on(driver.comes_up("r0", 1000)) == {"new": "r0", "acts": "r0", "reasons": "r0"}


def test_without_a_replica_turns_are_held_and_rejected_after_the_limit() -> None:
    """Both kinds of turns wait for 10 s, then get a clear refusal; the programs stay, acting."""
    driver = by_memory()
    driver.goes_down("r0")
    turns = [driver.arrives("a", 10), driver.arrives(None, 10)]
    assert driver.decisions == [Hold(2, None, Reason.NO_REPLICA)]
    assert driver.ticks(10.0) == []
    assert [type(each) for each in driver.ticks(0.5)] == [Reject, Reject]
    assert driver.rejected_for == dict.fromkeys(turns, Reason.NO_REPLICA)
    assert driver.scheduler.ledger.waiting_count == 0
    assert driver.program("a").phase is Phase.ACTING


def test_a_turn_that_arrives_late_in_an_outage_waits_its_own_limit() -> None:
    """The limit is each turn's, not the outage's."""
    driver = by_memory()
    driver.goes_down("r0")
    driver.passes(100.0)
    turn = driver.arrives("a", 10)
    driver.ticks(9.0)
    assert driver.held(turn)
    driver.ticks(1.0)
    assert driver.rejected_for[turn] is Reason.NO_REPLICA


def test_held_turns_go_on_as_soon_as_a_replica_is_up() -> None:
    """The end of an outage needs no tick, for programs and for anonymous turns."""
    driver = by_memory()
    driver.goes_down("r0")
    turns = [driver.arrives("a", 10), driver.arrives(None, 10)]
    driver.comes_up("r0", 1000)
    assert [driver.granted_on.get(turn) for turn in turns] == ["r0", "r0"]
    assert driver.ticks(1000.0) == []


def test_the_loss_of_a_replica_with_anonymous_turns_leaves_no_load_behind() -> None:
    """Their claims and counts go with the replica, and their late ends change nothing."""
    driver = by_load()
    turn = driver.arrives(None, 300)
    assert driver.demand() == 300
    driver.goes_down("r0")
    assert driver.demand() == 0
    driver.comes_up("r0", 1000)
    driver.fails(turn)
    assert driver.demand() == 0
    assert driver.scheduler.turns == {}


# --- Odd sizes ------------------------------------------------------------------------------------------------


def test_a_program_larger_than_every_replica_runs_at_once() -> None:
    """None starves: the engine decides, and smaller ones are not blocked."""
    driver = by_memory(r0=1000, r1=500)
    driver.takes_turn("a", 900)
    turn = driver.arrives("huge", 5000)
    assert driver.decisions == [
        Restore("huge", driver.granted_on[turn], Reason.OVERSIZE),
        Grant(turn, "huge", driver.granted_on[turn], Reason.OVERSIZE),
    ]


def test_a_program_that_becomes_oversize_while_it_waits_runs_too() -> None:
    """It is held because both replicas were full; then the only one that it fits on is lost."""
    driver = by_memory(r0=1000, r1=3000)
    blocker = driver.arrives("large", 2900)
    driver.takes_turn("small", 800)
    turn = driver.arrives("waits", 2000)
    assert driver.held(turn)
    driver.goes_down("r1")
    driver.is_abandoned(blocker)
    driver.releases("large")
    driver.ticks(1.0)
    assert driver.granted_on.get(turn) == "r0"


def test_unknown_capacity_lets_everyone_in() -> None:
    """Unknown is not zero."""
    driver = by_memory(r0=None)
    turns = [driver.arrives(f"p{number}", 100_000) for number in range(50)]
    assert all(driver.granted_on.get(turn) == "r0" for turn in turns)
    assert driver.ticks(10.0) == []


def test_a_capacity_that_becomes_known_is_obeyed_from_then_on() -> None:
    """The first reading after a blind start restores the bounds."""
    driver = by_memory(r0=None)
    driver.takes_turn("a", 3000)
    driver.comes_up("r0", 1000)
    driver.arrives("b", 400)
    assert driver.decisions == [Hold(2, "b", Reason.NO_ROOM)]


# --- Time -----------------------------------------------------------------------------------------------------


def test_the_idle_limit_takes_the_claim_and_the_next_turn_is_placed_anew() -> None:
    """A tool of 51 s costs the program its memory only; nothing but its own turn brings it back."""
    driver = by_memory()
    driver.takes_turn("a", 700)
    driver.ticks(50.0)
    assert driver.home("a") == "r0"
    assert driver.ticks(1.0) == [Pause("a", "r0", Reason.IDLE)]
    assert [driver.ticks(1.0) for _ in range(5)] == [[]] * 5
    generation = driver.program("a").generation
    turn = driver.arrives("a", 710)
    assert driver.granted_on[turn] == "r0"
    assert driver.program("a").generation == generation


def test_claims_are_lost_in_the_order_of_the_last_turns() -> None:
    """Two programs pass the idle limit at once: first goes the one whose last turn ended first."""
    driver = by_memory()
    driver.takes_turn("a", 100)
    driver.takes_turn("b", 100)
    driver.ticks(10.0)
    driver.takes_turn("a", 110)
    assert of_kind(Pause, driver.ticks(100.0)) == ["b", "a"]


def test_the_idle_limit_is_learned_for_each_tool() -> None:
    """Builds of 400 s lose their claims after 300 s, until ten of them came back; other tools still do."""
    driver = Driver(Passthrough(), replicas={"r0": 1000})
    for number in range(10):
        driver.takes_turn(f"p{number}", 10, tool="build")
    assert driver.ticks(300.0) == []
    assert of_kind(Pause, driver.ticks(1.0)) == [f"p{number}" for number in range(10)]
    driver.passes(99.0)
    for number in range(10):
        driver.takes_turn(f"p{number}", 20, tool="build" if number else "look")
    limit_s = 2 * next(edge_s for edge_s in EDGES_S if edge_s > 400.0)
    assert of_kind(Pause, driver.ticks(301.0)) == ["p0"]
    assert driver.ticks(limit_s - 301.0) == []
    assert of_kind(Pause, driver.ticks(1.0)) == [f"p{number}" for number in range(1, 10)]


@pytest.mark.parametrize(("forget_limit_s", "limit_s"), [(1800.0, 900.0), (200.0, 100.0)])
def test_a_learned_idle_limit_takes_the_claim_well_before_the_program_is_forgotten(
    forget_limit_s: float, limit_s: float
) -> None:
    """This holds however long its tool took before, though the least limit is longer: others wait for the memory."""
    driver = Driver(Passthrough(), settings=SchedulerSettings(forget_limit_s=forget_limit_s))
    for _ in range(12):
        driver.takes_turn("a", 10, tool="build")
        driver.passes(1200.0)
    driver.takes_turn("a", 10, tool="build")
    assert driver.ticks(limit_s) == []
    assert driver.ticks(1.0) == [Pause("a", "r0", Reason.IDLE)]


def test_an_idle_limit_that_is_set_is_not_learned() -> None:
    """Whatever a tool takes, the limit stays 50 s."""
    driver = by_load()
    for _ in range(12):
        driver.takes_turn("a", 10, tool="build")
        driver.passes(49.0)
    driver.takes_turn("a", 10, tool="build")
    assert driver.ticks(50.0) == []
    assert driver.ticks(1.0) == [Pause("a", "r0", Reason.IDLE)]


def test_the_forget_limit_drops_a_program_and_its_id_comes_back_as_a_new_one() -> None:
    """After 200 s without an event the table knows nothing about it."""
    driver = by_memory()
    driver.takes_turn("a", 700)
    generation = driver.program("a").generation
    driver.ticks(60.0)
    driver.ticks(140.0)
    assert driver.program("a").generation == generation
    assert driver.ticks(1.0) == [Release("a", generation, Reason.FORGOTTEN)]
    assert len(driver.scheduler.programs) == 0
    driver.arrives("a", 700)
    assert driver.program("a").generation > generation


@pytest.mark.parametrize("inferred", [False, True])
def test_the_idle_limit_counts_from_the_first_tool_however_many_run_between_two_turns(inferred: bool) -> None:
    """An agent that runs one command after another is not forgotten, but two cheap words keep no claim for ever."""
    driver = Driver(settings=LIMITS)
    driver.takes_turn("a", 10)
    driver.passes(20.0)
    driver.tool_starts("a", "make")
    for _ in range(2):
        driver.ticks(20.0)
        driver.tool_ends("a", inferred=inferred)
        driver.ticks(5.0)
        driver.tool_starts("a", "make")
    assert driver.home("a") == "r0"
    assert of_kind(Pause, driver.ticks(1.0)) == ["a"]
    for _ in range(6):
        driver.ticks(60.0)
        driver.tool_ends("a", inferred=inferred)
        driver.tool_starts("a", "make")
    assert of_kind(Release, driver.ticks(200.0)) == []
    assert of_kind(Release, driver.ticks(1.0)) == ["a"]


def test_a_program_with_a_turn_is_neither_idle_nor_forgotten() -> None:
    """Turns may take hours."""
    driver = by_memory()
    driver.arrives("a", 700)
    held = driver.arrives("b", 700)
    assert driver.ticks(10_000.0) == []
    assert driver.held(held)


def test_limits_count_from_the_end_of_the_last_turn() -> None:
    """A turn in between restarts the time."""
    driver = by_memory()
    driver.takes_turn("a", 100)
    driver.ticks(40.0)
    driver.takes_turn("a", 100)
    assert driver.ticks(40.0) == []


@pytest.mark.parametrize("step_s", [0.0, -7.0])
def test_a_clock_that_stands_still_or_runs_backwards_breaks_nothing(step_s: float) -> None:
    """Time never runs backwards in the core: costs, waits and sums stay at or above zero."""
    driver = by_memory()
    for number in range(40):
        driver.passes(step_s)
        turn = driver.arrives(f"p{number % 5}", 300)
        driver.passes(step_s)
        driver.starts(turn)
        driver.ticks(step_s)
        if turn in driver.granted_on:
            driver.finishes(turn, 300, 20)
        else:
            driver.is_abandoned(turn)
    assert driver.scheduler.now_s == 100.0
    account = driver.scheduler.replicas["r0"].account
    assert account.costs.caching_token_s == account.costs.unused_token_s == 0.0
    assert all(program.held_s_total == 0.0 for program in driver.scheduler.programs.values())


def test_an_idle_table_decides_nothing_in_a_thousand_ticks() -> None:
    """Nothing is decided without news: full replicas, a queue and sleeping programs stay as they are."""
    driver = by_memory(r0=1000, r1=1000)
    for number in range(8):
        turn = driver.arrives(f"p{number}", 400)
        if turn in driver.granted_on and number % 2:
            driver.finishes(turn, 400)
    driver.ticks(1.0)
    assert len(driver.scheduler.queue)
    assert [driver.ticks(0.04) for _ in range(1000)] == [[]] * 1000


# --- Turns that end badly -------------------------------------------------------------------------------------


@pytest.mark.parametrize("end", ["fails", "is_abandoned", "without usage"])
@pytest.mark.parametrize("was_held", [False, True])
def test_a_turn_that_ends_badly_leaves_no_program_reasoning(end: str, was_held: bool) -> None:
    """Failed, cancelled or without usage, granted or held: the program acts, and the counts are right."""
    driver = by_memory()
    if was_held:
        driver.takes_turn("first", 900)
    turn = driver.arrives("a", 300)
    assert driver.held(turn) == was_held
    if end == "without usage":
        driver.finishes(turn, None, None, None)
    else:
        getattr(driver, end)(turn)
    assert driver.program("a").phase is Phase.ACTING
    account = driver.scheduler.replicas["r0"].account
    assert (account.reasoning_count, account.turn_count) == (0, 0)
    assert driver.scheduler.ledger.waiting_count == 0


def test_a_turn_without_usage_is_taken_at_its_estimate() -> None:
    """The engine reported nothing: the bytes and the streamed output stand in."""
    driver = by_load()
    turn = driver.arrives("a", 300)
    driver.progresses(turn, output=40)
    driver.finishes(turn, None, None)
    assert driver.program("a").context_tokens == 340


def test_a_failed_turn_teaches_nothing() -> None:
    """The context is that of the last good usage."""
    driver = by_load()
    driver.takes_turn("a", 300)
    turn = driver.arrives("a", 900)
    driver.fails(turn)
    assert driver.program("a").context_tokens == 300


def test_a_turn_that_ended_ends_only_once() -> None:
    """A second end of a turn, and an end of an unknown one, change nothing."""
    driver = by_load()
    turn = driver.takes_turn("a", 300)
    for again in (driver.fails, driver.is_abandoned, driver.starts):
        assert again(turn) == []
    assert driver.finishes(turn, 999) == driver.progresses(turn, 50) == driver.finishes(12345, 1) == []
    assert driver.demand() == 300


def test_a_held_turn_cannot_have_started() -> None:
    """A first byte before the grant is ignored: no cost term becomes negative."""
    driver = by_memory()
    driver.takes_turn("first", 900)
    turn = driver.arrives("a", 300)
    driver.starts(turn)
    driver.releases("first")
    driver.ticks(5.0)
    driver.passes(2.0)
    driver.finishes(turn, 300, 10)
    costs = driver.scheduler.replicas["r0"].account.costs
    assert costs.prefill_token_s > 0
    assert costs.decode_token_s > 0


def test_a_marked_program_pauses_at_the_end_of_its_last_turn() -> None:
    """It does not while one of two is in flight; its next turn is placed anew."""
    driver = by_memory()
    turns = [driver.arrives("a", 600), driver.arrives("a", 600)]
    driver.progresses(turns[0], output=500)
    assert of_kind(Mark, driver.ticks(1.0)) == ["a"]
    assert of_kind(Pause, driver.finishes(turns[0], 600, 500)) == []
    assert driver.finishes(turns[1], 1050, 0) == [Pause("a", "r0", Reason.MARKED)]
    assert driver.program("a").status is Status.PAUSED
    assert driver.demand() == 0


# --- Turns without a program ----------------------------------------------------------------------------------


def test_an_anonymous_turn_is_granted_on_the_least_loaded_replica_and_counts_as_load() -> None:
    """It is never held for memory, and its memory is not given to others."""
    driver = by_memory(r0=1000, r1=1000)
    driver.arrives("a", 900)
    driver.arrives(None, 5000)
    assert driver.decisions == [Grant(2, None, "r1", Reason.ANONYMOUS)]
    assert driver.demand("r1") == 5000
    driver.arrives("b", 500)
    assert driver.decisions == [Hold(3, "b", Reason.NO_ROOM)]
    driver.finishes(2, 5000, 10)
    assert driver.demand("r1") == 0


def test_anonymous_turns_teach_what_a_byte_is_worth() -> None:
    """The ratio for unknown programs moves towards usages by a twentieth at a time."""
    driver = by_load()
    for _ in range(200):
        turn = driver.arrives(None, 100)
        driver.finishes(turn, 200)
    turn = driver.arrives("new", 100)
    assert driver.program("new").claim_tokens == pytest.approx(200, abs=1)


@pytest.mark.parametrize(("told_tokens", "claim_tokens"), [(0, 250), (1_000_000, 4000)])
def test_no_client_teaches_that_a_byte_is_worth_nothing_or_a_lot(told_tokens: int, claim_tokens: int) -> None:
    """A newcomer of 1,000 tokens claims at most 4 times too little or too much, whatever bodies contain."""
    driver = by_load()
    for _ in range(200):
        driver.finishes(driver.arrives("stranger", 1000), prompt=told_tokens)
    driver.arrives("new", 1000)
    assert driver.program("new").claim_tokens == pytest.approx(claim_tokens, rel=0.01)


# --- What a policy may do -------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Stubborn(Policy):
    """A policy that insists on one replica, usable or not, and proposes everything that is illegal."""

    replica_id: str
    name: str = "stubborn"
    claim_rules: ClaimRules = PLAIN
    tick_s: float = 1.0

    def hold_s(self, view: View, program: ProgramView) -> float:
        return inf

    def pause_rank(self, program: ProgramView) -> float:
        return program.opened_s

    def restore_rank(self, program: ProgramView) -> float:
        return program.opened_s

    def place(self, view: View, program: ProgramView, candidates: Sequence[ReplicaView]) -> Placement:
        return Placement(Elsewhere(self.replica_id, candidates[0].account), Reason.POLICY)

    def balance(self, view: View, moment: Moment) -> None:
        if moment is not Moment.TICK or not (waiting := view.first_waiting()):
            return
        assert not view.propose_restore(waiting, Elsewhere(self.replica_id, None), Reason.POLICY)
        assert not view.propose_pause(waiting, Reason.POLICY)
        assert not view.propose_mark(waiting, Reason.POLICY)


@dataclass(frozen=True)
class Elsewhere:
    """A replica that exists only for the policy."""

    replica_id: str
    account: object


@pytest.mark.parametrize("replica_id", ["down", "draining", "never-was"])
def test_a_policy_cannot_place_where_nothing_may_be_granted(replica_id: str) -> None:
    """The scheduler decides: a turn for a replica that is not open is held, and proposals are refused."""
    driver = Driver(Stubborn(replica_id), replicas={"r0": 1000, "down": 1000, "draining": 1000})
    driver.goes_down("down")
    driver.drains("draining")
    turn = driver.arrives("a", 10)
    assert driver.held(turn)
    assert driver.ticks(1.0) == []


@pytest.mark.parametrize(
    "policy",
    [BreakEven(), Passthrough(), Sticky(), Cap(n=2), ThunderAgent(delta_s=1.0)],
    ids=lambda policy: policy.name,
)
def test_after_everybody_left_every_count_is_zero(policy: Policy) -> None:
    """A busy hour with failures, sub-agents, a lost replica and releases leaves nothing behind."""
    driver = Driver(policy, replicas={"r0": 1000, "r1": 700}, settings=LIMITS)
    turns = []
    for number in range(120):
        turns.append(driver.arrives(f"p{number % 9}" if number % 7 else None, 50 * (number % 13)))
        driver.ticks(0.5)
        if number % 3 == 0:
            driver.finishes(turns.pop(0), 40 * (number % 11), number % 5)
        if number % 31 == 30:
            driver.goes_down("r1")
        if number % 31 == 15:
            driver.comes_up("r1", 700)
        if number % 10 == 9:
            driver.releases(f"p{number % 9}")
    for turn in turns:
        driver.is_abandoned(turn)
    for program in list(driver.scheduler.programs.values()):
        driver.releases(program.program_id)
    assert not driver.scheduler.turns
    assert not driver.scheduler.book.anonymous_held
    assert len(driver.scheduler.queue) == len(driver.scheduler.programs) == 0
    for replica in driver.scheduler.replicas.values():
        assert (replica.account.demand_tokens, replica.account.turn_count) == (0, 0)


def test_a_turn_id_that_is_used_twice_is_a_bug_and_raises() -> None:
    """The runtime makes turn ids; a second arrival of one would lose a lease."""
    scheduler = Scheduler(Passthrough())
    scheduler.handle(TurnAsk(now_s=1.0, turn_id=1, program_id="a"))
    with pytest.raises(AssertionError, match="turn 1 arrives twice"):
        scheduler.handle(TurnAsk(now_s=1.0, turn_id=1, program_id="a"))


def test_the_same_events_lead_to_the_same_decisions() -> None:
    """A second scheduler that is fed the first one's events decides the same, to the last field."""
    driver = by_memory(r0=1000, r1=600)
    for number in range(60):
        turn = driver.arrives(f"p{number % 6}", 90 * (number % 8))
        driver.ticks(0.7)
        if number % 2:
            driver.send(TurnEnd(now_s=driver.now_s, turn_id=turn, outcome="abandoned"))
    again = Scheduler(driver.scheduler.policy, LIMITS)
    assert [again.handle(event) for event, _ in driver.events] == [decisions for _, decisions in driver.events]


def test_waiting_for_memory_costs_unused_memory_only_where_there_is_memory() -> None:
    """A replica that is down has no memory that could be idle."""
    driver = by_memory(r0=1000, r1=1000)
    driver.goes_down("r1")
    driver.arrives("a", 1000)
    driver.arrives("b", 900)
    driver.passes(60.0)
    driver.comes_up("r1", 1000)
    driver.send(Tick(driver.now_s))
    assert driver.scheduler.replicas["r1"].account.costs.unused_token_s == 0.0


def test_the_scheduler_says_what_it_is() -> None:
    """Logs and failures show `repr`."""
    driver = by_memory()
    driver.takes_turn("a", 600)
    driver.arrives("b", 600)
    assert repr(driver.scheduler) == (
        "<Scheduler thunderagent: 2 programs, <PausedQueue: 1 reasoning, 0 acting, 0 unadmitted>, "
        "[<Replica r0 up: 600/1000 tokens, 0 reasoning, 1 acting>]>"
    )


def test_a_program_whose_only_turn_was_held_and_left_claims_nothing() -> None:
    """It has no memory to be restored to; its next turn is placed like a new one."""
    driver = Driver(ThunderAgent(delta_s=1.0), replicas={"r0": 2000})
    driver.takes_turn("a", 1700)
    driver.is_abandoned(driver.arrives("ghost", 100))
    driver.releases("a")
    assert driver.ticks(1.0) == driver.ticks(1.0) == []
    assert driver.demand() == 0
    assert not driver.held(driver.arrives("ghost", 100))


def test_failed_turns_of_ever_new_branches_do_not_grow_a_program() -> None:
    """Only the last used idle branches are kept, however their turns ended."""
    driver = Driver()
    for number in range(40):
        driver.fails(driver.arrives("a", 100, branch=f"b{number}"))
    assert len(driver.program("a").branches) < 20


def test_a_program_whose_turn_runs_elsewhere_is_there() -> None:
    """Its stored record is older than the turn; the turn and its usage still belong to it."""
    driver = Driver(Cap(1), replicas={"r0": 1000, "r1": 1000})
    turn_id = driver.arrives("a", 100, wanted="r0")
    driver.finishes(turn_id, 100, 10)
    assert driver.home("a") == "r0"
    driver.send(
        TurnAdopted(
            driver.now_s,
            7000,
            "r1",
            TurnAsk(now_s=driver.now_s, turn_id=7000, program_id="a", branch_id="", prompt_bytes=40),
        )
    )
    turn = driver.scheduler.turns[7000]
    assert (turn.account_id, turn.program) == ("r1", driver.program("a"))
    assert driver.home("a") == "r1"
    assert driver.demand("r0") == 0
    driver.finishes(7000, 200, 20)
    assert driver.program("a").output_tokens_total == 30


def test_a_turn_that_runs_where_its_program_must_not_go_is_nobodys() -> None:
    """A held turn of the program continues from a response that only another replica has: the program goes there."""
    driver = Driver(Cap(1), replicas={"r0": 1000, "r1": 1000})
    for replica_id in ("r0", "r1"):
        driver.arrives(f"first on {replica_id}", 100, wanted=replica_id)
    held = driver.arrives("a", 100, wanted="r1")
    assert driver.held(held)
    arrived = TurnAsk(now_s=driver.now_s, turn_id=7000, program_id="a", branch_id="sub", prompt_bytes=40)
    driver.send(TurnAdopted(driver.now_s, 7000, "r0", arrived))
    turn = driver.scheduler.turns[7000]
    assert (turn.account_id, turn.program) == ("r0", None)
    assert driver.held(held)
