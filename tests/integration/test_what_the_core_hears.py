"""The scheduler's knowledge of a turn through the real proxy: shared prompts, groups, and tools."""

from __future__ import annotations

import asyncio
import json
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

import pytest

from tests.integration.support import (
    CHAT,
    DONE,
    Answer,
    answers,
    ask,
    event,
    exposition,
    fake_replica,
    post,
    running_proxy,
    streams,
    turn,
    until,
    word,
)
from thunderagent.programs.messages import ReplicaPolled, TurnAsk, TurnEnd
from thunderagent.runtime.event_log import read_events

if TYPE_CHECKING:
    from pathlib import Path

    from thunderagent.programs.messages import Event

SYSTEM = {"role": "system", "content": "Mend code. " * 50}
TASK = {"role": "user", "content": "Mend this."}
CALL = {"name": "bash", "arguments": '{"command": "cd /x && pytest"}'}


def events_in(path: Path) -> list[Event]:
    with path.open("rb") as lines:
        return list(read_events(lines))


def arrivals_in(path: Path) -> list[TurnAsk]:
    return [event for event in events_in(path) if isinstance(event, TurnAsk)]


def tools_in(path: Path) -> list[str]:
    return [event.tool for event in events_in(path) if (isinstance(event, TurnEnd) and event.outcome == "finished")]


async def test_the_samples_of_a_group_share_their_prompt(engine_url: str, tmp_path: Path) -> None:
    """They have one system prompt and task, then different answers; the log has the data for a replay."""
    log = tmp_path / "events"
    async with running_proxy(engine_url, event_log=log) as proxy:
        for program_id in ("a", "b"):
            own = {"role": "assistant", "content": f"I am {program_id}."}
            body = turn(program_id, max_tokens=5, messages=[SYSTEM, TASK, own])
            answer = await post(proxy.url, CHAT, body, ("X-Program-Group", "task 7"))
            assert answer.status == 200
        await ask(proxy.url, "c")
        await ask(proxy.url)
    a, b, c, anonymous = arrivals_in(log)
    assert a.group_id == b.group_id == "task 7"
    assert len(a.prefix) == len(b.prefix) == 3
    assert a.prefix[:2] == b.prefix[:2]
    assert a.prefix[2] != b.prefix[2]
    assert a.prefix[2][1] < a.prompt_bytes
    assert c.group_id == ""
    assert not {digest for digest, _ in c.prefix} & {digest for digest, _ in a.prefix}
    assert anonymous.prefix == ()
    assert tools_in(log) == [""] * 4


async def test_a_group_is_a_text_like_other_ids(engine_url: str) -> None:
    """Otherwise the turn is refused, as for a program or a branch."""
    async with running_proxy(engine_url) as proxy:
        answer = await post(proxy.url, CHAT, turn("a"), ("X-Program-Group", "g" * 257))
        assert (answer.status, answer.error["code"]) == (400, "invalid_program_id")


async def answer_of(replica_answer: Any, log: Path, **fields: Any) -> Answer:
    """Make one turn with a replica that gives this answer."""
    async with fake_replica(replica_answer) as replica, running_proxy(replica.url, event_log=log) as proxy:
        return await ask(proxy.url, "a", **fields)


async def test_a_turn_that_follows_on_its_heels_is_begun_after_the_one_before_has_ended(
    engine_url: str, tmp_path: Path
) -> None:
    """A client gets its whole answer before the end is booked: its next turn, sent then or earlier, waits for that."""
    log = tmp_path / "events"
    body = json.dumps(turn("a", max_tokens=5)).encode()
    head = f"POST {CHAT} HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\nContent-Length: {len(body)}\r\n"
    async with running_proxy(engine_url, event_log=log) as proxy:
        where = urlsplit(proxy.url)
        reader, writer = await asyncio.open_connection(where.hostname, where.port)
        writer.write(f"{head}\r\n".encode() + body + f"{head}\r\n".encode() + body)
        await reader.readuntil(b"HTTP/1.1 200")
        writer.write(f"{head}Connection: close\r\n\r\n".encode() + body)
        assert (await reader.read()).count(b"HTTP/1.1 200") == 2
        writer.close()
    heard = [type(event) for event in events_in(log) if isinstance(event, TurnAsk | TurnEnd)]
    assert heard == [TurnAsk, TurnEnd] * 3


async def test_core_hears_the_tool_that_a_whole_answer_calls(tmp_path: Path) -> None:
    """The tool call is read, and the answer is the engine's, byte for byte."""
    body = json.dumps({"choices": [{"index": 0, "message": {"tool_calls": [{"function": CALL}]}}]}).encode()
    answer = await answer_of(answers(body), tmp_path / "events")
    assert answer.body == body
    assert tools_in(tmp_path / "events") == ["bash:pytest"]


@pytest.mark.parametrize("stream_options", [None, {"include_usage": True}])
async def test_core_hears_the_tool_that_a_stream_calls(tmp_path: Path, stream_options: object) -> None:
    """The call comes in pieces, with or without usage that the client asked for."""
    head, tail = CALL["arguments"][:9], CALL["arguments"][9:]
    pieces = [
        word("I see."),
        *(
            event({"choices": [{"index": 0, "delta": {"tool_calls": [{"index": 0, "function": function}]}}]})
            for function in ({"name": "bash", "arguments": head}, {"arguments": tail})
        ),
        DONE,
    ]
    fields = {} if stream_options is None else {"stream_options": stream_options}
    answer = await answer_of(streams(*pieces), tmp_path / "events", stream=True, **fields)
    assert answer.body == b"".join(pieces)
    assert tools_in(tmp_path / "events") == ["bash:pytest"]


async def test_core_hears_engine_counters_since_the_last_poll(tmp_path: Path) -> None:
    """The metrics of a poll give prompt tokens looked up, and preemptions."""
    log = tmp_path / "events"

    def metrics(queries: int, hits: int, preemptions: int) -> str:
        counts = {"prefix_cache_queries": queries, "prefix_cache_hits": hits, "num_preemptions": preemptions}
        return exposition(1_000_000) + "".join(f"vllm:{name}_total {count}.0\n" for name, count in counts.items())

    async with fake_replica() as replica:
        replica.metrics = metrics(1000, 500, 1)
        async with running_proxy(replica.url, event_log=log) as proxy:
            replica.metrics = metrics(3000, 2000, 4)
            account = proxy.runtime.scheduler.ledger.accounts[replica.replica_id]
            await until(lambda: account.hit_ratio == 0.75)
    polls = [event for event in events_in(log) if isinstance(event, ReplicaPolled)]
    said = [(poll.hit_ratio, poll.query_tokens, poll.preemption_count) for poll in polls]
    assert said == [(None, None, None), (0.75, 2000, 3)]
