"""vLLM: what its metrics mean (its document "Production Metrics"; V1, from 0.9 on).

The label `engine` is the data-parallel rank; a replica behind one URL may have several.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final, NamedTuple

import msgspec

from thunderagent.backends.base import ReplicaReading
from thunderagent.backends.exposition import STARTED, is_sane, samples_of, started_s_of
from thunderagent.backends.priority_field import PRIORITY_HEADER, REFUSAL, with_priority
from thunderagent.backends.vllm_plugin import PROGRAMS_PATH

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from multidict import CIMultiDict
    from prometheus_client.samples import Sample

CACHE_CONFIG: Final = "vllm:cache_config_info"

# Today's name first, then those of older versions.
KV_USED: Final = ("vllm:kv_cache_usage_perc", "vllm:gpu_cache_usage_perc")  # a ratio, despite its name
RUNNING: Final = ("vllm:num_requests_running",)
WAITING: Final = ("vllm:num_requests_waiting",)
PREEMPTIONS: Final = ("vllm:num_preemptions_total",)
CACHE_QUERIES: Final = ("vllm:prefix_cache_queries_total", "vllm:gpu_prefix_cache_queries_total")
CACHE_HITS: Final = ("vllm:prefix_cache_hits_total", "vllm:gpu_prefix_cache_hits_total")
# What the pool missed, and what a KV connector had of that: vLLM's own offloading, LMCache and others. Both exist, as
# zero, without a connector.
TIER_QUERIES: Final = ("vllm:external_prefix_cache_queries_total",)
TIER_HITS: Final = ("vllm:external_prefix_cache_hits_total",)
# Of vLLM's own offloading; a series for each of its tiers, of which the one in host memory has a size. Since 0.33.
TIER_CONFIG: Final = "vllm:kv_offload_config_info"
TIER_TOKENS: Final = "cpu_kv_cache_size_tokens"

KV_EVENT_SOURCES: Final = "/kv_event_sources"
"""Where an engine says on which addresses its ranks publish their KV events. Since 0.32."""
# What each iteration's time is spent on. Before 0.15 or so only all prompt tokens were counted, with those found.
COMPUTED: Final = "vllm:prompt_tokens_by_source_total"
COMPUTED_HERE: Final = "local_compute"
PROMPT_TOKENS: Final = ("vllm:prompt_tokens_total",)
GENERATED: Final = ("vllm:generation_tokens_total",)
ITERATIONS: Final = ("vllm:iteration_tokens_total_count",)

PROGRESS: Final = (
    "vllm:generation_tokens_total",
    "vllm:prompt_tokens_total",
    "vllm:iteration_tokens_total_count",
)
"""The last one counts steps, also those of a long prefill."""

_NEEDED: Final = (
    STARTED,
    *PROGRESS,
    CACHE_CONFIG,
    TIER_CONFIG,
    *KV_USED,
    *RUNNING,
    *WAITING,
    *PREEMPTIONS,
    *CACHE_QUERIES,
    *CACHE_HITS,
    *TIER_QUERIES,
    *TIER_HITS,
    COMPUTED,
    *PROMPT_TOKENS,
    *GENERATED,
    *ITERATIONS,
)


PRIORITY_PATHS: Final = ("/v1/chat/completions", "/v1/completions", "/v1/responses", "/inference/v1/generate")
"""Paths whose bodies have a field `priority`; others take the header, since 0.28."""


@dataclass(frozen=True, slots=True)
class VllmPriorities:
    """Lower goes first. An engine without `--scheduling-policy priority` rejects any but 0, or ignores it."""

    info_path: str = ""

    def read_polarity(self, info: bytes) -> int:  # noqa: ARG002 - the protocol's signature
        """Return 1, always."""
        return 1

    def put(self, path: str, body: bytes, headers: CIMultiDict[str], priority: int) -> bytes:
        """Put the field in, or otherwise the header."""
        if path in PRIORITY_PATHS:
            return body if PRIORITY_HEADER in headers else with_priority(body, priority)
        headers.setdefault(PRIORITY_HEADER, str(priority))
        return body

    def is_refusal(self, answer: bytes) -> bool:
        """Say whether the engine complains of a priority."""
        return REFUSAL.search(answer) is not None


@dataclass(frozen=True, slots=True)
class VllmBackend:
    """Read vLLM."""

    kind: str = "vllm"
    refuses_models: bool = True
    metrics_path: str = "/metrics"
    health_path: str = "/health"
    info_paths: tuple[str, ...] = ()
    notices: None = None
    priorities: VllmPriorities = VllmPriorities()
    observed_paths: tuple[str, ...] = ("/is_paused", "/weight_info")  # with VLLM_SERVER_DEV_MODE=1
    readiness_path: str = ""
    plugin_path: str = PROGRAMS_PATH
    rank_label: str = "engine"
    rank_header: str = "X-data-parallel-rank"

    def read_metrics(self, exposition: str, ranks_count: int = 1) -> ReplicaReading:
        """Read an exposition, or the lines of one of `ranks_count` ranks; never raise: unreadable values are None.

        About 1 ms for 500 KB.
        """
        samples = samples_of(exposition, _NEEDED)
        tier_queries = _total(_first_known(samples, TIER_QUERIES)) or None
        return ReplicaReading(
            capacity_tokens=_capacity_tokens(samples.get(CACHE_CONFIG, ()), ranks_count),
            kv_used_ratio=_mean(_first_known(samples, KV_USED)),
            running_count=_count(_first_known(samples, RUNNING)),
            waiting_count=_count(_first_known(samples, WAITING)),
            preemptions_total=_total(_first_known(samples, PREEMPTIONS)),
            cache_query_tokens_total=_total(_first_known(samples, CACHE_QUERIES)),
            cache_hit_tokens_total=_total(_first_known(samples, CACHE_HITS)),
            tier_query_tokens_total=tier_queries,
            tier_hit_tokens_total=_total(_first_known(samples, TIER_HITS)) if tier_queries else None,
            tier_tokens=_tier_tokens(samples.get(TIER_CONFIG, ())),
            computed_tokens_total=_computed_tokens(samples),
            generated_tokens_total=_total(_first_known(samples, GENERATED)),
            iterations_total=_total(_first_known(samples, ITERATIONS)),
            uncached_ranks_count=_uncached_ranks_count(samples.get(CACHE_CONFIG, ())),
            started_s=started_s_of(samples),
            progress_total=_total([value for name in PROGRESS for value in _first_known(samples, (name,))]),
        )

    def read_info(self, info: str) -> int | None:  # noqa: ARG002 - the protocol's signature
        """Read nothing: vLLM reports all in its metrics."""
        return None

    def read_uncached(self, info: str) -> bool | None:  # noqa: ARG002 - the protocol's signature
        """Return None: nothing but its metrics is read."""
        return None


def _first_known(samples: Mapping[str, Iterable[Sample]], names: Iterable[str]) -> list[float]:
    """Return the values, one per rank, of the first of `names` that has any."""
    for name in names:
        values = [sample.value for sample in samples.get(name, ())]
        if values:
            # An implausible value of one rank (such as NaN) makes the sum over all ranks invalid.
            return values if all(map(is_sane, values)) else []
    return []


def _computed_tokens(samples: Mapping[str, list[Sample]]) -> float | None:
    """Return the prompt tokens that were computed; of a version that does not say so, those not found in the pool."""
    here = [each.value for each in samples.get(COMPUTED, ()) if each.labels.get("source") == COMPUTED_HERE]
    if here:
        return sum(here) if all(map(is_sane, here)) else None
    asked, found = _total(_first_known(samples, PROMPT_TOKENS)), _total(_first_known(samples, CACHE_HITS))
    return None if asked is None or found is None else max(0.0, asked - found)


def _total(values: list[float]) -> float | None:
    return sum(values) if values else None


def _count(values: list[float]) -> int | None:
    return int(sum(values)) if values else None


def _mean(values: list[float]) -> float | None:
    return sum(values) / len(values) if values else None


def _capacity_tokens(samples: Iterable[Sample], ranks_count: int) -> int | None:
    """Return the KV pool's size summed over the ranks, or None while any rank does not report its own.

    An unknown or zero capacity is an alarm: as a number it would mean "no room" or "unlimited room", and the sum over
    only some of the ranks a pool that nobody has.
    """
    by_rank: dict[str, int | None] = {}
    blocks_tokens = 0
    for sample in samples:
        labels = sample.labels
        rank = labels.get("engine", "")
        # An info metric whose labels change leaves its old series behind: a size takes precedence over "None".
        by_rank[rank] = _positive(labels.get("kv_cache_size_tokens")) or by_rank.get(rank)
        block_count, block_size_tokens = _positive(labels.get("num_gpu_blocks")), _positive(labels.get("block_size"))
        blocks_tokens = max(blocks_tokens, (block_count or 0) * (block_size_tokens or 0))
    sizes_tokens = [tokens for tokens in by_rank.values() if tokens is not None]
    if sizes_tokens and len(sizes_tokens) == len(by_rank):
        return sum(sizes_tokens)
    # Before May 2026. vLLM counts the blocks of all its ranks, and reports that sum for each (its `core_client.py`).
    # Wrong for hybrid models, whose layer groups share the blocks, but the best available.
    return blocks_tokens // ranks_count or None


def _uncached_ranks_count(samples: Iterable[Sample]) -> int | None:
    """Return how many ranks have their prefix cache turned off; None if none says whether."""
    by_rank = {each.labels.get("engine", ""): each.labels.get("enable_prefix_caching") for each in samples}
    said = [word for word in by_rank.values() if word in ("True", "False")]
    return said.count("False") if said else None


def _tier_tokens(samples: Iterable[Sample]) -> int | None:
    """Return the size of the tiers in host memory, summed over the ranks; None if none reports its own."""
    return sum(_positive(sample.labels.get(TIER_TOKENS)) or 0 for sample in samples) or None


class KvAddresses(NamedTuple):
    """Where a rank publishes its KV events, and where it replays them, if it does."""

    address: str
    replay_address: str | None = None


class _KvSource(msgspec.Struct):
    enable_kv_cache_events: bool = False
    publisher: str = ""
    endpoint: str = ""
    replay_endpoint: str | None = None


def read_kv_event_sources(answer: bytes, host: str, rank_id: int = 0) -> KvAddresses | None:
    """Return where a rank of an engine on `host` publishes; None if it does not, or not for others to subscribe.

    vLLM waits for subscribers at the addresses with a `*`, and has added the rank to their ports. It connects to others
    by itself.
    """
    try:
        source = msgspec.json.decode(answer, type=dict[str, _KvSource]).get(str(rank_id))
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return None
    if source is None or not source.enable_kv_cache_events or source.publisher != "zmq":
        return None
    if (address := _seen_from_outside(source.endpoint, host)) is None:
        return None
    return KvAddresses(address, _seen_from_outside(source.replay_endpoint or "", host))


def _seen_from_outside(endpoint: str, host: str) -> str | None:
    match = _ANY_HOST.fullmatch(endpoint)
    return f"tcp://{f'[{host}]' if ':' in host else host}:{match['port']}" if match is not None else None


_ANY_HOST = re.compile(r"tcp://(?:\*|0\.0\.0\.0|\[::\]):(?P<port>[1-9][0-9]{0,4})")


def _positive(label: str | None) -> int | None:
    """Return the label as a positive number; None for anything else, such as an absent one, "None" or "0"."""
    if label is None or len(label) > 18 or not (label.isascii() and label.isdigit()):
        return None
    return int(label) or None
