"""Held turns whose clients give up, by the time at which each must get its lease.

A client that gives up while its turn is held retries or fails, and has waited for nothing. So its turn is let in before
that, regardless of room, early enough for an answer: `ratio` of its patience is left for that, at least `margin_s`, but
never more than half.
"""

from __future__ import annotations

from math import inf
from typing import Final

from thunderagent.programs.messages import Reason
from thunderagent.programs.rules import Verbs
from thunderagent.programs.state.program import Turn
from thunderagent.programs.state.ranked_set import RankedSet

MOST_LEFT_RATIO: Final = 0.5
"""A turn is held for at least this ratio of its client's patience, however short that is."""


class Deadlines:
    """Held turns that have a deadline. Each method costs O(log turns), and nothing for a turn without one."""

    __slots__ = ("_margin_s", "_ratio", "_turns", "due_s")

    def __init__(self, margin_s: float, ratio: float) -> None:
        """Start empty."""
        self._margin_s = margin_s
        self._ratio = ratio
        self._turns: RankedSet[Turn] = RankedSet()
        self.due_s = inf
        """The earliest time at which a turn must get its lease."""

    def __len__(self) -> int:
        return len(self._turns)

    def __contains__(self, turn: Turn) -> bool:
        return turn in self._turns

    def add(self, turn: Turn) -> None:
        """Add a turn that is held from now on."""
        if turn.deadline_s < inf:
            due_s = self.due_s_of(turn)
            self._turns.add(turn, due_s)
            self.due_s = min(self.due_s, due_s)

    def discard(self, turn: Turn) -> None:
        """Remove a turn that is no longer held."""
        if turn.deadline_s < inf:
            self._turns.discard(turn)

    def due_s_of(self, turn: Turn) -> float:
        """Return when a turn must get its lease; infinite if its client never gives up."""
        patience_s = turn.deadline_s - turn.arrived_s
        if patience_s == inf:
            return inf
        left_s = min(max(self._margin_s, self._ratio * patience_s), MOST_LEFT_RATIO * patience_s)
        return turn.deadline_s - max(0.0, left_s)

    def first_due(self, now_s: float) -> Turn | None:
        """Return the turn with the earliest due time, if it is due."""
        turn = self._turns.first()
        self.due_s = inf if turn is None else self.due_s_of(turn)
        return turn if self.due_s <= now_s else None

    def settle(self, verbs: Verbs) -> None:
        """Let in due turns; reject at once those that would overdraw too much.

        A turn is also rejected if its program leaves a replica: the turns in flight there may well outlast its client.
        """
        book = verbs.book
        while book.granting_replicas and (turn := self.first_due(book.now_s)) is not None:
            program = turn.program
            assert program is not None, f"{turn} is held for its program"
            leaving = program.place.active
            if not leaving and verbs.restore_beyond_limit(program, Reason.PATIENCE):
                continue
            verbs.reject(turn, Reason.LEAVING if leaving else Reason.OVERDRAWN)
