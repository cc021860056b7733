"""What an answer says of its request in headers of ours: whose it was, where it ran, how long it was held."""

from __future__ import annotations

from collections.abc import Mapping

from thunderagent.errors import ReplicaError, ThunderAgentError

PROGRAM_ID_HEADER = "X-Program-ID"
SOURCE_HEADER = "X-Program-ID-Source"
REPLICA_HEADER = "X-Replica-ID"
HOLD_HEADER = "X-Hold-Ms"


def identity_headers(program_id: str | None, source: str) -> dict[str, str]:
    """Return the headers that say whose a request was; none if it is nobody's."""
    if program_id is None:
        return {}
    return {PROGRAM_ID_HEADER: _header_safe(program_id), SOURCE_HEADER: source}


def tell_with_error(error: ThunderAgentError, headers: Mapping[str, str]) -> None:
    """Have the answer that tells of an error bear these headers, and which replica failed, if one did."""
    replica = {REPLICA_HEADER: error.replica_id} if isinstance(error, ReplicaError) else {}
    error.answer_headers = {**headers, **replica}


def _header_safe(text: str) -> str:
    """Return a program id as a header can carry it."""
    return text if text.isascii() else text.encode("ascii", "backslashreplace").decode()
