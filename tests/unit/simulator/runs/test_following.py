"""A trainer that follows the signal of useful programs loses nothing against the best fixed number."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise
from statistics import fmean

from thunderagent.config import ServeConfig
from thunderagent.policy_loader import load_policy
from thunderagent.programs.concurrency import SteadyCount, concurrency
from thunderagent.programs.scheduler import Scheduler
from thunderagent.simulator.engine.records import EngineConfig
from thunderagent.simulator.engine.timing import profile
from thunderagent.simulator.figures.figures import RunResult
from thunderagent.simulator.runs.run import Simulation
from thunderagent.simulator.runs.scenario import Scenario
from thunderagent.simulator.workloads.distributions import workload

ENGINE = EngineConfig(kv_tokens=16_000, timing=profile("demo"), max_num_batched_tokens=2048)
SCENARIO = Scenario(engine=ENGINE, horizon_s=900, warmup_s=225)
FIXED_COUNTS = (6, 12)
"""More programs add nothing: 24 have a thousandth more throughput. 4 have a seventh less."""

SEEDS = (0, 1)


class Follower:
    """Keeps as many programs as the signal says, and records the signal."""

    def __init__(self) -> None:
        self.steady = SteadyCount()
        self.said: list[int] = []

    def __call__(self, scheduler: Scheduler) -> int:
        self.said.append(self.steady.update(concurrency(scheduler).useful_count, scheduler.now_s))
        return self.said[-1]


def run(seed: int, count: int, follower: Follower | None = None) -> RunResult:
    scenario = replace(SCENARIO, seed=seed, programs_count=count)
    policy = load_policy(ServeConfig().policy, {})
    return Simulation(scenario, workload("standard"), policy, wanted_count=follower).run()


def test_follower_loses_nothing_and_waits_less() -> None:
    """Memory holds about 7: it has the throughput of the best fixed number, whose programs take half as long again."""
    fixed = {count: [run(seed, count) for seed in SEEDS] for count in FIXED_COUNTS}
    turns_per_min = {count: fmean(each.turns_per_min_count for each in runs) for count, runs in fixed.items()}
    best_count = max(turns_per_min, key=lambda count: turns_per_min[count])
    followers = [Follower() for _ in SEEDS]
    followed = [run(seed, 100, follower) for seed, follower in zip(SEEDS, followers, strict=True)]
    assert fmean(each.turns_per_min_count for each in followed) >= 0.98 * turns_per_min[best_count]
    latency_s = fmean(each.program_latency.mean_s for each in followed)
    assert latency_s <= fmean(each.program_latency.mean_s for each in fixed[12])
    for follower in followers:
        after = follower.said[len(follower.said) // 4 :]
        changes_count = sum(before != now for before, now in pairwise(after))
        assert changes_count <= 12  # in eleven minutes
