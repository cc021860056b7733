"""A real SGLang: its reports are read, answers are its own, and it carries out commands besides turns."""

from __future__ import annotations

import asyncio
import logging
from contextlib import asynccontextmanager
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import httpx2
import pytest
import pytest_asyncio

from benchmarks.engine_kinds import KINDS, MODEL_NAME
from benchmarks.load import LoadSpec, run_load
from benchmarks.real import serve_proxy
from benchmarks.real_engine import RealEngine
from tests.real.conftest import MAX_MODEL_LEN, SGLANG_TOKENS, sglang_config
from tests.real.support import (
    CHAT,
    COMPLETIONS,
    Programs,
    assert_same,
    chat,
    completion,
    events,
    metrics,
    priorities_in,
    replicas,
    until,
    words,
)
from thunderagent.cli import build_parser
from thunderagent.doctor import command
from thunderagent.doctor.findings import Level
from thunderagent.simulator.comparison.contestants import Contestant

if TYPE_CHECKING:
    from collections.abc import AsyncIterator
    from pathlib import Path

    from benchmarks.processes import Server
    from tests.real.conftest import RunProxy

    Json = dict[str, Any]

pytestmark = pytest.mark.asyncio(loop_scope="session")

GENERATE = "/generate"
OUTPUT_TOKENS = 3000
PROMPT = words(100, seed=1)
PINNED = {"rid": "pinned"}
STREAM = {"stream": True}
USAGE = {"stream": True, "stream_options": {"include_usage": True}}


@pytest.fixture(scope="module")
def engine(sglang_engine: RealEngine) -> RealEngine:
    """The engine of all tests of this file."""
    return sglang_engine


@pytest_asyncio.fixture(scope="module", loop_scope="session")
async def proxy(engine: RealEngine, run_proxy: RunProxy) -> AsyncIterator[Server]:
    """Run a proxy with the options for SGLang."""
    async with run_proxy((engine,), "--engine-tags", "true", "--observe-interval-s", "0.25") as server:
        yield server


@pytest_asyncio.fixture(loop_scope="session")
async def client(proxy: Server) -> AsyncIterator[httpx2.AsyncClient]:
    """A client of the proxy; programs that a test leaves behind are released."""
    async with httpx2.AsyncClient(base_url=proxy.url, timeout=120) as client:
        yield client
        await client.post("/programs/release", json={"all": True})


@pytest_asyncio.fixture(loop_scope="session")
async def direct(engine: RealEngine) -> AsyncIterator[httpx2.AsyncClient]:
    """A client of the engine itself."""
    async with httpx2.AsyncClient(base_url=engine.url, timeout=120) as client:
        yield client


async def load_of(direct: httpx2.AsyncClient) -> Json:
    """Return the engine's current report of its only rank; its gauges do not change while it is idle."""
    (load,) = (await direct.get("/v1/loads")).json()["loads"]
    return dict(load)


def heard_count(engine: RealEngine, path: str) -> int:
    """Return how often the engine answered 200 to a notice, by its own log."""
    return engine.log_path.read_text().count(f'"POST {path} HTTP/1.1" 200')


async def until_in_engine(direct: httpx2.AsyncClient, running_count: int, waiting_count: int) -> None:
    async def are_there() -> bool:
        load = await load_of(direct)
        return (load["num_running_reqs"], load["num_waiting_reqs"]) == (running_count, waiting_count)

    await until(are_there, within_s=60)


# --- its reports


async def test_kind_and_pool_size_are_detected(
    engine: RealEngine, client: httpx2.AsyncClient, direct: httpx2.AsyncClient
) -> None:
    """Found by its metrics, or by its server information alone."""
    (report,) = await replicas(client, "")
    assert (report["kind"], report["capacity_tokens"]) == ("sglang", SGLANG_TOKENS)
    info = await direct.get("/server_info")
    assert info.json()["version"] == KINDS["sglang"].version


async def test_the_doctor_finds_no_fault(engine: RealEngine, monkeypatch: pytest.MonkeyPatch) -> None:
    """Checked by the engine's reports, and by prompts and turns."""
    monkeypatch.setattr(command, "FIRST_POLLS_S", 60.0)  # its proxy runs in this process, which may be halted
    findings = await command.examine(build_parser().parse_args(["doctor", "--backends", engine.url]))
    assert [finding for finding in findings if finding.level is not Level.OK] == []


async def test_cached_tokens_are_what_it_counts(
    engine: RealEngine, client: httpx2.AsyncClient, direct: httpx2.AsyncClient
) -> None:
    """Each turn after the first hits the whole turn before except its last token, which was never computed."""
    await engine.reset_prefix_cache()
    before = await metrics(direct, "")
    programs = Programs(client, "cached")
    for _ in range(3):
        await programs.turn("cached", 200)
    report = (await client.get("/programs/cached")).json()
    turns_tokens = [200 + 2, 2 * 202 + 4, 3 * 202 + 2 * 4]  # two words name the roles
    assert report["prompt_tokens_total"] == sum(turns_tokens)
    assert report["cached_tokens_total"] == sum(tokens + 3 for tokens in turns_tokens[:2])
    after = await metrics(direct, "")
    counted = {
        name: after[f"sglang:{name}_tokens_total"] - before.get(f"sglang:{name}_tokens_total", 0)
        for name in ("prompt", "cached")
    }
    assert counted == {"prompt": report["prompt_tokens_total"], "cached": report["cached_tokens_total"]}

    async def is_read() -> bool:
        (replica,) = await replicas(client, "")
        return bool(replica["engine"]["cache_hit_tokens_total"] == after["sglang:cached_tokens_total"])

    await until(is_read)


# --- exactness

ANSWERS = {
    "chat": (CHAT, chat(PROMPT, 6, **PINNED)),
    "chat with log probabilities": (CHAT, chat(PROMPT, 5, logprobs=True, top_logprobs=3, **PINNED)),
    "chat stream": (CHAT, chat(PROMPT, 6, **STREAM, **PINNED)),
    "chat stream with usage": (CHAT, chat(PROMPT, 6, **USAGE, **PINNED)),
    "completion": (COMPLETIONS, completion(PROMPT, 6, **PINNED)),
    "completion of token ids": (COMPLETIONS, completion(list(range(50, 150)), 6, **PINNED)),
    "completion stream": (COMPLETIONS, completion(PROMPT, 6, **STREAM, **PINNED)),
    "completion stream with usage": (COMPLETIONS, completion(PROMPT, 6, **USAGE, **PINNED)),
    "generate stream": (
        GENERATE,
        {
            "input_ids": list(range(50, 150)),
            "sampling_params": {"max_new_tokens": 6, "ignore_eos": True, "temperature": 0},
            **STREAM,
            **PINNED,
        },
    ),
}
REFUSALS = {
    "too long": (CHAT, chat(words(5000, seed=2), 10)),
    "too much asked for": (CHAT, chat(PROMPT, MAX_MODEL_LEN + 1)),
    "no JSON": (CHAT, b'{"model": "'),
    "no object": (CHAT, b"[1, 2]"),
    "no messages": (CHAT, {"model": MODEL_NAME}),
    "wrong type": (CHAT, chat(PROMPT, 10, temperature="hot")),
    "out of range": (CHAT, chat(PROMPT, 10, temperature=-1)),
    "empty prompt": (COMPLETIONS, completion("", 10)),
    "no prompt": (GENERATE, {}),
    "no such path": ("/v1/nothing", chat(PROMPT, 10)),
    "not for this model": ("/v1/embeddings", {"model": MODEL_NAME, "input": "w1"}),
    "method not allowed": (CHAT, None),
}
SIDE_CALLS = {
    "tokenize": ("/tokenize", {"model": MODEL_NAME, "prompt": PROMPT}),
    "detokenize": ("/detokenize", {"model": MODEL_NAME, "tokens": [1, 2, 3]}),
}


@pytest.mark.nightly  # with concurrent requests an engine on CPU cores splits its streams differently each time
@pytest.mark.parametrize(("path", "body"), ANSWERS.values(), ids=ANSWERS)
async def test_an_answer_is_the_engines_own(engine: RealEngine, proxy: Server, path: str, body: Json) -> None:
    """Every byte but the times is the same, although the engine is asked for usage and told the memory's owner."""
    answer = await assert_same(engine, proxy, path, body)
    assert answer.status == 200
    assert (b"data: [DONE]" in answer.body) == body.get("stream", False)


@pytest.mark.parametrize(("path", "body"), REFUSALS.values(), ids=REFUSALS)
async def test_a_refusal_is_the_engines_own(
    engine: RealEngine, proxy: Server, path: str, body: Json | bytes | None
) -> None:
    """Refusals are in its words; a body that is no object triggers a bug of its own, which stays visible."""
    answer = await assert_same(engine, proxy, path, body)
    assert answer.status >= 400


@pytest.mark.parametrize(("path", "body"), SIDE_CALLS.values(), ids=SIDE_CALLS)
async def test_a_side_call_is_the_engines_own(engine: RealEngine, proxy: Server, path: str, body: Json | None) -> None:
    """The proxy adds nothing to it."""
    assert (await assert_same(engine, proxy, path, body)).status == 200


@pytest.mark.parametrize("stream", [True, False])
async def test_a_turn_without_a_name_gets_one_of_ours(client: httpx2.AsyncClient, stream: bool) -> None:
    """It is as long as those that SGLang generates."""
    for path, body in ((CHAT, chat(PROMPT, 3, stream=stream)), (COMPLETIONS, completion(PROMPT, 3, stream=stream))):
        answer = await client.post(path, json={**body, "program_id": "named"})
        said = events(answer.content) if stream else [answer.json()]
        (name,) = {event["id"] for event in said}
        assert len(name) == 32
        assert int(name, 16)


# --- clients that leave


@asynccontextmanager
async def long_turn(client: httpx2.AsyncClient, program_id: str, **fields: object) -> AsyncIterator[asyncio.Task[Any]]:
    """Start a turn that is longer than any test; leaving the block disconnects."""
    body = chat(words(50, seed=9), OUTPUT_TOKENS, program_id=program_id, **fields)
    asking = asyncio.create_task(client.post(CHAT, json=body))
    try:
        yield asking
    finally:
        asking.cancel()
        await asyncio.gather(asking, return_exceptions=True)


async def assert_it_ends(client: httpx2.AsyncClient | None, direct: httpx2.AsyncClient) -> None:
    """Check that the engine is idle long before the end of the answer, and that a lease was returned.

    Measured in tokens, not in time, because the machine may be busy.
    """
    most_tokens = 0

    async def engine_is_idle() -> bool:
        nonlocal most_tokens
        load = await load_of(direct)
        most_tokens = max(most_tokens, load["num_used_tokens"])
        return load["num_running_reqs"] == load["num_waiting_reqs"] == 0

    async def proxy_is_idle() -> bool:
        return client is None or (await replicas(client, ""))[0]["turns_in_flight_count"] == 0

    await until(engine_is_idle, within_s=60)
    await until(proxy_is_idle)
    assert most_tokens < OUTPUT_TOKENS / 2


@pytest.mark.parametrize("stream", [True, False])
async def test_leaving_a_turn_that_runs_ends_it(
    engine: RealEngine, client: httpx2.AsyncClient, direct: httpx2.AsyncClient, stream: bool
) -> None:
    """In mid-stream, or before any byte of a whole answer: the engine is told, and counts an abort."""

    async def is_told() -> bool:
        return heard_count(engine, "/abort_request") > told_count

    aborted_count = (await metrics(direct, "")).get("sglang:num_aborted_requests_total", 0)
    told_count = heard_count(engine, "/abort_request")
    if stream:
        body = chat(words(50, seed=9), OUTPUT_TOKENS, program_id="leaver", stream=True)
        async with client.stream("POST", CHAT, json=body) as response:
            lines = response.aiter_lines()
            for _ in range(20):
                await anext(lines)
    else:
        async with long_turn(client, "leaver"):
            await until_in_engine(direct, 1, 0)
    await assert_it_ends(client, direct)
    assert (await metrics(direct, ""))["sglang:num_aborted_requests_total"] >= aborted_count + 1
    await until(is_told)


async def test_leaving_before_the_first_byte_ends_a_turn_that_waits_in_the_engine(
    client: httpx2.AsyncClient, direct: httpx2.AsyncClient
) -> None:
    """The running one continues."""
    async with long_turn(client, "runs") as running:
        await until_in_engine(direct, 1, 0)
        async with long_turn(client, "waits", stream=True):
            await until_in_engine(direct, 1, 1)
        await until_in_engine(direct, 1, 0)
        assert not running.done()
    await assert_it_ends(client, direct)


async def test_leaving_while_held_reaches_no_engine(
    engine: RealEngine, direct: httpx2.AsyncClient, run_proxy: RunProxy
) -> None:
    """The engine never receives it."""
    async with (
        run_proxy((engine,), "--policy", "cap", "--policy-arg", "n=1") as proxy,
        httpx2.AsyncClient(base_url=proxy.url, timeout=120) as client,
    ):

        async def held_are(count: int) -> bool:
            return bool((await client.get("/queue")).json()["turns_held_count"] == count)

        async with long_turn(client, "runs"):
            await until_in_engine(direct, 1, 0)
            async with long_turn(client, "held"):
                await until(lambda: held_are(1))
            await until(lambda: held_are(0))
            assert (await load_of(direct))["num_waiting_reqs"] == 0
        await assert_it_ends(client, direct)


async def test_an_abort_names_a_whole_id(direct: httpx2.AsyncClient) -> None:
    """A request whose id only begins with it continues; an aborted one answers with its output so far."""
    async with long_turn(direct, "direct", rid="abort-me") as asking:
        await until_in_engine(direct, 1, 0)
        assert (await direct.post("/abort_request", json={"rid": "abort"})).status_code == 200
        await asyncio.sleep(0.5)
        await until_in_engine(direct, 1, 0)
        assert (await direct.post("/abort_request", json={"rid": "abort-me"})).status_code == 200
        choice = (await asking).json()["choices"][0]
    assert choice["finish_reason"] == "abort"
    assert choice["message"]["content"]


# --- memory


async def fill(direct: httpx2.AsyncClient, salt: int) -> None:
    """Compute more anonymous prompts than the pool holds."""
    for number in range(8):
        body = completion(words(900, seed=salt + number), 1)
        assert (await direct.post(COMPLETIONS, json=body)).status_code == 200


async def test_memory_of_a_program_stays_until_it_is_released(
    engine: RealEngine, client: httpx2.AsyncClient, direct: httpx2.AsyncClient
) -> None:
    """Anonymous memory is evicted first; SGLang is told of the release, and then evicts the program's as any other."""
    await engine.reset_prefix_cache()
    body = completion(words(600, seed=77), 2)

    async def cached_tokens(**fields: object) -> int:
        answer = await client.post(COMPLETIONS, json={**body, **fields})
        return int(answer.json()["usage"]["prompt_tokens_details"]["cached_tokens"])

    assert await cached_tokens(program_id="tagged") == 0
    await fill(direct, 1000)
    assert await cached_tokens(program_id="tagged") == 599
    told_count = heard_count(engine, "/close_session")
    await client.post("/programs/release", json={"program_id": "tagged"})

    async def is_told() -> bool:
        return heard_count(engine, "/close_session") > told_count

    await until(is_told)
    await fill(direct, 2000)
    assert await cached_tokens() == 0


async def test_a_cache_is_flushed_unless_the_engine_is_busy(
    client: httpx2.AsyncClient, direct: httpx2.AsyncClient
) -> None:
    """It declines while it computes, which is reported; afterwards the same prompt misses."""
    body = completion(words(300, seed=31), 2, program_id="flushed")

    async def cached_tokens() -> int:
        answer = await client.post(COMPLETIONS, json=body)
        return int(answer.json()["usage"]["prompt_tokens_details"]["cached_tokens"])

    async def is_flushed() -> bool:
        return (await client.post("/flush_cache")).status_code == 200

    await cached_tokens()
    assert await cached_tokens() == 299
    async with long_turn(direct, "busy"):
        await until_in_engine(direct, 1, 0)
        declined = await client.post("/flush_cache")
        assert declined.status_code != 200
        assert "Flush cache failed." in declined.text
    await assert_it_ends(client, direct)
    await until(is_flushed)  # it may still count as busy
    assert await cached_tokens() == 0


# --- observation


async def test_a_pause_and_new_weights_are_observed(client: httpx2.AsyncClient, direct: httpx2.AsyncClient) -> None:
    """A trainer contacts only the engine: turns are held, and the new weight version is read."""

    async def is_suspended(wanted: bool) -> bool:
        (report,) = await replicas(client, "")
        return bool(report["suspended_for"]) == wanted

    await client.post(COMPLETIONS, json=completion("w1 w2", 1, program_id="observed"))
    assert (await direct.post("/pause_generation", json={"mode": "in_place"})).status_code == 200
    await until(lambda: is_suspended(True))
    asking = asyncio.create_task(client.post(CHAT, json=chat(PROMPT, 2, program_id="observed")))
    version = {"new_version": "step-7", "abort_all_requests": False}
    assert (await direct.post("/update_weight_version", json=version)).json()["success"] is True

    async def has_version() -> bool:
        (report,) = await replicas(client, "")
        return bool(report["weight_version"] == "step-7")

    await until(has_version)
    assert not asking.done()
    assert (await direct.post("/continue_generation", json={})).status_code == 200
    assert (await asking).json()["metadata"]["weight_version"] == "step-7"
    await until(lambda: is_suspended(False))


@pytest.mark.nightly  # a second engine; test_control.py has new weights under load on vLLM
@pytest.mark.timeout(300)
async def test_new_weights_reach_two_engines_under_load(engine: RealEngine, run_proxy: RunProxy) -> None:
    """A trainer talks to the proxy alone; no turn runs between the first and the last call of an update."""
    async with (
        RealEngine(sglang_config()) as other,
        run_proxy((engine, other)) as proxy,
        httpx2.AsyncClient(base_url=proxy.url, timeout=120) as client,
    ):
        ends: list[tuple[int, str]] = []
        over = asyncio.Event()

        async def rollout(number: int) -> None:
            for turn in range(1000):
                if over.is_set():
                    return
                answer = await client.post(COMPLETIONS, json=completion(PROMPT, 4, program_id=f"rollout-{number}"))
                ends.append((turn, str((answer.json().get("choices") or [{}])[0].get("finish_reason"))))

        async with asyncio.TaskGroup() as group:
            for number in range(4):
                group.create_task(rollout(number))
            await until(lambda: asyncio.sleep(0, len(ends) >= 8))
            async with httpx2.AsyncClient() as direct:
                info = (await direct.get(f"{engine.url}/model_info")).json()
            update = {"model_path": info["model_path"], "weight_version": "step-1"}
            calls: list[tuple[str, Json]] = [("/pause_generation", {"mode": "retract"})]
            calls += [("/begin_weight_update", {}), ("/update_weights_from_disk", update), ("/end_weight_update", {})]
            for path, body in [*calls, ("/continue_generation", {})]:
                answer = await client.post(path, json=body)
                assert answer.status_code == 200, (path, answer.text)
                replies = answer.headers["X-Engine-Control-Replies"]
                assert replies.count("=200") == 2, (path, replies)
            ended_count = len(ends)
            await until(lambda: asyncio.sleep(0, len(ends) >= ended_count + 8))
            over.set()
        assert {reason for _, reason in ends} <= {"length", "stop"}
        for each in (engine, other):
            async with httpx2.AsyncClient() as direct:
                assert (await direct.get(f"{each.url}/model_info")).json()["weight_version"] == "step-1"


async def test_its_loads_count_what_runs_and_what_is_held(
    engine: RealEngine, client: httpx2.AsyncClient, direct: httpx2.AsyncClient
) -> None:
    """They are in SGLang's own form."""
    replica_id = engine.url.removeprefix("http://")
    own = await direct.get("/v1/loads")
    passed_on = await client.get(f"/workers/{replica_id}/v1/loads")
    assert set(passed_on.json()) == set(own.json())
    assert set(passed_on.json()["loads"][0]) == set(own.json()["loads"][0])
    async with long_turn(client, "runs"):
        await until_in_engine(direct, 1, 0)
        (load,) = (await client.get("/v1/loads")).json()["loads"]
        assert (load["num_running_reqs"], load["num_waiting_reqs"]) == (1, 0)
    await assert_it_ends(client, direct)


# --- priorities

TURNS = {"long-since": 6, "some-time": 4, "just-begun": 2, "new": 0}
"""Programs, and their numbers of earlier turns; the one with most is the oldest."""


async def served_order(
    engine: RealEngine, run_proxy: RunProxy, log: Path, priority: str, *settings: str, first: int
) -> tuple[str, ...]:
    """Queue turns in the engine behind a long one, the youngest program's first; return the order of their ends.

    `first` is the priority, in the engine's numbers, of the long one.
    """
    part = ("--policy", "passthrough", "--priority", priority, "--event-log", str(log), "--tick-s", "0.2", *settings)
    order: list[str] = []
    async with (
        run_proxy((engine,), *part) as proxy,
        httpx2.AsyncClient(base_url=proxy.url, timeout=120) as client,
        httpx2.AsyncClient(base_url=engine.url, timeout=120) as direct,
    ):
        programs = Programs(client, log.name)
        for program_id, turns_count in TURNS.items():
            for _ in range(turns_count):
                await programs.turn(program_id)
            await asyncio.sleep(0.2)  # ages are in tenths of a second

        async def turn(program_id: str) -> None:
            await programs.turn(program_id, output_tokens=160)  # gaps larger than any delay of an answer
            order.append(program_id)

        async with asyncio.TaskGroup() as group, long_turn(direct, "first", priority=first):
            await until_in_engine(direct, 1, 0)
            for count, program_id in enumerate(reversed(TURNS), 1):
                group.create_task(turn(program_id))
                await until_in_engine(direct, 1, count)
        await asyncio.sleep(0.5)  # a tick flushes the log
    assert len(set(priorities_in(log).values())) == len(TURNS)
    return tuple(order)


@pytest.mark.parametrize(
    ("priority", "settings", "order"),
    [
        ("age", (), tuple(TURNS)),
        pytest.param(
            "orbit-step",
            ("--policy-arg", "priority.window_count=2"),
            tuple(reversed(TURNS)),
            marks=pytest.mark.nightly,  # a second engine; test_priorities.py has it on vLLM
        ),
    ],
    ids=["age", "orbit-step"],
)
async def test_engine_serves_in_the_order_of_the_priorities(
    engine: RealEngine,
    run_proxy: RunProxy,
    priority: str,
    settings: tuple[str, ...],
    order: tuple[str, ...],
    tmp_path: Path,
) -> None:
    """SGLang serves higher numbers first, the proxy lower ones: the numbers to the engine are negated."""
    log = tmp_path / "events.jsonl"
    assert await served_order(engine, run_proxy, log, priority, *settings, first=2**40) == order


async def test_a_turn_with_a_priority_takes_the_place_of_one_without(direct: httpx2.AsyncClient) -> None:
    """Unless the engine is configured otherwise: the running turn waits, and continues afterwards."""
    async with long_turn(direct, "nobodys") as interrupted:
        await until_in_engine(direct, 1, 0)
        answer = await direct.post(CHAT, json=chat(PROMPT, 2, priority=1))
        assert answer.status_code == 200
        assert not interrupted.done()
    await assert_it_ends(None, direct)


@pytest.mark.nightly  # a second engine; tests/integration/test_priorities.py has its report and the numbers it gets
@pytest.mark.timeout(600)
async def test_an_engine_that_serves_low_numbers_first_is_given_them_as_they_are(
    sglang: None, run_proxy: RunProxy, tmp_path: Path
) -> None:
    """The engine reports this itself; with these flags no running turn is interrupted."""
    flags = ("--schedule-low-priority-values-first", "--disable-priority-preemption", "--default-priority-value", "0")
    async with (
        RealEngine(sglang_config(*flags)) as engine,
        httpx2.AsyncClient(base_url=engine.url, timeout=120) as direct,
    ):
        order = await served_order(engine, run_proxy, tmp_path / "events.jsonl", "age", first=-(2**40))
        assert order == tuple(TURNS)
        async with long_turn(direct, "runs"):
            await until_in_engine(direct, 1, 0)
            async with long_turn(direct, "waits", priority=-(2**40)):
                await until_in_engine(direct, 1, 1)
                await asyncio.sleep(1.0)
                await until_in_engine(direct, 1, 1)


@pytest.mark.nightly
@pytest.mark.timeout(900)
@pytest.mark.parametrize("policy", ["passthrough", "thunderagent", "breakeven"])
async def test_the_standard_load_runs_without_an_error(sglang: None, policy: str) -> None:
    """Sixteen programs on a pool for half of them: all turns are answered, all programs released, with many hits."""
    whole = replace(
        sglang_config(), pool_blocks=16_000, max_model_len=8192, extra_args=("--max-running-requests", "16")
    )
    async with RealEngine(whole) as engine, serve_proxy([engine.url], Contestant.parse(policy)) as url:
        result = await run_load(LoadSpec(programs=16), url, is_proxy=True, warmup_s=20, measure_s=60)
    logging.getLogger(__name__).info("%s: %.0f turns/min, hits %s", policy, result.turns_per_min, result.hit_ratio)
    assert (result.failed_turn_count, result.release_error_count) == (0, 0)
    assert result.finished_program_count > 0
    assert result.hit_ratio is not None
    assert result.hit_ratio > (0.5 if policy != "passthrough" else 0.0)
