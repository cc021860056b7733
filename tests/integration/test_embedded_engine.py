"""The embedded engine, as a process on a socket, is a vLLM to its clients."""

from __future__ import annotations

import asyncio
import json
import signal
import subprocess
import sys
import time
from contextlib import asynccontextmanager, contextmanager
from typing import TYPE_CHECKING, Any

import httpx2
import openai
import pytest
from prometheus_client.parser import text_string_to_metric_families

from thunderagent.simulator.embedded.options import ServerConfig
from thunderagent.simulator.embedded.server import main, running, serve
from thunderagent.simulator.embedded.tokens import WordTokenizer
from thunderagent.simulator.engine.records import EngineConfig
from thunderagent.simulator.engine.timing import profile

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Iterator

HELLO = [{"role": "system", "content": "be brief"}, {"role": "user", "content": "hello " * 60}]
LONG = {"messages": HELLO, "max_tokens": 5000, "ignore_eos": True}  # about 40 s on the demo engine


@contextmanager
def engine_process(*options: str) -> Iterator[tuple[subprocess.Popen[str], str]]:
    """Start the server on a free port, and yield it with its URL."""
    command = [sys.executable, "-m", "thunderagent.simulator.embedded.server", "--port", "0", *options]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout is not None
            line = process.stdout.readline()
            assert "ready at http://" in line, line
            yield process, line.split()[4].rstrip(":")
        finally:
            process.kill()


@pytest.fixture(scope="module")
def url() -> Iterator[str]:
    """Serve the demo engine at its own speed."""
    with engine_process() as (_process, url):
        yield url


@pytest.fixture
async def client(url: str) -> AsyncIterator[httpx2.AsyncClient]:
    async with httpx2.AsyncClient(base_url=url, timeout=20) as client:
        yield client
        await until_idle(client)


@asynccontextmanager
async def served(**config: Any) -> AsyncIterator[httpx2.AsyncClient]:
    """Serve an instant engine in this process."""
    engine = EngineConfig(kv_tokens=16_000, timing=profile("instant"), **config)
    async with (
        running(ServerConfig(engine, port=0)) as url,
        httpx2.AsyncClient(base_url=url, timeout=20) as client,
    ):
        yield client


async def metrics(client: httpx2.AsyncClient) -> dict[str, float]:
    """Return the sum over labels of each sample."""
    response = await client.get("/metrics")
    values: dict[str, float] = {}
    for family in text_string_to_metric_families(response.text):
        for sample in family.samples:
            values[sample.name] = values.get(sample.name, 0.0) + sample.value
    return values


async def until(client: httpx2.AsyncClient, name: str, value: float) -> None:
    async with asyncio.timeout(20):
        while (await metrics(client))[name] != value:
            await asyncio.sleep(0.01)


async def until_idle(client: httpx2.AsyncClient) -> None:
    for name in ("num_requests_running", "num_requests_waiting", "kv_cache_usage_perc"):
        await until(client, f"vllm:{name}", 0)


async def ask(client: httpx2.AsyncClient, path: str = "/v1/chat/completions", **body: Any) -> dict[str, Any]:
    response = await client.post(path, json=body)
    assert response.status_code == 200, response.text
    return dict(response.json())


async def refused(client: httpx2.AsyncClient, path: str = "/v1/chat/completions", **body: Any) -> dict[str, Any]:
    """Return the error, having checked that it has vLLM's schema."""
    response = await client.post(path, json=body)
    error = response.json()["error"]
    assert set(error) == {"message", "type", "param", "code"}
    assert error["code"] == response.status_code
    return dict(error)


async def stream(client: httpx2.AsyncClient, path: str, **body: Any) -> list[dict[str, Any]]:
    """Return the chunks of a stream, having checked its frame."""
    async with client.stream("POST", path, json={**body, "stream": True}) as response:
        assert response.status_code == 200
        assert response.headers["content-type"] == "text/event-stream; charset=utf-8"
        events = (await response.aread()).decode().split("\n\n")
    assert events[-2:] == ["data: [DONE]", ""]
    return [json.loads(event.removeprefix("data: ")) for event in events[:-2]]


# --- answers


async def test_a_chat_completion_has_the_length_asked_for_and_its_usage(client: httpx2.AsyncClient) -> None:
    answer = await ask(client, messages=HELLO, max_tokens=7, ignore_eos=True)
    assert answer["object"] == "chat.completion"
    assert answer["choices"][0]["finish_reason"] == "length"
    assert len(answer["choices"][0]["message"]["content"].split()) == 7
    usage = answer["usage"]
    assert (usage["prompt_tokens"], usage["completion_tokens"], usage["total_tokens"]) == (67, 7, 74)


async def test_the_same_prompt_gets_the_same_answer_streamed_or_not(client: httpx2.AsyncClient) -> None:
    whole = await ask(client, messages=HELLO)
    chunks = await stream(client, "/v1/chat/completions", messages=HELLO)
    text = "".join(chunk["choices"][0]["delta"]["content"] for chunk in chunks)
    assert text == whole["choices"][0]["message"]["content"]
    assert whole["choices"][0]["finish_reason"] == "stop"
    assert 16 <= whole["usage"]["completion_tokens"] <= 64


async def test_a_stream_is_role_words_finish_usage_done(client: httpx2.AsyncClient) -> None:
    options = {"include_usage": True}
    chunks = await stream(
        client, "/v1/chat/completions", messages=HELLO, max_tokens=3, ignore_eos=True, stream_options=options
    )
    deltas = [chunk["choices"][0]["delta"] for chunk in chunks[:-1]]
    assert deltas[0] == {"role": "assistant", "content": ""}
    assert [list(delta) for delta in deltas[1:]] == [["content"]] * 3
    assert [chunk["choices"][0]["finish_reason"] for chunk in chunks[:-1]] == [None, None, None, "length"]
    assert chunks[-1]["choices"] == []
    assert chunks[-1]["usage"]["completion_tokens"] == 3
    assert "cached_tokens" in chunks[-1]["usage"]["prompt_tokens_details"]
    assert len({(chunk["id"], chunk["object"], chunk["model"]) for chunk in chunks}) == 1
    assert not any("usage" in chunk for chunk in chunks[:-1])


async def test_continuous_usage_counts_up(client: httpx2.AsyncClient) -> None:
    options = {"include_usage": True, "continuous_usage_stats": True}
    body = {"prompt": "a b c", "max_tokens": 3, "ignore_eos": True, "stream_options": options}
    chunks = await stream(client, "/v1/completions", **body)
    assert [chunk["usage"]["completion_tokens"] for chunk in chunks] == [1, 2, 3, 3]


async def test_a_history_with_its_answer_hits_prompt_and_answer() -> None:
    """The next turn finds all that was computed, to the last full block of 16."""
    async with served() as client:
        first = await ask(client, messages=HELLO, max_tokens=40, ignore_eos=True)
        answer = first["choices"][0]["message"]
        history = [*HELLO, answer, {"role": "tool", "content": "it is done"}]
        second = await ask(client, messages=history, max_tokens=1)
        computed = first["usage"]["total_tokens"] - 1
        assert second["usage"]["prompt_tokens_details"]["cached_tokens"] == computed // 16 * 16


async def test_the_end_token_of_a_stopped_answer_is_the_one_of_the_template() -> None:
    tokenizer = WordTokenizer()
    async with served(block_size=1) as client:
        first = await ask(client, messages=HELLO)
        history = [*HELLO, first["choices"][0]["message"], {"role": "user", "content": "go on"}]
        second = await ask(client, messages=history, max_tokens=1)
        assert first["choices"][0]["finish_reason"] == "stop"
        assert second["usage"]["prompt_tokens"] == first["usage"]["total_tokens"] + len(
            [*tokenizer.encode("go on"), "user", "end", "assistant"]
        )
        assert second["usage"]["prompt_tokens_details"]["cached_tokens"] == first["usage"]["total_tokens"] - 1


async def test_a_completion_continues_its_prompt() -> None:
    async with served(block_size=1) as client:
        first = await ask(client, "/v1/completions", prompt="one two three", max_tokens=5, ignore_eos=True)
        text = "one two three" + first["choices"][0]["text"]
        second = await ask(client, "/v1/completions", prompt=[text], max_tokens=1)
        assert second["usage"]["prompt_tokens"] == 8
        assert second["usage"]["prompt_tokens_details"]["cached_tokens"] == 7


async def test_text_parts_and_tool_calls_are_words_too() -> None:
    async with served() as client:
        plain = await ask(client, "/tokenize", messages=[{"role": "user", "content": "a b"}])
        parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
        assert (await ask(client, "/tokenize", messages=[{"role": "user", "content": parts}]))["tokens"] == plain[
            "tokens"
        ]
        call = {"type": "function", "id": "1", "function": {"name": "ls", "arguments": '{"path": "/"}'}}
        called = await ask(client, "/tokenize", messages=[{"role": "assistant", "content": None, "tool_calls": [call]}])
        assert called["count"] > 6


async def test_tokens_turn_back_into_their_words(client: httpx2.AsyncClient) -> None:
    tokens = (await ask(client, "/tokenize", prompt="w17 makes  sense"))["tokens"]
    assert await ask(client, "/detokenize", tokens=tokens) == {"prompt": "w17 makes sense"}
    by_ids = await ask(client, "/v1/completions", prompt=tokens, max_tokens=2)
    by_text = await ask(client, "/v1/completions", prompt="w17 makes sense", max_tokens=2)
    assert by_ids["choices"][0]["text"] == by_text["choices"][0]["text"]


async def test_the_openai_client_is_served(url: str) -> None:
    async with openai.AsyncOpenAI(base_url=f"{url}/v1", api_key="none") as client:
        models = await client.models.list()
        assert [(model.id, model.owned_by) for model in models.data] == [("simulated", "vllm")]
        messages: Any = HELLO
        whole = await client.chat.completions.create(model="simulated", messages=messages, max_completion_tokens=5)
        assert whole.usage is not None
        assert whole.usage.completion_tokens == 5
        text = ""
        async for chunk in await client.chat.completions.create(
            model="simulated", messages=messages, max_tokens=5, stream=True, stream_options={"include_usage": True}
        ):
            text += chunk.choices[0].delta.content or "" if chunk.choices else ""
            usage = chunk.usage
        assert text == whole.choices[0].message.content
        assert usage is not None
        assert usage.completion_tokens == 5
        with pytest.raises(openai.NotFoundError, match="does not exist"):
            await client.chat.completions.create(model="other", messages=messages)


# --- refusals


@pytest.mark.parametrize(
    ("body", "says"),
    [
        ({}, "messages"),
        ({"messages": "hello"}, "array"),
        ({"messages": HELLO, "n": 2}, "n must be 1"),
        ({"messages": HELLO, "priority": 1}, "Priority scheduling is not enabled"),
        ({"messages": HELLO, "max_tokens": 0}, "max_tokens must be at least 1"),
        ({"messages": HELLO, "max_tokens": 2, "min_tokens": 3}, "min_tokens must be less"),
        ({"messages": HELLO, "min_tokens": -1}, "min_tokens must be greater"),
        ({"messages": HELLO, "stream_options": {}}, "Stream options"),
        ({"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}, "text only"),
        ({"messages": HELLO, "max_tokens": 16_000}, "This model's maximum context length is 16000 tokens. However"),
    ],
)
async def test_a_wrong_request_is_refused_with_its_reason(
    client: httpx2.AsyncClient, body: dict[str, Any], says: str
) -> None:
    error = await refused(client, **body)
    assert error["code"] == 400
    assert says in error["message"]


async def test_large_header_that_a_proxy_passes_on_is_taken(client: httpx2.AsyncClient) -> None:
    body = {"messages": HELLO, "max_tokens": 1}
    answer = await client.post("/v1/chat/completions", json=body, headers={"X-Trace": "a" * 60_000})
    assert answer.status_code == 200


async def test_a_body_that_is_no_json_object_is_refused(client: httpx2.AsyncClient) -> None:
    for content in (b"", b"{", b"[]", b"\xff"):
        response = await client.post("/v1/chat/completions", content=content)
        assert response.status_code == 400
        assert response.json()["error"]["type"] == "Bad Request"


async def test_unknown_models_and_paths_are_not_found(client: httpx2.AsyncClient) -> None:
    assert (await refused(client, model="other", messages=HELLO))["type"] == "NotFoundError"
    assert (await refused(client, "/v1/nothing"))["code"] == 404


async def test_several_prompts_or_none_are_refused(client: httpx2.AsyncClient) -> None:
    assert "several" in (await refused(client, "/v1/completions", prompt=["a", "b"]))["message"]
    assert "empty" in (await refused(client, "/v1/completions", prompt=""))["message"]


async def test_a_prompt_over_the_context_is_refused_whatever_it_asks_for() -> None:
    async with served(max_model_len=100) as client:
        prompt = "x " * 100
        assert "maximum context length is 100" in (await refused(client, "/v1/completions", prompt=prompt))["message"]
        assert (await client.get("/v1/models")).json()["data"][0]["max_model_len"] == 100


async def test_priority_is_heard_under_its_policy() -> None:
    async with served(scheduling_policy="priority") as client:
        await ask(client, messages=HELLO, priority=-3, max_tokens=1)


# --- metrics


async def test_metrics_are_those_of_vllm() -> None:
    async with served() as client:
        body: dict[str, Any] = {"messages": HELLO, "max_tokens": 10, "ignore_eos": True}
        await ask(client, **body)
        await ask(client, **body)
        response = await client.get("/metrics")
        families = {family.name: family for family in text_string_to_metric_families(response.text)}
        (info,) = families["vllm:cache_config_info"].samples
        assert info.labels["engine"] == "0"
        assert (info.labels["num_gpu_blocks"], info.labels["block_size"]) == ("1000", "16")
        assert info.labels["kv_cache_size_tokens"] == "16000"
        values = await metrics(client)
        assert values["vllm:prompt_tokens_total"] == values["vllm:prefix_cache_queries_total"] == 2 * 67
        assert values["vllm:prefix_cache_hits_total"] == 64
        assert values["vllm:generation_tokens_total"] == 20
        assert values["vllm:request_success_total"] == 2
        assert values["vllm:num_preemptions_total"] == 0
        for name in ("num_requests_running", "num_requests_waiting", "kv_cache_usage_perc"):
            (sample,) = families[f"vllm:{name}"].samples
            assert sample.labels == {"model_name": "simulated", "engine": "0"}
            assert sample.value == 0


async def test_a_reset_of_the_prefix_cache_loses_the_hits() -> None:
    async with served() as client:
        await ask(client, messages=HELLO, max_tokens=1)
        assert (await client.post("/reset_prefix_cache")).status_code == 200
        answer = await ask(client, messages=HELLO, max_tokens=1)
        assert answer["usage"]["prompt_tokens_details"]["cached_tokens"] == 0


async def test_health_and_version_answer(client: httpx2.AsyncClient) -> None:
    assert (await client.get("/health")).status_code == 200
    assert (await client.get("/version")).json()["version"].startswith("0.")


# --- time and life


async def test_an_answer_takes_the_time_the_model_says(client: httpx2.AsyncClient) -> None:
    """40 iterations of the demo engine with one request: 7.5 ms each, and 35 ms for the prompt; never less."""
    begin_s = time.monotonic()
    await ask(client, messages=[{"role": "user", "content": "timed " * 120}], max_tokens=40, ignore_eos=True)
    assert time.monotonic() - begin_s > 0.32


async def test_a_client_that_leaves_a_stream_frees_its_blocks(client: httpx2.AsyncClient) -> None:
    before = await metrics(client)
    async with client.stream("POST", "/v1/chat/completions", json={**LONG, "stream": True}) as response:
        lines = response.aiter_lines()  # kept, because dropping the generator closes the stream
        assert await anext(lines)
        assert (await metrics(client))["vllm:num_requests_running"] == 1
    await until_idle(client)
    after = await metrics(client)
    assert after["vllm:request_success_total"] == before["vllm:request_success_total"] + 1  # counted as an abort


async def test_a_client_that_gives_up_waiting_for_the_whole_answer_frees_its_blocks(client: httpx2.AsyncClient) -> None:
    with pytest.raises(httpx2.ReadTimeout):
        await client.post("/v1/chat/completions", json=LONG, timeout=httpx2.Timeout(20, read=0.2))
    await until_idle(client)


async def test_a_client_that_leaves_the_queue_leaves_no_trace() -> None:
    engine = EngineConfig(kv_tokens=16_000, max_num_seqs=1)
    async with (
        running(ServerConfig(engine, port=0, grace_s=0.0)) as url,
        httpx2.AsyncClient(base_url=url, timeout=20) as client,
    ):
        requests = [asyncio.create_task(client.post("/v1/chat/completions", json=LONG)) for _ in range(3)]
        await until(client, "vllm:num_requests_waiting", 2)
        for request in requests:
            request.cancel()
        await asyncio.gather(*requests, return_exceptions=True)
        await until_idle(client)


async def test_leaving_the_server_leaves_no_task_behind() -> None:
    before = asyncio.all_tasks()
    async with served() as client:
        await ask(client, messages=HELLO)
    async with asyncio.timeout(20):
        while asyncio.all_tasks() != before:
            await asyncio.sleep(0.01)


async def test_a_cancelled_server_stops() -> None:
    ready: asyncio.Future[str] = asyncio.get_running_loop().create_future()
    config = ServerConfig(EngineConfig(kv_tokens=16_000), port=0)
    task = asyncio.create_task(serve(config, ready=ready.set_result))
    url = await asyncio.wait_for(ready, 20)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    async with httpx2.AsyncClient(timeout=20) as client:
        with pytest.raises(httpx2.ConnectError):
            await client.get(f"{url}/health")


def test_sigterm_lets_a_short_request_finish_and_ends_a_long_one() -> None:
    with engine_process("--grace-s", "4") as (process, url), httpx2.Client(base_url=url, timeout=20) as client:
        short = {**LONG, "max_tokens": 50, "stream": True}
        with (
            client.stream("POST", "/v1/chat/completions", json=short) as finishing,
            client.stream("POST", "/v1/chat/completions", json={**LONG, "stream": True}) as dropped,
        ):
            begin_s = time.monotonic()
            process.send_signal(signal.SIGTERM)
            assert finishing.read().endswith(b"data: [DONE]\n\n")
            with pytest.raises(httpx2.RemoteProtocolError):
                dropped.read()
        assert process.wait(30) == 0
        assert time.monotonic() - begin_s < 30
        assert process.stderr is not None
        assert process.stderr.read() == ""


@pytest.mark.parametrize("stdin", [subprocess.PIPE, subprocess.DEVNULL])
def test_the_engine_ends_with_its_standard_input(stdin: int) -> None:
    command = [sys.executable, "-m", "thunderagent.simulator.embedded.server", "--port", "0", "--end-with-stdin"]
    with subprocess.Popen(command, stdin=stdin, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        assert "ready at" in process.stdout.readline()
        if process.stdin is not None:
            assert process.poll() is None
            process.stdin.close()
        assert process.wait(30) == 0


def test_speed_divides_the_durations() -> None:
    with engine_process("--speed", "100") as (_process, url), httpx2.Client(base_url=url, timeout=30) as client:
        begin_s = time.monotonic()
        client.post("/v1/chat/completions", json=LONG).raise_for_status()
        assert 0.3 < time.monotonic() - begin_s < 30  # 40 s at speed 1


@pytest.mark.parametrize(
    ("options", "says"),
    [
        (["--kv-tokens", "0"], "kv_tokens must be at least 1"),
        (["--speed", "0"], "speed must be a positive number"),
        (["--port", "70000"], "port must be"),
        (["--grace-s", "-1"], "grace_s must be"),
        (["--model", ""], "needs a name"),
        (["--profile", "llama-3.1-8b-a100"], "give --kv-tokens"),
    ],
)
def test_impossible_options_are_refused(options: list[str], says: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(options) == 2
    assert says in capsys.readouterr().err


def test_an_address_in_use_is_said_so(url: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--port", url.rsplit(":", 1)[1]]) == 1
    assert "cannot serve on" in capsys.readouterr().err
