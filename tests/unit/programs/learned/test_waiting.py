"""The expected admission of waiting programs, and programs that were announced before their first turn."""

from __future__ import annotations

import pytest

from tests.builders import Driver
from thunderagent.policy_loader import load_policy
from thunderagent.programs.learned.waiting import HALF_LIFE_S, LONGEST_INTERVAL_S, RestorePace
from thunderagent.programs.messages import SandboxSums, SchedulerSettings
from thunderagent.programs.policies.baselines.cap import Cap
from thunderagent.programs.state.program import Phase, Status


def test_before_a_restore_was_seen_one_takes_as_long_as_it_was_waited_for() -> None:
    pace = RestorePace()
    pace.accrue(0.0, waiting=True)
    assert pace.interval_s == 0.0
    pace.accrue(50.0, waiting=True)
    assert pace.interval_s == 50.0


def test_only_time_in_which_somebody_waits_counts() -> None:
    """There are two restores in 20 s of waiting, and an hour of nothing in between."""
    pace = RestorePace()
    for begin_s in (0.0, 3600.0):
        pace.accrue(begin_s, waiting=True)
        pace.accrue(begin_s + 10.0, waiting=False)
        pace.restored(begin_s + 10.0)
    assert pace.interval_s == pytest.approx(10.0, rel=0.1)


def test_the_pace_of_long_ago_is_forgotten() -> None:
    pace = RestorePace()
    pace.accrue(0.0, waiting=True)
    for second in range(1, 101):
        pace.accrue(float(second), waiting=True)
        pace.restored(float(second))
    now_s = 100.0
    while now_s < 100.0 + 10 * HALF_LIFE_S:
        now_s += 50.0
        pace.accrue(now_s, waiting=True)
        pace.restored(now_s)
    assert pace.interval_s == pytest.approx(50.0, rel=0.2)


def test_a_turn_that_is_placed_at_once_is_no_restore_however_old_its_first_attempt() -> None:
    driver = Driver(Cap(n=1), replicas={"r0": 1000})
    pace = driver.scheduler.knowledge.restore_pace
    driver.arrives("first", 10)
    driver.arrives("second", 10)
    driver.passes(10.0)
    driver.releases("first")
    interval_s = pace.interval_s
    assert interval_s == pytest.approx(10.0, rel=0.1)
    driver.releases("second")
    driver.arrives("again", 10, waiting_since_s=driver.now_s - 30.0)
    assert pace.interval_s == interval_s


@pytest.mark.parametrize("waited_s", [4 * 3600.0, 100 * 86400.0])
def test_expected_wait_of_a_standing_queue_is_bounded(waited_s: float) -> None:
    """It is not at once, either, because nothing that was seen is left; and one restore outweighs all that."""
    pace = RestorePace()
    pace.accrue(0.0, waiting=True)
    pace.accrue(10.0, waiting=True)
    pace.restored(10.0)
    for share in range(1, 1001):
        pace.accrue(10.0 + waited_s * share / 1000, waiting=True)
    assert pace.interval_s == LONGEST_INTERVAL_S
    for _ in range(100):
        pace.restored(10.0 + waited_s)
    assert pace.interval_s < LONGEST_INTERVAL_S / 10


def test_waiting_for_a_replica_that_grants_nothing_says_nothing() -> None:
    """Its weights are exchanged, for example: others continue elsewhere as fast as before."""
    driver = Driver(Cap(n=1), replicas={"r0": 1000, "r1": 1000})
    driver.routes("class", "to-r0", r0=1)
    for number in range(3):
        driver.arrives(f"p{number}", 10)
    for number in range(3):
        driver.passes(10.0)
        driver.releases(f"p{number}")
    driver.suspends("weights", "r0")
    driver.arrives("bound", 10, program_class="to-r0")
    assert driver.scheduler.queue.waiting_count == 1
    for _ in range(60):
        driver.ticks(60.0)
    assert driver.scheduler.knowledge.restore_pace.interval_s == pytest.approx(10.0, rel=0.2)


def test_waiting_programs_are_expected_one_after_the_other() -> None:
    """One at a time is admitted, each for 10 s: the third in the queue has 30 s to go."""
    driver = Driver(Cap(n=1))
    for number in range(6):
        driver.arrives(f"p{number}", 10)
    for number in range(2):
        driver.passes(10.0)
        driver.releases(f"p{number}")
    expected_s = driver.scheduler.expected_holds_s(10)
    assert list(expected_s) == ["p3", "p4", "p5"]
    assert list(expected_s.values()) == pytest.approx([10.0, 20.0, 30.0], rel=0.1)
    assert list(driver.scheduler.expected_holds_s(1)) == ["p3"]


def test_programs_waiting_for_one_replica_are_expected_in_the_same_order() -> None:
    """Their waiting counts even if no other program waits."""
    driver = Driver(Cap(n=1), replicas={"r0": 1000, "r1": 1000})
    driver.routes("class", "to-r1", r1=1)
    for number in range(6):
        driver.arrives(f"p{number}", 10, program_class="to-r1" if number % 2 or number < 3 else "")
    for number in range(2):
        driver.passes(10.0)
        driver.releases(f"p{number}")
    expected_s = driver.scheduler.expected_holds_s(10)
    assert list(expected_s) == ["p3", "p4", "p5"]
    assert list(expected_s.values()) == pytest.approx([10.0, 20.0, 30.0], rel=0.1)
    assert list(driver.scheduler.expected_holds_s(2)) == ["p3", "p4"]


def test_programs_waiting_for_admission_are_expected_last() -> None:
    """Their waiting counts, too."""
    driver = Driver(load_policy("passthrough", {"admission": "window", "admission.n": 1}))
    for number in range(5):
        driver.arrives(f"p{number}", 10)
    for number in range(2):
        driver.passes(10.0)
        driver.releases(f"p{number}")
    expected_s = driver.scheduler.expected_holds_s(10)
    assert list(expected_s) == ["p3", "p4"]
    assert list(expected_s.values()) == pytest.approx([10.0, 20.0], rel=0.1)
    assert list(driver.scheduler.expected_holds_s(1)) == ["p3"]


def test_an_announced_program_claims_nothing_and_is_not_restored() -> None:
    driver = Driver(replicas={"r0": 1000})
    driver.opens("p", group="g")
    driver.opens("p")
    program = driver.program("p")
    assert (program.status, program.phase, program.claim_tokens) == (Status.PAUSED, Phase.ACTING, 0)
    driver.ticks(1.0)
    assert driver.demand() == 0
    assert driver.home("p") is None
    assert program.group is not None


def test_its_life_begins_with_its_first_turn() -> None:
    """The time of its announcement says nothing about the lives of programs."""
    driver = Driver()
    driver.opens("p")
    driver.passes(100.0)
    driver.takes_turn("p", 10)
    driver.passes(5.0)
    driver.releases("p")
    assert driver.scheduler.knowledge.median_residence_s < 10.0


def test_an_announced_program_joins_the_group_of_its_first_turn() -> None:
    """Its opener may not have known the group, for example when it only wanted a sandbox."""
    driver = Driver()
    driver.opens("p")
    driver.opens("q", group="h")
    for program_id in ("p", "q"):
        driver.takes_turn(program_id, 10, group="g")
    groups = [driver.program(program_id).group for program_id in ("p", "q")]
    assert [group.group_id for group in groups if group is not None] == ["g", "h"]


def test_an_announced_program_that_never_comes_is_forgotten() -> None:
    driver = Driver(settings=SchedulerSettings(forget_limit_s=60.0))
    driver.opens("p")
    driver.ticks(61.0)
    assert driver.scheduler.programs.get("p") is None
    driver.opens("q")
    driver.releases("q")
    assert driver.scheduler.programs.get("q") is None


def test_sandboxes_are_in_the_story_and_in_the_view() -> None:
    driver = Driver()
    driver.opens("p")
    driver.sandbox_is_ready("p", "box-1", 1.5)
    driver.sandbox_fails("p", "it exited with 137", "box-1")
    driver.sandbox_fails("nobody", "no matter")
    assert [(entry.what, entry.why) for entry in driver.program("p").story()] == [
        ("opened", ""),
        ("sandbox ready", "box-1 after 1.5 s"),
        ("sandbox failed", "box-1: it exited with 137"),
    ]
    driver.sandboxes_take(3, 1000, None)
    assert driver.scheduler.view.sandboxes == SandboxSums(3, 1000, None)


def test_running_tools_and_their_time_are_counted() -> None:
    driver = Driver(replicas={"r0": 10_000})
    view = driver.scheduler.view
    assert (view.tools_running_count, view.mean_tool_s) == (0, 0.0)
    driver.takes_turn("a", 10)
    driver.takes_turn("b", 10)
    assert view.tools_running_count == 2
    driver.passes(4.0)
    driver.takes_turn("a", 20)
    assert (view.tools_running_count, view.mean_tool_s) == (2, 4.0)
    driver.releases("a")
    driver.releases("b")
    assert view.tools_running_count == 0
