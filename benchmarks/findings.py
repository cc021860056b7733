"""Results of a simulated benchmark: figures over seeds, their bars, a table and a plot of them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from matplotlib.figure import Figure
from rich import box
from rich.table import Table

from benchmarks.simulated import colour_of
from thunderagent.simulator.comparison.results import Run
from thunderagent.simulator.figures.figures import RunResult
from thunderagent.simulator.figures.intervals import Interval

Pick = Callable[[RunResult], float | None]
"""A figure of a run; None where the run does not have it."""

OTHER_COLOUR = "#444444"

LEAST_SEEDS_COUNT = 3
"""With fewer nothing is decided: for two runs Student's t is 12.7 times their spread."""

YES, NO, UNDECIDED = "yes", "no", "undecided"


@dataclass(frozen=True)
class Finding:
    """One figure of one policy in one setting; `at_least` and `at_most` are its bars, if any."""

    setting: str
    policy: str
    figure: str
    interval: Interval | None
    at_least: float | None = None
    at_most: float | None = None

    @property
    def verdict(self) -> str:
        """Return whether the bad end of the interval reaches the bar; empty without a bar or a figure.

        It is undecided with too few seeds, unless the figure is the same in all of them: a count that stays 0.
        """
        if self.interval is None or (self.at_least is None and self.at_most is None):
            return ""
        low, high = self.interval.low, self.interval.high
        if self.interval.count < LEAST_SEEDS_COUNT and self.interval.half_width != 0:
            return UNDECIDED
        reaches = (self.at_least is None or low >= self.at_least) and (self.at_most is None or high <= self.at_most)
        return YES if reaches else NO

    @property
    def bar(self) -> str:
        """Return the bar in words."""
        least = [] if self.at_least is None else [f">= {self.at_least:g}"]
        most = [] if self.at_most is None else [f"<= {self.at_most:g}"]
        return ", ".join(least + most)

    def to_json(self) -> dict[str, Any]:
        """Return it as JSON values."""
        interval = self.interval
        return {
            "setting": self.setting,
            "policy": self.policy,
            "figure": self.figure,
            "mean": None if interval is None else round(interval.mean, 5),
            "half_width": None if interval is None or interval.half_width is None else round(interval.half_width, 5),
            "seeds_count": None if interval is None else interval.count,
            "bar": self.bar,
            "verdict": self.verdict,
        }


def mean_of(runs: Sequence[Run], pick: Pick) -> Interval | None:
    """Return a figure over seeds; None if a run does not have it."""
    values = [value for run in runs if (value := pick(run.result)) is not None]
    return Interval.of(values) if values and len(values) == len(runs) else None


def ratio_of(runs: Sequence[Run], others: Sequence[Run], pick: Pick) -> Interval | None:
    """Return a figure over that of other runs, seed by seed; None if a run lacks it, or one of those is 0."""
    by_seed = {run.seed: pick(run.result) for run in others}
    pairs = [(pick(run.result), by_seed[run.seed]) for run in runs]
    whole = [(value, other) for value, other in pairs if value is not None and other is not None]
    if len(whole) < len(pairs):
        return None
    return Interval.of_ratios([value for value, _ in whole], [other for _, other in whole])


def table(title: str, found: Sequence[Finding]) -> Table:
    """Return a table with a row for each finding."""
    made = Table(title=title, box=box.SIMPLE_HEAD)
    for column in ("setting", "policy", "figure", "mean", "±", "seeds", "bar", "reached"):
        made.add_column(column, justify="right" if column in ("mean", "±", "seeds") else "left", no_wrap=True)
    previous = ""
    for each in found:
        interval = each.interval
        half_width = "" if interval is None or interval.half_width is None else f"{interval.half_width:.2g}"
        mean = "-" if interval is None else f"{interval.mean:.4g}"
        verdict = f"[bold red]{NO}[/]" if each.verdict == NO else each.verdict
        seeds = "" if interval is None else str(interval.count)
        setting = "" if each.setting == previous else each.setting
        made.add_row(setting, each.policy, each.figure, mean, half_width, seeds, each.bar, verdict)
        previous = each.setting
    return made


def plot(found: Sequence[Finding]) -> Figure:
    """Draw every figure in a panel of its own: a point with its interval for each policy and setting, and the bar."""
    shown = [each for each in found if each.interval is not None]
    by_figure = {each.figure: [other for other in shown if other.figure == each.figure] for each in shown}
    heights = [0.55 + 0.16 * len(each) for each in by_figure.values()]
    figure = Figure(figsize=(7.2, 0.4 + sum(heights)), layout="constrained")
    panels = figure.subplots(len(by_figure), 1, squeeze=False, gridspec_kw={"height_ratios": heights})
    for axes, (name, group) in zip(panels[:, 0], by_figure.items(), strict=True):
        for place, each in enumerate(reversed(group)):
            assert each.interval is not None
            axes.errorbar(
                each.interval.mean,
                place,
                xerr=each.interval.half_width or 0.0,
                color=colour_of(each.policy) or OTHER_COLOUR,
                marker="o",
                markersize=3,
                capsize=2,
            )
        labels = [f"{each.policy} - {each.setting}" for each in reversed(group)]
        axes.set_yticks(range(len(group)), labels, fontsize=6)
        axes.set_ylim(-0.7, len(group) - 0.3)
        axes.set_title(name, fontsize=8, loc="left")
        axes.tick_params(axis="x", labelsize=7)
        for bar in {bar for each in group for bar in (each.at_least, each.at_most) if bar is not None}:
            axes.axvline(bar, color=OTHER_COLOUR, linewidth=0.8, linestyle="--")
    return figure
