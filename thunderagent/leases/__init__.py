"""What passes between the carriers of turns' bytes and the grantor of their leases: all of it, and nothing else.

Theory of operation
===================
A turn needs a lease. The carrier of its bytes says in a `TurnAsk` all that a scheduler may know of it, waits, and is
given a `Lease`: where the turn may run, at which URL and priority, and the generation of its program. When the answer
is complete, or there will be none, a `TurnEnd` says how it went. The three know no HTTP request, no socket and no
scheduler. They are msgspec structs: a gateway can send (as arrays, by msgpack) what a single process passes by
reference, and the core handles as events. Times are durations, not moments: two processes share no clock.

A carrier also has a `ReplicaMap`, which is pushed to it and which it only reads, and may ask a few questions, each of
which a link to a remote scheduler can answer too (`LeaseSource`). It never reads the scheduler's tables.
"""

# interpreted: msgspec reads the types of its structs, which a compiled class does not keep

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from types import MappingProxyType
from typing import TYPE_CHECKING, Protocol

from msgspec import Struct

from thunderagent.programs.messages import Decision, Event, Outcome, TurnAsk, TurnEnd, TurnHint

if TYPE_CHECKING:
    from thunderagent.leases.open_lease import OpenLease

__all__ = [
    "FAIL_OPEN",
    "UNBOUNDED",
    "FleetSource",
    "Lease",
    "LeaseSource",
    "Outcome",
    "ReplicaMap",
    "ReplicaState",
    "TurnAsk",
    "TurnEnd",
    "TurnHint",
]

UNBOUNDED = nullcontext()

FAIL_OPEN = "fail_open"
"""The reason of a lease that a carrier granted itself, because there was no scheduler for long."""


class Lease(Struct, frozen=True, array_like=True, tag="grant", gc=False):
    """Permission for one turn to run on one replica."""

    turn_id: int
    program_id: str | None
    generation: int
    """Of its program; 0 for an anonymous turn."""
    replica_id: str
    url: str
    """The replica's URL; empty if unknown."""
    engine_priority: int | None
    """Priority for the engine, lower first; None is none."""
    reason: str
    held_s: float
    """How long the turn was held."""


class ReplicaState(Struct, frozen=True, array_like=True, gc=False):
    """What the carriers of bytes know of a replica."""

    replica_id: str
    url: str = ""
    is_up: bool = False
    is_open: bool = False
    """Whether programs may get a claim there, now or when grants go on."""
    suspended_for: tuple[str, ...] = ()
    """Causes for which nothing is granted there."""
    capacity_tokens: int | None = None
    pool: str = ""
    """The name of its pool; empty if there is only one."""
    verdict: str = ""
    """How its engine does: a `ReplicaState`; empty if unknown."""
    why: str = ""
    """The reason of the verdict."""
    aborts_count: int = 0
    """How often a trainer aborted what ran there."""
    incarnation: int = 0
    """How often what ran there was lost, because its engine restarted, froze or fell silent for long."""


class ReplicaMap:
    """The replicas, as last pushed. Only the grantor pushes; all others read."""

    def __init__(self) -> None:
        """Begin with no replica."""
        self._states: dict[str, ReplicaState] = {}
        self.states: Mapping[str, ReplicaState] = MappingProxyType(self._states)
        """By id, in the order in which they were first heard of."""
        self.open_ids: Sequence[str] = ()
        """Ids of open replicas, in order."""
        self.names_models = False
        """Whether a turn's model may matter: only then it must be given."""
        self.has_pools = False
        """Whether replicas are in several pools."""
        self.on_push: Callable[[Sequence[ReplicaState], Sequence[str]], None] | None = None
        """Called with what was pushed, and with the removed ids."""

    def __repr__(self) -> str:
        return f"<ReplicaMap: {len(self._states)} replicas, {len(self.open_ids)} open>"

    def get(self, replica_id: str) -> ReplicaState | None:
        """Return what is known of a replica; None if it is unknown, or was removed."""
        return self._states.get(replica_id)

    def is_up(self, replica_id: str | None) -> bool:
        """Return whether there is such a replica and it is up."""
        state = self._states.get(replica_id or "")
        return state is not None and state.is_up

    def push(self, states: Iterable[ReplicaState], removed_ids: Iterable[str] = ()) -> None:
        """Apply changes. Cost: O(changes), and O(replicas) if they open or close one."""
        opens_or_closes = False
        states, removed_ids = tuple(states), tuple(removed_ids)
        for state in states:
            before = self._states.get(state.replica_id)
            self._states[state.replica_id] = state
            opens_or_closes |= state.is_open != (before is not None and before.is_open)
        for replica_id in removed_ids:
            removed = self._states.pop(replica_id, None)
            opens_or_closes |= removed is not None and removed.is_open
        if opens_or_closes:
            self.open_ids = tuple(state.replica_id for state in self._states.values() if state.is_open)
        if self.on_push is not None:
            self.on_push(states, removed_ids)


class LeaseSource(Protocol):
    """Grants leases: the runtime of this process, or a link to a remote scheduler."""

    @property
    def replicas(self) -> ReplicaMap:
        """Return the replicas, as last pushed."""

    def now_s(self) -> float:
        """Return monotonic seconds."""

    def new_turn_id(self) -> int:
        """Return an id that no turn had before."""

    async def lease(self, ask: TurnAsk, while_held: AbstractContextManager[object] = UNBOUNDED) -> OpenLease:
        """Wait for permission to run one turn. `while_held` is entered if it is held, and left with the lease.

        Raises what `while_held` raises, and `ProgramReleasedError`, `ProgramHopelessError`, `ProgramLimitError`,
        `NoReplicaError`, `NoRoomInTimeError`, `TooManyProgramsError`, `TurnAbortedError`, `UnknownModelError` or
        `ShuttingDownError` if there will be none. Cancelling the wait takes the turn out of the queue.
        """

    def home_of(self, program_id: str, model: str = "") -> str | None:
        """Return the replica of a program, if that is up; None for a program without one, or an unknown one.

        With several pools it is that of the model's.
        """

    def tenant_of(self, program_id: str) -> str | None:
        """Return a live program's tenant; None if there is no such program."""

    def lives(self, program_id: str, generation: int) -> bool:
        """Return whether this incarnation of a program still lives."""

    def turns_count(self, replica_id: str) -> int:
        """Return how many turns have leases on a replica."""

    def aborted_ago_s(self, replica_id: str) -> float:
        """Return how long ago a trainer aborted what runs on a replica; infinite if never, or that is unknown here."""

    def release(self, program_id: str, generation: int | None = None, outcome: str = "") -> bool:
        """End a program; return False if there is none of that id and generation. Idempotent.

        `outcome` says how it ended: `success`, `failure`, or empty.
        """


class FleetSource(LeaseSource, Protocol):
    """The same, for the keeper of the replicas: it is told of them, and reports what it sees of them."""

    def observe(self, observer: Callable[[Event, Sequence[Decision]], None], *about: type) -> Callable[[], None]:
        """Call `observer` with each event, or with those that it is `about`; return a function that ends that."""

    def ids_serving(self, model: str) -> Collection[str]:
        """Return the replicas that serve a model. Raises `UnknownModelError`."""

    def replica_at(self, replica_id: str, url: str) -> None:
        """Set a replica's URL."""

    def replica_removed(self, replica_id: str) -> None:
        """Report that a replica is gone for good."""

    def replica_tripped(self, replica_id: str, *, tripped: bool, why: str = "") -> None:
        """Report that a replica that is up fails turn after turn, or that it may be tried again."""

    def replica_recovered(self, replica_id: str) -> None:
        """Report that a replica that was tripped has answered a turn well: it is no longer failing."""

    def replica_pressed(self, replica_id: str, for_s: float, why: str) -> None:
        """Report that a replica says it is full: it is granted nothing for that time."""
