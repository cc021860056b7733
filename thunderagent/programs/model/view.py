"""What a policy sees: the view of the whole, and the proposals that it may make. See `policy.py`."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Protocol

from thunderagent.programs.model.decisions import Reason
from thunderagent.programs.model.records.signals import Signal
from thunderagent.programs.model.views import ProgramView, ReplicaView, RouteView, SandboxSums


class View(Protocol):
    """What a policy sees, and the proposals it may make."""

    @property
    def now_s(self) -> float:
        """Monotonic seconds of the event that is being handled."""

    @property
    def previous_tick_s(self) -> float:
        """When the tick before this event was; 0 before the first."""

    @property
    def replicas(self) -> Sequence[ReplicaView]:
        """Replicas that are up and not draining, in the order in which they were added."""

    @property
    def changed_replicas(self) -> Sequence[ReplicaView]:
        """Those of `replicas` on which programs came, went or changed in size since `balance` was asked last."""

    def roomiest(self, ratio: float, count: int) -> Sequence[ReplicaView]:
        """Return the `count` of `replicas` with most of `ratio` of their limits unclaimed. Cost: O(count log replicas).

        A policy always asks with the same ratio. Of equal ones any is the first.
        """

    def replica(self, replica_id: str | None) -> ReplicaView | None:
        """Return one of `replicas` by its name; None if it is not among them."""

    @property
    def active_count(self) -> int:
        """Programs that hold a claim anywhere."""

    @property
    def admitted_count(self) -> int:
        """Programs that may be in the paused queue or hold a claim."""

    @property
    def unadmitted_count(self) -> int:
        """Programs with a turn that wait to be admitted."""

    def first_unadmitted(self) -> ProgramView | None:
        """Return the program with the lowest rank of the admission among those that wait to be admitted."""

    def unadmitted(self) -> Iterator[ProgramView]:
        """Yield those that wait to be admitted, by rank. Cost: O(n log n) of them."""

    def program(self, program_id: str) -> ProgramView | None:
        """Return a live program by its id."""

    def rank_anew(self, program: ProgramView) -> None:
        """Put a program in its place again, because its ranks changed."""

    def signal(self, signal: Signal) -> None:
        """Add a signal to the information stream."""

    def first_to_pause(self, replica: ReplicaView) -> ProgramView | None:
        """Return the acting program with the lowest pause rank there."""

    def first_to_mark(self, replica: ReplicaView) -> ProgramView | None:
        """Return the unmarked reasoning program with the lowest pause rank there."""

    def first_expired(self, replica: ReplicaView) -> ProgramView | None:
        """Return an acting program there that is held for longer than is worth it, if there is one."""

    def first_expired_few(self, replica: ReplicaView, count: int) -> Sequence[ProgramView]:
        """Return at most `count` such programs, the one first that is held too long for longest."""

    def last_marked(self, replica: ReplicaView) -> ProgramView | None:
        """Return the marked program with the highest pause rank there."""

    def first_waiting(self) -> ProgramView | None:
        """Return the paused program with the lowest restore rank among those whose turns are held."""

    def waiting(self) -> Iterator[ProgramView]:
        """Yield paused programs whose turns are held by restore rank, as they are now. Cost: O(n log n) of them."""

    def first_waiting_few(self, count: int) -> Sequence[ProgramView]:
        """Return the first `count` of those that `waiting` yields. Cost: O(count log n)."""

    def first_paused_acting(self) -> ProgramView | None:
        """Return the paused program with the lowest restore rank among those whose tools run."""

    def comes_before_all_waiting(self, program: ProgramView) -> bool:
        """Say whether `program` would be the first to be restored among those with a turn that may go anywhere.

        If its route sends it to a replica: among those, and those that are routed to the same one.
        """

    @property
    def routed_count(self) -> int:
        """Programs that wait for room on one replica alone."""

    def first_routed_before(self, program: ProgramView, replica: ReplicaView) -> ProgramView | None:
        """Return the first of those that wait for that replica alone, if it comes before `program`; else None."""

    @property
    def some_share(self) -> bool:
        """Whether prompts of some that are active begin alike: else `claim_tokens_on` is the claim everywhere."""

    def claim_tokens_on(self, program: ProgramView, replica: ReplicaView) -> int:
        """Return what a paused program would add to the demand there: less than its claim if prefixes are shared."""

    def resident_tokens(self, program: ProgramView, replica: ReplicaView) -> int:
        """Return how many tokens of its context are expected to lie in that replica's memory."""

    def tool_hold_s(self, tool: str, threshold_s: float) -> float:
        """Return for how long it pays to hold what costs `threshold_s` of holding to recompute (`tool_times.py`)."""

    @property
    def prefill_token_s(self) -> float:
        """Seconds to prefill a token, as learned."""

    def break_even_s(self, replica_id: str | None) -> float:
        """Return in how many seconds a replica could fill its whole memory, as learned: by prefill, or from its tier.

        For one that is not known, or does not say how large it is, the largest of those that are open stands in.
        """

    @property
    def growth_tokens_per_s(self) -> float:
        """How fast a program grows while it is not paused, as learned; infinite until then."""

    @property
    def mean_growth_tokens(self) -> float:
        """By how much programs are larger than their first prompts in the mean, as learned; infinite until then."""

    @property
    def median_residence_s(self) -> float:
        """Median time between a program's first turn and the end of its last, as learned; infinite until one ended."""

    @property
    def tools_running_count(self) -> int:
        """Programs whose tool runs, with or without a claim."""

    @property
    def mean_tool_s(self) -> float:
        """How long tools took lately, in the mean; 0 until one came back."""

    @property
    def sandboxes(self) -> SandboxSums:
        """What their sandboxes take."""

    @property
    def waiting_count(self) -> int:
        """Programs with a turn that wait for room: in the paused queue, or for one replica."""

    def waiting_count_for(self, replica: ReplicaView) -> int:
        """Return how many programs with a turn wait for that replica alone, because their route leads there."""

    def first_waiting_for(self, replica: ReplicaView, count: int) -> Sequence[ProgramView]:
        """Return the first `count` of those. Cost: O(count log n)."""

    def newly_waiting(self) -> Sequence[ProgramView]:
        """Return who began to wait since the global policy was asked last, once each, who came first first.

        At most `global_policy.NEWLY_WAITING_COUNT`: of the others it hears when it is asked the next times. Only for
        it.
        """

    def first_to_pause_few(self, replica: ReplicaView, count: int) -> Sequence[ProgramView]:
        """Return the first `count` acting programs there by pause rank. Cost: O(count log n)."""

    def longest_turn_s(self, replica: ReplicaView) -> float:
        """Return for how long the longest turn in flight there has run; 0 if there is none. Cost: O(turns there)."""

    def targets(self, program: ProgramView) -> Sequence[ReplicaView]:
        """Return the replicas that a program may go to now: those of its route, or all."""

    def routes(self) -> Sequence[RouteView]:
        """Return all routes there are."""

    def propose_route(
        self, scope: str, name: str, replicas: Mapping[str, float], reason: Reason = Reason.GLOBAL_POLICY
    ) -> bool:
        """Send the programs of a scope (`routes.Scope`) to replicas, by their weights; to any, if none is named."""

    def propose_priority(
        self,
        program: ProgramView,
        priority: int,
        reason: Reason = Reason.GLOBAL_POLICY,
        *,
        replica: ReplicaView | None = None,
    ) -> bool:
        """Give a program a priority, lower first, before what the policy says; on a `replica`, in its engine alone."""

    def propose_migrate(
        self, program: ProgramView, replica: ReplicaView, reason: Reason = Reason.GLOBAL_POLICY
    ) -> bool:
        """Move a program to a replica, room or not: now, or when its turns in flight have ended."""

    def propose_kill(self, program: ProgramView) -> bool:
        """End a program: its held turns are rejected."""

    def propose_kill_replica(self, replica: ReplicaView, reason: Reason = Reason.GLOBAL_POLICY) -> bool:
        """Have a replica drain and end, unless it is the last one, or nobody ends any.

        Whether this one can be ended is not known here.
        """

    def propose_provision(self, reason: Reason = Reason.GLOBAL_POLICY) -> bool:
        """Have one more replica started, unless nobody starts any. Whether there may be more is not known here."""

    def propose_pause(self, program: ProgramView, reason: Reason) -> bool:
        """Take an acting program's claim away."""

    def propose_pause_until(self, replica: ReplicaView, tokens: float, reason: Reason, least_count: int = 0) -> None:
        """Pause acting programs there, in one batch, until at most `tokens` are claimed by others than marked programs.

        First are those that are held for longer than is worth it, then by pause rank, while more than `least_count` are
        active. Acting ones are weighed where their claims fade.
        """

    def propose_mark(self, program: ProgramView, reason: Reason) -> bool:
        """Pause a reasoning program at the end of its turn."""

    def propose_unmark(self, program: ProgramView, reason: Reason) -> bool:
        """Take a mark back: the program keeps its claim when its turn ends."""

    def propose_dismiss(self, program: ProgramView, reason: Reason) -> bool:
        """Have a program without a turn in flight wait unadmitted from its next turn on; it loses its claim."""

    def propose_restore(self, program: ProgramView, replica: ReplicaView, reason: Reason) -> bool:
        """Give a paused program a claim on that replica, and grant its held turns."""
