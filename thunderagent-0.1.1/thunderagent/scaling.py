"""Wires up what several processes share: a scheduler, and a gateway."""

from __future__ import annotations

import asyncio
import secrets
import signal
import socket
import sys
from collections.abc import AsyncIterator, Callable, Coroutine, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from functools import partial
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import structlog
from aiohttp import web

from thunderagent.backends import BACKENDS, backend_of
from thunderagent.backends.poller import Poller, ReplicaEndpoint
from thunderagent.config import ServeConfig
from thunderagent.errors import ConfigurationError
from thunderagent.proxy.app import LOOP_LAG, OPEN_FILES
from thunderagent.proxy.fleet.breaker import BreakerSettings
from thunderagent.proxy.fleet.client import ReplicaClient
from thunderagent.proxy.fleet.replicas import Replicas
from thunderagent.proxy.gate.keys import KEY_HEADER
from thunderagent.proxy.reading.identity import IdentityRules
from thunderagent.runtime import Runtime
from thunderagent.runtime.learned_state import LearnedState
from thunderagent.scale.gateway.app import build_gateway_app
from thunderagent.scale.gateway.carried import CarriedTurns
from thunderagent.scale.gateway.dialling import Dialling
from thunderagent.scale.gateway.polling import SharedPolls
from thunderagent.scale.gateway.remote import RemoteRuntime, RemoteSettings
from thunderagent.scale.leader.candidacy import Candidacy
from thunderagent.scale.leader.leading import Leading
from thunderagent.scale.leader.store import Store
from thunderagent.scale.leader.writing import Writing
from thunderagent.scale.messages import RemoteReplica
from thunderagent.scale.scheduler.links import Links
from thunderagent.serving.building import (
    build_runtime,
    client_settings_of,
    engine_hold_s_of,
    policy_of,
    turn_settings_of,
)
from thunderagent.serving.embedded import embedded_engines
from thunderagent.serving.listening import leave, leave_port, listening
from thunderagent.serving.process import calm_garbage_collector, collect_garbage, keep_freed_memory, raise_file_limit
from thunderagent.serving.security import (
    ServerTls,
    backend_api_key,
    backend_ssl_context,
    build_keyring,
    check_security,
    guard_settings,
)
from thunderagent.serving.serving import Announcer, announce, background, proxy

log = structlog.get_logger("thunderagent")

NOT_WITH_GATEWAYS = (
    "admin_port",
    "bearer_programs",
    "fence",
    "infer_programs",
    "judge_url",
    "keys_file",
    "otlp_endpoint",
    "rollouts",
    "sandboxes",
)
"""Settings that need the carrier of bytes and the scheduler in one process."""

OWN_NAMESPACE = Path("/var/run/secrets/kubernetes.io/serviceaccount/namespace")
"""Where a pod finds the name of its namespace."""

LEASE_ANSWER_S = 1.0
"""An API server that takes longer to answer for a Lease counts as not answering."""


def check_gateways(config: ServeConfig, *, in_one_command: bool = False) -> None:
    """Raise `ConfigurationError` for settings that do not work with gateways, or not with those of the same command."""
    if in_one_command and config.store is not None:
        raise ConfigurationError(
            "store: `serve --gateways` cannot use a store; start `thunderagent scheduler` and `thunderagent gateway` "
            "instead"
        )
    if in_one_command and config.schedulers:
        raise ConfigurationError("schedulers: `serve --gateways` has its own; start `thunderagent gateway` instead")
    given = [name for name in NOT_WITH_GATEWAYS if getattr(config, name)]
    if given:
        raise ConfigurationError(f"{', '.join(given)} {'goes' if len(given) == 1 else 'go'} with no gateways yet")
    if config.has_keys and config.keys_name_tenants:
        raise ConfigurationError("tenant_from_key: not supported with gateways yet; set it to false")


async def serve_scheduler(
    config: ServeConfig, *, announcer: Announcer | None = None, ends_with_stdin: bool = False
) -> None:
    """Schedule for gateways, and serve as `serve` does, until SIGTERM or SIGINT, or the end of standard input.

    Raises as `serve` does.

    With a store it stands by until it can lead, and again after another one took over.
    """
    check_gateways(config)
    stop = begin_process()
    if ends_with_stdin:
        await _end_with_stdin(stop)
    led_in = 0
    while not stop.is_set():
        async with scheduler(config, led_in) as (url, runtime, leading):
            config = config.model_copy(update={"port": urlsplit(url).port})
            async with background(
                partial(announce, announcer, runtime, url, f"policy {runtime.scheduler.policy.name}")
            ):
                await _first_of(stop, leading.over if leading is not None else stop)
            log.info("shutting_down" if stop.is_set() else "stands_by_again")
            if leading is not None:
                await leading.give_up()
                led_in = leading.epoch


async def _first_of(*events: asyncio.Event) -> None:
    """Wait until one of some events is set."""
    waits = [asyncio.create_task(each.wait()) for each in events]
    try:
        await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
    finally:
        for each in waits:
            each.cancel()


def _store_of(config: ServeConfig) -> Store | None:
    """Return the store that schedulers share. Raises `ConfigurationError`."""
    if config.store is None:
        return None
    try:
        from thunderagent.scale.leader.redis_store import RedisStore  # noqa: PLC0415 - needs an extra
    except ImportError as error:
        raise ConfigurationError("store: install thunderagent with the extra `scale`") from error
    try:
        store = RedisStore(config.store.get_secret_value(), config.cell, config.lock_s)
    except ValueError:
        # a password may be in its words
        raise ConfigurationError("store: is not a URL that the Redis client accepts") from None
    return store if config.elector == "redis" else _led_by_a_lease(store, config)


def _led_by_a_lease(store: Store, config: ServeConfig) -> Store:
    """Return a store whose lock is a Lease of Kubernetes. Raises `ConfigurationError`."""
    from thunderagent.backends.discovery.kubernetes import ClusterAccess  # noqa: PLC0415 - needs an extra
    from thunderagent.scale.leader.kubernetes_store import KubernetesStore  # noqa: PLC0415 - as above

    namespace, _, name = config.lease.rpartition("/")
    if not namespace:
        namespace = OWN_NAMESPACE.read_text().strip() if OWN_NAMESPACE.exists() else "default"
    name = name or f"thunderagent-{config.cell.lower().replace('_', '-')}"
    access = ClusterAccess(config.kubernetes_config, config.kubernetes_url, LEASE_ANSWER_S)
    return KubernetesStore(store, access, namespace, name, config.lock_s)


@asynccontextmanager
async def scheduler(config: ServeConfig, led_in: int = 0) -> AsyncIterator[tuple[str, Runtime, Leading | None]]:
    """Run a scheduler; yield its URL, its runtime, and its leader role, if there may be several.

    `led_in` is the last epoch in which this process led.
    """
    check_security(config)
    store = _store_of(config)
    runtime, event_log = build_runtime(config)
    runtime.stands_by = store is not None
    links: list[Links] = []
    leading: Leading | None = None

    def beside(replicas: Replicas, poller: Poller, learned: LearnedState | None) -> Links | Leading:
        nonlocal leading

        def writing() -> Writing | None:
            return leading.writing if leading is not None else None

        links.append(Links(runtime, replicas, poller, gateway_lost_s=config.gateway_lost_s, log_of=writing))
        links[0].share_polls(poller)
        if store is None:
            return links[0]
        assert learned is not None, "what is learned is kept where there is a store"
        url = config.reached_at or _own_url(config)
        leading = Leading(store, runtime, links[0], learned, Candidacy(config.lock_s, led_in), url=url)
        return leading

    async with AsyncExitStack() as stack:
        if event_log is not None:
            stack.callback(event_log.close)
        if store is not None:
            stack.push_async_callback(store.close)
        urls = config.backends
        if config.simulates_engines:
            urls = await stack.enter_async_context(embedded_engines(config))
        url = await stack.enter_async_context(
            proxy(config, runtime, urls, simulated=config.simulates_engines, beside=beside)
        )
        calm_garbage_collector()
        yield url, runtime, leading
        await links[0].close()
        await runtime.close(waits=False)


def _own_url(config: ServeConfig) -> str:
    """Return where this process listens, for its peers; empty if they could not reach it."""
    if config.host in ("0.0.0.0", "::") or not config.port:  # noqa: S104 - it is asked about
        return ""
    return f"http://{f'[{config.host}]' if ':' in config.host else config.host}:{config.port}"


async def serve_gateway(config: ServeConfig, *, announcer: Announcer | None, ends_with_stdin: bool) -> None:
    """Carry turns for the scheduler at one of `schedulers` until SIGTERM or SIGINT, or the end of standard input."""
    check_gateways(config)
    if not config.schedulers:
        raise ConfigurationError("schedulers: a gateway needs the base URL of its scheduler")
    stop = begin_process()
    signal.signal(signal.SIGHUP, signal.SIG_IGN)  # the default would end it; a gateway reloads nothing
    async with gateway(config) as (url, runtime, dialling, app):
        calm_garbage_collector()
        if ends_with_stdin:
            await _end_with_stdin(stop)
        async with background(partial(announce, announcer, runtime, url, f"gateway {runtime.turns.gateway_id}")):
            await stop.wait()
        log.info("shutting_down", leases_count=runtime.leases_count, grace_s=config.grace_s)
        await leave(app, runtime, config.shutdown_delay_s if runtime.turns.is_led else 0)
        if ends_with_stdin:  # its parent may be gone, and another one about to listen in its place
            await leave_port(app)
        await runtime.close()
        await dialling.last_words()


@asynccontextmanager
async def gateway(config: ServeConfig) -> AsyncIterator[tuple[str, RemoteRuntime, Dialling, web.Application]]:
    """Run a gateway for the length of the block; yield its URL, and its parts."""
    keyring, tls = build_keyring(config), ServerTls.of(config)
    boot_id = secrets.randbits(53)
    runtime = RemoteRuntime(
        CarriedTurns(f"{socket.gethostname()}-{boot_id:x}", boot_id),
        RemoteSettings(config.scheduler_patience_s, config.fail_open_turns_count, config.grace_s),
    )
    key = config.scheduler_key.get_secret_value() if config.scheduler_key is not None else ""
    headers = {KEY_HEADER: key} if key else {}
    ssl_context = backend_ssl_context(config)
    dialling = Dialling(runtime, config.schedulers, headers=headers, ssl_context=ssl_context)
    replicas = Replicas(
        runtime,
        [],
        breaker_settings=BreakerSettings(config.breaker_failure_count, config.breaker_backoff_s),
        tags_programs=config.engine_tags,
        notice_timeout_s=config.notice_timeout_s,
        uses_plugins=config.engine_plugin,
        engine_hold_s=engine_hold_s_of(config),
    )
    policy = policy_of(config)
    identity = IdentityRules(
        config.program_headers,
        user_names_program=config.user_names_program,
        bucket_names_program=config.bucket_names_program,
        infers_buckets=False,
        reads_prefixes=policy.claim_rules.share_prefixes or config.event_log is not None,
        model_aliases=config.model_aliases,
    )
    async with ReplicaClient(client_settings_of(config, keyring)) as client, asyncio.TaskGroup() as group:
        replicas.attach(client)
        runtime.fleet.on_replicas = _Fleet(replicas, group).take
        api_key = backend_api_key(config)
        polls = SharedPolls(
            runtime.say, group, authorization=f"Bearer {api_key}" if api_key else "", ssl_context=ssl_context
        )
        runtime.on_polls, runtime.turns.polls = polls.take, True
        runtime.polls_count = lambda: polls.count
        app = build_gateway_app(
            runtime,
            client,
            replicas,
            lambda: dialling.url,
            turn_settings=turn_settings_of(config, identity),
            guard_settings=guard_settings(config),
            keyring=keyring,
            access_log=config.access_log,
            ssl_context=ssl_context,
        )
        loops: list[Callable[[], Coroutine[Any, Any, None]]] = [
            dialling.run,
            app[LOOP_LAG].run,
            app[OPEN_FILES].run,
            partial(replicas.run, client),
            partial(collect_garbage, lambda: runtime.leases_count + runtime.held_count),
        ]
        try:
            async with background(*loops), listening(app, config, tls, shares_port=True) as url:
                yield url, runtime, dialling, app
        finally:
            polls.close()


LEAVE_LOOK_S = 0.2
"""How often to check whether a replica that leaves has still requests."""


class _Fleet:
    """Keeps a gateway's replicas in line with its scheduler's reports."""

    def __init__(self, replicas: Replicas, group: asyncio.TaskGroup) -> None:
        self._replicas = replicas
        self._group = group
        self._going_ids: set[str] = set()
        """Replicas that are to be forgotten, unless they come back first."""

    def take(self, changed: Sequence[RemoteReplica], removed_ids: Sequence[str], unnamed_ids: Sequence[str]) -> None:
        """Add, remove, and start over with replicas that came up."""
        for each in changed:
            state = each.state
            self._going_ids.discard(state.replica_id)
            kind = each.kind if each.kind in BACKENDS else "auto"  # its scheduler is newer
            endpoint = ReplicaEndpoint(state.replica_id, state.url, backend_of(kind), each.rank_id)
            known = self._replicas.known.get(state.replica_id)
            if known is None:
                known = self._replicas.add(endpoint)
            elif known.endpoint != endpoint or known.endpoint.backend.kind != kind:
                known.endpoint = endpoint
            if state.is_up and not known.is_up:
                self._replicas.came_up(state.replica_id)
            known.is_up, known.why_down = state.is_up, "" if state.is_up else "its scheduler says so"
        self._going_ids.update(removed_ids, unnamed_ids)
        for replica_id in removed_ids:
            if (gone := self._replicas.known.get(replica_id)) is not None:
                gone.is_up = False  # what comes back is another engine
            self._group.create_task(self._remove(replica_id))
        for replica_id in unnamed_ids:
            self._group.create_task(self._leave(replica_id))

    async def _remove(self, replica_id: str) -> None:
        """Forget a replica, unless it came back, for example with another model."""
        if replica_id in self._going_ids:
            self._going_ids.discard(replica_id)
            await self._replicas.remove(replica_id)

    async def _leave(self, replica_id: str) -> None:
        """Forget a replica that a new scheduler does not name, or not yet, once nothing is in flight there."""
        while replica_id in self._going_ids and self._replicas.in_flight_count(replica_id):  # noqa: ASYNC110 - rare
            await asyncio.sleep(LEAVE_LOOK_S)
        await self._remove(replica_id)


async def _end_with_stdin(stop: asyncio.Event) -> None:
    await asyncio.get_running_loop().connect_read_pipe(partial(_Ends, stop), sys.stdin)


class _Ends(asyncio.Protocol):
    """Sets an event at the end of a pipe."""

    def __init__(self, stop: asyncio.Event) -> None:
        self._stop = stop

    def connection_lost(self, exc: Exception | None) -> None:  # noqa: ARG002 - the protocol's signature
        self._stop.set()


def begin_process() -> asyncio.Event:
    """Prepare a serving process; return the event that a signal sets."""
    raise_file_limit()
    keep_freed_memory()
    stop, loop = asyncio.Event(), asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stop.set)
    return stop
