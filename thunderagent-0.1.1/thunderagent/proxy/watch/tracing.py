"""Spans of OpenTelemetry: a program, its turns with their holds, what engines do, and the tools in between.

Theory of operation
===================
Spans are made from the runtime's events and decisions, so the hot path knows nothing of them:

    program  from its first turn to its end
      turn     one request, from its arrival until its answer is whole (SERVER)
        hold     until its lease is granted; one for each try
        forward  the engine's part, with the event first_byte (CLIENT); its context goes to the engine
      tool     from the end of a turn that calls one to the program's next turn

A program's spans share one trace. A client that sends a `traceparent` has its own trace continued instead, and the turn
is linked to its program. A context variable says to which request an arrival belongs: the task that handles the request
dispatches it. Needs the extra `otel`.
"""

from __future__ import annotations

import threading
from collections.abc import Awaitable, Callable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from os import environ
from time import time_ns

from aiohttp import web
from multidict import CIMultiDict, CIMultiDictProxy
from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor
from opentelemetry.sdk.trace.sampling import ParentBased, TraceIdRatioBased
from opentelemetry.trace import Link, Span, SpanKind, Status, StatusCode, set_span_in_context
from opentelemetry.trace.propagation import get_current_span
from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

from thunderagent import __version__
from thunderagent.programs.messages import Decision, Event, Grant, Release, TurnAsk, TurnEnd, TurnStarted, is_rejected
from thunderagent.proxy.wire.aiohttp_request import told_path
from thunderagent.proxy.wire.headers import REQUEST_ID

Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]

CLOSE_S = 2.0
"""Time for the last spans to be sent at the end."""

_PROPAGATOR = TraceContextTextMapPropagator()
_OUTCOMES = {"finished": "finished", "failed": "failed", "refused": "failed", "abandoned": "abandoned"}


class _RequestTrace:
    """The spans of one request, from its first turn event on."""

    __slots__ = ("forward", "head_ns", "headers", "hold", "is_handled", "path", "program_id", "turn", "turn_ids")

    def __init__(self, headers: CIMultiDictProxy[str], path: str) -> None:
        self.headers = headers
        self.path = path
        self.program_id: str | None = None
        self.turn: Span | None = None
        self.hold: Span | None = None
        self.forward: Span | None = None
        self.head_ns: int | None = None
        self.turn_ids: set[int] = set()
        """Attempts that have not ended."""
        self.is_handled = False

    def answered(self, status: int) -> None:
        """Note the status of the answer."""
        if self.turn is not None:
            self.turn.set_attribute("http.response.status_code", status)
            if status >= 500:
                self.turn.set_status(Status(StatusCode.ERROR))

    def end_if_over(self) -> None:
        """End the turn once its handler and its leases have."""
        if self.is_handled and not self.turn_ids and self.turn is not None:
            self.turn.end()


class _ProgramTrace:
    """The span of a program, and the tool that runs."""

    __slots__ = ("span", "tool", "tool_since_ns")

    def __init__(self, span: Span) -> None:
        self.span = span
        self.tool = ""
        self.tool_since_ns = 0


_REQUEST: ContextVar[_RequestTrace | None] = ContextVar("request_trace", default=None)


class Tracing:
    """Makes spans of the runtime's events, and tells engines of them. Create it with `open_tracing`."""

    def __init__(self, provider: TracerProvider) -> None:
        """Send spans to `provider`, which `close` closes."""
        self._provider = provider
        self._tracer = provider.get_tracer("thunderagent", __version__)
        self._programs: dict[str, _ProgramTrace] = {}
        self._requests: dict[int, _RequestTrace] = {}
        """By turn that has not ended."""

    def __repr__(self) -> str:
        return f"<Tracing of {len(self._programs)} programs, {len(self._requests)} turns>"

    def close(self) -> None:
        """Send the rest, within `CLOSE_S`; call it where nothing waits for the loop."""
        for program in self._programs.values():
            program.span.end()
        # The exporter retries for longer than anybody wants to wait at the end, and its limit cannot be set.
        closing = threading.Thread(target=self._provider.shutdown, name="spans", daemon=True)
        closing.start()
        closing.join(CLOSE_S)

    def around(self, handler: Handler) -> Handler:
        """Wrap a handler, so that a turn in it is attributed to its request."""

        async def handle(request: web.Request) -> web.StreamResponse:
            with self.request(request.headers, told_path(request)) as trace:
                response = await handler(request)
                trace.answered(response.status)
                return response

        return handle

    @contextmanager
    def request(self, headers: CIMultiDictProxy[str], path: str) -> Iterator[_RequestTrace]:
        """Attribute a turn in the block to this request."""
        trace = _RequestTrace(headers, path)
        _REQUEST.set(trace)
        try:
            yield trace
        finally:
            trace.is_handled = True
            trace.end_if_over()

    # --- what engines hear, and are heard to do ----------------------------------------------------------------------

    def inject(self, headers: CIMultiDict[str]) -> None:
        """Write the trace context of the current turn; for other requests it passes unchanged."""
        trace = _REQUEST.get()
        if trace is not None and trace.forward is not None:
            _PROPAGATOR.inject(headers, set_span_in_context(trace.forward))

    def answered(self, status: int) -> None:
        """Note that the head of an engine's answer arrived."""
        trace = _REQUEST.get()
        if trace is not None and trace.forward is not None:
            trace.head_ns = time_ns()
            trace.forward.set_attribute("http.response.status_code", status)

    # --- what the runtime tells --------------------------------------------------------------------------------------

    def observe(self, event: Event, decisions: Sequence[Decision]) -> None:
        """Follow turns as they arrive, are granted, and end."""
        kind = type(event)
        if kind is TurnAsk:
            assert isinstance(event, TurnAsk)
            if not is_rejected(event.turn_id, decisions):
                self._arrived(event)
        elif kind is TurnStarted:
            assert isinstance(event, TurnStarted)
            self._started(event)
        elif kind is TurnEnd:
            assert isinstance(event, TurnEnd)
            self._ended(event)
        for decision in decisions:
            if type(decision) is Grant:
                self._granted(decision)
            elif type(decision) is Release:
                program = self._programs.pop(decision.program_id, None)
                if program is not None:
                    program.span.set_attribute("thunderagent.reason", decision.reason.value)
                    program.span.end()

    def _arrived(self, event: TurnAsk) -> None:
        trace = _REQUEST.get()
        if trace is None:
            return
        program_id = event.program_id
        program = self._program(program_id) if program_id is not None else None
        if program is not None and program.tool_since_ns:
            self._tool_ended(program)
        if trace.turn is None:
            trace.program_id = program_id
            trace.turn = self._begin_turn(trace, program)
        trace.hold = self._tracer.start_span("hold", set_span_in_context(trace.turn))
        trace.turn_ids.add(event.turn_id)
        self._requests[event.turn_id] = trace

    def _program(self, program_id: str) -> _ProgramTrace:
        program = self._programs.get(program_id)
        if program is None:
            span = self._tracer.start_span("program", attributes={"thunderagent.program_id": program_id})
            program = self._programs[program_id] = _ProgramTrace(span)
        return program

    def _begin_turn(self, trace: _RequestTrace, program: _ProgramTrace | None) -> Span:
        """Start a turn's span in its client's trace, if it has one, otherwise in its program's."""
        context = _PROPAGATOR.extract(trace.headers)
        is_clients = get_current_span(context).get_span_context().is_valid
        if program is not None and not is_clients:
            context = set_span_in_context(program.span)
        attributes = {"url.path": trace.path, "thunderagent.request_id": REQUEST_ID.get()}
        if trace.program_id is not None:
            attributes["thunderagent.program_id"] = trace.program_id
        links = [Link(program.span.get_span_context())] if program is not None and is_clients else []
        return self._tracer.start_span("turn", context, kind=SpanKind.SERVER, attributes=attributes, links=links)

    def _tool_ended(self, program: _ProgramTrace) -> None:
        attributes = {"thunderagent.tool": program.tool}
        span = self._tracer.start_span(
            "tool", set_span_in_context(program.span), attributes=attributes, start_time=program.tool_since_ns
        )
        span.end()
        program.tool_since_ns = 0

    def _granted(self, grant: Grant) -> None:
        trace = self._requests.get(grant.turn_id)
        if trace is None or trace.hold is None or trace.turn is None:
            return
        trace.hold.set_attribute("thunderagent.reason", grant.reason.value)
        trace.hold.end()
        trace.hold = None
        trace.forward = self._tracer.start_span(
            "forward",
            set_span_in_context(trace.turn),
            kind=SpanKind.CLIENT,
            attributes={"thunderagent.replica_id": grant.replica_id},
        )

    def _started(self, event: TurnStarted) -> None:
        trace = self._requests.get(event.turn_id)
        if trace is not None and trace.forward is not None:
            trace.forward.add_event("first_byte")
            trace.head_ns = None

    def _ended(self, event: TurnEnd) -> None:
        trace = self._requests.pop(event.turn_id, None)
        if trace is None:
            return
        assert trace.turn is not None
        trace.turn_ids.discard(event.turn_id)
        trace.turn.set_attribute("thunderagent.outcome", _OUTCOMES[event.outcome])
        if event.outcome == "finished":
            self._finished(trace, event)
        for span in (trace.hold, trace.forward):
            if span is not None:
                if event.outcome != "finished":
                    span.set_status(Status(StatusCode.ERROR, _OUTCOMES[event.outcome]))
                span.end()
        trace.hold = trace.forward = trace.head_ns = None
        trace.end_if_over()

    def _finished(self, trace: _RequestTrace, event: TurnEnd) -> None:
        assert trace.turn is not None
        if trace.forward is not None and trace.head_ns is not None:  # an answer in one piece begins with its head
            trace.forward.add_event("first_byte", timestamp=trace.head_ns)
        for name, count in (("input", event.prompt_tokens), ("output", event.output_tokens)):
            if count is not None:
                trace.turn.set_attribute(f"gen_ai.usage.{name}_tokens", count)
        program = self._programs.get(trace.program_id) if trace.program_id is not None else None
        if program is not None and event.tool:
            program.tool, program.tool_since_ns = event.tool, time_ns()


def open_tracing(endpoint: str, sample_ratio: float | None) -> Tracing:
    """Send spans to an OTLP collector (HTTP, protobuf) at `endpoint`, in the background, in batches.

    `sample_ratio` is the ratio of the traces starting here that are sent; None leaves that to `OTEL_TRACES_SAMPLER`.
    The other standard variables `OTEL_*` (headers, timeouts, batches, resource) apply, too.
    """
    url = endpoint.rstrip("/")
    if not url.endswith("/v1/traces"):
        url += "/v1/traces"
    is_named = "OTEL_SERVICE_NAME" in environ or "service.name=" in environ.get("OTEL_RESOURCE_ATTRIBUTES", "")
    resource = Resource.create(
        {"service.version": __version__} | ({} if is_named else {"service.name": "thunderagent"})
    )
    sampler = ParentBased(TraceIdRatioBased(sample_ratio)) if sample_ratio is not None else None
    provider = TracerProvider(sampler=sampler, resource=resource, shutdown_on_exit=False)
    provider.add_span_processor(BatchSpanProcessor(OTLPSpanExporter(endpoint=url)))
    return Tracing(provider)
