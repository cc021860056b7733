"""The core's input about replicas and sandboxes, and from operators."""

# interpreted: the event log reads the types of the fields, which a compiled class does not keep

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from thunderagent.programs.messages import ProgramLimits
from thunderagent.programs.model.advice.routes import Targets
from thunderagent.programs.model.records.learned import LearnedRecord

BACKPRESSURE = "backpressure"
"""The cause for which a replica that says it is full grants nothing: its engine goes on with what it has."""


@dataclass(slots=True)
class ReplicaUp:
    """A replica was added, came up, or came back. Its known capacity is reported with this event, or before.

    Only this event makes a removed replica known again.
    """

    now_s: float
    replica_id: str
    capacity_tokens: int | None = None


@dataclass(slots=True)
class KnowledgeLoaded:
    """What was learned before a restart is restored in a replica's pool, and replaces what was learned since."""

    now_s: float
    replica_id: str
    learned: LearnedRecord


@dataclass(slots=True)
class ReplicaDown:
    """A replica is down: it grants nothing, and its memory is lost."""

    now_s: float
    replica_id: str


@dataclass(slots=True)
class ReplicaDraining:
    """A replica must finish its turns and get no new ones."""

    now_s: float
    replica_id: str


@dataclass(slots=True)
class ReplicaRemoved:
    """A replica will not come back: its turns in flight are lost as if it went down, and it is forgotten."""

    now_s: float
    replica_id: str


@dataclass(slots=True)
class GrantsSuspended:
    """A replica (None: every replica, also later ones) grants nothing until the same cause ends.

    The engine is paused, sleeps, or gets new weights. What runs there goes on when the engine does, its memory stays,
    and no program may be taken for gone meanwhile. Several causes may hold at once.
    """

    now_s: float
    cause: str
    replica_id: str | None = None


@dataclass(slots=True)
class GrantsContinued:
    """A cause for suspending a replica (None: every replica) is over. A cause that does not hold changes nothing."""

    now_s: float
    cause: str
    replica_id: str | None = None


@dataclass(slots=True)
class ReplicaFlushed:
    """A replica's cache for later turns was flushed; turns in flight keep theirs."""

    now_s: float
    replica_id: str


@dataclass(slots=True)
class ReplicaTripped:
    """A replica fails turn after turn although it is up: it gets nothing new until an event says `tripped` False.

    Its programs leave it, as if it were draining. A replica that goes down is no longer tripped. One that may be tried
    is still `failing`, until it is judged otherwise.
    """

    now_s: float
    replica_id: str
    tripped: bool = True


@dataclass(slots=True)
class ReplicaJudged:
    """A cause holds for the verdict on a replica, one of `ReplicaState`; an empty reason ends it.

    What is done for it follows as an event of its own.
    """

    now_s: float
    replica_id: str
    state: str
    reason: str = ""


@dataclass(slots=True)
class ReplicaPolled:
    """A replica's metrics were read, whether it is up or not. None is *not known*, never zero.

    Since the previous poll: `hit_ratio` is the prefix-cache hit rate by tokens, `query_tokens` the number of prompt
    tokens looked up, `preemption_count` the number of running requests that lost their memory. `kv_used_ratio` is the
    part of the KV pool that running requests reference, `engine_waiting_count` the number of requests that wait in the
    engine. The metrics were requested `age_s` ago: what happened since may not be in them.
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
    """A replica has a tier behind its pool; of `query_tokens` prompt tokens that the pool missed, it had `hit_tokens`.

    Both are since the previous poll.
    """

    now_s: float
    replica_id: str
    query_tokens: int
    hit_tokens: int


@dataclass(slots=True)
class WorkPolled:
    """What a replica's engine did since the previous poll, for whomever: iterations, and tokens.

    `computed_tokens` of prompts were computed, apart from what `preemption_count` preempted requests had computed
    again. The metrics were requested `age_s` ago.
    """

    now_s: float
    replica_id: str
    computed_tokens: int
    generated_tokens: int
    iteration_count: int
    preemption_count: int = 0
    age_s: float = 0.0


@dataclass(slots=True)
class EncodesPolled:
    """A replica reported how many of its requests have unencoded images: it encodes one after the other."""

    now_s: float
    replica_id: str
    pending_encode_count: int


@dataclass(slots=True)
class ResidencyReported:
    """An engine reported what is in its memory: for each named program, the tokens of its last context.

    A hint, not the truth: it may be late. Programs that are not named stay as they were.
    """

    now_s: float
    replica_id: str
    resident_tokens: tuple[tuple[str, int], ...]


@dataclass(slots=True)
class RouteSet:
    """An operator sets where programs go from now on: to these replicas, by weight; to any, if none is named.

    `scope` is one of `routes.Scope`, `name` the meant program, group, class or tenant; empty for all.
    """

    now_s: float
    scope: str
    name: str
    targets: Targets


@dataclass(slots=True)
class ModelServed:
    """From now on only these replicas serve a model, such as an adapter that only they have; all, if none is named.

    They need not be up, nor known.
    """

    now_s: float
    model: str
    replica_ids: tuple[str, ...]


@dataclass(slots=True)
class ModelAsked:
    """The next arriving turn is for a model. Sent only for a model that some replicas serve, and others do not."""

    now_s: float
    turn_id: int
    model: str


@dataclass(slots=True)
class TurnLimited:
    """The program of the next arriving turn has these limits, beside those that it has already."""

    now_s: float
    turn_id: int
    limits: ProgramLimits


@dataclass(slots=True)
class PrioritySet:
    """An operator gives a program a priority, lower comes first; with a `replica_id`, in that engine alone."""

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
    """An operator makes a replica drain and end."""

    now_s: float
    replica_id: str


@dataclass(slots=True)
class ProvisionAsked:
    """An operator wants one more replica."""

    now_s: float


@dataclass(slots=True)
class SandboxReady:
    """A sandbox of a program is usable; making it took `prepare_s`."""

    now_s: float
    program_id: str
    sandbox_id: str
    prepare_s: float


@dataclass(slots=True)
class SandboxFailed:
    """A sandbox of a program could not be made, or ended by itself; `why` is a sentence for the program's story."""

    now_s: float
    program_id: str
    sandbox_id: str
    why: str


class SandboxSums(NamedTuple):
    """The resource use of all sandboxes, as last measured; None is *not known*."""

    sandbox_count: int = 0
    disk_bytes: int | None = None
    memory_bytes: int | None = None


@dataclass(slots=True)
class SandboxesMeasured:
    """The resource use of all sandboxes. None is *not known*, never zero."""

    now_s: float
    sandbox_count: int
    disk_bytes: int | None = None
    memory_bytes: int | None = None


FleetEvent = (
    EncodesPolled
    | GrantsContinued
    | GrantsSuspended
    | KnowledgeLoaded
    | MigrationAsked
    | ModelServed
    | ModelAsked
    | TurnLimited
    | PrioritySet
    | ProgramKilled
    | ProvisionAsked
    | ReplicaDown
    | ReplicaDraining
    | ReplicaFlushed
    | ReplicaJudged
    | ReplicaKilled
    | ReplicaPolled
    | ReplicaRemoved
    | ReplicaTripped
    | ReplicaUp
    | ResidencyReported
    | RouteSet
    | SandboxFailed
    | SandboxReady
    | SandboxesMeasured
    | TierPolled
    | WorkPolled
)
