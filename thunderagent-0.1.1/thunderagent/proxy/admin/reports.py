"""The admin API's reports on programs, replicas and the queue."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass
from itertools import chain, islice
from math import inf, isfinite
from typing import Any

from pydantic import Field

from thunderagent.backends.discovery.base import shown_url
from thunderagent.programs.learned.holding import HoldingPlan
from thunderagent.programs.learned.price import Price
from thunderagent.programs.messages import NO_PROGRAM_LIMITS, TurnVerdict
from thunderagent.programs.state.accounts import Account
from thunderagent.programs.state.health import ReplicaState
from thunderagent.programs.state.program import Kind, Phase, Program, Status, Turn
from thunderagent.programs.state.replica import Replica
from thunderagent.proxy.fleet.breaker import BreakerState
from thunderagent.proxy.fleet.replicas import Replicas
from thunderagent.proxy.gate.bodies import Report
from thunderagent.runtime import Runtime


class ProgramReport(Report):
    """A program now."""

    program_id: str
    generation: int
    status: Status
    phase: Phase
    marked: bool
    idle: bool
    parent_id: str = Field(description="the program that waits for it; empty if none was named")
    tenant: str
    group_id: str = Field(description="empty if it is in none; so is the next")
    program_class: str
    pool: str = Field(description="its pool, of several; a program may be in more than one. Empty where there is one")
    replica_id: str | None = Field(description="where it is active, or was when it was paused")
    routed_to: str | None = Field(description="the replica that a route sends it to; null without a route")
    priority: int = Field(description="as it was told: lower comes first")
    priority_by_replica: dict[str, int] = Field(description="the same for the engine of one replica alone")
    claim_tokens: int
    context_tokens: int
    branches_count: int
    turns_in_flight_count: int
    turns_held_count: int
    hold_reason: str
    verdict: TurnVerdict = Field(
        description="ok: its turns may be trained on; otherwise whose fault it is that one ended badly, and was not "
        "answered when it was tried again"
    )
    verdict_cause: str = Field(description="the code of an error, or the status of an answer; empty while it is ok")
    verdict_replica_id: str | None = Field(description="where that turn ran; null while it is ok, or if it did not run")
    age_s: float
    acting_for_s: float | None
    held_for_s: float | None
    turn_count: int
    prompt_tokens_total: int
    output_tokens_total: int
    cached_tokens_total: int
    held_s_total: float
    max_turns: int | None = Field(description="the least of its limits of turns; null without one, as the next three")
    max_tokens: int | None
    max_age_s: float | None
    deadline_s: float | None = Field(description="as the one before, in seconds after its first turn")
    urgent: bool = Field(description="whether it comes before others, because it would miss its deadline")


class ProgramPage(Report):
    """A page of programs, the oldest first."""

    programs: list[ProgramReport]
    total: int
    offset: int
    next_offset: int | None


class PriceReport(Report):
    """What a lost token costs a replica, in its engine's time, as measured; null where nothing was measured."""

    token_s: float = Field(description="seconds for each computed prompt token")
    low_token_s: float = Field(description="the lower end of its interval, which decides, but at least half of token_s")
    high_token_s: float | None
    source: str = Field(description="engine counters, turns, siblings (replicas of the pool) or guess")
    iteration_s: float = Field(description="seconds for each iteration of the engine, whatever it computes")
    sequence_s: float = Field(description="seconds more for each sequence that generates in it")
    fixed_ratio: float = Field(description="part of an iteration that its present turns share, whatever they compute")


class HoldingPlanReport(Report):
    """For how long tools are held on a replica, and what that is predicted to bring; null where nothing is known."""

    threshold_s: float | None = Field(
        description="a tool is held while programs return from it more often than once in this time; null: always"
    )
    turns_per_s: float | None = Field(description="predicted with it")
    unheld_turns_per_s: float | None = Field(description="predicted if nothing were held")


class PluginReport(Report):
    """What the scheduler `thunderagent-vllm` in an engine said last; null is what it did not say."""

    on: bool = Field(description="whether it schedules; false: vLLM's own order applies, and it gets no programs")
    protocol: int
    version: str
    vllm_version: str
    mode: str = Field(description="on, or watch: it only counts")
    why_not: str = Field(description="why vLLM's own scheduler was started in its place; empty: it was not")
    total_blocks_count: int | None
    free_blocks_count: int | None
    pinned_blocks_count: int | None = Field(description="held for programs whose tools run")
    pins_count: int | None = Field(description="programs for which blocks are held, at most 1,000 for each rank")
    programs_count: int | None = Field(description="programs that it knows")
    pins_total: dict[str, int] = Field(
        description="what became of pins: kept, used, expired, given_back (others needed the room), released, refused, "
        "dropped"
    )
    turns_total: dict[str, int] = Field(description="warm: the program's blocks were held; cold: they were not")
    chunks_total: dict[str, int] = Field(description="parts of prompts: whole, bounded, shrunk")
    preemptions_total: dict[str, int] = Field(description="by level; -1 had begun to generate")
    steps_total: int | None
    hook_seconds_total: float | None = Field(description="time that its decisions took")
    failures_total: int | None


class ReplicaReport(Report):
    """A replica now. Token counts are the ledger's, `engine` is what its last poll said."""

    replica_id: str
    url: str
    kind: str
    pool: str = Field(description="its pool, of several; empty where there is one")
    models: list[str] | None = Field(description="names that its engine lists; null before it was asked")
    sources: list[str] = Field(description="which sources name it; none while it leaves")
    rank: int | None = Field(description="which data-parallel rank of the URL it is; null if it is the whole")
    up: bool = Field(description="whether its last polls were good")
    draining: bool = Field(description="whether it gets nothing new")
    draining_for_s: float | None
    leaving_for_s: float | None = Field(description="since when no source has named it: it goes when it is drained")
    in_flight_count: int = Field(description="turns and other requests that have not ended there")
    verdict: ReplicaState = Field(description="how its engine does; up: all is well")
    verdict_reason: str = Field(description="why; empty while it is up")
    verdict_for_s: float = Field(description="how long it has been so")
    incarnation: int = Field(description="how often what ran there was lost: it restarted, froze or fell silent")
    breaker: BreakerState = Field(description="open: it fails turn after turn, and gets none for a while")
    breaker_retry_in_s: float | None = Field(description="when it is tried again; null if the breaker is not open")
    why_down: str
    suspended_for: list[str] = Field(description="why nothing is granted there at the moment; empty if it is")
    weight_version: str = Field(description="of the weights that it was last told to take, or said it has")
    capacity_tokens: int | None
    capacity_ratio: float = Field(description="part of the capacity that may be claimed, as corrected by what was lost")
    limit_tokens: int | None = Field(description="tokens that may be claimed; null if the capacity is not known")
    demand_tokens: int
    weighed_tokens: float
    reasoning_tokens: int
    acting_tokens: int
    marked_tokens: int
    other_tokens: int
    shared_tokens: int = Field(description="claimed more than once, and in the demand once")
    growth_tokens: int = Field(description="what programs are expected to grow by beyond their claims")
    reasoning_count: int
    acting_count: int
    turns_in_flight_count: int
    hit_ratio: float
    idle_held_s: float = Field(
        description="how long it had no turn in flight while a program was held for memory that could run there"
    )
    costs_token_s: dict[str, float]
    price: PriceReport
    holding: HoldingPlanReport
    engine: dict[str, float | int | None]
    plugin: PluginReport | None = Field(description="of an engine whose scheduler knows programs; null for others")


class ToolsReport(Report):
    """What tools do outside of the engines."""

    running_count: int = Field(description="programs whose tool runs")
    mean_s: float = Field(description="how long tools took lately, in the mean")
    sandbox_count: int
    sandbox_disk_bytes: int | None
    sandbox_memory_bytes: int | None


class QueueReport(Report):
    """Who waits: programs whose turns are held, in the order of restoring, and paused ones whose tools run."""

    waiting: list[ProgramReport]
    waiting_count: int
    unadmitted_count: int = Field(description="of these, programs that are not admitted yet; they come last")
    paused_acting_count: int
    anonymous_held_count: int
    turns_held_count: int
    suspended_for: list[str] = Field(description="why nothing is granted on any replica at the moment; empty if it is")
    held_in_place_count: int = Field(
        description="turns that wait where their program is active: to leave, or until grants go on"
    )
    first_needs: str = Field(
        description="what must happen for the first of these to go on, or else for the first that waits in its place; "
        "empty if no program waits"
    )


def program_report(program: Program, now_s: float, pool: str) -> ProgramReport:
    """Report on one program."""
    return ProgramReport(**program_fields(program, now_s, pool))


def program_fields(program: Program, now_s: float, pool: str) -> dict[str, Any]:
    """Return the fields of a `ProgramReport`."""
    first_held: Turn | None = next(iter(program.held.values()), None)
    acting, limits = program.phase is Phase.ACTING, program.program_limits or NO_PROGRAM_LIMITS
    return {
        "program_id": program.program_id,
        "generation": program.generation,
        "status": program.status,
        "phase": program.phase,
        "marked": program.marked,
        "idle": program.place.kind is Kind.AWAY,
        "parent_id": program.parent_id,
        "tenant": program.tenant,
        "group_id": program.group_id,
        "program_class": program.program_class,
        "pool": pool,
        "replica_id": program.replica_id,
        "routed_to": program.routed_to,
        "priority": program.priority,
        "priority_by_replica": program.priority_by_replica or {},
        "claim_tokens": program.claim_tokens,
        "context_tokens": program.context_tokens,
        "branches_count": len(program.branches),
        "turns_in_flight_count": len(program.in_flight),
        "turns_held_count": len(program.held),
        "hold_reason": program.hold_reason,
        "verdict": program.verdict.verdict,
        "verdict_cause": program.verdict.cause,
        "verdict_replica_id": program.verdict.replica_id,
        "age_s": round(now_s - program.opened_s, 3),
        "acting_for_s": round(now_s - program.acting_since_s, 3) if acting else None,
        "held_for_s": round(now_s - first_held.waiting_since_s, 3) if first_held is not None else None,
        "turn_count": program.turn_count,
        "prompt_tokens_total": program.prompt_tokens_total,
        "output_tokens_total": program.output_tokens_total,
        "cached_tokens_total": program.cached_tokens_total,
        "held_s_total": round(program.held_s_total, 3),
        "max_turns": limits.max_turns,
        "max_tokens": limits.max_tokens,
        "max_age_s": limits.max_age_s,
        "deadline_s": limits.deadline_s,
        "urgent": program.urgent_until_s < inf,
    }


@dataclass(frozen=True, slots=True)
class ProgramFilter:
    """A filter for programs; None or empty fields do not filter."""

    status: Status | None = None
    phase: Phase | None = None
    replica_id: str | None = None
    part: str = ""
    """Part of the id, case-insensitive."""
    tenant: str | None = None

    def choose(self, programs: Iterable[Program]) -> list[Program]:
        """Return the programs that match, in order."""
        if self == ANY_PROGRAM:
            return list(programs)
        part = self.part.lower()
        return [
            program
            for program in programs
            if self.status in (None, program.status)
            and self.phase in (None, program.phase)
            and self.replica_id in (None, program.replica_id)
            and self.tenant in (None, program.tenant)
            and (not part or part in program.program_id.lower())
        ]


ANY_PROGRAM = ProgramFilter()

SORTS: dict[str, Callable[[Program, float], tuple[Any, ...]]] = {
    "opened": lambda program, _: (program.opened_s,),
    "id": lambda program, _: (program.program_id,),
    "claim": lambda program, _: (program.claim_tokens,),
    "turns": lambda program, _: (program.turn_count,),
    "computed": lambda program, _: (
        program.prompt_tokens_total - program.cached_tokens_total + program.output_tokens_total,
    ),
    "held": lambda program, now_s: (program.held_s_total + (now_s - program.waiting_since_s if program.held else 0.0),),
    "replica": lambda program, _: (program.replica_id or "",),
    "state": lambda program, _: (program.status, program.phase),
}
"""Orders in which programs can be listed, as of a time.

`computed` is by the tokens that engines computed: prompts without what was cached, and output."""


def program_page(
    runtime: Runtime, wanted: ProgramFilter, *, offset: int, limit: int, sort: str = "", descending: bool = False
) -> ProgramPage:
    """Report on the wanted programs from `offset` on, the oldest first or in one of the `SORTS`.

    Costs O(programs), and O(n log n) of the n wanted ones for another order.
    """
    now_s = runtime.now_s()
    programs = chain.from_iterable(scheduler.programs.values() for scheduler in runtime.pools.schedulers)
    chosen = wanted.choose(programs)
    if sort or runtime.pools.several:  # each pool has its own, in the order in which they were opened
        key = SORTS[sort or "opened"]
        chosen.sort(key=lambda program: key(program, now_s), reverse=descending)
    end = offset + limit
    return ProgramPage(
        programs=[
            program_report(program, now_s, runtime.served.name_of_pool(program)) for program in chosen[offset:end]
        ],
        total=len(chosen),
        offset=offset,
        next_offset=end if end < len(chosen) else None,
    )


def replica_reports(runtime: Runtime, replicas: Replicas) -> list[ReplicaReport]:
    """Report on every known replica, up or not."""
    now_s = runtime.now_s()
    reports = []
    for replica_id, known in replicas.known.items():
        pool = runtime.pools.of_replica(replica_id)
        replica, ledger = pool.scheduler.replicas.get(replica_id), pool.scheduler.ledger
        account = ledger.accounts.get(replica_id) or Account(inf, now_s, replica_id)
        ledger.accrue(account, now_s)
        costs = {name.removesuffix("_token_s"): round(value, 1) for name, value in asdict(account.costs).items()}
        reports.append(
            ReplicaReport(
                replica_id=replica_id,
                url=shown_url(known.endpoint.url),
                kind=known.endpoint.backend.kind,
                pool=pool.name if runtime.pools.several else "",
                models=None if known.reading.models is None else list(known.reading.models),
                sources=list(known.sources),
                rank=known.endpoint.rank_id,
                up=known.is_up,
                draining=known.draining_since_s is not None,
                draining_for_s=_ago_s(known.draining_since_s, now_s),
                leaving_for_s=_ago_s(known.leaving_since_s, now_s),
                in_flight_count=replicas.in_flight_count(replica_id),
                **_verdict(replica, known.why_down, now_s),
                incarnation=known.incarnation,
                breaker=replicas.breakers.state_of(replica_id),
                breaker_retry_in_s=replicas.breakers.retry_in_s(replica_id),
                why_down=known.why_down,
                suspended_for=list(replica.suspended_for) if replica is not None else [],
                weight_version=known.weight_version,
                capacity_tokens=account.capacity_tokens,
                capacity_ratio=round(account.capacity_ratio, 4),
                limit_tokens=int(account.limit_tokens) if isfinite(account.limit_tokens) else None,
                demand_tokens=account.demand_tokens,
                weighed_tokens=round(account.weighed_tokens(now_s), 1),
                reasoning_tokens=account.reasoning_tokens,
                acting_tokens=account.acting.tokens,
                marked_tokens=account.marked_tokens,
                other_tokens=account.other_tokens,
                shared_tokens=account.shared_tokens,
                growth_tokens=account.growth_tokens,
                reasoning_count=account.reasoning_count,
                acting_count=account.acting.count,
                turns_in_flight_count=account.turn_count,
                hit_ratio=round(account.hit_ratio, 4),
                idle_held_s=round(account.idle_held_s, 3),
                costs_token_s=costs,
                price=_price_report(pool.scheduler.knowledge.prices.of(replica_id), account.turn_count),
                holding=_plan_report(pool.scheduler.knowledge.last_plan(replica_id)),
                engine={name: value for name, value in asdict(known.reading).items() if name != "models"},
                plugin=_plugin_report(replicas, replica_id),
            )
        )
    return reports


def _plugin_report(replicas: Replicas, replica_id: str) -> PluginReport | None:
    said = replicas.plugins.report(replica_id)
    if said is None:
        return None
    fields = asdict(said)
    return PluginReport(on=fields.pop("is_on"), **fields)


def _price_report(price: Price, turn_count: int) -> PriceReport:
    return PriceReport(
        token_s=price.token_s,
        low_token_s=price.low_token_s,
        high_token_s=price.high_token_s if isfinite(price.high_token_s) else None,
        source=price.source,
        iteration_s=price.iteration_s,
        sequence_s=price.sequence_s,
        fixed_ratio=round(price.fixed_ratio(max(1, turn_count)), 4),
    )


def _plan_report(plan: HoldingPlan) -> HoldingPlanReport:
    return HoldingPlanReport(
        threshold_s=round(plan.threshold_s, 3) if isfinite(plan.threshold_s) else None,
        turns_per_s=round(plan.turns_per_s, 3) if plan.turns_per_s and isfinite(plan.turns_per_s) else None,
        unheld_turns_per_s=(
            round(plan.unheld_turns_per_s, 3) if plan.unheld_turns_per_s and isfinite(plan.unheld_turns_per_s) else None
        ),
    )


def _verdict(replica: Replica | None, why_down: str, now_s: float) -> dict[str, Any]:
    if replica is None:
        return {"verdict": ReplicaState.DOWN, "verdict_reason": why_down, "verdict_for_s": 0.0}
    verdict = replica.verdict
    reason = verdict.reason or (why_down if verdict.state is ReplicaState.DOWN else "")
    for_s = round(now_s - verdict.since_s, 3)
    return {"verdict": verdict.state, "verdict_reason": reason, "verdict_for_s": for_s}


def _ago_s(since_s: float | None, now_s: float) -> float | None:
    return None if since_s is None else round(now_s - since_s, 3)


def tools_report(runtime: Runtime) -> ToolsReport:
    """Report on the tools of all programs, and on the last measured use of their sandboxes."""
    sandboxes, of_tools = runtime.scheduler.book.sandboxes, running_tools(runtime)
    return ToolsReport(
        running_count=of_tools[0],
        mean_s=round(of_tools[1], 3),
        sandbox_count=sandboxes.sandbox_count,
        sandbox_disk_bytes=sandboxes.disk_bytes,
        sandbox_memory_bytes=sandboxes.memory_bytes,
    )


def running_tools(runtime: Runtime) -> tuple[int, float]:
    """Return how many programs' tools run, and the pools' mean of recent tool times, weighted by that."""
    learned = [scheduler.knowledge for scheduler in runtime.pools.schedulers]
    running_count = sum(knowledge.tools_running_count for knowledge in learned)
    if not running_count or len(learned) == 1:
        return running_count, learned[0].mean_tool_s
    return running_count, sum(each.mean_tool_s * each.tools_running_count for each in learned) / running_count


def queue_report(runtime: Runtime, limit: int, needs_of: Callable[[Program], str]) -> QueueReport:
    """Report on the paused queues of all pools, at most `limit` programs; `needs_of` says what one waits for."""
    now_s, schedulers = runtime.now_s(), runtime.pools.schedulers
    queues = [scheduler.queue for scheduler in schedulers]
    active = chain.from_iterable(replica.programs.values() for replica in runtime.pools.replicas.values())
    in_place = [program for program in active if program.held]
    stopped = not any(scheduler.granting_replicas for scheduler in schedulers)
    open_replicas = [replica for scheduler in schedulers for replica in scheduler.open_replicas]
    causes = [replica.suspended_for for replica in open_replicas] if stopped else []
    first = next(chain(*(queue.with_turns() for queue in queues), in_place), None)
    waiting = islice(chain.from_iterable(queue.with_turns() for queue in queues), limit)
    return QueueReport(
        waiting=[program_report(program, now_s, runtime.served.name_of_pool(program)) for program in waiting],
        waiting_count=sum(queue.waiting_count for queue in queues),
        unadmitted_count=sum(queue.unadmitted.count for queue in queues),
        paused_acting_count=sum(queue.resting.count for queue in queues),
        anonymous_held_count=sum(len(scheduler.book.anonymous_held) for scheduler in schedulers),
        turns_held_count=runtime.held_count,
        suspended_for=list(dict.fromkeys(cause for suspended_for in causes for cause in suspended_for)),
        held_in_place_count=sum(len(program.held) for program in in_place),
        first_needs="" if first is None else needs_of(first),
    )
