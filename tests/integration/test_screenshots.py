"""An agent that sends screenshots claims their real size at its engine, and no program is paused for it."""

from __future__ import annotations

import asyncio
import json
from base64 import b64encode
from io import BytesIO
from random import Random
from typing import TYPE_CHECKING, Any

import aiohttp
import pytest

from tests.integration.support import CHAT, DEADLINE_S, engine, serve
from thunderagent.programs.messages import Pause, TurnAsk, TurnEnd
from thunderagent.runtime.event_log import replay

if TYPE_CHECKING:
    from pathlib import Path

    from thunderagent.programs.scheduler import Scheduler

TURNS_COUNT = 20
SCREENSHOT_CHARS = 2_000_000
POOL_TOKENS = 120_000
"""More than all five agents need together, and less than one screenshot would count as text."""


def screenshot(number: int) -> bytes:
    """Return a message with a picture of 1920 x 1080 in a data URL of about 2 MB: its head is a PNG's."""
    head = b"\x89PNG\r\n\x1a\n\x00\x00\x00\rIHDR" + (1920).to_bytes(4, "big") + (1080).to_bytes(4, "big")
    data = b64encode(head + Random(number).randbytes(SCREENSHOT_CHARS * 3 // 4 - len(head)))
    image = b'{"type":"image_url","image_url":{"url":"data:image/png;base64,%s"}}' % data
    return b'{"role":"user","content":[{"type":"text","text":"what do you see now"},%s]}' % image


def words(number: int) -> bytes:
    """Return a message of 200 words."""
    text = " ".join(f"w{Random(number * 1000 + place).randrange(30_000)}" for place in range(200))
    return json.dumps({"role": "tool", "content": text}).encode()


async def agent(session: aiohttp.ClientSession, program_id: str, messages: list[bytes]) -> list[dict[str, Any]]:
    """Take a turn for each message, with the whole history; return the usage of each."""
    usages, said = [], []
    for message in messages:
        said.append(message)
        body = b'{"max_tokens":20,"messages":[%s]}' % b",".join(said)
        headers = {"X-Program-ID": program_id, "Content-Type": "application/json"}
        async with session.post(CHAT, data=BytesIO(body), headers=headers) as response:
            assert response.status == 200, await response.text()
            answer = await response.json()
        usages.append(answer["usage"])
        said.append(json.dumps({"role": "assistant", "content": answer["choices"][0]["message"]["content"]}).encode())
    return usages


@pytest.mark.timeout(180)
async def test_a_screenshot_is_claimed_as_what_it_is_and_nobody_is_paused_for_it(tmp_path: Path) -> None:
    """Twenty turns resend all older ones, 2 MB each, beside four text agents, through a real proxy."""
    log = tmp_path / "events"
    timeout = aiohttp.ClientTimeout(total=4 * DEADLINE_S)
    async with (
        engine(kv_tokens=POOL_TOKENS) as replica,
        serve("--backends", replica.url, "--event-log", str(log)) as proxy,
    ):
        await proxy.ready()
        async with aiohttp.ClientSession(proxy.url, timeout=timeout) as session:
            seeing, *_ = await asyncio.gather(
                agent(session, "seeing", [screenshot(number) for number in range(TURNS_COUNT)]),
                *(
                    agent(session, f"text-{name}", [words(100 * name + number) for number in range(TURNS_COUNT)])
                    for name in range(4)
                ),
            )
        proxy.process.terminate()  # this flushes its log
        assert await proxy.exit_status() == 0
    assert seeing[-1]["prompt_tokens"] > TURNS_COUNT * 1600

    claims: list[tuple[int, int]] = []
    estimates: dict[int, int] = {}
    pauses: list[object] = []
    lines = log.read_bytes().splitlines(keepends=True)
    records = iter(json.loads(line) for line in lines[1:])

    def look(scheduler: Scheduler) -> None:
        """Compare the claim of a turn with screenshots while it ran with its final usage."""
        name, event, decisions = next(records)
        pauses.extend(decision for decision in decisions if decision[0] == Pause.__name__)
        program = scheduler.programs.get("seeing")
        if name == TurnAsk.__name__ and event["program_id"] == "seeing":
            assert program is not None
            estimates[event["turn_id"]] = program.claim_tokens - program.reserve_tokens
        elif name == TurnEnd.__name__ and event["turn_id"] in estimates:
            assert program is not None
            claims.append((estimates[event["turn_id"]], event["prompt_tokens"]))
            assert program.context_tokens == event["prompt_tokens"] + event["output_tokens"]

    report = replay(iter(lines), after_event=look)
    assert report.difference is None
    assert len(claims) == TURNS_COUNT
    assert not pauses
    for claimed_tokens, used_tokens in claims[1:]:
        assert abs(claimed_tokens - used_tokens) <= 0.1 * used_tokens
    assert claims[0][0] <= 5 * claims[0][1]  # at first the claim is a guess
