"""How long a program may be silent, how many may live, and how long turns wait for a replica.

Theory of operation
===================
A program whose tool runs is heard of at the end of its turn, and whenever its client mentions it. After the forget
limit it is forgotten. After the idle limit it loses its claim: that counts from the end of its turn, or from the first
tool that was reported to begin since, because a client that goes on to report tools must not keep memory for ever. Both
are measured on a clock that stands still while nothing is granted anywhere, and nothing is taken where nothing is
granted now. A program with a turn again stays in the order of those that are watched, so that a turn changes none: it
is looked at when its time would have come, and put behind. Without a set idle limit it is learned for the tool: long
beyond the time in which nearly all return, but never more than half of the forget limit. Each tenant's programs are
counted, and those whose tools run have an order of their own: so a tenant that opens too many forgets its own.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from itertools import takewhile
from math import inf
from operator import itemgetter

from thunderagent.programs.messages import Reason, SchedulerSettings
from thunderagent.programs.rules import Verbs
from thunderagent.programs.state.book import Book
from thunderagent.programs.state.program import Program
from thunderagent.programs.state.ranked_set import RankedSet
from thunderagent.programs.state.replica import ReplicaPlace


class Limits:
    """Programs without a turn, the longest silent first; and how many each tenant has."""

    __slots__ = (
        "_book",
        "_by_count",
        "_counts",
        "_first_limit_s",
        "_halted_s",
        "_halted_since_s",
        "_heard_count",
        "_idle_limit_s",
        "_most_idle_limit_s",
        "_no_replica_since_s",
        "_quiet_of",
        "_settings",
        "_watched",
        "peers",
    )

    def __init__(
        self, book: Book, settings: SchedulerSettings, idle_limit_s: Callable[[str], float], least_idle_limit_s: float
    ) -> None:
        """Start without programs; `idle_limit_s` is learned for a tool, and at least `least_idle_limit_s`."""
        self._most_idle_limit_s = settings.forget_limit_s / 2
        """The longest learned idle limit: a claim is given back well before its program would be forgotten."""
        self._first_limit_s = min(least_idle_limit_s, self._most_idle_limit_s)
        """Nobody is checked before: the idle limit, or the shortest learned one."""
        if settings.idle_limit_s is not None:
            self._first_limit_s = settings.idle_limit_s
        self._book = book
        self._settings = settings
        self._idle_limit_s = idle_limit_s
        self._quiet_of: dict[str, OrderedDict[Program, int]] = {}
        """By tenant, the longest silent programs first, with a number that orders them across tenants."""
        self._heard_count = 0
        self._watched: RankedSet[Program] = RankedSet()
        """Programs by the time to look at them: all that have something to lose at the idle limit, and some others."""
        self._counts: dict[str, int] = {}
        self._by_count: RankedSet[str] = RankedSet()
        """Tenants, the one with most programs first."""
        self.peers: tuple[Limits, ...] = ()
        """Limits of other pools: the number that may live counts over all."""
        self._halted_since_s: float | None = None
        self._halted_s = 0.0
        self._no_replica_since_s: float | None = None

    # --- the clock --------------------------------------------------------------------------------------------------

    @property
    def clock_s(self) -> float:
        """Seconds that passed while turns were granted, or would have been."""
        return (self._book.now_s if self._halted_since_s is None else self._halted_since_s) - self._halted_s

    def replicas_changed(self) -> None:
        """Stop the clock while no open replica grants; note since when none is open."""
        book, halted_since_s = self._book, self._halted_since_s
        halted = bool(book.open_replicas) and not book.granting_replicas
        if halted and halted_since_s is None:
            self._halted_since_s = book.now_s
        elif not halted and halted_since_s is not None:
            self._halted_s += book.now_s - halted_since_s
            self._halted_since_s = None
        if book.open_replicas:
            self._no_replica_since_s = None
        elif self._no_replica_since_s is None:
            self._no_replica_since_s = book.now_s

    # --- who is heard of --------------------------------------------------------------------------------------------

    def hear_of(self, program: Program, *, goes_on: bool = False) -> None:
        """Restart the limits of a program without a turn; if it `goes_on` with its tools, not the idle limit."""
        now_s = self._book.now_s if self._halted_since_s is None else self._halted_since_s
        program.limits_since_s = now_s - self._halted_s  # that is `clock_s`
        if not goes_on:
            program.idle_since_s = program.limits_since_s
        of_tenant = self._quiet_of.get(program.tenant)
        if of_tenant is None:
            of_tenant = self._quiet_of[program.tenant] = OrderedDict()
        self._heard_count += 1
        of_tenant[program] = self._heard_count
        of_tenant.move_to_end(program)

    def turn_came(self, program: Program) -> None:
        """Note that the program has a turn here again."""
        if (quiet := self._quiet_of.get(program.tenant)) is not None:
            quiet.pop(program, None)
        program.idle_at_s = inf

    def watch(self, program: Program) -> None:
        """Watch an acting program that has something to lose at the idle limit."""
        program.idle_at_s = idle_at_s = program.idle_since_s + self._first_limit_s
        if idle_at_s < program.idle_look_s:
            program.idle_look_s = idle_at_s
            self._watched.add(program, idle_at_s)

    def look_away(self, program: Program) -> None:
        """Stop watching the idle limit of a program."""
        program.idle_at_s = inf

    def look_away_from_all(self, programs: Sequence[Program]) -> None:
        """Stop watching the idle limit of these programs."""
        for program in programs:
            program.idle_at_s = inf

    def go_on(self, program: Program) -> None:
        """Restart the limit of a program that passed it while nothing was granted, when grants go on."""
        forgotten_before_s = self.clock_s - self._settings.forget_limit_s
        if program.idle_at_s == inf or program.limits_since_s < forgotten_before_s:
            self.hear_of(program)
            self.watch(program)

    # --- how many live ----------------------------------------------------------------------------------------------

    def opened(self, program: Program) -> None:
        """Count a program for its tenant."""
        tenant = program.tenant
        self._counts[tenant] = count = self._counts.get(tenant, 0) + 1
        self._by_count.add(tenant, -count)

    def ended(self, program: Program) -> None:
        """Stop counting a program, and watching it."""
        tenant = program.tenant
        program.idle_at_s = program.idle_look_s = inf
        self._watched.forget(program)
        count = self._counts[tenant] - 1
        if count:
            self._counts[tenant] = count
            self._by_count.add(tenant, -count)
            if (quiet := self._quiet_of.get(tenant)) is not None:
                quiet.pop(program, None)
        else:
            del self._counts[tenant]
            self._quiet_of.pop(tenant, None)
            self._by_count.discard(tenant)

    def name_tenant(self, program: Program, tenant: str) -> None:
        """Assign a program without a tenant to one."""
        is_quiet = program in self._quiet_of.get(program.tenant, ())
        self.ended(program)
        program.tenant = tenant
        self.opened(program)
        if is_quiet:
            self._heard_count += 1
            self._quiet_of.setdefault(tenant, OrderedDict())[program] = self._heard_count

    def count_of(self, tenant: str) -> int:
        """Return how many programs a tenant has."""
        return self._counts.get(tenant, 0)

    def _has_all_it_may(self, tenant: str) -> bool:
        """Return whether a tenant has as many programs as it may, in all pools."""
        count = self.count_of(tenant) + sum(peer.count_of(tenant) for peer in self.peers)
        return count >= self._settings.tenant_max_programs_count

    @property
    def programs_count(self) -> int:
        """Number of programs that live in this pool."""
        return len(self._book.programs)

    @property
    def largest_tenant(self) -> str:
        """The tenant with most programs."""
        return self._by_count.first() or ""

    def longest_quiet(self, tenant: str) -> Program | None:
        """Return a tenant's program without a turn that was silent for longest."""
        return next(iter(self._quiet_of.get(tenant, ())), None)

    def is_full(self, tenant: str, *, opens: bool) -> bool:
        """Return whether a tenant may have no further program; if it `opens` one, also whether nobody may."""
        if self._has_all_it_may(tenant):
            return True
        programs_count = self.programs_count + sum(peer.programs_count for peer in self.peers)
        return opens and programs_count >= self._settings.max_programs_count

    def whom_to_forget(self, tenant: str) -> Program | None:
        """Return the program to forget for one more of a tenant: one of its own, if it has as many as it may."""
        if self._has_all_it_may(tenant):
            return self.longest_quiet(tenant)
        return self.longest_quiet(self.largest_tenant) or self.longest_quiet(tenant)

    # --- what is over -----------------------------------------------------------------------------------------------

    def enforce(self, verbs: Verbs) -> None:
        """Take claims past the idle limit, forget programs, and reject turns that found no replica in time."""
        book = self._book
        if self._halted_since_s is None:
            self._enforce_idle_limit(verbs)
            before_s = self.clock_s - self._settings.forget_limit_s
            if any(program.limits_since_s < before_s for program in self._longest_quiet()):
                self._forget_quiet(verbs, before_s)
        since_s = self._no_replica_since_s
        if since_s is None and not book.open_replicas:
            self._no_replica_since_s = book.now_s
        elif since_s is not None and book.now_s - since_s > self._settings.no_replica_limit_s:
            held = [turn for program in book.queue.with_turns() for turn in program.held.values()]
            for turn in [*book.anonymous_held.values(), *held]:
                if turn.arrived_s <= book.now_s - self._settings.no_replica_limit_s:
                    verbs.reject(turn, Reason.NO_REPLICA)

    def _longest_quiet(self) -> Iterator[Program]:
        """Yield for each tenant the program that was silent for longest."""
        return (next(iter(quiet)) for quiet in self._quiet_of.values() if quiet)

    def _forget_quiet(self, verbs: Verbs, before_s: float) -> None:
        """End programs last heard of before `before_s`, except where nothing is granted now."""
        over = [
            (number, program)
            for quiet in self._quiet_of.values()
            for program, number in takewhile(lambda each: each[0].limits_since_s < before_s, quiet.items())
        ]
        for _, program in sorted(over, key=itemgetter(0)):
            if not self._is_suspended(program):
                verbs.end(program, Reason.FORGOTTEN)

    def _enforce_idle_limit(self, verbs: Verbs) -> None:
        clock_s, watched = self.clock_s, self._watched
        while (program := watched.first()) is not None and clock_s > program.idle_look_s:
            is_due = program.idle_at_s == program.idle_look_s
            if is_due:
                program.idle_at_s = self._due_s(program)
            is_over = is_due and program.idle_at_s < clock_s
            program.idle_look_s = program.idle_at_s = inf if is_over else program.idle_at_s
            if program.idle_at_s < inf:
                watched.add(program, program.idle_at_s)
            else:
                watched.discard(program)
            if is_over:
                verbs.idle(program)

    def _due_s(self, program: Program) -> float:
        """Return when a watched program loses its claim; infinite until grants go on, if its replica grants nothing."""
        if self._is_suspended(program):
            return inf
        if self._settings.idle_limit_s is not None:
            return program.idle_at_s
        return program.idle_since_s + min(self._idle_limit_s(program.tool), self._most_idle_limit_s)

    def _is_suspended(self, program: Program) -> bool:
        """Return whether a program is active where nothing is granted now."""
        place = program.place
        return isinstance(place, ReplicaPlace) and bool(place.replica.suspended_for)
