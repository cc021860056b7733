"""Shape what the simulator's engine answers as SGLang does (0.5, `tokenizer_manager.py`, `entrypoints/openai`)."""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from math import log
from typing import TYPE_CHECKING, Any, TypeAlias

from thunderagent.simulator.embedded.answers import usage_of
from thunderagent.simulator.embedded.tokens import END_TOKEN, SPOKEN_WORD_COUNT

if TYPE_CHECKING:
    from tests.doubles.sglang.requests import Asked
    from thunderagent.simulator.embedded.tokens import WordTokenizer
    from thunderagent.simulator.engine.realtime import Generation

Json: TypeAlias = dict[str, Any]
WEIGHT_VERSION = "default"

_LOGPROB = -log(SPOKEN_WORD_COUNT)
"""Log probability of every token: words are drawn uniformly."""


@dataclass(slots=True, eq=False)
class Running:
    """A generation whose answer is being collected."""

    asked: Asked
    generation: Generation
    started_s: float
    tag_incarnation: int = 0
    cached_tokens: int = 0
    weight_version: str = WEIGHT_VERSION

    @property
    def output_ids(self) -> list[int]:
        """Return the tokens so far."""
        return list(self.generation.request.output_token_ids[: self.generation.generated_count])

    @property
    def finish_reason(self) -> Json | None:
        """Return why generation ended; None while it goes on."""
        generation = self.generation
        if generation.aborted:
            message = "Aborted" if generation.generated_count else "Abort in waiting queue"
            return {"type": "abort", "message": message, "status_code": None, "err_type": None}
        if generation.finished is None:
            return None
        if generation.finish_reason == "stop":
            return {"type": "stop", "matched": END_TOKEN}
        return {"type": "length", "length": generation.generated_count}


def generate_answer(running: Running, tokenizer: WordTokenizer, *, now_s: float) -> Json:
    """Return the answer of /generate for a generation so far, complete each time."""
    output_ids = running.output_ids
    meta_info: Json = {
        "id": running.asked.rid,
        "finish_reason": running.finish_reason,
        "prompt_tokens": len(running.asked.prompt),
        "weight_version": running.weight_version,
        "num_retractions": running.generation.finished.preemption_count if running.generation.finished else 0,
        "completion_tokens": len(output_ids),
        "cached_tokens": running.cached_tokens,
    }
    if running.asked.wants_logprobs:
        meta_info["input_token_logprobs"] = []
        meta_info["output_token_logprobs"] = [[_LOGPROB, token, None] for token in output_ids]
    if running.generation.is_over:
        meta_info["e2e_latency"] = now_s - running.started_s
    text = "".join(f" {word}" for word in tokenizer.spoken_words(output_ids))
    return {"text": text, "output_ids": output_ids, "meta_info": meta_info}


@dataclass(frozen=True, slots=True)
class OpenAIForm:
    """Shape an answer as a chat completion, or as a text completion."""

    model: str
    id: str
    is_chat: bool
    weight_version: str
    created: int = field(default_factory=lambda: int(time.time()))

    def first_chunks(self) -> list[Json]:
        """Return the opening of a stream: for a chat, the role."""
        return (
            [self._chunk({"reasoning_content": None, "role": "assistant", "content": ""}, None)] if self.is_chat else []
        )

    def chunk(self, words: list[str], *, is_first: bool) -> Json:
        """Return the chunk for these words."""
        text = "".join(f" {word}" for word in words)
        if not self.is_chat:
            return self._chunk(text, None)
        return self._chunk({"reasoning_content": None, "content": text[1:] if is_first else text}, None)

    def last_chunk(self, finish_reason: Json) -> Json:
        """Return the chunk with the finish reason."""
        return self._chunk({"reasoning_content": None} if self.is_chat else "", finish_reason)

    def usage_chunk(self, usage: Json) -> Json:
        """Return the chunk that holds the usage and no choice."""
        return {**self._head(chunk=True), "choices": [], "usage": usage}

    def whole(self, words: list[str], finish_reason: Json, usage: Json) -> Json:
        """Return the answer in one piece."""
        text = "".join(f" {word}" for word in words)
        choice: Json = {"index": 0, "text": text}
        if self.is_chat:
            message = {"role": "assistant", "content": text[1:], "reasoning_content": None}
            choice = {"index": 0, "message": message}
        choice |= {"logprobs": None, **_finish(finish_reason)}
        metadata = {"weight_version": self.weight_version}
        return {**self._head(chunk=False), "choices": [choice], "usage": usage, "metadata": metadata}

    def _head(self, *, chunk: bool) -> Json:
        kind = f"chat.completion{'.chunk' if chunk else ''}" if self.is_chat else "text_completion"
        return {"id": self.id, "object": kind, "created": self.created, "model": self.model}

    def _chunk(self, said: Json | str, finish_reason: Json | None) -> Json:
        piece = {"text": said} if isinstance(said, str) else {"delta": said}
        choice = {"index": 0, **piece, "logprobs": None, **_finish(finish_reason)}
        no_usage = {} if self.is_chat else {"usage": None}
        return {**self._head(chunk=True), "choices": [choice], **no_usage}


def _finish(finish_reason: Json | None) -> Json:
    if finish_reason is None:
        return {"finish_reason": None, "matched_stop": None}
    return {"finish_reason": finish_reason["type"], "matched_stop": finish_reason.get("matched")}


def usage(running: Running) -> Json:
    """Return the usage of an engine that was started with --enable-cache-report."""
    said = usage_of(len(running.asked.prompt), running.generation.generated_count)
    return {**said, "prompt_tokens_details": {"cached_tokens": running.cached_tokens}, "reasoning_tokens": 0}
