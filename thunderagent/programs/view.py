"""The policy's window on the scheduler: it reads, and it checks each proposal before the core carries it out."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING

from thunderagent.programs.book.book import Book
from thunderagent.programs.book.replica import Replica
from thunderagent.programs.model.advice.routes import RouteView, Scope
from thunderagent.programs.model.decisions import Reason
from thunderagent.programs.model.fleet_events import SandboxSums
from thunderagent.programs.model.places import Kind
from thunderagent.programs.model.program import Program
from thunderagent.programs.model.records.signals import Signal
from thunderagent.programs.policy import ProgramView, ReplicaView
from thunderagent.programs.verbs.global_policy import waits

if TYPE_CHECKING:
    from thunderagent.programs.core import Core
    from thunderagent.programs.operations import Operations


class SchedulerView:
    """The policy's window on the scheduler: see `model.view.View`, whose members these are."""

    __slots__ = ("_book", "_core", "_operations", "_provisions_replicas", "previous_tick_s")
    _core: Core
    _operations: Operations

    def __init__(self, book: Book, *, provisions_replicas: bool) -> None:
        """Look at `book`; proposals are possible after `attach`."""
        self._book = book
        self._provisions_replicas = provisions_replicas
        self.previous_tick_s = 0.0  # see `View`

    def attach(self, core: Core, operations: Operations) -> None:
        """Carry proposals out by these."""
        self._core = core
        self._operations = operations

    def _own(self, program: ProgramView) -> Program | None:
        """Return the live program that a policy means."""
        own = program if isinstance(program, Program) else self._book.programs.get(program.program_id)
        return own if own is None or own.place is not self._book.ended else None

    def _replica(self, replica: ReplicaView) -> Replica:
        return replica if isinstance(replica, Replica) else self._book.replicas[replica.replica_id]

    @property
    def now_s(self) -> float:
        """See `View`."""
        return self._book.now_s

    @property
    def replicas(self) -> list[Replica]:
        """See `View`."""
        return self._book.granting_replicas

    @property
    def changed_replicas(self) -> list[Replica]:
        """See `View`."""
        return [replica for replica in self._book.changed_replicas.values() if replica.account.usable]

    def roomiest(self, ratio: float, count: int) -> list[Replica]:
        """See `View`."""
        return self._book.roomiest(ratio, count)

    def replica(self, replica_id: str | None) -> Replica | None:
        """See `View`."""
        replica = self._book.replicas.get(replica_id) if replica_id is not None else None
        return replica if replica is not None and replica.account.usable else None

    @property
    def active_count(self) -> int:
        """See `View`."""
        return self._book.active_count

    @property
    def admitted_count(self) -> int:
        """See `View`."""
        return self._book.admitted_count

    @property
    def unadmitted_count(self) -> int:
        """See `View`."""
        return self._book.queue.unadmitted.count

    def first_unadmitted(self) -> Program | None:
        """See `View`."""
        return self._book.queue.unadmitted.order.first()

    def unadmitted(self) -> Iterator[ProgramView]:
        """See `View`."""
        return iter(self._book.queue.unadmitted.order)

    def program(self, program_id: str) -> Program | None:
        """See `View`."""
        return self._book.programs.get(program_id)

    def rank_anew(self, program: ProgramView) -> None:
        """See `View`."""
        own = self._own(program)
        if own is not None:
            self._book.rank_anew(own)

    def signal(self, signal: Signal) -> None:
        """See `View`."""
        self._core.stream.send(signal)

    def first_to_pause(self, replica: ReplicaView) -> Program | None:
        """See `View`."""
        return self._replica(replica).acting.order.first()

    def first_to_mark(self, replica: ReplicaView) -> Program | None:
        """See `View`."""
        return self._replica(replica).working.order.first()

    def first_expired(self, replica: ReplicaView) -> Program | None:
        """See `View`."""
        return next(iter(self.first_expired_few(replica, 1)), None)

    def first_expired_few(self, replica: ReplicaView, count: int) -> list[Program]:
        """See `View`."""
        return self._replica(replica).acting.expiring.lowest(count, self._book.now_s)

    def first_to_give_way(self, replica: ReplicaView, count: int) -> list[Program]:
        """See `View`."""
        acting = self._replica(replica).acting
        return acting.expiring.lowest(count) or acting.order.lowest(count)

    def last_marked(self, replica: ReplicaView) -> Program | None:
        """See `View`."""
        return self._replica(replica).leaving.order.first()

    def first_waiting(self) -> Program | None:
        """See `View`."""
        return self._book.queue.waiting.order.first()

    def waiting(self) -> Iterator[ProgramView]:
        """See `View`."""
        return iter(self._book.queue.waiting.order)

    def first_waiting_few(self, count: int) -> list[Program]:
        """See `View`."""
        return self._book.queue.waiting.order.lowest(count)

    def first_paused_acting(self) -> Program | None:
        """See `View`."""
        return self._book.queue.resting.order.first()

    def comes_before_all_waiting(self, program: ProgramView) -> bool:
        """See `View`."""
        return (own := self._own(program)) is not None and self._book.queue.comes_before_all_waiting(own)

    @property
    def routed_count(self) -> int:
        """See `View`."""
        return self._book.queue.routed_count

    def first_routed_before(self, program: ProgramView, replica: ReplicaView) -> Program | None:
        """See `View`."""
        own = self._own(program) if self._book.queue.routed else None
        return None if own is None else self._book.queue.first_routed_before(own, replica.replica_id)

    @property
    def some_share(self) -> bool:
        """See `View`."""
        return bool(self._book.prefixes.tree.cuts)

    def claim_tokens_on(self, program: ProgramView, replica: ReplicaView | None) -> int:
        """See `View`."""
        own, replica_id = self._own(program), "" if replica is None else replica.replica_id
        tokens = program.claim_tokens
        return tokens if own is None else self._book.prefixes.own_tokens(own, tokens, replica_id)

    def resident_tokens(self, program: ProgramView, replica: ReplicaView) -> int:
        """See `View`."""
        own = program if isinstance(program, Program) else self._own(program)
        return 0 if own is None else self._book.resident_tokens(own, self._replica(replica))

    def tool_hold_s(self, tool: str, threshold_s: float) -> float:
        """See `View`."""
        return self._core.knowledge.tool_times.hold_s(tool, threshold_s)

    @property
    def prefill_token_s(self) -> float:
        """See `View`."""
        return self._core.knowledge.prices.token_s

    def break_even_s(self, replica_id: str | None) -> float:
        """See `View`."""
        return self._core.knowledge.break_even_s(replica_id, self._book.memory_tokens_of(replica_id))

    def hold_threshold_s(self, replica_id: str | None) -> float:
        """See `View`."""
        account = self._book.ledger.accounts.get(replica_id) if replica_id is not None else None
        if account is None:
            return 0.0
        plan = self._core.knowledge.holding(replica_id, account.assumed_tokens, account.own_ratio, self._book.now_s)
        return plan.threshold_s

    @property
    def growth_tokens_per_s(self) -> float:
        """See `View`."""
        return self._core.knowledge.growth.tokens_per_s

    @property
    def mean_growth_tokens(self) -> float:
        """See `View`."""
        return self._core.knowledge.growth.whole_tokens

    @property
    def median_residence_s(self) -> float:
        """See `View`."""
        return self._core.knowledge.residences.median_s

    @property
    def tools_running_count(self) -> int:
        """See `View`."""
        return self._core.knowledge.tools_running_count

    @property
    def mean_tool_s(self) -> float:
        """See `View`."""
        return self._core.knowledge.mean_tool_s

    @property
    def sandboxes(self) -> SandboxSums:
        """See `View`."""
        return self._book.sandboxes

    @property
    def waiting_count(self) -> int:
        """See `View`."""
        return self._book.queue.for_room_count

    def waiting_count_for(self, replica: ReplicaView) -> int:
        """See `View`."""
        return 0 if (place := self._book.queue.routed.get(replica.replica_id)) is None else place.count

    def first_waiting_for(self, replica: ReplicaView, count: int) -> Sequence[ProgramView]:
        """See `View`."""
        return () if (place := self._book.queue.routed.get(replica.replica_id)) is None else place.order.lowest(count)

    def newly_waiting(self) -> Sequence[ProgramView]:
        """See `View`."""
        return [program for program in self._core.global_policies.newly_waiting if waits(program)]

    def first_to_pause_few(self, replica: ReplicaView, count: int) -> Sequence[ProgramView]:
        """See `View`."""
        return self._replica(replica).acting.order.lowest(count)

    def longest_turn_s(self, replica: ReplicaView) -> float:
        """See `View`."""
        return self._replica(replica).longest_turn_s(self._book.now_s)

    def targets(self, program: ProgramView) -> Sequence[ReplicaView]:
        """See `View`."""
        return self._core.routing.targets(self._own(program))

    def routes(self) -> Sequence[RouteView]:
        """See `View`."""
        return self._core.routing.views()

    def propose_route(
        self, scope: str, name: str, replicas: Mapping[str, float], reason: Reason = Reason.GLOBAL_POLICY
    ) -> bool:
        """See `View`. Accepted for a valid scope, and known replicas."""
        targets = tuple(replicas.items())
        if possible := not self._operations.why_not_route(scope, name, targets):
            self._operations.set_route(Scope(scope), name, targets, reason)
        return possible

    def propose_priority(
        self,
        program: ProgramView,
        priority: int,
        reason: Reason = Reason.GLOBAL_POLICY,
        *,
        replica: ReplicaView | None = None,
    ) -> bool:
        """See `View`. Accepted for a live program and a whole number of at most a million either way."""
        own, replica_id = self._own(program), None if replica is None else replica.replica_id
        if own is None or self._operations.why_not_priority(program.program_id, priority, replica_id):
            return False
        self._operations.set_priority(own, priority, replica_id, reason)
        return True

    def propose_migrate(
        self, program: ProgramView, replica: ReplicaView, reason: Reason = Reason.GLOBAL_POLICY
    ) -> bool:
        """See `View`. Accepted for an admitted program elsewhere, and an open replica that its route allows."""
        own = self._own(program)
        if own is None or self._operations.why_not_migrate(program.program_id, replica.replica_id):
            return False
        self._operations.migrate(own, self._replica(replica), reason)
        return True

    def propose_kill(self, program: ProgramView) -> bool:
        """See `View`. Accepted for a live program."""
        if (own := self._own(program)) is not None:
            self._operations.kill(own)
        return own is not None

    def propose_kill_replica(self, replica: ReplicaView, reason: Reason = Reason.GLOBAL_POLICY) -> bool:
        """See `View`. Accepted for an open replica that is not the only one, if somebody ends replicas."""
        if self.replica(replica.replica_id) is None or len(self.replicas) < 2 or not self._provisions_replicas:
            return False
        self._operations.kill_replica(replica.replica_id, reason)
        return True

    def propose_provision(self, reason: Reason = Reason.GLOBAL_POLICY) -> bool:
        """See `View`. Accepted if somebody starts replicas."""
        if self._provisions_replicas:
            self._operations.provision(reason)
        return self._provisions_replicas

    def propose_pause(self, program: ProgramView, reason: Reason) -> bool:
        """See `View`. Accepted for an active program whose tool runs."""
        own = self._own(program)
        if own is None or own.place.kind is not Kind.ACTING:
            return False
        self._core.pause(own, reason)
        return True

    def propose_pause_until(self, replica: ReplicaView, tokens: float, reason: Reason, least_count: int = 0) -> None:
        """See `View`."""
        self._core.pause_until(self._replica(replica), tokens, reason, least_count)

    def propose_mark(self, program: ProgramView, reason: Reason) -> bool:
        """See `View`. Accepted for an active program with a turn in flight that is not marked yet."""
        own = self._own(program)
        if own is None or not own.in_flight or own.place.kind is Kind.LEAVING:
            return False
        self._core.mark(own, reason)
        return True

    def propose_unmark(self, program: ProgramView, reason: Reason) -> bool:
        """See `View`. Accepted for a program that is marked only by the policy."""
        if (own := self._own(program)) is None or not own.marked_by_policy:
            return False
        self._core.unmark(own, reason)
        return True

    def propose_dismiss(self, program: ProgramView, reason: Reason) -> bool:
        """See `View`. Accepted for an admitted program without a turn in flight, or one held where it is active."""
        own = self._own(program)
        if own is None or not own.admitted or own.in_flight or self._core.admission is None:
            return False
        if may_leave := not own.place.active or own.place.kind is Kind.ACTING:
            self._core.dismiss(own, reason)
        return may_leave

    def propose_restore(self, program: ProgramView, replica: ReplicaView, reason: Reason) -> bool:
        """See `View`. Accepted for a paused program on an open replica; for a routed one, only on its own."""
        own, target = self._own(program), self._core.placing.granting(replica)
        if own is None or own.place.active or target is None or own.routed_to not in (None, target.replica_id):
            return False
        self._core.restore(own, target, reason)
        return True
