"""The comparison on a real engine, without the engine: its runs, their order, and their layout."""

from __future__ import annotations

import argparse
import json

import pytest

from benchmarks.real import (
    Comparison,
    Figures,
    Run,
    add_comparison_arguments,
    comparison_from,
    ratios,
    results,
    serve_options,
    table,
)
from benchmarks.real_engine import RealEngineConfig
from thunderagent.errors import ConfigurationError
from thunderagent.simulator.comparison.contestants import Contestant


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
        **{f"goodput_{kind}_ratio_{alpha}": alpha / 4 for kind in ("turns", "programs") for alpha in (1, 2, 3)},
    }
    return Run(programs, policy, seed, figures)


def test_a_policy_becomes_options_of_the_server() -> None:
    assert serve_options(Contestant.parse("cap:n=6")) == ["--policy", "cap", "--policy-arg", "n=6"]
    assert serve_options(Contestant.parse("thunderagent-ports")) == ["--policy", "thunderagent-ports"]


def test_no_proxy_at_all_can_be_asked_for_but_no_oracle() -> None:
    parser = argparse.ArgumentParser()
    add_comparison_arguments(parser, programs="4", seconds=1.0, calibration=1.0)
    asked = comparison_from(parser.parse_args(["--policies", "direct,cap:n=6"]))
    assert [str(policy) for policy in asked.policies] == ["direct", "cap:n=6"]
    with pytest.raises(ConfigurationError, match="simulator only"):
        comparison_from(parser.parse_args(["--policies", "oracle"]))


def test_every_pair_is_run_once_and_policies_take_turns_at_going_first() -> None:
    one, two = Contestant("one"), Contestant("two")
    comparison = Comparison(programs=(4, 16), policies=(one, two), seeds=2)
    assert comparison.order() == [
        *((0, 4, one), (0, 4, two), (0, 16, one), (0, 16, two)),
        *((1, 4, two), (1, 4, one), (1, 16, two), (1, 16, one)),
    ]


def test_ratios_are_taken_seed_by_seed_at_one_load() -> None:
    runs = [run("direct", 0, 100), run("cap:n=6", 0, 50), run("direct", 1, 50), run("cap:n=6", 1, 100)]
    (ratio,) = ratios([*runs, run("cap:n=6", 2, 90), run("cap:n=6", 0, 150, programs=16)])
    assert (ratio.programs, ratio.policy, ratio.other) == (8, "cap:n=6", "direct")
    assert ratio.mean == pytest.approx(1.0)  # of 1/2 and 2
    assert ratio.low * ratio.high == pytest.approx(1.0)
    assert ratio.low < 0.5
    assert ratios(runs[:1]) == []


def test_the_table_has_a_row_for_each_load_and_policy() -> None:
    runs = [run("direct", 0, 100), run("cap", 0, 150), run("cap", 1, 50), run("cap", 0, 90, programs=16)]
    made = table(runs)
    assert made.row_count == 3
    cells = {str(column.header): list(column.cells) for column in made.columns}
    assert cells["turns in time"] == cells["programs in time"] == ["25/50/75 %"] * 3


def test_results_say_what_they_were_measured_on() -> None:
    comparison = Comparison((4,), (Contestant.parse("cap:n=6"),))
    report = json.loads(json.dumps(results(comparison, RealEngineConfig(), [run("cap:n=6", 0, 100)])))
    assert report["runs"][0]["figures"]["turns_per_min"] == 100
    assert report["comparison"]["policies"] == ["cap:n=6"]
    assert report["engine"]["pool_blocks"] == 500
