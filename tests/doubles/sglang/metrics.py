"""Report an engine under SGLang's metric names (0.5, `observability/metrics_collector.py`)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.registry import Collector

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from prometheus_client.core import Metric

    from tests.doubles.sglang.kv_tags import KvTags
    from thunderagent.simulator.engine.realtime import RealtimeEngine


@dataclass(slots=True)
class TokenCounts:
    """SGLang's counts at the end of a request."""

    prompt_tokens: int = 0
    generated_tokens: int = 0
    cached_tokens: int = 0
    requests_count: int = 0
    aborted_count: int = 0


class SglangCollector(Collector):
    """Reads an engine at each collection; it is the only data-parallel rank."""

    def __init__(self, realtime: RealtimeEngine, model: str, counts: TokenCounts, tags: KvTags) -> None:
        self._realtime = realtime
        self._counts = counts
        self._tags = tags
        self._model = {"model_name": model}
        ranks = {"engine_type": "unified", "tp_rank": "0", "pp_rank": "0", "dp_rank": "0"}
        self._rank = self._model | ranks

    def collect(self) -> Iterator[Metric]:
        """Yield the current value of every metric."""
        realtime, counts = self._realtime, self._counts
        stats, config = realtime.engine.stats, realtime.engine.config
        used_tokens = stats.used_block_count * config.block_size
        gauges: tuple[tuple[str, str, float], ...] = (
            ("sglang:num_running_reqs", "The number of running requests.", stats.running_count),
            ("sglang:num_queue_reqs", "The number of requests in the waiting queue.", stats.waiting_count),
            ("sglang:token_usage", "The token usage.", stats.kv_usage_ratio),
            ("sglang:num_used_tokens", "The number of used tokens.", used_tokens),
            ("sglang:kv_used_tokens", "Tokens of the KV pool that requests hold.", used_tokens),
            ("sglang:max_total_num_tokens", "Maximum total number of tokens in the KV pool.", config.capacity_tokens),
        )
        for name, text, value in gauges:
            yield _family(GaugeMetricFamily, name, text, value, self._rank)
        retracted = "Total number of retracted requests."
        name = "sglang:num_retracted_requests"
        yield _family(CounterMetricFamily, name, retracted, stats.preemption_count, self._rank)
        for name, text, value, labels in (
            ("prompt_tokens", "Number of prefill tokens processed.", counts.prompt_tokens, {}),
            ("generation_tokens", "Number of generation tokens processed.", counts.generated_tokens, {}),
            ("cached_tokens", "Number of cached prompt tokens.", counts.cached_tokens, {"cache_source": "device"}),
            ("num_requests", "Number of requests processed.", counts.requests_count, {}),
            ("num_aborted_requests", "Number of requests aborted.", counts.aborted_count, {}),
        ):
            yield _family(CounterMetricFamily, f"sglang:{name}", text, value, self._model | labels)
        late = "Iterations that were over before they could be waited for: the process is too slow."
        yield _family(CounterMetricFamily, "simulator:late_iterations", late, realtime.late_iteration_count, {})
        yield _family(GaugeMetricFamily, "simulator:lag_seconds", "How far its clock is behind.", realtime.lag_s, {})
        tagged_tokens = self._tags.tagged_count * config.block_size
        yield _family(GaugeMetricFamily, "simulator:tagged_tokens", "Tokens that open sessions tag.", tagged_tokens, {})


def _family(
    make: Callable[..., GaugeMetricFamily | CounterMetricFamily],
    name: str,
    text: str,
    value: float,
    labels: dict[str, str],
) -> Metric:
    family = make(name, text, labels=list(labels))
    family.add_metric(list(labels.values()), value)
    return family
