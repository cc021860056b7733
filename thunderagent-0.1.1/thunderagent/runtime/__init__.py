"""The single writer: takes events, carries decisions out, wakes waiters, writes the log."""

from thunderagent.runtime.runtime import Runtime, RuntimeSettings

__all__ = ["Runtime", "RuntimeSettings"]
