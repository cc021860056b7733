"""A scheduler's place in its cell: whether it leads, who else is there, how far its log lags."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Literal

from prometheus_client.core import GaugeMetricFamily, Metric
from pydantic import Field

from thunderagent.proxy.gate.bodies import Report


class CellReport(Report):
    """The cell of a scheduler that has gateways, or may have."""

    role: Literal["leader", "standby", "over"] = Field(description="`over` is one that steps down")
    epoch: int
    gateways_count: int = Field(description="gateways that are known, with a link or without")
    links_count: int = Field(description="gateways that have a link")
    polled_by_gateways_count: int = Field(description="engines that gateways poll")
    has_store: bool
    store_answers: bool
    has_standby: bool = Field(description="another scheduler stands by; asked a few times in `lock_s`")
    counts_may_miss: bool = Field(
        False,
        description="turns that ended shortly before a takeover may be missing in the counts: the store had lost data",
    )
    log_lag_p50_s: float | None = None
    log_lag_p99_s: float | None = None


class CellCollector:
    """The same for Prometheus, computed on each scrape."""

    def __init__(self, report: Callable[[], CellReport]) -> None:
        """Report what `report` returns."""
        self._report = report

    def collect(self) -> Iterator[Metric]:
        """Yield every family."""
        report, prefix = self._report(), "thunderagent_scheduler_"
        leads, has_store = report.role == "leader", report.has_store
        yield GaugeMetricFamily(
            f"{prefix}leads", "1 if this scheduler leads: alert where the sum over a cell is not 1.", int(leads)
        )
        yield GaugeMetricFamily(f"{prefix}epoch", "The epoch that it leads in, or the last it heard of.", report.epoch)
        yield GaugeMetricFamily(f"{prefix}gateways", "Gateways known, linked or not.", report.gateways_count)
        yield GaugeMetricFamily(f"{prefix}links", "Gateways that have a link.", report.links_count)
        yield GaugeMetricFamily(
            f"{prefix}polled_by_gateways", "Engines that gateways poll.", report.polled_by_gateways_count
        )
        yield GaugeMetricFamily(
            f"{prefix}store_answers", "1 while the store answers, or there is none.", int(report.store_answers)
        )
        yield GaugeMetricFamily(
            f"{prefix}has_standby",
            "1 while another scheduler stands by, as the leader knows; alert at 0.",
            int(report.has_standby or not (leads and has_store)),
        )
        yield GaugeMetricFamily(
            f"{prefix}counts_may_miss",
            "1 if turns may be missing in the counts: the store had lost data when a scheduler took over.",
            int(report.counts_may_miss),
        )
        lag = GaugeMetricFamily(f"{prefix}log_lag_seconds", "Time until a change was in the log.", labels=["quantile"])
        for quantile, value_s in (("0.5", report.log_lag_p50_s), ("0.99", report.log_lag_p99_s)):
            if value_s is not None:
                lag.add_metric([quantile], value_s)
        yield lag
