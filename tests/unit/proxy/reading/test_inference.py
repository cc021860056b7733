"""Inferred programs: prompts that begin with a program's last prompt and answer, whatever their sizes."""

from __future__ import annotations

import json
from random import Random
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from thunderagent.proxy.reading.answers import MAX_KEPT_CHARS, Completions
from thunderagent.proxy.reading.dialects import CHAT, TURN_DIALECTS, Dialect
from thunderagent.proxy.reading.identity import TurnRequest
from thunderagent.proxy.reading.inference import STRIDE_BYTES, Inference, Prompt, prompt_of


def turn_of(body: object) -> TurnRequest:
    raw = body if isinstance(body, bytes) else json.dumps(body).encode()
    return TurnRequest(None, "anonymous", "", raw, usage_added=False, prefix=())


def dialect_for(body: object) -> Dialect:
    """Return the API in which such a body is sent."""
    if isinstance(body, dict) and ("input_ids" in body or "text" in body):
        return TURN_DIALECTS["/generate"]
    return TURN_DIALECTS["/v1/responses"] if isinstance(body, dict) and "input" in body else CHAT


def name_of(inference: Inference, body: object) -> str | None:
    """Return the program that a turn is assigned to; None if it stays anonymous."""
    turn = turn_of(body)
    prompt = prompt_of(turn.body, dialect_for(body))
    return inference.named(turn, prompt).program_id if prompt is not None else None


def take_turn(inference: Inference, body: object, answer: object, dialect: Dialect | None = None) -> str | None:
    """Make a turn and answer it, with a stream if that is bytes; return its assigned program."""
    dialect, turn = dialect or dialect_for(body), turn_of(body)
    prompt = prompt_of(turn.body, dialect)
    if prompt is None:
        return None
    turn = inference.named(turn, prompt)
    completions = Completions(dialect)
    if isinstance(answer, bytes):
        completions.read_events(answer)
    else:
        completions.read_answer(json.dumps(answer).encode(), None)
    assert turn.program_id is not None
    inference.answered(turn.program_id, prompt.chain(), completions.choices())
    return turn.program_id


def text_answer(text: str) -> dict[str, Any]:
    return {"choices": [{"index": 0, "text": text}]}


@given(
    st.integers(0, 3 * STRIDE_BYTES), st.integers(1, 2 * STRIDE_BYTES), st.integers(0, 2 * STRIDE_BYTES), st.booleans()
)
def test_a_prompt_joins_whatever_the_sizes(prompt_size: int, answer_size: int, more_size: int, ids: bool) -> None:
    """One may end exactly at a stride; if the last byte of the answer differs, it does not join."""
    random, inference = Random(prompt_size), Inference()
    if ids:
        tokens = [random.randrange(2**31) for _ in range(prompt_size // 4 + 1 + answer_size // 4 + 1 + more_size // 4)]
        prompt, end = tokens[: prompt_size // 4 + 1], prompt_size // 4 + 1 + answer_size // 4 + 1
        name = take_turn(inference, {"input_ids": prompt}, {"output_ids": tokens[len(prompt) : end]})
        assert name_of(inference, {"input_ids": tokens}) == name
        tokens[end - 1] ^= 1
        assert name_of(inference, {"input_ids": tokens}) != name
        return
    text = "".join(random.choices("abc", k=1 + prompt_size + answer_size + more_size))
    end = 1 + prompt_size + answer_size
    name = take_turn(inference, {"prompt": text[: 1 + prompt_size]}, text_answer(text[1 + prompt_size : end]))
    assert name_of(inference, {"prompt": text}) == name
    other = text[: end - 1] + "d" + text[end:]
    assert name_of(inference, {"prompt": other}) != name


def test_the_longest_beginning_counts() -> None:
    """The turn belongs to that program, not to the one that it was forked from."""
    inference = Inference()
    one = take_turn(inference, {"prompt": "a"}, text_answer("b"))
    other = take_turn(inference, {"prompt": "abc"}, text_answer("d"))
    assert other == one
    fork = take_turn(inference, {"prompt": "x"}, text_answer("y"))
    assert take_turn(inference, {"prompt": "abcd and"}, text_answer("so on")) == one != fork


@pytest.mark.parametrize(
    "differing",
    [{"model": "other"}, {"cache_salt": "s"}, {"system": "be brief"}],
)
def test_fields_that_separate_prompts_separate_programs(differing: dict[str, str]) -> None:
    inference = Inference()
    name = take_turn(inference, {"prompt": "a"}, text_answer("b"))
    assert take_turn(inference, {"prompt": "abc", **differing}, text_answer("d")) != name
    assert take_turn(inference, {"text": "abc"}, text_answer("d")) == name


CALL = {"id": "1", "type": "function", "function": {"name": "ls", "arguments": '{"a": 1, "b": 2}'}}


@pytest.mark.parametrize(
    ("answered", "sent_back"),
    [
        ({"content": "hi"}, {"content": "hi"}),
        ({"content": " hi\n", "refusal": None, "annotations": []}, {"content": "hi"}),
        ({"content": "hi"}, {"content": [{"type": "text", "text": "h"}, {"type": "text", "text": "i"}]}),
        ({"content": None, "tool_calls": [CALL]}, {"tool_calls": [CALL]}),
        (
            {"content": "", "tool_calls": [CALL]},
            {"content": None, "tool_calls": [{"id": "1", "function": {"arguments": '{"b":2,"a":1}', "name": "ls"}}]},
        ),
        ({"content": "<think>\nhm\n</think>\n\nhi"}, {"content": "hi"}),
        ({"content": "hm</think>hi"}, {"content": "hi"}),
        (
            {"content": "a <thinking>hm</thinking> b"},
            {"content": [{"type": "reasoning", "text": "h"}, {"type": "text", "text": "a  b"}]},
        ),
        ({"content": "thought", "reasoning_content": "hm"}, {"content": "thought", "name": None}),
    ],
)
def test_an_answer_is_known_again_however_it_is_written(answered: dict[str, Any], sent_back: dict[str, Any]) -> None:
    inference = Inference()
    first = [{"role": "system", "content": "s"}, {"role": "user", "content": "u"}]
    name = take_turn(inference, {"messages": first}, {"choices": [{"message": {"role": "assistant", **answered}}]})
    following = [*first, {"role": "assistant", **sent_back}, {"role": "user", "content": "more"}]
    assert name_of(inference, {"messages": following}) == name
    following[2] = {"role": "assistant", "content": "something else"}
    assert name_of(inference, {"messages": following}) != name


def test_every_choice_may_be_gone_on_with() -> None:
    inference = Inference()
    choices = [{"index": index, "text": text} for index, text in enumerate("bcd")]
    name = take_turn(inference, {"prompt": "a"}, {"choices": choices})
    assert {name_of(inference, {"prompt": f"a{text}!"}) for text in "bcd"} == {name}


def test_memory_of_prompts_is_bounded() -> None:
    """The least recently used row goes first."""
    inference = Inference(max_rows=10)
    names = [take_turn(inference, {"prompt": f"{number:02}"}, text_answer("!" * STRIDE_BYTES)) for number in range(10)]
    long = "!" * STRIDE_BYTES
    assert take_turn(inference, {"prompt": f"00{long}"}, text_answer("")) == names[0]
    for number in range(10, 19):
        take_turn(inference, {"prompt": f"{number:02}"}, text_answer(long))
    assert len(inference) == 10
    assert name_of(inference, {"prompt": f"01{long}x"}) not in names
    assert len(inference._by_stride) <= 10


@pytest.mark.parametrize(
    "body",
    [
        b"{}",
        b"[]",
        b"\xff",
        b'{"messages":[]}',
        b'{"messages":[1]}',
        b'{"messages":[{"role":"user","content":[{"type":["text"]}]}]}',
        b'{"messages":[{"role":"user","content":[{"type":{}}]}]}',
        b'{"prompt":[[1],[2]]}',
        b'{"prompt":["a","b"]}',
        b'{"prompt":[1.5]}',
        b'{"prompt":[null]}',
        b'{"prompt":null}',
        b'{"prompt":[-1]}',
        b'{"prompt":"\\ud800"}',
        b'{"prompt":""}',
        b'{"messages":' + b"[" * 100_000,
    ],
)
def test_a_prompt_of_no_known_shape_stays_anonymous(body: bytes) -> None:
    assert prompt_of(body, CHAT) is None


@pytest.mark.parametrize(
    "message",
    [
        {"content": 5},
        {"content": [{"type": "image_url", "image_url": {"url": "x"}}, {"type": "text", "text": 7}]},
        {
            "tool_calls": [
                1,
                {},
                {"function": 5},
                {"function": {"arguments": "{"}},
                {"function": {"arguments": {"a": 1}}},
            ]
        },
        {"tool_calls": "none"},
        {"role": 1, "name": {}},
    ],
)
def test_odd_messages_harm_nobody(message: dict[str, Any]) -> None:
    """They are part of a prompt like any other."""
    inference = Inference()
    name = take_turn(inference, {"messages": [message]}, {"choices": [{"message": {"content": "x"}}]})
    following = [message, {"role": "assistant", "content": "x"}, message]
    assert take_turn(inference, {"messages": following}, {}) == name is not None


@pytest.mark.parametrize(
    "answer",
    [
        b"",
        b"5",
        b'{"choices":5}',
        b'{"choices":[{"message":{"content":5}}]}',
        b'{"choices":[{"text":"\\ud800"}]}',
        b"\xff",
    ],
)
def test_an_answer_that_cannot_be_read_says_nothing(answer: bytes) -> None:
    for dialect in TURN_DIALECTS.values():
        completions = Completions(dialect)
        completions.read_answer(answer, None)
        completions.read_events(b"data: " + answer + b"\n\n")
        completions.read_answer(b'{"choices":[]}', "br")
        prompt = prompt_of(b'{"prompt":"a"}', CHAT)
        assert prompt is not None
        inference = Inference()
        inference.answered("a", prompt.chain(), completions.choices())
        assert len(inference) == 0


def sse(*bodies: object) -> bytes:
    """Return a stream of events, and its end."""
    return b"".join(b"data: " + json.dumps(body).encode() + b"\n\n" for body in bodies) + b"data: [DONE]\n\n"


def generated(text: str, output_ids: list[int], count: int, **fields: Any) -> dict[str, Any]:
    return {"text": text, "output_ids": output_ids, "meta_info": {"completion_tokens": count}, **fields}


@pytest.mark.parametrize(
    "events",
    [
        [generated("on", [1], 1), generated("once", [1, 2], 2), generated("once more", [1, 2, 3], 3)],
        [generated("on", [1], 1), generated("ce", [2], 2), generated(" more", [3], 3)],
    ],
    ids=["all so far in each event", "in pieces"],
)
def test_a_stream_of_sglang_is_read_however_it_is_streamed(events: list[dict[str, Any]]) -> None:
    completions = Completions(TURN_DIALECTS["/generate"])
    completions.read_events(sse(*events))
    (choice,) = completions.choices()
    assert (choice.text, choice.token_ids, completions.ended) == ("once more", b"1,2,3,", True)


@pytest.mark.parametrize(
    ("path", "event", "ends"),
    [
        ("/v1/responses", {"type": "response.failed", "response": {"output": None}}, True),
        ("/v1/responses", {"type": "response.output_text.delta", "delta": '"response.completed"'}, False),
        ("/v1/responses", {"type": "message_stop", "name": "response.completed"}, False),
        ("/v1/messages", {"type": "message_stop"}, True),
        ("/v1/chat/completions", {"type": "message_stop", "text": "[DONE]"}, False),
    ],
)
def test_the_end_of_a_stream_is_its_last_event_and_no_other(path: str, event: dict[str, Any], ends: bool) -> None:
    """The rest of it may be unreadable."""
    completions = Completions(TURN_DIALECTS[path])
    completions.read_events(b"data: " + json.dumps(event).encode() + b"\n\n")
    assert completions.ended is ends


def test_the_end_of_a_stream_that_is_too_long_to_keep_is_seen() -> None:
    long = Completions(TURN_DIALECTS["/generate"])
    long.read_events(sse(generated("x" * (MAX_KEPT_CHARS + 1), [1], 1)))
    assert (long.choices(), long.ended) == ([], True)


def test_a_long_stream_that_repeats_itself_is_kept() -> None:
    """All its events exceed the limit, the last one does not."""
    completions, text = Completions(TURN_DIALECTS["/generate"]), ""
    for count in range(1, 2000):
        text += "five "
        completions.read_events(sse(generated(text, list(range(count)), count)))
    (choice,) = completions.choices()
    assert choice.token_ids.count(b",") == 1999


def test_several_samples_of_one_prompt_may_each_be_gone_on_with() -> None:
    """They come as a list, or as events with an index."""
    dialect = TURN_DIALECTS["/generate"]
    events = [generated(text, [number], 1, index=number) for number, text in enumerate("bc")]
    for answer in ([{"text": "b"}, {"text": "c"}], sse(*events)):
        inference = Inference()
        name = take_turn(inference, {"text": "a"}, answer, dialect)
        assert {name_of(inference, {"text": f"a{text}!"}) for text in "bc"} == {name}


BLOCKS = [
    {"type": "thinking", "thinking": "hm", "signature": "s"},
    {"type": "text", "text": "Look."},
    {"type": "tool_use", "id": "t1", "name": "ls", "input": {"a": 1, "b": [2]}},
    {"type": "tool_use", "id": "t2", "name": "pwd", "input": {}},
]
MESSAGE_EVENTS = [
    {"type": "message_start", "message": {"content": [], "usage": {"input_tokens": 3}}},
    {"type": "content_block_start", "index": 0, "content_block": {"type": "thinking", "thinking": ""}},
    {"type": "content_block_delta", "index": 0, "delta": {"type": "thinking_delta", "thinking": "hm"}},
    {"type": "content_block_delta", "index": 0, "delta": {"type": "signature_delta", "signature": "s"}},
    {"type": "content_block_start", "index": 1, "content_block": {"type": "text", "text": ""}},
    {"type": "content_block_delta", "index": 1, "delta": {"type": "text_delta", "text": "Lo"}},
    {"type": "content_block_delta", "index": 1, "delta": {"type": "text_delta", "text": "ok."}},
    {"type": "content_block_start", "index": 2, "content_block": {**BLOCKS[2], "input": {}}},
    {"type": "content_block_delta", "index": 2, "delta": {"type": "input_json_delta", "partial_json": '{"b": [2]'}},
    {"type": "content_block_delta", "index": 2, "delta": {"type": "input_json_delta", "partial_json": ', "a": 1}'}},
    {"type": "content_block_start", "index": 3, "content_block": {**BLOCKS[3], "input": {}}},
    {"type": "content_block_stop", "index": 3},
    {"type": "message_delta", "delta": {"stop_reason": "tool_use"}},
]


@pytest.mark.parametrize("keeps_thoughts", [False, True])
@pytest.mark.parametrize("streamed", [False, True])
def test_a_message_of_anthropic_is_known_again(streamed: bool, keeps_thoughts: bool) -> None:
    """Its thoughts may come back or not, and cache marks may be anywhere."""
    inference, dialect = Inference(), TURN_DIALECTS["/v1/messages"]
    first = {"role": "user", "content": [{"type": "text", "text": "hi", "cache_control": {"type": "ephemeral"}}]}
    answer = sse(*MESSAGE_EVENTS, {"type": "message_stop"}) if streamed else {"role": "assistant", "content": BLOCKS}
    name = take_turn(inference, {"system": "s", "messages": [first]}, answer, dialect)
    said = {"role": "assistant", "content": BLOCKS if keeps_thoughts else BLOCKS[1:]}
    result = {"type": "tool_result", "tool_use_id": "t1", "content": "x", "cache_control": {"type": "ephemeral"}}
    second = [{"role": "user", "content": "hi"}, said, {"role": "user", "content": [result]}]
    assert take_turn(inference, {"system": "s", "messages": second}, {"content": BLOCKS[1:2]}, dialect) == name
    del result["cache_control"]
    third = [*second, {"role": "assistant", "content": "Look."}, {"role": "user", "content": "and?"}]
    assert take_turn(inference, {"system": "s", "messages": third}, {}, dialect) == name
    other = {"role": "assistant", "content": [{**BLOCKS[2], "input": {"a": 2}}]}
    assert take_turn(inference, {"system": "s", "messages": [first, other]}, {}, dialect) != name


ITEMS = [
    {"id": "rs_1", "type": "reasoning", "summary": [], "content": None},
    {
        "id": "msg_1",
        "type": "message",
        "role": "assistant",
        "status": "completed",
        "content": [{"type": "output_text", "text": "Look.", "annotations": [], "logprobs": None}],
    },
    {"id": "fc_1", "type": "function_call", "call_id": "c1", "name": "ls", "arguments": '{"a": 1}', "status": None},
]


def sent_back(items: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return items as sent by clients that keep nothing of the server's."""
    return [
        {"role": "assistant", "content": "Look."},
        {"type": "function_call", "call_id": items[2]["call_id"], "name": "ls", "arguments": '{"a":1}'},
    ]


@pytest.mark.parametrize("how", ["whole", "streamed", "streamed with other ids at the end"])
@pytest.mark.parametrize("as_they_came", [False, True])
def test_a_response_is_known_again(how: str, as_they_came: bool) -> None:
    inference, dialect = Inference(), TURN_DIALECTS["/v1/responses"]
    last = [*ITEMS[:2], {**ITEMS[2], "call_id": "other"}] if "other" in how else ITEMS
    done = [{"type": "response.output_item.done", "output_index": i, "item": item} for i, item in enumerate(ITEMS)]
    text_done = {"type": "response.output_text.done", "text": "Look."}
    stream = sse(text_done, *done, {"type": "response.completed", "response": {"output": last, "text": {}}})
    answer = stream if how.startswith("streamed") else {"output": ITEMS, "text": {"format": {"type": "text"}}}
    name = take_turn(inference, {"instructions": "i", "input": "hi"}, answer, dialect)
    result = {"type": "function_call_output", "call_id": "c1", "output": "x"}
    for items in (ITEMS, last):
        following = [{"role": "user", "content": "hi"}, *(items if as_they_came else sent_back(items)), result]
        assert name_of(inference, {"instructions": "i", "input": following}) == name
        following[0] = {"type": "message", "role": "user", "content": [{"type": "input_text", "text": "hi"}]}
        assert name_of(inference, {"instructions": "i", "input": following}) == name
        assert name_of(inference, {"instructions": "j", "input": following}) != name


def test_a_large_list_of_token_ids_is_joined_as_a_small_one_is() -> None:
    """It is not built, but compared as text, whatever its spaces."""
    inference, dialect = Inference(), TURN_DIALECTS["/inference/v1/generate"]
    ids = list(range(100_000, 140_000))
    name = take_turn(inference, {"token_ids": ids}, {"choices": [{"token_ids": [1, 2]}]}, dialect)
    for separators in ((",", ":"), (", ", ": "), (" ,\n", " : ")):
        body = json.dumps({"model": "m", "token_ids": [*ids, 1, 2, 3]}, separators=separators).encode()
        prompt = prompt_of(body.replace(b'"model"', b'"unknown"'), dialect)
        assert prompt is not None
        assert inference.named(turn_of(body), prompt).program_id == name
    assert take_turn(inference, {"token_ids": [*ids, 1, 23]}, {}, dialect) != name


def test_an_endless_answer_is_not_kept() -> None:
    completions, event = Completions(CHAT), b'data: {"choices":[{"text":"' + b"x" * 2**20 + b'"}]}\n\n'
    for _ in range(MAX_KEPT_CHARS // 2**20 + 2):
        completions.read_events(event)
    assert completions.choices() == []


# --- buckets, and turns that come again


class Bucket:
    """Agents that send one bucket."""

    def __init__(self) -> None:
        self.inference = Inference()
        self.live_ids: set[str] = set()

    def begin(self, text: str, bucket: str = "app", *, is_retry: bool = False) -> tuple[TurnRequest, Prompt]:
        turn = turn_of({"prompt": text})
        turn.bucket, turn.source = bucket, "prompt_cache_key"
        prompt = prompt_of(turn.body, CHAT, bucket=bucket)
        assert prompt is not None
        turn = self.inference.named(turn, prompt, self.live_ids.__contains__, is_retry=is_retry)
        self.inference.began(prompt.chain().key(), turn.program_id or "")
        return turn, prompt

    def end(self, turn: TurnRequest, prompt: Prompt, answer: str | None) -> str:
        assert turn.program_id is not None
        if answer is not None:
            completions = Completions(CHAT)
            completions.read_answer(json.dumps(text_answer(answer)).encode(), None)
            self.inference.answered(turn.program_id, prompt.chain(), completions.choices())
        self.inference.ended(prompt.chain().key(), turn.program_id, answered=answer is not None)
        self.live_ids.add(turn.program_id)
        return turn.program_id


def test_agents_of_one_bucket_are_programs_of_their_own_and_the_first_has_its_name() -> None:
    bucket = Bucket()
    begun = [bucket.begin(f"agent {number}:") for number in range(8)]
    assert [turn.source for turn, _ in begun] == ["prompt_cache_key", *["inferred"] * 7]
    names = [bucket.end(*each, "yes") for each in begun]
    assert names[0] == "app"
    assert len(set(names)) == 8
    again = [bucket.begin(f"agent {number}:yes, and?") for number in range(8)]
    assert [turn.program_id for turn, _ in again] == names
    assert [turn.source for turn, _ in again] == ["prompt_cache_key", *["inferred"] * 7]


def test_the_same_prompt_in_another_bucket_is_another_program() -> None:
    bucket = Bucket()
    assert bucket.end(*bucket.begin("hi", "one"), "yes") == "one"
    assert bucket.end(*bucket.begin("hiyes", "other"), "no") == "other"
    assert bucket.end(*bucket.begin("hiyes", "one"), "no") == "one"


def test_the_name_of_a_bucket_is_free_again_when_its_program_has_ended() -> None:
    bucket = Bucket()
    assert bucket.end(*bucket.begin("first run"), "yes") == "app"
    assert bucket.end(*bucket.begin("beside it"), "yes") != "app"
    bucket.live_ids.remove("app")
    assert bucket.end(*bucket.begin("second run"), "yes") == "app"


def test_a_shortened_history_opens_another_program() -> None:
    """Nothing says whose it is; the one before stays until it is released or forgotten."""
    bucket = Bucket()
    assert bucket.end(*bucket.begin("long history"), "yes") == "app"
    short = bucket.end(*bucket.begin("summary"), "yes")
    assert short.startswith("inferred-")
    assert bucket.end(*bucket.begin("summaryyes and"), "yes") == short


def test_a_turn_without_an_answer_keeps_its_program_when_it_comes_again() -> None:
    """The first and a later turn; each attempt has one successor, so samples stay apart."""
    bucket = Bucket()
    lost = [bucket.end(*each, None) for each in [bucket.begin("hi") for _ in range(2)]]
    assert len(set(lost)) == 2
    begun = [bucket.begin("hi") for _ in range(3)]
    assert [turn.program_id for turn, _ in begun[:2]] == lost
    assert begun[2][0].program_id not in lost
    assert {bucket.end(*each, "yes") for each in begun} > set(lost)
    later = bucket.begin("hiyes and")
    assert bucket.end(*later, None) == bucket.end(*bucket.begin("hiyes and"), "so")
    assert not bucket.inference._in_flight
    assert not bucket.inference._in_flight_of
    assert not bucket.inference._unanswered


def test_a_retry_beside_its_first_attempt_keeps_its_program_unless_several_run() -> None:
    bucket = Bucket()
    first = bucket.begin("hi")
    retry = bucket.begin("hi", is_retry=True)
    assert retry[0].program_id == first[0].program_id == "app"
    bucket.end(*first, None)
    assert not bucket.inference._unanswered, "its successor runs"
    sample = bucket.begin("hi")
    assert sample[0].program_id != "app"
    assert bucket.begin("hi", is_retry=True)[0].program_id not in ("app", sample[0].program_id)
