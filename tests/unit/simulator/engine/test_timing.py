"""The time of an iteration is a formula with constants that name their source."""

from __future__ import annotations

from dataclasses import replace
from statistics import median

import pytest

from thunderagent.simulator.engine.engine import Engine
from thunderagent.simulator.engine.records import EngineConfig, EngineRequest
from thunderagent.simulator.engine.timing import IterationWork, TimingProfile, load_profiles, profile


def test_an_iteration_takes_as_long_as_its_formula_says() -> None:
    timing = TimingProfile("t", 1.0, 0.1, 0.01, decode_context_token_s=0.001, attention_pair_s=0.0001)
    work = IterationWork(prefill_tokens=20, attention_pairs=300.0, decode_count=3, decode_context_tokens=50)
    assert timing.iteration_s(work) == pytest.approx(1.0 + 2.0 + 0.03 + 0.03 + 0.05)
    assert replace(timing, prefill_base_s=7.0).iteration_s(work) == pytest.approx(7.0 + timing.iteration_s(work))
    without = replace(work, prefill_tokens=0)
    assert replace(timing, prefill_base_s=7.0).iteration_s(without) == timing.iteration_s(without)


def test_decoding_slows_with_the_used_part_of_the_pool_less_and_less() -> None:
    timing = TimingProfile("t", 1.0, 0.1, 0.01, decode_pool_s=4.0, decode_pool_square_s=2.0)
    work = IterationWork(decode_count=3, decode_context_tokens=50)
    assert timing.iteration_s(work, 0.5) == pytest.approx(1.0 + 0.03 + 2.0 - 0.5)
    assert timing.decode_s(3, 50, 1.0) == pytest.approx(1.0 + 0.03 + 4.0 - 2.0)
    with pytest.raises(ValueError, match="decode_pool_square"):
        replace(timing, decode_pool_square_s=2.1)


def whole_turn_s(kv_tokens: int, prompt_tokens: int, output_tokens: int) -> float:
    """Return how long a simulated mocker takes for one turn alone."""
    engine = Engine(EngineConfig.of(profile("mocker"), kv_tokens=kv_tokens))
    engine.submit(EngineRequest("a", range(prompt_tokens), range(output_tokens)), 0.0)
    now_s = 0.0
    while engine.has_work:
        now_s += engine.step(now_s).duration_s
    return now_s


@pytest.mark.parametrize(
    ("prompt_tokens", "output_tokens", "measured_s"),
    [
        (1002, 8, 0.1017),
        (1002, 32, 0.3224),
        (1002, 64, 0.6130),
        (4002, 8, 0.2236),
        (4002, 32, 0.6452),
        (4002, 64, 1.218),
    ],
)
def test_a_simulated_mocker_takes_as_long_as_a_real_one(
    prompt_tokens: int, output_tokens: int, measured_s: float
) -> None:
    """Dynamo 1.6.1 with 16,000 tokens: medians of three cold turns alone, whole answers, by its frontend."""
    assert whole_turn_s(16_000, prompt_tokens, output_tokens) == pytest.approx(measured_s, rel=0.05)


def test_a_simulated_mocker_decodes_as_fast_as_a_real_one_whose_pool_is_nearly_full() -> None:
    """40 programs of 302 tokens at once on 16,000: 32.4 ms between tokens in the median, on Dynamo 1.6.1."""
    engine = Engine(EngineConfig.of(profile("mocker"), kv_tokens=16_000))
    for number in range(40):
        first = 1000 * number
        engine.submit(EngineRequest(str(number), range(first, first + 302), range(32)), 0.0)
    engine.step(0.0)
    durations_s = [engine.step(0.0).duration_s for _ in range(24)]
    assert median(durations_s) == pytest.approx(0.0324, rel=0.05)


def test_every_profile_names_its_source_and_an_unknown_one_those_that_exist() -> None:
    assert all(known.source for known in load_profiles().values())
    assert profile("llama-3.1-8b-a100").iteration_s(IterationWork()) == pytest.approx(0.016442)
    with pytest.raises(ValueError, match="demo"):
        profile("abacus")
    with pytest.raises(ValueError, match="finite"):
        replace(profile("demo"), base_s=-1.0)
