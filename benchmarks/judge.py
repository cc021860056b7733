"""Measure what a judge adds to turns: two proxies in front of an instant engine, one with a judge, block by block.

    scripts/bench judge

The judge answers after 30 s, never, with rubbish, with a flood, or with status 500; it is asked after every turn, as
far as its rate allows. `control` is a second proxy without a judge, and shows the machine's own noise. One client, one
connection, turns back to back: of each block the median and the 99th percentile count, and of all pairs of blocks the
median of their difference.
"""

from __future__ import annotations

import argparse
import asyncio
import sys
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from statistics import median
from typing import Any

import uvloop

from benchmarks.instant import chat_requests, drive, instant_engine
from benchmarks.machine import save_results
from benchmarks.overhead import target
from thunderagent.provision.base import free_port

BODIES_BYTES = {"small": 4_000, "large": 400_000}
PROGRAMS_COUNT = 50
LATE_S = 30.0
FLOOD_BYTES = 1_000_000

Answer = Callable[[asyncio.StreamWriter], Awaitable[None]]


def at_once(body: bytes, status: str = "200 OK") -> Answer:
    """Return a handler that gives this answer at once."""
    head = f"HTTP/1.1 {status}\r\nContent-Type: application/json\r\nContent-Length: {len(body)}\r\n\r\n".encode()

    async def answer(writer: asyncio.StreamWriter) -> None:
        writer.write(head + body)

    return answer


async def late(writer: asyncio.StreamWriter) -> None:
    """Answer late."""
    await asyncio.sleep(LATE_S)
    await at_once(b"{}")(writer)


async def never(writer: asyncio.StreamWriter) -> None:  # noqa: ARG001 - the signature of an answer
    """Never answer."""
    await asyncio.sleep(3600.0)


JUDGES: dict[str, Answer | None] = {
    "control": None,
    "after 30 s": late,
    "never": never,
    "rubbish": at_once(b"<html>I think so</html>"),
    "a flood": at_once(b"x" * FLOOD_BYTES),
    "status 500": at_once(b"oh no", "500 Internal Server Error"),
}


@asynccontextmanager
async def judge_double(answer: Answer) -> AsyncIterator[int]:
    """Run a judge with this handler during the block; yield its port."""
    tasks: set[asyncio.Task[None] | None] = set()

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        tasks.add(asyncio.current_task())
        try:
            while True:
                head = await reader.readuntil(b"\r\n\r\n")
                length = int(head.lower().partition(b"content-length:")[2].partition(b"\r\n")[0])
                await reader.readexactly(length)
                await answer(writer)
                await writer.drain()
        except (asyncio.IncompleteReadError, ConnectionError, asyncio.CancelledError):
            writer.close()

    server = await asyncio.start_server(serve, "127.0.0.1", 0)
    try:
        async with server:
            yield server.sockets[0].getsockname()[1]
            for task in tasks:
                if task is not None:
                    task.cancel()
    finally:
        await asyncio.gather(*(task for task in tasks if task is not None), return_exceptions=True)


async def compared(engine_port: int, name: str, args: argparse.Namespace) -> dict[str, Any]:
    """Measure a proxy with this judge beside one without a judge."""
    answer = JUDGES[name]
    serve = ["-m", "thunderagent", "serve", "--backends", f"http://127.0.0.1:{engine_port}", "--log-format", "json"]
    serve += ["--log-level", "warning"]
    async with AsyncExitStack() as stack:
        asking: list[str] = []
        if answer is not None:
            port = await stack.enter_async_context(judge_double(answer))
            asking = ["--judge-url", f"http://127.0.0.1:{port}/v1", "--judge-model", "j", "--judge-every-turns", "1"]
            asking += ["--judge-rate-per-s", str(args.rate_per_s)]
        ports = []
        for place, options in enumerate(([], asking)):
            ports.append(free_port())
            command = [sys.executable, *serve, "--port", str(ports[-1]), *options]
            log = Path(args.logs) / f"{name.replace(' ', '-')}-{place}.log"
            await stack.enter_async_context(target(command, ports[-1], 0, log))
        figures: dict[str, Any] = {}
        for size, body_bytes in BODIES_BYTES.items():
            pairs = []
            for _ in range(args.rounds):
                pair = [await block(port, body_bytes, args.seconds) for port in ports]
                pairs.append(pair)
            for figure in ("p50_ms", "p99_ms"):
                added = [after[figure] - before[figure] for before, after in pairs]
                figures[f"{size}_added_{figure}"] = round(median(added), 3)
            figures[f"{size}_plain_p50_ms"] = round(median(before["p50_ms"] for before, _ in pairs), 3)
    return figures


async def block(port: int, body_bytes: int, seconds: float) -> dict[str, float]:
    """Return the figures of a block of turns at one proxy."""
    requests = chat_requests(port, body_bytes=body_bytes, stream=False, programs_count=PROGRAMS_COUNT)
    return await drive(port, requests, connections_count=1, warmup_s=0.05, measure_s=seconds)


async def measure(args: argparse.Namespace) -> dict[str, Any]:
    """Measure with every judge in turn."""
    Path(args.logs).mkdir(parents=True, exist_ok=True)
    found = {}
    async with instant_engine() as engine_port:
        for name in JUDGES:
            found[name] = await compared(engine_port, name, args)
            print(f"{name:12} " + "  ".join(f"{key} {value:.2f}" for key, value in found[name].items()), flush=True)
    return found


def main() -> None:
    """Measure, print and save the figures."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=30, help="pairs of blocks of each kind")
    parser.add_argument("--seconds", type=float, default=0.25, help="length of a block")
    parser.add_argument("--rate-per-s", type=float, default=20.0, help="questions a second, at most")
    parser.add_argument("--logs", default="out/judge", help="folder for the proxies' logs")
    args = parser.parse_args()
    found = uvloop.run(measure(args))
    save_results("judge", {"arguments": vars(args), "judges": found})


if __name__ == "__main__":
    main()
