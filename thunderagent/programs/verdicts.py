"""What a judge thinks of a program, as a level, and how often it was right.

Theory of operation
===================
A judge reads a program's task and what it did so far, and says whether it will succeed, and how sure it is of that
(`ProgramJudged`). Where a judge comes from, and when it is asked, is no matter of the core.

The last two verdicts and the length of the run of failures at their end make a `Level`:

| Last two verdicts | Level |
|---|---|
| none of them a failure (or one verdict so far, and it is none) | high |
| one of them a failure (or one verdict so far, and it is one) | medium |
| both failures | low |
| both failures, the first of the unbroken run of failures `fail_turns_count` turns before the last, or more | lowest |

A prediction of failure that its judge is not sure of (`confidence_ratio` under the least that counts) is no failure.
A level changes only when a verdict comes, so a program's place among others does, too.

How often a judge was right can only be known of programs whose clients say what became of them (`ProgramReleased`).
`Record` keeps for each outcome after how many turns failure was predicted first: of the programs that failed, the part
that was predicted by then is the recall, of those that succeeded it is the part of false alarms.

Source: levels, the last two verdicts and K_fail = 10 are those of ORBIT-JUDGE; which verdicts make which level is ours.
"""

from __future__ import annotations

from bisect import bisect_left
from enum import IntEnum
from typing import NamedTuple

TURN_EDGES_COUNT = (5, 10, 15, 20, 30, 40, 60, 80)
"""Turns by which recall is told."""

SUCCESS, FAILURE = OUTCOMES = ("success", "failure")


class Level(IntEnum):
    """How good a program's prospects are; the lower, the sooner it is served."""

    HIGH = 0
    MEDIUM = 1
    LOW = 2
    LOWEST = 3


class Verdict(NamedTuple):
    """One answer of a judge: what it says after `turn_count` turns of the program."""

    turn_count: int
    will_succeed: bool
    confidence_ratio: float


class Verdicts:
    """The last two verdicts on a program, and since when it is unbroken that they are failures."""

    __slots__ = ("_failures", "failing_since_turn_count", "first_failure_turn_count", "last", "level")

    def __init__(self) -> None:
        """Begin without any."""
        self.last: tuple[Verdict, ...] = ()
        """Two at most, the older first."""
        self._failures: tuple[bool, ...] = ()
        self.level: Level | None = None
        """None before the first verdict."""
        self.failing_since_turn_count: int | None = None
        """Of the first of the failures that the verdicts end with; None if the last one is none."""
        self.first_failure_turn_count: int | None = None
        """Of the first failure of all."""

    def add(self, verdict: Verdict, *, fail_turns_count: int, least_confidence_ratio: float) -> bool:
        """Take in one more; a late one, on fewer turns than the last was, changes nothing, and False says so."""
        if self.last and verdict.turn_count < self.last[-1].turn_count:
            return False
        is_failure = not verdict.will_succeed and verdict.confidence_ratio >= least_confidence_ratio
        self.last = (*self.last[-1:], verdict)
        self._failures = (*self._failures[-1:], is_failure)
        if not is_failure:
            self.failing_since_turn_count = None
        elif self.failing_since_turn_count is None:
            self.failing_since_turn_count = verdict.turn_count
        if is_failure and self.first_failure_turn_count is None:
            self.first_failure_turn_count = verdict.turn_count
        self.level = Level(sum(self._failures))
        failing_since = verdict.turn_count if self.failing_since_turn_count is None else self.failing_since_turn_count
        if self.level is Level.LOW and verdict.turn_count - failing_since >= fail_turns_count:
            self.level = Level.LOWEST
        return True


class Record:
    """After how many turns programs were predicted to fail, by what became of them."""

    __slots__ = ("_counts", "level_counts", "program_counts")

    def __init__(self) -> None:
        """Begin with nobody."""
        self.program_counts = dict.fromkeys(OUTCOMES, 0)
        """Programs that ended so."""
        self.level_counts = dict.fromkeys(Level, 0)
        """Verdicts by the level that they made."""
        self._counts = {outcome: [0] * (len(TURN_EDGES_COUNT) + 1) for outcome in OUTCOMES}

    def program_ended(self, outcome: str, first_failure_turn_count: int | None) -> None:
        """Take in a program with an outcome; None was never predicted to fail."""
        self.program_counts[outcome] += 1
        if first_failure_turn_count is not None:
            self._counts[outcome][bisect_left(TURN_EDGES_COUNT, first_failure_turn_count)] += 1

    def predicted_ratio(self, outcome: str, turn_count: int) -> float | None:
        """Return the part of the programs with that outcome that were predicted to fail by that turn, an edge.

        Of `FAILURE` that is the recall, of `SUCCESS` the part of false alarms; None before the first such program.
        """
        edges_count = TURN_EDGES_COUNT.index(turn_count) + 1
        whole_count = self.program_counts[outcome]
        return sum(self._counts[outcome][:edges_count]) / whole_count if whole_count else None
