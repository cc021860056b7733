"""Nova behind the proxy: known by its metrics, told of programs, and not given more than it can encode."""

from __future__ import annotations

import asyncio

import pytest

from tests.integration.support import CHAT, ask, get, post, running_proxy, until
from tests.unit.nova.fake_nova import PNG, FakeEngine, running_nova, until_idle

SCREENSHOT = [{"type": "image_url", "image_url": {"url": PNG}}, {"type": "text", "text": "look"}]


def screenshot_turn(program_id: str, **fields: object) -> dict[str, object]:
    return {"messages": [{"role": "user", "content": SCREENSHOT}], "program_id": program_id, **fields}


async def test_a_program_is_served_and_its_slot_given_back() -> None:
    """Its kind needs no configuration; with tags on, its slot is kept until the program's release."""
    engine = FakeEngine()
    async with running_nova(engine) as url, running_proxy(url, engine_tags=True) as proxy:
        for _ in range(3):
            answer = await post(proxy.url, CHAT, screenshot_turn("eyes"))
            assert answer.json()["choices"][0]["message"]["content"] == "LOOK"
        (replica,) = (await get(proxy.url, "/replicas")).json()["replicas"]
        assert (replica["kind"], replica["capacity_tokens"]) == ("nova", 400)
        assert engine.kept == {"eyes"}
        await post(proxy.url, "/programs/release", {"program_id": "eyes"})
        await until(lambda: not engine.kept)


async def test_a_program_goes_where_fewer_images_wait() -> None:
    """If one engine has images to encode for others, the next programs go to the other engine."""
    busy, free = FakeEngine(slots=8, encode_s=0.6), FakeEngine(slots=8)
    async with (
        running_nova(busy) as busy_url,
        running_nova(free) as free_url,
        running_proxy(busy_url, free_url) as proxy,
    ):
        others = [asyncio.create_task(post(busy_url, CHAT, screenshot_turn("x"))) for _ in range(20)]
        accounts = proxy.runtime.scheduler.ledger.accounts
        busy_account = accounts[busy_url.removeprefix("http://")]
        await until(lambda: (busy_account.pending_encode_count or 0) >= 3)
        for number in range(3):
            await post(proxy.url, CHAT, screenshot_turn(f"p{number}"))
        assert len(free.requests) == 3
        busy.seconds["encode"] = 0.0
        await asyncio.gather(*others)
        await until(lambda: busy_account.pending_encode_count == 0)


@pytest.mark.parametrize("stage", ["encode_s", "prefill_s", "decode_s"])
async def test_a_client_of_the_proxy_that_leaves_gives_everything_back(stage: str) -> None:
    """Many leave in each stage; everything is back long before all would be served."""
    engine = FakeEngine(**{stage: 0.3})
    async with running_nova(engine) as url, running_proxy(url) as proxy:
        tasks = [asyncio.create_task(post(proxy.url, CHAT, screenshot_turn(f"p{i}", stream=True))) for i in range(20)]
        counts = {"encode_s": "pending_encode", "prefill_s": "pending_prefill", "decode_s": "decoding"}
        await until(lambda: getattr(engine.stats(), counts[stage]))
        for task in tasks:
            task.cancel()
        await until_idle(engine)
        assert (await ask(proxy.url, "after", model="tiny")).status == 200
