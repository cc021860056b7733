"""What the sandbox manager asks and tells the scheduler of programs."""

from __future__ import annotations

import pytest

from tests.builders import Driver
from thunderagent.runtime import Runtime
from thunderagent.sandboxes import RuntimePrograms


def programs_of(driver: Driver) -> RuntimePrograms:
    return RuntimePrograms(Runtime(driver.scheduler, clock=lambda: driver.now_s))


@pytest.mark.parametrize(
    ("called", "command", "tool"),
    [
        ("bash:pytest", "bash -c make", "bash:pytest"),
        ("", "bash -c cd /repo && make test", "bash:make"),
        ("", "/bin/sh", "bash:sh"),
        ("", "", ""),
    ],
)
def test_a_command_begins_and_ends_a_tool(called: str, command: str, tool: str) -> None:
    """Its time is learned without what lies around it, by the name of what the answer called, or else the command's."""
    driver = Driver()
    programs = programs_of(driver)
    driver.takes_turn("p", 100, tool=called)
    driver.passes(5.0)
    programs.tool_began("p", command)
    assert driver.program("p").tool == tool
    driver.passes(2.0)
    programs.tool_ended("p")
    view = driver.scheduler.view
    assert (view.mean_tool_s, view.tools_running_count) == (2.0, 0)
    driver.passes(5.0)
    driver.arrives("p", 110)
    assert view.mean_tool_s == 2.0


def test_a_command_beside_a_turn_or_of_nobody_changes_nothing() -> None:
    driver = Driver()
    programs = programs_of(driver)
    driver.arrives("p", 100)
    for program_id in ("p", "nobody"):
        programs.tool_began(program_id, "ls")
        programs.tool_ended(program_id)
    assert driver.scheduler.view.tools_running_count == 0
    assert driver.scheduler.table.get("nobody") is None
