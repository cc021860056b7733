"""Which models are served where: what replicas list, and the pool that a turn is for.

In the first moments nobody has said yet what it serves: turns wait until every replica was asked once, or answered
nothing. Later a turn for a model that nobody lists waits for replicas that never came up, and no longer than turns wait
for any replica.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from contextlib import AbstractContextManager, suppress
from math import inf

from thunderagent.errors import ShuttingDownError, UnknownModelError
from thunderagent.leases import ReplicaMap, ReplicaState, TurnAsk
from thunderagent.programs.model.program import Program
from thunderagent.programs.pools import Pool, Pools

SETTLING_LIMIT_S = 5.0
"""Turns of the first moments wait for no longer until all replicas have said which models they serve."""

TOLD_MODELS_COUNT = 20
"""So many names stand in the error of a model that nobody serves, at most; and so many characters of that model's."""
TOLD_MODEL_CHARS = 100


class ServedModels:
    """Knows the pools by what replicas list, and has those who carry bytes know what of that matters to them."""

    def __init__(
        self,
        pools: Pools,
        replicas: ReplicaMap,
        *,
        state_of: Callable[[str], ReplicaState],
        clock: Callable[[], float],
        no_replica_limit_s: float,
    ) -> None:
        """Begin with no replica; `state_of` tells what is pushed of each, `clock` returns monotonic seconds."""
        self.pools = pools
        self._replicas = replicas
        self._state_of = state_of
        self._now_s = clock
        self._no_replica_limit_s = no_replica_limit_s
        self._unheard_ids: set[str] = set()
        """Replicas of the first moments that nobody has asked anything yet."""
        self._settled = asyncio.Event()
        self._unlisted_ids: set[str] = set()
        """Replicas that never said which models they serve."""
        self._listed = asyncio.Event()
        """Set when one says so, for those that wait for it now."""
        self._closing = False
        replicas.names_models = pools.may_be_several

    # --- what replicas say ------------------------------------------------------------------------------------------

    def replica_known(self, replica_id: str) -> None:
        """Hear of a replica that will be asked."""
        if self.pools.may_be_several and self.pools.listing_of(replica_id) is None:
            self._unlisted_ids.add(replica_id)
            if not self._settled.is_set():
                self._unheard_ids.add(replica_id)

    def replica_heard(self, replica_id: str) -> None:
        """Hear that a replica was asked how it is, and answered or did not."""
        self._unheard_ids.discard(replica_id)
        if not self._unheard_ids and not self._settled.is_set():
            self._settled.set()
            self.changed()

    def listed(self, replica_id: str, models: tuple[str, ...]) -> None:
        """Take in which models a replica serves; its first word on that says which pool it is in."""
        if self.pools.listing_of(replica_id) == models:
            return
        self.pools.listed(replica_id, models)
        self._unlisted_ids.discard(replica_id)
        self.changed()
        self._listed.set()
        self._listed = asyncio.Event()

    def forget(self, replica_id: str) -> None:
        """Forget a replica that was removed."""
        self.pools.forget(replica_id)
        self._unlisted_ids.discard(replica_id)
        self.replica_heard(replica_id)

    def changed(self) -> None:
        """Tell who carries bytes whether it matters which model a turn is for, and where each replica is."""
        has_pools = self.pools.several
        self._replicas.names_models = has_pools or (self.pools.may_be_several and not self._settled.is_set())
        self._replicas.has_pools = has_pools
        self._replicas.push(map(self._state_of, self.pools.replicas))

    def close(self) -> None:
        """Have nobody wait for it any more."""
        self._closing = True
        self._settled.set()
        self._listed.set()

    # --- where a turn goes ------------------------------------------------------------------------------------------

    async def find_pool(self, ask: TurnAsk, while_held: AbstractContextManager[object]) -> None:
        """Find the pool that a turn is for; in the first moments only once it is known which replica serves what.

        `while_held` is entered while it waits. Raises what that raises, `UnknownModelError` and `ShuttingDownError`.
        """
        if self._unheard_ids and not self._settled.is_set():
            with suppress(TimeoutError), while_held:
                async with asyncio.timeout(SETTLING_LIMIT_S):
                    await self._settled.wait()
        if self.pools.several and not self._closing:
            self.pools.send(ask.turn_id, await self._pool_when_known(ask, while_held))

    async def _pool_when_known(self, ask: TurnAsk, while_held: AbstractContextManager[object]) -> Pool:
        """Return the pool that a turn is for; a replica that never came up yet may serve what no other does.

        Raises `UnknownModelError`, in that case once turns would have waited for a replica for too long.
        """
        ends_s = self._now_s() + min(self._no_replica_limit_s, ask.patience_s or inf)
        while True:
            try:
                return self._pool_of(ask)
            except UnknownModelError:
                if not self._unlisted_ids or self._now_s() >= ends_s:
                    raise
            with suppress(TimeoutError), while_held:
                async with asyncio.timeout(ends_s - self._now_s()):
                    await self._listed.wait()
            if self._closing:
                raise ShuttingDownError("the proxy is shutting down")

    def _pool_of(self, ask: TurnAsk) -> Pool:
        """Return the pool that a turn is for. Raises `UnknownModelError`."""
        if ask.pinned_replica_id is not None:
            return self.pools.of_replica(ask.pinned_replica_id)
        return self.pool_for(ask.model, ask.program_id, ask.wanted_replica_id)

    def pool_for(self, model: str, program_id: str | None = None, replica_id: str | None = None) -> Pool:
        """Return the pool that serves a model.

        Where none is named it is that of a replica that is wanted, or the only one that its program lives in. Raises
        `UnknownModelError`.
        """
        pools = self.pools
        if model:
            if (pool := pools.of_model(model)) is None:
                raise UnknownModelError(
                    f"the model {model[:TOLD_MODEL_CHARS]!r} is not served here; {self._told_models()}"
                )
            return pool
        if replica_id in pools.replicas:
            return pools.of_replica(replica_id)
        homes = pools.of_program(program_id) if program_id is not None else []
        if len(homes) == 1:
            return homes[0]
        if (pool := pools.of_model("")) is None:
            raise UnknownModelError(
                f"several models are served here, and the request names none; {self._told_models()}"
            )
        return pool

    def _told_models(self) -> str:
        names = self.pools.models
        more = f", and {len(names) - TOLD_MODELS_COUNT} more" if len(names) > TOLD_MODELS_COUNT else ""
        return f"there are: {', '.join(names[:TOLD_MODELS_COUNT])}{more}"

    def home_of(self, program_id: str, model: str = "") -> str | None:
        """Return the replica that a program is on, if that is up; with several pools that in the model's, if named."""
        pools = self.pools
        pool = pools.of_model(model) if model and pools.several else None
        program = (pools if pool is None else pool.scheduler).programs.get(program_id)
        home_id = program.replica_id if program is not None else None
        return home_id if self._replicas.is_up(home_id) else None

    def name_of_pool(self, program: Program) -> str:
        """Return the name of a program's pool; empty where there is one."""
        if not self.pools.several:
            return ""
        pools = self.pools.of_program(program.program_id)
        return next((pool.name for pool in pools if pool.scheduler.programs[program.program_id] is program), "")
