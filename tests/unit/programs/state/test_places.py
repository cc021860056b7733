"""The lifecycle: the moves between places, and a place's status and phase."""

from __future__ import annotations

from itertools import product
from math import inf

import pytest

from thunderagent.errors import LifecycleError
from thunderagent.programs.messages import Decision, Mark, Pause, Reason, Release, Restore, Unmark
from thunderagent.programs.state.book import Book
from thunderagent.programs.state.paused_queue import PausedQueue
from thunderagent.programs.state.program import ALLOWED, Kind, Phase, Place, Program, Status

# The table is repeated here on purpose: a change of it must be deliberate.
LEGAL = {
    "away": "away resting unadmitted asking acting ended",
    "resting": "away asking acting ended",
    "unadmitted": "away waiting asking working ended",
    "waiting": "away resting waiting unadmitted working ended",
    "asking": "asking waiting working ended",
    "working": "away resting waiting acting leaving stalled ended",
    "leaving": "away resting waiting working stalled ended",
    "stalled": "away resting waiting acting asking working leaving ended",
    "acting": "away resting asking working stalled ended",
    "ended": "",
}


def a_book() -> Book:
    """A book with one replica, where every program claims 100 tokens."""

    def measure(program: Program) -> None:
        program.claim_tokens = 100

    book = Book(PausedQueue(lambda program: program.opened_s), measure, lambda program: program.opened_s)
    book.open_replica("r0")
    return book


def place_of(book: Book, kind: Kind) -> Place:
    replica, queue = book.replicas["r0"], book.queue
    of_all = {Kind.AWAY: book.idle, Kind.RESTING: queue.resting, Kind.UNADMITTED: queue.unadmitted}
    of_all |= {Kind.WAITING: queue.waiting, Kind.ASKING: book.asking, Kind.ENDED: book.ended}
    here = {Kind.WORKING: replica.working, Kind.LEAVING: replica.leaving, Kind.STALLED: replica.stalled}
    return {**of_all, **here, Kind.ACTING: replica.acting}[kind]


def a_program_at(book: Book, kind: Kind) -> Program:
    """A program that was led there by allowed moves."""
    paths: dict[Kind, list[Kind]] = {Kind.AWAY: []}
    while kind not in paths:
        paths = {to: [*path, to] for start, path in paths.items() for to in ALLOWED[start] if to not in paths} | paths
    program = book.open("a", "")
    book.resize(program)
    for each in paths[kind]:
        book.move(program, place_of(book, each), Reason.FITS)
    return program


@pytest.mark.parametrize(("start", "to"), list(product(Kind, Kind)))
def test_every_move_is_in_the_table_or_raises(start: Kind, to: Kind) -> None:
    """The program is counted in its new place alone, or nowhere once it ended, or a LifecycleError tells its story."""
    book = a_book()
    program = a_program_at(book, start)
    target = place_of(book, to)
    if to in LEGAL[start].split():
        book.move(program, target, Reason.FITS)
        assert program.place is target
        assert sum(place_of(book, kind).count for kind in Kind) + book.announced.count == (to is not Kind.ENDED)
        assert book.replicas["r0"].account.demand_tokens == (100 if target.active else 0)
        return
    program.note(0.0, "once", "upon a time", None)
    with pytest.raises(
        LifecycleError, match=f"(?s)that is {start} cannot become {to}\n.*'a' generation 1.*upon a time"
    ):
        book.move(program, target, Reason.FITS)


def test_the_table_has_no_arrow_that_is_not_listed_here() -> None:
    """A new arrow of the table is added here, too."""
    assert {kind: set(arrows.split()) for kind, arrows in LEGAL.items()} == ALLOWED


def test_a_place_says_status_and_phase() -> None:
    """They are constants of the place, never computed from anything else."""
    book = a_book()
    active = {Kind.WORKING, Kind.LEAVING, Kind.STALLED, Kind.ACTING}
    for kind in set(Kind) - {Kind.ENDED}:
        place = place_of(book, kind)
        assert (place.status is Status.ACTIVE) == (kind in active), kind
        assert (place.phase is Phase.ACTING) == (kind in {Kind.AWAY, Kind.RESTING, Kind.ACTING}), kind
    assert book.replicas["r0"].asking.status is Status.ACTIVE
    assert not book.replicas["r0"].asking.claims
    assert book.ended.status is Status.TERMINATED


def test_a_move_says_what_was_decided() -> None:
    """Getting or losing a claim, a mark or its end, and ending are each one decision with its reason."""
    book = a_book()
    program = a_program_at(book, Kind.WAITING)
    replica = book.replicas["r0"]
    steps: list[tuple[Place, type[Decision] | None]] = [
        (replica.working, Restore),
        (replica.leaving, Mark),
        (replica.working, Unmark),
        (replica.acting, None),
        (replica.asking, None),
        (book.queue.waiting, Pause),
        (replica.working, Restore),
        (book.ended, Release),
    ]
    for place, decision in steps:
        book.decisions = []
        book.move(program, place, None if decision is None else Reason.FITS)
        assert [type(each) for each in book.decisions] == ([] if decision is None else [decision]), place
    assert [entry.what for entry in program.story()][-4:] == ["unmark", "pause", "restore", "release"]
    assert not book.programs


def test_order_of_expiry_is_kept_from_the_first_question_on() -> None:
    """Until a policy asks who is held too long, no turn pays for the order."""
    book = a_book()
    acting = book.replicas["r0"].acting
    programs = {name: book.open(name, "") for name in ("late", "never", "early", "new")}
    for name, hold_until_s in (("late", 9.0), ("never", inf), ("early", 5.0)):
        programs[name].hold_until_s = hold_until_s
        book.move(programs[name], acting, Reason.FITS)
    assert acting.kept_expiring is None
    assert acting.expiring.lowest(9) == [programs["early"], programs["late"]]
    programs["new"].hold_until_s = 7.0
    book.move(programs["new"], acting, Reason.FITS)
    book.move(programs["early"], book.replicas["r0"].working)
    assert acting.expiring.lowest(9) == [programs["new"], programs["late"]]
