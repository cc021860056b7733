"""Replicas' addresses for Envoy: an address and a port; names are resolved beside the turns.

A replica whose URL has a name is resolved when it appears and each `LOOKUP_PERIOD_S` from then on. Results are kept in
between, and longer if a lookup fails. A turn waits for a lookup only if none of that name has succeeded yet; all turns
wait for the same one.
"""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Awaitable, Callable, Iterable, Sequence
from contextlib import suppress
from ipaddress import ip_address
from typing import Never
from urllib.parse import urlsplit

import structlog

from thunderagent.errors import NoReplicaError
from thunderagent.leases import ReplicaMap

log = structlog.get_logger("thunderagent.picker")

LOOKUP_PERIOD_S = 30.0
LOOKUP_LIMIT_S = 10.0
NEW_REPLICAS_PERIOD_S = 1.0

Lookup = Callable[[str], Awaitable[Sequence[str]]]
"""Returns all addresses of a name. Raises OSError if it has none."""


async def system_lookup(name: str) -> Sequence[str]:
    """Resolve a name as the system does; see `Lookup`."""
    found = await asyncio.get_running_loop().getaddrinfo(name, None, type=socket.SOCK_STREAM)
    return [str(address[0]) for *_, address in found]


class Addresses:
    """Knows where the replicas are. All methods belong to one event loop."""

    def __init__(self, replicas: ReplicaMap, lookup: Lookup = system_lookup) -> None:
        """Start without resolved names."""
        self._replicas = replicas
        self._lookup = lookup
        self._found: dict[str, str] = {}
        """Endpoints of URLs with a name."""
        self._looked_up_s: dict[str, float] = {}
        self._looking: dict[str, asyncio.Task[str]] = {}

    async def run(self) -> Never:
        """Resolve the names of replicas, new ones and due ones."""
        try:
            while True:
                self._look_around(asyncio.get_running_loop().time())
                await asyncio.sleep(NEW_REPLICAS_PERIOD_S)
        finally:
            for task in self._looking.values():
                task.cancel()

    def _look_around(self, now_s: float) -> None:
        urls = (each.url for each in self._replicas.states.values())
        named = {url for url in urls if url and not plain_endpoint_of(url)}
        for url in self._looked_up_s.keys() - named:
            del self._looked_up_s[url]
            self._found.pop(url, None)
        for url in named:
            if now_s - self._looked_up_s.get(url, float("-inf")) >= LOOKUP_PERIOD_S:
                self._looking_up(url)

    def known(self, url: str) -> str:
        """Return the `IP:PORT` of a replica's URL; empty if its name is not resolved yet."""
        return plain_endpoint_of(url) or self._found.get(url, "")

    async def of(self, url: str) -> str:
        """Return the `IP:PORT` of a replica's URL. Raises `NoReplicaError` if its name has no address."""
        return self.known(url) or await asyncio.shield(self._looking_up(url))

    def allows(self, url: str, allowed: frozenset[str] | None) -> bool:
        """Return whether a replica is among some endpoints, by its address or by the name in its URL."""
        return allowed is None or _named_endpoint_of(url) in allowed or self.known(url) in allowed

    def replica_at(self, endpoint: str) -> str | None:
        """Return the replica at an `IP:PORT`; None if there is none."""
        endpoint = normal_endpoint(endpoint)
        for replica_id, state in self._replicas.states.items():
            if endpoint and self.known(state.url) == endpoint:
                return replica_id
        return None

    def _looking_up(self, url: str) -> asyncio.Task[str]:
        """Return the lookup of a URL's name: the running one, or a new one."""
        task = self._looking.get(url)
        if task is None:
            task = self._looking[url] = asyncio.create_task(self._look_up(url))
            task.add_done_callback(lambda ended: self._looked_up(url, ended))
        return task

    async def _look_up(self, url: str) -> str:
        parts = urlsplit(url)
        name, found = parts.hostname or "", list[str]()
        try:
            async with asyncio.timeout(LOOKUP_LIMIT_S):
                found = [_endpoint(address, _port_of(url)) for address in await self._lookup(name)]
        except (OSError, UnicodeError) as error:  # the end of that time is an OSError, whose text is empty
            raise NoReplicaError(f"{name} has no address: {str(error) or 'no answer'}") from error
        if not found:
            raise NoReplicaError(f"{name} has no address")
        before = self._found.get(url)
        return before if before in found else found[0]

    def _looked_up(self, url: str, ended: asyncio.Task[str]) -> None:
        del self._looking[url]
        if ended.cancelled():
            return
        self._looked_up_s[url] = ended.get_loop().time()
        error = ended.exception()
        if error is None:
            self._found[url] = ended.result()
        elif isinstance(error, NoReplicaError):
            log.warning("name_not_found", name=urlsplit(url).hostname, why=str(error), kept=self._found.get(url))
        else:
            raise error


def endpoints_in(texts: Iterable[str] | None) -> frozenset[str] | None:
    """Return endpoints in comparable form; None if there is no list."""
    return None if texts is None else frozenset(filter(None, map(normal_endpoint, texts)))


def normal_endpoint(text: str) -> str:
    """Return an endpoint in comparable form: a name in lower case, an address in its shortest form."""
    host, _, port = text.strip().lower().rpartition(":")
    with suppress(ValueError):
        return _endpoint(host.strip("[]"), int(port))
    return text.strip().lower()


def plain_endpoint_of(url: str) -> str:
    """Return the `IP:PORT` of a base URL; empty if it has a name instead."""
    with suppress(ValueError):
        return _endpoint(urlsplit(url).hostname or "", _port_of(url))
    return ""


def _named_endpoint_of(url: str) -> str:
    return f"{urlsplit(url).hostname or ''}:{_port_of(url)}"


def _port_of(url: str) -> int:
    parts = urlsplit(url)
    return parts.port or (443 if parts.scheme == "https" else 80)


def _endpoint(host: str, port: int) -> str:
    """Return an address and a port. Raises ValueError for an invalid address."""
    address = ip_address(host)
    return f"[{address.compressed}]:{port}" if address.version == 6 else f"{address.compressed}:{port}"
