"""The scheduler: `handle(event)` is the only way in, decisions are the only way out.

Theory of operation
===================
A turn needs a lease. `handle` is synchronous, so there is no lock and no race. It reads no clock, so the same events
always give the same decisions, on a server, in a simulation, and in a replay of yesterday's log.

Each event does three things, in this order:

1. A handler (`handlers/`) books what happened, and returns why a balance is due, if one is. It asks at most for a
   place: where may the program of an arrived turn be active now? The policy answers (`place`), and the core checks the
   answer; if nowhere, the program waits.
2. If one is due, because the event may have freed room, or time has passed, the core *balances*: it admits programs,
   asks about those that wait for one replica, and lets the policy make proposals. The view checks each proposal and
   carries it out at once.
3. The rules *settle* what applies under every policy (`rules/`): turns whose clients would give up are let in, and
   turns of programs whose parents wait for them; what tenants had is counted.

A program's state is its place (`state/program.py`). Only `Book.move` changes it, and only `Book.resize` changes its
size. Sums, orders, story and decisions are updated there, so a policy never sees a claim that is in no sum, or in two.
The verbs are in `transitions.py`; signals tell a policy what it wants to hear (`Stream`).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any, Final

from thunderagent.programs.handlers.fleet import Fleet
from thunderagent.programs.handlers.operator import Operator
from thunderagent.programs.handlers.programs import Adoption, Lives
from thunderagent.programs.handlers.turns import Anonymous, Arrivals, Turns
from thunderagent.programs.learned.knowledge import LEAST_IDLE_LIMIT_S, Knowledge
from thunderagent.programs.messages import Decision, Event, LearnedRecord, SchedulerSettings, Tick, TurnDue
from thunderagent.programs.policy import Moment, Policy
from thunderagent.programs.rules import Rule
from thunderagent.programs.rules.families import Families
from thunderagent.programs.rules.limits import Limits
from thunderagent.programs.rules.patience import Deadlines
from thunderagent.programs.rules.tenants import Tenants
from thunderagent.programs.state.book import Book
from thunderagent.programs.state.paused_queue import PausedQueue
from thunderagent.programs.state.program import Program
from thunderagent.programs.state.replica import Replica
from thunderagent.programs.transitions import Core, GlobalPolicies, Operations, Placing, SchedulerView, Stream

OVERCOMMITTED_RATIO: Final = 1.1
"""Above this part of its limit, claims are not what a replica should keep: it takes time until some are given up."""

HELD_ANEW_COUNT: Final = 256
"""How many held programs of a replica are looked at when a plan changes, those first that are held for least long."""

IN_DEMAND_RATIO: Final = 0.8
"""A replica is in demand while others wait and this ratio of its limit is claimed: then more may be tried."""


class Scheduler:
    """The single owner of the book: programs, replicas, the paused queue, and all sums.

    Not thread-safe: one caller at a time. Cost of an event: O(log programs + replicas). Exceptions: a tick costs that
    for each program it pauses or restores, and the loss of a replica for each program on it.
    """

    def __init__(self, policy: Policy, settings: SchedulerSettings | None = None) -> None:
        """Create a scheduler without replicas and programs."""
        self.policy = policy
        self._plans = policy.holds_by_cost
        self.settings = settings = settings or SchedulerSettings()
        rules = policy.claim_rules
        self.knowledge = Knowledge(rules)
        self._pace = self.knowledge.restore_pace
        self.tenants = Tenants(settings.tenant_weight_ratios) if settings.fair_tenants else None
        admission = policy.admission
        self.admission_name: str = "" if admission is None else admission.name
        """The admission's name; empty if all programs may begin."""
        unadmitted_rank = None if admission is None else admission.rank
        self.queue = PausedQueue(policy.restore_rank, unadmitted_rank, self.tenants)
        self.book = book = Book(
            self.queue, self.knowledge.measure_claim, policy.pause_rank, rules.half_life_s, self.tenants
        )
        self.programs, self.turns, self.replicas = book.programs, book.turns, book.replicas
        self.ledger = book.ledger
        self.families = Families(one_each=self.tenants is not None)
        self.deadlines = Deadlines(settings.patience_margin_s, settings.patience_ratio)
        self.limits = Limits(book, settings, self.knowledge.idle_limit_s, LEAST_IDLE_LIMIT_S)
        self.view = view = SchedulerView(book, provisions_replicas=settings.provisions_replicas)
        self.stream = Stream(book, self.knowledge, view, policy.observers(), policy.learners())
        self.global_policies = GlobalPolicies(policy, book, view)
        self.core = core = Core(
            policy,
            view,
            book=book,
            knowledge=self.knowledge,
            families=self.families,
            deadlines=self.deadlines,
            limits=self.limits,
            placing=Placing(book, policy, self.families, settings.patience_overdraft_ratio, view),
            global_policies=self.global_policies,
            stream=self.stream,
        )
        self.operations = Operations(core)
        view.attach(core, self.operations)
        self._rules: tuple[Rule, ...] = (self.deadlines, self.families, self.core.program_limits)
        if self.tenants is not None:
            self._rules = (*self._rules, self.tenants)
        anonymous = Anonymous(core)
        self._lives = Lives(core, settings)
        self.refused_ids = self._lives.refused_ids
        self._handlers: dict[type[Any], Callable[[Any], Moment | None]] = {
            TurnDue: self._turn_due,
            Tick: self._tick,
            **Arrivals(core, self._lives, anonymous).handlers(),
            **Turns(core, self._lives).handlers(),
            **self._lives.handlers(),
            **Adoption(core, self._lives).handlers(),
            **Fleet(core, anonymous, self.tenants).handlers(),
            **Operator(core, self.operations).handlers(),
        }

    def __repr__(self) -> str:
        return f"<Scheduler {self.policy.name}: {len(self.programs)} programs, {self.queue!r}, {self.open_replicas}>"

    @property
    def now_s(self) -> float:
        """Monotonic seconds of the last event."""
        return self.book.now_s

    @property
    def open_replicas(self) -> list[Replica]:
        """Replicas on which a program may get a claim, now or when grants go on."""
        return self.book.open_replicas

    @property
    def granting_replicas(self) -> list[Replica]:
        """Open replicas on which grants are not suspended: what a policy sees."""
        return self.book.granting_replicas

    def learned(self) -> LearnedRecord:
        """Return all that was learned, including the policy's order."""
        learned, order = self.knowledge.export(), self.policy.order
        lengths = None if order is None else order.export()
        return learned if lengths is None else replace(learned, lengths=lengths)

    def handle(self, event: Event) -> list[Decision]:
        """Handle one event; return the decisions in the order in which they were made.

        An event older than the last one is handled as if it were as old as that one. An event about an unknown or ended
        turn or replica changes nothing.
        """
        book, core = self.book, self.core
        now_s = event.now_s
        if now_s > book.now_s:
            book.now_s = now_s
        else:
            now_s = book.now_s
        if self.tenants is not None:
            self.tenants.advance(now_s)
        decisions = book.decisions = []
        core.active_before_count = book.active_count
        due = self._handlers[type(event)](event)
        if due is not None:
            core.balance(due)
            if type(event) is Tick:
                self._tick_ends()
        for rule in self._rules:
            if rule.due_s <= now_s:
                rule.settle(core)
        queue, granting = self.queue, book.granting_replicas
        if queue.waiting.count or queue.unadmitted.count:
            waiting = bool(granting)
        else:
            waiting = bool(queue.routed) and any(replica.replica_id in queue.routed for replica in granting)
        if waiting is not self._pace.waiting:
            self._pace.accrue(now_s, waiting=waiting)
        return decisions

    def listen(self, listener: Callable[[Any], None]) -> Callable[[], None]:
        """Call `listener` with each new signal; return a function that ends that."""
        return self.stream.listen(listener)

    def expected_holds_s(self, count: int) -> dict[str, float]:
        """Return the expected seconds until restore of the first `count` waiting programs.

        Programs that wait for admission come after all that wait for room. Cost: O(count log waiting), once for those
        that may go anywhere, and once for each replica that is waited for.
        """
        interval_s = self._pace.interval_s
        waiting: list[Program] = self.queue.first_waiting(count)
        return {program.program_id: place * interval_s for place, program in enumerate(waiting, start=1)}

    # --- time -------------------------------------------------------------------------------------------------------

    def _turn_due(self, event: TurnDue) -> None:
        """Do nothing: the rules, which follow every event, grant the turn that is due."""

    def _tick(self, event: Tick) -> Moment:  # noqa: ARG002 - its time was taken in already
        self._pace.accrue(self.book.now_s, waiting=self._pace.waiting)
        self.families.look_again()
        self.limits.enforce(self.core)
        if self.policy.claim_rules.adapt_capacity:
            self._correct_capacities()
        if self._plans:
            self._plan_holding()
        return Moment.TICK

    def _tick_ends(self) -> None:
        """Ask the global policies, and balance where they changed anything."""
        if self.global_policies.decide():
            self.core.balance(Moment.TURN_ENDED)
        self.view.previous_tick_s = self.book.now_s

    def _correct_capacities(self) -> None:
        """Correct the claimable part of each replica by what was lost there."""
        book = self.book
        others_wait = bool(book.ledger.waiting_count)
        for replica in book.granting_replicas:
            account, correction = book.touch(replica), self.knowledge.corrections[replica.replica_id]
            in_demand = others_wait and account.demand_tokens >= IN_DEMAND_RATIO * account.limit_tokens
            full = correction.computed_tokens >= account.limit_tokens
            wanted, idle_s = in_demand and full, account.idle_held_s
            plan = self.knowledge.last_plan(replica.replica_id)
            claimed_ratio = plan.claimed_ratio
            count, may_exceed = account.active_count, claimed_ratio > 1.0
            correction.step(book.now_s, active_count=count, wanted=wanted, idle_s=idle_s, may_exceed=may_exceed)
            if plan.may_overfill or account.demand_tokens > OVERCOMMITTED_RATIO * account.limit_tokens:
                correction.overcommitted(book.now_s)
            ratio = claimed_ratio * correction.ratio
            if plan.may_overfill:  # nothing is held, so what held programs lost is no reason to leave memory unused
                ratio = max(1.0, ratio)
            if ratio != account.capacity_ratio:
                account.set_limit(account.capacity_tokens, ratio)

    def _plan_holding(self) -> None:
        """Plan for each replica how long programs are held: a plan that no tool asks for stays true, too.

        If it is for less long than before, while others wait, that holds for those who are held already.
        """
        now_s, knowledge = self.book.now_s, self.knowledge
        for replica in self.book.granting_replicas:
            knowledge.holding(replica.replica_id, replica.account, now_s)
        if self.book.ledger.waiting_count and knowledge.shortened_ids:
            for replica in self.book.granting_replicas:
                if replica.replica_id in knowledge.shortened_ids:
                    del knowledge.shortened_ids[replica.replica_id]
                    self._hold_anew(replica)

    def _hold_anew(self, replica: Replica) -> None:
        """Shorten what was promised to programs that are held on a replica, without a hint. Cost: bounded."""
        book, hold_s = self.book, self.core.decider.hold_s
        for program in replica.acting.expiring.lowest(HELD_ANEW_COUNT):
            if program.hold_until_s <= book.now_s or program.hint is not None:
                continue
            hold_until_s = program.turns_ended_s + hold_s(self.view, program)
            if hold_until_s < program.hold_until_s:
                book.act_anew(program, program.acting_since_s, hold_until_s)
