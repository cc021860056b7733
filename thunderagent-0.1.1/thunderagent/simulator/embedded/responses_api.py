"""The Responses API: the embedded engine's requests and answers at `/v1/responses`, and the stored responses.

Modelled after `vllm/entrypoints/openai/responses` (vLLM 0.32, with its store of responses).
"""

from __future__ import annotations

import time
import uuid
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, TypeAlias

import msgspec

from thunderagent.simulator.embedded.answers import Json
from thunderagent.simulator.embedded.requests import ApiError, ChatBody, GenerationBody, Message, json_text

if TYPE_CHECKING:
    from thunderagent.simulator.embedded.tokens import Call, WordTokenizer
    from thunderagent.simulator.engine.records import FinishedRequest

Chat: TypeAlias = list[tuple[str, str]]
"""Speakers and texts."""

STORED_COUNT = 1024


class ResponsesBody(GenerationBody, kw_only=True):
    """The body of POST /v1/responses."""

    input: str | list[Json]
    instructions: str | None = None
    max_output_tokens: int | None = None
    tools: list[Json] | None = None
    tool_choice: str | Json | None = None
    parallel_tool_calls: bool | None = None
    text: Json | None = None
    metadata: Any = None
    store: bool | None = True
    background: bool | None = False
    previous_response_id: str | None = None

    @property
    def limit_tokens(self) -> int | None:
        """Return how many tokens the client asks for at most."""
        return self.max_output_tokens

    def chat_after(self, history: Chat) -> Chat:
        """Return the conversation, without the instructions, which are not inherited; ApiError for what is no text."""
        if isinstance(self.input, str):
            return [*history, ("user", self.input)]
        return [*history, *map(_said, self.input)]

    def as_chat(self, chat: Chat) -> ChatBody | None:
        """Return what decides about calls and JSON, as a chat; None without tools, choice and format."""
        if not (self.tools or self.tool_choice or self.text):
            return None
        own = [tool for tool in self.tools or [] if tool.get("type") == "function"]  # the rest run in the API's server
        choice = self.tool_choice
        form = (self.text or {}).get("format")
        return ChatBody(
            messages=[Message(role, text, [{}] if role == "tool" else None) for role, text in chat],
            tools=[{"type": "function", "function": tool} for tool in own],
            tool_choice={"function": choice} if isinstance(choice, dict) else choice,
            parallel_tool_calls=self.parallel_tool_calls,
            response_format={**form, "json_schema": form} if isinstance(form, dict) else None,
        )

    def encode(self, tokenizer: WordTokenizer, chat: Chat) -> list[int]:
        """Return the prompt's tokens."""
        instructions = [("system", self.instructions)] if self.instructions else []
        return tokenizer.encode_chat([*instructions, *chat], tools=json_text(self.tools) if self.tools else "")


def _said(item: Json) -> tuple[str, str]:
    """Return speaker and text of one item of the input."""
    kind = item.get("type", "message")
    if not isinstance(kind, str):
        raise ApiError("The type of an item must be a text.", param="input")
    if kind == "message":
        content = item.get("content", "")
        parts = [{"text": content}] if isinstance(content, str) else content
        if isinstance(parts, list) and all(
            isinstance(part, dict) and isinstance(part.get("text"), str) for part in parts
        ):
            return str(item.get("role", "user")), " ".join(part["text"] for part in parts)
    elif kind.endswith("_call_output"):
        output = item.get("output", "")
        return "tool", output if isinstance(output, str) else json_text(output)
    elif kind.endswith("_call"):
        return "assistant", json_text([item.get("name"), item.get("arguments") or item.get("action")])
    elif kind == "reasoning":
        return "assistant", ""
    raise ApiError(f"This model reads text only, got an item of type {kind!r}.", param="input")


@dataclass(slots=True)
class Stored:
    """A response that may be fetched again; `cancel` stops one that is generated in the background."""

    response: Json
    chat: Chat
    cancel: Callable[[], object] | None = None


class ResponseStore:
    """The last responses by id."""

    def __init__(self) -> None:
        self._stored: dict[str, Stored] = {}

    def put(self, stored: Stored) -> None:
        """Store a response, or its new state."""
        self._stored[stored.response["id"]] = stored
        if len(self._stored) > STORED_COUNT:
            del self._stored[next(iter(self._stored))]

    def get(self, response_id: str) -> Stored:
        """Return a response; ApiError, with vLLM's text, if there is none."""
        try:
            return self._stored[response_id]
        except KeyError:
            message = f"Response with id '{response_id}' not found."
            raise ApiError(message, status=404, kind="NotFoundError", param="response_id") from None

    def cancel(self, response_id: str) -> Json:
        """Stop a response that is generated in the background; ApiError for any other."""
        stored = self.get(response_id)
        if stored.cancel is None:
            raise ApiError("Cannot cancel a synchronous response.", param="response_id")
        stored.cancel()
        stored.cancel = None
        stored.response["status"] = "cancelled"
        return stored.response


@dataclass(slots=True)
class ResponsesForm:
    """Shape an answer as a response with one message, or an item for each call."""

    model: str
    body: ResponsesBody
    chat: Chat
    store: ResponseStore
    id: str = field(default_factory=lambda: f"resp_{uuid.uuid4().hex}")
    item_id: str = field(default_factory=lambda: f"msg_{uuid.uuid4().hex}")
    created_s: int = field(default_factory=lambda: int(time.time()))
    calls: Sequence[Call] = ()
    _events_count: int = 0
    _said_count: int = 0

    def opening(self) -> bytes:
        """Return what a stream begins with."""
        begun = self.response("in_progress")
        place: Json = {"output_index": 0, "item_id": self.item_id, "content_index": 0}
        item = self._item([], "in_progress")
        start = self._event("response.created", response=begun) + self._event("response.in_progress", response=begun)
        if self.calls:
            return start
        return start + b"".join(
            (
                self._event("response.output_item.added", output_index=0, item=item),
                self._event("response.content_part.added", **place, part=_part("")),
            )
        )

    def piece(self, token_ids: list[int], words: list[str], finish_reason: str | None) -> bytes:  # noqa: ARG002 - the seam
        """Return the event for these words; none if they are none."""
        if not words:
            return b""
        text = (" " if self._said_count else "") + " ".join(words)
        self._said_count += len(words)
        place: Json = {"output_index": 0, "item_id": self.item_id, "content_index": 0}
        return self._event("response.output_text.delta", **place, delta=text, logprobs=[])

    def closing(self, words: list[str], finish_reason: str, finished: FinishedRequest) -> bytes:
        """Return what a stream ends with."""
        response = self.whole([], words, finish_reason, finished)
        if self.calls:
            return self._call_events(response["output"]) + self._event("response.completed", response=response)
        text = " ".join(words)
        place: Json = {"output_index": 0, "item_id": self.item_id, "content_index": 0}
        return b"".join(
            (
                self._event("response.output_text.done", **place, text=text, logprobs=[]),
                self._event("response.content_part.done", **place, part=_part(text)),
                self._event("response.output_item.done", output_index=0, item=response["output"][0]),
                self._event("response.completed", response=response),  # as in vLLM: its status may be incomplete
            )
        )

    def whole(self, token_ids: list[int], words: list[str], finish_reason: str, finished: FinishedRequest) -> Json:  # noqa: ARG002 - the seam
        """Return the answer in one piece, and store it if the client wants that."""
        status = "completed" if finish_reason in {"stop", "tool_calls"} else "incomplete"
        if finish_reason == "tool_calls":
            output = [_call_item(call) for call in self.calls]
            said = [_said(item) for item in output]
        else:
            text = " ".join(words)
            output, said = [self._item([_part(text)], "completed")], [("assistant", text)]
            output = [] if self.calls else output  # an aborted call says nothing
        response = self.response(status, output, _usage(finished))
        if self.body.store:
            self.store.put(Stored(response, [*self.chat, *said]))
        return response

    def _call_events(self, items: list[Json]) -> bytes:
        events = []
        for index, item in enumerate(items):
            place: Json = {"output_index": index, "item_id": item["id"]}
            begun = {**item, "arguments": "", "status": "in_progress"}
            said: Json = {"arguments": item["arguments"], "name": item["name"]}
            events += [
                self._event("response.output_item.added", output_index=index, item=begun),
                self._event("response.function_call_arguments.delta", **place, delta=item["arguments"]),
                self._event("response.function_call_arguments.done", **place, **said),
                self._event("response.output_item.done", output_index=index, item=item),
            ]
        return b"".join(events)

    def response(self, status: str, output: Sequence[Json] = (), usage: Json | None = None) -> Json:
        """Return the response in its current state."""
        body = self.body
        return {
            "id": self.id,
            "object": "response",
            "created_at": self.created_s,
            "status": status,
            "background": bool(body.background),
            "error": None,
            "incomplete_details": {"reason": "max_output_tokens"} if status == "incomplete" else None,
            "instructions": body.instructions,
            "max_output_tokens": body.max_output_tokens,
            "metadata": body.metadata,
            "model": self.model,
            "output": list(output),
            "parallel_tool_calls": body.parallel_tool_calls is not False,
            "previous_response_id": body.previous_response_id,
            "service_tier": "auto",
            "temperature": 1.0,
            "text": None,
            "tool_choice": body.tool_choice or "auto",
            "tools": body.tools or [],
            "top_p": 1.0,
            "truncation": "disabled",
            "usage": usage,
            "user": None,
        }

    def _item(self, content: list[Json], status: str) -> Json:
        return {"id": self.item_id, "type": "message", "role": "assistant", "status": status, "content": content}

    def _event(self, kind: str, **fields: Any) -> bytes:
        body = {"type": kind, "sequence_number": self._events_count, **fields}
        self._events_count += 1
        return b"event: %s\ndata: %s\n\n" % (kind.encode(), msgspec.json.encode(body))


def _call_item(call: Call) -> Json:
    said = {"call_id": call.id, "name": call.name, "arguments": call.arguments_text}
    return {"id": call.id.replace("call_", "fc_"), "type": "function_call", "status": "completed", **said}


def _part(text: str) -> Json:
    return {"type": "output_text", "text": text, "annotations": [], "logprobs": None}


def _usage(finished: FinishedRequest) -> Json:
    return {
        "input_tokens": finished.prompt_tokens,
        "input_tokens_details": {"cached_tokens": finished.cached_tokens, "cache_write_tokens": 0},
        "output_tokens": finished.generated_tokens,
        "output_tokens_details": {"reasoning_tokens": 0},
        "total_tokens": finished.prompt_tokens + finished.generated_tokens,
    }
