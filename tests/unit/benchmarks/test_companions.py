"""The companion systems' policies side by side: all of them run, and their figures are divided by those of FCFS."""

from __future__ import annotations

from benchmarks.companions import BASELINE, CASES, CONTESTANTS, rows_of, table
from benchmarks.simulated import goodput_table, in_time_rows, scenario_of
from thunderagent.simulator.comparison.comparison import compare
from thunderagent.simulator.comparison.results import ComparisonPlan
from thunderagent.simulator.workloads.distributions import workload


def test_every_policy_has_a_row_over_the_stock_engine() -> None:
    """Rows are paired by seed, with costs; no turn fails."""
    scenario = scenario_of("demo", minutes=1.5)
    plan = ComparisonPlan(scenario, workload("standard"), CONTESTANTS, (8,), (0, 1), process_count=1)
    result = compare(plan)
    rows = rows_of(result)
    assert [row["policy"] for row in rows] == list(CONTESTANTS)
    assert not any(row["failed_turns"] for row in rows)
    assert all(row["throughput_ratio"] and row["latency_ratio"] and row["cost_caching"] for row in rows)
    (baseline,) = (row for row in rows if row["policy"] == BASELINE)
    assert baseline["throughput_ratio"] == "1 ± 0"
    assert table("tiny", rows).row_count == len(CONTESTANTS)
    in_time = in_time_rows("tiny", result)
    for row, each in zip(result.rows(), in_time, strict=True):
        assert (each["setting"], each["programs_count"], each["policy"]) == ("tiny", 8, row.contestant)
        for kind, goodputs in (("turns", row.turn_goodputs), ("programs", row.program_goodputs)):
            assert each[kind] == "/".join(f"{100 * goodput.mean:.0f}" for goodput in goodputs) + " %"
    assert len({each["turns"] for each in in_time}) > 1
    assert list(goodput_table(in_time).columns[3].cells) == [each["turns"] for each in in_time]


def test_the_settings_exist() -> None:
    """The package has the workloads and engines of the benchmark."""
    for case in CASES:
        assert scenario_of(case.profile, minutes=case.minutes, warmup_minutes=case.warmup_minutes, loop=case.loop)
        assert workload(case.workload).program(0, 0).turns
