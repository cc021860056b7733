"""The command line.

`thunderagent serve | scheduler | gateway | picker | doctor | engine | simulate | compare | calibrate | status | top |
`thunderagent handover | key | replay | record | nova serve | workflow`.

A command's modules are imported when it is asked for: an engine starts in a third of the time that all of them take.
"""

# ruff: noqa: PLC0415 - see above

from __future__ import annotations

import argparse
import errno
import gc
import logging
import os
import sys
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from importlib import import_module
from pathlib import Path
from types import UnionType
from typing import Any, Literal, NoReturn, get_args, get_origin

from thunderagent import __version__
from thunderagent.compilation import STALE, build_kind
from thunderagent.errors import ConfigurationError, ThunderAgentError

SERVE_HELP = """\
Serve agent programs on many engine replicas.

Point an agent framework's base URL at the proxy and tell it whose turn each request is, by any of
  - the path:    http://HOST:PORT/p/PROGRAM_ID/v1   as base URL
  - a header:    X-Program-ID: PROGRAM_ID           (or X-Session-ID)
  - the body:    "program_id": "PROGRAM_ID"         (extra_body of the openai client)
and say when a program ends:
  curl -X POST HOST:PORT/programs/release -d '{"program_id": "PROGRAM_ID"}'

Examples:
  thunderagent serve
      two simulated engines, to try things out
  thunderagent serve --backends http://10.0.0.1:8000,http://10.0.0.2:8000
      two vLLM replicas, under breakeven, this project's own policy
  thunderagent serve --backends http://10.0.0.1:8000 --policy cap --policy-arg n=6
      at most six programs at once
"""

FILE_FIELDS = frozenset({"sandbox_templates"})
"""Fields that only the configuration file has."""

LIST_FIELDS = {"policy_args": "policy-arg", "tenant_weights": "tenant-weight", "model_aliases": "model-alias"}
"""Fields that are given one item at a time, by an option of another name."""


class _Parser(argparse.ArgumentParser):
    """Says what is wrong, and not every option before it: of `serve` these are pages.

    What `add_options` adds, this parser has from when it is asked for.
    """

    def __init__(self, *, add_options: Callable[[argparse.ArgumentParser], None] | None = None, **more: Any) -> None:
        super().__init__(**more)
        self._add_options = add_options

    def _complete(self) -> None:
        add_options, self._add_options = self._add_options, None
        if add_options is not None:
            add_options(self)

    def parse_known_args(self, args: Any = None, namespace: Any = None) -> Any:
        """Parse, with all options."""
        self._complete()
        return super().parse_known_args(args, namespace)

    def format_help(self) -> str:
        """Tell of all options."""
        self._complete()
        return super().format_help()

    def error(self, message: str) -> NoReturn:
        self.exit(2, f"thunderagent: error: {message}; see {self.prog} --help\n")


def main(argv: Sequence[str] | None = None) -> int:
    """Run a command; return the exit status: 0, 1 if it failed, 2 if it was asked wrongly."""
    gc.set_threshold(20_000, 20, 50)  # with Python's 700 it takes an eighth of the start, and finds nothing
    args = build_parser().parse_args(argv)
    if build_kind() == "stale":
        print(f"thunderagent: error: {STALE}", file=sys.stderr)
        return 2
    try:
        status: int = args.run(args)
    except ThunderAgentError as error:
        print(f"thunderagent: error: {error.message}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        return 130
    return status


def build_parser() -> argparse.ArgumentParser:
    """Return the parser of all commands."""
    parser = _Parser(
        prog="thunderagent",
        description="A program-aware reverse proxy for LLM agents in front of many vLLM and SGLang replicas.",
        epilog="Try `thunderagent serve` without options: it starts simulated engines.",
    )
    parser.add_argument("--version", action="version", version=f"thunderagent {__version__} ({build_kind()})")
    commands = parser.add_subparsers(metavar="COMMAND", required=True)

    for name, help_text, add_options in (
        ("serve", "serve agent programs on engine replicas", _add_serve),
        ("scheduler", "grant leases to gateways, which carry the bytes", _add_scheduler),
        ("gateway", "carry the bytes of turns for a scheduler elsewhere", _add_gateway),
        ("picker", "pick endpoints for an Envoy that carries the bytes (experimental)", _add_picker),
        ("doctor", "find what is wrong with engines and a proxy, and say what to do", _add_doctor),
        ("engine", "run a simulated engine that speaks vLLM's dialect", _add_engine),
        (
            "simulate",
            "simulate programs, engines and a policy in virtual time",
            _options_of("simulator.commands.simulate"),
        ),
        (
            "compare",
            "compare policies in the simulator: a report with tables and plots",
            _options_of("simulator.commands.compare"),
        ),
        (
            "calibrate",
            "measure a running engine and write its timing profile",
            _options_of("calibrate.command"),
        ),
        ("status", "show replicas, programs and the queue of a running proxy", _add_status),
        ("top", "watch a running proxy: rates, memory, the largest programs", _add_top),
        ("handover", "have another scheduler of the cell lead", _add_handover),
        ("key", "make an API key for the proxy", _options_of("key_command")),
    ):
        commands.add_parser(name, help=help_text, add_options=add_options)

    replay_parser = commands.add_parser(
        "replay",
        help="decide an event log again and compare",
        description="Feed the events of a log (`serve --event-log FILE`) through a fresh scheduler and compare its "
        "decisions with those in the log. Exit status 1 at the first difference.",
    )
    replay_parser.add_argument("log", type=Path, metavar="LOG")
    replay_parser.set_defaults(run=run_replay)

    record_parser = commands.add_parser(
        "record",
        help="turn an event log into programs that can be simulated",
        description="Turn an event log (`serve --event-log FILE`) into recorded programs, one JSON object a line: "
        "token counts and times, no text. `simulate` replays them against another policy.",
    )
    record_parser.add_argument("log", type=Path, metavar="LOG")
    record_parser.add_argument("--out", type=Path, required=True, metavar="FILE", help="file to write; must be new")
    record_parser.set_defaults(run=run_record)

    nova_parser = commands.add_parser("nova", help="serve a vision-language model to agents on one device")
    nova_commands = nova_parser.add_subparsers(metavar="COMMAND", required=True)
    nova_commands.add_parser("serve", help="serve it", add_options=_add_nova)
    _add_workflow_commands(commands)
    return parser


_KEPT_LINES = argparse.RawDescriptionHelpFormatter


def _add_serve(parser: argparse.ArgumentParser) -> None:
    parser.description, parser.formatter_class = SERVE_HELP, _KEPT_LINES
    _add_serve_options(parser)
    parser.set_defaults(run=run_serve, role="serve")


def _add_scheduler(parser: argparse.ArgumentParser) -> None:
    parser.description = "Grant leases to gateways. It has all options of `serve`, its admin API and its dashboard."
    parser.add_argument("--listen", metavar="HOST:PORT", help="address to listen on, as --host and --port together")
    parser.add_argument("--end-with-stdin", action="store_true", help="end when standard input ends, as by SIGTERM")
    _add_serve_options(parser)
    parser.set_defaults(run=run_serve, role="scheduler")


def _add_gateway(parser: argparse.ArgumentParser) -> None:
    parser.description = (
        "Carry the bytes of turns, with leases from the scheduler at one of --schedulers. It takes the options of "
        "`serve`; the scheduler tells it the replicas."
    )
    parser.add_argument("--end-with-stdin", action="store_true", help="end when standard input ends, as by SIGTERM")
    _add_serve_options(parser)
    parser.set_defaults(run=run_serve, role="gateway")


def _add_picker(parser: argparse.ArgumentParser) -> None:
    from thunderagent.picker import command

    parser.description, parser.formatter_class = command.DESCRIPTION, _KEPT_LINES
    command.add_arguments(parser)
    _add_serve_options(parser)
    parser.set_defaults(run=run_serve, role="picker")


def _add_engine(parser: argparse.ArgumentParser) -> None:
    from thunderagent.simulator.embedded import options, server

    parser.description = (
        "Run a simulated engine: OpenAI-compatible, with a paged prefix cache that thrashes as a real one."
    )
    options.add_arguments(parser)
    parser.set_defaults(run=server.run)


def _options_of(module: str) -> Callable[[argparse.ArgumentParser], None]:
    """Return what adds the options of a command that a module has, as DESCRIPTION, `add_arguments` and `run`."""

    def add_options(parser: argparse.ArgumentParser) -> None:
        command = import_module(f"thunderagent.{module}")
        parser.description = command.DESCRIPTION
        if "\n" in command.DESCRIPTION:
            parser.formatter_class = _KEPT_LINES
        command.add_arguments(parser)
        parser.set_defaults(run=command.run)

    return add_options


def _add_doctor(parser: argparse.ArgumentParser) -> None:
    _options_of("doctor.command")(parser)
    parser.set_defaults(run=run_doctor)


def _add_handover(parser: argparse.ArgumentParser) -> None:
    from thunderagent.scale import handover

    handover.add_arguments(parser)


def _add_status(parser: argparse.ArgumentParser) -> None:
    from thunderagent import status

    parser.description = "Show a running proxy."
    status.add_status_arguments(parser)
    parser.set_defaults(run=status.run_status)


def _add_top(parser: argparse.ArgumentParser) -> None:
    from thunderagent import status

    parser.description = status.TOP_DESCRIPTION
    status.add_top_arguments(parser)
    parser.set_defaults(run=status.run_top)


def _add_nova(parser: argparse.ArgumentParser) -> None:
    from thunderagent.nova import config

    parser.description, parser.formatter_class = config.DESCRIPTION, _KEPT_LINES
    config.add_arguments(parser)
    parser.set_defaults(run=run_nova)


def _add_workflow_commands(commands: Any) -> None:
    workflow_parser = commands.add_parser("workflow", help="agents as futures: write stubs, watch a deployment")
    workflow_commands = workflow_parser.add_subparsers(metavar="COMMAND", required=True)
    stubs_parser = workflow_commands.add_parser(
        "stubs",
        help="write an importable module for each agent of a declaration",
        description="Write a typed, importable module for each agent that a YAML file declares, whose functions return "
        "futures. Each declaration is held against its class first.",
    )
    stubs_parser.add_argument("file", type=Path, metavar="FILE", help="the declaration")
    stubs_parser.add_argument("--out", type=Path, default=Path("stubs"), metavar="FOLDER", help="default: %(default)s")
    stubs_parser.add_argument("--no-check", action="store_true", help="do not import the classes")
    stubs_parser.set_defaults(run=run_workflow, command="run_stubs")
    top_parser = workflow_commands.add_parser(
        "top", help="show the instances and sessions of a deployment", description="Show a running deployment."
    )
    top_parser.add_argument("socket", type=Path, metavar="SOCKET", help="what `deploy(top=...)` was given")
    top_parser.add_argument("--once", action="store_true", help="show it once instead of each second until Ctrl-C")
    top_parser.set_defaults(run=run_workflow, command="run_top")


def run_serve(args: argparse.Namespace) -> int:
    """Serve until a signal: all of it, as a scheduler, or as a gateway."""
    import structlog
    import uvloop

    from thunderagent.config import ServeConfig, unknown_variables
    from thunderagent.serving.lookups import Loop
    from thunderagent.serving.serving import serve

    _read_listen(args)
    given = {name: value for name in ServeConfig.model_fields if (value := getattr(args, name, None)) is not None}
    load = partial(ServeConfig.load, args.config, **given)
    config = load()
    configure_logging(config.log_level, as_json=config.logs_json)
    for name, nearest in unknown_variables(os.environ).items():
        structlog.get_logger("thunderagent.cli").warning("unknown_setting", variable=name, nearest=nearest or None)

    def announce(url: str, policy_name: str) -> None:
        print(f"thunderagent ready at {url}: policy {policy_name}", flush=True)

    if args.role == "picker":
        from thunderagent.picker.command import Options, serve_picker

        serving = serve_picker(config, Options.of(args), ready=announce)
    elif args.role == "serve" and not config.gateways:
        serving = serve(config, ready=announce, load=load)
    else:
        from thunderagent import scaling

        if args.role == "gateway":
            serving = scaling.serve_gateway(config, ready=announce, ends_with_stdin=args.end_with_stdin)
        elif args.role == "scheduler":
            serving = scaling.serve_scheduler(config, ready=announce, ends_with_stdin=args.end_with_stdin)
        else:
            serving = scaling.serve_with_gateways(config, _options_as_given(args, given), ready=announce)
    try:
        uvloop.run(serving, loop_factory=Loop)
    except OSError as error:
        hint = "; --port gives another one" if error.errno == errno.EADDRINUSE else ""
        print(f"thunderagent: error: cannot serve on {config.host}:{config.port}: {error}{hint}", file=sys.stderr)
        return 1
    return 0


def _read_listen(args: argparse.Namespace) -> None:
    """Take the address of a scheduler apart. Raises `ConfigurationError`."""
    if getattr(args, "listen", None) is None:
        return
    host, colon, port = args.listen.rpartition(":")
    if not colon or not port.isdigit():
        raise ConfigurationError(f"listen: {args.listen!r} is not HOST:PORT")
    args.host, args.port = host.strip("[]") or "127.0.0.1", port


def _options_as_given(args: argparse.Namespace, given: Mapping[str, Any]) -> list[str]:
    """Return the options of `serve` as they were given, for another process."""
    options = [] if args.config is None else ["--config", str(args.config)]
    for name, value in given.items():
        option = "--" + LIST_FIELDS.get(name, name.replace("_", "-"))
        for each in value if isinstance(value, list) else [value]:
            options += [option, str(each)]
    return options


def run_doctor(args: argparse.Namespace) -> int:
    """Find what is wrong; a proxy of the doctor's own logs nothing of what the findings say better."""
    from thunderagent.doctor import command

    configure_logging("critical", as_json=False)
    return command.run(args)


def run_nova(args: argparse.Namespace) -> int:
    """Serve a vision-language model until a signal."""
    from thunderagent.nova.config import config_of

    config = config_of(args)
    try:
        from thunderagent.nova import command  # and torch with it
    except ModuleNotFoundError as error:
        raise ConfigurationError(f"nova needs the extra nova, pip install 'thunderagent[nova]': {error}") from error
    configure_logging("info", as_json=False)
    return command.run(config)


def run_workflow(args: argparse.Namespace) -> int:
    """Write stubs, or show a running deployment."""
    try:
        from thunderagent.workflows import command
    except ModuleNotFoundError as error:
        raise ConfigurationError(
            f"workflows need the extra workflows, pip install 'thunderagent[workflows]': {error}"
        ) from error
    run: Callable[[argparse.Namespace], int] = getattr(command, args.command)
    return run(args)


def run_replay(args: argparse.Namespace) -> int:
    """Replay a log and say what came out."""
    from thunderagent.runtime.event_log import replay

    try:
        with args.log.open("rb") as lines:
            report = replay(lines)
    except OSError as error:
        print(f"thunderagent: error: cannot read {args.log}: {error.strerror}", file=sys.stderr)
        return 2
    print(f"policy {report.policy}: {report.events_count} events, {report.decisions_count} decisions")
    print(report.goodput.words)
    if report.difference is None:
        print("every decision is the same")
        return 0
    print(f"decided otherwise at {report.difference}")
    return 1


def run_record(args: argparse.Namespace) -> int:
    """Record the programs of a log and say what was left out."""
    from thunderagent.runtime.event_log import read_events
    from thunderagent.simulator.workloads.record import record

    try:
        with args.log.open("rb") as lines:
            recording = record(read_events(lines))
        with args.out.open("xb") as out:
            out.writelines(recording.lines())
    except OSError as error:
        print(f"thunderagent: error: {error.filename}: {error.strerror}", file=sys.stderr)
        return 2
    print(f"{args.out}: {recording}")
    return 0


def configure_logging(level: str, *, as_json: bool) -> None:
    """Send structlog's events to standard error, one line each; JSON by the fastest way that structlog has."""
    import structlog

    from thunderagent.log_lines import LineLogger, json_line

    factory: Any
    min_level = logging.getLevelNamesMapping()[level.upper()]
    if as_json:
        processors: list[Any] = [json_line]
        lines = LineLogger(sys.stderr.buffer, wants_info=min_level <= logging.INFO)
        factory = lambda *_: lines  # noqa: E731 - one for all loggers: their lines keep their order
    else:
        processors = [
            structlog.processors.add_log_level,
            structlog.processors.TimeStamper(fmt="iso", utc=True),
            structlog.dev.ConsoleRenderer(
                colors=sys.stderr.isatty(),
                exception_formatter=structlog.dev.plain_traceback,  # the default shows variables, so keys, too
            ),
        ]
        factory = structlog.WriteLoggerFactory(file=sys.stderr)
    structlog.configure(
        processors=processors,
        wrapper_class=structlog.make_filtering_bound_logger(min_level),
        logger_factory=factory,
        cache_logger_on_first_use=True,
    )


def _add_serve_options(parser: argparse.ArgumentParser) -> None:
    """Add an option for every field of the configuration, with its description, default and environment name."""
    from thunderagent.config import ENVIRONMENT_PREFIX, ServeConfig

    parser.add_argument("--config", type=Path, metavar="FILE", help="TOML file with the names below, - written as _")
    for options in ServeConfig.slices():
        group = parser.add_argument_group(options.heading())
        for name, field in options.model_fields.items():
            if name not in FILE_FIELDS:
                _add_option(group, name, field, ENVIRONMENT_PREFIX)


def _add_option(group: Any, name: str, field: Any, environment_prefix: str) -> None:
    option = LIST_FIELDS.get(name, name.replace("_", "-"))
    help_text = f"{field.description}"
    if field.default not in (None, (), {}, ""):
        help_text += f" (default: {field.default})"
    help_text = f"{help_text} [{environment_prefix}{name.upper()}]".replace("%", "%%")
    if name in LIST_FIELDS:
        group.add_argument(f"--{option}", dest=name, action="append", metavar="NAME=VALUE", help=help_text)
    elif get_origin(field.annotation) is Literal:
        choices = [choice for choice in get_args(field.annotation) if choice]
        group.add_argument(f"--{option}", dest=name, choices=choices, help=help_text)
    else:
        metavar = "X" if name.endswith(("_per_s", "_ratio")) else _metavar(field.annotation)
        group.add_argument(f"--{option}", dest=name, metavar=metavar, help=help_text)


def _metavar(annotation: Any) -> str:
    kinds = get_args(annotation) if isinstance(annotation, UnionType) else (annotation,)
    for kind, metavar in ((bool, "true|false"), (int, "N"), (float, "SECONDS"), (Path, "FILE")):
        if kind in kinds:
            return metavar
    return "A,B" if get_origin(annotation) is tuple else "TEXT"
