"""Which replicas programs were told to go to, by an operator or a global policy.

A route is for a program, or for all of a group, of a class, of a tenant, or for everybody; the narrowest that there is
counts. It names replicas with weights. A program is sent to one of them when it is placed, those that get more
programs by their weights first, and stays with it while that replica is open: its history lies there. While no replica
of its route is open the route is as if it were not there.

A program that must wait does so in a queue of its replica, which the policy does not see: whenever there may be room,
the policy is asked for the first of each such queue, and then balances for all others. While it waits nobody that comes
after it gets the room of that replica (`PausedQueue`), or only for a bounded time (`breakeven`).
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

from thunderagent.programs.book.book import Book
from thunderagent.programs.book.replica import Replica
from thunderagent.programs.model.advice.routes import Route, Scope, Targets, is_for
from thunderagent.programs.model.decisions import Reason, SetRoute
from thunderagent.programs.model.program import Program
from thunderagent.programs.model.views import RouteView
from thunderagent.programs.rules.verbs import Verbs


class Routes:
    """All routes there are. To find a program's costs the same however many there are."""

    __slots__ = ("_by_scope", "_count")

    def __init__(self) -> None:
        """Begin without any."""
        self._by_scope: dict[Scope, dict[str, Route]] = {scope: {} for scope in Scope}
        self._count = 0

    def __len__(self) -> int:
        return self._count

    def __iter__(self) -> Iterator[tuple[Scope, str, Route]]:
        """Yield all routes, with whom they are for."""
        for scope, routes in self._by_scope.items():
            for name, route in routes.items():
                yield scope, name, route

    def set(self, scope: Scope, name: str, targets: Targets) -> Route | None:
        """Set a route in place of the one that was there, which is returned; no targets take it back."""
        routes = self._by_scope[scope]
        before = routes.pop(name, None)
        self._count += bool(targets) - (before is not None)
        if targets:
            routes[name] = Route(targets)
        return before

    def naming(self, replica_ids: Iterable[str]) -> list[Route]:
        """Return the routes that lead to any of these replicas."""
        named = list(replica_ids)
        return [route for _, _, route in self if any(map(route.names, named))]

    def of(self, program: Program) -> Route | None:
        """Return the narrowest route that is for a program."""
        by_scope = self._by_scope
        return (
            by_scope[Scope.PROGRAM].get(program.program_id)
            or by_scope[Scope.GROUP].get(program.group_id)
            or by_scope[Scope.CLASS].get(program.program_class)
            or by_scope[Scope.TENANT].get(program.tenant)
            or by_scope[Scope.ALL].get("")
        )

    def take(self, program: Program) -> Route | None:
        """Note and return which route a program has now."""
        route = self.of(program) if self._count else None
        if route is not program.route:
            if program.route is not None:
                program.route.programs.pop(program, None)
            if route is not None:
                route.programs[program] = None
            program.route = route
        return route

    def program_ended(self, program: Program) -> None:
        """Forget a program, and a route that was for it alone."""
        if program.route is not None:
            program.route.programs.pop(program, None)
        if self._by_scope[Scope.PROGRAM]:
            self.set(Scope.PROGRAM, program.program_id, ())


class Routing:
    """Sends programs where their routes lead, and lets in who waits for one replica."""

    __slots__ = ("_book", "_open_ids", "routes")

    def __init__(self, book: Book) -> None:
        """Begin with nobody sent anywhere."""
        self._book = book
        self._open_ids: set[str] = set()
        self.routes = Routes()

    def send(self, program: Program) -> None:
        """Send a program to a replica of its route, if it has one: to its own, if that is among them."""
        route = self.routes.take(program)
        if route is None:
            program.routed_to = None
            return
        for replica_id in (program.routed_to, program.replica_id):
            if replica_id is not None and route.names(replica_id) and self.is_open(replica_id):
                program.routed_to = replica_id
                return
        program.routed_to = route.next(self.is_open)

    def is_open(self, replica_id: str) -> bool:
        """Say whether programs may get claims on a replica, now or when grants go on."""
        replica = self._book.replicas.get(replica_id)
        return replica is not None and replica.open_to_programs

    def set_route(self, verbs: Verbs, scope: Scope, name: str, targets: Targets, reason: Reason) -> None:
        """Send programs of a scope to replicas: those that wait now, the others with their next turn.

        Cost: O(programs of the route), or of all where there was none.
        """
        before = self.routes.set(scope, name, targets)
        self._book.decisions.append(SetRoute(scope.value, name, targets, reason))
        programs = self._book.programs.values()
        meant = before.programs if before is not None else [each for each in programs if is_for(scope, name, each)]
        for program in list(meant):
            self._send_anew(verbs, program, keeps=program.place.active)

    def replicas_changed(self, verbs: Verbs) -> None:
        """Send programs anew whose routes lead to replicas that opened or closed."""
        now_open = {replica.replica_id for replica in self._book.open_replicas}
        changed, self._open_ids = now_open ^ self._open_ids, now_open
        for route in self.routes.naming(changed) if self.routes else ():
            for program in list(route.programs):
                self._send_anew(verbs, program, keeps=True)

    def _send_anew(self, verbs: Verbs, program: Program, *, keeps: bool) -> None:
        """Send a program after its route or replicas changed; unless it `keeps` what it has, it may go elsewhere."""
        before = program.routed_to
        if not keeps:
            program.routed_to = None
        self.send(program)
        if program.routed_to != before and not program.place.active:
            self._book.rank_anew(program)
            verbs.refresh_hold_reason(program)
            if program.routed_to is not None:
                self._book.changed_replicas[program.routed_to] = self._book.replicas[program.routed_to]

    def targets(self, program: Program | None) -> Sequence[Replica]:
        """Return the replicas that a program may go to now: those of its route, or all."""
        granting = self._book.granting_replicas
        if program is None or program.routed_to is None:
            return granting
        route = program.route
        return [replica for replica in granting if route is None or route.names(replica.replica_id)]

    def views(self) -> list[RouteView]:
        """Return all routes for a policy. Replicas that were removed are left out: it could not name them again."""
        known = self._book.replicas
        return [
            RouteView(scope.value, name, {each: weight for each, weight in route.targets if each in known})
            for scope, name, route in self.routes
        ]

    def let_in(self, verbs: Verbs, *, everywhere: bool) -> None:
        """Ask the policy about the first of those that wait for one replica, where there may be room.

        That is where something changed, or `everywhere`. Who comes first of all is asked about first: room may be
        something that all replicas share, as places are.
        """
        book = self._book
        asked = {
            replica.replica_id: replica
            for replica in book.granting_replicas
            if replica.replica_id in book.queue.routed and (everywhere or replica.replica_id in book.changed_replicas)
        }
        while (program := book.queue.first_routed(asked)) is not None:
            replica = asked[program.routed_to or ""]
            placement = verbs.asked(program, replica)
            if placement.replica is None:
                program.hold_reason = placement.reason
                del asked[replica.replica_id]
            else:
                verbs.restore(program, replica, placement.reason)
