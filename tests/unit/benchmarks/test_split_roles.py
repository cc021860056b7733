"""Fig. 7b: nodes that only prefill and nodes that only decode."""

from __future__ import annotations

from dataclasses import replace

import pytest

from benchmarks.simulated import scenario_of
from benchmarks.split_roles import SplitRun
from thunderagent.simulator.comparison.contestants import Contestant
from thunderagent.simulator.workloads.distributions import workload

SCENARIO = replace(scenario_of("glm-4.6-h100x8", minutes=6), programs_count=24)


def test_a_node_that_does_both_makes_the_turns_of_passthrough() -> None:
    """What is compared with is the simulator's engine without a scheduler, turn for turn."""
    found = SplitRun(SCENARIO, workload("mini-swe-agent"), 0).run()
    beside = Contestant.parse("passthrough").run(SCENARIO, workload("mini-swe-agent"))
    assert len(found.turns_s) == beside.turn_count > 100
    assert found.turn_mean_s == pytest.approx(beside.turn_latency.mean_s)
    assert found.hit_ratio == pytest.approx(beside.hit_ratio)


def test_a_decoding_node_computes_no_prompt() -> None:
    """With room for all, a split turn takes as long as a whole one, or less: nobody prefills beside its answer."""
    few = replace(SCENARIO, programs_count=2)
    whole = SplitRun(few, workload("mini-swe-agent"), 0).run()
    split = SplitRun(replace(few, replica_count=2), workload("mini-swe-agent"), 1).run()
    assert len(split.turns_s) > 10
    assert split.turn_mean_s < 1.1 * whole.turn_mean_s


def test_a_prefilling_node_keeps_no_answer() -> None:
    """The next prompt computes the answer before it again, so a split finds less, and never nothing."""
    few = replace(SCENARIO, programs_count=2)
    whole = SplitRun(few, workload("mini-swe-agent"), 0).run()
    split = SplitRun(replace(few, replica_count=2), workload("mini-swe-agent"), 1).run()
    assert 0.5 < split.hit_ratio < whole.hit_ratio


def test_split_pools_thrash_at_a_load_that_whole_ones_hold() -> None:
    """The paper's finding: a prompt finds only what the prefilling nodes kept."""
    two = replace(scenario_of("glm-4.6-h100x8", replicas_count=2, minutes=15, warmup_minutes=7), programs_count=24)
    whole = SplitRun(two, workload("mini-swe-agent"), 0).run()
    split = SplitRun(two, workload("mini-swe-agent"), 1).run()
    assert split.hit_ratio < 0.5 * whole.hit_ratio
