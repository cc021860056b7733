"""`deploy`: starts the agents of a declaration, runs drivers, and ends everything again."""

from __future__ import annotations

import asyncio
import inspect
import threading
import time
from collections.abc import Callable, Coroutine, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from contextvars import copy_context
from pathlib import Path
from types import TracebackType
from typing import Any, Self, TypeVar

import uvloop

from thunderagent_workflows import policies as own_policies
from thunderagent_workflows import stubs, timeline
from thunderagent_workflows.control import Control
from thunderagent_workflows.declare import Agent, load_agents, uses_managed_state
from thunderagent_workflows.errors import DeclarationError, WorkflowError
from thunderagent_workflows.future import Future, handle_of
from thunderagent_workflows.hints import Hints, Teller
from thunderagent_workflows.hub import Hub, Launcher
from thunderagent_workflows.instance import load_class, plain
from thunderagent_workflows.node import Node
from thunderagent_workflows.scope import Scope, SessionInfo, current
from thunderagent_workflows.sessions import Sessions
from thunderagent_workflows.store import MemoryStore, Store
from thunderagent_workflows.view import Act, View, load_policy
from thunderagent_workflows.watch import Watch

PERIOD_S = 0.05
"""Time between two turns of the global loop."""

Value = TypeVar("Value")


class Deployment:
    """Agents that run in this process. `deploy` makes one; enter it with `with` or `async with`, once.

    With `with` it has an event loop of its own, in a thread; with `async with` it uses the one that runs.
    """

    _loop: asyncio.AbstractEventLoop

    def __init__(
        self,
        agents: Mapping[str, Agent],
        *,
        policies: Sequence[str],
        store: Store,
        period_s: float,
        resources: Mapping[str, float] | None,
        proxy: str,
        hints: bool,
        clock: Callable[[], float] | None,
        top: Path | None,
        ray: str | Launcher = "",
    ) -> None:
        """Import the agents' classes and the policies. Raises `DeclarationError`."""
        self.kinds = {name: load_class(agent) for name, agent in agents.items()}
        self.agents = {name: _as_it_is(agent, self.kinds[name]) for name, agent in agents.items()}
        self.store = store
        self.period_s = period_s
        self.proxy = proxy
        self._ray = ray
        self.hub: Hub | None = None
        """The link to instances in other processes; None if all run in this one."""
        self._teller = Teller(proxy) if hints and proxy else None
        self._top = top
        self._watch: Watch | None = None
        self._policies = [load_policy(name) for name in policies]
        self._resources = {name.lower(): amount for name, amount in (resources or {}).items()} or None
        self._clock = clock or time.time
        self._is_open = False
        self._thread: threading.Thread | None = None
        self.node: Node
        self.control: Control
        self.sessions: Sessions

    def __repr__(self) -> str:
        return f"<Deployment of {', '.join(self.agents)}: {self.node if self._is_open else 'closed'}>"

    # --- its life

    async def __aenter__(self) -> Self:
        try:
            await self._open()
        except BaseException:
            await self._close()
            raise
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self._close()

    def __enter__(self) -> Self:
        started = threading.Event()
        loop: asyncio.AbstractEventLoop = uvloop.new_event_loop()

        def run_loop() -> None:
            asyncio.set_event_loop(loop)
            loop.call_soon(started.set)
            is_over = False
            while not is_over:
                with suppress(SystemExit, KeyboardInterrupt):  # a driver's: `run` raises it
                    loop.run_forever()
                    is_over = True
            loop.close()

        self._thread = threading.Thread(target=run_loop, name="workflow-loop", daemon=True)
        self._thread.start()
        started.wait()
        self._loop = loop
        try:
            self._on_loop(self._open())
        except BaseException:
            self.__exit__(None, None, None)
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        assert self._thread is not None
        try:
            self._on_loop(self._close())
        finally:
            self._loop.call_soon_threadsafe(self._loop.stop)
            self._thread.join()

    def _on_loop(self, coroutine: Coroutine[Any, Any, Value]) -> Value:
        return asyncio.run_coroutine_threadsafe(coroutine, self._loop).result()

    def _check_thread(self, instead: str) -> None:
        """Raise `WorkflowError` on the event loop, for which a blocking method would wait, or if there is none."""
        if not self._is_open:
            raise WorkflowError("the deployment is not open: use it in `with` or `async with`")
        if threading.get_ident() == self.node.thread_id:
            raise WorkflowError(f"this would block the event loop that it waits for: use `await app.{instead}(...)`")

    async def _open(self) -> None:
        self._loop = asyncio.get_running_loop()
        if self._ray:
            launcher = await _on_ray(self._ray) if isinstance(self._ray, str) else self._ray
            self.hub = Hub(launcher, self.agents, period_s=self.period_s)
        self.node = Node(self.agents, self.kinds, clock=self._clock, link=self.hub)
        if self.hub is not None:
            self.hub.node = self.node
        view = View({name: agent.directives for name, agent in self.agents.items()}, self._resources)
        self.control = Control(self.node, view, self._policies, self.store, self.period_s, self.hub)
        keeps_state = not isinstance(self.store, MemoryStore)
        self.sessions = Sessions(self.node, view, self.store, self.proxy, self.hub, keeps_state=keeps_state)
        self._is_open = True
        if self._teller is not None:
            self._teller.start()
            self.node.hints = Hints(self.node, self._teller.say)
            if self.hub is not None:
                self.hub.on_said = self._teller.say
        if self._top is not None:
            self._watch = Watch(self._top, self.control.level)
            await self._watch.open()
        await self.control.start()

    async def _close(self) -> None:
        if not self._is_open:
            return
        self._is_open = False
        if self._watch is not None:
            await self._watch.close()
        await self.control.stop()
        if self.hub is not None:
            await self.hub.close()
        await self.node.close()
        await self.sessions.close()
        if self._teller is not None:
            await self._teller.stop()
        await self.store.close()

    # --- drivers

    def run(self, main: Callable[..., Any], *args: Any, session: str = "", **kwargs: Any) -> Any:
        """Run a driver in this thread, or an `async` one on the deployment's loop; return what it returns.

        `session` names what the user sees as one conversation: its state stays until `end_session`, and calls of it
        that belong together stay together. Without a name the session ends with the driver. From an agent's method, it
        is a workflow within a workflow. Raises what the driver raises, and `WorkflowError` on the event loop.
        """
        self._check_thread("run_async")
        if inspect.iscoroutinefunction(main):
            context = copy_context()
            call = self.run_async(main, *args, session=session, **kwargs)
            made = context.run(asyncio.run_coroutine_threadsafe, call, self._loop)
            return made.result()
        info = self._on_loop(self.sessions.begin(session, current.get()))
        try:
            return self._run_driver(info, main, args, kwargs)
        finally:
            self._on_loop(self.sessions.leave(info, is_named=bool(session) or not self._is_open))

    async def run_async(self, main: Callable[..., Any], *args: Any, session: str = "", **kwargs: Any) -> Any:
        """Do as `run`, from the event loop: an `async` driver runs on it, a plain one in a thread of its own."""
        info = await self.sessions.begin(session, current.get())
        try:
            if not inspect.iscoroutinefunction(main):
                thread = ThreadPoolExecutor(1, "workflow-driver")
                try:
                    return await self._loop.run_in_executor(
                        thread, copy_context().run, plain, self._run_driver, info, main, args, kwargs
                    )
                finally:
                    thread.shutdown(wait=False)  # if this is cancelled, the driver may wait for the loop
            token = current.set(Scope(self.node, info))
            try:
                value = await main(*args, **kwargs)
                return await handle_of(value) if type(value) is Future else value
            finally:
                current.reset(token)
        finally:
            await self.sessions.leave(info, is_named=bool(session) or not self._is_open)

    def _run_driver(self, info: SessionInfo, main: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        token = current.set(Scope(self.node, info))
        try:
            value = main(*args, **kwargs)
            return value.value() if type(value) is Future else value
        finally:
            current.reset(token)

    def end_session(self, name: str) -> None:
        """End a session: its state is dropped, calls that are left of it fail, the proxy is told.

        It need not have been used in this deployment. Raises `StoreError` if its state is still stored: call it again.
        """
        self._check_thread("end_session_async")
        self._on_loop(self.sessions.end(name))

    async def end_session_async(self, name: str) -> None:
        """Do as `end_session`."""
        await self.sessions.end(name)

    # --- by hand

    def act(self, ask: Callable[[Act], None]) -> list[str]:
        """Ask for something as a policy would, once; return why it was refused, if it was.

        For instance `app.act(lambda act: act.kill("developer/1"))`.
        """
        self._check_thread("act_async")
        return self._on_loop(self.act_async(ask))

    async def act_async(self, ask: Callable[[Act], None]) -> list[str]:
        """Do as `act`."""
        return await self.control.ask(ask)

    def lose(self, location: str) -> None:
        """Remove an instance as if it had crashed: what is there fails."""
        lose = self.node.lose if self.hub is None else self.hub.lose
        self._loop.call_soon_threadsafe(lose, location)

    def write_timeline(self, session: str, path: str | Path) -> None:
        """Write a session's timeline: a page to `.html`, Chrome trace events to anything else. Raises `KeyError`."""
        timeline.write(self.session_log(session), Path(path))

    def session_log(self, name: str) -> SessionInfo:
        """Return the log of a session, ended or not. Raises `KeyError`."""
        return self.node.sessions.get(name) or self.sessions.ended[name]


def deploy(
    source: str | Path | Mapping[str, Any],
    *,
    policies: Sequence[str] = own_policies.DEFAULTS,
    store: str | Store = "",
    period_s: float = PERIOD_S,
    resources: Mapping[str, float] | None = None,
    proxy: str = "",
    hints: bool = False,
    clock: Callable[[], float] | None = None,
    top: str | Path = "",
    ray: str | Launcher = "",
) -> Deployment:
    """Return a deployment of the agents that a YAML file, or a mapping of its shape, declares; enter it to start them.

    `policies` are names of this package's, or `package.module:function`; none is first come, first served. `store` is
    `redis://...`, to keep sessions' state and let others read the summaries; "" keeps all in this process. `period_s`
    is between two turns of the global loop. `resources` is what there is in all, for `provision`; None asks nobody.
    `proxy` is the URL of thunderagent's proxy, which is told of a session's end, and with `hints` of when its next turn
    comes and which of its branches have ended. `ray` has the instances run on a Ray cluster, and nothing in this
    process: `auto`, `HOST:PORT`, `local` for one of its own; a process that has called `ray.init` keeps to that. Raises
    `DeclarationError`.
    """
    agents = load_agents(source)
    for name, directives in stubs.GIVEN_DIRECTIVES.items():
        if name in agents:
            agents[name] = agents[name].with_directives(**directives)
    return Deployment(
        agents,
        policies=policies,
        store=_store_of(store),
        period_s=period_s,
        resources=resources,
        proxy=proxy,
        hints=hints,
        clock=clock,
        top=Path(top) if top else None,
        ray=ray,
    )


def _store_of(store: str | Store) -> Store:
    if not isinstance(store, str):
        return store
    if not store:
        return MemoryStore()
    if store.startswith(("redis://", "rediss://", "unix://")):
        try:
            from thunderagent_workflows.redis_store import RedisStore  # noqa: PLC0415 - and the redis package with it
        except ModuleNotFoundError as error:
            text = "a store on Redis: install the package `thunderagent-workflows` with its extra `redis`"
            raise DeclarationError(f"{text}: {error}") from error

        return RedisStore(store)
    raise DeclarationError(f"no store {store!r}: redis://... or nothing")


async def _on_ray(address: str) -> Launcher:
    try:
        from thunderagent_workflows import on_ray  # noqa: PLC0415 - and Ray with it
    except ModuleNotFoundError as error:
        text = "Ray: install the package `thunderagent-workflows` with its extra `ray`"
        raise DeclarationError(f"{text}: {error}") from error
    return await on_ray.connect(address)


def _as_it_is(agent: Agent, kind: type) -> Agent:
    """Declare an agent managed if it has managed state."""
    if not agent.directives.managed and uses_managed_state(kind):
        return agent.with_directives(managed=True)
    return agent
