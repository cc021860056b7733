"""Whole answers: one reading gives the usage and the tool that two readings would give."""

from __future__ import annotations

import gzip
import json
from typing import Any

import pytest

from thunderagent.proxy.reading.answers import AnswerError, error_of_events, read_answer
from thunderagent.proxy.reading.dialects import NO_USAGE, TURN_DIALECTS, Dialect, Usage
from thunderagent.proxy.reading.dialects.openai import OpenAI
from thunderagent.proxy.reading.sse import LARGE_EVENT_BYTES, data_of

CALL = {"function": {"name": "bash", "arguments": '{"command": "cd a && pytest -x"}'}}
CHAT = {"choices": [{"message": {"tool_calls": [CALL]}}]}
ITEM = {"type": "function_call", "name": "bash", "arguments": '{"command": "pytest"}'}
BLOCK = {"type": "tool_use", "name": "bash", "input": {"command": "pytest"}}
TEXT = {"text": "so:\n```bash\npytest\n```\n"}

CALLING: list[tuple[str, dict[str, Any], Usage]] = [
    ("/v1/chat/completions", {**CHAT, "usage": {"prompt_tokens": 7, "completion_tokens": 3}}, Usage(7, 3, None)),
    ("/inference/v1/generate", {**CHAT, "usage": {"prompt_tokens": 7, "completion_tokens": 3}}, Usage(7, 3, None)),
    ("/v1/responses", {"id": "r1", "output": [ITEM], "usage": {"input_tokens": 7, "output_tokens": 3}}, Usage(7, 3)),
    ("/v1/messages", {"content": [BLOCK], "usage": {"input_tokens": 7, "output_tokens": 3}}, Usage(7, 3)),
    ("/generate", {**TEXT, "meta_info": {"prompt_tokens": 7, "completion_tokens": 3}}, Usage(7, 3)),
]
IN_EVERY_API = pytest.mark.parametrize(("path", "answer", "usage"), CALLING, ids=[path for path, *_ in CALLING])


class Once:
    """A dialect of which each answer may be decoded only once."""

    def __init__(self, dialect: Dialect) -> None:
        self.read_calling = dialect.read_calling


@IN_EVERY_API
def test_an_answer_that_calls_is_decoded_once(path: str, answer: dict[str, Any], usage: Usage) -> None:
    """This is for both; the id of a response is reported once."""
    ids: list[str] = []
    dialect: Any = Once(TURN_DIALECTS[path])
    assert read_answer(dialect, json.dumps(answer).encode(), None, ids.append) == (usage, "bash:pytest")
    assert ids == (["r1"] if path == "/v1/responses" else [])


@IN_EVERY_API
def test_odd_field_leaves_the_others_readable(path: str, answer: dict[str, Any], usage: Usage) -> None:
    """An answer with unreadable calls still has its usage, and one with unreadable usage still has its calls."""
    dialect, counts = TURN_DIALECTS[path], "meta_info" if "meta_info" in answer else "usage"
    odd_calls = {**answer, "choices": "```", "output": "```"}
    assert read_answer(dialect, json.dumps(odd_calls).encode(), None, lambda _: None) == (usage, "")
    odd_usage = json.dumps({**answer, counts: ["```"]}).encode()
    assert read_answer(dialect, odd_usage, None, lambda _: None) == (NO_USAGE, "bash:pytest")
    assert read_answer(OpenAI(), odd_usage, None, lambda _: None)[1] == "bash:pytest"


@IN_EVERY_API
def test_an_encoded_answer_is_read_and_a_broken_one_says_nothing(
    path: str, answer: dict[str, Any], usage: Usage
) -> None:
    packed = gzip.compress(json.dumps(answer).encode())
    assert read_answer(TURN_DIALECTS[path], packed, "gzip", lambda _: None) == (usage, "bash:pytest")
    assert read_answer(TURN_DIALECTS[path], packed[3:], "gzip", lambda _: None) == (NO_USAGE, "")
    assert read_answer(TURN_DIALECTS[path], b"{", None, lambda _: None) == (NO_USAGE, "")


@pytest.mark.parametrize("end", [b"\n", b"\r", b"\r\n"])
@pytest.mark.parametrize("lines", [[b"data: %b"], [b"id: 1", b"data:%b \t"], [b"data", b"data: \v%b", b"data:  2"]])
def test_a_large_event_has_the_data_of_a_small_one(lines: list[bytes], end: bytes) -> None:
    small, large = b"x", b"x" * (LARGE_EVENT_BYTES + 1)
    event = end.join(lines) + end + end
    assert data_of(event % large) == data_of(event % small).replace(small, large)


@pytest.mark.parametrize(
    ("event", "is_error"),
    [
        (b"event: error\ndata: {}\n\n", True),
        (b"data: {}\r\nevent:error \t\r\n\r\n", True),
        (b"event: error", True),
        (b'data: "event: error"\n\n', False),
        (b"event: errors\n\n", False),
        (b"event: error s\nevent:error\n\n", True),
        (b" event: error\n\n", False),
    ],
)
def test_an_event_of_that_name_is_an_error(event: bytes, *, is_error: bool) -> None:
    assert error_of_events(event) == (AnswerError("error") if is_error else None)
