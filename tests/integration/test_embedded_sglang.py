"""The SGLang that tests use behaves on a socket as one does for its clients."""

from __future__ import annotations

import asyncio
import json
from contextlib import asynccontextmanager
from itertools import pairwise
from typing import TYPE_CHECKING, Any

import httpx2
import openai
import pytest

from tests.doubles.sglang.server import SglangServer
from thunderagent.backends.sglang import SglangBackend
from thunderagent.simulator.embedded.options import ServerConfig
from thunderagent.simulator.embedded.server import running
from thunderagent.simulator.engine.records import EngineConfig
from thunderagent.simulator.engine.timing import profile

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

LONG = {"sampling_params": {"max_new_tokens": 5000, "ignore_eos": True}}  # about 40 s on the demo engine
PROMPT = "hello " * 60


@asynccontextmanager
async def served(timing: str = "demo", **config: Any) -> AsyncIterator[httpx2.AsyncClient]:
    """Serve an engine in this process."""
    engine = EngineConfig(**{"kv_tokens": 16_000, "timing": profile(timing), **config})
    async with (
        running(ServerConfig(engine, port=0), SglangServer) as url,
        httpx2.AsyncClient(base_url=url, timeout=20) as client,
    ):
        yield client


async def generate(client: httpx2.AsyncClient, **body: Any) -> Any:
    response = await client.post("/generate", json=body)
    assert response.status_code == 200, response.text
    return response.json()


async def load_of(client: httpx2.AsyncClient) -> dict[str, Any]:
    """Return the load of the one rank, without the time."""
    (load,) = (await client.get("/v1/loads")).json()["loads"]
    return {name: value for name, value in load.items() if name != "timestamp"}


async def running_count(client: httpx2.AsyncClient, count: int) -> None:
    """Wait until this number of requests is inside."""
    async with asyncio.timeout(20):
        while (load := await load_of(client))["num_running_reqs"] + load["num_waiting_reqs"] != count:
            await asyncio.sleep(0.005)


@asynccontextmanager
async def long_request(client: httpx2.AsyncClient, **body: Any) -> AsyncIterator[asyncio.Task[Any]]:
    """Have a request run that would take very long."""
    task = asyncio.create_task(generate(client, **{"text": PROMPT, **LONG, **body}))
    try:
        await running_count(client, 1)
        yield task
    finally:
        task.cancel()


def events_of(text: str) -> list[Any]:
    """Return the events of a stream, having checked its end."""
    *events, done, nothing = text.split("\n\n")
    assert (done, nothing) == ("data: [DONE]", "")
    return [json.loads(event.removeprefix("data: ")) for event in events]


# --- generating


async def test_an_answer_has_its_tokens_and_what_slime_reads_of_it() -> None:
    """Tokens in, tokens and log probabilities out, with the reason of the end."""
    async with served("instant") as client:
        answer = await generate(
            client,
            input_ids=[200, 201, 202],
            sampling_params={"max_new_tokens": 5, "ignore_eos": True},
            return_logprob=True,
            rid="r-1",
        )
        meta_info = answer["meta_info"]
        assert meta_info["id"] == "r-1"
        assert meta_info["finish_reason"] == {"type": "length", "length": 5}
        assert (meta_info["prompt_tokens"], meta_info["completion_tokens"]) == (3, 5)
        assert [token for _, token, _ in meta_info["output_token_logprobs"]] == answer["output_ids"]
        assert len(answer["text"].split()) == len(answer["output_ids"]) == 5


async def test_the_answer_in_the_next_prompt_hits_the_cache() -> None:
    """Prompt and answer as tokens, or as text, are the same prefix again."""
    async with served("instant") as client:
        first = await generate(client, text=PROMPT, sampling_params={"max_new_tokens": 40, "ignore_eos": True})
        again = await generate(client, text=PROMPT + first["text"], sampling_params={"max_new_tokens": 1})
        assert again["meta_info"]["prompt_tokens"] == 100
        assert again["meta_info"]["cached_tokens"] == 96


async def test_a_stream_says_all_so_far_each_time() -> None:
    """SGLang's streams are cumulative, and the last event is the whole answer."""
    async with served() as client:
        sampling = {"max_new_tokens": 4, "ignore_eos": True}
        response = await client.post("/generate", json={"text": "a b", "stream": True, "sampling_params": sampling})
        assert response.headers["content-type"].startswith("text/event-stream")
        events = events_of(response.text)
        assert [event["meta_info"]["completion_tokens"] for event in events] == [1, 2, 3, 4]
        assert all(later["text"].startswith(earlier["text"]) for earlier, later in pairwise(events))
        assert [event["meta_info"]["finish_reason"] is None for event in events] == [True, True, True, False]
        whole = await generate(client, text="a b", sampling_params=sampling)
        assert events[-1]["output_ids"] == whole["output_ids"]


async def test_several_prompts_have_several_answers() -> None:
    """Each gets an id of its own; a stream says which one an event is of."""
    async with served("instant") as client:
        body = {"text": ["a", "b c"], "rid": "x", "sampling_params": {"max_new_tokens": 2, "ignore_eos": True}}
        answers = await generate(client, **body)
        assert [answer["meta_info"]["id"] for answer in answers] == ["x_0", "x_1"]
        events = events_of((await client.post("/generate", json={**body, "stream": True})).text)
        last = {event["index"]: event["output_ids"] for event in events}
        assert last == {index: answer["output_ids"] for index, answer in enumerate(answers)}


async def test_openai_clients_are_served() -> None:
    """Chat and completions, whole and streamed, with usage, by the library that people use."""
    async with served("instant") as client:
        openai_client = openai.AsyncOpenAI(base_url=str(client.base_url.join("/v1")), api_key="none", max_retries=0)
        messages: Any = [{"role": "user", "content": PROMPT}]
        chat = await openai_client.chat.completions.create(
            model="any", messages=messages, max_tokens=3, extra_body={"rid": "chat-1", "ignore_eos": True}
        )
        assert chat.id == "chat-1"
        assert chat.choices[0].finish_reason == "length"
        assert chat.usage is not None
        assert (chat.usage.prompt_tokens, chat.usage.completion_tokens) == (63, 3)
        streamed = await openai_client.chat.completions.create(
            model="any",
            messages=messages,
            max_tokens=3,
            stream=True,
            stream_options={"include_usage": True},
            extra_body={"ignore_eos": True},
        )
        chunks = [chunk async for chunk in streamed]
        said = "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices)
        assert said == chat.choices[0].message.content
        assert chunks[-1].usage is not None
        assert chunks[-1].usage.prompt_tokens_details is not None
        assert chunks[-1].usage.prompt_tokens_details.cached_tokens == 48
        completion = await openai_client.completions.create(model="any", prompt="a b", max_tokens=2)
        assert completion.choices[0].text.startswith(" w")
        await openai_client.close()


@pytest.mark.parametrize(
    ("path", "body", "says"),
    [
        ("/generate", {}, "Either text, input_ids"),
        ("/generate", {"text": "a", "input_ids": [1]}, "Either text, input_ids"),
        ("/generate", {"text": []}, "empty"),
        ("/generate", {"input_ids": [[1], 2]}, "list of integers"),
        ("/generate", {"input_ids": [1] * 17_000}, "longer than the model's context length"),
        ("/generate", {"text": "a", "sampling_params": {"max_new_tokens": 16_000}}, "Requested token count exceeds"),
        ("/generate", {"text": "a", "sampling_params": {"max_new_tokens": 0}}, "at least 1"),
        ("/generate", {"text": ["a", "b"], "rid": ["x"]}, "mismatch"),
        ("/generate", {"text": "a", "sampling_params": {"n": 2}}, "n must be 1"),
        ("/v1/chat/completions", {"messages": "hi"}, "not valid"),
        ("/v1/chat/completions", {"messages": [], "max_tokens": 0}, "positive"),
        ("/v1/completions", {"prompt": ["a", "b"]}, "several"),
        ("/close_session", {}, "not valid"),
        ("/pause_generation", {"mode": "sleep"}, "not valid"),
    ],
)
async def test_senseless_request_is_refused(path: str, body: dict[str, Any], says: str) -> None:
    """Refusals have SGLang's two schemas: its own endpoint nests the message, the others do not."""
    async with served("instant") as client:
        response = await client.post(path, json=body)
        assert response.status_code == 400
        error = response.json()
        message = error["error"]["message"] if path == "/generate" else error["message"]
        assert says in message


# --- control


async def test_a_request_is_aborted_by_its_id() -> None:
    """It answers at once with its output so far and frees its memory; an unknown id matches no prefix."""
    async with served() as client, long_request(client, rid="abc-1") as task:
        await asyncio.sleep(0.05)
        for nobody in ({"rid": "xyz"}, {"rid": "abc"}, {}):
            assert (await client.post("/abort_request", json=nobody)).status_code == 200
        assert not task.done()
        assert (await client.post("/abort_request", json={"rid": "abc-1"})).status_code == 200
        answer = await asyncio.wait_for(task, 20)
        assert answer["meta_info"]["finish_reason"]["type"] == "abort"
        assert len(answer["output_ids"]) == answer["meta_info"]["completion_tokens"] > 0
        load = await load_of(client)
        assert (load["num_running_reqs"], load["num_waiting_reqs"], load["num_used_tokens"]) == (0, 0, 0)


async def test_all_are_aborted_at_once_those_that_wait_too() -> None:
    """The pool holds two of sixteen requests: all end at once, streams and chats as well."""
    async with served(kv_tokens=2048, max_model_len=1024) as client:
        body = {"text": PROMPT, "sampling_params": {"max_new_tokens": 900, "ignore_eos": True}}
        tasks = [asyncio.create_task(generate(client, **body)) for _ in range(16)]
        chat = {"messages": [{"role": "user", "content": PROMPT}], "max_tokens": 900, "ignore_eos": True}
        chats = [
            asyncio.create_task(client.post("/v1/chat/completions", json={**chat, "stream": stream}))
            for stream in (True, False)
        ]
        await running_count(client, 18)
        await client.post("/abort_request", json={"abort_all": True})
        async with asyncio.timeout(20):
            answers = await asyncio.gather(*tasks)
            stream, whole = await asyncio.gather(*chats)
        assert {answer["meta_info"]["finish_reason"]["type"] for answer in answers} == {"abort"}
        assert whole.json()["choices"][0]["finish_reason"] == "abort"
        assert events_of(stream.text)[-1]["choices"][0]["finish_reason"] == "abort"
        await running_count(client, 0)


@pytest.mark.parametrize("mode", ["in_place", "retract"])
async def test_a_paused_engine_stands_still_and_then_gives_the_same_answer(mode: str) -> None:
    """New requests wait for admission; only retracted ones lose their memory, which can be flushed."""
    async with served() as client:
        body = {"text": PROMPT, "sampling_params": {"max_new_tokens": 60, "ignore_eos": True}}
        expected = await generate(client, **body)
        task = asyncio.create_task(generate(client, **body))
        await running_count(client, 1)
        await client.post("/pause_generation", json={"mode": mode})
        late = asyncio.create_task(generate(client, text="late", sampling_params={"max_new_tokens": 1}))
        await asyncio.sleep(0.03)  # the iteration under way ends
        load = await load_of(client)
        assert (load["num_running_reqs"], load["num_waiting_reqs"]) == ((1, 0) if mode == "in_place" else (0, 1))
        flushed = await client.post("/flush_cache")
        assert flushed.status_code == (400 if mode == "in_place" else 200)
        assert (await client.get("/health")).status_code == 200
        await asyncio.sleep(0.05)
        assert await load_of(client) == load
        assert not task.done()
        assert not late.done()
        await client.post("/continue_generation", json={})
        answer = await asyncio.wait_for(task, 20)
        assert answer["output_ids"] == expected["output_ids"]
        assert answer["meta_info"]["num_retractions"] == (mode == "retract")
        await asyncio.wait_for(late, 20)


async def test_a_pause_that_aborts_ends_what_runs_and_lets_nothing_in() -> None:
    """The default mode, as trainers use it before new weights."""
    async with served() as client, long_request(client) as task:
        await client.post("/pause_generation", json={})
        assert (await asyncio.wait_for(task, 20))["meta_info"]["finish_reason"]["type"] == "abort"
        late = asyncio.create_task(generate(client, text="late", sampling_params={"max_new_tokens": 1}))
        await asyncio.sleep(0.05)
        assert not late.done()
        assert (await client.get("/flush_cache")).status_code == 200
        await client.post("/continue_generation", json={})
        await asyncio.wait_for(late, 20)


async def test_a_client_that_leaves_frees_its_memory() -> None:
    """This includes a client that waits at the door of a paused engine."""
    async with served() as client:
        async with long_request(client):
            pass
        await running_count(client, 0)
        await client.post("/pause_generation", json={})
        with pytest.raises(httpx2.ReadTimeout):
            await client.post("/generate", json={"text": "a"}, timeout=httpx2.Timeout(20, read=0.05))
        await client.post("/continue_generation", json={})
        await asyncio.sleep(0.02)
        await running_count(client, 0)


# --- tags


async def test_closing_a_session_makes_its_memory_the_first_to_go() -> None:
    """Blocks without another tag go before an older program's memory; a reused closed name is a new one."""
    async with served("instant", kv_tokens=2048) as client:

        async def cached_tokens(text: str, tag: str | None = None) -> int:
            body = {"text": text, "sampling_params": {"max_new_tokens": 1}} | ({"session_id": tag} if tag else {})
            return int((await generate(client, **body))["meta_info"]["cached_tokens"])

        async def tagged_tokens() -> float:
            lines = (await client.get("/metrics")).text.splitlines()
            return next(float(line.split()[1]) for line in lines if line.startswith("simulator:tagged_tokens"))

        old, ended, new = (f"{name} " * 800 for name in ("old", "ended", "new"))
        await cached_tokens(old)
        await cached_tokens(ended, "p")
        assert await tagged_tokens() == 800
        assert (await client.post("/close_session", json={"session_id": "p"})).status_code == 200
        assert (await client.post("/close_session", json={"session_id": "p"})).status_code == 200
        assert await tagged_tokens() == 0
        await cached_tokens(new)  # takes the closed blocks, not the oldest ones
        assert await cached_tokens(old) == 784
        assert await cached_tokens(ended, "p") == 0


async def test_a_session_is_opened_once() -> None:
    """Another open of the same name is refused until it is closed."""
    async with served("instant") as client:
        opened = await client.post("/open_session", json={"capacity_of_str_len": 1, "session_id": "s"})
        assert opened.json() == "s"
        again = await client.post("/open_session", json={"capacity_of_str_len": 1, "session_id": "s"})
        assert again.status_code == 400
        await client.post("/close_session", json={"session_id": "s"})
        assert (await client.post("/open_session", json={"capacity_of_str_len": 1, "session_id": "s"})).json() == "s"


# --- its reports


async def test_our_backend_reads_what_it_says() -> None:
    """Metrics and server information agree, under load and after it."""
    backend = SglangBackend()
    async with served() as client:
        async with long_request(client):
            reading = backend.read_metrics((await client.get("/metrics")).text)
            assert (reading.capacity_tokens, reading.running_count, reading.waiting_count) == (16_000, 1, 0)
            assert 0 < (reading.kv_used_ratio or 0) < 0.1
        await running_count(client, 0)
        for _ in range(2):
            await generate(client, text=PROMPT, sampling_params={"max_new_tokens": 1})
        reading = backend.read_metrics((await client.get("/metrics")).text)
        assert (reading.cache_query_tokens_total, reading.cache_hit_tokens_total) == (120, 96)
        for path in ("/server_info", "/get_server_info"):
            assert backend.read_info((await client.get(path)).text) == 16_000


async def test_clients_preflight_questions_are_answered() -> None:
    """The model under each of the names that trainers ask it by, and a health that generates."""
    async with served("instant") as client:
        assert (await client.get("/model_info")).json() == (await client.get("/get_model_info")).json()
        assert (await client.get("/v1/models")).json()["data"][0]["max_model_len"] == 16_000
        assert (await client.get("/health")).status_code == (await client.get("/health_generate")).status_code == 200
        assert (await client.get("/nothing")).status_code == 404
