"""`thunderagent handover`: have the scheduler that leads give its place to one that stands by."""

from __future__ import annotations

import argparse
import sys
import time

import httpx2

from thunderagent.cli.status import TIMEOUT_S, Asked, asked, json_of, of_a_proxy
from thunderagent.doctor.asking import add_proxy_arguments, proxy_url, refusal, trusted
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
    add_proxy_arguments(parser)
    parser.add_argument("--force", action="store_true", help="even if no other scheduler stands by")


def run(args: argparse.Namespace) -> int:
    """Hand over; return the exit status. Raises `ConfigurationError`."""
    url, verify = proxy_url(args.url), trusted(args.ca_file) or True
    headers = {"Authorization": f"Bearer {args.key}"} if args.key else {}
    try:
        with httpx2.Client(base_url=url, timeout=TIMEOUT_S, trust_env=False, verify=verify, headers=headers) as client:
            begun_s = time.monotonic()
            answer = asked(client, "POST", "/internal/handover", {"force": "1"} if args.force else {})
            if answer.head.status_code != httpx2.codes.OK:
                print(f"thunderagent: error: {_refusal(url, answer, has_key=bool(args.key))}", file=sys.stderr)
                return 1
            before = _number(answer, "gave_up_epoch")
            while time.monotonic() - begun_s < LIMIT_S:
                if (epoch := _epoch(client)) > before:
                    print(f"epoch {epoch} began, {time.monotonic() - begun_s:.2f} s after it was asked for")
                    return 0
                time.sleep(LOOK_S)
    except (httpx2.HTTPError, httpx2.InvalidURL, OSError) as error:
        print(f"thunderagent: error: no scheduler answers at {url}: {error}", file=sys.stderr)
        return 1
    print(f"thunderagent: error: none leads {LIMIT_S:g} s after epoch {before} was given up", file=sys.stderr)
    return 1


def _refusal(url: str, answer: Asked, *, has_key: bool) -> str:
    """Return in words why nobody hands over."""
    if answer.head.status_code in (404, 405):
        return (
            f"{url} has nobody to hand over to: only a scheduler with a store does, or a gateway of one "
            "(thunderagent scheduler --store)"
        )
    try:
        told = str(json_of(answer.body)["error"]["message"])
    except (httpx2.DecodingError, KeyError, TypeError):
        told = ""
    said = refusal(url, answer.head.status_code, has_key=has_key)
    return f"{said}: {escaped(told[:SHOWN_BYTES])}" if told and answer.head.status_code not in (401, 403) else said


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
