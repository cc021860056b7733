"""Asks each global policy periodically what should be changed; and keeps what they have not heard yet.

What a policy is told in a period is bounded, so that no event waits long for its decision.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import inf
from typing import Final

from thunderagent.programs.book.book import Book
from thunderagent.programs.model.program import Program
from thunderagent.programs.policy import GlobalPolicy, Policy, View

NEWLY_WAITING_COUNT: Final = 8192
"""A global policy hears of at most this many newly waiting programs in one period; of the others in the next ones.

No event is handled while it decides, so it must not process a burst in one go. A second's turns are fewer."""


class GlobalPolicies:
    """The global policies of one scheduler; mostly there is none."""

    __slots__ = ("_asked", "_book", "_view", "changes_count", "name", "newly_waiting")

    def __init__(self, policy: Policy, book: Book, view: View) -> None:
        """Ask the global policy of `policy`, if any, at the next tick."""
        chosen = policy.global_policy
        self.name = None if chosen is None else chosen.name
        """Their name; None without one."""
        self._asked = [] if chosen is None else [_Asked(each) for each in chosen.chained()]
        self._book = book
        self._view = view
        self.changes_count = 0
        """Number of changes so far, by them or by an operator."""
        self.newly_waiting: Sequence[Program] = ()
        """The programs of which the policy hears while it is asked."""

    @property
    def unseen_count(self) -> int:
        """Number of programs whose wait a policy has not heard of yet; some may no longer wait."""
        return max((len(asked.unseen) for asked in self._asked), default=0)

    def decide(self) -> bool:
        """Ask the policies that are due; return whether they changed anything."""
        before_count, now_s = self.changes_count, self._book.now_s
        for asked in self._asked:
            if now_s >= asked.due_s:
                asked.due_s = next_due_s(asked.due_s, now_s, asked.policy.period_s)
                self.newly_waiting = asked.take_unseen()
                asked.policy.decide(self._view)
                self.newly_waiting = ()
        return self.changes_count != before_count

    def begins_to_wait(self, program: Program) -> None:
        """Note for them that a program's turn is held."""
        for asked in self._asked:
            asked.unseen[program] = None

    def program_ended(self, program: Program) -> None:
        """Forget a program."""
        for asked in self._asked:
            asked.unseen.pop(program, None)


class _Asked:
    """A global policy, when it is asked next, and of whom it has not heard yet."""

    __slots__ = ("due_s", "policy", "unseen")

    def __init__(self, policy: GlobalPolicy) -> None:
        """Ask `policy` at the next tick."""
        self.policy = policy
        self.due_s = -inf
        self.unseen: dict[Program, None] = {}
        """Programs whose turns were held since it last heard of them, if ever."""

    def take_unseen(self) -> Sequence[Program]:
        """Take and return the first to wait that still wait, at most `NEWLY_WAITING_COUNT`."""
        told: list[Program] = []
        for program in list(self.unseen):
            if len(told) == NEWLY_WAITING_COUNT:
                break
            del self.unseen[program]
            if waits(program):
                told.append(program)
        return told


def waits(program: Program) -> bool:
    """Return whether a program waits to be let in, with a turn."""
    return bool(program.held) and not program.place.active


def next_due_s(due_s: float, now_s: float, period_s: float) -> float:
    """Return when something due at `due_s` is due again: ticks come a little early or late, and may be missed."""
    return now_s + period_s if due_s == -inf else max(due_s + period_s, now_s + period_s / 2)
