"""The pace of the paused queue: when a waiting program will be restored.

When a waiting program will be restored is learned from how fast the queue moved lately. Time in which the policy could
restore nobody who waits says nothing about that, so only waiting time counts. Restores and time are forgotten at the
same pace: their quotient is the time between two restores.
"""

from __future__ import annotations

from math import inf
from typing import Final

from thunderagent.programs.learned.histogram import check_range

HALF_LIFE_S: Final = 120.0
"""Waiting time after which a restore counts half: a few turns of every program."""

LONGEST_INTERVAL_S: Final = 3600.0
"""The longest wait that is told: after this time without a restore, the pace is unknown."""

LEAST_RESTORES_COUNT: Final = 1e-6
"""This much is never forgotten: that a restore was seen."""


class RestorePace:
    """The pace of the paused queue."""

    __slots__ = ("_accrued_s", "_restore_count", "_waited_s", "restored_total", "waiting")

    def __init__(self) -> None:
        """Start with nothing seen."""
        self._restore_count = 0.0
        self.restored_total = 0
        """Restores in this process, none forgotten."""
        self._waited_s = 0.0
        self.waiting = False
        self._accrued_s = 0.0

    @property
    def interval_s(self) -> float:
        """Time between two restores while somebody waits; until one was seen, how long one was waited for."""
        return min(LONGEST_INTERVAL_S, self._waited_s / (self._restore_count or 1.0))

    def export(self) -> tuple[float, float]:
        """Return the number of recent restores, and their seconds of waiting."""
        return self._restore_count, self._waited_s

    def adopt(self, restores: tuple[float, float]) -> None:
        """Adopt what another process learned. Raises ValueError for impossible values."""
        for each in restores:
            check_range("restores", each, (0.0, inf))
        self._restore_count, self._waited_s = restores

    def accrue(self, now_s: float, *, waiting: bool) -> None:
        """Count the time since the last call if somebody waited in it; `waiting` says whether somebody does now.

        Call it when that changes, and now and then, because older time counts less.
        """
        if self.waiting and now_s > self._accrued_s:
            passed_s = now_s - self._accrued_s
            kept_ratio = 0.5 ** (passed_s / HALF_LIFE_S)
            if self._restore_count:
                self._restore_count = max(LEAST_RESTORES_COUNT, self._restore_count * kept_ratio)
            self._waited_s = self._waited_s * kept_ratio + passed_s
        self._accrued_s = now_s
        self.waiting = waiting

    def restored(self, now_s: float) -> None:
        """Count the restore of a program that had waited."""
        self.accrue(now_s, waiting=self.waiting)
        self._restore_count += 1.0
        self.restored_total += 1
