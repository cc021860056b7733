"""A judge's answer, or why it is unusable."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from enum import StrEnum
from typing import Any, NamedTuple

import msgspec

from thunderagent.proxy.reading.dialects.base import usage_of
from thunderagent.proxy.reading.sse import UNREADABLE

MAX_ANSWER_BYTES = 256 * 1024
"""At most this much of an answer is read."""

READ_CHARS = 16_384
"""A judge that reasons aloud gives its verdict at the end: earlier text is not read."""

MAX_OBJECTS_COUNT = 64
"""How many object starts in an answer are tried, the last ones."""

_OBJECT = re.compile(r'\{\s*"')
_decoder = json.JSONDecoder()


class Failure(StrEnum):
    """Why there is no verdict."""

    TIMEOUT = "timeout"
    """It took too long."""
    CONNECTION = "connection"
    """It could not be asked, or broke off."""
    STATUS = "status"
    """It answered with an error."""
    TOO_LARGE = "too_large"
    """Its answer, or the body that it was to read, is too large."""
    NO_JSON = "no_json"
    """Its answer has no such object."""
    WRONG_SHAPE = "wrong_shape"
    """Its object lacks a field, or has a wrong type or value."""
    NO_TASK = "no_task"
    """The program's turn has no messages that state a task."""


class Opinion(NamedTuple):
    """A verdict as the judge gave it."""

    will_succeed: bool
    confidence_ratio: float
    reasoning: str


class Answered(NamedTuple):
    """The result of asking, and its cost as far as reported."""

    opinion: Opinion | Failure
    prompt_tokens: int = 0
    output_tokens: int = 0


class _Message(msgspec.Struct):
    content: Any = None
    reasoning_content: Any = None


class _Choice(msgspec.Struct):
    message: _Message | None = None


class _Usage(msgspec.Struct):
    prompt_tokens: int | None = None
    completion_tokens: int | None = None


class _Answer(msgspec.Struct):
    choices: list[_Choice] | None = None
    usage: _Usage | None = None


_decode = msgspec.json.Decoder(_Answer).decode


def read_answer(body: bytes) -> Answered:
    """Read a chat completion. Costs some milliseconds at worst, so it does not run on the event loop."""
    try:
        answer = _decode(body)
    except UNREADABLE:
        return Answered(Failure.NO_JSON)
    message = answer.choices[0].message if answer.choices else None
    text = message.content if message is not None else None
    said = answer.usage or _Usage()
    usage = usage_of(said.prompt_tokens, said.completion_tokens, None)
    opinion = opinion_of(text) if isinstance(text, str) else Failure.WRONG_SHAPE
    return Answered(opinion, usage.prompt_tokens or 0, usage.output_tokens or 0)


def opinion_of(text: str) -> Opinion | Failure:
    """Return the last verdict in a text, whatever surrounds it."""
    found: Opinion | Failure = Failure.NO_JSON
    for value in _objects_in(text[-READ_CHARS:]):
        if "prediction" in value:
            found = _opinion(value)
    return found


def _objects_in(text: str) -> Iterator[dict[str, Any]]:
    starts = [match.start() for match in _OBJECT.finditer(text)][-MAX_OBJECTS_COUNT:]
    for start in starts:
        try:
            value, _ = _decoder.raw_decode(text, start)
        except (ValueError, RecursionError):
            continue
        if isinstance(value, dict):
            yield value


def _opinion(value: dict[str, Any]) -> Opinion | Failure:
    prediction, confidence = value.get("prediction"), value.get("confidence")
    if not isinstance(prediction, str) or prediction.strip().lower() not in ("success", "failure"):
        return Failure.WRONG_SHAPE
    if isinstance(confidence, bool) or not isinstance(confidence, int | float):
        return Failure.WRONG_SHAPE
    if not 0 <= confidence <= 1:  # nor NaN, nor an integer that no float holds
        return Failure.WRONG_SHAPE
    reasoning = value.get("reasoning")
    said = reasoning if isinstance(reasoning, str) else ""
    return Opinion(prediction.strip().lower() == "success", float(confidence), said)
