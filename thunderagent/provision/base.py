"""The interface of drivers that start and end replicas."""

from __future__ import annotations

import socket
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Protocol

from thunderagent.backends.discovery import wanted_of
from thunderagent.errors import ConfigurationError, DiscoveryError


@dataclass(frozen=True, slots=True)
class Launched:
    """A replica that was started, or is about to be.

    `url` is empty if another source of replicas finds it; `handle` is its driver's name for it.
    """

    handle: str
    url: str = field(default="", repr=False)


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
        """End a drained replica, by its handle, or if that is empty, by its URL."""

    async def close(self) -> None:
        """End started replicas that must not outlive the proxy. Never raises."""


def free_port() -> int:
    """Return a port of this machine that nobody listens on now."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
    return port


def url_on(port: int, pattern: str) -> str:
    """Return the URL of a replica on a port, as the proxy writes it. Raises `ConfigurationError` if invalid."""
    try:
        wanted = wanted_of(pattern.replace("{port}", str(port)))
    except DiscoveryError as error:
        raise ConfigurationError(f"provision_url: {error.message}") from error
    if wanted.ranks_count is not None:
        raise ConfigurationError("provision_url: how many ranks its replicas have says data_parallel_ranks")
    return wanted.url
