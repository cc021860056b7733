"""How a Docker engine is reached with its library: connections that are kept, and requests that it has no call for.

All of this waits: it is called in threads.
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
"""Of the engine's API: the first that tells memory without waiting for a second sample."""
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


def raise_for_status(response: Any) -> None:
    """Raise the library's error for an answer that is one."""
    try:
        response.raise_for_status()
    except requests.HTTPError as error:
        errors.create_api_error_from_http_exception(error)


def get_bytes(client: APIClient, path: str) -> bytes:
    """Return an answer as it comes: the library would make objects of all that is in it."""
    response = client.get(url_of(client, path), timeout=client.timeout)
    raise_for_status(response)
    return response.content  # type: ignore[no-any-return]


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


def try_to_remove(client: APIClient, handle: str) -> bool:
    """Remove a container with its anonymous volumes; say whether it is gone, or somebody's removal not yet over."""
    try:
        client.remove_container(handle, force=True, v=True)
    except errors.NotFound:
        return True
    except errors.APIError as error:
        if error.status_code != 409:
            raise
        return False
    return True
