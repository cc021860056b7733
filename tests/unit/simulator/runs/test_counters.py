"""Simulated engines that do not report cached tokens for each turn: their counters are read late, seldom, or never."""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from typing import Any

import pytest

from thunderagent.policy_loader import load_policy
from thunderagent.simulator.engine.records import EngineConfig
from thunderagent.simulator.engine.timing import COSTS_US, profile
from thunderagent.simulator.runs.run import Simulation
from thunderagent.simulator.runs.scenario import Scenario
from thunderagent.simulator.workloads.distributions import workload

SCENARIO = Scenario(
    engine=EngineConfig(kv_tokens=16_000, timing=profile("demo"), max_num_batched_tokens=2048),
    programs_count=16,
    horizon_s=600.0,
    warmup_s=60.0,
    sample_interval_s=1.0,
    engine_tells_cached=False,
)
"""Room for about seven of sixteen programs."""


@cache
def run(policy: str, **changes: Any) -> tuple[float, list[float]]:
    """Return turns a minute, and the claimable part of the capacity in each second."""
    ratios: list[float] = []

    def look(_: object) -> None:
        ratios.append(simulation.scheduler.replicas["r0"].account.capacity_ratio)

    simulation = Simulation(
        replace(SCENARIO, **changes), workload("standard"), load_policy(policy, {}), on_progress=look
    )
    return simulation.run().turns_per_min_count, ratios


@pytest.mark.parametrize("poll_s", [1.0, 10.0])
@pytest.mark.parametrize(("delay_s", "missing_ratio"), [(0.0, 0.0), (3.0, 0.3)])
def test_counters_take_nothing_from_a_right_capacity(poll_s: float, delay_s: float, missing_ratio: float) -> None:
    """However late and seldom they are read, this holds; and no policy that believes the capacity is faster."""
    turns_per_min, ratios = run(
        "breakeven", poll_interval_s=poll_s, poll_delay_s=delay_s, poll_missing_ratio=missing_ratio
    )
    believing, _ = run("thunderagent")
    assert 0.9 <= min(ratios) <= max(ratios) <= 1.25
    assert turns_per_min >= 0.98 * believing


@pytest.mark.parametrize(
    ("speed_ratio", "tells_cached"),
    [
        (0.3, False),
        (0.3, True),
        (3.0, False),
        (3.0, True),
    ],
)
def test_a_slow_engine_and_a_fast_one_lose_nothing(speed_ratio: float, tells_cached: bool) -> None:
    """A turn lasts for many polls, or for less than one; this holds with and without the usage of each turn."""
    timing = SCENARIO.engine.timing
    costs_s = {name: getattr(timing, name) / speed_ratio for name in COSTS_US.values()}
    engine = replace(SCENARIO.engine, timing=replace(timing, **costs_s))
    scenario = {"engine": engine, "horizon_s": 300.0}
    turns_per_min, _ = run("breakeven", **scenario, engine_tells_cached=tells_cached, poll_interval_s=5.0)
    assert turns_per_min >= 0.98 * run("thunderagent", **scenario)[0]


def test_counters_reveal_a_capacity_told_twice_as_large() -> None:
    """It beats a policy that believes the capacity, and reaches five sixths of the result with the right capacity."""
    turns_per_min, ratios = run("breakeven", told_capacity_ratio=2.0)
    assert 0.5 <= ratios[-1] <= 0.75
    assert turns_per_min >= 5 / 6 * run("breakeven")[0]
    assert turns_per_min >= run("thunderagent", told_capacity_ratio=2.0)[0]


def test_counters_reveal_a_capacity_told_half_as_large() -> None:
    """The speed of prefill is still learned, and with it how long holding pays."""
    turns_per_min, ratios = run("breakeven", told_capacity_ratio=0.5)
    assert ratios[-1] >= 1.4
    assert turns_per_min >= 5 / 6 * run("breakeven")[0]
