"""Control of a deployment: both levels, once in a period, and the instances that there are to be."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Sequence

from thunderagent.workflows.core import messages as m
from thunderagent.workflows.globalloop import GlobalLevel, LocalLevel
from thunderagent.workflows.node import Node
from thunderagent.workflows.store import Store
from thunderagent.workflows.view import Policy, View

log = logging.getLogger("thunderagent.workflows")


class Control:
    """Keeps each agent's instances at their minimum, and runs policies every `period_s`."""

    def __init__(self, node: Node, view: View, policies: Sequence[Policy], store: Store, period_s: float) -> None:
        """Do nothing yet."""
        self.node = node
        self.period_s = period_s
        self.level = GlobalLevel(view, policies, store, lambda: [node.name], self.provision, node.clock)
        self._local = LocalLevel(node, store)
        self._numbers: dict[str, int] = {}
        self._task: asyncio.Task[None] | None = None
        self._launching: set[asyncio.Task[None]] = set()
        node.on_moved = _note_move

    async def start(self) -> None:
        """Start the instances, and the loop. Raises what the agents' classes raise."""
        first = [name for name, agent in self.node.agents.items() for _ in range(agent.directives.min_instances)]
        starting = [self.node.launch(self._next_location(name)) for name in first]
        for result in await asyncio.gather(*starting, return_exceptions=True):
            if isinstance(result, BaseException):
                raise result
        self._task = asyncio.create_task(self._run())

    async def stop(self) -> None:
        """End the loop."""
        tasks = [each for each in (self._task, *self._launching) if each is not None]
        for task in tasks:
            task.cancel()
        if tasks:
            await asyncio.wait(tasks)

    async def _run(self) -> None:
        while True:
            await asyncio.sleep(self.period_s)
            await self.once()

    async def once(self, instead: Sequence[Policy] | None = None) -> list[str]:
        """Take one turn of both levels, with other policies if told so; return what was refused, and why."""
        await self._local.publish()
        policies = self.level.policies
        try:
            self.level.policies = policies if instead is None else instead
            await self.level.step()
        finally:
            self.level.policies = policies
        refused = self.level.refused
        for reason in refused:
            log.debug("refused: %s", reason)
        await self._local.apply()
        for location in self.level.view.instances.keys() - self.node.controllers.keys():
            self.level.view.forget(location)
        self._keep_minimum()
        self.node.break_circle()
        return refused

    def _keep_minimum(self) -> None:
        """Replace what was lost, and start what calls wait for."""
        for name, agent in self.node.agents.items():
            there_count = sum(each.agent == name for each in self.node.controllers.values())
            there_count += sum(task.get_name() == name for task in self._launching)
            wanted_count = max(agent.directives.min_instances, int(self.node.origin.waits_for_instance(name)))
            for _ in range(wanted_count - there_count):
                self.provision(name)

    def provision(self, agent: str) -> None:
        """Start one more instance of an agent."""
        task = self.node.loop.create_task(self._launch(self._next_location(agent)), name=agent)
        self._launching.add(task)
        task.add_done_callback(self._launching.discard)

    async def _launch(self, location: str) -> None:
        try:
            await self.node.launch(location)
        except Exception as error:
            log.warning("%s could not be started: %r", location, error)

    def _next_location(self, agent: str) -> str:
        number = self._numbers[agent] = self._numbers.get(agent, -1) + 1
        return f"{agent}/{number}"


def _note_move(moved: m.Moved) -> None:
    if moved.why_not:
        log.debug("session %r was not moved to %s: %s", moved.session, moved.to, moved.why_not)
    else:
        log.debug("session %r moved to %s with %s calls", moved.session, moved.to, moved.calls_count)
