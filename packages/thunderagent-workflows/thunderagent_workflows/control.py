"""Control of a deployment: both levels, once per period and when something is asked for, and the required instances."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Sequence
from collections.abc import Set as AbstractSet
from contextlib import suppress

from thunderagent_workflows.core import messages as m
from thunderagent_workflows.core.router import agent_of
from thunderagent_workflows.errors import WorkflowError
from thunderagent_workflows.globalloop import Ask, GlobalLevel, LocalLevel
from thunderagent_workflows.hub import Hub
from thunderagent_workflows.node import Node
from thunderagent_workflows.store import Store
from thunderagent_workflows.view import Act, Policy, View

log = logging.getLogger("thunderagent_workflows")


class Control:
    """Keeps each agent's instances at their minimum, and runs policies every `period_s`."""

    def __init__(
        self,
        node: Node,
        view: View,
        policies: Sequence[Policy],
        store: Store,
        period_s: float,
        hub: Hub | None = None,
    ) -> None:
        """Do nothing yet. With a hub, all instances are remote."""
        self.node = node
        self.period_s = period_s
        self._hub = hub
        self.level = GlobalLevel(view, policies, store, self._names, self.provision, node.clock, node.sessions)
        self._local = LocalLevel(node, store)
        self._numbers: dict[str, int] = {}
        self._asks: list[Ask] = []
        self._is_asked = asyncio.Event()
        self._is_over = False
        self._task: asyncio.Task[None] | None = None
        self._launching: set[asyncio.Task[None]] = set()
        node.on_moved = _note_move

    async def start(self) -> None:
        """Start the instances, and the loop. Raises what the agents' classes raise."""
        first = [name for name, agent in self.node.agents.items() for _ in range(agent.directives.min_instances)]
        starting = [self._start(self._next_location(name)) for name in first]
        for result in await asyncio.gather(*starting, return_exceptions=True):
            if isinstance(result, BaseException):
                raise result
        self._task = asyncio.create_task(self._run())

    async def stop(self) -> None:
        """End the loop; what was asked for and not done raises `WorkflowError`."""
        self._is_over = True
        tasks = [each for each in (self._task, *self._launching) if each is not None]
        for task in tasks:
            task.cancel()
        if tasks:
            await asyncio.wait(tasks)
        for ask in self._asks:
            ask.fail(WorkflowError("the deployment has ended"))

    async def ask(self, of: Callable[[Act], None]) -> list[str]:
        """Have a turn at once, with a request beside the policies'; return what was refused of it, and why.

        Raises what `of` raises, `StoreError`, and `WorkflowError` after the end.
        """
        if self._is_over:
            raise WorkflowError("the deployment has ended")
        ask = Ask(of, asyncio.get_running_loop().create_future())
        self._asks.append(ask)
        self._is_asked.set()
        return await ask.answer

    async def _run(self) -> None:
        loop = asyncio.get_running_loop()
        due_s = loop.time() + self.period_s
        while True:
            with suppress(TimeoutError):
                async with asyncio.timeout_at(due_s):
                    await self._is_asked.wait()
            is_due = loop.time() >= due_s or not self._is_asked.is_set()
            self._is_asked.clear()
            asks = tuple(self._asks)
            try:
                await self._turn(asks)
            except Exception as error:  # the store failed: controllers keep their last orders
                for ask in asks:
                    ask.fail(error)
                log.exception("a turn of the global loop failed; the next one comes in %s s", self.period_s)
            del self._asks[: len(asks)]
            self._keep_minimum()
            if is_due:
                self.node.break_circle()  # its looks are a period apart
                due_s = loop.time() + self.period_s

    async def _turn(self, asks: Sequence[Ask]) -> None:
        await self._local.publish()
        if self._hub is not None:
            await self._hub.publish(self.level.store)
        self.level.view.expected = self._expected()
        await self.level.step(asks)
        for reason in self.level.refused:
            log.debug("refused: %s", reason)
        await self._local.apply(self.level.view.ended)
        if self._hub is not None:
            await self._hub.apply(self.level.store, self.level.view.ended)
        for location in self.level.view.instances.keys() - self._locations():
            self.level.view.forget(location)
        for ask in asks:
            ask.done()

    def _keep_minimum(self) -> None:
        """Replace lost instances, and start what calls wait for."""
        expected = [agent_of(location) for location in self._expected()]
        for name, agent in self.node.agents.items():
            wanted_count = max(agent.directives.min_instances, int(self._is_waited_for(name)))
            for _ in range(wanted_count - expected.count(name)):
                self.provision(name)

    def provision(self, agent: str) -> None:
        """Start one more instance of an agent."""
        location = self._next_location(agent)
        task = self.node.loop.create_task(self._launch(location), name=location)
        self._launching.add(task)
        task.add_done_callback(self._launching.discard)

    async def _launch(self, location: str) -> None:
        try:
            await self._start(location)
        except Exception as error:
            log.warning("%s could not be started: %r", location, error)

    async def _start(self, location: str) -> None:
        await (self.node if self._hub is None else self._hub).launch(location)

    def _names(self) -> list[str]:
        return [self.node.name, *(self._hub.names() if self._hub is not None else ())]

    def _locations(self) -> AbstractSet[str]:
        return self.node.controllers.keys() if self._hub is None else self._hub.locations()

    def _expected(self) -> set[str]:
        """Return the locations of instances that are there or begin to be."""
        return {*self._locations(), *(task.get_name() for task in self._launching)}

    def _is_waited_for(self, agent: str) -> bool:
        if self.node.origin.waits_for_instance(agent):
            return True
        return self._hub is not None and self._hub.waits_for_instance(agent)

    def _next_location(self, agent: str) -> str:
        number = self._numbers[agent] = self._numbers.get(agent, -1) + 1
        return f"{agent}/{number}"


def _note_move(moved: m.Moved) -> None:
    if moved.why_not:
        log.debug("session %r was not moved to %s: %s", moved.session, moved.to, moved.why_not)
    else:
        log.debug("session %r moved to %s with %s calls", moved.session, moved.to, moved.calls_count)
