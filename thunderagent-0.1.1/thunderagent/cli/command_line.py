"""The command line.

`thunderagent serve | scheduler | gateway | picker | doctor | engine | simulate | compare | calibrate | status | top |
`thunderagent handover | key | replay | record | completion`, and what other packages bring: `nova`, `workflow`.

A command's modules are imported when it is asked for: an engine starts in a third of the time that all of them take.
"""

# ruff: noqa: PLC0415 - see above

from __future__ import annotations

import argparse
import gc
import sys
from collections.abc import Callable, Sequence
from functools import partial
from importlib import import_module
from typing import TYPE_CHECKING, Any, NoReturn

from thunderagent import __version__
from thunderagent.cli import logs, serve
from thunderagent.cli.log_output import configure_logging
from thunderagent.compilation import STALE, build_kind
from thunderagent.errors import ThunderAgentError
from thunderagent.faults import nearest_hint

if TYPE_CHECKING:
    from importlib.metadata import EntryPoint

COMMANDS = "thunderagent.commands"
"""The entry points of packages that bring a command: its name, and a function that adds its options to its parser."""

_PACKAGED = {"nova": "thunderagent-nova", "workflow": "thunderagent-workflows"}
"""Commands of packages that belong to this project, with the package that brings each."""


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
            if package := action.metavar == "COMMAND" and _PACKAGED.get(value):
                error.message = f"{value}: install the package `{package}`"
            else:
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
    line = sys.argv[1:] if argv is None else argv
    args = build_parser(line).parse_args(line)
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


def build_parser(line: Sequence[str] = ()) -> argparse.ArgumentParser:
    """Return the parser of all commands; if `line` begins with one of ours, of ours alone.

    Cost: those of other packages are looked up in all that is installed, which takes as long as half of our imports.
    """
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

    if not line or line[0] not in commands.choices:
        _add_packages(commands)
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


def _add_packages(commands: Any) -> None:
    """Add the commands of other packages, each with its package's one line."""
    from importlib.metadata import entry_points

    for point in sorted(entry_points(group=COMMANDS), key=lambda each: each.name):
        if point.name not in commands.choices:  # ours stay
            line = (point.dist.metadata["Summary"] if point.dist else "") or point.value
            commands.add_parser(point.name, help=line[:1].lower() + line[1:], add_options=partial(_load_options, point))


def _load_options(point: EntryPoint, parser: argparse.ArgumentParser) -> None:
    try:
        add_options = point.load()
    except ImportError as error:
        parser.exit(2, f"thunderagent: error: {point.name}: its package cannot be imported: {error}\n")
    add_options(parser)


def run_doctor(args: argparse.Namespace) -> int:
    """Find what is wrong; a proxy of the doctor's own logs nothing of what the findings say better."""
    from thunderagent.doctor import command

    configure_logging("critical", as_json=False)
    return command.run(args)
