"""All that the flow of a turn knows of sockets: an exchange with its client, and the answer of an engine.

Theory of operation
===================
A turn is one request, read whole, and one answer, written whole or piece by piece. The flow (`proxy/turns/`) is written
against the three protocols below, so it runs on any server and any client that have them, and on fakes.

Who serves a connection
- reads the head, has the guard judge it, reads the body, and makes an `Exchange` of it;
- runs the flow as a task of its own, in a context of its own: the request's id and its key are context variables;
- cancels that task when the client leaves, and only then. A client that only ended its requests has not left;
- answers for the flow what it raises: a `ThunderAgentError` becomes an answer in the words of the called API if none
  was begun; `ConnectionError` says that the client is gone, and there is nobody to tell;
- adds to every head what all answers have: the request's id, who may read it, `Date`, and the framing of the body.

A write never blocks and never buffers without end. It says by what it returns whether more is wanted: None for *go on*,
or something to await before the next piece. So a stream whose client keeps up is carried from the engine's socket to
the client's in one call for each piece (`Upstream.pipe`), and no task is woken for it.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Protocol, TypeVar

from multidict import CIMultiDict, CIMultiDictProxy

from thunderagent.proxy.reading.target import Target

Wait = Awaitable[None] | None
"""What must be awaited before anything more is done; None, as a rule, if nothing must."""

Sink = Callable[[bytes], Wait]
"""Takes a piece of a body as it comes. While what it returned is awaited, no other comes and the sender waits."""


async def done(wait: Wait) -> None:
    """Wait until a write is done, if that takes time."""
    if wait is not None:
        await wait


class KeptBody(Protocol):
    """Counts a body that is kept until its turn may run."""

    def release(self) -> None:
        """Count it no longer; idempotent."""


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
        """Return the request's headers as they came, hop-by-hop ones too. Bytes that are no UTF-8 are surrogates."""

    @property
    def body(self) -> bytes:
        """Return the whole body, without its framing, still encoded if it came so."""

    @property
    def kept(self) -> KeptBody | None:
        """Return what counts the body; None for one that came with its head, which nobody counts."""

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


class Upstream(Protocol):
    """An answer of an engine whose head is there. Read it to its end, or close it."""

    status: int
    reason: str

    @property
    def headers(self) -> CIMultiDictProxy[str]:
        """Return its headers as they came."""

    @property
    def content_type(self) -> str:
        """Return the media type in lower case, without its parameters; empty if it has none."""

    def close(self) -> None:
        """End the request; its connection is kept only if the answer is whole. Once more changes nothing."""


Answer = TypeVar("Answer", bound=Upstream)


class Sender(Protocol[Answer]):
    """Sends turns to replicas. All but `close` of an answer raise `ReplicaError`, never an error of a library."""

    async def send(
        self,
        replica_id: str,
        base_url: str,
        method: str,
        path: str,
        headers: CIMultiDict[str],
        body: bytes | None,
        *,
        may_repeat: bool = False,
    ) -> Answer:
        """Send a request and return when its answer's head is there.

        `headers` are those that travel; Host, the body's length, and what the operator has all engines told are added.
        `may_repeat` says that it may be sent once more if a kept connection dies before a byte of the answer.
        """

    async def read(self, replica_id: str, answer: Answer) -> bytes:
        """Return the whole body of an answer."""

    async def pipe(self, replica_id: str, answer: Answer, sink: Sink) -> None:
        """Hand the body of an answer to `sink`, piece by piece, and return at its end.

        What `sink` raises, or what it returned, is raised here, and no piece follows. Cancelling ends the piping; the
        answer is still to be closed.
        """
