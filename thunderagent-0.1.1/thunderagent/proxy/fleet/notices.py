"""Tell engines what they cannot see: that a client left its turn, that a program ended.

Theory of operation
-------------------
A notice is one POST of little consequence: an engine that does not get it computes, or keeps, a while longer what
nobody needs. So nothing waits for it. `NoticeSender` takes it without an await and sends it beside the turns, a few at
a time to each replica and path, each with a deadline; what comes while very many wait is dropped. Aborts never wait
behind releases, nor one replica's behind another's.

An engine that has no such path, or refuses the first notice, gets no more of that kind until it comes up anew.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Coroutine, Sequence
from contextvars import Context
from dataclasses import dataclass, field
from functools import partial
from typing import Any, NamedTuple

import structlog
from multidict import CIMultiDict

from thunderagent.backends.base import Notice
from thunderagent.errors import ReplicaError
from thunderagent.programs.messages import Decision, Event, Release
from thunderagent.proxy.fleet.client import ReplicaClient

log = structlog.get_logger("thunderagent.notices")

SENDERS_COUNT = 8
LAST_NOTICES_S = 1.0
"""How long a shutdown, which cuts off the remaining turns, waits for their notices to go out."""

NOT_HERE = (404, 405, 501)
"""An engine without that path answers with one of these."""


class _Letter(NamedTuple):
    replica_id: str
    notice: Notice
    authorization: str | None


@dataclass(slots=True)
class _Lane:
    """The notices on one path of one replica."""

    waiting: deque[_Letter] = field(default_factory=deque)
    senders_count: int = 0
    accepted: bool = False
    refused: bool = False
    failing: bool = False
    full: bool = False


class NoticeSender:
    """Sends notices while `run` runs; `url_of` returns a replica's URL, or None if it was removed."""

    def __init__(
        self, url_of: Callable[[str], str | None], timeout_s: float, *, max_waiting_count: int = 10_000
    ) -> None:
        """Start with nothing to send; at most `max_waiting_count` wait for each replica and path."""
        self._max_waiting_count = max_waiting_count
        self._url_of = url_of
        self._timeout_s = timeout_s
        self._lanes: dict[tuple[str, str], _Lane] = {}
        self._start: Callable[[Coroutine[Any, Any, None]], asyncio.Task[None]] | None = None
        self._sending: set[asyncio.Task[None]] = set()
        self._client: ReplicaClient | None = None

    def __repr__(self) -> str:
        waiting_count = sum(len(lane.waiting) for lane in self._lanes.values())
        refused = [f", not to {replica_id}{path}" for (replica_id, path), lane in self._lanes.items() if lane.refused]
        return f"<NoticeSender {waiting_count} waiting{''.join(refused)}>"

    def send(self, replica_id: str, notice: Notice, authorization: str | None = None) -> None:
        """Send a notice soon, with the `Authorization` of the turn that it is about. Never blocks, never raises."""
        lane = self._lanes.setdefault((replica_id, notice.path), _Lane())
        if self._start is None or lane.refused:
            return
        if len(lane.waiting) >= self._max_waiting_count:
            if not lane.full:  # once, until everything that waits was sent
                lane.full = True
                log.warning("notices_dropped", replica_id=replica_id, path=notice.path)
            return
        lane.waiting.append(_Letter(replica_id, notice, authorization))
        if lane.senders_count < SENDERS_COUNT:
            lane.senders_count += 1
            task = self._start(self._send_waiting(lane))
            self._sending.add(task)
            task.add_done_callback(self._sending.discard)

    def replica_up(self, replica_id: str) -> None:
        """Start over with a replica: another version may run there now."""
        for lane_replica_id, path in list(self._lanes):
            if lane_replica_id == replica_id:
                self._lanes[replica_id, path].refused = False
                self._lanes[replica_id, path].accepted = False

    def forget(self, replica_id: str) -> None:
        """Drop the notices to a removed replica."""
        for place in [place for place in self._lanes if place[0] == replica_id]:
            self._lanes.pop(place).waiting.clear()

    async def run(self, client: ReplicaClient) -> None:
        """Send with `client` until cancelled, and then briefly what is left."""
        try:
            async with asyncio.TaskGroup() as group:
                # In no request's context: notices must not carry a request's id or trace.
                self._client, self._start = client, partial(group.create_task, context=Context())
                try:
                    await asyncio.get_running_loop().create_future()
                finally:
                    if self._sending:
                        await asyncio.wait(self._sending, timeout=LAST_NOTICES_S)
        finally:
            self._start = None

    async def _send_waiting(self, lane: _Lane) -> None:
        try:
            while lane.waiting:
                await self._deliver(lane, lane.waiting.popleft())
            lane.full = False
        finally:
            lane.senders_count -= 1

    async def _deliver(self, lane: _Lane, letter: _Letter) -> None:
        """Send one notice, and check the engine's answer. Expected failures end here."""
        assert self._client is not None
        replica_id, notice, authorization = letter
        url = self._url_of(replica_id)
        if url is None or lane.refused:
            return
        headers = CIMultiDict({"Content-Type": "application/json"})
        if authorization is not None:
            headers["Authorization"] = authorization
        why: object
        try:
            async with asyncio.timeout(self._timeout_s):
                response = await self._client.send(replica_id, url, "POST", notice.path, headers, notice.body)
                try:
                    await self._client.read(replica_id, response)
                finally:
                    response.close()
            why = None if response.status < 400 else response.status
        except (TimeoutError, ReplicaError) as error:
            why = str(error) or f"no answer within {self._timeout_s:g} s"
        if why is None:
            lane.accepted, lane.failing = True, False
        elif why in NOT_HERE or (why == 400 and not lane.accepted):
            lane.refused = True
            lane.waiting.clear()
            log.info("notice_not_supported", replica_id=replica_id, path=notice.path, status=why)
        elif not lane.failing:  # once, until one is accepted again
            lane.failing = True
            log.warning("notice_failed", replica_id=replica_id, path=notice.path, why=why)


@dataclass(slots=True)
class TaggedPrograms:
    """Remembers where engines know a program's memory by its id, to have it freed when the program ends."""

    ended: Callable[[str, str, str | None], None]
    """Called with the program's id, a replica's, and the `Authorization` of its last turn there."""
    observe: Callable[..., object] = field(default=lambda *_: None)
    """Has `heard` be called with releases; called once, for the first program."""
    _hears: bool = False
    _replicas: dict[str, dict[str, str | None]] = field(default_factory=dict)

    def add(self, program_id: str, replica_id: str, authorization: str | None) -> None:
        """Note that a turn of the program, tagged, goes to the replica."""
        if not self._hears:
            self._hears = True
            self.observe(self.heard, Release)
        self._replicas.setdefault(program_id, {})[replica_id] = authorization

    def replicas_of(self, program_id: str) -> list[str]:
        """Return the replicas where a program's memory is known by its id."""
        return list(self._replicas.get(program_id, ()))

    def heard(self, event: Event, decisions: Sequence[Decision]) -> None:  # noqa: ARG002 - an observer's signature
        """Handle the scheduler's decisions."""
        for decision in decisions:
            if type(decision) is Release:
                for replica_id, authorization in self._replicas.pop(decision.program_id, {}).items():
                    self.ended(decision.program_id, replica_id, authorization)
