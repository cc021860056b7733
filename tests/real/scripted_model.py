"""A replica whose model calls a given tool once, and then repeats the tool's result.

It supports the three APIs of agent frameworks (chat completions, responses, messages), whole and streamed. It keeps no
state: the history of a request selects the next step, so it serves any number of programs.
"""

from __future__ import annotations

import json
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Self

from aiohttp import web

from tests.loopback import on_loopback

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Iterable

Json = dict[str, Any]

MODEL_NAME = "simulated"
_CALL_ID = "call_1"
_EXAMPLES: Json = {"string": "Paris", "integer": 1, "number": 1.0, "boolean": True, "array": [], "object": {}}


@dataclass(frozen=True)
class Step:
    """The model's next step: a tool call, or text."""

    tool: str = ""
    arguments: Json = field(default_factory=dict)
    text: str = ""

    @property
    def arguments_json(self) -> str:
        """Return the arguments in the form that models write."""
        return json.dumps(self.arguments)


def _text(content: object) -> str:
    """Return the text of a content, which is a text or a list of parts."""
    if isinstance(content, list):
        return " ".join(str(part.get("text", "")) for part in content if isinstance(part, dict))
    return str(content)


@dataclass
class ScriptedModel:
    """Serve it with `async with ScriptedModel().running() as model`.

    It calls the tool `tool` with `arguments`; without `tool`, the first one, with arguments that fit its schema.
    Requests with the header `leaf_header`, as those of sub-agents, get an answer without a call.
    """

    tool: str = ""
    arguments: Json = field(default_factory=dict)
    leaf_header: str = ""
    asked: list[tuple[str, dict[str, str], Json]] = field(default_factory=list)
    """Path, headers and body of each request, in order."""
    url: str = ""

    @asynccontextmanager
    async def running(self) -> AsyncIterator[Self]:
        """Serve on a loopback port during the block."""
        app = web.Application(client_max_size=64 * 2**20)
        app.router.add_get("/health", self._health)
        app.router.add_get("/metrics", self._metrics)
        app.router.add_get("/v1/models", self._models)
        app.router.add_post("/v1/chat/completions", self._chat)
        app.router.add_post("/v1/responses", self._responses)
        app.router.add_post("/v1/messages", self._messages)
        app.router.add_post("/v1/messages/count_tokens", self._count_tokens)
        async with on_loopback(app, shutdown_timeout=0) as self.url:
            yield self

    def _step(self, request: web.Request, tools: Iterable[tuple[str, Json]], results: list[str]) -> Step:
        """Call a tool unless the history has a result."""
        if results:
            return Step(text=f"The tool says: {results[-1]}")
        for name, schema in tools if self.leaf_header not in request.headers else ():
            if name == self.tool:
                return Step(name, self.arguments)
            if not self.tool:
                properties: Json = schema.get("properties") or {}
                needed = schema.get("required") or list(properties)
                return Step(name, {key: _EXAMPLES.get(properties[key].get("type", ""), "Paris") for key in needed})
        return Step(text="hello to you")

    async def _health(self, request: web.Request) -> web.Response:
        return web.Response()

    async def _metrics(self, request: web.Request) -> web.Response:
        return web.Response(
            text='vllm:cache_config_info{kv_cache_size_tokens="1000000"} 1.0\nvllm:num_requests_running 0.0\n'
        )

    async def _models(self, request: web.Request) -> web.Response:
        return web.json_response({"object": "list", "data": [{"id": MODEL_NAME, "object": "model"}]})

    async def _body(self, request: web.Request) -> Json:
        body: Json = await request.json()
        self.asked.append((request.path, dict(request.headers), body))
        return body

    # --- chat completions -------------------------------------------------------------------------------------------

    async def _chat(self, request: web.Request) -> web.StreamResponse:
        body = await self._body(request)
        tools = [(tool["function"]["name"], tool["function"].get("parameters", {})) for tool in body.get("tools", [])]
        step = self._step(request, tools, [_text(m["content"]) for m in body["messages"] if m["role"] == "tool"])
        message: Json = {"role": "assistant", "content": step.text or None}
        if step.tool:
            function = {"name": step.tool, "arguments": step.arguments_json}
            message["tool_calls"] = [{"id": _CALL_ID, "type": "function", "function": function}]
        prompt_tokens = len(json.dumps(body["messages"])) // 4
        usage = {"prompt_tokens": prompt_tokens, "completion_tokens": 20, "total_tokens": prompt_tokens + 20}
        reason = "tool_calls" if step.tool else "stop"
        head = {"id": f"chat-{len(self.asked)}", "created": 0, "model": MODEL_NAME}
        if not body.get("stream"):
            choices = [{"index": 0, "message": message, "finish_reason": reason}]
            return web.json_response({**head, "object": "chat.completion", "choices": choices, "usage": usage})
        head["object"] = "chat.completion.chunk"
        delta = dict(message)
        if step.tool:
            delta["tool_calls"] = [{"index": 0, **message["tool_calls"][0]}]
        chunks: list[Json] = [
            {**head, "choices": [{"index": 0, "delta": delta, "finish_reason": None}]},
            {**head, "choices": [{"index": 0, "delta": {}, "finish_reason": reason}]},
        ]
        if (body.get("stream_options") or {}).get("include_usage"):
            chunks.append({**head, "choices": [], "usage": usage})
        return await _events(request, [("", chunk) for chunk in chunks], end=b"data: [DONE]\n\n")

    # --- responses --------------------------------------------------------------------------------------------------

    async def _responses(self, request: web.Request) -> web.StreamResponse:
        body = await self._body(request)
        items = body["input"] if isinstance(body["input"], list) else []
        results = [_text(item.get("output")) for item in items if item.get("type", "").endswith("call_output")]
        functions = [tool for tool in body.get("tools", []) if tool.get("type") == "function"]
        described = [(tool["name"], tool.get("parameters") or {}) for tool in functions]
        step = self._step(request, described, results)
        if step.tool:
            item = {"type": "function_call", "id": "fc_1", "call_id": _CALL_ID, "status": "completed"}
            item |= {"name": step.tool, "arguments": step.arguments_json}
        else:
            part = {"type": "output_text", "text": step.text, "annotations": [], "logprobs": []}
            item = {"type": "message", "id": "msg_1", "role": "assistant", "status": "completed", "content": [part]}
        input_tokens = len(json.dumps(body["input"])) // 4
        usage = {"input_tokens": input_tokens, "output_tokens": 20, "total_tokens": input_tokens + 20}
        usage |= {"input_tokens_details": {"cached_tokens": 0}, "output_tokens_details": {"reasoning_tokens": 0}}
        answer: Json = {
            "id": f"resp_{len(self.asked)}",
            "object": "response",
            "created_at": 0,
            "model": MODEL_NAME,
            "status": "completed",
            "output": [item],
            "usage": usage,
            "parallel_tool_calls": True,
            "tool_choice": "auto",
            "tools": body.get("tools", []),
            "error": None,
            "incomplete_details": None,
        }
        if not body.get("stream"):
            return web.json_response(answer)
        begun = {**answer, "status": "in_progress", "output": [], "usage": None}
        events: list[Json] = [
            {"type": "response.created", "response": begun},
            {"type": "response.output_item.added", "output_index": 0, "item": item | {"status": "in_progress"}},
        ]
        if not step.tool:
            place = {"item_id": "msg_1", "output_index": 0, "content_index": 0}
            events += [
                {"type": "response.content_part.added", **place, "part": {**part, "text": ""}},
                {"type": "response.output_text.delta", **place, "delta": step.text, "logprobs": []},
                {"type": "response.output_text.done", **place, "text": step.text, "logprobs": []},
                {"type": "response.content_part.done", **place, "part": part},
            ]
        events += [
            {"type": "response.output_item.done", "output_index": 0, "item": item},
            {"type": "response.completed", "response": answer},
        ]
        numbered = [(event["type"], {**event, "sequence_number": number}) for number, event in enumerate(events)]
        return await _events(request, numbered)

    # --- messages ---------------------------------------------------------------------------------------------------

    async def _messages(self, request: web.Request) -> web.StreamResponse:
        body = await self._body(request)
        parts = [part for m in body["messages"] if isinstance(m["content"], list) for part in m["content"]]
        results = [_text(part.get("content")) for part in parts if part.get("type") == "tool_result"]
        tools = [(tool["name"], tool["input_schema"]) for tool in body.get("tools", []) if "input_schema" in tool]
        step = self._step(request, tools, results)
        block: Json = {"type": "text", "text": step.text}
        if step.tool:
            block = {"type": "tool_use", "id": "toolu_1", "name": step.tool, "input": step.arguments}
        usage = {"input_tokens": len(json.dumps(body["messages"])) // 4, "output_tokens": 20}
        reason = "tool_use" if step.tool else "end_turn"
        answer: Json = {
            "id": f"msg_{len(self.asked)}",
            "type": "message",
            "role": "assistant",
            "model": MODEL_NAME,
            "content": [block],
            "stop_reason": reason,
            "stop_sequence": None,
            "usage": usage,
        }
        if not body.get("stream"):
            return web.json_response(answer)
        empty = {**block, "input": {}} if step.tool else {"type": "text", "text": ""}
        delta = {"type": "text_delta", "text": step.text}
        if step.tool:
            delta = {"type": "input_json_delta", "partial_json": step.arguments_json}
        begun = {**answer, "content": [], "stop_reason": None, "usage": {**usage, "output_tokens": 1}}
        events: list[Json] = [
            {"type": "message_start", "message": begun},
            {"type": "content_block_start", "index": 0, "content_block": empty},
            {"type": "content_block_delta", "index": 0, "delta": delta},
            {"type": "content_block_stop", "index": 0},
            {"type": "message_delta", "delta": {"stop_reason": reason, "stop_sequence": None}, "usage": usage},
            {"type": "message_stop"},
        ]
        return await _events(request, [(event["type"], event) for event in events])

    async def _count_tokens(self, request: web.Request) -> web.Response:
        body = await self._body(request)
        return web.json_response({"input_tokens": len(json.dumps(body["messages"])) // 4})


async def _events(request: web.Request, events: Iterable[tuple[str, Json]], *, end: bytes = b"") -> web.StreamResponse:
    response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
    await response.prepare(request)
    for name, event in events:
        await response.write((f"event: {name}\n" if name else "").encode() + b"data: " + json.dumps(event).encode())
        await response.write(b"\n\n")
    await response.write(end)
    await response.write_eof()
    return response
