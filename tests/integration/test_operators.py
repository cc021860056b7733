"""Operators act while the proxy runs: keys come and go, the configuration is read again, requests are logged."""

from __future__ import annotations

import asyncio
import json
import os
import re
import shutil
import signal
import sys
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest
import structlog
from structlog.testing import capture_logs

from tests.integration.support import (
    CHAT,
    DEADLINE_S,
    Answer,
    FakeReplica,
    Gate,
    answers,
    ask,
    cap,
    exchange,
    fake_replica,
    get,
    metrics_of,
    post,
    running_proxy,
    serve,
    turn,
    until,
)
from thunderagent.cli import main
from thunderagent.config import ServeConfig
from thunderagent.proxy.gate.keys import mint_key
from thunderagent.proxy.gate.keys.file import KeyLimitsEntry, add_key
from thunderagent.serving.reloading import difference

NONE = KeyLimitsEntry()
ADMIN_KEY, ADMIN_LINE = mint_key("ops")


def bearer(key: str) -> tuple[str, str]:
    return "Authorization", f"Bearer {key}"


async def turn_with(url: str, key: str, program_id: str = "p") -> Answer:
    return await post(url, "/v1/chat/completions", turn(program_id), bearer(key))


async def admin(url: str, method: str, path: str, body: object = None) -> Answer:
    content = b"" if body is None else json.dumps(body).encode()
    return await exchange(url, method, path, [bearer(ADMIN_KEY), ("Content-Type", "application/json")], content)


@pytest.fixture
def keys_file(tmp_path: Path) -> Path:
    path = tmp_path / "keys.json"
    path.write_text('{"keys": []}')
    return path


# --- keys


async def test_a_key_is_made_used_and_revoked_over_the_api(replica: FakeReplica, keys_file: Path) -> None:
    """It works without a restart, and after one; an admin key is required."""
    async with running_proxy(replica.url, keys_file=keys_file, admin_keys=(ADMIN_LINE,)) as proxy:
        made = await admin(proxy.url, "POST", "/keys", {"name": "acme/ci", "programs_count": 1})
        key = made.json()["key"]
        assert (made.status, made.json()["name"]) == (200, "acme/ci")
        assert (await turn_with(proxy.url, key)).status == 200
        assert proxy.runtime.scheduler.programs.get("p").tenant == "acme"  # type: ignore[union-attr]
        listed = {each["name"]: each for each in (await admin(proxy.url, "GET", "/keys")).json()["keys"]}
        assert key not in json.dumps(listed)
        assert (listed["ops"]["admin"], listed["ops"]["revocable"]) == (True, False)
        assert (listed["acme/ci"]["live_programs_count"], listed["acme/ci"]["revocable"]) == (1, True)
        assert (await admin(proxy.url, "POST", "/keys", {"name": "acme/ci"})).error["code"] == "key_exists"
        assert (await post(proxy.url, "/keys", {"name": "x"}, bearer(key))).status == 403
        absurd = {"name": "x", "programs_count": 10**400}
        for wrong in ({"name": "a b"}, absurd, {"name": "x", "expires": "9999-12-31T23:59:59-12:00"}):
            assert (await admin(proxy.url, "POST", "/keys", wrong)).status == 400
        never = {"name": "never", "expires": "9999-12-31T23:59:59.999999Z"}
        assert (await admin(proxy.url, "POST", "/keys", never)).status == 200
        listed = {each["name"]: each for each in (await admin(proxy.url, "GET", "/keys")).json()["keys"]}
        assert listed["never"]["expires"] == "9999-12-31T23:59:59Z"
        assert json.loads(keys_file.read_text())["keys"][0]["name"] == "acme/ci"
        assert (await admin(proxy.url, "DELETE", "/keys/acme/ci")).json()["revoked"] is True
        assert (await turn_with(proxy.url, key)).status == 401
        assert (await admin(proxy.url, "DELETE", "/keys/acme/ci")).status == 404
        assert (await admin(proxy.url, "DELETE", "/keys/ops")).status == 404
        await post(proxy.url, "/programs/release", {"all": True}, bearer(ADMIN_KEY))


async def test_a_key_is_out_although_its_file_cannot_be_changed(replica: FakeReplica, keys_file: Path) -> None:
    """The answer says that the file has it yet; others stay, and none can be made."""
    key, other = (add_key(keys_file, name, admin=False, expires=None, limits=NONE) for name in ("ci", "other"))
    async with running_proxy(replica.url, keys_file=keys_file, admin_keys=(ADMIN_LINE,)) as proxy:
        content = keys_file.read_text()
        keys_file.unlink()
        keys_file.mkdir()
        refused = await admin(proxy.url, "POST", "/keys", {"name": "x"})
        assert (refused.status, refused.error["code"]) == (409, "keys_not_changed")
        revoked = await admin(proxy.url, "DELETE", "/keys/ci")
        assert (revoked.status, revoked.json()["revoked"], revoked.json()["stored"]) == (200, True, False)
        assert "cannot read" in revoked.json()["why"]
        assert (await turn_with(proxy.url, key)).status == 401
        assert (await turn_with(proxy.url, other)).status == 200
        keys_file.rmdir()
        keys_file.write_text(content)  # it can be written again, and has the key
        async with asyncio.timeout(DEADLINE_S):
            while "ci" in [each["name"] for each in json.loads(keys_file.read_text())["keys"]]:
                assert (await turn_with(proxy.url, key)).status == 401
        assert (await turn_with(proxy.url, key)).status == 401
        assert (await turn_with(proxy.url, other)).status == 200
        await post(proxy.url, "/programs/release", {"all": True}, bearer(ADMIN_KEY))


async def test_without_a_file_keys_stay_as_they_are(replica: FakeReplica) -> None:
    """They are in the configuration, and can be listed."""
    async with running_proxy(replica.url, admin_keys=(ADMIN_LINE,)) as proxy:
        assert [each["name"] for each in (await admin(proxy.url, "GET", "/keys")).json()["keys"]] == ["ops"]
        refused = await admin(proxy.url, "POST", "/keys", {"name": "ci"})
        assert (refused.status, "there is a keys_file" in refused.error["message"]) == (400, True)


async def test_a_key_that_is_put_into_the_file_lets_in(replica: FakeReplica, keys_file: Path) -> None:
    """`thunderagent key NAME --keys-file FILE` does this on the machine; a key that expires stops at that time."""
    async with running_proxy(replica.url, keys_file=keys_file, admin_keys=(ADMIN_LINE,)) as proxy:
        late = add_key(keys_file, "late", admin=False, expires=datetime.now(UTC) - timedelta(seconds=1), limits=NONE)
        key = add_key(keys_file, "ci", admin=False, expires=None, limits=NONE)
        async with asyncio.timeout(DEADLINE_S):
            while (await turn_with(proxy.url, key)).status != 200:
                await asyncio.sleep(0.05)
        refused = await turn_with(proxy.url, late)
        assert (refused.status, "has expired" in refused.error["message"]) == (401, True)
        await post(proxy.url, "/programs/release", {"all": True}, bearer(ADMIN_KEY))


async def test_turns_wait_for_their_keys_share_and_programs_are_refused(replica: FakeReplica, keys_file: Path) -> None:
    """Requests that are no turns do not count; a key without limits does not wait for one with limits."""
    limits = KeyLimitsEntry(turns_per_min=1, programs_count=1)
    key = add_key(keys_file, "few", admin=False, expires=None, limits=limits)
    free = add_key(keys_file, "free", admin=False, expires=None, limits=NONE)
    async with running_proxy(replica.url, keys_file=keys_file, admin_keys=(ADMIN_LINE,)) as proxy:
        assert (await turn_with(proxy.url, key, "one")).status == 200
        refused = await post(proxy.url, "/programs", {"program_id": "two"}, bearer(key))
        assert (refused.status, refused.error["code"]) == (429, "key_programs_limit")
        waiting = asyncio.create_task(turn_with(proxy.url, key, "one"))
        for _ in range(3):
            assert (await turn_with(proxy.url, free, "other")).status == 200
            assert (await post(proxy.url, "/programs/release", {"program_id": "none"}, bearer(key))).status == 200
        assert not waiting.done()
        waiting.cancel()
        samples = (await metrics_of(proxy.url))["thunderagent_key_limited_total"]
        assert samples == {("programs",): 1.0, ("tokens",): 0.0, ("turns",): 1.0}
        await post(proxy.url, "/programs/release", {"all": True}, bearer(ADMIN_KEY))


async def test_programs_that_are_inferred_count(replica: FakeReplica, keys_file: Path) -> None:
    """A turn without a name that begins another program is refused, too."""
    key = add_key(keys_file, "few", admin=False, expires=None, limits=KeyLimitsEntry(programs_count=1))
    both = {"keys_file": keys_file, "admin_keys": (ADMIN_LINE,), "infer_programs": True}
    async with running_proxy(replica.url, **both) as proxy:
        answers = [await post(proxy.url, CHAT, turn(content=each), bearer(key)) for each in ("one", "two")]
        assert [each.status for each in answers] == [200, 429]
        assert answers[1].error["code"] == "key_programs_limit"
        await post(proxy.url, "/programs/release", {"all": True}, bearer(ADMIN_KEY))


async def test_tokens_count_whose_turns_took_them(replica: FakeReplica, keys_file: Path) -> None:
    """The replica says 10 and 3 for each turn: after two of them 20 a minute are overdrawn."""
    key = add_key(keys_file, "ci", admin=False, expires=None, limits=KeyLimitsEntry(tokens_per_min=20))
    async with running_proxy(replica.url, keys_file=keys_file, admin_keys=(ADMIN_LINE,)) as proxy:
        for _ in range(2):
            assert (await turn_with(proxy.url, key)).status == 200
        waiting = asyncio.create_task(turn_with(proxy.url, key))
        await until(lambda: proxy.runtime.scheduler.programs.get("p") is not None)
        async with asyncio.timeout(DEADLINE_S):
            while (await metrics_of(proxy.url))["thunderagent_key_limited_total"]["tokens",] != 1.0:
                await asyncio.sleep(0.01)
        assert not waiting.done()
        waiting.cancel()
        await post(proxy.url, "/programs/release", {"all": True}, bearer(ADMIN_KEY))


async def test_keys_of_a_tenant_hold_so_many_turns_together(replica: FakeReplica, keys_file: Path) -> None:
    """One turn too many of any of its keys gets 429; another tenant's turn is held."""
    names = ("acme/a", "acme/b", "other")
    keys = {name: add_key(keys_file, name, admin=False, expires=None, limits=NONE) for name in names}
    config: dict[str, Any] = {**cap(1), "tenant_max_held_turns_count": 1}
    async with running_proxy(replica.url, keys_file=keys_file, admin_keys=(ADMIN_LINE,), **config) as proxy:
        gate = replica.behaviour = Gate()
        tasks = [asyncio.create_task(turn_with(proxy.url, keys["acme/a"], "first"))]
        await replica.call(0)
        tasks.append(asyncio.create_task(turn_with(proxy.url, keys["acme/a"], "held")))
        await until(lambda: proxy.runtime.held_count == 1)
        refused = await turn_with(proxy.url, keys["acme/b"], "refused")
        assert (refused.status, refused.error["code"]) == (429, "key_held_limit")
        tasks.append(asyncio.create_task(turn_with(proxy.url, keys["other"], "others")))
        await until(lambda: proxy.runtime.held_count == 2)
        gate.open()
        await post(proxy.url, "/programs/release", {"program_id": "first"}, bearer(ADMIN_KEY))
        await tasks[0]
        await post(proxy.url, "/programs/release", {"all": True}, bearer(ADMIN_KEY))
        await asyncio.gather(*tasks)


def test_a_key_is_made_on_the_command_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """It goes into the file, with its expiry and limits; a line of the configuration has neither."""
    path = tmp_path / "keys.json"
    limited = ["--keys-file", str(path), "--expires", "30d", "--turns-per-min", "60", "--programs-count", "8"]
    assert main(["key", "ci", *limited]) == 0
    assert "tak_" in capsys.readouterr().out
    (entry,) = json.loads(path.read_text())["keys"]
    assert (entry["name"], entry["turns_per_min"], entry["programs_count"]) == ("ci", 60, 8)
    assert main(["key", "ci", "--turns-per-min", "60"]) == 2
    assert "need --keys-file" in capsys.readouterr().err
    assert main(["key", "other", "--keys-file", str(path), "--programs-count", "0.5"]) == 2
    assert "programs_count: " in capsys.readouterr().err


# --- the configuration read again


async def test_signal_changes_some_settings_and_names_those_that_need_a_restart(
    replica: FakeReplica, tmp_path: Path
) -> None:
    """Keys, replicas and limits hold at once, and the log shows the difference; a policy needs a restart."""
    (first_key, first), (second_key, second) = mint_key("first"), mint_key("second")
    file = tmp_path / "thunderagent.toml"
    head = f'backends = ["{replica.url}"]\nadmin_keys = ["{ADMIN_LINE}"]\nlog_format = "json"\n'
    file.write_text(f'{head}api_keys = ["{first}"]\n')
    async with serve("--config", str(file)) as process:
        await process.ready()
        assert (await turn_with(process.url, first_key)).status == 200
        file.write_text(f'{head}api_keys = ["{second}"]\npolicy = "passthrough"\nmax_held_turns_count = 7\n')
        process.process.send_signal(signal.SIGHUP)
        async with asyncio.timeout(DEADLINE_S):
            while (await turn_with(process.url, second_key, "q")).status != 200:
                await asyncio.sleep(0.02)
        assert (await turn_with(process.url, first_key)).status == 401
        await until(lambda: '"config_reloaded"' in process.log)
        lines = [json.loads(line) for line in process.log.splitlines() if '"config_reloaded"' in line]
        assert lines[0]["applied"] == {"api_keys": "+second, -first", "max_held_turns_count": "20000 -> 7"}
        assert lines[0]["needs_restart"] == {"policy": "breakeven -> passthrough"}
        again = await admin(process.url, "POST", "/config/reload")
        assert again.json() == {"applied": {}, "needs_restart": {"policy": "breakeven -> passthrough"}}
        file.write_text("polcy = 1\n")
        wrong = await admin(process.url, "POST", "/config/reload")
        assert (wrong.status, "nothing has changed" in wrong.error["message"]) == (400, True)
        assert (await turn_with(process.url, second_key, "q")).status == 200
        await until(lambda: '"config_not_reloaded"' in process.log)


async def test_replicas_and_rates_are_taken_over(replica: FakeReplica) -> None:
    """A replica that is no longer named leaves, a new one comes; an existing rate may change, a new one not begin."""
    async with fake_replica() as twin:
        wanted: dict[str, Any] = {"backends": (replica.url,), "rate_limit_per_s": 10.0}
        async with running_proxy(replica.url, rate_limit_per_s=10.0, load=wanted) as proxy:
            wanted |= {"backends": (twin.url,), "rate_limit_per_s": 1000.0, "rate_limit_burst_count": 2000}
            applied = (await post(proxy.url, "/config/reload")).json()["applied"]
            assert applied["backends"] == f"{replica.url} -> {twin.url}"
            assert (applied["rate_limit_per_s"], applied["rate_limit_burst_count"]) == ("10.0 -> 1000.0", "100 -> 2000")
            await until(
                lambda: [each.replica_id for each in proxy.runtime.scheduler.open_replicas] == [twin.replica_id]
            )
            answers = await asyncio.gather(*(ask(proxy.url, f"p{number}") for number in range(150)))
            assert {answer.status for answer in answers} == {200}
            wanted["rate_limit_per_s"] = None
            assert (await post(proxy.url, "/config/reload")).json()["needs_restart"] == {
                "rate_limit_per_s": "1000.0 -> None"
            }
            await post(proxy.url, "/programs/release", {"all": True})


async def test_asking_for_keys_takes_a_restart(replica: FakeReplica) -> None:
    """A proxy that asks for keys only in part would be worse than none."""
    wanted: dict[str, Any] = {"backends": (replica.url,)}
    async with running_proxy(replica.url, load=wanted) as proxy:
        wanted["api_keys"] = (mint_key("ci")[1],)
        answer = (await post(proxy.url, "/config/reload")).json()
        assert answer == {"applied": {}, "needs_restart": {"api_keys": "+ci"}}
        assert (await ask(proxy.url, "p")).status == 200
        os.kill(os.getpid(), signal.SIGHUP)
        await asyncio.sleep(0)
        assert (await get(proxy.url, "/health")).status == 200


def test_secrets_are_not_in_a_difference() -> None:
    """It shows keys by their names, other secrets as stars, URLs without passwords."""
    before = ServeConfig(backends=("http://u:pw@a:1",), backend_api_key="k1", sandbox_callback_token="t1")  # type: ignore[arg-type]
    after = ServeConfig(backends=("http://a:1", "http://b:2"), api_keys=(mint_key("x")[1],))
    assert difference("backends", before, after) == "http://a:1 -> http://a:1, http://b:2"
    assert difference("backend_api_key", before, after) == "*** -> None"
    assert difference("sandbox_callback_token", before, after) == "*** -> none"
    assert difference("api_keys", before, after) == "+x"


# --- the log


async def test_each_request_has_a_line_where_that_is_wanted(replica: FakeReplica) -> None:
    """Lines cover turns, the admin API, and refusals; there are none by default."""
    structlog.reset_defaults()
    async with running_proxy(replica.url) as proxy:
        with capture_logs() as logs:
            await get(proxy.url, "/health")
        assert [line for line in logs if line["event"] == "request"] == []
    async with running_proxy(replica.url, access_log=True, admin_keys=(ADMIN_LINE,)) as proxy:
        with capture_logs() as logs:
            await get(proxy.url, "/health")
            await get(proxy.url, "/queue")
            await admin(proxy.url, "GET", "/queue?limit=1")
            await ask(proxy.url, "p")
        lines = [line for line in logs if line["event"] == "request"]
        told = [(line["method"], line["path"], line["status"], line["key"]) for line in lines]
        assert told == [
            ("GET", "/health", 200, None),
            ("GET", "/queue", 401, None),
            ("GET", "/queue", 200, "ops"),
            ("POST", "/v1/chat/completions", 200, None),
        ]
        assert all(line["duration_s"] > 0 and line["sent_bytes"] > 0 and line["request_id"] for line in lines)
        assert lines[3]["request_bytes"] > 0


# --- top


async def test_top_shows_rates_memory_and_programs(replica: FakeReplica, capsys: pytest.CaptureFixture[str]) -> None:
    """It shows them once if the output is not a terminal; programs have the requested order."""
    async with running_proxy(replica.url) as proxy:
        for number in range(12):
            await ask(proxy.url, "named" if number < 2 else None)
        await ask(proxy.url, "large")
        assert await asyncio.to_thread(main, ["top", "--url", proxy.url, "--programs", "5", "--sort", "turns"]) == 0
        out = " ".join(capsys.readouterr().out.split())
        for said in (
            "turns/min",
            "prefix hits",
            "replicas up 1 of 1",
            f"{replica.replica_id} [",
            "claimed or waited for",
        ):
            assert said in out
        assert "Most turns name no program: see thunderagent doctor." in out
        assert out.index("named") < out.index("large")
        assert await asyncio.to_thread(main, ["top", "--url", proxy.url, "--sort", "id"]) == 0
        out = capsys.readouterr().out
        assert out.index("large") < out.index("named")
    assert await asyncio.to_thread(main, ["top", "--url", "http://127.0.0.1:9"]) == 1


@pytest.mark.parametrize("names", [("large", "large"), ("large", "small")])
async def test_status_and_top_say_pools_where_there_are_several(
    names: tuple[str, str], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each replica shows its own, and each program that of the model that it asked for."""
    monkeypatch.setenv("COLUMNS", "160")
    several = len(set(names)) > 1
    async with fake_replica() as one, fake_replica() as other:
        one.models, other.models = ((name,) for name in names)
        async with running_proxy(one.url, other.url) as proxy:
            await until(lambda: proxy.runtime.pools.several is several)
            await ask(proxy.url, "p", model=names[1])
            assert await asyncio.to_thread(main, ["status", "--url", proxy.url]) == 0
            out = " ".join(capsys.readouterr().out.split())
            assert f"{other.replica_id} {'small up' if several else 'up'}" in out
            assert f"p {'small active' if several else 'active'}" in out
            assert await asyncio.to_thread(main, ["top", "--url", proxy.url]) == 0
            assert ("pool small" in capsys.readouterr().out) is several


@pytest.mark.parametrize("command", ["status", "top", "handover"])
async def test_a_key_for_data_is_told_to_be_one(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    """Without a key, with a wrong one and with one for data the words differ, and each says what to do."""
    key, line = mint_key("agents")
    async with fake_replica() as replica, running_proxy(replica.url, api_keys=[line], admin_keys=[ADMIN_LINE]) as proxy:
        for given, words in (
            ((), "wants an admin key"),
            (("--key", "tak_wrong"), "does not know this key"),
            (("--key", key), "this key is for data, and an admin key is needed"),
        ):
            assert await asyncio.to_thread(main, [command, "--url", proxy.url, *given]) == 1
            said = capsys.readouterr().err
            assert f"{proxy.url} {words}" in said.replace("answers 403: ", "")
            assert "`thunderagent key NAME --admin` makes one" in said


async def test_hand_over_without_a_standby_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    """A plain proxy does not answer with its raw 404."""
    async with fake_replica() as replica, running_proxy(replica.url) as proxy:
        assert await asyncio.to_thread(main, ["handover", "--url", proxy.url.removeprefix("http://")]) == 1
    said = capsys.readouterr().err
    assert "has nobody to hand over to: only a scheduler with a store does" in said
    assert "{" not in said


async def test_prefix_caching_that_is_off_is_said_where_an_operator_looks(
    capsys: pytest.CaptureFixture[str], replica: FakeReplica
) -> None:
    """In the log, by `status` and `top`, and as a metric with an alert; on an engine that says nothing, nowhere."""
    off = 'vllm:cache_config_info{enable_prefix_caching="False",kv_cache_size_tokens="1000000"} 1.0\n'
    async with fake_replica() as other:
        other.metrics = off
        with capture_logs() as logs:
            async with running_proxy(replica.url, other.url) as proxy:
                for command in ("status", "top"):
                    assert await asyncio.to_thread(main, [command, "--url", proxy.url]) == 0
                    lines = capsys.readouterr().out.splitlines()
                    told = [line for line in lines if "prefix caching off" in line]
                    assert [other.replica_id in line for line in told] == [True]
                assert (await metrics_of(proxy.url))["thunderagent_prefix_caching_off"] == {(other.replica_id,): 1.0}
    assert [each["replica_id"] for each in logs if each["event"] == "prefix_caching_off"] == [other.replica_id]


async def test_a_disabled_radix_cache_is_said_alike(capsys: pytest.CaptureFixture[str]) -> None:
    """SGLang says it beside its metrics alone; the log names its own option."""
    async with fake_replica(answers({"disable_radix_cache": True})) as replica:
        replica.metrics = "sglang:max_total_num_tokens 16000.0\n"
        with capture_logs() as logs:
            async with running_proxy(replica.url) as proxy:
                assert await asyncio.to_thread(main, ["status", "--url", proxy.url]) == 0
                assert "prefix caching off" in capsys.readouterr().out
                assert (await metrics_of(proxy.url))["thunderagent_prefix_caching_off"] == {(replica.replica_id,): 1.0}
    (said,) = [each for each in logs if each["event"] == "prefix_caching_off"]
    assert "SGLang without --disable-radix-cache" in said["effect"]


# --- the page of ten tasks

TASKS = dict(
    re.findall(
        r"^## (.+?)\n.*?^```sh\n(.*?)^```",
        (Path(__file__).parents[2] / "docs/how-to/operate.md").read_text(),
        re.DOTALL | re.MULTILINE,
    )
)


async def typed(task: str, url: str, folder: Path, **words: str) -> str:
    """Run a task's lines as an operator types them, with this proxy, and return what they print."""
    script = TASKS[task].replace("localhost:8300", url.removeprefix("http://"))
    for before, after in words.items():
        script = script.replace(before.replace("_", "-"), after)
    here = f'thunderagent() {{ {sys.executable} -m thunderagent "$@"; }}\n'
    environment = {**os.environ, "THUNDERAGENT_PROXY": url, "THUNDERAGENT_KEY": ADMIN_KEY, "NO_PROXY": "127.0.0.1"}
    process = await asyncio.create_subprocess_exec(
        *("bash", "-euo", "pipefail", "-c", here + script),
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
        cwd=folder,
        env=environment,
    )
    output, errors = await process.communicate()
    assert process.returncode == 0, (task, errors, output)
    return output.decode()


@pytest.mark.skipif(shutil.which("jq") is None or shutil.which("curl") is None, reason="needs curl and jq")
async def test_ten_tasks_take_a_command_each(replica: FakeReplica, tmp_path: Path) -> None:
    """What the page says of each is in its output."""
    assert len(TASKS) == 10
    async with fake_replica() as dying, serve("--policy", "cap", "--policy-arg", "n=1",
        "--backends", f"{replica.url},{dying.url}", "--down-after-failures", "1") as process:  # fmt: skip
        await process.ready()
        url = process.url
        asking = {f"task-{number}": asyncio.create_task(ask(url, f"task-{number}")) for number in range(1, 5)}
        async with asyncio.timeout(DEADLINE_S):
            while not (waiting := (await get(url, "/queue")).json()["waiting"]):
                await asyncio.sleep(0.02)
        first = waiting[0]["program_id"]
        said = json.loads(await typed("Find why a turn waits", url, tmp_path, task_5=first))
        assert (said["turns_held_count"], bool(said["needs"])) == (1, True)
        aborted = json.loads(await typed("Abort a program", url, tmp_path, task_5=first))
        assert aborted["program_id"] == first
        assert (await asking.pop(first)).status == 410
        costs = json.loads(await typed("Find which program costs most", url, tmp_path))
        assert costs[0]["tokens"] > 0
        assert "finished" in await typed("See errors", url, tmp_path)
        assert "hits" in await typed("See whether prefix caching works", url, tmp_path)
        async with asyncio.timeout(DEADLINE_S):
            while not (await get(url, "/summary")).json()["rates"]["turns_per_min"]:
                await asyncio.sleep(0.1)
        sizes = json.loads(await typed("Size 16 replicas", url, tmp_path))  # of two replicas with one program
        assert (sizes["programs_that_fit"], sizes["processes"], sizes["turns_per_s"] > 0) == (8, 1, True)
        await typed("Drain an engine", url, tmp_path, **{"10.0.0.1:8000": replica.replica_id})
        replicas = {each["replica_id"]: each for each in (await get(url, "/replicas")).json()["replicas"]}
        assert [replicas[each]["draining"] for each in (replica.replica_id, dying.replica_id)] == [True, False]
        for each in asking.values():
            each.cancel()
        await dying.end()
        async with asyncio.timeout(DEADLINE_S):
            while not (dead := await typed("Find a dead engine", url, tmp_path)):
                await asyncio.sleep(0.1)
        assert json.loads(dead)["replica_id"] == dying.replica_id


@pytest.mark.skipif(shutil.which("curl") is None, reason="needs curl")
async def test_keys_are_added_and_rotated_as_the_page_says(replica: FakeReplica, keys_file: Path) -> None:
    """The first key lets in until it is revoked, and the second one goes on."""
    await typed("Add a key with a limit", replica.url, keys_file.parent)
    entry = json.loads(keys_file.read_text())["keys"][0]
    assert (entry["name"], entry["programs_count"], entry["tokens_per_min"]) == ("lab", 32, 200_000)
    async with running_proxy(replica.url, keys_file=keys_file, admin_keys=(ADMIN_LINE,)) as proxy:
        await typed("Rotate a key", proxy.url, keys_file.parent)
        assert [each["name"] for each in json.loads(keys_file.read_text())["keys"]] == ["lab-2"]
