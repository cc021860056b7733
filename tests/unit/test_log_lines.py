"""No line is lost, none overtakes another, and none waits for longer than a moment."""

from __future__ import annotations

import asyncio
import threading
from io import BytesIO

import pytest

from thunderagent.log_lines import LINGER_S, LineLogger

A_MOMENT_S = 2 * LINGER_S


class File(BytesIO):
    """A file that counts how often something was written."""

    writes_count = 0

    def write(self, data: bytes) -> int:  # type: ignore[override]
        self.writes_count += 1
        return super().write(data)


@pytest.fixture
def file() -> File:
    return File()


async def test_the_lines_of_a_moment_go_out_together(file: File) -> None:
    lines = LineLogger(file)
    for line in (b"1", b"2", b"3"):
        lines.info(line)
        await asyncio.sleep(0)
    assert file.getvalue() == b""
    await asyncio.sleep(A_MOMENT_S)
    assert (file.getvalue(), file.writes_count) == (b"1\n2\n3\n", 1)
    lines.debug(b"4")
    await asyncio.sleep(A_MOMENT_S)
    assert (file.getvalue(), file.writes_count) == (b"1\n2\n3\n4\n", 2)
    await asyncio.sleep(A_MOMENT_S)
    assert file.writes_count == 2


async def test_a_warning_goes_out_at_once_after_all_before_it(file: File) -> None:
    lines = LineLogger(file)
    lines.info(b"turn")
    lines.warning(b"warning")
    assert file.getvalue() == b"turn\nwarning\n"
    lines.error(b"error")
    lines.critical(b"critical")
    assert file.getvalue() == b"turn\nwarning\nerror\ncritical\n"
    lines.info(b"turn")
    await asyncio.sleep(A_MOMENT_S)
    assert file.getvalue().endswith(b"critical\nturn\n")


def test_without_a_loop_a_line_goes_out_at_once(file: File) -> None:
    LineLogger(file).info(b"1")
    assert file.getvalue() == b"1\n"


async def test_lines_of_threads_are_not_lost(file: File) -> None:
    lines = LineLogger(file)
    lines.info(b"loop")

    def write() -> None:
        for number in range(1000):
            lines.info(b"%d" % number)

    threads = [threading.Thread(target=write) for _ in range(4)]
    for thread in threads:
        thread.start()
    for _ in range(100):
        lines.info(b"loop")
        await asyncio.sleep(0)
    for thread in threads:
        thread.join()
    await asyncio.sleep(0)
    lines.flush()
    written = file.getvalue().splitlines()
    assert written.count(b"loop") == 101
    assert sorted(map(int, (line for line in written if line != b"loop"))) == sorted([*range(1000)] * 4)
