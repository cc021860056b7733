"""Contestants: texts, presets, and the oracle."""

from __future__ import annotations

import sys
from dataclasses import replace
from typing import TYPE_CHECKING

import pytest

from thunderagent.errors import ConfigurationError
from thunderagent.programs.policies.baselines.cap import Cap
from thunderagent.programs.policies.papers.thunderagent import ThunderAgent
from thunderagent.simulator.comparison.contestants import Contestant, bounds_of
from thunderagent.simulator.engine.records import EngineConfig
from thunderagent.simulator.engine.timing import profile
from thunderagent.simulator.figures.bounds import Engines, TurnShape, bounds
from thunderagent.simulator.runs.scenario import Scenario
from thunderagent.simulator.workloads.distributions import workload
from thunderagent.simulator.workloads.plans import ProgramPlan, TurnPlan

if TYPE_CHECKING:
    from pathlib import Path

SCENARIO = Scenario(engine=EngineConfig(kv_tokens=16_000, timing=profile("demo")), horizon_s=900, warmup_s=100)
STANDARD = workload("standard")


@pytest.mark.parametrize(
    "text",
    ["passthrough", "cap:n=6", "thunderagent:delta_s=1:half_life_s=inf", "thunderagent-ports", "oracle", "ttl:ttl_s=2"],
)
def test_a_text_is_read_and_written_back(text: str) -> None:
    """It also gives a policy."""
    contestant = Contestant.parse(text)
    assert str(contestant) == text
    policy, foresight = contestant.prepare(SCENARIO, STANDARD)
    assert policy.name == contestant.name.removesuffix("-ports")
    assert (foresight is not None) == (text == "oracle")


def test_a_class_of_ones_own_is_named_with_a_colon() -> None:
    """Its form is `package.module:Class`, followed by its settings."""
    contestant = Contestant.parse("thunderagent.programs.policies.baselines.cap:Cap:n=3")
    assert contestant.prepare(SCENARIO, STANDARD)[0] == Cap(n=3)


def test_a_part_of_ones_own_is_named_with_a_colon_too() -> None:
    """Its settings follow it."""
    text = "passthrough:admission=tests.builders:Breathing:priority=age"
    contestant = Contestant.parse(text)
    assert str(contestant) == text
    assert dict(contestant.settings) == {"admission": "tests.builders:Breathing", "priority": "age"}


MINE = """
from dataclasses import dataclass

from tests.builders import Breathing
from thunderagent.programs.policies import PARTS


@dataclass
class Window(Breathing):
    pass


class Balance(PARTS["global_policy"]["balance"]):
    pass
"""


@pytest.mark.parametrize(
    "text",
    [
        "passthrough:admission=mine_of_a_test:Window",
        "passthrough:admission=mine_of_a_test:Window:priority=age",
        "breakeven:global_policy=balance+mine_of_a_test:Balance",
        "breakeven:global_policy=mine_of_a_test:Balance+migrate",
    ],
)
def test_a_part_in_a_module_beside_one_s_work_needs_no_dot(
    text: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The page on policies names one in that way."""
    (tmp_path / "mine_of_a_test.py").write_text(MINE)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "mine_of_a_test", raising=False)
    assert str(Contestant.parse(text)) == text


def test_a_preset_is_a_policy_whose_settings_can_still_be_given() -> None:
    """They are the public ports' defaults, with another time between checks."""
    policy, _ = Contestant.parse("thunderagent-ports:delta_s=1").prepare(SCENARIO, STANDARD)
    assert isinstance(policy, ThunderAgent)
    assert (policy.delta_s, policy.thrash_ratio, policy.lambda_max, policy.restore_ratio) == (1, 0.95, 0.8, 0.85)


@pytest.mark.parametrize(
    ("text", "named"),
    [
        ("nobody", "no policy 'nobody'; there are .*, cap, .*, thunderagent-ports, or package.module:Class"),
        ("oracle:headroom_ratio=1.5", "headroom_ratio must be under 1"),
        ("cap:m=3", "no setting 'm'"),
        ("cap:n", "cannot be loaded|no policy|not a policy"),
        ("cap:n=3:", "not a policy"),
        ("passthrough:admission=window:size", "not a policy"),
        ("passthrough:admission=windou:size", "admission 'windou:size' cannot be loaded"),
        ("cap:n=0", "n must be"),
        ("oracle:n=3", "policy oracle has no setting 'n'; it has: hold_below_s"),
        ("oracle:headroom_ratio=much", "headroom_ratio must be a number"),
    ],
)
def test_wrong_contestant_is_named(text: str, named: str) -> None:
    """The error comes before any run."""
    with pytest.raises(ConfigurationError, match=named):
        Contestant.parse(text)


def test_the_oracle_knows_what_nobody_else_does() -> None:
    """On a thrashing load it is nearer to the limit than `passthrough`, and never over it."""
    small = replace(SCENARIO, engine=EngineConfig(kv_tokens=60_000, timing=profile("demo")), programs_count=48)
    oracle, passthrough = (Contestant.parse(text).run(small, STANDARD) for text in ("oracle", "passthrough"))
    assert passthrough.limit_ratio < 0.6
    assert 0.8 < oracle.limit_ratio < 1.0
    assert oracle.hit_ratio > passthrough.hit_ratio + 0.3


def test_the_oracle_holds_by_its_threshold() -> None:
    """With a threshold of 0 it drops every program at the end of each turn."""
    result = Contestant.parse("oracle:hold_below_s=0").run(replace(SCENARIO, horizon_s=200, warmup_s=0), STANDARD)
    goes_on = result.turn_count - result.program_count
    assert result.decision_counts["pause policy"] >= 0.95 * goes_on
    assert result.decision_counts.get("grant home", 0) == 0


class _Growing:
    """One program that outgrows its engine."""

    name = "growing"

    def program(self, index: int, seed: int) -> ProgramPlan:
        return ProgramPlan(f"p{seed}-{index}", tuple(TurnPlan(6000, 10, 1.0) for _ in range(5)))


def test_bounds_end_where_engines_refuse() -> None:
    """Two turns of 6,010 fit into 16,000 tokens: the bounds are those of two turns, and do not raise."""
    two = [
        TurnShape(6000, 6000, 10, shared_tokens=0, gap_s=None),
        TurnShape(12_010, 6000, 10, shared_tokens=0, gap_s=1.0),
    ]
    by_hand = bounds(two, Engines.of(SCENARIO.engine, 1), programs_count=SCENARIO.programs_count)
    assert bounds_of(SCENARIO, _Growing()).limit_per_s == pytest.approx(by_hand.limit_per_s)


def test_a_workload_of_which_nothing_fits_has_no_bounds() -> None:
    """The error names the workload."""
    tiny = replace(SCENARIO, engine=EngineConfig(kv_tokens=1600, timing=profile("demo")))
    with pytest.raises(ConfigurationError, match="workload growing has no bounds here: bounds need at least one turn"):
        bounds_of(tiny, _Growing())
