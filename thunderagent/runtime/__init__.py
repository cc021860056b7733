"""The single writer: events in, decisions carried out, those who wait woken, the log written."""

from thunderagent.runtime.runtime import Runtime, RuntimeSettings

__all__ = ["Runtime", "RuntimeSettings"]
