"""The line through the samples of a process's memory: its slope, and the certainty of that slope."""

from __future__ import annotations

from random import Random

import pytest

from benchmarks.memory import slope_of

TIMES_S = [10.0 * number for number in range(300)]


def test_the_slope_of_a_line_is_its_own() -> None:
    slope = slope_of(TIMES_S, [100.0 + 6.0 * at_s / 3600 for at_s in TIMES_S])
    assert slope.mb_per_hour == pytest.approx(6.0)
    assert slope.half_width_mb_per_hour == pytest.approx(0.0, abs=1e-6)
    assert slope.at_begin_mb == pytest.approx(100.0)


def test_memory_that_never_moves_has_no_slope() -> None:
    slope = slope_of(TIMES_S, [100.0] * len(TIMES_S))
    assert (slope.mb_per_hour, slope.half_width_mb_per_hour) == (0.0, 0.0)


def test_the_interval_holds_the_truth_19_times_of_20_for_samples_that_follow_one_another() -> None:
    """An interval for independent samples would hold it half of the time."""
    misses_count = 0
    for seed in range(400):
        rng, wander_mb, resident_mb = Random(seed), 0.0, []
        for at_s in TIMES_S:
            wander_mb = 0.8 * wander_mb + rng.gauss(0.0, 1.0)
            resident_mb.append(100.0 + 3.0 * at_s / 3600 + wander_mb)
        slope = slope_of(TIMES_S, resident_mb)
        misses_count += abs(slope.mb_per_hour - 3.0) > slope.half_width_mb_per_hour
    assert 4 <= misses_count <= 44
