"""The process that settles turns beside the proxy: it decodes what engines said, compares it, and packs the records.

Messages go over a socket, each with its length before it: batches there, what became of them back, in the same order.
Before that it says that it is ready: one that ends earlier did not die of its batches.
It ends when the proxy does, however that ends, since its socket is closed then.
"""

# interpreted: it runs once for many turns

from __future__ import annotations

import asyncio
import signal
import socket
import subprocess
import sys
from collections.abc import Callable, Iterable
from typing import Final, cast

import structlog

from thunderagent.proxy.reading.taken import Settler
from thunderagent.rollouts.records import (
    Batch,
    SettledBatch,
    decode_batch,
    decode_settled,
    encode_batch_into,
    encode_settled,
)

log = structlog.get_logger("thunderagent.rollouts")

RESTART_S: Final = 1.0
"""How long after the end of one process the next one begins."""

SILENCE_S: Final = 60.0
"""A process that answers nothing for so long, though it was sent turns, hangs or was stopped: it is ended."""

_MAIN: Final = "import sys; sys.path[:] = {}; from thunderagent.proxy.watch.settling import main; main()"
_EFFECT: Final = "what it had not settled waits for another process"
_READ_BYTES: Final = 2**20
_READY: Final = b""
_NO_SIZE: Final = bytes(4)


def main() -> None:
    """Settle what comes over the socket that is the standard input, until it is closed."""
    for each in (signal.SIGINT, signal.SIGTERM):
        signal.signal(each, signal.SIG_IGN)  # of the whole group: the proxy has yet to end, and then closes the socket
    settler, buffer = Settler(), bytearray()
    with socket.socket(fileno=0) as connection:
        try:
            connection.sendall(_sized(_READY))
            while data := connection.recv(_READ_BYTES):
                buffer += data
                replies = [_sized(encode_settled(settler.settle(decode_batch(each)))) for each in taken_out(buffer)]
                connection.sendall(b"".join(replies))
        except (BrokenPipeError, ConnectionResetError):
            return


def _started() -> tuple[subprocess.Popen[bytes], socket.socket]:
    """Start a process; return it, and our end of its socket. Raises `OSError` if files or processes are short."""
    command = [sys.executable, "-c", _MAIN.format(sys.path)]  # it imports what this process does
    ours, theirs = socket.socketpair()
    try:
        with theirs:
            process = subprocess.Popen(command, stdin=theirs.fileno(), stdout=subprocess.DEVNULL)  # noqa: S603 - ours
    except OSError:
        ours.close()
        raise
    ours.setblocking(False)
    return process, ours


def taken_out(buffer: bytearray) -> list[bytes]:
    """Take the whole messages out of a buffer."""
    found, at = [], 0
    while len(buffer) >= at + 4:
        end = at + 4 + int.from_bytes(buffer[at : at + 4], "little")
        if len(buffer) < end:
            break
        found.append(bytes(buffer[at + 4 : end]))
        at = end
    del buffer[:at]
    return found


def _sized(message: bytes) -> bytes:
    return len(message).to_bytes(4, "little") + message


class SettlingProcess(asyncio.Protocol):
    """One such process, and the next one if it ends."""

    def __init__(self, settled: Callable[[SettledBatch], None], ended: Callable[[], None]) -> None:
        """Tell `settled` of each batch, and `ended` of its end."""
        self._settled = settled
        self._ended = ended
        self._buffer = bytearray()
        self._process: subprocess.Popen[bytes] | None = None
        self._transport: asyncio.Transport | None = None
        self._begins_at_s = 0.0
        self._unanswered_count = 0
        self._heard_s = 0.0
        """When it last answered, or was sent the first of what it has not answered."""
        self._is_ready = False
        self._starting: asyncio.Task[None] | None = None
        self._is_closed = False
        self.number = 0
        """Counts the processes."""

    @property
    def is_up(self) -> bool:
        """Whether it takes batches."""
        return self._transport is not None and self._is_ready

    def start(self) -> None:
        """Start it, if it does not run, and the last one has not just ended."""
        loop = asyncio.get_running_loop()
        is_none = self._starting is None and self._transport is None and not self._is_closed
        if is_none and loop.time() >= self._begins_at_s:
            self._starting = loop.create_task(self._start(loop))

    async def _start(self, loop: asyncio.AbstractEventLoop) -> None:
        try:
            self._process, ours = _started()
        except OSError as error:
            self._begins_at_s = loop.time() + RESTART_S
            log.error("rollout_settling_ended", why=str(error), effect=_EFFECT)  # noqa: TRY400
        else:
            self.number += 1
            self._buffer.clear()
            self._is_ready, self._unanswered_count, self._heard_s = False, 1, loop.time()
            try:
                await loop.create_connection(lambda: self, sock=ours)
            except BaseException:
                ours.close()
                raise
        finally:
            self._starting = None

    def send(self, batches: Iterable[Batch]) -> None:
        """Send batches; it is up."""
        assert self._transport is not None
        message, count = bytearray(), 0
        for batch in batches:  # all into one buffer: copied, they would be so twice more
            start, count = len(message), count + 1
            message += _NO_SIZE
            encode_batch_into(batch, message, -1)
            message[start : start + 4] = (len(message) - start - 4).to_bytes(4, "little")
        if not count:
            return
        if not self._unanswered_count:
            self._heard_s = asyncio.get_running_loop().time()
        self._unanswered_count += count
        self._transport.write(message)

    def end_if_silent(self) -> None:
        """End it if it no longer answers; another follows."""
        silence_s = asyncio.get_running_loop().time() - self._heard_s
        if self._transport is not None and self._unanswered_count and silence_s > SILENCE_S:
            self._transport.abort()

    def close(self) -> None:
        """End it."""
        self._is_closed = True
        if self._starting is not None:
            self._starting.cancel()
        transport, self._transport = self._transport, None
        if transport is not None:
            transport.abort()
        if self._process is not None:
            self._process.kill()
            self._process.wait()

    # --- asyncio's

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Begin to send."""
        made = cast("asyncio.Transport", transport)  # uvloop's is none
        if self._is_closed:
            made.abort()
        else:
            self._transport = made

    def data_received(self, data: bytes) -> None:
        """Pass on what was settled."""
        self._buffer += data
        self._heard_s = asyncio.get_running_loop().time()
        for message in taken_out(self._buffer):
            self._unanswered_count -= 1
            if message == _READY:
                self._is_ready = True
            else:
                self._settled(decode_settled(message))

    def eof_received(self) -> None:
        """Close the connection."""

    def pause_writing(self) -> None:
        """Go on: what waits is bounded by the table."""

    def resume_writing(self) -> None:
        """Go on."""

    def connection_lost(self, _: Exception | None) -> None:
        """Start another one soon."""
        if self._is_closed:
            return
        self._transport = None
        process, self._begins_at_s = self._process, asyncio.get_running_loop().time() + RESTART_S
        why = ""
        if process is not None:
            process.kill()
            why = f"status {process.wait()}"
        log.error("rollout_settling_ended", why=why, effect=_EFFECT)
        self._ended()
