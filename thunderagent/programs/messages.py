"""How a turn arrives and ends: the same structs in one process, over a gateway's link, and as the core's events."""

# interpreted: msgspec reads the types of its structs, which a compiled class does not keep

from __future__ import annotations

from typing import Literal, NamedTuple, TypeVar

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
