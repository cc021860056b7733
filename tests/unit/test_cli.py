"""The command line: its help and its refusals."""

from __future__ import annotations

import asyncio
import contextlib
import io
from collections.abc import Iterator
from pathlib import Path

import pytest
import structlog
from aiohttp import web
from rich.console import Console
from structlog.testing import capture_logs

from tests.loopback import on_loopback
from thunderagent import __version__
from thunderagent.calibrate import client as calibrate_client
from thunderagent.cli import build_parser, main, status
from thunderagent.cli.serve import FILE_FIELDS, LIST_FIELDS, _options_as_given
from thunderagent.compilation import build_kind
from thunderagent.config import ServeConfig
from thunderagent.doctor.findings import fault, show
from thunderagent.serving.building import build_runtime
from thunderagent.simulator.workloads.formats import load_recorded


@pytest.fixture(autouse=True)
def logging_as_before() -> Iterator[None]:
    """`serve` sends logs to the current standard error, which is gone after the test."""
    yield
    structlog.reset_defaults()


def exit_status(*argv: str) -> int:
    try:
        return main(argv)
    except SystemExit as exited:  # argparse refuses this way, and ends --help
        return int(exited.code or 0)


OWN = "under breakeven, this project's own policy"


@pytest.mark.parametrize(
    ("command", "taught"),
    [
        ((), ["serve", "engine", "simulate", "status", "replay", "Try `thunderagent serve`"]),
        (
            ("serve",),
            ["X-Program-ID", "/programs/release", "--policy-arg n=6", "http://HOST:PORT/p/", OWN],
        ),
        (("engine",), ["--kv-tokens", "--port"]),
        (
            ("doctor",),
            [
                "--backends A,B",
                "--url URL",
                "--program-header NAME",
                "--no-turns",
                "Exit status: 0 if there is no fault",
            ],
        ),
        (("status",), ["--watch", "http://127.0.0.1:8300"]),
        (("replay",), ["LOG", "first difference"]),
        (("record",), ["LOG", "--out FILE", "token counts and times, no text"]),
    ],
)
def test_help_teaches(command: tuple[str, ...], taught: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    """Each command's --help has what a newcomer needs, and does not crash."""
    assert exit_status(*command, "--help") == 0
    out = " ".join(capsys.readouterr().out.split())
    assert [words for words in taught if words not in out] == []


def test_every_field_of_the_configuration_is_an_option_with_its_variable(capsys: pytest.CaptureFixture[str]) -> None:
    """--help shows every setting."""
    exit_status("serve", "--help")
    out = "".join(capsys.readouterr().out.split())
    for name in ServeConfig.model_fields.keys() - FILE_FIELDS:
        assert f"[THUNDERAGENT_{name.upper()}]" in out
        assert f"--{LIST_FIELDS.get(name, name.replace('_', '-'))}" in out


def test_an_option_that_was_not_given_says_nothing() -> None:
    """The environment and the file then precede the defaults."""
    args = build_parser().parse_args(["serve", "--policy-arg", "n=6", "--policy-arg", "tick_s=1"])
    assert {name for name in ServeConfig.model_fields if getattr(args, name, None) is not None} == {"policy_args"}
    assert args.policy_args == ["n=6", "tick_s=1"]


@pytest.mark.parametrize(
    ("argv", "said"),
    [
        (["--user-names-program"], True),
        (["--user-names-program", "true"], True),
        (["--user-names-program", "false"], False),
        (["--user-names-program=no"], False),
        (["--user-names-program", "--port", "1"], True),
        (["--port", "1"], False),
    ],
)
def test_an_option_that_is_true_or_false_may_stand_alone(argv: list[str], said: bool) -> None:
    """Then it is true."""
    args = build_parser().parse_args(["serve", *argv])
    given = {} if args.user_names_program is None else {"user_names_program": args.user_names_program}
    assert ServeConfig.load(**given).user_names_program is said


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        ([], "the following arguments are required: COMMAND"),
        (["sreve"], "invalid choice: 'sreve'"),
        (["serve", "--no-such-option"], "unrecognized arguments: --no-such-option"),
        (["serve", "--port", "x"], "error: port: Input should be a valid integer"),
        (["serve", "--tick-s", "0"], "error: tick_s: Input should be greater than 0"),
        (["serve", "--backends", "here:80"], "'here:80' is not an http or https URL"),
        (["serve", "--log-level", "loud"], "invalid choice: 'loud'"),
        (["serve", "--policy", "fastest"], "no policy 'fastest'; there are autellix, breakeven, cap, continuum"),
        (["serve", "--policy", "cap", "--policy-arg", "m=6"], "policy cap has no setting 'm'; it has: n"),
        (["serve", "--policy", "cap", "--policy-arg", "n=0"], "cap: n must be a whole number, at least 1, not 0"),
        (["serve", "--policy-arg", "n"], "error: policy_args: 'n' is not name=value"),
        (["serve", "--judge-model", "m"], "thunderagent: error: judge_model goes with judge_url"),
        (["serve", "--provision", "nonsense"], "invalid choice: 'nonsense' (choose from 'command', 'docker', 'kub"),
        (
            ["serve", "--priority", "thunderagent.programs.policies.baselines.cap:Cap"],
            "Cap cannot be the priority: it has no engine_pri",
        ),
        (["serve", "--config", "no/such/file.toml"], "there is no configuration file no/such/file.toml"),
        (["serve", "--event-log", "no/such/folder/log"], "cannot write the event log no/such/folder/log"),
        (["doctor", "--backends", "http://a:1", "--url", "http://b:2"], "not allowed with argument --backends"),
        (["doctor", "--backends", "here:80"], "'here:80' is not an http or https URL"),
        (["doctor", "--url", "http://[::1"], "'http://[::1' is not a URL"),
        (["doctor", "--ca-file", "no/such/file"], "--ca-file: cannot use no/such/file"),
        (["status", "--ca-file", "no/such/file"], "--ca-file: cannot use no/such/file"),
        (["handover", "--ca-file", "no/such/file"], "--ca-file: cannot use no/such/file"),
        (["status", "--programs", "many"], "invalid int value: 'many'"),
        (["status", "--programs", "0"], "error: --programs: must be at least 1, not 0"),
        (["top", "--programs", "-1"], "error: --programs: must be at least 1, not -1"),
        (["replay"], "the following arguments are required: LOG"),
        (["record", "events.jsonl"], "the following arguments are required: --out"),
        (["record", "no/such/log", "--out", "x"], "error: no/such/log: No such file or directory"),
        (["record", __file__, "--out", "x"], "line 1: not the header of an event log"),
    ],
)
def test_a_wrong_option_ends_with_2_and_one_clear_line(
    argv: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """Standard error says what is wrong, without a trace and without a list of all options."""
    assert exit_status(*argv) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert message in line


@pytest.mark.parametrize("policy", ["sticky", "fcfs", "autellix"])
def test_a_part_that_does_nothing_is_warned_of(policy: str) -> None:
    """It warns once for each: an order has no effect if nothing waits for memory. Other parts give no warning."""
    with capture_logs() as logs:
        build_runtime(ServeConfig.load(policy=policy, order="shortest", victims="largest", priority="age"))
        build_runtime(ServeConfig.load(policy=policy, priority="age"))
        build_runtime(ServeConfig.load(policy="cap", order="shortest", victims="largest"))
    assert [(each["event"], each["part"], each["why"]) for each in logs] == [
        ("part_without_effect", "order shortest", f"{policy} holds nobody"),
        ("part_without_effect", "victims largest", f"{policy} holds nobody"),
    ]


def test_the_version_is_the_packages(capsys: pytest.CaptureFixture[str]) -> None:
    """A bug report begins with it."""
    assert exit_status("--version") == 0
    assert capsys.readouterr().out == f"thunderagent {__version__} ({build_kind()})\n"


def test_status_of_a_proxy_that_is_not_there_ends_with_1(capsys: pytest.CaptureFixture[str]) -> None:
    """One line names the address, and the option for another one."""
    assert exit_status("status", "--url", "http://127.0.0.1:9") == 1
    said = capsys.readouterr().err
    assert said.startswith("thunderagent: error: no proxy answers at http://127.0.0.1:9:")
    assert said.endswith("; --url gives another address\n")


@pytest.mark.parametrize(
    ("text", "why"),
    [("<html>", "is no JSON"), ("{}", "is not a proxy's"), ("[]", "is not a proxy's"), ("null", "is not a proxy's")],
)
@pytest.mark.parametrize(
    ("command", "says"), [("status", "no proxy"), ("top", "no proxy"), ("handover", "no scheduler")]
)
async def test_a_server_of_another_kind_is_told_of(
    command: str, says: str, text: str, why: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """It answers everything with a page, or with JSON of its own."""

    async def page(_: web.Request) -> web.Response:
        return web.Response(text=text, content_type="text/html")

    app = web.Application()
    app.router.add_route("*", "/{path:.*}", page)
    async with on_loopback(app) as url:
        assert await asyncio.to_thread(exit_status, command, "--url", url) == 1
    assert capsys.readouterr().err.startswith(f"thunderagent: error: {says} answers at {url}: what it sends {why}")


@pytest.mark.parametrize("command", ["status", "top", "handover", "calibrate --out none.toml"])
async def test_an_answer_without_end_is_not_read_to_its_end(
    command: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whatever listens there does not decide how much memory the command takes."""
    for module in (status, calibrate_client):
        monkeypatch.setattr(module, "MAX_ANSWER_BYTES", 100_000)

    async def endless(request: web.Request) -> web.StreamResponse:
        response = web.StreamResponse()
        await response.prepare(request)
        with contextlib.suppress(ConnectionError):
            while True:
                await response.write(b" " * 50_000)
        return response

    app = web.Application()
    app.router.add_route("*", "/{path:.*}", endless)
    async with on_loopback(app) as url:
        assert await asyncio.to_thread(exit_status, *command.split(), "--url", url) == 1
    assert "sent more than 100000 bytes" in capsys.readouterr().err


def test_what_an_engine_is_called_does_not_obey_on_a_terminal() -> None:
    """Names of models come from engines, by way of a proxy, to `status`, `top` and `doctor`."""
    assert status._shown({"models": ["m\x1b]0;owned\x07", 1, None]}) == {"models": [r"m\x1b]0;owned\x07", 1, None]}
    out = io.StringIO()
    console = Console(file=out, force_terminal=False)
    show([fault("engine", "models", "serves m\x1b]0;owned\x07", remedy="rename \x1b[2J")], console)
    assert "\x1b" not in out.getvalue()
    assert r"serves m\x1b]0;owned\x07" in out.getvalue()


def test_options_for_another_process_are_read_there_as_here() -> None:
    """A value may begin with a sign, which would make it an option."""
    argv = ["--config=-x.toml", "--host", "::1", "--policy-arg=-n=6", "--policy-arg", "m=1", "--api-keys=-a,-b"]
    parser = build_parser()
    args = parser.parse_args(["serve", *argv, "--user-names-program"])
    given = {name: value for name in ServeConfig.model_fields if (value := getattr(args, name, None)) is not None}
    again = vars(parser.parse_args(["gateway", *_options_as_given(args, given)]))
    assert {name: again[name] for name in given} == given
    assert given["policy_args"] == ["-n=6", "m=1"]
    assert again["config"] == args.config


def test_a_policy_argument_of_the_environment_is_overruled_by_an_option(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """It replaces the whole list, not single members."""
    monkeypatch.setenv("THUNDERAGENT_POLICY_ARGS", "m=1")
    log = tmp_path / "none" / "log"
    assert exit_status("serve", "--policy", "cap", "--policy-arg", "n=2", "--event-log", str(log)) == 2
    assert "cannot write the event log" in capsys.readouterr().err


def test_a_log_is_recorded_into_a_new_file(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """It reports what it wrote and omitted, and overwrites nothing."""
    log = Path(__file__).parent.parent / "replay" / "thunderagent.jsonl"
    out = tmp_path / "day.jsonl"
    assert exit_status("record", str(log), "--out", str(out)) == 0
    trace = load_recorded(out)
    assert trace.programs
    said = capsys.readouterr().out
    assert said.startswith(f"{out}: {len(trace.programs)} programs, {sum(len(p.turns) for p in trace.programs)} turns;")
    assert exit_status("record", str(log), "--out", str(out)) == 2
    assert capsys.readouterr().err == f"thunderagent: error: {out}: File exists\n"
