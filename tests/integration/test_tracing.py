"""Spans as a collector gets them over HTTP, decoded from their bytes; and the trace context that engines get."""

from __future__ import annotations

import asyncio
import gzip
import re
from collections import Counter
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import pytest
from aiohttp import web
from multidict import CIMultiDict, CIMultiDictProxy
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest
from opentelemetry.sdk.trace import TracerProvider

from tests.integration.support import (
    ANSWER,
    CHAT,
    DEADLINE_S,
    DONE,
    USAGE_EVENT,
    Call,
    FakeReplica,
    Gate,
    answers,
    ask,
    cap,
    end_to_end,
    exchange,
    fake_replica,
    post,
    running_proxy,
    streams,
    turn,
    until,
    word,
)
from tests.loopback import on_loopback
from thunderagent.config import ServeConfig
from thunderagent.errors import ConfigurationError
from thunderagent.programs.messages import Reason, Reject, TurnAsk
from thunderagent.proxy.watch.tracing import Tracing

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

TRACE_ID, PARENT_ID = "0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331"
CLIENTS = ("traceparent", f"00-{TRACE_ID}-{PARENT_ID}-01")
CALL = {"function": {"name": "bash", "arguments": '{"command": "pytest -q"}'}, "id": "1", "type": "function"}
CALLING = {**ANSWER, "choices": [{"index": 0, "message": {"role": "assistant", "tool_calls": [CALL]}}]}


@dataclass
class Collector:
    """An OTLP collector that keeps its input."""

    url: str = ""
    spans: list[Any] = field(default_factory=list)
    resources: list[dict[str, str]] = field(default_factory=list)
    headers: list[dict[str, str]] = field(default_factory=list)

    async def take(self, request: web.Request) -> web.Response:
        assert request.path == "/v1/traces"
        body = await request.read()
        if request.headers.get("Content-Encoding") == "gzip":
            body = gzip.decompress(body)
        self.headers.append(dict(request.headers))
        for resource_spans in ExportTraceServiceRequest.FromString(body).resource_spans:
            self.resources.append({each.key: each.value.string_value for each in resource_spans.resource.attributes})
            for scope_spans in resource_spans.scope_spans:
                self.spans += scope_spans.spans
        return web.Response(body=b"", content_type="application/x-protobuf")

    def named(self, name: str) -> list[Any]:
        """Return the spans of a name, in the order of their beginnings."""
        return sorted((span for span in self.spans if span.name == name), key=lambda span: span.start_time_unix_nano)

    def attribute(self, span: Any, name: str) -> Any:
        for each in span.attributes:
            if each.key == name:
                return getattr(each.value, each.value.WhichOneof("value"))
        return None


@pytest.fixture
async def collector(monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Collector]:
    """Run a collector that gets spans every 20 ms."""
    monkeypatch.setenv("OTEL_BSP_SCHEDULE_DELAY", "20")
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_HEADERS", "x-tenant=t1")
    ours = Collector()
    app = web.Application()
    app.router.add_post("/{path:.*}", ours.take)
    # A connection that it closed before the exporter's next batch would leave an error whose traceback keeps the
    # exporter's sockets until the next garbage collection.
    async with on_loopback(app, access_log=None, keepalive_timeout=60) as ours.url:
        yield ours


@asynccontextmanager
async def traced(collector: Collector, replica: FakeReplica, **config: Any) -> AsyncIterator[str]:
    async with running_proxy(replica.url, otlp_endpoint=collector.url, **config) as proxy:
        yield proxy.url


def context_of(call: Call) -> tuple[str, str, bool]:
    """Return the trace, the parent, and whether the trace is sampled, as an engine was told."""
    match = re.fullmatch(r"00-(\w{32})-(\w{16})-(\w{2})", call.header("traceparent") or "")
    assert match is not None
    return match[1], match[2], bool(int(match[3], 16) & 1)


def is_within(inner: Any, outer: Any) -> bool:
    return (
        inner.parent_span_id == outer.span_id
        and inner.trace_id == outer.trace_id
        and outer.start_time_unix_nano <= inner.start_time_unix_nano
        and inner.end_time_unix_nano <= outer.end_time_unix_nano
    )


def test_a_turn_that_is_rejected_as_it_arrives_leaves_nothing() -> None:
    """No event ends it, nor the program that it would have begun."""
    tracing = Tracing(TracerProvider())
    with tracing.request(CIMultiDictProxy(CIMultiDict()), CHAT):
        tracing.observe(TurnAsk(now_s=0.0, turn_id=1, program_id="p"), [Reject(1, "p", Reason.TOO_MANY_PROGRAMS)])
    assert repr(tracing) == "<Tracing of 0 programs, 0 turns>"


async def test_a_program_is_one_trace_of_turns_and_tools(collector: Collector) -> None:
    """Each turn has a hold and a forward, tools lie between turns, all under the program, which ends at its release."""
    async with fake_replica(answers(CALLING)) as replica, traced(collector, replica) as url:
        await post(url, CHAT, turn("p"), ("X-Request-Id", "mine"))
        await asyncio.sleep(0.06)
        await ask(url, "p")
        await exchange(url, "DELETE", "/programs/p")
        await until(lambda: len(collector.spans) == 8)
        (program,), turns, holds = (collector.named(name) for name in ("program", "turn", "hold"))
        forwards, (tool,) = collector.named("forward"), collector.named("tool")
        assert {span.trace_id for span in collector.spans} == {program.trace_id}
        assert not program.parent_span_id
        for each, hold, forward in zip(turns, holds, forwards, strict=True):
            assert each.parent_span_id == program.span_id
            assert is_within(hold, each)
            assert is_within(forward, each)
            assert hold.end_time_unix_nano <= forward.start_time_unix_nano
            assert [event.name for event in forward.events] == ["first_byte"]
            assert collector.attribute(forward, "thunderagent.replica_id") == replica.replica_id
            assert collector.attribute(each, "thunderagent.outcome") == "finished"
            assert collector.attribute(each, "gen_ai.usage.input_tokens") == 10
        assert collector.attribute(turns[0], "thunderagent.request_id") == "mine"
        assert tool.parent_span_id == program.span_id
        assert collector.attribute(tool, "thunderagent.tool") == "bash:pytest"
        assert tool.end_time_unix_nano - tool.start_time_unix_nano >= 50_000_000
        assert tool.end_time_unix_nano <= turns[1].start_time_unix_nano
        for call, forward in zip(replica.calls, forwards, strict=True):
            assert context_of(call) == (program.trace_id.hex(), forward.span_id.hex(), True)
        assert collector.resources[0]["service.name"] == "thunderagent"
        assert collector.headers[0]["x-tenant"] == "t1"


async def test_a_turn_on_the_replica_of_its_choice_is_traced(collector: Collector) -> None:
    """It has no program, whatever it names."""
    async with fake_replica() as replica, traced(collector, replica) as url:
        assert (await post(url, f"/workers/{replica.replica_id}{CHAT}", turn("p"))).status == 200
        await until(lambda: len(collector.spans) == 3)
        (ours,), (hold,), (forward,) = (collector.named(name) for name in ("turn", "hold", "forward"))
        assert is_within(hold, ours)
        assert is_within(forward, ours)
        assert not ours.parent_span_id
        assert collector.attribute(ours, "thunderagent.program_id") is None
        assert collector.attribute(ours, "thunderagent.outcome") == "finished"
        assert context_of(replica.calls[0]) == (ours.trace_id.hex(), forward.span_id.hex(), True)


async def test_a_client_s_trace_goes_on(collector: Collector) -> None:
    """It continues through us to the engine, with its state; the turn is linked to its program."""
    async with fake_replica(streams(word("a"), USAGE_EVENT, DONE)) as replica, traced(collector, replica) as url:
        answer = await post(url, CHAT, turn("p", stream=True), CLIENTS, ("tracestate", "vendor=1"), ("baggage", "a=b"))
        assert answer.whole
        await until(lambda: len(collector.spans) == 3)
        (ours,), (forward,) = collector.named("turn"), collector.named("forward")
        assert ours.trace_id.hex() == TRACE_ID
        assert ours.parent_span_id.hex() == PARENT_ID
        assert [event.name for event in forward.events] == ["first_byte"]
        assert len(ours.links) == 1
        sent = replica.calls[0]
        assert context_of(sent) == (TRACE_ID, forward.span_id.hex(), True)
        assert sent.header("tracestate") == "vendor=1"
        assert sent.header("baggage") == "a=b"
        linked = ours.links[0].span_id
    assert [span.span_id for span in collector.named("program")] == [linked]


async def test_a_hold_is_as_long_as_the_turn_waited(collector: Collector) -> None:
    """A turn that leaves, or is tried elsewhere, says so."""
    gate = Gate()
    async with (
        fake_replica(gate) as replica,
        running_proxy(replica.url, otlp_endpoint=collector.url, **cap(1)) as proxy,
    ):
        url = proxy.url
        first = asyncio.create_task(ask(url, "a"))
        await replica.call()
        second, third = (asyncio.create_task(ask(url, name)) for name in ("b", "c"))
        await until(lambda: proxy.runtime.held_count == 2)
        await asyncio.sleep(0.1)
        third.cancel()
        gate.open()
        await first
        await exchange(url, "DELETE", "/programs/a")
        await second
        await until(lambda: len(collector.named("turn")) == 3)
    long = [
        span for span in collector.named("hold") if span.end_time_unix_nano - span.start_time_unix_nano > 90_000_000
    ]
    assert len(long) == 2
    outcomes = Counter(collector.attribute(span, "thunderagent.outcome") for span in collector.named("turn"))
    assert outcomes == {"finished": 2, "abandoned": 1}
    assert len(collector.named("forward")) == 2
    assert len(collector.named("program")) == 3


async def test_side_call_keeps_its_trace_headers(collector: Collector) -> None:
    """There is no span, and the client's own context is untouched."""
    async with fake_replica() as replica, traced(collector, replica) as url:
        await exchange(url, "POST", "/tokenize", [CLIENTS], b"{}")
        assert replica.calls[0].header("traceparent") == CLIENTS[1]
    assert not collector.spans


async def test_unsampled_traces_send_nothing(collector: Collector) -> None:
    """Engines are told that; a client that wants its trace gets it."""
    async with fake_replica() as replica, traced(collector, replica, trace_sample_ratio=0) as url:
        await ask(url, "p")
        assert context_of(replica.calls[0])[2] is False
        await post(url, CHAT, turn("p"), CLIENTS)
    assert Counter(span.name for span in collector.spans) == {"turn": 1, "hold": 1, "forward": 1}


async def test_without_the_option_headers_pass_unchanged() -> None:
    """Nothing of OpenTelemetry is added."""
    async with fake_replica() as replica, running_proxy(replica.url) as proxy:
        await post(proxy.url, CHAT, turn("p"), CLIENTS, ("tracestate", "vendor=1"))
        dropped = ("host", "content-length", "content-type")
        assert end_to_end(replica.calls[0].headers, *dropped) == [CLIENTS, ("tracestate", "vendor=1")]


async def test_a_collector_that_is_gone_disturbs_nobody() -> None:
    """It disturbs neither turns nor the shutdown."""
    async with (
        asyncio.timeout(DEADLINE_S),
        fake_replica() as replica,
        running_proxy(replica.url, otlp_endpoint="http://127.0.0.1:9") as proxy,
    ):
        assert (await ask(proxy.url, "p")).status == 200


def test_a_ratio_is_a_part() -> None:
    """It is not a percentage."""
    with pytest.raises(ConfigurationError, match="trace_sample_ratio"):
        ServeConfig.load(trace_sample_ratio=10)
