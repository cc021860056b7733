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

from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import nullcontext
from types import MappingProxyType

from msgspec import Struct

from thunderagent.programs.messages import Outcome, TurnAsk, TurnEnd, TurnHint

__all__ = [
    "FAIL_OPEN",
    "UNBOUNDED",
    "Lease",
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
