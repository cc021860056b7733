"""The soak of the scheduler for vLLM: its bars, and the lines through the memory of its processes."""

from __future__ import annotations

from copy import deepcopy
from typing import Any

import pytest

from benchmarks.plugin_soak import growth_lines, misses_of

WELL: dict[str, Any] = {
    "lost_turns": 0,
    "most_pinned_ratio": 0.79,
    "faults": {"bad_answers": 0},
    "first_life": {"on": True, "failures_total": 0, "pins_total": {"used": 3}},
    "failing_life": {"on": False, "failures_total": 1},
}


def test_a_run_without_a_miss_says_nothing() -> None:
    """All bars are reached."""
    assert misses_of(WELL) == []


@pytest.mark.parametrize(
    ("path", "value", "word"),
    [
        (("lost_turns",), 1, "1 turns were lost"),
        (("most_pinned_ratio",), 0.91, "0.91 of the pool"),
        (("faults", "bad_answers"), 2, "2 answers"),
        (("first_life", "pins_total"), {}, "nothing was held"),
        (("first_life", "on"), False, "nothing was made to"),
        (("first_life", "failures_total"), 1, "nothing was made to"),
        (("failing_life", "on"), True, "did not turn off"),
    ],
)
def test_each_bar_can_be_missed(path: tuple[str, ...], value: object, word: str) -> None:
    """A run that ends well but for one thing says which."""
    found = deepcopy(WELL)
    *parents, name = path
    at = found
    for parent in parents:
        at = at[parent]
    at[name] = value
    (miss,) = misses_of(found)
    assert word in miss


def test_growth_is_by_time_and_by_tokens_after_the_warm_up() -> None:
    """A process that grows by 1 MB in 10 s, in which the engine computes 500 tokens; at first it grew faster."""
    samples = [
        {"at_s": 10.0 * number, "tokens": 500.0 * number, "worker_rss_mb": 100.0 + number + (number < 5) * -50.0}
        for number in range(30)
    ]
    (line,) = growth_lines(samples, 60.0, 300.0).values()
    assert line["mb_per_hour"] == pytest.approx(360.0)
    assert line["mb_per_1000_tokens"] == pytest.approx(2.0)
