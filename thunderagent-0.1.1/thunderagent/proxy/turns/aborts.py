"""An engine's answer to a request that it aborts before it ran: written here for a turn that is aborted while held.

Trainers with tokens in and tokens out abort everything before they change the weights, and send the prompt again with
what came so far. They recognise an abort by its finish reason. So a held turn of theirs must get that, in the format of
the engine that it was meant for (SGLang: `TokenizerManager._handle_abort_req`; vLLM 0.32:
`entrypoints/scale_out/token_in_token_out/protocol.py`, `entrypoints/openai/completion/protocol.py`). A single turn may
be aborted by its id, in any API.
"""

from __future__ import annotations

import re
import time
import uuid
from collections.abc import Callable, Mapping
from itertools import islice
from typing import Any, NamedTuple

import msgspec
from msgspec import Raw

from thunderagent.bodies import flag_of
from thunderagent.proxy.reading.body_fields import mended
from thunderagent.proxy.reading.outline import Outline
from thunderagent.proxy.reading.prefix import holds_token_ids
from thunderagent.proxy.reading.sse import UNREADABLE

SGLANG_PATH = "/generate"
VLLM_PATH = "/inference/v1/generate"
SKYRL_PATH = "/skyrl/v1/generate"
COMPLETIONS_PATH = "/v1/completions"
CHAT_PATH = "/v1/chat/completions"

ABORTABLE_PATHS = frozenset({SGLANG_PATH, VLLM_PATH, SKYRL_PATH})
"""Where a turn may be aborted while it is held; elsewhere one may that has token ids as its prompt.

Turns with text stay held, because their clients do not know aborts.
"""

MOST_CHOICES_COUNT = 2**16
"""Of an answer: no engine makes more for one request, and its client could ask for any number."""

_MESSAGE = "Abort in waiting queue"

Json = dict[str, Any]


_PROMPT_FIELDS = ("input_ids", "token_ids", "prompt")
_FLAT_LIST = re.compile(rb"\[\s*-?[0-9]")
_decode_list = msgspec.json.Decoder(list[Raw]).decode


class _Fields(msgspec.Struct):
    """The parts of a request that the answer repeats or depends on; prompts are counted, not built."""

    rid: Any = None
    request_id: Any = None
    input_ids: Raw = Raw()
    token_ids: Raw = Raw()
    prompt: Raw = Raw()
    text: Raw = Raw()
    model: Any = None
    sampling_params: Any = None
    n: Any = None
    logprobs: Any = None
    return_logprob: Any = None
    stream: Any = None
    stream_options: Any = None


_decode_fields = msgspec.json.Decoder(_Fields).decode


class AbortAnswer(NamedTuple):
    """A whole answer: its content type and its bytes."""

    content_type: str
    body: bytes


def abort_answer(path: str, body: bytes) -> AbortAnswer | None:
    """Return the engine's answer to this request had it been aborted before its first token.

    None in an API in which that cannot be said.
    """
    build = _BUILDERS.get(path)
    if build is None:
        return None
    fields = _read(body)
    whole, events = build(fields)
    if flag_of(fields.stream) is not True:
        return AbortAnswer("application/json", msgspec.json.encode(whole))
    data = b"".join(b"data: " + msgspec.json.encode(event) + b"\n\n" for event in events)
    return AbortAnswer("text/event-stream", data + b"data: [DONE]\n\n")


def _read(body: bytes) -> _Fields:
    outline = Outline.of(body, _PROMPT_FIELDS)
    try:
        fields = _decode_fields(outline.text)
    except UNREADABLE:
        try:
            fields = _decode_fields(mended(outline.text))
        except UNREADABLE:
            return _Fields()
    for name in _PROMPT_FIELDS:
        if outline.is_placeholder(getattr(fields, name)):
            setattr(fields, name, Raw(outline.token_ids))
    return fields


def _count(value: object) -> int:
    return value if isinstance(value, int) and 1 <= value <= 1024 else 1


def _prompts(prompt: Raw) -> tuple[list[int], bool]:
    """Return the tokens of each prompt, and whether it is a list of them; a text counts as empty."""
    if _FLAT_LIST.match(prompt) is not None:
        return [bytes(prompt).count(b",") + 1], False
    try:
        prompts = _decode_list(prompt)
    except UNREADABLE:
        return [0], False
    return [_prompts(each)[0][0] for each in prompts] or [0], bool(prompts)


def _sampling_count(fields: _Fields) -> int:
    return _count(fields.sampling_params.get("n")) if isinstance(fields.sampling_params, dict) else 1


def _sglang(fields: _Fields) -> tuple[object, list[Json]]:
    copies_count = _sampling_count(fields)
    prompt_sizes, is_batch = _prompts(fields.input_ids if holds_token_ids(fields.input_ids) else fields.text)
    sizes = list(islice((size for size in prompt_sizes for _ in range(copies_count)), MOST_CHOICES_COUNT))
    is_batch = is_batch or copies_count > 1
    rids = fields.rid if isinstance(fields.rid, list) else [fields.rid] * (not is_batch)
    results: list[Json] = []
    for index, prompt_tokens in enumerate(sizes):
        rid = rids[index] if index < len(rids) and rids[index] else uuid.uuid4().hex
        meta_info: Json = {
            "id": rid,
            "finish_reason": {"type": "abort", "message": _MESSAGE},
            "prompt_tokens": prompt_tokens,
            "completion_tokens": 0,
            "cached_tokens": 0,
        }
        if fields.return_logprob:
            meta_info |= {"input_token_logprobs": [], "output_token_logprobs": []}
        results.append({"text": "", "output_ids": [], "meta_info": meta_info})
    if not is_batch:
        return results[0], results
    return results, [{**result, "index": index} for index, result in enumerate(results)]


def _vllm(fields: _Fields) -> tuple[object, list[Json]]:
    head: Json = {"request_id": fields.request_id or uuid.uuid4().hex}
    choices: list[Json] = [
        {"index": index, "logprobs": None, "finish_reason": "abort", "stop_reason": None, "token_ids": []}
        for index in range(_sampling_count(fields))
    ]
    usage = _usage(sum(_prompts(fields.token_ids)[0]))
    whole = {**head, "model": fields.model, "created": int(time.time()), "choices": choices, "usage": usage}
    return whole, [{**head, "choices": [choice]} for choice in choices] + _usage_event(fields, head, usage)


def _completion(fields: _Fields) -> tuple[object, list[Json]]:
    sizes, _ = _prompts(fields.prompt)
    head: Json = {
        "id": f"cmpl-{uuid.uuid4().hex}",
        "object": "text_completion",
        "created": int(time.time()),
        "model": fields.model,
    }
    logprobs: Json | None = None
    if fields.logprobs is not None:
        logprobs = {"text_offset": [], "token_logprobs": [], "tokens": [], "top_logprobs": []}
    choices: list[Json] = [
        {"index": index, "text": "", "logprobs": logprobs, "finish_reason": "abort", "stop_reason": None}
        for index in range(min(len(sizes) * _count(fields.n), MOST_CHOICES_COUNT))
    ]
    usage = _usage(sum(sizes))
    events = [{**head, "choices": [choice]} for choice in choices] + _usage_event(fields, head, usage)
    return {**head, "choices": choices, "usage": usage}, events


def _chat(fields: _Fields) -> tuple[object, list[Json]]:
    head: Json = {
        "id": fields.rid or f"chatcmpl-{uuid.uuid4().hex}",
        "created": int(time.time()),
        "model": fields.model,
    }
    usage, indexes = _usage(0), range(_count(fields.n))
    message: Json = {"role": "assistant", "content": ""}
    ends: Json = {"logprobs": None, "finish_reason": "abort"}
    choices: list[Json] = [{"index": index, "message": message, **ends} for index in indexes]
    head["object"] = "chat.completion.chunk"
    events: list[Json] = [{**head, "choices": [{"index": index, "delta": message, **ends}]} for index in indexes]
    events += _usage_event(fields, head, usage)
    return {**head, "object": "chat.completion", "choices": choices, "usage": usage}, events


_BUILDERS: Mapping[str, Callable[[_Fields], tuple[object, list[Json]]]] = {
    SGLANG_PATH: _sglang,
    VLLM_PATH: _vllm,
    SKYRL_PATH: _vllm,
    COMPLETIONS_PATH: _completion,
    CHAT_PATH: _chat,
}


def _usage(prompt_tokens: int) -> Json:
    return {"prompt_tokens": prompt_tokens, "total_tokens": prompt_tokens, "completion_tokens": 0}


def _usage_event(fields: _Fields, head: Json, usage: Json) -> list[Json]:
    options = fields.stream_options
    asked = isinstance(options, dict) and flag_of(options.get("include_usage")) is True
    return [{**head, "choices": [], "usage": usage}] if asked else []
