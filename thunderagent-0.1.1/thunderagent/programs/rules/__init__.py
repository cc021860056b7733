"""Rules that apply under every policy, one file and one index each; and the verbs of the core that they use."""

from __future__ import annotations

from typing import Protocol

from thunderagent.programs.messages import Reason
from thunderagent.programs.policy import Placement
from thunderagent.programs.state.book import Book
from thunderagent.programs.state.program import Program, Turn
from thunderagent.programs.state.replica import Replica


class Verbs(Protocol):
    """What the core does to programs and turns."""

    @property
    def book(self) -> Book:
        """The book."""

    def restore(self, program: Program, replica: Replica, reason: Reason, /) -> None:
        """Give a paused program a claim, and its held turns their leases."""

    def restore_beyond_limit(self, program: Program, reason: Reason, /) -> bool:
        """Restore a program where that costs least, regardless of room; return False if no replica may take it."""

    def idle(self, program: Program, /) -> None:
        """Take the claim and the admission of a program without a turn, until its next one."""

    def end(self, program: Program, reason: Reason, /) -> None:
        """End a program."""

    def reject(self, turn: Turn, reason: Reason, /) -> None:
        """End a held turn."""

    def asked(self, program: Program, replica: Replica, /) -> Placement:
        """Ask the policy whether a program may be active on that replica now."""

    def parent_claims(self, program: Program, /) -> bool:
        """Return whether a program must be let in because its parent may wait for it."""

    def refresh_hold_reason(self, program: Program, /) -> None:
        """Update the hold reason of a program that was held because nothing was granted."""


class Rule(Protocol):
    """A rule that applies under every policy."""

    @property
    def due_s(self) -> float:
        """When it must settle again: `inf` is not before something changes, 0 is after every event."""

    def settle(self, verbs: Verbs, /) -> None:
        """Do what follows from an event."""
