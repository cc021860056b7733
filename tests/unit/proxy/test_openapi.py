"""The OpenAPI document and the table of access against the routes that there are."""

from __future__ import annotations

from typing import TYPE_CHECKING, cast

from thunderagent.backends import backend_of
from thunderagent.policy_loader import load_policy
from thunderagent.programs.scheduler import Scheduler
from thunderagent.proxy.access import access_of_route, is_engines
from thunderagent.proxy.app import build_app
from thunderagent.proxy.discovery import Discovery, DiscoverySettings
from thunderagent.proxy.guard import GuardSettings
from thunderagent.proxy.openapi import OPERATIONS, UNDESCRIBED, documented_path
from thunderagent.proxy.replicas import Replicas
from thunderagent.proxy.turns import TurnSettings
from thunderagent.runtime import Runtime

if TYPE_CHECKING:
    from aiohttp import web

    from thunderagent.backends.client import ReplicaClient
    from thunderagent.proxy.replicas import Watcher


def app() -> web.Application:
    runtime = Runtime(Scheduler(load_policy("passthrough", {})))
    replicas = Replicas(runtime, [])
    return build_app(
        runtime,
        cast("ReplicaClient", None),
        replicas,
        cast("Watcher", None),
        Discovery(runtime, replicas, backend_of("vllm"), DiscoverySettings()),
        turn_settings=TurnSettings(),
        guard_settings=GuardSettings(),
    )


def registered() -> set[tuple[str, str]]:
    """Return method and path of every route."""
    routes = app().router.routes()
    return {
        (route.method, info.get("path") or info["formatter"])
        for route in routes
        if route.method != "HEAD" and (info := route.resource.get_info() if route.resource else None)
    }


def test_every_route_is_in_the_table_of_access() -> None:
    """A new route needs a row; until it has one, it needs an admin key."""
    missing = [f"{method} {path}" for method, path in registered() if access_of_route(method, path) is None]
    assert missing == [], "add rows for these to ROUTES in thunderagent/proxy/access.py"


def test_every_route_of_ours_is_in_the_document_and_no_other() -> None:
    """A new route needs an operation, and an operation needs its route."""
    ours = {(method, documented_path(path)) for method, path in registered() if not is_engines(method, path)}
    described = {(operation.method, operation.path) for operation in OPERATIONS}
    ours = {each for each in ours if each in described or not each[1].startswith(UNDESCRIBED)}
    assert ours - described == set(), "add these to OPERATIONS in thunderagent/proxy/openapi.py"
    assert described - ours == set(), "no such routes; take them out of OPERATIONS in thunderagent/proxy/openapi.py"
