"""An engine's configuration, requests and reports: values only."""

from __future__ import annotations

from dataclasses import dataclass, field
from math import inf
from typing import TYPE_CHECKING, Any, Literal, Self, TypeAlias, get_args

from thunderagent.simulator.engine.timing import IterationWork, TimingProfile, profile

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from thunderagent.simulator.engine.sequences import Discipline

SchedulingPolicy: TypeAlias = Literal["fcfs", "priority"]


@dataclass(frozen=True, slots=True)
class EngineConfig:
    """Fix the size and the rules of an engine, under vLLM's names.

    `kv_tokens` is rounded down to whole blocks; `max_model_len` (tokens of a prompt and its output) defaults to all of
    them and cannot be more, so that every request that is accepted can run alone. With `tier_tokens` it has a tier of
    that size behind its pool, from which a token is restored in `restore_token_s` seconds (`tier.py`). `discipline`
    makes an engine that does not serve as vLLM does, for those who try such. Raises ValueError.
    """

    kv_tokens: int
    block_size: int = 16
    max_num_batched_tokens: int = 2048
    max_num_seqs: int = 256
    max_model_len: int | None = None
    scheduling_policy: SchedulingPolicy = "fcfs"
    timing: TimingProfile = field(default_factory=lambda: profile("demo"))
    tier_tokens: int = 0
    restore_token_s: float = 0.0
    discipline: Callable[[], Discipline] | None = None

    def __post_init__(self) -> None:
        for name in ("kv_tokens", "block_size", "max_num_batched_tokens", "max_num_seqs"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be at least 1, got {getattr(self, name)}")
        if self.block_count < 1:
            raise ValueError(f"kv_tokens ({self.kv_tokens}) must hold one block of {self.block_size} tokens")
        if self.max_model_len is not None and not 2 <= self.max_model_len <= self.capacity_tokens:
            raise ValueError(
                f"max_model_len ({self.max_model_len}) must be at least 2 and at most the KV pool, "
                f"{self.capacity_tokens} tokens in {self.block_count} blocks"
            )
        if self.tier_tokens < 0 or not 0 <= self.restore_token_s < inf:
            raise ValueError(
                f"tier_tokens and restore_token_s must be 0 or more, got {self.tier_tokens} and {self.restore_token_s}"
            )
        if self.scheduling_policy not in get_args(SchedulingPolicy):
            raise ValueError(f"scheduling_policy must be fcfs or priority, got {self.scheduling_policy!r}")

    @classmethod
    def of(
        cls,
        timing: TimingProfile,
        *,
        kv_tokens: int | None = None,
        block_size: int | None = None,
        max_num_batched_tokens: int | None = None,
    ) -> Self:
        """Return an engine with that timing and the sizes given, or else those of the engine that was measured.

        Raises ValueError if nobody knows the size of its pool.
        """
        sizes: dict[str, Any] = timing.sizes(
            kv_tokens=kv_tokens, block_size=block_size, max_num_batched_tokens=max_num_batched_tokens
        )
        if "kv_tokens" not in sizes:
            raise ValueError(f"the KV pool of profile {timing.name} is not known: give --kv-tokens")
        return cls(**sizes, timing=timing)

    @property
    def block_count(self) -> int:
        """Return the number of blocks in the pool."""
        return self.kv_tokens // self.block_size

    @property
    def tier_block_count(self) -> int:
        """Return the number of blocks in the tier behind the pool; 0 if there is none."""
        return self.tier_tokens // self.block_size

    @property
    def capacity_tokens(self) -> int:
        """Return how many tokens the pool holds."""
        return self.block_count * self.block_size

    @property
    def context_limit_tokens(self) -> int:
        """Return how many tokens a prompt and its output may have together."""
        return self.capacity_tokens if self.max_model_len is None else self.max_model_len


@dataclass(slots=True)
class EngineRequest:
    """Ask for an output: the caller already knows what the engine is going to say, the engine says when.

    Both token sequences hold at least one token. `keys` are those of all full blocks of prompt and output together,
    from a caller who has such for every request (`contexts.py`); else the tokens are hashed.
    With a `retain_id` its blocks are retained when it is finished, for the next request with that id; no vLLM does.
    """

    request_id: str
    prompt_token_ids: Sequence[int]
    output_token_ids: Sequence[int]
    priority: int = 0
    keys: Sequence[int] | None = None
    retain_id: str = ""


@dataclass(frozen=True, slots=True)
class Admission:
    """Report that a request began to run: `cached_tokens` of its `context_tokens` were found, here or in the tier.

    `context_tokens` is the prompt, and after a preemption (`is_readmission`) also what was generated before.
    """

    request_id: str
    context_tokens: int
    cached_tokens: int
    is_readmission: bool


@dataclass(slots=True)
class FinishedRequest:
    """Report a finished request.

    `cached_tokens` is what its first admission found; the times are the caller's, each at the end of its iteration.
    """

    request_id: str
    prompt_tokens: int
    generated_tokens: int
    cached_tokens: int
    preemption_count: int
    arrival_s: float
    first_token_s: float
    finished_s: float


@dataclass(slots=True)
class StepResult:
    """Report one iteration, which began at the `now_s` of the call and takes `duration_s`.

    Each request in `generated` got exactly one token, and those in `finished` their last; both hold at the end of the
    iteration. `admitted` and `preempted` hold at its begin, in the order in which they happened.
    """

    duration_s: float
    work: IterationWork
    generated: tuple[str, ...] = ()
    finished: tuple[FinishedRequest, ...] = ()
    admitted: tuple[Admission, ...] = ()
    preempted: tuple[str, ...] = ()


@dataclass(slots=True)
class EngineStats:
    """Show an engine's gauges and its counters since its start, counted as vLLM counts them.

    A prompt counts with its first token, and so does the part of it that was computed. Prefix queries and hits are in
    tokens and count first admissions only; those of the tier are what the pool had not, and what of that the tier had.
    Lost blocks were full, and lost their content to others.
    """

    running_count: int
    waiting_count: int
    used_block_count: int
    block_count: int
    prompt_tokens: int
    generated_tokens: int
    prefix_query_tokens: int
    prefix_hit_tokens: int
    preemption_count: int
    aborted_count: int
    computed_tokens: int = 0
    iteration_count: int = 0
    tier_query_tokens: int = 0
    tier_hit_tokens: int = 0
    tier_block_count: int = 0
    lost_block_count: int = 0

    @property
    def kv_usage_ratio(self) -> float:
        """Return the share of the pool that running requests reference."""
        return self.used_block_count / self.block_count
