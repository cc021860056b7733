"""Whole answers: one reading gives the usage and the tool that two readings would give."""

from __future__ import annotations

import gzip
import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from thunderagent.proxy.reading.answers import (
    AnswerError,
    error_of_body,
    error_of_events,
    read_answer,
    tool_in,
    usage_if_sound,
)
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


# --- Answers that surely report no error

WELL: dict[str, Any] = {
    "id": "c1",
    "object": "chat.completion",
    "choices": [{"index": 0, "message": {"content": "so"}, "logprobs": None, "finish_reason": "stop"}],
    "usage": {"prompt_tokens": 7, "completion_tokens": 3, "prompt_tokens_details": {"cached_tokens": 4}},
}

ODD = st.one_of(
    st.none(),
    st.sampled_from(["error", "abort", "failed", "stop", "response", "response.failed", 400, [], {}]),
    st.fixed_dictionaries(
        {},
        optional={
            "type": st.sampled_from(["error", "abort"]),
            "status": st.just("failed"),
            "finish_reason": st.one_of(st.sampled_from(["abort", "error", "stop"]), st.just({"type": "abort"})),
            "code": st.just(500),
        },
    ),
)
"""Values of the fields in which engines report errors."""

FIELDS = ("error", "type", "object", "status", "code", "response", "meta_info")


def test_usage_of_a_sound_answer_is_read_without_a_search() -> None:
    """An engine's usual answer is one; what it says of errors in its text does not matter."""
    for path in ("/v1/chat/completions", "/v1/completions", "/inference/v1/generate"):
        assert usage_if_sound(TURN_DIALECTS[path], json.dumps(WELL).encode()) == Usage(7, 3, 4)
    told = {**WELL, "choices": [{"message": {"content": 'the "error" was "abort"'}, "finish_reason": "length"}]}
    assert usage_if_sound(OpenAI(), json.dumps(told).encode()) == Usage(7, 3, 4)
    assert tool_in(json.dumps(told).encode()) == ""
    assert tool_in(json.dumps({**WELL, **CHAT}).encode()) == "bash:pytest"


@pytest.mark.parametrize(
    "changed",
    [
        {"error": {"message": "x"}},
        {"error": "x"},
        {"object": "error"},
        {"type": "error"},
        {"choices": [{"finish_reason": "abort"}]},
        {"choices": [{"finish_reason": "stop"}, {"finish_reason": {"type": "abort"}}]},
        {"meta_info": {"finish_reason": {"type": "abort"}}},
        {"response": {"status": "failed"}},
        {"object": "response", "status": "failed"},
    ],
)
def test_answer_with_an_error_is_not_sound(changed: dict[str, Any]) -> None:
    """It is searched, and found."""
    body = json.dumps({**WELL, **changed}).encode()
    assert usage_if_sound(OpenAI(), body) is None
    assert error_of_body(body) is not None


def test_other_apis_are_searched() -> None:
    """What is no object, or another API's answer, is never taken for sound."""
    assert usage_if_sound(OpenAI(), b"[]") is None
    assert usage_if_sound(OpenAI(), b"{") is None
    for path in ("/v1/responses", "/v1/messages", "/generate"):
        assert usage_if_sound(TURN_DIALECTS[path], json.dumps(WELL).encode()) is None


@given(
    fields=st.dictionaries(st.sampled_from(FIELDS), ODD, max_size=3),
    choices=st.one_of(ODD, st.lists(ODD, max_size=2)),
)
def test_sound_answer_reports_no_error_and_has_the_same_usage(fields: dict[str, Any], choices: Any) -> None:
    """The two ways to read an answer never disagree."""
    body = json.dumps({**WELL, "choices": choices, **fields}).encode()
    usage = usage_if_sound(OpenAI(), body)
    if usage is not None:
        assert error_of_body(body) is None
        assert read_answer(OpenAI(), body, None, lambda _: None) == (usage, tool_in(body))
