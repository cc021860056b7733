"""The queue of an instance: a heap of sessions, each with its calls in order.

Changing a session's priority costs O(log sessions), however many calls wait: a new entry replaces its entry in the
heap, and the old one is skipped when it comes up. Of equal sessions, the one whose next call was made first goes first.
"""

from __future__ import annotations

import heapq
from collections import deque
from collections.abc import Iterator

from thunderagent_workflows.core.call import Call


class SessionQueue:
    """Calls that wait at one instance.

    `is_ordered`: a call does not begin before an earlier one of its session from the same origin. Between origins there
    is no order: two could wait for each other's calls crosswise.
    """

    def __init__(self, *, is_ordered: bool = False) -> None:
        self._is_ordered = is_ordered
        self._lines: dict[str, deque[Call]] = {}
        self._waiting: dict[str, dict[int, Call]] = {}
        """By session, calls that lack a value, if the order does not matter."""
        self._heap: list[tuple[float, float, str]] = []
        self._entries: dict[str, tuple[float, float, str]] = {}
        self.priorities: dict[str, float] = {}
        self.calls_count = 0
        """Including those that lack a value."""

    def __len__(self) -> int:
        return self.calls_count

    def push(self, call: Call) -> None:
        """Add a call."""
        self.calls_count += 1
        if call.missing and not self._is_ordered:
            self._waiting.setdefault(call.session, {})[call.call_id] = call
            return
        self._append(call)

    def push_front(self, call: Call) -> None:
        """Add a call before all others of its session: it had already begun."""
        self.calls_count += 1
        self._lines.setdefault(call.session, deque()).appendleft(call)
        self._enter(call.session)

    def make_ready(self, call: Call) -> None:
        """Note that a call has all its values."""
        if self._is_ordered:
            self._enter(call.session)
            return
        waiting = self._waiting[call.session]
        del waiting[call.call_id]
        if not waiting:
            del self._waiting[call.session]
        self._append(call)

    def set_priorities(self, changes: dict[str, float]) -> None:
        """Set sessions' priorities; higher goes first, 0 is the default."""
        self.priorities.update(changes)
        for session in changes.keys() & self._entries.keys():
            self._enter(session)

    @property
    def top_priority(self) -> float | None:
        """Return the priority of the session that goes next; None if none can."""
        entry = self._top()
        return None if entry is None else -entry[0]

    def pop(self, limit_count: int = 1, *, mixes: bool = False) -> list[Call]:
        """Take the calls that run next: one, or up to `limit_count` of one method, of one session or of any."""
        entry = self._top()
        if entry is None:
            return []
        found = self._take_from(entry[2], "", limit_count)
        while mixes and len(found) < limit_count and (entry := self._top()) is not None:
            more = self._take_from(entry[2], found[0].method, limit_count - len(found))
            if not more:
                break
            found += more
        self.calls_count -= len(found)
        return found

    def take(self, session: str) -> list[Call]:
        """Take all calls of a session, in order, including those that lack a value."""
        found = list(self._lines.pop(session, ()))
        found += self._waiting.pop(session, {}).values()
        self._entries.pop(session, None)
        self.calls_count -= len(found)
        return found

    def remove(self, call: Call) -> None:
        """Remove one call."""
        self.calls_count -= 1
        waiting = self._waiting.get(call.session, {})
        if waiting.pop(call.call_id, None) is not None:
            if not waiting:
                del self._waiting[call.session]
            return
        line = self._lines[call.session]
        line.remove(call)
        if not line:
            del self._lines[call.session]
        self._enter(call.session)

    def sessions(self) -> list[str]:
        """Return the sessions with calls here, in order of arrival."""
        return list(dict.fromkeys((*self._lines, *self._waiting)))

    def calls_of(self, session: str) -> Iterator[Call]:
        """Return a session's calls in order, those that lack a value last."""
        yield from self._lines.get(session, ())
        yield from self._waiting.get(session, {}).values()

    def count_of(self, session: str) -> int:
        """Return how many calls of a session wait."""
        return len(self._lines.get(session, ())) + len(self._waiting.get(session, ()))

    def _append(self, call: Call) -> None:
        line = self._lines.get(call.session)
        if line is None:
            line = self._lines[call.session] = deque()
        line.append(call)
        if len(line) == 1 or self._is_ordered:
            self._enter(call.session)

    def _enter(self, session: str) -> None:
        """Put a session at its place in the heap, if its first call can run."""
        line = self._lines.get(session)
        index = self._next_of(line) if line else None
        if line is None or index is None:
            self._entries.pop(session, None)
            return
        entry = (-self.priorities.get(session, 0.0), line[index].created_s, session)
        if self._entries.get(session) != entry:
            self._entries[session] = entry
            heapq.heappush(self._heap, entry)

    def _top(self) -> tuple[float, float, str] | None:
        heap = self._heap
        while heap:
            entry = heap[0]
            if self._entries.get(entry[2]) == entry:
                return entry
            heapq.heappop(heap)
        return None

    def _next_of(self, line: deque[Call]) -> int | None:
        """Return a line's next call; None if none can go."""
        if not self._is_ordered:
            return 0
        waiting: set[str] = set()
        for index, call in enumerate(line):
            if call.missing:
                waiting.add(call.origin)
            elif call.origin not in waiting:
                return index
        return None

    def _take_from(self, session: str, method: str, limit_count: int) -> list[Call]:
        line = self._lines[session]
        found: list[Call] = []
        while line and len(found) < limit_count:
            index = self._next_of(line)
            if index is None or (method and line[index].method != method):
                break
            call = line[index]
            del line[index]
            method = call.method
            found.append(call)
        if not line:
            del self._lines[session]
        self._enter(session)
        return found
