"""The reaper with a fake engine."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
import time

from thunderagent.errors import SandboxEngineError
from thunderagent.tools.reaper import (
    GIVE_UP_S,
    LONGEST_LOOK_S,
    LOOK_S,
    reap_until_nothing_is_left,
    wait_for_the_end,
)


class Remains:
    """The remains at an engine, as times of expiry; and answers that fail."""

    def __init__(self, *expiries_s: float, failures_count: float = 0) -> None:
        self.expiries_s = set(expiries_s)
        self.failures_count = failures_count
        self.now_s = 0.0
        self.naps_s: list[float] = []

    def reap(self, now_s: float) -> float | None:
        if self.failures_count > 0:
            self.failures_count -= 1
            raise SandboxEngineError("down")
        self.expiries_s = {each for each in self.expiries_s if each > now_s}
        return min(self.expiries_s, default=None)

    def sleep(self, time_s: float) -> None:
        self.naps_s.append(time_s)
        self.now_s += time_s

    def run(self) -> bool:
        return reap_until_nothing_is_left(self.reap, self.sleep, lambda: self.now_s)


def test_reaper_ends_at_once_when_nothing_is_left() -> None:
    """After an orderly end of the proxy it has nothing to do."""
    remains = Remains()
    assert remains.run()
    assert remains.naps_s == []


def test_reaper_wakes_for_the_next_expiry_and_at_least_at_its_interval() -> None:
    """Something may end by itself meanwhile."""
    remains = Remains(1.0, 20.0, 200.0)
    assert remains.run()
    assert remains.naps_s[:2] == [LOOK_S, 18.0]
    assert max(remains.naps_s) == LONGEST_LOOK_S
    assert remains.now_s == 200.0


def test_an_engine_that_does_not_answer_is_asked_again() -> None:
    """It may be restarting; one that is gone for long is given up."""
    remains = Remains(10.0, failures_count=3)
    assert remains.run()
    assert remains.now_s == 10.0
    assert remains.naps_s[:3] == [LOOK_S] * 3
    gone = Remains(10.0, failures_count=float("inf"))
    assert not gone.run()
    assert gone.now_s >= GIVE_UP_S


def test_reaper_waits_for_the_end_of_the_pipe() -> None:
    """The data in it has no meaning."""
    reading, writing = os.pipe()
    thread = threading.Thread(target=wait_for_the_end, args=(reading,))
    thread.start()
    os.write(writing, b"hello")
    thread.join(0.1)
    assert thread.is_alive()
    os.close(writing)
    thread.join(5)
    assert not thread.is_alive()
    os.close(reading)


def test_reaper_holds_little_memory_while_it_waits() -> None:
    """The library, and other large modules, are imported only when the proxy has died."""
    asked = "import sys, thunderagent.tools.reaper as r; print(*({'docker', 'pydantic', 'asyncio'} & set(sys.modules)))"
    done = subprocess.run([sys.executable, "-c", asked], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == ""


def test_reaper_is_a_command() -> None:
    """It ends with its standard input, or somewhat later if no engine can be asked."""
    command = [
        sys.executable,
        "-m",
        "thunderagent.tools.reaper",
        "--owner",
        "o",
        "--run",
        "r",
        "--url",
        "unix:///none",
    ]
    with subprocess.Popen(command, stdin=subprocess.PIPE) as process:
        time.sleep(0.3)
        assert process.poll() is None
        process.kill()
