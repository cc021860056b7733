"""Shared parts of the Nova runs: the paper's model drawn on the card, arrivals in pairs, and a run's figures."""

from __future__ import annotations

import asyncio
import hashlib
import random
import statistics
import subprocess
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from transformers import Qwen2_5_VLConfig, Qwen2_5_VLForConditionalGeneration

from thunderagent_nova.engine import Engine, EngineConfig
from thunderagent_nova.messages import Image, Prompt, Request, Scheduling
from thunderagent_nova.models import Vlm
from thunderagent_nova.partition import DECODE, CorePool, Pool, green_pool
from thunderagent_nova.profile import Subject
from thunderagent_nova.scheduler import Scheduler
from thunderagent_nova.workers import Outcome, Turn

SEED = 7
IMAGE_ID, START_ID, END_ID = 151501, 151502, 151503
COUNTS = tuple(range(8, 120, 8))  # SMs for decoding: Hopper hands them out in eights
OUTPUT_TOKENS = (30, 80)  # the paper's range


@dataclass(frozen=True, slots=True)
class Size:
    """The size of the model and its images."""

    encoder_layers: int
    encoder_width: int
    encoder_inner: int
    encoder_heads: int
    text_layers: int
    text_width: int
    text_inner: int
    text_heads: int
    key_heads: int
    vocabulary: int
    image_side_px: int
    slot_tokens: int
    slots: int


# CogAgent's shape as the paper gives it: 4.4 B + 9.4 B, 1600 tokens an image, 70 MB of KV a request.
PAPER = Size(64, 1792, 10240, 16, 40, 4096, 13696, 32, 2, 151552, 1120, 1791, 16)
# A small version for two cores: encoding to prefill to a step is about 20 : 8 : 1 there too.
SMALL = Size(8, 128, 512, 4, 4, 192, 512, 6, 2, 151552, 336, 335, 8)


def draw(size: Size, device: torch.device) -> Vlm:
    """Draw the weights on the device from a seed. bf16 on a GPU, else float32."""
    side = size.text_width // size.text_heads // 2
    vision = {
        "depth": size.encoder_layers, "hidden_size": size.encoder_width, "intermediate_size": size.encoder_inner,
        "num_heads": size.encoder_heads, "patch_size": 14, "spatial_merge_size": 2, "temporal_patch_size": 2,
        "fullatt_block_indexes": list(range(size.encoder_layers)), "out_hidden_size": size.text_width,
    }  # fmt: skip
    text = {
        "hidden_size": size.text_width, "intermediate_size": size.text_inner, "num_hidden_layers": size.text_layers,
        "num_attention_heads": size.text_heads, "num_key_value_heads": size.key_heads,
        "vocab_size": size.vocabulary, "tie_word_embeddings": False,
        "rope_parameters": {"rope_type": "default", "rope_theta": 1e6, "mrope_section": [side // 4, side * 3 // 8,
                            side - side // 4 - side * 3 // 8]},
    }  # fmt: skip
    config = Qwen2_5_VLConfig(
        vision_config=vision, text_config=text, image_token_id=IMAGE_ID, vision_start_token_id=START_ID,
        vision_end_token_id=END_ID, video_token_id=END_ID + 1,
    )  # fmt: skip
    torch.manual_seed(SEED)
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.bfloat16 if device.type == "cuda" else torch.float32)
    try:
        with torch.device(device):
            return Vlm(Qwen2_5_VLForConditionalGeneration(config))
    finally:
        torch.set_default_dtype(before)


@dataclass(frozen=True, slots=True)
class Turns:
    """The turns of a run: arrival, prompt and answer length of each. Equal for every policy."""

    arrivals_s: tuple[float, ...]
    prompts: tuple[Prompt, ...]
    max_tokens: tuple[int, ...]

    @classmethod
    def poisson(cls, size: Size, count: int, rate_per_s: float, seed: int, dtype: torch.dtype) -> Turns:
        """Draw Poisson arrivals; the same seed gives the same turns at every rate, with scaled times."""
        chance = random.Random(seed)
        images = screenshots(size, 4, dtype)
        now_s, arrivals, prompts, tokens = 0.0, [], [], []
        for index in range(count):
            now_s += chance.expovariate(1.0) / rate_per_s
            arrivals.append(now_s)
            prompts.append(prompt_with(images[index % 4], chance))
            tokens.append(chance.randint(*OUTPUT_TOKENS))
        return cls(tuple(arrivals), tuple(prompts), tuple(tokens))


def screenshots(size: Size, count: int, dtype: torch.dtype) -> list[Image]:
    """Draw images in the form of the model's image processor, in pinned memory if there is a GPU."""
    generator = torch.Generator().manual_seed(SEED)
    patches = size.image_side_px // 14
    images = []
    for _ in range(count):
        pixels = torch.randn((patches * patches, 3 * 2 * 14 * 14), generator=generator).to(dtype)
        pixels = pixels.pin_memory() if torch.cuda.is_available() else pixels
        images.append(Image(pixels, torch.tensor([1, patches, patches])))
    return images


def prompt_with(image: Image, chance: random.Random) -> Prompt:
    """Write some words, the screenshot and the instruction."""
    words = [chance.randrange(10, 100_000) for _ in range(chance.randint(60, 100))]
    marks = [START_ID, *[IMAGE_ID] * (len(image.pixels) // 4), END_ID]
    return Prompt((*words[:20], *marks, *words[20:]), (image,))


def pool_for(device: torch.device, counts: Sequence[int] = COUNTS) -> Pool:
    """Partition the GPU, or the cores without one."""
    return green_pool(device, tuple(counts)) if device.type == "cuda" else CorePool()


def engine_config(size: Size) -> EngineConfig:
    """Return the sizes of an engine for this model."""
    return EngineConfig(slots=size.slots, slot_tokens=size.slot_tokens, batch_buckets=(1, 2, 4, 8))


def subject_of(engine: Engine, size: Size, vlm: Vlm, batch: int) -> Subject:
    """Make the subject of the profile: one turn at the front, and a batch in the first slots."""
    chance = random.Random(SEED)
    (image,) = screenshots(size, 1, vlm.dtype)
    turns = []
    for slot in range(batch + 1):
        prompt = prompt_with(image, chance)
        turn = Turn(Request(str(slot), prompt, 10), vlm.layout(prompt), [None], missing=[0], slot=slot, tokens=[11])
        turns.append(turn)
    return Subject(engine.stages, engine.pool, turns[-1], turns[:batch])


@dataclass(slots=True)
class Told:
    """The events of one turn, in seconds since the run's begin."""

    arrived_s: float
    tokens_s: list[float] = field(default_factory=list)
    tokens: list[int] = field(default_factory=list)
    """Their ids."""


@dataclass(slots=True)
class Run:
    """The record of a run: its turns, and the passes of the workers."""

    turns: list[Told]
    passes: list[Outcome]
    begin_s: float

    def figures(self) -> dict[str, Any]:
        """Summarise the run; seconds, and requests a second."""
        by_turn = [told.tokens_s[-1] - told.arrived_s for told in self.turns]
        latency = sorted(by_turn)
        first = [told.tokens_s[0] - told.arrived_s for told in self.turns]
        gaps = [(told.tokens_s[-1] - told.tokens_s[0]) / (len(told.tokens_s) - 1) for told in self.turns]
        widest = [max(b - a for a, b in zip(told.tokens_s, told.tokens_s[1:], strict=False)) for told in self.turns]
        batches = [len(done.job.turns) for done in self.passes if done.stage == DECODE]
        span_s = max(told.tokens_s[-1] for told in self.turns) - self.turns[0].arrived_s
        return {
            "average_s": statistics.fmean(latency), "average_95_s": bootstrap(latency, statistics.fmean),
            "max_s": latency[-1], "max_95_s": bootstrap(latency, max),
            "p50_s": latency[len(latency) // 2], "p99_s": latency[int(0.99 * (len(latency) - 1))],
            "ttft_s": statistics.fmean(first), "tbt_s": statistics.fmean(gaps),
            "widest_gap_s": statistics.fmean(widest), "requests_per_s": len(latency) / span_s,
            "decode_batch": statistics.fmean(batches), "requests": len(latency),
            "tokens": hashlib.sha256(repr([told.tokens for told in self.turns]).encode()).hexdigest()[:16],
            "latency_s": [round(seconds, 4) for seconds in by_turn],  # paired: turn by turn the same for each policy
            "stage_mean_s": {
                stage: statistics.fmean([done.end_s - done.begin_s for done in self.passes if done.stage == stage])
                for stage in {done.stage for done in self.passes}
            },
            "queued_for_worker_s": statistics.fmean([done.begin_s - done.job.put_s for done in self.passes]),
        }  # fmt: skip


def bootstrap(values: Sequence[float], of: Callable[[Sequence[float]], float], samples: int = 1000) -> list[float]:
    """Return the 95 % interval of a statistic by resampling the turns."""
    chance = random.Random(SEED)
    drawn = sorted(of(chance.choices(values, k=len(values))) for _ in range(samples))
    return [drawn[int(0.025 * samples)], drawn[int(0.975 * samples)]]


def together(rounds: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Summarise rounds of the same turns: the mean and the maximum of the turns' mean latencies, with intervals."""
    by_turn = latency_by_turn(rounds)
    return {
        "average_s": statistics.fmean(by_turn), "average_95_s": bootstrap(by_turn, statistics.fmean),
        "max_s": max(by_turn), "max_95_s": bootstrap(by_turn, max),
        "tokens": sorted({each["tokens"] for each in rounds}),
    }  # fmt: skip


def latency_by_turn(rounds: Sequence[dict[str, Any]]) -> list[float]:
    """Return each turn's latency in seconds, its mean over the rounds."""
    return [statistics.fmean(turn) for turn in zip(*(each["latency_s"] for each in rounds), strict=True)]


def beside(ours: Sequence[float], theirs: Sequence[float], samples: int = 1000) -> dict[str, Any]:
    """Return our mean latency over theirs for the same turns, with its 95 % interval by resampling turns."""
    chance, pairs = random.Random(SEED), list(zip(ours, theirs, strict=True))
    drawn = sorted(_ratio(chance.choices(pairs, k=len(pairs))) for _ in range(samples))
    return {"ratio": _ratio(pairs), "ratio_95": [drawn[int(0.025 * samples)], drawn[int(0.975 * samples)]]}


def _ratio(pairs: Sequence[tuple[float, float]]) -> float:
    return sum(our for our, _ in pairs) / sum(their for _, their in pairs)


async def serve(engine: Engine, scheduler: Scheduling, turns: Turns, passes: list[Outcome], tag: str) -> Run:
    """Run the turns under a scheduler; `passes` is what the engine's `on_pass` appends to."""
    engine.reschedule(scheduler)
    passes.clear()
    told = [Told(arrived_s) for arrived_s in turns.arrivals_s]
    begin_s = time.monotonic() + 0.05

    async def one(index: int) -> None:
        await asyncio.sleep(begin_s + turns.arrivals_s[index] - time.monotonic())
        request = Request(f"{tag}-{index}", turns.prompts[index], turns.max_tokens[index])
        async for token in engine.submit(request):
            told[index].tokens_s.append(time.monotonic() - begin_s)
            told[index].tokens.append(token.token_id)

    await asyncio.gather(*(one(index) for index in range(len(told))))
    return Run(told, list(passes), begin_s)


def scheduler_of(name: str, size: Size, split_policy: Any = None) -> Scheduler:
    """Return a scheduler with the engine's number of slots."""
    return Scheduler(name, slots=size.slots, split_policy=split_policy)


def made_by(device: torch.device) -> dict[str, Any]:
    """Return the code version and the device behind a figure."""
    code = hashlib.sha256()
    for path in sorted(Path(__file__).parent.parent.glob("packages/thunderagent-nova/thunderagent_nova/*.py")):
        code.update(path.read_bytes())
    machine = {"device": "cpu", "torch": torch.__version__, "cores": torch.get_num_threads()}
    if device.type == "cuda":
        properties = torch.cuda.get_device_properties(device)
        machine |= {
            "device": properties.name, "sms": properties.multi_processor_count, "cuda": torch.version.cuda,
            "memory_gb": round(properties.total_memory / 2**30, 1),
        }  # fmt: skip
    return {"commit": _commit(), "code": code.hexdigest()[:16], "machine": machine}


def _commit() -> str:
    marker = Path(__file__).parent.parent / ".commit"
    if marker.exists():
        return marker.read_text().strip()
    told = subprocess.run(["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True, check=False)
    return told.stdout.strip() or "unknown"
