"""Policies made of parts."""

from __future__ import annotations

import pytest

from tests.builders import Driver
from thunderagent.errors import ConfigurationError
from thunderagent.policy_loader import load_policy
from thunderagent.programs.messages import (
    GpuEnd,
    GpuFirstToken,
    GpuSubmit,
    Grant,
    ProgramEnd,
    Reason,
    SchedulerSettings,
    Signal,
    ToolEnd,
    ToolNum,
    ToolStart,
)
from thunderagent.programs.policies.composed import Composed
from thunderagent.programs.state.program import Status


def test_a_policy_is_named_by_its_parts() -> None:
    """The name shows the choice, for logs and metrics."""
    settings = {"priority": "age", "admission": "window", "admission.n": 2, "hold_ratio": 0.5}
    policy = load_policy("breakeven", settings)
    assert policy.name == "breakeven+admission=window+priority=age"
    assert isinstance(policy, Composed)
    assert policy.base.hold_ratio == 0.5  # type: ignore[attr-defined]
    assert policy.admission.n == 2  # type: ignore[union-attr]


@pytest.mark.parametrize(
    ("settings", "complaint"),
    [
        ({"admission": "no"}, r"no admission 'no'; there are .*window.*, or package.module:Class"),
        ({"admission": "window", "admission.m": 1}, r"admission window has no setting 'm'; it has: n"),
        ({"admission.n": 1}, r"setting 'admission.n' is of a part that is not chosen"),
        ({"victims": "youngest", "victims.x": 1}, r"victims youngest has no setting 'x'; it has none"),
        ({"order": "nowhere:Order"}, r"order 'nowhere:Order' cannot be loaded"),
        ({"admission": "window", "admission.n": 0}, r"n must be a whole number, at least 1"),
    ],
)
def test_parts_that_are_not_there_are_refused(settings: dict[str, str | int], complaint: str) -> None:
    """The error lists the parts that exist."""
    with pytest.raises(ConfigurationError, match=complaint):
        load_policy("passthrough", settings)


def test_program_outside_the_window_waits_outside() -> None:
    """It waits in order of arrival until one ends; its other turns wait with it, and at its tool it stays admitted."""
    driver = Driver(load_policy("passthrough", {"admission": "window", "admission.n": 1}))
    first = driver.arrives("a", 10)
    second = driver.arrives("b", 10)
    driver.passes(1.0)
    third = driver.arrives("c", 10)
    beside = driver.arrives("b", 10)
    assert set(driver.granted_on) == {first}
    assert [program.hold_reason for program in driver.scheduler.queue] == [Reason.ADMISSION] * 2
    driver.finishes(first, 10)
    assert set(driver.granted_on) == {first}
    driver.releases("a")
    assert set(driver.granted_on) == {first, second, beside}
    driver.releases("b")
    assert third in driver.granted_on
    assert driver.scheduler.book.admitted_count == 1


def test_admitted_program_may_still_wait_for_room() -> None:
    """Admission comes before memory."""
    settings = {"admission": "window", "admission.n": 2, "ttl_s": 100.0, "reserve_tokens": 0}
    driver = Driver(load_policy("ttl", settings), replicas={"r0": 100})
    driver.arrives("a", 80)
    driver.arrives("b", 80)
    driver.arrives("c", 10)
    assert [program.hold_reason for program in driver.scheduler.queue] == [Reason.NO_ROOM, Reason.ADMISSION]


def test_the_idle_limit_takes_the_place_too() -> None:
    """An unreleased program keeps none out for ever; when it comes back it waits like a new one."""
    settings = SchedulerSettings(idle_limit_s=10.0)
    driver = Driver(load_policy("passthrough", {"admission": "window", "admission.n": 1}), settings=settings)
    driver.takes_turn("a", 10)
    waiting = driver.arrives("b", 10)
    driver.ticks(11.0)
    assert waiting in driver.granted_on
    again = driver.arrives("a", 10)
    assert again not in driver.granted_on
    driver.releases("b")
    assert again in driver.granted_on


def test_the_idle_limit_takes_the_place_of_one_that_has_no_claim_any_more() -> None:
    """A paused program that never returns keeps none out for longer than others; one that returns is still in."""
    policy = load_policy("ttl", {"ttl_s": 1.0, "admission": "window", "admission.n": 2})
    driver = Driver(policy, settings=SchedulerSettings(idle_limit_s=10.0))
    driver.takes_turn("gone", 100)
    driver.takes_turn("back", 100)
    driver.ticks(5.0)
    assert (driver.home("gone"), driver.home("back")) == (None, None)
    waits = driver.arrives("next", 100)
    back = driver.arrives("back", 110)
    driver.ticks(4.9)
    assert driver.held(waits)
    driver.ticks(0.2)
    assert {waits, back} <= set(driver.granted_on)
    assert driver.held(driver.arrives("gone", 110))


def test_the_idle_limit_takes_the_place_of_one_whose_client_left_before_its_first_answer() -> None:
    """It was admitted and waited for room: it never had a claim."""
    policy = load_policy("ttl", {"reserve_tokens": 0, "admission": "window", "admission.n": 2})
    driver = Driver(policy, settings=SchedulerSettings(idle_limit_s=10.0))
    driver.arrives("busy", 600)
    gone = driver.arrives("gone", 600)
    waits = driver.arrives("next", 10)
    driver.is_abandoned(gone)
    driver.ticks(9.0)
    assert driver.held(waits)
    driver.ticks(2.0)
    assert waits in driver.granted_on


def test_a_child_of_who_is_in_is_let_in() -> None:
    """Its parent may wait for it: outside it would wait for ever. One whose client would give up is let in, too."""
    driver = Driver(load_policy("passthrough", {"admission": "window", "admission.n": 1}))
    driver.arrives("a", 10)
    assert driver.arrives("child", 10, parent="a") in driver.granted_on
    impatient = driver.arrives("b", 10, patience_s=5.0)
    assert impatient not in driver.granted_on
    driver.ticks(4.5)
    assert impatient in driver.granted_on
    assert driver.scheduler.book.admitted_count == 3


def test_dismissed_program_loses_its_claim_and_waits_outside() -> None:
    """An admission that shrinks dismisses programs between two of their turns."""
    policy = load_policy("passthrough", {"admission": "tests.builders:Breathing"})
    driver = Driver(policy)
    driver.arrives("a", 10)
    turn_id = driver.arrives("b", 10)
    driver.finishes(turn_id, 10, tool="make")
    program = driver.scheduler.programs.get("b")
    assert program is not None
    assert (program.status, program.admitted) == (Status.PAUSED, False)
    assert driver.arrives("b", 10) in driver.granted_on  # no tool runs any more: three may be in
    assert program.admitted


def test_orders_victims_and_priorities_are_asked() -> None:
    """They are asked instead of the policy."""
    settings = {"order": "shortest", "victims": "largest", "priority": "age", "ttl_s": 100.0, "reserve_tokens": 0}
    driver = Driver(load_policy("ttl", settings), replicas={"r0": 100})
    driver.takes_turn("large", 90)
    driver.passes(1.0)
    middle = driver.arrives("middle", 50)
    small = driver.arrives("small", 20)
    assert not {middle, small} & set(driver.granted_on)
    decisions = driver.releases("large")
    granted = [decision for decision in decisions if isinstance(decision, Grant)]
    assert [grant.turn_id for grant in granted] == [small, middle]
    assert [grant.engine_priority for grant in granted] == [1010, 1010]
    assert driver.scheduler.policy.pause_rank(driver.scheduler.programs.get("small")) == -20  # type: ignore[arg-type]


def test_a_client_that_says_when_its_tool_runs_is_believed() -> None:
    """The tool begins when the client says so, by that name; after its end the program is kept for as long again."""
    driver = Driver(load_policy("ttl", {"ttl_s": 10.0}), replicas={"r0": 1000})
    heard: list[Signal] = []
    driver.scheduler.listen(heard.append)
    driver.takes_turn("a", 100, tool="?")
    driver.passes(8.0)
    driver.tool_starts("a", "make")
    driver.ticks(8.0)  # longer than the time to live after the turn, but not after the tool's begin
    program = driver.scheduler.programs.get("a")
    assert program is not None
    assert program.status is Status.ACTIVE
    driver.tool_ends("a")
    driver.ticks(9.0)
    assert program.status is Status.ACTIVE
    assert driver.scheduler.knowledge.tools_running_count == 0
    driver.tool_starts("a", "test")
    driver.passes(2.0)
    driver.arrives("a", 120)
    told = [signal for signal in heard if isinstance(signal, ToolStart | ToolEnd)]
    assert told == [
        ToolStart(100.0, "a", "?"),
        ToolStart(108.0, "a", "make"),
        ToolEnd(116.0, "a", "make", 8.0),
        ToolStart(125.0, "a", "test"),
        ToolEnd(127.0, "a", "test", 2.0),
    ]
    for nobody in ("a", "gone"):  # a turn of the first one is in flight
        driver.tool_starts(nobody)
        driver.tool_ends(nobody)
    assert driver.scheduler.knowledge.tools_running_count == 0


def test_signals_tell_of_turns_and_tools() -> None:
    """They come in order of events, each with its figures; without listeners none is made."""
    driver = Driver()
    heard: list[Signal] = []
    stop = driver.scheduler.listen(heard.append)
    turn_id = driver.arrives("a", 100)
    driver.passes(0.5)
    driver.starts(turn_id)
    driver.passes(1.5)
    driver.finishes(turn_id, 100, 20, 60, tool="make")
    driver.passes(3.0)
    driver.is_abandoned(driver.arrives("a", 130))
    assert heard == [
        GpuSubmit(100.0, "a", turn_id, "r0", 100),
        GpuFirstToken(100.5, "a", turn_id, "r0", 0.5),
        GpuEnd(102.0, "a", turn_id, "r0", 120, 60, 2.0, finished=True),
        ToolStart(102.0, "a", "make"),
        ToolNum(102.0, 1, 0.0),
        ToolEnd(105.0, "a", "make", 3.0),
        ToolNum(105.0, 0, 3.0),
        GpuSubmit(105.0, "a", turn_id + 1, "r0", 130),
        GpuEnd(105.0, "a", turn_id + 1, "r0", 130, 10, 0.0, finished=False),
    ]
    stop()
    heard.clear()
    driver.arrives("b", 10)
    assert not heard


def test_signals_tell_of_the_end_of_programs() -> None:
    """It comes after what ended with it, and once, however often the program is released."""
    driver = Driver()
    heard: list[Signal] = []
    driver.takes_turn("a", 100, tool="make")
    driver.scheduler.listen(heard.append)
    driver.releases("a")
    driver.releases("a")
    turn_id = driver.arrives("b", 10)
    driver.releases("b")
    assert heard == [
        ToolNum(100.0, 0, 0.0),
        ProgramEnd(100.0, "a", 1),
        GpuSubmit(100.0, "b", turn_id, "r0", 10),
        GpuEnd(100.0, "b", turn_id, "r0", 10, 10, 0.0, finished=False),
        ProgramEnd(100.0, "b", 1),
    ]
