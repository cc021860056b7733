"""`thunderagent calibrate`: measure a running engine and write its timing profile."""

from __future__ import annotations

import argparse
import asyncio
import math
import re
import sys
from pathlib import Path

from rich.console import Console, Group
from rich.text import Text

from thunderagent.calibrate.measurement import Calibration, Settings, calibrate
from thunderagent.errors import CalibrationError, ConfigurationError
from thunderagent.simulator.commands.console import table_of_numbers
from thunderagent.simulator.engine.timing import PROFILE_SUFFIX, profile_text

DESCRIPTION = """\
Measure a running engine and write its timing profile, for `thunderagent simulate` and `thunderagent engine`.

Give it any engine with OpenAI's API that nobody else uses meanwhile, directly, not through a proxy. It is asked for
some hundred answers of random words, one or many at a time. The sizes of its KV pool are read from vLLM's metrics if
it has them. Ctrl-C ends it, and nothing is written.

Example:
  thunderagent calibrate --url http://10.0.0.1:8000 --out my-engine.toml
  thunderagent simulate --profile my-engine.toml --programs 32
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of a calibration to a command's parser."""
    defaults = Settings()
    add = parser.add_argument
    add("--url", required=True, help="the engine, such as http://127.0.0.1:8000")
    add("--out", type=Path, required=True, metavar="FILE.toml", help="file to write; must be new")
    add("--model", metavar="NAME", help="served model name (default: the first that the engine names)")
    add("--api-key", metavar="KEY", help="key of the engine, sent as a bearer token (default: none)")
    add(
        "--seconds",
        type=float,
        default=defaults.budget_s,
        metavar="S",
        help="how long to measure, about; more gives longer prompts, more requests at a time, and more repetitions "
        "(default: %(default)g)",
    )
    add(
        "--max-num-batched-tokens",
        type=int,
        default=defaults.max_num_batched_tokens,
        metavar="N",
        help="the engine's own, which it does not tell: tokens in one iteration at most (default: what the times tell "
        "if one size explains them clearly best, else 2048 is assumed, with a warning)",
    )
    add(
        "--vocabulary",
        type=_range_of_ids,
        default=defaults.token_ids,
        metavar="ID-ID",
        help="token ids that prompts are made of; the model must have them (default: 100-1000)",
    )


def run(args: argparse.Namespace) -> int:
    """Calibrate by the options; return the exit status: 0, or 1 if the engine could not be measured.

    Raises ConfigurationError for impossible options.
    """
    settings = _settings_from(args)
    try:
        with Console(stderr=True).status("warming up") as status:
            measuring = calibrate(args.url, settings, model=args.model, api_key=args.api_key, on_progress=status.update)
            calibration = asyncio.run(measuring)
    except CalibrationError as error:
        print(f"thunderagent: error: {error}", file=sys.stderr)
        return 1
    try:
        with args.out.open("x", encoding="utf-8") as out:
            out.write(profile_text(calibration.timing))
    except OSError as error:
        print(f"thunderagent: error: cannot write {args.out}: {error.strerror}", file=sys.stderr)
        return 1
    Console(markup=False, emoji=False, highlight=False).print(picture(calibration))
    for warning in calibration.warnings:
        print(f"thunderagent: warning: {warning}", file=sys.stderr)
    print(f"{args.out}: written; try: thunderagent simulate --profile {args.out}")
    return 0


def picture(calibration: Calibration) -> Group:
    """Return constants and errors for a terminal of 80 columns."""
    timing = calibration.timing
    constants = table_of_numbers("An iteration takes", "µs")
    for name, cost_s in (
        ("in any case", timing.base_s),
        ("for each uncached prompt token", timing.prefill_token_s),
        ("for each pair of a prompt token and one that it attends to", timing.attention_pair_s),
        ("for each decoding request", timing.decode_request_s),
        ("for each token of a decoding request's context", timing.decode_context_token_s),
        ("outside of iterations, for each request", timing.request_overhead_s),
    ):
        constants.add_row(name, f"{cost_s * 1e6:,.4g}")
    errors = table_of_numbers("Error of the fit", "measurements", "median", "p90")
    for each in calibration.fit.residuals:
        ratios = (f"{each.median_ratio:.1%}", f"{each.p90_ratio:.1%}")
        errors.add_row(each.experiment, str(each.observation_count), *ratios)
    return Group(Text(timing.source), constants, errors)


def _settings_from(args: argparse.Namespace) -> Settings:
    if args.out.suffix != PROFILE_SUFFIX:
        raise ConfigurationError(f"--out needs a name that ends in {PROFILE_SUFFIX}, not {args.out}")
    if args.out.exists():
        raise ConfigurationError(f"{args.out} is there already")
    if not args.out.absolute().parent.is_dir():
        raise ConfigurationError(f"cannot write {args.out}: there is no folder {args.out.parent}")
    if not args.url.startswith(("http://", "https://")):
        raise ConfigurationError(f"--url needs http://HOST:PORT, not {args.url!r}")
    if not 0 < args.seconds < math.inf:
        raise ConfigurationError(f"--seconds must be a positive number, got {args.seconds}")
    if args.max_num_batched_tokens is not None and args.max_num_batched_tokens < 1:
        raise ConfigurationError(f"--max-num-batched-tokens must be at least 1, got {args.max_num_batched_tokens}")
    if args.api_key is not None and not re.fullmatch(r"[!-~]+", args.api_key):
        raise ConfigurationError("--api-key must be visible ASCII letters, without a space")
    return Settings(args.seconds, args.max_num_batched_tokens, args.vocabulary)


def _range_of_ids(text: str) -> range:
    """Read `100-1000`."""
    low, _, high = text.partition("-")
    if not (low.isdecimal() and high.isdecimal() and int(low) + 100 <= int(high)):
        raise argparse.ArgumentTypeError(f"not a range of at least 100 token ids, such as 100-1000: {text!r}")
    return range(int(low), int(high) + 1)
