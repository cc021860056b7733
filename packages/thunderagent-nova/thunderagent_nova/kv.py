"""The KV cache: a fixed slot for each request, so that addresses never change and graphs may keep them.

Theory of operation
-------------------
One tensor of keys and one of values, [layers, slots, heads, tokens, head size]. A request owns a slot: a row. Prefill
writes a run of one row and reads that row up to the run's end. Decoding takes the rows from 0 to the highest that is in
the batch, writes one token into each at that row's own position, and masks by position: a late joiner is a row whose
position is small. Rows of that range that are not in the batch write to the last position, which no request uses.
"""

from __future__ import annotations

import torch


class SlotCache:
    """Room for `slots` requests of at most `slot_tokens` tokens each."""

    def __init__(
        self,
        layers: int,
        slots: int,
        heads: int,
        slot_tokens: int,
        head_size: int,
        *,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        self.slots = slots
        self.slot_tokens = slot_tokens
        self.width = -(-(slot_tokens + 1) // 16) * 16  # the last position takes what idle rows write
        shape = (layers, slots, heads, self.width, head_size)
        self.keys = torch.zeros(shape, dtype=dtype, device=device)
        self.values = torch.zeros(shape, dtype=dtype, device=device)

    @property
    def idle_position(self) -> int:
        """Where rows outside the batch write."""
        return self.width - 1

    def run(self, slot: int, begin: int, end: int) -> Run:
        """Return prefill's view: positions [begin, end) of one row."""
        return Run(self, slot, begin, end)

    def rows(self, count: int, positions: torch.Tensor) -> Rows:
        """Return decoding's view: one position in each of the first `count` rows."""
        return Rows(self, count, positions)

    def mask_of_run(self, begin: int, end: int, dtype: torch.dtype) -> torch.Tensor | None:
        """Say what a run may attend to, additive, [1, 1, end - begin, end]. None: plainly causal."""
        if begin == 0:
            return None
        device = self.keys.device
        key, query = torch.arange(end, device=device), torch.arange(begin, end, device=device)
        return _additive(key[None, :] <= query[:, None], dtype)[None, None]

    def mask_of_rows(self, positions: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        """Say what each row's new token may attend to, additive, [rows, 1, 1, width]."""
        key = torch.arange(self.width, device=positions.device)
        return _additive(key[None, :] <= positions[:, None], dtype)[:, None, None]


class _View:
    """What the layers of `transformers` ask of a cache."""

    is_compileable = False

    def __init__(self, seen: int) -> None:
        self._seen = seen

    def get_seq_length(self, layer_idx: int = 0) -> int:  # noqa: ARG002  # all layers are alike
        return self._seen

    def get_mask_sizes(self, query_length: int, layer_idx: int = 0) -> tuple[int, int]:  # noqa: ARG002
        return self._seen + query_length, 0


class Run(_View):
    """A run of positions in one row."""

    def __init__(self, cache: SlotCache, slot: int, begin: int, end: int) -> None:
        super().__init__(begin)
        self._cache, self._slot, self._begin, self._end = cache, slot, begin, end

    def update(
        self, keys: torch.Tensor, values: torch.Tensor, layer_idx: int, *_args: object, **_kwargs: object
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Write the run, and return the row up to its end."""
        own_keys = self._cache.keys[layer_idx, self._slot]
        own_values = self._cache.values[layer_idx, self._slot]
        own_keys[:, self._begin : self._end] = keys[0]
        own_values[:, self._begin : self._end] = values[0]
        return own_keys[None, :, : self._end], own_values[None, :, : self._end]


class Rows(_View):
    """One position in each of the first rows."""

    def __init__(self, cache: SlotCache, count: int, positions: torch.Tensor) -> None:
        super().__init__(0)
        self._cache, self._count, self._positions = cache, count, positions
        self._rows = torch.arange(count, device=positions.device)

    def update(
        self, keys: torch.Tensor, values: torch.Tensor, layer_idx: int, *_args: object, **_kwargs: object
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Write one token into each row, and return all of the rows."""
        own_keys = self._cache.keys[layer_idx, : self._count]
        own_values = self._cache.values[layer_idx, : self._count]
        own_keys[self._rows, :, self._positions] = keys[:, :, 0]
        own_values[self._rows, :, self._positions] = values[:, :, 0]
        return own_keys, own_values


def _additive(allowed: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    return torch.zeros(allowed.shape, dtype=dtype, device=allowed.device).masked_fill_(~allowed, torch.finfo(dtype).min)
