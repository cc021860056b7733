"""The access table: which callers may call which endpoints."""

from __future__ import annotations

import pytest

from thunderagent.proxy.gate.access import (
    CATCH_ALL,
    SHOWN,
    Access,
    ForwardUnknown,
    Use,
    access_of_route,
    engine_access,
    is_engine_control,
    is_shown,
    use_of,
)
from thunderagent.proxy.reading.target import Target


@pytest.mark.parametrize(
    ("method", "route_path", "access"),
    [
        ("GET", "/health", Access.OPEN),
        ("POST", "/health", None),
        ("GET", "/scheduler/metrics", Access.OPEN),
        ("POST", "/programs", Access.DATA),
        ("GET", "/programs", Access.DATA),
        ("GET", "/programs/{program_id:.+}", Access.DATA),
        ("DELETE", "/programs/{program_id:.+}", Access.DATA),
        ("DELETE", "/programs/{program_id:.+}/sandboxes/{sandbox_id:[^/]+}", Access.DATA),
        ("DELETE", r"/sessions/{program_id:(?!.*/v1(?:/|$)).+}", Access.DATA),
        ("DELETE", r"/replicas/{replica_id:[a-z]{1,3}}", Access.ADMIN),
        ("POST", "/pause", Access.ADMIN),
        ("POST", "/v1/load_lora_adapter", Access.ADMIN),
        ("POST", "/skyrl/v1/load_lora_adapter", Access.ADMIN),
        ("POST", "/update_weights_from_disk", Access.ADMIN),
        ("POST", "/v1/chat/completions", Access.ENGINE),
        ("*", CATCH_ALL, Access.ENGINE),
        ("POST", "/something/new", None),
    ],
)
def test_every_route_needs_its_access(method: str, route_path: str, access: Access | None) -> None:
    """Method and path decide, whatever the parts of the path are called."""
    assert access_of_route(method, route_path) is access


@pytest.mark.parametrize(
    "path",
    [
        "/pause",
        "/pause?mode=abort",
        "/pause/",
        "//pause",
        "/%70ause",
        "/%2Fpause",
        "/v1/pause",
        "/v1/v1/pause",
        "/v1/load_lora_adapter",
        "/skyrl/v1/load_lora_adapter",
        "/skyrl//v1/%6coad_lora_adapter",
        "/v1/loads",
        "/update_weights_from_tensor",
        "/update_weights/anything",
        "/p/x/v1/pause",
        "/p/x/pause",
        "/p/x//pause",
        "/p/x/server_info",
        "/sessions/x/v1/flush_cache",
        "/collective_rpc",
        "/thunderagent/programs",
        "/hicache/storage-backend",
        "/inference/v1/pause",
        "/PAUSE",
        "/pause;x=1",
        "/v1%2Fload_lora_adapter",
        "/v1/models/..%2f..%2Fpause",
        "/%5Cpause",
    ],
)
def test_no_spelling_hides_that_an_engine_is_controlled(path: str) -> None:
    """An engine decodes a path before it routes it."""
    assert is_engine_control(Target.parse(path))


@pytest.mark.parametrize(
    "path",
    [
        "/",
        "/v1",
        "/v1/chat/completions",
        "/v1/responses/resp_1/cancel",
        "/v1/responses/pause",
        "/tokenize?a=/pause",
        "/p/pause/v1/chat/completions",
        "/p/pause/model_info",
        "/p/x/health_generate?pause",
        "/p/a/pause/v1/messages",
        "/paused",
        "/generate",
        "/skyrl/v1/generate",
        "/%2570ause",
    ],
)
def test_engine_calls_for_programs_control_nothing(path: str) -> None:
    """A program may have any name."""
    assert not is_engine_control(Target.parse(path))


@pytest.mark.parametrize(
    ("method", "path"),
    [
        ("POST", "/debug/pause"),
        ("POST", "/p/x/y/pause"),
        ("POST", "/p/x/p/y/pause"),
        ("GET", "/"),
        ("GET", "/v1"),
        ("GET", "/docs"),
        ("GET", "/health_generate"),
        ("POST", "/v1/models"),
        ("POST", "/v1/models/llama/unload"),
        ("POST", "/p/x/metrics"),
        ("POST", "/tokenize/more"),
        ("POST", "/v1/something/new"),
    ],
)
def test_a_path_that_nobody_knows_is_for_whom_the_operator_says(method: str, path: str) -> None:
    """An engine's future use of a path is unknown, so the list names data paths, not the others."""
    target = Target.parse(path)
    assert engine_access(target, method, ForwardUnknown.ADMIN) is Access.ADMIN
    assert engine_access(target, method, ForwardUnknown.DATA) is Access.DATA
    assert engine_access(target, method, ForwardUnknown.OFF) is None


@pytest.mark.parametrize(
    ("method", "path"),
    [
        ("POST", "/v1/chat/completions"),
        ("POST", "//v1//chat/%63ompletions/?x"),
        ("POST", "/p/a/v1/messages/count_tokens"),
        ("GET", "/v1/models/org/name"),
        ("HEAD", "/v1/models"),
        ("GET", "/v1/responses/resp_1"),
        ("POST", "/v1/responses/pause/cancel"),
        ("POST", "/v1/audio/transcriptions"),
        ("POST", "/v2/rerank"),
    ],
)
def test_engine_calls_for_programs_take_a_data_key(method: str, path: str) -> None:
    """The operator's setting for other paths does not matter."""
    assert {engine_access(Target.parse(path), method, each) for each in ForwardUnknown} == {Access.DATA}


@pytest.mark.parametrize(
    ("method", "path", "use"),
    [
        ("POST", "/v1/chat/completions/", Use.TURN),
        ("POST", "//v1/chat/completions", Use.TURN),
        ("POST", "/V1/Chat/Completions;x", Use.TURN),
        ("POST", "/v1%2Fmessages", Use.TURN),
        ("POST", "/p/a/%67enerate", Use.TURN),
        ("POST", "/invocations", Use.GENERATE),
        ("POST", "/v1/responses/compact", Use.GENERATE),
        ("POST", "/v1/chat/completions/batch", Use.GENERATE),
        ("POST", "/something/new", Use.GENERATE),
        ("POST", "/", Use.GENERATE),
        ("POST", "/v1/embeddings/", Use.SIDE_CALL),
        ("POST", "/v1/responses/resp_1/cancel", Use.SIDE_CALL),
        ("POST", "/v1/messages/count_tokens", Use.SIDE_CALL),
        ("PUT", "/generate", Use.TURN),
        ("PATCH", "/something/new", Use.GENERATE),
        ("PUT", "/tokenize", Use.SIDE_CALL),
        ("GET", "/v1/chat/completions", Use.SIDE_CALL),
        ("DELETE", "/v1/responses/resp_1", Use.SIDE_CALL),
        ("POST", "/v1/pause", Use.ENGINE_CONTROL),
    ],
)
def test_every_request_that_can_generate_takes_a_lease(method: str, path: str, use: Use) -> None:
    """Exceptions are requests that are known to generate nothing, in any spelling that an engine may understand."""
    assert use_of(Target.parse(path), method) is use


def test_pages_opened_by_a_login_may_be_shown() -> None:
    """No engine gets such a request, and each has a route; the same path with another method takes a key."""
    for path in SHOWN:
        assert access_of_route("GET", path) in (Access.OPEN, Access.DATA, Access.ADMIN)
        assert is_shown("GET", path)
        assert not is_shown("POST", path)
        assert not is_shown("*", path)
    for path in (CATCH_ALL, "/v1/models", "/replicas/{replica_id}", "/internal/lease", "/leases"):
        assert not is_shown("GET", path)
