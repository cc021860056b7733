"""Measure how long nothing is granted while leaders change, and whether turns, leases or usage are lost meanwhile.

Two schedulers with the real core and the default policy share a Redis. This process has the links of 16 gateways and
the engines: each granted turn is generated here, once for its number, for a given time. No bytes of turns are carried,
so that the machine's cores are left for what is measured. Programs take their turns one after another.
"""

from __future__ import annotations

import argparse
import asyncio
import logging
import os
import random
import re
import shutil
import signal
import subprocess
import sys
from asyncio.subprocess import Process
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from itertools import pairwise
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory
from time import perf_counter
from typing import Any

import aiohttp
import structlog
import uvloop

from benchmarks.environments import ensure_environment
from benchmarks.instant import instant_engine
from benchmarks.machine import save_results
from benchmarks.processes import die_with_parent, resident_mb
from thunderagent.leases import TurnAsk
from thunderagent.provision.base import free_port
from thunderagent.scale.gateway.carried import CarriedTurns
from thunderagent.scale.gateway.dialling import Dialling
from thunderagent.scale.gateway.remote import RemoteRuntime, RemoteSettings
from thunderagent.scale.scheduler.gateways import GENERATION_BITS

GATEWAYS_COUNT = 16
PROMPT_TOKENS, OUTPUT_TOKENS = 1_000, 50
LOCK_S = 3.0
TURNS_COUNT = 8
"""Turns of a program; then it is released, and another one begins in its place."""

TOOL_S = 0.2
IDLE_LIMIT_S = 0.5
"""Programs without further turns give up their claims this soon: else they hold the memory of new programs."""

WITHIN_S = 60.0
_READY_LINE = re.compile(rb"ready at (http://\S+?)(?::? |$)")


class Cell:
    """A Redis, two schedulers, the links of gateways, programs, and the counts."""

    def __init__(self, folder: Path, packages: str, engine_url: str, args: argparse.Namespace) -> None:
        """Start nothing yet; `packages` has the Redis client."""
        self.folder = folder
        self.packages = packages
        self.engine_url = engine_url
        self.in_flight_count, self.programs_count = args.in_flight, args.programs
        self.turn_s, self.idle_count = args.turn_s, args.idle_programs
        self.begun: dict[str, Any] = {}
        self.redis: Process | None = None
        self.schedulers: dict[int, Process] = {}
        self.gateways: list[RemoteRuntime] = []
        self.generated: Counter[tuple[int, int]] = Counter()
        """How often each turn of each gateway was generated: what the engines know."""
        self.asked_count = 0
        self.leader_port = 0
        self.lost: dict[str, Any] = {}
        """What was lost or duplicated, known at the end."""
        self.granted: list[tuple[float, int]] = []
        """Time and epoch of each grant."""
        self.stop = asyncio.Event()
        self._http: aiohttp.ClientSession | None = None

    # --- processes

    async def start_redis(self) -> None:
        """Start Redis on its saved data."""
        options = ("--port", "0", "--unixsocket", "redis.sock", "--save", "", "--appendonly", "yes")
        self.redis = await asyncio.create_subprocess_exec(
            *die_with_parent(), "redis-server", *options, cwd=self.folder, stdout=subprocess.DEVNULL
        )

    async def start_scheduler(self, port: int) -> None:
        """Start a scheduler, and wait until it answers."""
        capacity = self.in_flight_count * (PROMPT_TOKENS + OUTPUT_TOKENS) * 5 // 4
        options = ("--listen", f"127.0.0.1:{port}", "--backends", self.engine_url, "--lock-s", str(LOCK_S))
        options += ("--idle-limit-s", str(IDLE_LIMIT_S)) if self.idle_count else ()
        options += ("--tenant-max-programs-count", "1000000")
        store = ("--store", f"unix://{self.folder / 'redis.sock'}", "--capacity-tokens", str(capacity))
        with (self.folder / f"scheduler-{port}.log").open("ab") as log:
            process = await asyncio.create_subprocess_exec(
                *die_with_parent(),
                *(sys.executable, "-m", "thunderagent", "scheduler", *options, *store),
                stdout=subprocess.PIPE,
                stderr=log,
                env={**os.environ, "PYTHONPATH": self.packages},
            )
        self.schedulers[port] = process
        assert process.stdout is not None
        if _READY_LINE.search(await process.stdout.readline()) is None:
            raise RuntimeError((self.folder / f"scheduler-{port}.log").read_text()[-4000:])

    async def said(self, port: int) -> dict[str, Any]:
        """Return a scheduler's status; empty if it does not answer."""
        assert self._http is not None
        with suppress(aiohttp.ClientError, TimeoutError):
            async with self._http.get(f"http://127.0.0.1:{port}/internal/leader") as response:
                return dict(await response.json())
        return {}

    async def leader(self, *, followed: bool) -> int:
        """Wait until a scheduler leads (and another is a standby, on request); return the leader's port."""
        async with asyncio.timeout(WITHIN_S):
            while True:
                said = {port: await self.said(port) for port in self.schedulers}
                leads = {port: each["epoch"] for port, each in said.items() if each.get("role") == "leader"}
                if leads:
                    port = max(leads, key=lambda each: leads[each])
                    stands_by = any(each.get("role") == "standby" for each in said.values())
                    if not followed or (stands_by and said[port].get("has_standby")):
                        return port
                await asyncio.sleep(0.1)

    @asynccontextmanager
    async def running(self) -> AsyncIterator[None]:
        """Run everything during the block; at its end programs finish their turns and stop."""
        async with AsyncExitStack() as stack:
            stack.callback(self._kill_all)
            self._http = await stack.enter_async_context(aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(2)))
            await self.start_redis()
            ports = free_port(), free_port()
            for port in ports:
                await self.start_scheduler(port)
                await self.leader(followed=False)
            urls = tuple(f"http://127.0.0.1:{port}" for port in ports)
            links = []
            for number in range(GATEWAYS_COUNT):
                runtime = RemoteRuntime(CarriedTurns(f"g{number}", number + 1), RemoteSettings(patience_s=1e9))
                self.gateways.append(runtime)
                links.append(asyncio.create_task(Dialling(runtime, urls, headers={}, ssl_context=None).run()))
            while not all(each.replicas.open_ids for each in self.gateways):
                await asyncio.sleep(0.05)
            await self.leader(followed=True)
            self.begun = await self.settle(0.2)
            await self.know(self.idle_count)
            async with asyncio.TaskGroup() as group:
                for number in range(self.programs_count):
                    group.create_task(self.program(number))
                yield
                self.stop.set()
            while any(each.turns.rows for each in self.gateways):
                await asyncio.sleep(0.05)
            self.lost = await self.losses()
            for each in links:
                each.cancel()

    def _kill_all(self) -> None:
        for process in (*self.schedulers.values(), self.redis):
            if process is not None and process.returncode is None:
                process.kill()

    # --- programs

    async def program(self, number: int) -> None:
        """Take turn after turn; after some, release the program and begin as a new one."""
        rng, gateway_index = random.Random(number), number % GATEWAYS_COUNT
        runtime = self.gateways[gateway_index]
        await asyncio.sleep(rng.random() * self.turn_s)
        lives_count = 0
        while not self.stop.is_set():
            program_id, lives_count = f"p{number}-{lives_count}", lives_count + 1
            for _ in range(rng.randint(1, 2 * TURNS_COUNT)):
                await self.turn(runtime, gateway_index, program_id, rng, self.turn_s)
                if self.stop.is_set():
                    return
                await asyncio.sleep(TOOL_S * 2 * rng.random())
            runtime.release(program_id)

    async def turn(
        self, runtime: RemoteRuntime, gateway_index: int, program_id: str, rng: random.Random, turn_s: float
    ) -> None:
        """Generate a turn under a lease, in about `turn_s`."""
        turn_id = runtime.new_turn_id()
        self.asked_count += 1
        ask = TurnAsk(turn_id=turn_id, program_id=program_id, prompt_bytes=4 * PROMPT_TOKENS)
        with await runtime.lease(ask) as lease:
            self.granted.append((perf_counter(), lease.granted.generation >> GENERATION_BITS))
            self.generated[gateway_index, turn_id] += 1
            lease.started()
            await asyncio.sleep(turn_s * (0.5 + rng.random()))
            lease.finished(PROMPT_TOKENS, OUTPUT_TOKENS, 0)

    @property
    def held_count(self) -> int:
        """Number of turns that wait now."""
        return sum(row.lease is None for each in self.gateways for row in each.turns.rows.values())

    @property
    def leased_count(self) -> int:
        """Number of turns that are being generated, or whose ends no scheduler has acknowledged."""
        return sum(row.lease is not None for each in self.gateways for row in each.turns.rows.values())

    # --- faults

    async def settle(self, seconds_s: float) -> dict[str, Any]:
        """Run until there is a leader and a standby, and a while longer; return the load in flight."""
        self.leader_port = await self.leader(followed=True)
        before_count = len(self.granted)
        await asyncio.sleep(seconds_s)
        rate = (len(self.granted) - before_count) / seconds_s
        said, values = await self.said(self.leader_port), await self.metrics(self.leader_port)
        counts = {name: count for name, count in values.items() if "event_loop_lag_seconds_bucket" in name}
        whole = [name for name, count in counts.items() if count == max(counts.values())]
        return {
            "programs": {name: count for name, count in values.items() if "_programs{" in name and count},
            "claimed_tokens": sum(count for name, count in values.items() if "thunderagent_demand_tokens" in name),
            "rss_mb": round(resident_mb(self.schedulers[self.leader_port].pid), 1),
            "loop_never_later_than_s": whole[0].partition('le="')[2].rstrip('"}'),
            "took_over_s": said.get("took_over_s"),
            "turns_per_s": round(rate),
            "in_flight": self.leased_count,
            "held": self.held_count,
            "log_lag_p50_s": said.get("log_lag_p50_s"),
            "log_lag_p99_s": said.get("log_lag_p99_s"),
        }

    async def until_epoch_after(self, epoch: int, moment_s: float) -> dict[str, float]:
        """Return the time without grants between an epoch and the next one, and since the fault."""
        async with asyncio.timeout(WITHIN_S):
            while self.granted[-1][1] <= epoch:
                await asyncio.sleep(0.02)
        new_s = next(at_s for at_s, each in self.granted if each > epoch)
        old_s = max(at_s for at_s, each in self.granted if each == epoch)
        return {"takeover_s": round(new_s - old_s, 4), "since_the_fault_s": round(new_s - moment_s, 4)}

    async def killed(self) -> dict[str, Any]:
        """Kill the leader, and restart it once another one leads."""
        port, epoch, moment_s = self.leader_port, self.granted[-1][1], perf_counter()
        self.schedulers[port].kill()
        found = await self.until_epoch_after(epoch, moment_s)
        await self.schedulers[port].wait()
        await self.start_scheduler(port)
        return found

    async def paused(self) -> dict[str, Any]:
        """Stop the leader for longer than its lock lasts, then resume it."""
        process, epoch, moment_s = self.schedulers[self.leader_port], self.granted[-1][1], perf_counter()
        process.send_signal(signal.SIGSTOP)
        try:
            found = await self.until_epoch_after(epoch, moment_s)
            await asyncio.sleep(1.0)
        finally:
            process.send_signal(signal.SIGCONT)
        return found

    async def without_store(self) -> dict[str, Any]:
        """Kill Redis for some seconds; return the longest time without a grant."""
        assert self.redis is not None
        epoch, moment_s = self.granted[-1][1], perf_counter()
        self.redis.kill()
        await self.redis.wait()
        await asyncio.sleep(4.0)
        await self.start_redis()
        await asyncio.sleep(4.0)
        times = [at_s for at_s, _ in self.granted if at_s >= moment_s]
        longest_s = max(after - before for before, after in pairwise(times))
        return {"longest_gap_s": round(longest_s, 4), "epochs_more": self.granted[-1][1] - epoch}

    async def know(self, count: int) -> None:
        """Make a number of programs known that take one turn and then no more."""
        rooms = asyncio.Semaphore(64)

        async def one(number: int) -> None:
            async with rooms:
                runtime = self.gateways[number % GATEWAYS_COUNT]
                await self.turn(runtime, number % GATEWAYS_COUNT, f"idle{number}", random.Random(number), 0.0)

        for begin in range(0, count, 1_000):
            await asyncio.gather(*(one(number) for number in range(begin, min(count, begin + 1_000))))

    async def metrics(self, port: int) -> dict[str, float]:
        """Return a scheduler's metrics."""
        assert self._http is not None
        async with self._http.get(f"http://127.0.0.1:{port}/metrics") as response:
            lines = (await response.text()).splitlines()
        return {name: float(value) for name, _, value in (line.rpartition(" ") for line in lines if line[:1] != "#")}

    # --- what is left

    async def losses(self) -> dict[str, Any]:
        """Compare the records of engines and gateways with the leader's counts."""
        values = await self.metrics(await self.leader(followed=False))
        turns_count = len(self.generated)
        counted = values.get('thunderagent_turns_total{outcome="finished"}', 0.0)
        return {
            "turns_asked": self.asked_count,
            "turns_lost": self.asked_count - turns_count,
            "generated_twice": sum(count > 1 for count in self.generated.values()),
            "turns_counted_more": round(counted) - turns_count,
            "prompt_tokens_counted_more": round(
                values["thunderagent_prompt_tokens_total"] - turns_count * PROMPT_TOKENS
            ),
            "output_tokens_counted_more": round(
                values["thunderagent_output_tokens_total"] - turns_count * OUTPUT_TOKENS
            ),
            "leases_leaked": round(values["thunderagent_leases_active"]),
            "held_leaked": round(values["thunderagent_turns_held"]),
        }


async def measure(args: argparse.Namespace) -> dict[str, Any]:
    """Return all figures."""
    python = ensure_environment("workflows-redis", ["redis>=6,<9"], "a second")
    find = (str(python), "-c", "import sysconfig; print(sysconfig.get_path('purelib'))")
    packages = subprocess.run(find, check=True, capture_output=True, text=True).stdout.strip()
    found: dict[str, Any] = {"lock_s": LOCK_S, "programs": args.programs, "faults": []}
    with TemporaryDirectory() as folder:
        async with instant_engine() as port:
            cell = Cell(Path(folder), packages, f"http://127.0.0.1:{port}", args)
            async with cell.running():
                await asyncio.sleep(args.begin_s)
                faults = [*(["killed"] * args.kills), "paused", "without_store"]
                for name in faults:
                    before = await cell.settle(args.settle_s)
                    result = {"fault": name, **before, **await getattr(cell, name)()}
                    print(", ".join(f"{key} {value}" for key, value in result.items()), flush=True)
                    found["faults"].append(result)
                await cell.settle(args.settle_s)
            found["losses"], found["at_the_begin"] = cell.lost, cell.begun
    takeovers_s = sorted(each["takeover_s"] for each in found["faults"] if each["fault"] == "killed")
    found["killed"] = {"count": len(takeovers_s), "p50_s": median(takeovers_s), "max_s": takeovers_s[-1]}
    return found


def main() -> None:
    """Measure, print and save the figures."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--programs", type=int, default=5_000, metavar="N", help="(default: 5000)")
    parser.add_argument(
        "--in-flight", type=int, default=2_500, metavar="N", help="for which there is room, and growth (2500)"
    )
    parser.add_argument("--turn-s", type=float, default=2.0, metavar="SECONDS", help="a turn's mean length (2)")
    parser.add_argument("--idle-programs", type=int, default=0, metavar="N", help="that are known beside these (0)")
    parser.add_argument("--kills", type=int, default=5, metavar="N", help="of the leader (5)")
    parser.add_argument("--begin-s", type=float, default=15.0, metavar="SECONDS", help="before the first fault (15)")
    parser.add_argument("--settle-s", type=float, default=4.0, metavar="SECONDS", help="before each fault (4)")
    parser.add_argument("--keep", action="store_true", help="keep the figures in benchmarks/results")
    parser.add_argument("--name", default="takeover", help="of the file there (takeover)")
    args = parser.parse_args()
    if shutil.which("redis-server") is None:
        parser.error("redis-server is not installed")
    structlog.configure(wrapper_class=structlog.make_filtering_bound_logger(logging.ERROR))
    found = uvloop.run(measure(args))
    for name in ("killed", "losses"):
        print(f"{name}: {', '.join(f'{key} {value}' for key, value in found[name].items())}")
    if args.keep:
        print(save_results(args.name, found))


if __name__ == "__main__":
    main()
