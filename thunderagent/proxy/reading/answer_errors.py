"""Errors inside an answer with status 200: engines report what fails late, or in a stream, there.

Seen of vLLM (a dead engine core), SGLang (a full queue, a prompt that is too long), and of both for aborted requests.
An answer without one of the marks costs a few searches; inside a JSON string no mark can appear, as its quotes are
escaped there.
"""

# interpreted: msgspec reads the types of its structs, which a compiled class does not keep

from __future__ import annotations

import re
from typing import Any, Final, NamedTuple

import msgspec

from thunderagent.proxy.reading.json_cost import is_cheap
from thunderagent.proxy.reading.sse import UNREADABLE, data_of, events_in

_END: Final = re.compile(rb"[ \t\v\f]*(?:[\r\n]|\Z)")

_MAX_CODE_CHARS: Final = 100


class AnswerError(NamedTuple):
    """An error inside an answer: the engine's word for it, and whether it names the request, or an abort, as cause."""

    code: str
    is_callers: bool = False
    is_abort: bool = False


class _Said(msgspec.Struct):
    """Where the APIs put errors; everything else is skipped, not built."""

    error: Any = None
    type: Any = None
    object: Any = None
    status: Any = None
    code: Any = None
    response: Any = None
    choices: Any = None
    meta_info: Any = None


_decode: Any = msgspec.json.Decoder(_Said).decode
_decode_list: Any = msgspec.json.Decoder(list[_Said]).decode


def error_of_body(body: bytes) -> AnswerError | None:
    """Return the error of a whole answer; None if it has none, or cannot be read at a cost like its size."""
    if not may_hold_error(body) or not is_cheap(body):
        return None
    try:
        said = _decode_list(body) if body.lstrip()[:1] == b"[" else [_decode(body)]
    except UNREADABLE:
        return None
    return next((found for found in map(_error_of, said) if found is not None), None)


def error_of_events(events: bytes) -> AnswerError | None:
    """Return the first error of whole events of a stream that `may_hold_error`; None if they have none."""
    for event in events_in(events):
        found = error_of_body(data_of(event))
        if found is not None:
            return found
        if any(_is_line(event, name) for name in (b"event: error", b"event:error")):
            return AnswerError("error")
    return None


def may_hold_error(body: bytes) -> bool:
    """Return whether a body holds a mark of an error. Every answer is searched: three times, if it holds none.

    `in` with bytes makes an exception on its way, `find` does not.
    """
    return (
        (body.find(b"error") >= 0 and (b'"error"' in body or b"event: error" in body or b"event:error" in body))
        or body.find(b'"abort"') >= 0
        or (body.find(b'failed"') >= 0 and (b'"failed"' in body or b'"response.failed"' in body))
    )


def _is_line(event: bytes, wanted: bytes) -> bool:
    """Return whether a line of an event is `wanted`, but for spaces at its end; it is not split: it may be large."""
    at = event.find(wanted)
    while at >= 0:
        end = at + len(wanted)
        if (at == 0 or event[at - 1] in b"\r\n") and _END.match(event, end):
            return True
        at = event.find(wanted, end)
    return False


def _error_of(said: _Said) -> AnswerError | None:
    response = said.response if isinstance(said.response, dict) else {}
    if said.error or said.type == "error" or said.object == "error":
        return _named(said.error if isinstance(said.error, dict) else {"code": said.code, "type": said.error})
    if said.type == "response.failed" or response.get("status") == "failed":
        return _named(response.get("error"))
    if said.object == "response" and said.status == "failed":
        return _named(None)
    choices = said.choices if isinstance(said.choices, list) else []
    reasons = [choice.get("finish_reason") for choice in choices if isinstance(choice, dict)]
    if isinstance(said.meta_info, dict):
        reasons.append(said.meta_info.get("finish_reason"))
    for reason in reasons:
        kind = reason.get("type") if isinstance(reason, dict) else reason
        if kind == "abort":
            of = _named(reason) if isinstance(reason, dict) and reason.get("status_code") else None
            return AnswerError("abort", of.is_callers, not of.is_callers) if of else AnswerError("abort", is_abort=True)
        if kind == "error":
            return AnswerError("error")
    return None


def _named(error: Any) -> AnswerError:
    """Return an error by its own fields."""
    fields = error if isinstance(error, dict) else {}
    code = next((fields[name] for name in ("code", "status_code", "err_type", "type") if fields.get(name)), "error")
    kind = str(fields.get("type", "")).lower()
    status = int(code) if isinstance(code, int) or (isinstance(code, str) and code.isdigit() and len(code) < 4) else 0
    full = status == 429 or "rate_limit" in kind
    is_callers = not full and (400 <= status < 500 or "invalid_request" in kind or "badrequest" in kind)
    return AnswerError(str(code)[:_MAX_CODE_CHARS], is_callers)
