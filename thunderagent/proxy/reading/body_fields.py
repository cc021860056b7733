"""The few fields of a request's body that matter: read in one pass, whatever else the body holds."""

# compiled: each turn passes here

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from difflib import get_close_matches
from typing import Any, Final, TypeGuard

import msgspec
from msgspec import Raw

from thunderagent.errors import BodyTooLargeError
from thunderagent.leases import TurnHint
from thunderagent.programs.messages import MAX_NEXT_TURN_S, OFFLOAD, RETAIN
from thunderagent.proxy.reading.dialects.structs import BodyFields, PromptFields
from thunderagent.proxy.reading.header_words import check_model
from thunderagent.proxy.reading.json_cost import COUNTED_BYTES, has_few_parts, list_of, others_run
from thunderagent.proxy.reading.media import NO_MEDIA, MediaFound, media_of
from thunderagent.proxy.reading.sse import UNREADABLE

OTHERS_FIELDS: Final[tuple[tuple[str, ...], ...]] = (
    ("session_id",),
    ("session_params", "session_id"),
    ("metadata", "program_id"),
    ("vllm_xargs", "program_id"),
    ("nvext", "agent_context", "session_id"),
    ("nvext", "agent_context", "program_id"),
    ("conversation_params", "conversation_id"),  # TensorRT-LLM, NeMo Gym
    ("litellm_session_id",),  # LiteLLM, Cline with it
)
"""Where else a body may name its program, as paths to the value."""

BUCKET_FIELDS: Final[tuple[tuple[str, ...], ...]] = (("metadata", "session_id"), ("prompt_cache_key",))
"""Where a body may name a bucket, which several programs may share: applications name their template, or their user."""

SIDE_CALL_TOKEN_FIELDS: Final[tuple[str, ...]] = ("tokens", "input", "prompt", "input_ids", "token_ids")
"""Fields of side calls that may hold many token ids: of detokenize, of embeddings, and as in turns."""

_BUILT_FIELDS: Final[tuple[str, ...]] = (
    "program_id",
    "docker_ids",
    "extra_body",
    "stream",
    "stream_options",
    "rid",
    "request_id",
    "previous_response_id",
    "user",
    "priority",
    "agent_hint",
    *dict.fromkeys(way[0] for way in (*OTHERS_FIELDS, *BUCKET_FIELDS)),
)
UNREAD: Final = BodyFields()
"""For an object that is too large for the slow parser."""
_decode_fields: Final = msgspec.json.Decoder(BodyFields).decode
_check_json: Final = msgspec.json.Decoder(msgspec.Raw).decode
_ListedFields: Final = msgspec.defstruct(
    "_ListedFields", [(name, msgspec.Raw, msgspec.Raw()) for name in _BUILT_FIELDS], bases=(PromptFields,)
)
_RawFields: Final = msgspec.defstruct("_RawFields", [("messages", msgspec.Raw, msgspec.Raw())], bases=(_ListedFields,))
_decode_listed_fields: Final = msgspec.json.Decoder(_ListedFields).decode
_decode_raw_fields: Final = msgspec.json.Decoder(_RawFields).decode
LARGE_FIELD_BYTES: Final = 64 * 1024
"""A larger value that is not a text is not built."""

_TEXT_MESSAGE: Final = re.compile(
    rb'\s*+\{(?:\s*+"(?:role|name|tool_call_id|id|type)"\s*+:\s*+"[^"\\]*+"\s*+,)*+\s*+"content"\s*+:\s*+["n]'
)
"""Beginning of a message whose content is a text, or null. Quotes in a text are escaped, so it holds no media mark."""

MAX_UNREAD_BYTES: Final = 4096
"""A body with no more than this beside its prompt and its tools has no media there."""

SLOWLY_READ_BYTES: Final = 2**20
"""Size limit for Python's own parser: 1 ms for a text, 0.1 s for a million empty lists."""

MENDED_BYTES: Final = 2 * 2**20
"""Size limit for mending a copy: 0.01 s for a text, 0.04 s for halves of pairs alone, 0.1 s if it is all `NaN`."""

_HALF_PAIR: Final = re.compile(
    rb"\\u[dD](?:[89abAB][0-9a-fA-F]{2}(?!\\u[dD][c-fC-F])"
    rb"|[c-fC-F][0-9a-fA-F]{2}(?<!\\u[dD][89abAB][0-9a-fA-F]{2}\\u[dD][c-fC-F][0-9a-fA-F]{2}))"
)
_NO_NUMBER: Final = re.compile(rb"(?:NaN|Infinity)(?=\s*[,}\]])")


def in_utf8(body: bytes) -> bytes:
    """Return a JSON body in UTF-16 or UTF-32, or with a byte order mark, as plain UTF-8, as engines read it.

    Any other is returned unchanged. One that begins with `{` and no zero byte need not be asked about.
    """
    encoding = json.detect_encoding(body)
    if encoding == "utf-8":
        return body
    try:
        plain = recoded(body, encoding)
        _check_json(plain)
    except (ValueError, RecursionError):
        return body
    return plain


def recoded(body: bytes, encoding: str) -> bytes:
    """Return a body in UTF-8, even if it is no JSON. Raises `UnicodeError`, and `BodyTooLargeError` for a large object.

    It would be there three times.
    """
    if len(body) <= COUNTED_BYTES:
        return body.decode(encoding).encode("utf-8", "surrogatepass")
    for at in range(0, len(body), LARGE_FIELD_BYTES):  # whose white space may be longer
        begin = body[at : at + LARGE_FIELD_BYTES].decode(encoding, "replace").lstrip("\ufeff \t\r\n\v\f")
        if begin.startswith(("{", "/", "#")):  # parsers accept comments before it
            raise BodyTooLargeError(f"a body in {encoding} has at most {COUNTED_BYTES} bytes: send UTF-8")
        if begin:
            break
    return body


def read_fields(body: bytes) -> BodyFields | None:
    """Read the fields; None if the body is not a JSON object.

    Engines read JSON with Python's own module or a similar one, which accepts `NaN` and halves of surrogate pairs
    (cut-off tool output has them). msgspec refuses those, so its refusals are read again, slowly, and without the
    prompt's fields. That builds the whole body as objects and blocks everything else meanwhile, on any thread. So of an
    object of more than `SLOWLY_READ_BYTES` a mended copy is read. If that is refused, too, or the object has more than
    `MENDED_BYTES`, only its path and headers tell its program.
    """
    try:
        return _decode_fields(body) if len(body) <= LARGE_FIELD_BYTES else _read_large(body)
    except UNREADABLE:
        pass
    if len(body) > SLOWLY_READ_BYTES:
        return _read_mended(body) if body[:64].lstrip()[:1] == b"{" else None
    try:
        value = json.loads(body.decode())
    except (ValueError, RecursionError):
        return None
    if not isinstance(value, dict):
        return None
    fields = BodyFields(**{name: value[name] for name in _BUILT_FIELDS if name in value})
    fields.model = Raw(json.dumps(value.get("model")).encode())
    return fields


def _read_mended(body: bytes) -> BodyFields:
    readable = mended(body)
    if readable is body:
        return UNREAD
    try:
        return _read_large(readable)
    except UNREADABLE:
        return UNREAD


def mended(body: bytes) -> bytes:
    """Return a copy of a body to read, not to send: without halves of surrogate pairs, `NaN` and `Infinity`.

    Its members and their order are those of the body. In a text, a `NaN` before a comma or a bracket is replaced, too.
    A body with nothing to mend, or of more than `MENDED_BYTES`, is returned itself.
    """
    if len(body) > MENDED_BYTES or b"\0" in body:  # the latter is no JSON for anybody
        return body
    marked = body.replace(rb"\\", b"\0\0")  # each other backslash begins an escape
    marked = _HALF_PAIR.sub(rb"\\ufffd", marked)
    return _NO_NUMBER.sub(b"0", marked).replace(b"\0\0", rb"\\")


_FORM_MODEL: Final = b'name="model"'
MAX_MODEL_CHARS: Final = 512
"""A longer name of a model is cut to one character more: no replica lists that."""

_FORM_VALUE: Final = re.compile(rb"\r\n\r\n([^\r\n]{1,512})\r\n")
FORM_ENDS_BYTES: Final = 64 * 1024
"""How much of a form is searched for the model's name, at its begin and at its end: a file is between."""


def model_named(model: Raw, body: bytes) -> str:
    """Return the model that a request names, by that field of its body, or by its form; empty if none.

    Raises `InvalidProgramIdError` if it has control characters.
    """
    if len(model) > COUNTED_BYTES:  # it is a name of nothing, and long to read
        return "?" * (MAX_MODEL_CHARS + 1)
    if model:
        try:
            name = msgspec.json.decode(model)
        except (ValueError, RecursionError):  # as the engine will say
            return ""
        return check_model(name[: MAX_MODEL_CHARS + 1]) if isinstance(name, str) else ""
    if body[:2] == b"--":
        for part in (body[:FORM_ENDS_BYTES], body[-FORM_ENDS_BYTES:]):
            at = part.find(_FORM_MODEL)
            value = _FORM_VALUE.match(part, at + len(_FORM_MODEL)) if at >= 0 else None
            if value is not None:
                return check_model(value[1].decode("utf-8", "replace"))
    return ""


def _read_large(body: bytes) -> BodyFields:
    """Read the fields of a large body without building large values as objects, which take many times their size.

    Such a value names no program. A text is built whatever its size.
    """
    others_run()
    has_few = has_few_parts(body)
    others_run()
    raw = _decode_listed_fields(body) if has_few else _decode_raw_fields(body)
    others_run()
    fields = BodyFields(**{name: getattr(raw, name) for name in PromptFields.__struct_fields__})
    if not has_few:  # each message may become an object of many times its bytes
        messages: Raw = getattr(raw, "messages")  # noqa: B009 - as below
        fields.messages = list_of(messages) if messages and not begins_with(messages, b"n") else None
    if priority := getattr(raw, "priority"):  # noqa: B009 - a struct that was made above
        fields.priority = priority  # only its presence matters
    for name in _BUILT_FIELDS:
        value = getattr(raw, name)
        if value and (len(value) <= LARGE_FIELD_BYTES or bytes(memoryview(value)[:1]) == b'"'):
            setattr(fields, name, msgspec.json.decode(value))
    return fields


def begins_with(value: bytes | memoryview, first: bytes) -> bool:
    """Return whether a raw value begins with this byte."""
    return bytes(memoryview(value)[:1]) == first


def media_in(body: bytes, fields: PromptFields) -> MediaFound:
    """Return what in a body with these fields is neither text nor token ids, as `media_of` does.

    Cost: a look at the beginning of each message if all of them are texts, however long they are.
    """
    unread_bytes, others = len(body), []
    if unread_bytes > MAX_UNREAD_BYTES:
        others_run()
    for message in fields.messages or ():
        unread_bytes -= len(message)
        if _TEXT_MESSAGE.match(message) is None:
            others.append(message)
    if unread_bytes > MAX_UNREAD_BYTES:
        unread_bytes -= len(fields.tools)
        for text in (fields.prompt, fields.text, fields.input, fields.system, fields.instructions):
            if begins_with(text, b'"'):
                unread_bytes -= len(text)
    if unread_bytes > MAX_UNREAD_BYTES:
        return media_of(body, fields.model)
    return media_of(b"".join(others), fields.model) if others else NO_MEDIA


# --- What bodies say of the next turn, in the words of engines and gateways

# None of these is settled: `agent_hint` is proposed for vLLM (RFC 52113: `cache_control` with a `ttl`, and
# `context_management` with `edits`), `vllm_xargs.agentic_context` is where clients put the same for engines that refuse
# unknown fields, as an object or as its text, and `nvext.agent_hints` is Dynamo's. So they are read for recognisable
# hints, anything else is ignored without an error, and the body goes on unchanged: an engine may know more.

MAX_TEXT_CHARS: Final = 4096
"""A longer text is not a hint."""

MAX_EDITS_COUNT: Final = 16
"""How many edits are read."""

_GIVES_AWAY: Final = frozenset({"offload", "evict"})


def hint_in(agent_hint: object, vllm_xargs: object, nvext: object) -> TurnHint | None:
    """Return the hint in these fields on the program's next turn; the first one with content counts."""
    for said in _said(agent_hint, vllm_xargs, nvext):
        hint = _of_next_turn(said) or _of_memory(said)
        if hint is not None:
            return hint
    return None


def _said(agent_hint: object, vllm_xargs: object, nvext: object) -> Iterator[dict[Any, Any]]:
    in_xargs = vllm_xargs.get("agentic_context") if isinstance(vllm_xargs, dict) else None
    if isinstance(in_xargs, str) and len(in_xargs) <= MAX_TEXT_CHARS:
        try:
            in_xargs = msgspec.json.decode(in_xargs)
        except (ValueError, RecursionError):  # half of a surrogate pair is a ValueError
            in_xargs = None
    in_nvext = nvext.get("agent_hints") if isinstance(nvext, dict) else None
    for said in (agent_hint, in_xargs, in_nvext):
        if isinstance(said, dict):
            yield said


def _of_next_turn(said: dict[Any, Any]) -> TurnHint | None:
    """Read our own words, as in `X-Program-Hint`."""
    next_turn_in_s, confidence_ratio = said.get("next_turn_in_s"), said.get("confidence", 1.0)
    if not _is_number(next_turn_in_s, MAX_NEXT_TURN_S) or not _is_number(confidence_ratio, 1.0):
        return None
    keep = said.get("keep")
    return TurnHint(next_turn_in_s, confidence_ratio, keep if keep in (RETAIN, OFFLOAD) else "")


def _of_memory(said: dict[Any, Any]) -> TurnHint | None:
    """Read what is wanted of the memory until then: of the whole context; edits of unknown parts count for it."""
    management = said.get("context_management")
    edits = management.get("edits") if isinstance(management, dict) else None
    for edit in edits[:MAX_EDITS_COUNT] if isinstance(edits, list) else ():
        of_all = isinstance(edit, dict) and edit.get("block_start") is None and edit.get("block_end") is None
        if of_all and isinstance(edit.get("type"), str) and edit["type"] in _GIVES_AWAY:
            return TurnHint(keep=OFFLOAD)
    control = said.get("cache_control")
    if isinstance(control, dict) and control.get("block_offset") is None:
        return TurnHint(keep=OFFLOAD if control.get("ttl") == 0 else RETAIN)
    if said.get("keep") in (RETAIN, OFFLOAD):
        return TurnHint(keep=said["keep"])
    return TurnHint(keep=RETAIN) if said.get("speculative_prefill") is True else None


def _is_number(value: object, most: float) -> TypeGuard[float]:
    return isinstance(value, int | float) and not isinstance(value, bool) and 0 <= value <= most


# --- Keys that are nearly ours

_PROGRAM_KEY: Final = re.compile(rb'(?<!\\)"(prog[a-z]{0,5}[-_ ]?ids?)"\s*:\s*["0-9]', re.IGNORECASE)
_BEGINS_PROGRAM_KEY: Final = (b'"prog', b'"Prog', b'"PROG')

_HINT_KEYS: Final = ("next_turn_in_s", "confidence", "keep")


def misspelt_in(body: bytes, agent_hint: object, *, is_named: bool) -> str:
    """Return what to tell a client of a misspelt key; empty if there is none.

    An engine may know the key, so it is no error, and the body goes on unchanged. A program's key is looked for only in
    a body that names none. Cost: a search for a word or two.
    """
    if isinstance(agent_hint, dict) and not any(key in agent_hint for key in _HINT_KEYS):
        for key in list(agent_hint)[:MAX_EDITS_COUNT]:
            if near := get_close_matches(str(key)[:50].lower(), _HINT_KEYS, 1, 0.8):
                return f"agent_hint has the key {_shown(key)}, which says nothing here; did you mean {near[0]}?"
    if is_named:
        return ""
    for word in _BEGINS_PROGRAM_KEY:
        at = body.find(word)
        if at >= 0 and (found := _PROGRAM_KEY.search(body, max(0, at - 1))) is not None:
            key = found[1].decode()
            if key != "program_id" and get_close_matches(key.lower(), ("program_id",), 1, 0.8):
                return f"the body has the key {_shown(key)}, which names no program; did you mean program_id?"
    return ""


def _shown(key: object) -> str:
    return ascii(str(key)[:50])
