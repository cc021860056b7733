"""Wires everything up and runs it: the proxy, its poller, its runtime and, without a backend, embedded engines."""

from __future__ import annotations

import asyncio
import signal
from collections.abc import AsyncIterator, Callable, Coroutine, Sequence
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from functools import partial
from math import inf
from typing import Any, Protocol

import structlog
from aiohttp import web

from thunderagent.backends import backend_of
from thunderagent.backends.discovery import Source
from thunderagent.backends.poller import Poller, PollerSettings
from thunderagent.config import ServeConfig
from thunderagent.errors import ConfigurationError
from thunderagent.programs.messages import ReplicaUp
from thunderagent.proxy.admin.cell import CellReport
from thunderagent.proxy.app import HISTORY, LOOP_LAG, OPEN_FILES, build_app
from thunderagent.proxy.control.engine_control import EngineControlSettings
from thunderagent.proxy.fleet.breaker import BreakerSettings
from thunderagent.proxy.fleet.client import ReplicaClient
from thunderagent.proxy.fleet.discovery import Discovery, DiscoverySettings
from thunderagent.proxy.fleet.judging import Judging
from thunderagent.proxy.fleet.observer import Observer, ask_plainly
from thunderagent.proxy.fleet.polls import Polls
from thunderagent.proxy.fleet.replicas import Replicas
from thunderagent.proxy.gate.admin_port import AdminPort
from thunderagent.proxy.gate.bearer import Tokens
from thunderagent.proxy.gate.keys.file import KeysFile
from thunderagent.proxy.reading.identity import IdentityRules
from thunderagent.proxy.watch.event_feed import KIND_OF
from thunderagent.runtime import Runtime
from thunderagent.runtime.learned_state import LearnedState
from thunderagent.runtime.signal_log import SignalLogWriter
from thunderagent.serving.building import (
    build_runtime,
    client_settings_of,
    engine_hold_s_of,
    fence_settings_of,
    judge_of,
    rollout_settings_of,
    tracing_of,
    turn_settings_of,
)
from thunderagent.serving.embedded import embedded_engines
from thunderagent.serving.listening import leave, listening
from thunderagent.serving.process import (
    calm_garbage_collector,
    collect_garbage,
    keep_freed_memory,
    raise_file_limit,
)
from thunderagent.serving.provisioning import build_provisioning
from thunderagent.serving.reloading import Reloader, hangup, take_over
from thunderagent.serving.replica_sources import KvFinder, followers_of, sources_of, static_of
from thunderagent.serving.sandboxes import build_manager
from thunderagent.serving.security import (
    ServerTls,
    backend_api_key,
    backend_ssl_context,
    build_keyring,
    check_security,
    guard_settings,
)

log = structlog.get_logger("thunderagent")

FIRST_POLLS_S = 1.0
"""Time for a first replica to be found up before it is said that none is."""

LOOK_S = 0.25
"""How often to look for what no event tells: a scheduler that leads, a link to one."""


class Announcer(Protocol):
    """Tells whoever started a process whether it serves."""

    def ready(self, url: str, what: str) -> None:
        """Say that turns are served at a URL; `what` is what serves them, with its policy."""

    def not_ready(self, url: str, what: str, why: str) -> None:
        """Say why no turn is served yet."""


class Readiness(Protocol):
    """What knows whether a turn would be served: a runtime, or a gateway's substitute for one."""

    @property
    def why_not_ready(self) -> str:
        """Return why not; empty if one would."""

    @property
    def observe(self) -> Callable[..., Callable[[], None]]:
        """Return the method that adds an observer of some kinds of events, and returns how to remove it."""


class Beside(Protocol):
    """What is served and run beside the proxy."""

    def routes(self) -> list[web.RouteDef]:
        """Return its routes."""

    async def run(self) -> None:
        """Run until cancelled."""

    def report(self) -> CellReport:
        """Return this scheduler's role in its cell."""


async def serve(
    config: ServeConfig, *, announcer: Announcer | None = None, load: Callable[[], ServeConfig] | None = None
) -> None:
    """Serve until SIGTERM or SIGINT, or until cancelled.

    `load` reloads the configuration, on SIGHUP.

    A shutdown goes: not ready, serve for the delay, grant nothing new, let turns in flight end up to the grace period,
    flush the event log, close. Raises `ConfigurationError` before anything was started, `OSError` if the address cannot
    be used.
    """
    check_one_process(config)
    raise_file_limit()
    keep_freed_memory()
    stop = asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stop.set)
    check_security(config)
    runtime, event_log = build_runtime(config)
    apps: list[web.Application] = []
    async with AsyncExitStack() as stack:
        if event_log is not None:
            stack.callback(event_log.close)
        if config.signal_log is not None:
            signal_log = SignalLogWriter(config.signal_log, KIND_OF.__getitem__, runtime.now_s)
            stack.callback(signal_log.close)
            runtime.pools.listen(signal_log.write)
        urls = config.backends
        if config.simulates_engines:
            urls = await stack.enter_async_context(embedded_engines(config))
        simulated = config.simulates_engines
        url = await stack.enter_async_context(
            proxy(config, runtime, urls, simulated=simulated, load=load, opened=apps.append)
        )
        calm_garbage_collector()
        async with background(partial(announce, announcer, runtime, url, f"policy {runtime.scheduler.policy.name}")):
            await stop.wait()
        log.info("shutting_down", leases_count=runtime.leases_count, grace_s=config.grace_s)
        await leave(apps[0], runtime, config.shutdown_delay_s)
        await runtime.close()


async def announce(announcer: Announcer | None, source: Readiness, url: str, what: str) -> None:
    """Say that a process is ready, once a turn would be served; before that why not, if it takes longer than usual."""
    if announcer is None:
        return
    came_up, loop, is_told = asyncio.Event(), asyncio.get_running_loop(), False
    begun_s = loop.time()
    forget = source.observe(lambda *_: came_up.set(), ReplicaUp)
    try:
        while why := source.why_not_ready:
            if not is_told and loop.time() - begun_s >= FIRST_POLLS_S:
                announcer.not_ready(url, what, why)
                is_told = True
            came_up.clear()
            with suppress(TimeoutError):
                async with asyncio.timeout(LOOK_S):
                    await came_up.wait()
        announcer.ready(url, what)
    finally:
        forget()


def check_one_process(config: ServeConfig) -> None:
    """Raise `ConfigurationError` for settings that one process, which schedules and carries, would ignore."""
    if config.store is not None:
        raise ConfigurationError(
            "store: `serve` cannot use a store; start `thunderagent scheduler` and `thunderagent gateway` instead"
        )
    if config.schedulers:
        raise ConfigurationError("schedulers: `serve` schedules by itself; start `thunderagent gateway` instead")


@asynccontextmanager
async def proxy(
    config: ServeConfig,
    runtime: Runtime,
    urls: tuple[str, ...],
    *,
    further_sources: Sequence[Source] = (),
    simulated: bool = False,
    load: Callable[[], ServeConfig] | None = None,
    beside: Callable[[Replicas, Poller, LearnedState | None], Beside] | None = None,
    opened: Callable[[web.Application], None] = lambda _: None,
) -> AsyncIterator[str]:
    """Run the proxy for the engines at `urls` and of every source, for the length of the block; yield its URL.

    `further_sources` are added to those of the configuration. `simulated` is mentioned in every answer and on the
    dashboard. `load` reloads the configuration; by default it stays, and only files that it names are read again.
    `beside` creates what else is to be served and run. `opened` is called with the application once it listens.
    """
    keyring, tls, ssl_context = build_keyring(config), ServerTls.of(config), backend_ssl_context(config)
    api_key = backend_api_key(config)
    replicas = Replicas(
        runtime,
        [],
        breaker_settings=BreakerSettings(config.breaker_failure_count, config.breaker_backoff_s),
        tags_programs=config.engine_tags,
        notice_timeout_s=config.notice_timeout_s,
        uses_plugins=config.engine_plugin,
        engine_hold_s=engine_hold_s_of(config),
    )
    authorization = f"Bearer {api_key}" if api_key else ""
    judging = Judging(runtime, replicas, frozen_limit_s=config.frozen_limit_s, authorization=authorization)
    poller = Poller(
        Polls(runtime, replicas, judging, capacity_override_tokens=config.capacity_tokens),
        PollerSettings(
            interval_s=config.poll_interval_s,
            deadline_s=config.poll_deadline_s,
            down_after_failures=config.down_after_failures,
            silence_limit_s=config.poll_silence_limit_s,
            authorization=authorization,
            ssl_context=ssl_context,
            max_bytes=config.max_poll_bytes,
        ),
    )
    runtime.served.ask_anew = poller.suspect_all
    keeps_state = config.state is not None or config.store is not None
    learned = LearnedState(config.state, runtime) if keeps_state else None
    kv_followers = followers_of(config, runtime)
    sources = (*sources_of(config), *further_sources)
    discovery = Discovery(
        runtime,
        replicas,
        partial(backend_of, config.backend_type),
        DiscoverySettings(ranks_count=config.data_parallel_ranks, drain_limit_s=config.drain_limit_s),
        sources,
    )
    tracing = tracing_of(config)
    client_settings = client_settings_of(config, keyring, tracing)
    identity = IdentityRules(
        config.program_headers,
        user_names_program=config.user_names_program,
        bucket_names_program=config.bucket_names_program,
        tokens=Tokens(runtime) if config.bearer_programs else None,
        infers_programs=config.infer_programs,
        # A log may be replayed under a policy that wants them.
        reads_prefixes=runtime.scheduler.policy.claim_rules.share_prefixes or config.event_log is not None,
        model_aliases=config.model_aliases,
    )
    sandboxes = build_manager(config, runtime)
    provisioning = build_provisioning(config, runtime, replicas, discovery)
    admin_port = AdminPort() if config.admin_port is not None else None
    keys_file = KeysFile(config.keys_file, keyring) if config.keys_file is not None else None
    reloader = Reloader(config, load or (lambda: config))
    async with AsyncExitStack() as stack:
        if learned is not None:
            stack.push_async_callback(learned.save)
        if tracing is not None:
            stack.push_async_callback(asyncio.to_thread, tracing.close)
            runtime.observe(tracing.observe)
        client = await stack.enter_async_context(ReplicaClient(client_settings))
        replicas.attach(client, poller, *kv_followers)
        for follower in kv_followers:
            if isinstance(follower, KvFinder):
                follower.ask = partial(ask_plainly, client, deadline_s=config.poll_deadline_s)
        discovery.replicas_wanted("static", static_of(urls))
        judge = judge_of(config, runtime, client)
        other = beside(replicas, poller, learned) if beside is not None else None
        app = build_app(
            runtime,
            client,
            replicas,
            poller,
            discovery,
            turn_settings=turn_settings_of(config, identity),
            guard_settings=guard_settings(config),
            keyring=keyring,
            keys_file=keys_file,
            reloads=reloader,
            access_log=config.access_log,
            tracing=tracing,
            sandboxes=sandboxes,
            engine_control_settings=EngineControlSettings(
                timeout_s=config.engine_control_timeout_s,
                weight_sync_limit_s=config.weight_sync_limit_s,
                lease_limit_s=config.lease_limit_s,
                lease_total_s=config.total_timeout_s or inf,
            ),
            admin_port=admin_port,
            provisioner=provisioning,
            judge=judge,
            rollouts=rollout_settings_of(config),
            fence=fence_settings_of(config),
            profiles=config.profiles,
            simulated=simulated,
            further_routes=other.routes() if other is not None else (),
            cell=other.report if other is not None else None,
        )
        loops: list[Callable[[], Coroutine[Any, Any, None]]] = [
            runtime.run,
            poller.run,
            discovery.run,
            app[HISTORY].run,
            app[LOOP_LAG].run,
            app[OPEN_FILES].run,
            partial(replicas.run, client),
            partial(judging.run, client),
            partial(collect_garbage, lambda: runtime.leases_count + runtime.held_count),
            provisioning.run,
        ]
        loops.extend(follower.run for follower in kv_followers)
        loops.extend(each.run for each in (other, learned, keys_file, judge, sandboxes) if each is not None)
        if config.observe_interval_s is not None:
            interval_s, deadline_s = config.observe_interval_s, config.poll_deadline_s
            loops.append(Observer(runtime, client, replicas, interval_s=interval_s, deadline_s=deadline_s).run)
        take_over(reloader, app, keyring, discovery, simulated=simulated)
        for reads in (tls, keys_file):
            if reads is not None:
                reloader.reads(reads.reload)
        with hangup() as asked:
            loops.append(partial(reloader.run, asked))
            async with background(*loops), listening(app, config, tls, admin_port) as url:
                opened(app)
                yield url


@asynccontextmanager
async def background(*loops: Callable[[], Coroutine[Any, Any, None]]) -> AsyncIterator[None]:
    """Run endless loops beside the block in one task group; a bug in one of them ends everything."""
    error_of_block: Exception | None = None
    async with asyncio.TaskGroup() as group:
        tasks = [group.create_task(run()) for run in loops]
        try:
            yield
        except Exception as error:  # raised below, where the group does not wrap it
            error_of_block = error
        finally:
            for task in tasks:
                task.cancel()
    if error_of_block is not None:
        raise error_of_block
