"""The API of rollouts: one program's, and those of a group that have ended.

Token ids are prompts: a data key whose tenant counts reads the rollouts of its own tenant, and no other.
"""

from __future__ import annotations

import asyncio
from functools import partial
from typing import Any, Final, Literal

import msgspec
from aiohttp import web

from thunderagent.errors import NoRolloutError, RequestError, RolloutDroppedError, RolloutsOffError
from thunderagent.proxy.gate.tenancy import Tenancy
from thunderagent.proxy.watch.rollouts import Rollouts
from thunderagent.rollouts.records import Rollout, Turn
from thunderagent.rollouts.samples import samples_of
from thunderagent.rollouts.table import Entry
from thunderagent.rollouts.tokens import from_planes, logprob_values, token_ids

MAX_WAIT_S: Final = 60.0
MAX_ROLLOUTS_COUNT: Final = 1000
NEXT_HEADER: Final = "X-Next"

View = Literal["turns", "samples", "summary"]
VIEWS: Final[tuple[View, ...]] = ("turns", "samples", "summary")


class RolloutHandlers:
    """Handlers of the routes."""

    def __init__(self, rollouts: Rollouts | None, tenancy: Tenancy) -> None:
        """Read `rollouts`; None is that nothing is recorded."""
        self._rollouts = rollouts
        self._tenancy = tenancy

    def routes(self) -> list[web.RouteDef]:
        """Return the routes."""
        return [
            web.get("/programs/{program_id:.+}/trajectory", self.rollout),
            web.delete("/programs/{program_id:.+}/trajectory", self.delete),
            web.get("/rollouts", self.rollouts),
        ]

    async def rollout(self, request: web.Request) -> web.Response:
        """Return a program's rollout: its turns, its samples, or only the summary; also while the program lives.

        `wait_s` waits so long for the program's end, at most a minute.
        """
        rollouts, program_id = self._on(), request.match_info["program_id"]
        view, generation = _view(request, default="turns"), _number(request, "generation")
        wait_s = _number(request, "wait_s")
        entry = self._find(rollouts, program_id, generation)
        if wait_s and not entry.rollout.ended and generation is None:
            await rollouts.until_ended(program_id, min(MAX_WAIT_S, wait_s))
            entry = self._find(rollouts, program_id, generation)
        body = await _read(rollouts, entry, view)
        if body is None:
            raise RolloutDroppedError(f"the rollout of program {program_id!r} was deleted, or cannot be read")
        return web.Response(body=body, content_type="application/json")

    async def delete(self, request: web.Request) -> web.Response:
        """Forget a program's ended rollout; a live one cannot be deleted."""
        rollouts, program_id = self._on(), request.match_info["program_id"]
        entry = self._find(rollouts, program_id, _number(request, "generation"))
        if not entry.rollout.ended:
            raise RequestError(f"program {program_id!r} lives; its rollout can be deleted once it has ended")
        rollouts.table.drop(entry.rollout.seq, "it was deleted")
        return web.json_response({"program_id": program_id, "deleted": True})

    async def rollouts(self, request: web.Request) -> web.StreamResponse:
        """Return ended rollouts as lines of JSON, in the order of their ending; `X-Next` is the next `after`."""
        rollouts, own = self._on(), self._tenancy.own
        view, after = _view(request, default="samples"), _number(request, "after") or 0
        limit = min(MAX_ROLLOUTS_COUNT, _number(request, "limit") or 100)
        group_id, found = request.query.get("group"), []
        for entry in rollouts.table.ended_after(after, group_id=group_id, tenant=own):
            found.append(entry)
            if len(found) >= limit:
                break
        await rollouts.settle_together(found)
        response = web.StreamResponse(headers={NEXT_HEADER: str(found[-1].rollout.seq if found else after)})
        response.content_type = "application/jsonl"
        await response.prepare(request)
        for entry in found:
            if (line := await _read(rollouts, entry, view)) is not None:
                await response.write(line + b"\n")
                rollouts.table.was_read(entry)
        await response.write_eof()
        return response

    def _on(self) -> Rollouts:
        if self._rollouts is None:
            raise RolloutsOffError("nothing is recorded; start the proxy with --rollouts ids or --rollouts logprobs")
        return self._rollouts

    def _find(self, rollouts: Rollouts, program_id: str, generation: int | None) -> Entry:
        """Return a program's rollout. Raises `NoRolloutError`, also for another tenant's, and `RolloutDroppedError`."""
        own, entry = self._tenancy.own, rollouts.table.find(program_id, generation)
        if entry is not None and own in (None, entry.rollout.tenant):
            return entry
        why = rollouts.table.why_dropped(program_id)
        if entry is None and why and own is None:
            raise RolloutDroppedError(f"the rollout of program {program_id!r} was dropped: {why}")
        raise NoRolloutError(f"there is no rollout of program {program_id!r}")


async def _read(rollouts: Rollouts, entry: Entry, view: View) -> bytes | None:
    """Return a rollout as JSON; None if it was deleted meanwhile, or cannot be read."""
    turns: list[Turn] = []
    await rollouts.settled(entry)
    if view != "summary":
        try:
            turns = await rollouts.turns(entry)
        except (ValueError, OSError):
            return None
    write = partial(_written, entry.rollout, turns, view)
    body = write() if rollouts.is_small(entry) or view == "summary" else await asyncio.to_thread(write)
    if entry.rollout.ended:
        rollouts.table.was_read(entry)
    return body


def _written(rollout: Rollout, turns: list[Turn], view: View) -> bytes:
    said: dict[str, Any] = {**msgspec.structs.asdict(rollout), "mask_sample": rollout.mask_sample}
    if view == "turns":
        said["turns"] = [turn_report(turn) for turn in turns]
    elif view == "samples":
        said["samples"] = [msgspec.to_builtins(sample) for sample in samples_of(turns)]
    return msgspec.json.encode(said)


def turn_report(turn: Turn) -> dict[str, Any]:
    """Return a turn for JSON: `prompt_new_ids` are the prompt's tokens after the first `shared_tokens`."""
    said = msgspec.structs.asdict(turn)
    del said["prompt_new"]
    said["prompt_new_ids"] = token_ids(from_planes(turn.prompt_new))
    said["outputs"] = [
        {
            "ids": token_ids(output.tokens),
            "logprobs": logprob_values(from_planes(output.logprobs)) if output.logprobs else None,
            "finish": output.finish,
            "spans": [{"version": each.version, "start": each.start, "end": each.end} for each in output.spans],
        }
        for output in turn.outputs
    ]
    return said


def _view(request: web.Request, *, default: View) -> View:
    view = request.query.get("view", default)
    for each in VIEWS:
        if view == each:
            return each
    raise RequestError(f"view is one of {', '.join(VIEWS)}, not {view!r}")


def _number(request: web.Request, name: str) -> int | None:
    text = request.query.get(name)
    if text is None:
        return None
    if not (text.isascii() and text.isdigit() and len(text) < 16):
        raise RequestError(f"{name} is a whole number, not {text!r}")
    return int(text)
