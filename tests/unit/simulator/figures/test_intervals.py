"""Intervals against published tables, by hand, and by how often they are right."""

from __future__ import annotations

import math
from random import Random
from statistics import NormalDist

import pytest

from thunderagent.simulator.figures.intervals import Interval, t_quantile


@pytest.mark.parametrize(
    ("freedom_count", "expected"),
    # NIST/SEMATECH e-Handbook of Statistical Methods, 1.3.6.7.2, upper 0.025
    [(1, 12.706), (2, 4.303), (3, 3.182), (4, 2.776), (5, 2.571), (9, 2.262), (10, 2.228), (29, 2.045), (100, 1.984)],
)
def test_quantiles_are_those_of_the_tables(freedom_count: int, expected: float) -> None:
    assert t_quantile(freedom_count) == pytest.approx(expected, abs=0.0005)


def test_wider_confidence_approaches_the_normal_limit() -> None:
    """99 % of 5 degrees of freedom is in the same table; with very many, Student's t is normal."""
    assert t_quantile(5, 0.99) == pytest.approx(4.032, abs=0.0005)
    assert t_quantile(100_000) == pytest.approx(NormalDist().inv_cdf(0.975), abs=1e-4)


@pytest.mark.parametrize(("freedom_count", "confidence"), [(0, 0.95), (3, 0.0), (3, 1.0)])
def test_impossible_quantile_is_refused(freedom_count: int, confidence: float) -> None:
    with pytest.raises(ValueError, match="no quantile"):
        t_quantile(freedom_count, confidence)


def test_interval_matches_a_calculation_by_hand() -> None:
    """1, 2, 3: mean 2, standard deviation 1, so 4.303/√3."""
    interval = Interval.of([1.0, 2.0, 3.0])
    assert (interval.count, interval.mean) == (3, 2.0)
    assert interval.half_width == pytest.approx(4.3027 / math.sqrt(3), abs=1e-4)
    assert (interval.low, interval.high) == pytest.approx((2 - 2.4842, 2 + 2.4842), abs=1e-4)


def test_single_value_has_no_spread() -> None:
    interval = Interval.of([5.0])
    assert interval == Interval(1, 5.0, None)
    assert (interval.low, interval.high) == (5.0, 5.0)


def test_an_interval_is_written_as_its_mean_and_how_far_it_reaches() -> None:
    assert Interval(3, 0.456, 0.0321).text(2) == "0.46 ± 0.03"
    assert Interval(3, 0.456, 0.0321).text(1, percent=True, form="{} <small>± {}</small>") == (
        "45.6 % <small>± 3.2</small>"
    )
    assert Interval(1, 0.456, None).text(2) == "0.46"


def test_ratios_are_taken_pair_by_pair() -> None:
    """Seeds that differ a hundredfold cancel out: each is exactly twice its own baseline."""
    assert Interval.of_ratios([2.0, 20.0, 200.0], [1.0, 10.0, 100.0]) == Interval(3, 2.0, 0.0)
    assert Interval.of_ratios([2.0, 3.0], [1.0, 1.0]) == Interval.of([2.0, 3.0])


def test_nothing_is_a_ratio_to_nothing() -> None:
    assert Interval.of_ratios([], []) is None
    assert Interval.of_ratios([1.0, 2.0], [1.0, 0.0]) is None


@pytest.mark.parametrize("count", [2, 3, 5])
def test_95_of_100_intervals_hold_the_truth(count: int) -> None:
    """Of 4,000 intervals 95 % hold it, with a standard error of 0.35 %."""
    rng = Random(count)
    intervals = [Interval.of([rng.gauss(7.0, 3.0) for _ in range(count)]) for _ in range(4000)]
    assert sum(interval.low <= 7.0 <= interval.high for interval in intervals) / 4000 == pytest.approx(0.95, abs=0.012)
