"""What a program may use, and until when it wants to be done."""

# interpreted: the event log and the links between processes read the types of the fields

from __future__ import annotations

from typing import NamedTuple, TypeVar

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
