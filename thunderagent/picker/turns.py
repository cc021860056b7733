"""The life of a turn that Envoy carries: read, held until there is a lease, sent where that says, its usage read.

Theory of operation
===================
Envoy sends a request part by part and waits for what becomes of each. A turn's head is answered only when its body is
here and its lease is granted: so long Envoy holds it, with no limit but its own idle time-out. Then the head goes on
with the replica's address, and the body after it; the answer comes back through here, for what it says of its usage.

While a turn is held the stream is read on, so its end, which is the client's leaving, ends the wait. Afterwards a lease
is held in a `with` block: whatever ends the stream before the answer was whole ends it as abandoned. Envoy does not say
whether a client left or an engine broke off in mid-answer.

An engine that cannot be reached is Envoy's to get around, if its route tries again: on the next of the addresses that
were given. Where the answer came from it says with the answer's head. If that is another replica the lease is given
back as failed, and another one asked for in the background, for the rest of the turn.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from ipaddress import ip_address
from time import monotonic
from typing import Any
from urllib.parse import urlsplit

import msgspec
import structlog
from multidict import CIMultiDict, CIMultiDictProxy

from thunderagent.errors import AdminKeyNeededError, BodyTooLargeError, NoReplicaError, ThunderAgentError
from thunderagent.leases import Lease, LeaseSource, OpenLease, TurnAsk
from thunderagent.log_lines import line_writer
from thunderagent.picker import messages
from thunderagent.picker.stream import Stream
from thunderagent.proxy.fleet.made_answers import MadeAnswers
from thunderagent.proxy.gate.access import DATA, ForwardUnknown, Use, engine_access, use_of
from thunderagent.proxy.gate.held import HeldTurns
from thunderagent.proxy.reading.answers import StreamUsage, read_answer
from thunderagent.proxy.reading.body_fields import model_named
from thunderagent.proxy.reading.dialects import TURN_DIALECTS
from thunderagent.proxy.reading.identity import IdentityRules
from thunderagent.proxy.reading.outline import LARGE_BODY_BYTES
from thunderagent.proxy.reading.target import Target
from thunderagent.proxy.reading.tool_calls import StreamToolCalls
from thunderagent.proxy.turns.arrival import read_request
from thunderagent.proxy.turns.attempts import Attempt, Attempts
from thunderagent.proxy.turns.patience import patience_of
from thunderagent.proxy.turns.record import Record, ask_for
from thunderagent.proxy.wire.errors import answer_of
from thunderagent.proxy.wire.request_id import REQUEST_ID, take_request_id

log = structlog.get_logger("thunderagent.picker")

ENDPOINT = "x-gateway-destination-endpoint"
SERVED = f"{ENDPOINT}-served"
SUBSET = f"{ENDPOINT}-subset"
METADATA, SUBSET_METADATA = "envoy.lb", "envoy.lb.subset_hint"

MAX_KEPT_BYTES = 16 * 2**20
"""The usage of a whole answer that is larger is not read."""

PROGRESS_PERIOD_S = 1.0


@dataclass(frozen=True, slots=True)
class PickerSettings:
    """How turns are taken in."""

    max_body_bytes: int
    patience_s: float | None = None
    """Of clients that do not say how long they wait; None is for ever."""
    fallbacks_count: int = 0
    """So many further replicas are named behind the one that has the lease."""


class Picker:
    """Pick where requests go. All methods belong to one event loop."""

    def __init__(
        self,
        leases: LeaseSource,
        rules: IdentityRules,
        held: HeldTurns,
        made: MadeAnswers,
        settings: PickerSettings,
        suspect: Callable[[str], None] = lambda _: None,
    ) -> None:
        """Pick under `leases`; `suspect` has a replica looked at that could not be reached."""
        self.leases = leases
        self.held = held
        self.made = made
        self.settings = settings
        self.suspect = suspect
        self._rules = rules
        self._attempts = Attempts()
        self._write = line_writer(log)

    async def serve(self, stream: Stream) -> None:
        """Take one exchange from its head to its end."""
        first = await stream.read()
        if first is None or not first.HasField("request_headers"):
            return
        target: Target | None = None
        try:
            given = messages.headers_of(first.request_headers.headers)
            pseudo = {name: value for name, value in given if name.startswith(":")}
            headers = CIMultiDictProxy(CIMultiDict((name, value) for name, value in given if name[:1] != ":"))
            REQUEST_ID.set(take_request_id(headers))
            target = Target.parse(pseudo.get(":path", ""), pseudo.get(":authority", ""))
            if pseudo.get(":method") == "POST" and target.spelt in TURN_DIALECTS:
                await self._turn(stream, first, target, headers)
            else:
                await self._beside(stream, first, target, pseudo.get(":method", ""))
        except ThunderAgentError as error:
            await stream.refuse(answer_of(error, target.spelt if target is not None else None))

    async def _beside(self, stream: Stream, first: Any, target: Target, method: str) -> None:
        """Have what is no turn go to a replica at once: that of its program, or the one with the fewest turns."""
        if engine_access(target, method, ForwardUnknown.OFF) is not DATA or use_of(target, method) is Use.GENERATE:
            raise AdminKeyNeededError("a picker lets pass turns and what only reads; send this to the engine")
        leases = self.leases
        home_id = leases.home_of(target.program_id) if target.program_id else None
        allowed = messages.texts_in(first.metadata_context, SUBSET_METADATA, SUBSET)
        open_ids = [each for each in leases.replicas.open_ids if _is_allowed(leases.replicas.states[each].url, allowed)]
        if not open_ids:
            raise NoReplicaError("no replica is up")
        chosen_id = home_id if home_id in open_ids else min(open_ids, key=leases.turns_count)
        endpoint = await endpoint_of(leases.replicas.states[chosen_id].url)
        await stream.write(_picked([endpoint], target))
        while (message := await stream.read()) is not None:
            await _echo(stream, message)

    async def _turn(self, stream: Stream, first: Any, target: Target, headers: CIMultiDictProxy[str]) -> None:
        arrived_s = monotonic()
        body, has_trailers = await self._body(stream, first)
        if body is None:
            return
        read = partial(read_request, target, headers, body, self._rules, None)
        turn, _ = read() if len(body) <= LARGE_BODY_BYTES else await asyncio.to_thread(read)
        record = Record(turn, "POST", target, TURN_DIALECTS[target.spelt], arrived_s, body)
        if self.leases.replicas.names_models:
            record.model = model_named(turn.model, turn.body)
        if turn.previous_response_id:
            record.maker_id = self.made.maker(turn.previous_response_id)
        patience = patience_of(headers, self.settings.patience_s)
        now_s, task = self.leases.now_s(), asyncio.current_task()
        attempt = Attempt(turn, target.sent, patience, now_s, task, self.leases.new_turn_id())
        self._attempts.begin(attempt, now_s)
        running = None
        try:
            running = self.held.runs(record.held_bytes)
            allowed = messages.texts_in(first.metadata_context, SUBSET_METADATA, SUBSET)
            await self._run(Carried(self, stream, record), attempt, allowed, has_trailers=has_trailers)
        except ThunderAgentError as error:
            record.status, record.outcome = error.status, "rejected"
            error.answer_headers = {**error.answer_headers, **record.headers()}
            raise
        except asyncio.CancelledError:
            record.outcome = "superseded" if attempt.superseded else record.outcome
            raise
        finally:
            if running is not None:
                self.held.ran(running, record.held_bytes)
            self._attempts.end(attempt, self.leases.now_s(), answered=record.outcome == "finished")
            self._write(record.line(monotonic() - arrived_s, REQUEST_ID.get()))
            if record.outcome == "finished" and turn.is_final and turn.program_id is not None:
                self.leases.release(turn.program_id, record.generation, turn.outcome)

    async def _body(self, stream: Stream, first: Any) -> tuple[bytes | None, bool]:
        """Read a body whole, and whether trailers follow; None if the client left. Raises `BodyTooLargeError`."""
        parts: list[bytes] = []
        size_bytes, ends, has_trailers = 0, first.request_headers.end_of_stream, False
        while not ends:
            message = await stream.read()
            if message is None:
                return None, False
            has_trailers = message.HasField("request_trailers")
            ends = has_trailers or message.request_body.end_of_stream
            parts.append(message.request_body.body)
            size_bytes += len(parts[-1])
            if size_bytes > self.settings.max_body_bytes:
                raise BodyTooLargeError(f"the body is over {self.settings.max_body_bytes:,} bytes")
        return b"".join(parts), has_trailers

    async def _run(self, carried: Carried, attempt: Attempt, allowed: list[str] | None, *, has_trailers: bool) -> None:
        record, leases, stream = carried.record, self.leases, carried.stream
        patience_s, turn = attempt.patience.patience_s, record.turn
        deadline_s = None if patience_s is None else attempt.since_s + patience_s
        home_id = leases.home_of(turn.told_id, record.model) if turn.told_id else None
        ask = ask_for(record, attempt, leases.now_s(), deadline_s, None, home_id)
        asked_s = monotonic()
        try:
            lease = await self._lease(stream, ask, record.held_bytes)
        finally:
            record.held_s = monotonic() - asked_s
        if lease is None:
            return  # the client left
        with lease:
            granted = lease.granted
            if not _is_allowed(granted.url, allowed):
                raise NoReplicaError(f"{granted.replica_id} has the lease, and is not among those that Envoy allows")
            record.replica_id, record.generation, record.reason = (
                granted.replica_id,
                granted.generation,
                granted.reason,
            )
            record.held_s = granted.held_s
            record.tries_count += 1
            await stream.write(
                _picked([await endpoint_of(granted.url), *self._fallbacks(granted, allowed)], record.target)
            )
            if turn.body or has_trailers:
                await stream.write_body("request_body", turn.body, ends=not has_trailers)
            if has_trailers:
                trailers = messages.ProcessingResponse()
                trailers.request_trailers.SetInParent()
                await stream.write(trailers)
            try:
                await carried.answer(lease, ask)
            finally:
                carried.close()

    async def _lease(self, stream: Stream, ask: TurnAsk, held_bytes: int) -> OpenLease | None:
        """Wait for a lease; None if Envoy ended the exchange, which is heard at once."""
        leasing = asyncio.ensure_future(self.leases.lease(ask, self.held.turn(None, held_bytes)))
        try:
            if not await stream.until(leasing):
                give_up(leasing)
                return None
        except BaseException:
            give_up(leasing)
            raise
        return leasing.result()

    def _fallbacks(self, granted: Lease, allowed: list[str] | None) -> list[str]:
        """Return further replicas, those with the fewest turns first, as far as their addresses are plain."""
        states = self.leases.replicas.states
        others = sorted(
            (each for each in self.leases.replicas.open_ids if each != granted.replica_id), key=self.leases.turns_count
        )
        found = [plain for each in others if (plain := plain_endpoint_of(states[each].url))]
        return [each for each in found if allowed is None or each in allowed][: self.settings.fallbacks_count]

    def replica_at(self, endpoint: str) -> str | None:
        """Return the replica at an address; None if there is none."""
        for replica_id, state in self.leases.replicas.states.items():
            if plain_endpoint_of(state.url) == endpoint:
                return replica_id
        return None


class Carried:
    """A turn whose bytes are on their way."""

    def __init__(self, picker: Picker, stream: Stream, record: Record) -> None:
        """Begin before it is granted."""
        self.stream = stream
        self.record = record
        self._picker = picker
        self._events: StreamUsage | None = None
        self._tools = StreamToolCalls()
        self._kept: list[bytes] = []
        self._kept_bytes = 0
        self._encoding: str | None = None
        self._progress_at_s = 0.0
        self._leasing: asyncio.Task[OpenLease] | None = None
        """The lease of another replica, if Envoy went there."""

    async def answer(self, lease: OpenLease, ask: TurnAsk) -> None:
        """Relay the answer, and end the lease with it."""
        stream, ended = self.stream, False
        while (message := await stream.read()) is not None:
            if message.HasField("response_headers"):
                self._begin(message, lease, ask)
                if ended := message.response_headers.end_of_stream:
                    self._end(lease)
                reply = messages.ProcessingResponse()
                messages.mutate(reply.response_headers.response.header_mutation, list(self.record.headers().items()))
                await stream.write(reply)
            elif message.HasField("response_body"):
                ends = message.response_body.end_of_stream
                relayed = self._take(lease, message.response_body.body)
                if ends:
                    relayed += self._rest()
                    self._end(lease)
                    ended = True
                await stream.write_body("response_body", relayed, ends=ends)
            elif message.HasField("response_trailers"):
                if not ended:
                    await stream.write_body("response_body", self._rest(), ends=False)
                    self._end(lease)
                await _echo(stream, message)
            else:
                await _echo(stream, message)

    def close(self) -> None:
        """Give back what is still asked for."""
        if self._leasing is not None:
            give_up(self._leasing)

    def _begin(self, message: Any, lease: OpenLease, ask: TurnAsk) -> None:
        """Take in the head of an answer, and where it came from."""
        headers = CIMultiDict(messages.headers_of(message.response_headers.headers))
        record, picker, granted = self.record, self._picker, lease.granted
        record.status = int(headers.get(":status", "200"))
        self._encoding = headers.get("Content-Encoding")
        content_type = headers.get("Content-Type", "").partition(";")[0].strip()
        served = messages.texts_in(message.metadata_context, METADATA, SERVED)
        served_id = picker.replica_at(served[0]) if served else None
        if served_id not in (None, granted.replica_id):
            self._moved(lease, ask, str(served_id))
        elif record.status == 503 and content_type == "text/plain":  # Envoy's own words: engines say it in JSON
            picker.suspect(granted.replica_id)
            record.outcome = "failed"
            lease.failed()
        if content_type == "text/event-stream":
            keep_id = partial(picker.made.keep, replica_id=record.replica_id or granted.replica_id)
            self._events = StreamUsage(
                take_out=record.turn.usage_added,
                content_encoding=self._encoding,
                listener=self._tools.read,
                reader=record.dialect.reader(keep_id),
            )

    def _moved(self, lease: OpenLease, ask: TurnAsk, served_id: str) -> None:
        picker, record, failed_id = self._picker, self.record, lease.granted.replica_id
        log.warning("turn_moved", program_id=ask.program_id, replica_id=failed_id, served_id=served_id)
        picker.suspect(failed_id)
        lease.failed()
        record.replica_id = served_id
        again = msgspec.structs.replace(
            ask,
            turn_id=picker.leases.new_turn_id(),
            supersedes_id=ask.turn_id,
            avoid_replica_id=failed_id,
            wanted_replica_id=served_id,
            patience_s=None,
        )
        self._leasing = asyncio.ensure_future(picker.leases.lease(again))

    def _take(self, lease: OpenLease, piece: bytes) -> bytes:
        now_s = monotonic()
        if not self._progress_at_s:
            lease.started()
            self._progress_at_s = now_s + PROGRESS_PERIOD_S
        elif self._events is not None and now_s > self._progress_at_s:
            lease.progressed(self._events.events_count)
            self._progress_at_s = now_s + PROGRESS_PERIOD_S
        if self._events is not None:
            return self._events.feed(piece)
        self._kept_bytes += len(piece)
        if self._kept_bytes <= MAX_KEPT_BYTES:
            self._kept.append(piece)
        return piece

    def _rest(self) -> bytes:
        return self._events.rest() if self._events is not None else b""

    def _end(self, lease: OpenLease) -> None:
        """End the lease of an answer that is whole, before its client has the last of it."""
        record = self.record
        if record.outcome == "failed":
            return
        if self._leasing is not None:
            if not self._leasing.done() or self._leasing.cancelled() or self._leasing.exception() is not None:
                record.outcome = "finished"  # where it ran there was no room for it in time: its usage is not counted
                return
            lease, self._leasing = self._leasing.result(), None
        if record.status is None or record.status >= 400:
            record.outcome = "refused"
            lease.refused()
            return
        if self._events is not None:
            record.usage, record.tool = self._events.usage, self._tools.key()
        elif self._kept_bytes <= MAX_KEPT_BYTES:
            keep_id = partial(self._picker.made.keep, replica_id=record.replica_id or "")
            record.usage, record.tool = read_answer(record.dialect, b"".join(self._kept), self._encoding, keep_id)
        record.outcome = "finished"
        lease.finished(*record.usage, record.tool)


def give_up(leasing: asyncio.Task[OpenLease]) -> None:
    """Want a lease no longer; one that came in the same moment is given back."""

    def ended(task: asyncio.Task[OpenLease]) -> None:
        if not task.cancelled() and task.exception() is None:
            task.result().abandoned()

    leasing.cancel()
    leasing.add_done_callback(ended)


def plain_endpoint_of(url: str) -> str:
    """Return the `IP:PORT` of a base URL; empty if it has a name instead."""
    parts = urlsplit(url)
    host, port = parts.hostname or "", parts.port or (443 if parts.scheme == "https" else 80)
    with suppress(ValueError):
        return f"[{host}]:{port}" if ip_address(host).version == 6 else f"{host}:{port}"
    return ""


async def endpoint_of(url: str) -> str:
    """Return the `IP:PORT` of a base URL, asking for a name. Raises `NoReplicaError`."""
    plain = plain_endpoint_of(url)
    if plain:
        return plain
    parts = urlsplit(url)
    try:
        found = await asyncio.get_running_loop().getaddrinfo(parts.hostname, parts.port or 80)
    except OSError as error:
        raise NoReplicaError(f"{parts.hostname} has no address: {error}") from error
    address = found[0][4][0]
    return plain_endpoint_of(f"http://{f'[{address}]' if ':' in str(address) else address}:{parts.port or 80}")


def _is_allowed(url: str, allowed: list[str] | None) -> bool:
    return allowed is None or plain_endpoint_of(url) in allowed


def _picked(endpoints: list[str], target: Target) -> Any:
    """Return the message by which a head goes on to the first of some addresses."""
    message, joined = messages.ProcessingResponse(), ",".join(endpoints)
    response = message.request_headers.response
    response.clear_route_cache = True
    headers = [(ENDPOINT, joined)]
    if target.prefix:  # it named the program, and is not the engine's
        headers.append((":path", target.sent))
    messages.mutate(response.header_mutation, headers)
    response.header_mutation.remove_headers.append("content-length")
    entry = message.dynamic_metadata.fields.add(key=METADATA).value.struct_value.fields.add(key=ENDPOINT)
    entry.value.string_value = joined
    return message


async def _echo(stream: Stream, message: Any) -> None:
    """Have a part go on as it came."""
    for kind in ("request_body", "response_body"):
        if message.HasField(kind):
            part = getattr(message, kind)
            await stream.write_body(kind, part.body, ends=part.end_of_stream)
            return
    reply = messages.ProcessingResponse()
    for kind in ("request_trailers", "response_trailers", "response_headers"):
        if message.HasField(kind):
            getattr(reply, kind).SetInParent()
            if kind == "response_headers":
                reply.response_headers.response.SetInParent()
            await stream.write(reply)
            return
