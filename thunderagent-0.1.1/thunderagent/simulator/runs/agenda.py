"""Virtual time: what happens when. Time jumps from one entry to the next; nothing waits."""

from __future__ import annotations

from collections.abc import Callable
from heapq import heappop, heappush
from math import inf

Action = Callable[[], None]


class Agenda:
    """A heap of (time, order of entry): entries due at the same time run in order of entry.

    So the same entries always run in the same order. An entry costs O(log entries).
    """

    __slots__ = ("_entries", "_entry_count", "now_s")

    def __init__(self) -> None:
        self._entries: list[tuple[float, int, Action]] = []
        self._entry_count = 0
        self.now_s = 0.0
        """Seconds since the begin of the run."""

    def __len__(self) -> int:
        return len(self._entries)

    def at(self, due_s: float, action: Action) -> None:
        """Call `action` when it is `due_s`; an overdue entry runs after everything else that is due now."""
        self._entry_count += 1
        heappush(self._entries, (max(due_s, self.now_s), self._entry_count, action))

    def after(self, delay_s: float, action: Action) -> None:
        """Call `action` in `delay_s` seconds."""
        self._entry_count += 1
        due_s = self.now_s + delay_s if delay_s > 0.0 else self.now_s
        heappush(self._entries, (due_s, self._entry_count, action))

    @property
    def next_s(self) -> float:
        """When the next entry is due; `inf` if there is none."""
        return self._entries[0][0] if self._entries else inf

    def advance(self, until_s: float = inf) -> bool:
        """Go to the next entry and do it; return False, doing nothing, if none is due until then."""
        entries = self._entries
        if not entries or entries[0][0] > until_s:
            return False
        self.now_s, _, action = heappop(entries)
        action()
        return True
