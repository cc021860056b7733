"""The handle of a call: it is the value as soon as somebody looks, and can be asked and waited for.

The value is transparent as far as Python goes: `len`, iteration, `==`, unpacking, `+`, f-strings and `isinstance` work,
and block until it is there. What looks at an object's memory does not: `json.dumps`, `re`, `"".join` and `is None` want
`f.value()`. Agents never see a handle: those among a call's arguments are replaced by their values before it runs.
"""

from __future__ import annotations

import asyncio
import math
import threading
from collections.abc import Callable, Generator, Iterable, Sequence
from contextlib import suppress
from typing import Any, cast

from lazy_object_proxy import Proxy

from thunderagent_workflows.core.call import Outcome, Record
from thunderagent_workflows.errors import DeadlockError, WorkflowError
from thunderagent_workflows.scope import Scope, current

_registering = threading.RLock()
"""Held while a waiter is added or taken off, from any thread: also by a garbage collection of who holds it."""


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
            with Waiting((self,), event.set, scope):
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

    def add_waiter(self, waiter: Waiter) -> None:
        """Notify `waiter` once there is an outcome, on the node's loop; immediately if there is one."""
        with _registering:
            if self.outcome is None:
                if self.waiters is None:
                    self.waiters = []
                self.waiters.append(waiter)
                return
        _notify(waiter)

    def remove_waiter(self, waiter: Waiter) -> None:
        """Notify `waiter` no more, if it has not been."""
        with _registering:
            if self.waiters is not None and waiter in self.waiters:
                self.waiters.remove(waiter)

    def notify(self) -> None:
        """Notify waiters. The node calls it, on its loop, when there is an outcome."""
        with _registering:
            waiters, self.waiters = self.waiters, None
        for waiter in waiters or ():
            _notify(waiter)

    def __await__(self) -> Generator[Any, None, Any]:
        """Do as `wait`, on any event loop."""
        scope = current.get()
        if self.outcome is None:
            over, waiter = self._over()
            with Waiting((self,), waiter, scope):
                yield from over
        return self.take(scope)

    def _over(self) -> tuple[asyncio.Future[None], Waiter]:
        """Return a future of the running loop, and the waiter that ends it."""
        if threading.get_ident() != self.node.thread_id:
            waiting = LoopFuture()
            return waiting.future, waiting.notify
        over: asyncio.Future[None] = self.node.loop.create_future()
        return over, over

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


Waiter = Callable[[], None] | asyncio.Future[None]
"""Whom to notify of an outcome. A future is one of the node's loop, and costs less."""


def _notify(waiter: Waiter) -> None:
    if isinstance(waiter, asyncio.Future):
        if not waiter.done():
            waiter.set_result(None)
    else:
        waiter()


class LoopFuture:
    """An awaitable of the running loop, which any thread may complete."""

    __slots__ = ("_loop", "_thread_id", "future")

    def __init__(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._thread_id = threading.get_ident()
        self.future: asyncio.Future[None] = self._loop.create_future()

    def notify(self) -> None:
        """End the waiting, unless its loop has closed."""
        with suppress(RuntimeError):  # whoever waited there has given up
            if threading.get_ident() == self._thread_id:
                self._end()
            else:
                self._loop.call_soon_threadsafe(self._end)

    def _end(self) -> None:
        if not self.future.done():
            self.future.set_result(None)


class Waiting:
    """Has a waiter notified of each handle's outcome, and records who waits, for deadlock checks and turn estimates."""

    __slots__ = ("_call_id", "_scope", "_waiter", "handles")

    def __init__(
        self, handles: Sequence[Handle], waiter: Waiter, scope: Scope | None, *, is_for_all: bool = True
    ) -> None:
        """Wait for handles of one node. Unless `is_for_all`, it ends without some of them, too."""
        self.handles = handles
        self._waiter = waiter
        self._scope = scope
        self._call_id = scope.call_id if scope is not None and is_for_all else 0

    def __enter__(self) -> None:
        node, scope = self.handles[0].node, self._scope
        if self._call_id:
            with _registering:
                beside = node.waiting.setdefault(self._call_id, set())
                beside.add(self)
                node.waiting[self._call_id] = beside  # a garbage collection may have ended the other waits just now
        for handle in self.handles:
            handle.add_waiter(self._waiter)
        if scope is not None and node.hints is not None:
            node.hints.waits(scope)

    def __exit__(self, *_: object) -> None:
        for handle in self.handles:
            if handle.outcome is None:  # the wait was given up
                handle.remove_waiter(self._waiter)
        if self._call_id:
            waiting = self.handles[0].node.waiting
            with _registering:
                beside = waiting[self._call_id]
                beside.discard(self)
                if not beside:
                    waiting.pop(self._call_id, None)


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
MAY_HOLD_FUTURES = frozenset({Future, *_NESTING})


def holds_future(value: Any, limit_count: float = math.inf) -> bool | None:
    """Return whether a value is a future, or one is among its parts, however deep; they may hold each other.

    None if more than `limit_count` parts would have to be looked at.
    """
    todo, seen = [value] if type(value) in MAY_HOLD_FUTURES else [], set()
    while todo:
        each = todo.pop()
        if type(each) is Future:
            return True
        if id(each) not in seen:
            seen.add(id(each))
            limit_count -= len(each)
            if limit_count < 0:
                return None
            parts = [*(each.values() if type(each) is dict else each)]  # at once: its owner may change it meanwhile
            if not MAY_HOLD_FUTURES.isdisjoint({*map(type, parts)}):
                todo += [part for part in parts if type(part) in MAY_HOLD_FUTURES]
    return False


def take_futures(args: tuple[Any, ...], needs: dict[int, Handle]) -> tuple[Any, ...]:
    """Return the arguments with a `Ref` for each future without a value, which is added to `needs`.

    Raises `WorkflowError` for what nests too deeply.
    """
    if not MAY_HOLD_FUTURES.isdisjoint(map(type, args)):
        try:
            return tuple(_without_futures(each, needs) for each in args)
        except RecursionError:
            raise WorkflowError("arguments and values nest too deeply, or hold themselves") from None
    return args


def _without_futures(value: Any, needs: dict[int, Handle]) -> Any:
    """Return a value with a `Ref` for each future in it without a value, which is added to `needs`."""
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
    every, pending = _pending(futures)
    if pending:
        if threading.get_ident() == pending[0].node.thread_id:
            text = f"{pending[0].words}: `settle` would stop the event loop: use `await settle_async(...)`"
            raise DeadlockError(text, path=pending[0].path, instance=pending[0].executor)
        over = threading.Event()
        with _settling(pending, over.set, timeout, any_one=any):
            over.wait(timeout)
    return [each for each in every if each.available]


async def settle_async(futures: Iterable[Any], *, any: bool = False, timeout: float | None = None) -> list[Any]:  # noqa: A002, ASYNC109
    """Do as `settle`, on any event loop."""
    every, pending = _pending(futures)
    if pending:
        waiting = LoopFuture()
        with suppress(TimeoutError), _settling(pending, waiting.notify, timeout, any_one=any):
            async with asyncio.timeout(timeout):
                await waiting.future
    return [each for each in every if each.available]


def _pending(futures: Iterable[Any]) -> tuple[list[Future], list[Handle]]:
    every = [each for each in futures if type(each) is Future]
    return every, [handle_of(each) for each in every if not each.available]


def _settling(pending: list[Handle], notify: Callable[[], None], timeout_s: float | None, *, any_one: bool) -> Waiting:
    """Have `notify` called when all are available, or any one. `timeout_s` is when nobody waits any more."""
    left_count = 1 if any_one else len(pending)
    is_for_all = timeout_s is None and left_count == len(pending)
    counting = threading.Lock()

    def one_more() -> None:
        nonlocal left_count
        with counting:
            left_count -= 1
            is_over = left_count == 0
        if is_over:
            notify()

    return Waiting(pending, one_more, current.get(), is_for_all=is_for_all)


__all__ = ["Future", "Handle", "Outcome", "Ref", "fill_in", "handle_of", "settle", "settle_async", "take_futures"]
