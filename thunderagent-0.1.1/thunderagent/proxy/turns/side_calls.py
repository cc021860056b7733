"""Requests that are not turns: relayed without a lease, to a program's replica or the least busy one.

A side call computes little and keeps nothing, so it never waits. It is tried on another replica only before the first
byte of an answer, and only if that cannot execute anything twice: nothing was sent, or the request only reads.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial

import structlog
from aiohttp import web

from thunderagent.errors import (
    NoReplicaError,
    ReplicaError,
    ReplicaRefusedError,
    ReplicaTimeoutError,
    ReplicaUnreachableError,
    ThunderAgentError,
)
from thunderagent.proxy.fleet.client import ReplicaClient
from thunderagent.proxy.fleet.made_answers import MadeAnswers
from thunderagent.proxy.fleet.replicas import Replicas, Watcher
from thunderagent.proxy.gate.tenancy import Tenancy
from thunderagent.proxy.reading.body_fields import model_named
from thunderagent.proxy.reading.dialects import dialect_of
from thunderagent.proxy.reading.identity import IdentityRules, SideCallRequest, identify_side_call
from thunderagent.proxy.reading.outline import read_aside
from thunderagent.proxy.reading.target import Target
from thunderagent.proxy.wire.aiohttp_request import begin, target_of, write, write_eof
from thunderagent.proxy.wire.headers import (
    forwarded_request_headers,
    forwarded_response_headers,
    identity_headers,
    lead_back,
    tell_with_error,
)
from thunderagent.proxy.wire.http11.client import Answer

log = structlog.get_logger("thunderagent.side_calls")

IDEMPOTENT_METHODS = frozenset({"GET", "HEAD", "OPTIONS", "PUT", "DELETE"})
"""RFC 9110, section 9.2.2."""

PURE_CALLS = frozenset(
    {
        *("tokenize", "detokenize", "count_tokens", "render", "derender"),
        *("embeddings", "embed", "rerank", "score", "classify", "pooling", "decisions", "systemone"),
        *("generative_scoring", "parse_function_call", "separate_reasoning"),
    }
)
"""Last parts of paths on which a POST only reads."""

_SIZED_OR_ENCODED = ("Content-Length", "Content-Encoding")
"""Nothing can follow a body of given length, and an event would be unreadable in an encoded one."""


class SideCalls:
    """Relays what is not a turn."""

    def __init__(
        self,
        client: ReplicaClient,
        replicas: Replicas,
        watcher: Watcher,
        made: MadeAnswers,
        *,
        retries_count: int,
        identity: IdentityRules,
        tenancy: Tenancy,
    ) -> None:
        """Relay with `client`; a request that names an answer goes to the replica that `made` it."""
        self._client = client
        self._replicas = replicas
        self._watcher = watcher
        self._made = made
        self._retries_count = retries_count
        self._identity = identity
        self._tenancy = tenancy

    async def handle(self, request: web.Request) -> web.StreamResponse:
        """Relay one request, whatever its method. Raises `ReplicaError`, `NoReplicaError`, `UnknownModelError`."""
        target = target_of(request)
        body = await request.read()
        call = await self._read(request, target, body if request.method == "POST" else b"")
        headers = identity_headers(call.program_id, call.source)
        try:
            program_id = call.program_id if self._tenancy.may_touch(call.program_id) else None
            model = model_named(call.model, body) if self._replicas.has_pools else ""
            replica_id, upstream = await self._send(request, target, program_id, model, call.body or body)
        except ThunderAgentError as error:
            tell_with_error(error, headers)
            raise
        try:
            return await self._relay(request, target, replica_id, upstream, headers)
        finally:
            upstream.close()

    async def forward_to(self, request: web.Request, replica_id: str, target: Target) -> web.StreamResponse:
        """Relay one request to a replica that its client chose; `target` is the target there."""
        body = await request.read()
        if request.method == "POST" and self._tenancy.drops_priority:
            body = (await self._read(request, target, body)).body
        headers = forwarded_request_headers(request.headers)
        self._tenancy.mend(headers)
        try:
            url = self._replicas.url_of(replica_id)
            upstream = await self._client.send(replica_id, url, request.method, target.sent, headers, body or None)
        except ReplicaError as error:
            look_at(self._watcher, error)
            tell_with_error(error, {})
            raise
        try:
            return await self._relay(request, target, replica_id, upstream, {})
        finally:
            upstream.close()

    async def _read(self, request: web.Request, target: Target, body: bytes) -> SideCallRequest:
        rules = self._tenancy.rules(self._identity)
        read = partial(identify_side_call, target.program_id, request.headers, body, rules)
        return await read_aside(read, len(body))

    async def _send(
        self, request: web.Request, target: Target, program_id: str | None, model: str, body: bytes
    ) -> tuple[str, Answer]:
        """Send to one replica after the other until one answers; return its id, and the head of its answer."""
        headers = forwarded_request_headers(request.headers)
        self._tenancy.mend(headers)
        maker_id = self._made.maker_of(target.engine_path, self._tenancy.own)
        replica_id = self._replicas.known_id(maker_id) or self._replicas.serving(program_id, model=model)
        failed_ids: list[str] = []
        while True:
            try:
                url = self._replicas.url_of(replica_id)
                sending = self._client.send(
                    replica_id, url, request.method, target.sent, headers, body or None, may_repeat=_is_pure(target)
                )
                return replica_id, await sending
            except ReplicaError as error:
                look_at(self._watcher, error)
                failed_ids.append(replica_id)
                if maker_id is not None or len(failed_ids) > self._retries_count:
                    raise
                if not _may_repeat(request.method, target, error):
                    raise
                try:
                    replica_id = self._replicas.serving(program_id, avoid=failed_ids, model=model)
                except NoReplicaError:
                    raise error from None

    async def _relay(
        self,
        request: web.Request,
        target: Target,
        replica_id: str,
        upstream: Answer,
        headers: Mapping[str, str],
    ) -> web.StreamResponse:
        """Relay an answer whose head has arrived, with `headers` of ours."""
        response = web.StreamResponse(
            status=upstream.status,
            reason=upstream.reason,
            headers=forwarded_response_headers(upstream.headers, keep_length=True),
        )
        if "Location" in upstream.headers:
            lead_back(response.headers, self._replicas.url_of(replica_id), replica_id, target)
        response.headers.update({**headers, "X-Replica-ID": replica_id})
        await begin(request, response)
        last_chunk = b""
        try:
            while chunk := await self._client.next_chunk(replica_id, upstream):
                last_chunk = chunk
                await write(request, response, chunk)
        except ReplicaError as error:
            log.warning("replica_failed_request", replica_id=replica_id, path=target.engine_path, why=str(error))
            may_add = not any(name in upstream.headers for name in _SIZED_OR_ENCODED)
            if may_add and upstream.content_type == "text/event-stream":
                ending = dialect_of(target.spelt).break_off(error.status, error.code, error.message, last_chunk)
                await write(request, response, b"\n\n" + ending)
            cut(request)
            return response
        await write_eof(request, response)
        return response


def _may_repeat(method: str, target: Target, error: ReplicaError) -> bool:
    """Return whether a request that failed before its answer began may be sent to another replica."""
    if isinstance(error, ReplicaUnreachableError):
        return True  # nothing was sent
    if isinstance(error, ReplicaTimeoutError):
        return False
    return method in IDEMPOTENT_METHODS or _is_pure(target)


def _is_pure(target: Target) -> bool:
    return target.spelt.rpartition("/")[2] in PURE_CALLS


def look_at(watcher: Watcher, error: ReplicaError) -> None:
    """Have a failed replica polled; one that refuses connections is down."""
    if isinstance(error, ReplicaRefusedError):
        watcher.refused(error.replica_id)
    else:
        watcher.suspect(error.replica_id)


def cut(request: web.Request) -> None:
    """Close the client's connection, which is how HTTP marks a started answer as incomplete."""
    if request.transport is not None:
        request.transport.close()
