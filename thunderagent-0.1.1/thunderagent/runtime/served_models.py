"""Which models are served where: what replicas list, and the pool of a turn.

At first no replica has reported what it serves: turns wait until every replica was asked once, or did not answer.
Later, a turn for an unlisted model has the replicas asked again, as soon as they may be, because an adapter may just
have been loaded. It waits for their answers, and for replicas that never came up, no longer than turns wait for any
replica. Then it is rejected.

With one pool that applies only if each engine rejects what it does not list: a turn that its engine would reject need
not wait for room first. If an engine takes any name, lists nothing, or never came up, all turns pass.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, suppress
from math import inf

from thunderagent.errors import ShuttingDownError, UnknownModelError
from thunderagent.leases import ReplicaMap, ReplicaState, TurnAsk
from thunderagent.programs.pools import Pool, Pools
from thunderagent.programs.state.program import Program

SETTLING_LIMIT_S = 5.0
"""How long turns wait at the start for all replicas to report their models."""

ASK_EVERY_S = 1.0
"""Least time between two rounds of asking replicas for an unknown model."""

ANSWER_LIMIT_S = 2.0
"""How long a turn waits for their answers."""

TOLD_MODELS_COUNT = 20
"""How many names the error of an unserved model shows at most; and how many characters of that model's."""
TOLD_MODEL_CHARS = 100


class ServedModels:
    """Knows the pools by what replicas list, and tells the carriers of bytes what they need of that."""

    def __init__(
        self,
        pools: Pools,
        replicas: ReplicaMap,
        *,
        state_of: Callable[[str], ReplicaState],
        clock: Callable[[], float],
        no_replica_limit_s: float,
    ) -> None:
        """Start without replicas; `state_of` returns what is pushed of each, `clock` returns monotonic seconds."""
        self.pools = pools
        self._replicas = replicas
        self._state_of = state_of
        self._now_s = clock
        self._no_replica_limit_s = no_replica_limit_s
        self._unheard_ids: set[str] = set()
        """Initial replicas that nobody has asked anything yet."""
        self._settled = asyncio.Event()
        self._unlisted_ids: set[str] = set()
        """Replicas that never reported their models."""
        self._listed = asyncio.Event()
        """Set when a replica reports its models, for current waiters."""
        self.ask_anew: Callable[[Sequence[str]], None] | None = None
        """Asks replicas at once which models they serve; None if nobody asks them."""
        self._asked_s = -inf
        """When they were last asked again."""
        self._to_answer: set[str] = set()
        """Replicas that have not answered that yet."""
        self._lenient_ids: set[str] = set()
        """Replicas that accept any name."""
        self.on_listed: Callable[[], None] = _nothing
        """Called when a replica's list changes."""
        self._closing = False
        replicas.names_models = pools.may_be_several

    # --- what replicas say ------------------------------------------------------------------------------------------

    def replica_known(self, replica_id: str) -> None:
        """Register a replica that will be asked."""
        if self.pools.may_be_several and self.pools.listing_of(replica_id) is None:
            self._unlisted_ids.add(replica_id)
            if not self._settled.is_set():
                self._unheard_ids.add(replica_id)

    def replica_heard(self, replica_id: str) -> None:
        """Record that a replica was asked for its state, with or without an answer."""
        self._unheard_ids.discard(replica_id)
        if not self._unheard_ids and not self._settled.is_set():
            self._settled.set()
            self.changed()

    def listed(
        self, replica_id: str, models: tuple[str, ...], *, refuses_others: bool = False, asked_s: float = -inf
    ) -> None:
        """Record the models of a replica; its first list decides its pool.

        `refuses_others` says whether its engine rejects all other names; it was asked at `asked_s`.
        """
        if replica_id in self._to_answer and asked_s >= self._asked_s:
            self._answered(replica_id)
        if refuses_others is (replica_id in self._lenient_ids):
            (self._lenient_ids.discard if refuses_others else self._lenient_ids.add)(replica_id)
            self.changed()
        if self.pools.listing_of(replica_id) == models:
            return
        self.pools.listed(replica_id, models)
        self._unlisted_ids.discard(replica_id)
        self.changed()
        self.on_listed()
        self._tell()

    def _answered(self, replica_id: str) -> None:
        self._to_answer.discard(replica_id)
        if not self._to_answer:
            self._tell()

    def _tell(self) -> None:
        self._listed.set()
        self._listed = asyncio.Event()

    def forget(self, replica_id: str) -> None:
        """Forget a removed replica."""
        self.pools.forget(replica_id)
        self._unlisted_ids.discard(replica_id)
        self._lenient_ids.discard(replica_id)
        self._answered(replica_id)
        self.replica_heard(replica_id)
        self.changed()

    def changed(self) -> None:
        """Tell the carriers of bytes whether a turn's model matters, and where each replica is."""
        has_pools = self.pools.several
        self._replicas.names_models = (
            has_pools
            or self.pools.some_partly
            or self._refuses_unknown
            or (self.pools.may_be_several and not self._settled.is_set())
        )
        self._replicas.has_pools = has_pools
        self._replicas.push(map(self._state_of, self.pools.replicas))

    def close(self) -> None:
        """Release all waiters."""
        self._closing = True
        self._settled.set()
        self._listed.set()

    # --- where a turn goes ------------------------------------------------------------------------------------------

    @property
    def _refuses_unknown(self) -> bool:
        """Whether turns for an unlisted model are known to be rejected, even with one pool."""
        pools, unknown_ids = self.pools, self._unlisted_ids or self._lenient_ids
        return pools.may_be_several and not unknown_ids and bool(pools.models) and not pools.all[0].may_serve_any

    def is_plain(self, model: str) -> bool:
        """Return whether all is known, and the only pool serves that model: nothing to find out. Cost: O(1)."""
        return (
            not self.pools.several and self._settled.is_set() and (not model or self.pools.of_model(model) is not None)
        )

    async def find_pool(self, ask: TurnAsk, while_held: AbstractContextManager[object]) -> None:
        """Find the pool of a turn; at the start only once the replicas' models are known.

        `while_held` is entered while it waits. Raises what that raises, `UnknownModelError` and `ShuttingDownError`.
        """
        if self._unheard_ids and not self._settled.is_set():
            with suppress(TimeoutError), while_held:
                async with asyncio.timeout(SETTLING_LIMIT_S):
                    await self._settled.wait()
        if self._closing:
            return
        if self.pools.several or (ask.model and ask.pinned_replica_id is None and self._refuses_unknown):
            pool = await self._pool_when_known(ask, while_held)
            if self.pools.several and ask.pinned_replica_id is None:  # otherwise nobody asks where it goes
                self.pools.send(ask.turn_id, pool)

    async def _pool_when_known(self, ask: TurnAsk, while_held: AbstractContextManager[object]) -> Pool:
        """Return the pool of a turn; a replica may serve by now what it, or any other, did not.

        Raises `UnknownModelError`; if some replicas never came up, after the time that turns wait for a replica.
        """
        came_s = self._now_s()
        ends_s = came_s + min(self._no_replica_limit_s, inf if ask.patience_s is None else ask.patience_s)
        while True:
            try:
                return self._pool_of(ask)
            except UnknownModelError:
                now_s = self._now_s()
                until_s = self._answers_until_s(came_s, now_s)
                if self._unlisted_ids and until_s <= now_s:
                    until_s = ends_s
                until_s = min(until_s, ends_s)
                if now_s >= until_s:
                    raise
            with suppress(TimeoutError), while_held:
                async with asyncio.timeout(until_s - now_s):
                    await self._listed.wait()
            if self._closing:
                raise ShuttingDownError("the proxy is shutting down")

    def _answers_until_s(self, came_s: float, now_s: float) -> float:
        """Return until when to wait for an answer that knows what was loaded when a turn came.

        Have all replicas that are up asked, unless they were since then; not before they may be asked again.
        """
        if self.ask_anew is None:
            return -inf
        if came_s > self._asked_s and now_s < self._asked_s + ASK_EVERY_S:
            return self._asked_s + ASK_EVERY_S
        if came_s > self._asked_s:
            self._asked_s = now_s
            self._to_answer = {state.replica_id for state in self._replicas.states.values() if state.is_up}
            self.ask_anew(sorted(self._to_answer))
        return self._asked_s + ANSWER_LIMIT_S if self._to_answer else -inf

    def _pool_of(self, ask: TurnAsk) -> Pool:
        """Return the pool of a turn. Raises `UnknownModelError`."""
        if ask.pinned_replica_id is not None:
            return self.pools.of_replica(ask.pinned_replica_id)
        return self.pool_for(ask.model, ask.program_id, ask.wanted_replica_id)

    def pool_for(self, model: str, program_id: str | None = None, replica_id: str | None = None) -> Pool:
        """Return the pool that serves a model.

        Without a model it is that of the wanted replica, or the only one where its program lives. Raises
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
        names = sorted(self.pools.models)
        more = f", and {len(names) - TOLD_MODELS_COUNT} more" if len(names) > TOLD_MODELS_COUNT else ""
        return f"there are: {', '.join(names[:TOLD_MODELS_COUNT])}{more}"

    def home_of(self, program_id: str, model: str = "") -> str | None:
        """Return the replica of a program, if that is up; with several pools that in the named model's."""
        pools = self.pools
        pool = pools.of_model(model) if model and pools.several else None
        program = (pools if pool is None else pool.scheduler).programs.get(program_id)
        home_id = program.replica_id if program is not None else None
        return home_id if self._replicas.is_up(home_id) else None

    def name_of_pool(self, program: Program) -> str:
        """Return the name of a program's pool; empty if there is only one."""
        if not self.pools.several:
            return ""
        pools = self.pools.of_program(program.program_id)
        return next((pool.name for pool in pools if pool.scheduler.programs[program.program_id] is program), "")


def _nothing() -> None:
    """Do nothing, if nobody wants to know."""
