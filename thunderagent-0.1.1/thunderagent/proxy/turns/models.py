"""`/v1/models`, and `/v1/models/{model}`: the union of what all replicas serve, and each of it."""

from __future__ import annotations

import asyncio
import re
from collections.abc import Mapping
from functools import partial
from typing import Any, NamedTuple
from urllib.parse import unquote

import msgspec
from aiohttp import web
from msgspec import Raw
from multidict import CIMultiDict

from thunderagent.backends.asking import MAX_PARTS_COUNT, aside
from thunderagent.errors import NoReplicaError, ReplicaError, UnknownModelError
from thunderagent.leases import ReplicaMap
from thunderagent.proxy.fleet.breaker import BreakerState
from thunderagent.proxy.fleet.client import ReplicaClient
from thunderagent.proxy.fleet.replicas import Replicas
from thunderagent.proxy.reading.body_fields import begins_with
from thunderagent.proxy.reading.json_cost import list_of
from thunderagent.proxy.reading.sse import UNREADABLE
from thunderagent.proxy.wire.aiohttp_request import target_of
from thunderagent.proxy.wire.headers import forwarded_request_headers, forwarded_response_headers

DEADLINE_S = 5.0
MAX_ID_BYTES = 8192

_SEPARATED = re.compile(r"^(?:[/\\]+[^/\\]+){2}[/\\]+")
"""What is before the name, in each spelling that `Target.words` reads so."""

SHOWN_CHARS = 200
"""At most this much of a wrong name is repeated."""

MODELS = ("v1", "models")
"""The words of the list's path; a name may follow, with slashes."""


class _Answer(NamedTuple):
    status: int
    headers: CIMultiDict[str]
    body: bytes
    models: dict[str, Raw]
    """As the replica describes them, by their ids."""


class Models:
    """Ask replicas that are up for their models, LoRA names too: all but tripped ones that others stand in for."""

    def __init__(
        self, replica_map: ReplicaMap, client: ReplicaClient, replicas: Replicas, aliases: Mapping[str, str]
    ) -> None:
        """Ask with `client`; `aliases` are further names of models."""
        self._aliases = aliases
        self._map = replica_map
        self._client = client
        self._replicas = replicas

    async def handle(self, request: web.Request) -> web.Response:
        """Answer with each model once, in the order of the replicas.

        If all refuse in the same way, answer as the first does. Raises `NoReplicaError` if none answers otherwise.
        """
        found = await self._union(request)
        return found if isinstance(found, web.Response) else _json({"object": "list", "data": list(found.values())})

    async def retrieve(self, request: web.Request) -> web.Response:
        """Answer with the one model that the path names: what is listed can be retrieved.

        Raises `UnknownModelError` if it is not listed; otherwise like `handle`.
        """
        found = await self._union(request)
        if isinstance(found, web.Response):
            return found
        name = unquote(_SEPARATED.sub("", target_of(request).engine_path, count=1)).rstrip("/")
        if name not in found:
            raise UnknownModelError(f"the model {name[:SHOWN_CHARS]!r} does not exist")
        return _json(found[name])

    async def _union(self, request: web.Request) -> dict[str, Any] | web.Response:
        """Return each model by its name, aliases too, or an answer without any."""
        headers = forwarded_request_headers(request.headers)
        headers.popall("Accept-Encoding", None)  # the answers are read here
        answers = await asyncio.gather(*(self._ask(replica_id, headers) for replica_id in self._replica_ids()))
        models: dict[str, Any] = {}
        for answer in answers:
            if answer is not None:
                for name, model in answer.models.items():
                    models.setdefault(name, model)
                await asyncio.sleep(0)  # each may list thousands
        for alias, served in self._aliases.items():
            if served in models:
                models.setdefault(alias, {**msgspec.json.decode(models[served]), "id": alias, "root": served})
        if models:
            return models
        refusals = [answer for answer in answers if answer is not None and answer.status >= 400]
        if refusals and len({answer.status if answer is not None else 0 for answer in answers}) == 1:
            return web.Response(status=refusals[0].status, headers=refusals[0].headers, body=refusals[0].body)
        raise NoReplicaError("no replica that is up lists its models")

    def _replica_ids(self) -> list[str]:
        """Return who is asked. A tripped replica may hang; it is asked if no other one of its pool is open."""
        state_of = self._replicas.breakers.state_of
        up = [state for state in self._map.states.values() if state.is_up]
        tripped_ids = {each.replica_id for each in up if state_of(each.replica_id) is BreakerState.OPEN}
        pools = {each.pool for each in up if each.is_open and each.replica_id not in tripped_ids}
        return [each.replica_id for each in up if each.replica_id not in tripped_ids or each.pool not in pools]

    async def _ask(self, replica_id: str, headers: CIMultiDict[str]) -> _Answer | None:
        """Return a replica's answer; None if it does not answer."""
        try:
            async with asyncio.timeout(DEADLINE_S):
                url = self._replicas.url_of(replica_id)
                response = await self._client.send(replica_id, url, "GET", "/v1/models", headers, None)
                try:
                    body = await self._client.read(replica_id, response)
                finally:
                    response.close()
        except (ReplicaError, TimeoutError):
            return None
        kept = forwarded_response_headers(response.headers, keep_length=False)
        models = await aside(partial(_models_in, body), body) if response.status < 400 else {}
        return _Answer(response.status, kept, body, models)


def _json(value: dict[str, Any]) -> web.Response:
    return web.Response(body=msgspec.json.encode(value), content_type="application/json")


class _Listed(msgspec.Struct):
    id: Raw = Raw()


class _List(msgspec.Struct):
    data: Raw = Raw()


_decode_list = msgspec.json.Decoder(_List).decode
_decode_listed = msgspec.json.Decoder(_Listed).decode


def _models_in(body: bytes) -> dict[str, Raw]:
    """Return the models of a list as sent, by their ids; nothing beyond what a poll accepts is built."""
    if body.count(b"{") > MAX_PARTS_COUNT:
        return {}
    try:
        listed = list_of(_decode_list(body).data) or []
        found = [(model, _decode_listed(model).id) for model in listed if begins_with(model, b"{")]
        models = {_id_of(model_id): model for model, model_id in reversed(found)}
    except UNREADABLE:
        return {}
    return dict(reversed(models.items()))


def _id_of(model_id: Raw) -> str:
    text = bytes(memoryview(model_id)[:MAX_ID_BYTES])
    return str(msgspec.json.decode(text)) if text.startswith(b'"') and len(model_id) <= MAX_ID_BYTES else text.decode()
