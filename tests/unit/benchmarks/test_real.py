"""The comparison on a real engine, without the engine: what is run, in what order, and how it is set out."""

from __future__ import annotations

import json

import pytest

from benchmarks.machine import describe_machine
from benchmarks.real import Comparison, Figures, PolicySpec, Run, baseline_of, ratios, results, table
from benchmarks.real_engine import RealEngineConfig


def run(policy: str, seed: int, turns_per_min: float, programs: int = 8) -> Run:
    figures: Figures = {
        "turns_per_min": turns_per_min,
        "hit_ratio": None,
        "latency_p50_s": 1.0,
        "latency_p99_s": 2.0,
        "first_token_p50_s": None,
        "first_token_p99_s": None,
        "failed_turn_count": 0,
        "retry_count": 1,
    }
    return Run(programs, policy, seed, figures)


def test_a_policy_is_written_with_its_arguments() -> None:
    policy = PolicySpec.parse("thunderagent:delta_s=1:lambda_max=0.9")
    assert policy == PolicySpec("thunderagent", ("delta_s=1", "lambda_max=0.9"))
    assert str(policy) == "thunderagent:delta_s=1:lambda_max=0.9"
    assert PolicySpec.parse("direct") == PolicySpec("direct")


def test_a_preset_becomes_what_it_stands_for() -> None:
    options = PolicySpec.parse("thunderagent-ports:delta_s=1").options()
    assert options[:4] == ["--policy", "thunderagent", "--policy-arg", "thrash_ratio=0.95"]
    assert options[-2:] == ["--policy-arg", "delta_s=1"]


@pytest.mark.parametrize("text", ["", ":n=6", "cap:6"])
def test_what_is_no_policy_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match="not a policy"):
        PolicySpec.parse(text)


def test_every_pair_is_run_once_and_policies_take_turns_at_going_first() -> None:
    one, two = PolicySpec("one"), PolicySpec("two")
    comparison = Comparison(programs=(4, 16), policies=(one, two), seeds=2)
    assert comparison.order() == [
        *((0, 4, one), (0, 4, two), (0, 16, one), (0, 16, two)),
        *((1, 4, two), (1, 4, one), (1, 16, two), (1, 16, one)),
    ]


def test_ratios_are_taken_seed_by_seed_against_the_baseline() -> None:
    runs = [run("direct", 0, 100), run("cap:n=6", 0, 150), run("direct", 1, 50), run("cap:n=6", 1, 100)]
    assert baseline_of(runs) == "direct"
    assert ratios(runs, 8, "cap:n=6") == [1.5, 2.0]
    assert baseline_of([*runs, run("passthrough", 0, 90)]) == "passthrough"
    assert ratios([run("cap:n=6", 0, 150)], 8, "cap:n=6") == []


def test_the_table_has_a_row_for_each_load_and_policy() -> None:
    runs = [run("direct", 0, 100), run("cap", 0, 150), run("cap", 1, 50), run("cap", 0, 90, programs=16)]
    assert table(runs).row_count == 3


def test_results_say_what_they_were_measured_on() -> None:
    comparison = Comparison((4,), (PolicySpec("cap", ("n=6",)),))
    report = json.loads(json.dumps(results(comparison, RealEngineConfig(), [run("cap:n=6", 0, 100)])))
    assert report["runs"][0]["figures"]["turns_per_min"] == 100
    assert report["comparison"]["policies"] == ["cap:n=6"]
    assert report["engine"]["pool_blocks"] == 500
    assert report["machine"].keys() == describe_machine().keys()
