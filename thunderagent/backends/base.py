"""What every engine kind must be able to say about a replica, whatever it calls it."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, NamedTuple, Protocol

if TYPE_CHECKING:
    from multidict import CIMultiDict


@dataclass(frozen=True, slots=True)
class ReplicaReading:
    """Hold what one poll of one replica said; None is what it did not say, which is never the same as zero.

    Counts and totals are sums over the replica's data-parallel ranks, ratios the mean over them. Totals start
    again from zero when the engine does.

    - `capacity_tokens`: the size of the KV pool. Never zero: an engine that claims no pool has not said its
      size.
    - `kv_used_ratio`: 0 to 1; the part of the pool that running requests reference. Blocks that are only
      cached count as free, so a program whose tool runs is invisible here.
    - `running_count`, `waiting_count`: requests in the engine's batch, and in its queue.
    - `pending_encode_count`: requests whose images are encoded or wait for it, of an engine that encodes one after the
      other and decodes meanwhile.
    - `preemptions_total`: requests thrown out of the batch for want of blocks; an engine where it grows
      thrashes.
    - `cache_query_tokens_total`, `cache_hit_tokens_total`: prompt tokens looked up in the prefix cache, and
      found there.
    - `tier_query_tokens_total`, `tier_hit_tokens_total`: prompt tokens that the pool had not and that were looked up in
      a tier behind it (memory of the host, a disk, a store), and found there. None until an engine has such a tier and
      it was asked once.
    - `models`: the names that it serves, of its list at `/v1/models`, LoRA adapters too; empty if it has no such list.
    - `age_s`: how long ago the engine was asked: what it did since then may not be in it. No part of what it said.
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
    models: tuple[str, ...] | None = field(default=None, compare=False)
    age_s: float = field(default=0.0, compare=False)


NOTHING_READ = ReplicaReading()


class NamedTurn(NamedTuple):
    """Hold a turn's body with the names that the engine is to know it by.

    `engine_request_id` is an id of ours for the request, empty if it has none; `is_tagged` says whether the engine will
    know the turn's KV cache as its program's.
    """

    body: bytes
    engine_request_id: str = ""
    is_tagged: bool = False


class Notice(NamedTuple):
    """Tell an engine something: the path and the JSON of a POST."""

    path: str
    body: bytes


class Notices(Protocol):
    """Know how to tell an engine kind what it cannot see: that a client left its turn, that a program ended."""

    def name_turn(self, path: str, body: bytes, program_id: str | None, *, tags_programs: bool) -> NamedTurn:
        """Return a turn's body with an id of ours in it and, if `tags_programs`, its program's; never raise.

        Only bytes are put in: what the client named itself is left as it is.
        """

    def turn_left(self, engine_request_id: str) -> Notice:
        """Return what ends a request."""

    def program_ended(self, program_id: str) -> Notice:
        """Return what gives the memory tagged with a program back."""


class Priorities(Protocol):
    """Know how an engine kind is given the priority of a turn."""

    @property
    def info_path(self) -> str:
        """Return the path whose answer says whether it has priorities, and which go first; empty if none does."""

    def read_polarity(self, info: bytes) -> int:
        """Return 1 if lower numbers go first, -1 if higher ones do, 0 if it has no priorities; never raise."""

    def put(self, path: str, body: bytes, headers: CIMultiDict[str], priority: int) -> bytes:
        """Return a turn's body with its priority, or put that into its headers; never raise.

        One that the client gave stays as it is. What is no body for a priority is returned as it is.
        """

    def is_refusal(self, answer: bytes) -> bool:
        """Say whether an answer with status 400 says that the engine has no priorities."""


class Backend(Protocol):
    """Know one engine kind: where it tells its health and its metrics, and what the metrics mean."""

    @property
    def kind(self) -> str:
        """Return the word for this kind in the configuration."""

    @property
    def metrics_path(self) -> str:
        """Return the path of the Prometheus exposition, from the replica's URL."""

    @property
    def health_path(self) -> str:
        """Return the path that answers 2xx while the engine can serve, from the replica's URL."""

    @property
    def info_paths(self) -> tuple[str, ...]:
        """Return where the engine says its capacity if its metrics do not, the newest path first; none if nowhere."""

    @property
    def notices(self) -> Notices | None:
        """Return how to tell it of turns and programs; None for a kind that sees all by the connection alone."""

    @property
    def priorities(self) -> Priorities | None:
        """Return how it is given priorities; None for a kind of which that is not known."""

    @property
    def observed_paths(self) -> tuple[str, ...]:
        """Return the paths whose JSON tells `is_paused` or `weight_version`; an engine may not serve them."""

    @property
    def readiness_path(self) -> str:
        """Return the path that answers 503 while the engine is paused, and 200 else; empty if there is none."""

    @property
    def rank_label(self) -> str:
        """Return the label of its metrics that says which data-parallel rank they are of."""

    @property
    def rank_header(self) -> str:
        """Return the header of a request that chooses the data-parallel rank."""

    @property
    def refuses_models(self) -> bool:
        """Return whether it refuses each model that it does not list; others answer as if it were their own."""

    def read_metrics(self, exposition: str) -> ReplicaReading:
        """Read an exposition; never raise: what cannot be read is None in the reading."""

    def read_info(self, info: str) -> int | None:
        """Read the capacity, in tokens, from what one of `info_paths` answered; never raise: None if it is not said."""
