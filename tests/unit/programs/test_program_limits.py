"""Limits of a program: which turns are refused, which programs end, and who comes first for a deadline."""

from __future__ import annotations

import pytest

from tests.builders import Driver
from thunderagent.programs.handlers.programs import record_of
from thunderagent.programs.messages import ProgramLimits, ProgramsAdopted, Reason, least_of
from thunderagent.programs.policies.breakeven import BreakEven
from thunderagent.programs.rules.program_limits import FREE_COUNT, NEW_RATIO

TIMES_S = 60.0
NEW_S = (1.0 - NEW_RATIO) * TIMES_S
"""When a new program is urgent."""


def takes(driver: Driver, program_id: str, limits: ProgramLimits | None, *, took_s: float = 1.0) -> int:
    """Let a program take a turn of 100 tokens, and 10 of its answer; return its id."""
    turn_id = driver.arrives(program_id, 100, limits=limits)
    if turn_id in driver.granted_on:
        driver.now_s += took_s
        driver.finishes(turn_id, 100, 10)
    return turn_id


@pytest.mark.parametrize(
    ("limits", "turn_count", "reason"),
    [
        (ProgramLimits(max_turns=2), 2, Reason.MAX_TURNS),
        (ProgramLimits(max_tokens=220), 2, Reason.MAX_TOKENS),
        (ProgramLimits(max_tokens=221), 3, Reason.MAX_TOKENS),
        (ProgramLimits(max_age_s=2.0), 2, Reason.MAX_AGE),
        (ProgramLimits(deadline_s=2.0), 2, Reason.DEADLINE),
    ],
)
@pytest.mark.parametrize("ends", [False, True])
def test_the_turn_after_a_limit_is_refused(
    limits: ProgramLimits, turn_count: int, reason: Reason, *, ends: bool
) -> None:
    """The program lives on, or ends with the turn that reaches it; its turns are refused until it is released."""
    driver = Driver()
    limits = limits._replace(ends=ends)
    for _ in range(turn_count):
        assert takes(driver, "a", limits) in driver.granted_on
    assert ("a" in driver.scheduler.programs) is not ends
    for _ in range(2):
        assert driver.rejected_for[takes(driver, "a", limits)] is reason
    driver.releases("a")
    assert takes(driver, "a", limits) in driver.granted_on


def test_turns_beside_each_other_count() -> None:
    """A client that sends its turns all at once gets no more."""
    driver = Driver()
    limits = ProgramLimits(max_turns=3)
    turn_ids = [driver.arrives("a", 100, branch=f"b{number}", limits=limits) for number in range(5)]
    assert [driver.rejected_for.get(each) for each in turn_ids] == [None] * 3 + [Reason.MAX_TURNS] * 2


def test_second_attempt_at_a_turn_is_the_same_turn() -> None:
    """A turn whose replica failed it may be tried again, though it was the last."""
    driver = Driver()
    limits = ProgramLimits(max_turns=1)
    first = driver.arrives("a", 100, limits=limits)
    driver.fails(first)
    again = driver.arrives("a", 100, instead_of=first, limits=limits)
    assert again in driver.granted_on
    driver.finishes(again, 100, 10)
    assert driver.rejected_for[takes(driver, "a", limits)] is Reason.MAX_TURNS


def test_no_turn_raises_a_limit() -> None:
    """The least of all turns' words counts, also for one that says nothing."""
    driver = Driver()
    takes(driver, "a", ProgramLimits(max_turns=2))
    takes(driver, "a", ProgramLimits(max_turns=100, ends=False))
    assert driver.rejected_for[takes(driver, "a", None)] is Reason.MAX_TURNS


def test_the_least_of_two_limits_counts() -> None:
    """Each of them has something to say."""
    one, other = ProgramLimits(5, None, 7.0, None, 3), ProgramLimits(6, 8, 2.0, None, None, ends=True)
    assert least_of(one, other) == ProgramLimits(5, 8, 2.0, None, 3, ends=True)
    assert least_of(None, other) is other
    assert least_of(one, None) is one


def test_limits_go_on_after_a_takeover() -> None:
    """A record carries them, with what was used of them."""
    driver, later = Driver(), Driver()
    limits = ProgramLimits(max_turns=2)
    takes(driver, "a", limits)
    record = record_of(driver.scheduler.programs["a"], driver.scheduler.book)
    later.send(ProgramsAdopted(later.now_s, "r0", (record,)))
    assert takes(later, "a", None) in later.granted_on
    assert later.rejected_for[takes(later, "a", None)] is Reason.MAX_TURNS


# --- deadlines ------------------------------------------------------------------------------------------------------


def test_a_deadline_that_cannot_be_met_is_said_at_once() -> None:
    """A new program's turns would take longer than that, even half as long each as turns take alone."""
    driver = Driver()
    for number in range(40):
        turn_id = driver.arrives(f"known-{number}", 100)
        driver.starts(turn_id)
        driver.now_s += 10.0
        driver.finishes(turn_id, 100, 100)
        driver.releases(f"known-{number}")
    turn_s = driver.scheduler.knowledge.ideal_turn_s("")
    assert turn_s > 5.0
    unmet = driver.arrives("late", 100, limits=ProgramLimits(deadline_s=4.9 * turn_s, turns=10))
    assert driver.rejected_for[unmet] is Reason.DEADLINE_UNMET
    assert "late" not in driver.scheduler.programs
    assert driver.arrives("fits", 100, limits=ProgramLimits(deadline_s=5.1 * turn_s, turns=10)) in driver.granted_on


def test_the_tools_of_a_new_program_count_as_the_shortest_that_were_seen() -> None:
    """All but a tenth of the tools took a second or more, and there is one between two turns."""
    driver = Driver()
    for number in range(40):
        driver.finishes(driver.arrives(f"known-{number}", 100), 100, 0, tool="ls")
        driver.now_s += 1.0 if number >= 4 else 0.1
        driver.finishes(driver.arrives(f"known-{number}", 200), 200, 0)
        driver.releases(f"known-{number}")
    tool_s = driver.scheduler.knowledge.shortest_tool_s()
    assert 0.7 < tool_s <= 1.0
    one = driver.arrives("one turn", 100, limits=ProgramLimits(deadline_s=0.1, turns=1))
    unmet = driver.arrives("late", 100, limits=ProgramLimits(deadline_s=4.4 * tool_s, turns=10))
    fits = driver.arrives("fits", 100, limits=ProgramLimits(deadline_s=4.6 * tool_s, turns=10))
    assert driver.rejected_for == {unmet: Reason.DEADLINE_UNMET}
    assert {one, fits} <= driver.granted_on.keys()


def test_nothing_is_impossible_where_nothing_is_known() -> None:
    """Without a finished turn anywhere, only a deadline that has passed is refused."""
    driver = Driver()
    turn_id = driver.arrives("a", 100, limits=ProgramLimits(deadline_s=0.001, turns=10**9))
    assert turn_id in driver.granted_on


def full_driver(count: int = 1) -> Driver:
    """Return a driver with one replica, full, for which `count` programs wait."""
    driver = Driver(BreakEven(reserve_tokens=0, low_ratio=1.0), replicas={"r0": 1000})
    driver.arrives("first", 1000)
    for number in range(count):
        driver.arrives(f"waits-{number}", 900)
    return driver


def test_a_program_that_would_miss_its_deadline_comes_first() -> None:
    """It waits its turn until half of its time is over; then it passes those before it."""
    driver = full_driver(3)
    held = driver.arrives("urgent", 900, limits=ProgramLimits(deadline_s=TIMES_S))
    queue = driver.scheduler.queue
    assert queue.first_waiting(1)[0].program_id == "waits-0"
    driver.now_s += NEW_S + 1.0
    driver.ticks()
    assert queue.first_waiting(1)[0].program_id == "urgent"
    driver.finishes(1, 1000, 0)
    driver.releases("first")
    assert held in driver.granted_on
    assert queue.first_waiting(1)[0].program_id == "waits-0"


@pytest.mark.parametrize(("turns", "need_s"), [(10, 35.5), (4, NEW_RATIO * TIMES_S)])
def test_a_new_program_passes_others_at_its_latest_start_and_no_sooner(turns: int, need_s: float) -> None:
    """Ten turns may take 10 + sqrt(10 + 100 / 2) times the 2 s of another with a deadline; four less than half."""
    driver = Driver(BreakEven(reserve_tokens=0, low_ratio=1.0), replicas={"r0": 1000})
    takes(driver, "known", ProgramLimits(deadline_s=10 * TIMES_S, turns=2))
    driver.now_s += 1.0
    driver.arrives("first", 1000)
    driver.arrives("known", 900)
    driver.arrives("waits", 900)
    driver.arrives("urgent", 900, limits=ProgramLimits(deadline_s=TIMES_S, turns=turns))
    began_s, waiting = driver.now_s, driver.scheduler.programs["urgent"]
    for after_s, is_urgent in ((TIMES_S - need_s - 1.0, False), (TIMES_S - need_s + 0.1, True)):
        driver.now_s = began_s + after_s
        driver.ticks()
        assert (waiting.urgent_until_s == began_s + TIMES_S) is is_urgent


def test_a_program_that_began_keeps_a_wider_margin() -> None:
    """Two turns are left of three, of 2 s: they may take 2 + 2.5 * sqrt(2 + 4 / 3) times that, by its three known."""
    driver = Driver(BreakEven(reserve_tokens=0, low_ratio=1.0), replicas={"r0": 1000})
    driver.now_s += 1.0
    takes(driver, "began", ProgramLimits(deadline_s=TIMES_S, turns=3))
    opened_s = driver.scheduler.programs["began"].opened_s
    driver.now_s += 1.0
    driver.arrives("first", 1000)
    driver.arrives("began", 900)
    began = driver.scheduler.programs["began"]
    assert began.held
    need_s = 2.0 * (2.0 + 2.5 * (2.0 + 4.0 / 3.0) ** 0.5)
    for left_s, is_urgent in ((need_s + 0.5, False), (need_s - 0.5, True)):
        driver.now_s = opened_s + TIMES_S - left_s
        driver.ticks()
        assert (began.urgent_until_s == opened_s + TIMES_S) is is_urgent


def test_the_earliest_deadline_comes_first_of_the_urgent() -> None:
    """Whoever came first."""
    driver = full_driver()
    driver.arrives("later", 900, limits=ProgramLimits(deadline_s=TIMES_S))
    driver.arrives("sooner", 900, limits=ProgramLimits(deadline_s=TIMES_S - 5.0))
    driver.now_s += NEW_S + 1.0
    driver.ticks()
    assert [each.program_id for each in driver.scheduler.queue.first_waiting(3)] == ["sooner", "later", "waits-0"]


def test_deadlines_take_only_a_part_of_the_order() -> None:
    """However many programs want to be first: the others are not passed by all of them."""
    driver = full_driver()
    for number in range(3 * FREE_COUNT):
        driver.arrives(f"urgent-{number}", 900, limits=ProgramLimits(deadline_s=TIMES_S))
    driver.now_s += NEW_S + 1.0
    driver.ticks()
    names = [each.program_id for each in driver.scheduler.queue.first_waiting(3 * FREE_COUNT)]
    assert names.index("waits-0") == FREE_COUNT


def test_a_held_turn_is_refused_at_its_deadline() -> None:
    """Its client need not wait for what comes too late."""
    driver = full_driver()
    held = driver.arrives("late", 900, limits=ProgramLimits(deadline_s=TIMES_S))
    driver.now_s += TIMES_S + 1.0
    driver.ticks()
    assert driver.rejected_for[held] is Reason.DEADLINE


def test_a_turn_that_leaves_the_queue_is_no_longer_urgent() -> None:
    """Its client left: what is left of its program has no place before others."""
    driver = full_driver()
    held = driver.arrives("urgent", 900, limits=ProgramLimits(deadline_s=TIMES_S))
    driver.now_s += NEW_S + 1.0
    driver.ticks()
    driver.is_abandoned(held)
    driver.now_s += TIMES_S
    driver.ticks()
    assert driver.scheduler.core.program_limits.due_s == float("inf")
