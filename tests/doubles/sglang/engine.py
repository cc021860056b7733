"""Give the simulator's engine what SGLang has besides generating: aborts by id, pauses, and KV that is tagged."""

from __future__ import annotations

import asyncio
import time
from contextlib import contextmanager
from typing import TYPE_CHECKING, Literal

from tests.doubles.sglang.answers import WEIGHT_VERSION, Running
from tests.doubles.sglang.kv_tags import KvTags
from tests.doubles.sglang.metrics import TokenCounts
from thunderagent.simulator.engine.blocks import hash_blocks

if TYPE_CHECKING:
    from collections.abc import Iterator

    from tests.doubles.sglang.requests import Asked
    from thunderagent.simulator.embedded.live import LiveEngine


class SglangEngine:
    """Follow what runs in an engine under its ids."""

    def __init__(self, live: LiveEngine) -> None:
        self.engine = live.realtime.engine
        self.tags = KvTags()
        self.counts = TokenCounts()
        self._live = live
        self._running: set[Running] = set()
        self._door = asyncio.Event()
        self._door.set()
        self.weight_version = WEIGHT_VERSION

    @property
    def is_paused(self) -> bool:
        """Whether new requests wait at the door."""
        return not self._door.is_set()

    async def enter(self) -> None:
        """Wait until new requests are let in."""
        await self._door.wait()

    def check(self, asked: Asked) -> int:
        """Return how long an answer may be; ApiError if it cannot be generated at all."""
        return asked.answer_limit_tokens(self.engine.config.context_limit_tokens)

    @contextmanager
    def running(self, asked: Asked, *, whole: bool, news: asyncio.Event) -> Iterator[Running]:
        """Run one generation for as long as the context is open; `news` is set whenever it goes on, or is over."""
        answer = self._live.compose(
            asked.prompt,
            limit_tokens=self.check(asked),
            min_tokens=asked.min_tokens,
            ignore_eos=asked.ignore_eos,
        )
        priority = -asked.priority  # the engine's lower number goes first, SGLang's higher
        with self._live.generation(
            asked.prompt, answer, priority=priority, whole=whole, on_news=news.set
        ) as generation:
            running = Running(asked, generation, time.monotonic(), weight_version=self.weight_version)
            if asked.tag is not None:
                running.tag_incarnation = self.tags.open(asked.tag)
            self._running.add(running)
            try:
                yield running
            finally:
                self._running.discard(running)
                self._count(running)

    def note_cached(self, running: Running) -> None:
        """Note how much of a prompt was found in the cache, as far as that is known."""
        finished = running.generation.finished
        cached_tokens = self.engine.cached_tokens(running.generation.request.request_id)
        running.cached_tokens = finished.cached_tokens if finished else cached_tokens or running.cached_tokens

    def abort(self, rid: str) -> None:
        """End the request of that id, with what it has got, and those whose ids begin with it; without it none."""
        if any(running.asked.rid == rid for running in self._running):
            self._abort_all(rid)

    def abort_all(self) -> None:
        """End every request, with what it has got."""
        self._abort_all("")

    def _abort_all(self, beginning: str) -> None:
        for running in list(self._running):
            if running.asked.rid.startswith(beginning):
                self.note_cached(running)
                self._live.realtime.abort(running.generation)

    def pause(self, mode: Literal["abort", "retract", "in_place"]) -> None:
        """Let nothing in; abort what is inside, or let it stand still, without its memory if it is retracted."""
        self._door.clear()
        if mode == "abort":
            self.abort_all()
        else:
            self._live.stand_still()
            if mode == "retract":
                self.engine.retract_all()

    def go_on(self) -> None:
        """End a pause."""
        self._live.go_on()
        self._door.set()

    def flush(self) -> bool:
        """Forget what is cached; False, and nothing happens, while requests run, or wait without a pause."""
        return (self.is_paused or not self.engine.has_work) and self.engine.reset_prefix_cache()

    def close_tag(self, name: str) -> None:
        """Let go of the memory that has this tag and no other: it is the first to be taken."""
        self.engine.expire(self.tags.close(name))

    def _count(self, running: Running) -> None:
        """Count a generation that is over, or was left, and tag its blocks."""
        finished, asked = running.generation.finished, running.asked
        if finished is None:
            self.counts.aborted_count += 1
            return
        self.counts.requests_count += 1
        self.counts.prompt_tokens += finished.prompt_tokens
        self.counts.cached_tokens += finished.cached_tokens
        self.counts.generated_tokens += finished.generated_tokens
        if asked.tag is not None:
            context = [*asked.prompt, *running.generation.request.output_token_ids]
            self.tags.add(asked.tag, running.tag_incarnation, hash_blocks(context, self.engine.config.block_size))
