"""A standby watches a leader's port, under any report about it and with any listener there."""

from __future__ import annotations

import asyncio

import pytest
import structlog.testing

from thunderagent.scale.leader.watch import RETRY_S, LeaderWatch


def watch(died: list[str]) -> LeaderWatch:
    return LeaderWatch(died.append, lambda: "1-0")


async def test_a_leader_is_dead_once_its_port_is_closed() -> None:
    """This holds even if the listener there had closed each connection at once."""
    died, came, gone = list[str](), asyncio.Event(), asyncio.Event()

    def accept(_: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.close()
        came.set()

    server = await asyncio.start_server(accept, "127.0.0.1", 0)
    owner = f"a http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
    watched = LeaderWatch(lambda each: (died.append(each), gone.set())[0], lambda: "1-0")
    watched.follow(owner)
    async with asyncio.timeout(30):
        await came.wait()
        server.close()
        await gone.wait()
    watched.stop()
    assert died == [owner]


async def test_engine_that_closes_every_connection_is_asked_at_intervals() -> None:
    """A proxy without a server behind it does that."""
    loop, accepted_s, enough = asyncio.get_running_loop(), list[float](), asyncio.Event()

    def accept(_: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        accepted_s.append(loop.time())
        writer.close()
        if len(accepted_s) == 4:
            enough.set()

    server = await asyncio.start_server(accept, "127.0.0.1", 0)
    watched = watch([])
    watched.follow(f"a http://127.0.0.1:{server.sockets[0].getsockname()[1]}")
    async with asyncio.timeout(30):
        await enough.wait()
    watched.stop()
    server.close()
    assert accepted_s[3] - accepted_s[0] > 2 * RETRY_S


@pytest.mark.parametrize("url", ["http://[::1", "http://h:port", "http://h:99999", "http://h", "", "no URL at all"])
async def test_a_leader_without_a_url_is_not_watched(url: str) -> None:
    """Anybody may write its name into the store; its lock ends by itself."""
    watched = watch([])
    watched.follow(f"a {url}")
    assert watched._task is None


async def test_impossible_host_is_an_unreachable_host() -> None:
    """Resolving it raises an error of its own."""
    watched = watch([])
    with structlog.testing.capture_logs() as logs:
        watched.follow(f"a http://{'a' * 70}.:1")
        task = watched._task
        assert task is not None
        await asyncio.wait([task], timeout=3 * RETRY_S)
        assert not task.done()
        watched.stop()
    assert logs == []


async def test_a_leader_whose_port_closes_after_its_connections_is_dead_without_a_rest() -> None:
    """A killed process does that: a connection in between is accepted once more, and cut off."""
    came, was_cut_off, gone = asyncio.Event(), asyncio.Event(), asyncio.Event()

    async def accept(_: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        if not came.is_set():
            came.set()
            await asyncio.sleep(2 * RETRY_S)  # longer than a short connection
        else:
            was_cut_off.set()
            server.close()
        writer.close()

    server = await asyncio.start_server(accept, "127.0.0.1", 0)
    rests_s = list[float]()

    async def rest(rest_s: float) -> None:
        rests_s.append(rest_s)
        await asyncio.sleep(rest_s)

    watched = LeaderWatch(lambda _: gone.set(), lambda: "1-0", rest=rest)
    watched.follow(f"a http://127.0.0.1:{server.sockets[0].getsockname()[1]}")
    async with asyncio.timeout(30):
        await gone.wait()
    watched.stop()
    assert was_cut_off.is_set()
    assert RETRY_S not in rests_s
