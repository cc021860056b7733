"""Do tasks one after the other, here or on processes of their own, and keep what is done when that ends early.

Theory of operation
-------------------
Each process is started afresh, gets the function once, and after that a task at a time. Only this process hears Ctrl-C:
the others are started with it blocked. This one tells them to stop, they look whenever their task calls `go_on`, and
what they have done until then counts. They end with this process, whatever it dies of.

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
from multiprocessing import get_context, parent_process
from multiprocessing.synchronize import Event
from threading import Thread
from typing import Any, ClassVar, TypeVar

Task = TypeVar("Task")
Result = TypeVar("Result")
GoOn = Callable[[], None]

PROCESS_BYTES = 70_000_000
"""Memory of a process besides its task: 62 MB measured."""

INTERRUPTED = "it was interrupted"
"""What ended the work: Ctrl-C."""

LOST_A_PROCESS = "a process ended by itself: was memory short?"
"""What ended the work: the system, or a task, ended a process."""


def do_here(do: Callable[[Task, GoOn], Result], todo: deque[Task], note: Callable[[Task, Result], None]) -> str:
    """Do all tasks in this process; return in words what ended that early, or nothing."""
    try:
        while todo:
            task = todo.popleft()
            note(task, do(task, lambda: None))
    except KeyboardInterrupt:
        return INTERRUPTED
    return ""


def do_on_processes(
    do: Callable[[Task, GoOn], Result],
    todo: deque[Task],
    note: Callable[[Task, Result], None],
    process_count: int,
) -> str:
    """Do all tasks on so many processes; return in words what ended that early, or nothing.

    `do` and the tasks must be what `pickle` knows. An error of a task ends all of them, and is raised here.
    """
    context = get_context("spawn")
    stop = context.Event()
    running: dict[Future[Result], Task] = {}
    stopped_by = ""
    with ProcessPoolExecutor(process_count, context, _Process.begin, (do, stop)) as pool:
        try:
            while todo or running:
                while todo and len(running) < process_count:
                    task = todo.popleft()
                    with _interrupts_blocked():  # a process that this starts inherits it
                        running[pool.submit(_Process.run, task)] = task
                finished, _ = wait(running, return_when=FIRST_COMPLETED)
                for future in finished:
                    note(running.pop(future), future.result())
        except KeyboardInterrupt:
            stopped_by = INTERRUPTED
        except BrokenProcessPool:
            stopped_by = LOST_A_PROCESS
        finally:
            stop.set()
    for future, task in running.items():
        if future.exception() is None:
            note(task, future.result())
    return stopped_by


@contextmanager
def _interrupts_blocked() -> Iterator[None]:
    """Let Ctrl-C wait."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


class _StoppedError(Exception):
    """A task was told to stop."""


class _Process:
    """What a process works with, set as it starts."""

    do: ClassVar[Callable[[Any, GoOn], Any]]
    stop: ClassVar[Event]

    @classmethod
    def begin(cls, do: Callable[[Any, GoOn], Any], stop: Event) -> None:
        """Get ready for tasks."""
        cls.do, cls.stop = staticmethod(do), stop
        Thread(target=cls._end_with_parent, daemon=True).start()

    @classmethod
    def run(cls, task: Any) -> Any:
        """Do one task."""
        return cls.do(task, cls._go_on)

    @classmethod
    def _go_on(cls) -> None:
        if cls.stop.is_set():
            raise _StoppedError

    @classmethod
    def _end_with_parent(cls) -> None:
        parent = parent_process()
        assert parent is not None, "only processes of the pool begin"
        parent.join()
        os._exit(1)
