"""The hot path's own histogram equals the library's; decisions have the same names as in logs."""

from __future__ import annotations

import prometheus_client
import pytest
from prometheus_client import CollectorRegistry, generate_latest

from tests.builders import Driver
from thunderagent.policy_loader import load_policy
from thunderagent.programs.messages import Reason, SchedulerSettings, SetRoute
from thunderagent.programs.scheduler import Scheduler
from thunderagent.proxy.fleet.replicas import Replicas
from thunderagent.proxy.watch.metrics import NAMED_TENANTS_COUNT, OTHER_TENANTS, StateCollector
from thunderagent.proxy.watch.turn_metrics import ADDED_BUCKETS_S, HOLD_BUCKETS_S, Histogram, TurnMetrics
from thunderagent.runtime import Runtime

VALUES = (0, 0.0001, 0.00015, 0.5, 1, 3, 1800, 2000, 1e-9)


def without_time(exposition: bytes) -> list[str]:
    """Return the lines without the histogram's creation time."""
    return [line for line in exposition.decode().splitlines() if not line.startswith("x_seconds_created ")]


@pytest.mark.parametrize("buckets", [ADDED_BUCKETS_S, HOLD_BUCKETS_S])
@pytest.mark.parametrize("values", [(), VALUES])
def test_a_histogram_is_exposed_as_the_librarys_is(buckets: tuple[float, ...], values: tuple[float, ...]) -> None:
    theirs, ours = CollectorRegistry(), CollectorRegistry()
    their_histogram = prometheus_client.Histogram("x_seconds", "What it is.", buckets=buckets, registry=theirs)
    our_histogram = Histogram("x_seconds", "What it is.", buckets, ours)
    for value in values:
        their_histogram.observe(value)
        our_histogram.observe(value)
    assert without_time(generate_latest(ours)) == without_time(generate_latest(theirs))
    assert len(generate_latest(ours).splitlines()) == len(generate_latest(theirs).splitlines())
    assert our_histogram.series[()].counts_up_to()[-1] == len(values)


def test_a_stream_is_counted_where_its_turn_is() -> None:
    """All its times have the labels of its total time: one whose replica is gone begins no series of that again."""
    registry = CollectorRegistry()
    metrics = TurnMetrics(registry)
    metrics.turn_ended("r0", 200, 3.0, 1.0, 0.5)
    metrics.turn_ended("r0", 200, 2.0)
    metrics.replica_removed("r0")
    metrics.turn_ended(None, 200, 4.0, 2.0)
    names = ("time_to_first_token", "time_between_tokens", "turn_duration")
    for name, total_s in zip(names, (2.0, None, 4.0), strict=True):
        said_s = registry.get_sample_value(f"thunderagent_{name}_seconds_sum", {"replica": "", "status": "200"})
        assert said_s == total_s
        assert registry.get_sample_value(f"thunderagent_{name}_seconds_sum", {"replica": "r0", "status": "200"}) is None


def test_a_decision_of_two_words_is_called_what_logs_and_events_call_it() -> None:
    runtime = Runtime(Scheduler(load_policy("passthrough", {})))
    runtime.decision_counts[SetRoute, Reason.OVERLOAD] += 1
    registry = CollectorRegistry()
    registry.register(StateCollector(runtime, Replicas(runtime, [])))
    labels = {"decision": "set_route", "reason": "overload"}
    assert registry.get_sample_value("thunderagent_decisions_total", labels) == 1


def test_the_service_of_the_other_tenants_only_grows() -> None:
    """It is a counter: tenants of it get series of their own, or are forgotten. One that is called so has no series."""
    driver = Driver(replicas={"r0": 10**6}, settings=SchedulerSettings(fair_tenants=True))
    runtime = Runtime(driver.scheduler, clock=lambda: driver.now_s)
    registry = CollectorRegistry()
    registry.register(StateCollector(runtime, Replicas(runtime, [])))

    def service_token_s(tenant: str) -> float | None:
        return registry.get_sample_value("thunderagent_tenant_service_token_seconds_total", {"tenant": tenant})

    driver.takes_turn("odd", 10_000, tenant=OTHER_TENANTS)
    for number in range(NAMED_TENANTS_COUNT):
        driver.takes_turn(f"p{number}", 100, tenant=f"t{number}")
    driver.takes_turn("late", 50, tenant="late")
    driver.ticks(10.0)
    before_token_s = service_token_s(OTHER_TENANTS)
    assert (service_token_s("late"), service_token_s("t99") is None) == (None, False)
    assert before_token_s is not None
    assert before_token_s > 10_000 * 10
    driver.releases("odd")
    driver.takes_turn("late", 10_000)
    driver.ticks(10.0)
    assert service_token_s("late") is not None
    after_token_s = service_token_s(OTHER_TENANTS)
    assert after_token_s is not None
    assert before_token_s <= after_token_s < before_token_s + 100 * 20  # what the one that has no series any more had
    assert OTHER_TENANTS not in {tenant.name for tenant in driver.scheduler.tenants or ()}
    driver.takes_turn("new", 50, tenant="new")
    driver.ticks(10.0)
    grown_token_s = service_token_s(OTHER_TENANTS)
    assert grown_token_s is not None
    assert grown_token_s >= after_token_s + 50 * 10
