"""Engine control: a trainer's call goes to every replica, and grants stop while engines must not be used.

Theory of operation
===================
A control call is sent to all replicas at the same time, because weights come over a collective that all must join.
Calls are sent one after another, so all replicas see them in the same order. Calls that only read do not wait, nor do
aborts, which may have to end what another call waits for. Data-parallel ranks behind one URL are one engine: it is
called once, and the result counts for each of them.

While a call that changes engines is under way nothing is granted anywhere. Afterwards grants stay stopped on each
replica that paused, slept, or took weights on request, until the call that ends it (`fleet/commands.py` says which is
which). A replica that refused is not paused, so turns go on there. If a replica flushed its cache, the ledger forgets
what was there. Programs and their claims stay as they are: no program may be taken for gone because an engine is silent
for minutes.

**What was told keeps its effect.** An engine does not stop because the caller's client gave up. So a call that was sent
lives on until its engines answered or `timeout_s` is over, whoever waits for it. If no answer comes, nobody knows what
the engine does: grants stay stopped there (`unanswered`), the engine is asked where it has an answer to that, and
otherwise the next call that it answers, or its restart, ends the doubt.

The answer is the engine's own if all replicas gave the same. Otherwise it is the first one's, with a yes only where all
said yes, and with each replica's answer beside it. If not all did what they were told, it is an error with each
replica's answer.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections import Counter
from collections.abc import Awaitable, Callable, Coroutine, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from itertools import chain
from typing import Any, NamedTuple

import structlog
from aiohttp import web

from thunderagent.errors import (
    NoReplicaError,
    PerReplicaOnlyError,
    ReplicaError,
    ReplicaRemovedError,
    ReplicasDisagreeError,
    ReplicaTimeoutError,
    ReplicaUnreachableError,
)
from thunderagent.programs.messages import Decision, Event, ReplicaDown
from thunderagent.proxy.fleet.client import MAX_REPLY_BYTES, ReplicaClient
from thunderagent.proxy.fleet.commands import (
    CALL,
    COMMANDS,
    PAUSED,
    QUESTIONS,
    REPLICA_COMMANDS,
    UNANSWERED,
    UPDATE_PREFIX,
    Asked,
    Command,
    command_of,
)
from thunderagent.proxy.fleet.observer import ask_state, says_paused
from thunderagent.proxy.fleet.replicas import Replicas
from thunderagent.proxy.reading.dialects.openai import error_body
from thunderagent.proxy.reading.json_cost import COUNTED_BYTES, is_cheap
from thunderagent.proxy.reading.outline import read_aside
from thunderagent.proxy.reading.target import Target
from thunderagent.proxy.wire.aiohttp_request import target_of
from thunderagent.proxy.wire.headers import forwarded_request_headers
from thunderagent.runtime import Runtime

log = structlog.get_logger("thunderagent.engine_control")

SHOWN_BYTES = 2000
"""At most this much of a replica's answer is repeated in an answer that is not its own."""

OVERTAKING_S = 1.0
"""An abort may overtake a turn granted within this time: its body may not have been sent or read yet."""

ABORT_AGAIN_AFTER_S = (0.02, 0.05, 0.1, 0.2, 0.4)
"""While there is such a turn, its engine gets the abort again after each of these times."""

ASK_AGAIN_S = 1.0
"""How often an engine that left a call unanswered is asked what became of it."""

REPEATS_COUNT = 3
"""An engine that says as often that it did not do it will not: one that begins late would have begun by then."""

QUESTION_LIMIT_S = 5.0
"""For the answer to such a question."""

REPLIES_HEADER = "X-Engine-Control-Replies"

_BETWEEN_US = frozenset({502, 504, 524})
"""Statuses of a gateway that gave up: what the engine behind it does is unknown."""


class Reply(NamedTuple):
    """One replica's reply to a call; without one, `status` is 502 or 504 and `body` says why."""

    replica_id: str
    status: int
    body: bytes
    content_type: str
    value: Any
    is_unanswered: bool = False
    """Whether the call was sent, and nobody knows what became of it."""

    @property
    def ok(self) -> bool:
        """Whether it did what it was told."""
        return 200 <= self.status < 300

    @property
    def done(self) -> bool:
        """The same, including engines that answer 200 to what they could not do."""
        return self.ok and not (isinstance(self.value, dict) and self.value.get("success") is False)

    def answer(self) -> web.Response:
        """Return it as it arrived."""
        headers = {"Content-Type": self.content_type} if self.content_type else None
        return web.Response(status=self.status, body=self.body, headers=headers)


@dataclass(frozen=True, slots=True)
class EngineControlSettings:
    """How engines are controlled. The defaults are in the configuration only."""

    timeout_s: float
    """For a replica's whole answer to a control call: new weights can take long."""
    weight_sync_limit_s: float
    """For a weight sync that its trainer does not end."""
    lease_limit_s: float
    """For a lease whose caller sends no news."""
    lease_total_s: float
    """For a lease whose caller does; infinite if answers have no limit."""


class EngineControl:
    """Sends trainers' calls to replicas."""

    def __init__(
        self, runtime: Runtime, client: ReplicaClient, replicas: Replicas, settings: EngineControlSettings
    ) -> None:
        """Call `replicas` with `client`, and let `runtime` grant accordingly."""
        self._runtime = runtime
        self._client = client
        self._replicas = replicas
        self._settings = settings
        self._one_at_a_time = asyncio.Lock()
        self._calls_count: Counter[str | None] = Counter()
        self._under_way: set[asyncio.Task[Any]] = set()
        """Calls that were sent, and questions to engines that did not answer one."""
        self._left: dict[str, set[str]] = {}
        """By replica, the causes that it was told and can be asked about."""
        runtime.observe(self._went_down, ReplicaDown)
        replicas.on_removed.append(self._forget)

    def routes(self) -> list[web.RouteDef]:
        """Return the routes of calls to all replicas, and of those that never go to all."""
        return [
            *(web.route("*", path, self.broadcast) for path in COMMANDS),
            web.route("*", UPDATE_PREFIX + "{how:[^/]*}", self.broadcast),
            *(web.route("*", path, self.refuse) for path in REPLICA_COMMANDS),
        ]

    async def broadcast(self, request: web.Request) -> web.Response:
        """Call every replica, up or not: one that misses a call would serve other weights than the rest."""
        target = target_of(request).plainly()
        command = command_of(target.engine_path)
        assert command is not None
        body = await request.read()
        asked = await read_call(request, body)
        ordered = None if command.reads or command.is_abort else self._one_at_a_time
        if ordered is not None:
            await ordered.acquire()
        engines = self._replicas.engines()  # now: some may have come or gone during another call
        telling = self._tell(request, target, body, command, asked, engines, only_one=False)
        return _joined(target.engine_path, await self._to_the_end(telling, command, ordered))

    async def _to_the_end(
        self, telling: Coroutine[Any, Any, list[Reply]], command: Command, ordered: asyncio.Lock | None = None
    ) -> list[Reply]:
        """Return what a call brought. If its caller leaves it goes on, unless it only reads; then `ordered` is free."""
        if command.reads:
            return await telling
        task = self._begin(telling)
        if ordered is not None:
            task.add_done_callback(lambda _: ordered.release())
        try:
            return await asyncio.shield(task)
        except asyncio.CancelledError:
            if not task.done():
                log.info("caller_left", effect="the call goes on")
            raise

    def _begin(self, work: Coroutine[Any, Any, Any]) -> asyncio.Task[Any]:
        task = asyncio.create_task(work)
        self._under_way.add(task)
        task.add_done_callback(self._over)
        return task

    def _over(self, task: asyncio.Task[Any]) -> None:
        self._under_way.discard(task)
        if not task.cancelled():
            task.exception()  # whoever still waits for it gets it; otherwise it is no news

    def close(self) -> None:
        """End the calls that are under way, and the questions."""
        for task in self._under_way:
            task.cancel()

    async def tell_one(self, request: web.Request, target: Target, replica_id: str, command: Command) -> web.Response:
        """Call one replica with `target`, and return its own answer.

        The effect applies to all ranks behind its URL. Raises `ReplicaRemovedError` if it is gone.
        """
        body = await request.read()
        asked = await read_call(request, body)
        engine = next((engine for engine in self._replicas.engines() if replica_id in engine), None)
        if engine is None:
            raise ReplicaRemovedError(f"replica {replica_id} was removed", replica_id=replica_id)
        telling = self._tell(request, target, body, command, asked, [engine], only_one=True)
        return (await self._to_the_end(telling, command))[0].answer()

    async def refuse(self, request: web.Request) -> web.Response:
        """Say why a call does not go to all replicas, and how to send it to each."""
        path = target_of(request).spelt
        raise PerReplicaOnlyError(
            f"{path} is not sent to all replicas: {REPLICA_COMMANDS[path]}. Send it to each one: "
            f"GET /workers lists their URLs here, /workers/REPLICA_ID{path}"
        )

    async def _tell(
        self,
        request: web.Request,
        target: Target,
        body: bytes,
        command: Command,
        asked: Asked,
        engines: Sequence[Sequence[str]],
        *,
        only_one: bool,
    ) -> list[Reply]:
        """Stop grants (on the one engine, or anywhere), call engines, and record what each did, for each rank.

        Raises `NoReplicaError` if there is none.
        """
        if not engines:
            raise NoReplicaError("there is no replica to tell")
        known = [self._replicas.known[engine[0]] for engine in engines if engine[0] in self._replicas.known]
        asked.kinds = {each.endpoint.backend.kind for each in known}
        suspended_ids: Sequence[str | None] = engines[0] if only_one else (None,)
        aborts = command.aborts(asked)
        suspends = command.suspends and (aborts or not command.is_abort)
        with contextlib.ExitStack() as stack:
            for replica_id in suspended_ids if suspends else ():
                stack.enter_context(self._suspended(replica_id))
            for replica_id in chain(*engines) if aborts or command.cuts else ():
                self._runtime.replica_aborted(replica_id)
            if aborts:
                aborted_count = sum(map(self._runtime.abort_held, suspended_ids))
                log.info("held_turns_aborted", path=target.engine_path, turns_count=aborted_count)
            elif command.is_abort and (aborted_count := self._runtime.abort_named(asked.client_ids)):
                log.info("held_turns_aborted", path=target.engine_path, turns_count=aborted_count)

            async def tell(engine: Sequence[str]) -> list[Reply]:
                recently_s = self._runtime.now_s() - OVERTAKING_S
                send = partial(self.call, engine[0], request, target, body, names_rank=False)
                reply = await send()
                replies = [reply._replace(replica_id=replica_id) for replica_id in engine]
                for each in replies if reply.done else ():  # at once: others may take much longer
                    self._did(each, command, asked)
                for replica_id in filter(self._replicas.known.__contains__, engine if command.may_renew else ()):
                    self._replicas.known[replica_id].cache_in_doubt()
                if reply.is_unanswered and command.needs_answer:
                    self._left_unanswered(engine, target, command)
                if aborts and command.is_abort and reply.done:
                    await self._abort_overtaken(engine, recently_s, send)
                return replies

            replies = [reply for told in await asyncio.gather(*map(tell, engines)) for reply in told]
        if not command.reads:
            told = {reply.replica_id: reply.status for reply in replies}
            log.info("engines_told", path=target.engine_path, replies=told)
        return replies

    async def _abort_overtaken(
        self, engine: Sequence[str], since_s: float, abort: Callable[[], Awaitable[Reply]]
    ) -> None:
        """Abort turns that reached an engine after it was told to abort all, while nothing more is granted."""
        pauses_s = iter(ABORT_AGAIN_AFTER_S)
        while self._runtime.unanswered_count(engine, since_s) and (pause_s := next(pauses_s, None)):
            await asyncio.sleep(pause_s)
            if turns_count := self._runtime.unanswered_count(engine, since_s):
                log.info("abort_told_again", replica_id=engine[0], turns_count=turns_count)
                await abort()

    async def call(
        self, replica_id: str, request: web.Request, target: Target, body: bytes, *, names_rank: bool = True
    ) -> Reply:
        """Forward a request to one replica and read its whole answer. A failure is a reply, too."""
        headers = forwarded_request_headers(request.headers)
        headers.popall("Accept-Encoding", None)  # the answer is read here
        try:
            async with asyncio.timeout(self._settings.timeout_s):
                url = self._replicas.url_of(replica_id)
                response = await self._client.send(
                    replica_id,
                    url,
                    request.method,
                    target.sent,
                    headers,
                    body or None,
                    silence_timeout_s=self._settings.timeout_s,
                    names_rank=names_rank,
                )
                try:
                    content = await self._client.read(replica_id, response, MAX_REPLY_BYTES)
                finally:
                    response.close()
        except ReplicaError as error:
            return _failure(error)
        except TimeoutError:
            why = f"replica {replica_id} took longer than {self._settings.timeout_s:g} s"
            return _failure(ReplicaTimeoutError(why, replica_id=replica_id))
        content_type = response.headers.get("Content-Type", "")
        gave_up = response.status in _BETWEEN_US
        value = await read_aside(partial(_value, content), len(content))
        return Reply(replica_id, response.status, content, content_type, value, gave_up)

    def _did(self, reply: Reply, command: Command, asked: Asked) -> None:
        """Record that a replica did what it was told, while nothing is granted there yet."""
        runtime, replica_id = self._runtime, reply.replica_id
        if replica_id not in self._replicas.known:  # removed meanwhile
            return
        if not command.reads:
            self._replicas.known[replica_id].told_count += 1
        if command.clears(asked):
            runtime.replica_flushed(replica_id)
        if command.leaves:
            self._leave(replica_id, command.leaves)
        if _is_whole(reply, asked):
            for cause in command.ends:
                self._end(replica_id, cause)
        if command.suspends and not command.is_abort:
            runtime.continue_grants(UNANSWERED, replica_id)  # it answers again, and does one call after another
        if command.renews or (not command.reads and asked.weight_version):
            self._replicas.known[replica_id].weights_changed(asked.weight_version, renewed=command.renews)

    # --- an engine that was told, and did not answer

    def _left_unanswered(self, engine: Sequence[str], target: Target, command: Command) -> None:
        """Keep grants stopped on an engine of which nobody knows what it does, and ask it where it can say that."""
        for replica_id in filter(self._replicas.known.__contains__, engine):
            self._replicas.known[replica_id].told_count += 1
            if not command.ends:  # otherwise it is stopped as it was, for what the call was to end
                self._runtime.suspend_grants(UNANSWERED, replica_id)
            if command.leaves in QUESTIONS:
                self._left.setdefault(replica_id, set()).add(command.leaves)  # perhaps: it is asked after a silence
        effect = "nothing is granted there until it answers a call, or is started again"
        log.error("control_call_unanswered", replica_id=engine[0], path=target.engine_path, effect=effect)
        causes = [cause for cause in (command.leaves, *command.ends) if cause in QUESTIONS]
        if causes:
            doubt = UNANSWERED if command.leaves else causes[0]
            self._begin(self._find_out(engine, causes, doubt, repeats_count=REPEATS_COUNT))

    def _went_down(self, event: Event, decisions: Sequence[Decision]) -> None:  # noqa: ARG002 - an observer's signature
        """Stop grants on a replica that was paused and comes up again: only its silence was noticed, or it restarted.

        It is asked then. One that cannot say counts as restarted.
        """
        assert isinstance(event, ReplicaDown)
        if causes := self._left.pop(event.replica_id, None):
            self._begin(self._ask_when_up(event.replica_id, sorted(causes)))

    async def _ask_when_up(self, replica_id: str, causes: Sequence[str]) -> None:
        if replica_id in self._replicas.known:
            self._runtime.suspend_grants(UNANSWERED, replica_id)
            await self._find_out([replica_id], causes, UNANSWERED, repeats_count=1, if_it_cannot_say=False)

    def _forget(self, replica_id: str) -> None:
        self._left.pop(replica_id, None)

    async def _find_out(
        self,
        engine: Sequence[str],
        causes: Sequence[str],
        doubt: str,
        *,
        repeats_count: int,
        if_it_cannot_say: bool | None = None,
    ) -> None:
        """Ask an engine which of the causes hold there, until it has said so, or the `doubt` is over.

        What it was told to do last counts at once; the contrary only if it says that `repeats_count` times. If it has
        no answer, `if_it_cannot_say` is its answer; None leaves it in doubt.
        """
        runtime, as_before_count, ends = self._runtime, 0, doubt != UNANSWERED
        while True:
            await asyncio.sleep(ASK_AGAIN_S)
            state = runtime.replicas.get(engine[0])
            if state is None or doubt not in state.suspended_for:
                return  # a later call, or a restart, was faster
            told = self._told(engine)
            said = [await self._holds(engine[0], cause) for cause in causes] if state.is_up else [(0, None)]
            if not all(status for status, _ in said) or self._told(engine) != told:  # it was told something meanwhile
                as_before_count = 0
                continue
            holds = [if_it_cannot_say if each is None else each for _, each in said]
            if None in holds:
                return
            as_before_count += 1
            if any(holds) is not ends or as_before_count >= repeats_count:
                break
        log.info(
            "engine_said", replica_id=engine[0], holds=[cause for cause, it in zip(causes, holds, strict=True) if it]
        )
        for replica_id in filter(self._replicas.known.__contains__, engine):
            for cause, it_holds in zip(causes, holds, strict=True):
                (self._leave if it_holds else self._end)(replica_id, cause)
            runtime.continue_grants(UNANSWERED, replica_id)

    def _told(self, engine: Sequence[str]) -> list[int]:
        """Return how often each replica of an engine was told something."""
        return [self._replicas.known[each].told_count for each in engine if each in self._replicas.known]

    async def _holds(self, replica_id: str, cause: str) -> tuple[int, bool | None]:
        """Return the status with which an engine answers whether a cause holds, 0 if it does not, and what it says."""
        known = self._replicas.known.get(replica_id)
        if known is None:
            return 0, None
        backend, question, url = known.endpoint.backend, QUESTIONS[cause], known.endpoint.url
        if backend.readiness_path and cause == PAUSED:
            status, _ = await ask_state(self._client, replica_id, url, backend.readiness_path, QUESTION_LIMIT_S)
            return status, says_paused(status)
        status, state = await ask_state(self._client, replica_id, url, question.path, QUESTION_LIMIT_S)
        said = state.get(question.field)
        return status, said if isinstance(said, bool) else None

    def _leave(self, replica_id: str, cause: str) -> None:
        """Keep grants stopped on a replica for a cause that it was told, until it is told the end of it."""
        self._runtime.suspend_grants(cause, replica_id)
        if cause in QUESTIONS:
            self._left.setdefault(replica_id, set()).add(cause)

    def _end(self, replica_id: str, cause: str) -> None:
        self._runtime.continue_grants(cause, replica_id)
        self._left.get(replica_id, set()).discard(cause)

    @contextmanager
    def _suspended(self, replica_id: str | None) -> Iterator[None]:
        """Suspend grants on a replica (None: on all) for the length of the block; blocks may overlap."""
        self._calls_count[replica_id] += 1
        if self._calls_count[replica_id] == 1:
            self._runtime.suspend_grants(_call_cause(replica_id), replica_id)
        try:
            yield
        finally:
            self._calls_count[replica_id] -= 1
            if not self._calls_count[replica_id]:
                del self._calls_count[replica_id]
                self._runtime.continue_grants(_call_cause(replica_id), replica_id)


async def read_call(request: web.Request, body: bytes) -> Asked:
    """Read what a control call asks for."""
    return await read_aside(partial(Asked, request.query, body), len(body))


def _call_cause(replica_id: str | None) -> str:
    """Return the cause for a call to all replicas, or for a call to one, which must not end the former."""
    return CALL if replica_id is None else f"{CALL} to one"


def _is_whole(reply: Reply, asked: Asked) -> bool:
    """Return whether all of an engine is back, not only its weights. vLLM says so; SGLang does what its tags say."""
    if isinstance(reply.value, dict) and reply.value.get("status") == "sleeping":
        return False
    return not asked.tags or "kv_cache" in asked.tags


def _failure(error: ReplicaError) -> Reply:
    value = error_body(error.status, error.code, error.message)
    was_sent = not isinstance(error, ReplicaUnreachableError | ReplicaRemovedError)
    return Reply(error.replica_id, error.status, json.dumps(value).encode(), "application/json", value, was_sent)


def _value(content: bytes) -> Any:
    if len(content) > COUNTED_BYTES or not is_cheap(content):
        return content[:SHOWN_BYTES].decode(errors="replace")
    try:
        return json.loads(content)
    except (ValueError, RecursionError):
        return content[:SHOWN_BYTES].decode(errors="replace")


def _joined(path: str, replies: list[Reply]) -> web.Response:
    """Make one answer of all replicas' replies."""
    first = replies[0]
    if all((reply.status, reply.body) == (first.status, first.body) for reply in replies):
        response = first.answer()
    elif all(reply.ok for reply in replies):
        response = web.json_response(_merged(replies), status=first.status)
    else:
        failed = [reply.replica_id for reply in replies if not reply.ok]
        why = f"{len(failed)} of {len(replies)} replicas did not do {path}: {', '.join(failed)}"
        error = ReplicasDisagreeError(why)
        body = error_body(error.status, error.code, error.message)
        response = web.json_response({**body, "replicas": _details(replies)}, status=error.status)
    response.headers[REPLIES_HEADER] = ", ".join(f"{reply.replica_id}={reply.status}" for reply in replies)
    return response


def _merged(replies: list[Reply]) -> dict[str, Any]:
    """Return the first answer's fields, each yes only if all said yes, and each replica's reply."""
    merged = dict(replies[0].value) if isinstance(replies[0].value, dict) else {}
    for name, value in merged.items():
        if isinstance(value, bool):
            others = [reply.value.get(name) for reply in replies if isinstance(reply.value, dict)]
            merged[name] = len(others) == len(replies) and all(others)
    return {**merged, "replicas": _details(replies)}


def _details(replies: list[Reply]) -> dict[str, Any]:
    return {reply.replica_id: {"status": reply.status, "body": reply.value} for reply in replies}
