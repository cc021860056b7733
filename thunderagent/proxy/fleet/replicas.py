"""The replicas as the proxy knows them: where each is, its last poll, and who must hear of it.

They come and go while it runs. A draining replica finishes what it has. The scheduler is not told that it comes up
meanwhile, because for the scheduler *up* means usable. A removed replica is forgotten everywhere.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Collection, Sequence
from itertools import count
from typing import Protocol

import structlog

from thunderagent.backends.base import NamedTurn
from thunderagent.backends.poller import ReplicaEndpoint
from thunderagent.errors import NoReplicaError, ReplicaRemovedError
from thunderagent.leases import ReplicaMap, TurnHint
from thunderagent.leases.open_lease import FleetSource
from thunderagent.programs.messages import (
    BACKPRESSURE,
    Decision,
    Event,
    GrantsContinued,
    GrantsSuspended,
    ReplicaDown,
    ReplicaUp,
)
from thunderagent.programs.state.health import LOST
from thunderagent.proxy.fleet.breaker import Breakers, BreakerSettings
from thunderagent.proxy.fleet.client import ReplicaClient
from thunderagent.proxy.fleet.engine_plugins import EnginePlugins
from thunderagent.proxy.fleet.known import KnownReplica, Weights
from thunderagent.proxy.fleet.notices import NoticeSender, TaggedPrograms
from thunderagent.proxy.fleet.priorities import EnginePriorities

log = structlog.get_logger("thunderagent.replicas")

_MAY_PAUSE = frozenset({GrantsSuspended, GrantsContinued, ReplicaUp, ReplicaDown})


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
        self._tagged = TaggedPrograms(self._program_ended, runtime.observe)
        self.plugins = EnginePlugins(
            self.known,
            notice_timeout_s,
            is_wanted=uses_plugins,
            hold_s=engine_hold_s,
            observe=runtime.observe,
            replicas_of=self._tagged.replicas_of,
        )

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
        branch_id: str = "",
    ) -> NamedTurn:
        """Return a turn's body as sent to a replica: with an id of ours for engines that take abort notices.

        A plugin gets its program's id, or that of its branch, and how long to hold its blocks afterwards, by the
        client's `hint`.
        """
        known = self.known.get(replica_id)
        notices = known.endpoint.backend.notices if known is not None else None
        if notices is not None:
            named = notices.name_turn(path, body, program_id, tags_programs=self._tags_programs)
        elif program_id is not None and replica_id in self.plugins.on_ids:
            named = self.plugins.name_turn(path, body, program_id, hint, branch_id)
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
