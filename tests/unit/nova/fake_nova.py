"""An engine without a model: the real scheduler, workers that only take time, and a codec of characters."""

from __future__ import annotations

import asyncio
import base64
import contextlib
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

from aiohttp import web

from thunderagent_nova.chat import ApiError, Json
from thunderagent_nova.messages import (
    Arrived,
    Cancelled,
    DecodeDone,
    EncodeDone,
    Event,
    Failed,
    Free,
    Image,
    PrefillDone,
    Prompt,
    Request,
    StartDecode,
    StartEncode,
    StartPrefill,
    Stats,
    Token,
)
from thunderagent_nova.policy import PAPER
from thunderagent_nova.scheduler import Scheduler
from thunderagent_nova.server import NovaServer

IMAGE_TOKEN = 1
TOKENS_OF_AN_IMAGE = 16
STOP_TOKEN = 2
PNG = "data:image/png;base64," + base64.b64encode(b"a picture").decode()


class CharacterCodec:
    """A token is a character; an image is sixteen of a special one."""

    image_token_id = IMAGE_TOKEN
    stop_ids = frozenset({STOP_TOKEN})

    def prompt(self, messages: Sequence[Json], tools: Sequence[Any] | None, images: Sequence[bytes]) -> Prompt:
        ids: list[int] = [ord(letter) for letter in f"{tools}|" if tools]
        for message in messages:
            content = message["content"]
            for part in [{"type": "text", "text": content}] if isinstance(content, str) else content:
                is_text = part["type"] == "text"
                ids += [ord(letter) for letter in part["text"]] if is_text else [IMAGE_TOKEN] * TOKENS_OF_AN_IMAGE
        if b"broken" in images:
            raise ApiError("An image cannot be read.", param="image_url")
        return Prompt(tuple(ids), tuple(Image(image, None, str(image)) for image in images))

    def text(self, token_ids: Sequence[int]) -> str:
        return "".join(chr(token_id) for token_id in token_ids if token_id > STOP_TOKEN)


@dataclass
class _Running:
    request: Request
    items: asyncio.Queue[Token | RuntimeError] = field(default_factory=asyncio.Queue)
    sent: int = 0
    is_finished: bool = False


class FakeEngine:
    """Repeats the end of the prompt in upper case, one character for each step."""

    def __init__(
        self,
        *,
        slots: int = 2,
        slot_tokens: int = 200,
        encode_s: float = 0.02,
        prefill_s: float = 0.01,
        decode_s: float = 0.002,
        fails_at: str = "",
    ) -> None:
        self.scheduler = Scheduler("nova", slots=slots, split_policy=PAPER)
        self.seconds = {"encode": encode_s, "prefill": prefill_s, "decode": decode_s}
        self.fails_at = fails_at
        self.kept: set[str] = set()
        self.requests: list[Request] = []
        self._slots, self._slot_tokens = slots, slot_tokens
        self._running: dict[str, _Running] = {}
        self._started: set[str] = set()
        self._tasks: set[asyncio.Task[None]] = set()
        self._passes = dict.fromkeys(self.seconds, 0)

    async def start(self) -> None:
        """Load nothing."""

    async def stop(self) -> None:
        for task in self._tasks:
            task.cancel()

    async def submit(self, request: Request) -> AsyncIterator[Token]:
        if len(request.prompt.token_ids) + request.max_tokens > self._slot_tokens:
            raise ValueError("it fits no slot")
        self.requests.append(request)
        running = self._running[request.request_id] = _Running(request)
        images, tokens = len(request.prompt.images), len(request.prompt.token_ids)
        self._tell(Arrived(0.0, request.request_id, images, tokens))
        try:
            while not running.is_finished or not running.items.empty():
                item = await running.items.get()
                if isinstance(item, RuntimeError):
                    raise item
                yield item
        finally:
            self._tell(Cancelled(0.0, request.request_id))

    def release(self, program_id: str) -> bool:
        was_kept = program_id in self.kept
        self.kept.discard(program_id)
        return was_kept

    def stats(self) -> Stats:
        scheduler = self.scheduler
        busy = {scheduler.encoding, scheduler.prefilling, *scheduler.batch} - {None}
        return Stats(
            running=len(busy),
            waiting=len(self._running) - len(busy),
            pending_encode=len(scheduler.encode),
            pending_prefill=len(scheduler.prefill),
            decoding=len(scheduler.decode),
            slots=self._slots,
            slots_used=len(self._started),
            slots_kept=len(self.kept),
            slot_tokens=self._slot_tokens,
            split=scheduler.split,
            cached_images=0,
            stage_s={stage: count * self.seconds[stage] for stage, count in self._passes.items()},
            stage_passes=dict(self._passes),
        )

    def _tell(self, event: Event) -> None:
        for decision in self.scheduler.handle(event):
            match decision:
                case StartEncode(request_id):
                    self._begin("encode", (request_id,))
                case StartPrefill(request_id):
                    self._begin("prefill", (request_id,))
                case StartDecode(request_ids):
                    self._begin("decode", request_ids)
                case Free(request_id):
                    running = self._running.pop(request_id)
                    self._started.discard(request_id)
                    if running.sent and running.request.program_id is not None:
                        self.kept.add(running.request.program_id)

    def _begin(self, stage: str, request_ids: tuple[str, ...]) -> None:
        self._started.update(request_ids)
        task = asyncio.get_running_loop().create_task(self._pass(stage, request_ids))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _pass(self, stage: str, request_ids: tuple[str, ...]) -> None:
        await asyncio.sleep(self.seconds[stage])
        self._passes[stage] += 1
        running = [self._running[request_id] for request_id in request_ids]
        if stage == self.fails_at:
            for each in running:
                each.is_finished = True
                each.request = Request(each.request.request_id, each.request.prompt, 1)
                each.items.put_nowait(RuntimeError(f"{stage} failed"))
            self._tell(Failed(0.0, stage, request_ids))
        elif stage == "encode":
            self._tell(EncodeDone(0.0, *request_ids))
        elif stage == "prefill":
            over = self._says(running[0])
            self._tell(PrefillDone(0.0, *request_ids, len(running[0].request.prompt.token_ids), over))
        else:
            finished = tuple([each.request.request_id for each in running if self._says(each)])
            self._tell(DecodeDone(0.0, request_ids, finished))

    def _says(self, running: _Running) -> bool:
        request = running.request
        said = [ord(chr(token).upper()) for token in request.prompt.token_ids if token > STOP_TOKEN]
        token = said[running.sent] if running.sent < len(said) else STOP_TOKEN
        running.sent += 1
        reason = "stop" if token in request.stop_ids else "length" if running.sent == request.max_tokens else None
        running.is_finished = reason is not None
        running.items.put_nowait(Token(token, reason))
        return running.is_finished


@asynccontextmanager
async def running_nova(engine: FakeEngine, codec: CharacterCodec | None = None, **settings: Any) -> AsyncIterator[str]:
    """Serve on a loopback port, as `thunderagent nova serve` does."""
    server = NovaServer(engine, codec or CharacterCodec(), "tiny", **settings)
    runner = web.AppRunner(server.app, handler_cancellation=True, access_log=None, shutdown_timeout=1)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    try:
        yield f"http://127.0.0.1:{runner.addresses[0][1]}"
    finally:
        await runner.cleanup()
        await engine.stop()


def is_idle(stats: Stats) -> bool:
    """Return whether no request is left anywhere."""
    counts = (stats.running, stats.waiting, stats.pending_encode, stats.pending_prefill, stats.decoding)
    return not any((*counts, stats.slots_used))


async def until_idle(engine: FakeEngine, within_s: float = 5.0) -> None:
    """Wait until no request is left; fail after a time limit."""
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(within_s):
            while not is_idle(engine.stats()):
                await asyncio.sleep(0.005)
    assert is_idle(engine.stats()), engine.stats()
