"""A judge over real sockets: its verdicts count, its faults do no harm, and no turn waits for it."""

from __future__ import annotations

import asyncio
import json
import sys
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import pytest

from tests.integration.support import (
    CHAT,
    DEADLINE_S,
    Gate,
    answers,
    ask,
    exchange,
    fake_replica,
    get,
    metrics_of,
    post,
    running_proxy,
    turn,
    until,
    writes,
)
from tests.integration.test_pools import two_models

if TYPE_CHECKING:
    from collections.abc import Iterator
    from types import FrameType

    from tests.integration.support import Call, RunningProxy


def verdict(prediction: str = "failure", confidence: float = 0.9) -> dict[str, Any]:
    content = json.dumps({"prediction": prediction, "confidence": confidence, "reasoning": "r"})
    usage = {"prompt_tokens": 700, "completion_tokens": 30}
    return {"choices": [{"message": {"role": "assistant", "content": content}}], "usage": usage}


def judged_by(url: str, **settings: Any) -> dict[str, Any]:
    """Return the configuration of a proxy that asks that judge after every turn."""
    defaults = {"judge_url": url, "judge_model": "judge", "judge_every_turns": 1, "judge_rate_per_s": 1000.0}
    return {**defaults, **settings}


async def counted(proxy: RunningProxy, name: str, label: str = "") -> float:
    families = await metrics_of(proxy.url)
    values = families.get(f"thunderagent_judge_{name}", {})
    return sum(value for labels, value in values.items() if not label or label in labels)


async def until_counted(proxy: RunningProxy, name: str, label: str, least: float = 1) -> None:
    async with asyncio.timeout(DEADLINE_S):
        while await counted(proxy, name, label) < least:
            await asyncio.sleep(0.01)


async def test_verdict_appears_in_the_story_and_in_the_metrics(engine_url: str) -> None:
    """The judge gets the task, with the model and the key of the configuration."""
    async with (
        fake_replica(answers(verdict())) as judge,
        running_proxy(engine_url, **judged_by(f"{judge.url}/v1", judge_api_key="secret")) as proxy,
    ):
        await ask(proxy.url, "a", content="find the answer")
        await until_counted(proxy, "verdicts_total", "failure")
        call = await judge.call()
        assert (call.target, call.header("Authorization")) == (CHAT, "Bearer secret")
        asked = call.json()
        assert asked["model"] == "judge"
        assert "find the answer" in asked["messages"][0]["content"]
        story = (await get(proxy.url, "/programs/a")).json()
        assert story["judged"] == {
            "level": "medium",
            "failure_count": 1,
            "verdicts": [{"turn_count": 1, "prediction": "failure", "confidence_ratio": 0.9}],
        }
        assert "failure by 0.90 at turn 1: medium" in [each["why"] for each in story["story"]]
        assert await counted(proxy, "tokens_total", "prompt") == 700
        families = await metrics_of(proxy.url)
        assert families["thunderagent_programs_by_level"]["medium",] == 1


RUBBISH: dict[str, tuple[Any, str]] = {
    "no JSON": (answers(b"<html>"), "no_json"),
    "prose": (answers({"choices": [{"message": {"content": "I think it will work out."}}]}), "no_json"),
    "wrong types": (
        answers({"choices": [{"message": {"content": '{"prediction": 1, "confidence": []}'}}]}),
        "wrong_shape",
    ),
    "no choices": (answers({"choices": []}), "wrong_shape"),
    "500": (answers(b"oh no", status="500 Internal Server Error"), "status"),
    "a redirect": (answers(b"", status="302 Found", headers=[("location", "http://127.0.0.1:1/")]), "status"),
    "a flood": (answers(b"x" * 400_000), "too_large"),
    "garbage": (writes(b"\x00\xff garbage\r\n\r\n"), "connection"),
    "a head that breaks off": (writes(b"HTTP/1.1 200 OK\r\nContent-Length: 9\r\n\r\n{"), "connection"),
    "nothing": (Gate(), "timeout"),
    "half an answer": (Gate(before=[b"HTTP/1.1 200 OK\r\nContent-Length: 9\r\n\r\n{"]), "timeout"),
}


@pytest.mark.parametrize("name", RUBBISH)
async def test_rubbish_is_counted_and_nothing_else(name: str, engine_url: str) -> None:
    """Turns continue as without a judge, and a valid answer afterwards counts."""
    behaviour, why = RUBBISH[name]
    async with fake_replica(behaviour) as judge:
        config = judged_by(f"{judge.url}/v1", judge_timeout_s=1.5 if why == "timeout" else 10.0)
        async with running_proxy(engine_url, **config) as proxy:
            assert (await ask(proxy.url, "a")).status == 200
            await until_counted(proxy, "failures_total", why)
            assert await counted(proxy, "failures_total") == 1
            story = (await get(proxy.url, "/programs/a")).json()
            assert story["judged"] is None
            judge.behaviour = answers(verdict("success"))
            assert (await ask(proxy.url, "a")).status == 200
            await until_counted(proxy, "verdicts_total", "success")


async def test_turns_in_all_pools_count() -> None:
    """A program that went on with another model is judged as before."""
    async with (
        fake_replica(answers(verdict())) as judge,
        two_models(**judged_by(f"{judge.url}/v1", judge_every_turns=3)) as proxy,
    ):
        for model in "abb":
            assert (await ask(proxy.url, "p", model=model)).status == 200
        await until_counted(proxy, "verdicts_total", "failure")
        for pool in "ab":
            story = (await get(proxy.url, f"/programs/p?pool={pool}")).json()
            assert [each["turn_count"] for each in story["judged"]["verdicts"]] == [3]


async def test_a_judge_that_is_not_there_is_a_failure(engine_url: str) -> None:
    """Nobody listens at its URL."""
    async with running_proxy(engine_url, **judged_by("http://127.0.0.1:9/v1")) as proxy:
        assert (await ask(proxy.url, "a")).status == 200
        await until_counted(proxy, "failures_total", "connection")


async def test_a_shutdown_does_not_wait_for_the_judge(engine_url: str) -> None:
    """Open questions are given up."""
    loop = asyncio.get_running_loop()
    async with fake_replica(Gate()) as judge:
        async with running_proxy(engine_url, **judged_by(f"{judge.url}/v1", judge_timeout_s=600.0)) as proxy:
            await ask(proxy.url, "a")
            await judge.call()
            began_s = loop.time()
        assert loop.time() - began_s < DEADLINE_S


async def test_the_replicas_can_be_the_judge() -> None:
    """The questions are anonymous turns with the program's model; their cost counts for no program."""

    async def behave(call: Call) -> None:
        is_question = "You judge whether" in call.json()["messages"][0]["content"]
        await answers(verdict("success") if is_question else {"choices": [], "usage": {"prompt_tokens": 3}})(call)

    config = judged_by("replicas", judge_model="")
    async with fake_replica(behave) as engine, running_proxy(engine.url, **config) as proxy:
        await post(proxy.url, CHAT, turn("a", model="own"))
        await until_counted(proxy, "verdicts_total", "success")
        question = await engine.call(1)
        assert question.json()["model"] == "own"
        assert question.header("X-Program-ID") is None
        program = proxy.runtime.scheduler.programs.get("a")
        assert program is not None
        assert (program.turn_count, program.level) == (1, 0)
        engine.behaviour = answers(b"no", status="400 Bad Request")
        await post(proxy.url, CHAT, turn("a", model="own"))
        await post(proxy.url, CHAT, turn("a", model="own"))
        engine.behaviour = behave
        await post(proxy.url, CHAT, turn("a", model="own"))
        await until_counted(proxy, "verdicts_total", "success", 2)


async def test_refused_program_gets_410_until_it_is_released(engine_url: str) -> None:
    """This happens only if it is configured."""
    async with fake_replica(answers(verdict())) as judge:
        config = judged_by(f"{judge.url}/v1", judge_fail_count=1)
        async with running_proxy(engine_url, **config, judge_ends_hopeless=True) as proxy:
            for count in (1, 2):
                assert (await ask(proxy.url, "a")).status == 200
                await until_counted(proxy, "verdicts_total", "failure", count)
            refused = await ask(proxy.url, "a")
            assert (refused.status, refused.error["code"]) == (410, "program_hopeless")
            released = await post(proxy.url, "/programs/release", {"program_id": "a"})
            assert released.json() == {"program_id": "a", "released": False}
            assert (await ask(proxy.url, "a")).status == 200
        async with running_proxy(engine_url, **config) as proxy:
            for count in (1, 2, 3):
                assert (await ask(proxy.url, "a")).status == 200
                await until_counted(proxy, "verdicts_total", "failure", count)


async def test_outcomes_tell_how_often_it_was_right(engine_url: str) -> None:
    """They are in the body of a release, in a header of any, or with the last turn; other words are refused."""
    async with (
        fake_replica(answers(verdict())) as judge,
        running_proxy(engine_url, **judged_by(f"{judge.url}/v1")) as proxy,
    ):
        for count, program_id in enumerate("abc", start=1):
            await ask(proxy.url, program_id)
            await until_counted(proxy, "verdicts_total", "failure", count)
        await post(proxy.url, "/programs/release", {"program_id": "a", "outcome": "failure"})
        await exchange(proxy.url, "DELETE", "/programs/b", [("X-Program-Outcome", "success")])
        final = [("X-Program-Final", "1"), ("X-Program-Outcome", "Failure")]
        assert (await post(proxy.url, CHAT, turn("c"), *final)).status == 200
        await until(lambda: proxy.runtime.scheduler.programs.get("c") is None)
        assert (await post(proxy.url, CHAT, turn("d"), *final)).status == 200  # never judged
        families = await metrics_of(proxy.url)
        assert families["thunderagent_program_outcomes_total"] == {("failure",): 3, ("success",): 1}
        assert families["thunderagent_judge_recall_ratio"]["5",] == pytest.approx(2 / 3)
        assert families["thunderagent_judge_false_alarm_ratio"]["5",] == 1
        for body in ({"program_id": "a", "outcome": "odd"}, {"program_ids": ["a"], "outcome": "success"}):
            assert (await post(proxy.url, "/programs/release", body)).status == 400
        odd = await exchange(proxy.url, "DELETE", "/programs/e", [("X-Program-Outcome", "odd")])
        assert (odd.status, odd.error["code"]) == (400, "invalid_request")


async def test_nothing_is_said_of_a_judge_before_its_first_verdict(engine_url: str) -> None:
    """Outcomes alone show nothing about a judge."""
    async with running_proxy(engine_url) as proxy:
        await ask(proxy.url, "a")
        await post(proxy.url, "/programs/release", {"program_id": "a", "outcome": "failure"})
        families = await metrics_of(proxy.url)
        assert families["thunderagent_program_outcomes_total"]["failure",] == 1
        assert not families.get("thunderagent_judge_recall_ratio")


LARGE_TURN = turn("p0", content="word " * 100_000)
PROGRAMS_COUNT = 7


@pytest.mark.parametrize("name", ["nothing", "no JSON", "a flood", "500"])
async def test_no_turn_waits_for_a_judge(name: str) -> None:
    """Turns, also large ones, are answered before the judge answers, and continue while it sends rubbish.

    Its questions and answers are read on other threads than the one that all turns share.
    """
    behaviour, why = RUBBISH[name]
    may_answer = asyncio.Event()

    async def behave(call: Call) -> None:
        await may_answer.wait()
        await behaviour(call)

    async with (
        fake_replica() as engine,
        fake_replica(behave) as judge,
        running_proxy(engine.url, **judged_by(f"{judge.url}/v1")) as proxy,
    ):
        with functions_called_in("thunderagent/proxy/judge") as called:
            for number in range(2 * PROGRAMS_COUNT):
                body = turn(f"p{number % PROGRAMS_COUNT}") if number else LARGE_TURN
                assert (await post(proxy.url, CHAT, body)).status == 200
            await judge.call()
            assert await counted(proxy, "failures_total") == 0
            may_answer.set()
            if why != "timeout":
                await until_counted(proxy, "failures_total", why, PROGRAMS_COUNT)
            assert (await ask(proxy.url, "a")).status == 200
        read_here = {function for file, function in called if file in {"answer.py", "transcript.py"}}
        assert not read_here
        assert ("judge.py", "turn_seen") in called


@contextmanager
def functions_called_in(folder: str) -> Iterator[set[tuple[str, str]]]:
    """Collect file and name of the functions in a folder of ours that this thread calls."""
    called: set[tuple[str, str]] = set()

    def note(frame: FrameType, event: str, _: object) -> None:
        if event == "call" and folder in frame.f_code.co_filename:
            called.add((frame.f_code.co_filename.rpartition("/")[2], frame.f_code.co_name))

    before = sys.getprofile()
    sys.setprofile(note)
    try:
        yield called
    finally:
        sys.setprofile(before)
