"""All that the flow of a turn knows of the client: an exchange with it.

Theory of operation
===================
A turn is one request, read whole, and one answer, written whole or piece by piece. The flow (`proxy/turns/`) is written
against the protocols below, so it runs on any server that has them, and on fakes.

Who serves a connection
- reads the head, has the guard judge it, reads the body, and makes an `Exchange` of it;
- runs the flow as a task of its own, in a context of its own: the request's id and its key are context variables;
- cancels that task when the client leaves, and only then. A client that only ended its requests has not left;
- answers for the flow what it raises: a `ThunderAgentError` becomes an answer in the words of the called API if none
  was begun; `ConnectionError` says that the client is gone, and there is nobody to tell;
- adds to every head what all answers have: the request's id, who may read it, `Date`, and the framing of the body.

A write never blocks and never buffers without end. It says by what it returns whether more is wanted: None for *go on*,
or something to await before the next piece. So a stream whose client keeps up is carried from the engine's socket to
the client's in one call for each piece (`ReplicaClient.pipe`), and no task is woken for it.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Generator
from typing import Any, Protocol

from multidict import CIMultiDict, CIMultiDictProxy

from thunderagent.proxy.reading.target import Target

Wait = Awaitable[None] | None
"""What must be awaited before anything more is done; None, as a rule, if nothing must."""

Sink = Callable[[bytes], Wait]
"""Takes a piece of a body as it comes. While what it returned is awaited, no other comes and the sender waits."""


class _Others:
    """Lets what waits for the event loop go first, for less than `asyncio.sleep(0)` costs."""

    def __await__(self) -> Generator[None, None, None]:
        yield


OTHERS_FIRST = _Others()


async def done(wait: Wait) -> None:
    """Wait until a write is done, if that takes time."""
    if wait is not None:
        await wait


class KeptBody(Protocol):
    """Counts a body that is kept until its turn may run."""

    def release(self) -> None:
        """Count it no longer; idempotent."""


class Channel(Protocol):
    """What a client says after the head of a request that asked for another protocol."""

    def pour(self, sink: Callable[[bytes], None]) -> None:
        """Give `sink` what came, and from now on what comes, as it comes."""

    def hold(self) -> None:
        """Have the client wait."""

    def go_on(self) -> None:
        """Let more come."""


class Exchange(Protocol):
    """One request as it was read, and its answer as it is written. It is answered once."""

    @property
    def method(self) -> str:
        """Return the method, in capitals."""

    @property
    def target(self) -> Target:
        """Return what is asked for."""

    @property
    def headers(self) -> CIMultiDictProxy[str]:
        """Return the request's headers as they came, hop-by-hop ones too. Bytes that are not UTF-8 are surrogates."""

    @property
    def notes(self) -> dict[str, Any]:
        """Return what was made of the head alone, by names of who made it; requests with the same head share it."""

    @property
    def body(self) -> bytes:
        """Return the whole body, without its framing, still encoded if it came so."""

    @property
    def kept(self) -> KeptBody | None:
        """Return what counts the body; None for one that came with its head, which nobody counts."""

    @property
    def channel(self) -> Channel | None:
        """Return the way for what its client says after the head, if it asks for a websocket."""

    @property
    def begun(self) -> bool:
        """Whether the head of an answer was sent: from then on only its body can tell of anything."""

    def answer(self, status: int, reason: str, headers: CIMultiDict[str], body: bytes) -> Wait:
        """Answer with a whole body, whose length is counted here. A client that takes nothing for too long is cut off.

        What is returned raises `ConnectionError` if the client left, or was cut off.
        """

    def begin(self, status: int, reason: str, headers: CIMultiDict[str]) -> Wait:
        """Send a head now, of a body that ends with `end`. Raises as `answer` does."""

    def write(self, data: bytes) -> Wait:
        """Send a piece of the body, which is not empty. Raises as `answer` does."""

    def end(self) -> Wait:
        """End the body. Raises as `answer` does."""

    def cut(self) -> None:
        """Close the client's connection, which is how HTTP says that an answer that has begun is not whole."""
