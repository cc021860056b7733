"""Where a program stands: the life of a program as one table.

Theory of operation
===================
A program is in exactly one place, and its place says the rest: its *status* - does it hold a claim on a replica's
memory? -, its *phase* - is a turn of it with us? -, and whether it is admitted.

| Place | Status, phase | Who is there |
|---|---|---|
| away | paused, acting | its tool runs; it gave its claim up at the idle limit, was only announced, must be admitted \
first, or is to go to a certain replica: only its next turn brings it back |
| resting | paused, acting | its tool runs; it may be restored ahead of its turn |
| unadmitted | paused, reasoning | it has a turn, and an admission has not let it begin |
| waiting | paused, reasoning | it has a turn and waits for room, anywhere or on the replica of its route |
| asking | either, reasoning | its turn arrived, and the policy is asked: nobody is there between two events, and \
who is claims nothing |
| working | active, reasoning | it has turns in flight |
| leaving | active, reasoning | it has turns in flight, and pauses or moves when they end; turns that come are held |
| stalled | active, reasoning | turns of it are held where it is, because its replica grants nothing now |
| acting | active, acting | its tool runs, and it holds its claim |
| ended | terminated | it was released: an id that comes back is a new program with a new generation |

So an active program has all its turns in flight, and a paused program has all its turns held: a branch that another one
waits for is never stuck behind it. In two places turns of an active program are held in place: leaving, because a
program whose branches overlap would otherwise stay for ever, and stalled. A program with a turn in flight is never
paused: it leaves. When a replica is lost, so are the turns in flight there: they no longer count for the program, and
their carrier sees them fail and lets them arrive again.

A move that is not in `ALLOWED` is a bug and raises.
"""

from __future__ import annotations

from collections.abc import Sequence
from enum import StrEnum
from typing import TYPE_CHECKING, Final

from thunderagent.errors import LifecycleError

if TYPE_CHECKING:
    from thunderagent.programs.book.replica import Replica
    from thunderagent.programs.model.program import Program


class Status(StrEnum):
    """Whether a program holds a claim on a replica's memory."""

    ACTIVE = "active"
    PAUSED = "paused"
    TERMINATED = "terminated"


class Phase(StrEnum):
    """Whether a turn of the program is in flight or waiting (REASONING), or its tool runs (ACTING)."""

    REASONING = "reasoning"
    ACTING = "acting"


class Kind(StrEnum):
    """The kinds of places."""

    AWAY = "away"
    RESTING = "resting"
    UNADMITTED = "unadmitted"
    WAITING = "waiting"
    ASKING = "asking"
    WORKING = "working"
    LEAVING = "leaving"
    STALLED = "stalled"
    ACTING = "acting"
    ENDED = "ended"


# What each turn asks for: looking up a member of an enum costs more than a call.
ACTING: Final = Kind.ACTING
LEAVING: Final = Kind.LEAVING
REASONING: Final = Phase.REASONING

_PAUSED: Final = frozenset({Kind.AWAY, Kind.RESTING, Kind.WAITING})
ALLOWED: dict[Kind, frozenset[Kind]] = {
    Kind.AWAY: frozenset({Kind.AWAY, Kind.RESTING, Kind.UNADMITTED, Kind.ASKING, Kind.ACTING, Kind.ENDED}),
    Kind.RESTING: frozenset({Kind.AWAY, Kind.ASKING, Kind.ACTING, Kind.ENDED}),
    Kind.UNADMITTED: frozenset({Kind.AWAY, Kind.WAITING, Kind.ASKING, Kind.WORKING, Kind.ENDED}),
    Kind.WAITING: _PAUSED | {Kind.UNADMITTED, Kind.WORKING, Kind.ENDED},
    Kind.ASKING: frozenset({Kind.ASKING, Kind.WAITING, Kind.WORKING, Kind.ENDED}),
    Kind.WORKING: _PAUSED | {Kind.ACTING, Kind.LEAVING, Kind.STALLED, Kind.ENDED},
    Kind.LEAVING: _PAUSED | {Kind.WORKING, Kind.STALLED, Kind.ENDED},
    Kind.STALLED: _PAUSED | {Kind.ACTING, Kind.ASKING, Kind.WORKING, Kind.LEAVING, Kind.ENDED},
    Kind.ACTING: frozenset({Kind.AWAY, Kind.RESTING, Kind.ASKING, Kind.WORKING, Kind.STALLED, Kind.ENDED}),
    Kind.ENDED: frozenset(),
}

_ON_A_REPLICA: Final = frozenset({Kind.ASKING, Kind.WORKING, Kind.LEAVING, Kind.STALLED, Kind.ACTING})
_WITHOUT_TURNS: Final = frozenset({Kind.AWAY, Kind.RESTING, Kind.ACTING, Kind.ENDED})


class Place:
    """One place: its programs are counted, and their actual or possible claims are summed."""

    __slots__ = (
        "active",
        "admitted",
        "allowed",
        "claims",
        "count",
        "kind",
        "phase",
        "replica",
        "replica_id",
        "status",
        "tokens",
    )
    replica: Replica
    """The place's replica; only where programs are active."""

    def __init__(self, kind: Kind, replica_id: str | None = None, *, admitted: bool = True) -> None:
        """Create an empty place, of one replica or of all."""
        self.kind = kind
        self.allowed = ALLOWED[kind]
        """Places to which its programs may move."""
        self.replica_id = replica_id
        self.active = replica_id is not None and kind in _ON_A_REPLICA
        self.claims = self.active and kind is not Kind.ASKING
        """Whether its programs claim memory of the replica."""
        self.status = Status.ACTIVE if self.active else Status.TERMINATED if kind is Kind.ENDED else Status.PAUSED
        self.phase = Phase.ACTING if kind in _WITHOUT_TURNS else Phase.REASONING
        self.admitted = admitted
        self.count = 0
        self.tokens = 0

    def __repr__(self) -> str:
        where = f" at {self.replica_id}" if self.replica_id is not None else ""
        return f"<{self.kind}{where}: {self.count} programs, {self.tokens} tokens>"

    def enter(self, program: Program, now_s: float) -> None:  # noqa: ARG002 - for places whose sums fade with time
        """Add a program. Only for the book, as are the next two."""
        self.count += 1
        self.tokens += program.claim_tokens

    def enter_all(self, programs: Sequence[Program], now_s: float) -> None:  # noqa: ARG002
        """Add several programs, in their order."""
        self.count += len(programs)
        self.tokens += sum([program.claim_tokens for program in programs])

    def leave(self, program: Program, now_s: float) -> None:  # noqa: ARG002
        """Remove a program."""
        self.count -= 1
        self.tokens -= program.claim_tokens

    def resize(self, program: Program, claim_tokens: int, growth_tokens: int, now_s: float) -> None:  # noqa: ARG002
        """Record that a program's size changed from these values."""
        self.tokens += program.claim_tokens - claim_tokens

    def rank(self, program: Program) -> None:
        """Move a program to the position of its rank."""


def not_allowed(program: Program, kind: Kind) -> LifecycleError:
    """Return the error for a move that is not in the table, with the program's story."""
    story = "\n".join(map(str, (program, *program.story())))
    return LifecycleError(f"a program that is {program.place.kind} cannot become {kind}\n{story}")
