"""The hot path: identify, take a lease, forward, relay, read the usage and the tool called, end the lease.

Theory of operation
===================
A lease is held in a `with` block: whatever ends the handler - the answer's end, an error, or the cancellation that
aiohttp sends when the client's connection goes - ends the lease, and `upstream.close()` in a `finally` ends the
request on the replica, because engines stop generating when their client is gone. So the four moments in which a
client can leave (held, before the first byte, in a stream, in a whole answer) need no code of their own.

A turn is tried again on another replica only as long as no byte of an answer has come, and only if the connection
failed: what an engine answers is the client's, whatever its status. How often is a matter of `retry_budget.py`, and
which replica fails so often that nothing is sent there for a while, of `fleet/breaker.py`.

What a client says of its patience (`patience.py`) becomes the turn's deadline; a client that tries again takes the
place of its earlier attempt (`attempts.py`), which is cancelled like one whose client left. A stream that is held may
show signs of life (`heartbeat.py`), and whose turn it is may be inferred (`reading/inference.py`), if the operator
wants that.
"""

from __future__ import annotations

import asyncio
from dataclasses import dataclass
from functools import partial
from time import monotonic
from uuid import uuid4

import structlog
from aiohttp import web
from multidict import CIMultiDict, CIMultiDictProxy

from thunderagent.backends.base import NamedTurn
from thunderagent.errors import (
    FirstByteTimeoutError,
    ReplicaError,
    ReplicaTimeoutError,
    ReplicaTrippedError,
    ReplicaUnreachableError,
    RequestError,
    ThunderAgentError,
    TurnAbortedError,
    TurnSupersededError,
)
from thunderagent.leases import Lease, LeaseSource, OpenLease, TurnAsk
from thunderagent.proxy.admin.sandboxes import Sandboxes
from thunderagent.proxy.fleet.client import ReplicaClient
from thunderagent.proxy.fleet.replicas import Replicas, Watcher
from thunderagent.proxy.gate.held import NO_LIMITS, HeldLimits, HeldTurns
from thunderagent.proxy.gate.tenancy import Tenancy
from thunderagent.proxy.judge import Judge
from thunderagent.proxy.reading.completion import Completions
from thunderagent.proxy.reading.dialects import NO_USAGE, TURN_DIALECTS, Dialect, Usage, dialect_of
from thunderagent.proxy.reading.dialects.base import KeepId
from thunderagent.proxy.reading.identity import (
    CLASS_HEADER,
    NO_RULES,
    IdentityRules,
    TurnRequest,
    identify,
    identify_side_call,
    in_utf8,
)
from thunderagent.proxy.reading.inference import Chain, Inference, Prompt, prompt_of
from thunderagent.proxy.reading.large_bodies import LARGE_BODY_BYTES, read_aside
from thunderagent.proxy.reading.target import Target, target_of
from thunderagent.proxy.reading.tool_calls import StreamToolCalls, tool_of_answer
from thunderagent.proxy.reading.usage import StreamUsage, usage_of_answer
from thunderagent.proxy.turns.aborts import abort_answer, is_abortable
from thunderagent.proxy.turns.attempts import Attempt, Attempts
from thunderagent.proxy.turns.heartbeat import HeldStream
from thunderagent.proxy.turns.made_answers import MadeAnswers
from thunderagent.proxy.turns.patience import patience_of
from thunderagent.proxy.turns.retry_budget import DEFAULT_RETRIES, RetryBudget, RetrySettings
from thunderagent.proxy.turns.side_calls import SideCalls, cut, look_at
from thunderagent.proxy.watch.metrics import TurnMetrics
from thunderagent.proxy.wire.answer_headers import HOLD_HEADER, REPLICA_HEADER, identity_headers, tell_with_error
from thunderagent.proxy.wire.headers import forwarded_request_headers, forwarded_response_headers, lead_back
from thunderagent.proxy.wire.http11.answers import Answer
from thunderagent.proxy.wire.request_id import REQUEST_ID, begin
from thunderagent.proxy.wire.stall import write, write_eof

log = structlog.get_logger("thunderagent.turns")

PROGRESS_PERIOD_S = 1.0
"""The scheduler hears at most so often how far a stream has come."""

MADE_ANSWERS_COUNT = 100_000
"""So many responses are remembered by their ids: about 20 MB."""


@dataclass(frozen=True, slots=True)
class TurnSettings:
    """How turns are forwarded."""

    retries: RetrySettings = DEFAULT_RETRIES
    """How often turns are tried again, on another replica, after the connection failed before the first byte."""
    identity: IdentityRules = NO_RULES
    """What else names a program."""
    patience_s: float | None = None
    """Of clients that do not say how long they wait; None is for ever."""
    client_patience: bool = True
    """Whether turns are let in before their clients give up."""
    heartbeat_s: float | None = None
    """Time between two signs of life on a stream that is held; None sends none."""
    tenant_from_key: bool = False
    """Whether a program's tenant is that of the key that opens it, and a data key is for its own tenant alone."""
    held: HeldLimits = NO_LIMITS
    """How much may be held."""
    names_programs: bool = False
    """Tell engines whose turn it is, so that the events of their KV cache say whose blocks they are about."""


class Record:
    """What happened to one turn, for its canonical line."""

    __slots__ = (
        "arrived_s",
        "chain",
        "chosen_id",
        "completions",
        "dialect",
        "generation",
        "held_bytes",
        "held_s",
        "held_stream",
        "maker_id",
        "outcome",
        "reason",
        "replica_id",
        "status",
        "target",
        "tool",
        "tries_count",
        "turn",
        "usage",
    )

    def __init__(
        self,
        turn: TurnRequest,
        target: Target,
        dialect: Dialect,
        arrived_s: float,
        body: bytes,
        chosen_id: str | None = None,
    ) -> None:
        """Begin with a turn that has no lease yet; unless it ends otherwise, its client left."""
        self.turn = turn
        self.target = target
        self.held_bytes = len(body) + (len(turn.body) if turn.body is not body else 0)
        """What is kept of it until it has run: the body as it came, and as it is forwarded."""
        self.chosen_id = chosen_id
        """The replica that it must run on, and on no other."""
        self.maker_id: str | None = None
        """The replica that made the response which it goes on from, if that is known: no other has it."""
        self.dialect = dialect
        self.arrived_s = arrived_s
        self.held_stream: HeldStream | None = None
        """What a held stream shows; its head may have been sent."""
        self.chain: Chain | None = None
        self.completions: Completions | None = None
        """What is answered, where the program was inferred: its next prompt begins so."""
        self.generation = 0
        """Of its program, as its last lease said."""
        self.outcome = "abandoned"
        self.status: int | None = None
        self.replica_id: str | None = None
        self.reason: str | None = None
        self.held_s = 0.0
        self.tries_count = 0
        self.usage = NO_USAGE
        self.tool = ""


class Turns:
    """Handle the endpoints on which a request is a turn."""

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
        sandboxes: Sandboxes | None = None,
        judge: Judge | None = None,
    ) -> None:
        """Forward with `client` to `replicas`, under `leases`."""
        self._sandboxes = sandboxes
        self._judge = judge
        self._leases = leases
        self._client = client
        self._replicas = replicas
        self._watcher = watcher
        self._metrics = metrics
        self._settings = settings
        self._tenancy = tenancy
        self._held = held
        self._made = MadeAnswers(MADE_ANSWERS_COUNT)
        self._side_calls = SideCalls(
            client,
            replicas,
            watcher,
            self._made,
            retries_count=settings.retries.retries_count,
            identity=settings.identity,
            tenancy=tenancy,
        )
        self._budget = RetryBudget(settings.retries)
        self._attempts = Attempts()
        self._inference = Inference() if settings.identity.infers_programs else None
        self._name = uuid4().hex
        """Of this process: what engines know our requests by begins with it."""
        self._log = log.bind()
        self._loop: asyncio.AbstractEventLoop | None = None
        """Kept, because to ask for it costs a system call."""

    async def handle(self, request: web.Request) -> web.StreamResponse:
        """Answer one turn. A body that is no JSON object goes to an engine as it is, for its own words on it."""
        return await self._handle(request, target_of(request).plainly())

    async def handle_other(self, request: web.Request) -> web.StreamResponse:
        """Answer a POST on an API that we do not speak: it may generate, so it is a turn of nobody."""
        return await self._handle(request, target_of(request))

    async def handle_on(self, request: web.Request, replica_id: str, target: Target) -> web.StreamResponse:
        """Answer one turn on the replica that its client chose: nobody's, whoever's it says it is."""
        spelt = target.plainly() if target.spelt in TURN_DIALECTS else target
        return await self._handle(request, spelt, chosen_id=replica_id)

    async def _handle(self, request: web.Request, target: Target, chosen_id: str | None = None) -> web.StreamResponse:
        """Answer one turn, on the replica `chosen_id` if one was chosen."""
        arrived_s = monotonic()
        body = await request.read()
        path = target.sent
        read = partial(_read_turn, target, request.headers, body, self._settings.identity, self._tenancy)
        turn, prompt = await read_aside(read, len(body))
        if chosen_id is not None:
            turn, prompt = _of_nobody(turn), None
        turn = self._of_program(request, turn, prompt)
        record = Record(turn, target, dialect_of(target.spelt), arrived_s, body, chosen_id)
        if turn.previous_response_id:
            record.maker_id = self._made.maker(turn.previous_response_id)
        if prompt is not None:
            record.chain, record.completions = prompt.chain(), Completions(record.dialect)
            del prompt  # as large as the body, and of no more use
        attempt = self._attempt(request, path if chosen_id is None else target.prefix + path, turn)
        now_s = self._leases.now_s()
        self._budget.turn_came(now_s)
        self._attempts.begin(attempt, now_s)
        try:
            prompt_bytes = len(turn.body) - turn.media.size_bytes if turn.has_whole_prompt else 0
            return await self._try_replicas(request, prompt_bytes, record, attempt)
        except TurnAbortedError:
            make = partial(abort_answer, target.engine_path, turn.body)
            content_type, answer = await read_aside(make, len(turn.body))
            record.status, record.outcome = 200, "aborted"
            if record.held_stream is not None and record.held_stream.response is not None:
                return await record.held_stream.end_with(answer)
            return web.Response(body=answer, content_type=content_type, headers=_headers_of(record))
        except ThunderAgentError as error:
            record.status = error.status
            record.outcome = "failed" if isinstance(error, ReplicaError) else "rejected"
            return await _told(record, error)
        except asyncio.CancelledError:
            if not attempt.superseded:
                raise
            record.outcome = "superseded"
            if record.status is not None or attempt.task is None or attempt.task.uncancel():
                raise  # its answer has begun, or its client left as well
            record.status = TurnSupersededError.status
            return await _told(record, TurnSupersededError("the same turn was tried again; that attempt goes on"))
        finally:
            self._attempts.end(attempt, self._leases.now_s(), answered=record.outcome == "finished")
            self._write_line(record)
            if record.outcome == "finished":
                self._turn_is_through(record)

    def _turn_is_through(self, record: Record) -> None:
        """End a program with its last turn; else let the judge know of it. One that has begun anew is another."""
        turn = record.turn
        if turn.program_id is None:
            return
        if turn.is_final:
            self._leases.release(turn.program_id, record.generation, turn.outcome)
        elif self._judge is not None and turn.has_whole_prompt and self._lives(record):
            self._judge.turn_seen(turn.program_id, turn.body)

    def _lives(self, record: Record) -> bool:
        """Say whether the program of a turn with a lease did not end since: another of the same id is another."""
        return record.turn.program_id is None or self._leases.lives(record.turn.program_id, record.generation)

    def _of_program(self, request: web.Request, turn: TurnRequest, prompt: Prompt | None) -> TurnRequest:
        """Infer whose turn it is, if nobody says and the operator wants that, and have its sandboxes prepared.

        Raises `OtherTenantError` if its program is not one of its key's.
        """
        self._tenancy.check(turn.program_id)
        if prompt is not None and self._inference is not None:
            turn = self._inference.named(turn, prompt)
        if self._sandboxes is not None and turn.program_id is not None and CLASS_HEADER in request.headers:
            self._sandboxes.program_seen(turn.program_id, request.headers[CLASS_HEADER], turn.tenant)
        return turn

    def _attempt(self, request: web.Request, path: str, turn: TurnRequest) -> Attempt:
        try:
            patience = patience_of(request.headers, self._settings.patience_s)
        except RequestError as error:
            tell_with_error(error, identity_headers(turn.program_id, turn.source))
            raise
        if self._loop is None:
            self._loop = asyncio.get_running_loop()
        task = asyncio.current_task(self._loop)
        return Attempt(turn, path, patience, self._leases.now_s(), task, self._leases.new_turn_id())

    async def _try_replicas(
        self, request: web.Request, prompt_bytes: int, record: Record, attempt: Attempt
    ) -> web.StreamResponse:
        """Take a lease, forward, relay; before the first byte of an answer, try another replica if one fails."""
        turn = record.turn
        headers = forwarded_request_headers(request.headers)
        if self._settings.names_programs and turn.program_id is not None:
            headers["X-Session-ID"] = turn.program_id
        if self._settings.heartbeat_s is not None and turn.streams:
            record.held_stream = HeldStream(
                request,
                record.target.engine_path,
                record.dialect,
                self._settings.heartbeat_s,
                identity_headers(turn.program_id, turn.source),
            )
        deadline_s = self._deadline_s(record, attempt)
        avoid_replica_id = None
        while True:
            with await self._lease(request, record, attempt, prompt_bytes, deadline_s, avoid_replica_id) as lease:
                self._held.runs(request)
                granted = lease.granted
                self._metrics.observe_hold(granted.held_s)
                self._metrics.observe_added(monotonic() - record.arrived_s - record.held_s)
                authorization = headers.get("Authorization")
                named = await self._named(record, granted.replica_id, authorization)
                try:
                    try:
                        upstream = await self._send(record, granted, headers, named.body)
                    except ReplicaError as error:
                        ended = not self._lives(record)  # a second try would open it again
                        self._lease_failed(lease, error)
                        if ended or not self._may_retry(record, attempt, error):
                            raise
                        avoid_replica_id = error.replica_id
                        continue
                    try:
                        return await self._relay(request, record, lease, upstream)
                    finally:
                        upstream.close()
                finally:
                    if named.engine_request_id and record.outcome not in ("finished", "refused"):
                        self._replicas.abort_turn(granted.replica_id, named.engine_request_id, authorization)

    def _deadline_s(self, record: Record, attempt: Attempt) -> float | None:
        """Return when the client gives up; None if it never does, or if heartbeats will keep it waiting."""
        patience, settings = attempt.patience, self._settings
        if patience.patience_s is None or not settings.client_patience:
            return None
        beats = record.held_stream is not None and settings.heartbeat_s is not None
        if beats and patience.counts_bytes and (settings.heartbeat_s or 0.0) < patience.patience_s:
            return None
        return self._leases.now_s() + patience.patience_s

    async def _lease(
        self,
        request: web.Request,
        record: Record,
        attempt: Attempt,
        prompt_bytes: int,
        deadline_s: float | None,
        avoid_replica_id: str | None,
    ) -> OpenLease:
        """Wait for a lease, with signs of life if they are wanted; a second one is for a turn that kept its age."""
        turn = record.turn
        if record.tries_count:
            attempt.supersedes_id, attempt.turn_id = attempt.turn_id, self._leases.new_turn_id()
        self._tenancy.check(turn.program_id)  # once more: it may have become another's since the last try
        asked_s, lease, now_s = monotonic(), None, self._leases.now_s()
        waited = record.tries_count or attempt.patience.retry_count
        ask = TurnAsk(
            turn_id=attempt.turn_id,
            program_id=turn.program_id,
            branch_id=turn.branch_id,
            parent_branch_id=turn.parent_branch_id,
            parent_id=turn.parent_id,
            tenant=turn.tenant,
            group_id=turn.group_id,
            program_class=turn.program_class,
            role=turn.role,
            prompt_bytes=prompt_bytes,
            prefix=turn.prefix,
            media=turn.media.media,
            patience_s=None if deadline_s is None else deadline_s - now_s,
            waited_s=now_s - attempt.since_s if waited else None,
            supersedes_id=attempt.supersedes_id,
            avoid_replica_id=avoid_replica_id,
            pinned_replica_id=record.chosen_id,
            wanted_replica_id=record.maker_id or (self._leases.home_of(turn.told_id) if turn.told_id else None),
            abortable=is_abortable(record.target.engine_path, has_token_prompt=turn.has_token_prompt),
        )
        waiting = self._leases.lease(ask, self._held.turn(request, record.held_bytes))
        try:
            if record.held_stream is None:
                lease = await waiting
            else:
                async with record.held_stream.beating():
                    lease = await waiting
        except BaseException:
            record.held_s += monotonic() - asked_s
            if lease is not None:  # the client left while the last heartbeat went out
                lease.abandoned()
            raise
        attempt.supersedes_id = None
        granted = lease.granted
        record.replica_id = granted.replica_id
        record.generation = granted.generation
        record.reason = granted.reason
        record.held_s += granted.held_s
        record.tries_count += 1
        if record.maker_id not in (None, granted.replica_id):
            log.warning(
                "response_is_elsewhere",
                program_id=turn.program_id,
                replica_id=granted.replica_id,
                maker_id=record.maker_id,
                request_id=REQUEST_ID.get(),
            )
        return lease

    async def _send(self, record: Record, lease: Lease, headers: CIMultiDict[str], body: bytes) -> Answer:
        """Forward a turn, with its priority if the scheduler gives it one, and return when its answer's head came.

        A turn that its engine refuses for its priority is sent again without.
        """
        if lease.engine_priority is None:
            return await self._send_once(record, lease, headers, body)
        given = self._replicas.priorities.for_engine(lease.replica_id, lease.engine_priority)
        if given is None:
            return await self._send_once(record, lease, headers, body)
        (priorities, priority), with_priority = given, CIMultiDict(headers)
        put = partial(priorities.put, record.target.engine_path, body, with_priority, priority)
        with_it = await read_aside(put, len(body))
        upstream = await self._send_once(record, lease, with_priority, with_it)
        if upstream.status != 400:
            return upstream
        try:
            answer = await self._client.read(lease.replica_id, upstream)
        except BaseException:
            upstream.close()
            raise
        if not priorities.is_refusal(answer):
            return upstream
        upstream.close()
        upstream = await self._send_once(record, lease, headers, body)
        if upstream.status != 400:
            self._replicas.priorities.refused(lease.replica_id)
        return upstream

    async def _send_once(self, record: Record, lease: Lease, headers: CIMultiDict[str], body: bytes) -> Answer:
        """Forward a turn and return when the head of its answer is there; what came of it is reported."""
        replica_id = lease.replica_id
        if record.held_stream is not None and record.held_stream.response is not None:
            headers = CIMultiDict(headers)
            headers["Accept-Encoding"] = "identity"  # the head was sent, and promises nothing else
        async with self._replicas.breakers.trying(replica_id):
            return await self._client.send(
                replica_id, lease.url, "POST", record.target.sent, headers, body, may_repeat=not record.turn.is_unknown
            )

    def _may_retry(self, record: Record, attempt: Attempt, error: ReplicaError) -> bool:
        """Say whether a turn may be tried again that failed before its first byte."""
        if error.replica_id in (record.chosen_id, record.maker_id):
            return False  # elsewhere it would only be refused
        if record.turn.is_unknown and not isinstance(error, ReplicaUnreachableError):
            return False  # it may have been done
        if isinstance(error, ReplicaTimeoutError) and not isinstance(error, FirstByteTimeoutError):
            return False
        refused_before = self._budget.refused_count
        now_s = self._leases.now_s()
        may_retry = self._budget.may_retry(now_s, record.tries_count, attempt.patience.retry_count)
        if may_retry:
            self._metrics.count_retry("made")
        elif self._budget.refused_count > refused_before:
            self._metrics.count_retry("over_budget")
            self._log.warning("retry_over_budget", program_id=record.turn.program_id, replica_id=error.replica_id)
        return may_retry

    async def _named(self, record: Record, replica_id: str, authorization: str | None) -> NamedTurn:
        """Return the body as it goes to an engine: with an id, where that wants to be told of clients that left."""
        turn, path = record.turn, record.target.engine_path
        name = partial(self._replicas.name_turn, replica_id, path, turn.body, turn.program_id, authorization)
        return await read_aside(name, len(turn.body))

    async def forward(self, request: web.Request) -> web.StreamResponse:
        """Relay a request that is no turn, without a lease, to its program's replica or the least busy one."""
        return await self._side_calls.handle(request)

    async def forward_to(self, request: web.Request, replica_id: str, target: Target) -> web.StreamResponse:
        """Relay a request, without a lease, to a replica that its client chose."""
        return await self._side_calls.forward_to(request, replica_id, target)

    async def _relay(
        self, request: web.Request, record: Record, lease: OpenLease, upstream: Answer
    ) -> web.StreamResponse:
        """Relay an answer whose head has come, and end the lease."""
        record.status = upstream.status
        streams = upstream.content_type == "text/event-stream"
        headers = forwarded_response_headers(upstream.headers, keep_length=not streams)
        lead_back(headers, lease.granted.url, lease.granted.replica_id, record.target)
        headers.update(_headers_of(record))
        begun = record.held_stream is not None and record.held_stream.response is not None
        if begun and (not streams or upstream.status >= 400):
            return await self._refuse_begun(record, lease, upstream)
        if streams:
            return await self._relay_stream(request, record, lease, upstream, headers)
        return await self._relay_whole(record, lease, upstream, headers)

    async def _refuse_begun(self, record: Record, lease: OpenLease, upstream: Answer) -> web.StreamResponse:
        """Tell what the engine answered instead of a stream as an event: the head of a stream was sent already."""
        assert record.held_stream is not None
        answer = await self._relay_whole(record, lease, upstream, CIMultiDict())
        assert isinstance(answer.body, bytes)
        return await record.held_stream.refuse(answer.body)

    async def _relay_whole(
        self, record: Record, lease: OpenLease, upstream: Answer, headers: CIMultiDict[str]
    ) -> web.Response:
        """Read an answer to its end, end the lease, and return it unchanged."""
        try:
            body = await self._client.read(lease.granted.replica_id, upstream)
        except ReplicaError as error:
            self._lease_failed(lease, error)
            raise
        if upstream.status < 400:
            keep_id = partial(self._made.keep, replica_id=lease.granted.replica_id)
            read = partial(_read_answer, record, body, upstream.headers.get("Content-Encoding"), keep_id)
            record.usage, record.tool = await read_aside(read, len(body))
        self._end_lease(record, lease)
        return web.Response(status=upstream.status, reason=upstream.reason, headers=headers, body=body)

    async def _relay_stream(
        self,
        request: web.Request,
        record: Record,
        lease: OpenLease,
        upstream: Answer,
        headers: CIMultiDict[str],
    ) -> web.StreamResponse:
        """Relay a stream of events as they come, and end the lease with the usage and the calls that they carry."""
        begun = record.held_stream.response if record.held_stream is not None else None
        response = begun or web.StreamResponse(status=upstream.status, reason=upstream.reason, headers=headers)
        await begin(request, response)
        replica_id = lease.granted.replica_id
        tool_calls, completions = StreamToolCalls(), record.completions

        def listen(events: bytes) -> None:
            tool_calls.read(events)
            if completions is not None:
                completions.read_events(events)

        stream = StreamUsage(
            take_out=record.turn.usage_added,
            content_encoding=upstream.headers.get("Content-Encoding"),
            listener=tool_calls.read if completions is None else listen,
            reader=record.dialect.reader(partial(self._made.keep, replica_id=replica_id)),
        )
        progress_at_s = 0.0
        try:
            while chunk := await self._client.next_chunk(replica_id, upstream):
                now_s = monotonic()
                if not progress_at_s:
                    lease.started()
                    progress_at_s = now_s + PROGRESS_PERIOD_S
                elif now_s > progress_at_s:
                    lease.progressed(stream.events_count)
                    progress_at_s = now_s + PROGRESS_PERIOD_S
                is_large = stream.pending_bytes + len(chunk) > LARGE_BODY_BYTES
                relayed = await asyncio.to_thread(stream.feed, chunk) if is_large else stream.feed(chunk)
                if completions is not None and completions.ended:
                    self._remember(record)  # before the client knows the end, and goes on with it
                if relayed:
                    await write(request, response, relayed)
        except ReplicaError as error:
            record.outcome = "failed"
            self._lease_failed(lease, error)
            await _break_off(request, response, stream, record.dialect, error)
            return response
        if rest := stream.rest():
            await write(request, response, rest)
        record.usage = stream.usage
        record.tool = tool_calls.key()
        self._end_lease(record, lease)
        await write_eof(request, response)
        return response

    def _end_lease(self, record: Record, lease: OpenLease) -> None:
        """End the lease of a turn whose answer is whole; an engine's 4xx or 5xx is an answer too."""
        if record.status is not None and record.status < 400:
            record.outcome = "finished"
            lease.finished(*record.usage, record.tool)
            self._remember(record)
        else:
            record.outcome = "refused"
            lease.refused()

    def _remember(self, record: Record) -> None:
        """Remember once how the next prompt of an inferred program begins."""
        chain, completions, record.chain = record.chain, record.completions, None
        if chain is not None and completions is not None and self._inference is not None and record.status == 200:
            self._inference.answered(record.turn.program_id or "", chain, completions.choices())

    def _lease_failed(self, lease: OpenLease, error: ReplicaError) -> None:
        """Give a lease back that its replica failed, and have that replica looked at."""
        lease.failed()
        log.warning(
            "replica_failed_turn",
            program_id=lease.granted.program_id,
            replica_id=lease.granted.replica_id,
            why=str(error),
            request_id=REQUEST_ID.get(),
        )
        if not isinstance(error, ReplicaTrippedError):
            look_at(self._watcher, error)

    def _write_line(self, record: Record) -> None:
        """Write the turn's canonical line."""
        prompt_tokens, output_tokens, cached_tokens = record.usage
        self._log.info(
            "turn",
            program_id=record.turn.program_id,
            replica_id=record.replica_id,
            outcome=record.outcome,
            status=record.status,
            reason=record.reason,
            held_s=round(record.held_s, 4),
            duration_s=round(monotonic() - record.arrived_s, 4),
            tries_count=record.tries_count,
            prompt_tokens=prompt_tokens,
            output_tokens=output_tokens,
            cached_tokens=cached_tokens,
            tool=record.tool,
            request_id=REQUEST_ID.get(),
        )


def _of_nobody(turn: TurnRequest) -> TurnRequest:
    return turn._replace(program_id=None, source="anonymous", is_final=False, told_id="")


async def _told(record: Record, error: ThunderAgentError) -> web.StreamResponse:
    """Tell of an error as an event if the head of an answer was sent, else raise it."""
    if record.held_stream is None or record.held_stream.response is None:
        tell_with_error(error, _headers_of(record))
        try:
            raise error
        finally:
            del error  # or its traceback and this frame hold each other, and the whole turn, for a collection
    return await record.held_stream.fail(error)


def _read_turn(
    target: Target,
    headers: CIMultiDictProxy[str],
    body: bytes,
    rules: IdentityRules,
    tenancy: Tenancy,
) -> tuple[TurnRequest, Prompt | None]:
    """Return whose turn it is, and its prompt where that must be inferred from it.

    What is no JSON object, or is on an API that we do not speak, is nobody's.
    """
    body = in_utf8(body)
    dialect = TURN_DIALECTS.get(target.spelt)
    turn = identify(target.program_id, headers, body, rules, dialect) if dialect is not None else None
    if dialect is None or turn is None:
        turn = _unread(target, headers, body, rules)._replace(tenant=tenancy.named(""))
        return turn if tenancy.may_touch(turn.told_id or None) else turn._replace(told_id=""), None
    if (tenant := tenancy.named(turn.tenant)) != turn.tenant:
        turn = turn._replace(tenant=tenant)
    infers = rules.infers_programs and turn.program_id is None and turn.has_whole_prompt
    return turn, prompt_of(body, dialect, turn.tenant) if infers else None


def _unread(target: Target, headers: CIMultiDictProxy[str], body: bytes, rules: IdentityRules) -> TurnRequest:
    """Return a turn of nobody; whose it says it is its answer says, too, and it runs beside that program if it may.

    The size of what holds sound or pictures says nothing about its prompt.
    """
    call = identify_side_call(target.program_id, headers, body, rules)
    has_text = headers.get("Content-Type", "").partition("/")[0].lower() not in ("multipart", "audio", "image")
    return TurnRequest(
        None,
        call.source,
        "",
        "",
        call.body,
        usage_added=False,
        prefix=(),
        has_whole_prompt=has_text,
        told_id=call.program_id or "",
        is_unknown=target.spelt not in TURN_DIALECTS,
    )


def _read_answer(record: Record, body: bytes, content_encoding: str | None, keep_id: KeepId) -> tuple[Usage, str]:
    """Return the usage of a whole answer, and which tool it calls; and read what it says if that is wanted."""
    if record.completions is not None:
        record.completions.read_answer(body, content_encoding)
    usage = usage_of_answer(record.dialect, body, content_encoding, keep_id)
    return usage, tool_of_answer(body, content_encoding)


async def _break_off(
    request: web.Request, response: web.StreamResponse, stream: StreamUsage, dialect: Dialect, error: ReplicaError
) -> None:
    """Tell the client of a stream that broke, as an event, and cut the connection: the answer is not whole."""
    if response.headers.get("Content-Encoding", "identity") == "identity":  # else an event would read as rubbish
        ending = dialect.break_off(error.code, error.message, stream.last_events)
        await write(request, response, stream.broken_off() + ending)
    cut(request)


def _headers_of(record: Record) -> dict[str, str]:
    """Return what the answer to a turn says about it."""
    headers = {HOLD_HEADER: str(round(record.held_s * 1000))}
    if record.replica_id is not None:
        headers[REPLICA_HEADER] = record.replica_id
    return {**headers, **identity_headers(record.turn.program_id or record.turn.told_id or None, record.turn.source)}
