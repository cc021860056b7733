"""Simulate loads and engines as strangers have them; find where the default is worse than a simple policy.

    scripts/bench policy world                          # all cells, ten seeds
    scripts/bench policy world --seeds 3 --cells 'h1*,h3*'
    scripts/bench policy world --others last            # only the judged policy anew; the others as in the last sweep

A *cell* is a load on engines that tell something, or nothing. In each cell the judged policy is compared, seed by seed,
with the best of the others: turns and programs an hour, and how long programs take from their arrival to their end. The
bars are reached by the bad end of the interval over seeds. `idle` is the part of the time in which a replica had no
turn in flight while a program was held for memory that could run there.

In a closed loop the programs an hour are counted by their turns: each turn that ended in the time counts as its part of
its program. Few programs end in a short time, so that their number says little. How long programs take is measured of
the same programs under each policy, those that follow the first ones, each to its end. A batch is measured whole.

Runs are stored when they end (`out/world/CODE.json`), so that an interrupted sweep goes on where it stopped. Only the
result of all cells and ten seeds goes to `benchmarks/results`, or one that gets a `--name`; any other one goes to
`out/world-trial.json`.
"""

from __future__ import annotations

import argparse
import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from fnmatch import fnmatch
from pathlib import Path
from statistics import fmean
from time import monotonic
from typing import Any

from rich import box
from rich.console import Console
from rich.table import Table

from benchmarks.kept_runs import do_runs
from benchmarks.machine import ROOT, code_hash, save_results
from benchmarks.policy import command_of
from benchmarks.world_cells import Cell, cells
from thunderagent.simulator.commands.compare import names
from thunderagent.simulator.comparison.contestants import Contestant
from thunderagent.simulator.comparison.processes import GoOn
from thunderagent.simulator.figures.intervals import Interval
from thunderagent.simulator.runs.agenda import Agenda
from thunderagent.simulator.runs.run import Simulation

RUNS = ROOT / "out" / "world"
OTHERS = ("passthrough", "thunderagent", "thunderagent-ports")
LAST = "last"
MOST_IDLE_RATIO = 0.01
BARS: dict[str, tuple[float | None, float | None]] = {
    "turns_per_hour": (0.98, None),
    "programs_per_hour": (0.98, None),
    "mean_s": (None, 1.02),
}
"""Figures of a run, and what they must come to over the best of the others: at least, at most."""
SEEDS_COUNT = 10
LEAST_TIMED_COUNT = 24
"""Of a closed loop those are timed that follow the first ones: twice as many as there are at a time, or so many."""
LONGEST_RATIO = 4.0
"""They are followed to this multiple of the run's time at most; who has not ended counts with the time until then."""
LOOK_S = 2.0
"""How often it is looked whether all of them have ended."""
PASS, NOISE, MISS = "pass", "noise", "MISS"
"""The bad end of every interval reaches its bar; only means do; not even those."""


@dataclass(frozen=True)
class Task:
    """A pending run; a process that does it makes the cells anew, by `traces`."""

    cell: str
    policy: str
    seed: int
    traces: Path | None = None

    @property
    def key(self) -> str:
        """Return its name among the stored runs."""
        return f"{self.cell}|{self.policy}|{self.seed}"


def run_one(task: Task, go_on: GoOn) -> dict[str, float]:
    """Do one run; return its figures."""
    cell = next(cell for cell in cells(task.traces) if cell.name == task.cell)
    return run_in(cell, task.policy, task.seed, go_on)


def run_in(cell: Cell, policy_text: str, seed: int, go_on: GoOn = lambda: None) -> dict[str, float]:
    """Run a policy in a cell with a seed; return its figures."""
    programs, scenario = cell.programs(seed), replace(cell.scenario, seed=seed)
    policy, foresight = Contestant.parse(policy_text).prepare(scenario, programs)
    agenda = Agenda()
    simulation = Simulation(
        scenario, programs, policy, agenda=agenda, foresight=foresight, on_progress=lambda _: go_on()
    )
    simulation.begin()
    while simulation.has_more and agenda.advance(scenario.horizon_s):
        pass
    result = simulation.result(complete=simulation.end())
    is_batch = scenario.loop == "batch"
    measured_s = result.measured_s
    count = scenario.programs_count
    timed = range(count) if is_batch else range(count, count + max(2 * count, LEAST_TIMED_COUNT))
    times_s, left_count = simulation.program_times_s(timed)
    while left_count and simulation.has_more and agenda.now_s < LONGEST_RATIO * scenario.horizon_s:
        next_s = agenda.now_s + LOOK_S
        while agenda.advance(next_s):
            pass
        agenda.now_s = next_s
        times_s, left_count = simulation.program_times_s(timed)
    values = {
        "turns_per_hour": result.turn_count * 3600 / measured_s,
        "programs_per_hour": result.program_parts_count * 3600 / measured_s,
        "ended_per_hour": result.programs_per_hour_count,
        "mean_s": fmean(times_s) if times_s else math.inf,
        "makespan_s": measured_s if is_batch else 0.0,
        "left_count": left_count,
        "idle_ratio": result.idle_held_ratio,
        "hit_ratio": result.hit_ratio,
        "held_mean_s": result.held.mean_s,
    }
    return {name: round(value, 6) for name, value in values.items()}


# --- figures ----------------------------------------------------------------------------------------------------------

Kept = Mapping[str, Mapping[str, float]]
"""Figures of runs, by their keys."""


@dataclass(frozen=True)
class Compared:
    """A figure of the judged policy over that of the best of the others, with its bars."""

    best: str
    interval: Interval
    at_least: float | None
    at_most: float | None

    @property
    def bad_end(self) -> float:
        """Return the end of the interval that must reach the bar."""
        return self.interval.high if self.at_least is None else self.interval.low

    @property
    def verdict(self) -> str:
        """Return whether the bar is reached by the bad end, by the mean alone, or not at all."""
        return PASS if self._reaches(self.bad_end) else NOISE if self._reaches(self.interval.mean) else MISS

    def _reaches(self, value: float) -> bool:
        return value >= self.at_least if self.at_least is not None else value <= (self.at_most or 0.0)


@dataclass(frozen=True)
class Outcome:
    """How the judged policy did in a cell."""

    cell: str
    figures: Mapping[str, Compared]
    idle: Interval
    values: Mapping[str, Sequence[Mapping[str, float]]]
    """All figures of all runs, by policy, in the order of the seeds."""

    @property
    def verdict(self) -> str:
        """Return the worst verdict of its figures; idling must stay under its bar in the mean, and by the bad end."""
        verdicts = [each.verdict for each in self.figures.values()]
        verdicts.append(
            PASS if self.idle.high < MOST_IDLE_RATIO else NOISE if self.idle.mean < MOST_IDLE_RATIO else MISS
        )
        return max(verdicts, key=[PASS, NOISE, MISS].index)

    def to_json(self) -> dict[str, Any]:
        """Return it as JSON values."""
        return {
            "cell": self.cell,
            "verdict": self.verdict,
            **{
                name: {
                    "best": each.best,
                    "ratio": round(each.interval.mean, 4),
                    "bad_end": round(each.bad_end, 4),
                    "verdict": each.verdict,
                }
                for name, each in self.figures.items()
            },
            "idle_ratio": {"mean": round(self.idle.mean, 5), "bad_end": round(self.idle.high, 5)},
            "runs": {policy: list(runs) for policy, runs in self.values.items()},
        }


def outcome_of(cell: Cell, judged: str, others: Sequence[str], seeds: Sequence[int], kept: Kept) -> Outcome:
    """Return how the judged policy did in a cell."""
    values = {policy: [kept[Task(cell.name, policy, seed).key] for seed in seeds] for policy in (judged, *others)}
    compared = {}
    for name, (at_least, at_most) in BARS.items():
        means = {other: fmean(run[name] for run in values[other]) for other in others}
        best = (max if at_most is None else min)(means, key=means.__getitem__)
        ratios = [one[name] / other[name] for one, other in zip(values[judged], values[best], strict=True)]
        compared[name] = Compared(best, Interval.of(ratios), at_least, at_most)
    return Outcome(cell.name, compared, Interval.of([run["idle_ratio"] for run in values[judged]]), values)


SHORT_NAMES = {"passthrough": "pass", "thunderagent": "ta", "thunderagent-ports": "ports"}


def table(title: str, outcomes: Sequence[Outcome]) -> Table:
    """Return a row for each cell: for each figure the mean ratio, its bad end and who is best; then idling."""
    made = Table(title=title, box=box.SIMPLE_HEAD)
    made.add_column("cell", no_wrap=True)
    for name in ("turns", "programs", "time"):
        made.add_column(f"{name}: mean, bad end / best", justify="right", no_wrap=True)
    for name in ("idle %", "others", "turns/min", "hits"):
        made.add_column(name, justify="right", no_wrap=True)
    made.add_column("")
    for each in outcomes:
        cells_of = []
        for figure in each.figures.values():
            text = f"{figure.interval.mean:.3f} {figure.bad_end:.3f} / {SHORT_NAMES.get(figure.best, figure.best):5}"
            colour = {PASS: "", NOISE: "yellow", MISS: "red"}[figure.verdict]
            cells_of.append(f"[{colour}]{text}[/]" if colour else text)
        judged, *others = each.values.values()
        idle = [100 * fmean(run["idle_ratio"] for run in runs) for runs in others]
        made.add_row(
            each.cell,
            *cells_of,
            f"{100 * each.idle.mean:.2f}",
            " ".join(f"{value:.1f}" for value in idle),
            f"{fmean(run['turns_per_hour'] for run in judged) / 60:.1f}",
            f"{fmean(run['hit_ratio'] for run in judged):.2f}",
            f"[bold red]{MISS}[/]" if each.verdict == MISS else each.verdict,
        )
    return made


# --- the command ------------------------------------------------------------------------------------------------------


def arguments() -> argparse.ArgumentParser:
    """Return the command line's parser."""
    parser = argparse.ArgumentParser(
        prog="policy world", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("--policy", default="breakeven", help="who is judged (default: %(default)s)")
    add("--against", type=names, default=OTHERS, metavar="P,P", help=f"the others (default: {','.join(OTHERS)})")
    add("--cells", type=names, default=("*",), metavar="C,C", help="only these; * stands for anything")
    add("--seeds", type=int, default=SEEDS_COUNT, help="runs of each, each with other programs (default: %(default)s)")
    add("--first-seed", type=int, default=0, help="the first of them (default: %(default)s)")
    add("--jobs", type=int, default=2, help="runs at a time (default: %(default)s)")
    add("--for-s", type=float, default=math.inf, help="begin no run after that, to go on later")
    add("--others", metavar="CODE", help=f"take the others' runs from a sweep of other code; {LAST}: the last sweep")
    add("--traces", type=Path, metavar="FILE", help="recorded programs, as of `thunderagent record`, for one more cell")
    add("--list", action="store_true", help="name the cells")
    add("--name", help="store the result of a part under this name, too")
    return parser


def others_runs(code: str | None) -> Kept:
    """Return the stored runs of a sweep of other code, or of the last one."""
    if code is None:
        return {}
    paths = sorted(RUNS.glob("*.json"), key=lambda path: path.stat().st_mtime)
    paths = [path for path in paths if path.stem != code_hash()] if code == LAST else [RUNS / f"{code}.json"]
    if not paths or not paths[-1].exists():
        raise SystemExit(f"policy world: no sweep of other code is stored in {RUNS}")
    runs: Kept = next(iter(json.loads(paths[-1].read_text()).values()))["runs"]
    return runs


def main(argv: Sequence[str]) -> int:
    """Do the runs that are not stored yet, and show how the judged policy did; exit status 1 if runs are left."""
    args = arguments().parse_args(argv)
    console = Console()
    console.width = max(console.width, 180)  # the table's width
    chosen = [cell for cell in cells(args.traces) if any(fnmatch(cell.name, each) for each in args.cells)]
    if args.list or not chosen:
        console.print("\n".join(cell.name for cell in cells(args.traces)))
        return 0 if args.list else 1
    seeds = range(args.first_seed, args.first_seed + args.seeds)
    others = [policy for policy in args.against if policy != args.policy]
    known = {key: run for key, run in others_runs(args.others).items() if key.split("|")[1] in others}
    todo = [
        Task(cell.name, policy, seed, args.traces)
        for cell in chosen
        for seed in seeds
        for policy in (args.policy, *others)
    ]
    began_s = monotonic()
    RUNS.mkdir(parents=True, exist_ok=True)
    new = [task for task in todo if task.key not in known]
    kept = known | do_runs(run_one, new, RUNS / f"{code_hash()}.json", args.jobs, console, for_s=args.for_s)
    if left_count := sum(task.key not in kept for task in todo):
        console.print(f"{left_count} of {len(todo)} runs are left")
        return 1
    outcomes = [outcome_of(cell, args.policy, others, seeds, kept) for cell in chosen]
    console.print(table(f"{args.policy} over the best of {', '.join(others)}", outcomes))
    count = {verdict: sum(each.verdict == verdict for each in outcomes) for verdict in (PASS, NOISE, MISS)}
    console.print(f"{len(outcomes)} cells, {args.seeds} seeds, {monotonic() - began_s:.0f} s: {count}")
    report = {
        "command": command_of(["world", *argv], args.traces),
        "seeds": args.seeds,
        "policies": [args.policy, *others],
        "found": [each.to_json() for each in outcomes],
    }
    is_whole = args.cells == ("*",) and args.seeds >= SEEDS_COUNT and args.others is None
    name = args.name or ("policy-world" if is_whole else None)
    path = save_results(name, report) if name else RUNS.with_name("world-trial.json")
    if not name:
        path.write_text(json.dumps(report, indent=2) + "\n")
    console.print(f"written: {path}")
    return 0
