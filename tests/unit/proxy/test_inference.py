"""Inferred programs: which prompts begin with a program's last prompt and answer, whatever their sizes."""

from __future__ import annotations

import json
from random import Random
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from thunderagent.proxy.completion import MAX_KEPT_CHARS, Completion, Completions
from thunderagent.proxy.identity import TurnRequest
from thunderagent.proxy.inference import STRIDE_BYTES, Inference


def turn_of(body: object) -> TurnRequest:
    raw = body if isinstance(body, bytes) else json.dumps(body).encode()
    return TurnRequest(None, "anonymous", "", "", raw, usage_added=False, prefix=())


def take_turn(inference: Inference, body: object, answer: object) -> str | None:
    """Make a turn and answer it; return the program that it was taken for."""
    turn, chain = inference.named(turn_of(body))
    if chain is not None and turn.program_id is not None:
        completions = Completions()
        completions.read_answer(json.dumps(answer).encode(), None)
        inference.answered(turn.program_id, chain, completions.choices())
    return turn.program_id


def text_answer(text: str) -> dict[str, Any]:
    return {"choices": [{"index": 0, "text": text}]}


@given(
    st.integers(0, 3 * STRIDE_BYTES), st.integers(1, 2 * STRIDE_BYTES), st.integers(0, 2 * STRIDE_BYTES), st.booleans()
)
def test_a_prompt_joins_whatever_the_sizes(prompt_size: int, answer_size: int, more_size: int, ids: bool) -> None:
    """Also where one of them ends just at a stride; with the last byte of the answer changed it does not."""
    random, inference = Random(prompt_size), Inference()
    if ids:
        tokens = [random.randrange(2**31) for _ in range(prompt_size // 4 + 1 + answer_size // 4 + 1 + more_size // 4)]
        prompt, end = tokens[: prompt_size // 4 + 1], prompt_size // 4 + 1 + answer_size // 4 + 1
        name = take_turn(inference, {"input_ids": prompt}, {"output_ids": tokens[len(prompt) : end]})
        assert inference.named(turn_of({"input_ids": tokens}))[0].program_id == name
        tokens[end - 1] ^= 1
        assert inference.named(turn_of({"input_ids": tokens}))[0].program_id != name
        return
    text = "".join(random.choices("abc", k=1 + prompt_size + answer_size + more_size))
    end = 1 + prompt_size + answer_size
    name = take_turn(inference, {"prompt": text[: 1 + prompt_size]}, text_answer(text[1 + prompt_size : end]))
    assert inference.named(turn_of({"prompt": text}))[0].program_id == name
    other = text[: end - 1] + "d" + text[end:]
    assert inference.named(turn_of({"prompt": other}))[0].program_id != name


def test_the_longest_beginning_counts() -> None:
    """A program's next turn, not the one that it was forked from."""
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
def test_what_separates_prompts_separates_programs(differing: dict[str, str]) -> None:
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
        ({"content": "thought", "reasoning_content": "hm"}, {"content": "thought", "name": None}),
    ],
)
def test_an_answer_is_known_again_however_it_is_written(answered: dict[str, Any], sent_back: dict[str, Any]) -> None:
    inference = Inference()
    first = [{"role": "system", "content": "s"}, {"role": "user", "content": "u"}]
    name = take_turn(inference, {"messages": first}, {"choices": [{"message": {"role": "assistant", **answered}}]})
    following = [*first, {"role": "assistant", **sent_back}, {"role": "user", "content": "more"}]
    assert inference.named(turn_of({"messages": following}))[0].program_id == name
    following[2] = {"role": "assistant", "content": "something else"}
    assert inference.named(turn_of({"messages": following}))[0].program_id != name


def test_every_choice_may_be_gone_on_with() -> None:
    inference = Inference()
    choices = [{"index": index, "text": text} for index, text in enumerate("bcd")]
    name = take_turn(inference, {"prompt": "a"}, {"choices": choices})
    assert {inference.named(turn_of({"prompt": f"a{text}!"}))[0].program_id for text in "bcd"} == {name}


def test_what_is_remembered_is_bounded() -> None:
    """The row longest not used goes first."""
    inference = Inference(max_rows=10)
    names = [take_turn(inference, {"prompt": f"{number:02}"}, text_answer("!" * STRIDE_BYTES)) for number in range(10)]
    long = "!" * STRIDE_BYTES
    assert take_turn(inference, {"prompt": f"00{long}"}, text_answer("")) == names[0]
    for number in range(10, 19):
        take_turn(inference, {"prompt": f"{number:02}"}, text_answer(long))
    assert len(inference) == 10
    assert inference.named(turn_of({"prompt": f"01{long}x"}))[0].program_id not in names
    assert len(inference._by_stride) <= 10


@pytest.mark.parametrize(
    "body",
    [
        b"{}",
        b"[]",
        b"\xff",
        b'{"messages":[]}',
        b'{"messages":[1]}',
        b'{"prompt":[[1],[2]]}',
        b'{"prompt":["a","b"]}',
        b'{"prompt":[4294967296]}',
        b'{"prompt":[-1]}',
        b'{"prompt":"\\ud800"}',
        b'{"prompt":""}',
        b'{"messages":' + b"[" * 100_000,
    ],
)
def test_a_prompt_of_no_known_shape_stays_anonymous(body: bytes) -> None:
    turn, chain = Inference().named(turn_of(body))
    assert (turn.program_id, chain) == (None, None)


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
    completions = Completions()
    completions.read_answer(answer, None)
    completions.read_events(b"data: " + answer + b"\n\n")
    completions.read_answer(b'{"choices":[]}', "br")
    inference = Inference()
    turn, chain = inference.named(turn_of({"prompt": "a"}))
    assert chain is not None
    inference.answered(turn.program_id or "", chain, completions.choices())
    assert len(inference) == 0


def test_a_stream_that_says_all_so_far_in_each_event_is_read() -> None:
    """As SGLang's own endpoint does."""
    completions = Completions()
    for text in ("on", "once", "once more"):
        completions.read_events(b"data: " + json.dumps({"text": text, "output_ids": [len(text)]}).encode() + b"\n\n")
    (choice,) = completions.choices()
    assert ("".join(choice.text), choice.token_ids) == ("once more", [9])


def test_an_endless_answer_is_not_kept() -> None:
    completions, event = Completions(), b'data: {"choices":[{"text":"' + b"x" * 2**20 + b'"}]}\n\n'
    for _ in range(MAX_KEPT_CHARS // 2**20 + 2):
        completions.read_events(event)
    assert completions.choices() == []


def test_odd_token_ids_are_not_remembered() -> None:
    inference = Inference()
    turn, chain = inference.named(turn_of({"prompt": [1, 2]}))
    assert chain is not None
    choice = Completion()
    choice.token_ids = [2**40]
    inference.answered(turn.program_id or "", chain, [choice])
    assert len(inference) == 0
