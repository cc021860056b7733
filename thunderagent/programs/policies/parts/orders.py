"""One-line orders for restoring the paused queue."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from thunderagent.programs.policy import Order, ProgramView


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
