"""The figures of ThunderAgent: what is read off a run."""

from __future__ import annotations

from dataclasses import replace

import pytest

from benchmarks.papers import COMMANDS, PARTS_OF_A_TURN, SANDBOXES
from benchmarks.papers import __doc__ as page
from benchmarks.simulated import scenario_of
from thunderagent.simulator.comparison.contestants import Contestant
from thunderagent.simulator.workloads.distributions import workload


def test_every_figure_is_named_where_one_looks_for_it() -> None:
    """The list of commands is that of the module's text."""
    assert page is not None
    named = [line.split()[2] for line in page.splitlines() if line.startswith("    scripts/bench papers ")]
    assert sorted(named) == sorted(COMMANDS)


def test_the_parts_of_a_turn_are_the_whole() -> None:
    """What a turn was held, queued, prefilled and decoded is its latency; programs wait for sandboxes made late."""
    scenario = scenario_of("glm-4.6-h100x8", minutes=8)
    late = replace(SANDBOXES, prepare_at="first_tool")
    result = Contestant.parse("thunderagent").run(
        replace(scenario, programs_count=40, tools=late), workload("openhands")
    )
    parts = {name: pick(result) for name, pick in PARTS_OF_A_TURN.items()}
    assert parts["held_s"] + parts["queued_and_prefilled_s"] + parts["decoded_s"] == pytest.approx(parts["turn_s"])
    assert min(parts.values()) > 0
