"""Refusals of a scheduler, as the errors that they are where both sides are one process."""

from __future__ import annotations

from thunderagent.errors import ThunderAgentError
from thunderagent.scale.messages import Refusal


def error_of(refusal: Refusal) -> ThunderAgentError:
    """Return the error that a scheduler tells of."""
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
"""Those that are made of their message alone, by their codes."""
