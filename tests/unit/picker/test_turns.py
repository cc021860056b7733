"""The parts of a request that a picker forwards, as Envoy's messages."""

from __future__ import annotations

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
from thunderagent.proxy.gate.held import NO_LIMITS, HeldTurns
from thunderagent.proxy.reading.identity import NO_RULES
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


def head(*, ends: bool) -> Any:
    message = messages.ProcessingRequest()
    message.request_headers.end_of_stream = ends
    for name, value in {":method": "POST", ":path": "/v1/chat/completions", ":authority": "front"}.items():
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


async def picked(*sent: Any) -> list[tuple[str, bytes, bool]]:
    """Return what is forwarded of a request: kind, content, and whether it ends the body."""
    runtime = Runtime(Scheduler(Passthrough()))
    runtime.replica_at("r", "http://10.0.0.1:8000")
    runtime.replica_up("r")
    held, made = HeldTurns(NO_LIMITS, CollectorRegistry()), MadeAnswers(16)
    picker = Picker(Around(runtime, Addresses(runtime.replicas), held, made), NO_RULES, PickerSettings(2**20, 5.0))
    envoy = Envoy(*sent, answer())
    await picker.serve(Stream(envoy))
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
