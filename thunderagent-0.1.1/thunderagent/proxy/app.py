"""The web application: all parts of the proxy put together."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterable
from functools import partial

from aiohttp import web
from prometheus_client import CollectorRegistry

from thunderagent.proxy.admin.admin import Admin
from thunderagent.proxy.admin.between_turns import BetweenTurns
from thunderagent.proxy.admin.cell import CellCollector, CellReport
from thunderagent.proxy.admin.configuration import ConfigurationHandlers, Reloads
from thunderagent.proxy.admin.dashboard import Dashboard
from thunderagent.proxy.admin.keys import KeyHandlers
from thunderagent.proxy.admin.live import Live
from thunderagent.proxy.admin.openapi import OpenApi
from thunderagent.proxy.admin.operations import Operations, Provisioner
from thunderagent.proxy.admin.profiles import Profiles
from thunderagent.proxy.admin.replica_routes import ReplicaHandlers, SourceCollector
from thunderagent.proxy.admin.rollouts import RolloutHandlers
from thunderagent.proxy.admin.sandboxes import SandboxCollector, Sandboxes, SandboxHandlers
from thunderagent.proxy.control.concurrency import ConcurrencySignal
from thunderagent.proxy.control.engine_control import EngineControl, EngineControlSettings
from thunderagent.proxy.control.facade import Facade
from thunderagent.proxy.control.leases import Leases
from thunderagent.proxy.control.weight_sync import WeightSync
from thunderagent.proxy.fleet.breaker import Breakers
from thunderagent.proxy.fleet.client import ReplicaClient
from thunderagent.proxy.fleet.discovery import Discovery
from thunderagent.proxy.fleet.made_answers import MadeAnswers
from thunderagent.proxy.fleet.replicas import Replicas, Watcher
from thunderagent.proxy.gate.access import CATCH_ALL
from thunderagent.proxy.gate.admin_port import AdminPort
from thunderagent.proxy.gate.guard import Guard, GuardSettings
from thunderagent.proxy.gate.held import HeldTurns
from thunderagent.proxy.gate.keys import Keyring
from thunderagent.proxy.gate.keys.file import KeysFile
from thunderagent.proxy.gate.keys.quotas import HEARD as QUOTAS_HEARD
from thunderagent.proxy.gate.keys.quotas import Quotas
from thunderagent.proxy.gate.login import Login, Logins
from thunderagent.proxy.gate.tenancy import Tenancy
from thunderagent.proxy.judge import Judge, JudgeCollector
from thunderagent.proxy.reading.dialects import TURN_DIALECTS
from thunderagent.proxy.routing import (
    ENGINES_HEADER,
    Around,
    Tracing,
    TurnHandlers,
    add_routes,
    by_engine_control,
    by_inner_path,
    front_of,
    own_parts_of,
)
from thunderagent.proxy.turns.exact_prefixes import MEMORY_RATIO, ExactPrefixes, PrefixCollector
from thunderagent.proxy.turns.fence import Fence, FenceSettings
from thunderagent.proxy.turns.flow import Turns, TurnSettings
from thunderagent.proxy.turns.models import Models
from thunderagent.proxy.turns.recording import Recording
from thunderagent.proxy.turns.side_calls import SideCalls
from thunderagent.proxy.watch.autoscaling import AutoscalingCollector
from thunderagent.proxy.watch.history import History
from thunderagent.proxy.watch.metrics import StateCollector
from thunderagent.proxy.watch.open_files import OpenFiles
from thunderagent.proxy.watch.rollouts import RolloutCollector, Rollouts, RolloutSettings
from thunderagent.proxy.watch.turn_metrics import LoopLag, TurnMetrics
from thunderagent.proxy.wire.aiohttp_request import STALL_LIMIT_S
from thunderagent.proxy.wire.front import Front
from thunderagent.proxy.wire.websockets import Websockets
from thunderagent.runtime import Runtime

MADE_ANSWERS_COUNT = 100_000
"""How many responses are remembered by their ids: about 20 MB."""


HISTORY = web.AppKey("history", History)
"""The application's history; its owner runs that beside it, and the next ones too."""
LOOP_LAG = web.AppKey("loop_lag", LoopLag)
OPEN_FILES = web.AppKey("open_files", OpenFiles)


GUARD = web.AppKey("guard", Guard)
HELD = web.AppKey("held", HeldTurns)
"""Its limits may be changed while it runs."""


FRONT = web.AppKey("front", Front)
"""The application's front for turns that do not come through aiohttp."""


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
    rollouts: RolloutSettings | None = None,
    fence: FenceSettings | None = None,
    profiles: bool = False,
    simulated: bool = False,
    further_routes: Iterable[web.RouteDef] = (),
    cell: Callable[[], CellReport] | None = None,
) -> web.Application:
    """Build the proxy. The caller owns its parts. `simulated` engines are mentioned in every answer.

    `cell` returns the cell report of a scheduler with gateways.
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
    recorded = _recorded(rollouts, runtime, registry)
    flow = Turns(
        runtime,
        client,
        replicas,
        watcher,
        metrics,
        turn_settings,
        tenancy,
        held,
        made,
        websockets,
        sandboxes,
        judge,
        partial(Recording, recorded, replicas, _prefixes(recorded, client, runtime, registry))
        if recorded is not None
        else None,
        Fence(fence, replicas, runtime, [runtime.abort_turns]) if fence is not None else None,
    )
    runtime.turn_aborters.append(flow.abort)
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
    leases = Leases(
        runtime,
        replicas,
        tenancy,
        held,
        limit_s=engine_control_settings.lease_limit_s,
        total_s=engine_control_settings.lease_total_s,
        aliases=aliases,
        keys_share=lambda: keyring.has_several_data_keys,
        wait_for_rate=guard.wait_for_rate,
    )
    app = web.Application(client_max_size=guard_settings.max_body_bytes)
    app[STALL_LIMIT_S] = guard_settings.client_stall_limit_s
    app[GUARD], app[HELD] = guard, held
    guard.attach(app)
    app[FRONT], app[LOOP_LAG] = (
        front_of(flow, guard, held, admin_port, replicas, tracing, simulated=simulated, access_log=access_log),
        LoopLag(registry),
    )
    app[OPEN_FILES] = OpenFiles(registry)
    app[HISTORY] = History(runtime, replicas, metrics.latency_counts)
    live = Live(runtime, replicas, app[HISTORY], sandboxes_on=sandboxes is not None, simulated=simulated, cell=cell)
    if simulated:
        app.on_response_prepare.append(_say_simulated)
    sandbox_handlers = SandboxHandlers(sandboxes, tenancy)
    app.on_shutdown.extend((leases.stop_waiting, live.close, sandbox_handlers.close, _closing(websockets)))
    app.on_cleanup.extend((_stopping(replicas.breakers), _closing(engine_control, weight_sync, leases, recorded)))
    routes = [
        *engine_control.routes(),
        *Facade(runtime, replicas, engine_control, turns.handle_on, side_calls.forward_to).routes(),
        *weight_sync.routes(),
        *ConcurrencySignal(runtime).routes(),
        *leases.routes(),
        *sandbox_handlers.routes(),
        *RolloutHandlers(recorded, tenancy).routes(),
        *Profiles(runtime, tenancy, is_on=profiles).routes(),
        *BetweenTurns(runtime, tenancy).routes(),
        *Admin(runtime, replicas, registry, tenancy, sandboxes, turn_settings.identity.tokens, cell).routes(),
        *ReplicaHandlers(runtime, replicas, discovery).routes(),
        *Operations(runtime, provisioner).routes(),
        *live.routes(),
        *Dashboard(lambda request: admin_port is None or admin_port.is_here(request.transport)).routes(),
        *Login(keyring, logins).routes(),
        *KeyHandlers(keyring, keys_file, quotas).routes(),
        *ConfigurationHandlers(reloads).routes(),
        *(web.post(path, turns.handle) for path in TURN_DIALECTS),
        web.get("/v1/models", models.handle),
    ]
    routes += OpenApi(routes).routes()
    routes += further_routes
    elsewhere = by_engine_control(engine_control, replicas, own_parts_of(routes))
    routes.append(web.route("*", CATCH_ALL, by_inner_path(turns, side_calls, models, elsewhere)))
    before: list[Around] = []
    if admin_port is not None:
        before.append(lambda handler, route: admin_port.before(handler, route.method, route.path, tenancy))
    add_routes(app, routes, guard, before=before, access_log=access_log, tracing=tracing)
    return app


def _quotas(runtime: Runtime, registry: CollectorRegistry, held: HeldTurns, *, hears: bool) -> Quotas:
    """Return the counter of what keys use; it hears of turns only if keys may have limits."""
    quotas = Quotas(registry, lambda program_id: runtime.tenant_of(program_id) is not None, held.max_turns_count)
    if hears:
        runtime.observe(quotas.heard, *QUOTAS_HEARD)
    return quotas


def _recorded(settings: RolloutSettings | None, runtime: Runtime, registry: CollectorRegistry) -> Rollouts | None:
    """Return what records turns, with its metrics; None if nothing is recorded."""
    if settings is None:
        return None
    recorded = Rollouts(settings, runtime)
    registry.register(RolloutCollector(recorded))
    return recorded


def _prefixes(
    recorded: Rollouts, client: ReplicaClient, runtime: Runtime, registry: CollectorRegistry
) -> ExactPrefixes | None:
    """Return what makes exact prompts, with its metrics; None if nothing does."""
    settings = recorded.settings
    if settings.prefix is None:
        return None
    prefixes = ExactPrefixes(client, runtime, settings.prefix, int(MEMORY_RATIO * settings.memory_bytes))
    registry.register(PrefixCollector(prefixes.counts))
    return prefixes


def _stopping(breakers: Breakers) -> Callable[[web.Application], Awaitable[None]]:
    async def close(_: web.Application) -> None:
        breakers.close()

    return close


def _closing(
    *owners: EngineControl | WeightSync | Leases | Websockets | Rollouts | None,
) -> Callable[[web.Application], Awaitable[None]]:
    """Return a hook that ends, when the application ends, what would otherwise go on."""

    async def close(_: web.Application) -> None:
        for owner in owners:
            if owner is not None:
                owner.close()

    return close
