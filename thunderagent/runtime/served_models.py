"""Which models are served where: what replicas list, and the pool that a turn is for.

In the first moments nobody has said yet what it serves: turns wait until every replica was asked once, or answered
nothing. Later a turn for a model that nobody lists has the replicas asked anew, for an adapter may just have been
loaded, as soon as they may be asked again, and waits for their answers, and for replicas that never came up, no longer
than turns wait for any replica. Then it is refused.

With one pool that is so only where each engine refuses what it does not list: a turn that would be refused once it
comes to its engine need not wait for room first. Where one takes any name, lists nothing, or never came up, all pass.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, suppress
from math import inf

from thunderagent.errors import ShuttingDownError, UnknownModelError
from thunderagent.leases import ReplicaMap, ReplicaState, TurnAsk
from thunderagent.programs.model.program import Program
from thunderagent.programs.pool import Pool
from thunderagent.programs.pools import Pools

SETTLING_LIMIT_S = 5.0
"""Turns of the first moments wait for no longer until all replicas have said which models they serve."""

ASK_EVERY_S = 1.0
"""Replicas are asked anew for an unknown model, but no sooner than so long after the last time."""

ANSWER_LIMIT_S = 2.0
"""A turn waits for their answers no longer."""

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
        self.ask_anew: Callable[[Sequence[str]], None] | None = None
        """Has replicas asked at once which models they serve; None where nobody asks them."""
        self._asked_s = -inf
        """When they were asked anew for the last time."""
        self._to_answer: set[str] = set()
        """Replicas whose answer to that has not come."""
        self._lenient_ids: set[str] = set()
        """Replicas that take any name."""
        self.on_listed: Callable[[], None] = _nothing
        """Called when a replica lists something else than before."""
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

    def listed(
        self, replica_id: str, models: tuple[str, ...], *, refuses_others: bool = False, asked_s: float = -inf
    ) -> None:
        """Take in which models a replica serves; its first word on that says which pool it is in.

        `refuses_others` says whether its engine refuses all other names; it was asked at `asked_s`.
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
        """Forget a replica that was removed."""
        self.pools.forget(replica_id)
        self._unlisted_ids.discard(replica_id)
        self._lenient_ids.discard(replica_id)
        self._answered(replica_id)
        self.replica_heard(replica_id)
        self.changed()

    def changed(self) -> None:
        """Tell who carries bytes whether it matters which model a turn is for, and where each replica is."""
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
        """Have nobody wait for it any more."""
        self._closing = True
        self._settled.set()
        self._listed.set()

    # --- where a turn goes ------------------------------------------------------------------------------------------

    @property
    def _refuses_unknown(self) -> bool:
        """Whether it is known of a model that nobody lists, with one pool too, that its turns would be refused."""
        pools, unknown_ids = self.pools, self._unlisted_ids or self._lenient_ids
        return pools.may_be_several and not unknown_ids and bool(pools.models) and not pools.all[0].may_serve_any

    def is_plain(self, model: str) -> bool:
        """Say whether there is nothing to find out: all is known, and the only pool serves that model. Cost: O(1)."""
        return (
            not self.pools.several and self._settled.is_set() and (not model or self.pools.of_model(model) is not None)
        )

    async def find_pool(self, ask: TurnAsk, while_held: AbstractContextManager[object]) -> None:
        """Find the pool that a turn is for; in the first moments only once it is known which replica serves what.

        `while_held` is entered while it waits. Raises what that raises, `UnknownModelError` and `ShuttingDownError`.
        """
        if self._unheard_ids and not self._settled.is_set():
            with suppress(TimeoutError), while_held:
                async with asyncio.timeout(SETTLING_LIMIT_S):
                    await self._settled.wait()
        if self._closing:
            return
        if self.pools.several or (ask.model and ask.pinned_replica_id is None and self._refuses_unknown):
            self.pools.send(ask.turn_id, await self._pool_when_known(ask, while_held))

    async def _pool_when_known(self, ask: TurnAsk, while_held: AbstractContextManager[object]) -> Pool:
        """Return the pool that a turn is for; a replica may serve by now what it did not, or what no other does.

        Raises `UnknownModelError`, where some never came up once turns would have waited for a replica for too long.
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
        """Return until when there is an answer to wait for that knows what was loaded when a turn came.

        Have all replicas that are up asked, unless they were since then; no sooner than they may be again.
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


def _nothing() -> None:
    """Do nothing, where nobody wants to hear of it."""
