"""All that the flow of a turn knows of the client: an exchange with it.

Theory of operation
===================
A turn is one request, read whole, and one answer, written whole or piece by piece. The flow (`proxy/turns/`) is written
against the protocols below, so it runs on any server that has them, and on fakes.

The server of a connection
- reads the head, has the guard check it, reads the body, and makes an `Exchange` of it;
- runs the flow as a task of its own, in a context of its own: the request's id and its key are context variables;
- cancels that task when the client leaves, and only then. A client that only ended its requests has not left;
- answers what the flow raises: a `ThunderAgentError` becomes an answer in the format of the called API if none was
  begun; `ConnectionError` means that the client is gone, and there is nobody to tell;
- adds to every head what all answers have: the request's id, who may read it, `Date`, and the framing of the body.

A write never blocks and never buffers without limit. Its return value says whether more is wanted: None for *go on*, or
something to await before the next piece. So a stream whose client keeps up is carried from the engine's socket to the
client's in one call for each piece (`ReplicaClient.pipe`), and no task is woken for it.
"""

# compiled: each turn passes here

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Any, Protocol

from multidict import CIMultiDict, CIMultiDictProxy

from thunderagent.proxy.reading.target import Target

Wait = Awaitable[None] | None
"""What to await before doing anything more; usually None."""

Sink = Callable[[bytes], Wait]
"""Takes a piece of a body as it arrives. While its result is awaited, no other comes and the sender waits."""


async def done(wait: Wait) -> None:
    """Wait until a write is done, if it is not yet."""
    if wait is not None:
        await wait


class KeptBody(Protocol):
    """Counts a body that is kept until its turn may run."""

    def release(self) -> None:
        """Stop counting it; idempotent."""


class Channel(Protocol):
    """A client's bytes after the head of a request for another protocol."""

    def pour(self, sink: Callable[[bytes], None]) -> None:
        """Pass to `sink` what has arrived, and later bytes as they arrive."""

    def hold(self) -> None:
        """Make the client wait."""

    def go_on(self) -> None:
        """Accept more bytes."""


class Exchange(Protocol):
    """One request as read, and its answer as written. It is answered once."""

    @property
    def method(self) -> str:
        """Return the method, in capitals."""

    @property
    def target(self) -> Target:
        """Return the request's target."""

    @property
    def headers(self) -> CIMultiDictProxy[str]:
        """Return the headers as received, including hop-by-hop ones. Bytes that are not UTF-8 are surrogates."""

    @property
    def notes(self) -> dict[str, Any]:
        """Return what was derived from the head alone, by name of the deriving part; equal heads share it."""

    @property
    def body(self) -> bytes:
        """Return the whole body, without its framing, still in its content encoding."""

    @property
    def kept(self) -> KeptBody | None:
        """Return the body's counter; None for one that came with its head, which is not counted."""

    @property
    def channel(self) -> Channel | None:
        """Return the channel for the client's bytes after the head, if it asks for a websocket."""

    @property
    def begun(self) -> bool:
        """Whether the head of an answer was sent: afterwards only its body can report anything."""

    def answer(self, status: int, reason: str, headers: CIMultiDict[str], body: bytes) -> Wait:
        """Answer with a whole body, whose length is added here. A client that reads nothing for too long is cut off.

        The result, when awaited, raises `ConnectionError` if the client left, or was cut off.
        """

    def begin(self, status: int, reason: str, headers: CIMultiDict[str]) -> Wait:
        """Send a head now; its body ends with `end`. Raises as `answer` does."""

    def write(self, data: bytes) -> Wait:
        """Send a non-empty piece of the body. Raises as `answer` does."""

    def end(self) -> Wait:
        """End the body. Raises as `answer` does."""

    def cut(self) -> None:
        """Close the client's connection, which is how HTTP marks a started answer as incomplete."""
