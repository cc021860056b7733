"""A scheduler's refusals, converted to the errors that a single process would raise."""

from __future__ import annotations

from thunderagent.errors import ThunderAgentError
from thunderagent.scale.messages import Refusal


def error_of(refusal: Refusal) -> ThunderAgentError:
    """Return the error of a scheduler's refusal."""
    error = _ERRORS.get(refusal.code, ThunderAgentError)(refusal.message)
    error.retry_after_s = refusal.retry_after_s
    return error


def _all_errors(of: type[ThunderAgentError]) -> dict[str, type[ThunderAgentError]]:
    found = {of.code: of}
    for each in of.__subclasses__():
        if each.__init__ is ThunderAgentError.__init__:
            found = {**_all_errors(each), **found}
    return found


_ERRORS = _all_errors(ThunderAgentError)
"""Errors created from their message alone, by code."""
