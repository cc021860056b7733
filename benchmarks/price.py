"""Simulate engines of known prices; find where the price of a lost token is learned wrongly, and whether that is seen.

    scripts/bench policy price                   # all rows, three seeds
    scripts/bench policy price --turns 60,240    # after how many turns

A *row* is an engine, what it tells, whether answers stream, and a load: so many programs at a time, with memory for all
of them, or for two in five. `passthrough` runs it, so that nothing but the engine decides what is computed again. The
true price is the engine's own: how much longer an iteration takes for one more prompt token. The price that was learned
over it should lie within 1.5 after 60 turns. Of the seeds the worst counts. A row that misses is *told* if the interval
says so: it covers the truth, and its lower end, or half of the estimate, is no more than 1.5 times it. Programs are
then held for too short a time, but nobody is starved.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from math import exp, log
from statistics import fmean

from rich import box
from rich.console import Console
from rich.table import Table

from benchmarks.kept_runs import Figures, do_runs
from benchmarks.machine import ROOT, save_results
from benchmarks.world_cells import H1_LOAD, STANDARD, TELLS_NOTHING, real_engine
from thunderagent.policy_loader import load_policy
from thunderagent.programs.learned.price import MEASURED
from thunderagent.programs.messages import Event, TurnEnd
from thunderagent.simulator.commands.compare import names
from thunderagent.simulator.comparison.processes import GoOn
from thunderagent.simulator.engine.records import EngineConfig
from thunderagent.simulator.engine.timing import TimingProfile, profile
from thunderagent.simulator.runs.run import Simulation
from thunderagent.simulator.runs.scenario import Scenario
from thunderagent.simulator.workloads.distributions import AgentWorkload

BAR_RATIO = 1.5
BAR_COUNT = 60
"""The price should be within that ratio of the truth after so many turns."""

LOADS: dict[str, tuple[AgentWorkload, int]] = {"short": (STANDARD, 2000), "long": (H1_LOAD, 13_000)}
"""Programs, and how many tokens one has in the mean."""

SITUATIONS = ((1, 3.0), (16, 3.0), (16, 0.4), (64, 3.0), (64, 0.4))
"""Programs at a time, and how much of what they want fits: one alone, an idle engine, and overloaded ones."""

LONGEST_S = 3000.0
"""More than 240 turns take."""

PASS, TOLD, MISS = "pass", "told", "MISS"


@dataclass(frozen=True)
class Kind:
    """An engine: how long it takes, and whether its counters say what it computes."""

    timing: TimingProfile
    tells_counters: bool
    load: str

    def engine(self, kv_tokens: int) -> EngineConfig:
        """Return one with so much memory."""
        return EngineConfig.of(self.timing, kv_tokens=kv_tokens, max_num_batched_tokens=8192)


KINDS = {
    "vLLM": Kind(profile("gpt-oss-120b-h100"), tells_counters=True, load="long"),
    "vLLM on one CPU core": Kind(real_engine().timing, tells_counters=True, load="short"),
    "SGLang": Kind(profile("qwen3-32b-h200"), tells_counters=False, load="long"),
    "Dynamo's mocker": Kind(profile("mocker"), tells_counters=False, load="long"),
    "embedded": Kind(profile("demo"), tells_counters=True, load="short"),
}
"""SGLang counts tokens, but not its iterations; the mocker nothing."""


@dataclass(frozen=True)
class Task:
    """A pending run."""

    kind: str
    is_whole: bool
    programs_count: int
    memory_ratio: float
    seed: int
    counts: tuple[int, ...]

    @property
    def key(self) -> str:
        """Return its name among the stored runs."""
        answers = "whole" if self.is_whole else "streamed"
        counts = ",".join(str(count) for count in self.counts)
        return f"{self.kind}|{answers}|{self.programs_count}|{self.memory_ratio:g}|{counts}|{self.seed}"


class _EnoughError(Exception):
    """Ends a run."""


def learned_prices(task: Task, go_on: GoOn = lambda: None) -> Figures:
    """Return the true price, and that learned after each count of turns with its interval, in seconds; 0: a guess."""
    kind = KINDS[task.kind]
    load, context_tokens = LOADS[kind.load]
    kv_tokens = max(3 * context_tokens, int(task.programs_count * context_tokens * task.memory_ratio))
    engine = kind.engine(kv_tokens)
    tells = {"engine_tells_work": True} if kind.tells_counters else TELLS_NOTHING
    scenario = Scenario(
        engine,
        programs_count=task.programs_count,
        horizon_s=LONGEST_S,
        seed=task.seed,
        answers_whole=task.is_whole,
        **tells,
    )
    simulation = Simulation(scenario, load, load_policy("passthrough", {}), on_progress=lambda _: go_on())
    handle, ended_count, contexts_tokens = simulation.handle, 0, 0
    scheduler, found = simulation.scheduler, Figures()

    def watch(event: Event):  # type: ignore[no-untyped-def]
        nonlocal ended_count, contexts_tokens
        decisions = handle(event)
        if isinstance(event, TurnEnd) and event.outcome == "finished":
            ended_count += 1
            contexts_tokens += event.prompt_tokens or 0
            if ended_count in task.counts:
                price = scheduler.knowledge.prices.of(next(iter(scheduler.replicas)))
                is_known = price.source in MEASURED
                found[f"{ended_count}"] = price.token_s if is_known else 0.0
                found[f"{ended_count} low"] = price.low_token_s
                found[f"{ended_count} high"] = min(price.high_token_s, 1e9)
                found[f"{ended_count} cautious"] = price.cautious_token_s
            if ended_count >= max(task.counts):
                raise _EnoughError
        return decisions

    simulation.handle = watch
    with suppress(_EnoughError):
        simulation.run()
    timing = engine.timing
    found["true"] = timing.prefill_token_s + timing.attention_pair_s * contexts_tokens / ended_count / 2
    return found


@dataclass(frozen=True)
class Learned:
    """What a row's runs learned after a count of turns, over the truth: the worst of the seeds, and its interval."""

    ratio: float
    low_ratio: float
    high_ratio: float
    cautious_ratio: float

    @property
    def verdict(self) -> str:
        """Return whether it is close, or the interval tells that it is not."""
        if 1 / BAR_RATIO <= self.ratio <= BAR_RATIO:
            return PASS
        return TOLD if self.low_ratio <= 1 <= self.high_ratio and self.cautious_ratio <= BAR_RATIO else MISS

    @classmethod
    def of(cls, runs: Sequence[Figures], count: int) -> Learned:
        """Return the one that is farthest from the truth."""
        all_of = [
            cls(*[run[f"{count}{name}"] / run["true"] for name in ("", " low", " high", " cautious")]) for run in runs
        ]
        return max(all_of, key=lambda each: abs(log(max(each.ratio, 1e-9))))

    def __str__(self) -> str:
        if not self.ratio:
            return "a guess"
        high = f"{self.high_ratio:.2f}" if self.high_ratio < 100 else "∞"
        return f"{self.ratio:.2f} ({self.low_ratio:.2f}, {high})"


def arguments() -> argparse.ArgumentParser:
    """Return the command line's parser."""
    parser = argparse.ArgumentParser(
        prog="policy price", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("--turns", type=names, default=("60", "120", "240"), metavar="N,N", help="after how many turns")
    add("--seeds", type=int, default=3, help="runs of each, each with other programs (default: %(default)s)")
    add("--jobs", type=int, default=2, help="runs at a time (default: %(default)s)")
    add("--name", help="what the result is called (default: policy-price, with three seeds and the usual turns)")
    return parser


def main(argv: Sequence[str]) -> int:
    """Do the runs that are not stored yet, and show what was learned."""
    args = arguments().parse_args(argv)
    counts = tuple(sorted(int(count) for count in args.turns))
    console = Console()
    console.width = max(console.width, 150)  # the table's width
    rows = [
        Task(kind, is_whole, programs_count, memory_ratio, 0, counts)
        for kind in KINDS
        for is_whole in (False, True)
        for programs_count, memory_ratio in SITUATIONS
    ]
    tasks = [replace(row, seed=seed) for row in rows for seed in range(args.seeds)]
    path = ROOT / "out" / "price.json"
    path.parent.mkdir(exist_ok=True)
    kept = do_runs(learned_prices, tasks, path, args.jobs, console)
    made = Table(title="the price that was learned, over the true one", box=box.SIMPLE_HEAD)
    for name in ("engine", "answers", "programs", "memory"):
        made.add_column(name)
    for count in counts:
        made.add_column(f"after {count} turns", justify="right", no_wrap=True)
        made.add_column("")
    found, verdicts = [], dict.fromkeys((PASS, TOLD, MISS), 0)
    ratios: dict[int, list[float]] = {count: [] for count in counts}
    for row in rows:
        runs = [kept[replace(row, seed=seed).key] for seed in range(args.seeds)]
        learned = {count: Learned.of(runs, count) for count in counts}
        answers = "whole" if row.is_whole else "streamed"
        memory = "for all" if row.memory_ratio > 1 else "for two in five"
        texts = [text for each in learned.values() for text in (str(each), each.verdict)]
        made.add_row(row.kind, answers, str(row.programs_count), memory, *texts)
        verdicts[learned[counts[0]].verdict] += 1
        for count, each in learned.items():
            ratios[count].append(max(each.ratio, 1e-9))
        found.append(
            {
                "engine": row.kind,
                "answers": answers,
                "programs": row.programs_count,
                "memory": memory,
                "true_us": round(fmean(run["true"] for run in runs) * 1e6, 2),
                "learned": {count: {**vars(each), "verdict": each.verdict} for count, each in learned.items()},
            }
        )
    console.print(made)
    console.print(f"{len(rows)} rows after {counts[0]} turns: {verdicts}")
    for count in counts:
        off = exp(fmean(abs(log(ratio)) for ratio in ratios[count]))
        console.print(f"after {count} turns: off by a factor of {off:.2f} in the geometric mean over the rows")
    report = {
        "command": " ".join(["scripts/bench policy price", *argv]),
        "seeds": args.seeds,
        "verdicts": verdicts,
        "found": found,
    }
    is_usual = args.seeds >= 3 and counts[0] == BAR_COUNT
    saved_as = args.name or ("policy-price" if is_usual else None)
    if saved_as:
        console.print(f"written: {save_results(saved_as, report)}")
    return 0
