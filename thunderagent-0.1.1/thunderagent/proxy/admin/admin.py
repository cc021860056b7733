"""The API about the proxy itself: health, programs and their release, replicas, the queue, metrics."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable
from functools import partial
from typing import Any, Literal

from aiohttp import web
from prometheus_client import CollectorRegistry
from pydantic import AliasChoices, BaseModel, ConfigDict, Field

from thunderagent.compilation import build_kind
from thunderagent.errors import BodyTooLargeError, NotFoundError, ProgramReleasedError, RequestError, ThunderAgentError
from thunderagent.programs.messages import TurnVerdict
from thunderagent.programs.state.program import Phase, Program, Status
from thunderagent.proxy.admin.cell import CellReport
from thunderagent.proxy.admin.reports import (
    SORTS,
    ProgramFilter,
    ReplicaReport,
    program_page,
    queue_report,
    replica_reports,
    tools_report,
)
from thunderagent.proxy.admin.sandboxes import SANDBOXES_OFF, Sandboxes, SandboxReport
from thunderagent.proxy.admin.story import needs_of, program_story
from thunderagent.proxy.fleet.replicas import Replicas
from thunderagent.proxy.gate.admin_port import MUST_NAME
from thunderagent.proxy.gate.bodies import LIMITS_ELSEWHERE, Name, Report, Text, read_model, report_response
from thunderagent.proxy.gate.keys import check_admin
from thunderagent.proxy.gate.tenancy import Tenancy
from thunderagent.proxy.reading.header_words import LIMITS_HEADER, check_program_id, outcome_of
from thunderagent.proxy.reading.identity import Tokens
from thunderagent.proxy.watch.metrics import exposition
from thunderagent.runtime import Runtime

MAX_PAGE = 1000
MAX_RELEASED_COUNT = 10_000
"""Ids in one request to release programs; with `all` there may be more."""

RELEASED_AT_ONCE_COUNT = 500
"""Programs that end in one step, so that none of them gets another's room; it takes some 20 ms."""
EXPOSITION_TYPE = "text/plain; version=0.0.4; charset=utf-8"


class ReleaseRequest(BaseModel):
    """Which programs ended: one, several, or all; of these only a `tenant`'s, if one is named.

    `generation` means only that incarnation of one id, and `outcome` says what became of it.
    """

    model_config = ConfigDict(extra="ignore", frozen=True)

    program_id: Text | None = None
    program_ids: list[Text] | None = Field(None, validation_alias=AliasChoices("program_ids", "session_ids"))
    all: bool = False
    abort: bool = Field(False, description="whether its turns in flight are aborted, at their engines, too")
    tenant: Text | None = None
    generation: int | None = None
    outcome: Literal["success", "failure"] | None = None


class OpenRequest(BaseModel):
    """A program that is about to begin; `sandboxes` are requests for them, as `POST /programs/{id}/sandboxes` takes."""

    model_config = ConfigDict(extra="ignore", frozen=True)

    program_id: Text
    group_id: Name = ""
    parent_id: Name = ""
    tenant: Name = ""
    program_class: Name = ""
    sandboxes: list[dict[str, Any]] | None = None


class HealthReport(Report):
    """The process answers."""

    status: Literal["ok"]
    build: Literal["compiled", "interpreted"]
    role: Literal["alone", "gateway", "leader", "standby", "over"] = Field(
        "alone", description="whether it carries bytes, schedules for gateways, or does both by itself"
    )
    epoch: int | None = Field(None, description="of the scheduler that leads; none where there is one process")


class ReadyReport(Report):
    """A turn would be served."""

    ready: Literal[True]
    replicas_up_count: int


class NotReadyReport(Report):
    """A turn would not be served."""

    ready: Literal[False]
    why: str


class EndVerdict(Report):
    """The verdict on a program when it ended, as in `GET /programs/{id}`; left out while it is ok."""

    verdict: TurnVerdict = TurnVerdict.OK
    verdict_cause: str = ""
    verdict_replica_id: str | None = None


class ReleasedReport(EndVerdict):
    """Whether a program of that id lived until now."""

    program_id: str
    released: bool


class ReleasedTogetherReport(Report):
    """Which of several programs lived until now."""

    released: bool
    released_ids: list[str]
    not_ok: dict[str, EndVerdict] = Field(
        default={}, description="the verdicts on those whose turns may not be trained on; left out without any"
    )


class ReplicasReport(Report):
    """The replicas, and the policy that places programs on them."""

    policy: str
    replicas: list[ReplicaReport]


class OpenedReport(Report):
    """A program that lives now."""

    program_id: str
    opened: bool = Field(description="false if it lived already")
    sandboxes: list[SandboxReport]
    token: str | None = Field(
        None, description="names the program until it ends; only where bearer tokens name programs"
    )


class Admin:
    """Handlers of the admin API."""

    def __init__(
        self,
        runtime: Runtime,
        replicas: Replicas,
        registry: CollectorRegistry,
        tenancy: Tenancy,
        sandboxes: Sandboxes | None = None,
        tokens: Tokens | None = None,
        cell: Callable[[], CellReport] | None = None,
    ) -> None:
        """Report on `runtime` and `replicas`; ask `sandboxes` for programs' sandboxes, `tokens` for their tokens.

        `cell` returns the cell report of a scheduler with gateways.
        """
        self._cell = cell
        self._sandboxes = sandboxes
        self._tokens = tokens
        self._tenancy = tenancy
        self._runtime = runtime
        self._replicas = replicas
        self._registry = registry

    def routes(self) -> list[web.RouteDef]:
        """Return the routes of the admin API."""
        return [
            web.get("/health", self.health),
            web.get("/ready", self.ready),
            web.get("/metrics", self.metrics),
            web.get("/programs", self.programs),
            web.post("/programs", self.open),
            web.post("/programs/release", self.release),
            web.get("/programs/{program_id:.+}", self.program),
            web.delete("/programs/{program_id:.+}", self.delete_program),
            web.post("/finish_session", self.finish_session),
            web.post("/sessions/batch_delete", self.release),
            web.delete(r"/sessions/{program_id:(?!.*/v1(?:/|$)).+}", self.delete_program),
            web.get("/replicas", self.replicas),
            web.get("/queue", self.queue),
            web.get("/tools", self.tools),
        ]

    async def health(self, request: web.Request) -> web.Response:  # noqa: ARG002 - a handler's signature
        """Say that the process answers, and whether it is a compiled build."""
        cell = self._cell() if self._cell is not None else None
        role, epoch = ("alone", None) if cell is None else (cell.role, cell.epoch)
        build: Literal["compiled", "interpreted"] = "compiled" if build_kind() == "compiled" else "interpreted"
        return report_response(HealthReport(status="ok", build=build, role=role, epoch=epoch))

    async def ready(self, request: web.Request) -> web.Response:  # noqa: ARG002 - a handler's signature
        """Say whether a turn would be served: 200, or 503 with the reason."""
        if why := self._runtime.why_not_ready:
            return report_response(NotReadyReport(ready=False, why=why), status=503)
        up_count = sum(len(scheduler.open_replicas) for scheduler in self._runtime.pools.schedulers)
        return report_response(ReadyReport(ready=True, replicas_up_count=up_count))

    async def metrics(self, request: web.Request) -> web.Response:  # noqa: ARG002 - a handler's signature
        """Return the Prometheus exposition."""
        return web.Response(body=exposition(self._registry), headers={"Content-Type": EXPOSITION_TYPE})

    async def programs(self, request: web.Request) -> web.Response:
        """List live programs: a page from `offset` on, `limit` long, filtered and sorted."""
        query, own = request.query, self._own_or_all()
        try:
            status = Status(query["status"]) if "status" in query else None
            phase = Phase(query["phase"]) if "phase" in query else None
        except ValueError as error:
            raise RequestError(str(error)) from error
        limit = _whole_number(request, "limit", 100, least=1, most=MAX_PAGE)
        offset = _whole_number(request, "offset", 0)
        tenant = query.get("tenant") if own is None else own
        wanted = ProgramFilter(status, phase, query.get("replica_id"), query.get("search", ""), tenant)
        sort = query.get("sort", "")
        if sort.removeprefix("-") not in SORTS and sort:
            raise RequestError(f"sort is one of {', '.join(SORTS)}, with - before it from the last, not {sort!r}")
        return report_response(
            program_page(
                self._runtime,
                wanted,
                offset=offset,
                limit=limit,
                sort=sort.removeprefix("-"),
                descending=sort.startswith("-"),
            )
        )

    async def open(self, request: web.Request) -> web.Response:
        """Open a program before its first turn, so that its sandboxes are made meanwhile. Idempotent."""
        wanted = read_model(OpenRequest, await request.read(), LIMITS_ELSEWHERE)
        if LIMITS_HEADER in request.headers:
            raise RequestError(f"{LIMITS_HEADER} comes with the program's turns; here it would limit nothing")
        program_id = check_program_id(wanted.program_id)
        if wanted.sandboxes is not None and self._sandboxes is None:
            raise RequestError(SANDBOXES_OFF)
        self._tenancy.check(program_id)
        tenant = self._tenancy.named(wanted.tenant)
        opened = self._runtime.open_program(program_id, wanted.group_id, wanted.parent_id, tenant, wanted.program_class)
        made: list[dict[str, Any]] = []
        if self._sandboxes is not None:
            if wanted.sandboxes is not None:
                await self._request_sandboxes(program_id, wanted.sandboxes, tenant, opened=opened)
            if wanted.program_class:  # the class's own, unless the request says what it needs
                self._sandboxes.program_seen(program_id, wanted.program_class, tenant)
            made = self._sandboxes.of_program(program_id)
        token = {"token": self._tokens.token_of(program_id)} if self._tokens is not None else {}
        said = {"program_id": program_id, "opened": opened, "sandboxes": made, **token}
        return report_response(OpenedReport.model_validate(said), without_unset=True)

    async def _request_sandboxes(
        self, program_id: str, wanted: list[dict[str, Any]], tenant: str, *, opened: bool
    ) -> None:
        assert self._sandboxes is not None
        generation = self._runtime.programs[program_id].generation
        check = partial(self._tenancy.check, program_id)
        try:
            await self._sandboxes.request(program_id, json.dumps(wanted).encode(), tenant, check)
        except ThunderAgentError:
            if opened and self._runtime.is_announced(program_id):  # a refused request opens nothing
                self._runtime.release(program_id, generation)
            raise

    async def program(self, request: web.Request) -> web.Response:
        """Tell one program's state, why it waits, and its story; of several pools, in that `pool`."""
        self._own_or_all()
        program_id, pool = request.match_info["program_id"], request.query.get("pool")
        lives = self._runtime.pools.incarnations(program_id)
        found = [program for program in lives if pool in (None, self._runtime.served.name_of_pool(program))]
        if not found or not self._tenancy.may_touch(program_id):
            raise NotFoundError(f"there is no live program {program_id!r}")
        return report_response(program_story(self._runtime, found[0]))

    async def release(self, request: web.Request) -> web.Response:
        """End programs. Idempotent: an id that is not known is no error."""
        body = await request.read()
        if not body and "program_id" in request.query:
            wanted = ReleaseRequest(program_id=request.query["program_id"])
        else:
            wanted = read_model(ReleaseRequest, body)
        if wanted.program_id is not None:
            program_id = check_program_id(wanted.program_id)
            may = self._tenancy.may_touch(program_id)
            may = may and (wanted.tenant is None or bool(self._of_tenant([program_id], wanted.tenant)))
            outcome = wanted.outcome or outcome_of(request.headers)
            return self._release_one(program_id, wanted.generation, outcome, may=may, aborts=wanted.abort)
        return await self._release_several(request, wanted)

    async def _release_several(self, request: web.Request, wanted: ReleaseRequest) -> web.Response:
        """End programs together, some at a time."""
        if wanted.generation is not None:
            raise RequestError("a generation needs exactly one program_id")
        if wanted.outcome is not None:
            raise RequestError("an outcome needs exactly one program_id")
        program_ids = wanted.program_ids or []
        if wanted.all:
            check_admin()
            if request.get(MUST_NAME):
                raise NotFoundError("only the admin port can release all programs; name programs here")
            program_ids = list(self._runtime.programs)
        elif not program_ids:
            raise RequestError('name what to release: {"program_id": "..."}, {"program_ids": [...]} or {"all": true}')
        elif len(program_ids) > MAX_RELEASED_COUNT:
            raise BodyTooLargeError(f"{len(program_ids)} ids at once, the limit is {MAX_RELEASED_COUNT}")
        named_ids = list(dict.fromkeys(check_program_id(program_id) for program_id in program_ids))
        released_ids: list[str] = []
        not_ok: dict[str, EndVerdict] = {}
        for start in range(0, len(named_ids), RELEASED_AT_ONCE_COUNT):
            if start:
                await asyncio.sleep(0)  # the turns of others go on
            some_ids = self._of_tenant(named_ids[start : start + RELEASED_AT_ONCE_COUNT], wanted.tenant)
            not_ok |= self._not_ok(some_ids)
            if wanted.abort:
                for program_id in some_ids:
                    self._runtime.abort_turns(program_id, ProgramReleasedError.code)
            released_ids += self._runtime.release_together(some_ids)
        judged = {"not_ok": not_ok} if not_ok else {}
        report = ReleasedTogetherReport(released=bool(released_ids), released_ids=released_ids, **judged)
        return report_response(report, without_unset=True)

    def _not_ok(self, program_ids: list[str]) -> dict[str, EndVerdict]:
        """Return the verdicts on live programs that are not ok."""
        programs = map(self._runtime.pools.programs.get, program_ids)
        return {
            program.program_id: _end_verdict(program)
            for program in programs
            if program is not None and program.verdict.verdict is not TurnVerdict.OK
        }

    def _own_or_all(self) -> str | None:
        """Return the tenant that a request may read; None is all, which needs an admin key."""
        own = self._tenancy.own
        if own is None:
            check_admin()
        return own

    def _of_tenant(self, program_ids: list[str], tenant: str | None) -> list[str]:
        """Return the programs that belong to a tenant and to the caller; all of them if no tenant is named."""
        program_ids = [program_id for program_id in program_ids if self._tenancy.may_touch(program_id)]
        if tenant is None:
            return program_ids
        table = self._runtime.programs
        programs = (table.get(program_id) for program_id in program_ids)
        return [program.program_id for program in programs if program is not None and program.tenant == tenant]

    async def delete_program(self, request: web.Request) -> web.Response:
        """End one program. Idempotent."""
        return self._release_named(request, request.match_info["program_id"])

    async def finish_session(self, request: web.Request) -> web.Response:
        """End one program, as SkyRL and the vLLM router do."""
        return self._release_named(request, request.query.get("session_id", ""))

    async def replicas(self, request: web.Request) -> web.Response:  # noqa: ARG002 - a handler's signature
        """List the replicas."""
        reports = replica_reports(self._runtime, self._replicas)
        return report_response(ReplicasReport(policy=self._runtime.scheduler.policy.name, replicas=reports))

    async def queue(self, request: web.Request) -> web.Response:
        """List waiting programs, in the order in which they would be restored."""
        limit = _whole_number(request, "limit", 100, most=MAX_PAGE)
        return report_response(queue_report(self._runtime, limit, partial(needs_of, self._runtime)))

    async def tools(self, request: web.Request) -> web.Response:  # noqa: ARG002 - a handler's signature
        """Tell how many tools run, how long they take, and what sandboxes take."""
        return report_response(tools_report(self._runtime))

    def _release_named(self, request: web.Request, program_id: str) -> web.Response:
        may = self._tenancy.may_touch(check_program_id(program_id))
        return self._release_one(program_id, None, outcome_of(request.headers), may=may)

    def _release_one(
        self, program_id: str, generation: int | None, outcome: str, *, may: bool, aborts: bool = False
    ) -> web.Response:
        program = self._runtime.pools.programs.get(program_id) if may else None
        is_ok = program is None or program.verdict.verdict is TurnVerdict.OK
        judged = {} if program is None or is_ok else _end_verdict(program).model_dump()
        if may and aborts and self._runtime.lives(program_id, generation):
            self._runtime.abort_turns(program_id, ProgramReleasedError.code)
        released = may and self._runtime.release(program_id, generation, outcome)
        report = ReleasedReport(program_id=program_id, released=released, **(judged if released else {}))
        return report_response(report, without_unset=True)


def _end_verdict(program: Program) -> EndVerdict:
    said = program.verdict
    return EndVerdict(verdict=said.verdict, verdict_cause=said.cause, verdict_replica_id=said.replica_id)


def _whole_number(request: web.Request, name: str, default: int, *, least: int = 0, most: int | None = None) -> int:
    text = request.query.get(name, str(default))
    if not text.isascii() or not text.isdigit() or len(text) > 18 or int(text) < least:
        raise RequestError(f"{name} is a whole number of at least {least}, not {text!r}")
    return int(text) if most is None else min(int(text), most)
