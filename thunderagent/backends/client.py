"""The HTTP client of the data plane: one request to one replica, bytes as they are, errors of our own."""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from functools import lru_cache
from io import BytesIO
from ssl import SSLContext
from typing import Any, Protocol

import aiohttp
from multidict import CIMultiDict
from yarl import URL

from thunderagent.backends.poller import ReplicaEndpoint
from thunderagent.errors import (
    ConnectTimeoutError,
    FirstByteTimeoutError,
    ReplicaClosedEarlyError,
    ReplicaRefusedError,
    ReplicaRemovedError,
    ReplicaTimeoutError,
    ReplicaUnreachableError,
    TotalTimeoutError,
)

MAX_HEADER_BYTES = 64 * 1024
LARGE_BODY_BYTES = 512 * 1024


class Outgoing(Protocol):
    """What is done to every request, whoever sends it."""

    def mend(self, headers: CIMultiDict[str]) -> None:
        """Mend the headers in place, before they are sent."""

    def answered(self, status: int) -> None:
        """Hear that the head of an answer came."""


@dataclass(frozen=True, slots=True)
class ClientSettings:
    """Deadlines of the connections to replicas, and what the replicas know us by."""

    connect_timeout_s: float = 5.0
    """For a connection to be made."""
    first_byte_timeout_s: float | None = None
    """From there to the first byte of the answer: of one that is not streamed that takes as long as the whole. None is
    `silence_timeout_s`: a paused engine may be silent for long."""
    silence_timeout_s: float = 3600.0
    """Between two bytes of an answer."""
    total_timeout_s: float | None = None
    """From the beginning of the connection to the last byte of the answer."""
    keepalive_s: float = 4.0
    """An idle connection is closed after so long: sooner than the 5 s after which vLLM's server closes it, because
    a request that meets the close would fail."""
    outgoing: Outgoing | None = None
    ssl_context: SSLContext | None = None
    """Whom to trust where a replica speaks https; None is whom the system trusts."""


class _PlainRequest(aiohttp.ClientRequest):
    """A request with the headers it was given: aiohttp's own Accept, Accept-Encoding and User-Agent stay out.

    `skip_auto_headers` does the same at the price of two copies of the headers for each request.
    """

    _skip_auto_headers = CIMultiDict({"Content-Type": None})  # which would come with a body

    def update_auto_headers(self, skip_auto_headers: object) -> None:
        """Add nothing."""


class _Pool:
    """The connections to one replica, and how many requests are on them."""

    __slots__ = ("connections", "rank_headers", "requests_count")

    def __init__(self, connections: aiohttp.ClientSession, rank_headers: tuple[tuple[str, str], ...]) -> None:
        self.connections = connections
        self.rank_headers = rank_headers
        self.requests_count = 0

    async def request(self, method: str, url: URL, **options: Any) -> aiohttp.ClientResponse:
        """Send a request, and count it until its connection is free again, or closed."""
        self.requests_count += 1
        try:
            response = await self.connections.request(method, url, **options)
        except BaseException:
            self._request_ended()
            raise
        if response.connection is not None:
            response.connection.add_callback(self._request_ended)
        else:
            self._request_ended()  # its whole answer is there
        return response

    def _request_ended(self) -> None:
        self.requests_count -= 1

    def timeout(self, silence_timeout_s: float | None) -> aiohttp.ClientTimeout:
        """Return the limits of a request: the usual ones, or with more patience after the connection."""
        usual = self.connections.timeout
        if silence_timeout_s is None:
            return usual
        return aiohttp.ClientTimeout(total=None, sock_connect=usual.sock_connect, sock_read=silence_timeout_s)


class ReplicaClient:
    """Send requests to replicas over kept-alive connections, a pool for each. Make it with `open_client`."""

    def __init__(self, settings: ClientSettings) -> None:
        """Know no replica yet."""
        self._settings = settings
        self._pools: dict[str, _Pool] = {}

    def add(self, endpoint: ReplicaEndpoint) -> None:
        """Let requests be sent to a replica. No connection is made yet."""
        headers = () if endpoint.rank_id is None else ((endpoint.backend.rank_header, str(endpoint.rank_id)),)
        self._pools[endpoint.replica_id] = _Pool(_connections(self._settings), headers)

    async def remove(self, replica_id: str) -> None:
        """Close all connections to a replica at once; requests on them fail as if it had closed them."""
        pool = self._pools.pop(replica_id, None)
        if pool is not None:
            await pool.connections.close()

    async def close(self) -> None:
        """Close all connections to all replicas."""
        for replica_id in list(self._pools):
            await self.remove(replica_id)

    def requests_count(self, replica_id: str) -> int:
        """Return how many requests to a replica have not ended; 0 for one that is not known."""
        pool = self._pools.get(replica_id)
        return pool.requests_count if pool is not None else 0

    async def send(
        self,
        replica_id: str,
        base_url: str,
        method: str,
        path: str,
        headers: CIMultiDict[str],
        body: bytes | None,
        *,
        silence_timeout_s: float | None = None,
    ) -> aiohttp.ClientResponse:
        """Send one request and return when the head of the answer is there; its body was not read.

        `path` is the raw path and query, `headers` are sent as they are. Close the response, or read it to its end.
        The replica's rank, if it is one, is named in a header, in place of any that the client sent.
        `silence_timeout_s` takes the place of the limits after the connection, for what may take longer than a turn.
        Raises `ReplicaUnreachableError` if no connection could be made (`ReplicaRefusedError` if nobody listens there,
        `ReplicaRemovedError` if the replica was removed, `ConnectTimeoutError` if that took too long),
        `ReplicaClosedEarlyError` if the replica closed it without a proper head, `FirstByteTimeoutError` or
        `TotalTimeoutError` if it stayed silent.
        """
        pool = self._pools.get(replica_id)
        if pool is None:
            raise ReplicaRemovedError(f"replica {replica_id} was removed", replica_id=replica_id)
        if pool.rank_headers:
            headers = headers.copy()  # other tries of the request go elsewhere
            headers.update(pool.rank_headers)
        # aiohttp warns of bytes that would be written in one go; a file it writes in pieces.
        data = body if body is None or len(body) <= LARGE_BODY_BYTES else BytesIO(body)
        if self._settings.outgoing is not None:
            self._settings.outgoing.mend(headers)
        if "@" in base_url:  # its name and password are sent; aiohttp refuses to send another
            headers.popall("Authorization", None)
        try:
            response = await pool.request(
                method,
                _url(base_url, path),
                data=data,
                headers=headers,
                allow_redirects=False,
                timeout=pool.timeout(silence_timeout_s),
            )
        except (aiohttp.ClientConnectorError, aiohttp.ConnectionTimeoutError) as error:
            raise _unreached(replica_id, error) from error
        except TimeoutError as error:
            late: type[ReplicaTimeoutError] = TotalTimeoutError
            if isinstance(error, aiohttp.SocketTimeoutError):
                limited = self._settings.first_byte_timeout_s is not None
                late = FirstByteTimeoutError if limited else ReplicaTimeoutError
            raise late(f"replica {replica_id} did not begin to answer in time", replica_id=replica_id) from error
        except (aiohttp.ClientError, ConnectionError, ValueError) as error:
            raise ReplicaClosedEarlyError(
                f"replica {replica_id} closed the connection before it answered: {error!r}", replica_id=replica_id
            ) from error
        if self._settings.outgoing is not None:
            self._settings.outgoing.answered(response.status)
        if self._settings.first_byte_timeout_s is not None and silence_timeout_s is None:
            self._expect_next_byte(response)
        if "Transfer-Encoding" in response.headers:
            _fail_reader_on_close(response)
        return response

    def _expect_next_byte(self, response: aiohttp.ClientResponse) -> None:
        """Let the limit between two bytes count, where another one did up to the first."""
        protocol = response.connection.protocol if response.connection is not None else None
        if protocol is not None:  # else the answer is whole already
            protocol.read_timeout = self._settings.silence_timeout_s
            protocol.start_timeout()

    async def read(self, replica_id: str, response: aiohttp.ClientResponse) -> bytes:
        """Read the whole body of an answer. Raises like `next_chunk`."""
        return await _received(replica_id, response.read())

    async def next_chunk(self, replica_id: str, response: aiohttp.ClientResponse) -> bytes:
        """Return the next bytes of an answer's body, whatever has come; empty at its end.

        Raises `ReplicaClosedEarlyError` if it breaks off, `ReplicaTimeoutError` if the replica falls silent,
        `TotalTimeoutError` if it takes too long in all.
        """
        return await _received(replica_id, response.content.readany())


def _fail_reader_on_close(response: aiohttp.ClientResponse) -> None:
    """Fail the reader of a chunked body when its connection closes before the last chunk.

    aiohttp (3.14) does that itself, but for a body whose chunks turn into garbage: there its parser gives up, and
    whoever reads would wait for ever, without a timeout.
    """
    content, connection = response.content, response.connection
    closed = connection.protocol.closed if connection is not None and connection.protocol is not None else None
    if closed is None:
        return

    def fail(_: object) -> None:
        if not content.is_eof() and content.exception() is None:
            content.set_exception(aiohttp.ClientPayloadError("the connection closed before the last chunk"))

    def whole() -> None:
        closed.remove_done_callback(fail)

    closed.add_done_callback(fail)
    content.on_eof(whole)


async def _received(replica_id: str, reading: Awaitable[bytes]) -> bytes:
    """Await bytes of an answer's body, with errors of our own."""
    try:
        return await reading
    except aiohttp.SocketTimeoutError as error:
        raise ReplicaTimeoutError(f"replica {replica_id} fell silent in its answer", replica_id=replica_id) from error
    except TimeoutError as error:
        raise TotalTimeoutError(
            f"replica {replica_id} took longer for its answer than is allowed", replica_id=replica_id
        ) from error
    except (aiohttp.ClientError, ConnectionError) as error:
        raise ReplicaClosedEarlyError(
            f"replica {replica_id} closed the connection in the middle of its answer: {error!r}", replica_id=replica_id
        ) from error


def _unreached(
    replica_id: str, error: aiohttp.ClientConnectorError | aiohttp.ConnectionTimeoutError
) -> ReplicaUnreachableError:
    # Only a refusal says that the replica is down: our own files may have run out, its backlog may be full.
    kind = ReplicaUnreachableError
    if isinstance(error, aiohttp.ConnectionTimeoutError):
        kind = ConnectTimeoutError
    elif isinstance(error.os_error, ConnectionRefusedError):
        kind = ReplicaRefusedError
    return kind(f"replica {replica_id} cannot be reached: {error}", replica_id=replica_id)


@lru_cache(maxsize=4096)
def _url(base_url: str, path: str) -> URL:
    return URL(base_url + path, encoded=True)


def _connections(settings: ClientSettings) -> aiohttp.ClientSession:
    return aiohttp.ClientSession(
        connector=aiohttp.TCPConnector(
            limit=0, keepalive_timeout=settings.keepalive_s, ssl=settings.ssl_context or True
        ),
        timeout=aiohttp.ClientTimeout(
            total=settings.total_timeout_s,
            sock_connect=settings.connect_timeout_s,
            sock_read=settings.first_byte_timeout_s or settings.silence_timeout_s,
        ),
        auto_decompress=False,
        request_class=_PlainRequest,
        cookie_jar=aiohttp.DummyCookieJar(),
        max_line_size=MAX_HEADER_BYTES,
        max_field_size=MAX_HEADER_BYTES,
        read_bufsize=2**20,
    )


@asynccontextmanager
async def open_client(settings: ClientSettings) -> AsyncIterator[ReplicaClient]:
    """Open a client for the length of the block."""
    client = ReplicaClient(settings)
    try:
        yield client
    finally:
        await client.close()
