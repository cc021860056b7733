"""What an open dashboard asks for: the current state, its history, and events."""

from __future__ import annotations

import math
from collections.abc import Callable

from aiohttp import web
from pydantic import Field

import thunderagent
from thunderagent.errors import RequestError
from thunderagent.proxy.admin.cell import CellReport
from thunderagent.proxy.fleet.replicas import Replicas
from thunderagent.proxy.gate.bodies import Report, report_response
from thunderagent.proxy.reading.header_words import check_program_id
from thunderagent.proxy.watch.autoscaling import demand_ratio
from thunderagent.proxy.watch.event_feed import KINDS, SIGNAL_KINDS, EventFeed
from thunderagent.proxy.watch.event_stream import stream_events
from thunderagent.proxy.watch.history import INTERVAL_S, History, Rates, Sample
from thunderagent.proxy.watch.last_errors import LastErrors, TurnErrorReport
from thunderagent.runtime import Runtime

SIGNALS = "signals"
"""All kinds of the information stream together."""


class SummaryReport(Report):
    """The figures to look at first."""

    version: str
    policy: str
    started_s: float = Field(description="Unix time; another one is another process, whose totals begin at 0")
    closing: bool = Field(description="the proxy is shutting down")
    sandboxes_on: bool
    engines_are_simulated: bool = Field(description="nobody named a backend, so the answers are made-up words")
    replicas_count: int
    replicas_up_count: int
    programs_count: int
    longest_held_s: float | None = Field(description="how long the turn has waited that has waited longest")
    demand_ratio: float | None = Field(
        description="memory that programs claim or wait for, as a part of what usable replicas may give"
    )
    now: Sample
    rates: Rates
    last_errors: list[TurnErrorReport] = Field(description="the last turns whose clients got an error, newest first")
    cell: CellReport | None = Field(None, description="of a scheduler that has gateways, or may have")


class HistoryReport(Report):
    """Samples, the oldest first."""

    started_s: float
    interval_s: float
    samples: list[Sample]


class Live:
    """Handlers of `/summary`, `/history` and `/events`."""

    def __init__(
        self,
        runtime: Runtime,
        replicas: Replicas,
        history: History,
        *,
        sandboxes_on: bool,
        simulated: bool,
        cell: Callable[[], CellReport] | None = None,
    ) -> None:
        """Report on `runtime` and `replicas`; `cell` returns the cell report of a scheduler with gateways."""
        self._cell = cell
        self._simulated = simulated
        self._sandboxes_on = sandboxes_on
        self._runtime = runtime
        self._replicas = replicas
        self._history = history
        self._last_errors = LastErrors(runtime)
        self.feed = EventFeed(runtime)

    def routes(self) -> list[web.RouteDef]:
        """Return the routes."""
        return [
            web.get("/summary", self.summary),
            web.get("/history", self.history),
            web.get("/events", self.events),
        ]

    async def close(self, app: web.Application) -> None:  # noqa: ARG002 - a listener's signature
        """End all streams, so that a shutdown does not wait for them."""
        self.feed.close()

    async def summary(self, request: web.Request) -> web.Response:  # noqa: ARG002 - a handler's signature
        """Tell the key figures."""
        scheduler = self._runtime.scheduler
        sample, rates = self._history.now()
        schedulers = self._runtime.pools.schedulers
        ratio = demand_ratio(schedulers)
        return report_response(
            SummaryReport(
                version=thunderagent.__version__,
                policy=scheduler.policy.name,
                started_s=self._history.started_s,
                closing=self._runtime.closing,
                sandboxes_on=self._sandboxes_on,
                engines_are_simulated=self._simulated,
                replicas_count=len(self._replicas.known),
                replicas_up_count=sum(len(each.open_replicas) for each in schedulers),
                programs_count=len(self._runtime.programs),
                longest_held_s=sample.longest_held_s,
                demand_ratio=None if ratio is None else round(ratio, 4),
                now=sample,
                rates=rates,
                last_errors=self._last_errors.reports(),
                cell=self._cell() if self._cell is not None else None,
            )
        )

    async def history(self, request: web.Request) -> web.Response:
        """Give the samples of the last quarter of an hour, or those after `since`."""
        text = request.query.get("since", "0")
        try:
            since_s = float(text)
        except ValueError:
            since_s = math.nan
        if not math.isfinite(since_s):
            raise RequestError(f"since is a Unix time in seconds, not {text!r}")
        samples = self._history.since(since_s)
        return report_response(HistoryReport(started_s=self._history.started_s, interval_s=INTERVAL_S, samples=samples))

    async def events(self, request: web.Request) -> web.StreamResponse:
        """Stream what the scheduler hears and decides; of one `program_id`, of some `kinds`, after `Last-Event-ID`."""
        program_id = request.query.get("program_id")
        if program_id is not None:
            check_program_id(program_id)
        kinds = frozenset(kind for kind in request.query.get("kinds", "").split(",") if kind) or KINDS
        if SIGNALS in kinds:
            kinds = kinds - {SIGNALS} | SIGNAL_KINDS
        after_id = request.headers.get("Last-Event-ID", "")
        with self.feed.listen(program_id=program_id, kinds=kinds, after_id=after_id) as listener:
            return await stream_events(request, listener.next_events, first=listener.greeting())
