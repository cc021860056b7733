"""The chat and text completions of OpenAI.

Usage comes in `usage`, in a stream in an event of its own that has no choices, if it was asked for.
"""

from __future__ import annotations

from typing import Any

import msgspec

from thunderagent.proxy.dialects.base import (
    NO_USAGE,
    KeepId,
    Usage,
    UsageReader,
    count,
    event_of,
    read_events,
)


class _Details(msgspec.Struct):
    cached_tokens: int | None = None


class UsageObject(msgspec.Struct):
    """The usage as the chat API says it."""

    prompt_tokens: int | None = None
    completion_tokens: int | None = None
    prompt_tokens_details: _Details | None = None

    def read(self) -> Usage:
        """Return it."""
        details = self.prompt_tokens_details
        cached_tokens = details.cached_tokens if details is not None else None
        return Usage(count(self.prompt_tokens), count(self.completion_tokens), count(cached_tokens))


class _Answer(msgspec.Struct):
    usage: UsageObject | None = None


_decode_answer = msgspec.json.Decoder(_Answer).decode


class ChoicesReader:
    """Follow a stream of chunks with choices; the last usage counts."""

    __slots__ = ("usage",)

    def __init__(self) -> None:
        """Begin before the first event."""
        self.usage = NO_USAGE

    def read(self, events: bytes) -> None:
        """Take in whole events; those without usage cost one search."""
        if b'"usage"' not in events:
            return
        for answer in read_events(events, b'"usage"', _decode_answer):
            if answer.usage is not None:
                self.usage = answer.usage.read()


def error_body(status: int, code: str, message: str) -> dict[str, Any]:
    """Return an error as OpenAI's APIs give it."""
    kind = "invalid_request_error" if status < 500 else "server_error"
    return {"error": {"message": message, "type": kind, "param": None, "code": code}}


class OpenAI:
    """Speak the completions API, of chats or of texts; a chat has no prompt of token ids to be looked for."""

    asks_for_usage = True

    def __init__(self, turn_path: str = "/v1/chat/completions", *token_id_fields: str) -> None:
        """Speak at one path, where a prompt may be token ids in these fields."""
        self.turn_paths: tuple[str, ...] = (turn_path,)
        self.token_id_fields: tuple[str, ...] = token_id_fields

    def speaks(self, path: str) -> bool:
        """Speak at its path."""
        return path in self.turn_paths

    def read_answer(self, answer: bytes, keep_id: KeepId) -> Usage:  # noqa: ARG002 - the protocol's
        """Return the usage of a whole answer."""
        usage = _decode_answer(answer).usage
        return usage.read() if usage is not None else NO_USAGE

    def reader(self, keep_id: KeepId) -> UsageReader:  # noqa: ARG002 - the protocol's
        """Return what follows a stream."""
        return ChoicesReader()

    def error(self, status: int, code: str, message: str) -> dict[str, Any]:
        """Return the body of an error."""
        return error_body(status, code, message)

    def break_off(self, code: str, message: str, last_events: bytes) -> bytes:  # noqa: ARG002 - the protocol's
        """Return an event with an error, for which clients look in every event."""
        return event_of(error_body(500, code, message))
