"""A process of a deployment other than the driver's: a node with one instance, its controller, and an origin.

All hosts communicate with the hub alone. A host is polled for its messages, and answers when it has some: all that
gathered in one turn of its loop.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections import deque
from dataclasses import dataclass, field
from typing import Any, cast

from thunderagent_workflows.core import messages as m
from thunderagent_workflows.core.call import Call
from thunderagent_workflows.core.router import agent_of
from thunderagent_workflows.declare import Agent
from thunderagent_workflows.globalloop import LocalLevel, apply
from thunderagent_workflows.hints import Hints
from thunderagent_workflows.instance import load_class
from thunderagent_workflows.node import Node
from thunderagent_workflows.parcels import Dumps, Parcel, pack, unpack
from thunderagent_workflows.scope import SessionInfo
from thunderagent_workflows.store import Decisions, MemoryStore
from thunderagent_workflows.view import Summary

HUB, HOST = "hub", "host"
"""Addresses outside of the core's machines: where hosts report to, and each host itself."""
GRACE_S = 5.0
"""For unawaited calls of an instance's code, when the instance retires."""


@dataclass(slots=True)
class SessionBegun:
    """What a host must know of a session beyond its name. `states` by agent."""

    name: str
    parent: str = ""
    group: str = ""
    states: dict[str, dict[str, Any]] = field(default_factory=dict)


@dataclass(slots=True)
class Hello:
    """What a host begins with."""

    agents: dict[str, Agent]
    location: str
    number: int
    period_s: float
    keeps_state: bool
    """The deployment's store takes managed state."""
    tells_hints: bool
    """The proxy is told of next turns."""
    locations: list[str]
    """Instances that take calls."""
    sessions: list[SessionBegun]
    ends_count: int
    """The sessions that have ended before, of which this host hears nothing."""


@dataclass(slots=True)
class Report:
    """A host's periodic report to the hub, if anything has changed."""

    summaries: list[Summary]
    waits_for: frozenset[str]
    """Agents without an instance that calls of this host wait for."""


@dataclass(slots=True)
class Logged:
    """A call made by code of this host is over."""

    session: str
    entry: tuple[Any, ...]


@dataclass(slots=True)
class Used:
    """Code of this host makes the first of its turns at the proxy in a session."""

    session: str


@dataclass(slots=True)
class Touched:
    """A call has touched managed state that the store keeps."""

    session: str
    agent: str
    values: dict[str, bytes | None]
    """Pickled one by one: one that does not pickle is None, and the others are kept."""


@dataclass(slots=True)
class Said:
    """A hint for the proxy."""

    session: str
    said: dict[str, Any]


class Host:
    """Runs one instance. Its methods are called from the hub's side; `place` is its location, for people."""

    def __init__(self, hello: Hello, dumps: Dumps, place: str) -> None:
        """Do nothing yet. Raises `DeclarationError`."""
        self.hello = hello
        self.place = place
        agent = hello.agents[agent_of(hello.location)]
        kinds = {agent.name: load_class(agent)}
        self.node = Node(hello.agents, kinds, number=hello.number, link=self, is_head=False)
        self.node.new_session = lambda name: SessionInfo(name, log=_Forwarded(self, name))
        self.node.on_uses_proxy = lambda session: self._tell(Used(session))
        if hello.keeps_state:
            self.node.on_answered = self._tell_touched
        if hello.tells_hints:
            self.node.hints = Hints(self.node, self._say)
        self._dumps = dumps
        self._local = LocalLevel(self.node, MemoryStore())
        self._waits_for: frozenset[str] = frozenset()
        self._out: list[Parcel] = []
        self._has_out = asyncio.Event()
        self._early: dict[int, list[Parcel]] = {}
        """Batches that overtook others."""
        self._next_number = 0
        self._ends_count = hello.ends_count
        self._failure: BaseException | None = None
        self._task: asyncio.Task[None] | None = None

    async def open(self) -> None:
        """Start the instance, which is announced to all. Raises what its class raises."""
        for begun in self.hello.sessions:
            self._begin_session(begun)
        for location in self.hello.locations:
            self.node.post(self.node.name, m.Joined(location))
        await self.node.launch(self.hello.location)
        self._task = asyncio.create_task(self._run())

    async def close(self, *, is_over: bool) -> None:
        """End; unless all `is_over`, only after the calls made here are over, or `GRACE_S` have passed."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(0 if is_over else GRACE_S):
                while self.node.origin.records:  # noqa: ASYNC110 - seldom, and short
                    await asyncio.sleep(self.hello.period_s)
        if self._task is not None:
            self._task.cancel()
        await self.node.close()

    # --- what goes out

    def send(self, sender: str, to: str, message: Any) -> bool:
        """Send a message; the hub finds remote receivers."""
        parcel, refused = pack(sender, to, message, self._dumps)
        for origin, result in refused:
            self.node.post(origin, result)
        if parcel is not None:
            if session := _session_of(message):
                parcel = parcel._replace(session=session, ends_count=self._ends_count)
            elif type(message) is Logged:  # too late, it is dropped unanswered
                parcel = parcel._replace(ends_count=self._ends_count)
            self._out.append(parcel)
            self._has_out.set()
        return True

    async def receive(self) -> list[Parcel]:
        """Return messages to send, as soon as there are some. Raises errors of this host."""
        await self._has_out.wait()
        self._has_out.clear()
        out, self._out = self._out, []
        if self._failure is not None:
            raise self._failure
        return out

    async def _run(self) -> None:
        while True:
            await asyncio.sleep(self.hello.period_s)
            summaries = self._local.summaries()
            for summary in summaries:
                summary.node = self.place
            waits_for = frozenset(name for name in self.hello.agents if self.node.origin.waits_for_instance(name))
            if summaries or waits_for != self._waits_for:
                self._waits_for = waits_for
                self._tell(Report(summaries, waits_for))
            self.node.break_circle()

    def _tell(self, message: Any) -> None:
        self.send(self.node.name, HUB, message)

    def _tell_touched(self, location: str, calls: list[Call]) -> None:
        for session, values in self.node.touched_states(location, calls, self._dumps):
            self._tell(Touched(session, calls[0].agent, values))

    def _say(self, session: str, said: dict[str, Any]) -> None:
        self._tell(Said(session, said))

    # --- what comes in

    def deliver(self, number: int, batch: list[Parcel]) -> None:
        """Process a batch of messages; batches are numbered, and processed in order."""
        self._early[number] = batch
        try:
            while (parcels := self._early.pop(self._next_number, None)) is not None:
                self._next_number += 1
                for parcel in parcels:
                    self._take(parcel)
        except Exception as error:
            self._failure = error
            self._has_out.set()

    def _take(self, parcel: Parcel) -> None:
        message, answer = unpack(parcel)
        if answer is not None:
            self.send(parcel.to, parcel.sender, answer)
        elif parcel.to == HOST:
            if type(message) is Decisions:
                apply(self.node, message)
            else:
                self._begin_session(message)
        elif parcel.to:
            self.node.post(parcel.to, message, sender=parcel.sender)
        else:
            self.node.broadcast(message, sender=parcel.sender)
            if type(message) is m.SessionEnded:
                self.node.forget_session(message.session)
                self._ends_count = parcel.ends_count

    def _begin_session(self, begun: SessionBegun) -> None:
        info = self.node.session(begun.name)
        info.parent, info.group = begun.parent, begun.group
        for agent, values in begun.states.items():
            self.node.kept_states[agent, begun.name] = values


def _session_of(message: Any) -> str:
    """Return the session that a message is of, if it must not cross that session's end; else ""."""
    kind = type(message)
    if kind is m.Submit:
        return cast("str", message.call.session)
    return message.session if kind in _MUST_NOT_CROSS else ""


_MUST_NOT_CROSS = {m.Transfer, m.AskHome, m.Home, Touched}


class _Forwarded(deque[tuple[Any, ...]]):
    """A session's log at a host: entries go to the hub."""

    def __init__(self, host: Host, session: str) -> None:
        super().__init__(maxlen=0)
        self._host = host
        self._session = session

    def append(self, entry: tuple[Any, ...]) -> None:
        """Forward an entry."""
        self._host.send(self._host.node.name, HUB, Logged(self._session, entry))
