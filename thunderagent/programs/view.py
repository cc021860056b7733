"""The policy's window on the scheduler: it reads, and it checks each proposal before the scheduler carries it out."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

from thunderagent.programs.decisions import Reason
from thunderagent.programs.lifecycle import Phase, Status
from thunderagent.programs.policies.base import ProgramView, ReplicaView, SandboxSums

if TYPE_CHECKING:
    from thunderagent.programs.scheduler import Scheduler


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
        expiring = self._scheduler.replicas[replica.replica_id].expiring.lowest(count)
        return [program for program in expiring if program.hold_until_s <= self._scheduler.now_s]

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

    @property
    def break_even_s(self) -> float:
        """See `View`."""
        return self._scheduler.knowledge.break_even_s

    @property
    def growth_tokens_per_s(self) -> float:
        """See `View`."""
        return self._scheduler.knowledge.growth.tokens_per_s

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
        if own is None or own.status is not Status.ACTIVE or own.phase is not Phase.REASONING or own.marked:
            return False
        self._scheduler.mark(own, reason)
        return True

    def propose_unmark(self, program: ProgramView, reason: Reason) -> bool:
        """See `View`. Accepted for a marked program on a replica that it need not leave."""
        own = self._scheduler.table.get(program.program_id)
        if own is None or not own.marked or not self._scheduler.replicas[own.replica_id or ""].open_to_programs:
            return False
        self._scheduler.unmark(own, reason)
        return True

    def propose_restore(self, program: ProgramView, replica: ReplicaView, reason: Reason) -> bool:
        """See `View`. Accepted for a paused program, on a replica that is up and not draining."""
        own = self._scheduler.table.get(program.program_id)
        target = self._scheduler.open_replica(replica)
        if own is None or own.status is not Status.PAUSED or target is None:
            return False
        self._scheduler.restore(own, target, reason)
        return True
