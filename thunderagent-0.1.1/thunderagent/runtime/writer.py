"""The single writer: hands events to the schedulers, carries out their decisions, logs both, and tells observers."""

# compiled: each turn passes here, four times

from __future__ import annotations

import asyncio
import re
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import suppress
from itertools import count
from math import ceil
from operator import itemgetter
from typing import Final, get_args

import structlog

from thunderagent.errors import (
    NoReplicaError,
    NoRoomInTimeError,
    ProgramDeadlineError,
    ProgramHopelessError,
    ProgramKilledError,
    ProgramLimitError,
    ProgramReleasedError,
    ThunderAgentError,
    TooManyProgramsError,
)
from thunderagent.programs.messages import Decision, Event, Grant, Hold, Reason, Reject, SetPriority, SetRoute, Tick
from thunderagent.programs.pools import Pools
from thunderagent.runtime.event_log import EventLogWriter
from thunderagent.runtime.fleet import OF_REPLICAS, Fleet
from thunderagent.runtime.served_models import ServedModels

log = structlog.get_logger("thunderagent.runtime")

Observer = Callable[[Event, Sequence[Decision]], None]
Numbered = tuple[int, Observer]

MOST_RETRY_AFTER_S: Final = 60
"""Clients treat a longer wait as an error."""


class Observers:
    """The observers by number, in order of registration."""

    def __init__(self) -> None:
        """Start without observers."""
        self._numbers = count()
        self._all: dict[int, tuple[Observer, frozenset[type] | None]] = {}
        """By number, with the kinds of events and decisions that each is about; None is all."""
        self.by_kind: dict[type, tuple[Numbered, ...]] = {}
        """Observers of a kind; computed when one first comes."""

    def __len__(self) -> int:
        return len(self._all)

    def add(self, observer: Observer, about: Sequence[type]) -> Callable[[], None]:
        """Call `observer` with what it is `about`; return an idempotent function that ends that."""
        number = next(self._numbers)
        self._all[number] = observer, frozenset(about) or None
        self.by_kind.clear()

        def stop() -> None:
            self._all.pop(number, None)
            self.by_kind.clear()

        return stop

    def tell(self, event: Event, decisions: Sequence[Decision]) -> None:
        """Tell an event and its decisions to all observers of one of these kinds, once each."""
        by_kind = self.by_kind
        found: Sequence[Numbered] | None = by_kind.get(type(event))
        if found is None:
            found = self._about(type(event))
        for decision in decisions:
            more = by_kind.get(type(decision))
            if more is None:
                more = self._about(type(decision))
            if more and more is not found:
                found = sorted({*found, *more}, key=itemgetter(0)) if found else more
        for _, observer in found:
            observer(event, decisions)

    def _about(self, kind: type) -> tuple[Numbered, ...]:
        about = tuple(
            (number, observer) for number, (observer, kinds) in self._all.items() if kinds is None or kind in kinds
        )
        self.by_kind[kind] = about
        return about


class Writer:
    """Every event passes here, one after the other."""

    def __init__(
        self,
        pools: Pools,
        fleet: Fleet,
        served: ServedModels,
        clock: Callable[[], float],
        event_log: EventLogWriter | None,
    ) -> None:
        """Start before the first event; `clock` returns monotonic seconds."""
        self._pools = pools
        self._first = pools.all[0].scheduler
        self._fleet = fleet
        self._served = served
        self._now_s = clock
        self._event_log = event_log
        self.decision_counts: Counter[tuple[type[Decision], Reason]] = Counter()
        """Decisions by kind and reason."""
        self.observers = Observers()
        self.waiters: dict[int, asyncio.Future[Grant]] = {}
        """Waiters for a lease, by turn."""
        self._crash: Exception | None = None
        self._crashed = asyncio.Event()

    @property
    def has_crashed(self) -> bool:
        """Whether the scheduler raised: its state cannot be trusted any more."""
        return self._crash is not None

    async def run(self, tick_s: float) -> None:
        """Tick at least every `tick_s` until cancelled, or until the scheduler or its policy raised; then raise that.

        After an exception within an event the sums are wrong, and nothing that follows can be trusted.
        """
        period_s = min(tick_s, self._first.policy.tick_s)
        while not self._crashed.is_set():
            with suppress(TimeoutError):
                async with asyncio.timeout(period_s):
                    await self._crashed.wait()
            if not self._crashed.is_set():
                self.dispatch(Tick(self._now_s()))
                self.flush()
        assert self._crash is not None
        raise self._crash

    def dispatch(self, event: Event) -> list[Decision]:
        """Hand one event to the scheduler and carry out its decisions."""
        pools = self._pools
        in_pools = pools.several or bool(pools.to_tell)
        try:
            decisions = pools.handle(event) if in_pools else self._first.handle(event)
        except Exception as error:
            self._crash = error
            self._crashed.set()
            log.critical("scheduler_crashed", on_event=repr(event), exc_info=True)
            raise
        about = type(event)
        if about in OF_REPLICAS:
            self._fleet.push(event)
        elif in_pools and about is Tick and any(type(each) in OF_REPLICAS for _, each, _ in pools.handled):
            self._served.changed()  # some pools were merged
        by_kind = self.observers.by_kind
        is_observed = by_kind.get(about) != ()
        for decision in decisions:
            is_observed = is_observed or by_kind.get(type(decision)) != ()
            self.decision_counts[type(decision), decision.reason] += 1
            if type(decision) is Grant:
                waiter = self.waiters.get(decision.turn_id)
                if waiter is not None and not waiter.done():
                    waiter.set_result(decision)
            else:
                if type(decision) is Reject:
                    self._wake_rejected(decision)
                log_decision(decision)
        if is_observed:
            self.observers.tell(event, decisions)
        if self._event_log is not None:
            if in_pools:
                self._log_events(lambda event_log: event_log.write_pools(pools.handled))
            else:
                self._log_events(lambda event_log: event_log.write(event, decisions))
        return decisions

    def flush(self) -> None:
        """Flush the event log to the disk."""
        self._log_events(EventLogWriter.flush)

    def _log_events(self, write: Callable[[EventLogWriter], None]) -> None:
        """Call `write` on the event log; if the disk fails, log an error and stop logging: serving goes on."""
        if self._event_log is None:
            return
        try:
            write(self._event_log)
        except OSError as error:
            log.error("event_log_given_up", why=error.strerror or str(error))  # noqa: TRY400 - it says all
            self._event_log = None

    def _wake_rejected(self, decision: Reject) -> None:
        """Raise the error of a rejected turn where it waits."""
        waiter = self.waiters.get(decision.turn_id)
        if waiter is not None and not waiter.done():
            waiter.set_exception(refusal_of(decision, self._pools))


_NOT_FORWARDED: Final = "; the turn was not forwarded"
_RELEASED = ProgramReleasedError, "program {!r} was released while this turn waited" + _NOT_FORWARDED
_REFUSALS: dict[Reason, tuple[type[ThunderAgentError], str]] = {
    Reason.KILLED: (ProgramKilledError, "program {!r} was ended by an operator" + _NOT_FORWARDED),
    Reason.NO_REPLICA: (
        NoReplicaError,
        f"no replica has been usable for too long{_NOT_FORWARDED}; `thunderagent doctor` says why",
    ),
    Reason.HOPELESS: (
        ProgramHopelessError,
        "program {!r} was ended, because a judge expects it to fail" + _NOT_FORWARDED,
    ),
    Reason.MAX_TURNS: (ProgramLimitError, "program {!r} has had its max_turns" + _NOT_FORWARDED),
    Reason.MAX_TOKENS: (ProgramLimitError, "program {!r} has used its max_tokens" + _NOT_FORWARDED),
    Reason.MAX_AGE: (ProgramLimitError, "program {!r} has reached its max_age_s" + _NOT_FORWARDED),
    Reason.DEADLINE: (ProgramDeadlineError, "the deadline_s of program {!r} has passed" + _NOT_FORWARDED),
    Reason.DEADLINE_UNMET: (
        ProgramDeadlineError,
        "program {!r} cannot meet its deadline_s: its turns that are left would take longer, even alone on an engine"
        + _NOT_FORWARDED,
    ),
    Reason.OVERDRAWN: (NoRoomInTimeError, "there is no room before its client would give up" + _NOT_FORWARDED),
    Reason.LEAVING: (
        NoRoomInTimeError,
        "program {!r} leaves its replica, and its other turns there may not end before its client would give up"
        + _NOT_FORWARDED,
    ),
    Reason.TOO_MANY_PROGRAMS: (
        TooManyProgramsError,
        "the limit of programs is reached, and all of them have turns, so {!r} was not opened" + _NOT_FORWARDED,
    ),
}
"""The error for a rejected turn, by reason."""


def refusal_of(decision: Reject, pools: Pools) -> ThunderAgentError:
    """Return the error for a rejected turn; if there was no room in time, with when there may be some."""
    kind, why = _REFUSALS.get(decision.reason, _RELEASED)
    error = kind(why.format(decision.program_id))
    if decision.reason is Reason.OVERDRAWN:
        homes = pools.of_program(decision.program_id or "")
        scheduler = (homes[0] if homes else pools.all[0]).scheduler
        wait_s = scheduler.knowledge.restore_pace.interval_s * (1 + scheduler.queue.waiting_count)
        if wait_s:
            error.retry_after_s = min(MOST_RETRY_AFTER_S, max(1, ceil(wait_s)))
    return error


_WORDS: Final = {kind: re.sub(r"(?<=[a-z])(?=[A-Z])", "_", kind.__name__).lower() for kind in get_args(Decision)}
"""Names of decisions in the log."""


def log_decision(decision: Decision) -> None:
    """Write a line for a decision other than a grant."""
    word, reason = _WORDS[type(decision)], decision.reason.value
    if isinstance(decision, Hold):
        log.debug(word, program_id=decision.program_id, reason=reason)
    elif isinstance(decision, SetPriority):
        # a policy may decide one for each program
        write = log.info if decision.reason is Reason.OPERATOR else log.debug
        of = {"program_id": decision.program_id, "replica_id": decision.replica_id}
        write(word, **of, priority=decision.priority, reason=reason)
    elif isinstance(decision, SetRoute):
        of = {"scope": decision.scope, "name": decision.name}
        log.info(word, **of, replicas=dict(decision.targets), reason=reason)
    else:
        log.info(
            word,
            program_id=getattr(decision, "program_id", None),
            replica_id=getattr(decision, "replica_id", None),
            reason=reason,
        )
