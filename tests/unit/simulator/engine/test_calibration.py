"""Constants are recovered from times that were made with them, with or without noise, and nothing is guessed."""

from __future__ import annotations

from dataclasses import replace
from itertools import product
from pathlib import Path
from random import Random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from thunderagent.errors import CalibrationError
from thunderagent.simulator.engine.calibration import (
    ASSUMED_CHUNK_TOKENS,
    ChunkSize,
    Observation,
    decode_observation,
    fit,
    in_chunks,
    independent_columns,
    non_negative_least_squares,
    predict_s,
    prefill_observation,
    tell_chunk_size,
)
from thunderagent.simulator.engine.engine import Engine
from thunderagent.simulator.engine.records import EngineConfig, EngineRequest
from thunderagent.simulator.engine.timing import (
    IterationWork,
    TimingProfile,
    load_profiles,
    profile,
    profile_from,
    profile_text,
)

DEMO = replace(profile("demo"), request_overhead_s=0.004)


def observations(timing: TimingProfile, *, noise_ratio: float = 0.0, repetitions: int = 1) -> list[Observation]:
    """Return the measurements of such an engine; noise is never below zero, and one in ten is far off."""
    rng = Random(7)
    asked = [
        *(
            prefill_observation("prefill", 1.0, prompt_tokens=64 << k, cached_tokens=0, max_num_batched_tokens=2048)
            for k in range(8)
        ),
        *(
            prefill_observation(
                "behind", 1.0, prompt_tokens=context + new, cached_tokens=context, max_num_batched_tokens=2048
            )
            for context, new in product((2048, 6144), (32, 128, 512))
        ),
        *(decode_observation("decode", 1.0, requests_count=1 << k, context_tokens=48 << k) for k in range(6)),
        *(
            decode_observation("on contexts", 1.0, requests_count=count, context_tokens=context * count)
            for context, count in product((2048, 6144), (1, 4))
        ),
    ]

    def measured_s(observation: Observation) -> float:
        factor = 1 + abs(rng.gauss(0, noise_ratio)) if noise_ratio else 1.0
        if noise_ratio and rng.random() < 0.1:
            factor *= 3
        return predict_s(timing, observation) * factor

    return [replace(each, measured_s=measured_s(each)) for each in asked for _ in range(repetitions)]


@pytest.mark.parametrize("name", sorted(set(load_profiles()) - {"instant"}))
def test_exact_times_give_the_constants_back(name: str) -> None:
    timing = replace(profile(name), request_overhead_s=0.002)
    found = fit(observations(timing))
    for cost in ("base_s", "prefill_token_s", "decode_request_s", "request_overhead_s"):
        assert getattr(found.timing, cost) == pytest.approx(getattr(timing, cost), rel=1e-3, abs=1e-9), cost
    assert found.timing.attention_pair_s == pytest.approx(timing.attention_pair_s, rel=1e-2, abs=1e-12)
    assert found.timing.decode_context_token_s == pytest.approx(timing.decode_context_token_s, rel=1e-2, abs=1e-11)
    assert found.median_ratio < 1e-4
    assert not found.is_poor
    assert not found.left_out


def test_noise_and_outliers_move_predictions_little() -> None:
    """The predictions of constants count, for iterations as they occur."""
    found = fit(observations(DEMO, noise_ratio=0.05, repetitions=3))
    for work in (
        IterationWork(decode_count=1, decode_context_tokens=500),
        IterationWork(decode_count=8, decode_context_tokens=16_000),
        IterationWork(prefill_tokens=300, attention_pairs=300 * 2000.0, decode_count=4, decode_context_tokens=8000),
        IterationWork(prefill_tokens=2048, attention_pairs=2048 * 1024.0),
    ):
        assert found.timing.iteration_s(work) == pytest.approx(DEMO.iteration_s(work), rel=0.1)
    assert [residuals.experiment for residuals in found.residuals] == [
        "prefill",
        "behind",
        "decode",
        "on contexts",
        "all",
    ]
    assert found.observation_count == found.residuals[-1].observation_count == 24
    assert all(residuals.median_ratio <= residuals.p90_ratio for residuals in found.residuals)
    assert not found.is_poor


def test_times_of_another_law_are_called_a_poor_fit() -> None:
    """An engine whose prefill grows with the cube of its length has another law."""
    bent = [
        replace(each, measured_s=each.measured_s + (each.work.prefill_tokens / 500) ** 3) for each in observations(DEMO)
    ]
    assert fit(bent).is_poor


def test_repetitions_count_as_one_with_their_median() -> None:
    exact = observations(DEMO)
    several = [replace(each, measured_s=each.measured_s * factor) for each in exact for factor in (0.9, 1.0, 20.0)]
    assert fit(several).timing == fit(exact).timing


def test_too_few_different_measurements_are_refused() -> None:
    with pytest.raises(CalibrationError, match="0 different measurements are too few"):
        fit([])
    only_decode = [each for each in observations(DEMO) if each.experiment == "decode"]
    with pytest.raises(CalibrationError, match="too few, or too much alike, to tell prefill_token_s"):
        fit(only_decode)
    with pytest.raises(CalibrationError, match="decode_request_s"):
        fit(each for each in observations(DEMO) if each.experiment in ("prefill", "behind"))


def test_indistinguishable_costs_are_left_out_and_named() -> None:
    """With one length of context, a decoding request and its context always come together."""
    found = fit(each for each in observations(DEMO) if each.experiment in ("prefill", "decode"))
    assert found.left_out == ("decode_context_token_s",)
    assert found.timing.decode_context_token_s == 0
    work = IterationWork(decode_count=8, decode_context_tokens=48 * 8)
    assert found.timing.iteration_s(work) == pytest.approx(DEMO.iteration_s(work), rel=1e-3)


def test_an_observation_describes_the_iterations_that_the_engine_runs() -> None:
    """The formula of a time to first token agrees with the engine model, chunk by chunk, hit by hit."""
    engine = Engine(EngineConfig(16_000, max_num_batched_tokens=512, timing=replace(DEMO, request_overhead_s=0.0)))
    prompt = list(range(3000))
    now_s = 0.0
    for length, cached_tokens in ((1600, 0), (3000, 1600)):
        begin_s = now_s
        engine.submit(EngineRequest(str(length), prompt[:length], [1]), now_s)
        while engine.has_work:
            now_s += engine.step(now_s).duration_s
        observation = prefill_observation(
            "", now_s - begin_s, prompt_tokens=length, cached_tokens=cached_tokens, max_num_batched_tokens=512
        )
        assert predict_s(engine.config.timing, observation) == pytest.approx(observation.measured_s)


# --- The token limit of an iteration


def in_chunks_of(tokens: int, timing: TimingProfile, *, noise_ratio: float = 0.0) -> list[Observation]:
    """Return the measurements of an engine with such chunks, repeated if it is noisy."""
    rng = Random(tokens)
    exact = in_chunks(observations(timing), tokens)
    return [
        replace(each, measured_s=predict_s(timing, each) * (1 + abs(rng.gauss(0, noise_ratio))))
        for each in exact
        for _ in range(5 if noise_ratio else 1)
    ]


ON_GPUS = replace(profile("llama-3.3-70b-h100-tp8"), request_overhead_s=0.003)


@pytest.mark.parametrize("tokens", [512, 1024, 2048, 4096])
def test_exact_times_tell_a_size_of_chunks_that_prompts_exceed(tokens: int) -> None:
    measured = in_chunks_of(tokens, ON_GPUS)
    assert tell_chunk_size(measured) == ChunkSize(tokens, is_told=True)
    assert fit(in_chunks(measured, tokens)).timing.base_s == pytest.approx(ON_GPUS.base_s, rel=1e-3)


def test_a_wrong_size_of_chunks_spoils_the_constants() -> None:
    """This is why the size matters: an engine with one iteration for 8192 tokens seems to have cheaper ones."""
    found = fit(in_chunks(in_chunks_of(8192, ON_GPUS), 512)).timing
    assert found.base_s < 0.9 * ON_GPUS.base_s


def test_sizes_of_chunks_that_no_prompt_exceeds_are_not_told() -> None:
    """The longest prompt has 8192 tokens: larger chunks only show that they are no smaller."""
    for tokens in (8192, 16_384):
        assert tell_chunk_size(in_chunks_of(tokens, ON_GPUS)) == ChunkSize(8192, is_told=False)
    short = [each for each in observations(ON_GPUS) if each.work.prefill_tokens <= 512]
    assert tell_chunk_size(short) == ChunkSize(ASSUMED_CHUNK_TOKENS, is_told=False)


@pytest.mark.parametrize("name", sorted(set(load_profiles()) - {"instant"}))
@pytest.mark.parametrize("tokens", [512, 2048, 8192])
def test_noise_never_tells_a_wrong_size_of_chunks(name: str, tokens: int) -> None:
    timing = replace(profile(name), request_overhead_s=0.003)
    told = tell_chunk_size(in_chunks_of(tokens, timing, noise_ratio=0.05))
    assert told.tokens == tokens or not told.is_told


# --- least squares


def test_the_solution_without_negative_parts_is_the_ordinary_one() -> None:
    rows = [[1.0, 0.0], [1.0, 1.0], [1.0, 2.0], [1.0, 3.0]]
    assert non_negative_least_squares(rows, [1.0, 3.0, 5.0, 7.0]) == pytest.approx([1.0, 2.0])


def test_a_negative_part_becomes_zero_and_the_others_make_up_for_it() -> None:
    rows = [[1.0, 0.0], [1.0, 1.0], [1.0, 2.0]]
    assert non_negative_least_squares(rows, [3.0, 2.0, 1.0]) == pytest.approx([2.0, 0.0])
    assert non_negative_least_squares(rows, [-1.0, -1.0, -1.0]) == [0.0, 0.0]


def test_dependent_columns_are_found_and_do_no_harm() -> None:
    rows = [[1.0, 2.0, 0.0, 1.0], [2.0, 4.0, 0.0, 0.0], [3.0, 6.0, 0.0, 5.0]]
    assert independent_columns(rows) == [0, 3]
    assert independent_columns([]) == []
    x = non_negative_least_squares(rows, [2.0, 2.0, 8.0])
    assert [x[0] + 2 * x[1], x[2], x[3]] == pytest.approx([1.0, 0.0, 1.0])


_SMALL = st.integers(-20, 20).map(float)


@given(
    st.integers(1, 4).flatmap(
        lambda width: st.lists(
            st.tuples(st.lists(_SMALL, min_size=width, max_size=width), _SMALL), min_size=width, max_size=8
        )
    )
)
def test_the_solution_meets_the_conditions_of_an_optimum(equations: list[tuple[list[float], float]]) -> None:
    """By Karush-Kuhn-Tucker nothing is negative, the gradient of used parts is zero, and no other leads inward."""
    rows, targets = [row for row, _ in equations], [target for _, target in equations]
    x = non_negative_least_squares(rows, targets)
    errors = [
        sum(value * part for value, part in zip(row, x, strict=True)) - target
        for row, target in zip(rows, targets, strict=True)
    ]
    for column, part in enumerate(x):
        gradient = sum(row[column] * error for row, error in zip(rows, errors, strict=True))
        assert part >= 0
        assert gradient >= -1e-3
        assert part == 0 or abs(gradient) < 1e-3


# --- files


def test_a_profile_comes_back_from_its_file(tmp_path: Path) -> None:
    """All values are there to four digits, under the file's name."""
    timing = replace(DEMO, name="mine", block_size=32, max_num_batched_tokens=8192, source='a "b" \\ ü\n')
    path = tmp_path / "mine.toml"
    path.write_text(profile_text(timing), encoding="utf-8")
    assert profile_from(str(path)) == replace(timing, source='a "b" \\ ü ')
    assert profile_from("demo") is profile("demo")


def test_value_missing_in_a_file_is_unknown(tmp_path: Path) -> None:
    path = tmp_path / "least.toml"
    path.write_text('source = "s"\nbase_us = 1\nprefill_us = 2.5\ndecode_us = 3e1\n')
    assert profile_from(str(path)) == TimingProfile("least", 1e-6, 2.5e-6, 3e-5, source="s")


def test_sizes_are_those_given_else_the_profile_s() -> None:
    timing = replace(DEMO, block_size=32)
    assert timing.sizes(kv_tokens=None, block_size=8, max_num_batched_tokens=None) == {
        "kv_tokens": 16_000,
        "block_size": 8,
    }


@pytest.mark.parametrize(
    ("content", "says"),
    [
        (None, r"cannot read the timing profile .*bad\.toml: No such file"),
        (b"base_us = ", r"bad\.toml is not TOML"),
        (b"source = '\xff'", r"bad\.toml is not TOML"),
        (b"base_us = 1", r"bad\.toml is wrong: source is missing"),
        (b"source = 's'\nbase_us = 1\nprefill_us = 1\ndecode_us = 1\nspeed = 2", "unknown key 'speed'; a profile has:"),
        (b"source = 's'\nbase_us = '1'\nprefill_us = 1\ndecode_us = 1", "base_us must be a number, not '1'"),
        (b"source = 's'\nbase_us = true\nprefill_us = 1\ndecode_us = 1", "base_us must be a number, not True"),
        (b"source = 's'\nbase_us = 1\nprefill_us = -1\ndecode_us = 1", "finite number of seconds, 0 or more"),
        (
            b"source = 's'\nbase_us = 1\nprefill_us = 1\ndecode_us = 1\nkv_tokens = 1.5",
            "kv_tokens must be a whole number, not 1.5",
        ),
        (
            b"source = 's'\nbase_us = 1\nprefill_us = 1\ndecode_us = 1\nblock_size = 0",
            "block_size must be at least 1, got 0",
        ),
    ],
)
def test_a_file_that_is_no_profile_is_named_with_why(tmp_path: Path, content: bytes | None, says: str) -> None:
    path = tmp_path / "bad.toml"
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(ValueError, match=says):
        profile_from(str(path))


def test_an_unknown_name_hears_of_names_and_files() -> None:
    with pytest.raises(ValueError, match=r"there are: demo, .* or give a file that ends in \.toml"):
        profile_from("abacus")
