"""Run tests in several processes that are forked after collection: `-p tests.side_by_side --processes 3`.

Theory of operation. pytest-xdist collects all tests in each of its processes, which takes 7 s of processor time each,
and 15 s in a fresh clone: here they are collected once. A pipe holds the numbers of all files; a free process reads the
next one, and runs that file's tests in order. Reports return through a pipe for each process, and go to pytest's
plugins here as if the tests had run here. If a process dies, its current test and the remaining tests of its file
fail. Each process ends pytest as pytest does, which reports errors that could not be raised: it prints the reason on
its standard error and ends with a status, and that is a failure of its own.
"""

from __future__ import annotations

import multiprocessing
import os
from collections import Counter, deque
from itertools import groupby
from multiprocessing.connection import Connection, wait
from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from collections.abc import Iterator

_NUMBER_BYTES = 4
_FORK = multiprocessing.get_context("fork")


def pytest_addoption(parser: pytest.Parser) -> None:
    """Add the option for the number of processes; 0 means only this one."""
    parser.addoption("--processes", type=int, default=0, help="run the tests of different files on so many processes")


@pytest.hookimpl(tryfirst=True)
def pytest_runtestloop(session: pytest.Session) -> bool | None:
    """Run all tests in separate processes, if the option is set."""
    count, options = session.config.getoption("processes"), session.config.option
    if not count or options.collectonly or session.testsfailed:
        return None  # as pytest does it
    files = [list(items) for _, items in groupby(session.items, key=lambda item: item.path)]
    queue, filling = os.pipe()
    os.write(filling, b"".join(number.to_bytes(_NUMBER_BYTES) for number in range(len(files))))
    os.close(filling)
    processes: dict[Connection, tuple[Any, deque[str]]] = {}
    for number in range(min(count, len(files))):
        ours, theirs = _FORK.Pipe(duplex=False)
        process = _FORK.Process(target=_work, args=(session, files, queue, theirs), name=f"process {number}")
        process.start()
        theirs.close()
        processes[ours] = process, deque()
    try:
        _listen(session, processes)
    finally:
        while os.read(queue, 1 << 16):  # running processes end after their file
            pass
        os.close(queue)
        for process, _ in processes.values():
            process.join()
    return True


def _listen(session: pytest.Session, processes: dict[Connection, tuple[Any, deque[str]]]) -> None:
    """Pass the processes' reports to the plugins here until all have ended; raise as pytest does to stop."""
    hook, config = session.config.hook, session.config
    unheard = Counter(item.nodeid for item in session.items)
    open_ends = set(processes)
    while open_ends:
        for end in wait(list(open_ends)):
            assert isinstance(end, Connection)
            process, to_run = processes[end]
            try:
                kind, content = end.recv()
            except EOFError:
                open_ends.remove(end)
                process.join()
                for nodeid in to_run:
                    _lost(session, nodeid, f"its process ended with status {process.exitcode} before it did")
                if process.exitcode and not to_run:
                    why = f"it ended with status {process.exitcode} after its last test: see its standard error"
                    _lost(session, f"side_by_side::{process.name}", why)
                unheard.subtract(to_run)
                continue
            if kind == "file":
                to_run.extend(content)
            elif kind == "end":
                to_run.clear()
            elif kind == "report":
                hook.pytest_runtest_logreport(report=hook.pytest_report_from_serializable(config=config, data=content))
            else:
                to_run.remove(content[0])
                unheard[content[0]] -= 1
                hook.pytest_runtest_logfinish(nodeid=content[0], location=content[1])
        if session.shouldfail:
            raise session.Failed(session.shouldfail)
    if not session.shouldstop:
        for nodeid in unheard.elements():
            _lost(session, nodeid, "no process ran it")


def _lost(session: pytest.Session, nodeid: str, why: str) -> None:
    """Report a test that no process completed."""
    report = pytest.TestReport(
        nodeid=nodeid,
        location=(nodeid.partition("::")[0], None, nodeid),
        keywords={},
        outcome="failed",
        longrepr=why,
        when="call",
    )
    session.config.hook.pytest_runtest_logreport(report=report)


# --- in a process of its own


class _Teller:
    """Sends a test's reports to the process that collected it."""

    def __init__(self, config: pytest.Config, end: Connection) -> None:
        self._config = config
        self._end = end

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        content = self._config.hook.pytest_report_to_serializable(config=self._config, report=report)
        self._end.send(("report", content))

    def pytest_runtest_logfinish(self, nodeid: str, location: tuple[str, int | None, str]) -> None:
        self._end.send(("finish", (nodeid, location)))


class _Silent:
    """Replaces the terminal reporter: plugins ask it for the terminal."""

    def __init__(self, reporter: Any) -> None:
        self._tw = reporter._tw


def _work(session: pytest.Session, files: list[list[pytest.Item]], queue: int, end: Connection) -> None:
    """Run the tests of one file after another, until none is left or pytest stops."""
    plugins = session.config.pluginmanager
    capture: Any = plugins.getplugin("capturemanager")
    capture.stop_global_capturing()  # all processes share its files
    capture.start_global_capturing()
    reporter = plugins.unregister(name="terminalreporter")
    plugins.register(_Silent(reporter), "terminalreporter")
    plugins.register(_Teller(session.config, end))
    for item, following in _in_order(files, queue, end):
        session.config.hook.pytest_runtest_protocol(item=item, nextitem=following)
        if session.shouldfail or session.shouldstop:
            break
    end.send(("end", None))
    session.config._ensure_unconfigure()  # as pytest's own main function does at the end


def _in_order(
    files: list[list[pytest.Item]], queue: int, end: Connection
) -> Iterator[tuple[pytest.Item, pytest.Item | None]]:
    """Yield this process's tests, each with the next one, which decides what the test may leave set up."""
    last: pytest.Item | None = None
    while number := os.read(queue, _NUMBER_BYTES):
        items = files[int.from_bytes(number)]
        end.send(("file", [item.nodeid for item in items]))
        for item in items:
            if last is not None:
                yield last, item
            last = item
    if last is not None:
        yield last, None
