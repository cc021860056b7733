"""vLLM's real scheduler, cache manager and block pool under a virtual clock, without a model; run in vLLM's environment.

A step takes as long as a real engine's, by what it computes (`COSTS_S`); each generated token is a function of its
request and place, so the same request always gets the same tokens. Figures have no noise: they depend on the seed
alone, not on the machine.
"""

from __future__ import annotations

import heapq
import itertools
import os
import random
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from operator import mul
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))
os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
os.environ.setdefault("VLLM_ALLOW_LONG_MAX_MODEL_LEN", "1")

from steps import work_of
from thunderagent_vllm.scheduler import programs_class
from thunderagent_vllm.settings import read_settings
from vllm.engine.arg_utils import EngineArgs
from vllm.sampling_params import SamplingParams
from vllm.utils.hashing import get_hash_fn_by_name
from vllm.v1.core.kv_cache_utils import get_request_block_hasher, init_none_hash
from vllm.v1.core.sched.async_scheduler import AsyncScheduler
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheConfig, KVCacheGroupSpec
from vllm.v1.outputs import ModelRunnerOutput
from vllm.v1.request import Request, RequestStatus
from vllm.v1.structured_output import StructuredOutputManager

COSTS_S = (0.0233, 0.00035, 1.165e-7, 2.72e-6)
"""Of the work of an iteration, as in `steps.COSTS`: `scripts/bench plugin --fit` on the small model on one core."""

HASH = get_hash_fn_by_name("sha256")
init_none_hash(HASH)
_CONFIGS: dict[Any, Any] = {}


def config_of(
    model: str,
    blocks: int,
    block_tokens: int,
    budget: int,
    caching: bool,
    policy: str,
    seqs: int,
    max_model_len: int = 8192,
) -> Any:
    key = (model, blocks, block_tokens, budget, caching, policy, seqs, max_model_len)
    if key not in _CONFIGS:
        made = EngineArgs(
            model=model,
            dtype="float32",
            enforce_eager=True,
            block_size=block_tokens,
            max_model_len=max_model_len,
            max_num_batched_tokens=budget,
            max_num_seqs=seqs,
            num_gpu_blocks_override=blocks,
            enable_prefix_caching=caching,
            scheduling_policy=policy,
        ).create_engine_config()
        made.cache_config.num_gpu_blocks = blocks
        _CONFIGS[key] = made
    return _CONFIGS[key]


@dataclass
class Engine:
    """One engine; `settings` None is vLLM's own scheduler."""

    model: str
    settings: dict[str, Any] | None = None
    blocks: int = 500
    block_tokens: int = 32
    budget: int = 2048
    caching: bool = True
    policy: str = "fcfs"
    seqs: int = 256
    max_model_len: int = 8192
    is_async: bool = False
    now_s: float = 0.0
    step_hook: Any = None
    outputs: dict[str, list[int]] = field(default_factory=dict)
    hit_tokens: int = 0
    prompt_tokens: int = 0
    computed_tokens: int = 0
    """Of prompts, also those that are computed again."""
    generated_tokens: int = 0
    step_count: int = 0
    preemption_count: int = 0
    cached: dict[str, int] = field(default_factory=dict)
    """What was found of each prompt whose first token is there, until somebody takes it."""

    def __post_init__(self) -> None:
        config = config_of(
            self.model,
            self.blocks,
            self.block_tokens,
            self.budget,
            self.caching,
            self.policy,
            self.seqs,
            self.max_model_len,
        )
        spec = FullAttentionSpec(
            block_size=self.block_tokens, num_kv_heads=1, head_size=1, dtype=__import__("torch").float32
        )
        cache = KVCacheConfig(
            num_blocks=self.blocks, kv_cache_tensors=[], kv_cache_groups=[KVCacheGroupSpec(["layer"], spec)]
        )
        base = AsyncScheduler if self.is_async else Scheduler
        arguments = {
            "vllm_config": config,
            "kv_cache_config": cache,
            "structured_output_manager": StructuredOutputManager(config),
            "block_size": self.block_tokens,
            "hash_block_size": self.block_tokens,
            "log_stats": True,
        }
        if self.settings is None:
            self.scheduler = base(**arguments)
        else:
            made = programs_class(base)
            settings = read_settings(self.settings)
            self.scheduler = made(thunderagent_settings=settings, thunderagent_clock=lambda: self.now_s, **arguments)
        self.pending: list[tuple[Any, Any]] = []

    def add(
        self,
        request_id: str,
        tokens: list[int],
        output: int,
        program: str | None = None,
        priority: int = 0,
        hold_s: float | None = None,
        block_hasher: Callable[[Request], list[Any]] | None = None,
    ) -> Request:
        """Add a request; blocks are hashed by their tokens, unless a hasher is given."""
        if block_hasher is None:
            block_hasher = get_request_block_hasher(self.block_tokens, HASH)
        extra = None if hold_s is None else {"thunderagent_hold_s": hold_s}
        parameters = SamplingParams(
            max_tokens=output, min_tokens=output, ignore_eos=True, temperature=0, extra_args=extra
        )
        request = Request(
            request_id=request_id,
            prompt_token_ids=tokens,
            sampling_params=parameters,
            pooling_params=None,
            arrival_time=self.now_s,
            priority=priority,
            session_id=program,
            block_hasher=block_hasher if self.caching else None,
        )
        self.scheduler.add_request(request)
        return request

    def abort(self, request_id: str) -> None:
        self.scheduler.finish_requests(request_id, RequestStatus.FINISHED_ABORTED)

    def step(self) -> list[str]:
        """Run one iteration; return the requests that ended."""
        scheduler = self.scheduler
        output = scheduler.schedule()
        self.preemption_count += len(output.preempted_req_ids or ())
        if output.total_num_scheduled_tokens:
            generating = sum(1 for tokens in output.num_scheduled_tokens.values() if tokens == 1)
            self.now_s += sum(map(mul, COSTS_S, work_of(output.num_scheduled_tokens, scheduler.requests)))
            self.computed_tokens += output.total_num_scheduled_tokens - generating
            self.generated_tokens += generating
            self.step_count += 1
        else:
            self.now_s += 0.001
        if self.step_hook is not None:
            self.step_hook(output)
        made = self._run(output)
        if self.is_async:  # one step ahead, as vLLM is
            self.pending.append((output, made))
            if len(self.pending) < 2 and output.total_num_scheduled_tokens:
                return []
            output, made = self.pending.pop(0)
        ended = self._take(output, made)
        if self.is_async and not scheduler.has_unfinished_requests():
            while self.pending:
                ended += self._take(*self.pending.pop(0))
        return ended

    def _run(self, output: Any) -> ModelRunnerOutput:
        scheduler, ids, sampled = self.scheduler, list(output.num_scheduled_tokens), []
        for request_id in ids:
            request = scheduler.requests[request_id]
            if request.is_prefill_chunk:
                sampled.append([])
            else:
                place = request.num_computed_tokens - request.num_prompt_tokens
                sampled.append([token_of(request_id, place)])
        return ModelRunnerOutput(ids, {each: number for number, each in enumerate(ids)}, sampled)

    def _take(self, output: Any, made: Any) -> list[str]:
        ended = []
        for group in self.scheduler.update_from_output(output, made).values():
            for each in group.outputs:
                if each.prefill_stats is not None:
                    self.hit_tokens += each.prefill_stats.num_cached_tokens
                    self.prompt_tokens += each.prefill_stats.num_prompt_tokens
                    self.cached[each.request_id] = each.prefill_stats.num_cached_tokens
                self.outputs.setdefault(each.request_id, []).extend(each.new_token_ids)
                if each.finish_reason is not None:
                    ended.append(each.request_id)
        return ended

    @property
    def free_blocks(self) -> int:
        return self.scheduler.kv_cache_manager.block_pool.get_num_free_blocks()


def token_of(request_id: str, place: int) -> int:
    """Return the token that a request generates at a place."""
    return (hash_of(request_id) * 31 + place * 7919) % 1900 + 50


def hash_of(text: str) -> int:
    return sum(ord(each) * (number + 1) for number, each in enumerate(text))


@dataclass
class Load:
    """What became of the standard load: N programs at a time, each 6 to 12 turns, by seed alone."""

    turns: list[float] = field(default_factory=list)  # turn times, s
    programs: list[float] = field(default_factory=list)

    def figures(self, engine: Engine, seconds: float) -> dict[str, float]:
        turns = sorted(self.turns)
        return {
            "turns_per_minute": 60 * len(turns) / seconds,
            "hit_ratio": engine.hit_tokens / max(1, engine.prompt_tokens),
            "turn_p50_s": turns[len(turns) // 2],
            "turn_p99_s": turns[int(len(turns) * 0.99)],
            "program_mean_s": sum(self.programs) / max(1, len(self.programs)),
        }


class Strangers:
    """Others who send the engine a single turn every so often, of no program; 0: nobody."""

    def __init__(self, engine: Engine, every_s: float, seed: int) -> None:
        self.engine = engine
        self.every_s = every_s
        self.rng = random.Random(seed)
        self.next_s = every_s or float("inf")

    def come(self) -> None:
        if self.engine.now_s >= self.next_s:
            tokens = [self.rng.randrange(50, 1950) for _ in range(self.rng.randint(400, 1200))]
            self.engine.add(f"stranger-{self.next_s}", tokens, 32)
            self.next_s += self.every_s


SHARED_TOKENS = 200
"""All prompts begin with the same."""


class Front:
    """What is between agents and engine: nothing. With `told`, their ends are told to the engine, as by a proxy."""

    next_s = float("inf")
    """When `passed` must be called, if nothing happens before."""

    def __init__(self, engine: Engine, *, told: bool = False) -> None:
        self.engine = engine
        self.told = told

    def send(self, request_id: str, tokens: list[int], output: int, program_id: str) -> None:
        """Take a turn of a program."""
        self.engine.add(request_id, tokens, output, program_id)

    def passed(self) -> None:
        """Note that time has passed, and who has a first token."""
        self.engine.cached.clear()

    def ended(self, request_id: str, prompt_tokens: int, output_tokens: int) -> None:
        """Note the end of a turn."""

    def released(self, program_id: str) -> None:
        """Note the end of a program."""
        if self.told:
            self.engine.scheduler.thunderagent_tell([["release", program_id]])


def run_load(
    engine: Engine,
    count: int,
    seed: int,
    seconds: float = 800.0,
    warmup: float = 20.0,
    front: Front | None = None,
    strangers_s: float = 0.0,
) -> dict[str, float]:
    """Return the figures of `count` programs at a time.

    With `strangers_s`, others send the engine a single turn that often, past the front.
    """
    front = Front(engine) if front is None else front
    shared = [1 + number % 40 for number in range(SHARED_TOKENS)]
    strangers = Strangers(engine, strangers_s, seed)
    numbers = itertools.count()
    load = Load()
    due: list[tuple[float, int, Any]] = []
    running: dict[str, Any] = {}  # by request
    order = itertools.count()

    def begin(at_s: float) -> None:
        number = next(numbers)
        rng = random.Random(seed * 100_003 + number)
        program = {
            "id": f"p{number}",
            "rng": rng,
            "left": rng.randint(6, 12),
            "tokens": [*shared, *(rng.randrange(50, 1950) for _ in range(rng.randint(400, 800)))],
            "begun_s": at_s,
            "turn": 0,
        }
        heapq.heappush(due, (at_s, next(order), program))

    for _ in range(count):
        begin(0.0)
    while engine.now_s < warmup + seconds:
        while due and due[0][0] <= engine.now_s:
            _, _, program = heapq.heappop(due)
            request_id = f"{program['id']}-{program['turn']}"
            program["turn"] += 1
            program["sent_s"] = engine.now_s
            running[request_id] = program
            front.send(request_id, list(program["tokens"]), program["rng"].randint(24, 64), program["id"])
        strangers.come()
        front.passed()
        if not engine.scheduler.requests:
            engine.now_s = max(engine.now_s, min(due[0][0] if due else front.next_s, front.next_s, strangers.next_s))
            engine.scheduler.schedule()  # lets deadlines pass
            continue
        for request_id in engine.step():
            program = running.pop(request_id, None)
            output = engine.outputs.pop(request_id)
            if program is None:
                continue
            rng = program["rng"]
            measured = engine.now_s > warmup
            if measured:
                load.turns.append(engine.now_s - program["sent_s"])
            front.ended(request_id, len(program["tokens"]), len(output))
            program["tokens"] += output
            program["left"] -= 1
            if program["left"] == 0:
                if measured:
                    load.programs.append(engine.now_s - program["begun_s"])
                front.released(program["id"])
                begin(engine.now_s)
            else:
                program["tokens"] += [rng.randrange(50, 1950) for _ in range(rng.randint(150, 450))]
                heapq.heappush(due, (engine.now_s + rng.expovariate(1.0), next(order), program))
    return load.figures(engine, seconds)


STEP_LOADS: dict[str, dict[str, Any]] = {
    "quiet": {},
    "waiting": {"waiting": 8},
    "short": {"waiting": 8, "waiting_tokens": 65_000, "seqs": 256},
    "reading": {"waiting": 1, "waiting_tokens": 7000, "seqs": 65, "budget": 72},
}
"""Beside those that generate: nobody; eight wait, and as many run as may; eight wait that do not fit; one prompt is read
for so many steps."""


class Steps:
    """An engine with `running` generating requests, and the seconds of scheduler time that its steps took."""

    def __init__(
        self,
        model: str,
        settings: dict[str, Any] | None,
        running: int,
        steps: int,
        *,
        waiting: int = 0,
        waiting_tokens: int = 64,
        seqs: int | None = None,
        budget: int = 4096,
    ) -> None:
        blocks = running * (5 + steps // 32) + 64 + (waiting == 1) * waiting_tokens // 32
        length = {"max_model_len": max(8192, waiting_tokens + 100)}
        self.engine = Engine(model, settings, blocks=blocks, budget=budget, seqs=seqs or running, **length)
        for number in range(running):
            tokens = [50 + (number * 17 + each) % 1900 for each in range(64)]
            self.engine.add(f"r{number}", tokens, 8 + steps * 2, f"p{number}")
        while any(each.is_prefill_chunk for each in self.engine.scheduler.running) or self.engine.scheduler.waiting:
            self.engine.step()
        for number in range(waiting):
            tokens = [60 + (number * 19 + each * 7) % 1900 for each in range(waiting_tokens)]
            self.engine.add(f"w{number}", tokens, 8, f"w{number}")
        self.engine.step()
        self.costs_s: list[float] = []

    def step(self) -> None:
        """Do a step."""
        engine = self.engine
        begun_s = time.process_time()
        output = engine.scheduler.schedule()
        cost_s = time.process_time() - begun_s
        made = engine._run(output)
        begun_s = time.process_time()
        engine.scheduler.update_from_output(output, made)
        self.costs_s.append(cost_s + time.process_time() - begun_s)
        engine.now_s += 0.03


ROUND_STEPS = 32
"""A block is filled once in so many steps."""


def step_costs(model: str, running: int, rounds: int, settings: dict[str, Any], load: str) -> list[tuple[float, float]]:
    """Return the seconds of scheduler time for a step of vLLM's own scheduler and of ours, round by round.

    Both do each step in turn, so whatever else the machine does meets both.
    """
    steps = rounds * ROUND_STEPS
    both = [Steps(model, each, running, steps, **STEP_LOADS[load]) for each in (None, settings)]
    for number in range(steps):
        for each in both if number % 2 else reversed(both):
            each.step()
    for each in both:
        assert len(each.engine.scheduler.running) == running + (load == "reading")
    stock, ours = (
        [sum(each.costs_s[begin : begin + ROUND_STEPS]) / ROUND_STEPS for begin in range(0, steps, ROUND_STEPS)]
        for each in both
    )
    return list(zip(stock, ours, strict=True))
