"""Tokens become text while they come."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from thunderagent_nova.text import TextStream


def bytes_to_text(token_ids: Sequence[int]) -> str:
    return bytes(token_ids).decode(errors="replace")


def parts_of(text: str, *stops: str) -> list[str]:
    stream = TextStream(bytes_to_text, stops)
    return [*(stream.add(token) for token in text.encode()), stream.end()]


@given(st.text())
def test_the_parts_make_the_text(text: str) -> None:
    """This holds for all characters, including those of several tokens."""
    assert "".join(parts_of(text)) == text


def test_no_half_character_is_sent() -> None:
    """Three bytes of the euro sign are three tokens here."""
    assert parts_of("a€b") == ["a", "", "", "€", "b", ""]


def test_half_a_character_at_the_end_is_shown() -> None:
    """Such an answer was cut there."""
    stream = TextStream(bytes_to_text)
    assert [stream.add(token) for token in "a€".encode()[:-1]] == ["a", "", ""]
    assert stream.end() == "\N{REPLACEMENT CHARACTER}"


def test_beginning_of_a_stop_text_is_held_back() -> None:
    """It is sent later if it does not become one."""
    assert parts_of("a<b<en", "<end>") == ["a", "", "<b", "", "", "", "<en"]


@given(st.text("ab", max_size=12), st.lists(st.text("ab", min_size=1, max_size=3), max_size=2))
def test_a_stop_text_ends_the_answer(text: str, stops: list[str]) -> None:
    """Neither the first complete one nor anything after it is sent."""
    cuts = [text[:end] for end in range(len(text) + 1) if any(text[:end].endswith(stop) for stop in stops)]
    expected = (
        text if not cuts else min((cuts[0].removesuffix(stop) for stop in stops if cuts[0].endswith(stop)), key=len)
    )
    assert "".join(parts_of(text, *stops)) == expected


@pytest.mark.parametrize(("text", "stopped"), [("abc", True), ("ab", False)])
def test_finish_reason_says_stop(text: str, stopped: bool) -> None:
    """The request can then be ended."""
    stream = TextStream(bytes_to_text, ["bc"])
    for token in text.encode():
        stream.add(token)
    assert stream.is_stopped == stopped
