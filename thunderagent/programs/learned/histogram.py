"""A histogram on a logarithmic scale that forgets slowly: quantiles of what was seen lately, in constant memory."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence

REMEMBERED_COUNT = 2000.0
"""Values that count: beyond, all counts are halved, so that the newest half weighs as much as all before."""


class LogHistogram:
    """Counts of values between edges that grow by a constant factor; values below the first edge are one bin."""

    __slots__ = ("_counts", "_edges", "_known_quantiles", "_total")

    def __init__(self, edges: Sequence[float]) -> None:
        """Begin empty; `edges` ascend. Bin 0 is below the first edge, the last is above the last edge."""
        self._edges = edges
        self._counts = [0.0] * (len(edges) + 1)
        self._total = 0.0
        self._known_quantiles: dict[float, float] = {}

    @property
    def total(self) -> float:
        """Values that count."""
        return self._total

    def add(self, value: float) -> None:
        """Count a value. Cost: O(log bins)."""
        self._counts[bisect_right(self._edges, value)] += 1.0
        self._total += 1.0
        self._known_quantiles.clear()
        if self._total > REMEMBERED_COUNT:
            self._counts = [count / 2 for count in self._counts]
            self._total /= 2

    def quantile(self, ratio: float, default: float) -> float:
        """Return the value that `ratio` of all are below, between edges in proportion; `default` without values."""
        if not self._total:
            return default
        known = self._known_quantiles.get(ratio)
        if known is None:
            known = self._known_quantiles[ratio] = self._quantile(ratio)
        return known

    def _quantile(self, ratio: float) -> float:
        wanted = ratio * self._total
        for index, count in enumerate(self._counts):
            if count and wanted <= count:
                low = self._edges[index - 1] if index else 0.0
                high = self._edges[min(index, len(self._edges) - 1)]
                return low + (high - low) * wanted / count
            wanted -= count
        return self._edges[-1]


def geometric_edges(first: float, step_ratio: float, count: int) -> tuple[float, ...]:
    """Return `count` edges from `first` on, each `step_ratio` times the one before."""
    return tuple(first * step_ratio**index for index in range(count))
