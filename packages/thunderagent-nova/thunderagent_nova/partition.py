"""Which part of the processor a stage runs on: disjoint SMs, disjoint cores, or all of it.

Theory of operation
-------------------
A pool is made once. For each split it holds two disjoint lanes: one for decoding, one for the stage beside it. To
re-partition is to choose another lane before the next pass, or, for the encoder, between two groups of its layers.
`None` is the whole device, for either.

On a GPU a lane is a stream of a green context. Contexts made one by one overlap; those made from the groups of one
`cuDevSmResourceSplitByCount` do not. The driver rounds up: the counts that came out are read back. A graph keeps the
context of the stream that it was captured on, so graphs belong to a lane. Green contexts separate SMs alone: the
caches, the memory and its bandwidth stay shared.

On a CPU a lane is a set of cores. PyTorch's OpenMP keeps a team of threads for each thread that calls it, with its own
number of threads, and a new thread of a team inherits its caller's affinity and name. So a stage's thread carries a
name, and entering a lane moves every thread of that name to the lane's cores.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any, Protocol

import torch

from thunderagent_nova.messages import Split

DECODE = "decode"


class Pool(Protocol):
    """The lanes of one device."""

    device: torch.device
    units: int  # SMs or cores of the device
    splits: tuple[int, ...]  # what decoding may get beside another stage, as it came out
    name: str  # the device, for people

    def enter(self, stage: str, split: Split) -> AbstractContextManager[None]:
        """Run what follows in this thread on the lane. `mark` tells when it is done."""
        ...

    def move(self, stage: str, split: Split) -> None:
        """Within `enter`: what follows runs on another lane, after what was asked before."""
        ...

    def mark(self) -> Any:
        """Return what `synchronize()` waits on until all that this thread asked for so far is done."""
        ...

    def close(self) -> None:
        """Give the lanes back. No pass may be under way."""
        ...


def nearest(splits: tuple[int, ...], split: Split) -> Split:
    """Return the largest split of the pool that is no larger, otherwise its smallest; None stays None."""
    if split is None or not splits:
        return None
    return max((have for have in splits if have <= split), default=min(splits))


class NullPool:
    """One lane on the host: what runs together shares as the system likes."""

    def __init__(self) -> None:
        self.device = torch.device("cpu")
        self.units = os.cpu_count() or 1
        self.splits: tuple[int, ...] = ()
        self.name = "cpu"

    def enter(self, stage: str, split: Split) -> AbstractContextManager[None]:  # noqa: ARG002
        """Do nothing."""
        return nullcontext()

    def move(self, stage: str, split: Split) -> None:
        """Do nothing."""

    def mark(self) -> Any:
        """Return a mark that is past: what runs on the host is done when its call returns."""
        return _PAST

    def close(self) -> None:
        """Do nothing."""


class CorePool:
    """Lanes of cores: decoding gets the first of them, the stage beside it the others."""

    def __init__(self, cores: tuple[int, ...] | None = None) -> None:
        self._cores = cores or tuple(sorted(os.sched_getaffinity(0)))
        self.device = torch.device("cpu")
        self.units = len(self._cores)
        self.splits = tuple(range(1, self.units))
        self.name = f"{self.units} cores"
        self._thread = threading.local()  # `cores`: where this thread is

    def cores(self, stage: str, split: Split) -> tuple[int, ...]:
        """Return the cores of a lane."""
        split = nearest(self.splits, split)
        if split is None:
            return self._cores
        return self._cores[:split] if stage == DECODE else self._cores[split:]

    @contextmanager
    def enter(self, stage: str, split: Split) -> Iterator[None]:
        """Move this thread and its team to the lane's cores. They stay there until the next lane."""
        self.move(stage, split)
        yield

    def move(self, stage: str, split: Split) -> None:
        """Go over to another lane's cores."""
        cores = self.cores(stage, split)
        if getattr(self._thread, "cores", None) == cores:
            return
        self._thread.cores = cores
        os.sched_setaffinity(threading.get_native_id(), cores)
        torch.set_num_threads(len(cores))
        _move_team(_named(stage), cores)

    def mark(self) -> Any:
        """Return a mark that is past: what runs on the host is done when its call returns."""
        return _PAST

    def close(self) -> None:
        """Do nothing: a thread leaves its cores when it ends."""


def _named(stage: str) -> str:
    """Name this thread, and so the threads of its team that come later, after its stage."""
    name = f"nova-{stage}"[:15]
    own = Path(f"/proc/self/task/{threading.get_native_id()}/comm")
    if own.read_text().strip() != name:
        own.write_text(name)
    return name


def _move_team(name: str, cores: tuple[int, ...]) -> None:
    for task in Path("/proc/self/task").iterdir():
        try:
            if (task / "comm").read_text().strip() == name:
                os.sched_setaffinity(int(task.name), cores)
        except (FileNotFoundError, ProcessLookupError):
            continue  # it ended meanwhile


class StreamPool:
    """The whole GPU for every stage, each on a stream: NVIDIA's own scheduling."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        properties = torch.cuda.get_device_properties(device)
        self.units = properties.multi_processor_count
        self.name = properties.name
        self.splits: tuple[int, ...] = ()
        self._streams: dict[str, Any] = {}

    def stream(self, stage: str, split: Split) -> Any:  # noqa: ARG002
        """Return the stage's stream."""
        if stage not in self._streams:
            self._streams[stage] = torch.cuda.Stream(self.device)
        return self._streams[stage]

    def enter(self, stage: str, split: Split) -> AbstractContextManager[None]:
        """Make the stage's stream this thread's."""
        lane: AbstractContextManager[None] = torch.cuda.stream(self.stream(stage, split))
        return lane

    def move(self, stage: str, split: Split) -> None:
        """Make another stream this thread's, ordered after the one before."""
        _go_over(self.stream(stage, split))

    def mark(self) -> Any:
        """Record an event on this thread's stream. Waiting for it gives up the GIL."""
        return _mark()

    def close(self) -> None:
        """Forget the streams."""
        self._streams.clear()


@dataclass(frozen=True, slots=True)
class _Pair:
    """The two lanes of one split: contexts, streams and the numbers of SMs that came out."""

    decode_units: int
    rest_units: int
    decode: Any
    rest: Any


class GreenPool:
    """Disjoint SMs by green contexts. `driver` is `cuda.bindings.driver`; `wrap` makes a torch stream of a handle."""

    def __init__(self, driver: Any, device: torch.device, counts: tuple[int, ...], wrap: Any, full: StreamPool) -> None:
        self._driver, self._wrap, self._full = driver, wrap, full
        self.device, self.units, self.name = device, full.units, full.name
        self._contexts: list[Any] = []
        self._handles: list[Any] = []
        self._pairs: dict[int, _Pair] = {}
        handle = self._ask("cuDeviceGet", device.index or 0)
        sm = driver.CUdevResourceType.CU_DEV_RESOURCE_TYPE_SM
        whole = self._ask("cuDeviceGetDevResource", handle, sm)
        try:
            for count in counts:
                groups, _made, rest = self._ask("cuDevSmResourceSplitByCount", 1, whole, 0, count)
                if groups[0].sm.smCount not in self._pairs:  # the driver may round two counts up to one
                    self._pair(handle, groups[0], rest)
        except PartitionError:
            self._destroy()
            raise
        self.splits = tuple(sorted(self._pairs))

    def _pair(self, handle: Any, decode: Any, rest: Any) -> None:
        lanes = (self._lane(handle, decode), self._lane(handle, rest))
        self._pairs[decode.sm.smCount] = _Pair(decode.sm.smCount, rest.sm.smCount, *lanes)

    def _ask(self, name: str, *args: Any) -> Any:
        """Call the driver. Raise any answer except success."""
        error, *values = getattr(self._driver, name)(*args)
        if int(error) != 0:
            raise PartitionError(f"{name}: {error}")
        return values[0] if len(values) == 1 else values

    def _lane(self, handle: Any, resource: Any) -> Any:
        driver = self._driver
        descriptor = self._ask("cuDevResourceGenerateDesc", [resource], 1)
        flag = driver.CUgreenCtxCreate_flags.CU_GREEN_CTX_DEFAULT_STREAM
        context = self._ask("cuGreenCtxCreate", descriptor, handle, flag)
        self._contexts.append(context)
        stream = self._ask("cuGreenCtxStreamCreate", context, driver.CUstream_flags.CU_STREAM_NON_BLOCKING, 0)
        self._handles.append(stream)
        return self._wrap(int(stream))

    def rest_units(self, split: int) -> int:
        """Return the SMs that the stage beside decoding gets."""
        return self._pairs[split].rest_units

    def realised(self) -> list[tuple[int, int]]:
        """Read back from the contexts how many SMs each lane has: (decode, rest), in the order they were made."""
        sm = self._driver.CUdevResourceType.CU_DEV_RESOURCE_TYPE_SM
        counts = [self._ask("cuGreenCtxGetDevResource", context, sm).sm.smCount for context in self._contexts]
        return list(zip(counts[::2], counts[1::2], strict=True))

    def stream(self, stage: str, split: Split) -> Any:
        """Return the stream of a lane."""
        split = nearest(self.splits, split)
        if split is None:
            return self._full.stream(stage, None)
        return self._pairs[split].decode if stage == DECODE else self._pairs[split].rest

    def enter(self, stage: str, split: Split) -> AbstractContextManager[None]:
        """Make the lane's stream this thread's."""
        lane: AbstractContextManager[None] = torch.cuda.stream(self.stream(stage, split))
        return lane

    def move(self, stage: str, split: Split) -> None:
        """Make another lane's stream this thread's, ordered after the one before."""
        _go_over(self.stream(stage, split))

    def mark(self) -> Any:
        """Record an event on this thread's stream. Waiting for it gives up the GIL."""
        return _mark()

    def close(self) -> None:
        """Wait until every lane is idle. The lanes stay: see `green_pool`."""
        for handle in self._handles:
            self._ask("cuStreamSynchronize", handle)

    def _destroy(self) -> None:
        """Release unused lanes: streams, then contexts, the last first."""
        while self._handles:
            self._ask("cuStreamDestroy", self._handles.pop())
        while self._contexts:
            self._ask("cuGreenCtxDestroy", self._contexts.pop())


class PartitionError(RuntimeError):
    """The driver would not partition the device."""


@lru_cache
def green_pool(device: torch.device, counts: tuple[int, ...]) -> GreenPool:
    """Partition a GPU, once in a process. PartitionError: the driver refuses, or is too old.

    PyTorch's allocators remember on which streams a block was used, and ask those when they free it, at the latest when
    the process ends. So lanes that anything ran on are never destroyed, and a second engine gets the same ones. They
    take about 11 MB of the card for each split.
    """
    try:
        from cuda.bindings import driver  # noqa: PLC0415  # only a machine with a GPU has it
    except ImportError as error:
        raise PartitionError("partitions of SMs need the package cuda-bindings") from error
    torch.zeros(1, device=device)  # the primary context comes first
    return GreenPool(driver, device, counts, lambda s: torch.cuda.ExternalStream(s, device=device), StreamPool(device))


def _go_over(stream: Any) -> None:
    before = torch.cuda.current_stream()
    if before != stream:
        stream.wait_stream(before)
        torch.cuda.set_stream(stream)


def _mark() -> Any:
    event = torch.cuda.Event()
    event.record()
    return event


class _Past:
    def synchronize(self) -> None:
        """Return: it is done."""


_PAST = _Past()
