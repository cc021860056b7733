"""A proxy's API without a proxy: recorded requests and prepared answers."""

from __future__ import annotations

import json
import threading
from collections import deque
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Iterator

DEADLINE_S = 10.0


@dataclass
class FakeProxy:
    """Answers 200 and an empty object, unless answers were prepared for a path."""

    url: str = ""
    requests: list[tuple[str, str, Any]] = field(default_factory=list)
    answers: dict[str, deque[tuple[int, bytes]]] = field(default_factory=dict)
    gate: threading.Event = field(default_factory=threading.Event)
    """Answers wait until it is set."""
    asked: threading.Event = field(default_factory=threading.Event)

    def answer(self, path: str, *answers: tuple[int, object]) -> None:
        """Prepare answers for a path; the last one is repeated."""
        bodies = [(status, body if isinstance(body, bytes) else json.dumps(body).encode()) for status, body in answers]
        self.answers[path] = deque(bodies)

    def next_answer(self, path: str) -> tuple[int, bytes]:
        waiting = self.answers.get(path)
        if not waiting:
            return 200, b"{}"
        return waiting.popleft() if len(waiting) > 1 else waiting[0]

    def paths(self) -> list[str]:
        return [path for _, path, _ in self.requests]

    def released(self) -> list[str]:
        return [body["program_id"] for _, path, body in self.requests if path == "/programs/release"]


@contextmanager
def fake_proxy() -> Iterator[FakeProxy]:
    """Run a fake proxy during the block."""
    proxy = FakeProxy()
    proxy.gate.set()

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            content = self.rfile.read(int(self.headers.get("Content-Length") or 0))
            proxy.requests.append((self.command, self.path, json.loads(content) if content else None))
            status, body = proxy.next_answer(self.path)
            proxy.asked.set()
            proxy.gate.wait(DEADLINE_S)
            try:
                self.send_response(status)
                self.send_header("Content-Length", str(len(body)))
                self.end_headers()
                self.wfile.write(body)
            except OSError:
                pass  # the client lost its patience

        do_GET = do_POST  # noqa: N815 - the base class' name

        def log_message(self, format: str, *args: Any) -> None:  # noqa: A002 - the base class' name
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    server.daemon_threads = False  # so that closing waits for them
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    proxy.url = "http://{}:{}".format(*server.server_address)
    try:
        yield proxy
    finally:
        proxy.gate.set()
        server.shutdown()
        server.server_close()
        thread.join()
