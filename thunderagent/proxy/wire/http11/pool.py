"""The connections to one replica: each carries one request at a time, and is kept for the next."""

# compiled: each turn passes here, on both sides

from __future__ import annotations

import asyncio
import re
from base64 import b64encode
from contextlib import suppress
from functools import partial
from math import inf
from ssl import SSLContext, create_default_context
from typing import Any, Final, NamedTuple
from urllib.parse import urlsplit

from multidict import CIMultiDict
from yarl import URL

from thunderagent.proxy.wire.failures import ClosedError, ConnectLateError, StaleError, UnreachedError
from thunderagent.proxy.wire.http11.answers import Answer
from thunderagent.proxy.wire.http11.client import Connection
from thunderagent.proxy.wire.http11.heads import CONTENT_LENGTH, known_answers, written
from thunderagent.proxy.wire.http11.limits import Limits, Pause, Sweep

_BODILESS_METHODS: Final = frozenset({"GET", "HEAD", "OPTIONS", "TRACE"})
"""Without a body they have no Content-Length header either."""

_IDEMPOTENT_METHODS: Final = _BODILESS_METHODS | {"PUT", "DELETE"}
"""RFC 9110, 9.2.2."""

CROWD_S: Final = 0.1
"""A request is alone if no two were on their way for this long."""

STALE_WITHIN_S: Final = 1.0
"""A kept connection that dies later than this after a request was not stale: the engine had the request."""

_SENDABLE: Final = re.compile(r"/[!\"$-~]*")
"""Printable ASCII without `#`: no server can see an earlier end of such a path."""


class _Site(NamedTuple):
    """The data of a base URL for every request to it."""

    host: str
    port: int
    is_secure: bool
    path: str
    lines: tuple[str, ...]
    """Lines of each head after its first."""
    idle: list[Connection]
    """Connections there without a request; the newest is last, and is taken first."""


class Pool:
    """The connections to one replica, and the number of requests on them."""

    def __init__(
        self,
        sweep: Sweep,
        pause: Pause,
        rank_headers: tuple[tuple[str, str], ...] = (),
        *,
        ssl_context: SSLContext | None = None,
        keepalive_s: float = 4.0,
    ) -> None:
        """Use `sweep` for limits; `rank_headers` replace the client's in every request.

        A connection idle for longer than `keepalive_s` gets no request, and is closed. `ssl_context` says which
        certificates to trust if a URL begins with https; None is the system's.
        """
        self._sweep = sweep
        self._ssl_context = ssl_context
        self._keepalive_s = keepalive_s
        self.pause = pause
        """Whether the replica is paused."""
        self._sites: dict[str, _Site] = {}
        self._idle: dict[tuple[str, int, bool], list[Connection]] = {}
        self._connections: set[Connection] = set()
        self._heads = known_answers()
        self._loop = asyncio.get_running_loop()
        self.rank_headers = rank_headers
        self.requests_count = 0
        self._crowded_s = -inf
        """When two requests were last on their way at once."""
        self._is_closed = False
        self._all_closed: asyncio.Future[None] | None = None

    async def close(self) -> None:
        """Close all connections at once; requests on them fail as if the replica had closed them."""
        self._is_closed = True
        for connection in list(self._connections):
            connection.give_up()
        if self._connections:
            self._all_closed = self._loop.create_future()
            await self._all_closed

    def lose(self, why: str, sent_ago_s: float = 0.0) -> None:
        """Fail all requests sent so long ago, because the replica was declared lost; later ones get new connections."""
        sent_s = self._loop.time() - sent_ago_s
        for connection in list(self._connections):
            if connection.sent_s <= sent_s:
                connection.lose(why)

    async def request(
        self,
        method: str,
        base_url: str,
        path: str,
        headers: CIMultiDict[str],
        body: bytes | None,
        limits: Limits,
        *,
        may_repeat: bool = False,
    ) -> Answer:
        """Send a request and return its answer's head; the request counts until the answer is complete or closed.

        It is sent again, on a new connection, if a kept one dies at once: the engine just closed it. It is not if that
        might execute something twice: it was written, and neither the method nor `may_repeat` allows it. Raises
        `UnreachedError`, `ConnectLateError` or a kind of `Failure`, which reading the body may raise, too; and
        `ValueError` for a URL or headers that cannot be sent.
        """
        site = self._sites.get(base_url) or self._site(base_url)
        if not _SENDABLE.fullmatch(path):  # it is sent as it was checked, or not at all
            raise ValueError("the path of a request to a replica begins with / and holds no #, space or control")
        if CONTENT_LENGTH in headers:
            headers = headers.copy()
            del headers[CONTENT_LENGTH]
        length_bytes = len(body) if body is not None else 0
        has_length = body is not None or method not in _BODILESS_METHODS
        lines = [f"{method} {site.path}{path} HTTP/1.1", *site.lines]
        head = written(lines, headers, f"Content-Length: {length_bytes}" if has_length else "")
        changes = method == "GET" and "Upgrade" in headers
        begun_s = self.pause.clock_s() if limits.total_s < inf else 0.0
        sent_s = self._loop.time()
        if self.requests_count:
            self._crowded_s = sent_s
        kept = connection = self._idle_connection(site, sent_s)
        while True:
            if connection is None:
                connection = await self._connected(site, limits.connect_s, was_sent=kept is not None)
            self.requests_count += 1  # until the connection reports its end
            alone = sent_s - self._crowded_s > CROWD_S
            waiter = connection.request(method, head, body, limits, begun_s, may_change=changes, is_alone=alone)
            try:
                return connection.answered(await waiter)
            except StaleError:
                may_repeat = may_repeat or connection.is_unsent or method in _IDEMPOTENT_METHODS
                if not may_repeat or self._loop.time() - sent_s > STALE_WITHIN_S:
                    raise
                connection = None
            except BaseException:
                connection.abandoned(waiter)
                raise

    async def _connected(self, site: _Site, connect_s: float, *, was_sent: bool) -> Connection:
        """Return a new connection, for a request that perhaps was sent before: then one had been made."""
        self.requests_count += 1  # connecting is a part of it
        try:
            return await self._connect(site, connect_s)
        except (UnreachedError, ConnectLateError) as error:
            if was_sent:
                raise ClosedError(f"it is gone: {error}") from None
            raise
        finally:
            self.requests_count -= 1

    def _idle_connection(self, site: _Site, now_s: float) -> Connection | None:
        """Return the valid connection that was idle for the shortest time; None if there is none.

        The others age and are closed, so only useful ones stay, and the engine rarely closes one first.
        """
        while site.idle:
            connection = site.idle.pop()
            if connection.is_open and connection.due_s > now_s:
                return connection
            connection.give_up()
        return None

    async def _connect(self, site: _Site, connect_s: float) -> Connection:
        ended, closed = partial(self._ended, site), partial(self._closed, site)
        make: Any = partial(Connection, self._loop, self._sweep, self.pause, ended, closed, self._heads)
        context = (self._ssl_context or _trusting_the_system()) if site.is_secure else None
        try:
            async with asyncio.timeout(connect_s):
                connection: Connection
                _, connection = await self._loop.create_connection(make, site.host, site.port, ssl=context)
        except TimeoutError:
            raise ConnectLateError("the connection was not made in time") from None
        except OSError as error:
            unreached = UnreachedError(str(error) or type(error).__name__)
            unreached.is_refused = isinstance(error, ConnectionRefusedError)
            raise unreached from None
        if self._is_closed:
            connection.give_up()
        if not connection.is_open:
            raise UnreachedError("the pool is closed" if self._is_closed else "it was closed at once")
        self._connections.add(connection)
        self._sweep.add(connection)
        return connection

    def _ended(self, site: _Site, connection: Connection) -> None:
        """Take a connection back whose request ended."""
        self.requests_count -= 1
        if connection.is_open and not self._is_closed:
            site.idle.append(connection)
            connection.keep_until(self._loop.time() + self._keepalive_s)

    def _closed(self, site: _Site, connection: Connection) -> None:
        self._connections.discard(connection)
        with suppress(ValueError):
            site.idle.remove(connection)
        if self._all_closed is not None and not self._connections and not self._all_closed.done():
            self._all_closed.set_result(None)

    def _site(self, base_url: str) -> _Site:
        url = URL(base_url, encoded=True)
        if url.host is None or url.scheme not in ("http", "https") or url.port is None:
            raise ValueError("the URL of a replica begins with http:// or https:// and names a host")
        lines = [f"Host: {url.host_port_subcomponent or ''}"]
        if url.raw_user or url.raw_password:
            login = f"{url.user or ''}:{url.password or ''}"
            lines.append(f"Authorization: Basic {b64encode(login.encode('latin1')).decode()}")
        where = (url.host, url.port, url.scheme == "https")
        site = _Site(*where, urlsplit(base_url).path.rstrip("/"), tuple(lines), self._idle.setdefault(where, []))
        self._sites[base_url] = site
        return site


_default_context: list[SSLContext] = []


def _trusting_the_system() -> SSLContext:
    """Return a context that trusts the system's certificates; created once, because that is slow."""
    if not _default_context:
        _default_context.append(create_default_context())
    return _default_context[0]
