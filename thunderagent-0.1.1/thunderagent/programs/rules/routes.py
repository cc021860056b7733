"""Which replicas programs were told to go to, by an operator or a global policy.

A route is for a program, or for all programs of a group, a class or a tenant, or for everybody; the narrowest one
counts. It names replicas with weights. A program is sent to one of them when it is placed, so that the weights are
kept. It stays with that replica while it is open, because its history is there. While no replica of its route is open
the route has no effect.

A model that only some replicas serve has a route, too, which its turns never leave: while none of these is open they
wait for one. It takes precedence over other routes. A program has one such model at a time: a turn of another model, or
one that comes while others of its program run where its model is not served, runs as anonymous.

A program that must wait does so in a queue of its replica, which the policy does not see. Whenever there may be room,
the policy is asked for the first of each such queue, and then balances for all others. While it waits no later program
gets the room of that replica (`PausedQueue`), or only for a bounded time (`breakeven`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence

from thunderagent.programs.messages import Reason, Scope, SetRoute, Targets
from thunderagent.programs.rules import Verbs
from thunderagent.programs.state.book import Book
from thunderagent.programs.state.program import Program, Route, RouteView, is_for
from thunderagent.programs.state.replica import Replica


class Routes:
    """All routes. Finding a program's route costs the same however many there are."""

    __slots__ = ("_asked", "_by_scope", "by_model", "count")

    def __init__(self) -> None:
        """Start without routes."""
        self._by_scope: dict[Scope, dict[str, Route]] = {scope: {} for scope in Scope}
        self.count = 0
        """How many were set: not those of models."""
        self.by_model: dict[str, Route] = {}
        """For models that only some replicas serve: the route to those replicas."""
        self._asked: tuple[int, Route | None] = (0, None)
        """The next turn, and where its model is served."""

    def __len__(self) -> int:
        return self.count + len(self.by_model)

    def __iter__(self) -> Iterator[tuple[Scope, str, Route]]:
        """Yield all routes with their scopes and names."""
        for scope, routes in self._by_scope.items():
            for name, route in routes.items():
                yield scope, name, route

    def set(self, scope: Scope, name: str, targets: Targets) -> Route | None:
        """Set a route and return the one that it replaces; without targets, remove it."""
        routes = self._by_scope[scope]
        before = routes.pop(name, None)
        self.count += bool(targets) - (before is not None)
        if targets:
            routes[name] = Route(targets)
        return before

    def naming(self, replica_ids: Iterable[str]) -> list[Route]:
        """Return the routes that lead to any of these replicas."""
        named = list(replica_ids)
        routes = (*(route for _, _, route in self), *self.by_model.values())
        return [route for route in routes if any(map(route.names, named))]

    def ask(self, turn_id: int, model: str) -> None:
        """Note the model of the next turn."""
        self._asked = turn_id, self.by_model.get(model)

    def asked(self, turn_id: int) -> Route | None:
        """Return where the model of an arrived turn is served; None if all replicas serve it."""
        return self._asked[1] if self._asked[0] == turn_id else None

    def serve(self, program: Program, served_by: Route | None) -> bool:
        """Send a program to where its arrived turn is served; return False if it cannot go there now."""
        before = program.served_by
        if program.in_flight or program.held:
            if served_by is None:
                return True
            if before not in (None, served_by) or (program.in_flight and not served_by.names(program.replica_id or "")):
                return False
        if before is not served_by:
            if before is not None:
                del before.programs[program]
            if served_by is not None:
                served_by.programs[program] = None
            program.served_by = served_by
        return True

    def of(self, program: Program) -> Route | None:
        """Return the narrowest route for a program."""
        by_scope = self._by_scope
        return (
            by_scope[Scope.PROGRAM].get(program.program_id)
            or by_scope[Scope.GROUP].get(program.group_id)
            or by_scope[Scope.CLASS].get(program.program_class)
            or by_scope[Scope.TENANT].get(program.tenant)
            or by_scope[Scope.ALL].get("")
        )

    def take(self, program: Program) -> Route | None:
        """Update and return a program's route."""
        route = self.of(program) if self.count else None
        if route is not program.route:
            if program.route is not None:
                program.route.programs.pop(program, None)
            if route is not None:
                route.programs[program] = None
            program.route = route
        return route

    def program_ended(self, program: Program) -> None:
        """Forget a program, and a route for it alone."""
        if program.route is not None:
            program.route.programs.pop(program, None)
        if program.served_by is not None:
            del program.served_by.programs[program]
        if self._by_scope[Scope.PROGRAM]:
            self.set(Scope.PROGRAM, program.program_id, ())


def serving(replicas: Sequence[Replica], served_by: Route | None) -> Sequence[Replica]:
    """Return those of the replicas that serve a model."""
    return replicas if served_by is None else [each for each in replicas if served_by.names(each.replica_id)]


class Routing:
    """Sends programs along their routes, and lets in programs that wait for one replica."""

    __slots__ = ("_book", "_open_ids", "routes")

    def __init__(self, book: Book) -> None:
        """Start without routes."""
        self._book = book
        self._open_ids: set[str] = set()
        self.routes = Routes()

    def send(self, program: Program) -> None:
        """Send a program to a replica of its route, if it has one: to its own, if that is among them.

        The replicas that serve its model take precedence, open or not.
        """
        route, served_by = self.routes.take(program), program.served_by
        if served_by is None:
            program.routed_to = None if route is None else self._target(program, route, self.is_open)
            return
        may_serve = {replica_id for replica_id, _ in served_by.targets if self.is_open(replica_id)}.__contains__
        target = None if route is None else self._target(program, route, may_serve)
        program.routed_to = target or self._target(program, served_by, may_serve) or served_by.targets[0][0]

    def _target(self, program: Program, route: Route, is_open: Callable[[str], bool]) -> str | None:
        for replica_id in (program.routed_to, program.replica_id):
            if replica_id is not None and route.names(replica_id) and is_open(replica_id):
                return replica_id
        return route.next(is_open)

    def model_served(self, verbs: Verbs, model: str, replica_ids: tuple[str, ...]) -> None:
        """Send a model's turns only to these replicas; anywhere, if none is named. Turns in flight stay."""
        route = self.routes.by_model.setdefault(model, Route(()))
        if replica_ids:
            route.lead_to(replica_ids)
        else:
            del self.routes.by_model[model]
            for turn in self._book.anonymous_held.values():
                if turn.served_by is route:
                    turn.served_by = None
        for program in list(route.programs):
            if not replica_ids:
                del route.programs[program]
                program.served_by = None
            self._send_anew(verbs, program, keeps=True)

    def is_open(self, replica_id: str) -> bool:
        """Return whether programs may get claims on a replica, now or when grants go on."""
        replica = self._book.replicas.get(replica_id)
        return replica is not None and replica.open_to_programs

    def set_route(self, verbs: Verbs, scope: Scope, name: str, targets: Targets, reason: Reason) -> None:
        """Send programs of a scope to replicas: waiting ones now, the others with their next turn.

        Cost: O(programs of the route), or of all if there was none.
        """
        before = self.routes.set(scope, name, targets)
        self._book.decisions.append(SetRoute(scope.value, name, targets, reason))
        programs = self._book.programs.values()
        meant = before.programs if before is not None else [each for each in programs if is_for(scope, name, each)]
        for program in list(meant):
            self._send_anew(verbs, program, keeps=program.place.active)

    def replicas_changed(self, verbs: Verbs) -> None:
        """Send programs again whose routes lead to replicas that opened or closed."""
        now_open = {replica.replica_id for replica in self._book.open_replicas}
        changed, self._open_ids = now_open ^ self._open_ids, now_open
        for route in self.routes.naming(changed) if changed and self.routes else ():
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
            if program.routed_to is not None and (replica := self._book.replicas.get(program.routed_to)) is not None:
                self._book.changed_replicas[program.routed_to] = replica

    def targets(self, program: Program | None) -> Sequence[Replica]:
        """Return the replicas that a program may go to now: those of its route, or all."""
        granting = self._book.granting_replicas
        if program is None or program.routed_to is None:
            return granting
        able, route = serving(granting, program.served_by), program.route
        return [replica for replica in able if route is None or route.names(replica.replica_id)]

    def views(self) -> list[RouteView]:
        """Return all routes for a policy, without removed replicas: it could not name those again."""
        known = self._book.replicas
        return [
            RouteView(scope.value, name, {each: weight for each, weight in route.targets if each in known})
            for scope, name, route in self.routes
        ]

    def let_in(self, verbs: Verbs, *, everywhere: bool) -> None:
        """Ask the policy about the first program that waits for each replica, where there may be room.

        That is where something changed, or `everywhere`. The first of all is asked about first: room may be shared by
        all replicas, as places are.
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
