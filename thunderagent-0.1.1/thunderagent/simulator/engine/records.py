"""An engine's configuration, requests and reports; its data on each request inside it, and the plan of an iteration."""

from __future__ import annotations

from dataclasses import dataclass, field
from math import inf
from typing import TYPE_CHECKING, Any, Literal, Protocol, Self, TypeAlias, get_args

from thunderagent.simulator.engine.blocks import ROOT_HASH, BlockPool, Holding
from thunderagent.simulator.engine.timing import IterationWork, TimingProfile, profile

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

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


@dataclass(slots=True, eq=False, weakref_slot=True)
class EngineSequence:
    """One request inside the engine. `known` tokens are the prompt and what was generated; `computed` have KV.

    While it is in a batch of decoding ones, both are as they were when it joined (`decoding.py`).
    """

    request: EngineRequest
    rank: tuple[int, int]
    keys: Sequence[int]
    arrival_s: float
    prompt_tokens: int
    end_tokens: int
    known_tokens: int
    computed_tokens: int = 0
    blocks: Holding = field(default_factory=Holding)
    published_count: int = 0
    cached_tokens: int | None = None
    preemption_count: int = 0
    first_token_s: float = 0.0
    refused_at: tuple[int, int] | None = None
    served_s: float = 0.0

    @property
    def request_id(self) -> str:
        """Return the id of its request."""
        return self.request.request_id

    @property
    def generated_tokens(self) -> int:
        """Return how many tokens it has got."""
        return self.known_tokens - self.prompt_tokens

    @property
    def is_decoding(self) -> bool:
        """Say whether all but its last token is computed, and that was generated."""
        return self.known_tokens > self.prompt_tokens and self.computed_tokens == self.known_tokens - 1

    def publish(self, pool: BlockPool, full_count: int) -> None:
        """Make its blocks findable up to that many, some of which are not yet."""
        begin, keys = self.published_count, self.keys
        parent = keys[begin - 1] if begin else ROOT_HASH
        if full_count == begin + 1:
            pool.publish_one(self.blocks, keys[begin], parent)
        else:
            pool.publish(self.blocks, keys[begin:full_count], parent)
        self.published_count = full_count


def rank_of(sequence: EngineSequence) -> tuple[int, int]:
    """Return the sort key of waiting requests."""
    return sequence.rank


class Discipline(Protocol):
    """How an engine serves running requests, if not like vLLM; one for each engine.

    With a discipline, a chunk of a prompt that does not fit in the free blocks is halved until it does, down to one
    block, before anybody is preempted; and a prompt is admitted only if the running ones will fit, too.
    """

    def in_order(self, running: Sequence[EngineSequence], now_s: float) -> Sequence[EngineSequence]:
        """Return the running requests in this iteration's serving order."""

    def most_tokens(self, sequence: EngineSequence, now_s: float) -> int:
        """Return the limit of a prompt's tokens in this iteration, if there are others."""

    def victim(self, running: Sequence[EngineSequence], now_s: float) -> EngineSequence:
        """Return the request to preempt."""

    def preempted(self, sequence: EngineSequence) -> None:
        """Give a preempted sequence the rank at which it waits."""

    def served(self, sequence: EngineSequence, tokens: int, end_s: float) -> None:
        """Learn that `tokens` tokens of a sequence are computed, before they count."""


@dataclass(slots=True)
class Plan:
    """The plan of an iteration: the number of tokens per sequence, besides those of the batch.

    `restored_tokens` are copied into the pool from the tier behind it, and not computed.
    """

    budget_tokens: int
    now_s: float = 0.0
    restored_tokens: int = 0
    chunks: dict[EngineSequence, int] = field(default_factory=dict)
    admitted: list[Admission] = field(default_factory=list)
    preempted: list[str] = field(default_factory=list)

    def add(self, sequence: EngineSequence, tokens: int) -> None:
        """Compute tokens of a sequence."""
        self.chunks[sequence] = tokens
        self.budget_tokens -= tokens

    def remove(self, sequence: EngineSequence) -> None:
        """Compute nothing of a sequence."""
        self.budget_tokens += self.chunks.pop(sequence, 0)

    def work(self, decode_count: int, decode_context_tokens: int) -> IterationWork:
        """Return the total work, together with the decoding batch."""
        prefill_tokens = 0
        attention_pairs = 0.0
        for sequence, tokens in self.chunks.items():
            if sequence.is_decoding:
                decode_count += 1
                decode_context_tokens += sequence.known_tokens
            else:
                prefill_tokens += tokens
                attention_pairs += tokens * (sequence.computed_tokens + tokens / 2)
        return IterationWork(prefill_tokens, attention_pairs, decode_count, decode_context_tokens)
