"""Equations 1 to 6 of the paper, with its numbers."""

from __future__ import annotations

from itertools import pairwise
from math import inf

import pytest
from hypothesis import given
from hypothesis import strategies as st

from benchmarks.machine import RESULTS
from benchmarks.nova_model import read_profile
from thunderagent_nova.messages import Profile, SplitTimes
from thunderagent_nova.policy import (
    PAPER,
    Adaptive,
    Static,
    Whole,
    adaptive_of,
    all_pairs,
    best_pair,
    decode_share,
    expected_wait_s,
    operating_pair,
    pair_of,
    paper_like,
    pareto_front,
)


def times(units: int, encode_s: float, prefill_s: float, beside_encode_s: float, beside_prefill_s: float) -> SplitTimes:
    return SplitTimes(units, 84 - units, encode_s, prefill_s, beside_encode_s, beside_prefill_s)


def profile_of(*splits: SplitTimes) -> Profile:
    return Profile("card", 84, 0.8068, 0.3241, {1: 0.0289}, splits)


SLOW_DECODE = times(12, 0.9, 0.36, 0.078, 0.075)
MIDDLE = times(24, 1.0, 0.40, 0.040, 0.045)
QUICK_DECODE = times(36, 1.6, 0.70, 0.034, 0.040)
PROFILE = profile_of(QUICK_DECODE, SLOW_DECODE, MIDDLE)


def test_the_latency_of_a_pair_is_equation_1() -> None:
    """t_v 1.0 and t_p 0.5 are two thirds and one third of the time during which 50 tokens are decoded."""
    pair = pair_of(times(24, 1.0, 9.9, 0.040, 9.9), times(36, 9.9, 0.5, 9.9, 0.036), 50)
    assert pair.latency_s == pytest.approx(1.0 + 0.5 + (2 / 3 * 0.040 + 1 / 3 * 0.036) * 50)
    assert pair.throughput_per_s == pytest.approx(1 / 1.5)


def test_without_a_loss_the_latency_is_that_of_table_1() -> None:
    """Undisturbed stages take the time that they take alone: 806.8, 324.1 and 28.9 ms."""
    alone = times(24, 0.8068, 0.3241, 0.0289, 0.0289)
    assert pair_of(alone, alone, 60).latency_s == pytest.approx(0.8068 + 0.3241 + 60 * 0.0289)


def test_the_best_pair_is_the_one_with_the_least_latency() -> None:
    """Equation 3 tries every pair, also pairs of different splits."""
    best = best_pair(PROFILE, 55)
    assert len(all_pairs(PROFILE, 55)) == 9
    assert best.latency_s == min(pair.latency_s for pair in all_pairs(PROFILE, 55))
    assert (best.beside_encode, best.beside_prefill) == (MIDDLE, MIDDLE)


def test_longer_answers_want_more_units_for_decoding() -> None:
    """A token each second weighs against encoding once."""
    assert best_pair(PROFILE, 1).beside_encode is SLOW_DECODE
    assert best_pair(PROFILE, 1000).beside_encode is QUICK_DECODE


@given(
    st.lists(
        st.tuples(*[st.floats(0.01, 2.0)] * 4),
        min_size=1,
        max_size=6,
    ),
    st.integers(1, 100),
)
def test_nothing_beats_the_pareto_front(rows: list[tuple[float, float, float, float]], output_tokens: int) -> None:
    """Each pair is matched in both by one of the front, and on the front more throughput costs latency."""
    profile = profile_of(*(times(2 * i + 2, *row) for i, row in enumerate(rows)))
    front = pareto_front(profile, output_tokens)
    for pair in all_pairs(profile, output_tokens):
        assert any(
            each.latency_s <= pair.latency_s and each.throughput_per_s >= pair.throughput_per_s for each in front
        )
    assert all(
        first.latency_s < second.latency_s and first.throughput_per_s < second.throughput_per_s
        for first, second in pairwise(front)
    )
    assert front[0].latency_s == best_pair(profile, output_tokens).latency_s


@pytest.mark.parametrize(
    ("pending", "beside_encode", "beside_prefill"), [(0, 24, 30), (1, 24, 30), (2, 20, 24), (3, 16, 18), (4, 12, 12)]
)
def test_the_papers_shares(pending: int, beside_encode: int, beside_prefill: int) -> None:
    """SM_op 24 and 30, alpha 4 and 6: "SM_dec will drop to SM_min when the number of pending requests reaches 4"."""
    assert (PAPER.split("encode", pending), PAPER.split("prefill", pending)) == (beside_encode, beside_prefill)
    assert PAPER.split("encode", pending + 50) == 12


def test_the_papers_shares_in_proportion() -> None:
    """132 SMs in eights: 37.7 becomes 32, and 18.9 becomes 16."""
    policy = paper_like(132, tuple(range(8, 128, 8)))
    assert [policy.split("encode", pending) for pending in (1, 2, 3, 4)] == [32, 24, 24, 16]
    assert paper_like(2, (1,)).split("encode", 1) == 1


def test_the_share_is_never_below_the_floor() -> None:
    """Equation 5."""
    assert [decode_share(24, 12, 5, pending) for pending in range(1, 6)] == [24, 19, 14, 12, 12]


def test_a_share_is_rounded_down_to_one_that_there_is() -> None:
    """A device has partitions in steps; a share below the smallest gets the smallest."""
    policy = Adaptive((8, 16, 24), 24, 24, 4, 5, 5)
    assert [policy.split("encode", pending) for pending in (1, 2, 3, 4, 5)] == [24, 16, 8, 8, 8]


def test_shares_in_no_order_are_refused() -> None:
    """Rounding down needs an order."""
    for shares in ((), (16, 8), (8, 8)):
        with pytest.raises(ValueError, match="shares"):
            Adaptive(shares, 24, 24, 4, 5, 5)


def test_a_profile_gives_the_adaptive_policy() -> None:
    """SM_op is from equation 3, SM_min where a token takes 2.8 times as long, alpha so that 4 pending are the floor."""
    assert adaptive_of(PROFILE, 55) == Adaptive((12, 24, 36), 24, 24, 12, 4, 4)


def test_a_little_latency_buys_much_throughput() -> None:
    """Eq. 3 alone takes 36 units for a little less latency, but 13 % fewer requests a second."""
    flat = profile_of(times(24, 1.0, 0.40, 0.040, 0.040), times(36, 1.15, 0.46, 0.035, 0.035))
    best, taken = best_pair(flat, 55), operating_pair(flat, 55)
    assert (best.beside_encode.decode_units, best.beside_prefill.decode_units) == (36, 36)
    assert (taken.beside_encode.decode_units, taken.beside_prefill.decode_units) == (24, 24)
    assert taken.latency_s < 1.03 * best.latency_s
    assert best.throughput_per_s < 0.87 * taken.throughput_per_s
    assert operating_pair(flat, 55, slack_ratio=0.0) == best


def test_the_shares_of_an_h100() -> None:
    """The measured profile: 29 % more requests a second than Eq. 3's pair, for 4 % more latency without a queue."""
    h100 = read_profile(RESULTS / "nova-profile.json")
    best, taken = best_pair(h100, 55), operating_pair(h100, 55)
    assert taken.latency_s < 1.05 * best.latency_s
    assert taken.throughput_per_s > 1.2 * best.throughput_per_s
    policy = adaptive_of(h100, 55)
    assert policy.floor_units >= 16, "8 SMs: a token takes four times what it takes alone"
    assert policy.beside_encode_units < 64


def test_a_tighter_bound_on_tokens_lifts_the_floor() -> None:
    """At twice the time 12 units are too few; at half of it all are too few, and the best stays."""
    assert adaptive_of(PROFILE, 55, longest_token_ratio=2.0).floor_units == 24
    assert adaptive_of(PROFILE, 55, longest_token_ratio=0.5).floor_units == 24


def test_a_profile_without_splits_is_refused() -> None:
    """There is nothing to adapt."""
    with pytest.raises(ValueError, match="empty"):
        adaptive_of(profile_of(), 55)


def test_static_splits_ignore_the_load() -> None:
    """They ignore the load."""
    assert [Static(8, 16).split(stage, 9) for stage in ("encode", "prefill")] == [8, 16]
    assert Whole().split("encode", 9) is None


# Table V: rate, service time, and the authors' prediction from the times of all requests.
TABLE_V = [(0.3, 1.39, 0.51), (0.4, 1.44, 1.00), (0.5, 1.43, 1.86), (0.6, 1.42, 4.32), (0.7, 1.38, 20.99)]


@pytest.mark.parametrize(("rate_per_s", "mean_s", "predicted_s"), TABLE_V)
def test_waits_are_those_of_table_v(rate_per_s: float, mean_s: float, predicted_s: float) -> None:
    """The authors' times vary a little, so their waits are larger by up to 7 %."""
    assert predicted_s * 0.93 <= expected_wait_s(rate_per_s, mean_s) <= predicted_s


def test_the_first_wait_of_table_v() -> None:
    """The wait is 0.50 s, and 0.51 s in the paper; times that vary by 0.28 s explain that."""
    assert expected_wait_s(0.3, 1.39) == pytest.approx(0.497, abs=0.0005)
    assert expected_wait_s(0.3, 1.39, 0.28) == pytest.approx(0.517, abs=0.0005)


def test_from_full_load_on_the_wait_has_no_end() -> None:
    """The last column of table V has 0.8 requests a second of 1.35 s each."""
    assert expected_wait_s(0.8, 1.35) == expected_wait_s(1.0, 1.0) == inf
