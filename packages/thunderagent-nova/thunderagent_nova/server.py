"""Serve the engine as OpenAI's chat API: data URLs in, streams out, and what the proxy wants to know of a replica.

Theory of operation
-------------------
A handler reads a request, has its images made ready in a few threads of their own, and takes tokens from the engine
until its answer is through. It lives as long as its connection: a client that leaves cancels it, which closes the
engine's iterator, which gives slot and queue back. The status is sent with the first token, so that a prompt that fits
no slot is still refused in words.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Final, Protocol
from uuid import uuid4

import msgspec
import structlog
from aiohttp import web
from prometheus_client import CONTENT_TYPE_LATEST, CollectorRegistry, Counter, generate_latest

from thunderagent_nova.chat import (
    DONE,
    ApiError,
    ChatBody,
    ChatForm,
    Json,
    ReleaseBody,
    check,
    event_bytes,
    images_of,
    parse,
    stops_of,
    template_messages,
    usage_of,
)
from thunderagent_nova.messages import Prompt, Request, Serving, Token
from thunderagent_nova.metrics import StatsCollector
from thunderagent_nova.text import TextStream

log = structlog.get_logger(__name__)

MAX_BODY_BYTES: Final = 64 << 20
READERS_COUNT: Final = 2
"""Threads that prepare images: each takes a core from decoding meanwhile."""


class Codec(Protocol):
    """Encodes and decodes for one model; thread-safe."""

    image_token_id: int
    stop_ids: frozenset[int]

    def prompt(self, messages: Sequence[Json], tools: Sequence[Any] | None, images: Sequence[bytes]) -> Prompt:
        """Return the prompt of a chat; ApiError if it is refused."""
        ...

    def text(self, token_ids: Sequence[int]) -> str:
        """Return the text of tokens."""
        ...


class NovaServer:
    """Answers for one running engine; `app` is the aiohttp application."""

    def __init__(self, engine: Serving, codec: Codec, model_name: str, *, max_waiting: int = 256) -> None:
        """Refuse requests while `max_waiting` already wait: each holds its images' pixels."""
        self._engine = engine
        self._codec = codec
        self._model_name = model_name
        self._max_waiting = max_waiting
        self._reading: dict[int, ChatBody] = {}
        """By identity, bodies whose prompts are being read."""
        self._readers = ThreadPoolExecutor(READERS_COUNT, thread_name_prefix="images")
        self._registry = CollectorRegistry()
        self._registry.register(StatsCollector(engine))
        what = "Tokens of prompts, of images among these, and of answers."
        self._tokens = Counter("nova:tokens", what, ["kind"], registry=self._registry)
        self.app = web.Application(middlewares=[_answer_errors], client_max_size=MAX_BODY_BYTES)
        self.app.add_routes(
            [
                web.post("/v1/chat/completions", self._chat),
                web.get("/v1/models", self._models),
                web.get("/health", self._health),
                web.get("/metrics", self._metrics),
                web.post("/release", self._release),
            ]
        )
        self.app.on_cleanup.append(self._clean_up)

    async def _clean_up(self, _app: web.Application) -> None:
        self._readers.shutdown(wait=False, cancel_futures=True)

    async def _chat(self, request: web.Request) -> web.StreamResponse:
        body: ChatBody = parse(await request.read(), ChatBody)
        check(body, self._model_name)
        prompt = await self._prompt_of(body)
        turn = self._turn_of(body, prompt)
        form = ChatForm(f"chatcmpl-{turn.request_id}", int(time.time()), self._model_name)
        async with contextlib.aclosing(self._answer(turn, stops_of(body))) as parts:
            if not body.stream:
                return await self._in_one(parts, form)
            include_usage = body.stream_options is not None and body.stream_options.include_usage
            return await self._in_events(request, parts, form, include_usage=include_usage)

    async def _prompt_of(self, body: ChatBody) -> Prompt:
        """Read the prompt in a thread, unless too many wait."""
        if self._engine.stats().waiting + len(self._reading) >= self._max_waiting:
            raise ApiError(f"{self._max_waiting} requests wait.", status=503, kind="overloaded_error")
        self._reading[id(body)] = body
        try:
            return await asyncio.get_running_loop().run_in_executor(self._readers, self._read, body)
        finally:
            del self._reading[id(body)]

    def _read(self, body: ChatBody) -> Prompt:
        return self._codec.prompt(template_messages(body.messages), body.tools, images_of(body.messages))

    def _turn_of(self, body: ChatBody, prompt: Prompt) -> Request:
        """Return the engine's request; ApiError if no slot has room for it."""
        prompt_tokens, slot_tokens = len(prompt.token_ids), self._engine.stats().slot_tokens
        room_tokens = slot_tokens - prompt_tokens
        if room_tokens < 1:
            text = f"The prompt has {prompt_tokens} tokens. It and its answer must fit in {slot_tokens}."
            raise ApiError(text, param="messages")
        wanted_tokens = body.max_completion_tokens or body.max_tokens or room_tokens
        most_tokens = min(wanted_tokens, room_tokens)
        return Request(uuid4().hex, prompt, most_tokens, stop_ids=self._codec.stop_ids, program_id=body.program_id)

    async def _answer(self, turn: Request, stops: Sequence[str]) -> AsyncGenerator[_Part, None]:
        """Yield an answer's text as it grows; the usage comes with the last part."""
        text = TextStream(self._codec.text, stops)
        output_tokens = 0
        async with contextlib.aclosing(_tokens_of(self._engine.submit(turn))) as tokens:
            async for token in tokens:
                output_tokens += 1
                part = "" if token.token_id in turn.stop_ids else text.add(token.token_id)
                if token.finish_reason is not None or text.is_stopped:
                    reason = "stop" if text.is_stopped else token.finish_reason
                    yield _Part(part + text.end(), reason, self._usage(turn, output_tokens))
                    return
                yield _Part(part)

    def _usage(self, turn: Request, output_tokens: int) -> Json:
        image_tokens = turn.prompt.token_ids.count(self._codec.image_token_id)
        prompt_tokens = len(turn.prompt.token_ids)
        for kind, count in (("prompt", prompt_tokens), ("image", image_tokens), ("output", output_tokens)):
            self._tokens.labels(kind).inc(count)
        return usage_of(prompt_tokens, image_tokens, output_tokens)

    async def _in_one(self, parts: AsyncGenerator[_Part, None], form: ChatForm) -> web.Response:
        texts = []
        async for part in parts:
            texts.append(part.text)
            if part.usage is not None:
                return _json(form.whole("".join(texts), part.finish_reason or "", part.usage))
        raise AssertionError("an answer ends with its usage")

    async def _in_events(
        self, request: web.Request, parts: AsyncGenerator[_Part, None], form: ChatForm, *, include_usage: bool
    ) -> web.StreamResponse:
        first = await anext(parts)
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream", "Cache-Control": "no-cache"})
        await response.prepare(request)
        try:
            await response.write(form.event(first.text, first.finish_reason, is_first=True))
            last = first
            async for last in parts:
                if last.text or last.finish_reason:
                    await response.write(form.event(last.text, last.finish_reason))
            if include_usage and last.usage is not None:
                await response.write(form.usage_event(last.usage))
            await response.write(DONE)
        except ApiError as error:  # too late for a status
            await response.write(event_bytes(error.body()))
        except ConnectionResetError:
            log.info("client_left")
        return response

    async def _models(self, _request: web.Request) -> web.Response:
        entry = {
            "id": self._model_name,
            "object": "model",
            "owned_by": "nova",
            "max_model_len": self._engine.stats().slot_tokens,
        }
        return _json({"object": "list", "data": [entry]})

    async def _health(self, _request: web.Request) -> web.Response:
        return _json({"status": "ok", "model": self._model_name, **msgspec.to_builtins(self._engine.stats())})

    async def _metrics(self, _request: web.Request) -> web.Response:
        return web.Response(body=generate_latest(self._registry), headers={"Content-Type": CONTENT_TYPE_LATEST})

    async def _release(self, request: web.Request) -> web.Response:
        body: ReleaseBody = parse(await request.read(), ReleaseBody)
        for each in self._reading.values():
            if each.program_id == body.program_id:
                each.program_id = None  # its turn keeps no slot
        return _json({"program_id": body.program_id, "released": self._engine.release(body.program_id)})


class _Part(msgspec.Struct):
    text: str
    finish_reason: str | None = None
    usage: Json | None = None


async def _tokens_of(tokens: AsyncIterator[Token]) -> AsyncGenerator[Token, None]:
    """Yield tokens; always close their source, which cancels a request. Its errors are ApiErrors."""
    try:
        async for token in tokens:
            yield token
    except ValueError as error:
        raise ApiError(str(error)) from None
    except RuntimeError as error:
        log.warning("engine_failed", error=str(error))
        raise ApiError(str(error), status=500, kind="engine_error") from None
    finally:
        close = getattr(tokens, "aclose", None)
        if close is not None:
            await close()


@web.middleware
async def _answer_errors(
    request: web.Request, handler: Callable[[web.Request], Awaitable[web.StreamResponse]]
) -> web.StreamResponse:
    try:
        return await handler(request)
    except ApiError as error:
        refusal = error
    except web.HTTPException as error:
        refusal = ApiError(error.reason, status=error.status)
    return _json(refusal.body(), status=refusal.status)


def _json(value: object, *, status: int = 200) -> web.Response:
    return web.Response(body=msgspec.json.encode(value), status=status, content_type="application/json")
