"""What setup commands made: kept once, and put into later Docker sandboxes of the same template.

Theory of operation
===================
A sandbox is used again by its files as they were when its setup had ended, before any program saw them: never as a
program left it. The next one is a new container, so nothing of the last one is in it: no file, process or connection.

The engine says which files setup changed (`docker diff`). They are copied, through the engine's API, into one archive
in an unnamed temporary file of the proxy, which is gone with the proxy however that ends. There are two ways to copy: a
request for each path, which costs the engine a mount each, or one for the whole file system (`docker export`), of which
the rest is skipped. The one that is expected to take less time is taken, because somebody may wait for that sandbox.
Later sandboxes get the archive instead of running setup. What a setup leaves besides files is not kept: a running
process, a mount.

All of this but `Setups` blocks: it is called in threads.
"""

from __future__ import annotations

import posixpath
import tarfile
import tempfile
import time
from collections.abc import Callable, Iterable, Mapping
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any, cast
from urllib.parse import quote

import structlog
from docker import APIClient  # type: ignore[import-untyped]

from thunderagent.errors import SandboxError
from thunderagent.tools.docker.connection import raise_for_status, url_of
from thunderagent.tools.docker.engine import Engine

_log = structlog.get_logger(__name__)

KEPT_BYTES = 4 * 1024**3
"""All kept setups together; the one that was used least recently goes first."""
REQUEST_S = 0.05
"""What a request for a path takes an engine."""
WHOLE_BYTES_PER_S = 100e6
"""How much of a whole file system passes in a second."""
LONGEST_S = 60.0
"""A setup that would take longer to keep is run again for each sandbox."""

_BUFFER_BYTES = 1024 * 1024

_PLAIN = {"Accept-Encoding": "identity"}
_ADDED, _DELETED = 1, 2
"""The engine's words for what happened to a path."""

Changes = Mapping[str, int]
"""By path, what happened to it."""


class TooMuchError(Exception):
    """A setup that is not worth keeping; the text says why."""


class _LinkedOutsideError(Exception):
    """A changed file is a link to one that is not copied."""


@dataclass(slots=True)
class _Kept:
    """One setup's files."""

    archive: IO[bytes]
    size_bytes: int
    deleted: list[str]
    until_s: float


class Setups:
    """The kept setups of one engine, by what they were made from."""

    def __init__(
        self, engine: Engine, *, limit_bytes: int = KEPT_BYTES, clock: Callable[[], float] = time.monotonic
    ) -> None:
        """Start empty."""
        self._engine = engine
        self._limit_bytes = limit_bytes
        self._clock = clock
        self._kept: dict[str, _Kept] = {}
        """The most recently used last."""
        self._keeping: set[str] = set()
        """Those that are being kept, and those that cannot be."""

    async def put(self, key: str, handle: str) -> list[str] | None:
        """Put a kept setup into a container; return which paths it deletes, or None if it is not kept.

        Raises `SandboxError`.
        """
        kept = self._kept.get(key)
        if kept is None:
            return None
        if kept.until_s <= self._clock():
            self._drop(key)
            return None
        self._kept[key] = self._kept.pop(key)
        # Opened anew: each reader has a position of its own, and the file may be dropped meanwhile.
        path = Path(f"/proc/self/fd/{kept.archive.fileno()}")
        with path.open("rb") as archive:  # noqa: ASYNC230 - no disk is read
            await self._engine.ask(lambda client: client.put_archive(handle, "/", archive))
        return kept.deleted

    async def before(self, key: str, handle: str) -> Changes | None:
        """Return what a container has changed before its setup; None if that setup need not be kept."""
        if key in self._keeping or key in self._kept:
            return None
        self._keeping.add(key)
        try:
            return await self._engine.ask(lambda client: _changes(client, handle))
        except BaseException:
            self._keeping.discard(key)
            raise

    async def keep(self, key: str, handle: str, before: Changes | None, ttl_s: float, *, worked: bool) -> None:
        """Keep what a setup changed for `ttl_s`, if it worked. Never raises `SandboxError`: the sandbox is usable."""
        if before is None:
            return
        try:
            if worked:
                await self._keep(key, handle, before, ttl_s)
            self._keeping.discard(key)
        except (TooMuchError, tarfile.TarError, UnicodeError) as error:  # it stays among those that cannot be kept
            _log.warning("sandbox_setup_not_kept", key=key, why=str(error))
        except SandboxError as error:
            self._keeping.discard(key)
            _log.warning("sandbox_setup_not_kept", key=key, why=error.message)
        except BaseException:
            self._keeping.discard(key)
            raise

    async def _keep(self, key: str, handle: str, before: Changes, ttl_s: float) -> None:
        started_s = self._clock()
        kept = await self._engine.ask(lambda client: _capture(client, handle, before, self._limit_bytes))
        kept.until_s = self._clock() + ttl_s
        self._kept[key] = kept
        while sum(each.size_bytes for each in self._kept.values()) > self._limit_bytes:
            self._drop(next(iter(self._kept)))
        took_s = round(self._clock() - started_s, 3)
        _log.info("sandbox_setup_kept", key=key, size_bytes=kept.size_bytes, took_s=took_s)

    def _drop(self, key: str) -> None:
        self._kept.pop(key).archive.close()

    def close(self) -> None:
        """Drop everything."""
        for key in list(self._kept):
            self._drop(key)


def _changes(client: APIClient, handle: str) -> Changes:
    return {each["Path"]: each["Kind"] for each in client.diff(handle) or ()}


def _capture(client: APIClient, handle: str, before: Changes, limit_bytes: int) -> _Kept:
    """Copy what changed since `before`. Raises `TooMuchError`."""
    info = client.inspect_container(handle)
    if info["Mounts"]:
        raise TooMuchError("the image has volumes, and what setup writes there is not kept")
    changed = {path: kind for path, kind in _changes(client, handle).items() if before.get(path) != kind}
    paths = roots(changed)
    whole_s = client.inspect_image(info["Image"])["Size"] / WHOLE_BYTES_PER_S
    by_path_s = len(paths) * REQUEST_S
    if min(by_path_s, whole_s) > LONGEST_S:
        raise TooMuchError(f"setup changed {len(paths)} files and folders of a large image")
    archive = tempfile.TemporaryFile()  # noqa: SIM115 - it outlives this function
    try:
        try:
            _fill(client, handle, archive, changed, paths, limit_bytes, is_whole=whole_s < by_path_s)
        except _LinkedOutsideError:
            _fill(client, handle, archive, changed, paths, limit_bytes, is_whole=False)
        size_bytes = archive.tell()
    except BaseException:
        archive.close()
        raise
    return _Kept(archive, size_bytes, [path for path, kind in changed.items() if kind == _DELETED], 0.0)


def _fill(
    client: APIClient,
    handle: str,
    archive: IO[bytes],
    changed: Changes,
    paths: list[str],
    limit_bytes: int,
    *,
    is_whole: bool,
) -> None:
    """Write these changed paths into an archive, by one request or by one each."""
    archive.seek(0)
    archive.truncate()
    with tarfile.open(fileobj=archive, mode="w", format=tarfile.PAX_FORMAT) as out:
        if is_whole:
            _copy_of_whole(client, handle, changed, paths, out, limit_bytes)
        else:
            for path in paths:
                _copy(client, handle, path, out, is_whole=changed[path] == _ADDED, limit_bytes=limit_bytes)
    archive.flush()


def _copy_of_whole(
    client: APIClient, handle: str, changed: Changes, paths: list[str], out: tarfile.TarFile, limit_bytes: int
) -> None:
    """Append these paths, picked from the whole file system. Raises `_LinkedOutsideError`."""
    wanted, added = set(paths), {path for path in paths if changed[path] == _ADDED}
    url = url_of(client, f"/containers/{handle}/export")
    with closing(client.get(url, headers=_PLAIN, stream=True, timeout=client.timeout)) as response:
        raise_for_status(response)
        stream = cast("IO[bytes]", _Stream(response.raw))
        with tarfile.open(fileobj=stream, mode="r|", bufsize=_BUFFER_BYTES) as found:
            for entry in found:
                if not _is_of(entry.name, wanted, added):
                    continue
                if entry.islnk() and not _is_of(entry.linkname, wanted, added):
                    raise _LinkedOutsideError
                _append(entry, found, out, limit_bytes)


def _is_of(name: str, paths: set[str], added: set[str]) -> bool:
    path = f"/{name.strip('/')}"
    return path in paths or not added.isdisjoint(_parents(path))


def _append(entry: tarfile.TarInfo, found: tarfile.TarFile, out: tarfile.TarFile, limit_bytes: int) -> None:
    """Append an entry with its content. Raises `TooMuchError`."""
    content = found.extractfile(entry) if entry.isreg() else None
    out.addfile(_renamed(entry), content)
    if out.offset > limit_bytes:
        raise TooMuchError(f"setup made more than {limit_bytes} bytes")


def roots(changed: Changes) -> list[str]:
    """Return the paths to copy, parents first: an added folder stands for all that is in it."""
    added = {path for path, kind in changed.items() if kind == _ADDED}
    return sorted(path for path, kind in changed.items() if kind != _DELETED and added.isdisjoint(_parents(path)))


def _parents(path: str) -> Iterable[str]:
    while (path := posixpath.dirname(path)) != "/":
        yield path


def _copy(client: APIClient, handle: str, path: str, out: tarfile.TarFile, *, is_whole: bool, limit_bytes: int) -> None:
    """Append a path of a container to an archive of its root; of a folder that was there before only itself."""
    parent = posixpath.dirname(path).lstrip("/")
    url = url_of(client, f"/containers/{handle}/archive?path={quote(path)}")
    with closing(client.get(url, headers=_PLAIN, stream=True, timeout=client.timeout)) as response:
        raise_for_status(response)
        with tarfile.open(fileobj=cast("IO[bytes]", _Stream(response.raw)), mode="r|") as found:
            for entry in found:
                entry.name = posixpath.join(parent, entry.name)
                if entry.islnk():
                    entry.linkname = posixpath.join(parent, entry.linkname)
                _append(entry, found, out, limit_bytes)
                if entry.isdir() and not is_whole:
                    return


def _renamed(entry: tarfile.TarInfo) -> tarfile.TarInfo:
    """Return an entry whose long name is written anew."""
    entry.pax_headers = {key: value for key, value in entry.pax_headers.items() if key not in ("path", "linkpath")}
    return entry


class _Stream:
    """What tarfile reads of an answer: it wants whole blocks."""

    def __init__(self, raw: Any) -> None:
        self._raw = raw

    def read(self, size: int) -> bytes:
        """Return `size` bytes, fewer only at the end."""
        parts: list[bytes] = []
        while size > 0 and (part := self._raw.read(size)):
            parts.append(part)
            size -= len(part)
        return b"".join(parts)
