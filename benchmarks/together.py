"""Runs of several models behind one proxy, each with replicas, programs and a pool of its own, in one virtual time.

What a run does alone it should do here, too: nothing of one pool's turns, memory and queue may show in another's.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from thunderagent.errors import ConfigurationError
from thunderagent.programs.model.decisions import Decision
from thunderagent.programs.model.events import Event, Tick, TurnArrived
from thunderagent.programs.model.policy import Policy
from thunderagent.programs.pools import Pool, Pools
from thunderagent.simulator.figures.figures import RunResult
from thunderagent.simulator.runs.agenda import Agenda
from thunderagent.simulator.runs.run import Simulation
from thunderagent.simulator.runs.scenario import Scenario
from thunderagent.simulator.workloads.plans import Workload

TURN_IDS_OF_A_RUN_COUNT = 10**9
"""More turns than any run has."""


@dataclass(frozen=True)
class Model:
    """What one model has: its replicas, which no other's may be named like, its programs and its policy."""

    name: str
    scenario: Scenario
    workload: Workload
    policy: Policy


def simulate_together(models: Sequence[Model]) -> list[RunResult]:
    """Run all of them, closed loops over the same time, and return the figures of each, in their order.

    Programs must be named apart, too: by other workloads or other seeds. Raises ConfigurationError.
    """
    horizons_s = {each.scenario.horizon_s for each in models}
    if len(horizons_s) > 1 or any(each.scenario.loop != "closed" for each in models):
        raise ConfigurationError("runs of several models must be closed loops over the same time")
    agenda = Agenda()
    runs = [
        Simulation(
            each.scenario,
            each.workload,
            each.policy,
            agenda=agenda,
            turn_ids_from=number * TURN_IDS_OF_A_RUN_COUNT,
        )
        for number, each in enumerate(models)
    ]
    further = iter([run.scheduler for run in runs[1:]])
    pools = Pools(runs[0].scheduler, lambda: next(further))
    for model in models:
        for replica_id in model.scenario.replica_ids:
            pools.listed(replica_id, (model.name,))
    by_scheduler = {pool.scheduler: pool for pool in pools.all}
    for run in runs:
        run.handle = _behind(pools, by_scheduler[run.scheduler], run, runs)
    for run in runs:
        run.begin()
    while any(run.has_more for run in runs) and agenda.advance(min(horizons_s)):
        pass
    completed = [run.end() for run in runs]
    return [run.result(complete=complete) for run, complete in zip(runs, completed, strict=True)]


def _behind(pools: Pools, pool: Pool, run: Simulation, runs: Sequence[Simulation]) -> Callable[[Event], list[Decision]]:
    """Return what hands a run's events to all pools, has others carry out what was decided there, and returns its own.

    The first run's ticks are everybody's, as on a server.
    """
    others = {other.scheduler: other for other in runs if other is not run}

    def handle(event: Event) -> list[Decision]:
        if type(event) is Tick and run is not runs[0]:
            return []
        if type(event) is TurnArrived:
            pools.send(event.turn_id, pool)
        pools.handle(event)
        own: list[Decision] = []
        for each, _, decisions in pools.handled:
            if each is pool:
                own.extend(decisions)
            else:
                others[each.scheduler].carry_out(decisions)
        return own

    return handle
