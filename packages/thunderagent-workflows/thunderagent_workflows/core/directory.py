"""The directory: the instance that is the home of each session of a pinned agent.

A version has two parts: the incarnation, which counts how often any session was given a home without state, and the
moves since. So of two versions the higher is always the later one.

A home that is lost with its state is not replaced, because the session would go on as if it had never said anything.
Requests for it report the loss, until the session has ended.

A call may carry a home that its controller has not heard of. Mostly the state is on its way there; but it may have come
and gone, if the end of the session overtook the call. So the controller asks, and is told if that home is over.
"""

from __future__ import annotations

from typing import Any

from thunderagent_workflows.core import messages as m
from thunderagent_workflows.core.router import Router, agent_of

MOVES_BITS = 20


class Directory:
    """The homes of a deployment."""

    def __init__(self) -> None:
        self.homes: dict[tuple[str, str], m.Home] = {}
        self.router = Router()
        self._askers: dict[tuple[str, str], list[m.AskHome]] = {}
        """Requests that wait for an agent to have an instance."""
        self._arriving: dict[tuple[str, str], str] = {}
        """Homes that the state has not reached, and its sender."""
        self._expected: dict[tuple[str, str], dict[str, int]] = {}
        """By location, the version of a home that calls wait for there."""
        self._lost: dict[tuple[str, str], str] = {}
        """Homes whose state is lost, and its last location."""
        self._incarnations_count = 0
        self._gone: dict[str, bool] = {}
        """Locations that are gone, and whether nothing was lost with them."""
        self._out: list[Any] = []
        self._handlers: dict[type, Any] = {
            m.AskHome: self._answer,
            m.HomeMoved: self._move,
            m.HomeArrived: self._arrive,
            m.Expected: self._expect,
            m.Joined: self._join,
            m.Leaving: lambda message: self.router.remove(message.location, is_gone=False),
            m.Gone: self._lose,
            m.SessionEnded: self._end_session,
        }

    def handle(self, message: Any) -> list[Any]:
        """Process one message; return what to send."""
        self._out = []
        self._handlers[type(message)](message)
        return self._out

    def _answer(self, message: m.AskHome) -> None:
        key = (message.session, message.agent)
        if key in self._lost:
            self._out.append(m.Send(message.asker, m.HomeLost(*key, self._lost[key])))
            return
        home = self.homes.get(key)
        if home is None:
            known = self.router.instances.get(message.agent, ())
            location = message.hint if message.hint in known else self.router.pick(message.session, message.agent)
            if location:
                self.router.count(location, 1)
                home = self.homes[key] = self._fresh(message.session, message.agent, location)
        if home is None or home.location in self._gone:
            self._askers.setdefault(key, []).append(message)
        else:
            self._out.append(m.Send(message.asker, home))

    def _answer_all(self, key: tuple[str, str]) -> None:
        for asked in self._askers.pop(key, ()):
            self._answer(asked)

    def _fresh(self, session: str, agent: str, location: str) -> m.Home:
        self._incarnations_count += 1
        version = self._incarnations_count << MOVES_BITS
        return m.Home(session, agent, location, version, version)

    def _move(self, message: m.HomeMoved) -> None:
        key = (message.session, message.agent)
        if self._set(key, message.to, message.version):
            self._arriving[key] = message.sender
            if self._gone.get(message.sender) is False:
                self._lose_on_the_way(key)
            elif self._gone.get(message.to) is False:
                self._forget(key, lost_at=message.to)
            self._answer_all(key)

    def _arrive(self, message: m.HomeArrived) -> None:
        key = (message.session, message.agent)
        if key not in self.homes:
            self._out.append(m.Send(message.location, m.SessionEnded(message.session)))
        elif self._set(key, message.location, message.version) or self.homes[key].version == message.version:
            self._arriving.pop(key, None)
            self._expected.get(key, {}).pop(message.location, None)
            if self._gone.get(message.location) is False:  # it reported that before it was lost
                self._forget(key, lost_at=message.location)
            self._answer_all(key)

    def _expect(self, message: m.Expected) -> None:
        key, home = (message.session, message.agent), self.homes.get((message.session, message.agent))
        if home is None or home.born_version > message.version:
            self._out.append(m.Send(message.location, m.HomeOver(message.session, message.version)))
        else:
            self._expected.setdefault(key, {})[message.location] = message.version

    def _tell_over(self, key: tuple[str, str]) -> None:
        for location, version in self._expected.pop(key, {}).items():
            self._out.append(m.Send(location, m.HomeOver(key[0], version)))

    def _set(self, key: tuple[str, str], location: str, version: int) -> bool:
        """Set a later version of a home; return whether it is later."""
        home = self.homes.get(key)
        if home is None or home.version >= version:
            return False
        self.homes[key] = m.Home(*key, location, version, home.born_version)
        return True

    def _join(self, message: m.Joined) -> None:
        if message.location in self._gone:
            return
        self.router.add(message.location)
        agent = agent_of(message.location)
        for key in [key for key in self._askers if key[1] == agent]:
            self._answer_all(key)

    def _lose(self, message: m.Gone) -> None:
        location = message.location
        self._gone[location] = message.is_clean
        self.router.remove(location, is_gone=True)
        for key in [key for key, home in self.homes.items() if home.location == location]:
            sender = self._arriving.get(key, "")
            if not message.is_clean or self._gone.get(sender) is False:
                self._forget(key, lost_at=location)
            elif not sender or sender in self._gone:  # otherwise its sender takes it back
                self._forget(key)
        if not message.is_clean:
            for key in [key for key, sender in self._arriving.items() if sender == location]:
                self._lose_on_the_way(key)

    def _lose_on_the_way(self, key: tuple[str, str]) -> None:
        """Continue a home without its state, if that was lost on its way there."""
        home = self.homes[key]
        if home.location in self._gone:
            self._forget(key, lost_at=home.location)
        else:
            self._out.append(m.Send(home.location, m.Adopt(home.session, home.version)))

    def _forget(self, key: tuple[str, str], *, lost_at: str = "") -> None:
        del self.homes[key]
        if lost_at:
            self._lost[key] = lost_at
        self._arriving.pop(key, None)
        self._tell_over(key)
        self._answer_all(key)

    def _end_session(self, message: m.SessionEnded) -> None:
        for key in [key for key in self.homes if key[0] == message.session]:
            del self.homes[key]
            self._arriving.pop(key, None)
            self._tell_over(key)
        for table in (self._lost, self._askers):
            for key in [key for key in table if key[0] == message.session]:
                del table[key]
