"""A move from the view of the controller that a session leaves: what must happen before its calls and state go."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from thunderagent_workflows.core import messages as m
from thunderagent_workflows.core.call import Call
from thunderagent_workflows.core.origin import DIRECTORY
from thunderagent_workflows.core.router import agent_of

if TYPE_CHECKING:
    from thunderagent_workflows.core.controller import Controller


@dataclass(slots=True)
class Move:
    """Steps 1 to 3. Each edge is (a call whose value is needed, the call that needs it)."""

    session: str
    to: str
    calls: list[Call]
    asked: set[tuple[int, int]] = field(default_factory=set)
    """Edges whose producer has not answered."""
    in_flight: set[tuple[int, int]] = field(default_factory=set)
    """Edges whose value is on its way here."""

    @property
    def waits_for_values(self) -> bool:
        """Some value is asked for, or on its way."""
        return bool(self.asked or self.in_flight)

    def answer(self, edge: tuple[int, int], *, is_sent: bool) -> None:
        """Take a producer's answer."""
        self.asked.discard(edge)
        if is_sent:
            self.in_flight.add(edge)

    def forget_edge(self, edge: tuple[int, int]) -> None:
        """Stop waiting for a value: it is here, or comes from elsewhere."""
        self.asked.discard(edge)
        self.in_flight.discard(edge)

    def forget(self, call: Call) -> None:
        """Remove a call that will not go."""
        self.calls = [each for each in self.calls if each is not call]
        for edges in (self.asked, self.in_flight):
            edges -= {edge for edge in edges if edge[1] == call.call_id}


class Moves:
    """The sessions that leave a controller, have left it, and come to it."""

    def __init__(self, of: Controller) -> None:
        self.of = of
        self.under_way: dict[str, Move] = {}
        self.left_for: dict[str, tuple[str, int]] = {}
        """Sessions that left, their target, and their home's version since; "" if that place is gone."""
        self.held: dict[str, list[Call]] = {}
        """Calls that came before their session's state."""
        self.sent: dict[int, m.Transfer] = {}
        """What left and has not arrived."""
        self.retires_to: list[str] | None = None
        """If the instance is to end, the instances that take over."""
        self._transfers_count = 0

    @property
    def is_busy(self) -> bool:
        """Return whether a new call cannot simply begin."""
        return bool(self.under_way) or self.retires_to is not None

    def forget_sent(self, message: m.Activated) -> None:
        """Drop what has arrived."""
        self.sent.pop(message.transfer_id, None)

    def migrate(self, session: str, to: str) -> None:
        """Do steps 1 and 2, or report why not."""
        why_not = self._why_not(session, to)
        if why_not:
            self.of.out.append(m.Moved(session, to, 0, why_not))
            return
        move = self.under_way[session] = Move(session, to, self.of.queue.take(session))
        for call in move.calls:
            for need_id, producer in (call.missing or {}).items():
                move.asked.add((need_id, call.call_id))
                self.of.send(
                    call.origin if producer in self.of.gone else producer,
                    m.Retarget(need_id, call.origin, self.of.location, to, call.call_id),
                )
        if any(call.session == session for call in self.of.running.values()):
            self.of.interrupt()
        self.leave_if_ready(move)

    def _why_not(self, session: str, to: str) -> str:
        if self.of.rules.is_stateful:
            return "a stateful session stays where it is"
        if to == self.of.location or to in self.of.gone or agent_of(to) != self.of.agent:
            return f"{to} is not another instance of {self.of.agent}"
        if session in self.under_way:
            return "it is on the move already"
        if session not in self.of.homes and not self.of.queue.count_of(session):
            return "nothing of it is here"
        return ""

    def take_answer(self, message: m.Retargeted) -> None:
        """Do step 3."""
        call = self.of.lacking.get(message.for_id)
        edge = (message.call_id, message.for_id)
        for move in self.under_way.values():
            if edge in move.asked:
                is_due = message.is_sent and call is not None and message.call_id in (call.missing or ())
                move.answer(edge, is_sent=is_due)
                self.leave_if_ready(move)
                return

    def leave_if_ready(self, move: Move) -> None:
        """Do steps 4 and 5 as soon as no value and no run is waited for."""
        session, to = move.session, move.to
        runs = self.of.rules.is_pinned and any(call.session == session for call in self.of.running.values())
        if move.waits_for_values or runs:
            return
        del self.under_way[session]
        version = self.of.homes.pop(session, 0)
        version += version > 0
        subscribers = {}
        for call in move.calls:
            self.of.lacking.pop(call.call_id, None)
            self.of.here.pop(call.call_id, None)
            if call.call_id in self.of.subscribers:
                subscribers[call.call_id] = self.of.subscribers.pop(call.call_id)
            call.moves_count += 1
            call.home_version = version
            self.of.send(call.origin, m.ExecutorChanged(call.call_id, to, call.moves_count))
        if version:
            self.left_for[session] = (to, version)
            self.of.send(DIRECTORY, m.HomeMoved(session, self.of.agent, self.of.location, to, version))
        self.of.changed.add(session)
        priority = self.of.queue.priorities.get(session, 0.0)
        state = self.of.states.pop(session, None)
        self._transfers_count += 1
        transfer = m.Transfer(
            self._transfers_count, session, self.of.location, to, version, state, priority, move.calls, subscribers
        )
        self.sent[transfer.transfer_id] = transfer
        self.of.send(to, transfer)
        self.of.out.append(m.Moved(session, to, len(move.calls)))

    def take_in(self, message: m.Transfer) -> None:
        """Do step 6: the session continues here."""
        session = message.session
        if message.version and message.version <= self._known_version(session):
            # The session has restarted without it. Its calls have failed, but not those made after the session's end.
            for call in message.calls:
                # A late `ExecutorChanged` of this move must not count after `Bounced`.
                self.of.send(call.origin, m.Arrived(self.of.location, [(call.call_id, call.moves_count)]))
                self._send_back(call, message.subscribers.get(call.call_id, ()))
            self.of.send(message.sender, m.Activated(message.transfer_id))
            return
        self.of.subscribers.update(message.subscribers)
        if message.priority:
            self.of.queue.set_priorities({session: message.priority})
        if message.version:
            self.left_for.pop(session, None)
            self.of.homes[session] = message.version
            if message.state is not None:
                self.of.states[session] = message.state
            self.of.send(DIRECTORY, m.HomeArrived(session, self.of.agent, self.of.location, message.version))
        self.of.accept_all(message.calls)
        self.of.send(message.sender, m.Activated(message.transfer_id))
        self.release_held(session)

    def take_back_sent(self, transfer: m.Transfer) -> None:
        """Continue here what was sent to an instance that has retired in the meantime."""
        del self.sent[transfer.transfer_id]
        for call in transfer.calls:
            call.moves_count += 1
        transfer.version += transfer.version > 0
        self.take_in(transfer)

    def adopt(self, message: m.Adopt) -> None:
        """Become a session's home without its state, if that has not come."""
        session, version = message.session, message.version
        if version <= self._known_version(session):
            return  # the state came after all
        self.left_for.pop(session, None)
        self.of.homes[session] = version
        self.of.send(DIRECTORY, m.HomeArrived(session, self.of.agent, self.of.location, version))
        self.release_held(session)

    def _known_version(self, session: str) -> int:
        return max(self.of.homes.get(session, 0), self.left_for.get(session, ("", 0))[1])

    def release_held(self, session: str) -> None:
        """Queue the calls that came before their session's state."""
        self.of.accept_all(self.held.pop(session, ()))
        self.of.dispatch()
        if self.retires_to is not None:
            self.leave_for_good(session)

    def send_held_back(self, message: m.HomeOver) -> None:
        """Send calls elsewhere whose session's state will not come here."""
        held = self.held.pop(message.session, [])
        stays = [call for call in held if call.home_version > message.version]
        if stays:
            self.held[message.session] = stays
        for call in held:
            if call.home_version <= message.version:
                del self.of.here[call.call_id]
                self._send_back(call, self.of.subscribers.pop(call.call_id, ()))

    def _send_back(self, call: Call, consumers: Iterable[tuple[str, int]]) -> None:
        """Have its origin send a call elsewhere, unless the call is over, and tell it who gets the value."""
        for consumer, for_id in consumers:
            self.of.send(call.origin, m.Subscribe(call.call_id, call.origin, consumer, for_id))
        self.of.send(call.origin, m.Bounced(call.call_id, self.of.location))

    def retire(self, message: m.Retire) -> None:
        """Start to give everything away."""
        if self.of.rules.is_stateful and self.of.homes:
            self._stay_here(self.of.homes)
            return
        self.retires_to = list(message.others)
        for session in dict.fromkeys((*self.of.queue.sessions(), *self.of.homes)):
            self.leave_for_good(session)

    def leave_for_good(self, session: str) -> None:
        """Give a session away, because the instance retires."""
        others = [each for each in self.retires_to or () if each not in self.of.gone]
        if not others:
            self.retires_to = None  # there is nobody to give it to
            self._stay_here([session])
        elif session not in self.under_way and (session in self.of.homes or self.of.queue.count_of(session)):
            self.retires_to = [*others[1:], others[0]]  # in turn
            self.migrate(session, others[0])

    def _stay_here(self, sessions: Iterable[str]) -> None:
        """Report that there is no end, because of some sessions."""
        self.of.changed.update(sessions)
        self.of.out.append(m.Stays())

    def stay(self, move: Move) -> None:
        """Cancel a move whose target is gone."""
        del self.under_way[move.session]
        self.of.accept_all(move.calls)
        if self.retires_to is not None:
            self.leave_for_good(move.session)
