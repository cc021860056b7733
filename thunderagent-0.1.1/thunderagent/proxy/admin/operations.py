"""The operations as routes: route, set_priority, migrate, kill, provision.

Each is an event of the core (`programs/transitions.py`), so a replay shows it. The configured provisioner starts and
ends replicas.
"""

from __future__ import annotations

from math import inf
from typing import Annotated, Protocol, Self

from aiohttp import web
from pydantic import BaseModel, ConfigDict, Field, field_validator, model_validator

from thunderagent.errors import ProgramKilledError
from thunderagent.programs.transitions import MOST_PRIORITY
from thunderagent.proxy.gate.bodies import read_model, report_response
from thunderagent.runtime import Runtime

Name = Annotated[str, Field(min_length=1, max_length=256)]
Weight = Annotated[float, Field(gt=0, allow_inf_nan=False)]


class Provisioner(Protocol):
    """Something that starts and ends replicas on request."""

    @property
    def driver_name(self) -> str:
        """Its driver's name; empty if there is none."""

    @property
    def count(self) -> int:
        """Number of started replicas."""

    @property
    def starting_count(self) -> int:
        """Those of them that have not answered yet."""

    @property
    def failure(self) -> str:
        """The last failure."""

    def owns(self, replica_id: str) -> bool:
        """Return whether a replica can be ended."""

    def check_start(self) -> None:
        """Raise if no replica can be started."""

    def check_end(self, replica_id: str) -> None:
        """Raise if a replica must not be ended."""


class _Body(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


class RouteRequest(_Body):
    """Whose programs go to which replicas: exactly one of the first five; without replicas the route is removed."""

    program_id: Name | None = None
    group_id: Name | None = None
    program_class: Name | None = None
    tenant: Name | None = None
    all: bool = False
    replicas: list[Name] | dict[Name, Weight] = Field(
        description="ids of replicas; with weights, as an object; none takes the route back"
    )

    @field_validator("replicas", mode="before")
    @classmethod
    def _ids_or_weights(cls, value: object) -> object:
        """Give one error, instead of one for a list and one for an object."""
        if isinstance(value, dict):
            for replica_id, weight in value.items():
                if type(weight) not in (int, float) or not 0 < weight < inf:
                    raise ValueError(f"the weight of {replica_id} must be a number over 0")
        elif not isinstance(value, list):
            raise ValueError("must be a list of replica ids, or an object with their weights")  # noqa: TRY004
        return value

    @model_validator(mode="after")
    def _one_scope(self) -> Self:
        if len(self.scopes()) != 1:
            raise ValueError("name one of program_id, group_id, program_class, tenant, or all")
        return self

    def scopes(self) -> list[tuple[str, str]]:
        """Return its scopes, in the core's words."""
        named = {
            "program": self.program_id,
            "group": self.group_id,
            "class": self.program_class,
            "tenant": self.tenant,
            "all": "" if self.all else None,
        }
        return [(scope, name) for scope, name in named.items() if name is not None]

    def targets(self) -> tuple[tuple[str, float], ...]:
        """Return the replicas with their weights."""
        if isinstance(self.replicas, dict):
            return tuple(self.replicas.items())
        return tuple((replica_id, 1.0) for replica_id in self.replicas)


class PriorityRequest(_Body):
    """A program's priority: lower comes first, 0 is what programs have of whom nothing was said."""

    program_id: Name
    priority: int = Field(ge=-MOST_PRIORITY, le=MOST_PRIORITY)
    replica_id: Name | None = Field(None, description="in the engine of that replica alone")


class MigrateRequest(_Body):
    """Which program goes where."""

    program_id: Name
    replica_id: Name


class KillRequest(_Body):
    """Which program, or which replica."""

    program_id: Name | None = None
    replica_id: Name | None = None
    abort: bool = Field(False, description="whether a program's turns in flight are aborted, at their engines, too")

    @model_validator(mode="after")
    def _one(self) -> Self:
        if (self.program_id is None) == (self.replica_id is None):
            raise ValueError("name a program_id or a replica_id")
        return self


class RouteReport(BaseModel):
    """A route."""

    scope: str
    name: str
    replicas: dict[str, float]


class PriorityReport(BaseModel):
    """A program's priority."""

    program_id: str
    priority: int
    replica_id: str | None


class MigrateReport(BaseModel):
    """Whether a program is there by now; else it goes when its turns in flight have ended, or its next one comes."""

    program_id: str
    replica_id: str
    moved: bool


class KilledReport(BaseModel):
    """What ends: a program has; a replica drains, and its engine ends then if it was started here."""

    program_id: str | None = None
    replica_id: str | None = None
    engine_ends: bool | None = None


class ProvisionReport(BaseModel):
    """Who starts and ends replicas, and how many there are."""

    by: str
    started_count: int
    starting_count: int
    failure: str


class OperationsReport(BaseModel):
    """The current settings."""

    policy: str | None
    routes: list[RouteReport]
    provision: ProvisionReport | None


class Operations:
    """Handlers of `/operations`."""

    def __init__(self, runtime: Runtime, provisioner: Provisioner | None) -> None:
        """Control `runtime`."""
        self._runtime = runtime
        self._provisioner = provisioner

    def routes(self) -> list[web.RouteDef]:
        """Return the routes."""
        return [
            web.get("/operations", self.report),
            web.post("/operations/route", self.route),
            web.post("/operations/set_priority", self.set_priority),
            web.post("/operations/migrate", self.migrate),
            web.post("/operations/kill", self.kill),
            web.post("/operations/provision", self.provision),
        ]

    async def report(self, request: web.Request) -> web.Response:  # noqa: ARG002 - a handler's signature
        """Tell the routes, the global policy, and what starts and ends replicas."""
        targets: dict[tuple[str, str], dict[str, float]] = {}
        for scheduler in self._runtime.pools.schedulers:
            for scope, name, route in scheduler.core.routing.routes:
                targets.setdefault((scope.value, name), {}).update(route.targets)
        routes = [RouteReport(scope=scope, name=name, replicas=to) for (scope, name), to in targets.items()]
        policy = self._runtime.scheduler.global_policies.name
        return report_response(OperationsReport(policy=policy, routes=routes, provision=self._provision_report()))

    async def route(self, request: web.Request) -> web.Response:
        """Route programs to replicas: those that wait at once, the others with their next turn."""
        wanted = read_model(RouteRequest, await request.read())
        scope, name = wanted.scopes()[0]
        self._runtime.operator.set_route(scope, name, wanted.targets())
        return report_response(RouteReport(scope=scope, name=name, replicas=dict(wanted.targets())))

    async def set_priority(self, request: web.Request) -> web.Response:
        """Give a program a priority, which precedes the policy's order."""
        wanted = read_model(PriorityRequest, await request.read())
        self._runtime.operator.set_priority(wanted.program_id, wanted.priority, wanted.replica_id)
        return report_response(PriorityReport(**wanted.model_dump()))

    async def migrate(self, request: web.Request) -> web.Response:
        """Move a program to a replica, even without room."""
        wanted = read_model(MigrateRequest, await request.read())
        self._runtime.operator.migrate(wanted.program_id, wanted.replica_id)
        moved = any(
            program.status == "active" and program.replica_id == wanted.replica_id
            for program in self._runtime.pools.incarnations(wanted.program_id)
        )
        return report_response(MigrateReport(program_id=wanted.program_id, replica_id=wanted.replica_id, moved=moved))

    async def kill(self, request: web.Request) -> web.Response:
        """End a program at once, or a replica once it is drained."""
        wanted = read_model(KillRequest, await request.read())
        if wanted.program_id is not None:
            if wanted.abort:
                self._runtime.abort_turns(wanted.program_id, ProgramKilledError.code)
            self._runtime.operator.kill(wanted.program_id)
            return report_response(KilledReport(program_id=wanted.program_id))
        replica_id = wanted.replica_id or ""
        if self._provisioner is not None:
            self._provisioner.check_end(replica_id)
        engine_ends = self._provisioner is not None and self._provisioner.owns(replica_id)
        self._runtime.operator.kill_replica(replica_id)
        response = report_response(KilledReport(replica_id=replica_id, engine_ends=engine_ends))
        response.set_status(202)
        return response

    async def provision(self, request: web.Request) -> web.Response:  # noqa: ARG002 - nothing is asked for but one more
        """Start one more replica; it gets turns once it answers."""
        if self._provisioner is not None:
            self._provisioner.check_start()
        self._runtime.operator.provision()
        response = report_response(self._provision_report() or NOBODY)
        response.set_status(202)
        return response

    def _provision_report(self) -> ProvisionReport | None:
        provisioner = self._provisioner
        if provisioner is None or not provisioner.driver_name:
            return None
        return ProvisionReport(
            by=provisioner.driver_name,
            started_count=provisioner.count,
            starting_count=provisioner.starting_count,
            failure=provisioner.failure,
        )


NOBODY = ProvisionReport(by="", started_count=0, starting_count=0, failure="")
