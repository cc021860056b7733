"""What an autoscaler of replicas goes by: how much of their memory is wanted, and how long the oldest turn has waited.

What is wanted is what programs claim on replicas and what those wait for that have a turn and no claim. Paused programs
whose tools run want nothing yet. Above 1 programs wait for memory; replicas that are not up count for nothing.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import chain
from math import isfinite

from prometheus_client.core import GaugeMetricFamily, Metric

from thunderagent.runtime import Runtime


def demand_ratio(runtime: Runtime) -> float | None:
    """Return the memory that is wanted as a part of what usable replicas may give; None where that is not known.

    Costs O(programs that wait).
    """
    scheduler = runtime.scheduler
    usable = scheduler.open_replicas
    limit_tokens = sum(replica.account.limit_tokens for replica in usable)
    if not limit_tokens or not isfinite(limit_tokens):
        return None
    claimed_tokens = sum(replica.account.demand_tokens for replica in usable)
    return (claimed_tokens + sum(program.claim_tokens for program in scheduler.queue.with_turns())) / limit_tokens


def oldest_hold_s(runtime: Runtime) -> float | None:
    """Return how long the turn has waited that has waited longest; None if none waits. Costs O(turns held)."""
    scheduler, now_s = runtime.scheduler, runtime.now_s()
    in_place = (program.held for replica in scheduler.replicas.values() for program in replica.programs.values())
    queued = (program.held for program in scheduler.queue.with_turns())
    turns = chain(*(held.values() for held in chain(queued, in_place)), scheduler.book.anonymous_held.values())
    return max((now_s - turn.waiting_since_s for turn in turns), default=None)


class AutoscalingCollector:
    """Both for Prometheus, read when somebody asks."""

    def __init__(self, runtime: Runtime) -> None:
        """Report on this."""
        self._runtime = runtime

    def collect(self) -> Iterator[Metric]:
        """Yield the two gauges."""
        ratio = GaugeMetricFamily(
            "thunderagent_demand_ratio",
            "Memory that programs claim or wait for, as a part of what usable replicas may give; absent if unknown.",
        )
        if (value := demand_ratio(self._runtime)) is not None:
            ratio.add_metric([], value)
        yield ratio
        yield GaugeMetricFamily(
            "thunderagent_oldest_hold_seconds",
            "How long the turn has waited that has waited longest; 0 if none waits.",
            oldest_hold_s(self._runtime) or 0.0,
        )
