"""The single writer: takes events, calls the scheduler, carries out its decisions, wakes who waits.

Theory of operation
===================
Everything here runs on one event loop. `Runtime.lease` sends a `TurnArrived`; if the scheduler grants at once, the
lease is returned without a single await; otherwise the caller waits on a future that a later event resolves. A `Lease`
is ended exactly once, by whichever of its methods is called first; leaving its `with` block ends it as abandoned, so
a handler that is cancelled, or raises, always gives its lease back.

Nothing here knows HTTP: a trainer that calls its engines itself takes leases in the same way.
"""

from __future__ import annotations

import asyncio
import re
from collections import Counter
from collections.abc import Callable, Collection, Sequence
from contextlib import AbstractContextManager, nullcontext, suppress
from dataclasses import dataclass
from itertools import count
from math import ceil, inf
from time import monotonic
from types import TracebackType
from typing import Self, get_args

import structlog

from thunderagent.errors import (
    ControlRefusedError,
    NoReplicaError,
    NoRoomInTimeError,
    NotFoundError,
    ProgramHopelessError,
    ProgramKilledError,
    ProgramReleasedError,
    ShuttingDownError,
    ThunderAgentError,
    TooManyProgramsError,
    TurnAbortedError,
)
from thunderagent.event_log import EventLogWriter
from thunderagent.programs.control import NOT_THERE
from thunderagent.programs.decisions import Decision, Grant, Hold, Reason, Reject, SetPriority, SetRoute
from thunderagent.programs.events import (
    Event,
    GrantsContinued,
    GrantsSuspended,
    Media,
    MigrationAsked,
    PinnedTurnArrived,
    PrefixCut,
    PrioritySet,
    ProgramJudged,
    ProgramKilled,
    ProgramOpened,
    ProgramReleased,
    ProgramsReleased,
    ProvisionAsked,
    ReplicaDown,
    ReplicaDraining,
    ReplicaFlushed,
    ReplicaKilled,
    ReplicaPolled,
    ReplicaRemoved,
    ReplicaTripped,
    ReplicaUp,
    RouteSet,
    Tick,
    ToolEnded,
    ToolStarted,
    TurnAbandoned,
    TurnArrived,
    TurnDue,
    TurnFailed,
    TurnFinished,
    TurnProgressed,
    TurnStarted,
)
from thunderagent.programs.routes import Targets
from thunderagent.programs.scheduler import Scheduler
from thunderagent.programs.signals import Signal

log = structlog.get_logger("thunderagent.runtime")


@dataclass(frozen=True, slots=True)
class RuntimeSettings:
    """How the runtime runs."""

    tick_s: float = 1.0
    """Longest time between two ticks; a policy may want them more often."""
    grace_s: float = 30.0
    """How long a shutdown waits for turns in flight."""


UNBOUNDED = nullcontext()

MOST_RETRY_AFTER_S = 60
"""Clients take a longer wait that they are told for a mistake."""

TIMER_SLACK_S = 0.002
"""An event loop's timer may be early by a millisecond."""

Observer = Callable[[Event, Sequence[Decision]], None]


class Lease:
    """Leave for one turn to run on one replica. Use it in a `with` block and end it with what happened."""

    __slots__ = ("_ended", "_runtime", "engine_priority", "held_s", "program_id", "reason", "replica_id", "turn_id")

    def __init__(self, runtime: Runtime, grant: Grant, held_s: float) -> None:
        """Hold what the scheduler granted."""
        self._runtime = runtime
        self._ended = False
        self.turn_id = grant.turn_id
        self.program_id = grant.program_id
        self.replica_id = grant.replica_id
        self.reason = grant.reason
        self.engine_priority = grant.engine_priority
        self.held_s = held_s

    def __repr__(self) -> str:
        return f"<Lease of turn {self.turn_id} on {self.replica_id}{', ended' if self._ended else ''}>"

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if not self._ended:
            self.abandoned()

    def started(self) -> None:
        """Say that the first byte of the answer came."""
        self._runtime.dispatch(TurnStarted(self._runtime.now_s(), self.turn_id))

    def progressed(self, output_tokens: int) -> None:
        """Say about how many tokens were generated so far."""
        self._runtime.dispatch(TurnProgressed(self._runtime.now_s(), self.turn_id, output_tokens))

    def finished(
        self,
        prompt_tokens: int | None = None,
        output_tokens: int | None = None,
        cached_tokens: int | None = None,
        tool: str = "",
    ) -> None:
        """End the lease: the answer is whole, with this usage as far as the engine said it, and calls this tool."""
        self._end(
            "finished",
            TurnFinished(self._runtime.now_s(), self.turn_id, prompt_tokens, output_tokens, cached_tokens, tool),
        )

    def failed(self) -> None:
        """End the lease: the replica failed the turn."""
        self._end("failed", TurnFailed(self._runtime.now_s(), self.turn_id))

    def refused(self) -> None:
        """End the lease: the engine answered that it will not do the turn."""
        self._end("refused", TurnFailed(self._runtime.now_s(), self.turn_id, refused=True))

    def abandoned(self) -> None:
        """End the lease: the client left."""
        self._end("abandoned", TurnAbandoned(self._runtime.now_s(), self.turn_id))

    def _end(self, outcome: str, event: TurnFinished | TurnFailed | TurnAbandoned) -> None:
        if self._ended:
            return
        self._ended = True
        self._runtime.end_lease(outcome, event)


class Runtime:
    """Owner of the scheduler. All methods belong to one event loop."""

    def __init__(
        self,
        scheduler: Scheduler,
        settings: RuntimeSettings | None = None,
        *,
        clock: Callable[[], float] = monotonic,
        event_log: EventLogWriter | None = None,
    ) -> None:
        """Begin with no lease; `clock` returns monotonic seconds."""
        self.scheduler = scheduler
        self.settings = settings or RuntimeSettings()
        self.now_s = clock
        self.decision_counts: Counter[tuple[type[Decision], Reason]] = Counter()
        """Decisions by kind and reason."""
        self.outcome_counts: Counter[str] = Counter()
        """Turns by how they ended."""
        self.leases_count = 0
        self.prompt_tokens_total = 0
        """Of finished turns, as far as engines said their usage; so are the next two."""
        self.output_tokens_total = 0
        self.cached_tokens_total = 0
        self._event_log = event_log
        self._observers: list[tuple[Observer, frozenset[type] | None]] = []
        """And which kinds of events and decisions each is about; None is all."""
        self._turn_ids = count(1)
        self._waiters: dict[int, asyncio.Future[Grant]] = {}
        self._abortable_ids: set[int] = set()
        self._superseded_ids: set[int] = set()
        """Turns that another attempt took the place of, until whoever carries them out has heard of it."""
        self._closing = False
        self._crash: Exception | None = None
        self._crashed = asyncio.Event()
        self._no_lease_left = asyncio.Event()
        self._no_lease_left.set()

    def __repr__(self) -> str:
        return f"<Runtime: {self.leases_count} leases, {len(self._waiters)} held, {self.scheduler!r}>"

    @property
    def closing(self) -> bool:
        """Whether no new lease is granted any more."""
        return self._closing

    @property
    def held_count(self) -> int:
        """Turns that wait for a lease."""
        return len(self._waiters)

    async def lease(
        self,
        program_id: str | None,
        *,
        branch_id: str = "",
        prompt_bytes: int = 0,
        avoid_replica_id: str | None = None,
        prefix: tuple[PrefixCut, ...] = (),
        group_id: str = "",
        pinned_replica_id: str | None = None,
        abortable: bool = False,
        turn_id: int | None = None,
        deadline_s: float | None = None,
        supersedes_id: int | None = None,
        waiting_since_s: float | None = None,
        parent_id: str = "",
        tenant: str = "",
        wanted_replica_id: str | None = None,
        program_class: str = "",
        role: str = "",
        parent_branch_id: str = "",
        while_held: AbstractContextManager[object] = UNBOUNDED,
        media: Media = (),
    ) -> Lease:
        """Wait for leave to run one turn; `program_id` None is an anonymous one. The rest is as in `TurnArrived`.

        An anonymous turn may be pinned to the replica that its client chose itself.
        `abortable` says whether `abort_held` may end the wait. `while_held` is entered if the turn is held, and left
        with the lease; what it raises ends the turn.
        `turn_id` is of `new_turn_id`, for who must know it before the lease. Who waits for the lease of the turn that
        this one supersedes, or has it, is not told: cancel that.

        Raises `ProgramReleasedError`, `ProgramHopelessError`, `NoReplicaError`, `NoRoomInTimeError`,
        `TooManyProgramsError`, `TurnAbortedError` or `ShuttingDownError` if there will be none. Cancelling the wait
        takes the turn out of the queue.
        """
        if self._closing:
            raise ShuttingDownError("the proxy is shutting down")
        if turn_id is None:
            turn_id = self.new_turn_id()
        if supersedes_id in self.scheduler.turns:
            self._superseded_ids.add(supersedes_id)
        arrived_s = self.now_s()
        decisions = self.dispatch(
            TurnArrived(
                arrived_s,
                turn_id,
                program_id,
                branch_id,
                prompt_bytes,
                avoid_replica_id,
                prefix,
                group_id,
                deadline_s,
                supersedes_id,
                waiting_since_s,
                parent_id,
                tenant,
                wanted_replica_id,
                program_class,
                role,
                parent_branch_id,
                media,
            )
            if pinned_replica_id is None
            else PinnedTurnArrived(arrived_s, turn_id, pinned_replica_id, prompt_bytes, media)
        )
        for decision in reversed(decisions):
            if type(decision) is Grant and decision.turn_id == turn_id:
                return self._begin(decision, 0.0)
            if type(decision) is Reject and decision.turn_id == turn_id:
                self.outcome_counts["rejected"] += 1
                raise self._refusal(decision)
        waiter: asyncio.Future[Grant] = asyncio.get_running_loop().create_future()
        self._waiters[turn_id] = waiter
        if abortable:
            self._abortable_ids.add(turn_id)
        timer = self._timer_for(turn_id, arrived_s) if deadline_s is not None else None
        try:
            with while_held:
                grant = await waiter
        except asyncio.CancelledError:
            self.outcome_counts[self._superseded_or("abandoned", turn_id)] += 1
            self.dispatch(TurnAbandoned(self.now_s(), turn_id))
            raise
        except ThunderAgentError as error:
            self.outcome_counts["aborted" if isinstance(error, TurnAbortedError) else "rejected"] += 1
            self.dispatch(TurnAbandoned(self.now_s(), turn_id))  # at a shutdown the scheduler still holds it
            raise
        finally:
            self._waiters.pop(turn_id, None)
            self._abortable_ids.discard(turn_id)
            if timer is not None:
                timer.cancel()
            del waiter  # or a refusal in it, whose traceback holds this frame, would wait for a collection
        return self._begin(grant, self.now_s() - arrived_s)

    def new_turn_id(self) -> int:
        """Return an id that no turn had before."""
        return next(self._turn_ids)

    def _timer_for(self, turn_id: int, now_s: float) -> asyncio.TimerHandle | None:
        """Have the scheduler let a held turn in just when it must have its lease, not at the next tick."""
        turn = self.scheduler.turns.get(turn_id)
        due_s = self.scheduler.impatient.due_s(turn) if turn is not None else inf
        if due_s == inf:
            return None
        delay_s = max(0.0, due_s - now_s) + TIMER_SLACK_S
        return asyncio.get_running_loop().call_later(delay_s, lambda: self.dispatch(TurnDue(self.now_s(), turn_id)))

    def abort_held(self, replica_id: str | None = None) -> int:
        """End the wait of held turns that may be aborted, with `TurnAbortedError`; return how many.

        With a `replica_id`, only of those whose program was there last, was nowhere yet, or that must run there.
        """
        aborted_count = 0
        for turn_id in sorted(self._abortable_ids):
            waiter, turn = self._waiters[turn_id], self.scheduler.turns.get(turn_id)
            if waiter.done() or turn is None:
                continue
            home_id = turn.program.replica_id if turn.program is not None else turn.pinned_replica_id
            if replica_id is None or home_id in (None, replica_id):
                waiter.set_exception(TurnAbortedError("the trainer aborted this turn while it was held"))
                aborted_count += 1
        return aborted_count

    def unanswered_count(self, replica_ids: Collection[str], since_s: float) -> int:
        """Count the turns on some replicas that were granted since then and have no first byte yet."""
        return sum(
            turn.account_id in replica_ids and turn.started_s is None and turn.granted_s >= since_s
            for turn in self.scheduler.turns.values()
        )

    def open_program(
        self, program_id: str, group_id: str = "", parent_id: str = "", tenant: str = "", program_class: str = ""
    ) -> bool:
        """Open a program before its first turn; False if it lives already. Raises `TooManyProgramsError`."""
        if self.scheduler.table.get(program_id) is not None:
            return False
        self.dispatch(ProgramOpened(self.now_s(), program_id, group_id, parent_id, tenant, program_class))
        if self.scheduler.table.get(program_id) is None:
            raise TooManyProgramsError(f"there are too many programs to open {program_id!r}; all of them have turns")
        return True

    def observe(self, observer: Observer, *about: type) -> Callable[[], None]:
        """Have `observer` called with each event and what was decided on it, once that was carried out.

        If it says what it is `about`, it is called only with events of these kinds, or with such a decision: who waits
        for something rare costs turns nothing. Return what ends that; idempotent.
        """
        entry = observer, frozenset(about) or None
        self._observers = [*self._observers, entry]

        def stop() -> None:
            self._observers = [other for other in self._observers if other is not entry]

        return stop

    def listen(self, listener: Callable[[Signal], None]) -> Callable[[], None]:
        """Have `listener` called with each signal of the information stream; return what ends that."""
        return self.scheduler.listen(listener)

    def release(self, program_id: str, generation: int | None = None, outcome: str = "") -> bool:
        """End a program; False if there is none of that id, or not of that generation. Idempotent.

        `outcome` says what became of it: `success`, `failure`, or nothing.
        """
        program = self.scheduler.table.get(program_id)
        lives = program is not None and generation in (None, program.generation)
        if lives or program_id in self.scheduler.hopeless_ids:
            self.dispatch(ProgramReleased(self.now_s(), program_id, generation, outcome))
        return lives

    def program_judged(
        self, program_id: str, generation: int, turn_count: int, will_succeed: bool, confidence_ratio: float
    ) -> None:
        """Say what a judge thinks of a program, as in `ProgramJudged`; nothing happens if it is gone."""
        program = self.scheduler.table.get(program_id)
        if program is not None and program.generation == generation:
            self.dispatch(
                ProgramJudged(self.now_s(), program_id, generation, turn_count, will_succeed, confidence_ratio)
            )

    def release_together(self, program_ids: Sequence[str]) -> list[str]:
        """End several programs at once, so that none of them gets the room of another; return those that lived."""
        live_ids = [program_id for program_id in program_ids if self.scheduler.table.get(program_id) is not None]
        if live_ids:
            self.dispatch(ProgramsReleased(self.now_s(), tuple(live_ids)))
        return live_ids

    def tool_started(self, program_id: str, tool: str = "", *, inferred: bool = False) -> bool:
        """Say that a program's tool begins now, `inferred` if its client did not; False if there is no such program."""
        self.dispatch(ToolStarted(self.now_s(), program_id, tool, inferred))
        return self.scheduler.table.get(program_id) is not None

    def tool_ended(self, program_id: str, *, inferred: bool = False) -> bool:
        """Say that a program's tool is through, `inferred` if its client did not; False if there is no such program."""
        self.dispatch(ToolEnded(self.now_s(), program_id, inferred))
        return self.scheduler.table.get(program_id) is not None

    def replica_polled(
        self,
        replica_id: str,
        capacity_tokens: int | None,
        hit_ratio: float | None,
        query_tokens: int | None = None,
        preemption_count: int | None = None,
        kv_used_ratio: float | None = None,
        engine_waiting_count: int | None = None,
        age_s: float = 0.0,
    ) -> None:
        """Say what a replica's metrics said, as in `ReplicaPolled`."""
        self.dispatch(
            ReplicaPolled(
                self.now_s(),
                replica_id,
                capacity_tokens,
                hit_ratio,
                query_tokens,
                preemption_count,
                kv_used_ratio,
                engine_waiting_count,
                age_s,
            )
        )

    def replica_up(self, replica_id: str, capacity_tokens: int | None = None) -> None:
        """Say that a replica may be used, and how large it is if that is known."""
        self.dispatch(ReplicaUp(self.now_s(), replica_id, capacity_tokens))

    def replica_down(self, replica_id: str) -> None:
        """Say that a replica is gone."""
        self.dispatch(ReplicaDown(self.now_s(), replica_id))

    def replica_draining(self, replica_id: str) -> None:
        """Say that a replica gets nothing new."""
        self.dispatch(ReplicaDraining(self.now_s(), replica_id))

    def replica_flushed(self, replica_id: str) -> None:
        """Say that a replica threw away what it kept for later turns."""
        self.dispatch(ReplicaFlushed(self.now_s(), replica_id))

    def suspend_grants(self, cause: str, replica_id: str | None = None) -> None:
        """Grant nothing on a replica (None: on any) until the cause is over."""
        self.dispatch(GrantsSuspended(self.now_s(), cause, replica_id))

    def continue_grants(self, cause: str, replica_id: str | None = None) -> None:
        """Say that a cause for granting nothing is over; nothing happens if it does not hold."""
        self.dispatch(GrantsContinued(self.now_s(), cause, replica_id))

    def replica_removed(self, replica_id: str) -> None:
        """Say that a replica is gone for good."""
        self.dispatch(ReplicaRemoved(self.now_s(), replica_id))

    def replica_tripped(self, replica_id: str, *, tripped: bool) -> None:
        """Say that a replica that is up fails turn after turn, or that it may be tried again."""
        self.dispatch(ReplicaTripped(self.now_s(), replica_id, tripped))

    # --- what an operator says; each raises `ControlRefusedError` with the reason where it cannot be done

    def set_route(self, scope: str, name: str, targets: Targets) -> None:
        """Send the programs of a scope to replicas, by their weights; to any, if none is named."""
        _refuse(self.scheduler.control.why_not_route(scope, name, targets))
        self.dispatch(RouteSet(self.now_s(), scope, name, targets))

    def set_priority(self, program_id: str, priority: int, replica_id: str | None = None) -> None:
        """Give a program a priority, lower first; with a `replica_id`, in that engine alone."""
        _refuse(self.scheduler.control.why_not_priority(program_id, priority, replica_id))
        self.dispatch(PrioritySet(self.now_s(), program_id, priority, replica_id))

    def migrate(self, program_id: str, replica_id: str) -> None:
        """Move a program to another replica: now, or when its turns in flight have ended."""
        _refuse(self.scheduler.control.why_not_migrate(program_id, replica_id))
        self.dispatch(MigrationAsked(self.now_s(), program_id, replica_id))

    def kill(self, program_id: str) -> None:
        """End a program; its held turns are refused."""
        _refuse(self.scheduler.control.why_not_kill(program_id))
        self.dispatch(ProgramKilled(self.now_s(), program_id))

    def kill_replica(self, replica_id: str) -> None:
        """Have a replica drain and end, by whoever observes decisions."""
        _refuse(self.scheduler.control.why_not_kill_replica(replica_id))
        self.dispatch(ReplicaKilled(self.now_s(), replica_id))

    def provision(self) -> None:
        """Have one more replica started, by whoever observes decisions."""
        self.dispatch(ProvisionAsked(self.now_s()))

    async def run(self) -> None:
        """Tick until cancelled, or until the scheduler or its policy raised: then raise that, to end the process.

        After an exception in the middle of an event the sums are wrong, and nothing that follows can be trusted.
        """
        period_s = min(self.settings.tick_s, self.scheduler.policy.tick_s)
        while self._crash is None:
            with suppress(TimeoutError):
                async with asyncio.timeout(period_s):
                    await self._crashed.wait()
                    break
            self.dispatch(Tick(self.now_s()))
            self._log_events(EventLogWriter.flush)
        assert self._crash is not None
        raise self._crash

    def dispatch(self, event: Event) -> list[Decision]:
        """Hand one event to the scheduler and carry out what it decides."""
        try:
            decisions = self.scheduler.handle(event)
        except Exception as error:
            self._crash = error
            self._crashed.set()
            log.critical("scheduler_crashed", on_event=repr(event), exc_info=True)
            raise
        for decision in decisions:
            self.decision_counts[type(decision), decision.reason] += 1
            if type(decision) is Grant:
                waiter = self._waiters.get(decision.turn_id)
                if waiter is not None and not waiter.done():
                    waiter.set_result(decision)
            else:
                self._carry_out(decision)
        kinds = {type(event), *map(type, decisions)}
        for observer, about in self._observers:
            if about is None or not about.isdisjoint(kinds):
                observer(event, decisions)
        if self._event_log is not None:
            self._log_events(lambda event_log: event_log.write(event, decisions))
        return decisions

    def _log_events(self, write: Callable[[EventLogWriter], None]) -> None:
        """Do something with the event log; give it up, loudly, if the disk does: serving goes on."""
        if self._event_log is None:
            return
        try:
            write(self._event_log)
        except OSError:
            log.exception("event_log_given_up")
            self._event_log = None

    def end_lease(self, outcome: str, event: TurnFinished | TurnFailed | TurnAbandoned) -> None:
        """Take a lease back, with the event that says how it ended. Called by `Lease` alone."""
        self.outcome_counts[self._superseded_or(outcome, event.turn_id)] += 1
        self.leases_count -= 1
        if type(event) is TurnFinished:
            self.prompt_tokens_total += event.prompt_tokens or 0
            self.output_tokens_total += event.output_tokens or 0
            self.cached_tokens_total += event.cached_tokens or 0
        if not self.leases_count:
            self._no_lease_left.set()
        self.dispatch(event)

    def _superseded_or(self, outcome: str, turn_id: int) -> str:
        """Return how a turn ended that whoever carried it out ended so."""
        if turn_id not in self._superseded_ids:
            return outcome
        self._superseded_ids.discard(turn_id)
        return "superseded"

    async def close(self) -> None:
        """Grant nothing more, refuse who waits, let turns in flight end up to the grace period."""
        self._closing = True
        for waiter in self._waiters.values():
            if not waiter.done():
                waiter.set_exception(ShuttingDownError("the proxy is shutting down; the turn was not forwarded"))
        await asyncio.sleep(0)  # whoever was granted just now begins its lease
        try:
            async with asyncio.timeout(self.settings.grace_s):
                await self._no_lease_left.wait()
        except TimeoutError:
            log.warning("grace_period_over", leases_count=self.leases_count, grace_s=self.settings.grace_s)
        self._log_events(EventLogWriter.flush)

    def _begin(self, grant: Grant, held_s: float) -> Lease:
        self.leases_count += 1
        self._no_lease_left.clear()
        return Lease(self, grant, held_s)

    def _refusal(self, decision: Reject) -> ThunderAgentError:
        error = _refusal(decision)
        if decision.reason is Reason.OVERDRAWN:
            scheduler = self.scheduler
            wait_s = scheduler.knowledge.restore_pace.interval_s * (1 + scheduler.queue.waiting_count)
            if wait_s:
                error.retry_after_s = min(MOST_RETRY_AFTER_S, max(1, ceil(wait_s)))
        return error

    def _carry_out(self, decision: Decision) -> None:
        """Log a decision other than a grant, and tell a rejected turn; claims moved when it was decided."""
        if type(decision) is Reject:
            waiter = self._waiters.get(decision.turn_id)
            if waiter is not None and not waiter.done():
                waiter.set_exception(self._refusal(decision))
        word, reason = _WORDS[type(decision)], decision.reason.value
        if isinstance(decision, Hold):
            log.debug(word, program_id=decision.program_id, reason=reason)
        elif isinstance(decision, SetPriority):
            # a policy may say one of each program
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


def _refuse(why: str) -> None:
    if why:
        raise ControlRefusedError(why) if not why.startswith(NOT_THERE) else NotFoundError(why)


_WORDS = {kind: re.sub(r"(?<=[a-z])(?=[A-Z])", "_", kind.__name__).lower() for kind in get_args(Decision)}
"""What decisions are called in the log."""


def _refusal(decision: Reject) -> ThunderAgentError:
    if decision.reason is Reason.KILLED:
        return ProgramKilledError(
            f"program {decision.program_id!r} was ended by an operator; the turn was not forwarded"
        )
    if decision.reason is Reason.NO_REPLICA:
        return NoReplicaError("no replica has been usable for too long; the turn was not forwarded")
    if decision.reason is Reason.HOPELESS:
        return ProgramHopelessError(
            f"program {decision.program_id!r} was ended, because a judge expects it to fail; the turn was not forwarded"
        )
    if decision.reason is Reason.OVERDRAWN:
        return NoRoomInTimeError("there is no room before its client would give up; the turn was not forwarded")
    if decision.reason is Reason.LEAVING:
        return NoRoomInTimeError(
            f"program {decision.program_id!r} leaves its replica, and its other turns there may not end before its "
            "client would give up; the turn was not forwarded"
        )
    if decision.reason is Reason.TOO_MANY_PROGRAMS:
        return TooManyProgramsError(
            f"there are too many programs to open {decision.program_id!r}, all of which have turns; "
            "the turn was not forwarded"
        )
    return ProgramReleasedError(
        f"program {decision.program_id!r} was released while this turn waited; the turn was not forwarded"
    )
