"""The interface of drivers that start and end replicas."""

from __future__ import annotations

import random
import socket
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final, Protocol

from thunderagent.backends.discovery import wanted_of
from thunderagent.errors import ConfigurationError, DiscoveryError, ProvisionError


@dataclass(frozen=True, slots=True)
class Launched:
    """A replica that was started, or is about to be.

    `url` is empty if another source of replicas finds it; `handle` is its driver's name for it.
    """

    handle: str
    url: str = field(default="", repr=False)


class ReplicaGoneError(ProvisionError):
    """There is no such replica any more, so ending it again would be in vain."""


OnLost = Callable[[str, str], None]
"""Called with the handle of a replica that ended by itself, and why."""


class Provisioner(Protocol):
    """Starts and ends replicas. All methods belong to one event loop; they raise only `ProvisionError`."""

    @property
    def name(self) -> str:
        """Its name in the configuration and logs."""

    @property
    def names_urls(self) -> bool:
        """Whether it reports its replicas' URLs; otherwise another source finds them."""

    async def open(self) -> int:
        """End what an earlier run of the proxy left; return how many replicas remain."""

    async def run(self, on_lost: OnLost) -> None:
        """Watch started replicas until cancelled; may return at once if that is not needed."""

    async def start(self) -> Launched:
        """Start one more. It need not answer yet."""

    async def check_end(self, handle: str, url: str) -> None:
        """Raise `ProvisionError` if that one cannot be ended, before it is drained in vain."""

    async def end(self, handle: str, url: str) -> None:
        """End a drained replica, by its handle, or if that is empty, by its URL; it is called again if it failed."""

    async def close(self) -> None:
        """End started replicas that must not outlive the proxy. Never raises."""


TRIED_PORTS_COUNT: Final = 100


def free_port() -> int:
    """Return a port of this machine that nobody listens on now, none of those that the system gives away.

    An engine binds it some time later: a connection, or a server that takes any port, does not get it until then.
    Raises `ProvisionError` if none can be bound.
    """
    given = Path("/proc/sys/net/ipv4/ip_local_port_range")
    try:
        first, last = map(int, given.read_text().split()) if given.exists() else (32768, 60999)
        port: int
        outside = [*range(10_000, first), *range(last + 1, 65_536)] or range(10_000, 65_536)
        for port in random.SystemRandom().sample(outside, min(TRIED_PORTS_COUNT, len(outside))):
            with socket.socket() as probe, suppress(OSError):  # it is taken
                probe.bind(("127.0.0.1", port))
                return port
    except OSError as error:  # this process may open nothing more
        raise ProvisionError(f"no port of this machine can be tried: {error.strerror}") from error
    raise ProvisionError("no port of this machine can be bound, of many that were tried")


def url_on(port: int, pattern: str) -> str:
    """Return the URL of a replica on a port, as the proxy writes it. Raises `ConfigurationError` if invalid."""
    try:
        wanted = wanted_of(pattern.replace("{port}", str(port)))
    except DiscoveryError as error:
        raise ConfigurationError(f"provision_url: {error.message}") from error
    if wanted.ranks_count is not None:
        raise ConfigurationError("provision_url: how many ranks its replicas have says data_parallel_ranks")
    return wanted.url
