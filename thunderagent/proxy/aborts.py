"""What an engine answers for a request that it aborts before it ran: said here for a turn that is aborted while held.

Trainers that put in tokens and take out tokens abort everything before they change the weights, and send the prompt
again with what came so far. They know an abort by its finish reason, so a held turn of theirs must get that, in the
words of the engine that it was meant for (SGLang: `TokenizerManager._handle_abort_req`; vLLM 0.32:
`entrypoints/scale_out/token_in_token_out/protocol.py`, `entrypoints/openai/completion/protocol.py`).
"""

from __future__ import annotations

import time
import uuid
from collections.abc import Callable
from typing import Any, NamedTuple

import msgspec

SGLANG_PATH = "/generate"
VLLM_PATH = "/inference/v1/generate"
SKYRL_PATH = "/skyrl/v1/generate"
COMPLETIONS_PATH = "/v1/completions"

_MESSAGE = "Abort in waiting queue"

Json = dict[str, Any]


class _Fields(msgspec.Struct):
    """What the answer repeats of a request, or depends on."""

    rid: Any = None
    request_id: Any = None
    input_ids: Any = None
    token_ids: Any = None
    prompt: Any = None
    text: Any = None
    model: Any = None
    sampling_params: Any = None
    n: Any = None
    logprobs: Any = None
    return_logprob: Any = None
    stream: Any = None
    stream_options: Any = None


class AbortAnswer(NamedTuple):
    """A whole answer: its content type and its bytes."""

    content_type: str
    body: bytes


def abortable(path: str, body: bytes) -> Callable[[], bool] | None:
    """Return what says whether a turn may be aborted while it is held; None if it never may.

    Turns with tokens in may, those with text in stay held: who sent them does not know what an abort is.
    """
    path = path.partition("?")[0]
    if path in (SGLANG_PATH, VLLM_PATH, SKYRL_PATH):
        return lambda: True
    return (lambda: _is_tokens(_read(body).prompt)) if path == COMPLETIONS_PATH else None


def abort_answer(path: str, body: bytes) -> AbortAnswer:
    """Return what the engine would answer had it aborted this request before its first token."""
    path = path.partition("?")[0]
    fields = _read(body)
    build = {SGLANG_PATH: _sglang, VLLM_PATH: _vllm, SKYRL_PATH: _vllm, COMPLETIONS_PATH: _completion}[path]
    whole, events = build(fields)
    if not fields.stream:
        return AbortAnswer("application/json", msgspec.json.encode(whole))
    data = b"".join(b"data: " + msgspec.json.encode(event) + b"\n\n" for event in events)
    return AbortAnswer("text/event-stream", data + b"data: [DONE]\n\n")


def _read(body: bytes) -> _Fields:
    try:
        return msgspec.json.decode(body, type=_Fields)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return _Fields()


def _is_tokens(prompt: object) -> bool:
    """Say whether a prompt is token ids, or several such prompts."""
    first = prompt[0] if isinstance(prompt, list) and prompt else None
    return isinstance(first, int) or (isinstance(first, list) and _is_tokens(first))


def _count(value: object) -> int:
    return value if isinstance(value, int) and 1 <= value <= 1024 else 1


def _prompt_sizes(prompt: object) -> list[int]:
    """Return the tokens of each prompt; text has none that are known here."""
    if not isinstance(prompt, list):
        return [0]
    if prompt and isinstance(prompt[0], list | str):
        return [len(each) if isinstance(each, list) else 0 for each in prompt]
    return [len(prompt)]


def _sampling_count(fields: _Fields) -> int:
    return _count(fields.sampling_params.get("n")) if isinstance(fields.sampling_params, dict) else 1


def _sglang(fields: _Fields) -> tuple[object, list[Json]]:
    prompt = fields.text if fields.input_ids is None else fields.input_ids
    copies_count = _sampling_count(fields)
    sizes = [size for size in _prompt_sizes(prompt) for _ in range(copies_count)]
    is_batch = copies_count > 1 or (isinstance(prompt, list) and bool(prompt) and isinstance(prompt[0], list | str))
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
    usage = _usage(sum(_prompt_sizes(fields.token_ids)))
    whole = {**head, "model": fields.model, "created": int(time.time()), "choices": choices, "usage": usage}
    return whole, [{**head, "choices": [choice]} for choice in choices] + _usage_event(fields, head, usage)


def _completion(fields: _Fields) -> tuple[object, list[Json]]:
    sizes = _prompt_sizes(fields.prompt)
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
        for index in range(len(sizes) * _count(fields.n))
    ]
    usage = _usage(sum(sizes))
    events = [{**head, "choices": [choice]} for choice in choices] + _usage_event(fields, head, usage)
    return {**head, "choices": choices, "usage": usage}, events


def _usage(prompt_tokens: int) -> Json:
    return {"prompt_tokens": prompt_tokens, "total_tokens": prompt_tokens, "completion_tokens": 0}


def _usage_event(fields: _Fields, head: Json, usage: Json) -> list[Json]:
    options = fields.stream_options
    asked = isinstance(options, dict) and options.get("include_usage") is True
    return [{**head, "choices": [], "usage": usage}] if asked else []
