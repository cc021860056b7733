"""The web application of a gateway: it serves turns and side calls; the scheduler answers everything else."""

from __future__ import annotations

import asyncio
import re
from collections.abc import AsyncIterator, Callable, Iterator
from dataclasses import replace
from ssl import SSLContext
from typing import Literal

import aiohttp
from aiohttp import web
from prometheus_client import CollectorRegistry
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric

from thunderagent.compilation import build_kind
from thunderagent.errors import SchedulerUnreachableError
from thunderagent.proxy.admin.admin import EXPOSITION_TYPE, HealthReport, NotReadyReport, ReadyReport
from thunderagent.proxy.app import FRONT, LOOP_LAG, MADE_ANSWERS_COUNT, OPEN_FILES
from thunderagent.proxy.fleet.client import ReplicaClient
from thunderagent.proxy.fleet.commands import command_of
from thunderagent.proxy.fleet.made_answers import MadeAnswers
from thunderagent.proxy.fleet.replicas import Replicas
from thunderagent.proxy.gate.access import CATCH_ALL, ENGINE, ROUTES, SCHEDULER_METRICS_PATH, Use
from thunderagent.proxy.gate.bodies import report_response
from thunderagent.proxy.gate.browsers import SAFE_METHODS
from thunderagent.proxy.gate.guard import Guard, GuardSettings
from thunderagent.proxy.gate.held import HeldTurns
from thunderagent.proxy.gate.keys import Keyring
from thunderagent.proxy.gate.login import Logins
from thunderagent.proxy.gate.tenancy import Tenancy
from thunderagent.proxy.reading.dialects import TURN_DIALECTS
from thunderagent.proxy.reading.target import Target
from thunderagent.proxy.routing import TurnHandlers, add_routes, by_inner_path, front_of
from thunderagent.proxy.turns.flow import Turns, TurnSettings
from thunderagent.proxy.turns.models import Models
from thunderagent.proxy.turns.side_calls import SideCalls
from thunderagent.proxy.watch.metrics import carried, exposition
from thunderagent.proxy.watch.open_files import OpenFiles
from thunderagent.proxy.watch.turn_metrics import LoopLag, TurnMetrics
from thunderagent.proxy.wire.aiohttp_request import STALL_LIMIT_S, target_of
from thunderagent.proxy.wire.headers import forwarded_request_headers, relayed_response_headers
from thunderagent.proxy.wire.websockets import Websockets
from thunderagent.scale import messages
from thunderagent.scale.gateway.remote import RemoteRuntime

ASKED_HERE = frozenset({"/health", "/ready", "/metrics", SCHEDULER_METRICS_PATH, messages.PATH})
"""Paths that a gateway answers itself, forwards under another name, or rejects."""

METRICS = Target.parse("/metrics")

ANSWER_LIMIT_S = 60.0
"""Limit for the head of a scheduler's answer to a GET. Commands may take longer, and so may a lease."""


def build_gateway_app(
    runtime: RemoteRuntime,
    client: ReplicaClient,
    replicas: Replicas,
    scheduler_url: Callable[[], str],
    *,
    turn_settings: TurnSettings,
    guard_settings: GuardSettings,
    keyring: Keyring,
    access_log: bool,
    ssl_context: SSLContext | None,
) -> web.Application:
    """Build a gateway; `scheduler_url` returns its scheduler's URL, `ssl_context` the certificates to trust there."""
    registry = CollectorRegistry()
    metrics = TurnMetrics(registry)
    websockets = Websockets(turn_settings.websocket_limit_s)
    replicas.on_removed.extend((metrics.replica_removed, websockets.replica_removed))
    held = HeldTurns(turn_settings.held, registry)
    tenancy = Tenancy(runtime, from_key=False, client_priority=turn_settings.client_priority)
    made = MadeAnswers(MADE_ANSWERS_COUNT)
    told = replace(turn_settings, tells_attempts=True)
    flow = Turns(runtime, client, replicas, runtime, metrics, told, tenancy, held, made, websockets)
    runtime.on_revoke = flow.revoke
    turns = TurnHandlers(flow)
    retries_count, identity = turn_settings.retries.retries_count, turn_settings.identity
    side_calls = SideCalls(
        client, replicas, runtime, made, retries_count=retries_count, identity=identity, tenancy=tenancy
    )
    models = Models(runtime.replicas, client, replicas, identity.model_aliases)
    registry.register(GatewayCollector(runtime))
    scheduler = Scheduler(scheduler_url, ssl_context)
    guard = Guard(
        guard_settings,
        keyring,
        registry,
        Logins(),
        held,
        forwards=lambda handler: handler in (scheduler.forward, scheduler.metrics),
    )
    app = web.Application(client_max_size=guard_settings.max_body_bytes)
    app[STALL_LIMIT_S] = guard_settings.client_stall_limit_s
    guard.attach(app)
    app[FRONT] = front_of(flow, guard, held, None, replicas, None, simulated=False, access_log=access_log)
    app[LOOP_LAG], app[OPEN_FILES] = LoopLag(registry), OpenFiles(registry)
    app.cleanup_ctx.append(scheduler.context)

    async def close(_: web.Application) -> None:
        websockets.close()
        replicas.breakers.close()

    async def elsewhere(request: web.Request, target: Target, use: Use) -> web.StreamResponse | None:
        is_told = command_of(target.spelt) is not None or use is Use.ENGINE_CONTROL
        return await scheduler.forward(request) if is_told else None

    app.on_shutdown.append(close)
    routes = [
        *GatewayHandlers(runtime, registry).routes(),
        web.get(SCHEDULER_METRICS_PATH, scheduler.metrics),
        *(web.route(method, path, scheduler.forward) for method, path in _of_scheduler()),
        *(web.post(path, turns.handle) for path in TURN_DIALECTS),
        web.get("/v1/models", models.handle),
        web.route("*", CATCH_ALL, by_inner_path(turns, side_calls, models, elsewhere)),
    ]
    add_routes(app, routes, guard, access_log=access_log)
    return app


class Scheduler:
    """Forwards to the scheduler what a gateway does not answer."""

    def __init__(
        self, url: Callable[[], str], ssl_context: SSLContext | None = None, *, answer_limit_s: float = ANSWER_LIMIT_S
    ) -> None:
        """Forward to `url()`, trusting `ssl_context`; None trusts the system's certificates."""
        self._url = url
        self._ssl_context = ssl_context
        self._answer_limit_s = answer_limit_s
        self._http: aiohttp.ClientSession | None = None

    async def context(self, _: web.Application) -> AsyncIterator[None]:
        """Provide a client for as long as the application runs."""
        async with aiohttp.ClientSession(auto_decompress=False, cookie_jar=aiohttp.DummyCookieJar()) as self._http:
            yield

    async def forward(self, request: web.Request) -> web.StreamResponse:
        """Relay a request and its answer, with the caller's own key. Raises `SchedulerUnreachableError`."""
        return await self._relay(request, target_of(request))

    async def metrics(self, request: web.Request) -> web.StreamResponse:
        """Relay the scheduler's own metrics, otherwise as `forward`."""
        return await self._relay(request, METRICS)

    async def _relay(self, request: web.Request, target: Target) -> web.StreamResponse:
        assert self._http is not None, "the application runs"
        headers, body = forwarded_request_headers(request.headers), await request.read()
        for judged in ("Origin", "Sec-Fetch-Site"):  # our guard checked it, by the name that the browser knows: ours
            headers.popall(judged, None)
        asks = request.method in SAFE_METHODS and command_of(target.spelt) is None
        timeout = aiohttp.ClientTimeout(total=None, sock_connect=5.0, sock_read=None)
        asking = self._http.request(
            request.method,
            self._url().rstrip("/") + target.path + target.query,
            headers=headers,
            data=body or None,
            timeout=timeout,
            allow_redirects=False,
            ssl=self._ssl_context or True,
        )
        try:
            async with asyncio.timeout(self._answer_limit_s if asks else None) as limit, asking as answer:
                limit.reschedule(None)
                kept = relayed_response_headers(answer.headers)
                response = web.StreamResponse(status=answer.status, reason=answer.reason, headers=kept)
                await response.prepare(request)
                async for chunk in answer.content.iter_any():
                    await response.write(chunk)
                await response.write_eof()
                return response
        except aiohttp.ClientConnectionError as error:
            raise SchedulerUnreachableError(f"the scheduler cannot be asked: {error}") from error
        except TimeoutError as error:
            raise SchedulerUnreachableError(f"the scheduler did not answer in {self._answer_limit_s:g} s") from error


class GatewayHandlers:
    """A gateway's reports on itself."""

    def __init__(self, runtime: RemoteRuntime, registry: CollectorRegistry) -> None:
        """Report on `runtime`, and on `registry`."""
        self._runtime = runtime
        self._registry = registry

    def routes(self) -> list[web.RouteDef]:
        """Return the routes."""
        return [web.get("/health", self.health), web.get("/ready", self.ready), web.get("/metrics", self.metrics)]

    async def health(self, request: web.Request) -> web.Response:  # noqa: ARG002 - a handler's signature
        """Say that the process answers."""
        epoch = self._runtime.turns.epoch
        build: Literal["compiled", "interpreted"] = "compiled" if build_kind() == "compiled" else "interpreted"
        return report_response(HealthReport(status="ok", build=build, role="gateway", epoch=epoch))

    async def ready(self, request: web.Request) -> web.Response:  # noqa: ARG002 - a handler's signature
        """Say whether a turn would be served: 200, or 503 with the reason."""
        if why := self._runtime.why_not_ready:
            return report_response(NotReadyReport(ready=False, why=why), status=503)
        return report_response(ReadyReport(ready=True, replicas_up_count=len(self._runtime.replicas.open_ids)))

    async def metrics(self, request: web.Request) -> web.Response:  # noqa: ARG002 - a handler's signature
        """Return the Prometheus exposition."""
        return web.Response(body=exposition(self._registry), headers={"Content-Type": EXPOSITION_TYPE})


class GatewayCollector:
    """Gauges and counters of what a gateway carried, computed on each scrape."""

    def __init__(self, runtime: RemoteRuntime) -> None:
        """Report on it."""
        self._runtime = runtime

    def collect(self) -> Iterator[Metric]:
        """Yield every family."""
        runtime, turns = self._runtime, self._runtime.turns
        yield from carried(runtime, ("finished", "refused", "failed", "errored", "abandoned", "rejected"))
        yield GaugeMetricFamily(
            "thunderagent_gateway_led", "1 while there is a link to a leading scheduler: alert at 0.", int(turns.is_led)
        )
        yield GaugeMetricFamily(
            "thunderagent_gateway_epoch", "Highest epoch seen; each new scheduler raises it.", turns.epoch
        )
        yield GaugeMetricFamily("thunderagent_gateway_polls", "Engines that this gateway polls.", runtime.polls_count())
        yield CounterMetricFamily(
            "thunderagent_gateway_links", "Links to schedulers that were opened.", turns.link_number
        )
        yield CounterMetricFamily(
            "thunderagent_gateway_stale_frames", "Frames of past epochs, which were ignored.", turns.stale_frames_count
        )
        yield GaugeMetricFamily(
            "thunderagent_gateway_turns_told",
            "Turns held, running, or ended and not yet acknowledged.",
            len(turns.rows),
        )
        yield CounterMetricFamily(
            "thunderagent_gateway_unheard_turns",
            "Ended turns that no scheduler will hear of: over 100,000 while there was none.",
            turns.unheard_count,
        )
        yield CounterMetricFamily(
            "thunderagent_fail_open_turns",
            "Turns that ran without a scheduler's lease: alert on any.",
            runtime.alone.granted_count,
        )


def _of_scheduler() -> list[tuple[str, str]]:
    """Return method and path of all requests for the scheduler."""
    found: list[tuple[str, str]] = []
    for access, methods, pattern, _ in ROUTES:
        if access is not ENGINE and pattern not in ASKED_HERE:
            path = re.sub(r"\{\}", "{part:.+}", pattern, count=1).replace("{}", "{more:.+}")
            paths = [path] if not path.endswith("**") else [path[:-2], path[:-2].rstrip("/") + "/{tail:.*}"]
            found.extend((method, each) for method in methods.split() for each in paths if each)
    return found
