"""A judge's opinion of a program, as a level, and how often it was right.

Theory of operation
===================
A judge reads a program's task and what it did so far. It says whether the program will succeed, and how sure it is
(`ProgramJudged`). Where a judge comes from, and when it is asked, does not matter to the core.

Verdicts are ordered by the turns that they are about, whenever they arrive. With F the number of failures among all of
them, the level is that of the first row that holds:

| Verdicts | Level |
|---|---|
| F > K_fail (`fail_count`) | lowest |
| the last two are failures | low |
| the last is a failure | medium |
| the last is none | high |

So one success makes the level high again, until F passes K_fail: from then on it is always the lowest.

A predicted failure counts only if its judge is at least as sure as `least_confidence_ratio`; with 0 each counts. A
level, and so a program's rank, changes only when a verdict arrives.

How often a judge was right is only known of programs whose clients report the outcome (`ProgramReleased`). `Record`
keeps for each outcome after how many turns failure was first predicted. Of failed programs, the part predicted by then
is the recall; of successful ones it is the ratio of false alarms.

Source: the levels and K_fail = 10, for a verdict at each step, are those of ORBIT-JUDGE ("ORBIT: Efficient Agentic
Inference using Priority Scheduling", 3.2.3 and 4.1.4). How sure a judge must be, and what ends a program, is ours.
"""

from __future__ import annotations

from enum import IntEnum
from typing import NamedTuple

SUCCESS, FAILURE = OUTCOMES = ("success", "failure")


class Level(IntEnum):
    """A program's prospects; the lower, the sooner it is served."""

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
    """The last two verdicts on a program, and the number of failures among all."""

    __slots__ = ("_failures", "failure_count", "first_failure_turn_count", "last", "level")

    def __init__(self) -> None:
        """Start without verdicts."""
        self.last: tuple[Verdict, ...] = ()
        """Two at most, the one on fewer turns first."""
        self._failures: tuple[bool, ...] = ()
        self.level: Level | None = None
        """None before the first verdict."""
        self.failure_count = 0
        """F: failures among all verdicts so far."""
        self.first_failure_turn_count: int | None = None
        """The fewest turns after which a failure was predicted."""

    def add(self, verdict: Verdict, *, fail_count: int, least_confidence_ratio: float) -> bool:
        """Add a verdict at the position of its turn; return False if it is late and changes no level."""
        is_failure = not verdict.will_succeed and verdict.confidence_ratio >= least_confidence_ratio
        place = sum(each.turn_count <= verdict.turn_count for each in self.last)
        is_newest, level_before = place == len(self.last), self.level
        self.last = (*self.last[:place], verdict, *self.last[place:])[-2:]
        self._failures = (*self._failures[:place], is_failure, *self._failures[place:])[-2:]
        if is_failure:
            self.failure_count += 1
            first_turn_count = self.first_failure_turn_count
            if first_turn_count is None or verdict.turn_count < first_turn_count:
                self.first_failure_turn_count = verdict.turn_count
        if self.failure_count > fail_count:
            self.level = Level.LOWEST
        elif not self._failures[-1]:
            self.level = Level.HIGH
        else:
            self.level = Level.LOW if self._failures == (True, True) else Level.MEDIUM
        return is_newest or self.level is not level_before
