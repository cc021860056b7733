"""The three global policies of the package, and combinations of several."""

from __future__ import annotations

import pytest

from tests.builders import Driver, of_kind, restored_on
from thunderagent.errors import ConfigurationError
from thunderagent.policy_loader import load_policy
from thunderagent.programs.messages import (
    EndReplica,
    Grant,
    Mark,
    Pause,
    Provision,
    Reason,
    ReplicaKilled,
    Restore,
    SchedulerSettings,
    SetRoute,
)


def driven(
    control: str, settings: dict[str, float] | None = None, *, provisions: bool = True, **replicas: int | None
) -> Driver:
    """A policy that admits what fits, under a global one."""
    given = {f"global_policy.{name}": value for name, value in (settings or {}).items()}
    policy = load_policy("ttl", {"ttl_s": 10_000.0, "reserve_tokens": 0, "global_policy": control, **given})
    scheduler_settings = SchedulerSettings(provisions_replicas=provisions)
    return Driver(policy, settings=scheduler_settings, replicas=replicas or {"r0": 1000, "r1": 1000})


def crowd(driver: Driver, replica_id: str, **sizes: int) -> None:
    """Put programs that are at a tool on a replica."""
    driver.routes("all", "", **{replica_id: 1})
    for name, tokens in sizes.items():
        driver.takes_turn(name, tokens)
        driver.passes(0.001)
    driver.routes("all", "")


# --- balance


def test_balance_moves_from_the_fullest_to_the_emptiest() -> None:
    """It moves until the gap is small, the youngest first, and only programs that reduce it."""
    driver = driven("balance")
    crowd(driver, "r0", a=300, b=300, c=200)
    decisions = driver.ticks(1.0)
    assert restored_on(decisions) == {"a": "r1"}
    assert [d.reason for d in decisions if isinstance(d, Pause | Restore)] == [Reason.IMBALANCE] * 2
    assert (driver.demand("r0"), driver.demand("r1")) == (500, 300)
    assert restored_on(driver.ticks(1.0)) == {}


def test_balance_lets_nobody_go_back_and_forth() -> None:
    """A moved program stays for a while; a replica without a capacity is compared by its claims."""
    driver = driven("balance", {"gap_ratio": 0.1, "rest_s": 5.0}, r0=None, r1=None)
    crowd(driver, "r0", a=300)
    assert restored_on(driver.ticks(1.0)) == {}, "the gap would be as large the other way round"
    crowd(driver, "r0", b=100)
    assert restored_on(driver.ticks(1.0)) == {"b": "r1"} or restored_on(driver.decisions) == {"a": "r1"}
    moved = next(iter(restored_on(driver.decisions)))
    crowd(driver, "r1", c=390)
    assert moved not in restored_on(driver.ticks(1.0))
    driver.ticks(6.0)
    assert driver.scheduler.policy.global_policy._moved_s.keys() <= {"c"}  # type: ignore[attr-defined]


def test_balance_needs_two_replicas_and_somebody_to_move() -> None:
    """A program with a turn in flight stays."""
    driver = driven("balance", r0=1000)
    driver.takes_turn("a", 900)
    assert driver.ticks(1.0) == []
    driver = driven("balance")
    driver.arrives("a", 900)
    assert driver.ticks(1.0) == []


# --- migrate


def test_migrate_takes_from_behind_a_long_turn() -> None:
    """A program that waits for a replica of its route goes to another replica of it with room."""
    driver = driven("migrate", {"long_turn_s": 10.0, "wait_s": 1.0}, r0=1000, r1=1000)
    driver.routes("tenant", "t", r0=1000, r1=1)
    driver.arrives("a", 900, tenant="t")
    driver.passes(9.5)
    waiting = driver.arrives("b", 500, tenant="t")
    driver.ticks(0.2)
    assert driver.held(waiting), "the turn is not long yet"
    driver.ticks(0.5)
    assert driver.held(waiting), "it waits for too short a time"
    decisions = driver.ticks(1.0)
    assert driver.granted_on[waiting] == "r1"
    assert [d.reason for d in decisions if isinstance(d, Grant)] == [Reason.LONG_TURN]


def test_migrate_leaves_who_fits_nowhere_and_who_waits_for_nothing_long() -> None:
    """Without room, or without a long wait, a move does not help."""
    driver = driven("migrate", {"long_turn_s": 10.0, "wait_s": 0.0}, r0=1000, r1=400)
    driver.routes("tenant", "t", r0=1000, r1=1)
    turn_id = driver.arrives("a", 900, tenant="t")
    waiting = driver.arrives("b", 500, tenant="t")
    driver.ticks(20.0)
    assert driver.held(waiting)
    driver.finishes(turn_id, 900)
    driver.releases("a")
    assert driver.granted_on[waiting] == "r0"


def test_migrate_moves_who_waits_behind_others() -> None:
    """Nobody may pass the first, which fits nowhere; one behind it, whose home has a long turn, fits elsewhere."""
    policy = load_policy(
        "breakeven",
        {
            "reserve_tokens": 0,
            "pass_count": 0,
            "order": "fcfs",
            "global_policy": "migrate",
            "global_policy.wait_s": 0.0,
        },
    )
    driver = Driver(policy, replicas={"r0": 10_000, "r1": 10_000}, threshold_s=20.0)
    driver.keeps_busy("r0", "r1")
    for program_id, tokens in (("first", 100), ("a", 5_000)):
        driver.takes_turn(program_id, tokens)
        driver.scheduler.core.pause(driver.program(program_id), Reason.IDLE)
        driver.passes(1.0)
    driver.routes("all", "", r0=1)
    driver.arrives("b", 8_000)
    driver.routes("all", "", r1=1)
    driver.arrives("c", 2_000)
    driver.routes("all", "")
    driver.passes(11.0)
    first, waiting = driver.arrives("first", 9_000), driver.arrives("a", 5_000)
    assert (driver.program("a").replica_id, driver.program("a").hold_reason) == ("r0", Reason.QUEUE_AHEAD)
    driver.ticks(1.0)
    assert driver.held(first)
    assert driver.granted_on[waiting] == "r1"


# --- reassign

QUICK = {"waiting_count": 2, "patience_s": 2.0, "rest_s": 10.0}


def test_reassign_gives_a_replica_to_who_is_short_of_them() -> None:
    """It comes from a tenant with one to spare; waiting programs are served there at once."""
    driver = driven("reassign", QUICK, r0=1000, r1=1000, r2=1000)
    driver.routes("tenant", "rich", r0=1, r1=1)
    driver.routes("tenant", "poor", r2=1)
    driver.arrives("x", 1000, tenant="poor")
    waiting = [driver.arrives(f"p{number}", 900, tenant="poor") for number in range(2)]
    driver.ticks(1.0)
    assert of_kind(Restore, driver.ticks(1.0)) == []
    decisions = driver.ticks(1.0)
    assert [d for d in decisions if isinstance(d, SetRoute)] == [
        SetRoute("tenant", "rich", (("r0", 1),), Reason.OVERLOAD),
        SetRoute("tenant", "poor", (("r2", 1), ("r1", 1)), Reason.OVERLOAD),
    ]
    assert sorted(driver.granted_on.get(turn_id, "held") for turn_id in waiting) == ["held", "r1"]
    assert driver.ticks(1.0) == []


def test_reassign_moves_a_replica_of_a_route_that_names_one_which_was_removed() -> None:
    """The giver really gives it: one of the two routes has it, not both."""
    driver = driven("reassign", QUICK, r0=1000, r1=1000, r2=1000, gone=1000)
    driver.routes("tenant", "rich", r0=1, r1=1, gone=1)
    driver.routes("tenant", "poor", r2=1)
    driver.is_removed("gone")
    for name in ("x", "p0", "p1"):
        driver.arrives(name, 900, tenant="poor")
    decisions = [decision for _ in range(3) for decision in driver.ticks(1.0)]
    assert [(d.name, dict(d.targets)) for d in decisions if isinstance(d, SetRoute)] == [
        ("rich", {"r0": 1}),
        ("poor", {"r2": 1, "r1": 1}),
    ]


def test_reassign_starts_a_replica_when_all_are_full_and_ends_one_to_spare() -> None:
    """The condition must hold for a while each time, and then neither happens again for a while."""
    driver = driven("reassign", QUICK, r0=1000, r1=1000)
    turns = [driver.arrives(f"a{number}", 1000) for number in range(2)]
    held = [driver.arrives(f"b{number}", 1000) for number in range(4)]
    seen = [decision for _ in range(10) for decision in driver.ticks(1.0)]
    assert seen == [Provision(Reason.OVERLOAD)]
    for number, turn_id in enumerate((*turns, *held)):
        driver.finishes(turn_id, 1000)
        driver.releases(("a0", "a1", "b0", "b1", "b2", "b3")[number])
    seen = [decision for _ in range(40) for decision in driver.ticks(1.0)]
    assert seen == [EndReplica("r1", Reason.SPARE), EndReplica("r0", Reason.SPARE)], "r1 stayed, so the other is asked"


def test_reassign_ends_a_spare_replica_whichever_it_is() -> None:
    """Each is the emptiest for a second only: r1, r0, and r1 again; that one is to spare goes on."""
    driver = driven("reassign", QUICK, r0=1000, r1=1000)
    driver.takes_turn("a", 10)
    driver.takes_turn("b", 20)
    assert [driver.home("a"), driver.home("b")] == ["r0", "r1"]
    decisions = []
    for second in range(3):
        decisions += driver.ticks(1.0)
        driver.takes_turn("a", 25 if second % 2 == 0 else 15)
    assert decisions == [EndReplica("r1", Reason.SPARE)]


def test_reassign_gives_the_replica_that_is_to_spare_then() -> None:
    """Of those with a route to give from, another one is the emptiest each second."""
    driver = driven("reassign", QUICK, r0=1000, r1=1000, r2=1000)
    driver.routes("tenant", "rich", r0=1, r1=1)
    driver.routes("tenant", "poor", r2=1)
    for name, tokens in (("a", 10), ("b", 20)):
        driver.takes_turn(name, tokens, tenant="rich")
    for name in ("x", "p0", "p1"):
        driver.arrives(name, 900, tenant="poor")
    decisions = []
    for second in range(3):
        decisions += driver.ticks(1.0)
        driver.takes_turn("a", 25 if second % 2 == 0 else 15, tenant="rich")
    assert [dict(d.targets) for d in decisions if isinstance(d, SetRoute)] == [{"r1": 1}, {"r2": 1, "r0": 1}]


def test_reassign_asks_for_nothing_where_nobody_starts_or_ends_replicas() -> None:
    """Nothing is decided, and no pause begins: routes change as soon as that is needed."""
    driver = driven("reassign", QUICK, provisions=False, r0=1000, r1=1000, r2=1000)
    assert [decision for _ in range(3) for decision in driver.ticks(1.0)] == []
    view = driver.scheduler.view
    assert not view.propose_provision()
    assert not view.propose_kill_replica(view.replicas[0])
    driver.routes("tenant", "rich", r0=1, r1=1)
    driver.routes("tenant", "poor", r2=1)
    driver.arrives("x", 1000, tenant="poor")
    for number in range(2):
        driver.arrives(f"p{number}", 900, tenant="poor")
    decisions = [decision for _ in range(3) for decision in driver.ticks(1.0)]
    assert len([decision for decision in decisions if isinstance(decision, SetRoute)]) == 2
    assert driver.send(ReplicaKilled(driver.now_s, "r0")) == [EndReplica("r0", Reason.OPERATOR)], "an operator may"


def test_reassign_ends_nothing_that_is_used_where_no_capacity_is_known() -> None:
    """It ends neither the last one, nor one while turns wait."""
    driver = driven("reassign", QUICK | {"patience_s": 1.0}, r0=None, r1=None)
    driver.takes_turn("a", 10)
    driver.takes_turn("b", 10)
    assert [driver.home("a"), driver.home("b")] == ["r0", "r1"]
    assert driver.ticks(1.0) == []
    driver.releases("b")
    assert driver.ticks(1.0) == []
    assert driver.ticks(1.0) == [EndReplica("r1", Reason.SPARE)]


# --- several


def test_several_are_asked_each_in_its_own_period() -> None:
    """Each has its own settings."""
    policy = load_policy(
        "ttl",
        {
            "global_policy": "balance+migrate",
            "global_policy.rest_s": 5.0,
            "global_policy.wait_s": 0.0,
            "global_policy.period_s": 3.0,
        },
    )
    assert policy.global_policy.name == "balance+migrate"  # type: ignore[attr-defined]
    assert policy.global_policy.period_s == 3.0  # type: ignore[attr-defined]
    assert repr(policy.global_policy) == "<ControlChain balance+migrate>"  # type: ignore[attr-defined]
    assert policy.name == "ttl+global_policy=balance+migrate"


@pytest.mark.parametrize(
    ("settings", "complaint"),
    [
        ({"global_policy": "nobody"}, r"no global_policy 'nobody'; there are balance, migrate, reassign"),
        ({"global_policy": "balance+nobody"}, r"no global_policy 'nobody'"),
        ({"global_policy": "balance", "global_policy.x": 1}, r"global_policy balance has no setting 'x'"),
        ({"global_policy": "balance+migrate", "global_policy.x": 1}, r"none of balance\+migrate has a setting 'x'"),
        ({"global_policy": "balance", "global_policy.gap_ratio": 0}, r"gap_ratio"),
        ({"global_policy": "migrate", "global_policy.wait_s": -1}, r"wait_s"),
        ({"global_policy": "reassign", "global_policy.spare_ratio": 1}, r"spare_ratio"),
    ],
)
def test_settings_that_mean_nothing_are_refused(settings: dict[str, str | float], complaint: str) -> None:
    """The error lists what exists."""
    with pytest.raises(ConfigurationError, match=complaint):
        load_policy("ttl", settings)


def test_nothing_moves_that_has_a_turn_in_flight_before_it_ends() -> None:
    """If a global policy asks for it, the program is only marked."""
    driver = driven("balance")
    turn_id = driver.arrives("a", 500)
    view = driver.scheduler.view
    assert view.propose_migrate(driver.program("a"), view.replicas[1])
    assert [type(d) for d in driver.scheduler.book.decisions][-1] is Mark
    driver.finishes(turn_id, 500)
    assert driver.home("a") == "r1"
