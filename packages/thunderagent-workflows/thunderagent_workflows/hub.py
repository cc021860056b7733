"""The link to remote instances, each in a process of its own: it starts them, carries messages, and detects losses.

It is on the node where drivers run, which has the directory and the global loop. Hosts communicate with it alone, so
messages between two machines arrive in order; messages for another host are passed on unread. A `Launcher` starts
processes: on Ray, `thunderagent_workflows.on_ray`.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
import pickle
from collections.abc import Callable, Container, Coroutine, Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol

from thunderagent_workflows.core import messages as m
from thunderagent_workflows.core.router import agent_of
from thunderagent_workflows.declare import Agent
from thunderagent_workflows.errors import WorkflowError
from thunderagent_workflows.globalloop import Reports, without
from thunderagent_workflows.hints import Say
from thunderagent_workflows.host import HOST, HUB, Hello, Logged, Report, Said, SessionBegun, Touched, Used
from thunderagent_workflows.node import Node
from thunderagent_workflows.parcels import Parcel, pack, unpack
from thunderagent_workflows.scope import SessionInfo
from thunderagent_workflows.state import kept_values
from thunderagent_workflows.store import Store

log = logging.getLogger("thunderagent_workflows")

CLOSE_S = 10.0
"""The time limit for a host to end by itself."""


class PeerLostError(WorkflowError):
    """A process is gone; the text is what its starter knows of its end."""


class Peer(Protocol):
    """A process that runs a `Host`. Waiting calls raise `PeerLostError` when it is gone."""

    async def open(self, hello: Hello) -> None:
        """Start the instance. Raises what its class raises."""

    def deliver(self, batch: list[Parcel]) -> None:
        """Send a batch of messages."""

    async def receive(self) -> list[Parcel]:
        """Return the next batch, as soon as there is one."""

    async def close(self, *, is_over: bool) -> None:
        """End it in order."""

    def kill(self) -> None:
        """End it at once."""


class Launcher(Protocol):
    """Starts processes."""

    def dumps(self, message: Any) -> bytes:
        """Return the bytes of a message, for `pickle.loads`. Raises for what cannot travel."""

    async def start(self, agent: Agent, location: str) -> Peer:
        """Start a process with an agent's resources. Raises `WorkflowError` if there is no room."""

    async def close(self) -> None:
        """Close open resources."""


@dataclass(slots=True, eq=False)
class _Member:
    """A host as the hub sees it."""

    location: str
    name: str
    """Of its node."""
    peer: Peer
    out: list[Parcel] = field(default_factory=list)
    ended: set[str] = field(default_factory=set)
    """Sessions whose end it alone is told in `out`: once for all that came too late."""
    is_open: bool = False
    is_flushing: bool = False
    waits_for: frozenset[str] = frozenset()
    listening: asyncio.Task[None] | None = None


class Hub:
    """All hosts of a deployment."""

    node: Node

    def __init__(self, launcher: Launcher, agents: Mapping[str, Agent], *, period_s: float) -> None:
        """Start nothing yet; `node` is to be set first."""
        self.on_kept: Callable[[str, str, dict[str, Any]], None] | None = None
        """Called with an agent, a session, and managed state for the store."""
        self.on_said: Say | None = None
        """Told of hints of other nodes, if anybody wants them."""
        self.on_late_turn: Callable[[str], None] | None = None
        """Called with a session in which a host makes turns, and which has ended in the meantime."""
        self._launcher = launcher
        self._agents = dict(agents)
        self._period_s = period_s
        self._members: dict[str, _Member] = {}
        """By location and by node name: each is there twice."""
        self._begun: dict[str, SessionBegun] = {}
        """Sessions with more data than the name."""
        self._ends_count = 0
        """The sessions that have ended: all hosts are told of each, in this order."""
        self._ends_before: dict[str, int] = {}
        """By session, the ends before its begin."""
        self._reports = Reports()
        self._numbers = itertools.count(1)
        self._tasks: set[asyncio.Task[None]] = set()

    # --- what the control of a deployment wants

    def names(self) -> list[str]:
        """Return the names of all nodes elsewhere."""
        return [member.name for member in self._all()]

    def locations(self) -> set[str]:
        """Return the locations of instances."""
        return {key for key, member in self._members.items() if key == member.location}

    def waits_for_instance(self, agent: str) -> bool:
        """Return whether a remote call waits for an instance."""
        return any(agent in member.waits_for for member in self._all())

    async def launch(self, location: str) -> None:
        """Start an instance. Raises what its class raises, and `WorkflowError` without room for it."""
        peer = await self._launcher.start(self._agents[agent_of(location)], location)
        number = next(self._numbers)
        member = _Member(location, f"node-{number}", peer)
        self._members[location] = self._members[member.name] = member
        known = [each for all_of in self.node.origin.router.instances.values() for each in all_of]
        wanted = self.on_kept is not None, self.on_said is not None
        begun = [*self._begun.values()]
        hello = Hello(self._agents, location, number, self._period_s, *wanted, known, begun, self._ends_count)
        try:
            await peer.open(hello)
        except BaseException:
            self._forget(member)
            peer.kill()
            raise
        self.node.broadcast(m.Joined(location))  # the host's own word comes later
        member.is_open = True
        self._flush(member)
        member.listening = self._start(self._listen(member))

    async def publish(self, store: Store) -> None:
        """Leave hosts' reports in the store."""
        await self._reports.publish(self.node.name, store)

    async def apply(self, store: Store, ended: Container[str]) -> None:
        """Send hosts their decisions, except about sessions that have `ended` meanwhile."""
        for name in self.names():
            for decisions in await store.take(name):
                if name in self._members:
                    self.send(self.node.name, HOST, without(decisions, ended), only=self._members[name])

    # --- sessions

    def begin_session(self, info: SessionInfo, states: dict[str, dict[str, Any]]) -> None:
        """Tell hosts a session's parent, and its stored state."""
        self._ends_before[info.name] = self._ends_count
        if info.parent or states:
            begun = self._begun[info.name] = SessionBegun(info.name, info.parent, info.group, states)
            for member in self._all():
                self.send(self.node.name, HOST, begun, only=member)

    def end_session(self, name: str) -> None:
        """Tell it to no new host, and drop what hosts send that have not heard of its end."""
        self._begun.pop(name, None)
        self._ends_before.pop(name, None)

    # --- messages

    def send(self, sender: str, to: str, message: Any, *, only: _Member | None = None) -> bool:
        """Carry a message, to all for the address ""; return False if the address is unknown."""
        member = only or self._members.get(to)
        if member is None and to:
            return False
        parcel, refused = pack(sender, to, message, self._launcher.dumps)
        for origin, result in refused:
            self.node.post(origin, result)
        if parcel is not None:
            if type(message) is m.SessionEnded and not to:
                self._ends_count += only is None
                parcel = parcel._replace(ends_count=self._ends_count)
            for each in [member] if member is not None else self._all():
                self._put(each, parcel)
        return True

    def _put(self, member: _Member, parcel: Parcel) -> None:
        member.out.append(parcel)
        if member.is_open and not member.is_flushing:
            member.is_flushing = True
            self.node.loop.call_soon(self._flush, member)

    def _flush(self, member: _Member) -> None:
        member.is_flushing = False
        if member.out:
            out, member.out = member.out, []
            member.ended.clear()
            member.peer.deliver(out)

    async def _listen(self, member: _Member) -> None:
        try:
            while True:
                for parcel in await member.peer.receive():
                    self._take(member, parcel)
        except PeerLostError as error:
            self._lose(member, str(error))

    def _take(self, member: _Member, parcel: Parcel) -> None:
        if parcel.session and not self._goes_on(member, parcel):
            return
        if parcel.to in self._members:
            self._put(self._members[parcel.to], parcel)
            return
        message, answer = unpack(parcel)
        if answer is not None:
            self.send(parcel.to, parcel.sender, answer)
        elif parcel.to == HUB:
            self._hear(member, message, parcel.ends_count)
        elif parcel.to:
            self.node.post(parcel.to, message, sender=parcel.sender)
        else:
            is_end = type(message) is m.Gone and message.location == member.location
            if is_end:
                self.node.retired.add(member.location)
                del self._members[member.location]
            self.node.broadcast(message, sender=parcel.sender)
            for each in self._all():
                if each is not member:
                    self._put(each, parcel)
            if is_end:
                self._start(self._part(member))

    def _goes_on(self, member: _Member, parcel: Parcel) -> bool:
        """Return whether a parcel is of a session that has not ended. Otherwise the end is on its way to its sender."""
        ends_before = self._ends_before.get(parcel.session)
        if ends_before is None:  # a host that has begun the session anew hears of no other end
            if parcel.session not in member.ended:
                member.ended.add(parcel.session)
                self.send(self.node.name, "", m.SessionEnded(parcel.session), only=member)
            return False
        return parcel.ends_count >= ends_before

    def _hear(self, member: _Member, message: Any, ends_count: int) -> None:
        if type(message) is Report:
            self._reports.add(message.summaries)
            member.waits_for = message.waits_for
            return
        if type(message) is Said:
            if self.on_said is not None:
                self.on_said(message.session, message.said)
            return
        info = self.node.sessions.get(message.session)
        if type(message) is Logged:
            if info is not None and ends_count >= self._ends_before.get(message.session, 0):
                info.log.append(message.entry)
            return
        if type(message) is Used:
            if info is not None:
                info.uses_proxy = True
                return
            self.send(self.node.name, "", m.SessionEnded(message.session), only=member)
            if self.on_late_turn is not None:
                self.on_late_turn(message.session)
            return
        assert type(message) is Touched
        if self.on_kept is not None:
            values = kept_values(message.values, pickle.loads, message.session)
            self.on_kept(message.agent, message.session, values)

    # --- ends

    def lose(self, location: str) -> None:
        """Remove an instance as if it had crashed."""
        if location in self._members:
            self._lose(self._members[location], "it was taken away")

    def _lose(self, member: _Member, why: str) -> None:
        if not self._forget(member):
            return
        member.peer.kill()
        if member.location not in self.node.retired:
            log.warning("%s is lost: %s", member.location, why)
            self.node.tell_all(m.Gone(member.location, why=why))
        self.node.tell_all(m.Gone(member.name, why=why))

    def _forget(self, member: _Member) -> bool:
        """Stop sending to it; return whether it was known."""
        self._members.pop(member.location, None)
        return self._members.pop(member.name, None) is not None

    async def _part(self, member: _Member) -> None:
        """End the process of a retired instance, once its calls are over."""
        await self._close_peer(member, is_over=False)
        if self._forget(member):
            self.node.tell_all(m.Gone(member.name, is_clean=True))
        self._stop_listening(member)
        member.peer.kill()

    async def _close_peer(self, member: _Member, *, is_over: bool) -> None:
        try:
            async with asyncio.timeout(CLOSE_S):
                await member.peer.close(is_over=is_over)
        except (TimeoutError, PeerLostError) as error:
            log.debug("%s did not end by itself: %r", member.location, error)

    def _stop_listening(self, member: _Member) -> None:
        if member.listening is not None:
            member.listening.cancel()

    def _start(self, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        task = self.node.loop.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task

    async def close(self) -> None:
        """End all hosts, and close their launcher."""
        members = self._all()
        await asyncio.gather(*(self._close_peer(member, is_over=True) for member in members))
        for member in members:
            self._forget(member)
            self._stop_listening(member)
            member.peer.kill()
        if self._tasks:
            await asyncio.wait(self._tasks, timeout=CLOSE_S)
        await self._launcher.close()

    def _all(self) -> list[_Member]:
        return [member for key, member in self._members.items() if key == member.name]
