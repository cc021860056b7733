"""A minimal relay on the proxy's own protocols: the cost of its bytes, to compare with `bare_relay`."""

from __future__ import annotations

import asyncio
import signal
import sys
from functools import partial

import uvloop
from multidict import CIMultiDict

from thunderagent.proxy.wire.http11.client import Pool
from thunderagent.proxy.wire.http11.heads import RequestHead
from thunderagent.proxy.wire.http11.lent import Borrower
from thunderagent.proxy.wire.http11.limits import Limits, Pause, Sweep
from thunderagent.proxy.wire.http11.server import Asked, Connection, Handler, Settings
from thunderagent.serving.process import keep_freed_memory

LIMITS = Limits(connect_s=5.0, silence_s=3600.0)


class Relay:
    """Relays every request to one server, streams piece by piece."""

    def __init__(self, upstream: str, pool: Pool) -> None:
        """Relay to `upstream`."""
        self._upstream = upstream
        self._pool = pool

    def handler(self, head: RequestHead) -> Handler:  # noqa: ARG002 - the router's
        """Return the handler of a request."""
        return self._relay

    def borrower(self) -> Borrower:
        """Lend no connections."""
        raise AssertionError("every request is relayed")

    async def _relay(self, asked: Asked) -> None:
        body = await asked.read()
        headers = CIMultiDict([("Content-Type", asked.headers["Content-Type"])])
        answer = await self._pool.request(
            asked.head.method, self._upstream, asked.head.target.decode(), headers, body, LIMITS
        )
        try:
            headers = CIMultiDict([("Content-Type", answer.headers["Content-Type"])])
            if answer.content_type != "text/event-stream":
                asked.answer(answer.status, answer.reason, headers, await answer.read())
                return
            asked.begin(answer.status, answer.reason, headers)
            await answer.pipe(asked.write)
            asked.end()
        finally:
            answer.close()


async def main(upstream: str, port: int) -> None:
    """Relay until told to stop."""
    keep_freed_memory()
    loop, stop = asyncio.get_running_loop(), asyncio.Event()
    loop.add_signal_handler(signal.SIGTERM, stop.set)
    sweep = Sweep(loop)
    pool = Pool(sweep, Pause(loop))
    settings = Settings(Relay(upstream, pool), sweep)
    server = await loop.create_server(partial(Connection, settings), "127.0.0.1", port, backlog=4096)
    async with server:
        await stop.wait()
        for connection in list(settings.connections):
            connection.close(at_once=True)
        await pool.close()


if __name__ == "__main__":
    uvloop.run(main(sys.argv[1], int(sys.argv[2])))
