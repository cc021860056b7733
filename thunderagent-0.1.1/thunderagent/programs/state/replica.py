"""A replica as the scheduler sees it: its account, the places of its programs, and what is left in its memory.

What is left in an engine's memory
==================================
Whose tokens are still there is estimated, by following the engine's least-recently-used order from outside.

An engine keeps the blocks of ended turns until it needs them. It evicts the oldest first, and each program's tail
first. So what is left of a program depends on how much was touched since its last turn: by programs that run, whose
tools run, that are paused, or that have ended. The engine does not know the difference. A list of programs in the order
of their last turns, with their tokens, is enough to follow that: one entry per turn, O(1) each.

It is an estimate: shared tokens are left out where known, and preemptions in the engine are not seen. If an engine
reports what it holds, that replaces the estimate.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from math import inf
from typing import Final

from thunderagent.programs.state.accounts import Account
from thunderagent.programs.state.health import Keeping, Verdict
from thunderagent.programs.state.prefixes import SharedPrefixes
from thunderagent.programs.state.program import Kind, Place, Program
from thunderagent.programs.state.ranked_set import Rank, RankedSet

PROGRAMS_COUNT: Final = 10_000
"""How many programs without a turn are remembered: nothing else bounds them if the memory's size is unknown."""


class Residency:
    """What is in one replica's memory, by the program's generation, which is unique."""

    __slots__ = ("_idle", "_idle_tokens", "_used", "_used_tokens", "capacity_tokens")

    def __init__(self) -> None:
        """Create an empty memory of unknown size, from which nothing is evicted."""
        self.capacity_tokens: int | None = None
        self._idle: OrderedDict[int, int] = OrderedDict()
        self._idle_tokens = 0
        self._used: dict[int, int] = {}
        self._used_tokens = 0

    def __repr__(self) -> str:
        return f"<Residency {self._used_tokens} in use, {self._idle_tokens} idle, of {self.capacity_tokens} tokens>"

    def __len__(self) -> int:
        return len(self._used) + len(self._idle)

    def resident_tokens(self, generation: int) -> int:
        """Return how many tokens of a program are there."""
        if generation in self._idle:
            return self._idle[generation]
        return self._used.get(generation, 0)

    def use(self, generation: int, tokens: int) -> None:
        """Note that a turn of a program runs, or goes on, with `tokens` of its own in all; negative counts as none."""
        if tokens < 0:
            tokens = 0
        if generation in self._idle:
            self._idle_tokens -= self._idle.pop(generation)
        self._used_tokens += tokens - self._used.get(generation, 0)
        self._used[generation] = tokens
        if self.capacity_tokens is not None and self._idle_tokens + self._used_tokens > self.capacity_tokens:
            self._shrink(self.capacity_tokens)

    def leave(self, generation: int, tokens: int) -> None:
        """Note that a program's last turn ended and left `tokens` behind. Does nothing if it had no turn."""
        used_tokens = self._used.pop(generation, None)
        if used_tokens is None:
            return
        self._used_tokens -= used_tokens
        self._idle[generation] = tokens
        self._idle_tokens += tokens
        if len(self._idle) > PROGRAMS_COUNT:
            self._idle_tokens -= self._idle.popitem(last=False)[1]
        if self.capacity_tokens is not None and self._idle_tokens + self._used_tokens > self.capacity_tokens:
            self._shrink(self.capacity_tokens)

    def report(self, generation: int, tokens: int) -> None:
        """Replace the estimate for a program without a turn by the engine's report."""
        if generation not in self._used and (tokens or generation in self._idle):
            self._idle_tokens += tokens - self._idle.get(generation, 0)
            self._idle[generation] = tokens

    def clear_idle(self) -> None:
        """Note that nothing is left except what turns in flight use."""
        self._idle.clear()
        self._idle_tokens = 0

    def clear(self) -> None:
        """Note that the memory is empty."""
        self._idle.clear()
        self._used.clear()
        self._idle_tokens = self._used_tokens = 0

    def _shrink(self, capacity_tokens: int) -> None:
        idle = self._idle
        excess_tokens = self._idle_tokens + self._used_tokens - capacity_tokens
        while excess_tokens > 0 and idle:
            generation, tokens = next(iter(idle.items()))
            if tokens > excess_tokens:
                idle[generation] = tokens - excess_tokens
                self._idle_tokens -= excess_tokens
                return
            del idle[generation]
            self._idle_tokens -= tokens
            excess_tokens -= tokens


RankOf = Callable[[Program], Rank]

MOST_AT_ONCE_COUNT: Final = 64
"""How many programs are looked up at a time to be paused in one batch."""


class ReplicaPlace(Place):
    """A place whose programs claim memory of a replica: its account grows and shrinks with it.

    The order by the policy's rank is kept only once the policy has asked for it. The policy is asked for a rank last,
    when all is booked.
    """

    __slots__ = ("_account", "_rank_of", "kept", "replica")

    def __init__(self, kind: Kind, replica: Replica, rank_of: RankOf) -> None:
        """Create an empty place."""
        super().__init__(kind, replica.replica_id)
        self.replica = replica
        self._account = replica.account
        self._rank_of = rank_of
        self.kept: RankedSet[Program] | None = None
        """The order, if one is kept: readers use this, because it changes nothing."""

    def enter(self, program: Program, now_s: float) -> None:  # noqa: ARG002
        """Add a program."""
        account, tokens = self._account, program.claim_tokens
        self.count += 1
        self.tokens += tokens
        account.active_count += 1
        account.demand_tokens += tokens
        account.growth_tokens += program.growth_tokens
        if self.kept is not None:
            self.rank(program)

    def leave(self, program: Program, now_s: float) -> None:  # noqa: ARG002
        """Remove a program."""
        account, tokens = self._account, program.claim_tokens
        self.count -= 1
        self.tokens -= tokens
        account.active_count -= 1
        account.demand_tokens -= tokens
        account.growth_tokens -= program.growth_tokens
        if self.kept is not None:
            self.kept.discard(program)

    def resize(self, program: Program, claim_tokens: int, growth_tokens: int, now_s: float) -> None:  # noqa: ARG002
        """Record that a program's size changed from these values."""
        more_tokens = program.claim_tokens - claim_tokens
        self.tokens += more_tokens
        self._account.demand_tokens += more_tokens
        self._account.growth_tokens += program.growth_tokens - growth_tokens
        if self.kept is not None:
            self.rank(program)

    def rank(self, program: Program) -> None:
        """Move a program to the position of its rank, if the order is kept."""
        if self.kept is not None:
            self.kept.add(program, self._rank_of(program))

    @property
    def order(self) -> RankedSet[Program]:
        """Return the programs by rank, lowest first; the order is kept from now on."""
        if self.kept is None:
            self.kept = RankedSet()
            self._fill(self.kept, [program for program in self.replica.programs.values() if program.place is self])
        return self.kept

    def _fill(self, order: RankedSet[Program], programs: Sequence[Program]) -> None:
        order.add_all(programs, [self._rank_of(program) for program in programs])


class AskingPlace(ReplicaPlace):
    """Where an active program is while the policy is asked about its turn: it claims nothing there."""

    __slots__ = ()

    def enter(self, program: Program, now_s: float) -> None:
        """Add a program."""
        Place.enter(self, program, now_s)

    def leave(self, program: Program, now_s: float) -> None:
        """Remove a program."""
        Place.leave(self, program, now_s)

    def resize(self, program: Program, claim_tokens: int, growth_tokens: int, now_s: float) -> None:
        """Record that a program's size changed from these values."""
        Place.resize(self, program, claim_tokens, growth_tokens, now_s)


class LeavingPlace(ReplicaPlace):
    """Programs that leave. Only those that the policy marked are in the order, the last one marked first."""

    __slots__ = ()

    def rank(self, program: Program) -> None:
        """Move a program to the position of its rank, or out of the order if it leaves whatever the policy says."""
        if self.kept is None:
            return
        if program.marked_by_policy:
            self.kept.add(program, -self._rank_of(program))
        else:
            self.kept.discard(program)

    def _fill(self, order: RankedSet[Program], programs: Sequence[Program]) -> None:
        super()._fill(order, [])
        for program in programs:
            self.rank(program)


class ActingPlace(ReplicaPlace):
    """Acting programs: the sum of their claims may fade with time, and those held too long are found."""

    __slots__ = ("_entered_count", "hint_tokens", "kept_expiring")

    def __init__(self, kind: Kind, replica: Replica, rank_of: RankOf) -> None:
        """Create an empty place."""
        super().__init__(kind, replica, rank_of)
        self.hint_tokens = 0
        """Tokens that clients' hints keep here for longer than the policy would have."""
        self._entered_count = 0
        self.kept_expiring: RankedSet[Program] | None = None
        """The order of `expiring`, once somebody has asked for it: readers use this, because it changes nothing."""

    def enter(self, program: Program, now_s: float) -> None:
        """Add a program."""
        if self._account.decayed is not None:
            self._account.decayed.add(program.claim_tokens, program.acting_since_s, now_s)
        self._entered_count += 1
        program.acting_number = self._entered_count
        if self.kept_expiring is not None and program.hold_until_s < inf:
            self.kept_expiring.add(program, program.hold_until_s)
        if program.hint_keeps:
            self.hint_tokens += program.claim_tokens
        ReplicaPlace.enter(self, program, now_s)  # quicker than by super()

    def leave(self, program: Program, now_s: float) -> None:
        """Remove a program."""
        ReplicaPlace.leave(self, program, now_s)
        if self._account.decayed is not None:
            self._account.decayed.remove(program.claim_tokens, program.acting_since_s, now_s)
        if self.kept_expiring is not None:
            self.kept_expiring.discard(program)
        if program.hint_keeps:
            self.hint_tokens -= program.claim_tokens

    def resize(self, program: Program, claim_tokens: int, growth_tokens: int, now_s: float) -> None:
        """Record that a program's size changed from these values."""
        if self._account.decayed is not None:
            self._account.decayed.remove(claim_tokens, program.acting_since_s, now_s)
            self._account.decayed.add(program.claim_tokens, program.acting_since_s, now_s)
        if program.hint_keeps:
            self.hint_tokens += program.claim_tokens - claim_tokens
        super().resize(program, claim_tokens, growth_tokens, now_s)

    @property
    def expiring(self) -> RankedSet[Program]:
        """Return programs by the time until which they are worth holding, if they have one; kept from now on."""
        if self.kept_expiring is None:
            self.kept_expiring = RankedSet()
            here = [program for program in self.replica.programs.values() if program.place is self]
            here.sort(key=_acting_number_of)
            for program in here:
                if program.hold_until_s < inf:
                    self.kept_expiring.add(program, program.hold_until_s)
        return self.kept_expiring

    def pressing_tokens(self, now_s: float) -> float:
        """Return the claims on the replica except those of leaving programs; acting ones are weighed if claims fade."""
        account = self._account
        claimed_tokens = account.demand_tokens if account.decayed is None else account.weighed_tokens(now_s)
        return claimed_tokens - account.leaving.tokens

    def take_until(self, most_tokens: float, least_count: int, now_s: float, prefixes: SharedPrefixes) -> list[Program]:
        """Remove and return programs until the others here, except leaving ones, claim at most `most_tokens`.

        Programs held too long go first, the longest first, then by rank, while more than `least_count` are active. They
        are looked up many at a time, and sums are updated once for all where possible.
        """
        account, decayed, order, expiring = self._account, self._account.decayed, self.order, self.expiring
        pressing_tokens, most_count = self.pressing_tokens(now_s), account.active_count - least_count
        some_share, faded_tokens = bool(prefixes.tree.cuts), 0.0
        gone: list[Program] = []
        expired = expiring.lowest(most_count, now_s) if expiring else []
        while pressing_tokens > most_tokens and len(gone) < most_count:
            first, taken_count = expired or order.lowest(MOST_AT_ONCE_COUNT), 0
            if not first:
                break
            for program in first:
                if pressing_tokens <= most_tokens or len(gone) >= most_count:
                    break
                taken_count += 1
                gone.append(program)
                account.demand_tokens -= program.claim_tokens
                if some_share:
                    prefixes.leave(program, account)
                if decayed is None:
                    pressing_tokens = float(account.demand_tokens - account.leaving.tokens)
                else:
                    weighed_tokens = program.claim_tokens * decayed.weight(now_s - program.acting_since_s)
                    pressing_tokens -= weighed_tokens
                    faded_tokens += weighed_tokens
            whole, other = (expiring, order) if expired else (order, expiring)
            whole.discard_lowest(taken_count)
            if other:
                for program in first[:taken_count]:
                    other.discard(program)
            expired = []
        if decayed is not None:
            decayed.change(-faded_tokens, -len(gone), now_s)
        if self.hint_tokens:
            for program in gone:
                self.hint_tokens -= program.claim_tokens if program.hint_keeps else 0
                program.hint_keeps = False
        self.count -= len(gone)
        self.tokens -= sum([program.claim_tokens for program in gone])
        account.active_count -= len(gone)
        account.growth_tokens -= sum([program.growth_tokens for program in gone])
        return gone


def _acting_number_of(program: Program) -> int:
    return program.acting_number


def replica_of(program: Program) -> Replica:
    """Return the replica on which a program is active."""
    place = program.place
    assert isinstance(place, ReplicaPlace), program
    return place.replica


class Replica:
    """One running engine, or one data-parallel rank of it."""

    __slots__ = (
        "account",
        "acting",
        "asking",
        "draining",
        "flushed_s",
        "keeping",
        "leaving",
        "let_in",
        "own_causes",
        "programs",
        "replica_id",
        "residency",
        "stalled",
        "suspended_everywhere_for",
        "tells_cached",
        "tripped",
        "up",
        "verdict",
        "working",
    )

    def __init__(
        self, replica_id: str, account: Account, suspended_everywhere_for: Mapping[str, None], pause_rank: RankOf
    ) -> None:
        """Create a replica that is not up yet; it sees the causes that suspend grants everywhere."""
        self.replica_id = replica_id
        self.account = account
        self.up = False
        self.draining = False
        self.suspended_everywhere_for = suspended_everywhere_for
        self.own_causes: dict[str, None] = {}
        """Causes that suspend grants on this replica alone, in the order in which they came."""
        self.flushed_s = -inf
        """When the cache that it keeps for later turns was last flushed."""
        self.tripped = False
        self.verdict = Verdict(0.0)
        self.keeping = Keeping()
        self.programs: dict[str, Program] = {}
        """Programs that are active here."""
        self.let_in: set[Program] = set()
        """Those of them that got their claims regardless of room."""
        self.asking = AskingPlace(Kind.ASKING, self, pause_rank)
        self.working = ReplicaPlace(Kind.WORKING, self, pause_rank)
        self.leaving = LeavingPlace(Kind.LEAVING, self, pause_rank)
        self.stalled = ReplicaPlace(Kind.STALLED, self, pause_rank)
        self.acting = ActingPlace(Kind.ACTING, self, pause_rank)
        account.working, account.leaving, account.stalled, account.acting = (
            self.working,
            self.leaving,
            self.stalled,
            self.acting,
        )
        self.residency = Residency()
        self.tells_cached = False
        """Whether the engine reports for each turn what was cached."""

    def __repr__(self) -> str:
        account = self.account
        health = "draining" if self.draining else "tripped" if self.tripped else "up" if self.up else "down"
        if self.suspended_for:
            health += f", suspended for {', '.join(self.suspended_for)}"
        return (
            f"<Replica {self.replica_id} {health}: {account.demand_tokens}/{account.capacity_tokens} tokens, "
            f"{account.reasoning_count} reasoning, {account.acting.count} acting>"
        )

    def may_overdraw(self, claim_tokens: int, overdraft_ratio: float) -> bool:
        """Return whether one more program may be let in here regardless of room.

        One always may, so that nobody waits for ever; beyond that, all together overdraw at most this ratio of the
        limit.
        """
        demand_tokens, limit_tokens = self.account.demand_tokens, self.account.limit_tokens
        if demand_tokens <= limit_tokens or not self.let_in:
            return True
        return demand_tokens + claim_tokens <= limit_tokens * (1.0 + overdraft_ratio)

    def longest_turn_s(self, now_s: float) -> float:
        """Return how long the longest turn in flight here has run; 0 if there is none."""
        granted_s = [turn.granted_s for program in self.programs.values() for turn in program.in_flight.values()]
        return max(0.0, now_s - min(granted_s, default=inf))

    @property
    def suspended_for(self) -> Mapping[str, None]:
        """Causes that suspend grants here: those of all replicas, then this one's own."""
        everywhere, own = self.suspended_everywhere_for, self.own_causes
        return {**everywhere, **own} if everywhere and own else everywhere or own

    @property
    def open_to_programs(self) -> bool:
        """Whether programs may get claims here: now, or when grants go on."""
        return self.up and not self.draining and not self.tripped

    @property
    def grants(self) -> bool:
        """Whether a program may get a claim here now."""
        return self.open_to_programs and not self.own_causes and not self.suspended_everywhere_for
