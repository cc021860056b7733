"""`thunderagent nova serve`: load a model, partition the device, serve until a signal."""

from __future__ import annotations

import asyncio
import signal
import sys
from typing import Any

import torch
import transformers
import uvloop
from aiohttp import web

from thunderagent.errors import ConfigurationError
from thunderagent_nova.codec import Codec
from thunderagent_nova.config import NovaConfig, static_split
from thunderagent_nova.engine import Engine, EngineConfig
from thunderagent_nova.models import Vlm
from thunderagent_nova.partition import CorePool, NullPool, PartitionError, Pool, StreamPool, green_pool
from thunderagent_nova.policy import SplitPolicy, Static, Whole, adaptive_of, paper_like
from thunderagent_nova.profile import load
from thunderagent_nova.scheduler import Scheduler
from thunderagent_nova.server import NovaServer

SHUTDOWN_S = 5.0
"""Time limit for running answers."""


def run(config: NovaConfig) -> int:
    """Serve until a signal; 1 if nobody can listen there."""
    engine, codec = build(config)
    try:
        uvloop.run(serve(config, engine, codec))
    except OSError as error:
        print(f"thunderagent: error: cannot serve on {config.host}:{config.port}: {error}", file=sys.stderr)
        return 1
    return 0


def build(config: NovaConfig) -> tuple[Engine, Codec]:
    """Load the model and its codec; ConfigurationError if that fails."""
    if not config.model.is_dir():
        raise ConfigurationError(f"{config.model} is not a folder")
    transformers.utils.logging.disable_progress_bar()
    best = "cuda" if torch.cuda.is_available() else "cpu"
    device = torch.device(best if config.device == "auto" else config.device)
    try:
        vlm = Vlm.load(str(config.model), device=device, dtype=_dtype_of(config.dtype, device))
        codec = Codec(
            config.model, vlm.model.config, most_pixels=config.max_image_pixels, most_tokens=config.slot_tokens
        )
        pool = _pool_of(config, device)
        split_policy = _split_policy_of(config, pool)
    except (OSError, ValueError, PartitionError) as error:
        raise ConfigurationError(f"cannot serve {config.model}: {error}") from error
    scheduler = Scheduler(
        config.policy,
        slots=config.slots,
        split_policy=split_policy,
        decode_limit=config.decode_limit,
        budget_tokens=config.budget_tokens,
    )
    sizes = EngineConfig(
        slots=config.slots,
        slot_tokens=config.slot_tokens,
        keep_slots=config.keep_slots,
        cached_images=config.cached_images,
        offload_physical_layers=config.physical_layers,
        offload_resident_layers=config.resident_layers,
    )
    return Engine(vlm, pool, scheduler, sizes), codec


async def serve(config: NovaConfig, engine: Engine, codec: Codec) -> None:
    """Serve until SIGINT or SIGTERM; print the URL, once it is ready."""
    stop, name = asyncio.Event(), config.name
    for number in (signal.SIGINT, signal.SIGTERM):
        asyncio.get_running_loop().add_signal_handler(number, stop.set)
    await engine.start()
    server = NovaServer(engine, codec, name, max_waiting=config.max_waiting)
    # A client that leaves cancels its handler, and so its request.
    runner = web.AppRunner(server.app, handler_cancellation=True, access_log=None, shutdown_timeout=SHUTDOWN_S)
    try:
        await runner.setup()
        site = web.TCPSite(runner, config.host, config.port)
        await site.start()
        port = runner.addresses[0][1]
        print(f"nova ready at http://{config.host}:{port}: {name}, {config.policy}, {config.split}", flush=True)
        await stop.wait()
    finally:
        await runner.cleanup()
        await engine.stop()


def _dtype_of(name: str, device: torch.device) -> Any:
    if name == "auto":
        return torch.bfloat16 if device.type == "cuda" else torch.float32
    return getattr(torch, name)


def _pool_of(config: NovaConfig, device: torch.device) -> Pool:
    """Return lanes: disjoint ones for `nova`, otherwise the whole device for all."""
    is_split = config.policy == "nova"
    if device.type == "cuda":
        units = torch.cuda.get_device_properties(device).multi_processor_count
        counts = tuple(range(config.share_step, units, config.share_step))
        return green_pool(device, counts) if is_split else StreamPool(device)
    pool = CorePool()
    return pool if is_split and pool.splits else NullPool()


def _split_policy_of(config: NovaConfig, pool: Pool) -> SplitPolicy:
    if config.policy != "nova" or not pool.splits:
        return Whole()
    static = static_split(config.split)
    if static is not None:
        return Static(*static)
    if config.profile is not None:
        return adaptive_of(load(config.profile), config.output_tokens)
    return paper_like(pool.units, pool.splits)
