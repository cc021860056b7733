"""Bounds, computed by hand where possible, and in the right order everywhere."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from thunderagent.programs.policies.baselines.cap import Cap
from thunderagent.programs.policies.baselines.passthrough import Passthrough
from thunderagent.programs.policy import Policy
from thunderagent.simulator.engine.engine import Engine
from thunderagent.simulator.engine.records import EngineConfig, EngineRequest
from thunderagent.simulator.engine.timing import TimingProfile, profile
from thunderagent.simulator.figures.bounds import (
    Bounds,
    Engines,
    TurnCost,
    TurnShape,
    bounds,
    makespan_bound_s,
    turn_shapes,
)
from thunderagent.simulator.runs.run import simulate
from thunderagent.simulator.runs.scenario import Scenario
from thunderagent.simulator.runs.tools import ToolSettings
from thunderagent.simulator.workloads.distributions import workload
from thunderagent.simulator.workloads.plans import ProgramPlan, TurnPlan

TIMING = TimingProfile("test", 1.0, 0.01, 0.1, decode_context_token_s=0.001, attention_pair_s=0.0001)
PREFILL_ONLY = TimingProfile("prefill", 0.0, 0.01, 0.0)


def plan(*turns: tuple[int, int, float], shared_tokens: int = 0) -> ProgramPlan:
    return ProgramPlan("p", tuple(TurnPlan(*turn) for turn in turns), "shared" if shared_tokens else "", shared_tokens)


def shapes(*plans: ProgramPlan) -> list[TurnShape]:
    return [shape for each in plans for shape in turn_shapes(each)]


def test_turns_of_a_plan_match_a_calculation_by_hand() -> None:
    """A prompt holds the prefix, all before it, and what is new; a gap is the tool before."""
    assert shapes(plan((30, 5, 2.0), (10, 3, 9.0), shared_tokens=60)) == [
        TurnShape(prompt_tokens=90, new_tokens=30, output_tokens=5, shared_tokens=60, gap_s=None),
        TurnShape(prompt_tokens=105, new_tokens=10, output_tokens=3, shared_tokens=60, gap_s=2.0),
    ]
    assert [shape.held_tokens for shape in shapes(plan((30, 5, 2.0), (10, 3, 9.0), shared_tokens=60))] == [0, 35]


def test_the_cost_of_a_turn_by_hand() -> None:
    """100 tokens, 30 of them computed, in chunks of 20; 3 tokens out, 2 of them decoded, at 101 and 102 tokens."""
    cost = Engines(TIMING, 1000, max_num_batched_tokens=20).turn_cost(
        prompt_tokens=100, computed_tokens=30, output_tokens=3, shared_tokens=0
    )
    assert cost.work_s == pytest.approx(30 * 0.01 + 30 * (70 + 15) * 0.0001 + 2 * 0.1 + 203 * 0.001)
    assert cost.token_iterations == (70 + 20) + (70 + 30) + 101 + 102


def test_shared_tokens_take_no_room_but_are_attended_to() -> None:
    """Of 100 tokens 60 are in memory for all programs."""
    engines = Engines(TIMING, 1000)
    alone, shared = (
        engines.turn_cost(prompt_tokens=100, computed_tokens=40, output_tokens=2, shared_tokens=tokens)
        for tokens in (0, 60)
    )
    assert shared.work_s == alone.work_s
    assert alone.token_iterations - shared.token_iterations == 60 + 60


def test_a_used_token_of_a_pool_that_slows_its_engine_costs_each_decoding_its_least_share() -> None:
    """A full pool costs 5 - 2 s, so each of 1,000 tokens at least 3 ms; 2 decodings, at 101 and 102 tokens."""
    slowed = Engines(replace(TIMING, decode_pool_s=5.0, decode_pool_square_s=2.0), 1000)
    for shared_tokens in (0, 60):
        cost, without = (
            engines.turn_cost(prompt_tokens=100, computed_tokens=40, output_tokens=3, shared_tokens=shared_tokens)
            for engines in (slowed, replace(slowed, timing=TIMING))
        )
        assert cost.work_s - without.work_s == pytest.approx((101 + 102 - 2 * shared_tokens) * 0.003)
        assert cost.token_iterations == without.token_iterations


@pytest.mark.parametrize(("prompt_tokens", "least_ratio"), [(15_000, 0.96), (8000, 0.75), (500, 0.5)])
def test_engine_that_slows_with_its_pool_takes_no_less_than_a_turn_alone_and_little_more_if_it_is_full(
    prompt_tokens: int, least_ratio: float
) -> None:
    """An iteration slows less and less as the pool fills; the bound counts each token as if the pool were full."""
    config = EngineConfig.of(profile("mocker"), kv_tokens=16_000)
    engine = Engine(config)
    engine.submit(EngineRequest("a", range(prompt_tokens), range(900)), 0.0)
    taken_s = 0.0
    while engine.has_work:
        taken_s += engine.step(taken_s).duration_s
    (shape,) = shapes(plan((prompt_tokens, 900, 0.0)))
    assert least_ratio < Engines.of(config, 1).alone_s(shape) / taken_s <= 1.0


def test_programs_that_fill_a_pool_that_slows_its_engine_stay_under_the_limit_and_not_far() -> None:
    """Sixteen programs that only generate, on Dynamo's mocker with memory for some twelve of them."""
    engine = EngineConfig.of(profile("mocker"), kv_tokens=2048)
    result = simulate(
        Scenario(engine=engine, programs_count=16, horizon_s=120, warmup_s=20), _Generating(), Passthrough()
    )
    assert result.bounds is not None
    assert 0.7 < result.limit_ratio <= 1.0


def test_l0_of_one_turn_matches_a_calculation_by_hand() -> None:
    """X = 1/(g + W·a/C): the pool divides the iterations, the work is not divided; two replicas do twice that."""
    cost = Engines(TIMING, 1000).turn_cost(prompt_tokens=100, computed_tokens=100, output_tokens=1, shared_tokens=0)
    expected = 1 / (cost.work_s + cost.token_iterations * 1.0 / 1000)
    assert cost.token_iterations == 100
    one = bounds(shapes(plan((100, 1, 5.0))), Engines(TIMING, 1000))
    assert one.no_recompute_per_s == one.hold_or_drop_per_s == pytest.approx(expected)
    assert bounds(shapes(plan((100, 1, 5.0))), Engines(TIMING, 1000, 2)).no_recompute_per_s == pytest.approx(
        2 * expected
    )


@pytest.mark.parametrize(("gap_s", "held_part"), [(8.0, 1.0), (10.0, 1.0), (30.0, 0.5), (90.0, 0.2)])
def test_l1_holds_what_memory_is_there_for(gap_s: float, held_part: float) -> None:
    """Two turns, 0.01 s a token, a pool of 1000: up to the time to fill the pool once, 10 s, all gaps can be held.

    Beyond, a part φ is held and the rest recomputed, so that both run out at once: C·g = H, φ = 20/(10 + gap).
    """
    found = bounds(shapes(plan((100, 1, gap_s), (1, 1, 0.0))), Engines(PREFILL_ONLY, 1000))
    computed_tokens = 101 + 101 * (1 - held_part)
    assert found.hold_or_drop_per_s == pytest.approx(2 / (0.01 * computed_tokens))
    assert found.hold_below_s == math.nextafter(gap_s, math.inf)


def test_l1_drops_the_longer_of_two_gaps_first() -> None:
    """Short gaps are held, and a part of the long ones in the rest of the memory."""
    short, long = plan((100, 1, 1.0), (1, 1, 0.0)), plan((100, 1, 1e6), (1, 1, 0.0))
    found = bounds(shapes(short, long), Engines(PREFILL_ONLY, 1000))
    assert found.hold_or_drop_per_s == pytest.approx(4 / (0.01 * (101 + 202)), rel=1e-3)


class _Generating:
    """Programs of one turn: a short prompt, and a long answer."""

    name = "generating"

    def program(self, index: int, seed: int) -> ProgramPlan:
        return ProgramPlan(f"{seed}-{index}", (TurnPlan(16, 150 + index % 100, 0.0),))


def test_l2_is_the_time_alone() -> None:
    """5 prompt tokens in chunks of 2 are 3 iterations, 4 tokens out are 3 more; the last tool does not count."""
    engines = Engines(TimingProfile("t", 1.0, 0.1, 0.01), 1000, max_num_batched_tokens=2)
    program = plan((5, 4, 7.0), (1, 1, 50.0))
    alone_s = (3 + 3) * 1.0 + 0.5 + 0.03 + 7.0 + 1.0 + 0.1
    assert bounds(shapes(program), engines, programs_count=1).closed_loop_per_s == pytest.approx(2 / alone_s)
    assert bounds(shapes(program), engines).closed_loop_per_s == math.inf
    dear = replace(engines, timing=replace(engines.timing, prefill_base_s=10.0))
    alone_s += (3 + 1) * 10.0  # iterations that compute prompts
    assert bounds(shapes(program), dear, programs_count=1).closed_loop_per_s == pytest.approx(2 / alone_s)


def test_l2_is_what_programs_leave_each_other() -> None:
    """Two turns take 7 iterations with 0.63 s of work, and 7 s of tools: six are not six times as fast as one."""
    engines = Engines(TimingProfile("t", 1.0, 0.1, 0.01), 1000, max_num_batched_tokens=2)
    x = bounds(shapes(plan((5, 4, 7.0), (1, 1, 50.0))), engines, programs_count=6).closed_loop_per_s
    assert x * (3.5 / (1 - x * 0.315) + 3.5) == pytest.approx(6)
    four = replace(engines, replicas_count=3)
    found = bounds(shapes(plan((5, 4, 7.0), (1, 1, 50.0))), four, programs_count=18)
    assert found.closed_loop_per_s == pytest.approx(3 * x)


def test_programs_that_only_generate_reach_what_they_leave_each_other() -> None:
    """With memory for all and no tools, passing through reaches 97 % of L2 or more, and never over 100."""
    engine = EngineConfig(kv_tokens=1_000_000, timing=profile("demo"))
    for programs_count in (1, 4, 16):
        scenario = Scenario(engine=engine, programs_count=programs_count, horizon_s=600, warmup_s=100)
        result = simulate(scenario, _Generating(), Passthrough())
        assert result.bounds is not None
        assert result.bounds.limited_by == "L2"
        assert 0.97 < result.limit_ratio <= 1.0, programs_count


def test_l3_is_the_tools() -> None:
    """Four processors, 3 s of tools for two turns (the last turn's tool may never run)."""
    found = bounds(shapes(plan((5, 4, 3.0), (1, 1, 50.0))), Engines(TIMING, 1000), tool_processors_count=4)
    assert found.tools_per_s == pytest.approx(4 * 2 / 3.0)


def test_the_limit_is_the_least_and_says_its_name() -> None:
    """L0 is no limit of its own: L1 is never more."""
    found = Bounds(9.0, 3.0, 1.0, closed_loop_per_s=2.0, tools_per_s=4.0)
    assert (found.limit_per_s, found.limited_by) == (2.0, "L2")
    assert replace(found, closed_loop_per_s=math.inf).limited_by == "L1"


def test_impossible_bound_is_refused() -> None:
    """Cases are no turns, a turn that is larger than every replica, and empty engines."""
    with pytest.raises(ValueError, match="at least one turn"):
        bounds([], Engines(TIMING, 1000))
    with pytest.raises(ValueError, match="a turn of 1001 tokens fits on no replica of 1000"):
        bounds(shapes(plan((1000, 1, 0.0))), Engines(TIMING, 1000))
    with pytest.raises(ValueError, match="capacity_tokens must be at least 1"):
        Engines(TIMING, 0)


def test_an_engine_that_takes_no_time_bounds_nothing() -> None:
    """Only held memory costs anything, and then nothing need be held."""
    instant = TimingProfile("instant", 0.0, 0.0, 0.0)
    assert bounds(shapes(plan((5, 4, 3.0), (1, 1, 0.0))), Engines(instant, 1000)).limit_per_s == math.inf


TURNS = st.tuples(st.integers(1, 400), st.integers(1, 60), st.floats(0, 300))
PLANS = st.lists(
    st.builds(
        lambda turns, shared: plan(*turns, shared_tokens=shared),
        st.lists(TURNS, min_size=1, max_size=6),
        st.integers(0, 200),
    ),
    min_size=1,
    max_size=5,
)
POOLS = st.integers(4000, 100_000)


@given(plans=PLANS, pool=POOLS, more=st.integers(1, 100_000))
def test_more_memory_is_never_worse(plans: list[ProgramPlan], pool: int, more: int) -> None:
    """L0 and L1 grow with the pool; L1 is never more than L0 and reaches it in an endless pool."""
    less, greater, endless = (bounds(shapes(*plans), Engines(TIMING, tokens)) for tokens in (pool, pool + more, 10**15))
    tolerance = 1 + 1e-9
    assert less.no_recompute_per_s <= greater.no_recompute_per_s * tolerance
    assert less.hold_or_drop_per_s <= greater.hold_or_drop_per_s * tolerance
    assert less.hold_or_drop_per_s <= less.no_recompute_per_s * tolerance
    assert endless.hold_or_drop_per_s == pytest.approx(endless.no_recompute_per_s)


@given(plans=PLANS, pool=POOLS, slower=st.floats(1, 5))
def test_slower_tools_and_engines_are_never_better(plans: list[ProgramPlan], pool: int, slower: float) -> None:
    """Every bound falls or stays."""
    late = [
        replace(each, turns=tuple(replace(turn, tool_s=turn.tool_s * slower) for turn in each.turns)) for each in plans
    ]
    weak = replace(TIMING, base_s=TIMING.base_s * slower, prefill_token_s=TIMING.prefill_token_s * slower)
    before, *after = (
        bounds(shapes(*each), Engines(timing, pool), programs_count=8, tool_processors_count=3)
        for each, timing in ((plans, TIMING), (late, TIMING), (plans, weak))
    )
    for worse in after:
        for name in ("no_recompute_per_s", "hold_or_drop_per_s", "closed_loop_per_s", "tools_per_s"):
            assert getattr(worse, name) <= getattr(before, name) * (1 + 1e-9), name


@given(g=st.floats(0.001, 10), w=st.floats(1, 1e7), h=st.floats(0, 1e8), pool=POOLS)
def test_the_root_solves_the_equation(g: float, w: float, h: float, pool: int) -> None:
    """X·W·a/(1 - X·g) + X·H = C, with X under 1/g."""
    x = Engines(TIMING, pool).turns_per_s(TurnCost(g, w), h)
    assert 0 < x < 1 / g
    assert x * w * TIMING.base_s / (1 - x * g) + x * h == pytest.approx(pool, rel=1e-3)


@given(n=st.floats(1, 1e5), g=st.floats(0.001, 10), z=st.floats(0, 1e3), count=st.integers(1, 1000))
def test_the_root_of_the_loop_solves_its_equation(n: float, g: float, z: float, count: int) -> None:
    """X·n·a/(1 - X·g) + X·z = N, with X under 1/g."""
    x = Engines(TIMING, 1000).looped_turns_per_s(n, g, z, count)
    assert 0 < x < 1 / g
    assert x * n * TIMING.base_s / (1 - x * g) + x * z == pytest.approx(count, rel=1e-3)


@given(plans=PLANS, pool=POOLS)
def test_everybody_is_held_where_nobody_is_away(plans: list[ProgramPlan], pool: int) -> None:
    """Without gaps holding is free, so L1 is L0."""
    busy = [replace(each, turns=tuple(replace(turn, tool_s=0.0) for turn in each.turns)) for each in plans]
    found = bounds(shapes(*busy), Engines(TIMING, pool))
    assert found.hold_or_drop_per_s == pytest.approx(found.no_recompute_per_s)


def test_a_batch_is_bounded_by_its_turns_its_tools_and_its_longest_program() -> None:
    """100 turns at 5 a second, or 2 a second of tools; a program that takes 30 s or 60 s alone."""
    turns_bound, tools_bound = Bounds(9.0, 5.0, 1.0), Bounds(9.0, 5.0, 1.0, tools_per_s=2.0)
    assert makespan_bound_s(turns_bound, 100, [3.0, 15.0]) == 20.0
    assert makespan_bound_s(tools_bound, 100, [30.0]) == 50.0
    assert makespan_bound_s(turns_bound, 100, [60.0]) == 60.0
    assert makespan_bound_s(turns_bound, 100, []) == 20.0, "all programs may have failed before their ends"


@pytest.mark.parametrize("policy", [Passthrough(), Cap(n=6)], ids=["passthrough", "cap"])
@pytest.mark.parametrize("programs_count", [2, 16])
@pytest.mark.parametrize("name", ["standard", "shared-prefix-90"])
def test_no_run_passes_the_bounds(name: str, programs_count: int, policy: Policy) -> None:
    """Simulated turns a second are below the limit (3 % for the window's luck), with two tools at a time or many."""
    pool_tokens = {"standard": 16_000, "shared-prefix-90": 40_000}[name]
    engine = EngineConfig(kv_tokens=pool_tokens, timing=profile("demo"))
    engines = Engines(engine.timing, pool_tokens, max_num_batched_tokens=engine.max_num_batched_tokens)
    plans = [workload(name).program(index, 0) for index in range(100)]
    for cpu_count in (None, 2):
        scenario = Scenario(
            engine=engine,
            programs_count=programs_count,
            horizon_s=250,
            warmup_s=50,
            tools=ToolSettings(cpu_count=cpu_count),
        )
        result = simulate(scenario, workload(name), policy)
        limit = bounds(shapes(*plans), engines, programs_count=programs_count, tool_processors_count=cpu_count)
        assert 0.3 < result.turns_per_min_count / 60 / limit.limit_per_s < 1.03, (cpu_count, limit)
        # The bounds of the finished turns differ from those of all turns, but not by much.
        assert 0.3 < result.limit_ratio < 1.03, (cpu_count, result.bounds)
