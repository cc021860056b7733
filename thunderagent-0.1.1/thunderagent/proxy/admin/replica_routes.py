"""The API that adds, drains and removes replicas: our own, and those of the SGLang gateway and slime's router."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Annotated, Literal
from urllib.parse import quote

from aiohttp import web
from prometheus_client.core import GaugeMetricFamily, Metric
from pydantic import AliasChoices, BaseModel, ConfigDict, Field

from thunderagent.backends.discovery import Wanted, wanted_of
from thunderagent.backends.discovery.base import MOST_RANKS_COUNT, shown_url
from thunderagent.errors import DiscoveryError, RequestError
from thunderagent.proxy.admin.reports import ReplicaReport, replica_reports
from thunderagent.proxy.fleet.discovery import Discovery
from thunderagent.proxy.fleet.replicas import Replicas
from thunderagent.proxy.gate.bodies import Report, read_model, report_response
from thunderagent.runtime import Runtime


class AddRequest(BaseModel):
    """An engine to add. The gateway's further fields (model, kind, priority) are not needed here."""

    model_config = ConfigDict(extra="ignore", frozen=True)

    url: str = Field(validation_alias=AliasChoices("url", "worker_url"))
    data_parallel_ranks: Annotated[int, Field(ge=1, le=MOST_RANKS_COUNT)] | Literal["auto"] | None = None

    def wanted(self) -> Wanted:
        """Return the engine. Raises `RequestError`."""
        try:
            return wanted_of(self.url, self.data_parallel_ranks)
        except DiscoveryError as error:
            raise RequestError(error.message) from error


class ReplicasChangedReport(Report):
    """Replicas that were added or changed, as they are now."""

    replicas: list[ReplicaReport]


class ReplicaRemovedReport(Report):
    """Whether a replica is gone, or is removed when nothing is in flight there any more."""

    replica_id: str
    removed: bool


class ReplicaHandlers:
    """Handlers of the routes that add, drain and remove replicas."""

    def __init__(self, runtime: Runtime, replicas: Replicas, discovery: Discovery) -> None:
        """Pass requests to `discovery`."""
        self._runtime = runtime
        self._replicas = replicas
        self._discovery = discovery

    def routes(self) -> list[web.RouteDef]:
        """Return the routes; an id may hold slashes."""
        return [
            web.post("/replicas", self.add),
            web.post("/replicas/{replica_id:.+}/drain", self.drain),
            web.post("/replicas/{replica_id:.+}/undrain", self.undrain),
            web.delete("/replicas/{replica_id:.+}", self.remove),
            web.post("/workers", self.gateway_add),
            web.delete("/workers/{replica:.+}", self.gateway_remove),
            web.post("/add_worker", self.legacy_add),
            web.post("/remove_worker", self.legacy_remove),
        ]

    # --- our own

    async def add(self, request: web.Request) -> web.Response:
        """Add an engine: 201, or 200 if all its replicas are there. Idempotent."""
        replica_ids, is_new = self._discovery.add(read_model(AddRequest, await request.read()).wanted())
        return self._report(replica_ids, status=201 if is_new else 200)

    async def drain(self, request: web.Request) -> web.Response:
        """Give a replica no new turns. Idempotent."""
        self._discovery.drain(request.match_info["replica_id"])
        return self._report([request.match_info["replica_id"]])

    async def undrain(self, request: web.Request) -> web.Response:
        """Let a replica get turns again. Idempotent."""
        self._discovery.undrain(request.match_info["replica_id"])
        return self._report([request.match_info["replica_id"]])

    async def remove(self, request: web.Request) -> web.Response:
        """Remove a replica: 202, and it drains first; if forced 200, and it is gone with its turns in flight."""
        replica_id = request.match_info["replica_id"]
        if _is_true(request, "force"):
            await self._discovery.remove_now(replica_id)
            return report_response(ReplicaRemovedReport(replica_id=replica_id, removed=True))
        self._discovery.remove(replica_id)
        return report_response(ReplicaRemovedReport(replica_id=replica_id, removed=False), status=202)

    # --- as others have it

    async def gateway_add(self, request: web.Request) -> web.Response:
        """Add an engine as the SGLang gateway does."""
        wanted = read_model(AddRequest, await request.read()).wanted()
        replica_ids, _ = self._discovery.add(wanted)
        location = f"/workers/{quote(replica_ids[0], safe=':')}"
        body = {
            "status": "accepted",
            "worker_id": replica_ids[0],
            "url": shown_url(wanted.url),
            "location": location,
            "message": "it serves after its first good poll",
        }
        return web.json_response(body, status=202, headers={"Location": location})

    async def gateway_remove(self, request: web.Request) -> web.Response:
        """Remove a replica by its id, or all at a URL, as the SGLang gateway does; what is in flight ends first."""
        named = request.match_info["replica"]
        replica_ids = [named] if named in self._replicas.known else self._discovery.ids_at(_plain_url(named))
        if not replica_ids:
            return web.json_response({"error": f"Worker {named} not found", "code": "WORKER_NOT_FOUND"}, status=404)
        for replica_id in replica_ids:
            self._discovery.remove(replica_id)
        body = {"status": "accepted", "worker_id": named, "message": "it is removed when nothing is in flight there"}
        return web.json_response(body, status=202)

    async def legacy_add(self, request: web.Request) -> web.Response:
        """Add an engine as older routers do, by `?url=` or a body."""
        url = await _url_named(request)
        self._discovery.add(AddRequest(url=url).wanted())
        return web.Response(text=f"Successfully added worker: {shown_url(url)}")

    async def legacy_remove(self, request: web.Request) -> web.Response:
        """Remove an engine as older routers do; one that is not there is no error."""
        url = await _url_named(request)
        for replica_id in self._discovery.ids_at(_plain_url(url)):
            self._discovery.remove(replica_id)
        return web.Response(text=f"Successfully removed worker: {shown_url(url)}")

    def _report(self, replica_ids: list[str], *, status: int = 200) -> web.Response:
        reports = replica_reports(self._runtime, self._replicas)
        chosen = [report for report in reports if report.replica_id in replica_ids]
        return report_response(ReplicasChangedReport(replicas=chosen), status=status)


class SourceCollector:
    """Gauges of the sources of replicas."""

    def __init__(self, discovery: Discovery) -> None:
        """Report on `discovery`."""
        self._discovery = discovery

    def collect(self) -> Iterator[Metric]:
        """Yield for each source whether it fails."""
        failing = GaugeMetricFamily(
            "thunderagent_replica_source_failing",
            "1 while a source of replicas fails; the replicas it named last stay.",
            labels=["source"],
        )
        for source, why in self._discovery.failures.items():
            failing.add_metric([source], int(bool(why)))
        yield failing


async def _url_named(request: web.Request) -> str:
    """Return the URL in the query, or in a JSON body. Raises `RequestError`."""
    named = request.query.get("url") or request.query.get("worker_url")
    if named:
        return named
    body = await request.read()
    if not body:
        raise RequestError("name an engine: ?url=http://HOST:PORT")
    return read_model(AddRequest, body).url


def _plain_url(text: str) -> str:
    """Return a URL as replicas have it; empty if it is invalid."""
    try:
        return wanted_of(text).url
    except DiscoveryError:
        return ""


def _is_true(request: web.Request, name: str) -> bool:
    text = request.query.get(name, "0").lower()
    if text not in {"0", "1", "true", "false"}:
        raise RequestError(f"{name} is 1 or 0, not {json.dumps(text)}")
    return text in {"1", "true"}
