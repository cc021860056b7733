"""Shapes the embedded engine's answers like vLLM's (vLLM 0.32, `vllm/entrypoints/openai`)."""

from __future__ import annotations

import base64
import math
import time
import uuid
from array import array
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Protocol, TypeAlias

import msgspec

if TYPE_CHECKING:
    from collections.abc import Sequence

    from thunderagent.simulator.embedded.tokens import Call
    from thunderagent.simulator.engine.records import FinishedRequest

Json: TypeAlias = dict[str, Any]


def event_bytes(value: object) -> bytes:
    """Return one server-sent event."""
    return b"data: " + msgspec.json.encode(value) + b"\n\n"


def usage_of(prompt_tokens: int, generated_tokens: int) -> Json:
    """Return the usage so far."""
    return {
        "prompt_tokens": prompt_tokens,
        "total_tokens": prompt_tokens + generated_tokens,
        "completion_tokens": generated_tokens,
    }


def final_usage_of(finished: FinishedRequest) -> Json:
    """Report like an engine started with --enable-prompt-tokens-details."""
    usage = usage_of(finished.prompt_tokens, finished.generated_tokens)
    return {**usage, "prompt_tokens_details": {"cached_tokens": finished.cached_tokens}}


def models_body(model: str, *, created_s: int, context_limit_tokens: int) -> Json:
    """Return the list of the one served model."""
    entry = {
        "id": model,
        "object": "model",
        "created": created_s,
        "owned_by": "vllm",
        "root": model,
        "parent": None,
        "max_model_len": context_limit_tokens,
    }
    return {"object": "list", "data": [entry]}


def embeddings_body(model: str, texts: list[list[int]], *, dimensions: int, as_base64: bool) -> Json:
    """Return a vector of length 1 for each text, the sum of its tokens' axes: texts that share words are near."""
    entries = []
    for index, token_ids in enumerate(texts):
        counts = [0.0] * dimensions
        for token in token_ids:
            counts[token % dimensions] += 1.0
        length = math.hypot(*counts)
        vector = array("f", [count / length for count in counts])
        value = base64.b64encode(vector.tobytes()).decode() if as_base64 else vector.tolist()
        entries.append({"object": "embedding", "index": index, "embedding": value})
    tokens = sum(map(len, texts))
    usage = {"prompt_tokens": tokens, "total_tokens": tokens}
    return {"object": "list", "data": entries, "model": model, "usage": usage}


@dataclass(frozen=True, slots=True)
class ChatForm:
    """Shape an answer as a chat completion."""

    model: str
    calls: Sequence[Call] = ()
    id: str = field(default_factory=lambda: f"chatcmpl-{uuid.uuid4().hex}")
    created: int = field(default_factory=lambda: int(time.time()))

    def first_chunks(self) -> list[Json]:
        """Return the begin of a stream: the role."""
        return [self._chunk({"role": "assistant", "content": ""}, {"finish_reason": None})]

    def chunk(self, words: list[str], *, is_first: bool, finish_reason: str | None) -> Json:
        """Return the chunk for these words, the answer's first or not, its last if there is a finish reason."""
        text = " ".join(words)
        if words and not is_first:
            text = " " + text
        finish = {"finish_reason": finish_reason} | ({"stop_reason": None} if finish_reason else {})
        if finish_reason == "tool_calls":
            calls = [{"index": index, **_chat_call(call)} for index, call in enumerate(self.calls)]
            return self._chunk({"tool_calls": calls}, {**finish, "token_ids": None})
        return self._chunk({"content": text}, {**finish, "token_ids": None})

    def usage_chunk(self, usage: Json) -> Json:
        """Return the chunk that holds the usage and no choice."""
        return {**self._head("chat.completion.chunk"), "choices": [], "usage": usage}

    def whole(self, words: list[str], finish_reason: str, usage: Json) -> Json:
        """Return the answer in one piece."""
        calls = [_chat_call(call) for call in self.calls] if finish_reason == "tool_calls" else []
        content = None if calls else " ".join(words)
        message: Json = {"role": "assistant", "content": content, "refusal": None, "tool_calls": calls}
        choice = {
            "index": 0,
            "message": message,
            "logprobs": None,
            "finish_reason": finish_reason,
            "stop_reason": None,
        }
        return {**self._head("chat.completion"), "choices": [choice], "usage": usage}

    def _head(self, kind: str) -> Json:
        return {"id": self.id, "object": kind, "created": self.created, "model": self.model}

    def _chunk(self, delta: Json, finish: Json) -> Json:
        choice = {"index": 0, "delta": delta, "logprobs": None, **finish}
        return {**self._head("chat.completion.chunk"), "choices": [choice]}


def _chat_call(call: Call) -> Json:
    function = {"name": call.name, "arguments": call.arguments_text}
    return {"id": call.id, "type": "function", "function": function}


@dataclass(frozen=True, slots=True)
class CompletionForm:
    """Shapes an answer as a text completion; each word follows a space, so that it continues the prompt.

    With `is_formed` the first does not: the text is what a form asks for, and nothing else.
    """

    model: str
    is_formed: bool = False
    id: str = field(default_factory=lambda: f"cmpl-{uuid.uuid4().hex}")
    created: int = field(default_factory=lambda: int(time.time()))

    def first_chunks(self) -> list[Json]:
        """Return what a stream begins with: nothing."""
        return []

    def chunk(self, words: list[str], *, is_first: bool, finish_reason: str | None) -> Json:
        """Return the chunk for these words, the answer's last if there is a finish reason."""
        return {**self._head(), "choices": [self._choice(words, finish_reason, is_first=is_first)]}

    def usage_chunk(self, usage: Json) -> Json:
        """Return the chunk that holds the usage and no choice."""
        return {**self._head(), "choices": [], "usage": usage}

    def whole(self, words: list[str], finish_reason: str, usage: Json) -> Json:
        """Return the answer in one piece."""
        return {**self._head(), "choices": [self._choice(words, finish_reason, is_first=True)], "usage": usage}

    def _head(self) -> Json:
        return {"id": self.id, "object": "text_completion", "created": self.created, "model": self.model}

    def _choice(self, words: list[str], finish_reason: str | None, *, is_first: bool) -> Json:
        text = "".join(f" {word}" for word in words)
        if is_first and self.is_formed:
            text = text[1:]
        return {
            "index": 0,
            "text": text,
            "logprobs": None,
            "finish_reason": finish_reason,
            "stop_reason": None,
        }


Form: TypeAlias = ChatForm | CompletionForm


class EventForm(Protocol):
    """Shapes an answer for an API with its own events."""

    def opening(self) -> bytes:
        """Return the events at the begin of a stream."""

    def piece(self, token_ids: list[int], words: list[str], finish_reason: str | None) -> bytes:
        """Return the events for these tokens and their words, the answer's last if there is a finish reason."""

    def closing(self, words: list[str], finish_reason: str, finished: FinishedRequest) -> bytes:
        """Return the events at the end of a stream; `words` are all that were generated."""

    def whole(self, token_ids: list[int], words: list[str], finish_reason: str, finished: FinishedRequest) -> Json:
        """Return the answer in one piece."""
