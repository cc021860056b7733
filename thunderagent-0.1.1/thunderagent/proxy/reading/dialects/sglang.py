"""SGLang's own `/generate`.

Usage is in `meta_info`, in every event of a stream, up to that event. Several prompts, or several samples of one, are
answered by a list, in a stream by events that have an `index`; their usage is summed.
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
    count,
    event_of,
    written_ids,
)
from thunderagent.proxy.reading.dialects.structs import Calls
from thunderagent.proxy.reading.dialects.tool_calls import key_of
from thunderagent.proxy.reading.sse import UNREADABLE, data_of, events_in

MAX_INDEXES = 1024
"""How many answers in one stream are distinguished."""

_INDEX = re.compile(rb'"index"\s*:\s*(\d+)\s*}\s*\Z')


class _MetaInfo(msgspec.Struct):
    prompt_tokens: int | None = None
    completion_tokens: int | None = None
    cached_tokens: int | None = None


class _Answer(msgspec.Struct):
    meta_info: _MetaInfo | None = None


class _Calling(Calls):
    meta_info: _MetaInfo | None = None


_decode_calling = msgspec.json.Decoder(_Calling).decode
_decode_answers = msgspec.json.Decoder(_Answer | list[_Answer]).decode


def _sum(answers: list[_Answer]) -> Usage:
    """Return the total usage of several answers."""
    usages = [answer.meta_info for answer in answers if answer.meta_info is not None]
    prompt, output, cached = (
        [tokens for tokens in map(count, counts) if tokens is not None]
        for counts in (
            [usage.prompt_tokens for usage in usages],
            [usage.completion_tokens for usage in usages],
            [usage.cached_tokens for usage in usages],
        )
    )
    return Usage(*(sum(counts) if counts else None for counts in (prompt, output, cached)))


def _read(answer: bytes) -> list[_Answer]:
    answers = _decode_answers(answer)
    return answers if isinstance(answers, list) else [answers]


class _Reader:
    """Keeps the last event of each answer; only that one is decoded, because each repeats all the text before it."""

    __slots__ = ("_last",)

    mark = b'"meta_info"'

    def __init__(self) -> None:
        self._last: dict[bytes, bytes] = {}

    def read(self, events: bytes) -> None:
        for event in events_in(events):
            if self.mark not in event:
                continue
            index = _INDEX.search(event, max(0, len(event) - 64))
            key = index[1] if index is not None else b""
            if key in self._last or len(self._last) < MAX_INDEXES:
                self._last[key] = event

    @property
    def usage(self) -> Usage:
        answers = []
        for event in self._last.values():
            try:
                answers += _read(data_of(event))
            except UNREADABLE:
                continue
        return _sum(answers) if answers else NO_USAGE


class _Generated(msgspec.Struct):
    text: str | None = None
    output_ids: msgspec.Raw = msgspec.Raw()
    meta_info: _MetaInfo | None = None

    def is_a_piece(self) -> bool:
        """Return whether these tokens are only the last ones: an engine may be configured to stream that way."""
        so_far = self.meta_info.completion_tokens if self.meta_info is not None else None
        count = written_ids(bytes(self.output_ids)).count(b",")
        return so_far is not None and 0 < count < so_far


_decode_generated = msgspec.json.Decoder(_Generated | list[_Generated]).decode


def _read_generated(answer: bytes) -> list[_Generated]:
    answers = _decode_generated(answer)
    return answers if isinstance(answers, list) else [answers]


class _Completions:
    """Keeps what counts of each answer: the last event, which repeats all before it, or every piece."""

    __slots__ = ("_events", "_in_pieces", "_whole", "builds_all", "kept_chars")

    def __init__(self) -> None:
        self._events: dict[int, list[bytes]] = {}
        self._in_pieces: bool | None = None
        self._whole: list[_Generated] = []
        self.kept_chars = 0
        self.builds_all = False

    def read_answer(self, answer: bytes) -> None:
        self._whole = _read_generated(answer)

    def read_event(self, data: bytes) -> None:
        if b'"meta_info"' not in data:
            return
        index = _INDEX.search(data, max(0, len(data) - 64))
        kept = self._events.setdefault(int(index[1]) if index is not None else 0, [])
        if kept and self._in_pieces is None:
            self._in_pieces = any(part.is_a_piece() for part in _read_generated(data))
        if kept and not self._in_pieces:
            self.kept_chars -= len(kept.pop())
        kept.append(data)
        self.kept_chars += len(data)

    def choices(self) -> list[Completion]:
        answers = [[whole] for whole in self._whole]
        try:
            answers += [
                [part for event in self._events[index] for part in _read_generated(event)]
                for index in sorted(self._events)
            ]
        except UNREADABLE:
            return []
        return [
            Completion(
                text="".join(part.text or "" for part in parts),
                token_ids=b"".join(written_ids(bytes(part.output_ids)) for part in parts),
            )
            for parts in answers
        ]


class SGLang:
    """The API of SGLang."""

    turn_paths: tuple[str, ...] = ("/generate",)
    asks_for_usage = False  # it is in every event
    last_events: tuple[bytes, ...] = ()
    token_id_fields: tuple[str, ...] = ("input_ids",)

    def speaks(self, path: str) -> bool:
        """Return whether the path is `/generate`: SGLang's other paths are OpenAI's."""
        return path == "/generate"

    def read_answer(self, answer: bytes, keep_id: KeepId) -> Usage:  # noqa: ARG002 - the protocol's
        """Return the usage of a whole answer, or of a list of them."""
        return _sum(_read(answer))

    def read_sound(self, answer: bytes) -> Usage | None:  # noqa: ARG002 - the protocol's
        """Return None: errors are looked for by their marks."""
        return None

    def read_calling(self, answer: bytes, keep_id: KeepId) -> tuple[Usage, str]:  # noqa: ARG002 - the protocol's
        """Return the usage of one answer, and the key of what it calls; a list of them calls nothing."""
        read = _decode_calling(answer)
        return _sum([_Answer(read.meta_info)]), key_of(read)

    def reader(self, keep_id: KeepId) -> UsageReader:  # noqa: ARG002 - the protocol's
        """Return a reader of a stream."""
        return _Reader()

    def completions(self) -> CompletionReader:
        """Return a reader of an answer's texts and tokens."""
        return _Completions()

    def error(self, status: int, code: str, message: str) -> dict[str, Any]:  # noqa: ARG002 - the protocol's
        """Return the body of an error; `code` is an additional field."""
        return {"error": {"message": message, "code": code}}

    def break_off(self, status: int, code: str, message: str, last_events: bytes) -> bytes:  # noqa: ARG002 - as others
        """Return an event with an error, as SGLang itself ends a stream that failed."""
        return event_of(self.error(status, code, message))
