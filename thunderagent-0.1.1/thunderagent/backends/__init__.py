"""Engine kinds: what each kind's metrics and endpoints mean. A new kind is one file, and one line here."""

from __future__ import annotations

from typing import TYPE_CHECKING

from thunderagent.backends.base import Backend, ReplicaReading
from thunderagent.backends.detection import DetectedBackend
from thunderagent.backends.nova import NovaBackend
from thunderagent.backends.sglang import SglangBackend
from thunderagent.backends.vllm import VllmBackend
from thunderagent.errors import ConfigurationError

if TYPE_CHECKING:
    from collections.abc import Callable

__all__ = ["BACKENDS", "Backend", "ReplicaReading", "backend_of"]

BACKENDS: dict[str, Callable[[], Backend]] = {
    "auto": DetectedBackend,
    "vllm": VllmBackend,
    "sglang": SglangBackend,
    "nova": NovaBackend,
}


def backend_of(kind: str) -> Backend:
    """Return the backend for one replica of an engine kind; raise ConfigurationError for an unknown kind."""
    make = BACKENDS.get(kind)
    if make is None:
        raise ConfigurationError(f"unknown backend {kind!r}; known are: {', '.join(sorted(BACKENDS))}")
    return make()
