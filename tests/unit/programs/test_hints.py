"""A client's hint about its next turn replaces the policy's guess, and takes only a limited part from others."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.builders import Driver
from thunderagent.policy_loader import load_policy
from thunderagent.programs.learned.trust import MAX_TENANTS_COUNT, HintRecord
from thunderagent.programs.messages import Pause, SchedulerSettings
from thunderagent.programs.state.program import Kind, Place, Program
from thunderagent.runtime.event_log import EventLogWriter, replay

THRESHOLD_S = 20.0
"""What is planned in these tests: how many seconds of holding a lost token is worth."""


def driver_with(policy: str = "breakeven", **settings: object) -> Driver:
    """Drive a policy that has this threshold, and itself would hold for a moment, on a replica that never idles."""
    plain = {"reserve_tokens": 0, "foresight_ratio": 0, "low_ratio": 1, "adapt_capacity": False}
    settings = settings if policy != "breakeven" else plain | settings
    driver = Driver(load_policy(policy, settings), replicas={"r0": 1000}, threshold_s=THRESHOLD_S)
    driver.keeps_busy()
    for _ in range(1000):  # tools without a name take an hour
        driver.scheduler.knowledge.tool_times.returned("", 3600.0)
    return driver


@pytest.fixture
def driver() -> Driver:
    return driver_with(hold_ratio=1.0)


def held_s(driver: Driver, name: str = "a") -> float:
    """The time from now for which a program's claim is worth holding."""
    return driver.program(name).hold_until_s - driver.now_s


def paused(driver: Driver) -> list[str]:
    """The programs that gave up their claims so far."""
    return [each.program_id for _, decisions in driver.events for each in decisions if isinstance(each, Pause)]


def test_a_turn_that_comes_soon_is_waited_for(driver: Driver) -> None:
    """A claim that others would have had at once is kept until the turn would be late, and no longer."""
    driver.takes_turn("a", 200)
    assert held_s(driver) < 1.0
    driver.is_hinted("a", 4.0)
    assert held_s(driver) == pytest.approx(8.0)
    turn = driver.arrives("b", 900)
    driver.ticks(7.9)
    assert not paused(driver)
    driver.ticks(0.2)
    assert paused(driver) == ["a"]
    assert turn in driver.granted_on


def test_a_turn_that_comes_late_gives_its_room_to_who_waits_now() -> None:
    """The policy would have held it, but its client knows better."""
    driver = driver_with(hold_ratio=1.0)
    for _ in range(5000):
        driver.scheduler.knowledge.tool_times.returned("quick", 5.0)
    driver.takes_turn("a", 200, tool="quick")
    turn = driver.arrives("b", 900)
    assert held_s(driver) > 5.0
    assert turn not in driver.granted_on
    driver.is_hinted("a", 60.0)
    assert paused(driver) == ["a"]
    assert turn in driver.granted_on


def test_a_hint_with_a_turn_counts_from_its_end(driver: Driver) -> None:
    """The seconds count from that end, however long the turn takes."""
    turn = driver.arrives("a", 200)
    driver.is_hinted("a", 4.0)
    driver.passes(50.0)
    driver.finishes(turn, 200)
    assert held_s(driver) == pytest.approx(8.0)


def test_unsure_hint_is_held_for_less() -> None:
    """A confidence of one half pays a third of the threshold; a lower one counts as no hint."""
    found = {}
    for said_s, confidence in ((6.0, 0.5), (7.0, 0.5), (7.0, 0.6), (1.0, 0.4)):
        driver = driver_with(hold_ratio=1.0)
        driver.takes_turn("a", 200)
        own_s = held_s(driver)
        driver.is_hinted("a", said_s, confidence)
        found[said_s, confidence] = held_s(driver)
    assert found == {
        (6.0, 0.5): pytest.approx(12.0),
        (7.0, 0.5): 0.0,
        (7.0, 0.6): pytest.approx(14.0),
        (1.0, 0.4): own_s,
    }


def test_a_hint_said_again_and_again_keeps_a_claim_for_the_threshold_alone(driver: Driver) -> None:
    """The time counts from the first hint between two turns."""
    driver.takes_turn("a", 200)
    began_s = driver.now_s
    for _ in range(12):
        driver.is_hinted("a", 4.0)
        driver.is_hinted("a", keep="retain")
        assert driver.program("a").hold_until_s <= began_s + THRESHOLD_S
        driver.passes(2.0)
    assert held_s(driver) < 0.0
    driver.takes_turn("a", 200)
    driver.is_hinted("a", 4.0)
    assert held_s(driver) == pytest.approx(8.0)


def test_hints_together_keep_a_part_of_a_replica_alone() -> None:
    """The third is held only as long as its policy holds it; when another one is back, a fourth may be kept."""
    driver = driver_with(hold_ratio=1.0, hint_ratio=0.4)
    for name in "abcd":
        driver.takes_turn(name, 200)
        own_s = held_s(driver, name)
        driver.is_hinted(name, 4.0)
        assert (held_s(driver, name) > own_s) == (name in "ab")
    driver.takes_turn("a", 200)
    driver.is_hinted("d", 4.0)
    assert held_s(driver, "d") == pytest.approx(8.0)


def test_memory_that_its_client_gives_away_is_others_at_once(driver: Driver) -> None:
    """For example, a person is asked: nothing is lost while no program needs the room."""
    driver.takes_turn("a", 200)
    driver.is_hinted("a", 4.0)
    driver.is_hinted("a", keep="offload")
    driver.passes(0.1)
    assert not paused(driver)
    assert driver.arrives("b", 900) in driver.granted_on
    assert paused(driver) == ["a"]


def test_a_branch_that_ended_claims_nothing_more() -> None:
    """Its program lives on, and others get the room at once; a branch with a turn stays."""
    driver = driver_with()
    driver.takes_turn("a", 100)
    driver.takes_turn("a", 500, branch="sub")
    turn = driver.arrives("b", 800)
    busy = driver.arrives("a", 500, branch="sub")
    driver.is_hinted("a", keep="drop", branch_id="sub")
    assert "sub" in driver.program("a").branches
    driver.finishes(busy, 500)
    driver.is_hinted("a", keep="drop", branch_id="sub")
    assert driver.program("a").claim_tokens == 100
    assert turn in driver.granted_on
    driver.is_hinted("a", keep="drop", branch_id="no such")
    assert [entry.why for entry in driver.program("a").story() if entry.what == "hinted"] == ["drop sub"]


def test_a_client_whose_hints_are_wrong_is_believed_no_more(driver: Driver) -> None:
    """After some late turns its hints count for nothing; after some right ones they count again."""
    for _ in range(8):
        driver.takes_turn("a", 200)
        driver.is_hinted("a", 4.0)
        driver.passes(30.0)
    driver.takes_turn("a", 200)
    record = driver.scheduler.knowledge.hints
    assert record.outcome_counts == {"right": 0, "early": 0, "late": 8}
    assert record.error_s_total == pytest.approx(8 * 22.0)
    own_s = held_s(driver)
    driver.is_hinted("a", 4.0)
    assert held_s(driver) == own_s
    for _ in range(12):
        driver.passes(4.0)
        driver.takes_turn("a", 200)
        driver.is_hinted("a", 4.0)
    assert held_s(driver) == pytest.approx(8.0)
    assert record.outcome_counts["right"] == 12


def test_the_first_word_is_held_against_the_turn(driver: Driver) -> None:
    """A client that keeps promising an early turn was still wrong."""
    driver.takes_turn("a", 200)
    for _ in range(10):
        driver.is_hinted("a", 4.0)
        driver.passes(3.0)
    driver.arrives("a", 200)
    assert driver.scheduler.knowledge.hints.outcome_counts["late"] == 1


def test_a_program_that_ends_when_its_turn_is_overdue_was_said_wrong(driver: Driver) -> None:
    """A program that ends before that shows nothing."""
    for name, elapsed_s in (("a", 3.0), ("b", 30.0)):
        driver.takes_turn(name, 100)
        driver.is_hinted(name, 4.0)
        driver.passes(elapsed_s)
        driver.releases(name)
    assert driver.scheduler.knowledge.hints.outcome_counts == {"right": 0, "early": 0, "late": 1}


def test_hints_of_another_tenant_are_believed_as_before() -> None:
    """The confidence in a tenant's new programs comes from its old ones, and does not affect another tenant."""
    record = HintRecord()
    mine, new, other = (Program(name, 1, 0.0, Place(Kind.AWAY)) for name in ("mine", "new", "other"))
    mine.tenant = new.tenant = "red"
    for _ in range(12):
        record.learn(mine, 100.0, 2.0, 8.0)
    assert record.confidence_ratio(mine, 1.0) < record.confidence_ratio(new, 1.0) < 0.4
    assert record.confidence_ratio(other, 0.9) == 0.9
    for _ in range(8):
        record.learn(new, 4.0, 2.0, 8.0)
    assert record.confidence_ratio(new, 1.0) > 0.7 > record.confidence_ratio(mine, 1.0)


def test_a_stranger_takes_no_belief_from_programs_of_nobody_in_particular() -> None:
    """If no key and no header names a tenant, each program is judged by its own hints alone."""
    record = HintRecord()
    liar, honest = (Program(name, 1, 0.0, Place(Kind.AWAY)) for name in ("liar", "honest"))
    for _ in range(12):
        record.learn(liar, 100.0, 2.0, 8.0)
    assert record.confidence_ratio(liar, 1.0) < 0.4
    assert record.confidence_ratio(honest, 0.9) == 0.9


def test_tenants_that_were_not_heard_of_for_longest_are_forgotten() -> None:
    """The names of tenants take bounded memory."""
    record = HintRecord()
    for number in range(MAX_TENANTS_COUNT + 1):
        program = Program("a", 1, 0.0, Place(Kind.AWAY))
        program.tenant = f"t{number}"
        record.learn(program, 100.0, 2.0, 8.0)
    again = Program("b", 1, 0.0, Place(Kind.AWAY))
    ratios = []
    for tenant in ("t0", "t1"):
        again.tenant = tenant
        ratios.append(record.confidence_ratio(again, 1.0))
    assert ratios[0] == 1.0 > ratios[1]


def test_a_tool_that_is_said_to_be_through_is_waited_for_whatever_was_said_before(driver: Driver) -> None:
    """The next turn comes at once, or within what holding may cost; for another tool, the hint counts as before."""
    driver.takes_turn("a", 200)
    driver.is_hinted("a", 4.0)
    driver.tool_ends("a")
    assert held_s(driver) == pytest.approx(THRESHOLD_S)
    driver.passes(1.0)
    driver.tool_starts("a", "make")
    assert held_s(driver) == pytest.approx(7.0)


def test_holds_for_ended_tools_are_bounded_however_often_they_end(driver: Driver) -> None:
    """Each end after a turn, however late it comes, is worth half of the one before; the next turn begins anew."""
    driver.takes_turn("a", 200)
    for _ in range(2):
        driver.passes(50.0)
        driver.tool_starts("a", "make")
        driver.passes(50.0)
        driver.tool_ends("a")
        assert held_s(driver) == pytest.approx(THRESHOLD_S)
        for part in (2, 4, 8):
            driver.passes(10.0)
            driver.tool_starts("a", "make")
            driver.tool_ends("a")
            assert held_s(driver) == pytest.approx(THRESHOLD_S / part)
        driver.takes_turn("a", 210)


def test_a_policy_that_holds_by_something_else_goes_by_itself() -> None:
    """The hint is measured, and shown in the program's story; nothing is held for it."""
    driver = driver_with("ttl", ttl_s=3.0)
    driver.takes_turn("a", 200)
    driver.is_hinted("a", 40.0)
    assert held_s(driver) == pytest.approx(3.0)
    driver.passes(41.0)
    driver.takes_turn("a", 200)
    assert driver.scheduler.knowledge.hints.outcome_counts["right"] == 1
    assert ("hinted", "next turn in 40.0 s, by 1.00") in [(each.what, each.why) for each in driver.program("a").story()]


def test_parts_of_a_policy_leave_it_its_hints() -> None:
    """A policy of parts holds as its base does."""
    driver = driver_with(hold_ratio=1.0, order="shortest")
    driver.takes_turn("a", 200)
    driver.is_hinted("a", 4.0)
    assert held_s(driver) == pytest.approx(8.0)


def test_hint_without_a_program_teaches_nothing(driver: Driver) -> None:
    """A hint for an unknown program is no error; an announced one keeps its hints until its first turn."""
    assert driver.is_hinted("nobody", 4.0) == []
    driver.opens("a")
    driver.is_hinted("a", 4.0)
    driver.passes(4.0)
    driver.arrives("a", 100)
    assert driver.scheduler.knowledge.hints.outcome_counts["right"] == 1


def test_a_log_with_hints_is_decided_again_as_it_was(tmp_path: Path) -> None:
    """A second scheduler decides with these hints as the first one did."""
    log = tmp_path / "log.jsonl"
    settings = {"hold_ratio": 40.0, "reserve_tokens": 0, "foresight_ratio": 0}
    writer = EventLogWriter(log, policy="breakeven", policy_settings=settings, settings=SchedulerSettings())
    driver = Driver(load_policy("breakeven", settings))
    for name, said_s in (("a", 2.0), ("b", 400.0), ("c", None)):
        driver.takes_turn(name, 250)
        driver.is_hinted(name, said_s, keep="" if said_s else "offload")
    driver.arrives("d", 900)
    driver.ticks(100.0)
    for event, decisions in driver.events:
        writer.write(event, decisions)
    writer.close()
    assert paused(driver)
    assert b"ProgramHinted" in log.read_bytes()
    with log.open("rb") as lines:
        assert replay(lines).difference is None
