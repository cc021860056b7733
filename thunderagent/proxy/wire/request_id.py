"""The id of a request: the client's `X-Request-Id`, or a new one; the engine, the answer and the log have it."""

# compiled: each turn has an id

from __future__ import annotations

import re
from contextvars import ContextVar
from itertools import count
from secrets import token_hex
from typing import Final

from multidict import CIMultiDictProxy

from thunderagent.proxy.reading.header_words import REQUEST_ID_HEADER

REQUEST_ID: ContextVar[str] = ContextVar("request_id", default="")
"""Of the current request: each has a context of its own."""

_USABLE: Final = re.compile(r"[!-~]{1,256}")
_BEGIN: Final = token_hex(8)  # per process; a random id for each request would cost a system call
_numbers: Final = count(1)


def take_request_id(headers: CIMultiDictProxy[str]) -> str:
    """Return the client's id if it is printable ASCII of up to 256 characters, or a new one."""
    given = headers.get(REQUEST_ID_HEADER)
    if given is not None and _USABLE.fullmatch(given):
        return given
    return _BEGIN + hex(next(_numbers))[2:]  # noqa: FURB116 - compiled, to format it costs several times that


def take_named_request_id(named: str, headers: CIMultiDictProxy[str]) -> None:
    """Let a request go on by the id that its body names, unless a header names one.

    Otherwise vLLM would know it by ours: there a header overrides the body.
    """
    if REQUEST_ID_HEADER not in headers and _USABLE.fullmatch(named):
        REQUEST_ID.set(named)
