"""`thunderagent picker`: a gateway, or a whole `serve`, whose turns an Envoy carries."""

from __future__ import annotations

import argparse
import ssl
from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import structlog
from prometheus_client import CollectorRegistry

from thunderagent.config import ServeConfig
from thunderagent.errors import ConfigurationError
from thunderagent.leases.open_lease import LeaseSource
from thunderagent.picker.addresses import Addresses
from thunderagent.proxy.app import MADE_ANSWERS_COUNT
from thunderagent.proxy.fleet.made_answers import MadeAnswers
from thunderagent.proxy.gate.held import HeldTurns
from thunderagent.proxy.reading.identity import IdentityRules
from thunderagent.scaling import begin_process, check_gateways, gateway
from thunderagent.serving.building import build_runtime, policy_of
from thunderagent.serving.embedded import embedded_engines
from thunderagent.serving.listening import CLOSE_S
from thunderagent.serving.process import calm_garbage_collector
from thunderagent.serving.security import check_security, held_limits, is_loopback
from thunderagent.serving.serving import Announcer, Readiness, announce, background, proxy

log = structlog.get_logger("thunderagent.picker")

DESCRIPTION = """\
Pick endpoints for an Envoy in front, as its external processor: Envoy carries the bytes, holds a turn until there is a
lease for it, and goes where that says. Experimental; it needs the extra picker.

With --schedulers it asks the scheduler there, as a gateway does; without, it schedules itself, as `serve` does. Either
way it answers all that these answer at --port, and Envoy at --picker-port. It takes the options of `serve`.
"""


@dataclass(frozen=True)
class Options:
    """Options that are not settings of `serve`."""

    port: int
    fallbacks_count: int
    client_ca: Path | None
    """Envoys show a certificate that this authority signed."""
    network_is_private: bool

    @classmethod
    def of(cls, arguments: argparse.Namespace) -> Options:
        """Return what was given."""
        return cls(
            arguments.picker_port, arguments.fallbacks, arguments.picker_client_ca, arguments.picker_network_private
        )


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add options that `serve` does not have."""
    parser.add_argument("--picker-port", type=int, default=9002, metavar="N", help="where Envoy asks (default: 9002)")
    parser.add_argument(
        "--picker-client-ca",
        type=Path,
        metavar="FILE",
        help="let in at the picker's port only clients with a certificate of this authority; needs --tls-cert",
    )
    parser.add_argument(
        "--picker-network-private",
        action="store_true",
        help="say that only Envoys can reach the picker's port, so that they need no certificate",
    )
    parser.add_argument(
        "--fallbacks",
        type=int,
        default=0,
        metavar="N",
        help="further replicas to name, for an Envoy whose route retries (default: 0)",
    )


async def serve_picker(config: ServeConfig, options: Options, *, announcer: Announcer | None) -> None:
    """Serve until SIGTERM or SIGINT. Raises `ConfigurationError`."""
    check_port(config, options)
    try:
        from thunderagent.picker import server  # noqa: PLC0415 - needs an extra
        from thunderagent.picker.carried import Around  # noqa: PLC0415
        from thunderagent.picker.turns import Picker, PickerSettings  # noqa: PLC0415
    except ImportError as error:
        raise ConfigurationError("picker: install thunderagent with the extra `picker`") from error
    tls = None
    if config.tls_cert is not None:
        key, client_ca = config.tls_key or config.tls_cert, options.client_ca
        tls = server.Tls(
            key.read_bytes(), config.tls_cert.read_bytes(), client_ca.read_bytes() if client_ca is not None else None
        )
    stop = begin_process()
    async with _source(config) as source:
        calm_garbage_collector()
        policy = policy_of(config)
        rules = IdentityRules(
            config.program_headers,
            user_names_program=config.user_names_program,
            bucket_names_program=config.bucket_names_program,
            infers_buckets=False,
            reads_prefixes=policy.claim_rules.share_prefixes or config.event_log is not None,
            model_aliases=config.model_aliases,
        )
        settings = PickerSettings(
            config.max_body_bytes, config.body_timeout_s, config.patience_s, options.fallbacks_count
        )
        held, made = HeldTurns(held_limits(config), CollectorRegistry()), MadeAnswers(MADE_ANSWERS_COUNT)
        addresses = Addresses(source.leases.replicas)
        picker = Picker(Around(source.leases, addresses, held, made, source.suspect), rules, settings)

        def is_ready() -> bool:
            return bool(source.leases.replicas.open_ids) and not stop.is_set()

        listening = server.listening(picker, is_ready, config.host, options.port, tls, grace_s=CLOSE_S)
        async with (
            background(addresses.run),
            listening as port,
            background(partial(announce, announcer, source.readiness, source.url, f"picker at {config.host}:{port}")),
        ):
            await stop.wait()
            log.info("shutting_down", grace_s=config.grace_s)
            await source.close()


def check_port(config: ServeConfig, options: Options) -> None:
    """Refuse a port where strangers could get leases. Raises `ConfigurationError`."""
    if options.client_ca is not None:
        if config.tls_cert is None:
            raise ConfigurationError("picker_client_ca needs TLS: set tls_cert, too")
        try:
            ssl.create_default_context(ssl.Purpose.CLIENT_AUTH, cafile=options.client_ca)
        except OSError as error:  # ssl.SSLError is one
            raise ConfigurationError(f"picker_client_ca: cannot use {options.client_ca}: {error}") from error
    elif not (options.network_is_private or is_loopback(config.host)):
        raise ConfigurationError(
            f"picker_port: {config.host!r} can be reached from other machines, and any client would count as an "
            f"Envoy; set picker_client_ca (and tls_cert), so that Envoys show a certificate, or "
            f"picker_network_private if only Envoys can reach it"
        )


@dataclass(frozen=True)
class _Source:
    """The source of leases, and what is served beside."""

    url: str
    leases: LeaseSource
    readiness: Readiness
    suspect: Callable[[str], None]
    close: Callable[[], Coroutine[Any, Any, None]]
    """Lets turns end, within the grace period."""


@asynccontextmanager
async def _source(config: ServeConfig) -> AsyncIterator[_Source]:
    """Run a gateway, or all of `serve`."""
    if config.schedulers:
        check_gateways(config)
        async with gateway(config) as (url, remote, dialling, _):

            async def close() -> None:
                await remote.close()
                await dialling.last_words()

            yield _Source(url, remote, remote, remote.suspect, close)
        return
    check_security(config)
    runtime, event_log = build_runtime(config)
    async with AsyncExitStack() as stack:
        if event_log is not None:
            stack.callback(event_log.close)
        urls = config.backends
        if config.simulates_engines:
            urls = await stack.enter_async_context(embedded_engines(config))
        url = await stack.enter_async_context(proxy(config, runtime, urls, simulated=config.simulates_engines))
        yield _Source(url, runtime, runtime, lambda _: None, runtime.close)
