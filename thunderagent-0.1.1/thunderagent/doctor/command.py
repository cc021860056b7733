"""`thunderagent doctor`: its options, and the order of its checks."""

from __future__ import annotations

import argparse
import asyncio
import ssl
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from functools import partial
from pathlib import Path
from urllib.parse import urlsplit

import httpx2
from rich.console import Console

from thunderagent.backends import backend_of
from thunderagent.backends.discovery.base import replica_id_of, shown_url
from thunderagent.config import ServeConfig
from thunderagent.doctor import engines, program, proxies
from thunderagent.doctor.among import findings_among
from thunderagent.doctor.asking import Asker, add_proxy_arguments, proxy_url, trusted
from thunderagent.doctor.findings import Finding, Level, as_json, exit_status, show, warning
from thunderagent.errors import ConfigurationError
from thunderagent.serving.building import build_runtime
from thunderagent.serving.security import backend_api_key, backend_ssl_context
from thunderagent.serving.serving import proxy

DESCRIPTION = """\
Find faults, and say how to fix them.

Without options it examines the proxy on this machine and its engines. With --backends, or a --config file that
names replicas, it examines these engines before you have a proxy, and starts a proxy for the time being.

It asks engines for their health, metrics and models, sends each three small prompts, and sends two turns of one
program through the proxy. --no-turns leaves all prompts out.

Exit status: 0 if there is no fault, 1 if there is one, 2 for a wrong option.

Examples:
  thunderagent doctor --backends http://10.0.0.1:8000,http://10.0.0.2:8000
  thunderagent doctor --url http://127.0.0.1:8300
  thunderagent doctor --program-header X-Trace-Session --json
"""

FIRST_POLLS_S = 5.0
"""Time for an own proxy to find all of its replicas up: two polls that are answered late."""

OF_THE_TRIAL = (
    *("backends", "backends_file", "kubernetes_replicas", "kubernetes_config", "kubernetes_url"),
    *("data_parallel_ranks", "backend_type", "capacity_tokens", "policy", "policy_args", "priority"),
    *("program_headers", "user_names_program", "bucket_names_program", "infer_programs"),
    *("backend_api_key", "backend_api_key_file", "backend_ca_file", "engine_plugin"),
)
"""Settings that the doctor's own proxy uses. It writes no files, starts no sandboxes and asks no judge."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options."""
    target = parser.add_mutually_exclusive_group()
    target.add_argument("--backends", metavar="A,B", help="base URLs of engines, as `serve --backends` takes them")
    add_proxy_arguments(parser, target)
    parser.add_argument(
        "--config", type=Path, metavar="FILE", help="a proxy's configuration: its engines are examined, and its address"
    )
    parser.add_argument(
        "--program-header",
        default=program.DEFAULT_HEADER,
        metavar="NAME",
        help="header in which your clients name the program (default: %(default)s)",
    )
    parser.add_argument(
        "--timeout-s", type=float, default=120.0, metavar="S", help="for the answer to a prompt (default: %(default)g)"
    )
    parser.add_argument("--no-turns", action="store_true", help="only look; send no prompts")
    parser.add_argument("--json", action="store_true", help="print JSON")


def run(args: argparse.Namespace) -> int:
    """Examine, print the findings, return the exit status. Raises `ConfigurationError`."""
    findings = asyncio.run(examine(args))
    if args.json:
        print(as_json(findings))
    else:
        show(findings, Console(markup=False, emoji=False, highlight=False))
    return exit_status(findings)


async def examine(args: argparse.Namespace) -> list[Finding]:
    """Examine a running proxy, or engines through a proxy of our own. Raises `ConfigurationError`."""
    given = {} if args.backends is None else {"backends": args.backends}
    config = ServeConfig.load(args.config, **given)
    has_engines = config.backends or config.backends_file or config.kubernetes_replicas
    has_config = args.config is not None
    if args.url is None and (args.backends or has_config) and has_engines:
        findings = list(proxies.configuration_findings(config))
        async with _own_proxy(config) as url:
            return findings + await _examine_through(url, args, config, is_own=True)
    url = proxy_url(args.url, config.port if has_config else None)
    return await _examine_through(url, args, config, is_own=False)


async def _examine_through(url: str, args: argparse.Namespace, config: ServeConfig, *, is_own: bool) -> list[Finding]:
    """Examine the proxy at `url`, the engines behind it, and the way through it."""
    key = {proxies.KEY_HEADER: args.key} if args.key and not is_own else {}
    async with _asker(url, args.timeout_s, verify=trusted(args.ca_file)) as asker:
        looked = await proxies.look_at(asker, "the proxy" if is_own else urlsplit(url).netloc, key)
        if is_own:
            looked = await _settled(asker, looked)
        findings = list(proxies.findings_of(looked, url, is_own=is_own))
        behind = await _look_at_engines(looked, args, config)
        wants_priorities = bool(config.priority)
        told = {replica_id_of(str(each["url"])): bool((each.get("plugin") or {}).get("on")) for each in looked.replicas}
        for engine in behind:
            engine.is_told = None if is_own else told.get(engine.name)  # our own was hardly asked yet
            findings += engines.findings_of(
                engine, wants_priorities=wants_priorities, capacity_override_tokens=config.capacity_tokens
            )
        findings += findings_among(behind)
        if not is_own:
            findings = [_as_seen_from_here(each, looked) for each in findings]
        if not args.no_turns and looked.model_ids:
            limits = [limit for engine in behind if (limit := engine.context_limit_tokens) is not None]
            trial = await program.try_program(
                asker, looked.model_ids[0], min(limits, default=None), args.program_header, key
            )
            findings += program.findings_of(trial)
    return findings


def _as_seen_from_here(finding: Finding, looked: proxies.Proxy) -> Finding:
    """Convert a fault that an engine is unreachable to a warning, if the proxy reaches it."""
    up_ids = {replica_id_of(str(replica["url"])) for replica in looked.replicas if replica["up"]}
    if finding.level is Level.FAULT and finding.check == "engine_reachable" and finding.subject in up_ids:
        text = "It cannot be reached from this machine, but from the proxy; it was not examined."
        return warning(finding.check, finding.subject, text, "run doctor where the proxy runs")
    return finding


async def _look_at_engines(
    looked: proxies.Proxy, args: argparse.Namespace, config: ServeConfig
) -> list[engines.Engine]:
    """Look at the engines that a proxy names, all at once: ranks of one URL only once."""
    kinds = {str(replica["url"]): str(replica["kind"]) for replica in looked.replicas}
    with_password = {shown_url(url.partition("#")[0]): url.partition("#")[0] for url in config.backends}
    key = backend_api_key(config)
    ssl_context = backend_ssl_context(config)

    async def look(url: str) -> engines.Engine:
        headers = {"Authorization": f"Bearer {key}"} if key else {}
        async with _asker(with_password.get(url, url), args.timeout_s, verify=ssl_context, headers=headers) as asker:
            return await engines.look_at(
                asker, replica_id_of(url), backend_of(config.backend_type), sends_turns=not args.no_turns
            )

    return await asyncio.gather(*map(look, kinds))


async def _settled(asker: Asker, looked: proxies.Proxy) -> proxies.Proxy:
    """Look again until all of the proxy's replicas are up, or the time is over."""
    looks = partial(proxies.look_at, asker, looked.name, {})
    try:
        async with asyncio.timeout(FIRST_POLLS_S):
            while not looked.replicas or not all(each["up"] for each in looked.replicas):
                await asyncio.sleep(0.1)
                looked = await looks()
    except TimeoutError:
        pass
    return await looks()


@asynccontextmanager
async def _own_proxy(config: ServeConfig) -> AsyncIterator[str]:
    """Run a proxy on loopback in front of the configured replicas, and yield its URL."""
    kept = {name: getattr(config, name) for name in OF_THE_TRIAL}
    trial = ServeConfig.model_construct(**kept, port=0, poll_interval_s=0.2, grace_s=0.0, no_replica_limit_s=5.0)
    runtime, _ = build_runtime(trial)
    async with proxy(trial, runtime, trial.backends) as url:
        yield url


@asynccontextmanager
async def _asker(
    url: str,
    timeout_s: float,
    *,
    verify: ssl.SSLContext | None = None,
    headers: dict[str, str] | None = None,
) -> AsyncIterator[Asker]:
    try:
        needs_trust = httpx2.URL(url).scheme == "https"  # reading the system's certificates takes 20 ms
        client = httpx2.AsyncClient(base_url=url, trust_env=False, verify=verify or needs_trust, headers=headers)
    except httpx2.InvalidURL as error:
        raise ConfigurationError(f"{shown_url(url)!r} is not a URL: {error}") from error
    async with client as http:
        yield Asker(http, timeout_s=timeout_s)
