"""The companion systems' policies beside each other: all of them run, and their figures are over those of FCFS."""

from __future__ import annotations

from benchmarks.companions import BASELINE, CASES, CONTESTANTS, rows_of, table
from benchmarks.simulated import scenario_of
from thunderagent.simulator.comparison import ComparisonPlan, compare
from thunderagent.simulator.workloads import workload


def test_every_policy_has_a_row_over_the_stock_engine() -> None:
    """Paired by seed, with costs; nobody fails a turn."""
    scenario = scenario_of("demo", minutes=1.5)
    plan = ComparisonPlan(scenario, workload("standard"), CONTESTANTS, (8,), (0, 1), process_count=1)
    rows = rows_of(compare(plan))
    assert [row["policy"] for row in rows] == list(CONTESTANTS)
    assert not any(row["failed_turns"] for row in rows)
    assert all(row["throughput_ratio"] and row["latency_ratio"] and row["cost_caching"] for row in rows)
    (baseline,) = (row for row in rows if row["policy"] == BASELINE)
    assert baseline["throughput_ratio"] == "1 ± 0"
    assert table("tiny", rows).row_count == len(CONTESTANTS)


def test_the_settings_exist() -> None:
    """Workloads and engines of the benchmark are those that the package has."""
    for case in CASES:
        assert scenario_of(case.profile, minutes=case.minutes, warmup_minutes=case.warmup_minutes, loop=case.loop)
        assert workload(case.workload).program(0, 0).turns
