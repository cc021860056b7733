"""Nova: the metrics of our own engine for vision-language agents, and how to tell it that a program ended.

Its memory is slots, one per request, of a fixed number of tokens: their product is the capacity. Images are encoded one
after the other, which is what turns wait for there, so their number is reported separately; the package's README has
all metrics.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

import msgspec

from thunderagent.backends.base import NamedTurn, Notice, ReplicaReading
from thunderagent.backends.exposition import STARTED, is_sane, samples_of, started_s_of

if TYPE_CHECKING:
    from collections.abc import Mapping

    from prometheus_client.samples import Sample

SLOTS: Final = "nova:slots"
SLOTS_USED: Final = "nova:slots_used"
SLOT_TOKENS: Final = "nova:slot_tokens"
RUNNING: Final = "nova:num_requests_running"
WAITING: Final = "nova:num_requests_waiting"
PENDING_ENCODE: Final = "nova:pending_encode"

_NEEDED: Final = (STARTED, SLOTS, SLOTS_USED, SLOT_TOKENS, RUNNING, WAITING, PENDING_ENCODE)

RELEASE_PATH: Final = "/release"


@dataclass(frozen=True, slots=True)
class NovaNotices:
    """Names the program of a turn, so that it may keep its slot, and reports its end.

    A client that leaves is noticed by the connection alone.
    """

    def name_turn(self, path: str, body: bytes, program_id: str | None, *, tags_programs: bool) -> NamedTurn:
        """Put `program_id` at the front of a body, if wanted; a body that is not an object is left unchanged."""
        opening = body.find(b"{") + 1
        is_object = opening > 0 and not body[: opening - 1].strip() and body[opening:].lstrip()[:1] == b'"'
        if not (tags_programs and program_id is not None and is_object and path.startswith("/v1/")):
            return NamedTurn(body)
        tag = b'"program_id":%b,' % msgspec.json.encode(program_id)
        return NamedTurn(b"".join((body[:opening], tag, memoryview(body)[opening:])), is_tagged=True)

    def turn_left(self, engine_request_id: str) -> Notice:
        """Refuse: turns have no ids there, so this is never called."""
        raise AssertionError(f"no turn has the id {engine_request_id!r}")

    def program_ended(self, program_id: str) -> Notice:
        """Return the notice that frees its slot; 200 for an unknown one."""
        return Notice(RELEASE_PATH, msgspec.json.encode({"program_id": program_id}))


@dataclass(frozen=True, slots=True)
class NovaBackend:
    """Read Nova."""

    kind: str = "nova"
    refuses_models: bool = False
    metrics_path: str = "/metrics"
    health_path: str = "/health"
    info_paths: tuple[str, ...] = ()
    notices: NovaNotices = NovaNotices()
    priorities: None = None
    observed_paths: tuple[str, ...] = ()
    readiness_path: str = ""
    plugin_path: str = ""
    rank_label: str = "engine"
    rank_header: str = "X-data-parallel-rank"

    def read_metrics(self, exposition: str, ranks_count: int = 1) -> ReplicaReading:  # noqa: ARG002 - the protocol's
        """Read an exposition; never raise: unreadable values are None."""
        samples = samples_of(exposition, _NEEDED)
        slots, slot_tokens = _count(samples, SLOTS), _count(samples, SLOT_TOKENS)
        used = _count(samples, SLOTS_USED)
        return ReplicaReading(
            capacity_tokens=slots * slot_tokens if slots and slot_tokens else None,
            kv_used_ratio=min(1.0, used / slots) if used is not None and slots else None,
            running_count=_count(samples, RUNNING),
            waiting_count=_count(samples, WAITING),
            pending_encode_count=_count(samples, PENDING_ENCODE),
            started_s=started_s_of(samples),
        )

    def read_info(self, info: str) -> int | None:  # noqa: ARG002 - the protocol's signature
        """Read nothing: Nova reports all in its metrics."""
        return None

    def read_uncached(self, info: str) -> bool | None:  # noqa: ARG002 - the protocol's signature
        """Return None: nothing but its metrics is read."""
        return None


def _count(samples: Mapping[str, list[Sample]], name: str) -> int | None:
    values = [sample.value for sample in samples.get(name, ())]
    return int(values[-1]) if values and is_sane(values[-1]) else None
