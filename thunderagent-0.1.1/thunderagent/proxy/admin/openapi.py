"""The OpenAPI document of the proxy's own API, at `GET /openapi.json`.

`OPERATIONS` has a row for each of our routes. The table of `gate/access.py` says which key a route needs, and the first
line of its handler says what it does. Routes whose schema is an engine's are not described: those that engines serve,
those that control them, and those of `UNDESCRIBED`.
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

import msgspec
from aiohttp import web
from pydantic import BaseModel, Field
from pydantic.json_schema import JsonSchemaMode, models_json_schema

from thunderagent import __version__
from thunderagent.proxy.admin.admin import (
    MAX_PAGE,
    HealthReport,
    NotReadyReport,
    OpenedReport,
    OpenRequest,
    ReadyReport,
    ReleasedReport,
    ReleasedTogetherReport,
    ReleaseRequest,
    ReplicasReport,
)
from thunderagent.proxy.admin.between_turns import HintReport, HintRequest, ToolReport, ToolRequest
from thunderagent.proxy.admin.configuration import ReloadReport
from thunderagent.proxy.admin.keys import KeyRequest, KeysReport, NewKeyReport, RevokedKeyReport
from thunderagent.proxy.admin.live import HistoryReport, SummaryReport
from thunderagent.proxy.admin.operations import (
    KilledReport,
    KillRequest,
    MigrateReport,
    MigrateRequest,
    OperationsReport,
    PriorityReport,
    PriorityRequest,
    ProvisionReport,
    RouteReport,
    RouteRequest,
)
from thunderagent.proxy.admin.profiles import ProfileReport, ProfilesReport
from thunderagent.proxy.admin.replica_routes import AddRequest, ReplicaRemovedReport, ReplicasChangedReport
from thunderagent.proxy.admin.reports import SORTS, ProgramPage, QueueReport, ToolsReport
from thunderagent.proxy.admin.rollouts import MAX_ROLLOUTS_COUNT, VIEWS
from thunderagent.proxy.admin.sandboxes import ProgramSandboxesReport, ReclaimedReport, SandboxBody, SandboxesReport
from thunderagent.proxy.admin.story import ProgramStoryReport
from thunderagent.proxy.control.concurrency import ConcurrencyReport
from thunderagent.proxy.control.leases import (
    LeaseEnd,
    LeaseEndedReport,
    LeaseHeldReport,
    LeaseReport,
    LeaseRequest,
    ProgressReport,
)
from thunderagent.proxy.control.weight_sync import WeightSyncBegunReport, WeightSyncEndedReport, WeightSyncRequest
from thunderagent.proxy.gate.access import Access, access_of_route
from thunderagent.proxy.gate.bodies import Report
from thunderagent.proxy.gate.keys import KEY_HEADER
from thunderagent.proxy.gate.login import LoginReport, LoginRequest

Schema = Mapping[str, Any]
Models = tuple[type[BaseModel], ...]

TEXT: Schema = {"type": "string"}
OFFSET: Schema = {"type": "integer", "minimum": 0, "default": 0}
LIMIT: Schema = {"type": "integer", "minimum": 1, "maximum": MAX_PAGE, "default": 100}
PROGRAM_ID: Schema = {"type": "string", "minLength": 1, "maxLength": 256}

TEXT_TYPE = "text/plain"
EVENTS_TYPE = "text/event-stream"


class ErrorDetails(Report):
    """What went wrong."""

    message: str
    type: Literal["invalid_request_error", "server_error"]
    param: None
    code: str = Field(description="for programs to read")


class ErrorReport(Report):
    """An error of the proxy."""

    error: ErrorDetails


@dataclass(frozen=True, slots=True)
class Operation:
    """One route: its input, and its answers besides errors."""

    method: str
    path: str
    answers: Models = ()
    """One of these, as JSON; if empty, `answer_type` is something else."""
    body: Models = ()
    """One of these models."""
    body_may_be_list: bool = False
    query: Mapping[str, Schema] = field(default_factory=dict)
    headers: Mapping[str, Schema] = field(default_factory=dict)
    required: tuple[str, ...] = ()
    """Names of required query parameters."""
    status: int = 200
    answer_type: str = "application/json"
    also: Mapping[int, type[BaseModel]] = field(default_factory=dict)
    """Answers with other statuses that are not our errors."""


OPERATIONS: tuple[Operation, ...] = (
    Operation("GET", "/health", (HealthReport,)),
    Operation(
        "GET",
        "/",
        answer_type=TEXT_TYPE,
        headers={"Accept": {**TEXT, "description": "with `text/html` it leads to the dashboard"}},
    ),
    Operation("GET", "/ready", (ReadyReport,), also={503: NotReadyReport}),
    Operation("GET", "/metrics", answer_type=TEXT_TYPE),
    Operation("GET", "/openapi.json"),
    Operation(
        "GET",
        "/programs",
        (ProgramPage,),
        query={
            "status": {"enum": ["active", "paused"]},
            "phase": {"enum": ["reasoning", "acting"]},
            "replica_id": {**TEXT, "description": "those that are active there, or were when they were paused"},
            "search": {**TEXT, "description": "part of the id, in any case"},
            "tenant": {**TEXT, "description": "those of this tenant"},
            "sort": {
                "enum": [sign + name for sign in ("", "-") for name in SORTS],
                "description": "- reverses the order",
            },
            "offset": OFFSET,
            "limit": LIMIT,
        },
    ),
    Operation("POST", "/programs", (OpenedReport,), body=(OpenRequest,)),
    Operation(
        "POST",
        "/programs/release",
        (ReleasedReport, ReleasedTogetherReport),
        body=(ReleaseRequest,),
        query={"program_id": {**PROGRAM_ID, "description": "instead of a body"}},
    ),
    Operation(
        "GET",
        "/programs/{program_id}",
        (ProgramStoryReport,),
        query={"pool": {**TEXT, "description": "the pool, if it is in several"}},
    ),
    Operation("DELETE", "/programs/{program_id}", (ReleasedReport,)),
    Operation(
        "POST",
        "/finish_session",
        (ReleasedReport,),
        query={"session_id": PROGRAM_ID},
        required=("session_id",),
    ),
    Operation(
        "POST",
        "/sessions/batch_delete",
        (ReleasedReport, ReleasedTogetherReport),
        body=(ReleaseRequest,),
        query={"program_id": {**PROGRAM_ID, "description": "instead of a body"}},
    ),
    Operation("DELETE", "/sessions/{program_id}", (ReleasedReport,)),
    Operation("POST", "/programs/{program_id}/tools/start", (ToolReport,), body=(ToolRequest,)),
    Operation("POST", "/programs/{program_id}/tools/end", (ToolReport,)),
    Operation("POST", "/programs/{program_id}/hints", (HintReport,), body=(HintRequest,)),
    Operation("GET", "/programs/{program_id}/sandboxes", (ProgramSandboxesReport,)),
    Operation(
        "POST",
        "/programs/{program_id}/sandboxes",
        (ProgramSandboxesReport,),
        body=(SandboxBody,),
        body_may_be_list=True,
        status=202,
    ),
    Operation("DELETE", "/programs/{program_id}/sandboxes/{sandbox_id}", (ReclaimedReport,)),
    Operation("GET", "/sandboxes", (SandboxesReport,)),
    Operation("GET", "/sandboxes/events", query={"program_id": PROGRAM_ID}, answer_type=EVENTS_TYPE),
    Operation(
        "GET",
        "/programs/{program_id}/trajectory",
        query={
            "view": {"enum": list(VIEWS), "default": "turns"},
            "generation": {"type": "integer", "description": "that incarnation of the id; by default the last"},
            "wait_s": {"type": "integer", "minimum": 0, "maximum": 60, "description": "wait for the program's end"},
        },
    ),
    Operation("DELETE", "/programs/{program_id}/trajectory", query={"generation": {"type": "integer"}}),
    Operation(
        "GET",
        "/rollouts",
        query={
            "group": {**TEXT, "description": "those of this group"},
            "after": {"type": "integer", "minimum": 0, "description": "those that ended after that number"},
            "limit": {**LIMIT, "maximum": MAX_ROLLOUTS_COUNT},
            "view": {"enum": list(VIEWS), "default": "samples"},
        },
        answer_type="application/jsonl",
    ),
    Operation("GET", "/profiles", (ProfilesReport,)),
    Operation("GET", "/profiles/{program_id}", (ProfileReport,)),
    Operation("GET", "/replicas", (ReplicasReport,)),
    Operation("GET", "/operations", (OperationsReport,)),
    Operation("POST", "/operations/route", (RouteReport,), body=(RouteRequest,)),
    Operation("POST", "/operations/set_priority", (PriorityReport,), body=(PriorityRequest,)),
    Operation("POST", "/operations/migrate", (MigrateReport,), body=(MigrateRequest,)),
    Operation("POST", "/operations/kill", (KilledReport,), body=(KillRequest,), also={202: KilledReport}),
    Operation("POST", "/operations/provision", (ProvisionReport,), status=202),
    Operation(
        "POST",
        "/replicas",
        (ReplicasChangedReport,),
        body=(AddRequest,),
        also={201: ReplicasChangedReport},
    ),
    Operation("POST", "/replicas/{replica_id}/drain", (ReplicasChangedReport,)),
    Operation("POST", "/replicas/{replica_id}/undrain", (ReplicasChangedReport,)),
    Operation(
        "DELETE",
        "/replicas/{replica_id}",
        (ReplicaRemovedReport,),
        query={"force": {"type": "string", "enum": ["1", "true"]}},
        also={202: ReplicaRemovedReport},
    ),
    Operation("GET", "/queue", (QueueReport,), query={"limit": {**LIMIT, "minimum": 0}}),
    Operation("GET", "/tools", (ToolsReport,)),
    Operation("GET", "/keys", (KeysReport,)),
    Operation("POST", "/keys", (NewKeyReport,), body=(KeyRequest,)),
    Operation("DELETE", "/keys/{name}", (RevokedKeyReport,)),
    Operation("POST", "/config/reload", (ReloadReport,)),
    Operation("POST", "/dashboard/login", (LoginReport,), body=(LoginRequest,)),
    Operation("GET", "/summary", (SummaryReport,)),
    Operation("GET", "/history", (HistoryReport,), query={"since": {"type": "number", "default": 0}}),
    Operation(
        "GET",
        "/events",
        query={"program_id": PROGRAM_ID, "kinds": {**TEXT, "description": "with commas between them"}},
        headers={"Last-Event-ID": {**TEXT, "description": "go on after that message"}},
        answer_type=EVENTS_TYPE,
    ),
    Operation(
        "GET",
        "/concurrency",
        (ConcurrencyReport,),
        query={"model": {**TEXT, "description": "the model, if there are several pools"}},
    ),
    Operation("POST", "/leases", (LeaseReport,), body=(LeaseRequest,)),
    Operation("POST", "/leases/{lease_id}/progress", (LeaseHeldReport,), body=(ProgressReport,)),
    Operation("POST", "/leases/{lease_id}/end", (LeaseEndedReport,), body=(LeaseEnd,)),
    Operation("POST", "/weight_sync/begin", (WeightSyncBegunReport,), body=(WeightSyncRequest,)),
    Operation("POST", "/weight_sync/end", (WeightSyncEndedReport,), body=(WeightSyncRequest,)),
)

UNDESCRIBED = ("/dashboard", "/workers", "/list_workers", "/add_worker", "/remove_worker")
"""Path prefixes of pages for people, or of routes that other gateways describe."""

_NAMED_PART = re.compile(r"\{(\w+):[^{}]*(?:\{[^{}]*\}[^{}]*)*\}")
_ERRORS = {
    "4XX": "the request is wrong as it stands, or what it names is not there",
    "5XX": "the proxy cannot do it now",
}


def documented_path(route_path: str) -> str:
    """Return the path of a route as the document has it: without the patterns of its named parts."""
    return _NAMED_PART.sub(r"{\1}", route_path)


class OpenApi:
    """Handler of the document, which is built on the first request."""

    def __init__(self, routes: Iterable[web.RouteDef]) -> None:
        """Describe `routes` by `OPERATIONS`."""
        self._routes = list(routes)
        self._body: bytes | None = None

    def routes(self) -> list[web.RouteDef]:
        """Return the route of the document."""
        return [web.get("/openapi.json", self.handle)]

    async def handle(self, request: web.Request) -> web.Response:  # noqa: ARG002 - a handler's signature
        """Return this document."""
        if self._body is None:
            self._body = msgspec.json.encode(document([*self._routes, *self.routes()]))
        return web.Response(body=self._body, content_type="application/json")


def document(routes: Iterable[web.RouteDef]) -> dict[str, Any]:
    """Return the document of these routes, as OpenAPI 3.1."""
    handlers = {(route.method, documented_path(route.path)): route.handler for route in routes}
    inputs: list[tuple[type[BaseModel], JsonSchemaMode]] = [(ErrorReport, "serialization")]
    for each in OPERATIONS:
        inputs += [(model, "serialization") for model in (*each.answers, *each.also.values())]
        inputs += [(model, "validation") for model in each.body]
    references, schemas = models_json_schema(inputs, ref_template="#/components/schemas/{model}")
    paths: dict[str, dict[str, Any]] = {}
    for operation in OPERATIONS:
        handler = handlers.get((operation.method, operation.path))
        if handler is not None:
            said = inspect.getdoc(handler) or ""
            paths.setdefault(operation.path, {})[operation.method.lower()] = _described(operation, said, references)
    return {
        "openapi": "3.1.0",
        "info": {
            "title": "thunderagent",
            "version": __version__,
            "description": "The proxy's own API. What goes to the engines is as the engines describe it.",
        },
        "paths": paths,
        "components": {
            "schemas": schemas["$defs"],
            "securitySchemes": {
                "bearer": {"type": "http", "scheme": "bearer"},
                "header": {"type": "apiKey", "in": "header", "name": KEY_HEADER},
            },
        },
    }


References = Mapping[Any, Schema]
"""Where a model's schema is, by model and mode."""


def _described(operation: Operation, said: str, references: References) -> dict[str, Any]:
    access = access_of_route(operation.method, operation.path) or Access.ADMIN
    summary, _, description = said.partition("\n")
    described: dict[str, Any] = {
        "summary": summary,
        "description": (description.strip() + f"\n\nKey, where keys are configured: {access.value}.").strip(),
        "parameters": [
            *({"name": name, "in": "path", "required": True, "schema": PROGRAM_ID} for name in _names(operation.path)),
            *(
                {"name": name, "in": "query", "required": name in operation.required, "schema": schema}
                for name, schema in operation.query.items()
            ),
            *(
                {"name": name, "in": "header", "required": False, "schema": schema}
                for name, schema in operation.headers.items()
            ),
        ],
        "responses": _responses(operation, references),
        "security": [{}] if access is Access.OPEN else [{}, {"bearer": []}, {"header": []}],
    }
    if operation.body:
        schema = _any_of([references[model, "validation"] for model in operation.body])
        if operation.body_may_be_list:
            schema = {"anyOf": [schema, {"type": "array", "items": schema}]}
        described["requestBody"] = {"required": True, "content": {"application/json": {"schema": schema}}}
    return described


def _responses(operation: Operation, references: References) -> dict[str, Any]:
    schema = _any_of([references[model, "serialization"] for model in operation.answers])
    responses = {str(operation.status): _content("as asked", operation.answer_type, schema)}
    for status, model in operation.also.items():
        schema = references[model, "serialization"]
        responses[str(status)] = _content(inspect.getdoc(model) or "", "application/json", schema)
    for statuses, meaning in _ERRORS.items():
        schema = references[ErrorReport, "serialization"]
        responses[statuses] = _content(meaning, "application/json", schema)
    return responses


def _content(description: str, content_type: str, schema: Schema) -> dict[str, Any]:
    return {"description": description, "content": {content_type: {"schema": schema}}}


def _any_of(schemas: list[Mapping[str, Any]]) -> Mapping[str, Any]:
    if len(schemas) == 1:
        return schemas[0]
    return {"anyOf": schemas} if schemas else {}


def _names(path: str) -> list[str]:
    return re.findall(r"\{(\w+)\}", path)
