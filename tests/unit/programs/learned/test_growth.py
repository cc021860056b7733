"""What is learned about growth."""

from __future__ import annotations

from math import inf

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.builders import grew
from thunderagent.programs.learned.sizes import ENOUGH_PROGRAMS_COUNT, ENOUGH_TURNS_COUNT, Growth

BIN = 2**0.5


# --- Growth


def test_before_anything_is_seen_growth_is_as_told() -> None:
    """Both are the defaults; speed and size of growth are unknown."""
    growth = Growth()
    assert (growth.turn_tokens(0.75, 300), growth.output_tokens(0.75, 100)) == (300, 100)
    assert (growth.tokens_per_s, growth.whole_tokens) == (inf, inf)


def test_growth_matches_a_calculation_by_hand() -> None:
    """Turns of 100 tokens in 5 s and of 300 in 15 are 20 a second."""
    growth = Growth()
    growth.turn_ended(grew(None, 10, 9.0))
    for _ in range(ENOUGH_TURNS_COUNT // 2):
        assert growth.tokens_per_s == inf
        growth.turn_ended(grew(100, 20, 5.0))
        growth.turn_ended(grew(300, 30, 15.0))
    assert growth.tokens_per_s == pytest.approx(20.0)


def test_the_size_of_programs_is_the_mean_over_their_turns() -> None:
    """Only ended programs count: two turns larger by 0 and 100, and four by 0, 200, 400 and 600, count as six."""
    growth = Growth()
    for number in range(ENOUGH_PROGRAMS_COUNT):
        assert growth.whole_tokens == inf
        growth.program_ended(*((1200, 4) if number % 2 else (100, 2)))
    shorts, longs = (ENOUGH_PROGRAMS_COUNT + 1) // 2, ENOUGH_PROGRAMS_COUNT // 2
    mean_tokens = (100 * shorts + 1200 * longs) / (2 * shorts + 4 * longs)
    assert growth.whole_tokens == pytest.approx(mean_tokens, rel=0.02)


def test_a_first_turn_says_nothing_of_growth() -> None:
    """Its prompt is where the program begins; its answer counts like others."""
    growth = Growth()
    for _ in range(20):
        growth.turn_ended(grew(None, 40, 3.0))
    assert growth.turn_tokens(0.5, 999) == 999
    assert growth.tokens_per_s == inf
    assert 40 / BIN <= growth.output_tokens(0.5, 999) <= 40 * BIN


def test_turns_that_took_no_time_tell_nothing_of_how_fast_programs_grow() -> None:
    """A coarse clock causes them: nothing is divided by zero."""
    growth = Growth()
    for _ in range(ENOUGH_TURNS_COUNT):
        growth.turn_ended(grew(100, 10, 0.0))
    assert growth.tokens_per_s == inf


def test_a_turn_that_made_its_program_smaller_is_no_growth() -> None:
    """A compaction does not make programs shrink in the mean."""
    growth = Growth()
    for _ in range(10):
        growth.turn_ended(grew(100, 20, 5.0))
        growth.turn_ended(grew(-5000, 20, 5.0))
        growth.turn_ended(grew(0, 20, 5.0))
    assert growth.tokens_per_s == pytest.approx(20.0)
    assert growth.turn_tokens(0.99, 0) <= 100 * BIN


@given(st.lists(st.integers(1, 100_000), min_size=8, max_size=80))
def test_the_quantiles_of_growth_are_those_of_the_turns(grown: list[int]) -> None:
    """Three in four add at most `turn_tokens(0.75)`, to within a bin."""
    growth = Growth()
    for tokens in grown:
        growth.turn_ended(grew(tokens, tokens, 1.0))
    exact = sorted(grown)[-(-3 * len(grown) // 4) - 1]
    for learned in (growth.turn_tokens(0.75, 0), growth.output_tokens(0.75, 0)):
        assert min(exact / BIN - 1, 8) <= learned <= max(8, exact * BIN + 1)
        assert exact < 8 or learned >= exact / BIN - 1


def test_growth_follows_programs_that_change() -> None:
    """After a few thousand turns of another kind the old ones are forgotten."""
    growth = Growth()
    for _ in range(1000):
        growth.turn_ended(grew(100, 10, 10.0))
        growth.program_ended(1000, 1)
    for _ in range(5000):
        growth.turn_ended(grew(1000, 10, 10.0))
        growth.program_ended(5000, 1)
    assert growth.tokens_per_s == pytest.approx(100.0, rel=0.02)
    assert growth.whole_tokens == pytest.approx(5000, rel=0.02)
