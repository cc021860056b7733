"""The engine's numbers as Prometheus metrics, with the prefix `nova:` by which the proxy knows its kind."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Final

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric

from thunderagent_nova.messages import Serving, Stats

GAUGES: Final[dict[str, tuple[str, Callable[[Stats], float]]]] = {
    "nova:num_requests_running": ("Requests that a stage works on.", lambda stats: stats.running),
    "nova:num_requests_waiting": ("Requests that wait for a stage.", lambda stats: stats.waiting),
    "nova:pending_encode": ("Requests that are encoded or wait for it.", lambda stats: stats.pending_encode),
    "nova:pending_prefill": ("Requests that are prefilled or wait for it.", lambda stats: stats.pending_prefill),
    "nova:decoding": ("Requests that are decoded.", lambda stats: stats.decoding),
    "nova:slots": ("Requests that fit at the same time.", lambda stats: stats.slots),
    "nova:slots_used": ("Slots that requests hold.", lambda stats: stats.slots_used),
    "nova:slots_kept": ("Slots that programs keep between turns.", lambda stats: stats.slots_kept),
    "nova:slot_tokens": ("Tokens that fit in a slot.", lambda stats: stats.slot_tokens),
    "nova:split_units": ("Units that decoding has beside another stage; 0: all.", lambda stats: stats.split or 0),
    "nova:cached_images": ("Images whose encoding is kept.", lambda stats: stats.cached_images),
}


class StatsCollector:
    """The engine's numbers as metrics, read when they are asked for."""

    def __init__(self, engine: Serving) -> None:
        self._engine = engine

    def collect(self) -> Iterator[Metric]:
        """Yield every metric."""
        stats = self._engine.stats()
        for name, (what, value_of) in GAUGES.items():
            yield GaugeMetricFamily(name, what, value=value_of(stats))
        seconds = CounterMetricFamily("nova:stage_seconds", "Seconds that passes of a stage took.", labels=["stage"])
        passes = CounterMetricFamily("nova:stage_passes", "Passes of a stage.", labels=["stage"])
        for stage in ("encode", "prefill", "decode"):
            seconds.add_metric([stage], stats.stage_s.get(stage, 0.0))
            passes.add_metric([stage], stats.stage_passes.get(stage, 0))
        yield seconds
        yield passes
