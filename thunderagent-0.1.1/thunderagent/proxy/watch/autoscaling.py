"""Metrics for an autoscaler of replicas: how much memory is wanted, and how long the oldest turn has waited.

Wanted is what programs claim on replicas plus what those with a turn and no claim wait for. Paused programs whose tools
run do not want anything yet. Above 1 programs wait for memory; replicas that are not up do not count.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import chain
from math import isfinite

from prometheus_client.core import GaugeMetricFamily, Metric

from thunderagent.programs.scheduler import Scheduler
from thunderagent.runtime import Runtime


def demand_ratio(schedulers: Sequence[Scheduler]) -> float | None:
    """Return the wanted memory as a ratio of what usable replicas may give; None if unknown.

    Costs O(waiting programs).
    """
    usable = [replica for scheduler in schedulers for replica in scheduler.open_replicas]
    limit_tokens = sum(replica.account.limit_tokens for replica in usable)
    if not limit_tokens or not isfinite(limit_tokens):
        return None
    claimed_tokens = sum(replica.account.demand_tokens for replica in usable)
    waiting = chain.from_iterable(scheduler.queue.with_turns() for scheduler in schedulers)
    return (claimed_tokens + sum(program.claim_tokens for program in waiting)) / limit_tokens


def oldest_hold_s(schedulers: Sequence[Scheduler], now_s: float) -> float | None:
    """Return how long the oldest waiting turn has waited; None if none waits. Costs O(turns held)."""
    waits_s: list[float] = []
    for scheduler in schedulers:
        in_place = (program.held for replica in scheduler.replicas.values() for program in replica.programs.values())
        queued = (program.held for program in scheduler.queue.with_turns())
        turns = chain(*(held.values() for held in chain(queued, in_place)), scheduler.book.anonymous_held.values())
        waits_s.extend(now_s - turn.waiting_since_s for turn in turns)
    return max(waits_s, default=None)


class AutoscalingCollector:
    """Both for Prometheus, computed on each scrape."""

    def __init__(self, runtime: Runtime) -> None:
        """Report on this."""
        self._runtime = runtime

    def collect(self) -> Iterator[Metric]:
        """Yield the two gauges, and with several pools each pool's wanted memory."""
        pools, now_s = self._runtime.pools, self._runtime.now_s()
        ratio = GaugeMetricFamily(
            "thunderagent_demand_ratio",
            "Memory that programs claim or wait for, divided by what usable replicas have; absent if unknown.",
        )
        if (value := demand_ratio(pools.schedulers)) is not None:
            ratio.add_metric([], value)
        yield ratio
        yield GaugeMetricFamily(
            "thunderagent_oldest_hold_seconds",
            "How long the longest-waiting turn has waited; 0 if none waits.",
            oldest_hold_s(pools.schedulers, now_s) or 0.0,
        )
        by_pool = GaugeMetricFamily(
            "thunderagent_pool_demand_ratio",
            "The demand ratio of a pool; only where there are several.",
            labels=["pool"],
        )
        oldest = GaugeMetricFamily(
            "thunderagent_pool_oldest_hold_seconds",
            "How long the longest-waiting turn of a pool has waited.",
            labels=["pool"],
        )
        waiting = GaugeMetricFamily("thunderagent_pool_waiting", "Programs of a pool that wait.", labels=["pool"])
        replicas = GaugeMetricFamily(
            "thunderagent_pool_replica",
            "1 for each replica, with its pool; only where there are several.",
            labels=["pool", "replica"],
        )
        for pool in pools.all if pools.several else ():
            if (value := demand_ratio([pool.scheduler])) is not None:
                by_pool.add_metric([pool.name], value)
            oldest.add_metric([pool.name], oldest_hold_s([pool.scheduler], now_s) or 0.0)
            waiting.add_metric([pool.name], pool.scheduler.queue.waiting_count)
            for replica_id in pool.listed:
                replicas.add_metric([pool.name, replica_id], 1)
        yield from (by_pool, oldest, waiting, replicas)
