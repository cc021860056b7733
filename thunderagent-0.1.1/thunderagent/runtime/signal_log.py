"""The information stream in a file: one JSON object per line, for analysis and plots."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path

import msgspec
import structlog

from thunderagent.errors import EventLogError
from thunderagent.programs.messages import Signal

log = structlog.get_logger("thunderagent.runtime")


class SignalLogWriter:
    """Appends signals to a file: their kind, Unix seconds as `at_s`, and their fields."""

    def __init__(self, path: Path, kind_of: Callable[[type[Signal]], str], clock: Callable[[], float]) -> None:
        """Open `path` for appending. Raises `EventLogError` if it cannot be written.

        `clock` is that of the signals, in monotonic seconds.
        """
        try:
            self._file = path.open("ab", buffering=0)
        except OSError as error:
            raise EventLogError(f"cannot write the signal log {path}: {error.strerror}") from error
        self._kind_of = kind_of
        self._epoch_s = time.time() - clock()
        self._encoder = msgspec.json.Encoder()
        self._failed = False

    def write(self, signal: Signal) -> None:
        """Append one signal; if the disk fails, log an error and stop: serving goes on."""
        if self._failed:
            return
        fields = msgspec.to_builtins(signal)
        at_s = round(self._epoch_s + fields.pop("now_s"), 4)
        line = {"kind": self._kind_of(type(signal)), "at_s": at_s, **fields}
        try:
            self._file.write(self._encoder.encode(line) + b"\n")
        except OSError as error:
            log.error("signal_log_given_up", why=error.strerror or str(error))  # noqa: TRY400 - it says all
            self._failed = True

    def close(self) -> None:
        """Close the file; each line was handed to the operating system as it was written."""
        self._file.close()
