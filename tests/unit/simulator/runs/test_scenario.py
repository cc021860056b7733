"""Impossible scenarios are refused, and so are those that would not fit in memory."""

from __future__ import annotations

from dataclasses import replace
from math import inf

import pytest

from thunderagent.errors import ConfigurationError
from thunderagent.simulator.engine.records import EngineConfig
from thunderagent.simulator.runs.replicas import Outage
from thunderagent.simulator.runs.scenario import Scenario, available_bytes, check_memory, estimate_bytes
from thunderagent.simulator.workloads.plans import ProgramPlan, TurnPlan

PLAIN = Scenario(EngineConfig(16_000))


class Long:
    """Programs of 100,000 tokens."""

    name = "long"

    def program(self, index: int, seed: int) -> ProgramPlan:
        return ProgramPlan(f"p{index}", (TurnPlan(99_000, 1000, 0.0),))


@pytest.mark.parametrize(
    "wrong",
    [
        {"replica_count": 0},
        {"programs_count": 0},
        {"horizon_s": 0.0},
        {"horizon_s": inf},
        {"tick_s": 0.0},
        {"poll_interval_s": -1.0},
        {"sample_interval_s": 0.0},
        {"told_capacity_ratio": 0.0},
        {"release_ratio": 1.1},
        {"bytes_per_token": 0.0},
        {"unknown_replica_count": -1},
        {"unknown_replica_count": 2},
        {"last_engine": PLAIN.engine},
        {"last_engine": replace(PLAIN.engine, kv_tokens=PLAIN.engine.kv_tokens + 16), "replica_count": 2},
        {"last_engine": replace(PLAIN.engine, block_size=PLAIN.engine.block_size * 2), "replica_count": 2},
        {"warmup_s": 3600.0},
        {"warmup_s": -1.0},
        {"loop": "spiral"},
        {"outages": (Outage("r1", 1.0, 2.0),)},
        {"outages": (Outage("r0", 2.0, 1.0),)},
    ],
)
def test_an_impossible_scenario_is_refused(wrong: dict[str, object]) -> None:
    with pytest.raises(ConfigurationError):
        replace(PLAIN, **wrong)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    "larger",
    [
        {"engine": EngineConfig(10**6)},
        {"replica_count": 50},
        {"programs_count": 1000},
        {"horizon_s": 1e6},
        {"keep_events": True},
    ],
)
def test_every_need_of_memory_counts(larger: dict[str, object]) -> None:
    assert estimate_bytes(replace(PLAIN, **larger), Long()) > 1.05 * estimate_bytes(PLAIN, Long())  # type: ignore[arg-type]


def test_the_machine_says_what_is_free_and_too_much_is_refused_in_words() -> None:
    free_bytes = available_bytes()
    assert free_bytes is None or free_bytes > 2**20
    check_memory(2**40, None)
    check_memory(2**30, 2**30)
    with pytest.raises(ConfigurationError, match=r"about 2\.0 GiB of memory, and 1\.0 GiB are free"):
        check_memory(2**31, 2**30)
