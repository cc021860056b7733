"""Speaks with engines whose own scheduler knows programs, as vLLM with `thunderagent-vllm` does.

Theory of operation
-------------------
**Who has it.** An engine is asked when it comes up, and, if it has the plugin, or did not answer in time, at each tenth
poll. One that answers 404, or what is no report, or refuses us, is not asked again until it comes up anew. Ranks behind
one URL are one engine.

**With a turn.** A turn of a program carries its id as `X-Session-ID`, and how long to hold its blocks afterwards as
`vllm_xargs.thunderagent_hold_s`: its client's hint, or else what the proxy was told to say. Other engines' turns are
unchanged.

**Between turns.** `release`, `pause` and `hold` are put into the engine's list, without an await, and sent soon, many
in one request and one request at a time. A list that is full loses its oldest messages, a request that fails loses its
own: pins end by themselves, and whoever needs their room takes it. Each answer is a report.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Coroutine, Mapping, Sequence
from contextvars import Context
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, Final

import msgspec
import structlog
from msgspec import Raw
from multidict import CIMultiDict

from thunderagent.backends.base import NamedTurn, ReplicaReading
from thunderagent.backends.vllm_plugin import PROTOCOL, PluginReport, read_reports, report_of
from thunderagent.errors import ReplicaError
from thunderagent.leases import TurnHint
from thunderagent.programs.messages import DROP, Decision, Event, Pause, ProgramHinted
from thunderagent.proxy.fleet.client import ReplicaClient
from thunderagent.proxy.fleet.known import KnownReplica
from thunderagent.proxy.reading.json_splice import set_value

log = structlog.get_logger("thunderagent.engine_plugins")

POLLS_COUNT: Final = 10
"""An engine with the plugin is asked for a report at each such poll."""

MOST_WAITING_COUNT: Final = 10_000
"""Messages that wait for one engine."""

BATCH_COUNT: Final = 500
"""Messages in one request: with the longest ids half of what the plugin reads."""

BATCH_S: Final = 0.1
"""How long the first message waits for others."""

MOST_HOLD_S: Final = 600.0
"""The plugin holds nothing longer without a new word."""

MOST_ID_CHARACTERS: Final = 256
"""Longer ids are no program's, for the plugin."""

PATHS: Final = frozenset({"/v1/chat/completions", "/v1/completions", "/v1/responses", "/v1/messages"})
"""Where a body may have `vllm_xargs`."""

HOLD_KEY: Final = "thunderagent_hold_s"

Op = tuple[str, str] | tuple[str, str, float]


@dataclass(slots=True, eq=False)
class _Engine:
    """What is known of the plugin of the engine at one URL."""

    url: str = field(repr=False)
    replica_ids: dict[str, None] = field(default_factory=dict)
    """Its ranks; a dict keeps their order."""
    reports: list[PluginReport] = field(default_factory=list)
    """The last ones, one for each rank; empty while it is not known to have the plugin."""
    is_absent: bool = False
    """Whether it is not asked until it comes up anew."""
    is_due: bool = False
    is_talking: bool = False
    is_failing: bool = False
    polls_count: int = 0
    """Polls since it was asked."""
    ops: deque[Op] = field(default_factory=lambda: deque(maxlen=MOST_WAITING_COUNT))


class EnginePlugins:
    """Knows which engines have the plugin, and speaks with them while `run` runs."""

    def __init__(
        self,
        known: Mapping[str, KnownReplica],
        timeout_s: float,
        *,
        is_wanted: bool = True,
        hold_s: float | None = None,
        observe: Callable[..., object] = lambda *_: None,
        replicas_of: Callable[[str], Sequence[str]] = lambda _: (),
    ) -> None:
        """Start without knowledge; an engine has `timeout_s` to answer.

        Unless it `is_wanted`, nobody is asked. `hold_s` is what is said with turns whose clients give no hint; None or
        0 leaves that to the engine. `observe` adds an observer of events, which is done when the first plugin is found;
        `replicas_of` returns where a program had tagged turns.
        """
        self._known = known
        self._timeout_s = timeout_s
        self._is_wanted = is_wanted
        self._hold_s = hold_s or None
        self._observe = observe
        self._replicas_of = replicas_of
        self._engines: dict[str, _Engine] = {}
        """By URL."""
        self._by_replica: dict[str, _Engine] = {}
        self._start: Callable[[Coroutine[Any, Any, None]], asyncio.Task[None]] | None = None
        self._client: ReplicaClient | None = None
        self._is_observing = False
        self.on_ids: set[str] = set()
        """Replicas whose engines are told of turns and programs."""

    def __repr__(self) -> str:
        with_it = [engine for engine in self._engines.values() if engine.reports]
        waiting_count = sum(len(engine.ops) for engine in with_it)
        return f"<EnginePlugins {len(with_it)} of {len(self._engines)} engines, {waiting_count} messages waiting>"

    # --- which engines have it

    def report(self, replica_id: str) -> PluginReport | None:
        """Return what the plugin of a replica's engine said last; None if it has none."""
        engine, known = self._by_replica.get(replica_id), self._known.get(replica_id)
        if engine is None or known is None or not engine.reports:
            return None
        return report_of(engine.reports, known.endpoint.rank_id)

    def without_pins(self, replica_id: str, reading: ReplicaReading) -> ReplicaReading:
        """Return a reading without the blocks that are held for programs: vLLM counts them as used."""
        if replica_id not in self.on_ids or reading.kv_used_ratio is None:
            return reading
        report = self.report(replica_id)
        pinned_ratio = report.pinned_ratio if report is not None else 0.0
        return replace(reading, kv_used_ratio=max(0.0, reading.kv_used_ratio - pinned_ratio))

    def capacity_tokens(self, replica_id: str, told_tokens: int | None) -> int | None:
        """Return the capacity of a replica: what was told, but no more than its engine's scheduler has."""
        report = self.report(replica_id) if replica_id in self.on_ids else None
        if report is None or report.capacity_tokens is None:
            return told_tokens
        return report.capacity_tokens if told_tokens is None else min(told_tokens, report.capacity_tokens)

    def came_up(self, replica_id: str) -> None:
        """Ask a replica's engine: another one may run there now."""
        known = self._known.get(replica_id)
        if not self._is_wanted or known is None or not known.endpoint.backend.plugin_path:
            self.forget(replica_id)
            return
        engine = self._engines.get(known.endpoint.url)
        if engine is None:
            engine = self._engines[known.endpoint.url] = _Engine(known.endpoint.url)
        if self._by_replica.get(replica_id) not in (None, engine):
            self.forget(replica_id)
        engine.replica_ids[replica_id] = None
        self._by_replica[replica_id] = engine
        self._set(engine, [])
        engine.is_absent, engine.is_due = False, True
        self._talk(engine)

    def polled(self, replica_id: str) -> None:
        """Count a good poll of a replica; its engine may be due to be asked."""
        engine = self._by_replica.get(replica_id)
        if engine is None:
            known = self._known.get(replica_id)
            if self._is_wanted and known is not None and known.endpoint.backend.plugin_path:  # its kind was found late
                self.came_up(replica_id)
            return
        if engine.is_absent or replica_id != next(iter(engine.replica_ids)):
            return
        engine.polls_count += 1
        if engine.polls_count >= POLLS_COUNT:
            engine.is_due = True
            self._talk(engine)

    def forget(self, replica_id: str) -> None:
        """Drop what is known of a removed replica. An unknown id is ignored."""
        engine = self._by_replica.pop(replica_id, None)
        if engine is None:
            return
        engine.replica_ids.pop(replica_id, None)
        self.on_ids.discard(replica_id)
        if not engine.replica_ids:
            engine.is_absent, engine.is_due = True, False
            self._set(engine, [])
            self._engines.pop(engine.url, None)

    def _set(self, engine: _Engine, reports: list[PluginReport]) -> None:
        """Store what an engine reported; nothing: it is not known to have the plugin."""
        engine.reports = reports
        is_on = bool(reports) and all(each.is_on for each in reports)
        if is_on:
            self.on_ids.update(engine.replica_ids)
        else:
            self.on_ids.difference_update(engine.replica_ids)
            engine.ops.clear()

    # --- with a turn

    def name_turn(
        self, path: str, body: bytes, program_id: str, hint: TurnHint | None, branch_id: str = ""
    ) -> NamedTurn:
        """Return a turn with its program's id, and how long to hold its blocks afterwards, if the id may be told.

        A branch is a session of its own: its turns begin while its program's blocks are held, and must not end that.
        """
        session_id = f"{program_id}/{branch_id}" if branch_id else program_id
        if not may_be_told(session_id):
            return NamedTurn(body)
        if path in PATHS:
            body = with_words(body, session_id, hold_s_of(hint, self._hold_s))
        return NamedTurn(body, is_tagged=True, session_id=session_id)

    # --- between turns

    def release(self, replica_id: str, program_id: str) -> None:
        """Tell a replica's engine that a program ended. Never blocks."""
        self._say(replica_id, ("release", program_id))

    def heard(self, event: Event, decisions: Sequence[Decision]) -> None:
        """Handle pauses, and hints of when the next turn comes.

        One that all may be dropped is not told, because it may be about the end of a turn that is under way.
        """
        for decision in decisions:
            if type(decision) is Pause:
                self._say(decision.replica_id, ("pause", decision.program_id))
        if type(event) is ProgramHinted and not event.branch_id:
            hold_s = hold_s_of(TurnHint(event.next_turn_in_s, event.confidence_ratio, event.keep), None)
            if hold_s:
                program_id = str(event.program_id)
                for replica_id in self._replicas_of(program_id):
                    self._say(replica_id, ("hold", program_id, hold_s))

    def _say(self, replica_id: str, op: Op) -> None:
        engine = self._by_replica.get(replica_id)
        if engine is None or replica_id not in self.on_ids or not may_be_told(op[1]):
            return
        if len(engine.ops) == MOST_WAITING_COUNT and not engine.is_failing:  # once, until one is sent again
            engine.is_failing = True
            log.warning("engine_plugin_messages_dropped", replica_id=replica_id)
        engine.ops.append(op)
        self._talk(engine)

    # --- the conversation

    async def run(self, client: ReplicaClient) -> None:
        """Speak with engines by `client` until cancelled."""
        try:
            async with asyncio.TaskGroup() as group:
                # In no request's context, as notices.
                self._client, self._start = client, partial(group.create_task, context=Context())
                for engine in self._engines.values():
                    self._talk(engine)
                await asyncio.get_running_loop().create_future()
        finally:
            self._start = None

    def _talk(self, engine: _Engine) -> None:
        """Begin to speak with an engine, if nobody does."""
        if self._start is not None and not engine.is_talking and (engine.is_due or engine.ops):
            engine.is_talking = True
            self._start(self._converse(engine))

    async def _converse(self, engine: _Engine) -> None:
        """Send and ask until there is nothing left to send or ask, one request at a time."""
        try:
            while engine.is_due or engine.ops:
                if not engine.is_due:
                    await asyncio.sleep(BATCH_S)
                if not engine.replica_ids or not (engine.is_due or engine.ops):
                    return  # its last replica was removed, or its plugin is off, meanwhile
                ops = [engine.ops.popleft() for _ in range(min(BATCH_COUNT, len(engine.ops)))]
                engine.is_due, engine.polls_count = False, 0
                await self._ask(engine, ops)
        finally:
            engine.is_talking = False

    async def _ask(self, engine: _Engine, ops: list[Op]) -> None:
        """Send messages, or nothing, and take the report. Expected failures end here."""
        assert self._client is not None
        replica_id = next(iter(engine.replica_ids))
        known = self._known.get(replica_id)
        path = known.endpoint.backend.plugin_path if known is not None else ""
        if not path:
            return
        before = engine.reports
        headers = CIMultiDict({"User-Agent": "thunderagent"})
        body = None
        if not before:  # most engines have none, and their first turns do without a connection that waited
            headers["Connection"] = "close"
        if ops:
            headers["Content-Type"] = "application/json"
            body = msgspec.json.encode({"protocol": PROTOCOL, "ops": ops})
        method, status, answer, why = "POST" if ops else "GET", 0, b"", ""
        try:
            async with asyncio.timeout(self._timeout_s):
                response = await self._client.send(
                    replica_id, engine.url, method, path, headers, body, names_rank=False
                )
                try:
                    answer, status = await self._client.read(replica_id, response), response.status
                finally:
                    response.close()
        except (TimeoutError, ReplicaError) as error:
            why = str(error) or f"no answer within {self._timeout_s:g} s"
        if replica_id not in engine.replica_ids or engine.reports is not before:
            return  # it was removed, or came up anew, meanwhile
        self._hear(engine, replica_id, status, answer, why)

    def _hear(self, engine: _Engine, replica_id: str, status: int, answer: bytes, why: str) -> None:
        reports = read_reports(answer) if status == 200 else []
        if reports:
            self._take(engine, replica_id, reports)
        elif status == 501 or (0 < status < 500 and status != 429):
            if status in (401, 403):
                log.warning(
                    "engine_plugin_refuses",
                    replica_id=replica_id,
                    status=status,
                    effect="it is told of no programs; set THUNDERAGENT_VLLM_KEY there and --backend-api-key here",
                )
            elif engine.reports:
                log.warning("engine_plugin_gone", replica_id=replica_id, status=status)
            engine.is_absent = True
            self._set(engine, [])
        elif engine.reports and not engine.is_failing:  # once, until it answers again
            engine.is_failing = True
            log.warning("engine_plugin_silent", replica_id=replica_id, why=why or status)

    def _take(self, engine: _Engine, replica_id: str, reports: list[PluginReport]) -> None:
        whole, was_on, is_new = report_of(reports, None), replica_id in self.on_ids, not engine.reports
        self._set(engine, reports)
        if is_new or whole.is_on != was_on:
            words: dict[str, Any] = {"protocol": whole.protocol, "version": whole.version, "vllm": whole.vllm_version}
            if whole.why_not:
                words["why"] = whole.why_not
            (log.info if whole.is_on else log.warning)("engine_plugin", replica_id=replica_id, on=whole.is_on, **words)
        engine.is_failing = False
        if not self._is_observing:
            self._is_observing = True
            self._observe(self.heard, Pause, ProgramHinted)


def may_be_told(program_id: str) -> bool:
    """Return whether the plugin can know a program: its id is a header, and a text of JSON, and not too long."""
    return len(program_id) <= MOST_ID_CHARACTERS and program_id.isascii() and program_id.isprintable()


def hold_s_of(hint: TurnHint | None, hold_s: float | None) -> float | None:
    """Return how long to hold a program's blocks, in seconds, by its client's hint, or else `hold_s`; None: unsaid."""
    if hint is not None and hint.keep == DROP:
        return 0.0
    if hint is None or hint.next_turn_in_s is None:
        return hold_s
    return min(MOST_HOLD_S, hint.next_turn_in_s * 2 + 1.0)  # a hint is late up to twice its time


class _Shape(msgspec.Struct):
    session_id: Raw = Raw()
    vllm_xargs: Raw = Raw()


_decode_shape = msgspec.json.Decoder(_Shape).decode


def with_words(body: bytes, program_id: str, hold_s: float | None) -> bytes:
    """Return a turn's body with our words to the plugin; unchanged if it is empty, or no object.

    vLLM prefers a `session_id` in the body to the header, so another one is replaced. A client's own
    `thunderagent_hold_s` is kept. One pass that builds nothing: 1 ms per MB.
    """
    try:
        shape = _decode_shape(body)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return body
    session_id, xargs = bytes(shape.session_id), bytes(shape.vllm_xargs)
    name = msgspec.json.encode(program_id)
    if session_id and session_id != name:
        body = set_value(body, "session_id", name)
    if hold_s is None:
        return body
    if not xargs:
        opening = body.index(b"{") + 1
        if body[opening:].lstrip()[:1] == b"}":
            return body
        words = b'"vllm_xargs":{"%s":%s},' % (HOLD_KEY.encode(), msgspec.json.encode(hold_s))
        return b"".join((body[:opening], words, memoryview(body)[opening:]))
    said = msgspec.json.decode(xargs)
    if said is None:
        said = {}
    if not isinstance(said, dict) or HOLD_KEY in said:
        return body
    return set_value(body, "vllm_xargs", msgspec.json.encode({**said, HOLD_KEY: hold_s}))
