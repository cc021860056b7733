"""Streaming answers of a Docker engine: output of a container or a command inside it, and events."""

from __future__ import annotations

import contextlib
import os
import socket
import threading
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any

from thunderagent.errors import SandboxEngineError
from thunderagent.tools.docker.connection import raise_for_status

_OUTPUT_BYTES = 8192
_TOLD_LINES = 10


class Stream:
    """A long-running answer, read by a thread of its own until it ends or is closed."""

    def __init__(self, name: str, ask: Callable[[], Any], read: Callable[[Any], None]) -> None:
        """Do nothing yet; `ask` returns the library's response, `read` reads it to its end."""
        self.ended: Future[Exception | None] = Future()
        self.ended.set_running_or_notify_cancel()  # its waiters cannot cancel it
        self._opened: Future[None] = Future()
        self._ask = ask
        self._read = read
        self._lock = threading.Lock()
        self._twin: socket.socket | None = None
        self._is_closed = False
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)

    def open(self, timeout_s: float) -> None:
        """Wait until the engine starts to answer; must not run on the event loop. Raises the library's errors."""
        self._thread.start()
        self._opened.result(timeout_s)

    def close(self) -> None:
        """End it and its thread, promptly; never blocks."""
        with self._lock:
            self._is_closed = True
            if self._twin is not None:
                with contextlib.suppress(OSError):
                    self._twin.shutdown(socket.SHUT_RDWR)

    def _run(self) -> None:
        why: Exception | None = None
        try:
            with self._ask() as response:
                raise_for_status(response)
                if self._can_begin(response):
                    self._read(response)
        except Exception as error:
            why = error
        finally:
            with self._lock:
                if self._twin is not None:
                    self._twin.close()
                    self._twin = None
            if not self._opened.done():
                self._opened.set_exception(why or SandboxEngineError("the stream was closed"))
            self.ended.set_result(why)

    def _can_begin(self, response: Any) -> bool:
        """Duplicate the connection's descriptor: shutting that down ends a read that waits in another thread."""
        with self._lock:
            if self._is_closed:
                return False
            with contextlib.suppress(OSError):
                self._twin = socket.socket(fileno=os.dup(response.raw.fileno()))
        self._opened.set_result(None)
        return True


class Output:
    """The end of the output of a container or a command inside it, on both streams."""

    def __init__(self) -> None:
        self._tail = b""

    def read(self, response: Any) -> None:
        """Read frames to the end: a head of 8 bytes, of which the last 4 are the length of what follows."""
        while len(head := response.raw.read(8)) == 8:
            left = int.from_bytes(head[4:], "big")
            while left > 0 and (data := response.raw.read(min(left, 65536))):
                left -= len(data)
                self._tail = (self._tail + data)[-_OUTPUT_BYTES:]

    def __str__(self) -> str:
        lines = self._tail.decode(errors="replace").strip().splitlines()
        return "\n".join(lines[-_TOLD_LINES:])
