"""`thunderagent compare`: many runs on all cores, a table in the terminal, and a report in files."""

from __future__ import annotations

import argparse
import os
import platform
import shlex
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import UTC, datetime
from decimal import Decimal
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from tempfile import NamedTemporaryFile
from time import monotonic

from rich import box
from rich.console import Console
from rich.progress import BarColumn, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from rich.progress import Progress as ProgressBar
from rich.table import Table
from rich.text import Text

from thunderagent.errors import ConfigurationError
from thunderagent.programs.learned.goodput import ALPHA_RATIOS, in_time
from thunderagent.simulator.commands.simulate import add_scenario_arguments, load_programs, scenario_from
from thunderagent.simulator.comparison.comparison import ComparisonProgress, compare, processes_that_fit
from thunderagent.simulator.comparison.processes import interrupts_ignored
from thunderagent.simulator.comparison.results import CAP_BEST, ComparisonPlan, ComparisonResult, Row
from thunderagent.simulator.report.page import Making, write_report

DESCRIPTION = """\
Compare policies in the simulator: each at every load, with the same programs for each, on all cores.

Every policy runs with the same seeds, so the ratio to the baseline is taken seed by seed. A folder gets a page with
tables and plots (comparison.html), the figures as CSV, and all runs as JSON. The same options always give the same
figures. Ctrl-C ends it: the runs that are done count, those under way do not.

The page has plots if matplotlib is there: `pip install` with the extra `plots`.

Policies are what `serve` and `simulate` take, with settings behind colons: cap:n=6, thunderagent:delta_s=1, presets
as thunderagent-ports, oracle, package.module:Class. cap-best is cap with the n that is best at each load: it tries
n = 1, 2, 3, 4, 6, 8, 12, ... with a seed that does not count.

Examples:
  thunderagent compare --policies passthrough,cap-best,thunderagent --programs 4,8,16 --seeds 3 --minutes 10
      small programs on a small engine: about 10 seconds on two cores
  thunderagent compare --policies passthrough,thunderagent,ttl:ttl_s=10,oracle --programs 24,48,96 --seeds 10 \\
      --workload mini-swe-agent --profile glm-4.6-h100x8 --minutes 30 --warmup-minutes 5 --out swe
      coding agents on one large replica
"""

SHOWN_ALWAYS = ("policies", "programs", "seeds", "workload", "profile", "replicas", "minutes")
"""Options that the report's command always has; of the others, those that are not the default."""

OUTSIDE_OF_THE_FIGURES = ("out", "process_count")
"""Options that do not affect the figures."""

MOST_SEEDS_COUNT = 10_000


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of a comparison to a command's parser."""
    add = parser.add_argument
    add(
        "--policies",
        type=names,
        default="passthrough,sticky,cap-best,thunderagent,breakeven",
        metavar="P,P",
        help="policies to compare, each NAME or NAME:SETTING=VALUE:... (default: %(default)s)",
    )
    add(
        "--baseline",
        default="",
        metavar="P",
        help="policy that ratios of turns/min refer to (default: the first policy)",
    )
    add(
        "--programs",
        type=_whole_numbers,
        default="4,8,16",
        metavar="N,N",
        help="loads: how many at a time, or in all (default: %(default)s)",
    )
    add("--seeds", type=int, default=5, metavar="N", help="runs of each policy at each load (default: %(default)s)")
    add_scenario_arguments(parser)
    add(
        "--processes",
        type=int,
        dest="process_count",
        metavar="N",
        help="runs at a time (default: one for each core, as far as memory reaches)",
    )
    add(
        "--out",
        type=Path,
        default=Path("comparison"),
        metavar="FOLDER",
        help="folder for the report; files of an earlier one are replaced (default: %(default)s)",
    )


def run(args: argparse.Namespace) -> int:
    """Run by the options; return the exit status: 0, or 1 if not all runs are complete.

    Raises ConfigurationError for impossible options, before anything runs. Ctrl-C ends the runs, but not the report.
    """
    plan = plan_from(args)
    processes_that_fit(plan)
    folder = _made_folder(args.out)
    begin_s = monotonic()
    with interrupts_ignored():
        with _progress_bar(Console(stderr=True)) as on_progress:
            result = compare(plan, on_progress=on_progress)
        making = Making(command_line(args), _made(monotonic() - begin_s))
        paths, unwritten = [], ""
        if result.runs:
            try:
                paths = write_report(folder, result, _drawing(result), making)
            except OSError as error:
                unwritten = f"cannot write the report in {folder}: {error.strerror}"
    if result.stopped_by:
        print(
            f"thunderagent: not complete, {result.stopped_by}: {result.done_count} of {result.planned_count} runs "
            "are done",
            file=sys.stderr,
        )
    if not result.runs:
        return 1
    console = Console(markup=False, emoji=False, highlight=False)
    console.print(table(result))
    console.print(goodput_table(result))
    for path in paths:
        console.print(str(path), soft_wrap=True)
    if unwritten:
        print(f"thunderagent: {unwritten}", file=sys.stderr)
    return 0 if result.complete and not unwritten else 1


def plan_from(args: argparse.Namespace) -> ComparisonPlan:
    """Build the plan from parsed options; ConfigurationError says why it is impossible."""
    if not 1 <= args.seeds <= MOST_SEEDS_COUNT:
        raise ConfigurationError(f"--seeds must be 1 to {MOST_SEEDS_COUNT:,}, got {args.seeds}")
    scenario = scenario_from(args, programs_count=max(args.programs), seed=0)
    return ComparisonPlan(
        scenario=scenario,
        workload=load_programs(args, scenario.engine.context_limit_tokens),
        contestants=args.policies,
        programs_counts=args.programs,
        seeds=tuple(range(args.seeds)),
        baseline=args.baseline,
        process_count=args.process_count,
        keep_samples=False,
    )


def command_line(args: argparse.Namespace) -> str:
    """Return the command that reproduces the figures."""
    parser = argparse.ArgumentParser()
    add_arguments(parser)
    defaults = parser.parse_args([])
    words = ["thunderagent", "compare"]
    for name, default in vars(defaults).items():
        value = getattr(args, name)
        if name not in OUTSIDE_OF_THE_FIGURES and (value != default or name in SHOWN_ALWAYS):
            words += [f"--{name.replace('_', '-')}", _as_typed(name, value)]
    return shlex.join(words)


def _as_typed(name: str, value: object) -> str:
    """Return a text that parses to the same value; without exponents, whose - would look like a range."""
    if isinstance(value, tuple):
        return ("-" if name == "sandbox_s" else ",").join(_as_typed(name, each) for each in value)
    return f"{Decimal(repr(value)):f}".removesuffix(".0") if isinstance(value, float) else str(value)


def names(text: str) -> tuple[str, ...]:
    """Read comma-separated words."""
    found = tuple(part.strip() for part in text.split(","))
    if not all(found):
        raise argparse.ArgumentTypeError(f"not names with commas between: {text!r}")
    return found


def _whole_numbers(text: str) -> tuple[int, ...]:
    try:
        return tuple(int(part) for part in text.split(","))
    except ValueError:
        raise argparse.ArgumentTypeError(f"not whole numbers with commas between: {text!r}") from None


def _made_folder(path: Path) -> Path:
    """Create the folder, and check that it is writable."""
    try:
        path.mkdir(exist_ok=True)
    except OSError as error:
        raise ConfigurationError(f"cannot make the folder {path}: {error.strerror}") from error
    try:
        NamedTemporaryFile(dir=path).close()
    except OSError as error:
        raise ConfigurationError(f"cannot write in the folder {path}: {error.strerror}") from error
    return path


def _drawing(result: ComparisonResult) -> str:
    """Return the page's drawing; none without matplotlib, and what to do for one."""
    try:
        from thunderagent.simulator.report.plots import draw  # noqa: PLC0415 - needs an extra
    except ConfigurationError as error:
        print(f"thunderagent: the page has tables and no plots: {error.message}", file=sys.stderr)
        return ""
    return draw(result)


def _made(took_s: float) -> dict[str, str]:
    """Return when, where and with what the report was made."""
    try:
        drawn_with = version("matplotlib")
    except PackageNotFoundError:
        drawn_with = "none, so there are no plots"
    return {
        "python": platform.python_version(),
        "matplotlib": drawn_with,
        "machine": f"{platform.system()} on {platform.machine()}, {os.cpu_count()} cores",
        "date": datetime.now(UTC).isoformat(" ", "seconds"),
        "took": f"{took_s:.0f} s",
    }


# --- the terminal ---------------------------------------------------------------------------------------------------

MEAN_AND_WIDTH = "{} ±{}"


def table(result: ComparisonResult) -> Table:
    """Return the figures for a terminal of 80 columns."""
    shown = Table(box=box.SIMPLE_HEAD, pad_edge=False, padding=(0, 1))
    shown.add_column("policy", overflow="fold")
    for column in ("turns/min", "ratio", "hits", "p50 s", "p99 s", "limit"):
        shown.add_column(column, justify="right", no_wrap=True)
    for programs_count in result.programs_counts:
        rows = [row for row in result.rows() if row.programs_count == programs_count]
        most = max(row.turns_per_min.mean for row in rows)
        shown.add_section()
        shown.add_row(Text(f"{programs_count} programs", style="bold"))
        for row in rows:
            _add_row(shown, row, is_best=row.turns_per_min.mean == most)
    return shown


def goodput_table(result: ComparisonResult) -> Table:
    """Return the ratios of turns and programs in time, by multiple of their ideal time."""
    shown = Table(box=box.SIMPLE_HEAD, pad_edge=False, padding=(0, 1))
    shown.add_column(f"within {'/'.join(f'{alpha_ratio:g}' for alpha_ratio in ALPHA_RATIOS)} x ideal", overflow="fold")
    for kind in ("turns", "programs"):
        shown.add_column(kind, justify="right", no_wrap=True)
    for programs_count in result.programs_counts:
        shown.add_section()
        shown.add_row(Text(f"{programs_count} programs", style="bold"))
        for row in result.rows():
            if row.programs_count == programs_count:
                goodputs = (row.turn_goodputs, row.program_goodputs)
                shown.add_row(row.contestant, *(in_time(goodput.mean for goodput in each) for each in goodputs))
    return shown


def _add_row(shown: Table, row: Row, *, is_best: bool) -> None:
    policy = row.contestant
    if policy == CAP_BEST:
        policy += f" {row.policy.removeprefix('cap:')}"
    shown.add_row(
        policy,
        Text(row.turns_per_min.text(1, form=MEAN_AND_WIDTH), style="bold" if is_best else ""),
        "" if row.ratio is None else row.ratio.text(2, form=MEAN_AND_WIDTH),
        f"{row.hit_ratio.mean:.0%}",
        f"{row.turn_p50_s.mean:.1f}",
        f"{row.turn_p99_s.mean:.1f}",
        "" if row.limit_ratio is None else f"{row.limit_ratio.mean:.0%} {row.limited_by}",
    )


@contextmanager
def _progress_bar(console: Console) -> Iterator[Callable[[ComparisonProgress], None]]:
    """Show the comparison's progress on standard error, if that is a terminal."""
    columns = (
        TextColumn("{task.completed:.0f} of {task.fields[all_count]} runs"),
        BarColumn(),
        TimeElapsedColumn(),
        TextColumn("ETA"),
        TimeRemainingColumn(),
        TextColumn("{task.fields[last]}"),
    )
    with ProgressBar(*columns, console=console, transient=True, disable=not console.is_terminal) as bar:
        task = bar.add_task("", total=None, all_count="?", last="")

        def on_progress(progress: ComparisonProgress) -> None:
            last = "" if progress.last is None else f"{progress.last.policy}, {progress.last.programs_count} programs"
            bar.update(
                task,
                completed=progress.done_count,
                total=progress.all_count,
                all_count=progress.all_count,
                last=last,
            )

        yield on_progress
