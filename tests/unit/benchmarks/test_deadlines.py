"""Programs meet deadlines that fit, others pay little for that, and what cannot be met is said with the first turn."""

from __future__ import annotations

from benchmarks.deadlines import MOST_RATIO, Case, find
from benchmarks.simulated import scenario_of


def test_deadlines_that_fit_are_met_and_others_are_refused_at_once() -> None:
    """Eighty programs, of which eight have one that fits, and eight one that cannot be met."""
    found = find(scenario_of("demo", minutes=240.0), Case(80, gap_s=2.0, deadline_ratio=0.7), 0)
    assert found.in_time_count == 8
    assert found.said_at_once_count == 8
    assert found.wrongly_refused_count == 0
    assert found.others_ratio <= 1.0 + 2 * (MOST_RATIO - 1.0)  # of one seed; the bar is that of a hundred
