"""How many programs are useful now, for trainers that start as many as they like."""

from __future__ import annotations

from aiohttp import web
from pydantic import Field

from thunderagent.programs.concurrency import SteadyCount, Why, concurrency
from thunderagent.proxy.gate.bodies import Report, report_response
from thunderagent.runtime import Runtime


class ConcurrencyReport(Report):
    """How many programs are useful in a pool."""

    useful_count: int = Field(description="programs that are of use at a time; it changes only for what lasts")
    more_count: int = Field(description="how many more than there are now; 0 if there are enough, or too many")
    why: Why = Field(description="what bounds it")
    pool: str = Field(description="which pool it is of, where there are several; else empty")


class ConcurrencySignal:
    """Handler of `/concurrency`."""

    def __init__(self, runtime: Runtime) -> None:
        """Look at the pools of `runtime`."""
        self._runtime = runtime
        self._steady: dict[int, SteadyCount] = {}

    def routes(self) -> list[web.RouteDef]:
        """Return the route."""
        return [web.get("/concurrency", self.tell)]

    async def tell(self, request: web.Request) -> web.Response:
        """Tell how many programs are useful at a time, and what limits them; of several models, for that `model`."""
        pools = self._runtime.pools
        pool = self._runtime.served.pool_for(request.query.get("model", "")) if pools.several else pools.all[0]
        now = concurrency(pool.scheduler)
        live_ids = {each.pool_id for each in pools.all}
        self._steady = {pool_id: steady for pool_id, steady in self._steady.items() if pool_id in live_ids}
        useful_count = self._steady.setdefault(pool.pool_id, SteadyCount()).update(
            now.useful_count, self._runtime.now_s()
        )
        return report_response(
            ConcurrencyReport(
                useful_count=useful_count,
                more_count=max(0, useful_count - now.programs_count),
                why=now.why,
                pool=pool.name if pools.several else "",
            )
        )
