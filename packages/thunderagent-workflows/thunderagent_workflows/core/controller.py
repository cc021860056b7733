"""The controller of one instance: its queue, what runs on it, the values it waits for and owes, and moves."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from thunderagent_workflows.core import messages as m
from thunderagent_workflows.core.call import Call, Outcome, Rules
from thunderagent_workflows.core.moves import Moves
from thunderagent_workflows.core.origin import DIRECTORY
from thunderagent_workflows.core.queue import SessionQueue
from thunderagent_workflows.core.router import agent_of
from thunderagent_workflows.errors import SessionEndedError


class Controller:
    """One instance of an agent, at `location`, which is `AGENT/NUMBER`."""

    def __init__(self, location: str, rules: Rules) -> None:
        self.location = location
        self.agent = agent_of(location)
        self.rules = rules
        self.queue = SessionQueue(is_ordered=rules.is_stateful)
        self.running: dict[int, Call] = {}
        self.states: dict[str, Any] = {}
        """By session, the managed state; its content belongs to the shell."""
        self.homes: dict[str, int] = {}
        """Sessions that have their home here, with its version."""
        self.changed: set[str] = set()
        """Sessions whose calls here changed since the shell last looked."""
        self.here: dict[int, Call] = {}
        """All unfinished calls: queued, held back, moving, running."""
        self.lacking: dict[int, Call] = {}
        """Those that lack a value."""
        self.subscribers: dict[int, list[tuple[str, int]]] = {}
        """By call, who gets its value: a location, and the call there."""
        self.moves = Moves(self)
        self._is_interrupting = False
        self.gone: set[str] = set()
        self.out: list[Any] = []
        self._handlers: dict[type, Any] = {
            m.Submit: lambda message: self._submit(message.call),
            m.Finished: self._finish,
            m.Interrupted: self._take_back,
            m.Result: self._take_result,
            m.Subscribe: self._subscribe,
            m.Retarget: self._retarget,
            m.Retargeted: self.moves.take_answer,
            m.Migrate: lambda message: self.moves.migrate(message.session, message.to),
            m.Transfer: self.moves.take_in,
            m.Activated: self.moves.forget_sent,
            m.Adopt: self.moves.adopt,
            m.HomeOver: self.moves.send_held_back,
            m.SetPriorities: self._set_priorities,
            m.Retire: self.moves.retire,
            m.Gone: self._lose,
            m.SessionEnded: self._end_session,
            m.Joined: lambda _: None,
            m.Leaving: lambda _: None,
        }

    def __repr__(self) -> str:
        return f"<Controller {self.location}: {len(self.running)} running, {len(self.queue)} queued>"

    @property
    def is_retiring(self) -> bool:
        """Return whether it takes no new calls."""
        return self.moves.retires_to is not None

    def handle(self, message: Any) -> list[Any]:
        """Process one message; return what to send and what to do."""
        self.out = []
        self._handlers[type(message)](message)
        if self.moves.retires_to is not None:
            self._end_if_empty()
        return self.out

    def holds(self, call_id: int) -> bool:
        """Return whether a call is here: queued, held back or running."""
        return call_id in self.here

    # --- calls come

    def _submit(self, call: Call) -> None:
        session = call.session
        if call.origin in self.gone:
            return
        is_fresh = call.home_version == call.born_version
        moved = self.moves.left_for.get(session)
        if moved is not None and call.home_version > moved[1]:
            if is_fresh:
                del self.moves.left_for[session]
            else:
                self._hold(call)  # the session is on its way back
                return
        elif moved is not None:
            self._send_after(call, *moved)
            return
        if self.rules.is_pinned and call.home_version > self.homes.get(session, 0):
            if not is_fresh:
                self._hold(call)
                return
            self.homes[session] = call.home_version
            self.states.pop(session, None)
        if self.moves.retires_to is not None and session not in self.homes and session not in self.moves.under_way:
            self.send(call.origin, m.Bounced(call.call_id, self.location))
        elif not (self.running or call.missing or self.queue.calls_count or self.moves.is_busy):
            self.here[call.call_id] = call
            self._begin([call])  # like queue and dispatch, at a quarter of the cost
        else:
            self._accept(call)
            self.dispatch()
            if self.moves.retires_to is not None:
                self.moves.leave_for_good(session)

    def _hold(self, call: Call) -> None:
        self.here[call.call_id] = call
        self.moves.held.setdefault(call.session, []).append(call)
        self.send(DIRECTORY, m.Expected(call.session, self.agent, self.location, call.home_version))

    def _send_after(self, call: Call, to: str, version: int) -> None:
        """Ask the origin to send a call after its session."""
        if to:
            self.send(call.origin, m.Home(call.session, self.agent, to, version, call.born_version))
        self.send(call.origin, m.Bounced(call.call_id, self.location))

    def _accept(self, call: Call) -> None:
        """Queue a call, and ask for the values that it lacks."""
        call_id = call.call_id
        if call.origin in self.gone:
            self._drop(call)
            return
        self.here[call_id] = call
        self.changed.add(call.session)
        if call.moves_count:
            self.send(call.origin, m.Arrived(self.location, [(call_id, call.moves_count)]))
        if call.session in self.moves.under_way:
            self.moves.under_way[call.session].calls.append(call)  # the new place asks for the values that it lacks
            return
        if call.missing:
            self.lacking[call_id] = call
            for need_id, producer in call.missing.items():
                to = call.origin if producer in self.gone else producer
                self.send(to, m.Subscribe(need_id, call.origin, self.location, call_id))
        self.queue.push(call)

    def accept_all(self, calls: Iterable[Call]) -> None:
        """Queue calls."""
        for call in calls:
            self._accept(call)

    # --- calls run

    def dispatch(self) -> None:
        """Run the next call if nothing runs; otherwise interrupt the running one for a session of higher priority."""
        if not self.running:
            self._is_interrupting = False
            if not self.queue.calls_count:
                return
            calls = self.queue.pop(self.rules.batch_count, mixes=self.rules.mixes_sessions)
            if calls:
                self._begin(calls)
        elif self.rules.is_preemptable and not self._is_interrupting:
            top = self.queue.top_priority
            of = self.queue.priorities
            if top is not None and top > max(of.get(call.session, 0.0) for call in self.running.values()):
                self.interrupt()

    def _begin(self, calls: list[Call]) -> None:
        for call in calls:
            self.running[call.call_id] = call
            self.changed.add(call.session)
        self.out.append(m.Run(calls))

    def interrupt(self) -> None:
        """Stop the running call, if it can be stopped."""
        if self.rules.is_preemptable and not self._is_interrupting:
            self._is_interrupting = True
            self.out.append(m.Interrupt(list(self.running.values())))

    def _finish(self, message: m.Finished) -> None:
        call = self.running.pop(message.call_id, None)
        if call is None:
            return
        self._complete(call, message.outcome)
        self._go_on(call.session)

    def _take_back(self, message: m.Interrupted) -> None:
        call = self.running.pop(message.call_id, None)
        if call is None:
            return
        call.checkpoint = message.checkpoint
        if call.call_id not in self.here:
            self._drop_state(call.session)
        elif call.session in self.moves.under_way:
            self.moves.under_way[call.session].calls.insert(0, call)
        else:
            self.queue.push_front(call)
        self._go_on(call.session)

    def _go_on(self, session: str) -> None:
        if session in self.moves.under_way:
            self.moves.leave_if_ready(self.moves.under_way[session])
        self.dispatch()

    def _complete(self, call: Call, outcome: Outcome) -> None:
        """Push a call's result to all that need it, its origin last."""
        self.changed.add(call.session)
        if self.here.pop(call.call_id, None) is None:
            self._drop_state(call.session)
            return
        if self.subscribers:
            for location, for_id in self.subscribers.pop(call.call_id, ()):
                self.send(location, m.Result(call.call_id, for_id, outcome))
        self.send(call.origin, m.Result(call.call_id, 0, outcome))

    def _drop_state(self, session: str) -> None:
        """Drop the state left by a call of an ended session."""
        if session not in self.homes:
            self.states.pop(session, None)

    def _set_priorities(self, message: m.SetPriorities) -> None:
        self.queue.set_priorities(message.priorities)
        self.dispatch()

    # --- values

    def _take_result(self, message: m.Result) -> None:
        call = self.lacking.get(message.for_id)
        if call is None or not call.missing or call.missing.pop(message.call_id, None) is None:
            return
        move = self.moves.under_way.get(call.session)
        if message.outcome.error is not None:
            del self.lacking[message.for_id]
            if move is not None:
                move.forget(call)
            else:
                self.queue.remove(call)
            self._complete(call, message.outcome)
        else:
            if call.values is None:
                call.values = {}
            call.values[message.call_id] = message.outcome.value
            if move is not None:
                move.forget_edge((message.call_id, message.for_id))
            if not call.missing:
                del self.lacking[message.for_id]
                if move is None:
                    self.queue.make_ready(call)
        self._go_on(call.session)

    def _subscribe(self, message: m.Subscribe) -> None:
        if message.call_id in self.here:
            consumers = self.subscribers.setdefault(message.call_id, [])
            if (message.consumer, message.for_id) not in consumers:
                consumers.append((message.consumer, message.for_id))
        else:
            self.send(message.origin, message)

    def _retarget(self, message: m.Retarget) -> None:
        if message.call_id not in self.here:
            self.send(message.origin, message)
            return
        old, new = (message.consumer, message.for_id), (message.to, message.for_id)
        consumers = self.subscribers.setdefault(message.call_id, [])
        consumers[:] = [each for each in consumers if each not in (old, new)] + [new]
        self.send(message.consumer, m.Retargeted(message.call_id, message.for_id, is_sent=False))

    # --- the end of things

    def _end_if_empty(self) -> None:
        if not (self.here or self.moves.under_way or self.moves.sent or self.homes or self.running):
            self.out.append(m.Ended())

    def _lose(self, message: m.Gone) -> None:
        location = message.location
        self.gone.add(location)
        for session, (to, version) in self.moves.left_for.items():
            if to == location:
                self.moves.left_for[session] = ("", version)
        for transfer in [each for each in self.moves.sent.values() if each.to == location]:
            if message.is_clean:
                self.moves.take_back_sent(transfer)
            else:
                del self.moves.sent[transfer.transfer_id]  # its calls have failed
        for call in [*self.here.values()]:
            if call.origin == location and call.call_id not in self.running:
                self._take_out(call)
        for call in self.lacking.values():
            self._lose_producer(call, location)
        for move in list(self.moves.under_way.values()):
            if move.to == location:
                self.moves.stay(move)
            else:
                self.moves.leave_if_ready(move)
        self.dispatch()

    def _lose_producer(self, call: Call, location: str) -> None:
        """Ask the origin for values whose producer is gone."""
        move = self.moves.under_way.get(call.session)
        for need_id, producer in (call.missing or {}).items():
            if producer == location:
                self.send(call.origin, m.Subscribe(need_id, call.origin, self.location, call.call_id))
                if move is not None:
                    move.forget_edge((need_id, call.call_id))

    def _take_out(self, call: Call) -> None:
        """Forget a call that is not running."""
        if call.session in self.moves.under_way:
            self.moves.under_way[call.session].forget(call)
        elif call in self.moves.held.get(call.session, ()):
            self.moves.held[call.session].remove(call)
        else:
            self.queue.remove(call)
        self._drop(call)

    def _drop(self, call: Call) -> None:
        self.here.pop(call.call_id, None)
        self.lacking.pop(call.call_id, None)
        self.subscribers.pop(call.call_id, None)
        self.changed.add(call.session)

    def _end_session(self, message: m.SessionEnded) -> None:
        session = message.session
        move = self.moves.under_way.pop(session, None)
        running = [call for call in self.running.values() if call.session == session]
        held = self.moves.held.pop(session, [])
        for call in (*self.queue.take(session), *held, *(move.calls if move else ()), *running):
            self.lacking.pop(call.call_id, None)
            error = SessionEndedError(
                f"session {session!r} ended", path=(*call.chain, self.location), instance=self.location
            )
            self._complete(call, Outcome(error=error))
        for table in (self.homes, self.states, self.moves.left_for):
            table.pop(session, None)
        self.moves.sent = {key: each for key, each in self.moves.sent.items() if each.session != session}
        self.queue.priorities.pop(session, None)
        self.dispatch()

    def send(self, to: str, message: Any) -> None:
        """Send a message."""
        self.out.append(m.Send(to, message))
