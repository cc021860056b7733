"""The life of a turn, from top to bottom: identify, take a lease, forward, relay, end the lease.

Theory of operation
===================
A lease is held in a `with` block. Whatever ends the flow - the answer's end, an error, or the cancellation when the
client disconnects - ends the lease. `upstream.close()` in a `finally` ends the request on the replica, because engines
stop generating when their client is gone. So the four moments in which a client can leave (held, before the first byte,
in a stream, in a whole answer) need no code of their own. One that leaves with a stream's last event has its answer.

`record.py` reads the request, and has all that is known of the turn; `forward.py` sends it to a replica, and decides on
another; `relay.py` returns the answer. A client's stated patience becomes the turn's deadline. A retry replaces its
earlier attempt, which is cancelled like one whose client left. If the operator wants that, a held stream may send
heartbeats (`heartbeat.py`). The program may be inferred (`reading/inference.py`): in a bucket, or if the operator wants
that.
"""

# compiled: each turn passes here

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from functools import partial
from time import monotonic
from typing import Any, Protocol

import structlog
from msgspec.structs import replace
from multidict import CIMultiDict

from thunderagent.errors import (
    ReplicaError,
    RequestError,
    ThunderAgentError,
    TurnAbortedError,
)
from thunderagent.leases import Lease
from thunderagent.leases.open_lease import LeaseSource, OpenLease
from thunderagent.log_lines import line_writer
from thunderagent.proxy.fleet.client import ReplicaClient
from thunderagent.proxy.fleet.made_answers import MadeAnswers
from thunderagent.proxy.fleet.replicas import Replicas, Watcher
from thunderagent.proxy.gate.held import NO_LIMITS, HeldLimits, HeldTurn, HeldTurns
from thunderagent.proxy.gate.keys import caller_key
from thunderagent.proxy.gate.tenancy import ClientPriority, Tenancy
from thunderagent.proxy.judge import Judge
from thunderagent.proxy.reading.body_fields import model_named
from thunderagent.proxy.reading.dialects import TURN_DIALECTS, dialect_of
from thunderagent.proxy.reading.header_words import CLASS_HEADER
from thunderagent.proxy.reading.identity import NO_RULES, IdentityRules, TurnRequest
from thunderagent.proxy.reading.inference import Inference, Prompt
from thunderagent.proxy.reading.outline import LARGE_BODY_BYTES, read_aside
from thunderagent.proxy.turns.aborts import abort_answer
from thunderagent.proxy.turns.fence import STALENESS_HEADER, Fence
from thunderagent.proxy.turns.forward import DEFAULT_RETRIES, Forwarding, RetryBudget, RetrySettings
from thunderagent.proxy.turns.heartbeat import HeldStream
from thunderagent.proxy.turns.record import (
    RETRY_HEADER,
    Attempts,
    Patience,
    Record,
    ask_for,
    ended_by,
    patience_of,
    read_turn,
    told_key,
)
from thunderagent.proxy.turns.relay import Relay
from thunderagent.proxy.watch.turn_metrics import TurnMetrics
from thunderagent.proxy.wire.exchange import Exchange, done
from thunderagent.proxy.wire.headers import REQUEST_ID, identity_headers, take_named_request_id, tell_with_error
from thunderagent.proxy.wire.http11.client import Answer
from thunderagent.proxy.wire.websockets import Websockets

log = structlog.get_logger("thunderagent.turns")


@dataclass(frozen=True, slots=True)
class TurnSettings:
    """How turns are forwarded."""

    retries: RetrySettings = DEFAULT_RETRIES
    """How often turns are retried, on another replica, after the connection failed before the first byte."""
    identity: IdentityRules = NO_RULES
    """What else names a program."""
    patience_s: float | None = None
    """For clients that do not say how long they wait; None is for ever."""
    client_patience: bool = True
    """Whether turns are let in before their clients give up."""
    heartbeat_s: float | None = None
    """Time between two heartbeats on a held stream; None sends none."""
    tenant_from_key: bool = False
    """Whether the key that opens a program decides its tenant, and a data key is for its own tenant alone."""
    client_priority: ClientPriority | None = None
    """What happens to priorities that clients give engines; None drops those that come with data keys."""
    held: HeldLimits = NO_LIMITS
    """How much may be held."""
    websocket_limit_s: float = 3600.0
    """A websocket is ended after this time."""
    no_replica_limit_s: float = 60.0
    """How long a turn whose client states no patience waits while engines refuse it, or are gone."""
    names_programs: bool = False
    """Tell engines whose turn it is, so that the events of their KV cache say whose blocks they are about."""
    tells_attempts: bool = False
    """Tell the scheduler a key for attempts at one turn: the next one may come to another gateway."""


class Preparer(Protocol):
    """Prepares sandboxes for programs ahead of time."""

    def program_seen(self, program_id: str, program_class: str, tenant: str = "") -> None:
        """Prepare what programs of a class get. A new program belongs to that tenant."""

    def sandboxes_named(self, program_id: str, names: Sequence[str], tenant: str = "") -> None:
        """Take over containers that go with a program, if clients may bring theirs. Does not wait for the engine."""


class Turns:
    """Answers requests that are turns."""

    def __init__(
        self,
        leases: LeaseSource,
        client: ReplicaClient,
        replicas: Replicas,
        watcher: Watcher,
        metrics: TurnMetrics,
        settings: TurnSettings,
        tenancy: Tenancy,
        held: HeldTurns,
        made: MadeAnswers,
        websockets: Websockets,
        sandboxes: Preparer | None = None,
        judge: Judge | None = None,
        record_turn: Callable[[], Any] | None = None,
        fence: Fence | None = None,
    ) -> None:
        """Forward with `client` to `replicas`, under `leases`; record in `made` which replica made which answer."""
        self._leases = leases
        self._metrics = metrics
        self._settings = settings
        self._tenancy = tenancy
        self._held = held
        self._made = made
        self._sandboxes = sandboxes
        self._judge = judge
        self._record_turn = record_turn
        self._fence = fence
        self._budget = RetryBudget(settings.retries)
        self._attempts = Attempts()
        infers = settings.identity.infers_programs or settings.identity.infers_buckets
        self._inference = Inference() if infers else None
        self._forwarding = Forwarding(
            client, replicas, watcher, self._budget, metrics, names_programs=settings.names_programs
        )
        self._relay = Relay(client, self._forwarding, made, self._inference, websockets)
        self._write = line_writer(log)
        self._loop: asyncio.AbstractEventLoop | None = None
        """Cached, because asking for it costs a system call."""

    def revoke(self, program_id: str, turn_id: int | None, code: str = "") -> int:
        """End a turn here, because its next attempt came to another gateway, or all of a program that ends so.

        `code` is the error of the latter. Return how many end.
        """
        return self._attempts.revoke(program_id, turn_id, code)

    def abort(self, program_id: str, code: str) -> int:
        """End all turns of a program here, at their engines, too; return how many there are."""
        return self._attempts.revoke(program_id, None, code)

    async def answer(self, exchange: Exchange, chosen_id: str | None = None) -> None:
        """Answer one turn; on the replica `chosen_id`, which its client chose, it is always anonymous.

        A body that is not a JSON object is forwarded unchanged. Raises `ThunderAgentError` if there is no answer, and
        none was begun.
        """
        arrived_s = monotonic()
        tenancy = self._tenancy if self._tenancy.judges_all or caller_key() is not None else None
        body = exchange.body
        rules, target, headers, notes = self._settings.identity, exchange.target, exchange.headers, exchange.notes
        if len(body) <= LARGE_BODY_BYTES:
            turn, prompt = read_turn(target, headers, body, rules, tenancy, notes, chosen_id)
        else:
            what = target, headers, body, rules, tenancy, notes, chosen_id
            turn, prompt = await asyncio.to_thread(read_turn, *what)
        if prompt is not None or tenancy is not None or self._sandboxes is not None:
            turn = self._of_program(exchange, turn, prompt, tenancy)
        record = self._record(exchange, turn, tenancy, arrived_s, prompt, chosen_id)
        del prompt  # as large as the body, and no longer needed
        self._budget.turn_came(record.since_s)
        self._attempts.begin(record, record.since_s)
        if record.prompt_key is not None and self._inference is not None:
            self._inference.began(record.prompt_key, turn.program_id or "")
        running, run = None, self._run if tenancy is None else self._run_named
        try:
            running = self._held.runs(record.held_bytes)
            await run(exchange, record)
        except ThunderAgentError as error:
            if isinstance(error, TurnAbortedError) and await self._say_aborted(exchange, record):
                return
            record.status = error.status
            record.outcome = "failed" if isinstance(error, ReplicaError) else "rejected"
            record.verdict, record.cause = error.turn_verdict, error.code
            if record.held_stream is None or not exchange.begun:
                tell_with_error(error, record.headers())
                raise error  # noqa: TRY201 - bare, it would end a compiled process after a wait
            await record.held_stream.fail(error)
        except asyncio.CancelledError as error:
            if not record.superseded:
                raise error  # noqa: TRY201 - as above
            if not await self._end_revoked(exchange, record):
                raise error  # noqa: TRY201 - its answer has begun, and said so; or its client left as well
        finally:
            if running is not None:
                self._held.ran(running, record.held_bytes)
            self._end(record)

    # --- what a turn is ----------------------------------------------------------------------------------------------

    def _of_program(
        self, exchange: Exchange, turn: TurnRequest, prompt: Prompt | None, tenancy: Tenancy | None
    ) -> TurnRequest:
        """Infer the program of an unnamed turn if its prompt was read, and have its sandboxes prepared.

        Raises `OtherTenantError` if its program does not belong to its key's tenant.
        """
        if prompt is not None and self._inference is not None:
            is_retry = exchange.headers.get(RETRY_HEADER, "0") != "0"
            turn = self._inference.named(turn, prompt, self._is_taken, is_retry=is_retry)
        if tenancy is not None:
            tenancy.check(turn.program_id)
        if self._sandboxes is not None and turn.program_id is not None and CLASS_HEADER in exchange.headers:
            self._sandboxes.program_seen(turn.program_id, exchange.headers[CLASS_HEADER], turn.tenant)
        if turn.docker_ids and self._sandboxes is not None and turn.program_id is not None:
            self._sandboxes.sandboxes_named(turn.program_id, turn.docker_ids, turn.tenant)
        return turn

    def _is_taken(self, program_id: str) -> bool:
        return self._leases.tenant_of(program_id) is not None

    def _record(
        self,
        exchange: Exchange,
        turn: TurnRequest,
        tenancy: Tenancy | None,
        arrived_s: float,
        prompt: Prompt | None,
        chosen_id: str | None,
    ) -> Record:
        """Return all that is known of a turn. Raises `RequestError` for a header of ours that is invalid."""
        target = exchange.target
        try:
            known: Patience | None = exchange.notes.get("patience")
            patience = known or patience_of(exchange.headers, self._settings.patience_s, exchange.notes)
        except RequestError as error:
            tell_with_error(error, identity_headers(turn.program_id, turn.source))
            raise
        if turn.engine_request_id:
            take_named_request_id(turn.engine_request_id, exchange.headers)
        self._loop = self._loop or asyncio.get_running_loop()
        leases = self._leases
        record = Record(
            turn,
            patience,
            exchange.method,
            target,
            TURN_DIALECTS.get(target.spelt) or dialect_of(target.spelt),
            exchange.body,
            arrived_s,
            leases.now_s(),
            leases.new_turn_id(),
            asyncio.current_task(self._loop),
            prompt,
            chosen_id,
        )
        record.tenancy = tenancy
        if leases.replicas.names_models:
            record.model = model_named(turn.model, turn.body)
        if turn.previous_response_id:
            record.maker_id = self._made.maker(turn.previous_response_id, None if tenancy is None else tenancy.own)
        if self._record_turn is not None and turn.program_id is not None:
            record.recording = self._record_turn()
        return record

    # --- its way -----------------------------------------------------------------------------------------------------

    async def _run_named(self, exchange: Exchange, record: Record) -> None:
        """Run a turn, and count the program that it names meanwhile, which may not live: a websocket opens none."""
        assert record.tenancy is not None
        with record.tenancy.naming(record.turn.program_id or record.turn.told_id):
            await self._run(exchange, record)

    async def _run(self, exchange: Exchange, record: Record) -> None:
        """Take a lease, forward, relay; before the first byte of an answer, try another replica if one fails."""
        forwarding, avoid_replica_id = self._forwarding, None
        headers = forwarding.headers_of(exchange, record)
        if record.tenancy is not None:
            record.tenancy.mend(headers)
        if self._settings.heartbeat_s is not None:
            self._may_beat(exchange, record, self._settings.heartbeat_s)
        deadline_s: float | None = None
        past_s = 0.0  # counted when a lease was granted, or lost with an attempt
        if record.patience.patience_s is not None or record.observed_s is not None:
            deadline_s = self._deadline_s(record)
        give_up_s = deadline_s if deadline_s is not None else self._leases.now_s() + self._settings.no_replica_limit_s
        while True:
            asked_s = monotonic()
            try:
                if self._fence is None and record.held_stream is None:
                    lease = await self._ask(exchange, record, deadline_s, avoid_replica_id, None, again=False)
                else:
                    lease = await self._ask_otherwise(exchange, record, deadline_s, avoid_replica_id)
            except BaseException:
                record.held_s += monotonic() - asked_s
                raise
            with lease:
                record.granted(lease.granted)
                if exchange.kept is not None:
                    exchange.kept.release()  # the scheduler limits how many run
                if record.maker_id not in (None, lease.granted.replica_id):
                    self._warn_of_other_replica(record)
                granted_s = monotonic()
                added_s = granted_s - record.arrived_s - record.held_s - past_s
                self._metrics.turn_granted(lease.granted.held_s, added_s)
                avoid_replica_id = await self._run_once(exchange, record, lease, headers, give_up_s)
                if avoid_replica_id is None:
                    return
                past_s += added_s + monotonic() - granted_s

    async def _run_once(
        self,
        exchange: Exchange,
        record: Record,
        lease: OpenLease,
        headers: CIMultiDict[str],
        give_up_s: float,
    ) -> str | None:
        """Forward a turn with a lease, and relay its answer; if it is to be tried again, return where not."""
        forwarding, granted = self._forwarding, lease.granted
        named, body, authorization = None, record.turn.body, None
        if forwarding.names(granted.replica_id):
            authorization = headers.get("Authorization")
            named = await forwarding.named(record, granted.replica_id, authorization)
            body = named.body
            if named.session_id:
                headers = CIMultiDict(headers)  # other attempts go elsewhere
                headers["X-Session-ID"] = named.session_id
        if self._fence is not None:
            body = await self._fence.salted(record, granted, body)
        recording = record.recording
        is_exact = recording is not None and recording.prefixes is not None
        if recording is not None and not is_exact:
            body, headers = recording.ask(record, granted, body, headers)
        try:
            try:
                send: Any = forwarding.send if granted.engine_priority is None else forwarding.send_in_order
                send = partial(self._send_exactly, send) if is_exact else send
                upstream: Answer = await send(exchange, record, granted, headers, body)
            except ReplicaError as error:
                lives, now_s = self._lives(record), self._leases.now_s()
                forwarding.failed(lease, error)
                may_retry = lives and await forwarding.may_retry(record, error, now_s, give_up_s - now_s)
                if not may_retry or not self._lives(record):  # it may be released during the wait
                    raise error  # noqa: TRY201 - as above
                return error.replica_id
            try:
                is_good = upstream.status < 429 and record.first_error is None
                if is_good or not self._goes_on(record, granted, upstream, give_up_s):
                    await self._relay.relay(exchange, record, lease, upstream)
                    return None
                lease.refused()
                return granted.replica_id
            finally:
                if not upstream.is_whole:
                    upstream.close()
                if record.probe is not None:
                    forwarding.ended(record, granted.replica_id)
        finally:
            if named is not None:
                forwarding.left(record, granted, named, authorization)

    async def _send_exactly(
        self, send: Any, exchange: Exchange, record: Record, granted: Lease, headers: CIMultiDict[str], body: bytes
    ) -> Answer:
        """Send a turn with its exact prompt, if that is certain; as its client sent it if its engine refuses that."""
        recording = record.recording
        exact = await recording.supply(exchange.headers, record, granted, headers, body)
        asked, told = recording.ask(record, granted, exact, headers)
        upstream: Answer = await send(exchange, record, granted, told, asked)
        if upstream.status != 400 or recording.supplied is None:
            return upstream
        recording.not_taken()
        self._forwarding.unsent(record, granted, upstream)
        asked, told = recording.ask(record, granted, body, headers)
        again: Answer = await send(exchange, record, granted, told, asked)
        return again

    def _goes_on(self, record: Record, granted: Lease, upstream: Answer, give_up_s: float) -> bool:
        """Return whether a turn asks for another lease, because its engine is full, or answered with an error."""
        if not self._lives(record):
            return False
        forwarding, now_s = self._forwarding, self._leases.now_s()
        if forwarding.waits(record, granted, upstream, give_up_s - now_s):
            record.unsent_count += 1  # it did not run
            return True
        return forwarding.goes_elsewhere(record, granted, upstream, now_s)

    def _ask_otherwise(
        self,
        exchange: Exchange,
        record: Record,
        deadline_s: float | None,
        avoid_replica_id: str | None,
    ) -> Awaitable[OpenLease]:
        """Ask for a lease behind the fence, if there is one, and with heartbeats meanwhile, if wanted."""
        waiting: Awaitable[OpenLease]
        if self._fence is None:
            waiting = self._ask(exchange, record, deadline_s, avoid_replica_id, None, again=False)
        else:
            ask = partial(self._ask, exchange, record, deadline_s, avoid_replica_id)
            while_held = partial(HeldTurn, self._held, exchange.kept, record.held_bytes)
            said = exchange.headers.get(STALENESS_HEADER)
            waiting = self._fence.lease(record, said, ask, deadline_s, while_held)
        return waiting if record.held_stream is None else self._with_heartbeats(record.held_stream, waiting)

    def _ask(
        self,
        exchange: Exchange,
        record: Record,
        deadline_s: float | None,
        avoid_replica_id: str | None,
        wanted_replica_id: str | None,
        *,
        again: bool,
    ) -> Awaitable[OpenLease]:
        """Ask for a lease, on the wanted replica if any; a second one is for a turn that kept its age."""
        if record.tries_count or again:
            record.supersedes_id, record.turn_id = record.turn_id, self._leases.new_turn_id()
            if record.tenancy is not None:
                record.tenancy.check(record.turn.program_id)  # again: it may belong to another tenant by now
        if record.turn.told_id:
            wanted_replica_id = self._leases.home_of(record.turn.told_id, record.model)
        ask = ask_for(record, self._leases.now_s(), deadline_s, avoid_replica_id, wanted_replica_id)
        if self._fence is not None:
            ask = self._fence.ask(record, ask)
        if self._settings.tells_attempts and (key := told_key(record)):
            ask = replace(ask, attempt_key=key)
        return self._leases.lease(ask, HeldTurn(self._held, exchange.kept, record.held_bytes))

    async def _with_heartbeats(self, stream: HeldStream, waiting: Awaitable[OpenLease]) -> OpenLease:
        lease = None
        try:
            async with stream.beating():
                lease = await waiting
        except BaseException:
            if lease is not None:  # the client left while the last heartbeat went out
                lease.abandoned()
            raise
        return lease

    def _warn_of_other_replica(self, record: Record) -> None:
        """Log that a turn does not run where the response is that it continues."""
        log.warning(
            "response_is_elsewhere",
            program_id=record.turn.program_id,
            replica_id=record.replica_id,
            maker_id=record.maker_id,
            request_id=REQUEST_ID.get(),
        )

    def _may_beat(self, exchange: Exchange, record: Record, period_s: float) -> None:
        turn = record.turn
        if turn.streams:
            headers = identity_headers(turn.program_id, turn.source)
            record.held_stream = HeldStream(exchange, record.target.engine_path, record.dialect, period_s, headers)

    def _deadline_s(self, record: Record) -> float | None:
        """Return when the client gives up; None if it never does, or if heartbeats will keep it waiting."""
        patience_s, observed_s, settings = record.patience.patience_s, record.observed_s, self._settings
        if not settings.client_patience:
            return None
        if observed_s is not None and (patience_s is None or observed_s < patience_s):
            return self._leases.now_s() + observed_s
        if patience_s is None:
            return None
        beat_s = settings.heartbeat_s if record.held_stream is not None else None
        if beat_s is not None and record.patience.counts_bytes and beat_s < patience_s:
            return None
        return self._leases.now_s() + patience_s

    def _lives(self, record: Record) -> bool:
        """Return whether the program of a turn with a lease still lives; another of the same id does not count."""
        return record.turn.program_id is None or self._leases.lives(record.turn.program_id, record.generation)

    # --- its end -----------------------------------------------------------------------------------------------------

    def _end(self, record: Record) -> None:
        """Note that a turn has ended, count its time, write its line, and end a program with its last turn."""
        answered = record.outcome == "finished"
        gave_up = record.outcome == "abandoned" and record.status is None
        self._attempts.end(record, self._leases.now_s(), answered=answered, gave_up=gave_up)
        if record.prompt_key is not None and self._inference is not None:
            self._inference.ended(record.prompt_key, record.turn.program_id or "", answered=answered)
        if record.recording is not None:
            record.recording.ended(record, record.turn_id)
        duration_s = monotonic() - record.arrived_s
        is_there = record.replica_id is not None and record.replica_id in self._leases.replicas.states
        replica_id = record.replica_id if is_there else None
        self._metrics.turn_ended(replica_id, record.status, duration_s, record.first_s, record.between_s)
        line = record.line(duration_s, REQUEST_ID.get())
        if self._write is not None:
            self._write(line)
        if answered and (record.turn.is_final or self._judge is not None):
            self._is_through(record)

    async def _say_aborted(self, exchange: Exchange, record: Record) -> bool:
        """Answer like an engine that aborts a request before it ran; return False if its API has no such answer."""
        turn = record.turn
        make = partial(abort_answer, record.target.engine_path, turn.body)
        made = await read_aside(make, len(turn.body))
        if made is None:
            return False
        content_type, answer = made
        record.status, record.outcome, record.verdict = 200, "aborted", "aborted_by_trainer"
        if record.held_stream is not None and exchange.begun:
            await record.held_stream.end_with(answer)
        else:
            headers = CIMultiDict({"Content-Type": content_type})
            headers.update(record.headers())
            await done(exchange.answer(200, "OK", headers, answer))
        return True

    async def _end_revoked(self, exchange: Exchange, record: Record) -> bool:
        """Answer a turn that was cancelled here; return False if nobody can be told. Raises what its client gets."""
        record.outcome = "superseded"
        if record.aborted_for:
            record.outcome, record.verdict, record.cause = "aborted", "aborted_by_trainer", record.aborted_for
        if record.status is not None or record.task is None or record.task.uncancel():
            return False
        error = ended_by(record)
        tell_with_error(error, record.headers())
        record.status = error.status
        try:
            if record.held_stream is None or not exchange.begun:
                raise error from None
            await record.held_stream.fail(error)
        finally:
            del error  # its traceback names this frame
        return True

    def _is_through(self, record: Record) -> None:
        """End a program with its last turn; otherwise tell the judge of it. A restarted program is another one."""
        turn = record.turn
        if turn.program_id is None:
            return
        if turn.is_final:
            self._leases.release(turn.program_id, record.generation, turn.outcome)
        elif self._judge is not None and turn.has_whole_prompt and self._lives(record):
            self._judge.turn_seen(turn.program_id, turn.body, turn.branch_id)
