"""The correlation of size and wait, by hand."""

from __future__ import annotations

import pytest

from thunderagent.simulator.figures.waits import ProgramWait, Waits


def waits_of(*pairs: tuple[int, float]) -> Waits:
    return Waits.of([ProgramWait(first_prompt_tokens=size, held_s=held_s) for size, held_s in pairs])


def test_a_wait_adds_up_its_turns() -> None:
    wait = ProgramWait(started_s=5.0, ended_s=25.0)
    for prompt_tokens, held_s in ((10, 1.0), (30, 4.0), (20, 2.0)):
        wait.add_turn(prompt_tokens, held_s)
    assert (wait.first_prompt_tokens, wait.largest_prompt_tokens) == (10, 30)
    assert (wait.held_s, wait.longest_hold_s, wait.residence_s) == (7.0, 4.0, 20.0)


def test_correlations_match_a_calculation_by_hand() -> None:
    """Values (1, 2, 3) and (1, 2, 9): covariance 8 over the root of 2 times 38; the ranks are the same."""
    waits = waits_of((1, 1.0), (2, 2.0), (3, 9.0))
    assert waits.pearson == pytest.approx(8 / (2 * 38) ** 0.5)
    assert waits.spearman == pytest.approx(1.0)


def test_equal_values_share_their_ranks() -> None:
    """Ranks of the waits are 1.5, 1.5, 3 against 3, 2, 1."""
    assert waits_of((3, 0.0), (2, 0.0), (1, 5.0)).spearman == pytest.approx(-(0.75**0.5))


@pytest.mark.parametrize("pairs", [(), ((1, 2.0),), ((1, 2.0), (1, 3.0)), ((1, 2.0), (4, 2.0))])
def test_without_differences_nothing_goes_together(pairs: tuple[tuple[int, float], ...]) -> None:
    waits = waits_of(*pairs)
    assert (waits.pearson, waits.spearman) == (None, None)
