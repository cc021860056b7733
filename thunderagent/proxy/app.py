"""The web application: which path goes where, and how an error looks."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterable
from contextlib import AbstractContextManager
from typing import Protocol
from urllib.parse import unquote

import structlog
from aiohttp import hdrs, web
from multidict import CIMultiDict, CIMultiDictProxy
from prometheus_client import CollectorRegistry

from thunderagent.errors import (
    MethodNotAllowedError,
    NotFoundError,
    RequestError,
    ThunderAgentError,
)
from thunderagent.proxy.admin.admin import Admin
from thunderagent.proxy.admin.between_turns import BetweenTurns
from thunderagent.proxy.admin.cell import CellCollector, CellReport
from thunderagent.proxy.admin.configuration import ConfigurationHandlers, Reloads
from thunderagent.proxy.admin.dashboard import Dashboard
from thunderagent.proxy.admin.keys import KeyHandlers
from thunderagent.proxy.admin.live import Live
from thunderagent.proxy.admin.openapi import OpenApi
from thunderagent.proxy.admin.operations import Operations, Provisioner
from thunderagent.proxy.admin.replica_routes import ReplicaHandlers, SourceCollector
from thunderagent.proxy.admin.sandboxes import SandboxCollector, Sandboxes, SandboxHandlers
from thunderagent.proxy.control.concurrency import ConcurrencySignal
from thunderagent.proxy.control.engine_control import EngineControl, EngineControlSettings
from thunderagent.proxy.control.facade import Facade, is_of_one_replica, turn_on
from thunderagent.proxy.control.leases import Leases
from thunderagent.proxy.control.weight_sync import WeightSync
from thunderagent.proxy.fleet.breaker import Breakers
from thunderagent.proxy.fleet.client import ReplicaClient
from thunderagent.proxy.fleet.commands import command_of
from thunderagent.proxy.fleet.discovery import Discovery
from thunderagent.proxy.fleet.made_answers import MadeAnswers
from thunderagent.proxy.fleet.replicas import Replicas, Watcher
from thunderagent.proxy.gate.access import CATCH_ALL, WEBSOCKETS, Use, use_of
from thunderagent.proxy.gate.admin_port import AdminPort
from thunderagent.proxy.gate.guard import Guard, GuardSettings, Handler, says_nothing_yet
from thunderagent.proxy.gate.held import HeldTurns, KeptBody
from thunderagent.proxy.gate.keys import Keyring
from thunderagent.proxy.gate.keys.file import KeysFile
from thunderagent.proxy.gate.keys.quotas import HEARD as QUOTAS_HEARD
from thunderagent.proxy.gate.keys.quotas import Quotas
from thunderagent.proxy.gate.login import Login, Logins
from thunderagent.proxy.gate.tenancy import Tenancy
from thunderagent.proxy.judge import Judge, JudgeCollector
from thunderagent.proxy.reading.dialects import TURN_DIALECTS
from thunderagent.proxy.reading.target import Target
from thunderagent.proxy.turns.flow import Turns, TurnSettings
from thunderagent.proxy.turns.models import Models
from thunderagent.proxy.turns.side_calls import SideCalls
from thunderagent.proxy.watch.access_log import logged, logged_turn
from thunderagent.proxy.watch.autoscaling import AutoscalingCollector
from thunderagent.proxy.watch.history import History
from thunderagent.proxy.watch.metrics import StateCollector
from thunderagent.proxy.watch.turn_metrics import LoopLag, TurnMetrics
from thunderagent.proxy.wire.aiohttp_errors import answering_errors
from thunderagent.proxy.wire.aiohttp_exchange import AiohttpExchange
from thunderagent.proxy.wire.aiohttp_request import STALL_LIMIT_S, target_of, told_path
from thunderagent.proxy.wire.exchange import Exchange
from thunderagent.proxy.wire.front import Front, Trace, Way
from thunderagent.proxy.wire.http11.asked import Asked
from thunderagent.proxy.wire.http11.heads import RequestHead
from thunderagent.proxy.wire.websockets import Websockets
from thunderagent.runtime import Runtime

log = structlog.get_logger("thunderagent.proxy")


MADE_ANSWERS_COUNT = 100_000
"""So many responses are remembered by their ids: about 20 MB."""

ENGINES_HEADER = "X-ThunderAgent-Engines"
"""In every answer of a proxy whose engines are simulated."""

HISTORY = web.AppKey("history", History)
"""Where the application keeps its history; whoever runs it runs that beside it, and so the next."""
LOOP_LAG = web.AppKey("loop_lag", LoopLag)


GUARD = web.AppKey("guard", Guard)
HELD = web.AppKey("held", HeldTurns)
"""Whose limits may be set anew while it runs."""


FRONT = web.AppKey("front", Front)
"""Where the application keeps what answers turns that do not come by aiohttp."""


class Tracing(Protocol):
    """What makes spans of requests."""

    def request(self, headers: CIMultiDictProxy[str], path: str) -> AbstractContextManager[Trace]:
        """Have a turn that is asked for in the block be known as this request's."""

    def around(self, handler: Handler) -> Handler:
        """Wrap the handler of a route."""


async def _say_simulated(request: web.Request, response: web.StreamResponse) -> None:  # noqa: ARG001 - a signal's signature
    response.headers[ENGINES_HEADER] = "simulated"


def build_app(
    runtime: Runtime,
    client: ReplicaClient,
    replicas: Replicas,
    watcher: Watcher,
    discovery: Discovery,
    *,
    turn_settings: TurnSettings,
    guard_settings: GuardSettings,
    engine_control_settings: EngineControlSettings,
    keyring: Keyring | None = None,
    keys_file: KeysFile | None = None,
    reloads: Reloads | None = None,
    access_log: bool = False,
    tracing: Tracing | None = None,
    sandboxes: Sandboxes | None = None,
    admin_port: AdminPort | None = None,
    provisioner: Provisioner | None = None,
    judge: Judge | None = None,
    simulated: bool = False,
    further_routes: Iterable[web.RouteDef] = (),
    cell: Callable[[], CellReport] | None = None,
) -> web.Application:
    """Put the proxy together. The caller owns what it is made of. `simulated` engines are told of in every answer.

    `cell` tells the place of a scheduler that has gateways.
    """
    registry = CollectorRegistry()
    metrics = TurnMetrics(registry)
    websockets = Websockets(turn_settings.websocket_limit_s)
    replicas.on_removed.extend((metrics.replica_removed, websockets.replica_removed))
    held = HeldTurns(turn_settings.held, registry)
    quotas = _quotas(runtime, registry, held, hears=keys_file is not None)
    tenancy = Tenancy(
        runtime,
        from_key=turn_settings.tenant_from_key,
        quotas=quotas if keys_file is not None else None,
        client_priority=turn_settings.client_priority,
    )
    made = MadeAnswers(MADE_ANSWERS_COUNT)
    flow = Turns(
        runtime, client, replicas, watcher, metrics, turn_settings, tenancy, held, made, websockets, sandboxes, judge
    )
    turns = TurnHandlers(flow)
    side_calls = SideCalls(
        client,
        replicas,
        watcher,
        made,
        retries_count=turn_settings.retries.retries_count,
        identity=turn_settings.identity,
        tenancy=tenancy,
    )
    aliases = turn_settings.identity.model_aliases
    models = Models(runtime.replicas, client, replicas, aliases)
    for collector in (StateCollector(runtime, replicas), AutoscalingCollector(runtime), SourceCollector(discovery)):
        registry.register(collector)
    if cell is not None:
        registry.register(CellCollector(cell))
    if judge is not None:
        registry.register(JudgeCollector(judge))
    if sandboxes is not None:
        registry.register(SandboxCollector(sandboxes, registry))
    keyring, logins = keyring or Keyring(), Logins()
    guard = Guard(guard_settings, keyring, registry, logins, held, quotas)
    engine_control = EngineControl(runtime, client, replicas, engine_control_settings)
    weight_sync = WeightSync(runtime, replicas, limit_s=engine_control_settings.weight_sync_limit_s)
    leases = Leases(runtime, replicas, tenancy, held, limit_s=engine_control_settings.lease_limit_s, aliases=aliases)
    app = web.Application(client_max_size=guard_settings.max_body_bytes)
    app[STALL_LIMIT_S] = guard_settings.client_stall_limit_s
    app[GUARD], app[HELD] = guard, held
    guard.attach(app)
    app[FRONT], app[LOOP_LAG] = (
        front_of(flow, guard, held, admin_port, replicas, tracing, simulated=simulated, access_log=access_log),
        LoopLag(registry),
    )
    app[HISTORY] = History(runtime, replicas, metrics.hold_counts)
    live = Live(runtime, replicas, app[HISTORY], sandboxes_on=sandboxes is not None, simulated=simulated, cell=cell)
    if simulated:
        app.on_response_prepare.append(_say_simulated)
    app.on_shutdown.extend((live.close, _closing(websockets)))
    app.on_cleanup.extend((_stopping(replicas.breakers), _closing(weight_sync, leases)))
    routes = [
        *engine_control.routes(),
        *Facade(runtime, replicas, engine_control, turns.handle_on, side_calls.forward_to).routes(),
        *weight_sync.routes(),
        *ConcurrencySignal(runtime).routes(),
        *leases.routes(),
        *SandboxHandlers(sandboxes, tenancy).routes(),
        *BetweenTurns(runtime, tenancy).routes(),
        *Admin(runtime, replicas, registry, tenancy, sandboxes, turn_settings.identity.tokens, cell).routes(),
        *ReplicaHandlers(runtime, replicas, discovery).routes(),
        *Operations(runtime, provisioner).routes(),
        *live.routes(),
        *Dashboard().routes(),
        *Login(keyring, logins).routes(),
        *KeyHandlers(keyring, keys_file, quotas).routes(),
        *ConfigurationHandlers(reloads).routes(),
        *(web.post(path, turns.handle) for path in TURN_DIALECTS),
        web.get("/v1/models", models.handle),
    ]
    routes += OpenApi(routes).routes()
    routes += further_routes
    elsewhere = _by_engine_control(engine_control, replicas, _own_parts(routes))
    routes.append(web.route("*", CATCH_ALL, by_inner_path(turns, side_calls, models, elsewhere)))
    before: list[Around] = []
    if admin_port is not None:
        before.append(lambda handler, route: admin_port.before(handler, route.method, route.path, tenancy))
    add_routes(app, routes, guard, before=before, access_log=access_log, tracing=tracing)
    return app


Around = Callable[[Handler, web.RouteDef], Handler]


def add_routes(
    app: web.Application,
    routes: Iterable[web.RouteDef],
    guard: Guard,
    *,
    before: Iterable[Around] = (),
    access_log: bool,
    tracing: Tracing | None = None,
) -> None:
    """Register routes behind the guard, which lets through to what is `before` them."""
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
    """aiohttp's requests on the endpoints on which a request is a turn."""

    def __init__(self, turns: Turns) -> None:
        """Have `turns` answer them."""
        self._turns = turns

    async def handle(self, request: web.Request) -> web.StreamResponse:
        """Answer one turn. A body that is not a JSON object goes to an engine as it is, for its own words on it."""
        return await self._answer(request, target_of(request).plainly())

    async def handle_other(self, request: web.Request) -> web.StreamResponse:
        """Answer a POST on an API that we do not speak: it may generate, so it is a turn of nobody."""
        return await self._answer(request, target_of(request))

    async def handle_on(self, request: web.Request, replica_id: str, target: Target) -> web.StreamResponse:
        """Answer one turn on the replica that its client chose: nobody's, whoever's it says it is."""
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
            return Way(target.plainly()) if wants_one and target.spelt in WEBSOCKETS else None
        if use_of(target, "POST") is Use.TURN:
            return Way(target.plainly(), stays=True)
        if is_of_one_replica(target) and (found := turn_on(target, "POST", replicas)) is not None:
            return Way(found[1], found[0], is_operators=True)
        return None

    def let_in(asked: Asked, way: Way) -> Awaitable[KeptBody | None] | None:
        if way.is_operators and admin_port is not None:
            admin_port.check(asked.transport, unquote(way.target.path))
        return guard.let_in(asked, for_admin=way.is_operators)

    async def converse(exchange: Exchange, chosen_id: str | None) -> None:
        with held.websocket():
            await flow.answer(exchange, chosen_id)

    adds = simulated or guard.origins
    around = logged_turn if access_log else None
    return Front(way_of, let_in, flow.answer, converse, decorate if adds else None, tracing, around)


def _quotas(runtime: Runtime, registry: CollectorRegistry, held: HeldTurns, *, hears: bool) -> Quotas:
    """Return what counts what keys use; it hears of turns only where keys may have limits."""
    quotas = Quotas(registry, lambda program_id: runtime.tenant_of(program_id) is not None, held.max_turns_count)
    if hears:
        runtime.observe(quotas.heard, *QUOTAS_HEARD)
    return quotas


def _stopping(breakers: Breakers) -> Callable[[web.Application], Awaitable[None]]:
    async def close(_: web.Application) -> None:
        breakers.close()

    return close


def _own_parts(routes: Iterable[web.RouteDef]) -> frozenset[str]:
    """Return the first parts of the paths that are the proxy's own: what else is under them is nobody's."""
    first_parts = {route.path.split("/")[1] for route in routes if route.path not in TURN_DIALECTS}
    return frozenset(first_parts - {"v1"})


def _closing(*owners: WeightSync | Leases | Websockets) -> Callable[[web.Application], Awaitable[None]]:
    """Return what has the owners of what would go on end it when the application ends."""

    async def close(_: web.Application) -> None:
        for owner in owners:
            owner.close()

    return close


Elsewhere = Callable[[web.Request, Target, Use], Awaitable[web.StreamResponse | None]]
"""Answers what is neither a turn nor the engine's own affair; None for what is one of these."""


def by_inner_path(turns: TurnHandlers, side_calls: SideCalls, models: Models, elsewhere: Elsewhere) -> Handler:
    """Return the handler of paths that name a program, and of the engine's own paths, however they are spelt."""

    async def handle(request: web.Request) -> web.StreamResponse:
        target = target_of(request)
        if target.climbs:
            raise RequestError("the path of a request must not contain . or .. segments, not even escaped ones")
        use = use_of(target, request.method)
        if use is Use.TURN:
            return await turns.handle(request)
        if request.method == "GET" and target.spelt == "/v1/models":
            return await models.handle(request)
        answer = await elsewhere(request, target, use)
        if answer is not None:
            return answer
        return await (turns.handle_other(request) if use is Use.GENERATE else side_calls.handle(request))

    return handle


def _by_engine_control(engine_control: EngineControl, replicas: Replicas, own_parts: frozenset[str]) -> Elsewhere:
    """Tell replicas what a control call says: under a program's path that program's. Refuses paths of ours alone."""

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


async def _no_route(request: web.Request) -> ThunderAgentError:
    """Return the error for a path under which no route of ours is; of one with other methods, with these."""
    methods: set[str] = set()
    for resource in request.app.router.resources():
        methods |= (await resource.resolve(request))[1]
    methods.discard(hdrs.METH_ANY)  # that is CATCH_ALL
    if not methods:
        path = told_path(request)
        hint = "; a turn of a program goes to /p/PROGRAM/v1/..." if path.startswith("/p/") else ""
        return NotFoundError(f"there is no {path}{hint}")
    allowed = ", ".join(sorted(methods))
    error = MethodNotAllowedError(f"{told_path(request)} takes {allowed}, not {request.method}")
    error.answer_headers = {"Allow": allowed}
    return error
