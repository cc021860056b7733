"""`thunderagent serve`, `scheduler`, `gateway` and `picker`: options of the configuration, and what serves by it."""

# ruff: noqa: PLC0415 - imported when it is asked for, as all commands are

from __future__ import annotations

import argparse
import errno
import os
import sys
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from types import UnionType
from typing import Any, Literal, get_args, get_origin

from thunderagent.cli.log_output import configure_logging
from thunderagent.errors import ConfigurationError
from thunderagent.faults import nearest_hint

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
"""Fields given one item at a time, by an option of another name."""

TRUTH = "true|false"
"""What an option takes that may also stand alone; then it is true."""

ROLES = ("serve", "scheduler", "gateway", "picker")
"""Commands that read the configuration."""

FIRST = {
    "config": "TOML file with all of these names, - written as _",
    "listen": "address to listen on, as --host and --port together",
    "backends": "base URLs of replicas, with commas between",
    "backends_file": "file that names replicas, read again when it changes",
    "schedulers": "base URLs of its schedulers, with commas between",
    "scheduler_key": "admin key that it sends to its scheduler",
    "store": "redis://HOST:PORT/DATABASE, so that others stand by",
    "host": "address to listen on",
    "port": "port to listen on",
    "policy": "who may hold memory, and where turns run",
    "policy_args": "a setting of the policy",
    "gateways": "processes that carry the bytes of turns",
    "api_keys": "keys for data, as NAME:sha256:HEX, with commas between",
    "keys_file": "API keys, with limits; `thunderagent key` makes one",
    "state": "file that keeps what is learned over a restart",
    "event_log": "file for every event, for `thunderagent replay`",
    "log_level": "least level that is logged",
}
"""What --help shows, in a line each; everything else is in its sections."""

OF_GATEWAYS = "for a gateway:"
"""Beginning of a description of a setting that only a gateway reads."""

_CARRIES = frozenset({"Listening", "Processes", "Timeouts", "Names", "Limits", "Security", "Logs"})
"""Slices that a gateway reads, and of the others these fields."""
_CARRIES_FIELDS = frozenset(
    {
        *("backend_api_key", "backend_api_key_file", "backend_ca_file", "model_aliases", "engine_tags", "kv_events"),
        *("engine_plugin", "engine_hold_s"),
        *("notice_timeout_s", "policy", "policy_args", "patience_s", "client_patience", "heartbeat_s"),
        "no_replica_limit_s",
    }
)


def add_serve(parser: argparse.ArgumentParser) -> None:
    """Add what `serve` takes."""
    parser.description, parser.formatter_class = SERVE_HELP, argparse.RawDescriptionHelpFormatter
    _add_serve_options(parser, "serve")
    parser.set_defaults(run=run_serve, role="serve")


def add_scheduler(parser: argparse.ArgumentParser) -> None:
    """Add what `scheduler` takes."""
    parser.description = "Grant leases to gateways. It has the admin API and the dashboard of `serve`."
    parser.add_argument("--listen", metavar="HOST:PORT", help="address to listen on, as --host and --port together")
    parser.add_argument("--end-with-stdin", action="store_true", help="end when standard input ends, as by SIGTERM")
    _add_serve_options(parser, "scheduler")
    parser.set_defaults(run=run_serve, role="scheduler")


def add_gateway(parser: argparse.ArgumentParser) -> None:
    """Add what `gateway` takes."""
    parser.description = (
        "Carry the bytes of turns, with leases from the scheduler at one of --schedulers, which tells it the replicas."
    )
    parser.add_argument("--end-with-stdin", action="store_true", help="end when standard input ends, as by SIGTERM")
    _add_serve_options(parser, "gateway")
    parser.set_defaults(run=run_serve, role="gateway")


def add_picker(parser: argparse.ArgumentParser) -> None:
    """Add what `picker` takes."""
    from thunderagent.picker import command

    parser.description, parser.formatter_class = command.DESCRIPTION, argparse.RawDescriptionHelpFormatter
    command.add_arguments(parser)
    _add_serve_options(parser, "picker")
    parser.set_defaults(run=run_serve, role="picker")


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

    announcer = _OnStandardOutput()
    if args.role == "picker":
        from thunderagent.picker.command import Options, serve_picker

        serving = serve_picker(config, Options.of(args), announcer=announcer)
    elif args.role == "serve" and not config.gateways:
        serving = serve(config, announcer=announcer, load=load)
    else:
        from thunderagent import one_machine, scaling

        if args.role == "gateway":
            serving = scaling.serve_gateway(config, announcer=announcer, ends_with_stdin=args.end_with_stdin)
        elif args.role == "scheduler":
            serving = scaling.serve_scheduler(config, announcer=announcer, ends_with_stdin=args.end_with_stdin)
        else:
            serving = one_machine.serve_with_gateways(config, _options_as_given(args, given), announcer=announcer)
    try:
        uvloop.run(serving, loop_factory=Loop)
    except OSError as error:
        hint = "; --port gives another one" if error.errno == errno.EADDRINUSE else ""
        print(f"thunderagent: error: cannot serve on {config.host}:{config.port}: {error}{hint}", file=sys.stderr)
        return 1
    return 0


class _OnStandardOutput:
    """Tells in a line whether a process serves."""

    def ready(self, url: str, what: str) -> None:
        """Say that it does."""
        _say(f"thunderagent ready at {url}: {what}")

    def not_ready(self, url: str, what: str, why: str) -> None:
        """Say why it does not yet."""
        _say(f"thunderagent not yet ready at {url}: {what}; {why}: see `thunderagent doctor`")


def _say(line: str) -> None:
    """Print a line. Serving goes on if standard output takes none, such as a file on a full disk."""
    import structlog

    try:
        print(line, flush=True)
    except OSError as error:
        structlog.get_logger("thunderagent.cli").warning("stdout_not_written", why=error.strerror or str(error))
        nowhere = os.open(os.devnull, os.O_WRONLY)
        os.dup2(nowhere, sys.stdout.fileno())  # otherwise Python would write the line again at its end, and fail
        os.close(nowhere)


def _read_listen(args: argparse.Namespace) -> None:
    """Split the address of a scheduler. Raises `ConfigurationError`."""
    if getattr(args, "listen", None) is None:
        return
    host, colon, port = args.listen.rpartition(":")
    if not colon or not port.isdigit():
        raise ConfigurationError(f"listen: {args.listen!r} is not HOST:PORT")
    args.host, args.port = host.strip("[]") or "127.0.0.1", port


def _options_as_given(args: argparse.Namespace, given: Mapping[str, Any]) -> list[str]:
    """Return the given options of `serve`, for another process."""
    options = [] if args.config is None else [f"--config={args.config}"]
    for name, value in given.items():
        option = "--" + LIST_FIELDS.get(name, name.replace("_", "-"))
        values = value if isinstance(value, list) else [value]
        options += [f"{option}={each}" for each in values]  # in one word: a value may begin with -
    return options


def applies(name: str, role: str) -> bool:
    """Return whether a command reads a field: `serve`, `scheduler`, `gateway` or `picker`.

    All of them accept all fields, because processes of one cell may share a configuration.
    """
    from thunderagent.config import ServeConfig

    description = ServeConfig.model_fields[name].description or ""
    needs_store = description.startswith(("for a scheduler", "for elector"))
    if role == "serve":
        return (not needs_store and name not in ("schedulers", "scheduler_key")) or name == "gateway_lost_s"
    if role == "picker":
        return not needs_store and name != "gateways"
    from thunderagent.scaling import NOT_WITH_GATEWAYS  # others need not wait for this import

    if name == "gateways" or name in NOT_WITH_GATEWAYS:
        return False
    (of_slice,) = [each.__name__ for each in ServeConfig.slices() if name in each.model_fields]
    if role == "scheduler":
        return not description.startswith(OF_GATEWAYS) and of_slice not in ("Judging", "Sandboxes")
    return not needs_store and (of_slice in _CARRIES or name in _CARRIES_FIELDS)


def _add_serve_options(parser: argparse.ArgumentParser, role: str) -> None:
    """Add an option for every field of the configuration, with its description, default and environment name.

    The help lists those that apply to the command, and at first only a screen of them.
    """
    from thunderagent.config import ENVIRONMENT_PREFIX, ServeConfig

    parser.add_argument("--config", type=Path, metavar="FILE", help="TOML file with the names below, - written as _")
    for options in ServeConfig.slices():
        group = parser.add_argument_group(options.heading())
        for name, field in options.model_fields.items():
            if name not in FILE_FIELDS:
                _add_option(group, name, field, ENVIRONMENT_PREFIX, is_listed=applies(name, role))
    parser.add_argument("-h", "--help", action=_Help, nargs="?", metavar="SECTION", help="show this, or a section")
    parser.add_argument("--help-all", action=_Help, nargs=0, dest="help", help="show all sections")


class _Help(argparse.Action):
    """Shows the first options, a section, what has a word in its name, or all."""

    def __init__(self, **more: Any) -> None:
        super().__init__(**{**more, "dest": argparse.SUPPRESS, "default": argparse.SUPPRESS})

    def __call__(
        self,
        parser: argparse.ArgumentParser,
        namespace: argparse.Namespace,  # noqa: ARG002 - argparse's signature
        values: Any,
        option_string: str | None = None,
    ) -> None:
        """Print help, and exit."""
        if option_string == "--help-all":
            print(parser.format_help(), end="")
        elif values:
            print(_help_on(parser, values), end="")
        else:
            print(_first_help(parser), end="")
        parser.exit()


def _listed(parser: argparse.ArgumentParser) -> dict[str, list[argparse.Action]]:
    """Return the options that the help lists, by section: the word of its slice."""
    from thunderagent.config import ServeConfig

    by_name = {each.dest: each for each in parser._actions if each.help is not argparse.SUPPRESS}  # noqa: SLF001
    sections = {
        each.__name__.lower(): [by_name[name] for name in each.model_fields if name in by_name]
        for each in ServeConfig.slices()
    }
    return {name: actions for name, actions in sections.items() if actions}


def _first_help(parser: argparse.ArgumentParser) -> str:
    """Return a screen: the first options in a line each, and the sections."""
    from thunderagent.config import ServeConfig

    listed = _listed(parser)
    in_sections = {each.dest: each for actions in listed.values() for each in actions}
    own = {
        each.dest: each
        for each in parser._actions  # noqa: SLF001 - argparse has no other way to its options
        if each.dest not in ServeConfig.model_fields
        and each.help is not argparse.SUPPRESS
        and not isinstance(each, _Help)
    }
    rows = [
        (_with_metavar(each), FIRST.get(name) or str(each.help))
        for name, each in (own | {name: in_sections[name] for name in FIRST if name in in_sections}).items()
    ]
    rows += [
        ("--help SECTION|WORD", "options of a section, or with this in their names"),
        ("--help-all", "all options"),
    ]
    headings = {each.__name__.lower(): each.heading() for each in ServeConfig.slices()}
    sections = [(name, f"{headings[name]}: {len(actions)} options") for name, actions in listed.items()]
    text = f"usage: {parser.prog} [OPTIONS]\n\n{(parser.description or '').strip()}\n"
    for title, lines in (("options", rows), ("sections", sections)):
        width = max(len(name) for name, _ in lines)
        text += f"\n{title}:\n" + "".join(f"  {name:<{width}}  {what}\n" for name, what in lines)
    return text


def _with_metavar(action: argparse.Action) -> str:
    values = "|".join(map(str, action.choices)) if action.choices else action.metavar or ""
    return f"{action.option_strings[0]} {values}".strip()


def _help_on(parser: argparse.ArgumentParser, word: str) -> str:
    """Return a section, or the options with a word in their names. Errors end as for a wrong option."""
    from thunderagent.config import ServeConfig

    listed, wanted = _listed(parser), word.lstrip("-").lower()
    sections = (
        {wanted: listed[wanted]}
        if wanted in listed
        else {
            name: found
            for name, actions in listed.items()
            if (found := [each for each in actions if wanted.replace("-", "_") in each.dest])
        }
    )
    if not sections:
        known = [*listed, *(each.dest for actions in listed.values() for each in actions)]
        parser.error(f"no section and no option {word!r}{nearest_hint(wanted.replace('-', '_'), known)}")
    headings = {each.__name__.lower(): each.heading() for each in ServeConfig.slices()}
    formatter = parser._get_formatter()  # noqa: SLF001 - as argparse's own format_help
    for name, actions in sections.items():
        formatter.start_section(headings[name])
        formatter.add_arguments(actions)
        formatter.end_section()
    return formatter.format_help()


def _add_option(group: Any, name: str, field: Any, environment_prefix: str, *, is_listed: bool) -> None:
    option = LIST_FIELDS.get(name, name.replace("_", "-"))
    help_text = f"{field.description}"
    if field.default not in (None, (), {}, ""):
        help_text += f" (default: {field.default})"
    help_text = f"{help_text} [{environment_prefix}{name.upper()}]".replace("%", "%%")
    if not is_listed:
        help_text = argparse.SUPPRESS
    if name in LIST_FIELDS:
        group.add_argument(f"--{option}", dest=name, action="append", metavar="NAME=VALUE", help=help_text)
    elif get_origin(field.annotation) is Literal:
        choices = [choice for choice in get_args(field.annotation) if choice]
        group.add_argument(f"--{option}", dest=name, choices=choices, help=help_text)
    elif _metavar(field.annotation) == TRUTH:
        group.add_argument(f"--{option}", dest=name, nargs="?", const="true", metavar=TRUTH, help=help_text)
    else:
        metavar = "X" if name.endswith(("_per_s", "_ratio")) else _metavar(field.annotation)
        group.add_argument(f"--{option}", dest=name, metavar=metavar, help=help_text)


def _metavar(annotation: Any) -> str:
    kinds = get_args(annotation) if isinstance(annotation, UnionType) else (annotation,)
    for kind, metavar in ((bool, TRUTH), (int, "N"), (float, "SECONDS"), (Path, "FILE")):
        if kind in kinds:
            return metavar
    return "A,B" if get_origin(annotation) is tuple else "TEXT"
