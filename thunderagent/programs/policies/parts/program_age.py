"""`age`: engines serve the oldest program first."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from thunderagent.programs.policy import EnginePriority, ProgramView, View


@dataclass(frozen=True, slots=True)
class ProgramAge(EnginePriority):
    """The priority of a turn is the time at which its program was opened, in tenths of a second."""

    name: ClassVar[str] = "age"

    def engine_priority(self, view: View, program: ProgramView) -> int:
        """Return the opening time: the oldest program is served first."""
        return int(program.opened_s * 10)
