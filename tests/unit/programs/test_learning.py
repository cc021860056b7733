"""What is learned about growth and the speed of prefill."""

from __future__ import annotations

from dataclasses import replace
from math import inf
from random import Random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.builders import grew, prefilled
from thunderagent.programs.learned.growth import (
    ENOUGH_PROGRAMS_COUNT,
    ENOUGH_TURNS_COUNT,
    FIRST_PREFILL_TOKEN_S,
    TOKEN_S_EDGES,
    Growth,
    PrefillSpeed,
)
from thunderagent.programs.learned.knowledge import Knowledge

BIN = 2**0.5
PREFILL_BIN = 2**0.25


# --- Growth


def test_before_anything_is_seen_growth_is_as_told() -> None:
    """Both are the defaults; speed and size of growth are unknown."""
    growth = Growth()
    assert (growth.turn_tokens(0.75, 300), growth.output_tokens(0.75, 100)) == (300, 100)
    assert (growth.tokens_per_s, growth.whole_tokens) == (inf, inf)


def test_growth_by_hand() -> None:
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


# --- Prefill


def test_until_it_is_seen_prefill_is_as_fast_as_guessed() -> None:
    """Turns with few uncached tokens teach nothing."""
    speed = PrefillSpeed()
    assert speed.token_s == FIRST_PREFILL_TOKEN_S
    speed.turn_ended(prefilled(5.0, 9.0, 100, 50))
    speed.turn_ended(prefilled(None, 9.0, 300, 50))
    assert speed.token_s == FIRST_PREFILL_TOKEN_S


def test_prefill_is_learned_from_streams() -> None:
    """1,000 tokens take a tenth of a second."""
    speed = PrefillSpeed()
    for _ in range(20):
        speed.turn_ended(prefilled(0.1, 3.0, 1000, 200))
    assert 1e-4 / PREFILL_BIN <= speed.token_s <= 1e-4 * PREFILL_BIN


def test_prefill_is_learned_from_whole_answers() -> None:
    """The time of a cached prompt's answer is subtracted: 100 tokens in 2 s, and in 2.1 s after 1,000 new ones."""
    speed = PrefillSpeed()
    for _ in range(20):
        speed.turn_ended(prefilled(None, 2.0, 0, 100))
    for _ in range(20):
        speed.turn_ended(prefilled(None, 2.3, 1000, 100))
    # The time of a generated token is known to within a bin of 19 %, so that of the prefill to within some of 2 s.
    assert 1e-7 < speed.token_s < 2.3e-3
    fine = PrefillSpeed()
    for _ in range(20):
        fine.turn_ended(prefilled(None, 2.0, 0, 100))
        fine.turn_ended(prefilled(None, 42.0, 400_000, 100))
    assert fine.token_s == pytest.approx(1e-4, rel=0.2)


def test_a_turn_that_generates_nothing_teaches_no_speed_of_generating() -> None:
    """Nothing is divided by zero."""
    speed = PrefillSpeed()
    speed.turn_ended(prefilled(None, 2.0, 0, 0))
    assert speed.token_s == FIRST_PREFILL_TOKEN_S


def test_prefill_is_learned_in_spite_of_a_queue() -> None:
    """Two turns in three wait for others, up to a hundred times as long as their own prefill."""
    random, speed = Random(1), PrefillSpeed()
    for number in range(600):
        tokens = random.randrange(600, 20_000)
        waited_s = random.uniform(0.0, 100 * tokens * 1e-4) if number % 3 else 0.0
        speed.turn_ended(prefilled(tokens * 1e-4 + waited_s, 30.0, tokens, 200))
    assert 1e-4 / PREFILL_BIN <= speed.token_s <= 1e-4 * PREFILL_BIN


TURNS = st.tuples(
    st.none() | st.floats(-1.0, 1e4), st.floats(0.0, 1e4), st.integers(0, 1_000_000), st.integers(0, 100_000)
)


@pytest.mark.parametrize("token_s", [0.0, 1e-310, -1.0, 100.0, inf])
def test_a_speed_of_prefill_that_cannot_be_learned_is_refused(token_s: float) -> None:
    """Times are divided by it. A file may hold anything."""
    learned = Knowledge().export()
    prices = replace(learned.prices, prefill_token_s=token_s)
    with pytest.raises(ValueError, match=r"prefill: .* is not from"):
        Knowledge().adopt(replace(learned, prices=prices))


@pytest.mark.parametrize("turns_count", [1, 10_000])
def test_the_fastest_prefill_that_is_learned_is_adopted(turns_count: int) -> None:
    """First tokens that come at once are in the lowest bin."""
    knowledge = Knowledge()
    for _ in range(turns_count):
        knowledge.prefill_speed.turn_ended(prefilled(0.0, 3.0, 1000, 200))
    other = Knowledge()
    other.adopt(knowledge.export())
    assert other.prefill_speed.token_s == knowledge.prefill_speed.token_s < TOKEN_S_EDGES[0]


@given(st.lists(TURNS, max_size=40))
def test_the_speed_of_prefill_is_never_zero_or_negative(turns: list[tuple[float | None, float, int, int]]) -> None:
    """This holds whatever clocks and usages report; a break-even time of 0 would hold nothing at all."""
    speed = PrefillSpeed()
    for first_token_s, duration_s, uncached_tokens, generated_tokens in turns:
        speed.turn_ended(prefilled(first_token_s, duration_s, uncached_tokens, generated_tokens))
        assert speed.token_s > 0
