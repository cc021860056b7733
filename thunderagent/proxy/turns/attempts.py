"""When a client retries a turn, the new attempt replaces the old one: one turn, not two.

Theory of operation
===================
A client that gives up closes its connection, and its turn ends. But an intermediary may keep that connection open, and
then the old attempt would hold its place, or generate, for nobody. And a client that returns after it gave up should
not go to the end of the queue.

What makes an attempt the same turn? The same program, branch, path and body are not enough: n samples of one prompt are
the same too, sent together on purpose, and must not end each other. So the client must say so:

- the same `Idempotency-Key` as the old attempt; or
- a retry count of 1 or more (`x-stainless-retry-count`), where the old attempt has a smaller one and was never beside
  another of the same body: those are samples, and it is unknown which of them is retried. Attempts with different keys
  are two turns, whatever the count.

If the old attempt already ended without an answer, only its age is left, and goes to the next turn of the same body,
whether or not its client says that it is a retry: transports that give up by themselves do not.
Anonymous turns need both, key and count.

Bodies are compared, not hashed: only those of one program's current turns, and only if their sizes are the same. Only
for an ended attempt is a hash kept, of its last mebibyte: the turns of a program differ there, and only an age is at
stake.
"""

# compiled: each turn passes here

from __future__ import annotations

import asyncio
from collections import Counter, OrderedDict
from hashlib import blake2b
from typing import Final

from thunderagent.proxy.reading.identity import TurnRequest
from thunderagent.proxy.turns.patience import Patience

REMEMBER_S: Final = 120.0
"""How long an attempt that ended without an answer is remembered: clients usually wait seconds between tries."""

REMEMBER_COUNT: Final = 10_000
HASHED_BYTES: Final = 2**20
TOLD_BYTES: Final = 2**12
"""The end of a body by which another gateway knows it, together with its size, its client's key and tenant."""


class Attempt:
    """One attempt at a turn, while it is here."""

    __slots__ = (
        "aborted_for",
        "is_sample",
        "key",
        "path",
        "patience",
        "since_s",
        "superseded",
        "supersedes_id",
        "task",
        "turn",
        "turn_id",
    )

    def __init__(
        self,
        turn: TurnRequest,
        path: str,
        patience: Patience,
        since_s: float,
        task: asyncio.Task[object] | None,
        turn_id: int,
    ) -> None:
        """Begin one; the first attempt at this turn arrived at `since_s`."""
        self.turn = turn
        self.path = path
        self.patience = patience
        self.since_s = since_s
        self.task = task
        self.turn_id = turn_id
        self.supersedes_id: int | None = None
        self.is_sample = False
        """Whether another of the same body ran beside it."""
        self.superseded = False
        self.aborted_for = ""
        """The code of the error that it ends with, if its program was ended and it was to end, too."""
        self.key: str | None = None
        """What attempts at one turn certainly share; None for an anonymous one without it."""

    def is_same(self, other: Attempt) -> bool:
        """Return whether two attempts of one program ask for the same."""
        return (
            self.path == other.path
            and self.turn.branch_id == other.turn.branch_id
            and len(self.turn.body) == len(other.turn.body)
            and self.turn.body == other.turn.body
        )


Place = tuple[str, str, str, int, int]


class Attempts:
    """The current attempts, by program, and the ages of those that ended without an answer."""

    def __init__(self) -> None:
        """Start without attempts."""
        self._live: dict[str, list[Attempt]] = {}
        self._ended: OrderedDict[Place, tuple[float, float, int]] = OrderedDict()
        self._ended_of: Counter[str] = Counter()
        """How many of them each key has: the body of a turn is hashed only where one may have come before."""

    def __len__(self) -> int:
        return sum(map(len, self._live.values()))

    def begin(self, attempt: Attempt, now_s: float) -> None:
        """Add an attempt; it replaces the one before, which is cancelled, or at least takes over its age."""
        key = attempt.key = _key_of(attempt)
        if key is None:
            return
        live = self._live.get(key)
        if live is None:
            self._live[key] = [attempt]
            if key in self._ended_of:
                self._goes_on(attempt, now_s)
            return
        others = [other for other in live if not other.superseded and other.is_same(attempt)]
        earlier = _earlier_of(attempt, others)
        if earlier is not None:
            others.remove(earlier)
            attempt.since_s = earlier.since_s
            attempt.is_sample = earlier.is_sample
            attempt.supersedes_id = earlier.turn_id
            earlier.superseded = True
            if earlier.task is not None:
                earlier.task.cancel()
        elif key in self._ended_of:
            self._goes_on(attempt, now_s)
        for each in (attempt, *others) if others else ():
            each.is_sample = True
        live.append(attempt)

    def _goes_on(self, attempt: Attempt, now_s: float) -> None:
        """Give an attempt the age of the one before, if that recently ended without an answer."""
        ended = self._ended.pop(_place_of(attempt), None)
        if ended is not None:
            self._one_less(attempt.key or "")
        if ended is not None and now_s - ended[1] <= REMEMBER_S:
            attempt.since_s, _, attempt.supersedes_id = ended

    def revoke(self, program_id: str, turn_id: int | None, code: str = "") -> int:
        """Cancel an attempt, because the next one at the same turn came to another gateway; return how many.

        With a `code` it ends with that error, because its program does; without a `turn_id` all of its attempts do.
        """
        revoked_count = 0
        for attempt in self._live.get(program_id, ()):
            if turn_id in (None, attempt.turn_id) and not attempt.superseded:
                attempt.superseded, attempt.aborted_for = True, code
                if attempt.task is not None:
                    attempt.task.cancel()
                revoked_count += 1
        return revoked_count

    def end(self, attempt: Attempt, now_s: float, *, answered: bool) -> None:
        """Remove an attempt; one without an answer may come again."""
        key = attempt.key
        if key is None:
            return
        live = self._live[key]
        if len(live) == 1:
            del self._live[key]
        else:
            live.remove(attempt)
        if not answered and not attempt.superseded:
            self._remember(_place_of(attempt), attempt, now_s)

    def _remember(self, place: Place, attempt: Attempt, now_s: float) -> None:
        if place not in self._ended:
            self._ended_of[place[0]] += 1
        self._ended[place] = attempt.since_s, now_s, attempt.turn_id
        self._ended.move_to_end(place)
        while len(self._ended) > REMEMBER_COUNT or now_s - next(iter(self._ended.values()))[1] > REMEMBER_S:
            self._one_less(self._ended.popitem(last=False)[0][0])

    def _one_less(self, key: str) -> None:
        self._ended_of[key] -= 1
        if not self._ended_of[key]:
            del self._ended_of[key]


def told_key(attempt: Attempt) -> str:
    """Return the key by which other gateways know all attempts at a program's turn; empty if its client gave none."""
    turn, key = attempt.turn, attempt.patience.idempotency_key
    if not key or turn.program_id is None:
        return ""
    words = "\0".join((turn.tenant, turn.program_id, turn.branch_id, attempt.path, str(len(turn.body)), key))
    what = words.encode(errors="surrogateescape")  # a header may hold any bytes
    return blake2b(turn.body[-TOLD_BYTES:], key=blake2b(what).digest(), digest_size=16).hexdigest()


def _key_of(attempt: Attempt) -> str | None:
    program_id = attempt.turn.program_id
    if program_id is not None:
        return program_id
    key = attempt.patience.idempotency_key
    return f"\0{attempt.turn.tenant}\0{key}" if key else None  # no program's id begins so


def _earlier_of(attempt: Attempt, others: list[Attempt]) -> Attempt | None:
    """Return the attempt, among those that ask for the same, that this one replaces."""
    key, count = attempt.patience.idempotency_key, attempt.patience.retry_count
    if key:
        same_key = [other for other in others if other.patience.idempotency_key == key]
        return same_key[0] if same_key and (count or attempt.turn.program_id is not None) else None
    earlier = others[0] if len(others) == 1 else None
    if earlier is None or earlier.is_sample or earlier.patience.idempotency_key:
        return None
    return earlier if earlier.patience.retry_count < count else None


def _place_of(attempt: Attempt) -> Place:
    body = attempt.turn.body
    return attempt.key or "", attempt.turn.branch_id, attempt.path, len(body), hash(body[-HASHED_BYTES:])
