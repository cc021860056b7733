"""The core's answers. Each decision carries a reason from one enum, so that counts of reasons explain a run.

The most frequent ones have an explicit `__init__`, because that of a dataclass is not compiled.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Final


class Reason(StrEnum):
    """Why a decision was taken."""

    # granted, restored
    ANONYMOUS = "anonymous"
    """The turn names no program."""
    HOME = "home"
    """The program is active there already."""
    FITS = "fits"
    """The program's claim fits beside the others."""
    OVERSIZE = "oversize"
    """The program is larger than every replica: the engine decides, at once."""
    POLICY = "policy"
    """The policy does not place by memory."""
    PATIENCE = "patience"
    """Its client would soon time out: it is let in even without room."""
    PARENT = "parent"
    """Its parent holds a claim and may wait for it: it is let in even without room."""
    # held
    NO_ROOM = "no_room"
    """No replica has room for the program's claim."""
    QUEUE_AHEAD = "queue_ahead"
    """Others are ahead of it in the paused queue."""
    NO_REPLICA = "no_replica"
    """No replica is usable."""
    SUSPENDED = "suspended"
    """Nothing is granted while engines are paused, sleep, or get new weights."""
    ADMISSION = "admission"
    """The program is not admitted yet."""
    LEAVING = "leaving"
    """The program leaves its replica: its turns in flight there must end first."""
    # paused, marked
    THRASHING = "thrashing"
    """The programs claim more than the replica's memory."""
    EXPIRED = "expired"
    """The program's tool runs for longer than holding its memory pays, and others need the room."""
    MARKED = "marked"
    """The turn of a marked program ended."""
    IDLE = "idle"
    """The program's tool runs longer than the idle limit."""
    REPLICA_DOWN = "replica_down"
    """Its replica is gone."""
    REPLICA_DRAINING = "replica_draining"
    """Its replica drains and gets no new turns."""
    REPLICA_REMOVED = "replica_removed"
    """Its replica was removed."""
    REPLICA_TRIPPED = "replica_tripped"
    """Its replica fails turn after turn."""
    TURN_FAILED = "turn_failed"
    """One of its turns failed there, and is retried on another replica."""
    MOVED = "moved"
    """The program goes to another replica."""
    RELIEVED = "relieved"
    """There is room again, so the program keeps its claim."""
    STAYS = "stays"
    """The reason to leave its replica has gone."""
    # controlled
    OPERATOR = "operator"
    """An operator asked for it."""
    GLOBAL_POLICY = "global_policy"
    """A global policy asked for it."""
    IMBALANCE = "imbalance"
    """The demand on its replica is much higher than on another one."""
    LONG_TURN = "long_turn"
    """It waits for a replica with a long-running turn, and another one has room."""
    OVERLOAD = "overload"
    """More programs wait than the replicas can take, so another replica is started or moved."""
    SPARE = "spare"
    """The other replicas can do its work, so this replica ends."""
    # released, rejected
    KILLED = "killed"
    """An operator or a global policy ended the program."""
    RELEASED = "released"
    """The client released the program."""
    PARENT_GOES_ON = "parent_goes_on"
    """Its last answer called no tool, and its parent goes on, which waited for it."""
    FORGOTTEN = "forgotten"
    """Nothing was heard of the program for longer than the forget limit."""
    HOPELESS = "hopeless"
    """The judge predicted failure too often, and such programs are ended."""
    MAX_TURNS = "max_turns"
    """The program has had as many turns as it may."""
    MAX_TOKENS = "max_tokens"
    """The program has used as many tokens as it may."""
    MAX_AGE = "max_age"
    """The program is as old as it may become."""
    DEADLINE = "deadline"
    """The program's deadline has passed."""
    DEADLINE_UNMET = "deadline_unmet"
    """The program's deadline cannot be met any more."""
    OVERDRAWN = "overdrawn"
    """Its client would soon time out, and no replica may be overdrawn further."""
    TOO_MANY_PROGRAMS = "too_many_programs"
    """The limit of programs is reached, and all of them have turns."""


HOME: Final = Reason.HOME
"""Of most grants: looking up a member of an enum costs more than a call."""


@dataclass(slots=True, init=False)
class Grant:
    """The turn has its lease: it may run on that replica.

    `engine_priority` is for engines with priorities, lower first; None leaves it to the client.
    """

    turn_id: int
    program_id: str | None
    replica_id: str
    reason: Reason
    engine_priority: int | None = None

    def __init__(
        self, turn_id: int, program_id: str | None, replica_id: str, reason: Reason, engine_priority: int | None = None
    ) -> None:
        self.turn_id = turn_id
        self.program_id = program_id
        self.replica_id = replica_id
        self.reason = reason
        self.engine_priority = engine_priority


@dataclass(slots=True, init=False)
class Hold:
    """The turn waits; a `Grant` or a `Reject` will follow."""

    turn_id: int
    program_id: str | None
    reason: Reason

    def __init__(self, turn_id: int, program_id: str | None, reason: Reason) -> None:
        self.turn_id = turn_id
        self.program_id = program_id
        self.reason = reason


@dataclass(slots=True)
class Reject:
    """The turn will never get a lease."""

    turn_id: int
    program_id: str | None
    reason: Reason


@dataclass(slots=True, init=False)
class Pause:
    """The program loses its claim on the replica's memory."""

    program_id: str
    replica_id: str
    reason: Reason

    def __init__(self, program_id: str, replica_id: str, reason: Reason) -> None:
        self.program_id = program_id
        self.replica_id = replica_id
        self.reason = reason


@dataclass(slots=True)
class Mark:
    """The program pauses at the end of the turn in flight."""

    program_id: str
    replica_id: str
    reason: Reason


@dataclass(slots=True)
class Unmark:
    """The program will not pause at the end of the turn in flight, after all."""

    program_id: str
    replica_id: str
    reason: Reason


@dataclass(slots=True, init=False)
class Restore:
    """The program gets a claim on that replica's memory."""

    program_id: str
    replica_id: str
    reason: Reason

    def __init__(self, program_id: str, replica_id: str, reason: Reason) -> None:
        self.program_id = program_id
        self.replica_id = replica_id
        self.reason = reason


@dataclass(slots=True)
class Release:
    """The program is gone from the table; `generation` is the incarnation that ended."""

    program_id: str
    generation: int
    reason: Reason


@dataclass(slots=True)
class SetPriority:
    """The program comes before those with a higher number, in the paused queue and in engines.

    With a `replica_id`, in the engine of that replica alone.
    """

    program_id: str
    priority: int
    replica_id: str | None
    reason: Reason


@dataclass(slots=True)
class SetRoute:
    """Programs of that scope go to these replicas, by their weights; to any, if there are none."""

    scope: str
    name: str
    targets: tuple[tuple[str, float], ...]
    reason: Reason


@dataclass(slots=True)
class Provision:
    """One more replica should be started. This is done outside the core, which hears of it when it is up."""

    reason: Reason


@dataclass(slots=True)
class EndReplica:
    """That replica should drain and end. This is done outside the core, which hears that it drains."""

    replica_id: str
    reason: Reason


Decision = (
    Grant | Hold | Reject | Pause | Mark | Unmark | Restore | Release | SetPriority | SetRoute | Provision | EndReplica
)


def is_rejected(turn_id: int, decisions: Sequence[Decision]) -> bool:
    """Return whether a turn is rejected as it arrives: no event will end it."""
    return any(type(each) is Reject and each.turn_id == turn_id for each in decisions)
