"""The headers that travel end to end."""

from __future__ import annotations

import pytest
from multidict import CIMultiDict, CIMultiDictProxy

from thunderagent.proxy.wire.headers import (
    forwarded_request_headers,
    forwarded_response_headers,
    relayed_response_headers,
)


def headers(*pairs: tuple[str, str]) -> CIMultiDictProxy[str]:
    return CIMultiDictProxy(CIMultiDict(pairs))


@pytest.mark.parametrize(
    "name",
    [
        *("Connection", "Keep-Alive", "Proxy-Authenticate", "Proxy-Authorization", "Proxy-Connection"),
        *("TE", "Trailer", "Transfer-Encoding", "Upgrade", "Host", "Content-Length", "Expect"),
    ],
)
def test_hop_by_hop_headers_of_a_request_stay_behind(name: str) -> None:
    """RFC 9110, 7.6.1 names them; so do those that the next connection writes itself, in any spelling."""
    for spelling in (name, name.lower(), name.upper()):
        assert not forwarded_request_headers(headers((spelling, "close")))


def test_everything_else_travels_in_its_order_and_spelling() -> None:
    """Authorization, traces, repeated and unknown headers reach the engine as they came."""
    pairs = [
        ("Authorization", "Bearer sk-1"),
        ("x-request-id", "7"),
        ("traceparent", "00-1-2-01"),
        ("X-Twice", "b"),
        ("X-Program-ID", "agent-1"),
        ("x-twice", "a"),
        ("Accept-Encoding", "gzip"),
        ("Content-Type", "application/json"),
    ]
    assert list(forwarded_request_headers(headers(("Host", "proxy"), *pairs)).items()) == pairs


def test_headers_that_connection_names_stay_behind() -> None:
    """Connection may name more of them, in several fields, with blanks and in any case."""
    named = headers(("Connection", "close, X-Hop"), ("connection", " x-leap ,"), ("X-hop", "1"), ("X-LEAP", "2"))
    assert not forwarded_request_headers(named)
    assert not forwarded_response_headers(named, keep_length=True)


def test_the_length_of_an_answer_is_kept_only_if_its_bytes_are() -> None:
    """A stream from which something is removed is shorter than announced."""
    answer = headers(("Content-Length", "10"), ("Content-Encoding", "gzip"), ("Transfer-Encoding", "chunked"))
    assert dict(forwarded_response_headers(answer, keep_length=True)) == {
        "Content-Length": "10",
        "Content-Encoding": "gzip",
    }
    assert dict(forwarded_response_headers(answer, keep_length=False)) == {"Content-Encoding": "gzip"}


@pytest.mark.parametrize(
    "name", ["X-Program-ID", "X-Program-ID-Source", "X-Replica-ID", "x-hold-ms", "X-ThunderAgent-Fail-Open"]
)
def test_headers_of_the_proxy_are_never_taken_from_an_engine(name: str) -> None:
    """A gateway believes its scheduler, which is the proxy."""
    answer = headers((name, "1"), ("X-Other", "2"))
    assert dict(forwarded_response_headers(answer, keep_length=True)) == {"X-Other": "2"}
    assert dict(relayed_response_headers(answer)) == {name: "1", "X-Other": "2"}
