"""Converts requests and reports to events, and decisions to errors and log lines."""

# compiled: each turn passes here, twice

from __future__ import annotations

import re
from math import ceil
from typing import Final, get_args

import structlog

from thunderagent.errors import (
    NoReplicaError,
    NoRoomInTimeError,
    ProgramDeadlineError,
    ProgramHopelessError,
    ProgramKilledError,
    ProgramLimitError,
    ProgramReleasedError,
    ThunderAgentError,
    TooManyProgramsError,
)
from thunderagent.leases import TurnAsk, TurnEnd, TurnHint
from thunderagent.programs.model.decisions import Decision, Hold, Reason, Reject, SetPriority, SetRoute
from thunderagent.programs.model.events import (
    PinnedTurnArrived,
    ProgramHinted,
    TurnAbandoned,
    TurnArrived,
    TurnFailed,
    TurnFinished,
)
from thunderagent.programs.pools import Pools

log = structlog.get_logger("thunderagent.runtime")

MOST_RETRY_AFTER_S: Final = 60
"""Clients treat a longer wait as an error."""


def pinned_arrival(ask: TurnAsk, replica_id: str, now_s: float) -> PinnedTurnArrived:
    """Return the event of an arriving turn that must run on a replica."""
    return PinnedTurnArrived(now_s, ask.turn_id, replica_id, ask.prompt_bytes, ask.media)


def arrived(ask: TurnAsk, now_s: float) -> TurnArrived:
    """Return the event of an arriving turn that is not pinned."""
    return TurnArrived(
        now_s,
        ask.turn_id,
        ask.program_id,
        ask.branch_id,
        ask.prompt_bytes,
        ask.avoid_replica_id,
        ask.prefix,
        ask.group_id,
        None if ask.patience_s is None else now_s + ask.patience_s,
        ask.supersedes_id,
        None if ask.waited_s is None else now_s - ask.waited_s,
        ask.parent_id,
        ask.tenant,
        ask.wanted_replica_id,
        ask.program_class,
        ask.role,
        ask.parent_branch_id,
        ask.media,
    )


def hinting(program_id: str, hint: TurnHint, branch_id: str, now_s: float) -> ProgramHinted:
    """Return the event of a client's hint."""
    return ProgramHinted(now_s, program_id, hint.next_turn_in_s, hint.confidence_ratio, hint.keep, branch_id)


def ending(end: TurnEnd, now_s: float) -> TurnFinished | TurnFailed | TurnAbandoned:
    """Return the event of an ended turn."""
    if end.outcome == "finished":
        return TurnFinished(now_s, end.turn_id, end.prompt_tokens, end.output_tokens, end.cached_tokens, end.tool)
    if end.outcome == "abandoned":
        return TurnAbandoned(now_s, end.turn_id)
    return TurnFailed(now_s, end.turn_id, refused=end.outcome == "refused")


_NOT_FORWARDED: Final = "; the turn was not forwarded"
_RELEASED = ProgramReleasedError, "program {!r} was released while this turn waited" + _NOT_FORWARDED
_REFUSALS: dict[Reason, tuple[type[ThunderAgentError], str]] = {
    Reason.KILLED: (ProgramKilledError, "program {!r} was ended by an operator" + _NOT_FORWARDED),
    Reason.NO_REPLICA: (
        NoReplicaError,
        f"no replica has been usable for too long{_NOT_FORWARDED}; `thunderagent doctor` says why",
    ),
    Reason.HOPELESS: (
        ProgramHopelessError,
        "program {!r} was ended, because a judge expects it to fail" + _NOT_FORWARDED,
    ),
    Reason.MAX_TURNS: (ProgramLimitError, "program {!r} has had its max_turns" + _NOT_FORWARDED),
    Reason.MAX_TOKENS: (ProgramLimitError, "program {!r} has used its max_tokens" + _NOT_FORWARDED),
    Reason.MAX_AGE: (ProgramLimitError, "program {!r} has reached its max_age_s" + _NOT_FORWARDED),
    Reason.DEADLINE: (ProgramDeadlineError, "the deadline_s of program {!r} has passed" + _NOT_FORWARDED),
    Reason.DEADLINE_UNMET: (
        ProgramDeadlineError,
        "program {!r} cannot meet its deadline_s: its turns that are left would take longer, even alone on an engine"
        + _NOT_FORWARDED,
    ),
    Reason.OVERDRAWN: (NoRoomInTimeError, "there is no room before its client would give up" + _NOT_FORWARDED),
    Reason.LEAVING: (
        NoRoomInTimeError,
        "program {!r} leaves its replica, and its other turns there may not end before its client would give up"
        + _NOT_FORWARDED,
    ),
    Reason.TOO_MANY_PROGRAMS: (
        TooManyProgramsError,
        "the limit of programs is reached, and all of them have turns, so {!r} was not opened" + _NOT_FORWARDED,
    ),
}
"""The error for a rejected turn, by reason."""


def refusal_of(decision: Reject, pools: Pools) -> ThunderAgentError:
    """Return the error for a rejected turn; if there was no room in time, with when there may be some."""
    kind, why = _REFUSALS.get(decision.reason, _RELEASED)
    error = kind(why.format(decision.program_id))
    if decision.reason is Reason.OVERDRAWN:
        homes = pools.of_program(decision.program_id or "")
        scheduler = (homes[0] if homes else pools.all[0]).scheduler
        wait_s = scheduler.knowledge.restore_pace.interval_s * (1 + scheduler.queue.waiting_count)
        if wait_s:
            error.retry_after_s = min(MOST_RETRY_AFTER_S, max(1, ceil(wait_s)))
    return error


_WORDS: Final = {kind: re.sub(r"(?<=[a-z])(?=[A-Z])", "_", kind.__name__).lower() for kind in get_args(Decision)}
"""Names of decisions in the log."""


def log_decision(decision: Decision) -> None:
    """Write a line for a decision other than a grant."""
    word, reason = _WORDS[type(decision)], decision.reason.value
    if isinstance(decision, Hold):
        log.debug(word, program_id=decision.program_id, reason=reason)
    elif isinstance(decision, SetPriority):
        # a policy may decide one for each program
        write = log.info if decision.reason is Reason.OPERATOR else log.debug
        of = {"program_id": decision.program_id, "replica_id": decision.replica_id}
        write(word, **of, priority=decision.priority, reason=reason)
    elif isinstance(decision, SetRoute):
        of = {"scope": decision.scope, "name": decision.name}
        log.info(word, **of, replicas=dict(decision.targets), reason=reason)
    else:
        log.info(
            word,
            program_id=getattr(decision, "program_id", None),
            replica_id=getattr(decision, "replica_id", None),
            reason=reason,
        )
