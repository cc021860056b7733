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

from dataclasses import dataclass
from time import monotonic

import aiohttp
import msgspec
import structlog
from aiohttp import web
from multidict import CIMultiDict

from thunderagent.backends.client import ReplicaClient
from thunderagent.errors import (
    ReplicaError,
    ReplicaRefusedError,
    ReplicaTimeoutError,
    ThunderAgentError,
    TurnAbortedError,
)
from thunderagent.proxy.aborts import abort_answer, abortable
from thunderagent.proxy.headers import forwarded_request_headers, forwarded_response_headers
from thunderagent.proxy.identity import CLASS_HEADER, TurnRequest, identify, program_header_of, split_path
from thunderagent.proxy.metrics import TurnMetrics
from thunderagent.proxy.replicas import Replicas, Watcher
from thunderagent.proxy.sandboxes import Sandboxes
from thunderagent.proxy.tool_calls import StreamToolCalls, tool_of_answer
from thunderagent.proxy.usage import NO_USAGE, StreamUsage, usage_of_answer
from thunderagent.runtime import Lease, Runtime

log = structlog.get_logger("thunderagent.turns")

PROGRESS_PERIOD_S = 1.0
"""The scheduler hears at most so often how far a stream has come."""


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

    def __init__(self, turn: TurnRequest, arrived_s: float) -> None:
        """Begin with a turn that has no lease yet; unless it ends otherwise, its client left."""
        self.turn = turn
        self.arrived_s = arrived_s
        self.outcome = "abandoned"
        self.status: int | None = None
        self.replica_id: str | None = None
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
        self._log = log.bind()

    async def handle(self, request: web.Request) -> web.StreamResponse:
        """Answer one turn. A body that is no JSON object goes to an engine as it is, for its own words on it."""
        arrived_s = monotonic()
        path_id, path = split_path(request.raw_path)
        body = await request.read()
        turn = identify(path_id, request.headers, body, self._settings.program_headers)
        if turn is None:
            return await self.forward(request)
        if self._sandboxes is not None and turn.program_id is not None and CLASS_HEADER in request.headers:
            self._sandboxes.program_seen(turn.program_id, request.headers[CLASS_HEADER])
        record = Record(turn, arrived_s)
        try:
            return await self._try_replicas(request, path, len(body), record)
        except TurnAbortedError:
            content_type, answer = abort_answer(path, turn.body)
            record.status, record.outcome = 200, "aborted"
            return web.Response(body=answer, content_type=content_type, headers=_headers_of(record))
        except ThunderAgentError as error:
            record.status = error.status
            record.outcome = "failed" if isinstance(error, ReplicaError) else "rejected"
            raise
        finally:
            self._write_line(record)
            if turn.is_final and record.outcome == "finished" and turn.program_id is not None:
                self._runtime.release(turn.program_id)

    async def _try_replicas(
        self, request: web.Request, path: str, body_bytes: int, record: Record
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
                    prompt_bytes=body_bytes,
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
                self._metrics.observe_added(monotonic() - record.arrived_s - record.held_s)
                try:
                    upstream = await self._client.send(
                        lease.replica_id, self._replicas.url_of(lease.replica_id), "POST", path, headers, turn.body
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
        path_id, path = split_path(request.raw_path)
        header = program_header_of(request.headers, self._settings.program_headers)
        program_id = path_id or (request.headers[header] if header else None)
        return await self.forward_to(request, self._replicas.serving(program_id), path)

    async def forward_to(self, request: web.Request, replica_id: str, path: str) -> web.StreamResponse:
        """Relay a request, without a lease, to a replica; `path` is the raw path and query there."""
        body = await request.read()
        headers = forwarded_request_headers(request.headers)
        try:
            url = self._replicas.url_of(replica_id)
            upstream = await self._client.send(replica_id, url, request.method, path, headers, body or None)
        except ReplicaError as error:
            self._look_at(error)
            raise
        try:
            response = web.StreamResponse(
                status=upstream.status,
                reason=upstream.reason,
                headers=forwarded_response_headers(upstream.headers, keep_length=True),
            )
            response.headers["X-Replica-ID"] = replica_id
            await response.prepare(request)
            try:
                while chunk := await self._client.next_chunk(replica_id, upstream):
                    await response.write(chunk)
            except ReplicaError as error:
                log.warning("replica_failed_request", replica_id=replica_id, path=path, why=str(error))
                _cut(request)
                return response
            await response.write_eof()
            return response
        finally:
            upstream.close()

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
            content_encoding = upstream.headers.get("Content-Encoding")
            record.usage = usage_of_answer(body, content_encoding)
            record.tool = tool_of_answer(body, content_encoding)
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
            await _break_off(request, response, stream, error)
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

    def _lease_failed(self, lease: Lease, error: ReplicaError) -> None:
        """Give a lease back that its replica failed, and have that replica looked at."""
        lease.failed()
        log.warning("replica_failed_turn", program_id=lease.program_id, replica_id=lease.replica_id, why=str(error))
        self._look_at(error)

    def _look_at(self, error: ReplicaError) -> None:
        """Have a replica that failed looked at; one that refuses connections is down."""
        if isinstance(error, ReplicaRefusedError):
            self._watcher.refused(error.replica_id)
        else:
            self._watcher.suspect(error.replica_id)

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


async def _break_off(
    request: web.Request, response: web.StreamResponse, stream: StreamUsage, error: ReplicaError
) -> None:
    """Tell the client of a stream that broke, as an event, and cut the connection: the answer is not whole."""
    body = {"error": {"message": error.message, "type": "server_error", "param": None, "code": error.code}}
    if response.headers.get("Content-Encoding", "identity") == "identity":  # else an event would read as rubbish
        await response.write(stream.broken_off() + b"data: " + msgspec.json.encode(body) + b"\n\n")
    _cut(request)


def _cut(request: web.Request) -> None:
    """Close the client's connection, which is how HTTP says that an answer that has begun is not whole."""
    if request.transport is not None:
        request.transport.close()


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
