"""Which replica made an answer that its client may ask for again: a response of the Responses API, by its id."""

from __future__ import annotations

import re
from urllib.parse import unquote

_ID_IN_PATH = re.compile(r"^/v1/responses/(?P<answer_id>[^/?]+)")


class MadeAnswers:
    """Remember the last answers by their ids, the oldest forgotten first."""

    def __init__(self, limit_count: int) -> None:
        """Remember so many."""
        self._limit_count = limit_count
        self._replica_ids: dict[str, str] = {}

    def __len__(self) -> int:
        return len(self._replica_ids)

    def keep(self, answer_id: str, replica_id: str) -> None:
        """Remember who made an answer."""
        self._replica_ids.pop(answer_id, None)
        self._replica_ids[answer_id] = replica_id
        if len(self._replica_ids) > self._limit_count:
            del self._replica_ids[next(iter(self._replica_ids))]

    def maker(self, answer_id: str) -> str | None:
        """Return the replica that made an answer; None if that is not known."""
        return self._replica_ids.get(answer_id)

    def maker_of(self, path: str) -> str | None:
        """Return the replica that made the answer which a path names; None if it names none, or an unknown one."""
        match = _ID_IN_PATH.match(path)
        return self.maker(unquote(match["answer_id"])) if match is not None else None
