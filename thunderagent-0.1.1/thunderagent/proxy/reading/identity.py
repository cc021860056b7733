"""Whose turn a request is, and which parts are ours: found without parsing messages, edited by splicing bytes.

The first hit wins: the path (`/p/{program_id}/v1/...`), then headers, then fields of the body: ours, and those in which
agent frameworks, coding agents and trainers name a request's conversation. A field that several agents may share names
a bucket: its programs are told apart by their prompts (`inference.py`). Only fields for a proxy, `program_id` and
`docker_ids`, are removed from the body, and only their bytes: whatever else the client sent reaches the engine
unchanged. Others' ids of requests, traces or correlations never name a program: they change with each turn. The trace
of LiteLLM is none of these: it is its word for a session, too.
"""

# compiled: it is asked of each turn

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Any, Final, NamedTuple, Protocol

import msgspec
from msgspec import UNSET, Raw
from multidict import CIMultiDictProxy

from thunderagent.bodies import flag_of
from thunderagent.errors import InvalidProgramIdError, RequestError
from thunderagent.leases import TurnHint
from thunderagent.programs.messages import PrefixCut
from thunderagent.proxy.reading.body_fields import (
    BUCKET_FIELDS,
    OTHERS_FIELDS,
    SIDE_CALL_TOKEN_FIELDS,
    UNREAD,
    hint_in,
    media_in,
    misspelt_in,
    model_named,
    read_fields,
    recoded,
)
from thunderagent.proxy.reading.dialects.base import Dialect
from thunderagent.proxy.reading.dialects.openai import OpenAI
from thunderagent.proxy.reading.dialects.structs import BodyFields
from thunderagent.proxy.reading.header_words import (
    NO_WORDS,
    NOTHING_TOLD,
    REQUEST_ID_HEADER,
    Said,
    check_program_id,
    heard_in,
    outcome_of,
    program_in,
    words_in,
)
from thunderagent.proxy.reading.json_cost import COUNTED_BYTES, check_cost
from thunderagent.proxy.reading.json_splice import (
    has_member,
    is_spelt_as_json,
    remove_member,
    set_include_usage,
    set_value,
)
from thunderagent.proxy.reading.media import NO_MEDIA, MediaFound
from thunderagent.proxy.reading.outline import MIN_BODY_BYTES, Outline
from thunderagent.proxy.reading.prefix import holds_token_ids, prefix_of

_OPENAI: Final = OpenAI()

OURS: Final = ("program_id", "docker_ids")
"""What is removed from a body, and from its `extra_body`."""

WITH_USAGE: Final = {"include_usage": True}
"""What most clients want of a stream, if anything."""

MAX_DOCKER_IDS_COUNT: Final = 64
"""Further ones of a body are ignored."""

MAX_ID_CHARS: Final = 256
"""A longer id of a request is not kept: nobody could abort it by that."""

_NO_MODEL: Final = Raw()


class TurnRequest:
    """What a request on a turn's endpoint asks for, and the bytes to forward.

    `usage_added` says that usage was requested on the client's behalf, so its event must be removed again. `prefix` are
    the places up to which other prompts may be the same; an anonymous turn has none. A body that continues an earlier
    response holds only the end of its prompt, so its size says nothing, and it has no such places. (A tuple with names
    is made by an interpreted function, and each of its fields is looked up.)
    """

    def __init__(
        self,
        program_id: str | None,
        source: str,
        branch_id: str,
        body: bytes,
        *,
        usage_added: bool,
        prefix: tuple[PrefixCut, ...],
        is_final: bool = False,
        has_whole_prompt: bool = True,
        tenant: str = "",
        told: Mapping[str, str] = NOTHING_TOLD,
        streams: bool = False,
        previous_response_id: str = "",
        has_token_prompt: bool = False,
        outcome: str = "",
        told_id: str = "",
        is_unknown: bool = False,
        media: MediaFound = NO_MEDIA,
        model: Raw = _NO_MODEL,
        hint: TurnHint | None = None,
        engine_request_id: str = "",
        bucket: str = "",
        docker_ids: tuple[str, ...] = (),
        note: str = "",
    ) -> None:
        """Hold these."""
        self.program_id = program_id
        self.source = source
        self.branch_id = branch_id
        self.body = body
        self.usage_added = usage_added
        self.prefix = prefix
        self.is_final = is_final
        self.has_whole_prompt = has_whole_prompt
        self.tenant = tenant
        self.told = told
        """Further fields of its `TurnAsk`, which its headers say and nobody reads on the way."""
        self.streams = streams
        self.previous_response_id = previous_response_id
        self.has_token_prompt = has_token_prompt
        """Whether its `prompt` is token ids rather than text."""
        self.outcome = outcome
        self.told_id = told_id
        """The program named by an anonymous turn."""
        self.is_unknown = is_unknown
        """Whether its API is unknown to us: then it may do more than generate."""
        self.media = media
        """The parts of the body that are not text."""
        self.model = model
        """The body's field of that name, as sent; see `model_named`."""
        self.hint = hint
        """The body's hint on the program's next turn."""
        self.engine_request_id = engine_request_id
        """The client's own id for the request, by which engines abort it; empty if it gave none."""
        self.bucket = bucket
        """What several programs may share, if nothing names its program: that is inferred among those of the bucket."""
        self.docker_ids = docker_ids
        """Containers that are to go with its program."""
        self.note = note
        """What its client is told of a key of its body that is nearly one of ours; empty if there is none."""


class SideCallRequest(NamedTuple):
    """Whose request it is that is not a turn, and the bytes to forward."""

    program_id: str | None
    source: str
    body: bytes
    model: Raw = Raw()


class Tokens(Protocol):
    """Bearer tokens that name programs."""

    def token_of(self, program_id: str) -> str:
        """Return a live program's token."""

    def named_by(self, headers: Mapping[str, str]) -> str | None:
        """Return the program that a request's token names; None if it has none."""


class IdentityRules(NamedTuple):
    """What else may name a program, if the operator wants that.

    `program_headers` do, after ours and before all others; then a bucket, if `bucket_names_program`; then the body's
    `user`, if `user_names_program`; then a bearer token of `tokens`. A turn that none of them names may still belong to
    a program: with `infers_buckets` if it names a bucket, with `infers_programs` in any case. With `drops_priority` a
    body's `priority` is cut out: it would put the request before those of others.
    """

    program_headers: Sequence[str] = ()
    user_names_program: bool = False
    tokens: Tokens | None = None
    infers_programs: bool = False
    drops_priority: bool = False
    bucket_names_program: bool = False
    infers_buckets: bool = True
    reads_prefixes: bool = True
    """Whether anybody wants to know where a prompt may share a prefix."""
    model_aliases: Mapping[str, str] = MappingProxyType({})
    """Model names for clients, and those that engines serve: bodies are forwarded with the latter."""


NO_RULES: Final = IdentityRules()


def identify(
    path_id: str | None,
    headers: CIMultiDictProxy[str],
    body: bytes,
    rules: IdentityRules = NO_RULES,
    dialect: Dialect = _OPENAI,
    notes: dict[str, Any] | None = None,
) -> TurnRequest | None:
    """Find whose turn a request is; None if its body is not a JSON object, which the engine judges.

    `notes` are those of its head, if headers were read before.

    Cost: one pass over the body that builds only the fields above and skips large lists of token ids, and one that
    hashes the prompt. Raises `InvalidProgramIdError`, also for a header that is empty or repeated.
    """
    outline = None if len(body) < MIN_BODY_BYTES else Outline.of(body, dialect.token_id_fields)
    text = body if outline is None else outline.text
    if len(text) > COUNTED_BYTES:
        check_cost(text)
    fields = read_fields(text)
    if fields is None:
        return None
    heard: tuple[Said, str] | None = None if notes is None else notes.get("heard")
    said, header = heard or heard_in(headers, rules.program_headers, notes)
    program_id, source = _program_of(path_id, headers, said, header, fields, rules)
    bucket = ""
    if program_id is None and rules.infers_buckets and (fields.prompt_cache_key is not None or fields.metadata):
        bucket, source = _bucket_of(fields) or ("", source)
    words = NO_WORDS if len(said) == (header in said) else words_in(said, header, program_id)
    streams = fields.stream is True or (bool(fields.stream) and flag_of(fields.stream) is True)
    told = _without_ours(text, fields, rules)
    wish = fields.stream_options
    usage_added = streams and dialect.asks_for_usage and wish != WITH_USAGE and _leaves_usage_out(wish)
    if usage_added:
        told = set_include_usage(told, fields.stream_options)
    if told is not text:
        body = told if outline is None else outline.filled(told)
    previous_id = fields.previous_response_id
    media = media_in(text, fields)
    prefix: tuple[PrefixCut, ...] = ()
    if previous_id is None and rules.reads_prefixes and (program_id is not None or bucket or rules.infers_programs):
        prefix = prefix_of(fields, outline, has_media=bool(media.size_bytes))
    hint = None
    if fields.agent_hint is not None or fields.vllm_xargs is not None or fields.nvext is not None:
        hint = hint_in(fields.agent_hint, fields.vllm_xargs, fields.nvext)
    engine_id: object = fields.rid  # SGLang's; then vLLM's header, which overrides its field
    if not isinstance(engine_id, str):
        engine_id = headers.get(REQUEST_ID_HEADER) or fields.request_id
    note = ""
    if program_id is None or fields.agent_hint is not None:
        note = misspelt_in(text, fields.agent_hint, is_named=program_id is not None or bool(bucket))
    return TurnRequest(
        program_id,
        source,
        words.branch_id,
        body,
        usage_added=usage_added,
        prefix=prefix,
        is_final=words.is_final,
        has_whole_prompt=previous_id is None,
        tenant=words.tenant,
        told=words.told,
        streams=streams,
        previous_response_id=previous_id if isinstance(previous_id, str) else "",
        has_token_prompt=bool(fields.prompt) and holds_token_ids(fields.prompt),
        outcome=outcome_of(headers) if words.is_final else "",
        media=media,
        model=fields.model,
        hint=hint,
        engine_request_id=engine_id if isinstance(engine_id, str) and len(engine_id) <= MAX_ID_CHARS else "",
        bucket=bucket,
        docker_ids=() if fields.docker_ids is UNSET and fields.extra_body is None else _docker_ids(fields),
        note=note,
    )


def identify_side_call(
    path_id: str | None, headers: CIMultiDictProxy[str], body: bytes, rules: IdentityRules = NO_RULES
) -> SideCallRequest:
    """Find whose side call a request is; a body that is not a JSON object is ignored, and unchanged.

    Cost: one pass over the body, which skips a large list of token ids. Raises `InvalidProgramIdError`.
    """
    outline = Outline.of(body, SIDE_CALL_TOKEN_FIELDS)
    check_cost(outline.text)
    fields = read_fields(outline.text) if body else None
    said, header = heard_in(headers, rules.program_headers)
    program_id, source = _program_of(path_id, headers, said, header, fields or BodyFields(), rules)
    if fields is not None:
        text = _without_ours(outline.text, fields, rules)
        if text is not outline.text:
            body = outline.filled(text)
    elif rules.drops_priority:
        body = _without_priority_unread(body)
    return SideCallRequest(program_id, source, body, fields.model if fields is not None else Raw())


def _without_priority_unread(body: bytes) -> bytes:
    """Return an unread body without its `priority`: an engine's parser may accept more than ours.

    Raises `RequestError` for an object in which nobody can say where its keys are: other quotes, no end, no text.
    """
    try:
        encoding = json.detect_encoding(body)
        plain = body if encoding == "utf-8" and len(body) > COUNTED_BYTES else recoded(body, encoding)
    except ValueError:
        plain = body
    first = plain.lstrip(_BEFORE_OBJECTS)[:1]
    if not first or first not in _BEGIN_OBJECTS:
        return body
    try:
        if is_spelt_as_json(plain):
            return remove_member(plain, ("priority",)) if has_member(plain, "priority") else body
    except ValueError:  # it has no end
        pass
    raise RequestError("the body cannot be read as JSON, so nobody can say which priority it asks for")


_BEFORE_OBJECTS: Final = b" \t\r\n\x0b\x0c\xef\xbb\xbf"
_BEGIN_OBJECTS: Final = b"{/#"
"""What an object begins with, or a comment before it, which some parsers accept."""


def _without_ours(text: bytes, fields: BodyFields, rules: IdentityRules) -> bytes:
    """Return a body without the fields that we defined, and edited by `rules`; the same object if unchanged.

    An alias of a model is changed in `fields`, too.
    """
    if fields is UNREAD:
        return _without_priority_unread(text) if rules.drops_priority else text
    if rules.model_aliases and (served := rules.model_aliases.get(model_named(fields.model, b""))) is not None:
        fields.model = Raw(msgspec.json.encode(served))
        text = set_value(text, "model", bytes(fields.model))
    if rules.drops_priority and fields.priority is not UNSET:
        text = remove_member(text, ("priority",))
    if fields.program_id is not UNSET:
        text = remove_member(text, ("program_id",))
    if fields.docker_ids is not UNSET:
        text = remove_member(text, ("docker_ids",))
    if isinstance(fields.extra_body, dict):
        for name in OURS:
            if name in fields.extra_body:
                text = remove_member(text, ("extra_body", name))
    return text


def _docker_ids(fields: BodyFields) -> tuple[str, ...]:
    """Return the containers that a body names; what is no list of names is ignored."""
    named = fields.docker_ids
    if named is UNSET:
        named = fields.extra_body.get("docker_ids") if isinstance(fields.extra_body, dict) else None
    if not isinstance(named, list):
        return ()
    return tuple(
        each for each in named[:MAX_DOCKER_IDS_COUNT] if isinstance(each, str) and 0 < len(each) <= MAX_ID_CHARS
    )


def _program_of(
    path_id: str | None,
    headers: CIMultiDictProxy[str],
    said: Said,
    header: str,
    fields: BodyFields,
    rules: IdentityRules,
) -> tuple[str | None, str]:
    if path_id is not None:
        return check_program_id(path_id), "path"
    if header:
        return program_in(said, header), header.lower()
    if fields.program_id is not None and fields.program_id is not UNSET:
        return check_program_id(fields.program_id), "body"
    if isinstance(fields.extra_body, dict) and fields.extra_body.get("program_id") is not None:
        return check_program_id(fields.extra_body["program_id"]), "extra_body"
    for way in OTHERS_FIELDS:
        if (named := _id_at(fields, way)) is not None:
            return named, ".".join(way)
    if rules.bucket_names_program and (found := _bucket_of(fields)) is not None:
        return found
    if rules.user_names_program and (named := _id_at(fields, ("user",))) is not None:
        return named, "user"
    if rules.tokens is not None and (named := rules.tokens.named_by(headers)) is not None:
        return check_program_id(named), "bearer"
    return None, "anonymous"


def _bucket_of(fields: BodyFields) -> tuple[str, str] | None:
    """Return the first bucket that a body names, and by which field; None if it names none."""
    for way in BUCKET_FIELDS:
        if (named := _id_at(fields, way)) is not None:
            return named, ".".join(way)
    return None


def _id_at(fields: BodyFields, way: tuple[str, ...]) -> str | None:
    """Return the id in somebody else's field; an invalid value there is ignored, not an error."""
    value = getattr(fields, way[0])
    for name in way[1:]:
        value = value.get(name) if isinstance(value, dict) else None
    try:
        return check_program_id(value)
    except InvalidProgramIdError:
        return None


def _leaves_usage_out(stream_options: object) -> bool:
    """Return whether a stream as requested has no usage; odd values are the engine's to judge."""
    if isinstance(stream_options, dict):
        wish = stream_options.get("include_usage")
        return wish is None or (wish is not True and flag_of(wish) is False)
    return stream_options is None
