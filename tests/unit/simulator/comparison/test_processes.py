"""Tasks on processes: finished ones count, whatever ends the work, and no process is left behind."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections import deque
from multiprocessing import active_children
from pathlib import Path
from threading import Timer
from types import ModuleType
from typing import Any

import pytest

from thunderagent.simulator.comparison.processes import (
    INTERRUPTED,
    LOST_A_PROCESS,
    do_all,
    do_here,
    do_on_processes,
    interrupts_ignored,
)

TASKS = '''
"""Tasks that other processes can import."""
import os
import time
from thunderagent.errors import ConfigurationError

def square(task, go_on):
    go_on()
    return task * task

def broken(task, go_on):
    raise ValueError(f"task {task} is out of order")

def impossible(task, go_on):
    if task > 1:
        raise ConfigurationError(f"task {task} is impossible")
    return "first"

def deadly(task, go_on):
    os._exit(3)

def interrupted(task, go_on):
    raise KeyboardInterrupt

def endless_but_first(task, go_on):
    while task:
        go_on()
        time.sleep(0.01)
    return "first"

def deaf_but_first(task, go_on):
    while task:
        time.sleep(0.01)
    return "first"
'''

MAIN = """
from collections import deque
import time
from thunderagent.simulator.comparison.processes import do_on_processes

def nap(task, go_on):
    time.sleep(0.01)
    go_on()

if __name__ == "__main__":
    done = []

    def note(task, result):
        done.append(task)
        print(len(done), flush=True)

    stopped_by = do_on_processes(nap, deque(range(1_000_000)), note, 2)
    print(len(done), stopped_by, flush=True)
"""


@pytest.fixture
def tasks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    (tmp_path / "tasks_to_do.py").write_text(TASKS)
    monkeypatch.syspath_prepend(tmp_path)
    sys.modules.pop("tasks_to_do", None)
    return __import__("tasks_to_do")


@pytest.mark.parametrize("process_count", [1, 2])
def test_all_is_done_and_more_may_come(tasks: ModuleType, process_count: int) -> None:
    """The receiver of a result may add tasks, even when none is left."""
    todo, done = deque([1, 2, 3]), {}

    def note(task: int, result: int) -> None:
        done[task] = result
        if task == 3:
            todo.append(4)

    assert do_all(tasks.square, todo, note, process_count) == ""
    assert done == {1: 1, 2: 4, 3: 9, 4: 16}


@pytest.mark.parametrize("process_count", [1, 2])
def test_an_error_is_raised_here(tasks: ModuleType, process_count: int) -> None:
    with pytest.raises(ValueError, match="task 1 is out of order"):
        do_all(tasks.broken, deque([1] * 5), {}.__setitem__, process_count)


@pytest.mark.parametrize("process_count", [1, 2])
def test_an_error_of_ours_ends_all_and_keeps_what_is_done(tasks: ModuleType, process_count: int) -> None:
    """Its text says what ended the work."""
    done: dict[int, Any] = {}
    assert do_all(tasks.impossible, deque([1, 2]), done.__setitem__, process_count) == "task 2 is impossible"
    assert done == {1: "first"}


@pytest.mark.parametrize("process_count", [1, 2])
def test_a_task_that_hears_an_interrupt_ends_all(tasks: ModuleType, process_count: int) -> None:
    assert do_all(tasks.interrupted, deque([1, 2, 3]), {}.__setitem__, process_count) == INTERRUPTED


def test_a_process_that_dies_ends_all(tasks: ModuleType) -> None:
    done: dict[int, Any] = {}
    assert do_all(tasks.deadly, deque([1, 2, 3]), done.__setitem__, 2) == LOST_A_PROCESS
    assert done == {}


def test_tasks_that_go_on_are_stopped(tasks: ModuleType) -> None:
    """They would never end by themselves."""
    done = []

    def note(task: int, result: str) -> None:
        done.append(result)
        raise KeyboardInterrupt

    assert do_on_processes(tasks.endless_but_first, deque([1, 0]), note, 2) == INTERRUPTED
    assert set(done) == {"first"}


def test_tasks_that_do_not_listen_are_ended(tasks: ModuleType) -> None:
    """A second Ctrl-C meanwhile changes nothing."""
    done = []
    again = Timer(0.2, os.kill, (os.getpid(), signal.SIGINT))

    def note(task: int, result: str) -> None:
        done.append(result)
        os.kill(os.getpid(), signal.SIGINT)
        again.start()

    begin_s = time.monotonic()
    assert do_on_processes(tasks.deaf_but_first, deque([1, 0]), note, 2, grace_s=1.0) == INTERRUPTED
    again.join()
    assert done == ["first"]
    assert time.monotonic() - begin_s < 20
    assert not active_children()


@pytest.mark.parametrize("process_count", [1, 2])
def test_ctrl_c_never_loses_what_is_just_noted(tasks: ModuleType, process_count: int) -> None:
    done: dict[int, int] = {}

    def note(task: int, result: int) -> None:
        os.kill(os.getpid(), signal.SIGINT)
        time.sleep(0.01)
        done[task] = result

    todo = deque([1, 2, 3, 4])
    assert do_all(tasks.square, todo, note, process_count) == INTERRUPTED
    assert 1 <= len(done) <= 2
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


def test_ctrl_c_is_ignored_but_while_tasks_are_done(tasks: ModuleType) -> None:
    with interrupts_ignored():
        os.kill(os.getpid(), signal.SIGINT)
        time.sleep(0.01)
        assert do_here(lambda *_: os.kill(os.getpid(), signal.SIGINT), deque([1]), lambda *_: None) == INTERRUPTED
        os.kill(os.getpid(), signal.SIGINT)
        time.sleep(0.01)
    with pytest.raises(KeyboardInterrupt):
        signal.raise_signal(signal.SIGINT)


# --- Signals of a terminal and of the system ------------------------------------------------------------------------


@pytest.fixture
def main(tmp_path: Path) -> subprocess.Popen[str]:
    """Run in a separate process group, as from a terminal, with three tasks done."""
    path = tmp_path / "main.py"
    path.write_text(MAIN)
    process = subprocess.Popen(
        [sys.executable, str(path)], text=True, stdout=subprocess.PIPE, stderr=subprocess.PIPE, start_new_session=True
    )
    assert process.stdout is not None
    assert [process.stdout.readline().strip() for _ in range(3)] == ["1", "2", "3"]
    return process


def children_of(process: subprocess.Popen[str]) -> list[Path]:
    """Return the processes that it started, without `multiprocessing`'s own."""
    pids = Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()
    paths = [Path(f"/proc/{pid}") for pid in pids]
    return [path for path in paths if b"spawn_main" in (path / "cmdline").read_bytes()]


def ended(paths: list[Path]) -> bool:
    """Wait until none of the processes runs."""
    deadline_s = time.monotonic() + 10
    while time.monotonic() < deadline_s:
        if all(has_ended(path) for path in paths):
            return True
        time.sleep(0.02)
    return False


def has_ended(path: Path) -> bool:
    try:
        return (path / "stat").read_text().rpartition(")")[2].split()[0] == "Z"
    except (FileNotFoundError, ProcessLookupError):
        return True


def test_ctrl_c_keeps_what_is_done_and_no_process_complains(main: subprocess.Popen[str]) -> None:
    """A terminal sends it to all processes at once."""
    children = children_of(main)
    assert len(children) == 2
    os.killpg(main.pid, signal.SIGINT)
    out, err = main.communicate(timeout=20)
    done_count, _, words = out.splitlines()[-1].partition(" ")
    assert int(done_count) >= 3
    assert words == INTERRUPTED
    assert err == ""
    assert main.returncode == 0
    assert ended(children)


def test_processes_end_with_their_parent(main: subprocess.Popen[str]) -> None:
    """This holds however it dies."""
    children = children_of(main)
    main.kill()
    assert len(children) == 2
    try:
        assert ended(children)
    finally:
        for path in children:
            if not has_ended(path):
                os.kill(int(path.name), signal.SIGKILL)
        main.communicate(timeout=20)
