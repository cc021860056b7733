"""Reports the poller's news of replicas to the runtime."""

from __future__ import annotations

from math import inf

import structlog

from thunderagent.backends.base import ReplicaReading
from thunderagent.programs.messages import BACKPRESSURE, EncodesPolled, ReplicaPolled, TierPolled, WorkPolled
from thunderagent.programs.state.health import ReplicaState
from thunderagent.proxy.fleet.judging import Judging
from thunderagent.proxy.fleet.known import KnownReplica
from thunderagent.proxy.fleet.readings import (
    NOTHING_SINCE,
    has_restarted,
    has_totals,
    since_of,
    tier_since_of,
    work_since_of,
)
from thunderagent.proxy.fleet.replicas import Replicas
from thunderagent.runtime import Runtime

RESTARTED = "it restarted: another process answers"

log = structlog.get_logger("thunderagent.replicas")


class Polls:
    """Listens to the poller, and tells the runtime."""

    def __init__(
        self,
        runtime: Runtime,
        replicas: Replicas,
        judging: Judging | None = None,
        *,
        capacity_override_tokens: int | None = None,
    ) -> None:
        """Store readings in `replicas`, and have them judged; the override replaces the engines' reported capacity."""
        self._judging = judging
        if judging is not None:
            judging.came_back = self.replica_up
        self._runtime = runtime
        self._replicas = replicas
        self._capacity_override_tokens = capacity_override_tokens

    def replica_polled(self, replica_id: str, reading: ReplicaReading) -> None:
        """Store a reading; tell the runtime if it has news."""
        known, plugins = self._replicas.known[replica_id], self._replicas.plugins
        plugins.polled(replica_id)
        reading = plugins.without_pins(replica_id, reading)
        if reading.models is not None:
            refuses_others, asked_s = known.endpoint.backend.refuses_models, self._runtime.now_s() - reading.age_s
            models = reading.models if refuses_others else _also_by_first_name(known, reading, reading.models)
            self._runtime.served.listed(replica_id, models, refuses_others=refuses_others, asked_s=asked_s)
        before, known.reading = known.reading, reading
        self._may_have_restarted(replica_id, known, reading)
        if reading.uncached_ranks_count and not before.uncached_ranks_count:
            kind = known.endpoint.backend.kind
            log.warning(
                "prefix_caching_off",
                replica_id=replica_id,
                effect="each turn there computes its whole context again; start "
                + ("SGLang without --disable-radix-cache" if kind == "sglang" else "vLLM with --enable-prefix-caching"),
            )
        since, tier, work, began_anew = NOTHING_SINCE, None, None, False
        if has_totals(reading):
            tier = tier_since_of(known.counted, reading)
            work = work_since_of(known.counted, reading)
            since = since_of(known.counted, reading)
            began_anew = since == NOTHING_SINCE and has_totals(known.counted)
            known.counted = reading
        told_tokens = self._capacity_override_tokens or reading.capacity_tokens
        capacity_tokens = plugins.capacity_tokens(replica_id, told_tokens)
        state = self._runtime.replicas.get(replica_id)
        news = state is None or capacity_tokens != state.capacity_tokens
        load = reading.kv_used_ratio, reading.waiting_count
        news = (news and capacity_tokens is not None) or load != (before.kv_used_ratio, before.waiting_count)
        if since.query_tokens or since.preemption_count or news or began_anew:
            now_s = self._runtime.now_s()
            self._runtime.dispatch(
                ReplicaPolled(now_s, replica_id, capacity_tokens, *since, *load, age_s=reading.age_s)
            )
        if tier is not None:
            self._runtime.dispatch(TierPolled(self._runtime.now_s(), replica_id, *tier))
        if work is not None:
            preemption_count = since.preemption_count or 0
            self._runtime.dispatch(
                WorkPolled(self._runtime.now_s(), replica_id, *work, preemption_count, age_s=reading.age_s)
            )
        encodes_count = reading.pending_encode_count
        if encodes_count is not None and encodes_count != self._runtime.pending_encode_count(replica_id):
            self._runtime.dispatch(EncodesPolled(self._runtime.now_s(), replica_id, encodes_count))
        if self._judging is not None:
            self._judging.polled(replica_id, reading)

    def _may_have_restarted(self, replica_id: str, known: KnownReplica, reading: ReplicaReading) -> None:
        """Begin anew with a replica that died and came back between two polls.

        What was sent to it before the last poll of the earlier process is lost; later turns may already run in the new
        one.
        """
        before, before_s, now_s = known.process, known.asked_s, self._runtime.now_s()
        if reading.started_s is not None or has_totals(reading):
            is_older = (before.started_s or 0.0) > (reading.started_s or inf)
            known.process = before if is_older else reading
        known.asked_s = now_s - reading.age_s
        if not has_restarted(before, reading):
            return
        log.warning("replica_restarted", replica_id=replica_id, was_up=known.is_up)
        was_up = known.is_up
        if was_up and self._judging is not None:  # one that is frozen comes back by its counters, or a check
            self._judging.forget(replica_id)
        self._runtime.replica_lost(replica_id, RESTARTED)
        self._replicas.lose_earlier(replica_id, RESTARTED, now_s - before_s)
        if was_up:
            self.replica_up(replica_id)

    def replica_lost(self, replica_id: str, why: str) -> None:
        """Give up what is in flight on a replica that is silent."""
        known = self._replicas.known[replica_id]
        if not known.is_lost:
            known.is_lost = True
            log.warning("replica_given_up", replica_id=replica_id, why=why)
            self._runtime.replica_lost(replica_id, why, ReplicaState.SILENT)

    def replica_up(self, replica_id: str) -> None:
        """Let the scheduler use a replica; log an error if its capacity is unknown."""
        known = self._replicas.known[replica_id]
        state = self._runtime.replicas.get(replica_id)
        said_before_tokens = state.capacity_tokens if state is not None else None
        capacity_tokens = self._capacity_override_tokens or known.reading.capacity_tokens or said_before_tokens
        log.info("replica_up", replica_id=replica_id, capacity_tokens=capacity_tokens)
        if capacity_tokens is None:
            log.warning(
                "capacity_unknown",
                replica_id=replica_id,
                effect="no turn is held for memory there; set --capacity-tokens if the engine does not report it",
            )
        known.why_down = ""
        known.is_up, known.is_lost = True, False
        self._replicas.came_up(replica_id)
        if known.draining_since_s is None:
            self._runtime.replica_up(replica_id, capacity_tokens)
        self._runtime.served.replica_heard(replica_id)

    def ranks_found(self, url: str, ranks_count: int) -> None:
        """Pass on how many ranks a URL has: it may add or remove replicas."""
        self._replicas.on_ranks_found(url, ranks_count)

    def may_be_silent(self, replica_id: str) -> bool:
        """Return whether a replica is suspended: it may answer nothing while it takes new weights."""
        state = self._runtime.replicas.get(replica_id)
        return state is not None and any(cause != BACKPRESSURE for cause in state.suspended_for)

    def heard_ago_s(self, replica_id: str) -> float:
        """Return how long ago a turn there last had a byte; infinite if none ever had."""
        return self._runtime.heard_ago_s(replica_id)

    def replica_down(self, replica_id: str, why: str, *, is_silent: bool = False) -> None:
        """Take a replica away from the scheduler."""
        log.warning("replica_down", replica_id=replica_id, why=why, silent=is_silent)
        if self._judging is not None:
            self._judging.forget(replica_id)
        known = self._replicas.known[replica_id]
        known.why_down = why
        known.is_up = False
        if is_silent and self._runtime.has_begun(replica_id):  # its streams stand still, too
            self.replica_lost(replica_id, why)
        else:
            self._runtime.replica_down(replica_id, ReplicaState.SILENT if is_silent else ReplicaState.DOWN, why)
        self._runtime.served.replica_heard(replica_id)


def _also_by_first_name(known: KnownReplica, reading: ReplicaReading, models: tuple[str, ...]) -> tuple[str, ...]:
    """Return what a replica that takes any name serves: what it lists, and what its process listed first.

    SGLang calls its model by the folder of its last weights, and agents go on with the name that it had.
    """
    if not known.is_up or has_restarted(known.process, reading):
        known.first_models = ()
    known.first_models = known.first_models or models
    return tuple(dict.fromkeys((*known.first_models, *models)))
