"""A run in the terminal: its progress, and its figures."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from math import isfinite

from rich import box
from rich.console import Console, Group
from rich.progress import BarColumn, TaskProgressColumn, TextColumn
from rich.progress import Progress as ProgressBar
from rich.table import Table
from rich.text import Text

from thunderagent.programs.learned.goodput import in_time
from thunderagent.simulator.figures.figures import Percentiles, RunResult
from thunderagent.simulator.runs.scenario import Scenario
from thunderagent.simulator.runs.tally import Progress

GIBIBYTE = 2**30


def picture(result: RunResult) -> Group:
    """Return the figures of a run for a terminal of 80 columns."""
    how = "" if result.complete else ", not complete"
    head = Text(
        f"{result.policy} on {result.workload}, seed {result.seed}: {result.simulated_s / 60:.1f} min simulated{how}",
        style="bold",
    )
    counts = f"{result.turn_count} turns, {result.program_count} programs, {result.failed_turn_count} failed turns"
    lines = [
        f"{result.turns_per_min_count:.1f} turns/min, {result.hit_ratio:.1%} prefix hits, {counts}",
        f"imbalance {result.imbalance_mean_ratio:.1%} of a replica's capacity",
        f"replicas idled for {result.idle_held_ratio:.1%} of their time while programs were held",
    ]
    if result.bounds is not None and isfinite(result.bounds.limit_per_s):
        bounds = result.bounds
        lines.insert(
            1,
            f"{result.limit_ratio:.1%} of the limit for these turns: {bounds.limit_per_s * 60:.1f}/min by "
            f"{bounds.limited_by}; without any recomputation {bounds.no_recompute_per_s * 60:.1f}/min",
        )
    turns = in_time(each.turn_ratio for each in result.goodputs)
    programs = in_time(each.program_ratio for each in result.goodputs)
    alphas = "/".join(f"{each.alpha_ratio:g}" for each in result.goodputs)
    lines.append(f"within {alphas} times their ideal time: {turns} of turns, {programs} of programs")
    if result.makespan_s is not None:
        lines.append(f"makespan {result.makespan_s:.0f} s")
    if result.tools.sandbox_count:
        lines.append(
            f"{result.tools.peak_sandbox_count} sandboxes at most on {result.tools.peak_disk_bytes / GIBIBYTE:.1f} GiB"
        )
    return Group(head, *map(Text, lines), _latency_table(result), _cost_table(result))


def _latency_table(result: RunResult) -> Table:
    rows: dict[str, Percentiles] = {
        "turn": result.turn_latency,
        "first token": result.first_token_latency,
        "held": result.held,
        **{f"held, up to {group.up_to_tokens // 1024}k": group.held for group in result.held_by_size},
        "program": result.program_latency,
    }
    table = table_of_numbers("Seconds", "count", "mean", "p50", "p90", "p99", "max")
    for name, values in rows.items():
        seconds = (values.mean_s, values.p50_s, values.p90_s, values.p99_s, values.max_s)
        table.add_row(name, str(values.count), *(f"{value:.2f}" for value in seconds))
    return table


def _cost_table(result: RunResult) -> Table:
    """Show the five costs as ratios of the available memory: capacity times time.

    What turns waited for in the engine's own queue is no memory, and only in the JSON.
    """
    costs_names = ("decode", "prefill", "recompute", "caching", "unused")
    table = table_of_numbers("Replica", "turns", "preempted", *costs_names)
    for replica in result.replicas:
        costs = replica.costs
        whole_token_s = replica.capacity_tokens * result.measured_s or 1.0
        parts = (
            costs.decode_token_s,
            costs.prefill_token_s,
            costs.recompute_token_s,
            costs.caching_token_s,
            costs.unused_token_s,
        )
        table.add_row(
            replica.replica_id,
            str(replica.turn_count),
            str(replica.preemption_count),
            *(f"{part / whole_token_s:.1%}" for part in parts),
        )
    return table


def table_of_numbers(first: str, *numbers: str) -> Table:
    """Return an empty table with a column of words and columns of numbers."""
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, padding=(0, 1))
    table.add_column(first)
    for column in numbers:
        table.add_column(column, justify="right", no_wrap=True)
    return table


@contextmanager
def progress_bar(console: Console, scenario: Scenario) -> Iterator[Callable[[Progress], None]]:
    """Show the run's progress on standard error, if that is a terminal."""
    columns = (
        TextColumn("{task.fields[minutes]:.1f} min"),
        BarColumn(),
        TaskProgressColumn(),
        TextColumn("{task.fields[turns]} turns, {task.fields[hits]:.0%} hits, {task.fields[held]} held"),
    )
    with ProgressBar(*columns, console=console, transient=True, disable=not console.is_terminal) as bar:
        task = bar.add_task("", total=scenario.horizon_s, minutes=0.0, turns=0, hits=0.0, held=0)

        def on_progress(progress: Progress) -> None:
            bar.update(
                task,
                completed=progress.now_s,
                minutes=progress.now_s / 60,
                turns=progress.turn_count,
                hits=progress.hit_ratio,
                held=progress.held_count,
            )

        yield on_progress
