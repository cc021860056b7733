"""The answer to an aborted held turn: one result for each prompt and sample, whatever the prompt is."""

from __future__ import annotations

import json
from typing import Any

import pytest

from thunderagent.proxy.turns.aborts import COMPLETIONS_PATH, MOST_CHOICES_COUNT, SGLANG_PATH, VLLM_PATH, abort_answer


def aborted(path: str, body: dict[str, Any]) -> Any:
    answer = abort_answer(path, json.dumps(body).encode())
    assert answer.content_type == "application/json"
    return json.loads(answer.body)


@pytest.mark.parametrize(
    ("prompt", "tokens"),
    [([1, 2, 3], 3), ([[1, 2], [3]], 3), ([[1, 2], []], 2), ([[]], 0), ([], 0), ("text", 0), (None, 0), ({}, 0)],
)
@pytest.mark.parametrize(
    ("path", "field"), [(SGLANG_PATH, "input_ids"), (VLLM_PATH, "token_ids"), (COMPLETIONS_PATH, "prompt")]
)
def test_every_prompt_has_its_abort(path: str, field: str, prompt: object, tokens: int) -> None:
    answer = aborted(path, {"model": "m", field: prompt})
    if path == SGLANG_PATH:
        results = answer if isinstance(answer, list) else [answer]
        assert {result["meta_info"]["finish_reason"]["type"] for result in results} == {"abort"}
        assert sum(result["meta_info"]["prompt_tokens"] for result in results) == tokens
    else:
        assert {choice["finish_reason"] for choice in answer["choices"]} == {"abort"}
        assert answer["usage"]["prompt_tokens"] == tokens


@pytest.mark.parametrize(("path", "field"), [(SGLANG_PATH, "input_ids"), (COMPLETIONS_PATH, "prompt")])
def test_no_client_gets_more_results_than_an_engine_would_make(path: str, field: str) -> None:
    """A small body may ask for millions."""
    body = {field: [[1]] * (MOST_CHOICES_COUNT // 1024 + 1), "n": 1024, "sampling_params": {"n": 1024}}
    answer = aborted(path, body)
    assert len(answer if path == SGLANG_PATH else answer["choices"]) == MOST_CHOICES_COUNT


@pytest.mark.parametrize("odd", [r'"\ud83d"', "NaN", "-Infinity"])
def test_a_stream_stays_one_though_only_engines_read_its_request(odd: str) -> None:
    """It may hold half of a surrogate pair, or what is no number."""
    body = '{"sampling_params":{"n":2,"stop":' + odd + '},"token_ids":[1,2],"request_id":"r","stream":true}'
    answer = abort_answer(VLLM_PATH, body.encode())
    assert answer.content_type == "text/event-stream"
    first, second, done, _ = answer.body.split(b"\n\n")
    assert [json.loads(each.removeprefix(b"data: "))["request_id"] for each in (first, second)] == ["r", "r"]
    assert done == b"data: [DONE]"
