"""The companion systems' policies side by side, on the project's workloads: `scripts/bench papers companions`."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from matplotlib.figure import Figure
from rich import box
from rich.console import Console
from rich.table import Table

from benchmarks.findings import OTHER_COLOUR, Pick, ratio_of
from benchmarks.simulated import Runner, colour_of, save_plot, scenario_of
from thunderagent.simulator.comparison.results import COSTS, ComparisonResult
from thunderagent.simulator.figures.figures import RunResult
from thunderagent.simulator.figures.intervals import Interval
from thunderagent.simulator.runs.scenario import Loop
from thunderagent.simulator.workloads.distributions import workload

BASELINE = "fcfs"
DISCARD_ALL, PRESERVE_ALL = "ttl:ttl_s=0", "ttl:ttl_s=inf"
CONTESTANTS = (
    *(BASELINE, "autellix", DISCARD_ALL, PRESERVE_ALL, "infercept", "continuum-fixed", "continuum"),
    *("concur", "thunderagent", "thunderagent-released", "breakeven"),
)
BESIDE = (BASELINE, "thunderagent-released", "breakeven")
"""Those that are not the companions', to be made alone."""

BLOCK_SIZE = 64
"""Tokens; contexts are long, and a run takes a third of the time of one with blocks of 16."""


@dataclass(frozen=True)
class Case:
    """A workload on an engine at a load."""

    title: str
    workload: str
    profile: str
    programs_count: int
    minutes: float
    warmup_minutes: float = 0.0
    loop: Loop = "closed"


CASES = (
    Case("mini-SWE-agent, GLM-4.6, 48 at a time", "mini-swe-agent", "glm-4.6-h100x8", 48, 45, 10),
    Case("ToolOrchestra HLE, Qwen3-8B, 40 at a time", "toolorchestra-hle", "qwen3-8b-rtx5090", 40, 45, 10),
    Case("coding assistant, GLM-4.6, 16 at a time", "coding-assistant", "glm-4.6-h100x8", 16, 60, 15),
    Case("GAIA, GLM-4.6, 80 that come on their own", "gaia-magentic-one", "glm-4.6-h100x8", 80, 240, loop="open"),
)


def companions(runner: Runner, console: Console) -> dict[str, Any]:
    """Compare the policies in four settings: turns per minute, time of a program, prefix hits, the five costs."""
    figures: dict[str, Any] = {}
    results = {}
    contestants = BESIDE if runner.only else CONTESTANTS
    for case in CASES:
        scenario = scenario_of(case.profile, minutes=case.minutes, warmup_minutes=case.warmup_minutes, loop=case.loop)
        scenario = replace(scenario, engine=replace(scenario.engine, block_size=BLOCK_SIZE))
        result = runner.compare(
            case.title, scenario, workload(case.workload), contestants, [case.programs_count], keep_samples=False
        )
        results[case.title] = result
        rows = rows_of(result)
        console.print(table(case.title, rows))
        figures[case.title] = rows
        runner.keep(figures)
    if not runner.only:
        save_plot("papers-companions", _plot(results))
    return figures


def turns_per_min(result: RunResult) -> float:
    """Return the throughput."""
    return result.turns_per_min_count


def program_s(result: RunResult) -> float:
    """Return the mean time of ended programs."""
    return result.program_latency.mean_s


def rows_of(result: ComparisonResult) -> list[dict[str, Any]]:
    """Return for each policy its figures as text: means ± 95 % intervals, and ratios to FCFS with the same seed."""
    rows = []
    for row in result.rows():
        runs = result.runs_of(row.contestant, row.programs_count)
        figures = {
            "turns_per_min": row.turns_per_min,
            "throughput_ratio": _over_baseline(result, row.contestant, turns_per_min),
            "program_s": row.program_mean_s,
            "latency_ratio": _over_baseline(result, row.contestant, program_s),
            "programs_ended": Interval.of([run.result.program_count for run in runs]),
            "hit_ratio": row.hit_ratio,
            "limit_ratio": row.limit_ratio,
            "turn_p99_s": row.turn_p99_s,
            **{f"cost_{name}": row.costs[name] for name in COSTS},
        }
        texts = {
            name: "" if interval is None else f"{interval.mean:.4g} ± {interval.half_width or 0.0:.2g}"
            for name, interval in figures.items()
        }
        rows.append({"policy": row.contestant, "failed_turns": row.failed_turn_count} | texts)
    return rows


def _over_baseline(result: ComparisonResult, contestant: str, pick: Pick) -> Interval | None:
    (programs_count,) = result.programs_counts
    return ratio_of(result.runs_of(contestant, programs_count), result.runs_of(BASELINE, programs_count), pick)


def table(title: str, rows: Sequence[dict[str, Any]]) -> Table:
    """Return a table with a row for each policy."""
    made = Table(
        title=title,
        box=box.SIMPLE_HEAD,
        caption="means; x: over that of fcfs; costs: parts of the memory",
    )
    shown = {
        "policy": "policy",
        "turns/min": "turns_per_min",
        "x": "throughput_ratio",
        "program (s)": "program_s",
        "x ": "latency_ratio",
        "ended": "programs_ended",
        "hits": "hit_ratio",
        "of limit": "limit_ratio",
        **{name: f"cost_{name}" for name in COSTS},
    }
    for column in shown:
        made.add_column(column, justify="left" if column == "policy" else "right", no_wrap=True)
    for row in rows:
        made.add_row(row["policy"], *(_short(row[key]) for key in list(shown.values())[1:]))
    return made


def _short(text: str) -> str:
    """Return the mean of a figure, to three digits."""
    return f"{float(text.partition(' ')[0]):.3g}" if text else "-"


def _plot(results: dict[str, ComparisonResult]) -> Figure:
    """Draw throughput and the time of a program over those of FCFS, a panel for each setting."""
    figure = Figure(figsize=(9.0, 5.2), layout="constrained")
    panels = figure.subplots(2, len(results), sharey=True, squeeze=False)
    places = range(len(CONTESTANTS))
    for column, (title, result) in enumerate(results.items()):
        for line, (label, pick) in enumerate((("turns/min over fcfs", turns_per_min), ("time over fcfs", program_s))):
            axes = panels[line, column]
            for place, contestant in zip(places, reversed(CONTESTANTS), strict=True):
                interval = _over_baseline(result, contestant, pick)
                if interval is not None:
                    colour = colour_of(contestant) or OTHER_COLOUR
                    axes.barh(place, interval.mean, xerr=interval.half_width or 0.0, color=colour, capsize=2)
            axes.axvline(1.0, color=OTHER_COLOUR, linewidth=0.8, linestyle="--")
            axes.set_xlabel(label, fontsize=7)
            axes.tick_params(labelsize=7)
            if line == 0:
                axes.set_title(title.replace(", ", ",\n", 1), fontsize=7, loc="left")
    for axes in panels[:, 0]:
        axes.set_yticks(places, reversed(CONTESTANTS))
    return figure
