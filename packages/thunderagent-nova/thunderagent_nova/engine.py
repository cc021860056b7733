"""The engine: turns come in, the scheduler decides, three workers run, tokens go out.

Theory of operation
-------------------
All state lives on one asyncio loop, its single writer. A worker's outcome comes back to the loop, becomes tokens for
the clients and one event for the scheduler, and the scheduler's decisions become the workers' next jobs, in one step
without awaiting. A client that leaves closes its iterator: that is an event too, and the slot comes back when no worker
has the turn any more.
"""

from __future__ import annotations

import asyncio
import sys
import time
from collections import Counter, OrderedDict, defaultdict
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass, field

import torch

from thunderagent_nova.graphs import Stepper
from thunderagent_nova.messages import (
    Arrived,
    Cancelled,
    Decision,
    DecodeDone,
    EncodeDone,
    Event,
    Failed,
    Free,
    PrefillDone,
    Request,
    Resplit,
    Scheduling,
    StartDecode,
    StartEncode,
    StartPrefill,
    Stats,
    Token,
)
from thunderagent_nova.models import Encoded, Vlm
from thunderagent_nova.offload import CudaCopier, NullCopier, OffloadRing
from thunderagent_nova.partition import DECODE, Pool
from thunderagent_nova.slots import Kept, Slots
from thunderagent_nova.workers import ENCODE, PREFILL, Job, Outcome, Stages, Turn, Worker

# How long a finished worker waits at most while another one runs Python. Python's own 5 ms is a whole step.
_SWITCH_INTERVAL_S = 0.0005


@dataclass(frozen=True, slots=True)
class EngineConfig:
    """Sizes of an engine."""

    slots: int = 16  # requests between the start of their first pass and their end; the scheduler's number too
    slot_tokens: int = 2048  # prompt and answer of one request
    batch_buckets: tuple[int, ...] = (1, 2, 4, 8)  # rows that a step is rounded up to; all slots always is one
    encode_group_layers: int = 8  # layers of the encoder between two looks at the split
    keep_slots: int = 0  # more slots, for programs between their turns
    cached_images: int = 0  # images whose encoding is kept
    offload_physical_layers: int = 0  # of the encoder on the device at a time; 0: all
    offload_resident_layers: int = 0  # of the encoder that stay beside them


class EngineError(RuntimeError):
    """A turn failed in the engine, or the engine stopped."""


@dataclass(eq=False, slots=True)
class _Client:
    """What a turn's client waits on."""

    turn: Turn
    items: asyncio.Queue[Token | EngineError] = field(default_factory=asyncio.Queue)
    stage: str | None = None  # the pass that has it now
    next_stage: str = PREFILL
    bound: bool = False  # it waits with its program's slot
    finished: bool = False


class Engine:
    """Serves one model on one device."""

    def __init__(
        self,
        vlm: Vlm,
        pool: Pool,
        scheduler: Scheduling,
        config: EngineConfig,
        *,
        on_pass: Callable[[Outcome], None] | None = None,
    ) -> None:
        self._vlm, self.pool, self._scheduler, self._config = vlm, pool, scheduler, config
        self._slots = Slots(config.slots, config.keep_slots)
        self._cache = vlm.cache(self._slots.total, config.slot_tokens)
        self.stepper = Stepper(vlm, self._cache, pool, config.batch_buckets)
        self.ring = _ring(vlm, pool, config)
        self.stages = Stages(vlm, self._cache, pool, self.stepper, group=config.encode_group_layers, ring=self.ring)
        self._workers = {stage: Worker(stage, run, self._post) for stage, run in self.stages.runs.items()}
        self._clients: dict[str, _Client] = {}
        self._coming: dict[object, Request] = {}  # whose layout is being computed; a release may change them
        self._images: OrderedDict[str, Encoded] = OrderedDict()
        self._on_pass = on_pass
        self._passes: Counter[str] = Counter()
        self._seconds: defaultdict[str, float] = defaultdict(float)
        self._loop: asyncio.AbstractEventLoop | None = None
        self._stopped = False
        self._switch_interval_s = sys.getswitchinterval()

    async def start(self) -> None:
        """Capture graphs and start the workers."""
        self._loop = asyncio.get_running_loop()
        sys.setswitchinterval(_SWITCH_INTERVAL_S)
        await asyncio.to_thread(self.stepper.capture)
        for worker in self._workers.values():
            worker.start()

    async def stop(self) -> None:
        """End the running passes, fail the remaining turns and release the device."""
        self._stopped = True
        for client in self._clients.values():
            client.items.put_nowait(EngineError("the engine stopped"))
        self._clients.clear()
        await asyncio.gather(*(asyncio.to_thread(worker.stop) for worker in self._workers.values()))
        self.pool.close()
        sys.setswitchinterval(self._switch_interval_s)

    def reschedule(self, scheduler: Scheduling) -> None:
        """Switch to another scheduler. Nothing may be running."""
        if self._clients:
            raise EngineError(f"{len(self._clients)} turns are under way")
        self._scheduler = scheduler

    def check(self, request: Request) -> None:
        """Raise ValueError if a request can never run."""
        tokens = len(request.prompt.token_ids)
        if tokens < 1 or request.max_tokens < 1:
            raise ValueError("a request needs a prompt and room for at least one token")
        if tokens + request.max_tokens > self._config.slot_tokens:
            raise ValueError(
                f"{tokens} prompt tokens and {request.max_tokens} more exceed the {self._config.slot_tokens} of a slot"
            )

    async def submit(self, request: Request) -> AsyncIterator[Token]:
        """Yield the tokens of a request. Closing the iterator cancels it. ValueError: it can never run."""
        self.check(request)
        key = object()
        self._coming[key] = request
        try:
            layout = await asyncio.to_thread(self._vlm.layout, request.prompt)
        finally:
            request = self._coming.pop(key)
        if request.request_id in self._clients:
            raise ValueError(f"the request {request.request_id} is here already")
        if self._stopped:
            raise EngineError("the engine stopped")
        client = _Client(Turn(request, layout, [None] * len(request.prompt.images)))
        self._clients[request.request_id] = client
        self._arrive(client)
        try:
            while not client.finished or not client.items.empty():
                item = await client.items.get()
                if isinstance(item, EngineError):
                    raise item
                yield item
        finally:
            if self._clients.get(request.request_id) is client and not client.finished:
                self._tell(Cancelled(time.monotonic(), request.request_id))

    def release(self, program_id: str) -> bool:
        """Free a program's kept slot; return False if it has none. Turns under way keep none for it."""
        for client in self._clients.values():
            if client.turn.request.program_id == program_id:
                client.turn.request = _without_program(client.turn.request)
        for key, request in self._coming.items():
            if request.program_id == program_id:
                self._coming[key] = _without_program(request)
        return self._slots.release(program_id)

    def stats(self) -> Stats:
        """Return the state of the requests."""
        stages = Counter(client.stage for client in self._clients.values())
        following = Counter(client.next_stage for client in self._clients.values() if not client.finished)
        return Stats(
            running=sum(n for stage, n in stages.items() if stage is not None),
            waiting=stages[None],
            pending_encode=following[ENCODE],
            pending_prefill=following[PREFILL],
            decoding=following[DECODE],
            slots=self._config.slots,
            slots_used=sum(client.turn.slot is not None and not client.bound for client in self._clients.values()),
            slots_kept=self._slots.kept,
            slot_tokens=self._config.slot_tokens,
            split=self._scheduler.split,
            cached_images=len(self._images),
            stage_s=dict(self._seconds),
            stage_passes=dict(self._passes),
        )

    # Coming

    def _arrive(self, client: _Client) -> None:
        turn = client.turn
        prompt = turn.request.prompt
        bound = self._slots.bind(turn.request.program_id, prompt, self._vlm.family.image_token_id)
        if bound is not None:
            turn.slot, turn.kept_tokens = bound
            client.bound = True
        for index in range(self._images_in(turn), len(prompt.images)):
            turn.encoded[index] = self._cached(prompt.images[index].digest)
            if turn.encoded[index] is None:
                turn.missing.append(index)
        client.next_stage = ENCODE if turn.missing else PREFILL
        tokens = len(prompt.token_ids) - turn.kept_tokens
        self._tell(Arrived(time.monotonic(), turn.request.request_id, len(turn.missing), tokens))

    def _images_in(self, turn: Turn) -> int:
        """Count the images in the kept part of a prompt: it never ends inside one."""
        here = turn.layout.is_image[: turn.kept_tokens]
        starts = here[1:] & ~here[:-1]
        return int(starts.sum()) + int(len(here) > 0 and bool(here[0]))

    def _cached(self, digest: str) -> Encoded | None:
        if digest in self._images:
            self._images.move_to_end(digest)
        return self._images.get(digest)

    # Decisions

    def _tell(self, event: Event) -> None:
        for decision in self._scheduler.handle(event):
            self._carry_out(decision)

    def _carry_out(self, decision: Decision) -> None:
        match decision:
            case StartEncode(request_id, split):
                self.stages.encode_split = split
                self._workers[ENCODE].put(Job((self._begin(request_id, ENCODE),), split))
            case StartPrefill(request_id, begin, end, split):
                self._workers[PREFILL].put(Job((self._begin(request_id, PREFILL),), split, begin, end))
            case StartDecode(request_ids, split):
                self._workers[DECODE].put(Job(tuple(self._begin(each, DECODE) for each in request_ids), split))
            case Resplit(split):
                self.stages.encode_split = split
            case Free(request_id):
                self._free(request_id)

    def _begin(self, request_id: str, stage: str) -> Turn:
        client = self._clients[request_id]
        client.stage = client.next_stage = stage
        if client.turn.slot is None:
            client.turn.slot = self._slots.take()
        if client.bound:
            client.bound = False
            self._slots.started()
        return client.turn

    def _free(self, request_id: str) -> None:
        client = self._clients.pop(request_id)
        turn, slot = client.turn, client.turn.slot
        if client.bound:
            self._slots.started()
        if slot is None:
            return
        request = turn.request
        if turn.tokens and request.program_id is not None:  # also one that its client ended, as by a text to stop at
            digests = tuple(image.digest for image in request.prompt.images)
            kept = Kept(slot, (*request.prompt.token_ids, *turn.tokens[:-1]), digests)
            self._slots.keep(request.program_id, kept)
        else:
            self._slots.give_back(slot)

    # Outcomes

    def _post(self, outcome: Outcome) -> None:
        """Hand a worker's outcome to the loop. The worker calls it."""
        assert self._loop is not None
        try:
            self._loop.call_soon_threadsafe(self._on_outcome, outcome)
        except RuntimeError:
            if not self._loop.is_closed():
                raise

    def _on_outcome(self, outcome: Outcome) -> None:
        if self._stopped:
            return
        self._passes[outcome.stage] += 1
        self._seconds[outcome.stage] += outcome.end_s - outcome.begin_s
        if self._on_pass is not None:
            self._on_pass(outcome)
        clients = [self._clients[turn.request.request_id] for turn in outcome.job.turns]
        for client in clients:
            client.stage = None
        now_s = time.monotonic()
        ids = tuple(client.turn.request.request_id for client in clients)
        if outcome.error is not None:
            for client in clients:
                client.finished = True
                client.items.put_nowait(EngineError(f"{outcome.stage} failed: {outcome.error}"))
                client.turn.request = _without_program(client.turn.request)
            self._tell(Failed(now_s, outcome.stage, ids))
        elif outcome.stage == ENCODE:
            self._encoded(clients[0], outcome.value)
            self._tell(EncodeDone(now_s, ids[0]))
        elif outcome.stage == PREFILL:
            finished = outcome.value is not None and self._token(clients[0], outcome.value)
            self._tell(PrefillDone(now_s, ids[0], outcome.job.end, finished))
        else:
            over = [self._token(client, token) for client, token in zip(clients, outcome.value, strict=True)]
            finished_ids = tuple(each for each, ended in zip(ids, over, strict=True) if ended)
            self._tell(DecodeDone(now_s, ids, finished_ids))

    def _encoded(self, client: _Client, encoded: Sequence[Encoded]) -> None:
        turn = client.turn
        client.next_stage = PREFILL
        for index, image in zip(turn.missing, encoded, strict=True):
            turn.encoded[index] = image
            digest = turn.request.prompt.images[index].digest
            if digest and self._config.cached_images:
                self._images[digest] = image
                self._images.move_to_end(digest)
        while len(self._images) > self._config.cached_images:
            self._images.popitem(last=False)

    def _token(self, client: _Client, token: int) -> bool:
        """Book a token and deliver it. Return whether it was the last."""
        turn = client.turn
        turn.tokens.append(token)
        client.next_stage = DECODE
        reason = None
        if token in turn.request.stop_ids:
            reason = "stop"
        elif len(turn.tokens) >= turn.request.max_tokens:
            reason = "length"
        client.finished = reason is not None
        client.items.put_nowait(Token(token, reason))
        return client.finished


def _without_program(request: Request) -> Request:
    """Return the request as one whose slot is not kept: a failed pass may have left half, or nobody wants it."""
    return Request(request.request_id, request.prompt, request.max_tokens, request.stop_ids)


def _ring(vlm: Vlm, pool: Pool, config: EngineConfig) -> OffloadRing | None:
    if not config.offload_physical_layers:
        return None
    copier = CudaCopier(pool.device) if pool.device.type == "cuda" else NullCopier()
    layers = list(vlm.encoder_layers)
    ring = OffloadRing(
        layers,
        pool.device,
        physical=config.offload_physical_layers,
        resident=config.offload_resident_layers,
        copier=copier,
    )
    if pool.device.type == "cuda":
        torch.cuda.empty_cache()
    return ring
