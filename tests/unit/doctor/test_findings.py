"""Findings from answers: two turns of a program, a proxy's replicas, clocks, and malformed answers."""

from __future__ import annotations

import json
from email.utils import formatdate
from typing import Any

import httpx2
import pytest

from thunderagent.backends import backend_of
from thunderagent.doctor import engines, program, proxies
from thunderagent.doctor.asking import Answer, Asker
from thunderagent.doctor.command import _as_seen_from_here
from thunderagent.doctor.findings import Finding, Level, fault, ok

HEALTHY: dict[str, Any] = {
    "replica_id": "r0",
    "up": True,
    "why_down": "",
    "verdict": "up",
    "verdict_reason": "",
    "suspended_for": [],
}


def turn(replica_id: str = "r0", named: str = "doctor-1", cached: int | None = 90, prompt: int = 100) -> Answer:
    """Return the answer to a turn."""
    details = None if cached is None else {"cached_tokens": cached}
    body = {
        "choices": [{"message": {"content": "word"}}],
        "usage": {"prompt_tokens": prompt, "prompt_tokens_details": details},
    }
    said = {"X-Program-ID": named, "X-Program-ID-Source": "x-program-id"} if named else {}
    return Answer(200, json.dumps(body), {**said, "X-Replica-ID": replica_id})


def findings(
    first: Answer, second: Answer, *, by_path: Answer | None = None, released: bool = True
) -> dict[str, Finding]:
    answer = Answer(200, json.dumps({"released": released}))
    trial = program.Trial("doctor-1", "X-Program-ID", first, second, by_path, answer)
    return {finding.check: finding for finding in program.findings_of(trial)}


def test_two_correct_turns_give_no_finding() -> None:
    assert {finding.level for finding in findings(turn(), turn()).values()} == {Level.OK}


def test_a_second_turn_elsewhere_is_told_with_both_places() -> None:
    """That may be intended, so it is a warning; the miss is a fault."""
    found = findings(turn("r0"), turn("r1", cached=0))
    assert found["same_replica"].level is Level.WARNING
    assert found["same_replica"].text == "The first ran on r0, the second on r1."
    assert found["second_turn_hit"].level is Level.FAULT
    assert found["second_turn_hit"].text.startswith("The second missed on r1: 0 of its 100 prompt tokens")


def test_an_engine_that_does_not_say_what_it_cached_leaves_the_hit_open() -> None:
    found = findings(turn(cached=None), turn(cached=None))
    assert found["second_turn_hit"].level is Level.WARNING
    assert "is unknown" in found["second_turn_hit"].text


def test_half_of_the_first_prompt_is_a_hit() -> None:
    """Only whole blocks are cached, and the second prompt may be much longer."""
    assert findings(turn(), turn(cached=50, prompt=900))["second_turn_hit"].level is Level.OK
    assert findings(turn(), turn(cached=49, prompt=60))["second_turn_hit"].level is Level.FAULT


def test_turns_of_another_program_are_told_with_its_name() -> None:
    """Another header, or a body, may name it first."""
    found = findings(turn(), turn(named="other"), by_path=turn(named="other"))
    assert "they were counted as program other, by x-program-id" in found["identity"].text
    assert "this address is not the proxy's" in found["identity"].remedy


def test_a_failed_turn_ends_the_examination() -> None:
    found = findings(turn(), Answer(503, "no replica"))
    assert list(found) == ["turns_answered"]
    assert "The second turn through the proxy failed: 503 no replica" in found["turns_answered"].text


def test_a_program_that_is_not_released_is_told_of() -> None:
    assert findings(turn(), turn(), released=False)["release"].level is Level.WARNING


@pytest.mark.parametrize(
    ("change", "level", "text"),
    [
        ({}, None, ""),
        ({"up": False, "verdict": "down", "why_down": "refused"}, Level.FAULT, "it is down: refused."),
        ({"verdict": "failing"}, Level.WARNING, "failed several turns in a row"),
        (
            {"verdict": "suspended", "suspended_for": ["weight_sync"]},
            Level.WARNING,
            "Nothing is granted there: weight_sync.",
        ),
        ({"verdict": "draining"}, Level.WARNING, "It is drained"),
        ({"verdict": "collapsed", "verdict_reason": "2 % kept"}, Level.WARNING, "gets no new programs"),
        ({"verdict": "backpressure"}, Level.WARNING, "it is full"),
    ],
)
def test_a_replica_is_judged_by_what_the_proxy_says(change: dict[str, Any], level: Level | None, text: str) -> None:
    """Each finding says what to do."""
    proxy = proxies.Proxy("p", has_key=True, health=Answer(200), ready=Answer(200, '{"ready": true}'))
    proxy.listed = Answer(200, json.dumps({"replicas": [{**HEALTHY, **change}]}))
    found = [each for each in proxies.findings_of(proxy, "http://p", is_own=True) if each.check == "replica_up"]
    assert [each.level for each in found] == ([] if level is None else [level])
    assert all(text in each.text and each.remedy for each in found)


def test_an_engine_that_only_the_proxy_reaches_is_no_fault() -> None:
    """One rank that is up is enough; an engine that is down for both is a fault."""
    proxy = proxies.Proxy("p", has_key=True)
    listed = [
        {**HEALTHY, "replica_id": "a:1/0", "url": "http://a:1"},
        {**HEALTHY, "replica_id": "b:1", "url": "http://b:1", "up": False},
        {**HEALTHY, "replica_id": "c:1/llama/1", "url": "http://c:1/llama"},
    ]
    proxy.listed = Answer(200, json.dumps({"replicas": listed}))
    names = ("a:1", "b:1", "c:1/llama")
    gone = {name: fault("engine_reachable", name, "It cannot be reached.", "start it") for name in names}
    assert _as_seen_from_here(gone["a:1"], proxy).level is Level.WARNING
    assert _as_seen_from_here(gone["c:1/llama"], proxy).level is Level.WARNING
    assert _as_seen_from_here(gone["b:1"], proxy) is gone["b:1"]
    fine = ok("clock", "a:1", "Its clock agrees.")
    assert _as_seen_from_here(fine, proxy) is fine


@pytest.mark.parametrize("ranks_count", [1, 2])
async def test_the_prompt_that_is_sent_twice_goes_to_one_rank(ranks_count: int) -> None:
    """Each has a cache of its own, and an engine with one rank may know no such header."""
    asked_ranks: list[str | None] = []

    def answer(request: httpx2.Request) -> httpx2.Response:
        if request.url.path == "/metrics":
            lines = (f'vllm:num_requests_running{{engine="{rank}"}} 0.0\n' for rank in range(ranks_count))
            return httpx2.Response(200, text="".join(lines))
        if request.url.path == "/v1/models":
            return httpx2.Response(200, json={"data": [{"id": "m"}]})
        if request.method == "POST":
            asked_ranks.append(request.headers.get("X-data-parallel-rank"))
        return httpx2.Response(200, json={})

    async with httpx2.AsyncClient(base_url="http://e", transport=httpx2.MockTransport(answer)) as http:
        engine = await engines.look_at(Asker(http, timeout_s=1), "e", backend_of("auto"), sends_turns=True)
    assert len(engine.probes) == 2
    assert asked_ranks == [None if ranks_count == 1 else "0"] * 3


@pytest.mark.parametrize(
    ("told_s", "skew_s"),
    [(1000.0, 0.0), (1001.0, 0.0), (999.0, -0.5), (1100.0, 98.5), (900.0, -99.5)],
)
async def test_a_clock_is_off_by_what_the_way_does_not_explain(told_s: float, skew_s: float) -> None:
    """A header has whole seconds, and the answer was made some time between the request and its arrival."""
    times = iter([1000.5, 1001.5])
    transport = httpx2.MockTransport(lambda _: httpx2.Response(200, headers={"Date": formatdate(told_s, usegmt=True)}))
    async with httpx2.AsyncClient(base_url="http://e", transport=transport) as http:
        answer = await Asker(http, timeout_s=1, wall_clock=lambda: next(times)).get("/health")
    assert answer.skew_s == pytest.approx(skew_s)


async def test_unreadable_answer_is_kept_as_such() -> None:
    """Nothing raises: neither a failed request nor a body that is no JSON, or no object."""

    def fail(request: httpx2.Request) -> httpx2.Response:
        if request.url.path == "/silent":
            raise httpx2.ReadTimeout("late", request=request)
        if request.url.path == "/gone":
            raise httpx2.ConnectError("refused", request=request)
        return httpx2.Response(200, text=request.url.path.removeprefix("/"))

    async with httpx2.AsyncClient(base_url="http://e", transport=httpx2.MockTransport(fail)) as http:
        asker = Asker(http, timeout_s=3)
        assert (await asker.post("/silent", {})).why == "no answer within 3 s"
        assert (await asker.get("/gone")).told() == "refused"
        for text in ("nonsense", "[]"):
            answer = await asker.get(f"/{text}")
            assert (answer.json(), answer.skew_s) == ({}, None)
