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
while a program stays in its phase.

To write one, subclass nothing: a frozen dataclass with these members is a policy, its fields are its settings.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from enum import Enum, auto
from math import inf
from typing import TYPE_CHECKING, NamedTuple, Protocol

from thunderagent.programs.decisions import Reason

if TYPE_CHECKING:
    from thunderagent.programs.lifecycle import Phase, Status
    from thunderagent.programs.ranked_set import Rank


class ProgramView(Protocol):
    """What a policy may read of a program."""

    @property
    def program_id(self) -> str:
        """The client's name for it."""

    @property
    def opened_s(self) -> float:
        """When its first turn arrived."""

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
    def replica_id(self) -> str | None:
        """Where it is active, or was last."""

    @property
    def claim_tokens(self) -> int:
        """What it claims, or would claim."""


class AccountView(Protocol):
    """What a policy may read of a replica's sums, all in tokens."""

    @property
    def capacity_tokens(self) -> int | None:
        """Size of its KV pool; None is not known."""

    @property
    def reasoning_tokens(self) -> int:
        """Claims of programs with a turn in flight, marked ones among them."""

    @property
    def marked_tokens(self) -> int:
        """Part of these that goes when the turns in flight end."""

    @property
    def turn_count(self) -> int:
        """Turns in flight."""

    @property
    def active_count(self) -> int:
        """Programs that are active there."""

    @property
    def demand_tokens(self) -> int:
        """All claims, each in full."""

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
    def active_count(self) -> int:
        """Programs that hold a claim anywhere."""

    def first_to_pause(self, replica: ReplicaView) -> ProgramView | None:
        """Return the acting program with the lowest pause rank there."""

    def first_to_mark(self, replica: ReplicaView) -> ProgramView | None:
        """Return the unmarked reasoning program with the lowest pause rank there."""

    def first_waiting(self) -> ProgramView | None:
        """Return the paused program with the lowest restore rank among those whose turns are held."""

    def waiting(self) -> Iterator[ProgramView]:
        """Yield paused programs whose turns are held by restore rank, as they are now. Cost: O(n log n) of them."""

    def first_paused_acting(self) -> ProgramView | None:
        """Return the paused program with the lowest restore rank among those whose tools run."""

    def comes_before_all_waiting(self, program: ProgramView) -> bool:
        """Say whether `program` would be the first to be restored among those with a turn."""

    def propose_pause(self, program: ProgramView, reason: Reason) -> bool:
        """Take an acting program's claim away."""

    def propose_mark(self, program: ProgramView, reason: Reason) -> bool:
        """Pause a reasoning program at the end of its turn."""

    def propose_restore(self, program: ProgramView, replica: ReplicaView, reason: Reason) -> bool:
        """Give a paused program a claim on that replica, and grant its held turns."""


class Moment(Enum):
    """When `balance` is asked."""

    TICK = auto()
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
    def half_life_s(self) -> float:
        """Half-life of an acting program's weight in `AccountView.weighed_tokens`."""

    @property
    def reserve_tokens(self) -> int:
        """What every program claims beyond its context: room for what its next turn adds."""

    @property
    def tick_s(self) -> float:
        """Longest time between two ticks that the policy can work with."""

    def pause_rank(self, program: ProgramView) -> Rank:
        """Rank a program among those of its phase on its replica: the lowest is paused or marked first."""

    def restore_rank(self, program: ProgramView) -> Rank:
        """Rank a program among those of its phase in the paused queue: the lowest is restored first."""

    def place(self, view: View, program: ProgramView, candidates: Sequence[ReplicaView]) -> Placement:
        """Say where a program with a turn that just arrived may be active now; `candidates` is never empty."""

    def balance(self, view: View, moment: Moment) -> None:
        """Make proposals."""


def least_loaded(candidates: Sequence[ReplicaView]) -> ReplicaView:
    """Return the replica with the fewest turns in flight, then the smallest demand, then the first."""
    return min(candidates, key=lambda replica: (replica.account.turn_count, replica.account.demand_tokens))


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


def restore_waiting(view: View, policy: Policy) -> None:
    """Restore programs that have a turn, by restore rank, wherever `place` says, until it holds the first of them."""
    while view.replicas and (program := view.first_waiting()) is not None:
        placement = policy.place(view, program, view.replicas)
        if placement.replica is None or not view.propose_restore(program, placement.replica, placement.reason):
            return
