"""Splicing JSON: only the wanted part changes, and no other byte."""

from __future__ import annotations

import json
import sys
import time
from collections import Counter
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from thunderagent.proxy.reading.json_splice import put_value, remove_member, set_include_usage, value_of

SPACES = st.text(" \n\t\r", max_size=3)
# Keys and texts that look like the key that is searched for: whole, in part, or across a quote.
DECOYS = st.sampled_from(
    [
        "program_id",
        '"program_id"',
        'x"program_id',
        "program_id\\",
        '"program_id": 5,',
        "{",
        "}",
        ",",
        '\\"',
        "",
        "stream",
    ]
)
TEXTS = DECOYS | st.text(max_size=8)
NUMBERS = st.integers(-(2**60), 2**60) | st.floats(allow_nan=False, allow_infinity=False, width=32)
VALUES = st.recursive(
    st.none() | st.booleans() | NUMBERS | TEXTS,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(TEXTS, inner, max_size=3),
    max_leaves=8,
)


@st.composite
def written(draw: st.DrawFn, value: Any) -> str:
    """One way of writing a value as JSON: any whitespace, any escapes."""
    if isinstance(value, dict):
        members = [
            f"{draw(SPACES)}{draw(written(key))}{draw(SPACES)}:{draw(SPACES)}{draw(written(each))}{draw(SPACES)}"
            for key, each in value.items()
        ]
        return "{" + (",".join(members) or draw(SPACES)) + "}"
    if isinstance(value, list):
        return "[" + ",".join(f"{draw(SPACES)}{draw(written(each))}{draw(SPACES)}" for each in value) + "]"
    if isinstance(value, str):
        way = draw(st.sampled_from(["plain", "ascii", "escaped"]))
        if way == "escaped":
            units = value.encode("utf-16-be")
            return '"' + "".join(f"\\u{units[at : at + 2].hex()}" for at in range(0, len(units), 2)) + '"'
        return json.dumps(value, ensure_ascii=way == "ascii")
    return json.dumps(value)


@st.composite
def bodies_with(draw: st.DrawFn, key: str, values: st.SearchStrategy[Any] = VALUES) -> tuple[dict[str, Any], bytes]:
    """An object with a member `key` in any place, and one way of writing it."""
    others = list(draw(st.dictionaries(TEXTS.filter(lambda name: name != key), VALUES, max_size=5)).items())
    others.insert(draw(st.integers(0, len(others))), (key, draw(values)))
    members = dict(others)
    return members, (draw(SPACES) + draw(written(members)) + draw(SPACES)).encode()


def is_subsequence(part: bytes, whole: bytes) -> bool:
    rest = iter(whole)
    return all(byte in rest for byte in part)


@given(bodies_with("program_id"))
def test_a_member_is_removed_and_nothing_else(case: tuple[dict[str, Any], bytes]) -> None:
    """Whatever is around, inside and beside it: the rest reads as before, in its own bytes and order."""
    members, body = case
    spliced = remove_member(body, ("program_id",))
    del members["program_id"]
    assert json.loads(spliced) == members
    assert list(json.loads(spliced)) == list(members)
    assert is_subsequence(spliced, body)


@given(st.dictionaries(TEXTS, VALUES, max_size=3), bodies_with("program_id"), st.data())
def test_a_nested_member_is_removed_and_nothing_else(
    outer: dict[str, Any], case: tuple[dict[str, Any], bytes], data: st.DataObject
) -> None:
    """`extra_body.program_id` goes, a `program_id` anywhere else stays."""
    inner, _ = case
    body = data.draw(written({**outer, "extra_body": inner})).encode()
    spliced = remove_member(body, ("extra_body", "program_id"))
    del inner["program_id"]
    assert json.loads(spliced) == {**outer, "extra_body": inner}
    assert is_subsequence(spliced, body)


@pytest.mark.parametrize(
    ("body", "expected"),
    [
        (b'{"program_id":"a"}', b"{}"),
        (b'{"program_id":"a","x":1}', b'{"x":1}'),
        (b'{"x":1,"program_id":"a"}', b'{"x":1}'),
        (b'{"x":1,"program_id":"a","y":2}', b'{"x":1,"y":2}'),
        (b'{ "x": 1, "program_id": 7, "y": 2 }', b'{ "x": 1, "y": 2 }'),
        (b'{"program_id":1.5,"x":1}', b'{"x":1}'),
        (b'{"x":1,"program_id":1e5}', b'{"x":1}'),
        (b'{"program_id":"a","x":1,"program_id":"b"}', b'{"x":1}'),
        (b'{"\\u0070rogram_id":"a","x":{"program_id":5}}', b'{"x":{"program_id":5}}'),
        (b'{"m":[{"program_id":5}],"program_\\u0069d":"a"}', b'{"m":[{"program_id":5}]}'),
        (b'{"a\\"program_id":5,"program_i\\u0064":"x"}', b'{"a\\"program_id":5}'),
        (b'{"\xff":1,"program_id":[1]}', b'{"\xff":1}'),
    ],
)
def test_odd_bodies_are_spliced_to_the_byte(body: bytes, expected: bytes) -> None:
    """They have only such members, numbers with a tail, repeated keys, escaped keys, and keys that are not text."""
    assert remove_member(body, ("program_id",)) == expected


def test_the_rest_keeps_every_byte() -> None:
    """Escapes, number formats and whitespace of other members are not normalised."""
    kept = b'{"a":1.00,  "b" : "\\u00e9\\/", "c":[1e2 ,\t-0.0],"d":123456789012345678901234567890'
    assert remove_member(kept + b',"program_id":"x"}', ("program_id",)) == kept + b"}"


def test_a_body_cannot_make_the_search_slow() -> None:
    """Two megabytes of whitespace or escapes take milliseconds: no pattern looks at a byte twice."""
    for filling in (b" " * 2_000_000 + b"1", b'"' + b"\\\\" * 1_000_000 + b'"', b'"' + b"a" * 2_000_000 + b'"'):
        body = b'{"x":' + filling + b',"program_id":"a"}'
        began_s = time.process_time()
        spliced = remove_member(body, ("program_id",))
        assert time.process_time() - began_s < 0.5
        assert len(spliced) == len(body) - len(b',"program_id":"a"')


# --- stream_options


@given(bodies_with("stream", st.just(True)))
def test_usage_is_asked_for_and_nothing_else_changes(case: tuple[dict[str, Any], bytes]) -> None:
    """A body without stream_options gets one; all existing bytes stay."""
    members, body = case
    spliced = set_include_usage(body, None)
    assert json.loads(spliced) == {**members, "stream_options": {"include_usage": True}}
    assert is_subsequence(body, spliced)


OPTIONS = st.none() | st.dictionaries(st.sampled_from(["include_usage", "other", "more"]), VALUES, max_size=3)


@given(bodies_with("stream_options", OPTIONS))
def test_usage_is_added_to_the_options_that_are_there(case: tuple[dict[str, Any], bytes]) -> None:
    """Other options keep their values, other members their bytes; a null is replaced."""
    members, body = case
    options = members["stream_options"]
    spliced = set_include_usage(body, options)
    members["stream_options"] = {**(options or {}), "include_usage": True}
    assert json.loads(spliced) == members
    assert list(json.loads(spliced)) == list(members)


def test_options_that_only_python_reads_are_written_as_they_were() -> None:
    options = {"include_usage": False, "x": "\ud800", "y": float("inf")}
    spliced = set_include_usage(json.dumps({"stream_options": options}).encode(), options)
    assert json.loads(spliced)["stream_options"] == {**options, "include_usage": True}


def test_usage_in_every_event_is_not_switched_on_by_the_way() -> None:
    """`continuous_usage_stats` has no effect without usage, and must not get one through ours."""
    options = {"include_usage": False, "continuous_usage_stats": True}
    spliced = set_include_usage(json.dumps({"stream_options": options}).encode(), options)
    assert json.loads(spliced)["stream_options"] == {"include_usage": True, "continuous_usage_stats": False}


def steps_count(size_bytes: int) -> int:
    """Return the number of calls to cut out a member that fills a body of this size by repetition."""
    member = b'"program_id":"a",'
    body = b"{" + member * (size_bytes // len(member)) + b'"messages":[]}'
    counted = Counter[str]()
    sys.setprofile(lambda _frame, event, _arg: counted.update((event,)))
    try:
        rest = remove_member(body, ("program_id",))
    finally:
        sys.setprofile(None)
    assert rest == b'{"messages":[]}'
    return counted.total()


def test_a_member_that_stands_there_a_thousand_times_costs_one_pass() -> None:
    """Twice the body is twice the work; otherwise any client could block all others for seconds."""
    assert steps_count(40_000) < 3 * steps_count(20_000)


@pytest.mark.parametrize(
    ("body", "rest"),
    [
        (b'{"a":1, "k":2 , "k" : 3, "b":4}', b'{"a":1, "b":4}'),
        (b'{"k":1, "a":2, "k":3 }', b'{"a":2 }'),
        (b'{"k":1 ,"k":2}', b"{}"),
        (b'{ "a":1 ,"k":2, "k":3 }', b'{ "a":1 }'),
        (b'{"k":1,"k":2,"a":{"k":3}}', b'{"a":{"k":3}}'),
    ],
)
def test_every_occurrence_of_a_member_goes_with_its_comma(body: bytes, rest: bytes) -> None:
    """Parsers take the last of them, so all of them must go."""
    assert remove_member(body, ("k",)) == rest


@pytest.mark.parametrize(
    ("body", "given", "after"),
    [
        (b"{}", None, b'{"salt":"s"}'),
        (b"{ }", None, b'{"salt":"s" }'),
        (b'{"a": 1}', None, b'{"salt":"s","a": 1}'),
        (b'{"a": {"salt": 2}}', None, b'{"salt":"s","a": {"salt": 2}}'),
        (b'{"a": 1, "salt": "mine", "b": 2}', b'"mine"', b'{"a": 1, "salt":"s", "b": 2}'),
        (b'{"salt": ["x", "y"]}', b'["x", "y"]', b'{"salt": "s"}'),
        (b'{"s\\u0061lt": null}', b"null", b'{"s\\u0061lt": "s"}'),
    ],
)
def test_value_is_read_and_put(body: bytes, given: bytes | None, after: bytes) -> None:
    """Whether it is there or not, and however its key is spelt."""
    assert value_of(body, "salt") == given
    assert put_value(body, "salt", b'"s"') == after
    assert json.loads(after)["salt"] == "s"
    if b"salt" not in body:
        return
    with pytest.raises(ValueError, match="no end"):
        put_value(body[:-1] + b" ", "salt", b"1")
