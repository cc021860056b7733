"""Hints about the next turn in bodies, in the words of engines and gateways."""

from __future__ import annotations

import json
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from thunderagent.leases import TurnHint
from thunderagent.proxy.reading.body_fields import MAX_MODEL_CHARS, hint_in, model_named, read_fields

RETAIN, OFFLOAD = TurnHint(keep="retain"), TurnHint(keep="offload")

MEANT: list[tuple[Any, TurnHint | None]] = [
    ({"cache_control": {"type": "ephemeral", "ttl": 300}}, RETAIN),
    ({"cache_control": {}}, RETAIN),
    ({"cache_control": {"ttl": 0}}, OFFLOAD),
    ({"cache_control": {"block_offset": 12}}, None),
    ({"context_management": {"edits": [{"type": "prefetch"}, {"type": "offload"}]}}, OFFLOAD),
    ({"context_management": {"edits": [{"type": "evict", "block_end": None}]}}, OFFLOAD),
    ({"context_management": {"edits": [{"type": "evict", "block_start": 4}]}}, None),
    ({"context_management": {"edits": [{"type": ["offload"]}]}, "cache_control": {}}, RETAIN),
    ({"speculative_prefill": True, "priority": 5, "osl": 1024}, RETAIN),
    ({"speculative_prefill": 1}, None),
    ({"next_turn_in_s": 12.5, "confidence": 0.8}, TurnHint(12.5, 0.8)),
    ({"next_turn_in_s": 3, "keep": "retain"}, TurnHint(3.0, 1.0, "retain")),
    ({"next_turn_in_s": 3, "keep": "drop"}, TurnHint(3.0)),
    ({"next_turn_in_s": 1e300, "keep": "offload"}, OFFLOAD),
    ({"next_turn_in_s": True}, None),
    ({"next_turn_in_s": -1}, None),
    ({"next_turn_in_s": 5, "confidence": 2}, None),
    ({"session_id": "worker-7"}, None),
    ({}, None),
    ([], None),
    ("retain", None),
]


@pytest.mark.parametrize(("said", "hint"), MEANT)
def test_each_field_is_read_for_what_is_meant(said: Any, hint: TurnHint | None) -> None:
    """It is read alike in all three, and as text where only text may be sent."""
    assert hint_in(said, None, None) == hint
    assert hint_in(None, {"agentic_context": said}, None) == hint
    assert hint_in(None, {"agentic_context": json.dumps(said)}, None) == hint
    assert hint_in(None, None, {"agent_hints": said}) == hint


@pytest.mark.parametrize("text", ["\ud800", "{", "[" * 4000, "NaN"])
def test_a_text_that_is_no_json_says_nothing(text: str) -> None:
    assert hint_in(None, {"agentic_context": text}, None) is None


@pytest.mark.parametrize("model", [b'"\\ud800"', b'"\xed\xa0\x80"', b"NaN", b"[", b"3", b'{"a": 1}'])
def test_invalid_model_name_is_left_to_the_engine(model: bytes) -> None:
    assert model_named(msgspec.Raw(model), b"") == ""


def test_a_long_name_of_a_model_is_cut_to_one_that_no_replica_lists() -> None:
    """A gateway sends it to its scheduler, with the turn; the longest name that may be listed stays."""
    fits = "m" * MAX_MODEL_CHARS
    assert model_named(msgspec.Raw(msgspec.json.encode(fits)), b"") == fits
    cut = model_named(msgspec.Raw(msgspec.json.encode("é" * 2**20)), b"")
    assert cut == "é" * (MAX_MODEL_CHARS + 1)


def test_the_first_that_says_something_counts() -> None:
    assert hint_in({"session_id": "s"}, None, {"agent_hints": {"speculative_prefill": True}}) == RETAIN
    assert hint_in({"keep": "offload"}, None, {"agent_hints": {"speculative_prefill": True}}) == OFFLOAD


def test_a_large_body_is_read_for_it_as_well() -> None:
    body = {"messages": [{"role": "user", "content": "x" * 200_000}], "agent_hint": {"keep": "retain"}}
    fields = read_fields(msgspec.json.encode(body))
    assert fields is not None
    assert hint_in(fields.agent_hint, fields.vllm_xargs, fields.nvext) == RETAIN


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(max_size=20),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(
            st.sampled_from(["cache_control", "context_management", "edits", "type", "keep", "agentic_context", "ttl"])
            | st.text(max_size=5),
            inner,
            max_size=4,
        )
    ),
    max_leaves=12,
)


@given(JSON, JSON, JSON)
def test_every_hint_is_within_its_bounds_or_none(first: Any, second: Any, third: Any) -> None:
    hint = hint_in(first, second, third)
    assert hint is None or (hint.keep in ("", "retain", "offload") and 0 <= hint.confidence_ratio <= 1)
