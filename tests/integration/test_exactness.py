"""Through the proxy, both sides see the bytes that they would see without it.

Each request is sent twice, to a replica itself and through the proxy in front of it; then both ends are compared.
"""

from __future__ import annotations

import gzip
import itertools
import json
import re
from random import Random
from typing import TYPE_CHECKING, Any

import pytest

from tests.integration.support import (
    ANSWER,
    CHAT,
    DEADLINE_S,
    DONE,
    HOP_BY_HOP,
    JSON_TYPE,
    LAST_CHUNK,
    OF_THE_PROXY,
    SERVER_HEADERS,
    SSE_TYPE,
    USAGE,
    USAGE_EVENT,
    Answer,
    Call,
    FakeReplica,
    Header,
    RunningProxy,
    Wire,
    answers,
    chunk,
    end_to_end,
    event,
    events_of,
    exchange,
    head_bytes,
    metrics_of,
    post,
    running_proxy,
    streams,
    turn,
    word,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

STREAM = (word("one"), word(" two", "stop"), DONE)
USAGE_OPTION = b'"stream_options":{"include_usage":true}'


def seen(answer: Answer, *added: str) -> tuple[int, str, list[Header], bytes, bool]:
    """Return what must be the same for a client."""
    headers = end_to_end(answer.headers, *OF_THE_PROXY, *added)
    return answer.status, answer.reason, headers, answer.body, answer.whole


def asked(call: Call) -> tuple[str, str, list[Header], bytes]:
    """Return what must be the same for a replica."""
    return call.method, call.target, end_to_end(call.headers, "host", "content-length"), call.body


async def send_both_ways(
    replica: FakeReplica,
    proxy: RunningProxy,
    method: str,
    target: str,
    headers: Sequence[Header] = (),
    body: bytes = b"",
) -> tuple[Answer, Call]:
    """Send a request directly and through the proxy, compare both ends, and return what the proxy did."""
    replica.calls.clear()
    direct = await exchange(replica.url, method, target, headers, body)
    relayed = await exchange(proxy.url, method, target, headers, body)
    has_length = any(name.lower() == "content-length" for name, _ in direct.headers)
    assert seen(relayed, *(() if has_length else ("content-length",))) == seen(direct)  # an added length is no fault
    first, second = replica.calls
    assert asked(second) == asked(first)
    return relayed, second


# --- bodies


def random_text(random: Random) -> str:
    letters = ['"', "\\", "/", "\n", "\t", "é", "😀", "\u2028", "{", "}", "[", ",", ":", "a", "program_id", " "]
    return "".join(random.choices(letters, k=random.randrange(12)))


def random_value(random: Random, depth: int = 0) -> object:
    kind = random.randrange(8 if depth < 3 else 6)
    if kind == 6:
        return [random_value(random, depth + 1) for _ in range(random.randrange(4))]
    if kind == 7:
        return {random_text(random) + str(n): random_value(random, depth + 1) for n in range(random.randrange(4))}
    return (None, True, random.randrange(-(10**6), 10**18), random.random() * 1e5, random_text(random), "word")[kind]


def random_members(random: Random) -> list[tuple[str, str]]:
    """Return the members of a turn's body, each value as JSON of some style."""
    members: dict[str, object] = {"model": "m", "messages": [{"role": "user", "content": random_text(random)}]}
    members |= {f"field{n}": random_value(random) for n in range(random.randrange(5))}
    items = list(members.items())
    random.shuffle(items)
    ascii_only = random.random() < 0.5
    separators = random.choice(((",", ":"), (", ", ": "), (" ,\n", "\t:  ")))
    return [
        (json.dumps(key, ensure_ascii=ascii_only), json.dumps(value, ensure_ascii=ascii_only, separators=separators))
        for key, value in items
    ]


def joined(members: list[tuple[str, str]], random: Random) -> bytes:
    """Return an object of these members, with some white space between them."""
    space = random.choice(("", " ", "\n  ", "\r\n\t"))
    inner = f",{space}".join(f"{key}:{space}{value}" for key, value in members)
    return f"{space}{{{space}{inner}{space}}}{space}".encode()


_TOKEN = re.compile(rb'"(?:[^"\\]|\\.)*"|[{}\[\],:]|[^\s{}\[\],:"]+')


def without_space(body: bytes) -> list[bytes]:
    """Return the tokens of a body: all of it but the white space between them."""
    return _TOKEN.findall(body)


def program_id_member(random: Random) -> tuple[str, str]:
    value = random.choice(("x", "a/b:c", 'quote " and \\ backslash', "é😀", 5, -17, "program_id"))
    return '"program_id"', json.dumps(value, ensure_ascii=random.random() < 0.5)


async def test_200_random_bodies_arrive_as_they_were_sent(replica: FakeReplica, proxy: RunningProxy) -> None:
    """A body that does not name its program is forwarded byte for byte, and every answer likewise."""
    for seed in range(200):
        random = Random(seed)
        replica.behaviour = answers(joined(random_members(random), random))
        headers = [("X-Program-ID", f"program-{seed % 7}"), ("Content-Type", "application/json")]
        await send_both_ways(replica, proxy, "POST", CHAT, headers, joined(random_members(random), random))


@pytest.mark.parametrize("in_extra_body", [False, True])
async def test_200_random_bodies_lose_their_program_id_and_nothing_else(
    replica: FakeReplica,
    proxy: RunningProxy,
    in_extra_body: bool,
) -> None:
    """Wherever it stands, only the member `program_id` is taken out, with the comma that it needed."""
    for seed in range(200):
        random = Random(seed)
        members = random_members(random)
        own = program_id_member(random)
        if in_extra_body:
            inner = random_members(random)[: random.randrange(3)]
            position = random.randrange(len(inner) + 1)
            outer = random.randrange(len(members) + 1)
            expected = [*members[:outer], ('"extra_body"', joined(inner, random).decode()), *members[outer:]]
            inner.insert(position, own)
            sent = [*members[:outer], ('"extra_body"', joined(inner, random).decode()), *members[outer:]]
        else:
            position = random.randrange(len(members) + 1)
            sent, expected = [*members[:position], own, *members[position:]], members
        replica.calls.clear()
        answer = await post(proxy.url, CHAT, joined(sent, random))
        assert answer.status == 200, answer.body
        (call,) = replica.calls
        assert without_space(call.body) == without_space(joined(expected, random)), seed
        if str(answer.header("X-Program-ID")).isascii() and "\\" not in str(answer.header("X-Program-ID")):
            assert answer.header("X-Program-ID") == str(json.loads(own[1]))
        assert answer.header("X-Program-ID-Source") == ("extra_body" if in_extra_body else "body")


@pytest.mark.parametrize(
    ("sent", "arrives"),
    [
        (b'{"program_id":"x","a":1}', b'{"a":1}'),
        (b'{"a":1,"program_id":"x"}', b'{"a":1}'),
        (b'{"a":1,"program_id":"x","b":2}', b'{"a":1,"b":2}'),
        (b'{"program_id":"x"}', b"{}"),
        (b'{"program_id":"x","program_id":"y"}', b"{}"),
        (b'{"a":{"program_id":5},"program_id":"x"}', b'{"a":{"program_id":5}}'),
        (b'{"a":"\\"program_id\\":7","program_id":"x"}', b'{"a":"\\"program_id\\":7"}'),
        (b'{"program_id":"x","extra_body":{"program_id":"y","z":1}}', b'{"extra_body":{"z":1}}'),
        (b'{"extra_body":{"a":{"program_id":1},"program_id":"y"}}', b'{"extra_body":{"a":{"program_id":1}}}'),
        # The header names the program, so what the body says need not be an id to be taken out.
        (b'{"program_id":1.5,"a":1}', b'{"a":1}'),
        (b'{"a":1,"program_id":1e5}', b'{"a":1}'),
        (b'{"a":1,"program_id":-0.5e-7,"b":2}', b'{"a":1,"b":2}'),
        (b'{"program_id":true,"a":1}', b'{"a":1}'),
        (b'{"program_id":{"x":[1,"]"]},"a":1}', b'{"a":1}'),
        (b'{"program_id":[],"a":1}', b'{"a":1}'),
        (b'{"program\\u005fid":"x","a":1}', b'{"a":1}'),
    ],
)
async def test_program_id_is_cut_out(replica: FakeReplica, proxy: RunningProxy, sent: bytes, arrives: bytes) -> None:
    """Odd places and odd values: what arrives is the same object without the member."""
    await post(proxy.url, CHAT, sent, ("X-Program-ID", "named-by-header"))
    (call,) = replica.calls
    assert call.body == arrives


async def test_a_body_of_2_mb_arrives_and_returns_as_it_is(replica: FakeReplica, proxy: RunningProxy) -> None:
    """Token ids by the hundred thousand, both ways; the program id is found at the end."""
    ids = json.dumps(list(range(300_000))).encode()
    assert len(ids) > 2_000_000
    replica.behaviour = answers(b'{"prompt_token_ids": ' + ids + b"}")
    _, call = await send_both_ways(replica, proxy, "POST", "/v1/completions", (), b'{"prompt": ' + ids + b"}")
    assert len(call.body) > 2_000_000
    named = await post(proxy.url, "/v1/completions", b'{"prompt": ' + ids + b', "program_id": "x"}')
    assert named.header("X-Program-ID") == "x"
    assert replica.calls[-1].body == b'{"prompt": ' + ids + b"}"
    text = turn(content='"\\ {' * 500_000, stream=True, stream_options={"include_usage": False})
    await post(proxy.url, CHAT, {**text, "program_id": "x"})
    assert replica.calls[-1].json() == {**text, "stream_options": {"include_usage": True}}


async def test_a_body_in_chunks_arrives_whole(replica: FakeReplica, proxy: RunningProxy) -> None:
    """A client that does not know the length sends chunks; the replica gets the same bytes."""
    async with Wire.open(proxy.url) as wire:
        wire.send("POST", CHAT, [("Transfer-Encoding", "chunked")], chunk(b'{"a"') + chunk(b": 1}") + LAST_CHUNK)
        assert (await wire.answer()).status == 200
    assert replica.calls[0].body == b'{"a": 1}'


async def test_a_client_that_expects_100_continue_is_told_to_go_on(replica: FakeReplica, proxy: RunningProxy) -> None:
    """curl expects that with large bodies; the replica does not see the expectation."""
    async with Wire.open(proxy.url) as wire:
        wire.send("POST", CHAT, [("Expect", "100-continue")], b'{"a": 1}')
        assert (await wire.answer()).status == 200
    assert replica.calls[0].header("Expect") is None


# --- headers


async def test_200_random_heads_pass_both_ways(replica: FakeReplica, proxy: RunningProxy) -> None:
    """End-to-end headers keep names, values, order and number; hop-by-hop ones stop here."""
    names = ("Authorization", "X-Custom", "x-request-id", "traceparent", "Cookie", "Accept-Encoding", "tracestate")
    hops = (("Keep-Alive", "timeout=5"), ("TE", "trailers"), ("Upgrade", "h2c"), ("Proxy-Connection", "keep-alive"))
    for seed in range(200):
        random = Random(seed)
        values = ("Bearer abc==", "a=1; b=2", "gzip, br", 'quote "x"', "tab\there", "", "x" * 4000, "ü")
        headers = [(random.choice(names), random.choice(values)) for _ in range(random.randrange(8))]
        headers += [("User-Agent", "somebody/1.0")][: random.randrange(2)]
        headers += random.sample(hops, random.randrange(len(hops)))
        random.shuffle(headers)
        answered = [
            ("Set-Cookie", "a=1; Path=/"),
            ("Set-Cookie", f"b={seed}; HttpOnly"),
            *((f"X-Answer-{number}", random.choice(values)) for number in range(random.randrange(4))),
            JSON_TYPE,
        ]
        random.shuffle(answered)
        replica.behaviour = answers(status=random.choice(("200 OK", "201 Made", "418 Tea Pot")), headers=answered)
        replica.calls.clear()
        direct = await exchange(replica.url, "POST", CHAT, headers, b"{}")
        relayed = await exchange(proxy.url, "POST", CHAT, headers, b"{}")
        assert seen(relayed) == seen(direct)
        kept = [
            (name, value)
            for name, value in end_to_end(headers)
            if name not in HOP_BY_HOP and name != "proxy-connection"
        ]
        assert end_to_end(replica.calls[1].headers, "host", "content-length") == kept, seed


async def test_headers_that_connection_names_are_dropped_both_ways(replica: FakeReplica, proxy: RunningProxy) -> None:
    """RFC 9110, 7.6.1."""
    replica.behaviour = answers(headers=[JSON_TYPE, ("Connection", "X-Hop, x-other"), ("X-Hop", "1"), ("X-End", "2")])
    sent = [("X-Mine", "1"), ("X-End", "2"), ("Connection", "x-mine, keep-alive")]
    async with Wire.open(proxy.url) as wire:
        wire.send("POST", CHAT, sent, b"{}")
        answer = await wire.answer()
    assert (answer.header("X-Hop"), answer.header("X-End")) == (None, "2")
    (call,) = replica.calls
    assert (call.header("X-Mine"), call.header("X-End")) == (None, "2")


async def test_nothing_is_added_to_a_request_that_says_little(replica: FakeReplica, proxy: RunningProxy) -> None:
    """The proxy adds no Accept, no User-Agent, no Content-Type, and no cookie of an earlier answer."""
    replica.behaviour = answers(headers=[JSON_TYPE, ("Set-Cookie", "session=1")])
    for _ in range(2):
        await post_bare(proxy.url, b"{}")
    assert {tuple(end_to_end(call.headers, "host", "content-length")) for call in replica.calls} == {()}
    assert replica.calls[0].header("Host") == replica.replica_id


async def post_bare(url: str, body: bytes) -> Answer:
    return await exchange(url, "POST", CHAT, (), body)


@pytest.mark.parametrize("encoding", ["gzip", "br", "zstd", "unheard-of"])
async def test_encoded_answers_are_not_touched(replica: FakeReplica, proxy: RunningProxy, encoding: str) -> None:
    """The bytes stay encoded; the usage in a gzip answer is still read."""
    body = gzip.compress(json.dumps(ANSWER).encode())
    replica.behaviour = answers(body, headers=[JSON_TYPE, ("Content-Encoding", encoding)])
    answer, _ = await send_both_ways(replica, proxy, "POST", CHAT, [("X-Program-ID", "a")], b"{}")
    assert answer.body == body
    program = proxy.runtime.scheduler.programs.get("a")
    assert program is not None
    assert program.prompt_tokens_total == (USAGE["prompt_tokens"] if encoding == "gzip" else 0)


# --- other paths


@pytest.mark.parametrize("method", ["GET", "HEAD", "PUT", "DELETE", "PATCH", "OPTIONS", "POST"])
@pytest.mark.parametrize(
    "target", ["/v1/files", "/v1/a/b?c=d&c=e&f", "/v1/%2Fodd%20path/%C3%A9?q=%26+x", "/tokenize?a=/v1/b"]
)
async def test_unknown_paths_pass_with_any_method(
    replica: FakeReplica, proxy: RunningProxy, method: str, target: str
) -> None:
    """Path and query pass byte for byte; a request that may generate has an anonymous lease."""
    has_body = method in {"PUT", "PATCH", "POST"}
    await send_both_ways(replica, proxy, method, target, [("X-Custom", "1")], b"some bytes" if has_body else b"")
    may_generate = has_body and not target.startswith(("/v1/files", "/tokenize"))
    assert proxy.runtime.outcome_counts["finished"] == may_generate
    assert len(proxy.runtime.scheduler.programs) == 0


async def test_a_head_request_has_the_length_of_the_answer_it_would_get(
    replica: FakeReplica, proxy: RunningProxy
) -> None:
    async def behave(call: Call) -> None:
        call.write(head_bytes("HTTP/1.1 200 OK", [*SERVER_HEADERS, JSON_TYPE, ("Content-Length", "1234")]))

    replica.behaviour = behave
    answer, _ = await send_both_ways(replica, proxy, "HEAD", "/v1/files")
    assert answer.header("Content-Length") == "1234"


@pytest.mark.parametrize("status", ["204 No Content", "304 Not Modified"])
async def test_an_answer_without_a_body_has_none(replica: FakeReplica, proxy: RunningProxy, status: str) -> None:
    async def behave(call: Call) -> None:
        call.write(head_bytes(f"HTTP/1.1 {status}", [*SERVER_HEADERS, ("ETag", '"x"')]))

    replica.behaviour = behave
    await send_both_ways(replica, proxy, "GET", "/v1/files")


async def test_a_redirect_is_the_clients(replica: FakeReplica, proxy: RunningProxy) -> None:
    """The client gets it; the proxy does not follow it."""
    replica.behaviour = answers(b"", status="307 Temporary Redirect", headers=[("Location", "/v1/elsewhere")])
    await send_both_ways(replica, proxy, "POST", CHAT, (), b"{}")
    assert len(replica.calls) == 2


async def test_an_answer_without_a_length_ends_with_its_connection(replica: FakeReplica, proxy: RunningProxy) -> None:
    """HTTP/1.0 answers this way."""

    async def behave(call: Call) -> None:
        call.write(head_bytes("HTTP/1.1 200 OK", [*SERVER_HEADERS, JSON_TYPE, ("Connection", "close")]), b'{"a": 1}')
        call.close()

    replica.behaviour = behave
    await send_both_ways(replica, proxy, "POST", CHAT, (), b"{}")


# --- streams


def pieces_at(data: bytes, *cuts: int) -> list[bytes]:
    edges = [0, *cuts, len(data)]
    return [data[start:end] for start, end in itertools.pairwise(edges) if start < end]


def respelt(data: bytes, spelling: str) -> bytes:
    """Return a stream with other line ends."""
    return data.replace(b"\n", {"lf": b"\n", "crlf": b"\r\n", "cr": b"\r"}[spelling])


COMMENTS = b": a comment\n\nevent: message\nid: 7\nretry: 10\n" + word("x") + b"data:no space\n\n: ping\n\n"


@pytest.mark.parametrize("spelling", ["lf", "crlf", "cr"])
@pytest.mark.parametrize("asks_for_usage", [True, False])
async def test_stream_split_at_every_byte_arrives_the_same(
    replica: FakeReplica,
    proxy: RunningProxy,
    spelling: str,
    asks_for_usage: bool,
) -> None:
    """Wherever the network cuts it, the client gets its bytes; usage that it did not ask for is taken out."""
    shown = [word("one"), b": comment\n\n", word(" two", "stop")]
    asked_for = respelt(b"".join([*shown, USAGE_EVENT, DONE]), spelling)
    plain = respelt(b"".join([*shown, DONE]), spelling)
    body = turn("a", stream=True, **({"stream_options": {"include_usage": True}} if asks_for_usage else {}))
    async with Wire.open(proxy.url) as wire:
        for cut in range(1, len(asked_for)):
            replica.behaviour = streams(*pieces_at(asked_for, cut))
            wire.send("POST", CHAT, [JSON_TYPE], json.dumps(body).encode())
            answer = await wire.answer()
            assert answer.whole
            assert answer.body == (asked_for if asks_for_usage else plain), cut
    program = proxy.runtime.scheduler.programs.get("a")
    assert program is not None
    assert program.prompt_tokens_total == USAGE["prompt_tokens"] * (len(asked_for) - 1)


@pytest.mark.parametrize("asks_for_usage", [True, False])
async def test_200_random_streams_arrive_the_same(
    replica: FakeReplica, proxy: RunningProxy, asks_for_usage: bool
) -> None:
    """Random events, cut at random, down to single bytes: comments, names, ids, odd JSON, `[DONE]` or none."""
    options = {"stream_options": {"include_usage": True}} if asks_for_usage else {}
    for seed in range(200):
        random = Random(seed)
        kinds: list[Callable[[], bytes]] = [
            lambda: word("word"),
            lambda: event({"choices": [{"index": 0, "delta": {"content": '"usage": choices [] \n\n'}}]}),
            lambda: event({"usage": None, "choices": [{"index": 0}]}),
            lambda: COMMENTS,
            lambda: event("not json"),
            lambda: b"data: two\ndata: lines\n\n",
        ]
        shown = [random.choice(kinds)() for _ in range(random.randrange(6))]
        tail = [random.choice((DONE, b""))]
        spelling = random.choice(("lf", "crlf"))
        full = respelt(b"".join([*shown, word("", "stop"), USAGE_EVENT, *tail]), spelling)
        plain = respelt(b"".join([*shown, word("", "stop"), *tail]), spelling)
        if random.random() < 0.2:
            pieces = [full[n : n + 1] for n in range(len(full))]
        else:
            pieces = pieces_at(full, *sorted(random.sample(range(1, len(full)), 5)))
        replica.behaviour = streams(*pieces)
        answer = await post(proxy.url, CHAT, turn("a", stream=True, **options))
        assert answer.body == (full if asks_for_usage else plain), seed


async def test_a_stream_is_relayed_event_by_event(replica: FakeReplica, proxy: RunningProxy) -> None:
    """The first word is there long before the last: nothing waits for the end."""
    import asyncio  # noqa: PLC0415 - this test alone

    go_on = asyncio.Event()

    async def behave(call: Call) -> None:
        call.write(head_bytes("HTTP/1.1 200 OK", [SSE_TYPE, ("transfer-encoding", "chunked")]), chunk(word("one")))
        await go_on.wait()
        call.write(chunk(word("two")), LAST_CHUNK)

    replica.behaviour = behave
    for stream in (True, 1):  # engines take 1 for true
        go_on.clear()
        async with Wire.open(proxy.url) as wire:
            body = json.dumps(turn("a", stream=stream)).encode()
            wire.send("POST", CHAT, (), body)
            answer = await wire.head()
            async with asyncio.timeout(DEADLINE_S):
                assert await wire.chunk() == word("one")
            go_on.set()
            assert (await wire.body(answer)).body == word("two")


@pytest.mark.parametrize(
    ("options", "arrives"),
    [
        (b"", USAGE_OPTION + b","),
        (b'"stream_options":null,', USAGE_OPTION + b","),
        (b'"stream_options":{"include_usage":false},', USAGE_OPTION + b","),
        (b'"stream_options":{"include_usage":null},', USAGE_OPTION + b","),
        (
            b'"stream_options":{"include_usage":false,"x":[1]},',
            b'"stream_options":{"include_usage":true,"x":[1]},',
        ),
        # Without usage an engine heeds no continuous_usage_stats, so asking for usage must not switch it on.
        (
            b'"stream_options":{"include_usage":false,"continuous_usage_stats":true},',
            b'"stream_options":{"include_usage":true,"continuous_usage_stats":false},',
        ),
    ],
)
async def test_usage_that_was_not_asked_for_is_asked_for_and_taken_out(
    replica: FakeReplica, proxy: RunningProxy, options: bytes, arrives: bytes
) -> None:
    """The client sees the stream that it would have seen; the scheduler learns the usage."""
    replica.behaviour = streams(*STREAM[:-1], USAGE_EVENT, STREAM[-1])
    answer = await post(proxy.url, CHAT, b'{"stream":true,' + options + b'"messages":[]}', ("X-Program-ID", "a"))
    assert answer.body == b"".join(STREAM)
    assert json.loads(replica.calls[0].body) == json.loads(b'{"stream":true,' + arrives + b'"messages":[]}')
    program = proxy.runtime.scheduler.programs.get("a")
    assert program is not None
    assert program.prompt_tokens_total == USAGE["prompt_tokens"]


@pytest.mark.parametrize(
    "options",
    [
        {"include_usage": True},
        {"include_usage": True, "continuous_usage_stats": True},
        {"include_usage": 1},  # pydantic takes 1 and "true" for true
        {"include_usage": "true"},
        False,  # the engine must refuse this
        "usage",
        [],
    ],
)
async def test_usage_that_was_asked_for_is_not_touched(
    replica: FakeReplica, proxy: RunningProxy, options: object
) -> None:
    """Neither the request nor the stream is changed where the client says something about usage."""
    replica.behaviour = streams(*STREAM[:-1], USAGE_EVENT, STREAM[-1])
    body = json.dumps({"stream": True, "stream_options": options, "messages": []}).encode()
    await send_both_ways(replica, proxy, "POST", CHAT, [("X-Program-ID", "a")], body)


async def test_a_request_that_does_not_stream_is_not_asked_for_usage(replica: FakeReplica, proxy: RunningProxy) -> None:
    for body in (b'{"messages":[]}', b'{"messages":[],"stream":false}', b'{"messages":[],"stream":null}'):
        await send_both_ways(replica, proxy, "POST", CHAT, [("X-Program-ID", "a")], body)


async def test_a_gzip_stream_is_not_touched(replica: FakeReplica, proxy: RunningProxy) -> None:
    """The usage that the client asked for is read out of it, too."""
    plain = b"".join([*STREAM[:-1], USAGE_EVENT, DONE])
    body = gzip.compress(plain)
    replica.behaviour = streams(*pieces_at(body, 10, 50), headers=[("content-encoding", "gzip")])
    sent = json.dumps({"stream": True, "stream_options": {"include_usage": True}}).encode()
    await send_both_ways(replica, proxy, "POST", CHAT, [("X-Program-ID", "a")], sent)
    program = proxy.runtime.scheduler.programs.get("a")
    assert program is not None
    assert program.prompt_tokens_total == USAGE["prompt_tokens"]


@pytest.mark.parametrize("asks_for_usage", [True, False])
async def test_an_event_of_2_mb_passes(replica: FakeReplica, proxy: RunningProxy, asks_for_usage: bool) -> None:
    """Logprobs can be large."""
    large = event({"choices": [{"index": 0, "logprobs": "x" * 2_000_000}]})
    full, plain = large + USAGE_EVENT + DONE, large + DONE
    replica.behaviour = streams(*pieces_at(full, 100, 1_000_000))
    options = {"stream_options": {"include_usage": True}} if asks_for_usage else {}
    answer = await post(proxy.url, CHAT, turn("a", stream=True, **options))
    assert answer.body == (full if asks_for_usage else plain)


# --- the embedded engine


@pytest.mark.parametrize("path", [CHAT, "/v1/completions"])
@pytest.mark.parametrize("options", [None, {"include_usage": True}, {"include_usage": False}])
async def test_the_embedded_engine_answers_the_same_through_the_proxy(
    engine_url: str, path: str, options: dict[str, Any] | None
) -> None:
    """Streams and whole answers are equal, except ids and times, which an engine generates each time."""
    async with running_proxy(engine_url) as proxy:
        prompt = {"messages": turn()["messages"]} if path == CHAT else {"prompt": "hello there"}
        for stream in (False, True):
            body = {**prompt, "max_tokens": 8, "stream": stream}
            if stream and options is not None:
                body["stream_options"] = options
            direct = await post(engine_url, path, body)
            relayed = await post(proxy.url, path, {**body, "program_id": "a"})
            assert relayed.status == direct.status == 200
            assert made_the_same(relayed.body, stream=stream) == made_the_same(direct.body, stream=stream)
        assert (await metrics_of(proxy.url))["thunderagent_turns_total"]["finished",] == 2


def made_the_same(body: bytes, *, stream: bool) -> list[Any]:
    events = events_of(body) if stream else [json.loads(body)]
    for each in events:
        if isinstance(each, dict):
            each.update(id="", created=0)
            if each.get("usage"):
                each["usage"].pop("prompt_tokens_details")  # the second time the prompt is cached
    return events


# --- what the proxy adds in headers


async def test_answers_say_whose_turn_it_was_and_where_it_ran(replica: FakeReplica, proxy: RunningProxy) -> None:
    for stream in (False, True):
        replica.behaviour = streams(*STREAM) if stream else answers()
        answer = await post(proxy.url, CHAT, turn("some/id", stream=stream))
        assert answer.header("X-Program-ID") == "some/id"
        assert answer.header("X-Program-ID-Source") == "body"
        assert answer.header("X-Replica-ID") == replica.replica_id
        assert answer.header("X-Hold-Ms") == "0"


async def test_a_program_id_that_is_no_ascii_is_escaped_in_the_header(
    replica: FakeReplica, proxy: RunningProxy
) -> None:
    answer = await post(proxy.url, CHAT, turn("é😀"))
    assert answer.header("X-Program-ID") == r"\xe9\U0001f600"
