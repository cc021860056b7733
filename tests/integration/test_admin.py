"""The proxy's reports about itself."""

from __future__ import annotations

import asyncio
import contextlib
import re
from time import monotonic

import pytest
from prometheus_client.parser import text_string_to_metric_families

from tests.integration.support import (
    DONE,
    USAGE,
    Gate,
    answers,
    ask,
    cap,
    exchange,
    fake_replica,
    get,
    metrics_of,
    post,
    running_proxy,
    serve,
    streams,
    turn,
    until,
    word,
)
from thunderagent.proxy.gate.keys import mint_key

SECRET = "only-the-programs-name"


async def test_health_is_the_processs_and_ready_the_replicas() -> None:
    """The process is alive without replicas; it is ready while at least one replica is up."""
    async with fake_replica() as replica:
        await replica.stop()
        async with running_proxy(replica.url, up=0) as proxy:
            assert (await get(proxy.url, "/health")).status == 200
            answer = await get(proxy.url, "/ready")
            assert (answer.status, answer.json()["ready"]) == (503, False)
            assert "no replica" in answer.json()["why"]
            await replica.start()
            await proxy.up(1)
            answer = await get(proxy.url, "/ready")
            assert (answer.status, answer.json()["ready"]) == (200, True)
            await replica.stop()
            await proxy.up(0)
            assert (await get(proxy.url, "/ready")).status == 503
            assert (await get(proxy.url, "/health")).status == 200


async def test_an_unhealthy_replica_is_not_ready() -> None:
    """A replica that answers with failures goes down after the configured number of them."""
    async with fake_replica() as replica, running_proxy(replica.url) as proxy:
        replica.healthy = False
        await proxy.up(0)
        (report,) = (await get(proxy.url, "/replicas")).json()["replicas"]
        assert (report["up"], report["why_down"]) == (False, "/health answered 503")
        replica.healthy = True
        await proxy.up(1)


async def test_programs_are_listed_in_pages() -> None:
    """Every program is on exactly one page, the oldest first."""
    async with fake_replica() as replica, running_proxy(replica.url) as proxy:
        names = [f"program/{number}" for number in range(25)]
        for name in names:
            await ask(proxy.url, name)
        seen, offset = [], 0
        while offset is not None:
            page = (await get(proxy.url, f"/programs?limit=10&offset={offset}")).json()
            assert page["total"] == 25
            seen += [program["program_id"] for program in page["programs"]]
            offset = page["next_offset"]
        assert seen == names
        assert (await get(proxy.url, "/programs?offset=1000")).json()["programs"] == []


async def test_programs_are_filtered_by_status_and_phase() -> None:
    async with fake_replica() as replica, running_proxy(replica.url, **cap(2)) as proxy:
        await ask(proxy.url, "acting")
        gate = replica.behaviour = Gate()
        reasoning = asyncio.create_task(ask(proxy.url, "reasoning"))
        await replica.call(1)
        held = asyncio.create_task(ask(proxy.url, "held"))
        await until(lambda: proxy.runtime.held_count == 1)
        for query, expected in (
            ("", ["acting", "reasoning", "held"]),
            ("?status=active", ["acting", "reasoning"]),
            ("?status=paused", ["held"]),
            ("?phase=reasoning", ["reasoning", "held"]),
            ("?phase=acting", ["acting"]),
            ("?status=active&phase=reasoning", ["reasoning"]),
            ("?status=paused&phase=acting", []),
        ):
            page = (await get(proxy.url, f"/programs{query}")).json()
            assert [program["program_id"] for program in page["programs"]] == expected, query
            assert page["total"] == len(expected)
        gate.open()
        await post(proxy.url, "/programs/release", {"program_id": "acting"})
        assert {(await each).status for each in (reasoning, held)} == {200}


@pytest.mark.parametrize(
    "query",
    ["limit=x", "limit=-1", "limit=0", "offset=1.5", "status=busy", "phase=", "offset=%C2%B2", "offset=" + "9" * 5000],
)
async def test_a_wrong_query_is_refused(query: str) -> None:
    async with fake_replica() as replica, running_proxy(replica.url) as proxy:
        answer = await exchange(proxy.url, "GET", f"/programs?{query}")
        assert answer.status == 400
        assert answer.error["type"] == "invalid_request_error"


async def test_a_program_tells_its_story() -> None:
    """The story tells what happened, why and where, with the claim: enough to explain a hold."""
    async with fake_replica() as replica, running_proxy(replica.url, **cap(1)) as proxy:
        await ask(proxy.url, "first")
        held = asyncio.create_task(ask(proxy.url, "some/one"))
        await until(lambda: proxy.runtime.held_count == 1)
        report = (await get(proxy.url, "/programs/some/one")).json()
        assert (report["status"], report["phase"], report["hold_reason"]) == ("paused", "reasoning", "no_room")
        assert report["held_for_s"] > 0
        await post(proxy.url, "/programs/release", {"program_id": "first"})
        await held
        report = (await get(proxy.url, "/programs/some%2Fone")).json()
        assert [(entry["what"], entry["why"]) for entry in report["story"]] == [
            ("hold", "no_room"),
            ("restore", "fits"),
            ("finished", ""),
        ]
        assert {entry["replica_id"] for entry in report["story"][1:]} == {replica.replica_id}
        assert (report["status"], report["phase"], report["turn_count"]) == ("active", "acting", 1)
        assert report["prompt_tokens_total"] == USAGE["prompt_tokens"]
        assert report["context_tokens"] == USAGE["total_tokens"]


async def test_a_program_says_why_it_waits_and_what_it_holds() -> None:
    """A waiting program shows what must happen; an acting one, how long its memory is worth holding; never both."""
    async with fake_replica() as replica, running_proxy(replica.url, **cap(1)) as proxy:
        await ask(proxy.url, "first")
        held = asyncio.create_task(ask(proxy.url, "second"))
        await until(lambda: proxy.runtime.held_count == 1)
        report = (await get(proxy.url, "/programs/first")).json()
        assert report["waiting"] is None
        assert report["holding"].keys() == {"tool", "for_s", "hold_until_in_s"}
        assert (report["holding"]["tool"], report["holding"]["hold_until_in_s"]) == ("", None)
        report = (await get(proxy.url, "/programs/second")).json()
        assert report["holding"] is None
        waiting = report["waiting"]
        assert (waiting["reason"], waiting["ahead_count"]) == ("no_room", 0)
        assert 0 < waiting["for_s"] <= report["held_for_s"]
        assert waiting["claim_tokens"] == report["claim_tokens"]
        (room,) = waiting["replicas"]
        assert room["replica_id"] == replica.replica_id
        assert room["free_tokens"] == 1_000_000 - USAGE["total_tokens"]
        assert waiting["what_must_happen"].startswith(f"the policy must let it in: it fits on {replica.replica_id}")
        await post(proxy.url, "/programs/release", {"program_id": "first"})
        await held


async def test_waiting_program_is_told_how_much_memory_is_missing() -> None:
    """The default policy, with a replica that is too small for two programs."""
    async with fake_replica(capacity_tokens=1000) as replica, running_proxy(replica.url) as proxy:
        gate = replica.behaviour = Gate()
        first = asyncio.create_task(ask(proxy.url, "first", content="a" * 3000))
        await replica.call()
        held = asyncio.create_task(ask(proxy.url, "second", content="b" * 3000))
        await until(lambda: proxy.runtime.held_count == 1)
        waiting = (await get(proxy.url, "/programs/second")).json()["waiting"]
        (room,) = waiting["replicas"]
        assert room["missing_tokens"] == room["needed_tokens"] + room["kept_tokens"] - room["free_tokens"] > 0
        assert waiting["what_must_happen"].startswith(f"{room['missing_tokens']} tokens must become free on")
        gate.open()
        await first
        await post(proxy.url, "/programs/release", {"program_id": "first"})
        assert (await held).status == 200


async def test_a_program_that_is_not_there_is_a_404() -> None:
    async with fake_replica() as replica, running_proxy(replica.url) as proxy:
        answer = await get(proxy.url, "/programs/nobody")
        assert (answer.status, answer.error["code"]) == (404, "not_found")


async def test_replicas_report_ledger_and_engine() -> None:
    async with fake_replica() as one, fake_replica() as other, running_proxy(one.url, other.url) as proxy:
        await other.stop()
        await proxy.up(1)
        await ask(proxy.url, "a")
        report = (await get(proxy.url, "/replicas")).json()
        assert report["policy"] == "breakeven"
        first, second = report["replicas"]
        assert (first["replica_id"], first["url"], first["up"]) == (one.replica_id, one.url, True)
        assert (first["capacity_tokens"], first["demand_tokens"]) == (1_000_000, USAGE["total_tokens"])
        assert (first["capacity_ratio"], first["limit_tokens"]) == (1.0, 1_000_000)
        assert first["shared_tokens"] == 0
        assert first["growth_tokens"] >= 0
        assert (first["acting_count"], first["reasoning_count"]) == (1, 0)
        assert first["engine"]["running_count"] == 2
        assert set(first["costs_token_s"]) == {"decode", "prefill", "recompute", "unused", "caching", "queued"}
        assert (second["up"], second["why_down"]) == (False, "connection refused")


async def test_a_replica_of_unknown_capacity_has_no_limit() -> None:
    """The API says null, since JSON has no infinity; the metrics have no sample."""
    async with fake_replica() as replica:
        replica.metrics = None
        async with running_proxy(replica.url) as proxy:
            (report,) = (await get(proxy.url, "/replicas")).json()["replicas"]
            assert (report["capacity_tokens"], report["limit_tokens"]) == (None, None)
            samples = await metrics_of(proxy.url)
            assert "thunderagent_replica_limit_tokens" not in samples
            assert samples["thunderagent_replica_shared_tokens"] == {(replica.replica_id,): 0}


async def test_a_report_on_a_replica_that_never_was_up_changes_nothing() -> None:
    """It may join another pool later, and would leave its account behind."""
    async with fake_replica() as replica:
        replica.healthy = False
        async with running_proxy(replica.url, up=0) as proxy:
            (report,) = (await get(proxy.url, "/replicas")).json()["replicas"]
            assert (report["up"], report["demand_tokens"], report["hit_ratio"]) == (False, 0, 0.0)
            assert replica.replica_id not in proxy.runtime.scheduler.ledger.accounts


async def test_program_outside_the_admission_window_stands_in_the_queue_and_says_so() -> None:
    """It stands behind all that wait for room, with the reason; its story says what must happen."""
    gate = Gate()
    config = {"policy": "passthrough", "admission": "window", "policy_args": {"admission.n": "1"}}
    async with fake_replica(gate) as replica, running_proxy(replica.url, **config) as proxy:
        first = asyncio.create_task(ask(proxy.url, "first"))
        await until(lambda: replica.calls)
        second = asyncio.create_task(ask(proxy.url, "second"))
        await until(lambda: proxy.runtime.held_count)
        queue = (await get(proxy.url, "/queue")).json()
        assert (queue["waiting_count"], queue["unadmitted_count"]) == (1, 1)
        assert [(each["program_id"], each["hold_reason"]) for each in queue["waiting"]] == [("second", "admission")]
        waits = (await get(proxy.url, "/programs/second")).json()["waiting"]
        assert waits["what_must_happen"] == ("a place must become free: 1 program is admitted (admission window)")
        assert (await get(proxy.url, "/summary")).json()["longest_held_s"] >= 0
        gate.open()
        await first
        await post(proxy.url, "/programs/release", {"program_id": "first"})
        assert (await second).status == 200


async def test_the_queue_lists_who_waits_and_why() -> None:
    async with fake_replica() as replica, running_proxy(replica.url, **cap(1)) as proxy:
        await ask(proxy.url, "first")
        held = []
        for name in ("second", "third"):
            held.append(asyncio.create_task(ask(proxy.url, name)))
            await until(lambda: proxy.runtime.held_count == len(held))
        report = (await get(proxy.url, "/queue")).json()
        assert [program["program_id"] for program in report["waiting"]] == ["second", "third"]
        assert (report["waiting_count"], report["turns_held_count"]) == (2, 2)
        assert all(program["hold_reason"] for program in report["waiting"])
        limited = (await get(proxy.url, "/queue?limit=1")).json()
        assert (len(limited["waiting"]), limited["waiting_count"]) == (1, 2)
        for name in ("first", "second"):
            await post(proxy.url, "/programs/release", {"program_id": name})
            await until(lambda: proxy.runtime.leases_count == 0)
        await asyncio.gather(*held)


FAMILIES = {
    "thunderagent_programs": ("phase", "status"),
    "thunderagent_turns_held": (),
    "thunderagent_leases_active": (),
    "thunderagent_turns_total": ("outcome",),
    "thunderagent_decisions_total": ("decision", "reason"),
    "thunderagent_cost_token_seconds_total": ("replica", "term"),
    "thunderagent_queued_token_seconds_total": ("replica",),
    "thunderagent_replica_idle_while_held_seconds_total": ("replica",),
    "thunderagent_demand_tokens": ("replica",),
    "thunderagent_capacity_tokens": ("replica",),
    "thunderagent_replica_limit_tokens": ("replica",),
    "thunderagent_replica_shared_tokens": ("replica",),
    "thunderagent_break_even_seconds": ("replica",),
    "thunderagent_goodput_turns_total": ("alpha",),
    "thunderagent_goodput_programs_total": ("alpha",),
    "thunderagent_judged_turns_total": (),
    "thunderagent_judged_programs_total": (),
    "thunderagent_prefill_seconds_per_token": (),
    "thunderagent_hold_seconds_count": (),
    "thunderagent_added_latency_seconds_count": (),
    "thunderagent_event_loop_lag_seconds_count": (),
    "thunderagent_turn_duration_seconds_count": ("replica", "status"),
}


async def test_latencies_are_counted_by_replica_and_status() -> None:
    """Streams count by first token and time between tokens, every turn by its duration, until its replica goes."""
    stream = streams(word("one"), word("two"), word("three"), DONE)
    async with fake_replica(stream) as replica, running_proxy(replica.url, retries_count=0) as proxy:
        name = replica.replica_id
        assert (await ask(proxy.url, "a", stream=True)).status == 200
        replica.behaviour = answers({"error": {}}, status="422 Odd")
        assert (await ask(proxy.url, "b")).status == 422
        await until(lambda: proxy.runtime.leases_count == 0)
        samples = await metrics_of(proxy.url)
        assert samples["thunderagent_time_to_first_token_seconds_count"] == {(name, "200"): 1}
        assert samples["thunderagent_time_between_tokens_seconds_count"] == {(name, "200"): 1}
        assert samples["thunderagent_turn_duration_seconds_count"] == {(name, "200"): 1, (name, "422"): 1}
        first_s = samples["thunderagent_time_to_first_token_seconds_sum"][name, "200"]
        between_s = samples["thunderagent_time_between_tokens_seconds_sum"][name, "200"]
        assert 0 < first_s + 3 * between_s <= samples["thunderagent_turn_duration_seconds_sum"][name, "200"]
        assert (await exchange(proxy.url, "DELETE", f"/replicas/{name}?force=1")).status == 200
        assert "thunderagent_turn_duration_seconds_count" not in await metrics_of(proxy.url)


async def test_metrics_have_their_names_and_labels_and_no_program() -> None:
    """They parse, hold everything that is promised, and never name a program."""
    async with fake_replica() as replica, running_proxy(replica.url, **cap(1)) as proxy:
        await ask(proxy.url, SECRET)
        held = asyncio.create_task(ask(proxy.url, f"{SECRET}-2"))
        await until(lambda: proxy.runtime.held_count == 1)
        answer = await get(proxy.url, "/metrics")
        assert re.match(r"text/plain; version=[\d.]+; charset=utf-8", answer.header("Content-Type") or "")
        text = answer.body.decode()
        assert SECRET not in text
        labels: dict[str, set[tuple[str, ...]]] = {}
        for family in text_string_to_metric_families(text):
            assert family.documentation
            for sample in family.samples:
                labels.setdefault(sample.name, set()).add(tuple(sorted(sample.labels)))
        for name, expected in FAMILIES.items():
            assert labels[name] == {expected}, name
        samples = await metrics_of(proxy.url)
        for kind in ("turns", "programs"):
            assert set(samples[f"thunderagent_goodput_{kind}_total"]) == {("1",), ("2",), ("3",)}
        await post(proxy.url, "/programs/release", {"program_id": SECRET})
        await held


async def test_metrics_count_what_happens() -> None:
    """A held turn, a lease, a finished turn, their programs and claims are each counted in the right place."""
    began_s = monotonic()
    async with fake_replica() as replica, running_proxy(replica.url, **cap(1)) as proxy:
        await ask(proxy.url, "first")
        held = asyncio.create_task(ask(proxy.url, "second"))
        await until(lambda: proxy.runtime.held_count == 1)
        samples = await metrics_of(proxy.url)
        assert samples["thunderagent_turns_held"][()] == 1
        assert samples["thunderagent_programs"]["acting", "active"] == 1
        assert samples["thunderagent_programs"]["reasoning", "paused"] == 1
        assert samples["thunderagent_turns_total"]["finished",] == 1
        assert samples["thunderagent_decisions_total"]["hold", "no_room"] == 1
        assert samples["thunderagent_decisions_total"]["grant", "fits"] == 1
        assert samples["thunderagent_demand_tokens"][replica.replica_id,] == USAGE["total_tokens"]
        assert samples["thunderagent_capacity_tokens"][replica.replica_id,] == 1_000_000
        assert samples["thunderagent_replica_limit_tokens"][replica.replica_id,] == 1_000_000
        assert samples["thunderagent_prefill_seconds_per_token"][()] > 0
        assert samples["thunderagent_break_even_seconds"][replica.replica_id,] == 0  # nothing is held for a guess
        assert "thunderagent_median_residence_seconds" not in samples
        assert samples["thunderagent_cost_token_seconds_total"][replica.replica_id, "caching"] > 0
        gate = replica.behaviour = Gate()
        await post(proxy.url, "/programs/release", {"program_id": "first"})
        await replica.call(1)
        samples = await metrics_of(proxy.url)
        assert (samples["thunderagent_leases_active"][()], samples["thunderagent_turns_held"][()]) == (1, 0)
        assert samples["thunderagent_median_residence_seconds"][()] > 0
        gate.open()
        await held
        samples = await metrics_of(proxy.url)
        assert samples["thunderagent_hold_seconds_count"][()] == 2
        assert samples["thunderagent_hold_seconds_sum"][()] > 0
        assert samples["thunderagent_added_latency_seconds_count"][()] == 2
        assert (
            samples["thunderagent_added_latency_seconds_sum"][()] + samples["thunderagent_hold_seconds_sum"][()]
            < monotonic() - began_s
        )


@pytest.mark.parametrize("target", ["/", "/health", "/ready", "/metrics", "/v1/models"])
async def test_a_head_request_is_answered_without_a_body(target: str) -> None:
    """Load balancers probe with HEAD."""
    async with fake_replica() as replica, running_proxy(replica.url) as proxy:
        replica.behaviour = answers({"data": [{"id": "m"}]})
        answer = await exchange(proxy.url, "HEAD", target)
        assert (answer.status, answer.body) == (200, b"")


async def test_the_ready_line_names_the_policy_with_its_parts() -> None:
    """The line names it as the report of the replicas does."""
    async with fake_replica() as replica, serve("--backends", replica.url, "--global-policy", "reassign") as server:
        assert server.ready_line == f"thunderagent ready at {server.url}: policy breakeven+global_policy=reassign\n"
        assert (await get(server.url, "/replicas")).json()["policy"] == "breakeven+global_policy=reassign"


async def test_proxy_is_not_ready_while_no_replica_is_up() -> None:
    """The first line says so, and another one says when one is."""
    async with fake_replica() as replica, contextlib.AsyncExitStack() as stack:
        await replica.stop()
        server = await stack.enter_async_context(serve("--backends", replica.url))
        assert server.ready_line.startswith(
            f"thunderagent not yet ready at {server.url}: policy breakeven; no replica "
        )
        await replica.start()
        assert server.process.stdout is not None
        line = await server.process.stdout.readline()
        assert line.decode() == f"thunderagent ready at {server.url}: policy breakeven\n"


@pytest.mark.parametrize(
    ("accept", "status", "location"),
    [("*/*", 200, None), ("application/json", 200, None), ("text/html,application/xhtml+xml;q=0.9", 302, "dashboard")],
)
async def test_the_root_says_what_this_is(accept: str, status: int, location: str | None) -> None:
    """It leads a browser to the dashboard."""
    async with fake_replica() as replica, running_proxy(replica.url) as proxy:
        answer = await exchange(proxy.url, "GET", "/", [("Accept", accept)])
        assert (answer.status, answer.header("Location")) == (status, location)
        assert ("/p/PROGRAM_ID/v1" in answer.body.decode()) == (status == 200)
        assert replica.calls == []


@pytest.mark.parametrize(
    ("target", "right"),
    [
        ("/chat/completions", "/v1/chat/completions; let the client's base URL end in /v1"),
        ("/p/a/chat/completions", "/v1/chat/completions; let the client's base URL end in /v1"),
        ("/messages", "/v1/messages; let the client's base URL end in /v1"),
        ("/embeddings", "/v1/embeddings; let"),
    ],
)
async def test_a_base_url_without_v1_gets_a_hint(target: str, right: str) -> None:
    """It is 404, and no engine is asked; a data key is told, too."""
    key, line = mint_key("agents")
    async with fake_replica() as replica, running_proxy(replica.url, api_keys=[line]) as proxy:
        answer = await post(proxy.url, target, turn(), ("Authorization", f"Bearer {key}"))
        assert answer.status == 404
        assert right in answer.body.decode()
        assert (await post(proxy.url, target, turn())).status == 401
        assert [call.path for call in replica.calls if "completions" in call.path or "messages" in call.path] == []
