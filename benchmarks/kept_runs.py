"""Runs that are kept when they are done, so that a benchmark that was ended goes on where it was."""

from __future__ import annotations

import json
from collections import deque
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Protocol, TypeVar

from rich.console import Console
from rich.progress import Progress

from thunderagent.simulator.processes import GoOn, do_all

Figures = dict[str, float]


class Run(Protocol):
    """A run that is to be done."""

    @property
    def key(self) -> str:
        """Its name among the runs that are kept."""


AnyRun = TypeVar("AnyRun", bound=Run)


def do_runs(
    do: Callable[[AnyRun, GoOn], Figures],
    runs: Iterable[AnyRun],
    path: Path,
    jobs_count: int | None,
    console: Console,
) -> dict[str, Figures]:
    """Do the runs that are not kept in `path` yet, two at a time unless said; return the figures of all that are."""
    kept: dict[str, Figures] = json.loads(path.read_text()) if path.exists() else {}
    todo = deque({run.key: run for run in runs if run.key not in kept}.values())
    with Progress(console=console, transient=True) as bar:
        shown = bar.add_task(path.stem, total=len(todo))

        def note(run: AnyRun, figures: Figures) -> None:
            kept[run.key] = figures
            whole = path.with_name(f"{path.name}.new")  # ended while it is written, all would be lost
            whole.write_text(json.dumps(kept, indent=0) + "\n")
            whole.replace(path)
            bar.advance(shown)

        stopped_by = do_all(do, todo, note, jobs_count or 2)
    if stopped_by:
        console.print(f"[bold]not all runs are done: {stopped_by}[/]")
    return kept
