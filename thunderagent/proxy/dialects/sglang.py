"""SGLang's own `/generate`.

Usage comes in `meta_info`, in every event of a stream: each says all that is known by then. Several prompts, or several
samples of one, are answered by a list, in a stream by events that have an `index`; their usage is summed.
"""

from __future__ import annotations

import re
from typing import Any

import msgspec

from thunderagent.proxy.dialects.base import NO_USAGE, UNREADABLE, KeepId, Usage, UsageReader, count, event_of
from thunderagent.proxy.dialects.sse import data_of, events_in

MAX_INDEXES = 1024
"""So many answers in one stream are told apart."""

_INDEX = re.compile(rb'"index"\s*:\s*(\d+)\s*}\s*\Z')


class _MetaInfo(msgspec.Struct):
    prompt_tokens: int | None = None
    completion_tokens: int | None = None
    cached_tokens: int | None = None


class _Answer(msgspec.Struct):
    meta_info: _MetaInfo | None = None


_decode_answers = msgspec.json.Decoder(_Answer | list[_Answer]).decode


def _sum(answers: list[_Answer]) -> Usage:
    """Return what several answers used together."""
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
    """Keep the last event of each answer; only that one is decoded, because each repeats all the text before it."""

    __slots__ = ("_last",)

    def __init__(self) -> None:
        self._last: dict[bytes, bytes] = {}

    def read(self, events: bytes) -> None:
        for event in events_in(events):
            if b'"meta_info"' not in event:
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


class SGLang:
    """Speak the API of SGLang."""

    turn_paths: tuple[str, ...] = ("/generate",)
    asks_for_usage = False  # it is in every event
    token_id_fields: tuple[str, ...] = ("input_ids",)

    def speaks(self, path: str) -> bool:
        """Speak at `/generate` alone: SGLang's other paths are OpenAI's."""
        return path == "/generate"

    def read_answer(self, answer: bytes, keep_id: KeepId) -> Usage:  # noqa: ARG002 - the protocol's
        """Return the usage of a whole answer, or of a list of them."""
        return _sum(_read(answer))

    def reader(self, keep_id: KeepId) -> UsageReader:  # noqa: ARG002 - the protocol's
        """Return what follows a stream."""
        return _Reader()

    def error(self, status: int, code: str, message: str) -> dict[str, Any]:  # noqa: ARG002 - the protocol's
        """Return the body of an error; `code` is one field more than SGLang has."""
        return {"error": {"message": message, "code": code}}

    def break_off(self, code: str, message: str, last_events: bytes) -> bytes:  # noqa: ARG002 - the protocol's
        """Return an event with an error, as SGLang itself ends a stream that failed."""
        return event_of(self.error(500, code, message))
