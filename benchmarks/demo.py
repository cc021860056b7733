"""Show what scheduling whole programs does: the same agent programs twice, once passed through, once scheduled.

    scripts/demo                    # under three minutes
    scripts/demo --programs 32      # another load
    scripts/demo --quick            # seconds; too small to judge by

Two simulated engines and the proxy run as processes of their own. The programs begin all at once; each takes turns
with an engine, and between two turns its tool runs. Their contexts together are larger than the engines' KV pools,
so that an engine which gets every turn at once evicts what it needs again a moment later. Engines, programs and
seeds are the same in both runs, and both begin with empty caches: only the policy differs.

The table goes to the terminal, all figures to `out/demo.json`, the plot to `out/demo.png`.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import signal
import sys
import time
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import aiohttp
from rich.console import Console

from benchmarks.demo_report import COSTS, RunReport, in_words, plot, table
from benchmarks.demo_view import RunState, open_view
from benchmarks.ideal import goodputs
from benchmarks.load import LoadResult, LoadSpec, TurnRecord, plan_program, run_programs
from benchmarks.machine import describe_machine
from benchmarks.processes import ServerError, thunderagent
from thunderagent.simulator.engine.timing import COSTS_US, profile
from thunderagent.simulator.figures.bounds import Engines

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    from benchmarks.demo_view import View

POLICIES = ("passthrough", "breakeven")
SAMPLE_S = 0.5
MODEL = "simulated"


@dataclass(frozen=True)
class Scenario:
    """The engines and the programs, for both runs.

    `kv_tokens` is the KV pool of each engine; `speed` divides the durations of the engines' profile, which was fitted
    to a real vLLM with a small model on one CPU core.
    """

    load: LoadSpec
    engines: int = 2
    kv_tokens: int = 16_000
    speed: float = 1.0

    @property
    def turn_counts(self) -> tuple[int, ...]:
        """Number of turns of each program."""
        return tuple(len(plan_program(self.load, index).turns) for index in range(self.load.programs))

    @property
    def final_context_tokens(self) -> int:
        """Total of the programs' contexts after their last turns, without role markers."""
        plans = [plan_program(self.load, index) for index in range(self.load.programs)]
        return self.load.system_tokens * len(plans) + sum(
            len(turn.prompt.split()) + turn.output_tokens for plan in plans for turn in plan.turns
        )

    def describe(self) -> str:
        """Return a description in one line."""
        return (
            f"{self.load.programs} agent programs with {sum(self.turn_counts)} turns, whose contexts grow to "
            f"{self.final_context_tokens:,} tokens, on {self.engines} simulated engines with room for "
            f"{self.engines * self.kv_tokens:,}"
        )


_FULL_LOAD = LoadSpec(
    programs=24, turns=(6, 10), first_prompt_tokens=(600, 1200), tool_result_tokens=(200, 500), model=MODEL
)
FULL = Scenario(_FULL_LOAD)
QUICK = Scenario(LoadSpec(programs=8, turns=(3, 4), tool_mean_s=0.3, model=MODEL), kv_tokens=6_000, speed=3.0)


async def show(scenario: Scenario, out: Path, console: Console) -> tuple[RunReport, RunReport]:
    """Make both runs, showing their progress; return the results, first passed through, then scheduled."""
    with open_view(console) as view:
        before, after = [await run(scenario, policy, out / "logs", view) for policy in POLICIES]
    return before, after


async def run(scenario: Scenario, policy: str, logs: Path, view: View) -> RunReport:
    """Run the scenario's programs under one policy, on fresh engines behind a fresh proxy."""
    counts = scenario.turn_counts
    async with serving(scenario, policy, logs) as url, aiohttp.ClientSession(url) as session:
        state = RunState(policy, sum(counts), len(counts))

        def on_turn(record: TurnRecord) -> None:
            is_last = record.turn_index == counts[record.program_index] - 1
            state.count(record, is_last_of_program=is_last)

        async with asyncio.TaskGroup() as group:
            watching = group.create_task(_watch(session, state, view))
            result = await run_programs(scenario.load, url, scenario.load.programs, is_proxy=True, on_turn=on_turn)
            watching.cancel()
        state.held_turn_count = 0
        view.show(state, is_over=True)
        return _report(scenario, policy, result, await _costs(session))


@asynccontextmanager
async def serving(scenario: Scenario, policy: str, logs: Path) -> AsyncIterator[str]:
    """Run the engines and the proxy in front of them for the length of the block; yield the proxy's URL."""
    engine = (
        "engine",
        "--port",
        "0",
        "--kv-tokens",
        str(scenario.kv_tokens),
        "--speed",
        str(scenario.speed),
        "--model",
        MODEL,
    )
    async with AsyncExitStack() as stack:
        starting = [
            thunderagent(*engine, log_path=logs / f"{policy}-engine-{number}.log") for number in range(scenario.engines)
        ]
        engines = [await stack.enter_async_context(each) for each in starting]
        backends = ",".join(engine.url for engine in engines)
        options = ("serve", "--port", "0", "--backends", backends, "--policy", policy)
        proxy = await stack.enter_async_context(thunderagent(*options, log_path=logs / f"{policy}-proxy.log"))
        await _until_ready(proxy.url)
        yield proxy.url


async def _until_ready(url: str) -> None:
    """Return when the proxy has seen all its engines."""
    async with asyncio.timeout(10), aiohttp.ClientSession(url) as session:
        while not all(replica["up"] for replica in await _replicas(session)):
            await asyncio.sleep(0.05)


async def _watch(session: aiohttp.ClientSession, state: RunState, view: View) -> None:
    """Show a run's progress until cancelled."""
    while True:
        async with session.get("/queue", params={"limit": 0}) as answer:
            state.held_turn_count = (await answer.json())["turns_held_count"]
        view.show(state)
        await asyncio.sleep(SAMPLE_S)


async def _replicas(session: aiohttp.ClientSession) -> list[dict[str, Any]]:
    async with session.get("/replicas") as answer:
        replicas: list[dict[str, Any]] = (await answer.json())["replicas"]
        return replicas


async def _costs(session: aiohttp.ClientSession) -> dict[str, float]:
    """Return what the memory of all replicas was spent on."""
    replicas = await _replicas(session)
    return {name: sum(replica["costs_token_s"][name] for replica in replicas) for name in COSTS}


def engines_of(scenario: Scenario) -> Engines:
    """Return the model of the engines, by which turns and programs count as in time."""
    timing = profile("demo")
    faster = {name: getattr(timing, name) / scenario.speed for name in COSTS_US.values()}
    return Engines(replace(timing, **faster), scenario.kv_tokens, scenario.engines)


def _report(scenario: Scenario, policy: str, result: LoadResult, costs_token_s: dict[str, float]) -> RunReport:
    found = goodputs(result, engines_of(scenario))
    return RunReport(
        policy=policy,
        turns_per_min=result.turns_per_min,
        hit_ratio=result.hit_ratio or 0.0,
        latency_p50_s=result.latency_percentile_s(0.5) or 0.0,
        latency_p99_s=result.latency_percentile_s(0.99) or 0.0,
        turn_goodput_ratios=tuple(each.turn_ratio for each in found),
        program_goodput_ratios=tuple(each.program_ratio for each in found),
        makespan_s=result.window_end_s,
        turn_count=len(result.window_records),
        failed_turn_count=result.failed_turn_count,
        costs_token_s=costs_token_s,
        end_s=tuple(round(record.end_s, 3) for record in result.records if record.succeeded),
    )


NEXT = """\
The engines were simulated: their answers are made-up words, their times follow
a real vLLM with a small model on one CPU core. To serve your own engines, give
the proxy their addresses, and your agents the proxy's:

  thunderagent serve --backends http://HOST:8000,http://HOST:8001

  base URL of an agent   http://localhost:8300/p/PROGRAM_ID/v1
  when it has ended      curl -X DELETE localhost:8300/programs/PROGRAM_ID
  to watch them all      thunderagent status --watch
"""


def main(argv: list[str] | None = None) -> int:
    """Run the demo; return the exit status: 0, 1 if something failed, 130 if it was stopped."""
    arguments = _arguments(argv)
    console = Console()
    scenario = _scenario(arguments)
    began_s = time.monotonic()
    console.print(scenario.describe(), highlight=False)
    try:
        before, after = asyncio.run(_until_signal(scenario, arguments.out, console))
    except (ServerError, aiohttp.ClientError, OSError) as error:
        print(f"demo: error: {error}", file=sys.stderr)
        return 1
    except (KeyboardInterrupt, asyncio.CancelledError):
        console.print("stopped; all processes have ended")
        return 130
    write(scenario, before, after, arguments.out)
    console.print(table(before, after))
    pool_tokens = scenario.kv_tokens
    words = in_words(before, after, programs=scenario.load.programs, engines=scenario.engines, pool_tokens=pool_tokens)
    console.print(words, highlight=False)
    console.print(f"\n{NEXT}", highlight=False, soft_wrap=True)
    where = f"plot {arguments.out / 'demo.png'}, figures {arguments.out / 'demo.json'}"
    console.print(f"{where}; took {time.monotonic() - began_s:.0f} s", highlight=False, soft_wrap=True)
    return _failures(before, after)


def write(scenario: Scenario, before: RunReport, after: RunReport, out: Path) -> None:
    """Write the figures as JSON and the plot as PNG."""
    out.mkdir(parents=True, exist_ok=True)
    figures = {"machine": describe_machine(), "scenario": asdict(scenario), "runs": [asdict(before), asdict(after)]}
    (out / "demo.json").write_text(json.dumps(figures, indent=2) + "\n")
    plot(before, after, out / "demo.png", caption=scenario.describe())


def _failures(*reports: RunReport) -> int:
    failed_count = sum(report.failed_turn_count for report in reports)
    if failed_count:
        print(f"demo: error: {failed_count} turns failed; the logs beside the plot may say why", file=sys.stderr)
    return 1 if failed_count else 0


async def _until_signal(scenario: Scenario, out: Path, console: Console) -> tuple[RunReport, RunReport]:
    """Make both runs; SIGTERM stops them as Ctrl-C does."""
    task = asyncio.current_task()
    assert task is not None
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, task.cancel)
    return await show(scenario, out, console)


def _scenario(arguments: argparse.Namespace) -> Scenario:
    base = QUICK if arguments.quick else FULL
    given = {name: value for name in ("programs", "seed") if (value := getattr(arguments, name)) is not None}
    return replace(base, load=replace(base.load, **given))


def _arguments(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="scripts/demo",
        description="Run the same agent programs twice on simulated engines: passed through, then scheduled.",
    )
    parser.add_argument("--programs", type=int, metavar="N", help=f"all at once (default: {FULL.load.programs})")
    parser.add_argument("--seed", type=int, metavar="N", help="other programs (default: 0)")
    parser.add_argument("--out", type=Path, default=Path("out"), metavar="DIR", help="where results go (default: out)")
    parser.add_argument("--quick", action="store_true", help="a few seconds with small programs; too small to judge by")
    return parser.parse_args(argv)


if __name__ == "__main__":
    sys.exit(main())
