"""The poller's reports to its listener about real servers that start late, hang, fail, die and come back."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import socket
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, cast

import pytest
import structlog
import uvloop
from aiohttp import web

from tests.loopback import free_ports
from thunderagent.backends import backend_of
from thunderagent.backends.asking import Answers, Asker, Failure, Found, RankReading, next_poll_after_s
from thunderagent.backends.base import NOTHING_READ, ReplicaReading
from thunderagent.backends.poller import Poller, PollerSettings, ReplicaEndpoint
from thunderagent.errors import ConfigurationError

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable

INTERVAL_S = 0.03
DEADLINE_S = 3.0
METRICS = """\
vllm:cache_config_info{kv_cache_size_tokens="16000"} 1.0
vllm:num_requests_running 3.0
"""
READING = ReplicaReading(capacity_tokens=16_000, running_count=3)


async def eventually(condition: Callable[[], object]) -> None:
    """Wait for a condition that no event announces, up to the test's own time limit."""
    while not condition():
        await asyncio.sleep(0.005)


@dataclass
class Engine:
    """A server on a fixed loopback port, whose answers a test sets."""

    port: int
    health_status: int = 200
    metrics: str | bytes = METRICS
    metrics_status: int = 200
    hangs: bool = False
    health_count: int = 0
    models: list[str] = field(default_factory=list)
    _runner: web.AppRunner | None = None

    async def start(self) -> None:
        app = web.Application()
        app.router.add_get("/health", self._health)
        app.router.add_get("/metrics", self._metrics)
        app.router.add_get("/v1/models", self._models)
        self._runner = web.AppRunner(app, shutdown_timeout=0)
        await self._runner.setup()
        await web.TCPSite(self._runner, "127.0.0.1", self.port, reuse_address=True).start()

    async def stop(self) -> None:
        if self._runner is not None:
            await self._runner.cleanup()
            self._runner = None

    async def _health(self, request: web.Request) -> web.Response:
        self.health_count += 1
        status = self.health_status
        await self._hang()
        return web.Response(status=status)

    async def _metrics(self, request: web.Request) -> web.Response:
        await self._hang()
        body = self.metrics if isinstance(self.metrics, bytes) else self.metrics.encode()
        return web.Response(status=self.metrics_status, body=body, content_type="text/plain")

    async def _models(self, request: web.Request) -> web.Response:
        return web.json_response({"data": [{"id": name} for name in self.models]})

    async def _hang(self) -> None:
        await eventually(lambda: not self.hangs)


@dataclass
class Recorder:
    """A listener that remembers its reports, and lets a test wait for one."""

    heard: list[tuple[str, ...]] = field(default_factory=list)
    readings: list[tuple[str, ReplicaReading]] = field(default_factory=list)
    up_s: dict[str, float] = field(default_factory=dict)
    news: asyncio.Event = field(default_factory=asyncio.Event)

    def replica_polled(self, replica_id: str, reading: ReplicaReading) -> None:
        self.readings.append((replica_id, reading))
        self.news.set()

    def replica_up(self, replica_id: str) -> None:
        self.heard.append(("up", replica_id))
        self.up_s[replica_id] = asyncio.get_running_loop().time()
        self.news.set()

    def may_be_silent(self, replica_id: str) -> bool:
        return False

    def heard_ago_s(self, replica_id: str) -> float:
        return float("inf")

    def replica_lost(self, replica_id: str, why: str) -> None:
        self.heard.append(("lost", replica_id, why))
        self.news.set()

    def replica_down(self, replica_id: str, why: str, *, is_silent: bool) -> None:
        self.heard.append(("down", replica_id, why))
        self.news.set()

    async def until(self, condition: Callable[[], object]) -> None:
        async with asyncio.timeout(10):
            while not condition():
                self.news.clear()
                await self.news.wait()

    async def until_heard(self, *what: str, times: int = 1) -> None:
        await self.until(lambda: sum(each[: len(what)] == what for each in self.heard) >= times)

    async def polls(self, replica_id: str, count: int) -> None:
        """Wait for `count` more readings of a replica."""
        target = self._polled_count(replica_id) + count
        await self.until(lambda: self._polled_count(replica_id) >= target)

    def _polled_count(self, replica_id: str) -> int:
        return sum(each == replica_id for each, _ in self.readings)


@pytest.fixture
async def engines() -> AsyncIterator[Callable[[], Engine]]:
    """Make engines, each on its own free port and not yet started; stop them at the end."""
    made: list[Engine] = []

    def make() -> Engine:
        made.append(Engine(port=free_ports(1)[0]))
        return made[-1]

    yield make
    for engine in made:
        engine.hangs = False
        await engine.stop()


def test_a_poll_that_is_cancelled_leaves_no_connection_open() -> None:
    """Even if it is while it closes those that the engine has closed meanwhile."""
    transports: set[asyncio.BaseTransport] = set()

    class Answering(asyncio.Protocol):
        def connection_made(self, transport: asyncio.BaseTransport) -> None:
            self.transport = cast("asyncio.Transport", transport)
            transports.add(transport)

        def connection_lost(self, exc: Exception | None) -> None:
            transports.discard(self.transport)

        def data_received(self, data: bytes) -> None:
            self.transport.write(b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\n{}")

    async def main() -> None:
        server = await asyncio.get_running_loop().create_server(Answering, "127.0.0.1", 0)
        port = server.sockets[0].getsockname()[1]
        asker = Asker(f"http://127.0.0.1:{port}", backend_of("vllm"), DEADLINE_S)
        async with server:
            for passes_count in range(25):
                async with asker.client("", None) as client:
                    await asker.ask(client)
                    for transport in list(transports):
                        transport.close()
                    await asyncio.sleep(0.005)
                    asking = asyncio.create_task(asker.ask(client))
                    for _ in range(passes_count):
                        await asyncio.sleep(0)
                    asking.cancel()
                    await asyncio.wait([asking])
                async with asyncio.timeout(5):
                    await eventually(lambda: not transports)

    gc.collect()
    gc.disable()  # it would close what is lost
    try:
        uvloop.run(main())
    finally:
        gc.enable()


async def found_in(answer: bytes) -> Found:
    """Poll an engine that answers everything so."""

    async def behaviour(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        writer.write(answer)
        writer.close()

    async with await asyncio.start_server(behaviour, "127.0.0.1", 0) as server:
        url = f"http://u:secret@127.0.0.1:{server.sockets[0].getsockname()[1]}"
        asker = Asker(url, backend_of("sglang"), DEADLINE_S)
        async with asker.client("", None) as client:
            return await asker.found(await asker.ask(client), [None], finds_ranks=False)


@pytest.mark.parametrize("answer", [b"HTTP/1.1 200 OK\r\nX: " + b"a" * 20_000 + b"\r\n\r\n", b"not\nHTTP\r\n\r\n"])
async def test_an_answer_that_cannot_be_read_is_a_failure(answer: bytes) -> None:
    """Its text is short, one line, and without the login of the URL."""
    failure = (await found_in(answer)).failure
    assert failure is not None
    assert not failure.is_silence
    assert len(failure.why) < 300
    assert "\n" not in failure.why
    assert "secret" not in failure.why


@pytest.mark.parametrize("charset", ["hex", "punycode", "raw_unicode_escape", "utf-16"])
@pytest.mark.parametrize(
    ("name", "names", "capacity_tokens"), [(b"m", ("m",), 7), (b"\xff", ("\ufffd",), 7), (rb"\ud800", (), None)]
)
async def test_an_engine_is_read_as_utf_8_whatever_charset_it_declares(
    charset: str, name: bytes, names: tuple[str, ...], capacity_tokens: int | None
) -> None:
    """Python has charsets that are no text, and some whose text cannot be encoded."""
    body = b'{"max_total_num_tokens": 7, "data": [{"id": "%b"}]}' % name
    head = f"HTTP/1.1 200 OK\r\nContent-Type: text/plain; charset={charset}\r\nContent-Length: {len(body)}\r\n\r\n"
    found = await found_in(head.encode() + body)
    assert (found.failure, found.models, found.info_capacity_tokens) == (None, names, capacity_tokens)


@pytest.mark.parametrize("where", ["u:%D0%BF@127.0.0.1", "a..b", f"{'x' * 70}.example"])
async def test_a_url_that_cannot_be_asked_is_a_failure(where: str) -> None:
    asker = Asker(f"http://{where}:1", backend_of("vllm"), DEADLINE_S)
    async with asker.client("", None) as client:
        assert (await asker.ask(client)).failure is not None


def test_a_host_that_is_no_name_is_refused() -> None:
    with pytest.raises(ConfigurationError, match="its URL is none"):
        Asker("http://xn--:1", backend_of("vllm"), DEADLINE_S)


def endpoint(engine: Engine, replica_id: str = "a") -> ReplicaEndpoint:
    return ReplicaEndpoint(replica_id, f"http://127.0.0.1:{engine.port}/", backend_of("vllm"))


@contextlib.asynccontextmanager
async def polling(
    *replicas: ReplicaEndpoint,
    interval_s: float = INTERVAL_S,
    deadline_s: float = DEADLINE_S,
    silence_limit_s: float = 0.0,
    recorder: Recorder | None = None,
) -> AsyncIterator[tuple[Poller, Recorder]]:
    recorder = recorder or Recorder()
    poller = Poller(
        recorder, PollerSettings(interval_s=interval_s, deadline_s=deadline_s, silence_limit_s=silence_limit_s)
    )
    for replica in replicas:
        poller.add(replica)
    task = asyncio.create_task(poller.run())
    try:
        yield poller, recorder
    finally:
        task.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await task
        assert not [each for each in asyncio.all_tasks() if each.get_name().startswith("poll ")]


async def test_a_healthy_replica_is_polled_then_up_once(engines: Callable[[], Engine]) -> None:
    """The first success brings it up, its reading comes first, and later successes are only readings."""
    engine = engines()
    await engine.start()
    async with polling(endpoint(engine)) as (poller, recorder):
        await recorder.polls("a", 3)
        assert recorder.heard == [("up", "a")]
        assert set(recorder.readings) == {("a", READING)}
        assert repr(poller) == "<Poller 1 up of 1>"


async def test_the_reading_comes_before_the_coming_up(engines: Callable[[], Engine]) -> None:
    """The capacity is known before grants begin when a replica comes up."""

    class Grants(Recorder):
        def replica_up(self, replica_id: str) -> None:
            assert self.readings == [(replica_id, READING)]
            super().replica_up(replica_id)

    engine = engines()
    await engine.start()
    async with polling(endpoint(engine), recorder=Grants()) as (_, recorder):
        await recorder.until_heard("up", "a")


async def test_a_replica_that_starts_late_is_reported_once_and_then_comes_up(
    engines: Callable[[], Engine],
) -> None:
    """A missing server at the start is reported once, not at every poll; its start is noticed."""
    engine = engines()
    async with polling(endpoint(engine)) as (_, recorder):
        await recorder.until_heard("down")
        await asyncio.sleep(5 * INTERVAL_S)
        assert recorder.heard == [("down", "a", "connection refused")]
        await engine.start()
        await recorder.until_heard("up")
        assert [what for what, *_ in recorder.heard] == ["down", "up"]


async def test_a_replica_that_dies_is_down_and_can_come_back(engines: Callable[[], Engine]) -> None:
    """Death and return are each reported once, and there are no readings in between."""
    engine = engines()
    await engine.start()
    async with polling(endpoint(engine)) as (poller, recorder):
        await recorder.until_heard("up", "a")
        await engine.stop()
        await recorder.until_heard("down", "a")
        reading_count = len(recorder.readings)
        assert repr(poller) == "<Poller 0 up of 1>"
        await engine.start()
        await recorder.until_heard("up", "a", times=2)
        assert [what for what, *_ in recorder.heard] == ["up", "down", "up"]
        assert len(recorder.readings) == reading_count + 1


async def test_a_replica_that_comes_back_with_another_model_is_asked_for_it(engines: Callable[[], Engine]) -> None:
    """Its list of before would have it in another pool: it is asked before it is up."""
    engine = engines()
    engine.models = ["old"]
    await engine.start()
    async with polling(endpoint(engine)) as (_, recorder):
        await recorder.until_heard("up", "a")
        await engine.stop()
        await recorder.until_heard("down", "a")
        before_count = len(recorder.readings)
        engine.models = ["new"]
        await engine.start()
        await recorder.until_heard("up", "a", times=2)
        assert [reading.models for _, reading in recorder.readings[before_count:]] == [("new",)]


async def test_health_503_takes_a_replica_down_after_two_polls(engines: Callable[[], Engine]) -> None:
    """One failed poll is forgiven; the second takes it down, whatever its metrics say."""
    engine = engines()
    await engine.start()
    async with polling(endpoint(engine)) as (_, recorder):
        await recorder.until_heard("up", "a")
        engine.health_status = 503
        asked_count = engine.health_count
        await recorder.until_heard("down", "a")
        assert recorder.heard[-1] == ("down", "a", "/health answered 503")
        assert engine.health_count >= asked_count + 2


async def test_failures_that_are_not_in_a_row_do_not_add_up(engines: Callable[[], Engine]) -> None:
    """A success between two failures starts the count again."""
    engine = engines()
    await engine.start()
    async with polling(endpoint(engine), interval_s=60) as (poller, recorder):
        await recorder.until_heard("up", "a")
        for _ in range(3):
            engine.health_status = 503
            asked_count = engine.health_count
            poller.suspect("a")
            await eventually(lambda: engine.health_count > asked_count)  # noqa: B023  awaited here and now
            engine.health_status = 200
            poller.suspect("a")
            await recorder.polls("a", 1)
        assert recorder.heard == [("up", "a")]


async def ask_a_hanging(engine: Engine, poller: Poller, times: int) -> None:
    """Have an engine asked so often without an answer."""
    engine.hangs = True
    for _ in range(times):
        asked_count = engine.health_count
        poller.suspect("a")
        await eventually(lambda: engine.health_count > asked_count)  # noqa: B023  awaited here and now


async def test_a_replica_that_is_silent_for_two_polls_stays_up(engines: Callable[[], Engine]) -> None:
    """A loaded engine delays polls."""
    engine = engines()
    await engine.start()
    async with polling(endpoint(engine), interval_s=60, deadline_s=0.1) as (poller, recorder):
        await recorder.until_heard("up", "a")
        for _ in range(2):
            await ask_a_hanging(engine, poller, 2)
            engine.hangs = False
            poller.suspect("a")
            await recorder.polls("a", 1)
        assert recorder.heard == [("up", "a")]


async def test_a_replica_that_is_silent_for_three_polls_is_down_and_lost_after_the_limit(
    engines: Callable[[], Engine],
) -> None:
    """It may compute what it has. While nothing changes it is lost once."""
    engine = engines()
    await engine.start()
    async with polling(endpoint(engine), interval_s=60, deadline_s=0.1, silence_limit_s=30) as (poller, recorder):
        await recorder.until_heard("up", "a")
        await ask_a_hanging(engine, poller, 3)
        await recorder.until_heard("down", "a")
        assert [what for what, *_ in recorder.heard] == ["up", "down"]
        poller.settings = replace(poller.settings, silence_limit_s=0.2)
        await ask_a_hanging(engine, poller, 4)
        await recorder.until_heard("lost", "a")
        engine.hangs = False
        poller.suspect("a")
        await recorder.until_heard("up", "a", times=2)
        assert [what for what, *_ in recorder.heard] == ["up", "down", "lost", "up"]


async def test_a_replica_that_takes_new_weights_is_silent_after_the_limit(engines: Callable[[], Engine]) -> None:
    """It answers nothing meanwhile; down, it would count as restarted, and its suspension as over."""

    class Suspended(Recorder):
        def may_be_silent(self, replica_id: str) -> bool:
            return True

    engine = engines()
    await engine.start()
    async with polling(endpoint(engine), interval_s=60, deadline_s=0.1, silence_limit_s=30, recorder=Suspended()) as (
        poller,
        recorder,
    ):
        await recorder.until_heard("up", "a")
        await ask_a_hanging(engine, poller, 5)
        assert recorder.heard == [("up", "a")]
        poller.settings = replace(poller.settings, silence_limit_s=0.2)
        await ask_a_hanging(engine, poller, 2)
        await recorder.until_heard("lost", "a")


async def test_polls_without_an_answer_while_turns_have_bytes_are_no_silence(engines: Callable[[], Engine]) -> None:
    """Its streams flow."""

    class Flowing(Recorder):
        def heard_ago_s(self, replica_id: str) -> float:
            return 1.0

    engine = engines()
    await engine.start()
    async with polling(endpoint(engine), interval_s=60, deadline_s=0.1, recorder=Flowing()) as (poller, recorder):
        await recorder.until_heard("up", "a")
        await ask_a_hanging(engine, poller, 6)
        engine.hangs = False
        poller.suspect("a")
        await recorder.polls("a", 1)
        assert recorder.heard == [("up", "a")]


async def test_a_host_that_does_not_even_connect_has_nothing_in_flight() -> None:
    """Its kernel would accept for a process that is busy. A listener whose queue is full drops what comes, as it."""
    full = socket.socket()
    full.bind(("127.0.0.1", 0))
    full.listen(0)
    fills = [socket.socket() for _ in range(4)]
    for each in fills:
        each.setblocking(False)
        each.connect_ex(full.getsockname())
    asker = Asker(f"http://127.0.0.1:{full.getsockname()[1]}", backend_of("vllm"), 0.3)
    try:
        async with asker.client("", None) as client:
            failure = (await asker.ask(client)).failure
        assert failure is not None
        assert (failure.is_silence, failure.is_unreached) == (True, True)
    finally:
        for each in (*fills, full):
            each.close()


async def test_a_replica_that_hangs_is_down_after_the_limit(engines: Callable[[], Engine]) -> None:
    """Silence is a failure in the end, and the report says how long the poller waited."""
    engine = engines()
    await engine.start()
    async with polling(endpoint(engine), deadline_s=0.5) as (_, recorder):
        await recorder.until_heard("up", "a")
        engine.hangs = True
        await recorder.until_heard("down", "a", "no answer within 0.5 s")
        engine.hangs = False
        await recorder.until_heard("up", "a", times=2)


async def test_slow_replicas_delay_no_other(engines: Callable[[], Engine]) -> None:
    """While 120 replicas hang until their deadline, another is polled as if alone."""
    slow, quick = engines(), engines()
    slow.hangs = True
    await slow.start()
    await quick.start()
    hanging = [endpoint(slow, f"slow-{number}") for number in range(120)]
    async with polling(*hanging, endpoint(quick, "quick"), deadline_s=30) as (_, recorder):
        await eventually(lambda: slow.health_count == len(hanging))
        began_s = asyncio.get_running_loop().time()
        await recorder.polls("quick", 10)
        assert asyncio.get_running_loop().time() - began_s < 5
        assert {replica_id for replica_id, _ in recorder.readings} == {"quick"}


@pytest.mark.parametrize("garbage", [b"<html>what?</html>", b"\xff\xfe\x00", b""])
async def test_garbage_metrics_are_no_reason_to_be_down(engines: Callable[[], Engine], garbage: bytes) -> None:
    """A healthy replica with unreadable metrics is up, reads as nothing, and is logged at each change."""
    engine = engines()
    engine.metrics = garbage
    await engine.start()
    with structlog.testing.capture_logs() as logs:
        async with polling(endpoint(engine)) as (_, recorder):
            await recorder.polls("a", 3)
            assert {reading for _, reading in recorder.readings} == {NOTHING_READ}
            engine.metrics = METRICS
            await recorder.until(lambda: recorder.readings[-1][1] == READING)
            assert recorder.heard == [("up", "a")]
    assert [(log["log_level"], log.get("trouble")) for log in logs] == [
        ("warning", "unreadable"),
        ("info", None),
    ]


async def test_metrics_that_fail_are_no_reason_to_be_down(engines: Callable[[], Engine]) -> None:
    """A healthy replica whose metrics answer 404 is up and reads as nothing; the log says why, once."""
    engine = engines()
    engine.metrics_status = 404
    await engine.start()
    with structlog.testing.capture_logs() as logs:
        async with polling(endpoint(engine)) as (_, recorder):
            await recorder.polls("a", 3)
            assert {reading for _, reading in recorder.readings} == {NOTHING_READ}
            assert recorder.heard == [("up", "a")]
    assert [(log["trouble"], log["why"]) for log in logs] == [("unavailable", "/metrics answered 404")]


async def test_an_unknown_capacity_is_logged(engines: Callable[[], Engine]) -> None:
    """All else is read from metrics without a capacity, and the log raises the alarm once."""
    engine = engines()
    engine.metrics = "vllm:num_requests_running 3.0\n"
    await engine.start()
    with structlog.testing.capture_logs() as logs:
        async with polling(endpoint(engine)) as (_, recorder):
            await recorder.polls("a", 3)
            assert {reading for _, reading in recorder.readings} == {ReplicaReading(running_count=3)}
    assert [(log["replica_id"], log["trouble"]) for log in logs] == [("a", "capacity unknown")]


async def test_suspect_polls_at_once_and_a_refused_connection_is_down_at_once(
    engines: Callable[[], Engine],
) -> None:
    """A failed request does not wait for the next interval, and a dead replica not for a second failure."""
    engine = engines()
    await engine.start()
    async with polling(endpoint(engine), interval_s=60) as (poller, recorder):
        await recorder.until_heard("up", "a")
        poller.suspect("a")
        await recorder.polls("a", 1)
        assert recorder.heard == [("up", "a")]
        await engine.stop()
        poller.suspect("a")
        await recorder.until_heard("down", "a", "connection refused")


@contextlib.asynccontextmanager
async def a_poll_under_way(engine: Engine) -> AsyncIterator[tuple[Poller, Recorder]]:
    """Poll an engine that is up, once more: it does not answer yet."""
    await engine.start()
    async with polling(endpoint(engine), interval_s=60, deadline_s=30) as (poller, recorder):
        await recorder.until_heard("up", "a")
        engine.hangs = True
        poller.suspect("a")
        await eventually(lambda: engine.health_count == 2)
        yield poller, recorder


async def test_suspecting_while_a_poll_is_under_way_polls_once_more(engines: Callable[[], Engine]) -> None:
    """A poll that began before the request failed is no answer to the suspicion."""
    engine = engines()
    async with a_poll_under_way(engine) as (poller, recorder):
        poller.suspect("a")
        engine.hangs = False
        await recorder.polls("a", 2)


async def test_a_poll_from_before_a_refusal_does_not_bring_a_replica_up(engines: Callable[[], Engine]) -> None:
    """The engine answered it, and then died."""
    engine = engines()
    async with a_poll_under_way(engine) as (poller, recorder):
        poller.refused("a")
        engine.hangs, engine.health_status = False, 503
        await eventually(lambda: engine.health_count == 3)
        assert [what for what, *_ in recorder.heard] == ["up", "down"]


async def test_a_poll_that_metrics_answer_ends_a_row_of_failures() -> None:
    """An engine that answers for its metrics is not silent, so that poll is no failure."""
    recorder = Recorder()
    poller = Poller(recorder, PollerSettings(down_after_failures=2))
    poller.add(ReplicaEndpoint("a", "http://engine", backend_of("vllm")))
    (watch,) = poller.watches
    reading = RankReading(None, (16_000,))
    failure, silence = Failure("/health answered 503", is_answer=True), Failure("no answer", is_silence=True)
    for found in (
        Found(0.0, readings=(reading,)),
        Found(0.0, failure, readings=(reading,)),
        Found(0.0, silence, readings=(reading,)),
        Found(0.0, failure, readings=(reading,)),
    ):
        poller.told(watch.number, found)
    assert recorder.heard == [("up", "a")]
    poller.told(watch.number, Found(0.0, failure, readings=(reading,)))
    assert recorder.heard == [("up", "a"), ("down", "a", "/health answered 503")]


async def test_replicas_come_and_go_while_it_runs(engines: Callable[[], Engine]) -> None:
    """One added at run time is polled; a removed one gives no more reports, and may return as new."""
    first, second = engines(), engines()
    await first.start()
    await second.start()
    async with polling(endpoint(first, "a")) as (poller, recorder):
        await recorder.until_heard("up", "a")
        poller.add(endpoint(second, "b"))
        await recorder.until_heard("up", "b")
        poller.remove("a")
        first_count = recorder.readings.count(("a", READING))
        await recorder.polls("b", 5)
        assert recorder.readings.count(("a", READING)) == first_count
        poller.add(endpoint(first, "a"))
        await recorder.until_heard("up", "a", times=2)


async def test_a_listener_may_remove_the_replica_it_hears_of(engines: Callable[[], Engine]) -> None:
    """Removed in the middle of its own poll, a replica is not reported up afterwards, and its task ends."""

    class Removes(Recorder):
        def replica_polled(self, replica_id: str, reading: ReplicaReading) -> None:
            super().replica_polled(replica_id, reading)
            poller.remove(replica_id)

    engine = engines()
    await engine.start()
    async with polling(endpoint(engine), recorder=Removes()) as (poller, recorder):
        await recorder.until(lambda: recorder.readings)
        await asyncio.sleep(3 * INTERVAL_S)
        assert recorder.heard == []
        assert engine.health_count == 1
        assert repr(poller) == "<Poller 0 up of 0>"


async def test_a_poll_of_a_removed_replica_ends_by_itself_and_says_nothing(engines: Callable[[], Engine]) -> None:
    """A client that is cancelled while it connects may leak a socket, so nothing is cancelled."""

    def polls() -> list[asyncio.Task[object]]:
        return [task for task in asyncio.all_tasks() if task.get_name().startswith("poll ")]

    engine = engines()
    await engine.start()
    async with polling(endpoint(engine)) as (poller, recorder):
        await recorder.until(lambda: recorder.heard)
        engine.hangs = True
        before_count = engine.health_count
        await eventually(lambda: engine.health_count > before_count)
        (task,) = polls()
        heard = list(recorder.heard)
        poller.remove("a")
        await asyncio.sleep(0)
        assert not task.done()
        engine.hangs = False
        await eventually(task.done)
        assert not task.cancelled()
        assert recorder.heard == heard
        assert engine.health_count == before_count + 1


async def test_unknown_replicas_are_suspected_and_removed_in_vain() -> None:
    """A request may fail on a replica that was removed meanwhile: no error."""
    async with polling() as (poller, recorder):
        poller.suspect("gone")
        poller.remove("gone")
        await asyncio.sleep(0)
        assert recorder.heard == []


async def test_a_bug_in_the_listener_ends_the_poller_loudly(engines: Callable[[], Engine]) -> None:
    """Only expected failures are caught: our own error leaves run."""
    engine = engines()
    await engine.start()

    class Buggy(Recorder):
        def replica_up(self, replica_id: str) -> None:
            raise ZeroDivisionError

    poller = Poller(Buggy(), PollerSettings(interval_s=INTERVAL_S))
    poller.add(endpoint(engine))
    with pytest.raises(ExceptionGroup) as caught:
        await asyncio.wait_for(poller.run(), 10)
    assert caught.group_contains(ZeroDivisionError)


async def test_poller_runs_once_at_a_time_and_again_after_a_cancellation(engines: Callable[[], Engine]) -> None:
    """A second concurrent run is a bug; after a cancellation it continues where it was."""
    engine = engines()
    await engine.start()
    async with polling(endpoint(engine)) as (poller, recorder):
        await recorder.until_heard("up", "a")
        with pytest.raises(RuntimeError, match="runs already"):
            await poller.run()
    again = asyncio.create_task(poller.run())
    await recorder.polls("a", 1)
    again.cancel()
    with pytest.raises(asyncio.CancelledError):
        await again
    assert recorder.heard == [("up", "a")]


async def test_first_polls_are_spread_over_the_interval(engines: Callable[[], Engine]) -> None:
    """Replicas added together are not polled together, and the first of them is polled at once."""
    engine = engines()
    await engine.start()
    replicas = [endpoint(engine, f"r{number}") for number in range(8)]
    began_s = asyncio.get_running_loop().time()
    async with polling(*replicas, interval_s=0.8) as (_, recorder):
        await recorder.until(lambda: len(recorder.up_s) == len(replicas))
    after_s = [up_s - began_s for up_s in recorder.up_s.values()]
    assert sum(each_s > 0.4 for each_s in after_s) >= 3, after_s  # a busy machine only makes them later
    async with polling(endpoint(engine, "r0"), interval_s=60.0) as (_, recorder):
        await recorder.until_heard("up", "r0")


@pytest.mark.parametrize("early_s", [0.0009, 0.0, -0.2])
def test_a_poll_for_which_the_timer_came_early_is_not_made_again(early_s: float) -> None:
    """uvloop's timers fire half a millisecond early; the next poll is in the slot after it nevertheless."""
    assert next_poll_after_s(100.3, 102.3 - early_s, 0.5) == pytest.approx(0.5 + early_s)


def test_the_same_id_twice_is_an_error() -> None:
    """Two replicas cannot share an id."""
    poller = Poller(Recorder(), PollerSettings())
    replica = ReplicaEndpoint("a", "http://127.0.0.1:1", backend_of("vllm"))
    poller.add(replica)
    with pytest.raises(ConfigurationError, match="'a' is there already"):
        poller.add(replica)


@pytest.mark.parametrize("url", ["", "127.0.0.1:8000", "ftp://engine", "http://", "http://engine:port"])
def test_a_url_that_is_none_is_an_error(url: str) -> None:
    """A replica's URL is checked before anything is sent to it."""
    with pytest.raises(ConfigurationError, match="replica 'a'"):
        Poller(Recorder(), PollerSettings()).add(ReplicaEndpoint("a", url, backend_of("vllm")))


def ranks_of(engine: Engine, *rank_ids: int | None, finds_ranks: bool = False) -> list[ReplicaEndpoint]:
    url = f"http://127.0.0.1:{engine.port}"
    return [ReplicaEndpoint(f"a/{rank_id}", url, backend_of("vllm"), rank_id, finds_ranks) for rank_id in rank_ids]


def ranks_exposition(*capacities_tokens: int) -> str:
    return "".join(
        f'vllm:cache_config_info{{engine="{rank}",kv_cache_size_tokens="{tokens}"}} 1.0\n'
        for rank, tokens in enumerate(capacities_tokens)
    )


async def test_ranks_of_a_url_share_its_polls(engines: Callable[[], Engine]) -> None:
    """Each has its own reading; the engine is asked once for all; they go down together."""
    engine = engines()
    engine.metrics = ranks_exposition(1000, 2000, 3000)
    await engine.start()
    first, second, third = ranks_of(engine, 0, 1, 2)
    async with polling(first, second) as (poller, recorder):
        await recorder.polls("a/1", 3)
        assert {(each, reading.capacity_tokens) for each, reading in recorder.readings} == {
            ("a/0", 1000),
            ("a/1", 2000),
        }
        assert engine.health_count <= len(recorder.readings) / 2 + 1
        assert recorder.heard == [("up", "a/0"), ("up", "a/1")]
        poller.add(third)
        assert ("up", "a/2") not in recorder.heard
        await recorder.until_heard("up", "a/2")
        assert (recorder.readings[-1][0], recorder.readings[-1][1].capacity_tokens) == ("a/2", 3000)
        poller.remove("a/0")
        await recorder.polls("a/1", 2)
        poller.refused("a/1")
        assert [each[:2] for each in recorder.heard[3:]] == [("down", "a/1"), ("down", "a/2")]
        await recorder.until_heard("up", "a/1", times=2)
        assert ("up", "a/0") not in recorder.heard[3:]
        for replica_id in ("a/1", "a/2"):
            poller.remove(replica_id)
        count = engine.health_count
        await asyncio.sleep(3 * INTERVAL_S)
        assert engine.health_count <= count + 1
        assert repr(poller) == "<Poller 0 up of 0>"


@pytest.mark.parametrize(("rank_ids", "finds_ranks"), [((None,), True), ((None, 0, 1), False)])
async def test_blocks_reported_by_all_ranks_are_split_among_them(
    rank_ids: tuple[int | None, ...], finds_ranks: bool
) -> None:
    """vLLM sums them over its ranks, and labels the sum with each rank."""
    exposition = "".join(
        f'vllm:cache_config_info{{block_size="16",engine="{rank}",num_gpu_blocks="2000"}} 1.0\n' for rank in range(2)
    )
    asker = Asker("http://engine", backend_of("auto"), DEADLINE_S)
    asker.backend.read_metrics(exposition)
    found = await asker.found(Answers(0.0, None, exposition, None, None), rank_ids, finds_ranks=finds_ranks)
    assert {each.rank_id: each.reading.capacity_tokens for each in found.readings} == {
        None: 32_000,
        0: 16_000,
        1: 16_000,
    }
    assert found.ranks_count == (2 if finds_ranks else 0)


async def test_ranks_of_an_engine_whose_kind_is_found_out_have_their_own_readings(
    engines: Callable[[], Engine],
) -> None:
    """SGLang's metrics name the rank by another label than vLLM's."""
    engine = engines()
    engine.metrics = "".join(
        f'sglang:max_total_num_tokens{{dp_rank="{rank}",tp_rank="0"}} {tokens}.0\n'
        for rank, tokens in enumerate((1000, 2000))
    )
    await engine.start()
    url = f"http://127.0.0.1:{engine.port}"
    ranks = [ReplicaEndpoint(f"a/{rank_id}", url, backend_of("auto"), rank_id) for rank_id in (0, 1)]
    async with polling(*ranks) as (_, recorder):
        await recorder.polls("a/1", 2)
        assert {(each, reading.capacity_tokens) for each, reading in recorder.readings} == {
            ("a/0", 1000),
            ("a/1", 2000),
        }
    assert [each.backend.kind for each in ranks] == ["sglang", "sglang"]


@dataclass
class Splitter(Recorder):
    """A listener that makes a replica of each rank that is found."""

    poller: Poller | None = None
    engine: Engine | None = None
    found: list[int] = field(default_factory=list)
    removes_whole: bool = True

    def ranks_found(self, url: str, ranks_count: int) -> None:
        assert self.poller is not None
        assert self.engine is not None
        self.found.append(ranks_count)
        for each in ranks_of(self.engine, *range(ranks_count), finds_ranks=True):
            self.poller.add(each)
        if self.removes_whole:
            self.poller.remove("a/None")


@pytest.mark.parametrize("at_once", [True, False], ids=["at once", "later"])
async def test_ranks_that_are_found_come_up_in_the_poll_that_finds_them(
    at_once: bool, engines: Callable[[], Engine]
) -> None:
    """The listener replaces the whole by the ranks; the whole never comes up, even if it is removed later."""
    engine = engines()
    engine.metrics = ranks_exposition(1000, 2000)
    await engine.start()
    splitter = Splitter(engine=engine, removes_whole=at_once)
    async with polling(*ranks_of(engine, None, finds_ranks=True), recorder=splitter) as (splitter.poller, recorder):
        await recorder.until_heard("up", "a/1")
        await recorder.polls("a/1", 3)
        assert recorder.heard == [("up", "a/0"), ("up", "a/1")]
        assert splitter.found == [2]
        assert {each for each, _ in recorder.readings} == {"a/0", "a/1"}
