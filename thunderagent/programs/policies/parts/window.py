"""`window`: at most N programs are admitted at once, first come first served, whatever policy they run under."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from thunderagent.programs.policies.setting_checks import check_whole_from_one
from thunderagent.programs.policy import Admission, Moment, ProgramView, View


@dataclass(frozen=True, slots=True)
class Window(Admission):
    """Admit while fewer than `n` programs are."""

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
