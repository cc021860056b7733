"""The Responses API of OpenAI: `/v1/responses`.

Usage comes with the whole response, which in a stream is in its last event. A response has an id by which a client may
ask for it again; the replica that made it alone knows it.
"""

from __future__ import annotations

import re
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
from thunderagent.proxy.dialects.openai import error_body

_SEQUENCE_NUMBER = re.compile(rb'"sequence_number"\s*:\s*(\d{1,18})')


class _Details(msgspec.Struct):
    cached_tokens: int | None = None


class _UsageObject(msgspec.Struct):
    input_tokens: int | None = None
    output_tokens: int | None = None
    input_tokens_details: _Details | None = None


class _Response(msgspec.Struct):
    id: str = ""
    usage: _UsageObject | None = None


class _Event(msgspec.Struct):
    response: _Response | None = None


_decode_response = msgspec.json.Decoder(_Response).decode
_decode_event = msgspec.json.Decoder(_Event).decode


def _usage(usage: _UsageObject | None) -> Usage:
    if usage is None:
        return NO_USAGE
    details = usage.input_tokens_details
    cached_tokens = details.cached_tokens if details is not None else None
    return Usage(count(usage.input_tokens), count(usage.output_tokens), count(cached_tokens))


class _Reader:
    """Follow a stream: its first event says the id, its last the usage."""

    __slots__ = ("_keep_id", "_knows_id", "usage")

    def __init__(self, keep_id: KeepId) -> None:
        self.usage = NO_USAGE
        self._keep_id = keep_id
        self._knows_id = False

    def read(self, events: bytes) -> None:
        if self._knows_id and b'"input_tokens"' not in events:
            return
        for event in read_events(events, b'"response"', _decode_event):
            response = event.response
            if response is None:
                continue
            if response.id and not self._knows_id:
                self._knows_id = True
                self._keep_id(response.id)
            if response.usage is not None:
                self.usage = _usage(response.usage)


class Responses:
    """Speak the Responses API."""

    turn_paths: tuple[str, ...] = ("/v1/responses",)
    asks_for_usage = False  # a stream always ends with it
    token_id_fields: tuple[str, ...] = ()

    def speaks(self, path: str) -> bool:
        """Speak at `/v1/responses` and below."""
        return path == "/v1/responses" or path.startswith("/v1/responses/")

    def read_answer(self, answer: bytes, keep_id: KeepId) -> Usage:
        """Return the usage of a whole response, and tell its id."""
        response = _decode_response(answer)
        if response.id:
            keep_id(response.id)
        return _usage(response.usage)

    def reader(self, keep_id: KeepId) -> UsageReader:
        """Return what follows a stream."""
        return _Reader(keep_id)

    def error(self, status: int, code: str, message: str) -> dict[str, Any]:
        """Return the body of an error."""
        return error_body(status, code, message)

    def break_off(self, code: str, message: str, last_events: bytes) -> bytes:
        """Return the API's own event of an error, numbered after the last one."""
        numbers = _SEQUENCE_NUMBER.findall(last_events)
        number = int(numbers[-1]) + 1 if numbers else 0
        body = {"type": "error", "code": code, "message": message, "param": None, "sequence_number": number}
        return event_of(body, "error")
