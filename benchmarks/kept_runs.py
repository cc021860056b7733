"""Store runs when they end, so that an interrupted benchmark resumes where it stopped.

Runs are stored by the hash of the code that made them. After a change of the code all runs are made anew, and none is
mixed with the older ones, which stay in the file.
"""

from __future__ import annotations

import json
import math
import time
from collections import deque
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any, Protocol, TypeVar

from rich.console import Console
from rich.progress import Progress

from benchmarks.machine import describe_code
from thunderagent.simulator.comparison.processes import GoOn, do_all

Figures = dict[str, float]


class Run(Protocol):
    """A pending run."""

    @property
    def key(self) -> str:
        """Its name among the stored runs."""


AnyRun = TypeVar("AnyRun", bound=Run)


def do_runs(
    do: Callable[[AnyRun, GoOn], Figures],
    runs: Iterable[AnyRun],
    path: Path,
    jobs_count: int | None,
    console: Console,
    *,
    for_s: float = math.inf,
) -> dict[str, Figures]:
    """Do the runs that this code has not stored in `path` yet, by default two at a time; return the figures of all.

    After `for_s` seconds no more runs start.
    """
    end_s = time.monotonic() + for_s
    made_by = describe_code()
    of_all_code: dict[str, Any] = json.loads(path.read_text()) if path.exists() else {}
    of_this = of_all_code.setdefault(made_by["code"], {"commit": made_by["commit"], "runs": {}})
    kept: dict[str, Figures] = of_this["runs"]
    todo = deque({run.key: run for run in runs if run.key not in kept}.values())
    with Progress(console=console, transient=True) as bar:
        shown = bar.add_task(path.stem, total=len(todo))

        def note(run: AnyRun, figures: Figures) -> None:
            kept[run.key] = figures
            whole = path.with_name(f"{path.name}.new")  # a kill during a direct write would lose all runs
            whole.write_text(json.dumps(of_all_code, indent=0) + "\n")
            whole.replace(path)
            bar.advance(shown)
            if time.monotonic() >= end_s:
                todo.clear()

        stopped_by = do_all(do, todo, note, jobs_count or 2)
    if stopped_by:
        console.print(f"[bold]not all runs are done: {stopped_by}[/]")
    return kept
