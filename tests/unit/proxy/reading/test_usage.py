"""Usage: the client's bytes and the counts, however the answer is cut."""

from __future__ import annotations

import gzip
import itertools
import json
import zlib

import pytest
from hypothesis import given
from hypothesis import strategies as st

from thunderagent.proxy.reading.answers import MAX_EVENT_BYTES, MAX_PLAIN_BYTES, StreamUsage, decoded, read_answer
from thunderagent.proxy.reading.dialects import NO_USAGE, Usage
from thunderagent.proxy.reading.dialects.openai import OpenAI

USAGE = {"prompt_tokens": 100, "completion_tokens": 7, "prompt_tokens_details": {"cached_tokens": 64}}
READ = Usage(100, 7, 64)


def event(data: object, end: str = "\n") -> bytes:
    text = data if isinstance(data, str) else json.dumps(data, separators=(",", ":"))
    return f"data: {text}{end}{end}".encode()


def choice(text: str, *, finish: str | None = None, **more: object) -> dict[str, object]:
    return {"id": "c1", "choices": [{"index": 0, "delta": {"content": text}, "finish_reason": finish}], **more}


def usage_of_answer(body: bytes, content_encoding: str | None) -> Usage:
    return read_answer(OpenAI(), body, content_encoding, lambda _: None)[0]


def fed(stream: StreamUsage, *pieces: bytes) -> bytes:
    return b"".join(stream.feed(piece) for piece in pieces) + stream.rest()


def as_asked(*, usage: bool, end: str = "\n", fingerprint: bool = True) -> bytes:
    """vLLM 0.32 sends this: the fingerprint goes with the usage event, if there is one, else with the last choice."""
    last = {"system_fingerprint": "fp"} if fingerprint and not usage else {}
    carried = {"system_fingerprint": "fp"} if fingerprint else {}
    events = [
        event(choice("Hel"), end),
        event(choice("lo \u2028{}"), end),
        event(choice("", finish="stop", **last), end),
    ]
    if usage:
        events.append(event({"id": "c1", "choices": [], "usage": USAGE, **carried}, end))
    return b"".join([*events, event("[DONE]", end)])


# --- Streams


@pytest.mark.parametrize("fingerprint", [True, False])
@pytest.mark.parametrize("end", ["\n", "\r\n", "\r"])
def test_the_client_gets_the_bytes_that_it_asked_for(end: str, fingerprint: bool) -> None:
    """The proxy asked for usage: its event is removed, and the fingerprint returns to its usual place."""
    stream = StreamUsage(take_out=True)
    relayed = fed(stream, as_asked(usage=True, end=end, fingerprint=fingerprint))
    assert relayed == as_asked(usage=False, end=end, fingerprint=fingerprint)
    assert stream.reader.usage == READ


@pytest.mark.parametrize("end", [b"\r\n\n", b"\n\r\n"])
def test_a_blank_line_may_end_otherwise_than_the_line_before_it(end: bytes) -> None:
    """Intermediaries add lines of their own; the usage event is still found, and removed."""
    stream = StreamUsage(take_out=True)
    usage = as_asked(usage=True, end="\n").replace(b"\n\n", end)
    assert fed(stream, *(usage[at : at + 1] for at in range(len(usage)))) == as_asked(usage=False, end="\n").replace(
        b"\n\n", end
    )
    assert stream.reader.usage == READ


@pytest.mark.parametrize("end", ["\n", "\r\n"])
def test_empty_lines_between_events_stay(end: str) -> None:
    """This holds even if the event that follows them is removed."""
    between = (end * 3).encode()
    first, usage, done = event("x", end), event({"choices": [], "usage": USAGE}, end), event("[DONE]", end)
    for cut in range(len(first + between + usage)):
        stream = StreamUsage(take_out=True)
        whole = first + between + usage + done
        assert fed(stream, whole[:cut], whole[cut:]) == first + between + done
        assert stream.reader.usage == READ


@pytest.mark.parametrize("take_out", [True, False])
@pytest.mark.parametrize("end", ["\n", "\r\n"])
def test_a_stream_split_at_every_byte_gives_the_same(take_out: bool, end: str) -> None:
    """Wherever the network cuts, bytes and usage equal those of the whole."""
    whole = as_asked(usage=True, end=end)
    expected = as_asked(usage=False, end=end) if take_out else whole
    for at in range(len(whole) + 1):
        stream = StreamUsage(take_out=take_out)
        assert fed(stream, whole[:at], whole[at:]) == expected
        assert stream.reader.usage == READ
    stream = StreamUsage(take_out=take_out)
    assert fed(stream, *(whole[at : at + 1] for at in range(len(whole)))) == expected
    assert stream.reader.usage == READ


EVENTS = st.one_of(
    st.text(max_size=10).map(lambda text: event(choice(text))),
    st.text(max_size=10).map(lambda text: event(choice(text, finish="stop"))),
    st.just(event({**choice("x"), "usage": None})),
    st.just(event({**choice("x"), "usage": USAGE})),
    st.sampled_from([b": ping\n\n", b": ping\r\n\r\n", b"event: x\ndata: {}\n\n", b"data: {broken\n\n", b"data:\n\n"]),
    st.sampled_from([b'data: "usage"\n\n', b'data: {"usage":5,"choices":[]}\n\n', b"data: [DONE]\n\n", b"id: 1\n\n"]),
)
LINES = EVENTS | st.sampled_from([b"\n", b"\r\n", b"\r"]) | st.binary(max_size=6)
CUTS = st.lists(st.integers(0, 1200), max_size=8)


@given(st.lists(LINES, max_size=12), st.binary(max_size=5), CUTS, st.booleans())
def test_events_without_usage_are_relayed_to_the_byte(
    lines: list[bytes], tail: bytes, cuts: list[int], take_out: bool
) -> None:
    """Comments, broken events, usage beside choices, garbage and an end in mid-event, cut anywhere."""
    whole = b"".join(lines) + tail
    edges = [0, *sorted(min(cut, len(whole)) for cut in cuts), len(whole)]
    pieces = [whole[start:end] for start, end in itertools.pairwise(edges)]
    assert fed(StreamUsage(take_out=take_out), *pieces) == whole


@given(st.lists(EVENTS, max_size=6), st.lists(EVENTS, max_size=6), CUTS)
def test_only_the_usage_event_is_taken_out(before: list[bytes], after: list[bytes], cuts: list[int]) -> None:
    """Its place among other events and the cuts of the stream do not matter."""
    first, second = b"".join(before), b"".join(after)
    whole = first + event({"choices": [], "usage": USAGE}) + second
    edges = [0, *sorted(min(cut, len(whole)) for cut in cuts), len(whole)]
    stream = StreamUsage(take_out=True)
    pieces = (whole[start:end] for start, end in itertools.pairwise(edges))
    assert fed(stream, *pieces) == first + second
    assert stream.reader.usage == READ


def test_without_taking_out_every_byte_is_relayed_at_once() -> None:
    """A client that asked for usage waits for nothing."""
    stream = StreamUsage(take_out=False)
    for byte in as_asked(usage=True):
        assert stream.feed(bytes([byte])) == bytes([byte])
    assert stream.rest() == b""
    assert stream.reader.usage == READ


def test_with_taking_out_whole_events_are_relayed_at_once() -> None:
    """A word does not wait for the next one; only the last choice waits for the usage."""
    stream = StreamUsage(take_out=True)
    word, last = event(choice("Hel")), event(choice("", finish="stop"))
    assert stream.feed(word + word[:10]) == word
    assert stream.feed(word[10:]) == word
    assert stream.feed(last) == b""
    assert stream.feed(event({"choices": [], "usage": USAGE})) == b""
    assert stream.feed(event("[DONE]")) == last + event("[DONE]")


def test_a_blank_line_too_many_breaks_nothing() -> None:
    """The third line break belongs to no event, and is relayed."""
    usage = event({"choices": [], "usage": USAGE})
    stream = StreamUsage(take_out=True)
    assert fed(stream, event(choice("x")) + usage + b"\n", event("[DONE]")) == event(choice("x")) + b"\n" + event(
        "[DONE]"
    )
    assert stream.reader.usage == READ


def test_two_last_choices_keep_their_order() -> None:
    """With n=2 each choice has its own end; the fingerprint belongs to the last."""
    ends = [event(choice("", finish="stop")), event(choice("", finish="length"))]
    whole = b"".join(ends) + event({"choices": [], "usage": USAGE, "system_fingerprint": "fp"}) + event("[DONE]")
    expected = ends[0] + event(choice("", finish="length", system_fingerprint="fp")) + event("[DONE]")
    assert fed(StreamUsage(take_out=True), whole) == expected


def test_a_stream_that_ends_early_loses_nothing() -> None:
    """The last choice, and half an event behind it, come out at the end."""
    stream = StreamUsage(take_out=True)
    whole = event(choice("", finish="stop")) + b'data: {"choices'
    assert stream.feed(whole) == b""
    assert stream.rest() == whole
    assert stream.rest() == b""


def test_the_usage_of_the_last_event_that_has_one_counts() -> None:
    """Engines that repeat a running usage in every event end with the total."""
    running = {"prompt_tokens": 100, "completion_tokens": 1}
    stream = StreamUsage(take_out=False)
    fed(
        stream,
        event({**choice("a"), "usage": running}),
        event({**choice("b"), "usage": {**running, "completion_tokens": 2}}),
    )
    assert stream.reader.usage == Usage(100, 2, None)


@pytest.mark.parametrize("encoding", ["gzip", "deflate", "x-gzip", " GZIP "])
def test_an_encoded_stream_is_read_and_relayed_as_it_is(encoding: str) -> None:
    """It cannot be cut, so nothing is removed; its usage is still read."""
    whole = as_asked(usage=True)
    packed = zlib.compress(whole) if encoding == "deflate" else gzip.compress(whole)
    stream = StreamUsage(take_out=True, content_encoding=encoding)
    assert fed(stream, *(packed[at : at + 3] for at in range(0, len(packed), 3))) == packed
    assert stream.reader.usage == READ


@pytest.mark.parametrize("encoding", ["gzip", "br", "zstd"])
def test_an_encoding_that_cannot_be_read_is_relayed_as_it_is(encoding: str) -> None:
    """The encoding is unknown, or not the one that it claims to be."""
    stream = StreamUsage(take_out=True, content_encoding=encoding)
    assert fed(stream, b"no gzip", b" at all") == b"no gzip at all"
    assert stream.reader.usage == NO_USAGE


def test_a_stream_without_an_end_of_an_event_does_not_pile_up() -> None:
    """After 16 MiB without a blank line it is relayed as it comes."""
    stream = StreamUsage(take_out=True)
    piece = b"x" * 2**20
    relayed = b"".join(stream.feed(piece) for _ in range(MAX_EVENT_BYTES // len(piece) + 1))
    assert len(relayed) == MAX_EVENT_BYTES + len(piece)
    assert stream.feed(b"more") == b"more"
    assert stream.rest() == b""


def test_events_are_counted_for_the_progress_of_a_turn() -> None:
    """Each is about one token, whatever its text says."""
    stream = StreamUsage(take_out=False)
    for _ in range(20):
        stream.feed(event(choice("data: x")))
        stream.feed(b"event: x\r\n" + event(choice("data: x"), "\r\n") * 2)
        stream.feed(b"event: x\r" + event(choice("data: x"), "\r"))
    assert stream.events_count == 80


# --- Whole answers


@pytest.mark.parametrize(
    ("answer", "usage"),
    [
        ({"usage": USAGE}, READ),
        ({"usage": {"prompt_tokens": 5}}, Usage(5, None, None)),
        ({"usage": {"prompt_tokens": 5, "prompt_tokens_details": None}}, Usage(5, None, None)),
        ({"usage": {"prompt_tokens": -1, "completion_tokens": 0}}, Usage(None, 0, None)),
        ({"usage": {"prompt_tokens": 10**310, "completion_tokens": 2**40}}, Usage(None, 2**40, None)),
        ({"usage": None}, NO_USAGE),
        ({"usage": []}, NO_USAGE),
        ({"usage": {"prompt_tokens": "many"}}, NO_USAGE),
        ({}, NO_USAGE),
        ([], NO_USAGE),
    ],
)
def test_usage_of_a_whole_answer_is_read(answer: object, usage: Usage) -> None:
    """It may be plain or gzipped; missing and impossible counts are None."""
    body = json.dumps(answer).encode()
    assert usage_of_answer(body, None) == usage
    assert usage_of_answer(gzip.compress(body), "gzip") == usage


@pytest.mark.parametrize(
    ("body", "encoding"),
    [
        (b"", None),
        (b"<html>", None),
        (b"\xff\xfe", None),
        (b"{}", "br"),
        (b"no gzip", "gzip"),
        (b'{"a":' + b"[" * 100_000, None),
    ],
    ids=lambda value: str(value)[:12],
)
def test_an_answer_that_cannot_be_read_has_no_usage(body: bytes, encoding: str | None) -> None:
    """Whatever a replica sends, reading it never fails."""
    assert usage_of_answer(body, encoding) == NO_USAGE


def test_a_body_is_decoded_or_none() -> None:
    """Encodings are identity, gzip and deflate; broken or unknown ones give None."""
    assert decoded(b"x", None) == decoded(b"x", "identity") == decoded(gzip.compress(b"x"), "x-gzip") == b"x"
    assert decoded(zlib.compress(b"x"), "deflate") == b"x"
    assert decoded(b"x", "br") is decoded(b"no gzip", "gzip") is None


def test_a_small_body_that_would_unpack_to_a_huge_one_is_not_read() -> None:
    """A whole answer has no usage then, and a stream is relayed without being read."""
    packed = gzip.compress(bytes(MAX_PLAIN_BYTES + 1))
    assert decoded(packed, "gzip") is None
    stream = StreamUsage(take_out=False, content_encoding="gzip")
    assert stream.feed(packed) == packed
    assert not stream.begun
