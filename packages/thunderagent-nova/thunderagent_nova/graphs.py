"""Decoding steps as CUDA graphs, one for each lane and batch bucket; as plain calls where there is no GPU.

Theory of operation
-------------------
A step of forty layers costs the host several milliseconds in Python, more beside an encoder's thread: as long as the
card needs for it. A graph costs microseconds. A graph keeps its addresses and the SMs of the stream that it was
captured on, so there is one for each lane, and one for each number of rows that the batch is rounded up to. Inputs and
outputs are fixed tensors; one copy brings a step's inputs in, one its tokens out. Steps never overlap: they share them,
and the memory of the graphs.
"""

from __future__ import annotations

import bisect
from collections.abc import Sequence
from typing import Any

import torch

from thunderagent_nova.kv import SlotCache
from thunderagent_nova.messages import Split
from thunderagent_nova.models import Vlm
from thunderagent_nova.partition import DECODE, Pool, nearest

_IDS, _POSITIONS, _STANDS = 0, 1, 2


class Stepper:
    """Decodes a token for each row of a batch."""

    def __init__(self, vlm: Vlm, cache: SlotCache, pool: Pool, buckets: Sequence[int]) -> None:
        self.buckets = tuple(sorted({min(bucket, cache.slots) for bucket in buckets} | {cache.slots}))
        self._vlm, self._cache, self._pool = vlm, cache, pool
        pin = pool.device.type == "cuda"
        self._host_in = torch.zeros((3, cache.slots), dtype=torch.long, pin_memory=pin)
        self._host_out = torch.zeros(cache.slots, dtype=torch.long, pin_memory=pin)
        self._in = torch.zeros((3, cache.slots), dtype=torch.long, device=pool.device)
        self._out = torch.zeros(cache.slots, dtype=torch.long, device=pool.device)
        self._graphs: dict[tuple[Split, int], Any] = {}

    @property
    def graphs(self) -> int:
        """How many graphs there are."""
        return len(self._graphs)

    def capture(self) -> None:
        """Capture every (lane, bucket). Takes a fraction of a second each; no other pass may run."""
        if self._pool.device.type != "cuda":
            return
        memory = torch.cuda.graph_pool_handle()
        self._in[_POSITIONS] = self._cache.idle_position
        with torch.inference_mode():
            for split in (None, *self._pool.splits):
                with self._pool.enter(DECODE, split):
                    self._step(self.buckets[-1])  # makes handles and workspaces, which a capture must not
                    self._pool.mark().synchronize()
                    for bucket in self.buckets:
                        self._graphs[split, bucket] = self._captured(bucket, memory)

    def step(self, rows: Sequence[tuple[int, int, int, int]], split: Split, *, plainly: bool = False) -> list[int]:
        """Decode for (row, last token, its index, its position) each; return the tokens in that order.

        `plainly` calls the model where there is a graph too.
        """
        bucket = self.buckets[bisect.bisect_left(self.buckets, 1 + max(row for row, *_ in rows))]
        fresh = self._host_in
        fresh[_POSITIONS] = self._cache.idle_position
        for row, token, index, stand in rows:
            fresh[_IDS, row], fresh[_POSITIONS, row], fresh[_STANDS, row] = token, index, stand
        split = nearest(self._pool.splits, split)
        with self._pool.enter(DECODE, split):
            self._in.copy_(fresh, non_blocking=True)
            graph = self._graphs.get((split, bucket))
            if graph is None or plainly:
                self._step(bucket)
            else:
                graph.replay()
            self._host_out.copy_(self._out, non_blocking=True)
            self._pool.mark().synchronize()
        tokens = self._host_out.tolist()
        return [tokens[row] for row, *_ in rows]

    def _step(self, bucket: int) -> None:
        ids, positions, stands = self._in[:, :bucket]
        self._out[:bucket] = self._vlm.step(ids, positions, stands, self._cache)

    def _captured(self, bucket: int, memory: Any) -> Any:
        graph = torch.cuda.CUDAGraph()
        graph.capture_begin(pool=memory, capture_error_mode="thread_local")
        try:
            self._step(bucket)
        finally:
            graph.capture_end()
        return graph
