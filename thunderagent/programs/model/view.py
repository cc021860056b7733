"""What a policy sees of the whole, and the proposals that it may make. See `policy.py`."""

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
        """Monotonic seconds of the current event."""

    @property
    def previous_tick_s(self) -> float:
        """Time of the tick before this event; 0 before the first."""

    @property
    def replicas(self) -> Sequence[ReplicaView]:
        """Replicas that are up and not draining, in the order in which they were added."""

    @property
    def changed_replicas(self) -> Sequence[ReplicaView]:
        """Those of `replicas` whose programs came, went or changed in size since `balance` was last called."""

    def roomiest(self, ratio: float, count: int) -> Sequence[ReplicaView]:
        """Return the `count` of `replicas` with most of `ratio` of their limits unclaimed. Cost: O(count log replicas).

        A policy always asks with the same ratio. Ties come in any order.
        """

    def replica(self, replica_id: str | None) -> ReplicaView | None:
        """Return one of `replicas` by its name; None if it is not among them."""

    @property
    def active_count(self) -> int:
        """Number of programs that hold a claim anywhere."""

    @property
    def admitted_count(self) -> int:
        """Number of programs that may be in the paused queue or hold a claim."""

    @property
    def unadmitted_count(self) -> int:
        """Number of programs with a turn that wait for admission."""

    def first_unadmitted(self) -> ProgramView | None:
        """Return the program with the admission's lowest rank among those that wait for admission."""

    def unadmitted(self) -> Iterator[ProgramView]:
        """Yield programs that wait for admission, by rank. Cost: O(n log n) of them."""

    def program(self, program_id: str) -> ProgramView | None:
        """Return a live program by its id."""

    def rank_anew(self, program: ProgramView) -> None:
        """Rank a program again in its place, because its ranks changed."""

    def signal(self, signal: Signal) -> None:
        """Add a signal to the information stream."""

    def first_to_pause(self, replica: ReplicaView) -> ProgramView | None:
        """Return the acting program with the lowest pause rank there."""

    def first_to_mark(self, replica: ReplicaView) -> ProgramView | None:
        """Return the unmarked reasoning program with the lowest pause rank there."""

    def first_expired(self, replica: ReplicaView) -> ProgramView | None:
        """Return an acting program there that is held for longer than it is worth, if there is one."""

    def first_expired_few(self, replica: ReplicaView, count: int) -> Sequence[ProgramView]:
        """Return at most `count` such programs, the one held too long for longest first."""

    def last_marked(self, replica: ReplicaView) -> ProgramView | None:
        """Return the marked program with the highest pause rank there."""

    def first_waiting(self) -> ProgramView | None:
        """Return the paused program with the lowest restore rank among those whose turns are held."""

    def waiting(self) -> Iterator[ProgramView]:
        """Yield paused programs with held turns by current restore rank. Cost: O(n log n) of them."""

    def first_waiting_few(self, count: int) -> Sequence[ProgramView]:
        """Return the first `count` programs of `waiting`. Cost: O(count log n)."""

    def first_paused_acting(self) -> ProgramView | None:
        """Return the paused program with the lowest restore rank among those whose tools run."""

    def comes_before_all_waiting(self, program: ProgramView) -> bool:
        """Return whether `program` would be restored first among those with a turn that may go anywhere.

        If its route sends it to a replica: first among those and those that are routed to the same replica.
        """

    def first_to_give_way(self, replica: ReplicaView, count: int) -> Sequence[ProgramView]:
        """Return the first `count` programs whose tools run there: those held too long or soonest so, then by rank."""

    @property
    def routed_count(self) -> int:
        """Number of programs that wait for room on one replica alone."""

    def first_routed_before(self, program: ProgramView, replica: ReplicaView) -> ProgramView | None:
        """Return the first program that waits for that replica alone, if it comes before `program`; None otherwise."""

    @property
    def some_share(self) -> bool:
        """Whether some active programs may share prompt prefixes.

        Otherwise `claim_tokens_on` is the claim everywhere, except of a program whose own branches share one.
        """

    def claim_tokens_on(self, program: ProgramView, replica: ReplicaView | None) -> int:
        """Return what a paused program would add to the demand there: less than its claim if prefixes are shared.

        With None: to that of a replica without programs, where only its branches can share.
        """

    def resident_tokens(self, program: ProgramView, replica: ReplicaView) -> int:
        """Return how many tokens of its context are expected in that replica's memory."""

    def tool_hold_s(self, tool: str, threshold_s: float) -> float:
        """Return how long holding pays if recomputing is worth `threshold_s` of holding (`tool_times.py`)."""

    @property
    def prefill_token_s(self) -> float:
        """Seconds to prefill a token, as learned."""

    def break_even_s(self, replica_id: str | None) -> float:
        """Return the learned seconds for a replica to fill its whole memory, as corrected, by prefill or tier.

        If it is unknown, or does not report its size, the largest open replica stands in.
        """

    def hold_threshold_s(self, replica_id: str | None) -> float:
        """Return what a token that a replica loses is worth in seconds of holding (`learned/holding.py`).

        0 if nothing should be held there, and where its size or its prices are unknown; infinite if all should be.
        """

    @property
    def growth_tokens_per_s(self) -> float:
        """Learned growth rate of a program that is not paused; infinite until learned."""

    @property
    def mean_growth_tokens(self) -> float:
        """Learned mean excess of programs over their first prompts; infinite until learned."""

    @property
    def median_residence_s(self) -> float:
        """Learned median time from a program's first turn to the end of its last; infinite until one ended."""

    @property
    def tools_running_count(self) -> int:
        """Number of programs whose tool runs, with or without a claim."""

    @property
    def mean_tool_s(self) -> float:
        """Mean of recent tool times; 0 until one came back."""

    @property
    def sandboxes(self) -> SandboxSums:
        """The resource use of sandboxes."""

    @property
    def waiting_count(self) -> int:
        """Number of programs with a turn that wait for room: in the paused queue, or for one replica."""

    def waiting_count_for(self, replica: ReplicaView) -> int:
        """Return how many programs with a turn wait for that replica alone, because of their route."""

    def first_waiting_for(self, replica: ReplicaView, count: int) -> Sequence[ProgramView]:
        """Return the first `count` of those. Cost: O(count log n)."""

    def newly_waiting(self) -> Sequence[ProgramView]:
        """Return programs that began to wait since the global policy was last called, each once, in order.

        At most `global_policy.NEWLY_WAITING_COUNT`; it hears of the others in later calls. Only for global policies.
        """

    def first_to_pause_few(self, replica: ReplicaView, count: int) -> Sequence[ProgramView]:
        """Return the first `count` acting programs there by pause rank. Cost: O(count log n)."""

    def longest_turn_s(self, replica: ReplicaView) -> float:
        """Return how long the longest turn in flight there has run; 0 if there is none. Cost: O(turns there)."""

    def targets(self, program: ProgramView) -> Sequence[ReplicaView]:
        """Return the replicas that a program may go to now: those of its route, or all."""

    def routes(self) -> Sequence[RouteView]:
        """Return all routes."""

    def propose_route(
        self, scope: str, name: str, replicas: Mapping[str, float], reason: Reason = Reason.GLOBAL_POLICY
    ) -> bool:
        """Send the programs of a scope (`routes.Scope`) to replicas, by weight; to any, if none is named."""

    def propose_priority(
        self,
        program: ProgramView,
        priority: int,
        reason: Reason = Reason.GLOBAL_POLICY,
        *,
        replica: ReplicaView | None = None,
    ) -> bool:
        """Give a program a priority, lower first, before the policy's rank; with `replica`, in its engine alone."""

    def propose_migrate(
        self, program: ProgramView, replica: ReplicaView, reason: Reason = Reason.GLOBAL_POLICY
    ) -> bool:
        """Move a program to a replica, regardless of room: now, or when its turns in flight end."""

    def propose_kill(self, program: ProgramView) -> bool:
        """End a program: its held turns are rejected."""

    def propose_kill_replica(self, replica: ReplicaView, reason: Reason = Reason.GLOBAL_POLICY) -> bool:
        """Make a replica drain and end, unless it is the last one, or nobody ends replicas.

        Whether this one can be ended is not known here.
        """

    def propose_provision(self, reason: Reason = Reason.GLOBAL_POLICY) -> bool:
        """Start one more replica, unless nobody starts any. Whether there may be more is not known here."""

    def propose_pause(self, program: ProgramView, reason: Reason) -> bool:
        """Take an acting program's claim."""

    def propose_pause_until(self, replica: ReplicaView, tokens: float, reason: Reason, least_count: int = 0) -> None:
        """Pause acting programs there, in one batch, until the unmarked programs claim at most `tokens`.

        Programs held for longer than they are worth go first, then by pause rank, while more than `least_count` are
        active. Acting ones are weighed if their claims fade.
        """

    def propose_mark(self, program: ProgramView, reason: Reason) -> bool:
        """Pause a reasoning program at the end of its turn."""

    def propose_unmark(self, program: ProgramView, reason: Reason) -> bool:
        """Remove a mark: the program keeps its claim when its turn ends."""

    def propose_dismiss(self, program: ProgramView, reason: Reason) -> bool:
        """Make a program without a turn in flight wait for admission from its next turn on; it loses its claim."""

    def propose_restore(self, program: ProgramView, replica: ReplicaView, reason: Reason) -> bool:
        """Give a paused program a claim on that replica, and grant its held turns."""
