"""The sandbox manager's questions and reports to the scheduler."""

from __future__ import annotations

import pytest

from tests.builders import Driver, of_kind
from thunderagent.programs.messages import Pause
from thunderagent.programs.policies.baselines.ttl import Ttl
from thunderagent.runtime import Runtime
from thunderagent.serving.sandboxes import RuntimePrograms


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
    """Its own time is learned, under the name of the tool that the answer called, or else the command's."""
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


def test_each_command_is_learned_under_its_own_name() -> None:
    """This includes later ones of the same tool phase; a name from the client stays."""
    driver = Driver()
    programs = programs_of(driver)
    driver.takes_turn("p", 100)
    seen = []
    for command in ("ls", "make test", ""):
        programs.tool_began("p", command)
        seen.append(driver.program("p").tool)
        programs.tool_ended("p")
    assert seen == ["bash:ls", "bash:make", "bash:make"]
    assert len(driver.scheduler.knowledge.tool_times) == 2
    driver.tool_starts("p", "browser")
    programs.tool_began("p", "curl")
    assert driver.program("p").tool == "browser"


def test_a_command_that_ended_does_not_hold_its_program_for_ever() -> None:
    """Nobody said that its turn comes next: the client may think, or ask a person."""
    driver = Driver(Ttl(ttl_s=10.0, reserve_tokens=0))
    programs = programs_of(driver)
    driver.takes_turn("p", 100)
    programs.tool_began("p", "ls")
    programs.tool_ended("p")
    assert driver.ticks(9.9) == []
    assert of_kind(Pause, driver.ticks(0.1)) == ["p"]


def test_a_command_beside_a_turn_or_of_nobody_changes_nothing() -> None:
    driver = Driver()
    programs = programs_of(driver)
    driver.arrives("p", 100)
    for program_id in ("p", "nobody"):
        programs.tool_began(program_id, "ls")
        programs.tool_ended(program_id)
    assert driver.scheduler.view.tools_running_count == 0
    assert driver.scheduler.programs.get("nobody") is None


def test_a_program_that_a_sandbox_opens_is_of_its_callers_tenant() -> None:
    """Otherwise the caller's key could not touch it."""
    driver = Driver()
    programs_of(driver).open("p", "red")
    assert driver.program("p").tenant == "red"
