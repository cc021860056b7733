"""Open thousands of streams at once on one proxy process: measure the resources of a stream, and the delays.

An engine sends an event into each stream every second: 5,000 streams share 5,000 tokens a second, the total of an
engine under such load. At the 20 to 30 ms of a stream alone, neither client nor proxy would keep up on a core. Engine
and clients share one core, the proxy has the other.

Waves: all streams directly; through a bare aiohttp relay; through the proxy, while others request `/health` and short
turns; through the same proxy, with half of the clients cut off at once; and once more to their end.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import AsyncExitStack, asynccontextmanager
from functools import partial
from hashlib import blake2b
from itertools import count
from pathlib import Path
from random import Random
from time import perf_counter
from typing import Any, cast

import uvloop

from benchmarks.drip import DripEngine, Plan, event_of, whole
from benchmarks.load import percentile
from benchmarks.machine import save_results
from benchmarks.overhead import commands, target
from benchmarks.processes import resident_mb
from thunderagent.provision.base import free_port
from thunderagent.serving.process import raise_file_limit

CAPACITY_TOKENS = 1_000_000_000
PROBES_PER_S = 5.0
OPENED_PER_S = 500.0
TEXT = "w17 w4 " * 4
USAGE = {"prompt_tokens": 500, "completion_tokens": 40, "total_tokens": 540}
SETTLE_S = 6.0
"""The proxy keeps idle connections to engines for 4 s."""

LATE_S = 0.05
"""Limit for the delay of an event."""

SHORT_ANSWER = {"id": "1", "model": "drip", "choices": [{"index": 0, "text": TEXT}], "usage": USAGE}


PROXIED = ("proxy", "again")
"""Waves of whole streams through one process of the proxy."""

Streams = list[tuple[str, "StreamClient"]]
"""Clients by the names of their streams."""


class Dripped:
    """The engine's streams: a digest of what was sent into each, so that clients can compare."""

    def __init__(self, gap_s: float) -> None:
        """Drip an event every `gap_s`."""
        self._gap_s = gap_s
        self._rng = Random(0)
        self.digests: dict[str, blake2b] = {}
        self.is_over = False
        """Whether the streams may end."""

    def plan(self, path: str, body: bytes) -> Plan:  # noqa: ARG002 - the engine's
        """Return the stream that a body asks for, which begins within one gap; or a short answer without a stream."""
        asked = json.loads(body)
        if not asked["stream"]:
            return Plan(answer=whole(200, "application/json", json.dumps(SHORT_ANSWER).encode()))
        name = asked["messages"][0]["content"].split()[0]
        return Plan(self._rng.random() * self._gap_s, events=self._events(name), gap_s=self._gap_s)

    def _events(self, name: str) -> Iterator[bytes]:
        digest = self.digests[name] = blake2b(digest_size=16)
        for number in count():
            choices = [{"index": 0, "delta": {"content": f"{TEXT}{number}"}}]
            data = event_of({"id": name, "choices": choices, "sent_s": perf_counter()})
            digest.update(data)
            yield data
            if self.is_over:
                break
        data = event_of({"id": name, "choices": [], "usage": USAGE}) + b"data: [DONE]\n\n"
        digest.update(data)
        yield data


class StreamClient(asyncio.Protocol):
    """Reads one chunked stream: its digest, and the delay of each event."""

    def __init__(self, request: bytes, delays_s: list[float]) -> None:
        """Send a request; the delays of all clients go to one list."""
        self._request = request
        self._delays_s = delays_s
        self._buffer = b""
        self._head = b""
        self.digest = blake2b(digest_size=16)
        self.begun = asyncio.Event()
        self.ended = asyncio.Event()
        self.whole = False

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Send it."""
        self.transport = cast("asyncio.Transport", transport)
        self.transport.write(self._request)

    def data_received(self, data: bytes) -> None:
        """Handle bytes of the answer."""
        now_s = perf_counter()
        self._buffer += data
        if not self._head:
            head, found, rest = self._buffer.partition(b"\r\n\r\n")
            if not found:
                return
            if not head.startswith(b"HTTP/1.1 200"):
                self.transport.abort()
                return
            self._head, self._buffer = head, rest
            self.begun.set()
        while (end := self._buffer.find(b"\r\n")) >= 0:
            size = int(self._buffer[:end], 16)
            if len(self._buffer) < end + size + 4:
                return
            payload, self._buffer = self._buffer[end + 2 : end + 2 + size], self._buffer[end + 4 + size :]
            self.digest.update(payload)
            for part in payload.split(b'"sent_s":')[1:]:
                self._delays_s.append(now_s - float(part.partition(b"}")[0]))
            if not size:
                self.whole = True
                self.transport.close()
                return

    def connection_lost(self, exc: Exception | None) -> None:  # noqa: ARG002 - the protocol's
        """Note the end."""
        self.begun.set()
        self.ended.set()


def request_of(port: int, program_id: str, *, stream: bool) -> bytes:
    """Return the request of a stream, or of a short answer."""
    fields: dict[str, Any] = {"model": "drip", "stream": stream}
    if stream:
        fields["stream_options"] = {"include_usage": True}
    fields["messages"] = [{"role": "user", "content": f"{program_id} {'w123 ' * 400}"}]
    body = json.dumps(fields).encode()
    head = (
        f"POST /v1/chat/completions HTTP/1.1\r\nHost: 127.0.0.1:{port}\r\nContent-Type: application/json\r\n"
        f"X-Program-ID: {program_id}\r\nContent-Length: {len(body)}\r\nConnection: close\r\n\r\n"
    )
    return head.encode() + body


async def ask(port: int, request: bytes) -> bytes:
    """Send a request on a connection of its own and return the answer's body. Raises RuntimeError unless it is 200."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    try:
        writer.write(request)
        answer = await reader.read()
    finally:
        writer.close()
    head, _, body = answer.partition(b"\r\n\r\n")
    if not head.startswith(b"HTTP/1.1 200"):
        raise RuntimeError(f"no answer, or a wrong one: {answer[:300]!r}")
    return body


async def leases_count(port: int) -> int:
    """Return the number of leases that turns hold at a proxy."""
    for line in (await ask(port, _get("/metrics"))).splitlines():
        if line.startswith(b"thunderagent_leases_active "):
            return int(float(line.split()[1]))
    raise RuntimeError("the proxy does not say how many leases there are")


class Server:
    """The resource use of a proxy's or a relay's process."""

    def __init__(self, pid: int, port: int) -> None:
        """Watch this process."""
        self.pid = pid
        self.port = port

    def cpu_s(self) -> float:
        """Return its processor time so far."""
        fields = Path(f"/proc/{self.pid}/stat").read_text().rpartition(")")[2].split()
        return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")

    def sockets_count(self) -> int:
        """Return the number of its open sockets."""
        links = Path(f"/proc/{self.pid}/fd").iterdir()
        return sum(_link(link).startswith("socket:") for link in links)

    def resident_mb(self) -> float:
        """Return its resident memory."""
        return resident_mb(self.pid)


def _link(path: Path) -> str:
    try:
        return str(path.readlink())
    except OSError:  # closed meanwhile
        return ""


@asynccontextmanager
async def probing(make: Callable[[int], bytes], port: int) -> AsyncIterator[list[float]]:
    """Repeat a request during the block; yield the growing list of times in ms."""
    took_ms: list[float] = []

    async def once(number: int) -> None:
        began_s = perf_counter()
        await ask(port, make(number))
        took_ms.append((perf_counter() - began_s) * 1e3)

    async def forever() -> None:
        number = 0
        async with asyncio.TaskGroup() as group:
            while True:
                group.create_task(once(number))
                number += 1
                await asyncio.sleep(1 / PROBES_PER_S)

    task = asyncio.create_task(forever())
    try:
        yield took_ms
    finally:
        task.cancel()
        await asyncio.wait([task])
        if not task.cancelled():
            task.result()


async def open_all(
    port: int, dripped: Dripped, names: Iterator[str], streams_count: int
) -> tuple[Streams, list[float]]:
    """Open a number of streams at `OPENED_PER_S`; return the clients by name once each has its response head."""
    loop, delays_s, clients = asyncio.get_running_loop(), list[float](), Streams()
    dripped.is_over = False
    began_s = perf_counter()
    for number, name in zip(range(streams_count), names, strict=False):
        client = StreamClient(request_of(port, name, stream=True), delays_s)
        await loop.create_connection(lambda client=client: client, "127.0.0.1", port)  # type: ignore[misc]
        clients.append((name, client))
        await asyncio.sleep(max(0.0, began_s + number / OPENED_PER_S - perf_counter()))
    for _, client in clients:
        await client.begun.wait()
    return clients, delays_s


def delays(delays_s: list[float]) -> dict[str, float]:
    """Return figures of the delays, in ms."""
    return {
        "event_p50_ms": (percentile(delays_s, 0.5) or 0.0) * 1e3,
        "event_p99_ms": (percentile(delays_s, 0.99) or 0.0) * 1e3,
        "event_max_ms": max(delays_s) * 1e3,
        "late_ratio": sum(delay_s > LATE_S for delay_s in delays_s) / len(delays_s),
        "events_count": len(delays_s),
    }


def exact_count(clients: Streams, dripped: Dripped) -> int:
    """Return how many streams arrived complete, byte for byte as the engine sent them."""
    return sum(client.whole and client.digest.digest() == dripped.digests[name].digest() for name, client in clients)


async def all_ended(clients: Streams, dripped: Dripped) -> None:
    """Let the streams end."""
    dripped.is_over = True
    for _, client in clients:
        await client.ended.wait()


async def direct_wave(port: int, dripped: Dripped, names: Iterator[str], args: argparse.Namespace) -> dict[str, Any]:
    """Run the streams directly to the engine."""
    clients, delays_s = await open_all(port, dripped, names, args.streams)
    del delays_s[:]
    await asyncio.sleep(args.seconds / 2)
    await all_ended(clients, dripped)
    return {"exact_count": exact_count(clients, dripped), **delays(delays_s)}


async def whole_wave(
    server: Server, dripped: Dripped, names: Iterator[str], args: argparse.Namespace, *pages: str
) -> dict[str, Any]:
    """Run all streams to their end; while all are open, measure, and request short turns and `pages`."""
    before_mb, before_count = server.resident_mb(), server.sockets_count()
    clients, delays_s = await open_all(server.port, dripped, names, args.streams)
    del delays_s[:]
    cpu_s, began_s = server.cpu_s(), perf_counter()
    open_counts, resident, took_ms = [], [], {}
    async with AsyncExitStack() as stack:
        turns = partial(_short_turn, server.port)
        took_ms["short_turn"] = await stack.enter_async_context(probing(turns, server.port))
        for page in pages:
            took_ms[page.strip("/")] = await stack.enter_async_context(probing(partial(_get, page), server.port))
        while perf_counter() - began_s < args.seconds:
            await asyncio.sleep(1.0)
            open_counts.append(sum(client.begun.is_set() and not client.ended.is_set() for _, client in clients))
            resident.append(server.resident_mb())
        measured_s, figures = perf_counter() - began_s, delays(delays_s)
        cpu_ratio = (server.cpu_s() - cpu_s) / measured_s
    await all_ended(clients, dripped)
    await asyncio.sleep(SETTLE_S)
    return {
        "open_at_once_count": min(open_counts),
        "exact_count": exact_count(clients, dripped),
        **figures,
        "events_per_s": figures["events_count"] / measured_s,
        **{f"{name}_p50_ms": percentile(each, 0.5) for name, each in took_ms.items()},
        **{f"{name}_p99_ms": percentile(each, 0.99) for name, each in took_ms.items()},
        "cpu_ratio": cpu_ratio,
        "cpu_us_per_event": cpu_ratio * measured_s / figures["events_count"] * 1e6,
        "resident_before_mb": before_mb,
        "resident_open_mb": max(resident),
        "resident_kb_per_stream": (max(resident) - before_mb) * 1024 / args.streams,
        "resident_after_mb": server.resident_mb(),
        "sockets_before_count": before_count,
        "sockets_after_count": server.sockets_count(),
    }


async def cut_wave(
    server: Server, engine: DripEngine, dripped: Dripped, names: Iterator[str], args: argparse.Namespace
) -> dict[str, Any]:
    """Cut off half of the clients at once; the others run to their end."""
    clients, _ = await open_all(server.port, dripped, names, args.streams)
    assert await leases_count(server.port) == len(clients)
    cut, stay = clients[::2], clients[1::2]
    left_before, cpu_s, began_s = engine.left_count, server.cpu_s(), perf_counter()
    for _, client in cut:
        client.transport.abort()
    while engine.left_count - left_before < len(cut):
        await asyncio.sleep(0.002)
    engine_heard_s = perf_counter() - began_s
    while await leases_count(server.port) > len(stay):
        await asyncio.sleep(0.01)
    leases_back_s, cpu_s = perf_counter() - began_s, server.cpu_s() - cpu_s
    await asyncio.sleep(args.seconds / 4)
    await all_ended(stay, dripped)
    await asyncio.sleep(SETTLE_S)
    return {
        "cut_count": len(cut),
        "engine_heard_within_s": engine_heard_s,
        "leases_back_within_s": leases_back_s,
        "cpu_s": cpu_s,
        "exact_of_the_others_count": exact_count(stay, dripped),
        "others_count": len(stay),
        "resident_after_mb": server.resident_mb(),
        "sockets_after_count": server.sockets_count(),
    }


async def measure(args: argparse.Namespace) -> dict[str, Any]:
    """Run all waves, each server alone."""
    logs = Path(args.logs)
    logs.mkdir(parents=True, exist_ok=True)
    dripped = Dripped(args.gap)
    engine = DripEngine(dripped.plan, CAPACITY_TOKENS)
    names = (f"stream-{number}" for number in count())
    results: dict[str, Any] = {}

    def found(wave: str, figures: dict[str, Any]) -> None:
        results[wave] = figures
        print(f"--- {wave}", *(f"{name:28} {value:,.3f}" for name, value in figures.items()), sep="\n", flush=True)

    async with engine.serving() as engine_port:
        found("direct", await direct_wave(engine_port, dripped, names, args))
        command, port = commands(engine_port, free_port(), free_port())["relay"]
        async with target(command, port, 0, logs / "relay.log") as process:
            found("relay", await whole_wave(Server(process.pid, port), dripped, names, args))
        command, port = commands(engine_port, free_port(), free_port())["proxy"]
        async with target(command, port, 0, logs / "proxy.log") as process:
            server = Server(process.pid, port)
            for wave in PROXIED if args.no_cut else (PROXIED[0], "cut", PROXIED[1]):
                if wave == "cut":
                    figures = await cut_wave(server, engine, dripped, names, args)
                else:
                    figures = await whole_wave(server, dripped, names, args, "/health")
                figures["leases_after_count"] = await leases_count(port)
                figures["turns_left_at_engine_count"] = engine.turns_count
                found(wave, figures)
                await ask(port, _release_all())
    found(
        "ratios", {f"{wave}_cpu_ratio_to_relay": _cpu_us(results, wave) / _cpu_us(results, "relay") for wave in PROXIED}
    )
    return results


def _cpu_us(results: dict[str, Any], wave: str) -> float:
    return float(results[wave]["cpu_us_per_event"])


def _short_turn(port: int, number: int) -> bytes:
    return request_of(port, f"short-{number}", stream=False)


def _get(path: str, _: int = 0) -> bytes:
    return f"GET {path} HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n".encode()


def _release_all() -> bytes:
    body = b'{"all": true}'
    head = "POST /programs/release HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\nConnection: close\r\n"
    return f"{head}Content-Length: {len(body)}\r\n\r\n".encode() + body


def main() -> None:
    """Measure, print and save the figures."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--streams", type=int, default=5000, help="streams open at once")
    parser.add_argument("--gap", type=float, default=1.0, help="seconds between two events of a stream")
    parser.add_argument("--seconds", type=float, default=40.0, help="how long all are open and measured, each time")
    parser.add_argument("--no-cut", action="store_true", help="cut no clients off")
    parser.add_argument("--logs", default="out/streams", help="folder for the servers' logs")
    parser.add_argument("--name", default="streams", help="name of the result file")
    args = parser.parse_args()
    os.sched_setaffinity(0, {1})
    raise_file_limit()
    load = os.getloadavg()
    results = uvloop.run(measure(args))
    save_results(args.name, {"arguments": vars(args), **results, "load_average": load})


if __name__ == "__main__":
    main()
