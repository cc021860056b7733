"""What rules may have done: the verbs of the core, as they need them."""

from __future__ import annotations

from typing import Protocol

from thunderagent.programs.book.book import Book
from thunderagent.programs.book.replica import Replica
from thunderagent.programs.model.decisions import Reason
from thunderagent.programs.model.policy import Placement
from thunderagent.programs.model.program import Program
from thunderagent.programs.model.turn import Turn


class Verbs(Protocol):
    """What the core does to programs and turns."""

    @property
    def book(self) -> Book:
        """Who is where."""

    def restore(self, program: Program, replica: Replica, reason: Reason, /) -> None:
        """Give a paused program a claim, and its held turns their leases."""

    def restore_beyond_limit(self, program: Program, reason: Reason, /) -> bool:
        """Restore a program where that costs least, whether there is room or not; False where that may be nowhere."""

    def idle(self, program: Program, /) -> None:
        """Take from a program without a turn what it has until its next one: its claim, and its admission."""

    def end(self, program: Program, reason: Reason, /) -> None:
        """End a program."""

    def reject(self, turn: Turn, reason: Reason, /) -> None:
        """End a held turn."""

    def asked(self, program: Program, replica: Replica, /) -> Placement:
        """Ask the policy whether a program may be active on that replica now."""

    def parent_claims(self, program: Program, /) -> bool:
        """Say whether a program must be let in because its parent may wait for it."""

    def refresh_hold_reason(self, program: Program, /) -> None:
        """Say anew why a program waits that was held because nothing granted."""


class Rule(Protocol):
    """What holds under every policy."""

    @property
    def due_s(self) -> float:
        """When it has something to settle again: `inf` is not before something changes, 0 is after every event."""

    def settle(self, verbs: Verbs, /) -> None:
        """Have done what follows from an event."""
