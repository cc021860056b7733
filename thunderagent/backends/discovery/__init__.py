"""Where replicas come from: a source is one file here, and says the whole set of replicas whenever it changes."""

from __future__ import annotations

from thunderagent.backends.discovery.base import AUTO, DiscoveryListener, RanksCount, Source, Wanted, wanted_of

__all__ = ["AUTO", "DiscoveryListener", "RanksCount", "Source", "Wanted", "wanted_of"]
