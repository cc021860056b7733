"""Replicas come, go, fail, are polled, and suspend grants."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final

from thunderagent.programs.handlers.turns import Anonymous
from thunderagent.programs.messages import (
    BACKPRESSURE,
    EncodesPolled,
    GrantsContinued,
    GrantsSuspended,
    KnowledgeLoaded,
    ModelAsked,
    ModelServed,
    Reason,
    ReplicaDown,
    ReplicaDraining,
    ReplicaFlushed,
    ReplicaJudged,
    ReplicaPolled,
    ReplicaRemoved,
    ReplicaTripped,
    ReplicaUp,
    ResidencyReported,
    TierPolled,
    TurnLimited,
    WorkPolled,
)
from thunderagent.programs.policy import Moment
from thunderagent.programs.rules.tenants import Tenants
from thunderagent.programs.state.health import KEEPING_USED_RATIO, STATES, Keeping, ReplicaState
from thunderagent.programs.state.program import Kind
from thunderagent.programs.state.replica import Replica
from thunderagent.programs.transitions import Core

PROMPT_S: Final = 0.25
"""Counters that are older than this cannot be compared with what the scheduler saw."""
_NOT_UP = (ReplicaState.DOWN, ReplicaState.SILENT, ReplicaState.FROZEN)

REMOVED_COUNT: Final = 1000
"""How many removed replicas are remembered."""


class Fleet:
    """Handles news of replicas.

    Programs leave a replica that is down at once, and one that drains or is tripped when their turns in flight end.
    While grants are suspended on a replica (its engine is paused, sleeps, or gets new weights), no policy sees it and
    no limit takes anything there. Turns that were held in place get their leases when grants go on.
    """

    def __init__(self, core: Core, anonymous: Anonymous, tenants: Tenants | None) -> None:
        """Work on the parts of `core`."""
        self._core = core
        self._anonymous = anonymous
        self._tenants = tenants
        self._removed_ids: dict[str, None] = {}  # removed last: late news of one does not bring it back

    def handlers(self) -> dict[type[Any], Callable[[Any], Moment | None]]:
        """Return the handler of each event type; it returns why a balance is due, or None."""
        return {
            KnowledgeLoaded: self._knowledge_loaded,
            ReplicaUp: self._replica_up,
            ReplicaDown: self._replica_down,
            ReplicaDraining: self._replica_draining,
            ReplicaRemoved: self._replica_removed,
            GrantsSuspended: self._grants_suspended,
            GrantsContinued: self._grants_continued,
            ReplicaFlushed: self._replica_flushed,
            ReplicaTripped: self._replica_tripped,
            ReplicaJudged: self._replica_judged,
            ModelServed: self._model_served,
            ModelAsked: self._model_asked,
            TurnLimited: self._turn_limited,
            ReplicaPolled: self._replica_polled,
            TierPolled: self._tier_polled,
            WorkPolled: self._work_polled,
            EncodesPolled: self._encodes_polled,
            ResidencyReported: self._residency_reported,
        }

    def _known_or_new(self, replica_id: str) -> Replica | None:
        """Return a replica, a new one if there is none; None if it was removed, because its news are late."""
        book = self._core.book
        replica = book.replicas.get(replica_id)
        if replica is None and replica_id not in self._removed_ids:
            replica = book.open_replica(replica_id)
            self._core.knowledge.replica_opened(replica_id, book.now_s)
            self._take_correction(replica)
        return replica

    def _take_correction(self, replica: Replica) -> bool:
        """Apply the learned capacity of a replica; return whether it changed."""
        account, ratio = replica.account, self._core.knowledge.corrections[replica.replica_id].ratio
        if ratio == account.capacity_ratio:
            return False
        self._core.book.touch(replica).set_limit(account.capacity_tokens, ratio)
        return True

    def _knowledge_loaded(self, event: KnowledgeLoaded) -> Moment | None:
        core, book = self._core, self._core.book
        core.knowledge.adopt(event.learned)
        if core.policy.order is not None and event.learned.lengths is not None:
            core.policy.order.adopt(event.learned.lengths)
        changed = [replica for replica in book.replicas.values() if self._take_correction(replica)]
        for replica in changed:
            book.changes(replica)
        return Moment.REPLICAS_CHANGED if changed else None

    def _replicas_changed(self) -> Moment:
        """Take in which replicas are open and grant."""
        core, book = self._core, self._core.book
        self._assume_sizes()
        before = book.open_replicas, book.granting_replicas
        book.open_replicas = [replica for replica in book.replicas.values() if replica.open_to_programs]
        book.granting_replicas = [replica for replica in book.open_replicas if replica.grants]
        if book.rooms is not None:
            book.rooms.set_granting(book.granting_replicas)
        if self._tenants is not None:
            self._tenants.set_granting(replica.replica_id for replica in book.granting_replicas)
        core.routing.replicas_changed(core)
        core.limits.replicas_changed()
        self._anonymous.grant_held()
        if book.granting_replicas:
            core.families.look_at_all()
        others = (book.open_replicas, book.granting_replicas) != before
        if others:
            self._reconsider_marks()
            for program in book.queue.with_turns():
                core.refresh_hold_reason(program)
        return Moment.REPLICAS_CHANGED

    def _reconsider_marks(self) -> None:
        """Unmark programs that have nowhere else to go any more. Cost: O(active programs)."""
        replicas = self._core.book.replicas.values()
        for program in [program for replica in replicas for program in replica.programs.values()]:
            if program.place.kind is Kind.LEAVING:
                self._core.reconsider(program)

    def _set_health(self, replica: Replica, *, up: bool, draining: bool) -> None:
        replica.up, replica.draining = up, draining
        self._core.book.set_usable(replica)

    # --- up and down ------------------------------------------------------------------------------------------------

    def _replica_up(self, event: ReplicaUp) -> Moment | None:
        self._removed_ids.pop(event.replica_id, None)
        replica = self._known_or_new(event.replica_id)
        assert replica is not None, "one that is up was not removed"
        grown = event.capacity_tokens not in (None, replica.account.capacity_tokens)
        if event.capacity_tokens is not None and grown:
            self._set_capacity(replica, event.capacity_tokens)
        verdict, now_s = replica.verdict, self._core.book.now_s
        verdict.end_all(now_s, *_NOT_UP, ReplicaState.DRAINING)
        if grown or not replica.up or replica.draining:
            self._set_health(replica, up=True, draining=False)
            self._end_marks(replica, Reason.REPLICA_DRAINING)
            return self._replicas_changed()
        return None

    def _replica_down(self, event: ReplicaDown) -> Moment | None:
        replica = self._known_or_new(event.replica_id)
        if replica is not None:
            self._empty(replica, Reason.REPLICA_DOWN)
            verdict, now_s = replica.verdict, self._core.book.now_s
            if not any(verdict.holds(state) for state in _NOT_UP):
                verdict.set(ReplicaState.DOWN, "", now_s)
            return self._replicas_changed()
        return None

    def _replica_judged(self, event: ReplicaJudged) -> None:
        """Note a cause for the verdict; what it does to turns follows as an event of its own."""
        replica, state = self._known_or_new(event.replica_id), STATES.get(event.state)
        if replica is None or state is None:
            return
        if state is ReplicaState.COLLAPSED:
            replica.keeping.begin_anew()
        if event.reason:
            replica.verdict.set(state, event.reason, self._core.book.now_s)
        else:
            replica.verdict.end(state, self._core.book.now_s)

    def _replica_removed(self, event: ReplicaRemoved) -> Moment | None:
        book = self._core.book
        replica = book.replicas.get(event.replica_id)
        if replica is not None:
            self._empty(replica, Reason.REPLICA_REMOVED)
            del book.replicas[event.replica_id]
            book.changed_replicas.pop(event.replica_id, None)
            self._core.knowledge.replica_removed(event.replica_id)
        book.ledger.close(event.replica_id)
        self._removed_ids[event.replica_id] = None
        if len(self._removed_ids) > REMOVED_COUNT:
            del self._removed_ids[next(iter(self._removed_ids))]
        if replica is not None:
            return self._replicas_changed()
        return None

    def _empty(self, replica: Replica, reason: Reason) -> None:
        """Take everything off a lost replica."""
        core, book = self._core, self._core.book
        replica.tripped = False
        self._set_health(replica, up=False, draining=False)
        for program in list(replica.programs.values()):
            core.lose_replica(program, reason)
        core.knowledge.prices.interrupted(replica.replica_id, book.now_s)
        account = replica.account
        for turn in [turn for turn in book.turns.values() if turn.account_id == replica.replica_id]:
            turn.account_id = None
        account.claim_other(-account.other_tokens)
        account.turn_count = 0
        account.pending_encode_count = None  # after a restart it has none; it reports that again
        replica.residency.clear()
        replica.own_causes.clear()  # a restarted engine is no longer paused
        replica.keeping = Keeping()  # and its cache may be another one, or off
        over = (ReplicaState.FAILING, ReplicaState.COLLAPSED, ReplicaState.DRAINING, ReplicaState.BACKPRESSURE)
        replica.verdict.end_all(book.now_s, *over)
        self._judge_suspension(replica)
        for turn in [turn for turn in book.anonymous_held.values() if turn.pinned_replica_id == replica.replica_id]:
            core.reject(turn, Reason.NO_REPLICA)

    def _replica_draining(self, event: ReplicaDraining) -> Moment | None:
        replica = self._known_or_new(event.replica_id)
        if replica is not None:
            self._set_health(replica, up=replica.up, draining=True)
            replica.verdict.set(ReplicaState.DRAINING, "", self._core.book.now_s)
            self._send_away(replica, Reason.REPLICA_DRAINING)
            return self._replicas_changed()
        return None

    def _replica_tripped(self, event: ReplicaTripped) -> Moment | None:
        replica = self._core.book.replicas.get(event.replica_id)
        if replica is None or not replica.up or replica.tripped == event.tripped:
            return None
        replica.tripped = event.tripped
        self._set_health(replica, up=replica.up, draining=replica.draining)
        verdict, now_s = replica.verdict, self._core.book.now_s
        if replica.tripped:
            if not (verdict.holds(ReplicaState.FAILING) or verdict.holds(ReplicaState.COLLAPSED)):
                verdict.set(ReplicaState.FAILING, "turn after turn", now_s)
            self._send_away(replica, Reason.REPLICA_TRIPPED)
        else:
            verdict.end(ReplicaState.COLLAPSED, now_s)  # it is failing until a turn there ends well
            self._end_marks(replica, Reason.REPLICA_TRIPPED)
        return self._replicas_changed()

    def _send_away(self, replica: Replica, reason: Reason) -> None:
        """Pause the programs of a replica that gets nothing new, each once it has no turn in flight."""
        for program in list(replica.programs.values()):
            if program.in_flight:
                self._core.mark(program, reason)
            else:
                self._core.pause(program, reason)

    def _end_marks(self, replica: Replica, cause: Reason) -> None:
        """Keep the programs of a replica that were to leave it for a cause that is over."""
        for program in list(replica.programs.values()):
            if cause in program.leaves_for:
                self._core.unmark(program, Reason.STAYS, cause=cause)

    # --- suspended --------------------------------------------------------------------------------------------------

    def _grants_suspended(self, event: GrantsSuspended) -> Moment | None:
        book = self._core.book
        replica = self._known_or_new(event.replica_id) if event.replica_id is not None else None
        if replica is not None:
            replica.own_causes[event.cause] = None
        elif event.replica_id is None:
            book.suspended_for[event.cause] = None
        for each in book.meant(event.replica_id):
            book.set_usable(each)
            self._judge_suspension(each)
            if event.cause != BACKPRESSURE:
                self._learn_nothing(each)
        return self._replicas_changed()

    def _grants_continued(self, event: GrantsContinued) -> Moment | None:
        """End a cause on all replicas or on one; a replica's own cause stands when the same one ends for all."""
        book = self._core.book
        suspended = [replica for replica in book.meant(event.replica_id) if replica.suspended_for]
        if event.replica_id is None:
            book.suspended_for.pop(event.cause, None)
        for replica in suspended if event.replica_id is not None else ():
            replica.own_causes.pop(event.cause, None)
        for replica in suspended:
            self._judge_suspension(replica)
            if not replica.suspended_for:
                book.set_usable(replica)
                self._continue_programs(replica)
        return self._replicas_changed()

    def _judge_suspension(self, replica: Replica) -> None:
        """Note for the verdict what suspends a replica; backpressure is a state of its own."""
        verdict, now_s = replica.verdict, self._core.book.now_s
        causes = [cause for cause in replica.suspended_for if cause != BACKPRESSURE]
        if causes:
            verdict.set(ReplicaState.SUSPENDED, ", ".join(causes), now_s)
        else:
            verdict.end(ReplicaState.SUSPENDED, now_s)
        if BACKPRESSURE not in replica.own_causes:
            verdict.end(ReplicaState.BACKPRESSURE, now_s)
        elif not verdict.holds(ReplicaState.BACKPRESSURE):
            verdict.set(ReplicaState.BACKPRESSURE, "it says that it is full", now_s)

    def _continue_programs(self, replica: Replica) -> None:
        """Grant what was held in place on a replica, longest wait first, and start the idle limit again."""
        held = [program for program in replica.programs.values() if program.held]
        for program in sorted(held, key=lambda program: program.waiting_since_s):
            if program.place.kind is Kind.LEAVING:
                program.hold_reason = Reason.LEAVING
                self._core.book.resize(program)
            else:
                self._core.go_on(program, replica)
        for program in replica.programs.values():
            if program.place.kind is Kind.ACTING:
                self._core.limits.go_on(program)

    def _replica_flushed(self, event: ReplicaFlushed) -> None:
        replica = self._core.book.replicas.get(event.replica_id)
        if replica is None:  # removed while it was told to
            return
        replica.residency.clear_idle()
        replica.keeping.begin_anew()
        replica.flushed_s = self._core.book.now_s
        self._learn_nothing(replica)

    def _learn_nothing(self, replica: Replica) -> None:
        """Learn nothing from turns in flight there: their times and hits are not the engine's usual ones."""
        for program in replica.programs.values():
            for turn in program.in_flight.values():
                turn.unrepresentative = True

    # --- models -----------------------------------------------------------------------------------------------------

    def _model_served(self, event: ModelServed) -> Moment:
        self._core.routing.model_served(self._core, event.model, event.replica_ids)
        return self._replicas_changed()

    def _turn_limited(self, event: TurnLimited) -> None:
        self._core.program_limits.ask(event.turn_id, event.limits)

    def _model_asked(self, event: ModelAsked) -> None:
        self._core.routing.routes.ask(event.turn_id, event.model)

    # --- polled -----------------------------------------------------------------------------------------------------

    def _replica_polled(self, event: ReplicaPolled) -> Moment | None:
        replica = self._known_or_new(event.replica_id)
        if replica is None:
            return None
        account = replica.account
        if event.kv_used_ratio is not None:
            account.kv_used_ratio = event.kv_used_ratio
        if event.engine_waiting_count is not None:
            account.engine_waiting_count = event.engine_waiting_count
        if event.hit_ratio is not None:
            account.hit_ratio = event.hit_ratio
        if event.preemption_count or (account.kv_used_ratio or 0.0) >= KEEPING_USED_RATIO:
            replica.keeping.pressed(self._core.book.now_s)
        if self._core.claim_rules.adapt_capacity:
            self._learn_from_poll(replica, event)
        if event.capacity_tokens is not None and event.capacity_tokens != account.capacity_tokens:
            self._set_capacity(replica, event.capacity_tokens)
            if replica.open_to_programs:
                return self._replicas_changed()
        return None

    def _learn_from_poll(self, replica: Replica, event: ReplicaPolled) -> None:
        """Learn from a poll what memory was lost."""
        account, now_s = replica.account, self._core.book.now_s
        correction = self._core.knowledge.corrections[replica.replica_id]
        if event.query_tokens is None or (event.query_tokens and event.hit_ratio is None):
            correction.polled(None, asked_s=now_s - event.age_s, now_s=now_s)
        elif not replica.tells_cached or replica.replica_id in self._core.knowledge.tiers.by_replica:
            hit_tokens = int((event.hit_ratio or 0.0) * event.query_tokens)
            correction.polled(hit_tokens, asked_s=now_s - event.age_s, now_s=now_s)
            correction.computed(event.query_tokens - hit_tokens)
        if event.preemption_count:
            mean_tokens = account.reasoning_tokens // max(1, account.reasoning_count)
            correction.preempted(event.preemption_count * mean_tokens)

    def _tier_polled(self, event: TierPolled) -> None:
        replica = self._known_or_new(event.replica_id)
        if replica is None:
            return
        knowledge, counts = self._core.knowledge, (event.query_tokens, event.hit_tokens)
        if knowledge.tiers.polled(replica.replica_id, *counts, tells_cached=replica.tells_cached):
            # What a turn's usage calls cached may come from the tier from now on: the pool's counters show its losses.
            knowledge.corrections[replica.replica_id].follow_counters()

    def _work_polled(self, event: WorkPolled) -> None:
        replica = self._core.book.replicas.get(event.replica_id)
        if replica is None:
            return
        self._core.book.touch(replica)  # its integrals are up to date now
        self._core.knowledge.prices.work_polled(
            event.replica_id,
            replica.account.busy_s,
            event.computed_tokens,
            event.generated_tokens,
            event.iteration_count,
            is_whole=event.age_s <= PROMPT_S and not event.preemption_count,
        )

    def _set_capacity(self, replica: Replica, capacity_tokens: int) -> None:
        self._core.book.touch(replica).set_limit(capacity_tokens, replica.account.capacity_ratio)
        replica.residency.capacity_tokens = capacity_tokens
        self._assume_sizes()

    def _assume_sizes(self) -> None:
        """Let a replica of unknown size count as the median of the others. Cost: O(replicas)."""
        book = self._core.book
        known = [each.account.capacity_tokens for each in book.replicas.values()]
        sizes = sorted([tokens for tokens in known if tokens is not None])
        if len(sizes) == len(known):
            return
        tokens = float(sizes[len(sizes) // 2]) if sizes else None
        for replica in book.replicas.values():
            if replica.account.capacity_tokens is None and replica.account.assumed_tokens != tokens:
                book.touch(replica).assume(tokens)

    def _encodes_polled(self, event: EncodesPolled) -> None:
        replica = self._known_or_new(event.replica_id)
        if replica is not None:
            self._core.placing.some_encode = True
            replica.account.pending_encode_count = event.pending_encode_count

    def _residency_reported(self, event: ResidencyReported) -> None:
        replica = self._core.book.replicas.get(event.replica_id)
        if replica is None:  # removed: a report of it may be late
            return
        for program_id, tokens in event.resident_tokens:
            program = self._core.book.programs.get(program_id)
            if program is not None:
                replica.residency.report(program.generation, tokens)
