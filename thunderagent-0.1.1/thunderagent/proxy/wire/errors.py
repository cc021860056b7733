"""How an error is told: in the schema of the API that was called, with its status and its code."""

from __future__ import annotations

import json
from typing import NamedTuple

from multidict import CIMultiDict

from thunderagent.errors import KeyNeededError, ThunderAgentError
from thunderagent.proxy.reading.dialects import CHAT, dialect_of
from thunderagent.proxy.wire.headers import REQUEST_ID


class ErrorAnswer(NamedTuple):
    """A whole answer, except for what every answer has."""

    status: int
    headers: CIMultiDict[str]
    body: bytes


def answer_of(error: ThunderAgentError, spelt: str | None) -> ErrorAnswer:
    """Return the answer that tells a caller of a path, spelt as the tables have it, of an error; None is no path."""
    answer = plain_answer(error.status, error.code, error.message, spelt)
    answer.headers.update(error.answer_headers)
    if error.retry_after_s is not None:
        answer.headers["Retry-After"] = str(error.retry_after_s)
    if error.status == KeyNeededError.status:
        answer.headers["WWW-Authenticate"] = "Bearer"
    return answer


def plain_answer(status: int, code: str, message: str, spelt: str | None) -> ErrorAnswer:
    """Return the answer that tells of what is no error of ours."""
    dialect = dialect_of(spelt) if spelt is not None else CHAT
    body = dialect.error(status, code, message)
    if body.get("type") == "error":  # Anthropic's schema, which has a place for it
        body["request_id"] = REQUEST_ID.get()
    headers = CIMultiDict({"Content-Type": "application/json; charset=utf-8"})
    return ErrorAnswer(status, headers, json.dumps(body).encode())
