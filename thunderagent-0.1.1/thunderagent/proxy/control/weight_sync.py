"""The hook: a trainer that calls its engines itself reports when it begins and ends changing their weights.

Nothing is granted between the two, so no turn meets an engine that is about to be paused. A limit ends the sync of a
trainer that dies in between.
"""

from __future__ import annotations

import asyncio
from typing import Literal

import structlog
from aiohttp import web
from pydantic import BaseModel, ConfigDict

from thunderagent.proxy.fleet.commands import WEIGHT_SYNC
from thunderagent.proxy.fleet.replicas import Replicas
from thunderagent.proxy.gate.bodies import Report, read_model, report_response
from thunderagent.runtime import Runtime

log = structlog.get_logger("thunderagent.engine_control")


class WeightSyncRequest(BaseModel):
    """Which weights the engines get or got; `cache_cleared` is false if they kept their cache."""

    model_config = ConfigDict(extra="ignore", frozen=True, coerce_numbers_to_str=True)

    weight_version: str | None = None
    cache_cleared: bool = True


class WeightSyncBegunReport(Report):
    """Grants are stopped."""

    suspended: Literal[True]
    began: bool
    limit_s: float


class WeightSyncEndedReport(Report):
    """Grants go on."""

    suspended: Literal[False]
    ended: bool


class WeightSync:
    """Handlers of `/weight_sync/begin` and `/weight_sync/end`."""

    def __init__(self, runtime: Runtime, replicas: Replicas, *, limit_s: float) -> None:
        """Stop the grants of `runtime`, for at most `limit_s` after the last call."""
        self._runtime = runtime
        self._replicas = replicas
        self._limit_s = limit_s
        self._watchdog: asyncio.TimerHandle | None = None

    def routes(self) -> list[web.RouteDef]:
        """Return the routes of the hook."""
        return [web.post("/weight_sync/begin", self.begin), web.post("/weight_sync/end", self.end)]

    async def begin(self, request: web.Request) -> web.Response:
        """Stop grants. Idempotent, but each call restarts the limit."""
        wanted = await _read(request)
        began = self._watchdog is None
        self.close()
        self._watchdog = asyncio.get_running_loop().call_later(self._limit_s, self._over_limit)
        if began:
            self._runtime.suspend_grants(WEIGHT_SYNC)
            log.info("weight_sync_began", weight_version=wanted.weight_version, limit_s=self._limit_s)
        return report_response(WeightSyncBegunReport(suspended=True, began=began, limit_s=self._limit_s))

    async def end(self, request: web.Request) -> web.Response:
        """Resume grants. Idempotent, also without a beginning."""
        wanted = await _read(request)
        ended = self._watchdog is not None
        if ended:
            for replica_id, known in self._replicas.known.items():
                if wanted.cache_cleared:
                    self._runtime.replica_flushed(replica_id)
                if wanted.weight_version is not None:
                    known.told_count += 1
                known.weights_changed(wanted.weight_version or "", renewed=True)
            self._end()
            log.info("weight_sync_ended", weight_version=wanted.weight_version)
        return report_response(WeightSyncEndedReport(suspended=False, ended=ended))

    def close(self) -> None:
        """Stop the watchdog."""
        if self._watchdog is not None:
            self._watchdog.cancel()
            self._watchdog = None

    def _over_limit(self) -> None:
        log.error("weight_sync_over_limit", limit_s=self._limit_s, effect="grants go on")
        self._end()

    def _end(self) -> None:
        self.close()
        self._runtime.continue_grants(WEIGHT_SYNC)


async def _read(request: web.Request) -> WeightSyncRequest:
    body = await request.read()
    return read_model(WeightSyncRequest, body) if body else WeightSyncRequest()
