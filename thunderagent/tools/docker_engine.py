"""How a Docker engine is asked: connections, answers that stream, what its answers hold, and what its errors mean.

All of this waits, or is called from threads that do.
"""

from __future__ import annotations

import contextlib
import http.client
import os
import re
import socket
import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import Future
from typing import Any, TypeVar
from urllib.parse import quote

import msgspec
import requests
import urllib3
from docker import APIClient, errors  # type: ignore[import-untyped]
from docker.transport import UnixHTTPAdapter  # type: ignore[import-untyped]
from docker.transport.unixconn import UnixHTTPConnection, UnixHTTPConnectionPool  # type: ignore[import-untyped]
from docker.utils import kwargs_from_env  # type: ignore[import-untyped]

from thunderagent.errors import (
    SandboxConflictError,
    SandboxEngineError,
    SandboxError,
    SandboxImageError,
    SandboxRefusedError,
    SandboxSpaceError,
)
from thunderagent.tools.base import Found, Place

T = TypeVar("T")
Json = dict[str, Any]

_OLDEST_VERSION = "1.41"
"""Of the engine's API: the first that tells memory without waiting for a second sample."""
_KEPT_CONNECTIONS = 32
_OUTPUT_BYTES = 8192
_TOLD_LINES = 10
# What an answer's text tells beyond its status.
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


# --- errors -----------------------------------------------------------------------------------------------------------

LIBRARY_ERRORS = (
    errors.DockerException,
    requests.RequestException,
    urllib3.exceptions.HTTPError,
    http.client.HTTPException,
    OSError,
    msgspec.DecodeError,
)


def mapped(error: Exception) -> SandboxError:
    """Return which of our errors one of the library's is."""
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
    elif isinstance(error, errors.ImageNotFound) or _NO_IMAGE.search(text):
        kind = SandboxImageError
    elif error.status_code == 409:
        kind = SandboxConflictError
    elif error.status_code in (400, 403):
        kind = SandboxRefusedError
    elif error.status_code in (502, 503, 504):
        kind = SandboxEngineError
    return kind(f"docker: {text}")


# --- what the engine answers ------------------------------------------------------------------------------------------


class _Port(msgspec.Struct, rename="pascal"):
    private_port: int
    type: str
    ip: str = msgspec.field(name="IP", default="")
    public_port: int | None = None


class _Network(msgspec.Struct, rename="pascal"):
    ip_address: str = msgspec.field(name="IPAddress", default="")


class _Networks(msgspec.Struct, rename="pascal"):
    networks: dict[str, _Network] | None = None


class _Volume(msgspec.Struct, rename="pascal"):
    type: str = ""
    name: str = ""


class Listed(msgspec.Struct, rename="pascal"):
    """A container in a list: of some 3 KB only what is needed, as a list of a thousand holds the interpreter."""

    id: str
    state: str = ""
    names: list[str] = []
    labels: dict[str, str] | None = None
    ports: list[_Port] | None = None
    network_settings: _Networks | None = None
    size_rw: int = 0
    mounts: list[_Volume] | None = None

    def found(self) -> Found:
        """Return it as a sandbox."""
        networks = (self.network_settings.networks if self.network_settings else None) or {}
        ports = [(each.private_port, each.ip, each.public_port) for each in self.ports or () if each.type == "tcp"]
        place = _place(self.id, self.names[0] if self.names else "", (n.ip_address for n in networks.values()), ports)
        return Found(self.id, self.labels or {}, self.state == "running", place)


class _Actor(msgspec.Struct, rename="pascal"):
    id: str = msgspec.field(name="ID")
    attributes: dict[str, str] = {}


class Event(msgspec.Struct, rename="pascal"):
    """Something that happened to a container."""

    action: str
    actor: _Actor
    time: int = msgspec.field(name="time", default=0)


class _VolumeUsage(msgspec.Struct, rename="pascal"):
    size: int = -1


class _UsedVolume(msgspec.Struct, rename="pascal"):
    name: str
    usage_data: _VolumeUsage | None = None


class _DiskUsage(msgspec.Struct, rename="pascal"):
    volumes: list[_UsedVolume] | None = None


_LISTED = msgspec.json.Decoder(list[Listed])
EVENT = msgspec.json.Decoder(Event)
_DISK_USAGE = msgspec.json.Decoder(_DiskUsage)


def _place(handle: str, name: str, addresses: Iterable[str], published: Iterable[tuple[int, str, int | None]]) -> Place:
    ports: dict[int, tuple[str, int]] = {}
    for inside, host, outside in published:
        if outside:
            ports.setdefault(inside, (host if host not in ("", "0.0.0.0", "::") else "127.0.0.1", outside))  # noqa: S104 - read, not bound
    address = next((each for each in addresses if each), "")
    return Place(handle, address, ports, {"container": name.removeprefix("/")})


def place_of(info: Json) -> Place:
    """Return where a container is, from what the engine tells of it alone."""
    settings = info["NetworkSettings"]
    published = [
        (int(inside.partition("/")[0]), bound["HostIp"], int(bound["HostPort"]))
        for inside, bindings in (settings["Ports"] or {}).items()
        if inside.endswith("/tcp")
        for bound in bindings or ()
    ]
    addresses = (each.get("IPAddress", "") for each in (settings["Networks"] or {}).values())
    return _place(info["Id"], info["Name"], addresses, published)


# --- answers that stream ----------------------------------------------------------------------------------------------


class Stream:
    """An answer that goes on for long, read by a thread of its own until it ends or is closed."""

    def __init__(self, name: str, ask: Callable[[], Any], read: Callable[[Any], None]) -> None:
        """Do nothing yet; `ask` returns the library's response, `read` reads it to its end."""
        self.ended: Future[Exception | None] = Future()
        self.ended.set_running_or_notify_cancel()  # nobody who waits for it can cancel it
        self._opened: Future[None] = Future()
        self._ask = ask
        self._read = read
        self._lock = threading.Lock()
        self._twin: socket.socket | None = None
        self._is_closed = False
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)

    def open(self, timeout_s: float) -> None:
        """Wait until the engine begins to answer; not to be called on the event loop. Raises the library's errors."""
        self._thread.start()
        self._opened.result(timeout_s)

    def close(self) -> None:
        """End it and its thread, promptly; never waits."""
        with self._lock:
            self._is_closed = True
            if self._twin is not None:
                with contextlib.suppress(OSError):
                    self._twin.shutdown(socket.SHUT_RDWR)

    def _run(self) -> None:
        why: Exception | None = None
        try:
            with self._ask() as response:
                raise_for_status(response)
                if self._can_begin(response):
                    self._read(response)
        except Exception as error:
            why = error
        finally:
            with self._lock:
                if self._twin is not None:
                    self._twin.close()
                    self._twin = None
            if not self._opened.done():
                self._opened.set_exception(why or SandboxEngineError("the stream was closed"))
            self.ended.set_result(why)

    def _can_begin(self, response: Any) -> bool:
        """Keep a second hand on the connection: shutting that down ends a read that waits in another thread."""
        with self._lock:
            if self._is_closed:
                return False
            with contextlib.suppress(OSError):
                self._twin = socket.socket(fileno=os.dup(response.raw.fileno()))
        self._opened.set_result(None)
        return True


class Output:
    """The last of what a container or a command inside it says, on both of its streams."""

    def __init__(self) -> None:
        self._tail = b""

    def read(self, response: Any) -> None:
        """Read frames to the end: a head of 8 bytes, of which the last 4 are the length of what follows."""
        while len(head := response.raw.read(8)) == 8:
            left = int.from_bytes(head[4:], "big")
            while left > 0 and (data := response.raw.read(min(left, 65536))):
                left -= len(data)
                self._tail = (self._tail + data)[-_OUTPUT_BYTES:]

    def __str__(self) -> str:
        lines = self._tail.decode(errors="replace").strip().splitlines()
        return "\n".join(lines[-_TOLD_LINES:])


def raise_for_status(response: Any) -> None:
    """Raise the library's error for an answer that is one."""
    try:
        response.raise_for_status()
    except requests.HTTPError as error:
        errors.create_api_error_from_http_exception(error)


# --- connections ------------------------------------------------------------------------------------------------------


class _UnixConnection(UnixHTTPConnection):  # type: ignore[misc]
    def connect(self) -> None:
        """Connect; the library's own leaves the socket of a failed attempt to the garbage collector."""
        self.sock = socket.socket(socket.AF_UNIX)
        try:
            self.sock.settimeout(self.timeout)
            self.sock.connect(self.unix_socket)
        except OSError:
            self.close()
            raise


class _UnixPool(UnixHTTPConnectionPool):  # type: ignore[misc]
    def _new_conn(self) -> _UnixConnection:
        return _UnixConnection(self.base_url, self.socket_path, self.timeout)


class _UnixAdapter(UnixHTTPAdapter):  # type: ignore[misc]
    """Connections to the engine's socket that are kept and used again.

    The library's own keeps a pool for each URL and closes the oldest of 25, perhaps just before another thread uses it.
    """

    def __init__(self, socket_path: str, timeout_s: float) -> None:
        super().__init__(f"http+unix://{socket_path}", timeout_s)
        self._pool = _UnixPool("http+docker://localhost", socket_path, timeout_s, maxsize=_KEPT_CONNECTIONS)

    def get_connection(self, url: str, proxies: Mapping[str, str] | None = None) -> _UnixPool:  # noqa: ARG002 - its signature
        """Return the one pool."""
        return self._pool

    def close(self) -> None:
        """Close the connections that nobody uses."""
        self._pool.close()


def connect(url: str, timeout_s: float) -> APIClient:
    """Return a client of the engine at `url`, or where the environment says. Waits; raises the library's errors."""
    options = kwargs_from_env()
    if url:
        options["base_url"] = url
    with contextlib.closing(_new_client(options, _OLDEST_VERSION, timeout_s)) as client:
        version: str = client.version(api_version=False)["ApiVersion"]
    return _new_client(options, version, timeout_s)


def _new_client(options: Mapping[str, Any], version: str, timeout_s: float) -> APIClient:
    client = APIClient(**options, version=version, timeout=timeout_s)
    adapter = client.adapters.get("http+docker://")
    if isinstance(adapter, UnixHTTPAdapter):
        client.mount("http+docker://", _UnixAdapter(adapter.socket_path, timeout_s))
        client.trust_env = False  # neither proxies nor .netrc, read anew for each request, are for a socket
    return client


def url_of(client: APIClient, path: str) -> str:
    """Return the URL of a path of the engine's API."""
    return f"{client.base_url}/v{client.api_version}{path}"


def encoded(filters: Mapping[str, Sequence[str]]) -> str:
    """Return filters as a query has them."""
    return quote(msgspec.json.encode(filters))


def get_bytes(client: APIClient, path: str) -> bytes:
    """Return an answer as it comes: the library would make objects of all that is in it."""
    response = client.get(url_of(client, path), timeout=client.timeout)
    raise_for_status(response)
    return response.content  # type: ignore[no-any-return]


def list_all(client: APIClient, filters: Mapping[str, Sequence[str]], *, with_sizes: bool = False) -> list[Listed]:
    """Return containers, running or not; `with_sizes`, also what each has written, which takes the engine a while."""
    return _LISTED.decode(
        get_bytes(client, f"/containers/json?all=1&size={int(with_sizes)}&filters={encoded(filters)}")
    )


def labels_of(listed: Listed) -> Mapping[str, str]:
    """Return a container's labels."""
    return listed.labels or {}


def none_if_missing(function: Callable[..., T], *args: Any) -> T | None:
    """Call it; return None if what it asks for is not there."""
    try:
        return function(*args)
    except errors.NotFound:
        return None


def ignoring(function: Callable[..., Any], *args: Any, **kwargs: Any) -> None:
    """Call it; that what it is for is gone, not running or in use is no error."""
    try:
        function(*args, **kwargs)
    except errors.APIError as error:
        if error.status_code not in (404, 409):
            raise


# --- what is asked ----------------------------------------------------------------------------------------------------


def volume_bytes_of(client: APIClient) -> dict[str, int]:
    """Return for each volume of the engine's how large it is."""
    volumes = _DISK_USAGE.decode(get_bytes(client, "/system/df?type=volume")).volumes or []
    return {each.name: max(0, each.usage_data.size) for each in volumes if each.usage_data is not None}


def memory_bytes_of(client: APIClient, handle: str) -> int | None:
    """Return what a container's processes hold, as `docker stats` counts it: without the page cache that can go."""
    stats = none_if_missing(lambda: client.stats(handle, stream=False, one_shot=True))
    memory = (stats or {}).get("memory_stats") or {}
    if "usage" not in memory:
        return None
    details = memory.get("stats") or {}
    cache_bytes = details.get("total_inactive_file", details.get("inactive_file", 0))  # cgroup 1, cgroup 2
    return max(0, int(memory["usage"]) - int(cache_bytes))
