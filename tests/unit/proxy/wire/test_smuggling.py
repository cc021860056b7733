"""No stream of bytes has two readings: what our protocols accept, h11 and aiohttp read the same way, or refuse.

Streams are seeded and nearly HTTP: 1,000 of requests and 1,000 of answers each time. SMUGGLING_CASES sets another
number, and scripts/nightly has 20,000 of each. Each is also read with the memory of all before. Histories are there for
that memory: 5,000 of requests and of answers, SMUGGLING_HISTORIES of each, and 100,000 in scripts/nightly.
"""

from __future__ import annotations

import asyncio
import logging
import os
import re
from dataclasses import dataclass, field
from random import Random
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import h11
import pytest
from aiohttp import http_parser, web
from aiohttp.base_protocol import BaseProtocol
from aiohttp.http_exceptions import HttpProcessingError
from multidict import CIMultiDict

from tests.unit.proxy.wire.streams import LENGTHS, answer, history, pieces, requests
from thunderagent.errors import RequestError
from thunderagent.proxy.gate.browsers import comes_from_a_browser
from thunderagent.proxy.reading.header_words import heard_in
from thunderagent.proxy.routing import front_of
from thunderagent.proxy.turns.record import patience_of
from thunderagent.proxy.wire.aiohttp_server import Server, all_lent
from thunderagent.proxy.wire.failures import NotHttpError
from thunderagent.proxy.wire.headers import forwarded_request_headers, forwarded_response_headers
from thunderagent.proxy.wire.http11 import client, server
from thunderagent.proxy.wire.http11.heads import (
    KNOWN_BYTES,
    KNOWN_COUNT,
    MAX_HEAD_BYTES,
    MAX_HEADERS_COUNT,
    MAX_KNOWN_BYTES,
    TO_THE_END,
    AnswerHead,
    KnownHeads,
    RequestHead,
    known_answers,
    known_requests,
    read_answer,
    read_request,
)
from thunderagent.proxy.wire.http11.limits import Limits, Pause, Sweep

if TYPE_CHECKING:
    from collections.abc import Callable

    from thunderagent.proxy.wire.front import Front
    from thunderagent.proxy.wire.http11.server import Asked

CASES_COUNT = int(os.environ.get("SMUGGLING_CASES", "1000"))
HISTORIES_COUNT = int(os.environ.get("SMUGGLING_HISTORIES", "5000"))
SEED = 20261123
BATCHES_COUNT = 10

BOUNDS = {"max_line_size": MAX_HEAD_BYTES, "max_field_size": MAX_HEAD_BYTES, "max_headers": MAX_HEADERS_COUNT}
DECODES_NOTHING = {**BOUNDS, "auto_decompress": False}

SILENT = logging.getLogger("silent")
SILENT.disabled = True

ENDED = ("refused", "closed", "upgraded")

Message = tuple[bytes, bytes, tuple[tuple[bytes, bytes], ...], bytes]
"""Method and target, or status; headers; body."""


@dataclass
class Reading:
    """A parser's reading of a stream."""

    messages: list[Message] = field(default_factory=list)
    end: str = "idle"
    """After these: `idle`, `incomplete`, `refused`, `closed` to what may follow, or `upgraded`, which we lend."""


class Pipe(asyncio.Transport):
    """A transport to nowhere."""

    def __init__(self) -> None:
        super().__init__()
        self.written = b""
        self.is_closed = False

    def write(self, data: Any) -> None:
        self.written += bytes(data)

    def writelines(self, list_of_data: Any) -> None:
        self.write(b"".join(list_of_data))

    def close(self) -> None:
        self.is_closed = True

    abort = close

    def is_closing(self) -> bool:
        return self.is_closed

    def can_write_eof(self) -> bool:
        return True

    def write_eof(self) -> None:
        self.is_closed = True

    def get_write_buffer_size(self) -> int:
        return 0

    def get_extra_info(self, name: str, default: Any = None) -> Any:
        return default

    def pause_reading(self) -> None: ...

    def resume_reading(self) -> None: ...


def headers_of(pairs: Any) -> tuple[tuple[bytes, bytes], ...]:
    """Return headers in a common spelling: h11 writes the transfer coding in lower case."""
    found = [(bytes(name).lower(), bytes(value).strip(b" \t")) for name, value in pairs]
    return tuple((name, value.lower() if name == b"transfer-encoding" else value) for name, value in found)


def raw(headers: Any) -> tuple[tuple[bytes, bytes], ...]:
    return headers_of(
        (k.encode("utf-8", "surrogateescape"), v.encode("utf-8", "surrogateescape")) for k, v in headers.items()
    )


# --- requests


class Ours:
    """Reads requests with our server, lending none."""

    def __init__(self) -> None:
        self.reading = Reading()
        self.has_upgraded = False

    def handler(self, head: RequestHead) -> server.Handler:
        return self.handle

    def borrower(self) -> Any:
        raise AssertionError("nothing is lent")

    async def handle(self, asked: Asked) -> None:
        if asked.head.upgrades:  # it is lent, and no request follows
            self.has_upgraded = True
            asked.cut()
            return
        body = await asked.read()
        head = asked.head
        self.reading.messages.append((head.method.encode(), head.target, raw(head.headers), body))
        asked.answer(200, "OK", CIMultiDict(), b"")


async def read_by_us(parts: list[bytes], heads: KnownHeads[RequestHead]) -> Reading:
    ours, pipe = Ours(), Pipe()
    connection = server.Connection(server.Settings(ours, Sweep(asyncio.get_running_loop()), heads))
    connection.connection_made(pipe)
    for part in parts:
        if not pipe.is_closed:
            connection.data_received(part)
        await asyncio.sleep(0)
    for _ in range(12):
        await asyncio.sleep(0)
    if b"HTTP/1.1 400 " in pipe.written:
        ours.reading.end = "refused"
        assert pipe.is_closed
        assert pipe.written.rpartition(b"HTTP/1.1 ")[2].startswith(b"400 "), "nothing is answered after a refusal"
    elif pipe.is_closed:
        ours.reading.end = "upgraded" if ours.has_upgraded else "closed"
    elif connection._asked is not None or connection._buffer:
        ours.reading.end = "incomplete"
    connection.connection_lost(None)
    await asyncio.sleep(0)
    return ours.reading


def requests_by_h11(stream: bytes) -> Reading:
    reading = Reading()
    connection = h11.Connection(h11.SERVER, max_incomplete_event_size=2 * MAX_HEAD_BYTES)
    connection.receive_data(stream)
    asked: h11.Request | None = None
    body = b""
    while True:
        try:
            event = connection.next_event()
        except h11.RemoteProtocolError:
            reading.end = "refused"
            return reading
        if isinstance(event, h11.Request):
            asked, body = event, b""
        elif isinstance(event, h11.Data):
            body += bytes(event.data)
        elif isinstance(event, h11.EndOfMessage):
            assert asked is not None
            reading.messages.append((asked.method, asked.target, headers_of(asked.headers.raw_items()), body))
            connection.send(h11.Response(status_code=404, headers=[("Content-Length", "0")]))
            connection.send(h11.EndOfMessage())
            if connection.our_state is h11.MUST_CLOSE:
                reading.end = "closed"
                return reading
            connection.start_next_cycle()
            asked = None
        else:
            reading.end = "incomplete" if asked is not None or connection.trailing_data[0].strip() else "idle"
            return reading


def requests_by_aiohttp(stream: bytes, loop: asyncio.AbstractEventLoop) -> Reading:
    """Read byte by byte, because an error drops all that came with it."""
    reading = Reading()
    parser = http_parser.HttpRequestParser(BaseProtocol(loop), loop, 2**16, **BOUNDS)
    found: list[tuple[Any, Any]] = []
    fed = 0
    for at in range(len(stream)):
        fed = at + 1
        try:
            messages, upgraded, _ = parser.feed_data(stream[at : at + 1])
        except HttpProcessingError:
            reading.end = "refused"
            break
        found += messages
        if upgraded:
            reading.end = "closed"
            break
    for message, payload in found:
        if not payload.is_eof() or payload.exception() is not None:
            reading.end = "refused" if payload.exception() is not None or reading.end == "refused" else "incomplete"
            break
        body = payload.read_nowait() if payload.total_bytes else b""
        reading.messages.append(
            (
                message.method.encode(),
                message.path.encode("utf-8", "surrogateescape"),
                headers_of(message.raw_headers),
                body,
            )
        )
        if message.should_close:
            reading.end = "closed"
            break
    else:
        if reading.end == "idle" and not stream[:fed].endswith(b"\r\n"):
            reading.end = "incomplete"
    return reading


def conflicts(ours: Reading, other: Reading) -> str:
    """Return the difference of two readings of one stream, unless one of them refuses; empty if there is none.

    aiohttp (3.14) puts the trailers of one request before the headers of the next; we lend it one request at a time.
    """
    for mine, theirs in zip(ours.messages, other.messages, strict=False):
        if mine != (*theirs[:2], theirs[2][-len(mine[2]) :], theirs[3]):
            return f"{mine} is {theirs}"
    if len(other.messages) < len(ours.messages) and other.end not in ENDED:
        return f"the other waits, after {len(other.messages)}"
    if len(other.messages) > len(ours.messages) and ours.end not in ENDED:
        return f"we wait, after {len(ours.messages)}"
    return ""


@pytest.mark.parametrize("batch", range(BATCHES_COUNT))
async def test_requests_are_read_in_one_way(batch: int) -> None:
    loop = asyncio.get_running_loop()
    ends: dict[str, int] = {}
    read_count = 0
    heads = known_requests()
    for number in range(batch, CASES_COUNT, BATCHES_COUNT):
        rng = Random(f"{SEED}/requests/{number}")
        stream = requests(rng)
        ours = await read_by_us([stream], heads)
        in_pieces = await read_by_us(pieces(rng, stream), heads)
        assert await read_by_us([stream], heads) == ours, (number, stream)  # by now its heads are known
        assert in_pieces.messages[: len(ours.messages)] == ours.messages[: len(in_pieces.messages)], (number, stream)
        others = {"h11": requests_by_h11(stream), "aiohttp": requests_by_aiohttp(stream, loop)}
        for name, other in others.items():
            for reading in (ours, in_pieces):
                assert not (why := conflicts(reading, other)), (number, name, why, stream, reading, other)
        ends[ours.end] = ends.get(ours.end, 0) + 1
        read_count += len(ours.messages)
    print(ends, read_count)
    assert {"refused", "closed"} <= set(ends)
    assert read_count > CASES_COUNT / BATCHES_COUNT / 4, "the streams are not only rubbish"


async def lent_by_us(stream: bytes) -> Reading:
    """Read requests with aiohttp's server, to which our connection lends each."""
    reading, pipe = Reading(), Pipe()

    async def handle(request: web.BaseRequest) -> web.Response:
        body = await request.read()
        reading.messages.append(
            (request.method.encode(), request.raw_path.encode("utf-8", "surrogateescape"), (), body)
        )
        return web.Response()

    makes = Server(web.Server(handle), all_lent, 60.0, logger=SILENT, **DECODES_NOTHING)
    connection = makes()
    connection.connection_made(pipe)
    connection.data_received(stream)
    for _ in range(60):
        await asyncio.sleep(0)
    reading.end = "closed" if pipe.is_closed else "idle"
    connection.connection_lost(None)
    await asyncio.sleep(0)
    return reading


@pytest.mark.parametrize("batch", range(BATCHES_COUNT))
async def test_a_borrower_sees_no_request_that_we_do_not(batch: int) -> None:
    """If aiohttp would read the bytes of one differently, it gets no other."""
    refused_count = read_count = 0
    heads = known_requests()
    for number in range(batch, CASES_COUNT, BATCHES_COUNT):
        stream = requests(Random(f"{SEED}/requests/{number}"))
        ours, lent = await read_by_us([stream], heads), await lent_by_us(stream)
        plain = [(method, target, (), body) for method, target, _, body in ours.messages]
        if ours.end in ("refused", "upgraded"):  # what we would refuse, or not read, concerns only the borrower
            lent.messages = lent.messages[: len(plain)]
        assert lent.messages == plain[: len(lent.messages)], (number, stream, plain, lent)
        refused_count += len(lent.messages) < len(plain)
        read_count += len(lent.messages)
    print(refused_count, read_count)
    assert read_count > CASES_COUNT / BATCHES_COUNT / 4, "the streams are not only rubbish"


# --- answers


async def answer_by_us(parts: list[bytes], method: str, heads: KnownHeads[AnswerHead]) -> Reading:
    loop, pipe, reading = asyncio.get_running_loop(), Pipe(), Reading()
    ended: list[bool] = []
    connection = client.Connection(
        loop, Sweep(loop), Pause(loop), lambda _, is_open: ended.append(is_open), lambda _: None, heads
    )
    connection.connection_made(pipe)
    waiter = connection.request(method, b"", None, Limits(60.0, 60.0, 60.0), loop.time())
    for part in parts:
        if not pipe.is_closed:
            connection.data_received(part)
        await asyncio.sleep(0)
    is_kept = ended == [True] and not pipe.is_closed
    if not pipe.is_closed:
        connection.eof_received()
    connection.connection_lost(None)
    try:
        found = await waiter
        if found is None:
            connection.raise_failure()
        body = await found.read()
        reading.messages.append((b"", str(found.status).encode(), raw(found.headers), body))
        reading.end = "idle" if is_kept else "closed"
    except client.ClosedError:
        reading.end = "refused"
    return reading


def answer_by_h11(stream: bytes, method: str) -> Reading:
    reading = Reading()
    connection = h11.Connection(h11.CLIENT, max_incomplete_event_size=2 * MAX_HEAD_BYTES)
    connection.send(h11.Request(method=method, target="/", headers=[("Host", "h"), ("Content-Length", "0")]))
    connection.send(h11.EndOfMessage())
    connection.receive_data(stream)
    found: h11.Response | None = None
    body = b""
    has_ended = False
    while True:
        try:
            event = connection.next_event()
        except h11.RemoteProtocolError:
            reading.end = "refused"
            return reading
        if isinstance(event, h11.Response):
            found = event
        elif isinstance(event, h11.Data):
            body += bytes(event.data)
        elif isinstance(event, h11.EndOfMessage):
            assert found is not None
            headers = headers_of(found.headers.raw_items())
            reading.messages.append((b"", str(found.status_code).encode(), headers, body))
            is_free = connection.their_state is h11.DONE and connection.our_state is h11.DONE
            reading.end = "idle" if is_free and not connection.trailing_data[0] else "closed"
            return reading
        elif event is h11.NEED_DATA and not has_ended:
            connection.receive_data(b"")
            has_ended = True
        elif not isinstance(event, h11.InformationalResponse):
            reading.end = "refused"
            return reading


def answer_by_aiohttp(stream: bytes, method: str, loop: asyncio.AbstractEventLoop) -> Reading:
    reading = Reading(end="refused")
    parser = http_parser.HttpResponseParser(
        BaseProtocol(loop),
        loop,
        2**16,
        response_with_body=method != "HEAD",
        read_until_eof=True,
        auto_decompress=False,
        **BOUNDS,
    )
    found: list[tuple[Any, Any]] = []
    rest = len(stream)
    for at in range(len(stream)):
        try:
            messages, upgraded, _ = parser.feed_data(stream[at : at + 1])
        except HttpProcessingError:
            break
        found += messages
        final = [each for each in found if each[0].code >= 200]
        if upgraded or (final and final[0][1].is_eof()):
            rest = at + 1
            break
    else:
        try:
            parser.feed_eof()
        except Exception:
            return reading
    final = [each for each in found if each[0].code >= 200]
    if final and final[0][1].is_eof() and final[0][1].exception() is None:
        message, payload = final[0]
        body = payload.read_nowait() if payload.total_bytes else b""
        reading.messages.append((b"", str(message.code).encode(), headers_of(message.raw_headers), body))
        reading.end = "closed" if rest < len(stream) else "idle"
    return reading


@pytest.mark.parametrize("batch", range(BATCHES_COUNT))
async def test_answers_are_read_in_one_way(batch: int) -> None:
    loop = asyncio.get_running_loop()
    ends: dict[str, int] = {}
    heads = known_answers()
    for number in range(batch, CASES_COUNT, BATCHES_COUNT):
        rng = Random(f"{SEED}/answers/{number}")
        stream, method = answer(rng), rng.choice(("POST", "POST", "POST", "HEAD"))
        ours = await answer_by_us([stream], method, heads)
        in_pieces = await answer_by_us(pieces(rng, stream), method, heads)
        assert in_pieces.messages == ours.messages, (number, stream, method)
        assert await answer_by_us([stream], method, heads) == ours, (number, stream, method)
        others = {"h11": answer_by_h11(stream, method), "aiohttp": answer_by_aiohttp(stream, method, loop)}
        for name, other in others.items():
            if ours.messages and other.messages:
                assert ours.messages == other.messages, (number, name, stream, method)
                assert (ours.end, other.end) != ("idle", "closed"), (number, name, stream, method)
            assert not ours.messages or other.messages or other.end == "refused", (number, name, stream, method)
        ends[ours.end] = ends.get(ours.end, 0) + 1
    print(ends)
    assert {"refused", "closed", "idle"} <= set(ends)


# --- heads that came before


def reading_of(read: Callable[[bytes], RequestHead | AnswerHead], head: bytes) -> Any:
    try:
        found = read(head)
    except NotHttpError:
        return None
    return found._replace(headers=list(found.headers.items()), notes={})


@pytest.mark.parametrize("kind", ["requests", "answers"])
def test_heads_that_came_before_are_read_as_those_that_did_not(kind: str) -> None:
    is_request = kind == "requests"
    known: Any = known_requests() if is_request else known_answers()
    anew: Any = read_request if is_request else lambda head: read_answer(head, "POST")
    lengths = (*LENGTHS, b"0", b"7", b"120", b"9" * 18, b"9" * 19)
    same_count = changed_count = 0
    for number in range(CASES_COUNT):
        rng = Random(f"{SEED}/{kind}/{number}")
        head = (requests(rng) if is_request else answer(rng)).partition(b"\r\n\r\n")[0] + b"\r\n\r\n"
        wanted = reading_of(anew, head)
        for _ in range(3):
            assert reading_of(known.read, head) == wanted, head
        same_count += wanted is not None
        before, name, after = head.partition(b"-Length: ")
        for length in lengths if name else ():
            changed = before + name + length + after[after.find(b"\r") :]
            wanted = reading_of(anew, changed)
            assert reading_of(known.read, changed) == wanted, changed
            changed_count += wanted is not None
    assert same_count > CASES_COUNT / 10
    assert changed_count > CASES_COUNT / 10, "many have a length that can be another"


# --- histories: what is remembered of one head, and taken for the next


def made_of(head: RequestHead | AnswerHead, notes: dict[str, Any] | None) -> Any:
    """Return all that other parts derive from a head and note with it."""
    if isinstance(head, AnswerHead):
        kept = [forwarded_response_headers(head.headers, notes, keep_length=keeps) for keeps in (True, False)]
        return [list(each.items()) for each in kept], head.content_type
    headers = head.headers
    try:
        patience: Any = patience_of(headers, None, notes)
    except RequestError as error:
        patience = str(error)
    browser = comes_from_a_browser(headers, notes)
    return heard_in(headers, (), notes), browser, patience, list(forwarded_request_headers(headers, notes).items())


async def nothing(*_: Any) -> None: ...


def new_front() -> Front:
    """Return what says which requests are turns, and remembers their targets."""
    parts: Any = SimpleNamespace(answer=nothing, let_in=nothing, origins=None, known={})
    return front_of(parts, parts, parts, None, parts, None, simulated=False, access_log=False)


def way_of(front: Front, head: RequestHead) -> Any:
    handler: Any = front.handler_of(head)
    return None if handler is None else handler.args


class Process:
    """Reads heads one after the other, with all that a process remembers of those before."""

    def __init__(self, kind: str, reader: Any = None) -> None:
        self.is_request = kind == "requests"
        self.reader = reader or (known_requests() if self.is_request else known_answers())
        self.front = new_front()

    def read(self, head: bytes) -> Any:
        try:
            found = self.reader.read(head)
        except NotHttpError:
            return None
        plain = found._replace(headers=list(found.headers.items()), notes={})
        way = way_of(self.front, found) if self.is_request else None
        return plain, made_of(found, found.notes), way and way[1:]


def read_afresh(kind: str, head: bytes) -> Any:
    """Read a head as a process that remembers nothing."""
    try:
        found = read_request(head) if kind == "requests" else read_answer(head, "POST")
    except NotHttpError:
        return None
    way = way_of(new_front(), found) if isinstance(found, RequestHead) else None
    return found._replace(headers=list(found.headers.items()), notes={}), made_of(found, None), way and way[1:]


def first_difference(process: Process, kind: str, seed: object, count: int) -> tuple[int, int]:
    """Return how many histories were read as without a memory, at most `count`, and how many heads were accepted."""
    accepted_count = 0
    for number in range(count):
        for head in history(Random(f"{seed}/{kind}/history/{number}"), of_requests=kind == "requests"):
            wanted = read_afresh(kind, head)
            accepted_count += wanted is not None
            if process.read(head) != wanted:
                print(number, head, wanted)
                return number, accepted_count
    return count, accepted_count


@pytest.mark.parametrize("kind", ["requests", "answers"])
def test_a_process_reads_each_head_of_a_history_as_if_it_were_the_first(kind: str) -> None:
    process = Process(kind)
    same_count, accepted_count = first_difference(process, kind, SEED, HISTORIES_COUNT)
    assert same_count == HISTORIES_COUNT
    assert accepted_count > HISTORIES_COUNT, "the heads are not only rubbish"
    assert len(process.reader) > min(HISTORIES_COUNT / 10, 1000), "and many are remembered"


class FoundByTooLittle:
    """The memory of heads of 0.1.0, which cut out the digits behind whatever ended with `-Length: `."""

    def __init__(self, read: Callable[[bytes], Any]) -> None:
        self._read = read
        self._known: dict[bytes, tuple[bytes, Any]] = {}
        self._came_once: set[bytes] = set()

    def read(self, raw: bytes) -> Any:
        at = raw.find(b"-Length: ") + 9
        if at < 9:
            at = raw.find(b"-length: ") + 9
        key, digits = raw, b""
        if at >= 9:
            end = raw.find(b"\r", at)
            key, digits = raw[:at] + raw[end:], raw[at:end]
        if (found := self._known.get(key)) is None:
            head = self._read(raw)
            if not digits or raw[at - 18 : at].lower() == b"\r\ncontent-length: ":
                if key in self._came_once:
                    self._known[key] = digits, head
                self._came_once.add(key)
            return head
        if digits == found[0]:
            return found[1]
        if not digits.isdigit() or len(digits) > 18:
            return self._read(raw)
        headers = CIMultiDict(found[1].headers)
        headers[raw[at - 16 : at - 2].decode()] = digits.decode()
        has_body = isinstance(found[1], RequestHead) or found[1].length != 0
        return found[1]._replace(headers=headers, length=int(digits) if has_body else 0)


class ForgetsTheLength(FoundByTooLittle):
    """A memory that keys heads by their names, and by no value of a number."""

    def read(self, raw: bytes) -> Any:
        key = bytes(each for each in raw if not 48 <= each <= 57)
        if key not in self._known:
            self._known[key] = b"", self._read(raw)
        return self._known[key][1]


@pytest.mark.parametrize("planted", [FoundByTooLittle, ForgetsTheLength])
@pytest.mark.parametrize("kind", ["requests", "answers"])
@pytest.mark.parametrize("seed", range(5))
def test_histories_find_a_memory_that_takes_one_head_for_another(
    planted: type[FoundByTooLittle], kind: str, seed: int
) -> None:
    read: Any = read_request if kind == "requests" else lambda head: read_answer(head, "POST")
    found_after, _ = first_difference(Process(kind, planted(read)), kind, seed, 2000)
    assert found_after < 2000


def with_body(head: bytes) -> bytes:
    """Return a head with a body as long as its only Content-Length says: other requests, and a part of one."""
    lengths = re.findall(rb"\r\ncontent-length:[ \t]*(\d{1,2})[ \t]*(?=\r\n)", head, re.IGNORECASE)
    return head + (b"GET /in HTTP/1.1\r\nHost: h\r\n\r\n" * 4)[: int(lengths[0]) if len(lengths) == 1 else 0]


async def test_histories_of_requests_are_read_in_one_way() -> None:
    """All of one on one connection, by a process that remembers all before: h11 remembers nothing."""
    heads, read_count = known_requests(), 0
    for number in range(HISTORIES_COUNT // 5):
        stream = b"".join(map(with_body, history(Random(f"{SEED}/streams/{number}"), of_requests=True)))
        ours = await read_by_us([stream], heads)
        assert not (why := conflicts(ours, requests_by_h11(stream))), (number, why, stream)
        read_count += len(ours.messages)
    assert read_count > HISTORIES_COUNT // 10


async def test_histories_of_answers_are_read_in_one_way() -> None:
    heads, read_count = known_answers(), 0
    for number in range(HISTORIES_COUNT // 5):
        for head in history(Random(f"{SEED}/streams/{number}"), of_requests=False):
            stream = with_body(head)
            ours, other = await answer_by_us([stream], "POST", heads), answer_by_h11(stream, "POST")
            if ours.messages and other.messages:
                assert ours.messages == other.messages, (number, stream)
                assert (ours.end, other.end) != ("idle", "closed"), (number, stream)
            assert not ours.messages or other.messages or other.end == "refused", (number, stream)
            read_count += len(ours.messages)
    assert read_count > HISTORIES_COUNT // 10


def test_parsed_head_is_kept_from_its_second_time_on() -> None:
    known = known_requests()
    head = b"POST / HTTP/1.1\r\nHost: h\r\nContent-Length: %d\r\n\r\n"
    first, second, third = (known.read(head % length) for length in (5, 60, 700))
    assert first.notes is not second.notes
    second.notes["mine"] = 1
    assert third.notes == {"mine": 1}
    assert (third.length, third.headers["Content-Length"], second.headers["Content-Length"]) == (700, "700", "60")


def test_heads_that_came_longest_ago_are_forgotten() -> None:
    known = known_requests()
    head = b"POST / HTTP/1.1\r\nHost: h%d\r\n\r\n"
    for number in range(3 * KNOWN_COUNT):
        for _ in range(3):
            known.read(head % number)
    read = known.read(head % (3 * KNOWN_COUNT - 1))
    read.notes["mine"] = 1
    assert known.read(head % (3 * KNOWN_COUNT - 1)).notes == {"mine": 1}
    first = known.read(head % 0)
    first.notes["mine"] = 1
    assert known.read(head % 0).notes == {}, "it was read anew, and came once"
    assert len(known) <= 2 * KNOWN_COUNT


def test_fewer_large_heads_are_kept() -> None:
    known = known_requests()
    more = b"X: %b\r\n" % (b"x" * 3000)
    for number in range(2 * KNOWN_BYTES // len(more)):
        for _ in range(2):
            known.read(b"POST / HTTP/1.1\r\nHost: h%d\r\n%b\r\n" % (number, more))
    assert len(known) * len(more) <= 2 * (KNOWN_BYTES + MAX_KNOWN_BYTES)
    assert len(known) * len(more) >= KNOWN_BYTES


def test_length_of_a_known_answer_without_a_body_means_nothing() -> None:
    """A websocket's lasts as long as its connection, whatever length its head has."""
    known = known_answers()
    for status, more, length in ((101, "Connection: upgrade\r\nUpgrade: websocket\r\n", TO_THE_END), (204, "", 0)):
        for told in (5, 5, 5, 7, 7):
            head = f"HTTP/1.1 {status} OK\r\n{more}Content-Length: {told}\r\n\r\n"
            assert known.read(head.encode()).length == length


@pytest.mark.parametrize("spelt", ["X-A-Length", "x-a-length", "X-Content-Length", "A-content-length"])
def test_the_length_is_nowhere_but_in_the_header_of_that_name(spelt: str) -> None:
    """One that only ends like it says nothing, however often a head like it came before."""
    requests, answers = known_requests(), known_answers()
    for value in ("", "", "", "5", "5", "6", "x"):
        lines = f"Host: h\r\n{spelt}: {value}\r\nContent-Length: 100\r\n\r\n"
        assert requests.read(f"POST / HTTP/1.1\r\n{lines}".encode()).length == 100
        assert answers.read(f"HTTP/1.1 200 OK\r\n{lines}".encode()).length == 100


def test_length_in_a_known_head_keeps_its_spelling() -> None:
    known = known_requests()
    for length in (5, 6, 70):
        read = known.read(b"POST / HTTP/1.1\r\ncontent-length: %d\r\nHost: h\r\n\r\n" % length)
        assert list(read.headers.items()) == [("content-length", str(length)), ("Host", "h")]
