"""How many turns may be retried: a ratio of all turns, so that failing replicas are not buried under retries."""

# compiled: each turn passes here

from __future__ import annotations

from dataclasses import dataclass
from typing import Final


@dataclass(frozen=True, slots=True)
class RetrySettings:
    """How often turns are retried after a replica failed them before the first byte."""

    retries_count: int = 2
    """Per turn. A client that retries says how often it did: we retry that many fewer times, so that its retries and
    ours do not multiply."""
    budget_ratio: float = 0.2
    """Ratio of all turns in the last window or two; Envoy's and Finagle's budget."""
    budget_min_count: int = 100
    """Per window, however few turns there are: all that a lost replica had in flight may go elsewhere."""
    window_s: float = 30.0


DEFAULT_RETRIES: Final = RetrySettings()


class RetryBudget:
    """Counts turns and retries of this window and the one before. O(1) for each."""

    __slots__ = ("_earlier", "_ends_s", "_retries_count", "_settings", "_turns_count", "_window", "refused_count")

    def __init__(self, settings: RetrySettings) -> None:
        """Start with empty counts."""
        self._settings = settings
        self._window = 0
        self._ends_s = 0.0
        """When the window ends."""
        self._turns_count = self._retries_count = 0
        self._earlier = 0, 0
        self.refused_count = 0
        """Retries that the turn itself had left, but the budget had not."""

    def turn_came(self, now_s: float) -> None:
        """Count a turn."""
        if now_s >= self._ends_s:
            self._step(now_s)
        self._turns_count += 1

    def may_retry(self, now_s: float, tries_count: int, client_retry_count: int) -> bool:
        """Return whether a turn with this many tries may be tried once more, and count that."""
        settings = self._settings
        if tries_count > settings.retries_count - client_retry_count:
            return False
        self._step(now_s)
        turns_count = self._turns_count + self._earlier[0]
        retries_count = self._retries_count + self._earlier[1]
        if retries_count >= max(settings.budget_min_count, settings.budget_ratio * turns_count):
            self.refused_count += 1
            return False
        self._retries_count += 1
        return True

    def _step(self, now_s: float) -> None:
        window = int(now_s // self._settings.window_s)
        if window == self._window:
            return
        self._earlier = (self._turns_count, self._retries_count) if window == self._window + 1 else (0, 0)
        self._turns_count = self._retries_count = 0
        self._window = window
        self._ends_s = (window + 1) * self._settings.window_s
