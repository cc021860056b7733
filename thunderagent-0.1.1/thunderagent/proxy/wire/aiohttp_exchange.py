"""The adapter to aiohttp's server: one of its requests as an `Exchange`."""

from __future__ import annotations

from typing import Any, Self

from aiohttp import web
from multidict import CIMultiDict, CIMultiDictProxy

from thunderagent.proxy.reading.target import Target
from thunderagent.proxy.wire.aiohttp_request import KEPT_BODY, begin, write, write_eof
from thunderagent.proxy.wire.exchange import KeptBody, Wait


class AiohttpExchange:
    """A request whose body was read, and its answer. Its handler returns `response` to aiohttp."""

    __slots__ = ("_request", "_response", "begun", "body", "kept", "notes", "target")

    def __init__(self, request: web.Request, target: Target, body: bytes) -> None:
        """Ask for `target`, which may differ from the request's own."""
        self._request = request
        self._response: web.StreamResponse | None = None
        self.begun = False
        self.notes: dict[str, Any] = {}
        self.target = target
        self.body = body
        self.kept: KeptBody | None = request.get(KEPT_BODY)

    @classmethod
    async def of(cls, request: web.Request, target: Target) -> Self:
        """Read the body of a request, which the guard has let in."""
        return cls(request, target, await request.read())

    @property
    def channel(self) -> None:
        """Return nothing: aiohttp does not switch protocols for us."""

    @property
    def method(self) -> str:
        """The method."""
        return self._request.method

    @property
    def headers(self) -> CIMultiDictProxy[str]:
        """The request's headers."""
        return self._request.headers

    @property
    def response(self) -> web.StreamResponse:
        """The answer: sent as far as it was begun, or for aiohttp to send."""
        assert self._response is not None, "it was not answered"
        return self._response

    def answer(self, status: int, reason: str, headers: CIMultiDict[str], body: bytes) -> Wait:
        """Answer with a whole body, which is sent when the handler returns."""
        self._response = web.Response(status=status, reason=reason, headers=headers, body=body)
        return None

    async def begin(self, status: int, reason: str, headers: CIMultiDict[str]) -> None:
        """Send a head."""
        self._response = web.StreamResponse(status=status, reason=reason, headers=headers)
        await begin(self._request, self._response)
        self.begun = True

    def write(self, data: bytes) -> Wait:
        """Send a piece of the body."""
        return write(self._request, self.response, data)

    def end(self) -> Wait:
        """End the body."""
        return write_eof(self._request, self.response)

    def cut(self) -> None:
        """Close the client's connection."""
        if self._request.transport is not None:
            self._request.transport.close()
