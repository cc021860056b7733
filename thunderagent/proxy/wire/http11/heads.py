"""The head of a message: read strictly, once, from its bytes, and what it says of the body that follows.

Theory of operation
===================
A request is smuggled where two servers in a row see its end at different places. So there is one reading here, and
what leaves room for a second is refused. llhttp, with its leniencies off, refuses bare line feeds, folded lines, spaces
before a colon, two lengths, and a length beside a transfer coding. What it lets pass and servers read in different ways
is refused here: two spaces in a request line, lines before it, other versions, a transfer coding other than `chunked`,
`chunked` from HTTP/1.0, and a request without a host or with two.

The end of a head is found first; the parser gets the head alone. So it never sees a body, which is counted, and no next
message: what follows stays as it came, for whoever reads it next. Each head has a parser of its own, and no state of
one message is left to the next. Once it said that the lines are what they should be, one expression takes them apart:
that costs half of what a call for each header does.

Headers are text here and bytes on the wire: UTF-8, and what is none comes out as the same bytes that came in.
"""

# compiled: each turn passes here, on both sides

from __future__ import annotations

import re
from typing import NamedTuple
from urllib.parse import quote_from_bytes

import httptools
from multidict import CIMultiDict, CIMultiDictProxy, istr

from thunderagent.proxy.wire.failures import NotHttpError

MAX_HEAD_BYTES = 64 * 1024
MAX_HEADERS_COUNT = 128
"""A head with more of either is refused."""

CHUNKED = -1
TO_THE_END = -2
"""In place of a length: the body comes in chunks, or ends with the connection."""

BODILESS_STATUSES = frozenset({204, 304})
CHANGES_PROTOCOL = 101
"""The status after which both sides say what they like, as websockets do, until one of them closes."""

_REQUEST_LINE = re.compile(rb"([A-Z][A-Z-]*) ([!-~\x80-\xff]+) HTTP/1\.([01])\r\n")
_STATUS_LINE = re.compile(rb"HTTP/1\.([01]) ([1-9][0-9][0-9])(?: ([\t -~\x80-\xff]*))?\r\n")
_HEADER = re.compile(r"([^:]++):[ \t]*+([^\r]*+)\r\n")
"""Takes lines apart that llhttp let pass; where it did not, the count of lines would tell. Two classes of one character
each, and nothing to go back for: that is twice as quick as to exclude line feeds, too."""
_BARE_LINE_FEED = re.compile(rb"(?<!\r)\n")
_LENGTH = re.compile(r"[0-9]{1,18}")
_HOST, _CONNECTION = istr("Host"), istr("Connection")
_TRANSFER_ENCODING, _CONTENT_LENGTH = istr("Transfer-Encoding"), istr("Content-Length")
_ASCII = bytes(range(0x21, 0x7F)).decode()


class RequestHead(NamedTuple):
    """The head of a request."""

    method: str
    target: bytes
    """As it stands in the request line."""
    is_http_11: bool
    headers: CIMultiDictProxy[str]
    length: int
    """Of the body, in bytes; 0 if there is none, or `CHUNKED`."""
    keeps_alive: bool
    upgrades: bool
    """Whether it asks for another protocol, as WebSockets do."""


class AnswerHead(NamedTuple):
    """The head of an answer."""

    status: int
    reason: str
    headers: CIMultiDictProxy[str]
    length: int
    """Of the body, in bytes; or `CHUNKED`, or `TO_THE_END`."""
    keeps_alive: bool


def end_of_head(data: bytes, start: int) -> int:
    """Return where a head ends, its empty line included; 0 if that has not come.

    Nothing before `start` ends it: that was looked at when less was there. Raises `NotHttpError` if it is too long, or
    if its end is one for those who take a bare line feed for the end of a line.
    """
    end = data.find(b"\r\n\r\n", max(0, start - 3)) + 4
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
    if not target.isascii():  # llhttp reads ASCII alone; who routes it has its own opinion on it
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
    )


def _headers(
    kind: type[httptools.HttpRequestParser | httptools.HttpResponseParser], checked: bytes, head: bytes, start: int
) -> CIMultiDict[str]:
    """Have llhttp check a head, and return the headers that begin at `start` of it."""
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
    """Return the length of a body, or `CHUNKED`; None if nothing is said of it."""
    if _TRANSFER_ENCODING in headers:
        if [coding.lower() for coding in headers.getall(_TRANSFER_ENCODING)] != ["chunked"]:
            raise NotHttpError("a body has a transfer coding other than `chunked`")
        if _CONTENT_LENGTH in headers:
            raise NotHttpError("a body has both a length and a transfer coding")
        if not is_http_11:
            raise NotHttpError("HTTP/1.0 has no transfer codings")
        return CHUNKED
    lengths = headers.getall(_CONTENT_LENGTH, ())
    if not lengths:
        return None
    if len(lengths) > 1 or not _LENGTH.fullmatch(lengths[0]):
        raise NotHttpError("Content-Length is there twice, or is not a number")
    return int(lengths[0])


def _options(headers: CIMultiDict[str]) -> list[str]:
    """Return what the header Connection names."""
    return [option.strip(" \t") for option in ",".join(headers.getall(_CONNECTION)).lower().split(",")]


def written(lines: list[str], headers: CIMultiDict[str], last_line: str = "") -> bytes:
    """Return the bytes of a head of these lines, headers, and a last line if there is one.

    Raises `ValueError` for what would end its line itself.
    """
    lines += map(": ".join, headers.items())
    if last_line:
        lines.append(last_line)
    text = "".join(lines)
    if "\n" in text or "\r" in text or "\0" in text:
        raise ValueError("a header or the request line contains a line break or a zero byte")
    lines.append("\r\n")
    return "\r\n".join(lines).encode("utf-8", "surrogateescape")
