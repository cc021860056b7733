"""The requests of trainers and agent frameworks over the wire, in the order of their sources.

Each page of docs/integrations without a runnable program names the versions that were read. The calls here equal those
in the sources: paths, headers, fields, what is read of answers, and who retries.
"""

from __future__ import annotations

import asyncio
import json
import re
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import aiohttp
import httpx2
import pytest

from scripts.docs_site import whole
from tests.integration.support import (
    CHAT,
    DEADLINE_S,
    Answer,
    Gate,
    Wire,
    answers,
    ask,
    cap,
    command,
    fake_replica,
    get,
    post,
    running_proxy,
    serve,
    turn,
    until,
)
from tests.integration.trained_engine import PARTIAL_COUNT, continuation, trained_engines
from tests.loopback import free_ports

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    from tests.integration.support import Header, RunningProxy

PAGES = Path(__file__).parents[2] / "docs" / "integrations"


async def worker_urls(proxy: RunningProxy) -> list[str]:
    """Return the URL of each replica at the proxy, as its facade lists them."""
    return [worker["url"] for worker in (await get(proxy.url, "/workers")).json()["workers"]]


async def program(proxy: RunningProxy, program_id: str) -> dict[str, Any]:
    report: dict[str, Any] = (await get(proxy.url, f"/programs/{program_id}")).json()
    return report


# --- slime


@dataclass
class Sample:
    """The part of slime's sample that is needed here."""

    session_id: str
    prompt: list[int]
    response: list[int] = field(default_factory=list)
    status: str = "pending"

    @property
    def body(self) -> bytes:
        """The payload of `sglang_rollout.generate`."""
        sampling = {"temperature": 1.0, "max_new_tokens": 8 - len(self.response), "no_stop_trim": True}
        payload = {"sampling_params": sampling, "return_logprob": True, "input_ids": self.prompt + self.response}
        return json.dumps(payload).encode()

    async def generate(self, proxy: RunningProxy) -> None:
        """Request the rest of the response."""
        answer = await post(proxy.url, "/generate", self.body, ("X-SMG-Routing-Key", self.session_id))
        assert answer.status == 200
        meta_info = answer.json()["meta_info"]
        self.response += [token for _, token, _ in meta_info["output_token_logprobs"]]
        self.status = meta_info["finish_reason"]["type"]


async def abort_servers_until_idle(proxy: RunningProxy) -> None:
    """Do what slime's function of this name does, without its wait of 3 s."""

    async def until_idle(client: httpx2.AsyncClient, url: str) -> None:
        for _ in range(100):
            (await client.post(f"{url}/abort_request", json={"abort_all": True})).raise_for_status()
            load = (await client.get(f"{url}/v1/loads?include=core,disagg,queues")).raise_for_status().json()
            if not sum(rank["num_total_reqs"] for rank in load["loads"]):
                return
        raise AssertionError(load)

    async with httpx2.AsyncClient(timeout=DEADLINE_S) as client:
        await asyncio.gather(*(until_idle(client, url) for url in await worker_urls(proxy)))


async def test_slime_finishes_partial_samples_in_the_next_rollout() -> None:
    """Aborted samples, running and held, continue from their output: the same tokens, the same programs."""
    samples = [Sample(f"6f1c-{number}", [1, 2, 3 + number]) for number in range(4)]
    limits = {"idle_limit_s": 0.2, "forget_limit_s": 0.6}
    async with trained_engines(gate_open=False, listed=False, **cap(2), **limits) as (proxy, engines, replicas):
        for replica in replicas:  # `SGLangEngine._init_normal`
            registered = await post(proxy.url, "/workers", {"url": replica.url, "worker_type": "regular"})
            assert registered.status < 300
        await proxy.up(2)
        rollout = [asyncio.create_task(sample.generate(proxy)) for sample in samples]
        await until(lambda: proxy.runtime.held_count == 2 and sum(engine.running_count for engine in engines) == 2)
        await abort_servers_until_idle(proxy)
        await asyncio.gather(*rollout)
        assert {sample.status for sample in samples} == {"abort"}
        assert sorted(len(sample.response) for sample in samples) == [0, 0, PARTIAL_COUNT, PARTIAL_COUNT]
        assert sum(len(engine.turns) for engine in engines) == 2  # an aborted held turn reached no engine
        # New weights, sent to the engines themselves.
        assert (await post(proxy.url, "/weight_sync/begin")).status == 200
        assert (await post(proxy.url, "/weight_sync/end", {"weight_version": "2"})).status == 200
        for engine in engines:
            engine.open_gate()
        aborted = [call for engine in engines for call in engine.turns]
        sent = {sample.session_id: sample.body for sample in samples}
        await asyncio.gather(*(sample.generate(proxy) for sample in samples))  # no client releases: the idle limit does
        for sample in samples:
            assert sample.response == continuation(sample.prompt, 8)
        again = [call for engine in engines for call in engine.turns if call not in aborted]
        assert len(again) == len(sent)
        assert {call.header("X-SMG-Routing-Key"): call.body for call in again} == sent
        await until(lambda: len(proxy.runtime.scheduler.programs) == 0)  # the forget limit


async def test_slime_waits_out_what_an_engine_does_wrong() -> None:
    """It asks for a worker's health through us, and retries a turn after every failure."""
    async with trained_engines(1) as (proxy, (engine,), (replica,)):
        (url,) = await worker_urls(proxy)
        async with httpx2.AsyncClient(timeout=DEADLINE_S) as client:
            assert (await client.get(f"{url}/health_generate")).status_code == 200
            assert engine.told == [("/health_generate", None)]
        sample = Sample("1", [5])
        replica.behaviour = answers({"error": "out of memory"}, status="500 Internal Server Error")
        with pytest.raises(AssertionError):
            await sample.generate(proxy)
        replica.behaviour = engine
        await sample.generate(proxy)
        assert sample.response == continuation([5], 8)
        assert (await program(proxy, "1"))["context_tokens"] == 9
        assert (await post(proxy.url, "/programs/release", {"all": True})).json()["released_ids"] == ["1"]


# --- SkyRL


@dataclass
class SkyRL:
    """The requests of `RemoteInferenceClient`, and its reading of answers."""

    session: aiohttp.ClientSession
    proxy_url: str
    server_urls: list[str]

    async def call_server(self, url: str, path: str, body: object = None, method: str = "POST", **query: str) -> Any:
        """Call one server; a body is read only if the answer gives its length."""
        async with self.session.request(method, url + path, json=body, params=query) as response:
            answer = await response.json() if response.content_length else None
            response.raise_for_status()
            return answer

    async def call_all(self, path: str, body: object = None, method: str = "POST", **query: str) -> list[Any]:
        """Call all servers at once."""
        return await asyncio.gather(*(self.call_server(url, path, body, method, **query) for url in self.server_urls))

    async def generate(self, session_id: str, tokens: list[int], cache_salt: str, path: str = "/inference") -> Any:
        """Make one turn."""
        payload = {
            "sampling_params": {"max_tokens": 8, "logprobs": 1},
            "model": "policy",
            "token_ids": tokens,
            "cache_salt": cache_salt,
        }
        headers = {"Content-Type": "application/json", "X-Session-ID": session_id}
        url = f"{self.proxy_url}{path}/v1/generate"
        async with self.session.post(url, json=payload, headers=headers) as response:
            assert response.status == 200
            return await response.json(content_type=None)

    async def finish_session(self, session_id: str) -> int:
        """Report that a trajectory ended."""
        url = f"{self.proxy_url}/finish_session"
        async with self.session.post(url, params={"session_id": session_id}) as response:
            await response.read()
            return response.status


async def test_skyrl_updates_weights_in_mid_generation() -> None:
    """In-flight turns end with the engine's own answer, new ones wait, and the next epoch has the same ids."""
    async with AsyncExitStack() as stack:
        proxy, engines, replicas = await stack.enter_async_context(trained_engines(gate_open=False))
        session = await stack.enter_async_context(aiohttp.ClientSession())
        skyrl = SkyRL(session, proxy.url, await worker_urls(proxy))
        sizes = await skyrl.call_all("/get_world_size", {}, "GET")
        assert [answer["world_size"] for answer in sizes] == [1, 1]
        for offset, url in enumerate(skyrl.server_urls):
            init = {"init_info": {"rank_offset": 1 + offset, "world_size": 3}}
            assert await skyrl.call_server(url, "/init_weight_transfer_engine", init)
        trajectories = ["task-1_0", "task-1_1"]
        running = [asyncio.create_task(skyrl.generate(name, [1, 2, 3], "0")) for name in trajectories]
        await until(lambda: [engine.running_count for engine in engines] == [1, 1])
        # One weight sync, as `_call_all_servers` sends it: each server by its own URL.
        await skyrl.call_all("/pause", mode="keep", clear_cache="false")
        late = asyncio.create_task(skyrl.generate("task-2_0", [7], "0"))
        await until(lambda: proxy.runtime.held_count == 1)
        for method in ("skyrl_start_weight_update", "update_weights_nccl", "skyrl_finish_weight_update"):
            assert await skyrl.call_all("/collective_rpc", {"method": method}) == [{"status": "ok"}] * 2
        assert [engine.running_count for engine in engines] == [1, 1]
        assert proxy.runtime.held_count == 1
        await skyrl.call_all("/resume")
        for engine in engines:
            engine.open_gate()
        direct = await post(replicas[0].url, "/inference/v1/generate", engines[0].turns[0].body)
        assert [await turn for turn in running] == [direct.json()] * 2
        assert (await late)["choices"][0]["token_ids"] == continuation([7], 8)
        told = [[target for target, _ in engine.told] for engine in engines]
        assert told[0] == told[1]
        assert told[0][1:] == ["/pause?mode=keep&clear_cache=false", *["/collective_rpc"] * 3, "/resume"]
        assert [engine.told[0][1]["init_info"]["rank_offset"] for engine in engines] == [1, 2]
        generations = [(await program(proxy, name))["generation"] for name in trajectories]
        for name in (*trajectories, "task-2_0", *trajectories, "never-seen_3"):
            assert await skyrl.finish_session(name) == 200
        assert len(proxy.runtime.scheduler.programs) == 0
        await asyncio.gather(*(skyrl.generate(name, [1, 2, 3], "1") for name in trajectories))
        for name, generation in zip(trajectories, generations, strict=True):
            report = await program(proxy, name)
            assert report["generation"] > generation
            assert (report["turn_count"], report["context_tokens"]) == (1, 11)
            assert await skyrl.finish_session(name) == 200


async def test_skyrl_s_own_endpoint_is_a_turn() -> None:
    """SkyRL uses it for routed experts. The id may be in the path; a held one is aborted as others."""
    async with AsyncExitStack() as stack:
        proxy, (engine,), _ = await stack.enter_async_context(trained_engines(1, **cap(1)))
        session = await stack.enter_async_context(aiohttp.ClientSession())
        skyrl = SkyRL(session, proxy.url, await worker_urls(proxy))
        answer = await skyrl.generate("task-1_0", [1, 2], "0", "/skyrl")
        assert answer["choices"][0]["token_ids"] == continuation([1, 2], 8)
        await skyrl.generate("of-nobody", [1, 2], "0", "/p/task-1_0/skyrl")
        assert [call.target for call in engine.turns] == ["/skyrl/v1/generate"] * 2
        assert (await program(proxy, "task-1_0"))["turn_count"] == 2
        late = asyncio.create_task(skyrl.generate("task-2_0", [1, 2], "0", "/skyrl"))
        await until(lambda: proxy.runtime.held_count == 1)
        await skyrl.call_all("/pause", mode="abort", clear_cache="false")
        (choice,) = (await late)["choices"]
        assert (choice["finish_reason"], choice["token_ids"]) == ("abort", [])
        await skyrl.call_all("/resume")
        for name in ("task-1_0", "task-2_0"):
            assert await skyrl.finish_session(name) == 200


async def test_skyrl_with_the_proxy_alone_has_one_server() -> None:
    """Without server URLs it calls the proxy: broadcasts are answered as by one engine, differences are refused."""
    async with AsyncExitStack() as stack:
        proxy, engines, _ = await stack.enter_async_context(trained_engines())
        session = await stack.enter_async_context(aiohttp.ClientSession())
        skyrl = SkyRL(session, proxy.url, [proxy.url])
        assert await skyrl.call_all("/pause", mode="keep", clear_cache="false") == [{"status": "ok"}]
        assert await skyrl.call_all("/reset_prefix_cache", {"reset_running_requests": False}) == [{"status": "ok"}]
        assert await skyrl.call_all("/resume") == [{"status": "ok"}]
        assert [len(engine.told) for engine in engines] == [3, 3]
        with pytest.raises(aiohttp.ClientResponseError) as refused:
            await skyrl.call_all("/init_weight_transfer_engine", {"init_info": {}})
        assert refused.value.status == 409


# --- prime-rl and verifiers


async def admin_post(client: httpx2.AsyncClient, path: str, **options: Any) -> None:
    """Do what prime-rl's `_admin_post` does: retry on 5xx and broken connections; the original waits longer."""
    for attempt in range(10):
        response = await client.post(path, **options)
        if response.status_code < 500 or attempt == 9:
            response.raise_for_status()
            return
        await asyncio.sleep(0.01)


async def of_verifiers(proxy: RunningProxy, trace_id: str, tokens: list[int], version: int) -> Answer:
    """Make one turn as verifiers' `TrainClient` does with `renderers.client.generate`."""
    sampling = {"max_tokens": 4, "stop_token_ids": [0], "logprobs": 1, "skip_special_tokens": False}
    body = {"model": "policy", "token_ids": tokens, "sampling_params": sampling, "cache_salt": str(version)}
    return await post(proxy.url, "/inference/v1/generate", body, ("X-Session-ID", trace_id))


async def test_prime_rl_updates_the_policy_in_flight() -> None:
    """Admin URLs are those of the facade; a failed call is repeated; cached memory is forgotten."""
    async with AsyncExitStack() as stack:
        proxy, engines, replicas = await stack.enter_async_context(trained_engines(gate_open=False))
        admins = [
            await stack.enter_async_context(httpx2.AsyncClient(base_url=url.removesuffix("/v1"), timeout=None))
            for url in await worker_urls(proxy)
        ]
        for client in admins:
            assert (await client.get("/health")).status_code == 200
            assert "vllm:cache_config_info" in (await client.get("/metrics")).text
        for number, client in enumerate(admins):
            joins = {"host": "127.0.0.1", "port": 29501, "rank_offset": number, "inference_world_size": 2}
            await admin_post(client, "/init_broadcaster", json=joins)
        assert [engine.told.pop() for engine in engines] == [
            (
                "/init_broadcaster",
                {"host": "127.0.0.1", "port": 29501, "rank_offset": number, "inference_world_size": 2},
            )
            for number in range(2)
        ]
        running = [asyncio.create_task(of_verifiers(proxy, f"trace-{number}", [1, 2, 3], 0)) for number in range(2)]
        await until(lambda: [engine.running_count for engine in engines] == [1, 1])
        engines[1].failures_count = 1
        await asyncio.gather(*(admin_post(client, "/pause?mode=keep&clear_cache=false") for client in admins))
        waits = asyncio.create_task(of_verifiers(proxy, "trace-2", [9], 0))
        await until(lambda: proxy.runtime.held_count == 1)
        update = {"weight_dir": "broadcasts/step_1"}
        await asyncio.gather(*(admin_post(client, "/update_weights", json=update) for client in admins))
        await asyncio.gather(*(admin_post(client, "/resume") for client in admins))
        for engine in engines:
            engine.open_gate()
        first = [(await each).json()["choices"][0]["token_ids"] for each in running]
        assert first == [continuation([1, 2, 3], 4)] * 2
        assert (await waits).status == 200
        assert [target for target, _ in engines[0].told] == [
            "/pause?mode=keep&clear_cache=false",
            "/update_weights",
            "/resume",
        ]
        assert len(engines[1].told) == 4
        # The next turn brings the new version's salt, on the same engine.
        again = [
            await of_verifiers(proxy, f"trace-{number}", [1, 2, 3, *tokens, 50], 1)
            for number, tokens in enumerate(first)
        ]
        assert {answer.header("X-Program-ID-Source") for answer in again} == {"x-session-id"}
        assert {answer.header("X-Replica-ID") for answer in again} == {replica.replica_id for replica in replicas}
        salts = [
            [call.json()["cache_salt"] for call in engine.turns if len(call.json()["token_ids"]) > 1]
            for engine in engines
        ]
        assert salts == [["0", "1"]] * 2
        assert (await program(proxy, "trace-0"))["turn_count"] == 2
        released = (await post(proxy.url, "/programs/release", {"all": True})).json()  # prime-rl never does
        assert len(released["released_ids"]) == 3


async def test_verifiers_names_the_rollout_whatever_its_harness_says() -> None:
    """A harness keeps its own headers, which verifiers passes on: one rollout is still one program."""
    async with fake_replica() as replica, running_proxy(replica.url) as proxy:
        for session in ("cc-1", "cc-2"):
            own: list[Header] = [("X-Session-ID", "trace-1"), ("X-Claude-Code-Session-Id", session)]
            answer = await post(proxy.url, CHAT, turn(), *own)
            assert (answer.header("X-Program-ID"), answer.header("X-Program-ID-Source")) == ("trace-1", "x-session-id")
        assert (await program(proxy, "trace-1"))["turn_count"] == 2
        await post(proxy.url, "/finish_session?session_id=trace-1")


# --- verl


def code(page: str, number: int = 0) -> str:
    """Return one of the Python blocks of a page."""
    found = re.findall(r"^```python\n(.*?)^```", whole((PAGES / f"{page}.md").read_text()), re.DOTALL | re.MULTILINE)
    text: str = found[number]
    return text


async def test_verl_s_router_takes_leases() -> None:
    """The page's code, called as verl's `LLMServerClient` does: a turn waits for its lease and goes where that says."""
    module: dict[str, Any] = {}
    exec(code("verl"), module)
    async with trained_engines(listed=False, **cap(1)) as (proxy, _, replicas):
        servers = {replica.replica_id: object() for replica in replicas}
        config = {"router_class": "leased_router.LeasedRouter", "proxy_url": proxy.url}
        router = await asyncio.to_thread(module["LeasedRouter"], servers, config)
        assert router.require_acquire_fields() == ["prompt_ids"]
        server_id, handle = await router.acquire_server(request_id="r1", prompt_ids=[1, 2, 3])
        assert handle is servers[server_id]
        other = asyncio.create_task(router.acquire_server(request_id="r2", prompt_ids=[4]))
        await until(lambda: proxy.runtime.held_count == 1)
        assert router.get_total_inflight() == 1
        await router.release_server(server_id, request_id="r1")
        assert await router.acquire_server(request_id="r1", prompt_ids=[1, 2, 3, 4, 5]) == (server_id, handle)
        await router.release_server(server_id, request_id="r1")
        assert (await program(proxy, "r1"))["context_tokens"] == 5
        # New weights, between the two calls of the hook.
        await post(proxy.url, "/weight_sync/begin")
        late = asyncio.create_task(router.acquire_server(request_id="r1", prompt_ids=[1]))
        await until(lambda: proxy.runtime.held_count == 2)
        await post(proxy.url, "/weight_sync/end", {"weight_version": "1"})
        await router.release_server((await late)[0], request_id="r1")
        await post(proxy.url, "/programs/release", {"program_id": "r1"})
        await router.release_server((await other)[0], request_id="r2")
        assert router.get_status()["total_inflight"] == proxy.runtime.leases_count == 0
        await post(proxy.url, "/programs/release", {"program_id": "r2"})
        await asyncio.to_thread(router.remove_servers, [server_id])
        (other_id,) = router.get_all_servers()
        assert (await router.acquire_server(request_id="r3", prompt_ids=[1]))[0] == other_id
        await router.release_server(other_id, request_id="r3")
        await asyncio.to_thread(router.add_servers, {server_id: handle})
        await proxy.up(2)
        assert router.clear_sticky_cache()["cleared_entries"] == 0
        await post(proxy.url, "/programs/release", {"program_id": "r3"})
        await router._client.aclose()


# --- NeMo Gym


@dataclass
class NemoGym:
    """The requests of `NeMoGymAsyncOpenAI` for one rollout, and its retries, without their half second of waiting."""

    session: aiohttp.ClientSession
    base_url: str
    conversation_id: str
    tries_count: int = 0

    async def request(self, url: str, **body: Any) -> tuple[int, bytes]:
        """Retry until there is an answer: without limit while there is none, three times if a status suggests that."""
        headers = {"Content-Type": "application/json", "Authorization": "Bearer dummy_key"}
        answers_count = 0
        while True:
            self.tries_count += 1
            try:
                async with self.session.post(url, data=json.dumps(body).encode(), headers=headers) as response:
                    content = await response.read()
            except (aiohttp.ServerDisconnectedError, aiohttp.ClientOSError):
                await asyncio.sleep(0.05)
                continue
            answers_count += 1
            if response.status not in (404, 408, 429, 500, 502, 503, 504, 520) or answers_count == 3:
                return response.status, content
            await asyncio.sleep(0.05)

    async def turn(self, content: str) -> tuple[int, bytes]:
        """Make one turn, as a `VLLMModel` that forwards the session's id does."""
        conversation = {"conversation_id": self.conversation_id}
        asked = turn(content=content, temperature=1.0, logprobs=True, conversation_params=conversation)
        return await self.request(f"{self.base_url}/chat/completions", **asked)


@asynccontextmanager
async def nemo_gym(url: str, count: int = 1) -> AsyncIterator[list[NemoGym]]:
    """A number of rollouts on their shared session, without time-outs and without cookies."""
    options: Any = {"timeout": aiohttp.ClientTimeout(), "cookie_jar": aiohttp.DummyCookieJar()}
    async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0), **options) as session:
        yield [NemoGym(session, f"{url}/v1", f"rollout-{number}") for number in range(count)]


async def test_rollouts_of_nemo_gym_are_held_and_ask_once() -> None:
    """Each is a program by its conversation's id, which the engine gets too; counting a prompt's tokens is no turn."""
    async with fake_replica() as replica, running_proxy(replica.url, **cap(1)) as proxy:
        async with nemo_gym(proxy.url, 8) as rollouts:
            asked = [asyncio.create_task(rollout.turn("solve it")) for rollout in rollouts]
            for held_count in range(7, -1, -1):
                await until(lambda count=held_count: proxy.runtime.held_count == count)
                await until(lambda count=held_count: sum(each.done() for each in asked) == 8 - count)
                (answered,) = [
                    rollout
                    for rollout, each in zip(rollouts, asked, strict=True)
                    if each.done() and proxy.runtime.scheduler.programs.get(rollout.conversation_id) is not None
                ]
                prompt = {"model": "simulated", "messages": []}
                assert (await answered.request(f"{proxy.url}/tokenize", **prompt))[0] == 200
                assert (await program(proxy, answered.conversation_id))["turn_count"] == 1
                await post(proxy.url, "/programs/release", {"program_id": answered.conversation_id})
            assert {status for status, _ in [await each for each in asked]} == {200}
            assert {rollout.tries_count for rollout in rollouts} == {2}
        turns = [call.json() for call in replica.calls if call.target == CHAT]
        named = sorted(body["conversation_params"]["conversation_id"] for body in turns)
        assert named == [rollout.conversation_id for rollout in rollouts]
        assert len(replica.calls) == 16


async def test_nemo_gym_waits_for_an_engine_that_is_gone() -> None:
    """Turns are held while there is none; an engine's answer that suggests a retry passes unchanged, three times."""
    async with (
        fake_replica() as replica,
        running_proxy(replica.url, patience_s=8.0) as proxy,
        nemo_gym(proxy.url) as (rollout,),
    ):
        await replica.stop()
        await proxy.up(0)
        waits = asyncio.create_task(rollout.turn("one"))
        await until(lambda: proxy.runtime.held_count == 1)
        await replica.start()
        assert (await waits)[0] == 200
        assert (rollout.tries_count, (await program(proxy, rollout.conversation_id))["turn_count"]) == (1, 1)
        busy = {"error": {"message": "busy"}}
        replica.behaviour = answers(busy, status="503 Service Unavailable")
        status, content = await rollout.turn("two")
        assert (status, json.loads(content), rollout.tries_count) == (503, busy, 4)
        await post(proxy.url, "/programs/release", {"all": True})


async def test_nemo_gym_tries_again_until_the_proxy_is_back() -> None:
    """A proxy that dies in mid-turn takes the generation with it; the next one at its address answers, once."""
    async with fake_replica(Gate()) as replica, AsyncExitStack() as stack:
        port = str(free_ports(1)[0])  # so that nobody else gets it meanwhile
        async with serve("--backends", replica.url, "--port", port) as first:
            await first.ready()
            (rollout,) = await stack.enter_async_context(nemo_gym(first.url))
            cut_off = asyncio.create_task(rollout.turn("one"))
            await replica.call()
        await asyncio.wait_for(replica.calls[0].left.wait(), DEADLINE_S)
        await until(lambda: rollout.tries_count > 3)
        replica.behaviour = answers()
        async with command("serve", "--port", port, "--backends", replica.url, "--poll-interval-s", "0.05") as second:
            assert (await cut_off)[0] == 200
            report = (await get(second.url, f"/programs/{rollout.conversation_id}")).json()
            assert (report["turn_count"], len(replica.calls)) == (1, 2)


async def test_nemo_gym_reads_that_a_prompt_is_too_long_in_the_engine_s_words() -> None:
    """NeMo Gym ends the rollout there with its output so far, so it must be a 400, and not be retried."""
    words = {"object": "error", "message": "This model's maximum context length is 32768 tokens.", "code": 400}
    async with fake_replica(answers(words, status="400 Bad Request")) as replica, running_proxy(replica.url) as proxy:
        async with nemo_gym(proxy.url) as (rollout,):
            status, content = await rollout.turn("long")
            assert (status, content, rollout.tries_count) == (400, json.dumps(words).encode(), 1)
        await post(proxy.url, "/programs/release", {"all": True})


# --- OpenHands and SWE-agent, which ask through LiteLLM


OPENHANDS: list[Header] = [
    ("X-Stainless-Retry-Count", "0"),
    ("X-Stainless-Read-Timeout", "300.0"),
    ("X-LiteLLM-Session-Id", "3f0c-conversation"),
]


async def test_openhands_tries_again_as_the_same_program() -> None:
    """It retries after an engine's error, and after its own time-out while held: each time there is one generation."""
    async with fake_replica() as replica, running_proxy(replica.url, **cap(1)) as proxy:
        replica.behaviour = answers({"error": {"message": "no"}}, status="500 Internal Server Error")
        assert (await post(proxy.url, CHAT, turn(), *OPENHANDS)).status == 500
        replica.behaviour = answers()
        answer = await post(proxy.url, CHAT, turn(), *OPENHANDS)
        assert (answer.header("X-Program-ID"), answer.status) == ("3f0c-conversation", 200)
        await post(proxy.url, "/programs/release", {"all": True})
        await ask(proxy.url, "somebody")
        calls_count = len(replica.calls)
        async with Wire.open(proxy.url) as wire:
            wire.send("POST", CHAT, OPENHANDS, json.dumps(turn()).encode())
            await until(lambda: proxy.runtime.held_count == 1)
        await until(lambda: proxy.runtime.held_count == 0)
        again = asyncio.create_task(post(proxy.url, CHAT, turn(), *OPENHANDS))
        await until(lambda: proxy.runtime.held_count == 1)
        await post(proxy.url, "/programs/release", {"program_id": "somebody"})
        assert (await again).status == 200
        assert len(replica.calls) == calls_count + 1
        assert (await program(proxy, "3f0c-conversation"))["turn_count"] == 1
        await post(proxy.url, "/programs/release", {"all": True})
        assert len(proxy.runtime.scheduler.programs) == 0


async def test_the_condenser_of_openhands_is_a_turn_of_its_conversation() -> None:
    """All models of a conversation carry its id: a request during another one in flight waits for nothing."""
    gate = Gate()
    async with fake_replica() as replica, running_proxy(replica.url, **cap(1)) as proxy:
        replica.behaviour = gate
        agent = asyncio.create_task(post(proxy.url, CHAT, turn(), *OPENHANDS))
        await replica.call()
        replica.behaviour = answers()
        assert (await post(proxy.url, CHAT, turn(content="summarize"), *OPENHANDS)).status == 200
        gate.open()
        assert (await agent).status == 200
        assert (await program(proxy, "3f0c-conversation"))["turn_count"] == 2
        await post(proxy.url, "/programs/release", {"all": True})


async def test_instances_of_swe_agent_are_programs_by_their_base_url() -> None:
    """Each run has its own URL; a release at the end leaves nothing; a second run of an instance is a new program."""
    async with fake_replica() as replica, running_proxy(replica.url) as proxy:
        sent: list[Header] = [("User-Agent", "swe-agent/1.1.0"), ("X-Stainless-Read-Timeout", "3600")]
        generations = []
        for _ in range(2):
            for content in ("one", "two"):
                path = "/p/django__django-11099/v1/chat/completions"
                answer = await post(proxy.url, path, turn(content=content, temperature=0.0, top_p=1.0), *sent)
                assert answer.header("X-Program-ID-Source") == "path"
            report = await program(proxy, "django__django-11099")
            assert report["turn_count"] == 2
            generations.append(report["generation"])
            async with httpx2.AsyncClient(base_url=proxy.url, timeout=DEADLINE_S) as client:
                assert (await client.delete("/programs/django__django-11099")).json()["released"] is True
        assert generations[1] > generations[0]
        assert {call.target for call in replica.calls} == {CHAT}
        assert {call.header("User-Agent") for call in replica.calls} == {"swe-agent/1.1.0"}
        assert len(proxy.runtime.scheduler.programs) == 0
