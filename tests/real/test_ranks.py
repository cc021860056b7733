"""Two data-parallel ranks of a real vLLM behind one port are two replicas, and a program stays on its rank."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

import httpx2
import pytest

from benchmarks.processes import thunderagent
from benchmarks.real_engine import RealEngine
from tests.loopback import free_ports
from tests.real.conftest import _engine_config
from tests.real.support import until_all_up

if TYPE_CHECKING:
    from pathlib import Path


async def served_by_rank(client: httpx2.AsyncClient, url: str) -> dict[str, float]:
    """Return the number of requests that each rank has served."""
    lines = (await client.get(f"{url}/metrics")).text.splitlines()
    counts: dict[str, float] = {}
    for line in lines:
        if line.startswith("vllm:request_success_total{"):
            rank = line.partition('engine="')[2].partition('"')[0]
            counts[rank] = counts.get(rank, 0.0) + float(line.rpartition(" ")[2])
    return counts


@pytest.mark.timeout(400)
async def test_the_ranks_of_a_real_engine_are_replicas(vllm: None, tmp_path: Path) -> None:
    """They are found by the metrics, each with its capacity; a second turn hits the first one's cache on its rank."""
    config = replace(_engine_config(free_ports(1)[0]), extra_args=("--data-parallel-size", "2", "--max-num-seqs", "8"))
    options = ("--data-parallel-ranks", "auto", "--poll-interval-s", "0.25", "--poll-deadline-s", "20")
    async with RealEngine(config) as engine, httpx2.AsyncClient(timeout=60) as client:
        serving = thunderagent("serve", "--port", "0", "--backends", engine.url, *options, log_path=tmp_path / "log")
        async with serving as proxy:
            await until_all_up(client, proxy.url)
            replicas = (await client.get(f"{proxy.url}/replicas")).json()["replicas"]
            host = engine.url.removeprefix("http://")
            assert [each["replica_id"] for each in replicas] == [f"{host}/0", f"{host}/1"]
            assert [each["capacity_tokens"] for each in replicas] == [config.pool_tokens] * 2
            before = await served_by_rank(client, engine.url)
            homes: dict[str, str] = {}
            cached: dict[str, int] = {}
            for name in "abcd":
                messages: list[dict[str, Any]] = [{"role": "user", "content": f"w{ord(name)} " * 300}]
                for _ in range(2):
                    body = {"model": "random-llama", "messages": messages, "max_tokens": 8, "ignore_eos": True}
                    answer = await client.post(f"{proxy.url}/p/{name}/v1/chat/completions", json=body)
                    assert answer.status_code == 200, answer.text
                    assert homes.setdefault(name, answer.headers["X-Replica-ID"]) == answer.headers["X-Replica-ID"]
                    cached[name] = answer.json()["usage"]["prompt_tokens_details"]["cached_tokens"]
                    messages += [answer.json()["choices"][0]["message"], {"role": "user", "content": "w1 w2"}]
            assert set(homes.values()) == {f"{host}/0", f"{host}/1"}
            assert min(cached.values()) > 250
            after = await served_by_rank(client, engine.url)
            for rank in ("0", "1"):
                here = [home for home in homes.values() if home.endswith(f"/{rank}")]
                assert after[rank] - before.get(rank, 0.0) == 2 * len(here)
