"""Token ids set aside: the rest is the same body, and putting them back gives the same bytes."""

from __future__ import annotations

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st
from multidict import CIMultiDict, CIMultiDictProxy

from thunderagent.proxy.reading.dialects import TURN_DIALECTS, Dialect
from thunderagent.proxy.reading.identity import TurnRequest, identify
from thunderagent.proxy.reading.json_splice import remove_member
from thunderagent.proxy.reading.outline import MIN_BODY_BYTES, Outline

IDS = json.dumps(list(range(100_000, 115_000))).encode()
TOKEN_IN = TURN_DIALECTS["/inference/v1/generate"]


def read(body: bytes, dialect: Dialect = TOKEN_IN) -> TurnRequest:
    turn = identify("a", CIMultiDictProxy(CIMultiDict()), body, dialect=dialect)
    assert turn is not None
    return turn


def test_a_large_list_is_set_aside() -> None:
    """The rest is small and otherwise the same object; filled it is the body."""
    body = b'{"token_ids" : ' + IDS + b', "sampling_params": {"n": [1]}}'
    outline = Outline.of(body, ("token_ids",))
    assert len(outline.text) < 100
    assert json.loads(outline.text)["sampling_params"] == {"n": [1]}
    assert outline.token_ids == IDS
    assert outline.filled(outline.text) == body


@pytest.mark.parametrize(
    "body",
    [
        b'{"token_ids": [1, 2], "x": "' + b"y" * MIN_BODY_BYTES + b'"}',
        b'{"token_ids": [' + IDS + b"]}",
        b'{"token_ids": [{"a": ' + IDS + b"}]}",
        b'{"token_ids": ["' + b"1" * MIN_BODY_BYTES + b'"]}',
        b'{"token_ids": ' + IDS[:-1],
        b'{"x": "token_ids", "y": ' + IDS + b"}",
        b'{"x": 7046029254386353131, "y": [7046029254386353131], "token_ids": ' + IDS + b"}",
    ],
    ids=["short", "nested", "objects", "texts", "no end", "a value", "the placeholder"],
)
def test_values_other_than_large_number_lists_stay(body: bytes) -> None:
    """The body is then read as it is, at whatever cost."""
    assert Outline.of(body, ("token_ids",)) == (body, b"")


@pytest.mark.parametrize("place", range(3))
@pytest.mark.parametrize("stream", [False, True])
def test_a_body_is_mended_as_one_that_was_read_whole(place: int, stream: bool) -> None:
    """The program's id and the wish for usage are spliced around the list."""
    members = [b'"token_ids": ' + IDS, b'"x": {"token_ids": [1]}', b'"stream": ' + (b"true" if stream else b"false")]
    body = b"{" + b", ".join([*members[:place], b'"program_id": "b"', *members[place:]]) + b"}"
    turn = read(body)
    expected = remove_member(body, ("program_id",))
    if stream:
        expected = b'{"stream_options":{"include_usage":true},' + expected[1:]
    assert turn.body == expected


def test_a_list_has_the_digests_of_a_body_that_was_read_whole() -> None:
    """Programs with the same tokens are recognised, even if their lists are in different places."""
    one = read(b'{"token_ids": ' + IDS + b"}")
    other = read(b'{"x": 1, "token_ids": ' + IDS + b', "stream": true}')
    whole = read(b'{"x": [7046029254386353131], "token_ids": ' + IDS + b', "stream": true}')
    assert len(one.prefix) > 5
    assert one.prefix == other.prefix == whole.prefix
    assert read(b'{"token_ids": ' + IDS.replace(b"100000", b"100001") + b"}").prefix[0] != one.prefix[0]


@given(st.binary(max_size=30), st.binary(max_size=30))
def test_any_bytes_come_back(before: bytes, after: bytes) -> None:
    """However broken a body is, its filled outline is the body."""
    body = before + b'"token_ids":' + IDS + after
    outline = Outline.of(body, ("token_ids", "input_ids"))
    assert outline.filled(outline.text) == body
