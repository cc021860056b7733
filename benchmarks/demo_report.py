"""The result of the demo: a table, a plot, and a text."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import matplotlib as mpl
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, MaxNLocator
from rich import box
from rich.table import Table
from rich.text import Text

from thunderagent.programs.learned.goodput import ALPHA_RATIOS, in_time

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from matplotlib.axes import Axes

COSTS = ("decode", "prefill", "recompute", "caching", "unused")
"""What memory is spent on, useful work first."""

WINDOW_S = 10.0
"""Throughput over time is measured over this many last seconds."""

CLEARLY_MORE = 1.1
"""Below this ratio of turns/min the text claims nothing: it may be chance."""

_RUN_COLOURS = ("#8a8f98", "#1b6fd1")
_COST_COLOURS = {
    "decode": "#1b6fd1",
    "prefill": "#7fb2ea",
    "recompute": "#d9482b",
    "caching": "#f2b134",
    "unused": "#c9ccd1",
}
_COST_WORDS = {
    "decode": "decode: an answer is generated",
    "prefill": "prefill: what is new is read",
    "recompute": "recompute: evicted history is\nread again",
    "caching": "caching: kept while a tool runs",
    "unused": "unused: empty while turns wait",
}


@dataclass(frozen=True)
class RunReport:
    """One run. `end_s` are the seconds at which its turns ended, `costs_token_s` the sums over the replicas.

    The two goodputs are the ratios that took at most each of `ALPHA_RATIOS` times their ideal time.
    """

    policy: str
    turns_per_min: float
    hit_ratio: float
    latency_p50_s: float
    latency_p99_s: float
    turn_goodput_ratios: tuple[float, ...]
    program_goodput_ratios: tuple[float, ...]
    makespan_s: float
    turn_count: int
    failed_turn_count: int
    costs_token_s: dict[str, float]
    end_s: tuple[float, ...]


def table(before: RunReport, after: RunReport) -> Table:
    """Return the figures of both runs side by side, and the second over the first."""
    result = Table(box=box.SIMPLE_HEAD)
    result.add_column("", no_wrap=True)
    for column in (before.policy, after.policy, "ratio"):
        result.add_column(column, justify="right", no_wrap=True)
    rows = [
        ("turns/min", before.turns_per_min, after.turns_per_min, "{:.0f}", True),
        ("prefix hit rate", before.hit_ratio, after.hit_ratio, "{:.0%}", True),
        ("turn, p50", before.latency_p50_s, after.latency_p50_s, "{:.1f} s", False),
        ("turn, p99", before.latency_p99_s, after.latency_p99_s, "{:.1f} s", False),
        ("makespan", before.makespan_s, after.makespan_s, "{:.0f} s", False),
    ]
    for name, first, second, form, more_is_better in rows:
        ratio = _ratio(first, second, more_is_better=more_is_better)
        result.add_row(name, form.format(first), form.format(second), ratio)
    alphas = "/".join(f"{alpha_ratio:g}" for alpha_ratio in ALPHA_RATIOS)
    for name in ("turn", "program"):
        cells = (in_time(getattr(run, f"{name}_goodput_ratios")) for run in (before, after))
        result.add_row(f"{name}s within {alphas} x ideal", *cells, "")
    result.add_section()
    result.add_row(Text("memory spent, thousand token-seconds", style="italic"))
    for name in COSTS:
        first, second = before.costs_token_s[name], after.costs_token_s[name]
        ratio = _ratio(first, second, more_is_better=False)
        result.add_row(f"  {name}", f"{first / 1000:,.0f}", f"{second / 1000:,.0f}", ratio)
    return result


def _ratio(first: float, second: float, *, more_is_better: bool) -> Text:
    """Return the second over the first, green where that is good."""
    if first <= 0:
        return Text("")
    ratio = second / first
    if 0.95 < ratio < 1.05:
        return Text(f"{ratio:.2f}")
    return Text(f"{ratio:.2f}", style="green" if (ratio > 1) == more_is_better else "red")


def in_words(before: RunReport, after: RunReport, *, programs: int, engines: int, pool_tokens: int) -> str:
    """Return a summary, from the figures alone."""
    ratio = after.turns_per_min / before.turns_per_min
    shown = (
        f"{programs} agent programs shared {engines} simulated engines with room for {pool_tokens:,} tokens each. "
        "Passed through, every turn started at once: the engines evicted the history of one program to read that of "
        f"another, and read it again a turn later, so that {before.hit_ratio:.0%} of the prompt tokens were still "
        "cached. Scheduled, a turn started only while there was memory for its program, and "
        f"{after.hit_ratio:.0%} were cached"
    )
    if ratio < CLEARLY_MORE:
        return f"{shown}. Turns per minute were {ratio:.2f} times as many: at this load, that shows nothing."
    return (
        f"{shown}, and the same {after.turn_count} turns took {after.makespan_s:.0f} s instead of "
        f"{before.makespan_s:.0f} s: {ratio:.2f} times as many turns per minute."
    )


def plot(before: RunReport, after: RunReport, path: Path, *, caption: str) -> None:
    """Draw throughput over time and the use of memory, for both runs, into a PNG."""
    with mpl.rc_context({"font.size": 10, "font.family": "DejaVu Sans", "axes.titlesize": 11}):
        figure = Figure(figsize=(13, 5.2), dpi=150, facecolor="white")
        figure.text(0.06, 0.93, _headline(before, after), fontsize=15, fontweight="bold", color="#1d2430")
        figure.text(0.06, 0.875, caption, fontsize=9.5, color="#5b6470")
        grid = figure.add_gridspec(1, 2, width_ratios=(2, 1), left=0.06, right=0.77, bottom=0.12, top=0.76, wspace=0.2)
        _draw_throughput(figure.add_subplot(grid[0]), (before, after))
        _draw_costs(figure.add_subplot(grid[1]), (before, after))
        path.parent.mkdir(parents=True, exist_ok=True)
        figure.savefig(path)


def _headline(before: RunReport, after: RunReport) -> str:
    ratio = after.turns_per_min / before.turns_per_min
    return f"Scheduling whole programs: {ratio:.2f} times the turns per minute on the same engines"


def _draw_throughput(axes: Axes, runs: Sequence[RunReport]) -> None:
    axes.set_title(f"Turns per minute (last {WINDOW_S:.0f} s)", loc="left")
    for run, colour in zip(runs, _RUN_COLOURS, strict=True):
        times_s, rates = throughput(run.end_s, run.makespan_s)
        axes.plot(times_s, rates, color=colour, linewidth=2.2)
        axes.fill_between(times_s, rates, color=colour, alpha=0.12, linewidth=0)
        axes.axvline(run.makespan_s, color=colour, linewidth=1.2, linestyle=(0, (3, 3)))
        axes.annotate(
            f"{run.policy}\nall done after {run.makespan_s:.0f} s",
            (run.makespan_s, 1),
            xycoords=axes.get_xaxis_transform(),
            xytext=(-5, -4),
            textcoords="offset points",
            ha="right",
            va="top",
            color=colour,
            fontweight="bold",
            fontsize=9,
        )
    axes.set_xlim(0, max(run.makespan_s for run in runs) * 1.01)
    axes.set_ylim(0, axes.get_ylim()[1] * 1.25)  # room for the text above the curves
    axes.set_xlabel("seconds since all programs began")
    _plain_axes(axes)


def throughput(end_s: Sequence[float], makespan_s: float) -> tuple[list[float], list[float]]:
    """Return moments, two a second, and the turns per minute that ended in the `WINDOW_S` before each."""
    times_s = [step / 2 for step in range(1, int(makespan_s * 2) + 1)]
    rates = []
    for time_s in times_s:
        window_s = min(WINDOW_S, time_s)
        ended_count = sum(time_s - window_s < end <= time_s for end in end_s)
        rates.append(ended_count * 60 / max(window_s, WINDOW_S / 2))
    return times_s, rates


def _draw_costs(axes: Axes, runs: Sequence[RunReport]) -> None:
    axes.set_title("What memory was spent on (thousand token-seconds)", loc="left")
    bars = range(len(runs))
    bottoms = [0.0] * len(runs)
    for name in COSTS:
        heights = [run.costs_token_s[name] / 1000 for run in runs]
        axes.bar(bars, heights, 0.62, bottoms, color=_COST_COLOURS[name], edgecolor="white", label=_COST_WORDS[name])
        bottoms = [bottom + height for bottom, height in zip(bottoms, heights, strict=True)]
    for bar, total in zip(bars, bottoms, strict=True):
        axes.annotate(f"{total:,.0f}", (bar, total), (0, 3), textcoords="offset points", ha="center", fontweight="bold")
    axes.set_xticks(bars, [run.policy for run in runs])
    axes.set_ylim(0, max(bottoms) * 1.08)
    handles, labels = axes.get_legend_handles_labels()
    axes.legend(handles[::-1], labels[::-1], loc="upper left", bbox_to_anchor=(1, 1), frameon=False, fontsize=9)
    _plain_axes(axes)


def _plain_axes(axes: Axes) -> None:
    """Remove axes that carry no information."""
    axes.spines[["top", "right", "left"]].set_visible(False)
    axes.grid(axis="y", color="#e6e8eb", linewidth=0.8)
    axes.set_axisbelow(True)
    axes.tick_params(length=0)
    axes.yaxis.set_major_locator(MaxNLocator(5))
    axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _place: f"{value:,.0f}"))
