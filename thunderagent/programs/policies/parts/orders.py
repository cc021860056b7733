"""Orders in which the paused queue is restored that need one line each."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from thunderagent.programs.model.views import ProgramView


@dataclass(frozen=True, slots=True)
class Fcfs:
    """First come, first served: the program comes first that is there for longest."""

    name: ClassVar[str] = "fcfs"

    def restore_rank(self, program: ProgramView) -> float:
        """Return the opening time."""
        return program.opened_s


@dataclass(frozen=True, slots=True)
class ShortestFirst:
    """The smallest claim comes first. Large programs may wait for ever; it is here to be compared with."""

    name: ClassVar[str] = "shortest"

    def restore_rank(self, program: ProgramView) -> float:
        """Return the claim."""
        return program.claim_tokens
