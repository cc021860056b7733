"""The core's input. Every event carries `now_s`, monotonic seconds, because the core has no clock.

Those of a turn's arrival and end are the messages that its carrier sends (`messages.py`).
"""

from __future__ import annotations

from dataclasses import dataclass

from thunderagent.programs.messages import TurnAsk, TurnEnd
from thunderagent.programs.model.fleet_events import FleetEvent
from thunderagent.programs.model.records.kept import ProgramsAdopted


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
