"""Measure how much of the limit policies reach, and how long programs take, on many engines and loads, simulated.

    scripts/bench limits --seeds 5

A *cell* is a workload on replicas of a kind; the number of programs at a time is a multiple of those that fill their
memory. Each run is a closed loop of an hour, of which ten minutes are warm-up. It reports turns a minute, programs an
hour, hits, and per cent of min(L1, L2, L3) of the very turns that ended then. It also reports how long programs take:
programs that *arrived* in that time, each followed to its end, while others keep arriving. For programs that happened
to *end* in the hour the mean is best for a policy that admits small ones first and large ones never. A program that is
not through after eight more hours counts with its time until then, which favours the policy that lets it wait. In a
closed loop the mean follows from the throughput: with N programs present and X an hour through, each is present for
N / X hours in the mean, in whatever order they come.

The first policy is the one that is judged: seed by seed over each other, by the bad end of the interval. `cap-best` is
`cap` with the n that in a cell comes nearest to the limit with a seed besides these. Runs are stored when they end
(`results/limits-runs.json`), so an interrupted benchmark resumes where it stopped. Choices that were made by it were
made on seeds from 100 on. `--for-s` interrupts it.
"""

from __future__ import annotations

import argparse
import math
import shlex
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import fmean
from time import monotonic

from rich.console import Console

from benchmarks.findings import Finding, plot, table
from benchmarks.kept_runs import do_runs
from benchmarks.machine import RESULTS, save_results
from benchmarks.policy import AWAY_LIMIT_S, mean_context_tokens, programs_at
from benchmarks.simulated import save_plot, scenario_of
from thunderagent.programs.messages import Decision, Event, Grant, ProgramReleased, Reject, TurnAsk
from thunderagent.simulator.commands.compare import names
from thunderagent.simulator.comparison.contestants import ORACLE, Contestant
from thunderagent.simulator.comparison.processes import GoOn
from thunderagent.simulator.comparison.results import CAP_BEST
from thunderagent.simulator.figures.figures import Percentiles
from thunderagent.simulator.figures.intervals import Interval
from thunderagent.simulator.runs.agenda import Agenda
from thunderagent.simulator.runs.run import Simulation
from thunderagent.simulator.runs.scenario import Scenario
from thunderagent.simulator.workloads.distributions import workload
from thunderagent.simulator.workloads.formats import load_recorded
from thunderagent.simulator.workloads.plans import Workload
from thunderagent.simulator.workloads.traces import Limits, TraceWorkload

RUNS = RESULTS / "limits-runs.json"
MINUTES, WARMUP_MINUTES, FOLLOWED_S = 60.0, 10.0, 8 * 3600.0
BLOCK_TOKENS = 64
"""Larger than vLLM's 16, because contexts are long: a run takes less time."""
RECORDED = "recorded"
CAP_RATIOS, SWEEP_SEED = (0.4, 0.5, 0.6, 0.7, 0.8, 0.9, 1.0, 1.2), 99


@dataclass(frozen=True)
class Cell:
    """A workload on engines at a load; `traces` are recorded programs for the workload `recorded`."""

    workload: str
    profile: str
    replicas_count: int
    load: float
    traces: Path | None = None

    @property
    def title(self) -> str:
        """Return the cell's name."""
        return f"{self.workload}, {self.replicas_count} x {self.profile}, load {self.load:g}"

    def programs(self) -> Workload:
        """Return the programs' workload: recorded ones end at an engine's memory limit."""
        if self.workload != RECORDED:
            return workload(self.workload)
        assert self.traces is not None
        limit_tokens = scenario_of(self.profile, minutes=1).engine.context_limit_tokens
        trace = load_recorded(self.traces, Limits(context_tokens=limit_tokens, away_s=AWAY_LIMIT_S))
        return TraceWorkload(RECORDED, trace, in_order_of_arrival=False)

    def scenario(self, seed: int) -> Scenario:
        """Return the engines, the hour, and the number of programs for the load."""
        scenario = scenario_of(
            self.profile, replicas_count=self.replicas_count, minutes=MINUTES, warmup_minutes=WARMUP_MINUTES
        )
        scenario = replace(scenario, engine=replace(scenario.engine, block_size=BLOCK_TOKENS))
        context_tokens = mean_context_tokens(self.programs(), scenario.engine)
        capacity_tokens = scenario.engine.capacity_tokens * self.replicas_count
        count = programs_at(self.load, capacity_tokens, context_tokens)
        return replace(scenario, programs_count=count, seed=seed, sample_interval_s=30.0)

    @property
    def caps(self) -> tuple[str, ...]:
        """Return what is tried for `cap-best`: from less than half of the programs that fill the memory to more."""
        fitting_count = self.scenario(SWEEP_SEED).programs_count / self.load
        return tuple(dict.fromkeys(f"cap:n={max(1, round(ratio * fitting_count))}" for ratio in CAP_RATIOS))


@dataclass(frozen=True)
class Task:
    """A pending run."""

    cell: Cell
    policy: str
    seed: int

    @property
    def key(self) -> str:
        """Return its name among the stored runs."""
        return f"{self.cell.title}|{self.policy}|{self.seed}"


def run_one(task: Task, go_on: GoOn) -> dict[str, float]:
    """Do one run; return the figures of its hour, and of the programs that arrived in it."""
    programs, scenario = task.cell.programs(), task.cell.scenario(task.seed)
    contestant = Contestant.parse(task.policy)
    scenario = replace(scenario, engines_drop=contestant.name == ORACLE)
    policy, foresight = contestant.prepare(scenario, programs)
    agenda = Agenda()
    simulation = Simulation(
        scenario, programs, policy, agenda=agenda, foresight=foresight, on_progress=lambda _: go_on()
    )
    came = Followed(simulation, scenario.warmup_s, scenario.horizon_s)
    simulation.begin()
    while simulation.has_more and agenda.advance(scenario.horizon_s):
        pass
    hour = simulation.result(complete=simulation.end())
    while came.left_count and simulation.has_more and agenda.advance(scenario.horizon_s + FOLLOWED_S):
        pass
    times = came.times(agenda.now_s)
    costs = [replica.costs for replica in hour.replicas]
    spent = {
        name: sum(getattr(cost, f"{name}_token_s") for cost in costs)
        for name in ("decode", "prefill", "recompute", "unused", "caching")
    }
    values = {
        "limit_ratio": hour.limit_ratio,
        "turns_per_min": hour.turns_per_min_count,
        "programs_per_hour": hour.programs_per_hour_count,
        "hit_ratio": hour.hit_ratio,
        "hour_mean_s": hour.program_latency.mean_s,
        "mean_s": times.mean_s,
        "p50_s": times.p50_s,
        "p99_s": times.p99_s,
        "max_s": times.max_s,
        "came_count": times.count,
        "left_count": came.left_count,
        "longest_hold_s": came.longest_hold_s(agenda.now_s),
        "held_mean_s": hour.held.mean_s,
        "turn_mean_s": hour.turn_latency.mean_s,
        "turn_p99_s": hour.turn_latency.p99_s,
        **{f"{name}_ratio": value / (sum(spent.values()) or 1.0) for name, value in spent.items()},
    }
    return {name: round(value, 5) for name, value in values.items()}


class Followed:
    """Follows a run: the programs that arrive in a time, until they end, and how long any turn is held."""

    def __init__(self, simulation: Simulation, from_s: float, until_s: float) -> None:
        self._handle = simulation.handle
        self._from_s, self._until_s = from_s, until_s
        self._earlier: set[str] = set()
        self._came_s: dict[str, float] = {}
        self._took_s: list[float] = []
        self._held_since_s: dict[int, float] = {}
        self._longest_hold_s = 0.0
        simulation.handle = self._hear

    def _hear(self, event: Event) -> list[Decision]:
        if isinstance(event, TurnAsk):
            self._held_since_s[event.turn_id] = event.now_s
            assert event.program_id is not None
            if event.now_s < self._from_s:
                self._earlier.add(event.program_id)
            elif event.now_s < self._until_s and event.program_id not in self._earlier:
                self._came_s.setdefault(event.program_id, event.now_s)
        elif isinstance(event, ProgramReleased) and event.program_id in self._came_s:
            self._took_s.append(event.now_s - self._came_s.pop(event.program_id))
        decisions = self._handle(event)
        for decision in decisions:
            if isinstance(decision, Grant | Reject):
                held_s = event.now_s - self._held_since_s.pop(decision.turn_id)
                self._longest_hold_s = max(self._longest_hold_s, held_s)
        return decisions

    @property
    def left_count(self) -> int:
        """The number of programs that have not ended."""
        return len(self._came_s)

    def times(self, now_s: float) -> Percentiles:
        """Return the programs' times from arrival to end, or until now."""
        return Percentiles.of([*self._took_s, *(now_s - came_s for came_s in self._came_s.values())])

    def longest_hold_s(self, now_s: float) -> float:
        """Return the longest hold of a turn, including turns that are still held."""
        return max(self._longest_hold_s, now_s - min(self._held_since_s.values(), default=now_s))


# --- figures ----------------------------------------------------------------------------------------------------------

RATIOS = (
    ("/ {}", "limit_ratio", 0.99, None),
    ("turns/min / {}", "turns_per_min", None, None),
    ("programs/h / {}", "programs_per_hour", None, None),
    ("a program's mean time / {}", "mean_s", None, 1.0),
    ("a program's p50 / {}", "p50_s", None, None),
    ("a program's p99 / {}", "p99_s", None, 1.0),
    ("longest hold / {}", "longest_hold_s", None, 1.0),
)
"""Compared figures: title, figure, and bars. The oracle has none."""


Kept = Mapping[str, Mapping[str, float]]
"""Figures of runs, by their keys."""


def task_of(cell: Cell, policy: str, seed: int, caps: Mapping[Cell, str]) -> Task:
    """Return the run of a policy; `caps` are what `cap-best` is in each cell."""
    return Task(cell, caps[cell] if policy == CAP_BEST else policy, seed)


def best_caps(kept: Kept, cells: Sequence[Cell]) -> dict[Cell, str]:
    """Return the `cap` that came nearest to its limit in each cell, of those that were tried."""
    return {
        cell: max(cell.caps, key=lambda cap: kept[Task(cell, cap, SWEEP_SEED).key]["limit_ratio"]) for cell in cells
    }


def findings(
    kept: Kept,
    cells: Sequence[Cell],
    policies: Sequence[str],
    seeds: Sequence[int],
    caps: Mapping[Cell, str],
) -> list[Finding]:
    """Return the findings in each cell, and in the mean over all cells; for `caps` see `task_of`."""
    judged, others = policies[0], policies[1:]
    found = []
    for of_them in (*([cell] for cell in cells), cells):
        if of_them is cells and len(cells) == 1:
            break
        at = f"all {len(cells)} cells" if of_them is cells else of_them[0].title

        def of(policy: str, figure: str, cells: Sequence[Cell] = of_them) -> list[list[float]]:
            return [[kept[task_of(cell, policy, seed, caps).key][figure] for cell in cells] for seed in seeds]

        found += [
            Finding(at, policy, "of the limit", Interval.of([fmean(each) for each in of(policy, "limit_ratio")]))
            for policy in policies
        ]
        for other in others:
            for title, figure, at_least, at_most in RATIOS:
                pairs = zip(of(judged, figure), of(other, figure), strict=True)
                ratios = [
                    [value / base if base else math.inf for value, base in zip(*pair, strict=True)] for pair in pairs
                ]
                means = [fmean(each) for each in ratios]
                bars = (None, None) if other == ORACLE else (at_least, at_most)
                interval = Interval.of(means) if max(means) < math.inf else None
                found.append(Finding(at, judged, title.format(other), interval, *bars))
    return found


def arguments() -> argparse.ArgumentParser:
    """Return the command line's parser."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add(
        "--policies",
        type=names,
        default="breakeven,breakeven:order=fcfs,thunderagent,passthrough,oracle",
        metavar="P,P",
        help="the first is judged",
    )
    add("--seeds", type=int, default=5, help="runs of each, each with other programs")
    add("--first-seed", type=int, default=0, help="100 and more are those that policies were chosen on")
    add("--replicas", type=whole_numbers, default="1,2,4", metavar="N,N")
    add("--workloads", type=names, default="mini-swe-agent,openhands", metavar="W,W", help=f"{RECORDED} needs --traces")
    add("--profiles", type=names, default="glm-4.6-h100x8,qwen3-14b-h100", metavar="P,P")
    add("--loads", type=loads, default="1,2", metavar="X,X", help="contexts over memory")
    add("--traces", type=Path, metavar="FILE", help="recorded programs, as of `thunderagent record`")
    add("--jobs", type=int, default=1, help="runs at a time")
    add("--for-s", type=float, default=math.inf, help="begin no run after that, to go on later")
    add("--name", default="policy-limits", help="what the result is called")
    return parser


def whole_numbers(text: str) -> tuple[int, ...]:
    """Read comma-separated whole numbers over 0."""
    return tuple(int(number) for number in _numbers(text, int))


def loads(text: str) -> tuple[float, ...]:
    """Read comma-separated numbers over 0."""
    return _numbers(text, float)


def _numbers(text: str, read: Callable[[str], float]) -> tuple[float, ...]:
    try:
        found = tuple(read(part) for part in text.split(","))
    except ValueError:
        found = ()
    if not found or not all(0 < number < math.inf for number in found):
        raise argparse.ArgumentTypeError(f"not numbers over 0 with commas between: {text!r}")
    return found


def main(argv: Sequence[str] | None = None) -> int:
    """Do the runs that are not stored yet, and show the findings; exit status 1 if runs are left."""
    args = arguments().parse_args(argv)
    console = Console()
    console.width = max(console.width, 165)  # the table's width
    cells = [
        Cell(name, profile, replicas_count, load, args.traces if name == RECORDED else None)
        for name in args.workloads
        for profile in args.profiles
        for replicas_count in args.replicas
        for load in args.loads
    ]
    seeds = range(args.first_seed, args.first_seed + args.seeds)
    end_s = monotonic() + args.for_s

    def done(todo: Sequence[Task]) -> Kept:
        kept = do_runs(run_one, todo, RUNS, args.jobs, console, for_s=end_s - monotonic())
        if left_count := sum(task.key not in kept for task in todo):
            console.print(f"{left_count} of {len(todo)} runs are left")
            raise SystemExit(1)
        return kept

    caps: dict[Cell, str] = {}
    if CAP_BEST in args.policies:
        caps = best_caps(done([Task(cell, cap, SWEEP_SEED) for cell in cells for cap in cell.caps]), cells)
    kept = done([task_of(cell, policy, seed, caps) for seed in seeds for cell in cells for policy in args.policies])
    found = findings(kept, cells, args.policies, seeds, caps)
    console.print(table("limits", found))
    save_plot(args.name, plot(found))
    words = sys.argv[1:] if argv is None else list(argv)
    shown = [word.replace(str(args.traces), args.traces.name) if args.traces else word for word in words]
    report = {
        "command": shlex.join(["scripts/bench", "limits", *shown]),
        "seeds": args.seeds,
        "caps": {cell.title: cap for cell, cap in caps.items()},
        "found": [each.to_json() for each in found],
    }
    console.print(f"written: {save_results(args.name, report).name}")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
