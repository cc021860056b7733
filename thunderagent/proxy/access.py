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

CATCH_ALL = "/{path:(?s:.*)}"
"""The route of what is no other route, line breaks in it too: it goes to an engine."""

OF_OWN_TENANT = frozenset({"/programs", "/programs/{program_id:.+}"})
"""Routes to GET where a data key that names a tenant sees its own programs, and an admin key all."""

ROUTES: tuple[tuple[Access, str, str], ...] = (
    # Access, methods, path: {} is a part of the path that may hold anything, ** is whatever follows.
    (OPEN, "GET", "/health"),
    (OPEN, "GET", "/ready"),
    (OPEN, "GET", "/metrics"),  # `metrics_need_key` closes it
    (OPEN, "GET", "/openapi.json"),
    (OPEN, "GET", "/dashboard**"),  # a page without any data, which asks for the key
    (OPEN, "POST", "/dashboard/login"),
    # What a program's agent calls.
    (DATA, "POST", "/programs"),
    (DATA, "GET", "/programs"),  # of its tenant; of all: the handler asks for an admin key
    (DATA, "GET", "/programs/{}"),
    (DATA, "POST", "/programs/release"),  # of all programs: the handler asks for an admin key
    (DATA, "DELETE", "/programs/{}"),
    (DATA, "POST", "/programs/{}/tools/start"),
    (DATA, "POST", "/programs/{}/tools/end"),
    (DATA, "GET POST", "/programs/{}/sandboxes"),
    (DATA, "DELETE", "/programs/{}/sandboxes/{}"),
    (DATA, "GET", "/sandboxes/events"),  # of all programs: the handler asks for an admin key
    (DATA, "POST", "/finish_session"),
    (DATA, "POST", "/sessions/batch_delete"),
    (DATA, "DELETE", "/sessions/{}"),
    (DATA, "*", "/leases**"),
    # What an operator calls.
    (ADMIN, "GET", "/queue"),
    (ADMIN, "GET", "/tools"),
    (ADMIN, "GET", "/sandboxes"),
    (ADMIN, "GET", "/events"),
    (ADMIN, "GET", "/summary"),
    (ADMIN, "GET", "/history"),
    (ADMIN, "*", "/replicas**"),
    (ADMIN, "*", "/control**"),
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
    (ENGINE, "*", "/skyrl/v1/generate"),
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
        *("pause", "resume", "is_paused", "sleep", "wake_up", "is_sleeping", "collective_rpc", "abort_requests"),
        *("shutdown_weight_transfer_engine", "weight_info", "weight_checker", "get_world_size", "kv_event_sources"),
        *("server_info", "load", "loads", "scale_elastic_ep", "is_scaling_elastic_ep", "fault_tolerance"),
        # SGLang.
        *("pause_generation", "continue_generation", "flush_cache", "abort_request", "slow_down", "freeze_gc"),
        *("send_weights_to_remote_instance", "get_remote_instance_transfer_engine_info", "check_weights"),
        *("get_weights_by_name", "get_weight_version", "get_server_info", "get_internal_state", "get_load"),
        *("get_loads", "weights_checker", "post_process_weights", "dumper", "hicache"),
    }
)
"""First words of the paths with which an engine is controlled, or tells of its inside, with or without `/v1`, and
`/skyrl/v1` of SkyRL's engines."""

_CONTROL_PREFIXES = (
    *("init_", "update_", "start_", "stop_", "finish_", "finalize_", "destroy_", "reset_", "release_", "resume_"),
    *("load_", "unload_", "set_", "configure_", "dump_", "attach_", "detach_", "clear_", "hicache_"),
)
"""How other such words begin, those that engines will have, too."""

_NAMED_PART = re.compile(r"\{[^{}]*(?:\{[^{}]*\}[^{}]*)*\}")
_KNOWN_OF_A_PROGRAM = frozenset({"v1", "skyrl", "inference"})
_OF_A_PROGRAM = re.compile(r"^/(?:p|sessions)/")


def access_of_route(method: str, route_path: str) -> Access | None:
    """Return what a route of ours needs, by the path that it was registered with; None if it is in no row."""
    row = _row_of(method, route_path)
    return ADMIN if row is None and controls_engine(_NAMED_PART.sub("{}", route_path)) else row


def is_engines(method: str, route_path: str) -> bool:
    """Say whether what a route takes and answers is an engine's to describe."""
    row = _row_of(method, route_path)
    return row is ENGINE or (row is None and controls_engine(_NAMED_PART.sub("{}", route_path)))


def _row_of(method: str, route_path: str) -> Access | None:
    path = _NAMED_PART.sub("{}", route_path)
    for access, methods, pattern in ROUTES:
        if methods != "*" and method not in methods.split():
            continue
        if path == pattern or (pattern.endswith("**") and path.startswith(pattern.removesuffix("**"))):
            return access
    return None


def controls_engine(raw_path: str) -> bool:
    """Say whether a path, as an engine may read it, controls that engine: decoded, without dots and doubled slashes."""
    program_id, rest = split_path(raw_path)
    path = normpath("/" + unquote(rest.partition("?")[0]).lstrip("/"))
    words = [word for word in path.split("/") if word]
    if program_id is not None and words and words[0] not in _KNOWN_OF_A_PROGRAM:  # where its id ends is a guess
        return any(_is_control(word) for word in words)
    if _OF_A_PROGRAM.match(path):  # whatever may be taken off, what is left ends like this
        return any(_is_control(word) for word in words[2:])
    while words and words[0] in ("v1", "skyrl"):
        words = words[1:]
    return bool(words) and _is_control(words[0])


def _is_control(word: str) -> bool:
    return word in ENGINE_CONTROL or word.startswith(_CONTROL_PREFIXES)
