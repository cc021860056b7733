"""Verdicts give levels, case by case; the outcomes of programs give a judge's record."""

from __future__ import annotations

from random import Random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.builders import Driver
from thunderagent.programs.learned.trust import JudgeRecord
from thunderagent.programs.messages import FAILURE, SUCCESS, Grant, Reason, Reject, Release, SchedulerSettings
from thunderagent.programs.state.program import JudgeVerdict, Level, Verdicts


def after(
    *said: tuple[int, bool] | tuple[int, bool, float], fail_count: int = 10, least_confidence_ratio: float = 0.0
) -> Verdicts:
    """Return the level after verdicts, each given as turn, predicted success, and confidence."""
    verdicts = Verdicts()
    for turn_count, will_succeed, *sure in said:
        verdict = JudgeVerdict(turn_count, will_succeed, sure[0] if sure else 0.9)
        verdicts.add(verdict, fail_count=fail_count, least_confidence_ratio=least_confidence_ratio)
    return verdicts


FAIL_FAIL = ((1, False), (2, False))


@pytest.mark.parametrize(
    ("said", "level"),
    [
        ([], None),
        ([(5, True)], Level.HIGH),
        ([(5, False)], Level.MEDIUM),
        ([(5, True), (10, True)], Level.HIGH),
        ([(5, False), (10, True)], Level.HIGH),
        ([(5, True), (10, False)], Level.MEDIUM),
        ([(5, False), (10, False)], Level.LOW),
        ([(5, False), (50, False)], Level.LOW),
        ([(turn, False) for turn in range(10)], Level.LOW),
        ([(turn, False) for turn in range(11)], Level.LOWEST),
        ([(turn, False) for turn in range(11)] + [(11, True), (12, True)], Level.LOWEST),
        ([(turn, turn % 2 == 1) for turn in range(20)], Level.HIGH),
        ([(turn, turn % 2 == 1) for turn in range(24)], Level.LOWEST),
        ([(5, False, 0.01)], Level.MEDIUM),
    ],
)
def test_the_levels_are_those_of_orbit_3_2_3(said: list[tuple[int, bool]], level: Level | None) -> None:
    """It is LOWEST iff F > K_fail, else LOW by the last two, MEDIUM and HIGH by the last."""
    assert after(*said).level is level


@given(st.lists(st.booleans(), min_size=1, max_size=40), st.integers(0, 12), st.randoms(use_true_random=False))
def test_the_level_is_the_papers_function_of_all_verdicts(
    succeeded: list[bool], fail_count: int, random: Random
) -> None:
    """The paper's formula is applied to the whole sequence, in whatever order the verdicts come."""
    said = list(enumerate(succeeded))
    random.shuffle(said)
    failed = [not each for each in succeeded]
    if sum(failed) > fail_count:
        expected = Level.LOWEST
    elif failed[-2:] == [True, True]:
        expected = Level.LOW
    else:
        expected = Level.MEDIUM if failed[-1] else Level.HIGH
    verdicts = after(*said, fail_count=fail_count)
    assert verdicts.level is expected
    assert verdicts.failure_count == sum(failed)
    assert verdicts.first_failure_turn_count == (failed.index(True) if any(failed) else None)


def test_bound_of_failures_is_a_setting() -> None:
    """The limit is K_fail: more than that."""
    assert after(*FAIL_FAIL, fail_count=2).level is Level.LOW
    assert after(*FAIL_FAIL, fail_count=1).level is Level.LOWEST


def test_a_judge_may_have_to_be_sure() -> None:
    """A failure with less confidence than required does not count."""
    assert after((5, False, 0.49), least_confidence_ratio=0.5).level is Level.HIGH
    assert after((5, False, 0.5), least_confidence_ratio=0.5).level is Level.MEDIUM


def test_the_first_failure_is_kept() -> None:
    """Recall depends on the first predicted failure, whatever came later."""
    verdicts = after((5, True), (10, False), (15, True), (20, False))
    assert verdicts.first_failure_turn_count == 10
    assert verdicts.failure_count == 2


def test_recall_and_false_alarms_are_counted_by_turns() -> None:
    """They are the predicted parts of those that failed, and of those that succeeded."""
    record = JudgeRecord()
    assert record.predicted_ratio(FAILURE, 10) is None
    for first_failure in (4, 10, 11, 90, None):
        record.program_ended(FAILURE, first_failure)
    record.program_ended(SUCCESS, 6)
    record.program_ended(SUCCESS, None)
    assert [record.predicted_ratio(FAILURE, turns) for turns in (5, 10, 15, 80)] == [0.2, 0.4, 0.6, 0.6]
    assert [record.predicted_ratio(SUCCESS, turns) for turns in (5, 10, 80)] == [0.0, 0.5, 0.5]


def test_a_verdict_is_in_the_story_and_on_nobody_else() -> None:
    """A late one, on an earlier incarnation of the id or an unknown one, changes nothing."""
    driver = Driver()
    driver.takes_turn("a", 100)
    driver.is_judged("a", will_succeed=False, confidence=0.8)
    program = driver.program("a")
    assert program.level is Level.MEDIUM
    assert [(entry.what, entry.why) for entry in program.story()][-1] == (
        "judged",
        "failure by 0.80 at turn 1: medium",
    )
    assert driver.is_judged("a", will_succeed=True, generation=program.generation + 1) == []
    assert driver.is_judged("gone", will_succeed=True) == []
    assert len(program.verdicts.last) == 1
    assert driver.scheduler.knowledge.judge_record.level_counts[Level.MEDIUM] == 1


def test_a_late_verdict_is_not_counted() -> None:
    """A verdict on fewer turns than the last one changes no level, counts nowhere and is not in the story."""
    driver = Driver()
    driver.takes_turn("a", 100)
    driver.is_judged("a", will_succeed=True, at_turn=5)
    counts = dict(driver.scheduler.knowledge.judge_record.level_counts)
    entries_count = len(driver.program("a").story())
    assert driver.is_judged("a", will_succeed=False, at_turn=3) == []
    assert driver.scheduler.knowledge.judge_record.level_counts == counts
    assert len(driver.program("a").story()) == entries_count


def test_outcomes_are_counted_where_they_are_said() -> None:
    """A release without one, or with an unknown word, says nothing about the judge."""
    driver = Driver()
    for program_id, outcome in (("a", "failure"), ("b", "failure"), ("c", "success"), ("d", ""), ("e", "odd")):
        driver.takes_turn(program_id, 10)
        driver.is_judged(program_id, will_succeed=program_id != "a")
        driver.releases(program_id, outcome=outcome)
    record = driver.scheduler.knowledge.judge_record
    assert record.program_counts == {"success": 1, "failure": 2}
    assert record.predicted_ratio(FAILURE, 5) == 0.5
    assert record.predicted_ratio(SUCCESS, 5) == 0.0


HOPELESS = SchedulerSettings(judge_fail_count=1, judge_ends_hopeless=True)


def test_nobody_is_ended_unless_asked() -> None:
    """By default the lowest level only affects the order."""
    driver = Driver(settings=SchedulerSettings(judge_fail_count=1))
    for _ in range(4):
        driver.takes_turn("a", 10)
        driver.is_judged("a", will_succeed=False)
    assert driver.program("a").level is Level.LOWEST
    assert driver.arrives("a", 10) in driver.granted_on


def test_refused_program_is_ended_and_told_so() -> None:
    """Its claim goes, its turns in flight end, its next ones are rejected, until its client releases or opens it."""
    driver = Driver(settings=HOPELESS)
    driver.takes_turn("a", 10)
    driver.is_judged("a", will_succeed=False)
    driver.takes_turn("a", 10)
    in_flight = driver.arrives("a", 10)
    generation = driver.program("a").generation
    assert driver.is_judged("a", will_succeed=False) == [Release("a", generation, Reason.HOPELESS)]
    assert driver.scheduler.programs.get("a") is None
    rejected = driver.arrives("a", 10)
    assert driver.events[-1][1] == [Reject(rejected, "a", Reason.HOPELESS)]
    driver.finishes(in_flight, 10)
    driver.releases("a")
    assert driver.arrives("a", 10) in driver.granted_on


def test_refused_program_that_is_held_is_told_at_once() -> None:
    """A turn that waits for memory waits no longer; others get the program's memory."""
    driver = Driver(settings=HOPELESS, replicas={"r0": 1000})
    driver.takes_turn("a", 10)
    driver.is_judged("a", will_succeed=False)
    driver.takes_turn("a", 10)
    driver.suspends()
    held = driver.arrives("a", 10)
    driver.goes_on()
    driver.suspends()
    again = driver.arrives("a", 10)
    driver.is_judged("a", will_succeed=False, at_turn=3)
    assert driver.rejected_for == {again: Reason.HOPELESS}
    assert held in driver.granted_on
    driver.opens("a")
    driver.goes_on()
    granted = [each for each in driver.events[-1][1] if isinstance(each, Grant)]
    assert granted == []
    assert driver.arrives("a", 10) in driver.granted_on
