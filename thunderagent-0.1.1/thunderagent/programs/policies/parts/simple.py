"""Parts of one rule each: orders of the paused queue, who is paused first, whom engines serve first, a window."""

from __future__ import annotations

from dataclasses import dataclass
from math import inf
from typing import ClassVar

from thunderagent.programs.policies.helpers import check_whole_from_one
from thunderagent.programs.policy import Admission, EnginePriority, Moment, Order, ProgramView, Victims, View


@dataclass(frozen=True, slots=True)
class Fcfs(Order):
    """First come, first served: the program that has been here longest comes first."""

    name: ClassVar[str] = "fcfs"

    def restore_rank(self, program: ProgramView) -> float:
        """Return the opening time."""
        return program.opened_s


@dataclass(frozen=True, slots=True)
class ShortestFirst(Order):
    """The smallest claim comes first. Large programs may wait for ever; it is for comparison."""

    name: ClassVar[str] = "shortest"

    def restore_rank(self, program: ProgramView) -> float:
        """Return the claim."""
        return program.claim_tokens


@dataclass(frozen=True, slots=True)
class Youngest(Victims):
    """The newest program first; the last unfinished member of a group never before others."""

    name: ClassVar[str] = "youngest"

    def pause_rank(self, program: ProgramView) -> float:
        """Rank by age, the youngest first."""
        return inf if program.is_last_of_group else -program.opened_s


@dataclass(frozen=True, slots=True)
class Largest(Victims):
    """The largest claim first: fewest are paused; the last unfinished member of a group after all others."""

    name: ClassVar[str] = "largest"

    def pause_rank(self, program: ProgramView) -> float:
        """Rank by claim, the largest first."""
        return inf if program.is_last_of_group else -program.claim_tokens


@dataclass(frozen=True, slots=True)
class ProgramAge(EnginePriority):
    """Engines serve the oldest program first: a turn's priority is its program's opening time in tenths of a second."""

    name: ClassVar[str] = "age"

    def engine_priority(self, view: View, program: ProgramView) -> int:
        """Return the opening time: the oldest program is served first."""
        return int(program.opened_s * 10)


@dataclass(frozen=True, slots=True)
class Window(Admission):
    """Admit while fewer than `n` programs are, first come first served, whatever policy they run under."""

    n: int = 16
    """Programs at once, first come first served."""
    name: ClassVar[str] = "window"

    def __post_init__(self) -> None:
        """Reject a window that lets nobody in."""
        check_whole_from_one("window", self, "n")

    def rank(self, program: ProgramView) -> float:
        """Return the opening time."""
        return program.opened_s

    def next(self, view: View, moment: Moment) -> ProgramView | None:
        """Return the program that has waited longest, while there is a place."""
        return view.first_unadmitted() if view.admitted_count < self.n else None
