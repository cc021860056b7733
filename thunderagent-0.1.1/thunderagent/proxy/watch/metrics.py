"""The content of `/metrics`, in Prometheus' text format. No program id is ever a label."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict
from itertools import chain
from math import isfinite
from operator import attrgetter
from typing import Protocol

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric

from thunderagent.programs.learned.trust import TURN_EDGES_COUNT
from thunderagent.programs.messages import FAILURE, KEEPS, OUTCOMES, SUCCESS
from thunderagent.programs.rules.tenants import Tenants
from thunderagent.programs.scheduler import Scheduler
from thunderagent.programs.state.health import ReplicaState
from thunderagent.programs.state.program import Level, Phase, Status
from thunderagent.proxy.fleet.replicas import Replicas
from thunderagent.proxy.watch.event_feed import KIND_OF
from thunderagent.runtime import Runtime

_PLACE, _LEVEL = attrgetter("place"), attrgetter("verdicts.level")

NAMED_TENANTS_COUNT = 100
"""Number of tenants with a series of their own: those that had most."""

OTHER_TENANTS = "(others)"


class Carrier(Protocol):
    """Grants leases to turns, and counts them."""

    outcome_counts: Counter[str]
    leases_count: int
    prompt_tokens_total: int
    output_tokens_total: int
    cached_tokens_total: int

    @property
    def held_count(self) -> int:
        """Number of turns that wait for a lease."""


def carried(runtime: Carrier, outcomes: Sequence[str]) -> Iterator[Metric]:
    """Yield what is counted wherever turns are carried: held and running turns, their outcomes, and tokens."""
    yield GaugeMetricFamily("thunderagent_turns_held", "Turns that wait for a lease.", runtime.held_count)
    yield GaugeMetricFamily(
        "thunderagent_leases_active", "Turns in flight: those that hold a lease.", runtime.leases_count
    )
    turns = CounterMetricFamily(
        "thunderagent_turns",
        "Turns by how they ended: finished; refused by the engine (4xx, 5xx); failed by the replica (each try counts); "
        "abandoned by the client; superseded by its new attempt; rejected without a lease; "
        "aborted by a trainer or an operator.",
        labels=["outcome"],
    )
    for outcome in outcomes:
        turns.add_metric([outcome], runtime.outcome_counts[outcome])
    yield turns
    for name, tokens in (
        ("prompt", runtime.prompt_tokens_total),
        ("output", runtime.output_tokens_total),
        ("cached", runtime.cached_tokens_total),
    ):
        yield CounterMetricFamily(
            f"thunderagent_{name}_tokens",
            f"{name.capitalize()} tokens of finished turns, where the engine reports usage.",
            tokens,
        )


class StateCollector:
    """Gauges and counters that are read from the scheduler on each scrape, at no other cost."""

    def __init__(self, runtime: Runtime, replicas: Replicas) -> None:
        """Report on these."""
        self._runtime = runtime
        self._replicas = replicas
        self._others_token_s = 0.0
        """Service that tenants had while they had no series of their own. As a counter it only grows."""
        self._seen_token_s: dict[str, float] = {}
        """Service of each tenant at the last scrape."""

    def collect(self) -> Iterator[Metric]:
        """Yield every family. Costs O(programs)."""
        yield from self._programs()
        yield from self._counts()
        yield from self._replica_sums()
        yield from self._plugins()
        yield from self._goodput()
        yield from self._tenants()
        yield from self._learned()
        yield from self._judged()
        yield from self._hinted()

    def _programs(self) -> Iterator[Metric]:
        programs = GaugeMetricFamily(
            "thunderagent_programs", "Live programs by status and phase.", labels=["status", "phase"]
        )
        schedulers = self._runtime.pools.schedulers
        live = chain.from_iterable(scheduler.programs.values() for scheduler in schedulers)
        counts: Counter[tuple[Status, Phase]] = Counter()
        for place, count in Counter(map(_PLACE, live)).items():  # many programs, few places
            counts[place.status, place.phase] += count
        for status in (Status.ACTIVE, Status.PAUSED):
            for phase in Phase:
                programs.add_metric([status, phase], counts[status, phase])
        yield programs

    def _counts(self) -> Iterator[Metric]:
        runtime = self._runtime
        outcomes = ("finished", "refused", "failed", "errored", "abandoned", "rejected", "superseded", "aborted")
        yield from carried(runtime, outcomes)
        learned = [scheduler.knowledge for scheduler in runtime.pools.schedulers]
        yield GaugeMetricFamily(
            "thunderagent_tools_running",
            "Programs whose tool is running.",
            sum(knowledge.tools_running_count for knowledge in learned),
        )
        yield from self._by_pool(
            "thunderagent_tool_mean_seconds",
            "Mean time that tools took; the newest weighs 5 %.",
            lambda scheduler: scheduler.knowledge.mean_tool_s,
        )
        decisions = CounterMetricFamily(
            "thunderagent_decisions", "Decisions of the scheduler, by kind and reason.", labels=["decision", "reason"]
        )
        for (decision, reason), number in runtime.decision_counts.items():
            decisions.add_metric([KIND_OF[decision], reason.value], number)
        yield decisions

    def _by_pool(self, name: str, what: str, value_of: Callable[[Scheduler], float | None]) -> Iterator[Metric]:
        """Yield a value per pool; it has a label only if there are several."""
        pools = self._runtime.pools
        if not pools.several:
            yield GaugeMetricFamily(name, what, value_of(pools.all[0].scheduler))
            return
        family = GaugeMetricFamily(name, what, labels=["pool"])
        for pool in pools.all:
            if (value := value_of(pool.scheduler)) is not None:
                family.add_metric([pool.name], value)
        yield family

    def _replica_sums(self) -> Iterator[Metric]:
        gauges = {
            "up": GaugeMetricFamily("thunderagent_replica_up", "1 if the replica may be used.", labels=["replica"]),
            "suspended": GaugeMetricFamily(
                "thunderagent_replica_suspended",
                "1 while the replica gets no turns because it is paused, sleeps, or gets new weights.",
                labels=["replica"],
            ),
            "demand": GaugeMetricFamily(
                "thunderagent_demand_tokens", "Tokens that programs claim on a replica.", labels=["replica"]
            ),
            "capacity": GaugeMetricFamily(
                "thunderagent_capacity_tokens", "Tokens in a replica's KV pool; absent if unknown.", labels=["replica"]
            ),
            "limit": GaugeMetricFamily(
                "thunderagent_replica_limit_tokens",
                "Tokens that may be claimed on a replica: its capacity, corrected by cache losses; absent if unknown.",
                labels=["replica"],
            ),
            "shared": GaugeMetricFamily(
                "thunderagent_replica_shared_tokens",
                "Tokens that several programs on a replica claim in common, counted once in the demand.",
                labels=["replica"],
            ),
            "unknown": GaugeMetricFamily(
                "thunderagent_capacity_unknown",
                "1 if a replica's capacity is unknown, so nothing is held there: alert on it.",
                labels=["replica"],
            ),
            "uncached": GaugeMetricFamily(
                "thunderagent_prefix_caching_off",
                "1 if a replica's prefix caching is off, so each turn computes its whole context again: alert on it; "
                "absent for an engine that does not say it.",
                labels=["replica"],
            ),
            "draining": GaugeMetricFamily(
                "thunderagent_replica_draining", "1 while the replica drains: it gets no new turns.", labels=["replica"]
            ),
            "tripped": GaugeMetricFamily(
                "thunderagent_replica_tripped",
                "1 while the replica's circuit breaker is open.",
                labels=["replica"],
            ),
            "turns": GaugeMetricFamily(
                "thunderagent_replica_turns", "Turns in flight on a replica.", labels=["replica"]
            ),
        }
        verdicts = GaugeMetricFamily(
            "thunderagent_replica_verdict",
            "1 for the verdict on a replica, 0 for all others: alert on failing, silent, frozen and collapsed.",
            labels=["replica", "verdict"],
        )
        costs = CounterMetricFamily(
            "thunderagent_cost_token_seconds",
            "What a replica's memory was spent on: decode, prefill, recompute, caching, unused.",
            labels=["replica", "term"],
        )
        queued = CounterMetricFamily(
            "thunderagent_queued_token_seconds",
            "Prompt tokens of turns times the seconds that they waited in the engine's own queue.",
            labels=["replica"],
        )
        idle = CounterMetricFamily(
            "thunderagent_replica_idle_while_held_seconds",
            "Seconds in which a replica had no turn in flight while a program was held that could run there.",
            labels=["replica"],
        )
        for replica_id, known in self._replicas.known.items():
            gauges["draining"].add_metric([replica_id], int(known.draining_since_s is not None))
            scheduler = self._runtime.pools.of_replica(replica_id).scheduler
            replica = scheduler.replicas.get(replica_id)
            state = ReplicaState.DOWN if replica is None else replica.verdict.state
            for each in ReplicaState:
                verdicts.add_metric([replica_id, each.value], int(each is state))
            if replica is None:
                gauges["up"].add_metric([replica_id], 0)
                continue
            account = replica.account
            scheduler.ledger.accrue(account, self._runtime.now_s())
            gauges["up"].add_metric([replica_id], int(replica.open_to_programs))
            gauges["suspended"].add_metric([replica_id], int(replica.verdict.holds(ReplicaState.SUSPENDED)))
            gauges["demand"].add_metric([replica_id], account.demand_tokens)
            gauges["shared"].add_metric([replica_id], account.shared_tokens)
            gauges["tripped"].add_metric([replica_id], int(replica.tripped))
            gauges["turns"].add_metric([replica_id], account.turn_count)
            gauges["unknown"].add_metric([replica_id], int(account.capacity_tokens is None))
            if known.reading.uncached_ranks_count is not None:
                gauges["uncached"].add_metric([replica_id], int(known.reading.uncached_ranks_count > 0))
            if account.capacity_tokens is not None:
                gauges["capacity"].add_metric([replica_id], account.capacity_tokens)
                gauges["limit"].add_metric([replica_id], account.limit_tokens)
            idle.add_metric([replica_id], account.idle_held_s)
            terms = asdict(account.costs)
            queued.add_metric([replica_id], terms.pop("queued_token_s"))
            for term, token_seconds in terms.items():
                costs.add_metric([replica_id, term.removesuffix("_token_s")], token_seconds)
        yield from gauges.values()
        yield verdicts
        yield costs
        yield queued
        yield idle

    def _plugins(self) -> Iterator[Metric]:
        gauges = {
            "on": GaugeMetricFamily(
                "thunderagent_engine_plugin_on",
                "1 if the engine's own scheduler knows programs, 0 if that is off; absent for an engine without it.",
                labels=["replica"],
            ),
            "pinned": GaugeMetricFamily(
                "thunderagent_engine_plugin_pinned_blocks",
                "Blocks that the engine holds for programs whose tools run.",
                labels=["replica"],
            ),
        }
        sums = {
            "steps_total": CounterMetricFamily(
                "thunderagent_engine_plugin_steps", "Iterations of that scheduler.", labels=["replica"]
            ),
            "hook_seconds_total": CounterMetricFamily(
                "thunderagent_engine_plugin_hook_seconds", "Time that its decisions took.", labels=["replica"]
            ),
            "failures_total": CounterMetricFamily(
                "thunderagent_engine_plugin_failures",
                "Decisions that failed; the first turns it off.",
                labels=["replica"],
            ),
        }
        by_word = {
            "pins_total": CounterMetricFamily(
                "thunderagent_engine_plugin_pins",
                "What became of what it held for programs: kept, used by the next turn, expired, given_back because "
                "others needed the room, released, refused for lack of room, dropped.",
                labels=["replica", "event"],
            ),
            "turns_total": CounterMetricFamily(
                "thunderagent_engine_plugin_turns",
                "Turns that found their program's blocks held (warm), and others (cold).",
                labels=["replica", "start"],
            ),
            "chunks_total": CounterMetricFamily(
                "thunderagent_engine_plugin_chunks",
                "Parts of prompts by size: whole, bounded for others, shrunk to fit.",
                labels=["replica", "kind"],
            ),
            "preemptions_total": CounterMetricFamily(
                "thunderagent_engine_plugin_preemptions",
                "Requests that lost their blocks, by level; -1 had begun to generate.",
                labels=["replica", "level"],
            ),
        }
        plugins = self._replicas.plugins
        for replica_id in self._replicas.known:
            report = plugins.report(replica_id)
            if report is None:
                continue
            gauges["on"].add_metric([replica_id], int(report.is_on))
            if report.pinned_blocks_count is not None:
                gauges["pinned"].add_metric([replica_id], report.pinned_blocks_count)
            for name, family in sums.items():
                if (value := getattr(report, name)) is not None:
                    family.add_metric([replica_id], value)
            for name, family in by_word.items():
                for word, count in getattr(report, name).items():
                    family.add_metric([replica_id, word], count)
        yield from (*gauges.values(), *sums.values(), *by_word.values())

    def _goodput(self) -> Iterator[Metric]:
        goodputs = [scheduler.knowledge.goodput for scheduler in self._runtime.pools.schedulers]
        turns, programs = Counter[float](), Counter[float]()
        for goodput in goodputs:
            turns.update(goodput.turns)
            programs.update(goodput.programs)
        counts = {
            "turn": ("Turns", "finished turns", turns, sum(each.turn_count for each in goodputs)),
            "program": ("Programs", "ended programs", programs, sum(each.program_count for each in goodputs)),
        }
        for kind, (name, judged, in_time, judged_count) in counts.items():
            family = CounterMetricFamily(
                f"thunderagent_goodput_{kind}s",
                f"{name} that took at most alpha times what they would take alone on an idle engine.",
                labels=["alpha"],
            )
            for alpha_ratio, number in in_time.items():
                family.add_metric([f"{alpha_ratio:g}"], number)
            yield family
            yield CounterMetricFamily(
                f"thunderagent_judged_{kind}s", f"All {judged} for which goodput could be judged.", judged_count
            )

    def _tenants(self) -> Iterator[Metric]:
        now_s = self._runtime.now_s()
        fair = [scheduler.tenants or Tenants({}) for scheduler in self._runtime.pools.schedulers]
        sums: dict[str, tuple[float, int]] = {}
        for each in chain.from_iterable(tenants.as_of(now_s) for tenants in fair):
            token_s, count = sums.get(each.name, (0.0, 0))
            sums[each.name] = token_s + each.service_token_s, count + each.waiting_count
        service = CounterMetricFamily(
            "thunderagent_tenant_service_token_seconds",
            "Memory that a tenant's programs claimed over time; the 100 largest, then (others).",
            labels=["tenant"],
        )
        waiting = GaugeMetricFamily("thunderagent_tenant_waiting", "Programs of a tenant that wait.", labels=["tenant"])
        seen_token_s = self._seen_token_s
        self._seen_token_s = {name: token_s for name, (token_s, _) in sums.items()}
        may_be_named = [name for name in sums if name != OTHER_TENANTS]  # a client may call its tenant so
        for name in sorted(may_be_named, key=lambda name: -sums[name][0])[:NAMED_TENANTS_COUNT]:
            service_token_s, waiting_count = sums.pop(name)
            service.add_metric([name], service_token_s)
            waiting.add_metric([name], waiting_count)
        if sums:
            grown = (max(0.0, token_s - seen_token_s.get(name, 0.0)) for name, (token_s, _) in sums.items())
            self._others_token_s += sum(grown)
            service.add_metric([OTHER_TENANTS], self._others_token_s)
            waiting.add_metric([OTHER_TENANTS], sum(waiting_count for _, waiting_count in sums.values()))
        yield service
        yield waiting
        yield from self._by_pool(
            "thunderagent_tenants_jain_ratio",
            "Jain's fairness index of tenants that had to wait, by weight; absent until two had to.",
            lambda scheduler: scheduler.tenants.jain_ratio() if scheduler.tenants is not None else None,
        )

    def _learned(self) -> Iterator[Metric]:
        break_even = GaugeMetricFamily(
            "thunderagent_break_even_seconds",
            "Time to regain a replica's whole memory, as corrected, by the lower end of the price; absent if its "
            "capacity is unknown.",
            labels=["replica"],
        )
        price_s = GaugeMetricFamily(
            "thunderagent_token_price_seconds",
            "What each computed prompt token takes of a replica's time: the ends of the interval, and the estimate; "
            "absent until measured.",
            labels=["replica", "bound", "source"],
        )
        for scheduler in self._runtime.pools.schedulers:
            for replica_id, account in scheduler.ledger.accounts.items():
                if account.capacity_tokens is not None:
                    break_even.add_metric([replica_id], scheduler.view.break_even_s(replica_id))
                price = scheduler.knowledge.prices.of(replica_id)
                if price.is_measured:
                    price_s.add_metric([replica_id, "low", price.source], price.low_token_s)
                    price_s.add_metric([replica_id, "estimate", price.source], price.token_s)
                    price_s.add_metric([replica_id, "high", price.source], price.high_token_s)
        yield break_even
        yield price_s
        yield from self._by_pool(
            "thunderagent_prefill_seconds_per_token",
            "What each computed prompt token takes of a replica's time: the median of the pool's replicas.",
            lambda scheduler: scheduler.knowledge.prices.token_s,
        )
        yield from self._by_pool(
            "thunderagent_median_residence_seconds",
            "Median time from a program's first turn to the end of its last; absent until one ended.",
            _residence_s,
        )

    def _judged(self) -> Iterator[Metric]:
        schedulers = self._runtime.pools.schedulers
        record = schedulers[0].knowledge.judge_record  # the end of a program is reported there first
        programs = GaugeMetricFamily(
            "thunderagent_programs_by_level", "Live programs by the level of their verdicts.", labels=["level"]
        )
        live = chain.from_iterable(scheduler.programs.values() for scheduler in schedulers)
        counts = Counter(map(_LEVEL, live))
        for level in Level:
            programs.add_metric([level.name.lower()], counts[level])
        yield programs
        outcomes = CounterMetricFamily(
            "thunderagent_program_outcomes", "Released programs whose outcome the client reported.", labels=["outcome"]
        )
        for outcome in OUTCOMES:
            outcomes.add_metric([outcome], record.program_counts[outcome])
        yield outcomes
        for outcome, name, what in (
            (FAILURE, "recall", "programs that failed"),
            (SUCCESS, "false_alarm", "programs that succeeded"),
        ):
            ratios = GaugeMetricFamily(
                f"thunderagent_judge_{name}_ratio",
                f"Part of the {what} that the judge had predicted to fail within so many turns; absent until known.",
                labels=["turns"],
            )
            for turn_count in TURN_EDGES_COUNT if any(record.level_counts.values()) else ():
                if (ratio := record.predicted_ratio(outcome, turn_count)) is not None:
                    ratios.add_metric([str(turn_count)], ratio)
            yield ratios

    def _hinted(self) -> Iterator[Metric]:
        records = [scheduler.knowledge.hints for scheduler in self._runtime.pools.schedulers]
        taken = CounterMetricFamily(
            "thunderagent_hints", "Hints of clients by keep: retain, offload, drop, or unsaid.", labels=["keep"]
        )
        for keep in ("", *KEEPS):
            taken.add_metric([keep or "unsaid"], sum(record.taken_counts[keep] for record in records))
        yield taken
        measured = CounterMetricFamily(
            "thunderagent_hints_measured",
            "First hints between two turns by when the turn came: right, early, late.",
            labels=["outcome"],
        )
        for outcome in records[0].outcome_counts:
            measured.add_metric([outcome], sum(record.outcome_counts[outcome] for record in records))
        yield measured
        yield CounterMetricFamily(
            "thunderagent_hint_error_seconds",
            "By how much turns came earlier than half, or later than twice, the hinted time.",
            sum(record.error_s_total for record in records),
        )


def _residence_s(scheduler: Scheduler) -> float | None:
    residence_s = scheduler.knowledge.median_residence_s
    return residence_s if isfinite(residence_s) else None


def exposition(registry: CollectorRegistry) -> bytes:
    """Return the text of `/metrics`."""
    return generate_latest(registry)
