"""Shared parts of simulated benchmarks: engines, comparisons with a progress bar, plots."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import matplotlib as mpl
from rich import box
from rich.console import Console
from rich.progress import Progress
from rich.table import Table

from benchmarks.machine import RESULTS
from thunderagent.programs.learned.goodput import ALPHA_RATIOS, in_time
from thunderagent.simulator.comparison.comparison import compare
from thunderagent.simulator.comparison.results import ComparisonPlan, ComparisonResult, Row
from thunderagent.simulator.engine.records import EngineConfig
from thunderagent.simulator.engine.timing import profile
from thunderagent.simulator.runs.scenario import Loop, Scenario
from thunderagent.simulator.workloads.plans import Workload

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

COLOURS = {
    "passthrough": "#8a8f98",
    "sticky": "#cc79a7",
    "cap-best": "#5a4fcf",
    "ttl": "#e69f00",
    "thunderagent": "#1c88cf",
    "thunderagent-ports": "#d55e00",
    "thunderagent-released": "#0b3c6b",
    "oracle": "#009e73",
    "breakeven": "#b5182b",
    "autellix": "#56b4e9",
    "concur": "#7f4f24",
    "continuum": "#2b8a3e",
    "continuum-fixed": "#94c973",
    "infercept": "#9467bd",
}

ASSUMED_KV_TOKENS = {"qwen3-14b-h100": 200_000}
"""KV pools of profiles whose source does not name one."""


def scenario_of(
    profile_name: str, *, replicas_count: int = 1, minutes: float, warmup_minutes: float = 0.0, loop: Loop = "closed"
) -> Scenario:
    """Return the engines of a benchmark, with vLLM's defaults for such a GPU."""
    timing = profile(profile_name)
    kv_tokens = timing.kv_tokens or ASSUMED_KV_TOKENS[profile_name]
    batched_tokens = 2048 if "rtx" in profile_name or profile_name == "demo" else 8192
    return Scenario(
        engine=EngineConfig(kv_tokens=kv_tokens, timing=timing, max_num_batched_tokens=batched_tokens),
        replica_count=replicas_count,
        loop=loop,
        horizon_s=minutes * 60,
        warmup_s=warmup_minutes * 60,
    )


class Runner:
    """Runs comparisons with the command line's shared options, and shows their progress.

    `in_time` has the rows of each for `goodput_table`; `keep` stores what a figure has so far; `only` names the parts
    that are wanted of a figure that can be made in parts, and `policies` those beside the first; empty for all.
    """

    def __init__(self, *, seeds_count: int, jobs_count: int | None, console: Console, only: str = "") -> None:
        self.only = only
        self.policies: tuple[str, ...] = ()
        self.seeds = tuple(range(seeds_count))
        self.jobs_count = jobs_count
        self._console = console
        self.in_time: list[dict[str, str | int]] = []
        self.keep: Callable[[dict[str, object]], None] = lambda _figures: None

    def compare(
        self,
        title: str,
        scenario: Scenario,
        programs: Workload,
        contestants: Sequence[str],
        programs_counts: Sequence[int],
        *,
        keep_samples: bool = True,
    ) -> ComparisonResult:
        """Run one comparison; the first contestant is its baseline."""
        plan = ComparisonPlan(
            scenario,
            programs,
            tuple(contestants),
            tuple(programs_counts),
            self.seeds,
            process_count=self.jobs_count,
            keep_samples=keep_samples,
        )
        with Progress(console=self._console, transient=True) as bar:
            task = bar.add_task(title)
            result = compare(plan, on_progress=lambda at: bar.update(task, completed=at.done_count, total=at.all_count))
        if result.stopped_by:
            sys.exit(f"{title}: not complete, {result.stopped_by}")
        self.in_time += in_time_rows(title, result)
        return result


def in_time_rows(title: str, result: ComparisonResult) -> list[dict[str, str | int]]:
    """Return the parts of turns and programs in time for each contestant and load, in a report's form."""
    return [
        {
            "setting": title,
            "programs_count": row.programs_count,
            "policy": row.contestant,
            "turns": in_time(goodput.mean for goodput in row.turn_goodputs),
            "programs": in_time(goodput.mean for goodput in row.program_goodputs),
        }
        for row in result.rows()
    ]


def goodput_table(rows: Sequence[Mapping[str, str | int]]) -> Table:
    """Return a table of the parts in time."""
    alphas = "/".join(f"{alpha_ratio:g}" for alpha_ratio in ALPHA_RATIOS)
    made = Table(title=f"Goodput: within {alphas} times their ideal time", box=box.SIMPLE_HEAD)
    for column in ("setting", "n", "policy", "turns", "programs"):
        made.add_column(column, justify="left" if column in ("setting", "policy") else "right", no_wrap=True)
    for row in rows:
        made.add_row(*(str(value) for value in row.values()))
    return made


def colour_of(contestant: str) -> str | None:
    """Return a policy's colour, independent of its settings; None if it has none of its own."""
    return COLOURS.get(contestant.partition(":")[0])


def plot_lines(
    axes: Axes, result: ComparisonResult, pick: Callable[[Row], float], only: Sequence[str] | None = None
) -> None:
    """Draw a figure of each contestant against the number of programs."""
    for contestant in only or result.plan.contestants:
        rows = [row for row in result.rows() if row.contestant == contestant]
        counts = [row.programs_count for row in rows]
        axes.plot(
            counts,
            [pick(row) for row in rows],
            color=colour_of(contestant),
            marker="o",
            markersize=3,
            label=contestant,
        )
        axes.set_xticks(counts)
    axes.set_xlabel("programs at a time", fontsize=8)
    axes.set_ylim(bottom=0)


def add_legend(figure: Figure, axes: Axes) -> None:
    """Write the legend of one panel's lines under a figure."""
    handles, labels = axes.get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", ncols=len(labels), frameon=False, fontsize=8)


def save_plot(name: str, figure: Figure) -> None:
    """Write a plot beside the results; the same figures give the same bytes."""
    RESULTS.mkdir(exist_ok=True)
    with mpl.rc_context({"svg.hashsalt": "thunderagent", "svg.fonttype": "none"}):
        figure.savefig(plot_path(name), metadata={"Date": None})


def plot_path(name: str) -> Path:
    """Return the path of a plot."""
    return RESULTS / f"{name}.svg"
