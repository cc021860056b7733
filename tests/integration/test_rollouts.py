"""Rollouts through a proxy: token-exact, in order, with the client's bytes as without them, and by tenant."""

from __future__ import annotations

import asyncio
import json
import os
import signal
from pathlib import Path
from typing import Any

import pytest

from benchmarks.processes import thunderagent
from tests.integration.support import (
    CHAT,
    DONE,
    Answer,
    Call,
    Wire,
    answers,
    chunk,
    event,
    exchange,
    fake_replica,
    get,
    metric,
    post,
    running_proxy,
    stream_head,
    streams,
    until,
)
from thunderagent.client import rollouts
from thunderagent.client.errors import ProxyRefusedError
from thunderagent.proxy.gate.keys import mint_key

RECORDS: dict[str, Any] = {"rollouts": "logprobs", "backend_type": "vllm"}
USER, ASSISTANT = 2001, 2002


class TokenEngine:
    """Behave like a vLLM whose tokens are words: `w7` is token 7. It says ids only if it is asked."""

    def __init__(self) -> None:
        self.asked: list[dict[str, Any]] = []
        self.next = 100
        self.finish = "stop"

    def prompt_of(self, body: dict[str, Any]) -> list[int]:
        """Render the messages."""
        ids: list[int] = []
        for message in body["messages"]:
            ids += [USER if message["role"] == "user" else ASSISTANT]
            ids += [int(word[1:]) for word in message["content"].split()]
        return [*ids, ASSISTANT]

    async def __call__(self, call: Call) -> None:
        body = call.json()
        self.asked.append(body)
        output = [self.next, self.next + 1]
        self.next += 2
        parts = [self._choice(body, [each]) for each in output]
        prompt = self.prompt_of(body) if body.get("return_token_ids") else None
        if body.get("stream"):
            first = {"choices": [{"index": 0, "delta": {"role": "assistant", "content": ""}, "logprobs": None}]}
            pieces = [event({**first, "prompt_token_ids": prompt})]
            for at, (each, part) in enumerate(zip(output, parts, strict=True)):
                last = self.finish if at == len(output) - 1 else None
                pieces.append(
                    event({"choices": [{"index": 0, "delta": {"content": f" w{each}"}, **part, "finish_reason": last}]})
                )
            await streams(*pieces, event(DONE) if isinstance(DONE, str) else DONE)(call)
            return
        message = {"role": "assistant", "content": " ".join(f"w{each}" for each in output)}
        choice = {"index": 0, "message": message, **self._choice(body, output), "finish_reason": self.finish}
        usage = {"prompt_tokens": len(self.prompt_of(body)), "completion_tokens": 2, "total_tokens": 0}
        await answers({"id": "x", "choices": [choice], "usage": usage, "prompt_token_ids": prompt})(call)

    def _choice(self, body: dict[str, Any], ids: list[int]) -> dict[str, Any]:
        logprobs = {"content": [{"token": f"w{each}", "logprob": -each / 4, "bytes": [119]} for each in ids]}
        return {
            "logprobs": logprobs if body.get("logprobs") else None,
            "token_ids": ids if body.get("return_token_ids") else None,
        }


def said(content: str, role: str = "user") -> dict[str, str]:
    """Return a message."""
    return {"role": role, "content": content}


async def chat(
    url: str, program_id: str, messages: list[dict[str, str]], *headers: tuple[str, str], **fields: Any
) -> Answer:
    """Send a turn."""
    return await post(url, CHAT, {"messages": messages, **fields}, ("X-Program-ID", program_id), *headers)


async def rollout(url: str, program_id: str, query: str = "", *headers: tuple[str, str]) -> dict[str, Any]:
    """Return a program's rollout."""
    answer = await exchange(url, "GET", f"/programs/{program_id}/trajectory{query}", headers)
    assert answer.status == 200, answer.body
    found: dict[str, Any] = answer.json()
    return found


@pytest.mark.parametrize("streamed", [False, True])
async def test_conversation_is_recorded_exactly(streamed: bool) -> None:
    """Prompt and output ids, log probabilities, and that the second prompt extends the first turn."""
    async with fake_replica(TokenEngine()) as replica, running_proxy(replica.url, **RECORDS) as proxy:
        await chat(proxy.url, "a", [said("w1 w2")], stream=streamed)
        history = [said("w1 w2"), said("w100 w101", "assistant"), said("w3")]
        await chat(proxy.url, "a", history, stream=streamed)
        found = await rollout(proxy.url, "a")
        first, second = found["turns"]
        assert first["prompt_new_ids"] == [USER, 1, 2, ASSISTANT]
        assert first["outputs"][0]["ids"] == [100, 101]
        assert first["outputs"][0]["logprobs"] == [-25.0, -25.25]
        assert first["outputs"][0]["finish"] == "stop"
        assert (first["link"], second["link"]) == ("root", "extends")
        assert (second["parent"], second["shared_tokens"]) == (0, 6)
        assert second["prompt_new_ids"] == [USER, 3, ASSISTANT]
        assert (found["complete"], found["mask_sample"], found["ended"]) == (True, False, False)
        (sample,) = (await rollout(proxy.url, "a", "?view=samples"))["samples"]
        assert sample["ids"] == [USER, 1, 2, ASSISTANT, 100, 101, USER, 3, ASSISTANT, 102, 103]
        assert sample["mask"] == [0, 0, 0, 0, 1, 1, 0, 0, 0, 1, 1]
        assert await metric(proxy.url, "rollout_turns_total", "extends") == 1


@pytest.mark.parametrize(
    "fields", [{}, {"stream": True}, {"logprobs": True}, {"stream": True, "return_token_ids": True}]
)
async def test_client_gets_the_bytes_that_it_gets_without(fields: dict[str, Any]) -> None:
    """On and off, streamed and whole, and with what it asks for itself."""
    got = []
    for config in ({}, RECORDS):
        async with fake_replica(TokenEngine()) as replica, running_proxy(replica.url, **config) as proxy:
            got.append((await chat(proxy.url, "a", [said("w1")], **fields)).body)
    assert got[0] == got[1]


async def test_engine_is_asked_only_if_rollouts_are_on() -> None:
    """Off, its request is the client's."""
    engine = TokenEngine()
    async with fake_replica(engine) as replica:
        async with running_proxy(replica.url) as proxy:
            await chat(proxy.url, "a", [said("w1")])
            off = await get(proxy.url, "/programs/a/trajectory")
            assert (off.status, off.error["code"]) == (400, "rollouts_off")
        async with running_proxy(replica.url, **{**RECORDS, "rollouts": "ids"}) as proxy:
            await chat(proxy.url, "a", [said("w1")])
            await post(proxy.url, CHAT, {"messages": [said("w1")]})  # anonymous
    assert [sorted(body) for body in engine.asked] == [["messages"], ["messages", "return_token_ids"], ["messages"]]


async def test_lost_thought_splits_the_sample() -> None:
    """The client sends back less than the engine said: a drift, and a second sample that is masked up to there."""
    async with fake_replica(TokenEngine()) as replica, running_proxy(replica.url, **RECORDS) as proxy:
        await chat(proxy.url, "a", [said("w1")])
        await chat(proxy.url, "a", [said("w1"), said("w101", "assistant"), said("w2")])
        found = await rollout(proxy.url, "a", "?view=samples")
        assert found["links"] == {"root": 1, "drift": 1}
        first, second = found["samples"]
        assert (sum(first["mask"]), sum(second["mask"])) == (2, 2)
        assert second["ids"][:-2] == [USER, 1, ASSISTANT, 101, USER, 2, ASSISTANT]
        assert not any(second["mask"][:-2])


async def test_failures_are_recorded_with_their_verdict() -> None:
    """An engine's refusal is the agent's; an engine without ids makes the rollout incomplete."""
    refuses = answers({"error": "no"}, status="400 Bad Request")
    async with fake_replica(refuses) as replica, running_proxy(replica.url, **RECORDS) as proxy:
        await chat(proxy.url, "a", [said("w1")])
        found = await rollout(proxy.url, "a")
        (turn,) = found["turns"]
        assert (turn["verdict"], turn["outcome"], turn["status"], turn["kept"]) == (
            "agent_error",
            "refused",
            400,
            False,
        )
        assert (found["verdict"], found["mask_sample"]) == ("agent_error", False)
    async with fake_replica(answers({"choices": []})) as replica, running_proxy(replica.url, **RECORDS) as proxy:
        await chat(proxy.url, "a", [said("w1")])
        found = await rollout(proxy.url, "a")
        assert (found["turns"][0]["missing"], found["complete"], found["mask_sample"]) == ("no_ids", False, True)


async def test_error_inside_an_answer_is_found_as_without_rollouts() -> None:
    """Also in one whose ids were taken out before: the client gets it from another replica, which alone is recorded."""

    async def fails(call: Call) -> None:
        await answers({"object": "error", "message": "out of memory", "code": 500, "prompt_token_ids": [1, 2]})(call)

    async with (
        fake_replica(fails) as failing,
        fake_replica(TokenEngine()) as good,
        running_proxy(failing.url, good.url, **RECORDS) as proxy,
    ):
        for number in range(4):
            answer = await chat(proxy.url, f"p{number}", [said("w1 w2")])
            assert "out of memory" not in answer.body.decode()
            found = await rollout(proxy.url, f"p{number}")
            (turn,) = found["turns"]
            assert (turn["outputs"][0]["ids"], turn["outcome"]) == ([100 + 2 * number, 101 + 2 * number], "finished")
            assert not found["mask_sample"]


async def test_weight_versions_stamp_each_turn() -> None:
    """From what the trainer told the proxy."""
    engine = TokenEngine()
    async with fake_replica(engine) as replica, running_proxy(replica.url, **RECORDS) as proxy:
        for version in ("7", "8"):
            await post(proxy.url, "/weight_sync/begin")
            await post(proxy.url, "/weight_sync/end", {"weight_version": version})
            await chat(proxy.url, "a", [said("w1")])
        found = await rollout(proxy.url, "a")
        assert [turn["weights_before"] for turn in found["turns"]] == ["7", "8"]
        assert [turn["changes_after"] for turn in found["turns"]] == [1, 2]
        assert (found["weights_first"], found["weights_last"], found["lag_count"]) == ("7", "8", 1)


async def test_group_is_exported_in_order_of_ending() -> None:
    """As lines; the next page begins after the last number."""
    async with fake_replica(TokenEngine()) as replica, running_proxy(replica.url, **RECORDS) as proxy:
        for program_id, group in (("a", "g"), ("b", "g"), ("c", "h")):
            await chat(proxy.url, program_id, [said("w1")], ("X-Program-Group", group))
        for program_id in ("b", "c", "a"):
            await post(proxy.url, "/programs/release", {"program_id": program_id, "outcome": "success"})
        page = await get(proxy.url, "/rollouts?group=g&limit=1")
        assert [json.loads(line)["program_id"] for line in page.body.splitlines()] == ["b"]
        page = await get(proxy.url, f"/rollouts?group=g&after={page.header('X-Next')}")
        (line,) = page.body.splitlines()
        assert (json.loads(line)["program_id"], json.loads(line)["outcome"]) == ("a", "success")
        assert json.loads(line)["samples"][0]["mask"] == [0, 0, 0, 1, 1]
        ended = await rollout(proxy.url, "a", "?view=summary&wait_s=5")
        assert ended["ended"]
        assert "turns" not in ended
        assert (await exchange(proxy.url, "DELETE", "/programs/a/trajectory", ())).status == 200
        gone = await get(proxy.url, "/programs/a/trajectory")
        assert (gone.status, gone.error["code"]) == (410, "rollout_dropped")
        assert (await get(proxy.url, "/programs/nobody/trajectory")).error["code"] == "no_rollout"
        for query in ("?view=all", "?generation=x"):
            assert (await get(proxy.url, f"/programs/b/trajectory{query}")).status == 400


async def test_end_of_a_program_is_waited_for() -> None:
    """A reader need not ask again and again."""
    async with fake_replica(TokenEngine()) as replica, running_proxy(replica.url, **RECORDS) as proxy:
        await chat(proxy.url, "a", [said("w1")])
        waiting = asyncio.create_task(rollout(proxy.url, "a", "?wait_s=30"))
        await asyncio.sleep(0)
        await post(proxy.url, "/programs/release", {"program_id": "a"})
        assert (await waiting)["ended"]


async def test_data_key_reads_only_its_own_programs() -> None:
    """For any other it is as if there were none; an admin key reads all."""
    (mine, my_line), (other, other_line), (admin, admin_line) = mint_key("me"), mint_key("you"), mint_key("ops")
    keys = {"api_keys": (my_line, other_line), "admin_keys": (admin_line,)}
    async with fake_replica(TokenEngine()) as replica, running_proxy(replica.url, **keys, **RECORDS) as proxy:
        await chat(proxy.url, "a", [said("w1")], ("X-ThunderAgent-Key", mine))
        for ended in (False, True):
            for key, status, count in ((mine, 200, 1), (other, 404, 0), (admin, 200, 1)):
                header = ("X-ThunderAgent-Key", key)
                answer = await exchange(proxy.url, "GET", "/programs/a/trajectory", (header,))
                assert answer.status == status
                listed = await exchange(proxy.url, "GET", "/rollouts", (header,))
                assert len(listed.body.splitlines()) == (count if ended else 0)
            header = ("X-ThunderAgent-Key", other)
            assert (await exchange(proxy.url, "DELETE", "/programs/a/trajectory", (header,))).status == 404
            await post(proxy.url, "/programs/release", {"program_id": "a"}, ("X-ThunderAgent-Key", mine))
        assert (await get(proxy.url, "/rollouts")).status == 401


async def test_rollouts_survive_a_restart_on_disk(tmp_path: Path) -> None:
    """Those of programs that had ended."""
    folder = tmp_path / "rollouts"
    async with fake_replica(TokenEngine()) as replica:
        async with running_proxy(replica.url, rollout_dir=folder, **RECORDS) as proxy:
            await chat(proxy.url, "a", [said("w1")])
            await post(proxy.url, "/programs/release", {"program_id": "a"})
            await until(lambda: any(path.stat().st_size > 200 for path in folder.iterdir()))
            before = await rollout(proxy.url, "a")
        async with running_proxy(replica.url, rollout_dir=folder, **RECORDS) as proxy:
            assert await rollout(proxy.url, "a") == before
            assert before["turns"][0]["outputs"][0]["ids"] == [100, 101]


def children_of(pid: int) -> list[int]:
    """Return the processes that a process has started."""
    return [int(each) for path in Path(f"/proc/{pid}/task").glob("*/children") for each in path.read_text().split()]


def runs(pid: int) -> bool:
    """Return whether a process is there, and not only its end to be taken note of."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


async def test_process_that_settles_may_be_killed_and_ends_with_the_proxy(tmp_path: Path) -> None:
    """No turn is lost that the proxy has, and nothing is left behind when that is killed."""
    async with fake_replica(TokenEngine()) as replica:
        options = ("--port", "0", "--backends", replica.url, "--backend-type", "vllm", "--rollouts", "logprobs")
        async with thunderagent("serve", *options, log_path=tmp_path / "log") as proxy:
            pid, pids, messages = proxy.process.pid, set[int](), [said("w1")]
            for _ in range(3):
                await until(lambda: len(children_of(pid)) == (1 if pids else 0))
                answer = await chat(proxy.url, "a", messages)
                messages += [said(answer.json()["choices"][0]["message"]["content"], "assistant"), said("w3")]
                await until(lambda: [each for each in children_of(pid) if each not in pids and runs(each)])
                (child,) = children_of(pid)
                pids.add(child)
                os.kill(child, signal.SIGKILL)
            await until(lambda: [each for each in children_of(pid) if each not in pids and runs(each)])
            found = await rollout(proxy.url, "a")
            assert [turn["link"] for turn in found["turns"]] == ["root", "extends", "extends"]
            assert [turn["outputs"][0]["ids"] for turn in found["turns"]] == [[100, 101], [102, 103], [104, 105]]
            assert found["complete"]
            (child,) = children_of(pid)
            proxy.process.kill()
            await until(lambda: not runs(child))
        assert (tmp_path / "log").read_text().count("rollout_settling_ended") == 3


async def test_program_that_is_released_with_a_turn_under_way_keeps_it() -> None:
    """Its rollout ends with that turn, whole."""
    engine, gate = TokenEngine(), asyncio.Event()

    async def waits(call: Call) -> None:
        await gate.wait()
        await engine(call)

    async with fake_replica(waits) as replica, running_proxy(replica.url, **RECORDS) as proxy:
        turn = asyncio.create_task(chat(proxy.url, "a", [said("w1")]))
        await replica.call()
        await post(proxy.url, "/programs/release", {"program_id": "a", "outcome": "success"})
        assert not (await rollout(proxy.url, "a"))["ended"]
        gate.set()
        assert (await turn).status == 200
        found = await rollout(proxy.url, "a", "?wait_s=30")
        assert (found["ended"], found["outcome"], found["complete"]) == (True, "success", True)
        assert found["turns"][0]["outputs"][0]["ids"] == [100, 101]
        assert (await rollout(proxy.url, "a", "?view=samples"))["samples"]


async def test_api_without_tokens_is_said_once(capfd: pytest.CaptureFixture[str]) -> None:
    """In the log, so that nobody finds hours of empty rollouts."""
    answer = answers({"type": "message", "content": [], "usage": {"input_tokens": 1, "output_tokens": 1}})
    async with fake_replica(answer) as replica, running_proxy(replica.url, **RECORDS) as proxy:
        for _ in range(3):
            await post(proxy.url, "/v1/messages", {"messages": [said("w1")]}, ("X-Program-ID", "a"))
        found = await rollout(proxy.url, "a")
        assert [turn["missing"] for turn in found["turns"]] == ["not_askable"] * 3
        assert (found["complete"], found["mask_sample"]) == (False, True)
        assert await metric(proxy.url, "rollout_incomplete_turns_total") == 3
    said_lines = [line for line in "".join(capfd.readouterr()).splitlines() if "rollout_incomplete" in line]
    assert len(said_lines) == 1
    assert "/v1/messages" in said_lines[0]


async def test_client_that_leaves_a_stream_leaves_a_record() -> None:
    """With the tokens that came, and no loss on them."""
    first = event({"choices": [{"index": 0, "delta": {"content": ""}, "logprobs": None}], "prompt_token_ids": [1, 2]})
    part = {"logprobs": {"content": [{"logprob": -1.0}]}, "token_ids": [5], "finish_reason": None}
    second = event({"choices": [{"index": 0, "delta": {"content": " w5"}, **part}]})

    async def stalls(call: Call) -> None:
        call.write(stream_head(), chunk(first), chunk(second))
        await call.left.wait()

    async with fake_replica(stalls) as replica, running_proxy(replica.url, **RECORDS) as proxy:
        async with Wire.open(proxy.url) as wire:
            body = json.dumps({"messages": [said("w1")], "stream": True}).encode()
            wire.send("POST", CHAT, [("X-Program-ID", "a"), ("Content-Type", "application/json")], body)
            await wire.head()
            while b"w5" not in await wire.chunk():
                pass
        await proxy.nothing_left()
        found = await rollout(proxy.url, "a")
        (turn,) = found["turns"]
        assert (turn["outcome"], turn["verdict"], turn["kept"]) == ("abandoned", "client_left", False)
        assert (turn["outputs"][0]["ids"], turn["outputs"][0]["finish"]) == ([5], "")
        assert (await rollout(proxy.url, "a", "?view=samples"))["samples"] == []


@pytest.mark.parametrize("goes_on", [False, True])
async def test_engine_that_dies_in_mid_stream_loses_no_turn(goes_on: bool) -> None:
    """What it had begun is recorded and bears no loss; a program that ends so is marked, one that goes on is not."""
    part = {"logprobs": {"content": [{"logprob": -1.0}]}, "token_ids": [5], "finish_reason": None}
    begun = event(
        {"choices": [{"index": 0, "delta": {"content": " w5"}, **part}], "prompt_token_ids": [USER, 1, ASSISTANT]}
    )
    engine = TokenEngine()
    has_died = False

    async def dies_once(call: Call) -> None:
        nonlocal has_died
        if has_died:
            await engine(call)
            return
        has_died = True
        call.write(stream_head(), chunk(begun))
        call.close()

    async with fake_replica(dies_once) as replica, running_proxy(replica.url, **RECORDS) as proxy:
        broken = await chat(proxy.url, "a", [said("w1")], stream=True)
        assert "error" in broken.body.decode()
        if goes_on:
            await chat(proxy.url, "a", [said("w1")], stream=True)
        await post(proxy.url, "/programs/release", {"program_id": "a"})
        found = await rollout(proxy.url, "a", "?wait_s=30")
        assert (found["granted_count"], found["turns_count"]) == (1 + goes_on, 1 + goes_on)
        first = found["turns"][0]
        assert (first["verdict"], first["kept"], first["outputs"][0]["ids"]) == ("infrastructure_failed", False, [5])
        samples = (await rollout(proxy.url, "a", "?view=samples"))["samples"]
        assert found["mask_sample"] is not goes_on
        assert [sample["ids"][-2:] for sample in samples] == ([[100, 101]] if goes_on else [])


async def test_client_reads_rollouts_in_the_shapes_of_trainers() -> None:
    """The SDK returns what each takes: the same tokens, masks and log probabilities."""
    async with fake_replica(TokenEngine()) as replica, running_proxy(replica.url, **RECORDS) as proxy:
        for program_id in ("a", "b"):
            await chat(proxy.url, program_id, [said("w1")], ("X-Program-Group", "g"))
        answered = [said("w1"), said("w100 w101", "assistant"), said("w2")]
        await chat(proxy.url, "a", answered, ("X-Program-Group", "g"))
        await post(proxy.url, "/programs/release", {"program_ids": ["a", "b"]})
        found = await asyncio.to_thread(lambda: list(rollouts.ended(proxy=proxy.url, group="g")))
        assert sorted(each["program_id"] for each in found) == ["a", "b"]
        one = await asyncio.to_thread(rollouts.rollout, "a", proxy=proxy.url)
        (row,) = rollouts.for_verl(one)
        assert row["prompt_ids"] == [USER, 1, ASSISTANT]
        assert row["response_ids"] == [100, 101, USER, 2, ASSISTANT, 104, 105]
        assert row["response_mask"] == [1, 1, 0, 0, 0, 1, 1]
        assert row["response_logprobs"] == [-25, -25.25, 0, 0, 0, -26, -26.25]
        batch = rollouts.for_skyrl([one])
        assert batch["response_ids"] == [row["response_ids"]]
        assert (batch["loss_masks"], batch["is_last_step"]) == ([row["response_mask"]], [True])
        assert rollouts.for_trl([one])["env_mask"] == [row["response_mask"]]
        assert rollouts.for_slime(one)[0]["tokens"] == row["prompt_ids"] + row["response_ids"]
        turns = await asyncio.to_thread(lambda: rollouts.rollout("a", proxy=proxy.url, view="turns"))
        first, second = rollouts.for_verifiers(turns)
        assert first["completion_ids"] == [100, 101]
        assert second["prompt_ids"] == [*row["prompt_ids"], 100, 101, USER, 2, ASSISTANT]
        with pytest.raises(ProxyRefusedError) as caught:
            await asyncio.to_thread(lambda: rollouts.rollout("c", proxy=proxy.url))
        assert caught.value.code == "no_rollout"
