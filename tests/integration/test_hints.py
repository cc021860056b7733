"""A client's hints about its next turn, over sockets: with a turn, between turns, and through the SDK."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from tests.integration.support import CHAT, ask, fake_replica, get, metrics_of, post, running_proxy, turn
from thunderagent.client import Program


async def test_a_hint_with_a_turn_counts_from_its_end() -> None:
    """The program's report says when its next turn is expected, and how far that is believed."""
    async with fake_replica() as replica, running_proxy(replica.url) as proxy:
        await post(proxy.url, CHAT, turn("a"), ("X-Program-Hint", "next_turn_in_s=90, confidence=0.8"))
        hinted = (await get(proxy.url, "/programs/a")).json()["hinted"]
        assert 80 < hinted.pop("next_turn_in_s") <= 90
        assert hinted == {"counts": True, "keep": "", "believed_ratio": 0.8, "keeps_claim": False}
        await ask(proxy.url, "a")
        told = (await get(proxy.url, "/programs/a")).json()
        assert told["hinted"] is None
        story = [(entry["what"], entry["why"].partition(":")[0]) for entry in told["story"]]
        assert ("hinted", "next turn in 90.0 s, by 0.80") in story
        assert ("hint was", "early") in story
        metrics = await metrics_of(proxy.url)
        assert metrics["thunderagent_hints_total"]["unsaid",] == 1.0
        assert metrics["thunderagent_hints_measured_total"]["early",] == 1.0


@pytest.mark.parametrize(
    "field",
    [
        {"agent_hint": {"cache_control": {"type": "ephemeral", "ttl": 300}}},
        {"vllm_xargs": {"agentic_context": '{"keep": "retain"}'}},
        {"nvext": {"agent_hints": {"speculative_prefill": True}}},
    ],
)
async def test_a_hint_in_a_body_counts_as_one_in_the_header(field: dict[str, Any]) -> None:
    """The engine gets it unchanged; our own header takes precedence; in an anonymous turn it is ignored."""
    async with fake_replica() as replica, running_proxy(replica.url) as proxy:
        body = {**turn(), **field}
        assert (await post(proxy.url, CHAT, body)).status == 200
        for headers in ((), (("X-Program-Hint", "keep=offload"),)):
            await post(proxy.url, CHAT, body, ("X-Program-ID", "a"), *headers)
            hinted = (await get(proxy.url, "/programs/a")).json()["hinted"]
            assert hinted["keep"] == ("offload" if headers else "retain")
        assert all(call.json() == body for call in replica.calls)
        assert (await metrics_of(proxy.url))["thunderagent_hints_total"]["retain",] == 1.0


async def test_a_hint_between_turns_takes_the_place_of_the_one_before() -> None:
    """The SDK sends it and learns whether the program is known; a branch that ended claims nothing more."""
    async with fake_replica() as replica, running_proxy(replica.url) as proxy:
        a = Program(proxy.url, "team/a")
        assert not await a.async_hint(5.0)
        await ask(proxy.url, "team/a")
        await post(proxy.url, CHAT, turn("team/a"), ("X-Program-Branch", "sub"))
        assert await a.async_hint(5.0, confidence=0.9)
        assert await a.async_hint(keep="offload")
        hinted = (await get(proxy.url, "/programs/team/a")).json()["hinted"]
        assert (hinted["next_turn_in_s"], hinted["keep"]) == (None, "offload")
        assert len(proxy.runtime.scheduler.programs["team/a"].branches) == 2
        assert await asyncio.to_thread(a.branch("sub").hint, keep="drop")
        assert len(proxy.runtime.scheduler.programs["team/a"].branches) == 1
        await a.async_release()


@pytest.mark.parametrize("value", ["", "soon", "next_turn_in_s=x", "next_turn_in_s=nan", "keep=drop", "confidence=1"])
async def test_a_header_that_is_no_hint_is_refused(value: str) -> None:
    """It is refused as any other wrong header of ours; nothing reaches the engine."""
    async with fake_replica() as replica, running_proxy(replica.url) as proxy:
        refused = await post(proxy.url, CHAT, turn("a"), ("X-Program-Hint", value))
        assert refused.status == 400
        assert "X-Program-Hint is like next_turn_in_s=12.5" in refused.json()["error"]["message"]
        assert not replica.calls


@pytest.mark.parametrize(
    "body",
    [
        *({}, {"confidence": 0.5}, {"next_turn_in_s": -1}, {"next_turn_in_s": 1, "confidence": 2}, {"keep": "all"}),
        {"next_turn_in_s": 1e308},  # the sum of all errors would be infinite
    ],
)
async def test_a_body_that_is_no_hint_is_refused(body: dict[str, object]) -> None:
    """The refusal names the error."""
    async with fake_replica() as replica, running_proxy(replica.url) as proxy:
        assert (await post(proxy.url, "/programs/a/hints", body)).status == 400
