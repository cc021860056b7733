"""Anthropic's Messages API: the embedded engine's requests and answers at `/v1/messages`.

Modelled after `vllm/entrypoints/anthropic` (vLLM 0.32): its order of events, and its usage, which counts the prompt
without its cached part once that is known.
"""

from __future__ import annotations

import uuid
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import msgspec

from thunderagent.simulator.embedded.answers import Json
from thunderagent.simulator.embedded.requests import ApiError, ChatBody, GenerationBody, Message, json_text

if TYPE_CHECKING:
    from collections.abc import Sequence

    from thunderagent.simulator.embedded.tokens import Call, WordTokenizer
    from thunderagent.simulator.engine.records import FinishedRequest

_STOP_REASONS = {"stop": "end_turn", "length": "max_tokens", "tool_calls": "tool_use"}
_CHOICES = {"auto": "auto", "any": "required", "none": "none"}


class AnthropicMessage(msgspec.Struct):
    """One message: a text, or blocks."""

    role: str
    content: str | list[Json]


class MessagesBody(GenerationBody, kw_only=True):
    """The body of POST /v1/messages; that of `count_tokens` has no limit."""

    messages: list[AnthropicMessage]
    system: str | list[Json] | None = None
    tools: list[Json] | None = None
    tool_choice: Json | None = None
    stop_sequences: list[str] | None = None
    output_config: Json | None = None

    def stops(self) -> list[str]:
        """Return the texts at which the answer ends."""
        return self.stop_sequences or []

    def as_chat(self) -> ChatBody | None:
        """Return what decides about calls and JSON, as a chat; None without. Raises ApiError for an unknown choice."""
        form = (self.output_config or {}).get("format")
        if not (self.tools or form):
            return None
        chosen = self.tool_choice or {"type": "auto"}
        kind = chosen.get("type")
        choice: str | Json | None = _CHOICES.get(kind) if isinstance(kind, str) else None
        if kind == "tool":
            choice = {"function": {"name": chosen.get("name")}}
        if choice is None:
            raise ApiError(f"tool_choice must be auto, any, tool or none, got {chosen!r}.", param="tool_choice")
        own = [tool for tool in self.tools or [] if "input_schema" in tool]  # the rest are the API's server tools
        return ChatBody(
            messages=[_as_chat(message) for message in self.messages],
            tools=[
                {"type": "function", "function": {"name": tool.get("name"), "parameters": tool["input_schema"]}}
                for tool in own
            ],
            tool_choice=choice,
            stop=self.stop_sequences,
            response_format={**form, "json_schema": form} if isinstance(form, dict) else None,
        )

    def encode(self, tokenizer: WordTokenizer) -> list[int]:
        """Return the prompt's tokens; ApiError for a block that is no text."""
        chat = [("system", _text(self.system))] if self.system else []
        chat += [(message.role, _text(message.content)) for message in self.messages]
        return tokenizer.encode_chat(chat, tools=json_text(self.tools) if self.tools else "")


def _as_chat(message: AnthropicMessage) -> Message:
    kinds = [] if isinstance(message.content, str) else [block.get("type") for block in message.content]
    calls: list[Json] = [{} for kind in kinds if kind == "tool_use"]
    return Message("tool" if "tool_result" in kinds else message.role, _text(message.content), calls)


def _text(content: str | list[Json]) -> str:
    return content if isinstance(content, str) else " ".join(map(_block_text, content))


def _block_text(block: Any) -> str:
    kind = block.get("type") if isinstance(block, dict) else type(block).__name__  # a tool's result may be anything
    if kind == "text" and isinstance(block.get("text"), str):
        return str(block["text"])
    if kind == "tool_use":
        return json_text([block.get("name"), block.get("input")])
    if kind == "tool_result":
        result = block.get("content") or ""
        return _text(result) if isinstance(result, str | list) else json_text(result)
    if kind in ("thinking", "redacted_thinking"):
        return ""
    raise ApiError(f"This model reads text only, got a block of type {kind!r}.", param="messages")


def error_body(refusal: ApiError) -> Json:
    """Return a refusal in this API's format."""
    return {"type": "error", "error": {"type": refusal.kind, "message": str(refusal)}}


def _event(body: Json) -> bytes:
    return b"event: %s\ndata: %s\n\n" % (str(body["type"]).encode(), msgspec.json.encode(body))


@dataclass(frozen=True, slots=True)
class MessagesForm:
    """Shape an answer as a message with one block of text, or a block for each call."""

    model: str
    prompt_tokens: int
    calls: Sequence[Call] = ()
    id: str = field(default_factory=lambda: f"msg_{uuid.uuid4().hex}")
    _said: list[str] = field(default_factory=list)

    def opening(self) -> bytes:
        """Return what a stream begins with."""
        usage = {"input_tokens": self.prompt_tokens, "output_tokens": 0}
        block = {"type": "text", "text": ""}
        start = _event({"type": "message_start", "message": self._message([], None, usage)})
        if self.calls:
            return start
        return start + _event({"type": "content_block_start", "index": 0, "content_block": block})

    def piece(self, token_ids: list[int], words: list[str], finish_reason: str | None) -> bytes:  # noqa: ARG002 - the seam
        """Return the event for these words; none if they are none."""
        if not words:
            return b""
        text = (" " if self._said else "") + " ".join(words)
        self._said.extend(words)
        delta = {"type": "text_delta", "text": text}
        return _event({"type": "content_block_delta", "index": 0, "delta": delta})

    def closing(self, words: list[str], finish_reason: str, finished: FinishedRequest) -> bytes:  # noqa: ARG002 - the seam
        """Return what a stream ends with."""
        delta = {"stop_reason": _STOP_REASONS.get(finish_reason), "stop_sequence": None}
        usage = _usage(finished)
        return b"".join(
            (
                *(self._call_events() if finish_reason == "tool_calls" else ()),
                *(() if self.calls else (_event({"type": "content_block_stop", "index": 0}),)),
                _event({"type": "message_delta", "delta": delta, "usage": usage}),
                _event({"type": "message_stop"}),
            )
        )

    def whole(self, token_ids: list[int], words: list[str], finish_reason: str, finished: FinishedRequest) -> Json:  # noqa: ARG002 - the seam
        """Return the answer in one piece."""
        content: list[Json] = [{"type": "text", "text": " ".join(words)}]
        if finish_reason == "tool_calls":
            content = [{**_block(call), "input": call.arguments} for call in self.calls]
        return self._message(content, _STOP_REASONS.get(finish_reason), _usage(finished))

    def _call_events(self) -> list[bytes]:
        events: list[Json] = []
        for index, call in enumerate(self.calls):
            delta = {"type": "input_json_delta", "partial_json": call.arguments_text}
            events += [
                {"type": "content_block_start", "index": index, "content_block": _block(call)},
                {"type": "content_block_delta", "index": index, "delta": delta},
                {"type": "content_block_stop", "index": index},
            ]
        return [_event(event) for event in events]

    def _message(self, content: list[Json], stop_reason: str | None, usage: Json) -> Json:
        head: dict[str, Any] = {"id": self.id, "type": "message", "role": "assistant", "content": content}
        return {**head, "model": self.model, "stop_reason": stop_reason, "stop_sequence": None, "usage": usage}


def _block(call: Call) -> Json:
    return {"type": "tool_use", "id": call.id.replace("call_", "toolu_"), "name": call.name, "input": {}}


def _usage(finished: FinishedRequest) -> Json:
    return {
        "input_tokens": finished.prompt_tokens - finished.cached_tokens,
        "output_tokens": finished.generated_tokens,
        "cache_read_input_tokens": finished.cached_tokens,
    }
