"""The configuration read again while the proxy runs, on SIGHUP or by `POST /config/reload`.

Some settings are taken over at once; of the others the log and the answer say that they need a restart. A configuration
that is wrong changes nothing. Keys, certificates and lists of replicas that stand in files are read again too.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import structlog
from pydantic import SecretStr

from thunderagent.backends.discovery.base import shown_url
from thunderagent.config import ServeConfig
from thunderagent.errors import ConfigurationError
from thunderagent.security import check_security

log = structlog.get_logger("thunderagent.reloading")

KEY_LINES = frozenset({"api_keys", "admin_keys"})
SECRET_WORDS = ("token", "api_key", "password")


@dataclass(frozen=True, slots=True)
class Taker:
    """Takes some settings over while the proxy runs; `take` says whether it could, as the configuration now is."""

    names: frozenset[str]
    take: Callable[[ServeConfig], bool]


class Reloader:
    """Reads the configuration again, and has whoever goes by it take it over."""

    def __init__(self, config: ServeConfig, load: Callable[[], ServeConfig]) -> None:
        """Begin with `config`; `load` reads it again, and raises `ConfigurationError` if it is wrong."""
        self._config = config
        self._load = load
        self._takers: list[Taker] = []
        self._files: list[Callable[[], Awaitable[None]]] = []

    def takes(self, *names: str, take: Callable[[ServeConfig], bool]) -> None:
        """Have `take` called when one of these settings has changed."""
        self._takers.append(Taker(frozenset(names), take))

    def reads(self, read: Callable[[], Awaitable[None]]) -> None:
        """Have `read` called at each reload, for what stands in a file of its own."""
        self._files.append(read)

    async def run(self, asked: asyncio.Event) -> None:
        """Reload whenever `asked` is set, until cancelled."""
        while True:
            await asked.wait()
            asked.clear()
            with suppress(ConfigurationError):  # which was logged
                await self.reload()

    async def reload(self) -> dict[str, Any]:
        """Read files and the configuration again, and say what changed in the latter.

        Raises `ConfigurationError` if that is wrong; then nothing of it has changed.
        """
        for read in self._files:
            await read()
        try:
            config = self._load()
            check_security(config)
        except ConfigurationError as error:
            log.error("config_not_reloaded", why=error.message)  # noqa: TRY400 - no bug, so no trace
            raise
        before = self._config
        changed = {name for name in ServeConfig.model_fields if getattr(before, name) != getattr(config, name)}
        applied: set[str] = set()
        for taker in self._takers:
            if taker.names & changed and taker.take(config):
                applied |= taker.names & changed
        # What was not taken over stays as it was, so that the next reload tells of it again.
        self._config = config.model_copy(update={name: getattr(before, name) for name in changed - applied})
        report = {
            "applied": {name: difference(name, before, config) for name in sorted(applied)},
            "needs_restart": {name: difference(name, before, config) for name in sorted(changed - applied)},
        }
        log.info("config_reloaded", **report)
        return report


def difference(name: str, before: ServeConfig, after: ServeConfig) -> str:
    """Return how a setting changed, without what is secret."""
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
