"""The embedded engine's configuration, also from a command line."""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import get_args

from thunderagent.simulator.engine.records import EngineConfig, SchedulingPolicy
from thunderagent.simulator.engine.timing import load_profiles, profile_from


@dataclass(frozen=True, slots=True)
class ServerConfig:
    """Where an engine is served, under which name, and how fast its time passes.

    `speed` divides every duration: 2 makes the engine twice as fast. `port` 0 takes a free one. `seed` changes what is
    generated. `grace_s` is how long a shutdown lets requests finish. `end_with_stdin` ends the engine when its standard
    input does, so that it cannot outlive its parent. `data_parallel_count` engines, each configured by `engine`, run
    behind the one address. `keep_zombies` continues whole answers whose client left, like some versions of SGLang.
    `clock` returns the time in seconds, like the event loop's. Raises ValueError.
    """

    engine: EngineConfig
    host: str = "127.0.0.1"
    port: int = 8100
    model: str = "simulated"
    speed: float = 1.0
    seed: int = 0
    grace_s: float = 2.0
    end_with_stdin: bool = False
    data_parallel_count: int = 1
    keep_zombies: bool = False
    clock: Callable[[], float] = time.monotonic

    def __post_init__(self) -> None:
        if not 0 <= self.port <= 65535:
            raise ValueError(f"port must be 0 to 65535, got {self.port}")
        if not 1 <= self.data_parallel_count <= 64:
            raise ValueError(f"data-parallel-size must be 1 to 64, got {self.data_parallel_count}")
        if not self.model:
            raise ValueError("the model needs a name")
        if not 0 < self.speed < float("inf"):
            raise ValueError(f"speed must be a positive number, got {self.speed}")
        if not 0 <= self.grace_s < float("inf"):
            raise ValueError(f"grace_s must be a number of seconds, 0 or more, got {self.grace_s}")


def add_tier_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of the tier behind the pools."""
    add = parser.add_argument
    add(
        "--tier-tokens",
        type=int,
        default=0,
        metavar="N",
        help="tier behind each KV pool, as a host's memory, in tokens: what the pool evicts goes there (default: none)",
    )
    add(
        "--restore-us",
        type=float,
        default=5.0,
        metavar="US",
        help="microseconds to copy a token back from the tier: the bytes of its KV by those of the bus a second "
        "(default: %(default)g)",
    )


def with_tier(engine: EngineConfig, args: argparse.Namespace) -> EngineConfig:
    """Return an engine with the tier of the options. Raises ValueError."""
    return replace(engine, tier_tokens=args.tier_tokens, restore_token_s=args.restore_us / 1e6)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of the embedded engine to a command's parser."""
    add = parser.add_argument
    add("--host", default="127.0.0.1", help="address to listen on (default: %(default)s)")
    add("--port", type=int, default=8100, help="port to listen on; 0 takes a free one (default: %(default)s)")
    add("--model", default="simulated", metavar="NAME", help="served model name (default: %(default)s)")
    add(
        "--profile",
        default="demo",
        metavar="NAME|FILE.toml",
        help="whose iteration times to keep: a file that `thunderagent calibrate` wrote, or one of "
        f"{', '.join(sorted(load_profiles()))}. demo is a small engine on which prefill is dear, so that it thrashes "
        "within a minute; instant takes no time at all (default: %(default)s)",
    )
    add(
        "--kv-tokens",
        type=int,
        metavar="N",
        help="KV pool in tokens. Programs whose contexts do not fit in it together evict each other: make it small "
        "to see thrashing (default: the profile's own, where it is known)",
    )
    add("--block-size", type=int, metavar="N", help="tokens in a KV block (default: the profile's own, or 16)")
    add_tier_arguments(parser)
    add(
        "--max-model-len",
        type=int,
        metavar="N",
        help="longest prompt and output together, in tokens (default: the whole pool)",
    )
    add(
        "--max-num-batched-tokens",
        type=int,
        metavar="N",
        help="tokens computed in one iteration at most; a longer prompt is prefilled in chunks (default: the profile's "
        "own, or 2048)",
    )
    add(
        "--max-num-seqs",
        type=int,
        default=256,
        metavar="N",
        help="requests that run at a time at most; the rest wait (default: %(default)s)",
    )
    add(
        "--scheduling-policy",
        default="fcfs",
        choices=get_args(SchedulingPolicy),
        help="which request runs first and is preempted last: fcfs goes by arrival; priority by a request's "
        "`priority`, lower first, which fcfs refuses (default: %(default)s)",
    )
    add(
        "--speed",
        type=float,
        default=1.0,
        metavar="X",
        help="divide every duration: 10 is ten times as fast (default: %(default)s)",
    )
    add("--seed", type=int, default=0, metavar="N", help="vary the generated words and lengths (default: %(default)s)")
    add(
        "--grace-s",
        type=float,
        default=2.0,
        metavar="S",
        help="seconds that requests in flight may take to finish after SIGTERM (default: %(default)s)",
    )
    add(
        "--data-parallel-size",
        type=int,
        default=1,
        metavar="N",
        help="run N engines behind the one address, each with a pool of its own; the header X-data-parallel-rank "
        "chooses (default: %(default)s)",
    )
    add("--end-with-stdin", action="store_true", help="end when standard input does, as if by SIGTERM")


def config_from(args: argparse.Namespace) -> ServerConfig:
    """Build the configuration from parsed options; ValueError says why it is impossible."""
    engine = EngineConfig.of(
        profile_from(args.profile),
        kv_tokens=args.kv_tokens,
        block_size=args.block_size,
        max_num_batched_tokens=args.max_num_batched_tokens,
    )
    return ServerConfig(
        engine=replace(
            with_tier(engine, args),
            max_num_seqs=args.max_num_seqs,
            max_model_len=args.max_model_len,
            scheduling_policy=args.scheduling_policy,
        ),
        host=args.host,
        port=args.port,
        model=args.model,
        speed=args.speed,
        seed=args.seed,
        grace_s=args.grace_s,
        end_with_stdin=args.end_with_stdin,
        data_parallel_count=args.data_parallel_size,
    )
