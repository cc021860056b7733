"""What a policy may see, and what it may request.

A policy is `step(view, act)`, run once per period on the controllers' last reports. The view is for reading; requests
are checked, and refused with a reason if impossible.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Container, Iterable
from dataclasses import dataclass, field
from typing import NamedTuple

from thunderagent_workflows.core import messages as m
from thunderagent_workflows.core.controller import Controller
from thunderagent_workflows.core.router import agent_of
from thunderagent_workflows.declare import Directives
from thunderagent_workflows.errors import DeclarationError


class Line(NamedTuple):
    """A session's calls that wait at one instance."""

    calls_count: int
    stage_count: int
    """The furthest of their stages."""
    returns_count: int
    """How far back in its graph the session has gone, at most."""
    oldest_s: float
    """When the first of them was made."""


@dataclass(slots=True)
class Summary:
    """A controller's report: only sessions that changed since its last one."""

    location: str
    node: str
    queued_count: int
    running: tuple[tuple[str, float], ...]
    """Sessions of running calls, and when each call was made."""
    running_since_s: float
    done_count: int
    busy_s: float
    is_retiring: bool
    lines: dict[str, Line | None]
    """By session; None if nothing of it waits any more."""


@dataclass(slots=True)
class InstanceView:
    """An instance."""

    location: str
    agent: str
    node: str = ""
    queued_count: int = 0
    running: tuple[tuple[str, float], ...] = ()
    running_since_s: float = 0.0
    done_count: int = 0
    busy_s: float = 0.0
    is_retiring: bool = False
    waiting: dict[str, Line] = field(default_factory=dict)
    """By session, what waits here."""

    @property
    def load_count(self) -> int:
        """Calls that wait or run."""
        return self.queued_count + len(self.running)

    @property
    def mean_s(self) -> float:
        """How long its calls take on average; 0 before the first has ended."""
        return self.busy_s / self.done_count if self.done_count else 0.0


@dataclass(slots=True)
class SessionView:
    """A session with calls that wait."""

    session: str
    at: dict[str, Line] = field(default_factory=dict)
    """By location, its calls that wait there."""
    priority: float = 0.0

    @property
    def calls_count(self) -> int:
        """Calls that wait."""
        return sum(line.calls_count for line in self.at.values())

    @property
    def stage_count(self) -> int:
        """The furthest stage of its calls."""
        return max([line.stage_count for line in self.at.values()], default=0)

    @property
    def returns_count(self) -> int:
        """How far back in its graph it has gone, at most."""
        return max([line.returns_count for line in self.at.values()], default=0)

    @property
    def oldest_s(self) -> float:
        """When the first of its calls was made."""
        return min(line.oldest_s for line in self.at.values())


class View:
    """Everything that policies may see: `instances` by location, `sessions` with calls that wait, `directives`."""

    def __init__(self, directives: dict[str, Directives], resources: dict[str, float] | None = None) -> None:
        self.directives = directives
        self.resources = resources
        """The deployment's total resources; None if not given."""
        self.now_s = 0.0
        self.instances: dict[str, InstanceView] = {}
        self.sessions: dict[str, SessionView] = {}
        self.changed: list[SessionView] = []
        """Sessions whose calls have changed since the last step."""
        self.priorities: dict[str, float] = {}
        self.agent_priorities: dict[str, dict[str, float]] = {}
        """By agent, sessions' priorities there alone."""
        self.weights: dict[str, dict[str, float]] = {}
        """By agent, the current weights."""
        self.session_routes: dict[tuple[str, str], m.SetRoute] = {}
        """By agent and session."""
        self.ended: set[str] = set()
        """Sessions that have ended since the last step began: orders about them may be under way."""
        self.has_new = False
        """An instance has reported that had not when the last step was made: it does not know the orders in force."""
        self.expected: set[str] = set()
        """Locations of the instances that are there or begin to be; `instances` has those that have reported."""

    def agents(self) -> list[str]:
        """Return the agent of each instance that is there or begins to be."""
        return [agent_of(location) for location in self.instances.keys() | self.expected]

    def of(self, agent: str) -> list[InstanceView]:
        """Return the instances of an agent that take calls."""
        return [each for each in self.instances.values() if each.agent == agent and not each.is_retiring]

    def mean_s(self, agent: str) -> float:
        """Return how long an agent's calls take on average; 0 before the first has ended."""
        instances = self.of(agent)
        done_count = sum(each.done_count for each in instances)
        return sum(each.busy_s for each in instances) / done_count if done_count else 0.0

    def free(self) -> dict[str, float]:
        """Return what is left of each resource of the deployment."""
        left = dict(self.resources or {})
        for agent in self.agents():
            for name, amount in self.directives[agent].resources.items():
                if name in left:
                    left[name] -= amount
        return left

    def merge(self, summaries: Iterable[Summary], now_s: float, live: Container[str] | None = None) -> None:
        """Add the controllers' summaries; if given, of `live` sessions only. Costs O(sessions that have changed)."""
        self.now_s = now_s
        self.has_new = False
        self.ended.clear()
        changed: dict[str, SessionView] = {}
        for summary in summaries:
            location = summary.location
            instance = self.instances.get(location)
            if instance is None:
                self.has_new = True
                instance = self.instances[location] = InstanceView(location, agent_of(location), summary.node)
            instance.queued_count = summary.queued_count
            instance.running = summary.running
            instance.running_since_s = summary.running_since_s
            instance.done_count = summary.done_count
            instance.busy_s = summary.busy_s
            instance.is_retiring = summary.is_retiring
            waiting = instance.waiting
            for session, line in summary.lines.items():
                view = self.sessions.get(session)
                if line is None or (live is not None and session not in live):  # it ended on the way
                    waiting.pop(session, None)
                    if view is not None:
                        view.at.pop(location, None)
                        if not view.at:
                            del self.sessions[session]
                    continue
                waiting[session] = line
                if view is None:
                    view = self.sessions[session] = SessionView(session, priority=self.priorities.get(session, 0.0))
                view.at[location] = line
                changed[session] = view
        self.changed = list(changed.values())

    def forget(self, location: str) -> None:
        """Remove an instance that is gone."""
        instance = self.instances.pop(location, None)
        for session in instance.waiting if instance is not None else ():
            view = self.sessions.get(session)
            if view is not None:
                view.at.pop(location, None)
                if not view.at:
                    del self.sessions[session]

    def end_session(self, session: str) -> None:
        """Forget a session, and the orders about it."""
        self.ended.add(session)
        known = self.sessions.pop(session, None)
        for location in known.at if known is not None else ():
            self.instances[location].waiting.pop(session, None)
        for priorities in (self.priorities, *self.agent_priorities.values()):
            priorities.pop(session, None)
        for key in [key for key in self.session_routes if key[1] == session]:
            del self.session_routes[key]


class Act:
    """A policy's requests, collected until its step is over."""

    def __init__(self, view: View) -> None:
        self.view = view
        self.routes: list[m.SetRoute] = []
        self.priorities: dict[str, float] = {}
        self.agent_priorities: dict[str, dict[str, float]] = {}
        self.migrations: dict[str, list[m.Migrate]] = {}
        """By the location that a session leaves."""
        self.kills: list[str] = []
        self.provisions: list[str] = []
        self.refused: list[str] = []

    def route(
        self,
        *,
        to: str | dict[str, float] | Iterable[str] = (),
        agent: str = "",
        session: str = "",
        role: str = "",
    ) -> None:
        """Send an agent's calls, those of one session, or those of all agents of a role, to some instances.

        `to` is one location, several, or several with weights; nothing takes the route back.
        """
        weights = {to: 1.0} if isinstance(to, str) else to if isinstance(to, dict) else dict.fromkeys(to, 1.0)
        agents = (
            [agent] if agent else [name for name, each in self.view.directives.items() if each.role == role and role]
        )
        if not agents:
            self.refused.append(f"route: no agent {agent!r} or role {role!r}")
        for name in agents:
            own = {each: weight for each, weight in weights.items() if agent_of(each) == name}
            if not session:
                if self.view.weights.get(name, {}) == own:
                    continue
                self.view.weights[name] = own
            route = m.SetRoute(name, session, tuple(own.items()))
            if session:
                self.view.session_routes[name, session] = route
            self.routes.append(route)

    def set_priority(self, session: str, priority: float, *, agent: str = "") -> None:
        """Have a session's calls go first where its priority is higher, everywhere or at one agent."""
        if agent:
            for by_agent in (self.agent_priorities, self.view.agent_priorities):
                by_agent.setdefault(agent, {})[session] = priority
            return
        known = self.view.sessions.get(session)
        before = known.priority if known is not None else self.view.priorities.get(session, 0.0)
        if before != priority or any(session in of for of in self.view.agent_priorities.values()):
            self.priorities[session] = priority
            self.view.priorities[session] = priority
            for by_agent in (self.agent_priorities, self.view.agent_priorities):
                for of in by_agent.values():
                    of.pop(session, None)
            if known is not None:
                known.priority = priority

    def migrate(self, session: str, source: str, to: str) -> None:
        """Move a session's calls that wait at `source`, with its state, to another instance of the agent."""
        if to not in self.view.instances or source not in self.view.instances:
            self.refused.append(f"migrate {session}: {source} or {to} is not there")
        elif self.view.directives[self.view.instances[source].agent].stateful:
            self.refused.append(f"migrate {session}: a stateful session stays where it is")
        else:
            self.migrations.setdefault(source, []).append(m.Migrate(session, to))

    def kill(self, location: str) -> None:
        """End an instance: waiting calls go to others, running ones are waited for."""
        instance = self.view.instances.get(location)
        if instance is None or instance.is_retiring:
            self.refused.append(f"kill {location}: it is not there")
        elif len(self.view.of(instance.agent)) <= max(1, self.view.directives[instance.agent].min_instances):
            self.refused.append(f"kill {location}: {instance.agent} keeps at least so many")
        else:
            instance.is_retiring = True
            self.kills.append(location)

    def provision(self, agent: str) -> None:
        """Start one more instance."""
        directives = self.view.directives.get(agent)
        there = self.view.agents().count(agent) + self.provisions.count(agent)
        if directives is None or there >= directives.max_instances:
            self.refused.append(f"provision {agent}: there are as many as there may be")
        elif self.view.resources is not None and not self._fits(directives):
            self.refused.append(f"provision {agent}: its resources are not free")
        else:
            self.provisions.append(agent)

    def _fits(self, directives: Directives) -> bool:
        free = self.view.free()
        for agent in self.provisions:
            for name, amount in self.view.directives[agent].resources.items():
                free[name] = free.get(name, 0.0) - amount
        return all(free.get(name, 0.0) >= amount for name, amount in directives.resources.items())


Policy = Callable[[View, Act], None]


def load_policy(name: str) -> Policy:
    """Return a policy by its own name, or any as `package.module:function`. Raises `DeclarationError`."""
    module_name, _, function = name.partition(":")
    if not function:
        module_name, function = f"thunderagent_workflows.policies.{name}", "step"
    try:
        found = getattr(importlib.import_module(module_name), function)
    except (ImportError, AttributeError) as error:
        raise DeclarationError(f"policy {name!r}: {error}") from error
    if not callable(found):
        raise DeclarationError(f"policy {name!r} is not a function of (view, act)")
    policy: Policy = found
    return policy


def summarize(controller: Controller, node: str, stats: tuple[int, float, float]) -> Summary:
    """Return a controller's changes. Costs O(calls of the sessions that have changed).

    `stats` are its finished calls, their seconds, and when the running ones began.
    """
    queue = controller.queue
    lines: dict[str, Line | None] = {}
    for session in controller.changed:
        calls_count = stage_count = returns_count = 0
        oldest_s = float("inf")
        for call in queue.calls_of(session):
            calls_count += 1
            stage_count = max(stage_count, call.stage_count)
            returns_count = max(returns_count, call.returns_count)
            oldest_s = min(oldest_s, call.created_s)
        lines[session] = Line(calls_count, stage_count, returns_count, oldest_s) if calls_count else None
    controller.changed.clear()
    done_count, busy_s, since_s = stats
    running = tuple((call.session, call.created_s) for call in controller.running.values())
    return Summary(
        controller.location, node, len(queue), running, since_s, done_count, busy_s, controller.is_retiring, lines
    )
