"""Programs named by a token, or unnamed: bearer mode, inferred programs, tenants."""

from __future__ import annotations

import asyncio
import json
from collections import Counter
from typing import TYPE_CHECKING, Any

import openai
import pytest

from tests.integration.support import (
    CHAT,
    DONE,
    LAST_CHUNK,
    USAGE_EVENT,
    Gate,
    Wire,
    answers,
    ask,
    chunk,
    event,
    events_of,
    fake_replica,
    get,
    post,
    running_proxy,
    shared_engine,
    stream_head,
    streams,
    turn,
    word,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from tests.integration.support import Answer, Call

GROUP = 8
TOOL_RESULT = {"role": "tool", "tool_call_id": "call-1", "content": "done"}


# --- a group without ids


async def answers_each_differently(call: Call) -> None:
    """Behave: the number of the call is in the answer, which calls a tool; streamed if that is wanted."""
    body = call.json()
    number = json.dumps({"thought": id(call)})
    function = {"name": "bash", "arguments": number}
    if not body.get("stream"):
        message = {"role": "assistant", "content": None, "tool_calls": [{"id": "call-1", "function": function}]}
        await answers({"choices": [{"index": 0, "message": {**message, "refusal": None}}]})(call)
        return
    parts = [number[:5], number[5:]]
    deltas: list[dict[str, Any]] = [
        {"role": "assistant", "content": ""},
        {"tool_calls": [{"index": 0, "id": "call-1", "function": {"name": "bash", "arguments": ""}}]},
        *({"tool_calls": [{"index": 0, "function": {"arguments": part}}]} for part in parts),
    ]
    events = [event({"choices": [{"index": 0, "delta": delta}]}) for delta in deltas]
    await streams(*events, USAGE_EVENT, DONE)(call)


def said_in(answer: Answer) -> str:
    """Return the arguments of the call in an answer, whole or streamed."""
    if answer.header("Content-Type") == "application/json":
        return str(answer.json()["choices"][0]["message"]["tool_calls"][0]["function"]["arguments"])
    chunks = [json.loads(line[6:]) for line in answer.body.split(b"\n\n") if line.startswith(b"data: {")]
    calls = [choice["delta"].get("tool_calls", []) for chunk in chunks for choice in chunk["choices"]]
    return "".join(call["function"].get("arguments", "") for each in calls for call in each)


def as_sent_back(arguments: str) -> dict[str, Any]:
    """Return the message as a client puts it into its next prompt: spelt in its own way."""
    function = {"arguments": json.dumps(json.loads(arguments), indent=1), "name": "bash"}
    return {
        "role": "assistant",
        "content": "",
        "tool_calls": [{"type": "function", "id": "call-1", "function": function}],
    }


@pytest.mark.parametrize("streamed", [False, True])
async def test_a_group_without_ids_is_as_many_programs_and_each_next_turn_joins_its_own(streamed: bool) -> None:
    """Eight identical first prompts are eight programs; their second and third turns come in any order."""
    async with (
        fake_replica(answers_each_differently) as replica,
        running_proxy(replica.url, infer_programs=True) as proxy,
    ):
        histories: dict[str, list[dict[str, Any]]] = {}
        first = await asyncio.gather(*(ask(proxy.url, stream=streamed) for _ in range(GROUP)))
        for answer in first:
            assert answer.header("X-Program-ID-Source") == "inferred"
            history = [*turn()["messages"], as_sent_back(said_in(answer)), TOOL_RESULT]
            histories[answer.header("X-Program-ID") or ""] = history
        assert len(histories) == GROUP
        for _ in range(2):
            names = sorted(histories, reverse=True)
            answered = await asyncio.gather(*(ask(proxy.url, messages=histories[n], stream=streamed) for n in names))
            assert [answer.header("X-Program-ID") for answer in answered] == names
            for name, answer in zip(names, answered, strict=True):
                histories[name] += [as_sent_back(said_in(answer)), TOOL_RESULT]
        programs = (await get(proxy.url, "/programs")).json()["programs"]
        assert {program["program_id"]: program["turn_count"] for program in programs} == dict.fromkeys(histories, 3)


async def test_answers_that_are_the_same_are_shared_out(engine_url: str) -> None:
    """At temperature 0 the owner of a second turn is ambiguous: each program gets one, and none gets two."""
    async with running_proxy(engine_url, infer_programs=True) as proxy:
        first = [await ask(proxy.url, max_tokens=4) for _ in range(3)]
        messages = [*turn()["messages"], first[0].json()["choices"][0]["message"], {"role": "user", "content": "more"}]
        assert len({json.dumps(answer.json()["choices"][0]["message"]) for answer in first}) == 1
        second = [await ask(proxy.url, max_tokens=4, messages=messages) for _ in range(3)]
        assert {each.header("X-Program-ID") for each in second} == {each.header("X-Program-ID") for each in first}


@pytest.mark.parametrize("prompt", ["once upon a time " * 300, list(range(5000))], ids=["text", "ids"])
async def test_a_prompt_that_is_a_text_or_token_ids_is_joined_too(prompt: str | list[int]) -> None:
    """This is on the completions endpoint; what follows the answer may be anything."""
    completion: dict[str, Any] = {"text": " there was"}
    if isinstance(prompt, list):
        completion["token_ids"] = [7, 8, 9]
    longer: Any = [*prompt, 7, 8, 9, 1, 2] if isinstance(prompt, list) else prompt + " there was a king"
    other: Any = [*prompt, 7, 8, 1] if isinstance(prompt, list) else prompt + " there is a king"
    async with (
        fake_replica(answers({"choices": [completion]})) as replica,
        running_proxy(replica.url, infer_programs=True) as proxy,
    ):

        async def complete(text: object) -> str | None:
            body = {"model": "m", "prompt": text}
            return (await post(proxy.url, "/v1/completions", body)).header("X-Program-ID")

        first = await complete(prompt)
        assert await complete(longer) == first
        assert await complete(other) not in (first, None)
        assert await complete(prompt) != first


# --- every API of the engines


def said_by_chat(answer: Answer, streamed: bool) -> list[dict[str, Any]]:
    """Return the messages that a client adds."""
    if not streamed:
        return [dict(answer.json()["choices"][0]["message"])]
    choices = [choice for each in events_of(answer.body)[:-1] for choice in each["choices"]]
    return [{"role": "assistant", "content": "".join(choice["delta"].get("content") or "" for choice in choices)}]


def said_by_messages(answer: Answer, streamed: bool) -> list[dict[str, Any]]:
    if not streamed:
        return [{"role": "assistant", "content": answer.json()["content"]}]
    deltas = [each["delta"] for each in named_events(answer.body) if each["type"] == "content_block_delta"]
    return [{"role": "assistant", "content": [{"type": "text", "text": "".join(delta["text"] for delta in deltas)}]}]


def said_by_responses(answer: Answer, streamed: bool) -> list[dict[str, Any]]:
    response = named_events(answer.body)[-1]["response"] if streamed else answer.json()
    return list(response["output"])


def said_by_generate(answer: Answer, streamed: bool) -> list[int]:
    return list((events_of(answer.body)[-2] if streamed else answer.json())["output_ids"])


def said_by_token_in(answer: Answer, streamed: bool) -> list[int]:
    answers = events_of(answer.body)[:-1] if streamed else [answer.json()]
    return [token_id for each in answers for choice in each["choices"] for token_id in choice["token_ids"]]


def named_events(body: bytes) -> list[Any]:
    """Return the data of events that have names."""
    return [json.loads(line[6:]) for line in body.splitlines() if line.startswith(b"data: ")]


USER: Any = {"role": "user", "content": "and then? " * 200}
IDS = list(range(1000, 2500))
APIS: dict[str, tuple[str, str, Any, str, Callable[[Answer, bool], list[Any]]]] = {
    "chat": (CHAT, "messages", [USER], "max_tokens", said_by_chat),
    "messages": ("/v1/messages", "messages", [USER], "max_tokens", said_by_messages),
    "responses": ("/v1/responses", "input", [USER], "max_output_tokens", said_by_responses),
    "generate": ("/generate", "input_ids", IDS, "sampling_params.max_new_tokens", said_by_generate),
    "token in": ("/inference/v1/generate", "token_ids", IDS, "sampling_params.max_tokens", said_by_token_in),
}


@pytest.fixture(scope="module")
def large_engine_urls() -> Iterator[dict[str, str]]:
    """Run an engine of each kind that has room for all programs."""
    with (
        shared_engine(kv_tokens=200_000, double="token_in") as one,
        shared_engine(kv_tokens=200_000, double="sglang.server") as other,
    ):
        yield {"vllm": one, "sglang": other}


@pytest.mark.parametrize("streamed", [False, True], ids=["whole", "streamed"])
@pytest.mark.parametrize("api", APIS)
async def test_embedded_engine_serves_a_group_without_ids(
    large_engine_urls: dict[str, str], api: str, streamed: bool
) -> None:
    """Eight identical first prompts are eight programs, and each next turn joins its own, in every API.

    The engine answers the same prompt in the same words, so the answers differ in their lengths.
    """
    path, field, prompt, limit, said = APIS[api]
    url = large_engine_urls["sglang" if api == "generate" else "vllm"]
    async with running_proxy(url, infer_programs=True) as proxy:

        async def take_turn(prompt: list[Any], limit_tokens: int) -> Answer:
            where, _, name = limit.rpartition(".")
            limits = {where: {name: limit_tokens, "ignore_eos": True}} if where else {name: limit_tokens}
            body = {"model": "simulated", field: prompt, "stream": streamed, "ignore_eos": True, **limits}
            answer = await post(proxy.url, path, body)
            assert answer.status == 200, answer.body
            return answer

        answers = await asyncio.gather(*(take_turn(prompt, 20 + number) for number in range(GROUP)))
        names = [answer.header("X-Program-ID") for answer in answers]
        assert len(set(names)) == GROUP
        following = [0] if isinstance(prompt[0], int) else [USER]
        histories = [prompt] * GROUP
        for _ in range(2):
            histories = [
                [*history, *said(answer, streamed), *following]
                for history, answer in zip(histories, answers, strict=True)
            ]
            answers = await asyncio.gather(*(take_turn(history, 20) for history in histories))
            assert [answer.header("X-Program-ID") for answer in answers] == names
        assert {program.turn_count for program in proxy.runtime.scheduler.programs.values()} == {3}


async def test_a_next_turn_that_comes_before_the_connection_ends_joins() -> None:
    """Its client saw the end of the answer; the engine is slow to close the stream."""
    gate = Gate([stream_head(), chunk(word("once")), chunk(DONE)], [LAST_CHUNK])
    async with (
        fake_replica(gate) as replica,
        running_proxy(replica.url, infer_programs=True) as proxy,
        Wire.open(proxy.url) as wire,
    ):
        wire.send("POST", CHAT, [("Content-Type", "application/json")], json.dumps(turn(stream=True)).encode())
        first = await wire.head()
        received = b""
        while not received.endswith(DONE):
            received += await wire.chunk()
        replica.behaviour = answers()
        history = [*turn()["messages"], {"role": "assistant", "content": "once"}, USER]
        second = await ask(proxy.url, messages=history)
        assert second.header("X-Program-ID") == first.header("X-Program-ID")
        gate.open()


async def test_a_large_next_turn_joins_behind_a_large_answer() -> None:
    """Both are read on a thread, and still the answer is known before its client has it."""
    text = "word " * 300_000
    message = {"role": "assistant", "content": text}
    async with (
        fake_replica(answers({"choices": [{"index": 0, "message": message}]}), capacity_tokens=10**8) as replica,
        running_proxy(replica.url, infer_programs=True) as proxy,
    ):
        history = turn()["messages"]
        names = set()
        for _ in range(4):
            answer = await ask(proxy.url, messages=history)
            names.add(answer.header("X-Program-ID"))
            history = [*history, answer.json()["choices"][0]["message"], USER]
        assert len(names) == 1


async def test_turn_with_a_previous_response_id_is_not_inferred() -> None:
    """Its prompt is not in the body: the engine has it."""
    async with fake_replica() as replica, running_proxy(replica.url, infer_programs=True) as proxy:
        body = {"model": "m", "input": "and?", "previous_response_id": "resp_1"}
        assert (await post(proxy.url, "/v1/responses", body)).header("X-Program-ID") is None


async def test_named_program_is_not_inferred_and_a_turn_without_prompt_stays_anonymous() -> None:
    async with fake_replica() as replica, running_proxy(replica.url, infer_programs=True) as proxy:
        assert (await ask(proxy.url, "named")).header("X-Program-ID-Source") == "body"
        for body in ({"model": "m"}, {"messages": "text"}, {"prompt": {}}, {"prompt": [1.5]}, {"prompt": [-1]}):
            answer = await post(proxy.url, CHAT, body)
            assert (answer.status, answer.header("X-Program-ID")) == (200, None)


async def test_nothing_is_inferred_unless_that_is_wanted() -> None:
    async with fake_replica() as replica, running_proxy(replica.url) as proxy:
        assert (await ask(proxy.url)).header("X-Program-ID") is None


# --- buckets


async def answers_its_agent(call: Call) -> None:
    """Behave: the answer repeats the end of the first message, so it is each agent's own."""
    said = call.json()["messages"][0]["content"][-8:]
    await answers({"choices": [{"index": 0, "message": {"role": "assistant", "content": f"I am {said}"}}]})(call)


async def run_agent(url: str, name: str, turns_count: int, **fields: Any) -> list[str | None]:
    """Run one agent of several turns; return the programs that they were of."""
    messages: list[dict[str, Any]] = [{"role": "user", "content": "work " * 400 + f"{name:>8}"}]
    names = []
    for _ in range(turns_count):
        answer = await post(url, CHAT, {"model": "m", "messages": messages, **fields})
        names.append(answer.header("X-Program-ID"))
        messages = [*messages, answer.json()["choices"][0]["message"], TOOL_RESULT]
    return names


@pytest.mark.parametrize("bucket", [{"prompt_cache_key": "app"}, {"metadata": {"session_id": "app"}}])
async def test_agents_that_share_a_bucket_are_programs_of_their_own(bucket: dict[str, Any]) -> None:
    """They spread over two replicas; each keeps its program, one has the bucket's name."""
    async with (
        fake_replica(answers_its_agent) as one,
        fake_replica(answers_its_agent) as other,
        running_proxy(one.url, other.url) as proxy,
    ):
        runs = await asyncio.gather(*(run_agent(proxy.url, f"agent {i}", 3, **bucket) for i in range(GROUP)))
        assert all(len(set(names)) == 1 for names in runs)
        assert len({names[0] for names in runs}) == GROUP
        assert ["app"] * 3 in runs
        programs = proxy.runtime.scheduler.programs.values()
        assert {program.turn_count for program in programs} == {3}
        assert len(programs) == GROUP
        assert (len(one.calls), len(other.calls)) == (GROUP * 3 // 2, GROUP * 3 // 2)


async def test_agent_with_a_bucket_is_one_program_and_is_released_by_its_name() -> None:
    async with fake_replica(answers_its_agent) as replica, running_proxy(replica.url) as proxy:
        assert set(await run_agent(proxy.url, "agent", 6, prompt_cache_key="run")) == {"run"}
        released = (await post(proxy.url, "/programs/release", {"program_id": "run"})).json()
        assert released["released"] is True
        assert set(await run_agent(proxy.url, "next", 2, prompt_cache_key="run")) == {"run"}


async def test_a_first_turn_in_a_bucket_that_failed_keeps_its_program() -> None:
    """And a next one that does not continue it is another's."""
    async with fake_replica(answers({"error": {}}, status=400)) as replica, running_proxy(replica.url) as proxy:
        first = await ask(proxy.url, prompt_cache_key="run")
        assert (first.status, first.header("X-Program-ID")) == (400, "run")
        replica.behaviour = answers_its_agent
        assert (await ask(proxy.url, prompt_cache_key="run")).header("X-Program-ID") == "run"
        assert (await ask(proxy.url, prompt_cache_key="run")).header("X-Program-ID-Source") == "inferred"


async def test_a_bucket_names_its_program_where_the_operator_says_so() -> None:
    async with fake_replica() as replica, running_proxy(replica.url, bucket_names_program=True) as proxy:
        names = {(await ask(proxy.url, prompt_cache_key="run")).header("X-Program-ID") for _ in range(3)}
        assert names == {"run"}


# --- bearer tokens


async def test_a_token_names_the_program_and_is_not_forwarded() -> None:
    """`ta-ID`, and one that was minted; the openai client needs no other setting than its key."""
    async with fake_replica() as replica, running_proxy(replica.url, bearer_programs=True) as proxy:
        async with openai.AsyncOpenAI(base_url=f"{proxy.url}/v1", api_key="ta-run/7", max_retries=0) as client:
            await client.chat.completions.create(model="m", messages=[{"role": "user", "content": "hi"}])
        opened = (await post(proxy.url, "/programs", {"program_id": "minted"})).json()
        again = (await post(proxy.url, "/programs", {"program_id": "minted"})).json()
        assert opened["token"] == again["token"]
        minted = await post(proxy.url, CHAT, turn(), ("authorization", f"bearer {opened['token']}"))
        assert (minted.header("X-Program-ID"), minted.header("X-Program-ID-Source")) == ("minted", "bearer")
        await post(proxy.url, "/tokenize", {"prompt": "x"}, ("Authorization", "Bearer ta-run/7"))
        assert {program.program_id for program in proxy.runtime.scheduler.programs.values()} == {"run/7", "minted"}
        await post(proxy.url, "/programs/release", {"program_id": "minted"})
        late = await post(proxy.url, CHAT, turn(), ("Authorization", f"Bearer {opened['token']}"))
        assert late.header("X-Program-ID") is None, "a token of a program that ended names nobody"
        assert [call.header("Authorization") for call in replica.calls] == [None] * 4


@pytest.mark.parametrize(
    ("value", "status", "program_id"),
    [
        ("Bearer sk-real-key", 200, None),
        ("Bearer ta-", 400, None),
        ("Basic dGEteA==", 200, None),
        ("Bearer", 200, None),
        ("", 200, None),
        ("Bearer tat_unknown", 200, None),
        ("Bearer ta-" + "x" * 257, 400, None),
    ],
)
async def test_foreign_tokens_name_no_program(value: str, status: int, program_id: str | None) -> None:
    async with fake_replica() as replica, running_proxy(replica.url, bearer_programs=True) as proxy:
        answer = await post(proxy.url, CHAT, turn(), ("Authorization", value))
        assert (answer.status, answer.header("X-Program-ID")) == (status, program_id)


async def test_a_token_comes_after_all_other_names() -> None:
    async with fake_replica() as replica, running_proxy(replica.url, bearer_programs=True) as proxy:
        answer = await post(proxy.url, CHAT, turn("body"), ("Authorization", "Bearer ta-token"))
        assert answer.header("X-Program-ID") == "body"


async def test_without_the_option_tokens_are_the_engines() -> None:
    async with fake_replica() as replica, running_proxy(replica.url) as proxy:
        answer = await post(proxy.url, CHAT, turn(), ("Authorization", "Bearer ta-x"))
        assert answer.header("X-Program-ID") is None
        assert replica.calls[0].header("Authorization") == "Bearer ta-x"
        assert "token" not in (await post(proxy.url, "/programs", {"program_id": "a"})).json()


@pytest.mark.parametrize("bearer_programs", [False, True])
async def test_engines_get_the_operators_key(bearer_programs: bool) -> None:
    """It replaces the client's, on every path."""
    config = {"backend_api_key": "engine", "bearer_programs": bearer_programs}
    async with fake_replica() as replica, running_proxy(replica.url, **config) as proxy:
        await post(proxy.url, CHAT, turn(), ("Authorization", "Bearer ta-x"))
        await ask(proxy.url)
        await post(proxy.url, "/tokenize", {"prompt": "x"}, ("authorization", "Bearer y"))
        await get(proxy.url, "/v1/models")
        assert Counter(call.header("Authorization") for call in replica.calls) == {"Bearer engine": 4}


# --- tenants


async def test_a_tenants_programs_are_listed_and_released() -> None:
    """Others' are not, whether the request names them or asks for all."""
    async with fake_replica() as replica, running_proxy(replica.url) as proxy:
        for name, tenant in (("a", "red"), ("b", "red"), ("c", "blue"), ("d", None)):
            await post(proxy.url, CHAT, turn(name), *([("X-Program-Tenant", tenant)] if tenant else []))
        await post(proxy.url, "/programs", {"program_id": "e", "tenant": "red", "parent_id": "a"})
        listed = (await get(proxy.url, "/programs?tenant=red")).json()
        assert {program["program_id"]: program["tenant"] for program in listed["programs"]} == dict.fromkeys(
            "abe", "red"
        )
        assert {program["program_id"]: program["parent_id"] for program in listed["programs"]}["e"] == "a"

        async def release(**wanted: Any) -> Any:
            return (await post(proxy.url, "/programs/release", wanted)).json()

        assert await release(program_id="c", tenant="red") == {"program_id": "c", "released": False}
        assert (await release(program_ids=["a", "c", "x"], tenant="red"))["released_ids"] == ["a"]
        assert set((await release(all=True, tenant="red"))["released_ids"]) == {"b", "e"}
        assert (await release(all=True, tenant="green"))["released"] is False
        assert {program.program_id for program in proxy.runtime.scheduler.programs.values()} == {"c", "d"}
        assert await release(program_id="c", tenant="blue") == {"program_id": "c", "released": True}
