"""The interface between the scheduler and a policy.

Theory of operation
===================
A policy *proposes*, the scheduler *disposes*. A policy is a small object without mutable state. All that it may know is
in the `View`, and all that it may do are the methods of the `View` whose names begin with `propose_`. Each proposal is
checked against the lifecycle table and carried out at once, so the next look at the view shows its effect; it returns
whether it was accepted.

The scheduler asks two questions:

- `place`: a turn arrived for a program that could be placed anew: it is new, paused, or active with no other turn in
  flight. Where may it be active *now*? Return a replica, or None to hold its turns in the paused queue.
- `balance`: something happened (`Moment`). Who should be paused, marked, restored?

It uses two orders, in which a lower rank comes first: `pause_rank` among the programs of a replica, and `restore_rank`
in the paused queue. Each is applied separately to acting and to reasoning programs, and must not change while a program
stays in its phase. When a tool begins the policy says for how long its program is worth holding (`hold_s`);
`first_expired` finds programs that are held for longer. How claims are counted is in its `claim_rules`.

`first_waiting` and its like do not see programs that a route binds to one replica. The scheduler asks `place` for the
first of them, with their replica as the only candidate, before it calls `balance`. To starve nobody, a policy gives no
program, new or waiting, the room of a replica for which an earlier program waits. It leaves the replica out
(`without_routed_before`), or lets others pass for a bounded time.

A policy that keeps an active program on its replica whenever that grants may set `stays_home = True`: then it is not
asked for the turns of such programs, which are most.

A policy that holds by the cost of recomputing a claim may say how long that is worth in `hold_threshold_s`, with the
arguments of `hold_s`. Then a client's hint on its program's next turn replaces the policy's guess; `hint_ratio` is the
part of a replica's limit that may be kept that way for longer than by the guess (`verbs/hints.py`). A program whose
client says that its tool ended is held for that long, too, by a policy without it for `hold_s`; after each further end
before its next turn half as long.

To write one, subclass nothing: a frozen dataclass with these members is a policy, and its fields are its settings.
Parts of it can be chosen separately, and a policy may have more than these members: see `policies/composed.py`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import Enum, auto
from math import inf
from typing import Final, NamedTuple, Protocol, TypeVar

from thunderagent.programs.model.decisions import Reason
from thunderagent.programs.model.ranked_set import Rank
from thunderagent.programs.model.records.signals import Signal
from thunderagent.programs.model.view import View
from thunderagent.programs.model.views import ProgramView, ReplicaView

SomeReplica = TypeVar("SomeReplica", bound=ReplicaView)

HINT_RATIO: Final = 0.25
"""The `hint_ratio` of a policy that does not set another."""


@dataclass(frozen=True, slots=True)
class ClaimRules:
    """How the ledger counts for a policy.

    `half_life_s` is that of an acting program's weight in `AccountView.weighed_tokens`; `inf` never decays, 0 counts
    nothing. Beyond its context, every program claims what its next turn is expected to add. With a `growth_quantile`
    over 0 that is this quantile of what turns were seen to add; until then, and otherwise, it is `reserve_tokens`. With
    `learns_reserve` it is what turns add in the mean, and `reserve_tokens` only a first guess. With
    `share_prefixes`, what programs on a replica share counts once in its demand. With `adapt_capacity`, the capacity is
    corrected by observed losses (`AccountView.limit_tokens`).
    """

    half_life_s: float = inf
    reserve_tokens: int = 0
    growth_quantile: float = 0.0
    learns_reserve: bool = False
    share_prefixes: bool = False
    adapt_capacity: bool = False


class Moment(Enum):
    """When `balance` is called."""

    TICK = auto()
    TURN_ARRIVED = auto()
    """Only `Admission.next` is called then."""
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
        """Its name on the command line, in logs and in metrics."""

    @property
    def claim_rules(self) -> ClaimRules:
        """How the ledger counts for it."""

    @property
    def tick_s(self) -> float:
        """The longest time between two ticks that the policy can work with."""

    def pause_rank(self, program: ProgramView) -> Rank:
        """Rank a program among those of its phase on its replica: the lowest is paused or marked first."""

    def restore_rank(self, program: ProgramView) -> Rank:
        """Rank a program among those of its phase in the paused queue: the lowest is restored first."""

    def hold_s(self, view: View, program: ProgramView) -> float:
        """Return how long a program is worth holding when its tool begins; `inf` for as long as there is room."""

    def place(self, view: View, program: ProgramView, candidates: Sequence[ReplicaView]) -> Placement:
        """Return where a program with a newly arrived turn may be active now; `candidates` is never empty."""

    def balance(self, view: View, moment: Moment) -> None:
        """Make proposals."""


class Admission(Protocol):
    """Decides which programs may begin."""

    @property
    def name(self) -> str:
        """Its name."""

    def rank(self, program: ProgramView) -> Rank:
        """Rank a program among the unadmitted ones: `view.first_unadmitted` is the lowest."""

    def next(self, view: View, moment: Moment) -> ProgramView | None:
        """Return an unadmitted program to admit now, or None; called again after each admission."""


class Order(Protocol):
    """Decides which program is restored first when there is room.

    An order that learns how long programs are may have `export() -> LengthsRecord` and `adopt(lengths)`: they are kept
    with all else that is learned.
    """

    @property
    def name(self) -> str:
        """Its name."""

    def restore_rank(self, program: ProgramView) -> Rank:
        """See `Policy.restore_rank`."""


class Victims(Protocol):
    """Decides which program is paused first when there is no room."""

    @property
    def name(self) -> str:
        """Its name."""

    def pause_rank(self, program: ProgramView) -> Rank:
        """See `Policy.pause_rank`."""


class EnginePriority(Protocol):
    """The order in which an engine serves its requests."""

    @property
    def name(self) -> str:
        """Its name."""

    def engine_priority(self, view: View, program: ProgramView) -> int:
        """Return the priority of a program's turn that is granted now: lower is served first."""


class GlobalPolicy(Protocol):
    """Decides what should be changed across all replicas."""

    @property
    def name(self) -> str:
        """Its name."""

    @property
    def period_s(self) -> float:
        """How often it is called, in seconds; no more often than there are ticks."""

    def decide(self, view: View) -> None:
        """Make proposals: routes, priorities, moves, kills, provisions."""


Observe = Callable[[View, Signal], None]


def least_loaded(candidates: Sequence[SomeReplica]) -> SomeReplica:
    """Return the replica with the fewest turns in flight, then the smallest demand, then the first.

    A turn with unencoded images counts twice: encoding serves one at a time.
    """
    return candidates[0] if len(candidates) == 1 else min(candidates, key=_load_of)


def _load_of(replica: ReplicaView) -> tuple[int, int]:
    account = replica.account
    return account.turn_count + (account.pending_encode_count or 0), account.demand_tokens
