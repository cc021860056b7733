"""ORBIT's comparison: its contestants, and the reading of its runs."""

from __future__ import annotations

from dataclasses import replace

import pytest

from benchmarks.judging import at
from benchmarks.orbit import IN_FRONT_OF_IT, IN_THE_ENGINE, JUDGE, PAPERS, latency_s, questions_count, recall_by_step
from thunderagent.simulator.comparison.contestants import Contestant
from thunderagent.simulator.engine.records import EngineConfig
from thunderagent.simulator.engine.timing import profile
from thunderagent.simulator.runs.scenario import Scenario
from thunderagent.simulator.workloads.distributions import workload


def test_right_and_wrong_tasks_are_read_apart() -> None:
    """Their latencies give that of all, weighted by their numbers; the judge's questions are counted."""
    engine = EngineConfig(kv_tokens=4_000_000, block_size=64, max_num_seqs=4, timing=profile(PAPERS.profile))
    scenario = Scenario(engine=engine, loop="open", programs_count=6, horizon_s=50_000, seed=3)
    policy, judge = IN_THE_ENGINE["JUDGE"]
    result = Contestant.parse(policy).run(replace(scenario, judge=judge), workload("gaia-orbit"))
    counts = [
        sum(program.outcome == outcome for program in result.waits.programs) for outcome in ("success", "failure")
    ]
    right_s, wrong_s = latency_s("success")(result), latency_s("failure")(result)
    assert right_s is not None
    assert wrong_s is not None
    whole_s = (right_s * counts[0] + wrong_s * counts[1]) / sum(counts)
    assert whole_s == pytest.approx(result.program_latency.mean_s)
    assert latency_s("")(result) == pytest.approx(whole_s)
    assert latency_s("unknown")(result) is None
    assert latency_s("", 100)(result) == result.program_latency.max_s
    assert latency_s("", 50)(result) == result.program_latency.p50_s
    asked = [recall_by_step([result], outcome) for outcome in ("success", "failure")]
    assert sum(count for each in asked for _, _, count in each) == questions_count(result)
    assert questions_count(result) == sum(
        turns - 1 for turns in (len(workload("gaia-orbit").program(n, 3).turns) for n in range(6))
    )


def test_every_contestant_can_be_made() -> None:
    """The judge finds more of the tasks that fail than it suspects of those that do not."""
    for policy, _ in (*IN_THE_ENGINE.values(), *IN_FRONT_OF_IT.values()):
        Contestant.parse(policy)
    assert all(at(JUDGE.recall, turns) > at(JUDGE.false_alarms, turns) for turns in (10, 20, 45, 100))
    assert at(JUDGE.recall, 10) < 0.05
    assert at(JUDGE.recall, 45) == 1.0
