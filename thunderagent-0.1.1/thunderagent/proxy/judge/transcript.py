"""A program's task and its steps, read from the bodies of its agents' last turns, for APIs with messages.

A body is megabytes, a judge reads a few pages. The messages are located without being built, and only those at the
beginning and at the end are read, until there is enough of each. Whatever lies between is left out, and marked.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import msgspec
from msgspec import Raw

from thunderagent.proxy.reading.sse import UNREADABLE

HEAD_RATIO = 0.25
"""Part of the room for steps that is given to the beginning: the end tells more."""

TASK_RATIO = 0.25
"""Part of all room that the task may take."""

MESSAGE_RATIO = 0.25
"""Part of that room that one message may take."""

FIRST_MESSAGES_COUNT = 32
"""The task is among this many messages, or nowhere: earlier ones are instructions."""

LEAST_CHARS = 64
"""Less room holds nothing worth reading: at most the mark for what was left out."""

GAP = " [...] "

OWN_ITEMS = ("function_call", "reasoning")
"""Items of the Responses API without a role that are the agent's own."""


class Transcript(NamedTuple):
    """The first message of the user, and what followed it; `model` is the one of the program's own turns."""

    task: str
    steps: str
    model: str
    round_count: int
    """The agent's answers, including the one to this body."""


MAIN_RATIO = 0.5
"""Part of the room for steps that the first agent gets where there are others; these share the rest."""


def transcript_of_all(bodies: Sequence[tuple[str, bytes]], limit_chars: int) -> Transcript | None:
    """Return what a judge gets to read of all agents of a program, in at most `limit_chars`.

    The task is the first one's that has any: that is what the user asked for. Each agent's steps follow under its
    name, with its own task before them. None if no body has a task. Cost: that of `transcript_of` for each.
    """
    if len(bodies) == 1:
        return transcript_of(bodies[0][1], limit_chars)
    main: Transcript | None = None
    parts: list[str] = []
    for place, (branch_id, body) in enumerate(bodies):
        if main is None:
            main = transcript_of(body, int(MAIN_RATIO * limit_chars))
            if main is not None:
                parts.append(f"The first agent:\n{main.steps}")
            continue
        room_chars = limit_chars - len(main.task) - sum(len(part) + 1 for part in parts)
        name = cut(branch_id, LEAST_CHARS)
        head = f"Agent {name} was asked: "
        own_chars = room_chars // (len(bodies) - place) - len(head) - 2
        own = transcript_of(body, own_chars) if own_chars > LEAST_CHARS else None
        if own is not None:
            parts.append(f"{head}{own.task}\n{own.steps}")
    return None if main is None else main._replace(steps="\n".join(parts))


class _Body(msgspec.Struct):
    model: Any = ""
    messages: list[Raw] | None = None
    input: str | list[Raw] | None = None


class _Author(msgspec.Struct):
    role: Any = ""
    type: Any = ""


_decode_author = msgspec.json.Decoder(_Author).decode
_decode_body = msgspec.json.Decoder(_Body).decode
_decode = msgspec.json.decode


def transcript_of(body: bytes, limit_chars: int) -> Transcript | None:
    """Return what a judge gets to read, at most `limit_chars`; None if the body has no task.

    Cost: one pass over the body that builds nothing, about 1 ms per MB, plus reading what is kept.
    """
    try:
        fields = _decode_body(body)
        if isinstance(fields.input, str):
            messages = [Raw(msgspec.json.encode({"role": "user", "content": fields.input}))]
        else:
            messages = fields.messages or fields.input or []
        task, place = _task_of(messages)
        if not task:
            return None
        task = cut(task, int(TASK_RATIO * limit_chars))
        steps = _steps(messages[place + 1 :], limit_chars - len(task))
        round_count = _rounds_count(messages[place + 1 :])
    except UNREADABLE:
        return None
    return Transcript(task, steps, fields.model if isinstance(fields.model, str) else "", round_count)


def cut(text: str, limit_chars: int) -> str:
    """Cut the middle out of a text that is too long."""
    if len(text) <= limit_chars:
        return text
    half_chars = max(0, limit_chars - len(GAP)) // 2
    return text[:half_chars] + GAP + text[len(text) - half_chars :]


def _task_of(messages: list[Raw]) -> tuple[str, int]:
    """Return the text of a user's first message, and its position; empty if there is none."""
    for place, raw in enumerate(messages[:FIRST_MESSAGES_COUNT]):
        message = _decode(raw)
        if isinstance(message, dict) and message.get("role") == "user":
            return _text_of(message.get("content")), place
    return "", 0


def _rounds_count(messages: list[Raw]) -> int:
    """Return how often the agent spoke, including its answer to these messages; consecutive messages count once."""
    round_count, spoke_last = 1, False
    for raw in messages:
        try:
            author = _decode_author(raw)
        except msgspec.ValidationError:  # not an object: nobody said it
            continue
        speaks = author.role == "assistant" or author.type in OWN_ITEMS
        round_count += speaks and not spoke_last
        spoke_last = speaks
    return round_count


def _steps(messages: list[Raw], limit_chars: int) -> str:
    """Return the first and the last of these messages, one per line, in at most `limit_chars`."""
    of_message_chars = int(MESSAGE_RATIO * limit_chars)
    head: list[str] = []
    tail: list[str] = []
    left_chars = int(HEAD_RATIO * limit_chars)
    first = 0
    while first < len(messages) and left_chars > LEAST_CHARS:
        head.append(cut(_said(first, messages[first]), min(of_message_chars, left_chars - 1)))
        left_chars -= len(head[-1]) + 1
        first += 1
    left_chars += limit_chars - int(HEAD_RATIO * limit_chars) - LEAST_CHARS
    last = len(messages)
    while last > first and left_chars > LEAST_CHARS:
        last -= 1
        tail.append(cut(_said(last, messages[last]), min(of_message_chars, left_chars - 1)))
        left_chars -= len(tail[-1]) + 1
    gap = [f"[{last - first} messages are left out here]"] if last > first else []
    return "\n".join((*head, *gap, *reversed(tail)))


def _said(number: int, raw: Raw) -> str:
    """Return one message as a line: the speaker, the text, and a call or its result."""
    message = _decode(raw)
    if not isinstance(message, dict):
        return f"{number + 1}. ?"
    who = message.get("role") or message.get("type") or "?"
    texts = [_text_of(message.get("content")), _text_of(message.get("output")), _text_of(message.get("summary"))]
    calls = message.get("tool_calls")
    texts += [_call_of(call) for call in calls] if isinstance(calls, list) else []
    if message.get("type") == "function_call":
        texts.append(_call_of(message))
    return f"{number + 1}. {who}: {' '.join(filter(None, texts))}"


def _text_of(content: object) -> str:
    """Return the text of a content: one text, or parts, in any of the APIs; other parts are left out."""
    if isinstance(content, str):
        return content
    if not isinstance(content, list):
        return ""
    return " ".join(filter(None, map(_part_of, content)))


def _part_of(part: object) -> str:
    if isinstance(part, str):
        return part
    if not isinstance(part, dict):
        return ""
    if part.get("type") == "tool_use":
        return _call_of(part)
    if part.get("type") == "tool_result":
        return f"result: {_text_of(part.get('content'))}"
    text = part.get("text") or part.get("thinking")
    return text if isinstance(text, str) else ""


def _call_of(call: object) -> str:
    """Return a tool call, whose name and arguments are in the call or in its function."""
    function = call.get("function", call) if isinstance(call, dict) else None
    if not isinstance(function, dict):
        return ""
    arguments = function.get("arguments", function.get("input"))
    text = arguments if isinstance(arguments, str) else msgspec.json.encode(arguments).decode()
    return f"calls {function.get('name')}({text})"
