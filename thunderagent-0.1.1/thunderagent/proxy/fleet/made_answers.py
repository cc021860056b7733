"""Which replica made an answer that its client may request again: a response of the Responses API, by its id.

Engines keep answers of all tenants in one space of ids. So it is remembered, too, whose an answer is: a data key whose
programs are its tenant's alone neither reads nor continues another tenant's, as long as that is known.
"""

from __future__ import annotations

import re
from collections import deque
from hashlib import blake2b
from urllib.parse import unquote

from thunderagent.errors import OtherTenantError

_ID_IN_PATH = re.compile(r"^/v1/responses/(?P<answer_id>[^/]+)")

PARTS_COUNT = 16

MAX_ID_CHARS = 128
"""Of a longer id only a digest is kept: an engine decides how long its ids are."""


class MadeAnswers:
    """Remembers the last answers by their ids, and forgets the oldest first.

    They are forgotten in parts, each a dictionary that only grows; so at most a sixteenth too many is remembered. A
    single dictionary whose oldest entry is deleted again and again keeps the empty places: it becomes twice as large,
    and skips all of them to find the next, which took 75 us with 100,000 ids.
    """

    def __init__(self, limit_count: int) -> None:
        """Remember at least `limit_count` answers."""
        self._part_count = -(-limit_count // PARTS_COUNT)
        self._newest: dict[str, tuple[str, str]] = {}
        """Replica and tenant by id."""
        self._older: deque[dict[str, tuple[str, str]]] = deque(maxlen=PARTS_COUNT)
        """The newest part first."""

    def __len__(self) -> int:
        return sum(map(len, self._older), len(self._newest))

    def keep(self, answer_id: str, replica_id: str, tenant: str = "") -> None:
        """Remember who made an answer, and for whom; one of a known id stays its tenant's: clients may choose ids."""
        known = self._known(answer_id := _kept(answer_id))
        if known is not None and known[1] != tenant:
            return
        if len(self._newest) >= self._part_count:
            self._older.appendleft(self._newest)
            self._newest = {}
        self._newest[answer_id] = replica_id, tenant

    def maker(self, answer_id: str, own: str | None = None) -> str | None:
        """Return the replica that made an answer; None if unknown.

        Raises `OtherTenantError` if it is not of the tenant `own`; None may have all.
        """
        known = self._known(_kept(answer_id))
        if known is None:
            return None
        if own not in (None, known[1]):
            raise OtherTenantError("this answer belongs to another tenant")
        return known[0]

    def _known(self, kept_id: str) -> tuple[str, str] | None:
        for part in (self._newest, *self._older):
            if kept_id in part:
                return part[kept_id]
        return None

    def maker_of(self, path: str, own: str | None = None) -> str | None:
        """Return the replica that made the answer in a path; None if the path names none, or an unknown one.

        Raises as `maker` does.
        """
        match = _ID_IN_PATH.match(path)
        return self.maker(unquote(match["answer_id"]), own) if match is not None else None


def _kept(answer_id: str) -> str:
    """Return what is kept of an id: itself, or of a long one its digest, which no id of ours begins like."""
    if len(answer_id) <= MAX_ID_CHARS:
        return answer_id
    return "\0" + blake2b(answer_id.encode(errors="surrogatepass"), digest_size=16).hexdigest()
