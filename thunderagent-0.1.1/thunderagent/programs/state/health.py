"""The verdict on a replica: one word for how its engine does, with the reason, and since when.

Theory of operation
===================
Nobody but the proxy sees all polls, all turns and all counters of an engine. From these it draws *causes*, each of
which holds or does not. The verdict is the gravest cause that holds; without any it is `up`. So a replica that drains
and fails is `failing`, and `draining` again once it answers.

    State          Evidence that sets it                                    Evidence that ends it
    down           a poll is refused, or `--down-after-failures` fail, or   a poll is good
                   another process answers than before
    silent         three polls in a row have no answer, and no turn has a   a poll is good
                   byte meanwhile
    frozen         polls are answered, but counters and turns have stood    a check is answered, the counters move,
                   still for most of `--frozen-limit-s`, and a check        or it went down and came up again
                   turn, sent meanwhile, has no answer (`Stillness`)
    failing        `--breaker-failure-count` turns in a row, or 40 % of     the good end of a probe turn; it is tried
                   4 x as many, were closed, unreadable, answered 5xx, or   after a backoff that doubles
                   had an error inside a 200
    collapsed      the cache kept under a tenth of what it was given, for   the probe period: after a backoff that
                   20 turns, though all fitted and it kept more before      doubles it gets programs again;
                   (`Keeping`)                                              or it restarts
    draining       an operator, a source or a policy takes it away          it is taken back, or removed
    suspended      it is paused, sleeps, or gets new weights                whoever caused it ends it
    backpressure   it answered 429 or 503: it is full (`Pressure`)          after `Retry-After`, or a backoff that
                                                                            doubles up to 30 s

What each does to turns:

    State          New programs   Turns at home                    Turns in flight
    down, silent,  elsewhere      their programs are paused, and   retried elsewhere before the first byte; after it the
    frozen                        go elsewhere                     stream ends with an error event (of a replica that is
                                                                   only `down` as far as their connections break; of one
                                                                   that is `silent` once a stream stands still, too, or
                                                                   after `--poll-silence-limit-s`)
    failing,       elsewhere      their programs leave             finish
    collapsed,
    draining
    suspended      elsewhere      wait, or go elsewhere            go on
    backpressure   elsewhere      wait, or go elsewhere            go on; the refused turn waits, too

The last open replica of a pool is never taken away for `failing` or `collapsed`: a turn there may succeed. With every
replica down, turns wait.

An engine under load is well: it is slow, its queue is long, its polls are late. So no cause follows from slowness. A
byte of any turn speaks against `silent` and `frozen`, and so does every counter that moves with work.
"""

from __future__ import annotations

from collections import deque
from enum import StrEnum
from math import inf
from typing import Final


class ReplicaState(StrEnum):
    """How an engine does, the gravest last."""

    UP = "up"
    BACKPRESSURE = "backpressure"
    COLLAPSED = "collapsed"
    SUSPENDED = "suspended"
    DRAINING = "draining"
    FAILING = "failing"
    FROZEN = "frozen"
    SILENT = "silent"
    DOWN = "down"


STATES: Final[dict[str, ReplicaState]] = {state.value: state for state in ReplicaState}

_GRAVITY: Final[dict[ReplicaState, int]] = {state: number for number, state in enumerate(STATES.values())}

LOST: Final = frozenset({ReplicaState.SILENT.value, ReplicaState.FROZEN.value})
"""Verdicts by which turns in flight are lost, although their connections are open."""


class Verdict:
    """The causes that hold for one replica, and the gravest of them."""

    __slots__ = ("_causes", "reason", "since_s", "state")

    def __init__(self, now_s: float) -> None:
        """Start without a cause."""
        self._causes: dict[ReplicaState, tuple[str, float]] = {}
        self.state = ReplicaState.UP
        self.reason = ""
        self.since_s = now_s
        """When it became what it is."""

    def __repr__(self) -> str:
        return f"<Verdict {self.state}{f': {self.reason}' if self.reason else ''}>"

    def set(self, state: ReplicaState, reason: str, now_s: float) -> None:
        """Note a cause that holds from now on; one that holds already gets the new reason."""
        before = self._causes.get(state)
        self._causes[state] = reason, now_s if before is None else before[1]
        self._choose(now_s)

    def end(self, state: ReplicaState, now_s: float) -> None:
        """Note that a cause is over."""
        if self._causes.pop(state, None) is not None:
            self._choose(now_s)

    def holds(self, state: ReplicaState) -> bool:
        """Return whether a cause holds."""
        return state in self._causes

    def end_all(self, now_s: float, *states: ReplicaState) -> None:
        """Note that several causes are over."""
        for state in states:
            self._causes.pop(state, None)
        self._choose(now_s)

    def _choose(self, now_s: float) -> None:
        gravest = ReplicaState.UP
        for state in self._causes:
            if _GRAVITY[state] > _GRAVITY[gravest]:
                gravest = state
        self.reason = self._causes[gravest][0] if gravest in self._causes else ""
        if gravest is not self.state:
            self.state = gravest
            self.since_s = self._causes[gravest][1] if gravest in self._causes else now_s


# --- evidence
CHECK_AT_RATIO: Final = 0.4
"""Part of the limit after which an engine that stands still gets a check turn."""

FROZEN_AT_RATIO: Final = 0.8
"""Part of the limit after which it is frozen: polls show a standstill late, and its end."""

PREFILL_RATIO: Final = 3.0
"""An engine that may be computing a long prompt at once is frozen only after this many times that time."""

SLOW_LIMIT_RATIO: Final = 2.0
"""An engine that stood still and then went on by itself is given this many times that time from then on."""

LONGEST_LIMIT_RATIO: Final = 10.0
"""The largest limit that is learned so, as a ratio of the configured one."""


class Counters:
    """What a poll said of an engine's work.

    `totals` only move while it works; `running_count` falls when it ends a request. `is_paced` says whether they move
    with every step, so that their standstill alone is evidence.
    """

    __slots__ = ("is_paced", "running_count", "totals", "waiting_count")

    def __init__(
        self,
        totals: tuple[float | None, ...],
        running_count: int | None,
        waiting_count: int | None,
        *,
        is_paced: bool,
    ) -> None:
        """Keep a reading."""
        self.totals = totals
        self.running_count = running_count
        self.waiting_count = waiting_count
        self.is_paced = is_paced

    def moved_since(self, before: Counters) -> bool:
        """Return whether the engine did anything between two readings; new requests that it only took in do not count.

        A value that was read only once of the two says nothing.
        """
        for was, now in zip(before.totals, self.totals, strict=True):
            if was is not None and now is not None and was != now:
                return True
        was_running, running = before.running_count, self.running_count
        return was_running is not None and running is not None and running < was_running

    @property
    def tells_queue_is_empty(self) -> bool:
        """Return whether a check turn would not have to wait in the engine's queue."""
        return self.waiting_count == 0


class Stillness:
    """For how long an engine with turns in flight has stood still, as far as polls and turns tell.

    `frozen` follows if nothing moved for most of `limit_s`, a check turn had no answer, and that says something: the
    engine's counters move with each step, or nothing waits in its queue, so the check did not either, or a stream had
    begun, which does not wait either. Without any of these it is never `frozen`: a whole answer may be computed for
    long without a byte.
    """

    __slots__ = ("_configured_s", "_counters", "_has_begun", "_since_s", "checked_s", "limit_s")

    def __init__(self, limit_s: float) -> None:
        """Begin with the configured limit."""
        self._configured_s = self.limit_s = limit_s
        self._since_s = inf
        """Since when it has stood still; infinite while it does not, or has nothing to do."""
        self._counters: Counters | None = None
        self._has_begun = False
        self.checked_s = inf
        """When the check turn was sent that has no answer yet; infinite without one."""

    def polled(
        self, counters: Counters, *, heard_s: float, is_busy: bool, now_s: float, has_begun: bool = False
    ) -> None:
        """Note a good poll.

        `heard_s` is when a turn there last began, went on or ended its answer; `is_busy` says whether any is in flight,
        and the engine is not known to be paused; `has_begun` whether any of them has begun its answer.
        """
        before, self._counters, self._has_begun = self._counters, counters, has_begun
        if not is_busy or before is None or heard_s >= self._since_s or counters.moved_since(before):
            if is_busy and self.checked_s < inf:  # a long step: it is given more time from now on
                still_s = now_s - self._since_s
                longest_s = LONGEST_LIMIT_RATIO * self._configured_s
                self.limit_s = min(longest_s, max(self.limit_s, SLOW_LIMIT_RATIO * still_s))
            self.begin_anew()
            if is_busy:
                self._since_s = now_s
        elif self._since_s == inf:
            self._since_s = now_s

    def begin_anew(self) -> None:
        """Forget how long it stood still."""
        self._since_s = self.checked_s = inf

    def still_s(self, now_s: float) -> float:
        """Return for how long it has stood still."""
        return max(0.0, now_s - self._since_s)

    @property
    def _tells(self) -> bool:
        """Return whether a standstill, and a check without an answer, would say something."""
        counters = self._counters
        return counters is not None and (counters.is_paced or counters.tells_queue_is_empty or self._has_begun)

    def wants_check(self, now_s: float) -> bool:
        """Return whether a check turn should be sent now."""
        if self.checked_s < inf or not self._tells:
            return False
        return self.still_s(now_s) >= CHECK_AT_RATIO * self.limit_s

    def is_frozen(self, now_s: float, prefill_s: float = 0.0) -> bool:
        """Return whether that is enough, if the check that was sent has no answer.

        `prefill_s` is how long the longest prompt there should take, whose answer has not begun.
        """
        if not self._tells:
            return False
        enough_s = max(FROZEN_AT_RATIO * self.limit_s, PREFILL_RATIO * prefill_s)
        return self.checked_s < inf and self.still_s(now_s) >= enough_s


LEAST_PRESSURE_S: Final = 1.0

MOST_PRESSURE_S: Final = 30.0


class Pressure:
    """For how long a replica that says it is full gets no turns.

    As long as it says, between 1 and 30 s; without a word 1 s at first, and twice as long each time that it says so
    again without having answered a turn in between.
    """

    __slots__ = ("_for_s", "until_s")

    def __init__(self) -> None:
        """Begin without pressure."""
        self._for_s = 0.0
        self.until_s = -inf

    def pressed(self, retry_after_s: float | None, now_s: float) -> float:
        """Note a refusal; return the seconds without turns from now on. Refusals meanwhile change nothing."""
        if now_s < self.until_s:
            return self.until_s - now_s
        self._for_s = min(MOST_PRESSURE_S, max(LEAST_PRESSURE_S, 2 * self._for_s))
        for_s = self._for_s if retry_after_s is None else min(MOST_PRESSURE_S, max(LEAST_PRESSURE_S, retry_after_s))
        self.until_s = now_s + for_s
        return for_s

    def answered(self) -> None:
        """Note that it answered a turn."""
        self._for_s = 0.0


KEEPING_TURNS_COUNT: Final = 20
"""So many turns, each with as many tokens expected in the cache, make a judgement."""

KEEPING_LEAST_TOKENS: Final = 1024

COLLAPSED_RATIO: Final = 0.1

KEEPING_USED_RATIO: Final = 0.9
"""An engine whose cache is used so far by what runs now is short of memory."""

KEPT_RATIO: Final = 0.5
"""An engine that never kept so much of what it should have, over as many turns, is not judged: its cache may be off."""


class Keeping:
    """Whether an engine's cache keeps what it was given: of each turn, how much was found of what should be there.

    An engine short of memory evicts, which is no fault: what was kept from before that is not expected any more.
    """

    __slots__ = ("_expected_tokens", "_found_tokens", "_pressed_s", "_turns", "has_kept")

    def __init__(self) -> None:
        """Begin without turns."""
        self._turns: deque[tuple[int, int]] = deque()
        self._expected_tokens = self._found_tokens = 0
        self._pressed_s = -inf
        self.has_kept = False
        """Whether it kept most of what it should have, before."""

    def pressed(self, now_s: float) -> None:
        """Note that the engine is short of memory: claims do not fit, or it says so itself."""
        self._pressed_s = now_s

    def turn_ended(self, expected_tokens: int, found_tokens: int, kept_since_s: float = inf) -> None:
        """Note a turn whose program had kept its claim since its last turn, at `kept_since_s`."""
        if expected_tokens < KEEPING_LEAST_TOKENS or kept_since_s <= self._pressed_s:
            return
        found_tokens = min(expected_tokens, found_tokens)
        self._turns.append((expected_tokens, found_tokens))
        self._expected_tokens += expected_tokens
        self._found_tokens += found_tokens
        if len(self._turns) > KEEPING_TURNS_COUNT:
            expected_tokens, found_tokens = self._turns.popleft()
            self._expected_tokens -= expected_tokens
            self._found_tokens -= found_tokens
        if len(self._turns) == KEEPING_TURNS_COUNT and self.found_ratio >= KEPT_RATIO:
            self.has_kept = True

    def begin_anew(self) -> None:
        """Forget the turns so far, because the cache was cleared, or is tried again."""
        self._turns.clear()
        self._expected_tokens = self._found_tokens = 0

    @property
    def found_ratio(self) -> float:
        """Return how much was found of what should have been there; 1 without any turn."""
        return self._found_tokens / self._expected_tokens if self._expected_tokens else 1.0

    @property
    def has_collapsed(self) -> bool:
        """Return whether the cache has stopped keeping."""
        return self.has_kept and len(self._turns) == KEEPING_TURNS_COUNT and self.found_ratio < COLLAPSED_RATIO
