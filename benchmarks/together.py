"""Run several models behind one proxy, each with its own replicas, programs and pool, in one virtual time.

A run must behave as it does alone: nothing of one pool's turns, memory and queue may affect another pool.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from thunderagent.errors import ConfigurationError
from thunderagent.programs.messages import Decision, Event, Tick, TurnAsk
from thunderagent.programs.policy import Policy
from thunderagent.programs.pools import Pool, Pools
from thunderagent.simulator.figures.figures import RunResult
from thunderagent.simulator.runs.agenda import Agenda
from thunderagent.simulator.runs.run import Simulation
from thunderagent.simulator.runs.scenario import Scenario
from thunderagent.simulator.workloads.plans import Workload

TURN_IDS_OF_A_RUN_COUNT = 10**9
"""Larger than the number of turns of any run."""


@dataclass(frozen=True)
class Model:
    """One model: its replicas (with unique names), its programs and its policy."""

    name: str
    scenario: Scenario
    workload: Workload
    policy: Policy


def simulate_together(models: Sequence[Model]) -> list[RunResult]:
    """Run all models as closed loops over the same time; return the figures of each, in order.

    Program names must be unique too: use different workloads or seeds. Raises ConfigurationError.
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
    """Return a handler that passes a run's events to all pools, and returns the run's own decisions.

    Other runs carry out the decisions of their own pools. The first run's ticks are for all, as on a server.
    """
    others = {other.scheduler: other for other in runs if other is not run}

    def handle(event: Event) -> list[Decision]:
        if type(event) is Tick and run is not runs[0]:
            return []
        if type(event) is TurnAsk:
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
