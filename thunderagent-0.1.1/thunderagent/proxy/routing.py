"""From a request to its handler: through the guard, and by its path in any spelling."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterable
from contextlib import AbstractContextManager
from typing import Protocol
from urllib.parse import unquote

from aiohttp import hdrs, web
from multidict import CIMultiDict, CIMultiDictProxy

from thunderagent.errors import (
    MethodNotAllowedError,
    NotFoundError,
    RequestError,
    ThunderAgentError,
    UpgradeRefusedError,
)
from thunderagent.proxy.control.engine_control import EngineControl
from thunderagent.proxy.control.facade import is_of_one_replica, turn_on
from thunderagent.proxy.fleet.commands import command_of
from thunderagent.proxy.fleet.replicas import Replicas
from thunderagent.proxy.gate.access import WEBSOCKETS, Use, base_url_hint, is_turn, use_of
from thunderagent.proxy.gate.admin_port import AdminPort
from thunderagent.proxy.gate.guard import Guard, Handler, says_nothing_yet
from thunderagent.proxy.gate.held import HeldTurns, KeptBody
from thunderagent.proxy.reading.dialects import TURN_DIALECTS
from thunderagent.proxy.reading.target import Target
from thunderagent.proxy.turns.flow import Turns
from thunderagent.proxy.turns.models import MODELS, Models
from thunderagent.proxy.turns.side_calls import SideCalls
from thunderagent.proxy.watch.access_log import logged, logged_turn
from thunderagent.proxy.wire.aiohttp_errors import answering_errors
from thunderagent.proxy.wire.aiohttp_exchange import AiohttpExchange
from thunderagent.proxy.wire.aiohttp_request import target_of, told_path
from thunderagent.proxy.wire.exchange import Exchange
from thunderagent.proxy.wire.front import Front, Trace, Way
from thunderagent.proxy.wire.http11.heads import RequestHead
from thunderagent.proxy.wire.http11.server import Asked

ENGINES_HEADER = "X-ThunderAgent-Engines"
"""Set on every answer of a proxy with simulated engines."""

Around = Callable[[Handler, web.RouteDef], Handler]

Elsewhere = Callable[[web.Request, Target, Use], Awaitable[web.StreamResponse | None]]
"""Answers requests that are neither turns nor the engine's own; None for those."""


class Tracing(Protocol):
    """Makes spans of requests."""

    def request(self, headers: CIMultiDictProxy[str], path: str) -> AbstractContextManager[Trace]:
        """Attribute a turn in the block to this request."""

    def around(self, handler: Handler) -> Handler:
        """Wrap the handler of a route."""


def add_routes(
    app: web.Application,
    routes: Iterable[web.RouteDef],
    guard: Guard,
    *,
    before: Iterable[Around] = (),
    access_log: bool,
    tracing: Tracing | None = None,
) -> None:
    """Register routes behind the guard, wrapped by `before`."""
    for route in routes:
        handler = route.handler
        for each in before:
            handler = each(handler, route)
        handler = answering_errors(guard.before(handler, route.method, route.path))
        if access_log:
            handler = logged(handler)
        if tracing is not None:
            handler = tracing.around(handler)
        if route.method == "GET":
            app.router.add_get(route.path, handler, expect_handler=says_nothing_yet)  # allows HEAD too
        else:
            app.router.add_route(route.method, route.path, handler, expect_handler=says_nothing_yet)


class TurnHandlers:
    """Handles aiohttp requests on the endpoints of turns."""

    def __init__(self, turns: Turns) -> None:
        """Answer them by `turns`."""
        self._turns = turns

    async def handle(self, request: web.Request) -> web.StreamResponse:
        """Answer one turn. A body that is not a JSON object is forwarded unchanged, so the engine reports the error."""
        return await self._answer(request, target_of(request).plainly())

    async def handle_other(self, request: web.Request) -> web.StreamResponse:
        """Answer a POST on an unknown API: it may generate, so it is an anonymous turn."""
        return await self._answer(request, target_of(request))

    async def handle_on(self, request: web.Request, replica_id: str, target: Target) -> web.StreamResponse:
        """Answer one turn on the replica that its client chose: anonymous, whatever program it names."""
        return await self._answer(request, target, replica_id)

    async def _answer(self, request: web.Request, target: Target, chosen_id: str | None = None) -> web.StreamResponse:
        exchange = await AiohttpExchange.of(request, target)
        await self._turns.answer(exchange, chosen_id)
        return exchange.response


def front_of(
    flow: Turns,
    guard: Guard,
    held: HeldTurns,
    admin_port: AdminPort | None,
    replicas: Replicas,
    tracing: Tracing | None,
    *,
    simulated: bool,
    access_log: bool,
) -> Front:
    """Return what answers the turns that our own server reads."""

    def decorate(asked: Asked, headers: CIMultiDict[str]) -> None:
        if simulated:
            headers[ENGINES_HEADER] = "simulated"
        if guard.origins:
            guard.origins.mark(asked, headers)

    def way_of(head: RequestHead, target: Target) -> Way | None:
        if head.upgrades:
            wants_one = head.headers["Upgrade"].lower() == "websocket"
            may_be_told = target.spelt in WEBSOCKETS or is_turn(target, "POST")
            return Way(target.plainly()) if wants_one and may_be_told else None
        if is_turn(target, "POST"):
            return Way(target.plainly(), stays=True)
        if not is_of_one_replica(target):
            return Way(target, stays=True, is_ours=False)
        found = turn_on(target, "POST", replicas)
        return Way(found[1], found[0], is_operators=True) if found is not None else None

    def let_in_by_port(asked: Asked, for_admin: bool) -> Awaitable[KeptBody | None] | None:
        if for_admin and admin_port is not None:
            admin_port.check(asked.transport, unquote(asked.target.path))
        return guard.let_in(asked, for_admin)

    async def converse(exchange: Exchange, chosen_id: str | None) -> None:
        if exchange.target.spelt not in WEBSOCKETS:
            raise UpgradeRefusedError("no websocket is passed on this path: send the turn as a POST")
        with held.websocket():
            await flow.answer(exchange, chosen_id)

    adds = simulated or guard.origins
    let_in = guard.let_in if admin_port is None else let_in_by_port
    around = logged_turn if access_log else None
    return Front(way_of, let_in, flow.answer, converse, decorate if adds else None, tracing, around)


def by_inner_path(turns: TurnHandlers, side_calls: SideCalls, models: Models, elsewhere: Elsewhere) -> Handler:
    """Return the handler of paths that name a program, and of the engine's own paths, in any spelling."""

    async def handle(request: web.Request) -> web.StreamResponse:
        target = target_of(request)
        if target.climbs:
            raise RequestError("the path of a request must not contain . or .. segments, not even escaped ones")
        use = use_of(target, request.method)
        if use is Use.TURN:
            return await turns.handle(request)
        if (hint := base_url_hint(target)) is not None:
            raise NotFoundError(f"there is no {told_path(request)}: {hint}")
        if request.method == "GET" and target.spelt == "/v1/models":
            return await models.handle(request)
        if request.method in ("GET", "HEAD") and target.words[:2] == MODELS and target.words[2:]:
            return await models.retrieve(request)
        answer = await elsewhere(request, target, use)
        if answer is not None:
            return answer
        return await (turns.handle_other(request) if use is Use.GENERATE else side_calls.handle(request))

    return handle


def by_engine_control(engine_control: EngineControl, replicas: Replicas, own_parts: frozenset[str]) -> Elsewhere:
    """Send control calls to replicas: under a program's path, to that program's. Refuses paths of ours alone."""

    async def answer(request: web.Request, target: Target, use: Use) -> web.StreamResponse | None:  # noqa: ARG001 - its kind
        if (command := command_of(target.spelt)) is not None:
            if target.program_id is None:
                return await engine_control.broadcast(request)
            return await engine_control.tell_one(
                request, target.plainly(), replicas.serving(target.program_id), command
            )
        if target.program_id is None and target.words[:1] and target.words[0] in own_parts | {"p"}:
            raise await _no_route(request)
        return None

    return answer


def own_parts_of(routes: Iterable[web.RouteDef]) -> frozenset[str]:
    """Return the first parts of the proxy's own paths: anything else under them does not exist."""
    first_parts = {route.path.split("/")[1] for route in routes if route.path not in TURN_DIALECTS}
    return frozenset(first_parts - {"v1", ""} | {"internal"})  # a scheduler's, also where there is none


async def _no_route(request: web.Request) -> ThunderAgentError:
    """Return the error for a path without a route; if it has routes with other methods, name these."""
    methods: set[str] = set()
    for resource in request.app.router.resources():
        methods |= (await resource.resolve(request))[1]
    methods.discard(hdrs.METH_ANY)  # CATCH_ALL has that
    if not methods:
        path = told_path(request)
        hint = "; a turn of a program goes to /p/PROGRAM/v1/..." if path.startswith("/p/") else ""
        return NotFoundError(f"there is no {path}{hint}")
    allowed = ", ".join(sorted(methods))
    error = MethodNotAllowedError(f"{told_path(request)} takes {allowed}, not {request.method}")
    error.answer_headers = {"Allow": allowed}
    return error
