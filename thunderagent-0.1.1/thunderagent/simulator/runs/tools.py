"""Tools and their sandboxes: CPUs, disk, and the time that a sandbox takes to be ready.

Theory of operation
-------------------
A tool runs for as long as its plan says, once its program's sandbox is ready and a CPU of the tool host is free. CPUs
are given first come, first served. A sandbox is asked for when its program begins or at its first tool. When it is
prepared, the proxy's own table of sandboxes plans (`tools/table.py`): as soon as there are disk and hands for it, those
first that are needed first. It takes disk until it is reclaimed, some time after its program ended.
"""

from __future__ import annotations

import sys
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from itertools import count
from random import Random
from typing import Final, Literal

from thunderagent.errors import ConfigurationError
from thunderagent.simulator.figures.figures import ToolFigures
from thunderagent.simulator.runs.agenda import Action, Agenda
from thunderagent.tools.base import Place
from thunderagent.tools.sandbox import Caps, Stage
from thunderagent.tools.sandbox import Sandbox as Planned
from thunderagent.tools.table import Prepare, SandboxTable
from thunderagent.tools.template import Template

PLAN_PERIOD_S: Final = 1.0
"""The longest time between two plans while sandboxes wait, as in the proxy."""

Needs = Callable[[str], float]
"""In how many seconds a program will need its sandbox."""


@dataclass(frozen=True, slots=True)
class ToolSettings:
    """The resources of tools. The defaults never make a tool wait. Raises ConfigurationError.

    `cpu_count` tools run at a time (None: no limit). A sandbox takes `prepare_min_s` to `prepare_max_s` seconds,
    uniformly distributed, from `prepare_at` on, and `sandbox_disk_bytes` of the host's `disk_bytes` (None: no limit);
    `hands_count` are prepared at a time (None: no limit). It is reclaimed `reclaim_after_s` after its program ended.
    """

    cpu_count: int | None = None
    prepare_min_s: float = 0.0
    prepare_max_s: float = 0.0
    prepare_at: Literal["arrival", "first_tool"] = "arrival"
    sandbox_disk_bytes: int = 0
    disk_bytes: int | None = None
    hands_count: int | None = None
    reclaim_after_s: float = 0.0

    def __post_init__(self) -> None:
        if self.cpu_count is not None and self.cpu_count < 1:
            raise ConfigurationError(f"tools need at least one CPU, got {self.cpu_count}")
        if self.hands_count is not None and self.hands_count < 1:
            raise ConfigurationError(f"sandboxes need at least one hand, got {self.hands_count}")
        if not 0 <= self.prepare_min_s <= self.prepare_max_s < float("inf"):
            raise ConfigurationError(f"a sandbox cannot take {self.prepare_min_s} to {self.prepare_max_s} s to prepare")
        if self.sandbox_disk_bytes < 0 or not 0 <= self.reclaim_after_s < float("inf"):
            raise ConfigurationError("a sandbox's disk and the time until it is reclaimed must be 0 or more")
        if self.disk_bytes is not None and self.disk_bytes < self.sandbox_disk_bytes:
            raise ConfigurationError(
                f"a disk of {self.disk_bytes} bytes holds no sandbox of {self.sandbox_disk_bytes} bytes"
            )


@dataclass(slots=True, eq=False)
class Sandbox:
    """One program's sandbox. `planned` is what the table knows of it; `then` are callbacks for when it is ready."""

    program_id: str
    prepare_s: float
    ready: bool = False
    planned: Planned | None = None
    then: list[Action] = field(default_factory=list)


class ToolHost:
    """Run tools and prepare sandboxes in the time of an agenda."""

    def __init__(self, settings: ToolSettings, agenda: Agenda, *, seed: int, needs: Callable[[], Needs]) -> None:
        """Start without programs; `needs` is asked at each plan."""
        self.figures = ToolFigures()
        self._settings = settings
        self._agenda = agenda
        self._seed = seed
        self._needs = needs
        self._running_count = 0
        self._waiting: deque[tuple[float, float, Action]] = deque()
        hands_count = settings.hands_count or sys.maxsize
        caps = Caps(sandbox_count=sys.maxsize, disk_bytes=settings.disk_bytes, hands_count=hands_count)
        self._table = SandboxTable(caps, map(str, count()).__next__, map(str, count()).__next__)
        self._template = Template.model_construct(driver="callback", disk_bytes=settings.sandbox_disk_bytes)
        self._asked: dict[str, Sandbox] = {}
        """Those that the table knows, by their ids there."""
        self.waits = False
        """Whether a sandbox waits for disk, a hand or its time."""
        self._will_plan = self._plans_soon = False

    def __repr__(self) -> str:
        return f"<ToolHost {self._running_count} tools run, {len(self._waiting)} wait, {len(self._asked)} sandboxes>"

    def open(self, program_id: str, serial_id: int, planned_s: float | None = None) -> Sandbox:
        """Return the sandbox of the program with that number; ask for its preparation if due.

        It takes the time in the settings, or without one the workload's `planned_s`. None: no sandbox is needed.
        """
        settings = self._settings
        if settings.prepare_max_s > 0:
            draw = Random(f"{self._seed}/sandbox/{serial_id}")  # noqa: S311 - a simulation, not a secret
            prepare_s = draw.uniform(settings.prepare_min_s, settings.prepare_max_s)
        elif planned_s is not None or settings.sandbox_disk_bytes:
            prepare_s = planned_s or 0.0
        else:
            return Sandbox(program_id, 0.0, ready=True)
        sandbox = Sandbox(program_id, prepare_s)
        if settings.prepare_at == "arrival":
            self._ask(sandbox)
        return sandbox

    def run(self, tool_s: float, sandbox: Sandbox, then: Action) -> None:
        """Run a tool of that many seconds and call `then` at its end."""
        self.figures.tool_count += 1
        asked_s = self._agenda.now_s
        if sandbox.ready:
            self._wait_for_cpu(asked_s, tool_s, then)
            return

        def ready() -> None:
            self.figures.waited_for_sandbox_s += self._agenda.now_s - asked_s
            self._wait_for_cpu(self._agenda.now_s, tool_s, then)

        sandbox.then.append(ready)
        if sandbox.planned is None:
            self._ask(sandbox)

    def close(self, sandbox: Sandbox) -> None:
        """Note that a program ended: its sandbox is reclaimed after the set time."""
        planned = sandbox.planned
        if planned is None:
            return
        if self._settings.reclaim_after_s and planned.stage is not Stage.REQUESTED:
            self._agenda.after(self._settings.reclaim_after_s, partial(self._let_go, planned))
        else:
            self._let_go(planned)

    def _ask(self, sandbox: Sandbox) -> None:
        planned = self._table.request(self._agenda.now_s, self._template, "", sandbox.program_id)
        sandbox.planned, self._asked[planned.sandbox_id] = planned, sandbox
        self._plan()

    def _let_go(self, planned: Planned) -> None:
        self._table.reclaim(planned, "its program ended")
        if planned.stage is Stage.GONE:  # it was not begun
            del self._asked[planned.sandbox_id]
        self._plan()

    def plan_soon(self) -> None:
        """Plan once more at this moment: programs were admitted, so their sandboxes are due."""
        if not self._plans_soon:
            self._plans_soon = True
            self._agenda.after(0.0, self._plan)

    def _plan(self) -> None:
        table, figures, reclaimed = self._table, self.figures, False
        self._plans_soon = False
        waits = any(each.stage is Stage.REQUESTED for each in table)
        for action in table.plan(self._agenda.now_s, self._needs() if waits else lambda _: 0.0):
            planned = action.sandbox
            if isinstance(action, Prepare):
                sandbox = self._asked[planned.sandbox_id]
                figures.sandbox_count += 1
                self._agenda.after(sandbox.prepare_s, partial(self._is_ready, sandbox, planned))
            else:
                table.reclaimed(planned)
                del self._asked[planned.sandbox_id]
                reclaimed = True
        waiting_count = sum(each.stage is Stage.REQUESTED for each in table) if waits else 0
        self.waits = waiting_count > 0
        there_count = len(table.sandboxes) - waiting_count
        figures.peak_sandbox_count = max(figures.peak_sandbox_count, there_count)
        disk_bytes = there_count * self._settings.sandbox_disk_bytes
        figures.peak_disk_bytes = max(figures.peak_disk_bytes, disk_bytes)
        if self.waits and reclaimed:
            self._plan()  # there is room again
        elif self.waits and not self._will_plan:
            self._will_plan = True
            self._agenda.after(PLAN_PERIOD_S, self._plan_again)

    def _plan_again(self) -> None:
        self._will_plan = False
        if self.waits:
            self._plan()

    def _is_ready(self, sandbox: Sandbox, planned: Planned) -> None:
        if planned.stage is not Stage.PREPARING:  # its program ended meanwhile
            return
        self._table.prepared(self._agenda.now_s, planned, Place(planned.sandbox_id))
        sandbox.ready = True
        waiting, sandbox.then = sandbox.then, []
        for action in waiting:
            action()
        self._plan()  # a hand is free

    def _wait_for_cpu(self, asked_s: float, tool_s: float, then: Action) -> None:
        self._waiting.append((asked_s, tool_s, then))
        self._fill_cpus()

    def _fill_cpus(self) -> None:
        cpu_count = self._settings.cpu_count
        while self._waiting and (cpu_count is None or self._running_count < cpu_count):
            asked_s, tool_s, then = self._waiting.popleft()
            self.figures.waited_for_cpu_s += self._agenda.now_s - asked_s
            self._running_count += 1
            self._agenda.after(tool_s, partial(self._tool_ends, then))

    def _tool_ends(self, then: Action) -> None:
        self._running_count -= 1
        self._fill_cpus()
        then()
