"""Heartbeats on a stream whose turn is held: for clients and proxies that give up in a silence.

They commit the answer's head - status 200, and no header that is only known with the lease - so they are sent only if
the operator wants them. Later errors are reported as an event, in the format of the API that was called.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from multidict import CIMultiDict

from thunderagent.errors import ThunderAgentError
from thunderagent.proxy.reading.dialects import Dialect
from thunderagent.proxy.wire.exchange import Exchange, done

COMMENT = b": held\n\n"
"""A comment: readers of events ignore it."""

PING = b'event: ping\ndata: {"type": "ping"}\n\n'
"""The Messages API has an event for it."""

MESSAGES_PATH = "/v1/messages"


class HeldStream:
    """The answer to a held streamed turn: nothing, until the first heartbeat."""

    __slots__ = ("_dialect", "_exchange", "_headers", "_is_messages", "_period_s")

    def __init__(
        self, exchange: Exchange, path: str, dialect: Dialect, period_s: float, headers: dict[str, str]
    ) -> None:
        """Beat every `period_s` on `path`; `headers` are for a head that must be sent before the lease is there."""
        self._exchange = exchange
        self._dialect = dialect
        self._is_messages = path == MESSAGES_PATH
        self._period_s = period_s
        self._headers = headers

    @asynccontextmanager
    async def beating(self) -> AsyncIterator[None]:
        """Send heartbeats for the length of the block, the first after one period."""
        error_of_block: ThunderAgentError | None = None
        async with asyncio.TaskGroup() as group:
            task = group.create_task(self._beat())
            try:
                yield
            except ThunderAgentError as error:  # raised below, where the group does not wrap it
                error_of_block = error
            finally:
                task.cancel()
        if error_of_block is not None:
            raise error_of_block

    async def fail(self, error: ThunderAgentError) -> None:
        """Report an error as an event and end the answer, whose head was sent."""
        await self.end_with(self._dialect.break_off(error.status, error.code, error.message, b""))

    async def refuse(self, body: bytes) -> None:
        """End the answer, whose head was sent, with an engine's refusal: its body as an event."""
        name = b"event: error\n" if self._is_messages else b""
        lines = b"\n".join(b"data: " + line for line in body.splitlines() or [b""])
        await self.end_with(name + lines + b"\n\n")

    async def end_with(self, event: bytes) -> None:
        """Write one last event."""
        assert self._exchange.begun, "nothing was sent yet: answer with a status"
        await done(self._exchange.write(event))
        await done(self._exchange.end())

    async def _beat(self) -> None:
        beat = PING if self._is_messages else COMMENT
        try:
            while True:
                await asyncio.sleep(self._period_s)
                if not self._exchange.begun:
                    head = CIMultiDict({"Content-Type": "text/event-stream; charset=utf-8", **self._headers})
                    await done(self._exchange.begin(200, "OK", head))
                await done(self._exchange.write(beat))
        except ConnectionError:
            return  # the client left: its handler is about to be cancelled
