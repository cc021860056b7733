"""The origin: makes calls, chooses where each goes, and knows their state."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from thunderagent_workflows.core import messages as m
from thunderagent_workflows.core.call import Outcome, Record, Rules
from thunderagent_workflows.core.router import Router, agent_of
from thunderagent_workflows.errors import CallError, DeadlockError, LostError, SessionEndedError

DIRECTORY = "directory"
"""The directory's address."""


class Origin:
    """All calls made on one node. `rules` defines the agents."""

    def __init__(self, name: str, rules: Mapping[str, Rules]) -> None:
        self.name = name
        self.rules = rules
        self.router = Router()
        self.records: dict[int, Record] = {}
        """Calls that are unresolved, or whose value a call of this node waits for."""
        self._homes: dict[tuple[str, str], m.Home] = {}
        self._unrouted: dict[tuple[str, str], list[Record]] = {}
        """Calls that wait for a home, or, under the session "", for an instance."""
        self._gone: dict[str, bool] = {}
        """Locations that are gone, and whether nothing was lost with them."""
        self._why: dict[str, str] = {}
        """Known reasons for their end."""
        self._out: list[Any] = []
        self._handlers: dict[type, Any] = {
            m.Create: self._create,
            m.Result: self._take_result,
            m.ExecutorChanged: self._change_executor,
            m.Arrived: self._arrive,
            m.Bounced: self._route_again,
            m.Subscribe: self._subscribe,
            m.Retarget: self._retarget,
            m.Home: self._take_home,
            m.HomeLost: self._lose_home,
            m.Joined: self._join,
            m.Leaving: lambda message: self.router.remove(message.location, is_gone=False),
            m.Gone: self._lose,
            m.SetRoute: lambda message: self.router.set_route(message.agent, message.session, message.weights),
            m.SessionEnded: self._end_session,
        }

    def __repr__(self) -> str:
        return f"<Origin {self.name}: {len(self.records)} calls>"

    def handle(self, message: Any) -> list[Any]:
        """Process one message; return what to send and what is settled."""
        self._out = []
        self._handlers[type(message)](message)
        return self._out

    def waits_for_instance(self, agent: str) -> bool:
        """Return whether a call waits for an agent to have an instance, or for its session to have a home."""
        return any(key[1] == agent and records for key, records in self._unrouted.items())

    def _create(self, message: m.Create) -> None:
        record = message.record
        self.records[record.call.call_id] = record
        for need in record.needs:
            need.edges_count += 1
        self._route(record)

    def _route(self, record: Record, avoid: str = "") -> None:
        """Send a call to its instance, as soon as there is one."""
        call = record.call
        if not self.rules[call.agent].is_pinned:
            location = self.router.pick(call.session, call.agent, (*call.chain, avoid) if avoid else call.chain)
            if location:
                self._submit(record, location)
            else:
                self._unrouted.setdefault(("", call.agent), []).append(record)
            return
        key = (call.session, call.agent)
        home = self._homes.get(key)
        if home is not None:
            call.home_version, call.born_version = home.version, home.born_version
            self._submit(record, home.location)
            return
        waiting = self._unrouted.setdefault(key, [])
        waiting.append(record)
        if len(waiting) == 1:
            hint = self.router.pick(call.session, call.agent, call.chain)
            self._send(DIRECTORY, m.AskHome(call.session, call.agent, self.name, hint))

    def _submit(self, record: Record, location: str) -> None:
        call = record.call
        for need in record.needs:
            outcome, need_id = need.outcome, need.call.call_id
            if outcome is None:
                if call.missing is None:
                    call.missing = {}
                call.missing[need_id] = need.executor or self.name
                need.add_consumer(location)
            elif outcome.error is not None:
                self._resolve(record, outcome)
                return
            else:
                if call.values is None:
                    call.values = {}
                call.values[need_id] = outcome.value
                if call.missing:
                    call.missing.pop(need_id, None)
        record.executor = location
        call.moves_count = record.moves_count
        self.router.count(location, 1)
        self._send(location, m.Submit(call))

    def _take_result(self, message: m.Result) -> None:
        record = self.records.get(message.call_id)
        if record is not None:
            error = message.outcome.error
            if isinstance(error, CallError) and error.instance and not error.path:  # of the way there, or back
                error.path = (*record.call.chain, error.instance)
            self._resolve(record, message.outcome)
            if isinstance(error, DeadlockError):  # its executor still has it, and may never tell
                self._tell_dependents(record)

    def _resolve(self, record: Record, outcome: Outcome) -> None:
        """Resolve a record, once, and pass the outcome to those that asked the origin for it."""
        if record.outcome is not None:
            return
        record.outcome = outcome
        self.router.count(record.executor, -1)
        for location, for_id in record.owed or ():
            self._send(location, m.Result(record.call.call_id, for_id, outcome))
        record.owed = None
        for need in record.needs:
            need.edges_count -= 1
            self._forget_if_idle(need)
        record.needs = ()
        self._forget_if_idle(record)
        self._out.append(m.Settled(record))

    def _forget_if_idle(self, record: Record) -> None:
        if record.outcome is not None and not record.edges_count:
            self.records.pop(record.call.call_id, None)

    def _unresolved(self, call_id: int) -> Record | None:
        record = self.records.get(call_id)
        return record if record is not None and record.outcome is None else None

    # --- calls that move

    def _change_executor(self, message: m.ExecutorChanged) -> None:
        record = self._unresolved(message.call_id)
        if record is not None and message.moves_count > record.moves_count:
            self._set_executor(record, message.to, message.moves_count, left=record.executor)

    def _arrive(self, message: m.Arrived) -> None:
        for call_id, moves_count in message.calls:
            record = self._unresolved(call_id)
            if record is not None and moves_count >= record.moves_count:
                self._set_executor(record, message.at, moves_count, left="")

    def _set_executor(self, record: Record, location: str, moves_count: int, *, left: str) -> None:
        self.router.count(record.executor, -1)
        self.router.count(location, 1)
        record.executor, record.left, record.moves_count = location, left, moves_count
        self._fail_if_lost(record)

    def _fail_if_lost(self, record: Record) -> None:
        for location in (record.executor, record.left):
            if self._gone.get(location) is False and record.outcome is None:
                self._resolve(record, Outcome(error=lost(record, location, self._why.get(location, ""))))
                self._tell_dependents(record)

    def _tell_dependents(self, lost_record: Record) -> None:
        """Push what the executor would have pushed: its subscriptions are lost with it."""
        assert lost_record.outcome is not None
        for record in self.records.values() if lost_record.edges_count else ():
            if record.outcome is None and record.executor and lost_record in record.needs:
                result = m.Result(lost_record.call.call_id, record.call.call_id, lost_record.outcome)
                self._send(record.executor, result)

    def _route_again(self, message: m.Bounced) -> None:
        record = self._unresolved(message.call_id)
        if record is None:
            return
        key = (record.call.session, record.call.agent)
        home = self._homes.get(key)
        if home is not None and home.location == message.location:
            del self._homes[key]
        self.router.count(record.executor, -1)
        record.executor = record.left = ""
        self._route(record, avoid=message.location)

    # --- values

    def _subscribe(self, message: m.Subscribe) -> None:
        self._push_or_owe(message.call_id, message.consumer, message.for_id)

    def _retarget(self, message: m.Retarget) -> None:
        """Answer for a producer that no longer has the call: the value may be on its way to the old place."""
        record = self.records.get(message.call_id)
        is_sent = record is None or record.outcome is not None
        self._push_or_owe(message.call_id, message.consumer if is_sent else message.to, message.for_id)
        self._send(message.consumer, m.Retargeted(message.call_id, message.for_id, is_sent))

    def _push_or_owe(self, call_id: int, location: str, for_id: int) -> None:
        record = self.records.get(call_id)
        if record is None:  # nobody of this node waits for it, so nobody waits for the asker either
            outcome = Outcome(error=LostError("internal: a value without a waiting call"))
        elif record.outcome is not None:
            outcome = record.outcome
        else:
            if record.owed is None:
                record.owed = []
            record.owed.append((location, for_id))
            return
        self._send(location, m.Result(call_id, for_id, outcome))

    # --- homes and instances

    def _take_home(self, home: m.Home) -> None:
        key = (home.session, home.agent)
        known = self._homes.get(key)
        if known is None or known.version < home.version:
            self._homes[key] = home
        if self._homes[key].location in self._gone:
            del self._homes[key]
        self._route_all(key)

    def _lose_home(self, message: m.HomeLost) -> None:
        """Fail the calls of a session whose state is lost."""
        for record in self._unrouted.pop((message.session, message.agent), ()):
            error = state_lost(record, message.location, self._why.get(message.location, ""))
            self._resolve(record, Outcome(error=error))

    def _join(self, message: m.Joined) -> None:
        if message.location in self._gone:
            return
        self.router.add(message.location)
        self._route_all(("", agent_of(message.location)))

    def _route_all(self, key: tuple[str, str]) -> None:
        for record in self._unrouted.pop(key, ()):
            if record.outcome is None:
                self._route(record)

    def _lose(self, message: m.Gone) -> None:
        """Fail what was at a location, or, if nothing was, resend what was on its way there."""
        location = message.location
        if location in self._gone:
            return
        self._gone[location] = message.is_clean
        if message.why:
            self._why[location] = message.why
        self.router.remove(location, is_gone=True)
        for key in [key for key, home in self._homes.items() if home.location == location]:
            del self._homes[key]
        for record in list(self.records.values()):
            if record.outcome is not None or location not in (record.executor, record.left):
                continue
            if not message.is_clean:
                self._fail_if_lost(record)
            elif not record.left:  # otherwise its sender takes it back
                record.executor = ""
                self._route(record)

    def _end_session(self, message: m.SessionEnded) -> None:
        session = message.session
        for key in [key for key in self._homes if key[0] == session]:
            del self._homes[key]
        for key in [key for key in self._unrouted if key[0] == session]:
            del self._unrouted[key]
        self.router.end_session(session)
        for record in [each for each in self.records.values() if each.call.session == session]:
            if record.outcome is None:
                text = f"session {session!r} ended"
                error = SessionEndedError(text, path=record.path, instance=record.executor)
                self._resolve(record, Outcome(error=error))
                self._tell_dependents(record)

    def _send(self, to: str, message: Any) -> None:
        self._out.append(m.Send(to, message))


def lost(record: Record, location: str, why: str = "") -> LostError:
    """Return the error of a call at a lost location; `why` is the known reason."""
    call = record.call
    text = f"{call.agent}.{call.method} of session {call.session!r} was at {location}, which is gone"
    return _lost_error(record, location, text, why)


def state_lost(record: Record, location: str, why: str = "") -> LostError:
    """Return the error of a call whose session's state was at a lost location."""
    call = record.call
    text = (
        f"{call.agent}.{call.method} did not run: the state of session {call.session!r} was at {location}, which is "
        "gone; end the session to begin anew"
    )
    return _lost_error(record, location, text, why)


def _lost_error(record: Record, location: str, text: str, why: str) -> LostError:
    chain = record.call.chain
    text += f"; called by {' > '.join(chain) or 'the driver'}"
    return LostError(text, path=(*chain, location), instance=location, remote_traceback=why)
