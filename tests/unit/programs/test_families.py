"""Children are never held while their parent, which waits for them, holds a claim."""

from __future__ import annotations

from itertools import pairwise

import pytest

from tests.builders import Driver
from thunderagent.programs.messages import Grant, Reason, Release
from thunderagent.programs.policies.baselines.cap import Cap
from thunderagent.programs.policies.baselines.sticky import Sticky
from thunderagent.programs.policies.breakeven import BreakEven
from thunderagent.programs.policies.papers.thunderagent import ThunderAgent
from thunderagent.programs.policy import Policy


@pytest.mark.parametrize("policy", [Cap(n=1), Sticky()])
def test_children_of_a_parent_that_waits_are_let_in(policy: Policy) -> None:
    """Its tool is its five sub-agents; only one program may run. Each takes three turns, then the parent continues."""
    driver = Driver(policy, replicas={"r0": 2700})
    driver.takes_turn("parent", 900)
    for number in range(3):
        turns = {child: driver.arrives(child, 400 + 100 * number, parent="parent") for child in "abcde"}
        assert set(turns.values()) <= set(driver.granted_on)
        for turn_id in turns.values():
            driver.finishes(turn_id, 400 + 100 * number)
    for child in "abcde":
        driver.releases(child)
    assert driver.arrives("parent", 950) in driver.granted_on


@pytest.mark.parametrize("policy", [BreakEven(), ThunderAgent()])
def test_other_children_wait_where_the_parent_is_paused_for_one(policy: Policy) -> None:
    """They do not wait for the parent, whose memory they got: none waits for ever."""
    driver = Driver(policy, replicas={"r0": 1000})
    driver.takes_turn("parent", 900)
    waiting = {child: driver.arrives(child, 700, parent="parent") for child in "abcde"}
    while waiting:
        driver.ticks(1.0)
        granted = [child for child, turn_id in waiting.items() if turn_id in driver.granted_on]
        assert granted, f"all wait: {waiting}"
        for child in granted:
            driver.finishes(waiting.pop(child), 700)
            driver.releases(child)
    turn_id = driver.arrives("parent", 950)
    driver.ticks(1.0)
    assert turn_id in driver.granted_on


def test_the_reason_says_so() -> None:
    driver = Driver(Cap(n=1))
    driver.takes_turn("parent", 900)
    driver.arrives("child", 400, parent="parent")
    assert [decision.reason for decision in driver.decisions if isinstance(decision, Grant)] == [Reason.PARENT]


def test_a_stranger_is_held() -> None:
    driver = Driver(Cap(n=1))
    driver.takes_turn("parent", 900)
    assert driver.held(driver.arrives("child", 100, parent="somebody else"))
    assert driver.held(driver.arrives("other", 100))
    assert driver.held(driver.arrives("self", 100, parent="self"))


def test_children_that_were_held_follow_their_parent() -> None:
    """Their children follow them, however deep the family is."""
    driver = Driver(Cap(n=1), replicas={"r0": 2000})
    driver.takes_turn("first", 10)
    names = ["parent", *(f"child {number}" for number in range(2000))]
    turns = [driver.scheduler.turns[driver.arrives(names[0], 1)]]
    check, driver.send = driver.send, driver.scheduler.handle  # type: ignore[method-assign]
    for parent, name in pairwise(names):
        turns.append(driver.scheduler.turns[driver.arrives(name, 1, parent=parent)])
    driver.send = check  # type: ignore[method-assign]
    assert all(turn.account_id is None for turn in turns)
    driver.releases("first")
    assert all(turn.account_id == "r0" for turn in turns)


def test_two_that_name_each_other_harm_nobody() -> None:
    driver = Driver(Cap(n=1))
    driver.takes_turn("first", 10)
    one, other = driver.arrives("one", 10, parent="other"), driver.arrives("other", 10, parent="one")
    assert driver.held(one)
    assert driver.held(other)
    driver.releases("first")
    assert {one, other} <= set(driver.granted_on)


def test_a_parent_may_come_after_its_children_and_go_before_them() -> None:
    driver = Driver(Cap(n=1))
    driver.takes_turn("first", 10)
    child = driver.arrives("child", 10, parent="parent")
    assert driver.held(child)
    driver.releases("first")
    driver.finishes(child, 10)
    driver.takes_turn("parent", 10) if driver.home("child") is None else driver.releases("child")
    driver.releases("parent")
    assert not driver.scheduler.families


def test_children_go_on_when_a_replica_comes_back() -> None:
    """The parent keeps its claim on a draining replica; its child has none until another comes."""
    driver = Driver(Cap(n=1), replicas={"r0": 1000})
    busy = driver.arrives("parent", 100)
    driver.drains("r0")
    child = driver.arrives("child", 100, parent="parent")
    assert driver.held(child)
    driver.comes_up("r1", 1000)
    assert driver.granted_on[child] == "r1"
    driver.finishes(busy, 100)


def test_an_announced_program_may_have_a_parent_and_a_tenant() -> None:
    driver = Driver(Cap(n=1))
    driver.opens("child")
    driver.arrives("child", 10, parent="parent", tenant="t")
    assert (driver.program("child").parent_id, driver.program("child").tenant) == ("parent", "t")
    driver.arrives("child", 10, parent="another", tenant="u")
    assert (driver.program("child").parent_id, driver.program("child").tenant) == ("parent", "t")


def test_a_tripped_replica_gets_nothing_new_and_keeps_what_it_has() -> None:
    """This lasts until it is closed again, or goes down and comes back."""
    driver = Driver(replicas={"r0": 1000, "r1": 1000})
    busy = driver.arrives("a", 100)
    home = driver.granted_on[busy]
    driver.takes_turn("b", 100)
    driver.trips(home)
    assert {driver.granted_on[driver.arrives(None, 10)] for _ in range(6)} == {"r0", "r1"} - {home}
    assert driver.home("a") == home
    driver.finishes(busy, 100)
    assert driver.home("a") is None
    driver.trips(home, tripped=False)
    assert home in {driver.granted_on[driver.arrives(None, 10)] for _ in range(12)}
    driver.trips(home)
    driver.trips("never heard of")
    driver.goes_down(home)
    driver.comes_up(home)
    assert home in {driver.granted_on[driver.arrives(None, 10)] for _ in range(12)}


def test_a_family_lives_in_one_tenant() -> None:
    """A program that names another tenant's program as parent, or its group, is held like any stranger."""
    driver = Driver(Cap(n=1), replicas={"r0": 1000})
    driver.takes_turn("parent", 900, tenant="red", group="g")
    strangers = [driver.arrives(f"blue {n}", 900, parent="parent", tenant="blue", group="g") for n in range(21)]
    assert all(driver.held(turn_id) for turn_id in strangers)
    assert driver.arrives("child", 50, parent="parent", tenant="red") in driver.granted_on
    assert driver.program("blue 1").group is not driver.program("parent").group


def test_children_overdraw_a_replica_by_no_more_than_the_ratio() -> None:
    """One is always let in; the others wait for room, or for the first one's end."""
    driver = Driver(Cap(n=1), replicas={"r0": 1000})
    driver.takes_turn("parent", 900)
    turns = {f"child {n}": driver.arrives(f"child {n}", 400, parent="parent") for n in range(21)}
    for number in range(21):
        assert driver.scheduler.replicas["r0"].account.demand_tokens <= 1500
        running = [child for child, turn_id in turns.items() if turn_id in driver.granted_on]
        assert len(running) == number + 1
        driver.finishes(turns[running[-1]], 400)
        driver.releases(running[-1])
        driver.ticks(1.0)


def test_a_parent_beyond_the_limit_does_not_wait_for_a_child_for_ever() -> None:
    driver = Driver(Cap(n=1), replicas={"r0": 1000})
    driver.takes_turn("parent", 1800)
    assert driver.arrives("child", 400, parent="parent") in driver.granted_on


def test_an_announced_program_takes_its_family_along_when_its_tenant_is_named() -> None:
    driver = Driver(Cap(n=1))
    driver.takes_turn("parent", 100, tenant="red")
    driver.opens("child", parent="parent")
    assert driver.arrives("child", 100, tenant="red") in driver.granted_on


def test_a_child_without_a_turn_ends_when_its_parent_goes_on() -> None:
    """Its client never releases it; else the parent waits for the memory of a sub-agent that has ended."""
    driver = Driver(Cap(n=1), replicas={"r0": 2000})
    driver.takes_turn("parent", 900)
    driver.finishes(driver.arrives("child", 500, parent="parent"), 500)
    driver.finishes(driver.arrives("grandchild", 500, parent="child"), 500)
    assert driver.arrives("parent", 950) in driver.granted_on
    assert set(driver.scheduler.programs) == {"parent"}
    (end, *_) = [each for each in driver.decisions if isinstance(each, Release) and each.program_id == "child"]
    assert end.reason is Reason.PARENT_GOES_ON


def test_child_that_works_beside_its_parent_does_not_end() -> None:
    """A child in flight, whose tool runs, that said when it is back, or had no turn; and a stranger's."""
    driver = Driver(Sticky())
    driver.takes_turn("parent", 100)
    driver.arrives("in flight", 10, parent="parent")
    driver.finishes(driver.arrives("calls a tool", 10, parent="parent"), 10, tool="bash")
    driver.finishes(driver.arrives("is back", 10, parent="parent"), 10)
    driver.is_hinted("is back", 5.0)
    driver.opens("announced", parent="parent")
    driver.finishes(driver.arrives("stranger", 10, parent="somebody else"), 10)
    driver.finishes(driver.arrives("done", 10, parent="parent"), 10)
    driver.arrives("parent", 110)
    assert set(driver.scheduler.programs) == {
        *("parent", "in flight", "calls a tool", "is back", "announced", "stranger")
    }


def test_two_that_name_each_other_end_only_the_other() -> None:
    driver = Driver(Sticky())
    driver.finishes(driver.arrives("one", 10, parent="other"), 10)
    driver.finishes(driver.arrives("other", 10, parent="one"), 10)
    assert driver.arrives("one", 20) in driver.granted_on
    assert set(driver.scheduler.programs) == {"one"}
