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


def add_serve(parser: argparse.ArgumentParser) -> None:
    """Add what `serve` takes."""
    parser.description, parser.formatter_class = SERVE_HELP, argparse.RawDescriptionHelpFormatter
    _add_serve_options(parser)
    parser.set_defaults(run=run_serve, role="serve")


def add_scheduler(parser: argparse.ArgumentParser) -> None:
    """Add what `scheduler` takes."""
    parser.description = "Grant leases to gateways. It has all options of `serve`, its admin API and its dashboard."
    parser.add_argument("--listen", metavar="HOST:PORT", help="address to listen on, as --host and --port together")
    parser.add_argument("--end-with-stdin", action="store_true", help="end when standard input ends, as by SIGTERM")
    _add_serve_options(parser)
    parser.set_defaults(run=run_serve, role="scheduler")


def add_gateway(parser: argparse.ArgumentParser) -> None:
    """Add what `gateway` takes."""
    parser.description = (
        "Carry the bytes of turns, with leases from the scheduler at one of --schedulers. It takes the options of "
        "`serve`; the scheduler tells it the replicas."
    )
    parser.add_argument("--end-with-stdin", action="store_true", help="end when standard input ends, as by SIGTERM")
    _add_serve_options(parser)
    parser.set_defaults(run=run_serve, role="gateway")


def add_picker(parser: argparse.ArgumentParser) -> None:
    """Add what `picker` takes."""
    from thunderagent.picker import command

    parser.description, parser.formatter_class = command.DESCRIPTION, argparse.RawDescriptionHelpFormatter
    command.add_arguments(parser)
    _add_serve_options(parser)
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

    def announce(url: str, policy_name: str) -> None:
        print(f"thunderagent ready at {url}: policy {policy_name}", flush=True)

    if args.role == "picker":
        from thunderagent.picker.command import Options, serve_picker

        serving = serve_picker(config, Options.of(args), ready=announce)
    elif args.role == "serve" and not config.gateways:
        serving = serve(config, ready=announce, load=load)
    else:
        from thunderagent import one_machine, scaling

        if args.role == "gateway":
            serving = scaling.serve_gateway(config, ready=announce, ends_with_stdin=args.end_with_stdin)
        elif args.role == "scheduler":
            serving = scaling.serve_scheduler(config, ready=announce, ends_with_stdin=args.end_with_stdin)
        else:
            serving = one_machine.serve_with_gateways(config, _options_as_given(args, given), ready=announce)
    try:
        uvloop.run(serving, loop_factory=Loop)
    except OSError as error:
        hint = "; --port gives another one" if error.errno == errno.EADDRINUSE else ""
        print(f"thunderagent: error: cannot serve on {config.host}:{config.port}: {error}{hint}", file=sys.stderr)
        return 1
    return 0


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
