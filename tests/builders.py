"""Builders shared by the tests of several folders."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from math import inf
from typing import Any
from zlib import crc32

from thunderagent.leases.open_lease import LeaseSource
from thunderagent.programs.invariants import check
from thunderagent.programs.learned.holding import HoldingPlan
from thunderagent.programs.learned.knowledge import Knowledge
from thunderagent.programs.learned.price import FIRST_TOKEN_S
from thunderagent.programs.messages import (
    Decision,
    EncodesPolled,
    Event,
    Grant,
    GrantsContinued,
    GrantsSuspended,
    KnowledgeLoaded,
    MigrationAsked,
    ModelAsked,
    ModelServed,
    PrioritySet,
    ProgramHinted,
    ProgramJudged,
    ProgramKilled,
    ProgramLimits,
    ProgramOpened,
    ProgramReleased,
    ProgramsReleased,
    Reason,
    Reject,
    ReplicaDown,
    ReplicaDraining,
    ReplicaFlushed,
    ReplicaPolled,
    ReplicaPriceRecord,
    ReplicaRemoved,
    ReplicaTripped,
    ReplicaUp,
    ResidencyReported,
    Restore,
    RouteSet,
    SandboxesMeasured,
    SandboxFailed,
    SandboxReady,
    SchedulerSettings,
    Signal,
    Tick,
    ToolEnd,
    ToolEnded,
    ToolNum,
    ToolStart,
    ToolStarted,
    TurnAsk,
    TurnEnd,
    TurnLimited,
    TurnProgressed,
    TurnStarted,
    WindowUpdate,
)
from thunderagent.programs.policies.baselines.passthrough import Passthrough
from thunderagent.programs.policy import Admission, Moment, Policy, ProgramView, View
from thunderagent.programs.scheduler import Scheduler
from thunderagent.programs.state.program import Branch, Program, Turn, TurnEnded

BYTES_PER_TOKEN = 4
"""The scheduler's first guess, so that a turn of `tokens` is estimated at exactly that."""


def asked(source: LeaseSource, program_id: str | None, **more: Any) -> TurnAsk:
    """Return the request to a source of leases for a turn: of a program (a new one without id), or anonymous."""
    turn_id = more.pop("turn_id", None) or source.new_turn_id()
    return TurnAsk(turn_id=turn_id, program_id=program_id, **more)


class Breathing(Admission):
    """An admission of three programs, or one while tools run, that dismisses programs above that.

    It works only on events, as one with a window would, and uses every way out of the paused queue.
    """

    name = "breathing"
    tick_s = 0.5

    def __init__(self) -> None:
        self.window_count = 3
        self.waiting_for_tools: dict[str, None] = {}

    def rank(self, program: ProgramView) -> float:
        return -program.opened_s

    def observe(self, view: View, signal: Signal) -> None:
        if isinstance(signal, ToolStart):
            self.waiting_for_tools[signal.program_id] = None
        elif isinstance(signal, ToolEnd):
            self.waiting_for_tools.pop(signal.program_id, None)
        elif isinstance(signal, ToolNum):
            self.window_count = 1 if signal.tool_count else 3

    def next(self, view: View, moment: Moment) -> ProgramView | None:
        while view.admitted_count > self.window_count and self.waiting_for_tools:
            program_id, _ = self.waiting_for_tools.popitem()
            program = view.program(program_id)
            if program is not None and view.propose_dismiss(program, Reason.ADMISSION):
                view.signal(WindowUpdate(view.now_s, self.window_count, view.admitted_count, "tools"))
        return view.first_unadmitted() if view.admitted_count < self.window_count else None


class Driver:
    """Drives a scheduler by hand: keeps the time and the turn ids, checks the invariants after every event.

    `replicas` are up from the start, each with its capacity in tokens (None: unknown), and with the price of a token,
    as after a restart (None: unknown). With `threshold_s`, what is planned for them is fixed; otherwise nothing is held
    until a plan is made of what turns show.
    """

    def __init__(
        self,
        policy: Policy | None = None,
        *,
        replicas: Mapping[str, int | None] | None = None,
        settings: SchedulerSettings | None = None,
        now_s: float = 100.0,
        token_s: float | None = FIRST_TOKEN_S,
        threshold_s: float | None = None,
    ) -> None:
        self.scheduler = Scheduler(policy or Passthrough(), settings)
        self.now_s = now_s
        self.events: list[tuple[Event, list[Decision]]] = []
        self.granted_on: dict[int, str] = {}
        self.rejected_for: dict[int, Reason] = {}
        self._turn_count = 0
        replicas = {"r0": 1000} if replicas is None else replicas
        if token_s is not None and replicas:
            prices = tuple([known_price(each, token_s) for each in replicas])
            learned = replace(Knowledge().export(), replica_prices=prices)
            self.send(KnowledgeLoaded(self.now_s, next(iter(replicas)), learned))
        for replica_id, capacity_tokens in replicas.items():
            if threshold_s is not None:
                self.plans(threshold_s, replica_id)
            self.comes_up(replica_id, capacity_tokens)
        self.ticks()

    def send(self, event: Event) -> list[Decision]:
        decisions = self.scheduler.handle(event)
        self.events.append((event, list(decisions)))
        for decision in decisions:
            if isinstance(decision, Grant | Reject):
                answered = {*self.granted_on, *self.rejected_for}
                assert decision.turn_id not in answered, f"answered twice: {decision}"
            if isinstance(decision, Grant):
                self.granted_on[decision.turn_id] = decision.replica_id
                assert self.scheduler.replicas[decision.replica_id].up, f"granted on a replica that is down: {decision}"
            elif isinstance(decision, Reject):
                self.rejected_for[decision.turn_id] = decision.reason
        check(self.scheduler)
        return decisions

    # --- time

    def passes(self, elapsed_s: float) -> None:
        self.now_s += elapsed_s

    def ticks(self, elapsed_s: float = 0.0) -> list[Decision]:
        self.now_s += elapsed_s
        return self.send(Tick(self.now_s))

    def plans(self, threshold_s: float, replica_id: str = "r0", *, until_s: float = inf) -> None:
        """Fix what a lost token is worth on a replica, in seconds of holding, whatever turns and tools show."""
        plan = HoldingPlan(threshold_s, 2.0 if threshold_s else 1.0, 1.0)
        self.scheduler.knowledge._plans[replica_id] = (until_s, plan)

    # --- turns

    def arrives(
        self,
        program_id: str | None,
        tokens: int = 0,
        *,
        branch: str = "",
        avoid: str | None = None,
        prefix: Mapping[str, int] | None = None,
        group: str = "",
        patience_s: float | None = None,
        instead_of: int | None = None,
        waiting_since_s: float | None = None,
        parent: str = "",
        tenant: str = "",
        wanted: str | None = None,
        program_class: str = "",
        role: str = "",
        parent_branch: str = "",
        model: str = "",
        limits: ProgramLimits | None = None,
    ) -> int:
        """Send a turn whose prompt is estimated at `tokens`; return its id.

        `prefix` are places in the prompt: a name for the text before the place, and the tokens before it.
        """
        self._turn_count += 1
        turn_id = self._turn_count
        cuts = tuple((crc32(name.encode()), tokens * BYTES_PER_TOKEN) for name, tokens in (prefix or {}).items())
        size_bytes = tokens * BYTES_PER_TOKEN
        if model:
            self.send(ModelAsked(self.now_s, turn_id, model))
        if limits is not None:
            self.send(TurnLimited(self.now_s, turn_id, limits))
        self.send(
            TurnAsk(
                now_s=self.now_s,
                turn_id=turn_id,
                program_id=program_id,
                branch_id=branch,
                prompt_bytes=size_bytes,
                avoid_replica_id=avoid,
                prefix=cuts,
                group_id=group,
                patience_s=patience_s,
                supersedes_id=instead_of,
                waited_s=None if waiting_since_s is None else self.now_s - waiting_since_s,
                parent_id=parent,
                tenant=tenant,
                wanted_replica_id=wanted,
                program_class=program_class,
                role=role,
                parent_branch_id=parent_branch,
            )
        )
        return turn_id

    def starts(self, turn_id: int) -> list[Decision]:
        return self.send(TurnStarted(self.now_s, turn_id))

    def progresses(self, turn_id: int, output: int) -> list[Decision]:
        return self.send(TurnProgressed(self.now_s, turn_id, output))

    def finishes(
        self,
        turn_id: int,
        prompt: int | None = None,
        output: int | None = 0,
        cached: int | None = None,
        *,
        tool: str = "",
    ) -> list[Decision]:
        return self.send(
            TurnEnd(
                now_s=self.now_s,
                turn_id=turn_id,
                prompt_tokens=prompt,
                output_tokens=output,
                cached_tokens=cached,
                tool=tool,
            )
        )

    def fails(self, turn_id: int, *, refused: bool = False) -> list[Decision]:
        return self.send(TurnEnd(now_s=self.now_s, turn_id=turn_id, outcome="refused" if refused else "failed"))

    def is_abandoned(self, turn_id: int) -> list[Decision]:
        return self.send(TurnEnd(now_s=self.now_s, turn_id=turn_id, outcome="abandoned"))

    def takes_turn(
        self,
        program_id: str,
        tokens: int,
        *,
        branch: str = "",
        prefix: Mapping[str, int] | None = None,
        group: str = "",
        tool: str = "",
        parent_branch: str = "",
        tenant: str = "",
    ) -> int:
        """Send a turn, have it granted and finished with a prompt of `tokens`: the program is then acting."""
        turn_id = self.arrives(
            program_id, tokens, branch=branch, prefix=prefix, group=group, parent_branch=parent_branch, tenant=tenant
        )
        assert turn_id in self.granted_on, f"{program_id} was not granted its turn"
        self.finishes(turn_id, tokens, tool=tool)
        return turn_id

    # --- programs, their sandboxes, and replicas

    def opens(self, program_id: str, group: str = "", parent: str = "") -> list[Decision]:
        """Announce a program without a turn."""
        return self.send(ProgramOpened(self.now_s, program_id, group, parent))

    def tool_starts(self, program_id: str, tool: str = "") -> list[Decision]:
        """Report that a client's tool starts now."""
        return self.send(ToolStarted(self.now_s, program_id, tool))

    def tool_ends(self, program_id: str, *, inferred: bool = False) -> list[Decision]:
        """Report that a client's tool ended, or have that inferred."""
        return self.send(ToolEnded(self.now_s, program_id, inferred))

    def sandbox_is_ready(self, program_id: str, sandbox_id: str = "box", prepare_s: float = 1.5) -> list[Decision]:
        return self.send(SandboxReady(self.now_s, program_id, sandbox_id, prepare_s))

    def sandbox_fails(self, program_id: str, why: str, sandbox_id: str = "box") -> list[Decision]:
        return self.send(SandboxFailed(self.now_s, program_id, sandbox_id, why))

    def sandboxes_take(
        self, count: int, disk_bytes: int | None = None, memory_bytes: int | None = None
    ) -> list[Decision]:
        return self.send(SandboxesMeasured(self.now_s, count, disk_bytes, memory_bytes))

    def releases_all(self, *program_ids: str) -> list[Decision]:
        return self.send(ProgramsReleased(self.now_s, program_ids))

    def releases(self, program_id: str, generation: int | None = None, outcome: str = "") -> list[Decision]:
        return self.send(ProgramReleased(self.now_s, program_id, generation, outcome))

    def is_hinted(
        self, program_id: str, next_turn_in_s: float | None = None, confidence: float = 1.0, **more: str
    ) -> list[Decision]:
        """Send a client's hint: when the next turn comes, or what to `keep`, and for which `branch_id`."""
        return self.send(ProgramHinted(self.now_s, program_id, next_turn_in_s, confidence, **more))

    def is_judged(
        self,
        program_id: str,
        will_succeed: bool,
        *,
        at_turn: int | None = None,
        confidence: float = 0.9,
        generation: int | None = None,
    ) -> list[Decision]:
        """Send a verdict: by default after all turns, on the live incarnation."""
        program = self.scheduler.programs.get(program_id)
        turn_count = program.turn_count if at_turn is None and program is not None else at_turn or 0
        if generation is None:
            generation = program.generation if program is not None else 0
        return self.send(ProgramJudged(self.now_s, program_id, generation, turn_count, will_succeed, confidence))

    def comes_up(self, replica_id: str, capacity_tokens: int | None = None) -> list[Decision]:
        self.send(ReplicaPolled(self.now_s, replica_id, capacity_tokens))
        return self.send(ReplicaUp(self.now_s, replica_id))

    def is_polled(
        self,
        replica_id: str = "r0",
        *,
        hit_ratio: float | None = None,
        query_tokens: int | None = None,
        preemption_count: int | None = None,
    ) -> list[Decision]:
        return self.send(ReplicaPolled(self.now_s, replica_id, None, hit_ratio, query_tokens, preemption_count))

    def has_to_encode(self, replica_id: str, pending_encode_count: int) -> list[Decision]:
        return self.send(EncodesPolled(self.now_s, replica_id, pending_encode_count))

    def reports(self, replica_id: str, **resident_tokens: int) -> list[Decision]:
        """Report how much of each program is in an engine's memory."""
        return self.send(ResidencyReported(self.now_s, replica_id, tuple(resident_tokens.items())))

    def serve(self, model: str, *replica_ids: str) -> list[Decision]:
        """Set the only replicas that serve a model; all, if none is named."""
        return self.send(ModelServed(self.now_s, model, replica_ids))

    def goes_down(self, replica_id: str) -> list[Decision]:
        return self.send(ReplicaDown(self.now_s, replica_id))

    def trips(self, replica_id: str, *, tripped: bool = True) -> list[Decision]:
        return self.send(ReplicaTripped(self.now_s, replica_id, tripped))

    def drains(self, replica_id: str) -> list[Decision]:
        return self.send(ReplicaDraining(self.now_s, replica_id))

    def is_removed(self, replica_id: str) -> list[Decision]:
        return self.send(ReplicaRemoved(self.now_s, replica_id))

    # --- commands of an operator

    def routes(self, scope: str, name: str, **weights: float) -> list[Decision]:
        return self.send(RouteSet(self.now_s, scope, name, tuple(weights.items())))

    def gives_priority(self, program_id: str, priority: int, replica_id: str | None = None) -> list[Decision]:
        return self.send(PrioritySet(self.now_s, program_id, priority, replica_id))

    def migrates(self, program_id: str, replica_id: str) -> list[Decision]:
        return self.send(MigrationAsked(self.now_s, program_id, replica_id))

    def kills(self, program_id: str) -> list[Decision]:
        return self.send(ProgramKilled(self.now_s, program_id))

    # --- engine control

    def arrives_pinned(self, replica_id: str, tokens: int = 10) -> int:
        """Send an anonymous turn whose client chose the replica; return its id."""
        self._turn_count += 1
        self.send(
            TurnAsk(
                now_s=self.now_s,
                turn_id=self._turn_count,
                pinned_replica_id=replica_id,
                prompt_bytes=tokens * BYTES_PER_TOKEN,
            )
        )
        return self._turn_count

    def keeps_busy(self, *replica_ids: str) -> list[int]:
        """Keep a turn in flight on each that claims nothing: an idle replica lets somebody in. Return their ids."""
        return [self.arrives_pinned(replica_id, 0) for replica_id in replica_ids or ("r0",)]

    def suspends(self, cause: str = "pause", replica_id: str | None = None) -> list[Decision]:
        """Stop grants on a replica, or on all."""
        return self.send(GrantsSuspended(self.now_s, cause, replica_id))

    def goes_on(self, cause: str = "pause", replica_id: str | None = None) -> list[Decision]:
        """Resume grants there."""
        return self.send(GrantsContinued(self.now_s, cause, replica_id))

    def is_flushed(self, replica_id: str = "r0") -> list[Decision]:
        return self.send(ReplicaFlushed(self.now_s, replica_id))

    # --- results

    @property
    def decisions(self) -> list[Decision]:
        """The decisions on the last event."""
        return self.events[-1][1]

    def program(self, program_id: str) -> Program:
        program = self.scheduler.programs.get(program_id)
        assert program is not None, f"no program {program_id}"
        return program

    def home(self, program_id: str) -> str | None:
        """The replica on which a program is active; None while it is paused."""
        program = self.program(program_id)
        return program.replica_id if program.status == "active" else None

    def held(self, turn_id: int) -> bool:
        return turn_id not in self.granted_on and turn_id not in self.rejected_for

    def demand(self, replica_id: str = "r0") -> int:
        return self.scheduler.replicas[replica_id].account.demand_tokens


def of_kind(kind: type[Decision], decisions: list[Decision]) -> list[str | None]:
    """The programs of the decisions of one kind, in order."""
    return [decision.program_id for decision in decisions if isinstance(decision, kind)]


def restored_on(decisions: list[Decision]) -> dict[str, str]:
    """The replica of each restored program."""
    return {each.program_id: each.replica_id for each in decisions if isinstance(each, Restore)}


def ended(
    *,
    prompt: int = 0,
    output: int = 0,
    cached: int | None = 0,
    context: int = 0,
    duration_s: float = 1.0,
    first_token_s: float | None = None,
    role: str = "",
) -> TurnEnded:
    """Return the record of a turn granted at 0 whose branch had `context` tokens before, and its clock."""
    turn, branch = Turn(1, Program("p", 1, 0.0), "", 0, 0.0), Branch()
    turn.role, branch.context_tokens = role, context
    told = TurnEnded(turn, branch, duration_s, prompt_tokens=prompt, output_tokens=output, cached_tokens=cached)
    told.first_token_s = first_token_s
    return told


def grew(tokens: int | None, output_tokens: int, cycle_s: float) -> TurnEnded:
    """Return the record of a turn that added this many tokens to its program; None: a first turn."""
    context_tokens = 1_000_000
    if tokens is None:
        return ended(prompt=context_tokens, output=output_tokens, duration_s=cycle_s)
    prompt_tokens = context_tokens + tokens - output_tokens
    return ended(prompt=prompt_tokens, output=output_tokens, context=context_tokens, duration_s=cycle_s)


def prefilled(first_token_s: float | None, duration_s: float, uncached_tokens: int, output_tokens: int) -> TurnEnded:
    """Return the record of a turn that computed this much of its prompt."""
    return ended(prompt=uncached_tokens, output=output_tokens, duration_s=duration_s, first_token_s=first_token_s)


def known_price(replica_id: str, token_s: float) -> ReplicaPriceRecord:
    """Return a price that is known for certain."""
    return ReplicaPriceRecord(replica_id, token_s, token_s, token_s, 0.0, 0.0, "turns")


def kept(expected_tokens: int, cached_tokens: int, since_s: float) -> TurnEnded:
    """Return the record of a turn whose program kept this much since then, of which a part was cached."""
    told = ended(prompt=expected_tokens, cached=cached_tokens)
    told.turn.kept_tokens, told.turn.kept_since_s = expected_tokens, since_s
    return told
