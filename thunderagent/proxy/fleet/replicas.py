"""The replicas as the proxy knows them: where each is, its last poll, and who must hear of it.

They come and go while it runs. A draining replica finishes what it has. The scheduler is not told that it comes up
meanwhile, because for the scheduler *up* means usable. A removed replica is forgotten everywhere.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field
from itertools import count
from typing import Protocol

import structlog

from thunderagent.backends.base import NOTHING_READ, NamedTurn, ReplicaReading
from thunderagent.backends.poller import ReplicaEndpoint
from thunderagent.errors import NoReplicaError, ReplicaRemovedError
from thunderagent.leases import FleetSource, ReplicaMap, TurnHint
from thunderagent.programs.model.decisions import Decision, Release
from thunderagent.programs.model.events import Event
from thunderagent.programs.model.fleet_events import (
    BACKPRESSURE,
    GrantsContinued,
    GrantsSuspended,
    ReplicaDown,
    ReplicaUp,
)
from thunderagent.programs.model.verdict import LOST
from thunderagent.proxy.fleet.breaker import Breakers, BreakerSettings
from thunderagent.proxy.fleet.client import ReplicaClient
from thunderagent.proxy.fleet.engine_plugins import EnginePlugins
from thunderagent.proxy.fleet.notices import NoticeSender, TaggedPrograms
from thunderagent.proxy.fleet.priorities import EnginePriorities
from thunderagent.proxy.fleet.weights import Weights

log = structlog.get_logger("thunderagent.replicas")

_MAY_PAUSE = frozenset({GrantsSuspended, GrantsContinued, ReplicaUp, ReplicaDown})


NOT_POLLED = "not polled yet"
"""Why a replica is down at first."""


class Watcher(Protocol):
    """What the proxy needs of the poller."""

    def suspect(self, replica_id: str) -> None:
        """Poll a replica at once, because a request just failed there."""

    def refused(self, replica_id: str) -> None:
        """Treat a replica as down until a poll says otherwise, because it refused a connection."""


class Connections(Protocol):
    """What the replicas need of the client."""

    def add(self, endpoint: ReplicaEndpoint) -> None:
        """Allow requests to a replica."""

    async def remove(self, replica_id: str) -> None:
        """Close all connections to a replica at once."""

    def requests_count(self, replica_id: str) -> int:
        """Return how many requests to a replica have not ended."""

    def lose(self, replica_id: str, why: str, sent_ago_s: float = 0.0) -> None:
        """Fail the requests in flight to a replica that were sent so long ago. An unknown id is ignored."""

    def set_paused(self, replica_id: str, *, paused: bool) -> None:
        """Set whether a replica's silence is no failure. An unknown id is ignored."""


class Follower(Protocol):
    """Others that must know which replicas exist: the poller, and the listener of KV events."""

    def add(self, replica: ReplicaEndpoint) -> None:
        """Follow a replica from now on."""

    def remove(self, replica_id: str) -> None:
        """Stop following a replica. An unknown id is ignored."""


@dataclass(slots=True)
class KnownReplica:
    """One replica's address and last reading, and whether it is leaving."""

    endpoint: ReplicaEndpoint
    reading: ReplicaReading = NOTHING_READ
    counted: ReplicaReading = NOTHING_READ
    """The last reading with totals: later ones may have failed, and what happened meanwhile counts."""
    process: ReplicaReading = NOTHING_READ
    """The last reading that tells which process answered."""
    asked_s: float = 0.0
    """When it was asked for its last reading."""
    first_models: tuple[str, ...] = ()
    """What its process listed first; empty until it has listed any."""
    incarnation: int = 0
    """The last one that was heard of."""
    is_lost: bool = False
    """Whether what was in flight there when it fell silent was given up."""
    why_down: str = NOT_POLLED
    weight_version: str = ""
    """Version of the weights that it was last told to load, or reported; empty if unknown."""
    weights: Weights = field(default_factory=Weights)
    """What is known of versions, over all replicas."""
    weight_number: int = 0
    """The number of its weights, as far as the proxy was told, or saw: greater for newer ones, on any replica."""
    cache_serial: int = 0
    """Another one whenever what its cache holds may be of other weights."""
    is_suspended: bool = False
    """Whether nothing is granted there."""
    told_count: int = 0
    """Number of calls to it that its own reports must not predate."""
    is_up: bool = False
    sources: tuple[str, ...] = ()
    """Sources that name it."""
    draining_since_s: float | None = None
    leaving_since_s: float | None = None
    """Since when no source has named it: it is removed when nothing is in flight there."""
    served_last: int = 0
    """The number of the latest request without a lease that went there."""
    _is_unnamed: bool = False
    """Whether its weights have changed since their version was last named."""
    _was_counted: bool = False
    """Whether a change was counted since nothing is granted there."""

    def __post_init__(self) -> None:
        """Give its cache a serial."""
        self.cache_serial = self.weights.next_serial()

    def weights_changed(self, version: str, *, renewed: bool) -> None:
        """Note new weights, or a new name for them, or both; an empty version is none."""
        if not renewed and version in ("", self.weight_version):
            return
        if renewed or (version and version != self.weight_version and not self._is_unnamed):
            self.cache_serial = self.weights.next_serial()
            if not self._was_counted:
                self.weight_number += 1
            self._was_counted = self.is_suspended
        self._is_unnamed = (renewed or self._is_unnamed) and not version
        self.weights_named(version)

    def weights_named(self, version: str) -> None:
        """Note the name of the weights that it has; an empty one is none."""
        if version:
            self.weight_version = version
            self.weight_number = self.weights.number_of(version, self.weight_number)
        self.weights.changed(self.endpoint.replica_id)

    def cache_in_doubt(self) -> None:
        """Note that its weights may have changed: what its cache holds may be of others."""
        self.cache_serial = self.weights.next_serial()

    def set_suspended(self, *, is_suspended: bool) -> None:
        """Note whether nothing is granted there."""
        self.is_suspended = is_suspended
        self._was_counted = self._was_counted and is_suspended


class Replicas:
    """Knows where each replica is, and sends engines their notices.

    With `tags_programs`, turns carry their program's id to engines that can free its memory. With `uses_plugins`,
    engines whose scheduler knows programs are told of them; `engine_hold_s` is how long such an engine holds a
    program's blocks after a turn without a hint, None leaves that to it.
    """

    def __init__(
        self,
        runtime: FleetSource,
        endpoints: list[ReplicaEndpoint],
        *,
        breaker_settings: BreakerSettings | None = None,
        tags_programs: bool = False,
        notice_timeout_s: float = 5.0,
        uses_plugins: bool = True,
        engine_hold_s: float | None = None,
    ) -> None:
        """Start with `endpoints`, none of them up yet."""
        self.breakers = Breakers(runtime, breaker_settings or BreakerSettings())
        self._runtime = runtime
        self.map: ReplicaMap = runtime.replicas
        """The replicas, as last pushed."""
        self.on_ranks_found: Callable[[str, int], None] = lambda url, ranks_count: None  # noqa: ARG005
        self.on_removed: list[Callable[[str], None]] = []
        """Called with the id of each removed replica."""
        self._followers: list[Follower] = []
        self._connections: Connections | None = None
        self.weights = Weights()
        self.known = {endpoint.replica_id: KnownReplica(endpoint, weights=self.weights) for endpoint in endpoints}
        """By id, in the order in which they were added."""
        self._tags_programs = tags_programs
        self._numbers = count(1)
        self._notices = NoticeSender(self._url_if_known, notice_timeout_s)
        self.priorities = EnginePriorities(self.known, notice_timeout_s)
        for endpoint in endpoints:
            runtime.replica_at(endpoint.replica_id, endpoint.url)
        self._tagged = TaggedPrograms(self._program_ended)
        self.plugins = EnginePlugins(
            self.known,
            notice_timeout_s,
            is_wanted=uses_plugins,
            hold_s=engine_hold_s,
            observe=runtime.observe,
            replicas_of=self._tagged.replicas_of,
        )
        runtime.observe(self._tagged.heard, Release)

    def __repr__(self) -> str:
        return f"<Replicas {', '.join(self.known)}>"

    def attach(self, connections: Connections, *followers: Follower) -> None:
        """Tell these of every replica that is added or removed from now on."""
        self._connections = connections
        self._followers.extend(followers)
        self._runtime.observe(self._note_pauses, *_MAY_PAUSE)

    def _note_pauses(self, event: Event, decisions: Sequence[Decision]) -> None:  # noqa: ARG002 - an observer's signature
        """Allow silence on replicas where nothing is granted: their engines are paused, sleep, or get new weights.

        Of a replica that is silent or frozen nothing will come once it is declared lost: what is in flight there ends.
        """
        if self._connections is None:
            return
        for replica_id, state in self._runtime.replicas.states.items():
            paused = any(cause != BACKPRESSURE for cause in state.suspended_for)
            self._connections.set_paused(replica_id, paused=paused)
            if replica_id in self.known:
                self.known[replica_id].set_suspended(is_suspended=paused)
        if isinstance(event, ReplicaDown | ReplicaUp):
            now, known = self._runtime.replicas.get(event.replica_id), self.known.get(event.replica_id)
            if now is None or known is None or now.incarnation == known.incarnation:
                return
            known.incarnation = now.incarnation
            if now.verdict in LOST:
                self._connections.lose(event.replica_id, f"{now.verdict}: {now.why}")

    def lose_earlier(self, replica_id: str, why: str, sent_ago_s: float) -> None:
        """Fail the requests that were sent to a replica so long ago: the process that had them is gone."""
        if self._connections is not None:
            self._connections.lose(replica_id, why, sent_ago_s)

    def aborted_ago_s(self, replica_id: str) -> float:
        """Return how long ago a trainer aborted what runs on a replica; infinite if never, or that is unknown here."""
        return self._runtime.aborted_ago_s(replica_id)

    def url_of(self, replica_id: str) -> str:
        """Return the base URL of a replica. Raises `ReplicaRemovedError` if it is gone."""
        known = self.known.get(replica_id)
        if known is None:
            raise ReplicaRemovedError(f"replica {replica_id} was removed", replica_id=replica_id)
        return known.endpoint.url

    def engines(self) -> list[list[str]]:
        """Return the ids of all replicas, those together that are ranks behind one URL."""
        by_url: dict[str, list[str]] = {}
        for replica_id, known in self.known.items():
            by_url.setdefault(known.endpoint.url, []).append(replica_id)
        return list(by_url.values())

    # --- coming and going

    def add(self, endpoint: ReplicaEndpoint) -> KnownReplica:
        """Add a replica; it gets its first turn after its first good poll.

        Raises `ConfigurationError` if a follower cannot follow it; then none does.
        """
        replica_id = endpoint.replica_id
        assert replica_id not in self.known, replica_id
        assert self._connections is not None
        known = self.known[replica_id] = KnownReplica(endpoint, weights=self.weights)
        known.weight_number = max(each.weight_number for each in self.known.values())
        try:
            for follower in self._followers:
                follower.add(endpoint)
        except Exception:
            del self.known[replica_id]
            for follower in self._followers:
                follower.remove(replica_id)
            raise
        self._connections.add(endpoint)
        self._runtime.replica_at(replica_id, endpoint.url)
        return known

    def in_flight_count(self, replica_id: str) -> int:
        """Return how many turns and other requests have not ended there."""
        requests_count = self._connections.requests_count(replica_id) if self._connections is not None else 0
        return max(requests_count, self._runtime.turns_count(replica_id))

    async def remove(self, replica_id: str) -> None:
        """Forget a replica; what is in flight there fails as if it had gone down. An unknown id is ignored.

        Everything except closing connections is done before the first await.
        """
        if self.known.pop(replica_id, None) is None:
            return
        assert self._connections is not None
        for follower in self._followers:
            follower.remove(replica_id)
        self._notices.forget(replica_id)
        self.priorities.forget(replica_id)
        self.plugins.forget(replica_id)
        self._runtime.replica_removed(replica_id)
        for forget in self.on_removed:
            forget(replica_id)
        await self._connections.remove(replica_id)

    # --- what goes where

    def known_id(self, replica_id: str | None) -> str | None:
        """Return the id if there is such a replica, up or not."""
        return replica_id if replica_id in self.known else None

    @property
    def has_pools(self) -> bool:
        """Whether a request's model matters."""
        return self._runtime.replicas.has_pools

    def serving(self, program_id: str | None = None, avoid: Collection[str] = (), model: str = "") -> str:
        """Return the replica for a request without a lease: its program's, or the least busy one.

        A replica is busy with turns or other requests in flight; among equals, the one served least recently is next.
        Never one to `avoid`, because it just failed; if there are several pools, one of the named `model`'s pool.
        Raises `NoReplicaError` if no other is up, `UnknownModelError`.
        """
        home_id = self._runtime.home_of(program_id, model) if program_id else None
        if home_id is not None and home_id not in avoid:
            return home_id
        usable_ids = [replica_id for replica_id in self._runtime.replicas.open_ids if replica_id not in avoid]
        if model and self.has_pools:
            of_model = self._runtime.ids_serving(model)
            usable_ids = [replica_id for replica_id in usable_ids if replica_id in of_model]
        if not usable_ids:
            raise NoReplicaError("no replica is up")
        chosen_id = min(
            usable_ids, key=lambda each_id: (self.in_flight_count(each_id), self.known[each_id].served_last)
        )
        self.known[chosen_id].served_last = next(self._numbers)
        return chosen_id

    async def run(self, client: ReplicaClient) -> None:
        """Send notices to engines, ask them about priorities, and speak with plugins, by `client` until cancelled."""
        async with asyncio.TaskGroup() as group:
            group.create_task(self.priorities.run(client))
            group.create_task(self._notices.run(client))
            group.create_task(self.plugins.run(client))

    def has_notices(self, replica_id: str) -> bool:
        """Return whether a replica is told of turns and programs; False if removed: sending reports that."""
        known = self.known.get(replica_id)
        return known is not None and (known.endpoint.backend.notices is not None or replica_id in self.plugins.on_ids)

    def name_turn(
        self,
        replica_id: str,
        path: str,
        body: bytes,
        program_id: str | None,
        authorization: str | None,
        hint: TurnHint | None = None,
    ) -> NamedTurn:
        """Return a turn's body as sent to a replica: with an id of ours for engines that take abort notices.

        A plugin gets its program's id, and how long to hold its blocks afterwards, by the client's `hint`.
        """
        known = self.known.get(replica_id)
        notices = known.endpoint.backend.notices if known is not None else None
        if notices is not None:
            named = notices.name_turn(path, body, program_id, tags_programs=self._tags_programs)
        elif program_id is not None and replica_id in self.plugins.on_ids:
            named = self.plugins.name_turn(path, body, program_id, hint)
        else:  # or it was removed since the grant: sending reports that
            return NamedTurn(body)
        if named.is_tagged and program_id is not None:
            self._tagged.add(program_id, replica_id, authorization)
        return named

    def abort_turn(self, replica_id: str, engine_request_id: str, authorization: str | None = None) -> None:
        """Abort a request that nobody waits for; does nothing for one without an id. Never blocks."""
        known = self.known.get(replica_id)
        if known is not None and known.endpoint.backend.notices is not None and engine_request_id:
            notice = known.endpoint.backend.notices.turn_left(engine_request_id)
            self._notices.send(replica_id, notice, authorization)

    def _program_ended(self, program_id: str, replica_id: str, authorization: str | None) -> None:
        if replica_id in self.plugins.on_ids:
            self.plugins.release(replica_id, program_id)
            return
        known = self.known.get(replica_id)
        if known is not None and known.endpoint.backend.notices is not None:
            self._notices.send(replica_id, known.endpoint.backend.notices.program_ended(program_id), authorization)

    def _url_if_known(self, replica_id: str) -> str | None:
        known = self.known.get(replica_id)
        return known.endpoint.url if known is not None else None

    def came_up(self, replica_id: str) -> None:
        """Start over with a replica: another engine may run there now."""
        self._notices.replica_up(replica_id)
        self.priorities.forget(replica_id)
        self.plugins.came_up(replica_id)
