"""The life of a turn that Envoy carries: read, held until there is a lease, sent to its replica, its usage read.

Theory of operation
===================
Envoy sends a request part by part and waits for an answer to each. A turn's head is answered only when its body has
arrived and its lease is granted. Until then Envoy holds it, limited only by its own idle timeout. Then the head goes on
with the replica's address, and the body after it; the answer comes back through here (`carried.py`), for its usage.

While a turn is held the stream is still read, so its end, when the client leaves, ends the wait. Afterwards a lease is
held in a `with` block: if the stream ends before the answer's last event, it ends as abandoned. Envoy does not say
whether a client left or an engine broke off within an answer.

Envoy handles an unreachable engine itself if its route retries: on the next of the given addresses. The answer's head
says where it came from. If that is another replica the lease is returned as failed, and another one requested in the
background, for the rest of the turn.

The kept bytes of bodies are counted in total, as they arrive: while they arrive, while their turns are held, while they
run.
"""

from __future__ import annotations

import asyncio
from dataclasses import dataclass
from functools import partial
from time import monotonic
from typing import Any

import structlog
from multidict import CIMultiDict, CIMultiDictProxy

from thunderagent.errors import AdminKeyNeededError, NoReplicaError, ThunderAgentError
from thunderagent.leases import Lease, TurnAsk
from thunderagent.leases.open_lease import OpenLease
from thunderagent.log_lines import line_writer
from thunderagent.picker import messages
from thunderagent.picker.addresses import endpoints_in
from thunderagent.picker.carried import Around, Carried, give_up
from thunderagent.picker.stream import Stream
from thunderagent.proxy.gate.access import DATA, WEBSOCKETS, ForwardUnknown, Use, engine_access, use_of
from thunderagent.proxy.gate.bodies import come
from thunderagent.proxy.gate.held import HeldTurn, KeptBody
from thunderagent.proxy.reading.body_fields import model_named
from thunderagent.proxy.reading.dialects import TURN_DIALECTS
from thunderagent.proxy.reading.identity import IdentityRules
from thunderagent.proxy.reading.outline import LARGE_BODY_BYTES
from thunderagent.proxy.reading.target import Target
from thunderagent.proxy.turns.record import Attempts, Record, ask_for, patience_of, read_turn
from thunderagent.proxy.wire.errors import answer_of
from thunderagent.proxy.wire.headers import REQUEST_ID, take_request_id

log = structlog.get_logger("thunderagent.picker")


@dataclass(frozen=True, slots=True)
class PickerSettings:
    """Settings of turns."""

    max_body_bytes: int
    body_timeout_s: float
    patience_s: float | None = None
    """For clients that do not say how long they wait; None is for ever."""
    fallbacks_count: int = 0
    """How many further replicas are named behind the one that has the lease."""


class Picker:
    """Picks where requests go. All methods belong to one event loop."""

    def __init__(self, around: Around, rules: IdentityRules, settings: PickerSettings) -> None:
        """Pick under leases of `around`."""
        self._around = around
        self._leases = around.leases
        self._settings = settings
        self._rules = rules
        self._attempts = Attempts()
        self._write = line_writer(log)

    async def serve(self, stream: Stream) -> None:
        """Handle one exchange from its head to its end."""
        first = await stream.read()
        if first is None or not first.HasField("request_headers"):
            return
        target: Target | None = None
        try:
            given = messages.headers_of(first.request_headers.headers)
            pseudo = {name: value for name, value in given if name.startswith(":")}
            headers = CIMultiDictProxy(CIMultiDict((name, value) for name, value in given if name[:1] != ":"))
            take_request_id(headers)
            target = Target.parse(pseudo.get(":path", ""), pseudo.get(":authority", ""))
            method = pseudo.get(":method", "")
            if (use := use_of(target, method)) is Use.TURN:
                await self._turn(stream, first, method, target, headers)
                return
            converses = target.spelt in WEBSOCKETS and "Upgrade" in headers
            if converses or use is not Use.SIDE_CALL or engine_access(target, method, ForwardUnknown.OFF) is not DATA:
                raise AdminKeyNeededError(
                    "a picker passes only turns and requests that read; send this one to the engine"
                )
            await self._beside(stream, first, target)
        except ThunderAgentError as error:
            await stream.refuse(answer_of(error, target.spelt if target is not None else None))

    async def _beside(self, stream: Stream, first: Any, target: Target) -> None:
        """Send a side call to a replica at once: its program's, or the one with fewest turns."""
        leases, addresses, allowed = self._leases, self._around.addresses, _allowed(first)
        home_id = leases.home_of(target.program_id) if target.program_id else None
        urls = {each: leases.replicas.states[each].url for each in leases.replicas.open_ids}
        open_ids = [each for each, url in urls.items() if addresses.allows(url, allowed)]
        if not open_ids:
            raise NoReplicaError("no replica is up")
        chosen_id = home_id if home_id in open_ids else min(open_ids, key=leases.turns_count)
        await stream.write(_picked([await addresses.of(urls[chosen_id])], target))
        while (message := await stream.read()) is not None:
            await stream.echo(message)

    async def _turn(
        self, stream: Stream, first: Any, method: str, target: Target, headers: CIMultiDictProxy[str]
    ) -> None:
        kept = KeptBody(self._around.held)
        try:
            arrived_s = monotonic()
            body, has_trailers = await self._body(stream, first, headers, kept)
            if body is not None:
                record = await self._read(method, target, headers, body, arrived_s)
                await self._attempt(stream, first, record, kept, has_trailers=has_trailers)
        finally:
            kept.release()

    async def _read(
        self, method: str, target: Target, headers: CIMultiDictProxy[str], body: bytes, arrived_s: float
    ) -> Record:
        read = partial(read_turn, target, headers, body, self._rules, None)
        turn, _ = read() if len(body) <= LARGE_BODY_BYTES else await asyncio.to_thread(read)
        patience = patience_of(headers, self._settings.patience_s)
        since_s, turn_id, dialect = self._leases.now_s(), self._leases.new_turn_id(), TURN_DIALECTS[target.spelt]
        task = asyncio.current_task()
        record = Record(turn, patience, method, target, dialect, body, arrived_s, since_s, turn_id, task)
        if self._leases.replicas.names_models:
            record.model = model_named(turn.model, turn.body)
        if turn.previous_response_id:
            record.maker_id = self._around.made.maker(turn.previous_response_id)
        return record

    async def _attempt(
        self,
        stream: Stream,
        first: Any,
        record: Record,
        kept: KeptBody,
        *,
        has_trailers: bool,
    ) -> None:
        leases, held, turn = self._leases, self._around.held, record.turn
        self._attempts.begin(record, record.since_s)
        running = None
        try:
            running = held.runs(record.held_bytes)
            await self._run(stream, first, record, kept, has_trailers=has_trailers)
        except ThunderAgentError as error:
            record.status, record.outcome = error.status, "rejected"
            error.answer_headers = {**error.answer_headers, **record.headers()}
            raise
        except asyncio.CancelledError:
            record.outcome = "superseded" if record.superseded else record.outcome
            raise
        finally:
            if running is not None:
                held.ran(running, record.held_bytes)
            self._attempts.end(record, leases.now_s(), answered=record.outcome == "finished")
            if self._write is not None:
                self._write(record.line(monotonic() - record.arrived_s, REQUEST_ID.get()))
            if record.outcome == "finished" and turn.is_final and turn.program_id is not None:
                leases.release(turn.program_id, record.generation, turn.outcome)

    async def _body(
        self, stream: Stream, first: Any, headers: CIMultiDictProxy[str], kept: KeptBody
    ) -> tuple[bytes | None, bool]:
        """Read a whole body, and whether trailers follow; None if the client left. Raises as `come` does."""
        ends, has_trailers, has_left = first.request_headers.end_of_stream, False, False

        async def next_piece() -> bytes:
            nonlocal ends, has_trailers, has_left
            while not ends:
                message = await stream.read()
                if message is None:
                    has_left = True
                    return b""
                has_trailers = message.HasField("request_trailers")
                ends = has_trailers or message.request_body.end_of_stream
                if message.request_body.body:
                    return bytes(message.request_body.body)
            return b""

        length = headers.get("Content-Length", "")
        length_bytes = int(length) if length.isdecimal() else 0
        limit_s, max_bytes = self._settings.body_timeout_s, self._settings.max_body_bytes
        body = await come(next_piece, headers, length_bytes, kept, limit_s, max_bytes, None)
        return (None if has_left else body), has_trailers

    async def _run(
        self,
        stream: Stream,
        first: Any,
        record: Record,
        kept: KeptBody,
        *,
        has_trailers: bool,
    ) -> None:
        leases, addresses, turn, allowed = self._leases, self._around.addresses, record.turn, _allowed(first)
        patience_s = record.patience.patience_s
        deadline_s = None if patience_s is None else record.since_s + patience_s
        home_id = leases.home_of(turn.told_id, record.model) if turn.told_id else None
        ask = ask_for(record, leases.now_s(), deadline_s, None, home_id)
        asked_s = monotonic()
        try:
            lease = await self._lease(stream, ask, kept, record.held_bytes)
        finally:
            record.held_s = monotonic() - asked_s
        if lease is None:
            return  # the client left
        with lease:
            kept.release()  # running ones are counted separately
            granted = lease.granted
            endpoint = await addresses.of(granted.url)
            if not addresses.allows(granted.url, allowed):
                raise NoReplicaError(f"{granted.replica_id} has the lease, which Envoy does not allow")
            record.replica_id, record.generation = granted.replica_id, granted.generation
            record.reason, record.held_s = granted.reason, granted.held_s
            record.tries_count += 1
            await stream.write(_picked([endpoint, *self._fallbacks(granted, allowed)], record.target))
            if not first.request_headers.end_of_stream:
                await stream.write_body("request_body", turn.body, ends=not has_trailers)
            if has_trailers:
                trailers = messages.ProcessingResponse()
                trailers.request_trailers.SetInParent()
                await stream.write(trailers)
            carried = Carried(self._around, stream, record)
            try:
                await carried.answer(lease, ask)
            finally:
                carried.close()

    async def _lease(self, stream: Stream, ask: TurnAsk, kept: KeptBody, held_bytes: int) -> OpenLease | None:
        """Wait for a lease; None as soon as Envoy ended the exchange."""
        leasing = asyncio.ensure_future(self._leases.lease(ask, HeldTurn(self._around.held, kept, held_bytes)))
        try:
            if not await stream.until(leasing):
                give_up(leasing)
                return None
        except BaseException:
            give_up(leasing)
            raise
        return leasing.result()

    def _fallbacks(self, granted: Lease, allowed: frozenset[str] | None) -> list[str]:
        """Return further replicas, those with fewest turns first, as far as their addresses are known."""
        if not self._settings.fallbacks_count:
            return []
        replicas, addresses = self._leases.replicas, self._around.addresses
        others = [each for each in replicas.open_ids if each != granted.replica_id]
        others.sort(key=self._leases.turns_count)
        urls = [url for each in others if addresses.allows(url := replicas.states[each].url, allowed)]
        return [endpoint for url in urls if (endpoint := addresses.known(url))][: self._settings.fallbacks_count]


def _allowed(first: Any) -> frozenset[str] | None:
    """Return the endpoints that a head may go to; None for all."""
    return endpoints_in(messages.texts_in(first.metadata_context, messages.SUBSET_METADATA, messages.SUBSET))


def _picked(endpoints: list[str], target: Target) -> Any:
    """Return the message that forwards a head; a prefix that named its program is removed."""
    return messages.picked(endpoints, target.sent if target.prefix else None)
