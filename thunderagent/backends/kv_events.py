"""The subscriber: follows engines' reports on their KV pools, and reports how much of each program is there.

Theory of operation
===================
An engine publishes its messages with a sequence number and keeps the last of them for a replay. Each replica has a task
that processes them in order. A gap means that messages were lost (ZeroMQ drops what a full queue cannot hold), or that
the engine is another one, which counts from 0 again. With a replay endpoint, asking from the last processed message
tells which: an engine that sends the very same bytes is still the same one, and continues with what is missing.
Otherwise the known state is dropped. The first message after a lost connection is checked in the same way, even if it
is the next: another engine may have sent as many before. A hint, never the truth:

- the engine restarted: nothing is there; that is reported;
- messages are permanently lost: the content is unknown; programs keep their last figure until there is a new one.

ZeroMQ connects, and reconnects, by itself; a missing engine is silent, and no error. Nothing here is on the path of a
request, and the event loop is yielded after every few messages.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable, Iterable
from contextlib import aclosing
from dataclasses import dataclass
from typing import Protocol

import structlog

from thunderagent.backends.kv_blocks import MAX_BLOCKS, KvBlocks, WalkError
from thunderagent.backends.kv_messages import (
    MAX_MESSAGE_BYTES,
    KvMessage,
    KvMessageError,
    PoolCleared,
    read_events,
    read_message,
)
from thunderagent.errors import ConfigurationError

try:
    import zmq
    from zmq.asyncio import Context, Socket
except ImportError as error:
    raise ConfigurationError("kv_events needs pyzmq: install thunderagent with the extra `kv-events`") from error

_log = structlog.get_logger(__name__)

SLICE_BLOCKS_COUNT = 8_192
"""Blocks of a message that are processed before yielding the event loop; each takes about 1 us."""

OPEN_AGAIN_S = 5.0
"""Time until a socket is opened again that the system refused."""

MAX_MESSAGE_WALK_BLOCKS = 500_000
"""Blocks that a message may concern without naming them; beyond it the index begins anew."""


class ResidencyListener(Protocol):
    """Receives what is in the engines' memory. Called on the event loop only; must not block."""

    def residency_reported(self, replica_id: str, resident_tokens: tuple[tuple[str, int], ...]) -> None:
        """Take the programs whose figure changed, each with its tokens there now."""


@dataclass(frozen=True, slots=True)
class KvEventsEndpoint:
    """Where an engine publishes (ZeroMQ addresses), and where it replays, if it does."""

    replica_id: str
    address: str
    replay_address: str | None = None


@dataclass(frozen=True, slots=True)
class KvEventsSettings:
    """How often to report, and how much to process at a time."""

    report_interval_s: float = 0.5
    # An engine checks for replay requests between two of its messages, or every 0.1 s.
    replay_silence_limit_s: float = 2.0
    # How often a replay may break off and be repeated, as long as each brings something new.
    replays_count: int = 32
    # Queued messages; vLLM keeps 10,000 for a replay. Beyond, they are dropped, which is noticed.
    queue_messages_count: int = 10_000
    # Messages, or programs in a report, that are handled before yielding the event loop; each takes some 50 us.
    slice_count: int = 16


class KvEvents:
    """Follows the KV events of some replicas until cancelled; add and remove them at any time."""

    def __init__(
        self,
        listener: ResidencyListener,
        endpoints: Iterable[KvEventsEndpoint],
        settings: KvEventsSettings | None = None,
    ) -> None:
        """Follow `endpoints` while it runs. Raises `ConfigurationError` for an invalid address."""
        self._listener = listener
        self._settings = settings or KvEventsSettings()
        self._endpoints: dict[str, KvEventsEndpoint] = {}
        self._tasks: dict[str, asyncio.Task[None]] = {}
        self._start: Callable[[KvEventsEndpoint], asyncio.Task[None]] | None = None
        for endpoint in endpoints:
            self.add(endpoint)

    def __repr__(self) -> str:
        return f"<KvEvents of {len(self._endpoints)} replicas>"

    def add(self, endpoint: KvEventsEndpoint) -> None:
        """Follow one more replica. Raises `ConfigurationError` for an invalid address."""
        _check(endpoint)
        self._endpoints[endpoint.replica_id] = endpoint
        if self._start is not None:
            self._tasks[endpoint.replica_id] = self._start(endpoint)

    def remove(self, replica_id: str) -> None:
        """Stop following a replica. An unknown id is ignored."""
        self._endpoints.pop(replica_id, None)
        task = self._tasks.pop(replica_id, None)
        if task is not None:
            task.cancel()

    async def run(self) -> None:
        """Subscribe until cancelled."""
        context = Context()
        context.set(zmq.MAX_SOCKETS, context.get(zmq.SOCKET_LIMIT))  # by default enough for 341 replicas
        try:
            async with asyncio.TaskGroup() as group:
                self._start = lambda endpoint: group.create_task(
                    self._follow(endpoint, context), name=f"KV events of {endpoint.replica_id}"
                )
                for replica_id, endpoint in self._endpoints.items():
                    self._tasks[replica_id] = self._start(endpoint)
                await asyncio.get_running_loop().create_future()
        finally:
            self._start = None
            context.destroy(linger=0)

    async def _follow(self, endpoint: KvEventsEndpoint, context: Context) -> None:
        followed = _Followed(endpoint, context, self._settings)
        async with asyncio.TaskGroup() as group:
            group.create_task(followed.receive(), name=f"subscription to {endpoint.replica_id}")
            group.create_task(followed.report(self._listener), name=f"residency of {endpoint.replica_id}")


class _Followed:
    """One replica's pool, and how far its messages were processed."""

    def __init__(self, endpoint: KvEventsEndpoint, context: Context, settings: KvEventsSettings) -> None:
        self._endpoint = endpoint
        self._context = context
        self._settings = settings
        self._blocks = KvBlocks()
        # The last processed message, and the number that the next published one should have: while a replay is ahead of
        # what was published, these are not neighbours.
        self._last: KvMessage | None = None
        self._next_id: int | None = None
        # Whether the last message came on the current connection.
        self._is_same_engine = True
        self._handled_count = 0
        self._is_readable = True
        self._log = _log.bind(replica_id=endpoint.replica_id)

    async def receive(self) -> None:
        """Receive what the engine publishes, until cancelled; anew after a while if no socket can be opened."""
        while True:
            try:
                await self._receive()
            except zmq.ZMQError as error:
                self._log.warning("kv_events_not_followed", why=str(error))
                self._is_same_engine = False
                await asyncio.sleep(OPEN_AGAIN_S)

    async def _receive(self) -> None:
        with (
            self._connected(zmq.SUB, self._endpoint.address) as socket,
            socket.get_monitor_socket(zmq.EVENT_DISCONNECTED) as losses,
        ):
            socket.subscribe(b"")
            while True:
                frames = await socket.recv_multipart()
                while await losses.poll(0):
                    await losses.recv_multipart()
                    self._is_same_engine = False
                try:
                    message = read_message(frames)
                except KvMessageError as error:
                    self._is_unreadable(error)
                else:
                    if not message.is_end:
                        await self._take_published(message)
                await self._give_way()

    async def report(self, listener: ResidencyListener) -> None:
        """Report changes to the listener, until cancelled."""
        while True:
            await asyncio.sleep(self._settings.report_interval_s)
            changes: list[tuple[str, int]] = []
            while self._blocks.has_changes:
                changes += self._blocks.take_changes(self._settings.slice_count)
                await asyncio.sleep(0)
            if changes:
                # A program may have changed again in the meantime: its last figure counts.
                listener.residency_reported(self._endpoint.replica_id, tuple(dict(changes).items()))

    async def _take_published(self, message: KvMessage) -> None:
        if message.sequence_id != self._next_id or not self._is_same_engine:
            self._is_same_engine = True
            await self._catch_up(message)
        self._next_id = message.sequence_id + 1
        if self._last is None or message.sequence_id > self._last.sequence_id:
            await self._take(message)

    async def _take(self, message: KvMessage) -> None:
        """Process a message, in slices; an unreadable one may have contained anything."""
        self._last = message
        blocks, done_count, walked_count = self._blocks, 0, self._blocks.walked_count
        try:
            for event in read_events(message.payload):
                blocks.apply(event)
                done_count += 1 + (0 if isinstance(event, PoolCleared) else len(event.block_hashes))
                if done_count + blocks.walked_count - walked_count >= SLICE_BLOCKS_COUNT:
                    self._check(blocks, walked_count)
                    done_count = 0
                    await asyncio.sleep(0)
            self._check(blocks, walked_count)
        except KvMessageError as error:
            self._is_unreadable(error)
            self._blocks = KvBlocks()
            return
        except WalkError as error:
            self._log.warning("kv_events_out_of_bounds", blocks_count=blocks.blocks_count, why=str(error))
            self._blocks = KvBlocks()
            return
        self._is_readable = True

    def _check(self, blocks: KvBlocks, walked_before_count: int) -> None:
        """Raise `WalkError` for an index that was not followed correctly, or costs too much."""
        if blocks.blocks_count > MAX_BLOCKS:
            raise WalkError(f"the pool seems to hold more than {MAX_BLOCKS} blocks")
        if blocks.walked_count - walked_before_count > MAX_MESSAGE_WALK_BLOCKS:
            raise WalkError(f"a message concerns more than {MAX_MESSAGE_WALK_BLOCKS} blocks that it does not name")

    # --- what was not published to us -------------------------------------------------------------------------------

    async def _catch_up(self, message: KvMessage) -> None:
        """Get what is missing between the last message and one that is not the next, or drop the known state."""
        if self._next_id is not None and message.sequence_id < self._next_id:
            self._engine_restarted()
        for _ in range(self._settings.replays_count if self._endpoint.replay_address else 0):
            before = self._last
            await self._replay()
            if self._last is before or (self._last is not None and self._last.sequence_id >= message.sequence_id - 1):
                break
        if self._last is not None and self._last.sequence_id < message.sequence_id - 1:
            self._lost(self._last.sequence_id, message.sequence_id)

    async def _replay(self) -> None:
        """Process what the engine replays after the last message, up to the first gap."""
        known = self._last
        async with aclosing(self._replayed(known.sequence_id if known is not None else 0)) as messages:
            async for message in messages:
                if self._last is known and known is not None:
                    if message == known:
                        continue
                    if not self._goes_on(known, message):
                        return
                elif self._last is not None and message.sequence_id != self._last.sequence_id + 1:
                    return
                await self._take(message)
                await self._give_way()

    def _goes_on(self, known: KvMessage, message: KvMessage) -> bool:
        """Return whether the first new message of a replay follows the last known one; if not, start over."""
        if message.sequence_id == known.sequence_id + 1:
            return True
        if message.sequence_id == known.sequence_id:
            self._engine_restarted()
        else:
            self._lost(known.sequence_id, message.sequence_id)
            self._last = None
        return False

    async def _replayed(self, from_id: int) -> AsyncGenerator[KvMessage, None]:
        """Request all messages from a number on, and yield them as they arrive."""
        assert self._endpoint.replay_address is not None
        # A socket for each request: the rest of a broken answer is never taken for another one.
        try:
            with self._connected(zmq.DEALER, self._endpoint.replay_address) as socket:
                async with asyncio.timeout(self._settings.replay_silence_limit_s):
                    await socket.send_multipart([b"", from_id.to_bytes(8, "big")])
                while True:
                    async with asyncio.timeout(self._settings.replay_silence_limit_s):
                        message = read_message(await socket.recv_multipart())
                    if message.is_end:
                        return
                    yield message
        except (TimeoutError, zmq.ZMQError) as error:
            self._log.warning("kv_events_not_replayed", why=str(error) or "no answer in time")
        except KvMessageError as error:
            self._is_unreadable(error)

    def _engine_restarted(self) -> None:
        self._log.info("kv_events_engine_restarted")
        self._blocks.clear()
        self._last = None

    def _lost(self, last_id: int, next_id: int) -> None:
        self._log.warning("kv_events_lost", after_sequence_id=last_id, until_sequence_id=next_id)
        self._blocks = KvBlocks()

    # --- helpers ----------------------------------------------------------------------------------------------------

    def _connected(self, kind: int, address: str) -> Socket:
        """Return a socket that connects, now or as soon as somebody listens there."""
        socket = self._context.socket(kind)
        socket.rcvhwm = self._settings.queue_messages_count
        socket.maxmsgsize = MAX_MESSAGE_BYTES  # beyond, ZeroMQ drops the connection, and makes a new one
        _connect(socket, address)
        return socket

    def _is_unreadable(self, error: KvMessageError) -> None:
        """Log that a message is unreadable, once until one is readable."""
        if self._is_readable:
            self._is_readable = False
            self._log.warning("kv_events_unreadable", why=str(error))

    async def _give_way(self) -> None:
        """Yield the event loop, every few times: a socket with waiting messages never does."""
        self._handled_count += 1
        if self._handled_count % self._settings.slice_count == 0:
            await asyncio.sleep(0)


def _check(endpoint: KvEventsEndpoint) -> None:
    """Raise `ConfigurationError` if an address is invalid. No connection is made, and no name looked up."""
    for address in (endpoint.address, endpoint.replay_address):
        if address is None:
            continue
        try:
            with zmq.Context() as context, context.socket(zmq.SUB) as socket:
                _connect(socket, address)
        except zmq.ZMQError as error:
            raise ConfigurationError(
                f"{address!r} is not an address to connect to, as tcp://HOST:PORT is: {error}"
            ) from error


def _connect(socket: zmq.SyncSocket | Socket, address: str) -> None:
    socket.linger = 0
    socket.ipv6 = "[" in address
    socket.connect(address)
