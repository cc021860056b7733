"""A task that begins at once, and goes on at once where what it waits for happens.

Theory of operation
===================
A task of asyncio's waits for its turn of the event loop: once to begin, and again each time that what it waits for is
there. Most turns wait for one thing, the head of an answer, which often brings the answer along; so the loop and the
objects that it needs for that would cost more than the waiting. Here a coroutine runs in `data_received` of its client
until it must wait, and goes on in that of its engine. It reads as any coroutine does, and one that must wait longer -
held, for its body, for a connection - waits as any task does.

To the coroutine it is a task: `asyncio.timeout`, task groups and futures work in it, and each has a context of its own.
`cancel` is heard in the next turn of the loop, as ever. What it waits for at its quickest is a `Waiter`, which may be
awaited in tasks of asyncio's as well: to them it is a future.

Nobody goes on in the midst of another: where a task runs already, the next turn of the loop is soon enough.
"""

from __future__ import annotations

import asyncio
from asyncio.tasks import _enter_task, _leave_task  # for tasks of others (docs.python.org, Extending asyncio)
from collections.abc import Callable, Coroutine, Generator
from contextvars import Context, copy_context
from typing import Any, Generic, TypeVar

Found = TypeVar("Found")


class Waiter(Generic[Found]):
    """Something that one task waits for, with what is found then. It is there once."""

    _asyncio_future_blocking = True
    """Until a task of asyncio's has taken it for its future."""
    _callback: Callable[[Waiter[Found]], object] | None = None
    _context: Context | None = None
    task: EagerTask | None = None
    """The eager task that waits, if one does."""
    found: Found | None = None
    is_done = False
    """Whether nobody needs to wait any more."""
    is_cancelled = False

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        """Begin with nothing found."""
        self._loop = loop

    def __await__(self) -> Generator[Waiter[Found], None, Found | None]:
        if not self.is_done:
            yield self
        return self.found if not self.is_cancelled else self.result()

    def set(self, found: Found | None) -> None:
        """Have who waits go on with what was found: an eager task at once. Who was cancelled finds it there, too."""
        if self.is_done:
            if self.is_cancelled:
                self.found = found
            return
        self.found, self.is_done = found, True
        if self.task is not None:
            self.task.go_on()
        elif self._callback is not None:
            self._tell()

    def set_soon(self, found: Found | None) -> None:
        """Have who waits go on in the next turn of the loop. Once more changes nothing."""
        if not self.is_done:
            self.found, self.is_done = found, True
            self._tell()

    def _tell(self) -> None:
        if self.task is not None:
            self._loop.call_soon(self.task.woken, self)
        elif self._callback is not None:
            self._loop.call_soon(self._callback, self, context=self._context)

    # --- as a future has them ------------------------------------------------------------------------------------

    def cancel(self, msg: object = None) -> bool:  # noqa: ARG002 - a future's
        """Have who waits be cancelled; False if it waits no more."""
        if self.is_done:
            return False
        self.is_done = self.is_cancelled = True
        self._tell()
        return True

    def result(self) -> Found | None:
        """Return what was found. Raises `CancelledError`."""
        if self.is_cancelled:
            raise asyncio.CancelledError
        return self.found

    def get_loop(self) -> asyncio.AbstractEventLoop:
        """Return the event loop that it belongs to."""
        return self._loop

    def add_done_callback(self, callback: Callable[[Waiter[Found]], object], *, context: Context | None = None) -> None:
        """Have one task of asyncio's be told in the next turn of the loop after it is done."""
        self._callback, self._context = callback, context


class EagerTask:
    """Runs a coroutine that raises nothing."""

    _waited: Any = None
    """What it waits for: a waiter, or a future."""
    _cancels_count = 0
    _must_cancel = False

    def __init__(self, loop: asyncio.AbstractEventLoop, coroutine: Coroutine[Any, Any, None]) -> None:
        """Be ready to begin."""
        self._loop = loop
        self._coroutine: Coroutine[Any, Any, None] | None = coroutine
        self._run = copy_context().run

    def __repr__(self) -> str:
        return f"<EagerTask, {'over' if self._coroutine is None else f'waiting for {self._waited}'}>"

    def woken(self, waited: Any) -> None:
        """Go on with what was waited for, or with what that raises."""
        try:
            waited.result()
        except BaseException as error:  # the coroutine's own business
            del waited  # or the error, whose traceback holds this frame, would wait for a collection
            self.go_on(error)
        else:
            self.go_on()

    def go_on(self, error: BaseException | None = None) -> None:
        """Begin, or go on, until it must wait again."""
        coroutine, loop = self._coroutine, self._loop
        if coroutine is None:
            return
        try:
            _enter_task(loop, self)  # type: ignore[arg-type]
        except RuntimeError:  # in the midst of another
            loop.call_soon(self.go_on, error)
            return
        self._waited = None
        if self._must_cancel:
            self._must_cancel, error = False, asyncio.CancelledError()
        try:
            waited = self._run(coroutine.send, None) if error is None else self._run(coroutine.throw, error)
        except BaseException as raised:
            self._coroutine = None
            if not isinstance(raised, StopIteration | asyncio.CancelledError):  # the latter before it began
                raise
        else:
            self._waited = waited
            if type(waited) is Waiter:
                waited.task = self
                if self._must_cancel:
                    self._cancel_wait()
            else:
                self._wait_for(waited)
        finally:
            _leave_task(loop, self)  # type: ignore[arg-type]
            del error  # or its traceback and this frame hold each other

    def _wait_for(self, waited: Any) -> None:
        """Be woken by a future; None only lets others go first."""
        if waited is None:
            self._loop.call_soon(self.go_on)
            return
        waited._asyncio_future_blocking = False  # noqa: SLF001 - as tasks do
        waited.add_done_callback(self.woken)
        if self._must_cancel:
            self._cancel_wait()

    def _cancel_wait(self) -> None:
        self._must_cancel = not self._waited.cancel()

    # --- as a task has them --------------------------------------------------------------------------------------

    def cancel(self, msg: object = None) -> bool:  # noqa: ARG002 - a task's
        """Have the coroutine be cancelled where it waits, in the next turn of the loop; False if it is over."""
        if self._coroutine is None:
            return False
        self._cancels_count += 1
        if self._waited is None or not self._waited.cancel():
            self._must_cancel = True
        return True

    def cancelling(self) -> int:
        """Return how many cancellations are not taken back."""
        return self._cancels_count

    def uncancel(self) -> int:
        """Take one cancellation back; return how many are left."""
        self._cancels_count = max(0, self._cancels_count - 1)
        return self._cancels_count

    def done(self) -> bool:
        """Say whether the coroutine is over."""
        return self._coroutine is None

    def get_loop(self) -> asyncio.AbstractEventLoop:
        """Return the event loop that it belongs to."""
        return self._loop
