"""Measure a lease that comes by a link: a scheduler with the real core as one process, a gateway's half as another.

No turn goes to an engine. Times run from the request to the lease, as seen by the code that carries the bytes.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import random
from collections.abc import Sequence
from pathlib import Path
from tempfile import TemporaryDirectory
from time import monotonic, perf_counter, process_time
from typing import Any

import uvloop

from benchmarks.machine import save_results
from benchmarks.processes import thunderagent
from thunderagent.leases import Lease, TurnAsk, TurnEnd
from thunderagent.leases.open_lease import OpenLease
from thunderagent.scale.gateway.carried import CarriedTurns
from thunderagent.scale.gateway.dialling import Dialling
from thunderagent.scale.gateway.remote import RemoteRuntime, RemoteSettings

TIMER_S = 0.001
SEAM_COUNT = 20_000
PROMPT_BYTES = 4_000
PROMPT_TOKENS, OUTPUT_TOKENS = 1_000, 100


async def turn(runtime: RemoteRuntime, program_id: str) -> float:
    """Take a lease and end it; return how long the lease took, in seconds."""
    asked_s = perf_counter()
    with await runtime.lease(
        TurnAsk(turn_id=runtime.new_turn_id(), program_id=program_id, prompt_bytes=PROMPT_BYTES)
    ) as lease:
        took_s = perf_counter() - asked_s
        lease.finished(PROMPT_TOKENS, OUTPUT_TOKENS, 0)
    return took_s


async def alone(runtime: RemoteRuntime, count: int) -> list[float]:
    """Return the times of turns that run one after another."""
    return [await turn(runtime, "alone") for _ in range(count)]


async def deep(runtime: RemoteRuntime, programs_count: int, for_s: float) -> list[float]:
    """Return the times of turns of concurrent programs; each begins its next turn at once."""
    until_s, times_s = perf_counter() + for_s, list[float]()

    async def program(name: str) -> None:
        while perf_counter() < until_s:
            times_s.append(await turn(runtime, name))

    await asyncio.gather(*(program(f"p{number}") for number in range(programs_count)))
    return times_s


async def paced(runtime: RemoteRuntime, programs_count: int, turns_per_s: float, for_s: float) -> list[float]:
    """Return the times of turns that arrive at random, at a given rate."""
    rng, until_s, times_s = random.Random(1), perf_counter() + for_s, list[float]()
    running: set[asyncio.Task[None]] = set()

    async def one(name: str) -> None:
        times_s.append(await turn(runtime, name))

    next_s = perf_counter()
    while next_s < until_s:
        next_s += rng.expovariate(turns_per_s)
        while (wait_s := next_s - perf_counter()) > 0:  # timers have 1 ms resolution: turns would come in bursts
            await asyncio.sleep(wait_s if wait_s > 2 * TIMER_S else 0)
        task = asyncio.create_task(one(f"p{rng.randrange(programs_count)}"))
        running.add(task)
        task.add_done_callback(running.discard)
    await asyncio.gather(*running)
    return times_s


def figures(times_s: Sequence[float]) -> dict[str, float]:
    """Return the count of times, and their percentiles in microseconds."""
    ranked = sorted(times_s)
    return {
        "count": len(ranked),
        **{f"p{part}_us": round(1e6 * ranked[min(len(ranked) - 1, len(ranked) * part // 100)], 1) for part in (50, 99)},
    }


class Nobody:
    """A keeper of leases that ignores every event."""

    def now_s(self) -> float:
        """Return monotonic seconds."""
        return monotonic()

    def dispatch(self, event: object) -> None:
        """Ignore it."""

    def ended(self, end: TurnEnd) -> None:
        """Ignore it."""


def passed_in_one_process() -> dict[str, float]:
    """Return the cost of passing a turn's messages within `serve`: no call by reference is cheaper."""
    keeper, best_s = Nobody(), float("inf")
    for _ in range(7):
        began_s = process_time()
        for number in range(SEAM_COUNT):
            ask = TurnAsk(
                turn_id=number,
                program_id="program-1",
                branch_id="",
                parent_branch_id="",
                parent_id="",
                tenant="",
                group_id="",
                program_class="",
                role="",
                prompt_bytes=PROMPT_BYTES,
                prefix=(),
                media=(),
                patience_s=None,
                waited_s=None,
                supersedes_id=None,
                avoid_replica_id=None,
                pinned_replica_id=None,
                wanted_replica_id=None,
                abortable=False,
                model="",
                hint=None,
            )
            granted = Lease(ask.turn_id, ask.program_id, 1, "10.0.0.1:8000", "http://10.0.0.1:8000", None, "home", 0.0)
            with OpenLease(keeper, granted) as lease:
                lease.started()
                lease.finished(PROMPT_TOKENS, OUTPUT_TOKENS, 0)
        best_s = min(best_s, process_time() - began_s)
    return {"cpu_us_per_turn": round(1e6 * best_s / SEAM_COUNT, 2)}


def cpu_s(pid: int) -> float:
    """Return the processor time that a process has used."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


async def measure(for_s: float, programs_count: int) -> dict[str, Any]:
    """Return all figures."""
    with TemporaryDirectory() as folder:
        options = ("--listen", "127.0.0.1:0", "--embedded-engines", "1", "--capacity-tokens", "100000000")
        async with thunderagent("scheduler", *options, log_path=Path(folder, "log")) as server:
            runtime = RemoteRuntime(CarriedTurns("bench", 1), RemoteSettings(patience_s=1e9))
            dialling = asyncio.create_task(Dialling(runtime, (server.url,), headers={}, ssl_context=None).run())
            while not runtime.replicas.open_ids:
                await asyncio.sleep(0.05)
            await alone(runtime, 200)
            found: dict[str, Any] = {"passed_in_one_process": passed_in_one_process()}
            found["one_after_another"] = figures(await alone(runtime, 2000))
            before_s, own_before_s, began_s = cpu_s(server.process.pid), process_time(), perf_counter()
            times_s = await deep(runtime, programs_count, for_s)
            elapsed_s, count = perf_counter() - began_s, len(times_s)
            found["as_many_as_go"] = {
                "programs": programs_count,
                "turns_per_s": round(count / elapsed_s),
                "scheduler_cpu_us_per_turn": round(1e6 * (cpu_s(server.process.pid) - before_s) / count, 1),
                "gateway_cpu_us_per_turn": round(1e6 * (process_time() - own_before_s) / count, 1),
                **figures(times_s),
            }
            for name, rate in (("at_half_of_that", count / elapsed_s / 2), ("at_4000", 4_000.0)):
                times_s = await paced(runtime, programs_count, rate, for_s)
                found[name] = {"turns_per_s": round(rate), **figures(times_s)}
            dialling.cancel()
            return found


def main() -> None:
    """Measure, print and save the figures."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--for-s", type=float, default=10.0, metavar="SECONDS", help="of each part (default: 10)")
    parser.add_argument("--programs", type=int, default=64, metavar="N", help="with turns at once (default: 64)")
    parser.add_argument("--keep", action="store_true", help="keep the figures in benchmarks/results")
    args = parser.parse_args()
    found = uvloop.run(measure(args.for_s, args.programs))
    for name, values in found.items():
        print(f"{name.replace('_', ' ')}: {', '.join(f'{key} {value}' for key, value in values.items())}")
    if args.keep:
        print(save_results("link", found))


if __name__ == "__main__":
    main()
