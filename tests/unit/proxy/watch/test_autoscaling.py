"""An autoscaler's metrics: they ask for replicas where memory is short, and for none where it is not."""

from __future__ import annotations

from math import ceil

import pytest

from tests.builders import Driver
from thunderagent.programs.messages import ReplicaPolled
from thunderagent.programs.policies.baselines.cap import Cap
from thunderagent.programs.policies.baselines.passthrough import Passthrough
from thunderagent.proxy.watch.autoscaling import AutoscalingCollector, demand_ratio, oldest_hold_s
from thunderagent.runtime import Runtime

THRESHOLD_RATIO = 0.9
"""The threshold of deploy/kubernetes/autoscaling."""


def runtime_of(driver: Driver) -> Runtime:
    return Runtime(driver.scheduler, clock=lambda: driver.now_s)


def replicas_wanted(replicas_count: int, ratio: float) -> int:
    """Return the replicas that a HorizontalPodAutoscaler wants for a metric of type Value (its algorithm's details)."""
    return ceil(replicas_count * ratio / THRESHOLD_RATIO)


def test_claims_and_those_who_wait_are_wanted() -> None:
    """Waiting programs count with their future claims; paused ones whose tools run do not."""
    driver = Driver(Cap(2), replicas={"r0": 1000, "r1": 1000})
    runtime = runtime_of(driver)
    assert demand_ratio(runtime.pools.schedulers) == 0.0
    for number in range(5):
        driver.arrives(f"p{number}", 400)
    assert sum(1 for _ in driver.scheduler.queue.with_turns()) == 3
    ratio = demand_ratio(runtime.pools.schedulers)
    assert ratio == pytest.approx(5 * 400 / 2000, rel=0.1)
    assert replicas_wanted(2, ratio) == 3


def test_more_replicas_bring_the_ratio_down_to_the_threshold() -> None:
    """With the wanted number it wants no more, and fewer once programs have ended."""
    driver = Driver(Cap(1), replicas={"r0": 1000})
    runtime = runtime_of(driver)
    turns = [driver.arrives(f"p{number}", 400) for number in range(6)]
    ratio = demand_ratio(runtime.pools.schedulers)
    assert ratio is not None
    wanted = replicas_wanted(1, ratio)
    assert wanted > 1
    for number in range(1, wanted):
        driver.comes_up(f"r{number}", 1000)
    ratio = demand_ratio(runtime.pools.schedulers)
    assert ratio is not None
    assert replicas_wanted(wanted, ratio) == wanted
    driver.releases_all(*(f"p{number}" for number in range(6)))
    driver.finishes(turns[0], 400)
    assert demand_ratio(runtime.pools.schedulers) == 0.0


def test_a_capacity_that_is_not_known_gives_no_number() -> None:
    """Missing replicas give none, either: an autoscaler keeps what it has, instead of reading 0 as no load."""
    driver = Driver(Passthrough(), replicas={"r0": None})
    runtime = runtime_of(driver)
    assert demand_ratio(runtime.pools.schedulers) is None
    driver.send(ReplicaPolled(driver.now_s, "r0", 1000))
    assert demand_ratio(runtime.pools.schedulers) == 0.0
    driver.goes_down("r0")
    assert demand_ratio(runtime.pools.schedulers) is None
    samples = {
        metric.name: [sample.value for sample in metric.samples] for metric in AutoscalingCollector(runtime).collect()
    }
    said = {name: values for name, values in samples.items() if "_pool_" not in name}
    assert said == {"thunderagent_demand_ratio": [], "thunderagent_oldest_hold_seconds": [0.0]}
    assert not any(values for name, values in samples.items() if "_pool_" in name)  # there is a sample


def test_the_oldest_hold_is_of_any_turn_that_waits() -> None:
    """Cases are a turn in the queue, one that waits in its place, and an anonymous one."""
    driver = Driver(Cap(1), replicas={"r0": 1000})
    runtime = runtime_of(driver)
    assert oldest_hold_s(runtime.pools.schedulers, runtime.now_s()) is None
    first = driver.arrives("a", 100)
    driver.passes(1.0)
    driver.arrives("b", 100)
    driver.passes(2.0)
    assert oldest_hold_s(runtime.pools.schedulers, runtime.now_s()) == pytest.approx(2.0)
    driver.finishes(first, 100)
    driver.releases("a")
    assert oldest_hold_s(runtime.pools.schedulers, runtime.now_s()) is None
    driver.suspends()
    driver.arrives(None, 10)
    driver.passes(5.0)
    assert oldest_hold_s(runtime.pools.schedulers, runtime.now_s()) == pytest.approx(5.0)
