"""One-line choices of who is paused first when memory is short."""

from __future__ import annotations

from dataclasses import dataclass
from math import inf
from typing import ClassVar

from thunderagent.programs.policy import ProgramView, Victims


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
