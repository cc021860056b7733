"""The HTTP client of the data plane: one request to one replica, bytes unchanged, errors of our own."""

# compiled: each turn passes here

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from math import inf
from ssl import SSLContext
from typing import Final, Protocol, Self, TypeVar

from multidict import CIMultiDict

from thunderagent.backends.poller import ReplicaEndpoint
from thunderagent.errors import (
    ConnectTimeoutError,
    FirstByteTimeoutError,
    ReplicaAnswerTooLargeError,
    ReplicaClosedEarlyError,
    ReplicaError,
    ReplicaGarbledError,
    ReplicaLostError,
    ReplicaRefusedError,
    ReplicaRemovedError,
    ReplicaTimeoutError,
    ReplicaUnreachableError,
    TotalTimeoutError,
)
from thunderagent.proxy.wire.exchange import Channel, Sink
from thunderagent.proxy.wire.failures import (
    ClosedError,
    ConnectLateError,
    GarbledError,
    LostError,
    SilentError,
    TotalError,
    UnreachedError,
)
from thunderagent.proxy.wire.http11.client import Answer, Pool
from thunderagent.proxy.wire.http11.limits import Limits, Pause, Sweep

Found = TypeVar("Found")

BROKEN_OFF = (SilentError, TotalError, LostError, ClosedError)
"""What reading an answer's body may raise."""

MAX_READ_BYTES: Final = 2 * 2**20
"""The largest answer about an engine itself, or with an error, that is read whole."""

MAX_REPLY_BYTES: Final = 64 * 2**20
"""The largest reply to a control call: some tell weights."""


class Outgoing(Protocol):
    """A hook on every request, whoever sends it."""

    @property
    def answered(self) -> Callable[[int], None] | None:
        """Notes that the head of an answer of this status arrived; None if nobody wants to know."""

    def mend(self, headers: CIMultiDict[str]) -> None:
        """Change the headers in place, before they are sent."""


@dataclass(frozen=True, slots=True)
class ClientSettings:
    """Deadlines of the connections to replicas, and how replicas identify us.

    All except the first are suspended while a replica is paused.
    """

    connect_timeout_s: float = 5.0
    """For opening a connection."""
    first_byte_timeout_s: float | None = None
    """From there to the first byte of the answer, which takes as long as the whole if it is not streamed. None means
    `silence_timeout_s`: a paused engine may be silent for long."""
    silence_timeout_s: float = 3600.0
    """Between two bytes of an answer."""
    total_timeout_s: float | None = None
    """From the beginning of the connection to the last byte of the answer."""
    stall_limit_s: float = 120.0
    """A replica that reads nothing from a websocket for this long has failed."""
    keepalive_s: float = 4.0
    """An idle connection is closed after this time: before the 5 s after which vLLM's server closes it, because a
    request that meets the close would fail."""
    outgoing: Outgoing | None = None
    ssl_context: SSLContext | None = None
    """Which certificates to trust if a replica speaks https; None is the system's."""


class ReplicaClient:
    """Sends requests to replicas over kept-alive connections, with a pool for each; use it as a context manager."""

    def __init__(self, settings: ClientSettings) -> None:
        """Start without replicas."""
        self._settings = settings
        self._pools: dict[str, Pool] = {}
        self._sweep = Sweep(asyncio.get_running_loop())
        self._limits = Limits(
            settings.connect_timeout_s,
            settings.first_byte_timeout_s or settings.silence_timeout_s,
            inf if settings.total_timeout_s is None else settings.total_timeout_s,
        )

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    def add(self, endpoint: ReplicaEndpoint) -> None:
        """Allow requests to a replica. No connection is opened yet."""
        headers = () if endpoint.rank_id is None else ((endpoint.backend.rank_header, str(endpoint.rank_id)),)
        pause = Pause(asyncio.get_running_loop())
        context, keepalive_s = self._settings.ssl_context, self._settings.keepalive_s
        self._pools[endpoint.replica_id] = Pool(
            self._sweep, pause, headers, ssl_context=context, keepalive_s=keepalive_s
        )

    async def remove(self, replica_id: str) -> None:
        """Close all connections to a replica at once; requests on them fail as if it had closed them."""
        pool = self._pools.pop(replica_id, None)
        if pool is not None:
            await pool.close()

    async def close(self) -> None:
        """Close all connections to all replicas."""
        for replica_id in list(self._pools):
            await self.remove(replica_id)

    def set_paused(self, replica_id: str, *, paused: bool) -> None:
        """Set whether a replica is paused, so that its silence is no failure. Idempotent."""
        pool = self._pools.get(replica_id)
        if pool is not None:
            pool.pause.set(on=paused)

    def lose(self, replica_id: str, why: str, sent_ago_s: float = 0.0) -> None:
        """Fail the requests sent so long ago to a replica that was declared lost. An unknown id is ignored."""
        pool = self._pools.get(replica_id)
        if pool is not None:
            pool.lose(why, sent_ago_s)

    def requests_count(self, replica_id: str) -> int:
        """Return how many requests to a replica have not ended; 0 for an unknown one."""
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
        names_rank: bool = True,
        may_repeat: bool = False,
    ) -> Answer:
        """Send one request and return when the head of the answer has arrived; its body is not read.

        `path` is the raw path and query, `headers` are sent unchanged. Close the response, or read it to its end. If
        the replica is a rank, a header names it, instead of any that the client sent, unless `names_rank` is False:
        calls to a whole engine name none. `may_repeat` says that repeating the request is harmless, as for answers that
        are computed again. `silence_timeout_s` replaces the limits after the connection, for requests that may take
        longer than a turn. Raises `ReplicaUnreachableError` if no connection could be made (`ReplicaRefusedError` if
        nobody listens there, `ReplicaRemovedError` if the replica was removed, `ConnectTimeoutError` if that took too
        long), `ReplicaClosedEarlyError` if the replica closed it before it answered, `ReplicaGarbledError` if what it
        answered cannot be read, `ReplicaLostError` if it was declared lost, `FirstByteTimeoutError` or
        `TotalTimeoutError` if it stayed silent.
        """
        pool = self._pools.get(replica_id)
        if pool is None:
            raise ReplicaRemovedError(f"replica {replica_id} was removed", replica_id=replica_id)
        if pool.rank_headers and names_rank:
            headers = headers.copy()  # other attempts of the request go elsewhere
            headers.update(pool.rank_headers)
        settings = self._settings
        if settings.outgoing is not None:
            settings.outgoing.mend(headers)
        if "@" in base_url:  # send its name and password, and no others
            headers = headers.copy()  # as above
            headers.popall("Authorization", None)
        limits = self._limits
        if silence_timeout_s is not None:
            limits = Limits(settings.connect_timeout_s, silence_timeout_s)
        try:
            answer = await pool.request(method, base_url, path, headers, body, limits, may_repeat=may_repeat)
        except (UnreachedError, ConnectLateError, GarbledError, LostError) as error:
            raise _ended_by(replica_id, error) from None
        except SilentError:
            limited = self._settings.first_byte_timeout_s is not None
            late = FirstByteTimeoutError if limited else ReplicaTimeoutError
            raise late(f"replica {replica_id} did not begin to answer in time", replica_id=replica_id) from None
        except TotalError:
            raise TotalTimeoutError(
                f"replica {replica_id} did not begin to answer in time", replica_id=replica_id
            ) from None
        except (ClosedError, ValueError) as error:
            raise ReplicaClosedEarlyError(
                f"replica {replica_id} closed the connection before it answered: {error}", replica_id=replica_id
            ) from None
        if settings.outgoing is not None and (answered := settings.outgoing.answered) is not None:
            answered(answer.status)
        if settings.first_byte_timeout_s is not None and silence_timeout_s is None:
            answer.limit_silence(settings.silence_timeout_s)  # the first byte had another limit
        return answer

    async def read(self, replica_id: str, answer: Answer, max_bytes: int = MAX_READ_BYTES) -> bytes:
        """Read the whole body of an answer. Raises like `next_chunk`, and `ReplicaAnswerTooLargeError`."""
        if not answer.is_whole:
            await _received(replica_id, answer.whole_within(max_bytes))
        if not answer.is_whole or len(answer.whole()) > max_bytes:
            why = f"replica {replica_id} answered with more than {max_bytes} bytes"
            raise ReplicaAnswerTooLargeError(why, replica_id=replica_id)
        return answer.whole()

    def whole_within(self, replica_id: str, answer: Answer, max_bytes: int) -> Awaitable[bool]:
        """Wait for the whole body of an answer; return False as soon as it is larger. Raises like `next_chunk`."""
        return _received(replica_id, answer.whole_within(max_bytes))

    def next_chunk(self, replica_id: str, answer: Answer) -> Awaitable[bytes]:
        """Return the next bytes of an answer's body, as many as arrived; empty at its end.

        Raises `ReplicaClosedEarlyError` if it breaks off, `ReplicaGarbledError` if it cannot be read,
        `ReplicaLostError` if the replica was declared lost, `ReplicaTimeoutError` if it falls silent, and
        `TotalTimeoutError` if it takes too long in all.
        """
        return _received(replica_id, answer.next_piece())

    async def pipe(self, replica_id: str, answer: Answer, sink: Sink) -> None:
        """Pass the body of an answer to `sink`, piece by piece, and return at its end. Raises like `next_chunk`.

        If `sink` raises or returns an error, it is raised here, and no piece follows.
        """
        try:
            await answer.pipe(sink)
        except BROKEN_OFF as error:
            raise broken_off(replica_id, error) from None

    async def converse(self, replica_id: str, answer: Answer, client: Channel, sink: Sink) -> None:
        """After a protocol switch, pass the client's bytes to a replica, and the replica's bytes to `sink`.

        Returns and raises like `pipe`.
        """
        answer.converse(client, self._settings.stall_limit_s)
        await self.pipe(replica_id, answer, sink)


async def _received(replica_id: str, reading: Awaitable[Found]) -> Found:
    """Await bytes of an answer's body, and convert errors to ours."""
    try:
        return await reading
    except BROKEN_OFF as error:
        raise broken_off(replica_id, error) from None


def broken_off(replica_id: str, error: Exception) -> ReplicaError:
    """Return our error for an answer that ended too early, by the one that reading it raised."""
    if isinstance(error, SilentError):
        return ReplicaTimeoutError(
            f"replica {replica_id} stopped sending in the middle of its answer", replica_id=replica_id
        )
    if isinstance(error, TotalError):
        return TotalTimeoutError(f"replica {replica_id} took longer for its answer than allowed", replica_id=replica_id)
    if isinstance(error, (GarbledError, LostError)):
        return _ended_by(replica_id, error)
    return ReplicaClosedEarlyError(
        f"replica {replica_id} closed the connection in the middle of its answer: {error}", replica_id=replica_id
    )


def _ended_by(replica_id: str, error: UnreachedError | ConnectLateError | GarbledError | LostError) -> ReplicaError:
    if isinstance(error, (UnreachedError, ConnectLateError)):
        return _unreached(replica_id, error)
    if isinstance(error, GarbledError):
        return ReplicaGarbledError(f"replica {replica_id} sent no valid answer: {error}", replica_id=replica_id)
    return ReplicaLostError(f"replica {replica_id} is lost: {error}", replica_id=replica_id)


def _unreached(replica_id: str, error: UnreachedError | ConnectLateError) -> ReplicaUnreachableError:
    # Only a refusal shows that the replica is down: we may have run out of file descriptors, its backlog may be full.
    kind = ReplicaUnreachableError
    if isinstance(error, ConnectLateError):
        kind = ConnectTimeoutError
    elif error.is_refused:
        kind = ReplicaRefusedError
    return kind(f"replica {replica_id} cannot be reached: {error}", replica_id=replica_id)
