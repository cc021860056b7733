"""Asks engines whether somebody paused them, and which weights they have: for trainers that never tell us.

It runs off the request path, in its own rhythm, with a deadline for each replica; a question without an answer is not
repeated. While an engine reports a pause nothing is granted on it. An answer requested before a control call through us
took effect may be older than that call, and is ignored.
"""

from __future__ import annotations

import asyncio
from typing import Any

import msgspec
import structlog
from multidict import CIMultiDict

from thunderagent.errors import ReplicaError
from thunderagent.proxy.fleet.client import ReplicaClient
from thunderagent.proxy.fleet.commands import OBSERVED, PAUSED
from thunderagent.proxy.fleet.replicas import Replicas
from thunderagent.proxy.reading.sse import UNREADABLE
from thunderagent.runtime import Runtime

log = structlog.get_logger("thunderagent.engine_control")


_SAYS_PAUSED = {200: False, 503: True}
"""By the status of an engine's readiness. Whatever it is not ready for, no turn should go there."""


class Observer:
    """Polls the engines' own reports of pauses and weights."""

    def __init__(
        self, runtime: Runtime, client: ReplicaClient, replicas: Replicas, *, interval_s: float, deadline_s: float
    ) -> None:
        """Ask `replicas` with `client` every `interval_s`, each answer within `deadline_s`."""
        self._runtime = runtime
        self._client = client
        self._replicas = replicas
        self._interval_s = interval_s
        self._deadline_s = deadline_s
        self._asked_ids: set[str] = set()
        """Replicas that have not answered yet: they are not asked again, and nobody waits for them."""

    async def run(self) -> None:
        """Ask until cancelled, all side by side."""
        async with asyncio.TaskGroup() as group:
            while True:
                await asyncio.sleep(self._interval_s)
                for state in list(self._runtime.replicas.states.values()):
                    if state.is_up and state.replica_id not in self._asked_ids:
                        self._asked_ids.add(state.replica_id)
                        group.create_task(self._look(state.replica_id), name=f"observe {state.replica_id}")

    async def _look(self, replica_id: str) -> None:
        try:
            await self._look_at(replica_id)
        finally:
            self._asked_ids.discard(replica_id)

    async def _look_at(self, replica_id: str) -> None:
        known = self._replicas.known.get(replica_id)
        if known is None:
            return
        backend = known.endpoint.backend
        for path in (*backend.observed_paths, *filter(None, [backend.readiness_path])):
            told_count = known.told_count
            status, state = await ask_state(self._client, replica_id, known.endpoint.url, path, self._deadline_s)
            if self._replicas.known.get(replica_id) is not known or self._runtime.replicas.get(replica_id) is None:
                return  # it was removed meanwhile
            if known.told_count != told_count:
                return  # its answer may be older than the call
            paused = state.get("is_paused") if path != backend.readiness_path else says_paused(status)
            if isinstance(paused, bool):
                self._take_paused(replica_id, paused=paused)
            if isinstance(version := state.get("weight_version"), str):
                self._take_weight_version(replica_id, version)

    def _causes(self, replica_id: str) -> set[str]:
        state = self._runtime.replicas.get(replica_id)
        return set(state.suspended_for) if state is not None else set()

    def _take_paused(self, replica_id: str, *, paused: bool) -> None:
        causes = self._causes(replica_id)
        if paused and not {PAUSED, OBSERVED} & causes:
            log.info("engine_is_paused", replica_id=replica_id)
            self._runtime.suspend_grants(OBSERVED, replica_id)
        for cause in (PAUSED, OBSERVED):
            if not paused and cause in causes:
                self._runtime.continue_grants(cause, replica_id)

    def _take_weight_version(self, replica_id: str, version: str) -> None:
        known = self._replicas.known[replica_id]
        if known.weight_version not in ("", version):
            self._runtime.replica_flushed(replica_id)  # the cache of other weights is useless
        if known.weight_version:
            known.weights_changed(version, renewed=False)
        else:
            known.weights_named(version)


def says_paused(status: int) -> bool | None:
    """Return whether an engine is paused, by the status of its readiness; None if that says nothing."""
    return _SAYS_PAUSED.get(status)


async def ask_state(
    client: ReplicaClient, replica_id: str, url: str, path: str, deadline_s: float
) -> tuple[int, dict[str, Any]]:
    """Return an engine's status and its answer as an object; 0 and nothing if it does not answer."""
    status, body = await ask_plainly(client, replica_id, url, path, deadline_s)
    try:
        state = msgspec.json.decode(body) if status == 200 else {}
    except UNREADABLE:
        state = {}
    return status, state if isinstance(state, dict) else {}


async def ask_plainly(
    client: ReplicaClient, replica_id: str, url: str, path: str, deadline_s: float
) -> tuple[int, bytes]:
    """Return an engine's status and answer to a GET; 0 and nothing if it does not answer."""
    try:
        async with asyncio.timeout(deadline_s):
            response = await client.send(replica_id, url, "GET", path, CIMultiDict(), None)
            try:
                return response.status, await client.read(replica_id, response)
            finally:
                response.close()
    except (ReplicaError, TimeoutError):
        return 0, b""
