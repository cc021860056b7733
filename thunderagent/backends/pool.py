"""The connections to one replica: each carries one request at a time, and is kept for the next.

aiohttp opens them, and parses what comes. Its session stays out: with every request it looks for cookies, redirects,
proxies and middlewares, wraps the body, and starts a task to send it, which costs a turn more time than all that the
proxy itself does with it. Idle connections are kept here, too, and not by its connector, which finds out anew for each
request where it goes, and counts for limits that are none.
"""

from __future__ import annotations

import asyncio
import re
from base64 import b64encode
from collections import deque
from contextlib import suppress
from typing import NamedTuple

import aiohttp
from aiohttp.client_proto import ResponseHandler
from aiohttp.connector import Connection
from aiohttp.http import RawResponseMessage, StreamWriter
from aiohttp.http_exceptions import HttpProcessingError
from multidict import CIMultiDict, CIMultiDictProxy
from yarl import URL

from thunderagent.backends.limits import Pause, TotalLimit

MAX_HEADER_BYTES = 64 * 1024
READ_AHEAD_BYTES = 2**20
"""Of an answer whose client is slow, so much is read ahead before the engine must wait."""

LARGE_BODY_BYTES = 512 * 1024
PIECE_BYTES = 256 * 1024
"""What is larger is sent in such pieces, so that other turns go on meanwhile."""

_BODILESS_METHODS = frozenset({"GET", "HEAD", "OPTIONS", "TRACE"})
"""Without a body they have no Content-Length either."""

_IDEMPOTENT_METHODS = _BODILESS_METHODS | {"PUT", "DELETE"}
"""RFC 9110, 9.2.2."""

STALE_WITHIN_S = 1.0
"""A kept connection that dies later than this after a request was sent was no stale one: the engine had the request."""


class _StaleConnectionError(aiohttp.ServerDisconnectedError):
    """A connection that had carried other requests ended before a byte of this one's answer came."""


_SENDABLE = re.compile(r"/[!\"$-~]*")
"""Printable ASCII without `#`: nobody can end such a path sooner than we do."""


class Answer:
    """An answer whose head is there; its body may still be on its way. Read it to its end, or close it."""

    __slots__ = (
        "_body",
        "_connection",
        "_limit",
        "_pool",
        "_sending",
        "_target",
        "content",
        "headers",
        "reason",
        "status",
    )

    def __init__(
        self,
        message: RawResponseMessage,
        content: aiohttp.StreamReader,
        connection: Connection,
        sending: asyncio.Task[None] | None,
        pool: Pool,
        target: _Target,
    ) -> None:
        """Give `connection` back to `pool` when `content` is whole.

        `sending` may still send the request; it is given up when the answer ends.
        """
        self.status: int = message.code
        self.reason: str = message.reason
        self.headers: CIMultiDictProxy[str] = message.headers
        self.content = content
        self._connection: Connection | None = connection
        self._sending = sending
        self._pool = pool
        self._target = target
        self._limit: TotalLimit | None = None
        self._body: bytes | None = None
        content.on_eof(self._whole)

    def __repr__(self) -> str:
        return f"<Answer {self.status}, {'whole or closed' if self._connection is None else self._connection}>"

    @property
    def content_type(self) -> str:
        """The media type, without its parameters."""
        return self.headers.get("Content-Type", "").partition(";")[0].strip().lower()

    async def read(self) -> bytes:
        """Return the whole body, or what is left of it; once more the same."""
        if self._body is None:
            self._body = self.content.read_nowait() if self.content.is_eof() else await self.content.read()
        return self._body

    def close(self) -> None:
        """End the request, and close its connection if the answer is not whole; once more changes nothing."""
        if self._connection is not None:
            if self.content.exception() is None:
                self.content.set_exception(aiohttp.ClientConnectionError("the answer was closed"))
            self._end(keep=False)

    def limit_silence(self, silence_timeout_s: float | None) -> None:
        """Have the rest come without a longer pause than this, whatever the limit was before."""
        protocol = self._connection.protocol if self._connection is not None else None
        if protocol is not None:
            protocol.read_timeout = silence_timeout_s
            protocol.start_timeout()

    def limit_total(self, limit: TotalLimit) -> None:
        """Have all of it come in time."""
        if self._connection is None:
            limit.end()
        else:
            self._limit = limit
            limit.watch(self.content)

    def fail_when_closed(self) -> None:
        """Fail who reads a chunked body when its connection closes before the last chunk.

        aiohttp (3.14) does that itself, but for a body whose chunks turn into garbage: there its parser gives up, and
        whoever reads would wait for ever, without a timeout.
        """
        protocol = self._connection.protocol if self._connection is not None else None
        closed = protocol.closed if protocol is not None else None
        if closed is None:
            return
        content = self.content

        def fail(_: object) -> None:
            if not content.is_eof() and content.exception() is None:
                content.set_exception(aiohttp.ClientPayloadError("the connection closed before the last chunk"))

        def whole() -> None:
            closed.remove_done_callback(fail)

        closed.add_done_callback(fail)
        content.on_eof(whole)

    def _whole(self) -> None:
        if self._connection is not None:
            self._end(keep=True)

    def _end(self, *, keep: bool) -> None:
        assert self._connection is not None
        connection, self._connection = self._connection, None
        if self._limit is not None:
            self._limit.end()
        self._pool.answered(self._target, connection, self._sending, keep=keep)


class _Target(NamedTuple):
    """What a base URL says of every request to it."""

    request: aiohttp.ClientRequest
    """What the connector wants to know; it is never sent."""
    path: str
    headers: tuple[tuple[str, str], ...]
    idle: deque[tuple[Connection, float]]
    """The connections to there that no request is on, and since when; the newest is last, and is taken first."""


class Pool:
    """The connections to one replica, and how many requests are on them."""

    def __init__(
        self,
        connector: aiohttp.TCPConnector,
        pause: Pause,
        rank_headers: tuple[tuple[str, str], ...] = (),
        *,
        keepalive_s: float = 4.0,
    ) -> None:
        """Connect with `connector`, which `close` closes; `rank_headers` replace the client's in every request.

        A connection that is idle for longer than `keepalive_s` gets no request, and is closed.
        """
        self._connector = connector
        self._keepalive_s = keepalive_s
        self._idle: dict[tuple[object, ...], deque[tuple[Connection, float]]] = {}
        """By host, port and scheme."""
        self._idle_timer: asyncio.TimerHandle | None = None
        self.pause = pause
        """Whether the replica is paused."""
        self._targets: dict[str, _Target] = {}
        self._loop = asyncio.get_running_loop()
        self.rank_headers = rank_headers
        self.requests_count = 0

    async def close(self) -> None:
        """Close all connections at once; requests on them fail as if the replica had closed them."""
        closing = self._connector.close()
        if self._idle_timer is not None:
            self._idle_timer.cancel()
        for idle in self._idle.values():
            while idle:
                idle.popleft()[0].close()  # it was just closed; it has to hear of it
        await closing

    async def request(
        self,
        method: str,
        base_url: str,
        path: str,
        headers: CIMultiDict[str],
        body: bytes | None,
        timeout: aiohttp.ClientTimeout,  # noqa: ASYNC109 - the limits of the parts of a request
        total_timeout_s: float | None = None,
        *,
        may_repeat: bool = False,
    ) -> Answer:
        """Send a request and return its answer's head; the request counts until the answer is whole or closed.

        It is sent once more, on a new connection, if a kept one dies at once: the engine closed it just then. Not so if
        that might do something twice: neither does the method say that it may be, nor `may_repeat`.
        `total_timeout_s` is for the whole answer: reading its body may raise `TimeoutError`, too.
        Raises `TimeoutError`, `ValueError` for a URL or headers that cannot be sent, or what aiohttp raises.
        """
        self.requests_count += 1
        limit = None if total_timeout_s is None else TotalLimit(total_timeout_s, self.pause)
        try:
            may_repeat = may_repeat or method in _IDEMPOTENT_METHODS
            if limit is None:
                return await self._exchange(method, base_url, path, headers, body, timeout, may_repeat=may_repeat)
            async with limit.head:
                answer = await self._exchange(method, base_url, path, headers, body, timeout, may_repeat=may_repeat)
        except BaseException:
            if limit is not None:
                limit.end()
            self.requests_count -= 1
            raise
        answer.limit_total(limit)
        return answer

    def answered(
        self, target: _Target, connection: Connection, sending: asyncio.Task[None] | None, *, keep: bool
    ) -> None:
        """Take a connection back whose request ended. Called by `Answer` alone."""
        self.requests_count -= 1
        if not keep or not _is_good(connection) or _sends(connection, sending):
            _close(connection, sending)
            return
        target.idle.append((connection, self._loop.time()))
        if self._idle_timer is None:
            self._idle_timer = self._loop.call_later(self._keepalive_s, self._close_idle)

    def _idle_connection(self, target: _Target) -> Connection | None:
        """Return the connection that was idle for the shortest time and is still good; None if there is none.

        The others grow old and are closed, so no more stay than are of use, and the engine is about to close few.
        """
        oldest_s = self._loop.time() - self._keepalive_s
        while target.idle:
            connection, since_s = target.idle.pop()
            if since_s >= oldest_s and _is_good(connection):
                return connection
            connection.close()
        return None

    def _close_idle(self) -> None:
        """Close what was idle for too long."""
        self._idle_timer = None
        oldest_s = self._loop.time() - self._keepalive_s
        for idle in self._idle.values():
            while idle and (idle[0][1] <= oldest_s or idle[0][0].closed):
                idle.popleft()[0].close()
        if any(self._idle.values()):
            self._idle_timer = self._loop.call_later(self._keepalive_s, self._close_idle)

    async def _exchange(
        self,
        method: str,
        base_url: str,
        path: str,
        headers: CIMultiDict[str],
        body: bytes | None,
        timeout: aiohttp.ClientTimeout,  # noqa: ASYNC109
        *,
        may_repeat: bool,
    ) -> Answer:
        """Send a request; once more, on a new connection, if one that was kept turns out to be dead."""
        target = self._targets.get(base_url) or self._target(base_url)
        if not _SENDABLE.fullmatch(path):  # it is sent as it was judged, or not at all
            raise ValueError("the path of a request to a replica begins with / and holds no #, space or control")
        line = f"{method} {target.path}{path} HTTP/1.1"
        sent = CIMultiDict(target.headers)
        sent.extend(headers)
        if body is not None:
            sent["Content-Length"] = str(len(body))
        elif method not in _BODILESS_METHODS:
            sent["Content-Length"] = "0"
        sent_s = self._loop.time()
        try:
            return await self._attempt(target, self._idle_connection(target), method, line, sent, body, timeout)
        except _StaleConnectionError:
            if not may_repeat or self._loop.time() - sent_s > STALE_WITHIN_S:
                raise
        try:
            return await self._attempt(target, None, method, line, sent, body, timeout)
        except (aiohttp.ClientConnectorError, aiohttp.ConnectionTimeoutError) as error:
            # It was sent before, so this is no connection that could not be made.
            raise aiohttp.ServerDisconnectedError(f"it is gone: {error}") from error

    async def _attempt(
        self,
        target: _Target,
        connection: Connection | None,
        method: str,
        line: str,
        headers: CIMultiDict[str],
        body: bytes | None,
        timeout: aiohttp.ClientTimeout,  # noqa: ASYNC109
    ) -> Answer:
        """Send it on a kept connection, or on a new one. Raises `_StaleConnectionError` only for a kept one."""
        is_kept = connection is not None
        if connection is None:
            try:
                connection = await self._connector.connect(target.request, [], timeout)
            except TimeoutError as error:
                raise aiohttp.ConnectionTimeoutError("the connection was not made in time") from error
        sending = None
        try:
            protocol = connection.protocol
            assert protocol is not None
            protocol.set_response_params(
                skip_payload=method == "HEAD",
                read_until_eof=True,
                auto_decompress=False,
                read_timeout=timeout.sock_read,
                read_bufsize=READ_AHEAD_BYTES,
                max_line_size=MAX_HEADER_BYTES,
                max_field_size=MAX_HEADER_BYTES,
            )
            writer = StreamWriter(protocol, self._loop)
            await writer.write_headers(line, headers)
            protocol.start_timeout()
            if body is None or len(body) <= LARGE_BODY_BYTES:
                await (writer.write(body, drain=False) if body else writer.write_eof())
            else:  # a task, because an engine may answer, and refuse, before it has read the whole body
                sending = self._loop.create_task(_send_pieces(writer, protocol, body))
            while True:
                message, content = await protocol.read()
                if message.code >= 200 or message.code == 101:  # others are about what is still to come
                    return Answer(message, content, connection, sending, self, target)
                is_kept = False  # bytes came, so it was alive
        except HttpProcessingError as error:
            _close(connection, sending)
            raise aiohttp.ClientConnectionError(f"what it answered is no HTTP: {error.message}") from error
        except (aiohttp.ClientOSError, aiohttp.ServerDisconnectedError):
            _close(connection, sending)
            if is_kept:
                raise _StaleConnectionError from None
            raise
        except BaseException:
            _close(connection, sending)
            raise

    def _target(self, base_url: str) -> _Target:
        url = URL(base_url, encoded=True)
        headers = [("Host", url.host_port_subcomponent or "")]
        if url.raw_user or url.raw_password:
            login = f"{url.user or ''}:{url.password or ''}"
            headers.append(("Authorization", f"Basic {b64encode(login.encode('latin1')).decode()}"))
        request = aiohttp.ClientRequest("GET", url, loop=self._loop)
        path = url.raw_path.rstrip("/")
        self._targets[base_url] = target = _Target(
            request, path, tuple(headers), self._idle.setdefault(request.connection_key, deque())
        )
        return target


async def _send_pieces(writer: StreamWriter, protocol: ResponseHandler, body: bytes) -> None:
    """Send a large body; if the connection closes, whoever waits for the answer hears of it."""
    view = memoryview(body)
    with suppress(ConnectionError):
        for start in range(0, len(body), PIECE_BYTES):
            await writer.write(view[start : start + PIECE_BYTES])
            protocol.start_timeout()  # it took some, or all, so it is not silent


def _is_good(connection: Connection) -> bool:
    """Say whether a connection may have another request: it is open, and nothing came that nobody asked for."""
    protocol = connection.protocol
    return protocol is not None and protocol.is_connected() and not protocol.should_close


def _sends(connection: Connection, sending: asyncio.Task[None] | None) -> bool:
    """Say whether something of a request was not sent yet."""
    transport = connection.transport
    return (sending is not None and not sending.done()) or (
        transport is not None and transport.get_write_buffer_size() > 0
    )


def _close(connection: Connection, sending: asyncio.Task[None] | None) -> None:
    """Close a connection: without what was not sent yet, if there is any."""
    transport = connection.transport
    is_sending = _sends(connection, sending)
    if sending is not None:
        sending.cancel()
    if transport is not None and is_sending:
        transport.abort()
    connection.close()
