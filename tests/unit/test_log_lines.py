"""No line is lost without a report, none overtakes another, and writers never wait for readers."""

from __future__ import annotations

import json
import math
import os
import threading
from collections.abc import Iterator
from io import BytesIO

import msgspec
import pytest

from thunderagent.log_lines import LineLogger, json_line


class File(BytesIO):
    """A file that reports writes, and blocks on command."""

    def __init__(self) -> None:
        super().__init__()
        self.writes_count = 0
        self.moves = threading.Event()
        self.moves.set()
        self.is_asked = threading.Event()

    def write(self, data: bytes) -> int:  # type: ignore[override]
        self.is_asked.set()
        self.moves.wait()
        self.writes_count += 1
        return super().write(data)


@pytest.fixture
def file() -> Iterator[File]:
    stream = File()
    yield stream
    stream.moves.set()


def test_the_lines_of_a_moment_go_out_together(file: File) -> None:
    lines = LineLogger(file, linger_s=60.0)
    for line in (b"1", b"2", b"3"):
        lines.info(line)
    assert (repr(lines), file.getvalue()) == ("<LineLogger: 3 lines to be written>", b"")
    assert lines.flush()
    assert (file.getvalue(), file.writes_count) == (b"1\n2\n3\n", 1)


def test_a_line_waits_for_others_only_for_a_moment(file: File) -> None:
    """It is then written without a request."""
    LineLogger(file).info(b"1")
    assert file.is_asked.wait(10.0)


def test_a_warning_goes_out_at_once_after_all_before_it(file: File) -> None:
    lines = LineLogger(file, linger_s=60.0)
    for say in (lines.warning, lines.error, lines.critical):
        file.is_asked.clear()
        lines.debug(b"turn")
        say(b"bad")
        assert file.is_asked.wait(10.0)
        assert lines.flush()
        assert file.getvalue().endswith(b"turn\nbad\n")


def test_lines_of_threads_are_not_lost(file: File) -> None:
    lines = LineLogger(file)

    def write() -> None:
        for number in range(1000):
            lines.info(b"%d" % number)

    threads = [threading.Thread(target=write) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert lines.flush()
    assert sorted(map(int, file.getvalue().splitlines())) == sorted([*range(1000)] * 4)


def test_what_does_not_fit_while_nobody_reads_is_counted_and_told(file: File) -> None:
    lines = LineLogger(file, max_waiting_bytes=1000)
    file.moves.clear()
    lines.warning(b"first")
    assert file.is_asked.wait(10.0)
    for _ in range(1000):
        lines.warning(b"b" * 200)
    assert not lines.flush(0.0)
    file.moves.set()
    assert lines.flush(10.0)
    first, *kept, told = file.getvalue().splitlines()
    assert (first, kept) == (b"first", [b"b" * 200] * 5)
    assert json.loads(told)["lost_count"] == 995


def test_a_full_pipe_stops_nobody() -> None:
    """Logging continues while the pipe is not read; a later reader gets all lines."""
    read_end, write_end = os.pipe()
    with os.fdopen(read_end, "rb") as reader, os.fdopen(write_end, "wb") as pipe:
        lines = LineLogger(pipe)
        for number in range(1000):
            lines.warning(b"%04d" % number + b"x" * 1000)  # sixteen times the capacity of a pipe
        assert not lines.flush(0.0)
        assert [int(reader.readline()[:4]) for _ in range(1000)] == [*range(1000)]
        assert lines.flush(10.0)


def test_a_file_that_is_closed_takes_nothing(file: File) -> None:
    """The thread and the logging code continue."""
    lines = LineLogger(file)
    file.close()
    for _ in range(2):
        lines.warning(b"1")
        assert lines.flush(10.0)


def test_a_line_is_json_with_its_level_and_time() -> None:
    said = json.loads(json_line(None, "info", {"event": "turn", "status": 200}))
    assert (said["event"], said["status"], said["level"]) == ("turn", 200, "info")
    assert said["timestamp"].endswith("Z")


def test_text_of_a_stranger_that_is_no_unicode_is_logged_all_the_same() -> None:
    """Half of a surrogate pair has no encoding; a judge, for one, may write it."""
    line = json_line(None, "debug", {"event": "judged", "reasoning": "so \ud83d", "turn_count": 5, "ratio": math.nan})
    said = msgspec.json.decode(line)
    assert (said["event"], said["reasoning"], said["turn_count"], said["level"]) == ("judged", "so ?", 5, "debug")
    assert said["ratio"] is None
    assert said["timestamp"].endswith("Z")
