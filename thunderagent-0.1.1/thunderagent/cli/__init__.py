"""The command line: a file for each command, or for similar ones."""

from thunderagent.cli.command_line import build_parser, main

__all__ = ["build_parser", "main"]
