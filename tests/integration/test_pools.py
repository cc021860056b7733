"""Replicas of different models behind one proxy: each has a pool, and no turn goes where its model is not served."""

from __future__ import annotations

import asyncio
from contextlib import AsyncExitStack, asynccontextmanager
from typing import TYPE_CHECKING, Any

import pytest

from tests.integration.support import CHAT, Gate, ask, fake_replica, get, metrics_of, post, running_proxy, turn, until
from thunderagent.simulator.embedded.options import ServerConfig
from thunderagent.simulator.embedded.server import running
from thunderagent.simulator.engine.records import EngineConfig
from thunderagent.simulator.engine.timing import profile

if TYPE_CHECKING:
    from collections.abc import AsyncIterator
    from pathlib import Path

    from tests.integration.support import RunningProxy

ANTHROPIC = {"model": "c", "max_tokens": 4, "messages": [{"role": "user", "content": "hello"}]}


@asynccontextmanager
async def engine(model: str, kv_tokens: int = 16_000) -> AsyncIterator[str]:
    """Serve a simulated engine in this process, which refuses every model but its own."""
    config = EngineConfig(kv_tokens=kv_tokens, timing=profile("instant"))
    async with running(ServerConfig(config, port=0, grace_s=0, model=model)) as url:
        yield url


@asynccontextmanager
async def two_models(**config: Any) -> AsyncIterator[RunningProxy]:
    """Run a proxy in front of an engine of `a` and one of `b`."""
    async with engine("a") as one, engine("b") as other, running_proxy(one, other, **config) as proxy:
        yield proxy


def pool_names(proxy: RunningProxy) -> list[str]:
    return sorted(pool.name for pool in proxy.runtime.pools.all)


async def names_at(proxy: RunningProxy) -> list[str]:
    return sorted(model["id"] for model in (await get(proxy.url, "/v1/models")).json()["data"])


async def test_each_model_is_answered_by_its_own_engine() -> None:
    """Anonymous turns, programs' turns and side calls run concurrently; the log of both pools replays."""
    async with two_models() as proxy:
        assert pool_names(proxy) == ["a", "b"]
        asked = [
            ask(proxy.url, program_id, model=model)
            for number in range(8)
            for model in "ab"
            for program_id in (None, f"{model}-{number}", "both")
        ]
        answers = await asyncio.gather(*asked)
        assert {answer.status for answer in answers} == {200}
        for model in "ab":
            assert {each.header("X-Replica-ID") for each in answers if each.json()["model"] == model} != set()
            sides = await asyncio.gather(
                *(post(proxy.url, "/tokenize", {"model": model, "prompt": "x"}) for _ in "123")
            )
            assert [each.status for each in sides] == [200] * 3
        models = (await get(proxy.url, "/v1/models")).json()["data"]
        assert {model["id"] for model in models} == {"a", "b"}


@pytest.mark.parametrize(
    ("path", "body", "kind"),
    [
        (CHAT, turn(model="c"), "openai"),
        ("/v1/completions", {"model": "c", "prompt": "x"}, "openai"),
        ("/v1/responses", {"model": "c", "input": "x"}, "openai"),
        ("/v1/messages", ANTHROPIC, "anthropic"),
        ("/v1/embeddings", {"model": "c", "input": "x"}, "openai"),
        ("/generate", {"model": "c", "text": "x"}, "sglang"),
        ("/generate", {"text": "x"}, "sglang"),
    ],
)
async def test_a_model_that_nobody_serves_is_a_404_at_once(path: str, body: dict[str, Any], kind: str) -> None:
    """The answer has the schema of the called API and the known names; no lease is taken."""
    async with two_models() as proxy:
        answer = await post(proxy.url, path, body)
        assert answer.status == 404
        if kind == "anthropic":
            said = answer.json()
            assert (said["type"], said["error"]["type"]) == ("error", "not_found_error")
            message = said["error"]["message"]
        elif kind == "sglang":
            error = answer.json()["error"]
            assert error.keys() == {"message", "code"}
            assert error["code"] == "model_not_found"
            message = error["message"]
        else:
            assert answer.error["code"] == "model_not_found"
            message = answer.error["message"]
        assert ("'c'" if "model" in body else "names none") in message
        assert "a, b" in message
        assert not any(proxy.runtime.decision_counts.values())


async def test_programs_are_listed_by_age_over_all_pools() -> None:
    """The oldest comes first, whichever pool existed first."""
    async with two_models() as proxy:
        for program_id, model in (("first", "b"), ("second", "a"), ("third", "b")):
            assert (await ask(proxy.url, program_id, model=model)).status == 200
        listed = (await get(proxy.url, "/programs")).json()["programs"]
        assert [program["program_id"] for program in listed] == ["first", "second", "third"]


async def test_a_turn_without_a_model_goes_where_its_program_lives() -> None:
    """If that does not say which model is meant, the turn is refused."""
    async with two_models() as proxy:
        nameless = {key: value for key, value in turn("p").items() if key != "model"}
        assert (await post(proxy.url, CHAT, nameless)).error["code"] == "model_not_found"
        assert (await ask(proxy.url, "p", model="b")).status == 200
        assert (await post(proxy.url, CHAT, nameless)).json()["model"] == "b"
        assert (await ask(proxy.url, "p", model="a")).status == 200
        assert (await post(proxy.url, CHAT, nameless)).error["code"] == "model_not_found"


async def test_a_program_lives_in_both_pools_and_ends_in_both() -> None:
    """One release ends both; an announced program is counted once; its end is reported once."""
    async with two_models() as proxy:
        ended: list[str] = []
        proxy.runtime.observe(lambda _, decisions: ended.extend(type(each).__name__ for each in decisions))
        await post(proxy.url, "/programs", {"program_id": "p", "tenant": "t"})
        for model in "ba":
            assert (await ask(proxy.url, "p", model=model)).status == 200
        page = (await get(proxy.url, "/programs")).json()["programs"]
        assert sorted((each["program_id"], each["pool"], each["tenant"]) for each in page) == [
            ("p", "a", "t"),
            ("p", "b", "t"),
        ]
        assert (await get(proxy.url, "/programs/p?pool=b")).json()["pool"] == "b"
        assert (await get(proxy.url, "/programs/p?pool=c")).status == 404
        assert (await get(proxy.url, "/summary")).json()["programs_count"] == 1
        said = (await post(proxy.url, "/programs/release", {"program_id": "p"})).json()
        assert said["released"]
        assert ended.count("Release") == 1
        assert (await get(proxy.url, "/programs")).json()["total"] == 0


async def test_queue_of_one_pool_does_not_block_the_other() -> None:
    """Each pool has one program at a time: the second of the same model waits, the other model's does not."""
    gate = Gate()
    async with fake_replica(gate) as one, fake_replica() as other:
        one.models, other.models = ("a",), ("b",)
        async with running_proxy(one.url, other.url, policy="cap", policy_args={"n": "1"}) as proxy:
            first = asyncio.create_task(ask(proxy.url, "one", model="a"))
            await one.call()
            second = asyncio.create_task(ask(proxy.url, "two", model="a"))
            await until(lambda: proxy.runtime.held_count == 1)
            assert (await ask(proxy.url, "three", model="b")).status == 200
            assert (await get(proxy.url, "/queue")).json()["waiting"][0]["pool"] == "a"
            assert not second.done()
            metrics = await metrics_of(proxy.url)
            assert metrics["thunderagent_pool_waiting"] == {("a",): 1.0, ("b",): 0.0}
            gate.open()
            await first
            await post(proxy.url, "/programs/release", {"program_id": "one"})
            assert (await second).status == 200


async def test_adapters_of_one_engine_are_one_pool() -> None:
    """It takes unlisted models, if one of its replicas lists nothing."""
    async with fake_replica() as one, fake_replica() as two, fake_replica() as odd, fake_replica() as other:
        one.models, two.models, other.models = ("base", "lora-1"), ("base", "lora-2"), ("other",)
        async with running_proxy(one.url, two.url) as proxy:
            assert pool_names(proxy) == ["base"]
            for url in (odd.url, other.url):
                await post(proxy.url, "/replicas", {"url": url})
            await proxy.up(4)
            assert pool_names(proxy) == ["base", "other"]
            of_base = {one.replica_id, two.replica_id, odd.replica_id}
            for name in ("base", "lora-1", "lora-2", "anything"):
                assert (await ask(proxy.url, model=name)).header("X-Replica-ID") in of_base


async def test_an_adapter_of_some_replicas_of_a_pool_is_asked_of_these_alone() -> None:
    """Anonymous turns and programs, many at once; other replicas get them from the load call until the unload."""
    async with fake_replica() as one, fake_replica() as other:
        one.models, other.models = ("base", "lora"), ("base",)
        async with running_proxy(one.url, other.url) as proxy:

            async def where(model: str, name: str) -> set[str | None]:
                ids = [None if number % 2 else f"{name}-{number}" for number in range(12)]
                answers = await asyncio.gather(*(ask(proxy.url, each, model=model) for each in ids))
                assert {answer.status for answer in answers} == {200}
                return {answer.header("X-Replica-ID") for answer in answers}

            assert await where("lora", "p") == {one.replica_id}
            assert await where("base", "q") == {one.replica_id, other.replica_id}
            other.models = ("base", "lora")
            await until(lambda: not proxy.runtime.pools.some_partly)
            assert await where("lora", "r") == {one.replica_id, other.replica_id}
            one.models = ("base",)
            await until(lambda: proxy.runtime.pools.some_partly)
            assert await where("lora", "p") == {other.replica_id}
            assert (await ask(proxy.url, model="nothing")).status == 404


async def test_an_adapter_whose_only_replica_takes_nothing_is_waited_for() -> None:
    """The replica drains, or is down: its paused programs are restored there, and no turn goes to the other replica."""
    async with fake_replica() as one, fake_replica() as other:
        one.models, other.models = ("base", "lora"), ("base",)
        async with running_proxy(one.url, other.url) as proxy:

            async def is_waited_for() -> None:
                ids = ("p", "new", None)
                asked = [asyncio.create_task(ask(proxy.url, program_id, model="lora")) for program_id in ids]
                await until(lambda: proxy.runtime.held_count == len(ids))
                assert (await ask(proxy.url, "base", model="base")).header("X-Replica-ID") == other.replica_id
                await comes_back()
                assert {answer.header("X-Replica-ID") for answer in await asyncio.gather(*asked)} == {one.replica_id}

            async def comes_back() -> None:
                if one.healthy:
                    await post(proxy.url, f"/replicas/{one.replica_id}/undrain", {})
                one.healthy = True

            assert (await ask(proxy.url, "p", model="lora")).status == 200
            await post(proxy.url, f"/replicas/{one.replica_id}/drain", {})
            await proxy.up(1)
            await is_waited_for()
            one.healthy = False
            await proxy.up(1)
            await is_waited_for()


async def test_a_replica_that_says_later_what_it_serves_goes_there() -> None:
    """Turns in flight there come to their end, and no further turn of the first model is sent there."""
    gate = Gate()
    async with fake_replica() as one, fake_replica(gate) as other:
        one.models = ("a",)
        async with running_proxy(one.url) as proxy:
            await post(proxy.url, "/replicas", {"url": other.url})
            await proxy.up(2)
            asked = [asyncio.create_task(ask(proxy.url, f"p{number}", model="a")) for number in range(4)]
            await other.call()
            other.models = ("b",)
            await until(lambda: pool_names(proxy) == ["a", "b"])
            after = await asyncio.gather(*(ask(proxy.url, f"q{number}", model="a") for number in range(4)))
            assert {answer.header("X-Replica-ID") for answer in after} == {one.replica_id}
            gate.open()
            assert {answer.status for answer in await asyncio.gather(*asked)} == {200}
            assert (await ask(proxy.url, model="b")).header("X-Replica-ID") == other.replica_id


async def test_a_model_whose_replica_has_not_come_up_yet_is_waited_for() -> None:
    """After the limit it is a 404."""
    async with fake_replica() as one, fake_replica() as two, fake_replica() as late:
        one.models, two.models, late.models = ("a",), ("b",), ("c",)
        late.healthy = False
        await late.stop()
        config: dict[str, Any] = {"no_replica_limit_s": 0.3}
        async with running_proxy(one.url, two.url, late.url, up=2, **config) as proxy:
            await until(lambda: pool_names(proxy) == ["a", "b"])
            assert (await ask(proxy.url, model="c")).status == 404
        async with running_proxy(one.url, two.url, late.url, up=2) as proxy:
            await until(lambda: pool_names(proxy) == ["a", "b"])
            waits = asyncio.create_task(ask(proxy.url, model="c"))
            late.healthy = True
            await late.start()
            assert (await waits).header("X-Replica-ID") == late.replica_id


async def test_an_alias_stands_for_a_model() -> None:
    """Engines get the name that they serve, clients find both; this holds with one pool, too."""
    aliases = {"model_aliases": {"public": "b"}}
    async with two_models(**aliases) as proxy:
        answer = await ask(proxy.url, "p", model="public")
        assert (answer.status, answer.json()["model"]) == (200, "b")
        assert await names_at(proxy) == ["a", "b", "public"]
    async with engine("b") as url, running_proxy(url, **aliases) as proxy:
        assert (await ask(proxy.url, model="public")).status == 200
        answer = await ask(proxy.url, model="c")
        assert (answer.status, answer.error["code"]) == (404, "model_not_found")


async def test_a_model_whose_replica_takes_nothing_new_is_listed() -> None:
    """Its turns are waited for; the replica is up, it drains."""
    async with two_models() as proxy:
        drained_id = (await ask(proxy.url, model="b")).header("X-Replica-ID")
        await post(proxy.url, f"/replicas/{drained_id}/drain", {})
        await proxy.up(1)
        assert await names_at(proxy) == ["a", "b"]


async def test_a_model_comes_and_goes_with_its_replicas() -> None:
    """Its turns wait as long as its pool has a program, and are refused afterwards."""
    async with AsyncExitStack() as stack:
        one = await stack.enter_async_context(fake_replica())
        other = await stack.enter_async_context(fake_replica())
        one.models, other.models = ("a",), ("b",)
        proxy = await stack.enter_async_context(running_proxy(one.url))
        assert pool_names(proxy) == ["a"]
        assert (await ask(proxy.url, model="b")).status == 404
        await post(proxy.url, "/replicas", {"url": other.url})
        await proxy.up(2)
        assert pool_names(proxy) == ["a", "b"]
        assert (await ask(proxy.url, model="b")).header("X-Replica-ID") == other.replica_id
        await post(proxy.url, f"/replicas/{other.replica_id}/drain", {})
        await proxy.up(1)
        waits = asyncio.create_task(ask(proxy.url, "p", model="b"))
        await until(lambda: proxy.runtime.held_count == 1)
        await post(proxy.url, f"/replicas/{other.replica_id}/undrain", {})
        assert (await waits).header("X-Replica-ID") == other.replica_id


async def test_with_one_pool_a_model_that_its_engines_refuse_is_a_404_before_any_lease() -> None:
    """This holds with full memory: the turn need not wait for room to be refused. A turn without a model passes."""
    gate = Gate()
    async with fake_replica(gate) as replica:
        replica.models = ("a", "lora")
        async with running_proxy(replica.url, policy="cap", policy_args={"n": "1"}) as proxy:
            first = asyncio.create_task(ask(proxy.url, "one", model="a"))
            await replica.call()
            answer = await ask(proxy.url, "two", model="c")
            assert (answer.status, answer.error["code"]) == (404, "model_not_found")
            assert "'c' is not served here; there are: a, lora" in answer.error["message"]
            assert len(proxy.runtime.programs) == 1
            gate.open()
            assert (await first).status == 200
            nameless = {key: value for key, value in turn("one").items() if key != "model"}
            assert (await post(proxy.url, CHAT, nameless)).status == 200


@pytest.mark.parametrize("lists", [None, ()])
async def test_with_one_pool_an_engine_that_lists_nothing_gets_every_model(lists: tuple[str, ...] | None) -> None:
    """It has no list, or an empty one, also together with an engine that has one."""
    async with fake_replica() as one, fake_replica() as other:
        one.models, other.models = lists, ("a",)
        async with running_proxy(one.url) as proxy:
            assert (await ask(proxy.url, model="c")).status == 200
            await post(proxy.url, "/replicas", {"url": other.url})
            await proxy.up(2)
            assert (await ask(proxy.url, model="c")).status == 200


async def test_with_one_pool_an_engine_that_takes_any_name_gets_every_model() -> None:
    """SGLang does so: its clients may use any name."""
    async with fake_replica() as replica:
        replica.models = ("a",)
        async with running_proxy(replica.url, backend_type="sglang") as proxy:
            assert (await ask(proxy.url, model="default")).status == 200


@pytest.mark.parametrize("pools_count", [1, 2])
async def test_an_adapter_that_was_just_loaded_is_found(pools_count: int) -> None:
    """Others loaded it after the last poll: the engine is asked again before the turn is refused."""
    async with fake_replica() as one, fake_replica() as other:
        one.models, other.models = ("a",), ("b",)
        urls = (one.url, other.url)[:pools_count]
        async with running_proxy(*urls, poll_interval_s=1.0) as proxy:  # it asks for models every 10 s
            await until(lambda: len(proxy.runtime.pools.models) == pools_count)
            one.models = ("a", "new")
            assert (await ask(proxy.url, model="new")).header("X-Replica-ID") == one.replica_id


async def test_pools_can_be_turned_off() -> None:
    """Then every replica counts as serving every model, and refuses by itself."""
    async with two_models(model_pools=False) as proxy:
        assert len(proxy.runtime.pools.all) == 1
        answers = await asyncio.gather(*(ask(proxy.url, model="a") for _ in range(8)))
        assert {answer.status for answer in answers} == {200, 404}


async def test_the_first_turns_wait_until_it_is_known_who_serves_what() -> None:
    """After a restart under load no turn goes to the engine that happened to answer its poll first."""
    async with fake_replica() as one, fake_replica() as other:
        one.models, other.models = ("a",), ("b",)
        async with running_proxy(one.url, other.url, up=0) as proxy:
            answers = await asyncio.gather(*(ask(proxy.url, model="b") for _ in range(4)))
            assert {answer.header("X-Replica-ID") for answer in answers} == {other.replica_id}


async def test_each_pool_says_how_many_programs_are_of_use() -> None:
    """With one pool no model need be named; the count of further useful programs covers those of all clients."""
    async with two_models() as proxy:
        assert (await get(proxy.url, "/concurrency")).error["code"] == "model_not_found"
        for number in range(2):
            await ask(proxy.url, f"p{number}", model="b")
        for model, more_count in (("a", 4), ("b", 2)):
            said = (await get(proxy.url, f"/concurrency?model={model}")).json()
            assert said.pop("why") in ("step", "sizes")
            assert said == {"useful_count": 4, "more_count": more_count, "pool": model}
    async with engine("a") as url, running_proxy(url) as proxy:
        assert (await get(proxy.url, "/concurrency")).json()["pool"] == ""


async def test_a_restart_keeps_what_each_pool_learned(tmp_path: Path) -> None:
    """The next proxy on the same engines knows it; its log replays with the same initial state."""
    path = tmp_path / "state"
    for number in range(2):
        async with two_models(state=path) as proxy:
            of = {model: pool.scheduler.knowledge for model in "ab" if (pool := proxy.runtime.pools.of_model(model))}
            turns_counts = {model: known.growth.export().outputs.total for model, known in of.items()}
            assert turns_counts == {"a": number * 3, "b": number * 1}
            for model in "aaab":
                assert (await ask(proxy.url, f"p-{model}", model=model)).status == 200
