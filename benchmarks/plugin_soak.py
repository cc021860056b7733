"""The scheduler for vLLM in a real engine behind the proxy, for some time, with faults: nothing is lost, nothing grows.

Programs send turn after turn, and try again where a turn failed, as agents do. Meanwhile clients leave in the middle of
an answer, strangers send turns past the proxy, the engine gets messages that it does not know, its prefix cache is
reset, and the proxy is killed and starts anew. After `FIRST_LIFE` of the time the engine is killed, too; in its next
life a decision of the plugin raises, and vLLM's own order applies.

    scripts/bench plugin_soak --minutes 25    # scripts/nightly has three hours; ends with 1 if it misses its bars
    scripts/bench plugin_soak --growth --minutes 13    # stock, then the plugin

With `--growth` no engine is killed and no decision raises: the same load goes to an engine with vLLM's own scheduler
and then to one with the plugin, and lines are fitted to the memory of each of their processes.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import random
import re
import sys
from collections import Counter
from collections.abc import AsyncIterator, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import aiohttp

from benchmarks.environments import cache_dir
from benchmarks.load import LoadResult, LoadSpec, run_load
from benchmarks.machine import describe_code, save_results
from benchmarks.memory import slope_of
from benchmarks.peer_arms import plugin_settings
from benchmarks.processes import Server, resident_mb, thunderagent
from benchmarks.real_engine import RealEngine, RealEngineConfig

FIRST_LIFE = 0.55
"""Part of the time after which the engine is killed."""

WARMUP_S = 180.0
"""After which the line through the memory begins."""

SAMPLE_S = 10.0
PROXY_LIFE_S = 240.0
MOST_PINNED_RATIO = 0.9
"""The default of the plugin's `pin_share`."""

PATH = "/thunderagent/programs"
CHAT = "/v1/chat/completions"

MMAP = (("MALLOC_MMAP_THRESHOLD_", "131072"),)

ARMS: Mapping[str, Mapping[str, Any]] = {
    "stock": {},
    "plugin": plugin_settings(),
    "stock-mmap": {"extra_variables": MMAP},
    "plugin-mmap": plugin_settings() | {"extra_variables": (*plugin_settings()["extra_variables"], *MMAP)},
}
"""What an engine has of its own. `mmap`: large buffers go back to the system as they are freed."""

MEASURES = {"rss": ("Rss",), "pss": ("Pss",), "private": ("Private_Clean", "Private_Dirty")}
"""Kinds of memory, by their lines in `smaps_rollup`."""


def memory_mb(pid: int) -> dict[str, float]:
    """Return a process's memory by kind. Raises OSError if it is gone."""
    lines = Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()[1:]
    kib = {name.rstrip(":"): int(value) for name, value, *_ in map(str.split, lines)}
    return {kind: round(sum(kib[name] for name in names) / 1024, 2) for kind, names in MEASURES.items()}


def role_of(command: bytes) -> str:
    """Return which of the engine's processes has this command line."""
    if command.startswith(b"VLLM::"):
        return command.strip(b"\0").removeprefix(b"VLLM::").partition(b"\0")[0].decode().strip().lower()
    return "tracker" if b"resource_tracker" in command else "server"


def tokens_of(metrics: str) -> float:
    """Return how many tokens an engine has computed or generated, by its metrics."""
    computed = r'^vllm:prompt_tokens_by_source_total\{.*source="local_compute".*\} (\S+)$'
    generated = r"^vllm:generation_tokens_total\{.*\} (\S+)$"
    return sum(float(each) for pattern in (computed, generated) for each in re.findall(pattern, metrics, re.MULTILINE))


class Soak:
    """One run in front of an engine of an arm; `port` is the proxy's."""

    def __init__(
        self, minutes: float, programs: int, port: int, engine_port: int, seed: int, *, arm: str = "plugin"
    ) -> None:
        self.arm = arm
        self.has_plugin = not arm.startswith("stock")
        self.seconds = minutes * 60
        self.port = port
        self.rng = random.Random(seed)
        self.spec = LoadSpec(
            programs=programs,
            seed=seed,
            turns=(3, 8),
            tool_result_tokens=(100, 250),
            tool_mean_s=4.0,
            tries=600,
        )
        shape: dict[str, Any] = {
            "hidden_size": 256, "layers": 4, "pool_blocks": 256, "max_model_len": 4096, "core": None,
            "ready_timeout_s": 900.0,
        }  # fmt: skip
        self.config = RealEngineConfig(**shape, port=engine_port, **ARMS[arm])
        settings = plugin_settings()
        ((name, folder),) = settings["extra_variables"]
        failing = tuple(
            "failing.Scheduler" if each == "thunderagent_vllm.scheduler.Scheduler" else each
            for each in settings["extra_args"]
        )
        self.failing_config = RealEngineConfig(
            **shape, port=engine_port, extra_args=failing, extra_variables=((name, f"{folder}:{folder}/tests"),)
        )
        self.counts: Counter[str] = Counter()
        self.samples: list[dict[str, float]] = []
        self.reports: list[dict[str, Any]] = []
        """What the plugin said at the end of each of the engine's lives."""

    @property
    def url(self) -> str:
        """The proxy's, whoever serves there."""
        return f"http://127.0.0.1:{self.port}"

    async def run(self) -> dict[str, Any]:
        """Run it all; return the figures."""
        timeout = aiohttp.ClientTimeout(total=120)
        async with aiohttp.ClientSession(timeout=timeout) as self.client, RealEngine(self.config) as engine:
            self.engine = engine
            async with self.proxies(), self.during(self.faults()), self.during(self.watch()):
                load = asyncio.create_task(
                    run_load(self.spec, self.url, is_proxy=True, warmup_s=0.0, measure_s=self.seconds)
                )
                await asyncio.sleep(FIRST_LIFE * self.seconds)
                self.reports.append(await self.report())
                await engine.kill()
                self.counts["engines_killed"] += 1
                self.engine = RealEngine(self.failing_config)
                try:
                    await self.engine.start()
                    result = await load
                    self.reports.append(await self.report())
                finally:
                    await self.engine.stop()
        return self.figures(result)

    async def grow(self, warmup_s: float) -> dict[str, Any]:
        """Run the load on one engine that is not killed; return the figures of its memory."""
        timeout = aiohttp.ClientTimeout(total=120)
        async with aiohttp.ClientSession(timeout=timeout) as self.client, RealEngine(self.config) as self.engine:
            async with self.proxies(), self.during(self.faults()), self.during(self.watch_growth()):
                result = await run_load(self.spec, self.url, is_proxy=True, warmup_s=0.0, measure_s=self.seconds)
            report = await self.report() if self.has_plugin else {}
        return {
            "arm": self.arm,
            "turns": sum(each.succeeded for each in result.records),
            "lost_turns": result.failed_turn_count,
            "tried_again": result.retry_count,
            "programs_ended": result.finished_program_count,
            "faults": dict(self.counts),
            "lines": growth_lines(self.samples, warmup_s, self.seconds),
            "second_half": growth_lines(self.samples, (warmup_s + self.seconds) / 2, self.seconds),
            "plugin": {name: report.get(name) for name in ("on", "failures_total", "steps_total", "pins_total")},
            "samples": self.samples,
        }

    async def watch_growth(self) -> None:
        """Sample the memory of each process, and the tokens that the engine has computed."""
        loop = asyncio.get_running_loop()
        begun_s = loop.time()
        while True:
            sample = {"at_s": round(loop.time() - begun_s, 1)}
            with contextlib.suppress(aiohttp.ClientError, TimeoutError):
                async with self.client.get(f"{self.config.url}/metrics") as answer:
                    sample["tokens"] = tokens_of(await answer.text())
            found = [(role_of(command), pid) for pid, command in self.engine.processes().items()]
            if self.proxy is not None:
                found.append(("proxy", self.proxy.process.pid))
            for role, pid in found:
                with contextlib.suppress(OSError):  # it ended
                    sample |= {f"{role}_{kind}_mb": value for kind, value in memory_mb(pid).items()}
            self.samples.append(sample)
            print(self.arm, "  ".join(f"{name} {value:,}" for name, value in sample.items()), flush=True)
            await asyncio.sleep(SAMPLE_S)

    @contextlib.asynccontextmanager
    async def during(self, work: Any) -> AsyncIterator[None]:
        """Have something else done meanwhile; what it raises is raised."""
        task = asyncio.create_task(work)
        try:
            yield
            if task.done():
                task.result()
        finally:
            task.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await task

    @contextlib.asynccontextmanager
    async def proxies(self) -> AsyncIterator[None]:
        """Keep a proxy running, which is killed now and then."""
        options = ("--port", str(self.port), "--backends", self.config.url, "--poll-deadline-s", "20")
        up = asyncio.Event()
        self.proxy: Server | None = None

        async def keep() -> None:
            while True:
                log_path = cache_dir() / "logs" / f"{self.arm}-soak-{self.counts['proxies_killed']}.log"
                async with thunderagent("serve", *options, log_path=log_path) as self.proxy:
                    up.set()
                    await asyncio.sleep(PROXY_LIFE_S)
                    self.proxy.process.kill()
                    self.counts["proxies_killed"] += 1

        async with self.during(keep()):
            await up.wait()
            yield

    async def faults(self) -> None:
        """Have something go wrong every few seconds."""
        kinds = (self.leave, self.leave, self.be_a_stranger, self.be_a_stranger, self.reset, self.tell_nonsense)
        while True:
            await asyncio.sleep(self.rng.uniform(2.0, 10.0))
            kind = self.rng.choice(kinds)
            with contextlib.suppress(aiohttp.ClientError, TimeoutError):  # nobody may be there now
                await kind()
                self.counts[kind.__name__] += 1

    def body(self, output_tokens: int) -> dict[str, Any]:
        """Return a turn of random words."""
        words = " ".join(f"w{self.rng.randrange(2000)}" for _ in range(self.rng.randint(200, 1500)))
        named = {"model": self.spec.model, "max_tokens": output_tokens, "ignore_eos": True, "stream": True}
        return {**named, "messages": [{"role": "user", "content": words}]}

    async def leave(self) -> None:
        """Send a program's turn, and be gone after the first bytes of its answer."""
        headers = {"X-Program-ID": f"leaver-{self.rng.randrange(20)}"}
        async with self.client.post(f"{self.url}{CHAT}", json=self.body(400), headers=headers) as answer:
            await answer.content.readany()
            answer.close()

    async def be_a_stranger(self) -> None:
        """Send the engine a turn past the proxy, at times with a session of one's own."""
        headers = {"X-Session-ID": f"stranger-{self.rng.random()}"} if self.rng.random() < 0.5 else {}
        async with self.client.post(f"{self.config.url}{CHAT}", json=self.body(16), headers=headers) as answer:
            await answer.read()

    async def reset(self) -> None:
        """Have the engine forget its cache: it declines while it works, but lets all pins go."""
        async with self.client.post(f"{self.config.url}/reset_prefix_cache") as answer:
            await answer.read()

    async def tell_nonsense(self) -> None:
        """Send messages that nobody knows, and one that lets somebody go."""
        anybody = f"program-{self.spec.seed}-{self.rng.randrange(200)}"
        ops = [["fly", "away"], ["hold", anybody, "long"], [], 7, ["pause", anybody], ["hold", "nobody", 1e9]]
        async with self.client.post(self.config.url + PATH, json={"protocol": 1, "ops": ops}) as answer:
            self.counts["bad_answers"] += answer.status not in ((200, 503) if self.has_plugin else (404,))
        async with self.client.post(self.config.url + PATH, data=b"{nonsense") as answer:
            self.counts["bad_answers"] += answer.status != (400 if self.has_plugin else 404)

    async def report(self) -> dict[str, Any]:
        """Return what the plugin says."""
        async with self.client.get(self.config.url + PATH) as answer:
            found: dict[str, Any] = await answer.json()
            return found

    def engine_ids(self, *, of_scheduler: bool) -> list[int]:
        """Return the engine's process in which the scheduler runs, or the others: the model's worker and the server."""
        found = self.engine.processes().items()
        return [pid for pid, command in found if command.startswith(b"VLLM::EngineCore") is of_scheduler]

    async def watch(self) -> None:
        """Sample what is pinned, and the memory of all processes."""
        loop = asyncio.get_running_loop()
        begun_s = loop.time()
        while True:
            with contextlib.suppress(aiohttp.ClientError, TimeoutError, OSError, StopIteration):
                report = await self.report()
                blocks = report["blocks"]
                sample = {
                    "at_s": round(loop.time() - begun_s, 1),
                    "life": float(self.counts["engines_killed"]),
                    "pinned_ratio": round(blocks["pinned"] / blocks["total"], 4),
                    "programs": report["programs"],
                    "scheduler_mb": round(sum(map(resident_mb, self.engine_ids(of_scheduler=True))), 2),
                    "other_engine_mb": round(sum(map(resident_mb, self.engine_ids(of_scheduler=False))), 2),
                    "proxy_mb": round(resident_mb(self.proxy.process.pid), 2) if self.proxy else 0.0,
                }
                self.samples.append(sample)
                print("  ".join(f"{name} {value:,}" for name, value in sample.items()), flush=True)
            await asyncio.sleep(SAMPLE_S)

    def figures(self, result: LoadResult) -> dict[str, Any]:
        """Return what came of it; lines are through the memory in the engine's first life, after its warm-up."""
        flat = [each for each in self.samples if each["life"] == 0 and each["at_s"] >= WARMUP_S]
        times_s = [each["at_s"] for each in flat]
        lines = {
            name: asdict(slope_of(times_s, [each[name] for each in flat])) if len(flat) > 2 else None
            for name in ("scheduler_mb", "other_engine_mb", "proxy_mb")
        }
        first, last = (
            {name: report.get(name) for name in ("on", "failures_total", "steps_total", "pins_total", "turns_total")}
            for report in self.reports
        )
        return {
            "minutes": self.seconds / 60,
            "programs": self.spec.programs,
            "turns": sum(each.succeeded for each in result.records),
            "lost_turns": result.failed_turn_count,
            "tried_again": result.retry_count,
            "programs_ended": result.finished_program_count,
            "faults": dict(self.counts),
            "most_pinned_ratio": max(each["pinned_ratio"] for each in self.samples),
            "memory": lines,
            "first_life": first,
            "failing_life": last,
            "samples": self.samples,
        }


def growth_lines(samples: Sequence[Mapping[str, float]], from_s: float, to_s: float) -> dict[str, dict[str, float]]:
    """Return a line through each kind of memory of each process between two times, also by tokens."""
    flat = [each for each in samples if from_s <= each["at_s"] <= to_s and "tokens" in each]
    lines = {}
    for name in sorted({name for each in flat for name in each} - {"at_s", "tokens"}):
        points = [(each["at_s"], each["tokens"], each[name]) for each in flat if name in each]
        if len(points) > 2 and points[0][1] < points[-1][1]:
            times_s, tokens, values = zip(*points, strict=True)
            by_tokens = slope_of([count / 1000 * 3600 for count in tokens], values)
            lines[name] = asdict(slope_of(times_s, values)) | {
                "mb_per_1000_tokens": by_tokens.mb_per_hour,
                "half_width_mb_per_1000_tokens": by_tokens.half_width_mb_per_hour,
            }
    return lines


def misses_of(found: Mapping[str, Any]) -> list[str]:
    """Return which bars a run missed: nothing is lost, pins are bounded, and only what should fail does."""
    first, last = found["first_life"], found["failing_life"]
    checks = {
        f"{found['lost_turns']} turns were lost": found["lost_turns"] == 0,
        f"pins held {found['most_pinned_ratio']:.2f} of the pool": found["most_pinned_ratio"] <= MOST_PINNED_RATIO,
        f"{found['faults'].get('bad_answers', 0)} answers were not as expected": not found["faults"].get("bad_answers"),
        "nothing was held for a next turn": bool(first["pins_total"].get("used")),
        "the plugin failed where nothing was made to": first["on"] and not first["failures_total"],
        "the plugin did not turn off where it was made to fail": not last["on"] and last["failures_total"] == 1,
    }
    return [miss for miss, is_well in checks.items() if not is_well]


def compare_growth(args: argparse.Namespace) -> None:
    """Run the arms one after the other; the stored result is complete after each."""
    arms = []
    for arm in args.arms.split(","):
        soak = Soak(args.minutes, args.programs, args.port, args.engine_port, args.seed, arm=arm)
        arms.append(asyncio.run(soak.grow(args.warmup_s)))
        of_all = {name: getattr(args, name) for name in ("minutes", "warmup_s", "programs", "seed")}
        save_results(args.name, {**of_all, "arms": arms})
    for found in arms:
        print(f"{found['arm']}: {found['turns']} turns, {found['lost_turns']} lost")
        for part in ("lines", "second_half"):
            for name, line in found[part].items():
                print(
                    f"  {part:>11} {name:24} {line['mb_per_hour']:+9.1f} +- {line['half_width_mb_per_hour']:.1f} MB an "
                    f"hour on {line['at_begin_mb']:.1f} MB, {line['mb_per_1000_tokens']:+.3f} +- "
                    f"{line['half_width_mb_per_1000_tokens']:.3f} MB in 1,000 tokens"
                )


def main() -> None:
    """Run it, print and store what happened."""
    parser = argparse.ArgumentParser(description="The scheduler for vLLM in a real engine, with faults.")
    add = parser.add_argument
    add("--minutes", type=float, default=25.0)
    add("--programs", type=int, default=6)
    add("--port", type=int, default=18731)
    add("--engine-port", type=int, default=18732)
    add("--seed", type=int, default=0)
    add("--growth", action="store_true", help="compare the memory of the engine's processes with vLLM's own scheduler")
    add("--warmup-s", type=float, default=WARMUP_S, help="of --growth: after which the lines begin")
    add("--arms", default="stock,plugin", help="of --growth, in this order")
    add("--name", help="of the result file")
    args = parser.parse_args()
    describe_code()  # as it is now
    args.name = args.name or ("plugin-growth" if args.growth else "plugin-soak")
    if args.growth:
        compare_growth(args)
        return
    found = asyncio.run(Soak(args.minutes, args.programs, args.port, args.engine_port, args.seed).run())
    print({name: value for name, value in found.items() if name != "samples"})
    print(f"stored in {save_results(args.name, found)}")
    if misses := misses_of(found):
        sys.exit("; ".join(misses))


if __name__ == "__main__":
    main()
