"""The default policy beside passing through, on five loads that take seconds: it helps, or does no harm.

Runs are the same every time, so a bar is a little under the seen value: a policy change that loses more shows.
"""

from __future__ import annotations

import pytest

from thunderagent.config import ServeConfig
from thunderagent.simulator.comparison.comparison import compare
from thunderagent.simulator.comparison.results import ComparisonPlan
from thunderagent.simulator.engine.records import EngineConfig
from thunderagent.simulator.engine.timing import profile
from thunderagent.simulator.runs.scenario import Scenario
from thunderagent.simulator.workloads.distributions import workload

DEFAULT = ServeConfig().policy
SEEDS = (0, 1, 2, 3)
"""A run of fifteen minutes alone is a fifth over or under."""


@pytest.mark.parametrize(
    ("programs", "on", "programs_count", "at_least"),
    [
        ("standard", "demo", 4, 0.99),  # memory is not short: nothing to gain or lose
        ("coding-assistant", "glm-4.6-h100x8", 3, 0.99),
        ("standard", "demo", 16, 1.8),  # here memory is short
        ("mini-swe-agent", "qwen3-8b-rtx5090", 24, 1.25),
        ("openhands", "glm-4.6-h100x8", 48, 1.35),
    ],
)
def test_the_default_beats_passing_through_where_memory_is_short_and_harms_nowhere(
    programs: str, on: str, programs_count: int, at_least: float
) -> None:
    timing = profile(on)
    assert timing.kv_tokens is not None
    batched_tokens = 8192 if "h100" in on else 2048
    engine = EngineConfig(kv_tokens=timing.kv_tokens, timing=timing, max_num_batched_tokens=batched_tokens)
    scenario = Scenario(engine=engine, replica_count=1, loop="closed", horizon_s=15 * 60, warmup_s=5 * 60)
    contestants = ("passthrough", DEFAULT)
    plan = ComparisonPlan(scenario, workload(programs), contestants, (programs_count,), SEEDS, process_count=1)
    result = compare(plan)
    through, default = (
        sum(run.result.turns_per_min_count for run in result.runs_of(policy, programs_count)) for policy in contestants
    )
    assert default / through >= at_least
