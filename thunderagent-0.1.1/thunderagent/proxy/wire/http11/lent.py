"""A connection lent to another protocol for one request: aiohttp answers what is not a turn, on the same port.

The borrower sees a transport of its own, and the bytes of one request as received. When it has answered, the connection
goes on as if nothing had happened; so a client that asks for its models, or releases its program, pays for that only
once. The end of the request was found before. A borrower that finds another end waits for more, or leaves some: it
never gets anything of the next request. Only a connection that switches its protocol is never returned.
"""

# interpreted: it is made from asyncio's transport, and carries no turn

from __future__ import annotations

import asyncio
from collections.abc import Iterable
from types import NoneType
from typing import Any, Protocol

from thunderagent.proxy.wire.http11.chunks import Chunks
from thunderagent.proxy.wire.http11.heads import CHUNKED, RequestHead


class Borrower(Protocol):
    """The answering protocol, such as aiohttp's. It calls `Lent.answered` when it has answered."""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Start with a fresh transport."""

    def connection_lost(self, exc: BaseException | None) -> None:
        """End: the client left, or the request was answered."""

    def data_received(self, data: bytes) -> None:
        """Take bytes of the request."""

    def pause_writing(self) -> None:
        """Write no more for now."""

    def resume_writing(self) -> None:
        """Write more."""


class Lender(Protocol):
    """The connection that is lent."""

    is_paused: bool
    """Whether nothing is read from it for now."""

    def answered(self, *, stays: bool) -> object:
        """Note that the request was answered, and whether the connection may carry another."""

    def pause_reading(self) -> None:
        """Make the client wait."""

    def resume_reading(self) -> None:
        """Accept more bytes."""


class Lent(asyncio.Transport):
    """The transport that a borrower sees. After the connection is returned it is disconnected."""

    def __init__(self, lender: Lender, transport: asyncio.Transport, head: RequestHead, borrower: Borrower) -> None:
        """Lend `transport` to `borrower` for the request with this head."""
        super().__init__()
        self.get_extra_info = transport.get_extra_info  # type: ignore[method-assign]  # aiohttp asks five times
        self.is_closing = transport.is_closing  # type: ignore[method-assign]  # and this before each write
        self.resume_reading = NoneType  # type: ignore[method-assign]  # and this twice, of what nobody paused
        self._lender = lender
        self._transport: asyncio.Transport | None = transport
        self._borrower: Borrower | None = borrower
        self.head = head
        self.begun = False
        """Whether the borrower wrote something."""
        self._is_endless = head.upgrades
        self._left_bytes = max(0, head.length)
        self._chunks = Chunks() if head.length == CHUNKED else None
        self.is_whole = not head.upgrades and not head.length
        """Whether all of the request arrived; what follows does not belong to the borrower."""
        borrower.connection_made(self)

    def __repr__(self) -> str:
        return f"<Lent to {self._borrower!r}>"

    def feed(self, data: bytes, head: bytes = b"") -> bytes:
        """Pass its part of `data` to the borrower, at first after its `head`; return the rest.

        Raises `NotHttpError` for chunks that are none: the borrower would wait for the rest of a body.
        """
        rest = b""
        if self._chunks is not None and not self._is_endless:
            if data:
                self._chunks.feed(data)
            self.is_whole = self._chunks.is_whole
        elif not self._is_endless:
            data, rest = data[: self._left_bytes], data[self._left_bytes :]
            self._left_bytes -= len(data)
            self.is_whole = not self._left_bytes
        if self._borrower is not None:
            self._borrower.data_received(head + data)
        return rest

    def answered(self, *, keeps_alive: bool) -> None:
        """Return the connection, for another request if possible. For the borrower, in its last call."""
        is_followed = self._chunks is not None and self._chunks.is_followed  # as far as the borrower has seen
        stays = keeps_alive and self.is_whole and not is_followed
        asyncio.get_running_loop().call_soon(self._return, stays)

    def _return(self, stays: bool) -> None:
        borrower, lender = self._borrower, self._lender
        if self._transport is None or borrower is None:
            return
        self._transport = self._borrower = None
        del self.is_closing
        self.close = NoneType  # type: ignore[method-assign]  # aiohttp closes what it no longer has
        borrower.connection_lost(None)
        lender.answered(stays=stays)

    # --- for the connection --------------------------------------------------------------------------------------

    def lost(self, exc: BaseException | None) -> None:
        """End: the client left."""
        borrower = self._borrower
        self._transport = self._borrower = None
        if borrower is not None:
            del self.is_closing
            borrower.connection_lost(exc)

    def full(self) -> None:
        """Make the borrower wait."""
        if self._borrower is not None:
            self._borrower.pause_writing()

    def has_room(self) -> None:
        """Let the borrower go on."""
        if self._borrower is not None:
            self._borrower.resume_writing()

    # --- a transport ---------------------------------------------------------------------------------------------

    def write(self, data: Any) -> None:
        """Write, if the connection is still lent."""
        if self._transport is not None:
            self.begun = True
            self._transport.write(data)

    def writelines(self, list_of_data: Iterable[Any]) -> None:
        """Write, if the connection is still lent."""
        if self._transport is not None:
            self.begun = True
            self._transport.writelines(list_of_data)

    def close(self) -> None:
        """Close the connection, if it is still lent."""
        if self._transport is not None:
            self._transport.close()

    def abort(self) -> None:
        """Cut the connection, if it is still lent."""
        if self._transport is not None:
            self._transport.abort()

    def is_closing(self) -> bool:
        """Return whether nothing can be written any more: the connection is not lent any more."""
        return True

    def pause_reading(self) -> None:
        """Make the client wait."""
        if self._transport is not None:
            self.__dict__.pop("resume_reading", None)
            self._lender.pause_reading()

    def resume_reading(self) -> None:
        """Accept more bytes."""
        if self._transport is not None and self._lender.is_paused:
            self._lender.resume_reading()

    def get_write_buffer_size(self) -> int:
        """Return how much the client has not read."""
        return 0 if self._transport is None else self._transport.get_write_buffer_size()
