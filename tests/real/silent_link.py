"""A connection between two processes that can go silent in one direction or both, like a network that drops packets.

Data sent meanwhile arrives after healing, and so do ends of connections: neither side gets a notice. It needs no root,
no network namespace and no packet filter.
"""

from __future__ import annotations

import asyncio
from contextlib import suppress
from typing import Literal

Way = Literal["up", "down"]
"""Up is the direction towards the target."""

PIECE_BYTES = 16_384


class SilentLink:
    """Listens on a port and connects each client to a target: `host:port`, or the path of a Unix socket."""

    def __init__(self, target: str, port: int) -> None:
        """Begin closed."""
        self.port = port
        self.bytes_per_s: float | None = None
        """Rate downwards; None: unlimited."""
        self._target = target
        self._heard: dict[Way, asyncio.Event] = {"up": asyncio.Event(), "down": asyncio.Event()}
        for each in self._heard.values():
            each.set()
        self._server: asyncio.Server | None = None
        self._tasks: set[asyncio.Task[None]] = set()

    @property
    def url(self) -> str:
        """Its URL, for HTTP."""
        return f"http://127.0.0.1:{self.port}"

    async def open(self) -> None:
        """Listen."""
        if self._server is None:
            self._server = await asyncio.start_server(self._connected, "127.0.0.1", self.port, backlog=1024)

    def close(self) -> None:
        """Refuse new connections, like the port of an ended process; open ones continue."""
        if self._server is not None:
            self._server.close()
            self._server = None

    async def end(self) -> None:
        """Close the link with all its connections."""
        self.close()
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    def silence(self, *ways: Way) -> None:
        """Block all data in these directions."""
        for way in ways:
            self._heard[way].clear()

    def heal(self) -> None:
        """Pass all data again."""
        for each in self._heard.values():
            each.set()

    async def _connected(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        with suppress(asyncio.CancelledError):
            await self._join(reader, writer)
        writer.transport.abort()

    async def _join(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        for each in self._heard.values():
            await each.wait()
        host, _, port = self._target.rpartition(":")
        try:
            if host:
                back, forth = await asyncio.open_connection(host, int(port))
            else:
                back, forth = await asyncio.open_unix_connection(self._target)
        except OSError:
            return
        try:
            async with asyncio.TaskGroup() as group:
                group.create_task(self._pump("up", reader, forth))
                group.create_task(self._pump("down", back, writer))
        finally:
            forth.transport.abort()

    async def _pump(self, way: Way, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        data = b"."
        while data:
            try:
                data = await reader.read(PIECE_BYTES)
            except OSError:
                data = b""
            await self._heard[way].wait()
            if way == "down" and self.bytes_per_s is not None:
                await asyncio.sleep(len(data) / self.bytes_per_s)
            with suppress(OSError):
                writer.write(data)
                await writer.drain()
        with suppress(OSError):
            writer.close()
