"""SGLang: how it is told that a client left, and that a program ended.

Theory of operation
-------------------
**Leaving.** Some versions notice a closed connection late (a stream only 2 s after it) or not at all, and generate on
for nobody. `/abort_request {"rid"}` ends a request by its id. So a turn gets an id of ours, as the body's field `rid`,
where the client sent none. SGLang aborts whatever id *begins* with the one it is given, in newer versions (0.5.23) only
if there is a request of just that id: ours are as long as its own (32 hex digits), so none begins with another. The
answer then shows ours where it would show one that SGLang made up: as `id`, or as `meta_info.id`.

A request of several prompts or samples gets none: SGLang would spread an id over them, and older versions refuse that.

**Ending.** With `--enable-session-radix-cache` SGLang knows whose KV it holds by the field `session_id`, keeps that
longer than what is nobody's, and lets go of it at `/close_session`. The field is put in only if that is wished for.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Final
from uuid import uuid4

import msgspec
from msgspec import Raw

from thunderagent.backends.base import NamedTurn, Notice

PATHS: Final = frozenset({"/generate", "/v1/chat/completions", "/v1/completions"})
"""Where a body may have `rid` and `session_id`."""

_SEVERAL: Final = re.compile(rb'\s*\[\s*["\[]')
"""A list of texts, or of lists: several prompts."""

_ABSENT: Final = Raw()
_ONE: Final = (b"", b"1", b"null")


class _Shape(msgspec.Struct):
    """What tells how many requests a body is, and the client's own names."""

    rid: Raw = _ABSENT
    session_id: Raw = _ABSENT
    session_params: Raw = _ABSENT
    n: Raw = _ABSENT
    sampling_params: Raw = _ABSENT
    messages: Raw = _ABSENT
    prompt: Raw = _ABSENT
    text: Raw = _ABSENT
    input_ids: Raw = _ABSENT


class _Sampling(msgspec.Struct):
    n: Raw = _ABSENT


_decode_shape = msgspec.json.Decoder(_Shape).decode
_decode_sampling = msgspec.json.Decoder(_Sampling).decode


@dataclass(frozen=True, slots=True)
class SglangNotices:
    """Notices for SGLang."""

    def name_turn(self, path: str, body: bytes, program_id: str | None, *, tags_programs: bool) -> NamedTurn:
        """Put `rid`, and `session_id` if wanted, at the front of a body.

        A body with several requests, or an unreadable one, is left unchanged. One pass that builds nothing: 1 ms per
        MB.
        """
        if path not in PATHS:
            return NamedTurn(body)
        shape = _shape_of(body)
        if shape is None:
            return NamedTurn(body)
        names: dict[str, str] = {}
        if not bytes(shape.rid):
            names["rid"] = uuid4().hex
        tag = msgspec.json.encode(program_id) if program_id is not None else None
        is_tagged = tag is not None and bytes(shape.session_id) == tag
        other_tag = bytes(shape.session_id) or bytes(shape.session_params)  # SGLang rejects both together
        if tags_programs and program_id is not None and not other_tag:
            names["session_id"] = program_id
            is_tagged = True
        if not names:
            return NamedTurn(body, is_tagged=is_tagged)
        opening = body.index(b"{") + 1
        named = b"".join((body[:opening], msgspec.json.encode(names)[1:-1], b",", memoryview(body)[opening:]))
        return NamedTurn(named, names.get("rid", ""), is_tagged)

    def turn_left(self, engine_request_id: str) -> Notice:
        """Return the abort of a request."""
        return Notice("/abort_request", msgspec.json.encode({"rid": engine_request_id}))

    def program_ended(self, program_id: str) -> Notice:
        """Return the notice that frees a program's KV cache; 200 for an unknown one."""
        return Notice("/close_session", msgspec.json.encode({"session_id": program_id}))


def _shape_of(body: bytes) -> _Shape | None:
    """Return the names in a body; None if it is several requests, or unreadable."""
    try:
        shape = _decode_shape(body)
        return shape if _is_single(shape) else None
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return None


def _is_single(shape: _Shape) -> bool:
    """Return whether a body is one request, with one prompt and one sample."""
    samples = _decode_sampling(shape.sampling_params).n if _is_given(shape.sampling_params) else _ABSENT
    if bytes(shape.n) not in _ONE or bytes(samples) not in _ONE:
        return False
    prompts = [prompt for prompt in (shape.messages, shape.prompt, shape.text, shape.input_ids) if _is_given(prompt)]
    return len(prompts) == 1 and (prompts[0] is shape.messages or _SEVERAL.match(prompts[0]) is None)


def _is_given(value: Raw) -> bool:
    return bytes(memoryview(value)[:4]) not in (b"", b"null")
