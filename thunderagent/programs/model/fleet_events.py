"""What the core is told of replicas, and by operators."""

# interpreted: the event log reads the types of the fields, which a compiled class does not keep

from __future__ import annotations

from dataclasses import dataclass

from thunderagent.programs.model.advice.routes import Targets
from thunderagent.programs.model.records.learned import LearnedRecord


@dataclass(slots=True)
class ReplicaUp:
    """A replica was added, came up, or came back. What is known of its capacity is told with that, or before.

    After a replica was removed this alone makes it known again.
    """

    now_s: float
    replica_id: str
    capacity_tokens: int | None = None


@dataclass(slots=True)
class KnowledgeLoaded:
    """What was learned before a restart is known again in the pool of a replica, in place of what was learned since."""

    now_s: float
    replica_id: str
    learned: LearnedRecord


@dataclass(slots=True)
class ReplicaDown:
    """A replica is gone: nothing may be granted there, and what lay in its memory is lost."""

    now_s: float
    replica_id: str


@dataclass(slots=True)
class ReplicaDraining:
    """A replica must finish what it has and get nothing new."""

    now_s: float
    replica_id: str


@dataclass(slots=True)
class ReplicaRemoved:
    """A replica will not come back: what is in flight there is lost as if it went down, and it is forgotten."""

    now_s: float
    replica_id: str


@dataclass(slots=True)
class GrantsSuspended:
    """Nothing may be granted on a replica (None: on any, also on those that come later), until the same cause ends.

    The engine is paused, sleeps, or gets new weights: what runs there goes on when it does, what lies in its memory
    stays there, and nobody may be taken for gone meanwhile. Several causes may hold at once.
    """

    now_s: float
    cause: str
    replica_id: str | None = None


@dataclass(slots=True)
class GrantsContinued:
    """A cause for granting nothing on a replica (None: on any) is over. One that does not hold changes nothing."""

    now_s: float
    cause: str
    replica_id: str | None = None


@dataclass(slots=True)
class ReplicaFlushed:
    """What a replica kept in its memory for later turns was thrown away; turns in flight keep theirs."""

    now_s: float
    replica_id: str


@dataclass(slots=True)
class ReplicaTripped:
    """A replica fails turn after turn although it is up: nothing new goes there until it is told `tripped` False.

    Its programs leave it, as if it were draining. One that goes down is tripped no longer.
    """

    now_s: float
    replica_id: str
    tripped: bool = True


@dataclass(slots=True)
class ReplicaPolled:
    """A replica's metrics were read, whether it is up or not. None is *not known*, never zero.

    `hit_ratio` is the prefix-cache hit rate by tokens since the previous poll, `query_tokens` how many prompt tokens
    were looked up since then, `preemption_count` how many running requests lost their memory since then.
    `kv_used_ratio` is the part of the KV pool that running requests reference, `engine_waiting_count` how many requests
    wait in the engine. The metrics were asked for `age_s` ago: what happened since then may not be in them.
    """

    now_s: float
    replica_id: str
    capacity_tokens: int | None = None
    hit_ratio: float | None = None
    query_tokens: int | None = None
    preemption_count: int | None = None
    kv_used_ratio: float | None = None
    engine_waiting_count: int | None = None
    age_s: float = 0.0


@dataclass(slots=True)
class TierPolled:
    """A replica has a tier behind its pool: of so many prompt tokens that the pool had not, it had `hit_tokens`.

    Both are since the poll before.
    """

    now_s: float
    replica_id: str
    query_tokens: int
    hit_tokens: int


@dataclass(slots=True)
class EncodesPolled:
    """A replica said how many of its requests have images that are not encoded yet: it encodes one after the other."""

    now_s: float
    replica_id: str
    pending_encode_count: int


@dataclass(slots=True)
class ResidencyReported:
    """An engine said what lies in its memory: of each program named, so many tokens of its last context.

    A hint, not the truth: it may be late. Programs that are not named are as they were.
    """

    now_s: float
    replica_id: str
    resident_tokens: tuple[tuple[str, int], ...]


@dataclass(slots=True)
class RouteSet:
    """An operator says where programs go from now on: to these replicas, by their weights; to any, if none is named.

    `scope` is one of `routes.Scope`, `name` the program, group, class or tenant that is meant; empty for all.
    """

    now_s: float
    scope: str
    name: str
    targets: Targets


@dataclass(slots=True)
class ModelServed:
    """Of the replicas these alone serve a model from now on, as an adapter that only they have; all, if none is named.

    They need not be up, nor known.
    """

    now_s: float
    model: str
    replica_ids: tuple[str, ...]


@dataclass(slots=True)
class ModelAsked:
    """The turn that arrives next is for a model. Told only of one that some replicas serve, and others do not."""

    now_s: float
    turn_id: int
    model: str


@dataclass(slots=True)
class PrioritySet:
    """An operator gives a program a priority, lower comes first; with a `replica_id` in that engine alone."""

    now_s: float
    program_id: str
    priority: int
    replica_id: str | None = None


@dataclass(slots=True)
class MigrationAsked:
    """An operator moves a program to another replica."""

    now_s: float
    program_id: str
    replica_id: str


@dataclass(slots=True)
class ProgramKilled:
    """An operator ends a program: its held turns are rejected, those in flight end as turns without a program."""

    now_s: float
    program_id: str


@dataclass(slots=True)
class ReplicaKilled:
    """An operator has a replica drain and end."""

    now_s: float
    replica_id: str


@dataclass(slots=True)
class ProvisionAsked:
    """An operator wants one more replica."""

    now_s: float


FleetEvent = (
    EncodesPolled
    | GrantsContinued
    | GrantsSuspended
    | KnowledgeLoaded
    | MigrationAsked
    | ModelServed
    | ModelAsked
    | PrioritySet
    | ProgramKilled
    | ProvisionAsked
    | ReplicaDown
    | ReplicaDraining
    | ReplicaFlushed
    | ReplicaKilled
    | ReplicaPolled
    | ReplicaRemoved
    | ReplicaTripped
    | ReplicaUp
    | ResidencyReported
    | RouteSet
    | TierPolled
)
