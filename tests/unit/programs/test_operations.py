"""The operations of operators and global policies: routes, priorities, moves, ends and starts."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field

import pytest

from tests.builders import Driver, of_kind, restored_on
from thunderagent.policy_loader import load_policy
from thunderagent.programs.learned.capacity import BLOCK_TOKENS
from thunderagent.programs.messages import (
    EndReplica,
    Grant,
    Mark,
    Pause,
    Provision,
    ProvisionAsked,
    Reason,
    Reject,
    ReplicaKilled,
    Restore,
    Scope,
    SetPriority,
    SetRoute,
    TurnAsk,
    Unmark,
)
from thunderagent.programs.policies.composed import Composed, ControlChain
from thunderagent.programs.policy import GlobalPolicy, Moment, View
from thunderagent.programs.rules.routes import Routes
from thunderagent.programs.state.program import Program, Route
from thunderagent.programs.transitions import NEWLY_WAITING_COUNT, PRIORITY_STEP, engine_priority


def by_memory(**replicas: int) -> Driver:
    """A policy that admits what fits, the oldest first."""
    policy = load_policy("ttl", {"ttl_s": 1000.0, "reserve_tokens": 0})
    return Driver(policy, replicas=replicas or {"r0": 1000, "r1": 1000})


@dataclass
class Doing(GlobalPolicy):
    """A global policy that does what a test wants, once in `period_s`."""

    what: Callable[[View], None] = lambda view: None
    period_s: float = 1.0
    name: str = "doing"
    asked_at_s: list[float] = field(default_factory=list)

    def decide(self, view: View) -> None:
        self.asked_at_s.append(view.now_s)
        self.what(view)


def controlled(control: object, **replicas: int) -> Driver:
    base = load_policy("ttl", {"ttl_s": 1000.0, "reserve_tokens": 0})
    return Driver(Composed(base, global_policy=control), replicas=replicas or {"r0": 1000, "r1": 1000})  # type: ignore[arg-type]


# --- route


def test_a_route_sends_programs_by_its_weights() -> None:
    """They are evenly mixed, against any policy; existing programs stay, and anonymous turns run as before."""
    driver = by_memory(r0=1000, r1=1000, r2=1000)
    decisions = driver.routes("tenant", "gold", r0=1, r1=3)
    assert decisions == [SetRoute("tenant", "gold", (("r0", 1), ("r1", 3)), Reason.OPERATOR)]
    for number in range(8):
        driver.arrives(f"gold-{number}", 10, tenant="gold")
    homes = [driver.home(f"gold-{number}") for number in range(8)]
    assert Counter(homes) == {"r0": 2, "r1": 6}
    assert Counter(homes[:4]) == {"r0": 1, "r1": 3}
    driver.arrives("other", 10)
    assert driver.home("other") == "r2"


@pytest.mark.parametrize(
    ("scope", "name"), [("program", "a"), ("group", "g"), ("class", "coder"), ("tenant", "t"), ("all", "")]
)
def test_the_narrowest_route_counts(scope: str, name: str) -> None:
    """A program's own precedes its group's, then its class's, its tenant's, and that of all."""
    driver = by_memory()
    driver.opens("a")
    wider = [("all", ""), ("tenant", "t"), ("class", "coder"), ("group", "g"), ("program", "a")]
    for other in wider[: wider.index((scope, name))]:
        driver.routes(*other, r0=1)
    driver.routes(scope, name, r1=1)
    driver.arrives("a", 10, tenant="t", group="g", program_class="coder")
    assert driver.home("a") == "r1"


def test_a_program_moves_to_its_route_with_its_next_turn() -> None:
    """It does not move earlier, because of its memory. When the route is taken back it may go anywhere."""
    driver = by_memory()
    driver.takes_turn("a", 100)
    assert driver.home("a") == "r0"
    driver.routes("program", "a", r1=1)
    assert driver.home("a") == "r0"
    turn_id = driver.arrives("a", 110)
    assert driver.home("a") == "r1"
    assert of_kind(Pause, driver.decisions) == ["a"]
    driver.finishes(turn_id, 110)
    driver.routes("program", "a")
    assert driver.program("a").routed_to is None
    driver.arrives("a", 110)
    assert driver.home("a") == "r1"


def test_program_too_large_for_its_route_waits_for_that_replica_alone() -> None:
    """The policy does not see it, so it is not sent elsewhere; the policy is asked when there is room."""
    driver = by_memory()
    driver.routes("tenant", "t", r0=1)
    first = driver.arrives("a", 900, tenant="t")
    waiting = driver.arrives("b", 800, tenant="t")
    assert driver.held(waiting)
    assert driver.program("b").hold_reason == Reason.NO_ROOM
    assert (driver.scheduler.queue.waiting_count, len(driver.scheduler.queue.waiting.order)) == (1, 0)
    driver.arrives("c", 900)
    assert driver.home("c") == "r1"
    driver.finishes(first, 900)
    assert driver.held(waiting)
    driver.releases("a")
    assert driver.granted_on[waiting] == "r0"


def test_a_route_to_what_is_closed_is_as_if_it_were_not_there() -> None:
    """Programs that wait for a replica that goes down, and new ones, go elsewhere; it counts again when it is back."""
    driver = by_memory()
    driver.routes("all", "", r0=1)
    driver.arrives("a", 900)
    waiting = driver.arrives("b", 800)
    assert driver.held(waiting)
    driver.goes_down("r0")
    assert driver.granted_on[waiting] == "r1"
    driver.arrives("c", 100)
    assert driver.home("c") == "r1"
    driver.comes_up("r0", 1000)
    driver.arrives("d", 100)
    assert driver.home("d") == "r0"


def test_routed_program_waits_while_grants_are_suspended_there() -> None:
    """It waits like a program that is there."""
    driver = by_memory()
    driver.routes("all", "", r0=1)
    driver.suspends("weights", "r0")
    turn_id = driver.arrives("a", 100)
    assert driver.program("a").hold_reason == Reason.SUSPENDED
    driver.goes_on("weights", "r0")
    assert driver.granted_on[turn_id] == "r0"


def test_routed_program_reports_a_new_reason_when_grants_resume() -> None:
    """It changes only when grants resume on its own replica, for every cause; other replicas do not matter."""
    driver = by_memory()
    driver.arrives("there", 900)
    assert driver.home("there") == "r0"
    driver.routes("tenant", "t", r0=1)
    driver.suspends("weights")
    driver.suspends("sleep", "r0")
    driver.arrives("a", 500, tenant="t")
    driver.arrives("b", 500)
    assert [driver.program(name).hold_reason for name in ("a", "b")] == [Reason.SUSPENDED, Reason.SUSPENDED]
    driver.goes_on("weights")
    assert driver.home("b") == "r1"
    assert driver.program("a").hold_reason == Reason.SUSPENDED
    driver.goes_on("sleep", "r0")
    assert driver.program("a").hold_reason == Reason.NO_ROOM


def test_waiting_program_reports_a_new_reason_when_its_route_changes() -> None:
    """A program that waited for a suspended replica now waits for room on its new route."""
    driver = by_memory()
    driver.arrives("there", 100)
    driver.arrives("here", 900)
    assert driver.home("here") == "r1"
    driver.routes("tenant", "t", r0=1)
    driver.suspends("weights", "r0")
    driver.arrives("a", 500, tenant="t")
    assert driver.program("a").hold_reason == Reason.SUSPENDED
    driver.routes("tenant", "t")
    assert driver.program("a").hold_reason == Reason.NO_ROOM


def test_a_turn_that_failed_on_its_route_goes_elsewhere_once() -> None:
    """It does as any turn that is tried again."""
    driver = by_memory()
    driver.routes("all", "", r0=1)
    driver.fails(driver.arrives("a", 100))
    driver.arrives("a", 100, avoid="r0")
    assert driver.home("a") == "r1"


def test_whose_client_would_give_up_is_let_in_on_its_route() -> None:
    """It is let in there with or without room."""
    driver = by_memory()
    driver.routes("all", "", r0=1)
    driver.arrives("a", 900)
    waiting = driver.arrives("b", 800, patience_s=10.0)
    driver.ticks(9.0)
    assert driver.granted_on[waiting] == "r0"


@pytest.mark.parametrize(
    ("scope", "name", "targets", "why"),
    [
        ("agent", "x", (), "one of program, group, class, tenant, all"),
        ("tenant", "", (), "names it"),
        ("all", "x", (), "no name"),
        ("program", "x", (), "no live program 'x'"),
        ("tenant", "x", (("r9", 1.0),), "no replica 'r9'"),
        ("tenant", "x", (("r0", 1.0), ("r0", 1.0)), "twice"),
        ("tenant", "x", (("r0", 0.0),), "over 0"),
        ("tenant", "x", (("r0", float("inf")),), "over 0"),
    ],
)
def test_a_route_that_cannot_be_is_refused(
    scope: str, name: str, targets: tuple[tuple[str, float], ...], why: str
) -> None:
    """The refusal has a reason; an event with such a route changes nothing."""
    driver = by_memory()
    scheduler = driver.scheduler
    assert why in scheduler.operations.why_not_route(scope, name, targets)
    assert not driver.scheduler.view.propose_route(scope, name, dict(targets)) or "twice" in why
    driver.routes(scope, name, **dict(targets))
    assert len(scheduler.core.routing.routes) == (1 if "twice" in why else 0)


def test_a_route_of_one_program_ends_with_it() -> None:
    """The next program of its id begins without a route."""
    driver = by_memory()
    driver.takes_turn("a", 10)
    driver.routes("program", "a", r1=1)
    driver.releases("a")
    assert len(driver.scheduler.core.routing.routes) == 0


def test_weights_hold_at_any_time() -> None:
    """After each choice no replica is off its share by more than one; closed ones are left out."""
    route = Route((("a", 5.0), ("b", 1.0), ("c", 2.0)))
    chosen = [route.next(lambda _: True) for _ in range(80)]
    for count in range(1, 81):
        for name, weight in route.targets:
            assert abs(chosen[:count].count(name) - count * weight / 8) <= 1
    assert [route.next(lambda name: name == "b") for _ in range(3)] == ["b"] * 3
    assert route.next(lambda _: False) is None
    routes = Routes()
    routes.set(Scope.ALL, "", (("a", 1.0),))
    assert (len(routes), repr(next(iter(routes))[2])) == (1, "<Route to a (1)>")


# --- priority


def test_priority_comes_before_the_policy_s_order() -> None:
    """Lower numbers go first; equal ones are in the policy's order."""
    driver = by_memory(r0=1000)
    first = driver.arrives("a", 1000)
    turns = {name: driver.arrives(name, 1000) for name in ("b", "c", "d")}
    assert driver.gives_priority("d", -1) == [SetPriority("d", -1, None, Reason.OPERATOR)]
    assert driver.gives_priority("d", -1) == []
    driver.gives_priority("b", 1)
    order = []
    for turn_id, name in ((first, "a"), (turns["d"], "d"), (turns["c"], "c"), (turns["b"], "b")):
        assert turn_id in driver.granted_on, name
        order.append(name)
        driver.finishes(turn_id, 1000)
        driver.releases(name)
    assert order == ["a", "d", "c", "b"]


def test_late_program_with_a_better_priority_overtakes() -> None:
    """This holds even if its turn arrives after the priority was set."""
    driver = by_memory(r0=1000)
    driver.takes_turn("late", 100)
    busy = driver.arrives("a", 900)
    driver.releases("late")
    waiting = driver.arrives("b", 500)
    driver.opens("late")
    driver.gives_priority("late", -5)
    late = driver.arrives("late", 80)
    assert driver.held(waiting)
    assert late in driver.granted_on  # it fits, and none precedes it
    driver.finishes(busy, 900)


def test_engines_get_the_priority_before_the_policy_s() -> None:
    """If a replica was named, only its engine gets the priority."""
    policy = load_policy("passthrough", {"priority": "age"})
    driver = Driver(policy, replicas={"r0": None})
    of_policy = next(d for d in _decided(driver, "a") if isinstance(d, Grant)).engine_priority
    driver.gives_priority("a", 2)
    grant = next(d for d in _decided(driver, "a") if isinstance(d, Grant))
    assert grant.engine_priority == 2 * PRIORITY_STEP + (of_policy or 0)
    driver.gives_priority("a", -3, "r0")
    grant = next(d for d in _decided(driver, "a") if isinstance(d, Grant))
    assert grant.engine_priority == -3 * PRIORITY_STEP + (of_policy or 0)


def _decided(driver: Driver, program_id: str) -> list[object]:
    driver.arrives(program_id, 10)
    return list(driver.decisions)


def test_engine_gets_the_priority_number() -> None:
    """It counts alone if the policy has none; a large number of the policy never reverses it."""
    program = Program("a", 1, 0.0)
    assert engine_priority(program, "r", None) is None
    assert engine_priority(program, "r", 7) == 7
    program.priority = 4
    assert engine_priority(program, "r", None) == 4
    before, after = Program("b", 2, 0.0), Program("c", 3, 0.0)
    before.priority, after.priority = -1, 1
    first, last = engine_priority(before, "r", 10**15), engine_priority(after, "r", -(10**15))
    assert first is not None
    assert last is not None
    assert first < last
    program.priority_by_replica = {"r": -2}
    assert (engine_priority(program, "r", None), engine_priority(program, "s", None)) == (-2, 4)


@pytest.mark.parametrize("priority", [1_000_001, -1_000_001])
def test_a_priority_out_of_bounds_is_refused(priority: int) -> None:
    """So is a priority for an unknown program."""
    driver = by_memory()
    driver.takes_turn("a", 10)
    operations = driver.scheduler.operations
    assert "whole number" in operations.why_not_priority("a", priority, None)
    assert "no live program" in operations.why_not_priority("b", 0, None)
    assert "no replica" in operations.why_not_priority("a", 0, "r9")
    assert driver.gives_priority("a", priority) == []
    assert not driver.scheduler.view.propose_priority(driver.program("a"), priority)


# --- migrate


def test_program_at_a_tool_moves_at_once() -> None:
    """It is paused, and then restored elsewhere."""
    driver = by_memory()
    driver.takes_turn("a", 100)
    assert driver.migrates("a", "r1") == [Pause("a", "r0", Reason.OPERATOR), Restore("a", "r1", Reason.OPERATOR)]
    assert (driver.demand("r0"), driver.demand("r1")) == (0, 100)
    assert driver.granted_on[driver.arrives("a", 120)] == "r1"


@pytest.mark.parametrize("asked_during", ["tool", "turn"])
def test_leftover_of_a_moved_program_is_no_loss_of_its_new_replica(asked_during: str) -> None:
    """Nothing of it is there: its next turn is expected to compute its history, and the one after that to find it."""
    driver = Driver(load_policy("breakeven", {}), replicas={"r0": 100_000, "r1": 100_000})
    turn_id = driver.arrives("a", 10_000)
    if asked_during == "turn":
        driver.migrates("a", "r1")
    driver.finishes(turn_id, 10_000, cached=0)
    if asked_during == "tool":
        driver.migrates("a", "r1")
    driver.passes(1.0)
    first = driver.arrives("a", 11_000)
    correction = driver.scheduler.knowledge.corrections["r1"]
    assert (driver.granted_on[first], driver.scheduler.turns[first].kept_tokens) == ("r1", 0)
    driver.finishes(first, 11_000, cached=0)
    assert correction._lost_tokens == 0
    driver.passes(1.0)
    second = driver.arrives("a", 12_000)
    assert driver.scheduler.turns[second].kept_tokens == 11_000
    driver.finishes(second, 12_000, cached=0)
    assert correction._lost_tokens == 11_000 - BLOCK_TOKENS


def test_a_side_turn_on_a_new_replica_does_not_bring_its_branch_there() -> None:
    """It brings only its own prompt, a title: the history is computed by the next turn."""
    driver = Driver(load_policy("breakeven", {}), replicas={"r0": 100_000, "r1": 100_000})
    driver.takes_turn("a", 10_000)
    driver.migrates("a", "r1")
    driver.takes_turn("a", 300)
    driver.passes(1.0)
    first = driver.arrives("a", 11_000)
    assert (driver.granted_on[first], driver.scheduler.turns[first].kept_tokens) == ("r1", 0)
    driver.finishes(first, 11_000, cached=0)
    assert driver.scheduler.knowledge.corrections["r1"]._lost_tokens == 0
    assert driver.scheduler.turns[driver.arrives("a", 12_000)].kept_tokens == 11_000


def test_a_turn_that_fails_on_a_new_replica_leaves_nothing_to_find_there() -> None:
    """The engine may not have begun it. At home, what an earlier turn left there is still expected."""
    driver = Driver(load_policy("breakeven", {}), replicas={"r0": 100_000, "r1": 100_000})
    driver.takes_turn("a", 10_000)
    driver.fails(driver.arrives("a", 11_000))
    driver.passes(1.0)
    again = driver.arrives("a", 11_000)
    assert driver.scheduler.turns[again].kept_tokens == 10_000
    driver.finishes(again, 11_000)
    driver.migrates("a", "r1")
    driver.is_abandoned(driver.arrives("a", 12_000))
    driver.passes(1.0)
    again = driver.arrives("a", 12_000)
    assert (driver.granted_on[again], driver.scheduler.turns[again].kept_tokens) == ("r1", 0)


def test_a_branch_that_had_no_turn_since_its_program_moved_has_nothing_there() -> None:
    """The turn of another branch brought only its own context."""
    driver = Driver(load_policy("breakeven", {}), replicas={"r0": 100_000, "r1": 100_000})
    main = driver.arrives("a", 10_000)
    side = driver.arrives("a", 8000, branch="side")
    driver.finishes(side, 8000, tool="make")
    driver.finishes(main, 10_000, tool="make")
    driver.migrates("a", "r1")
    driver.takes_turn("a", 11_000, tool="make")
    side = driver.arrives("a", 9000, branch="side")
    assert (driver.granted_on[side], driver.scheduler.turns[side].kept_tokens) == ("r1", 0)


def test_program_with_a_turn_in_flight_moves_when_that_ends() -> None:
    """It is marked until then, and the policy cannot take the mark back."""
    driver = Driver(load_policy("breakeven", {}), replicas={"r0": 10_000, "r1": 10_000})
    turn_id = driver.arrives("a", 100)
    assert driver.migrates("a", "r1") == [Mark("a", "r0", Reason.OPERATOR)]
    driver.ticks(1.0)
    program = driver.program("a")
    assert program.marked
    assert not driver.scheduler.view.propose_unmark(program, Reason.RELIEVED)
    assert driver.scheduler.view.last_marked(driver.scheduler.replicas["r0"]) is None
    assert "on its way" in driver.scheduler.operations.why_not_migrate("a", "r1")
    beside = driver.arrives("a", 100, branch="sub")
    assert driver.held(beside)
    assert restored_on(driver.finishes(turn_id, 100)) == {"a": "r1"}
    assert driver.granted_on[beside] == "r1"


def test_waiting_program_moves_at_once() -> None:
    """It no longer waits for anything; all its turns go with it."""
    driver = by_memory(r0=1000, r1=100)
    driver.routes("all", "", r0=1)
    driver.arrives("a", 900)
    waiting, beside = driver.arrives("b", 500), driver.arrives("b", 500, branch="sub")
    driver.routes("all", "", r0=1, r1=1)
    driver.migrates("b", "r1")
    assert driver.granted_on[waiting] == driver.granted_on[beside] == "r1"
    assert driver.program("b").routed_to == "r1"


def test_program_paused_at_a_tool_moves_with_its_next_turn() -> None:
    """It goes with or without room; nothing is claimed for it meanwhile."""
    driver = by_memory()
    driver.takes_turn("a", 100)
    driver.scheduler.core.pause(driver.program("a"), Reason.IDLE)
    assert driver.migrates("a", "r1") == []
    assert driver.home("a") is None
    assert driver.granted_on[driver.arrives("a", 100)] == "r1"


def test_a_destination_that_is_gone_is_forgotten() -> None:
    """The program was to move there, so it stays, and its held turns are granted."""
    driver = by_memory()
    turn_id = driver.arrives("a", 100)
    driver.migrates("a", "r1")
    beside = driver.arrives("a", 100, branch="sub")
    assert of_kind(Unmark, driver.goes_down("r1")) == ["a"]
    assert driver.program("a").destination is None
    assert driver.granted_on[beside] == "r0"
    driver.finishes(turn_id, 100)
    driver.finishes(beside, 100)
    assert driver.home("a") == "r0"


def test_program_that_loses_its_replica_before_a_move_goes_to_the_target() -> None:
    """It goes there with its next turn."""
    driver = by_memory(r0=1000, r1=1000, r2=1000)
    turn_id = driver.arrives("a", 100)
    driver.migrates("a", "r2")
    driver.goes_down("r0")
    driver.fails(turn_id)
    assert driver.granted_on[driver.arrives("a", 100)] == "r2"


def test_a_move_that_cannot_be_is_refused() -> None:
    """The refusal has a reason; an event with such a move changes nothing."""
    driver = by_memory()
    driver.takes_turn("a", 10)
    why_not = driver.scheduler.operations.why_not_migrate
    assert "no live program 'x'" in why_not("x", "r1")
    assert "no replica 'r9'" in why_not("a", "r9")
    assert "is on r0 already" in why_not("a", "r0")
    driver.drains("r1")
    assert "takes no programs now" in why_not("a", "r1")
    assert driver.migrates("a", "r1") == []
    driver.comes_up("r1")
    driver.routes("program", "a", r0=1)
    assert "has a route that does not lead to r1" in why_not("a", "r1")
    outside = Driver(load_policy("passthrough", {"admission": "window", "admission.n": 1}), replicas={"r0": 100})
    outside.arrives("a", 10)
    outside.arrives("b", 10)
    assert "not admitted" in outside.scheduler.operations.why_not_migrate("b", "r0")


def test_a_program_is_not_moved_off_what_its_held_turn_goes_on_from() -> None:
    """Elsewhere that turn would fail, so it would still run at the old place."""
    driver = Driver(load_policy("cap", {"n": 1}), replicas={"r0": 1000, "r1": 1000, "r2": 1000})
    for program_id in ("x", "y", "z"):
        driver.arrives(program_id, 10)
    held = driver.arrives("a", 10, wanted="r1")
    assert driver.held(held)
    assert "goes on from what r1 alone has" in driver.scheduler.operations.why_not_migrate("a", "r0")
    assert driver.migrates("a", "r0") == []
    driver.migrates("a", "r1")
    assert driver.granted_on[held] == "r1"


# --- kill, provision


def test_a_program_that_is_killed_ends_at_once() -> None:
    """Held turns are rejected, those in flight end as turns without a program, and others get its room."""
    driver = by_memory(r0=1000)
    running = driver.arrives("a", 900)
    waiting = driver.arrives("b", 500)
    killed = driver.arrives("c", 500)
    assert [d for d in driver.kills("c") if isinstance(d, Reject)] == [Reject(killed, "c", Reason.KILLED)]
    driver.kills("a")
    assert driver.scheduler.programs.get("a") is None
    assert driver.held(waiting)  # the turn in flight still takes its room
    driver.finishes(running, 900, 10)
    assert waiting in driver.granted_on
    assert driver.kills("a") == []


def test_replicas_are_ended_and_started_outside() -> None:
    """The core asks for it once; an unknown replica is refused."""
    driver = by_memory()
    assert driver.send(ReplicaKilled(driver.now_s, "r0")) == [EndReplica("r0", Reason.OPERATOR)]
    assert driver.send(ReplicaKilled(driver.now_s, "r9")) == []
    assert driver.send(ProvisionAsked(driver.now_s)) == [Provision(Reason.OPERATOR)]
    view = driver.scheduler.view
    assert view.propose_kill_replica(view.replicas[0])
    driver.drains("r0")
    assert not view.propose_kill_replica(view.replicas[0]), "the last one"


# --- the global policy


def test_a_global_policy_is_asked_once_in_a_period() -> None:
    """It is asked on ticks, which may come a little early or late."""
    control = Doing(period_s=2.0)
    driver = controlled(control)
    control.asked_at_s.clear()
    for elapsed_s in (1.0, 1.01, 1.0, 0.995, 1.0, 1.0, 7.0, 1.0):
        driver.ticks(elapsed_s)
    assert [round(at_s - 100.0, 3) for at_s in control.asked_at_s] == [2.01, 4.005, 6.005, 13.005, 14.005]
    assert driver.scheduler.policy.tick_s == 1.0
    assert Composed(load_policy("ttl", {}), global_policy=Doing(period_s=0.25)).tick_s == 0.25


def test_memory_freed_by_a_global_policy_is_used_in_the_same_event() -> None:
    """The local policy balances after it."""
    control = Doing()
    driver = controlled(control, r0=1000)
    driver.takes_turn("a", 900)
    waiting = driver.arrives("b", 800)
    control.what = lambda view: view.propose_kill(view.program("a")) and None  # type: ignore[arg-type]
    driver.ticks(1.0)
    assert waiting in driver.granted_on


def test_a_global_policy_hears_who_waits_anew() -> None:
    """It gets each program once, and none that was admitted meanwhile."""
    heard: list[list[str]] = []
    control = Doing(lambda view: heard.append([program.program_id for program in view.newly_waiting()]))
    driver = controlled(control, r0=1000)
    heard.clear()
    driver.takes_turn("a", 900)
    driver.arrives("b", 800)
    driver.is_abandoned(driver.arrives("c", 800))
    driver.ticks(1.0)
    driver.arrives("d", 800)
    driver.ticks(1.0)
    driver.ticks(1.0)
    assert heard == [["b"], ["d"], []]


def test_each_of_several_global_policies_hears_who_waits_since_itself_was_asked() -> None:
    """A policy that is asked less often misses no program that another one got meanwhile."""
    heard: dict[float, list[list[str]]] = {1.0: [], 2.0: []}

    def hearing(period_s: float) -> Doing:
        lists = heard[period_s]
        return Doing(lambda view: lists.append([program.program_id for program in view.newly_waiting()]), period_s)

    driver = controlled(ControlChain([hearing(1.0), hearing(2.0)]), r0=1000)
    driver.takes_turn("a", 900)
    for name in ("b", "c", "d", "e"):
        driver.arrives(name, 800)
        driver.ticks(1.0)
    assert heard == {1.0: [[], ["b"], ["c"], ["d"], ["e"]], 2.0: [[], ["b", "c"], ["d", "e"]]}


def test_a_global_policy_hears_of_a_burst_in_parts() -> None:
    """A limited number in one period, in order of arrival; the others in the next one, if they still wait."""
    heard: list[list[str]] = []
    control = Doing(lambda view: heard.append([program.program_id for program in view.newly_waiting()]))
    driver = controlled(control, r0=1000)
    driver.takes_turn("a", 900)
    heard.clear()
    names = [f"b{number}" for number in range(NEWLY_WAITING_COUNT + 4)]
    for turn_id, name in enumerate(names, 1000):  # checked once for all: each check costs as much
        driver.scheduler.handle(TurnAsk(now_s=driver.now_s, turn_id=turn_id, program_id=name, prompt_bytes=4000))
    driver.is_abandoned(1000)
    driver.releases("b2")
    driver.is_abandoned(1000 + NEWLY_WAITING_COUNT + 2)
    driver.ticks(1.0)
    driver.ticks(1.0)
    driver.ticks(1.0)
    assert heard == [[names[1], *names[3:-2]], [names[-1]], []]


def test_ended_program_is_not_kept_for_a_global_policy() -> None:
    """This holds however long its period is."""
    driver = controlled(Doing(period_s=3600.0), r0=1000)
    driver.takes_turn("a", 900)
    driver.ticks(1.0)
    driver.arrives("b", 800)
    driver.arrives("c", 800)
    assert driver.scheduler.global_policies.unseen_count == 2
    driver.releases("b")
    assert driver.scheduler.global_policies.unseen_count == 1


def test_view_shows_waiting_and_running_programs() -> None:
    """The three default policies decide by these figures."""
    driver = by_memory()
    driver.routes("tenant", "t", r0=1)
    driver.arrives("a", 900, tenant="t")
    driver.passes(5.0)
    driver.arrives("b", 800, tenant="t")
    driver.arrives("c", 800, tenant="t")
    view = driver.scheduler.view
    r0, r1 = view.replicas
    assert (view.waiting_count, view.waiting_count_for(r0), view.waiting_count_for(r1)) == (2, 2, 0)
    assert [program.program_id for program in view.first_waiting_for(r0, 1)] == ["b"]
    assert list(view.first_waiting_for(r1, 1)) == []
    assert (view.longest_turn_s(r0), view.longest_turn_s(r1)) == (5.0, 0.0)
    assert [replica.replica_id for replica in view.targets(driver.program("b"))] == ["r0"]
    assert [(route.scope, route.name, dict(route.targets)) for route in view.routes()] == [("tenant", "t", {"r0": 1})]
    assert not view.propose_restore(driver.program("b"), r1, Reason.FITS), "bound elsewhere"
    driver.takes_turn("d", 10)
    assert [program.program_id for program in view.first_to_pause_few(r1, 4)] == ["d"]
    assert [replica.replica_id for replica in view.targets(driver.program("d"))] == ["r0", "r1"]
    assert driver.scheduler.policy.balance(view, Moment.TICK) is None


def test_a_program_on_its_way_gets_there_also_when_its_replica_is_lost_first() -> None:
    """Nothing keeps it any more: it goes to its destination with its held turns, with or without room."""
    driver = by_memory()
    driver.arrives("other", 950)
    driver.arrives("p", 300)
    assert (driver.home("other"), driver.home("p")) == ("r0", "r1")
    driver.migrates("p", "r0")
    held = driver.arrives("p", 400, branch="sub")
    assert held not in driver.granted_on
    driver.goes_down("r1")
    assert driver.granted_on[held] == "r0"
    assert driver.program("p").destination is None


def test_an_announced_program_joins_the_group_of_the_tenant_that_its_first_turn_names() -> None:
    """Otherwise the last of the group would not be recognised."""
    driver = by_memory()
    driver.opens("a", group="g")
    for program_id in ("a", "b"):
        driver.arrives(program_id, 100, group="g", tenant="t")
    assert {key: set(group.programs) for key, group in driver.scheduler.book.groups.items()} == {("t", "g"): {"a", "b"}}
