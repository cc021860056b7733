"""The head of a message: read strictly, once, from its bytes, and what it says of the body that follows.

Theory of operation
===================
A request can be smuggled if two servers in a row see its end at different places. So there is one reading here, and
anything that allows a second is refused. llhttp, with its leniencies off, refuses bare line feeds, folded lines, spaces
before a colon, two lengths, and a length beside a transfer coding. What it accepts but servers read differently is
refused here: two spaces in a request line, lines before it, other versions, a transfer coding other than `chunked`,
`chunked` from HTTP/1.0, and a request without a host or with two.

The end of a head is found first; the parser gets only the head. So it never sees a body, which is counted, or the next
message: what follows stays as received, for the next reader. Each head has a parser of its own, and no state of one
message is left to the next. Once the parser accepted the lines, one regular expression splits them: that costs half of
a callback for each header.

Headers are text here and bytes on the wire: UTF-8; invalid bytes come out as they came in.

Clients and engines send the same head again and again, except for the number in Content-Length. So a repeated head is
not read again: it is found by all of its bytes but that number, together with what other parts derived from it. Equal
bytes are read in one way, so this is no second reading, if the number is nothing but the length. It is: it stands alone
in a line that begins with `Content-Length: `, and the parser, which accepts one such header, read it as the length in a
head with the same other bytes.
"""

# compiled: each turn passes here, on both sides

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any, Final, Generic, NamedTuple, TypeVar
from urllib.parse import quote_from_bytes

import httptools
from multidict import CIMultiDict, CIMultiDictProxy, istr

from thunderagent.proxy.wire.failures import NotHttpError

MAX_HEAD_BYTES: Final = 64 * 1024
MAX_HEADERS_COUNT: Final = 128
"""A head with more is refused."""

MAX_KNOWN_BYTES: Final = 4096
"""A longer head is read each time."""
KNOWN_COUNT: Final = 4096
KNOWN_BYTES: Final = 2 * 2**20
CAME_ONCE_COUNT: Final = 4 * KNOWN_COUNT
"""How many heads, or bytes of them, are known, plus as many less recent ones; and of how many it is known that they
came once. A parsed head is ten times as large, and anybody may send some: this comes before any key."""
MAX_LENGTH_DIGITS: Final = 18

CHUNKED: Final = -1
TO_THE_END: Final = -2
"""Instead of a length: the body is chunked, or ends with the connection."""

BODILESS_STATUSES: Final = frozenset({204, 304})
CHANGES_PROTOCOL: Final = 101
"""The status after which both sides send anything, as with websockets, until one closes."""

_REQUEST_LINE: Final = re.compile(rb"([A-Z][A-Z-]*) ([!-~\x80-\xff]+) HTTP/1\.([01])\r\n")
_STATUS_LINE: Final = re.compile(rb"HTTP/1\.([01]) ([1-9][0-9][0-9])(?: ([\t -~\x80-\xff]*))?\r\n")
_HEADER: Final = re.compile(r"([^:]++):[ \t]*+([^\r]*+)\r\n")
"""Splits lines that llhttp accepted; if it had not, the count of lines would differ. Two single-character classes
without backtracking: twice as fast as excluding line feeds, too."""
_BARE_LINE_FEED: Final = re.compile(rb"(?<!\r)\n")
_LENGTH: Final = re.compile(f"[0-9]{{1,{MAX_LENGTH_DIGITS}}}")
_LENGTH_LINES: Final = (b"\r\nContent-Length: ", b"\r\ncontent-length: ")
"""Where a length stands, as nearly all spell it. A head that spells it in another way is known by all of its bytes."""
_HOST, _CONNECTION = istr("Host"), istr("Connection")
TRANSFER_ENCODING: Final = istr("Transfer-Encoding")
CONTENT_ENCODING: Final = istr("Content-Encoding")
CONTENT_LENGTH: Final = istr("Content-Length")
DATE: Final = istr("Date")
_ASCII: Final = bytes(range(0x21, 0x7F)).decode()


class RequestHead(NamedTuple):
    """The head of a request."""

    method: str
    target: bytes
    """As in the request line."""
    is_http_11: bool
    headers: CIMultiDictProxy[str]
    length: int
    """Of the body, in bytes; 0 if there is none, or `CHUNKED`."""
    keeps_alive: bool
    upgrades: bool
    """Whether it asks for another protocol, as WebSockets do."""
    notes: dict[str, Any]
    """What other parts derived from the head alone, regardless of the length; requests with the same head share it."""


class AnswerHead(NamedTuple):
    """The head of an answer."""

    status: int
    reason: str
    headers: CIMultiDictProxy[str]
    length: int
    """Of the body, in bytes; or `CHUNKED`, or `TO_THE_END`."""
    keeps_alive: bool
    content_type: str
    """The media type, without its parameters."""
    notes: dict[str, Any]
    """As for a request."""


def end_of_head(data: bytes, start: int) -> int:
    """Return where a head ends, including its empty line; 0 if that has not arrived.

    Nothing before `start` ends it: that was already searched. Raises `NotHttpError` if it is too long, or if its end
    depends on accepting a bare line feed.
    """
    end = data.find(b"\r\n\r\n", start - 3 if start > 3 else 0) + 4
    if 4 <= end <= MAX_HEAD_BYTES:
        return end
    if end < 4:
        end = 0
        if _BARE_LINE_FEED.search(data, max(0, start - 1)):
            raise NotHttpError("a line of a head ends with a bare line feed")
    if (end or len(data)) > MAX_HEAD_BYTES:
        raise NotHttpError(f"a head is longer than {MAX_HEAD_BYTES} bytes")
    return end


def read_request(head: bytes) -> RequestHead:
    """Read the head of a request, from its first byte to its empty line. Raises `NotHttpError`."""
    line = _REQUEST_LINE.match(head)
    if line is None:
        raise NotHttpError("the request line is not `METHOD /path HTTP/1.1`")
    method, target, minor = line.groups()
    if method == b"CONNECT":
        raise NotHttpError("tunnels (CONNECT) are not supported")
    is_http_11 = minor == b"1"
    checked = head
    if not target.isascii():  # llhttp accepts only ASCII; the router checks the target itself
        checked = head.replace(target, quote_from_bytes(target, safe=_ASCII).encode(), 1)
    headers = _headers(httptools.HttpRequestParser, checked, head, line.end())
    length = _length(headers, is_http_11=is_http_11)
    hosts = headers.getall(_HOST, ())
    if not hosts and is_http_11:
        raise NotHttpError("a request needs a Host header")
    if len(hosts) > 1:
        raise NotHttpError("a request must have one Host header")
    keeps_alive, upgrades = is_http_11, False
    if _CONNECTION in headers:
        options = _options(headers)
        keeps_alive = "close" not in options and (is_http_11 or "keep-alive" in options)
        upgrades = is_http_11 and "upgrade" in options and "Upgrade" in headers  # RFC 9110, 7.8
    return RequestHead(
        method.decode(),
        target,
        is_http_11,
        CIMultiDictProxy(headers),
        0 if length is None else length,
        keeps_alive,
        upgrades,
        {},
    )


def read_answer(head: bytes, method: str) -> AnswerHead:
    """Read the head of an answer to a request of this method. Raises `NotHttpError`."""
    line = _STATUS_LINE.match(head)
    if line is None:
        raise NotHttpError("the first line of the answer is not `HTTP/1.1 200 OK`")
    minor, status, reason = line.groups()
    is_http_11 = minor == b"1"
    headers = _headers(httptools.HttpResponseParser, head, head, line.end())
    length = _length(headers, is_http_11=is_http_11)
    code = int(status)
    if method == "HEAD" or code < 200 or code in BODILESS_STATUSES:
        length = TO_THE_END if code == CHANGES_PROTOCOL else 0
    keeps_alive = is_http_11 and (_CONNECTION not in headers or "close" not in _options(headers))
    return AnswerHead(
        code,
        (reason or b"").decode("utf-8", "surrogateescape"),
        CIMultiDictProxy(headers),
        TO_THE_END if length is None else length,
        keeps_alive and length is not None and code != CHANGES_PROTOCOL,
        headers.get("Content-Type", "").partition(";")[0].strip().lower(),
        {},
    )


Head = TypeVar("Head", bound=RequestHead | AnswerHead)

_Around = tuple[bytes, bytes, bytes]
"""The bytes of a head before its Content-Length, the begin of that line, and those after its digits.

Apart, because together they would not say where the digits were. If no digits are cut out, the others are empty."""


class KnownHeads(Generic[Head]):
    """Known heads, as read; the least recent are forgotten.

    A head is kept from the second time on, so that unique heads take no memory.
    """

    def __init__(self, read: Callable[[bytes], Head], of_length: Callable[[Head, str, str], Head]) -> None:
        """Start empty. `read` reads a head; `of_length` returns one with another Content-Length, spelt as received."""
        self._read = read
        self._of_length = of_length
        self._recent: dict[_Around, tuple[bytes, Head]] = {}
        self._older: dict[_Around, tuple[bytes, Head]] = {}
        """Each with the digits of its length when it was read; none if its length is among the bytes around."""
        self._recent_bytes = 0
        self._came_once: set[int] = set()

    def __len__(self) -> int:
        return len(self._recent) + len(self._older)

    def read(self, raw: bytes) -> Head:
        """Return a head as read. Raises what reading it raises."""
        before, line, rest = raw.partition(_LENGTH_LINES[0])
        if not line:
            before, line, rest = raw.partition(_LENGTH_LINES[1])
        digits, _, after = rest.partition(b"\r")
        around = before, line, after
        if line and (not digits.isdigit() or len(digits) > MAX_LENGTH_DIGITS):
            return self._read(raw)
        found = self._recent.get(around)
        if found is None:
            found = self._older.get(around)
            if found is None:
                return self._read_anew(raw, around, digits)
            self._keep(around, found)
        if digits == found[0]:
            return found[1]
        return self._of_length(found[1], line[2:-2].decode(), digits.decode())

    def _read_anew(self, raw: bytes, around: _Around, digits: bytes) -> Head:
        head = self._read(raw)
        if len(raw) > MAX_KNOWN_BYTES or (digits and head.headers[CONTENT_LENGTH] != digits.decode()):
            return head
        number = hash(around)
        if number in self._came_once:
            self._came_once.discard(number)
            self._keep(around, (digits, head))
        else:
            if len(self._came_once) >= CAME_ONCE_COUNT:
                self._came_once.clear()
            self._came_once.add(number)
        return head

    def _keep(self, around: _Around, found: tuple[bytes, Head]) -> None:
        if len(self._recent) >= KNOWN_COUNT or self._recent_bytes >= KNOWN_BYTES:
            self._older, self._recent, self._recent_bytes = self._recent, {}, 0
        self._recent[around] = found
        self._recent_bytes += len(around[0]) + len(around[2])


def known_requests() -> KnownHeads[RequestHead]:
    """Return a cache for the heads of requests."""

    def of_length(head: RequestHead, name: str, digits: str) -> RequestHead:
        method, target, is_http_11, headers, _, keeps_alive, upgrades, notes = head
        changed = CIMultiDict(headers)
        changed[name] = digits
        return RequestHead(
            method, target, is_http_11, CIMultiDictProxy(changed), int(digits), keeps_alive, upgrades, notes
        )

    return KnownHeads(read_request, of_length)


def known_answers() -> KnownHeads[AnswerHead]:
    """Return a cache for the heads of answers, to requests of any method except HEAD."""

    def of_length(head: AnswerHead, name: str, digits: str) -> AnswerHead:
        has_body = head.status >= 200 and head.status not in BODILESS_STATUSES
        length = int(digits) if has_body else head.length
        changed = CIMultiDict(head.headers)
        changed[name] = digits
        return AnswerHead(
            head.status,
            head.reason,
            CIMultiDictProxy(changed),
            length,
            head.keeps_alive,
            head.content_type,
            head.notes,
        )

    return KnownHeads(lambda raw: read_answer(raw, "POST"), of_length)


def _headers(
    kind: type[httptools.HttpRequestParser | httptools.HttpResponseParser], checked: bytes, head: bytes, start: int
) -> CIMultiDict[str]:
    """Check a head by llhttp, and return its headers, which begin at `start`."""
    try:
        kind(None).feed_data(checked)
    except httptools.HttpParserUpgrade:
        pass
    except httptools.HttpParserError as error:
        raise NotHttpError(str(error) or "it is not HTTP") from None
    text = head[start:].decode("utf-8", "surrogateescape")
    pairs = _HEADER.findall(text)
    count = len(pairs)
    if count > MAX_HEADERS_COUNT:
        raise NotHttpError(f"a head has more than {MAX_HEADERS_COUNT} headers")
    if text.count("\n") != count + 1:
        raise NotHttpError("a line of a head is not a header")
    if "\t" in text or " \r" in text:
        pairs = [(name, value.rstrip(" \t")) for name, value in pairs]
    return CIMultiDict(pairs)


def _length(headers: CIMultiDict[str], *, is_http_11: bool) -> int | None:
    """Return the length of a body, or `CHUNKED`; None if the headers do not say."""
    if TRANSFER_ENCODING in headers:
        if [coding.lower() for coding in headers.getall(TRANSFER_ENCODING)] != ["chunked"]:
            raise NotHttpError("a body has a transfer coding other than `chunked`")
        if CONTENT_LENGTH in headers:
            raise NotHttpError("a body has both a length and a transfer coding")
        if not is_http_11:
            raise NotHttpError("HTTP/1.0 has no transfer codings")
        return CHUNKED
    lengths = headers.getall(CONTENT_LENGTH, ())
    if not lengths:
        return None
    if len(lengths) > 1 or not _LENGTH.fullmatch(lengths[0]):
        raise NotHttpError("Content-Length is there twice, or is not a number")
    return int(lengths[0])


def _options(headers: CIMultiDict[str]) -> list[str]:
    """Return the names in the header Connection."""
    return [option.strip(" \t") for option in ",".join(headers.getall(_CONNECTION)).lower().split(",")]


def written(lines: list[str], headers: CIMultiDict[str], last_line: str = "") -> bytes:
    """Return the bytes of a head from lines, headers, and an optional last line.

    Raises `ValueError` for a value with a line break.
    """
    lines += map(": ".join, headers.items())
    if last_line:
        lines.append(last_line)
    said = "".join(lines)  # to look for a character costs a tenth of counting it
    if "\n" in said or "\r" in said or "\0" in said:
        raise ValueError("a header or the request line contains a line break or a zero byte")
    lines.append("\r\n")
    return "\r\n".join(lines).encode("utf-8", "surrogateescape")
