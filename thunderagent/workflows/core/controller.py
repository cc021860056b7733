"""The controller of one instance: its queue, what runs on it, the values it waits for and owes, and moves."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from thunderagent.workflows.core import messages as m
from thunderagent.workflows.core.call import Call, Outcome, Rules
from thunderagent.workflows.core.moves import Move
from thunderagent.workflows.core.origin import DIRECTORY
from thunderagent.workflows.core.queue import SessionQueue
from thunderagent.workflows.core.router import agent_of
from thunderagent.workflows.errors import SessionEndedError


class Controller:
    """One instance of an agent, at `location`, which is `AGENT/NUMBER`."""

    def __init__(self, location: str, rules: Rules) -> None:
        self.location = location
        self.agent = agent_of(location)
        self.rules = rules
        self.queue = SessionQueue(is_ordered=rules.is_stateful)
        self.running: dict[int, Call] = {}
        self.states: dict[str, Any] = {}
        """By session, the managed state; what is in it is the shell's."""
        self.homes: dict[str, int] = {}
        """Sessions that are at home here, with the version of their home."""
        self.changed: set[str] = set()
        """Sessions whose calls here have changed since the shell looked."""
        self._here: dict[int, Call] = {}
        self._held: dict[str, list[Call]] = {}
        """Calls that came before their session's state did."""
        self._lacking: dict[int, Call] = {}
        self._subscribers: dict[int, list[tuple[str, int]]] = {}
        self._moves: dict[str, Move] = {}
        self._moved: dict[str, tuple[str, int]] = {}
        """Sessions that left, where to, and their home's version since; "" if that place is gone."""
        self._sent: dict[int, m.Transfer] = {}
        """What left and has not arrived."""
        self._transfers_count = 0
        self._retires_to: list[str] | None = None
        self._is_interrupting = False
        self._gone: set[str] = set()
        self._out: list[Any] = []
        self._handlers: dict[type, Any] = {
            m.Submit: lambda message: self._submit(message.call),
            m.Finished: self._finish,
            m.Interrupted: self._take_back,
            m.Result: self._take_result,
            m.Subscribe: self._subscribe,
            m.Retarget: self._retarget,
            m.Retargeted: self._take_answer,
            m.Migrate: lambda message: self._migrate(message.session, message.to),
            m.Transfer: self._take_in,
            m.Activated: lambda message: self._sent.pop(message.transfer_id, None),
            m.Adopt: self._adopt,
            m.SetPriorities: self._set_priorities,
            m.Retire: self._retire,
            m.Gone: self._lose,
            m.SessionEnded: self._end_session,
            m.Joined: lambda _: None,
            m.Leaving: lambda _: None,
        }

    def __repr__(self) -> str:
        return f"<Controller {self.location}: {len(self.running)} running, {len(self.queue)} queued>"

    @property
    def is_retiring(self) -> bool:
        """Say whether it takes no new calls."""
        return self._retires_to is not None

    def handle(self, message: Any) -> list[Any]:
        """Take one message; return what to send and what to do."""
        self._out = []
        self._handlers[type(message)](message)
        if self._retires_to is not None:
            self._end_if_empty()
        return self._out

    def holds(self, call_id: int) -> bool:
        """Say whether a call is here: queued, held back or running."""
        return call_id in self._here

    # --- calls come

    def _submit(self, call: Call) -> None:
        session = call.session
        if call.origin in self._gone:
            return
        is_fresh = call.home_version == call.born_version
        moved = self._moved.get(session)
        if moved is not None and call.home_version > moved[1]:
            if is_fresh:
                del self._moved[session]
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
        if self._retires_to is not None and session not in self.homes and session not in self._moves:
            self._send(call.origin, m.Bounced(call.call_id, self.location))
        else:
            self._accept(call)
            self._dispatch()
            if self._retires_to is not None:
                self._leave_for_good(session)

    def _hold(self, call: Call) -> None:
        self._here[call.call_id] = call
        self._held.setdefault(call.session, []).append(call)

    def _send_after(self, call: Call, to: str, version: int) -> None:
        """Have the origin send a call after its session."""
        if to:
            self._send(call.origin, m.Home(call.session, self.agent, to, version, call.born_version))
        self._send(call.origin, m.Bounced(call.call_id, self.location))

    def _accept(self, call: Call) -> None:
        """Queue a call, and ask for the values that it lacks."""
        call_id = call.call_id
        if call.origin in self._gone:
            self._drop(call)
            return
        self._here[call_id] = call
        self.changed.add(call.session)
        if call.moves_count:
            self._send(call.origin, m.Arrived(self.location, [(call_id, call.moves_count)]))
        if call.session in self._moves:
            self._moves[call.session].calls.append(call)  # the new place asks for the values that it lacks
            return
        if call.missing:
            self._lacking[call_id] = call
            for need_id, producer in call.missing.items():
                to = call.origin if producer in self._gone else producer
                self._send(to, m.Subscribe(need_id, call.origin, self.location, call_id))
        self.queue.push(call)

    # --- calls run

    def _dispatch(self) -> None:
        """Run what goes next if nothing runs; else interrupt what runs for a session of higher priority."""
        if not self.running:
            self._is_interrupting = False
            calls = self.queue.pop(self.rules.batch_count, mixes=self.rules.mixes_sessions)
            if calls:
                for call in calls:
                    self.running[call.call_id] = call
                    call.runs_count += 1
                    self.changed.add(call.session)
                self._out.append(m.Run(calls))
        elif self.rules.is_preemptable and not self._is_interrupting:
            top = self.queue.top_priority
            of = self.queue.priorities
            if top is not None and top > max(of.get(call.session, 0.0) for call in self.running.values()):
                self._interrupt()

    def _interrupt(self) -> None:
        if self.rules.is_preemptable and not self._is_interrupting:
            self._is_interrupting = True
            self._out.append(m.Interrupt(list(self.running.values())))

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
        if call.call_id not in self._here:
            pass  # its session ended
        elif call.session in self._moves:
            self._moves[call.session].calls.insert(0, call)
        else:
            self.queue.push_front(call)
        self._go_on(call.session)

    def _go_on(self, session: str) -> None:
        if session in self._moves:
            self._leave_if_ready(self._moves[session])
        self._dispatch()

    def _complete(self, call: Call, outcome: Outcome) -> None:
        """Push what came of a call to whoever needs it, its origin last."""
        self.changed.add(call.session)
        if self._here.pop(call.call_id, None) is None:
            return
        if self._subscribers:
            for location, for_id in self._subscribers.pop(call.call_id, ()):
                self._send(location, m.Result(call.call_id, for_id, outcome))
        self._send(call.origin, m.Result(call.call_id, 0, outcome))

    def _set_priorities(self, message: m.SetPriorities) -> None:
        self.queue.set_priorities(message.priorities)
        self._dispatch()

    # --- values

    def _take_result(self, message: m.Result) -> None:
        call = self._lacking.get(message.for_id)
        if call is None or not call.missing or call.missing.pop(message.call_id, None) is None:
            return
        move = self._moves.get(call.session)
        if message.outcome.error is not None:
            del self._lacking[message.for_id]
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
                del self._lacking[message.for_id]
                if move is None:
                    self.queue.make_ready(call)
        self._go_on(call.session)

    def _subscribe(self, message: m.Subscribe) -> None:
        if message.call_id in self._here:
            consumers = self._subscribers.setdefault(message.call_id, [])
            if (message.consumer, message.for_id) not in consumers:
                consumers.append((message.consumer, message.for_id))
        else:
            self._send(message.origin, message)

    def _retarget(self, message: m.Retarget) -> None:
        if message.call_id not in self._here:
            self._send(message.origin, message)
            return
        old, new = (message.consumer, message.for_id), (message.to, message.for_id)
        consumers = self._subscribers.setdefault(message.call_id, [])
        consumers[:] = [each for each in consumers if each not in (old, new)] + [new]
        self._send(message.consumer, m.Retargeted(message.call_id, message.for_id, is_sent=False))

    # --- sessions move

    def _migrate(self, session: str, to: str) -> None:
        why_not = self._why_not(session, to)
        if why_not:
            self._out.append(m.Moved(session, to, 0, why_not))
            return
        move = self._moves[session] = Move(session, to, self.queue.take(session))
        for call in move.calls:
            for need_id, producer in (call.missing or {}).items():
                move.asked.add((need_id, call.call_id))
                self._send(
                    call.origin if producer in self._gone else producer,
                    m.Retarget(need_id, call.origin, self.location, to, call.call_id),
                )
        if any(call.session == session for call in self.running.values()):
            self._interrupt()
        self._leave_if_ready(move)

    def _why_not(self, session: str, to: str) -> str:
        if self.rules.is_stateful:
            return "a stateful session stays where it is"
        if to == self.location or to in self._gone or agent_of(to) != self.agent:
            return f"{to} is no other instance of {self.agent}"
        if session in self._moves:
            return "it is on the move already"
        if session not in self.homes and not self.queue.count_of(session):
            return "nothing of it is here"
        return ""

    def _take_answer(self, message: m.Retargeted) -> None:
        call = self._lacking.get(message.for_id)
        edge = (message.call_id, message.for_id)
        for move in self._moves.values():
            if edge in move.asked:
                is_due = message.is_sent and call is not None and message.call_id in (call.missing or ())
                move.answer(edge, is_sent=is_due)
                self._leave_if_ready(move)
                return

    def _leave_if_ready(self, move: Move) -> None:
        """Take steps 4 and 5 as soon as no value and no run is waited for."""
        session, to = move.session, move.to
        runs = self.rules.is_pinned and any(call.session == session for call in self.running.values())
        if move.waits_for_values or runs:
            return
        del self._moves[session]
        version = self.homes.pop(session, 0)
        version += version > 0
        subscribers = {}
        for call in move.calls:
            self._lacking.pop(call.call_id, None)
            self._here.pop(call.call_id, None)
            if call.call_id in self._subscribers:
                subscribers[call.call_id] = self._subscribers.pop(call.call_id)
            call.moves_count += 1
            call.home_version = version
            self._send(call.origin, m.ExecutorChanged(call.call_id, to, call.moves_count))
        if version:
            self._moved[session] = (to, version)
            self._send(DIRECTORY, m.HomeMoved(session, self.agent, self.location, to, version))
        self.changed.add(session)
        priority = self.queue.priorities.get(session, 0.0)
        state = self.states.pop(session, None)
        self._transfers_count += 1
        transfer = m.Transfer(
            self._transfers_count, session, self.location, to, version, state, priority, move.calls, subscribers
        )
        self._sent[transfer.transfer_id] = transfer
        self._send(to, transfer)
        self._out.append(m.Moved(session, to, len(move.calls)))

    def _take_in(self, message: m.Transfer) -> None:
        """Take step 6: the session goes on here."""
        session = message.session
        if message.version and message.version <= max(self.homes.get(session, 0), self._moved.get(session, ("", 0))[1]):
            return  # its sender was lost, and it has begun anew: its calls have failed
        self._subscribers.update(message.subscribers)
        if message.priority:
            self.queue.set_priorities({session: message.priority})
        if message.version:
            self._moved.pop(session, None)
            self.homes[session] = message.version
            if message.state is not None:
                self.states[session] = message.state
            self._send(DIRECTORY, m.HomeArrived(session, self.agent, self.location, message.version))
        self._accept_all(message.calls)
        self._send(message.sender, m.Activated(message.transfer_id))
        self._release_held(session)

    def _take_back_sent(self, transfer: m.Transfer) -> None:
        """Go on here with what was sent to an instance that has retired in the meantime."""
        del self._sent[transfer.transfer_id]
        for call in transfer.calls:
            call.moves_count += 1
        transfer.version += transfer.version > 0
        self._take_in(transfer)

    def _adopt(self, message: m.Adopt) -> None:
        session, version = message.session, message.version
        if version <= max(self.homes.get(session, 0), self._moved.get(session, ("", 0))[1]):
            return  # the state came all the same
        self._moved.pop(session, None)
        self.homes[session] = version
        self._send(DIRECTORY, m.HomeArrived(session, self.agent, self.location, version))
        self._release_held(session)

    def _release_held(self, session: str) -> None:
        self._accept_all(self._held.pop(session, ()))
        self._dispatch()
        if self._retires_to is not None:
            self._leave_for_good(session)

    def _accept_all(self, calls: Iterable[Call]) -> None:
        for call in calls:
            self._accept(call)

    # --- the end of things

    def _retire(self, message: m.Retire) -> None:
        if self.rules.is_stateful and self.homes:
            self._out.append(m.Stays())
            return
        self._retires_to = list(message.others)
        for session in dict.fromkeys((*self.queue.sessions(), *self.homes)):
            self._leave_for_good(session)

    def _leave_for_good(self, session: str) -> None:
        others = [each for each in self._retires_to or () if each not in self._gone]
        if not others:
            self._retires_to = None  # there is nobody to give it to
            self._out.append(m.Stays())
        elif session not in self._moves and (session in self.homes or self.queue.count_of(session)):
            self._retires_to = [*others[1:], others[0]]  # in turn
            self._migrate(session, others[0])

    def _end_if_empty(self) -> None:
        if not (self._here or self._moves or self._sent or self.homes or self.running):
            self._out.append(m.Ended())

    def _lose(self, message: m.Gone) -> None:
        location = message.location
        self._gone.add(location)
        for session, (to, version) in self._moved.items():
            if to == location:
                self._moved[session] = ("", version)
        for transfer in [each for each in self._sent.values() if each.to == location]:
            if message.is_clean:
                self._take_back_sent(transfer)
            else:
                del self._sent[transfer.transfer_id]  # its calls have failed
        for call in [*self._here.values()]:
            if call.origin == location and call.call_id not in self.running:
                self._take_out(call)
        for call in self._lacking.values():
            self._lose_producer(call, location)
        for move in list(self._moves.values()):
            if move.to == location:
                self._stay(move)
            else:
                self._leave_if_ready(move)
        self._dispatch()

    def _lose_producer(self, call: Call, location: str) -> None:
        """Ask the origin for the values that come from a location no more."""
        move = self._moves.get(call.session)
        for need_id, producer in (call.missing or {}).items():
            if producer == location:
                self._send(call.origin, m.Subscribe(need_id, call.origin, self.location, call.call_id))
                if move is not None:
                    move.forget_edge((need_id, call.call_id))

    def _take_out(self, call: Call) -> None:
        """Forget a call that does not run."""
        if call.session in self._moves:
            self._moves[call.session].forget(call)
        elif call in self._held.get(call.session, ()):
            self._held[call.session].remove(call)
        else:
            self.queue.remove(call)
        self._drop(call)

    def _stay(self, move: Move) -> None:
        """Give up a move whose aim is gone."""
        del self._moves[move.session]
        self._accept_all(move.calls)
        if self._retires_to is not None:
            self._leave_for_good(move.session)

    def _drop(self, call: Call) -> None:
        self._here.pop(call.call_id, None)
        self._lacking.pop(call.call_id, None)
        self._subscribers.pop(call.call_id, None)
        self.changed.add(call.session)

    def _end_session(self, message: m.SessionEnded) -> None:
        session = message.session
        move = self._moves.pop(session, None)
        running = [call for call in self.running.values() if call.session == session]
        for call in (*self.queue.take(session), *self._held.pop(session, ()), *(move.calls if move else ()), *running):
            self._lacking.pop(call.call_id, None)
            error = SessionEndedError(
                f"session {session!r} ended", path=(*call.chain, self.location), instance=self.location
            )
            self._complete(call, Outcome(error=error))
        for table in (self.homes, self.states, self._moved):
            table.pop(session, None)
        self.queue.priorities.pop(session, None)
        self._dispatch()

    def _send(self, to: str, message: Any) -> None:
        self._out.append(m.Send(to, message))
