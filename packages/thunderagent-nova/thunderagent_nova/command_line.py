"""`thunderagent nova serve | sample`. What needs torch is imported when it runs."""

# ruff: noqa: PLC0415 - see above

from __future__ import annotations

import argparse
from pathlib import Path

from thunderagent.cli.log_output import configure_logging
from thunderagent.errors import ConfigurationError
from thunderagent_nova import config


def add_commands(parser: argparse.ArgumentParser) -> None:
    """Add both to the parser of `thunderagent nova`."""
    commands = parser.add_subparsers(metavar="COMMAND", required=True)
    serve = commands.add_parser(
        "serve",
        help="serve it",
        description=config.DESCRIPTION,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    config.add_arguments(serve)
    serve.set_defaults(run=run_serve)
    sample = commands.add_parser(
        "sample",
        help="write a small random model to try it with",
        description="Write a small random model of the family of Qwen2.5-VL, 4 MB, for `nova serve`. What it says "
        "means nothing.",
    )
    sample.add_argument("folder", type=Path, metavar="FOLDER", help="where to; it is made if it is not there")
    sample.set_defaults(run=run_sample)


def run_serve(args: argparse.Namespace) -> int:
    """Serve a vision-language model until a signal."""
    given = config.config_of(args)
    try:
        from thunderagent_nova import command
    except ModuleNotFoundError as error:
        raise _incomplete(error) from error
    configure_logging("info", as_json=False)
    return command.run(given)


def run_sample(args: argparse.Namespace) -> int:
    """Write a small random model to a folder."""
    try:
        from thunderagent_nova import sample
    except ModuleNotFoundError as error:
        raise _incomplete(error) from error
    sample.write(args.folder)
    return 0


def _incomplete(error: ModuleNotFoundError) -> ConfigurationError:
    return ConfigurationError(f"nova: install the package `thunderagent-nova` with all that it needs: {error}")
