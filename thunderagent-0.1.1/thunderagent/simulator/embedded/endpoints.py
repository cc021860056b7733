"""vLLM's HTTP API in front of an engine: each path, and its streams."""

from __future__ import annotations

import asyncio
import time
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, Final

from aiohttp import web
from prometheus_client import CONTENT_TYPE_LATEST, CollectorRegistry, generate_latest

from thunderagent.simulator.embedded.answers import (
    ChatForm,
    CompletionForm,
    EventForm,
    Form,
    Json,
    embeddings_body,
    event_bytes,
    final_usage_of,
    models_body,
    usage_of,
)
from thunderagent.simulator.embedded.live import LiveEngine, answering_errors, json_response
from thunderagent.simulator.embedded.messages_api import MessagesBody, MessagesForm, error_body
from thunderagent.simulator.embedded.options import ServerConfig
from thunderagent.simulator.embedded.ranks import RANK_HEADER, RanksCollector, chosen_rank
from thunderagent.simulator.embedded.requests import (
    ApiError,
    ChatBody,
    CompletionBody,
    DetokenizeBody,
    EmbeddingsBody,
    GenerationBody,
    StreamOptions,
    TokenizeBody,
    parse,
)
from thunderagent.simulator.embedded.responses_api import ResponsesBody, ResponsesForm, ResponseStore, Stored
from thunderagent.simulator.embedded.scripted import has_form, scripted_answer
from thunderagent.simulator.embedded.tokens import Answer, cut_at_stop
from thunderagent.simulator.embedded.vllm_control import VllmControl
from thunderagent.simulator.engine.realtime import Generation
from thunderagent.simulator.engine.records import FinishedRequest

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

VERSION: Final = "0.32.0+simulated"  # of the dialect
EMBEDDING_DIMENSIONS: Final = 64
EMBEDDING_DIMENSIONS_LIMIT: Final = 4096
ABORTED: Final = "abort"  # the finish reason


def _said(path: str, refusal: ApiError) -> object:
    """Return a refusal in vLLM's error schema, or in that of the Messages API."""
    return error_body(refusal) if path.startswith("/v1/messages") else refusal.body()


class EngineServer:
    """Answers vLLM's HTTP API from an engine; `app` is the aiohttp application, and `drive` must run beside it."""

    def __init__(self, config: ServerConfig) -> None:
        self.config = config
        self._ranks = [LiveEngine(config) for _ in range(config.data_parallel_count)]
        self._realtimes = [rank.realtime for rank in self._ranks]
        self._control = VllmControl(self._ranks)
        self._tokenizer = self._ranks[0].tokenizer
        self._responses = ResponseStore()
        self._background: asyncio.TaskGroup | None = None
        self._registry = CollectorRegistry()
        self._registry.register(RanksCollector(self._realtimes, config.model))
        self.app = web.Application(
            middlewares=[answering_errors(_said, lambda error: error.reason)], client_max_size=64 << 20
        )
        self.app.add_routes(
            [
                web.post("/v1/chat/completions", self._chat),
                web.post("/v1/completions", self._completion),
                web.post("/v1/responses", self._response),
                web.get("/v1/responses/{response_id}", self._stored_response),
                web.post("/v1/responses/{response_id}/cancel", self._cancel_response),
                web.post("/v1/messages", self._message),
                web.post("/v1/messages/count_tokens", self._count_tokens),
                web.get("/v1/models", self._models),
                web.get("/health", self._health),
                web.get("/version", self._version),
                web.get("/metrics", self._metrics),
                web.post("/v1/embeddings", self._embeddings),
                web.post("/tokenize", self._tokenize),
                web.post("/detokenize", self._detokenize),
                *self._control.routes(),
            ]
        )

    async def drive(self) -> None:
        """Run iterations while there is work, and wait for work otherwise, until cancelled."""
        async with asyncio.TaskGroup() as self._background:
            for rank in self._ranks:
                self._background.create_task(rank.drive())

    async def _chat(self, request: web.Request) -> web.StreamResponse:
        body = parse(await request.read(), ChatBody)
        prompt, answer = self.composed(body, body.encode(self._tokenizer), body)
        return await self._generate(request, body, ChatForm(self.config.model, answer.calls), prompt, answer)

    async def _completion(self, request: web.Request) -> web.StreamResponse:
        body = parse(await request.read(), CompletionBody)
        chat = body.as_chat()
        prompt, answer = self.composed(body, body.encode(self._tokenizer), chat)
        form = CompletionForm(self.config.model, is_formed=has_form(chat))
        return await self._generate(request, body, form, prompt, answer)

    async def _response(self, request: web.Request) -> web.StreamResponse:
        body = parse(await request.read(), ResponsesBody)
        history = self._responses.get(body.previous_response_id).chat if body.previous_response_id else []
        chat = body.chat_after(history)
        form = ResponsesForm(self.config.model, body, chat, self._responses)
        prompt, answer = self.composed(body, body.encode(self._tokenizer, chat), body.as_chat(chat))
        form.calls = answer.calls
        if not body.background:
            return await self.answer_in_events(request, body, prompt, answer, form)
        if body.stream or not body.store:
            raise ApiError("background needs store=true, and here a whole answer.", param="background")
        rank_id = self._rank_of(request)
        stored = Stored(form.response("queued"), chat)
        self._responses.put(stored)
        answered = json_response(stored.response)
        assert self._background is not None
        task = self._background.create_task(self._in_background(body, prompt, answer, form, stored, rank_id))
        stored.cancel = task.cancel
        return answered

    async def _in_background(
        self,
        body: ResponsesBody,
        prompt: list[int],
        answer: Answer,
        form: ResponsesForm,
        stored: Stored,
        rank_id: int,
    ) -> None:
        """Generate a response that its client fetches later."""
        news = asyncio.Event()
        async with self._generation(body, prompt, answer, news, rank_id) as generation:
            stored.response["status"] = "in_progress"
            await news.wait()
            token_ids, finish_reason, finished = _end_of(generation, answer)
            form.whole(token_ids, self._words(answer, 0, len(token_ids)), finish_reason, finished)

    async def _stored_response(self, request: web.Request) -> web.Response:
        return json_response(self._responses.get(request.match_info["response_id"]).response)

    async def _cancel_response(self, request: web.Request) -> web.Response:
        return json_response(self._responses.cancel(request.match_info["response_id"]))

    async def _message(self, request: web.Request) -> web.StreamResponse:
        body = parse(await request.read(), MessagesBody)
        if body.max_tokens is None:
            raise ApiError("max_tokens is required", param="max_tokens")
        prompt, answer = self.composed(body, body.encode(self._tokenizer), body.as_chat())
        form = MessagesForm(self.config.model, len(prompt), answer.calls)
        return await self.answer_in_events(request, body, prompt, answer, form)

    async def _count_tokens(self, request: web.Request) -> web.Response:
        body = parse(await request.read(), MessagesBody)
        self._check_model(body.model)
        tokens = len(body.encode(self._tokenizer))
        return json_response({"input_tokens": tokens, "context_management": {"original_input_tokens": tokens}})

    def composed(
        self, body: GenerationBody, prompt: list[int], chat: ChatBody | None = None
    ) -> tuple[list[int], Answer]:
        """Check a request, and return its prompt with its future answer."""
        engine_config = self.config.engine
        self._check_model(body.model)
        body.validate(allows_priority=engine_config.scheduling_policy == "priority")
        limit_tokens = body.answer_limit_tokens(len(prompt), engine_config.context_limit_tokens)
        scripted = None if chat is None else scripted_answer(chat, self._tokenizer, limit_tokens)
        if scripted is not None:
            return prompt, scripted
        answer = self._ranks[0].compose(
            prompt,
            limit_tokens=limit_tokens,
            min_tokens=body.min_tokens,
            ignore_eos=body.ignore_eos,
        )
        if stops := body.stops():
            answer = cut_at_stop(answer, self._tokenizer.spoken_words(answer.token_ids), stops)
        return prompt, answer

    def _rank_of(self, request: web.Request) -> int:
        return chosen_rank(request.headers.get(RANK_HEADER), self._realtimes)

    @asynccontextmanager
    async def _generation(
        self,
        body: GenerationBody,
        prompt: list[int],
        answer: Answer,
        news: asyncio.Event,
        rank_id: int,
    ) -> AsyncIterator[Generation]:
        """Run a request on a rank's engine for as long as the context is open."""
        await self._control.enter()
        with self._ranks[rank_id].generation(
            prompt, answer, priority=body.priority, whole=not body.stream, on_news=news.set
        ) as generation:
            yield generation

    async def _generate(
        self, request: web.Request, body: ChatBody | CompletionBody, form: Form, prompt: list[int], answer: Answer
    ) -> web.StreamResponse:
        news = asyncio.Event()
        async with self._generation(body, prompt, answer, news, self._rank_of(request)) as generation:
            if body.stream:
                options = body.stream_options or StreamOptions()
                return await self._stream(request, form, generation, news, options, answer)
            await news.wait()
            words = self._words(answer, 0, generation.generated_count)
            finish_reason = ABORTED if generation.aborted else answer.finish_reason
            return json_response(form.whole(words, finish_reason, _usage_of(generation)))

    async def answer_in_events(
        self, request: web.Request, body: GenerationBody, prompt: list[int], answer: Answer, form: EventForm
    ) -> web.StreamResponse:
        """Answer in an API with its own events, streamed or whole."""
        news = asyncio.Event()
        async with self._generation(body, prompt, answer, news, self._rank_of(request)) as generation:
            if not body.stream:
                await news.wait()
                token_ids, finish_reason, finished = _end_of(generation, answer)
                return json_response(
                    form.whole(token_ids, self._words(answer, 0, len(token_ids)), finish_reason, finished)
                )
            response = web.StreamResponse(headers={"Content-Type": "text/event-stream; charset=utf-8"})
            await response.prepare(request)
            await response.write(form.opening())
            sent_count = 0
            while not generation.is_over:
                await news.wait()
                news.clear()
                pieces = []
                for position in range(sent_count, generation.generated_count):
                    token_ids = answer.token_ids[position : position + 1]
                    is_last = position == len(answer.token_ids) - 1
                    words = self._words(answer, position, position + 1)
                    pieces.append(form.piece(token_ids, words, answer.finish_reason if is_last else None))
                sent_count = generation.generated_count
                await response.write(b"".join(pieces))
            if generation.aborted:
                await response.write(form.piece([], [], ABORTED))
            token_ids, finish_reason, finished = _end_of(generation, answer)
            await response.write(form.closing(self._words(answer, 0, len(token_ids)), finish_reason, finished))
            await response.write_eof()
            return response

    async def _stream(
        self,
        request: web.Request,
        form: Form,
        generation: Generation,
        news: asyncio.Event,
        options: StreamOptions,
        answer: Answer,
    ) -> web.StreamResponse:
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream; charset=utf-8"})
        await response.prepare(request)
        sent_count = 0
        while not generation.is_over:
            await news.wait()
            news.clear()
            chunks = form.first_chunks() if sent_count == 0 else []
            for position in range(sent_count, generation.generated_count):
                chunks.append(self._chunk(form, generation, position, answer))
                if options.continuous_usage_stats and options.include_usage:
                    chunks[-1]["usage"] = usage_of(len(generation.request.prompt_token_ids), position + 1)
            sent_count = generation.generated_count
            await response.write(b"".join(map(event_bytes, chunks)))
        if generation.aborted:
            await response.write(event_bytes(form.chunk([], is_first=sent_count == 0, finish_reason=ABORTED)))
        if options.include_usage:
            await response.write(event_bytes(form.usage_chunk(_usage_of(generation))))
        await response.write(b"data: [DONE]\n\n")
        await response.write_eof()
        return response

    def _words(self, answer: Answer, start: int, end: int) -> list[str]:
        """Return what the client reads of these tokens of an answer."""
        if answer.words is None:
            return self._tokenizer.spoken_words(answer.token_ids[start:end])
        return answer.words[start:end]

    def _chunk(self, form: Form, generation: Generation, position: int, answer: Answer) -> Json:
        output = generation.request.output_token_ids
        is_last = position == len(output) - 1
        words = self._words(answer, position, position + 1)
        return form.chunk(words, is_first=position == 0, finish_reason=generation.finish_reason if is_last else None)

    def _check_model(self, model: str | None) -> None:
        if model and model != self.config.model:
            raise ApiError(f"The model `{model}` does not exist.", status=404, kind="NotFoundError", param="model")

    async def _models(self, _request: web.Request) -> web.Response:
        limit_tokens = self.config.engine.context_limit_tokens
        return json_response(
            models_body(self.config.model, created_s=self._ranks[0].started_s, context_limit_tokens=limit_tokens)
        )

    async def _health(self, _request: web.Request) -> web.Response:
        return web.Response()

    async def _version(self, _request: web.Request) -> web.Response:
        return json_response({"version": VERSION})

    async def _metrics(self, _request: web.Request) -> web.Response:
        return web.Response(body=generate_latest(self._registry), headers={"Content-Type": CONTENT_TYPE_LATEST})

    async def _embeddings(self, request: web.Request) -> web.Response:
        body = parse(await request.read(), EmbeddingsBody)
        self._check_model(body.model)
        dimensions = EMBEDDING_DIMENSIONS if body.dimensions is None else body.dimensions
        if not 1 <= dimensions <= EMBEDDING_DIMENSIONS_LIMIT:
            raise ApiError(f"dimensions must be 1 to {EMBEDDING_DIMENSIONS_LIMIT}.", param="dimensions")
        texts = body.encode(self._tokenizer)
        as_base64 = body.encoding_format == "base64"
        return json_response(embeddings_body(self.config.model, texts, dimensions=dimensions, as_base64=as_base64))

    async def _tokenize(self, request: web.Request) -> web.Response:
        body = parse(await request.read(), TokenizeBody)
        self._check_model(body.model)
        tokens = body.encode(self._tokenizer)
        limit_tokens = self.config.engine.context_limit_tokens
        return json_response(
            {"count": len(tokens), "max_model_len": limit_tokens, "tokens": tokens, "token_strs": None}
        )

    async def _detokenize(self, request: web.Request) -> web.Response:
        body = parse(await request.read(), DetokenizeBody)
        self._check_model(body.model)
        return json_response({"prompt": self._tokenizer.decode(body.tokens)})


def _end_of(generation: Generation, answer: Answer) -> tuple[list[int], str, FinishedRequest]:
    """Return what was generated, why it ended, and its usage, without what an aborted request found cached."""
    if generation.finished is not None:
        return answer.token_ids, answer.finish_reason, generation.finished
    count, now_s = generation.generated_count, time.monotonic()
    prompt_tokens = len(generation.request.prompt_token_ids)
    ended = FinishedRequest(generation.request.request_id, prompt_tokens, count, 0, 0, now_s, now_s, now_s)
    return answer.token_ids[:count], ABORTED, ended


def _usage_of(generation: Generation) -> Json:
    """Return the usage of a request that is over."""
    if generation.finished is not None:
        return final_usage_of(generation.finished)
    return usage_of(len(generation.request.prompt_token_ids), generation.generated_count)
