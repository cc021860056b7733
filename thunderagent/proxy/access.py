"""Who may call what: the one table of all routes, and of the paths with which an engine is controlled.

Whoever adds a route names it here; a test says which are missing. A route that is in no row needs an admin key. A path
that is no route of ours goes to an engine: with a data key, unless it controls the engine.
"""

from __future__ import annotations

import re
from enum import StrEnum
from posixpath import normpath
from urllib.parse import unquote

from thunderagent.proxy.identity import split_path


class Access(StrEnum):
    """What a request needs where keys are configured."""

    OPEN = "open"
    DATA = "data"
    ADMIN = "admin"
    ENGINE = "engine"
    """As data; but where the path of a request controls the engine, as admin."""


OPEN, DATA, ADMIN, ENGINE = Access

ROUTES: tuple[tuple[Access, str, str], ...] = (
    # Access, methods, path: {} is a part of the path that may hold anything, ** is whatever follows.
    (OPEN, "GET", "/health"),
    (OPEN, "GET", "/ready"),
    (OPEN, "GET", "/metrics"),  # `metrics_need_key` closes it
    (OPEN, "GET", "/openapi.json"),
    (OPEN, "GET POST", "/login"),
    # What a program's agent calls.
    (DATA, "POST", "/programs"),
    (DATA, "POST", "/programs/release"),  # of all programs: the handler asks for an admin key
    (DATA, "DELETE", "/programs/{}"),
    (DATA, "GET POST", "/programs/{}/sandboxes"),
    (DATA, "DELETE", "/programs/{}/sandboxes/{}"),
    (DATA, "GET", "/sandboxes/events"),  # of all programs: the handler asks for an admin key
    (DATA, "POST", "/finish_session"),
    (DATA, "POST", "/sessions/batch_delete"),
    (DATA, "DELETE", "/sessions/{}"),
    (DATA, "*", "/leases**"),
    # What an operator calls.
    (ADMIN, "GET", "/programs"),
    (ADMIN, "GET", "/programs/{}"),
    (ADMIN, "GET", "/queue"),
    (ADMIN, "GET", "/tools"),
    (ADMIN, "GET", "/sandboxes"),
    (ADMIN, "GET", "/events"),
    (ADMIN, "*", "/dashboard**"),
    (ADMIN, "*", "/replicas**"),
    (ADMIN, "*", "/weight_sync/**"),
    # In the words of other gateways.
    (ADMIN, "*", "/workers**"),
    (ADMIN, "*", "/add_worker"),
    (ADMIN, "*", "/remove_worker"),
    (ADMIN, "*", "/list_workers"),
    # What an engine does for a program.
    (ENGINE, "*", "/v1/chat/completions"),
    (ENGINE, "*", "/v1/completions"),
    (ENGINE, "*", "/v1/responses**"),
    (ENGINE, "*", "/v1/messages**"),
    (ENGINE, "*", "/v1/embeddings"),
    (ENGINE, "*", "/v1/models**"),
    (ENGINE, "*", "/generate"),
    (ENGINE, "*", "/inference/v1/generate"),
    (ENGINE, "*", "/tokenize"),
    (ENGINE, "*", "/detokenize"),
    (ENGINE, "*", "/v1/tokenize"),
    (ENGINE, "*", "/v1/detokenize"),
    (ENGINE, "*", "/version"),
    (ENGINE, "*", "/{}"),  # the route of whatever is no route of ours
)

ENGINE_CONTROL = frozenset(
    {
        # vLLM, with the routes of its development mode.
        *("pause", "resume", "is_paused", "sleep", "wake_up", "is_sleeping", "abort_requests", "collective_rpc"),
        *("reset_prefix_cache", "reset_mm_cache", "reset_encoder_cache", "release_kv_cache_memory"),
        *("init_weight_transfer_engine", "shutdown_weight_transfer_engine", "start_weight_update", "update_weights"),
        *("start_draft_weight_update", "finish_weight_update", "update_weight_version", "weight_info"),
        *("weight_checker", "get_world_size", "load_lora_adapter", "unload_lora_adapter", "server_info", "load"),
        *("start_profile", "stop_profile", "scale_elastic_ep", "is_scaling_elastic_ep", "kv_event_sources", "loads"),
        *("init_broadcaster", "update_lora_adapter"),
        # SGLang.
        *("pause_generation", "continue_generation", "flush_cache", "abort_request", "get_load", "get_loads"),
        *("release_memory_occupation", "resume_memory_occupation", "init_weights_update_group"),
        *("destroy_weights_update_group", "init_weights_send_group_for_remote_instance", "get_weights_by_name"),
        *("send_weights_to_remote_instance", "get_remote_instance_transfer_engine_info", "check_weights"),
        *("load_lora_adapter_from_tensors", "get_server_info", "get_internal_state", "set_internal_state"),
        *("configure_logging", "set_trace_level", "slow_down", "freeze_gc", "clear_hicache_storage_backend"),
        *("attach_hicache_storage_backend", "detach_hicache_storage_backend", "hicache_storage_backend_status"),
        *("start_expert_distribution_record", "stop_expert_distribution_record", "dump_expert_distribution_record"),
        *("get_weight_version", "weights_checker", "post_process_weights", "dumper"),
    }
)
"""First words of the paths with which an engine is controlled, or tells of its inside, with or without `/v1`."""

_CONTROL_PREFIXES = ("update_weight", "fault_tolerance", "hicache", "set_trace_level")
_NAMED_PART = re.compile(r"\{[^{}]*(?:\{[^{}]*\}[^{}]*)*\}")
_OF_A_PROGRAM = re.compile(r"^/(?:p|sessions)/")


def access_of_route(method: str, route_path: str) -> Access | None:
    """Return what a route of ours needs, by the path that it was registered with; None if it is in no row."""
    path = _NAMED_PART.sub("{}", route_path)
    for access, methods, pattern in ROUTES:
        if methods != "*" and method not in methods.split():
            continue
        if path == pattern or (pattern.endswith("**") and path.startswith(pattern.removesuffix("**"))):
            return access
    return ADMIN if controls_engine(path) else None


def controls_engine(raw_path: str) -> bool:
    """Say whether a path, as an engine may read it, controls that engine: decoded, without dots and doubled slashes."""
    path = normpath("/" + unquote(split_path(raw_path)[1].partition("?")[0]).lstrip("/"))
    words = [word for word in path.split("/") if word]
    if _OF_A_PROGRAM.match(path):  # whatever may be taken off, what is left ends like this
        return any(_is_control(word) for word in words[2:])
    while words and words[0] == "v1":
        words = words[1:]
    return bool(words) and _is_control(words[0])


def _is_control(word: str) -> bool:
    return word in ENGINE_CONTROL or word.startswith(_CONTROL_PREFIXES)
