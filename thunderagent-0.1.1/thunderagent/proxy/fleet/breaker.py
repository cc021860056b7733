"""A circuit breaker for each replica: one that fails too many turns gets none for a while.

Theory of operation
===================
The poller finds replicas that are gone. This finds those that look healthy but whose turns fail: connections that are
closed, or time out, before the first byte of an answer; answers that cannot be read, 5xx, and errors inside a 200. A
4xx is its client's own, and 429 and 503 say that the engine is full, which is no failure (`Pressure`).

A client may make an engine fail: a turn that fails elsewhere in the same way says nothing of either replica, even if
the replica was tripped meanwhile. Errors inside the answers of one program count once, until it has a good one.

    closed ──(so many failures)──▶ open ──(backoff is over)──▶ half-open ──(good end)──▶ closed
                                    ▲───────(failure; the backoff doubles)───┘

So many are `failure_count` in a row, or 40 % of the last 4 x `failure_count` turns: a replica that fails every other
turn is no better. What the turns before the trial did still counts after it: a replica earns its trust by good turns.

While it is open the scheduler treats the replica as tripped: it grants nothing new there, and programs leave. When it
is half-open the scheduler may grant again; the first forwarded turn is the probe. The breaker closes when the probe has
ended well, because a stream may end in an error. Until then the verdict is `failing`, and other turns granted there are
tried elsewhere, without having been sent. Those that can run nowhere else wait for the probe. An end that says nothing
(the client left, a 4xx, a 429) makes the next turn the probe.

The last usable replica of a pool is never taken away: failing there is no worse than being held. One that is suspended
is usable: turns wait for it, and do not fail. A replica that goes down starts over: whatever comes up in its place has
not failed yet.
"""

# compiled: each turn passes here

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import StrEnum
from math import ceil
from typing import Final

import structlog

from thunderagent.errors import ReplicaError, ReplicaRemovedError, ReplicaTrippedError
from thunderagent.leases.open_lease import FleetSource
from thunderagent.programs.messages import Decision, Event, ReplicaDown, ReplicaDraining, ReplicaRemoved
from thunderagent.programs.state.health import Pressure

log = structlog.get_logger("thunderagent.breaker")

WINDOW_RATIO: Final = 4
"""The last turns that are remembered, as a ratio of the failures in a row that are too many."""

FAILING_RATIO: Final = 0.4
"""Part of these turns that may not fail."""

_GONE: Final = frozenset({ReplicaDown, ReplicaRemoved})
_FEWER: Final = _GONE | {ReplicaDraining}


@dataclass(frozen=True, slots=True)
class BreakerSettings:
    """When a replica gets no turns for a while."""

    failure_count: int = 5
    """Failures in a row that open a breaker; 0 never does."""
    backoff_s: float = 5.0
    """How long at first; doubled each time that it fails again soon after."""
    longest_backoff_s: float = 120.0
    probe_wait_s: float = 5.0
    """How long turns that can run nowhere else wait for a probe. One that has not failed by then is computing."""

    @property
    def window_count(self) -> int:
        """How many of the last turns are remembered."""
        return WINDOW_RATIO * self.failure_count

    @property
    def window_failure_count(self) -> int:
        """So many failures among them open a breaker, too."""
        return ceil(FAILING_RATIO * self.window_count)


class BreakerState(StrEnum):
    """Whether a replica gets turns."""

    CLOSED = "closed"
    OPEN = "open"
    HALF_OPEN = "half_open"


class _Breaker:
    __slots__ = (
        "backoff_s",
        "closed_s",
        "failed_program_id",
        "failure_count",
        "failures",
        "probe",
        "state",
        "timer",
        "until_s",
    )

    def __init__(self) -> None:
        self.state = BreakerState.CLOSED
        self.failure_count = 0
        """Failures in a row."""
        self.failures = 0
        """The last turns, the newest in the lowest bit: 1 for a failure."""
        self.failed_program_id: str | None = None
        """The program whose answer last had an error, if none of its turns was answered well since."""
        self.backoff_s = 0.0
        self.until_s = 0.0
        self.closed_s = 0.0
        self.timer: asyncio.TimerHandle | None = None
        self.probe: asyncio.Future[bool] | None = None
        """Done when the probe ended well (True) or failed (False); cancelled if its end says nothing."""


class Breakers:
    """The breakers of all replicas that recently failed a turn."""

    def __init__(self, runtime: FleetSource, settings: BreakerSettings) -> None:
        """Start with all breakers closed."""
        self._runtime = runtime
        self._settings = settings
        self._breakers: dict[str, _Breaker] = {}
        self.knows: Callable[[str], bool] = self._breakers.__contains__
        """Returns whether a replica recently failed a turn; otherwise there is nothing to wait for or to report."""
        self._pressures: dict[str, Pressure] = {}
        self.is_pressed: Callable[[str], bool] = self._pressures.__contains__
        """Returns whether a replica said that it was full, and has answered nothing well since."""
        if settings.failure_count:
            runtime.observe(self._heard, *_FEWER)

    def __repr__(self) -> str:
        return f"<Breakers: {', '.join(f'{name} {each.state}' for name, each in self._breakers.items())}>"

    def close(self) -> None:
        """Stop the clocks; nothing is tried again any more."""
        for breaker in self._breakers.values():
            if breaker.timer is not None:
                breaker.timer.cancel()

    def state_of(self, replica_id: str) -> BreakerState:
        """Return the state of a replica's breaker."""
        breaker = self._breakers.get(replica_id)
        return BreakerState.CLOSED if breaker is None else breaker.state

    def retry_in_s(self, replica_id: str) -> float | None:
        """Return the seconds until a replica is tried again; None if its breaker is not open."""
        breaker = self._breakers.get(replica_id)
        if breaker is None or breaker.state is not BreakerState.OPEN:
            return None
        return max(0.0, breaker.until_s - self._runtime.now_s())

    async def admit(self, replica_id: str, *, is_bound: bool = False) -> asyncio.Future[bool] | None:
        """If another turn is just probing a replica, refuse this one; wait if it `is_bound` to run there.

        Returns the probe's handle if this turn is the probe. Raises `ReplicaTrippedError` if it was not sent. Report
        afterwards how it went, with the handle: `succeeded`, `failed` or `lost`, and at last `left`.
        """
        breaker = self._breakers.get(replica_id)
        while breaker is not None and breaker.state is BreakerState.HALF_OPEN:
            probe = breaker.probe
            if probe is None:
                breaker.probe = asyncio.get_running_loop().create_future()
                return breaker.probe
            if not is_bound and self.has_other(replica_id):
                raise ReplicaTrippedError(
                    f"replica {replica_id} is just tried with another turn; this one was not sent",
                    replica_id=replica_id,
                )
            done, _ = await asyncio.wait([probe], timeout=self._settings.probe_wait_s)
            if not done:
                return None
            if not probe.cancelled() and not probe.result():
                raise ReplicaTrippedError(
                    f"replica {replica_id} failed its trial turn; this one was not sent",
                    replica_id=replica_id,
                )
        return None

    def succeeded(
        self, replica_id: str, program_id: str | None = None, probe: asyncio.Future[bool] | None = None
    ) -> None:
        """Record that an answer was good to its end: that of the `probe` closes the breaker."""
        if self._pressures:
            self._pressures.pop(replica_id, None)
        breaker = self._breakers.get(replica_id)
        if breaker is None:
            return
        self._remember(breaker, failed=0)
        breaker.failure_count = 0
        if breaker.failed_program_id == program_id:
            breaker.failed_program_id = None
        if breaker.state is BreakerState.HALF_OPEN and (
            (probe is not None and breaker.probe is probe) or not self.has_other(replica_id)
        ):
            self._close(replica_id, breaker)

    def pressed(self, replica_id: str, retry_after_s: float | None, status: int) -> float:
        """Record that a replica is full; return the seconds for which it is granted nothing."""
        now_s = self._runtime.now_s()
        pressure = self._pressures.setdefault(replica_id, Pressure())
        is_new = now_s >= pressure.until_s
        for_s = pressure.pressed(retry_after_s, now_s)
        if is_new:
            log.info("replica_is_full", replica_id=replica_id, status=status, for_s=round(for_s, 3))
            self._runtime.replica_pressed(replica_id, for_s, f"it answered {status}")
        return for_s

    def excuse(self, replica_id: str) -> None:
        """Take one failure back: its turn failed elsewhere in the same way."""
        breaker = self._breakers.get(replica_id)
        if breaker is None or breaker.state is BreakerState.HALF_OPEN:
            return
        breaker.failures &= breaker.failures - 1  # the newest one
        breaker.failure_count = max(0, breaker.failure_count - 1)
        if breaker.state is BreakerState.OPEN and not self._is_too_much(breaker):
            assert breaker.timer is not None
            breaker.timer.cancel()
            self._half_open(replica_id, breaker)
            self._close(replica_id, breaker)

    def erred(self, replica_id: str, program_id: str | None, why: str) -> None:
        """Record that an answer had an error inside; those of one program count once, until it has a good answer.

        They always count against a replica that is tried.
        """
        breaker = self._breakers.get(replica_id)
        is_tried = breaker is not None and breaker.state is BreakerState.HALF_OPEN
        if program_id is not None and breaker is not None and breaker.failed_program_id == program_id and not is_tried:
            return
        self.failed(replica_id, why)
        breaker = self._breakers.get(replica_id)
        if breaker is not None:
            breaker.failed_program_id = program_id

    def failed(self, replica_id: str, why: str = "its turns end before the first byte") -> None:
        """Record that a replica failed a turn."""
        if not self._settings.failure_count:
            return
        if not self._runtime.replicas.is_up(replica_id):
            return  # known to be gone: it starts over when it comes back
        breaker = self._breakers.setdefault(replica_id, _Breaker())
        breaker.failure_count += 1
        self._remember(breaker, failed=1)
        too_many = breaker.state is BreakerState.CLOSED and self._is_too_much(breaker)
        if too_many or breaker.state is BreakerState.HALF_OPEN:
            self._open(replica_id, breaker, why)

    def _remember(self, breaker: _Breaker, *, failed: int) -> None:
        breaker.failures = (breaker.failures << 1 | failed) & ((1 << self._settings.window_count) - 1)

    def _is_too_much(self, breaker: _Breaker) -> bool:
        settings = self._settings
        in_a_row = breaker.failure_count >= settings.failure_count
        return in_a_row or breaker.failures.bit_count() >= settings.window_failure_count

    def lost(self, replica_id: str, error: BaseException, probe: asyncio.Future[bool] | None) -> None:
        """Record what ended a turn that was sent, before the head of its answer arrived."""
        if isinstance(error, ReplicaError) and not isinstance(error, ReplicaRemovedError):
            self.failed(replica_id, error.code)
        else:
            self.left(replica_id, probe)

    def left(self, replica_id: str, probe: asyncio.Future[bool] | None) -> None:
        """Record that a turn ended; if it is still the probe its end says nothing, and another becomes the probe."""
        breaker = self._breakers.get(replica_id)
        if breaker is not None and probe is not None and breaker.probe is probe:
            breaker.probe.cancel()
            breaker.probe = None

    def _open(self, replica_id: str, breaker: _Breaker, why: str) -> None:
        """Open a breaker, unless no other replica could serve."""
        settings, now_s = self._settings, self._runtime.now_s()
        if not self.has_other(replica_id):
            self._close(replica_id, breaker, probe_succeeded=False)
            return
        again = breaker.state is BreakerState.HALF_OPEN or now_s - breaker.closed_s < settings.longest_backoff_s
        breaker.backoff_s = min(settings.longest_backoff_s, 2 * breaker.backoff_s if again else settings.backoff_s)
        breaker.backoff_s = max(breaker.backoff_s, settings.backoff_s)
        breaker.state = BreakerState.OPEN
        breaker.until_s = now_s + breaker.backoff_s
        breaker.timer = asyncio.get_running_loop().call_later(breaker.backoff_s, self._half_open, replica_id, breaker)
        log.warning(
            "breaker_opened",
            replica_id=replica_id,
            failure_count=breaker.failure_count,
            why=why,
            backoff_s=round(breaker.backoff_s, 3),
        )
        self._end_probe(breaker, succeeded=False)
        how_many = f"{breaker.failure_count} turns in a row"
        if breaker.failure_count < settings.failure_count and not again:
            how_many = f"{breaker.failures.bit_count()} of the last {settings.window_count} turns"
        self._runtime.replica_tripped(replica_id, tripped=True, why=f"{how_many} failed, the last one: {why}")

    def has_other(self, replica_id: str) -> bool:
        """Return whether another replica of the same pool is open, now or when grants go on."""
        states = self._runtime.replicas.states
        own = states.get(replica_id)
        return own is not None and any(
            state.is_open and state.pool == own.pool and state is not own for state in states.values()
        )

    def _half_open(self, replica_id: str, breaker: _Breaker) -> None:
        breaker.state = BreakerState.HALF_OPEN
        breaker.timer = None
        self._runtime.replica_tripped(replica_id, tripped=False)

    def _close(self, replica_id: str, breaker: _Breaker, *, probe_succeeded: bool = True) -> None:
        if breaker.state is not BreakerState.CLOSED:
            log.info("breaker_closed", replica_id=replica_id)
            breaker.closed_s = self._runtime.now_s()
            self._runtime.replica_recovered(replica_id)
        breaker.state = BreakerState.CLOSED
        self._end_probe(breaker, succeeded=probe_succeeded)

    def _end_probe(self, breaker: _Breaker, *, succeeded: bool) -> None:
        if breaker.probe is not None and not breaker.probe.done():
            breaker.probe.set_result(succeeded)
        breaker.probe = None

    def _heard(self, event: Event, decisions: Sequence[Decision]) -> None:  # noqa: ARG002 - an observer's signature
        if self._breakers:
            asyncio.get_running_loop().call_soon(self._try_early)  # an observer must not call the scheduler itself
        if type(event) not in _GONE:
            return
        assert isinstance(event, ReplicaDown | ReplicaRemoved)
        self._pressures.pop(event.replica_id, None)
        breaker = self._breakers.pop(event.replica_id, None)
        if breaker is not None:
            if breaker.timer is not None:
                breaker.timer.cancel()
            self._end_probe(breaker, succeeded=False)

    def _try_early(self) -> None:
        """Probe now the open replicas for which no other can serve."""
        for replica_id, breaker in list(self._breakers.items()):
            if breaker.state is BreakerState.OPEN and not self.has_other(replica_id):
                if breaker.timer is not None:
                    breaker.timer.cancel()
                self._half_open(replica_id, breaker)
