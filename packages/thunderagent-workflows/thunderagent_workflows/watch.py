"""What `thunderagent workflow top` reads: a deployment's snapshot, on a socket that only its owner can open."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
from pathlib import Path
from typing import Any

from thunderagent_workflows.globalloop import GlobalLevel

SHOWN_SESSIONS_COUNT = 20


class Watch:
    """Answers each connection to a Unix socket with one snapshot, as JSON."""

    def __init__(self, path: Path, level: GlobalLevel) -> None:
        self.path = path
        self.level = level
        self._server: asyncio.Server | None = None

    async def open(self) -> None:
        """Listen. Raises `OSError` if that fails."""
        before = os.umask(0o177)
        try:
            self._server = await asyncio.start_unix_server(self._answer, self.path)
        finally:
            os.umask(before)

    async def close(self) -> None:
        """Stop listening, and remove the socket."""
        if self._server is not None:
            self._server.close()
            await self._server.wait_closed()
            self.path.unlink(missing_ok=True)

    async def _answer(self, _: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(OSError):
            writer.write(json.dumps(snapshot(self.level)).encode())
            await writer.drain()
            writer.close()
            await writer.wait_closed()


def snapshot(level: GlobalLevel) -> dict[str, Any]:
    """Return the global loop's last state: all instances, and the sessions with most waiting calls."""
    view, times = level.view, level.times
    sessions = sorted(view.sessions.values(), key=lambda each: -each.calls_count)[:SHOWN_SESSIONS_COUNT]
    return {
        "instances": [
            {
                "location": each.location,
                "node": each.node,
                "running_count": len(each.running),
                "queued_count": each.queued_count,
                "done_count": each.done_count,
                "mean_s": each.mean_s,
                "is_retiring": each.is_retiring,
                "waiting": list(each.waiting)[:SHOWN_SESSIONS_COUNT],
            }
            for each in view.instances.values()
        ],
        "sessions": [
            {
                "session": each.session,
                "calls_count": each.calls_count,
                "stage_count": each.stage_count,
                "returns_count": each.returns_count,
                "priority": each.priority,
                "oldest_s": max(0.0, view.now_s - each.oldest_s),
            }
            for each in sessions
        ],
        "loop_ms": {
            "total": times.total_s * 1e3,
            "collect": times.collect_s * 1e3,
            "merge": times.merge_s * 1e3,
            "policies": times.policies_s * 1e3,
            "push": times.push_s * 1e3,
        },
        "refused": level.refused,
    }
