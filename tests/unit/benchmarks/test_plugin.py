"""The claims of the scheduler for vLLM: judged in pairs, by the bad end."""

from __future__ import annotations

from typing import Any

import pytest

from benchmarks.plugin import ARMS, CLAIMS, MARS_LOAD, Claim, mars_runs


def run(arm: str, seed: int, turns: float, p99_s: float = 1.0, programs: int = 8) -> dict[str, Any]:
    return {"arm": arm, "seed": seed, "programs": programs, "turns_per_minute": turns, "turn_p99_s": p99_s}


RUNS = [
    *(run("stock", seed, 50.0) for seed in range(3)),
    run("plugin", 0, 80.0),
    run("plugin", 1, 90.0),
    run("plugin", 2, 85.0),
    run("plugin", 7, 500.0),  # it has no pair
    run("plugin", 0, 10.0, programs=16),
]


def test_a_claim_is_judged_by_the_bad_end_of_its_pairs() -> None:
    """The mean alone reaches more."""
    found = Claim("plugin", "stock", (8,), 1.5).found(RUNS, 8)
    assert found is not None
    assert (found["seeds"], found["worst"]) == (3, 1.6)
    assert found["low"] < 1.6 < found["mean"] < 1.8 < found["high"]
    assert found["reached"] is (found["low"] >= 1.5)
    stricter = Claim("plugin", "stock", (8,), 1.65).found(RUNS, 8)
    assert stricter is not None
    assert (stricter["mean"] > 1.65, stricter["reached"]) == (True, False)


@pytest.mark.parametrize(("bar", "is_reached"), [(1.5, False), (2.2, True)])
def test_where_less_is_better_the_bad_end_is_the_upper_one(bar: float, is_reached: bool) -> None:
    """As for the 99th percentile of a turn."""
    runs = [*(run("stock", seed, 1, 10.0) for seed in range(2)), run("plugin", 0, 1, 13.0), run("plugin", 1, 1, 13.5)]
    found = Claim("plugin", "stock", (8,), bar, "turn_p99_s", is_most=True).found(runs, 8)
    assert found is not None
    assert (found["worst"], found["reached"]) == (1.35, is_reached)


def test_a_claim_without_runs_says_nothing() -> None:
    """Nothing was run there."""
    assert Claim("plugin", "stock", (32,), 1.5).found(RUNS, 32) is None


def test_every_claim_compares_arms_that_there_are() -> None:
    """The plugin is in the one, and not in the other."""
    for claim in CLAIMS:
        assert "plugin" in ARMS[claim.arm]
        assert "plugin" not in ARMS[claim.base]


def test_mars_is_the_papers_order_and_nothing_else() -> None:
    """Only its preset has that name."""
    assert ARMS["both-mars"] == {"proxy": {"policy": "mars"}, "plugin": {"preset": "mars"}}
    runs = [*mars_runs("mars", range(100, 102), 60), *mars_runs("mars-ablations", range(100, 102), 60)]
    assert len(runs) == len(set(runs)) == 2 * 4 * 14
    assert {(load, count) for _, _, load, _, _, count in runs} == {(MARS_LOAD, 60)}
