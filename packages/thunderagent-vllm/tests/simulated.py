"""The simulator's runs on vLLM's real scheduler in place of the simulated engine; run in vLLM's environment.

Programs, tools, arrivals, the proxy's scheduler and the time of an iteration are the simulator's, unchanged. What is in
an iteration, who waits, what is cached, pinned and preempted is decided by vLLM's own code, with or without the plugin.
The keys of blocks are the simulator's, so prompts need no tokens.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from harness import Engine
from vllm.v1.core.kv_cache_utils import BlockHash
from vllm.v1.request import Request

from thunderagent.simulator.engine.records import (
    EngineConfig,
    EngineRequest,
    EngineStats,
    FinishedRequest,
    StepResult,
)
from thunderagent.simulator.engine.timing import IterationWork
from thunderagent.simulator.runs import clients, replicas

IDLE_S = 0.005
"""How long an iteration takes in which nothing may run."""


class _Live:
    """A request in the engine."""

    __slots__ = ("arrival_s", "cached_tokens", "first_token_s", "generated_tokens", "preemption_count", "request")

    def __init__(self, request: EngineRequest, arrival_s: float) -> None:
        self.request = request
        self.arrival_s = arrival_s
        self.first_token_s = 0.0
        self.cached_tokens: int | None = None
        self.generated_tokens = 0
        self.preemption_count = 0


class VllmEngine:
    """Has the interface of the simulated engine; `settings` are the plugin's, None is vLLM's own scheduler."""

    model = ""
    settings: dict[str, Any] | None = None
    hold_s: float | None = None
    """What a proxy tells with each turn."""

    def __init__(self, config: EngineConfig) -> None:
        self.config = config
        self._engine = Engine(
            self.model,
            self.settings,
            blocks=config.block_count + 1,  # one is vLLM's null block
            block_tokens=config.block_size,
            budget=config.max_num_batched_tokens,
            policy=config.scheduling_policy,
            seqs=config.max_num_seqs,
            max_model_len=config.context_limit_tokens,
        )
        self.scheduler = self._engine.scheduler
        self._live: dict[str, _Live] = {}
        self._prompt_tokens = self._generated_tokens = self._computed_tokens = self._iteration_count = 0
        self._query_tokens = self._hit_tokens = self._preemption_count = self._aborted_count = 0

    @property
    def has_work(self) -> bool:
        return bool(self._live)

    @property
    def request_ids(self) -> tuple[str, ...]:
        return tuple(self._live)

    @property
    def stats(self) -> EngineStats:
        running_count, waiting_count = self.scheduler.get_request_counts()
        pinned_count = 0 if self.settings is None else self.scheduler.agents.pins.block_count
        return EngineStats(
            running_count,
            waiting_count,
            self.config.block_count - self._engine.free_blocks - pinned_count,
            self.config.block_count,
            self._prompt_tokens,
            self._generated_tokens,
            self._query_tokens,
            self._hit_tokens,
            self._preemption_count,
            self._aborted_count,
            self._computed_tokens,
            self._iteration_count,
        )

    def submit(self, request: EngineRequest, now_s: float) -> None:
        prompt_tokens, output_tokens = len(request.prompt_token_ids), len(request.output_token_ids)
        if prompt_tokens + output_tokens > self.config.context_limit_tokens:
            raise ValueError("it is longer than the context")
        self._engine.now_s = now_s
        keys, size = request.keys, self.config.block_size
        assert keys is not None

        def hashes(each: Request) -> list[BlockHash]:
            known_count = len(each.block_hashes)
            return [
                BlockHash(key.to_bytes(16, "big", signed=True)) for key in keys[known_count : each.num_tokens // size]
            ]

        self._live[request.request_id] = _Live(request, now_s)
        self._engine.add(
            request.request_id,
            [0] * prompt_tokens,
            output_tokens,
            request.retain_id or None,
            request.priority,
            self.hold_s if self.settings is not None else None,
            hashes,
        )

    def abort(self, request_id: str) -> bool:
        if self._live.pop(request_id, None) is None:
            return False
        self._engine.abort(request_id)
        self._aborted_count += 1
        return True

    def decode(self) -> float | None:
        return None

    def step(self, now_s: float) -> StepResult:
        scheduler, engine, live = self.scheduler, self._engine, self._live
        engine.now_s = now_s
        output = scheduler.schedule()
        preempted = tuple(output.preempted_req_ids or ())
        self._preemption_count += len(preempted)
        for request_id in preempted:
            live[request_id].preemption_count += 1
        work = IterationWork()
        for request_id, tokens in output.num_scheduled_tokens.items():
            request = scheduler.requests[request_id]
            before_tokens = request.num_computed_tokens - tokens
            if tokens == 1 and before_tokens >= request.num_prompt_tokens:
                work.decode_count += 1
                work.decode_context_tokens += before_tokens
            else:
                work.prefill_tokens += tokens
                work.attention_pairs += tokens * (before_tokens + tokens / 2)
        duration_s = IDLE_S
        if output.total_num_scheduled_tokens:
            duration_s = self.config.timing.iteration_s(work)
            self._iteration_count += 1
            self._computed_tokens += work.prefill_tokens
        end_s = engine.now_s = now_s + duration_s
        generated, finished = [], []
        for group in scheduler.update_from_output(output, engine._run(output)).values():
            for each in group.outputs:
                known = live.get(each.request_id)
                if known is None:
                    continue
                if each.prefill_stats is not None and known.cached_tokens is None:
                    known.cached_tokens = each.prefill_stats.num_cached_tokens
                    self._hit_tokens += each.prefill_stats.num_cached_tokens
                    self._query_tokens += each.prefill_stats.num_prompt_tokens
                    self._prompt_tokens += each.prefill_stats.num_prompt_tokens
                if each.new_token_ids:
                    known.generated_tokens += len(each.new_token_ids)
                    self._generated_tokens += len(each.new_token_ids)
                    known.first_token_s = known.first_token_s or end_s
                    generated.append(each.request_id)
                if each.finish_reason is not None:
                    finished.append(self._ended(each.request_id, end_s))
        return StepResult(duration_s, work, tuple(generated), tuple(finished), (), preempted)

    def _ended(self, request_id: str, end_s: float) -> FinishedRequest:
        known = self._live.pop(request_id)
        return FinishedRequest(
            request_id,
            len(known.request.prompt_token_ids),
            known.generated_tokens,
            known.cached_tokens or 0,
            known.preemption_count,
            known.arrival_s,
            known.first_token_s,
            end_s,
        )

    def generated_tokens(self, request_id: str) -> int | None:
        known = self._live.get(request_id)
        return None if known is None else known.generated_tokens

    def cached_tokens(self, request_id: str) -> int | None:
        known = self._live.get(request_id)
        return None if known is None else known.cached_tokens

    def drop_retained(self, retain_id: str) -> None:
        if self.settings is not None:
            self.scheduler.thunderagent_tell([["pause", retain_id]])

    def expire(self, keys: Sequence[int]) -> None:
        raise NotImplementedError("no real engine has this")


_stock_request = clients.RunningProgram.request


def _request(self: clients.RunningProgram, *, retained: bool = False) -> EngineRequest:
    """Name the program in each turn, also in its last one, which no proxy knows to be that."""
    made = _stock_request(self)
    made.retain_id = self.plan.program_id if retained else ""
    return made


def use_vllm(model: str, settings: dict[str, Any] | None, hold_s: float | None) -> None:
    """Have all runs from here on use vLLM's scheduler."""
    VllmEngine.model, VllmEngine.settings, VllmEngine.hold_s = model, settings, hold_s
    replicas.Engine = VllmEngine  # type: ignore[misc,assignment]
    clients.RunningProgram.request = _request  # type: ignore[method-assign]
