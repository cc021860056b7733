"""Add SGLang's features besides generating to the simulator's engine: aborts by id, pauses, and tagged KV."""

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
    """Follows the requests that run in an engine, by id."""

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
        """Whether new requests wait for admission."""
        return not self._door.is_set()

    async def enter(self) -> None:
        """Wait until new requests are admitted."""
        await self._door.wait()

    def check(self, asked: Asked) -> int:
        """Return the token limit of an answer; ApiError if it cannot be generated at all."""
        return asked.answer_limit_tokens(self.engine.config.context_limit_tokens)

    @contextmanager
    def running(self, asked: Asked, *, whole: bool, news: asyncio.Event) -> Iterator[Running]:
        """Run one generation while the context is open; `news` is set at each progress and at the end."""
        answer = self._live.compose(
            asked.prompt,
            limit_tokens=self.check(asked),
            min_tokens=asked.min_tokens,
            ignore_eos=asked.ignore_eos,
        )
        priority = -asked.priority  # the engine serves lower numbers first, SGLang higher ones
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
        """Note how much of a prompt was found in the cache, if known."""
        finished = running.generation.finished
        cached_tokens = self.engine.cached_tokens(running.generation.request.request_id)
        running.cached_tokens = finished.cached_tokens if finished else cached_tokens or running.cached_tokens

    def abort(self, rid: str) -> None:
        """End the request with that id and those whose ids begin with it, with their output so far; empty: none."""
        if any(running.asked.rid == rid for running in self._running):
            self._abort_all(rid)

    def abort_all(self) -> None:
        """End every request with its output so far."""
        self._abort_all("")

    def _abort_all(self, beginning: str) -> None:
        for running in list(self._running):
            if running.asked.rid.startswith(beginning):
                self.note_cached(running)
                self._live.realtime.abort(running.generation)

    def pause(self, mode: Literal["abort", "retract", "in_place"]) -> None:
        """Admit no requests; abort the running ones, stop them in place, or retract them without their memory."""
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
        """Drop the cache; do nothing and return False while requests run, or wait without a pause."""
        return (self.is_paused or not self.engine.has_work) and self.engine.reset_prefix_cache()

    def close_tag(self, name: str) -> None:
        """Release the memory with this tag and no other: it is evicted first."""
        self.engine.expire(self.tags.close(name))

    def _count(self, running: Running) -> None:
        """Count a generation that ended or was left, and tag its blocks."""
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
