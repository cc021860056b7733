"""How often judges were right, as far as clients say what became of their programs."""

from __future__ import annotations

from bisect import bisect_left

from thunderagent.programs.model.verdicts import OUTCOMES, Level

TURN_EDGES_COUNT = (5, 10, 15, 20, 30, 40, 60, 80)
"""Turns by which recall is told."""


class JudgeRecord:
    """After how many turns programs were predicted to fail, by what became of them."""

    __slots__ = ("_counts", "level_counts", "program_counts")

    def __init__(self) -> None:
        """Begin with nobody."""
        self.program_counts = dict.fromkeys(OUTCOMES, 0)
        """Programs that ended so."""
        self.level_counts = dict.fromkeys(Level, 0)
        """Verdicts by the level that they made."""
        self._counts = {outcome: [0] * (len(TURN_EDGES_COUNT) + 1) for outcome in OUTCOMES}

    def program_ended(self, outcome: str, first_failure_turn_count: int | None) -> None:
        """Take in a program with an outcome; None was never predicted to fail."""
        self.program_counts[outcome] += 1
        if first_failure_turn_count is not None:
            self._counts[outcome][bisect_left(TURN_EDGES_COUNT, first_failure_turn_count)] += 1

    def predicted_ratio(self, outcome: str, turn_count: int) -> float | None:
        """Return the part of the programs with that outcome that were predicted to fail by that turn, an edge.

        Of `FAILURE` that is the recall, of `SUCCESS` the part of false alarms; None before the first such program.
        """
        edges_count = TURN_EDGES_COUNT.index(turn_count) + 1
        whole_count = self.program_counts[outcome]
        return sum(self._counts[outcome][:edges_count]) / whole_count if whole_count else None
