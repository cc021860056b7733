"""The OpenAPI document and the table of access against the existing routes and the inputs of their handlers."""

from __future__ import annotations

import ast
import inspect
from typing import TYPE_CHECKING, cast

import pytest
from prometheus_client import CollectorRegistry

from thunderagent.backends import backend_of
from thunderagent.policy_loader import load_policy
from thunderagent.programs.scheduler import Scheduler
from thunderagent.proxy.admin.admin import Admin
from thunderagent.proxy.admin.between_turns import BetweenTurns
from thunderagent.proxy.admin.configuration import ConfigurationHandlers
from thunderagent.proxy.admin.dashboard import Dashboard
from thunderagent.proxy.admin.keys import KeyHandlers
from thunderagent.proxy.admin.live import Live
from thunderagent.proxy.admin.openapi import OPERATIONS, UNDESCRIBED, OpenApi, Operation, documented_path
from thunderagent.proxy.admin.operations import Operations
from thunderagent.proxy.admin.profiles import Profiles
from thunderagent.proxy.admin.replica_routes import ReplicaHandlers
from thunderagent.proxy.admin.rollouts import RolloutHandlers
from thunderagent.proxy.admin.sandboxes import SandboxHandlers
from thunderagent.proxy.app import build_app
from thunderagent.proxy.control.concurrency import ConcurrencySignal
from thunderagent.proxy.control.engine_control import EngineControlSettings
from thunderagent.proxy.control.leases import Leases
from thunderagent.proxy.control.weight_sync import WeightSync
from thunderagent.proxy.fleet.discovery import Discovery, DiscoverySettings
from thunderagent.proxy.fleet.replicas import Replicas
from thunderagent.proxy.gate.access import access_of_route, is_engines
from thunderagent.proxy.gate.guard import GuardSettings
from thunderagent.proxy.gate.held import NO_LIMITS, HeldTurns
from thunderagent.proxy.gate.keys import Keyring
from thunderagent.proxy.gate.keys.quotas import Quotas
from thunderagent.proxy.gate.login import Login, Logins
from thunderagent.proxy.gate.tenancy import Tenancy
from thunderagent.proxy.turns.flow import TurnSettings
from thunderagent.proxy.watch.history import History
from thunderagent.proxy.watch.turn_metrics import TurnMetrics
from thunderagent.runtime import Runtime

if TYPE_CHECKING:
    from collections.abc import Iterator

    from aiohttp import web

    from thunderagent.proxy.fleet.client import ReplicaClient
    from thunderagent.proxy.fleet.replicas import Watcher


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
        engine_control_settings=EngineControlSettings(
            timeout_s=1.0, weight_sync_limit_s=1.0, lease_limit_s=1.0, lease_total_s=1.0
        ),
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
    assert missing == [], "add rows for these to ROUTES in thunderagent/proxy/gate/access.py"


def test_every_route_of_ours_is_in_the_document_and_no_other() -> None:
    """A new route needs an operation, and an operation needs its route."""
    ours = {(method, documented_path(path)) for method, path in registered() if not is_engines(method, path)}
    described = {(operation.method, operation.path) for operation in OPERATIONS}
    ours = {each for each in ours if each in described or not each[1].startswith(UNDESCRIBED)}
    assert ours - described == set(), "add these to OPERATIONS in thunderagent/proxy/admin/openapi.py"
    assert described - ours == set(), (
        "no such routes; take them out of OPERATIONS in thunderagent/proxy/admin/openapi.py"
    )


# --- Inputs of handlers, found in their source


def handlers() -> dict[tuple[str, str], object]:
    """Return the bare handlers of the documented routes."""
    runtime = Runtime(Scheduler(load_policy("passthrough", {})))
    replicas = Replicas(runtime, [])
    discovery = Discovery(runtime, replicas, backend_of("vllm"), DiscoverySettings())
    registry = CollectorRegistry()
    tenancy = Tenancy(runtime, from_key=False)
    history = History(runtime, replicas, TurnMetrics(registry).latency_counts)
    routes = [
        *Admin(runtime, replicas, registry, tenancy).routes(),
        *BetweenTurns(runtime, tenancy).routes(),
        *ConcurrencySignal(runtime).routes(),
        *Dashboard().routes(),
        *Leases(runtime, replicas, tenancy, HeldTurns(NO_LIMITS, registry), limit_s=1.0).routes(),
        *KeyHandlers(Keyring(), None, Quotas(registry, lambda _: False, lambda _: 1)).routes(),
        *ConfigurationHandlers(None).routes(),
        *Live(runtime, replicas, history, sandboxes_on=True, simulated=False).routes(),
        *Login(Keyring(), Logins()).routes(),
        *OpenApi([]).routes(),
        *Operations(runtime, None).routes(),
        *ReplicaHandlers(runtime, replicas, discovery).routes(),
        *RolloutHandlers(None, tenancy).routes(),
        *Profiles(runtime, tenancy, is_on=False).routes(),
        *SandboxHandlers(None, tenancy).routes(),
        *WeightSync(runtime, replicas, limit_s=1.0).routes(),
    ]
    return {(route.method, documented_path(route.path)): route.handler for route in routes}


class Reading:
    """The inputs that a handler reads from a request, including functions of its module that get the request."""

    def __init__(self, handler: object) -> None:
        module = inspect.getmodule(handler)
        assert module is not None
        self.query: set[str] = set()
        self.headers: set[str] = set()
        self.models: set[str] = set()
        self._functions = {
            node.name: node
            for node in ast.walk(ast.parse(inspect.getsource(module)))
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
        }
        self._seen: set[str] = set()
        self._follow(handler.__name__)  # type: ignore[attr-defined]

    def _follow(self, name: str) -> None:
        if name in self._seen:
            return
        self._seen.add(name)
        for node in ast.walk(self._functions[name]):
            for kind, read in (("query", self.query), ("headers", self.headers)):
                read.update(_read_of(node, kind))
            if isinstance(node, ast.Call):
                self._hear(node)

    def _hear(self, call: ast.Call) -> None:
        called = call.func.attr if isinstance(call.func, ast.Attribute) else getattr(call.func, "id", "")
        if called == "read_model" and isinstance(call.args[0], ast.Name):
            self.models.add(call.args[0].id)
        if called in self._functions and any(isinstance(arg, ast.Name) and arg.id == "request" for arg in call.args):
            self.query.update(_texts(call.args))  # the name of the query field that it reads
            self._follow(called)


def _read_of(node: ast.AST, kind: str) -> Iterator[str]:
    """Yield the names that code reads from `request.query` or an alias of it: by index, by `get`, or by `in`."""

    def is_it(value: ast.AST) -> bool:
        return getattr(value, "attr", getattr(value, "id", "")) == kind

    if isinstance(node, ast.Subscript) and is_it(node.value):
        yield from _texts([node.slice])
    elif isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and is_it(node.func.value):
        yield from _texts(node.args[:1])
    elif isinstance(node, ast.Compare) and is_it(node.comparators[0]):
        yield from _texts([node.left])


def _texts(nodes: list[ast.expr]) -> set[str]:
    return {node.value for node in nodes if isinstance(node, ast.Constant) and isinstance(node.value, str)}


@pytest.mark.parametrize("operation", [pytest.param(each, id=f"{each.method} {each.path}") for each in OPERATIONS])
def test_the_document_names_what_a_handler_reads(operation: Operation) -> None:
    """It names every field of the query, every header, and the model of the body, and no other."""
    read = Reading(handlers()[operation.method, operation.path])
    assert read.query == set(operation.query)
    assert read.headers == set(operation.headers)
    assert read.models <= {model.__name__ for model in operation.body}
    assert bool(read.models) == bool(operation.body) or operation.path.endswith("/sandboxes")
