"""One pool: replicas that serve the same models, and their scheduler."""

from __future__ import annotations

from thunderagent.programs.model.fleet_events import ModelServed
from thunderagent.programs.scheduler import Scheduler


class Pool:
    """Some replicas, the names that they list, and their scheduler."""

    __slots__ = ("listed", "name", "partly", "pool_id", "scheduler")

    def __init__(self, scheduler: Scheduler, pool_id: int) -> None:
        """Create a pool without replicas; no other pool ever has its id."""
        self.pool_id = pool_id
        self.name = ""
        """The first name that was listed there; empty until then."""
        self.scheduler = scheduler
        self.listed: dict[str, tuple[str, ...]] = {}
        """What each of its replicas lists."""
        self.partly: dict[str, tuple[str, ...]] = {}
        """For names that only some of its replicas serve, such as LoRA adapters: which ones do."""

    def __repr__(self) -> str:
        return f"<Pool {self.name!r}: {len(self.listed)} replicas, {self.scheduler!r}>"

    @property
    def models(self) -> tuple[str, ...]:
        """Every name that one of its replicas lists, each once."""
        return tuple(dict.fromkeys(name for names in self.listed.values() for name in names))

    @property
    def may_serve_any(self) -> bool:
        """Whether one of its replicas lists nothing."""
        return not all(self.listed.values())

    @property
    def is_idle(self) -> bool:
        """Whether no program lives there and no turn is on its way."""
        return not self.scheduler.programs and not self.scheduler.turns

    def serve_anew(self) -> list[ModelServed]:
        """Find out which names only some of its replicas serve; return what its scheduler must hear of that.

        A name that nobody lists any more, but a program asked for, stays with the replicas that had it: it may be
        loaded again. Cost: O(names of all replicas), times the replicas that list nothing.
        """
        before, self.partly = self.partly, {}
        having: dict[str, list[str]] = {}
        for each, names in self.listed.items():
            for name in dict.fromkeys(names):
                having.setdefault(name, []).append(each)
        any_name = [each for each, names in self.listed.items() if not names]
        order = {each: number for number, each in enumerate(self.listed)}
        for name in dict.fromkeys((*having, *before)):
            ids = having.get(name, [])
            if any_name:
                ids = sorted((*ids, *any_name), key=order.__getitem__)
            route = self.scheduler.core.routing.routes.by_model.get(name)  # None until its scheduler has heard of it
            if not ids and route is not None and route.programs:
                ids = [each for each in before[name] if each in self.listed]
            if 0 < len(ids) < len(self.listed):
                self.partly[name] = tuple(ids)
        now_s, partly = self.scheduler.now_s, self.partly
        changed = [name for name in {**before, **partly} if before.get(name) != partly.get(name)]
        return [ModelServed(now_s, name, partly.get(name, ())) for name in changed]
