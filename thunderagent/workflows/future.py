"""The handle of a call: it is the value as soon as somebody looks, and can be asked and waited for.

The value is transparent as far as Python goes: `len`, iteration, `==`, unpacking, `+`, f-strings and `isinstance` work,
and block until it is there. What looks at an object's memory does not: `json.dumps`, `re`, `"".join` and `is None` want
`f.value()`. Agents never see a handle: those among a call's arguments are replaced by their values before it runs.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Generator, Iterable
from typing import Any, cast

from lazy_object_proxy import Proxy

from thunderagent.workflows.core.call import Outcome, Record
from thunderagent.workflows.errors import DeadlockError
from thunderagent.workflows.scope import Scope, current

_registering = threading.Lock()
"""Held while a waiter is added, from any thread."""


class Handle(Record):
    """A record that can be waited for: calling it gives the value."""

    __slots__ = ("node",)

    node: Any

    def __call__(self) -> Any:
        """Return the value, for the proxy object around it."""
        return self.wait(None)

    def wait(self, timeout_s: float | None) -> Any:
        """Block until there is a value, and return it.

        Raises `TimeoutError`, `DeadlockError` on the node's event loop, and the call's error.
        """
        scope = current.get()
        if self.outcome is None:
            if threading.get_ident() == self.node.thread_id:
                raise DeadlockError(
                    f"{self.words} is not available, and waiting for it here would block the event loop that "
                    f"computes it: `await` it, or make the method a plain `def`",
                    path=self.path,
                    instance=self.executor,
                )
            event = threading.Event()
            self.add_waiter(event.set)
            with _Waiting(self, scope):
                if not event.wait(timeout_s):
                    raise TimeoutError(f"{self.words} is not there after {timeout_s} s")
        return self.take(scope)

    def take(self, scope: Scope | None) -> Any:
        """Return the available value, or raise the error."""
        assert self.outcome is not None
        if scope is not None:
            scope.saw(self)
        if self.outcome.error is not None:
            raise self.outcome.error
        return self.outcome.value

    def add_waiter(self, waiter: Callable[[], None]) -> None:
        """Call `waiter` once there is an outcome, on the node's loop; immediately if there is one."""
        with _registering:
            if self.outcome is None:
                if self.waiters is None:
                    self.waiters = []
                self.waiters.append(waiter)
                return
        waiter()

    def notify(self) -> None:
        """Notify waiters. The node calls it, on its loop, when there is an outcome."""
        with _registering:
            waiters, self.waiters = self.waiters, None
        for waiter in waiters or ():
            if isinstance(waiter, asyncio.Future):
                if not waiter.done():
                    waiter.set_result(None)
            else:
                waiter()

    def __await__(self) -> Generator[Any, None, Any]:
        """Do as `wait`, on any event loop."""
        scope = current.get()
        if self.outcome is None:
            with _Waiting(self, scope):
                yield from self._over()
        return self.take(scope)

    def _over(self) -> asyncio.Future[None]:
        """Return a future of the running loop that ends when there is an outcome."""
        node = self.node
        if threading.get_ident() != node.thread_id:
            waiting = LoopFuture()
            self.add_waiter(waiting.notify)
            return waiting.future
        over: asyncio.Future[None] = node.loop.create_future()
        with _registering:
            if self.waiters is None:
                self.waiters = []
            self.waiters.append(over)  # no outcome can come in between: it would come on this thread
        return over

    @property
    def state(self) -> str:
        """Return created, queued, running, done or failed, and moved for one that is on its way to another instance."""
        if self.outcome is not None:
            return "failed" if self.outcome.error is not None else "done"
        if not self.executor:
            return "created"
        if self.left:
            return "moved"
        return "running" if self.node.is_running(self.executor, self.call.call_id) else "queued"

    @property
    def words(self) -> str:
        """Return the call's description."""
        return f"{self.call.agent}.{self.call.method} #{self.call.call_id}"


class LoopFuture:
    """An awaitable of the running loop, which any thread may complete."""

    __slots__ = ("_loop", "_thread_id", "future")

    def __init__(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._thread_id = threading.get_ident()
        self.future: asyncio.Future[None] = self._loop.create_future()

    def notify(self) -> None:
        """End the waiting."""
        if threading.get_ident() == self._thread_id:
            self._end()
        else:
            self._loop.call_soon_threadsafe(self._end)

    def _end(self) -> None:
        if not self.future.done():
            self.future.set_result(None)


class _Waiting:
    """Records that a call waits for another, for deadlock checks and turn estimates."""

    __slots__ = ("_call_id", "_handle", "_scope")

    def __init__(self, handle: Handle, scope: Scope | None) -> None:
        self._handle = handle
        self._call_id = scope.call.call_id if scope is not None and scope.call is not None else 0
        self._scope = scope

    def __enter__(self) -> None:
        if self._call_id:
            self._handle.node.waiting[self._call_id] = self._handle
        _begins_to_wait(self._handle, self._scope)

    def __exit__(self, *_: object) -> None:
        if self._call_id:
            self._handle.node.waiting.pop(self._call_id, None)


def _begins_to_wait(handle: Handle, scope: Scope | None) -> None:
    if scope is not None and handle.node.hints is not None:
        handle.node.hints.waits(scope)


class _Available(int):
    """A boolean that may also be called, because the paper has both forms."""

    def __call__(self) -> bool:
        return bool(self)


class Future(Proxy):  # type: ignore[misc]  # the library has no types
    """What a stub returns. `available`, `value` and `metadata` are its own; everything else is the value's."""

    __slots__ = ()

    def __init__(self, handle: Handle) -> None:
        super().__init__(handle)

    @property
    def available(self) -> bool:
        """Say whether the call is over, well or not. Never blocks."""
        return cast("bool", _Available(self.__factory__.outcome is not None))

    def value(self, timeout: float | None = None) -> Any:
        """Return the value, after at most `timeout` seconds. Raises `TimeoutError` and the call's error."""
        return self.__factory__.wait(timeout)

    result = value

    @property
    def metadata(self) -> dict[str, Any]:
        """Return what is known of the call: its state, dependencies, creator, executor, consumers."""
        handle = self.__factory__
        return {
            "call_id": handle.call.call_id,
            "session": handle.call.session,
            "agent": handle.call.agent,
            "method": handle.call.method,
            "state": handle.state,
            "dependencies": handle.dependencies,
            "creator": handle.creator,
            "executor": handle.executor,
            "consumers": list(handle.consumers or ()),
            "stage": handle.call.stage_count,
            "moves": handle.moves_count,
        }

    def __repr__(self) -> str:
        handle = self.__factory__
        return f"<Future {handle.words}: {handle.state}{f' at {handle.executor}' if handle.executor else ''}>"

    def __await__(self) -> Generator[Any, None, Any]:
        return cast("Handle", self.__factory__).__await__()


def handle_of(future: Future) -> Handle:
    """Return the record behind a future."""
    return cast("Handle", future.__factory__)


class Ref:
    """Placeholder for a value among the arguments of a waiting call."""

    __slots__ = ("call_id",)

    def __init__(self, call_id: int) -> None:
        self.call_id = call_id


_NESTING = (list, tuple, dict, set)


def take_futures(args: tuple[Any, ...], needs: dict[int, Handle]) -> tuple[Any, ...]:
    """Return the arguments with a `Ref` for each future without a value, which is added to `needs`."""
    for arg in args:
        kind = type(arg)
        if kind is Future or kind in _NESTING:
            return tuple(_without_futures(each, needs) for each in args)
    return args


def _without_futures(value: Any, needs: dict[int, Handle]) -> Any:
    kind = type(value)
    if kind is Future:
        handle = handle_of(value)
        if handle.outcome is not None and handle.outcome.error is None:
            return handle.outcome.value
        needs[handle.call.call_id] = handle
        return Ref(handle.call.call_id)
    if kind in _NESTING and value:
        return _rebuilt(value, kind, lambda each: _without_futures(each, needs))
    return value


def fill_in(value: Any, values: dict[int, Any]) -> Any:
    """Return arguments with each `Ref` replaced by its value."""
    kind = type(value)
    if kind is Ref:
        return values[value.call_id]
    if kind in _NESTING and value:
        return _rebuilt(value, kind, lambda each: fill_in(each, values))
    return value


def _rebuilt(value: Any, kind: type, change: Callable[[Any], Any]) -> Any:
    """Return a container with changed parts, or the same one if nothing changed."""
    if kind is dict:
        pairs = {key: change(each) for key, each in value.items()}
        return pairs if any(pairs[key] is not each for key, each in value.items()) else value
    parts = [change(each) for each in value]
    return kind(parts) if any(new is not old for new, old in zip(parts, value, strict=True)) else value


def settle(futures: Iterable[Any], *, any: bool = False, timeout: float | None = None) -> list[Any]:  # noqa: A002
    """Block until all futures are available, or one more is than now; return those that are.

    `timeout` is in seconds; after it, whatever is available is returned. Never raises the calls' errors.
    """
    every = [each for each in futures if type(each) is Future]
    pending = [handle_of(each) for each in every if not each.available]
    if pending:
        if threading.get_ident() == pending[0].node.thread_id:
            text = f"{pending[0].words}: `settle` would stop the event loop: use `await settle_async(...)`"
            raise DeadlockError(text, path=pending[0].path, instance=pending[0].executor)
        over = threading.Event()
        _begins_to_wait(pending[0], current.get())
        _watch(pending, over.set, wanted_count=1 if any else len(pending))
        over.wait(timeout)
    return [each for each in every if each.available]


async def settle_async(futures: Iterable[Any], *, any: bool = False, timeout: float | None = None) -> list[Any]:  # noqa: A002, ASYNC109
    """Do as `settle`, on any event loop."""
    every = [each for each in futures if type(each) is Future]
    pending = [handle_of(each) for each in every if not each.available]
    if pending:
        waiting = LoopFuture()
        _begins_to_wait(pending[0], current.get())
        _watch(pending, waiting.notify, wanted_count=1 if any else len(pending))
        try:
            async with asyncio.timeout(timeout):
                await waiting.future
        except TimeoutError:
            pass
    return [each for each in every if each.available]


def _watch(pending: list[Handle], notify: Callable[[], None], *, wanted_count: int) -> None:
    left_count = wanted_count
    counting = threading.Lock()

    def one_more() -> None:
        nonlocal left_count
        with counting:
            left_count -= 1
            is_over = left_count == 0
        if is_over:
            notify()

    for handle in pending:
        handle.add_waiter(one_more)


__all__ = ["Future", "Handle", "Outcome", "Ref", "fill_in", "handle_of", "settle", "settle_async", "take_futures"]
