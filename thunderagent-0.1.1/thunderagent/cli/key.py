"""`thunderagent key`: make an API key, for a line of the configuration or into a file of keys."""

from __future__ import annotations

import argparse
from pathlib import Path

from pydantic import ValidationError

from thunderagent.errors import ConfigurationError
from thunderagent.faults import faults_of
from thunderagent.proxy.gate.keys import mint_key
from thunderagent.proxy.gate.keys.file import KeyLimitsEntry, add_key, expires_of

DESCRIPTION = (
    "Make an API key: print it, once, and the line of the configuration that lets it in. "
    "With --keys-file it is put there instead, and may expire and have limits."
)
LIMITS = {
    "turns_per_min": "turns that it may begin in a minute; more wait",
    "tokens_per_min": "tokens of prompts and answers in a minute; turns wait past that",
    "programs_count": "programs that it may have at a time; more get 429",
    "held_turns_count": "turns of it that may wait for a lease; more get 429",
    "program_max_turns": "turns of each of its programs; further ones get 410",
    "program_max_tokens": "tokens of prompts and answers of each of its programs; then 410",
    "program_max_age_s": "age of each of its programs, in seconds; then 410",
    "program_deadline_s": "deadline of each of its programs, in seconds after its first turn",
}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options."""
    parser.add_argument("name", metavar="NAME", help="name of its owner: letters, digits and . _ - @")
    parser.add_argument("--admin", action="store_true", help="allow the admin API, too, not only data")
    parser.add_argument(
        "--keys-file", type=Path, metavar="FILE", help="add it to this file of keys (`serve --keys-file`), with:"
    )
    parser.add_argument("--expires", default="", metavar="WHEN", help="30d, 12h, or 2027-01-01T00:00:00Z")
    for name, what in LIMITS.items():
        parser.add_argument(f"--{name.replace('_', '-')}", type=float, metavar="N", help=what)


def run(args: argparse.Namespace) -> int:
    """Make a key and print it, once; return the exit status. Raises `ConfigurationError`."""
    given = {name: getattr(args, name) for name in LIMITS}
    if args.keys_file is None:
        if args.expires or any(limit is not None for limit in given.values()):
            raise ConfigurationError("expiry and limits need --keys-file: a key in the configuration cannot have them")
        key, line = mint_key(args.name)
        print(f"key (shown only now):  {key}")
        print(f'in the configuration:  {"admin_keys" if args.admin else "api_keys"} = ["{line}"]')
        return 0
    try:
        limits = KeyLimitsEntry.model_validate(given)
    except ValidationError as error:
        raise ConfigurationError("; ".join(faults_of(error))) from error
    expires = expires_of(args.expires) if args.expires else None
    key = add_key(args.keys_file, args.name, admin=args.admin, expires=expires, limits=limits)
    print(f"key (shown only now):  {key}")
    print(f"added to:              {args.keys_file}")
    return 0
