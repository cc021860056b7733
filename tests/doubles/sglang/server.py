"""Serve the simulator's engine in real time under SGLang's HTTP dialect (0.5, `entrypoints/http_server.py`).

Theory of operation
-------------------
It works as the embedded engine does for vLLM's dialect. Three things are specific to SGLang. A request has an id that
the client may choose (`rid`), and `/abort_request` ends the request with that id and all whose ids begin with it: they
answer at once with their output so far. The engine can be paused (`/pause_generation`): new requests wait for
admission, and running ones are aborted, stop, or lose their memory and wait (`abort`, `in_place`, `retract`). KV can
be tagged with a session: after `/close_session` blocks without another tag are evicted first.
"""

from __future__ import annotations

import asyncio
import sys
import time
import uuid
from contextlib import ExitStack
from typing import TYPE_CHECKING, Any, Final

from aiohttp import web
from prometheus_client import CONTENT_TYPE_LATEST, CollectorRegistry, generate_latest

from tests.doubles.sglang.answers import OpenAIForm, Running, generate_answer, usage
from tests.doubles.sglang.engine import SglangEngine
from tests.doubles.sglang.metrics import SglangCollector
from tests.doubles.sglang.reports import loads, model_info, models, server_info
from tests.doubles.sglang.requests import (
    AbortBody,
    Asked,
    CloseBody,
    GenerateBody,
    OpenBody,
    PauseBody,
    SglangChatBody,
    SglangCompletionBody,
    WeightVersionBody,
    asked_of,
    wants_usage,
)
from thunderagent.simulator.embedded.answers import event_bytes
from thunderagent.simulator.embedded.live import LiveEngine, answering_errors, json_response
from thunderagent.simulator.embedded.requests import ApiError, parse
from thunderagent.simulator.embedded.server import main

if TYPE_CHECKING:
    from thunderagent.simulator.embedded.options import ServerConfig

HEALTH_CHECK_S: Final = 20.0
DONE: Final = b"data: [DONE]\n\n"
FLUSHED: Final = (
    "Cache flushed.\nPlease check backend logs for more details. "
    "(When there are running or waiting requests, the operation will not be performed.)\n"
)


def _said(path: str, refusal: ApiError) -> object:
    """Return a refusal in SGLang's error schemas: one for its own endpoints, one for OpenAI's."""
    if path == "/generate":
        return {"error": {"message": str(refusal)}}
    said = {"object": "error", "message": str(refusal), "type": refusal.kind, "param": refusal.param}
    return {**said, "code": refusal.status}


class SglangServer:
    """Answers SGLang's HTTP API from an engine; `app` is the aiohttp application, and `drive` must run beside it."""

    def __init__(self, config: ServerConfig) -> None:
        self.config = config
        self._live = LiveEngine(config)
        self._sglang = SglangEngine(self._live)
        self._engine = self._live.realtime.engine
        self._registry = CollectorRegistry()
        self._registry.register(
            SglangCollector(self._live.realtime, config.model, self._sglang.counts, self._sglang.tags)
        )
        self.app = web.Application(
            middlewares=[answering_errors(_said, lambda error: str(error.status))], client_max_size=64 << 20
        )
        self.app.add_routes(
            [
                web.post("/generate", self._generate),
                web.put("/generate", self._generate),
                web.post("/v1/chat/completions", self._chat),
                web.post("/v1/completions", self._completion),
                web.get("/v1/models", self._models),
                web.get("/health", self._health),
                web.get("/ready", self._ready),
                web.get("/health_generate", self._health_generate),
                web.get("/model_info", self._model_info),
                web.get("/get_model_info", self._model_info),
                web.get("/server_info", self._server_info),
                web.get("/get_server_info", self._server_info),
                web.get("/metrics", self._metrics),
                web.get("/v1/loads", self._loads),
                web.post("/abort_request", self._abort_request),
                web.post("/pause_generation", self._pause_generation),
                web.post("/continue_generation", self._continue_generation),
                web.post("/update_weight_version", self._update_weight_version),
                web.get("/flush_cache", self._flush_cache),
                web.post("/flush_cache", self._flush_cache),
                web.post("/open_session", self._open_tag),
                web.post("/close_session", self._close_tag),
            ]
        )

    async def drive(self) -> None:
        """Run iterations while there is work, otherwise wait for work, until cancelled."""
        await self._live.drive()

    # --- generating

    async def _generate(self, request: web.Request) -> web.StreamResponse:
        body = parse(await request.read(), GenerateBody)
        asked = body.asked(self._live.tokenizer)
        for each in asked:
            self._sglang.check(each)
        await self._sglang.enter()
        news = asyncio.Event()
        with ExitStack() as stack:
            running = [
                stack.enter_context(self._sglang.running(each, whole=not body.stream, news=news)) for each in asked
            ]
            if body.stream:
                return await self._stream_generate(request, running, news, is_batch=body.is_batch)
            await self._until_over(running, news)
            answers = [self._generate_answer(each) for each in running]
            return json_response(answers if body.is_batch else answers[0])

    async def _chat(self, request: web.Request) -> web.StreamResponse:
        return await self._openai(request, parse(await request.read(), SglangChatBody))

    async def _completion(self, request: web.Request) -> web.StreamResponse:
        return await self._openai(request, parse(await request.read(), SglangCompletionBody))

    async def _openai(self, request: web.Request, body: SglangChatBody | SglangCompletionBody) -> web.StreamResponse:
        asked = asked_of(body, self._live.tokenizer)
        self._sglang.check(asked)
        await self._sglang.enter()
        form = OpenAIForm(
            body.model or self.config.model, asked.rid, isinstance(body, SglangChatBody), self._sglang.weight_version
        )
        news = asyncio.Event()
        with self._sglang.running(asked, whole=not body.stream, news=news) as running:
            if body.stream:
                with_usage = wants_usage(body.stream_options)
                return await self._stream_openai(request, form, running, news, with_usage=with_usage)
            await self._until_over([running], news)
            assert running.finish_reason is not None
            words = self._live.tokenizer.spoken_words(running.output_ids)
            return json_response(form.whole(words, running.finish_reason, usage(running)))

    async def _until_over(self, running: list[Running], news: asyncio.Event) -> None:
        while not all(each.generation.is_over for each in running):
            await news.wait()
            news.clear()
        for each in running:
            self._sglang.note_cached(each)

    def _generate_answer(self, running: Running) -> dict[str, Any]:
        return generate_answer(running, self._live.tokenizer, now_s=time.monotonic())

    async def _stream_generate(
        self, request: web.Request, running: list[Running], news: asyncio.Event, *, is_batch: bool
    ) -> web.StreamResponse:
        """Stream the full output so far of each generation, whenever it grows."""
        response = await _begin_stream(request)
        sent_counts = [-1] * len(running)
        open_indexes = list(range(len(running)))
        while open_indexes:
            await news.wait()
            news.clear()
            events = []
            for index in list(open_indexes):
                each = running[index]
                if each.generation.generated_count != sent_counts[index] or each.generation.is_over:
                    sent_counts[index] = each.generation.generated_count
                    self._sglang.note_cached(each)
                    event = self._generate_answer(each)
                    events.append({**event, "index": index} if is_batch else event)
                if each.generation.is_over:
                    open_indexes.remove(index)
            await response.write(b"".join(map(event_bytes, events)))
        await response.write(DONE)
        await response.write_eof()
        return response

    async def _stream_openai(
        self, request: web.Request, form: OpenAIForm, running: Running, news: asyncio.Event, *, with_usage: bool
    ) -> web.StreamResponse:
        response = await _begin_stream(request)
        generation = running.generation
        chunks = form.first_chunks()
        sent_count = 0
        while not generation.is_over:
            await news.wait()
            news.clear()
            for position in range(sent_count, generation.generated_count):
                words = self._live.tokenizer.spoken_words(generation.request.output_token_ids[position : position + 1])
                chunks.append(form.chunk(words, is_first=position == 0))
            sent_count = generation.generated_count
            self._sglang.note_cached(running)
            if running.finish_reason is not None:
                chunks.append(form.last_chunk(running.finish_reason))
            await response.write(b"".join(map(event_bytes, chunks)))
            chunks = []
        if with_usage:
            await response.write(event_bytes(form.usage_chunk(usage(running))))
        await response.write(DONE)
        await response.write_eof()
        return response

    # --- control

    async def _abort_request(self, request: web.Request) -> web.Response:
        body = parse(await request.read(), AbortBody)
        if body.abort_all:
            self._sglang.abort_all()
        elif body.rid:
            self._sglang.abort(body.rid)
        return web.Response()

    async def _pause_generation(self, request: web.Request) -> web.Response:
        self._sglang.pause(parse(await request.read() or b"{}", PauseBody).mode)
        return json_response({"message": "Generation paused successfully.", "status": "ok"})

    async def _continue_generation(self, _request: web.Request) -> web.Response:
        self._sglang.go_on()
        return json_response({"message": "Generation continued successfully.", "status": "ok"})

    async def _update_weight_version(self, request: web.Request) -> web.Response:
        body = parse(await request.read(), WeightVersionBody)
        if body.abort_all_requests:
            self._sglang.abort_all()
        self._sglang.weight_version = version = body.new_version
        said = {"success": True, "message": f"Weight version updated to {version}", "new_version": version}
        return json_response(said)

    async def _flush_cache(self, _request: web.Request) -> web.Response:
        if self._sglang.flush():
            return web.Response(text=FLUSHED)
        return web.Response(text="Flush cache failed.\n", status=400)

    async def _open_tag(self, request: web.Request) -> web.Response:
        name = parse(await request.read(), OpenBody).session_id or uuid.uuid4().hex
        if self._sglang.tags.is_open(name):
            message = "Failed to open the session. Check if a session with the same id is still open."
            return json_response({"error": {"message": message}}, status=400)
        self._sglang.tags.open(name)
        return json_response(name)

    async def _close_tag(self, request: web.Request) -> web.Response:
        self._sglang.close_tag(parse(await request.read(), CloseBody).session_id)
        return web.Response()

    # --- information and state

    async def _health(self, _request: web.Request) -> web.Response:
        return web.Response()  # as with SGLANG_ENABLE_HEALTH_ENDPOINT_GENERATION=false

    async def _ready(self, _request: web.Request) -> web.Response:
        return web.Response(status=503 if self._sglang.is_paused else 200)

    async def _health_generate(self, _request: web.Request) -> web.Response:
        """Generate a token; 503 if none comes in time."""
        asked = Asked("HEALTH_CHECK", [0], limit_tokens=1, min_tokens=0, ignore_eos=True, priority=0, tag=None)
        news = asyncio.Event()
        try:
            async with asyncio.timeout(HEALTH_CHECK_S):
                await self._sglang.enter()
                with self._sglang.running(asked, whole=True, news=news) as running:
                    await self._until_over([running], news)
        except TimeoutError:
            return web.Response(status=503)
        return web.Response()

    async def _models(self, _request: web.Request) -> web.Response:
        limit_tokens = self._engine.config.context_limit_tokens
        return json_response(
            models(self.config.model, created_s=self._live.started_s, context_limit_tokens=limit_tokens)
        )

    async def _model_info(self, _request: web.Request) -> web.Response:
        return json_response(model_info(self.config.model, self._sglang.weight_version))

    async def _server_info(self, _request: web.Request) -> web.Response:
        return json_response(server_info(self._engine, self.config.model))

    async def _metrics(self, _request: web.Request) -> web.Response:
        return web.Response(body=generate_latest(self._registry), headers={"Content-Type": CONTENT_TYPE_LATEST})

    async def _loads(self, _request: web.Request) -> web.Response:
        return json_response(loads(self._engine))


async def _begin_stream(request: web.Request) -> web.StreamResponse:
    response = web.StreamResponse(headers={"Content-Type": "text/event-stream; charset=utf-8"})
    await response.prepare(request)
    return response


if __name__ == "__main__":
    sys.exit(main(build=SglangServer))
