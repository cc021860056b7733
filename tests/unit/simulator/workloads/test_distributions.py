"""Generated programs have the medians and percentiles that the sources state."""

from __future__ import annotations

import math
from dataclasses import fields
from random import Random
from statistics import fmean

import pytest

from thunderagent.simulator.workloads.distributions import (
    AgentWorkload,
    Clipped,
    LogNormal,
    distribution,
    load_workloads,
    workload,
    workload_names,
)
from thunderagent.simulator.workloads.plans import ProgramPlan, TurnPlan


def programs_of(name: str, count: int = 400) -> list[ProgramPlan]:
    return [workload(name).program(index, 0) for index in range(count)]


def turns_of(programs: list[ProgramPlan]) -> list[TurnPlan]:
    return [turn for program in programs for turn in program.turns]


def prompts_of(programs: list[ProgramPlan]) -> list[int]:
    """Return the tokens of each turn's whole prompt."""
    prompts = []
    for program in programs:
        context_tokens = program.shared_prefix_tokens
        for turn in program.turns:
            prompts.append(context_tokens + turn.new_tokens)
            context_tokens += turn.new_tokens + turn.output_tokens
    return prompts


def percentile(values: list[float] | list[int], percent: float) -> float:
    """Return the nearest-rank percentile."""
    return sorted(values)[math.ceil(percent / 100 * len(values)) - 1]


def test_the_standard_load_stays_in_its_ranges() -> None:
    """It has uniform ranges with both ends, and an exponential tool with a mean of one second (within 5 %)."""
    programs = programs_of("standard")
    later = [turn.new_tokens for program in programs for turn in program.turns[1:]]
    assert {len(program.turns) for program in programs} == set(range(6, 13))
    assert {program.shared_prefix_tokens for program in programs} == {200}
    assert all(400 <= program.turns[0].new_tokens <= 800 for program in programs)
    assert (min(later), max(later)) == (150, 450)
    assert {turn.output_tokens for turn in turns_of(programs)} == set(range(24, 65))
    assert fmean(turn.tool_s for turn in turns_of(programs)) == pytest.approx(1.0, rel=0.05)


def test_mini_swe_agent_is_as_published() -> None:
    """Prompt p50 40k (within 10 %), output mean 261, p50 132, tool p50 0.05 s, p90 9 s (within 10 %)."""
    programs = programs_of("mini-swe-agent")
    outputs = [turn.output_tokens for turn in turns_of(programs)]
    tools_s = [turn.tool_s for turn in turns_of(programs)]
    assert percentile(prompts_of(programs), 50) == pytest.approx(40_000, rel=0.1)
    assert percentile(outputs, 50) == pytest.approx(132, rel=0.1)
    assert fmean(outputs) == pytest.approx(261, rel=0.1)
    assert percentile(tools_s, 50) == pytest.approx(0.05, rel=0.1)
    assert percentile(tools_s, 90) == pytest.approx(9, rel=0.1)
    assert max(tools_s) <= 60


def test_openhands_cuts_its_commands_off_and_prepares_a_sandbox() -> None:
    """Commands take at most 10 s, one in ten reaches that (8-12 %); a sandbox takes 30-120 s; growth is as measured."""
    programs = programs_of("openhands")
    tools_s = [turn.tool_s for turn in turns_of(programs)]
    assert max(tools_s) == 10
    assert 0.08 < sum(tool_s == 10 for tool_s in tools_s) / len(tools_s) < 0.12
    sandboxes_s = [workload("openhands").sandbox_preparation_s(index, 0) for index in range(400)]
    assert all(sandbox_s is not None and 30 <= sandbox_s <= 120 for sandbox_s in sandboxes_s)
    assert max(len(program.turns) for program in programs) == 50
    assert 1200 < fmean(turn.new_tokens for turn in turns_of(programs)) < 4400
    assert 260 < fmean(turn.output_tokens for turn in turns_of(programs)) < 440
    assert workload("standard").sandbox_preparation_s(0, 0) is None


def test_toolorchestra_waits_for_remote_tools() -> None:
    """Times are log-normal with p50 3 s (within 10 %) and a p99 over 100 s."""
    tools_s = [turn.tool_s for turn in turns_of(programs_of("toolorchestra-hle", 2000))]
    assert percentile(tools_s, 50) == pytest.approx(3, rel=0.1)
    assert 100 < percentile(tools_s, 99) < 150


def test_scienceagentbench_ends_at_its_iteration_limit() -> None:
    """The limit is 30 iterations, and no program runs longer than its judging takes."""
    programs = programs_of("scienceagentbench")
    assert max(len(program.turns) for program in programs) == 30
    assert max(turn.tool_s for turn in turns_of(programs)) <= 140


def test_gaia_tasks_arrive_as_a_poisson_process_and_the_wrong_are_long() -> None:
    """One comes every 2 s (within 10 %), gaps vary as their mean; short and long tasks have around 10 and 45 turns."""
    programs = programs_of("gaia-magentic-one", 1000)
    arrivals_s = [program.arrival_s or 0.0 for program in programs]
    gaps_s = [after - before for before, after in zip([0.0, *arrivals_s], arrivals_s, strict=False)]
    assert min(gaps_s) >= 0
    assert fmean(gaps_s) == pytest.approx(2.0, rel=0.1)
    assert fmean(gap_s**2 for gap_s in gaps_s) == pytest.approx(2 * 2.0**2, rel=0.2)
    turns = [len(program.turns) for program in programs]
    assert percentile(turns, 20) == pytest.approx(10, rel=0.15)  # the median of the right ones, which are 4 in 10
    assert percentile(turns, 70) == pytest.approx(45, rel=0.15)  # the median of the wrong ones
    assert workload("gaia-magentic-one").programs_count == 212


def test_gaia_tasks_say_what_they_come_to_and_whose_turn_it_is() -> None:
    """4 in 10 are right, and short; each turn has one role, and an output of that role's length."""
    programs = programs_of("gaia-magentic-one", 1000)
    turns = {
        outcome: [len(program.turns) for program in programs if program.outcome == outcome]
        for outcome in ("success", "failure")
    }
    assert len(turns["success"]) + len(turns["failure"]) == 1000
    assert len(turns["success"]) == pytest.approx(400, abs=40)
    assert percentile(turns["success"], 50) == pytest.approx(10, abs=1)
    assert percentile(turns["failure"], 50) == pytest.approx(45, rel=0.1)
    outputs = {
        role.name: [turn.output_tokens for turn in turns_of(programs) if turn.role == role.name]
        for role in workload("gaia-magentic-one").roles
    }
    assert percentile(outputs["web-surfer"], 50) == pytest.approx(80, rel=0.1)
    assert percentile(outputs["coder"], 50) == pytest.approx(420, rel=0.1)
    assert len(outputs["orchestrator"]) == pytest.approx(sum(map(len, outputs.values())) / 2, rel=0.05)
    assert {turn.role for turn in turns_of(programs_of("standard"))} == {""}


def test_the_coding_assistant_is_as_published() -> None:
    """Turns p50 45, p90 141, input p50 105k, new p50 720, output p50 216, gap p50 9 s, p90 71 s (within 10-15 %)."""
    programs = programs_of("coding-assistant")
    turns = turns_of(programs)
    tools_s = [turn.tool_s for turn in turns]
    assert percentile([len(program.turns) for program in programs], 50) == pytest.approx(45, rel=0.1)
    assert percentile([len(program.turns) for program in programs], 90) == pytest.approx(141, rel=0.15)
    assert percentile(prompts_of(programs), 50) == pytest.approx(105_000, rel=0.15)
    assert percentile([turn.new_tokens for program in programs for turn in program.turns[1:]], 50) == pytest.approx(
        720, rel=0.1
    )
    assert percentile([turn.output_tokens for turn in turns], 50) == pytest.approx(216, rel=0.1)
    assert percentile(tools_s, 50) == pytest.approx(9, rel=0.1)
    assert percentile(tools_s, 90) == pytest.approx(71, rel=0.1)


def test_a_group_has_one_first_prompt_and_eight_members() -> None:
    """All but the last token of the first prompt is the group's prefix; members differ in everything else."""
    programs = programs_of("grpo", 16)
    groups = [programs[:8], programs[8:]]
    for group in groups:
        assert len({program.group_id for program in group}) == 1
        assert len({(program.shared_prefix_id, program.shared_prefix_tokens) for program in group}) == 1
        assert {program.turns[0].new_tokens for program in group} == {1}
        assert len({program.turns for program in group}) == 8
    assert groups[0][0].group_id != groups[1][0].group_id
    assert groups[0][0].shared_prefix_tokens != groups[1][0].shared_prefix_tokens


def test_bursts_come_at_once() -> None:
    """32 programs come together, then none for two minutes."""
    arrivals_s = [program.arrival_s for program in programs_of("bursts", 65)]
    assert arrivals_s == [0.0] * 32 + [120.0] * 32 + [240.0]


def test_a_burst_of_64_comes_at_once_and_differs_in_size() -> None:
    programs = programs_of("burst-64", 64)
    assert {program.arrival_s for program in programs} == {0.0}
    sizes_tokens = [program.turns[0].new_tokens for program in programs]
    assert 1400 <= min(sizes_tokens) < 2000
    assert 7000 < max(sizes_tokens) <= 8000


@pytest.mark.parametrize("percent", [0, 50, 99])
def test_a_part_of_the_first_prompt_is_shared(percent: int) -> None:
    """The first prompt has 8,000 tokens, whatever part of them is shared."""
    for program in programs_of(f"shared-prefix-{percent}", 3):
        assert program.shared_prefix_tokens == 80 * percent
        assert program.turns[0].new_tokens == 8000 - 80 * percent
        assert bool(program.shared_prefix_id) == bool(percent)


def test_the_tools_name_explains_half_of_its_time() -> None:
    """48 % (43-53 %) of the variance of log times lies between tools, as measured."""
    turns = [turn for turn in turns_of(programs_of("toolorchestra-hle", 2000)) if turn.tool_s < 600]
    by_name: dict[str, list[float]] = {}
    for turn in turns:
        by_name.setdefault(turn.tool_name, []).append(math.log(turn.tool_s))
    mean = fmean(math.log(turn.tool_s) for turn in turns)
    variance = fmean((math.log(turn.tool_s) - mean) ** 2 for turn in turns)
    between = sum(len(logs) * (fmean(logs) - mean) ** 2 for logs in by_name.values()) / len(turns)
    assert len(by_name) == 8
    assert 0.43 < between / variance < 0.53


@pytest.mark.parametrize("name", [name.replace("-N", "-90") for name in workload_names()])
def test_a_program_depends_on_nothing_but_its_name_seed_and_index(name: str) -> None:
    """A fresh workload gives the same plan, in any order. Another seed gives another one."""
    asked = [workload(name).program(index, 1) for index in (7, 0, 7)]
    fresh = AgentWorkload(
        **{
            each.name: getattr(workload(name), each.name)
            for each in fields(AgentWorkload)
            if not each.name.startswith("_")
        }
    )
    assert asked == [fresh.program(index, 1) for index in (7, 0, 7)]
    assert workload(name).program(7, 2) != asked[0]
    assert all(turn.new_tokens >= 1 and turn.output_tokens >= 1 and turn.tool_s >= 0 for turn in asked[0].turns)


def test_every_number_has_a_source() -> None:
    """Each parameter of each workload states its source."""
    for known in load_workloads().values():
        assert {"turns", "first_prompt_tokens", "new_tokens", "output_tokens", "tool_s"} <= known.sources.keys()
        assert all(known.sources.values())


def test_an_unknown_workload_names_those_that_exist() -> None:
    """So does a prefix that is shared completely: nothing would be left to ask."""
    for name in ("mini", "shared-prefix", "shared-prefix-100", "shared-prefix-x"):
        with pytest.raises(ValueError, match=r"there are: .*grpo.*shared-prefix-N"):
            workload(name)


def test_distributions_are_built_from_what_is_known_of_them() -> None:
    """A mean or an upper percentile fixes a log-normal; limits clip; nonsense is refused."""
    assert distribution({"shape": "log-normal", "p50": 100, "mean": 100 * math.exp(0.5)}) == LogNormal(
        100, pytest.approx(1.0)
    )
    p90 = distribution({"shape": "log-normal", "p50": 1.0, "p90": 10.0})
    assert isinstance(p90, LogNormal)
    assert p90.at(1.2815515655446004) == pytest.approx(10.0)
    clipped = distribution({"shape": "exponential", "mean": 1.0, "at_most": 0.5})
    assert isinstance(clipped, Clipped)
    assert max(clipped.draw(Random(0)) for _ in range(10)) <= 0.5
    for table in ({"shape": "bell"}, {"shape": "uniform", "low": 1}, {"shape": "log-normal", "p50": 1}):
        with pytest.raises(ValueError, match="distribution"):
            distribution(table)
