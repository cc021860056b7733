"""An engine that answers at once, and a client that asks without pause: both raw protocols on one event loop.

Neither understands more HTTP than the benchmark needs, so that the measurement is of what stands between them.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from contextlib import asynccontextmanager
from itertools import count
from time import perf_counter
from typing import cast

ANSWER_TEXT = "w1 " * 580
USAGE = {
    "prompt_tokens": 500,
    "completion_tokens": 40,
    "total_tokens": 540,
    "prompt_tokens_details": {"cached_tokens": 400},
}
STREAM_EVENTS_COUNT = 64
METRICS = b'vllm:cache_config_info{engine="0",kv_cache_size_tokens="1000000000"} 1.0\n'


def take_requests(buffer: bytearray) -> Iterator[tuple[bytes, bytes]]:
    """Take complete requests out of a buffer; yield each as its head, in lower case, and its body."""
    while (end := buffer.find(b"\r\n\r\n")) >= 0:
        head = bytes(buffer[:end]).lower()
        at = head.find(b"content-length:")
        length = int(head[at + 15 :].partition(b"\r\n")[0]) if at >= 0 else 0
        whole = end + 4 + length
        if len(buffer) < whole:
            return
        body = bytes(buffer[end + 4 : whole])
        del buffer[:whole]
        yield head, body


def answer_head(content_type: str, length: int) -> bytes:
    """Return the head of an answer, for a body length in bytes."""
    return f"HTTP/1.1 200 OK\r\nContent-Type: {content_type}\r\nContent-Length: {length}\r\n\r\n".encode()


def _whole_answer() -> bytes:
    answer = {
        "id": "chatcmpl-1",
        "object": "chat.completion",
        "created": 1,
        "model": "instant",
        "choices": [{"index": 0, "message": {"role": "assistant", "content": ANSWER_TEXT}, "finish_reason": "stop"}],
        "usage": USAGE,
    }
    body = json.dumps(answer).encode()
    return answer_head("application/json", len(body)) + body


def _event(payload: dict[str, object]) -> bytes:
    data = b"data: " + json.dumps(payload, separators=(",", ":")).encode() + b"\n\n"
    return b"%x\r\n%s\r\n" % (len(data), data)


def stream_pieces(words_count: int) -> list[bytes]:
    """Return the pieces of a stream with so many words, a token each, then the usage and the end."""
    head = b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nTransfer-Encoding: chunked\r\n\r\n"
    base = {"id": "chatcmpl-1", "object": "chat.completion.chunk", "created": 1, "model": "instant"}
    words = [
        _event({**base, "choices": [{"index": 0, "delta": {"content": f"w{i}"}, "finish_reason": None}]})
        for i in range(words_count)
    ]
    usage = _event({**base, "choices": [], "usage": USAGE})
    return [head + words[0], *words[1:], usage, b"e\r\ndata: [DONE]\n\n\r\n0\r\n\r\n"]


WHOLE_ANSWER = _whole_answer()
STREAM_PIECES = stream_pieces(STREAM_EVENTS_COUNT - 1)


class InstantEngine(asyncio.Protocol):
    """Answers each request as soon as it is complete; a stream sends one event in each turn of the loop."""

    def __init__(self, pieces: Sequence[bytes] = STREAM_PIECES) -> None:
        """Send these pieces as a stream."""
        self._pieces = pieces

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Begin a connection."""
        self._transport = cast("asyncio.Transport", transport)
        self._buffer = bytearray()

    def data_received(self, data: bytes) -> None:
        """Take bytes of a request."""
        self._buffer += data
        for head, body in take_requests(self._buffer):
            self._answer(head, body)

    def _answer(self, head: bytes, body: bytes) -> None:
        if head.startswith(b"get /metrics"):
            self._transport.write(answer_head("text/plain", len(METRICS)) + METRICS)
        elif head.startswith(b"get"):
            self._transport.write(answer_head("text/plain", 0))
        elif b'"stream":true' in body:
            self._write_piece(0)
        else:
            self._transport.write(WHOLE_ANSWER)

    def _write_piece(self, index: int) -> None:
        if self._transport.is_closing():
            return
        self._transport.write(self._pieces[index])
        if index + 1 < len(self._pieces):
            asyncio.get_running_loop().call_soon(self._write_piece, index + 1)


@asynccontextmanager
async def instant_engine(pieces: Sequence[bytes] = STREAM_PIECES) -> AsyncIterator[int]:
    """Run the engine during the block, whose streams have these pieces; yield its port."""
    loop = asyncio.get_running_loop()
    server = await loop.create_server(lambda: InstantEngine(pieces), "127.0.0.1", 0, backlog=16_384)
    async with server:
        yield server.sockets[0].getsockname()[1]


class ClosedLoopClient(asyncio.Protocol):
    """Sends the next request as soon as the answer is complete; notes each one's time and number of events."""

    def __init__(self, next_request: Callable[[], bytes]) -> None:
        """Send what `next_request` returns."""
        self._next_request = next_request
        self.latencies_s: list[float] = []
        self.events_count = 0
        self.failed: str | None = None
        self._transport: asyncio.Transport | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Send the first request."""
        self._transport = cast("asyncio.Transport", transport)
        self._send()

    def _send(self) -> None:
        assert self._transport is not None
        self._answer = b""
        self._began_s = perf_counter()
        self._transport.write(self._next_request())

    def data_received(self, data: bytes) -> None:
        """Take bytes of an answer."""
        self._answer += data
        if not self._answer.startswith(b"HTTP/1.1 200"):
            self.failed = self._answer[:300].decode(errors="replace")
            return
        if self._is_whole():
            self.latencies_s.append(perf_counter() - self._began_s)
            self.events_count += self._answer.count(b"data:")
            self._send()

    def _is_whole(self) -> bool:
        answer = self._answer
        if answer.endswith(b"\r\n0\r\n\r\n"):
            return True
        end = answer.find(b"\r\n\r\n")
        at = answer[: end + 2].lower().find(b"content-length:")
        return at >= 0 and len(answer) == end + 4 + int(answer[at + 15 : end + 2].partition(b"\r\n")[0])

    def connection_lost(self, exc: Exception | None) -> None:
        """Note that the peer closed."""

    def close(self) -> None:
        """Close the connection."""
        if self._transport is not None:
            self._transport.close()


def chat_requests(port: int, *, body_bytes: int, stream: bool, programs_count: int) -> Callable[[], bytes]:
    """Return a function that returns the next request, of `programs_count` programs in turn."""
    numbers = count()
    message = {"model": "instant", "stream": stream, "messages": [{"role": "user", "content": ""}]}
    if stream:
        message["stream_options"] = {"include_usage": True}
    padding = body_bytes - len(json.dumps(message, separators=(",", ":")))
    message["messages"] = [{"role": "user", "content": ("w123 " * body_bytes)[: max(0, padding)]}]
    body = json.dumps(message, separators=(",", ":")).encode()
    head = (
        f"POST /v1/chat/completions HTTP/1.1\r\nHost: 127.0.0.1:{port}\r\nContent-Type: application/json\r\n"
        f"Authorization: Bearer none\r\nAccept: application/json\r\nUser-Agent: bench\r\n"
        f"Content-Length: {len(body)}\r\n"
    )

    def next_request() -> bytes:
        return f"{head}X-Program-ID: program-{next(numbers) % programs_count}\r\n\r\n".encode() + body

    return next_request


async def drive(
    port: int, next_request: Callable[[], bytes], *, connections_count: int, warmup_s: float, measure_s: float
) -> dict[str, float]:
    """Load `port` and return requests/s, events/s and latency percentiles in ms. Raises RuntimeError on an error."""
    loop = asyncio.get_running_loop()
    clients = [ClosedLoopClient(next_request) for _ in range(connections_count)]
    for client in clients:
        await loop.create_connection(lambda client=client: client, "127.0.0.1", port)  # type: ignore[misc]
    await asyncio.sleep(warmup_s)
    before = [(len(client.latencies_s), client.events_count) for client in clients]
    began_s = perf_counter()
    await asyncio.sleep(measure_s)
    elapsed_s = perf_counter() - began_s
    latencies_s = sorted(
        latency for client, (seen, _) in zip(clients, before, strict=True) for latency in client.latencies_s[seen:]
    )
    events_count = sum(client.events_count - seen for client, (_, seen) in zip(clients, before, strict=True))
    failed = next((client.failed for client in clients if client.failed), None)
    for client in clients:
        client.close()
    if failed or not latencies_s:
        raise RuntimeError(f"no answer, or a wrong one: {failed}")
    return {
        "requests_per_s": len(latencies_s) / elapsed_s,
        "events_per_s": events_count / elapsed_s,
        "p50_ms": latencies_s[len(latencies_s) // 2] * 1e3,
        "p99_ms": latencies_s[int(len(latencies_s) * 0.99)] * 1e3,
    }
