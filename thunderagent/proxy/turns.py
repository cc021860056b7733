"""The hot path: identify, take a lease, forward, relay, read the usage and the tool called, end the lease.

Theory of operation
===================
A lease is held in a `with` block: whatever ends the handler - the answer's end, an error, or the cancellation that
aiohttp sends when the client's connection goes - ends the lease, and `upstream.close()` in a `finally` ends the
request on the replica, because engines stop generating when their client is gone. So the four moments in which a
client can leave (held, before the first byte, in a stream, in a whole answer) need no code of their own.

A turn is tried again on another replica only as long as no byte of an answer has come, and only if the connection
failed: what an engine answers is the client's, whatever its status.
"""

from __future__ import annotations

import asyncio
from dataclasses import dataclass
from functools import partial
from time import monotonic

import aiohttp
import structlog
from aiohttp import web
from multidict import CIMultiDict

from thunderagent.backends.client import ReplicaClient
from thunderagent.errors import ReplicaError, ReplicaTimeoutError, ThunderAgentError, TurnAbortedError
from thunderagent.proxy.aborts import abort_answer, abortable
from thunderagent.proxy.dialects import NO_USAGE, TURN_DIALECTS, Dialect, Usage, dialect_of
from thunderagent.proxy.dialects.base import KeepId
from thunderagent.proxy.headers import forwarded_request_headers, forwarded_response_headers
from thunderagent.proxy.identity import CLASS_HEADER, TurnRequest, identify, split_path
from thunderagent.proxy.made_answers import MadeAnswers
from thunderagent.proxy.metrics import TurnMetrics
from thunderagent.proxy.replicas import Replicas, Watcher
from thunderagent.proxy.sandboxes import Sandboxes
from thunderagent.proxy.side_calls import SideCalls, cut, look_at
from thunderagent.proxy.tool_calls import StreamToolCalls, tool_of_answer
from thunderagent.proxy.usage import StreamUsage, usage_of_answer
from thunderagent.runtime import Lease, Runtime

log = structlog.get_logger("thunderagent.turns")

PROGRESS_PERIOD_S = 1.0
"""The scheduler hears at most so often how far a stream has come."""

LARGE_BODY_BYTES = 512 * 1024
"""What is larger is read on a thread, so that other turns go on meanwhile."""

MADE_ANSWERS_COUNT = 100_000
"""So many responses are remembered by their ids: about 20 MB."""


@dataclass(frozen=True, slots=True)
class TurnSettings:
    """How turns are forwarded."""

    retries_count: int = 2
    """How often a turn is tried again, on another replica, after the connection failed before the first byte."""
    program_headers: tuple[str, ...] = ()
    """Further headers that name the program."""
    names_programs: bool = False
    """Tell engines whose turn it is, so that the events of their KV cache say whose blocks they are about."""


class Record:
    """What happened to one turn, for its canonical line."""

    __slots__ = (
        "arrived_s",
        "authorization",
        "dialect",
        "engine_request_id",
        "held_s",
        "outcome",
        "reason",
        "replica_id",
        "status",
        "tool",
        "tries_count",
        "turn",
        "usage",
    )

    def __init__(self, turn: TurnRequest, dialect: Dialect, arrived_s: float) -> None:
        """Begin with a turn that has no lease yet; unless it ends otherwise, its client left."""
        self.turn = turn
        self.dialect = dialect
        self.arrived_s = arrived_s
        self.outcome = "abandoned"
        self.status: int | None = None
        self.replica_id: str | None = None
        self.engine_request_id = ""
        self.authorization: str | None = None
        self.reason: str | None = None
        self.held_s = 0.0
        self.tries_count = 0
        self.usage = NO_USAGE
        self.tool = ""


class Turns:
    """Handle the endpoints on which a request is a turn."""

    def __init__(
        self,
        runtime: Runtime,
        client: ReplicaClient,
        replicas: Replicas,
        watcher: Watcher,
        metrics: TurnMetrics,
        settings: TurnSettings,
        sandboxes: Sandboxes | None = None,
    ) -> None:
        """Forward with `client` to `replicas`, under leases of `runtime`."""
        self._sandboxes = sandboxes
        self._runtime = runtime
        self._client = client
        self._replicas = replicas
        self._watcher = watcher
        self._metrics = metrics
        self._settings = settings
        self._made = MadeAnswers(MADE_ANSWERS_COUNT)
        self._side_calls = SideCalls(
            client,
            replicas,
            watcher,
            self._made,
            retries_count=settings.retries_count,
            program_headers=settings.program_headers,
        )
        self._log = log.bind()

    async def handle(self, request: web.Request) -> web.StreamResponse:
        """Answer one turn. A body that is no JSON object goes to an engine as it is, for its own words on it."""
        arrived_s = monotonic()
        path_id, path = split_path(request.raw_path)
        body = await request.read()
        bare_path = path.partition("?")[0]
        dialect = TURN_DIALECTS.get(bare_path) or dialect_of(bare_path)  # a spelling with escapes is routed here, too
        read = partial(identify, path_id, request.headers, body, self._settings.program_headers, dialect)
        turn = await asyncio.to_thread(read) if len(body) > LARGE_BODY_BYTES else read()
        if turn is None:
            return await self.forward(request)
        if self._sandboxes is not None and turn.program_id is not None and CLASS_HEADER in request.headers:
            self._sandboxes.program_seen(turn.program_id, request.headers[CLASS_HEADER])
        record = Record(turn, dialect, arrived_s)
        try:
            prompt_bytes = len(body) if turn.has_whole_prompt else 0
            return await self._try_replicas(request, path, prompt_bytes, record)
        except TurnAbortedError:
            content_type, answer = abort_answer(path, turn.body)
            record.status, record.outcome = 200, "aborted"
            return web.Response(body=answer, content_type=content_type, headers=_headers_of(record))
        except ThunderAgentError as error:
            record.status = error.status
            record.outcome = "failed" if isinstance(error, ReplicaError) else "rejected"
            raise
        finally:
            self._abort_unless_answered(record)
            self._write_line(record)
            if turn.is_final and record.outcome == "finished" and turn.program_id is not None:
                self._runtime.release(turn.program_id)

    async def _try_replicas(
        self, request: web.Request, path: str, prompt_bytes: int, record: Record
    ) -> web.StreamResponse:
        """Take a lease, forward, relay; before the first byte of an answer, try another replica if one fails."""
        turn = record.turn
        headers = forwarded_request_headers(request.headers)
        if self._settings.names_programs and turn.program_id is not None:
            headers["X-Session-ID"] = turn.program_id
        avoid_replica_id = None
        while True:
            asked_s = monotonic()
            try:
                lease = await self._runtime.lease(
                    turn.program_id,
                    branch_id=turn.branch_id,
                    prompt_bytes=prompt_bytes,
                    avoid_replica_id=avoid_replica_id,
                    prefix=turn.prefix,
                    group_id=turn.group_id,
                    abortable=abortable(path, turn.body),
                )
            except BaseException:
                record.held_s += monotonic() - asked_s
                raise
            with lease:
                record.replica_id = lease.replica_id
                record.reason = lease.reason
                record.held_s += lease.held_s
                record.tries_count += 1
                self._metrics.observe_hold(lease.held_s)
                record.authorization = headers.get("Authorization")
                named = self._replicas.name_turn(
                    lease.replica_id, path, turn.body, turn.program_id, record.authorization
                )
                record.engine_request_id = named.engine_request_id
                self._metrics.observe_added(monotonic() - record.arrived_s - record.held_s)
                try:
                    upstream = await self._client.send(
                        lease.replica_id, self._replicas.url_of(lease.replica_id), "POST", path, headers, named.body
                    )
                except ReplicaError as error:
                    self._lease_failed(lease, error)
                    if record.tries_count > self._settings.retries_count or isinstance(error, ReplicaTimeoutError):
                        raise
                    avoid_replica_id = error.replica_id
                    continue
                try:
                    return await self._relay(request, record, lease, upstream)
                finally:
                    upstream.close()

    async def forward(self, request: web.Request) -> web.StreamResponse:
        """Relay a request that is no turn, without a lease, to its program's replica or the least busy one."""
        return await self._side_calls.handle(request)

    async def forward_to(self, request: web.Request, replica_id: str, path: str) -> web.StreamResponse:
        """Relay a request, without a lease, to a replica that its client chose."""
        return await self._side_calls.forward_to(request, replica_id, path)

    async def _relay(
        self, request: web.Request, record: Record, lease: Lease, upstream: aiohttp.ClientResponse
    ) -> web.StreamResponse:
        """Relay an answer whose head has come, and end the lease."""
        record.status = upstream.status
        streams = upstream.content_type == "text/event-stream"
        headers = forwarded_response_headers(upstream.headers, keep_length=not streams)
        headers["X-Replica-ID"] = lease.replica_id
        headers.update(_headers_of(record))
        if streams:
            return await self._relay_stream(request, record, lease, upstream, headers)
        return await self._relay_whole(record, lease, upstream, headers)

    async def _relay_whole(
        self, record: Record, lease: Lease, upstream: aiohttp.ClientResponse, headers: CIMultiDict[str]
    ) -> web.Response:
        """Read an answer to its end, end the lease, and return it unchanged."""
        try:
            body = await self._client.read(lease.replica_id, upstream)
        except ReplicaError as error:
            self._lease_failed(lease, error)
            raise
        if upstream.status < 400:
            keep_id = partial(self._made.keep, replica_id=lease.replica_id)
            read = partial(_read_answer, record.dialect, body, upstream.headers.get("Content-Encoding"), keep_id)
            record.usage, record.tool = await asyncio.to_thread(read) if len(body) > LARGE_BODY_BYTES else read()
        self._end_lease(record, lease)
        return web.Response(status=upstream.status, reason=upstream.reason, headers=headers, body=body)

    async def _relay_stream(
        self,
        request: web.Request,
        record: Record,
        lease: Lease,
        upstream: aiohttp.ClientResponse,
        headers: CIMultiDict[str],
    ) -> web.StreamResponse:
        """Relay a stream of events as they come, and end the lease with the usage and the calls that they carry."""
        response = web.StreamResponse(status=upstream.status, reason=upstream.reason, headers=headers)
        await response.prepare(request)
        tool_calls = StreamToolCalls()
        stream = StreamUsage(
            take_out=record.turn.usage_added,
            content_encoding=upstream.headers.get("Content-Encoding"),
            listener=tool_calls.read,
            reader=record.dialect.reader(partial(self._made.keep, replica_id=lease.replica_id)),
        )
        progress_at_s = 0.0
        try:
            while chunk := await self._client.next_chunk(lease.replica_id, upstream):
                now_s = monotonic()
                if not progress_at_s:
                    lease.started()
                    progress_at_s = now_s + PROGRESS_PERIOD_S
                elif now_s > progress_at_s:
                    lease.progressed(stream.events_count)
                    progress_at_s = now_s + PROGRESS_PERIOD_S
                if relayed := stream.feed(chunk):
                    await response.write(relayed)
        except ReplicaError as error:
            record.outcome = "failed"
            self._lease_failed(lease, error)
            await _break_off(request, response, stream, record.dialect, error)
            return response
        if rest := stream.rest():
            await response.write(rest)
        record.usage = stream.usage
        record.tool = tool_calls.key()
        self._end_lease(record, lease)
        await response.write_eof()
        return response

    def _end_lease(self, record: Record, lease: Lease) -> None:
        """End the lease of a turn whose answer is whole; an engine's 4xx or 5xx is an answer too."""
        if record.status is not None and record.status < 400:
            record.outcome = "finished"
            lease.finished(*record.usage, record.tool)
        else:
            record.outcome = "refused"
            lease.refused()

    def _abort_unless_answered(self, record: Record) -> None:
        """Have the engine end a turn whose answer nobody got to its end; some kinds do not see it by the connection."""
        if record.replica_id is not None and record.outcome not in ("finished", "refused"):
            self._replicas.abort_turn(record.replica_id, record.engine_request_id, record.authorization)

    def _lease_failed(self, lease: Lease, error: ReplicaError) -> None:
        """Give a lease back that its replica failed, and have that replica looked at."""
        lease.failed()
        log.warning("replica_failed_turn", program_id=lease.program_id, replica_id=lease.replica_id, why=str(error))
        look_at(self._watcher, error)

    def _write_line(self, record: Record) -> None:
        """Write the turn's canonical line."""
        prompt_tokens, output_tokens, cached_tokens = record.usage
        self._log.info(
            "turn",
            program_id=record.turn.program_id,
            replica_id=record.replica_id,
            outcome=record.outcome,
            status=record.status,
            reason=record.reason,
            held_s=round(record.held_s, 4),
            duration_s=round(monotonic() - record.arrived_s, 4),
            tries_count=record.tries_count,
            prompt_tokens=prompt_tokens,
            output_tokens=output_tokens,
            cached_tokens=cached_tokens,
            tool=record.tool,
        )


def _read_answer(dialect: Dialect, body: bytes, content_encoding: str | None, keep_id: KeepId) -> tuple[Usage, str]:
    """Return the usage of a whole answer, and which tool it calls."""
    usage = usage_of_answer(dialect, body, content_encoding, keep_id)
    return usage, tool_of_answer(body, content_encoding)


async def _break_off(
    request: web.Request, response: web.StreamResponse, stream: StreamUsage, dialect: Dialect, error: ReplicaError
) -> None:
    """Tell the client of a stream that broke, as an event, and cut the connection: the answer is not whole."""
    if response.headers.get("Content-Encoding", "identity") == "identity":  # else an event would read as rubbish
        ending = dialect.break_off(error.code, error.message, stream.last_events)
        await response.write(stream.broken_off() + ending)
    cut(request)


def _headers_of(record: Record) -> dict[str, str]:
    """Return what the answer to a turn says about it, wherever it ran."""
    headers = {"X-Hold-Ms": str(round(record.held_s * 1000))}
    if record.turn.program_id is not None:
        headers["X-Program-ID"] = _header_safe(record.turn.program_id)
        headers["X-Program-ID-Source"] = record.turn.source
    return headers


def _header_safe(text: str) -> str:
    """Return a program id as a header can carry it."""
    return text if text.isascii() else text.encode("ascii", "backslashreplace").decode()
