"""Checks on vLLM's real scheduler; run in vLLM's environment: `python in_vllm.py MODEL_FOLDER [CHECK...]`.

Each check is a function; the script prints a line of JSON for each, and ends with 1 if one failed.
"""

from __future__ import annotations

import json
import os
import random
import statistics
import sys
import time
import traceback
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))

from harness import STEP_LOADS, Engine, hash_of, step_costs, token_of

MODEL = sys.argv[1]
COST_ROUNDS = int(os.environ.get("COST_ROUNDS", "24"))


def words(seed: int, count: int) -> list[int]:
    rng = random.Random(seed)
    return [rng.randrange(50, 1950) for _ in range(count)]


def until_idle(engine: Engine, most_steps: int = 20_000) -> list[str]:
    ended = []
    for _ in range(most_steps):
        if not engine.scheduler.has_unfinished_requests():
            return ended
        ended += engine.step()
    raise AssertionError(f"not idle after {most_steps} steps")


def told(engine: Engine, *ops: Any) -> dict[str, Any]:
    return engine.scheduler.thunderagent_tell(list(ops))


def check_order() -> dict[str, Any]:
    """A short prompt does not wait behind long ones, and a pinned program goes before new ones."""
    firsts = {}
    for name, settings in (("stock", None), ("plugin", {})):
        engine = Engine(MODEL, settings, blocks=600, budget=512)
        for number in range(2):
            engine.add(f"long{number}", words(number, 6000), 8, f"long{number}")
        engine.step()
        engine.add("short", words(9, 100), 8, "short")
        while not engine.outputs.get("short"):
            engine.step()
        firsts[name] = engine.now_s
        until_idle(engine)
    assert firsts["plugin"] < firsts["stock"] / 2, firsts
    return firsts


def check_quanta() -> dict[str, Any]:
    """With the preset mars the chunks of a long prompt are its level's quantum, and it falls a level."""
    engine = Engine(MODEL, {"preset": "mars"}, blocks=600, budget=2048)
    chunks: list[int] = []
    engine.step_hook = lambda output: chunks.append(output.num_scheduled_tokens.get("long", 0))
    engine.add("talker", words(2, 40), 60, "talker")
    engine.step()
    engine.add("long", words(1, 6000), 4, "long")
    until_idle(engine)
    seen = [each for each in chunks if each > 1]
    assert seen[:4] == [1024, 512, 256, 256], seen  # level 1 first
    return {"chunks": seen[:6]}


def check_pins() -> dict[str, Any]:
    """A program whose tool runs keeps its blocks through a flood; stock loses them. The last turn lets them go."""
    found = {}
    for name, settings in (("stock", None), ("plugin", {})):
        engine = Engine(MODEL, settings, blocks=130)
        prompt = words(1, 970)
        engine.add("a-1", prompt, 4, "a", hold_s=60)
        until_idle(engine)
        for number in range(12):
            engine.add(f"flood{number}", words(100 + number, 900), 4, f"flood{number}")
        until_idle(engine)
        before = engine.hit_tokens
        engine.add("a-2", [*prompt, *engine.outputs["a-1"], *words(3, 50)], 4, "a", hold_s=0)
        until_idle(engine)
        found[name] = engine.hit_tokens - before
        if settings is not None:
            report = told(engine)
            assert "a" not in report["pins"], report
            assert report["turns_total"]["warm"] == 1, report
    assert found["stock"] == 0, found
    assert found["plugin"] >= 960, found
    return found


def check_expiry_and_reset() -> dict[str, Any]:
    """Pins end with their deadline; aborted requests leave none; a reset of the prefix cache works with pins held."""
    engine = Engine(MODEL, {}, blocks=200)
    empty = engine.free_blocks
    for number in range(3):
        engine.add(f"r{number}", words(number, 300), 4, f"p{number}", hold_s=20 * (number + 1))
    until_idle(engine)
    assert sorted(told(engine)["pins"]) == ["p0", "p1", "p2"]
    engine.now_s += 25
    assert sorted(told(engine)["pins"]) == ["p1", "p2"]
    assert told(engine, ["pause", "p1"])["done"] == 1
    held = empty - engine.free_blocks
    assert held == told(engine)["blocks"]["pinned"] == 9, held
    assert engine.scheduler.reset_prefix_cache()
    assert engine.free_blocks == empty
    assert told(engine)["blocks"]["pinned"] == 0
    engine.add("gone", words(7, 300), 50, "gone")
    engine.step()
    engine.abort("gone")
    engine.step()
    assert engine.free_blocks == empty
    engine.add("running", words(8, 300), 50, "x")
    engine.step()
    assert engine.scheduler.reset_prefix_cache(reset_running_requests=True)
    until_idle(engine)
    assert engine.outputs["running"] == [token_of("running", place) for place in range(50)]
    return {"pinned_blocks": held}


def check_stop_text() -> dict[str, Any]:
    """vLLM aborts a request that comes to a text to stop at: it is pinned, too; a client that left holds nothing."""
    engine = Engine(MODEL, {}, blocks=200)
    empty = engine.free_blocks
    for program, stop in (("stopped", ["Observation:"]), ("left", [])):
        engine.add(program, words(1, 300), 50, program).sampling_params.stop = stop
        while not engine.outputs.get(program):
            engine.step()
        engine.abort(program)
        engine.step()
    early = engine.add("early", words(2, 300), 50, "early")
    early.sampling_params.stop = ["Observation:"]
    engine.abort("early")  # nothing was made
    engine.step()
    assert list(told(engine)["pins"]) == ["stopped"]
    assert empty - engine.free_blocks == told(engine)["blocks"]["pinned"] == 9
    return {}


def check_shared_blocks() -> dict[str, Any]:
    """Blocks that programs share are counted once, as vLLM does, and the last of them gives them back."""
    engine = Engine(MODEL, {}, blocks=200)
    empty, system = engine.free_blocks, words(1, 640)
    for number in range(5):
        engine.add(f"r{number}", [*system, *words(10 + number, 64)], 4, f"p{number}", hold_s=60)
        until_idle(engine)
    assert empty - engine.free_blocks == told(engine)["blocks"]["pinned"] == 30, told(engine)
    told(engine, *(["release", f"p{number}"] for number in range(4)))
    assert empty - engine.free_blocks == told(engine)["blocks"]["pinned"] == 22, told(engine)
    told(engine, ["release", "p4"])
    assert (engine.free_blocks, told(engine)["blocks"]["pinned"]) == (empty, 0)
    return {}


def check_strangers_priority() -> dict[str, Any]:
    """A priority counts where vLLM's operator chose that policy, and nowhere else."""
    engine = Engine(MODEL, {}, blocks=200)
    request = engine.add("first", words(1, 300), 4, None, priority=-1000)
    scheduler = engine.scheduler
    assert scheduler._waiting_key(request, 0.0)[0] == scheduler._victim_key(request)[0] == 0
    scheduler._has_priorities = True
    assert scheduler._waiting_key(request, 0.0)[0] == scheduler._victim_key(request)[0] == -1000
    until_idle(engine)
    return {}


def check_loaded_blocks() -> dict[str, Any]:
    """A request whose blocks were loaded from elsewhere does not need them again, nor room for its program."""
    engine = Engine(MODEL, {}, blocks=200)
    scheduler, empty = engine.scheduler, engine.free_blocks
    engine.add("pinned", words(1, 300), 4, "pinned", hold_s=60)
    until_idle(engine)
    request = engine.add("loaded", words(2, 640), 4, "loaded")
    seen, free_count = scheduler._surface, engine.free_blocks
    assert seen.missing_block_count(request, {}) == 20 - free_count
    assert scheduler.kv_cache_manager.allocate_slots(request, 640) is not None
    assert seen.missing_block_count(request, {}) == 20 - 20 - (free_count - 20)
    scheduler._must_wait = lambda *_: True
    request.num_computed_tokens = 640
    assert scheduler._allocate_slots(request, 4) is not None
    request.num_computed_tokens = 0
    scheduler.kv_cache_manager.free(request)
    assert scheduler._allocate_slots(request, 640) is None
    del scheduler._must_wait
    seen.missing_block_count = lambda *_: 1000  # an estimate: windows and watermarks need less
    assert scheduler._pins_to_take(request, False, {}) == ["pinned"]  # nothing runs: whatever may help
    scheduler.running.append(request)
    assert scheduler._pins_to_take(request, False, {}) == []
    scheduler.running.clear()
    del seen.missing_block_count
    until_idle(engine)
    told(engine, ["release", "pinned"], ["release", "loaded"])
    assert engine.free_blocks == empty
    return {}


def check_cascade() -> dict[str, Any]:
    """Nothing is pinned where vLLM takes a block's references for requests."""
    from types import SimpleNamespace

    from thunderagent_vllm import surface

    version, found = surface.vllm_version, {}
    for numbers in ((0, 31, 1), (0, 32, 0)):
        surface.vllm_version = lambda numbers=numbers: numbers
        for is_off in (True, False):
            config = SimpleNamespace(model_config=SimpleNamespace(disable_cascade_attn=is_off))
            found[numbers, is_off] = surface._counts_references(SimpleNamespace(vllm_config=config))
    surface.vllm_version = version
    assert [each for each, counts in found.items() if counts] == [((0, 31, 1), False)]
    assert Engine(MODEL, {}).scheduler._surface.can_pin
    return {}


def check_shrinking() -> dict[str, Any]:
    """When blocks are short, a chunk shrinks before a pin goes, and a pin goes before a request is preempted."""
    engine = Engine(MODEL, {"preset": "mars", "first_level_tokens": 500}, blocks=100, budget=1024)
    engine.add("a", words(1, 640), 4, "a", hold_s=500)
    until_idle(engine)
    seen: list[tuple[int, int, int]] = []

    def look(_output: Any) -> None:
        report = told(engine)
        seen.append(
            (
                report["chunks_total"]["shrunk"],
                report["pins_total"].get("given_back", 0),
                sum(report["preemptions_total"].values()),
            )
        )

    engine.step_hook = look
    # Each fits when it comes, but not both: half of the budget each, their level's quantum.
    for name in ("one", "two"):
        engine.add(name, words(hash_of(name), 1900), 4, name)
    until_idle(engine)
    firsts = [next((number for number, each in enumerate(seen) if each[place]), 10**9) for place in range(3)]
    assert firsts[0] < firsts[1] < firsts[2], (firsts, seen)
    for each in ("one", "two"):
        assert engine.outputs[each] == [token_of(each, place) for place in range(4)]
    return {"first_steps": firsts, "shrunk": seen[-1][0], "preempted": seen[-1][2]}


def check_no_wedge() -> dict[str, Any]:
    """A prompt that needs nearly all of the pool runs although older programs hold it."""
    engine = Engine(MODEL, {}, blocks=100)
    for number in range(3):
        engine.add(f"r{number}", words(number, 800), 4, f"p{number}", hold_s=600)
        until_idle(engine)
    begun_s = engine.now_s
    engine.add("big", words(9, 2900), 8, "big")
    until_idle(engine)
    return {"waited_s": round(engine.now_s - begun_s, 2)}


def history(  # noqa: C901 - one history, in order
    seed: int, settings: dict[str, Any] | None, *, fault: str | None = None
) -> tuple[Engine, dict[str, int]]:
    """Run random requests: siblings, aborts, resets, hints, messages; return the engine and what each asked for."""
    rng = random.Random(seed)
    engine = Engine(
        MODEL,
        settings,
        blocks=rng.choice([70, 120, 250, 400]),
        budget=rng.choice([64, 256, 2048]),
        caching=rng.random() < 0.8,
        policy=rng.choice(["fcfs", "priority"]),
        seqs=rng.choice([3, 16, 64]),
        is_async=rng.random() < 0.5,
    )
    _check_allocations(engine)
    if fault is not None:
        _break(engine, fault, rng.randint(1, 40))
    empty = engine.free_blocks
    asked: dict[str, int] = {}
    aborted: set[str] = set()
    ended: set[str] = set()
    contexts: dict[str, list[int]] = {}
    for number in range(60):
        program = f"p{rng.randrange(8)}"
        context = contexts.setdefault(program, words(rng.randrange(1000), rng.randint(20, 500)))
        if len(context) > 1200:
            del context[200:]
        request_id = f"r{number}"
        asked[request_id] = rng.randint(1, 40)
        hold_s = rng.choice([None, None, 0, 3.0, 500.0])
        named = program if rng.random() < 0.8 else None
        engine.add(request_id, list(context), asked[request_id], named, rng.choice([0, 0, 1, -1]), hold_s)
        context += words(number, rng.randint(1, 300))
        for _ in range(rng.randrange(12)):
            ended.update(engine.step())
        if rng.random() < 0.1:
            live = [each for each in asked if each not in ended and each not in aborted]
            if live:
                aborted.add(rng.choice(live))
                for each in live:
                    if each in aborted:
                        engine.abort(each)
        if rng.random() < 0.05:
            engine.scheduler.reset_prefix_cache(reset_running_requests=rng.random() < 0.5 and not engine.is_async)
        if rng.random() < 0.2 and settings is not None:
            told(engine, [rng.choice(["release", "pause", "hold"]), program, rng.choice([0, 5, 500])])
        engine.now_s += rng.choice([0, 0, 0.5, 40])
    ended.update(until_idle(engine))
    assert ended | aborted == set(asked), set(asked) - ended - aborted
    for request_id, count in asked.items():
        got = engine.outputs.get(request_id, [])
        expected = [token_of(request_id, place) for place in range(count)]
        assert got == expected[: len(got)], request_id
        assert request_id in aborted or len(got) == count, request_id
    engine.step()
    if settings is not None:
        engine.scheduler.agents.pins.drop_all()
        assert not engine.scheduler.agents.calls or not engine.scheduler._on
    assert engine.free_blocks == empty, (engine.free_blocks, empty)
    return engine, asked


def _check_allocations(engine: Engine) -> None:
    """Let no block be missing where the plugin did not look at memory, since it expected none to be."""
    if engine.settings is None:
        return
    scheduler = engine.scheduler
    stock = scheduler._allocate

    def checked(*args: Any, **kwargs: Any) -> Any:
        blocks = stock(*args, **kwargs)
        assert blocks is not None or scheduler._looks_at[1] or not scheduler._on or not scheduler._acts
        return blocks

    scheduler._allocate = scheduler.kv_cache_manager.allocate_slots = checked


HOOKS = (
    "arrived", "begin_step", "chunk_tokens", "started", "read", "preempted", "ended", "waiting_key", "running_key",
    "pins_to_take", "victim_key", "tell", "look", "room_blocks",
)  # fmt: skip


def _break(engine: Engine, hook: str, calls: int) -> None:
    """Have a decision raise at its n-th call and after."""
    agents = engine.scheduler.agents
    stock, left = getattr(agents, hook), [calls]

    def broken(*args: Any, **kwargs: Any) -> Any:
        left[0] -= 1
        if left[0] <= 0:
            raise RuntimeError(f"fault in {hook}")
        return stock(*args, **kwargs)

    setattr(agents, hook, broken)


def check_histories() -> dict[str, Any]:
    """On random histories each request gets its tokens once, all blocks return, nothing wedges; nothing fails inside."""
    rng = random.Random(5)
    counts = {"histories": 0, "preemptions": 0, "shrunk": 0, "bounded": 0, "given_back": 0, "kept": 0}
    for seed in range(60):
        settings = {
            "preset": rng.choice([None, "mars"]),
            "mode": rng.choice(["on", "on", "on", "watch"]),
            "order": rng.random() < 0.85,
            "pin_share": rng.choice([0.3, 0.9]),
            "starve_s": rng.choice([1, 120]),
            "first_level_tokens": rng.choice([100, 2048]),
        }
        engine, _ = history(seed, settings)
        report = told(engine)
        assert report["on"], (seed, settings)
        assert report["failures_total"] == 0, (seed, settings)
        counts["histories"] += 1
        counts["preemptions"] += sum(report["preemptions_total"].values())
        counts["shrunk"] += report["chunks_total"]["shrunk"]
        counts["bounded"] += report["chunks_total"]["bounded"]
        counts["given_back"] += report["pins_total"].get("given_back", 0)
        counts["kept"] += report["pins_total"].get("kept", 0)
    assert min(counts.values()) > 0, counts
    return counts


def check_faults() -> dict[str, Any]:
    """Whatever hook fails, no request is lost and the stock scheduler goes on."""
    import logging

    logging.getLogger("vllm.thunderagent").setLevel(logging.CRITICAL)
    failed = 0
    for number, hook in enumerate(HOOKS * 4):
        engine, _ = history(1000 + number, {"first_level_tokens": 100, "preset": "mars"}, fault=hook)
        report = told(engine)
        assert report["failures_total"] <= 2, (hook, report)
        if report["failures_total"]:
            failed += 1
            assert not report["on"], hook
            assert report["blocks"]["pinned"] == 0
            assert "raised RuntimeError" in report["why_not"]
            assert type(engine.scheduler.waiting).__module__.startswith("vllm."), hook
    assert failed >= len(HOOKS), failed
    return {"histories": len(HOOKS) * 4, "failed": failed}


def check_set_up() -> dict[str, Any]:
    """If the plugin cannot even begin, vLLM's own order applies from the first request on, and the report says why."""
    import logging

    from thunderagent_vllm import scheduler, surface

    logging.getLogger("vllm.thunderagent").setLevel(logging.CRITICAL)
    why_not = []
    for owner, name in ((surface.Surface, "__init__"), (scheduler, "Agents"), (scheduler, "ProgramQueue")):
        stock = getattr(owner, name)

        def broken(*_args: Any, **_kwargs: Any) -> None:
            raise AttributeError("a name of the future")

        setattr(owner, name, broken)
        try:
            engine = Engine(MODEL, {})
        finally:
            setattr(owner, name, stock)
        empty = engine.free_blocks
        asked = {f"r{number}": 3 + number for number in range(6)}
        for number, (request_id, count) in enumerate(asked.items()):
            engine.add(request_id, words(number, 300), count, "p", hold_s=60)
        until_idle(engine)
        assert {each: len(engine.outputs[each]) for each in asked} == asked
        report = told(engine, ["release", "p"])
        assert (report["on"], report["failures_total"]) == (False, 1), report
        assert engine.free_blocks == empty
        assert engine.scheduler.reset_prefix_cache()
        assert type(engine.scheduler.waiting).__module__.startswith("vllm."), name
        why_not.append(report["why_not"])
    assert set(why_not) == {"set_up raised AttributeError"}, why_not
    return {"why_not": why_not[0]}


def check_factory() -> dict[str, Any]:
    """The factory takes vLLM's own scheduler where it must, and says why."""
    from harness import config_of
    from thunderagent_vllm import scheduler, surface
    from vllm.v1.engine.core import EngineCore

    config = config_of(MODEL, 200, 32, 2048, True, "fcfs", 16)
    engine = Engine(MODEL, None)
    arguments = {
        "kv_cache_config": engine.scheduler.kv_cache_config,
        "structured_output_manager": engine.scheduler.structured_output_manager,
        "block_size": 32,
    }

    class Core:
        def __init__(self, **settings: Any) -> None:
            config.additional_config = {"thunderagent": settings}
            self.scheduler = scheduler.Scheduler(vllm_config=config, **arguments)

        report = EngineCore.thunderagent_programs if hasattr(EngineCore, "thunderagent_programs") else None

    def report(core: Core) -> dict[str, Any]:
        return EngineCore.thunderagent_programs(core, [])

    assert report(Core())["on"]
    off = report(Core(mode="off"))
    assert (off["on"], off["why_not"]) == (False, "its mode is off")
    tried = surface.TRIED
    try:
        surface.TRIED = ()
        assert "was not tried" in report(Core())["why_not"]
        assert report(Core(mode="force"))["on"]
    finally:
        surface.TRIED = tried
    hooks = dict(surface.HOOKS)
    try:
        surface.HOOKS["a_method_of_the_future"] = 1
        assert "Scheduler.a_method_of_the_future" in report(Core())["why_not"]
    finally:
        surface.HOOKS.clear()
        surface.HOOKS.update(hooks)
    config.additional_config = {}
    return {"vllm": report(Core())["vllm"]}


def check_step_cost() -> dict[str, Any]:
    """What a step with 64 generating requests costs, beside stock, in process time: the mean of the rounds, and an
    interval of the middle ones, in which the median is with 95 %."""
    found: dict[str, Any] = {}
    for load in STEP_LOADS:
        pairs = step_costs(MODEL, 64, COST_ROUNDS, {}, load)
        ratios = sorted(ours / stock for stock, ours in pairs)
        aside = int((len(ratios) - 1.96 * len(ratios) ** 0.5) / 2)  # of the binomial distribution
        found[load] = {
            "stock_us": round(statistics.median(stock for stock, _ in pairs) * 1e6),
            "ratio": round(statistics.median(ratios), 3),
            "low": round(ratios[max(0, aside)], 3),
            "high": round(ratios[min(len(ratios) - 1, len(ratios) - 1 - aside)], 3),
        }
    return found


CHECKS = {name.removeprefix("check_"): each for name, each in list(globals().items()) if name.startswith("check_")}


def main() -> int:
    failed = 0
    for name in sys.argv[2:] or CHECKS:
        begun_s = time.monotonic()
        try:
            found: dict[str, Any] = {"ok": True, "found": CHECKS[name]()}
        except Exception:
            failed += 1
            found = {"ok": False, "error": traceback.format_exc()}
        print(json.dumps({"check": name, **found, "took_s": round(time.monotonic() - begun_s, 2)}), flush=True)
    return 1 if failed else 0


if __name__ == "__main__":
    raise SystemExit(main())
