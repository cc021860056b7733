"""Measure what one device does with one model: each stage alone, and beside decoding for each split.

Theory of operation
-------------------
Two threads run the workers' own passes, one the encoder or the prefill, the other one decoding step after another, each
in its lane. A pass counts if the other thread was busy from its begin to its end. The median of a few is taken. The sum
of what two lanes do in a second, each in units of its rate alone, less one, is what running beside each other gains.
"""

from __future__ import annotations

import json
import statistics
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch

from thunderagent_nova.messages import Profile, Split, SplitTimes
from thunderagent_nova.partition import DECODE, Pool
from thunderagent_nova.workers import ENCODE, PREFILL, Job, Stages, Turn


@dataclass(frozen=True, slots=True)
class Subject:
    """What is measured: passes of one turn with an image, and of a batch that is being decoded."""

    stages: Stages
    pool: Pool
    front: Turn  # has a slot; its images are `missing`, and encoded at the first call
    batch: Sequence[Turn]  # each has a slot and a first token


def measure(
    subject: Subject, *, repeats: int, batch: int, on_refused: Callable[[int, RuntimeError], None] | None = None
) -> Profile:
    """Measure all splits of the pool. Costs about `repeats` passes of each stage, twice, for each split.

    A library's kernel may not fit a lane of few SMs: such a split is left out, and `on_refused` hears of it.
    """
    encode_s, prefill_s = (alone(subject, stage, repeats, batch) for stage in (ENCODE, PREFILL))
    by_batch = {n: alone(subject, DECODE, 4 * repeats, n) for n in range(1, len(subject.batch) + 1)}
    times = []
    for split in subject.pool.splits:
        try:
            times.append(_beside(subject, split, repeats, batch))
        except RuntimeError as error:
            if on_refused is None:
                raise
            on_refused(split, error)
    return Profile(subject.pool.name, subject.pool.units, encode_s, prefill_s, by_batch, tuple(times))


def warm(subject: Subject) -> None:
    """Run the first two stages once on each lane: what a first pass makes there, a stream's memory among it, stays."""
    _encode_once(subject)
    for split in (None, *subject.pool.splits):
        for stage in (ENCODE, PREFILL):
            run_as(stage, partial(_timed, _pass(subject, stage, split, 1)))


def beside(subject: Subject, stage: str, split: Split, repeats: int, batch: int) -> tuple[float, float]:
    """Return the seconds of one pass of `stage` and of one decoding step beside it."""
    _encode_once(subject)
    front: list[tuple[float, float]] = []
    steps: list[tuple[float, float]] = []
    begun, over = threading.Event(), threading.Event()
    errors: list[BaseException] = []

    def run_front() -> None:
        begun.wait()
        front.extend(_timed(_pass(subject, stage, split, batch)) for _ in range(repeats + 1))
        over.set()

    def run_steps() -> None:
        while not over.is_set():
            steps.append(_timed(_pass(subject, DECODE, split, batch)))
            begun.set()

    _join([_thread(stage, run_front, errors, begun, over), _thread(DECODE, run_steps, errors, begun, over)], errors)
    within = [end - begin for begin, end in steps if begin >= front[0][0] and end <= front[-1][1]]
    return _median(front[1:]), statistics.median(within or [end - begin for begin, end in steps])


def save(profile: Profile, path: Path, **about: Any) -> None:
    """Write a profile as JSON, with what else is to be known of it."""
    path.write_text(json.dumps({**about, "profile": asdict(profile)}, indent=2) + "\n")


def load(path: Path) -> Profile:
    """Read a profile. ValueError: the file holds none."""
    try:
        told = json.loads(path.read_text())["profile"]
        splits = tuple(SplitTimes(**split) for split in told.pop("splits"))
        decode_s = {int(batch): seconds for batch, seconds in told.pop("decode_s").items()}
        return Profile(**told, decode_s=decode_s, splits=splits)
    except (KeyError, TypeError, json.JSONDecodeError) as error:
        raise ValueError(f"{path} holds no profile: {error}") from error


def _beside(subject: Subject, split: int, repeats: int, batch: int) -> SplitTimes:
    encode_s, decode_encode_s = beside(subject, ENCODE, split, repeats, batch)
    prefill_s, decode_prefill_s = beside(subject, PREFILL, split, repeats, batch)
    rest = getattr(subject.pool, "rest_units", lambda used: subject.pool.units - used)(split)
    return SplitTimes(split, rest, encode_s, prefill_s, decode_encode_s, decode_prefill_s)


def alone(subject: Subject, stage: str, repeats: int, batch: int) -> float:
    """Return the seconds of one pass of a stage that has the whole device."""
    _encode_once(subject)
    taken: list[tuple[float, float]] = []
    run_as(stage, lambda: taken.extend(_timed(_pass(subject, stage, None, batch)) for _ in range(repeats + 1)))
    return _median(taken[1:])


def _pass(subject: Subject, stage: str, split: Split, batch: int) -> Callable[[], Any]:
    stages = subject.stages
    if stage == DECODE:
        return lambda: stages.decode(Job(tuple(subject.batch[:batch]), split))
    job = Job((subject.front,), split, 0, len(subject.front.request.prompt.token_ids))
    if stage == PREFILL:
        return lambda: stages.prefill(job)
    stages.encode_split = split
    return lambda: stages.encode(job)


def _timed(run: Callable[[], Any]) -> tuple[float, float]:
    begin_s = time.perf_counter()
    with torch.inference_mode():
        run()
    return begin_s, time.perf_counter()


def _median(taken: Sequence[tuple[float, float]]) -> float:
    return statistics.median(end - begin for begin, end in taken)


def _encode_once(subject: Subject) -> None:
    """Give the turn at the front what its prefill needs."""
    front = subject.front

    def encode() -> None:
        with torch.inference_mode():
            front.encoded = list(subject.stages.encode(Job((front,), None)))

    if None in front.encoded:
        run_as(ENCODE, encode)


def run_as(stage: str, run: Callable[[], Any]) -> None:
    """Run in a thread of its own: entering a lane of cores changes the thread that enters."""
    errors: list[BaseException] = []
    _join([_thread(stage, run, errors)], errors)


def _thread(
    stage: str, run: Callable[[], Any], errors: list[BaseException], *release: threading.Event
) -> threading.Thread:
    def guarded() -> None:
        try:
            run()
        except BaseException as error:  # raised again by the thread that waits
            errors.append(error)
        finally:
            for event in release:
                event.set() if errors else None

    return threading.Thread(target=guarded, name=f"nova-{stage}")


def _join(threads: Sequence[threading.Thread], errors: list[BaseException]) -> None:
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if errors:
        raise errors[0]
