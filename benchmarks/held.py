"""Hold ten thousand turns of a megabyte that cannot run: what the proxy keeps of them, what it refuses, what is lost.

Grants are suspended, as for new weights, so every turn is held. Past the bound of bytes a turn must get 503 at once.
Then grants resume, and each held turn must get its whole answer.
"""

from __future__ import annotations

import argparse
import asyncio
import json
from collections import Counter
from contextlib import asynccontextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any

import aiohttp

from benchmarks.instant import instant_engine
from benchmarks.machine import save_results
from benchmarks.processes import resident_mb, thunderagent
from thunderagent.serving.process import raise_file_limit

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

SENDING_AT_A_TIME = 32
"""Number of clients that send bodies at once; all of them stay and wait for their answers."""

SETTLE_S = 2.0


class Turns:
    """The clients."""

    def __init__(self, client: aiohttp.ClientSession, url: str, body: bytes) -> None:
        """Send the same body for every program."""
        self._client = client
        self._url = f"{url}/v1/chat/completions"
        self._body = body
        self._may_send = asyncio.Semaphore(SENDING_AT_A_TIME)
        self.statuses: Counter[int] = Counter()
        self.without_retry_after_count = 0

    async def take(self, number: int) -> None:
        """Send one turn, and record its result."""
        length = str(len(self._body))
        headers = {"X-Program-ID": f"p{number}", "Content-Type": "application/json", "Content-Length": length}
        async with self._client.post(self._url, data=self._sent(), headers=headers) as answer:
            if answer.status == 200:
                await answer.json()
            self.statuses[answer.status] += 1
            if answer.status not in (200, 503):
                print(answer.status, await answer.text())
            self.without_retry_after_count += answer.status == 503 and "Retry-After" not in answer.headers

    async def _sent(self) -> AsyncIterator[bytes]:
        async with self._may_send:
            yield self._body


async def metric(client: aiohttp.ClientSession, url: str, name: str) -> float:
    """Return a metric without labels."""
    async with client.get(f"{url}/metrics") as answer:
        lines = (await answer.text()).splitlines()
    return next(float(line.split()[1]) for line in lines if line.startswith(f"{name} "))


@asynccontextmanager
async def watched_mb(pid: int) -> AsyncIterator[list[float]]:
    """Sample a process's memory ten times a second during the block."""
    seen_mb: list[float] = [resident_mb(pid)]

    async def watch() -> None:
        while True:
            await asyncio.sleep(0.1)
            seen_mb.append(resident_mb(pid))

    task = asyncio.create_task(watch())
    try:
        yield seen_mb
    finally:
        task.cancel()


async def measure(args: argparse.Namespace) -> dict[str, Any]:
    """Hold turns, have some refused, then drain them."""
    raise_file_limit()
    content = "x" * args.body_bytes
    body = json.dumps({"model": "instant", "messages": [{"role": "user", "content": content}]}).encode()
    timeout = aiohttp.ClientTimeout(total=None)
    connector = aiohttp.TCPConnector(limit=0, force_close=True)
    with TemporaryDirectory() as folder:
        log = Path(folder, "proxy.log")
        async with (
            instant_engine() as engine_port,
            thunderagent(
                *("serve", "--port", "0", "--backends", f"http://127.0.0.1:{engine_port}", "--policy", "passthrough"),
                *("--max-held-bytes", str(args.max_held_bytes), "--log-level", "error"),
                *("--no-replica-limit-s", "3600", "--poll-silence-limit-s", "3600"),  # the engine shares our core
                log_path=log,
            ) as proxy,
            aiohttp.ClientSession(connector=connector, timeout=timeout) as client,
            watched_mb(proxy.process.pid) as seen_mb,
        ):
            idle_mb = seen_mb[0]
            async with client.post(f"{proxy.url}/weight_sync/begin") as answer:
                assert answer.status == 200, await answer.text()
            turns = Turns(client, proxy.url, body)
            tasks = [asyncio.create_task(turns.take(number)) for number in range(args.turns)]
            held_count = -1.0
            while turns.statuses[503] + held_count != args.turns:
                await asyncio.sleep(SETTLE_S)
                held_count = await metric(client, proxy.url, "thunderagent_turns_held")
                print(f"{held_count:,.0f} held, {turns.statuses[503]:,} refused, {seen_mb[-1]:,.0f} MB", flush=True)
            held_bytes = await metric(client, proxy.url, "thunderagent_held_body_bytes")
            async with client.post(f"{proxy.url}/weight_sync/end") as answer:
                assert answer.status == 200, await answer.text()
            await asyncio.gather(*tasks)
            return {
                "turns_count": args.turns,
                "body_bytes": len(body),
                "max_held_bytes": args.max_held_bytes,
                "held_count": int(held_count),
                "held_bytes": int(held_bytes),
                "refused_count": turns.statuses[503],
                "refused_without_retry_after_count": turns.without_retry_after_count,
                "answered_count": turns.statuses[200],
                "lost_count": args.turns - turns.statuses[503] - turns.statuses[200],
                "held_after_count": int(await metric(client, proxy.url, "thunderagent_turns_held")),
                "held_after_bytes": int(await metric(client, proxy.url, "thunderagent_held_body_bytes")),
                "idle_mb": round(idle_mb),
                "most_mb": round(max(seen_mb)),
            }


def main() -> None:
    """Measure and save the figures."""
    parser = argparse.ArgumentParser(prog="scripts/bench held", description=__doc__)
    parser.add_argument("--turns", type=int, default=10_000)
    parser.add_argument("--body-bytes", type=int, default=1_000_000)
    parser.add_argument("--max-held-bytes", type=int, default=2**30)
    args = parser.parse_args()
    figures = asyncio.run(measure(args))
    print(json.dumps(figures, indent=2))
    print(save_results("held", {"figures": figures}))


if __name__ == "__main__":
    main()
