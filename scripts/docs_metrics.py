"""Return the metrics of a proxy and of a gateway, as they describe themselves, for the table of the reference."""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass
from typing import Any

from prometheus_client import CollectorRegistry

from thunderagent.backends import backend_of
from thunderagent.backends.poller import Poller, PollerSettings
from thunderagent.config import ServeConfig
from thunderagent.policy_loader import load_policy
from thunderagent.programs.scheduler import Scheduler
from thunderagent.proxy.admin.cell import CellCollector
from thunderagent.proxy.admin.replica_routes import SourceCollector
from thunderagent.proxy.admin.sandboxes import SandboxCollector
from thunderagent.proxy.fleet.discovery import Discovery, DiscoverySettings
from thunderagent.proxy.fleet.polls import Polls
from thunderagent.proxy.fleet.replicas import Replicas
from thunderagent.proxy.gate.held import NO_LIMITS, HeldTurns
from thunderagent.proxy.gate.keys.quotas import Quotas
from thunderagent.proxy.gate.rate_limit import RateLimits
from thunderagent.proxy.judge import Judge, JudgeCollector
from thunderagent.proxy.judge.judge import Asker
from thunderagent.proxy.turns.exact_prefixes import PrefixCollector
from thunderagent.proxy.watch.autoscaling import AutoscalingCollector
from thunderagent.proxy.watch.metrics import StateCollector
from thunderagent.proxy.watch.open_files import OpenFiles
from thunderagent.proxy.watch.rollouts import RolloutCollector, Rollouts, RolloutSettings
from thunderagent.proxy.watch.turn_metrics import LoopLag, TurnMetrics
from thunderagent.runtime import Runtime
from thunderagent.scale.gateway.app import GatewayCollector
from thunderagent.scale.gateway.carried import CarriedTurns
from thunderagent.scale.gateway.remote import RemoteRuntime, RemoteSettings
from thunderagent.scale.scheduler.links import Links
from thunderagent.serving.sandboxes import build_manager

OTHERS = "Programs and turns"
GROUPS = {
    "Replicas and memory": r"replica|engine_plugin|demand|capacity|cost|queued|pool|break_even|prefill|token_price",
    "Tools and sandboxes": r"tool|sandbox",
    "Tenants": r"tenant",
    "Hints": r"hint",
    "Rollouts": r"rollout",
    "Judge": r"judge_|programs_by_level|program_outcomes",
    "Gateways and schedulers": r"gateway|fail_open|scheduler_",
}
"""Headings of the page, and prefixes of metric names after `thunderagent_`; the first match counts."""


@dataclass(frozen=True)
class Described:
    """A metric under the name that a dashboard uses."""

    name: str
    kind: str
    labels: tuple[str, ...]
    meaning: str


def _nobody() -> AbstractAsyncContextManager[Asker]:
    raise AssertionError("nobody is asked here")


def described() -> list[Described]:
    """Return the metrics that `/metrics` of a proxy and of a gateway expose."""
    registry = CollectorRegistry()
    TurnMetrics(registry)
    LoopLag(registry)
    OpenFiles(registry)
    RateLimits(1, 1, registry)
    HeldTurns(NO_LIMITS, registry)
    Quotas(registry, lambda _: False, lambda _: 1)
    runtime = Runtime(Scheduler(load_policy("passthrough", {})))
    replicas = Replicas(runtime, [])
    registry.register(StateCollector(runtime, replicas))
    registry.register(AutoscalingCollector(runtime))
    registry.register(SourceCollector(Discovery(runtime, replicas, lambda: backend_of("vllm"), DiscoverySettings())))
    manager = build_manager(ServeConfig(sandboxes=("callback",)), runtime)
    assert manager is not None
    manager.failure_counts["x"] = 1
    registry.register(SandboxCollector(manager, registry))
    registry.register(JudgeCollector(Judge(runtime, _nobody)))
    recorded = Rollouts(RolloutSettings(False, None, 1, 1, 1.0, 1), runtime)
    registry.register(RolloutCollector(recorded))
    registry.register(PrefixCollector({}))
    of_gateways = GatewayCollector(RemoteRuntime(CarriedTurns("g", 1), RemoteSettings()))
    links = Links(runtime, replicas, Poller(Polls(runtime, replicas), PollerSettings()), gateway_lost_s=5.0)
    collectors = [*dict.fromkeys(registry._collector_to_names), of_gateways, CellCollector(links.report)]  # noqa: SLF001 - there is no other way
    found = [each for collector in collectors for each in _described_by(collector)]
    return list({each.name: each for each in reversed(found)}.values())[::-1]


def _described_by(collector: Any) -> Iterator[Described]:
    labels = getattr(collector, "_labelnames", ())  # of a counter itself: its families know none
    for family in collector.collect():
        name = family.name + ("_total" if family.type == "counter" else "")
        yield Described(name, family.type, tuple(getattr(family, "_labelnames", labels)), family.documentation)


def by_group() -> dict[str, list[Described]]:
    """Return the metrics under the headings of the page."""
    groups: dict[str, list[Described]] = {heading: [] for heading in (OTHERS, *GROUPS)}
    for each in described():
        name = each.name.removeprefix("thunderagent_")
        groups[next((heading for heading, begins in GROUPS.items() if re.match(begins, name)), OTHERS)].append(each)
    return groups
