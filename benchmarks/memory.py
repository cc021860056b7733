"""Check that the proxy's memory stays flat: an hour of programs that come and go, and a line fitted to resident memory.

The line begins with the 16th minute: the dashboard shows the last quarter of an hour, which is collected until then.
Samples of a process's memory are correlated, so the interval of the line's slope is widened accordingly (to as many
independent samples as an AR(1) process would leave).
"""

from __future__ import annotations

import argparse
import asyncio
import math
from collections.abc import Sequence
from contextlib import AsyncExitStack
from dataclasses import asdict, dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import aiohttp
import uvloop
from matplotlib.figure import Figure

from benchmarks.comings import Comings, Engine
from benchmarks.drip import DripEngine
from benchmarks.machine import save_results
from benchmarks.processes import resident_mb, thunderagent
from benchmarks.simulated import save_plot
from thunderagent.serving.process import raise_file_limit

SAMPLE_PERIOD_S = 10.0
FORGET_LIMIT_S = 60.0
LIMITS = ("--idle-limit-s", "10", "--forget-limit-s", str(FORGET_LIMIT_S))
MADE_ANSWERS_COUNT = 106_250
"""Limit of response ids that the proxy remembers on purpose: the memory for them is filled before the hour."""

REPLICAS_COUNT = 2
Z_95 = 1.96


@dataclass(frozen=True)
class Sample:
    """The proxy's resource use at one time."""

    at_s: float
    resident_mb: float
    files_count: int
    programs_count: float
    held_count: float
    leases_count: float
    turns_count: int
    """Turns sent so far."""


@dataclass(frozen=True)
class Slope:
    """A line through samples: MB per hour, and half of its 95 % interval."""

    mb_per_hour: float
    half_width_mb_per_hour: float
    at_begin_mb: float
    """The value of the line at its begin."""
    samples_count: int
    independent_count: float
    """The equivalent number of independent samples."""


def slope_of(times_s: Sequence[float], resident_mb: Sequence[float]) -> Slope:
    """Fit a line by least squares to at least three samples."""
    count = len(times_s)
    mean_s, mean_mb = sum(times_s) / count, sum(resident_mb) / count
    spread = sum((at_s - mean_s) ** 2 for at_s in times_s)
    slope = sum((a - mean_s) * (b - mean_mb) for a, b in zip(times_s, resident_mb, strict=True)) / spread
    rest = [b - mean_mb - slope * (a - mean_s) for a, b in zip(times_s, resident_mb, strict=True)]
    squares = sum(each**2 for each in rest)
    follows = sum(a * b for a, b in pairwise(rest)) / squares if squares else 0.0
    follows = min(max(follows, 0.0), 0.999)
    independent_count = max(3.0, count * (1 - follows) / (1 + follows))
    error = math.sqrt(squares / (independent_count - 2) / spread)
    return Slope(
        mb_per_hour=slope * 3600,
        half_width_mb_per_hour=Z_95 * error * 3600,
        at_begin_mb=mean_mb + slope * (times_s[0] - mean_s),
        samples_count=count,
        independent_count=independent_count,
    )


def slope_after(samples: Sequence[Sample], from_s: float, to_s: float) -> Slope:
    """Fit a line to the resident memory between two times."""
    measured = [each for each in samples if from_s <= each.at_s <= to_s]
    return slope_of([each.at_s for each in measured], [each.resident_mb for each in measured])


def files_count(pid: int) -> int:
    """Return the number of a process's open files and sockets."""
    return len(list(Path(f"/proc/{pid}/fd").iterdir()))


async def gauges(client: aiohttp.ClientSession, url: str) -> dict[str, float]:
    """Return the proxy's gauges by name, summed over their labels."""
    sums: dict[str, float] = {}
    async with client.get(f"{url}/metrics") as answer:
        for line in (await answer.text()).splitlines():
            if not line.startswith("#"):
                name, value = line.rsplit(" ", 1)
                key = name.partition("{")[0]
                sums[key] = sums.get(key, 0.0) + float(value)
    return sums


async def sample(load: Comings, pid: int, at_s: float) -> Sample:
    """Take a sample of the proxy."""
    now = await gauges(load.client, load.url)
    return Sample(
        at_s=round(at_s, 1),
        resident_mb=round(resident_mb(pid), 2),
        files_count=files_count(pid),
        programs_count=now["thunderagent_programs"],
        held_count=now["thunderagent_turns_held"],
        leases_count=now["thunderagent_leases_active"],
        turns_count=load.counts["turns"],
    )


async def measure(args: argparse.Namespace) -> dict[str, Any]:
    """Run the load on a proxy, and sample it every ten seconds."""
    loop = asyncio.get_running_loop()
    samples: list[Sample] = []
    async with AsyncExitStack() as stack:
        engines = [DripEngine(Engine(seed).plan, args.capacity_tokens) for seed in range(REPLICAS_COUNT)]
        ports = [await stack.enter_async_context(engine.serving()) for engine in engines]
        backends = ",".join(f"http://127.0.0.1:{port}" for port in ports)
        options = ["--backends", backends, "--port", "0", "--log-format", "json", *LIMITS, *args.serve_args]
        server = await stack.enter_async_context(thunderagent("serve", *options, log_path=Path(args.log)))
        connector = aiohttp.TCPConnector(limit=0)
        timeout = aiohttp.ClientTimeout(total=600)
        client = await stack.enter_async_context(aiohttp.ClientSession(connector=connector, timeout=timeout))
        load, pid = Comings(server.url, client, args.seed), server.process.pid
        await asyncio.sleep(2.0)
        before_mb = resident_mb(pid)
        await load.fill(MADE_ANSWERS_COUNT)
        print(
            f"{before_mb:.1f} MB at its start, {resident_mb(pid):.1f} MB with {MADE_ANSWERS_COUNT:,} ids of responses"
        )
        began_s = loop.time()
        running = asyncio.create_task(load.run(args.programs, args.minutes * 60))
        while not running.done():
            await asyncio.wait([running], timeout=max(0.0, len(samples) * SAMPLE_PERIOD_S - (loop.time() - began_s)))
            if not running.done():
                samples.append(await sample(load, pid, loop.time() - began_s))
                print("  ".join(f"{name} {value:,.1f}" for name, value in asdict(samples[-1]).items()), flush=True)
        await running
        elapsed_s = loop.time() - began_s
        await asyncio.sleep(FORGET_LIMIT_S + 5.0)
        after = await sample(load, pid, loop.time() - began_s)
        left_count = sum(engine.turns_count for engine in engines)
    return {
        "slope": asdict(slope_after(samples, args.warmup_minutes * 60, args.minutes * 60)),
        "turns_per_s": load.counts["turns"] / elapsed_s,
        "resident_before_mb": before_mb,
        "after": asdict(after),
        "turns_left_at_engines": left_count,
        "counts": dict(sorted(load.counts.items())),
        "samples": [asdict(each) for each in samples],
    }


def plot(results: dict[str, Any]) -> Figure:
    """Draw the samples and the line."""
    figure = Figure(figsize=(7.2, 2.8), layout="constrained")
    axes = figure.subplots()
    minutes = [each["at_s"] / 60 for each in results["samples"]]
    axes.plot(minutes, [each["resident_mb"] for each in results["samples"]], color="#1c88cf", linewidth=1)
    slope, begin, end = results["slope"], results["arguments"]["warmup_minutes"], results["arguments"]["minutes"]
    line = [slope["at_begin_mb"], slope["at_begin_mb"] + slope["mb_per_hour"] * (end - begin) / 60]
    text = f"{slope['mb_per_hour']:+.2f} ± {slope['half_width_mb_per_hour']:.2f} MB an hour"
    axes.plot([begin, end], line, color="#b5182b", linestyle="--", linewidth=1, label=text)
    axes.set_ylim(bottom=0)
    axes.set_xlabel("minutes", fontsize=8)
    axes.set_ylabel("resident memory, MB", fontsize=8)
    axes.legend(frameon=False, fontsize=8, loc="lower right")
    return figure


def main() -> None:
    """Measure, print, draw and save the figures."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--minutes", type=float, default=60.0, help="length of the load")
    parser.add_argument("--warmup-minutes", type=float, default=15.0, help="how much of it the line leaves out")
    parser.add_argument("--programs", type=int, default=260, help="programs at a time; about 0.55 turns/s each")
    parser.add_argument("--capacity-tokens", type=int, default=400_000, help="of each of the two engines")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--serve-args", nargs="*", default=[], metavar="ARGUMENT", help="further ones of the proxy")
    parser.add_argument("--log", default="out/memory/proxy.log", help="the proxy's log: about 60 KB a second")
    parser.add_argument("--name", default="memory", help="name of the result file and of the plot")
    args = parser.parse_args()
    if args.warmup_minutes + 1 > args.minutes:
        parser.error("the load must be longer than its warm-up, by a minute at least")
    raise_file_limit()
    results = {"arguments": vars(args), **uvloop.run(measure(args))}
    save_results(args.name, results)
    save_plot(args.name, plot(results))
    slope = results["slope"]
    print(
        f"{slope['mb_per_hour']:+.2f} ± {slope['half_width_mb_per_hour']:.2f} MB an hour on {slope['at_begin_mb']:.1f} "
        f"MB, {results['turns_per_s']:.0f} turns/s; afterwards {results['after']}"
    )


if __name__ == "__main__":
    main()
