"""Replicas that misbehave on purpose, a client that sees every byte, and the proxy between them."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import re
import socket
import stat
import subprocess
import sys
import tempfile
import time
from asyncio.subprocess import PIPE, Process
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass, field
from itertools import count
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self, cast
from urllib.parse import urlsplit

from prometheus_client.parser import text_string_to_metric_families

from thunderagent.backends.vllm_plugin import PROGRAMS_PATH
from thunderagent.config import ENVIRONMENT_PREFIX, ServeConfig
from thunderagent.programs import invariants
from thunderagent.runtime.event_log import replay
from thunderagent.serving.building import build_runtime
from thunderagent.serving.serving import proxy

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Iterator, Mapping, Sequence

    from thunderagent.backends.discovery import Source
    from thunderagent.programs.scheduler import Scheduler
    from thunderagent.runtime import Runtime

ROOT = Path(__file__).parents[2]

DEADLINE_S = 25.0
"""Limit for every wait in a test."""

START_S = 120.0
"""Limit for the start of a process, which takes long on a busy machine."""

CHAT = "/v1/chat/completions"
Header = tuple[str, str]

HOP_BY_HOP = frozenset({"connection", "keep-alive", "transfer-encoding", "te", "trailer", "upgrade"})
OF_THE_PROXY = frozenset({"x-program-id", "x-program-id-source", "x-replica-id", "x-hold-ms"})
"""Headers that the proxy adds to an answer."""


async def until(condition: Callable[[], object], *, within_s: float = DEADLINE_S) -> None:
    """Poll for a condition that no event announces. Raises TimeoutError."""
    async with asyncio.timeout(within_s):
        while not condition():
            await asyncio.sleep(0.002)


def sockets_count() -> int:
    """Return the number of open sockets of this process."""
    count = 0
    for name in os.listdir("/dev/fd"):  # noqa: PTH208 - numbers, not paths
        with contextlib.suppress(OSError):
            count += stat.S_ISSOCK(os.fstat(int(name)).st_mode)
    return count


def end_to_end(headers: Iterable[Header], *dropped: str) -> list[Header]:
    """Return the headers that a proxy must keep, names in lower case, without the dropped ones.

    The request id, which the proxy adds if it is missing, has tests of its own.
    """
    without = HOP_BY_HOP | {"x-request-id"} | set(dropped)
    return [(name.lower(), value) for name, value in headers if name.lower() not in without]


# --- HTTP, byte by byte


def head_bytes(first_line: str, headers: Iterable[Header]) -> bytes:
    """Return a head, byte for byte as given."""
    lines = [first_line, *(f"{name}: {value}" for name, value in headers)]
    return ("\r\n".join(lines) + "\r\n\r\n").encode("utf-8", "surrogateescape")


def chunk(data: bytes) -> bytes:
    """Return one chunk of a chunked body."""
    return b"%x\r\n%s\r\n" % (len(data), data)


LAST_CHUNK = b"0\r\n\r\n"


def parse_head(head: bytes) -> tuple[str, list[Header]]:
    """Return the first line and the headers of a head."""
    first_line, *lines = head.decode("utf-8", "surrogateescape").rstrip("\r\n").split("\r\n")
    return first_line, [(name, value.strip()) for name, _, value in (line.partition(":") for line in lines)]


def value_of(headers: Iterable[Header], wanted: str) -> str | None:
    """Return the first value of a header."""
    return next((value for name, value in headers if name.lower() == wanted.lower()), None)


@dataclass
class Answer:
    """A client's answer. `whole` is False if the connection ended before the body did."""

    status: int
    reason: str
    headers: list[Header]
    body: bytes = b""
    chunks: list[bytes] = field(default_factory=list)
    whole: bool = False

    def header(self, name: str) -> str | None:
        return value_of(self.headers, name)

    def json(self) -> Any:
        return json.loads(self.body)

    @property
    def error(self) -> dict[str, Any]:
        """The error, after a check that it has the OpenAI schema."""
        error = self.json()["error"]
        assert set(error) == {"message", "type", "param", "code"}, error
        return dict(error)


class Wire:
    """A client's connection."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, host: str) -> None:
        self._reader = reader
        self._writer = writer
        self._host = host
        self._method = ""

    @classmethod
    @asynccontextmanager
    async def open(cls, url: str) -> AsyncIterator[Self]:
        parts = urlsplit(url)
        reader, writer = await asyncio.open_connection(parts.hostname, parts.port, limit=2**24)
        wire = cls(reader, writer, parts.netloc)
        try:
            yield wire
        finally:
            await wire.leave()

    def send(self, method: str, target: str, headers: Iterable[Header] = (), body: bytes = b"") -> None:
        """Send a request with Host and Content-Length, unless the caller sends the body in chunks."""
        self._method = method
        own = [("Host", self._host)]
        headers = list(headers)
        if value_of(headers, "Transfer-Encoding") is None and (body or method not in {"GET", "HEAD"}):
            own.append(("Content-Length", str(len(body))))
        self.send_raw(head_bytes(f"{method} {target} HTTP/1.1", [*own, *headers]) + body)

    def send_raw(self, data: bytes) -> None:
        self._writer.write(data)

    async def head(self) -> Answer:
        """Read up to the end of the head."""
        async with asyncio.timeout(DEADLINE_S):
            while True:
                first_line, headers = parse_head(await self._reader.readuntil(b"\r\n\r\n"))
                _, status, reason = first_line.split(" ", 2)
                if status != "100":
                    return Answer(int(status), reason, headers)

    async def body(self, answer: Answer) -> Answer:
        """Read the body, as far as it arrives."""
        async with asyncio.timeout(DEADLINE_S):
            try:
                if self._method == "HEAD" or answer.status in {204, 304}:
                    pass
                elif value_of(answer.headers, "Transfer-Encoding") == "chunked":
                    while data := await self.chunk():
                        answer.chunks.append(data)
                elif (length := answer.header("Content-Length")) is not None:
                    answer.chunks.append(await self._reader.readexactly(int(length)))
                else:
                    answer.chunks.append(await self._reader.read())
                answer.whole = True
            except asyncio.IncompleteReadError as error:
                answer.chunks.append(error.partial)
            except ConnectionError:
                pass
        answer.body = b"".join(answer.chunks)
        return answer

    async def chunk(self) -> bytes:
        """Read one chunk of a chunked body."""
        size = int((await self._reader.readuntil(b"\r\n")).split(b";")[0], 16)
        return (await self._reader.readexactly(size + 2))[:-2]

    async def answer(self) -> Answer:
        return await self.body(await self.head())

    async def leave(self) -> None:
        """Close the connection, as a client that leaves."""
        self._writer.close()
        with contextlib.suppress(ConnectionError):
            await self._writer.wait_closed()

    def end(self) -> None:
        """Close the sending side, and keep reading."""
        self._writer.write_eof()

    async def line(self) -> bytes:
        """Read the first line of a head, and the rest of it."""
        async with asyncio.timeout(DEADLINE_S):
            return (await self._reader.readuntil(b"\r\n\r\n")).partition(b"\r\n")[0]

    async def rest(self) -> bytes:
        """Read up to the end of the connection."""
        async with asyncio.timeout(DEADLINE_S):
            return await self._reader.read()

    def reset(self) -> None:
        """Reset the connection, as a killed client does."""
        self._writer.transport.abort()


async def exchange(
    url: str, method: str, target: str, headers: Iterable[Header] = (), body: bytes = b"", *, connection: str = "close"
) -> Answer:
    """Send one request on a connection of its own and read the whole answer."""
    async with Wire.open(url) as wire:
        wire.send(method, target, [*headers, ("Connection", connection)], body)
        return await wire.answer()


async def get(url: str, target: str) -> Answer:
    return await exchange(url, "GET", target)


async def post(url: str, target: str, body: object = b"", *headers: Header) -> Answer:
    """Post bytes as they are, or anything else as JSON."""
    content = body if isinstance(body, bytes) else json.dumps(body).encode()
    return await exchange(url, "POST", target, [("Content-Type", "application/json"), *headers], content)


def turn(program_id: str | None = None, /, *, content: str = "hello", **fields: Any) -> dict[str, Any]:
    """Return the body of a turn on the chat endpoint."""
    body = {"model": "simulated", "messages": [{"role": "user", "content": content}], **fields}
    return body if program_id is None else {**body, "program_id": program_id}


async def ask(url: str, program_id: str | None = None, /, **fields: Any) -> Answer:
    """Make one turn."""
    return await post(url, CHAT, turn(program_id, **fields))


def events_of(body: bytes) -> list[Any]:
    """Return the data of a stream's events: decoded JSON, or text such as `[DONE]`."""
    data = [event.removeprefix(b"data: ") for event in body.split(b"\n\n") if event]
    return [json.loads(text) if text.startswith(b"{") else text.decode() for text in data]


async def metrics_of(url: str) -> dict[str, dict[tuple[str, ...], float]]:
    """Return the samples of `/metrics` by name, then by their labels' values, in the labels' order."""
    samples: dict[str, dict[tuple[str, ...], float]] = {}
    for family in text_string_to_metric_families((await get(url, "/metrics")).body.decode()):
        for sample in family.samples:
            samples.setdefault(sample.name, {})[tuple(value for _, value in sorted(sample.labels.items()))] = (
                sample.value
            )
    return samples


async def metric(url: str, name: str, *labels: str) -> float:
    """Return one of our samples, by its name without the prefix; 0 for labels that have none yet."""
    return (await metrics_of(url))[f"thunderagent_{name}"].get(labels, 0.0)


async def until_metric(url: str, name: str, value: float, *labels: str, within_s: float = 30.0) -> float:
    """Wait until a sample has a value; return the wait in seconds."""
    began_s = time.monotonic()
    async with asyncio.timeout(within_s):
        while await metric(url, name, *labels) != value:
            await asyncio.sleep(0.005)
    return time.monotonic() - began_s


# --- a replica


USAGE = {"prompt_tokens": 10, "completion_tokens": 3, "total_tokens": 13, "prompt_tokens_details": {"cached_tokens": 4}}
ANSWER = {"id": "1", "object": "chat.completion", "choices": [{"index": 0, "message": {}}], "usage": USAGE}
SERVER_HEADERS: tuple[Header, ...] = (("date", "Thu, 20 Nov 2025 10:00:00 GMT"), ("server", "uvicorn"))
JSON_TYPE: Header = ("content-type", "application/json")
SSE_TYPE: Header = ("content-type", "text/event-stream; charset=utf-8")


def exposition(*capacity_tokens: object) -> str:
    """Return a vLLM exposition with a rank for each of these capacities."""
    return "".join(
        f'vllm:cache_config_info{{engine="{rank}",kv_cache_size_tokens="{tokens}"}} 1.0\n'
        f'vllm:num_requests_running{{engine="{rank}"}} 2.0\n'
        for rank, tokens in enumerate(capacity_tokens)
    )


class Call:
    """One request as a replica received it, and the writer for its answer."""

    def __init__(self, transport: asyncio.Transport, head: bytes, body: bytes) -> None:
        self.head = head
        self.first_line, self.headers = parse_head(head)
        self.method, self.target, _ = self.first_line.split(" ", 2)
        self.body = body
        self.left = asyncio.Event()
        """Set when the other side closes the connection."""
        self.transport = transport

    def json(self) -> Any:
        return json.loads(self.body)

    def header(self, name: str) -> str | None:
        return value_of(self.headers, name)

    def write(self, *data: bytes) -> None:
        if not self.transport.is_closing():
            self.transport.write(b"".join(data))

    async def write_apart(self, *pieces: bytes) -> None:
        """Write pieces so that they are likely to be read separately."""
        for piece in pieces:
            self.write(piece)
            await asyncio.sleep(0)
            await asyncio.sleep(0)

    def close(self) -> None:
        """Close the connection after the written bytes."""
        self.transport.close()


HEAD_LIMIT_S = 5.0
"""How long a connection to a fake replica may be open without a byte, as servers limit it."""


class _Peer(asyncio.Protocol):
    """One connection to a fake replica."""

    def __init__(self, replica: FakeReplica) -> None:
        self._replica = replica
        self._buffer = b""
        self._transport: asyncio.Transport | None = None
        self._call: Call | None = None
        self._task: asyncio.Task[None] | None = None
        # A poll that is cancelled while it connects may leave its connection open.
        self._head_limit = asyncio.get_running_loop().call_later(HEAD_LIMIT_S, self.abort)

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast("asyncio.Transport", transport)
        self._replica.peers.add(self)

    def data_received(self, data: bytes) -> None:
        self._head_limit.cancel()
        self._buffer += data
        if self._task is None:
            self._next_call()

    def connection_lost(self, exc: Exception | None) -> None:
        self._head_limit.cancel()
        self._replica.peers.discard(self)
        if self._call is not None:
            self._call.left.set()

    def abort(self) -> None:
        assert self._transport is not None
        self._transport.abort()

    def _next_call(self) -> None:
        head, blank_line, rest = self._buffer.partition(b"\r\n\r\n")
        if not blank_line:
            return
        _, headers = parse_head(head)
        if value_of(headers, "Transfer-Encoding") == "chunked":
            if not rest.endswith(LAST_CHUNK):
                return
            body, self._buffer = _joined_chunks(rest), b""
        else:
            length = int(value_of(headers, "Content-Length") or 0)
            if len(rest) < length:
                return
            body, self._buffer = rest[:length], rest[length:]
        assert self._transport is not None
        self._call = Call(self._transport, head, body)
        self._task = asyncio.create_task(self._answer(self._call))
        self._replica.tasks.add(self._task)

    async def _answer(self, call: Call) -> None:
        await self._replica.answer_call(call)
        assert self._task is not None
        self._replica.tasks.discard(self._task)
        self._task = None
        if self._buffer:
            self._next_call()


def _joined_chunks(data: bytes) -> bytes:
    body = b""
    while data:
        size, _, rest = data.partition(b"\r\n")
        length = int(size.split(b";")[0], 16)
        body, data = body + rest[:length], rest[length + 2 :]
    return body


def _bound_socket(port: int) -> socket.socket:
    """Return a socket bound to a port, which refuses connections until it listens."""
    bound = socket.socket()
    bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    bound.bind(("127.0.0.1", port))
    return bound


class FakeReplica:
    """A vLLM for the poller; for all others it behaves as a test sets."""

    def __init__(self, behaviour: Callable[[Call], Awaitable[None]], *, capacity_tokens: int = 1_000_000) -> None:
        self.behaviour = behaviour
        self.metrics: str | None = exposition(capacity_tokens)
        """The content of `/metrics`; None is 404."""
        self.healthy = True
        self.is_silent = False
        """Whether polls get no answer."""
        self.models: tuple[str, ...] | None = None
        """The models that it reports to the poller; None is 404."""
        self.plugin: dict[str, Any] | None = None
        """What its scheduler, which knows programs, reports; None is 404: it is vLLM's own."""
        self.plugin_status = "200 OK"
        """Of its answers."""
        self.plugin_asked: list[str] = []
        """Methods of the requests to that plugin."""
        self.plugin_ops: list[list[Any]] = []
        """The messages that it got."""
        self.calls: list[Call] = []
        """Requests other than polls."""
        self.polls_count = 0
        self.peers: set[_Peer] = set()
        self.tasks: set[asyncio.Task[None]] = set()
        self._socket = _bound_socket(0)
        self._server: asyncio.Server | None = None
        self.replica_id = "{}:{}".format(*self._socket.getsockname())
        self.url = f"http://{self.replica_id}"

    async def start(self) -> None:
        """Listen."""
        loop = asyncio.get_running_loop()
        self._server = await loop.create_server(lambda: _Peer(self), sock=self._socket)

    async def stop(self) -> None:
        """Refuse connections until the next start, and break open ones."""
        if self._server is None:
            return
        port = self._socket.getsockname()[1]
        self._server.close()
        for peer in list(self.peers):
            peer.abort()
        await self._server.wait_closed()
        self._server = None
        self._socket = _bound_socket(port)  # otherwise the kernel may give the port to another connection
        await until(lambda: not self.peers)

    async def end(self) -> None:
        """Stop for good, and raise the error of a behaviour."""
        await self.stop()
        self._socket.close()
        for task in self.tasks:
            task.cancel()
        for outcome in await asyncio.gather(*self.tasks, return_exceptions=True):
            if isinstance(outcome, Exception):
                raise outcome

    async def call(self, number: int = 0) -> Call:
        """Wait for a request."""
        await until(lambda: len(self.calls) > number)
        return self.calls[number]

    async def answer_call(self, call: Call) -> None:
        if self.is_silent and call.target in ("/health", "/metrics"):
            self.polls_count += 1
            return
        if call.target == "/health":
            self.polls_count += 1
            call.write(_whole_answer(b"", status="200 OK" if self.healthy else "503 Service Unavailable"))
        elif call.target == "/metrics":
            text = self.metrics
            status = "404 Not Found" if text is None else "200 OK"
            call.write(_whole_answer((text or "").encode(), status=status, headers=[("content-type", "text/plain")]))
        elif call.target == PROGRAMS_PATH:
            self.plugin_asked.append(call.method)
            if call.method == "POST" and self.plugin is not None:
                self.plugin_ops += call.json()["ops"]
            said = json.dumps(self.plugin).encode()
            fields = [JSON_TYPE, ("connection", call.header("Connection") or "keep-alive")]
            status = "404 Not Found" if self.plugin is None else self.plugin_status
            call.write(_whole_answer(said, status=status, headers=fields))
        elif call.target == "/v1/models" and call.header("User-Agent") == "thunderagent":
            said = json.dumps({"data": [{"id": name} for name in self.models or ()]}).encode()
            call.write(_whole_answer(said, status="404 Not Found" if self.models is None else "200 OK"))
        else:
            if call.header("User-Agent") != "thunderagent":  # else the poller asks what it is, after a poll that failed
                self.calls.append(call)
            await self.behaviour(call)


def _whole_answer(body: bytes, *, status: str = "200 OK", headers: Sequence[Header] = (JSON_TYPE,)) -> bytes:
    length = ("content-length", str(len(body)))
    return head_bytes(f"HTTP/1.1 {status}", [*SERVER_HEADERS, length, *headers]) + body


def answers(
    body: object = ANSWER, *, status: str = "200 OK", headers: Sequence[Header] = (JSON_TYPE,)
) -> Callable[[Call], Awaitable[None]]:
    """Behave: answer with these bytes, or this JSON, in one piece."""
    content = body if isinstance(body, bytes) else json.dumps(body).encode()

    async def behave(call: Call) -> None:
        answer = _whole_answer(content, status=status, headers=headers)
        call.write(answer if call.method != "HEAD" else answer.removesuffix(content))

    return behave


def stream_head(*headers: Header) -> bytes:
    """Return the head of a stream of events."""
    return head_bytes("HTTP/1.1 200 OK", [*SERVER_HEADERS, SSE_TYPE, *headers, ("transfer-encoding", "chunked")])


def streams(*pieces: bytes, headers: Sequence[Header] = ()) -> Callable[[Call], Awaitable[None]]:
    """Behave: stream these pieces, each a chunk of its own."""

    async def behave(call: Call) -> None:
        await call.write_apart(stream_head(*headers), *map(chunk, pieces), LAST_CHUNK)

    return behave


def writes(*pieces: bytes) -> Callable[[Call], Awaitable[None]]:
    """Behave: write these bytes as they are, and close the connection."""

    async def behave(call: Call) -> None:
        await call.write_apart(*pieces)
        call.close()

    return behave


class Gate:
    """Behave: write the first pieces, wait until `open()` is called or the other side leaves, write the rest."""

    def __init__(self, before: Sequence[bytes] = (), after: Sequence[bytes] = (_whole_answer(b"{}"),)) -> None:
        self._before = before
        self._after = after
        self._opened = asyncio.Event()

    def open(self) -> None:
        self._opened.set()

    async def __call__(self, call: Call) -> None:
        await call.write_apart(*self._before)
        waits = [asyncio.ensure_future(event.wait()) for event in (self._opened, call.left)]
        try:
            await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for wait in waits:
                wait.cancel()
        if not call.left.is_set():
            await call.write_apart(*self._after)


def event(data: Mapping[str, Any] | str) -> bytes:
    """Return one server-sent event as vLLM writes it."""
    text = data if isinstance(data, str) else json.dumps(data, separators=(",", ":"))
    return f"data: {text}\n\n".encode()


def word(text: str, finish_reason: str | None = None) -> bytes:
    """Return the event of one word."""
    choice = {"index": 0, "delta": {"content": text}, "finish_reason": finish_reason}
    return event({"id": "1", "object": "chat.completion.chunk", "choices": [choice]})


USAGE_EVENT = event({"id": "1", "object": "chat.completion.chunk", "choices": [], "usage": USAGE})
DONE = event("[DONE]")


@asynccontextmanager
async def fake_replica(
    behaviour: Callable[[Call], Awaitable[None]] | None = None, *, capacity_tokens: int = 1_000_000
) -> AsyncIterator[FakeReplica]:
    """Run a fake replica during the block."""
    replica = FakeReplica(behaviour or answers(), capacity_tokens=capacity_tokens)
    await replica.start()
    try:
        yield replica
    finally:
        await replica.end()


# --- processes


@asynccontextmanager
async def command(
    name: str, *options: str, settings: Mapping[str, str] | None = None, within: Sequence[str] = ()
) -> AsyncIterator[CommandProcess]:
    """Run a serving command of `thunderagent` during the block, which begins after its ready line.

    `settings` are environment variables, added to those here that are not settings; `within` is a command that runs
    it.
    """
    environment = _environment() | dict(settings or {})
    with tempfile.TemporaryDirectory() as folder:
        log_path = Path(folder, "stderr")
        with log_path.open("wb") as log:
            process = await asyncio.create_subprocess_exec(
                *(*within, sys.executable, "-m", "thunderagent", name, *options),
                stdout=PIPE,
                stderr=log,
                env=environment,
            )
        try:
            assert process.stdout is not None
            async with asyncio.timeout(START_S):
                line = (await process.stdout.readline()).decode()
            assert " ready at http" in line, line + log_path.read_text()
            yield CommandProcess(process, _url_in(line), log_path, line)
        finally:
            with contextlib.suppress(ProcessLookupError):
                process.kill()
            await process.communicate()


def _environment() -> dict[str, str]:
    """Return this environment without the project's settings."""
    return {name: value for name, value in os.environ.items() if not name.startswith(ENVIRONMENT_PREFIX)}


def _url_in(ready_line: str) -> str:
    return re.findall(r"https?://[\w.:]+\d", ready_line)[0]


@dataclass
class CommandProcess:
    """A running server command."""

    process: Process
    url: str
    _log_path: Path
    ready_line: str
    """Its first line on standard output."""

    @property
    def log(self) -> str:
        """Its standard error so far."""
        return self._log_path.read_text()

    async def exit_status(self, *, within_s: float = DEADLINE_S) -> int:
        async with asyncio.timeout(within_s):
            return await self.process.wait()

    async def ready(self) -> None:
        """Wait until it would serve a turn."""
        async with asyncio.timeout(START_S):
            while (await get(self.url, "/ready")).status != 200:
                await asyncio.sleep(0.01)


@asynccontextmanager
async def serve(*options: str, settings: Mapping[str, str] | None = None) -> AsyncIterator[CommandProcess]:
    """Run `thunderagent serve` on a free port during the block."""
    quick = ("--port", "0", "--poll-interval-s", "0.05")
    async with command("serve", *quick, *options, settings=settings) as process:
        yield process


@asynccontextmanager
async def engine(
    *options: str, kv_tokens: int = 16_000, port: int = 0, profile: str = "instant"
) -> AsyncIterator[CommandProcess]:
    """Run `thunderagent engine` during the block."""
    async with command("engine", *_engine_options(kv_tokens, port, profile), *options) as process:
        yield process


@contextmanager
def shared_engine(*options: str, kv_tokens: int = 16_000, double: str = "") -> Iterator[str]:
    """Run an engine that takes no time, or a module of `tests.doubles` that simulates one, and yield its URL.

    For a fixture shared by many tests. Such a fixture must not be a coroutine: pytest-asyncio ends it with each test,
    together with its loop's factory.
    """
    module = [f"tests.doubles.{double}"] if double else ["thunderagent", "engine"]
    command = [sys.executable, "-m", *module, *_engine_options(kv_tokens), *options]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=_environment(), cwd=ROOT) as process:
        try:
            assert process.stdout is not None
            yield _url_in(process.stdout.readline())
        finally:
            process.kill()


def _engine_options(kv_tokens: int, port: int = 0, profile: str = "instant") -> tuple[str, ...]:
    return ("--port", str(port), "--kv-tokens", str(kv_tokens), "--profile", profile, "--grace-s", "0")


# --- the proxy


@dataclass
class RunningProxy:
    """A proxy in this process."""

    url: str
    runtime: Runtime

    async def up(self, replicas_count: int) -> None:
        """Wait for this number of usable replicas."""
        pools = self.runtime.pools
        await until(
            lambda: sum(len(each.open_replicas) for each in pools.schedulers) == replicas_count, within_s=START_S
        )

    def leftovers(self) -> dict[str, int]:
        """Return every count that is zero while the proxy has no turn."""
        schedulers = self.runtime.pools.schedulers
        accounts = [account for scheduler in schedulers for account in scheduler.ledger.accounts.values()]
        return {
            "leases": self.runtime.leases_count,
            "held": self.runtime.held_count,
            "turns": len(self.runtime.pools.turns),
            "waiting": sum(scheduler.ledger.waiting_count for scheduler in schedulers),
            "anonymous_held": sum(len(scheduler.book.anonymous_held) for scheduler in schedulers),
            "turns_of_replicas": sum(account.turn_count for account in accounts),
            "anonymous_tokens": sum(account.other_tokens for account in accounts),
            "reasoning": sum(account.reasoning_count for account in accounts),
            "queued": sum(len(scheduler.queue.waiting.order) for scheduler in schedulers),
        }

    async def nothing_left(self, *, within_s: float = DEADLINE_S) -> None:
        """Wait until no turn is left, and check that all sums are right."""
        with contextlib.suppress(TimeoutError):
            await until(lambda: not any(self.leftovers().values()), within_s=within_s)
        assert not any(self.leftovers().values()), self.leftovers()
        for scheduler in self.runtime.pools.schedulers:
            invariants.check(scheduler)


@asynccontextmanager
async def running_proxy(
    *urls: str,
    up: int | None = None,
    sources: Sequence[Source] = (),
    load: dict[str, Any] | None = None,
    checked_every_count: int = 1,
    **config: Any,
) -> AsyncIterator[RunningProxy]:
    """Run a proxy in front of `urls`, and of what `sources` find, and wait for `up` of them (None: all URLs).

    It finds changes of `load` in its configuration at the next reload.

    At the end no turn and no socket may be left, and a replay of the events must make the same decisions with every
    invariant kept. A check takes as long as there are programs: after long loads check every so many events.
    """
    sockets_before = sockets_count()
    with tempfile.TemporaryDirectory() as folder:
        defaults = {
            "backends": urls,
            "port": 0,
            "tick_s": 0.05,
            "poll_interval_s": 0.05,
            "grace_s": 0.0,
            "event_log": Path(folder, "events"),
        }
        if not urls:
            defaults["embedded_engines"] = 0  # an empty list alone is refused
        if "policy" not in config:
            # Then a claim equals the context, to the token.
            defaults["policy_args"] = {"reserve_tokens": "0"}
        settings = ServeConfig.load(**{**defaults, **config})
        runtime, event_log = build_runtime(settings)
        assert event_log is not None
        assert settings.event_log is not None
        with contextlib.closing(event_log):

            def read_again() -> ServeConfig:
                return ServeConfig.load(**{**defaults, **config, **(load or {})})

            async with proxy(settings, runtime, settings.backends, further_sources=sources, load=read_again) as url:
                running = RunningProxy(url, runtime)
                if up != 0:  # otherwise continue at once: some replicas may have come up by now
                    await running.up(len(urls) if up is None else up)
                yield running
                await running.nothing_left()
        await until(lambda: sockets_count() <= sockets_before)
        with settings.event_log.open("rb") as lines:
            report = replay(lines, after_event=_checks(checked_every_count))
        assert report.difference is None, report.difference


def _checks(every_count: int) -> Callable[[Scheduler], None]:
    """Return what checks the invariants after every so many events."""
    numbers = count(1)

    def check(scheduler: Scheduler) -> None:
        if next(numbers) % every_count == 0:
            invariants.check(scheduler)

    return check


def cap(active_count: int) -> dict[str, Any]:
    """Return a configuration with this limit of active programs; the others' turns are held."""
    return {"policy": "cap", "policy_args": {"n": str(active_count)}}
