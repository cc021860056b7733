"""An instance of an agent: an object of the user's class, and how its methods are run.

`async` methods run on the node's event loop, plain ones in the one thread of the instance. One call runs at a time, or
one batch: the controller sees to that.
"""

from __future__ import annotations

import asyncio
import contextvars
import inspect
import logging
import traceback
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any, TypeVar

from thunderagent_workflows.core import messages as m
from thunderagent_workflows.core.call import Call, Outcome
from thunderagent_workflows.declare import Agent
from thunderagent_workflows.errors import CallError, DeclarationError, Preempted, WorkflowError
from thunderagent_workflows.future import Handle, fill_in, holds_future, take_futures
from thunderagent_workflows.scope import Scope, current

if TYPE_CHECKING:
    from thunderagent_workflows.node import Node


log = logging.getLogger("thunderagent_workflows")

Value = TypeVar("Value")

CLOSE_S = 10.0
"""Time limit for a coroutine of an agent to stop, and for its `close`."""

SEARCHED_COUNT = 10_000
"""The most parts of a value that are searched for futures on the event loop: a thread searches larger ones."""


class Instance:
    """One object of an agent's class, at `location`."""

    def __init__(self, node: Node, location: str, agent: Agent, kind: type) -> None:
        self.node = node
        self.location = location
        self.agent = agent
        self._kind = kind
        self._object: Any = None
        self._methods: dict[str, tuple[Callable[..., Any], bool]] = {}
        self._thread = ThreadPoolExecutor(1, f"workflow-{location}")
        self._task: asyncio.Task[None] | None = None
        self._left: Any = None
        """What an interrupted run leaves, while it is being interrupted."""
        self._is_interrupted = False
        self._is_closing = False
        self._has_begun = False
        """Whether the first step of the current run is done."""
        self._is_through = False
        """Whether its method is, and only its value is looked at: it ends by itself."""
        self.done_count = 0
        self.busy_s = 0.0
        self.running_since_s = 0.0

    def __repr__(self) -> str:
        return f"<Instance {self.location} of {self.agent.class_path}>"

    async def start(self) -> None:
        """Create the object, in its thread, because it may take long. Raises what the class raises."""
        await self._in_thread(self._make)
        for name in self.agent.methods:
            method = getattr(self._object, name)
            self._methods[name] = (method, inspect.iscoroutinefunction(method))
        if all(is_async for _, is_async in self._methods.values()):
            self._thread.shutdown(wait=False)

    def _make(self) -> None:
        self._object = self._kind()

    def run(self, calls: list[Call]) -> None:
        """Run calls; each is answered with `Finished`, or `Interrupted`."""
        self._is_interrupted = self._has_begun = self._is_through = False
        self.running_since_s = self.node.clock()
        self._task = self.node.loop.create_task(self._run(calls, self._scope(calls)))

    def interrupt(self, calls: list[Call]) -> None:
        """Stop the current run, to be started again: the agent's own method says what is kept."""
        if not self._has_begun and self._task is not None:  # a task that is cancelled this early never notices it
            self._task.cancel()
            for call in calls:
                self.node.post(self.location, m.Interrupted(call.call_id, call.checkpoint))
            return
        if self._is_through:
            return
        hook = getattr(self._object, self.agent.directives.preemptable)
        self._is_interrupted = True
        _, is_async = self._methods[calls[0].method]
        try:
            self._left = hook()
        except Exception:
            self._is_interrupted = False
            return
        if is_async and self._task is not None:
            self._task.cancel()

    async def close(self) -> None:
        """Stop the current run, call the agent's own `close`, and end the thread.

        A plain method cannot be stopped, so it is waited for. What `close` raises is logged; so is one that is not over
        in time, and its thread is left.
        """
        self._is_closing = True
        if self._task is not None and not self._task.done():
            self._task.cancel()
            await asyncio.wait([self._task], timeout=CLOSE_S)
        await self._in_thread(_nothing)
        close = None if "close" in self.agent.methods else getattr(self._object, "close", None)
        is_late = False
        try:
            async with asyncio.timeout(CLOSE_S):
                if inspect.iscoroutinefunction(close):
                    await close()
                elif callable(close):
                    await self._in_thread(close)
        except Exception as error:
            is_late = isinstance(error, TimeoutError)
            log.warning("%s: its close() failed", self.location, exc_info=True)
        self._thread.shutdown(wait=not is_late)

    async def _in_thread(self, action: Callable[[], Value]) -> Value:
        """Run something in the instance's thread, after everything queued there; return what it returns."""
        try:
            doing = self._thread.submit(plain, action)
        except RuntimeError:  # it has ended, because no method needs it
            self._thread = ThreadPoolExecutor(1, f"workflow-{self.location}")
            doing = self._thread.submit(plain, action)
        return await asyncio.wrap_future(doing)

    # --- one run

    async def _run(self, calls: list[Call], scope: Scope) -> None:
        self._has_begun = True
        began_s = self.running_since_s = self.node.clock()
        first = calls[0]
        current.set(scope)
        try:
            method, is_async = self._methods[first.method]
            given = self._arguments(calls)
            if is_async:
                value = await method(*given)
                is_open = holds_future(value, SEARCHED_COUNT)
                if is_open is None:
                    self._is_through = True
                    is_open = await self._in_thread(partial(holds_future, value))  # others may hold all of the loop's
            else:
                run = contextvars.copy_context().run
                value, is_open = await self.node.loop.run_in_executor(self._thread, run, plain, _called, method, *given)
            self._is_through = False
            if is_open:
                value = await _resolved(value)
            values = self._by_call(value, calls) if self.agent.directives.batchable else [value]
        except asyncio.CancelledError as error:
            if self._is_interrupted:
                self._leave(calls, self._left)
            elif self._is_closing:
                raise
            else:  # the agent's own: something that it waited for was cancelled
                self._fail(calls, error, began_s)
        except Preempted as preempted:
            kept = preempted.checkpoint if preempted.checkpoint is not None else self._left
            self._leave(calls, kept)
        except BaseException as error:
            self._fail(calls, error, began_s)
            if isinstance(error, KeyboardInterrupt):  # `sys.exit()` fails its call, and ends no loop
                raise
        else:
            ended_s = self.node.clock()
            self._answer(calls, [Outcome(each, None, began_s, ended_s) for each in values])

    def _scope(self, calls: list[Call]) -> Scope:
        first = calls[0]
        session = self.node.session(first.session)
        is_mixed = any(call.session != first.session for call in calls)
        chain = (*first.chain, self.location)
        return Scope(self.node, session, self.location, chain, first, first.stage_count, len(calls), is_mixed)

    def _arguments(self, calls: list[Call]) -> tuple[Any, ...]:
        """Return a call's arguments, or for each parameter the list of a batch's arguments."""
        args = [fill_in(call.args, call.values) if call.values else call.args for call in calls]
        if self.agent.directives.batchable:
            return tuple(list(column) for column in zip(*args, strict=True))
        return args[0]

    def _by_call(self, value: Any, calls: list[Call]) -> list[Any]:
        if not isinstance(value, list | tuple) or len(value) != len(calls):
            got = f"{self.agent.name}.{calls[0].method} got {len(calls)} calls"
            raise WorkflowError(f"{got}, and must return a list of as many values")
        return list(value)

    def _answer(self, calls: list[Call], outcomes: list[Outcome]) -> None:
        self.done_count += len(calls)
        self.busy_s += outcomes[0].ended_s - outcomes[0].began_s
        if self.node.on_answered is not None:
            self.node.on_answered(self.location, calls)
        for call, outcome in zip(calls, outcomes, strict=True):
            lead_s = self.node.hints.through(call) if self.node.hints is not None else None
            ended = outcome if lead_s is None else replace(outcome, lead_s=lead_s)
            self.node.post(self.location, m.Finished(call.call_id, ended))

    def _fail(self, calls: list[Call], error: BaseException, began_s: float) -> None:
        outcome = Outcome(None, self._failure(calls[0], error), began_s, self.node.clock())
        self._answer(calls, [outcome] * len(calls))

    def _leave(self, calls: list[Call], kept: Any) -> None:
        for call in calls:
            self.node.post(self.location, m.Interrupted(call.call_id, kept))

    def _failure(self, call: Call, error: BaseException) -> BaseException:
        """Return an agent's error with its location; an error from a call that it made already has one."""
        path = (*call.chain, self.location)
        text = f"{call.agent}.{call.method} failed: {type(error).__name__}: {error}; called by "
        text = text.partition("\n")[0] if isinstance(error, CallError) else text
        text += " > ".join(call.chain) or "the driver"
        failure = CallError(
            text,
            path=path,
            instance=self.location,
            remote_traceback="".join(traceback.format_exception(error)).rstrip(),
        )
        failure.__cause__ = error
        return failure


def _nothing() -> None:
    """Do nothing, as a thread's last action."""


def plain(action: Callable[..., Value], *args: Any) -> Value:
    """Run a user's code in a thread. A `StopIteration` is no error that a future can have, so it becomes another."""
    try:
        return action(*args)
    except StopIteration as error:
        raise RuntimeError("plain code raised StopIteration") from error


def _called(method: Callable[..., Any], *args: Any) -> tuple[Any, bool | None]:
    """Call a plain method; return its result, and whether futures are in it: in a large one, that takes a while."""
    value = method(*args)
    return value, holds_future(value)


async def _resolved(value: Any) -> Any:
    """Return a method's result, with the futures in it replaced by their values."""
    needs: dict[int, Handle] = {}
    (value,) = take_futures((value,), needs)
    return fill_in(value, {call_id: await handle for call_id, handle in needs.items()})


def load_class(agent: Agent) -> type:
    """Import an agent's class and check its declaration against it. Raises `DeclarationError`."""
    kind = agent.load()
    agent.check(kind)
    hook = agent.directives.preemptable
    if hook and inspect.iscoroutinefunction(getattr(kind, hook)):
        raise DeclarationError(f"agent {agent.name}: {hook} is called to interrupt a call, and is a plain method")
    return kind
