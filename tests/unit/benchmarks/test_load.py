"""The load generator against a fake engine: programs are the same in every run, and the counts are right."""

from __future__ import annotations

import asyncio
import json
from collections import Counter
from contextlib import asynccontextmanager
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import pytest
from aiohttp import web

from benchmarks.load import (
    CONNECTION_BROKE,
    EndSignal,
    LoadResult,
    LoadSpec,
    ProgramPlan,
    TurnPlan,
    TurnRecord,
    percentile,
    plan_program,
    run_load,
    run_plans,
    run_programs,
    strangers,
)
from tests.loopback import on_loopback

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

QUICK = LoadSpec(
    programs=3,
    turns=(2, 4),
    system_tokens=5,
    first_prompt_tokens=(3, 6),
    output_tokens=(2, 4),
    tool_result_tokens=(1, 3),
    tool_mean_s=0.002,
    retry_after_s=0.001,
)


class FakeEngine:
    """Answers chat completions word by word; says that half of each prompt came from the cache."""

    def __init__(self) -> None:
        self.bodies: dict[str, list[dict[str, Any]]] = {}
        self.released: Counter[str] = Counter()
        self.final_ids: list[str] = []
        self.running_count = 0
        self.highest_running_count = 0
        self.failures: list[str] = []  # what happens to the next turns: "status", "cut" or "event"
        self.failure_status = 503
        self.delay_s = 0.0

    async def chat(self, request: web.Request) -> web.StreamResponse:
        body = await request.json()
        if request.headers.get("X-Dynamo-Session-Final") == "true":
            self.final_ids.append(request.headers["X-Dynamo-Session-ID"])
            return web.json_response({"choices": []})
        failure = self.failures.pop(0) if self.failures else ""
        if failure == "status":
            return web.json_response({"error": {"message": "no"}}, status=self.failure_status)
        self.running_count += 1
        self.highest_running_count = max(self.highest_running_count, self.running_count)
        try:
            await asyncio.sleep(self.delay_s)
            program_id = request.headers.get("X-Dynamo-Session-ID") or request.headers.get("X-Program-ID", "nobody")
            self.bodies.setdefault(program_id, []).append(body)
            return await (self._stream(request, body, failure) if body["stream"] else self._whole(body))
        finally:
            self.running_count -= 1

    async def release(self, request: web.Request) -> web.Response:
        self.released[(await request.json())["program_id"]] += 1
        return web.json_response({})

    async def _whole(self, body: dict[str, Any]) -> web.Response:
        text = " a" * body["max_tokens"]
        return web.json_response({"choices": [{"message": {"content": text}}], "usage": _usage(body)})

    async def _stream(self, request: web.Request, body: dict[str, Any], failure: str) -> web.StreamResponse:
        response = web.StreamResponse()
        await response.prepare(request)
        for _ in range(body["max_tokens"]):
            await _send(response, {"choices": [{"delta": {"content": " a"}}]})
        if failure == "cut":
            assert request.transport is not None
            request.transport.abort()
            return response
        if failure == "event":
            await _send(response, {"error": {"message": "replica lost"}})
            return response
        if (body.get("stream_options") or {}).get("include_usage"):
            await _send(response, {"choices": [], "usage": _usage(body)})
        await response.write(b"data: [DONE]\n\n")
        return response


async def _send(response: web.StreamResponse, event: dict[str, Any]) -> None:
    await response.write(b"data: " + json.dumps(event).encode() + b"\n\n")


def _usage(body: dict[str, Any]) -> dict[str, Any]:
    words = sum(len(message["content"].split()) for message in body["messages"])
    return {
        "prompt_tokens": 2 * words,
        "completion_tokens": body["max_tokens"],
        "prompt_tokens_details": {"cached_tokens": words},
    }


@asynccontextmanager
async def serving(engine: FakeEngine) -> AsyncIterator[str]:
    app = web.Application()
    app.router.add_post("/v1/chat/completions", engine.chat)
    app.router.add_post("/programs/release", engine.release)
    async with on_loopback(app) as url:
        yield url


def test_a_program_depends_on_seed_and_index_only() -> None:
    spec = LoadSpec(seed=7)
    assert plan_program(spec, 3) == plan_program(replace(spec, programs=99, stream=False), 3)
    assert plan_program(spec, 3).turns != plan_program(spec, 4).turns
    assert plan_program(spec, 3).turns != plan_program(replace(spec, seed=8), 3).turns


def test_the_standard_load_keeps_its_ranges() -> None:
    plans = [plan_program(LoadSpec(), index) for index in range(200)]
    later = [turn for plan in plans for turn in plan.turns[1:]]
    assert {len(plan.turns) for plan in plans} == set(range(6, 13))
    assert {len(plan.system_prompt.split()) for plan in plans} == {200}
    assert len({plan.system_prompt for plan in plans}) == 1
    assert all(400 <= len(plan.turns[0].prompt.split()) <= 800 for plan in plans)
    assert all(150 <= len(turn.prompt.split()) <= 450 for turn in later)
    assert {turn.output_tokens for turn in later} == set(range(24, 65))
    assert sum(turn.tool_s for turn in later) / len(later) == pytest.approx(1.0, rel=0.1)


async def test_two_runs_send_the_same_turns_whatever_the_timing() -> None:
    slow, fast = FakeEngine(), FakeEngine()
    slow.delay_s = 0.003
    async with serving(slow) as slow_url, serving(fast) as fast_url:
        await run_programs(QUICK, slow_url, 6, is_proxy=True)
        await run_programs(replace(QUICK, programs=6), fast_url, 6, is_proxy=True)
    assert slow.bodies == fast.bodies
    assert slow.bodies.keys() == {f"program-0-{index}" for index in range(6)}


async def test_every_prompt_begins_with_the_last_prompt_and_its_answer() -> None:
    engine = FakeEngine()
    async with serving(engine) as url:
        await run_programs(QUICK, url, 1, is_proxy=False)
    first, second = engine.bodies["program-0-0"][:2]
    assert second["messages"][:2] == first["messages"]
    assert second["messages"][2] == {"role": "assistant", "content": " a" * first["max_tokens"]}
    assert first["max_tokens"] == first["min_tokens"]
    assert engine.released == {}


@pytest.mark.parametrize("stream", [True, False])
async def test_running_programs_to_the_end_counts_every_turn(stream: bool) -> None:
    engine, seen = FakeEngine(), list[TurnRecord]()
    spec = replace(QUICK, stream=stream)
    async with serving(engine) as url:
        result = await run_programs(spec, url, 7, is_proxy=True, on_turn=seen.append)
    turn_count = sum(len(plan_program(spec, index).turns) for index in range(7))
    assert len(result.records) == len(result.window_records) == turn_count
    assert tuple(seen) == result.records
    assert result.finished_program_count == 7
    assert engine.released == {f"program-0-{index}": 1 for index in range(7)}
    assert engine.highest_running_count <= 3
    assert (result.retry_count, result.failed_turn_count, result.release_error_count) == (0, 0, 0)
    assert result.hit_ratio == 0.5
    planned = {(i, t): turn.output_tokens for i in range(7) for t, turn in enumerate(plan_program(spec, i).turns)}
    assert {(r.program_index, r.turn_index): r.output_tokens for r in result.records} == planned
    assert all((r.first_token_s is not None) == stream for r in result.records)


async def test_planned_programs_begin_on_time_and_share_cores_for_their_tools() -> None:
    """Three programs of two turns whose tools take turns on one core; without a system prompt none is sent."""
    turns = (TurnPlan("w1", 1, 0.1), TurnPlan("w2", 1, 0.0))
    plans = [ProgramPlan(index, f"p{index}", "", turns, arrival_s=0.02 * index) for index in range(3)]
    engine = FakeEngine()
    async with serving(engine) as url:
        result = await run_plans(QUICK, url, plans, is_proxy=True, tool_cores_count=1)
    starts_s = {(each.program_index, each.turn_index): each.start_s for each in result.records}
    assert [starts_s[index, 0] >= 0.02 * index for index in range(3)] == [True] * 3
    assert starts_s[1, 1] - starts_s[0, 1] > 0.09
    assert starts_s[2, 1] - starts_s[1, 1] > 0.09
    assert result.finished_program_count == engine.released.total() == 3
    assert {body["messages"][0]["role"] for bodies in engine.bodies.values() for body in bodies} == {"user"}


async def test_an_end_is_said_as_the_target_wants_it_or_not_at_all() -> None:
    engine = FakeEngine()
    async with serving(engine) as url:
        spec = replace(QUICK, programs=1, program_header="X-Dynamo-Session-ID", end_signal=EndSignal.NONE)
        await run_programs(spec, url, 1, is_proxy=True)
        assert (engine.released, engine.final_ids) == ({}, [])
        result = await run_programs(replace(spec, end_signal=EndSignal.FINAL_TURN), url, 2, is_proxy=True)
    assert engine.final_ids == ["program-0-0", "program-0-1"]
    assert (engine.released, result.release_error_count, result.failed_turn_count) == ({}, 0, 0)


async def test_turns_go_to_several_targets_in_turn() -> None:
    first, second = FakeEngine(), FakeEngine()
    async with serving(first) as url, serving(second) as other_url:
        await run_programs(replace(QUICK, programs=1, turns=(4, 4)), f"{url},{other_url}", 1, is_proxy=False)
    assert [len(engine.bodies["program-0-0"]) for engine in (first, second)] == [2, 2]


async def test_strangers_come_of_no_program_with_one_turn_each_and_leave_with_the_load() -> None:
    engine = FakeEngine()
    async with serving(engine) as url:
        async with strangers(QUICK, url, 0.005):
            await run_programs(QUICK, url, 2, is_proxy=True)
            async with asyncio.timeout(10):
                while len(engine.bodies.get("nobody", ())) < 3:
                    await asyncio.sleep(0.001)
        await asyncio.sleep(0.1)  # who was on the way arrives
        count = len(engine.bodies["nobody"])
        await asyncio.sleep(0.05)
        assert len(engine.bodies["nobody"]) == count
    prompts = [body["messages"][-1]["content"].split() for body in engine.bodies["nobody"]]
    assert all(400 <= len(words) <= 1200 for words in prompts)
    assert len({tuple(words) for words in prompts}) == count
    assert engine.bodies.keys() == {"program-0-0", "program-0-1", "nobody"}


async def test_without_usage_the_token_counts_are_unknown() -> None:
    engine = FakeEngine()
    async with serving(engine) as url:
        result = await run_programs(replace(QUICK, include_usage=False), url, 1, is_proxy=False)
    assert "stream_options" not in engine.bodies["program-0-0"][0]
    assert result.records[0].succeeded
    assert result.records[0].prompt_tokens is None
    assert result.hit_ratio is None


@pytest.mark.parametrize("failure", ["status", "cut", "event"])
async def test_a_broken_turn_is_tried_again_and_counted(failure: str) -> None:
    engine = FakeEngine()
    engine.failures = [failure, failure]
    async with serving(engine) as url:
        result = await run_programs(replace(QUICK, programs=1), url, 1, is_proxy=True)
    assert result.retry_count == 2
    assert result.failed_turn_count == 0
    assert result.records[0].tries == 3
    assert result.records[0].error
    assert result.finished_program_count == 1


@pytest.mark.parametrize(("status", "tries"), [(503, 5), (400, 1)])
async def test_a_program_is_given_up_and_released_at_a_turn_that_stays_broken(status: int, tries: int) -> None:
    engine = FakeEngine()
    engine.failures, engine.failure_status = ["status"] * tries, status
    async with serving(engine) as url:
        result = await run_programs(replace(QUICK, programs=1), url, 2, is_proxy=True)
    assert result.records[0].status == status
    assert result.records[0].tries == tries
    assert result.failed_turn_count == 1
    assert result.finished_program_count == 1
    assert engine.released == {"program-0-0": 1, "program-0-1": 1}


async def test_an_engine_that_is_gone_is_a_failed_turn() -> None:
    async with serving(FakeEngine()) as url:
        pass
    result = await run_programs(replace(QUICK, tries=2), url, 1, is_proxy=True)
    assert result.records[0].status == CONNECTION_BROKE
    assert result.retry_count == 1
    assert result.release_error_count == 1


async def test_a_timed_load_replaces_programs_and_releases_those_it_cuts_off() -> None:
    engine = FakeEngine()
    engine.delay_s = 0.001
    async with serving(engine) as url:
        result = await run_load(QUICK, url, is_proxy=True, warmup_s=0.5, measure_s=3.0)
    assert result.finished_program_count > QUICK.programs
    assert 0 < len(result.window_records) < len(result.records)
    assert result.turns_per_min == pytest.approx(len(result.window_records) * 20)
    assert engine.bodies.keys() <= engine.released.keys()
    assert set(engine.released.values()) == {1}
    assert engine.running_count == 0


def test_the_window_holds_only_turns_that_ended_in_it() -> None:
    def turn(end_s: float, status: int = 200) -> TurnRecord:
        return TurnRecord(0, 0, end_s - 1, end_s - 0.5, end_s, 100, 40, 10, status, 1)

    records = (turn(9.0), turn(10.0), turn(20.0), turn(30.0), turn(31.0), turn(15.0, status=503))
    result = LoadResult(LoadSpec(), 10.0, 30.0, records, 0, 0)
    assert result.turns_per_min == 9.0
    assert result.summary()["turn_count"] == 3
    assert result.latency_percentile_s(0.5) == 1.0
    assert result.first_token_percentile_s(0.99) == 0.5
    assert result.hit_ratio == 0.4
    assert result.failed_turn_count == 1


def test_percentiles_are_nearest_rank() -> None:
    assert percentile([], 0.5) is None
    assert percentile([3.0], 0.99) == 3.0
    assert percentile([4.0, 1.0, 3.0, 2.0], 0.5) == 2.0
    assert percentile([float(value) for value in range(1, 101)], 0.99) == 99.0
