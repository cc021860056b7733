"""Several data-parallel ranks behind one server: which one a request runs on, and their metrics side by side.

As in vLLM: `X-data-parallel-rank` chooses; without it, or if it is no number, the rank with the least to do. A waiting
request weighs as much as four running ones.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Final

from prometheus_client.core import Metric
from prometheus_client.registry import Collector

from thunderagent.simulator.embedded.metrics import EngineCollector
from thunderagent.simulator.embedded.requests import ApiError
from thunderagent.simulator.engine.realtime import RealtimeEngine

RANK_HEADER: Final = "X-data-parallel-rank"
WAITING_WEIGHT: Final = 4


def chosen_rank(header: str | None, ranks: Sequence[RealtimeEngine]) -> int:
    """Return the rank of a request. Raises `ApiError` for a missing one."""
    try:
        rank_id = int(header or "")
    except ValueError:
        return min(range(len(ranks)), key=lambda rank_id: _load(ranks[rank_id]))
    if not 0 <= rank_id < len(ranks):
        raise ApiError(f"data_parallel_rank {rank_id} is out of range [0, {len(ranks)}).")
    return rank_id


def _load(rank: RealtimeEngine) -> int:
    stats = rank.engine.stats
    return stats.running_count + WAITING_WEIGHT * stats.waiting_count


class RanksCollector(Collector):
    """Report all ranks, each family once with the samples of all of them."""

    def __init__(self, ranks: Iterable[RealtimeEngine], model: str) -> None:
        self._collectors = [EngineCollector(rank, model, rank_id) for rank_id, rank in enumerate(ranks)]

    def collect(self) -> Iterator[Metric]:
        """Yield every metric as it is now."""
        for families in zip(*(collector.collect() for collector in self._collectors), strict=True):
            for other in families[1:]:
                families[0].samples.extend(other.samples)
            yield families[0]
