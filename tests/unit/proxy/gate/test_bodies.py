"""Bodies of our own API: a misspelt key is an error with the right one; further keys of other programs are none."""

from __future__ import annotations

import json
from time import process_time
from typing import Any

import pytest
from pydantic import BaseModel

from thunderagent.errors import RequestError
from thunderagent.proxy.admin.admin import OpenRequest, ReleaseRequest
from thunderagent.proxy.admin.between_turns import HintRequest
from thunderagent.proxy.admin.operations import RouteRequest
from thunderagent.proxy.admin.replica_routes import AddRequest
from thunderagent.proxy.control.leases import LeaseEnd, LeaseRequest, ProgressReport
from thunderagent.proxy.gate.bodies import LIMITS_ELSEWHERE, read_model
from thunderagent.tools.requests import read_requests


@pytest.mark.parametrize(
    ("model", "body", "nearest"),
    [
        (ReleaseRequest, {"program_id": "a", "tenent": "t"}, "tenant"),
        (ReleaseRequest, {"program_id": "a", "abbort": True}, "abort"),
        (ReleaseRequest, {"programs_ids": ["a"]}, "program_ids"),
        (OpenRequest, {"program_id": "a", "groupid": "g"}, "group_id"),
        (LeaseRequest, {"program_id": "a", "pacience_s": 3}, "patience_s"),
        (LeaseEnd, {"ouptut_tokens": 3}, "output_tokens"),
        (HintRequest, {"next_turns_in_s": 3}, "next_turn_in_s"),
        (AddRequest, {"url": "http://127.0.0.1:1", "data_paralel_ranks": 3}, "data_parallel_ranks"),
        (RouteRequest, {"replicas": [], "programid": "a"}, "program_id"),
    ],
)
def test_a_misspelt_key_is_refused_with_the_right_one(
    model: type[BaseModel], body: dict[str, Any], nearest: str
) -> None:
    """What it says would be lost in silence; also where further keys are ignored."""
    with pytest.raises(RequestError, match=f"there is no such key; did you mean {nearest}\\?$"):
        read_model(model, json.dumps(body).encode())


@pytest.mark.parametrize(
    ("model", "body"),
    [
        (
            AddRequest,
            {"worker_url": "http://127.0.0.1:1", "model": "m", "kind": "k", "priority": 1, "worker_type": "x"},
        ),
        (ReleaseRequest, {"session_ids": ["a"], "program_id": "b", "reason": "done"}),
        (ReleaseRequest, {"program_id": "x", "session_id": "x"}),
        (
            AddRequest,
            {"url": "http://127.0.0.1:1", "data_parallel_size": 8, "data_parallel_rank": 1, "worker_urls": []},
        ),
        (OpenRequest, {"program_id": "a", "tenant_id": "t", "parent": "p", "group_index": 1}),
        (LeaseEnd, {"total_cached_tokens": 1, "prompt_tokens_total": 2, "tools": []}),
        (ProgressReport, {"output_tokens": 3, "prompt_tokens": 4, "cached_tokens": 1}),
        (LeaseRequest, {"program_id": "a", "output_tokens": 3, "max_tokens": 1, "model_name": "m", "branch_ids": []}),
        (LeaseRequest, {"prompt_tokens": 1, "temperature": float("nan")}),
    ],
)
def test_further_keys_are_ignored(model: type[BaseModel], body: dict[str, Any]) -> None:
    """Other programs send them; a key whose right one is there too is not missed."""
    if "branch_ids" in body:
        body["branch_id"] = "b"
    read_model(model, json.dumps(body).encode())


def test_many_further_keys_cost_little() -> None:
    body = json.dumps({f"prompt_of_turn_{number}": 0 for number in range(20_000)} | {"k" * 100_000: 0}).encode()
    began_s = process_time()
    read_model(LeaseRequest, body)
    assert process_time() - began_s < 1.0


@pytest.mark.parametrize("body", [{"templat": "box"}, [{"template": "box"}, {"templat": "box"}]])
def test_a_misspelt_key_of_a_sandbox_names_the_right_one(body: object) -> None:
    with pytest.raises(RequestError, match="templat: there is no such key; did you mean template"):
        read_requests(json.dumps(body).encode())


@pytest.mark.parametrize("model", [OpenRequest, LeaseRequest])
@pytest.mark.parametrize("key", ["limits", "max_turns", "max_age_s", "deadline_s"])
def test_limits_in_a_body_are_refused_with_the_header_that_sets_them(model: type[BaseModel], key: str) -> None:
    """They would limit nothing, in silence. A client that leaves them out may say so."""
    with pytest.raises(RequestError, match=f"^{key}: no body sets limits .* X-Program-Limits: max_turns=50"):
        read_model(model, json.dumps({"program_id": "a", key: 3}).encode(), LIMITS_ELSEWHERE)
    read_model(model, json.dumps({"program_id": "a", key: None}).encode(), LIMITS_ELSEWHERE)


@pytest.mark.parametrize("model", [OpenRequest, LeaseRequest, ReleaseRequest])
def test_an_id_in_a_body_is_text_or_a_whole_number_as_in_a_turn(model: type[BaseModel]) -> None:
    """A program called NaN, or inf, could have no turn."""
    assert read_model(model, b'{"program_id": 7, "tenant": 8}').model_dump()["program_id"] == "7"
    for wrong in (b"NaN", b"Infinity", b"1e400", b"1.5", b"7.0", b"true", b'["a"]'):
        with pytest.raises(RequestError, match=r"^program_id: Input should be a valid string"):
            read_model(model, b'{"program_id": ' + wrong + b"}")
