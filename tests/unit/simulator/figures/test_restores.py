"""Restores that moved, and whether they had to, on accounts that tests set."""

from __future__ import annotations

import pytest

from thunderagent.programs.messages import (
    Pause,
    ProgramReleased,
    Reason,
    ReplicaPolled,
    ReplicaUp,
    Restore,
    Tick,
    TurnAsk,
    TurnEnd,
)
from thunderagent.programs.policies.baselines.cap import Cap
from thunderagent.programs.policies.breakeven import BreakEven
from thunderagent.programs.scheduler import Scheduler
from thunderagent.simulator.figures.restores import RestoreCounter, RestoreFigures


def scheduler_with(*claims: tuple[str, int]) -> Scheduler:
    """Return a scheduler with two replicas of 1,000 tokens and programs with these claims; it chooses their places."""
    scheduler = Scheduler(Cap(100))
    for replica_id in ("r0", "r1"):
        scheduler.handle(ReplicaPolled(0.0, replica_id, 1000))
        scheduler.handle(ReplicaUp(0.0, replica_id))
    for turn_id, (program_id, tokens) in enumerate(claims, start=1):
        scheduler.handle(TurnAsk(now_s=0.0, turn_id=turn_id, program_id=program_id, prompt_bytes=4 * tokens))
        scheduler.handle(
            TurnEnd(now_s=1.0, turn_id=turn_id, prompt_tokens=tokens - 1, output_tokens=1, cached_tokens=0)
        )
    return scheduler


def restore(program_id: str, replica_id: str) -> Restore:
    return Restore(program_id, replica_id, Reason.FITS)


def counted(scheduler: Scheduler, *decisions: Pause | Restore, home_id: str) -> RestoreFigures:
    """Count the first of the decisions."""
    counter = RestoreCounter(scheduler)
    counter.note(decisions[0], decisions, home_id)
    return counter.figures


@pytest.fixture
def scheduler() -> Scheduler:
    """Program `big` claims 900 tokens of one replica, `small` 200 of the other."""
    scheduler = scheduler_with(("big", 900), ("small", 200))
    assert {program.program_id: program.replica_id for program in scheduler.programs.values()} == {
        "big": "r0",
        "small": "r1",
    }
    return scheduler


def test_a_pause_and_a_restore_at_home_count_once(scheduler: Scheduler) -> None:
    paused = counted(scheduler, Pause("small", "r1", Reason.IDLE), home_id="r1")
    assert paused == RestoreFigures(pause_count=1)
    assert counted(scheduler, restore("small", "r1"), home_id="r1") == RestoreFigures(restore_count=1)


def test_the_first_placement_of_a_program_is_no_restore(scheduler: Scheduler) -> None:
    assert counted(scheduler, restore("small", "r1"), home_id="") == RestoreFigures()


def test_a_move_from_a_full_home_had_no_room(scheduler: Scheduler) -> None:
    moved = counted(scheduler, restore("small", "r1"), home_id="r0")  # 900 + 200 do not fit
    assert moved == RestoreFigures(restore_count=1, moved_count=1)


def test_a_move_from_a_home_with_room_counts_as_that() -> None:
    scheduler = scheduler_with(("other", 700), ("small", 200))
    moved = counted(scheduler, restore("small", "r1"), home_id="r0")  # 700 + 200 fit
    assert moved == RestoreFigures(restore_count=1, moved_count=1, moved_with_room_count=1)


def test_a_home_that_is_kept_for_the_first_in_the_queue_is_none_with_room() -> None:
    """It has waited for over half of the median residence: until then such a move leaves a home with room."""
    scheduler = Scheduler(BreakEven(foresight_ratio=0.0, reserve_tokens=0))
    for replica_id in ("r0", "r1"):
        scheduler.handle(ReplicaPolled(0.0, replica_id, 1000))
        scheduler.handle(ReplicaUp(0.0, replica_id))
    scheduler.handle(TurnAsk(now_s=0.0, turn_id=1, program_id="lived", prompt_bytes=40))
    scheduler.handle(TurnEnd(now_s=100.0, turn_id=1, prompt_tokens=9, output_tokens=1, cached_tokens=0))
    scheduler.handle(ProgramReleased(100.0, "lived"))
    for turn_id, (program_id, tokens) in enumerate((("a", 500), ("b", 500), ("first", 900), ("small", 200)), start=2):
        scheduler.handle(TurnAsk(now_s=101.0, turn_id=turn_id, program_id=program_id, prompt_bytes=4 * tokens))
    assert scheduler.view.first_waiting() is scheduler.programs["first"]
    other_id = {"r0": "r1", "r1": "r0"}[scheduler.programs["small"].replica_id or ""]
    moved = restore("small", scheduler.programs["small"].replica_id or "")
    assert counted(scheduler, moved, home_id=other_id).moved_with_room_count == 1
    scheduler.handle(Tick(160.0))
    figures = counted(scheduler, moved, home_id=other_id)
    assert (figures.moved_with_room_count, figures.moved_from_kept_count) == (0, 1)


def test_later_claims_of_the_same_event_do_not_count_as_present(scheduler: Scheduler) -> None:
    moved = counted(scheduler, restore("small", "r1"), restore("big", "r0"), home_id="r0")
    assert moved.moved_with_room_count == 1


def test_a_home_that_is_gone_has_no_room(scheduler: Scheduler) -> None:
    scheduler.ledger.accounts["r0"].usable = False
    assert counted(scheduler, restore("small", "r1"), restore("big", "r0"), home_id="r0").moved_with_room_count == 0
