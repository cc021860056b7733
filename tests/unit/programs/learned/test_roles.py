"""The output of a role's turns, learned from earlier ones."""

from __future__ import annotations

import pytest

from tests.builders import Driver, ended
from thunderagent.programs.learned.sizes import MAX_ROLES_COUNT, RoleOutputs


def test_each_role_has_its_mean_and_a_new_one_that_of_all() -> None:
    """Newer turns weigh a little more."""
    outputs = RoleOutputs()
    assert outputs.expected_tokens("planner") == 0
    for _ in range(50):
        outputs.turn_ended(ended(role="planner", output=400))
        outputs.turn_ended(ended(role="browser", output=100))
    assert outputs.expected_tokens("planner") == 400
    assert outputs.expected_tokens("browser") == 100
    assert outputs.expected_tokens("coder") == pytest.approx(250, abs=5)
    outputs.turn_ended(ended(role="browser", output=1000))
    assert 110 < outputs.expected_tokens("browser") < 140


def test_roles_that_were_not_heard_of_for_long_are_forgotten() -> None:
    """Ids in place of roles do not fill the memory."""
    outputs = RoleOutputs()
    for number in range(MAX_ROLES_COUNT + 5):
        outputs.turn_ended(ended(role=f"thread-{number}", output=10))
    assert len(outputs) == MAX_ROLES_COUNT


def test_the_role_of_a_turn_is_what_was_said_or_its_branch() -> None:
    """The expectation is computed when a turn arrives, and stays."""
    driver = Driver()
    driver.finishes(driver.arrives("a", 10, role="browser"), 10, 60)
    driver.finishes(driver.arrives("a", 10, branch="browser"), 10, 60)
    driver.finishes(driver.arrives("a", 10, branch="x", role="planner"), 10, 300)
    first = driver.arrives("b", 10, role="browser")
    assert driver.scheduler.turns[first].expected_output_tokens == 60
    assert driver.program("b").expected_output_tokens == 60
    driver.suspends()
    driver.arrives("c", 10, role="planner")
    driver.arrives("c", 10, role="browser")
    assert driver.program("c").expected_output_tokens == 300
