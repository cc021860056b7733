"""Which replicas there should be: the union of all sources' sets, and how the proxy gets there.

Theory of operation
===================
Each source reports its whole set; what was added through the admin API is a source, too. `_reconcile` compares the
union with the known replicas, whenever one of the sets or the number of a URL's ranks changes:

- a named but unknown replica is added;
- a known but unnamed one *leaves*: it drains, and is removed once nothing is in flight there, or when `drain_limit_s`
  is over. If it is named again before, it stays;
- one drains while a source says so, or the admin API does. Only the admin API undoes what the admin API did.

A replica that the admin API removes although another source names it stays away until that source has dropped it once,
or the admin API adds it again. A source that fails keeps its last set.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

import structlog

from thunderagent.backends import Backend
from thunderagent.backends.discovery import AUTO, RanksCount, Source, Wanted
from thunderagent.backends.discovery.base import replica_id_of, shown_url
from thunderagent.backends.poller import ReplicaEndpoint
from thunderagent.errors import ConfigurationError, NotFoundError, ReplicaLeavingError, RequestError
from thunderagent.proxy.fleet.replicas import Replicas
from thunderagent.runtime import Runtime

log = structlog.get_logger("thunderagent.discovery")

API = "api"
"""The admin API as a source."""

LOOK_S = 0.05
"""How often to check, while a replica leaves, whether anything is still in flight there."""


@dataclass(frozen=True, slots=True)
class DiscoverySettings:
    """How replicas come and go."""

    ranks_count: RanksCount = 1
    """For URLs that do not say their own."""
    drain_limit_s: float = 300.0
    """A leaving replica is removed after this time, whatever is in flight there."""


class Discovery:
    """Keeps the replicas in line with the sources. All methods belong to one event loop."""

    def __init__(
        self,
        runtime: Runtime,
        replicas: Replicas,
        make_backend: Callable[[], Backend],
        settings: DiscoverySettings,
        sources: Iterable[Source] = (),
    ) -> None:
        """Follow `sources` while it runs; `make_backend` creates the backend of each replica."""
        self._runtime = runtime
        self._replicas = replicas
        self._make_backend = make_backend
        self._settings = settings
        self._sources = tuple(sources)
        self._wanted: dict[str, dict[str, Wanted]] = {API: {}}
        """The last set of each source, by URL."""
        self._found_ranks: dict[str, int] = {}
        """How many ranks each URL was found to have."""
        self._drained_ids: set[str] = set()
        """Replicas that the admin API drained."""
        self._refused_ids: set[str] = set()
        """Replicas that the admin API removed, while a source names them."""
        self._left: set[str] = set()
        """Replicas that leave."""
        self._leaving = asyncio.Event()
        self._problems: dict[str, str] = {}
        """Why some named replicas cannot be followed."""
        replicas.on_ranks_found = self.ranks_found
        self.failures: dict[str, str] = {source.name: "" for source in self._sources}
        """Why each source cannot report its set; empty while it can."""

    def __repr__(self) -> str:
        return f"<Discovery by {', '.join(self._wanted)}: {self._replicas!r}>"

    async def run(self) -> None:
        """Follow the sources, and remove what leaves, until cancelled."""
        async with asyncio.TaskGroup() as group:
            for source in self._sources:
                group.create_task(source.run(self), name=f"replicas from {source.name}")
            group.create_task(self._remove_what_left(), name="replicas that leave")

    # --- what sources say

    def replicas_wanted(self, source: str, wanted: Sequence[Wanted]) -> None:
        """See `DiscoveryListener`."""
        if self.failures.get(source):
            log.info("replica_source_recovered", source=source)
        self.failures[source] = ""
        self._wanted[source] = {each.url: each for each in wanted}
        self._reconcile()

    def source_failed(self, source: str, why: str) -> None:
        """See `DiscoveryListener`."""
        if self.failures.get(source) != why:
            kept = len(self._wanted.get(source, ()))
            log.error("replica_source_failed", source=source, why=why, replicas_kept_count=kept)
        self.failures[source] = why

    def ranks_found(self, url: str, ranks_count: int) -> None:
        """Record how many ranks a URL has, from the poller."""
        if self._found_ranks.get(url, 1) != ranks_count:
            log.info("replica_ranks_found", url=shown_url(url), ranks_count=ranks_count)
            self._found_ranks[url] = ranks_count
            self._reconcile()

    # --- what the admin API says

    def add(self, wanted: Wanted) -> tuple[list[str], bool]:
        """Add an engine; return the ids of its replicas, and whether any is new. Raises `RequestError`."""
        known = {replica_id for replica_id in self._replicas.known if replica_id not in self._left}
        endpoints = self._endpoints_of(wanted)
        self._refused_ids.difference_update(endpoint.replica_id for endpoint in endpoints)
        before = self._wanted[API].get(wanted.url)
        self._wanted[API][wanted.url] = wanted
        self._reconcile()
        added = [endpoint.replica_id for endpoint in self._endpoints_of(wanted)]
        problem = next((self._problems[replica_id] for replica_id in added if replica_id in self._problems), None)
        if problem is not None:
            if before is None:
                del self._wanted[API][wanted.url]
            else:
                self._wanted[API][wanted.url] = before
            self._reconcile()
            raise RequestError(problem)
        return added, not known.issuperset(added)

    def remove(self, replica_id: str) -> None:
        """Remove a replica after draining, whoever names it. Raises `NotFoundError`."""
        self._known(replica_id)
        self._refused_ids.add(replica_id)
        self._drop_from_api()
        self._reconcile()

    async def remove_now(self, replica_id: str) -> None:
        """Remove a replica at once: what is in flight there fails. Raises `NotFoundError`."""
        self.remove(replica_id)
        await self._remove(replica_id)

    def drain(self, replica_id: str) -> None:
        """Give a replica nothing new until it is undrained. Raises `NotFoundError`."""
        self._known(replica_id)
        self._drained_ids.add(replica_id)
        self._reconcile()

    def undrain(self, replica_id: str) -> None:
        """Undo `drain`. Raises `NotFoundError`, and `ReplicaLeavingError` if it drains because it leaves."""
        self._known(replica_id)
        if replica_id in self._left:
            raise ReplicaLeavingError(
                f"replica {replica_id} is leaving, because no source names it any more; add it again"
            )
        self._drained_ids.discard(replica_id)
        self._reconcile()

    def ids_at(self, url: str) -> list[str]:
        """Return the replicas at a URL: several, if it has ranks."""
        known = self._replicas.known.items()
        return [replica_id for replica_id, replica in known if replica.endpoint.url == url]

    def _known(self, replica_id: str) -> None:
        if replica_id not in self._replicas.known:
            raise NotFoundError(f"there is no replica {replica_id!r}")

    def _drop_from_api(self) -> None:
        """Drop URLs from the admin API's own set whose replicas it all removed."""
        mine = self._wanted[API]
        for wanted in list(mine.values()):
            if all(endpoint.replica_id in self._refused_ids for endpoint in self._endpoints_of(wanted)):
                del mine[wanted.url]

    # --- from what is to what should be

    def _endpoints_of(self, wanted: Wanted) -> list[ReplicaEndpoint]:
        """Return an engine's replicas: one, or one for each rank."""
        setting = wanted.ranks_count or self._settings.ranks_count
        finds_ranks = setting == AUTO
        ranks_count = self._found_ranks.get(wanted.url, 1) if setting == AUTO else setting
        rank_ids = range(ranks_count) if ranks_count > 1 else [None]
        return [
            ReplicaEndpoint(replica_id_of(wanted.url, rank_id), wanted.url, self._make_backend(), rank_id, finds_ranks)
            for rank_id in rank_ids
        ]

    def _reconcile(self) -> None:
        """Add missing replicas, let unnamed ones leave, drain and undrain."""
        endpoints: dict[str, ReplicaEndpoint] = {}
        sources: dict[str, list[str]] = {}
        draining_ids = set(self._drained_ids)
        for source, wanted in self._wanted.items():
            for each in wanted.values():
                for endpoint in self._endpoints_of(each):
                    endpoints.setdefault(endpoint.replica_id, endpoint)
                    sources.setdefault(endpoint.replica_id, []).append(source)
                    if each.is_draining:
                        draining_ids.add(endpoint.replica_id)
        self._refused_ids &= set(endpoints)
        for replica_id in self._refused_ids:
            del endpoints[replica_id]
        known = self._replicas.known
        self._problems = {replica_id: why for replica_id, why in self._problems.items() if replica_id in endpoints}
        for replica_id, endpoint in endpoints.items():
            if replica_id not in known:
                self._add(endpoint, sources[replica_id])
        for replica_id, replica in known.items():
            # A replica that is named differently, with a password or as one of several ranks, leaves and is added
            # again.
            is_named = endpoints.get(replica_id) == replica.endpoint
            replica.sources = tuple(sources[replica_id]) if is_named else ()
            if not is_named:
                self._leave(replica_id)
            else:
                self._stay(replica_id)
                if replica_id in draining_ids:
                    self._drain(replica_id)
                else:
                    self._undrain(replica_id)

    def _drain(self, replica_id: str) -> None:
        """Give a replica nothing new; what is in flight there may end. Idempotent."""
        known = self._replicas.known[replica_id]
        if known.draining_since_s is None:
            known.draining_since_s = self._runtime.now_s()
            log.info("replica_draining", replica_id=replica_id)
            if known.is_up:
                self._runtime.replica_draining(replica_id)

    def _undrain(self, replica_id: str) -> None:
        """Let a replica get turns again. Idempotent."""
        known = self._replicas.known[replica_id]
        if known.draining_since_s is not None:
            known.draining_since_s = None
            log.info("replica_undrained", replica_id=replica_id)
            if known.is_up:
                self._runtime.replica_up(replica_id)

    def _add(self, endpoint: ReplicaEndpoint, sources: Sequence[str]) -> None:
        replica_id, url = endpoint.replica_id, shown_url(endpoint.url)
        try:
            self._replicas.add(endpoint)
        except ConfigurationError as error:
            if self._problems.get(replica_id) != error.message:
                self._problems[replica_id] = error.message
                log.warning("replica_unusable", replica_id=replica_id, url=url, why=error.message, sources=sources)
        else:
            self._problems.pop(replica_id, None)
            log.info("replica_added", replica_id=replica_id, url=url, sources=sources)

    def _leave(self, replica_id: str) -> None:
        if replica_id not in self._left:
            self._left.add(replica_id)
            replica = self._replicas.known[replica_id]
            replica.leaving_since_s = self._runtime.now_s()
            log.info("replica_leaving", replica_id=replica_id, drain_limit_s=self._settings.drain_limit_s)
            self._drain(replica_id)
            self._leaving.set()

    def _stay(self, replica_id: str) -> None:
        if replica_id in self._left:
            self._left.discard(replica_id)
            self._replicas.known[replica_id].leaving_since_s = None
            log.info("replica_stays", replica_id=replica_id)

    async def _remove_what_left(self) -> None:
        """Remove leaving replicas as soon as nothing is in flight there, or their time is over."""
        while True:
            await self._leaving.wait()
            await self.remove_drained()
            if self._left:
                await asyncio.sleep(LOOK_S)
            else:
                self._leaving.clear()

    async def remove_drained(self) -> None:
        """Remove leaving replicas that are drained or late."""
        for replica_id in list(self._left):
            replica = self._replicas.known.get(replica_id)
            since_s = replica.leaving_since_s if replica is not None else None
            if since_s is None:  # removed or kept since the list was made
                continue
            is_late = self._runtime.now_s() - since_s >= self._settings.drain_limit_s
            if is_late or not self._replicas.in_flight_count(replica_id):
                await self._remove(replica_id)

    async def _remove(self, replica_id: str) -> None:
        self._left.discard(replica_id)
        self._drained_ids.discard(replica_id)
        replica = self._replicas.known.get(replica_id)
        if replica is not None:
            lost_count = self._replicas.in_flight_count(replica_id)
            log.info("replica_removed", replica_id=replica_id, lost_requests_count=lost_count)
            named = {url for wanted in self._wanted.values() for url in wanted}
            url = replica.endpoint.url
            if url not in named and self.ids_at(url) == [replica_id]:  # the poller forgets with the last of them
                self._found_ranks.pop(url, None)
            await self._replicas.remove(replica_id)
            self._reconcile()  # it may be named differently by now
