"""Reports an engine under vLLM's metric names (vLLM 0.32, `vllm/v1/metrics/loggers.py`)."""

from __future__ import annotations

from typing import TYPE_CHECKING

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily
from prometheus_client.registry import Collector

if TYPE_CHECKING:
    from collections.abc import Iterator

    from prometheus_client.core import Metric

    from thunderagent.simulator.engine.realtime import RealtimeEngine
    from thunderagent.simulator.engine.records import EngineStats


class EngineCollector(Collector):
    """Read an engine whenever it is asked; the label `engine` is the data-parallel rank."""

    def __init__(self, realtime: RealtimeEngine, model: str, rank_id: int = 0) -> None:
        self._realtime = realtime
        self._labels = {"model_name": model, "engine": str(rank_id)}

    def collect(self) -> Iterator[Metric]:
        """Yield every metric as it is now."""
        stats = self._realtime.engine.stats
        yield self._config_info()
        yield self._gauge(
            "vllm:num_requests_running", "Number of requests in model execution batches.", stats.running_count
        )
        yield self._gauge(
            "vllm:num_requests_waiting", "Number of requests waiting to be processed.", stats.waiting_count
        )
        yield self._gauge(
            "vllm:num_requests_waiting_by_reason",
            "Number of waiting requests, by why they wait.",
            stats.waiting_count,
            reason="capacity",
        )
        yield self._gauge(
            "vllm:kv_cache_usage_perc", "KV-cache usage. 1 means 100 percent usage.", stats.kv_usage_ratio
        )
        for name, text, value in (
            ("vllm:num_preemptions", "Cumulative number of preemptions from the engine.", stats.preemption_count),
            ("vllm:prefix_cache_queries", "Prefix cache queries, in tokens.", stats.prefix_query_tokens),
            ("vllm:prefix_cache_hits", "Prefix cache hits, in tokens.", stats.prefix_hit_tokens),
            ("vllm:prompt_tokens", "Number of prefill tokens processed.", stats.prompt_tokens),
            ("vllm:generation_tokens", "Number of generation tokens processed.", stats.generated_tokens),
            (
                "simulator:late_iterations",
                "Iterations that were over before they could be waited for: the process is too slow.",
                self._realtime.late_iteration_count,
            ),
        ):
            yield self._counter(name, text, {(): value})
        yield self._counter(
            "vllm:prompt_tokens_by_source",
            "Number of prompt tokens by source.",
            {
                ("local_compute",): stats.computed_tokens,
                ("local_cache_hit",): max(0, stats.prompt_tokens - stats.computed_tokens),
            },
            "source",
        )
        tokens = HistogramMetricFamily(
            "vllm:iteration_tokens_total", "Histogram of number of tokens per engine_step.", labels=list(self._labels)
        )
        total_tokens = stats.computed_tokens + stats.generated_tokens
        tokens.add_metric(list(self._labels.values()), [("+Inf", stats.iteration_count)], total_tokens)
        yield tokens
        if stats.tier_block_count:
            yield from self._tier(stats)
        yield self._counter(
            "vllm:request_success",
            "Count of successfully processed requests.",
            {(reason,): self._realtime.ended_count[reason] for reason in ("stop", "length", "abort")},
            "finished_reason",
        )
        yield self._gauge("simulator:lag_seconds", "How far the engine's clock is behind.", self._realtime.lag_s)

    def _tier(self, stats: EngineStats) -> Iterator[Metric]:
        """Yield the metrics of the tier behind the pool; without one, vLLM counts nothing under these names."""
        for name, text, value in (
            ("queries", "External prefix cache queries from KV connector, in tokens.", stats.tier_query_tokens),
            ("hits", "External prefix cache hits from KV connector, in tokens.", stats.tier_hit_tokens),
        ):
            yield self._counter(f"vllm:external_prefix_cache_{name}", text, {(): value})

    def _config_info(self) -> Metric:
        config = self._realtime.engine.config
        labels = {
            "block_size": str(config.block_size),
            "enable_prefix_caching": "True",
            "engine": self._labels["engine"],
            "kv_cache_size_tokens": str(config.capacity_tokens),
            "num_gpu_blocks": str(config.block_count),
        }
        info = GaugeMetricFamily(
            "vllm:cache_config_info", "Information of the LLMEngine CacheConfig", labels=list(labels)
        )
        info.add_metric(list(labels.values()), 1)
        return info

    def _gauge(self, name: str, text: str, value: float, **extra: str) -> Metric:
        labels = self._labels | extra
        gauge = GaugeMetricFamily(name, text, labels=list(labels))
        gauge.add_metric(list(labels.values()), value)
        return gauge

    def _counter(self, name: str, text: str, values: dict[tuple[str, ...], float], *extra: str) -> Metric:
        counter = CounterMetricFamily(name, text, labels=[*self._labels, *extra])
        for extra_values, value in values.items():
            counter.add_metric([*self._labels.values(), *extra_values], value)
        return counter
