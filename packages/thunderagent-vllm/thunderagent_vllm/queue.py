"""The queue of waiting requests, with the methods of vLLM's `RequestQueue`, ordered by a key. Pure.

It is sorted at most once per iteration, never between a `peek` and its `pop`: what vLLM looked at is what it takes.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator
from typing import Any

RESORT_S = 0.25
"""Keys change with time, as waiting requests are promoted: the order may be as old as this."""


class ProgramQueue:
    """Waiting requests, those with the least key first."""

    def __init__(self, key: Callable[[Any, float], Any]) -> None:
        self.key = key
        self.before_peek: Callable[[], None] | None = None
        """Is called once, before the next `peek`: it may sort."""
        self._requests: deque[Any] = deque()
        self._is_sorted = True
        self._sorted_s = 0.0

    def sort(self, now_s: float) -> None:
        """Put the requests in order, if anything may have changed it."""
        if len(self._requests) > 1 and (not self._is_sorted or not 0 <= now_s - self._sorted_s < RESORT_S):
            self._requests = deque(sorted(self._requests, key=lambda each: self.key(each, now_s)))
            self._sorted_s = now_s
        self._is_sorted = True

    def changed(self) -> None:
        """Have it sorted at the next iteration."""
        self._is_sorted = False

    def head(self) -> Any | None:
        """Return the first request, or None."""
        return self._requests[0] if self._requests else None

    def add_request(self, request: Any) -> None:
        """Add a request, which finds its place at the next iteration."""
        self._requests.append(request)
        self._is_sorted = False

    def pop_request(self) -> Any:
        """Take the first request."""
        if not self._requests:
            raise IndexError("pop from an empty queue")
        return self._requests.popleft()

    def peek_request(self) -> Any:
        """Return the first request."""
        before_peek = self.before_peek
        if before_peek is not None:
            self.before_peek = None
            before_peek()
        if not self._requests:
            raise IndexError("peek from an empty queue")
        return self._requests[0]

    def prepend_request(self, request: Any) -> None:
        """Add a request at the front, until the next iteration."""
        self._requests.appendleft(request)
        self._is_sorted = False

    def prepend_requests(self, requests: Iterable[Any]) -> None:
        """Add requests at the front, the last one first, until the next iteration."""
        self._requests.extendleft(requests)
        self._is_sorted = False

    def remove_request(self, request: Any) -> None:
        """Take out a request. Raises ValueError if it is not here."""
        self._requests.remove(request)

    def remove_requests(self, requests: Iterable[Any]) -> None:
        """Take out those of the requests that are here."""
        leaving = set(requests)
        self._requests = deque(each for each in self._requests if each not in leaving)

    def __bool__(self) -> bool:
        return bool(self._requests)

    def __len__(self) -> int:
        return len(self._requests)

    def __iter__(self) -> Iterator[Any]:
        return iter(self._requests)
