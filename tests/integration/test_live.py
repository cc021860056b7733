"""The feeds of a screen that stays open: the summary, the history, the stream of events, and the page itself."""

from __future__ import annotations

import asyncio
import json
from typing import TYPE_CHECKING, Any

import pytest
from aiohttp import web

from tests.integration.support import (
    DEADLINE_S,
    Gate,
    Wire,
    ask,
    cap,
    exchange,
    fake_replica,
    get,
    metrics_of,
    post,
    running_proxy,
    until,
)
from tests.loopback import on_loopback
from thunderagent.proxy.admin.dashboard import HEADERS
from thunderagent.proxy.reading.sse import server_sent
from thunderagent.proxy.watch.event_stream import stream_events

if TYPE_CHECKING:
    from collections.abc import AsyncIterator


class Reader:
    """A reader of a stream of events."""

    def __init__(self, wire: Wire) -> None:
        self._wire = wire
        self._text = ""
        self.comments_count = 0

    async def messages(self) -> AsyncIterator[dict[str, Any]]:
        """Give the data of each event, with its id."""
        while True:
            while "\n\n" in self._text:
                block, self._text = self._text.split("\n\n", 1)
                self.comments_count += block.startswith(":")
                fields = dict(line.split(": ", 1) for line in block.splitlines() if not line.startswith(":"))
                if "data" in fields:
                    yield {**json.loads(fields["data"]), "sse": fields["event"], "id": fields.get("id")}
            async with asyncio.timeout(DEADLINE_S):
                chunk = await self._wire.chunk()
            if not chunk:
                return
            self._text += chunk.decode()

    async def next(self, count: int) -> list[dict[str, Any]]:
        return [message async for message, _ in _zipped(self.messages(), count)]


async def _zipped(messages: AsyncIterator[dict[str, Any]], count: int) -> AsyncIterator[tuple[dict[str, Any], int]]:
    for number in range(count):
        yield await anext(messages), number


async def listen(wire: Wire, query: str = "", *headers: tuple[str, str]) -> Reader:
    wire.send("GET", f"/events{query}", headers)
    answer = await wire.head()
    assert (answer.status, answer.header("Content-Type")) == (200, "text/event-stream")
    return Reader(wire)


async def test_the_summary_counts_what_the_other_reports_list() -> None:
    async with fake_replica() as replica, running_proxy(replica.url, **cap(1)) as proxy:
        await ask(proxy.url, "acting")
        gate = replica.behaviour = Gate()
        held = asyncio.create_task(ask(proxy.url, "held"))
        await until(lambda: proxy.runtime.held_count == 1)
        summary = (await get(proxy.url, "/summary")).json()
        assert (summary["policy"], summary["programs_count"], summary["replicas_up_count"]) == ("cap", 2, 1)
        assert (summary["closing"], summary["sandboxes_on"]) == (False, False)
        assert summary["longest_held_s"] > 0
        now = summary["now"]
        assert (now["active_acting_count"], now["paused_reasoning_count"], now["turns_held_count"]) == (1, 1, 1)
        assert (now["turns_finished_total"], now["prompt_tokens_total"], now["output_tokens_total"]) == (1, 10, 3)
        assert summary["rates"]["turns_per_min"] > 0
        metrics = await metrics_of(proxy.url)
        assert metrics["thunderagent_prompt_tokens_total"] == {(): 10.0}
        assert metrics["thunderagent_cached_tokens_total"] == {(): 4.0}
        await post(proxy.url, "/programs/release", {"program_id": "acting"})
        gate.open()
        assert (await held).status == 200


async def test_the_history_goes_on_where_the_reader_was() -> None:
    async with fake_replica() as replica, running_proxy(replica.url) as proxy:
        history = (await get(proxy.url, "/history")).json()
        assert history["interval_s"] == 1.0
        assert len(history["samples"]) >= 1
        last_s = history["samples"][-1]["at_s"]
        async with asyncio.timeout(DEADLINE_S):
            while not (fresh := (await get(proxy.url, f"/history?since={last_s}")).json()["samples"]):
                await asyncio.sleep(0.05)
        assert all(sample["at_s"] > last_s for sample in fresh)
        assert set(fresh[0]["costs_token_s"]) == {"decode", "prefill", "recompute", "unused", "caching", "queued"}
        for wrong in ("x", "nan", "inf", ""):
            assert (await get(proxy.url, f"/history?since={wrong}")).status == 400


async def test_events_are_heard_as_they_happen() -> None:
    """A listener gets both sides of a turn; a listener of another program gets neither."""
    async with fake_replica() as replica, running_proxy(replica.url, **cap(1)) as proxy:
        async with Wire.open(proxy.url) as all_wire, Wire.open(proxy.url) as one_wire:
            everything = await listen(all_wire)
            one = await listen(one_wire, "?program_id=b&kinds=hold,turn_finished,release")
            await ask(proxy.url, "a")
            held = asyncio.create_task(ask(proxy.url, "b"))
            await until(lambda: proxy.runtime.held_count == 1)
            await post(proxy.url, "/programs/release", {"program_id": "a"})
            await held
            await post(proxy.url, "/programs/release", {"program_id": "b"})
            assert [(m["kind"], m["program_id"]) for m in await everything.next(7)] == [
                ("turn_arrived", "a"),
                ("restore", "a"),
                ("grant", "a"),
                ("turn_finished", "a"),
                ("turn_arrived", "b"),
                ("hold", "b"),
                ("program_released", "a"),
            ]
            messages = await one.next(3)
            assert [message["kind"] for message in messages] == ["hold", "turn_finished", "release"]
            assert messages[0]["reason"] == "no_room"
        await until(lambda: proxy.runtime.held_count == 0)


async def test_a_listener_that_comes_back_misses_nothing() -> None:
    async with fake_replica() as replica, running_proxy(replica.url) as proxy:
        async with Wire.open(proxy.url) as wire:
            reader = await listen(wire)
            await ask(proxy.url, "p")
            last_id = (await reader.next(2))[-1]["id"]
        await ask(proxy.url, "p")
        async with Wire.open(proxy.url) as wire:
            reader = await listen(wire, "", ("Last-Event-ID", last_id))
            kinds = [message["kind"] for message in await reader.next(5)]
            assert kinds == ["grant", "turn_finished", "turn_arrived", "grant", "turn_finished"]


@pytest.mark.parametrize(
    ("query", "headers"),
    [
        ("?kinds=tick", []),
        ("?kinds=hold,,x", []),
        ("?program_id=", []),
        ("?program_id=%00", []),
        ("", [("Last-Event-ID", "rubbish")]),
    ],
)
async def test_a_wrong_wish_to_listen_is_refused(query: str, headers: list[tuple[str, str]]) -> None:
    async with fake_replica() as replica, running_proxy(replica.url) as proxy:
        answer = await exchange(proxy.url, "GET", f"/events{query}", headers)
        assert answer.status == 400
        assert answer.error["message"]


async def test_a_shutdown_ends_the_stream_at_once() -> None:
    """The stream ends properly, so that a listener knows; the shutdown does not wait for it."""
    loop = asyncio.get_running_loop()
    listening = asyncio.Event()

    async def follow(url: str) -> bool:
        async with Wire.open(url) as wire:
            reader = await listen(wire)
            listening.set()
            return [message async for message in reader.messages()] == []

    async with fake_replica() as replica:
        async with running_proxy(replica.url) as proxy:
            following = asyncio.create_task(follow(proxy.url))
            await listening.wait()
            began_s = loop.time()
        assert loop.time() - began_s < DEADLINE_S
        assert await following


async def test_a_silent_stream_is_kept_alive_and_ends_whole() -> None:
    """Comments come while nothing happens, and later events are not lost."""
    queue: asyncio.Queue[bytes | None] = asyncio.Queue()

    async def follow(request: web.Request) -> web.StreamResponse:
        return await stream_events(request, queue.get, first=b": first\n\n", heartbeat_s=0.02)

    app = web.Application()
    app.router.add_get("/", follow)
    async with on_loopback(app) as url, Wire.open(url) as wire:
        wire.send("GET", "/")
        await wire.head()
        assert [await wire.chunk() for _ in range(3)] == [b": first\n\n", *[b": still here\n\n"] * 2]
        queue.put_nowait(server_sent(b"{}", kind="hold", event_id="a-1"))
        while (chunk := await wire.chunk()) == b": still here\n\n":
            pass
        assert chunk == b"id: a-1\nevent: hold\ndata: {}\n\n"
        queue.put_nowait(None)
        while (chunk := await wire.chunk()) == b": still here\n\n":
            pass
        assert chunk == b""


async def test_programs_are_searched_and_sorted() -> None:
    async with fake_replica() as replica, running_proxy(replica.url) as proxy:
        for name, turns_count in (("swe/b", 2), ("SWE/a", 3), ("other", 1)):
            for _ in range(turns_count):
                await ask(proxy.url, name)

        async def ids(query: str) -> list[str]:
            page = (await get(proxy.url, f"/programs?{query}")).json()
            assert page["total"] == len(page["programs"])
            return [program["program_id"] for program in page["programs"]]

        assert await ids("search=swe") == ["swe/b", "SWE/a"]
        assert await ids("search=%2FA") == ["SWE/a"]
        assert await ids("search=nobody") == []
        assert await ids("sort=-turns") == ["SWE/a", "swe/b", "other"]
        assert await ids("sort=id") == ["SWE/a", "other", "swe/b"]
        assert await ids("sort=opened&search=swe") == ["swe/b", "SWE/a"]
        assert len(await ids(f"replica_id={replica.replica_id}")) == 3
        assert await ids("replica_id=nowhere") == []
        for sort in ("claim", "-held", "replica", "-state"):
            assert len(await ids(f"sort={sort}")) == 3
        assert (await get(proxy.url, "/programs?sort=colour")).status == 400
        assert (await get(proxy.url, "/programs?sort=-")).status == 400


async def test_a_story_tells_when_its_turns_began_and_which_still_run() -> None:
    """That is enough to draw it: the spans of turns that ended, and those of turns that still run."""
    async with fake_replica() as replica, running_proxy(replica.url, **cap(1)) as proxy:
        await ask(proxy.url, "p")
        gate = replica.behaviour = Gate()
        turn = asyncio.create_task(ask(proxy.url, "p"))
        await replica.call(1)
        report = (await get(proxy.url, "/programs/p")).json()
        ended = report["story"][-1]
        assert ended["what"] == "finished"
        assert ended["began_ago_s"] >= ended["ago_s"]
        (running,) = report["turns"]
        assert running["replica_id"] == replica.replica_id
        assert running["arrived_ago_s"] >= running["granted_ago_s"] >= 0
        assert running["started_ago_s"] is None
        gate.open()
        await turn
        assert (await get(proxy.url, "/programs/p")).json()["turns"] == []


async def test_the_page_is_served_with_what_it_is_made_of() -> None:
    """Each file that the page names exists, may load nothing from elsewhere, and is not sent twice."""
    async with fake_replica() as replica, running_proxy(replica.url) as proxy:
        page = await get(proxy.url, "/dashboard")
        assert page.header("Content-Type") == "text/html; charset=utf-8"
        assert "default-src 'none'" in (page.header("Content-Security-Policy") or "")
        for name in ("style.css", "app.js", "theme.js", "charts.js", "timeline.js", "icon.svg"):
            answer = await get(proxy.url, f"/dashboard/{name}")
            assert answer.status == 200, name
            assert all(answer.header(header) == value for header, value in HEADERS.items())
            again = await exchange(
                proxy.url, "GET", f"/dashboard/{name}", [("If-None-Match", answer.header("ETag") or "")]
            )
            assert (again.status, again.body) == (304, b"")
        for wrong, status in (
            *(("x.js", 404), ("__init__.py", 404), ("..%2Fadmin.py", 404)),
            *(("%2e%2e/app.py", 400), ("index.html%00", 400)),
        ):
            assert (await get(proxy.url, f"/dashboard/{wrong}")).status == status, wrong
        redirect = await get(proxy.url, "/dashboard/")
        assert (redirect.status, redirect.header("Location")) == (308, "../dashboard")
