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
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Final, Protocol
from uuid import uuid4

import msgspec
import structlog
from aiohttp import web
from prometheus_client import CONTENT_TYPE_LATEST, CollectorRegistry, Counter, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric

from thunderagent.nova.chat import (
    DONE,
    ApiError,
    ChatBody,
    ChatForm,
    Json,
    ReleaseBody,
    check,
    images_of,
    parse,
    stops_of,
    template_messages,
    usage_of,
)
from thunderagent.nova.messages import Prompt, Request, Serving, Stats, Token
from thunderagent.nova.text import TextStream

log = structlog.get_logger(__name__)

MAX_BODY_BYTES: Final = 64 << 20
READERS_COUNT: Final = 2
"""Threads that make images ready: each takes a core from decoding while it does."""


class Codec(Protocol):
    """From a chat to a prompt and back, for one model; called by several threads at a time."""

    image_token_id: int
    stop_ids: frozenset[int]

    def prompt(self, messages: Sequence[Json], tools: Sequence[Any] | None, images: Sequence[bytes]) -> Prompt:
        """Return the prompt of a chat; ApiError if it is refused."""
        ...

    def text(self, token_ids: Sequence[int]) -> str:
        """Return the text of tokens."""
        ...


class NovaServer:
    """Answer for one engine, which is running; `app` is the aiohttp application."""

    def __init__(self, engine: Serving, codec: Codec, model_name: str, *, max_waiting: int = 256) -> None:
        """Refuse requests while so many wait already: each holds its images' pixels."""
        self._engine = engine
        self._codec = codec
        self._model_name = model_name
        self._max_waiting = max_waiting
        self._reading_count = 0
        self._readers = ThreadPoolExecutor(READERS_COUNT, thread_name_prefix="images")
        self._registry = CollectorRegistry()
        self._registry.register(StatsCollector(engine))
        self._tokens = Counter(
            "nova:tokens", "Tokens of prompts, of images among them, answered.", ["kind"], registry=self._registry
        )
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
        if self._engine.stats().waiting + self._reading_count >= self._max_waiting:
            raise ApiError(f"{self._max_waiting} requests wait.", status=503, kind="overloaded_error")
        images, messages = images_of(body.messages), template_messages(body.messages)
        self._reading_count += 1
        try:
            loop = asyncio.get_running_loop()
            return await loop.run_in_executor(self._readers, self._codec.prompt, messages, body.tools, images)
        finally:
            self._reading_count -= 1

    def _turn_of(self, body: ChatBody, prompt: Prompt) -> Request:
        """Return what the engine is asked; ApiError if no slot has room for it."""
        room_tokens = self._engine.stats().slot_tokens - len(prompt.token_ids)
        if room_tokens < 1:
            text = f"The prompt has {len(prompt.token_ids)} tokens; it and its answer must fit in {room_tokens + len(prompt.token_ids)}."
            raise ApiError(text, param="messages")
        wanted = body.max_completion_tokens or body.max_tokens or room_tokens
        return Request(
            uuid4().hex, prompt, min(wanted, room_tokens), stop_ids=self._codec.stop_ids, program_id=body.program_id
        )

    async def _answer(self, turn: Request, stops: Sequence[str]) -> AsyncIterator[_Part]:
        """Yield an answer's text as it grows; what it cost comes with the last part."""
        text = TextStream(self._codec.text, stops)
        output_tokens = 0
        async with contextlib.aclosing(_closing(self._engine.submit(turn))) as tokens:
            async for token in tokens:
                output_tokens += 1
                is_stop_token = token.finish_reason == "stop" and token.token_id in turn.stop_ids
                part = "" if is_stop_token else text.add(token.token_id)
                if token.finish_reason is not None or text.is_stopped:
                    reason = "stop" if text.is_stopped else token.finish_reason
                    yield _Part(part + text.end(), reason, self._usage(turn, output_tokens))
                    return
                yield _Part(part)
        raise EngineStoppedError("the engine ended an answer before its end")

    def _usage(self, turn: Request, output_tokens: int) -> Json:
        image_tokens = turn.prompt.token_ids.count(self._codec.image_token_id)
        prompt_tokens = len(turn.prompt.token_ids)
        for kind, count in (("prompt", prompt_tokens), ("image", image_tokens), ("output", output_tokens)):
            self._tokens.labels(kind).inc(count)
        return usage_of(prompt_tokens, image_tokens, output_tokens)

    async def _in_one(self, parts: AsyncIterator[_Part], form: ChatForm) -> web.Response:
        texts = []
        async for part in parts:
            texts.append(part.text)
            if part.usage is not None:
                return _json(form.whole("".join(texts), part.finish_reason or "", part.usage))
        raise AssertionError("an answer ends with its usage")

    async def _in_events(
        self, request: web.Request, parts: AsyncIterator[_Part], form: ChatForm, *, include_usage: bool
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
        return _json({"program_id": body.program_id, "released": self._engine.release(body.program_id)})


class EngineStoppedError(RuntimeError):
    """An answer had no end."""


class _Part(msgspec.Struct):
    text: str
    finish_reason: str | None = None
    usage: Json | None = None


async def _closing(tokens: AsyncIterator[Token]) -> AsyncIterator[Token]:
    """Yield tokens, and close where they come from whatever happens: that is what cancels a request."""
    try:
        async for token in tokens:
            yield token
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
    except (ValueError, RuntimeError) as error:
        # The engine's word that a request fits no slot; or that a pass failed, or it stopped.
        is_bad = isinstance(error, ValueError)
        log.warning("request_failed", path=request.path, error=str(error))
        refusal = ApiError(
            str(error), status=400 if is_bad else 500, kind="invalid_request_error" if is_bad else "engine_error"
        )
    return _json(refusal.body(), status=refusal.status)


def _json(value: object, *, status: int = 200) -> web.Response:
    return web.Response(body=msgspec.json.encode(value), status=status, content_type="application/json")


GAUGES: Final[dict[str, tuple[str, Callable[[Stats], float]]]] = {
    "nova:num_requests_running": ("Requests that a stage works on.", lambda stats: stats.running),
    "nova:num_requests_waiting": ("Requests that wait for a stage.", lambda stats: stats.waiting),
    "nova:pending_encode": ("Requests that are encoded or wait for it.", lambda stats: stats.pending_encode),
    "nova:pending_prefill": ("Requests that are prefilled or wait for it.", lambda stats: stats.pending_prefill),
    "nova:decoding": ("Requests that are decoded.", lambda stats: stats.decoding),
    "nova:slots": ("Requests that fit at the same time.", lambda stats: stats.slots),
    "nova:slots_used": ("Slots that requests hold.", lambda stats: stats.slots_used),
    "nova:slots_kept": ("Slots that programs keep between turns.", lambda stats: stats.slots_kept),
    "nova:slot_tokens": ("Tokens that fit in a slot.", lambda stats: stats.slot_tokens),
    "nova:split_units": ("Units that decoding has beside another stage; 0: all.", lambda stats: stats.split or 0),
    "nova:cached_images": ("Images whose encoding is kept.", lambda stats: stats.cached_images),
}


class StatsCollector:
    """The engine's numbers as metrics, read when they are asked for."""

    def __init__(self, engine: Serving) -> None:
        self._engine = engine

    def collect(self) -> Iterator[Metric]:
        """Yield every metric."""
        stats = self._engine.stats()
        for name, (what, value_of) in GAUGES.items():
            yield GaugeMetricFamily(name, what, value=value_of(stats))
        seconds = CounterMetricFamily("nova:stage_seconds", "Seconds that passes of a stage took.", labels=["stage"])
        passes = CounterMetricFamily("nova:stage_passes", "Passes of a stage.", labels=["stage"])
        for stage in ("encode", "prefill", "decode"):
            seconds.add_metric([stage], stats.stage_s.get(stage, 0.0))
            passes.add_metric([stage], stats.stage_passes.get(stage, 0))
        yield seconds
        yield passes
