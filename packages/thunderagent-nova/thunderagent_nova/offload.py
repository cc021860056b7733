"""The encoder's weights, a few layers at a time on the device: a ring that is filled while layers compute.

Theory of operation
-------------------
L layers, K of them on the device as physical layers. When layer l is done, its physical layer gets the weights of layer
(l + K) mod L (Eq. 7 of the paper), so after the last layer the first K lie ready for the next pass. Each layer is one
flat pinned buffer on the host, hence one copy. Two events for each physical layer keep order: `ready` (copied, may
compute) and `free` (computed, may be overwritten).

A pass of T seconds over S bytes needs a bandwidth of about S/T (Eq. 8). Fast cards outrun their bus: then R resident
layers, evenly spread, stay for good, and the ring turns over the others. R >= L (1 - B T / S) hides the copies.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any, Protocol

import torch
from torch import nn


def resident_layers(layers: int, bytes_total: float, pass_s: float, bytes_per_s: float) -> int:
    """Return the fewest resident layers that hide the copies (Eq. 8 solved for R)."""
    return min(layers, max(0, math.ceil(layers * (1 - bytes_per_s * pass_s / bytes_total))))


class Copier(Protocol):
    """Where copies run beside the passes, and what keeps their order."""

    def event(self) -> Any:
        """Return an event with `record()` and `wait()`, both on the current stream."""
        ...

    def stream(self) -> AbstractContextManager[None]:
        """Make the copy stream current."""
        ...


class NullCopier:
    """On a CPU a copy is done when its call returns."""

    class _Event:
        def record(self) -> None:
            """Do nothing."""

        def wait(self) -> None:
            """Do nothing."""

    def event(self) -> Any:
        """Return an event that is always past."""
        return self._Event()

    def stream(self) -> AbstractContextManager[None]:
        """Do nothing."""
        return nullcontext()


class CudaCopier:
    """A stream of its own."""

    def __init__(self, device: torch.device) -> None:
        self._stream = torch.cuda.Stream(device)

    def event(self) -> Any:
        """Return an event without timing."""
        return torch.cuda.Event()

    @contextmanager
    def stream(self) -> Iterator[None]:
        """Make the copy stream current."""
        with torch.cuda.stream(self._stream):
            yield


class OffloadRing:
    """Takes the layers' weights to the host and lends them back, a physical layer at a time."""

    def __init__(
        self,
        layers: Sequence[nn.Module],
        device: torch.device,
        *,
        physical: int,
        resident: int = 0,
        copier: Copier,
        host: dict[int, torch.Tensor] | None = None,
    ) -> None:
        if not 2 <= physical <= len(layers) - resident:
            raise ValueError(f"physical layers must be 2 to {len(layers) - resident}, not {physical}")
        stay = {index * len(layers) // resident for index in range(resident)}
        self._turning = [index for index in range(len(layers)) if index not in stay]
        self._place = {layer: place for place, layer in enumerate(self._turning)}
        self._copier = copier
        self._parameters = [list(layer.parameters()) for layer in layers]
        self.host = {} if host is None else host  # by layer; one ring may leave it to the next
        for index in self._turning:
            if index not in self.host:
                self.host[index] = _flat_on_host(self._parameters[index], pin=device.type == "cuda")
        first = self.host[self._turning[0]]
        size, dtype = first.numel(), first.dtype
        self._shapes = [parameter.shape for parameter in self._parameters[self._turning[0]]]
        self._buffers = [torch.empty(size, dtype=dtype, device=device) for _ in range(physical)]
        self._views = [_views(buffer, self._shapes) for buffer in self._buffers]
        self._ready = [copier.event() for _ in range(physical)]
        self._free = [copier.event() for _ in range(physical)]
        self._holds: dict[int, int] = {}  # place in the turn -> physical layer
        for index in self._turning:
            for parameter in self._parameters[index]:
                parameter.data = parameter.data.new_empty(0)
        for physical_layer in range(physical):
            self._fill(physical_layer, physical_layer)

    @property
    def device_bytes(self) -> int:
        """Bytes of the ring on the device; resident layers not counted."""
        return sum(buffer.numel() * buffer.element_size() for buffer in self._buffers)

    def rewind(self) -> None:
        """Have the first layers ready, unless they are: the pass before may have failed halfway."""
        if self._holds.keys() == set(range(len(self._buffers))):
            return
        self._holds.clear()
        for physical in range(len(self._buffers)):
            self._free[physical].record()
            self._fill(physical, physical)

    def before(self, layer: int) -> None:
        """Give a layer its weights, and make its pass wait for them."""
        place = self._place.get(layer)
        if place is None:
            return
        physical = self._holds[place]
        self._ready[physical].wait()
        for parameter, view in zip(self._parameters[layer], self._views[physical], strict=True):
            parameter.data = view

    def after(self, layer: int) -> None:
        """Fetch the layer that comes K later into the place that this one leaves."""
        place = self._place.get(layer)
        if place is None:
            return
        physical = self._holds.pop(place)
        self._free[physical].record()
        self._fill(physical, (place + len(self._buffers)) % len(self._turning))

    def put_back(self) -> None:
        """Put all weights on the device again. The ring is useless afterwards."""
        for index in self._turning:
            flat = self.host[index].to(self._buffers[0].device)
            for parameter, view in zip(self._parameters[index], _views(flat, self._shapes), strict=True):
                parameter.data = view

    def _fill(self, physical: int, place: int) -> None:
        with self._copier.stream():
            self._free[physical].wait()
            self._buffers[physical].copy_(self.host[self._turning[place]], non_blocking=True)
            self._ready[physical].record()
        self._holds[place] = physical


def _flat_on_host(parameters: Sequence[nn.Parameter], *, pin: bool) -> torch.Tensor:
    flat = torch.cat([parameter.data.reshape(-1) for parameter in parameters]).cpu()
    return flat.pin_memory() if pin else flat


def _views(buffer: torch.Tensor, shapes: Sequence[torch.Size]) -> list[torch.Tensor]:
    views, begin = [], 0
    for shape in shapes:
        views.append(buffer[begin : begin + shape.numel()].view(shape))
        begin += shape.numel()
    return views
