"""The engine gives the tokens of `generate()` whatever else it serves, and forgets clients that left."""

from __future__ import annotations

import asyncio
import threading
import time

import pytest

torch = pytest.importorskip("torch", reason="what thunderagent-nova needs is not installed")
pytest.importorskip("transformers", reason="what thunderagent-nova needs is not installed")

from tests.unit.nova import tiny  # noqa: E402
from thunderagent_nova.engine import Engine, EngineConfig, EngineError  # noqa: E402
from thunderagent_nova.messages import Prompt, Request, Stats  # noqa: E402
from thunderagent_nova.models import Vlm  # noqa: E402
from thunderagent_nova.partition import CorePool, NullPool  # noqa: E402
from thunderagent_nova.policy import Static  # noqa: E402
from thunderagent_nova.scheduler import POLICIES, Scheduler  # noqa: E402

SMALL = EngineConfig(slots=4, slot_tokens=128, batch_buckets=(1, 2), encode_group_layers=2)


def engine_of(vlm: Vlm, config: EngineConfig = SMALL, policy: str = "nova", pool=None, **more) -> Engine:
    pool = pool or CorePool()
    splits = Static(pool.splits[0], pool.splits[0]) if pool.splits else None
    return Engine(vlm, pool, Scheduler(policy, slots=config.slots, split_policy=splits), config, **more)


async def ask(
    engine: Engine, prompt: Prompt, name: str, *, tokens: int = 10, after_s: float = 0.0, **more
) -> list[int]:
    await asyncio.sleep(after_s)
    return [token.token_id async for token in engine.submit(Request(name, prompt, tokens, **more))]


def idle(stats: Stats) -> bool:
    return stats.running == stats.waiting == stats.pending_encode == stats.slots_used == 0


@pytest.mark.parametrize("family", tiny.FAMILIES)
async def test_tokens_equal_generate_one_by_one_and_with_late_joiners(family: str):
    """Eight turns arrive while others are encoded, prefilled and decoded, over four slots."""
    model = tiny.model(family)
    prompts = [tiny.prompt(family, seed, images=seed % 3) for seed in range(8)]
    expected = [tiny.generate(model, prompt, 10) for prompt in prompts]
    assert len({tuple(tokens) for tokens in expected}) > 4, "answers all alike would prove little"
    engine = engine_of(Vlm(model))
    await engine.start()
    try:
        assert await ask(engine, prompts[1], "alone") == expected[1]
        together = [ask(engine, prompt, str(i), after_s=0.02 * i) for i, prompt in enumerate(prompts)]
        assert await asyncio.gather(*together) == expected
        assert idle(engine.stats())
    finally:
        await engine.stop()


@pytest.mark.parametrize("policy", POLICIES)
async def test_every_policy_gives_the_same_tokens(policy: str):
    model = tiny.model("qwen2_5_vl")
    prompts = [tiny.prompt("qwen2_5_vl", seed) for seed in range(5)]
    expected = [tiny.generate(model, prompt, 6) for prompt in prompts]
    engine = engine_of(Vlm(model), policy=policy, pool=NullPool())
    await engine.start()
    try:
        asked = [ask(engine, prompt, str(i), tokens=6) for i, prompt in enumerate(prompts)]
        assert await asyncio.gather(*asked) == expected
    finally:
        await engine.stop()


@pytest.mark.parametrize("stage", ["waiting", "encode", "prefill", "decode"])
async def test_a_client_that_leaves_in_any_stage_leaves_nothing_behind(stage: str):
    """Slots, queues and memory are back at zero; the others get their tokens."""
    model = tiny.model("qwen2_5_vl")
    prompt, other = tiny.prompt("qwen2_5_vl", 1), tiny.prompt("qwen2_5_vl", 2)
    expected = tiny.generate(model, other, 10)
    seen = asyncio.Event()
    config = EngineConfig(slots=1 if stage == "waiting" else 4, slot_tokens=128, batch_buckets=(1,))
    engine = engine_of(Vlm(model), config, on_pass=lambda done: seen.set() if done.stage == before else None)
    before = {"encode": "", "prefill": "encode", "decode": "prefill", "waiting": ""}[stage]
    await engine.start()
    try:
        stays = asyncio.create_task(ask(engine, other, "stays"))
        if stage == "waiting":
            await asyncio.sleep(0.05)
        leaves = asyncio.create_task(ask(engine, prompt, "leaves", tokens=80))
        if before:
            await asyncio.wait_for(seen.wait(), 10)
        else:
            await asyncio.sleep(0.005)
        leaves.cancel()
        with pytest.raises(asyncio.CancelledError):
            await leaves
        assert await stays == expected
        deadline = time.monotonic() + 10.0
        while not idle(engine.stats()):
            assert time.monotonic() < deadline, engine.stats()
            await asyncio.sleep(0.005)
        assert not engine._clients
        assert engine.stats().stage_passes["decode"] < 60, "it decodes for nobody"
    finally:
        await engine.stop()


async def test_a_program_goes_on_from_its_slot_and_gives_it_back():
    """A program's second turn prefills only what is new, with the same tokens; a release frees the slot."""
    model = tiny.model("qwen2_5_vl")
    first = tiny.prompt("qwen2_5_vl", 1)
    passes: list[tuple[str, int]] = []
    config = EngineConfig(slots=2, keep_slots=1, slot_tokens=128, batch_buckets=(1,))
    note = lambda done: passes.append((done.stage, done.job.end))  # noqa: E731
    engine = engine_of(Vlm(model), config, on_pass=note)
    await engine.start()
    try:
        answer = await ask(engine, first, "turn 1", program_id="agent")
        screenshot = tiny.image("qwen2_5_vl", 77)
        fresh = (5, tiny.START, *[tiny.IMAGE] * 6, tiny.END, 9)
        second = Prompt((*first.token_ids, *answer, *fresh), (*first.images, screenshot))
        assert engine.stats().slots_kept == 1
        passes.clear()
        assert await ask(engine, second, "turn 2", program_id="agent") == tiny.generate(model, second, 10)
        assert passes[:2] == [("encode", 0), ("prefill", len(fresh) + 1)]
        assert engine.stats().slots_kept == 1
        assert engine.release("agent")
        assert not engine.release("agent")
        assert engine.stats().slots_kept == 0
    finally:
        await engine.stop()


async def test_a_program_keeps_its_slot_when_its_client_ends_an_answer():
    """As the server does at a text to stop at: the next turn continues there."""
    model = tiny.model("qwen2_5_vl")
    first = tiny.prompt("qwen2_5_vl", 1)
    passes: list[tuple[str, int]] = []
    config = EngineConfig(slots=2, keep_slots=1, slot_tokens=128, batch_buckets=(1,))
    engine = engine_of(Vlm(model), config, on_pass=lambda done: passes.append((done.stage, done.job.end)))
    await engine.start()
    try:
        answer = []
        tokens = engine.submit(Request("turn 1", first, 80, program_id="agent"))
        async for token in tokens:
            answer.append(token.token_id)
            if len(answer) == 3:
                break
        await tokens.aclose()
        async with asyncio.timeout(10):
            while engine._clients:
                await asyncio.sleep(0.001)
        assert engine.stats().slots_kept == 1
        second = Prompt((*first.token_ids, *answer, 5, 9), first.images)
        passes.clear()
        assert await ask(engine, second, "turn 2", program_id="agent") == tiny.generate(model, second, 10)
        assert passes[0][0] == "prefill"
        assert passes[0][1] <= 3
    finally:
        await engine.stop()


async def test_a_turn_keeps_no_slot_for_a_program_that_is_released_meanwhile():
    model = tiny.model("qwen2_5_vl")
    config = EngineConfig(slots=2, keep_slots=1, slot_tokens=128, batch_buckets=(1,))
    engine = engine_of(Vlm(model), config)
    await engine.start()
    try:
        tokens = engine.submit(Request("turn 1", tiny.prompt("qwen2_5_vl", 1), 10, program_id="agent"))
        await anext(tokens)
        assert not engine.release("agent")
        assert len([token async for token in tokens]) == 9
        async with asyncio.timeout(10):
            while engine._clients:
                await asyncio.sleep(0.001)
        assert engine.stats().slots_kept == 0
    finally:
        await engine.stop()


async def test_nor_does_a_turn_whose_layout_is_still_being_computed():
    """The engine computes it in a thread before the turn is under way."""
    vlm = Vlm(tiny.model("qwen2_5_vl"))
    compute, is_begun, gate = vlm.layout, threading.Event(), threading.Event()

    def held(prompt: Prompt):
        is_begun.set()
        gate.wait(10)
        return compute(prompt)

    vlm.layout = held
    config = EngineConfig(slots=2, keep_slots=1, slot_tokens=128, batch_buckets=(1,))
    engine = engine_of(vlm, config)
    await engine.start()
    try:
        turn = asyncio.create_task(ask(engine, tiny.prompt("qwen2_5_vl", 1), "turn 1", program_id="agent"))
        await asyncio.to_thread(is_begun.wait, 10)
        assert not engine.release("agent")
        gate.set()
        assert len(await turn) == 10
        async with asyncio.timeout(10):
            while engine._clients:
                await asyncio.sleep(0.001)
        assert engine.stats().slots_kept == 0
        assert not engine._coming
    finally:
        await engine.stop()


async def test_an_image_that_came_before_is_not_encoded_again():
    model = tiny.model("qwen3_vl")
    prompt = tiny.prompt("qwen3_vl", 1, images=2)
    config = EngineConfig(slots=2, slot_tokens=128, cached_images=2, batch_buckets=(1,))
    engine = engine_of(Vlm(model), config)
    await engine.start()
    try:
        both = [await ask(engine, prompt, name) for name in ("first", "second")]
        assert both == [tiny.generate(model, prompt, 10)] * 2
        assert engine.stats().stage_passes["encode"] == 1
        assert engine.stats().cached_images == 2
    finally:
        await engine.stop()


async def test_a_turn_that_fits_no_slot_is_refused_and_a_pass_that_fails_ends_its_turn_alone():
    model = tiny.model("qwen2_5_vl")
    engine = engine_of(Vlm(model))
    await engine.start()
    try:
        with pytest.raises(ValueError, match="exceed the 128 of a slot"):
            await ask(engine, tiny.prompt("qwen2_5_vl", 1), "long", tokens=128)
        good, bad = tiny.prompt("qwen2_5_vl", 1), tiny.prompt("qwen2_5_vl", 2)
        pixels = tiny.image("internvl", 1).pixels
        wrong = Prompt(bad.token_ids, (type(bad.images[0])(pixels, bad.images[0].grid),))
        outcomes = await asyncio.gather(ask(engine, good, "good"), ask(engine, wrong, "bad"), return_exceptions=True)
        assert outcomes[0] == tiny.generate(model, good, 10)
        assert isinstance(outcomes[1], EngineError)
        assert idle(engine.stats())
    finally:
        await engine.stop()


async def test_a_stopped_engine_fails_what_is_under_way():
    engine = engine_of(Vlm(tiny.model("qwen2_5_vl")))
    await engine.start()
    under_way = asyncio.create_task(ask(engine, tiny.prompt("qwen2_5_vl", 1), "late", tokens=80))
    await asyncio.sleep(0.02)
    await engine.stop()
    with pytest.raises(EngineError, match="stopped"):
        await under_way
