"""The command line.

`thunderagent serve | scheduler | gateway | picker | doctor | engine | simulate | compare | calibrate | status | top |
`thunderagent handover | key | replay | record | completion | nova serve | workflow`.

A command's modules are imported when it is asked for: an engine starts in a third of the time that all of them take.
"""

# ruff: noqa: PLC0415 - see above

from __future__ import annotations

import argparse
import gc
import sys
from collections.abc import Callable, Sequence
from importlib import import_module
from pathlib import Path
from typing import Any, NoReturn

from thunderagent import __version__
from thunderagent.cli import logs, serve
from thunderagent.cli.log_output import configure_logging
from thunderagent.compilation import STALE, build_kind
from thunderagent.errors import ConfigurationError, ThunderAgentError
from thunderagent.faults import nearest_hint


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
        """Parse, with all options. What is left over is refused here: a parser above does not know these options."""
        self._complete()
        parsed, left_over = super().parse_known_args(args, namespace)
        if left_over:
            hint = nearest_hint(left_over[0].partition("=")[0], self._option_string_actions)
            if not left_over[0].startswith("-") and "--url" in self._option_string_actions:
                hint = f"; did you mean --url {left_over[0]}?"
            self.error(f"unrecognized arguments: {' '.join(left_over)}{hint}")
        return parsed, left_over

    def _check_value(self, action: argparse.Action, value: Any) -> None:
        try:
            super()._check_value(action, value)
        except argparse.ArgumentError as error:
            error.message += nearest_hint(str(value), map(str, action.choices or ()))
            raise

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
        ("serve", "serve agent programs on engine replicas", serve.add_serve),
        ("scheduler", "grant leases to gateways, which carry the bytes", serve.add_scheduler),
        ("gateway", "carry the bytes of turns for a scheduler elsewhere", serve.add_gateway),
        ("picker", "pick endpoints for an Envoy that carries the bytes (experimental)", serve.add_picker),
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
        ("handover", "have another scheduler of the cell lead", _options_of("cli.handover")),
        ("key", "make an API key for the proxy", _options_of("cli.key")),
        ("replay", "decide an event log again and compare", logs.add_replay),
        ("record", "turn an event log into programs that can be simulated", logs.add_record),
        ("completion", "print what lets a shell complete commands and options", _add_completion),
    ):
        has_sections = name in serve.ROLES  # these have a help of their own
        commands.add_parser(name, help=help_text, add_options=add_options, add_help=not has_sections)

    nova_parser = commands.add_parser("nova", help="serve a vision-language model to agents on one device")
    nova_commands = nova_parser.add_subparsers(metavar="COMMAND", required=True)
    nova_commands.add_parser("serve", help="serve it", add_options=_add_nova)
    nova_commands.add_parser("sample", help="write a small random model to try it with", add_options=_add_nova_sample)
    _add_workflow_commands(commands)
    return parser


_KEPT_LINES = argparse.RawDescriptionHelpFormatter


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


def _add_status(parser: argparse.ArgumentParser) -> None:
    from thunderagent.cli import status

    parser.description = "Show a running proxy."
    status.add_status_arguments(parser)
    parser.set_defaults(run=status.run_status)


def _add_top(parser: argparse.ArgumentParser) -> None:
    from thunderagent.cli import status

    parser.description = status.TOP_DESCRIPTION
    status.add_top_arguments(parser)
    parser.set_defaults(run=status.run_top)


def _add_completion(parser: argparse.ArgumentParser) -> None:
    from thunderagent.cli import completion

    parser.description, parser.formatter_class = completion.DESCRIPTION, _KEPT_LINES
    completion.add_arguments(parser)
    parser.set_defaults(run=lambda args: completion.run(args, build_parser()))


def _add_nova(parser: argparse.ArgumentParser) -> None:
    from thunderagent.nova import config

    parser.description, parser.formatter_class = config.DESCRIPTION, _KEPT_LINES
    config.add_arguments(parser)
    parser.set_defaults(run=run_nova)


def _add_nova_sample(parser: argparse.ArgumentParser) -> None:
    parser.description = (
        "Write a small random model of the family of Qwen2.5-VL, 4 MB, for `nova serve`. What it says means nothing."
    )
    parser.add_argument("folder", type=Path, metavar="FOLDER", help="where to; it is made if it is not there")
    parser.set_defaults(run=run_nova_sample)


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
        raise ConfigurationError(f"nova: install thunderagent with the extra `nova`: {error}") from error
    configure_logging("info", as_json=False)
    return command.run(config)


def run_nova_sample(args: argparse.Namespace) -> int:
    """Write a small random model to a folder."""
    try:
        from thunderagent.nova import sample
    except ModuleNotFoundError as error:
        raise ConfigurationError(f"nova: install thunderagent with the extra `nova`: {error}") from error
    sample.write(args.folder)
    return 0


def run_workflow(args: argparse.Namespace) -> int:
    """Write stubs, or show a running deployment."""
    try:
        from thunderagent.workflows import command
    except ModuleNotFoundError as error:
        raise ConfigurationError(f"workflows: install thunderagent with the extra `workflows`: {error}") from error
    run: Callable[[argparse.Namespace], int] = getattr(command, args.command)
    return run(args)
