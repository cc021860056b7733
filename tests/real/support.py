"""Helpers for tests on real engines."""

from __future__ import annotations

import asyncio
import json
import os
import random
import re
import subprocess
import sys
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import httpx2
import msgspec
from prometheus_client.parser import text_string_to_metric_families

from benchmarks.engine_kinds import MODEL_NAME
from benchmarks.environments import RealEngineError, ensure_environment

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable
    from pathlib import Path
    from typing import NoReturn

    import pytest

    from benchmarks.processes import Server
    from benchmarks.real_engine import RealEngine

CHAT = "/v1/chat/completions"
COMPLETIONS = "/v1/completions"
Json = dict[str, Any]

HOP_BY_HOP = {"connection", "keep-alive", "transfer-encoding"}
MOMENTS = re.compile(rb'"(\w+_(?:ts|time|wait|latency|throughput))":[\d.e+-]+')
"""Fields with times in the answers of SGLang's /generate."""
TEXT = re.compile(rb'("(?:content|text)":)"((?:[^"\\]|\\.)*)"')
OF_THE_PROXY = {"x-replica-id", "x-program-id", "x-program-id-source", "x-hold-ms", "x-request-id"}


def words(count: int, seed: int) -> str:
    """Return text with this number of tokens."""
    rng = random.Random(seed)
    return " ".join(f"w{rng.randrange(2000)}" for _ in range(count))


def chat(prompt: str, output_tokens: int, **fields: object) -> Json:
    """Return the body of a chat whose answer has exactly this number of tokens."""
    return conversation([{"role": "user", "content": prompt}], output_tokens, **fields)


def conversation(messages: list[dict[str, str]], output_tokens: int, **fields: object) -> Json:
    """Return the body of a chat with a history."""
    return {"messages": messages, **_exactly(output_tokens), **fields}


def completion(prompt: object, output_tokens: int, **fields: object) -> Json:
    """Return the body of a text completion whose answer has exactly this number of tokens."""
    return {"prompt": prompt, **_exactly(output_tokens), **fields}


def _exactly(output_tokens: int) -> Json:
    return {
        "model": MODEL_NAME,
        "max_tokens": output_tokens,
        "min_tokens": output_tokens,
        "ignore_eos": True,
        "temperature": 0,
    }


async def metrics(client: httpx2.AsyncClient, url: str) -> dict[str, float]:
    """Return an engine's samples by name, summed over their labels."""
    values: dict[str, float] = {}
    for family in text_string_to_metric_families((await client.get(f"{url}/metrics")).text):
        for sample in family.samples:
            values[sample.name] = values.get(sample.name, 0.0) + sample.value
    return values


async def replicas(client: httpx2.AsyncClient, url: str) -> list[Json]:
    """Return the proxy's report of its replicas."""
    found: list[Json] = (await client.get(f"{url}/replicas")).json()["replicas"]
    return found


async def answers_503(client: httpx2.AsyncClient, url: str) -> bool:
    """Return whether a server that is ending says so; not if it closes its idle connections just then."""
    with suppress(httpx2.RemoteProtocolError):
        return (await client.get(url, headers={"Connection": "close"})).status_code == 503
    return False


async def until_all_up(client: httpx2.AsyncClient, url: str) -> None:
    """Wait until all replicas of the proxy are up."""

    async def all_up() -> bool:
        return all(replica["up"] for replica in await replicas(client, url))

    await until(all_up)


async def until(condition: Callable[[], Awaitable[bool]], *, within_s: float = 30.0) -> None:
    """Wait until an awaited condition holds. Raises TimeoutError."""
    async with asyncio.timeout(within_s):
        while not await condition():
            await asyncio.sleep(0.05)


def events(body: bytes) -> list[Json]:
    """Check that a stream is complete, and return its events."""
    *found, done, rest = body.decode().split("\n\n")
    assert (done, rest) == ("data: [DONE]", "")
    return [json.loads(event.removeprefix("data: ")) for event in found]


@dataclass(frozen=True)
class Answer:
    """An answer without the parts that change with time."""

    status: int
    reason: str
    headers: list[tuple[str, str]]
    body: bytes


async def ask(engine: RealEngine, url: str, path: str, body: dict[str, Any] | bytes | None) -> Answer:
    """Send a request with an empty prefix cache and a fixed request id; without a body by GET."""
    await engine.reset_prefix_cache()
    request: dict[str, Any] = {"content": body} if isinstance(body, bytes) else {"json": body}
    headers = {"X-Request-Id": "pinned", "X-Program-ID": "exact", "Content-Type": "application/json"}
    async with httpx2.AsyncClient(base_url=url, timeout=60, headers=headers) as client:
        response = await (client.get(path) if body is None else client.post(path, **request))
    dropped = HOP_BY_HOP | OF_THE_PROXY | {"date"}
    kept = [(name.lower(), value) for name, value in response.headers.multi_items() if name.lower() not in dropped]
    moment = re.sub(rb'"created(_at)?":\d+', b'"created":0', response.content)
    moment = re.sub(rb'"(msg|resp)_\w+"', b'"id"', moment)
    moment = re.sub(rb'"modelperm-\w+"', b'"modelperm"', moment)
    moment = MOMENTS.sub(rb'"\1":0', moment)
    return Answer(response.status_code, response.reason_phrase, kept, moment)


async def assert_same(engine: RealEngine, proxy: Server, path: str, body: dict[str, Any] | bytes | None) -> Answer:
    """Check that the engine's own answer equals the one through the proxy, and return it.

    A late engine server puts several tokens into one stream event, so a single difference proves nothing: one answer
    through the proxy must equal one of the engine's own. In the end only this may differ, and no other byte.
    """
    own: list[Answer] = []
    for tries_left in range(19, -1, -1):
        own.append(direct := await ask(engine, engine.url, path, body))
        through = await ask(engine, proxy.url, path, body)
        if through in own:
            return through
        if not tries_left:
            assert without_cuts(through.body) == without_cuts(direct.body)
            assert replace(through, body=b"") == replace(direct, body=b"")
            return through
    raise AssertionError("the last try returns or raises")


def without_cuts(stream: bytes) -> tuple[bytes, list[bytes]]:
    """Return the text of a stream, and its events without text, with equal neighbours merged."""
    texts, events = [], [b""]
    for event in stream.split(b"\n\n"):
        if (rest := TEXT.sub(rb"\1", event)) != events[-1]:
            events.append(rest)
        texts += [text for _, text in TEXT.findall(event)]
    return b"".join(texts), events


class Programs:
    """Agents behind one proxy, each with a growing history; `salt` makes their words new to the engine."""

    def __init__(self, client: httpx2.AsyncClient, salt: str) -> None:
        self.client = client
        self.salt = salt
        self.messages: dict[str, list[dict[str, str]]] = {}

    async def turn(self, program_id: str, new_tokens: int = 100, output_tokens: int = 4) -> None:
        messages = self.messages.setdefault(program_id, [])
        seed = int.from_bytes(f"{self.salt}/{program_id}".encode(), "big") * 100 + len(messages)
        messages.append({"role": "user", "content": words(new_tokens, seed=seed)})
        answer = await self.client.post(
            CHAT, json=conversation(messages, output_tokens), headers={"X-Program-ID": program_id}
        )
        assert answer.status_code == 200, answer.text
        messages.append({"role": "assistant", "content": answer.json()["choices"][0]["message"]["content"]})


def priorities_in(event_log: Path) -> dict[str, int]:
    """Return the priority of each program's last grant."""
    found: dict[str, int] = {}
    for line in event_log.read_bytes().splitlines()[1:]:
        for kind, decision in msgspec.json.decode(line)[2]:
            if kind == "Grant" and decision["engine_priority"] is not None:
                found[decision["program_id"]] = decision["engine_priority"]
    return found


def assert_tests_pass_in(
    name: str,
    requirements: list[str],
    size: str,
    tests: list[str],
    require_real: Callable[[str], NoReturn],
    config: pytest.Config,
    *,
    timeout_s: float,
    **variables: str,
) -> None:
    """Run tests with the packages of a separate environment added to ours; none may fail or be skipped."""
    try:
        with config.pluginmanager.getplugin("capturemanager").global_and_fixture_disabled():
            python = ensure_environment(name, requirements, size)
    except RealEngineError as error:
        require_real(f"no environment {name}: {error}")
    find = [str(python), "-c", "import sysconfig; print(sysconfig.get_path('purelib'))"]
    packages = subprocess.run(find, check=True, capture_output=True, text=True).stdout.strip()
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-m", "", "-p", "no:cacheprovider", "-n", "0", *tests],
        env={**os.environ, "PYTHONPATH": packages, **variables},
        capture_output=True,
        text=True,
        check=False,
        timeout=timeout_s,
    )
    print(done.stdout)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "skipped" not in done.stdout.splitlines()[-1]
