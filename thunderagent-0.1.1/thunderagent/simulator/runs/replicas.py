"""Several engines in virtual time: their iterations, polls and outages."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Protocol

from thunderagent.simulator.engine.engine import Engine
from thunderagent.simulator.engine.records import (
    EngineConfig,
    EngineRequest,
    EngineStats,
    FinishedRequest,
    StepResult,
)
from thunderagent.simulator.runs.agenda import Agenda


@dataclass(frozen=True, slots=True)
class Outage:
    """A replica that goes down and comes back empty."""

    replica_id: str
    down_s: float
    up_s: float


class ReplicaListener(Protocol):
    """Hear what an engine did; called at the end of the iteration in which it happened."""

    def first_token(self, request_id: str) -> None:
        """Learn that a request's prefill is over."""

    def request_finished(self, finished: FinishedRequest) -> None:
        """Learn that a request has all its tokens."""


@dataclass(slots=True)
class Reading:
    """The result of a poll; hits, queries and preemptions since the previous poll, or since the engine came up.

    `hit_ratio` is by tokens; None without lookups. `query_tokens` were looked up. `tier_query_tokens` were not in the
    pool, and looked up in the tier behind it; `tier_hit_tokens` were found there. In `iteration_count` iterations
    `computed_tokens` of prompts and `generated_tokens` were computed.
    """

    capacity_tokens: int
    hit_ratio: float | None
    query_tokens: int
    preemption_count: int
    kv_used_ratio: float
    waiting_count: int
    tier_query_tokens: int = 0
    tier_hit_tokens: int = 0
    computed_tokens: int = 0
    generated_tokens: int = 0
    iteration_count: int = 0


class SimulatedReplica:
    """One engine on an agenda: an iteration begins as soon as the previous one is over and there is work."""

    def __init__(self, replica_id: str, config: EngineConfig, agenda: Agenda, listener: ReplicaListener) -> None:
        self.replica_id = replica_id
        self.engine = Engine(config)
        self.up = True
        self._config = config
        self._agenda = agenda
        self._listener = listener
        self._runs = False  # an iteration
        self._without_token: set[str] = set()
        self._polled = self.engine.stats
        self._incarnation_count = 0
        self._preemption_count = 0
        self._decoded = partial(self._end_decoding, 0)

    def __repr__(self) -> str:
        return f"<SimulatedReplica {self.replica_id} {'up' if self.up else 'down'}: {self.engine!r}>"

    @property
    def stats(self) -> EngineStats:
        """Return the engine's gauges and counters since it last came up."""
        return self.engine.stats

    @property
    def used_tokens(self) -> int:
        """Return the tokens of all blocks that running requests hold."""
        return self.engine.stats.used_block_count * self._config.block_size

    @property
    def preemption_count(self) -> int:
        """Return the preemptions since the begin of the run."""
        return self._preemption_count + self.engine.stats.preemption_count

    def submit(self, request: EngineRequest) -> None:
        """Queue a request; ValueError if the engine can never run it."""
        self.engine.submit(request, self._agenda.now_s)
        self._without_token.add(request.request_id)
        if not self._runs:
            self._begin_iteration()

    def poll(self) -> Reading:
        """Return what its metrics say now."""
        before, stats = self._polled, self.engine.stats
        self._polled = stats
        query_tokens = stats.prefix_query_tokens - before.prefix_query_tokens
        hit_tokens = stats.prefix_hit_tokens - before.prefix_hit_tokens
        return Reading(
            capacity_tokens=self._config.capacity_tokens,
            hit_ratio=hit_tokens / query_tokens if query_tokens else None,
            query_tokens=query_tokens,
            preemption_count=stats.preemption_count - before.preemption_count,
            kv_used_ratio=stats.used_block_count / stats.block_count,
            waiting_count=stats.waiting_count,
            tier_query_tokens=stats.tier_query_tokens - before.tier_query_tokens,
            tier_hit_tokens=stats.tier_hit_tokens - before.tier_hit_tokens,
            computed_tokens=stats.computed_tokens - before.computed_tokens,
            generated_tokens=stats.generated_tokens - before.generated_tokens,
            iteration_count=stats.iteration_count - before.iteration_count,
        )

    def drop(self, keys: Sequence[int]) -> None:
        """Take the blocks with these keys first, as far as no request uses them."""
        self.engine.expire(keys)

    def drop_retained(self, retain_id: str) -> None:
        """Stop retaining its blocks."""
        self.engine.drop_retained(retain_id)

    def go_down(self) -> Sequence[str]:
        """Lose everything; return the requests inside, in order of arrival."""
        lost = self.engine.request_ids
        self.up = False
        self._incarnation_count += 1
        self._decoded = partial(self._end_decoding, self._incarnation_count)
        self._preemption_count += self.engine.stats.preemption_count
        self.engine = Engine(self._config)
        self._runs = False
        self._without_token.clear()
        self._polled = self.engine.stats
        return lost

    def come_up(self) -> None:
        """Come up with an empty cache."""
        self.up = True

    def _begin_iteration(self) -> None:
        self._runs = True
        duration_s = self.engine.decode()
        if duration_s is not None:
            self._agenda.after(duration_s, self._decoded)
            return
        result = self.engine.step(self._agenda.now_s)
        self._agenda.after(result.duration_s, partial(self._end_iteration, result, self._incarnation_count))

    def _end_decoding(self, incarnation_count: int) -> None:
        """End an iteration without listeners."""
        if incarnation_count == self._incarnation_count:  # otherwise it went down within the iteration
            self._begin_iteration()

    def _end_iteration(self, result: StepResult, incarnation_count: int) -> None:
        if incarnation_count != self._incarnation_count:  # it went down within the iteration
            return
        without_token = self._without_token
        if without_token and result.work.prefill_tokens:
            for request_id in result.generated:
                if request_id in without_token:
                    without_token.remove(request_id)
                    self._listener.first_token(request_id)
        for finished in result.finished:
            self._listener.request_finished(finished)
        self._runs = False
        if self.engine.has_work:
            self._begin_iteration()
