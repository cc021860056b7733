"""An engine that records the begin and end of each generation, by the turn that its prompt names.

`python -m tests.real.counting_engine PORT FILE`. A line of the file is `BEGAN turn moment` or `WHOLE` or `CUT`; moments
are of the machine's monotonic clock. Records are written at once, because the process may be killed.
"""

from __future__ import annotations

import asyncio
import json
import os
import re
import sys
import time
from typing import cast

from benchmarks.instant import METRICS, answer_head, take_requests

PIECE_S = 0.04
PROMPT_TOKENS = 10
_TURN = re.compile(rb"turn=([\w.-]+) tokens=(\d+)")


def prompt_of(turn: str, tokens: int) -> str:
    """Return a prompt that names a turn, and asks for a number of tokens."""
    return f"turn={turn} tokens={tokens} "


def _chunk(data: bytes) -> bytes:
    return b"%x\r\n%s\r\n" % (len(data), data)


def _event(**fields: object) -> bytes:
    payload = {"id": "1", "object": "chat.completion.chunk", "created": 1, "model": "counting", **fields}
    return _chunk(b"data: " + json.dumps(payload, separators=(",", ":")).encode() + b"\n\n")


STREAM_HEAD = b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nTransfer-Encoding: chunked\r\n\r\n"
WORD = _event(choices=[{"index": 0, "delta": {"content": "word "}, "finish_reason": None}])
DONE = _chunk(b"data: [DONE]\n\n") + _chunk(b"")


def _usage(tokens: int) -> bytes:
    usage = {"prompt_tokens": PROMPT_TOKENS, "completion_tokens": tokens, "total_tokens": PROMPT_TOKENS + tokens}
    return _event(choices=[], usage=usage)


class CountingEngine(asyncio.Protocol):
    """One connection, one request at a time."""

    def __init__(self, notes: int) -> None:
        """Record in an open file."""
        self._notes = notes
        self._turn = ""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Begin a connection."""
        self._transport = cast("asyncio.Transport", transport)
        self._buffer = bytearray()

    def connection_lost(self, exc: Exception | None) -> None:
        """End its generation."""
        self._note("CUT")

    def _note(self, what: str) -> None:
        if self._turn:
            os.write(self._notes, f"{what} {self._turn} {time.monotonic():.6f}\n".encode())
            if what != "BEGAN":
                self._turn = ""

    def data_received(self, data: bytes) -> None:
        """Take bytes of a request."""
        self._buffer += data
        for head, body in take_requests(self._buffer):
            self._answer(head, body)

    def _answer(self, head: bytes, body: bytes) -> None:
        if (found := _TURN.search(body)) is not None:
            self._turn, tokens = found[1].decode(), int(found[2])
            self._note("BEGAN")
            self._transport.write(STREAM_HEAD + WORD)
            asyncio.get_running_loop().call_later(PIECE_S, self._go_on, self._turn, 1, tokens)
        elif head.startswith(b"get /metrics"):
            self._transport.write(answer_head("text/plain", len(METRICS)) + METRICS)
        else:
            self._transport.write(answer_head("text/plain", 0))

    def _go_on(self, turn: str, count: int, tokens: int) -> None:
        if turn != self._turn:
            return
        if count < tokens:
            self._transport.write(WORD)
            asyncio.get_running_loop().call_later(PIECE_S, self._go_on, turn, count + 1, tokens)
        else:
            self._note("WHOLE")  # recorded first: a kill in between leaves no unrecorded output
            self._transport.write(_usage(tokens) + DONE)


async def _serve(port: int, path: str) -> None:
    notes = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    loop = asyncio.get_running_loop()
    server = await loop.create_server(lambda: CountingEngine(notes), "127.0.0.1", port, backlog=4096)
    print(f"engine ready at http://127.0.0.1:{port}", flush=True)
    await server.serve_forever()


if __name__ == "__main__":
    asyncio.run(_serve(int(sys.argv[1]), sys.argv[2]))
