"""The facade: each replica has a URL here, so that what a trainer tells one engine passes through us.

Trainers ask a gateway for its engines (`GET /workers`, or `GET /list_workers` as slime's own router has it) and then
talk to each. The URLs that they get are ours. A control call here has the same effect as one to all replicas, but on
this one. A turn is an anonymous turn on that replica, whatever program it names. `/v1/loads` counts held turns, too.
Everything else is forwarded unchanged, including what is never sent to all replicas.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from dataclasses import replace
from typing import Any
from urllib.parse import quote

from aiohttp import web

from thunderagent.errors import NotFoundError
from thunderagent.proxy.control.engine_control import EngineControl
from thunderagent.proxy.control.loads import load_of
from thunderagent.proxy.fleet.commands import command_of
from thunderagent.proxy.fleet.replicas import Replicas
from thunderagent.proxy.gate.access import Use, is_known, use_of
from thunderagent.proxy.reading.target import Target
from thunderagent.proxy.wire.aiohttp_request import target_of
from thunderagent.runtime import Runtime

ForwardTo = Callable[[web.Request, str, Target], Awaitable[web.StreamResponse]]
"""Forward a request to a replica, for a target there, with a lease or without, and relay the answer."""

REPLICAS_PATH = "/workers/"


def is_of_one_replica(target: Target) -> bool:
    """Return whether a target is below one replica's URL here."""
    return target.path.startswith(REPLICAS_PATH) and target.path.count("/") > 2


def turn_on(target: Target, method: str, replicas: Replicas) -> tuple[str, Target] | None:
    """Return the replica of a turn below its URL, and the target there; None if it is not a turn.

    Also None if there is no such replica. Raises `RequestError`.
    """
    replica_id, below = target.below()
    use = use_of(below, method)
    is_turn = use is Use.TURN or (use is Use.GENERATE and is_known(below, method))
    if not is_turn or replica_id not in replicas.known or command_of(below.spelt) is not None:
        return None
    below = below.plainly() if use is Use.TURN else below
    return replica_id, replace(below, path=target.path)


class Facade:
    """Handlers of `/workers`, of what lies under it, and of the loads."""

    def __init__(
        self,
        runtime: Runtime,
        replicas: Replicas,
        engine_control: EngineControl,
        turn_on: ForwardTo,
        forward_to: ForwardTo,
    ) -> None:
        """Stand for `replicas`; turns go through `turn_on`, everything else except control through `forward_to`."""
        self._runtime = runtime
        self._replicas = replicas
        self._engine_control = engine_control
        self._turn_on = turn_on
        self._forward_to = forward_to

    def routes(self) -> list[web.RouteDef]:
        """Return the routes of the facade."""
        return [
            web.get("/workers", self.list_replicas),
            web.get("/list_workers", self.list_urls),
            web.route("*", "/workers/{path:[^/]+/.+}", self.pass_on),
            web.get("/v1/loads", self.loads),
        ]

    async def list_replicas(self, request: web.Request) -> web.Response:
        """List the replicas as SGLang's gateway does."""
        described = [self._described(request, replica_id) for replica_id in self._replicas.known]
        healthy_count = sum(replica["is_healthy"] for replica in described)
        load_count = sum(replica["load"] for replica in described)
        stats = {
            "total_workers": len(described),
            "healthy_workers": healthy_count,
            "total_load": load_count,
            "by_type": {"regular": len(described), "prefill": 0, "decode": 0},
        }
        return web.json_response({"workers": described, "total": len(described), "stats": stats})

    async def list_urls(self, request: web.Request) -> web.Response:
        """List the replicas as slime's own router does, which slime asks before it ends turns."""
        return web.json_response({"urls": [self._url(request, replica_id) for replica_id in self._replicas.known]})

    async def pass_on(self, request: web.Request) -> web.StreamResponse:
        """Forward a request to the replica that it names."""
        replica_id, target = target_of(request).below()
        if replica_id not in self._replicas.known:
            raise NotFoundError(f"there is no replica {replica_id!r}")
        command = command_of(target.spelt)
        if command is not None:
            return await self._engine_control.tell_one(request, target.plainly(), replica_id, command)
        if (found := turn_on(target_of(request), request.method, self._replicas)) is not None:
            return await self._turn_on(request, *found)
        if request.method == "GET" and target.spelt == "/v1/loads":
            return await self._loads_of(request, replica_id, target.plainly())
        return await self._forward_to(request, replica_id, target)

    async def loads(self, request: web.Request) -> web.Response:  # noqa: ARG002 - a handler's signature
        """Count turns in flight and held, of all replicas."""
        return web.json_response(load_of(self._runtime, list(self._replicas.known)))

    async def _loads_of(self, request: web.Request, replica_id: str, target: Target) -> web.Response:
        """Answer with the engine's counts plus the turns held for it; with our own count if it has none."""
        own = load_of(self._runtime, [replica_id])
        reply = await self._engine_control.call(replica_id, request, target, b"")
        loads = reply.value.get("loads") if reply.ok and isinstance(reply.value, dict) else None
        if not (isinstance(loads, list) and loads and isinstance(loads[0], dict)):
            return web.json_response(own)
        held_count = own["loads"][0]["num_waiting_reqs"]
        _add(loads[0], held_count, "num_waiting_reqs", "num_total_reqs")
        _add(reply.value.get("aggregate"), held_count, "total_waiting_reqs", "total_reqs")
        return web.json_response(reply.value)

    def _url(self, request: web.Request, replica_id: str) -> str:
        return f"{request.scheme}://{request.host}/workers/{quote(replica_id, safe=':')}"

    def _described(self, request: web.Request, replica_id: str) -> dict[str, Any]:
        known = self._replicas.known[replica_id]
        return {
            "id": replica_id,
            "url": self._url(request, replica_id),
            "model_id": "unknown",
            "priority": 50,
            "cost": 1.0,
            "worker_type": "regular",
            "connection_mode": "http",
            "runtime_type": known.endpoint.backend.kind,
            "is_healthy": self._runtime.replicas.is_up(replica_id),
            "load": self._runtime.turns_count(replica_id),
        }


def _add(counts: object, more_count: int, *names: str) -> None:
    """Add to those of the counts that an engine reports."""
    for name in names if isinstance(counts, dict) else ():
        counted = counts.get(name)  # type: ignore[attr-defined]
        if isinstance(counted, int):
            counts[name] = counted + more_count  # type: ignore[index]
