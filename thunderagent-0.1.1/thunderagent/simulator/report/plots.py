"""Draws the result of a comparison, as one SVG with a panel for each question. Needs the extra `plots`: matplotlib.

Colours are those of Okabe and Ito, which colour-blind people can distinguish; every contestant also has its own marker.
The background is transparent. Bars and bands are 95 % intervals over seeds.
"""

from __future__ import annotations

import io
import math
import re
from collections.abc import Callable, Iterator, Sequence
from itertools import chain
from statistics import fmean
from typing import Any

from thunderagent.errors import ConfigurationError
from thunderagent.programs.learned.goodput import ALPHA_RATIOS
from thunderagent.simulator.comparison.results import COSTS, ComparisonResult, Row, Run, thinned
from thunderagent.simulator.figures.intervals import Interval
from thunderagent.simulator.report.page import GRID, INK, SOFT_INK

try:
    import matplotlib as mpl
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure
    from matplotlib.lines import Line2D
    from matplotlib.patches import Patch
    from matplotlib.ticker import FuncFormatter, NullLocator
except ImportError as error:
    raise ConfigurationError("plots need matplotlib: install thunderagent with the extra `plots`") from error

BASELINE_COLOUR = "#8a8f98"
COLOURS = ("#1c88cf", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9")
MARKERS = ("o", "s", "^", "D", "v", "P", "X")
COST_COLOURS = ("#0b7bc1", "#8cc9ee", "#d55e00", "#efb93f", "#b4bac3")
"""Of each of `COSTS`."""

WIDTH_IN, PANEL_HEIGHT_IN = 10.0, 2.7
MOST_COST_PERCENT = 200.0
"""Where bars of costs are cut, so that the parts of the others can be distinguished."""

_STYLE: dict[Any, Any] = {
    "font.size": 9,
    "text.color": INK,
    "axes.labelcolor": SOFT_INK,
    "axes.edgecolor": GRID,
    "axes.titlecolor": INK,
    "axes.titlesize": 9,
    "axes.titleweight": "bold",
    "axes.titlelocation": "left",
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "axes.axisbelow": True,
    "grid.color": GRID,
    "xtick.color": GRID,
    "ytick.color": GRID,
    "xtick.labelcolor": SOFT_INK,
    "ytick.labelcolor": SOFT_INK,
    "legend.frameon": False,
    "lines.markersize": 4.5,
    "svg.fonttype": "none",
    "svg.hashsalt": "thunderagent",
}


def draw(result: ComparisonResult) -> str:
    """Return the drawing as an SVG element, the same for the same figures; empty if there are no runs.

    Panels that are not against load show the heaviest.
    """
    if not result.runs:
        return ""
    with mpl.rc_context(_STYLE):
        figure = _Drawing(result).figure()
        text = io.StringIO()
        figure.savefig(text, format="svg", transparent=True, metadata={"Date": None})
    svg = text.getvalue()
    svg = re.sub(r"<metadata>.*?</metadata>\s*", "", svg[svg.index("<svg") :], flags=re.DOTALL)
    return re.sub(r' id="[A-Za-z]+(?:\d[a-z]+)?_\d+"', "", svg)  # nothing refers to them


class _Drawing:
    """The panels of one comparison."""

    def __init__(self, result: ComparisonResult) -> None:
        self._result = result
        self._rows = result.rows()
        self._counts = result.programs_counts
        self._heaviest = [row for row in self._rows if row.programs_count == self._counts[-1]]
        self._runs = {row.contestant: result.runs_of(row.contestant, self._counts[-1]) for row in self._heaviest}

    def figure(self) -> Figure:
        """Draw all panels, two in a row, and the names of the contestants above."""
        panels = tuple(self._panels())
        rows_count = -(-len(panels) // 2)
        figure = Figure(figsize=(WIDTH_IN, 0.6 + PANEL_HEIGHT_IN * rows_count), layout="constrained")
        places = figure.subplots(rows_count, 2).flat
        for axes, (title, draw_panel) in zip(places, panels, strict=False):
            axes.set_title(title)
            draw_panel(axes)
        for axes in places[len(panels) :]:
            axes.remove()
        handles = [Line2D([], [], **self._look(contestant)) for contestant in self._result.plan.contestants]
        figure.legend(handles=handles, loc="outside upper center", ncols=5)
        return figure

    def _panels(self) -> Iterator[tuple[str, Callable[[Axes], None]]]:
        """Give each panel's title, and what draws it."""
        result, at_heaviest = self._result, f"{self._counts[-1]} programs"
        baseline = result.plan.baseline
        yield "Throughput, and the limit of any schedule", self._throughput
        yield (
            f"Throughput over that of {baseline}",
            lambda axes: self._against_load(axes, f"times {baseline}", lambda row: row.ratio),
        )
        yield (
            "Prefix hits",
            lambda axes: self._against_load(axes, "prompt tokens cached (%)", lambda row: row.hit_ratio, 100),
        )
        yield f"Turn latency, {at_heaviest}", self._latency
        yield f"Turns in time, {at_heaviest}", lambda axes: self._goodput(axes, lambda row: row.turn_goodputs)
        yield f"Programs in time, {at_heaviest}", lambda axes: self._goodput(axes, lambda row: row.program_goodputs)
        yield f"What memory was spent on, {at_heaviest}", self._costs
        yield f"Mean time held, {at_heaviest}", self._held
        if result.plan.scenario.replica_count > 1:
            yield f"Imbalance of the replicas, {at_heaviest}", self._imbalance
        for contestant, runs in self._runs.items():
            shown = next((run for run in runs if any(sample.replicas for sample in run.result.samples)), None)
            if shown is not None:
                title = f"Memory: {contestant}, seed {shown.seed}"
                yield title, lambda axes, run=shown: _draw_memory(axes, run, result.plan.scenario.warmup_s)  # type: ignore[misc]

    def _look(self, contestant: str) -> dict[str, Any]:
        """Return how a contestant's line looks. The baseline's is wide, so that it shows behind an equal one."""
        contestants, baseline = self._result.plan.contestants, self._result.plan.baseline
        place = contestants.index(contestant)
        look: dict[str, Any] = {"label": contestant, "marker": MARKERS[place % len(MARKERS)]}
        if contestant == baseline:
            return look | {"color": BASELINE_COLOUR, "linewidth": 3.0, "zorder": 1.9}
        place -= place > contestants.index(baseline)
        style = "dashed" if place >= len(COLOURS) else "solid"
        return look | {"color": COLOURS[place % len(COLOURS)], "linewidth": 1.7, "linestyle": style}

    def _against_load(
        self, axes: Axes, label: str, pick: Callable[[Row], Interval | None], scale_ratio: float = 1.0
    ) -> None:
        """Draw a figure of all contestants against load."""
        for contestant in self._result.plan.contestants:
            points = [
                (self._counts.index(row.programs_count), interval)
                for row in self._rows
                if row.contestant == contestant and (interval := pick(row)) is not None
            ]
            self._bars(axes, contestant, [place for place, _ in points], [each for _, each in points], scale_ratio)
        axes.set_xticks(range(len(self._counts)), [str(count) for count in self._counts])
        axes.set_xlabel("programs at a time" if self._result.plan.scenario.loop == "closed" else "programs")
        axes.set_ylabel(label)
        axes.set_ylim(bottom=0)

    def _bars(
        self, axes: Axes, contestant: str, places: Sequence[float], intervals: Sequence[Interval], scale: float = 1.0
    ) -> None:
        """Draw means as a line, each with its interval; contestants stand a little beside one another."""
        if intervals:
            shift = 0.03 * self._result.plan.contestants.index(contestant)
            means = [interval.mean * scale for interval in intervals]
            widths = [(interval.half_width or 0.0) * scale for interval in intervals]
            axes.errorbar([place + shift for place in places], means, yerr=widths, capsize=2, **self._look(contestant))

    def _throughput(self, axes: Axes) -> None:
        """Draw turns per minute, and the range of limits: each contestant finishes other turns."""
        self._against_load(axes, "turns/min", lambda row: row.turns_per_min)
        known: dict[int, list[float]] = {}
        for row in self._rows:
            if row.limit_per_min is not None:
                known.setdefault(self._counts.index(row.programs_count), []).append(row.limit_per_min.mean)
        if known:
            middles = [fmean(values) for values in known.values()]
            spreads = [[m - min(v) for m, v in zip(middles, known.values(), strict=True)]]
            spreads.append([max(v) - m for m, v in zip(middles, known.values(), strict=True)])
            axes.errorbar(list(known), middles, yerr=spreads, color=INK, linestyle="dashed", label="min(L1, L2, L3)")
            axes.legend(handles=[axes.containers[-1]], fontsize=7)

    def _latency(self, axes: Axes) -> None:
        """Draw how many turns took at most this long: geometric means of each percentile."""
        for contestant, runs in self._runs.items():
            curves = [run.result.turn_latency_quantiles_s for run in runs if run.result.turn_latency_quantiles_s]
            logs = [Interval.of([math.log(max(value, 1e-3)) for value in each]) for each in zip(*curves, strict=True)]
            if logs:
                look = self._look(contestant) | {"marker": ""}
                axes.plot([math.exp(log.mean) for log in logs], range(len(logs)), **look)
                lows, highs = [math.exp(log.low) for log in logs], [math.exp(log.high) for log in logs]
                axes.fill_betweenx(range(len(logs)), lows, highs, color=look["color"], alpha=0.16, linewidth=0)
        axes.set_xscale("log")
        axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
        axes.xaxis.set_minor_locator(NullLocator())
        axes.set_xlabel("turn latency, time held included (s)")
        axes.set_ylabel("turns that took no longer (%)")

    def _goodput(self, axes: Axes, pick: Callable[[Row], Sequence[Interval]]) -> None:
        """Draw the ratio within each multiple of the ideal time: alone, all history cached."""
        for row in self._heaviest:
            self._bars(axes, row.contestant, ALPHA_RATIOS, pick(row), 100)
        axes.set_xticks(ALPHA_RATIOS, [f"{alpha_ratio:g} x" for alpha_ratio in ALPHA_RATIOS])
        axes.set_xlabel("ideal time")
        axes.set_ylabel("in time (%)")
        axes.set_ylim(0, 101)

    def _costs(self, axes: Axes) -> None:
        """Draw the five costs as ratios of capacity times time; the rest was empty while nobody waited."""
        names = [row.contestant for row in self._heaviest][::-1]
        for place, row in enumerate(reversed(self._heaviest)):
            left = 0.0
            for name, colour in zip(COSTS, COST_COLOURS, strict=True):
                axes.barh(place, row.costs[name].mean * 100, 0.74, left, color=colour)
                left += row.costs[name].mean * 100
            if left > MOST_COST_PERCENT:
                axes.text(MOST_COST_PERCENT, place, f" \N{RIGHTWARDS ARROW} {left:.0f}", va="center", fontsize=7)
        axes.set_xlim(right=min(axes.get_xlim()[1], MOST_COST_PERCENT))
        axes.set_yticks(range(len(names)), names)
        axes.set_xlabel("part of capacity x time (%)")
        handles = [Patch(color=colour, label=name) for name, colour in zip(COSTS, COST_COLOURS, strict=True)]
        axes.set_ylim(-0.5, len(names) + 0.2)
        axes.legend(handles=handles, fontsize=7, loc="upper left", ncols=len(COSTS), columnspacing=0.8, handlelength=1)

    def _held(self, axes: Axes) -> None:
        """Draw how long turns waited for their leases, by sizes that at least half of the runs have turns of."""
        sizes = sorted({group.up_to_tokens for run in self._result.runs for group in run.result.held_by_size})
        for contestant, runs in self._runs.items():
            held: dict[int, list[float]] = {}
            for run in runs:
                for group in run.result.held_by_size:
                    held.setdefault(sizes.index(group.up_to_tokens), []).append(group.held.mean_s)
            kept = {place: Interval.of(held[place]) for place in sorted(held) if 2 * len(held[place]) >= len(runs)}
            self._bars(axes, contestant, list(kept), list(kept.values()))
        axes.set_xticks(range(len(sizes)), [f"{size_tokens // 1024}k" for size_tokens in sizes])
        axes.set_yscale("symlog", linthresh=1.0)
        axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
        axes.set_ylim(0, max(1.2, axes.get_ylim()[1]))
        axes.set_xlabel("prompt, up to so many tokens")
        axes.set_ylabel("held (s)")

    def _imbalance(self, axes: Axes) -> None:
        """Draw the largest minus the smallest demand over time: means over the seeds that last that long."""
        for contestant, runs in self._runs.items():
            kept = [thinned(run.result.samples) for run in runs]
            longest = max(kept, key=lambda samples: samples[-1].now_s)
            percents: dict[float, list[float]] = {sample.now_s: [] for sample in longest}
            for sample in chain.from_iterable(kept):
                if sample.now_s in percents:
                    percents[sample.now_s].append(sample.imbalance_ratio * 100)
            minutes, means = [now_s / 60 for now_s in percents], [fmean(each) for each in percents.values()]
            axes.plot(minutes, means, **self._look(contestant) | {"marker": ""})
        axes.set_ylim(bottom=0)
        axes.set_xlabel("minutes")
        axes.set_ylabel("largest less smallest demand\n(% of a replica's capacity)")


def _draw_memory(axes: Axes, run: Run, warmup_s: float) -> None:
    """Draw what programs claim and what running turns use of each replica, each paler than the one before."""
    samples = run.result.samples
    minutes = [sample.now_s / 60 for sample in samples]
    for number, replica in enumerate(run.result.replicas):
        alpha, percent = 1 / (1 + 0.5 * number), 100 / replica.capacity_tokens
        demands = [sample.replicas[number].demand_tokens * percent for sample in samples]
        used = [sample.replicas[number].used_tokens * percent for sample in samples]
        axes.plot(minutes, demands, color=COLOURS[0], linewidth=1.0, alpha=alpha, label="" if number else "demand")
        axes.plot(minutes, used, color=COLOURS[1], linewidth=0.8, alpha=alpha, label="" if number else "used")
    axes.axhline(100, color=INK, linewidth=0.9, linestyle="dashed")
    axes.axvspan(0, warmup_s / 60, color=SOFT_INK, alpha=0.1, linewidth=0)
    axes.set_ylim(bottom=0)
    axes.set_xlabel("minutes; the warm-up is shaded")
    axes.set_ylabel("part of capacity (%)")
    axes.legend(fontsize=7)
