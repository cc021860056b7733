"""Rollouts: what is recorded of each program's turns, and how much is kept."""

from __future__ import annotations

from pathlib import Path
from typing import Literal

from pydantic import Field

from thunderagent.config.slices import Slice


class Rollouts(Slice):
    """Rollouts."""

    rollouts: Literal["ids", "logprobs"] | None = Field(
        None,
        description="record each program's turns with their token ids, or with log probabilities too, as GET "
        "/programs/ID/trajectory returns them; off by default",
    )
    rollout_dir: Path | None = Field(
        None,
        description="folder for rollouts of ended programs, which only its owner may read; by default they stay in "
        "memory",
    )
    rollout_memory_bytes: int = Field(
        512 * 2**20,
        ge=2**20,
        description="most bytes of rollouts in memory: beyond it ended ones are dropped, first those that were read, "
        "then turns are recorded without tokens",
    )
    rollout_disk_bytes: int = Field(
        20 * 2**30,
        ge=2**20,
        description="most bytes of rollouts in rollout_dir: beyond it the oldest of the tenant with most are deleted",
    )
    rollout_keep_s: float = Field(
        3600.0, gt=0, description="how long a rollout is kept after its program's end, in seconds"
    )
    rollout_turns_count: int = Field(
        10_000, ge=1, description="turns of a program that are recorded with tokens; further ones without"
    )
    rollout_prefix: Literal["supply", "asked"] | None = Field(
        None,
        description="send chats that go on with the exact tokens of the turn before, where an engine takes them and "
        "they are certain: for all programs, or for those whose turns have X-Program-Prefix: supply; off by default",
    )
    fence: Literal["start", "turn"] | None = Field(
        None,
        description="salt engines' caches by their weights, so that a program reuses nothing that is older than its "
        "start, or a turn nothing that is older than its grant; off by default",
    )
    fence_max_lag_count: int | None = Field(
        None,
        ge=0,
        description="how often the weights may change between a program's first turn and any later one; "
        "X-Program-Staleness sets it for one program",
    )
    fence_when_stale: Literal["continue", "finish", "hold", "abort"] = Field(
        "continue",
        description="what becomes of a turn beyond that: it runs; it runs where weights are older, or gets an error; "
        "it waits for a replica with older ones; or the program's turns are aborted once the weights change",
    )
