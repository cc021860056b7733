"""An engine whose own scheduler knows programs, behind the proxy: what it is told, and what it says."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import pytest

from tests.integration.support import CHAT, ask, fake_replica, get, metrics_of, post, running_proxy, turn, until
from thunderagent.cli import build_parser, main
from thunderagent.doctor.command import examine
from thunderagent.doctor.findings import Level
from thunderagent.proxy.fleet.engine_plugins import POLLS_COUNT
from thunderagent.proxy.reading.header_words import BRANCH_HEADER

SAID: dict[str, Any] = {
    "protocol": 1,
    "version": "0.1.0",
    "vllm": "0.32.0",
    "on": True,
    "mode": "on",
    "blocks": {"total": 400, "free": 100, "pinned": 40},
    "pins_total": {"kept": 5, "given_back": 2},
    "turns_total": {"warm": 3, "cold": 2},
    "steps_total": 1000,
    "failures_total": 0,
}


async def _until_known(url: str) -> dict[str, Any]:
    """Wait until the proxy knows the plugin of its replica; return its report."""
    found: dict[str, Any] | None = None
    while found is None:
        found = (await get(url, "/replicas")).json()["replicas"][0]["plugin"]
    return found


async def test_turns_and_programs_are_told_to_an_engine_with_the_plugin() -> None:
    """Its id and its hold go with each turn; its end is told between turns."""
    async with fake_replica() as replica:
        replica.plugin = SAID
        async with running_proxy(replica.url, engine_hold_s=20.0) as proxy:
            await _until_known(proxy.url)
            assert (await ask(proxy.url, "a")).status == 200
            call = replica.calls[0]
            assert call.header("X-Session-ID") == "a"
            assert call.json() == turn() | {"vllm_xargs": {"thunderagent_hold_s": 20.0}}
            await post(proxy.url, CHAT, turn("a"), ("X-Program-Hint", "next_turn_in_s=90"))
            assert replica.calls[1].json()["vllm_xargs"] == {"thunderagent_hold_s": 181.0}
            await post(proxy.url, CHAT, turn("a"), (BRANCH_HEADER, "side"), ("X-Program-Hint", "next_turn_in_s=90"))
            assert replica.calls[2].header("X-Session-ID") == "a/side", "it must not take what is held for its program"
            assert replica.calls[2].json()["vllm_xargs"] == {"thunderagent_hold_s": 20.0}
            assert (await post(proxy.url, "/programs/a/hints", {"next_turn_in_s": 10})).status == 200
            await until(lambda: ["hold", "a", 21.0] in replica.plugin_ops)
            await post(proxy.url, "/programs/release", {"program_id": "a"})
            await until(lambda: ["release", "a"] in replica.plugin_ops)


async def test_anonymous_turns_are_unchanged() -> None:
    """They are no program's."""
    async with fake_replica() as replica:
        replica.plugin = SAID
        async with running_proxy(replica.url) as proxy:
            await _until_known(proxy.url)
            body = json.dumps(turn()).encode()
            assert (await post(proxy.url, CHAT, body)).status == 200
            assert replica.calls[0].body == body
            assert replica.calls[0].header("X-Session-ID") is None


async def test_report_of_the_plugin_is_shown() -> None:
    """In the admin API, and as metrics."""
    async with fake_replica() as replica:
        replica.plugin = SAID
        async with running_proxy(replica.url) as proxy:
            report = await _until_known(proxy.url)
            assert (report["on"], report["version"], report["vllm_version"]) == (True, "0.1.0", "0.32.0")
            assert (report["pinned_blocks_count"], report["pins_total"]) == (40, {"kept": 5, "given_back": 2})
            metrics = await metrics_of(proxy.url)
            of_replica = (replica.replica_id,)
            assert metrics["thunderagent_engine_plugin_on"][of_replica] == 1.0
            assert metrics["thunderagent_engine_plugin_pinned_blocks"][of_replica] == 40.0
            assert metrics["thunderagent_engine_plugin_pins_total"]["given_back", replica.replica_id] == 2.0
            assert metrics["thunderagent_engine_plugin_turns_total"][replica.replica_id, "warm"] == 3.0
            assert metrics["thunderagent_engine_plugin_steps_total"][of_replica] == 1000.0


async def test_an_engine_without_it_is_asked_once_and_its_turns_are_unchanged() -> None:
    """However many polls there are."""
    async with fake_replica() as replica, running_proxy(replica.url) as proxy:
        await until(lambda: replica.plugin_asked)
        polls_count = replica.polls_count
        await until(lambda: replica.polls_count >= polls_count + 2 * POLLS_COUNT)
        assert replica.plugin_asked == ["GET"]
        body = json.dumps(turn()).encode()
        assert (await post(proxy.url, CHAT, body, ("X-Program-ID", "a"))).status == 200
        assert replica.calls[0].body == body
        assert replica.calls[0].header("X-Session-ID") is None
        assert (await get(proxy.url, "/replicas")).json()["replicas"][0]["plugin"] is None
        assert not (await metrics_of(proxy.url)).get("thunderagent_engine_plugin_on")


async def test_with_the_option_off_it_is_not_asked() -> None:
    """The proxy is as an older one."""
    async with fake_replica() as replica:
        replica.plugin = SAID
        async with running_proxy(replica.url, engine_plugin=False) as proxy:
            await until(lambda: replica.polls_count > 2 * POLLS_COUNT)
            await ask(proxy.url, "a")
            assert replica.plugin_asked == []
            assert replica.calls[0].json() == turn()


async def test_a_policy_that_holds_nobody_leaves_the_hold_to_the_engine() -> None:
    """Nothing would end what is held for programs that are over."""
    async with fake_replica() as replica:
        replica.plugin = SAID
        async with running_proxy(replica.url, policy="passthrough") as proxy:
            await _until_known(proxy.url)
            await ask(proxy.url, "a")
            assert replica.calls[0].json() == turn()
            assert replica.calls[0].header("X-Session-ID") == "a"


async def test_a_plugin_that_turned_itself_off_is_shown_and_told_nothing() -> None:
    """Its breaker is vLLM's own scheduler."""
    async with fake_replica() as replica:
        replica.plugin = {**SAID, "on": False, "why_not": "its mode is off"}
        async with running_proxy(replica.url) as proxy:
            known = await _until_known(proxy.url)
            assert (known["on"], known["why_not"]) == (False, "its mode is off")
            await ask(proxy.url, "a")
            assert replica.calls[0].json() == turn()
            assert (await metrics_of(proxy.url))["thunderagent_engine_plugin_on"][replica.replica_id,] == 0.0


@pytest.mark.parametrize(
    ("said", "wanted", "level", "words"),
    [
        (SAID, True, Level.OK, "Both halves are there"),
        (SAID, False, Level.WARNING, "the proxy does not speak with it"),
        ({**SAID, "on": False}, True, Level.WARNING, "but off"),
        ({**SAID, "on": False, "why_not": "vLLM 9.9 was not tried"}, True, Level.WARNING, "vLLM 9.9 was not tried"),
        (None, True, Level.OK, "is not there, and not needed"),
    ],
)
async def test_doctor_says_which_half_is_there(
    said: dict[str, Any] | None, wanted: bool, level: Level, words: str
) -> None:
    """Of the proxy that runs, and of the engine."""
    async with fake_replica() as replica:
        replica.plugin = said
        async with running_proxy(replica.url, engine_plugin=wanted) as proxy:
            if said is not None and wanted:
                await _until_known(proxy.url)
            findings = await examine(build_parser().parse_args(["doctor", "--url", proxy.url, "--no-turns"]))
            (found,) = [each for each in findings if each.check == "engine_plugin"]
            assert (found.level, found.subject) == (level, replica.replica_id)
            assert words in found.text


async def test_doctor_says_that_the_route_is_there_alone() -> None:
    """Its engine was started with --middleware, but without --scheduler-cls; the proxy asks it once, as one without."""
    async with fake_replica() as replica:
        replica.plugin, replica.plugin_status = {"error": "vLLM's own scheduler runs"}, "501 Not Implemented"
        async with running_proxy(replica.url) as proxy:
            await until(lambda: replica.plugin_asked)
            assert (await ask(proxy.url, "a")).status == 200
            assert replica.calls[0].json() == turn()
            findings = await examine(build_parser().parse_args(["doctor", "--url", proxy.url, "--no-turns"]))
            (found,) = [each for each in findings if each.check == "engine_plugin"]
            assert found.level == Level.WARNING
            assert "Only the route" in found.text
            assert "--scheduler-cls" in found.remedy


async def test_status_says_it(capsys: pytest.CaptureFixture[str]) -> None:
    """With the part of the pool that is held."""
    async with fake_replica() as replica:
        replica.plugin = SAID
        async with running_proxy(replica.url) as proxy:
            await _until_known(proxy.url)
            assert await asyncio.to_thread(main, ["status", "--url", proxy.url]) == 0
            assert "plugin on, 10% pinned" in " ".join(capsys.readouterr().out.split())
