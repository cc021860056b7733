"""The seam between the scheduler and a policy.

Theory of operation
===================
A policy *proposes*, the scheduler *disposes*. A policy is a small object without mutable state: everything that it
may know is in the `View`, and everything that it may do is a method of the `View` whose name begins with `propose_`.
Each proposal is checked against the lifecycle table and carried out at once, so the next look at the view shows its
effect; it returns whether it was accepted.

The scheduler asks two questions:

- `place`: a turn arrived for a program that could be placed anew - it is new, paused, or active with no other
  turn in flight. Where may it be active *now*? Return a replica, or None to hold its turns in the paused queue.
- `balance`: something happened (`Moment`). Who should be paused, marked, restored?

and uses two orders, in which a lower rank comes first: `pause_rank` among the programs of a replica, and
`restore_rank` in the paused queue. Each is applied apart to acting and to reasoning programs, and must not change
while a program stays in its phase. When a tool begins the policy says for how long its program is worth holding
(`hold_s`); whoever is held for longer is found by `first_expired`. How claims are counted is in its `claim_rules`.

Programs that a route binds to one replica wait where `first_waiting` and its like do not see them: the scheduler asks
`place` for the first of them, with their replica as the only candidate, before it asks to balance. For nobody to starve
there, a policy lets no program have the room of a replica for which one waits that goes before it, neither a newcomer
nor one that waits as well: it leaves the replica out (`without_bound_before`), or lets pass for a bounded time.

To write one, subclass nothing: a frozen dataclass with these members is a policy, its fields are its settings. Parts of
it can be chosen apart, and a policy may have more than these members: see `parts.py`.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum, auto
from math import inf
from typing import TYPE_CHECKING, NamedTuple, Protocol

from thunderagent.programs.decisions import Reason

if TYPE_CHECKING:
    from thunderagent.programs.lifecycle import Phase, Status
    from thunderagent.programs.ranked_set import Rank
    from thunderagent.programs.signals import Signal
    from thunderagent.programs.verdicts import Level


@dataclass(frozen=True, slots=True)
class ClaimRules:
    """How the ledger counts for a policy.

    `half_life_s` is that of an acting program's weight in `AccountView.weighed_tokens`; `inf` never decays, 0 counts
    nothing. Every program claims beyond its context what its next turn is expected to add: with a `growth_quantile`
    over 0 that quantile of what turns were seen to add, until then and else `reserve_tokens`. With `share_prefixes`
    what programs on a replica have in common is in its demand once. With `adapt_capacity` the capacity
    is corrected by what is found lost (`AccountView.limit_tokens`).
    """

    half_life_s: float = inf
    reserve_tokens: int = 0
    growth_quantile: float = 0.0
    share_prefixes: bool = False
    adapt_capacity: bool = False


class ProgramView(Protocol):
    """What a policy may read of a program."""

    @property
    def program_id(self) -> str:
        """The client's name for it."""

    @property
    def opened_s(self) -> float:
        """When its first turn arrived."""

    @property
    def tenant(self) -> str:
        """Who pays for it; empty if that was not said."""

    @property
    def program_class(self) -> str:
        """What its client calls its kind; empty if that was not said."""

    @property
    def group_id(self) -> str:
        """The group it is in; empty if in none."""

    @property
    def priority(self) -> int:
        """As it was told: lower goes first; 0 if nothing was said."""

    @property
    def bound_to(self) -> str | None:
        """The replica that its route sends it to, if it has one that is open."""

    @property
    def parent_id(self) -> str:
        """The program that made it; empty if there is none."""

    @property
    def admitted(self) -> bool:
        """Whether it may be in the paused queue: always, where there is no admission."""

    @property
    def status(self) -> Status:
        """Whether it holds a claim."""

    @property
    def phase(self) -> Phase:
        """Whether a turn is with us or its tool runs."""

    @property
    def acting_since_s(self) -> float:
        """When its tool began; only while it is acting."""

    @property
    def tool(self) -> str:
        """Name of the tool that its last turn called; empty if it is not known."""

    @property
    def hold_until_s(self) -> float:
        """When it is worth holding no longer; only while it is acting."""

    @property
    def waiting_since_s(self) -> float:
        """When the first of its held turns arrived; only while it waits."""

    @property
    def turn_count(self) -> int:
        """Turns that were granted so far."""

    @property
    def expected_output_tokens(self) -> int:
        """What its turn that waits first, or else was granted last, was expected to generate when it arrived."""

    @property
    def level(self) -> Level | None:
        """How good a judge thinks its prospects are; None as long as there is no verdict."""

    @property
    def is_last_of_group(self) -> bool:
        """Whether it is in a group, all others of which ended."""

    @property
    def replica_id(self) -> str | None:
        """Where it is active, or was last."""

    @property
    def claim_tokens(self) -> int:
        """What it claims, or would claim."""

    @property
    def context_tokens(self) -> int:
        """Its context after its last finished turns: 0 before the first."""

    @property
    def prompt_tokens_total(self) -> int:
        """Of its finished turns; so are the next two."""

    @property
    def output_tokens_total(self) -> int:
        """What was generated."""

    @property
    def cached_tokens_total(self) -> int:
        """Of the prompts, what was found in the cache."""

    @property
    def growth_tokens(self) -> int:
        """What it is expected to grow by beyond that, until it is as large as programs are in the mean."""


class AccountView(Protocol):
    """What a policy may read of a replica's sums, all in tokens."""

    @property
    def capacity_tokens(self) -> int | None:
        """Size of its KV pool; None is not known."""

    @property
    def limit_tokens(self) -> float:
        """Return what may be claimed: the capacity, corrected if the policy wants that; infinite if not known."""

    @property
    def reasoning_tokens(self) -> int:
        """Claims of programs with a turn in flight, marked ones among them."""

    @property
    def marked_tokens(self) -> int:
        """Part of these that goes when the turns in flight end."""

    @property
    def growth_tokens(self) -> int:
        """What its programs are expected to grow by beyond their claims."""

    @property
    def turn_count(self) -> int:
        """Turns in flight."""

    @property
    def active_count(self) -> int:
        """Programs that are active there."""

    @property
    def hit_ratio(self) -> float:
        """Prefix-cache hits of the engine by tokens, between the last two polls in which it looked any up."""

    @property
    def kv_used_ratio(self) -> float:
        """Part of the KV pool that running requests referenced at the last poll; cached blocks count as free."""

    @property
    def engine_waiting_count(self) -> int:
        """Requests that waited in the engine at the last poll."""

    @property
    def pending_encode_count(self) -> int | None:
        """Turns there whose images are yet to be encoded, as far as known; None where encoding is no stage."""

    @property
    def demand_tokens(self) -> int:
        """All claims, each in full, besides what they share if the policy wants that counted once."""

    def weighed_tokens(self, now_s: float) -> float:
        """All claims, acting ones weighed by f(t)."""


class ReplicaView(Protocol):
    """What a policy may read of a replica."""

    @property
    def replica_id(self) -> str:
        """Its name."""

    @property
    def account(self) -> AccountView:
        """Its sums."""


class RouteView(NamedTuple):
    """Where the programs of a scope go."""

    scope: str
    name: str
    targets: Mapping[str, float]
    """Replicas by their ids, with weights; they need not be open, but none was removed."""


class SandboxSums(NamedTuple):
    """What all sandboxes take, as last measured; None is *not known*."""

    sandbox_count: int = 0
    disk_bytes: int | None = None
    memory_bytes: int | None = None


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

    def replica(self, replica_id: str | None) -> ReplicaView | None:
        """Return one of `replicas` by its name; None if it is not among them."""

    @property
    def active_count(self) -> int:
        """Programs that hold a claim anywhere."""

    @property
    def admitted_count(self) -> int:
        """Programs that may be in the paused queue or hold a claim."""

    @property
    def outside_count(self) -> int:
        """Programs with a turn that wait to be admitted."""

    def first_outside(self) -> ProgramView | None:
        """Return the program with the lowest rank of the admission among those that wait to be admitted."""

    def outside(self) -> Iterator[ProgramView]:
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

        If its route binds it to a replica: among those, and those that are bound to the same one.
        """

    @property
    def bound_count(self) -> int:
        """Programs that wait for room on one replica alone."""

    def first_bound_before(self, program: ProgramView, replica: ReplicaView) -> ProgramView | None:
        """Return the first of those that wait for that replica alone, if it goes before `program`; else None."""

    def claim_tokens_on(self, program: ProgramView, replica: ReplicaView) -> int:
        """Return what a paused program would add to the demand there: less than its claim if prefixes are shared."""

    def resident_tokens(self, program: ProgramView, replica: ReplicaView) -> int:
        """Return how many tokens of its context are expected to lie in that replica's memory."""

    def tool_hold_s(self, tool: str, threshold_s: float) -> float:
        """Return for how long it pays to hold what costs `threshold_s` of holding to recompute (`tool_times.py`)."""

    @property
    def prefill_token_s(self) -> float:
        """Seconds to prefill a token, as learned."""

    @property
    def break_even_s(self) -> float:
        """Seconds in which the largest replica could prefill its whole memory, as learned."""

    @property
    def growth_tokens_per_s(self) -> float:
        """How fast a program grows while it is not paused, as learned; infinite until then."""

    @property
    def median_residence_s(self) -> float:
        """Median time between a program's first turn and its end, as learned; infinite until one ended."""

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

        At most `control.NEWLY_WAITING_COUNT`: of the others it hears when it is asked the next times. Only for it.
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
        self, scope: str, name: str, replicas: Mapping[str, float], reason: Reason = Reason.CONTROL
    ) -> bool:
        """Send the programs of a scope (`routes.Scope`) to replicas, by their weights; to any, if none is named."""

    def propose_priority(
        self,
        program: ProgramView,
        priority: int,
        reason: Reason = Reason.CONTROL,
        *,
        replica: ReplicaView | None = None,
    ) -> bool:
        """Give a program a priority, lower first, before what the policy says; on a `replica`, in its engine alone."""

    def propose_migrate(self, program: ProgramView, replica: ReplicaView, reason: Reason = Reason.CONTROL) -> bool:
        """Move a program to a replica, room or not: now, or when its turns in flight have ended."""

    def propose_kill(self, program: ProgramView) -> bool:
        """End a program: its held turns are rejected."""

    def propose_kill_replica(self, replica: ReplicaView, reason: Reason = Reason.CONTROL) -> bool:
        """Have a replica drain and end, unless it is the last one, or nobody ends any.

        Whether this one can be ended is not known here.
        """

    def propose_provision(self, reason: Reason = Reason.CONTROL) -> bool:
        """Have one more replica started, unless nobody starts any. Whether there may be more is not known here."""

    def propose_pause(self, program: ProgramView, reason: Reason) -> bool:
        """Take an acting program's claim away."""

    def propose_mark(self, program: ProgramView, reason: Reason) -> bool:
        """Pause a reasoning program at the end of its turn."""

    def propose_unmark(self, program: ProgramView, reason: Reason) -> bool:
        """Take a mark back: the program keeps its claim when its turn ends."""

    def propose_dismiss(self, program: ProgramView, reason: Reason) -> bool:
        """Have an admitted program without a turn in flight wait outside from its next turn on; it loses its claim."""

    def propose_restore(self, program: ProgramView, replica: ReplicaView, reason: Reason) -> bool:
        """Give a paused program a claim on that replica, and grant its held turns."""


class Moment(Enum):
    """When `balance` is asked."""

    TICK = auto()
    TURN_ARRIVED = auto()
    """Only `Admission.next` is asked then."""
    TURN_ENDED = auto()
    PROGRAM_ENDED = auto()
    REPLICAS_CHANGED = auto()


class Placement(NamedTuple):
    """The answer to `place`; `replica` None holds the turn."""

    replica: ReplicaView | None
    reason: Reason


class Policy(Protocol):
    """Who may hold memory, on which replica; see the theory of operation of this module."""

    @property
    def name(self) -> str:
        """The word that the command line, logs and metrics use for it."""

    @property
    def claim_rules(self) -> ClaimRules:
        """How the ledger counts for it."""

    @property
    def tick_s(self) -> float:
        """Longest time between two ticks that the policy can work with."""

    def pause_rank(self, program: ProgramView) -> Rank:
        """Rank a program among those of its phase on its replica: the lowest is paused or marked first."""

    def restore_rank(self, program: ProgramView) -> Rank:
        """Rank a program among those of its phase in the paused queue: the lowest is restored first."""

    def hold_s(self, view: View, program: ProgramView) -> float:
        """Say for how long a program whose tool begins is worth holding; `inf` for as long as there is room."""

    def place(self, view: View, program: ProgramView, candidates: Sequence[ReplicaView]) -> Placement:
        """Say where a program with a turn that just arrived may be active now; `candidates` is never empty."""

    def balance(self, view: View, moment: Moment) -> None:
        """Make proposals."""


def least_loaded(candidates: Sequence[ReplicaView]) -> ReplicaView:
    """Return the replica with the fewest turns in flight, then the smallest demand, then the first.

    A turn whose images are yet to be encoded counts twice: it goes through a stage that serves one at a time.
    """
    return min(candidates, key=_load_of)


def _load_of(replica: ReplicaView) -> tuple[int, int]:
    account = replica.account
    return account.turn_count + (account.pending_encode_count or 0), account.demand_tokens


def home_of(program: ProgramView, candidates: Sequence[ReplicaView]) -> ReplicaView | None:
    """Return the candidate on which the program is active or was last."""
    for replica in candidates:
        if replica.replica_id == program.replica_id:
            return replica
    return None


def largest_capacity_tokens(candidates: Sequence[ReplicaView]) -> float:
    """Return the capacity of the largest replica; infinite where one's is not known."""
    return max(
        inf if replica.account.capacity_tokens is None else replica.account.capacity_tokens for replica in candidates
    )


def without_bound_before(view: View, program: ProgramView, candidates: Sequence[ReplicaView]) -> Sequence[ReplicaView]:
    """Return the candidates but for those for which a program waits that is bound there and goes before this one."""
    if not view.bound_count:
        return candidates
    return [replica for replica in candidates if view.first_bound_before(program, replica) is None]


def restore_waiting_for(view: View, policy: Policy, replica: ReplicaView) -> None:
    """Restore programs that wait for that replica alone, by restore rank, until `place` holds the first of them."""
    while waiting := view.first_waiting_for(replica, 1):
        placement = policy.place(view, waiting[0], [replica])
        if placement.replica is None or not view.propose_restore(waiting[0], placement.replica, placement.reason):
            return


def restore_waiting(view: View, policy: Policy) -> None:
    """Restore programs that have a turn, by restore rank, wherever `place` says, until it holds the first of them."""
    while view.replicas and (program := view.first_waiting()) is not None:
        placement = policy.place(view, program, view.replicas)
        if placement.replica is None or not view.propose_restore(program, placement.replica, placement.reason):
            return
