"""The single writer: hands events to the schedulers, carries out their decisions, and logs both."""

# compiled: each turn passes here, four times

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable
from contextlib import suppress

import structlog

from thunderagent.programs.model.decisions import Decision, Grant, Reason, Reject
from thunderagent.programs.model.events import Event, Tick
from thunderagent.programs.pools import Pools
from thunderagent.runtime.event_log import EventLogWriter
from thunderagent.runtime.fleet import OF_REPLICAS, Fleet
from thunderagent.runtime.observers import Observers
from thunderagent.runtime.served_models import ServedModels
from thunderagent.runtime.translation import log_decision, refusal_of

log = structlog.get_logger("thunderagent.runtime")


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
        for decision in decisions:
            self.decision_counts[type(decision), decision.reason] += 1
            if type(decision) is Grant:
                waiter = self.waiters.get(decision.turn_id)
                if waiter is not None and not waiter.done():
                    waiter.set_result(decision)
            else:
                self._carry_out(decision)
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

    def _carry_out(self, decision: Decision) -> None:
        """Log a decision other than a grant, and wake a rejected turn; claims moved when it was decided."""
        if type(decision) is Reject:
            waiter = self.waiters.get(decision.turn_id)
            if waiter is not None and not waiter.done():
                waiter.set_exception(refusal_of(decision, self._pools))
        log_decision(decision)
