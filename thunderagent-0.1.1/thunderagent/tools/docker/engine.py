"""A Docker engine, called from the event loop: its library runs in threads, and its errors become ours here."""

from __future__ import annotations

import asyncio
import http.client
import re
import threading
import time
from collections.abc import Callable, Coroutine
from typing import Any, TypeVar

import msgspec
import requests
import urllib3
from docker import APIClient, errors  # type: ignore[import-untyped]

from thunderagent.errors import (
    SandboxConflictError,
    SandboxEngineError,
    SandboxError,
    SandboxImageError,
    SandboxPullLimitError,
    SandboxRefusedError,
    SandboxSpaceError,
)
from thunderagent.tools.docker.answers import Json
from thunderagent.tools.docker.connection import connect, none_if_missing, try_to_remove, url_of
from thunderagent.tools.docker.streams import Stream
from thunderagent.tools.threads import Threads

T = TypeVar("T")

_CLOSE_S = 10.0
# How long another party's removal of a container may take, and how often to check.
_REMOVAL_S = 20.0
_POLL_S = 0.05
# What an answer's text says beyond its status.
_SPACE = re.compile(
    r"no space left on device|disk quota exceeded|cannot allocate memory|not enough space"
    r"|address pool|predefined address pools",
    re.IGNORECASE,
)
_PORT_TAKEN = re.compile(r"port is already allocated|address already in use", re.IGNORECASE)
_NO_IMAGE = re.compile(
    r"no such image|pull access denied|manifest unknown|manifest for .* not found|repository .*not found"
    r"|repository does not exist|repository name not known|no matching manifest|unauthorized",
    re.IGNORECASE | re.DOTALL,
)
_PULL_LIMIT = re.compile(
    r"too ?many ?requests|\b429\b|rate.?limit|rate exceeded|pull limit|(?<!disk )quota exceeded|throttl", re.IGNORECASE
)
LIBRARY_ERRORS = (
    errors.DockerException,
    requests.RequestException,
    urllib3.exceptions.HTTPError,
    http.client.HTTPException,
    OSError,
    msgspec.DecodeError,
)


def mapped(error: Exception) -> SandboxError:
    """Return our error for one of the library's."""
    if isinstance(error, SandboxError):
        return error
    if isinstance(error, errors.APIError):
        return _mapped_answer(error)
    text = str(error) or type(error).__name__
    if isinstance(error, errors.DockerException):
        return SandboxError(f"docker: {text}")
    return SandboxEngineError(f"the docker engine does not answer: {text}")


def _mapped_answer(error: Any) -> SandboxError:
    text = str(error.explanation or error)
    kind = SandboxError
    if _SPACE.search(text):
        kind = SandboxSpaceError
    elif _PORT_TAKEN.search(text):
        kind = SandboxConflictError
    elif error.status_code == 429 or _PULL_LIMIT.search(text):
        kind = SandboxPullLimitError
    elif isinstance(error, errors.ImageNotFound) or _NO_IMAGE.search(text):
        kind = SandboxImageError
    elif error.status_code == 409:
        kind = SandboxConflictError
    elif error.status_code in (400, 403):
        kind = SandboxRefusedError
    elif error.status_code in (502, 503, 504):
        kind = SandboxEngineError
    return kind(f"docker: {text}")


class Engine:
    """One engine. Short calls share a bounded pool of threads, which must not wait for what a sandbox does."""

    def __init__(self, url: str, *, concurrency_count: int, request_timeout_s: float) -> None:
        """Connect at the first use."""
        self.url = url
        self.is_closing = False
        self.request_timeout_s = request_timeout_s
        self.threads = Threads("docker", concurrency_count)
        self._connecting = threading.Lock()
        self._connected: APIClient | None = None
        self._tasks: set[asyncio.Task[Any]] = set()

    async def ask(self, what: Callable[[APIClient], T], threads: Threads | None = None) -> T:
        """Call something in a thread. Raises `SandboxError`."""
        return await (threads or self.threads).call(self._in_thread, what)

    async def inspect(self, handle: str) -> Json | None:
        """Return the engine's information on a container; None if it does not exist. Raises `SandboxError`."""
        return await self.ask(lambda client: none_if_missing(client.inspect_container, handle))

    async def remove(self, handle: str) -> None:
        """Remove a container, running or not, if it exists, and wait until it is gone. Raises `SandboxError`."""
        give_up_s = time.monotonic() + _REMOVAL_S
        while not await self.ask(lambda client: try_to_remove(client, handle)):
            if time.monotonic() > give_up_s:
                raise SandboxError(f"docker: the removal of {handle[:12]} has not ended after {_REMOVAL_S:g} s")
            await asyncio.sleep(_POLL_S)

    def _in_thread(self, what: Callable[[APIClient], T]) -> T:
        try:
            return what(self._client())
        except LIBRARY_ERRORS as error:
            ours = mapped(error)
            if isinstance(ours, SandboxEngineError):
                self._connected = None  # a restarted engine may speak another version
            raise ours from error

    def _client(self) -> APIClient:
        with self._connecting:
            if self._connected is None:
                self._connected = connect(self.url, self.request_timeout_s)
            return self._connected

    def stream(
        self, name: str, method: str, path: str, read: Callable[[Any], None], body: Json | None = None
    ) -> Stream:
        """Return a streaming answer, not yet requested; `read` reads it, in a thread of its own."""
        # Silence is no error in a stream: the time limit is for connecting alone.
        limits_s = (self.request_timeout_s, None)

        def ask() -> Any:
            client = self._client()
            return client.request(method, url_of(client, path), json=body, stream=True, timeout=limits_s)

        return Stream(f"docker {name}", ask, read)

    async def open(self, stream: Stream) -> None:
        """Wait until the engine starts to answer. Raises `SandboxError`."""
        await self.ask(lambda _: stream.open(self.request_timeout_s))

    def later(self, what: Coroutine[Any, Any, T]) -> asyncio.Task[T]:
        """Run it in the background; closing waits for it."""
        task = asyncio.create_task(what)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task

    def whole(self, what: Coroutine[Any, Any, T]) -> asyncio.Task[T]:
        """Run it to its end, even if its shielded waiter leaves; nobody sees its result then."""
        task = self.later(what)
        task.add_done_callback(lambda task: task.cancelled() or task.exception())
        return task

    async def close(self) -> None:
        """Close connections and threads, once what was begun is done."""
        self.is_closing = True
        if self._tasks:
            await asyncio.wait(self._tasks, timeout=_CLOSE_S)
        for task in self._tasks:
            task.cancel()
        self.threads.close()
        if self._connected is not None:
            self._connected.close()
