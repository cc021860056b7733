"""The parts of a request that a picker forwards, as Envoy's messages."""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any

import pytest
from prometheus_client import CollectorRegistry

pytest.importorskip("google.protobuf")

from thunderagent.picker import messages
from thunderagent.picker.addresses import Addresses
from thunderagent.picker.carried import Around
from thunderagent.picker.stream import Stream
from thunderagent.picker.turns import Picker, PickerSettings
from thunderagent.programs.policies.baselines.passthrough import Passthrough
from thunderagent.programs.scheduler import Scheduler
from thunderagent.proxy.fleet.made_answers import MadeAnswers
from thunderagent.proxy.gate.access import Use, use_of
from thunderagent.proxy.gate.held import NO_LIMITS, HeldTurns
from thunderagent.proxy.reading.dialects import TURN_DIALECTS
from thunderagent.proxy.reading.identity import NO_RULES
from thunderagent.proxy.reading.target import Target
from thunderagent.runtime import Runtime


class Envoy:
    """Sends some messages, then ends the exchange; keeps the answers."""

    def __init__(self, *sent: Any) -> None:
        self._sent = iter(sent)
        self.answers: list[Any] = []

    async def read(self) -> Any:
        return next(self._sent, None)

    async def write(self, message: Any) -> None:
        self.answers.append(message)


def head(*, ends: bool, method: str = "POST", path: str = "/v1/chat/completions", **more: str) -> Any:
    message = messages.ProcessingRequest()
    message.request_headers.end_of_stream = ends
    for name, value in {":method": method, ":path": path, ":authority": "front", **more}.items():
        message.request_headers.headers.headers.add(key=name, raw_value=value.encode())
    return message


def body(content: bytes, *, ends: bool) -> Any:
    message = messages.ProcessingRequest()
    message.request_body.body, message.request_body.end_of_stream = content, ends
    return message


def trailers() -> Any:
    message = messages.ProcessingRequest()
    message.request_trailers.SetInParent()
    return message


def answer() -> Any:
    message = messages.ProcessingRequest()
    message.response_headers.end_of_stream = True
    return message


def runtime_with_a_replica() -> Runtime:
    runtime = Runtime(Scheduler(Passthrough()))
    runtime.replica_at("r", "http://10.0.0.1:8000")
    runtime.replica_up("r")
    return runtime


async def serve(runtime: Runtime, envoy: Envoy) -> None:
    held, made = HeldTurns(NO_LIMITS, CollectorRegistry()), MadeAnswers(16)
    picker = Picker(Around(runtime, Addresses(runtime.replicas), held, made), NO_RULES, PickerSettings(2**20, 5.0))
    await picker.serve(Stream(envoy))


async def picked(*sent: Any) -> list[tuple[str, bytes, bool]]:
    """Return what is forwarded of a request: kind, content, and whether it ends the body."""
    envoy = Envoy(*sent, answer())
    await serve(runtime_with_a_replica(), envoy)
    parts = []
    for message in envoy.answers:
        (kind,) = (field.name for field, _ in message.ListFields() if field.name != "dynamic_metadata")
        part = getattr(message, kind)
        streamed = part.response.body_mutation.streamed_response if kind.endswith("_body") else None
        parts.append((kind, streamed.body if streamed else b"", streamed.end_of_stream if streamed else False))
    return parts


HEAD, ANSWER = ("request_headers", b"", False), ("response_headers", b"", False)
TRAILERS = ("request_trailers", b"", False)


@pytest.mark.parametrize(
    ("sent", "forwarded"),
    [
        ((head(ends=True),), []),
        ((head(ends=False), body(b"", ends=True)), [("request_body", b"", True)]),
        ((head(ends=False), body(b"[", ends=False), body(b"", ends=True)), [("request_body", b"[", True)]),
        ((head(ends=False), trailers()), [TRAILERS]),
        ((head(ends=False), body(b"[", ends=False), trailers()), [("request_body", b"[", False), TRAILERS]),
    ],
)
async def test_a_body_that_was_begun_is_ended(sent: tuple[Any, ...], forwarded: list[tuple[str, bytes, bool]]) -> None:
    """Even an empty one: an engine would wait for its end; one that ended with its head gets no message."""
    assert await picked(*sent) == [HEAD, *forwarded, ANSWER]


async def leases_and_answers(*sent: Any) -> tuple[int, list[Any]]:
    """Return how many leases a request took, and what Envoy heard."""
    runtime, envoy = runtime_with_a_replica(), Envoy(*sent)
    asked: list[Any] = []
    lease = runtime.lease

    def counted(ask: Any, while_held: Any = None) -> Any:
        asked.append(ask)
        return lease(ask, while_held or nullcontext())

    runtime.lease = counted  # type: ignore[method-assign]
    await serve(runtime, envoy)
    return len(asked), envoy.answers


METHODS = ("GET", "HEAD", "OPTIONS", "DELETE", "POST", "PUT", "PATCH", "QUERY", "TRACE", "CONNECT", "")
WAYS = (
    *TURN_DIALECTS,
    "/V1/chat//completions",
    "/v1/models",
    "/tokenize",
    "/inference/v1/unknown",
    "/pause",
    "/version",
)


@pytest.mark.parametrize("path", WAYS)
async def test_every_method_takes_a_lease_exactly_where_it_does_at_the_proxy(path: str) -> None:
    """Engines accept PUT where they accept POST: so no method generates without a lease."""
    for method in METHODS:
        leases_count, answers = await leases_and_answers(head(ends=True, method=method, path=path), answer())
        use = use_of(Target.parse(path), method)
        is_refused = answers[0].HasField("immediate_response")
        assert leases_count == (use is Use.TURN), (method, path)
        assert is_refused or use in (Use.TURN, Use.SIDE_CALL), (method, path)
        assert not (is_refused and use is Use.TURN), (method, path)


async def test_a_websocket_is_not_passed_without_a_lease() -> None:
    asks = head(ends=False, method="GET", path="/v1/realtime", upgrade="websocket", connection="upgrade")
    leases_count, answers = await leases_and_answers(asks)
    assert (leases_count, answers[0].immediate_response.status.code) == (0, 403)
