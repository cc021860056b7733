"""The subscriber against a publisher like vLLM's, on real sockets: gaps, replays, restarts, rubbish and floods."""

from __future__ import annotations

import asyncio
import errno
import resource
import subprocess
import sys
import time
from collections import deque
from contextlib import asynccontextmanager
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

import msgspec
import pytest
import structlog
import uvloop
import zmq
import zmq.asyncio

from thunderagent.backends import kv_events
from thunderagent.backends.kv_events import KvEvents, KvEventsEndpoint, KvEventsSettings
from thunderagent.config import ServeConfig
from thunderagent.errors import ConfigurationError
from thunderagent.programs.messages import ResidencyReported
from thunderagent.runtime.event_log import read_events
from thunderagent.serving.building import build_runtime
from thunderagent.serving.serving import proxy

if TYPE_CHECKING:
    from collections.abc import AsyncIterator
    from pathlib import Path

SETTINGS = KvEventsSettings(report_interval_s=0.02, replay_silence_limit_s=2.0)
END = (-1).to_bytes(8, "big", signed=True)


def stored(*hashes: int, parent: int | None = None, program: str = "p") -> dict[str, object]:
    return {
        "type": "BlockStored",
        "block_hashes": list(hashes),
        "parent_block_hash": parent,
        "token_ids": [],
        "block_size": 1,
        "medium": "GPU",
        "session_id": program,
    }


def removed(*hashes: int) -> dict[str, object]:
    return {"type": "BlockRemoved", "block_hashes": list(hashes), "medium": "GPU"}


@dataclass
class Recorder:
    """A listener that remembers the last figure of each program, and the time of each report."""

    figures: dict[str, int] = field(default_factory=dict)
    reports: list[tuple[str, dict[str, int]]] = field(default_factory=list)
    times_s: list[float] = field(default_factory=list)

    def residency_reported(self, replica_id: str, resident_tokens: tuple[tuple[str, int], ...]) -> None:
        self.figures.update(resident_tokens)
        self.reports.append((replica_id, dict(resident_tokens)))
        self.times_s.append(asyncio.get_running_loop().time())

    async def until(self, **figures: int) -> None:
        async with asyncio.timeout(10):
            while self.figures != figures:
                await asyncio.sleep(0.005)


@dataclass
class Engine:
    """A publisher like vLLM's: a PUB socket, and a ROUTER that replays the last batches."""

    context: zmq.asyncio.Context
    address: str = ""
    replay_address: str = ""
    buffer_size: int = 100_000
    holes: set[int] = field(default_factory=set)
    """Messages that the next replay omits."""
    has_topic: bool = True
    is_mute: bool = False
    asked_from: list[int] = field(default_factory=list)
    sequence_id: int = 0
    started_at: float = 1.0

    async def start(self) -> None:
        self.sequence_id = 0
        self.started_at += 1
        self.buffer: deque[tuple[int, bytes]] = deque(maxlen=self.buffer_size)
        self.pub, self.router = self.context.socket(zmq.PUB), self.context.socket(zmq.ROUTER)
        self.pub.sndhwm = self.router.sndhwm = 0
        for socket, address in ((self.pub, self.address), (self.router, self.replay_address)):
            socket.linger = 0
            await bind(socket, address or "tcp://127.0.0.1:*")
        self.address = self.pub.last_endpoint.decode()
        self.replay_address = self.router.last_endpoint.decode()
        self.task = asyncio.create_task(self._serve())

    async def stop(self) -> None:
        self.task.cancel()
        await asyncio.gather(self.task, return_exceptions=True)
        self.pub.close()
        self.router.close()

    async def publish(self, *events: object, lost: bool = False, payload: bytes | None = None) -> None:
        """Send a batch; a lost one is kept for a replay alone."""
        payload = payload or msgspec.msgpack.encode([self.started_at, list(events), 0])
        number = self.sequence_id.to_bytes(8, "big")
        self.buffer.append((self.sequence_id, payload))
        self.sequence_id += 1
        if not lost:
            await self.pub.send_multipart([b"", number, payload])

    async def _serve(self) -> None:
        while True:
            client, empty, number = await self.router.recv_multipart()
            assert empty == b""
            start = int.from_bytes(number, "big")
            self.asked_from.append(start)
            if self.is_mute:
                continue
            holes, self.holes = self.holes, set()
            topic = [b""] if self.has_topic else []
            for sequence_id, payload in tuple(self.buffer):
                if sequence_id >= start and sequence_id not in holes:
                    await self.router.send_multipart([client, b"", *topic, sequence_id.to_bytes(8, "big"), payload])
            await self.router.send_multipart([client, b"", *topic, END, b""])


async def bind(socket: zmq.asyncio.Socket, address: str) -> None:
    """Bind as soon as the closed socket on that address is really gone."""
    async with asyncio.timeout(10):
        while True:
            try:
                socket.bind(address)
            except zmq.ZMQError:
                await asyncio.sleep(0.01)
            else:
                return


@pytest.fixture
async def engine() -> AsyncIterator[Engine]:
    context = zmq.asyncio.Context()
    engine = Engine(context)
    await engine.start()
    yield engine
    await engine.stop()
    context.destroy(linger=0)


@asynccontextmanager
async def following(
    engine: Engine, *, replays: bool = True, connected: bool = True, settings: KvEventsSettings = SETTINGS
) -> AsyncIterator[Recorder]:
    """Run a subscriber during the block, which begins when it receives published messages."""
    recorder = Recorder()
    endpoint = KvEventsEndpoint("r", engine.address, engine.replay_address if replays else None)
    task = asyncio.create_task(KvEvents(recorder, [endpoint], settings).run())
    try:
        if connected:
            await connect(engine, recorder)
        yield recorder
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
    assert task.cancelled()


async def connect(engine: Engine, recorder: Recorder) -> None:
    """Publish until the subscriber receives it, then start again with nothing."""
    async with asyncio.timeout(10):
        while "hello" not in recorder.figures:
            await engine.publish(stored(-1, program="hello"))
            await asyncio.sleep(0.02)
    while recorder.figures != {"hello": 0}:
        await engine.publish({"type": "AllBlocksCleared"})
        await asyncio.sleep(0.05)
    recorder.figures.clear()
    recorder.reports.clear()
    engine.asked_from.clear()


async def test_stored_and_removed_blocks_are_reported(engine: Engine) -> None:
    """Each change is reported once, with the replica's name."""
    async with following(engine) as recorder:
        await engine.publish(stored(1, 2), stored(7, program="q"))
        await recorder.until(p=2, q=1)
        await engine.publish(stored(3, parent=2))
        await recorder.until(p=3, q=1)
        await engine.publish(removed(7))
        await recorder.until(p=3, q=0)
        assert recorder.reports[-1] == ("r", {"q": 0})
    assert engine.asked_from == []


async def test_without_a_socket_for_a_moment_it_follows_later(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    """It would end the proxy otherwise."""
    connected, refusals = kv_events._Followed._connected, list[str]()

    def refuse(followed: Any, kind: int, address: str) -> zmq.asyncio.Socket:
        if not refusals:
            refusals.append(address)
            raise zmq.ZMQError(errno.EMFILE)
        return connected(followed, kind, address)

    monkeypatch.setattr(kv_events._Followed, "_connected", refuse)
    monkeypatch.setattr(kv_events, "OPEN_AGAIN_S", 0.0)
    async with following(engine, replays=False) as recorder:
        assert refusals == [engine.address]
        await engine.publish(stored(1, 2))
        await recorder.until(p=2)


async def test_replicas_come_and_go_while_it_runs(engine: Engine) -> None:
    """Messages of an added one arrive; a removed one's no longer do, and it leaves no task behind."""
    recorder = Recorder()
    events = KvEvents(recorder, [], SETTINGS)
    task = asyncio.create_task(events.run())
    try:
        await asyncio.sleep(0)
        events.add(KvEventsEndpoint("r", engine.address))
        await connect(engine, recorder)
        await engine.publish(stored(1, 2))
        await recorder.until(p=2)
        assert repr(events) == "<KvEvents of 1 replicas>"
        events.remove("r")
        events.remove("nobody")
        await asyncio.sleep(0.02)
        await engine.publish(stored(3, parent=2))
        await asyncio.sleep(0.1)
        assert recorder.figures == {"p": 2}
        assert not [each for each in asyncio.all_tasks() if "of r" in each.get_name() or "to r" in each.get_name()]
        recorder.figures.clear()
        events.add(KvEventsEndpoint("r", engine.address))
        await connect(engine, recorder)
        with pytest.raises(ConfigurationError):
            events.add(KvEventsEndpoint("x", "nonsense"))
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
    assert task.cancelled()


@pytest.mark.parametrize("has_topic", [True, False])
async def test_a_gap_is_filled_from_the_replay(engine: Engine, has_topic: bool) -> None:
    """The replay begins at the last known message, whose bytes show that it is still the same engine."""
    engine.has_topic = has_topic
    async with following(engine) as recorder:
        await engine.publish(stored(1))
        await recorder.until(p=1)
        await engine.publish(stored(2, parent=1), lost=True)
        await engine.publish(stored(9, program="q"), lost=True)
        await engine.publish(stored(3, parent=2))
        await recorder.until(p=3, q=1)
        assert engine.asked_from == [engine.sequence_id - 4]
        await engine.publish(stored(4, parent=3))
        await recorder.until(p=4, q=1)


async def test_event_in_both_replay_and_stream_counts_once(engine: Engine) -> None:
    """A replay runs ahead of waiting messages: copies would be counted twice, and outlive their removal."""
    async with following(engine) as recorder:
        await engine.publish(stored(1), lost=True)
        for parent in range(1, 6):
            await engine.publish(stored(parent + 1, parent=parent))
        await recorder.until(p=6)
        await engine.publish(removed(6, 5, 4))
        await recorder.until(p=3)
        assert len(engine.asked_from) == 1


async def test_a_replay_that_leaves_something_out_is_asked_for_again(engine: Engine) -> None:
    """A ROUTER drops messages that a slow peer does not take."""
    async with following(engine) as recorder:
        for parent in range(9):
            await engine.publish(stored(parent + 1, parent=parent or None), lost=True)
        engine.holes = {engine.sequence_id - 5}
        await engine.publish(stored(10, parent=9))
        await recorder.until(p=10)
        assert engine.asked_from == [engine.sequence_id - 11, engine.sequence_id - 7]


async def test_late_subscriber_learns_the_earlier_blocks(engine: Engine) -> None:
    """At the first message the subscriber asks for all that the engine keeps."""
    await engine.publish(stored(1, 2))
    await engine.publish(stored(3, parent=2))
    async with following(engine, connected=False) as recorder:
        async with asyncio.timeout(10):
            while not recorder.figures:
                await engine.publish(stored(4, program="q"))
                await asyncio.sleep(0.02)
        await recorder.until(p=3, q=1)
    assert engine.asked_from == [0]


async def test_blocks_without_a_replay_become_unknown(engine: Engine) -> None:
    """Without a replay a gap ends all figures, silently; a program whose beginning comes again has one again."""
    async with following(engine, replays=False) as recorder:
        await engine.publish(stored(1, 2), stored(7, program="q"))
        await recorder.until(p=2, q=1)
        with structlog.testing.capture_logs() as logs:
            await engine.publish(removed(2), lost=True)
            await engine.publish(stored(8, parent=7, program="q"), stored(20, program="new"))
            await recorder.until(p=2, q=1, new=1)
        assert [line["event"] for line in logs] == ["kv_events_lost"]
        await engine.publish(stored(1, 2, 3))
        await recorder.until(p=3, q=1, new=1)


@pytest.mark.parametrize("trouble", ["too old", "no answer"])
async def test_a_replay_that_does_not_reach_back_is_no_help(engine: Engine, trouble: str) -> None:
    """The messages that it has are taken; the rest is handled as without a replay."""
    async with following(engine) as recorder:
        await engine.publish(stored(1, 2))
        await recorder.until(p=2)
        await engine.publish(removed(2), lost=True)
        await engine.publish(stored(30, program="kept"), lost=True)
        if trouble == "too old":
            engine.buffer = deque(list(engine.buffer)[-1:], maxlen=2)
        else:
            engine.is_mute = True
        await engine.publish(stored(3, parent=2), stored(20, program="new"))
        expected = {"p": 2, "new": 1} | ({"kept": 1} if trouble == "too old" else {})
        await recorder.until(**expected)


@pytest.mark.parametrize("replays", [True, False])
async def test_an_engine_that_restarted_has_nothing(engine: Engine, replays: bool) -> None:
    """Its numbers begin anew: the restart is reported, and everything since."""
    async with following(engine, replays=replays) as recorder:
        for _ in range(0 if replays else 300):  # else the next number passes: it publishes more until it is heard
            await engine.publish()
        await engine.publish(stored(1, 2), stored(7, program="q"))
        await recorder.until(p=2, q=1)
        await engine.stop()
        await engine.start()
        async with asyncio.timeout(10):
            while recorder.figures.get("new") != 1:
                await engine.publish(stored(20, program="new"))
                await asyncio.sleep(0.05)
        assert replays or engine.sequence_id < 300
        await recorder.until(p=0, q=0, new=1)


async def test_a_restarted_engine_first_heard_with_the_next_number_is_another(engine: Engine) -> None:
    """It published as many messages as the old one before it was heard: its next number alone would pass."""
    async with following(engine) as recorder:
        for n in range(3):
            await engine.publish(stored(n, program="old"))
        await recorder.until(old=3)
        said_count = engine.sequence_id
        await engine.stop()
        await engine.start()
        for _ in range(said_count):
            await engine.publish(stored(10), lost=True)
        with structlog.testing.capture_logs() as logs:
            async with asyncio.timeout(10):
                while not logs:  # a malformed message shows when it is heard again
                    await engine.pub.send_multipart([b"x"])
                    await asyncio.sleep(0.02)
        await engine.publish(stored(20, program="new"))
        await recorder.until(old=0, p=1, new=1)


async def test_a_restarted_engine_that_overtook_us_is_recognised(engine: Engine) -> None:
    """Its numbers are higher than ours were, but the bytes of the last message that we know differ."""
    async with following(engine) as recorder:
        await engine.publish(stored(1, 2))
        await recorder.until(p=2)
        engine.buffer = deque((n, msgspec.msgpack.encode([9.0, []])) for n, _ in engine.buffer)
        await engine.publish(stored(20, program="new"), lost=True)
        await engine.publish(stored(21, parent=20, program="new"))
        await recorder.until(p=0, new=2)


async def test_rubbish_is_survived(engine: Engine) -> None:
    """Malformed frames are skipped; an unreadable batch may have had any content. Each is logged once."""
    async with following(engine) as recorder:
        await engine.publish(stored(1))
        await recorder.until(p=1)
        with structlog.testing.capture_logs() as logs:
            for frames in ([b"x"], [b"", b"short", b""], [b"", b"", b"", b"x"], [b"", END, b""]):
                await engine.pub.send_multipart(frames)
            await engine.publish(stored(2, parent=1))
            await recorder.until(p=2)
            await engine.publish(payload=b"\xc1 rubbish")
            await engine.publish(payload=b"\xc1 more rubbish")
            await engine.publish(stored(3, parent=2), stored(20, program="new"))
            await recorder.until(p=2, new=1)
        assert [line["event"] for line in logs] == ["kv_events_unreadable"] * 2
        await engine.publish(stored(21, parent=20, program="new"))
        await recorder.until(p=2, new=2)


async def test_a_message_that_clears_again_and_again_costs_as_many_events(engine: Engine) -> None:
    """Each program is forgotten once, not with each clearing; others run between slices."""
    programs_count, clears_count = 10_000, 60_000
    async with following(engine) as recorder:
        for first in range(1, programs_count, 1000):
            await engine.publish(*(stored(n, program=f"p{n}") for n in range(first, first + 1000)))
        await recorder.until(**{f"p{n}": 1 for n in range(1, programs_count + 1)})
        begun_s = worked_s = time.process_time()
        longest_s = 0.0
        await engine.publish(*([{"type": "AllBlocksCleared"}] * clears_count), stored(1, program="last"))
        async with asyncio.timeout(60):
            while recorder.figures.get("last") != 1 or any(recorder.figures[f"p{n}"] for n in (1, programs_count)):
                await asyncio.sleep(0)
                now_s = time.process_time()
                worked_s, longest_s = now_s, max(longest_s, now_s - worked_s)
        assert longest_s < 0.1
        assert time.process_time() - begun_s < 20, "it took 110 s, with a look at each program for each clearing"


async def test_a_flood_stops_nobody_and_is_reported_seldom(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    """While thousands of messages wait, the event loop runs every few of them."""
    taken, longest, read = 0, 0, kv_events.read_events

    def counted(payload: bytes) -> Any:
        nonlocal taken
        taken += 1
        return read(payload)

    monkeypatch.setattr(kv_events, "read_events", counted)
    async with following(engine, settings=replace(SETTINGS, replay_silence_limit_s=25)) as recorder:
        for n in range(1, 4000):
            await engine.publish(stored(n, parent=n - 1 or None), lost=n == 1)
        async with asyncio.timeout(30):
            while recorder.figures != {"p": 3999}:
                before = taken
                await asyncio.sleep(0)
                longest = max(longest, taken - before)
        assert 1 <= longest <= SETTINGS.slice_count
        between_s = [b - a for a, b in zip(recorder.times_s, recorder.times_s[1:], strict=False)]
        assert all(each_s >= SETTINGS.report_interval_s * 0.9 for each_s in between_s)


async def test_there_is_room_for_many_replicas() -> None:
    """Each takes three sockets, of which ZeroMQ has 1,023 unless it is asked for more."""
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (limits[1], limits[1]))  # as `serve` does
    endpoints = [KvEventsEndpoint(str(number), "tcp://127.0.0.1:1") for number in range(342)]
    task = asyncio.create_task(KvEvents(Recorder(), endpoints, SETTINGS).run())
    try:
        for _ in range(50):  # all have begun then, and a failure is through
            await asyncio.sleep(0)
        assert not task.done()
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        resource.setrlimit(resource.RLIMIT_NOFILE, limits)


async def test_a_replay_for_which_there_is_no_socket_is_logged() -> None:
    """The messages are lost, and nothing else."""
    context = zmq.asyncio.Context()
    context.set(zmq.MAX_SOCKETS, 1)
    endpoint = KvEventsEndpoint("r", "tcp://127.0.0.1:1", "tcp://127.0.0.1:1")
    with context.socket(zmq.SUB), structlog.testing.capture_logs() as logs:
        followed = kv_events._Followed(endpoint, context, SETTINGS)
        assert [message async for message in followed._replayed(0)] == []
    assert [line["event"] for line in logs] == ["kv_events_not_replayed"]
    context.destroy(linger=0)


async def test_an_engine_that_is_not_there_yet_is_no_error(engine: Engine) -> None:
    """The subscriber follows it as soon as it is up."""
    await engine.stop()
    async with following(engine, connected=False) as recorder:
        await asyncio.sleep(0.2)
        await engine.start()
        await connect(engine, recorder)
        await engine.publish(stored(1))
        await recorder.until(p=1)


async def test_several_replicas_are_told_apart(engine: Engine) -> None:
    """Each has its own index."""
    other = Engine(engine.context)
    await other.start()
    async with following(engine) as first, following(other) as second:
        await engine.publish(stored(1, 2))
        await other.publish(stored(1))
        await first.until(p=2)
        await second.until(p=1)
    await other.stop()


async def test_the_server_tells_the_scheduler(engine: Engine, tmp_path: Path) -> None:
    """The scheduler knows the replica by its name there; the event is in the event log."""
    config = ServeConfig.load(
        port=0,
        backends="http://127.0.0.1:9",
        kv_events=engine.address,
        kv_events_replay=engine.replay_address,
        event_log=tmp_path / "events.log",
    )
    runtime, event_log = build_runtime(config)
    assert event_log is not None
    async with proxy(config, runtime, config.backends):
        async with asyncio.timeout(10):
            while b"ResidencyReported" not in (tmp_path / "events.log").read_bytes():
                await engine.publish(stored(1, 2))
                await asyncio.sleep(0.05)
                event_log.flush()
    event_log.close()
    with (tmp_path / "events.log").open("rb") as lines:
        events = [event for event in read_events(lines) if type(event) is ResidencyReported]
    assert (events[0].replica_id, events[0].resident_tokens) == ("127.0.0.1:9", (("p", 2),))


def test_subscriber_runs_on_the_event_loop_of_the_server() -> None:
    """That loop is uvloop's."""

    async def follow() -> None:
        context = zmq.asyncio.Context()
        engine = Engine(context)
        await engine.start()
        async with following(engine) as recorder:
            await engine.publish(stored(1), lost=True)
            await engine.publish(stored(2, parent=1))
            await recorder.until(p=2)
        await engine.stop()
        context.destroy(linger=0)

    uvloop.run(follow())


@pytest.mark.parametrize("address", ["tcp://*:5557", "http://127.0.0.1:5557", "127.0.0.1:5557", ""])
@pytest.mark.parametrize("is_replay", [False, True])
def test_an_address_that_is_none_is_a_configuration_error(address: str, is_replay: bool) -> None:
    """The error comes before anything runs, with the address in the message."""
    addresses = ("tcp://127.0.0.1:5557", address) if is_replay else (address, None)
    with pytest.raises(ConfigurationError, match="not an address to connect to"):
        KvEvents(Recorder(), [KvEventsEndpoint("r", *addresses)])


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"kv_events": "tcp://a:1"}, "kv_events needs an address for each of backends, so 0, not 1"),
        (
            {"kv_events": "tcp://a:1,tcp://b:1", "backends": "http://a"},
            "kv_events needs an address for each of backends, so 1, not 2",
        ),
        (
            {"kv_events_replay": ["tcp://a:1"], "backends": "http://a"},
            "kv_events_replay needs an address for each of kv_events, so 0, not 1",
        ),
        ({"kv_events": 5}, "kv_events: "),
    ],
)
def test_each_backend_has_one_address(given: dict[str, object], message: str) -> None:
    """Only the order matches events with backends."""
    with pytest.raises(ConfigurationError, match=message):
        ServeConfig.load(**given)


def test_without_pyzmq_the_error_says_what_to_install() -> None:
    """This runs in a separate process, in which it cannot be imported."""
    code = (
        "import sys; sys.modules['zmq'] = None\n"
        "from thunderagent.cli import main\n"
        "sys.exit(main(['serve', '--port', '0', '--backends', 'http://127.0.0.1:9', '--log-level', 'error',"
        " '--kv-events', 'tcp://127.0.0.1:9']))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False, timeout=30)
    assert done.returncode == 2
    assert "install thunderagent with the extra `kv-events`" in done.stderr
