"""Count the calls of the package's functions, and the files that they are in, for one turn and what goes with it.

A proxy, a scheduler and a gateway run in this process, before an engine that answers at once. Each walk is taken
several times, once all is warm; the count that most of them have is that of the walk alone, without a report that came
between. A coroutine or generator that goes on counts as a call, as it costs one. Calls in C are not counted.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import sys
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import AsyncExitStack, asynccontextmanager, contextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from types import FrameType
from typing import Any

import thunderagent
from benchmarks.instant import instant_engine, stream_pieces
from thunderagent.cli.log_output import configure_logging
from thunderagent.compilation import build_kind
from thunderagent.config import ServeConfig
from thunderagent.leases import TurnAsk
from thunderagent.runtime import Runtime
from thunderagent.scale.gateway.remote import RemoteRuntime
from thunderagent.scaling import gateway, scheduler
from thunderagent.serving.building import build_runtime
from thunderagent.serving.serving import proxy

PACKAGE = f"{Path(thunderagent.__file__).parent}/"
REPEATS_COUNT = 9
SETTLE_S = 0.05
"""A walk has ended when nothing was called for so long after its answer."""
RARELY_S = 3600.0
"""Period of what would come between."""
STREAM_WORDS_COUNT = 2
BY_THE_CLOCK = frozenset(
    {"LoopLag.run", "OpenFiles.run", "History.run", "Dialling._look", "Links.run", "collect_garbage"}
)
"""What runs in periods, whatever comes: neither it nor what it calls is counted."""
WALKS = ("turn", "stream of two tokens", "release", "poll", "gateway lease")


@dataclass(frozen=True, slots=True)
class Call:
    """One call of a function of the package."""

    file: str
    """Below the package."""
    name: str
    depth: int
    """How many calls of the package's functions are around it."""


@dataclass(slots=True)
class Walk:
    """The calls of one walk, in order."""

    calls: list[Call] = field(default_factory=list)

    @property
    def files_count(self) -> int:
        """How many files the calls are in."""
        return len({call.file for call in self.calls})


@contextmanager
def counted() -> Iterator[Walk]:
    """Record all calls of the package's functions in this thread during the block, without what runs by the clock."""
    walk, depth, is_beside = Walk(), 0, False

    def profile(frame: FrameType, event: str, _: object) -> None:
        nonlocal depth, is_beside
        code = frame.f_code
        if not code.co_filename.startswith(PACKAGE):
            return
        if event == "call":
            if not depth:
                is_beside = code.co_qualname in BY_THE_CLOCK
            if not is_beside:
                walk.calls.append(Call(code.co_filename.removeprefix(PACKAGE), code.co_qualname, depth))
            depth += 1
        elif event == "return":
            depth -= 1

    sys.setprofile(profile)
    try:
        yield walk
    finally:
        sys.setprofile(None)


def usual(walks: list[Walk]) -> Walk:
    """Return a walk with the count of calls that most have; of two such counts the lower one."""
    counts = Counter(len(walk.calls) for walk in walks)
    wanted = min(counts, key=lambda count: (-counts[count], count))
    return next(walk for walk in walks if len(walk.calls) == wanted)


class Client:
    """A connection to the proxy that sends a request and reads its whole answer."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Use an open connection."""
        self._reader = reader
        self._writer = writer

    async def post(self, path: str, body: dict[str, Any]) -> None:
        """Send a request. Raises RuntimeError for an answer other than 200."""
        data = json.dumps(body, separators=(",", ":")).encode()
        head = (
            f"POST {path} HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\nContent-Length: {len(data)}\r\n\r\n"
        )
        self._writer.write(head.encode() + data)
        answer = (await self._reader.readuntil(b"\r\n\r\n")).lower()
        if b" 200 " not in answer.partition(b"\r\n")[0]:
            raise RuntimeError(answer.decode())
        if b"\r\ntransfer-encoding: chunked\r\n" in answer:
            await self._reader.readuntil(b"\r\n0\r\n\r\n")
        else:
            await self._reader.readexactly(int(answer.partition(b"\r\ncontent-length:")[2].partition(b"\r\n")[0]))

    async def turn(self, program_id: str, *, stream: bool = False) -> None:
        """Take a turn of a program."""
        message = {"role": "user", "content": "word " * 400}
        options = {"stream": True, "stream_options": {"include_usage": True}} if stream else {}
        await self.post(
            "/v1/chat/completions", {"model": "m", "program_id": program_id, "messages": [message], **options}
        )


@asynccontextmanager
async def client_of(url: str) -> AsyncIterator[Client]:
    """Connect to a proxy during the block."""
    reader, writer = await asyncio.open_connection("127.0.0.1", int(url.rpartition(":")[2]))
    try:
        yield Client(reader, writer)
    finally:
        writer.close()


async def walk_of(take: Callable[[], Awaitable[None]]) -> Walk:
    """Take a walk once, with all that it leaves to be done after its answer."""
    with counted() as walk:
        await take()
        seen_count = -1
        while len(walk.calls) != seen_count:
            seen_count = len(walk.calls)
            await asyncio.sleep(SETTLE_S)
    return walk


async def until(condition: Callable[[], object]) -> None:
    """Wait for a condition that no event announces. Raises TimeoutError."""
    async with asyncio.timeout(60):
        while not condition():
            await asyncio.sleep(0.01)


def config_of(engine_port: int, **options: Any) -> ServeConfig:
    """Return a configuration in which as little as possible happens beside turns."""
    return ServeConfig.load(
        backends=(f"http://127.0.0.1:{engine_port}",),
        port=0,
        poll_interval_s=RARELY_S,
        tick_s=RARELY_S,
        grace_s=0.0,
        **options,
    )


async def walk_serve(engine_port: int) -> dict[str, list[Walk]]:
    """Take the walks of a proxy that schedules by itself."""
    config = config_of(engine_port)
    runtime, _ = build_runtime(config)
    walks: dict[str, list[Walk]] = {name: [] for name in WALKS[:4]}
    async with proxy(config, runtime, config.backends) as url, client_of(url) as client:
        await until(lambda: runtime.scheduler.open_replicas)
        for number in range(-1, REPEATS_COUNT):  # all of the first round is a warm-up
            program_id = f"program-{number}"
            for warm in (False, True):
                await client.turn(program_id, stream=warm)
            round_of = {
                "turn": partial(client.turn, program_id),
                "stream of two tokens": partial(client.turn, program_id, stream=True),
                "release": partial(client.post, "/programs/release", {"program_id": program_id}),
                "poll": partial(poll, runtime),
            }
            for name, take in round_of.items():
                walk = await walk_of(take)
                if number >= 0:
                    walks[name].append(walk)
    return walks


async def poll(runtime: Runtime) -> None:
    """Have the replica polled once, outside its period; its counters stand still."""
    assert runtime.served.ask_anew is not None
    runtime.served.ask_anew(runtime.replicas.open_ids)


async def walk_link(engine_port: int) -> list[Walk]:
    """Take leases by a link, as a gateway does: the calls of both its ends."""
    async with AsyncExitStack() as stack:
        url, _, _ = await stack.enter_async_context(scheduler(config_of(engine_port)))
        config = ServeConfig.load(schedulers=(url,), port=0, grace_s=0.0)
        _, runtime, _, _ = await stack.enter_async_context(gateway(config))
        await until(lambda: runtime.replicas.open_ids)
        walks = [await walk_of(partial(lease, runtime)) for _ in range(REPEATS_COUNT + 1)]
        return walks[1:]


async def lease(runtime: RemoteRuntime) -> None:
    """Take a lease and end it."""
    ask = TurnAsk(turn_id=runtime.new_turn_id(), program_id="program", prompt_bytes=2000)
    with await runtime.lease(ask) as open_lease:
        open_lease.started()
        open_lease.finished(500, 40, 400)


async def measure() -> dict[str, Walk]:
    """Return the walks by name."""
    async with AsyncExitStack() as stack:
        engine_port = await stack.enter_async_context(instant_engine(stream_pieces(STREAM_WORDS_COUNT)))
        walks = {name: usual(each) for name, each in (await walk_serve(engine_port)).items()}
        walks["gateway lease"] = usual(await walk_link(engine_port))
        return walks


def print_table(walks: dict[str, Walk]) -> None:
    """Print a row for each walk."""
    print(f"{'one':<22}{'calls':>6}{'files':>7}")
    for name, walk in walks.items():
        print(f"{name:<22}{len(walk.calls):>6}{walk.files_count:>7}")


def print_calls(name: str, walk: Walk) -> None:
    """Print the calls of a walk in order, each below the one that made it."""
    print(f"\n{name}: {len(walk.calls)} calls, {walk.files_count} files")
    for call in walk.calls:
        print(f"{'  ' * max(0, call.depth)}{call.name}  {call.file}")


def main() -> None:
    """Count, and print the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--calls", action="store_true", help="print each call, below the one that made it")
    args = parser.parse_args()
    if build_kind() != "interpreted":
        parser.error("compiled functions cannot be counted; run it in a checkout")
    configure_logging("error", as_json=True)
    walks = asyncio.run(measure())
    print_table(walks)
    if args.calls:
        for name, walk in walks.items():
            print_calls(name, walk)


if __name__ == "__main__":
    main()
