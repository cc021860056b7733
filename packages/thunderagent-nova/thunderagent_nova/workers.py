"""The three stage workers: a thread and a queue each, one pass at a time.

Theory of operation
-------------------
A worker takes a job, enters the lane of the job's split, runs the pass, waits until the device has done it (which gives
up the GIL) and posts the outcome to the engine's loop. So everything that one stage left is complete on the device
before the next stage hears of it, and stages need no events between them.

The encoder alone takes longer than the load stays the same. It runs in groups of layers and goes over to the split in
force before each; the host waits for the group before the last, or it would have asked for all layers at once.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from queue import SimpleQueue
from typing import Any

import torch

from thunderagent_nova.graphs import Stepper
from thunderagent_nova.kv import SlotCache
from thunderagent_nova.messages import Request, Split
from thunderagent_nova.models import Encoded, Layout, Vlm
from thunderagent_nova.offload import OffloadRing
from thunderagent_nova.partition import DECODE, Pool

ENCODE, PREFILL = "encode", "prefill"
_log = logging.getLogger(__name__)


@dataclass(eq=False, slots=True)
class Turn:
    """A request under way. The engine's loop writes it; a worker only reads it."""

    request: Request
    layout: Layout
    encoded: list[Encoded | None]  # by image of the prompt; None: not yet, or in a prefix that was kept
    missing: list[int] = field(default_factory=list)  # images to encode
    kept_tokens: int = 0  # of the prompt, already in the slot
    slot: int | None = None
    tokens: list[int] = field(default_factory=list)

    @property
    def row(self) -> tuple[int, int, int, int]:
        """What decoding needs: row, last token, its index, its position."""
        assert self.slot is not None
        index = len(self.request.prompt.token_ids) + len(self.tokens) - 1
        return self.slot, self.tokens[-1], index, index + self.layout.offset


@dataclass(frozen=True, slots=True)
class Job:
    """One pass."""

    turns: tuple[Turn, ...]
    split: Split
    begin: int = 0
    end: int = 0
    put_s: float = field(default_factory=time.monotonic)


@dataclass(frozen=True, slots=True)
class Outcome:
    """What became of a pass: a value, or an error."""

    stage: str
    job: Job
    begin_s: float
    end_s: float
    value: Any = None
    error: BaseException | None = None


class Worker:
    """A thread that runs the passes of one stage."""

    def __init__(self, stage: str, run: Callable[[Job], Any], post: Callable[[Outcome], None]) -> None:
        self._stage, self._run, self._post = stage, run, post
        self._jobs: SimpleQueue[Job | None] = SimpleQueue()
        self._thread = threading.Thread(target=self._loop, name=f"nova-{stage}", daemon=True)

    def start(self) -> None:
        """Start the thread."""
        self._thread.start()

    def put(self, job: Job) -> None:
        """Hand over a pass."""
        self._jobs.put(job)

    def stop(self) -> None:
        """End after the pass under way, and wait for it."""
        self._jobs.put(None)
        self._thread.join()

    def _loop(self) -> None:
        while (job := self._jobs.get()) is not None:
            begin_s = time.monotonic()
            try:
                with torch.inference_mode():
                    value = self._run(job)
            except Exception as error:  # whatever a model raises ends its requests, not the engine
                _log.exception("a pass of the stage %s failed", self._stage)
                self._post(Outcome(self._stage, job, begin_s, time.monotonic(), error=error))
            else:
                self._post(Outcome(self._stage, job, begin_s, time.monotonic(), value))


class Stages:
    """What the workers run."""

    def __init__(
        self, vlm: Vlm, cache: SlotCache, pool: Pool, stepper: Stepper, *, group: int, ring: OffloadRing | None = None
    ) -> None:
        self._vlm, self._cache, self._pool, self._stepper = vlm, cache, pool, stepper
        self._group = group
        self.encode_split: Split = None  # in force; the encoder takes it before each group
        self._marks: list[Any] = []
        vlm.before_layer = self._before_layer
        self.lend(ring)

    def lend(self, ring: OffloadRing | None) -> None:
        """Let the encoder's weights come and go by a ring, or stay. No pass may be under way."""
        self._ring = ring
        self._vlm.after_layer = None if ring is None else ring.after

    def encode(self, job: Job) -> list[Encoded]:
        """Encode the missing images of a turn."""
        (turn,) = job.turns
        images = [turn.request.prompt.images[index] for index in turn.missing]
        self._marks.clear()
        with self._pool.enter(ENCODE, self.encode_split):
            if self._ring is not None:
                self._ring.rewind()
            encoded = self._vlm.encode(images)
            self._pool.mark().synchronize()
        return encoded

    def prefill(self, job: Job) -> int | None:
        """Prefill a run of a prompt. At its end return the first token."""
        (turn,) = job.turns
        assert turn.slot is not None
        encoded: Sequence[Encoded] = [image for image in turn.encoded if image is not None]
        span = range(turn.kept_tokens + job.begin, turn.kept_tokens + job.end)
        with self._pool.enter(PREFILL, job.split):
            first = self._vlm.prefill(turn.request.prompt, turn.layout, encoded, self._cache, turn.slot, span)
            self._pool.mark().synchronize()
            return None if first is None else int(first)

    def decode(self, job: Job) -> list[int]:
        """Decode a token for each turn."""
        return self._stepper.step([turn.row for turn in job.turns], job.split)

    def _before_layer(self, index: int) -> None:
        if index % self._group == 0:
            if len(self._marks) > 1:
                self._marks[-2].synchronize()
            self._pool.move(ENCODE, self.encode_split)
            self._marks.append(self._pool.mark())
        if self._ring is not None:
            self._ring.before(index)

    @property
    def runs(self) -> dict[str, Callable[[Job], Any]]:
        """What each worker runs."""
        return {ENCODE: self.encode, PREFILL: self.prefill, DECODE: self.decode}
