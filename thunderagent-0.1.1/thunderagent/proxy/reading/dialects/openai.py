"""The chat and text completions of OpenAI.

Usage is in `usage`; in a stream it is in an event without choices, if it was requested.
"""

# compiled: each turn passes here

from __future__ import annotations

from typing import Any, Final

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
    written_ids,
)
from thunderagent.proxy.reading.dialects.structs import (
    CallsAndUsage,
    SaidCall,
    SaidChoice,
    SaidChoices,
    SoundAnswer,
    UsageObject,
    UsageOnly,
)
from thunderagent.proxy.reading.dialects.tool_calls import key_of

_decode_answer: Final = msgspec.json.Decoder(UsageOnly).decode
_decode_sound: Final = msgspec.json.Decoder(SoundAnswer).decode
_decode_calling: Final = msgspec.json.Decoder(CallsAndUsage).decode


def _usage_of(read: UsageObject | None) -> Usage:
    if read is None:
        return NO_USAGE
    details = read.prompt_tokens_details
    cached_tokens = details.cached_tokens if details is not None else None
    return usage_of(read.prompt_tokens, read.completion_tokens, cached_tokens)


class ChoicesReader:
    """Follows a stream of chunks with choices; the last usage counts."""

    mark: bytes = b'"usage"'
    usage: Usage = NO_USAGE

    def read(self, events: bytes) -> None:
        """Read whole events, if some have a usage."""
        for answer in read_events(events, self.mark, _decode_answer):
            if answer.usage is not None:
                self.usage = _usage_of(answer.usage)


_decode_choices: Final = msgspec.json.Decoder(SaidChoices).decode


class _Said:
    """What one choice contains so far."""

    __slots__ = ("calls", "has_message", "text", "token_ids")

    def __init__(self) -> None:
        self.has_message = False
        self.text: list[str] = []
        self.token_ids: list[bytes] = []
        self.calls: dict[int, list[str]] = {}
        """Id, name and arguments of each call."""

    def add(self, choice: SaidChoice) -> int:
        """Add a piece; return its number of characters."""
        message = choice.message or choice.delta
        text = (choice.text or "") + ((message.content or "") if message is not None else "")
        self.text.append(text)
        self.token_ids.append(written_ids(bytes(choice.token_ids)))
        kept_chars = len(text) + len(self.token_ids[-1])
        if message is not None:
            self.has_message = True
            for place, call in enumerate(message.tool_calls or ()):
                kept_chars += self._add_call(place if call.index is None else call.index, call)
        return kept_chars

    def _add_call(self, place: int, call: SaidCall) -> int:
        kept = self.calls.setdefault(place, ["", "", ""])
        kept[0] = kept[0] or call.id or ""
        if call.function is None:
            return 0
        arguments = call.function.arguments if isinstance(call.function.arguments, str) else ""
        kept[1] += call.function.name or ""
        kept[2] += arguments
        return len(arguments)

    def completion(self) -> Completion:
        text, token_ids = "".join(self.text), b"".join(self.token_ids)
        if not self.has_message:
            return Completion(text=text, token_ids=token_ids)
        calls = [
            {"id": call_id, "function": {"name": name, "arguments": arguments}}
            for call_id, name, arguments in self.calls.values()
        ]
        message = {"role": "assistant", "content": text, "tool_calls": calls}
        return Completion((message,), token_ids=token_ids)


class _Completions:
    """Assembles the choices."""

    __slots__ = ("_said", "builds_all", "kept_chars")

    def __init__(self) -> None:
        self._said: dict[int, _Said] = {}
        self.kept_chars = 0
        self.builds_all = False

    def read_answer(self, answer: bytes) -> None:
        for choice in _decode_choices(answer).choices or ():
            self.kept_chars += self._said.setdefault(choice.index, _Said()).add(choice)

    def read_event(self, data: bytes) -> None:
        self.read_answer(data)

    def choices(self) -> list[Completion]:
        return [self._said[index].completion() for index in sorted(self._said)]


def error_body(status: int, code: str, message: str) -> dict[str, Any]:
    """Return an error in the format of OpenAI's APIs."""
    kind = "invalid_request_error" if status < 500 else "server_error"
    return {"error": {"message": message, "type": kind, "param": None, "code": code}}


class OpenAI:
    """The completions API, of chats or of texts; a chat has no prompt of token ids to look for."""

    asks_for_usage = True
    last_events: tuple[bytes, ...] = ()

    def __init__(self, turn_path: str = "/v1/chat/completions", *token_id_fields: str) -> None:
        """Serve one path, where a prompt may be token ids in these fields."""
        self.turn_paths: tuple[str, ...] = (turn_path,)
        self.token_id_fields: tuple[str, ...] = token_id_fields

    def speaks(self, path: str) -> bool:
        """Return whether it is this path."""
        return path in self.turn_paths

    def read_answer(self, answer: bytes, keep_id: KeepId) -> Usage:  # noqa: ARG002 - the protocol's
        """Return the usage of a whole answer."""
        return _usage_of(_decode_answer(answer).usage)

    def read_sound(self, answer: bytes) -> Usage | None:
        """Return the usage of a whole answer that surely reports no error."""
        return _usage_of(_decode_sound(answer).usage)

    def read_calling(self, answer: bytes, keep_id: KeepId) -> tuple[Usage, str]:  # noqa: ARG002 - the protocol's
        """Return the usage of a whole answer, and the key of what it calls."""
        read = _decode_calling(answer)
        return _usage_of(read.usage), key_of(read)

    def reader(self, keep_id: KeepId) -> UsageReader:  # noqa: ARG002 - the protocol's
        """Return a reader of a stream."""
        return ChoicesReader()

    def completions(self) -> CompletionReader:
        """Return a reader of an answer's choices."""
        return _Completions()

    def error(self, status: int, code: str, message: str) -> dict[str, Any]:
        """Return the body of an error."""
        return error_body(status, code, message)

    def break_off(self, status: int, code: str, message: str, last_events: bytes) -> bytes:  # noqa: ARG002 - as others
        """Return an event with an error; clients look for one in every event."""
        return event_of(error_body(status, code, message))
