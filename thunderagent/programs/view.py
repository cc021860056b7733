"""The policy's window on the scheduler: it reads, and it checks each proposal before the scheduler carries it out."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from math import inf
from typing import TYPE_CHECKING

from thunderagent.programs.control import waits
from thunderagent.programs.decisions import Reason
from thunderagent.programs.lifecycle import Phase, Status
from thunderagent.programs.policies.base import ProgramView, ReplicaView, RouteView, SandboxSums
from thunderagent.programs.routes import Scope

if TYPE_CHECKING:
    from thunderagent.programs.scheduler import Scheduler
    from thunderagent.programs.signals import Signal


class SchedulerView:
    """The policy's window on the scheduler: see `thunderagent.programs.policies.base.View`."""

    __slots__ = ("_scheduler",)

    def __init__(self, scheduler: Scheduler) -> None:
        """Look at `scheduler`."""
        self._scheduler = scheduler

    @property
    def now_s(self) -> float:
        """See `View`."""
        return self._scheduler.now_s

    @property
    def previous_tick_s(self) -> float:
        """See `View`."""
        return self._scheduler.previous_tick_s

    @property
    def replicas(self) -> Sequence[ReplicaView]:
        """See `View`."""
        return self._scheduler.granting_replicas

    @property
    def changed_replicas(self) -> Sequence[ReplicaView]:
        """See `View`."""
        return [replica for replica in self._scheduler.changed_replicas.values() if replica.grants]

    def replica(self, replica_id: str | None) -> ReplicaView | None:
        """See `View`."""
        replica = self._scheduler.replicas.get(replica_id) if replica_id is not None else None
        return replica if replica is not None and replica.grants else None

    @property
    def active_count(self) -> int:
        """See `View`."""
        return self._scheduler.active_count

    @property
    def admitted_count(self) -> int:
        """See `View`."""
        return self._scheduler.admitted_count

    @property
    def outside_count(self) -> int:
        """See `View`."""
        return len(self._scheduler.queue.outside)

    def first_outside(self) -> ProgramView | None:
        """See `View`."""
        return self._scheduler.queue.outside.first()

    def outside(self) -> Iterator[ProgramView]:
        """See `View`."""
        return iter(self._scheduler.queue.outside)

    def program(self, program_id: str) -> ProgramView | None:
        """See `View`."""
        return self._scheduler.table.get(program_id)

    def rank_anew(self, program: ProgramView) -> None:
        """See `View`."""
        own = self._scheduler.table.get(program.program_id)
        if own is not None:
            self._scheduler.rank_anew(own)

    def signal(self, signal: Signal) -> None:
        """See `View`."""
        self._scheduler.signal(signal)

    def first_to_pause(self, replica: ReplicaView) -> ProgramView | None:
        """See `View`."""
        return self._scheduler.replicas[replica.replica_id].acting.first()

    def first_to_mark(self, replica: ReplicaView) -> ProgramView | None:
        """See `View`."""
        return self._scheduler.replicas[replica.replica_id].reasoning.first()

    def first_expired(self, replica: ReplicaView) -> ProgramView | None:
        """See `View`."""
        first = self._scheduler.replicas[replica.replica_id].expiring.first()
        return first if first is not None and first.hold_until_s <= self._scheduler.now_s else None

    def first_expired_few(self, replica: ReplicaView, count: int) -> Sequence[ProgramView]:
        """See `View`."""
        now_s = self._scheduler.now_s
        expiring = self._scheduler.replicas[replica.replica_id].expiring
        return expiring.lowest(count, lambda program: program.hold_until_s <= now_s)

    def last_marked(self, replica: ReplicaView) -> ProgramView | None:
        """See `View`."""
        return self._scheduler.replicas[replica.replica_id].marked.first()

    def first_waiting(self) -> ProgramView | None:
        """See `View`."""
        return self._scheduler.queue.reasoning.first()

    def waiting(self) -> Iterator[ProgramView]:
        """See `View`."""
        return iter(self._scheduler.queue.reasoning)

    def first_waiting_few(self, count: int) -> Sequence[ProgramView]:
        """See `View`."""
        return self._scheduler.queue.reasoning.lowest(count)

    def first_paused_acting(self) -> ProgramView | None:
        """See `View`."""
        return self._scheduler.queue.acting.first()

    def comes_before_all_waiting(self, program: ProgramView) -> bool:
        """See `View`."""
        own = self._scheduler.table.get(program.program_id)
        return own is not None and self._scheduler.queue.comes_before_all_waiting(own)

    @property
    def bound_count(self) -> int:
        """See `View`."""
        return self._scheduler.queue.bound_count

    def first_bound_before(self, program: ProgramView, replica: ReplicaView) -> ProgramView | None:
        """See `View`."""
        queue = self._scheduler.queue
        if replica.replica_id not in queue.bound:
            return None
        own = self._scheduler.table.get(program.program_id)
        return None if own is None else queue.first_bound_before(own, replica.replica_id)

    def claim_tokens_on(self, program: ProgramView, replica: ReplicaView) -> int:
        """See `View`."""
        own = self._scheduler.table.get(program.program_id)
        if own is None:
            return program.claim_tokens
        return own.claim_tokens - min(own.claim_tokens, self._scheduler.shares.tokens_on(own, replica.replica_id))

    def resident_tokens(self, program: ProgramView, replica: ReplicaView) -> int:
        """See `View`."""
        own = self._scheduler.table.get(program.program_id)
        return 0 if own is None else self._scheduler.resident_tokens(own, replica.replica_id)

    def tool_hold_s(self, tool: str, threshold_s: float) -> float:
        """See `View`."""
        return self._scheduler.knowledge.tool_times.hold_s(tool, threshold_s)

    @property
    def prefill_token_s(self) -> float:
        """See `View`."""
        return self._scheduler.knowledge.prefill_speed.token_s

    def break_even_s(self, replica_id: str | None) -> float:
        """See `View`."""
        return self._scheduler.break_even_s(replica_id)

    @property
    def growth_tokens_per_s(self) -> float:
        """See `View`."""
        return self._scheduler.knowledge.growth.tokens_per_s

    @property
    def mean_growth_tokens(self) -> float:
        """See `View`."""
        return self._scheduler.knowledge.growth.whole_tokens

    @property
    def median_residence_s(self) -> float:
        """See `View`."""
        return self._scheduler.knowledge.median_residence_s

    @property
    def tools_running_count(self) -> int:
        """See `View`."""
        return self._scheduler.knowledge.tools_running_count

    @property
    def mean_tool_s(self) -> float:
        """See `View`."""
        return self._scheduler.knowledge.mean_tool_s

    @property
    def sandboxes(self) -> SandboxSums:
        """See `View`."""
        return self._scheduler.sandboxes

    @property
    def waiting_count(self) -> int:
        """See `View`."""
        return self._scheduler.queue.for_room_count

    def waiting_count_for(self, replica: ReplicaView) -> int:
        """See `View`."""
        return len(self._scheduler.queue.bound.get(replica.replica_id, ()))

    def first_waiting_for(self, replica: ReplicaView, count: int) -> Sequence[ProgramView]:
        """See `View`."""
        waiting = self._scheduler.queue.bound.get(replica.replica_id)
        return () if waiting is None else waiting.lowest(count)

    def newly_waiting(self) -> Sequence[ProgramView]:
        """See `View`."""
        return [program for program in self._scheduler.control.newly_waiting if waits(program)]

    def first_to_pause_few(self, replica: ReplicaView, count: int) -> Sequence[ProgramView]:
        """See `View`."""
        return self._scheduler.replicas[replica.replica_id].acting.lowest(count)

    def longest_turn_s(self, replica: ReplicaView) -> float:
        """See `View`."""
        programs = self._scheduler.replicas[replica.replica_id].programs.values()
        granted_s = min((turn.granted_s for program in programs for turn in program.in_flight.values()), default=inf)
        return max(0.0, self._scheduler.now_s - granted_s)

    def targets(self, program: ProgramView) -> Sequence[ReplicaView]:
        """See `View`."""
        own, replicas = self._scheduler.table.get(program.program_id), self._scheduler.granting_replicas
        if own is None or own.bound_to is None:
            return replicas
        route = own.route
        return [replica for replica in replicas if route is None or route.names(replica.replica_id)]

    def routes(self) -> Sequence[RouteView]:
        """See `View`. Replicas that were removed are left out: `propose_route` would refuse them."""
        known, routes = self._scheduler.replicas, self._scheduler.control.routes
        return [
            RouteView(scope.value, name, {each: weight for each, weight in route.targets if each in known})
            for scope, name, route in routes
        ]

    def propose_route(
        self, scope: str, name: str, replicas: Mapping[str, float], reason: Reason = Reason.CONTROL
    ) -> bool:
        """See `View`. Accepted for a scope that there is, and replicas that are known."""
        control, targets = self._scheduler.control, tuple(replicas.items())
        if control.why_not_route(scope, name, targets):
            return False
        control.set_route(Scope(scope), name, targets, reason)
        return True

    def propose_priority(
        self,
        program: ProgramView,
        priority: int,
        reason: Reason = Reason.CONTROL,
        *,
        replica: ReplicaView | None = None,
    ) -> bool:
        """See `View`. Accepted for a live program and a whole number of at most a million either way."""
        control, replica_id = self._scheduler.control, None if replica is None else replica.replica_id
        own = self._scheduler.table.get(program.program_id)
        if own is None or control.why_not_priority(program.program_id, priority, replica_id):
            return False
        control.set_priority(own, priority, replica_id, reason)
        return True

    def propose_migrate(self, program: ProgramView, replica: ReplicaView, reason: Reason = Reason.CONTROL) -> bool:
        """See `View`. Accepted for an admitted program that is not there yet, where its route leads, on an open one."""
        control = self._scheduler.control
        own = self._scheduler.table.get(program.program_id)
        if own is None or control.why_not_migrate(program.program_id, replica.replica_id):
            return False
        control.migrate(own, self._scheduler.replicas[replica.replica_id], reason)
        return True

    def propose_kill(self, program: ProgramView) -> bool:
        """See `View`. Accepted for a live program."""
        own = self._scheduler.table.get(program.program_id)
        if own is None:
            return False
        self._scheduler.control.kill(own)
        return True

    def propose_kill_replica(self, replica: ReplicaView, reason: Reason = Reason.CONTROL) -> bool:
        """See `View`. Accepted for an open replica beside which there is another one, where somebody ends replicas."""
        if self.replica(replica.replica_id) is None or len(self.replicas) < 2:
            return False
        if not self._scheduler.settings.provisions_replicas:
            return False
        self._scheduler.control.kill_replica(replica.replica_id, reason)
        return True

    def propose_provision(self, reason: Reason = Reason.CONTROL) -> bool:
        """See `View`. Accepted where somebody starts replicas."""
        if not self._scheduler.settings.provisions_replicas:
            return False
        self._scheduler.control.provision(reason)
        return True

    def propose_pause(self, program: ProgramView, reason: Reason) -> bool:
        """See `View`. Accepted for an active program whose tool runs."""
        own = self._scheduler.table.get(program.program_id)
        if own is None or own.status is not Status.ACTIVE or own.phase is not Phase.ACTING:
            return False
        self._scheduler.pause(own, reason)
        return True

    def propose_mark(self, program: ProgramView, reason: Reason) -> bool:
        """See `View`. Accepted for an active program with a turn in flight that is not marked yet."""
        own = self._scheduler.table.get(program.program_id)
        if own is None or not own.in_flight or own.marked:
            return False
        self._scheduler.mark(own, reason)
        return True

    def propose_unmark(self, program: ProgramView, reason: Reason) -> bool:
        """See `View`. Accepted for a program that is marked for nothing but what the policy said."""
        own = self._scheduler.table.get(program.program_id)
        if own is None or not own.marked_by_policy:
            return False
        self._scheduler.unmark(own, reason)
        return True

    def propose_dismiss(self, program: ProgramView, reason: Reason) -> bool:
        """See `View`. Accepted for an admitted program that has no turn in flight, nor one held where it is active."""
        own = self._scheduler.table.get(program.program_id)
        if own is None or not own.admitted or own.in_flight or not self._scheduler.has_admission:
            return False
        if own.status is Status.ACTIVE and own.phase is not Phase.ACTING:
            return False
        self._scheduler.dismiss(own, reason)
        return True

    def propose_restore(self, program: ProgramView, replica: ReplicaView, reason: Reason) -> bool:
        """See `View`. Accepted for a paused program on a replica that is open; of a bound one, on that one alone."""
        own = self._scheduler.table.get(program.program_id)
        target = self._scheduler.open_replica(replica)
        if own is None or own.status is not Status.PAUSED or target is None:
            return False
        if own.bound_to not in (None, target.replica_id):
            return False
        self._scheduler.restore(own, target, reason)
        return True
