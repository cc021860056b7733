"""Name lookups that a dead name server cannot stall.

A lookup blocks a thread until the system gives up, which may take half a minute, and cannot be interrupted. uvloop's
own lookups run in four threads, which four dead names fill, so the others wait behind them; and it ends only with the
last. Here each has a daemon thread of its own, and concurrent requests for a name wait for the same lookup: there are
never more threads than names. All connections of a process whose event loop is `Loop` use these lookups: aiohttp and
httpx2 ask the loop for addresses, and others, as those to engines for turns, have it connect to a name.
"""

from __future__ import annotations

import asyncio
import contextlib
import socket
import threading
from collections.abc import Callable
from ipaddress import ip_address
from typing import Any

import uvloop

Addresses = list[tuple[Any, ...]]
Key = tuple[Any, ...]
"""Host, port, family, type, protocol, flags: as `socket.getaddrinfo` takes them."""


class Lookups:
    """Runs lookups, each in a thread, at most one per name at a time."""

    def __init__(self, lookup: Callable[..., Any] = socket.getaddrinfo) -> None:
        """Look up by `lookup`, which may block."""
        self._lookup = lookup
        self._pending: dict[Key, asyncio.Future[Addresses]] = {}

    async def find(self, key: Key) -> Addresses:
        """Return the result. Raises OSError; a cancelled caller leaves the lookup to others."""
        future = self._pending.get(key)
        if future is None:
            future = asyncio.get_running_loop().create_future()
            try:
                threading.Thread(target=self._run, args=(key, future), name=f"lookup {key[0]}", daemon=True).start()
            except RuntimeError as error:  # the limit of threads is reached; the next request tries again
                raise OSError(str(error)) from None
            self._pending[key] = future
            future.add_done_callback(lambda done: self._forget(key, done))
        return await asyncio.shield(future)

    def _run(self, key: Key, future: asyncio.Future[Addresses]) -> None:
        try:
            found, error = self._lookup(*key), None
        except (OSError, UnicodeError) as caught:
            found, error = [], caught
        with contextlib.suppress(RuntimeError):  # the loop is closed: nobody waits any more
            future.get_loop().call_soon_threadsafe(_resolve, future, found, error)

    def _forget(self, key: Key, done: asyncio.Future[Addresses]) -> None:
        del self._pending[key]
        if not done.cancelled():
            done.exception()  # all callers may be gone: that is no reason for a warning


def _resolve(future: asyncio.Future[Addresses], found: Addresses, error: Exception | None) -> None:
    if future.cancelled():
        return
    if error is None:
        future.set_result(found)
    else:
        future.set_exception(error)


class Loop(uvloop.Loop):
    """uvloop's event loop with these lookups."""

    def __init__(self, lookups: Lookups | None = None) -> None:
        """Create a loop."""
        super().__init__()
        self._lookups = lookups or Lookups()

    async def getaddrinfo(
        self,
        host: Any,
        port: Any,
        *,
        family: int = 0,
        type: int = 0,  # noqa: A002 - the base class's
        proto: int = 0,
        flags: int = 0,
    ) -> Any:
        """Return a name's addresses, as `socket.getaddrinfo` does."""
        return await self._lookups.find((host, port, family, type, proto, flags))

    async def create_connection(
        self, protocol_factory: Callable[[], Any], host: Any = None, port: Any = None, **options: Any
    ) -> Any:
        """Connect to the first of a name's addresses that accepts; raise the last one's error if none does.

        uvloop's own would not call `getaddrinfo` above. An address needs no lookup.
        """
        if not isinstance(host, str) or _is_address(host):
            return await super().create_connection(protocol_factory, host, port, **options)
        asked = {name: options.pop(name) for name in ("family", "proto", "flags") if name in options}
        *others, last = await self.getaddrinfo(host, port, type=socket.SOCK_STREAM, **asked)
        if options.get("ssl"):
            options["server_hostname"] = options.get("server_hostname") or host
        for *_, address in others:
            with contextlib.suppress(OSError):
                return await super().create_connection(protocol_factory, *_host_and_port(address), **options)
        return await super().create_connection(protocol_factory, *_host_and_port(last[-1]), **options)


def _host_and_port(address: tuple[Any, ...]) -> tuple[str, int]:
    host, port, *more = address
    return (f"{host}%{more[1]}" if more and more[1] else host), port  # a link-local address needs its scope


def _is_address(host: str) -> bool:
    try:
        ip_address(host)
    except ValueError:
        return False
    return True
