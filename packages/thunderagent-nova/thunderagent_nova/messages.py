"""What the engine tells its scheduler and what the scheduler answers: plain values, no tensors in them.

Theory of operation
-------------------
`scheduler.handle(event) -> list[Decision]` is synchronous and pure. The engine calls it on its event loop, and only
there. Each `Start…` hands one pass to one worker; that worker answers with exactly one `…Done` or one `Failed`, also
where the request was cancelled meanwhile. So a stage is busy from its `Start…` to its answer, and the scheduler alone
knows it. A request holds one KV slot from its first `Start…` until `Free`, which comes once for each request that
arrived, and never while a worker still has it.

A split is the number of units (SMs, or cores) that decoding gets beside another stage; the other stage gets the rest.
`None` is the whole device, for a pass that runs beside nothing, or for a policy that does not partition.
"""

from __future__ import annotations

from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from typing import Any, Protocol

Split = int | None


# Events


@dataclass(frozen=True, slots=True)
class Arrived:
    """A request came. With no image to encode (none, or all cached) it begins with its prefill."""

    now_s: float
    request_id: str
    images: int  # to be encoded, one pass for all
    prompt_tokens: int  # to be prefilled: those that a kept slot holds already are not counted


@dataclass(frozen=True, slots=True)
class Cancelled:
    """The client left. Unknown and ended requests are ignored."""

    now_s: float
    request_id: str


@dataclass(frozen=True, slots=True)
class EncodeDone:
    """The images of a request are encoded."""

    now_s: float
    request_id: str


@dataclass(frozen=True, slots=True)
class PrefillDone:
    """Prompt tokens up to `end` are in the slot. The last chunk also yields the first token."""

    now_s: float
    request_id: str
    end: int
    finished: bool = False  # the first token was also the last


@dataclass(frozen=True, slots=True)
class DecodeDone:
    """Each request of the batch got one token; `finished` ones got their last."""

    now_s: float
    request_ids: tuple[str, ...]
    finished: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Failed:
    """A pass raised. The stage is free again, and these requests are over."""

    now_s: float
    stage: str  # encode, prefill, decode
    request_ids: tuple[str, ...]


Event = Arrived | Cancelled | EncodeDone | PrefillDone | DecodeDone | Failed


# Decisions


@dataclass(frozen=True, slots=True)
class StartEncode:
    """Encode the images of a request on the units that `split` leaves."""

    request_id: str
    split: Split


@dataclass(frozen=True, slots=True)
class StartPrefill:
    """Prefill prompt tokens [begin, end) of a request on the units that `split` leaves."""

    request_id: str
    begin: int
    end: int
    split: Split


@dataclass(frozen=True, slots=True)
class StartDecode:
    """Decode one token for each of these requests, on `split` units."""

    request_ids: tuple[str, ...]
    split: Split


@dataclass(frozen=True, slots=True)
class Resplit:
    """The encoder, between two groups of layers, goes over to the units that this split leaves."""

    split: Split


@dataclass(frozen=True, slots=True)
class Free:
    """Give back the slot and the embeddings of a request: it is over."""

    request_id: str


Decision = StartEncode | StartPrefill | StartDecode | Resplit | Free


# What was measured: `profile.py` writes it, `policy.py` reads it.


@dataclass(frozen=True, slots=True)
class SplitTimes:
    """Seconds of one pass of each stage when decoding has `decode_units` and the other stage `rest_units`."""

    decode_units: int
    rest_units: int
    encode_s: float  # beside decoding
    prefill_s: float  # beside decoding
    decode_beside_encode_s: float
    decode_beside_prefill_s: float


@dataclass(frozen=True, slots=True)
class Profile:
    """What one card does with one model: alone, and for each split that its pool has."""

    device: str
    units: int
    encode_s: float
    prefill_s: float
    decode_s: dict[int, float]  # by batch size
    splits: tuple[SplitTimes, ...]


# What a client of the engine hands in and gets.


@dataclass(frozen=True, slots=True)
class Image:
    """One image, processed. `pixels` and `grid` are tensors as the model's image processor makes them."""

    pixels: Any
    grid: Any | None  # (t, h, w) in patches; families with fixed tiles have none
    digest: str = ""  # of the bytes that came; the key of the encoder cache


@dataclass(frozen=True, slots=True)
class Prompt:
    """Token ids with a run of image tokens for each image, and the images in their order."""

    token_ids: tuple[int, ...]
    images: tuple[Image, ...] = ()


@dataclass(frozen=True, slots=True)
class Request:
    """One turn: greedy, until `max_tokens` or a stop token."""

    request_id: str
    prompt: Prompt
    max_tokens: int
    stop_ids: frozenset[int] = frozenset()
    program_id: str | None = None  # keeps its slot between turns, where the engine is told to


@dataclass(frozen=True, slots=True)
class Token:
    """One token that came out. The last has a reason: stop, length."""

    token_id: int
    finish_reason: str | None = None


@dataclass(frozen=True, slots=True)
class Stats:
    """The engine now. Read by /metrics and /health."""

    running: int  # in a stage
    waiting: int  # in no stage yet
    pending_encode: int  # waiting for or in the encoder
    pending_prefill: int
    decoding: int
    slots: int
    slots_used: int  # by requests
    slots_kept: int  # by programs between turns
    slot_tokens: int  # room of one slot
    split: Split
    cached_images: int
    stage_s: dict[str, float] = field(default_factory=dict)  # total seconds of each stage so far
    stage_passes: dict[str, int] = field(default_factory=dict)


class Scheduling(Protocol):
    """The scheduler as the engine sees it: `Scheduler(policy_name, slots=…, split_policy=…)` in scheduler.py."""

    def handle(self, event: Event) -> list[Decision]:
        """Book one event and say what starts now, in order."""
        ...

    @property
    def split(self) -> Split:
        """The split in force."""
        ...


class Serving(Protocol):
    """The engine as the server sees it: `Engine(vlm, pool, scheduler, config)` in engine.py."""

    async def start(self) -> None:
        """Start the workers."""
        ...

    async def stop(self) -> None:
        """End them; requests still under way fail."""
        ...

    def submit(self, request: Request) -> AsyncIterator[Token]:
        """Yield the tokens of a request. Closing the iterator cancels it. ValueError: it fits no slot."""
        ...

    def release(self, program_id: str) -> bool:
        """Give a program's kept slot back; false if it has none."""
        ...

    def stats(self) -> Stats:
        """Say where the requests stand."""
        ...
