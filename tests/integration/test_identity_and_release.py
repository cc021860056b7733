"""All ways to name the program of a request, and all ways to release a program."""

from __future__ import annotations

import asyncio
import gzip
import json
from typing import Any

import pytest

from tests.integration.support import (
    CHAT,
    JSON_TYPE,
    FakeReplica,
    Gate,
    Header,
    RunningProxy,
    answers,
    ask,
    exchange,
    fake_replica,
    get,
    post,
    running_proxy,
    serve,
    turn,
    until,
)

BOTH = (("X-Session-ID", "by-session"), ("X-Program-ID", "by-program"))


async def test_what_is_nearly_ours_is_said(replica: FakeReplica, proxy: RunningProxy) -> None:
    """A header is refused, in the caller's schema; a body's key reaches the engine, and the answer has a note."""
    refused = await post(proxy.url, CHAT, turn(), ("X-Program-Limit", "max_turns=1"))
    assert (refused.status, "did you mean X-Program-Limits?" in refused.error["message"]) == (400, True)
    answer = await post(proxy.url, CHAT, turn(programId="a"))
    assert (answer.status, answer.header("X-Program-ID")) == (200, None)
    assert "did you mean program_id?" in (answer.header("X-ThunderAgent-Note") or "")
    assert (await replica.call()).json()["programId"] == "a"


@pytest.mark.parametrize("header", [("X-Program-ID", "\udcff"), None])
async def test_id_that_is_no_utf8_is_refused_wherever_it_stands(
    replica: FakeReplica, proxy: RunningProxy, header: tuple[str, str] | None
) -> None:
    """Two of them would be one program if each odd byte became the same mark."""
    refused = await post(proxy.url, CHAT if header else f"/p/%FF{CHAT}", turn(), *([header] if header else []))
    assert (refused.status, refused.error["code"]) == (400, "invalid_program_id")
    assert (replica.calls, (await get(proxy.url, "/programs")).json()["programs"]) == ([], [])


async def test_word_for_the_last_turn_that_nobody_knows_is_refused(replica: FakeReplica, proxy: RunningProxy) -> None:
    """Nothing would be released, and the client believe that it was; another router's header may hold anything."""
    refused = await post(proxy.url, CHAT, turn("a"), ("X-Program-Final", "yes"))
    assert (refused.status, refused.error["message"]) == (
        400,
        "X-Program-Final is 1 for a program's last turn, or 0, not 'yes'",
    )
    assert replica.calls == []
    assert (await post(proxy.url, CHAT, turn("a"), ("X-Dynamo-Session-Final", "yes"))).status == 200


@pytest.mark.parametrize(
    ("target", "headers", "fields", "program_id", "source"),
    [
        (f"/p/a{CHAT}", (), {}, "a", "path"),
        (f"/p/a/b:c{CHAT}", (), {}, "a/b:c", "path"),
        (f"/p/a%2Fb%20c%C3%A9{CHAT}", (), {}, "a/b cé", "path"),
        (f"/p/a%253A{CHAT}", (), {}, "a%3A", "path"),
        (f"/p/a/v1{CHAT}", (), {}, "a", "path"),
        (f"/p/a/v1/b{CHAT}", (), {}, "a/v1/b", "path"),
        (f"/p/v1{CHAT}", (), {}, "v1", "path"),
        (f"/p/a{CHAT}?x=/v1/y", (), {}, "a", "path"),
        (f"/sessions/a/b{CHAT}", (), {}, "a/b", "path"),
        ("/p/a/v1/completions", (), {}, "a", "path"),
        (f"/p/a{CHAT}", BOTH, {"program_id": "by-body"}, "a", "path"),
        (CHAT, BOTH, {"program_id": "by-body"}, "by-program", "x-program-id"),
        (CHAT, BOTH[:1], {"program_id": "by-body"}, "by-session", "x-session-id"),
        (CHAT, (), {"program_id": "by-body"}, "by-body", "body"),
        (CHAT, (), {"program_id": 17}, "17", "body"),
        (CHAT, (), {"extra_body": {"program_id": "inner"}}, "inner", "extra_body"),
        (CHAT, (), {"program_id": "outer", "extra_body": {"program_id": "inner"}}, "outer", "body"),
        (CHAT, (), {"user": "a-person", "metadata": {"x": "y"}}, None, None),
        (CHAT, (("X-Request-Id", "changes"),), {}, None, None),
        (CHAT, (("X-SMG-Routing-Key", "slime"),), {}, "slime", "x-smg-routing-key"),
        (CHAT, (("session_id", "codex"), ("thread-id", "t")), {"prompt_cache_key": "k"}, "codex", "session_id"),
        (CHAT, (), {"metadata": {"session_id": "m"}}, "m", "metadata.session_id"),
        (CHAT, (), {"prompt_cache_key": "k"}, "k", "prompt_cache_key"),
        (
            CHAT,
            (),
            {"conversation_params": {"conversation_id": "c"}, "prompt_cache_key": "k"},
            "c",
            "conversation_params.conversation_id",
        ),
    ],
)
async def test_a_turn_is_whose_it_says(
    replica: FakeReplica,
    proxy: RunningProxy,
    target: str,
    headers: tuple[Header, ...],
    fields: dict[str, Any],
    program_id: str | None,
    source: str | None,
) -> None:
    """The most specific way wins; the replica sees the plain path, and no trace of our own field."""
    answer = await post(proxy.url, target, turn(**fields), *headers)
    assert answer.status == 200
    assert answer.header("X-Program-ID-Source") == source
    assert [program.program_id for program in proxy.runtime.scheduler.programs.values()] == (
        [program_id] if program_id else []
    )
    (call,) = replica.calls
    path = "/v1/completions" if "/v1/completions" in target else CHAT
    assert call.target == path + ("?x=/v1/y" if "?" in target else "")
    assert "program_id" not in call.json()
    assert "program_id" not in call.json().get("extra_body", {})
    for name, value in headers:
        assert call.header(name) == value


@pytest.mark.parametrize(
    ("target", "arrives"),
    [
        ("/p/a/v1/embeddings", "/v1/embeddings"),
        ("/sessions/a/v1/files/x?y", "/v1/files/x?y"),
        ("/p/a/v1/v1/files", "/v1/files"),
        ("/v1/v1/files", "/v1/files"),
        ("/p/a/tokenize", "/tokenize"),
    ],
)
async def test_the_program_is_cut_out_of_other_paths_too(
    replica: FakeReplica, proxy: RunningProxy, target: str, arrives: str
) -> None:
    assert (await get(proxy.url, target)).status == 200
    assert replica.calls[0].target == arrives


@pytest.mark.parametrize(
    "path",
    ["/model_info", "/get_model_info?x=1", "/health_generate", "/server_info", "/v2/rerank", "/a%2Fb/"],
)
async def test_any_path_of_a_program_goes_to_its_replica(path: str) -> None:
    """The path is unchanged except for the prefix."""
    async with fake_replica() as one, fake_replica() as other, running_proxy(one.url, other.url) as proxy:
        replicas = {one.replica_id: one, other.replica_id: other}
        homes = {name: (await post(proxy.url, f"/p/{name}{CHAT}", turn())).header("X-Replica-ID") for name in "abcd"}
        assert set(homes.values()) == set(replicas)
        for name, home in homes.items():
            for method in ("GET", "POST"):
                answer = await exchange(proxy.url, method, f"/p/{name}{path}", [], b"{}" if method == "POST" else b"")
                told = [answer.header(header) for header in ("X-Replica-ID", "X-Program-ID", "X-Program-ID-Source")]
                assert (answer.status, told) == (200, [home, name, "path"])
                call = replicas[str(home)].calls[-1]
                assert (call.method, call.target) == (method, path)


async def test_a_control_call_of_a_program_is_one_to_its_replica() -> None:
    """It has the same effect as a call that names that replica."""
    async with fake_replica() as one, fake_replica() as other, running_proxy(one.url, other.url) as proxy:
        home = (await post(proxy.url, f"/p/a{CHAT}", turn())).header("X-Replica-ID")
        assert (await post(proxy.url, "/p/a/pause?mode=keep")).status == 200
        suspended = {name for name, replica in proxy.runtime.scheduler.replicas.items() if replica.suspended_for}
        assert suspended == {home}
        assert (await post(proxy.url, "/p/a/resume")).status == 200
        assert not any(replica.suspended_for for replica in proxy.runtime.scheduler.replicas.values())
        assert [call.target for call in (*one.calls, *other.calls)] == [CHAT, "/pause?mode=keep", "/resume"]


async def test_no_spelling_of_a_turn_under_a_program_gets_round_its_lease(
    replica: FakeReplica, proxy: RunningProxy
) -> None:
    """Engines decode paths, so an escaped one is the same turn."""
    for target in ("/p/a/%67enerate", "/p/a/v1/chat/%63ompletions"):
        answer = await post(proxy.url, target, turn())
        assert (answer.status, answer.header("X-Hold-Ms")) == (200, "0")
    assert proxy.runtime.outcome_counts["finished"] == 2


@pytest.mark.parametrize("target", ["/nothing", "/v2/embed?x", "/server_info", "/cohere/v2/chat"])
async def test_a_path_that_nobody_knows_is_the_engines(replica: FakeReplica, proxy: RunningProxy, target: str) -> None:
    """The answer is the engine's 404."""
    replica.behaviour = answers({"detail": "Not Found"}, status="404 Not Found")
    answer = await get(proxy.url, target)
    assert (answer.status, answer.json()) == (404, {"detail": "Not Found"})
    assert replica.calls[0].target == target


@pytest.mark.parametrize("target", ["/p/a", "/p//v1/chat/completions", "/p//x", "/programs/a/b/c", "/health/x"])
async def test_an_unknown_path_under_the_proxys_own_is_a_404(
    replica: FakeReplica, proxy: RunningProxy, target: str
) -> None:
    answer = await get(proxy.url, target)
    assert answer.status == 404
    assert answer.error["code"] == "not_found"
    assert ("/p/PROGRAM/v1/..." in answer.error["message"]) == target.startswith("/p/")
    assert not replica.calls


async def test_models_are_the_union_of_all_replicas() -> None:
    async with fake_replica() as one, fake_replica() as other, running_proxy(one.url, other.url) as proxy:
        one.behaviour = answers({"object": "list", "data": [{"id": "base"}, {"id": "lora-1"}]})
        other.behaviour = answers({"object": "list", "data": [{"id": "base"}, {"id": "lora-2"}]})
        for target in ("/v1/models", "/p/a/v1/models"):
            models = (await get(proxy.url, target)).json()
            assert [model["id"] for model in models["data"]] == ["base", "lora-1", "lora-2"]


@pytest.mark.parametrize(
    "rubbish",
    [b'{"data": [{"id": "\xff"}]}', b"[" * 100_000, b"{", b"[]"],
    ids=["no UTF-8", "deep", "cut", "no object"],
)
async def test_a_replica_that_lists_rubbish_hides_no_other_s_models(rubbish: bytes) -> None:
    async with fake_replica() as one, fake_replica() as other, running_proxy(one.url, other.url) as proxy:
        one.behaviour = answers(rubbish)
        other.behaviour = answers({"object": "list", "data": [{"id": "base"}]})
        assert [model["id"] for model in (await get(proxy.url, "/v1/models")).json()["data"]] == ["base"]


async def test_models_that_every_replica_refuses_are_refused_in_its_words() -> None:
    """A client's wrong key is its own affair, not a lack of replicas; refusals that differ are a lack."""
    body = b'{"error": {"message": "Unauthorized", "code": 401}}'
    refuses = answers(body, status="401 Unauthorized", headers=[("WWW-Authenticate", "Bearer"), JSON_TYPE])
    async with (
        fake_replica(refuses) as one,
        fake_replica(refuses) as other,
        running_proxy(one.url, other.url) as proxy,
    ):
        answer = await get(proxy.url, "/v1/models")
        assert (answer.status, answer.body, answer.header("WWW-Authenticate")) == (401, body, "Bearer")
        other.behaviour = answers(b"{}", status="500 Internal Server Error")
        answer = await get(proxy.url, "/v1/models")
        assert (answer.status, answer.error["code"]) == (503, "no_replica")
        other.behaviour = answers({"object": "list", "data": [{"id": "base"}]})
        assert (await get(proxy.url, "/v1/models")).status == 200


async def test_a_branch_header_opens_a_branch(proxy: RunningProxy) -> None:
    await post(proxy.url, CHAT, turn("a"))
    await post(proxy.url, CHAT, turn("a"), ("X-Program-Branch", "helper"))
    assert (await get(proxy.url, "/programs/a")).json()["branches_count"] == 2


@pytest.mark.parametrize(
    ("session", "agent", "parent"),
    [
        ("X-Claude-Code-Session-Id", "X-Claude-Code-Agent-Id", "X-Claude-Code-Parent-Agent-Id"),
        ("session-id", "thread-id", "x-codex-parent-thread-id"),
    ],
)
async def test_a_sub_agent_that_goes_on_is_through_with_its_own(
    proxy: RunningProxy, session: str, agent: str, parent: str
) -> None:
    """The call tree is read from the headers of coding agents: a branch below it ends, one beside it stays."""
    counts = []
    for headers in ({}, {agent: "a"}, {agent: "b", parent: "a"}, {agent: "c"}, {agent: "a"}, {}):
        answer = await post(proxy.url, CHAT, turn(None), (session, "s"), *headers.items())
        assert (answer.status, answer.header("X-Program-ID")) == (200, "s")
        counts.append((await get(proxy.url, "/programs/s")).json()["branches_count"])
    assert counts == [1, 2, 3, 4, 3, 1]


async def test_turns_of_a_program_stay_on_its_replica() -> None:
    """Its side calls stay there too."""
    async with fake_replica() as one, fake_replica() as other, running_proxy(one.url, other.url) as proxy:
        homes = {}
        for round_number in range(3):
            for program_id in ("a", "b", "c", "d"):
                home = (await ask(proxy.url, program_id)).header("X-Replica-ID")
                assert homes.setdefault(program_id, home) == home, round_number
        assert set(homes.values()) == {one.replica_id, other.replica_id}
        for program_id, home in homes.items():
            answer = await post(proxy.url, f"/p/{program_id}/v1/embeddings", {"input": "x"})
            assert answer.header("X-Replica-ID") == home


# --- release


@pytest.mark.parametrize(
    ("method", "target", "body", "says"),
    [
        ("POST", "/programs/release", b'{"program_id": "a/b"}', {"program_id": "a/b", "released": True}),
        ("POST", "/programs/release", b'{"program_ids": ["a/b", "x"]}', {"released": True, "released_ids": ["a/b"]}),
        ("POST", "/programs/release", b'{"all": true}', {"released": True, "released_ids": ["a/b", "7"]}),
        ("POST", "/programs/release", b'{"program_id": 7}', {"program_id": "7", "released": True}),
        ("POST", "/programs/release?program_id=a/b", b"", {"program_id": "a/b", "released": True}),
        ("DELETE", "/programs/a/b", b"", {"program_id": "a/b", "released": True}),
        ("DELETE", "/programs/a%2Fb", b"", {"program_id": "a/b", "released": True}),
        ("DELETE", "/programs/nobody", b"", {"program_id": "nobody", "released": False}),
        ("POST", "/finish_session?session_id=a%2Fb", b"", {"program_id": "a/b", "released": True}),
        ("POST", "/finish_session?session_id=nobody", b"", {"program_id": "nobody", "released": False}),
        ("DELETE", "/sessions/a/b", b"", {"program_id": "a/b", "released": True}),
        ("POST", "/sessions/batch_delete", b'{"session_ids": ["7"]}', {"released": True, "released_ids": ["7"]}),
    ],
)
async def test_a_program_is_released_in_any_form(
    proxy: RunningProxy, method: str, target: str, body: bytes, says: dict[str, Any]
) -> None:
    """curl can call it: no content type is needed. A released program leaves the table."""
    await ask(proxy.url, "a/b")
    await ask(proxy.url, "7")
    answer = await exchange(proxy.url, method, target, (), body)
    assert (answer.status, answer.json()) == (200, says)
    released = set(says.get("released_ids") or ([says["program_id"]] if says["released"] else []))
    assert {program.program_id for program in proxy.runtime.scheduler.programs.values()} == {"a/b", "7"} - released


@pytest.mark.parametrize(
    ("method", "target", "body"),
    [
        ("POST", "/programs/release", b""),
        ("POST", "/programs/release", b"{}"),
        ("POST", "/programs/release", b"["),
        ("POST", "/programs/release", b'{"program_id": ["a"]}'),
        ("POST", "/programs/release", b'{"program_id": ""}'),
        ("POST", "/programs/release", b'{"program_ids": "a"}'),
        ("POST", "/programs/release", b'{"program_id": "a", "generation": "first"}'),
        ("POST", "/finish_session", b""),
        ("DELETE", "/programs/a%00b", b""),
    ],
)
async def test_a_release_that_names_nothing_is_refused(
    proxy: RunningProxy, method: str, target: str, body: bytes
) -> None:
    """400 in the OpenAI schema; no program is released by mistake."""
    await ask(proxy.url, "a")
    answer = await exchange(proxy.url, method, target, (), body)
    assert answer.status == 400, answer.body
    assert answer.error["type"] == "invalid_request_error"
    assert len(proxy.runtime.scheduler.programs) == 1


async def test_the_last_turn_of_an_earlier_run_ends_no_later_one() -> None:
    """Ids return: the program was released while that turn ran, and has begun anew."""
    gate = Gate()
    async with fake_replica(gate) as replica, running_proxy(replica.url) as proxy:
        last = asyncio.create_task(post(proxy.url, CHAT, turn("a"), ("X-Program-Final", "1")))
        await until(lambda: proxy.runtime.leases_count == 1)
        assert (await exchange(proxy.url, "DELETE", "/programs/a")).json()["released"] is True
        replica.behaviour = answers()
        assert (await ask(proxy.url, "a")).status == 200
        gate.open()
        assert (await last).status == 200
        program = proxy.runtime.scheduler.programs.get("a")
        assert program is not None
        assert program.turn_count == 1


@pytest.mark.parametrize("header", ["X-Program-Final", "X-Dynamo-Session-Final"])
@pytest.mark.parametrize("stream", [False, True])
async def test_the_last_turn_releases_its_program(proxy: RunningProxy, header: str, stream: bool) -> None:
    """It does so after its answer; an earlier turn does not."""
    await ask(proxy.url, "a")
    assert proxy.runtime.scheduler.programs.get("a") is not None
    answer = await post(proxy.url, CHAT, turn("a", stream=stream), (header, "1"))
    assert answer.status == 200
    await until(lambda: proxy.runtime.scheduler.programs.get("a") is None)


async def test_a_last_turn_that_failed_releases_nothing(replica: FakeReplica, proxy: RunningProxy) -> None:
    """The client will try it again."""
    await ask(proxy.url, "a")
    replica.behaviour = answers(b"{}", status="500 Internal Server Error")
    assert (await post(proxy.url, CHAT, turn("a"), ("X-Program-Final", "1"))).status == 500
    assert proxy.runtime.scheduler.programs.get("a") is not None


async def test_a_path_of_an_engine_is_not_taken_for_a_release(replica: FakeReplica, proxy: RunningProxy) -> None:
    """A DELETE of something under a program's base URL goes to the engine."""
    await ask(proxy.url, "a")
    await exchange(proxy.url, "DELETE", "/sessions/a/v1/responses/r")
    assert replica.calls[-1].target == "/v1/responses/r"
    assert proxy.runtime.scheduler.programs.get("a") is not None


async def test_many_releases_at_once_release_once(proxy: RunningProxy) -> None:
    await ask(proxy.url, "a")
    releases = (post(proxy.url, "/programs/release", {"program_id": "a"}) for _ in range(20))
    released = [answer.json()["released"] for answer in await asyncio.gather(*releases)]
    assert sorted(released) == [False] * 19 + [True]


async def test_a_misspelt_setting_of_the_environment_is_warned_of(engine_url: str) -> None:
    """The proxy still starts, with the other settings."""
    settings = {
        "THUNDERAGENT_IDEL_LIMIT_S": "5",
        "THUNDERAGENT_BACKENDS": engine_url,
        "THUNDERAGENT_LOG_FORMAT": "json",
    }
    async with serve(settings=settings) as process:
        await process.ready()
        lines = [json.loads(line) for line in process.log.splitlines()]
    (warning,) = [line for line in lines if line["event"] == "unknown_setting"]
    assert warning["level"] == "warning"
    assert warning["variable"] == "THUNDERAGENT_IDEL_LIMIT_S"
    assert warning["nearest"] == "THUNDERAGENT_IDLE_LIMIT_S"


@pytest.mark.parametrize("size", [1, 300_000])
async def test_a_packed_body_is_read_and_forwarded_unpacked(
    replica: FakeReplica, proxy: RunningProxy, size: int
) -> None:
    """Twice over one head: what is known of it does not bring the encoding back. Beyond the bound it is refused."""
    body = turn(program_id="packed", padding="x" * size)
    for _ in range(2):
        answer = await post(proxy.url, CHAT, gzip.compress(json.dumps(body).encode()), ("Content-Encoding", "gzip"))
        assert (answer.status, answer.header("X-Program-ID")) == (200, "packed")
    for call in replica.calls:
        assert call.header("Content-Encoding") is None
        assert call.json()["padding"] == "x" * size
    assert (await post(proxy.url, CHAT, b"no gzip", ("Content-Encoding", "gzip"))).status == 400
