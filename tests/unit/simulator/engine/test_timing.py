"""The time of an iteration is a formula with constants that name their source."""

from __future__ import annotations

from dataclasses import replace

import pytest

from thunderagent.simulator.engine.timing import IterationWork, TimingProfile, load_profiles, profile


def test_an_iteration_takes_as_long_as_its_formula_says() -> None:
    timing = TimingProfile("t", 1.0, 0.1, 0.01, decode_context_token_s=0.001, attention_pair_s=0.0001)
    work = IterationWork(prefill_tokens=20, attention_pairs=300.0, decode_count=3, decode_context_tokens=50)
    assert timing.iteration_s(work) == pytest.approx(1.0 + 2.0 + 0.03 + 0.03 + 0.05)
    assert replace(timing, prefill_base_s=7.0).iteration_s(work) == pytest.approx(7.0 + timing.iteration_s(work))
    without = replace(work, prefill_tokens=0)
    assert replace(timing, prefill_base_s=7.0).iteration_s(without) == timing.iteration_s(without)


def test_every_profile_names_its_source_and_an_unknown_one_those_that_exist() -> None:
    assert all(known.source for known in load_profiles().values())
    assert profile("llama-3.1-8b-a100").iteration_s(IterationWork()) == pytest.approx(0.016442)
    with pytest.raises(ValueError, match="demo"):
        profile("abacus")
    with pytest.raises(ValueError, match="finite"):
        replace(profile("demo"), base_s=-1.0)
