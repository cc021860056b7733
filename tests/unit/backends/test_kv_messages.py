"""vLLM's messages about its KV pool as they are read: in the form of 0.32, in older forms, and rubbish."""

from __future__ import annotations

import contextlib
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from thunderagent.backends.kv_messages import (
    BlocksRemoved,
    BlocksStored,
    KvMessage,
    KvMessageError,
    PoolCleared,
    read_events,
    read_message,
)

# A real vLLM 0.32 sends this.
STORED = {
    "type": "BlockStored",
    "block_hashes": [2**64 - 1, 7],
    "parent_block_hash": None,
    "token_ids": list(range(64)),
    "block_size": 32,
    "lora_id": None,
    "medium": "GPU",
    "lora_name": None,
    "extra_keys": [None, None],
    "group_idx": 0,
    "kv_cache_spec_kind": "full_attention",
    "session_id": "p",
}
REMOVED = {"type": "BlockRemoved", "block_hashes": [7], "medium": "GPU", "group_idx": 0}
CLEARED = {"type": "AllBlocksCleared"}


def batch(*events: object, rest: tuple[object, ...] = (0,)) -> bytes:
    return msgspec.msgpack.encode([1795314910.9, list(events), *rest])


def stored_as(**fields: object) -> dict[str, Any]:
    return {**STORED, **fields}


def test_batch_of_vllm_0_32_is_read() -> None:
    """They are maps, with the session that the request named."""
    assert list(read_events(batch(STORED, REMOVED, CLEARED))) == [
        BlocksStored((2**64 - 1, 7), None, 32, "p", 0),
        BlocksRemoved((7,), 0),
        PoolCleared(),
    ]


@pytest.mark.parametrize("rest", [(), (0,), (0, "more", {"than": "we know"})])
def test_a_batch_may_have_more_or_fewer_fields(rest: tuple[object, ...]) -> None:
    """The rank came later, and more fields may come."""
    assert list(read_events(batch(CLEARED, rest=rest))) == [PoolCleared()]


def test_hashes_may_be_bytes() -> None:
    """An environment variable of the engine sets this."""
    event = stored_as(block_hashes=[b"a" * 32], parent_block_hash=b"b" * 32)
    assert list(read_events(batch(event))) == [BlocksStored((b"a" * 32,), b"b" * 32, 32, "p")]


def test_fields_that_are_missing_or_new_do_no_harm() -> None:
    """One version names no session, another has more fields."""
    event = {"type": "BlockStored", "block_hashes": [1], "block_size": 16, "new": [1, {"x": 2}]}
    assert list(read_events(batch(event))) == [BlocksStored((1,), None, 16, None)]


@pytest.mark.parametrize(
    ("event", "expected"),
    [
        (["BlockStored", [1, 2], 9, [5] * 32, 16, None], BlocksStored((1, 2), 9, 16)),
        (["BlockStored", [1], None, [5] * 16, 16, None, "GPU", None], BlocksStored((1,), None, 16)),
        (
            ["BlockStored", [1], None, [5], 16, None, "GPU", None, [None], 1, "full_attention", None, None, None, "p"],
            BlocksStored((1,), None, 16, "p", 1),
        ),
        (["BlockStored", [1], None, [5], 16, None, "GPU", None, "what", ["is"], "this"], BlocksStored((1,), None, 16)),
        (["BlockRemoved", [1, b"x"]], BlocksRemoved((1, b"x"))),
        (["AllBlocksCleared"], PoolCleared()),
    ],
)
def test_events_of_older_versions_are_arrays(event: list[object], expected: object) -> None:
    """They have fewer fields at the end, or unknown ones there."""
    assert list(read_events(batch(event))) == [expected]


@pytest.mark.parametrize(
    "event",
    [
        {"type": "BlockMoved", "from": 1},
        ["BlockMoved", 1, 2],
        stored_as(medium="CPU"),
        stored_as(medium="STORAGE"),
        stored_as(locality="REMOTE"),
        stored_as(kv_cache_spec_kind="sliding_window"),
        stored_as(kv_cache_spec_kind="mamba"),
        stored_as(block_hashes=[]),
        {**REMOVED, "medium": "CPU"},
    ],
)
def test_messages_not_about_the_pool_are_left_out(event: object) -> None:
    """Unknown kinds, other media, layers that keep only a window; the rest of the batch is read."""
    assert list(read_events(batch(event, CLEARED))) == [PoolCleared()]


@pytest.mark.parametrize(
    ("sent", "program"),
    [
        ("plain-id", "plain-id"),
        ("prog-é".encode().decode("latin-1"), "prog-é"),  # a header, as a real vLLM reads it
        ("prog-é", "prog-é"),  # in the body
        ("日本", "日本"),
        ("", None),
    ],
)
def test_a_program_id_is_as_it_was_sent(sent: str, program: str | None) -> None:
    """It came in a header or in the body."""
    (event,) = read_events(batch(stored_as(session_id=sent)))
    assert isinstance(event, BlocksStored)
    assert event.program_id == program


@pytest.mark.parametrize(
    "payload",
    [
        b"",
        b"\xc1",
        msgspec.msgpack.encode("text"),
        msgspec.msgpack.encode([1.0]),
        msgspec.msgpack.encode([1.0, 5]),
        batch(stored_as(block_hashes="x")),
        batch(stored_as(block_size=0)),
        batch({"no": "type"}),
        batch([]),
        batch([5, 5]),
        batch(7),
        batch(["BlockStored", 5, 5, 5, 5]),
        batch(STORED)[:-9],
    ],
)
def test_rubbish_is_an_error_of_ours(payload: bytes) -> None:
    """Every kind of rubbish raises it."""
    with pytest.raises(KvMessageError):
        list(read_events(payload))


@given(st.binary(max_size=60))
def test_any_bytes_are_read_or_are_an_error_of_ours(payload: bytes) -> None:
    """Nothing else is raised."""
    for raw in (payload, batch(msgspec.Raw(payload)) if payload else b""):
        with contextlib.suppress(KvMessageError):
            list(read_events(raw))


def test_frames_are_read() -> None:
    """Frames of a message, of a replay, of an older version's replay, and of its end."""
    seven = (7).to_bytes(8, "big")
    assert read_message([b"topic", seven, b"x"]) == KvMessage(7, b"x")
    assert read_message([b"", b"topic", seven, b"x"]) == KvMessage(7, b"x")
    assert read_message([b"", seven, b"x"]) == KvMessage(7, b"x")
    assert read_message([b"", b"", (-1).to_bytes(8, "big", signed=True), b""]).is_end
    assert not KvMessage(0, b"").is_end


@pytest.mark.parametrize("frames", [[], [b"x"], [b"", b"short", b"x"], [b"x" * 9, b""]])
def test_frames_that_are_none(frames: list[bytes]) -> None:
    """They are somebody else's messages."""
    with pytest.raises(KvMessageError):
        read_message(frames)
