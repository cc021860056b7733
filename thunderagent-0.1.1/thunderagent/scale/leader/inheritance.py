"""The next leader's core takes over what the last one left, before any gateway is let in."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable
from itertools import islice

import structlog

from thunderagent.errors import StateError
from thunderagent.programs.messages import ProgramRecord, ProgramsAdopted, RouteSet
from thunderagent.runtime import Runtime
from thunderagent.runtime.learned_state import LearnedState, decode_state
from thunderagent.scale.leader.kept import Kept, Operated
from thunderagent.scale.scheduler.gateways import Gateways

log = structlog.get_logger("thunderagent.scale")

ADOPT_COUNT = 100
"""Programs adopted or forgotten without yielding to others: 4 ms."""


async def go_on_from(kept: Kept, runtime: Runtime, learned: LearnedState, gateways: Gateways) -> None:
    """Make a scheduler continue from what was kept."""
    _learn(kept.learned, learned)
    await _adopt(kept.programs(runtime.now_s()), runtime)
    _operate(kept.operated, runtime)
    runtime.outcome_counts.update(kept.sums.outcome_counts)
    runtime.prompt_tokens_total += kept.sums.prompt_tokens
    runtime.output_tokens_total += kept.sums.output_tokens
    runtime.cached_tokens_total += kept.sums.cached_tokens
    for gateway_id, gateway in kept.gateways.items():
        gateways.knows(gateway_id, gateway.boot_id, gateway.counted, runtime.now_s())


async def let_go(kept: Kept) -> None:
    """Forget what the core has by now, a few at a time: 100,000 programs take 0.2 s."""
    while kept.forget(ADOPT_COUNT):  # noqa: ASYNC110 - nothing is waited for: others get their turn
        await asyncio.sleep(0)


def _learn(content: bytes, learned: LearnedState) -> None:
    if content:
        try:
            learned.take(decode_state(content))
        except StateError as error:
            log.warning("state_refused", file="the store", why=error.message)


async def _adopt(programs: Iterable[tuple[str, ProgramRecord]], runtime: Runtime) -> None:
    """Let the core adopt programs, each in its pool."""
    remaining = iter(programs)
    while chunk := list(islice(remaining, ADOPT_COUNT)):
        by_pool: dict[str, list[ProgramRecord]] = {}
        for name, record in chunk:
            pool = next((each for each in runtime.pools.all if each.name == name), None)
            home_id = record.replica_id if pool is None else next(iter(pool.scheduler.replicas), record.replica_id)
            by_pool.setdefault(home_id, []).append(record)
        for replica_id, records in by_pool.items():
            runtime.dispatch(ProgramsAdopted(runtime.now_s(), replica_id, tuple(records)))
        await asyncio.sleep(0)


def _operate(operated: Operated, runtime: Runtime) -> None:
    """Apply operators' settings, as far as their replicas are there."""
    for scope, name, targets in operated.routes:
        there = tuple((each, weight) for each, weight in targets.items() if runtime.replicas.get(each) is not None)
        if there:
            runtime.dispatch(RouteSet(runtime.now_s(), scope, name, there))
    for replica_id, cause in operated.causes:
        if replica_id is None or runtime.replicas.get(replica_id) is not None:
            runtime.suspend_grants(cause, replica_id)
