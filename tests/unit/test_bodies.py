"""What a body may hold is the same to the proxy, the simulated engines and Nova."""

from __future__ import annotations

import json
from typing import Any

import msgspec
import pytest

from thunderagent.bodies import decode_body, flag_of
from thunderagent.simulator.embedded import requests
from thunderagent_nova import chat

MESSAGES = [{"role": "user", "content": "1"}]


class Inner(msgspec.Struct):
    on: bool | None = None


class Outer(msgspec.Struct):
    count: int = 0
    flag: bool = False
    text: str | list[str] | None = None
    inner: Inner | None = None


@pytest.mark.parametrize(
    ("said", "meant"), [(1, True), (1.0, True), ("Yes", True), ("off", False), (0, False), (2, None), ("", None)]
)
def test_flags_are_what_pydantic_takes_for_them(said: object, meant: bool | None) -> None:
    assert flag_of(said) is meant


def test_a_body_is_read_as_it_was_meant_at_any_depth() -> None:
    body = {"count": "7", "flag": "on", "text": "1", "inner": {"on": 0}}
    assert decode_body(json.dumps(body).encode(), Outer) == Outer(7, True, "1", Inner(False))


@pytest.mark.parametrize(
    "wrong", [{"flag": 2}, {"flag": []}, {"count": "x"}, {"text": 3}, {"inner": {"on": "maybe"}}, []]
)
def test_body_refused_by_pydantic_is_refused(wrong: Any) -> None:
    with pytest.raises(msgspec.ValidationError):
        decode_body(json.dumps(wrong).encode(), Outer)


@pytest.mark.parametrize("said", [1, "true", "yes", True])
def test_nova_and_the_simulated_engine_take_what_the_proxy_takes_for_a_stream(said: object) -> None:
    """The proxy reads `flag_of` of the field and passes the body on."""
    body = json.dumps({"messages": MESSAGES, "stream": said, "max_tokens": "16"}).encode()
    ours: list[Any] = [chat.parse(body, chat.ChatBody), requests.parse(body, requests.ChatBody)]
    assert [each.stream for each in ours] == [True, True] == [flag_of(said)] * 2
    assert [each.max_tokens for each in ours] == [16, 16]


def test_a_flag_that_is_none_is_refused_by_both() -> None:
    body = json.dumps({"messages": MESSAGES, "stream": "perhaps"}).encode()
    with pytest.raises(chat.ApiError):
        chat.parse(body, chat.ChatBody)
    with pytest.raises(requests.ApiError):
        requests.parse(body, requests.ChatBody)
