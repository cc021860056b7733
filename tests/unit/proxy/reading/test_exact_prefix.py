"""An exact prompt is made of the tokens that were sampled and of what follows them, or refused."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from thunderagent.proxy.reading.exact_prefix import Chat, Known, Refused, answer_in, answer_of, exact
from thunderagent.rollouts.tokens import text_of_ids

END = 7
IDS = st.lists(st.integers(8, 300), max_size=6)
QUESTION = {"role": "user", "content": "a"}


def chat(*messages: dict[str, Any], **fields: Any) -> Chat:
    """Return a request."""
    return Chat(json.dumps({"messages": [QUESTION, *messages], **fields}).encode())


def known(prompt: list[int], output: list[int], rendered: list[int], finish: str = "stop", **fields: Any) -> Known:
    """Return an earlier turn."""
    return Known(chat(**fields), text_of_ids(prompt), text_of_ids(output), text_of_ids(rendered), finish)


@given(IDS, IDS, IDS, IDS, IDS, IDS)
def test_prompt_is_what_was_sampled_and_what_follows(
    prompt: list[int], output: list[int], rendered: list[int], answer: list[int], tail: list[int], new: list[int]
) -> None:
    """However the engine renders what it sampled."""
    history = [*rendered, *answer, END, *tail]
    found = exact(known(prompt, [*output, END], rendered), text_of_ids(history), text_of_ids([*history, *new]))
    assert found == text_of_ids([*prompt, *output, END, *tail, *new])


@pytest.mark.parametrize(
    ("history", "whole"),
    [
        ([1, 2, 20, END, 9], [1, 2, 21, END, 9, 30]),  # what is new changes the history
        ([1, 3, 20, END, 9], [1, 3, 20, END, 9, 30]),  # the history is not what was rendered
        ([1], [1, 30]),  # it ends before
        ([1, 2, 20, 9], [1, 2, 20, 9, 30]),  # the answer has no end
        ([1, 2, END, 20, END, 9], [1, 2, END, 20, END, 9, 30]),  # it has two
        ([1, 2, END, END], [1, 2, END, END, 30]),
        ([1, 2, 17, 9], [1, 2, 17, 9, 30]),  # a token that ends alike
    ],
)
def test_what_is_not_certain_is_refused(history: list[int], whole: list[int]) -> None:
    """Each condition is needed."""
    with pytest.raises(Refused) as refused:
        exact(known([1, 2], [20, END], [1, 2]), text_of_ids(history), text_of_ids(whole))
    assert refused.value.why == "template"


@pytest.mark.parametrize("fields", [{"stop": "x"}, {"stop_token_ids": [3]}, {"ignore_eos": True}])
def test_output_that_may_end_otherwise_has_no_end(fields: dict[str, Any]) -> None:
    """Nor has one that was cut off."""
    assert known([1], [2, END], [1]).ends_itself
    assert not known([1], [2, END], [1], **fields).ends_itself
    assert not known([1], [2, END], [1], "length").ends_itself


@pytest.mark.parametrize("body", [b"{", b"[]", b'{"messages":1}', b'{"messages":[1]}', b'{"messages":[],"n":2}'])
def test_what_is_no_chat_with_one_answer_is_refused(body: bytes) -> None:
    """With a reason, whatever it is."""
    with pytest.raises(Refused) as refused:
        Chat(body)
    assert refused.value.why == "unsupported"


CALLS = [{"id": "c", "type": "function", "function": {"name": "look", "arguments": '{"at": [1, 2]}'}}]


def test_answer_is_the_same_whole_streamed_and_sent_back() -> None:
    """With thoughts and calls, which come in pieces."""
    message = {"role": "assistant", "content": "well", "reasoning_content": "hm so", "tool_calls": CALLS}
    whole = json.dumps({"choices": [{"message": {**message, "refusal": None}}]}).encode()
    begin, end = '{"at"', ": [1, 2]}"
    deltas: list[dict[str, Any]] = [
        {"role": "assistant", "content": ""},
        {"reasoning_content": "hm "},
        {"reasoning_content": "so"},
        {"content": "we"},
        {"content": "ll"},
        {"tool_calls": [{"index": 0, "id": "c", "function": {"name": "look", "arguments": begin}}]},
        {"tool_calls": [{"index": 0, "function": {"arguments": end}}]},
    ]
    stream = b"".join(
        b"data: %b\n\n" % json.dumps({"choices": [{"index": 0, "delta": each}]}).encode() for each in deltas
    )
    said = answer_in(message)
    assert said
    assert answer_of(whole, streams=False) == answer_of(stream + b"data: [DONE]\n\n", streams=True) == said


@pytest.mark.parametrize(
    "edit",
    [
        {"content": "Well"},
        {"reasoning_content": None},
        {"tool_calls": []},
        {"tool_calls": [{**CALLS[0], "id": "d"}]},
        {"tool_calls": [{**CALLS[0], "function": {"name": "look", "arguments": '{"at": [2, 1]}'}}]},
        {"name": "x"},
        {"role": "user"},
        {"tool_calls": [1]},
        {"content": [{"type": "image_url"}]},
    ],
)
def test_edited_answer_is_another(edit: dict[str, Any]) -> None:
    """Or none."""
    message = {"role": "assistant", "content": "well", "reasoning_content": "hm so", "tool_calls": CALLS}
    assert answer_in({**message, **edit}) != answer_in(message)


@pytest.mark.parametrize("body", [b"{", b"[]", b"{}", b'{"choices":[1]}', b'{"choices":[{},{}]}'])
def test_answer_that_cannot_be_read_is_none(body: bytes) -> None:
    """An engine may say anything."""
    assert answer_of(body, streams=False) == b""
    assert answer_of(b"data: %b\n\n" % body, streams=True) in (b"", answer_in({"role": "assistant", "content": ""}))
