"""The table of who may call what."""

from __future__ import annotations

import pytest

from thunderagent.proxy.access import CATCH_ALL, Access, access_of_route, controls_engine


@pytest.mark.parametrize(
    ("method", "route_path", "access"),
    [
        ("GET", "/health", Access.OPEN),
        ("POST", "/health", None),
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
def test_what_a_route_needs(method: str, route_path: str, access: Access | None) -> None:
    """By method and path, whatever the parts of the path are called."""
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
        "/./pause",
        "/v1/../pause",
        "/v1/pause",
        "/v1/v1/pause",
        "/v1/load_lora_adapter",
        "/skyrl/v1/load_lora_adapter",
        "/skyrl//v1/%6coad_lora_adapter",
        "/v1/loads",
        "/update_weights_from_tensor",
        "/update_weights/anything",
        "/p/x/v1/pause",
        "/p/x/v1/../pause",
        "/p/x/pause",
        "/p/x/y/%70ause",
        "/p/x/y/../pause",
        "/p/x//pause",
        "/p/x/server_info",
        "/p/x/p/y/pause",
        "/sessions/x/v1/flush_cache",
        "/collective_rpc",
        "/hicache/storage-backend",
    ],
)
def test_no_spelling_hides_that_an_engine_is_controlled(path: str) -> None:
    """An engine decodes a path before it looks for what it means."""
    assert controls_engine(path)


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
def test_what_engines_do_for_programs_controls_nothing(path: str) -> None:
    """A program may be called as it likes."""
    assert not controls_engine(path)
