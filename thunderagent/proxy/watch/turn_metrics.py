"""Metrics of turns and of the event loop that carries them: counted where it happens.

All of it belongs to one event loop and needs no lock. A turn costs six or seven values, each found by bisection.
"""

# compiled: each turn is counted

from __future__ import annotations

import asyncio
from bisect import bisect_left
from collections.abc import Iterator, Sequence
from itertools import accumulate
from math import inf
from time import time
from typing import Final

from prometheus_client import CollectorRegistry
from prometheus_client import Counter as CounterMetric
from prometheus_client.core import HistogramMetricFamily, Metric
from prometheus_client.utils import floatToGoString

HOLD_BUCKETS_S = (0.001, 0.01, 0.1, 0.5, 1, 2, 5, 10, 20, 40, 60, 120, 300, 600, 1800)
ADDED_BUCKETS_S = (0.0001, 0.0002, 0.0005, 0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 1)
FIRST_TOKEN_BUCKETS_S = (0.01, 0.02, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 20, 40, 80, 160, 640, 2560)
BETWEEN_TOKENS_BUCKETS_S = (0.005, 0.01, 0.02, 0.03, 0.04, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.5, 1, 2.5, 10)
DURATION_BUCKETS_S = (0.1, 0.25, 0.5, 1, 2.5, 5, 10, 20, 40, 60, 120, 300, 600, 1800, 7200)
LAG_BUCKETS_S = (0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.25, 0.5, 1, 5)

PERCENTILE_BUCKETS_S: Final = tuple(0.001 * 2 ** (number / 4) for number in range(93))
"""Of the percentiles that the history keeps: 1 ms to 2 h 20 min, each 19 % above the last, so they are that exact."""

LAG_PERIOD_S: Final = 0.1
"""How often the event loop's lag is measured."""

NO_STATUS: Final = "none"
"""The status of a turn whose client left before there was one."""

Labels = tuple[str, ...]


class Series:
    """The values of one histogram under one set of labels."""

    __slots__ = ("_created_s", "bucket_counts", "buckets", "total")

    def __init__(self, buckets: Sequence[float]) -> None:
        """Start empty; `buckets` end with infinity."""
        self.buckets = buckets
        self.bucket_counts = [0] * len(buckets)
        """How many values were in each bucket, those above all bounds last."""
        self.total = 0.0
        self._created_s = time()

    def counts_up_to(self) -> tuple[int, ...]:
        """Return how many values were up to each bucket's bound, the total last."""
        return tuple(accumulate(self.bucket_counts))

    def add_to(self, family: HistogramMetricFamily, name: str, labels: dict[str, str]) -> None:
        """Add the counts to a family."""
        named = [*zip(map(floatToGoString, self.buckets), self.counts_up_to(), strict=True)]
        family.add_metric(list(labels.values()), named, self.total)
        family.add_sample(f"{name}_created", labels, self._created_s)


class Histogram:
    """A histogram as in `prometheus_client`, for one event loop: the original takes two locks for each value."""

    def __init__(
        self,
        name: str,
        documentation: str,
        buckets: Sequence[float],
        registry: CollectorRegistry,
        labels: Labels = (),
    ) -> None:
        """Register it, with `buckets` and one above them. Without labels it has its series at once."""
        self._name = name
        self._documentation = documentation
        self._buckets = (*map(float, buckets), inf)
        self._labels = labels
        self.series: dict[Labels, Series] = {}
        """By the values of the labels."""
        if not labels:
            self.begin(())
        registry.register(self)

    def observe(self, value: float) -> None:
        """Count a value, if it has no labels."""
        series = self.series[()]
        series.bucket_counts[bisect_left(series.buckets, value)] += 1
        series.total += value

    def begin(self, labels: Labels) -> Series:
        """Return the series of these label values, which begins now."""
        series = self.series[labels] = Series(self._buckets)
        return series

    def forget(self, value: str) -> None:
        """Remove all series whose first label has this value."""
        for values in [values for values in self.series if values[0] == value]:
            del self.series[values]

    def collect(self) -> Iterator[Metric]:
        """Yield the family."""
        family = HistogramMetricFamily(self._name, self._documentation, labels=self._labels)
        for values, series in self.series.items():
            series.add_to(family, self._name, dict(zip(self._labels, values, strict=True)))
        yield family


class TurnMetrics:
    """Histograms and counters that the hot path fills."""

    def __init__(self, registry: CollectorRegistry) -> None:
        """Register them."""
        of_turns: Labels = ("replica", "status")
        self._hold = Histogram(
            "thunderagent_hold_seconds",
            "Time that a turn waited for its lease, counted when it is granted.",
            HOLD_BUCKETS_S,
            registry,
        )
        self._added = Histogram(
            "thunderagent_added_latency_seconds",
            "Time from a turn's arrival, or from a failed attempt's end, to its forwarding, without the hold.",
            ADDED_BUCKETS_S,
            registry,
        )
        self._hold_series, self._added_series = self._hold.series[()], self._added.series[()]
        self._first_token = Histogram(
            "thunderagent_time_to_first_token_seconds",
            "TTFT: time from a turn's arrival, its hold included, to the first bytes of its stream.",
            FIRST_TOKEN_BUCKETS_S,
            registry,
            of_turns,
        )
        self._between_tokens = Histogram(
            "thunderagent_time_between_tokens_seconds",
            "Mean time between two events of a stream; one value for each stream.",
            BETWEEN_TOKENS_BUCKETS_S,
            registry,
            of_turns,
        )
        self._duration = Histogram(
            "thunderagent_turn_duration_seconds",
            "Time from a turn's arrival to the end of its answer; status none: the client left.",
            DURATION_BUCKETS_S,
            registry,
            of_turns,
        )
        self._retries = CounterMetric(
            "thunderagent_retries",
            "Retries on another replica: made, or over_budget.",
            ["outcome"],
            registry=registry,
        )
        for outcome in ("made", "over_budget"):
            self._retries.labels(outcome)
        self._percentiles_of = [[0] * (len(PERCENTILE_BUCKETS_S) + 1) for _ in range(3)]
        """Of all turns together, for the history: time held, to the first token, and to the end of the answer."""

    def turn_granted(self, held_s: float, added_s: float) -> None:
        """Count how long a turn waited for its lease, and the other added latency."""
        series = self._hold_series
        if held_s:
            self._percentiles_of[0][bisect_left(PERCENTILE_BUCKETS_S, held_s)] += 1
            series.bucket_counts[bisect_left(series.buckets, held_s)] += 1
            series.total += held_s
        else:  # as most: that is below each bound
            self._percentiles_of[0][0] += 1
            series.bucket_counts[0] += 1
        series = self._added_series
        series.bucket_counts[bisect_left(series.buckets, added_s)] += 1
        series.total += added_s

    def turn_ended(
        self,
        replica_id: str | None,
        status: int | None,
        duration_s: float,
        first_s: float | None = None,
        between_s: float | None = None,
    ) -> None:
        """Count a turn by its total time; a stream also by the time to its first bytes, and between its events."""
        labels = replica_id or "", NO_STATUS if status is None else str(status)
        series = self._duration.series.get(labels) or self._duration.begin(labels)
        series.bucket_counts[bisect_left(series.buckets, duration_s)] += 1
        series.total += duration_s
        if first_s is not None:
            series = self._first_token.series.get(labels) or self._first_token.begin(labels)
            series.bucket_counts[bisect_left(series.buckets, first_s)] += 1
            series.total += first_s
            self._percentiles_of[1][bisect_left(PERCENTILE_BUCKETS_S, first_s)] += 1
        if between_s is not None:
            series = self._between_tokens.series.get(labels) or self._between_tokens.begin(labels)
            series.bucket_counts[bisect_left(series.buckets, between_s)] += 1
            series.total += between_s
        if status is not None and status < 400:
            self._percentiles_of[2][bisect_left(PERCENTILE_BUCKETS_S, duration_s)] += 1

    def replica_removed(self, replica_id: str) -> None:
        """Remove the series of a replica."""
        for histogram in (self._first_token, self._between_tokens, self._duration):
            histogram.forget(replica_id)

    def latency_counts(self) -> tuple[tuple[int, ...], ...]:
        """Return how many turns were in each of `PERCENTILE_BUCKETS_S`, and above, by their times.

        First by the time held, then to the first token of a stream, then to the end of an answer that is no error.
        """
        return tuple(map(tuple, self._percentiles_of))

    def count_retry(self, outcome: str) -> None:
        """Count a retry, `made` or `over_budget`."""
        self._retries.labels(outcome).inc()


class LoopLag:
    """The event loop's lag: everything that it carries waits this long, and no other metric shows it."""

    def __init__(self, registry: CollectorRegistry) -> None:
        """Register it."""
        self._lag = Histogram(
            "thunderagent_event_loop_lag_seconds",
            "How late the event loop runs; everything the proxy carries waits this long.",
            LAG_BUCKETS_S,
            registry,
        )

    async def run(self) -> None:
        """Measure until cancelled."""
        loop = asyncio.get_running_loop()
        while True:
            due_s = loop.time() + LAG_PERIOD_S
            await asyncio.sleep(LAG_PERIOD_S)
            self._lag.observe(max(0.0, loop.time() - due_s))
