"""Which headers travel end to end."""

from __future__ import annotations

from multidict import CIMultiDict, CIMultiDictProxy

_HOP_BY_HOP = frozenset(
    {
        "connection",
        "keep-alive",
        "proxy-authenticate",
        "proxy-authorization",
        "proxy-connection",
        "te",
        "trailer",
        "transfer-encoding",
        "upgrade",
    }
)
"""RFC 9110, section 7.6.1."""

_REQUEST_DROPPED = _HOP_BY_HOP | {"host", "content-length", "expect"}
"""Content-Length is counted anew, because the body may have been spliced; Host names the replica."""


def forwarded_request_headers(headers: CIMultiDictProxy[str]) -> CIMultiDict[str]:
    """Return the end-to-end headers of a request, in their order and spelling."""
    return _without(headers, _REQUEST_DROPPED)


def forwarded_response_headers(headers: CIMultiDictProxy[str], *, keep_length: bool) -> CIMultiDict[str]:
    """Return the end-to-end headers of an answer; Content-Length only if the body's bytes stay as they are."""
    return _without(headers, _HOP_BY_HOP if keep_length else _HOP_BY_HOP | {"content-length"})


def _without(headers: CIMultiDictProxy[str], dropped: frozenset[str]) -> CIMultiDict[str]:
    if "Connection" in headers:  # RFC 9110, 7.6.1: it may name further hop-by-hop headers
        named = ",".join(headers.getall("Connection")).lower().split(",")
        dropped = dropped | {name.strip() for name in named}
    kept = CIMultiDict(headers)
    for name in dropped:
        if name in kept:
            del kept[name]
    return kept
