"""Connecting to a Docker engine by its library: persistent connections, and requests without a library call.

All of this blocks: it is called in threads.
"""

from __future__ import annotations

import contextlib
import socket
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar
from urllib.parse import quote

import msgspec
import requests
from docker import APIClient, errors  # type: ignore[import-untyped]
from docker.transport import UnixHTTPAdapter  # type: ignore[import-untyped]
from docker.transport.unixconn import UnixHTTPConnection, UnixHTTPConnectionPool  # type: ignore[import-untyped]
from docker.utils import kwargs_from_env  # type: ignore[import-untyped]

T = TypeVar("T")

_OLDEST_VERSION = "1.41"
"""Of the engine's API: the first that reports memory without waiting for a second sample."""
_KEPT_CONNECTIONS = 32


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
    """Persistent connections to the engine's socket.

    The library's own adapter keeps a pool for each URL and closes the oldest of 25, perhaps just before another thread
    uses it.
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
    """Return a client of the engine at `url`, or the environment's. Blocks; raises the library's errors."""
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
        client.trust_env = False  # proxies and .netrc, read again for each request, do not apply to a socket
    return client


def url_of(client: APIClient, path: str) -> str:
    """Return the URL of a path of the engine's API."""
    return f"{client.base_url}/v{client.api_version}{path}"


def encoded(filters: Mapping[str, Sequence[str]]) -> str:
    """Return filters in query format."""
    return quote(msgspec.json.encode(filters))


def raise_for_status(response: Any) -> None:
    """Raise the library's error for an error answer."""
    try:
        response.raise_for_status()
    except requests.HTTPError as error:
        errors.create_api_error_from_http_exception(error)


def get_bytes(client: APIClient, path: str) -> bytes:
    """Return an answer's raw bytes: the library would build objects of everything in it."""
    response = client.get(url_of(client, path), timeout=client.timeout)
    raise_for_status(response)
    return response.content  # type: ignore[no-any-return]


def none_if_missing(function: Callable[..., T], *args: Any) -> T | None:
    """Call it; return None if its object is missing."""
    try:
        return function(*args)
    except errors.NotFound:
        return None


def ignoring(function: Callable[..., Any], *args: Any, **kwargs: Any) -> None:
    """Call it; ignore that its object is gone, not running or in use."""
    try:
        function(*args, **kwargs)
    except errors.APIError as error:
        if error.status_code not in (404, 409):
            raise


def try_to_remove(client: APIClient, handle: str) -> bool:
    """Remove a container with its anonymous volumes; return whether it is gone, or another removal is still running."""
    try:
        client.remove_container(handle, force=True, v=True)
    except errors.NotFound:
        return True
    except errors.APIError as error:
        if error.status_code != 409:
            raise
        return False
    return True
