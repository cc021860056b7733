"""Measure what the proxy adds: an instant engine and a client on one core, the proxy or a bare relay on the other.

The proxy does its full work for every turn: identity, lease, ledger, usage, log line, metrics. It is compared with the
same proxy under the policy `passthrough`, a relay on aiohttp, a relay on the proxy's own protocols (the least that a
turn can cost), a gateway with its scheduler, and the stock routers of vLLM and SGLang, each pinned to the same core.
All are measured in turn several times in one run; ratios are reported with their 95 % intervals. The processor time of
each, including its children, is reported too: it is valid even if the core has other work. With `--before DIR` the
proxy of another checkout is measured beside ours, which shows what a change costs.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import subprocess
import sys
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from itertools import chain
from pathlib import Path
from statistics import median
from typing import Any

import uvloop

from benchmarks.environments import RealEngineError, ensure_environment
from benchmarks.instant import chat_requests, drive, instant_engine
from benchmarks.machine import save_results
from benchmarks.processes import die_with_parent, resident_mb
from thunderagent.provision.base import free_port
from thunderagent.serving.process import raise_file_limit
from thunderagent.simulator.figures.intervals import Interval, geometric

PROGRAMS_COUNT = 1000
LARGE_BODY_BYTES = 400_000
"""A context of about 100,000 tokens."""
START_S = 15.0

ROUTERS = {
    "vllm_router": ("vllm-router==0.1.17", ("-m", "vllm_router.launch_router")),
    "sglang_router": ("sglang-router==0.3.2", ("-m", "sglang_router.launch_router")),
}
"""The packages of each, in an environment of its own, and how its interpreter starts it."""

LOADS_OF = {"passthrough": ("whole",), **dict.fromkeys(("gateways", *ROUTERS), ("whole", "single"))}
"""The measurements of targets that are not measured in full."""


@asynccontextmanager
async def target(command: list[str], port: int, core: int, log: Path) -> AsyncIterator[subprocess.Popen[bytes]]:
    """Run a server pinned to a core during the block; it listens when the block begins."""
    with log.open("wb") as output:
        pinned = [*die_with_parent(), "taskset", "-c", str(core), *command]
        process = subprocess.Popen(pinned, stdout=output, stderr=output)
    try:
        deadline_s = asyncio.get_running_loop().time() + START_S
        while True:
            try:
                _, writer = await asyncio.open_connection("127.0.0.1", port)
                writer.close()
                break
            except OSError:
                if process.poll() is not None or asyncio.get_running_loop().time() > deadline_s:
                    raise RuntimeError(f"{command} did not start:\n{log.read_text()}") from None
                await asyncio.sleep(0.1)
        await asyncio.sleep(2.0)  # the first poll of its replica
        yield process
    finally:
        process.terminate()
        await asyncio.to_thread(process.wait, 40)


def commands(
    engine_port: int,
    proxy_port: int,
    relay_port: int,
    wire_port: int = 0,
    passthrough_port: int = 0,
    gateways_port: int = 0,
    before: tuple[Path, int] | None = None,
) -> dict[str, tuple[list[str], int]]:
    """Return each target's command and port; `before` is another checkout, and the port of its proxy."""
    upstream = f"http://127.0.0.1:{engine_port}"
    serve = ["-m", "thunderagent", "serve", "--backends", upstream, "--log-format", "json", "--port"]
    passes = [*serve, str(passthrough_port), "--policy", "passthrough"]
    earlier = {}
    if before is not None:
        folder, port = before[0].resolve(), before[1]
        there = ["env", "-C", str(folder), f"PYTHONPATH={folder}", sys.executable]
        earlier = {"before": ([*there, *serve, str(port)], port)}
    return {
        **earlier,
        "relay": ([sys.executable, "-m", "benchmarks.bare_relay", upstream, str(relay_port)], relay_port),
        "wire": ([sys.executable, "-m", "benchmarks.wire_relay", upstream, str(wire_port)], wire_port),
        "proxy": ([sys.executable, *serve, str(proxy_port)], proxy_port),
        "passthrough": ([sys.executable, *passes], passthrough_port),
        "gateways": ([sys.executable, *serve, str(gateways_port), "--gateways", "1"], gateways_port),
    }


def router_commands(engine_port: int) -> tuple[dict[str, tuple[list[str], int]], dict[str, str]]:
    """Return each router's command with its own policy, and its port; and why others cannot be installed."""
    found, missing = {}, {}
    for name, (requirement, start) in ROUTERS.items():
        try:
            python = ensure_environment(name, [requirement], "some 50 MB")
        except RealEngineError as error:
            missing[name] = str(error)
            continue
        port = free_port()
        options = {
            "--worker-urls": f"http://127.0.0.1:{engine_port}",
            "--host": "127.0.0.1",
            "--port": str(port),
            "--prometheus-port": str(free_port()),
            "--worker-startup-check-interval": "1",
            "--log-level": "error",
        }
        found[name] = ([str(python), *start, *chain.from_iterable(options.items())], port)
    return found, missing


class Counted:
    """Returns requests and counts them."""

    def __init__(self, requests: Callable[[], bytes]) -> None:
        """Return those of `requests`."""
        self._requests = requests
        self.count = 0

    def __call__(self) -> bytes:
        """Return the next one."""
        self.count += 1
        return self._requests()


def cpu_s(pid: int) -> float:
    """Return the processor time of a process and its children so far."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    children = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK") + sum(cpu_s(int(child)) for child in children)


async def throughput(ports: dict[str, int], pids: dict[str, int], args: argparse.Namespace) -> dict[str, Any]:
    """Measure whole answers at 16 connections, latency at one (also of large bodies), and streams, each in turn."""
    runs: dict[str, list[dict[str, float]]] = {}
    loads = {
        "whole": (16, False, 2048),
        "single": (1, False, 2048),
        "large": (1, False, LARGE_BODY_BYTES),
        "stream": (args.streams, True, 2048),
    }
    for _ in range(args.rounds):
        for load, (connections_count, stream, body_bytes) in loads.items():
            for name, port in ports.items():
                if load not in LOADS_OF.get(name, loads):
                    continue
                requests = chat_requests(port, body_bytes=body_bytes, stream=stream, programs_count=PROGRAMS_COUNT)
                began_s = cpu_s(pids[name]) if name in pids else 0.0
                counted = Counted(requests)
                figures = await drive(
                    port, counted, connections_count=connections_count, warmup_s=1.0, measure_s=args.seconds
                )
                if name in pids:
                    figures["cpu_us"] = (cpu_s(pids[name]) - began_s) / counted.count * 1e6
                runs.setdefault(f"{name}_{load}", []).append(figures)
                print(f"{name:11} {load:7} " + "  ".join(f"{key} {value:,.2f}" for key, value in figures.items()))
    return runs


def of_ratios(name: str, ratios: list[float]) -> dict[str, float]:
    """Return the median of ratios, their geometric mean, and the ends of its 95 % interval."""
    ends = zip(("mean", "low", "high"), geometric(ratios), strict=True)
    return {name: median(ratios), **{f"{name}_{end}": value for end, value in ends}}


def of_times(name: str, values: list[float]) -> dict[str, float]:
    """Return the median of times, their mean, and the ends of its 95 % interval."""
    times = Interval.of(values)
    return {name: median(values), **{f"{name}_{end}": getattr(times, end) for end in ("mean", "low", "high")}}


def summary(runs: dict[str, list[dict[str, float]]]) -> dict[str, float]:
    """Return the promised figures."""
    ratios, passthrough_ratios = (
        [
            ours["requests_per_s"] / relay["requests_per_s"]
            for ours, relay in zip(runs[f"{name}_whole"], runs["relay_whole"], strict=True)
        ]
        for name in ("proxy", "passthrough")
    )
    added, added_large = (
        [
            ours["p50_ms"] - direct["p50_ms"]
            for ours, direct in zip(runs[f"proxy_{load}"], runs[f"engine_{load}"], strict=True)
        ]
        for load in ("single", "large")
    )
    routed: dict[str, float] = {}
    for name in ROUTERS:
        if whole := runs.get(f"{name}_whole"):
            pairs = zip(runs["proxy_whole"], whole, strict=True)
            routed[f"{name}_requests_per_s"] = median(run["requests_per_s"] for run in whole)
            routed |= of_ratios(
                f"ratio_to_{name}", [ours["requests_per_s"] / its["requests_per_s"] for ours, its in pairs]
            )
    changed: dict[str, float] = {}
    for load in ("whole", "single", "large", "stream") if "before_whole" in runs else ():
        rate = "events_per_s" if load == "stream" else "requests_per_s"
        pairs = list(zip(runs[f"proxy_{load}"], runs[f"before_{load}"], strict=True))
        changed |= of_ratios(f"{load}_ratio_to_before", [now[rate] / then[rate] for now, then in pairs])
        changed |= of_ratios(f"{load}_cpu_ratio_to_before", [now["cpu_us"] / then["cpu_us"] for now, then in pairs])
    return {
        **routed,
        **changed,
        "proxy_requests_per_s": median(run["requests_per_s"] for run in runs["proxy_whole"]),
        "relay_requests_per_s": median(run["requests_per_s"] for run in runs["relay_whole"]),
        **of_ratios("ratio_to_relay", ratios),
        **of_ratios("passthrough_ratio_to_relay", passthrough_ratios),
        **of_times("added_p50_ms", added),
        **of_times("added_large_p50_ms", added_large),
        "wire_requests_per_s": median(run["requests_per_s"] for run in runs["wire_whole"]),
        **{
            f"{name}_{load}_cpu_us": median(run["cpu_us"] for run in runs[f"{name}_{load}"])
            for name in ("relay", "wire", "proxy")
            for load in ("whole", "large", "stream")
        },
        **{
            f"{name}_whole_cpu_us": median(run["cpu_us"] for run in runs[f"{name}_whole"])
            for name in LOADS_OF
            if f"{name}_whole" in runs
        },
        "stream_events_per_s": median(run["events_per_s"] for run in runs["proxy_stream"]),
        "relay_stream_events_per_s": median(run["events_per_s"] for run in runs["relay_stream"]),
    }


async def held_memory(engine_port: int, turns_count: int, log: Path) -> dict[str, float]:
    """Return the proxy's resident memory in MB before and while `turns_count` turns of as many programs are held."""
    port = free_port()
    serve = ["-m", "thunderagent", "serve", "--backends", f"http://127.0.0.1:{engine_port}", "--port", str(port)]
    command = [sys.executable, *serve, "--capacity-tokens", "10", "--policy", "cap", "--policy-arg", "n=1"]
    async with target(command, port, 0, log) as process:
        before_mb = resident_mb(process.pid)
        requests = chat_requests(port, body_bytes=2048, stream=False, programs_count=turns_count + 1)
        writers = []
        for _ in range(turns_count + 1):
            _, writer = await asyncio.open_connection("127.0.0.1", port)
            writer.write(requests())
            writers.append(writer)
        held_count = 0
        while held_count < turns_count:
            await asyncio.sleep(0.5)
            held_count = await held_turns(port)
        during_mb = resident_mb(process.pid)
        for writer in writers:
            writer.close()
        while await held_turns(port):
            await asyncio.sleep(0.2)
    return {"held_turns": held_count, "resident_before_mb": before_mb, "resident_held_mb": during_mb}


async def held_turns(port: int) -> int:
    """Return the number of turns that a proxy holds."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    writer.write(b"GET /queue?limit=1 HTTP/1.1\r\nHost: 127.0.0.1\r\nConnection: close\r\n\r\n")
    answer = await reader.read()
    writer.close()
    return int(json.loads(answer.partition(b"\r\n\r\n")[2])["turns_held_count"])


async def measure(args: argparse.Namespace) -> dict[str, Any]:
    """Run all measurements."""
    logs = Path(args.logs)
    logs.mkdir(parents=True, exist_ok=True)
    results: dict[str, Any] = {}
    async with instant_engine() as engine_port:
        if args.held:
            results["memory"] = await held_memory(engine_port, args.held, logs / "held.log")
            print(results["memory"])
        before = (Path(args.before), free_port()) if args.before else None
        starts = commands(engine_port, *(free_port() for _ in range(5)), before)
        if args.routers:
            routers, results["missing"] = await asyncio.to_thread(router_commands, engine_port)
            starts |= routers
        ports = {"engine": engine_port, **{name: port for name, (_, port) in starts.items()}}
        async with AsyncExitStack() as stack:
            pids = {}
            for name, (command, port) in starts.items():
                process = await stack.enter_async_context(target(command, port, 0, logs / f"{name}.log"))
                pids[name] = process.pid
            results["runs"] = await throughput(ports, pids, args)
    results["summary"] = summary(results["runs"])
    return results


def main() -> None:
    """Measure, print and save the figures."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seconds", type=float, default=5.0, help="length of one measurement")
    parser.add_argument("--rounds", type=int, default=3, help="measurements of each kind")
    parser.add_argument("--streams", type=int, default=16, help="streams at a time")
    parser.add_argument("--held", type=int, default=10_000, help="turns to hold for the memory figure; 0 skips it")
    parser.add_argument("--routers", action=argparse.BooleanOptionalAction, default=True, help="measure those, too")
    parser.add_argument("--before", help="another checkout, whose proxy is measured beside ours")
    parser.add_argument("--logs", default="out/overhead", help="folder for the servers' logs")
    parser.add_argument("--name", default="overhead", help="name of the result file")
    args = parser.parse_args()
    os.sched_setaffinity(0, {1})
    raise_file_limit()
    results = uvloop.run(measure(args))
    for name, value in {**results.get("memory", {}), **results["summary"]}.items():
        print(f"{name:28} {value:,.3f}")
    for name, why in results.get("missing", {}).items():
        print(f"{name:28} not measured: {why}")
    save_results(args.name, {"arguments": vars(args), **results})


if __name__ == "__main__":
    main()
