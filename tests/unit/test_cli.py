"""The command line: its help and its refusals."""

from __future__ import annotations

import asyncio
import contextlib
import importlib
import io
import re
import shlex
import shutil
import subprocess
import sys
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
from thunderagent.cli.command_line import COMMANDS
from thunderagent.cli.serve import FILE_FIELDS, LIST_FIELDS, ROLES, _options_as_given
from thunderagent.compilation import build_kind
from thunderagent.config import ServeConfig
from thunderagent.doctor.asking import proxy_url
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
    exit_status("scheduler", "--help-all")
    exit_status("gateway", "--help-all")
    exit_status("serve", "--help-all")
    out = "".join(capsys.readouterr().out.split())
    for name in ServeConfig.model_fields.keys() - FILE_FIELDS:
        assert f"[THUNDERAGENT_{name.upper()}]" in out
        assert f"--{LIST_FIELDS.get(name, name.replace('_', '-'))}" in out


@pytest.mark.parametrize("command", ROLES)
def test_help_is_one_screen_and_names_the_sections(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    """The rest is asked for, by section, by a word, or in whole."""
    assert exit_status(command, "--help") == 0
    out = capsys.readouterr().out
    assert len(out.splitlines()) <= 55
    for section in re.findall(r"^  (\w+) +[A-Z].*: \d+ options?$", out, re.MULTILINE):
        assert exit_status(command, "--help", section) == 0
        assert "[THUNDERAGENT_" in capsys.readouterr().out
    assert exit_status(command, "-h", "grace") == 0
    out = capsys.readouterr().out
    assert "--grace-s" in out
    assert "--port" not in out


def test_help_on_what_is_not_there_names_the_nearest(capsys: pytest.CaptureFixture[str]) -> None:
    """It is refused as a wrong option is."""
    assert exit_status("serve", "--help", "timouts") == 2
    assert "no section and no option 'timouts'; did you mean timeouts?" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("command", "listed", "unlisted"),
    [
        ("serve", ["--gateways", "--gateway-lost-s", "--judge-url", "--sandboxes"], ["--store", "--scheduler-key"]),
        ("scheduler", ["--store", "--lock-s", "--policy"], ["--gateways", "--scheduler-key", "--judge-url", "--warm"]),
        (
            "gateway",
            ["--schedulers", "--retries-count"],
            ["--store", "--provision", "--embedded-engines", "--sandboxes"],
        ),
        ("picker", ["--schedulers", "--picker-port", "--policy"], ["--store", "--gateways"]),
    ],
)
def test_a_command_lists_the_options_that_apply_to_it(
    command: str, listed: list[str], unlisted: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    """It takes the others, since processes of a cell may share a configuration."""
    assert exit_status(command, "--help-all") == 0
    options = set(re.findall(r"--[a-z-]+", capsys.readouterr().out))
    assert set(listed) <= options
    assert not set(unlisted) & options
    build_parser().parse_args([command, "--store", "redis://here:6379/0"])


def test_a_shell_completes_commands_options_and_values(capsys: pytest.CaptureFixture[str]) -> None:
    """The script of bash is run as bash would, when it asks."""
    assert exit_status("completion", "bash") == 0
    script = capsys.readouterr().out

    def completed(*words: str) -> list[str]:
        line = " ".join(map(shlex.quote, words))
        asks = f"COMP_WORDS=({line}); COMP_CWORD={len(words) - 1}; _thunderagent; echo ${{COMPREPLY[@]}}"
        run = subprocess.run(["bash", "-c", f"{script}\n{asks}"], capture_output=True, text=True, check=True)
        return run.stdout.split()

    assert completed("thunderagent", "sta") == ["status"]
    assert completed("thunderagent", "nova", "se") == ["serve"]
    assert completed("thunderagent", "top", "--so") == ["--sort"]
    assert completed("thunderagent", "serve", "--port", "1", "--log-le") == ["--log-level"]
    assert completed("thunderagent", "serve", "--log-level", "de") == ["debug"]


@pytest.mark.parametrize("shell", ["zsh", "fish"])
def test_other_shells_get_a_script_too(shell: str, capsys: pytest.CaptureFixture[str]) -> None:
    """It has every command."""
    assert exit_status("completion", shell) == 0
    script = capsys.readouterr().out
    assert all(name in script for name in ("serve", "doctor", "workflow", "log-level"))
    if shutil.which(shell):
        subprocess.run([shell, "-n"], input=script, text=True, check=True)


@pytest.mark.parametrize(
    ("given", "url"),
    [
        ("10.0.0.1:80", "http://10.0.0.1:80"),
        ("proxy.example", "http://proxy.example"),
        (":8300", "http://127.0.0.1:8300"),
        ("[::1]:8300", "http://[::1]:8300"),
        ("https://proxy.example/", "https://proxy.example"),
        ("http://proxy.example:1/v1", "http://proxy.example:1"),
        (None, "http://127.0.0.1:8300"),
    ],
)
def test_the_address_of_a_proxy_may_be_short(given: str | None, url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """It comes from the option, from the environment, or is this machine's."""
    monkeypatch.delenv("THUNDERAGENT_PROXY", raising=False)
    assert proxy_url(given) == url
    if given is not None:
        monkeypatch.setenv("THUNDERAGENT_PROXY", given)
        assert proxy_url(None) == url
        assert proxy_url("other:1") == "http://other:1"
        assert proxy_url(None, 9) == "http://127.0.0.1:9"


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
        (["serve", "--polcy", "cap"], "--polcy cap; did you mean --policy?; see thunderagent serve --help"),
        (["top", "--sortt=id"], "did you mean --sort?; see thunderagent top --help"),
        (["nova", "serve", "--model", "m", "--prot", "1"], "did you mean --port?; see thunderagent nova serve --help"),
        (["sreve"], "; did you mean serve?"),
        (["top", "--sort", "turn"], "; did you mean turns?"),
        (["serve", "--backends", ""], "backends is given and names no replica"),
        (["serve", "--backends", " , "], "backends is given and names no replica"),
        (["serve", "--kubernetes-replicas", ""], "kubernetes_replicas is given and names no replica"),
        (["doctor", "--backends", ""], "backends is given and names no replica"),
        (["status", "--url", ""], "--url: it is empty"),
        (["status", "--url", "ftp://here"], "--url: 'ftp://here' is not a URL"),
        (["top", "--url", "here:80:90"], "--url: 'here:80:90' is not a URL"),
        (["handover", "--url", "http://"], "is not a URL, as http://HOST:PORT or HOST:PORT"),
        (["completion", "tcsh"], "invalid choice: 'tcsh'"),
        (["serve", "--port", "x"], "error: port: Input should be a valid integer"),
        (["serve", "--tick-s", "0"], "error: tick_s: Input should be greater than 0"),
        (["serve", "--backends", "here:80"], "'here:80' is not an http or https URL"),
        (["serve", "--log-level", "loud"], "invalid choice: 'loud'"),
        (["serve", "--policy", "fastest"], "no policy 'fastest'; there are autellix, breakeven, cap, continuum"),
        (["serve", "--policy", "brakeven"], "or package.module:Class; did you mean breakeven?"),
        (["serve", "--policy", "ttl", "--policy-arg", "ttls=6"], "; did you mean ttl_s?"),
        (["serve", "--fence", "strat"], "fence: Input should be 'start' or 'turn'; did you mean start?"),
        (["simulate", "--workload", "standart"], "; did you mean standard?"),
        (["status", "localhost:8300"], "arguments: localhost:8300; did you mean --url localhost:8300?"),
        (["replay", "/dev/null"], "error: /dev/null: it is empty: not an event log"),
        (["serve", "--policy", "cap", "--policy-arg", "m=6"], "policy cap has no setting 'm'; it has: n"),
        (["serve", "--policy", "cap", "--policy-arg", "n=0"], "cap: n must be a whole number, at least 1, not 0"),
        (["serve", "--policy-arg", "n"], "error: policy_args: 'n' is not name=value"),
        (["serve", "--judge-model", "m"], "thunderagent: error: judge_model goes with judge_url"),
        (["serve", "--provision", "nonsense"], "invalid choice: 'nonsense' (choose from 'command', 'docker', 'kub"),
        (
            ["serve", "--priority", "thunderagent.programs.policies.baselines.cap:Cap"],
            "Cap cannot be the priority: its class is no subclass of EnginePriority",
        ),
        (["serve", "--config", "no/such/file.toml"], "there is no configuration file no/such/file.toml"),
        (["serve", "--event-log", "no/such/folder/log"], "cannot write the event log no/such/folder/log"),
        (["doctor", "--backends", "http://a:1", "--url", "http://b:2"], "not allowed with argument --backends"),
        (["doctor", "--backends", "here:80"], "'here:80' is not an http or https URL; is it http://here:80?"),
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
        (["record", __file__, "--out", "x"], f"{__file__}: line 1: not the header of an event log"),
    ],
)
def test_a_wrong_option_ends_with_2_and_one_clear_line(
    argv: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """Standard error says what is wrong, without a trace and without a list of all options."""
    assert exit_status(*argv) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert message in line


HELLO = """
def add_commands(parser):
    parser.add_argument("--name", default="you")
    parser.set_defaults(run=lambda args: print(f"hello {args.name}") or 0)
"""


def install(folder: Path, name: str, source: str) -> None:
    """Lay out a package as pip does, which has a command of that name."""
    (folder / f"{name}_package.py").write_text(source)
    info = folder / f"{name}_package-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}-package\nVersion: 1.0\nSummary: Say {name}\n")
    (info / "entry_points.txt").write_text(f"[{COMMANDS}]\n{name} = {name}_package:add_commands\n")


def test_an_installed_package_adds_its_command(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """It is listed with the package's line, is run, and takes the place of none of ours."""
    install(tmp_path, "hello", HELLO)
    install(tmp_path, "serve", HELLO)
    install(tmp_path, "broken", "import no_such_module")
    monkeypatch.syspath_prepend(str(tmp_path))
    assert main(["hello", "--name", "me"]) == 0
    assert capsys.readouterr().out == "hello me\n"
    assert re.search(r"^ +hello +say hello$", build_parser().format_help(), re.MULTILINE)
    assert build_parser().parse_args(["serve", "--policy", "cap"]).policy == "cap"
    assert exit_status("hello", "--nam", "me", "--nane", "x") == 2
    assert "did you mean --name?" in capsys.readouterr().err
    assert exit_status("broken") == 2
    assert "broken: its package cannot be imported: No module named 'no_such_module'" in capsys.readouterr().err


def test_packages_are_not_looked_up_for_a_command_of_ours(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """That would cost each start as long as half of its imports."""
    install(tmp_path, "hello", HELLO)
    monkeypatch.syspath_prepend(str(tmp_path))
    assert "hello" in build_parser(["--help"]).format_help()
    assert "hello" not in build_parser(["serve", "--port", "1"]).format_help()


@pytest.mark.parametrize(
    ("command", "package"), [("nova", "thunderagent-nova"), ("workflow", "thunderagent-workflows")]
)
def test_a_command_whose_package_is_missing_says_what_to_install(
    command: str, package: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Where nothing is installed at all."""
    importlib.invalidate_caches()
    monkeypatch.setattr(sys, "path", [str(tmp_path)])
    assert exit_status(command, "serve") == 2
    assert f"error: argument COMMAND: {command}: install the package `{package}`;" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ('port = 1\npolicy = "brakeven"\n', "wrong.toml, line 2: policy: no policy 'brakeven'"),
        (
            'policy = "cap"\n[policy_args]\nm = 3\n',
            "line 1: policy, line 2: policy_args: policy cap has no setting 'm'",
        ),
        ('order = "fcsf"\n', "wrong.toml, line 1: order: no order 'fcsf'"),
    ],
)
def test_a_policy_that_a_file_names_wrongly_is_refused_with_the_line(
    tmp_path: Path, text: str, message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """What the command line says instead is not the file's."""
    path = tmp_path / "wrong.toml"
    path.write_text(text)
    assert exit_status("serve", "--config", str(path)) == 2
    assert message in capsys.readouterr().err
    assert exit_status("serve", "--config", str(path), "--policy", "brake") == 2
    assert "wrong.toml, line 2: policy:" not in capsys.readouterr().err


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


def test_engine_name_cannot_control_a_terminal() -> None:
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


def test_turns_held_now_count_as_held() -> None:
    """A turn that has waited for 49 s was not held for 0.0 s."""
    program = {
        "program_id": "p",
        "pool": "",
        "status": "paused",
        "phase": "reasoning",
        "marked": False,
        "replica_id": None,
        "claim_tokens": 10,
        "turn_count": 1,
        "age_s": 60.0,
        "held_s_total": 1.5,
    }
    for held_for_s, told in ((49.2, "50.7"), (None, "1.5")):
        page = {"total": 1, "programs": [program | {"held_for_s": held_for_s}]}
        assert list(status._program_table(page).columns[-1].cells) == [told]
