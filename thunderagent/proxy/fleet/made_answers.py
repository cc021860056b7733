"""Which replica made an answer that its client may ask for again: a response of the Responses API, by its id."""

from __future__ import annotations

import re
from collections import deque
from urllib.parse import unquote

_ID_IN_PATH = re.compile(r"^/v1/responses/(?P<answer_id>[^/]+)")

PARTS_COUNT = 16


class MadeAnswers:
    """Remember the last answers by their ids, the oldest forgotten first.

    They are forgotten in parts, each of which is a dictionary that only grows; so at most a sixteenth more than must be
    is remembered. One dictionary out of which the oldest is deleted again and again keeps their empty places: it
    becomes twice as large, and passes over all of them to find the next, which with 100,000 ids took 75 us.
    """

    def __init__(self, limit_count: int) -> None:
        """Remember so many at least."""
        self._part_count = -(-limit_count // PARTS_COUNT)
        self._newest: dict[str, str] = {}
        self._older: deque[dict[str, str]] = deque(maxlen=PARTS_COUNT)
        """The newest first."""

    def __len__(self) -> int:
        return sum(map(len, self._older), len(self._newest))

    def keep(self, answer_id: str, replica_id: str) -> None:
        """Remember who made an answer."""
        if len(self._newest) >= self._part_count:
            self._older.appendleft(self._newest)
            self._newest = {}
        self._newest[answer_id] = replica_id

    def maker(self, answer_id: str) -> str | None:
        """Return the replica that made an answer; None if that is not known."""
        for part in (self._newest, *self._older):
            if answer_id in part:
                return part[answer_id]
        return None

    def maker_of(self, path: str) -> str | None:
        """Return the replica that made the answer which a path names; None if it names none, or an unknown one."""
        match = _ID_IN_PATH.match(path)
        return self.maker(unquote(match["answer_id"])) if match is not None else None
