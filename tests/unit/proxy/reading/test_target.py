"""The target of a request: one reading, for the access check and for the sender."""

from __future__ import annotations

import asyncio
import contextlib
import re
from posixpath import normpath
from random import Random
from typing import Any, cast
from urllib.parse import unquote

import aiohttp
import pytest
from aiohttp.http import HttpRequestParser, RawRequestMessage
from multidict import CIMultiDict

from thunderagent.errors import RequestError
from thunderagent.proxy.fleet.commands import COMMANDS, REPLICA_COMMANDS
from thunderagent.proxy.gate.access import Access, ForwardUnknown, Use, engine_access, use_of
from thunderagent.proxy.reading.dialects import TURN_DIALECTS
from thunderagent.proxy.reading.target import Target
from thunderagent.proxy.wire.aiohttp_request import TARGET, with_target
from thunderagent.proxy.wire.http11.client import Pool
from thunderagent.proxy.wire.http11.limits import Limits, Pause, Sweep


@pytest.mark.parametrize(
    ("raw_path", "program_id", "rest"),
    [
        ("/p/a/v1/chat/completions", "a", "/v1/chat/completions"),
        ("/sessions/a/v1/chat/completions", "a", "/v1/chat/completions"),
        ("/p/a/v1", "a", "/v1"),
        ("/p/a/b:c/d/v1/completions", "a/b:c/d", "/v1/completions"),
        ("/p/a%2Fb%3Ac%20d/v1/completions", "a/b:c d", "/v1/completions"),
        ("/p/%E6%97%A5/v1/models", "日", "/v1/models"),
        ("/p/a/v1/v1/chat/completions", "a", "/v1/chat/completions"),
        ("/p/a%2Fv1/v1/chat/completions", "a/v1", "/v1/chat/completions"),
        ("/p/a/v10/v1/chat/completions", "a/v10", "/v1/chat/completions"),
        ("/p/a+b/v1/x?beta=true&p=/v1/y", "a+b", "/v1/x?beta=true&p=/v1/y"),
        ("/p/a/v1?x", "a", "/v1?x"),
        ("/p//v1/v1/models", "", "/v1/models"),
        ("//p/a//v1//chat/completions", "a", "/v1/chat/completions"),
        ("/p/a/v1/v1/messages?beta=true", "a", "/v1/messages?beta=true"),
        ("/p/a/generate", "a", "/generate"),
        ("/p/a/b:c%2Fd/generate?x", "a/b:c/d", "/generate?x"),
        ("/sessions/a/generate", "a", "/generate"),
        ("/p/a/tokenize", "a", "/tokenize"),
        ("/p/a/generate/v1/responses/resp_1/cancel", "a/generate", "/v1/responses/resp_1/cancel"),
        ("/p/a/inference/v1/generate", "a", "/inference/v1/generate"),
        ("/p/a/skyrl/v1/generate", "a", "/skyrl/v1/generate"),
        ("/p/a/b/inference/v1/generate", "a/b", "/inference/v1/generate"),
        ("/p/inference/v1/generate", "inference", "/v1/generate"),
        ("/p/a/inference/v1/models", "a/inference", "/v1/models"),
        ("/p/a/v1/b/v1/messages", "a/v1/b", "/v1/messages"),
        ("/p/a/model_info?x", "a", "/model_info?x"),
        ("/p/a%2Fb/server_info", "a/b", "/server_info"),
        ("/p/a/v10/x", "a", "/v10/x"),
        ("/p/a/cohere/v2/chat", "a", "/cohere/v2/chat"),
        ("/p/a/", "a", "/"),
    ],
)
def test_a_path_is_split_into_the_id_and_what_the_engine_sees(raw_path: str, program_id: str, rest: str) -> None:
    """The id is greedy up to the last /v1, decoded once; a doubled /v1 is mended, the query untouched."""
    target = Target.parse(raw_path)
    assert (target.program_id, target.sent) == (program_id, rest)


@pytest.mark.parametrize(
    "raw_path",
    [
        "/v1/chat/completions",
        "/p/a",
        "/sessions/a/model_info",
        "/q/a/v1/models",
        "/health",
        "/x?q=/p/a/v1/b",
        "/",
        "/generate",
        "/v1",
    ],
)
def test_a_path_that_names_no_program_stays_as_it_is(raw_path: str) -> None:
    """The query may look like such a path."""
    target = Target.parse(raw_path)
    assert (target.program_id, target.prefix, target.sent) == (None, "", raw_path)


def test_a_doubled_v1_is_mended_without_a_program_too() -> None:
    """A base URL has /v1, and a client adds its own."""
    target = Target.parse("/v1/v1/messages?x=/v1/v1/y")
    assert (target.program_id, target.sent) == (None, "/v1/messages?x=/v1/v1/y")


# --- One reading


@pytest.mark.parametrize(
    "raw",
    [
        "/p/a/pause#x",
        "/p/a/sleep#",
        "/slow_down#x",
        "/v1/models?a#b",
        "/a b",
        "/a\tb",
        "/a\x00",
        "/a\x7f",
        "/v1/%0apause",
        "/v1/../pause",
        "/v1/%2e%2E/pause",
        "/./pause",
        "/v1/..;/pause",
        "/p/x/v1/../../pause",
        "*",
        "",
        "pause",
        "http://other.example/v1/models",
        "http://proxy.example@other.example/v1/models",
        "ftp://proxy.example/v1/models",
        "proxy.example:80",
    ],
)
def test_a_target_that_servers_read_in_different_ways_is_refused(raw: str) -> None:
    """The refusal names the error; nothing is guessed."""
    with pytest.raises(RequestError, match=r"the (target|path) of a request") as refused:
        Target.parse(raw, "proxy.example")
    assert refused.value.status == 400


@pytest.mark.parametrize(
    ("raw", "path", "sent"),
    [
        ("http://proxy.example/p/a/v1/models?x", "/p/a/v1/models", "/v1/models?x"),
        ("HTTP://PROXY.example", "/", "/"),
        ("https://proxy.example?x", "/", "/?x"),
        ("//v1//models//", "/v1//models//", "/v1/models/"),
        ("/%70ause", "/pause", "/pause"),
        ("/%2570ause", "/%2570ause", "/%2570ause"),
        ("/a%2fb%20c/%C3%A9?%0a", "/a%2fb%20c/%C3%A9", "/a%2fb%20c/%C3%A9?%0a"),
        ("/\u00e9?\udcff", "/%C3%A9", "/%C3%A9?%FF"),
    ],
)
def test_equal_targets_get_one_form(raw: str, path: str, sent: str) -> None:
    """A URL of ours, doubled slashes, needless escapes, and bytes that need one are changed; all else stays."""
    target = Target.parse(raw, "proxy.example")
    assert (target.path, target.sent) == (path, sent)


def test_an_id_may_hold_dots_and_slashes_where_they_are_escaped() -> None:
    """An id is no path, and stays with us; in an engine's target such escapes would hide the real path."""
    assert Target.parse("/p/a%2F..%2Fb/v1/models").program_id == "a/../b"
    assert not Target.parse("/p/a%2F..%2Fb/v1/models").climbs
    assert Target.parse("/v1/models/a%2F..%2Fb").climbs


def test_path_below_a_replica_is_a_target_of_its_own() -> None:
    """It has the prefix that was removed before it, which a redirect needs."""
    replica_id, target = Target.parse("/workers/10.0.0.1%3A80%2F1//v1/models?x").below()
    assert (replica_id, target.sent, target.prefix) == ("10.0.0.1:80/1", "/v1/models?x", "/workers/10.0.0.1%3A80%2F1")


# --- Guard and pool agree on the request

BASES = (
    *TURN_DIALECTS,
    *COMMANDS,
    *REPLICA_COMMANDS,
    *("/inference/v1/pause", "/debug/pause", "/v1/pause", "/slow_down", "/server_info", "/freeze_gc", "/invocations"),
    *("/v1/models", "/v1/models/a/b", "/v1/embeddings", "/tokenize", "/v1/responses/r/cancel", "/metrics", "/"),
)
CONTROL_WORDS = {path.strip("/").split("/")[-1] for path in (*COMMANDS, *REPLICA_COMMANDS)}
SPELLINGS_COUNT = 10_000
ODD = (
    *("/", "//", "/./", "/../", "/x/../", "%2e%2e/", "%2F", "%5c", "\\", ";x=1", "#", "%23", "?", "%3f"),
    *("%00", "%0a", "\x01", "\t", "\xe9", "%c3%a9", "%25", "%%32", "%2", "%", "..;/", "/.;/", "*"),
)


def spelling(random: Random) -> bytes:
    """A way to write a target: a meaningful path, with anything that has fooled a proxy somewhere."""
    path = random.choice(BASES)
    if random.random() < 0.3:
        path = random.choice(("/p/a", "/p/pause", "/p/a%2Fb", "/sessions/a", "/P/a", "/p/a/b", "/v1")) + path
    for _ in range(random.randrange(5)):
        at = random.randrange(len(path) + 1)
        letter = path[at : at + 1]
        escape = f"{ord(letter or 'a'):02x}"
        ways = (f"%{escape}", f"%{escape.upper()}", f"%25{escape}", letter.swapcase())
        new = random.choice((*ODD, *ways, *ways))
        is_in_place = new.lower() == letter.lower() or re.fullmatch("%(25)?[0-9a-fA-F]{2}", new)
        path = path[:at] + new + path[at + (bool(is_in_place) and random.random() < 0.8) :]
    if random.random() < 0.1:
        path = random.choice(("http://proxy.example", "http://other.example", "//other.example", "x:")) + path
    return path.encode("latin1" if random.random() < 0.5 else "utf-8")


def readings(line: str) -> set[tuple[str, ...]]:
    """Return how servers read a request line's target: strictly, and leniently."""
    path = re.split("[?#]", line, maxsplit=1)[0]
    found = set()
    for decoded in (path, unquote(path)):
        for plain in (decoded, decoded.replace("\\", "/")):
            for bare in (plain, re.sub(";[^/]*", "", plain)):
                for resolved in (bare, normpath("/" + bare.lstrip("/"))):
                    for cased in (resolved, resolved.lower()):
                        found.add(tuple(word for word in cased.split("/") if word))
    return found


def controls(words: tuple[str, ...]) -> bool:
    """Return whether an engine that reads these words changes what the scheduler must know."""
    while words and words[0] in ("v1", "skyrl", "inference"):
        words = words[1:]
    return bool(words) and (words[0] in CONTROL_WORDS or words[0].startswith("update_weights"))


async def test_guard_and_pool_agree_on_what_was_asked_in_ten_thousand_spellings() -> None:
    """The bytes on the wire are judged as the most lenient engine reads them, and equal what the judge saw."""
    lines: list[bytes] = []

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(asyncio.IncompleteReadError), contextlib.closing(writer):
            while head := await reader.readuntil(b"\r\n\r\n"):
                lines.append(head.partition(b"\r\n")[0])
                writer.write(b"HTTP/1.1 204 No Content\r\n\r\n")

    def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        tasks.append(asyncio.ensure_future(answer(reader, writer)))

    tasks: list[asyncio.Future[None]] = []
    loop, random, parsed_count = asyncio.get_running_loop(), Random(14), 0
    server = await asyncio.start_server(serve, "127.0.0.1", 0)
    url = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
    pause = Pause(loop)
    pool = Pool(Sweep(asyncio.get_running_loop()), pause)
    for _ in range(SPELLINGS_COUNT):
        target = parsed(spelling(random), loop)
        if target is None:
            continue
        parsed_count += 1
        use, needs = use_of(target, "POST"), engine_access(target, "POST", ForwardUnknown.ADMIN)
        target = target.plainly() if use is Use.TURN else target
        await (await pool.request("POST", url, target.sent, CIMultiDict(), None, Limits(5, 5))).read()
        method, sent, version = lines.pop().decode().split(" ")
        assert (method, sent, version) == ("POST", target.sent, "HTTP/1.1")
        for words in readings(sent):
            if controls(words):
                assert needs is Access.ADMIN, sent
            if "/" + "/".join(words) in TURN_DIALECTS and not target.climbs:
                assert use is Use.TURN, sent
        if use is Use.TURN:
            assert sent.partition("?")[0] in TURN_DIALECTS
    assert parsed_count > SPELLINGS_COUNT / 4
    await pool.close()
    server.close()
    await asyncio.gather(*tasks)


class Made(dict[Any, Any]):
    """A request as a factory makes it."""

    def __init__(self, message: RawRequestMessage, payload: object) -> None:
        super().__init__()
        self.message = message


def parsed(raw: bytes, loop: asyncio.AbstractEventLoop) -> Target | None:
    """Return the target of a request line as the server reads it; None if it refuses it."""
    parser = HttpRequestParser(asyncio.Protocol(), loop, 2**16)  # type: ignore[arg-type]
    try:
        messages, _, _ = parser.feed_data(b"POST " + raw + b" HTTP/1.1\r\nHost: proxy.example\r\n\r\n")
    except aiohttp.http_exceptions.HttpProcessingError:
        return None
    request: Any = with_target(cast("Any", Made))(*messages[0])
    target = request[TARGET]
    if isinstance(target, RequestError):
        return None
    assert isinstance(target, Target)
    assert request.message.url.raw_path == target.path
    return target
