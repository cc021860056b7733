"""Runs the engine model in real time for a server, and answers in JSON, in any dialect."""

from __future__ import annotations

import asyncio
import time
from contextlib import contextmanager
from typing import TYPE_CHECKING

import msgspec
from aiohttp import web

from thunderagent.simulator.embedded.requests import ApiError
from thunderagent.simulator.embedded.tokens import Answer, WordTokenizer, compose_answer
from thunderagent.simulator.engine.realtime import Generation, RealtimeEngine
from thunderagent.simulator.engine.records import EngineRequest

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Iterator, Sequence

    from aiohttp.typedefs import Middleware

    from thunderagent.simulator.embedded.options import ServerConfig


def answering_errors(say: Callable[[str, ApiError], object], kind_of: Callable[[web.HTTPException], str]) -> Middleware:
    """Return a middleware that answers every refusal in the path's format by `say`; `kind_of` names aiohttp's own."""

    @web.middleware
    async def answer_errors(
        request: web.Request, handler: Callable[[web.Request], Awaitable[web.StreamResponse]]
    ) -> web.StreamResponse:
        try:
            return await handler(request)
        except ApiError as error:
            refusal = error
        except RecursionError:
            refusal = ApiError("The request is nested too deeply.")
        except web.HTTPException as error:
            refusal = ApiError(error.reason, status=error.status, kind=kind_of(error))
        return json_response(say(request.path, refusal), status=refusal.status)

    return answer_errors


class LiveEngine:
    """Steps an engine, in the rhythm of `realtime.py`, for the requests that handlers run in it.

    `drive` must run beside them. A request lives as long as its handler: a client that leaves cancels that, which frees
    the blocks.
    """

    def __init__(self, config: ServerConfig) -> None:
        self.config = config
        self.realtime = RealtimeEngine(config.engine, speed=config.speed, now_s=config.clock())
        self.tokenizer = WordTokenizer()
        self.started_s = int(time.time())
        self._work = asyncio.Event()
        self._may_step = asyncio.Event()
        self._may_step.set()
        self._request_count = 0

    async def drive(self) -> None:
        """Run iterations while there is work, and wait for work otherwise, until cancelled."""
        realtime = self.realtime
        while True:
            if not realtime.engine.has_work or not self._may_step.is_set():
                self._work.clear()
                await self._work.wait()
                await self._may_step.wait()
                realtime.catch_up(self.config.clock())
                continue
            result = realtime.begin_iteration()
            await asyncio.sleep(realtime.time_left_s(result, self.config.clock()))
            realtime.deliver(result)

    def stand_still(self) -> None:
        """Start no further iteration: requests stay as they are, and new ones wait."""
        self._may_step.clear()

    def go_on(self) -> None:
        """Step again."""
        self._may_step.set()
        self._work.set()

    def compose(
        self, prompt: Sequence[int], *, limit_tokens: int, min_tokens: int | None, ignore_eos: bool | None
    ) -> Answer:
        """Choose the engine's answer."""
        return compose_answer(
            prompt,
            seed=self.config.seed,
            limit_tokens=limit_tokens,
            min_tokens=min_tokens or 0,
            ignore_eos=bool(ignore_eos),
        )

    @contextmanager
    def generation(
        self, prompt: Sequence[int], answer: Answer, *, priority: int = 0, whole: bool, on_news: Callable[[], None]
    ) -> Iterator[Generation]:
        """Run a request for as long as the context is open; leaving it early aborts the request at once."""
        self._request_count += 1
        request = EngineRequest(str(self._request_count), prompt, answer.token_ids, priority)
        now_s = self.config.clock()
        with self.realtime.generation(request, answer.finish_reason, now_s, whole=whole, on_news=on_news) as generation:
            self._work.set()
            yield generation


def json_response(value: object, *, status: int = 200) -> web.Response:
    """Return an answer whose body is `value`, as JSON."""
    return web.Response(body=msgspec.json.encode(value), status=status, content_type="application/json")
