"""Wire everything up and run it: the proxy, its poller, its runtime and, if there is no backend, embedded engines."""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import gc
import resource
import signal
import sys
from asyncio.subprocess import PIPE, Process
from collections.abc import AsyncIterator, Callable, Coroutine, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from functools import partial
from typing import TYPE_CHECKING, Any, Protocol, cast

import structlog
from aiohttp import web

from thunderagent.backends import backend_of
from thunderagent.backends.discovery import Source
from thunderagent.backends.poller import Poller, PollerSettings
from thunderagent.config import JUDGE_ON_REPLICAS, ServeConfig
from thunderagent.errors import ConfigurationError
from thunderagent.policy_loader import load_policy, parse_setting
from thunderagent.programs.model.settings import SchedulerSettings
from thunderagent.programs.scheduler import Scheduler
from thunderagent.provisioning import build_provisioning
from thunderagent.proxy.admin.cell import CellReport
from thunderagent.proxy.app import FRONT, HISTORY, LOOP_LAG, build_app
from thunderagent.proxy.control.engine_control import EngineControlSettings
from thunderagent.proxy.fleet.breaker import BreakerSettings
from thunderagent.proxy.fleet.client import ClientSettings, ReplicaClient
from thunderagent.proxy.fleet.discovery import Discovery, DiscoverySettings
from thunderagent.proxy.fleet.observer import Observer
from thunderagent.proxy.fleet.polls import Polls
from thunderagent.proxy.fleet.replicas import Replicas
from thunderagent.proxy.gate.admin_port import AdminPort
from thunderagent.proxy.gate.bearer import Tokens
from thunderagent.proxy.gate.keys import Keyring
from thunderagent.proxy.gate.keys.file import KeysFile
from thunderagent.proxy.gate.outgoing import Outgoing
from thunderagent.proxy.judge import Judge, JudgeSettings, ReplicaAsker, open_url, read_prompt
from thunderagent.proxy.reading.identity import IdentityRules
from thunderagent.proxy.turns.flow import TurnSettings
from thunderagent.proxy.turns.retry_budget import RetrySettings
from thunderagent.proxy.watch.event_feed import KIND_OF
from thunderagent.proxy.wire.aiohttp_server import Runner, Server
from thunderagent.proxy.wire.http11.heads import MAX_HEAD_BYTES
from thunderagent.reloading import Reloader, hangup, take_over
from thunderagent.replica_sources import followers_of, sources_of, static_of
from thunderagent.runtime import Runtime, RuntimeSettings
from thunderagent.runtime.event_log import EventLogWriter
from thunderagent.runtime.learned_state import LearnedState
from thunderagent.runtime.signal_log import SignalLogWriter
from thunderagent.sandboxes import build_manager
from thunderagent.security import (
    ServerTls,
    backend_api_key,
    backend_ssl_context,
    build_keyring,
    check_security,
    guard_settings,
    held_limits,
    is_loopback,
    judge_api_key,
)

if TYPE_CHECKING:
    from thunderagent.proxy.watch.tracing import Tracing

log = structlog.get_logger("thunderagent")

ENGINE_READY_S = 120.0
GARBAGE_PERIOD_S = 30.0
FULL_COLLECTION_AFTER_COUNT = 30
"""Of so many collections of garbage one is of all of it, as soon as no turn is in hand: after a quarter of an hour."""
FULL_COLLECTION_AT_LAST_COUNT = 2880
"""After a day it is, whatever is in hand."""
LOOKED_AT_COUNT = 3
"""Times that `YOUNG_COUNT` objects have stayed, which a collection looks at, at most: that takes 20 ms."""
LISTENER: web.AppKey[Runner] = web.AppKey("listener", Runner)
"""What listens for an application."""

CLOSE_S = 2.0
"""How long connections get to close after the grace period."""


class Beside(Protocol):
    """What is served and run beside the proxy."""

    def routes(self) -> list[web.RouteDef]:
        """Return its routes."""

    async def run(self) -> None:
        """Run until cancelled."""

    def report(self) -> CellReport:
        """Say which place this scheduler has among others."""


async def serve(
    config: ServeConfig,
    *,
    ready: Callable[[str, str], None] = lambda *_: None,
    load: Callable[[], ServeConfig] | None = None,
) -> None:
    """Serve until SIGTERM or SIGINT, or until cancelled.

    `ready` is called with the URL, and the policy's name with those of its parts, once it listens; `load` reads the
    configuration again, on SIGHUP.

    A shutdown goes: not ready, serve for the delay, grant nothing new, let turns in flight end up to the grace period,
    flush the event log, close. Raises `ConfigurationError` before anything was started, `OSError` if the address cannot
    be used.
    """
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
            runtime.listen(signal_log.write)
        urls = config.backends
        if config.simulates_engines:
            urls = await stack.enter_async_context(embedded_engines(config))
        simulated = config.simulates_engines
        url = await stack.enter_async_context(
            proxy(config, runtime, urls, simulated=simulated, load=load, opened=apps.append)
        )
        calm_garbage_collector()
        ready(url, runtime.scheduler.policy.name)
        await stop.wait()
        log.info("shutting_down", leases_count=runtime.leases_count, grace_s=config.grace_s)
        await leave(apps[0], runtime, config.shutdown_delay_s)
        await runtime.close()


def raise_file_limit() -> None:
    """Allow as many open files as the system lets us: each turn in flight takes two sockets."""
    soft_limit, hard_limit = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft_limit != hard_limit:
        with contextlib.suppress(ValueError, OSError):
            resource.setrlimit(resource.RLIMIT_NOFILE, (hard_limit, hard_limit))


def calm_garbage_collector() -> None:
    """Leave what was built at the start out of collections, and collect less often.

    A turn makes hundreds of short-lived objects and no cycles to speak of; with the default threshold of 700 the
    youngest generation alone took 2 % of the time, and a full collection with 10,000 programs stops streams for 50 ms.
    A stream has 90 objects while it is open: of what is old only `collect_garbage` takes the garbage out.
    """
    gc.collect()
    gc.freeze()
    gc.set_threshold(YOUNG_COUNT, NEVER_COUNT, NEVER_COUNT)


YOUNG_COUNT = 20_000
"""Objects that come and stay until the young ones are looked at: that takes 5 ms."""
NEVER_COUNT = 2**30


FREED_BYTES = 64 * 2**20
"""So much freed memory the process keeps at most, instead of taking it from the system again for the next body.

That and half of it, for a single piece, are what glibc itself goes up to, if large pieces are freed first. With less, a
body of 8 MB took each page anew, and blocked the event loop for 45 ms instead of 15.
"""

_TRIM_THRESHOLD, _MMAP_THRESHOLD = -1, -3
"""Of `mallopt`, as glibc's malloc.h numbers them."""


def keep_freed_memory() -> None:
    """Have the allocator keep a little of what was freed.

    Else a body of 400 KB took memory from the system and gave it back with each turn: half of what it cost to carry.
    Larger pieces than half of that go back at once. Other allocators than glibc's are left alone.
    """
    with contextlib.suppress(OSError, AttributeError):
        mallopt = ctypes.CDLL(None).mallopt
        mallopt(_TRIM_THRESHOLD, FREED_BYTES)
        mallopt(_MMAP_THRESHOLD, FREED_BYTES // 2)


async def collect_garbage(turns_count: Callable[[], int]) -> None:
    """Take out the garbage now and then: with so high a threshold nothing else does, and memory would grow.

    A look at all that 5,000 streams hold took a quarter of a second, in which no event went out; at 100,000 programs
    0.4 s. **So what has become too much to look at is taken for lasting** (`gc.freeze`), until no turn is in hand. It
    is freed all the same once nothing refers to it, and turns and programs leave no garbage in circles.
    """
    waited_count = 0
    while True:
        await asyncio.sleep(GARBAGE_PERIOD_S)
        waited_count += 1
        if waited_count >= (FULL_COLLECTION_AT_LAST_COUNT if turns_count() else FULL_COLLECTION_AFTER_COUNT):
            waited_count = 0
            gc.unfreeze()
            gc.collect()
            gc.freeze()
        elif gc.get_count()[1] > LOOKED_AT_COUNT:
            gc.freeze()
        else:
            gc.collect(1)


def policy_settings_of(config: ServeConfig) -> dict[str, Any]:
    """Return what the policy is told, its parts with it."""
    settings = {name: parse_setting(text) for name, text in config.policy_args.items()}
    parts = {"admission": config.admission, "order": config.order, "victims": config.victims}
    parts |= {"priority": config.priority, "global_policy": config.global_policy}
    return {**settings, **{kind: name for kind, name in parts.items() if name}}


def build_runtime(config: ServeConfig) -> tuple[Runtime, EventLogWriter | None]:
    """Make the scheduler with its policy, and what runs it."""
    policy_settings = policy_settings_of(config)
    settings = SchedulerSettings(
        idle_limit_s=config.idle_limit_s,
        forget_limit_s=config.forget_limit_s,
        no_replica_limit_s=config.no_replica_limit_s,
        patience_margin_s=config.patience_margin_s,
        patience_ratio=config.patience_ratio,
        patience_overdraft_ratio=config.patience_overdraft_ratio,
        max_programs_count=config.max_programs_count,
        tenant_max_programs_count=config.tenant_max_programs_count,
        fair_tenants=config.fair_tenants or bool(config.tenant_weights),
        tenant_weight_ratios=config.tenant_weights,
        judge_fail_count=config.judge_fail_count,
        judge_confidence_ratio=config.judge_confidence_ratio,
        judge_ends_hopeless=config.judge_ends_hopeless,
        provisions_replicas=bool(config.provision),
    )

    def make_scheduler() -> Scheduler:
        return Scheduler(load_policy(config.policy, policy_settings), settings)

    policy = load_policy(config.policy, policy_settings)
    if getattr(getattr(policy, "base", policy), "holds_nobody", False):
        for kind in ("order", "victims"):
            if kind in policy_settings:
                log.warning(
                    "part_without_effect", part=f"{kind} {policy_settings[kind]}", why=f"{config.policy} holds nobody"
                )
    scheduler = Scheduler(policy, settings)
    event_log = None
    if config.event_log is not None:
        event_log = EventLogWriter(
            config.event_log, policy=config.policy, policy_settings=policy_settings, settings=settings
        )
    runtime = Runtime(
        scheduler,
        RuntimeSettings(tick_s=config.tick_s, grace_s=config.grace_s),
        event_log=event_log,
        make_scheduler=make_scheduler if config.model_pools else None,
    )
    return runtime, event_log


def client_settings_of(config: ServeConfig, keyring: Keyring, tracing: Tracing | None = None) -> ClientSettings:
    """Return how engines are called. Raises `ConfigurationError`."""
    ssl_context, api_key = backend_ssl_context(config), backend_api_key(config)
    return ClientSettings(
        connect_timeout_s=config.connect_timeout_s,
        first_byte_timeout_s=config.first_byte_timeout_s,
        silence_timeout_s=config.silence_timeout_s,
        total_timeout_s=config.total_timeout_s,
        stall_limit_s=config.client_stall_limit_s,
        outgoing=Outgoing(keyring, api_key, tracing, forwards_authorization=not config.bearer_programs),
        ssl_context=ssl_context,
    )


def turn_settings_of(config: ServeConfig, identity: IdentityRules) -> TurnSettings:
    """Return how turns are forwarded."""
    return TurnSettings(
        retries=RetrySettings(config.retries_count, config.retry_budget_ratio),
        identity=identity,
        patience_s=config.patience_s,
        client_patience=config.client_patience,
        heartbeat_s=config.heartbeat_s,
        tenant_from_key=config.keys_name_tenants,
        client_priority=config.client_priority,
        held=held_limits(config),
        websocket_limit_s=config.websocket_limit_s,
        names_programs=bool(config.kv_events),
    )


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
    """Run the proxy in front of the engines at `urls` and of every source for the length of the block; yield its URL.

    `further_sources` come beside those of the configuration. `simulated` has every answer and the dashboard say so.
    `load` reads the configuration again; by default it stays, and only files that it names are read again. `beside`
    makes what else is to be served and run. `opened` is given the application once it listens.
    """
    keyring, tls, ssl_context = build_keyring(config), ServerTls.of(config), backend_ssl_context(config)
    api_key = backend_api_key(config)
    replicas = Replicas(
        runtime,
        [],
        breaker_settings=BreakerSettings(config.breaker_failure_count, config.breaker_backoff_s),
        tags_programs=config.engine_tags,
        notice_timeout_s=config.notice_timeout_s,
    )
    poller = Poller(
        Polls(runtime, replicas, capacity_override_tokens=config.capacity_tokens),
        PollerSettings(
            interval_s=config.poll_interval_s,
            deadline_s=config.poll_deadline_s,
            down_after_failures=config.down_after_failures,
            silence_limit_s=config.poll_silence_limit_s,
            authorization=f"Bearer {api_key}" if api_key else "",
            ssl_context=ssl_context,
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
    tracing = _tracing(config)
    client_settings = client_settings_of(config, keyring, tracing)
    identity = IdentityRules(
        config.program_headers,
        user_names_program=config.user_names_program,
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
        discovery.replicas_wanted("static", static_of(urls))
        judge = _judge(config, runtime, client)
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
            ),
            admin_port=admin_port,
            provisioner=provisioning,
            judge=judge,
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
            partial(replicas.run, client),
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


def _judge(config: ServeConfig, runtime: Runtime, client: ReplicaClient) -> Judge | None:
    """Return who asks a judge about programs, if that is configured. Raises `ConfigurationError`."""
    if not config.judge_url:
        return None
    settings = JudgeSettings(
        model=config.judge_model,
        prompt=read_prompt(config.judge_prompt),
        every_turns_count=config.judge_every_turns,
        asked_count=config.judge_asked_count,
        rate_per_s=config.judge_rate_per_s,
        max_prompt_tokens=config.judge_max_prompt_tokens,
        max_output_tokens=config.judge_max_tokens,
        timeout_s=config.judge_timeout_s,
    )
    if config.judge_url == JUDGE_ON_REPLICAS:
        asker = ReplicaAsker(runtime, client)
        return Judge(runtime, lambda: contextlib.nullcontext(asker), settings)
    return Judge(runtime, partial(open_url, config.judge_url, judge_api_key(config)), settings)


def _tracing(config: ServeConfig) -> Tracing | None:
    """Return what makes spans, if that is configured. Raises `ConfigurationError`."""
    if not config.otlp_endpoint:
        return None
    try:
        from thunderagent.proxy.watch.tracing import open_tracing  # noqa: PLC0415 - needs an extra
    except ImportError as error:
        raise ConfigurationError("otlp_endpoint: needs the extra otel: pip install 'thunderagent[otel]'") from error
    return open_tracing(config.otlp_endpoint, config.trace_sample_ratio)


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


@asynccontextmanager
async def listening(
    app: web.Application,
    config: ServeConfig,
    tls: ServerTls | None,
    admin_port: AdminPort | None = None,
    *,
    shares_port: bool = False,
) -> AsyncIterator[str]:
    """Listen for the length of the block, on a port that other processes may share; yield the URL."""
    runner = Runner(
        app,
        handler_cancellation=True,
        auto_decompress=False,
        max_line_size=MAX_HEAD_BYTES,
        max_field_size=MAX_HEAD_BYTES,
        shutdown_timeout=CLOSE_S,
        stall_s=config.client_stall_limit_s,
        handler_of=app[FRONT].handler_of,
        keepalive_timeout=config.idle_timeout_s,  # aiohttp's word; it counts from a connection's first moment
    )
    app[LISTENER] = runner
    await runner.setup()
    try:
        site = web.TCPSite(
            runner,
            config.host,
            config.port,
            backlog=4096,
            ssl_context=tls.context if tls is not None else None,
            reuse_port=shares_port or None,
        )
        await site.start()
        if admin_port is not None:
            await web.TCPSite(
                runner, config.host, config.admin_port or 0, ssl_context=tls.context if tls is not None else None
            ).start()
            admin_port.port = runner.addresses[1][1]
            log.info("admin_port", port=admin_port.port)
        if not config.has_keys and not is_loopback(config.host):
            log.warning("open_to_the_network", host=config.host, effect="whoever reaches this port may use the proxy")
        host, port = runner.addresses[0][:2]
        yield f"{'http' if tls is None else 'https'}://{f'[{host}]' if ':' in host else host}:{port}"
    finally:
        await runner.cleanup()


class Leaving(Protocol):
    """Who says whether this process is ready."""

    leaving: bool
    """Whether others should get the turns that come."""


async def leave(app: web.Application, runtime: Leaving, delay_s: float) -> None:
    """Have clients turn elsewhere: be not ready, serve for `delay_s`, then close what is idle.

    Each answer says that it is its connection's last.

    Without that a client goes on with its connection, and what has taken this process out of a load balancer's list has
    no effect on it: its next turn would be refused. New connections are taken all the time, if only to be refused.
    """
    runtime.leaving = True
    server = cast("Server", app[LISTENER].server)
    server.leave()
    await asyncio.sleep(delay_s)
    server.close_idle()


async def leave_port(app: web.Application) -> None:
    """Take no further connection, and close those that are idle; answers that are due go on."""
    runner = app[LISTENER]
    for site in list(runner.sites):
        await site.stop()
    if runner.server is not None:
        runner.server.pre_shutdown()


@asynccontextmanager
async def embedded_engines(config: ServeConfig) -> AsyncIterator[tuple[str, ...]]:
    """Run simulated engines, each a process of its own, for the length of the block; yield their URLs."""
    log.warning(
        "engines_are_simulated",
        engines_count=config.embedded_engines,
        kv_tokens=config.embedded_kv_tokens,
        effect="answers are made-up words; give --backends URL,URL to serve real engines",
    )
    async with AsyncExitStack() as stack:
        processes = [await stack.enter_async_context(_embedded_engine(config)) for _ in range(config.embedded_engines)]
        yield tuple(await asyncio.gather(*(_url_when_ready(process) for process in processes)))


@asynccontextmanager
async def _embedded_engine(config: ServeConfig) -> AsyncIterator[Process]:
    """Run one engine; it ends with its standard input, so that it cannot outlive this process."""
    options = ("--port", "0", "--kv-tokens", str(config.embedded_kv_tokens), "--end-with-stdin")
    process = await asyncio.create_subprocess_exec(
        sys.executable,
        *("-m", "thunderagent.simulator.embedded.server", *options),
        stdin=PIPE,
        stdout=PIPE,
        start_new_session=True,  # a Ctrl-C in the terminal is the proxy's: its engines outlast the grace period
    )
    try:
        yield process
    finally:
        with contextlib.suppress(ProcessLookupError):
            process.terminate()
        try:
            async with asyncio.timeout(CLOSE_S + 2):
                await process.wait()
        except TimeoutError:
            process.kill()
            await process.wait()


async def _url_when_ready(process: Process) -> str:
    assert process.stdout is not None
    try:
        async with asyncio.timeout(ENGINE_READY_S):
            line = (await process.stdout.readline()).decode()
    except TimeoutError:
        raise ConfigurationError(f"an embedded engine did not start within {ENGINE_READY_S:g} s") from None
    words = [word.rstrip(":") for word in line.split() if word.startswith("http://")]
    if not words:
        raise ConfigurationError(f"an embedded engine did not start: {line.strip() or 'it ended without a word'}")
    return words[0]
