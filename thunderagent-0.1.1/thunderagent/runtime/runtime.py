"""The single writer: takes events, calls the scheduler, carries out its decisions, wakes waiters.

Theory of operation
===================
Everything here runs on one event loop. `Runtime.lease` sends the `TurnAsk`. If the scheduler grants at once, the
lease is returned without a single await; otherwise the caller waits on a future that a later event resolves.
`leases/` defines what is asked, granted and ended, and what else the carriers of bytes may know: the runtime pushes
the replicas after each event that changes them, and answers questions, so nobody else reads the scheduler.

Nothing here knows HTTP: a trainer that calls its engines itself takes leases in the same way.
"""

# compiled: each turn passes here, four times

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from itertools import count
from math import inf
from time import monotonic
from typing import Final, NamedTuple

import structlog
from msgspec.structs import replace

from thunderagent.errors import (
    ShuttingDownError,
    StandingByError,
    ThunderAgentError,
    TooManyProgramsError,
    TurnAbortedError,
)
from thunderagent.leases import UNBOUNDED, Lease, TurnHint
from thunderagent.leases.open_lease import OpenLease
from thunderagent.programs.messages import (
    BACKPRESSURE,
    Decision,
    Event,
    Grant,
    GrantsContinued,
    GrantsSuspended,
    ModelAsked,
    ProgramHinted,
    ProgramJudged,
    ProgramLimits,
    ProgramOpened,
    ProgramReleased,
    ProgramsReleased,
    Reject,
    ReplicaDown,
    ReplicaDraining,
    ReplicaFlushed,
    ReplicaJudged,
    ReplicaRemoved,
    ReplicaTripped,
    ReplicaUp,
    ToolEnded,
    ToolStarted,
    TurnAdopted,
    TurnAsk,
    TurnDue,
    TurnEnd,
    TurnJudged,
    TurnLimited,
    least_of,
)
from thunderagent.programs.pools import Pools
from thunderagent.programs.scheduler import Scheduler
from thunderagent.programs.state.health import ReplicaState
from thunderagent.programs.state.program import Program
from thunderagent.runtime.event_log import EventLogWriter
from thunderagent.runtime.fleet import Fleet
from thunderagent.runtime.operator import Operator
from thunderagent.runtime.served_models import ServedModels
from thunderagent.runtime.writer import Observer, Writer, refusal_of

log = structlog.get_logger("thunderagent.runtime")


@dataclass(frozen=True, slots=True)
class RuntimeSettings:
    """How the runtime runs."""

    tick_s: float = 1.0
    """Longest time between two ticks; a policy may want them more often."""
    grace_s: float = 30.0
    """How long a shutdown waits for turns in flight."""
    program_limits: ProgramLimits | None = None
    """What each program may use, beside its own limits."""


class ReplicaWork(NamedTuple):
    """What a replica does, as far as turns tell: how many are in flight, and when one last had a byte."""

    turn_count: int
    heard_s: float
    is_paused: bool
    is_tripped: bool
    """Whether it gets no programs, for another reason than failing turns."""
    collapsed_ratio: float | None
    """How much its cache kept of what it was given, if it has collapsed."""


ELSEWHERE: Final = "another scheduler leads; ask that, or a gateway"

ABORTED: Final = "the trainer aborted this turn while it was held"

TIMER_SLACK_S: Final = 0.002
"""An event loop's timer may be early by a millisecond."""


class Runtime:
    """Owner of the scheduler. All methods belong to one event loop."""

    def __init__(
        self,
        scheduler: Scheduler,
        settings: RuntimeSettings | None = None,
        *,
        clock: Callable[[], float] = monotonic,
        event_log: EventLogWriter | None = None,
        make_scheduler: Callable[[], Scheduler] | None = None,
    ) -> None:
        """Start without leases; `clock` returns monotonic seconds.

        `make_scheduler` returns one like `scheduler` for each further pool of replicas; without it, all replicas are
        one pool.
        """
        self.scheduler = scheduler
        """That of the first pool, or of all."""
        self.pools = Pools(scheduler, make_scheduler)
        self.settings = settings or RuntimeSettings()
        self.now_s = clock
        self.outcome_counts: Counter[str] = Counter()
        """Number of turns by outcome."""
        self.leases_count = 0
        self.prompt_tokens_total = 0
        """Of finished turns, as far as engines reported their usage; so are the next two."""
        self.output_tokens_total = 0
        self.cached_tokens_total = 0
        self.new_turn_id: Callable[[], int] = count(1).__next__
        """Returns an id that no turn had before."""
        self._abortable_ids: set[int] = set()
        self._engine_request_ids: dict[int, str] = {}
        """By held turn, the id by which its client may abort it."""
        self._pressed: dict[str, asyncio.TimerHandle] = {}
        """Ends of the times for which replicas are granted nothing, because they said that they are full."""
        self._aborted_s: dict[str, float] = {}
        """When a trainer last aborted what ran on a replica."""
        self.turn_aborters: list[Callable[[str, str], int]] = []
        """Each ends the turns of a program that somebody carries, with the error of a code, and returns how many."""
        self._ends_as: dict[int, str] = {}
        """How turns end for which that was decided here; one that finishes meanwhile is finished."""
        """Turns replaced by another attempt, until their carrier has heard of it."""
        self._fleet = Fleet(self.pools)
        self.replicas = self._fleet.replicas
        """What others may know of the replicas."""
        limit_s = scheduler.settings.no_replica_limit_s
        self.served = ServedModels(
            self.pools, self.replicas, state_of=self._fleet.state_of, clock=clock, no_replica_limit_s=limit_s
        )
        """Which models are served where."""
        self._writer = Writer(self.pools, self._fleet, self.served, clock, event_log)
        self._waiters = self._writer.waiters
        self.dispatch: Callable[[Event], list[Decision]] = self._writer.dispatch
        """Hands one event to the scheduler and carries out its decisions."""
        self.decision_counts = self._writer.decision_counts
        """Decisions by kind and reason."""
        self.operator = Operator(self.pools, self._writer, clock)
        """What operators may request."""
        self.stands_by = False
        """Whether another scheduler leads: then nothing is granted here."""
        self.closing = False
        """Whether no new lease is granted any more."""
        self.leaving = False
        self._no_lease_left: asyncio.Event | None = None
        """Set with the end of the last lease, once somebody waits for that."""

    def __repr__(self) -> str:
        return f"<Runtime: {self.leases_count} leases, {len(self._waiters)} held, {self.scheduler!r}>"

    @property
    def why_not_ready(self) -> str:
        """Return why no turn would be served now; empty if one would."""
        if self.leaving or self.closing:
            return "shutting down"
        if self.stands_by:
            return "another scheduler leads, or none yet"
        return "" if any(scheduler.open_replicas for scheduler in self.pools.schedulers) else "no replica is up"

    @property
    def has_crashed(self) -> bool:
        """Whether the scheduler raised: its state cannot be trusted any more."""
        return self._writer.has_crashed

    @property
    def held_count(self) -> int:
        """Number of turns that wait for a lease."""
        return len(self._waiters)

    async def lease(self, ask: TurnAsk, while_held: AbstractContextManager[object] = UNBOUNDED) -> OpenLease:
        """Wait for permission to run one turn; see `LeaseSource`."""
        came_s = None
        if self.replicas.names_models and not (self.stands_by or self.served.is_plain(ask.model)):
            came_s = self.now_s()
            ask = await self._with_pool(ask, came_s, while_held)
        if self.closing or self.stands_by:
            raise ShuttingDownError("the proxy is shutting down") if self.closing else StandingByError(ELSEWHERE)
        turn_id = ask.turn_id
        if ask.supersedes_id is not None:
            self.tried_again(ask.supersedes_id)
        arrived_s = self.now_s()
        came_s = arrived_s if came_s is None else came_s
        if ask.limits is not None or self.settings.program_limits is not None or self.pools.some_partly:
            self._tell_first(ask, arrived_s)
        ask.now_s = arrived_s
        decisions = self._writer.dispatch(ask)
        if ask.hint is not None and ask.program_id is not None and ask.program_id in self.programs:
            hinted = hinting(ask.program_id, ask.hint, "", self.now_s())
            decisions = [*decisions, *self._writer.dispatch(hinted)]  # that may let this turn in
        for decision in reversed(decisions):
            if type(decision) is Grant and decision.turn_id == turn_id:
                grant, held_s = decision, arrived_s - came_s
                break
            if type(decision) is Reject and decision.turn_id == turn_id:
                self.outcome_counts["rejected"] += 1
                raise refusal_of(decision, self.pools)
        else:
            grant = await self._held(ask, arrived_s, while_held)
            held_s = self.now_s() - came_s
        self.leases_count += 1
        turn = self.pools.turns.get(turn_id)
        program = turn.program if turn is not None else None
        lease = Lease(
            turn_id,
            grant.program_id,
            program.generation if program is not None else 0,
            grant.replica_id,
            self._fleet.urls.get(grant.replica_id, ""),
            grant.engine_priority,
            grant.reason,
            held_s,
        )
        return OpenLease(self, lease)

    async def _held(self, ask: TurnAsk, arrived_s: float, while_held: AbstractContextManager[object]) -> Grant:
        """Wait for a turn's grant."""
        turn_id = ask.turn_id
        waiter = self._waiter_for(ask)
        timer = self._timer_for(turn_id, arrived_s) if ask.patience_s is not None else None
        try:
            with while_held:
                return await waiter
        except asyncio.CancelledError:
            self.outcome_counts[self._decided_or("abandoned", turn_id)] += 1
            self._writer.dispatch(TurnEnd(turn_id, ask.program_id, outcome="abandoned", now_s=self.now_s()))
            raise
        except ThunderAgentError as error:
            self.outcome_counts["aborted" if isinstance(error, TurnAbortedError) else "rejected"] += 1
            self._writer.dispatch(TurnJudged(self.now_s(), turn_id, error.turn_verdict, error.code))
            # at a shutdown the scheduler still holds it
            self._writer.dispatch(TurnEnd(turn_id, ask.program_id, outcome="abandoned", now_s=self.now_s()))
            raise
        finally:
            self._waiters.pop(turn_id, None)
            self._abortable_ids.discard(turn_id)
            self._engine_request_ids.pop(turn_id, None)
            if timer is not None:
                timer.cancel()
            del waiter  # otherwise a rejection in it, whose traceback holds this frame, would wait for a collection

    def _waiter_for(self, ask: TurnAsk) -> asyncio.Future[Grant]:
        """Begin to wait for a lease, by which names the wait may be aborted."""
        waiter: asyncio.Future[Grant] = asyncio.get_running_loop().create_future()
        self._waiters[ask.turn_id] = waiter
        if ask.abortable:
            self._abortable_ids.add(ask.turn_id)
        if ask.engine_request_id:
            self._engine_request_ids[ask.turn_id] = ask.engine_request_id
        return waiter

    def _tell_first(self, ask: TurnAsk, now_s: float) -> None:
        """Report what limits an arriving turn, and its model if only some replicas of its pool serve that."""
        self._tell_limits(ask, now_s)
        if ask.pinned_replica_id is None and self.pools.some_partly and (name := self.pools.partly_name(ask.model)):
            self._writer.dispatch(ModelAsked(now_s, ask.turn_id, name))

    def _tell_limits(self, ask: TurnAsk, now_s: float) -> None:
        """Report what the program of a turn that comes next may use, if anything limits it."""
        limits = ask.limits
        if self.settings.program_limits is not None:
            limits = least_of(self.settings.program_limits, limits)
        if limits is not None and ask.program_id is not None:
            self._writer.dispatch(TurnLimited(now_s, ask.turn_id, limits))

    async def _with_pool(self, ask: TurnAsk, came_s: float, while_held: AbstractContextManager[object]) -> TurnAsk:
        """Find the pool of a turn; return the turn with the patience that its client has left after that."""
        await self.served.find_pool(ask, while_held)
        if ask.patience_s is None:
            return ask
        return replace(ask, patience_s=max(0.0, ask.patience_s - (self.now_s() - came_s)))

    @property
    def programs(self) -> Mapping[str, Program]:
        """Return all programs, each once."""
        return self.pools.programs

    def _timer_for(self, turn_id: int, now_s: float) -> asyncio.TimerHandle | None:
        """Set a timer that lets a held turn in exactly when it is due, not at the next tick."""
        turn = self.pools.turns.get(turn_id)
        due_s = self.scheduler.deadlines.due_s_of(turn) if turn is not None else inf
        if due_s == inf:
            return None
        delay_s = max(0.0, due_s - now_s) + TIMER_SLACK_S
        return asyncio.get_running_loop().call_later(
            delay_s, lambda: self._writer.dispatch(TurnDue(self.now_s(), turn_id))
        )

    def abort_held(self, replica_id: str | None = None) -> int:
        """End the wait of held turns that may be aborted, with `TurnAbortedError`; return their number.

        With a `replica_id`, only of turns of its pool whose program was there last or nowhere yet, or that must run
        there.
        """
        aborted_count = 0
        turns = self.pools.turns if replica_id is None else self.pools.of_replica(replica_id).scheduler.turns
        for turn_id in sorted(self._abortable_ids):
            waiter, turn = self._waiters[turn_id], turns.get(turn_id)
            if waiter.done() or turn is None:
                continue
            home_id = turn.program.replica_id if turn.program is not None else turn.pinned_replica_id
            if replica_id is None or home_id in (None, replica_id):
                waiter.set_exception(TurnAbortedError(ABORTED))
                aborted_count += 1
        return aborted_count

    def replica_aborted(self, replica_id: str) -> None:
        """Record that a trainer told a replica what may abort turns there, all or some of them."""
        self._aborted_s[replica_id] = self.now_s()
        self._fleet.aborted(replica_id)

    def abort_named(self, engine_request_ids: Collection[str]) -> int:
        """End the wait of the held turns that engines would know by these ids, as above; return their number."""
        named = [turn_id for turn_id, name in self._engine_request_ids.items() if name in engine_request_ids]
        waiting = [waiter for waiter in map(self._waiters.__getitem__, named) if not waiter.done()]
        for waiter in waiting:
            waiter.set_exception(TurnAbortedError(ABORTED))
        return len(waiting)

    def abort_turns(self, program_id: str, code: str) -> int:
        """Abort all turns of a program, at their engines, too; return how many. End it at once after that."""
        if (program := self.programs.get(program_id)) is not None:
            self._ends_as.update(dict.fromkeys(program.in_flight, "aborted"))
        return sum([abort(program_id, code) for abort in self.turn_aborters])

    def unanswered_count(self, replica_ids: Collection[str], since_s: float) -> int:
        """Count turns on these replicas that were granted since then and have no first byte yet."""
        return sum(
            turn.account_id in replica_ids and turn.started_s is None and turn.granted_s >= since_s
            for turn in self.pools.turns.values()
        )

    def open_program(
        self, program_id: str, group_id: str = "", parent_id: str = "", tenant: str = "", program_class: str = ""
    ) -> bool:
        """Open a program before its first turn; return False if it already lives. Raises `TooManyProgramsError`."""
        if self.stands_by:
            raise StandingByError(ELSEWHERE)
        if program_id in self.programs:
            return False
        self._writer.dispatch(ProgramOpened(self.now_s(), program_id, group_id, parent_id, tenant, program_class))
        if program_id not in self.programs:
            raise TooManyProgramsError(
                f"the limit of programs is reached, and all of them have turns, so {program_id!r} was not opened"
            )
        return True

    def is_announced(self, program_id: str) -> bool:
        """Return whether a live program has had no turn yet."""
        of_program = self.pools.of_program(program_id)
        return bool(of_program) and all(
            pool.scheduler.programs[program_id].place is pool.scheduler.book.announced for pool in of_program
        )

    def observe(self, observer: Observer, *about: type) -> Callable[[], None]:
        """Call `observer` with each event and its decisions, after these were carried out.

        With `about`, only with events of these kinds, or with such a decision. Return an idempotent function that ends
        that.
        """
        return self._writer.observers.add(observer, about)

    # --- what whoever carries bytes may ask; see `LeaseSource`

    def home_of(self, program_id: str, model: str = "") -> str | None:
        """Return the replica of a program, if that is up."""
        return self.served.home_of(program_id, model)

    def ids_serving(self, model: str) -> Collection[str]:
        """Return the replicas of the pool that serves a model. Raises `UnknownModelError`."""
        return self.served.pool_for(model).scheduler.replicas.keys()

    def tenant_of(self, program_id: str) -> str | None:
        """Return a live program's tenant; None if there is no such program."""
        program = self.programs.get(program_id)
        return program.tenant if program is not None else None

    def claim_tokens(self, program_id: str) -> int:
        """Return what a program claims, or would if it were let in; 0 if there is none of that id."""
        program = self.programs.get(program_id)
        return program.claim_tokens if program is not None else 0

    def lives(self, program_id: str, generation: int | None) -> bool:
        """Return whether this incarnation of a program still lives; None is any."""
        if self.pools.several:
            return any(generation in (None, program.generation) for program in self.pools.incarnations(program_id))
        program = self.pools.programs.get(program_id)
        return program is not None and (generation is None or program.generation == generation)

    def turns_count(self, replica_id: str) -> int:
        """Return how many turns have leases on a replica."""
        replica = self.pools.replicas.get(replica_id)
        return replica.account.turn_count if replica is not None else 0

    def work_of(self, replica_id: str) -> ReplicaWork | None:
        """Return what a verdict on a replica needs of the scheduler; None if it is unknown."""
        replica = self.pools.replicas.get(replica_id)
        if replica is None:
            return None
        return ReplicaWork(
            replica.account.turn_count if replica.up else 0,
            replica.account.heard_s,
            is_paused=any(cause != BACKPRESSURE for cause in replica.suspended_for),
            is_tripped=replica.tripped and not replica.verdict.holds(ReplicaState.FAILING),
            collapsed_ratio=replica.keeping.found_ratio if replica.up and replica.keeping.has_collapsed else None,
        )

    def has_begun(self, replica_id: str) -> bool:
        """Return whether a turn on a replica has begun its answer. Cost: O(turns)."""
        turns = self.pools.of_replica(replica_id).scheduler.turns.values()
        return any(turn.account_id == replica_id and turn.started_s is not None for turn in turns)

    def longest_prefill_s(self, replica_id: str) -> float:
        """Return how long the longest prompt on a replica should take whose answer has not begun. Cost: O(turns)."""
        scheduler = self.pools.of_replica(replica_id).scheduler
        waiting = [
            turn for turn in scheduler.turns.values() if turn.account_id == replica_id and turn.started_s is None
        ]
        uncached = (turn.prompt_tokens - max(turn.resident_tokens, turn.kept_tokens) for turn in waiting)
        return max(0, max(uncached, default=0)) * scheduler.knowledge.prices.of(replica_id).decided_token_s

    def aborted_ago_s(self, replica_id: str) -> float:
        """Return how long ago a trainer aborted what runs on a replica; infinite if never."""
        return self.now_s() - self._aborted_s.get(replica_id, -inf)

    def pending_encode_count(self, replica_id: str) -> int | None:
        """Return how many images a replica has to encode; None if unknown."""
        replica = self.pools.replicas.get(replica_id)
        return replica.account.pending_encode_count if replica is not None else None

    # --- what becomes of a turn with a lease; see `LeaseKeeper`

    def tried_again(self, turn_id: int) -> None:
        """Record that the next attempt replaces a turn: it ends as superseded, if it has not ended yet."""
        if turn_id in self.pools.turns:
            self._ends_as[turn_id] = "superseded"

    def ended(self, end: TurnEnd) -> None:
        """Take a lease back."""
        self.count_end(end)
        self.leases_count -= 1
        if self._no_lease_left is not None and not self.leases_count:
            self._no_lease_left.set()
        if end.verdict:
            self._writer.dispatch(TurnJudged(self.now_s(), end.turn_id, end.verdict, end.cause))
        end.now_s = self.now_s()
        self._writer.dispatch(end)

    def count_end(self, end: TurnEnd) -> None:
        """Count how a turn ended, and its usage; call it directly for a turn without a lease here."""
        outcome: str = "errored" if end.is_error else end.outcome
        outcome = self._decided_or(outcome, end.turn_id) if self._ends_as else outcome
        self.outcome_counts[outcome] += 1
        if end.outcome == "finished":
            self.prompt_tokens_total += end.prompt_tokens or 0
            self.output_tokens_total += end.output_tokens or 0
            self.cached_tokens_total += end.cached_tokens or 0

    def adopt(self, ask: TurnAsk, replica_id: str) -> bool:
        """Count a turn that already runs on a replica by another scheduler's lease, like one of this scheduler.

        Return False, without counting, if nothing is granted there now.
        """
        now_s = ask.now_s = self.now_s()
        self._tell_limits(ask, now_s)
        self._writer.dispatch(TurnAdopted(now_s, ask.turn_id, replica_id, ask))
        adopted = ask.turn_id in self.pools.turns
        if adopted:
            self.leases_count += 1
        return adopted

    # --- what others say

    def release(self, program_id: str, generation: int | None = None, outcome: str = "") -> bool:
        """End a program; return False if there is none of that id and generation. Idempotent.

        `outcome` says how it ended: `success`, `failure`, or empty.
        """
        lives = program_id in self.pools.programs if generation is None else self.lives(program_id, generation)
        if lives or self._is_refused(program_id):
            self._writer.dispatch(ProgramReleased(self.now_s(), program_id, generation, outcome))
        return lives

    def program_judged(
        self, program_id: str, generation: int, turn_count: int, will_succeed: bool, confidence_ratio: float
    ) -> None:
        """Report a judge's verdict on a program, as in `ProgramJudged`; does nothing if it is gone."""
        if self.lives(program_id, generation):
            self._writer.dispatch(
                ProgramJudged(self.now_s(), program_id, generation, turn_count, will_succeed, confidence_ratio)
            )

    def release_together(self, program_ids: Sequence[str]) -> list[str]:
        """End several programs at once, so that none of them gets another's room; return those that lived."""
        live_ids = [program_id for program_id in program_ids if program_id in self.programs]
        known_ids = [each for each in program_ids if each in self.programs or self._is_refused(each)]
        if known_ids:
            self._writer.dispatch(ProgramsReleased(self.now_s(), tuple(known_ids)))
        return live_ids

    def _is_refused(self, program_id: str) -> bool:
        return any(program_id in scheduler.refused_ids for scheduler in self.pools.schedulers)

    def tool_started(self, program_id: str, tool: str = "", *, inferred: bool = False) -> bool:
        """Report that a program's tool begins now, `inferred` if not by its client; return False if it is unknown."""
        self._writer.dispatch(ToolStarted(self.now_s(), program_id, tool, inferred))
        return program_id in self.programs

    def tool_ended(self, program_id: str, *, inferred: bool = False) -> bool:
        """Report that a program's tool ended, `inferred` if not by its client; return False without such a program."""
        self._writer.dispatch(ToolEnded(self.now_s(), program_id, inferred))
        return program_id in self.programs

    def hint(self, program_id: str, hint: TurnHint, branch_id: str = "") -> bool:
        """Report a client's hint on a program's next turn; return False without such a program."""
        known = program_id in self.programs
        if known:
            self._writer.dispatch(hinting(program_id, hint, branch_id, self.now_s()))
        return known

    def replica_at(self, replica_id: str, url: str) -> None:
        """Set a replica's URL, which its leases carry."""
        self._fleet.urls[replica_id] = url
        self.served.replica_known(replica_id)

    def replica_up(self, replica_id: str, capacity_tokens: int | None = None) -> None:
        """Report that a replica may be used, and its capacity if known."""
        if self.pools.is_strange(replica_id):
            models = self.pools.listing_of(replica_id) or ()
            self._writer.dispatch(ReplicaRemoved(self.now_s(), replica_id))
            self.pools.forget(replica_id)
            self.pools.listed(replica_id, models)
            self.served.changed()
        elif self.pools.listing_of(replica_id) is None:
            self.served.listed(replica_id, ())
        self._writer.dispatch(ReplicaUp(self.now_s(), replica_id, capacity_tokens))

    def replica_down(self, replica_id: str, state: ReplicaState = ReplicaState.DOWN, why: str = "") -> None:
        """Report that a replica is down, or so silent or frozen that it counts as that."""
        if why:
            self.replica_judged(replica_id, state, why)
        self._writer.dispatch(ReplicaDown(self.now_s(), replica_id))

    def replica_lost(self, replica_id: str, why: str, state: ReplicaState = ReplicaState.DOWN) -> None:
        """Report that a replica is down, and that nothing will come of what ran there: its next incarnation is new."""
        if replica_id in self.pools.replicas:
            self._fleet.incarnations[replica_id] += 1
        self.replica_down(replica_id, state, why)

    def replica_judged(self, replica_id: str, state: ReplicaState, why: str) -> None:
        """Report a cause for the verdict on a replica; an empty reason ends it."""
        self._writer.dispatch(ReplicaJudged(self.now_s(), replica_id, state, why))

    def heard_ago_s(self, replica_id: str) -> float:
        """Return how long ago a turn on a replica last had a byte; infinite if none ever had."""
        replica = self.pools.replicas.get(replica_id)
        return inf if replica is None else self.now_s() - replica.account.heard_s

    def replica_draining(self, replica_id: str) -> None:
        """Report that a replica gets nothing new."""
        self._writer.dispatch(ReplicaDraining(self.now_s(), replica_id))

    def replica_flushed(self, replica_id: str) -> None:
        """Report that a replica flushed its cache for later turns."""
        self._writer.dispatch(ReplicaFlushed(self.now_s(), replica_id))

    def suspend_grants(self, cause: str, replica_id: str | None = None) -> None:
        """Grant nothing on a replica (None: on any) until the cause is over."""
        self._writer.dispatch(GrantsSuspended(self.now_s(), cause, replica_id))

    def continue_grants(self, cause: str, replica_id: str | None = None) -> None:
        """End a cause for granting nothing; does nothing if it does not hold."""
        self._writer.dispatch(GrantsContinued(self.now_s(), cause, replica_id))

    def replica_removed(self, replica_id: str) -> None:
        """Report that a replica is gone for good."""
        self._fleet.urls.pop(replica_id, None)
        self._aborted_s.pop(replica_id, None)
        self._fleet.aborts_counts.pop(replica_id, None)
        self._fleet.incarnations.pop(replica_id, None)
        self._writer.dispatch(ReplicaRemoved(self.now_s(), replica_id))
        self.served.forget(replica_id)

    def replica_tripped(self, replica_id: str, *, tripped: bool, why: str = "") -> None:
        """Report that a replica that is up fails turn after turn, or that it may be tried again."""
        if tripped and why:
            self.replica_judged(replica_id, ReplicaState.FAILING, why)
        self._writer.dispatch(ReplicaTripped(self.now_s(), replica_id, tripped))

    def replica_recovered(self, replica_id: str) -> None:
        """Report that a replica that was tripped has answered a turn well: it is no longer failing."""
        if replica_id in self.pools.replicas:
            self.replica_judged(replica_id, ReplicaState.FAILING, "")

    def replica_pressed(self, replica_id: str, for_s: float, why: str) -> None:
        """Report that a replica says it is full: it is granted nothing for that time."""
        if replica_id not in self.pools.replicas or self.closing:
            return
        timer = self._pressed.pop(replica_id, None)
        if timer is not None:
            timer.cancel()
        self.replica_judged(replica_id, ReplicaState.BACKPRESSURE, why)
        if timer is None:
            self.suspend_grants(BACKPRESSURE, replica_id)
        loop = asyncio.get_running_loop()
        self._pressed[replica_id] = loop.call_later(for_s, self._ease, replica_id)

    def _ease(self, replica_id: str) -> None:
        self._pressed.pop(replica_id, None)
        if replica_id in self.pools.replicas and not self.closing:
            self.continue_grants(BACKPRESSURE, replica_id)

    async def run(self) -> None:
        """Tick until cancelled, or until the scheduler or its policy raised: then raise that, to end the process."""
        await self._writer.run(self.settings.tick_s)

    def _decided_or(self, outcome: str, turn_id: int) -> str:
        """Return the outcome of a turn: superseded if it was replaced, aborted if it was ended here; or `outcome`."""
        decided = self._ends_as.pop(turn_id, outcome)
        return outcome if outcome == "finished" else decided

    async def close(self, *, waits: bool = True) -> None:
        """Grant nothing more, reject waiting turns, let turns in flight end within the grace period.

        Without `waits` they go on elsewhere: gateways carry them, and report their end to another scheduler.
        """
        self.closing = True
        for timer in self._pressed.values():
            timer.cancel()
        self.served.close()
        for waiter in self._waiters.values():
            if not waiter.done():
                waiter.set_exception(ShuttingDownError("the proxy is shutting down; the turn was not forwarded"))
        await asyncio.sleep(0)  # a turn granted just now begins its lease
        if waits and self.leases_count:
            self._no_lease_left = self._no_lease_left or asyncio.Event()
            self._no_lease_left.clear()
            try:
                async with asyncio.timeout(self.settings.grace_s):
                    await self._no_lease_left.wait()
            except TimeoutError:
                log.warning("grace_period_over", leases_count=self.leases_count, grace_s=self.settings.grace_s)
        self._writer.flush()


# --- Requests as events


def hinting(program_id: str, hint: TurnHint, branch_id: str, now_s: float) -> ProgramHinted:
    """Return the event of a client's hint."""
    return ProgramHinted(now_s, program_id, hint.next_turn_in_s, hint.confidence_ratio, hint.keep, branch_id)
