"""Creates the sources of replicas from the configuration, and further followers of replicas."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Coroutine, Mapping, Sequence
from dataclasses import dataclass
from http import HTTPStatus
from itertools import zip_longest
from typing import Any, Protocol
from urllib.parse import urlsplit

import structlog

from thunderagent.backends.discovery import Source, Wanted, wanted_of
from thunderagent.backends.discovery.base import PodSelection
from thunderagent.backends.discovery.dns import SCHEME, DnsSource
from thunderagent.backends.discovery.file import FileSource
from thunderagent.backends.poller import ReplicaEndpoint
from thunderagent.backends.vllm import KV_EVENT_SOURCES, KvAddresses, read_kv_event_sources
from thunderagent.config import HOST_FIELD, KV_EVENTS_FOUND, ServeConfig
from thunderagent.errors import ConfigurationError
from thunderagent.programs.messages import Decision, Event, ReplicaUp, ResidencyReported
from thunderagent.proxy.fleet.replicas import Follower
from thunderagent.runtime import Runtime

log = structlog.get_logger("thunderagent.replicas")

ASK_AGAIN_S = 1.0
"""How often an engine that is up and does not answer is asked where it publishes its KV events."""


class RunningFollower(Follower, Protocol):
    """A follower with a loop of its own."""

    def run(self) -> Coroutine[Any, Any, None]:
        """Follow until cancelled."""


def static_of(urls: tuple[str, ...]) -> list[Wanted]:
    """Return the engines named by URLs, without the names to be resolved."""
    return [wanted_of(url) for url in urls if not url.startswith(SCHEME)]


def dns_names_of(config: ServeConfig) -> set[str]:
    """Return the backends whose names are to be resolved."""
    return {url for url in config.backends if url.startswith(SCHEME)}


def sources_of(config: ServeConfig) -> list[Source]:
    """Return the configured sources, besides the static list. Raises `ConfigurationError`."""
    interval_s = config.discovery_interval_s
    sources: list[Source] = [DnsSource(url, interval_s=interval_s) for url in config.backends if url.startswith(SCHEME)]
    if config.backends_file is not None:
        sources.append(FileSource(config.backends_file, interval_s=interval_s))
    if config.kubernetes_replicas:
        # Needs an extra.
        from thunderagent.backends.discovery import kubernetes  # noqa: PLC0415

        access = kubernetes.ClusterAccess(config.kubernetes_config, config.kubernetes_url)
        selection = PodSelection.read(config.kubernetes_replicas)
        sources.append(kubernetes.KubernetesSource(selection, access, backoff_s=min(interval_s, 1.0)))
    return sources


def followers_of(config: ServeConfig, runtime: Runtime) -> list[RunningFollower]:
    """Return the follower of the engines' KV events, if configured. Raises `ConfigurationError`."""
    if not config.kv_events:
        return []
    if config.kv_events == (KV_EVENTS_FOUND,):
        return [KvFinder(runtime)]
    followed = list(zip_longest(config.backends, config.kv_events, config.kv_events_replay))
    addresses = {
        wanted_of(url).url: (address, replay)
        for url, address, replay in followed
        if url and address and not url.startswith(SCHEME)
    }
    template = (config.kv_events[0], *config.kv_events_replay[:1]) if HOST_FIELD in config.kv_events[0] else None
    return [KvFollower(runtime, addresses, template)]


@dataclass(frozen=True, slots=True)
class _Residency:
    """Passes the content of the engines' memory on to the runtime."""

    runtime: Runtime

    def residency_reported(self, replica_id: str, resident_tokens: tuple[tuple[str, int], ...]) -> None:
        """Dispatch it."""
        self.runtime.dispatch(ResidencyReported(self.runtime.now_s(), replica_id, resident_tokens))


class KvFollower:
    """Follows the KV events of replicas with a known address: from a list by URL, or from one for all."""

    def __init__(
        self,
        runtime: Runtime,
        addresses: Mapping[str, tuple[str, str | None]],
        template: tuple[str, ...] | None,
    ) -> None:
        """Report to `runtime`; `template` has `{host}` in place of the replica's host."""
        from thunderagent.backends.kv_events import KvEvents, KvEventsEndpoint  # noqa: PLC0415 - needs an extra

        self._endpoint_of = KvEventsEndpoint
        self._addresses = addresses
        self._template = template
        self._events = KvEvents(_Residency(runtime), [])

    def __repr__(self) -> str:
        return repr(self._events)

    def add(self, replica: ReplicaEndpoint) -> None:
        """Follow a replica, if its address is known. Raises `ConfigurationError` for an invalid address."""
        if self._template is not None:
            host = urlsplit(replica.url).hostname or ""
            host = f"[{host}]" if ":" in host else host
            address, replay = (*(text.replace(HOST_FIELD, host) for text in self._template), None)[:2]
        else:
            address, replay = self._addresses.get(replica.url, (None, None))
        if address is not None:
            rank_id = replica.rank_id or 0
            replay_address = of_rank(replay, rank_id) if replay is not None else None
            self._events.add(self._endpoint_of(replica.replica_id, of_rank(address, rank_id), replay_address))

    def remove(self, replica_id: str) -> None:
        """Stop following a replica."""
        self._events.remove(replica_id)

    def run(self) -> Coroutine[Any, Any, None]:
        """Follow until cancelled."""
        return self._events.run()


class KvFinder:
    """Follows the KV events of the engines that say themselves where they publish; asked again when they come up."""

    def __init__(self, runtime: Runtime) -> None:
        """Report to `runtime`."""
        from thunderagent.backends.kv_events import KvEvents, KvEventsEndpoint  # noqa: PLC0415 - needs an extra

        self.ask: Callable[[str, str, str], Awaitable[tuple[int, bytes]]] | None = None
        """Asks a replica at a URL for a path; returns the status, 0 without an answer, and the answer."""
        self._endpoint_of = KvEventsEndpoint
        self._events = KvEvents(_Residency(runtime), [])
        self._replicas: dict[str, ReplicaEndpoint] = {}
        self._found: dict[str, KvAddresses] = {}
        self._to_ask: dict[str, None] = {}
        self._news = asyncio.Event()
        runtime.observe(self._came_up, ReplicaUp)

    def __repr__(self) -> str:
        return repr(self._events)

    def add(self, replica: ReplicaEndpoint) -> None:
        """Ask a replica once it is up."""
        self._replicas[replica.replica_id] = replica

    def remove(self, replica_id: str) -> None:
        """Stop following a replica."""
        self._replicas.pop(replica_id, None)
        self._found.pop(replica_id, None)
        self._events.remove(replica_id)

    def _came_up(self, event: Event, decisions: Sequence[Decision]) -> None:  # noqa: ARG002 - an observer's signature
        assert isinstance(event, ReplicaUp)
        self._ask_soon(event.replica_id)

    def _ask_soon(self, replica_id: str) -> None:
        self._to_ask[replica_id] = None
        self._news.set()

    async def run(self) -> None:
        """Ask and follow until cancelled."""
        async with asyncio.TaskGroup() as group:
            group.create_task(self._events.run())
            while True:
                await self._news.wait()
                self._news.clear()
                asked, self._to_ask = self._to_ask, {}
                await asyncio.gather(*map(self._look_at, asked))
                if self._to_ask:
                    await asyncio.sleep(ASK_AGAIN_S)

    async def _look_at(self, replica_id: str) -> None:
        replica = self._replicas.get(replica_id)
        if replica is None or self.ask is None:
            return
        status, answer = await self.ask(replica_id, replica.url, KV_EVENT_SOURCES)
        if self._replicas.get(replica_id) is not replica:
            return  # it was removed meanwhile
        if not status:
            self._ask_soon(replica_id)
            return
        found = None
        if status == HTTPStatus.OK:
            found = read_kv_event_sources(answer, urlsplit(replica.url).hostname or "", replica.rank_id or 0)
        if found != self._found.get(replica_id):
            self._events.remove(replica_id)
            self._found.pop(replica_id, None)
            if found is not None:
                try:
                    self._events.add(self._endpoint_of(replica_id, *found))
                except ConfigurationError as error:  # no socket can be opened
                    log.warning("kv_events_not_followed", replica_id=replica_id, at=found.address, why=error.message)
                    self._ask_soon(replica_id)
                    return
                self._found[replica_id] = found
        address = found.address if found is not None else ""
        log.info("kv_events_found" if found is not None else "kv_events_not_found", replica_id=replica_id, at=address)


def of_rank(address: str, rank_id: int) -> str:
    """Return where a data-parallel rank publishes: vLLM adds the rank to the port. Raises `ConfigurationError`."""
    if not rank_id:
        return address
    base, colon, port = address.rpartition(":")
    if not colon or not port.isdigit():
        raise ConfigurationError(f"{address!r} has no port to which a data-parallel rank could be added")
    return f"{base}:{int(port) + rank_id}"
