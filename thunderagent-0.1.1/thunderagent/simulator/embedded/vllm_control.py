"""Control of the embedded engine under vLLM's dialect: pauses, sleep, aborts, and weights, which it does not have.

As in vLLM's development mode (vLLM 0.32, `entrypoints/rl/online/api_router.py` and `entrypoints/serve/dev`). While it
is paused new requests wait before entering; those inside were aborted (`abort`), were waited for (`wait`), or stand
still (`keep`). It sleeps as it is paused, and loses its cache by that.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Final, Literal, TypeAlias, cast, get_args

import msgspec
from aiohttp import web

from thunderagent.simulator.embedded.live import LiveEngine, json_response
from thunderagent.simulator.embedded.requests import ApiError

PauseMode: TypeAlias = Literal["abort", "wait", "keep"]
WAIT_STEP_S: Final = 0.005


class VllmControl:
    """Handlers of the control endpoints, which are for all data-parallel ranks."""

    def __init__(self, ranks: Sequence[LiveEngine]) -> None:
        self._ranks = ranks
        self._is_asleep = False
        self._weight_version = "default"
        self._door = asyncio.Event()
        self._door.set()

    def routes(self) -> list[web.RouteDef]:
        """Return the routes of the control endpoints."""
        return [
            web.post("/pause", self._pause),
            web.post("/resume", self._end_pause),
            web.get("/is_paused", self._is_paused),
            web.post("/sleep", self._sleep),
            web.post("/wake_up", self._end_sleep),
            web.get("/is_sleeping", self._is_sleeping),
            web.post("/abort_requests", self._abort_requests),
            web.post("/reset_prefix_cache", self._reset_prefix_cache),
            web.post("/collective_rpc", self._collective_rpc),
            web.post("/update_weights", self._update_weights),
            web.post("/update_weight_version", self._update_weight_version),
            web.get("/weight_info", self._weight_info),
        ]

    async def enter(self) -> None:
        """Wait until a new request may begin."""
        await self._door.wait()

    async def _pause(self, request: web.Request) -> web.Response:
        clears = request.query.get("clear_cache", "true").lower() in ("true", "1")
        await self._close_door(_mode_of(request), clears=clears)
        return json_response({"status": "paused"})

    async def _end_pause(self, _request: web.Request) -> web.Response:
        self._open_door()
        return json_response({"status": "resumed"})

    async def _is_paused(self, _request: web.Request) -> web.Response:
        return json_response({"is_paused": not self._door.is_set()})

    async def _sleep(self, request: web.Request) -> web.Response:
        level = request.query.get("level", "1")
        if level not in ("0", "1", "2"):
            raise ApiError("level is 0, 1 or 2", status=422)
        await self._close_door(_mode_of(request), clears=level != "0")
        self._is_asleep = True
        return json_response({"status": "sleeping", "level": int(level)})

    async def _end_sleep(self, request: web.Request) -> web.Response:
        tags = request.query.getall("tags", None)
        if tags is None or "kv_cache" in tags:
            self._is_asleep = False
            self._open_door()
        return json_response({"status": "sleeping" if self._is_asleep else "awake", "tags": tags})

    async def _is_sleeping(self, _request: web.Request) -> web.Response:
        return json_response({"is_sleeping": self._is_asleep})

    async def _abort_requests(self, request: web.Request) -> web.Response:
        wanted = _object_of(await request.read()).get("request_ids")
        return json_response({"status": "aborted", "aborted": 0 if wanted else self._abort_all()})

    async def _reset_prefix_cache(self, _request: web.Request) -> web.Response:
        return json_response({"success": self._reset_caches()})

    async def _collective_rpc(self, request: web.Request) -> web.Response:
        if not _object_of(await request.read()).get("method"):
            raise ApiError("Missing 'method' in request body")
        return json_response({"results": [None]})

    async def _update_weights(self, _request: web.Request) -> web.Response:
        return json_response({"message": "Weights updated"})

    async def _update_weight_version(self, request: web.Request) -> web.Response:
        self._weight_version = str(_object_of(await request.read()).get("new_version"))
        return json_response({"success": True, "new_version": self._weight_version})

    async def _weight_info(self, _request: web.Request) -> web.Response:
        return json_response({"weight_version": self._weight_version})

    async def _close_door(self, mode: PauseMode, *, clears: bool) -> None:
        self._door.clear()
        if mode == "abort":
            self._abort_all()
        while mode == "wait" and self._has_work and not self._door.is_set():  # noqa: ASYNC110 - the model has no events
            await asyncio.sleep(WAIT_STEP_S)
        if not self._door.is_set():
            for rank in self._ranks:
                rank.stand_still()
            if clears:
                self._reset_caches()  # refused while kept requests hold blocks

    def _open_door(self) -> None:
        self._door.set()
        for rank in self._ranks:
            rank.go_on()

    @property
    def _has_work(self) -> bool:
        return any(rank.realtime.engine.has_work for rank in self._ranks)

    def _reset_caches(self) -> bool:
        done = [rank.realtime.engine.reset_prefix_cache() for rank in self._ranks]
        return all(done)

    def _abort_all(self) -> int:
        running = [(rank, generation) for rank in self._ranks for generation in rank.realtime.generations]
        for rank, generation in running:
            rank.realtime.abort(generation)
        return len(running)


def _mode_of(request: web.Request) -> PauseMode:
    mode = request.query.get("mode", "abort")
    if mode not in get_args(PauseMode):
        raise ApiError(f"mode is one of {', '.join(get_args(PauseMode))}, not {mode!r}", status=422)
    return cast("PauseMode", mode)


def _object_of(body: bytes) -> dict[str, object]:
    try:
        value = msgspec.json.decode(body) if body else {}
    except msgspec.DecodeError as error:
        raise ApiError("Invalid JSON format") from error
    if not isinstance(value, dict):
        raise ApiError("Request body must be a JSON object")
    return value
