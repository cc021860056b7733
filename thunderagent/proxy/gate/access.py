"""Who may call what: the one table of all routes, and of the engines' paths.

Add each new route here; a test lists missing ones. A route without a row needs an admin key. A path that is none of our
routes goes to an engine, and its words say what it needs. What engines do for programs is a list, and takes a data key.
What controls an engine takes an admin key. For anything else the operator decides (`forward_unknown`), because nobody
knows what a future engine does there.
"""

from __future__ import annotations

import re
from enum import StrEnum
from functools import lru_cache
from typing import Final, NamedTuple

from thunderagent.proxy.reading.dialects import TURN_DIALECTS
from thunderagent.proxy.reading.target import Target


class Access(StrEnum):
    """What a request needs if keys are configured."""

    OPEN = "open"
    DATA = "data"
    ADMIN = "admin"
    ENGINE = "engine"
    """By the target of the request: `use_of`."""


OPEN, DATA, ADMIN, ENGINE = Access


class Use(StrEnum):
    """What a request wants of an engine."""

    TURN = "turn"
    """An answer, on an API that we speak."""
    GENERATE = "generate"
    """Perhaps an answer, on an API that we do not speak: it takes a lease, too."""
    SIDE_CALL = "side call"
    """Something small that keeps nothing in the engine's memory."""
    ENGINE_CONTROL = "engine_control"
    """To change or inspect the engine."""


class ForwardUnknown(StrEnum):
    """What happens to a path that is neither ours nor a known engine's."""

    ADMIN = "admin"
    DATA = "data"
    OFF = "off"


CATCH_ALL = "/{path:(?s:.*)}"
"""The route of everything that is no other route, even with line breaks: it goes to an engine."""

SCHEDULER_METRICS_PATH = "/scheduler/metrics"
"""Where a gateway has its scheduler's metrics; `/metrics` has its own."""

METRICS = frozenset({"/metrics", SCHEDULER_METRICS_PATH})
"""Routes that `metrics_need_key` closes."""

OF_OWN_TENANT = frozenset({"/programs", "/programs/{program_id:.+}"})
"""GET routes on which a data key with a tenant sees its own programs, and an admin key all."""

SHOWN = METRICS | {
    *("/summary", "/replicas", "/queue", "/history", "/events"),
    *("/programs", "/programs/{}", "/programs/{}/sandboxes"),
}
"""GET routes that an operator's login opens: what the dashboard shows, and metrics. Anything else takes a key."""

OWN_BODY_BYTES: Final = 64 * 1024
"""The largest body of a route of ours that says nothing else: its handler reads it at once, while others wait."""

IDS_BODY_BYTES: Final = 256 * 1024
"""For some thousand ids, or for requests for sandboxes."""

CONTROL_BODY_BYTES: Final = 1024 * 1024
"""For a call that controls engines, unless it carries weights."""


class Row(NamedTuple):
    """A row of the access table."""

    access: Access
    methods: str
    pattern: str
    """{} is a part of the path that may hold anything, ** is whatever follows."""
    body_bytes: int = OWN_BODY_BYTES
    """The largest body; of what goes to engines `max_body_bytes` is."""


_ROWS: tuple[tuple[Access, str, str] | tuple[Access, str, str, int], ...] = (
    # Access, methods, path, largest body
    (OPEN, "GET", "/"),  # says what this is
    (OPEN, "GET", "/health"),
    (OPEN, "GET", "/ready"),
    (OPEN, "GET", "/metrics"),  # `metrics_need_key` closes these
    (OPEN, "GET", SCHEDULER_METRICS_PATH),  # of a gateway only
    (OPEN, "GET", "/openapi.json"),
    (OPEN, "GET", "/dashboard**"),  # a page without any data, which asks for the key
    (OPEN, "POST", "/dashboard/login"),
    # What a program's agent calls.
    (DATA, "POST", "/programs", IDS_BODY_BYTES),
    (DATA, "GET", "/programs"),  # of its tenant; for all, the handler asks for an admin key
    (DATA, "GET", "/programs/{}"),
    (DATA, "POST", "/programs/release", IDS_BODY_BYTES),  # for all programs, the handler asks for an admin key
    (DATA, "DELETE", "/programs/{}"),
    (DATA, "POST", "/programs/{}/tools/start"),
    (DATA, "POST", "/programs/{}/tools/end"),
    (DATA, "POST", "/programs/{}/hints"),
    (DATA, "GET POST", "/programs/{}/sandboxes", IDS_BODY_BYTES),
    (DATA, "DELETE", "/programs/{}/sandboxes/{}"),
    (DATA, "GET DELETE", "/programs/{}/trajectory"),  # of its tenant
    (DATA, "GET", "/rollouts"),  # of its tenant
    (DATA, "GET", "/profiles/{}"),  # of its tenant
    (DATA, "GET", "/sandboxes/events"),  # for all programs, the handler asks for an admin key
    (DATA, "POST", "/finish_session"),
    (DATA, "POST", "/sessions/batch_delete", IDS_BODY_BYTES),
    (DATA, "DELETE", "/sessions/{}"),
    (DATA, "*", "/leases**"),
    (DATA, "GET", "/concurrency"),
    # What an operator calls.
    (ADMIN, "GET", "/queue"),
    (ADMIN, "GET", "/tools"),
    (ADMIN, "GET", "/profiles"),
    (ADMIN, "GET", "/sandboxes"),
    (ADMIN, "GET", "/events"),
    (ADMIN, "GET", "/summary"),
    (ADMIN, "GET", "/history"),
    (ADMIN, "*", "/replicas**"),
    (ADMIN, "*", "/keys**"),
    (ADMIN, "*", "/config**"),
    (ADMIN, "*", "/operations**"),
    (ADMIN, "*", "/weight_sync/**"),
    (ADMIN, "GET", "/internal/lease"),  # gateways of ours
    (ADMIN, "GET", "/internal/leader"),
    (ADMIN, "POST", "/internal/handover"),
    # As other gateways name them.
    (ADMIN, "*", "/workers**"),
    (ADMIN, "*", "/add_worker"),
    (ADMIN, "*", "/remove_worker"),
    (ADMIN, "*", "/list_workers"),
    # What an engine does for a program.
    (ENGINE, "*", "/v1/chat/completions**"),
    (ENGINE, "*", "/v1/completions**"),
    (ENGINE, "*", "/v1/responses**"),
    (ENGINE, "*", "/v1/messages**"),
    (ENGINE, "*", "/v1/embeddings"),
    (ENGINE, "GET", "/v1/models**"),
    (ENGINE, "GET", "/v1/realtime"),  # a websocket
    (ENGINE, "*", "/v1/audio/transcriptions"),
    (ENGINE, "*", "/v1/audio/translations"),
    (ENGINE, "*", "/v1/files**"),
    (ENGINE, "*", "/v1/classify"),
    (ENGINE, "*", "/v1/decisions"),
    (ENGINE, "*", "/v1/systemone"),
    (ENGINE, "*", "/generative_scoring"),
    (ENGINE, "*", "/cohere/v2/chat**"),
    (ENGINE, "*", "/parse_function_call"),
    (ENGINE, "*", "/separate_reasoning"),
    (ENGINE, "*", "/tokenizer_info"),
    (ENGINE, "*", "/v1/score"),
    (ENGINE, "*", "/v1/rerank"),
    (ENGINE, "*", "/v2/rerank"),
    (ENGINE, "*", "/v2/embed"),
    (ENGINE, "*", "/classify"),
    (ENGINE, "*", "/encode"),
    (ENGINE, "*", "/pooling"),
    (ENGINE, "*", "/rerank"),
    (ENGINE, "*", "/score"),
    (ENGINE, "*", "/generate"),
    (ENGINE, "*", "/invocations"),
    (ENGINE, "*", "/vertex_generate"),
    (ENGINE, "*", "/api/chat"),
    (ENGINE, "*", "/api/generate"),
    (ENGINE, "*", "/api/tags"),
    (ENGINE, "*", "/api/show"),
    (ENGINE, "*", "/model_info"),
    (ENGINE, "*", "/get_model_info"),
    (ENGINE, "*", "/inference/v1/generate"),
    (ENGINE, "*", "/skyrl/v1/generate"),
    (ENGINE, "*", "/tokenize"),
    (ENGINE, "*", "/detokenize"),
    (ENGINE, "*", "/v1/tokenize"),
    (ENGINE, "*", "/v1/detokenize"),
    (ENGINE, "*", "/version"),
    (ENGINE, "*", "/ping"),
    (ENGINE, "*", "/{}"),  # the route of everything that is not ours
)

ROUTES: tuple[Row, ...] = tuple(Row(*row) for row in _ROWS)
"""The access table."""

_KEEP_NOTHING = (
    *("/tokenize", "/detokenize", "/v1/tokenize", "/v1/detokenize", "/v1/messages/count_tokens"),
    *("/v1/responses/input_tokens", "/v1/responses/{}/cancel"),
    *("/v1/chat/completions/render", "/v1/completions/render"),
    *("/v1/chat/completions/derender", "/v1/completions/derender"),
    *("/v1/embeddings", "/v2/embed", "/encode", "/pooling", "/classify", "/v1/classify"),
    *("/generative_scoring", "/parse_function_call", "/separate_reasoning", "/cohere/v2/chat/render"),
    *("/v1/decisions", "/v1/systemone", "/score", "/v1/score", "/rerank", "/v1/rerank", "/v2/rerank"),
    *("/model_info", "/get_model_info", "/api/show", "/version", "/ping", "/v1/files**"),
)
"""Paths on which a POST generates nothing. On any other it may, and takes a lease."""

WEBSOCKETS = frozenset({"/v1/realtime"})
"""Paths that accept a websocket. Its messages are not read; it holds a lease while it lasts."""

_NEVER_GENERATE = frozenset({"GET", "HEAD", "OPTIONS", "DELETE"})
"""Methods that never generate. Any other may do what POST does: SGLang accepts PUT on `/generate`."""

ENGINE_CONTROL = frozenset(
    {
        # vLLM, with the routes of its development mode.
        *("pause", "resume", "is_paused", "sleep", "wake_up", "is_sleeping", "collective_rpc", "abort_requests"),
        *("shutdown_weight_transfer_engine", "weight_info", "weight_checker", "get_world_size", "kv_event_sources"),
        *("server_info", "load", "loads", "scale_elastic_ep", "is_scaling_elastic_ep", "fault_tolerance"),
        "thunderagent",  # vLLM with our plugin
        # SGLang.
        *("pause_generation", "continue_generation", "flush_cache", "abort_request", "slow_down", "freeze_gc"),
        *("send_weights_to_remote_instance", "get_remote_instance_transfer_engine_info", "check_weights"),
        *("get_weights_by_name", "get_weight_version", "get_server_info", "get_internal_state", "get_load"),
        *("get_loads", "weights_checker", "post_process_weights", "dumper", "hicache", "pd_role_switch"),
        *("open_session", "close_session", "add_external_corpus", "remove_external_corpus", "list_external_corpora"),
        *("remote_instance_transfer_engine_info", "get_transfer_engine_info", "get_hicache_l3_cache_layout"),
    }
)
"""First words of paths that control an engine or expose its inside, with or without `/v1`, and `/skyrl/v1` of SkyRL's
engines."""

_CONTROL_PREFIXES = (
    *("init_", "update_", "start_", "stop_", "finish_", "finalize_", "destroy_", "reset_", "release_", "resume_"),
    *("load_", "unload_", "set_", "configure_", "dump_", "attach_", "detach_", "clear_", "hicache_"),
    *("begin_", "end_", "register_"),
)
"""Prefixes of other such words, including those of future engines."""

_WITH_WEIGHTS = ("/update_weights_from_", "/load_lora_adapter_from_", "/v1/load_lora_adapter")
"""Calls whose body may hold tensors."""

_NAMED_PART = re.compile(r"\{[^{}]*(?:\{[^{}]*\}[^{}]*)*\}")
_BEFORE_CONTROL = frozenset({"v1", "skyrl", "inference"})
"""What may come before the word that controls an engine."""


def _words(pattern: str) -> tuple[str, ...]:
    return tuple(word for word in pattern.removesuffix("**").split("/") if word)


class _Pattern(NamedTuple):
    """A row's pattern, read once: {} is any word, and whatever follows matches if it `is_open`."""

    words: tuple[str, ...]
    is_open: bool

    def matches(self, words: tuple[str, ...]) -> bool:
        """Return whether words match."""
        wanted = self.words
        if len(words) < len(wanted) or (len(words) > len(wanted) and not self.is_open):
            return False
        for want, word in zip(wanted, words, strict=False):  # noqa: SIM110 - a generator costs a call for each word
            if want not in ("{}", word):
                return False
        return True


def _read_pattern(pattern: str) -> _Pattern:
    return _Pattern(_words(pattern), pattern.endswith("**"))


_TURN_WORDS = frozenset(_words(path) for path in TURN_DIALECTS)
_WITHOUT_V1 = frozenset(words[1:] for words in _TURN_WORDS if words[0] == "v1") | {("models",), ("embeddings",)}
"""Paths of clients whose base URL lacks its /v1. No engine has them."""
_ENGINE_ROWS = tuple(
    (methods, _read_pattern(pattern)) for access, methods, pattern, _ in ROUTES if access is ENGINE and pattern != "/{}"
)
_KEPT_NOWHERE = tuple(map(_read_pattern, _KEEP_NOTHING))
_READING = frozenset({"HEAD", "OPTIONS"})
"""Methods that a path accepts wherever it accepts GET."""


def access_of_route(method: str, route_path: str) -> Access | None:
    """Return what our route with this registered path needs; None if it has no row."""
    row = _row_of(method, route_path)
    if row is None:
        return ADMIN if _is_controls(route_path) else None
    return row.access


def body_limit_of_route(method: str, route_path: str, max_body_bytes: int) -> int:
    """Return the size of the largest body of our route with this path, in bytes; `max_body_bytes` of an engine's."""
    row = _row_of(method, route_path)
    if row is not None:
        return max_body_bytes if row.access is ENGINE else min(row.body_bytes, max_body_bytes)
    if not _is_controls(route_path):
        return min(OWN_BODY_BYTES, max_body_bytes)
    carries_weights = route_path.startswith(_WITH_WEIGHTS)
    return max_body_bytes if carries_weights else min(CONTROL_BODY_BYTES, max_body_bytes)


def is_shown(method: str, route_path: str) -> bool:
    """Return whether an operator's login opens our route with this registered path."""
    return method == "GET" and _NAMED_PART.sub("{}", route_path) in SHOWN


def is_engines(method: str, route_path: str) -> bool:
    """Return whether a route's input and answers are an engine's to describe."""
    row = _row_of(method, route_path)
    return row.access is ENGINE if row is not None else _is_controls(route_path)


@lru_cache(maxsize=1024)
def _is_controls(route_path: str) -> bool:
    """Return whether our route controls an engine."""
    return is_engine_control(Target.parse(_NAMED_PART.sub("{}", route_path)))


@lru_cache(maxsize=1024)
def _row_of(method: str, route_path: str) -> Row | None:
    path = _NAMED_PART.sub("{}", route_path)
    for row in ROUTES:
        if row.methods != "*" and method not in row.methods.split():
            continue
        begin = row.pattern.removesuffix("**")
        if path == begin or (begin != row.pattern and path.startswith(begin.rstrip("/") + "/")):
            return row
    return None


def is_engine_control(target: Target) -> bool:
    """Return whether a target controls an engine; one that hides where it leads counts as such."""
    words = target.words
    while words and words[0] in _BEFORE_CONTROL:
        words = words[1:]
    return target.climbs or (bool(words) and _is_engine_word(words[0]))


def is_known(target: Target, method: str) -> bool:
    """Return whether a request is one of what engines do for programs."""
    method = "GET" if method in _READING else method
    return any(methods in ("*", method) and pattern.matches(target.words) for methods, pattern in _ENGINE_ROWS)


def base_url_hint(target: Target) -> str | None:
    """Return what to correct, if a client's base URL lacks /v1; None otherwise."""
    if target.words in _WITHOUT_V1:
        return f"it is /v1/{'/'.join(target.words)}; let the client's base URL end in /v1"
    return None


def is_turn(target: Target, method: str) -> bool:
    """Return whether a request is a turn on an API that we speak."""
    return method not in _NEVER_GENERATE and target.words in _TURN_WORDS


def use_of(target: Target, method: str) -> Use:
    """Return what a request wants of an engine. Cost: a lookup for a turn, one pass over the table for others."""
    if is_turn(target, method):
        return Use.TURN
    if is_engine_control(target):
        return Use.ENGINE_CONTROL
    if method in _NEVER_GENERATE or any(pattern.matches(target.words) for pattern in _KEPT_NOWHERE):
        return Use.SIDE_CALL
    return Use.GENERATE


def engine_access(target: Target, method: str, forward_unknown: ForwardUnknown) -> Access | None:
    """Return what a request to an engine needs; None if it is not forwarded at all."""
    if target.words in _TURN_WORDS or base_url_hint(target) is not None:
        return DATA
    if is_engine_control(target):
        return ADMIN
    if forward_unknown is ForwardUnknown.DATA or is_known(target, method):
        return DATA
    return ADMIN if forward_unknown is ForwardUnknown.ADMIN else None


def _is_engine_word(word: str) -> bool:
    return word in ENGINE_CONTROL or word.startswith(_CONTROL_PREFIXES)
