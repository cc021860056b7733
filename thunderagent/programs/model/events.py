"""The core's input. Every event carries `now_s`, monotonic seconds, because the core has no clock.

The two largest of each turn have an explicit `__init__`, because that of a dataclass is not compiled. Compiled, these
two can neither be copied nor pickled.
"""

from __future__ import annotations

from dataclasses import dataclass

from thunderagent.programs.model.fleet_events import FleetEvent
from thunderagent.programs.model.records.kept import ProgramsAdopted

PrefixCut = tuple[int, int]
"""A place up to which other prompts may be the same: a digest of everything before it, and its length in bytes."""

Media = tuple[tuple[str, int], ...]
"""Images, audio and files of a prompt: their classes (model, kind and size), and a first guess of their tokens."""


@dataclass(slots=True)
class ProgramOpened:
    """A program is announced before its first turn; a live one stays as it is."""

    now_s: float
    program_id: str
    group_id: str = ""
    parent_id: str = ""
    tenant: str = ""
    program_class: str = ""


@dataclass(slots=True, init=False)
class TurnArrived:
    """A turn wants a lease.

    `program_id` None is an anonymous turn: it counts as load and is never held for memory. `prompt_bytes` is the size
    of the request's body without its `media`; the core learns tokens per byte from usage, and how many tokens each
    class of media takes. `avoid_replica_id` names the replica that failed the previous attempt at this turn. `prefix`
    are places in the prompt, in order; programs whose prompts have the same digest at a place have the same prompt up
    to there. Programs of one `group_id` finish together. A program's tenant, its class (its client's word for what it
    does) and its parent, a program that waits for it, are those of its first turn. `parent_branch_id` is the branch
    that waits for it; empty is the main branch. `role` is the agent of the turn; empty means the branch's name.

    At `deadline_s`, in the same seconds as `now_s`, the client gives up; None is never. A client that retries names the
    turn that this one replaces (`supersedes_id`), and, if that one has ended, since when it waits. `wanted_replica_id`
    alone has the response from which the turn continues.
    """

    now_s: float
    turn_id: int
    program_id: str | None
    branch_id: str = ""
    prompt_bytes: int = 0
    avoid_replica_id: str | None = None
    prefix: tuple[PrefixCut, ...] = ()
    group_id: str = ""
    deadline_s: float | None = None
    supersedes_id: int | None = None
    waiting_since_s: float | None = None
    parent_id: str = ""
    tenant: str = ""
    wanted_replica_id: str | None = None
    program_class: str = ""
    role: str = ""
    parent_branch_id: str = ""
    media: Media = ()

    def __init__(
        self,
        now_s: float,
        turn_id: int,
        program_id: str | None,
        branch_id: str = "",
        prompt_bytes: int = 0,
        avoid_replica_id: str | None = None,
        prefix: tuple[PrefixCut, ...] = (),
        group_id: str = "",
        deadline_s: float | None = None,
        supersedes_id: int | None = None,
        waiting_since_s: float | None = None,
        parent_id: str = "",
        tenant: str = "",
        wanted_replica_id: str | None = None,
        program_class: str = "",
        role: str = "",
        parent_branch_id: str = "",
        media: Media = (),
    ) -> None:
        self.now_s = now_s
        self.turn_id = turn_id
        self.program_id = program_id
        self.branch_id = branch_id
        self.prompt_bytes = prompt_bytes
        self.avoid_replica_id = avoid_replica_id
        self.prefix = prefix
        self.group_id = group_id
        self.deadline_s = deadline_s
        self.supersedes_id = supersedes_id
        self.waiting_since_s = waiting_since_s
        self.parent_id = parent_id
        self.tenant = tenant
        self.wanted_replica_id = wanted_replica_id
        self.program_class = program_class
        self.role = role
        self.parent_branch_id = parent_branch_id
        self.media = media


@dataclass(slots=True)
class PinnedTurnArrived:
    """An anonymous turn wants a lease on the replica that its client chose, and on no other."""

    now_s: float
    turn_id: int
    replica_id: str
    prompt_bytes: int = 0
    media: Media = ()


@dataclass(slots=True)
class TurnAdopted:
    """A turn, as it `arrived`, already runs on a replica by a lease of another scheduler, which is gone.

    It counts there regardless of room; nothing happens if that replica grants nothing now.
    """

    now_s: float
    turn_id: int
    replica_id: str
    arrived: TurnArrived


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


@dataclass(slots=True, init=False)
class TurnFinished:
    """The answer is complete. A count is None if the engine did not report it.

    `prompt_tokens` includes the cached ones, as in the `usage` object of the OpenAI API. `tool` names what the answer
    calls, as far as that tells how long it will take: a tool's name, or a shell's with the first word of its command;
    empty if it calls nothing, or nobody looked.
    """

    now_s: float
    turn_id: int
    prompt_tokens: int | None = None
    output_tokens: int | None = None
    cached_tokens: int | None = None
    tool: str = ""

    def __init__(
        self,
        now_s: float,
        turn_id: int,
        prompt_tokens: int | None = None,
        output_tokens: int | None = None,
        cached_tokens: int | None = None,
        tool: str = "",
    ) -> None:
        self.now_s = now_s
        self.turn_id = turn_id
        self.prompt_tokens = prompt_tokens
        self.output_tokens = output_tokens
        self.cached_tokens = cached_tokens
        self.tool = tool


@dataclass(slots=True)
class TurnFailed:
    """The replica failed the turn, or `refused` it; the lease comes back and nothing is learned from it."""

    now_s: float
    turn_id: int
    refused: bool = False


@dataclass(slots=True)
class TurnJudged:
    """Whose fault it is that a turn is about to end badly: a `TurnVerdict`; the cause is a word of it."""

    now_s: float
    turn_id: int
    verdict: str
    cause: str = ""


@dataclass(slots=True)
class TurnAbandoned:
    """The client left while the turn was held or in flight."""

    now_s: float
    turn_id: int


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
    | TurnArrived
    | PinnedTurnArrived
    | TurnAdopted
    | TurnUnverified
    | TurnStarted
    | TurnProgressed
    | TurnFinished
    | TurnFailed
    | TurnJudged
    | TurnAbandoned
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
