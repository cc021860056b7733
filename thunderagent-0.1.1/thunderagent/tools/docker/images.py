"""The images of Docker sandboxes: pulled once for all waiters, removed when nobody uses them and they are too much."""

from __future__ import annotations

import asyncio
import base64
import hashlib
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
_LONGEST_NAME = 240
"""Of a repository, in characters: the engine takes 255 with its tag."""


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


class Marks:
    """Names at the engine for images that one owner pulled: they tell it, and its reaper, after a crash.

    Each is a tag of the image that says the pulled name in base 32, and the engine knows when it was set last. All of
    this blocks.
    """

    def __init__(self, owner_id: str) -> None:
        """Set no mark yet."""
        self._prefix = f"thunderagent-pulled/{hashlib.sha256(owner_id.encode()).hexdigest()[:12]}"

    def set(self, client: APIClient, name: str) -> None:
        """Mark an image as used just now; one that is gone, or whose name is too long, gets no mark."""
        repository = self._of(name)
        if len(repository) <= _LONGEST_NAME:
            none_if_missing(lambda: client.tag(name, repository, "pulled", force=True))

    def all(self, client: APIClient) -> list[str]:
        """Return the names of the marked images."""
        return list(self._sizes_bytes(client))

    def _sizes_bytes(self, client: APIClient) -> dict[str, int]:
        found = client.images(filters={"reference": [f"{self._prefix}/*"]})
        sized = [(self._name(tag), int(each["Size"])) for each in found for tag in each["RepoTags"] or ()]
        return {name: size_bytes for name, size_bytes in sized if name}

    def prune(self, client: APIClient, limit_bytes: int, is_needed: Callable[[str], bool]) -> list[str]:
        """Remove the least recently used of the images that no container uses, until all of them fit the limit.

        Return the names of the removed ones.
        """
        sizes_bytes = self._sizes_bytes(client)
        if sum(sizes_bytes.values()) <= limit_bytes:
            return []
        idle: list[tuple[str, str, int]] = []
        for name, size_bytes in sizes_bytes.items():
            info = none_if_missing(client.inspect_image, self._of(name) + ":pulled")
            if info is not None and not is_needed(name) and not list_all(client, {"ancestor": [info["Id"]]}):
                idle.append((str((info.get("Metadata") or {}).get("LastTagTime", "")), name, size_bytes))
        left_bytes = sum(size_bytes for _, _, size_bytes in idle)
        removed = []
        for _, name, size_bytes in sorted(idle):
            if left_bytes <= limit_bytes:
                break
            ignoring(client.remove_image, self._of(name) + ":pulled")
            ignoring(client.remove_image, name)
            left_bytes -= size_bytes
            removed.append(name)
        return removed

    def _of(self, name: str) -> str:
        return f"{self._prefix}/{base64.b32encode(name.encode()).decode().rstrip('=').lower()}"

    def _name(self, tag: str) -> str:
        if not tag.startswith(f"{self._prefix}/"):
            return ""
        coded = tag.rpartition("/")[2].partition(":")[0].upper()
        return base64.b32decode(coded + "=" * (-len(coded) % 8)).decode()


class Images:
    """The images of one engine. With `limit_bytes`, those pulled here and used by nobody are removed beyond it.

    Those of `keep` are not, and without it none.
    """

    def __init__(
        self, engine: Engine, owner_id: str, *, keep: Collection[str], limit_bytes: int | None, max_pulls_count: int
    ) -> None:
        self._engine = engine
        self._keep = frozenset(keep)
        self._limit_bytes = limit_bytes
        self._marks = Marks(owner_id)
        self._pruning = asyncio.Lock()
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
            if self._limit_bytes is not None:
                with logging_failures(f"mark of the image {name}"):
                    await self._engine.ask(lambda client: self._marks.set(client, name))
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
        """Note that a sandbox of an image has ended, and remove what is then too much. Raises `SandboxError`."""
        if name in self._pulled and self._limit_bytes is not None:
            await self._engine.ask(lambda client: self._marks.set(client, name))
            await self._prune(self._limit_bytes)

    async def sweep(self) -> None:
        """Remove all that is too much, also of what earlier runs pulled."""
        if self._limit_bytes is not None:
            with logging_failures("images"):
                self._pulled.update(await self._engine.ask(self._marks.all))
                await self._prune(self._limit_bytes)

    async def _prune(self, limit_bytes: int) -> None:
        # A preparation that needs one while it is removed finds that out, and pulls it again.
        async with self._pruning:
            for name in await self._engine.ask(lambda client: self._marks.prune(client, limit_bytes, self._is_needed)):
                self._pulled.discard(name)
                _log.info("sandbox_image_removed", image=name)

    def _is_needed(self, name: str) -> bool:
        return name in self._keep or self._users[name] > 0

    def close(self) -> None:
        """Stop pulling."""
        self._threads.close()
