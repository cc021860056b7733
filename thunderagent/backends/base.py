"""What every engine kind must be able to say about a replica, whatever it calls it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol


@dataclass(frozen=True, slots=True)
class ReplicaReading:
    """Hold what one poll of one replica said; None is what it did not say, which is never the same as zero.

    Counts and totals are sums over the replica's data-parallel ranks, ratios the mean over them. Totals start
    again from zero when the engine does.

    - `capacity_tokens`: the size of the KV pool. Never zero: an engine that claims no pool has not said its
      size.
    - `kv_used_ratio`: 0 to 1; the part of the pool that running requests reference. Blocks that are only
      cached count as free, so a program whose tool runs is invisible here.
    - `running_count`, `waiting_count`: requests in the engine's batch, and in its queue.
    - `preemptions_total`: requests thrown out of the batch for want of blocks; an engine where it grows
      thrashes.
    - `cache_query_tokens_total`, `cache_hit_tokens_total`: prompt tokens looked up in the prefix cache, and
      found there.
    """

    capacity_tokens: int | None = None
    kv_used_ratio: float | None = None
    running_count: int | None = None
    waiting_count: int | None = None
    preemptions_total: float | None = None
    cache_query_tokens_total: float | None = None
    cache_hit_tokens_total: float | None = None


NOTHING_READ = ReplicaReading()


class Backend(Protocol):
    """Know one engine kind: where it tells its health and its metrics, and what the metrics mean."""

    @property
    def kind(self) -> str:
        """Return the word for this kind in the configuration."""

    @property
    def metrics_path(self) -> str:
        """Return the path of the Prometheus exposition, from the replica's URL."""

    @property
    def health_path(self) -> str:
        """Return the path that answers 2xx while the engine can serve, from the replica's URL."""

    @property
    def observed_paths(self) -> tuple[str, ...]:
        """Return the paths whose JSON tells `is_paused` or `weight_version`; an engine may not serve them."""

    def read_metrics(self, exposition: str) -> ReplicaReading:
        """Read an exposition; never raise: what cannot be read is None in the reading."""
