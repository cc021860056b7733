"""What every engine kind must report about a replica, under whatever name."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, NamedTuple, Protocol

if TYPE_CHECKING:
    from multidict import CIMultiDict


@dataclass(frozen=True, slots=True)
class ReplicaReading:
    """One poll of one replica; None is what it did not report, which is never the same as zero.

    Counts and totals are sums over the replica's data-parallel ranks, ratios the mean over them. Totals start again
    from zero when the engine does.

    - `capacity_tokens`: the size of the KV pool. Never zero: an engine that reports no pool has not told its size.
    - `kv_used_ratio`: 0 to 1; the part of the pool that running requests reference. Blocks that are only cached count
      as free, so a program whose tool runs is invisible here.
    - `running_count`, `waiting_count`: requests in the engine's batch, and in its queue.
    - `pending_encode_count`: requests whose images are being or waiting to be encoded, of an engine that encodes one
      after the other and decodes meanwhile.
    - `preemptions_total`: requests thrown out of the batch for lack of blocks; an engine where it grows thrashes.
    - `cache_query_tokens_total`, `cache_hit_tokens_total`: prompt tokens looked up in the prefix cache, and found
      there.
    - `tier_query_tokens_total`, `tier_hit_tokens_total`: prompt tokens that the pool missed and that were looked up in
      a tier behind it (host memory, a disk, a store), and found there. None until an engine has such a tier and it was
      asked once.
    - `tier_tokens`: the size of that tier, in host memory.
    - `computed_tokens_total`: prompt tokens that were computed, not found in any cache; `generated_tokens_total`,
      `iterations_total`: tokens and iterations of the engine. None of these where prompts are computed elsewhere.
    - `progress_total`: a sum of counters that grows with every step of an engine that has work, whatever they count.
    - `uncached_ranks_count`: ranks whose prefix cache is turned off. Programs gain nothing there.
    - `started_s`: when its process began, by its own clock, in seconds since 1970.
    - `models`: the names in its list at `/v1/models`, including LoRA adapters; empty if it has no such list.
    - `age_s`: how long ago the engine was asked: later changes may not be in it. Not reported by the engine.
    """

    capacity_tokens: int | None = None
    kv_used_ratio: float | None = None
    running_count: int | None = None
    waiting_count: int | None = None
    pending_encode_count: int | None = None
    preemptions_total: float | None = None
    cache_query_tokens_total: float | None = None
    cache_hit_tokens_total: float | None = None
    tier_query_tokens_total: float | None = None
    tier_hit_tokens_total: float | None = None
    tier_tokens: int | None = None
    computed_tokens_total: float | None = None
    generated_tokens_total: float | None = None
    iterations_total: float | None = None
    progress_total: float | None = None
    uncached_ranks_count: int | None = None
    started_s: float | None = None
    models: tuple[str, ...] | None = field(default=None, compare=False)
    age_s: float = field(default=0.0, compare=False)


NOTHING_READ = ReplicaReading()


class NamedTurn(NamedTuple):
    """A turn's body with the names by which the engine will know it.

    `engine_request_id` is our id for the request, empty if it has none; `is_tagged` says whether the engine will know
    the turn's KV cache as its program's. `session_id` goes into a header, unless it is empty.
    """

    body: bytes
    engine_request_id: str = ""
    is_tagged: bool = False
    session_id: str = ""


class Notice(NamedTuple):
    """A notice to an engine: the path and the JSON of a POST."""

    path: str
    body: bytes


class Notices(Protocol):
    """How to tell an engine kind what it cannot see: that a client left its turn, that a program ended."""

    def name_turn(self, path: str, body: bytes, program_id: str | None, *, tags_programs: bool) -> NamedTurn:
        """Return a turn's body with our id and, if `tags_programs`, its program's id; never raise.

        Bytes are only inserted: the client's own names are left unchanged.
        """

    def turn_left(self, engine_request_id: str) -> Notice:
        """Return the notice that ends a request."""

    def program_ended(self, program_id: str) -> Notice:
        """Return the notice that frees the memory tagged with a program."""


class Priorities(Protocol):
    """How to give an engine kind the priority of a turn."""

    @property
    def info_path(self) -> str:
        """Return the path whose answer says whether it has priorities, and which go first; empty if there is none."""

    def read_polarity(self, info: bytes) -> int:
        """Return 1 if lower numbers go first, -1 if higher ones do, 0 if it has no priorities; never raise."""

    def put(self, path: str, body: bytes, headers: CIMultiDict[str], priority: int) -> bytes:
        """Return a turn's body with its priority, or put that into its headers; never raise.

        A priority from the client is kept. A body that cannot hold a priority is returned unchanged.
        """

    def is_refusal(self, answer: bytes) -> bool:
        """Return whether an answer with status 400 means that the engine has no priorities."""


class Backend(Protocol):
    """One engine kind: where it reports its health and metrics, and what the metrics mean."""

    @property
    def kind(self) -> str:
        """Return this kind's name in the configuration."""

    @property
    def metrics_path(self) -> str:
        """Return the path of the Prometheus exposition, relative to the replica's URL."""

    @property
    def health_path(self) -> str:
        """Return the path that answers 2xx while the engine can serve, relative to the replica's URL."""

    @property
    def info_paths(self) -> tuple[str, ...]:
        """Return the paths that report its capacity if its metrics do not, the newest first; empty if none."""

    @property
    def notices(self) -> Notices | None:
        """Return how to tell it of turns and programs; None for a kind that learns all from the connection."""

    @property
    def priorities(self) -> Priorities | None:
        """Return how to give it priorities; None for a kind for which that is unknown."""

    @property
    def observed_paths(self) -> tuple[str, ...]:
        """Return the paths whose JSON has `is_paused` or `weight_version`; an engine may not serve them."""

    @property
    def readiness_path(self) -> str:
        """Return the path that answers 503 while the engine is paused, and 200 otherwise; empty if there is none."""

    @property
    def plugin_path(self) -> str:
        """Return the path where an engine answers whose scheduler knows programs; empty if there is no such plugin."""

    @property
    def rank_label(self) -> str:
        """Return the label of its metrics for the data-parallel rank."""

    @property
    def rank_header(self) -> str:
        """Return the header of a request that chooses the data-parallel rank."""

    @property
    def refuses_models(self) -> bool:
        """Return whether it rejects models that it does not list; others answer as if these were their own."""

    def read_metrics(self, exposition: str, ranks_count: int = 1) -> ReplicaReading:
        """Read an exposition, or the lines of one of `ranks_count` ranks; never raise: unreadable values are None."""

    def read_info(self, info: str) -> int | None:
        """Read the capacity, in tokens, from the answer of one of `info_paths`; never raise: None if missing."""

    def read_uncached(self, info: str) -> bool | None:
        """Read from the same whether its prefix cache is turned off; never raise: None if missing."""
