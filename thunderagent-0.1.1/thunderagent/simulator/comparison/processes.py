"""Do tasks one after the other, here or on processes of their own, and keep what is done when that ends early.

Theory of operation
-------------------
Each process is started afresh, gets the function once, and after that a task at a time. Only this process hears Ctrl-C:
the others are started with it blocked. This one tells them to stop by closing a pipe, and they look whenever their task
calls `go_on`. Tasks that were finished by then count; those under way are given up, and a process whose task does not
look ends itself some seconds later. All end with this process, whatever it dies of.

Ctrl-C raises KeyboardInterrupt only while this process waits, or does a task itself: never while a result is noted, and
once at most, so that a second one loses nothing.

A task may bring further tasks: `note` may add to `todo`.
"""

from __future__ import annotations

import os
import signal
from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from concurrent.futures.process import BrokenProcessPool
from contextlib import contextmanager
from multiprocessing import connection, get_context, parent_process
from threading import Thread, current_thread, main_thread
from typing import Any, ClassVar, TypeVar

from thunderagent.errors import ThunderAgentError

Task = TypeVar("Task")
Result = TypeVar("Result")
GoOn = Callable[[], None]

PROCESS_BYTES = 70_000_000
"""Memory of a process without its task: 62 MB measured."""

GRACE_S = 5.0
"""How long tasks may go on after they were told to stop."""

INTERRUPTED = "it was interrupted"
"""Reason for the end: Ctrl-C."""

LOST_A_PROCESS = "a process ended by itself: was memory short?"
"""Reason for the end: the system, or a task, ended a process."""


def do_all(
    do: Callable[[Task, GoOn], Result],
    todo: deque[Task],
    note: Callable[[Task, Result], None],
    process_count: int,
) -> str:
    """Do all tasks, on several processes or, with one, in this; return the reason for an early end, or nothing."""
    if process_count == 1:
        return do_here(do, todo, note)
    return do_on_processes(do, todo, note, process_count)


def do_here(do: Callable[[Task, GoOn], Result], todo: deque[Task], note: Callable[[Task, Result], None]) -> str:
    """Do all tasks in this process; return the reason for an early end, or nothing."""
    with _interrupts() as interrupts:
        try:
            while todo:
                task = todo.popleft()
                with interrupts.heard():
                    result = do(task, lambda: None)
                note(task, result)
        except KeyboardInterrupt:
            return INTERRUPTED
        except ThunderAgentError as error:
            return error.message
    return ""


def do_on_processes(
    do: Callable[[Task, GoOn], Result],
    todo: deque[Task],
    note: Callable[[Task, Result], None],
    process_count: int,
    *,
    grace_s: float = GRACE_S,
) -> str:
    """Do all tasks on several processes; return the reason for an early end, or nothing.

    `do` and the tasks must be picklable. An error of a task ends all of them: it is returned as text if it is one of
    ours, and raised otherwise. Tasks that go on for `grace_s` after they were told to stop are killed.
    """
    context = get_context("spawn")
    hears, tells = context.Pipe(duplex=False)
    running: dict[Future[Result], Task] = {}
    stopped_by = ""
    with _interrupts() as interrupts, hears, tells:
        with ProcessPoolExecutor(process_count, context, _Process.begin, (do, hears, grace_s)) as pool:
            try:
                while todo or running:
                    while todo and len(running) < process_count and not interrupts.came:
                        task = todo.popleft()
                        with _interrupts_blocked():  # its child processes inherit it
                            running[pool.submit(_Process.run, task)] = task
                    with interrupts.heard():
                        finished, _ = wait(running, return_when=FIRST_COMPLETED)
                    for future in finished:
                        note(running.pop(future), future.result())
            except KeyboardInterrupt:
                stopped_by = INTERRUPTED
            except BrokenProcessPool:
                stopped_by = LOST_A_PROCESS
            except ThunderAgentError as error:
                stopped_by = error.message
            finally:
                tells.close()
        for future, task in running.items():
            if future.exception() is None:
                note(task, future.result())
    return stopped_by


class _Interrupts:
    """What Ctrl-C does while tasks are done."""

    def __init__(self) -> None:
        self.came = False
        self._is_heard = False

    def handle(self, _number: int, _frame: object) -> None:
        """Handle one Ctrl-C."""
        if not self.came:
            self.came = True
            if self._is_heard:
                raise KeyboardInterrupt

    @contextmanager
    def heard(self) -> Iterator[None]:
        """Let Ctrl-C raise KeyboardInterrupt here, including an earlier one."""
        self._is_heard = True
        try:
            if self.came:
                raise KeyboardInterrupt
            yield
        finally:
            self._is_heard = False


@contextmanager
def _interrupts() -> Iterator[_Interrupts]:
    """Handle Ctrl-C, unless somebody else does."""
    interrupts = _Interrupts()
    with _handling(interrupts.handle):
        yield interrupts


@contextmanager
def interrupts_ignored() -> Iterator[None]:
    """Ignore Ctrl-C except while tasks run here: for work that must finish after them."""
    with _handling(_ignore):
        yield


def _ignore(_number: int, _frame: object) -> None:
    """Ignore Ctrl-C."""


@contextmanager
def _handling(handler: Callable[[int, object], None]) -> Iterator[None]:
    """Let a function handle Ctrl-C, if Python or `_ignore` does now, and signals are handled in this thread."""
    before = signal.getsignal(signal.SIGINT)
    if current_thread() is not main_thread() or before not in (signal.default_int_handler, _ignore):
        yield
        return
    signal.signal(signal.SIGINT, handler)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)


@contextmanager
def _interrupts_blocked() -> Iterator[None]:
    """Delay Ctrl-C."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


class _StoppedError(Exception):
    """A task was told to stop."""


class _Process:
    """State of a process, set as it starts."""

    do: ClassVar[Callable[[Any, GoOn], Any]]
    is_stopped: ClassVar[bool] = False

    @classmethod
    def begin(cls, do: Callable[[Any, GoOn], Any], hears: connection.Connection, grace_s: float) -> None:
        """Prepare for tasks."""
        cls.do = staticmethod(do)
        Thread(target=cls._end_in_time, args=(hears, grace_s), daemon=True).start()

    @classmethod
    def run(cls, task: Any) -> Any:
        """Do one task."""
        return cls.do(task, cls._go_on)

    @classmethod
    def _go_on(cls) -> None:
        if cls.is_stopped:
            raise _StoppedError

    @classmethod
    def _end_in_time(cls, hears: connection.Connection, grace_s: float) -> None:
        """End with the parent, or some time after it said stop."""
        parent = parent_process()
        assert parent is not None, "only processes of the pool begin"
        connection.wait([hears, parent.sentinel])
        cls.is_stopped = True
        connection.wait([parent.sentinel], grace_s)
        os._exit(1)
