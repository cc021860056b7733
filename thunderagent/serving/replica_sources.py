"""Creates the sources of replicas from the configuration, and further followers of replicas."""

from __future__ import annotations

from collections.abc import Coroutine, Mapping
from dataclasses import dataclass
from itertools import zip_longest
from typing import Any, Protocol
from urllib.parse import urlsplit

from thunderagent.backends.discovery import Source, Wanted, wanted_of
from thunderagent.backends.discovery.base import PodSelection
from thunderagent.backends.discovery.dns import SCHEME, DnsSource
from thunderagent.backends.discovery.file import FileSource
from thunderagent.backends.poller import ReplicaEndpoint
from thunderagent.config import HOST_FIELD, ServeConfig
from thunderagent.errors import ConfigurationError
from thunderagent.programs.model.fleet_events import ResidencyReported
from thunderagent.proxy.fleet.replicas import Follower
from thunderagent.runtime import Runtime


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


def of_rank(address: str, rank_id: int) -> str:
    """Return where a data-parallel rank publishes: vLLM adds the rank to the port. Raises `ConfigurationError`."""
    if not rank_id:
        return address
    base, colon, port = address.rpartition(":")
    if not colon or not port.isdigit():
        raise ConfigurationError(f"{address!r} has no port to which a data-parallel rank could be added")
    return f"{base}:{int(port) + rank_id}"
