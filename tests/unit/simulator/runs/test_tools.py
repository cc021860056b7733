"""Tools wait for a CPU and for their sandbox, and sandboxes for disk."""

from __future__ import annotations

from functools import partial
from math import inf

import pytest

from thunderagent.errors import ConfigurationError
from thunderagent.simulator.runs.agenda import Agenda
from thunderagent.simulator.runs.tools import Needs, Sandbox, ToolHost, ToolSettings


class Host:
    """A tool host on an agenda of its own, which notes when tools end."""

    def __init__(self, **settings: object) -> None:
        self.agenda = Agenda()
        self.needs: Needs = lambda _: 0.0
        self.tools = ToolHost(ToolSettings(**settings), self.agenda, seed=1, needs=lambda: self.needs)  # type: ignore[arg-type]
        self.ended_s: dict[str, float] = {}

    def run(self, name: str, tool_s: float, sandbox: Sandbox | None = None) -> Sandbox:
        sandbox = sandbox or self.tools.open("p0", 0)
        self.tools.run(tool_s, sandbox, partial(self.note, name))
        return sandbox

    def note(self, name: str) -> None:
        self.ended_s[name] = self.agenda.now_s

    def until(self, until_s: float = inf) -> dict[str, float]:
        while self.agenda.next_s < until_s:
            self.agenda.advance()
        return self.ended_s


def test_without_limits_a_tool_takes_its_own_time() -> None:
    host = Host()
    host.run("a", 2.0)
    host.run("b", 1.0)
    assert host.until() == {"b": 1.0, "a": 2.0}
    assert host.tools.figures.waited_for_cpu_s == 0


def test_cpus_are_given_first_come_first_served() -> None:
    host = Host(cpu_count=1)
    for name, tool_s in (("a", 2.0), ("b", 1.0), ("c", 1.0)):
        host.run(name, tool_s)
    assert host.until() == {"a": 2.0, "b": 3.0, "c": 4.0}
    assert host.tools.figures.waited_for_cpu_s == 2.0 + 3.0


def test_the_first_tool_waits_for_its_sandbox_and_the_second_does_not() -> None:
    host = Host(prepare_min_s=30.0, prepare_max_s=30.0)
    sandbox = host.tools.open("p0", 0)
    host.agenda.at(10.0, lambda: None)
    host.agenda.advance()
    host.run("first", 1.0, sandbox)
    host.until()
    host.run("second", 1.0, sandbox)
    assert host.until() == {"first": 31.0, "second": 32.0}
    assert host.tools.figures.waited_for_sandbox_s == 20.0


def test_a_sandbox_can_be_prepared_at_its_first_tool() -> None:
    host = Host(prepare_min_s=30.0, prepare_max_s=30.0, prepare_at="first_tool")
    sandbox = host.tools.open("p0", 0)
    assert len(host.agenda) == 0
    host.run("first", 1.0, sandbox)
    assert host.until() == {"first": 31.0}


def test_a_preparation_waits_for_disk_until_a_program_ends() -> None:
    host = Host(prepare_min_s=5.0, prepare_max_s=5.0, sandbox_disk_bytes=10, disk_bytes=15, reclaim_after_s=2.0)
    first, second = host.tools.open("p0", 0), host.tools.open("p1", 1)
    host.run("second", 1.0, second)
    host.agenda.at(98.5, partial(host.tools.close, first))
    assert host.until(98.0) == {}
    assert host.until() == {"second": 98.5 + 2.0 + 5.0 + 1.0}  # no plan is due then
    assert (host.tools.figures.peak_disk_bytes, host.tools.figures.peak_sandbox_count) == (10, 1)


def test_single_worker_prepares_first_what_is_needed_first() -> None:
    host = Host(prepare_min_s=5.0, prepare_max_s=5.0, hands_count=1)
    needed_s = {"p0": 0.0, "p1": 60.0, "p2": 20.0, "p3": 0.0}
    host.needs = needed_s.__getitem__
    for serial_id, program_id in enumerate(needed_s):
        host.run(program_id, 1.0, host.tools.open(program_id, serial_id))
    assert host.until() == {"p0": 6.0, "p3": 11.0, "p2": 16.0, "p1": 21.0}


def test_an_admitted_programs_sandbox_is_begun_at_once() -> None:
    host = Host(prepare_min_s=5.0, prepare_max_s=5.0, sandbox_disk_bytes=10, disk_bytes=20)
    host.needs = lambda _: 60.0
    host.tools.open("p0", 0)
    host.run("p1", 1.0, host.tools.open("p1", 1))
    assert host.until(7.25) == {}  # three quarters of the disk hold one

    def admit() -> None:
        host.needs = lambda _: 0.0
        host.tools.plan_soon()

    host.agenda.at(7.25, admit)
    assert host.until() == {"p1": 7.25 + 5.0 + 1.0}


def test_sandbox_not_yet_due_leaves_its_disk_to_others() -> None:
    host = Host(prepare_min_s=5.0, prepare_max_s=5.0, sandbox_disk_bytes=10, disk_bytes=40)
    needed_s = {"p0": 60.0, "p1": 60.0, "p2": 60.0, "p3": 60.0, "p4": 0.0}
    host.needs = needed_s.__getitem__
    for serial_id, program_id in enumerate(needed_s):
        host.run(program_id, 1.0, host.tools.open(program_id, serial_id))
    assert host.until(50.0) == {"p0": 6.0, "p1": 6.0, "p2": 6.0, "p4": 6.0}


def test_a_program_that_ended_before_there_was_disk_takes_none() -> None:
    host = Host(sandbox_disk_bytes=10, disk_bytes=10)
    first, second = host.tools.open("p0", 0), host.tools.open("p1", 1)
    host.tools.close(second)
    host.tools.close(first)
    assert host.tools.figures.sandbox_count == 1


def test_the_workload_says_what_a_sandbox_takes_unless_the_settings_do() -> None:
    planned, set_ = Host(), Host(prepare_min_s=1.0, prepare_max_s=1.0)
    for host in (planned, set_):
        host.run("tool", 1.0, host.tools.open("p0", 0, 7.0))
    assert (planned.until(), set_.until()) == ({"tool": 8.0}, {"tool": 2.0})


def test_preparations_are_drawn_by_seed_and_program() -> None:
    host, again = Host(prepare_min_s=1.0, prepare_max_s=9.0), Host(prepare_min_s=1.0, prepare_max_s=9.0)
    drawn_s = [host.tools.open(f"p{serial_id}", serial_id).prepare_s for serial_id in range(5)]
    assert drawn_s == [again.tools.open(f"p{serial_id}", serial_id).prepare_s for serial_id in range(5)]
    assert len(set(drawn_s)) == 5


@pytest.mark.parametrize(
    "wrong",
    [
        {"cpu_count": 0},
        {"hands_count": 0},
        {"prepare_min_s": 2.0, "prepare_max_s": 1.0},
        {"prepare_min_s": -1.0},
        {"prepare_max_s": inf},
        {"sandbox_disk_bytes": -1},
        {"reclaim_after_s": -1.0},
        {"sandbox_disk_bytes": 10, "disk_bytes": 9},
    ],
)
def test_impossible_settings_are_refused(wrong: dict[str, object]) -> None:
    with pytest.raises(ConfigurationError):
        ToolSettings(**wrong)  # type: ignore[arg-type]
