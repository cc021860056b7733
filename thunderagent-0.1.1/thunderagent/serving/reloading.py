"""Reloading the configuration of a running proxy, on SIGHUP or by `POST /config/reload`.

Some settings are applied at once; for the others the log and the answer say that they need a restart. An invalid
configuration changes nothing. Keys, certificates and lists of replicas in files are read again, too.
"""

from __future__ import annotations

import asyncio
import signal
import threading
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import Any

import structlog
from aiohttp import web
from pydantic import SecretStr

from thunderagent.backends.discovery.base import shown_url
from thunderagent.config import ServeConfig
from thunderagent.errors import ConfigurationError
from thunderagent.proxy.app import GUARD, HELD
from thunderagent.proxy.fleet.discovery import Discovery
from thunderagent.proxy.gate.keys import Keyring
from thunderagent.serving.replica_sources import dns_names_of, static_of
from thunderagent.serving.security import check_security, held_limits

log = structlog.get_logger("thunderagent.reloading")

KEY_LINES = frozenset({"api_keys", "admin_keys"})
SECRET_WORDS = ("token", "api_key", "password")


@dataclass(frozen=True, slots=True)
class Taker:
    """Applies some settings of a running proxy; `take` says whether the current configuration could be applied."""

    names: frozenset[str]
    take: Callable[[ServeConfig], bool]


class Reloader:
    """Reloads the configuration, and lets its users apply it."""

    def __init__(self, config: ServeConfig, load: Callable[[], ServeConfig]) -> None:
        """Start with `config`; `load` reads it again, and raises `ConfigurationError` if it is invalid."""
        self.config = config
        """As applied so far."""
        self._load = load
        self._takers: list[Taker] = []
        self._files: list[Callable[[], Awaitable[None]]] = []

    def takes(self, *names: str, take: Callable[[ServeConfig], bool]) -> None:
        """Call `take` when one of these settings has changed."""
        self._takers.append(Taker(frozenset(names), take))

    def reads(self, read: Callable[[], Awaitable[None]]) -> None:
        """Call `read` at each reload, for what is in a file of its own."""
        self._files.append(read)

    async def run(self, asked: asyncio.Event) -> None:
        """Reload whenever `asked` is set, until cancelled."""
        while True:
            await asked.wait()
            asked.clear()
            with suppress(ConfigurationError):  # it was logged
                await self.reload()

    async def reload(self) -> dict[str, Any]:
        """Reload files and the configuration, and return what changed in the latter.

        Raises `ConfigurationError` if that is invalid; then nothing of it has changed.
        """
        for read in self._files:
            await read()
        try:
            config = self._load()
            check_security(config)
        except ConfigurationError as error:
            log.error("config_not_reloaded", why=error.message)  # noqa: TRY400 - no bug, so no trace
            raise
        before = self.config
        changed = {name for name in ServeConfig.model_fields if getattr(before, name) != getattr(config, name)}
        applied: set[str] = set()
        for taker in self._takers:
            if taker.names & changed and taker.take(config):
                applied |= taker.names & changed
        # What was not applied stays, so that the next reload reports it again.
        self.config = config.model_copy(update={name: getattr(before, name) for name in changed - applied})
        report = {
            "applied": {name: difference(name, before, config) for name in sorted(applied)},
            "needs_restart": {name: difference(name, before, config) for name in sorted(changed - applied)},
        }
        log.info("config_reloaded", **report)
        return report


def difference(name: str, before: ServeConfig, after: ServeConfig) -> str:
    """Return how a setting changed, without secrets."""
    if name in KEY_LINES:
        old, new = ({line.partition(":")[0]: line for line in getattr(config, name)} for config in (before, after))
        added, revoked = sorted(new.keys() - old.keys()), sorted(old.keys() - new.keys())
        changed = sorted(key for key in new.keys() & old.keys() if new[key] != old[key])
        parts = [*(f"+{key}" for key in added), *(f"-{key}" for key in revoked), *(f"~{key}" for key in changed)]
        return ", ".join(parts)
    return f"{_shown(name, getattr(before, name))} -> {_shown(name, getattr(after, name))}"


def _shown(name: str, value: object) -> str:
    if isinstance(value, SecretStr) or (any(word in name for word in SECRET_WORDS) and isinstance(value, str)):
        return "***" if value else "none"
    if isinstance(value, tuple):
        return ", ".join(shown_url(str(each)) if "://" in str(each) else str(each) for each in value) or "none"
    return shown_url(value) if isinstance(value, str) and "://" in value else str(value)


def take_over(
    reloader: Reloader, app: web.Application, keyring: Keyring, discovery: Discovery, *, simulated: bool
) -> None:
    """Tell the reloader which settings can change at runtime, and how to apply each."""

    def take_keys(config: ServeConfig) -> bool:
        lines = bool(config.api_keys), bool(config.admin_keys or config.api_keys)
        asks = keyring.has_data_keys, bool(keyring)
        if config.keys_file is None and lines != asks:  # whether keys are required is fixed at the start
            return False
        keyring.set_lines(config.api_keys, config.admin_keys)
        return True

    def take_backends(config: ServeConfig) -> bool:
        if simulated or not config.backends or dns_names_of(config) != dns_names_of(reloader.config):
            return False
        discovery.replicas_wanted("static", static_of(config.backends))
        return True

    def take_held(config: ServeConfig) -> bool:
        app[HELD].set(held_limits(config))
        return True

    def take_rate(config: ServeConfig) -> bool:
        return app[GUARD].set_rate_limit(config.rate_limit_per_s, config.rate_limit_burst_count)

    reloader.takes("api_keys", "admin_keys", take=take_keys)
    reloader.takes("backends", take=take_backends)
    reloader.takes(
        *(name for name in ServeConfig.model_fields if "max_held_" in name or "max_websockets_" in name),
        "max_running_bytes",
        take=take_held,
    )
    reloader.takes("rate_limit_per_s", "rate_limit_burst_count", take=take_rate)


@contextmanager
def hangup() -> Iterator[asyncio.Event]:
    """Yield an event that SIGHUP sets, in the main thread, where signals arrive."""
    asked = asyncio.Event()
    if threading.current_thread() is not threading.main_thread():
        yield asked
        return
    loop = asyncio.get_running_loop()
    loop.add_signal_handler(signal.SIGHUP, asked.set)
    try:
        yield asked
    finally:
        loop.remove_signal_handler(signal.SIGHUP)
