"""Engine control against a real vLLM in its development mode: pauses, caches, sleep, aborts."""

from __future__ import annotations

import asyncio
import json
from collections import Counter
from functools import partial
from typing import TYPE_CHECKING, Any

import httpx2
import pytest

from benchmarks.real_engine import ensure_model
from tests.real.conftest import HIDDEN_SIZE, LAYERS, MAX_MODEL_LEN
from tests.real.support import COMPLETIONS, completion, events, metrics, replicas, until

if TYPE_CHECKING:
    from benchmarks.processes import Server
    from benchmarks.real_engine import RealEngine

pytestmark = pytest.mark.asyncio(loop_scope="session")

PAUSE_S = 2.0


def tokens_in(seed: int, count: int = 200) -> list[int]:
    return [100 + (seed * 7 + index * 13) % 1500 for index in range(count)]


async def ask_and_leave(client: httpx2.AsyncClient, proxy: Server, target: str, body: bytes = b"") -> None:
    """Send a command, and close the connection once it is under way: before that, a later call may overtake it."""
    host = proxy.url.removeprefix("http://")
    reader, writer = await asyncio.open_connection(*host.split(":"))
    said = f"Host: {host}\r\nContent-Type: application/json\r\nContent-Length: {len(body)}"
    head = f"POST {target} HTTP/1.1\r\n{said}\r\n\r\n"
    writer.write(head.encode() + body)
    answer = asyncio.create_task(reader.readline())

    async def is_under_way() -> bool:
        return answer.done() or "call" in await suspended_for(client, proxy)

    await until(is_under_way)
    writer.close()
    await asyncio.gather(answer, writer.wait_closed())


async def suspended_for(client: httpx2.AsyncClient, proxy: Server) -> list[str]:
    (report,) = await replicas(client, proxy.url)
    return list(report["suspended_for"])


def text_of(stream: bytes) -> str:
    """Return the text of a stream: a busy engine puts several tokens into one event."""
    return "".join(choice["text"] for event in events(stream) for choice in event["choices"])


async def test_a_keep_mode_pause_in_mid_generation_costs_nothing(engine: RealEngine, proxy_of_one: Server) -> None:
    """The stream stops, continues, and equals the engine's answer without a proxy and without a pause."""
    body = completion(tokens_in(1), 700)
    async with httpx2.AsyncClient(timeout=60) as client:
        expected = (await client.post(f"{engine.url}{COMPLETIONS}", json=body)).json()["choices"][0]["text"]
        named = {**body, "stream": True, "program_id": "paused"}

        async def is_held() -> bool:
            return bool((await client.get(f"{proxy_of_one.url}/queue")).json()["turns_held_count"] == 1)

        came = b""
        async with client.stream("POST", f"{proxy_of_one.url}{COMPLETIONS}", json=named) as response:
            chunks = response.aiter_raw()
            came += await anext(chunks)
            assert (await client.post(f"{proxy_of_one.url}/pause?mode=keep")).json() == {"status": "paused"}
            assert (await client.get(f"{proxy_of_one.url}/is_paused")).json() == {"is_paused": True}
            assert await suspended_for(client, proxy_of_one) == ["pause"]
            later = asyncio.create_task(
                client.post(f"{proxy_of_one.url}{COMPLETIONS}", json={**completion("w1", 2), "program_id": "late"})
            )
            await until(is_held)
            await asyncio.sleep(PAUSE_S)
            assert (await metrics(client, engine.url))["vllm:num_requests_running"] == 1  # the stream has not ended
            queue = (await client.get(f"{proxy_of_one.url}/queue")).json()
            assert (queue["turns_held_count"], queue["suspended_for"]) == (1, ["pause"])
            assert (await client.post(f"{proxy_of_one.url}/resume")).json() == {"status": "resumed"}
            async for chunk in chunks:
                came += chunk
        assert text_of(came) == expected
        assert (await later).status_code == 200
        await client.post(f"{proxy_of_one.url}/programs/release", json={"all": True})


async def test_a_cache_that_is_reset_through_the_proxy_is_empty_in_the_engine_and_in_the_ledger(
    engine: RealEngine, proxy_of_one: Server
) -> None:
    """The same prompt hits before and misses after."""
    body = {**completion(tokens_in(2, 640), 2), "program_id": "flushed"}
    async with httpx2.AsyncClient(timeout=60) as client:

        async def hit_tokens() -> float:
            before = (await metrics(client, engine.url))["vllm:prefix_cache_hits_total"]
            assert (await client.post(f"{proxy_of_one.url}{COMPLETIONS}", json=body)).status_code == 200
            return (await metrics(client, engine.url))["vllm:prefix_cache_hits_total"] - before

        await hit_tokens()
        assert await hit_tokens() > 500
        answer = await client.post(f"{proxy_of_one.url}/reset_prefix_cache")
        assert (answer.status_code, answer.json()) == (200, {"success": True})
        assert await hit_tokens() == 0
        await client.post(f"{proxy_of_one.url}/programs/release", json={"all": True})


async def test_an_abort_ends_what_runs_and_what_is_held(engine: RealEngine, run_proxy: Any) -> None:
    """Both end with the finish reason abort, in answers of the same shape."""
    body = completion(tokens_in(3), 3000)
    async with (
        run_proxy((engine,), "--policy", "cap", "--policy-arg", "n=1") as proxy,
        httpx2.AsyncClient(timeout=60) as client,
    ):

        async def are_there(turns_count: int) -> bool:
            queue = (await client.get(f"{proxy.url}/queue")).json()
            (report,) = await replicas(client, proxy.url)
            return bool(report["turns_in_flight_count"] + queue["turns_held_count"] == turns_count)

        for _ in range(3):
            asked = []
            for program_id in ("runs", "waits"):
                post = client.post(f"{proxy.url}{COMPLETIONS}", json={**body, "program_id": program_id})
                asked.append(asyncio.create_task(post))
                await until(partial(are_there, len(asked)))
            said = (await client.post(f"{proxy.url}/abort_requests", json={})).json()
            assert said["status"] == "aborted"
            ran, held = [(await each).json() for each in asked]
            assert held["choices"][0]["finish_reason"] == "abort"
            assert held["usage"] == {"prompt_tokens": 200, "total_tokens": 200, "completion_tokens": 0}
            assert set(held) <= set(ran)
            assert set(held["choices"][0]) <= set(ran["choices"][0])
            if ran["choices"][0]["finish_reason"] == "abort":
                assert ran["usage"]["completion_tokens"] < 3000
                return
            # While tokens come faster than its server passes them on, it handles nothing else, such as the abort.
            assert said["aborted"] == 0
        pytest.fail("the engine heard of no abort in time")


async def test_sleep_lasts_until_the_engine_is_awake(proxy_of_one: Server) -> None:
    """A turn that arrives meanwhile is held, and answered afterwards; the sleeping engine is up all the time."""
    async with httpx2.AsyncClient(timeout=60) as client:
        asleep = await client.post(f"{proxy_of_one.url}/sleep?level=1")
        assert (asleep.status_code, asleep.json()) == (200, {"status": "sleeping", "level": 1})
        assert (await client.get(f"{proxy_of_one.url}/is_sleeping")).json() == {"is_sleeping": True}
        waits = asyncio.create_task(client.post(f"{proxy_of_one.url}{COMPLETIONS}", json=completion("w1 w2", 3)))
        await asyncio.sleep(1.0)
        assert not waits.done()
        (report,) = await replicas(client, proxy_of_one.url)
        assert (report["up"], report["suspended_for"]) == (True, ["sleep"])
        assert (await client.post(f"{proxy_of_one.url}/wake_up")).json()["status"] == "awake"
        assert (await waits).status_code == 200


async def test_command_that_a_real_engine_lacks_is_reported(proxy: Server) -> None:
    """New weights without configuration: no 200, the answer of each engine, and turns continue."""
    async with httpx2.AsyncClient(timeout=60) as client:
        answer = await client.post(f"{proxy.url}/update_weights", json={"update_info": {}})
        assert answer.status_code == 500
        assert "weight_transfer_config" in answer.text
        assert (await client.post(f"{proxy.url}{COMPLETIONS}", json=completion("w1", 1))).status_code == 200
        version = await client.post(f"{proxy.url}/update_weight_version", json={"new_version": "step-3"})
        assert version.json() == {"success": True, "new_version": "step-3"}
        assert {report["weight_version"] for report in await replicas(client, proxy.url)} == {"step-3"}


@pytest.mark.parametrize(
    ("call", "undo", "cause"),
    [("/sleep?level=1", "/wake_up", "sleep"), ("/pause?mode=wait", "/resume", "pause")],
    ids=["sleep", "pause"],
)
async def test_no_turn_runs_into_a_command_whose_caller_leaves(
    engine: RealEngine, proxy_of_one: Server, call: str, undo: str, cause: str
) -> None:
    """The trainer gives up under load; the engine does what it was told, and turns wait until that is undone."""
    async with httpx2.AsyncClient(timeout=60) as client:
        answered: list[tuple[int, str]] = []
        over = asyncio.Event()

        async def rollout(number: int) -> None:
            for turn in range(1000):
                if over.is_set():
                    return
                body = {**completion(tokens_in(10 * number + turn, 64), 8), "program_id": f"rollout-{number}"}
                answer = await client.post(f"{proxy_of_one.url}{COMPLETIONS}", json=body)
                choices = answer.json().get("choices") or [{}]
                answered.append((answer.status_code, str(choices[0].get("finish_reason"))))

        async def is_quiet() -> bool:
            held_count = (await client.get(f"{proxy_of_one.url}/queue")).json()["turns_held_count"]
            runs = (await metrics(client, engine.url))["vllm:num_requests_running"]
            return runs == 0 and bool(held_count) and cause in await suspended_for(client, proxy_of_one)

        async with asyncio.TaskGroup() as group:
            for number in range(4):
                group.create_task(rollout(number))
            try:
                await until(lambda: asyncio.sleep(0, len(answered) >= 8))
                await ask_and_leave(client, proxy_of_one, call)
                # Of the four, those whose turn the engine had not begun wait there; this one is late.
                group.create_task(rollout(4))
                await until(is_quiet)
                ran_count = len(answered)
                await asyncio.sleep(PAUSE_S)
                assert len(answered) == ran_count
                assert [cause] == await suspended_for(client, proxy_of_one)
            finally:  # a failure leaves no engine asleep
                enough = len(answered) + 8
                assert (await client.post(f"{proxy_of_one.url}{undo}")).status_code == 200
                await until(lambda: asyncio.sleep(0, len(answered) >= enough))
                over.set()
        ends = Counter(answered)
        assert ends.pop((200, "abort"), 0) <= 4, "what was in flight is aborted by a sleep"
        assert set(ends) <= {(200, "length"), (200, "stop")}
        programs = (await client.get(f"{proxy_of_one.url}/programs")).json()["programs"]
        assert {program["verdict"] for program in programs} <= {"ok", "aborted_by_trainer"}
        await client.post(f"{proxy_of_one.url}/programs/release", json={"all": True})


async def test_no_turn_runs_into_new_weights_whose_caller_leaves(engine: RealEngine, proxy_of_one: Server) -> None:
    """The trainer's call times out under load; each answer is that of the old weights or of the new ones, of no mix."""
    models = [ensure_model(HIDDEN_SIZE, LAYERS, max_model_len=MAX_MODEL_LEN, seed=seed) for seed in (1, 0)]
    body = completion(tokens_in(5, 64), 24)
    async with httpx2.AsyncClient(timeout=120) as client:
        texts: Counter[str] = Counter()
        over = asyncio.Event()

        def weights(number: int) -> dict[str, Any]:
            return {"method": "reload_weights", "kwargs": {"weights_path": str(models[number % 2])}}

        async def update(number: int) -> httpx2.Response:
            return await client.post(f"{proxy_of_one.url}/collective_rpc", json=weights(number))

        async def tell(path: str) -> None:
            assert (await client.post(f"{proxy_of_one.url}{path}")).status_code == 200, path

        async def text(url: str, program_id: str) -> str:
            answer = await client.post(f"{url}{COMPLETIONS}", json={**body, "program_id": program_id})
            assert answer.status_code == 200, answer.text
            return str(answer.json()["choices"][0]["text"])

        async def rollout(number: int) -> None:
            for _ in range(1000):
                if over.is_set():
                    return
                texts[await text(proxy_of_one.url, f"rollout-{number}")] += 1

        expected = set()
        for number in range(2):
            assert (await update(number)).status_code == 200
            await tell("/reset_prefix_cache")
            expected.add(await text(proxy_of_one.url, "alone"))
        assert len(expected) == 2, "the two models differ"
        async with asyncio.TaskGroup() as group:
            for number in range(4):
                group.create_task(rollout(number))
            try:
                for number in range(6):
                    enough = texts.total() + 8
                    await until(lambda enough=enough: asyncio.sleep(0, texts.total() >= enough))
                    await tell("/pause?mode=wait")
                    await ask_and_leave(client, proxy_of_one, "/collective_rpc", json.dumps(weights(number)).encode())
                    await tell("/reset_prefix_cache")
                    await tell("/resume")
            finally:
                over.set()
        assert set(texts) == expected
        await client.post(f"{proxy_of_one.url}/programs/release", json={"all": True})
