"""How long a client waits for its answer, and how often it asked before, as it says itself.

`openai` and `anthropic` for Python send `x-stainless-read-timeout` with every request: the seconds that they wait for
the next byte (600.0 unless told otherwise, nothing if their timeout is None), and `x-stainless-retry-count`: 0, 1, 2.
Their TypeScript twins send `x-stainless-timeout`, seconds too. A client of any other kind may send
`X-Program-Patience`. What is no number in other people's headers is no error.
"""

from __future__ import annotations

from collections.abc import Mapping
from math import inf
from typing import NamedTuple

from multidict import istr

from thunderagent.errors import RequestError

PATIENCE_HEADER = istr("X-Program-Patience")
TIMEOUT_HEADERS = (istr("X-Stainless-Read-Timeout"), istr("X-Stainless-Timeout"))
RETRY_HEADER = istr("X-Stainless-Retry-Count")
IDEMPOTENCY_HEADER = istr("Idempotency-Key")

LARGEST_COUNT = 1000


class Patience(NamedTuple):
    """What a client says of its waiting; `patience_s` None is for ever.

    With `counts_bytes` every byte that comes renews it. `retry_count` is 0 at the first attempt.
    """

    patience_s: float | None = None
    counts_bytes: bool = False
    retry_count: int = 0
    idempotency_key: str = ""


def patience_of(headers: Mapping[str, str], default_s: float | None = None) -> Patience:
    """Read it; `default_s` is of clients that do not say it. Raises `RequestError` for a wrong header of ours."""
    patience_s, counts_bytes = default_s, False
    if PATIENCE_HEADER in headers:
        patience_s = _seconds(headers[PATIENCE_HEADER])
        if patience_s is None:
            raise RequestError(f"{PATIENCE_HEADER} is a number of seconds over 0, not {headers[PATIENCE_HEADER]!r}")
    else:
        for name in TIMEOUT_HEADERS:
            if name in headers and (said_s := _seconds(headers[name])) is not None:
                patience_s, counts_bytes = said_s, name == TIMEOUT_HEADERS[0]
                break
    retry_count = _retry_count(headers[RETRY_HEADER]) if RETRY_HEADER in headers else 0
    return Patience(patience_s, counts_bytes, retry_count, headers.get(IDEMPOTENCY_HEADER, ""))


def _retry_count(text: str) -> int:
    return min(LARGEST_COUNT, int(text)) if text.isascii() and text.isdigit() and len(text) < 10 else 0


def _seconds(text: str) -> float | None:
    try:
        seconds = float(text)
    except ValueError:
        return None
    return seconds if 0 < seconds < inf else None
