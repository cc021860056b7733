"""The embedded engine speaks what vLLM speaks besides the completions: to the real SDKs, and through the proxy."""

from __future__ import annotations

import asyncio
import json
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, Any

import anthropic
import httpx2
import openai
import pytest

from tests.doubles.token_in import token_in_server
from tests.integration.support import DEADLINE_S, running_proxy
from thunderagent.simulator.embedded.options import ServerConfig
from thunderagent.simulator.embedded.server import running
from thunderagent.simulator.engine.records import EngineConfig
from thunderagent.simulator.engine.timing import profile

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    from tests.integration.support import RunningProxy

TEXT = "hello " * 60
USER: Any = [{"role": "user", "content": TEXT}]


@asynccontextmanager
async def engine(timing: str = "instant") -> AsyncIterator[str]:
    """Serve an engine in this process."""
    config = EngineConfig(kv_tokens=16_000, timing=profile(timing))
    async with running(ServerConfig(config, port=0, grace_s=0), token_in_server) as url:
        yield url


@pytest.fixture
async def url() -> AsyncIterator[str]:
    async with engine() as url:
        yield url


@pytest.fixture
async def proxy(url: str) -> AsyncIterator[RunningProxy]:
    async with running_proxy(url) as proxy:
        yield proxy


@asynccontextmanager
async def openai_at(base_url: str) -> AsyncIterator[openai.AsyncOpenAI]:
    async with openai.AsyncOpenAI(base_url=base_url, api_key="none", max_retries=0) as client:
        yield client


@asynccontextmanager
async def anthropic_at(base_url: str) -> AsyncIterator[anthropic.AsyncAnthropic]:
    async with anthropic.AsyncAnthropic(base_url=base_url, api_key="none", max_retries=0) as client:
        yield client


def totals(proxy: RunningProxy, program_id: str) -> tuple[int, int, int]:
    program = proxy.runtime.scheduler.programs.get(program_id)
    assert program is not None
    return program.prompt_tokens_total, program.output_tokens_total, program.cached_tokens_total


# --- Responses


async def test_openai_client_gets_responses(proxy: RunningProxy) -> None:
    """Responses are whole or streamed, each after the one before by its id; the second hits what the first left."""
    async with openai_at(f"{proxy.url}/p/a/v1") as client:
        first = await client.responses.create(model="simulated", input=TEXT, instructions="be brief")
        assert (first.status, first.output_text.split()[0][0]) == ("completed", "w")
        assert first.usage is not None
        events = [
            event
            async for event in await client.responses.create(
                model="simulated",
                input=[{"role": "user", "content": [{"type": "input_text", "text": "go on"}]}],
                instructions="be brief",
                previous_response_id=first.id,
                stream=True,
            )
        ]
        assert [event.sequence_number for event in events] == list(range(len(events)))
        last: Any = events[-1]
        assert (events[0].type, last.type) == ("response.created", "response.completed")
        text = "".join(event.delta for event in events if event.type == "response.output_text.delta")
        assert last.response.output_text == text
        again = await client.responses.retrieve(last.response.id)
        assert again.model_dump() == last.response.model_dump()
    usages = [first.usage, last.response.usage]
    assert usages[1].input_tokens_details.cached_tokens > 0
    assert totals(proxy, "a") == (
        sum(usage.input_tokens for usage in usages),
        sum(usage.output_tokens for usage in usages),
        sum(usage.input_tokens_details.cached_tokens for usage in usages),
    )


async def test_a_response_that_is_too_short_is_incomplete(url: str) -> None:
    """It names its token limit as the reason."""
    async with openai_at(f"{url}/v1") as client:
        async with client.responses.stream(model="simulated", input=TEXT, max_output_tokens=3) as stream:
            response = await stream.get_final_response()
        assert response.status == "incomplete"
        assert response.incomplete_details is not None
        assert response.incomplete_details.reason == "max_output_tokens"
        assert response.usage is not None
        assert response.usage.output_tokens == 3


async def test_a_response_in_the_background_is_asked_for_and_cancelled() -> None:
    """Through the proxy, over two engines: it is found where it is made."""
    async with engine("demo") as one, engine("demo") as other, running_proxy(one, other) as proxy:
        async with openai_at(f"{proxy.url}/v1") as client:
            quick = await client.responses.create(model="simulated", input="hi", max_output_tokens=2, background=True)
            slow = [
                await client.responses.create(
                    model="simulated",
                    input=TEXT,
                    max_output_tokens=5000,
                    background=True,
                    extra_body={"ignore_eos": True},
                )
                for _ in range(3)
            ]
            assert {response.status for response in [quick, *slow]} == {"queued"}
            async with asyncio.timeout(DEADLINE_S):
                while (await client.responses.retrieve(quick.id)).status in {"queued", "in_progress"}:
                    await asyncio.sleep(0.02)
            for response in slow:
                assert (await client.responses.retrieve(response.id)).status == "in_progress"
                assert (await client.responses.cancel(response.id)).status == "cancelled"
                assert (await client.responses.retrieve(response.id)).status == "cancelled"
            with pytest.raises(openai.BadRequestError, match="synchronous"):
                await client.responses.cancel(quick.id)
            with pytest.raises(openai.NotFoundError, match="resp_nobody"):
                await client.responses.retrieve("resp_nobody")
        async with httpx2.AsyncClient(timeout=20) as http:
            for url in (one, other):
                text = (await http.get(f"{url}/metrics")).text
                assert 'vllm:num_requests_running{engine="0",model_name="simulated"} 0.0' in text


# --- Messages


async def test_anthropic_client_gets_messages(proxy: RunningProxy) -> None:
    """`/p/{id}` is its base URL; whole, streamed, with a tool's result, and counted beforehand."""
    tools: Any = [{"name": "bash", "description": "run", "input_schema": {"type": "object", "properties": {}}}]
    async with anthropic_at(f"{proxy.url}/p/a") as client:
        whole = await client.messages.create(
            model="simulated",
            max_tokens=64,
            system="be brief",
            messages=USER,
            tools=tools,
            tool_choice={"type": "none"},
        )
        assert (whole.stop_reason, whole.usage.cache_read_input_tokens) == ("end_turn", 0)
        called: Any = [
            *USER,
            {"role": "assistant", "content": [block.model_dump() for block in whole.content]},
            {"role": "assistant", "content": [{"type": "tool_use", "id": "1", "name": "bash", "input": {"x": "ls"}}]},
            {"role": "user", "content": [{"type": "tool_result", "tool_use_id": "1", "content": "a b c"}]},
        ]
        asked: Any = {"model": "simulated", "system": "be brief", "messages": called, "tools": tools}
        counted = await client.messages.count_tokens(**asked)
        async with client.messages.stream(max_tokens=64, **asked) as stream:
            text = "".join([piece async for piece in stream.text_stream])
            final = await stream.get_final_message()
    assert final.content[0].type == "text"
    assert (final.content[0].text, final.stop_reason) == (text, "end_turn")
    usages = [whole.usage, final.usage]
    prompts = [usage.input_tokens + (usage.cache_read_input_tokens or 0) for usage in usages]
    cached = [usage.cache_read_input_tokens or 0 for usage in usages]
    assert prompts[1] == counted.input_tokens
    assert cached[1] > 0
    assert totals(proxy, "a") == (sum(prompts), sum(usage.output_tokens for usage in usages), sum(cached))


async def test_a_refusal_is_an_error_of_the_anthropic_client(proxy: RunningProxy) -> None:
    """It is one for a refusal of the engine, and for one of the proxy."""
    image: Any = [{"role": "user", "content": [{"type": "image", "source": {}}]}]
    ask: dict[str, Any] = {"model": "simulated", "max_tokens": 8}
    async with anthropic_at(proxy.url) as client:
        with pytest.raises(anthropic.NotFoundError, match="nobody"):
            await client.messages.create(model="nobody", max_tokens=8, messages=USER)
        with pytest.raises(anthropic.BadRequestError, match="image") as refused:
            await client.messages.create(**ask, messages=image)
        body: Any = refused.value.body
        assert (body["type"], body["error"]["type"]) == ("error", "BadRequestError")
        with pytest.raises(anthropic.BadRequestError, match="256") as refused:
            await client.messages.create(**ask, messages=USER, extra_headers={"X-Program-ID": "x" * 300})
        body = refused.value.body
        assert (body["type"], body["error"]["code"]) == ("error", "invalid_program_id")


# --- Tokens in, tokens out


async def test_token_ids_in_give_token_ids_out(proxy: RunningProxy, url: str) -> None:
    """A trainer continues from the tokens it got; the stream has usage only on request."""
    prompt = list(range(1000, 1100))
    sampling = {"max_tokens": 20, "ignore_eos": True}
    async with httpx2.AsyncClient(timeout=20) as http:
        target = f"{proxy.url}/p/a/inference/v1/generate"
        whole = (await http.post(target, json={"token_ids": prompt, "sampling_params": sampling})).json()
        tokens = whole["choices"][0]["token_ids"]
        assert (len(tokens), whole["choices"][0]["finish_reason"]) == (20, "length")
        body = {"token_ids": [*prompt, *tokens], "sampling_params": sampling, "stream": True, "request_id": "r"}
        relayed = (await http.post(target, json=body)).text
        direct = (await http.post(f"{url}/inference/v1/generate", json=body)).text
        assert relayed == direct
        assert '"prompt_tokens"' not in relayed
        assert relayed.endswith("data: [DONE]\n\n")
        refused = await http.post(target, json={"token_ids": [-1], "sampling_params": {}})
        assert (refused.status_code, refused.json()["error"]["param"]) == (400, "token_ids")
    prompt_tokens, output_tokens, cached_tokens = totals(proxy, "a")
    assert (prompt_tokens, output_tokens) == (100 + 120, 40)
    assert cached_tokens > 0


# --- Calls of tools

WEATHER: Any = {
    "type": "object",
    "properties": {"city": {"type": "string"}, "days": {"type": "integer", "minimum": 2}},
    "required": ["city", "days"],
}
FUNCTIONS: Any = [
    {"type": "function", "function": {"name": name, "parameters": WEATHER}} for name in ("weather", "traffic")
]


@pytest.mark.parametrize("streamed", [False, True])
async def test_an_agent_of_the_openai_client_calls_two_tools_and_ends(proxy: RunningProxy, streamed: bool) -> None:
    """Each call's arguments satisfy the schema; the next turn finds the call in the cache."""
    messages: Any = list(USER)
    names: list[str] = []
    async with openai_at(f"{proxy.url}/p/loop/v1") as client:
        while True:
            asked: Any = {"model": "simulated", "messages": messages, "tools": FUNCTIONS}
            if streamed:
                async with client.chat.completions.stream(**asked) as stream:
                    choice: Any = (await stream.get_final_completion()).choices[0]
            else:
                choice = (await client.chat.completions.create(**asked)).choices[0]
            calls = choice.message.tool_calls
            if not calls:
                break
            assert choice.finish_reason == "tool_calls"
            names += [call.function.name for call in calls]
            assert json.loads(calls[0].function.arguments) == {"city": "text", "days": 2}
            messages.append({"role": "assistant", "tool_calls": [call.model_dump() for call in calls]})
            messages.append({"role": "tool", "tool_call_id": calls[0].id, "content": "sunny"})
    assert names == ["weather", "traffic"]
    assert choice.finish_reason == "stop"
    assert choice.message.content
    assert totals(proxy, "loop")[2] > 0


@pytest.mark.parametrize("streamed", [False, True])
async def test_an_agent_of_the_anthropic_client_calls_two_tools_and_ends(url: str, streamed: bool) -> None:
    """Blocks of tool_use, streamed or whole; a choice of none gives words, and any gives a call."""
    tools: Any = [{"name": name, "input_schema": WEATHER} for name in ("weather", "traffic")]
    messages: Any = list(USER)
    names: list[str] = []
    async with anthropic_at(url) as client:
        while True:
            asked: Any = {"model": "simulated", "max_tokens": 64, "messages": messages, "tools": tools}
            if streamed:
                async with client.messages.stream(**asked) as stream:
                    answer: Any = await stream.get_final_message()
            else:
                answer = await client.messages.create(**asked)
            if answer.stop_reason != "tool_use":
                break
            (block,) = answer.content
            assert block.input == {"city": "text", "days": 2}
            names.append(block.name)
            messages.append({"role": "assistant", "content": [block.model_dump()]})
            result = {"type": "tool_result", "tool_use_id": block.id, "content": "sunny"}
            messages.append({"role": "user", "content": [result]})
        assert names == ["weather", "traffic"]
        assert answer.stop_reason == "end_turn"
        silent = await client.messages.create(**{**asked, "messages": USER, "tool_choice": {"type": "none"}})
        assert silent.content[0].type == "text"
        forced = await client.messages.create(**{**asked, "tool_choice": {"type": "any"}})
        assert forced.stop_reason == "tool_use"


async def test_a_response_format_and_a_stop_are_kept(url: str) -> None:
    """JSON validates; the text ends before its stop; arguments that do not fit are cut as `length`."""
    async with openai_at(f"{url}/v1") as client:
        asked: Any = {"model": "simulated", "messages": USER}
        form: Any = {"type": "json_schema", "json_schema": {"name": "w", "schema": WEATHER}}
        shaped = await client.chat.completions.create(**asked, response_format=form)
        assert json.loads(shaped.choices[0].message.content or "") == {"city": "text", "days": 2}
        stopped = await client.chat.completions.create(**asked, stop=["w"])
        assert (stopped.choices[0].message.content, stopped.choices[0].finish_reason) == ("", "stop")
        short = await client.chat.completions.create(**asked, tools=FUNCTIONS, max_tokens=2)
        assert (short.choices[0].finish_reason, short.choices[0].message.tool_calls) == ("length", [])
        named: Any = {"type": "function", "function": {"name": "nobody"}}
        with pytest.raises(openai.BadRequestError, match="among the tools"):
            await client.chat.completions.create(**asked, tools=FUNCTIONS, tool_choice=named)


async def test_every_api_keeps_a_form(url: str) -> None:
    """Text completions, the messages' `output_config`, and `structured_outputs`, too."""
    form: Any = {"type": "json_schema", "schema": WEATHER}
    chosen: Any = {"extra_body": {"structured_outputs": {"choice": ["yes", "no"]}}}
    async with openai_at(f"{url}/v1") as client, anthropic_at(url) as other:
        text: Any = {"model": "simulated", "prompt": TEXT}
        shaped = await client.completions.create(
            **text, extra_body={"response_format": {"type": "json_schema", "json_schema": form}}
        )
        assert json.loads(shaped.choices[0].text) == {"city": "text", "days": 2}
        assert (await client.completions.create(**text, **chosen)).choices[0].text == "yes"
        answer = await client.chat.completions.create(model="simulated", messages=USER, **chosen)
        assert answer.choices[0].message.content == "yes"
        said = await other.messages.create(
            model="simulated", max_tokens=50, messages=USER, extra_body={"output_config": {"format": form}}
        )
        assert json.loads(said.content[0].text) == {"city": "text", "days": 2}


@pytest.mark.parametrize("streamed", [False, True])
async def test_an_agent_of_responses_calls_two_tools_and_ends(url: str, streamed: bool) -> None:
    """Each result follows the response by its id, so only the store knows what was called before."""
    tools: Any = [
        {"type": "function", "name": name, "parameters": WEATHER, "strict": False} for name in ("weather", "traffic")
    ]
    asked: Any = {"model": "simulated", "input": TEXT, "tools": tools}
    names: list[str] = []
    async with openai_at(f"{url}/v1") as client:
        while True:
            if streamed:
                async with client.responses.stream(**asked) as stream:
                    answer: Any = await stream.get_final_response()
            else:
                answer = await client.responses.create(**asked)
            assert answer.status == "completed"
            if answer.output[0].type != "function_call":
                break
            (call,) = answer.output
            assert json.loads(call.arguments) == {"city": "text", "days": 2}
            names.append(call.name)
            result = {"type": "function_call_output", "call_id": call.call_id, "output": "sunny"}
            asked |= {"input": [result], "previous_response_id": answer.id}
        assert names == ["weather", "traffic"]
        form: Any = {"format": {"type": "json_schema", "name": "w", "schema": WEATHER}}
        shaped = await client.responses.create(model="simulated", input=TEXT, text=form)
        assert json.loads(shaped.output_text) == {"city": "text", "days": 2}


@pytest.mark.parametrize("encoding", ["float", "base64"])
async def test_embeddings_of_texts_that_share_words_are_near(proxy: RunningProxy, encoding: Any) -> None:
    """A vector for each text, the same again; an empty input is refused."""
    async with openai_at(f"{proxy.url}/p/e/v1") as client:
        asked: Any = {"model": "simulated", "dimensions": 512}
        texts = ["red green blue", "red green sea", "up and down"]
        default = await client.embeddings.create(**asked, input=texts)  # the client asks for base64, and decodes it
        answer = await client.embeddings.create(**asked, input=texts, encoding_format=encoding)
        if encoding == "float":
            one, near, far = (entry.embedding for entry in answer.data)
            assert [entry.embedding for entry in default.data] == [one, near, far]
            assert sum(a * b for a, b in zip(one, near, strict=True)) > sum(
                a * b for a, b in zip(one, far, strict=True)
            )
            assert sum(a * a for a in one) == pytest.approx(1)
        assert answer.usage.prompt_tokens == 9
        with pytest.raises(openai.BadRequestError, match="empty"):
            await client.embeddings.create(**asked, input=[])
        tokens: Any = [[5, 6], [7]]
        assert len((await client.embeddings.create(**asked, input=tokens)).data) == 2
        assert len((await client.embeddings.create(**asked, input=[5, 6])).data) == 1


# --- What is malformed


DEEP: Any = {}
for _ in range(300):
    DEEP = {"type": "array", "minItems": 1, "items": DEEP}
HOSTILE: list[Any] = [
    "no schema",
    {"type": "object", "properties": ["a"], "required": ["a"]},
    {"type": "object", "required": [{}]},
    {"type": "string", "minLength": "ten"},
    {"type": "array", "minItems": 10**12},
    {"type": "array", "minItems": 1000, "items": {"type": "array", "minItems": 1000, "items": {"type": "string"}}},
    {"$ref": 7},
    {"anyOf": {}},
    {"type": {"a": []}},
    {"multipleOf": 0, "type": "integer", "minimum": 1},
    {"type": "integer", "minimum": 10**400},
    DEEP,
]


@pytest.mark.parametrize("schema", HOSTILE, ids=lambda schema: json.dumps(schema)[:40])
async def test_a_schema_without_a_small_instance_is_refused_in_the_caller_s_api(url: str, schema: Any) -> None:
    """As a tool's, and as that of an answer; through every API that takes it."""
    function = {"name": "look", "parameters": schema}
    form = {"type": "json_schema", "name": "n", "schema": schema}
    chat = {"model": "simulated", "messages": USER}
    asked: list[tuple[str, Any]] = [
        ("chat/completions", {**chat, "tools": [{"type": "function", "function": function}]}),
        ("chat/completions", {**chat, "response_format": {"type": "json_schema", "json_schema": form}}),
        ("responses", {"model": "simulated", "input": TEXT, "tools": [{"type": "function", **function}]}),
        ("responses", {"model": "simulated", "input": TEXT, "text": {"format": form}}),
        ("messages", {**chat, "max_tokens": 9, "tools": [{"name": "look", "input_schema": schema}]}),
        ("messages", {**chat, "max_tokens": 9, "output_config": {"format": form}}),
        ("completions", {"prompt": TEXT, "structured_outputs": {"json": schema}}),
    ]
    async with httpx2.AsyncClient(base_url=f"{url}/v1/", timeout=DEADLINE_S) as client:
        for path, body in asked:
            answer = await client.post(path, json=body)
            assert answer.status_code == 400, (path, answer.text)
            said = answer.json()
            assert said["error"]["message"]
            assert (said.get("type") == "error") == (path == "messages")


async def test_a_malformed_request_with_tools_is_refused_and_is_no_error_of_the_engine(url: str) -> None:
    """Choices, items and blocks that are of another type than their API says."""
    tool = {"name": "look", "input_schema": {"type": "object"}}
    function = {"type": "function", "function": {"name": "look", "parameters": {"type": "object"}}}
    asked: list[tuple[str, Any]] = [
        ("messages", {"messages": USER, "max_tokens": 9, "tools": [tool], "tool_choice": {"type": []}}),
        ("messages", {"messages": USER, "max_tokens": 9, "tools": [tool], "tool_choice": {"type": "tool", "name": {}}}),
        ("messages", {"messages": [{"role": "user", "content": [{"type": []}]}], "max_tokens": 9}),
        (
            "messages",
            {"messages": [{"role": "user", "content": [{"type": "tool_result", "content": [7]}]}], "max_tokens": 9},
        ),
        ("messages", {"messages": USER, "max_tokens": 9, "tools": [{"name": 7, "input_schema": {}}]}),
        ("responses", {"input": [{"type": []}]}),
        ("responses", {"input": [{"role": "user", "content": [7]}]}),
        ("responses", {"input": TEXT, "tools": [{"type": "function"}]}),
        ("responses", {"input": TEXT, "tool_choice": {"type": []}}),
        ("chat/completions", {"messages": USER, "tools": [function], "tool_choice": {"function": []}}),
        ("chat/completions", {"messages": USER, "tools": [function], "tool_choice": "sometimes"}),
        ("chat/completions", {"messages": USER, "tools": [{"type": "function", "function": []}]}),
        ("chat/completions", {"messages": USER, "response_format": {"type": "json_schema", "json_schema": []}}),
    ]
    async with httpx2.AsyncClient(base_url=f"{url}/v1/", timeout=DEADLINE_S) as client:
        for path, body in asked:
            answer = await client.post(path, json={"model": "simulated", **body})
            assert (answer.status_code, "error" in answer.json()) == (400, True), (path, body, answer.text)
