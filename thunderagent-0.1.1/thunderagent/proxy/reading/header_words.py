"""What a request's headers say of its turn: found in one pass over them, whatever else they hold.

The header that names the program is found first; most requests have no other of these, and then nothing more is read.
"""

# compiled: it is asked of each turn

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from difflib import get_close_matches
from math import inf
from types import MappingProxyType
from typing import Any, Final, NamedTuple

from multidict import CIMultiDictProxy, istr

from thunderagent.errors import InvalidProgramIdError, RequestError
from thunderagent.faults import nearest_hint
from thunderagent.leases import TurnAsk
from thunderagent.programs.messages import OUTCOMES, ProgramLimits

MAX_PROGRAM_ID_BYTES: Final = 256

BRANCH_HEADER: Final = "X-Program-Branch"
PROGRAM_HEADERS: Final = {
    "X-Program-ID": BRANCH_HEADER,
    "X-Session-ID": BRANCH_HEADER,  # SkyRL, prime-rl, Harbor
    "X-SMG-Routing-Key": BRANCH_HEADER,  # slime, the gateway of SGLang
    "X-Session-Affinity": BRANCH_HEADER,
    "X-Dynamo-Session-ID": BRANCH_HEADER,
    "X-Claude-Code-Session-Id": "X-Claude-Code-Agent-Id",
    "Session-Id": "Thread-Id",  # Codex
    "Session_Id": "Thread-Id",
    "X-LiteLLM-Session-Id": BRANCH_HEADER,  # OpenHands, LiteLLM
    "X-LiteLLM-Trace-Id": BRANCH_HEADER,  # Cline, its session; LiteLLM takes it for one, too
    "Agent-Session-Id": BRANCH_HEADER,  # Goose
}
"""Headers that name the program, ours first, and those that name its branch beside them."""

FINAL_HEADERS = ("X-Program-Final", "X-Dynamo-Session-Final")
"""Say that a turn is the program's last."""

_SAID_FINAL: Final = {"1": True, "true": True, "0": False, "false": False, "": False}

OUR_HEADERS: Final = "X-Program-"
"""Prefix of our headers: an empty one is an error; other people's are ignored if empty."""

PARENT_BRANCH_HEADERS: Final = {
    "X-Claude-Code-Agent-Id": "X-Claude-Code-Parent-Agent-Id",
    "Thread-Id": "X-Codex-Parent-Thread-Id",
}
"""Headers that name a branch, and those of the branch that waits for it; without one it is the main branch."""

PARENT_HEADERS = (
    "X-Program-Parent",
    "X-Dynamo-Parent-Session-ID",
    "X-Parent-Session-Id",  # OpenCode
    "X-Codex-Parent-Thread-Id",
)
"""Name a program that waits for this one. A thread of Codex counts if it is no branch: if each has a session."""

TENANT_HEADER: Final = "X-Program-Tenant"
GROUP_HEADER: Final = "X-Program-Group"
ROLE_HEADER: Final = "X-Program-Role"
"""The agent of a program that sends the turn: what turns of that role generate is learned."""

OUTCOME_HEADER: Final = istr("X-Program-Outcome")
"""The outcome of a program, with its last turn or its release."""

REQUEST_ID_HEADER: Final = istr("X-Request-Id")

CLASS_HEADER: Final = istr("X-Program-Class")
"""The program's class: decides which sandboxes it gets."""

LIMITS_HEADER: Final = istr("X-Program-Limits")
"""What the program may use (`ProgramLimits`), with each of its turns and leases."""

_TOLD: Final = {"group_id": (GROUP_HEADER, "group id"), "role": (ROLE_HEADER, "role")}
"""Fields of `TurnAsk` for the scheduler alone: the header that has each, and what that is in an error's words."""

_SPELT: Final = {
    name.lower(): name
    for name in (
        *PROGRAM_HEADERS,
        *PROGRAM_HEADERS.values(),
        *FINAL_HEADERS,
        *PARENT_BRANCH_HEADERS.values(),
        *PARENT_HEADERS,
        *(TENANT_HEADER, CLASS_HEADER),
        *(header for header, _ in _TOLD.values()),
    )
}
"""The headers to look for, spelt as above, by lower-case name."""

_OURS, *_OTHERS = PROGRAM_HEADERS
_CONTROL: Final = re.compile(r"[\x00-\x1f\x7f-\x9f\u2028\u2029]")
"""Control characters, and Unicode's ends of lines: readers of logs and tables take them for their own."""

NOTHING_TOLD: Final[Mapping[str, str]] = MappingProxyType({})

_MEANT: Final = {
    **{
        word.lower(): f"X-Program-{word}"
        for word in (
            *("ID", "Branch", "Parent", "Final", "Tenant", "Outcome", "Class"),
            *("Patience", "Limits", "Staleness", "Prefix", "Hint"),
            *(header.removeprefix(OUR_HEADERS) for header, _ in _TOLD.values()),
        )
    },
    **{key: f"X-Program-Limits: {key}=..." for key in ("deadline_s", "max_turns", "max_tokens", "max_age_s")},
    **{key: f"X-Program-Hint: {key}=..." for key in ("next_turn_in_s", "keep", "confidence")},
}
"""What may be meant by a header of ours, by what follows `X-Program-`: it is that header, or a key of its value."""

_LEAST_NEAR: Final = 0.75
"""How near what follows must be to one of these."""

_LEAST_NEAR_WHOLE: Final = 0.85
"""The same for a header that does not begin like ours."""

Said = Mapping[str, Sequence[str]]
"""Headers of a turn that matter: their values, by name as spelt above."""


class Words(NamedTuple):
    """What headers say of a turn beside its program; empty if nothing."""

    branch_id: str = ""
    tenant: str = ""
    is_final: bool = False
    told: Mapping[str, str] = NOTHING_TOLD
    """Further fields of its `TurnAsk`, by name."""


NO_WORDS: Final = Words()


def heard_in(
    headers: CIMultiDictProxy[str], more_headers: Sequence[str] = (), notes: dict[str, Any] | None = None
) -> tuple[Said, str]:
    """Return the headers that matter, and which of them names the program; see the next two.

    `notes` are those of the head, if it was read before, always with the same `more_headers`.
    """
    known: tuple[Said, str] | None = None if notes is None else notes.get("heard")
    if known is None:
        said = said_in(headers, more_headers)
        known = said, program_header_of(said, more_headers)
        if notes is not None:
            notes["heard"] = known
    return known


def said_in(headers: CIMultiDictProxy[str], more_headers: Sequence[str] = ()) -> Said:
    """Return the headers that matter, and `more_headers` if present. Cost: one pass.

    Raises `RequestError` for a misspelt one of ours: what it says would be lost in silence.
    """
    spelt = _SPELT if not more_headers else {name.lower(): name for name in more_headers} | _SPELT
    said: dict[str, Sequence[str]] = {}
    for name in headers:
        lower = name.lower()
        if (known := spelt.get(lower)) is not None:
            if known not in said:
                said[known] = headers.getall(name)
        elif lower[:6] == "x-prog":
            _check_spelling(lower)
    return said


def _check_spelling(name: str) -> None:
    """Raise `RequestError` if a header, in lower case, is nearly one of ours. One that is near none is another's.

    `X-Program` is: clients tell with it who they are.
    """
    word = name.removeprefix("x-program-")
    if word in _MEANT or name == "x-program":
        return
    if word != name:
        near = get_close_matches(word.replace("-", "_"), _MEANT, 1, _LEAST_NEAR)
    else:
        near = [
            each.removeprefix("x-program-")
            for each in get_close_matches(name, [f"x-program-{each}" for each in _MEANT], 1, _LEAST_NEAR_WHOLE)
        ]
    if near:
        raise RequestError(f"there is no header {name[:50]!r}; did you mean {_MEANT[near[0]]}?")


def program_header_of(said: Said, more_headers: Sequence[str] = ()) -> str:
    """Return the header that names the program; empty if none does. An empty header of others does not count."""
    if _OURS in said or not said:
        return _OURS if said else ""
    more = (_SPELT.get(name.lower(), name) for name in more_headers)
    return next((name for name in (*more, *_OTHERS) if any(said.get(name, ()))), "")


def program_in(said: Said, header: str) -> str:
    """Return the program that a header names. Raises `InvalidProgramIdError`."""
    return check_program_id(_only_value(said[header], header))


def words_in(said: Said, header: str, program_id: str | None) -> Words:
    """Return what is said beside the program named by this header, if any. Raises `InvalidProgramIdError`."""
    branch_header = PROGRAM_HEADERS.get(header, BRANCH_HEADER)
    branch_id = _id_in(said, (BRANCH_HEADER, branch_header), "branch id")
    told = {field: word for field, (name, what) in _TOLD.items() if (word := _id_in(said, (name,), what))}
    parent_names: Sequence[str] = PARENT_HEADERS
    waits = PARENT_BRANCH_HEADERS.get(branch_header, "") if BRANCH_HEADER not in said else ""
    if waits and branch_id not in ("", program_id) and (waiting_id := _id_in(said, (waits,), "branch id")):
        told["parent_branch_id"], parent_names = waiting_id, PARENT_HEADERS[:-1]
    if parent_id := _id_in(said, parent_names, "program id"):
        told["parent_id"] = parent_id
    if said.get(CLASS_HEADER, ("",))[0]:
        told["program_class"] = _id_in(said, (CLASS_HEADER,), "program class")
    return Words(
        branch_id,
        tenant=_id_in(said, (TENANT_HEADER,), "tenant"),
        told=told,
        is_final=any(_is_final(said[name][0], name) for name in FINAL_HEADERS if name in said),
    )


def _is_final(value: str, header: str) -> bool:
    """Return whether a header says that a turn is its program's last; other clients' may hold anything."""
    word = value.lower()
    if word not in _SAID_FINAL and header == FINAL_HEADERS[0]:
        raise RequestError(f"{header} is 1 for a program's last turn, or 0, not {value[:50]!r}")
    return _SAID_FINAL.get(word, False)


def outcome_of(headers: Mapping[str, str]) -> str:
    """Return a program's outcome from its header; empty if missing. Raises `RequestError` for other words."""
    outcome = headers.get(OUTCOME_HEADER, "").strip().lower()
    if outcome and outcome not in OUTCOMES:
        raise RequestError(f"{OUTCOME_HEADER} is one of {', '.join(OUTCOMES)}, not {outcome!r}")
    return outcome


def check_program_id(value: object, what: str = "program id") -> str:
    """Return a program id, or another one, as text. Raises `InvalidProgramIdError` if it is invalid."""
    if type(value) is str and 0 < len(value) <= MAX_PROGRAM_ID_BYTES and value.isascii() and value.isprintable():
        return value
    if isinstance(value, int) and not isinstance(value, bool):
        value = str(value)
    if not isinstance(value, str) or not value:
        raise InvalidProgramIdError(f"a {what} must be text that is not empty")
    try:
        size_bytes = len(value.encode())
    except UnicodeEncodeError:  # bytes of a header that are not UTF-8
        raise InvalidProgramIdError(f"a {what} is UTF-8") from None
    if size_bytes > MAX_PROGRAM_ID_BYTES:
        raise InvalidProgramIdError(f"a {what} has at most {MAX_PROGRAM_ID_BYTES} bytes")
    if _CONTROL.search(value):
        raise InvalidProgramIdError(f"a {what} must not contain control characters")
    return value


def check_name(value: str, what: str = "name") -> str:
    """Return a name that may be empty, of a tenant, group, branch, role or tool. Raises as `check_program_id`."""
    return check_program_id(value, what) if value else value


def check_model(name: str) -> str:
    """Return the name of a model. Raises `InvalidProgramIdError` if it has control characters."""
    if not name.isprintable() and _CONTROL.search(name):
        raise InvalidProgramIdError("a model must not contain control characters")
    return name


def check_names(ask: TurnAsk) -> None:
    """Check all names in what another process asks for. Raises `InvalidProgramIdError`."""
    if ask.program_id is not None:
        check_program_id(ask.program_id)
    for name in (ask.branch_id, ask.parent_branch_id, ask.parent_id, ask.tenant, ask.group_id):
        check_name(name)
    check_name(ask.program_class)
    check_name(ask.role)
    check_model(ask.model)


def _id_in(said: Said, names: Sequence[str], what: str) -> str:
    """Return the id in the first of these headers that is present; empty if none is."""
    for name in names:
        if name in said and (name.startswith(OUR_HEADERS) or said[name][0]):
            return check_program_id(_only_value(said[name], name), what)
    return ""


def _only_value(values: Sequence[str], name: str) -> str:
    """Return a header's only value; with two, it would be unclear which one is meant."""
    if len(values) > 1:
        raise InvalidProgramIdError(f"the header {name} appears {len(values)} times")
    if not values[0]:
        raise InvalidProgramIdError(f"the header {name} is empty; leave it out, or give it a value")
    return values[0]


# --- What a program may use

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
        raise _wrong_limits(said)
    return limits


def _limit_count(text: str | None) -> int | None:
    if text is None:
        return None
    if not (text.isascii() and text.isdigit() and len(text) < 17 and 0 < int(text) <= MOST_COUNT):
        raise _wrong_limits()
    return int(text)


def _limit_seconds(text: str | None) -> float | None:
    seconds = None if text is None else seconds_of(text)
    if text is not None and (seconds is None or seconds > MOST_COUNT):
        raise _wrong_limits()
    return seconds


def _wrong_limits(unknown: Iterable[str] = ()) -> RequestError:
    key = wrong_key(unknown, ("max_turns", "max_tokens", "max_age_s", "deadline_s", "turns", "end"))
    return RequestError(
        f"{LIMITS_HEADER} is like max_turns=50, max_tokens=200000, max_age_s=3600, deadline_s=600, turns=20, "
        f"end=finish: each at most once, with a number over 0; end is refuse or finish{key}"
    )


def wrong_key(unknown: Iterable[str], known: Iterable[str]) -> str:
    """Return a clause for the first of the unknown keys, with the nearest right one; empty if there is none."""
    for key in filter(None, unknown):
        return f"; there is no key {key[:50]!r}{nearest_hint(key[:50], known)}"
    return ""


def seconds_of(text: str) -> float | None:
    """Return a number of seconds over 0 and below infinity; None if the text is none."""
    seconds = number_of(text)
    return seconds if seconds is not None and 0 < seconds < inf else None


def number_of(text: str) -> float | None:
    """Return a number as HTTP and JSON write it, or one that is not finite; None if the text is none.

    Python takes further digits of Unicode, and underscores between them: other readers take those for something else.
    """
    if not text.isascii() or "_" in text:
        return None
    try:
        return float(text)
    except ValueError:
        return None
