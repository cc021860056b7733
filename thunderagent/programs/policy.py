"""What a policy is: what it is asked, what it may read, and what it may propose.

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

To write one, subclass `Policy`, with `place` and `balance`; everything else has a default. Its fields are its settings,
if it is a dataclass. Its parts can be chosen separately, each a subclass of its kind: see `policies/composed.py`.
"""

# interpreted: users' policies are subclasses of these classes, and no interpreted class can be one of a compiled class

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum, auto
from math import inf
from typing import Any, ClassVar, Final, NamedTuple, Protocol, TypeVar

from thunderagent.programs.messages import LengthsRecord, Reason, SandboxSums, Signal
from thunderagent.programs.state.program import Level, Phase, RouteView, Status, Turn
from thunderagent.programs.state.ranked_set import Rank

SomeReplica = TypeVar("SomeReplica", bound="ReplicaView")

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


CONTEXTS_ALONE: Final = ClaimRules()


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


Observe = Callable[["View", Signal], None]


class Learner(Protocol):
    """Learns from turns and programs as they go, without a signal made for it."""

    def turn_granted(self, program: ProgramView, turn: Turn, held_s: float, /) -> None:
        """Hear that a turn goes to its replica, for which it waited `held_s`; the program does not count it yet."""

    def turn_ended(self, view: View, program: ProgramView, turn: Turn, finished: bool, /) -> None:
        """Hear that a turn that was in flight is over; not `finished` if it failed or its client left."""

    def program_ended(self, view: View, program: ProgramView, /) -> None:
        """Hear that a program ended."""


class Part:
    """What a policy and each of its parts have."""

    @property
    def name(self) -> str:
        """Its name on the command line, in logs and in metrics; by default that of its class."""
        return type(self).__name__.lower()

    def observe(self, view: View, signal: Signal) -> None:
        """Hear a signal of the information stream, and take notes: proposals belong in `next` and `balance`."""

    def observers(self) -> Sequence[Observe]:
        """Return what hears each signal: `observe`, if it has one of its own."""
        return () if type(self).observe is Part.observe else (self.observe,)

    def learners(self) -> Sequence[Learner]:
        """Return what hears of turns and programs alone, which costs less than signals."""
        return ()


class Policy(Part, ABC):
    """Who may hold memory, on which replica; see the theory of operation of this module."""

    part_settings: ClassVar[Mapping[str, str]] = {}
    """Settings that are for a part, with its kind: they also reach a part that replaces its own."""

    @abstractmethod
    def place(self, view: View, program: ProgramView, candidates: Sequence[ReplicaView]) -> Placement:
        """Return where a program with a newly arrived turn may be active now; `candidates` is never empty."""

    @abstractmethod
    def balance(self, view: View, moment: Moment) -> None:
        """Make proposals."""

    def pause_rank(self, program: ProgramView) -> Rank:
        """Rank a program among those of its phase on its replica: the lowest is paused or marked first.

        By default the youngest.
        """
        return -program.opened_s

    def restore_rank(self, program: ProgramView) -> Rank:
        """Rank a program among those of its phase in the paused queue: the lowest is restored first.

        By default the oldest.
        """
        return program.opened_s

    def hold_s(self, view: View, program: ProgramView) -> float:  # noqa: ARG002 - the default needs neither
        """Return how long a program is worth holding when its tool begins; by default as long as there is room."""
        return inf

    def hold_threshold_s(self, view: View, program: ProgramView) -> float:  # noqa: ARG002 - as above
        """Return how long holding is worth the cost of computing a claim again, for a policy that holds by that.

        Then a client's hint on its program's next turn replaces the policy's guess, and a program whose client says
        that its tool ended is held for that long, not for `hold_s`; after each further end before its next turn half as
        long.
        """
        return 0.0

    def kept_tokens(self, view: View, program: ProgramView, replica: ReplicaView) -> float:  # noqa: ARG002 - as above
        """Return what it would keep free on a replica if a program came there, for the answer to why that waits."""
        return 0.0

    @property
    def holds_by_cost(self) -> bool:
        """Whether it has a `hold_threshold_s` of its own."""
        return type(self).hold_threshold_s is not Policy.hold_threshold_s

    @property
    def hint_ratio(self) -> float:
        """The part of a replica's limit that hints may keep for longer than the policy's guess."""
        return HINT_RATIO

    @property
    def claim_rules(self) -> ClaimRules:
        """How the ledger counts for it; by default contexts, and nothing else."""
        return CONTEXTS_ALONE

    @property
    def tick_s(self) -> float:
        """The longest time between two ticks that it can work with."""
        return 1.0

    @property
    def stays_home(self) -> bool:
        """Whether an active program always stays on its replica while that grants: then `place` is not asked for it."""
        return False

    @property
    def decider(self) -> Any:
        """What is asked to place, balance and hold in its place: itself, unless a part of it that is compiled answers.

        It is Any, because that takes the one class of views that there is, for its speed, and not just any `View`.
        """
        return self

    @property
    def holds_nobody(self) -> bool:
        """Whether it never holds a program for lack of memory: then orders and victims have no effect."""
        return False

    @property
    def admission(self) -> Admission | None:
        """Decides which programs may begin; None lets all begin."""
        return None

    @property
    def order(self) -> Order | None:
        """What `restore_rank` asks, if that is a part of its own."""
        return None

    @property
    def priority(self) -> EnginePriority | None:
        """The order in which engines serve its turns; None is none."""
        return None

    @property
    def global_policy(self) -> GlobalPolicy | None:
        """Decides what should be changed across all replicas; None changes nothing."""
        return None


class Admission(Part, ABC):
    """Decides which programs may begin."""

    @abstractmethod
    def rank(self, program: ProgramView) -> Rank:
        """Rank a program among the unadmitted ones: `view.first_unadmitted` is the lowest."""

    @abstractmethod
    def next(self, view: View, moment: Moment) -> ProgramView | None:
        """Return an unadmitted program to admit now, or None; called again after each admission."""

    @property
    def tick_s(self) -> float:
        """The longest time between two ticks that it can work with."""
        return inf


class Order(Part, ABC):
    """Decides which program is restored first when there is room."""

    @abstractmethod
    def restore_rank(self, program: ProgramView) -> Rank:
        """Rank a program, as `Policy.restore_rank` does."""

    def export(self) -> LengthsRecord | None:
        """Return what it learned of how long programs are, to be kept with all else that is learned."""
        return None

    def adopt(self, lengths: LengthsRecord) -> None:
        """Take what such an order learned before."""


class Victims(Part, ABC):
    """Decides which program is paused first when there is no room."""

    @abstractmethod
    def pause_rank(self, program: ProgramView) -> Rank:
        """Rank a program, as `Policy.pause_rank` does."""


class EnginePriority(Part, ABC):
    """The order in which an engine serves its requests."""

    @abstractmethod
    def engine_priority(self, view: View, program: ProgramView) -> int:
        """Return the priority of a program's turn that is granted now: lower is served first."""

    @property
    def tick_s(self) -> float:
        """The longest time between two ticks that it can work with."""
        return inf


class GlobalPolicy(Part, ABC):
    """Decides what should be changed across all replicas."""

    @abstractmethod
    def decide(self, view: View) -> None:
        """Make proposals: routes, priorities, moves, kills, provisions."""

    @property
    def period_s(self) -> float:
        """How often it is called, in seconds; no more often than there are ticks."""
        return 1.0

    def chained(self) -> Sequence[GlobalPolicy]:
        """Return those that it is made of, in order: itself alone, unless it is a chain."""
        return (self,)


class View(Protocol):
    """What a policy sees of the whole, and the proposals that it may make."""

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

    def may_overfill(self, replica_id: str) -> bool:
        """Return whether more programs than fit help there: nothing is held, and lost tokens cost little."""

    @property
    def limit_tokens(self) -> float:
        """What may be claimed on all of `replicas` together; infinite if the size of one is unknown."""

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
        """Who pays for it; empty if not given."""

    @property
    def program_class(self) -> str:
        """Its client's word for its kind; empty if not given."""

    @property
    def group_id(self) -> str:
        """The group it is in; empty if in none."""

    @property
    def priority(self) -> int:
        """Its set priority: lower comes first; 0 if none was set."""

    @property
    def routed_to(self) -> str | None:
        """The replica of its route, if it has an open one."""

    @property
    def parent_id(self) -> str:
        """The program that started it; empty if there is none."""

    @property
    def admitted(self) -> bool:
        """Whether it may be in the paused queue: always, if there is no admission."""

    @property
    def status(self) -> Status:
        """Whether it holds a claim."""

    @property
    def phase(self) -> Phase:
        """Whether a turn is here or its tool runs."""

    @property
    def acting_since_s(self) -> float:
        """When its tool began; only while it is acting."""

    @property
    def tool(self) -> str:
        """Name of the tool that its last turn called; empty if unknown."""

    @property
    def hold_until_s(self) -> float:
        """Until when it is worth holding; only while it is acting."""

    @property
    def waiting_since_s(self) -> float:
        """When the first of its held turns arrived; only while it waits."""

    @property
    def turn_count(self) -> int:
        """Turns that were granted so far."""

    @property
    def expected_output_tokens(self) -> int:
        """Expected output, at arrival, of its first waiting turn, or else of the turn granted last."""

    @property
    def level(self) -> Level | None:
        """A judge's level for its prospects; None before the first verdict."""

    @property
    def is_last_of_group(self) -> bool:
        """Whether it is in a group whose other programs have all ended."""

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
        """The part of the prompts that was cached."""

    @property
    def growth_tokens(self) -> int:
        """Expected growth beyond that, until it is as large as programs are on average."""


class AccountView(Protocol):
    """What a policy may read of a replica's sums, all in tokens."""

    @property
    def capacity_tokens(self) -> int | None:
        """Size of its KV pool; None is not known."""

    @property
    def assumed_tokens(self) -> float | None:
        """The same; if it is unknown, the median of the others' sizes; None if none is known."""

    @property
    def limit_tokens(self) -> float:
        """Return what may be claimed: the assumed size, corrected if the policy wants that; infinite without one."""

    @property
    def reasoning_tokens(self) -> int:
        """Claims of programs with a turn in flight, including marked ones."""

    @property
    def marked_tokens(self) -> int:
        """The part of these that is given back when the turns in flight end."""

    @property
    def growth_tokens(self) -> int:
        """Expected growth of its programs beyond their claims."""

    @property
    def turn_count(self) -> int:
        """Number of turns in flight."""

    @property
    def active_count(self) -> int:
        """Number of programs that are active there."""

    @property
    def hit_ratio(self) -> float:
        """The engine's prefix-cache hit rate by tokens, between the last two polls with lookups."""

    @property
    def kv_used_ratio(self) -> float:
        """Part of the KV pool that running requests referenced at the last poll; cached blocks count as free."""

    @property
    def engine_waiting_count(self) -> int:
        """Requests that waited in the engine at the last poll."""

    @property
    def pending_encode_count(self) -> int | None:
        """Turns there with unencoded images, as far as known; None if encoding is no stage of its own."""

    @property
    def demand_tokens(self) -> int:
        """All claims in full; if the policy wants that, shared tokens count once."""

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


def least_loaded(candidates: Sequence[SomeReplica]) -> SomeReplica:
    """Return the replica with the fewest turns in flight, then the smallest demand, then the first.

    A turn with unencoded images counts twice: encoding serves one at a time.
    """
    return candidates[0] if len(candidates) == 1 else min(candidates, key=_load_of)


def _load_of(replica: ReplicaView) -> tuple[int, int]:
    account = replica.account
    return account.turn_count + (account.pending_encode_count or 0), account.demand_tokens
