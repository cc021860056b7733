"""How long a client waits for its answer, how often it tried before, and when it will ask again, by its own headers.

`openai` and `anthropic` for Python send `x-stainless-read-timeout` with every request: the seconds that they wait for
the next byte (600.0 by default, nothing if their timeout is None), and `x-stainless-retry-count`: 0, 1, 2. Their
TypeScript twins send `x-stainless-timeout`, seconds too. Any other client may send `X-Program-Patience`. A value that
is not a number in other people's headers is no error.

`X-Program-Limits: max_turns=50, deadline_s=600` says what the program may use (`model/records/limits.py`).

`X-Program-Hint: next_turn_in_s=12.5, confidence=0.8` says when the program's next turn comes, counted from the end of
this one; `keep=retain` or `keep=offload` what may become of its memory until then. It is a dictionary of RFC 8941.
"""

# compiled: each turn passes here

from __future__ import annotations

from collections.abc import Mapping, Sequence
from math import inf
from typing import Any, Final, NamedTuple

from multidict import istr

from thunderagent.errors import RequestError
from thunderagent.leases import TurnHint
from thunderagent.programs.model.advice.hints import MAX_NEXT_TURN_S, OFFLOAD, RETAIN
from thunderagent.programs.model.records.limits import ProgramLimits

PATIENCE_HEADER: Final = istr("X-Program-Patience")
TIMEOUT_HEADERS = (istr("X-Stainless-Read-Timeout"), istr("X-Stainless-Timeout"))
RETRY_HEADER: Final = istr("X-Stainless-Retry-Count")
IDEMPOTENCY_HEADER: Final = istr("Idempotency-Key")
HINT_HEADER: Final = istr("X-Program-Hint")

LIMITS_HEADER: Final = istr("X-Program-Limits")

RUNTIME_HEADER: Final = istr("X-Stainless-Runtime")
USER_AGENT: Final = istr("User-Agent")
TRANSPORT_S: Final = 290.0
"""Node's `fetch` gives up after 300 s without a byte, whatever its user allows; so do clients built on it."""
_GIVES_UP: Final = ("opencode/", "ai-sdk/")
"""What names such clients that do not name their runtime, in their `User-Agent`."""

LARGEST_COUNT: Final = 1000


class Patience(NamedTuple):
    """A client's stated patience; `patience_s` None is for ever.

    With `counts_bytes` every byte that arrives renews it. `retry_count` is 0 at the first attempt. `hint` is about what
    comes after the turn, `limits` are those of its program.
    """

    patience_s: float | None = None
    counts_bytes: bool = False
    retry_count: int = 0
    idempotency_key: str = ""
    hint: TurnHint | None = None
    limits: ProgramLimits | None = None


def patience_of(
    headers: Mapping[str, str], default_s: float | None = None, notes: dict[str, Any] | None = None
) -> Patience:
    """Read the patience; `default_s` is for clients without one. `notes` are those of the head, if read before.

    Raises `RequestError` for an invalid header of ours.
    """
    known: Patience | None = None if notes is None else notes.get("patience")
    if known is None:
        known = _patience_of(headers, default_s)
        if notes is not None:
            notes["patience"] = known
    return known


def _patience_of(headers: Mapping[str, str], default_s: float | None) -> Patience:
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
        if _gives_up_early(headers) and (patience_s is None or patience_s > TRANSPORT_S):
            patience_s, counts_bytes = TRANSPORT_S, True
    retry_count = _retry_count(headers[RETRY_HEADER]) if RETRY_HEADER in headers else 0
    hint = hint_of(headers[HINT_HEADER]) if HINT_HEADER in headers else None
    limits = limits_of(headers) if LIMITS_HEADER in headers else None
    return Patience(patience_s, counts_bytes, retry_count, headers.get(IDEMPOTENCY_HEADER, ""), hint, limits)


def _gives_up_early(headers: Mapping[str, str]) -> bool:
    if RUNTIME_HEADER in headers:
        return headers[RUNTIME_HEADER].lower() == "node"
    agent = headers.get(USER_AGENT, "").lower()
    return any(name in agent for name in _GIVES_UP)


def hint_of(text: str) -> TurnHint:
    """Read the value of `X-Program-Hint`. Raises `RequestError` if it is invalid."""
    fields = [field.partition("=") for field in text.split(",")]
    said = {name.strip(): value.strip() for name, _, value in fields}
    try:
        seconds = said.pop("next_turn_in_s", None)
        next_turn_in_s = None if seconds is None else float(seconds)
        confidence_ratio, keep = float(said.pop("confidence", 1.0)), said.pop("keep", "")
    except ValueError:
        raise _wrong_hint(text) from None
    is_right = not said and keep in ("", RETAIN, OFFLOAD) and (keep or next_turn_in_s is not None)
    if not is_right or not 0 <= (next_turn_in_s or 0.0) <= MAX_NEXT_TURN_S or not 0 <= confidence_ratio <= 1:
        raise _wrong_hint(text)
    return TurnHint(next_turn_in_s, confidence_ratio, keep)


def _wrong_hint(text: str) -> RequestError:
    example = "next_turn_in_s=12.5, confidence=0.8"
    return RequestError(f"{HINT_HEADER} is like {example}, or keep=retain or keep=offload, not {text[:100]!r}")


MOST_COUNT: Final = 10**15
"""The largest limit: beyond it there is none in practice."""


def limits_of(headers: Mapping[str, str]) -> ProgramLimits:
    """Read `X-Program-Limits`. Raises `RequestError` if it is invalid, or stands there twice."""
    getall = getattr(headers, "getall", None)
    texts: Sequence[str] = [headers[LIMITS_HEADER]] if getall is None else getall(LIMITS_HEADER)
    fields = [field.partition("=") for field in ",".join(texts).split(",")]
    said = {name.strip(): value.strip() for name, _, value in fields}
    end = said.pop("end", "refuse")
    limits = ProgramLimits(
        _limit_count(said.pop("max_turns", None)),
        _limit_count(said.pop("max_tokens", None)),
        _limit_seconds(said.pop("max_age_s", None)),
        _limit_seconds(said.pop("deadline_s", None)),
        _limit_count(said.pop("turns", None)),
        end == "finish",
    )
    if said or end not in ("refuse", "finish") or len({name.strip() for name, _, _ in fields}) < len(fields):
        raise _wrong_limits()
    return limits


def _limit_count(text: str | None) -> int | None:
    if text is None:
        return None
    if not (text.isascii() and text.isdigit() and len(text) < 17 and 0 < int(text) <= MOST_COUNT):
        raise _wrong_limits()
    return int(text)


def _limit_seconds(text: str | None) -> float | None:
    seconds = None if text is None else _seconds(text)
    if text is not None and (seconds is None or seconds > MOST_COUNT):
        raise _wrong_limits()
    return seconds


def _wrong_limits() -> RequestError:
    return RequestError(
        f"{LIMITS_HEADER} is like max_turns=50, max_tokens=200000, max_age_s=3600, deadline_s=600, turns=20, "
        f"end=finish: each at most once, with a number over 0; end is refuse or finish"
    )


def _retry_count(text: str) -> int:
    return min(LARGEST_COUNT, int(text)) if text.isascii() and text.isdigit() and len(text) < 10 else 0


def _seconds(text: str) -> float | None:
    try:
        seconds = float(text)
    except ValueError:
        return None
    return seconds if 0 < seconds < inf else None
