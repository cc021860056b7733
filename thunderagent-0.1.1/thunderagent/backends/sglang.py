"""SGLang: what its metrics and its server information mean (its document "Production Metrics"; `--enable-metrics`).

Theory of operation
-------------------
What a scheduler of SGLang says of itself carries the labels `dp_rank` (absent where there is one rank), `tp_rank`,
`pp_rank` and, with priorities, `priority`. Ranks of tensor and pipeline parallelism are parts of one pool and say the
same numbers (all of them do with `--enable-metrics-for-all-schedulers`), and a series with a priority is a part of the
one without. So of all series of one `dp_rank` the largest counts. Data-parallel ranks are summed: each has a pool of
its own, and `sglang:max_total_num_tokens` is that of the rank that says it. Token counters come from the tokenizer
process, once for all ranks, and are summed. Newer versions count cached tokens by `cache_source`: those of `device` lay
in the pool, those of `host` and `storage…` were loaded from HiCache's tiers behind it (`--enable-hierarchical-cache`).

Versions that set their gauges at the first batch say no capacity before it, and servers without metrics never do. Then
`/server_info` is asked (`/get_server_info` in older versions), which tells each data-parallel rank's own pool. It alone
says whether the radix cache is disabled.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Annotated, Final

import msgspec

from thunderagent.backends.base import ReplicaReading
from thunderagent.backends.exposition import STARTED, is_sane, samples_of, started_s_of
from thunderagent.backends.priority_field import REFUSAL, with_priority
from thunderagent.backends.sglang_notices import PATHS, SglangNotices

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from multidict import CIMultiDict
    from prometheus_client.samples import Sample

CAPACITY: Final = "sglang:max_total_num_tokens"
KV_USED: Final = "sglang:kv_used_tokens"  # since April 2026
TOKEN_USAGE: Final = "sglang:token_usage"  # noqa: S105 - a ratio, and no secret
RUNNING: Final = "sglang:num_running_reqs"
WAITING: Final = "sglang:num_queue_reqs"
RETRACTIONS: Final = "sglang:num_retracted_requests_total"
PROMPT_TOKENS: Final = "sglang:prompt_tokens_total"
TIER_TOKENS: Final = "sglang:hicache_host_total_tokens"
CACHED_TOKENS: Final = "sglang:cached_tokens_total"  # newer versions: one series for each `cache_source`

_Count = Annotated[int, msgspec.Meta(ge=0, le=2**62)]
_NEEDED: Final = (
    STARTED,
    CAPACITY,
    KV_USED,
    TOKEN_USAGE,
    RUNNING,
    WAITING,
    RETRACTIONS,
    PROMPT_TOKENS,
    CACHED_TOKENS,
    TIER_TOKENS,
)


@dataclass(frozen=True, slots=True)
class SglangPriorities:
    """Higher goes first unless the engine is configured otherwise; none without `--enable-priority-scheduling`."""

    info_path: str = "/server_info"

    def read_polarity(self, info: bytes) -> int:
        """Return the polarity in the server's information; 0 if it is invalid."""
        try:
            said = msgspec.json.decode(info, type=_PriorityInfo)
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
            return 0
        if not said.enable_priority_scheduling:
            return 0
        return 1 if said.schedule_low_priority_values_first else -1

    def put(self, path: str, body: bytes, headers: CIMultiDict[str], priority: int) -> bytes:  # noqa: ARG002
        """Put the field in."""
        return with_priority(body, priority) if path in PATHS else body

    def is_refusal(self, answer: bytes) -> bool:
        """Say whether the engine complains of a priority."""
        return REFUSAL.search(answer) is not None


@dataclass(frozen=True, slots=True)
class SglangBackend:
    """Read SGLang."""

    kind: str = "sglang"
    refuses_models: bool = False
    metrics_path: str = "/metrics"
    health_path: str = "/health"
    info_paths: tuple[str, ...] = ("/server_info", "/get_server_info")
    rank_label: str = "dp_rank"
    rank_header: str = "X-Data-Parallel-Rank"
    observed_paths: tuple[str, ...] = ("/model_info",)
    readiness_path: str = "/ready"  # older versions have none, and no substitute
    plugin_path: str = ""
    notices: SglangNotices = field(default_factory=SglangNotices)
    priorities: SglangPriorities = SglangPriorities()

    def read_metrics(self, exposition: str, ranks_count: int = 1) -> ReplicaReading:  # noqa: ARG002 - the protocol's
        """Read an exposition; never raise: unreadable values are None."""
        samples = samples_of(exposition, _NEEDED)
        capacities_tokens = _by_rank(samples.get(CAPACITY, ()))
        capacity_tokens = _capacity_tokens(capacities_tokens)
        asked = _total(sample.value for sample in samples.get(PROMPT_TOKENS, ()))
        cached, loaded = _cached_tokens(samples.get(CACHED_TOKENS, ()))
        return ReplicaReading(
            capacity_tokens=capacity_tokens,
            kv_used_ratio=_kv_used_ratio(samples, capacity_tokens),
            running_count=_count(_by_rank(samples.get(RUNNING, ()))),
            waiting_count=_count(_by_rank(samples.get(WAITING, ()))),
            preemptions_total=_total(_by_rank(samples.get(RETRACTIONS, ())).values()),
            cache_query_tokens_total=asked,
            cache_hit_tokens_total=cached,
            tier_query_tokens_total=max(0.0, asked - (cached or 0.0)) if loaded is not None and asked else None,
            tier_hit_tokens_total=loaded,
            tier_tokens=_capacity_tokens(_by_rank(samples.get(TIER_TOKENS, ()))),
            started_s=started_s_of(samples),
        )

    def read_info(self, info: str) -> int | None:
        """Read the pool's size from the server's information, over all ranks; None if it is invalid."""
        try:
            said = msgspec.json.decode(info, type=_ServerInfo)
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
            return None
        ranks_tokens = [state.memory_usage.token_capacity for state in said.internal_states if state.memory_usage]
        if ranks_tokens and len(ranks_tokens) == len(said.internal_states) and all(ranks_tokens):
            return sum(ranks_tokens)
        return said.max_total_num_tokens * said.dp_size or None

    def read_uncached(self, info: str) -> bool | None:
        """Read whether the radix cache is disabled; None if it is invalid, or does not say so."""
        try:
            return msgspec.json.decode(info, type=_CacheInfo).disable_radix_cache
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
            return None


class _PriorityInfo(msgspec.Struct):
    enable_priority_scheduling: bool = False
    schedule_low_priority_values_first: bool = False


class _CacheInfo(msgspec.Struct):
    disable_radix_cache: bool | None = None


class _MemoryUsage(msgspec.Struct):
    token_capacity: _Count = 0


class _InternalState(msgspec.Struct):
    memory_usage: _MemoryUsage | None = None


class _ServerInfo(msgspec.Struct):
    """The needed parts: what the first rank reported at its start, and what each reports now."""

    max_total_num_tokens: _Count = 0
    dp_size: _Count = 1
    internal_states: list[_InternalState] = []


def _by_rank(samples: Iterable[Sample]) -> dict[str, float]:
    """Return the largest value of each data-parallel rank; nothing at all if any of them is implausible."""
    by_rank: dict[str, float] = {}
    for sample in samples:
        if not is_sane(sample.value):
            return {}
        rank = sample.labels.get("dp_rank", "")
        by_rank[rank] = max(by_rank.get(rank, 0.0), sample.value)
    return by_rank


def _capacity_tokens(by_rank: Mapping[str, float]) -> int | None:
    """Return the total size of the pools; None while a rank reports an empty one, which is no size."""
    return int(sum(by_rank.values())) if by_rank and all(by_rank.values()) else None


def _kv_used_ratio(samples: Mapping[str, Iterable[Sample]], capacity_tokens: int | None) -> float | None:
    """Return the used ratio of the pools; for versions without token counts, the mean of the ranks' ratios."""
    used_tokens = _by_rank(samples.get(KV_USED, ()))
    if used_tokens and capacity_tokens:
        return min(1.0, sum(used_tokens.values()) / capacity_tokens)
    ratios = _by_rank(samples.get(TOKEN_USAGE, ()))
    return min(1.0, sum(ratios.values()) / len(ratios)) if ratios else None


def _cached_tokens(samples: Iterable[Sample]) -> tuple[float | None, float | None]:
    """Return how many tokens were found in the pool, and how many were loaded; None without a tier behind it."""
    pool: list[float] = []
    tiers: list[float] = []
    for sample in samples:
        source = sample.labels.get("cache_source", "")
        (tiers if source == "host" or source.startswith("storage") else pool).append(sample.value)
    loaded = _total(tiers)
    return (_total(pool) or 0.0) if loaded is not None and not pool else _total(pool), loaded


def _count(by_rank: Mapping[str, float]) -> int | None:
    return int(sum(by_rank.values())) if by_rank else None


def _total(values: Iterable[float]) -> float | None:
    known = list(values)
    return sum(known) if known and all(map(is_sane, known)) else None
