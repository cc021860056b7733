"""Report the simulator's engine and its state in SGLang's form (0.5, `entrypoints/http_server.py`)."""

from __future__ import annotations

import time
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any, Final, TypeAlias

if TYPE_CHECKING:
    from thunderagent.simulator.engine.engine import Engine

Json: TypeAlias = dict[str, Any]
VERSION: Final = "0.5.23+simulated"  # of the dialect


def models(model: str, *, created_s: int, context_limit_tokens: int) -> Json:
    """Return the list of the one served model."""
    entry = {"id": model, "object": "model", "created": created_s, "owned_by": "sglang", "root": model}
    return {"object": "list", "data": [{**entry, "parent": None, "max_model_len": context_limit_tokens}]}


def model_info(model: str, weight_version: str) -> Json:
    """Return the information about the model."""
    said = {"model_path": model, "tokenizer_path": model, "is_generation": True}
    return {**said, "preferred_sampling_params": None, "weight_version": weight_version}


def server_info(engine: Engine, model: str) -> Json:
    """Return the server's arguments, and each rank's state."""
    config = engine.config
    return {
        "model_path": model,
        "served_model_name": model,
        "tp_size": 1,
        "dp_size": 1,
        "page_size": config.block_size,
        "chunked_prefill_size": config.max_num_batched_tokens,
        "max_running_requests": config.max_num_seqs,
        "enable_priority_scheduling": config.scheduling_policy == "priority",
        "disable_radix_cache": False,
        "enable_session_radix_cache": True,
        "status": "ready",
        "max_total_num_tokens": config.capacity_tokens,
        "max_req_input_len": config.context_limit_tokens - 1,
        "internal_states": [{"memory_usage": {"token_capacity": config.capacity_tokens}}],
        "version": VERSION,
    }


def loads(engine: Engine) -> Json:
    """Return the load of each rank."""
    stats, config = engine.stats, engine.config
    used_tokens = stats.used_block_count * config.block_size
    of_rank = {
        "timestamp": time.time(),
        "dp_rank": 0,
        "num_running_reqs": stats.running_count,
        "num_waiting_reqs": stats.waiting_count,
        "num_used_tokens": used_tokens,
        "num_total_tokens": used_tokens + engine.waiting_tokens,
        "max_total_num_tokens": config.capacity_tokens,
        "max_running_requests": config.max_num_seqs,
        "token_usage": stats.kv_usage_ratio,
    }
    return {"timestamp": datetime.now(UTC).isoformat(), "version": VERSION, "loads": [of_rank]}
