"""One preparation of a Kubernetes sandbox, between the coroutine that wants it and the thread that does it."""

from __future__ import annotations

import asyncio
import contextlib
import enum
import threading
import time
from collections.abc import Awaitable, Callable

from thunderagent.errors import SandboxEngineError, SandboxError, SandboxSetupError, SandboxSpaceError
from thunderagent.tools.kubernetes.api import Api, RightError, Stop
from thunderagent.tools.kubernetes.objects import RESOURCES, Json, Ref
from thunderagent.tools.kubernetes.state import delay_of, fault_of, is_ready
from thunderagent.tools.kubernetes.watch import follow


class Stage(enum.Enum):
    """The progress of a preparation."""

    WAITING = enum.auto()
    BEGUN = enum.auto()
    DONE = enum.auto()
    GIVEN_UP = enum.auto()


class Errand:
    """One preparation, between the coroutine that wants it and the thread that does it."""

    def __init__(self) -> None:
        self.stop = Stop()
        # What is waited for, and whether that is room in the cluster; written by the thread, read when it is over.
        self.delay = "too many others are being prepared"
        self.is_for_room = False
        # Whether its Job exists without a pod; and the server's answer about such a pod.
        self.lacks_pod = False
        self.refusal: SandboxError | None = None
        self._stage = Stage.WAITING
        self._lock = threading.Lock()

    def begin(self) -> None:
        """Begin. Raises `SandboxSetupError` if it is no longer wanted."""
        self._step(Stage.WAITING, Stage.BEGUN)

    def finish(self) -> None:
        """Hand over the result. Raises `SandboxSetupError` if nobody wants it: then the thread must remove it."""
        self._step(Stage.BEGUN, Stage.DONE)

    def give_up(self) -> Stage:
        """Stop wanting it; return its progress. The caller must remove what was done by then."""
        with self._lock:
            before, self._stage = self._stage, Stage.GIVEN_UP
        self.stop.set()
        return before

    def _step(self, before: Stage, after: Stage) -> None:
        with self._lock:
            if self._stage is not before:
                raise SandboxSetupError("no program waits for it any more")
            self._stage = after


async def rehearse(errand: Errand, ask: Callable[[], Awaitable[object]], *, first_s: float) -> None:
    """End an errand whose Job gets no pod with the reason: `ask` has the server check such a pod.

    Asks for the first time after `first_s`, and then less and less often, until cancelled.
    """
    pause_s = first_s
    while errand.refusal is None:
        await asyncio.sleep(pause_s)
        pause_s *= 2
        if errand.lacks_pod:
            try:
                await ask()
            except (SandboxEngineError, RightError):
                continue  # that says nothing about the pod
            except SandboxError as refusal:
                errand.refusal = refusal
                errand.stop.set()


def wait_until_ready(api: Api, ref: Ref, errand: Errand, selector: str, version: str, *, patience_s: float) -> Json:
    """Return the pod of a sandbox once it is usable; tolerate an API server that is away for less than `patience_s`.

    Blocks, in the thread that does the errand. Raises `SandboxError`.
    """
    lost_at_s: float | None = None
    errand.delay = "the cluster has made no pod for it"
    errand.lacks_pod = True
    while not errand.stop.is_set:
        try:
            events = follow(api, RESOURCES["pod"], ref.namespace, selector, errand.stop, version)
            with contextlib.closing(events):
                for event, pod in events:
                    lost_at_s = None
                    errand.lacks_pod = False
                    if event == "DELETED":
                        raise SandboxSetupError("the pod was removed before it was usable")
                    if (fault := fault_of(pod)) is not None:
                        raise fault
                    if is_ready(pod):
                        return pod
                    errand.delay, errand.is_for_room = delay_of(pod)
        except SandboxEngineError:
            now_s = time.monotonic()
            lost_at_s = now_s if lost_at_s is None else lost_at_s
            if now_s - lost_at_s >= patience_s:
                raise
            version = ""
            errand.stop.wait(api.backoff_s)
    if errand.refusal is not None and errand.lacks_pod:
        raise errand.refusal
    raise (SandboxSpaceError if errand.is_for_room else SandboxSetupError)(f"not ready in time: {errand.delay}")
