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

**Observed patience.** If two attempts in a row were given up before an answer began, after nearly the same time, a
timer did that. The next attempt counts on it, whatever its client says: it is let in before (`rules/patience.py`).
People and programs that end for other reasons leave at different times. A client gains nothing that it could not say
by a header.
"""

# compiled: each turn passes here

from __future__ import annotations

import asyncio
from collections import Counter, OrderedDict
from hashlib import blake2b
from typing import Final, NamedTuple

from thunderagent.proxy.reading.identity import TurnRequest
from thunderagent.proxy.turns.patience import Patience

REMEMBER_S: Final = 120.0
"""How long an attempt that ended without an answer is remembered: clients usually wait seconds between tries."""

REMEMBER_COUNT: Final = 10_000
HASHED_BYTES: Final = 2**20
TOLD_BYTES: Final = 2**12
"""The end of a body by which another gateway knows it, together with its size, its client's key and tenant."""


LEAST_OBSERVED_S: Final = 5.0
"""Clients that leave sooner do so for other reasons than their timers."""

ALIKE_S: Final = 1.0
ALIKE_RATIO: Final = 0.02
"""How far two times may differ that the same timer took: this, or this part of them if that is more. Node's timers are
early or late by a second."""


class Ended(NamedTuple):
    """An attempt that ended without an answer: `since_s` is the arrival of the first at its turn.

    `waited_s` is how long its client waited before it gave up, 0 if it did not. `observed_s` is its patience, if known.
    """

    since_s: float
    ended_s: float
    turn_id: int
    waited_s: float
    observed_s: float | None


class Attempt:
    """One attempt at a turn, while it is here."""

    __slots__ = (
        "aborted_for",
        "arrived_s",
        "is_sample",
        "key",
        "observed_s",
        "path",
        "patience",
        "since_s",
        "superseded",
        "supersedes_id",
        "task",
        "turn",
        "turn_id",
        "waited_before_s",
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
        self.since_s = self.arrived_s = since_s
        self.waited_before_s = 0.0
        """How long the client waited for the attempt before, if it gave that up."""
        self.observed_s: float | None = None
        """After how long it gives up, as seen twice."""
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
        self._ended: OrderedDict[Place, Ended] = OrderedDict()
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
        if ended is not None and now_s - ended.ended_s <= REMEMBER_S:
            attempt.since_s, attempt.supersedes_id = ended.since_s, ended.turn_id
            attempt.waited_before_s, attempt.observed_s = ended.waited_s, ended.observed_s

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

    def end(self, attempt: Attempt, now_s: float, *, answered: bool, gave_up: bool = False) -> None:
        """Remove an attempt; one without an answer may come again. `gave_up`: its client left before one began."""
        key = attempt.key
        if key is None:
            return
        live = self._live[key]
        if len(live) == 1:
            del self._live[key]
        else:
            live.remove(attempt)
        if not answered and not attempt.superseded:
            waited_s = now_s - attempt.arrived_s if gave_up else 0.0
            self._remember(_place_of(attempt), attempt, now_s, waited_s)

    def _remember(self, place: Place, attempt: Attempt, now_s: float, waited_s: float) -> None:
        if place not in self._ended:
            self._ended_of[place[0]] += 1
        observed_s = _patience_of(attempt.waited_before_s, waited_s)
        self._ended[place] = Ended(attempt.since_s, now_s, attempt.turn_id, waited_s, observed_s)
        self._ended.move_to_end(place)
        while len(self._ended) > REMEMBER_COUNT or now_s - next(iter(self._ended.values())).ended_s > REMEMBER_S:
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


def _patience_of(before_s: float, waited_s: float) -> float | None:
    """Return the patience of a client that gave up after these times, one after the other; None if no timer did it."""
    if min(before_s, waited_s) < LEAST_OBSERVED_S or abs(before_s - waited_s) > max(ALIKE_S, ALIKE_RATIO * waited_s):
        return None
    return min(before_s, waited_s)


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
