"""Every name of vLLM that is not public and that this package uses, in one place.

`missing_names` looks for them before the first request; whatever is missing, or a version that nobody tried, means
vLLM's own scheduler.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Sequence
from typing import Any

TRIED = ((0, 30), (0, 31), (0, 32), (0, 33))
"""Versions of vLLM, as (major, minor), on whose scheduler all checks passed; a whole engine ran with 0.32."""

HOOKS = {
    "add_request": 1,
    "schedule": 0,
    "_update_after_schedule": 1,
    "_reserve_prefill_lookahead": 3,
    "_free_request_blocks": 1,
    "_preempt_request": 2,
    "reset_prefix_cache": 0,
}
"""The methods that are overridden, and how many arguments they are given by position."""


def vllm_version() -> tuple[int, ...]:
    """Return vLLM's version as numbers; empty if it is unreadable."""
    from vllm.version import __version__

    numbers = []
    for part in str(__version__).split("+")[0].split(".")[:3]:
        digits = "".join(character for character in part if character.isdigit())
        if not digits:
            break
        numbers.append(int(digits))
    return tuple(numbers)


def missing_names(base: type) -> list[str]:
    """Return what vLLM's scheduler class lacks of what is needed."""
    try:
        from vllm.v1.core.block_pool import BlockPool
        from vllm.v1.core.kv_cache_manager import KVCacheManager
    except ImportError as error:
        return [str(error.name)]
    missing = []
    for name, positional_count in HOOKS.items():
        method = getattr(base, name, None)
        if method is None or not _takes(method, positional_count):
            missing.append(f"Scheduler.{name}")
    for owner, names in (
        (BlockPool, ("touch", "free_blocks", "get_num_free_blocks")),
        (KVCacheManager, ("allocate_slots", "get_blocks", "get_computed_blocks")),
    ):
        missing += [f"{owner.__name__}.{name}" for name in names if not hasattr(owner, name)]
    return missing


def _takes(method: Any, positional_count: int) -> bool:
    try:
        inspect.signature(method).bind(*range(positional_count + 1))
    except TypeError:
        return False
    return True


def _is_full_attention(spec: Any) -> bool:
    from vllm.v1.kv_cache_interface import FullAttentionSpec

    return isinstance(spec, FullAttentionSpec)


def _counts_references(scheduler: Any) -> bool:
    """Return whether vLLM takes a block with as many references as requests for a prefix that all of them share.

    Up to 0.31 it does, with cascade attention. A pin is a reference, too: a request would read another one's prefix.
    """
    model_config = getattr(getattr(scheduler, "vllm_config", None), "model_config", None)
    return vllm_version()[:2] < (0, 32) and not getattr(model_config, "disable_cascade_attn", True)


class Surface:
    """What the hooks read from and do with one scheduler of vLLM."""

    def __init__(self, scheduler: Any) -> None:
        self.scheduler = scheduler
        self.manager = scheduler.kv_cache_manager
        self._pool = self.manager.block_pool
        self.block_tokens: int = scheduler.block_size
        self.pool_blocks: int = self._pool.num_gpu_blocks - 1  # without the null block
        self.budget_tokens: int = scheduler.max_num_scheduled_tokens
        config = scheduler.scheduler_config
        self.can_pin = (
            bool(self.manager.enable_caching)
            and not getattr(scheduler, "has_mamba_layers", False)
            and not _counts_references(scheduler)
        )
        self.can_bound = (
            bool(getattr(config, "enable_chunked_prefill", True))
            and not getattr(scheduler, "need_mamba_block_aligned_split", False)
            and not getattr(scheduler, "prefix_replay_group_ids", ())
        )
        group_count = len(scheduler.kv_cache_config.kv_cache_groups)
        new_tokens = 1 + int(getattr(scheduler, "num_spec_tokens", 0)) + int(scheduler.num_lookahead_tokens)
        spare_count = 0 if group_count == 1 and not getattr(scheduler, "has_mamba_layers", False) else 1
        self._most_new_blocks = group_count * (spare_count + -(-new_tokens // self.block_tokens))
        self._most_prompt_blocks = group_count * (1 + self.budget_tokens // self.block_tokens)
        self.one_group = group_count == 1
        is_full = self.one_group and _is_full_attention(scheduler.kv_cache_config.kv_cache_groups[0].kv_cache_spec)
        self.capacity_tokens = self._pool.num_gpu_blocks * self.block_tokens if is_full else None
        """As vLLM's own metrics tell it; None where a context is not as many blocks as its tokens fill."""
        self.generated_tokens: int = 1 + int(getattr(scheduler, "num_spec_tokens", 0))
        """Calls of the chunk hook with no more tokens than this are of requests that generate."""

    # --- pool

    def touch(self, blocks: Sequence[Any]) -> None:
        """Take a reference to each block."""
        self._pool.touch(blocks)

    def free(self, blocks: Sequence[Any]) -> None:
        """Give the references back; the last block is evicted first."""
        self._pool.free_blocks(reversed(blocks))

    def free_block_count(self) -> int:
        """Return how many blocks nobody references."""
        return int(self._pool.get_num_free_blocks())

    def held_block_count(self, request: Any) -> int:
        """Return how many blocks of the largest group a request holds."""
        return max((len(group) for group in self.manager.get_blocks(request.request_id).blocks), default=0)

    def cached_blocks(self, request: Any) -> list[Any]:
        """Return a request's blocks that a next turn can find."""
        groups = self.manager.get_blocks(request.request_id).blocks
        return [each for group in groups for each in group if each.block_hash is not None and not each.is_null]

    def fitting_tokens(self, request: Any, computed_tokens: int) -> int | None:
        """Return how many more tokens of a running request the free blocks hold; None if that is unknown."""
        if not self.one_group:
            return None
        block_count = self.free_block_count() + self.held_block_count(request)
        return block_count * self.block_tokens - computed_tokens - int(self.scheduler.num_lookahead_tokens)

    def missing_block_count(self, request: Any, arguments: dict[str, Any]) -> int:
        """Return about how many blocks must become free for a waiting request that did not fit."""
        token_count = min(request.num_tokens, self.scheduler.max_model_len)
        found = arguments.get("new_computed_blocks")
        held_count = self.held_block_count(request)  # some, if they were loaded from elsewhere
        if found is not None and found.blocks:
            held_count += sum(1 for each in found.blocks[0] if each.ref_cnt > 0)
        block_count = -(-token_count // self.block_tokens) - held_count
        return block_count + int(getattr(self.manager, "watermark_blocks", 0)) - self.free_block_count()

    def has_room(self, *, is_reading: bool, waiting_here_count: int) -> bool:
        """Return whether the free blocks suffice for all that run in a step, and no more than those wait.

        `is_reading` is whether any of them reads a prompt: that may take the rest of the budget.
        """
        running_count, waiting_count = self.scheduler.get_request_counts()
        if waiting_count > waiting_here_count:
            return False
        block_count = running_count * self._most_new_blocks
        if is_reading:
            block_count += self._most_prompt_blocks
        return self.free_block_count() >= block_count

    # --- requests

    def uncached_tokens(self, request: Any) -> int:
        """Return the tokens of a prompt that are not in the prefix cache."""
        if getattr(request, "kv_cache_report_mode", "incremental") == "full":
            return int(request.num_tokens)  # a look-up would publish events
        return int(request.num_tokens - self.manager.get_computed_blocks(request)[1])

    def hint(self, request: Any) -> object:
        """Return `vllm_xargs.thunderagent_hold_s`, or None."""
        extra = getattr(request.sampling_params, "extra_args", None)
        return extra.get("thunderagent_hold_s") if extra else None

    def is_kept(self, request: Any) -> bool:
        """Return whether a request ended by itself, so that a next turn may come.

        A text to stop at is found by vLLM's API process, which then aborts the request. So does a client that leaves.
        """
        if request.status.name == "FINISHED_ABORTED":
            return bool(getattr(request.sampling_params, "stop", None)) and request.num_output_tokens > 0
        return request.status.name in ("FINISHED_STOPPED", "FINISHED_LENGTH_CAPPED", "FINISHED_REPETITION")

    def is_running(self, request: Any) -> bool:
        """Return whether a request runs."""
        return bool(request.status.name == "RUNNING")

    def is_alone(self) -> bool:
        """Return whether there is one request in all."""
        return len(self.scheduler.requests) <= 1

    def admitted_ids(self, output: Any) -> Iterator[str]:
        """Return the requests that began to run in this iteration."""
        for each in output.scheduled_new_reqs:
            yield each.req_id
        yield from output.scheduled_cached_reqs.resumed_req_ids

    def head_fits(self, request: Any, uncached_tokens: int) -> bool:
        """Return whether a waiting request could be admitted now, about."""
        if len(self.scheduler.running) >= self.scheduler.max_num_running_reqs:
            return False
        return -(-uncached_tokens // self.block_tokens) <= self.free_block_count()
