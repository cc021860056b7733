"""MARS on a small engine: programs keep their shape, and each arm is what the paper takes away."""

from __future__ import annotations

from dataclasses import replace

import pytest

from benchmarks.load import LoadSpec
from benchmarks.mars import mix
from benchmarks.mars_small import (
    ARMS,
    BUDGET_TOKENS,
    CONTEXT_TOKENS,
    FASTER,
    FEWER_ANSWERED,
    POOL_TOKENS,
    SMALLER,
    Shrunk,
    engine_settings,
    saturation_per_s,
    scenario_of,
    simulated,
    words_of,
)
from thunderagent.simulator.comparison.contestants import Contestant

COSTS = {"base_s": 0.0233, "prompt_s": 0.00035, "prompt_context_s": 1.165e-7, "context_s": 2.717e-6}


def test_a_shrunk_program_has_the_turns_of_the_large_one() -> None:
    inner = mix("263k", 0.1)
    for index in range(50):
        small, large = Shrunk(inner).program(index, 3), inner.program(index, 3)
        assert small.arrival_s == large.arrival_s
        assert Shrunk(inner, at_once=True).program(index, 3) == replace(small, arrival_s=0.0)
        for ours, theirs in zip(small.turns, large.turns, strict=True):
            assert ours.new_tokens == max(1, round(theirs.new_tokens / SMALLER))
            assert ours.output_tokens == max(1, round(theirs.output_tokens / FEWER_ANSWERED))
            assert ours.tool_s == theirs.tool_s / FASTER
        assert sum(turn.new_tokens + turn.output_tokens for turn in small.turns) < CONTEXT_TOKENS


def test_real_programs_have_a_word_for_each_token() -> None:
    """The model's template adds a marker before each message, and one before the answer."""
    small = Shrunk(mix("167k", 0.1)).program(5, 0)
    told = words_of(small, 5, 0, LoadSpec())
    assert told == words_of(small, 5, 0, LoadSpec())
    assert told.arrival_s == small.arrival_s
    for ours, planned in zip(told.turns, small.turns, strict=True):
        assert len(ours.prompt.split()) == max(1, planned.new_tokens - 2)
        assert (ours.output_tokens, ours.tool_s) == (planned.output_tokens, planned.tool_s)


@pytest.mark.parametrize("name", ARMS)
def test_an_arm_has_a_policy_and_an_engine(name: str) -> None:
    arm = ARMS[name]
    Contestant.parse(arm.policy)
    settings = engine_settings(arm)
    assert settings["max_batched_tokens"] == BUDGET_TOKENS
    assert ("--scheduler-cls" in settings["extra_args"]) == (arm.plugin is not None)
    assert ("fcfs" in settings["extra_args"]) == (name == "no coordinator")


def test_memory_that_is_kept_ends_programs_sooner() -> None:
    """At 1.5 times the saturation `mars` beats first come, first served, and leads without a control plane, too."""
    scenario = scenario_of(COSTS, 1, 16, POOL_TOKENS["h100"])
    programs = Shrunk(mix("263k", 1.5 * saturation_per_s("263k", scenario)))
    means = {name: simulated(ARMS[name], scenario, programs)["mean_s"] for name in ("mars", "fcfs", "no coordinator")}
    assert means["mars"] < 0.8 * means["fcfs"]
    assert means["mars"] != means["no coordinator"]
