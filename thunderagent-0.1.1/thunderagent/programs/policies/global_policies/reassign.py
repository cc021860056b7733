"""`reassign`: move replicas from idle to busy scopes; start one if all are full, end a spare one.

Theory of operation
===================
The third of the three default policies of Nalar (arXiv 2601.05109, section 6.1) takes resources from agents with a low
load and gives them to those with a high one. The agents are here the scopes that have a route of their own, such as
tenants or classes of programs. A scope is *short* if `waiting_count` programs wait for each of its replicas. It has a
replica *to spare* if nobody waits and its claims would be under `spare_ratio` of the capacity of its other replicas. A
spare replica moves to the shortest scope: both routes change, nothing starts or ends.

If no route can help, the same is asked of all replicas together: if that many wait for each, one more is started; if
there is one to spare, the one with the smallest demand, the newest of equals, drains and ends. If nobody starts and
ends replicas, this does nothing. Whoever does so decides whether there may be more or fewer: a replica that is still
there after it was to end is not asked for again. Each condition must hold for `patience_s`, and after a change nothing
changes for `rest_s`, so that a started replica can serve before the next check. The numbers are ours.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from math import inf
from typing import ClassVar, NamedTuple

from thunderagent.errors import ConfigurationError
from thunderagent.programs.messages import Reason
from thunderagent.programs.policy import GlobalPolicy, ReplicaView, View
from thunderagent.programs.state.program import RouteView


class Change(NamedTuple):
    """A replica goes from `giver` to `taker`; without routes it ends; without a replica one is started."""

    replica_id: str = ""
    giver: tuple[str, str] = ("", "")
    taker: tuple[str, str] = ("", "")

    @property
    def need(self) -> tuple[bool, tuple[str, str], tuple[str, str]]:
        """Return what it is for, whichever replica it would be."""
        return bool(self.replica_id), self.giver, self.taker


@dataclass(slots=True)
class Reassign(GlobalPolicy):
    """Move replicas between routes, start and end them."""

    waiting_count: float = 4.0
    """Programs that may wait for each replica of a route."""
    spare_ratio: float = 0.3
    """Demand below which a replica can be spared."""
    patience_s: float = 10.0
    """Seconds that a need must last."""
    rest_s: float = 60.0
    """Seconds between two changes."""
    period_s: float = 1.0
    """Seconds between two looks."""
    name: ClassVar[str] = "reassign"
    _need: tuple[bool, tuple[str, str], tuple[str, str]] | None = field(init=False, default=None, repr=False)
    _since_s: float = field(init=False, default=0.0, repr=False)
    _rests_until_s: float = field(init=False, default=-inf, repr=False)
    _ended_ids: dict[str, None] = field(init=False, default_factory=dict, repr=False)
    """Replicas that were to end."""

    def __post_init__(self) -> None:
        """Reject invalid settings."""
        if not (self.waiting_count > 0 and 0 <= self.spare_ratio < 1 and self.period_s > 0):
            raise ConfigurationError(
                "reassign: waiting_count and period_s are over 0, spare_ratio is from 0 to under 1"
            )

    def decide(self, view: View) -> None:
        """Change one thing, if it was needed for long enough."""
        if view.now_s < self._rests_until_s or not view.replicas:
            return
        routes = {(route.scope, route.name): route for route in view.routes() if route.scope != "program"}
        change = self._between(view, routes) or self._of_all(view)
        need = None if change is None else change.need
        if need != self._need:
            self._need, self._since_s = need, view.now_s
        if change is not None and view.now_s - self._since_s >= self.patience_s:
            if self._carry_out(view, change, routes):
                self._rests_until_s = view.now_s + self.rest_s
            self._need = None

    def _between(self, view: View, routes: dict[tuple[str, str], RouteView]) -> Change | None:
        """Return the move of a spare replica from its route to the shortest one."""
        own = {key: _open(view, route) for key, route in routes.items()}
        taker = max(routes, key=lambda key: _waiting_count(view, own[key]), default=None)
        if taker is None or _waiting_count(view, own[taker]) < self.waiting_count:
            return None
        for giver in routes:
            spare = self._spare(view, own[giver])
            if spare is not None and spare.replica_id not in routes[taker].targets:
                return Change(spare.replica_id, giver, taker)
        return None

    def _of_all(self, view: View) -> Change | None:
        """Return the start or end of a replica, if there are too few or too many in all."""
        if view.waiting_count >= self.waiting_count * len(view.replicas):
            return Change()
        if view.waiting_count or len(view.replicas) < 2:
            return None
        self._ended_ids = {replica_id: None for replica_id in self._ended_ids if view.replica(replica_id) is not None}
        endable = [replica for replica in view.replicas if replica.replica_id not in self._ended_ids]
        spare = self._spare(view, view.replicas, endable)
        return None if spare is None else Change(spare.replica_id)

    def _spare(
        self, view: View, replicas: Sequence[ReplicaView], endable: Sequence[ReplicaView] | None = None
    ) -> ReplicaView | None:
        """Return the endable replica with the smallest demand, if the others could do without it."""
        if len(replicas) < 2 or endable == [] or _waiting_count(view, replicas):
            return None
        spare = min(reversed(endable or replicas), key=lambda replica: replica.account.demand_tokens)
        others_tokens = sum(replica.account.limit_tokens for replica in replicas if replica is not spare)
        demand_tokens = sum(replica.account.demand_tokens for replica in replicas)
        if others_tokens == inf:  # their capacity is unknown: only an unused one is to spare
            return spare if not spare.account.turn_count and not spare.account.demand_tokens else None
        return spare if demand_tokens <= self.spare_ratio * others_tokens else None

    def _carry_out(self, view: View, change: Change, routes: dict[tuple[str, str], RouteView]) -> bool:
        if change.taker in routes and change.giver in routes:
            giver, taker = dict(routes[change.giver].targets), dict(routes[change.taker].targets)
            taker[change.replica_id] = giver.pop(change.replica_id)
            view.propose_route(*change.giver, giver, Reason.OVERLOAD)
            view.propose_route(*change.taker, taker, Reason.OVERLOAD)
            return True
        if (spare := view.replica(change.replica_id)) is not None:
            ends = view.propose_kill_replica(spare, Reason.SPARE)
            if ends:
                self._ended_ids[spare.replica_id] = None
            return ends
        return view.propose_provision(Reason.OVERLOAD)


def _open(view: View, route: RouteView) -> list[ReplicaView]:
    return [replica for replica_id in route.targets if (replica := view.replica(replica_id)) is not None]


def _waiting_count(view: View, replicas: Sequence[ReplicaView]) -> float:
    """Return how many programs wait for each of these replicas alone."""
    return sum(view.waiting_count_for(replica) for replica in replicas) / max(1, len(replicas))
