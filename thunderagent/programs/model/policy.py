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
there, a policy lets no program have the room of a replica for which one waits that comes before it, neither a newcomer
nor one that waits as well: it leaves the replica out (`without_routed_before`), or lets pass for a bounded time.

A policy that has an active program go on where it is, whenever its replica grants, may say `stays_home = True`: then it
is not asked for the turns of such programs, which are most.

A policy that holds by what it costs to compute a claim again may say how long that is worth in `hold_threshold_s`, with
the arguments of `hold_s`. Then what a client says of its program's next turn takes the place of its guess; `hint_ratio`
is the part of a replica's limit that may be kept so for longer than by the guess (`verbs/hints.py`).

To write one, subclass nothing: a frozen dataclass with these members is a policy, its fields are its settings. Parts of
it can be chosen apart, and a policy may have more than these members: see `policies/composed.py`.
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
"""The `hint_ratio` of a policy that does not say another."""


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


class Admission(Protocol):
    """Whether programs may begin."""

    @property
    def name(self) -> str:
        """The word for it."""

    def rank(self, program: ProgramView) -> Rank:
        """Rank a program among those that wait unadmitted: `view.first_unadmitted` is the lowest."""

    def next(self, view: View, moment: Moment) -> ProgramView | None:
        """Return who of those unadmitted is admitted now, or None; asked again after each that was."""


class Order(Protocol):
    """Who is restored first when there is room.

    One that learns how long programs are may have `export() -> LengthsRecord` and `adopt(lengths)`: it is kept with all
    else that is learned.
    """

    @property
    def name(self) -> str:
        """The word for it."""

    def restore_rank(self, program: ProgramView) -> Rank:
        """See `Policy.restore_rank`."""


class Victims(Protocol):
    """Who is paused first when there is none."""

    @property
    def name(self) -> str:
        """The word for it."""

    def pause_rank(self, program: ProgramView) -> Rank:
        """See `Policy.pause_rank`."""


class EnginePriority(Protocol):
    """In which order an engine serves what it was given."""

    @property
    def name(self) -> str:
        """The word for it."""

    def engine_priority(self, view: View, program: ProgramView) -> int:
        """Return the priority of a turn of that program that is granted now: lower is served first."""


class GlobalPolicy(Protocol):
    """What should be changed, seen from above."""

    @property
    def name(self) -> str:
        """The word for it."""

    @property
    def period_s(self) -> float:
        """How often it is asked, in seconds; no more often than there are ticks."""

    def decide(self, view: View) -> None:
        """Make proposals: routes, priorities, moves, kills, provisions."""


Observe = Callable[[View, Signal], None]


def least_loaded(candidates: Sequence[SomeReplica]) -> SomeReplica:
    """Return the replica with the fewest turns in flight, then the smallest demand, then the first.

    A turn whose images are yet to be encoded counts twice: it goes through a stage that serves one at a time.
    """
    return min(candidates, key=_load_of)


def _load_of(replica: ReplicaView) -> tuple[int, int]:
    account = replica.account
    return account.turn_count + (account.pending_encode_count or 0), account.demand_tokens
