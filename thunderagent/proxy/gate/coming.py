"""What comes: a request as whoever judges it sees it, and its body, counted as it comes."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Protocol

from multidict import CIMultiDictProxy

from thunderagent.errors import BodyTimeoutError, BodyTooLargeError, ExpectationError
from thunderagent.proxy.gate.held import KeptBody


class Visitor(Protocol):
    """What is judged of a request, whichever server read it."""

    @property
    def method(self) -> str:
        """The method."""

    @property
    def headers(self) -> CIMultiDictProxy[str]:
        """The headers."""

    @property
    def host(self) -> str:
        """What it calls us."""

    @property
    def remote(self) -> str | None:
        """The address that it came from."""


async def come(
    next_piece: Callable[[], Awaitable[bytes]],
    headers: CIMultiDictProxy[str],
    length_bytes: int,
    kept: KeptBody,
    limit_s: float,
    max_bytes: int,
    invite: Callable[[], None] | None,
) -> bytes:
    """Have a body come, with an invitation if its client waits for one.

    It is counted as it comes: who only announces a large one takes nothing from others.
    """
    if length_bytes > max_bytes:
        raise BodyTooLargeError(f"the body has {length_bytes} bytes, the limit is {max_bytes}")
    pieces, size_bytes = [], 0
    kept.check(length_bytes)
    if "Expect" in headers and invite is not None:
        if headers["Expect"].lower() != "100-continue":
            raise ExpectationError("this server knows no Expect but 100-continue")
        invite()
    try:
        async with asyncio.timeout(limit_s):
            while piece := await next_piece():
                pieces.append(piece)
                size_bytes += len(piece)
                if size_bytes > max_bytes:
                    raise BodyTooLargeError(f"the body is larger than the limit of {max_bytes} bytes")
                kept.grow(len(piece))
    except TimeoutError as error:
        raise BodyTimeoutError(f"the body did not arrive within {limit_s:g} s") from error
    return b"".join(pieces)
