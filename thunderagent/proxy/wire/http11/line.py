"""A client's connection as seen by its request and its server."""

# compiled: each turn passes here, on both sides

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Generator
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Protocol

from thunderagent.proxy.wire.http11.heads import KnownHeads, RequestHead, known_requests
from thunderagent.proxy.wire.http11.lent import Borrower
from thunderagent.proxy.wire.http11.limits import Sweep

if TYPE_CHECKING:
    from thunderagent.proxy.wire.http11.asked import Asked
    from thunderagent.proxy.wire.http11.server import Connection

Handler = Callable[["Asked"], Awaitable[None]]


class Line(Protocol):
    """The connection that a request came on."""

    transport: asyncio.Transport | None
    """The transport to write to; None once the client left."""
    is_full: bool
    """Whether the client reads nothing for now."""
    closes: bool
    """Whether it ends with the pending answer."""

    @property
    def may_stay(self) -> bool:
        """Whether the connection may carry another request."""

    def answered(self) -> None:
        """Note that the last byte of the answer was written."""

    def cut(self) -> None:
        """End the connection with what was written so far."""

    def pause_reading(self) -> None:
        """Make the client wait."""

    def resume_reading(self) -> None:
        """Accept more bytes."""

    async def room(self) -> None:
        """Return when the client has read something. Raises `LeftError`."""


class Room:
    """An awaitable for room to write; not a coroutine, because it need not be awaited."""

    __slots__ = ("_line",)

    def __init__(self, line: Line) -> None:
        """Wait for the client of this connection."""
        self._line = line

    def __await__(self) -> Generator[Any, Any, None]:
        return self._line.room().__await__()


class Router(Protocol):
    """Says who answers which request."""

    def handler(self, head: RequestHead) -> Handler | None:
        """Return the handler of a request of ours; None for one that is not ours."""

    def borrower(self) -> Borrower:
        """Return a protocol that answers one request that is not ours."""


@dataclass(slots=True, eq=False)
class Settings:
    """Shared settings of a server's connections."""

    router: Router
    sweep: Sweep
    heads: KnownHeads[RequestHead] = field(default_factory=known_requests)
    idle_s: float = 75.0
    """For a head to arrive, from the start or the last answer on."""
    stall_s: float = 120.0
    """A client that reads nothing of its answer for this long is cut off."""
    connections: set[Connection] = field(default_factory=set)
    is_leaving: bool = False
    """Whether each new answer announces that it is its connection's last."""
    is_closing: bool = False
    """Whether each answer is its connection's last, announced or not."""
    _closed: asyncio.Event = field(default_factory=asyncio.Event)

    def ended(self, connection: Connection) -> None:
        """Note that a connection is closed."""
        self.connections.discard(connection)
        if not self.connections:
            self._closed.set()

    async def all_closed(self) -> None:
        """Return when no connection is open."""
        while self.connections:
            self._closed.clear()
            await self._closed.wait()
