"""The images of Docker sandboxes: pulled once for all waiters, removed when nobody needs them."""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from collections.abc import Collection

import structlog
from docker import APIClient, errors  # type: ignore[import-untyped]

from thunderagent.errors import SandboxEngineError, SandboxError
from thunderagent.tools.base import logging_failures
from thunderagent.tools.docker.answers import Json, list_all
from thunderagent.tools.docker.connection import ignoring, none_if_missing
from thunderagent.tools.docker.engine import Engine
from thunderagent.tools.threads import Threads

_log = structlog.get_logger(__name__)


class Images:
    """The images of one engine. With `reclaims`, those pulled here are removed again, except `keep`."""

    def __init__(self, engine: Engine, *, keep: Collection[str], reclaims: bool, max_pulls_count: int) -> None:
        self._engine = engine
        self._keep = frozenset(keep)
        self._reclaims = reclaims
        self._threads = Threads("docker-pull", max_pulls_count)
        self._pulls: dict[str, asyncio.Task[None]] = {}
        self._pulled: set[str] = set()
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
            self._pulled.add(name)
            _log.info("sandbox_image_pulled", image=name, took_s=round(time.monotonic() - started_s, 3))
        except SandboxError as error:
            raise type(error)(f"image {name!r}: {error.message}") from error
        finally:
            del self._pulls[name]

    def _pull_whole(self, client: APIClient, name: str) -> None:
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
