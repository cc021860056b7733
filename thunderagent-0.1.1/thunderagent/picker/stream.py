"""One HTTP exchange as Envoy reports it, message by message, and the answers."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Coroutine
from typing import Any, Protocol

from thunderagent.picker import messages
from thunderagent.proxy.wire.errors import ErrorAnswer


class Duplex(Protocol):
    """A stream of gRPC."""

    async def read(self) -> Any:
        """Return the next message; anything else is the end."""

    async def write(self, message: Any) -> None:
        """Send a message."""


class Stream:
    """Keeps reading while something else is waited for, so that the end of the exchange is noticed at once."""

    def __init__(self, duplex: Duplex) -> None:
        """Start before the first message."""
        self._duplex = duplex
        self._reading: asyncio.Task[Any] | None = None
        self._read: deque[Any] = deque()
        self.write: Callable[[Any], Coroutine[Any, Any, None]] = duplex.write
        self.has_ended = False

    async def read(self) -> Any:
        """Return the next message; None when Envoy ended the exchange."""
        if self._read:
            return self._read.popleft()
        if self.has_ended:
            return None
        reading, self._reading = self._reading, None
        message = await (reading if reading is not None else self._duplex.read())
        return self._checked(message)

    def _checked(self, message: Any) -> Any:
        if not isinstance(message, messages.ProcessingRequest):
            self.has_ended = True
            return None
        return message

    async def until(self, task: asyncio.Task[Any]) -> bool:
        """Wait for a task; return False if Envoy ended the exchange before that.

        The request is complete by then. If something arrives all the same, one message is kept, and nothing more is
        read.
        """
        while not task.done():
            if self._read:
                await asyncio.wait({task})
                return True
            if self._reading is None:
                self._reading = asyncio.ensure_future(self._duplex.read())
            await asyncio.wait({task, self._reading}, return_when=asyncio.FIRST_COMPLETED)
            if self._reading.done() and not task.done():
                reading, self._reading = self._reading, None
                message = self._checked(reading.result())
                if message is None:
                    return False
                self._read.append(message)
        return True

    def close(self) -> None:
        """Stop reading."""
        if self._reading is not None:
            self._reading.cancel()

    async def write_body(self, kind: str, body: bytes, *, ends: bool) -> None:
        """Forward a part of a body."""
        for part in messages.body_parts(kind, body, ends=ends):
            await self.write(part)

    async def refuse(self, answer: ErrorAnswer) -> None:
        """Make Envoy answer instead of an engine."""
        message = messages.ProcessingResponse()
        immediate = message.immediate_response
        immediate.status.code, immediate.body = answer.status, answer.body
        messages.mutate(immediate.headers, list(answer.headers.items()))
        await self.write(message)

    async def echo(self, message: Any) -> None:
        """Forward a part unchanged."""
        for kind in ("request_body", "response_body"):
            if message.HasField(kind):
                part = getattr(message, kind)
                await self.write_body(kind, part.body, ends=part.end_of_stream)
                return
        reply = messages.ProcessingResponse()
        for kind in ("request_trailers", "response_trailers", "response_headers"):
            if message.HasField(kind):
                getattr(reply, kind).SetInParent()
                if kind == "response_headers":
                    reply.response_headers.response.SetInParent()
                await self.write(reply)
                return
