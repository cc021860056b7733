"""Draw what a comparison came to, as SVG: for a page, a report or a paper. Needs the extra `plots`: matplotlib.

Colours are those of Okabe and Ito, which people who see fewer colours can tell apart; every contestant has its own
marker besides. Backgrounds are transparent. Bands and whiskers are 95 % intervals over seeds.
"""

from __future__ import annotations

import functools
import io
import math
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from statistics import fmean
from typing import Any, ParamSpec

from thunderagent.errors import ConfigurationError
from thunderagent.programs.learned.goodput import ALPHA_RATIOS
from thunderagent.simulator.comparison import COSTS, ComparisonResult, Row, Run
from thunderagent.simulator.intervals import CONFIDENCE, Interval
from thunderagent.simulator.report import HeldBySize, Sample

try:
    import matplotlib as mpl
    from matplotlib.artist import Artist
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure
    from matplotlib.lines import Line2D
    from matplotlib.patches import Patch
    from matplotlib.ticker import FuncFormatter, MaxNLocator, NullLocator
except ImportError as error:
    raise ConfigurationError("plots need matplotlib: pip install 'thunderagent[plots]'") from error

INK = "#1d2430"
SOFT_INK = "#5b6471"
GRID = "#dfe3e8"
PAPER = "#fefefe"
"""Text, quieter text, the grid, and the gaps between bars: what changes on a dark page."""

BASELINE_COLOUR = "#8a8f98"
COLOURS = ("#1c88cf", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9")
MARKERS = ("o", "s", "^", "D", "v", "P", "X")
COST_COLOURS = {
    "decode": ("#0b7bc1", "#ffffff"),
    "prefill": ("#8cc9ee", "#15191f"),
    "recompute": ("#d55e00", "#ffffff"),
    "caching": ("#efb93f", "#15191f"),
    "unused": ("#b4bac3", "#15191f"),
}
"""Each cost's colour, and that of words on it."""

WIDTH_IN = 7.2
"""Of every figure: two columns of a paper."""

TIME_PARTS_COUNT = 60
"""Points of a line over time: samples between them are averaged."""

MOST_COST_PANELS_COUNT = 4
MOST_COST_PERCENT = 200.0
"""Where bars of costs are cut, so that the parts of the others can be told apart."""

MOST_SIZE_LABELS_COUNT = 7
HELD_LINEAR_UP_TO_S = 1.0

_STYLE: dict[Any, Any] = {
    "font.family": "sans-serif",
    "font.sans-serif": ["DejaVu Sans", "Verdana", "Helvetica", "Arial"],
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
    "grid.linewidth": 0.7,
    "xtick.color": GRID,
    "ytick.color": GRID,
    "xtick.labelcolor": SOFT_INK,
    "ytick.labelcolor": SOFT_INK,
    "legend.frameon": False,
    "legend.handlelength": 2.2,
    "lines.linewidth": 1.7,
    "lines.markersize": 4.5,
    "svg.fonttype": "none",
    "svg.hashsalt": "thunderagent",
}


@dataclass(frozen=True, slots=True)
class Plot:
    """A drawing: `name` is a word for a file, `caption` one sentence that says what it shows."""

    name: str
    title: str
    caption: str
    svg: str


def draw(result: ComparisonResult) -> tuple[Plot, ...]:
    """Draw everything that there is to see, the heaviest load where there is room for one only."""
    if not result.runs:
        return ()
    heaviest_count = result.programs_counts[-1]
    at_heaviest = f"with {heaviest_count} programs"
    against_load = "against load" if len(result.programs_counts) > 1 else at_heaviest
    warmup = "; what is shaded is the warm-up" if result.plan.scenario.warmup_s else ""
    seeds = f"over {len({run.seed for run in result.runs})} seeds"
    baseline = result.plan.baseline
    plots = [
        Plot(
            "throughput",
            "Throughput",
            f"Turns a minute {against_load}, means and 95 % intervals {seeds}; the dashed line is the limit "
            "min(L1, L2, L3) that no schedule of these turns can pass, and its band is where it lies for the turns of "
            "the different policies.",
            throughput(result),
        ),
        Plot(
            "ratio",
            f"Throughput, relative to {baseline}",
            f"Turns a minute over those of {baseline} with the same programs, {against_load}: means and 95 % intervals "
            "of the ratio of each seed; above 1 is better than the baseline.",
            ratio(result),
        ),
        Plot(
            "hit-rate",
            "Prefix hits",
            f"The part of all prompt tokens that engines found in their caches, {against_load}: means and 95 % "
            f"intervals {seeds}.",
            hit_rate(result),
        ),
        Plot(
            "latency",
            "Turn latency",
            f"How many turns took at most so long from their arrival to their end, the time that they were held "
            f"included, {at_heaviest}: geometric means and 95 % intervals of each percentile {seeds}.",
            latency_cdf(result),
        ),
        Plot(
            "goodput",
            "Goodput",
            "How many turns, and how many programs, took no longer than so many times their ideal time, "
            f"{at_heaviest}: on an idle engine that has all of their history in its cache, and with tools as "
            f"long as they took; means and 95 % intervals {seeds}.",
            goodput(result),
        ),
        Plot(
            "costs",
            "What memory was spent on",
            f"The five costs as parts of capacity times time, means {seeds}: what lacks was empty while nobody waited. "
            "What turns waited for inside an engine is no part of them.",
            costs(result),
        ),
        Plot(
            "held",
            "Held time by program size",
            f"How long turns waited for their leases, by the size of their prompts, {at_heaviest}: means of each run's "
            f"mean and 99th percentile, and 95 % intervals {seeds}; the scale is logarithmic from 1 s on.",
            held_by_size(result),
        ),
    ]
    seed = _seed_of_memory(result, heaviest_count)
    if seed is not None:
        plots.insert(
            -1,
            Plot(
                "memory",
                "Memory over time",
                f"What programs claim and what running turns use of each replica's capacity, {at_heaviest}, seed "
                f"{seed}: a line for each replica, and a scale for each policy{warmup}.",
                memory(result, seed=seed),
            ),
        )
    if result.plan.scenario.replica_count > 1:
        plots.insert(
            -1,
            Plot(
                "imbalance",
                "Imbalance over time",
                f"The difference between the largest and the smallest demand of a replica, as a part of one's "
                f"capacity, {at_heaviest}: means and 95 % intervals {seeds}{warmup}.",
                imbalance(result),
            ),
        )
    return tuple(plots)


Arguments = ParamSpec("Arguments")


def _as_svg(draw_figure: Callable[Arguments, Figure]) -> Callable[Arguments, str]:
    """Let a function that draws return the SVG element: the same for the same figures, without a date."""

    @functools.wraps(draw_figure)
    def draw_svg(*args: Arguments.args, **kwargs: Arguments.kwargs) -> str:
        with mpl.rc_context(_STYLE):
            text = io.StringIO()
            draw_figure(*args, **kwargs).savefig(text, format="svg", transparent=True, metadata={"Date": None})
        svg = text.getvalue()
        svg = re.sub(r"<metadata>.*?</metadata>\s*", "", svg[svg.index("<svg") :], flags=re.DOTALL)
        return re.sub(r' id="[A-Za-z]+(?:\d[a-z]+)?_\d+"', "", svg)  # nothing refers to them, and pages hold many SVGs

    return draw_svg


# --- the plots ------------------------------------------------------------------------------------------------------


@_as_svg
def throughput(result: ComparisonResult) -> Figure:
    """Draw turns a minute against load, with the limit."""
    figure, axes = _figure(result)
    _against_load(axes, result, lambda row: row.turns_per_min, "turns/min")
    _draw_limit(axes, result)
    _from_zero(axes, result)
    _legend(figure, axes, result)
    return figure


@_as_svg
def ratio(result: ComparisonResult) -> Figure:
    """Draw turns a minute over those of the baseline, against load."""
    figure, axes = _figure(result)
    _against_load(axes, result, lambda row: row.ratio, f"turns/min, times those of {result.plan.baseline}")
    _from_zero(axes, result)
    _legend(figure, axes, result)
    return figure


@_as_svg
def hit_rate(result: ComparisonResult) -> Figure:
    """Draw the prefix-hit rate against load."""
    figure, axes = _figure(result)
    _against_load(axes, result, lambda row: row.hit_ratio, "prompt tokens found in caches (%)", scale_ratio=100)
    _from_zero(axes, result, most_percent=101)
    _legend(figure, axes, result)
    return figure


@_as_svg
def latency_cdf(result: ComparisonResult, programs_count: int | None = None) -> Figure:
    """Draw how many turns took at most so long, at a load: the heaviest, if none is given."""
    figure, axes = _figure(result, always_curves=True)
    shown_s = []
    for contestant, runs in _runs_at(result, programs_count):
        curves = [run.result.turn_latency_quantiles_s for run in runs if run.result.turn_latency_quantiles_s]
        if not curves:
            continue
        logs = [Interval.of([math.log(max(value, 1e-3)) for value in values]) for values in zip(*curves, strict=True)]
        percents = range(len(logs))
        line = _line(result, contestant, marked=False)
        means_s = [math.exp(log.mean) for log in logs]
        shown_s += [means_s[0], means_s[-1]]
        axes.plot(means_s, percents, **line)
        lows, highs = ([math.exp(end) for end in ends] for ends in zip(*((x.low, x.high) for x in logs), strict=True))
        axes.fill_betweenx(percents, lows, highs, color=line["color"], alpha=0.16, linewidth=0)
    axes.set_xscale("log")
    if shown_s:
        axes.set_xlim(min(shown_s) / 1.3, max(shown_s) * 1.3)  # a band may reach much further
    axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
    axes.xaxis.set_minor_locator(NullLocator())
    axes.set_xlabel("turn latency (s)")
    axes.set_ylim(0, 101)
    axes.set_yticks([0, 25, 50, 75, 90, 99])
    axes.set_ylabel("turns that took no longer (%)")
    _legend(figure, axes, result, markers=False)
    return figure


@_as_svg
def goodput(result: ComparisonResult, programs_count: int | None = None) -> Figure:
    """Draw how many turns and programs were in time, by how many times their ideal time, at a load."""
    figure = Figure(figsize=(WIDTH_IN, 3.1), layout="constrained")
    panels = figure.subplots(1, 2, sharex=True, sharey=True)
    at_count = result.programs_counts[-1] if programs_count is None else programs_count
    rows = [row for row in result.rows() if row.programs_count == at_count]
    for row in rows:
        for axes, goodputs in zip(panels, (row.turn_goodputs, row.program_goodputs), strict=True):
            _draw_curve(axes, ALPHA_RATIOS, [_scaled(each, 100) for each in goodputs], _line(result, row.contestant))
    for axes, title in zip(panels, ("turns", "programs"), strict=True):
        axes.set_title(title)
        axes.set_xticks(ALPHA_RATIOS, [f"{alpha_ratio:g} x" for alpha_ratio in ALPHA_RATIOS])
        axes.set_xlabel("ideal time")
        axes.set_ylim(0, 101)
    panels[0].set_ylabel("in time (%)")
    _legend(figure, panels[0], result)
    return figure


@_as_svg
def costs(result: ComparisonResult) -> Figure:
    """Draw the five costs of each contestant as parts of capacity times time: a panel for each load, four at most."""
    rows = result.rows()
    counts = result.programs_counts[-MOST_COST_PANELS_COUNT:]
    contestants = [each for each in result.plan.contestants if any(row.contestant == each for row in rows)]
    figure = Figure(figsize=(WIDTH_IN, 0.9 + 0.27 * len(contestants)), layout="constrained")
    panels = figure.subplots(1, len(counts), sharex=True, sharey=True, squeeze=False)[0]
    totals = [sum(row.costs[name].mean for name in COSTS) for row in rows if row.programs_count in counts]
    end_percent = min(max(1.05, *totals) * 102, MOST_COST_PERCENT)
    for axes, programs_count in zip(panels, counts, strict=True):
        for row in rows:
            if row.programs_count == programs_count:
                _draw_cost_bar(axes, row, len(contestants) - 1 - contestants.index(row.contestant), end_percent)
        axes.axvline(100, color=INK, linewidth=0.9, linestyle=(0, (4, 3)), zorder=2)
        axes.set_title(f"{programs_count} programs")
        axes.set_xlim(0, end_percent)
        axes.xaxis.set_major_locator(MaxNLocator(4, steps=[1, 2, 5, 10]))
        axes.grid(visible=False, axis="y")
        axes.tick_params(axis="y", length=0)
        axes.spines["left"].set_visible(False)
    panels[0].set_yticks(range(len(contestants)), contestants[::-1])
    figure.supxlabel("part of capacity x time (%)", fontsize=9, color=SOFT_INK)
    handles = [Patch(color=COST_COLOURS[name][0], label=name) for name in COSTS]
    figure.legend(handles=handles, loc="outside upper center", ncols=len(COSTS), handlelength=1.1, columnspacing=1.4)
    return figure


@_as_svg
def memory(result: ComparisonResult, programs_count: int | None = None, seed: int | None = None) -> Figure:
    """Draw demand and used memory of each replica over time: a panel for each contestant, at one load, one seed.

    Without a seed it is the one that most contestants can be drawn with. Raises ValueError if none can.
    """
    seed = _seed_of_memory(result, programs_count) if seed is None else seed
    chosen = [
        (contestant, run)
        for contestant, runs in _runs_at(result, programs_count)
        for run in runs
        if run.seed == seed and _has_memory(run)
    ]
    if not chosen:
        raise ValueError(f"no run with seed {seed} has samples of memory")
    columns_count = 2 if len(chosen) in (2, 4) else min(3, len(chosen))
    rows_count = math.ceil(len(chosen) / columns_count)
    figure = Figure(figsize=(WIDTH_IN, 0.7 + 1.55 * rows_count), layout="constrained")
    panels = figure.subplots(rows_count, columns_count, squeeze=False, sharex=True).flat
    for axes in panels[len(chosen) :]:
        axes.remove()
    for place, (axes, (contestant, run)) in enumerate(zip(panels[: len(chosen)], chosen, strict=True)):
        _draw_memory(axes, run, result.plan.scenario.warmup_s)
        axes.set_title(contestant)
        if place % columns_count == 0:
            axes.set_ylabel("part of capacity (%)")
        if place + columns_count >= len(chosen):
            axes.set_xlabel("minutes")
            axes.tick_params(labelbottom=True)
    demand, used = COLOURS[0], COLOURS[1]
    handles = [
        Line2D([], [], color=demand, label="demand: what programs claim"),
        Line2D([], [], color=used, label="used: by running turns"),
        Line2D([], [], color=INK, linewidth=0.9, linestyle=(0, (4, 3)), label="capacity"),
    ]
    figure.legend(handles=handles, loc="outside upper center", ncols=3)
    return figure


@_as_svg
def imbalance(result: ComparisonResult, programs_count: int | None = None) -> Figure:
    """Draw the difference between the largest and the smallest demand over time, at a load."""
    figure, axes = _figure(result, always_curves=True)
    highest_percent = 1.0
    part_s = _part_s(result, programs_count)
    for contestant, runs in _runs_at(result, programs_count):
        parts = [_over_time(run.result.samples, part_s) for run in runs]
        points = list(zip(*parts, strict=False))  # a batch may be through sooner with one seed than with another
        minutes = [fmean(now_s for now_s, _ in point) / 60 for point in points]
        percents = [Interval.of([imbalance_ratio * 100 for _, imbalance_ratio in point]) for point in points]
        highest_percent = max([highest_percent, *(percent.mean for percent in percents)])
        _draw_curve(axes, minutes, percents, _line(result, contestant, marked=False))
    _draw_warmup(axes, result.plan.scenario.warmup_s)
    axes.set_xlim(left=0)
    axes.set_ylim(0, highest_percent * 1.25)  # a band may reach much further
    axes.set_xlabel("minutes")
    axes.set_ylabel("largest less smallest demand\n(% of a replica's capacity)")
    _legend(figure, axes, result, markers=False)
    return figure


@_as_svg
def held_by_size(result: ComparisonResult, programs_count: int | None = None) -> Figure:
    """Draw how long turns were held by the size of their prompts, at a load: mean and 99th percentile."""
    figure = Figure(figsize=(WIDTH_IN, 3.1), layout="constrained")
    panels = figure.subplots(1, 2, sharex=True, sharey=True)
    sizes_tokens = sorted({group.up_to_tokens for run in result.runs for group in run.result.held_by_size})
    shown_sizes = set()
    highest_s = HELD_LINEAR_UP_TO_S
    for axes, title, figure_of in (
        (panels[0], "mean", lambda group: group.held.mean_s),
        (panels[1], "99th percentile", lambda group: group.held.p99_s),
    ):
        for contestant, runs in _runs_at(result, programs_count):
            held = _held(runs, figure_of)
            shown_sizes |= set(held)
            highest_s = max([highest_s, *(interval.mean for interval in held.values())])
            _draw_curve(
                axes,
                [sizes_tokens.index(size_tokens) for size_tokens in held],
                list(held.values()),
                _line(result, contestant),
            )
        axes.set_title(title)
        axes.set_yscale("symlog", linthresh=HELD_LINEAR_UP_TO_S, linscale=0.6)
        axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
        axes.yaxis.set_minor_locator(NullLocator())
        axes.set_xlabel("prompt, up to so many tokens")
    panels[0].set_ylim(0, highest_s * 2.5)
    ticks = [place for place, size_tokens in enumerate(sizes_tokens) if size_tokens in shown_sizes]
    labels = [f"{sizes_tokens[place] // 1024}k" for place in ticks]
    if len(labels) > MOST_SIZE_LABELS_COUNT:
        labels = [label if number % 2 else "" for number, label in enumerate(labels, start=1)]
    panels[0].set_xticks(ticks, labels)
    panels[0].set_ylabel("held (s)")
    _legend(figure, panels[0], result)
    return figure


# --- what they are made of ------------------------------------------------------------------------------------------


def _figure(result: ComparisonResult, *, always_curves: bool = False) -> tuple[Figure, Axes]:
    """Return a figure with one panel: for curves, or at a single load for a line of each contestant."""
    has_curves = always_curves or len(result.programs_counts) > 1
    height_in = 3.3 if has_curves else 0.8 + 0.3 * len(result.plan.contestants)
    figure = Figure(figsize=(WIDTH_IN, height_in), layout="constrained")
    return figure, figure.subplots()


def _line(result: ComparisonResult, contestant: str, *, marked: bool = True) -> dict[str, Any]:
    """Return how a contestant's line looks. The baseline's is wide, so that it shows behind another that is equal."""
    marker = MARKERS[result.plan.contestants.index(contestant) % len(MARKERS)] if marked else ""
    look = {"marker": marker, "label": contestant}
    if contestant == result.plan.baseline:
        return look | {"color": BASELINE_COLOUR, "linewidth": 3.0, "markersize": 7, "zorder": 1.9}
    others = [each for each in result.plan.contestants if each != result.plan.baseline]
    rounds_count, place = divmod(others.index(contestant), len(COLOURS))
    return look | {"color": COLOURS[place], "linestyle": "dashed" if rounds_count else "solid"}


def _runs_at(result: ComparisonResult, programs_count: int | None) -> list[tuple[str, tuple[Run, ...]]]:
    """Return each contestant with its runs at a load: the heaviest, if none is given."""
    at_count = result.programs_counts[-1] if programs_count is None else programs_count
    return [(each, runs) for each in result.plan.contestants if (runs := result.runs_of(each, at_count))]


def _draw_curve(axes: Axes, places: Sequence[float], intervals: Sequence[Interval], line: dict[str, Any]) -> None:
    """Draw means as a line, and their intervals as a band."""
    axes.plot(places, [interval.mean for interval in intervals], **line)
    lows, highs = [interval.low for interval in intervals], [interval.high for interval in intervals]
    axes.fill_between(places, lows, highs, color=line["color"], alpha=0.16, linewidth=0)


def _against_load(
    axes: Axes, result: ComparisonResult, pick: Callable[[Row], Interval | None], label: str, scale_ratio: float = 1.0
) -> None:
    """Draw a figure of all contestants against load; at a single load a line for each of them."""
    counts, rows = result.programs_counts, result.rows()
    for place, contestant in enumerate(result.plan.contestants):
        points = [
            (row.programs_count, _scaled(interval, scale_ratio))
            for row in rows
            if row.contestant == contestant and (interval := pick(row)) is not None
        ]
        line = _line(result, contestant)
        if len(counts) > 1:
            programs, intervals = [count for count, _ in points], [interval for _, interval in points]
            _draw_curve(axes, programs, intervals, line)
        else:
            for _, interval in points:
                width = interval.half_width or 0.0
                axes.errorbar(
                    interval.mean, -place, xerr=width, capsize=3, **(line | {"linewidth": 1.4, "label": None})
                )
    if len(counts) > 1:
        _load_axis(axes, result)
        axes.set_ylabel(label)
    else:
        names = [f"{each}  " for each in result.plan.contestants]
        axes.set_yticks([-place for place in range(len(names))], names)
        axes.tick_params(axis="y", length=0)
        axes.set_ylim(0.6 - len(names), 0.6)
        axes.set_xlabel(f"{label}, {counts[0]} programs")


def _from_zero(axes: Axes, result: ComparisonResult, most_percent: float = math.inf) -> None:
    """Let the axis of the figure begin at 0, and end with what is possible, after everything is drawn."""
    if len(result.programs_counts) > 1:
        axes.set_ylim(0, min(axes.get_ylim()[1], most_percent))
    else:
        axes.set_xlim(0, min(axes.get_xlim()[1], most_percent))


def _scaled(interval: Interval, scale_ratio: float) -> Interval:
    half_width = None if interval.half_width is None else interval.half_width * scale_ratio
    return Interval(interval.count, interval.mean * scale_ratio, half_width)


def _load_axis(axes: Axes, result: ComparisonResult) -> None:
    counts = result.programs_counts
    if counts[-1] >= 8 * counts[0]:
        axes.set_xscale("log", base=2)
    axes.set_xticks(counts, [str(count) for count in counts])
    axes.xaxis.set_minor_locator(NullLocator())
    axes.set_xlabel("programs at a time" if result.plan.scenario.loop == "closed" else "programs")


def _draw_limit(axes: Axes, result: ComparisonResult) -> None:
    """Draw the limit, between the least and the largest of the contestants: each finishes other turns."""
    known: dict[int, list[float]] = {}
    for row in result.rows():
        if row.limit_per_min is not None:
            known.setdefault(row.programs_count, []).append(row.limit_per_min.mean)
    if not known:
        return
    dashes = (0, (5, 3))
    label = "limit: min(L1, L2, L3)"
    lows, highs = [min(values) for values in known.values()], [max(values) for values in known.values()]
    means = [fmean(values) for values in known.values()]
    if len(result.programs_counts) > 1:
        axes.plot(list(known), means, color=INK, linewidth=1.1, linestyle=dashes, label=label)
        axes.fill_between(list(known), lows, highs, color=SOFT_INK, alpha=0.12, linewidth=0)
    else:
        axes.axvline(means[0], color=INK, linewidth=1.1, linestyle=dashes, label=label)
        axes.axvspan(lows[0], highs[0], color=SOFT_INK, alpha=0.12, linewidth=0)


def _draw_cost_bar(axes: Axes, row: Row, place: float, end_percent: float) -> None:
    """Draw one contestant's costs, with a number on each part that is wide enough for it, and where the bar is cut."""
    words: dict[str, Any] = {"va": "center", "fontsize": 7.5}
    left = 0.0
    for name in COSTS:
        width = row.costs[name].mean * 100
        colour, word_colour = COST_COLOURS[name]
        axes.barh(place, width, 0.74, left, color=colour, edgecolor=PAPER, linewidth=0.6)
        shown = min(left + width, end_percent) - left
        if shown >= 0.09 * end_percent:
            axes.text(left + shown / 2, place, f"{width:.0f}", color=word_colour, ha="center", **words)
        left += width
    if left > end_percent:
        axes.text(end_percent, place, f" \N{RIGHTWARDS ARROW} {left:.0f}", color=SOFT_INK, ha="left", **words)


def _draw_memory(axes: Axes, run: Run, warmup_s: float) -> None:
    """Draw demand and used memory of each replica, each paler than the one before."""
    samples = run.result.samples
    minutes = [sample.now_s / 60 for sample in samples]
    for number, replica in enumerate(run.result.replicas):
        alpha = 1 / (1 + 0.5 * number)
        percent = 100 / replica.capacity_tokens
        demands = [sample.replicas[number].demand_tokens * percent for sample in samples]
        used = [sample.replicas[number].used_tokens * percent for sample in samples]
        axes.plot(minutes, demands, color=COLOURS[0], linewidth=1.0, alpha=alpha)
        axes.plot(minutes, used, color=COLOURS[1], linewidth=0.8, alpha=alpha)
    axes.axhline(100, color=INK, linewidth=0.9, linestyle=(0, (4, 3)))
    _draw_warmup(axes, warmup_s)
    axes.set_xlim(0, minutes[-1] or 1.0)
    axes.set_ylim(0, max(120.0, axes.get_ylim()[1]))
    axes.yaxis.set_major_locator(MaxNLocator(4, steps=[1, 2, 5, 10]))
    axes.xaxis.set_major_locator(MaxNLocator(5, steps=[1, 2, 5, 10]))


def _draw_warmup(axes: Axes, warmup_s: float) -> None:
    if warmup_s:
        axes.axvspan(0, warmup_s / 60, color=SOFT_INK, alpha=0.1, linewidth=0)


def _has_memory(run: Run) -> bool:
    return any(sample.replicas for sample in run.result.samples)


def _seed_of_memory(result: ComparisonResult, programs_count: int | None) -> int | None:
    """Return the first of the seeds with which the memory of most contestants is known at a load; None without any."""
    known = [run.seed for _, runs in _runs_at(result, programs_count) for run in runs if _has_memory(run)]
    return max(result.plan.seeds, key=known.count) if known else None


def _part_s(result: ComparisonResult, programs_count: int | None) -> float:
    """Return over how long samples are averaged at a load, so that the longest line can be read: whole samples."""
    interval_s = result.plan.scenario.sample_interval_s
    runs = [run for _, runs in _runs_at(result, programs_count) for run in runs]
    longest_s = max((sample.now_s for run in runs for sample in run.result.samples[-1:]), default=0.0)
    return math.ceil((round(longest_s / interval_s) + 1) / TIME_PARTS_COUNT) * interval_s


def _over_time(samples: Sequence[Sample], part_s: float) -> list[tuple[float, float]]:
    """Return the middle of each part of the time with the mean imbalance in it: the same parts for every run."""
    parts: dict[int, list[float]] = {}
    for sample in samples:
        parts.setdefault(int(sample.now_s / part_s + 1e-6), []).append(sample.imbalance_ratio)
    return [((number + 0.5) * part_s, fmean(ratios)) for number, ratios in parts.items()]


def _held(runs: Sequence[Run], figure_of: Callable[[HeldBySize], float]) -> dict[int, Interval]:
    """Return held times by the sizes that at least half of the runs have turns of."""
    values: dict[int, list[float]] = {}
    for run in runs:
        for group in run.result.held_by_size:
            values.setdefault(group.up_to_tokens, []).append(figure_of(group))
    return {
        size_tokens: Interval.of(values[size_tokens])
        for size_tokens in sorted(values)
        if 2 * len(values[size_tokens]) >= len(runs)
    }


def _legend(figure: Figure, axes: Axes, result: ComparisonResult, *, markers: bool = True) -> None:
    """Name the contestants at the right of the figure, in the plan's order, and below them what else has a name."""
    handles, labels = axes.get_legend_handles_labels()
    shown: list[Artist] = [
        Line2D([], [], **_line(result, contestant, marked=markers))
        for contestant in result.plan.contestants
        if contestant in labels
    ]
    shown += [handle for handle, label in zip(handles, labels, strict=True) if label not in result.plan.contestants]
    if shown:
        title = f"mean, {CONFIDENCE:.0%} interval"
        figure.legend(handles=shown, loc="outside right upper", title=title, alignment="left")
