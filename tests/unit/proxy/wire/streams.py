"""Byte streams that are nearly HTTP: known tricks of request smuggling, mixed at random from a seed.

Histories are heads in a row, each nearly the last: they find what a reader remembers of one and takes for the next.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from random import Random

METHODS = (b"GET", b"POST", b"PUT", b"HEAD", b"OPTIONS", b"DELETE", b"PATCH", b"get", b"FOO", b"CONNECT", b"PRI", b"")
TARGETS = (
    b"/",
    b"/v1/chat/completions",
    b"/a?b=c",
    b"*",
    b"http://h/x",
    b"/\xc3\xa9",
    b"/a b",
    b"/#x",
    b"//x",
    b"/\x00",
)
VERSIONS = (
    (b"HTTP/1.1",) * 12 + (b"HTTP/1.0",) * 3 + (b"HTTP/1.2", b"HTTP/2.0", b"HTTP/0.9", b"http/1.1", b"HTTP/1", b"")
)
ENDS = (b"\r\n",) * 60 + (b"\n", b"\r", b"\r\r\n", b"\r\n ", b" \r\n", b"\x00\r\n")
LENGTHS = (
    b"+5",
    b"-5",
    b"0x5",
    b"5,5",
    b"5, 5",
    b"",
    b"5 5",
    b"05",
    b"5\t",
    b"\x0b5",
    b"five",
    b"9" * 30,
    b"1_0",
    b"\xd9\xa5",
)
CODINGS = (
    *(
        b"chunked",
        b"Chunked",
        b"CHUNKED",
        b" chunked",
        b"chunked ",
        b"\tchunked",
        b"chunked, chunked",
        b"gzip, chunked",
    ),
    *(
        b"chunked, gzip",
        b"identity",
        b"xchunked",
        b"chunkedx",
        b"\x0bchunked",
        b"chunked\x00",
        b"",
        b"chunked,",
        b",chunked",
    ),
    *(b"chunked;q=1", b'"chunked"', b"identity, chunked"),
)
NAMES = {
    b"Content-Length": (
        b"Content-Length",
        b"content-length",
        b"Content-Length ",
        b" Content-Length",
        b"Content_Length",
    ),
    b"Transfer-Encoding": (
        *(b"Transfer-Encoding", b"transfer-encoding", b"Transfer-Encoding ", b"\tTransfer-Encoding"),
        *(b"Transfer_Encoding", b"Transfer\x00-Encoding", b"X\r\nTransfer-Encoding", b"Foo: a\nTransfer-Encoding"),
    ),
}
FAIR = (
    *(b"Connection: close", b"Connection: keep-alive", b"Expect: 100-continue", b"X: \xff\xfe", b"X:y", b"X: "),
    *(b"Connection: Transfer-Encoding", b"Trailer: Content-Length", b"X:\t y \t", b"Accept: */*", b"Upgrade: a"),
)
ODD = (
    *(
        b"Connection: upgrade\r\nUpgrade: h2c",
        b"X: y\r\n folded",
        b"X: y\r\n\tfolded: z",
        b"X : y",
        b": y",
        b"X",
        b"X: a\x00b",
        b"X: a\rb",
    ),
    *(b"Host: other", b"\xc3\xa9: x", b"X\xff: y", b"X(: y"),
)
SIZES = (
    b"%x",
    b"%X",
    b"0%x",
    b"000000%x",
    b"%x;a=b",
    b'%x;a="b;c"',
    b"%x ; a",
    b"%x ",
    b" %x",
    b"%x\t",
    b"0x%x",
    b"+%x",
)
ODD_SIZES = (b"-%x", b"%x;\n", b"%x;a\rb", b'%x;a="\r\n"', b"f" * 16 + b"%x", b"%xg", b"", b"%x\x00", b"1_%x", b"%x,%x")
DATA = (b"", b"{}", b"hello", b"0\r\n\r\n", b"GET /in HTTP/1.1\r\nHost: h\r\n\r\n", b"\r\n", b"x" * 40)
TRAILERS = (b"",) * 16 + (
    b"X: y\r\n",
    b"Content-Length: 5\r\n",
    b"Transfer-Encoding: chunked\r\n",
    b"X: y\n",
    b"X\r\n",
    b"Host: z\r\n",
)
STATUS = (*(b"200",) * 8, b"201", b"204", b"304", b"400", b"404", b"500", b"100", b"102", b"103", b"101", b"99", b"600")
REASONS = (*(b" OK",) * 8, b" OK", b"", b" ", b" Not\tso", b" \xe9", b" a\x00b", b"  two")
NEARLY_LENGTHS = (
    *(b"X-A-Length", b"x-a-length", b"X-Content-Length", b"Content-Length-X", b"Content_Length", b"Content-Lengt"),
    *(b"A-Content-length", b"Length", b"X-Program-ID", b"X-Stainless-Timeout", b"Keep-Alive"),
)
"""Headers with a number, perhaps, that is not the length; some are ours."""

VALUES = (*(b"", b"5") * 6, b"0", b"3", b"12", b"40", b"05", b"5 ", b"+5", b"9" * 19, b"5\tx", b"a: 5", b"-Length: 5")
WAYS = (
    *(b"/v1/chat/completions", b"/v1/chat/completions?a", b"/V1//chat/completions", b"/p/a/v1/chat/completions"),
    *(b"http://h/v1/chat/completions", b"/v1/models", b"/v1/realtime", b"/v1/messages"),
)
PLAIN = (
    *(
        b"Connection: keep-alive",
        b"Connection: close",
        b"Connection: upgrade\r\nUpgrade: websocket",
        b"Upgrade: websocket",
    ),
    *(b"X-Program-ID: p", b"x-session-id: s", b"X-Program-Final: 1", b"Authorization: Bearer k", b"Origin: http://o"),
    *(b"Content-Type: application/json", b"User-Agent: Mozilla/5.0", b"X-Program-Patience: 3", b"Expect: 100-continue"),
    *(b"Connection: X-Program-ID", b"Transfer-Encoding: chunked", b"Location: /", b"X: y"),
)
NOISE = (b"\r", b"\n", b"\x00", b" ", b":", b"\r\n", b";", b"0", b"\t", b"\xff", b"chunked", b",")


def requests(rng: Random) -> bytes:
    """Return one to three requests, possibly malformed."""
    return _damaged(rng, b"".join(_request(rng) for _ in range(rng.choice((1, 1, 2, 2, 3)))))


def answer(rng: Random) -> bytes:
    """Return a possibly malformed answer to one request, perhaps after interim ones, perhaps with data behind it."""
    parts = [_interim(rng) for _ in range(rng.choice((0, 0, 0, 1, 2)))]
    line = _mostly(rng, b"HTTP/1.1", VERSIONS) + b" " + rng.choice(STATUS) + rng.choice(REASONS)
    parts.append(_message(rng, line, []))
    if rng.random() < 0.15:
        parts.append(rng.choice((b"\r\n", b"HTTP/1.1 200 OK\r\nContent-Length: 0\r\n\r\n", b"x", b"H")))
    stream = _damaged(rng, b"".join(parts))
    return stream[: rng.randrange(len(stream) + 1)] if rng.random() < 0.2 else stream


def pieces(rng: Random, stream: bytes) -> list[bytes]:
    """Return the stream, split at random."""
    cuts = sorted(rng.randrange(len(stream) + 1) for _ in range(rng.choice((0, 0, 1, 2, 5, 20))))
    return [piece for start, end in zip([0, *cuts], [*cuts, len(stream)], strict=True) if (piece := stream[start:end])]


def history(rng: Random, *, of_requests: bool) -> list[bytes]:
    """Return three to six heads of requests, or of answers: each is nearly the last, often in the same place again."""
    line, fixed = [b"POST", b" ", rng.choice(WAYS), b" HTTP/1.1"], [b"Host: h"]
    if not of_requests:
        line, fixed = [b"HTTP/1.1 ", b"", rng.choice(STATUS), b" OK"], []
        if rng.random() < 0.1:
            line[2], fixed = b"101", [b"Connection: upgrade", b"Upgrade: websocket"]
    headers = [
        *(each.partition(b": ")[::2] for each in fixed),
        *((_mostly(rng, b"Content-Length", NAMES[b"Content-Length"], 0.2), b"5") for _ in range(rng.random() < 0.8)),
        *((rng.choice(NEARLY_LENGTHS), rng.choice(VALUES)) for _ in range(rng.choice((0, 1, 1, 2)))),
        *(rng.choice(PLAIN).partition(b": ")[::2] for _ in range(rng.choice((0, 0, 1, 2)))),
    ]
    rng.shuffle(headers)
    numbers = [at for at, (name, _) in enumerate(headers) if name in (b"Content-Length", *NEARLY_LENGTHS)] or [0]
    place, heads = rng.choice(numbers), list[bytes]()
    for _ in range(rng.choice((3, 4, 5, 6))):
        if rng.random() < 0.1:
            place = rng.randrange(len(headers) or 1)
        _change(rng, headers, line, place, of_requests=of_requests)
        head = b"\r\n".join((b"".join(line), *(b": ".join(each) for each in headers), b"", b""))
        heads.append(head if rng.random() < 0.95 else _damaged(rng, head))
    return heads


def _change(
    rng: Random, headers: list[tuple[bytes, bytes]], line: list[bytes], place: int, *, of_requests: bool
) -> None:
    """Change one thing in a head, or nothing."""
    place = min(place, len(headers) - 1)
    kind = rng.choice(("nothing",) * 5 + ("value",) * 10 + ("name", "case", "order", "twice", "away", "new", "line"))
    if kind == "new" or not headers:
        headers.insert(rng.randrange(len(headers) + 1), rng.choice(PLAIN).partition(b": ")[::2])
        return
    name, value = headers[place]
    other = rng.randrange(len(headers))
    if kind == "value":
        headers[place] = name, rng.choice(VALUES)
    elif kind == "name":
        headers[place] = rng.choice((b"Content-Length", *NEARLY_LENGTHS)), value
    elif kind == "case":
        headers[place] = rng.choice((name.lower(), name.upper(), name.title())), value
    elif kind == "order":
        headers[place], headers[other] = headers[other], headers[place]
    elif kind == "twice":
        headers.insert(other, headers[place])
    elif kind == "away":
        del headers[place]
    elif kind == "line":
        line[2] = rng.choice(WAYS if of_requests else STATUS)
        if of_requests:
            line[0] = _mostly(rng, b"POST", METHODS, 0.3)


def _request(rng: Random) -> bytes:
    line = b" ".join(
        (_mostly(rng, b"POST", METHODS), _mostly(rng, b"/v1/x", TARGETS), _mostly(rng, b"HTTP/1.1", VERSIONS))
    )
    if rng.random() < 0.03:
        line = rng.choice((b"\r\n" + line, b"\n" + line, b" " + line, line.replace(b" ", b"  ", 1), line + b" "))
    hosts = [b"Host: h"] if rng.random() < 0.95 else rng.choice(([], [b"Host: h", b"Host: h"], [b"Host:"]))
    return _message(rng, line, hosts)


def _message(rng: Random, line: bytes, headers: list[bytes]) -> bytes:
    data = rng.choice(DATA)
    lines, body = list(headers), b""
    kind = rng.random()
    if kind < 0.4:
        length = b"%d" % (len(data) if rng.random() < 0.85 else max(0, len(data) + rng.choice((-1, 1, 5))))
        lines.append(_named(rng, b"Content-Length", _mostly(rng, length, LENGTHS, 0.06)))
        body = data
    elif kind < 0.85:
        lines.append(_named(rng, b"Transfer-Encoding", _mostly(rng, b"chunked", CODINGS, 0.1)))
        body = _chunks(rng)
    if rng.random() < 0.05:
        lines.append(_named(rng, b"Content-Length", _mostly(rng, b"%d" % len(body), LENGTHS, 0.3)))
    if rng.random() < 0.04:
        lines.append(_named(rng, b"Transfer-Encoding", _mostly(rng, b"chunked", CODINGS, 0.5)))
    lines += [rng.choice(ODD if rng.random() < 0.1 else FAIR) for _ in range(rng.choice((0, 0, 1, 2)))]
    if rng.random() < 0.01:
        lines += [b"X-%d: y" % number for number in range(rng.choice((120, 140)))]
    if rng.random() < 0.005:
        lines.append(b"X-Long: " + b"y" * rng.choice((60_000, 70_000)))
    rng.shuffle(lines)
    return b"".join(each + _mostly(rng, b"\r\n", ENDS, 0.006) for each in (line, *lines, b"")) + body


def _chunks(rng: Random) -> bytes:
    parts = []
    for data in [each for each in rng.choices(DATA, k=rng.choice((0, 1, 2, 3))) if each]:
        size = rng.choice(SIZES if rng.random() < 0.6 else ODD_SIZES) if rng.random() < 0.2 else b"%x"
        told = len(data) if rng.random() < 0.99 else len(data) + rng.choice((-1, 1))
        parts += [size.replace(b"%x", b"%x" % told).replace(b"%X", b"%X" % told), _mostly(rng, b"\r\n", ENDS, 0.015)]
        parts += [data, _mostly(rng, b"\r\n", (b"\n", b"", b"\r", b"\r\n\r\n"), 0.015)]
    last = rng.choice((b"00", b"0;a=b", b"000", b"0 ", b"")) if rng.random() < 0.15 else b"0"
    parts += [last, _mostly(rng, b"\r\n", ENDS, 0.015), rng.choice(TRAILERS), _mostly(rng, b"\r\n", ENDS, 0.015)]
    return b"".join(parts)


def _interim(rng: Random) -> bytes:
    head = b"HTTP/1.1 " + rng.choice((b"100 Continue", b"103 Early Hints", b"102 P", b"101 Switch")) + b"\r\n"
    return (
        head
        + rng.choice((b"", b"", b"X: y\r\n", b"Content-Length: 5\r\n", b"Transfer-Encoding: chunked\r\n"))
        + b"\r\n"
    )


def _named(rng: Random, name: bytes, value: bytes) -> bytes:
    return _mostly(rng, name, NAMES[name], 0.05) + rng.choice((b": ", b": ", b":")) + value


def _mostly(rng: Random, usual: bytes, odd: tuple[bytes, ...], ratio: float = 0.04) -> bytes:
    return rng.choice(odd) if rng.random() < ratio else usual


def _damaged(rng: Random, stream: bytes) -> bytes:
    """Change a byte or two, in one of eight cases."""
    for _ in range(rng.choice((0,) * 14 + (1, 2))):
        at = rng.randrange(len(stream) + 1)
        stream = stream[:at] + rng.choice((b"", *NOISE)) + stream[at + rng.choice((0, 0, 1, 2)) :]
    return stream
