"""The comparison of MARS: programs are paired over rates and policies, ratios are of pairs, regimes have volumes."""

from __future__ import annotations

from statistics import fmean

import pytest

from benchmarks.mars import (
    FEW_LONG,
    LOADS,
    MARS,
    MARS_ON_STOCK,
    POINTS,
    POLICIES,
    PUBLISHED,
    REGIMES,
    Found,
    Task,
    _summary,
    in_time_rows,
    mix,
    run_one,
    scenario_of,
)
from benchmarks.mlfq import Mlfq
from thunderagent.simulator.comparison.contestants import Contestant
from thunderagent.simulator.workloads.plans import ProgramPlan


def test_there_are_twenty_points() -> None:
    """There are four regimes, at three loads on one GPU and at two on the other."""
    assert len(set(POINTS)) == 20
    assert sum(len(loads) for loads in LOADS.values()) * len(REGIMES) == 20


def volume_tokens(plan: ProgramPlan) -> int:
    """Return the number of tokens in all prompts of a program together."""
    volume = context_tokens = 0
    for turn in plan.turns:
        context_tokens += turn.new_tokens
        volume += context_tokens
        context_tokens += turn.output_tokens
    return volume


@pytest.mark.parametrize("regime", REGIMES)
def test_the_mean_volume_is_that_of_the_regime(regime: str) -> None:
    """The mean is over many programs, whose spread is wide."""
    programs = mix(regime, 1.0)
    mean_tokens = fmean(volume_tokens(programs.program(index, seed)) for seed in range(8) for index in range(400))
    assert mean_tokens == pytest.approx(1000 * int(regime.removesuffix("k")), rel=0.06)


def test_a_rate_only_moves_arrivals() -> None:
    """Points of a regime differ in nothing else."""
    slow, fast = mix("220k", 0.1), mix("220k", 0.2)
    for index in range(20):
        plan, sooner = slow.program(index, 3), fast.program(index, 3)
        assert plan.turns == sooner.turns
        assert plan.arrival_s == pytest.approx(2 * (sooner.arrival_s or 0.0))
    assert mix("220k", 0.1).program(7, 3) == slow.program(7, 3)
    assert mix("220k", 0.1).program(7, 4) != slow.program(7, 3)


def test_every_policy_can_be_made_and_only_mars_has_the_changed_engine() -> None:
    """The stock engine has priorities if a policy gives some."""
    for policy, text in POLICIES.items():
        assert str(Contestant.parse(text)) == text
        engine = scenario_of(POINTS[0], policy, 0).engine
        assert engine.discipline is (Mlfq if policy in (MARS, FEW_LONG) else None)
        assert scenario_of(POINTS[0], policy, 0).engines_retain == (policy in (MARS, FEW_LONG))


def goodput_of(last: float) -> dict[str, float]:
    """Return the goodput of a run with that part of it in time."""
    programs = {f"goodput_{alpha}": last * alpha / 3 for alpha in (1, 2, 3)}
    return programs | {f"turn_goodput_{alpha}": last * (alpha + 1) / 4 for alpha in (1, 2, 3)}


def test_ratios_are_taken_seed_by_seed_to_the_best_other() -> None:
    """The mean of all is used; a point is won if the ratio is over 1, and goodputs are of whole regimes."""
    kept = {}
    for point in POINTS:
        for policy in POLICIES:
            for seed in (0, 1):
                mean_s = {MARS: 50.0, MARS_ON_STOCK: 110.0, "infercept": 100.0, "thunderagent": 40.0}.get(policy, 500.0)
                good = {MARS: 0.9, "infercept": 0.3}.get(policy, 0.1)
                kept[Task(point, policy, seed).key] = {"mean_s": mean_s * (1 + seed), **goodput_of(good)}
    found = Found(kept, (0, 1, 2))
    assert found.seeds == [0, 1]
    assert found.best(POINTS[0], PUBLISHED) == "infercept"
    speedup = found.speedup(POINTS[0], MARS, PUBLISHED)
    assert speedup is not None
    assert (speedup.mean, speedup.half_width) == (2.0, 0.0)
    summary = _summary(found, MARS)
    assert summary["published"]["points_won"] == 20
    assert summary["published"]["goodput_ratio"] == {"220k": 3.0, "263k": 3.0}
    assert summary["all"]["points_won"] == 0
    assert _summary(found, MARS_ON_STOCK)["published"]["points_won"] == 0
    rows = in_time_rows(found)
    assert [(row["setting"], row["policy"]) for row in rows] == [
        (each, policy) for each in REGIMES for policy in POLICIES
    ]
    assert (rows[0]["turns"], rows[0]["programs"]) == ("45/68/90 %", "30/60/90 %")


@pytest.mark.parametrize("policy", [MARS, MARS_ON_STOCK])
def test_a_run_has_its_figures(policy: str) -> None:
    """The run is short, and complete."""
    figures = run_one(Task(POINTS[0], policy, 0, programs_count=8), lambda: None)
    assert figures["mean_s"] > 0
    assert 0 <= figures["goodput_1"] <= figures["goodput_2"] <= figures["goodput_3"] <= 1
