"""`thunderagent handover`: have the scheduler that leads give its place to one that stands by."""

from __future__ import annotations

import argparse
import os
import sys
import time
from pathlib import Path

import httpx2

from thunderagent.cli.status import KEY_VARIABLE, TIMEOUT_S, Asked, asked, json_of, of_a_proxy
from thunderagent.doctor.asking import trusted
from thunderagent.log_lines import escaped

DESCRIPTION = (
    "Have the scheduler that leads write the last, and leave its place to one that stands by; wait until that one "
    "leads. Streams go on, and held turns stay held. The old one stands by then."
)
SHOWN_BYTES = 2_000
"""Of an error."""
LOOK_S = 0.02
LIMIT_S = 30.0


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options."""
    parser.add_argument(
        "--url", default="http://127.0.0.1:8300", help="URL of a gateway, or of the scheduler that leads"
    )
    parser.add_argument("--force", action="store_true", help="even if no other scheduler stands by")
    parser.add_argument("--key", default=os.environ.get(KEY_VARIABLE, ""), help=f"an admin key [{KEY_VARIABLE}]")
    parser.add_argument("--ca-file", type=Path, metavar="FILE", help="certificates to trust for an https URL, PEM")


def run(args: argparse.Namespace) -> int:
    """Hand over; return the exit status. Raises `ConfigurationError`."""
    verify = trusted(args.ca_file) or True
    headers = {"Authorization": f"Bearer {args.key}"} if args.key else {}
    try:
        with httpx2.Client(
            base_url=args.url, timeout=TIMEOUT_S, trust_env=False, verify=verify, headers=headers
        ) as client:
            begun_s = time.monotonic()
            answer = asked(client, "POST", "/internal/handover", {"force": "1"} if args.force else {})
            if answer.head.status_code != httpx2.codes.OK:
                said = escaped(answer.body[:SHOWN_BYTES].decode(errors="replace"))
                print(f"thunderagent: error: {args.url} answers {answer.head.status_code}: {said}", file=sys.stderr)
                return 1
            before = _number(answer, "gave_up_epoch")
            while time.monotonic() - begun_s < LIMIT_S:
                if (epoch := _epoch(client)) > before:
                    print(f"epoch {epoch} began, {time.monotonic() - begun_s:.2f} s after it was asked for")
                    return 0
                time.sleep(LOOK_S)
    except (httpx2.HTTPError, httpx2.InvalidURL, OSError) as error:
        print(f"thunderagent: error: no scheduler answers at {args.url}: {error}", file=sys.stderr)
        return 1
    print(f"thunderagent: error: none leads {LIMIT_S:g} s after epoch {before} was given up", file=sys.stderr)
    return 1


def _epoch(client: httpx2.Client) -> int:
    """Return the known epoch; 0 while nobody answers: it may just begin to stand by."""
    try:
        answer = asked(client, "GET", "/internal/leader")
    except httpx2.TransportError:
        return 0
    return _number(answer, "epoch") if answer.head.status_code == httpx2.codes.OK else 0


@of_a_proxy()
def _number(answer: Asked, name: str) -> int:
    """Return a number of an answer. Raises `httpx2.DecodingError`."""
    return int(json_of(answer.body)[name])
