"""The connections to one replica: each carries one request at a time, and is kept for the next.

aiohttp opens and keeps them, and parses what comes. Its session stays out: with every request it looks for cookies,
redirects, proxies and middlewares, wraps the body, and starts a task to send it, which costs a turn more time than
everything that the proxy itself does with it.
"""

from __future__ import annotations

import asyncio
from base64 import b64encode
from collections.abc import Callable
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
"""RFC 9110, 9.2.2: may be sent once more if the connection closed before an answer came."""


class Answer:
    """An answer whose head is there; its body may still be on its way. Read it to its end, or close it."""

    __slots__ = ("_body", "_connection", "_on_end", "_sending", "content", "headers", "reason", "status")

    def __init__(
        self,
        message: RawResponseMessage,
        content: aiohttp.StreamReader,
        connection: Connection,
        sending: asyncio.Task[None] | None,
        on_end: Callable[[], None],
    ) -> None:
        """Give `connection` back when `content` is whole, and then call `on_end`.

        `sending` may still send the request; it is given up when the answer ends.
        """
        self.status: int = message.code
        self.reason: str = message.reason
        self.headers: CIMultiDictProxy[str] = message.headers
        self.content = content
        self._connection: Connection | None = connection
        self._sending = sending
        self._on_end = on_end
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
        limit.watch(self.content, self._connection)

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
        _let_go(connection, self._sending, keep=keep)
        self._on_end()


class _Target(NamedTuple):
    """What a base URL says of every request to it."""

    request: aiohttp.ClientRequest
    """What the connector wants to know; it is never sent."""
    path: str
    headers: tuple[tuple[str, str], ...]


class Pool:
    """The connections to one replica, and how many requests are on them."""

    def __init__(
        self, connector: aiohttp.TCPConnector, pause: Pause, rank_headers: tuple[tuple[str, str], ...] = ()
    ) -> None:
        """Connect with `connector`, which `close` closes; `rank_headers` replace the client's in every request."""
        self._connector = connector
        self.pause = pause
        """Whether the replica is paused."""
        self._targets: dict[str, _Target] = {}
        self._loop = asyncio.get_running_loop()
        self.rank_headers = rank_headers
        self.requests_count = 0

    async def close(self) -> None:
        """Close all connections at once; requests on them fail as if the replica had closed them."""
        await self._connector.close()

    async def request(
        self,
        method: str,
        base_url: str,
        path: str,
        headers: CIMultiDict[str],
        body: bytes | None,
        timeout: aiohttp.ClientTimeout,  # noqa: ASYNC109 - the limits of the parts of a request
        total_timeout_s: float | None = None,
    ) -> Answer:
        """Send a request and return its answer's head; the request counts until the answer is whole or closed.

        `total_timeout_s` is for the whole answer: reading its body may raise `TimeoutError`, too.
        Raises `TimeoutError`, `ValueError` for a URL or headers that cannot be sent, or what aiohttp raises.
        """
        self.requests_count += 1
        limit = None if total_timeout_s is None else TotalLimit(total_timeout_s, self.pause)
        try:
            if limit is None:
                return await self._exchange(method, base_url, path, headers, body, timeout)
            async with limit.head:
                answer = await self._exchange(method, base_url, path, headers, body, timeout)
        except BaseException:
            if limit is not None:
                limit.end()
            self._request_ended()
            raise
        answer.limit_total(limit)
        return answer

    def _request_ended(self) -> None:
        self.requests_count -= 1

    async def _exchange(
        self,
        method: str,
        base_url: str,
        path: str,
        headers: CIMultiDict[str],
        body: bytes | None,
        timeout: aiohttp.ClientTimeout,  # noqa: ASYNC109
    ) -> Answer:
        """Send a request, once more if a connection that was kept turns out to be closed, and nothing is done twice."""
        target = self._targets.get(base_url) or self._target(base_url)
        line = f"{method} {target.path}{path.partition('#')[0]} HTTP/1.1"
        sent = CIMultiDict(target.headers)
        sent.extend(headers)
        if body is not None:
            sent["Content-Length"] = str(len(body))
        elif method not in _BODILESS_METHODS:
            sent["Content-Length"] = "0"
        try:
            return await self._attempt(target, method, line, sent, body, timeout)
        except aiohttp.ClientConnectorError:
            raise
        except (aiohttp.ClientOSError, aiohttp.ServerDisconnectedError):
            if method not in _IDEMPOTENT_METHODS:
                raise
        return await self._attempt(target, method, line, sent, body, timeout)

    async def _attempt(
        self,
        target: _Target,
        method: str,
        line: str,
        headers: CIMultiDict[str],
        body: bytes | None,
        timeout: aiohttp.ClientTimeout,  # noqa: ASYNC109
    ) -> Answer:
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
                    return Answer(message, content, connection, sending, self._request_ended)
        except HttpProcessingError as error:
            _let_go(connection, sending, keep=False)
            raise aiohttp.ClientConnectionError(f"what it answered is no HTTP: {error.message}") from error
        except BaseException:
            _let_go(connection, sending, keep=False)
            raise

    def _target(self, base_url: str) -> _Target:
        url = URL(base_url, encoded=True)
        headers = [("Host", url.host_port_subcomponent or "")]
        if url.raw_user or url.raw_password:
            login = f"{url.user or ''}:{url.password or ''}"
            headers.append(("Authorization", f"Basic {b64encode(login.encode('latin1')).decode()}"))
        request = aiohttp.ClientRequest("GET", url, loop=self._loop)
        path = url.raw_path.rstrip("/")
        self._targets[base_url] = target = _Target(request, path, tuple(headers))
        return target


async def _send_pieces(writer: StreamWriter, protocol: ResponseHandler, body: bytes) -> None:
    """Send a large body; if the connection closes, whoever waits for the answer hears of it."""
    view = memoryview(body)
    with suppress(ConnectionError):
        for start in range(0, len(body), PIECE_BYTES):
            await writer.write(view[start : start + PIECE_BYTES])
            protocol.start_timeout()  # it took some, or all, so it is not silent


def _let_go(connection: Connection, sending: asyncio.Task[None] | None, *, keep: bool) -> None:
    """Let another request use a connection, or close it: without what was not sent yet, if there is any."""
    transport = connection.transport
    is_sent = transport is None or not transport.get_write_buffer_size()
    if sending is not None and not sending.done():
        sending.cancel()
        is_sent = False
    if keep and is_sent:
        connection.release()
        return
    if transport is not None and not is_sent:
        transport.abort()
    connection.close()
