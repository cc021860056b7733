"""Each API: usage from whole answers and from streams with any cuts, and errors in its own schema."""

from __future__ import annotations

import gzip
import itertools
import json
from typing import Any

import pytest

from thunderagent.proxy.reading.answers import StreamUsage, read_answer
from thunderagent.proxy.reading.dialects import DIALECTS, NO_USAGE, TURN_DIALECTS, Usage, dialect_of
from thunderagent.proxy.reading.dialects.anthropic import Anthropic
from thunderagent.proxy.reading.dialects.base import Dialect
from thunderagent.proxy.reading.dialects.openai import OpenAI
from thunderagent.proxy.reading.dialects.responses import Responses
from thunderagent.proxy.reading.dialects.sglang import SGLang
from thunderagent.proxy.reading.dialects.token_in import TokenIn
from thunderagent.proxy.reading.sse import data_of, events_in

CHAT_USAGE = {"prompt_tokens": 100, "completion_tokens": 7, "prompt_tokens_details": {"cached_tokens": 64}}
RESPONSE = {
    "id": "resp_1",
    "object": "response",
    "status": "completed",
    "output": [{"type": "message", "content": [{"type": "output_text", "text": "input_tokens"}]}],
    "usage": {
        "input_tokens": 100,
        "input_tokens_details": {"cached_tokens": 64},
        "output_tokens": 7,
        "output_tokens_details": {"reasoning_tokens": 1},
        "total_tokens": 107,
    },
}
MESSAGE = {
    "id": "msg_1",
    "type": "message",
    "content": [{"type": "text", "text": "hi"}],
    "usage": {
        "input_tokens": 30,
        "cache_read_input_tokens": 64,
        "cache_creation_input_tokens": 6,
        "output_tokens": 7,
    },
}
META = {"prompt_tokens": 100, "completion_tokens": 7, "cached_tokens": 64, "finish_reason": {"type": "stop"}}
READ = Usage(100, 7, 64)


def event(data: object, name: str = "") -> bytes:
    text = data if isinstance(data, str) else json.dumps(data)
    return (f"event: {name}\n" if name else "").encode() + f"data: {text}\n\n".encode()


def named(data: dict[str, Any]) -> bytes:
    return event(data, data["type"])


RESPONSES_STREAM = (
    named({"type": "response.created", "sequence_number": 0, "response": {**RESPONSE, "output": [], "usage": None}}),
    named({"type": "response.output_text.delta", "sequence_number": 1, "delta": 'input_tokens "response"'}),
    named({"type": "response.completed", "sequence_number": 2, "response": RESPONSE}),
)
ANTHROPIC_STREAM = (
    named({"type": "message_start", "message": {**MESSAGE, "usage": {"input_tokens": 100, "output_tokens": 0}}}),
    named({"type": "ping"}),
    named({"type": "content_block_delta", "index": 0, "delta": {"type": "text_delta", "text": '"usage"'}}),
    named({"type": "message_delta", "delta": {"stop_reason": "end_turn"}, "usage": MESSAGE["usage"]}),
    named({"type": "message_stop"}),
)
SGLANG_STREAM = (
    event({"text": "a", "meta_info": {**META, "completion_tokens": 1}}),
    event({"text": "a b", "meta_info": {**META, "completion_tokens": 2}}),
    event({"text": "a b c", "meta_info": META}),
    event("[DONE]"),
)
TOKEN_IN_STREAM = (
    event({"request_id": "1", "choices": [{"index": 0, "token_ids": [5]}], "usage": None}),
    event({"request_id": "1", "choices": [], "usage": CHAT_USAGE}),
    event("[DONE]"),
)
WHOLE = {
    "chat": (OpenAI(), {"choices": [], "usage": CHAT_USAGE}),
    "token-in": (TokenIn(), {"choices": [{"token_ids": [1]}], "usage": CHAT_USAGE}),
    "responses": (Responses(), RESPONSE),
    "anthropic": (Anthropic(), MESSAGE),
    "sglang": (SGLang(), {"text": "hi", "output_ids": [1], "meta_info": META}),
}
STREAMS = {
    "chat": (OpenAI(), (event({"choices": [{"index": 0}]}), event({"choices": [], "usage": CHAT_USAGE}))),
    "token-in": (TokenIn(), TOKEN_IN_STREAM),
    "responses": (Responses(), RESPONSES_STREAM),
    "anthropic": (Anthropic(), ANTHROPIC_STREAM),
    "sglang": (SGLang(), SGLANG_STREAM),
}


def usage_of(dialect: Dialect, answer: object, encoding: str | None = None) -> Usage:
    body = answer if isinstance(answer, bytes) else json.dumps(answer).encode()
    return read_answer(dialect, gzip.compress(body) if encoding else body, encoding, lambda _: None)[0]


def fed(dialect: Dialect, *pieces: bytes) -> StreamUsage:
    stream = StreamUsage(take_out=False, reader=dialect.reader(lambda _: None))
    assert b"".join(map(stream.feed, pieces)) == b"".join(pieces)
    return stream


# --- Usage


@pytest.mark.parametrize(("dialect", "answer"), WHOLE.values(), ids=WHOLE)
@pytest.mark.parametrize("encoding", [None, "gzip"])
def test_whole_answer_is_read(dialect: Dialect, answer: object, encoding: str | None) -> None:
    """The prompt count includes cached tokens."""
    assert usage_of(dialect, answer, encoding) == READ


@pytest.mark.parametrize(("dialect", "events"), STREAMS.values(), ids=STREAMS)
def test_stream_cut_at_every_byte_is_read(dialect: Dialect, events: tuple[bytes, ...]) -> None:
    """It is cut in two, and into single bytes."""
    data = b"".join(events)
    for cut in range(1, len(data)):
        assert fed(dialect, data[:cut], data[cut:]).reader.usage == READ
    assert fed(dialect, *(data[at : at + 1] for at in range(len(data)))).reader.usage == READ


@pytest.mark.parametrize(("dialect", "events"), STREAMS.values(), ids=STREAMS)
def test_a_stream_with_other_line_ends(dialect: Dialect, events: tuple[bytes, ...]) -> None:
    """Some servers write CRLF."""
    data = b"".join(events).replace(b"\n", b"\r\n")
    assert fed(dialect, data[:100], data[100:]).reader.usage == READ


@pytest.mark.parametrize("dialect", DIALECTS)
@pytest.mark.parametrize(
    "data", ["[]", "null", "7", '"usage"', "{", '{"usage": 5}', '{"meta_info": [], "usage": {"input_tokens": "x"}}']
)
def test_unreadable_answer_says_nothing(dialect: Dialect, data: str) -> None:
    """This holds for whole answers and streams."""
    assert usage_of(dialect, data.encode()) == NO_USAGE
    assert usage_of(dialect, b"\xff\xfe") == NO_USAGE
    more = event('{"response": {"id": 5, "usage": {"input_tokens": -1}}}')
    assert fed(dialect, event(data), more).reader.usage in {NO_USAGE, Usage(None, None, None)}


COUNTS = (
    "prompt_tokens",
    "completion_tokens",
    "cached_tokens",
    "input_tokens",
    "output_tokens",
    "cache_read_input_tokens",
)


@pytest.mark.parametrize("dialect", DIALECTS)
def test_a_count_that_no_answer_has_is_missing(dialect: Dialect) -> None:
    """JSON has no largest number; one that is no `float` any more would end the scheduler."""
    tokens = str(10**310)
    counts = ", ".join(f'"{name}": {tokens}' for name in COUNTS)
    answer = f'{{"usage": {{{counts}}}, "meta_info": {{{counts}}}}}'
    assert set(usage_of(dialect, answer.encode())) <= {None, 0}
    assert set(fed(dialect, event(answer), event(f'{{"response": {answer}}}')).reader.usage) <= {None, 0}


def test_messages_that_say_the_cached_tokens_once_are_not_made_smaller() -> None:
    """Some gateways end with the input without the cached tokens."""
    start = {"type": "message_start", "message": {"usage": {**MESSAGE["usage"], "output_tokens": 1}}}
    end = {"type": "message_delta", "usage": {"input_tokens": 30, "output_tokens": 7}}
    assert fed(Anthropic(), named(start), named(end)).reader.usage == READ
    end = {"type": "message_delta", "usage": {"output_tokens": 7}}
    assert fed(Anthropic(), named(start), named(end)).reader.usage == READ


def test_several_answers_of_sglang_are_summed() -> None:
    """A batch gets a list, or a stream whose events name their answer."""
    assert usage_of(SGLang(), [{"meta_info": META}, {"meta_info": META}, {}]) == Usage(200, 14, 128)
    events = [
        event({"text": "x", "meta_info": {**META, "completion_tokens": count}, "index": index})
        for count, index in itertools.product((1, 7), (0, 1, 12))
    ]
    assert fed(SGLang(), *events).reader.usage == Usage(300, 21, 192)


def test_a_response_tells_its_id_as_soon_as_it_is_known() -> None:
    """A stream tells it from the first event on, once; a whole answer tells it at the end."""
    ids: list[str] = []
    reader = Responses().reader(ids.append)
    reader.read(RESPONSES_STREAM[0])
    assert ids == ["resp_1"]
    reader.read(b"".join(RESPONSES_STREAM))
    assert (ids, reader.usage) == (["resp_1"], READ)
    Responses().read_answer(json.dumps(RESPONSE).encode(), ids.append)
    assert ids == ["resp_1", "resp_1"]


def test_a_response_that_is_made_in_the_background_has_no_usage_yet() -> None:
    """Its id is still known."""
    ids: list[str] = []
    queued = json.dumps({**RESPONSE, "status": "queued", "usage": None}).encode()
    assert (Responses().read_answer(queued, ids.append), ids) == (NO_USAGE, ["resp_1"])


# --- Paths


@pytest.mark.parametrize(
    ("path", "kind"),
    [
        ("/v1/chat/completions", OpenAI),
        ("/v1/completions", OpenAI),
        ("/v1/responses", Responses),
        ("/v1/responses/resp_1/cancel", Responses),
        ("/v1/messages", Anthropic),
        ("/v1/messages/count_tokens", Anthropic),
        ("/generate", SGLang),
        ("/inference/v1/generate", TokenIn),
        ("/skyrl/v1/generate", TokenIn),
        ("/v1/messagesandmore", OpenAI),
        ("/tokenize", OpenAI),
        ("/programs/x", OpenAI),
        ("", OpenAI),
    ],
)
def test_a_path_is_spoken_by_one_dialect(path: str, kind: type) -> None:
    """It is the dialect of its API, and OpenAI's for unknown paths."""
    assert type(dialect_of(path)) is kind


def test_every_turn_is_spoken_by_the_dialect_of_its_path() -> None:
    """An error of a turn is in the schema of its answer."""
    assert all(dialect_of(path) is dialect for path, dialect in TURN_DIALECTS.items())


# --- Errors


@pytest.mark.parametrize(
    ("status", "kind"),
    [
        *((400, "invalid_request_error"), (404, "not_found_error"), (410, "invalid_request_error")),
        *((413, "request_too_large"), (500, "api_error"), (502, "api_error"), (503, "overloaded_error")),
        (504, "timeout_error"),
    ],
)
def test_anthropic_has_kinds_of_its_own(status: int, kind: str) -> None:
    """The kind follows the status."""
    error = Anthropic().error(status, "no_replica", "none")
    assert error == {"type": "error", "error": {"type": kind, "message": "none", "code": "no_replica"}}


@pytest.mark.parametrize("dialect", DIALECTS)
def test_every_error_says_its_code_and_its_words(dialect: Dialect) -> None:
    """This holds whatever else a schema has."""
    error = dialect.error(503, "no_replica", "none is up")["error"]
    assert (error["code"], error["message"]) == ("no_replica", "none is up")


@pytest.mark.parametrize("dialect", DIALECTS)
def test_a_stream_that_breaks_ends_with_one_event_more(dialect: Dialect) -> None:
    """It is an event of its own, with JSON in it."""
    ending = dialect.break_off(502, "replica_closed_early", "gone", b"")
    (only,) = events_in(ending)
    assert only.endswith(b"\n\n")
    assert "replica_closed_early" in json.dumps(json.loads(data_of(only)))


def test_the_error_of_a_response_is_numbered_after_its_last_event() -> None:
    """Its schema requires that."""
    ending = Responses().break_off(502, "replica_closed_early", "gone", b"".join(RESPONSES_STREAM[:2]))
    assert ending.startswith(b"event: error\n")
    assert json.loads(data_of(ending)) == {
        "type": "error",
        "code": "replica_closed_early",
        "message": "gone",
        "param": None,
        "sequence_number": 2,
    }


@pytest.mark.parametrize(
    "events",
    [
        [b"data: 1\n\n", b"data: 2\n\n"],
        [b"data: 1\n\n", b"\ndata: 2\n\n", b"\n"],
        [b"data: 1\r\n\r\n", b"data: 2\n\n", b"data: 3\r\r", b"data: 4\n\n"],
        [b"data: 1\n\n", b"data: 2\n"],
        [],
    ],
)
def test_events_are_cut_at_each_blank_line_however_it_is_written(events: list[bytes]) -> None:
    assert list(events_in(b"".join(events))) == events
