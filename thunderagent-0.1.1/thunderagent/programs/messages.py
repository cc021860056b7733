"""All that goes into the core and comes out of it."""

# interpreted: msgspec and the event log read the types of the fields, which a compiled class does not keep

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Final, Literal, NamedTuple, TypeVar

from msgspec import Struct

PrefixCut = tuple[int, int]
"""A place up to which other prompts may be the same: a digest of everything before it, and its length in bytes."""

Media = tuple[tuple[str, int], ...]
"""Images, audio and files of a prompt: their classes (model, kind and size), and a first guess of their tokens."""

Outcome = Literal["finished", "failed", "refused", "abandoned"]
"""How a turn ended: its answer is complete, its replica failed it, its engine refused it, or its client left."""


class TurnHint(Struct, frozen=True, array_like=True, gc=False):
    """A client's hint on its program's next turn; for details see `ProgramHinted`."""

    next_turn_in_s: float | None = None
    confidence_ratio: float = 1.0
    keep: str = ""


class TurnAsk(Struct, kw_only=True, array_like=True, tag="acquire", gc=False):
    """A turn that wants to run: all that a scheduler may know of it, and the event of its arrival.

    `turn_id` is from `LeaseSource.new_turn_id`. A turn without a `program_id` is anonymous: it counts as load and is
    never held for memory; only such a turn may be pinned to the replica that its client chose. `prompt_bytes` is the
    size of the request's body without its `media`; the core learns tokens per byte from usage, and how many tokens each
    class of media takes. `prefix` are places in the prompt, in order; programs whose prompts have the same digest at a
    place have the same prompt up to there. Programs of one `group_id` finish together. A program's tenant, its class
    (its client's word for what it does) and its parent, a program that waits for it, are those of its first turn.
    `parent_branch_id` is the branch that waits for it; empty is the main branch. `role` is the agent of the turn; empty
    means the branch's name. `avoid_replica_id` names the replica that failed the previous attempt, and
    `wanted_replica_id` alone has the response from which the turn continues.
    """

    turn_id: int
    program_id: str | None = None
    branch_id: str = ""
    parent_branch_id: str = ""
    parent_id: str = ""
    tenant: str = ""
    group_id: str = ""
    program_class: str = ""
    role: str = ""
    prompt_bytes: int = 0
    prefix: tuple[PrefixCut, ...] = ()
    media: Media = ()
    patience_s: float | None = None
    """How long its client will still wait for it; None is for ever."""
    waited_s: float | None = None
    """How long its client already waited, with earlier attempts; None for the first."""
    supersedes_id: int | None = None
    """The attempt that this one replaces. A waiter for its lease, or its holder, is not told."""
    avoid_replica_id: str | None = None
    pinned_replica_id: str | None = None
    wanted_replica_id: str | None = None
    abortable: bool = False
    """Whether a trainer may end its wait."""
    hint: TurnHint | None = None
    """What comes after it, counted from its end."""
    model: str = ""
    """Its model; empty if none is named, or it does not matter (`ReplicaMap.names_models`)."""
    attempt_key: str = ""
    """Common to all attempts at one turn, whichever gateway they come to; empty if its client gave none."""
    engine_request_id: str = ""
    """By which its client may have an engine abort it; empty if it gave none."""
    limits: ProgramLimits | None = None
    """What its program may use, by its headers and its key."""
    now_s: float = 0.0
    """When it reached its scheduler, who sets it, in the scheduler's seconds; until then 0, as clocks differ."""


class TurnEnd(Struct, array_like=True, tag="end", gc=False):
    """The end of a turn with a lease, with its usage as far as the engine reported it, and the event of that.

    `prompt_tokens` includes the cached ones, as in the `usage` object of the OpenAI API. `tool` names what the answer
    calls, as far as that tells how long it will take: a tool's name, or a shell's with the first word of its command;
    empty if it calls nothing, or nobody looked.
    """

    turn_id: int
    program_id: str | None = None
    generation: int = 0
    outcome: Outcome = "finished"
    prompt_tokens: int | None = None
    output_tokens: int | None = None
    cached_tokens: int | None = None
    tool: str = ""
    is_error: bool = False
    """Whether a failed turn had an answer, which reported an error inside."""
    verdict: str = ""
    """Whose fault a bad end is: a `TurnVerdict`; empty if unknown, or it is tried again."""
    cause: str = ""
    """A word for the cause: the code of an error, or the status of an answer."""
    now_s: float = 0.0
    """As in `TurnAsk`."""


N = TypeVar("N", int, float)


class ProgramLimits(NamedTuple):
    """Limits of one program; None is none. Times count from its first turn's arrival."""

    max_turns: int | None = None
    max_tokens: int | None = None
    """Of prompts and answers, summed over its finished turns."""
    max_age_s: float | None = None
    deadline_s: float | None = None
    """When it must be done: as `max_age_s`, but it counts in the order; if it cannot be met, that is said at once."""
    turns: int | None = None
    """How many turns it expects to take in all: the last word counts."""
    ends: bool = False
    """Whether the program ends with the turn that reaches a limit; otherwise it lives, and its next turn is refused."""


NO_PROGRAM_LIMITS = ProgramLimits()


def least_of(one: ProgramLimits | None, other: ProgramLimits | None) -> ProgramLimits | None:
    """Return the limits that keep both: of each the least. The expected turns are those of `other`, if given."""
    if one is None or other is None or one == other:
        return other if one is None else one
    return ProgramLimits(
        _least(one.max_turns, other.max_turns),
        _least(one.max_tokens, other.max_tokens),
        _least(one.max_age_s, other.max_age_s),
        _least(one.deadline_s, other.deadline_s),
        one.turns if other.turns is None else other.turns,
        one.ends or other.ends,
    )


def _least(one: N | None, other: N | None) -> N | None:
    if one is None or other is None:
        return other if one is None else one
    return min(one, other)


Targets = tuple[tuple[str, float], ...]
"""Replicas by their ids, each with its weight."""


class Scope(StrEnum):
    """Whose programs a route applies to, narrowest first."""

    PROGRAM = "program"
    GROUP = "group"
    CLASS = "class"
    TENANT = "tenant"
    ALL = "all"


RETAIN, OFFLOAD, DROP = KEEPS = ("retain", "offload", "drop")
"""What may become of a program's memory: kept as long as a hint may, or free for others for now, or for good."""

MAX_NEXT_TURN_S: Final = 366 * 86_400.0
"""Nobody knows of a turn that is more than a year away."""

SUCCESS, FAILURE = OUTCOMES = ("success", "failure")


class TurnVerdict(StrEnum):
    """Whose doing the end of a turn was, and of a program whether its turns may be trained on."""

    OK = "ok"
    CLIENT_LEFT = "client_left"
    AGENT_ERROR = "agent_error"
    INFRASTRUCTURE_FAILED = "infrastructure_failed"
    ABORTED_BY_TRAINER = "aborted_by_trainer"


TURN_VERDICTS: Final[dict[str, TurnVerdict]] = {verdict.value: verdict for verdict in TurnVerdict}


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


class Grant(Struct, gc=False):
    """The turn has its lease: it may run on that replica.

    `engine_priority` is for engines with priorities, lower first; None leaves it to the client.
    """

    turn_id: int
    program_id: str | None
    replica_id: str
    reason: Reason
    engine_priority: int | None = None


class Hold(Struct, gc=False):
    """The turn waits; a `Grant` or a `Reject` will follow."""

    turn_id: int
    program_id: str | None
    reason: Reason


class Reject(Struct, gc=False):
    """The turn will never get a lease."""

    turn_id: int
    program_id: str | None
    reason: Reason


class Pause(Struct, gc=False):
    """The program loses its claim on the replica's memory."""

    program_id: str
    replica_id: str
    reason: Reason


class Mark(Struct, gc=False):
    """The program pauses at the end of the turn in flight."""

    program_id: str
    replica_id: str
    reason: Reason


class Unmark(Struct, gc=False):
    """The program will not pause at the end of the turn in flight, after all."""

    program_id: str
    replica_id: str
    reason: Reason


class Restore(Struct, gc=False):
    """The program gets a claim on that replica's memory."""

    program_id: str
    replica_id: str
    reason: Reason


class Release(Struct, gc=False):
    """The program is gone from the table; `generation` is the incarnation that ended."""

    program_id: str
    generation: int
    reason: Reason


class SetPriority(Struct, gc=False):
    """The program comes before those with a higher number, in the paused queue and in engines.

    With a `replica_id`, in the engine of that replica alone.
    """

    program_id: str
    priority: int
    replica_id: str | None
    reason: Reason


class SetRoute(Struct, gc=False):
    """Programs of that scope go to these replicas, by their weights; to any, if there are none."""

    scope: str
    name: str
    targets: tuple[tuple[str, float], ...]
    reason: Reason


class Provision(Struct, gc=False):
    """One more replica should be started. This is done outside the core, which hears of it when it is up."""

    reason: Reason


class EndReplica(Struct, gc=False):
    """That replica should drain and end. This is done outside the core, which hears that it drains."""

    replica_id: str
    reason: Reason


Decision = (
    Grant | Hold | Reject | Pause | Mark | Unmark | Restore | Release | SetPriority | SetRoute | Provision | EndReplica
)


def is_rejected(turn_id: int, decisions: Sequence[Decision]) -> bool:
    """Return whether a turn is rejected as it arrives: no event will end it."""
    return any(type(each) is Reject and each.turn_id == turn_id for each in decisions)


@dataclass(frozen=True, slots=True)
class HistogramRecord:
    """Counts of values between edges, and how many values count."""

    counts: tuple[float, ...]
    total: float


@dataclass(frozen=True, slots=True)
class ToolRecord:
    """The life table of a tool: how many left in each interval, by returning or otherwise, and the last rates."""

    name: str
    returned: tuple[float, ...]
    away: tuple[float, ...]
    count: float
    rates: tuple[float, ...]
    refresh_at_count: float


@dataclass(frozen=True, slots=True)
class GrowthRecord:
    """What turns add and generate, and how large programs become."""

    growths: HistogramRecord
    outputs: HistogramRecord
    program_count: int
    turn_count: float
    whole_tokens: float
    grown_tokens: float
    cycle_s: float


@dataclass(frozen=True, slots=True)
class TurnMeansRecord:
    """Means over turns, in tokens, and over how many: what they hold, bring, leave, generate and add; of programs."""

    count: int
    held_tokens: float
    new_tokens: float
    left_tokens: float
    output_tokens: float
    program_count: int
    program_turn_count: float
    """Turns of an ended program, mean."""
    grown_tokens: float = 0.0
    """What a turn adds to its program; earlier versions did not keep it, then it is learned anew."""


@dataclass(frozen=True, slots=True)
class PriceRecord:
    """Price of a generated token, as looked up so many turns ago, and how many tokens a byte is."""

    decode: HistogramRecord
    decode_token_s: float
    decode_refreshed_count: int
    tokens_per_byte_ratio: float


@dataclass(frozen=True, slots=True)
class CapacityRecord:
    """The claimable part of a replica's reported capacity, and where much was lost the last time."""

    replica_id: str
    ratio: float
    ceiling_ratio: float


@dataclass(frozen=True, slots=True)
class TierRecord:
    """Price of a replica's tier: times to load a token, and how much of its pool's losses was found there."""

    replica_id: str
    restore: HistogramRecord
    missing_tokens: float
    found_tokens: float


@dataclass(frozen=True, slots=True)
class ReplicaPriceRecord:
    """Price of a computed prompt token on a replica with its interval, of an iteration, and of a sequence in it."""

    replica_id: str
    token_s: float
    low_token_s: float
    high_token_s: float
    iteration_s: float
    sequence_s: float
    source: str


@dataclass(frozen=True, slots=True)
class LengthsRecord:
    """How many programs ended in each interval of turns, or passed it, and what turns added recently."""

    ended: tuple[float, ...]
    passed: tuple[float, ...]
    grown_tokens: float
    grown_count: float


@dataclass(frozen=True, slots=True)
class LearnedRecord:
    """All that the scheduler of one pool has learned."""

    all_tools: ToolRecord
    tools: tuple[ToolRecord, ...]
    mean_tool_s: float
    growth: GrowthRecord
    prices: PriceRecord
    residences_s: HistogramRecord
    all_roles: tuple[float, float]
    roles: tuple[tuple[str, float, float], ...]
    """Weight and tokens of each role."""
    media_factors: tuple[tuple[str, float], ...]
    hints: tuple[tuple[str, float, float], ...]
    """For each tenant: how many were right, and of how many."""
    restores: tuple[float, float]
    """Number of restores, and their seconds of waiting."""
    capacities: tuple[CapacityRecord, ...]
    tiers: tuple[TierRecord, ...] = ()
    lengths: LengthsRecord | None = None
    """None if the order does not learn them."""
    turn_means: TurnMeansRecord | None = None
    """None in a state that an earlier version kept."""
    replica_prices: tuple[ReplicaPriceRecord, ...] = ()


class BranchRecord(NamedTuple):
    """A branch after its last finished turn."""

    branch_id: str
    context_tokens: int
    prompt_tokens: int = 0
    tokens_per_byte_ratio: float | None = None
    parent_id: str = ""
    parent_turns_count: int = 0


class ProgramRecord(NamedTuple):
    """A program as one scheduler had it: where it stands, what it claims and what it used. Fields are only added.

    Times are durations before the record was written: two schedulers share no clock.
    """

    program_id: str
    tenant: str = ""
    group_id: str = ""
    parent_id: str = ""
    program_class: str = ""
    standing: str = "announced"
    """`announced`, `active`, `paused`, `idle` (its claim went at the idle limit) or `unadmitted`."""
    replica_id: str = ""
    """Where it is active, or was when it was paused."""
    resident_tokens: int = 0
    """Its tokens in that replica's memory."""
    branches: tuple[BranchRecord, ...] = ()
    age_s: float = 0.0
    acting_s: float = 0.0
    """How long it has had no turn."""
    tool: str = ""
    tool_named: bool = False
    tool_runs: bool = False
    priority: int = 0
    turn_count: int = 0
    first_prompt_tokens: int = 0
    larger_tokens_total: int = 0
    prompt_tokens_total: int = 0
    output_tokens_total: int = 0
    cached_tokens_total: int = 0
    held_s_total: float = 0.0
    ideal_s_total: float = 0.0
    limits: ProgramLimits | None = None

    def older(self, elapsed_s: float) -> ProgramRecord:
        """Return the same record, `elapsed_s` later."""
        return self._replace(age_s=self.age_s + elapsed_s, acting_s=self.acting_s + elapsed_s)


@dataclass(slots=True)
class ProgramsAdopted:
    """These programs belonged to another scheduler, which is gone; all are in the pool of a replica.

    A program that is already live stays as it is. One whose replica is not open is paused. Its turns are reported
    separately.
    """

    now_s: float
    replica_id: str
    programs: tuple[ProgramRecord, ...]


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


@dataclass(slots=True)
class ProgramOpened:
    """A program is announced before its first turn; a live one stays as it is."""

    now_s: float
    program_id: str
    group_id: str = ""
    parent_id: str = ""
    tenant: str = ""
    program_class: str = ""


@dataclass(slots=True)
class TurnAdopted:
    """A turn, as it was asked for, already runs on a replica by a lease of another scheduler, which is gone.

    It counts there regardless of room; nothing happens if that replica grants nothing now.
    """

    now_s: float
    turn_id: int
    replica_id: str
    ask: TurnAsk


@dataclass(slots=True)
class TurnUnverified:
    """Nobody trusted will report how a turn with a lease went: its sizes teach of its own program alone."""

    now_s: float
    turn_id: int


@dataclass(slots=True)
class TurnStarted:
    """The first byte of the answer arrived: prefill is over."""

    now_s: float
    turn_id: int


@dataclass(slots=True)
class TurnProgressed:
    """A streamed turn has generated about `output_tokens` so far."""

    now_s: float
    turn_id: int
    output_tokens: int


@dataclass(slots=True)
class TurnJudged:
    """Whose fault it is that a turn is about to end badly: a `TurnVerdict`; the cause is a word of it."""

    now_s: float
    turn_id: int
    verdict: str
    cause: str = ""


@dataclass(slots=True)
class ProgramCrowdedOut:
    """A program of that tenant begins in another pool, and the limit is reached: one without a turn is forgotten."""

    now_s: float
    tenant: str


@dataclass(slots=True)
class ProgramReleased:
    """The client says that the program ended.

    With a `generation`, only that incarnation of the id is meant: a late release does not end the next one. `outcome`
    is `success` or `failure`; empty if the client does not say or know.
    """

    now_s: float
    program_id: str
    generation: int | None = None
    outcome: str = ""


@dataclass(slots=True)
class ProgramsReleased:
    """The client says that several programs ended: all of them end before anybody gets their room."""

    now_s: float
    program_ids: tuple[str, ...]


@dataclass(slots=True)
class ProgramJudged:
    """A judge that read a program's first `turn_count` turns predicts whether it will succeed.

    `confidence_ratio` is how sure it is, 0 to 1. Only the incarnation of that `generation` is meant.
    """

    now_s: float
    program_id: str
    generation: int
    turn_count: int
    will_succeed: bool
    confidence_ratio: float


@dataclass(slots=True)
class ProgramHinted:
    """A client says when its program's next turn comes, or what may become of its memory until then.

    `next_turn_in_s` counts from now, or, while a turn of the program is here, from the end of the last one; None is not
    said. `confidence_ratio` is how sure the client is, 0 to 1. `keep` is `retain`, `offload` or `drop`; empty if that
    follows from when the turn comes. With `drop`, a named side branch has ended.
    """

    now_s: float
    program_id: str
    next_turn_in_s: float | None = None
    confidence_ratio: float = 1.0
    keep: str = ""
    branch_id: str = ""


@dataclass(slots=True)
class ToolStarted:
    """A program's tool begins now: more exact than the end of the turn that called it.

    Its client says so, or it is `inferred`, as from a command that began: then `tool` is used only if there is no
    better name, such as the one that the answer called.
    """

    now_s: float
    program_id: str
    tool: str = ""
    inferred: bool = False


@dataclass(slots=True)
class ToolEnded:
    """A program's tool has ended.

    Its client says so, and its next turn comes at once, or another tool begins. If that is only `inferred`, as from a
    command that ended, the client may do anything next.
    """

    now_s: float
    program_id: str
    inferred: bool = False


@dataclass(slots=True)
class TurnDue:
    """A held turn must get its lease now, or its client gives up: nothing else is checked."""

    now_s: float
    turn_id: int


@dataclass(slots=True)
class Tick:
    """Time passed. A safety net: whatever can be decided earlier is decided on the event itself."""

    now_s: float


Event = (
    ProgramOpened
    | TurnAsk
    | TurnAdopted
    | TurnUnverified
    | TurnStarted
    | TurnProgressed
    | TurnEnd
    | TurnJudged
    | ProgramCrowdedOut
    | ProgramReleased
    | ProgramsReleased
    | ProgramJudged
    | ProgramHinted
    | ProgramsAdopted
    | ToolStarted
    | ToolEnded
    | TurnDue
    | FleetEvent
    | Tick
)


class GpuSubmit(Struct, gc=False):
    """A turn goes to a replica; `projected_tokens` of KV cache are expected for its prompt and answer.

    `held_s` is how long it waited for that.
    """

    now_s: float
    program_id: str
    turn_id: int
    replica_id: str
    projected_tokens: int
    held_s: float = 0.0


class GpuFirstToken(Struct, gc=False):
    """The first token of a turn arrived, `launch_delay_s` after the turn went to its replica."""

    now_s: float
    program_id: str
    turn_id: int
    replica_id: str
    launch_delay_s: float


class GpuEnd(Struct, gc=False):
    """A turn is over, `served_s` after it went to its replica.

    `freed_tokens` of KV cache are no longer referenced; `computed_tokens` of them were not cached, and were prefilled
    or generated. `finished` False is a turn that failed or whose client left.
    """

    now_s: float
    program_id: str
    turn_id: int
    replica_id: str
    freed_tokens: int
    computed_tokens: int
    served_s: float
    finished: bool


class ToolNum(Struct, gc=False):
    """The number of programs at a tool now, and the mean of recent tool times; 0 until one came back."""

    now_s: float
    tool_count: int
    mean_tool_s: float


class ToolStart(Struct, gc=False):
    """A program's tool began; its name is empty if unknown."""

    now_s: float
    program_id: str
    tool: str


class ToolEnd(Struct, gc=False):
    """A program's tool has ended."""

    now_s: float
    program_id: str
    tool: str
    duration_s: float


class WindowUpdate(Struct, gc=False):
    """An admission policy changed how many programs it lets in; `why` is its own word for the cause."""

    now_s: float
    window_count: int
    admitted_count: int
    why: str


class ProgramEnd(Struct, gc=False):
    """A program ended; `turn_count` turns of it were granted."""

    now_s: float
    program_id: str
    turn_count: int


Signal = GpuSubmit | GpuFirstToken | GpuEnd | ToolNum | ToolStart | ToolEnd | WindowUpdate | ProgramEnd


@dataclass(frozen=True, slots=True)
class SchedulerSettings:
    """Limits that apply under any policy."""

    idle_limit_s: float | None = None
    """A program whose tool runs longer gives its claim back; its next turn is simply placed again.

    None is what was learned of its tool: long beyond the time in which nearly all return, and 300 s at least, but never
    more than half of the forget limit."""
    forget_limit_s: float = 1800.0
    """A program not heard of for longer is dropped from the table."""
    no_replica_limit_s: float = 60.0
    """How long turns are held while no replica is usable; then they are rejected."""
    patience_margin_s: float = 1.0
    """A turn whose client would give up gets its lease at least this long before, for its answer."""
    patience_ratio: float = 0.25
    """The same as a ratio of its client's patience, if that is longer."""
    patience_overdraft_ratio: float = 0.5
    """How far programs let in regardless of room may exceed a replica's limit, as a ratio of the limit; one program may
    exceed it if nothing is overdrawn."""
    max_programs_count: int = 100_000
    """Programs that may live at a time; beyond, the oldest without a turn are forgotten, then new ones rejected."""
    tenant_max_programs_count: int = 50_000
    """The same for each tenant."""
    fair_tenants: bool = False
    """Whether waiting programs are ordered by what their tenant had (`tenants.py`)."""
    tenant_weight_ratios: Mapping[str, float] = field(default_factory=dict)
    """Tenants' weights; 1 for those that are not named."""
    judge_fail_count: int = 10
    """More verdicts of failure than this make a program's level the lowest: K_fail of ORBIT."""
    judge_confidence_ratio: float = 0.0
    """A verdict of failure counts as one if the judge is as sure of it."""
    judge_ends_hopeless: bool = False
    """Whether a program whose level becomes the lowest is ended."""
    provisions_replicas: bool = True
    """Whether somebody starts and ends replicas for a global policy; if not, its proposals are refused."""
