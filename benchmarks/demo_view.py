"""The progress of a demo run: counted here, and shown as moving bars or, without a terminal, as plain lines."""

from __future__ import annotations

import time
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Protocol

from rich.progress import BarColumn, Progress, TaskID, TextColumn, TimeElapsedColumn

if TYPE_CHECKING:
    from collections.abc import Iterator

    from rich.console import Console

    from benchmarks.load import TurnRecord

PLAIN_LINE_S = 5.0
"""How often a run reports its progress without a terminal."""


@dataclass
class RunState:
    """The progress of a run."""

    policy: str
    turn_count: int
    program_count: int
    origin_s: float = field(default_factory=time.monotonic)
    done_turn_count: int = 0
    done_program_count: int = 0
    held_turn_count: int = 0
    prompt_tokens: int = 0
    cached_tokens: int = 0

    @property
    def elapsed_s(self) -> float:
        """Return the seconds since the run began."""
        return time.monotonic() - self.origin_s

    @property
    def turns_per_min(self) -> float:
        """Return the turns per minute so far."""
        return self.done_turn_count * 60 / max(self.elapsed_s, 1e-9)

    @property
    def hit_ratio(self) -> float:
        """Return the cached part of all prompt tokens so far."""
        return self.cached_tokens / max(self.prompt_tokens, 1)

    def count(self, record: TurnRecord, *, is_last_of_program: bool) -> None:
        """Count an ended turn."""
        self.done_turn_count += 1
        self.done_program_count += is_last_of_program
        self.prompt_tokens += record.prompt_tokens or 0
        self.cached_tokens += record.cached_tokens or 0


class View(Protocol):
    """Shows the progress of a run."""

    def show(self, state: RunState, *, is_over: bool = False) -> None:
        """Show the progress; called about twice a second, the last time with `is_over`."""


@contextmanager
def open_view(console: Console) -> Iterator[View]:
    """Show runs on the console for the length of the block."""
    if not console.is_terminal:
        yield PlainView(console)
        return
    columns = (
        TextColumn("{task.description:<12}"),
        BarColumn(bar_width=20),
        TextColumn("{task.completed:>3}/{task.total} turns  {task.fields[figures]}"),
        TimeElapsedColumn(),
    )
    with Progress(*columns, console=console) as progress:
        yield LiveView(progress)


class LiveView:
    """Show each run as a bar."""

    def __init__(self, progress: Progress) -> None:
        self._progress = progress
        self._tasks: dict[str, TaskID] = {}

    def show(self, state: RunState, *, is_over: bool = False) -> None:
        """Move the bar."""
        if state.policy not in self._tasks:
            self._tasks[state.policy] = self._progress.add_task(state.policy, total=state.turn_count, figures="")
        task = self._tasks[state.policy]
        self._progress.update(task, completed=state.done_turn_count, figures=_figures(state))
        if is_over:
            self._progress.stop_task(task)


class PlainView:
    """Write a line every few seconds."""

    def __init__(self, console: Console) -> None:
        self._console = console
        self._policy = ""
        self._next_s = 0.0

    def show(self, state: RunState, *, is_over: bool = False) -> None:
        """Write a line if it is due."""
        if state.policy != self._policy:
            self._policy, self._next_s = state.policy, PLAIN_LINE_S
        if is_over or state.elapsed_s >= self._next_s:
            self._next_s += PLAIN_LINE_S
            turns = f"{state.done_turn_count:>3}/{state.turn_count} turns"
            line = f"{state.policy:<12} {state.elapsed_s:3.0f} s  {turns}  {_figures(state)}"
            self._console.print(line, highlight=False, soft_wrap=True)


def _figures(state: RunState) -> str:
    programs = f"{state.done_program_count:>2}/{state.program_count} programs"
    held = f"held {state.held_turn_count:>2}"
    return f"{programs}  {state.turns_per_min:3.0f} turns/min  {held}  hits {state.hit_ratio:4.0%}"
