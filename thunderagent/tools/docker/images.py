"""The images of Docker sandboxes: pulled once for all waiters, removed when nobody needs them."""

from __future__ import annotations

import asyncio
import math
import re
import time
from collections import Counter
from collections.abc import Callable, Collection

import structlog
from docker import APIClient, errors  # type: ignore[import-untyped]

from thunderagent.errors import SandboxEngineError, SandboxError, SandboxPullLimitError
from thunderagent.tools.base import logging_failures
from thunderagent.tools.docker.answers import Json, list_all
from thunderagent.tools.docker.connection import ignoring, none_if_missing
from thunderagent.tools.docker.engine import Engine, mapped
from thunderagent.tools.threads import Threads

_log = structlog.get_logger(__name__)

LEAST_LIMIT_S = 30.0
MOST_LIMIT_S = 900.0
"""For how long nothing is asked of a registry that limits pulls: doubled each time, unless it says for how long."""

_RETRY_AFTER = re.compile(r"(?:retry|try again)[- ](?:after|in)[:= ]*([0-9]+(?:\.[0-9]+)?)\s*([a-zµ]*)", re.IGNORECASE)
_UNITS_S = {"ns": 1e-9, "us": 1e-6, "µs": 1e-6, "ms": 1e-3, "m": 60.0, "min": 60.0, "minutes": 60.0, "h": 3600.0}
_DOCKER_HUB = "docker.io"


def registry_of(name: str) -> str:
    """Return the registry that an image is pulled from."""
    first, is_path, _ = name.partition("/")
    if not is_path or not ("." in first or ":" in first or first == "localhost"):
        return _DOCKER_HUB
    return _DOCKER_HUB if first in ("index.docker.io", "registry-1.docker.io", "registry.hub.docker.com") else first


def stated_limit_s(text: str) -> float:
    """Return for how long a registry wants to be left alone, in seconds; 0 if it does not say."""
    said = _RETRY_AFTER.search(text)
    return 0.0 if said is None else float(said[1]) * _UNITS_S.get(said[2].lower(), 1.0)


class PullLimits:
    """When registries that limited a pull are asked again; by threads, each step of which is one of the dictionary."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        """Start without limits."""
        self._clock = clock
        self._of: dict[str, tuple[float, float]] = {}
        """Until when, and for how long, by registry."""

    def check(self, registry: str) -> None:
        """Raise `SandboxPullLimitError` while nothing is asked of this registry."""
        until_s, _ = self._of.get(registry, (0.0, 0.0))
        if (left_s := until_s - self._clock()) > 0:
            raise _limit_error(registry, left_s)

    def hit(self, registry: str, said: str) -> SandboxPullLimitError:
        """Ask nothing of a registry for a while, which has just limited a pull; return the error of that pull."""
        until_s, last_s = self._of.get(registry, (0.0, 0.0))
        now_s = self._clock()
        if until_s <= now_s:  # not the second of two pulls at a time
            limit_s = max(min(2 * last_s, MOST_LIMIT_S), LEAST_LIMIT_S)
            limit_s = min(max(stated_limit_s(said), LEAST_LIMIT_S), MOST_LIMIT_S) if stated_limit_s(said) else limit_s
            until_s = now_s + limit_s
            self._of[registry] = until_s, limit_s
            _log.warning("registry_limits_pulls", registry=registry, again_in_s=limit_s, why=said)
        return _limit_error(registry, until_s - now_s)

    def passed(self, registry: str) -> None:
        """Forget the limits of a registry from which something was pulled."""
        self._of.pop(registry, None)


def _limit_error(registry: str, left_s: float) -> SandboxPullLimitError:
    error = SandboxPullLimitError(f"{registry} limits pulls: nothing is pulled from there for {left_s:.0f} s")
    error.retry_after_s = math.ceil(left_s)
    return error


class Images:
    """The images of one engine. With `reclaims`, those pulled here are removed again, except `keep`."""

    def __init__(self, engine: Engine, *, keep: Collection[str], reclaims: bool, max_pulls_count: int) -> None:
        self._engine = engine
        self._keep = frozenset(keep)
        self._reclaims = reclaims
        self._threads = Threads("docker-pull", max_pulls_count)
        self._pulls: dict[str, asyncio.Task[None]] = {}
        self._pulled: set[str] = set()
        self._limits = PullLimits()
        # Preparations that need one now: the engine does not know of them yet.
        self._users: Counter[str] = Counter()

    def claim(self, name: str) -> None:
        """Keep an image from being removed."""
        self._users[name] += 1

    def unclaim(self, name: str) -> None:
        """Take one claim back."""
        self._users -= Counter([name])

    async def get(self, name: str) -> Json:
        """Return the engine's information on an image; pull it if it is missing. Raises `SandboxError`."""
        while (info := await self._engine.ask(lambda client: none_if_missing(client.inspect_image, name))) is None:
            if name not in self._pulls:
                self._pulls[name] = self._engine.whole(self._pull(name))
            await asyncio.shield(self._pulls[name])
        found: Json = info
        return found

    async def _pull(self, name: str) -> None:
        started_s = time.monotonic()
        try:
            await self._engine.ask(lambda client: self._pull_whole(client, name), self._threads)
            self._limits.passed(registry_of(name))
            self._pulled.add(name)
            _log.info("sandbox_image_pulled", image=name, took_s=round(time.monotonic() - started_s, 3))
        except SandboxPullLimitError:
            raise
        except SandboxError as error:
            raise type(error)(f"image {name!r}: {error.message}") from error
        finally:
            del self._pulls[name]

    def _pull_whole(self, client: APIClient, name: str) -> None:
        registry = registry_of(name)
        self._limits.check(registry)
        try:
            self._pull_lines(client, name)
        except errors.APIError as error:
            if isinstance(mapped(error), SandboxPullLimitError):
                raise self._limits.hit(registry, str(error.explanation or error)) from error
            raise

    def _pull_lines(self, client: APIClient, name: str) -> None:
        for line in client.pull(name, stream=True, decode=True):
            if self._engine.is_closing:
                raise SandboxEngineError("the driver is closing")
            if "error" in line:
                raise errors.APIError(line["error"], explanation=line["error"])

    async def drop_unused(self, name: str) -> None:
        """Remove an image that was pulled here, unless somebody needs it. Raises `SandboxError`."""
        # A preparation that needs it while it is removed finds that out, and pulls it again.
        is_droppable = self._reclaims and name in self._pulled and name not in self._keep and not self._users[name]
        if is_droppable and await self._engine.ask(lambda client: _drop(client, name)):
            self._pulled.discard(name)
            _log.info("sandbox_image_removed", image=name)

    async def sweep(self) -> None:
        """Remove all that nobody needs."""
        for name in tuple(self._pulled):
            with logging_failures(f"image {name}"):
                await self.drop_unused(name)

    def close(self) -> None:
        """Stop pulling."""
        self._threads.close()


def _drop(client: APIClient, name: str) -> bool:
    if list_all(client, {"ancestor": [name]}):
        return False
    ignoring(client.remove_image, name)
    return True
