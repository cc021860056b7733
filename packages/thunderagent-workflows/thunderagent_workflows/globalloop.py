"""The two levels of control: each node's periodic reports and orders, and the global loop's decisions.

The loop is on no call's path: controllers follow their last orders. It reads what has changed since it last looked,
runs the policies one after the other on one view, and leaves the decisions in the store.
"""

from __future__ import annotations

import logging
from asyncio import Future
from collections.abc import Callable, Container, Iterable, Sequence
from dataclasses import dataclass, field, replace
from time import perf_counter

from thunderagent_workflows.core import messages as m
from thunderagent_workflows.node import Node
from thunderagent_workflows.store import Decisions, Store
from thunderagent_workflows.view import Act, Policy, Summary, View, summarize

log = logging.getLogger("thunderagent_workflows")


class Reports:
    """Summaries on their way to the store, one of each instance: they wait there until the store has taken them."""

    def __init__(self) -> None:
        self._waiting: dict[str, Summary] = {}

    def add(self, summaries: Iterable[Summary]) -> None:
        """Add the newest ones."""
        for summary in summaries:
            earlier = self._waiting.get(summary.location)
            if earlier is not None:
                summary.lines = {**earlier.lines, **summary.lines}
            self._waiting[summary.location] = summary

    async def publish(self, node: str, store: Store) -> None:
        """Leave them in the store, as a node's. Raises `StoreError`, and then keeps them."""
        if not self._waiting:
            return
        sent, self._waiting = self._waiting, {}
        try:
            await store.publish(node, list(sent.values()))
        except BaseException:
            newer, self._waiting = self._waiting, sent
            self.add(newer.values())
            raise


class LocalLevel:
    """A node's part: it leaves summaries in the store, and carries out its decisions."""

    def __init__(self, node: Node, store: Store) -> None:
        self.node = node
        self.store = store
        self._said: dict[str, tuple[int, int, bool]] = {}
        self._reports = Reports()

    async def publish(self) -> None:
        """Publish changes."""
        self._reports.add(self.summaries())
        await self._reports.publish(self.node.name, self.store)

    def summaries(self) -> list[Summary]:
        """Return changes since the last call."""
        summaries = []
        for location, controller in self.node.controllers.items():
            instance = self.node.instances[location]
            now = (instance.done_count, len(controller.running), controller.is_retiring)
            if controller.changed or self._said.get(location) != now:
                self._said[location] = now
                stats = (instance.done_count, instance.busy_s, instance.running_since_s)
                summaries.append(summarize(controller, self.node.name, stats))
        for location in self._said.keys() - self.node.controllers.keys():
            del self._said[location]
        return summaries

    async def apply(self, ended: Container[str]) -> None:
        """Carry out new decisions, except about sessions that have `ended` meanwhile."""
        for decisions in await self.store.take(self.node.name):
            apply(self.node, without(decisions, ended))


def apply(node: Node, decisions: Decisions) -> None:
    """Carry decisions out on a node."""
    for route in decisions.routes:
        node.post(node.name, route)
    for location, controller in list(node.controllers.items()):
        own = decisions.agent_priorities.get(controller.agent, {})
        if decisions.priorities or own:  # at once: a controller that hears half of it may interrupt a call for that
            node.post(location, m.SetPriorities({**decisions.priorities, **own}))
    for location, migrations in decisions.migrations.items():
        for migration in migrations if location in node.controllers else ():
            node.post(location, migration)
    for location in decisions.kills:
        if location in node.controllers:
            node.retire(location, tuple(each for each in _others(node, location)))


def without(decisions: Decisions, ended: Container[str]) -> Decisions:
    """Return decisions without orders about sessions that have `ended` on the way."""
    return replace(
        decisions,
        routes=[each for each in decisions.routes if each.session not in ended],
        priorities={key: each for key, each in decisions.priorities.items() if key not in ended},
        agent_priorities={
            agent: {key: each for key, each in of.items() if key not in ended}
            for agent, of in decisions.agent_priorities.items()
        },
    )


def add_orders_in_force(decisions: Decisions, view: View) -> None:
    """Have decisions repeat all routes and priorities, for whoever has not heard of them."""
    decisions.routes = [m.SetRoute(agent, "", tuple(weights.items())) for agent, weights in view.weights.items()]
    decisions.routes += view.session_routes.values()
    decisions.priorities = dict(view.priorities)
    decisions.agent_priorities = {agent: dict(priorities) for agent, priorities in view.agent_priorities.items()}


def _others(node: Node, location: str) -> list[str]:
    agent = node.controllers[location].agent
    return [each for each in node.origin.router.instances.get(agent, ()) if each != location]


@dataclass
class LoopTimes:
    """Time of the loop's last turn by part, in seconds."""

    collect_s: float = 0.0
    merge_s: float = 0.0
    policies_s: float = 0.0
    push_s: float = 0.0

    @property
    def total_s(self) -> float:
        """All of it."""
        return self.collect_s + self.merge_s + self.policies_s + self.push_s


@dataclass(frozen=True)
class Ask:
    """What somebody asks for once, as a policy would."""

    of: Callable[[Act], None]
    answer: Future[list[str]]
    refused: list[str] = field(default_factory=list)

    def step(self, act: Act) -> None:
        """Make the request; note what of it is refused."""
        before_count = len(act.refused)
        try:
            self.of(act)
        except Exception as error:
            self.fail(error)
        self.refused.extend(act.refused[before_count:])

    def done(self) -> None:
        """Answer that it is done."""
        if not self.answer.done():
            self.answer.set_result(self.refused)

    def fail(self, error: Exception) -> None:
        """Answer that it is not."""
        if not self.answer.done():
            self.answer.set_exception(error)


@dataclass
class GlobalLevel:
    """The global part. `nodes` returns the names of all nodes; `provision` starts an instance of an agent."""

    view: View
    policies: Sequence[Policy]
    store: Store
    nodes: Callable[[], Sequence[str]]
    provision: Callable[[str], None]
    clock: Callable[[], float]
    sessions: Container[str] | None = None
    """Those that have not ended; None if that is not known here."""
    times: LoopTimes = field(default_factory=LoopTimes)
    refused: list[str] = field(default_factory=list)
    """Refused requests of the last turn's policies."""
    _is_behind: bool = False
    """The store did not take the last decisions."""

    async def step(self, asks: Sequence[Ask] = ()) -> None:
        """Read, decide and publish, once: what is asked for, then what policies want.

        One that raises does not keep the others from it.
        """
        began = perf_counter()
        summaries = await self.store.collect()
        collected = perf_counter()
        self.view.merge(summaries, self.clock(), self.sessions)
        merged = perf_counter()
        act = Act(self.view)
        for ask in asks:
            ask.step(act)
        for policy in self.policies:
            try:
                policy(self.view, act)
            except Exception:  # it is a user's
                log.exception("a policy failed: %r", policy)
        decided = perf_counter()
        self.refused = act.refused
        decisions = Decisions(act.routes, act.priorities, act.agent_priorities, act.migrations, act.kills)
        if self.view.has_new or self._is_behind:
            add_orders_in_force(decisions, self.view)
        if decisions:
            await self._push(decisions)
        for agent in act.provisions:
            self.provision(agent)
        self.times = LoopTimes(collected - began, merged - collected, decided - merged, perf_counter() - decided)

    async def _push(self, decisions: Decisions) -> None:
        """Leave decisions for all nodes. If that fails, the next ones repeat the orders, and no kill is under way."""
        self._is_behind = True
        try:
            for node in self.nodes():
                await self.store.push(node, decisions)
            self._is_behind = False
        finally:
            for location in decisions.kills if self._is_behind else ():
                self.view.instances[location].is_retiring = False
