"""Tools and their sandboxes: CPUs, disk, and the time that a sandbox takes to be ready.

Theory of operation
-------------------
A tool runs for as long as its plan says, once its program's sandbox is ready and a CPU of the tool host is free. CPUs
are given first come, first served. A sandbox is prepared when its program begins or at its first tool; it takes disk
from the begin of its preparation until it is reclaimed, and a preparation waits until there is disk for it. It is
reclaimed some time after its program ended.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field
from functools import partial
from random import Random
from typing import Literal

from thunderagent.errors import ConfigurationError
from thunderagent.simulator.figures.figures import ToolFigures
from thunderagent.simulator.runs.agenda import Action, Agenda


@dataclass(frozen=True, slots=True)
class ToolSettings:
    """The resources of tools. The defaults never make a tool wait. Raises ConfigurationError.

    `cpu_count` tools run at a time (None: no limit). A sandbox takes `prepare_min_s` to `prepare_max_s` seconds,
    uniformly distributed, from `prepare_at` on, and `sandbox_disk_bytes` of the host's `disk_bytes` (None: no limit);
    it is reclaimed `reclaim_after_s` after its program ended.
    """

    cpu_count: int | None = None
    prepare_min_s: float = 0.0
    prepare_max_s: float = 0.0
    prepare_at: Literal["arrival", "first_tool"] = "arrival"
    sandbox_disk_bytes: int = 0
    disk_bytes: int | None = None
    reclaim_after_s: float = 0.0

    def __post_init__(self) -> None:
        if self.cpu_count is not None and self.cpu_count < 1:
            raise ConfigurationError(f"tools need at least one CPU, got {self.cpu_count}")
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
    """One program's sandbox. `then` are callbacks for when it is ready."""

    prepare_s: float
    asked: bool = False
    on_disk: bool = False
    ready: bool = False
    ended: bool = False
    then: list[Action] = field(default_factory=list)


class ToolHost:
    """Run tools and prepare sandboxes in the time of an agenda."""

    def __init__(self, settings: ToolSettings, agenda: Agenda, *, seed: int) -> None:
        self.figures = ToolFigures()
        self._settings = settings
        self._agenda = agenda
        self._seed = seed
        self._running_count = 0
        self._waiting: deque[tuple[float, float, Action]] = deque()
        self._without_disk: deque[Sandbox] = deque()
        self._disk_bytes = 0
        self._sandbox_count = 0

    def __repr__(self) -> str:
        return f"<ToolHost {self._running_count} tools run, {len(self._waiting)} wait, {self._sandbox_count} sandboxes>"

    def open(self, serial_id: int, planned_s: float | None = None) -> Sandbox:
        """Return the sandbox of the program with that number; start its preparation if due.

        It takes the time in the settings, or without one the workload's `planned_s`. None: no sandbox is needed.
        """
        settings = self._settings
        if settings.prepare_max_s > 0:
            draw = Random(f"{self._seed}/sandbox/{serial_id}")  # noqa: S311 - a simulation, not a secret
            prepare_s = draw.uniform(settings.prepare_min_s, settings.prepare_max_s)
        elif planned_s is not None or settings.sandbox_disk_bytes:
            prepare_s = planned_s or 0.0
        else:
            return Sandbox(0.0, asked=True, ready=True)
        sandbox = Sandbox(prepare_s)
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
        self._ask(sandbox)

        def ready() -> None:
            self.figures.waited_for_sandbox_s += self._agenda.now_s - asked_s
            self._wait_for_cpu(self._agenda.now_s, tool_s, then)

        sandbox.then.append(ready)

    def close(self, sandbox: Sandbox) -> None:
        """Note that a program ended: its sandbox is reclaimed after the set time."""
        sandbox.ended = True
        if not sandbox.on_disk:
            return
        if self._settings.reclaim_after_s:
            self._agenda.after(self._settings.reclaim_after_s, self._reclaim)
        else:
            self._reclaim()

    def _ask(self, sandbox: Sandbox) -> None:
        if not sandbox.asked:
            sandbox.asked = True
            self._without_disk.append(sandbox)
            self._prepare_waiting()

    def _prepare_waiting(self) -> None:
        settings, figures = self._settings, self.figures
        while self._without_disk:
            free = settings.disk_bytes is None or self._disk_bytes + settings.sandbox_disk_bytes <= settings.disk_bytes
            if not free:
                return
            sandbox = self._without_disk.popleft()
            if sandbox.ended:
                continue
            sandbox.on_disk = True
            self._disk_bytes += settings.sandbox_disk_bytes
            self._sandbox_count += 1
            figures.sandbox_count += 1
            figures.peak_sandbox_count = max(figures.peak_sandbox_count, self._sandbox_count)
            figures.peak_disk_bytes = max(figures.peak_disk_bytes, self._disk_bytes)
            self._agenda.after(sandbox.prepare_s, partial(self._is_ready, sandbox))

    def _is_ready(self, sandbox: Sandbox) -> None:
        sandbox.ready = True
        waiting, sandbox.then = sandbox.then, []
        for action in waiting:
            action()

    def _reclaim(self) -> None:
        self._disk_bytes -= self._settings.sandbox_disk_bytes
        self._sandbox_count -= 1
        self._prepare_waiting()

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
