"""The path of a turn that our own server read: checked, run, and answered with any error.

For aiohttp's requests, wrappers of handlers do the same (`proxy/routing.py`). Checks and error formats are shared by
both.
"""

# compiled: each turn passes here

from __future__ import annotations

from collections.abc import Awaitable, Callable
from contextlib import AbstractContextManager
from functools import partial
from http import HTTPStatus
from typing import Final, NamedTuple, Protocol
from urllib.parse import unquote

import structlog
from multidict import CIMultiDict, CIMultiDictProxy

from thunderagent.errors import RequestError, ThunderAgentError
from thunderagent.proxy.reading.header_words import REQUEST_ID_HEADER
from thunderagent.proxy.reading.target import CACHED_BYTES, Target
from thunderagent.proxy.wire.errors import answer_of, plain_answer
from thunderagent.proxy.wire.exchange import Exchange, KeptBody, done
from thunderagent.proxy.wire.headers import REQUEST_ID
from thunderagent.proxy.wire.http11.heads import RequestHead
from thunderagent.proxy.wire.http11.server import Asked, Handler

log = structlog.get_logger("thunderagent.proxy")


Flow = Callable[[Exchange, str | None], Awaitable[None]]
"""Answers an accepted turn; on the replica that its client chose, if it did."""


class Trace(Protocol):
    """The span of one request."""

    def answered(self, status: int) -> None:
        """Note the status of the answer."""


class Tracing(Protocol):
    """Makes spans of requests."""

    def request(self, headers: CIMultiDictProxy[str], path: str) -> AbstractContextManager[Trace]:
        """Attribute a turn in the block to this request."""


class Way(NamedTuple):
    """How our server answers a request."""

    target: Target
    """The target on an engine."""
    chosen_id: str | None = None
    """The replica that its client chose."""
    is_operators: bool = False
    """Whether it is for operators and trainers."""
    stays: bool = False
    """Whether every POST for the same target is answered this way."""
    is_ours: bool = True
    """Whether our server answers it; otherwise another protocol does, to which the connection is lent."""


KNOWN_COUNT: Final = 4096
"""For how many targets the handler is cached."""


class Front:
    """Answers the turns that our server reads, and says which requests these are."""

    def __init__(
        self,
        way_of: Callable[[RequestHead, Target], Way | None],
        let_in: Callable[[Asked, bool], Awaitable[KeptBody | None] | None],
        answer: Flow,
        converse: Flow,
        decorate: Callable[[Asked, CIMultiDict[str]], None] | None = None,
        tracing: Tracing | None = None,
        around: Callable[[Handler], Handler] | None = None,
    ) -> None:
        """Answer what `let_in` accepts by `answer`, or by `converse` if it asks for a websocket.

        `way_of` says how, or that a request is not ours, now or ever. `let_in` is told whether a request is for
        operators; if that must wait, it returns an awaitable of the counter of its body. `decorate` adds to the heads
        of all answers, and `around` wraps both answering functions.
        """
        self._way_of = way_of
        self._let_in = let_in
        self._flow = answer
        self._converse = converse
        self._more = decorate
        self._tracing = tracing
        self._around = around
        self._known: dict[bytes, Handler | None] = {}
        """Handlers of POSTs by raw target; None for those that are not ours."""

    def handler_of(self, head: RequestHead) -> Handler | None:
        """Return the handler of a turn; None for everything else, including a refused target.

        A turn is a POST, or asks for a websocket and then has nothing after its head.
        """
        if head.target in self._known and head.method == "POST" and not head.upgrades:
            return self._known[head.target]
        if head.method != "POST" if not head.upgrades else head.method != "GET" or head.length:
            return None
        try:
            target = Target.parse(head.target.decode("utf-8", "surrogateescape"), head.headers.get("Host", ""))
            way = self._way_of(head, target)
        except RequestError:
            return None
        if way is None:
            return None
        handler: Handler | None = None
        if way.is_ours:
            answer = self._answer if self._tracing is None else partial(self._traced, self._tracing)
            ours: Handler = partial(answer, self._converse if head.upgrades else self._flow, way)
            handler = ours if self._around is None else self._around(ours)
        if way.stays and head.target[:1] == b"/" and len(head.target) <= CACHED_BYTES:
            if len(self._known) >= KNOWN_COUNT:
                self._known.clear()
            self._known[head.target] = handler
        return handler

    async def _traced(self, tracing: Tracing, flow: Flow, way: Way, asked: Asked) -> None:
        with tracing.request(asked.headers, unquote(way.target.path)) as trace:
            await self._answer(flow, way, asked)
            trace.answered(asked.status)

    async def _answer(self, flow: Flow, way: Way, asked: Asked) -> None:
        target = way.target
        asked.target, asked.decorate = target, self._decorate
        told = None
        try:
            if (letting_in := self._let_in(asked, way.is_operators)) is not None:
                asked.kept = await letting_in
            await flow(asked, way.chosen_id)
        except ConnectionError:
            raise
        except ThunderAgentError as error:
            told = answer_of(error, target.spelt)
        except Exception:
            log.exception("bug", method=asked.method, path=unquote(target.path), request_id=REQUEST_ID.get())
            told = plain_answer(500, "internal_error", "the proxy has a bug; its log has the trace", target.spelt)
        finally:
            if asked.kept is not None:
                asked.kept.release()
        if told is None:
            return
        if not asked.begun:
            await done(asked.answer(told.status, HTTPStatus(told.status).phrase, CIMultiDict(told.headers), told.body))
        elif not asked.is_over:
            asked.cut()

    def _decorate(self, asked: Asked, headers: CIMultiDict[str]) -> None:
        headers[REQUEST_ID_HEADER] = REQUEST_ID.get()
        if self._more is not None:
            self._more(asked, headers)
