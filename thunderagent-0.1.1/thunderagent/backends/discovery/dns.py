"""Replicas from a name, one for each of its addresses, such as a headless service of Kubernetes.

Only a lookup with at least one address counts; one that fails, or finds none, changes nothing.
"""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Sequence
from typing import Protocol
from urllib.parse import urlsplit

from thunderagent.backends.discovery.base import DiscoveryListener, Wanted, shown_url, wanted_of
from thunderagent.errors import DiscoveryError

SCHEME = "dns+http://"
LOOKUP_LIMIT_S = 10.0


class Resolver(Protocol):
    """Looks names up."""

    async def addresses(self, name: str) -> Sequence[str]:
        """Return all addresses of a name, IPv4 and IPv6. Raises OSError if there are none."""


class SystemResolver:
    """Looks names up as the system does: its files, its servers, its search list."""

    async def addresses(self, name: str) -> Sequence[str]:
        """Return the addresses of a name; see `Resolver`."""
        found = await asyncio.get_running_loop().getaddrinfo(name, None, type=socket.SOCK_STREAM)
        return [str(address[0]) for *_, address in found]


class DnsSource:
    """Follows the addresses of one name."""

    def __init__(
        self, url: str, *, interval_s: float, resolver: Resolver | None = None, limit_s: float = LOOKUP_LIMIT_S
    ) -> None:
        """Look up the host of `url` (`dns+http://name:8000`) every `interval_s`. Raises `DiscoveryError` for another.

        Plain HTTP only: no certificate is for an address that a name had a moment ago.
        """
        if not url.startswith(SCHEME):
            raise DiscoveryError(f"{shown_url(url)!r}: to look up a name, write {SCHEME}NAME:PORT")
        template = wanted_of(url.removeprefix("dns+"))
        parts = urlsplit(template.url)
        if parts.hostname is None or parts.username is not None or parts.path:
            raise DiscoveryError(f"{shown_url(url)!r}: a name that is looked up is given as {SCHEME}NAME:PORT")
        self._host = parts.hostname
        self._port = parts.port or 80
        self.name = f"dns:{self._host}:{self._port}"
        self._ranks_count = template.ranks_count
        self._interval_s = interval_s
        self._limit_s = limit_s
        self._resolver: Resolver = resolver or SystemResolver()

    def __repr__(self) -> str:
        return f"<DnsSource {self.name}>"

    async def run(self, listener: DiscoveryListener) -> None:
        """Report the addresses after every lookup that finds some."""
        while True:
            try:
                async with asyncio.timeout(self._limit_s):
                    addresses = set(await self._resolver.addresses(self._host))
            except TimeoutError:
                listener.source_failed(self.name, f"no answer within {self._limit_s:g} s")
            except (OSError, UnicodeError) as error:  # UnicodeError: how an invalid name is refused
                listener.source_failed(self.name, f"{self._host} is not found: {error}")
            else:
                # An address with a zone is on this machine's own link: not a replica.
                wanted = [self._wanted(address) for address in sorted(addresses) if "%" not in address]
                if wanted:
                    listener.replicas_wanted(self.name, wanted)
                else:
                    listener.source_failed(self.name, f"{self._host} has no address")
            await asyncio.sleep(self._interval_s)

    def _wanted(self, address: str) -> Wanted:
        host = f"[{address}]" if ":" in address else address
        return Wanted(f"http://{host}:{self._port}", self._ranks_count)
