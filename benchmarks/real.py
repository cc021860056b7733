"""Compare policies on a real vLLM or SGLang engine: the same programs, the same engine, one policy after the other.

    python -m benchmarks.real --programs 4,16 --policies passthrough,thunderagent --seconds 60

The engine has core 1 to itself; the proxy and the load share core 0. A policy is written `name` or
`name:key=value:key=value`, for example `cap:n=6`; the special name `direct` means no proxy. Every run starts a fresh
proxy and an empty prefix cache. Runs with one seed have the same programs; the policies take turns at going first.
`held` is the part of the turns' running time in which the proxy held them, `idle` the part of all time in which the
engine had no turn while some waited, `least ratio` the least claimable part of the capacity. `--stock-flags` uses an
engine that does not report cached tokens for each turn, `--slow 0.33` gives it a third of its core, `--engine sglang`
uses an SGLang. The table goes to the terminal, all figures to `benchmarks/results/<name>.json`.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import os
import shlex
import sys
import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from statistics import fmean
from typing import TYPE_CHECKING, Any, Self

import aiohttp
from rich import box
from rich.console import Console
from rich.table import Table

from benchmarks.engine_kinds import KINDS
from benchmarks.environments import cache_dir
from benchmarks.ideal import goodput_figures, goodputs
from benchmarks.load import LoadSpec, TurnRecord, run_load
from benchmarks.machine import save_results
from benchmarks.processes import stop, thunderagent
from benchmarks.real_engine import RealEngine, RealEngineConfig
from thunderagent.calibrate.measurement import Settings, calibrate
from thunderagent.errors import ConfigurationError
from thunderagent.programs.learned.goodput import ALPHA_RATIOS, in_time
from thunderagent.simulator.comparison.contestants import ORACLE, Contestant
from thunderagent.simulator.engine.records import EngineConfig
from thunderagent.simulator.figures.bounds import Engines
from thunderagent.simulator.figures.intervals import geometric

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Sequence

    from thunderagent.simulator.engine.timing import TimingProfile

DIRECT = "direct"

WATCH_INTERVAL_S = 0.5

Figures = Mapping[str, float | int | None]


def serve_options(policy: Contestant) -> list[str]:
    """Return the options of `thunderagent serve` for a policy."""
    given = [f"{key}={value}" for key, value in policy.settings]
    return ["--policy", policy.name, *(word for setting in given for word in ("--policy-arg", setting))]


@dataclass(frozen=True)
class Run:
    """One measured run."""

    programs: int
    policy: str
    seed: int
    figures: Figures
    capacity_ratios: tuple[float, ...] = ()
    """The claimable part of the capacity, each half second."""


@dataclass(frozen=True)
class Comparison:
    """The runs of a comparison: every load with every policy, once for each seed."""

    programs: tuple[int, ...]
    policies: tuple[Contestant, ...]
    seeds: int = 1
    warmup_s: float = 20.0
    measure_s: float = 60.0
    stream: bool = True
    speed_ratio: float = 1.0
    """The engine's part of its core: busy neighbours take the rest."""

    def order(self) -> list[tuple[int, int, Contestant]]:
        """Return (seed, programs, policy) in the order of the runs; each seed begins with a different policy."""
        turns_at_going_first = len(self.policies)
        return [
            (seed, programs, self.policies[(seed + place) % turns_at_going_first])
            for seed in range(self.seeds)
            for programs in self.programs
            for place in range(turns_at_going_first)
        ]


@contextlib.asynccontextmanager
async def serve_proxy(engine_urls: Sequence[str], policy: Contestant) -> AsyncIterator[str]:
    """Run the proxy in front of engines during the block; yield its URL. It inherits this process's cores.

    Raises ServerError with the end of its log if it does not come up.
    """
    arguments = (
        *("serve", "--port", "0", "--backends", ",".join(engine_urls), *serve_options(policy)),
        # On a busy machine with few cores the engine's /metrics now and then takes seconds while its streams flow.
        *("--poll-deadline-s", "20"),
    )
    async with thunderagent(*arguments, log_path=cache_dir() / "logs" / "proxy.log") as server:
        yield server.url


class Watch:
    """Samples a proxy twice a second: its replicas' claimable capacity, and which are idle while turns wait."""

    def __init__(self, url: str, warmup_s: float) -> None:
        self._url = url
        self._from_s = time.monotonic() + warmup_s
        self.capacity_ratios: list[float] = []
        self._idle: list[float] = []

    @contextlib.asynccontextmanager
    async def watching(self) -> AsyncIterator[None]:
        """Sample during the block."""
        task = asyncio.create_task(self._watch())
        try:
            yield
        finally:
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)

    async def _watch(self) -> None:
        async with aiohttp.ClientSession(self._url, timeout=aiohttp.ClientTimeout(total=10)) as session:
            while True:
                with contextlib.suppress(aiohttp.ClientError, TimeoutError):
                    await self._look(session)
                await asyncio.sleep(WATCH_INTERVAL_S)

    async def _look(self, session: aiohttp.ClientSession) -> None:
        async with session.get("/queue?limit=1") as answer:
            waits = (await answer.json())["turns_held_count"] > 0
        async with session.get("/replicas") as answer:
            replicas = (await answer.json())["replicas"]
        self.capacity_ratios.append(min(replica["capacity_ratio"] for replica in replicas))
        if time.monotonic() >= self._from_s:
            self._idle.append(fmean(waits and not replica["turns_in_flight_count"] for replica in replicas))

    def figures(self) -> dict[str, float | None]:
        """Return the least and the last ratio of the whole run, and the idle part of the measured time."""
        ratios = self.capacity_ratios
        return {
            "lowest_capacity_ratio": min(ratios, default=None),
            "last_capacity_ratio": ratios[-1] if ratios else None,
            "idle_while_waiting_ratio": fmean(self._idle) if self._idle else None,
        }


@contextlib.asynccontextmanager
async def busy_neighbours(core: int | None, speed_ratio: float) -> AsyncIterator[None]:
    """Run processes on a core during the block, enough to leave about this part of it for one more."""
    processes = []
    pinning = () if core is None else ("taskset", "--cpu-list", str(core))
    try:
        for _ in range(round(1 / speed_ratio) - 1):
            command = ("setpriv", "--pdeathsig", "KILL", *pinning, sys.executable, "-c", "while True: pass")
            processes.append(await asyncio.create_subprocess_exec(*command))
        yield
    finally:
        for process in processes:
            await stop(process)


class Progress:
    """Shows a run's progress on the terminal; counts its turns as they end."""

    def __init__(self, console: Console, title: str) -> None:
        self._status = console.status(title)
        self._title = title
        self._origin_s = time.monotonic()
        self._turn_count = 0

    def __enter__(self) -> Self:
        self._status.start()
        return self

    def __exit__(self, *_exc_info: object) -> None:
        self._status.stop()

    def on_turn(self, _record: TurnRecord) -> None:
        """Count a turn."""
        self._turn_count += 1
        elapsed_s = time.monotonic() - self._origin_s
        self._status.update(f"{self._title}: {self._turn_count} turns in {elapsed_s:.0f} s")


def engine_model(config: RealEngineConfig, timing: TimingProfile) -> EngineConfig:
    """Return the model of a real engine; one block of a real one is never used (it stands for no block)."""
    return EngineConfig(
        kv_tokens=config.pool_tokens - config.block_size,
        block_size=config.block_size,
        max_num_batched_tokens=config.max_batched_tokens,
        timing=timing,
    )


def calibration_settings(config: RealEngineConfig, budget_s: float) -> Settings:
    """Return settings that calibrate a real engine in about that time."""
    return Settings(budget_s=budget_s, max_num_batched_tokens=config.max_batched_tokens, token_ids=range(1, 2000))


async def measure(
    comparison: Comparison,
    engine: RealEngine,
    spec: LoadSpec,
    policy: Contestant,
    console: Console,
    engines: Engines,
) -> Run:
    """Make one run on a running engine; `engines` is its model, which decides what is in time."""
    is_proxy = policy.name != DIRECT
    await engine.reset_prefix_cache()
    async with contextlib.AsyncExitStack() as stack:
        url = engine.url
        if is_proxy:
            url = await stack.enter_async_context(serve_proxy([engine.url], policy))
        progress = stack.enter_context(Progress(console, f"{policy}, {spec.programs} programs, seed {spec.seed}"))
        watch = Watch(url, comparison.warmup_s)
        if is_proxy:
            await stack.enter_async_context(watch.watching())
        result = await run_load(
            spec,
            url,
            is_proxy=is_proxy,
            warmup_s=comparison.warmup_s,
            measure_s=comparison.measure_s,
            on_turn=progress.on_turn,
        )
    figures = result.summary() | goodput_figures(goodputs(result, engines)) | watch.figures()
    return Run(spec.programs, str(policy), spec.seed, figures, tuple(watch.capacity_ratios))


async def compare(
    comparison: Comparison, config: RealEngineConfig, name: str, console: Console, calibration_s: float
) -> list[Run]:
    """Calibrate the engine, and make all runs of a comparison; the result file is complete after each run."""
    runs: list[Run] = []
    async with contextlib.AsyncExitStack() as stack:
        engine = await stack.enter_async_context(RealEngine(config))
        calibration = await calibrate(engine.url, calibration_settings(config, calibration_s))
        engines = Engines.of(engine_model(config, calibration.timing), 1)
        await stack.enter_async_context(busy_neighbours(config.core, comparison.speed_ratio))
        for seed, programs, policy in comparison.order():
            spec = LoadSpec(programs=programs, seed=seed, stream=comparison.stream)
            run = await measure(comparison, engine, spec, policy, console, engines)
            runs.append(run)
            rate, hits = _number(run.figures["turns_per_min"], 1), _percent(run.figures["hit_ratio"])
            console.print(f"{run.policy}, {programs} programs, seed {seed}: {rate} turns/min, hits {hits}")
            save_results(name, results(comparison, config, runs))
    return runs


@dataclass(frozen=True)
class Ratio:
    """Turns/min of a policy over another's, seed by seed: the geometric mean, and the ends of its 95 % interval."""

    programs: int
    policy: str
    other: str
    mean: float
    low: float
    high: float


def ratios(runs: Sequence[Run]) -> list[Ratio]:
    """Compare each policy with those before it, at each load, over the seeds that both have."""
    rates: dict[tuple[int, str], dict[int, float]] = {}
    for run in runs:
        rates.setdefault((run.programs, run.policy), {})[run.seed] = run.figures["turns_per_min"] or 0.0
    found = []
    for number, ((programs, policy), own) in enumerate(rates.items()):
        for (other_programs, other), base in list(rates.items())[:number]:
            over = [own[seed] / base[seed] for seed in own.keys() & base.keys() if own[seed] and base[seed]]
            if other_programs == programs and over:
                found.append(Ratio(programs, policy, other, *geometric(over)))
    return found


def table(runs: list[Run]) -> Table:
    """Return a table with a row for each load and policy: means over the seeds, times in seconds."""
    title = "Real engine: turns/min, prefix hits, turn latency, first token (s)"
    result = Table(title=title, box=box.SIMPLE_HEAD)
    result.add_column("n", justify="right", no_wrap=True)
    result.add_column("policy", no_wrap=True)
    in_time_columns = ("turns in time", "programs in time")
    ours = ("held", "idle", "least ratio")
    for column in ("/min", "hits", "p50", "p99", "first p99", *ours, *in_time_columns, "failed", "retried"):
        result.add_column(column, justify="right", no_wrap=True)
    for programs, policy in dict.fromkeys((run.programs, run.policy) for run in runs):
        group = [run.figures for run in runs if (run.programs, run.policy) == (programs, policy)]
        times = ("latency_p50_s", "latency_p99_s", "first_token_p99_s")
        least_ratios = [ratio for figures in group if (ratio := figures.get("lowest_capacity_ratio")) is not None]
        result.add_row(
            str(programs),
            policy,
            _number(_mean(group, "turns_per_min"), 1),
            _percent(_mean(group, "hit_ratio")),
            *(_number(_mean(group, key), 1) for key in times),
            *(_percent(_mean(group, key), 1) for key in ("held_time_ratio", "idle_while_waiting_ratio")),
            _number(min(least_ratios, default=None), 2),
            *(
                in_time(_mean(group, f"goodput_{kind}_ratio_{alpha_ratio:g}") or 0.0 for alpha_ratio in ALPHA_RATIOS)
                for kind in ("turns", "programs")
            ),
            *(str(sum(figures[key] or 0 for figures in group)) for key in ("failed_turn_count", "retry_count")),
        )
    return result


def _mean(group: list[Figures], key: str) -> float | None:
    """Return the mean of a figure over the runs that have it."""
    values = [value for figures in group if (value := figures.get(key)) is not None]
    return fmean(values) if values else None


def _number(value: float | None, digits: int) -> str:
    return "-" if value is None else f"{value:.{digits}f}"


def _percent(ratio: float | None, digits: int = 0) -> str:
    return "-" if ratio is None else f"{ratio:.{digits}%}"


def results(comparison: Comparison, config: RealEngineConfig, runs: list[Run]) -> dict[str, Any]:
    """Return all figures with their environment, for a JSON file."""
    return {
        "command": shlex.join(["python", "-m", "benchmarks.real", *sys.argv[1:]]),
        "engine": {"version": config.kind.version, **asdict(config)},
        "comparison": {**asdict(comparison), "policies": [str(policy) for policy in comparison.policies]},
        "load": asdict(LoadSpec(stream=comparison.stream)),
        "ratios": [asdict(ratio) for ratio in ratios(runs)],
        "runs": [asdict(run) for run in runs],
    }


def add_comparison_arguments(
    parser: argparse.ArgumentParser, *, programs: str, seconds: float, calibration: float
) -> None:
    """Add the options shared by comparisons of policies on a real engine, with these defaults."""
    add = parser.add_argument
    add("--programs", default=programs, help="programs at a time, a comma between loads (default: %(default)s)")
    add("--policies", default="passthrough,thunderagent", help="name or name:key=value, a comma between policies")
    add("--seconds", type=float, default=seconds, help="measured seconds of a run (default: %(default)g)")
    add("--warmup", type=float, default=20.0, help="seconds of a run before they are measured (default: %(default)g)")
    add("--seeds", type=int, default=1, help="repetitions, each with other programs")
    add("--port", type=int, default=8101, help="the engine's port")
    add("--calibration-seconds", type=float, default=calibration, help="time to calibrate in (default: %(default)g)")


def _policy(text: str) -> Contestant:
    """Read a policy; `direct` is none. Raises ConfigurationError, also for the oracle, which no server can run."""
    if text == DIRECT:
        return Contestant(DIRECT)
    policy = Contestant.parse(text)
    if policy.name == ORACLE:
        raise ConfigurationError("the oracle runs in the simulator only")
    return policy


def comparison_from(arguments: argparse.Namespace, *, stream: bool = True) -> Comparison:
    """Return the comparison that the options describe."""
    return Comparison(
        programs=tuple(int(text) for text in arguments.programs.split(",")),
        policies=tuple(_policy(text) for text in arguments.policies.split(",")),
        seeds=arguments.seeds,
        warmup_s=arguments.warmup,
        measure_s=arguments.seconds,
        stream=stream,
    )


def _arguments(argv: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Compare policies on a real engine.")
    add_comparison_arguments(parser, programs="4,16", seconds=60.0, calibration=60.0)
    parser.add_argument("--hidden", type=int, default=512, help="the model's hidden size")
    parser.add_argument("--layers", type=int, default=6)
    parser.add_argument("--engine", choices=KINDS, default="vllm")
    parser.add_argument("--pool-blocks", type=int, default=500, help="KV blocks of 32 tokens")
    parser.add_argument("--stock-flags", action="store_true", help="an engine that does not tell cached tokens")
    parser.add_argument("--slow", type=float, default=1.0, help="part of its core that the engine gets, as 0.33")
    parser.add_argument("--no-stream", action="store_true", help="ask for whole answers")
    parser.add_argument("--name", help="of the result file; by default from the model's shape")
    return parser.parse_args(argv)


def main() -> None:
    """Run a comparison and print its table."""
    arguments = _arguments()
    os.sched_setaffinity(0, {0})
    comparison = replace(comparison_from(arguments, stream=not arguments.no_stream), speed_ratio=arguments.slow)
    config = RealEngineConfig(
        engine=arguments.engine,
        hidden_size=arguments.hidden,
        layers=arguments.layers,
        pool_blocks=arguments.pool_blocks,
        port=arguments.port,
        tells_cached=not arguments.stock_flags,
    )
    name = arguments.name or f"real-{arguments.engine}-{arguments.hidden}x{arguments.layers}"
    console = Console()
    console.width = max(console.width, 140)  # the table's width
    runs = asyncio.run(compare(comparison, config, name, console, arguments.calibration_seconds))
    console.print(table(runs))
    for ratio in ratios(runs):
        interval = f"{ratio.mean:.2f} ({ratio.low:.2f}, {ratio.high:.2f})"
        console.print(f"{ratio.programs} programs, turns/min of {ratio.policy} / {ratio.other}: {interval}")
    console.print(f"written to benchmarks/results/{name}.json")


if __name__ == "__main__":
    main()
