"""The API for sandboxes: request one, locate it, follow its changes, remove it."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractAsyncContextManager
from functools import partial
from typing import Any, Literal, Protocol
from weakref import WeakSet

from aiohttp import web
from prometheus_client import CollectorRegistry, Histogram
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from pydantic import Field

from thunderagent.errors import NotFoundError, RequestError
from thunderagent.proxy.gate.bodies import Report, report_response
from thunderagent.proxy.gate.keys import check_admin
from thunderagent.proxy.gate.tenancy import Tenancy
from thunderagent.proxy.reading.header_words import TENANT_HEADER, check_program_id
from thunderagent.proxy.reading.sse import server_sent
from thunderagent.proxy.watch.event_stream import stream_events

SANDBOXES_OFF = "sandboxes are off; start with --sandboxes docker"

PREPARE_BUCKETS_S = (0.1, 0.25, 0.5, 1, 2, 4, 8, 15, 30, 60, 120, 300)
WAIT_BUCKETS_S = (0.0, 0.05, 0.1, 0.25, 0.5, 1, 2, 4, 8, 15, 30, 60)

Said = dict[str, Any]
"""The sandbox manager's report on a sandbox: a `SandboxReport`."""


class Sandboxes(Protocol):
    """What the proxy needs of the sandbox manager. A report is a JSON object, as the API documents it."""

    async def request(
        self, program_id: str, body: bytes, tenant: str = "", check: Callable[[], None] = lambda: None
    ) -> list[Said]:
        """Request what a body says; return a report of each sandbox. A new program belongs to that tenant.

        Finding handles takes time: `check` is called after it, and may refuse by an error.
        """

    def of_program(self, program_id: str) -> list[Said]:
        """Return reports on a program's sandboxes."""

    def all(self) -> list[Said]:
        """Return reports on every sandbox."""

    def reclaim(self, program_id: str, sandbox_id: str) -> bool:
        """Take a program off one of its sandboxes; return False if it has no such sandbox."""

    def program_seen(self, program_id: str, program_class: str, tenant: str = "") -> None:
        """Prepare what programs of a class get. A new program belongs to that tenant."""

    def sandboxes_named(self, program_id: str, names: Sequence[str], tenant: str = "") -> None:
        """Take over containers that a turn of a program named, if clients may bring theirs."""

    def feed(self, program_id: str | None = None) -> AbstractAsyncContextManager[asyncio.Queue[Said | None]]:
        """Provide a queue of reports, one for each change, of one program or of all; None ends it."""

    @property
    def engine_errors(self) -> dict[str, str]:
        """Drivers whose engine does not answer, with the reason."""

    @property
    def failure_counts(self) -> Mapping[str, int]:
        """Failed preparations, and sandboxes that died, by the error's code."""

    @property
    def reclaimed_count(self) -> int:
        """Sandboxes that were reclaimed."""

    @property
    def orphan_count(self) -> int:
        """Sandboxes of earlier runs that were removed."""

    def stage_counts(self) -> Mapping[tuple[str, str], int]:
        """Return the number of sandboxes by driver and stage."""

    def sums(self) -> tuple[int, int | None, int | None]:
        """Return the number of sandboxes, and their use of disk and memory in bytes; None is unknown."""

    def hear_times(self, on_prepared: Callable[[float], None], on_waited: Callable[[float], None]) -> None:
        """Call these with the time of each preparation, and with the time that an admitted program waited for one."""


class SandboxReport(Report):
    """A sandbox now."""

    sandbox_id: str
    template: str | None
    driver: str
    stage: Literal["requested", "preparing", "ready", "in_use", "reclaiming", "failed", "gone"]
    program_ids: list[str]
    given: bool = Field(description="somebody else made it")
    suspended: bool = Field(description="it stands still while its program waits for memory; no command can begin")
    handle: str | None = Field(description="the engine's name or id of it")
    address: str | None
    ports: dict[str, list[str | int]] = Field(description="by the port inside: host and port to connect to")
    details: dict[str, Any]
    age_s: float
    prepare_s: float | None
    attempt_count: int
    why: str | None
    disk_bytes: int | None
    memory_bytes: int | None


class ProgramSandboxesReport(Report):
    """A program's sandboxes."""

    program_id: str
    sandboxes: list[SandboxReport]


class SandboxesReport(Report):
    """All sandboxes."""

    sandboxes: list[SandboxReport]
    engine_errors: dict[str, str] = Field(description="drivers whose engine does not answer, and why")


class ReclaimedReport(Report):
    """Whether a program had that sandbox."""

    sandbox_id: str
    reclaimed: bool


class SandboxBody(Report):
    """What is asked for; give one of template, spec and handle."""

    template: str | None = Field(None, description="name of a template in the configuration")
    spec: dict[str, Any] | None = Field(
        None, description="a template of its own; docs/how-to/sandboxes.md has its fields"
    )
    handle: str | None = Field(None, description="a sandbox that is there already: the engine's name or id of it")
    driver: Literal["docker", "kubernetes", "callback"] = Field("docker", description="with handle: whose name it is")
    reclaim_url: str = Field("", description="with handle, for one that runs elsewhere: gets a POST at the end")
    share: str = Field("", max_length=256, description="programs that ask with the same word share one sandbox")


class SandboxCollector:
    """The sandboxes' part of `/metrics`."""

    def __init__(self, sandboxes: Sandboxes, registry: CollectorRegistry) -> None:
        """Report on `sandboxes`."""
        self._sandboxes = sandboxes
        prepare = Histogram(
            "thunderagent_sandbox_prepare_seconds",
            "Time to prepare a sandbox: pull, start, setup, readiness.",
            buckets=PREPARE_BUCKETS_S,
            registry=registry,
        )
        wait = Histogram(
            "thunderagent_sandbox_wait_seconds",
            "Time from a program's admission until its sandbox was usable.",
            buckets=WAIT_BUCKETS_S,
            registry=registry,
        )
        sandboxes.hear_times(prepare.observe, wait.observe)

    def collect(self) -> Iterator[Metric]:
        """Yield every family."""
        sandboxes = self._sandboxes
        stages = GaugeMetricFamily(
            "thunderagent_sandboxes", "Sandboxes by driver and stage.", labels=["driver", "stage"]
        )
        for (driver, stage), count in sandboxes.stage_counts().items():
            stages.add_metric([driver, stage], count)
        yield stages
        failures = CounterMetricFamily(
            "thunderagent_sandbox_failures", "Failed preparations by error code, and sandbox_died.", labels=["code"]
        )
        for code, count in sandboxes.failure_counts.items():
            failures.add_metric([code], count)
        yield failures
        yield CounterMetricFamily("thunderagent_sandboxes_reclaimed", "Sandboxes reclaimed.", sandboxes.reclaimed_count)
        yield CounterMetricFamily(
            "thunderagent_sandbox_orphans", "Sandboxes left by earlier runs and removed.", sandboxes.orphan_count
        )
        _, disk_bytes, memory_bytes = sandboxes.sums()
        for name, what, value in (("disk", "write", disk_bytes), ("memory", "take in memory", memory_bytes)):
            if value is not None:
                yield GaugeMetricFamily(f"thunderagent_sandbox_{name}_bytes", f"Bytes that sandboxes {what}.", value)
        up = GaugeMetricFamily(
            "thunderagent_sandbox_engine_down", "1 while the sandbox engine does not answer.", labels=["driver"]
        )
        for driver in sandboxes.engine_errors:
            up.add_metric([driver], 1)
        yield up


class SandboxHandlers:
    """Handlers of the sandbox API; without a manager each reports that sandboxes are off."""

    def __init__(self, sandboxes: Sandboxes | None, tenancy: Tenancy) -> None:
        """Ask `sandboxes`; a data key that names a tenant sees only those of that tenant's live programs."""
        self._given = sandboxes
        self._tenancy = tenancy
        self._queues: WeakSet[asyncio.Queue[Said | None]] = WeakSet()
        """Of open streams."""

    def routes(self) -> list[web.RouteDef]:
        """Return the routes; they go before those of programs, whose ids may hold anything."""
        return [
            web.get("/sandboxes", self.list_all),
            web.get("/sandboxes/events", self.events),
            web.get("/programs/{program_id:.+}/sandboxes", self.list_of_program),
            web.post("/programs/{program_id:.+}/sandboxes", self.request),
            web.delete("/programs/{program_id:.+}/sandboxes/{sandbox_id:[^/]+}", self.reclaim),
        ]

    async def close(self, app: web.Application) -> None:  # noqa: ARG002 - a listener's signature
        """End all streams, so that a shutdown does not wait for them."""
        for queue in self._queues:
            queue.put_nowait(None)

    @property
    def _sandboxes(self) -> Sandboxes:
        if self._given is None:
            raise NotFoundError(SANDBOXES_OFF)
        return self._given

    async def list_all(self, request: web.Request) -> web.Response:  # noqa: ARG002 - a handler's signature
        """List all sandboxes, and drivers that do not answer."""
        sandboxes = self._sandboxes
        said = {"sandboxes": sandboxes.all(), "engine_errors": sandboxes.engine_errors}
        return report_response(SandboxesReport.model_validate(said))

    async def list_of_program(self, request: web.Request) -> web.Response:
        """List a program's sandboxes; none is no error."""
        program_id = check_program_id(request.match_info["program_id"])
        sandboxes = self._sandboxes
        return _of_program(program_id, sandboxes.of_program(program_id) if self._tenancy.has(program_id) else ())

    async def request(self, request: web.Request) -> web.Response:
        """Ask for a sandbox, or several; opens the program if it is new. 202: it is made when it is needed."""
        program_id = check_program_id(request.match_info["program_id"])
        sandboxes = self._sandboxes
        self._tenancy.check(program_id)
        tenant = self._tenancy.named(request.headers.get(TENANT_HEADER, ""))
        check = partial(self._tenancy.check, program_id)
        made = await sandboxes.request(program_id, await request.read(), tenant, check)
        return _of_program(program_id, made, status=202)

    async def reclaim(self, request: web.Request) -> web.Response:
        """Remove one of a program's sandboxes. Idempotent."""
        program_id, sandbox_id = request.match_info["program_id"], request.match_info["sandbox_id"]
        sandboxes = self._sandboxes
        reclaimed = self._tenancy.has(program_id) and sandboxes.reclaim(program_id, sandbox_id)
        return report_response(ReclaimedReport(sandbox_id=sandbox_id, reclaimed=reclaimed))

    async def events(self, request: web.Request) -> web.StreamResponse:
        """Stream a report for each sandbox there is, then one for each change; of one program with `?program_id=`."""
        sandboxes = self._sandboxes
        program_id = request.query.get("program_id")
        if program_id == "":
            raise RequestError("program_id is empty")
        if program_id is None:
            check_admin()
        elif not self._tenancy.has(program_id):
            raise NotFoundError(f"there is no live program {program_id!r}")
        async with sandboxes.feed(program_id) as queue:
            self._queues.add(queue)
            there = sandboxes.all() if program_id is None else sandboxes.of_program(program_id)

            async def next_event() -> bytes | None:
                report = await queue.get()
                ended = report is None or not self._tenancy.may_touch(program_id)  # it belongs to another by now
                return None if ended or report is None else _event(report)

            return await stream_events(request, next_event, first=b"".join(map(_event, there)))


def _of_program(program_id: str, reports: Sequence[Said], status: int = 200) -> web.Response:
    said = {"program_id": program_id, "sandboxes": list(reports)}
    return report_response(ProgramSandboxesReport.model_validate(said), status=status)


def _event(report: Said) -> bytes:
    return server_sent(json.dumps(report).encode(), kind="sandbox")
