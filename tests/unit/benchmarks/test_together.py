"""Two models behind one proxy, one of them short of memory: the other's programs are not affected."""

from __future__ import annotations

from dataclasses import replace

import pytest

from benchmarks.together import Model, simulate_together
from thunderagent.config import ServeConfig
from thunderagent.policy_loader import load_policy
from thunderagent.simulator.engine.records import EngineConfig
from thunderagent.simulator.engine.timing import profile
from thunderagent.simulator.figures.figures import RunResult
from thunderagent.simulator.runs.run import simulate
from thunderagent.simulator.runs.scenario import Scenario
from thunderagent.simulator.workloads.distributions import workload

ENGINE = EngineConfig(kv_tokens=16_000, timing=profile("demo"), max_num_batched_tokens=2048)
SHORT = Scenario(engine=ENGINE, programs_count=16, horizon_s=600, warmup_s=120, replica_prefix="short")
AMPLE = Scenario(engine=ENGINE, programs_count=4, horizon_s=600, warmup_s=120, seed=1, replica_prefix="ample")

FIGURES = {
    "turns/min": lambda result: result.turns_per_min_count,
    "a turn's wait, mean": lambda result: result.turn_latency.mean_s,
    "a turn's wait, p99": lambda result: result.turn_latency.p99_s,
    "a program's time, mean": lambda result: result.program_latency.mean_s,
}


@pytest.fixture(scope="module")
def alone_and_together() -> dict[str, tuple[RunResult, RunResult]]:
    models = [
        Model(scenario.replica_prefix, scenario, workload("standard"), load_policy(ServeConfig().policy, {}))
        for scenario in (SHORT, AMPLE)
    ]
    together = simulate_together(models)
    alone = [simulate(each.scenario, each.workload, load_policy(ServeConfig().policy, {})) for each in models]
    return {each.name: runs for each, runs in zip(models, zip(alone, together, strict=True), strict=True)}


@pytest.mark.parametrize("figure", FIGURES)
@pytest.mark.parametrize("model", ["short", "ample"])
def test_each_model_has_the_throughput_and_the_waits_that_it_has_alone(
    alone_and_together: dict[str, tuple[RunResult, RunResult]], model: str, figure: str
) -> None:
    alone, together = map(FIGURES[figure], alone_and_together[model])
    assert together == pytest.approx(alone, rel=0.02)


def test_the_short_one_is_short(alone_and_together: dict[str, tuple[RunResult, RunResult]]) -> None:
    """Otherwise the test would show nothing: in one queue with it the other would wait as well."""
    assert alone_and_together["short"][1].longest_hold_s > 5
    assert alone_and_together["ample"][1].longest_hold_s == 0


def test_a_run_alone_is_the_same_run() -> None:
    """With one model, pools, shared time and other turn numbers change no figure."""
    scenario = replace(AMPLE, horizon_s=180, warmup_s=0)
    policy = load_policy(ServeConfig().policy, {})
    (alone,) = simulate_together([Model("ample", scenario, workload("standard"), policy)])
    plain = simulate(scenario, workload("standard"), load_policy(ServeConfig().policy, {}))
    assert (alone.turns_per_min_count, alone.decision_counts) == (plain.turns_per_min_count, plain.decision_counts)
