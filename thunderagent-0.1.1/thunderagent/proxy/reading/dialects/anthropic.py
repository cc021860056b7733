"""The Messages API of Anthropic: `/v1/messages`.

Its `input_tokens` exclude cached tokens, which have counts of their own; the whole prompt is the sum. In a stream the
first event counts the prompt, the last one the output, and with vLLM the prompt again, better.
"""

# interpreted: msgspec reads the types of its structs, which a compiled class does not keep

from __future__ import annotations

from typing import Any

import msgspec

from thunderagent.proxy.reading.dialects.base import (
    NO_USAGE,
    Completion,
    CompletionReader,
    KeepId,
    Usage,
    UsageReader,
    count,
    event_of,
    read_events,
)
from thunderagent.proxy.reading.dialects.structs import Calls
from thunderagent.proxy.reading.dialects.tool_calls import key_of

_KINDS = {
    400: "invalid_request_error",
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    413: "request_too_large",
    429: "rate_limit_error",
    503: "overloaded_error",
    504: "timeout_error",
}


class _UsageObject(msgspec.Struct):
    input_tokens: int | None = None
    output_tokens: int | None = None
    cache_read_input_tokens: int | None = None
    cache_creation_input_tokens: int | None = None


class _Message(msgspec.Struct):
    usage: _UsageObject | None = None


class _Event(msgspec.Struct):
    message: _Message | None = None
    usage: _UsageObject | None = None


class _Calling(Calls):
    usage: _UsageObject | None = None


_decode_answer = msgspec.json.Decoder(_Message).decode
_decode_calling = msgspec.json.Decoder(_Calling).decode
_decode_event = msgspec.json.Decoder(_Event).decode


def _merged(so_far: Usage, usage: _UsageObject | None) -> Usage:
    """Return the usage updated by one more event.

    Of two counts of the prompt the larger one counts: an event that omits the cached tokens in both places would
    otherwise make the prompt too small.
    """
    if usage is None:
        return so_far
    prompt_tokens = count(usage.input_tokens)
    cached_tokens = count(usage.cache_read_input_tokens)
    if prompt_tokens is not None:
        prompt_tokens += (cached_tokens or 0) + (count(usage.cache_creation_input_tokens) or 0)
        prompt_tokens = max(prompt_tokens, so_far.prompt_tokens or 0)
    output_tokens = count(usage.output_tokens)
    return Usage(
        so_far.prompt_tokens if prompt_tokens is None else prompt_tokens,
        so_far.output_tokens if output_tokens is None else output_tokens,
        so_far.cached_tokens if cached_tokens is None else cached_tokens,
    )


class _Reader:
    """Follows a stream for `message_start` and `message_delta`."""

    mark = b'"usage"'
    usage = NO_USAGE

    def read(self, events: bytes) -> None:
        for read in read_events(events, self.mark, _decode_event):
            self.usage = _merged(self.usage, read.message.usage if read.message is not None else read.usage)


class _Content(msgspec.Struct):
    """The relevant parts of a whole message."""

    content: list[dict[str, Any]] = []


class _Delta(msgspec.Struct):
    text: str = ""
    partial_json: str = ""


class _BlockEvent(msgspec.Struct):
    index: int = 0
    content_block: dict[str, Any] | None = None
    delta: _Delta | None = None


_decode_content = msgspec.json.Decoder(_Content).decode
_decode_block_event = msgspec.json.Decoder(_BlockEvent).decode


class _Completions:
    """Assembles the blocks of a message: its texts, and its tool calls."""

    __slots__ = ("_blocks", "_pieces", "builds_all", "kept_chars")

    def __init__(self) -> None:
        self._blocks: dict[int, dict[str, Any]] = {}
        self._pieces: dict[int, list[str]] = {}
        self.kept_chars = 0
        self.builds_all = True

    def read_answer(self, answer: bytes) -> None:
        self._blocks = dict(enumerate(_decode_content(answer).content))

    def read_event(self, data: bytes) -> None:
        event = _decode_block_event(data)
        if event.content_block is not None:
            self._blocks[event.index] = event.content_block
        elif event.delta is not None and event.index in self._blocks:
            piece = event.delta.text + event.delta.partial_json
            self._pieces.setdefault(event.index, []).append(piece)
            self.kept_chars += len(piece)

    def choices(self) -> list[Completion]:
        if not self._blocks:
            return []
        content = [self._block(index) for index in sorted(self._blocks)]
        return [Completion(({"role": "assistant", "content": content},))]

    def _block(self, index: int) -> dict[str, Any]:
        block, pieces = self._blocks[index], self._pieces.get(index)
        if not pieces:
            return block
        said = "".join(pieces)
        return {**block, "input": said} if block.get("type") == "tool_use" else {**block, "text": said}


class Anthropic:
    """The Messages API."""

    turn_paths: tuple[str, ...] = ("/v1/messages",)
    asks_for_usage = False  # a stream always has it
    last_events: tuple[bytes, ...] = (b"message_stop",)
    token_id_fields: tuple[str, ...] = ()

    def speaks(self, path: str) -> bool:
        """Return whether the path is `/v1/messages` or below."""
        return path == "/v1/messages" or path.startswith("/v1/messages/")

    def read_answer(self, answer: bytes, keep_id: KeepId) -> Usage:  # noqa: ARG002 - the protocol's
        """Return the usage of a whole message."""
        return _merged(NO_USAGE, _decode_answer(answer).usage)

    def read_sound(self, answer: bytes) -> Usage | None:  # noqa: ARG002 - the protocol's
        """Return None: errors are looked for by their marks."""
        return None

    def read_calling(self, answer: bytes, keep_id: KeepId) -> tuple[Usage, str]:  # noqa: ARG002 - the protocol's
        """Return the usage of a whole message, and the key of what it calls."""
        read = _decode_calling(answer)
        return _merged(NO_USAGE, read.usage), key_of(read)

    def reader(self, keep_id: KeepId) -> UsageReader:  # noqa: ARG002 - the protocol's
        """Return a reader of a stream."""
        return _Reader()

    def completions(self) -> CompletionReader:
        """Return a reader of an answer's blocks."""
        return _Completions()

    def error(self, status: int, code: str, message: str) -> dict[str, Any]:
        """Return the body of an error; `code` is an additional field."""
        kind = _KINDS.get(status, "invalid_request_error" if status < 500 else "api_error")
        return {"type": "error", "error": {"type": kind, "message": message, "code": code}}

    def break_off(self, status: int, code: str, message: str, last_events: bytes) -> bytes:  # noqa: ARG002 - as others
        """Return the API's own event of an error."""
        return event_of(self.error(status, code, message), "error")
