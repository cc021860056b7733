"""No line is lost without a report, none overtakes another, and writers never wait for readers."""

from __future__ import annotations

import json
import math
import os
import threading
from collections.abc import Iterator
from contextlib import suppress
from io import BytesIO
from pathlib import Path

import msgspec
import pytest
import structlog

from thunderagent.cli.log_output import configure_logging
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


def test_lines_dropped_while_nobody_reads_are_counted_and_reported(file: File) -> None:
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


HOSTILE = "a\u2028b\x9b2Jc\x85d\x7fe\x1b[2J\u2029f"


def test_a_line_stays_one_line_for_every_reader(file: File) -> None:
    """Neither a terminal nor a reader of lines finds its own characters in a stranger's text."""
    lines = LineLogger(file, linger_s=60.0)
    lines.info(json_line(None, "info", {"event": "x", "why": HOSTILE + "é"}))
    assert lines.flush()
    text = file.getvalue().decode()
    assert len(text.splitlines()) == 1
    assert all(each.isprintable() for each in text.rstrip("\n"))
    assert json.loads(text)["why"] == HOSTILE + "é"


def test_the_console_drops_what_cannot_be_written(monkeypatch: pytest.MonkeyPatch) -> None:
    """A full disk, or a terminal that is gone, ends nobody who logs."""
    structlog.reset_defaults()
    try:
        with Path("/dev/full").open("w", buffering=1) as full:
            monkeypatch.setattr("sys.stderr", full)
            configure_logging("info", as_json=False)
            structlog.get_logger("test").info("line")
            monkeypatch.undo()
            with suppress(OSError):
                full.close()
        structlog.get_logger("test").info("line")
    finally:
        structlog.reset_defaults()


def test_the_console_shows_escapes(capsys: pytest.CaptureFixture[str]) -> None:
    """This holds for values, names, events, lists and the text of errors."""
    structlog.reset_defaults()
    try:
        configure_logging("info", as_json=False)
        log = structlog.get_logger("test")
        log.info(HOSTILE, why=HOSTILE, many=[HOSTILE], **{HOSTILE: 1})
        log.info("line", why="one\ntwo")
        log.error("failed", exc_info=ValueError(HOSTILE))
    finally:
        structlog.reset_defaults()
    said = capsys.readouterr().err
    assert all(each.isprintable() for each in said.replace("\n", ""))
    assert r"\u2028" in said
    first, second, *_ = said.split("\n")
    assert first.count(r"\x9b2J") == 4
    assert "one" in second
    assert "two" in second
