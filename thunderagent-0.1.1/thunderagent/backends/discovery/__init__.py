"""Sources of replicas: each is one file here, and reports the whole set of replicas whenever it changes."""

from __future__ import annotations

from thunderagent.backends.discovery.base import AUTO, DiscoveryListener, RanksCount, Source, Wanted, wanted_of

__all__ = ["AUTO", "DiscoveryListener", "RanksCount", "Source", "Wanted", "wanted_of"]
