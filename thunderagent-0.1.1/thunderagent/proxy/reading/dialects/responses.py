"""The Responses API of OpenAI: `/v1/responses`.

Usage comes with the whole response, which in a stream is in its last event. A response has an id by which a client may
request it again; only the replica that made it knows it.
"""

# interpreted: msgspec reads the types of its structs, which a compiled class does not keep

from __future__ import annotations

import re
from typing import Any

import msgspec

from thunderagent.proxy.reading.dialects.base import (
    NO_USAGE,
    Completion,
    CompletionReader,
    KeepId,
    Usage,
    UsageReader,
    event_of,
    read_events,
    usage_of,
)
from thunderagent.proxy.reading.dialects.openai import error_body
from thunderagent.proxy.reading.dialects.structs import Calls
from thunderagent.proxy.reading.dialects.tool_calls import key_of

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


class _Calling(Calls):
    id: str = ""
    usage: _UsageObject | None = None


_decode_response = msgspec.json.Decoder(_Response).decode
_decode_calling = msgspec.json.Decoder(_Calling).decode
_decode_event = msgspec.json.Decoder(_Event).decode


def _usage(usage: _UsageObject | None) -> Usage:
    if usage is None:
        return NO_USAGE
    details = usage.input_tokens_details
    cached_tokens = details.cached_tokens if details is not None else None
    return usage_of(usage.input_tokens, usage.output_tokens, cached_tokens)


class _Reader:
    """Follows a stream: its first event has the id, its last the usage."""

    __slots__ = ("_keep_id", "_knows_id", "usage")

    mark = b'"response"'

    def __init__(self, keep_id: KeepId) -> None:
        self.usage = NO_USAGE
        self._keep_id = keep_id
        self._knows_id = False

    def read(self, events: bytes) -> None:
        if self._knows_id and b'"input_tokens"' not in events:
            return
        for event in read_events(events, self.mark, _decode_event):
            response = event.response
            if response is None:
                continue
            if response.id and not self._knows_id:
                self._knows_id = True
                self._keep_id(response.id)
            if response.usage is not None:
                self.usage = _usage(response.usage)


class _Output(msgspec.Struct):
    output: list[msgspec.Raw] = []


class _ItemEvent(msgspec.Struct):
    type: str = ""
    output_index: int = 0
    item: msgspec.Raw = msgspec.Raw()
    response: _Output | None = None


_LAST_EVENTS = (b"response.completed", b"response.incomplete", b"response.failed")
_MARKS = (b'"response.output_item.done"', *(b'"%s"' % kind for kind in _LAST_EVENTS))
_decode_output = msgspec.json.Decoder(_Output).decode
_decode_item_event = msgspec.json.Decoder(_ItemEvent).decode


class _Kind(msgspec.Struct):
    type: str = ""


class _Part(msgspec.Struct):
    type: str = ""
    text: str = ""


class _MessageItem(msgspec.Struct):
    """A message without its log probabilities, which are most of it."""

    role: str = "assistant"
    content: list[_Part] = []


_decode_kind = msgspec.json.Decoder(_Kind).decode
_decode_message = msgspec.json.Decoder(_MessageItem).decode
_decode_item = msgspec.json.Decoder(dict[str, Any]).decode


def _item(item: msgspec.Raw) -> dict[str, Any]:
    """Return the parts of a response's item that a client sends back. Raises one of `UNREADABLE`."""
    if _decode_kind(item).type != "message":
        whole: dict[str, Any] = _decode_item(item)
        return whole
    return {"type": "message", **msgspec.to_builtins(_decode_message(item))}


class _Completions:
    """Collects the items of a response.

    A stream has them twice, each when it is done and all at the end, and engines give some of them other ids there.
    Some clients keep the former, others the latter, so both count.
    """

    __slots__ = ("_done", "_output", "builds_all", "kept_chars")

    def __init__(self) -> None:
        self._done: dict[int, dict[str, Any]] = {}
        self._output: list[dict[str, Any]] = []
        self.kept_chars = 0
        self.builds_all = True

    def read_answer(self, answer: bytes) -> None:
        self._output = list(map(_item, _decode_output(answer).output))

    def read_event(self, data: bytes) -> None:
        if not any(mark in data for mark in _MARKS):
            return
        event = _decode_item_event(data)
        if bytes(memoryview(event.item)[:1]) == b"{":
            self._done[event.output_index] = _item(event.item)
            self.kept_chars += len(data)
        if event.type.encode() in _LAST_EVENTS and event.response is not None:
            self._output = list(map(_item, event.response.output))

    def choices(self) -> list[Completion]:
        done = [self._done[index] for index in sorted(self._done)]
        return [Completion(items) for items in (done, self._output) if items]


class Responses:
    """The Responses API."""

    turn_paths: tuple[str, ...] = ("/v1/responses",)
    asks_for_usage = False  # a stream always ends with it
    last_events: tuple[bytes, ...] = _LAST_EVENTS
    token_id_fields: tuple[str, ...] = ()

    def speaks(self, path: str) -> bool:
        """Return whether the path is `/v1/responses` or below."""
        return path == "/v1/responses" or path.startswith("/v1/responses/")

    def read_answer(self, answer: bytes, keep_id: KeepId) -> Usage:
        """Return the usage of a whole response, and report its id."""
        response = _decode_response(answer)
        if response.id:
            keep_id(response.id)
        return _usage(response.usage)

    def read_sound(self, answer: bytes) -> Usage | None:  # noqa: ARG002 - the protocol's
        """Return None: errors are looked for by their marks."""
        return None

    def read_calling(self, answer: bytes, keep_id: KeepId) -> tuple[Usage, str]:
        """Return the usage of a whole response, and the key of what it calls; report its id."""
        response = _decode_calling(answer)
        tool = key_of(response)
        if response.id:
            keep_id(response.id)
        return _usage(response.usage), tool

    def reader(self, keep_id: KeepId) -> UsageReader:
        """Return a reader of a stream."""
        return _Reader(keep_id)

    def completions(self) -> CompletionReader:
        """Return a reader of an answer's items."""
        return _Completions()

    def error(self, status: int, code: str, message: str) -> dict[str, Any]:
        """Return the body of an error."""
        return error_body(status, code, message)

    def break_off(self, status: int, code: str, message: str, last_events: bytes) -> bytes:  # noqa: ARG002 - as others
        """Return the API's own event of an error, numbered after the last one."""
        numbers = _SEQUENCE_NUMBER.findall(last_events)
        number = int(numbers[-1]) + 1 if numbers else 0
        body = {"type": "error", "code": code, "message": message, "param": None, "sequence_number": number}
        return event_of(body, "error")
