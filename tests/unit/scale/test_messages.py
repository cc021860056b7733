"""Frames, and sides of different versions."""

from __future__ import annotations

from typing import Any, get_args

import msgspec
import pytest

from thunderagent.backends.asking import Found, models_in
from thunderagent.errors import BadFrameError
from thunderagent.leases import Lease, TurnAsk, TurnEnd
from thunderagent.scale.messages import Digest, Frame, Hello, Message, Ok, Polled, Refusal, decode, encode

FIRST_FIELDS = {
    "hello": "gateway_id boot_id link_number highest_epoch leader_id version",
    "turns": "running held cards",
    "told": "",
    "acquire": "turn_id program_id branch_id parent_branch_id parent_id tenant group_id program_class role "
    "prompt_bytes prefix media patience_s waited_s supersedes_id avoid_replica_id pinned_replica_id wanted_replica_id "
    "abortable hint model",
    "end": "turn_id program_id generation outcome prompt_tokens output_tokens cached_tokens tool",
    "abandon": "turn_id",
    "progress": "turn_id output_tokens unverified",
    "released": "program_id generation outcome",
    "replica": "replica_id seen",
    "lead": "leader_id cell version",
    "grant": "turn_id program_id generation replica_id url engine_priority reason held_s",
    "hold": "turn_id",
    "reject": "turn_id code message retry_after_s",
    "ok": "turn_ids",
    "gone": "program_id",
    "replicas": "changed removed_ids names_models has_pools is_whole",
}
"""The fields of the first version, by kind. They never change: new fields are only added behind these."""


def test_fields_are_only_added() -> None:
    """A moved, renamed or removed field would be read as another by a side of another version."""
    kinds: dict[str, type[Any]] = {kind.__struct_config__.tag: kind for kind in get_args(Message)}
    assert set(FIRST_FIELDS) <= set(kinds)
    for kind, fields in FIRST_FIELDS.items():
        names = fields.split()
        assert list(kinds[kind].__struct_fields__[: len(names)]) == names, kind
        added = kinds[kind].__struct_fields__[len(names) :]
        optional_count = len(kinds[kind].__struct_defaults__)
        assert len(added) <= optional_count, f"{kind}: what was added has no default: {added}"


def frame(*messages: list[Any], more: tuple[object, ...] = ()) -> bytes:
    """A frame as another version may write it."""
    return msgspec.msgpack.encode([1, 0, 3, list(messages), *more])


def test_a_frame_comes_back_as_it_was() -> None:
    ask = TurnAsk(turn_id=3, program_id="a", prefix=((2**63, 2),), media=(("image", 3),), patience_s=1.5)
    sent = Frame(
        7,
        5,
        2,
        [Hello("g", 1, 1), ask, Lease(3, "a", 1, "r", "http://r", -3, "fits", 0.5), TurnEnd(3, "a", 1, "finished", 1)],
    )
    assert decode(encode(sent)) == (sent, 0)


def test_field_missing_from_an_older_side_has_its_default() -> None:
    """The older side knows the first fields of a message, and no others."""
    got, _ = decode(frame(["hello", "g", 1, 2], ["acquire", 9], ["end", 9, "a", 1, "finished"]))
    assert got.messages == [Hello("g", 1, 2), TurnAsk(turn_id=9), TurnEnd(9, "a", 1, "finished")]


def test_unknown_field_of_a_newer_side_is_ignored() -> None:
    """It may have more fields in messages, and in the frame."""
    end = ["end", 9, "a", 1, "finished", 10, 20, 5, "ls", False, "", "", 0.0, {"new": True}, [1]]
    got, dropped_count = decode(frame(end, ["ok", [1, 2], "more"], more=("more",)))
    assert got.messages == [TurnEnd(9, "a", 1, "finished", 10, 20, 5, "ls"), Ok((1, 2))]
    assert not dropped_count


def test_kinds_that_nobody_knows_are_counted_and_dropped() -> None:
    """All other messages in their frame are handled, in order."""
    got, dropped_count = decode(frame(["reject", 1, "x", "y"], ["poem", "roses"], ["replica", "r", "failed"], ["x"]))
    assert got.messages == [Refusal(1, "x", "y"), Digest("r", "failed")]
    assert dropped_count == 2


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"\xc1",
        msgspec.msgpack.encode({"a": 1}),
        msgspec.msgpack.encode([1, 0, 3]),
        frame(["end", "nine"]),
        frame(["acquire"]),
        frame([]),
        frame([7, 7]),
        frame(["hello", "g", 1, 1, 2**31]),
        frame(["hello", "g", 1, 1, -1]),
        frame(["hello", "g", 1, 2**33]),
        msgspec.msgpack.encode([1, 0, 2**33, []]),
        msgspec.msgpack.encode([1, 0, 3, [["ok", [1]], 5]]),
        b"\x91" * 100_000,
    ],
)
def test_broken_frame_is_refused(data: bytes) -> None:
    """An unreadable message of a known kind is no later version; nor is an epoch that fits in no generation."""
    with pytest.raises(BadFrameError):
        decode(data)


@pytest.mark.parametrize("age_s", [-1.0, float("nan")])
def test_a_poll_of_the_future_is_refused(age_s: float) -> None:
    """Otherwise every later poll would be ignored."""
    with pytest.raises(BadFrameError):
        decode(encode(Frame(1, 0, 0, [Polled(1, Found(age_s))])))


def test_a_list_of_models_that_is_nested_too_deep_names_none() -> None:
    """Each gateway reads engines' answers: none ends because of one."""
    assert models_in("[" * 100_000) == ()
