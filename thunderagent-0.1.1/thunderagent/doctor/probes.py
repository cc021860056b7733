"""Small requests that generate, in the chat API or, where an engine has no chat template, as plain completions."""

from __future__ import annotations

import secrets
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from thunderagent.doctor.asking import Answer, Asker

CHAT_PATH = "/v1/chat/completions"
COMPLETION_PATH = "/v1/completions"
PROMPT_WORDS_COUNT = 400
"""Some blocks of any engine's cache: in hybrid models a block holds some hundred tokens."""

WORDS = (
    *("river", "stone", "green", "seven", "paper", "cloud", "horse", "music", "table", "light", "winter", "bread"),
    *("garden", "window", "silver", "morning", "letter", "island", "button", "forest", "copper", "answer", "market"),
)

Message = dict[str, str]


@dataclass(frozen=True, slots=True)
class Usage:
    """A turn's usage; `cached_tokens` None: not reported."""

    prompt_tokens: int
    cached_tokens: int | None


def words(limit_tokens: int | None) -> str:
    """Return a prompt that nobody sent before; a quarter of `limit_tokens` at most, at two tokens per word."""
    count = PROMPT_WORDS_COUNT if limit_tokens is None else max(8, min(PROMPT_WORDS_COUNT, limit_tokens // 8))
    return " ".join(secrets.choice(WORDS) for _ in range(count))


async def send(
    asker: Asker,
    model: str,
    messages: Sequence[Message],
    *,
    max_tokens: int,
    prefix: str = "",
    headers: Mapping[str, str] | None = None,
    **fields: Any,
) -> Answer:
    """Send a turn to the paths after `prefix`; never raise. As a completion if the chat API does not take it."""
    body = {"model": model, "max_tokens": max_tokens, "temperature": 0, **fields}
    answer = await asker.post(prefix + CHAT_PATH, {**body, "messages": list(messages)}, headers)
    if answer.status not in (400, 404, 405, 501):
        return answer
    prompt = "\n".join(message["content"] for message in messages)
    completion = await asker.post(prefix + COMPLETION_PATH, {**body, "prompt": prompt}, headers)
    return completion if completion.is_good else answer


def usage_of(answer: Answer) -> Usage | None:
    """Return the usage in the answer; None if there is none."""
    usage = answer.json().get("usage")
    if not isinstance(usage, dict) or not isinstance(usage.get("prompt_tokens"), int):
        return None
    details = usage.get("prompt_tokens_details")
    cached = details.get("cached_tokens") if isinstance(details, dict) else None
    return Usage(usage["prompt_tokens"], cached if isinstance(cached, int) else None)


def text_of(answer: Answer) -> str:
    """Return the model's text; empty if it only reasoned."""
    choices = answer.json().get("choices")
    first = choices[0] if isinstance(choices, list) and choices and isinstance(choices[0], dict) else {}
    message = first.get("message")
    said = message.get("content") if isinstance(message, dict) else first.get("text")
    return said if isinstance(said, str) else ""
