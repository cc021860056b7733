"""Run the unchanged code of each page of docs/integrations, in an environment with its packages: it is one program.

The clients of these pages also run with the embedded engine, which generates, caches, and calls tools by a plan.
"""

from __future__ import annotations

import json
import re
from typing import TYPE_CHECKING

import pytest

from tests.integration.support import metrics_of, running_proxy
from tests.real.client_runner import PAGES, PYTHON_PAGES
from tests.real.scripted_model import ScriptedModel
from thunderagent.programs.messages import Decision, Event, ProgramReleased, TurnAsk, TurnEnd
from thunderagent.simulator.embedded.options import ServerConfig
from thunderagent.simulator.embedded.server import running
from thunderagent.simulator.engine.records import EngineConfig
from thunderagent.simulator.engine.timing import profile

if TYPE_CHECKING:
    from collections.abc import Sequence

    from tests.real.client_runner import ClientRunner


def code(name: str) -> str:
    """Return the first Python block of a page."""
    found = re.search(r"^```python\n(.*?)^```", (PAGES / f"{name}.md").read_text(), re.DOTALL | re.MULTILINE)
    assert found is not None, name
    return found[1]


class Seen:
    """The events that the scheduler received."""

    def __init__(self, output_tokens: int | None = 20) -> None:
        self.output_tokens = output_tokens
        """Of each turn, if all are the same."""
        self.arrived: list[str | None] = []
        self.branches: list[str] = []
        self.finished_count = 0
        self.tools: list[str] = []
        self.released: list[str] = []

    def __call__(self, event: Event, decisions: Sequence[Decision]) -> None:
        if isinstance(event, TurnAsk):
            self.arrived.append(event.program_id)
            self.branches.append(event.branch_id)
        elif isinstance(event, TurnEnd) and event.outcome == "finished":
            self.finished_count += 1
            self.tools.append(event.tool)
            assert event.prompt_tokens
            assert event.output_tokens == self.output_tokens or (event.output_tokens and self.output_tokens is None)
        elif isinstance(event, ProgramReleased):
            self.released.append(event.program_id)


@pytest.mark.parametrize(("name", "turns_count"), PYTHON_PAGES.items(), ids=list(PYTHON_PAGES))
async def test_the_page_s_code_is_one_program(clients: ClientRunner, name: str, turns_count: int) -> None:
    """Its turns belong to one program, their usage and tool are read, its answer arrives, and it is released."""
    async with ScriptedModel().running() as model, running_proxy(model.url) as proxy:
        seen = Seen()
        proxy.runtime.observe(seen)
        script = code(name).replace("http://127.0.0.1:8300", proxy.url)
        output = await clients.run(script)
        assert "sunny" in output or "hello to you" in output
        assert len(seen.arrived) == seen.finished_count == turns_count
        assert len({*seen.arrived}) == 1
        assert seen.released == seen.arrived[:1] != [None]
        assert [bool(tool) for tool in seen.tools] == [number < turns_count - 1 for number in range(turns_count)]


async def test_the_graph_of_langchain_calls_both_tools_on_simulated_engines(clients: ClientRunner) -> None:
    """As `thunderagent serve` has them: call, result, call, result, words."""
    async with (
        running(ServerConfig(EngineConfig(kv_tokens=16_000), port=0, grace_s=0)) as one,
        running_proxy(one) as proxy,
    ):
        seen = Seen(output_tokens=None)
        proxy.runtime.observe(seen)
        output = await clients.run(code("langchain").replace("http://127.0.0.1:8300", proxy.url))
        assert output.index("sunny in ") < output.index("2,000,000 in ")
        assert seen.tools == ["weather", "population", ""]
        assert seen.released == seen.arrived[:1] != [None]


VARIANTS = {
    "openai responses": """
from openai import OpenAI

client = OpenAI(base_url=f"{PROXY}/p/task-1/v1", api_key="none")
whole = client.responses.create(model="simulated", input="hello")
with client.responses.stream(model="simulated", input="hello") as stream:
    streamed = stream.get_final_response()
print(whole.output_text == streamed.output_text == "hello to you")
""",
    "openai chat stream": """
from openai import OpenAI

client = OpenAI(base_url=f"{PROXY}/p/task-1/v1", api_key="none")
messages = [{"role": "user", "content": "hello"}]
for options in ({}, {"stream_options": {"include_usage": True}}):
    chunks = list(client.chat.completions.create(model="simulated", messages=messages, stream=True, **options))
    text = "".join(choice.delta.content or "" for chunk in chunks for choice in chunk.choices)
    usages = [chunk.usage for chunk in chunks if chunk.usage]
    print(text == "hello to you" and len(usages) == len(options))
""",
    "anthropic stream": """
from anthropic import Anthropic

client = Anthropic(base_url=f"{PROXY}/p/task-1", api_key="none")
asked = {"model": "simulated", "messages": [{"role": "user", "content": "hello"}]}
with client.messages.stream(max_tokens=8, **asked) as stream:
    print(stream.get_final_text() == "hello to you")
whole = client.messages.create(max_tokens=8, **asked)
print(whole.content[0].text == "hello to you" and client.messages.count_tokens(**asked).input_tokens > 0)
""",
    "langchain stream": """
from langchain_openai import ChatOpenAI

for more in ({}, {"use_responses_api": True}):
    model = ChatOpenAI(base_url=f"{PROXY}/p/task-1/v1", api_key="none", model="simulated", **more)
    text = "".join(chunk.text for chunk in model.stream("hello"))
    print(text == "hello to you")
""",
    "agents responses": """
import asyncio

from agents import Agent, OpenAIResponsesModel, Runner, function_tool, set_tracing_disabled
from openai import AsyncOpenAI

set_tracing_disabled(True)


@function_tool
def weather(city: str) -> str:
    return f"sunny in {city}"


async def run() -> None:
    async with AsyncOpenAI(base_url=f"{PROXY}/p/task-1/v1", api_key="none") as client:
        model = OpenAIResponsesModel(model="simulated", openai_client=client)
        result = Runner.run_streamed(Agent(name="forecaster", tools=[weather], model=model), "How is it?")
        async for event in result.stream_events():
            pass
        print("sunny in Paris" in result.final_output)


asyncio.run(run())
""",
    "litellm responses and messages": """
import litellm

base = f"{PROXY}/p/task-1"
answer = litellm.responses(model="hosted_vllm/simulated", api_base=f"{base}/v1", api_key="none", input="hello")
print(answer.output[0].content[0].text == "hello to you")
chunks = litellm.completion(
    model="anthropic/simulated", api_base=base, api_key="none", stream=True,
    messages=[{"role": "user", "content": "hello"}],
)
print("".join(chunk.choices[0].delta.content or "" for chunk in chunks) == "hello to you")
""",
    "openhands' calls of litellm": """
import litellm

asked = dict(
    model="openai/simulated", api_key="none", api_base=f"{PROXY}/v1", api_version=None, timeout=300, drop_params=True,
    seed=None, messages=[{"role": "user", "content": "hello"}], tools=None, top_p=1.0, temperature=0.0,
    max_completion_tokens=None, extra_headers={"x-litellm-session-id": "task-1"},
)
whole = litellm.completion(**asked)
streamed = litellm.stream_chunk_builder(list(litellm.completion(**asked, stream=True)), messages=asked["messages"])
print(whole.choices[0].message.content == streamed.choices[0].message.content == "hello to you")
""",
    "swe-agent's calls of litellm": """
import litellm

tool = {"type": "function", "function": {"name": "bash", "parameters": {"type": "object", "properties": {
    "command": {"type": "string"}}, "required": ["command"]}}}
messages = [{"role": "user", "content": "hello"}]
for _ in range(2):
    answer = litellm.completion(
        model="openai/simulated", messages=messages, temperature=0.0, top_p=1.0, api_version=None, api_key="none",
        fallbacks=[], timeout=3600, extra_headers={"User-Agent": "swe-agent/1.1.0"}, api_base=f"{PROXY}/p/task-1/v1",
        tools=[tool], n=1,
    )
    calls = [call.to_dict() for call in answer.choices[0].message.tool_calls or []]
    messages.append({"role": "assistant", "content": answer.choices[0].message.content or "", "tool_calls": calls})
    if calls:
        messages.append({"role": "tool", "content": "done", "tool_call_id": calls[0]["id"]})
print(len(messages) == 4 and not calls)
""",
}


@pytest.mark.parametrize("name", VARIANTS)
async def test_a_client_s_other_ways_to_ask(clients: ClientRunner, name: str) -> None:
    """Responses, messages and streams through real clients: each request is a turn whose usage is read."""
    async with ScriptedModel().running() as model, running_proxy(model.url) as proxy:
        seen = Seen()
        proxy.runtime.observe(seen)
        output = await clients.run(f"PROXY = {proxy.url!r}\n{VARIANTS[name]}")
        assert "True" in output
        assert "False" not in output
        assert seen.finished_count == len(seen.arrived) == 2
        assert set(seen.arrived) == {"task-1"}
        proxy.runtime.release("task-1")


BEFORE = """
import json

import httpx2

NAMED = {"X-Program-ID": "task-1"}
LONG = "How is the weather in Paris, and why? " * 20
TOOL = {"type": "function", "function": {"name": "weather", "parameters": {"type": "object", "properties": {
    "city": {"type": "string"}}, "required": ["city"]}}}
"""

AFTER = """
with httpx2.Client(base_url=PROXY) as admin:
    print(json.dumps(admin.get("/programs").json()["programs"]))
    print(json.dumps(admin.post("/programs/release", json={"program_id": "task-1"}).json()))
"""

CONVERSATIONS = {
    "openai chat": """
from openai import OpenAI

messages = [{"role": "user", "content": LONG}]
with OpenAI(base_url=f"{PROXY}/v1", api_key="none") as client:
    for number in range(4):
        asked = {"model": "simulated", "messages": messages, "max_tokens": 12, "tools": [TOOL], "tool_choice": "none"}
        asked |= {"extra_headers": NAMED} if number % 2 else {"extra_body": {"program_id": "task-1"}}
        if number < 2:
            text = client.chat.completions.create(**asked).choices[0].message.content
        else:
            with client.chat.completions.create(**asked, stream=True) as stream:
                text = "".join(chunk.choices[0].delta.content or "" for chunk in stream)
        assert text
        messages += [{"role": "assistant", "content": text}, {"role": "user", "content": "go on"}]
""",
    "openai responses": """
from openai import OpenAI

last = None
with OpenAI(base_url=f"{PROXY}/v1", api_key="none", default_headers=NAMED) as client:
    for number in range(4):
        asked = {"model": "simulated", "input": "go on" if last else LONG, "max_output_tokens": 12}
        asked |= {"previous_response_id": last.id} if last else {}
        asked |= {"tools": [{"type": "function", "strict": None, **TOOL["function"]}], "tool_choice": "none"}
        if number < 2:
            last = client.responses.create(**asked)
        else:
            with client.responses.stream(**asked) as stream:
                last = stream.get_final_response()
        assert last.output_text
    assert client.responses.retrieve(last.id).output_text == last.output_text
""",
    "anthropic": """
from anthropic import Anthropic

tool = {"name": "weather", "input_schema": TOOL["function"]["parameters"]}
messages = [{"role": "user", "content": LONG}]
with Anthropic(base_url=PROXY, api_key="none", default_headers=NAMED) as client:
    for number in range(4):
        asked = {"model": "simulated", "messages": messages, "tools": [tool]}
        assert client.messages.count_tokens(**asked).input_tokens > 0
        asked["tool_choice"] = {"type": "none"}
        if number < 2:
            text = client.messages.create(**asked, max_tokens=12).content[0].text
        else:
            with client.messages.stream(**asked, max_tokens=12) as stream:
                text = stream.get_final_text()
        assert text
        messages += [{"role": "assistant", "content": text}, {"role": "user", "content": "go on"}]
""",
    "litellm": """
import litellm

messages = [{"role": "user", "content": LONG}]
for number in range(4):
    asked = {"model": "hosted_vllm/simulated", "api_base": f"{PROXY}/v1", "api_key": "none", "max_tokens": 12}
    asked |= {"messages": messages, "tools": [TOOL], "tool_choice": "none"}
    asked |= {"extra_headers": NAMED} if number % 2 else {"extra_body": {"program_id": "task-1"}}
    if number < 2:
        answer = litellm.completion(**asked)
    else:
        answer = litellm.stream_chunk_builder(list(litellm.completion(**asked, stream=True)), messages=messages)
    text = answer.choices[0].message.content
    assert text
    messages += [{"role": "assistant", "content": text}, {"role": "user", "content": "go on"}]
""",
    "langchain": """
from langchain.agents import create_agent
from langchain_openai import ChatOpenAI


def weather(city: str) -> str:
    return f"sunny in {city}"


weather.__doc__ = "Tell the weather in a city."


base = {"base_url": f"{PROXY}/v1", "api_key": "none", "model": "simulated", "max_tokens": 12}
base["model_kwargs"] = {"tool_choice": "none"}
messages = [("user", LONG)]
for more in ({"default_headers": NAMED}, {"extra_body": {"program_id": "task-1"}}):
    agent = create_agent(ChatOpenAI(**base, **more), tools=[weather])
    messages = [*agent.invoke({"messages": messages})["messages"], ("user", "go on")]
    streamed = [part for part, _ in agent.stream({"messages": messages}, stream_mode="messages")]
    assert len(streamed) > 2
    text = "".join(part.text for part in streamed)
    assert text and messages[-2].text
    messages += [("assistant", text), ("user", "go on")]
""",
    "agents": """
import asyncio

from agents import Agent, ModelSettings, OpenAIChatCompletionsModel, Runner, function_tool, set_tracing_disabled
from openai import AsyncOpenAI

set_tracing_disabled(True)


@function_tool
def weather(city: str) -> str:
    return f"sunny in {city}"


async def run() -> None:
    history = [{"role": "user", "content": LONG}]
    async with AsyncOpenAI(base_url=f"{PROXY}/v1", api_key="none") as client:
        model = OpenAIChatCompletionsModel(model="simulated", openai_client=client)
        for named in ({"extra_headers": NAMED}, {"extra_body": {"program_id": "task-1"}}):
            agent = Agent(name="forecaster", tools=[weather], model=model,
                          model_settings=ModelSettings(max_tokens=12, tool_choice="none", **named))
            result = await Runner.run(agent, history)
            assert result.final_output
            history = [*result.to_input_list(), {"role": "user", "content": "go on"}]
            result = Runner.run_streamed(agent, history)
            deltas = [e for e in [e async for e in result.stream_events()] if e.type == "raw_response_event"]
            assert len(deltas) > 2 and result.final_output
            history = [*result.to_input_list(), {"role": "user", "content": "go on"}]


asyncio.run(run())
""",
}
CONVERSATION_TURNS = 4


@pytest.mark.parametrize("name", CONVERSATIONS)
async def test_a_conversation_with_an_engine_is_one_program(clients: ClientRunner, name: str) -> None:
    """Whole and streamed, named by a header or in the body: each request is exactly one turn and one generation."""
    config = ServerConfig(EngineConfig(kv_tokens=64_000, timing=profile("instant")), port=0, grace_s=0)
    async with running(config) as engine_url, running_proxy(engine_url) as proxy:
        seen = Seen(output_tokens=None)
        proxy.runtime.observe(seen)
        output = await clients.run(f"PROXY = {proxy.url!r}\n{BEFORE}{CONVERSATIONS[name]}{AFTER}")
        (program,), released = map(json.loads, output.splitlines()[-2:])
        assert (program["program_id"], program["turn_count"]) == ("task-1", CONVERSATION_TURNS)
        assert seen.arrived == ["task-1"] * CONVERSATION_TURNS
        assert seen.finished_count == CONVERSATION_TURNS
        assert 0 < program["output_tokens_total"] <= 12 * CONVERSATION_TURNS
        assert program["cached_tokens_total"] > program["prompt_tokens_total"] / 2  # each turn continues the last one
        assert released["released"] is True
        assert seen.released == ["task-1"]
        assert len(proxy.runtime.scheduler.programs) == 0
        generations = (await metrics_of(engine_url))["vllm:request_success_total"]
        assert sum(generations.values()) == CONVERSATION_TURNS


LOOPS = {
    "langgraph": """
from langchain_core.tools import tool
from langchain_openai import ChatOpenAI
from langgraph.graph import START, MessagesState, StateGraph
from langgraph.prebuilt import ToolNode, tools_condition

weather, population = (tool(each) for each in (weather, population))
model = ChatOpenAI(base_url=f"{PROXY}/p/task-1/v1", api_key="none", model="simulated")
able = model.bind_tools([weather, population])
graph = StateGraph(MessagesState)
graph.add_node("model", lambda state: {"messages": [able.invoke(state["messages"])]})
graph.add_node("tools", ToolNode([weather, population]))
graph.add_edge(START, "model")
graph.add_conditional_edges("model", tools_condition)
graph.add_edge("tools", "model")
messages = graph.compile().invoke({"messages": [("user", LONG)]})["messages"]
assert messages[-1].text and not messages[-1].tool_calls
""",
    "openai agents": """
import asyncio

from agents import Agent, OpenAIChatCompletionsModel, Runner, function_tool, set_tracing_disabled
from openai import AsyncOpenAI

set_tracing_disabled(True)


async def run() -> None:
    async with AsyncOpenAI(base_url=f"{PROXY}/p/task-1/v1", api_key="none") as client:
        model = OpenAIChatCompletionsModel(model="simulated", openai_client=client)
        tools = [function_tool(each) for each in (weather, population)]
        result = await Runner.run(Agent(name="traveller", tools=tools, model=model), LONG)
        assert result.final_output


asyncio.run(run())
""",
    "openai agents with responses": """
import asyncio

from agents import Agent, OpenAIResponsesModel, Runner, function_tool, set_tracing_disabled
from openai import AsyncOpenAI

set_tracing_disabled(True)


async def run() -> None:
    async with AsyncOpenAI(base_url=f"{PROXY}/p/task-1/v1", api_key="none") as client:
        model = OpenAIResponsesModel(model="simulated", openai_client=client)
        tools = [function_tool(each) for each in (weather, population)]
        result = Runner.run_streamed(Agent(name="traveller", tools=tools, model=model), LONG)
        async for _ in result.stream_events():
            pass
        assert result.final_output


asyncio.run(run())
""",
}
LOOP_TOOLS = '''
done = []


def weather(city: str) -> str:
    """Tell the weather in a city."""
    done.append("weather")
    return f"sunny in {city}"


def population(city: str, year: int) -> str:
    """Tell how many people lived in a city."""
    done.append("population")
    return f"{year + 2_000_000} in {city}"

'''


@pytest.mark.parametrize("name", LOOPS)
async def test_an_agent_loop_with_two_tools_ends_on_simulated_engines(clients: ClientRunner, name: str) -> None:
    """Call, result, call, result, words: three turns of one program, whose tools ran, and whose release is seen."""
    config = ServerConfig(EngineConfig(kv_tokens=64_000, timing=profile("instant")), port=0, grace_s=0)
    async with running(config) as one, running(config) as other, running_proxy(one, other) as proxy:
        seen = Seen(output_tokens=None)
        proxy.runtime.observe(seen)
        script = f"PROXY = {proxy.url!r}\n{BEFORE}{LOOP_TOOLS}{LOOPS[name]}\nprint(json.dumps(done)){AFTER}"
        called, programs, released = map(json.loads, (await clients.run(script)).splitlines()[-3:])
        assert called == ["weather", "population"]
        assert [(program["program_id"], program["turn_count"]) for program in programs] == [("task-1", 3)]
        assert seen.arrived == ["task-1"] * 3
        assert seen.tools == ["weather", "population", ""]
        assert released["released"] is True
        assert seen.released == ["task-1"]
        assert len(proxy.runtime.scheduler.programs) == 0
