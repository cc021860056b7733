"""A node: an origin, its controllers and instances, and the loop that carries messages between them.

All of it runs on one event loop. A call from another thread goes through a queue that wakes the loop once for
everything in it. Messages to remote machines go to the `Link`, in order of sending; if embedded, there is none.
"""

from __future__ import annotations

import asyncio
import copy
import itertools
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from typing import Any, Protocol, cast

from thunderagent_workflows.circles import find_circle
from thunderagent_workflows.core import messages as m
from thunderagent_workflows.core.call import Call, Outcome, Record
from thunderagent_workflows.core.controller import Controller
from thunderagent_workflows.core.directory import Directory
from thunderagent_workflows.core.origin import DIRECTORY, Origin
from thunderagent_workflows.core.router import agent_of
from thunderagent_workflows.declare import Agent
from thunderagent_workflows.errors import CallError, DeadlockError, EndedError, StateError, WorkflowError
from thunderagent_workflows.future import Future, Handle, Waiting, take_futures
from thunderagent_workflows.hints import Hints
from thunderagent_workflows.instance import Instance
from thunderagent_workflows.scope import NODE_BITS, Scope, SessionInfo
from thunderagent_workflows.state import SessionState


class Link(Protocol):
    """Carries messages to other nodes."""

    def send(self, sender: str, to: str, message: Any) -> bool:
        """Carry a message; return False if the receiver is unknown."""


class Node:
    """One process's part of a deployment. `agents` are all declared ones; `number` is unique among the nodes."""

    def __init__(
        self,
        agents: Mapping[str, Agent],
        kinds: Mapping[str, type],
        *,
        number: int = 0,
        clock: Callable[[], float] = time.time,
        link: Link | None = None,
        is_head: bool = True,
    ) -> None:
        """Use the running event loop."""
        self.loop = asyncio.get_running_loop()
        self.thread_id = threading.get_ident()
        self.name = f"node-{number}"
        self.agents = agents
        self.clock = clock
        self.origin = Origin(self.name, {name: agent.directives.rules for name, agent in agents.items()})
        self.controllers: dict[str, Controller] = {}
        self.instances: dict[str, Instance] = {}
        self.sessions: dict[str, SessionInfo] = {}
        self.waiting: dict[int, set[Waiting]] = {}
        """By running call, its waits: its tasks and threads wait beside each other."""
        self.kept_states: dict[tuple[str, str], dict[str, Any]] = {}
        """By agent and session, state from an earlier deployment, until it is used."""
        self.suspect: Handle | None = None
        """A call that may wait for itself, unless something moves it."""
        self.on_moved: Callable[[m.Moved], None] = lambda _: None
        self.on_answered: Callable[[str, list[Call]], None] | None = None
        """Called with calls that an instance here has run, before anybody gets their results."""
        self.on_uses_proxy: Callable[[str], None] | None = None
        """Called with a session when its code here makes its first turn."""
        self.new_session: Callable[[str], SessionInfo] = SessionInfo
        self.retired: set[str] = set()
        """Locations that are gone, with nothing left there."""
        self.hints: Hints | None = None
        """Estimates of sessions' next turns; None if nobody wants them."""
        self._kinds = kinds
        self._link = link
        self._machines: dict[str, Any] = {self.name: self.origin}
        if is_head:
            self._machines[DIRECTORY] = Directory()
        self._ids = itertools.count((number << NODE_BITS) + 1)
        self._inbox: deque[tuple[str, str, Any]] = deque()
        self._is_draining = False
        self._from_threads: deque[Any] = deque()
        self._is_notified = False
        self._closing: set[asyncio.Task[None]] = set()
        self._has_ended = False

    def __repr__(self) -> str:
        return f"<Node {self.name}: {len(self.instances)} instances, {len(self.origin.records)} calls>"

    def call(self, scope: Scope, agent: str, method: str, args: tuple[Any, ...]) -> Future:
        """Make a call; return at once. From any thread. It fails if the session of `scope` has ended.

        Raises `WorkflowError` for an agent that is not deployed, and `EndedError` after the end.
        """
        if self._has_ended:
            raise EndedError(f"{agent}.{method} was called after the deployment had ended", path=scope.chain)
        if agent not in self.agents:
            raise WorkflowError(f"no agent {agent!r} is deployed, only {', '.join(self.agents)}")
        needs: dict[int, Handle] = {}
        args = take_futures(args, needs)
        stage_count = scope.stage_count + 1
        for need in needs.values():
            stage_count = max(stage_count, need.call.stage_count + 1)
        session = scope.session
        call = Call(
            next(self._ids),
            scope.maker,
            agent,
            method,
            args,
            stage_count,
            stage_count - session.first_stages.setdefault(agent, stage_count),
            self.clock(),
        )
        handle = Handle(call, tuple(needs.values()))
        handle.node = self
        if threading.get_ident() == self.thread_id:
            self._create(handle, scope)
        else:
            self.enter(lambda: self._create(handle, scope))
        return Future(handle)

    def _create(self, handle: Handle, scope: Scope) -> None:
        if scope.session.has_ended:
            handle.outcome = Outcome(error=scope.ended_error(handle.words))
            handle.notify()
            return
        if self.hints is not None:
            self.hints.made(handle)
        self._inbox.append((self.name, self.name, m.Create(handle)))
        if not self._is_draining:
            self._drain()

    def uses_proxy(self, scope: Scope) -> None:
        """Note that code makes a turn at the proxy; from any thread. Raises `SessionEndedError`."""
        if scope.session.has_ended:
            raise scope.ended_error("a turn")
        session = scope.session
        if not session.uses_proxy:
            session.uses_proxy = True
            if self.on_uses_proxy is not None:
                self.enter(partial(self.on_uses_proxy, session.name))

    def session(self, name: str) -> SessionInfo:
        """Return the data of a session; create it if there is none."""
        info = self.sessions.get(name)
        if info is None:
            info = self.sessions[name] = self.new_session(name)
        return info

    def is_running(self, location: str, call_id: int) -> bool:
        """Return whether a call runs at an instance of this node."""
        controller = self.controllers.get(location)
        return controller is not None and call_id in controller.running

    def state_of(self, scope: Scope, name: str) -> SessionState:
        """Return the managed state that a running call may use. Raises `StateError`, `SessionEndedError`."""
        call, controller = scope.call, self.controllers[scope.location]
        assert call is not None
        if scope.session.has_ended:  # what is there now is of another session, with the same name
            raise scope.ended_error(f"managed state {name!r}")
        if not controller.rules.is_managed:
            raise StateError(f"{call.agent} uses managed state {name!r}: declare it `managed: true`")
        state = controller.states.get(call.session)
        if state is None:
            kept = self.kept_states.pop((call.agent, call.session), None)
            state = controller.states[call.session] = SessionState(kept)
        found: SessionState = state
        return found

    # --- messages

    def enter(self, action: Callable[[], None]) -> None:
        """Run something on the loop, from any thread, in the order of each thread's requests. On the loop, at once."""
        if threading.get_ident() == self.thread_id:
            action()
            return
        self._from_threads.append(action)
        if not self._is_notified:
            self._is_notified = True
            self.loop.call_soon_threadsafe(self._take_from_threads)

    def _take_from_threads(self) -> None:
        self._is_notified = False
        while self._from_threads:
            self._from_threads.popleft()()
        if self._has_ended:  # a thread may have made a call just before
            self._fail_rest()

    def post(self, to: str, message: Any, *, sender: str = "") -> None:
        """Deliver a message to a machine. On the loop."""
        self._put(sender or self.name, to, message)

    def broadcast(self, message: Any, *, sender: str = "") -> None:
        """Deliver a message to all machines of this node; the directory comes first."""
        for to in sorted(self._machines, key=lambda name: name != DIRECTORY):
            self._put(sender or self.name, to, message)

    def _put(self, sender: str, to: str, message: Any) -> None:
        self._inbox.append((sender, to, message))
        if not self._is_draining:
            self._drain()

    def _drain(self) -> None:
        self._is_draining = True
        inbox, machines = self._inbox, self._machines
        try:
            while inbox:
                sender, to, message = inbox.popleft()
                machine = machines.get(to)
                if machine is None:
                    self._pass_on(sender, to, message)
                    continue
                for each in machine.handle(message):
                    if type(each) is m.Send:
                        inbox.append((to, each.to, each.message))
                    else:
                        self._perform(to, each)
        finally:
            self._is_draining = False

    def _pass_on(self, sender: str, to: str, message: Any) -> None:
        """Send a message to another node; if its receiver does not exist, tell its sender."""
        if self._link is not None and to not in self.retired and self._link.send(sender, to, message):
            return
        gone = m.Gone(to, is_clean=to in self.retired)
        if type(message) is not m.Gone and sender in self._machines:
            self._inbox.append((to, sender, gone))
        elif type(message) is not m.Gone and self._link is not None:
            self._link.send(to, sender, gone)

    def _perform(self, name: str, instruction: Any) -> None:
        kind = type(instruction)
        if kind is m.Run:
            self.instances[name].run(instruction.calls)
        elif kind is m.Settled:
            self._settle(instruction.record)
        elif kind is m.Interrupt:
            self.instances[name].interrupt(instruction.calls)
        elif kind is m.Moved:
            self.on_moved(instruction)
        elif kind is m.Stays:
            self.tell_all(m.Joined(name))
        elif kind is m.Ended:
            self._end_instance(name)

    def _settle(self, record: Record) -> None:
        outcome, call = record.outcome, record.call
        assert outcome is not None
        session = self.sessions.get(call.session)
        if session is not None:
            session.log.append(
                (
                    call.call_id,
                    call.maker.call_id,
                    call.agent,
                    call.method,
                    record.executor,
                    call.created_s,
                    outcome.began_s,
                    outcome.ended_s or self.clock(),
                    call.stage_count,
                    record.moves_count,
                    outcome.error is not None,
                )
            )
        if self.hints is not None:
            self.hints.settled(cast("Handle", record))
        call.args = ()
        call.values = None
        cast("Handle", record).notify()

    def touched_states(
        self, location: str, calls: list[Call], copied: Callable[[Any], Any] = copy.deepcopy
    ) -> Iterator[tuple[str, dict[str, Any]]]:
        """Yield each session's managed state that finished calls of an instance here have touched, `copied`."""
        for call in calls:
            state = self.controllers[location].states.get(call.session)
            if state is not None and (values := state.take_touched(call.session, copied)):
                yield call.session, values

    # --- instances

    async def launch(self, location: str) -> None:
        """Start an instance here, and announce it. Raises what its class raises."""
        agent = self.agents[agent_of(location)]
        instance = Instance(self, location, agent, self._kinds[agent.name])
        try:
            await instance.start()
        except BaseException:
            await instance.close()
            raise
        self.instances[location] = instance
        self.controllers[location] = self._machines[location] = Controller(location, agent.directives.rules)
        self.tell_all(m.Joined(location))

    def tell_all(self, message: Any) -> None:
        """Tell all machines of all nodes; if embedded, they are here."""
        self.broadcast(message)
        if self._link is not None:
            self._link.send(self.name, "", message)

    def retire(self, location: str, others: tuple[str, ...]) -> None:
        """Let an instance end after it has given its waiting calls away."""
        self.tell_all(m.Leaving(location))
        self.post(location, m.Retire(others))

    def _end_instance(self, location: str) -> None:
        if location in self._machines:
            self.retired.add(location)
            self._remove(location, m.Gone(location, is_clean=True))

    def lose(self, location: str) -> None:
        """Remove an instance with everything on it, as if it had crashed."""
        if location in self._machines:
            self._remove(location, m.Gone(location))

    def _remove(self, location: str, gone: m.Gone) -> None:
        del self._machines[location], self.controllers[location]
        closing = self.loop.create_task(self.instances.pop(location).close())
        self._closing.add(closing)
        closing.add_done_callback(self._closing.discard)
        self.tell_all(gone)

    # --- the end

    def end_session(self, name: str) -> SessionInfo | None:
        """Forget a session, and fail its remaining calls."""
        self.tell_all(m.SessionEnded(name))
        return self.forget_session(name)

    def forget_session(self, name: str) -> SessionInfo | None:
        """Forget a session whose end all machines have been told."""
        if self.hints is not None:
            self.hints.session_ended(name)
        for agent in self.agents:
            self.kept_states.pop((agent, name), None)
        info = self.sessions.pop(name, None)
        if info is not None:
            info.has_ended = True
        return info

    def break_circle(self) -> None:
        """Fail a call that waits for itself, if it already did so at the last check."""
        handle = find_circle(self.waiting, self.controllers) if self.waiting else None
        self.suspect, before = handle, self.suspect
        if handle is not None and handle is before:
            text = (
                f"{handle.words} waits at {handle.executor} for a call that waits for it: "
                "give the agent more instances, or do not wait for it there"
            )
            self._fail(handle, DeadlockError(text, path=handle.path, instance=handle.executor))

    async def close(self) -> None:
        """End all instances, and fail the remaining calls: plain methods that wait for one are waited for."""
        self._has_ended = True
        for location in list(self.instances):
            self.lose(location)
        self._fail_rest()
        while self._closing:
            await asyncio.wait(self._closing)

    def _fail_rest(self) -> None:
        for record in list(self.origin.records.values()):
            if record.outcome is None:
                text = f"{record.call.agent}.{record.call.method} was not through when the deployment ended"
                self._fail(record, EndedError(text, path=record.path, instance=record.executor))

    def _fail(self, record: Record, error: CallError) -> None:
        """Resolve a call with an error."""
        self._put(self.name, self.name, m.Result(record.call.call_id, 0, Outcome(error=error)))
