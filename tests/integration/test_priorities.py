"""Engines get the scheduler's priorities in their own way, or none."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest

from tests.integration.support import answers, ask, fake_replica, post, running_proxy, turn, until
from thunderagent.programs.policy import EnginePriority
from thunderagent.proxy.gate.keys import mint_key

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

    from tests.integration.support import Call

BY_AGE = {"policy": "passthrough", "priority": "tests.integration.test_priorities:Seven"}
SGLANG = "sglang:max_total_num_tokens 1000000.0\n"
REFUSAL = {"error": {"message": "Got priority 7 but Priority scheduling is not enabled.", "code": 400}}


class Seven(EnginePriority):
    """An engine priority that is always 7."""

    name = "seven"

    def engine_priority(self, view: object, program: object) -> int:
        return 7


class Rising(EnginePriority):
    """An engine priority that is 0 at first, and one more each time."""

    name = "rising"

    def __init__(self) -> None:
        self.given = -1

    def engine_priority(self, view: object, program: object) -> int:
        self.given += 1
        return self.given


def turns_of(calls: list[Call]) -> list[Call]:
    return [call for call in calls if call.method == "POST"]


async def test_a_turn_of_a_program_carries_its_priority() -> None:
    """It is a field of the body; a client's own priority stays, and an anonymous turn has none."""
    async with fake_replica() as engine, running_proxy(engine.url, **BY_AGE) as proxy:
        for body in (turn("a"), turn("a", priority=3), turn(None), turn("a", content='", {"priority": 1}')):
            assert (await post(proxy.url, "/v1/chat/completions", body)).status == 200
        got = [call.json().get("priority") for call in turns_of(engine.calls)]
        assert got == [7, 3, None, 7]
        client_gave = turn("a")
        del client_gave["program_id"]
        assert {
            key: value for key, value in turns_of(engine.calls)[0].json().items() if key != "priority"
        } == client_gave


RED_KEY, RED_LINE = mint_key("red")
ADMIN_KEY, ADMIN_LINE = mint_key("ops")
KEYS: dict[str, Any] = {"api_keys": (RED_LINE,), "admin_keys": (ADMIN_LINE,)}
BODY = turn("a", priority=-99)
EMBEDDINGS = {"model": "m", "input": "x", "priority": -99}


@pytest.mark.parametrize(
    ("rule", "key", "stays"),
    [
        ({}, None, True),
        ({"client_priority": "drop"}, None, False),
        (KEYS, RED_KEY, False),
        (KEYS, ADMIN_KEY, True),
        (KEYS | {"client_priority": "keep"}, RED_KEY, True),
        (KEYS | {"client_priority": "drop"}, ADMIN_KEY, True),
    ],
    ids=["open", "open-drop", "data-key", "admin-key", "data-key-keep", "admin-key-drop"],
)
@pytest.mark.parametrize(("policy", "given"), [(BY_AGE, 7), ({"policy": "passthrough"}, None)], ids=["policy", "none"])
async def test_a_stranger_does_not_put_its_turns_before_those_of_others(
    *, rule: dict[str, Any], key: str | None, stays: bool, policy: dict[str, Any], given: int | None
) -> None:
    """This holds for turns and side calls, in body and vLLM's header, and on a replica of its own choice."""
    headers = [("X-Vllm-Priority", "-99"), *([("Authorization", f"Bearer {key}")] if key else [])]
    async with fake_replica() as engine, running_proxy(engine.url, **policy, **rule) as proxy:
        for prefix in ("",) if key == RED_KEY else ("", f"/workers/{engine.replica_id}"):
            for path, body in (("/v1/chat/completions", BODY), ("/v1/embeddings", EMBEDDINGS)):
                assert (await post(proxy.url, prefix + path, body, *headers)).status == 200
        got = [(call.json().get("priority"), call.header("X-Vllm-Priority")) for call in turns_of(engine.calls)]
        if stays:
            assert set(got) == {(-99, "-99")}
        else:
            assert got == [(given, None), *[(None, None)] * (len(got) - 1)]


async def test_priority_goes_by_header_where_the_body_has_no_field() -> None:
    """vLLM's Messages endpoint has none."""
    async with fake_replica() as engine, running_proxy(engine.url, **BY_AGE) as proxy:
        body = {"model": "m", "max_tokens": 5, "messages": [{"role": "user", "content": "hello"}]}
        await post(proxy.url, "/p/a/v1/messages", body)
        call = turns_of(engine.calls)[0]
        assert (call.header("X-Vllm-Priority"), call.json()) == ("7", body)


async def test_an_engine_that_has_no_priorities_gets_none() -> None:
    """If it refuses the first turn for that, the turn is resent without priority, unnoticed by its client."""

    async def behave(call: Call) -> None:
        refuses = call.method == "POST" and "priority" in call.json()
        await (answers(REFUSAL, status="400 Bad Request") if refuses else answers())(call)

    async with fake_replica(behave) as engine, running_proxy(engine.url, **BY_AGE) as proxy:
        for _ in range(3):
            answer = await ask(proxy.url, "a")
            assert answer.status == 200
        assert ["priority" in call.json() for call in turns_of(engine.calls)] == [True, False, False, False]


async def test_an_engine_that_took_a_zero_is_not_taken_to_have_priorities() -> None:
    """Without priorities vLLM refuses all values but zero."""

    async def behave(call: Call) -> None:
        refuses = call.method == "POST" and call.json().get("priority")
        await (answers(REFUSAL, status="400 Bad Request") if refuses else answers())(call)

    part = "tests.integration.test_priorities:Rising"
    async with fake_replica(behave) as engine, running_proxy(engine.url, policy="passthrough", priority=part) as proxy:
        for _ in range(3):
            assert (await ask(proxy.url, "a")).status == 200
        assert [call.json().get("priority") for call in turns_of(engine.calls)] == [0, 1, None, None]


async def test_unrelated_refusal_belongs_to_the_client() -> None:
    """This includes the turn by which the proxy learns whether the engine takes priorities."""
    refusal = {"error": {"message": "max_tokens is too large", "code": 400}}
    async with (
        fake_replica(answers(refusal, status="400 Bad Request")) as engine,
        running_proxy(engine.url, **BY_AGE) as proxy,
    ):
        answer = await ask(proxy.url, "a")
        assert (answer.status, answer.json()) == (400, refusal)
        assert len(turns_of(engine.calls)) == 1


@pytest.mark.parametrize(
    ("info", "priority"),
    [
        ({"enable_priority_scheduling": True}, -7),
        ({"enable_priority_scheduling": True, "schedule_low_priority_values_first": True}, 7),
        ({"enable_priority_scheduling": False}, None),
        ({}, None),
        ("rubbish", None),
    ],
)
@pytest.mark.parametrize("served", ["/server_info", "/get_server_info"])
async def test_sglang_is_asked_which_numbers_go_first(info: Any, priority: int | None, served: str) -> None:
    """The question is not in the path of turns: turns before its answer carry no priority."""
    asked: list[str] = []

    def behaviour() -> Callable[[Call], Awaitable[None]]:
        async def behave(call: Call) -> None:
            if call.method == "GET":
                asked.append(call.target)
                await (answers(info) if call.target == served else answers({}, status="404 Not Found"))(call)
            else:
                await answers()(call)

        return behave

    async with fake_replica(behaviour()) as engine:
        engine.metrics = SGLANG
        async with running_proxy(engine.url, backend_type="sglang", **BY_AGE) as proxy:
            await ask(proxy.url, "a")
            await until(lambda: served in asked)
            for _ in range(50):
                await ask(proxy.url, "a")
                if turns_of(engine.calls)[-1].json().get("priority") == priority:
                    break
            assert turns_of(engine.calls)[-1].json().get("priority") == priority
            assert "priority" not in turns_of(engine.calls)[0].json()
