"""The benchmark of agents: what its front asks and answers, parts of a program's time, recycled and new sandboxes."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import aiohttp
from aiohttp import web

from benchmarks.agents import ScriptedFront, _parts_s, _preparations, _recycling
from benchmarks.agents_tasks import TASKS
from tests.loopback import on_loopback

if TYPE_CHECKING:
    from pathlib import Path


class Engine:
    """An engine like vLLM: it keeps what it is asked, and counts 2 s of a queue, 3 s of prefill, 5 s of decoding."""

    def __init__(self) -> None:
        self.asked: list[dict[str, Any]] = []
        self.reset_count = 0

    def app(self) -> web.Application:
        app = web.Application()
        app.router.add_get("/v1/models", self._models)
        app.router.add_get("/metrics", self._metrics)
        app.router.add_post("/reset_prefix_cache", self._reset)
        app.router.add_post("/v1/chat/completions", self._chat)
        return app

    async def _models(self, request: web.Request) -> web.Response:
        return web.json_response({"data": [{"id": "tiny"}]})

    async def _metrics(self, request: web.Request) -> web.Response:
        lines = []
        for part, each_s in (("queue", 2.0), ("prefill", 3.0), ("decode", 5.0)):
            name = f"vllm:request_{part}_time_seconds"
            lines += [f"# TYPE {name} histogram", f'{name}_bucket{{le="+Inf"}} {len(self.asked)}']
            lines += [f"{name}_count {len(self.asked)}", f"{name}_sum {100 + each_s * len(self.asked)}"]
        return web.Response(text="\n".join(lines) + "\n")

    async def _reset(self, request: web.Request) -> web.Response:
        self.reset_count += 1
        return web.json_response({"success": self.reset_count > 1})  # declines once, as while requests are in flight

    async def _chat(self, request: web.Request) -> web.Response:
        self.asked.append(await request.json())
        usage = {"prompt_tokens": 90, "completion_tokens": 48, "prompt_tokens_details": {"cached_tokens": 60}}
        message = {"role": "assistant", "content": "w1 w2"}
        return web.json_response({"choices": [{"index": 0, "message": message}], "usage": usage})


async def test_a_turn_costs_what_it_costs_at_the_engine_and_says_what_the_script_says() -> None:
    engine, task = Engine(), TASKS[2]
    call = {"type": "function", "id": "call-0", "function": {"name": "bash", "arguments": '{"command": "ls"}'}}
    turn = {
        "model": "tiny",
        "messages": [
            {"role": "system", "content": "Be good."},
            {"role": "user", "content": f"TASK {task.name}: {task.says}"},
            {"role": "assistant", "content": "Step 1.", "tool_calls": [call]},
            {"role": "tool", "tool_call_id": "call-0", "content": "a b"},
        ],
        "tools": [{"type": "function", "function": {"name": "bash"}}],
        "priority": 7,
    }
    front = ScriptedFront("", 30)
    async with on_loopback(engine.app()) as front.engine_url, aiohttp.ClientSession() as session:
        async with front.running() as url, session.post(f"{url}/v1/chat/completions", json=turn) as response:
            answer = await response.json()
        assert engine.reset_count == 2, "each run begins without prefixes, and an engine that is busy is asked again"
    (asked,) = engine.asked
    assert (asked["priority"], asked["max_tokens"], asked["min_tokens"], asked["ignore_eos"]) == (7, 48, 48, True)
    assert "tools" not in asked
    assert [each["role"] for each in asked["messages"]] == ["user", "user", "assistant", "user"]
    assert "ls" in asked["messages"][2]["content"]
    (choice,) = answer["choices"]
    said = json.loads(choice["message"]["tool_calls"][0]["function"]["arguments"])
    assert said == {"command": f"cat /repo/{task.name}.py"}
    assert (front.turn_count, front.prompt_tokens, front.cached_tokens) == (1, 90, 60)
    assert front.parts_s == {"queue": 2.0, "prefill": 3.0, "decode": 5.0}, "of this run alone"
    assert front.engine_s > 0


async def test_openhands_calls_its_terminal_and_then_finishes() -> None:
    """What it asks besides, as for a title, has no tools: the engine's own words answer."""
    engine, task = Engine(), TASKS[2]
    turn: dict[str, Any] = {
        "model": "tiny",
        "messages": [
            {"role": "system", "content": [{"type": "text", "text": "Be good."}]},
            {"role": "user", "content": [{"type": "text", "text": f"TASK {task.name}: {task.says}"}]},
        ],
    }
    front = ScriptedFront("", 30, "openhands")
    called: list[tuple[str, Any]] = []
    async with (
        on_loopback(engine.app()) as front.engine_url,
        aiohttp.ClientSession() as session,
        front.running() as url,
    ):
        async with session.post(f"{url}/v1/chat/completions", json=turn) as response:
            assert (await response.json())["choices"][0]["message"]["content"] == "w1 w2"
        turn["tools"] = [{"type": "function", "function": {"name": "terminal"}}]
        while not called or called[-1][0] != "finish":
            async with session.post(f"{url}/v1/chat/completions", json=turn) as response:
                message = (await response.json())["choices"][0]["message"]
            (call,) = message["tool_calls"]
            called.append((call["function"]["name"], json.loads(call["function"]["arguments"])))
            turn["messages"] += [message, {"role": "tool", "tool_call_id": call["id"], "content": "done"}]
    commands = [arguments["command"] for _, arguments in called[:-1]]
    assert {name for name, _ in called[:-1]} == {"terminal"}
    assert commands[0] == "cd /repo && ls -l && cat before.txt"
    assert commands[-1] == "cd /repo && /venv/bin/python -m unittest -q 2>&1 | tail -1", "its output is what is judged"
    assert engine.asked[0]["messages"][1] == {"role": "user", "content": f"TASK {task.name}: {task.says}"}
    assert front.turn_count == 1 + len(called)


def test_the_parts_of_a_programs_time_are_all_of_it() -> None:
    front = ScriptedFront("", 30, engine_s=36.0, parts_s={"queue": 4.0, "prefill": 10.0, "decode": 20.0})
    run = {"turn_s": [10.0, 15.0], "tool_s": [1.0, 2.0], "place_s": 0.5, "setup_s": 1.5, "begun_s": 1.0}
    runs = [run | {"ended_s": 33.0}, run | {"ended_s": 35.0}]
    parts_s = _parts_s(runs, front)
    assert parts_s == {
        "held": 7.0,
        "queue": 2.0,
        "prefill": 5.0,
        "decode": 10.0,
        "engine's other": 1.0,
        "tools": 3.0,
        "sandbox": 2.0,
        "other": 3.0,
    }
    assert sum(parts_s.values()) == 33.0


def test_a_recycled_sandbox_is_compared_with_one_that_ran_its_setup(tmp_path: Path) -> None:
    """By what the proxy says of each: the second of a template may run its setup, too, while one is being kept."""

    def said_in(name: str, *ready: tuple[float, bool]) -> dict[str, Any]:
        events: list[dict[str, Any]] = [{"event": "sandbox_setup_kept", "size_bytes": 7}, {"event": "other"}]
        events += [
            {"event": "sandbox_ready", "template": "words", "prepare_s": each_s, "recycled": recycled}
            for each_s, recycled in ready
        ]
        path = tmp_path / name
        path.write_text("".join(f"{json.dumps(each)}\n" for each in events) + "no event\n")
        return _preparations(path)

    reused = said_in("reused", (9.0, False), (7.0, False), (1.0, True), (2.0, True), (1.5, True))
    prepared = said_in("prepared", (5.0, False), (7.0, False))
    assert reused == {
        "prepare_s": {"new": 8.0, "recycled": 1.5, "new_all": [9.0, 7.0], "recycled_all": [1.0, 2.0, 1.5]},
        "kept_bytes": 7,
    }
    assert prepared["prepare_s"]["recycled"] is None
    assert _recycling(reused["prepare_s"], prepared["prepare_s"]) == (
        "a recycled sandbox starts in 1.50 s (median of 3), a new one, which runs its setup, in 6.00 s "
        "(of 2): 0.25 of it"
    )
