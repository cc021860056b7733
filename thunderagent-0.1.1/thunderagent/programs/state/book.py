"""The book: where each program is and what it holds. Only `move` and `resize` write where programs stand."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from itertools import count
from math import inf

from thunderagent.programs.messages import Decision, Mark, Pause, Reason, Release, Restore, SandboxSums, Unmark
from thunderagent.programs.state.accounts import Account, Ledger
from thunderagent.programs.state.health import ReplicaState, Verdict
from thunderagent.programs.state.paused_queue import PausedQueue, RankOf, TenantShares
from thunderagent.programs.state.prefixes import SharedPrefixes
from thunderagent.programs.state.program import Group, Kind, Place, Program, Turn, not_allowed
from thunderagent.programs.state.ranked_set import RankedSet
from thunderagent.programs.state.replica import Replica, ReplicaPlace


class Rooms:
    """Granting replicas, first those with most of `ratio` of their limits left; ties in any order.

    Kept once it was asked for. A change of a replica costs O(1), and O(log replicas) at the next question.
    """

    __slots__ = ("_order", "ratio", "stale")

    def __init__(self, ratio: float) -> None:
        """Create an empty order."""
        self.ratio = ratio
        self._order: RankedSet[Replica] = RankedSet()
        self.stale: dict[Replica, None] = {}
        """Replicas whose room changed since the last question."""

    def set_granting(self, replicas: Sequence[Replica]) -> None:
        """Record which replicas grant."""
        self._order = RankedSet()
        self.stale = dict.fromkeys(replicas)

    def first(self, count: int) -> list[Replica]:
        """Return the `count` replicas with most room."""
        order = self._order
        for replica in self.stale:
            account = replica.account
            if account.usable:
                order.add(replica, account.demand_tokens - self.ratio * account.limit_tokens)
        self.stale.clear()
        return order.lowest(count)


class Book:
    """Programs, turns, replicas and the paused queue, with all sums.

    Generations come from one counter, so the generation of a long-forgotten id never comes back, and ids that are gone
    take no memory.
    """

    def __init__(
        self,
        queue: PausedQueue,
        measure: Callable[[Program], None],
        pause_rank: RankOf,
        half_life_s: float = inf,
        shares: TenantShares | None = None,
    ) -> None:
        """Create a book without replicas and programs; `measure` says what a program claims."""
        self.queue = queue
        self._measure = measure
        self._pause_rank = pause_rank
        self._shares = shares
        self.now_s = 0.0
        self.programs: dict[str, Program] = {}
        """Live programs by id."""
        self.turns: dict[int, Turn] = {}
        """Every turn that has not ended, by its id."""
        self.anonymous_held: dict[int, Turn] = {}
        self.groups: dict[tuple[str, str], Group] = {}
        """By tenant and id."""
        self.ledger = Ledger(half_life_s, queue)
        self.prefixes = SharedPrefixes()
        self.replicas: dict[str, Replica] = {}
        self.open_replicas: list[Replica] = []
        """Replicas on which a program may get a claim, now or when grants go on."""
        self.granting_replicas: list[Replica] = []
        """Open replicas on which grants are not suspended: what a policy sees."""
        self.changed_replicas: dict[str, Replica] = {}
        """Replicas whose programs came, went or changed in size since the policy was last asked to balance."""
        self.changed_programs: dict[str, Program | None] | None = None
        """Programs that moved or changed in size, by id, until they are written down; None if nobody writes them.

        Of an ended program only the id stays.
        """
        self.rooms: Rooms | None = None
        """Granting replicas ordered by room, once a policy has asked for that."""
        self.suspended_for: dict[str, None] = {}
        """Causes that suspend grants on every replica; each replica sees them beside its own."""
        self.active_count = 0
        self.decisions: list[Decision] = []
        """Decisions on this event."""
        self.sandboxes = SandboxSums()
        """As last measured."""
        self.generations = count(1)
        """Counter shared with the books of other pools."""
        admits_all = queue.unadmitted.admitted
        self.announced = Place(Kind.AWAY, admitted=admits_all)
        """Programs without a turn so far."""
        self.dismissed = Place(Kind.AWAY, admitted=admits_all)
        """Programs that must be admitted before their next turn."""
        self.idle = Place(Kind.AWAY)
        """Programs that gave their claim up at the idle limit, or have nothing to restore."""
        self.destined = Place(Kind.AWAY)
        """Programs that will be active on a certain replica from their next turn on."""
        self.asking = Place(Kind.ASKING)
        self.ended = Place(Kind.ENDED)

    @property
    def admitted_count(self) -> int:
        """Programs that began or may begin: all of them, if the policy has no admission."""
        if self.dismissed.admitted:
            return len(self.programs)
        return len(self.programs) - self.announced.count - self.dismissed.count - self.queue.unadmitted.count

    # --- programs ---------------------------------------------------------------------------------------------------

    def open(self, program_id: str, tenant: str) -> Program:
        """Open a new incarnation of an id that has no live program."""
        assert program_id not in self.programs, f"{program_id} is opened twice"
        program = Program(program_id, next(self.generations), self.now_s, self.announced)
        program.tenant = tenant
        self.programs[program_id] = program
        self.announced.enter(program, self.now_s)
        if self.changed_programs is not None:
            self.changed_programs[program_id] = program
        return program

    def move(  # noqa: C901 - what does not apply is not called
        self, program: Program, to: Place, why: Reason | None = None, *, resized: bool = False
    ) -> None:
        """Move a program: update its sums, its orders and its story, and make the decision that reports it, if any.

        Raises `LifecycleError` with the story if the table has no such move. `why` is the decision's reason. With
        `resized` its claim is measured between the two places.
        """
        place, now_s = program.place, self.now_s
        if to.kind not in place.allowed:
            raise not_allowed(program, to.kind)
        claimed = place if place.active else to
        replica = claimed.replica if isinstance(claimed, ReplicaPlace) else None
        if replica is not None:
            self.changes(replica)
        if self.queue.routed:
            self._accrue_where_waited(place, to)
        place.leave(program, now_s)
        claim_tokens = program.claim_tokens
        if resized:
            self._measure(program)
        program.place = to
        if self.changed_programs is not None:
            self.changed_programs[program.program_id] = program if to is not self.ended else None
        if replica is not None:
            if place.active is not to.active:
                self._claims(program, replica, why, to.active)
            elif why is not None and (to is replica.leaving or place is replica.leaving):
                decision, what = (Mark, "mark") if to is replica.leaving else (Unmark, "unmark")
                program.note(now_s, what, why, replica.replica_id)
                self.decisions.append(decision(program.program_id, replica.replica_id, why))
        if self._shares is not None:
            before_tokens = claim_tokens if place.claims else 0
            self._shares.claims(program.tenant, (program.claim_tokens if to.claims else 0) - before_tokens)
        if to is not self.ended:  # nobody asks how many have ended
            to.enter(program, now_s)
        if place.replica_id is not None and not place.active:
            self.queue.tidy(place)
        if to is self.ended and why is not None:
            del self.programs[program.program_id]
            program.note(now_s, "release", why, program.replica_id)
            self.decisions.append(Release(program.program_id, program.generation, why))

    def _accrue_where_waited(self, *places: Place) -> None:
        """Bring the integrals of replicas up to date for which programs wait in one of these places, and no other."""
        for place in places:
            if place.replica_id is not None and not place.active:
                account = self.ledger.accounts.get(place.replica_id)
                if account is not None:
                    self.ledger.accrue(account, self.now_s)

    def _claims(self, program: Program, replica: Replica, why: Reason | None, gets_one: bool) -> None:
        """Record that a program got or lost a claim on a replica."""
        replica_id, account = replica.replica_id, replica.account
        if gets_one:
            program.replica_id = replica_id
            for branch in program.branches.values():
                branch.kept_since_s = -inf
            replica.programs[program.program_id] = program
            self.active_count += 1
            self.prefixes.enter(program, account)
        else:
            self.prefixes.leave(program, account)
            program.leaves_for.clear()
            program.hint_keeps = False
            del replica.programs[program.program_id]
            replica.let_in.discard(program)
            self.active_count -= 1
        if why is not None and program.place is not self.ended:
            decision, what = (Restore, "restore") if gets_one else (Pause, "pause")
            program.note(self.now_s, what, why, replica_id)
            self.decisions.append(decision(program.program_id, replica_id, why))

    def pause_until(self, replica: Replica, most_tokens: float, why: Reason, least_count: int) -> Sequence[Program]:
        """Move acting programs off a replica in one batch, and return them: see `View.propose_pause_until`."""
        account, acting, now_s = replica.account, replica.acting, self.now_s
        if account.active_count <= least_count or not acting.count or acting.pressing_tokens(now_s) <= most_tokens:
            return ()
        self.changes(replica)
        gone = acting.take_until(most_tokens, least_count, now_s, self.prefixes)
        resting: list[Program] = []
        destined: list[Program] = []
        replica_id, programs, shares = replica.replica_id, replica.programs, self._shares
        for program in gone:
            if program.destination is None and program.routed_to is None:
                program.place = self.queue.resting
                resting.append(program)
            else:
                program.place = self.destined
                destined.append(program)
            program.note(now_s, "pause", why, replica_id)
            del programs[program.program_id]
            if shares is not None:
                shares.claims(program.tenant, -program.claim_tokens)
        self.active_count -= len(gone)
        if replica.let_in:
            replica.let_in.difference_update(gone)
        if self.changed_programs is not None:
            self.changed_programs.update((program.program_id, program) for program in gone)
        self.destined.enter_all(destined, now_s)
        self.queue.resting.enter_all(resting, now_s)
        self.decisions += [Pause(program.program_id, replica_id, why) for program in gone]
        return gone

    def resize(self, program: Program) -> None:
        """Measure and book what a program claims; without a claim it is not ranked anew.

        If it claims as much as before, as with a turn that generates what was foreseen, its replica did not change.
        """
        place = program.place
        claim_tokens, growth_tokens = program.claim_tokens, program.growth_tokens
        self._measure(program)
        if self.changed_programs is not None:
            self.changed_programs[program.program_id] = program
        if program.claim_tokens == claim_tokens and program.growth_tokens == growth_tokens:
            if place.active:
                place.rank(program)
            return
        if isinstance(place, ReplicaPlace):
            self.changes(place.replica)
        if self._shares is not None and place.claims and program.claim_tokens != claim_tokens:
            self._shares.claims(program.tenant, program.claim_tokens - claim_tokens)
        place.resize(program, claim_tokens, growth_tokens, self.now_s)

    def enter_anew(self, program: Program) -> None:
        """Put a program behind its equals in its place."""
        program.place.leave(program, self.now_s)
        program.place.enter(program, self.now_s)

    def act_anew(self, program: Program, since_s: float, hold_until_s: float, *, hint_keeps: bool = False) -> None:
        """Set since when a program's tool runs, and until when its claim is worth holding, by a hint or not."""
        place = program.place
        if isinstance(place, ReplicaPlace):
            self.changes(place.replica)
        place.leave(program, self.now_s)
        program.acting_since_s, program.hold_until_s, program.hint_keeps = since_s, hold_until_s, hint_keeps
        place.enter(program, self.now_s)
        if self.changed_programs is not None:
            self.changed_programs[program.program_id] = program

    def rank_anew(self, program: Program) -> None:
        """Ask the policy again for a program's rank in its place, or for its place."""
        place = program.place
        if isinstance(place, ReplicaPlace):
            self.changes(place.replica)
            place.rank(program)
        elif (to := self.paused_place(program)) is not place:
            self.move(program, to)
        else:
            place.rank(program)

    def paused_place(self, program: Program) -> Place:
        """Return the paused place of a program, by its turns, its route and its destination."""
        place = program.place
        if program.held:
            if not place.admitted:
                return self.queue.unadmitted
            return self.queue.waiting if program.routed_to is None else self.queue.place_at(program.routed_to)
        if place is self.announced or place is self.idle:
            return place
        if not place.admitted:
            return self.dismissed
        if program.destination is not None or program.routed_to is not None:
            return self.destined
        return self.queue.resting

    def changes(self, replica: Replica) -> Account:
        """Note that programs of a replica come, go or change; what it spent until now is accrued."""
        self.changed_replicas[replica.replica_id] = replica
        account = replica.account
        if account.updated_s < self.now_s:
            self.ledger.accrue(account, self.now_s)
        if self.rooms is not None:
            self.rooms.stale[replica] = None
        return account

    def touch(self, replica: Replica) -> Account:
        """Bring a replica's costs up to date, before one of its sums or its limit changes."""
        account = replica.account
        if account.updated_s < self.now_s:
            self.ledger.accrue(account, self.now_s)
        if self.rooms is not None:
            self.rooms.stale[replica] = None
        return account

    # --- groups -----------------------------------------------------------------------------------------------------

    def join_group(self, program: Program, group_id: str) -> None:
        """Add a program to its group, if it names one."""
        if not group_id:
            return
        group = program.group = self.groups.setdefault((program.tenant, group_id), Group(program.tenant, group_id))
        last = group.last
        group.programs[program.program_id] = program
        if last is not None and last.place.active:
            self.rank_anew(last)

    def leave_group(self, program: Program) -> None:
        """Remove a program from its group; the last one left in the group may change its rank."""
        group = program.group
        if group is None:
            return
        del group.programs[program.program_id]
        group.some_ended = True
        if not group.programs:
            del self.groups[group.tenant, group.group_id]
        elif group.last is not None and group.last.place.active:
            self.rank_anew(group.last)

    # --- replicas ---------------------------------------------------------------------------------------------------

    def open_replica(self, replica_id: str) -> Replica:
        """Register a replica that is not up yet."""
        account = self.ledger.open(replica_id, self.now_s)
        replica = self.replicas[replica_id] = Replica(replica_id, account, self.suspended_for, self._pause_rank)
        replica.verdict = Verdict(self.now_s)
        replica.verdict.set(ReplicaState.DOWN, "not polled yet", self.now_s)
        return replica

    def resident_tokens(self, program: Program, replica: Replica) -> int:
        """Return how many tokens of a program are expected in a replica's memory."""
        own_tokens = replica.residency.resident_tokens(program.generation)
        return own_tokens + self.prefixes.tokens_on(program, replica.replica_id)

    def meant(self, replica_id: str | None) -> list[Replica]:
        """Return the replica of that id if it is known; all replicas for None."""
        if replica_id is None:
            return list(self.replicas.values())
        return [self.replicas[replica_id]] if replica_id in self.replicas else []

    def set_usable(self, replica: Replica) -> None:
        """Note whether a replica's memory may be claimed from now on."""
        self.touch(replica).usable = replica.grants

    def roomiest(self, ratio: float, count: int) -> list[Replica]:
        """Return the `count` granting replicas with most of `ratio` of their limits left; the order is kept then."""
        if self.rooms is None or self.rooms.ratio != ratio:
            self.rooms = Rooms(ratio)
            self.rooms.set_granting(self.granting_replicas)
        return self.rooms.first(count)

    def memory_tokens_of(self, replica_id: str | None) -> float:
        """Return the corrected size of a replica's memory; if unknown, that of the largest open one."""
        accounts: Mapping[str, Account] = self.ledger.accounts
        account = accounts.get(replica_id) if replica_id is not None else None
        if account is not None and account.capacity_tokens is not None:
            return account.limit_tokens
        known = [each.account for each in self.open_replicas if each.account.capacity_tokens is not None]
        return max([account.limit_tokens for account in known], default=0.0)
