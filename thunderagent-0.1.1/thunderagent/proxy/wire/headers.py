"""Which headers travel end to end, and what an answer says of its request in our own headers.

The id of a request is the client's `X-Request-Id`, or a new one; the engine, the answer and the log have it.
"""

# compiled: both heads of each turn pass here

from __future__ import annotations

import re
from collections.abc import Mapping, MutableMapping
from contextvars import ContextVar
from itertools import count
from secrets import token_hex
from typing import Any, Final
from urllib.parse import urljoin, urlsplit

from multidict import CIMultiDict, CIMultiDictProxy, istr

from thunderagent.errors import ReplicaError, ReplicaRedirectError, ThunderAgentError
from thunderagent.proxy.reading.header_words import REQUEST_ID_HEADER
from thunderagent.proxy.reading.target import Target

REQUEST_ID: ContextVar[str] = ContextVar("request_id", default="")
"""Of the current request: each has a context of its own."""

_USABLE_ID: Final = re.compile(r"[!-~]{1,256}")
_BEGIN: Final = token_hex(8)  # per process; a random id for each request would cost a system call
_numbers: Final = count(1)

_CONNECTION: Final = istr("Connection")
_CONTENT_LENGTH: Final = istr("Content-Length")
LOCATION: Final = istr("Location")

_HOP_BY_HOP: Final = frozenset(
    {
        istr("connection"),
        istr("keep-alive"),
        istr("proxy-authenticate"),
        istr("proxy-authorization"),
        istr("proxy-connection"),
        istr("te"),
        istr("trailer"),
        istr("transfer-encoding"),
        istr("upgrade"),
    }
)
"""RFC 9110, section 7.6.1."""

_REQUEST_DROPPED: Final = _HOP_BY_HOP | {istr("host"), istr("content-length"), istr("expect")}
"""Content-Length is computed again, because the body may have been spliced; Host names the replica."""


# The program of a request, where it ran, how long it was held.
PROGRAM_ID_HEADER: Final = istr("X-Program-ID")
SOURCE_HEADER: Final = istr("X-Program-ID-Source")
REPLICA_HEADER: Final = istr("X-Replica-ID")
HOLD_HEADER: Final = istr("X-Hold-Ms")
FAIL_OPEN_HEADER: Final = istr("X-ThunderAgent-Fail-Open")
"""Set for a turn that ran without a scheduler's permission."""

NOTE_HEADER: Final = istr("X-ThunderAgent-Note")
"""What a client should know of its request: a key of its body that is nearly one of ours."""

_OURS: Final = frozenset({PROGRAM_ID_HEADER, SOURCE_HEADER, REPLICA_HEADER, HOLD_HEADER, FAIL_OPEN_HEADER, NOTE_HEADER})
"""Only the proxy says these; an engine that does is not believed."""

_RESPONSE_DROPPED: Final = _HOP_BY_HOP | {istr("alt-svc"), istr("refresh")} | _OURS
"""`Alt-Svc` and `Refresh` would lead a client to the engine, or elsewhere, without a redirect."""

_PORTS: Final = {"http": 80, "https": 443}


def forwarded_request_headers(headers: CIMultiDictProxy[str], notes: dict[str, Any] | None = None) -> CIMultiDict[str]:
    """Return the end-to-end headers of a request, in order and spelling; `notes` are those of its head."""
    known: CIMultiDict[str] | None = None if notes is None else notes.get("forwarded")
    if known is None:
        known = _without(headers, _REQUEST_DROPPED)
        if notes is None:
            return known
        notes["forwarded"] = known
    return CIMultiDict(known)


def forwarded_response_headers(
    headers: CIMultiDictProxy[str], notes: dict[str, Any] | None = None, *, keep_length: bool
) -> CIMultiDict[str]:
    """Return the end-to-end headers of an answer; Content-Length only if the body's bytes are unchanged.

    `notes` are those of its head, which heads with another length share.
    """
    kept: CIMultiDict[str] | None = None if notes is None else notes.get("forwarded")
    if kept is None:
        kept = _without(headers, _RESPONSE_DROPPED)
        if notes is not None:
            notes["forwarded"] = kept
    if notes is not None:
        kept = CIMultiDict(kept)
    if _CONTENT_LENGTH in kept:
        if keep_length:
            kept[_CONTENT_LENGTH] = headers[_CONTENT_LENGTH]
        else:
            del kept[_CONTENT_LENGTH]
    return kept


def relayed_response_headers(headers: CIMultiDictProxy[str]) -> CIMultiDict[str]:
    """Return the end-to-end headers of an answer of another process of ours, with what only the proxy says."""
    return _without(headers, _RESPONSE_DROPPED - _OURS)


def lead_back(headers: CIMultiDict[str], base_url: str, replica_id: str, target: Target) -> None:
    """Rewrite a replica's redirect to lead to the same place through the proxy, for the same program or replica.

    A path without a host does that, whatever name the client uses for us. Raises `ReplicaRedirectError` for one to
    another host.
    """
    try:
        base = urlsplit(base_url)
        wanted = urlsplit(urljoin(base_url.rstrip("/") + target.sent, headers.popall(LOCATION)[0]))
        is_replicas = (wanted.hostname, wanted.port or _PORTS.get(wanted.scheme)) == (
            base.hostname,
            base.port or _PORTS.get(base.scheme),
        )
    except ValueError:
        is_replicas = False
    if not is_replicas:
        raise ReplicaRedirectError(f"replica {replica_id} redirects to another server", replica_id=replica_id)
    base_path = base.path.rstrip("/") + "/"
    path = wanted.path.removeprefix(base_path).lstrip("/\\")  # two slashes would start another host's name
    headers[LOCATION] = f"{target.prefix}/{path}" + (f"?{wanted.query}" if wanted.query else "")


def _without(headers: CIMultiDictProxy[str], dropped: frozenset[str]) -> CIMultiDict[str]:
    if _CONNECTION in headers:  # RFC 9110, 7.6.1: it may name further hop-by-hop headers
        named = ",".join(headers.getall(_CONNECTION)).lower().split(",")
        dropped = dropped | {name.strip() for name in named}
    kept = CIMultiDict(headers)
    for name in dropped:
        if name in kept:
            del kept[name]
    return kept


def identity_headers(program_id: str | None, source: str) -> dict[str, str]:
    """Return the headers that name a request's program; none if it is anonymous."""
    headers: dict[str, str] = {}
    if program_id is not None:
        put_identity(headers, program_id, source)
    return headers


def put_identity(headers: MutableMapping[str, str], program_id: str, source: str) -> None:
    """Put the headers that name a request's program into others."""
    safe_id = program_id if program_id.isascii() else program_id.encode("ascii", "backslashreplace").decode()
    headers[PROGRAM_ID_HEADER] = safe_id
    headers[SOURCE_HEADER] = source


def tell_with_error(error: ThunderAgentError, headers: Mapping[str, str]) -> None:
    """Add these headers, and the failed replica if any, to the answer that reports an error."""
    replica: dict[str, str] = {REPLICA_HEADER: error.replica_id} if isinstance(error, ReplicaError) else {}
    error.answer_headers = {**headers, **replica}


def take_request_id(headers: CIMultiDictProxy[str]) -> None:
    """Let a request go on by its client's id if it is printable ASCII of up to 256 characters, or by a new one."""
    given = headers.get(REQUEST_ID_HEADER)
    if given is None or not _USABLE_ID.fullmatch(given):
        given = _BEGIN + hex(next(_numbers))[2:]  # noqa: FURB116 - compiled, to format it costs several times that
    REQUEST_ID.set(given)


def take_named_request_id(named: str, headers: CIMultiDictProxy[str]) -> None:
    """Let a request go on by the id that its body names, unless a header names one.

    Otherwise vLLM would know it by ours: there a header overrides the body.
    """
    if REQUEST_ID_HEADER not in headers and _USABLE_ID.fullmatch(named):
        REQUEST_ID.set(named)
