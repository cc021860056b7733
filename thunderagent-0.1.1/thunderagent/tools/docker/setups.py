"""What setup commands made: kept once as an image, from which later Docker sandboxes of the same template start.

Theory of operation
===================
A sandbox is used again by its files as they were when its setup had ended, before any program saw them: never as a
program left it. The next one is a new container on top of these, so nothing of the last one is in it: no file, process
or connection. All share the kept files, and what a sandbox writes lies in a layer of its own, which goes with it.

The engine keeps them: one commit, right after the setup of the first sandbox, writes the container's own layer down. It
knows nothing of what a setup leaves besides files: a running process, a mount, the content of a volume. So a sandbox
with volumes is not kept.

The images bear the labels of that sandbox, its owner and run among them; a later one has its own instead. A kept one
goes when it is too old, when all take too much, and as the driver closes. One that still has containers goes at the
next sweep, or by the reaper. `sweep` also removes what earlier runs left.
"""

from __future__ import annotations

import asyncio
import hashlib
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial

import structlog
from docker import APIClient, errors  # type: ignore[import-untyped]

from thunderagent.errors import SandboxError
from thunderagent.tools.base import OWNER_LABEL, Owner, logging_failures
from thunderagent.tools.docker.connection import none_if_missing
from thunderagent.tools.docker.engine import Engine

_log = structlog.get_logger(__name__)

KEPT_BYTES = 4 * 1024**3
"""All kept setups together; the one that was used least recently goes first."""
_REPOSITORY = "thunderagent-kept"


class TooMuchError(Exception):
    """A setup that cannot be kept; the text says why."""


@dataclass(slots=True)
class _Kept:
    """One setup's files."""

    image: str
    size_bytes: int
    until_s: float


class Setups:
    """The kept setups of one engine, by what they were made from."""

    def __init__(
        self,
        engine: Engine,
        owner: Owner,
        *,
        limit_bytes: int = KEPT_BYTES,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Start empty."""
        self._engine = engine
        self._owner = owner
        self._limit_bytes = limit_bytes
        self._clock = clock
        self._kept: dict[str, _Kept] = {}
        """The most recently used last."""
        self._keeping: set[str] = set()
        self._refused: set[str] = set()
        """Those that cannot be kept."""

    def image_of(self, key: str) -> str:
        """Return the image with a kept setup; empty if it is not kept."""
        kept = self._kept.get(key)
        if kept is None:
            return ""
        if kept.until_s <= self._clock():
            self._drop(key)
            return ""
        self._kept[key] = self._kept.pop(key)
        return kept.image

    def forget(self, key: str) -> None:
        """Note that a kept image is gone: others removed it."""
        self._kept.pop(key, None)

    def begin(self, key: str) -> bool:
        """Return whether a setup that begins now is to be kept; then `keep` must follow."""
        if key in self._keeping or key in self._kept or key in self._refused:
            return False
        self._keeping.add(key)
        return True

    async def keep(self, key: str, handle: str, ttl_s: float, *, worked: bool) -> None:
        """Keep what a setup made for `ttl_s`, if it worked. Never raises `SandboxError`: the sandbox is usable."""
        try:
            if worked:
                await self._keep(key, handle, ttl_s)
        except TooMuchError as error:
            self._refused.add(key)
            _log.warning("sandbox_setup_not_kept", key=key, why=str(error))
        except SandboxError as error:
            _log.warning("sandbox_setup_not_kept", key=key, why=error.message)
        finally:
            self._keeping.discard(key)

    async def _keep(self, key: str, handle: str, ttl_s: float) -> None:
        started_s = self._clock()
        name = f"{_REPOSITORY}:{hashlib.sha256(f'{self._owner.run_id} {key}'.encode()).hexdigest()[:24]}"
        # To its end: an image that is made for nobody would be known to nobody.
        committing = self._engine.whole(
            self._engine.ask(lambda client: _commit(client, handle, name, self._limit_bytes))
        )
        try:
            size_bytes = await asyncio.shield(committing)
        except asyncio.CancelledError:
            committing.add_done_callback(lambda _: self._remove_later(name))
            raise
        self._kept[key] = _Kept(name, size_bytes, self._clock() + ttl_s)
        while sum(each.size_bytes for each in self._kept.values()) > self._limit_bytes:
            self._drop(next(iter(self._kept)))
        took_s = round(self._clock() - started_s, 3)
        _log.info("sandbox_setup_kept", key=key, size_bytes=size_bytes, took_s=took_s)

    def _drop(self, key: str) -> None:
        self._remove_later(self._kept.pop(key).image)

    def _remove_later(self, image: str) -> None:
        self._engine.whole(self._engine.ask(partial(remove_kept, image=image)))

    async def sweep(self) -> None:
        """Remove kept images of this owner that are not kept any more, as far as no container uses them.

        Raises `SandboxError` if it cannot be asked which there are.
        """
        if self._keeping:  # one may just have been made
            return
        labels = {"label": [f"{OWNER_LABEL}={self._owner.owner_id}"]}
        found = await self._engine.ask(lambda client: kept_images(client, labels))
        known = {each.image for each in self._kept.values()}
        for image in sorted(set(found) - known):
            with logging_failures(f"kept setup {image}"):
                await self._engine.ask(partial(remove_kept, image=image))

    def close(self) -> None:
        """Drop everything; the engine waits for that as it closes, and the reaper removes what is still used then."""
        for key in list(self._kept):
            self._drop(key)


def is_kept(image: str) -> bool:
    """Return whether an image's name is that of a kept setup."""
    return image.startswith(f"{_REPOSITORY}:")


def kept_images(client: APIClient, labels: Mapping[str, list[str]]) -> list[str]:
    """Return the kept images with these labels, by name. Blocks; raises the library's errors."""
    found = client.images(filters={**labels, "reference": [_REPOSITORY]})
    return [tag for each in found for tag in each["RepoTags"] or () if is_kept(tag)]


def remove_kept(client: APIClient, image: str) -> bool:
    """Remove a kept image; return whether it is gone: one with containers stays. Blocks."""
    try:
        client.remove_image(image)
    except errors.NotFound:
        return True
    except errors.APIError as error:
        if error.status_code != 409:
            raise
        return False
    return True


def _commit(client: APIClient, handle: str, name: str, limit_bytes: int) -> int:
    """Make an image of a container; return what it takes beside the container's own image. Raises `TooMuchError`."""
    info = client.inspect_container(handle)
    if info["Mounts"]:
        raise TooMuchError("the image has volumes, and what setup writes there is not kept")
    repository, _, tag = name.partition(":")
    client.commit(handle, repository=repository, tag=tag)
    before, after = (none_if_missing(client.inspect_image, each) for each in (info["Image"], name))
    size_bytes = max(0, int((after or {}).get("Size", 0)) - int((before or {}).get("Size", 0)))
    if size_bytes > limit_bytes:
        remove_kept(client, name)
        raise TooMuchError(f"setup made more than {limit_bytes} bytes")
    return size_bytes
