"""A deployment's knowledge of its sessions' next turns, sent to the proxy as hints.

Theory of operation
===================
When code of a session begins to wait, its next turn comes from an unfinished call. If a call makes turns, it comes when
the earlier calls in its instance's queue have run and it has reached its first turn; if none makes any, when the last
of them ends. How long each method runs, and until its first turn, is learned as means. If a call that makes turns
already runs, there is a turn now, and no hint is sent. Each estimate is compared with the turn that comes, per method,
and the ratio of right ones is the hint's confidence.

A call's branch ends with it, unless its agent is pinned to the session, whose context goes on: then its memory is free
for others, and the proxy is told so.

Each node reports what it knows of the calls that its own code made. It does not see the queue of an instance on another
node, so it uses how long earlier calls of the method waited, and hears of their turns when they are over.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any
from urllib.parse import quote

import httpx2

from thunderagent.client.exchange import KEY_VARIABLE
from thunderagent_workflows.errors import LostError
from thunderagent_workflows.scope import NODE_BITS

if TYPE_CHECKING:
    from thunderagent_workflows.core.call import Call
    from thunderagent_workflows.future import Handle
    from thunderagent_workflows.node import Node
    from thunderagent_workflows.scope import Scope

log = logging.getLogger("thunderagent_workflows")

Say = Callable[[str, dict[str, Any]], None]
"""Sends a session's hint in the format of `POST /programs/{id}/hints`; never blocks or raises."""

LEAST_CONFIDENCE_RATIO = 0.5
"""The proxy ignores hints that are less sure, so they are not sent."""

FORGETTING_RATIO = 0.9
"""Weight of a call in a mean relative to the next one."""

KEPT_TELLINGS_COUNT = 1000
"""Limit of queued hints; beyond it, the oldest is dropped."""

TIMEOUT_S = 5.0

CALL_NUMBER_MASK = (1 << NODE_BITS) - 1
"""The part of a call's id that its node counts."""


@dataclass(slots=True)
class MethodTimes:
    """Learned times of a method."""

    count: float = 0.0
    run_s: float = 0.0
    turns_ratio: float = 0.0
    """Part of its calls that make turns."""
    lead_s: float = 0.0
    """From its start to its first turn."""
    wait_s: float = 0.0
    """From its creation to its start, including transport both ways."""
    right_ratio: float = 0.5
    """Part of the estimates for it that were right."""

    def ran(self, run_s: float, wait_s: float, lead_s: float | None) -> None:
        """Add a call."""
        self.count = self.count * FORGETTING_RATIO + 1.0
        self.run_s += (run_s - self.run_s) / self.count
        self.wait_s += (wait_s - self.wait_s) / self.count
        self.turns_ratio += ((lead_s is not None) - self.turns_ratio) / self.count
        if lead_s is not None:
            self.lead_s += (1.0 - FORGETTING_RATIO if self.lead_s else 1.0) * (lead_s - self.lead_s)


@dataclass(slots=True)
class _Expected:
    """A session's next turn, as estimated."""

    by: MethodTimes
    from_s: float
    in_s: float


class Hints:
    """Estimates when the next turns of a node's sessions come. Only `waits` and `turn_begins` are for any thread."""

    def __init__(self, node: Node, say: Say) -> None:
        """Start without knowledge of any method."""
        self._node = node
        self._say = say
        self._times: dict[tuple[str, str], MethodTimes] = {}
        self._open: dict[str, dict[int, Handle]] = {}
        """By session, its unfinished calls."""
        self._leads_s: dict[str, dict[int, float]] = {}
        """By session, calls here that have made a turn, and the time to it."""
        self._expected: dict[str, _Expected] = {}
        """By session, the first estimate since its last turn."""

    def made(self, handle: Handle) -> None:
        """Note a new call."""
        self._open.setdefault(handle.call.session, {})[handle.call.call_id] = handle

    def waits(self, scope: Scope) -> None:
        """Report when the next turn comes of a session whose code begins to wait; from any thread."""
        session = scope.session.name
        if not scope.session.uses_proxy or scope.is_mixed:
            return
        self._node.enter(lambda: self._estimate(session))

    def turn_begins(self, scope: Scope) -> None:
        """Note that code of a session makes a turn; from any thread."""
        self._node.enter(lambda: self._learn(scope))

    def _learn(self, scope: Scope) -> None:
        """Learn how long the session's turn took to come, and a call's time to its first."""
        session, now_s = scope.session.name, self._node.clock()
        self._turn_came(session, now_s)
        call, instance = scope.call, self._node.instances.get(scope.location)
        if call is not None and instance is not None:
            self._leads_s.setdefault(session, {}).setdefault(call.call_id, now_s - instance.running_since_s)

    def _turn_came(self, session: str, at_s: float) -> None:
        """Compare the estimates made before then with the turn."""
        expected = self._expected.get(session)
        if expected is None or at_s < expected.from_s:
            return
        del self._expected[session]
        came_s = at_s - expected.from_s
        is_right = expected.in_s / 2 <= came_s <= 2 * expected.in_s or abs(came_s - expected.in_s) <= 1.0
        expected.by.right_ratio += (1.0 - FORGETTING_RATIO) * (is_right - expected.by.right_ratio)

    def through(self, call: Call) -> float | None:
        """Return after how long a finished call here made its first turn, if it did: its branch has ended."""
        lead_s = self._leads_s.get(call.session, {}).pop(call.call_id, None)
        if lead_s is not None:
            self._say_ended(call)
        return lead_s

    def _say_ended(self, call: Call) -> None:
        if not self._node.agents[call.agent].directives.rules.is_pinned:
            self._say(call.session, {"keep": "drop", "branch": branch_name(call.agent, call.call_id)})

    def settled(self, handle: Handle) -> None:
        """Learn from a finished call of this node."""
        call, outcome, now_s = handle.call, handle.outcome, self._node.clock()
        assert outcome is not None
        self._open.get(call.session, {}).pop(call.call_id, None)
        times = self._of(call.agent, call.method)
        if isinstance(outcome.error, LostError) and times.turns_ratio > 0.0:
            self._say_ended(call)  # nobody else can
        if outcome.error is not None:
            return
        run_s = outcome.ended_s - outcome.began_s
        times.ran(run_s, max(0.0, now_s - call.created_s - run_s), outcome.lead_s)
        if outcome.lead_s is not None and handle.executor not in self._node.instances:
            self._turn_came(call.session, now_s - run_s + outcome.lead_s)

    def session_ended(self, session: str) -> None:
        """Forget a session."""
        for table in (self._open, self._expected, self._leads_s):
            table.pop(session, None)

    # --- estimates

    def _of(self, agent: str, method: str) -> MethodTimes:
        return self._times.setdefault((agent, method), MethodTimes())

    def _estimate(self, session: str) -> None:
        if session in self._expected:  # said already
            return
        found = self._next_turn(session)
        if found is None:
            return
        in_s, by = found
        self._expected[session] = _Expected(by, self._node.clock(), in_s)
        if by.right_ratio >= LEAST_CONFIDENCE_RATIO:
            self._say(session, {"next_turn_in_s": round(in_s, 3), "confidence": round(by.right_ratio, 3)})

    def _next_turn(self, session: str) -> tuple[float, MethodTimes] | None:
        """Return the time until a session's next turn, and the method it is based on; None if unknown."""
        first: tuple[float, MethodTimes] | None = None
        last: tuple[float, MethodTimes] | None = None
        for handle in list(self._open.get(session, {}).values()):
            call = handle.call
            if handle.outcome is not None or any(need.outcome is None for need in handle.needs):
                continue  # another one comes before it
            times = self._of(call.agent, call.method)
            if not handle.executor or not times.count:
                return None
            makes_turns = times.turns_ratio > 0.5
            if makes_turns and call.call_id in self._node.waiting:
                continue  # what it waits for comes before it
            in_s = self._comes_in_s(handle, times, makes_turns=makes_turns)
            if in_s is None:
                return None
            if makes_turns:
                first = min(first or (in_s, times), (in_s, times), key=_in_s)
            else:
                last = max(last or (in_s, times), (in_s, times), key=_in_s)
        return first or last

    def _comes_in_s(self, handle: Handle, times: MethodTimes, *, makes_turns: bool) -> float | None:
        """Return the time until a call's first turn, or its end if it makes none; None if it already has a turn."""
        call, now_s = handle.call, self._node.clock()
        controller = self._node.controllers.get(handle.executor)
        if controller is None:
            left_s = call.created_s + times.wait_s + (times.lead_s if makes_turns else times.run_s) - now_s
            return None if makes_turns and left_s < 0.0 else max(0.0, left_s)
        elapsed_s = now_s - self._node.instances[handle.executor].running_since_s if controller.running else 0.0
        left_s = max(0.0, times.run_s - elapsed_s)
        if call.call_id in controller.running:
            return None if makes_turns else left_s
        ahead_s = left_s + times.run_s * max(0, len(controller.queue) - 1)
        return ahead_s + (times.lead_s if makes_turns else times.run_s)


def _in_s(found: tuple[float, MethodTimes]) -> float:
    return found[0]


def branch_name(agent: str, call_id: int) -> str:
    """Return the branch of a call's turns where its agent is not pinned."""
    node_number, number = call_id >> NODE_BITS, call_id & CALL_NUMBER_MASK
    return f"{agent}/{node_number}.{number}" if node_number else f"{agent}/{number}"


class Teller:
    """Sends hints to the proxy, in order, in the background; failures are logged once."""

    def __init__(self, proxy: str) -> None:
        """Do nothing yet."""
        self._proxy = proxy.rstrip("/")
        self._waiting: asyncio.Queue[tuple[str, dict[str, Any]]] = asyncio.Queue()
        self._task: asyncio.Task[None] | None = None
        self._has_warned = False

    def start(self) -> None:
        """Begin, on the running loop."""
        self._task = asyncio.create_task(self._tell_all())

    async def stop(self) -> None:
        """End; unsent hints are useless by then."""
        if self._task is not None:
            self._task.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await self._task

    def say(self, session: str, said: dict[str, Any]) -> None:
        """Queue a hint."""
        self._waiting.put_nowait((session, said))
        if self._waiting.qsize() > KEPT_TELLINGS_COUNT:
            self._waiting.get_nowait()

    async def _tell_all(self) -> None:
        key = os.environ.get(KEY_VARIABLE)
        headers = {"X-ThunderAgent-Key": key} if key else {}
        async with httpx2.AsyncClient(base_url=self._proxy, headers=headers, timeout=TIMEOUT_S) as client:
            while True:
                session, said = await self._waiting.get()
                try:
                    answer = await client.post(f"/programs/{quote(session, safe='')}/hints", json=said)
                    answer.raise_for_status()
                except httpx2.HTTPError as error:
                    if not self._has_warned:
                        log.warning("the proxy accepts no hints; they are sent anyway: %s", error)
                    self._has_warned = True
