"""A scripted engine as trainers use it: tokens in, tokens out, paused, aborted, and given new weights."""

from __future__ import annotations

import asyncio
import json
from contextlib import AsyncExitStack, asynccontextmanager
from typing import TYPE_CHECKING, Any

from tests.integration.support import Call, answers, fake_replica, running_proxy

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    from tests.integration.support import FakeReplica, RunningProxy

PARTIAL_COUNT = 3
"""Tokens of an aborted answer that were already generated."""

TOKEN_PATHS = {"/generate": "input_ids", "/inference/v1/generate": "token_ids", "/skyrl/v1/generate": "token_ids"}


def continuation(prompt: list[int], count: int) -> list[int]:
    """Return the engine's answer to a prompt: it continues counting, so tests see whether parts of an answer fit."""
    return list(range(prompt[-1] + 1, prompt[-1] + 1 + count))


class TrainedEngine:
    """Behave: generate while the gate is open; while it is closed, wait until it opens or everything is aborted."""

    def __init__(self, *, gate_open: bool = True) -> None:
        self.turns: list[Call] = []
        """Requests with token prompts."""
        self.told: list[tuple[str, Any]] = []
        """All other requests, in order: the target and the JSON body."""
        self.failures_count = 0
        """The number of control calls that will still fail."""
        self._gate = asyncio.Event()
        self._abort = asyncio.Event()
        self._running_count = 0
        if gate_open:
            self._gate.set()

    def open_gate(self) -> None:
        self._gate.set()

    @property
    def running_count(self) -> int:
        return self._running_count

    async def __call__(self, call: Call) -> None:
        path = call.target.partition("?")[0]
        if path in TOKEN_PATHS:
            await self._generate(call, path)
        elif path == "/v1/loads":
            load = {"dp_rank": 0, "num_running_reqs": self._running_count, "num_waiting_reqs": 0}
            await answers({"loads": [{**load, "num_total_reqs": self._running_count}]})(call)
        elif path == "/v1/models":
            await answers({"object": "list", "data": [{"id": "policy", "max_model_len": 4096}]})(call)
        elif path == "/get_world_size":
            await answers({"world_size": 1})(call)
        else:
            await self._obey(call, path)

    async def _obey(self, call: Call, path: str) -> None:
        self.told.append((call.target, json.loads(call.body) if call.body else None))
        if self.failures_count:
            self.failures_count -= 1
            await answers({"error": {"message": "busy"}}, status="500 Internal Server Error")(call)
            return
        if path == "/abort_request":
            self._abort.set()
            self._abort = asyncio.Event()
        await answers({"status": "ok"})(call)

    async def _generate(self, call: Call, path: str) -> None:
        self.turns.append(call)
        self._running_count += 1
        asked = call.json()
        prompt = asked[TOKEN_PATHS[path]]
        sampling = asked["sampling_params"]
        tokens = continuation(prompt, sampling.get("max_new_tokens", sampling.get("max_tokens", 8)))
        waits = [asyncio.ensure_future(event.wait()) for event in (self._gate, self._abort, call.left)]
        try:
            done, _ = await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
        finally:
            self._running_count -= 1
            for wait in waits:
                wait.cancel()
        reason = "length"
        if waits[1] in done:
            tokens, reason = tokens[:PARTIAL_COUNT], "abort"
        if waits[2] not in done:
            await answers(_answer(path, prompt, tokens, reason))(call)


def _answer(path: str, prompt: list[int], tokens: list[int], reason: str) -> dict[str, Any]:
    if path == "/generate":
        meta_info = {
            "id": "1",
            "finish_reason": {"type": reason},
            "prompt_tokens": len(prompt),
            "completion_tokens": len(tokens),
            "cached_tokens": 0,
            "output_token_logprobs": [[-0.5, token, None] for token in tokens],
        }
        return {"text": "", "output_ids": tokens, "meta_info": meta_info}
    logprobs = {"content": [{"token": f"token_id:{token}", "logprob": -0.5} for token in tokens]}
    choice = {"index": 0, "finish_reason": reason, "token_ids": tokens, "logprobs": logprobs}
    total = len(prompt) + len(tokens)
    usage = {"prompt_tokens": len(prompt), "completion_tokens": len(tokens), "total_tokens": total}
    if path.startswith("/skyrl/"):
        return {"choices": [{**choice, "routed_experts": [[[0]]] * len(tokens)}]}
    return {"request_id": "1", "choices": [choice], "usage": usage}


@asynccontextmanager
async def trained_engines(
    count: int = 2, *, gate_open: bool = True, listed: bool = True, **config: Any
) -> AsyncIterator[tuple[RunningProxy, list[TrainedEngine], list[FakeReplica]]]:
    """Run a proxy with this number of engines; at the end no turn, no socket and no program may be left.

    If they are not `listed`, it starts without them, and the trainer adds them.
    """
    async with AsyncExitStack() as stack:
        replicas = [await stack.enter_async_context(fake_replica()) for _ in range(count)]
        engines = [TrainedEngine(gate_open=gate_open) for _ in replicas]
        for replica, engine in zip(replicas, engines, strict=True):
            replica.behaviour = engine
        urls = [replica.url for replica in replicas] if listed else []
        proxy = await stack.enter_async_context(running_proxy(*urls, embedded_engines=0, **config))
        yield proxy, engines, replicas
        assert len(proxy.runtime.scheduler.programs) == 0
