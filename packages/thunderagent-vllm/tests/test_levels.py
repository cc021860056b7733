"""Levels, quanta, chunks and service."""

from __future__ import annotations

import pytest
from thunderagent_vllm.levels import Service, effective_level, level_of, quantum_tokens, shrunk_tokens


@pytest.mark.parametrize(
    ("tokens", "level"), [(0, 0), (2048, 0), (2049, 1), (8192, 1), (8193, 2), (32768, 2), (32769, 3), (10**9, 3)]
)
def test_level_follows_tokens(tokens: int, level: int) -> None:
    assert level_of(tokens) == level


def test_level_is_worse_of_both_and_rises_with_waiting() -> None:
    assert effective_level(1, 3, 0.0, 30.0) == 3
    assert effective_level(3, 1, 29.9, 30.0) == 3
    assert effective_level(3, 1, 60.0, 30.0) == 1
    assert effective_level(1, 0, 1000.0, 30.0) == 0
    assert effective_level(1, 0, -5.0, 30.0) == 1


def test_quanta_match_the_paper() -> None:
    assert [quantum_tokens(2048, level) for level in range(4)] == [2048, 1024, 512, 256]
    assert quantum_tokens(2, 3) == 1


@pytest.mark.parametrize(
    ("wanted", "fitting", "floor", "tokens"),
    [(1024, 2000, 32, 1024), (1024, 300, 32, 256), (1024, 0, 32, 32), (1024, 300, 512, 512), (16, 0, 16, 16)],
)
def test_chunk_is_halved_until_it_fits(wanted: int, fitting: int, floor: int, tokens: int) -> None:
    assert shrunk_tokens(wanted, fitting, floor) == tokens


def test_service_is_forgotten() -> None:
    service = Service()
    assert service.tokens(5.0, 30.0) == 0
    service.add(1000, 0.0, 30.0)
    assert service.tokens(0.0, 30.0) == 1000
    assert service.tokens(30.0, 30.0) == pytest.approx(1000 / 2.718281828)
    service.add(1000, 30.0, 30.0)
    assert service.tokens(30.0, 30.0) == pytest.approx(1000 + 1000 / 2.718281828)


def test_levels_are_those_of_the_policy_mars() -> None:
    """The two halves of a deployment mean the same by a level."""
    mars = pytest.importorskip("thunderagent.programs.policies.papers.mars_priority")
    assert all(level_of(tokens) == mars.level_of(tokens) for tokens in range(0, 70_000, 7))


def test_levels_are_those_of_the_simulator() -> None:
    mlfq = pytest.importorskip("benchmarks.mlfq")
    for level in range(4):
        assert quantum_tokens(2048, level) == mlfq.quantum_tokens(level)
        for feedback in range(4):
            for unserved_s in (0.0, 29.0, 31.0, 95.0):
                tokens = 2048 * 4**level
                ours = effective_level(level_of(tokens), feedback, unserved_s, 30.0)
                assert ours == mlfq.effective_level(tokens, feedback, unserved_s)
