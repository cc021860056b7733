"""The gRPC side: Envoy's streams, and the health of the picker."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any

import grpc
import grpc.aio

from thunderagent.errors import ConfigurationError
from thunderagent.picker import messages
from thunderagent.picker.stream import Stream
from thunderagent.picker.turns import Picker

OPTIONS = (
    ("grpc.max_receive_message_length", 8 * 2**20),
    ("grpc.max_concurrent_streams", 2**31 - 1),
    ("grpc.so_reuseport", 0),
    # gRPC refuses streams at random while over 1,000 wait to be accepted: all turns of a burst must be held.
    ("grpc.server.max_pending_requests", 100_000),
    ("grpc.server.max_pending_requests_hard_limit", 100_000),
)


@dataclass(frozen=True, slots=True)
class Tls:
    """Certificates to show and to require: the contents of PEM files."""

    key: bytes
    chain: bytes
    client_ca: bytes | None
    """The authority of Envoys' certificates; None if they need none."""


@asynccontextmanager
async def listening(
    picker: Picker,
    is_ready: Callable[[], bool],
    host: str,
    port: int,
    tls: Tls | None,
    *,
    grace_s: float,
) -> AsyncIterator[int]:
    """Listen for Envoy for the length of the block; yield the port. Raises `ConfigurationError`."""
    server = grpc.aio.server(options=OPTIONS)

    async def process(_: Any, context: Any) -> None:
        stream = Stream(context)
        try:
            await picker.serve(stream)
        finally:
            stream.close()

    async def check(_: Any, __: Any) -> Any:
        return messages.HealthCheckResponse(status=messages.SERVING if is_ready() else messages.NOT_SERVING)

    request, response = messages.ProcessingRequest, messages.ProcessingResponse
    handlers = {
        messages.EXT_PROC_SERVICE: {
            "Process": grpc.stream_stream_rpc_method_handler(process, request.FromString, response.SerializeToString)
        },
        messages.HEALTH_SERVICE: {
            "Check": grpc.unary_unary_rpc_method_handler(
                check, messages.HealthCheckRequest.FromString, messages.HealthCheckResponse.SerializeToString
            )
        },
    }
    server.add_generic_rpc_handlers(
        tuple(grpc.method_handlers_generic_handler(service, methods) for service, methods in handlers.items())
    )
    address = f"{f'[{host}]' if ':' in host else host}:{port}"
    try:
        if tls is None:
            bound = server.add_insecure_port(address)
        else:
            credentials = grpc.ssl_server_credentials(
                [(tls.key, tls.chain)], root_certificates=tls.client_ca, require_client_auth=tls.client_ca is not None
            )
            bound = server.add_secure_port(address, credentials)
    except RuntimeError as error:
        raise ConfigurationError(f"picker_port: cannot listen on {address}: {error}") from error
    await server.start()
    try:
        yield bound
    finally:
        stopping = asyncio.ensure_future(server.stop(grace_s))
        await asyncio.shield(stopping)
