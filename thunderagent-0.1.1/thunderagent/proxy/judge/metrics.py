"""The judge's part of `/metrics`: questions, verdicts, failures, and cost."""

from __future__ import annotations

from collections.abc import Iterator

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric

from thunderagent.proxy.judge.answer import Failure
from thunderagent.proxy.judge.judge import Judge


class JudgeCollector:
    """Reads a judge's counts on each scrape."""

    def __init__(self, judge: Judge) -> None:
        """Report on this one."""
        self._judge = judge

    def collect(self) -> Iterator[Metric]:
        """Yield every family."""
        judge = self._judge
        yield GaugeMetricFamily("thunderagent_judge_waiting", "Programs waiting for the judge.", judge.waiting_count)
        yield GaugeMetricFamily("thunderagent_judge_asking", "Open questions to the judge.", judge.asking_count)
        verdicts = CounterMetricFamily(
            "thunderagent_judge_verdicts", "Verdicts of the judge by prediction.", labels=["prediction"]
        )
        for prediction in ("success", "failure"):
            verdicts.add_metric([prediction], judge.verdict_counts[prediction])
        yield verdicts
        failures = CounterMetricFamily(
            "thunderagent_judge_failures", "Questions without a verdict, by why.", labels=["why"]
        )
        for why in Failure:
            failures.add_metric([why.value], judge.failure_counts[why])
        yield failures
        dropped = CounterMetricFamily(
            "thunderagent_judge_dropped", "Questions that were never asked: full, newer, ended.", labels=["why"]
        )
        for reason in ("full", "newer", "ended"):
            dropped.add_metric([reason], judge.dropped_counts[reason])
        yield dropped
        tokens = CounterMetricFamily(
            "thunderagent_judge_tokens", "Tokens that the judge used: prompt, output.", labels=["kind"]
        )
        tokens.add_metric(["prompt"], judge.prompt_tokens_total)
        tokens.add_metric(["output"], judge.output_tokens_total)
        yield tokens
        yield CounterMetricFamily(
            "thunderagent_judge_seconds", "Total time that questions to the judge took.", judge.asked_s_total
        )
