"""`thunderagent doctor` finds every fault that is planted here, and says the remedy; where all is well it finds none.

A relay in front of simulated engines plants faults by changing their answers.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import re
from contextlib import asynccontextmanager
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from email.utils import format_datetime
from typing import TYPE_CHECKING, Any

import aiohttp
import httpx2
import pytest
from aiohttp import web

from tests.doubles.sglang.server import SglangServer
from tests.integration.support import DEADLINE_S, Gate, ask, cap, fake_replica, get, post, running_proxy, until
from tests.loopback import free_ports
from thunderagent.cli import build_parser, main
from thunderagent.doctor import proxies
from thunderagent.doctor.asking import Answer, Asker
from thunderagent.doctor.command import examine
from thunderagent.doctor.findings import Finding, Level, exit_status
from thunderagent.proxy.gate.keys import mint_key
from thunderagent.simulator.embedded.endpoints import EngineServer
from thunderagent.simulator.embedded.options import ServerConfig
from thunderagent.simulator.embedded.server import Build, running
from thunderagent.simulator.engine.records import EngineConfig
from thunderagent.simulator.engine.timing import profile_from

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable
    from pathlib import Path


@dataclass
class Bent:
    """An answer on its way, which a fault may change."""

    path: str
    status: int
    headers: dict[str, str]
    body: bytes

    def replace(self, old: str, new: str) -> None:
        """Replace the matches of a pattern in the body."""
        self.body = re.sub(old, new, self.body.decode()).encode()

    def usage(self) -> dict[str, Any] | None:
        """Return the usage of a whole answer; None if this is none."""
        if not self.path.endswith("completions") or self.status != 200:
            return None
        usage = json.loads(self.body)["usage"]
        assert isinstance(usage, dict)
        return usage

    def set_usage(self, **fields: Any) -> None:
        self.body = json.dumps(json.loads(self.body) | {"usage": (self.usage() or {}) | fields}).encode()


@asynccontextmanager
async def relay(*urls: str, bend: Callable[[Bent], None] = lambda _: None, drops: str = "") -> AsyncIterator[str]:
    """Stand before one address, or balance load over several; `drops` is a header that does not come through."""
    count = 0

    async def handle(request: web.Request) -> web.Response:
        nonlocal count
        url = urls[count % len(urls)]
        count += 1
        unwanted = {"host", "content-length", "connection", drops.lower()}
        headers = {name: value for name, value in request.headers.items() if name.lower() not in unwanted}
        whole = url + request.path_qs
        async with http.request(request.method, whole, headers=headers, data=await request.read()) as answer:
            kept = {n: v for n, v in answer.headers.items() if n.lower() not in ("content-length", "transfer-encoding")}
            bent = Bent(request.path, answer.status, kept, await answer.read())
        bend(bent)
        return web.Response(status=bent.status, headers=bent.headers, body=bent.body)

    app = web.Application()
    app.router.add_route("*", "/{path:.*}", handle)
    runner = web.AppRunner(app, access_log=None)
    async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(force_close=True)) as http:
        await runner.setup()
        try:
            await web.TCPSite(runner, "127.0.0.1", 0).start()
            yield f"http://127.0.0.1:{runner.addresses[0][1]}"
        finally:
            await runner.cleanup()


@asynccontextmanager
async def engine(build: Build = EngineServer, model: str = "simulated") -> AsyncIterator[str]:
    """Run a simulated engine that takes no time, in this process."""
    config = EngineConfig.of(profile_from("instant"), kv_tokens=16_000)
    async with running(ServerConfig(config, model=model, port=0, grace_s=0.0), build) as url:
        yield url


def options(*argv: str) -> argparse.Namespace:
    return build_parser().parse_args(["doctor", *argv])


async def faults(*argv: str) -> dict[str, Finding]:
    """Return the faults and warnings of an examination, by examined item."""
    found = await examine(options(*argv))
    assert all(finding.remedy for finding in found if finding.level is not Level.OK)
    return {finding.check: finding for finding in found if finding.level is not Level.OK}


@pytest.fixture
async def engine_here() -> AsyncIterator[str]:
    async with engine() as url:
        yield url


# --- all is well


@pytest.mark.parametrize("build", [EngineServer, SglangServer])
async def test_sound_engines_have_no_fault(build: Build) -> None:
    """Both turns count for the program, on one engine, and the second hits; the report says all of this."""
    async with engine(build) as first, engine(build) as second:
        found = await examine(options("--backends", f"{first},{second}"))
    assert [finding for finding in found if finding.level is not Level.OK] == []
    assert exit_status(found) == 0
    assert {finding.check for finding in found} >= {
        *("engine_reachable", "engine_metrics", "prefix_caching", "capacity", "cached_token_details", "priorities"),
        *("models_alike", "clock", "bind", "identity", "second_turn_hit"),
    }
    (hit,) = [finding.text for finding in found if finding.check == "second_turn_hit"]
    assert re.search(r"The second hit on 127\.0\.0\.1:\d+: \d+ of its \d+ prompt tokens", hit)
    (whose,) = [finding.text for finding in found if finding.check == "identity"]
    assert re.search(r"as program doctor-[0-9a-f]+, by x-program-id", whose)


async def test_without_turns_no_prompt_is_sent(engine_here: str) -> None:
    """Only the engines' own reports are read."""
    seen: list[str] = []
    async with relay(engine_here, bend=lambda bent: seen.append(bent.path)) as url:
        found = await examine(options("--backends", url, "--no-turns"))
    assert exit_status(found) == 0
    assert {"/health", "/metrics", "/v1/models"} <= set(seen)
    assert not [path for path in seen if path.endswith("completions")]
    assert not {"identity", "cached_token_details"} & {finding.check for finding in found}


async def test_a_running_proxy_is_examined_with_its_engines(engine_here: str) -> None:
    """It releases its program, and the proxy is as before."""
    async with running_proxy(engine_here) as proxy:
        assert await faults("--url", proxy.url) == {}
        assert len(proxy.runtime.scheduler.programs) == 0


async def test_the_running_proxy_is_examined_if_its_configuration_only_starts_replicas(
    engine_here: str, tmp_path: Path
) -> None:
    """A proxy of the doctor's own would start none, and be found without."""
    file = tmp_path / "thunderagent.toml"
    async with running_proxy(engine_here) as proxy:
        port = proxy.url.rpartition(":")[2]
        file.write_text(f'provision = "command"\nprovision_command = "engine {{port}}"\nport = {port}\n')
        found = await examine(options("--config", str(file), "--no-turns"))
    assert exit_status(found) == 0
    assert f"127.0.0.1:{port}" in {finding.subject for finding in found}


# --- faults of an engine


def prefix_caching_off(bent: Bent) -> None:
    bent.replace('enable_prefix_caching="True"', 'enable_prefix_caching="False"')
    if bent.usage() is not None:
        bent.set_usage(prompt_tokens_details={"cached_tokens": 0})


def no_metrics(bent: Bent) -> None:
    if bent.path == "/metrics":
        bent.status = 404


def others_metrics(bent: Bent) -> None:
    if bent.path == "/metrics":
        bent.body = b"go_goroutines 7\n"


def no_capacity(bent: Bent) -> None:
    bent.replace(r'kv_cache_size_tokens="\d+"', 'kv_cache_size_tokens="None"')
    bent.replace(r'num_gpu_blocks="\d+"', 'num_gpu_blocks="None"')


def small_pool(bent: Bent) -> None:
    bent.replace(r'"max_model_len":\d+', '"max_model_len":262144')


def no_cached_tokens(bent: Bent) -> None:
    if bent.usage() is not None:
        bent.set_usage(prompt_tokens_details=None)


def never_hits(bent: Bent) -> None:
    if bent.usage() is not None:
        bent.set_usage(prompt_tokens_details={"cached_tokens": 0})


def wants_key(bent: Bent) -> None:
    if bent.path.startswith("/v1/"):
        bent.status = 401


def clock_ahead(bent: Bent) -> None:
    bent.headers["Date"] = format_datetime(datetime.now(UTC) + timedelta(seconds=125), usegmt=True)


def clock_behind(bent: Bent) -> None:
    bent.headers["Date"] = format_datetime(datetime.now(UTC) - timedelta(seconds=125), usegmt=True)


def fails(bent: Bent) -> None:
    if bent.path.endswith("completions"):
        bent.status, bent.body = 500, b"CUDA error: out of memory"


def loads_still(bent: Bent) -> None:
    if bent.path == "/health":
        bent.status = 503


def serves_nothing(bent: Bent) -> None:
    if bent.path == "/v1/models":
        bent.status = 404


@pytest.mark.parametrize(
    ("bend", "check", "text", "remedy"),
    [
        (prefix_caching_off, "prefix_caching", "Prefix caching is off", "--enable-prefix-caching"),
        (never_hits, "prefix_caching", "The same prompt, sent twice, found nothing", "turn prefix caching on"),
        (never_hits, "second_turn_hit", "The second missed on 127.0.0.1:", "whether prefix caching is on"),
        (no_metrics, "engine_metrics", "GET /metrics: they answer 404", "--enable-metrics"),
        (others_metrics, "engine_metrics", "hold none of vLLM's or SGLang's", "--disable-log-stats"),
        (no_capacity, "capacity", "The size of its KV cache is unknown", "--capacity-tokens N"),
        (small_pool, "capacity", "contexts of 262,144 tokens, more than its KV cache holds", "at most 16,000 tokens"),
        (no_cached_tokens, "cached_token_details", "do not say how many", "--enable-prompt-tokens-details"),
        (wants_key, "engine_key", "the engine needs a key", "THUNDERAGENT_BACKEND_API_KEY"),
        (clock_ahead, "clock", "s ahead of this machine's", "NTP"),
        (clock_behind, "clock", "s behind this machine's", "NTP"),
        (fails, "engine_answers", "500 CUDA error: out of memory", "see its log"),
        (loads_still, "engine_reachable", "GET /health answers 503", "wait until the engine has loaded its model"),
        (serves_nothing, "engine_models", "names no model", "OpenAI's API"),
    ],
)
async def test_a_fault_of_an_engine_is_found(
    bend: Callable[[Bent], None], check: str, text: str, remedy: str, engine_here: str
) -> None:
    """The report has the engine's name, the fault in words, and a remedy."""
    async with relay(engine_here, bend=bend) as url:
        finding = (await faults("--backends", url))[check]
    assert finding.subject in (url.removeprefix("http://"), "two turns")
    assert text in finding.text
    assert remedy in finding.remedy


@pytest.mark.parametrize(
    ("bend", "check", "remedy"),
    [
        (
            lambda bent: bent.replace('"disable_radix_cache":false', '"disable_radix_cache":true'),
            "prefix_caching",
            "start SGLang without --disable-radix-cache",
        ),
        (no_cached_tokens, "cached_token_details", "start SGLang with --enable-cache-report"),
        (no_metrics, "engine_metrics", "start SGLang with --enable-metrics"),
    ],
)
async def test_remedy_is_in_the_words_of_the_engine(bend: Callable[[Bent], None], check: str, remedy: str) -> None:
    """SGLang's options differ from vLLM's."""
    async with engine(SglangServer) as behind, relay(behind, bend=bend) as url:
        found = await faults("--backends", url)
    assert found[check].remedy == remedy


async def test_an_engine_that_does_not_listen_is_found(engine_here: str) -> None:
    """The others are still examined."""
    gone = f"http://127.0.0.1:{free_ports(1)[0]}"
    found = await examine(options("--backends", f"{engine_here},{gone}"))
    (finding,) = [each for each in found if each.check == "engine_reachable" and each.level is Level.FAULT]
    assert (finding.subject, "cannot be reached" in finding.text) == (gone.removeprefix("http://"), True)
    assert "start it, or correct its address" in finding.remedy
    assert [each.level for each in found if each.check == "second_turn_hit"] == [Level.OK]
    assert exit_status(found) == 1


async def test_dead_engine_is_reported_as_unreachable_and_nothing_else(engine_here: str) -> None:
    """What was found of the others stays, before a running proxy and before an own one."""
    dead = "http://127.0.0.1:9"
    async with engine() as other, running_proxy(engine_here, other, dead, up=2) as proxy:
        running = await examine(options("--url", proxy.url, "--no-turns"))
    own = await examine(options("--backends", f"{engine_here},{dead}", "--no-turns"))
    for found, names in ((running, [engine_here, other]), (own, [engine_here])):
        reached = {each.subject: each for each in found if each.check == "engine_reachable"}
        assert reached.pop("127.0.0.1:9").level is Level.FAULT
        assert reached.keys() == {name.removeprefix("http://") for name in names}
        assert all(each.text.startswith("It answers: vllm") for each in reached.values())


async def test_all_three_commands_say_what_the_next_turn_waits_for(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """`doctor`, `status` and `top` say it in the words of the program's own report, and how long it has been held."""
    gate = Gate()
    async with fake_replica(gate) as replica, running_proxy(replica.url, **cap(1)) as proxy:
        first, second = (asyncio.create_task(ask(proxy.url, name)) for name in ("first", "second"))
        await until(lambda: proxy.runtime.held_count == 1)
        story = await get(proxy.url, "/programs/second")
        needs = story.json()["waiting"]["what_must_happen"]
        for command in ("status", "top"):
            monkeypatch.setenv("THUNDERAGENT_PROXY", proxy.url.removeprefix("http://"))
            assert await asyncio.to_thread(main, [command]) == 0
            assert needs in " ".join(capsys.readouterr().out.split())
            assert await asyncio.to_thread(main, [command, "--json"]) == 0
            said = json.loads(capsys.readouterr().out)
            assert said["queue"]["first_needs"] == needs
            assert said["programs"]["total"] == 2
        async with httpx2.AsyncClient(base_url=proxy.url) as http:
            looked = await proxies.look_at(Asker(http, timeout_s=DEADLINE_S), "the proxy", {})
        (held,) = [each for each in proxies.findings_of(looked, proxy.url, is_own=False) if each.check == "held"]
        assert needs in held.text
        gate.open()
        await first
        assert (await post(proxy.url, "/programs/release", {"program_id": "first"})).status == 200
        await second


async def test_priorities_are_missed_where_they_are_wanted(engine_here: str, tmp_path: Path) -> None:
    """If no policy gives any, an engine without them is as good."""
    file = tmp_path / "thunderagent.toml"
    file.write_text(f'backends = ["{engine_here}"]\npriority = "age"\n')
    finding = (await faults("--config", str(file)))["priorities"]
    assert (finding.level, finding.remedy) == (Level.WARNING, "start it with --scheduling-policy priority")


# --- faults among engines


async def test_two_models_are_two_pools() -> None:
    """Two pools are no fault: each has its own queue and memory."""
    async with engine(model="big") as first, engine(model="small") as second:
        assert "models_alike" not in await faults("--backends", f"{first},{second}")


async def test_two_versions_are_worth_a_warning(engine_here: str) -> None:
    """They work together, but are rarely intended."""
    async with engine() as other, relay(other, bend=lambda bent: bent.replace(r"0\.32\.0", "0.9.1")) as url:
        finding = (await faults("--backends", f"{engine_here},{url}"))["versions_alike"]
    assert (finding.level, "vllm 0.9.1" in finding.text) == (Level.WARNING, True)
    assert "the same version everywhere" in finding.remedy


async def test_a_load_balancer_before_engines_is_found(engine_here: str) -> None:
    """Turns of one program end up on any of them, whatever the proxy does: a frequent mistake with Services."""
    async with engine() as other:
        for _ in range(3):  # one of the engines has served before
            async with aiohttp.ClientSession() as http:
                body = {"model": "simulated", "prompt": "some words before", "max_tokens": 1}
                await (await http.post(f"{other}/v1/completions", json=body)).read()
        async with relay(engine_here, other) as url:
            finding = (await faults("--backends", url))["one_engine"]
    assert "Several engines answer at this one address" in finding.text
    assert "--kubernetes-replicas" in finding.remedy


# --- faults before and in the proxy


@pytest.mark.parametrize(
    ("argv", "drops", "remedy"),
    [
        (("--program-header", "X-Trace-Group"), "", "--program-headers X-Trace-Group"),
        ((), "X-Program-ID", "put the id into the base URL, as /p/ID/v1"),
    ],
)
async def test_turns_that_are_nobodys_are_found(
    argv: tuple[str, ...], drops: str, remedy: str, engine_here: str
) -> None:
    """An unknown header and a header dropped on the way each have their own remedy."""
    async with running_proxy(engine_here) as proxy, relay(proxy.url, drops=drops) as url:
        finding = (await faults("--url", url, *argv))["identity"]
    assert "they were counted as nobody's" in finding.text
    assert remedy in finding.remedy


async def test_traffic_that_is_mostly_nobodys_is_found(engine_here: str) -> None:
    """This is found although the doctor's own two turns are counted correctly."""
    async with running_proxy(engine_here) as proxy:
        for _ in range(20):
            assert (await ask(proxy.url)).status == 200
        assert (await get(proxy.url, "/summary")).json()["rates"]["mostly_anonymous"] is True
        found = await faults("--url", proxy.url)
    assert set(found) == {"anonymous", "price"}  # of turns that are all alike no price can be told
    assert "Of the turns of the last minute 100% named no program" in found["anonymous"].text
    assert "--program-header NAME" in found["anonymous"].remedy


async def test_an_engine_in_the_proxys_place_is_found(engine_here: str) -> None:
    """The absence of any server is found too."""
    finding = (await faults("--url", engine_here))["proxy_reachable"]
    assert (finding.text, "--backends" in finding.remedy) == ("What answers here is not thunderagent.", True)
    nobody = (await faults("--url", f"http://127.0.0.1:{free_ports(1)[0]}"))["proxy_reachable"]
    assert "thunderagent serve" in nobody.remedy


async def test_keys_are_asked_for_and_taken(engine_here: str) -> None:
    """Without an admin key, or with a wrong one, it says that it saw only a part, and how to get one."""
    (key, line), (data_key, data_line) = mint_key("doctor"), mint_key("agents")
    async with running_proxy(engine_here, admin_keys=(line,), api_keys=(data_line,)) as proxy:
        for wrong in ((), ("--key", "tak_wrong"), ("--key", data_key)):
            finding = (await faults("--url", proxy.url, *wrong))["proxy_key"]
            assert "thunderagent key NAME --admin" in finding.remedy
        assert await faults("--url", proxy.url, "--key", key) == {}


async def test_a_replica_that_only_the_proxy_loses_is_found(engine_here: str) -> None:
    """The replica answers the doctor; the proxy says why it counts as down."""
    is_down = asyncio.Event()

    def bend(bent: Bent) -> None:
        if is_down.is_set() and bent.path == "/health":
            bent.status = 500

    async with relay(engine_here, bend=bend) as url, running_proxy(url, down_after_failures=1) as proxy:
        is_down.set()
        while proxy.runtime.scheduler.open_replicas:
            await asyncio.sleep(0.01)
        found = await faults("--url", proxy.url)
    assert "For the proxy it is down" in found["replica_up"].text
    assert "It serves no turn: no replica is up" in found["ready"].text


async def test_a_proxy_that_would_be_open_to_a_network_is_found(engine_here: str, tmp_path: Path) -> None:
    """It is found before the start, since `serve` would refuse it. One that is open on purpose is worth a warning."""
    file = tmp_path / "thunderagent.toml"
    file.write_text(f'backends = ["{engine_here}"]\nhost = "0.0.0.0"\n')
    finding = (await faults("--config", str(file), "--no-turns"))["bind"]
    assert finding.level is Level.FAULT
    assert "can be reached from other machines, and there is no API key" in finding.text
    file.write_text(f'backends = ["{engine_here}"]\nhost = "0.0.0.0"\nallow_open = true\n')
    finding = (await faults("--config", str(file), "--no-turns"))["bind"]
    assert (finding.level, "set api_keys" in finding.remedy) == (Level.WARNING, True)
    file.write_text(f'backends = ["{engine_here}"]\nhost = "0.0.0.0"\napi_keys = ["{mint_key("a")[1]}"]\n')
    finding = (await faults("--config", str(file), "--no-turns"))["keys"]
    assert (finding.level, "set admin_keys" in finding.remedy) == (Level.WARNING, True)


def test_a_running_proxy_that_strangers_reach_is_found() -> None:
    """At an address that is not loopback's, both kinds of key are missed."""
    good, ready = Answer(200, "{}"), Answer(200, '{"ready": true}')
    proxy = proxies.Proxy("10.0.0.5:8300", has_key=False, health=good, ready=ready)
    proxy.summary = proxy.listed = proxy.listed_without_key = proxy.models = proxy.models_without_key = good
    found = {each.check: each for each in proxies.findings_of(proxy, "http://10.0.0.5:8300", is_own=False)}
    assert "set api_keys" in found["bind"].remedy
    assert "set admin_keys" in found["keys"].remedy
    assert found["bind"].level is found["keys"].level is Level.FAULT


async def test_simulated_engines_are_worth_a_warning(engine_here: str) -> None:
    """Nobody should take made-up words for a model's."""
    async with running_proxy(engine_here) as proxy:

        def bend(bent: Bent) -> None:
            bent.replace('"engines_are_simulated": ?false', '"engines_are_simulated":true')

        async with relay(proxy.url, bend=bend) as url:
            finding = (await faults("--url", url))["simulated"]
    assert "--backends" in finding.remedy


# --- what is printed


async def test_json_has_every_finding_and_the_status_says_whether_one_is_a_fault(
    engine_here: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """Scripts read JSON; people get a line for each finding, and under it what to do."""
    assert await asyncio.to_thread(main, ["doctor", "--backends", engine_here, "--json"]) == 0
    said = json.loads(capsys.readouterr().out)
    assert (said["faults_count"], said["warnings_count"]) == (0, 0)
    assert {"check", "level", "subject", "text", "remedy"} == set(said["findings"][0])
    gone = f"127.0.0.1:{free_ports(1)[0]}"
    assert await asyncio.to_thread(main, ["doctor", "--backends", f"http://{gone}"]) == 1
    out = capsys.readouterr().out
    assert f"fault    {gone}  The engine cannot be reached" in out
    assert "→ start it, or correct its address" in out
    assert re.search(r"^\d+ faults?, \d+ warnings?, \d+ ok$", out, re.MULTILINE)
