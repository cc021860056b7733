"""One preparation of a Kubernetes sandbox, between the coroutine that wants it and the thread that does it."""

from __future__ import annotations

import contextlib
import enum
import threading
import time

from thunderagent.errors import SandboxEngineError, SandboxSetupError, SandboxSpaceError
from thunderagent.tools.kubernetes.api import Api, Stop
from thunderagent.tools.kubernetes.objects import RESOURCES, Json, Ref
from thunderagent.tools.kubernetes.state import delay_of, fault_of, is_ready
from thunderagent.tools.kubernetes.watch import follow


class Stage(enum.Enum):
    """How far it is."""

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
        self._stage = Stage.WAITING
        self._lock = threading.Lock()

    def begin(self) -> None:
        """Begin. Raises `SandboxSetupError` if it is not wanted any more."""
        self._step(Stage.WAITING, Stage.BEGUN)

    def finish(self) -> None:
        """Hand over what was made. Raises `SandboxSetupError` if nobody wants it: then it is the thread's to remove."""
        self._step(Stage.BEGUN, Stage.DONE)

    def give_up(self) -> Stage:
        """Want it no longer; return how far it was. What was done by then is the caller's to remove."""
        with self._lock:
            before, self._stage = self._stage, Stage.GIVEN_UP
        self.stop.set()
        return before

    def _step(self, before: Stage, after: Stage) -> None:
        with self._lock:
            if self._stage is not before:
                raise SandboxSetupError("nobody waits for it any more")
            self._stage = after


def wait_until_ready(api: Api, ref: Ref, errand: Errand, selector: str, version: str, *, patience_s: float) -> Json:
    """Return the pod of a sandbox once it is usable; bear with an API server that is away for less than `patience_s`.

    Waits, in the thread that does the errand. Raises `SandboxError`.
    """
    lost_at_s: float | None = None
    errand.delay = "the cluster has made no pod for it"
    while not errand.stop.is_set:
        try:
            events = follow(api, RESOURCES["pod"], ref.namespace, selector, errand.stop, version)
            with contextlib.closing(events):
                for event, pod in events:
                    lost_at_s = None
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
    raise (SandboxSpaceError if errand.is_for_room else SandboxSetupError)(f"not ready in time: {errand.delay}")
