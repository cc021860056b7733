"""MARS's further figures: programs that fit a smaller context, tools in a framework, and missing components."""

from __future__ import annotations

import pytest

from benchmarks.mars import MARS, mix
from benchmarks.mars_figures import (
    ABLATIONS,
    ALL_POLICIES,
    EVICTIONS,
    FIG8,
    FIG11,
    FIG13,
    FRAMEWORK_S,
    GPT_OSS_CONTEXT_TOKENS,
    ORDERS,
    TAILS,
    TENTHS,
    WITHOUT_COORDINATOR,
    Bounded,
    Framed,
    Task,
    _run_of,
    context_tokens,
    run_one,
    tasks_of,
)
from benchmarks.mlfq import Mlfq


def test_programs_that_a_context_cannot_hold_are_drawn_anew() -> None:
    """They come at the same time; the others are unchanged."""
    inner = mix("220k", 0.1)
    bounded = Bounded(inner, GPT_OSS_CONTEXT_TOKENS)
    for index in range(200):
        plan, before = bounded.program(index, 0), inner.program(index, 0)
        assert context_tokens(plan) <= GPT_OSS_CONTEXT_TOKENS
        assert (plan.program_id, plan.arrival_s) == (before.program_id, before.arrival_s)
        assert plan == before or context_tokens(before) > GPT_OSS_CONTEXT_TOKENS


def test_tools_in_a_framework_take_longer_and_nothing_else_changes() -> None:
    """The difference is at least the framework's own time."""
    inner = mix("125k", 0.1)
    for framed, before in zip(Framed(inner).program(3, 0).turns, inner.program(3, 0).turns, strict=True):
        assert framed.tool_s > FRAMEWORK_S
        assert (framed.new_tokens, framed.output_tokens) == (before.new_tokens, before.output_tokens)


def test_every_run_of_a_figure_has_a_key_of_its_own() -> None:
    """It also has a policy that can be made."""
    for plan in (ORDERS, EVICTIONS, TAILS, FIG8, FIG11, FIG13):
        tasks = tasks_of(plan, 0)
        assert len({task.key for task in tasks}) == len(tasks)
        assert {task.policy for task in tasks} <= set(ALL_POLICIES)
        assert set(plan.baselines) <= set(plan.policies)


def test_without_the_coordinator_the_engine_knows_no_levels() -> None:
    """The engine still keeps what it keeps through a tool."""
    with_it, _ = _run_of(Task("fig13", "125k", "h100", 1.0, MARS, 0))
    without, _ = _run_of(Task("fig13", "125k", "h100", 1.0, WITHOUT_COORDINATOR, 0))
    assert (with_it.engine.discipline, without.engine.discipline) == (Mlfq, None)
    assert without.engine.scheduling_policy == "fcfs"
    assert with_it.engines_retain
    assert without.engines_retain


@pytest.mark.parametrize("policy", ABLATIONS)
def test_a_run_comes_to_its_end(policy: str) -> None:
    """A short run has all its figures."""
    figures = run_one(Task("fig13", "125k", "h100", 1.0, policy, 0, programs_count=6), lambda: None)
    assert figures["completed_ratio"] == 1.0
    assert figures["failed_turns_count"] == 0
    assert 0 < figures["mean_s"] <= figures["p95_s"]
    assert figures["p90_s"] <= figures["p95_s"] <= figures["p99_s"]
    assert 0 < figures["first_token_p50_s"] <= figures["first_token_p90_s"] <= figures["first_token_p99_s"]


def test_where_programs_crowd_a_run_evicts_from_early_on() -> None:
    """A run of few evicts nothing; one of many does, by tenths of its time."""
    few, many = (
        run_one(Task("evictions", "263k", "h100", 2.0, "fcfs", 0, programs_count=count), lambda: None)
        for count in (1, 24)
    )
    assert set(many) == {*TENTHS, "simulated_s"}
    assert sum(few[tenth] for tenth in TENTHS) == 0
    assert sum(many[tenth] for tenth in TENTHS) > 1000
    assert sum(many[tenth] > 0 for tenth in TENTHS) > 4
