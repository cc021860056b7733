"""The load of the real engine as the simulator sees it, and what papers and fidelity make of their runs."""

from __future__ import annotations

import pytest

from benchmarks.fidelity import Pair, forecast, table
from benchmarks.ideal import StandardLoad, goodput_figures
from benchmarks.load import LoadSpec, plan_program
from benchmarks.papers import COMMANDS, SETTINGS, scenario_of
from benchmarks.real import Comparison, engine_model
from benchmarks.real_engine import RealEngineConfig
from thunderagent.simulator.comparison.contestants import Contestant
from thunderagent.simulator.engine.timing import profile
from thunderagent.simulator.figures.bounds import turn_shapes
from thunderagent.simulator.figures.figures import Goodput
from thunderagent.simulator.workloads.distributions import workload

REAL, SIMULATED = (
    goodput_figures([Goodput(alpha, 0.0, 0.0, *ratios) for alpha, ratios in enumerate(each, start=1)])
    for each in (((0.1, 0.0), (0.5, 0.4), (0.9, 0.8)), ((0.2, 0.0), (0.6, 0.45), (0.95, 0.85)))
)


def prompt_words(spec: LoadSpec, index: int) -> list[int]:
    """Return the number of words of each prompt of a program after the chat template: a role before each message."""
    plan = plan_program(spec, index)
    text = f"<system> {plan.system_prompt} "
    counts = []
    for turn in plan.turns:
        text += f"<user> {turn.prompt} "
        counts.append(len(f"{text}<assistant>".split()))
        text += "<assistant> " + "w0 " * turn.output_tokens
    return counts


@pytest.mark.parametrize("index", range(5))
def test_simulated_prompts_have_the_tokens_of_real_ones(index: int) -> None:
    spec = LoadSpec(seed=3)
    shapes = list(turn_shapes(StandardLoad(spec).program(index, 3)))
    assert [shape.prompt_tokens for shape in shapes] == prompt_words(spec, index)
    assert [shape.gap_s for shape in shapes[1:]] == [turn.tool_s for turn in plan_program(spec, index).turns[:-1]]
    assert shapes[0].shared_tokens == 202  # <system>, 200 words, <user>


def test_the_model_of_an_engine_lacks_the_block_that_is_never_used() -> None:
    model = engine_model(RealEngineConfig(pool_blocks=500, block_size=32), profile("demo"))
    assert (model.block_count, model.block_size) == (499, 32)


def test_errors_are_those_of_the_simulator() -> None:
    pair = Pair(8, "passthrough", 0, 100.0, 108.0, 0.50, 0.47, (105.0, 110.0), (0.40, 0.49), REAL, SIMULATED)
    assert pair.turns_error_ratio == pytest.approx(0.08)
    assert pair.hit_error_ratio == pytest.approx(-0.03)
    assert pair.turns_beside_ratio == pytest.approx(0.05)
    assert pair.hits_beside_ratio == pytest.approx(0.01)


def test_value_inside_the_forecast_is_not_beside_it() -> None:
    pair = Pair(8, "passthrough", 0, 100.0, 108.0, 0.50, 0.47, (90.0, 110.0), (0.40, 0.50), REAL, SIMULATED)
    assert pair.turns_beside_ratio == pair.hits_beside_ratio == 0.0


def test_the_table_has_the_goodput_of_both() -> None:
    pair = Pair(8, "passthrough", 0, 100.0, 108.0, 0.50, 0.47, (90.0, 110.0), (0.40, 0.50), REAL, SIMULATED)
    cells = [list(column.cells) for column in table([pair]).columns][-4:]
    assert cells == [["10/50/90 %"], ["20/60/95 %"], ["0/40/80 %"], ["0/45/85 %"]]


def test_a_forecast_is_wide_where_programs_only_just_fit_and_narrow_where_they_do() -> None:
    engine = engine_model(RealEngineConfig(pool_blocks=500, block_size=32), profile("demo"))
    comparison = Comparison(programs=(4,), policies=(Contestant("passthrough"),), warmup_s=10.0, measure_s=30.0)
    spreads = {}
    for programs in (4, 8):
        everything = forecast(LoadSpec(programs=programs), Contestant("passthrough"), engine, comparison)
        hits = [each.hit_ratio for each in everything]
        spreads[programs] = max(hits) - min(hits)
    assert spreads[4] < 0.02 < spreads[8]


def test_every_setting_of_the_papers_can_be_simulated() -> None:
    assert set(COMMANDS) >= {"fig4", "fig2a", "fig6b", "table2", "oracle", "orbit", "orbit-front"}
    for setting in SETTINGS:
        assert workload(setting.workload).program(0, 0).turns
        scenario = scenario_of(setting.profile, minutes=1)
        assert scenario.engine.capacity_tokens == profile(setting.profile).kv_tokens // 16 * 16
