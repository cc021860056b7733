"""Draws the verdicts that need polls and turns together: an engine that froze, and a cache that collapsed.

What counts as evidence is in `programs/state/health.py`, which is pure; this asks and acts. With each good poll of a
replica it compares counters and turns. One that stands still is asked whether it is paused, and gets a check turn: one
token, to `/v1/completions`. An answer ends the suspicion. A frozen replica counts as down: its turns in flight are
lost, and go elsewhere. It gets a check now and then, and comes back with the first answer, or when its counters move.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Final

import msgspec
import structlog
from multidict import CIMultiDict

from thunderagent.backends.base import ReplicaReading
from thunderagent.errors import ReplicaError
from thunderagent.programs.state.health import Counters, ReplicaState, Stillness
from thunderagent.proxy.fleet.client import ReplicaClient
from thunderagent.proxy.fleet.replicas import Replicas
from thunderagent.runtime import Runtime
from thunderagent.runtime.runtime import ReplicaWork

log = structlog.get_logger("thunderagent.replicas")

CHECK_PATH: Final = "/v1/completions"
ASK_DEADLINE_S: Final = 2.0
CHECK_PERIOD_S: Final = 5.0
"""Time between two checks of a frozen replica, and the limit for each."""

UNCHECKED_S: Final = 60.0
"""A frozen replica that takes no check turns is tried with turns after this time."""

COLLAPSED_S: Final = 60.0
"""How long a replica whose cache collapsed gets no programs at first; doubled each time that it happens again."""

LONGEST_COLLAPSED_S: Final = 600.0

ALIVE: Final = "alive"
PAUSED: Final = "paused"
UNKNOWN: Final = "unknown"


class _Watch:
    """What is known of one replica."""

    def __init__(self, limit_s: float) -> None:
        self.stillness = Stillness(limit_s)
        self.check: asyncio.Task[None] | None = None
        self.takes_checks = True
        self.frozen_s: float | None = None
        self.frozen_at: Counters | None = None
        self.collapsed_until_s: float | None = None
        self.collapsed_for_s = COLLAPSED_S / 2


class Judging:
    """Judges all replicas, poll by poll. Without a limit nothing is ever frozen."""

    def __init__(
        self,
        runtime: Runtime,
        replicas: Replicas,
        *,
        frozen_limit_s: float,
        authorization: str = "",
        came_back: Callable[[str], None] = lambda _: None,
    ) -> None:
        """Judge `replicas`; `came_back` is called with a frozen one that goes on."""
        self._runtime = runtime
        self._replicas = replicas
        self._limit_s = frozen_limit_s
        self._authorization = authorization
        self.came_back = came_back
        self._watches: dict[str, _Watch] = {}
        self._client: ReplicaClient | None = None
        self._group: asyncio.TaskGroup | None = None
        replicas.on_removed.append(self.forget)

    def __repr__(self) -> str:
        return f"<Judging {len(self._watches)} replicas>"

    async def run(self, client: ReplicaClient) -> None:
        """Send checks with `client` until cancelled."""
        try:
            async with asyncio.TaskGroup() as group:
                self._client, self._group = client, group
                await asyncio.get_running_loop().create_future()
        finally:
            self._group = None

    def forget(self, replica_id: str) -> None:
        """Begin anew with a replica: it went down, or was removed."""
        watch = self._watches.pop(replica_id, None)
        if watch is not None and watch.check is not None:
            watch.check.cancel()

    def polled(self, replica_id: str, reading: ReplicaReading) -> None:
        """Judge a replica after a good poll; call it last, because it may take the replica away."""
        work = self._runtime.work_of(replica_id)
        if work is None:
            return
        watch = self._watches.get(replica_id)
        if watch is None:
            watch = self._watches[replica_id] = _Watch(self._limit_s)
        self._judge_cache(replica_id, watch, work)
        if not self._limit_s:
            return
        now_s, counters = self._runtime.now_s(), _counters_of(reading)
        if watch.frozen_s is not None:
            self._may_come_back(replica_id, watch, counters, now_s)
            return
        stillness, is_busy = watch.stillness, work.turn_count > 0 and not work.is_paused
        has_begun = is_busy and not counters.is_paced and self._runtime.has_begun(replica_id)
        stillness.polled(counters, heard_s=work.heard_s, is_busy=is_busy, now_s=now_s, has_begun=has_begun)
        if stillness.wants_check(now_s):
            stillness.checked_s = now_s
            self._send_check(replica_id, watch)
        elif (
            stillness.is_frozen(now_s)
            and (watch.takes_checks or counters.is_paced)
            and stillness.is_frozen(now_s, self._runtime.longest_prefill_s(replica_id))
        ):
            self._freeze(replica_id, watch, counters, now_s)

    # --- frozen

    def _freeze(self, replica_id: str, watch: _Watch, counters: Counters, now_s: float) -> None:
        still_s = watch.stillness.still_s(now_s)
        reason = f"its polls are answered, but its counters and its turns have stood still for {still_s:.0f} s"
        log.warning("replica_frozen", replica_id=replica_id, still_s=round(still_s, 3))
        watch.frozen_s, watch.frozen_at = now_s, counters
        watch.stillness.begin_anew()
        known = self._replicas.known[replica_id]
        known.is_up, known.why_down = False, reason
        self._runtime.replica_lost(replica_id, reason, ReplicaState.FROZEN)
        self._runtime.served.replica_heard(replica_id)

    def _may_come_back(self, replica_id: str, watch: _Watch, counters: Counters, now_s: float) -> None:
        assert watch.frozen_s is not None
        if watch.frozen_at is not None and counters.totals != watch.frozen_at.totals:
            self._come_back(replica_id, watch, "its counters move")
        elif not watch.takes_checks and now_s - watch.frozen_s >= UNCHECKED_S:
            self._come_back(replica_id, watch, "it is tried again")
        elif now_s - watch.stillness.checked_s >= CHECK_PERIOD_S or watch.stillness.checked_s > now_s:
            watch.stillness.checked_s = now_s
            self._send_check(replica_id, watch)

    def _come_back(self, replica_id: str, watch: _Watch, why: str) -> None:
        log.info("replica_goes_on", replica_id=replica_id, why=why)
        watch.frozen_s = watch.frozen_at = None
        watch.stillness.begin_anew()
        self.came_back(replica_id)

    def _send_check(self, replica_id: str, watch: _Watch) -> None:
        if self._group is None:
            return
        if watch.check is not None:
            watch.check.cancel()
        watch.check = self._group.create_task(self._check(replica_id, watch), name=f"check {replica_id}")

    async def _check(self, replica_id: str, watch: _Watch) -> None:
        try:
            found = PAUSED if await self._is_paused(replica_id) else await self._answers(replica_id)
        except ReplicaError:
            return  # it has no answer
        if self._watches.get(replica_id) is not watch:
            return
        watch.takes_checks = found != UNKNOWN
        if found == UNKNOWN:
            return
        if watch.frozen_s is not None:
            self._come_back(replica_id, watch, f"it is {found}")
        else:
            watch.stillness.begin_anew()

    async def _is_paused(self, replica_id: str) -> bool:
        """Return whether an engine says that it is paused: whoever paused it may not have told us."""
        backend = self._replicas.known[replica_id].endpoint.backend
        paths = (*backend.observed_paths, *filter(None, [backend.readiness_path]))
        return any(await asyncio.gather(*(self._says_paused(replica_id, path) for path in paths)))

    async def _says_paused(self, replica_id: str, path: str) -> bool:
        try:
            async with asyncio.timeout(ASK_DEADLINE_S):
                status, body = await self._ask(replica_id, "GET", path, None)
        except (ReplicaError, TimeoutError):
            return False
        known = self._replicas.known.get(replica_id)
        if status == 503 and known is not None and path == known.endpoint.backend.readiness_path:
            return True
        try:
            said = msgspec.json.decode(body) if status == 200 else {}
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
            return False
        return isinstance(said, dict) and said.get("is_paused") is True

    async def _answers(self, replica_id: str) -> str:
        """Send one short turn. Any word but 2xx may be the server's, not the engine's."""
        models = self._replicas.known[replica_id].reading.models
        turn = {"model": models[0] if models else "", "prompt": "1", "max_tokens": 1, "temperature": 0}
        status, _ = await self._ask(replica_id, "POST", CHECK_PATH, msgspec.json.encode(turn))
        return ALIVE if 200 <= status < 300 else UNKNOWN

    async def _ask(self, replica_id: str, method: str, path: str, body: bytes | None) -> tuple[int, bytes]:
        assert self._client is not None
        headers = CIMultiDict({"User-Agent": "thunderagent"})
        if body is not None:
            headers["Content-Type"] = "application/json"
        if self._authorization:
            headers["Authorization"] = self._authorization
        client, url = self._client, self._replicas.url_of(replica_id)
        answer = await client.send(replica_id, url, method, path, headers, body)
        try:
            is_whole = await client.whole_within(replica_id, answer, 64 * 1024)
            return answer.status, answer.whole() if is_whole else b""
        finally:
            answer.close()

    # --- collapsed

    def _judge_cache(self, replica_id: str, watch: _Watch, work: ReplicaWork) -> None:
        now_s = self._runtime.now_s()
        if watch.collapsed_until_s is not None:
            if now_s >= watch.collapsed_until_s:
                watch.collapsed_until_s = None
                self._runtime.replica_judged(replica_id, ReplicaState.COLLAPSED, "")
                if work.is_tripped:
                    self._runtime.replica_tripped(replica_id, tripped=False)
        elif work.collapsed_ratio is not None:
            watch.collapsed_for_s = min(LONGEST_COLLAPSED_S, 2 * watch.collapsed_for_s)
            watch.collapsed_until_s = now_s + watch.collapsed_for_s
            reason = f"its cache kept {work.collapsed_ratio:.0%} of what it was given, though all fitted"
            log.warning("replica_cache_collapsed", replica_id=replica_id, kept_ratio=round(work.collapsed_ratio, 3))
            self._runtime.replica_judged(replica_id, ReplicaState.COLLAPSED, reason)
            if self._replicas.breakers.has_other(replica_id):
                self._runtime.replica_tripped(replica_id, tripped=True)


def _counters_of(reading: ReplicaReading) -> Counters:
    """Return what a reading says of an engine's work."""
    totals = (
        reading.progress_total,
        reading.preemptions_total,
        reading.cache_query_tokens_total,
        reading.cache_hit_tokens_total,
        reading.tier_hit_tokens_total,
        reading.kv_used_ratio,
    )
    return Counters(totals, reading.running_count, reading.waiting_count, is_paced=reading.progress_total is not None)
