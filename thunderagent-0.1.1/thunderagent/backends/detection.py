"""Finds out which engine kind answers at a URL, from its own reports."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Final

from thunderagent.backends.base import NOTHING_READ, Backend, Notices, Priorities, ReplicaReading
from thunderagent.backends.nova import NovaBackend
from thunderagent.backends.sglang import SglangBackend
from thunderagent.backends.vllm import VllmBackend

if TYPE_CHECKING:
    from collections.abc import Mapping

_BY_PREFIX: Final[Mapping[str, Backend]] = {"vllm:": VllmBackend(), "sglang:": SglangBackend(), "nova:": NovaBackend()}


@dataclass(slots=True)
class DetectedBackend:
    """An engine of unspecified kind, detected by the prefix of its metrics, or by its server information.

    One object for each replica: it remembers the kind, and follows a replica whose engine is replaced. All kinds answer
    at the same paths. Until one is found, `kind` is "auto", and nothing specific to one kind is asked.
    """

    metrics_path: str = "/metrics"
    health_path: str = "/health"
    found: Backend | None = field(default=None, init=False)
    notices: Notices | None = field(default=None, init=False)
    """How to tell the detected kind of turns and programs."""

    @property
    def kind(self) -> str:
        """Return the detected kind."""
        return self.found.kind if self.found is not None else "auto"

    @property
    def info_paths(self) -> tuple[str, ...]:
        """Return the paths of the detected kind; until then SGLang's, whose metrics may be off."""
        return (self.found or _BY_PREFIX["sglang:"]).info_paths

    @property
    def rank_label(self) -> str:
        """Return the label of the detected kind."""
        return (self.found or _BY_PREFIX["vllm:"]).rank_label

    @property
    def rank_header(self) -> str:
        """Return the header of the detected kind."""
        return (self.found or _BY_PREFIX["vllm:"]).rank_header

    @property
    def observed_paths(self) -> tuple[str, ...]:
        """Return the paths of the detected kind."""
        return self.found.observed_paths if self.found is not None else ()

    @property
    def priorities(self) -> Priorities | None:
        """Return how to give priorities to the detected kind."""
        return self.found.priorities if self.found is not None else None

    @property
    def readiness_path(self) -> str:
        """Return the path of the detected kind."""
        return self.found.readiness_path if self.found is not None else ""

    @property
    def plugin_path(self) -> str:
        """Return the path of the detected kind."""
        return self.found.plugin_path if self.found is not None else ""

    @property
    def refuses_models(self) -> bool:
        """Return whether the detected kind does; an unknown one may accept any name."""
        return self.found is not None and self.found.refuses_models

    def read_metrics(self, exposition: str, ranks_count: int = 1) -> ReplicaReading:
        """Read an exposition as the kind whose metrics it contains."""
        for prefix, backend in _BY_PREFIX.items():
            if exposition.startswith(prefix) or f"\n{prefix}" in exposition:
                self.found, self.notices = backend, backend.notices
        return self.found.read_metrics(exposition, ranks_count) if self.found is not None else NOTHING_READ

    def read_info(self, info: str) -> int | None:
        """Read the server's information; only SGLang's contains a capacity."""
        capacity_tokens = _BY_PREFIX["sglang:"].read_info(info)
        if capacity_tokens is not None:
            self.found, self.notices = _BY_PREFIX["sglang:"], _BY_PREFIX["sglang:"].notices
        return capacity_tokens

    def read_uncached(self, info: str) -> bool | None:
        """Read the server's information as SGLang's."""
        return _BY_PREFIX["sglang:"].read_uncached(info)


def learn_kind(backend: Backend, kind: str) -> None:
    """Set the kind that another poller found; a configured kind is kept."""
    found = next((each for each in _BY_PREFIX.values() if each.kind == kind), None)
    if isinstance(backend, DetectedBackend) and found is not None:
        backend.found = found
