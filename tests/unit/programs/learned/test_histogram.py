"""The histogram: its quantiles are those of the values, and old values count less."""

from __future__ import annotations

from bisect import bisect_right
from math import ceil

import pytest
from hypothesis import given
from hypothesis import strategies as st

from thunderagent.programs.learned.histogram import REMEMBERED_COUNT, LogHistogram, geometric_edges

EDGES = geometric_edges(1.0, 2.0, 6)


def histogram_of(*values: float) -> LogHistogram:
    histogram = LogHistogram(EDGES)
    for value in values:
        histogram.add(value)
    return histogram


def test_edges_grow_by_a_constant_step() -> None:
    """From the first on, each is a fixed multiple of the one before."""
    assert geometric_edges(0.5, 2.0, 4) == (0.5, 1.0, 2.0, 4.0)


def test_a_quantile_lies_between_edges_in_proportion() -> None:
    """By hand: one value is under 1, two are from 1 to 2, one is from 2 to 4."""
    histogram = histogram_of(0.5, 1.5, 1.7, 3.0)
    assert [histogram.quantile(ratio, -1.0) for ratio in (0.25, 0.5, 0.75, 0.875, 1.0)] == [1.0, 1.5, 2.0, 3.0, 4.0]
    assert histogram.total == 4


def test_an_empty_histogram_says_what_it_is_told_to() -> None:
    """It gives the default, whatever the ratio."""
    assert histogram_of().quantile(0.5, 7.0) == 7.0
    assert histogram_of(3.0).quantile(0.5, 7.0) != 7.0


def test_values_beyond_the_last_edge_are_as_large_as_it() -> None:
    """Their true size is unknown."""
    assert histogram_of(1e9).quantile(0.5, 0.0) == EDGES[-1] == 32.0


def test_a_quantile_is_computed_anew_after_each_value() -> None:
    """An earlier result is not kept for too long."""
    histogram = histogram_of(1.5)
    assert histogram.quantile(1.0, 0.0) == 2.0
    histogram.add(20.0)
    assert histogram.quantile(1.0, 0.0) == 32.0


@given(values=st.lists(st.floats(0, 40), min_size=1, max_size=60), eighths=st.lists(st.integers(0, 8), min_size=1))
def test_a_quantile_is_in_the_bin_of_the_value_that_sorting_finds(values: list[float], eighths: list[int]) -> None:
    """A naive computation agrees to within a bin."""
    histogram = histogram_of(*values)
    for eighth in eighths:
        ratio = eighth / 8  # exact in binary, so that both round alike
        exact = sorted(values)[max(0, ceil(ratio * len(values)) - 1)]
        index = bisect_right(EDGES, exact)
        low, high = (0.0, *EDGES)[index], (*EDGES, EDGES[-1])[index]
        assert low <= histogram.quantile(ratio, -1.0) <= high


@given(values=st.lists(st.floats(0, 40), min_size=1, max_size=30))
def test_quantiles_rise_with_the_ratio(values: list[float]) -> None:
    """The more of all values lie below a value, the larger it is."""
    histogram = histogram_of(*values)
    quantiles = [histogram.quantile(ratio / 10, -1.0) for ratio in range(11)]
    assert quantiles == sorted(quantiles)


def test_the_newest_half_of_what_is_remembered_weighs_as_much_as_all_before() -> None:
    """2,000 values are under 2, then a thousand over 16: the median is over 16, and was not after 500."""
    histogram = histogram_of(*[1.5] * int(REMEMBERED_COUNT))
    for _ in range(500):
        histogram.add(20.0)
    assert histogram.quantile(0.5, 0.0) <= 2.0
    for _ in range(501):
        histogram.add(20.0)
    assert histogram.quantile(0.5, 0.0) >= 16.0
    assert histogram.total <= REMEMBERED_COUNT


@pytest.mark.parametrize("ratio", [0.1, 0.5, 0.9])
def test_forgetting_changes_no_quantile(ratio: float) -> None:
    """All counts shrink alike."""
    values = [0.5, 1.5, 3.0, 6.0] * 500
    before = histogram_of(*values).quantile(ratio, 0.0)
    halved = histogram_of(*values, 6.0)
    assert halved.total == pytest.approx((REMEMBERED_COUNT + 1) / 2)
    assert halved.quantile(ratio, 0.0) == pytest.approx(before, rel=0.01)
