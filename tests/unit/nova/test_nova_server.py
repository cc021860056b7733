"""The HTTP API of Nova, on an engine that has no model."""

from __future__ import annotations

import asyncio
import base64
import json
import threading
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import httpx2
import pytest

from tests.unit.nova.fake_nova import PNG, TOKENS_OF_AN_IMAGE, CharacterCodec, FakeEngine, running_nova, until_idle
from thunderagent.backends.nova import NovaBackend
from thunderagent_nova.messages import Prompt

CHAT = "/v1/chat/completions"


@asynccontextmanager
async def served(engine: FakeEngine, **settings: Any) -> AsyncIterator[httpx2.AsyncClient]:
    async with (
        running_nova(engine, **settings) as url,
        httpx2.AsyncClient(base_url=url, trust_env=False) as client,
    ):
        yield client


def chat(text: str = "hello", *urls: str, **fields: Any) -> dict[str, Any]:
    images = [{"type": "image_url", "image_url": {"url": url}} for url in urls]
    return {
        "model": "tiny",
        "messages": [{"role": "user", "content": [*images, {"type": "text", "text": text}]}],
        **fields,
    }


def events_of(body: str) -> list[Any]:
    lines = [line.removeprefix("data: ") for line in body.split("\n\n") if line]
    assert lines.pop() == "[DONE]"
    return [json.loads(line) for line in lines]


async def test_answer_carries_its_usage() -> None:
    """Tokens of images are part of the prompt's, and shown separately."""
    async with served(FakeEngine()) as client:
        answer = (await client.post(CHAT, json=chat("hello", PNG, PNG))).json()
    choice = answer["choices"][0]
    assert choice["message"] == {"role": "assistant", "content": "HELLO"}
    assert (answer["object"], choice["finish_reason"], answer["model"]) == ("chat.completion", "stop", "tiny")
    assert answer["usage"] == {
        "prompt_tokens": 2 * TOKENS_OF_AN_IMAGE + 5,
        "completion_tokens": 6,
        "total_tokens": 2 * TOKENS_OF_AN_IMAGE + 11,
        "prompt_tokens_details": {"image_tokens": 2 * TOKENS_OF_AN_IMAGE},
    }


@pytest.mark.parametrize("field", ["max_tokens", "max_completion_tokens"])
async def test_an_answer_is_cut_at_its_length(field: str) -> None:
    """Its finish reason says so."""
    async with served(FakeEngine()) as client:
        answer = (await client.post(CHAT, json=chat("hello", **{field: 3}))).json()
    assert answer["choices"][0]["message"]["content"] == "HEL"
    assert answer["choices"][0]["finish_reason"] == "length"
    assert answer["usage"]["prompt_tokens_details"] == {"image_tokens": 0}


@pytest.mark.parametrize("asks", [True, False])
async def test_stream_arrives_in_pieces(asks: bool) -> None:
    """There is one event for each token, with the role in the first; usage comes only on request."""
    options = {"stream_options": {"include_usage": True}} if asks else {}
    async with served(FakeEngine()) as client:
        answer = await client.post(CHAT, json=chat("hello", PNG, stream=True, **options))
    events = events_of(answer.text)
    assert answer.headers["Content-Type"] == "text/event-stream"
    if asks:
        assert events.pop()["usage"]["completion_tokens"] == 6
    deltas = [event["choices"][0]["delta"] for event in events]
    assert deltas[0] == {"role": "assistant", "content": "H"}
    assert [delta["content"] for delta in deltas] == ["H", "E", "L", "L", "O", ""]
    assert [event["choices"][0]["finish_reason"] for event in events] == [None] * 5 + ["stop"]
    assert len({event["id"] for event in events}) == 1


@pytest.mark.parametrize("stream", [True, False])
async def test_a_stop_text_ends_an_answer_and_its_request(stream: bool) -> None:
    """The engine does not continue without a client."""
    engine = FakeEngine()
    async with served(engine) as client:
        answer = await client.post(CHAT, json=chat("hello world, and on", stop=["LO W"], stream=stream))
        await until_idle(engine)
        if stream:
            choices = [event["choices"][0] for event in events_of(answer.text)]
            assert "".join(choice["delta"]["content"] for choice in choices) == "HEL"
            assert choices[-1]["finish_reason"] == "stop"
        else:
            choice = answer.json()["choices"][0]
            assert (choice["message"]["content"], choice["finish_reason"]) == ("HEL", "stop")
    assert engine.stats().stage_passes["decode"] < 12


REFUSED: dict[str, tuple[int, Any]] = {
    "an image that is to be fetched": (400, chat("a", "http://127.0.0.1:1/a.png")),
    "a file": (400, chat("a", "file:///a.png")),
    "data that is not base64": (400, chat("a", "data:image/png;base64,%%%")),
    "data that is no image": (400, chat("a", "data:image/png;base64," + base64.b64encode(b"broken").decode())),
    "data that says it is no image": (400, chat("a", "data:text/html;base64,YQ==")),
    "another model": (404, {**chat(), "model": "other"}),
    "no messages": (400, {"model": "tiny", "messages": []}),
    "no object": (400, [1]),
    "a message of another form": (
        400,
        {"model": "tiny", "messages": [{"role": "user", "content": [{"type": "audio"}]}]},
    ),
    "several answers": (400, chat(n=2)),
    "logprobs": (400, chat(logprobs=True)),
    "an answer in a set form": (400, chat(response_format={"type": "json_schema"})),
    "no tokens": (400, chat(max_tokens=0)),
    "a prompt that fits no slot": (400, chat("a" * 200)),
}


@pytest.mark.parametrize("what", REFUSED)
async def test_unsupported_request_is_refused(what: str) -> None:
    """The refusal is in OpenAI's words, and before the engine gets the request."""
    status, body = REFUSED[what]
    engine = FakeEngine()
    async with served(engine) as client:
        answer = await client.post(CHAT, json=body)
    assert answer.status_code == status
    assert set(answer.json()["error"]) == {"message", "type", "param", "code"}
    assert not engine.requests


async def test_sampling_fields_have_no_effect() -> None:
    """Decoding is greedy; clients always send such fields."""
    async with served(FakeEngine()) as client:
        answer = await client.post(CHAT, json=chat("a", temperature=0.7, top_p=0.9, seed=1, user="x"))
    assert answer.json()["choices"][0]["message"]["content"] == "A"


async def test_request_past_the_queue_bound_is_refused() -> None:
    """Each waiting request holds the pixels of its images."""
    engine = FakeEngine(encode_s=1.0)
    async with served(engine, max_waiting=2) as client:
        tasks = [asyncio.create_task(client.post(CHAT, json=chat("a", PNG))) for _ in range(6)]
        while sum(task.done() for task in tasks) < 3:
            await asyncio.sleep(0.005)
        engine.seconds["encode"] = 0.0
        answers = await asyncio.gather(*tasks)
    statuses = sorted(answer.status_code for answer in answers)
    assert statuses[:2] == [200, 200]
    assert statuses[-3:] == [503, 503, 503]


@pytest.mark.parametrize("stage", ["encode", "prefill", "decode"])
async def test_a_pass_that_fails_is_told(stage: str) -> None:
    """It has a status if none was sent yet, else an event; all resources come back."""
    engine = FakeEngine(fails_at=stage)
    async with served(engine) as client:
        whole = await client.post(CHAT, json=chat("hello", PNG))
        stream = await client.post(CHAT, json=chat("hello", PNG, stream=True))
        await until_idle(engine)
    assert (whole.status_code, whole.json()["error"]["type"]) == (500, "engine_error")
    assert stream.status_code == (200 if stage == "decode" else 500)
    assert f"{stage} failed" in stream.text
    assert "[DONE]" not in stream.text


STAGES = {"encode": {"encode_s": 0.4}, "prefill": {"prefill_s": 0.4}, "decode": {"decode_s": 0.1}}


@pytest.mark.parametrize("stream", [True, False])
@pytest.mark.parametrize("stage", STAGES)
async def test_a_client_that_leaves_gives_everything_back(stage: str, stream: bool) -> None:
    """Many leave in each stage, or while they wait for one: all is empty long before they would have been served."""
    engine = FakeEngine(**STAGES[stage])
    async with served(engine) as client:
        async with asyncio.TaskGroup() as group:
            tasks = [group.create_task(client.post(CHAT, json=chat("hello", PNG, stream=stream))) for _ in range(20)]
            async with asyncio.timeout(5):
                while not _is_at(engine, stage):
                    await asyncio.sleep(0.005)
            for task in tasks:
                task.cancel()
        await until_idle(engine)
        assert (await client.post(CHAT, json=chat("a"))).status_code == 200


def _is_at(engine: FakeEngine, stage: str) -> bool:
    stats = engine.stats()
    at = {"encode": stats.pending_encode, "prefill": stats.pending_prefill, "decode": stats.decoding}
    return stats.running > 0 and at[stage] > 0


async def test_the_proxy_reads_the_metrics() -> None:
    """It reads them while requests wait for the encoder, and afterwards."""
    engine = FakeEngine(encode_s=1.0)
    async with served(engine) as client:
        tasks = [asyncio.create_task(client.post(CHAT, json=chat("hello", PNG))) for _ in range(3)]
        while engine.stats().pending_encode < 3:
            await asyncio.sleep(0.005)
        busy = NovaBackend().read_metrics((await client.get("/metrics")).text)
        engine.seconds["encode"] = 0.0
        await asyncio.gather(*tasks)
        text = (await client.get("/metrics")).text
    assert (busy.capacity_tokens, busy.pending_encode_count, busy.running_count) == (400, 3, 1)
    assert (busy.waiting_count, busy.kv_used_ratio) == (2, 0.5)
    assert NovaBackend().read_metrics(text).pending_encode_count == 0
    for line in (
        'nova:stage_passes_total{stage="encode"} 3.0',
        f'nova:tokens_total{{kind="image"}} {3 * TOKENS_OF_AN_IMAGE}.0',
        "nova:split_units 0.0",
    ):
        assert line in text


async def test_a_programs_slot_is_kept_until_it_is_released() -> None:
    """The body names the program, and the proxy reports its end."""
    engine = FakeEngine()
    async with served(engine) as client:
        await client.post(CHAT, json=chat("a", program_id="p"))
        assert engine.stats().slots_kept == 1
        answers = [(await client.post("/release", json={"program_id": "p"})).json()["released"] for _ in range(2)]
    assert answers == [True, False]
    assert engine.stats().slots_kept == 0


class HeldCodec(CharacterCodec):
    """Reads a prompt when a test lets it."""

    def __init__(self) -> None:
        self.is_read, self.gate = threading.Event(), threading.Event()

    def prompt(self, *args: Any) -> Prompt:
        self.is_read.set()
        self.gate.wait(10)
        return super().prompt(*args)


async def test_a_turn_that_is_being_read_keeps_no_slot_for_a_program_released_meanwhile() -> None:
    engine, codec = FakeEngine(), HeldCodec()
    async with served(engine, codec=codec) as client:
        turn = asyncio.create_task(client.post(CHAT, json=chat("a", program_id="p")))
        await asyncio.to_thread(codec.is_read.wait, 10)
        assert not (await client.post("/release", json={"program_id": "p"})).json()["released"]
        codec.gate.set()
        assert (await turn).status_code == 200
    assert engine.stats().slots_kept == 0


async def test_models_and_health_are_served() -> None:
    """Clients and the proxy ask for them first."""
    async with served(FakeEngine()) as client:
        models = (await client.get("/v1/models")).json()
        health = await client.get("/health")
        nowhere = await client.get("/nowhere")
    assert [(model["id"], model["max_model_len"]) for model in models["data"]] == [("tiny", 200)]
    assert (health.status_code, health.json()["status"], health.json()["slots"]) == (200, "ok", 2)
    assert (nowhere.status_code, nowhere.json()["error"]["message"]) == (404, "Not Found")
