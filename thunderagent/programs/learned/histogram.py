"""A logarithmic histogram that forgets slowly: quantiles of recent values, in constant memory."""

from __future__ import annotations

from collections.abc import Sequence
from math import inf
from typing import Final

from thunderagent.programs.messages import HistogramRecord

REMEMBERED_COUNT: Final = 2000.0
"""Values that count: above it all counts are halved, so the newest half weighs as much as all before."""

SLACK: Final = 1e-3
"""By how much sums of counts may differ if they were added in another order."""

MOST_TOKENS: Final = 1e9
"""A larger mean of tokens is not believed."""


class LogHistogram:
    """Counts of values between edges that grow by a constant factor; values below the first edge are one bin."""

    __slots__ = ("_below", "_counts", "_edges", "_index", "total")

    def __init__(self, edges: Sequence[float]) -> None:
        """Create an empty histogram; `edges` ascend. Bin 0 is below the first edge, the last is above the last edge."""
        self._edges: tuple[float, ...] = tuple(edges)
        self._counts = [0.0] * (len(edges) + 1)
        self.total = 0.0
        """Values that count."""
        self._index = 0
        """The bin of the last quantile: the next one is mostly there, or in a bin beside it."""
        self._below = 0.0
        """How many values are below that bin."""

    def add(self, value: float) -> None:
        """Count a value. Cost: O(log bins)."""
        edges = self._edges
        index, end = 0, len(edges)
        while index < end:  # compiled, `bisect` takes five times as long
            middle = (index + end) // 2
            if value < edges[middle]:
                end = middle
            else:
                index = middle + 1
        self._counts[index] += 1.0
        self.total += 1.0
        if index < self._index:
            self._below += 1.0
        if self.total > REMEMBERED_COUNT:
            self._counts = [count / 2 for count in self._counts]
            self.total /= 2
            self._index, self._below = 0, 0.0

    def export(self) -> HistogramRecord:
        """Return its content."""
        return HistogramRecord(tuple(self._counts), self.total)

    def adopt(self, record: HistogramRecord) -> None:
        """Adopt another's content. Raises ValueError if it has other edges or impossible values."""
        check_counts(record.counts, len(self._counts))
        check_range("values", record.total - sum(record.counts), (-SLACK, SLACK))
        self._counts, self.total = list(record.counts), record.total
        self._index, self._below = 0, 0.0

    def quantile(self, ratio: float, default: float) -> float:
        """Return the value below which `ratio` of all lie, interpolated between edges; `default` if empty."""
        if not self.total:
            return default
        counts, index, below, wanted = self._counts, self._index, self._below, ratio * self.total
        while index and wanted <= below:
            index -= 1
            below -= counts[index]
        while not counts[index] or wanted - below > counts[index]:
            if index == len(self._edges):
                return self._edges[-1]
            below += counts[index]
            index += 1
        self._index, self._below = index, below
        low = self._edges[index - 1] if index else 0.0
        high = self._edges[index] if index < len(self._edges) else self._edges[-1]
        return low + (high - low) * (wanted - below) / counts[index]


def check_counts(counts: Sequence[float], bins_count: int) -> None:
    """Raise ValueError unless these are `bins_count` valid counts."""
    if len(counts) != bins_count or not all(0 <= each < inf for each in counts):
        raise ValueError(f"not {bins_count} counts")


def check_range(what: str, value: float, bounds: tuple[float, float]) -> None:
    """Raise ValueError if a value is infinite or outside of these inclusive bounds."""
    least, most = bounds
    if not (least <= value <= most and value < inf):
        raise ValueError(f"{what}: {value} is not from {least} to {most}")


def geometric_edges(first: float, step_ratio: float, count: int) -> tuple[float, ...]:
    """Return `count` edges from `first` on, each `step_ratio` times the previous one."""
    return tuple(first * step_ratio**index for index in range(count))


TOKEN_S_EDGES: Final = geometric_edges(1e-7, 2**0.25, 110)
"""A tenth of a microsecond to 20 seconds."""
