"""`thunderagent status` and `thunderagent top`: a running proxy, in the terminal."""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, NamedTuple

import httpx2
from rich import box
from rich.console import Console, Group
from rich.live import Live
from rich.table import Table
from rich.text import Text

from thunderagent.bounded import UNPACKED_ONLY, BoundedBody, ExcessError
from thunderagent.doctor.asking import add_proxy_arguments, proxy_url, refusal, trusted
from thunderagent.errors import ConfigurationError
from thunderagent.log_lines import escaped

REFRESH_S = 1.0
TIMEOUT_S = 5.0
MAX_ANSWER_BYTES = 16 * 2**20
"""A proxy's answer is not larger, with a thousand replicas and the programs that are shown."""
BAR_WIDTH = 30
PIPE_WIDTH = 160
"""Width of output that is not a terminal: ids stay whole, so that they can be searched for."""
LARGEST_FIRST = ("claim", "turns", "held")
SMALLEST_FIRST = ("opened", "id", "replica", "state")
"""Orders of programs, as `GET /programs` knows them."""

TOP_DESCRIPTION = "Watch a running proxy until Ctrl-C: rates of the last minute, memory, and the programs."


class Asked(NamedTuple):
    """An answer: its head, and its body."""

    head: httpx2.Response
    body: bytes


def add_status_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of `status`."""
    parser.add_argument("--watch", action="store_true", help="refresh every second until Ctrl-C")
    _add_common_arguments(parser)


def add_top_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of `top`."""
    parser.add_argument("--once", action="store_true", help="print it once and end, as without a terminal")
    parser.add_argument(
        "--sort",
        default="claim",
        choices=(*LARGEST_FIRST, *SMALLEST_FIRST),
        help="which programs come first (default: %(default)s, the largest)",
    )
    _add_common_arguments(parser)


def _add_common_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--programs", type=int, default=20, metavar="N", help="show N programs (default: 20)")
    parser.add_argument("--json", action="store_true", help="print the proxy's own answers, as JSON")
    add_proxy_arguments(parser)


@dataclass(frozen=True, slots=True)
class _Screen:
    """What a command shows: the answers of the proxy that it needs, and how they look."""

    paths: dict[str, str]
    view: Callable[[dict[str, Any]], Group]


def run_status(args: argparse.Namespace) -> int:
    """Show a running proxy. Raises `ConfigurationError`."""
    count = _programs_count(args)
    paths = {
        "summary": "/summary",
        "replicas": "/replicas",
        "programs": f"/programs?limit={count}",
        "queue": f"/queue?limit={count}",
        "tools": "/tools",
    }
    return _show(args, _Screen(paths, _status_view), watch=args.watch)


def run_top(args: argparse.Namespace) -> int:
    """Watch a running proxy, or print it once where nobody looks at a terminal. Raises `ConfigurationError`."""
    sort = f"-{args.sort}" if args.sort in LARGEST_FIRST else args.sort
    paths = {
        "summary": "/summary",
        "replicas": "/replicas",
        "programs": f"/programs?limit={_programs_count(args)}&sort={sort}",
        "queue": "/queue?limit=1",
    }
    return _show(args, _Screen(paths, _top_view), watch=not args.once and not args.json and sys.stdout.isatty())


def _programs_count(args: argparse.Namespace) -> int:
    count: int = args.programs
    if count < 1:
        raise ConfigurationError(f"--programs: must be at least 1, not {count}")
    return count


def _show(args: argparse.Namespace, screen: _Screen, *, watch: bool) -> int:
    """Print it, once or until Ctrl-C; return the exit status. Raises `ConfigurationError`."""
    url, verify = proxy_url(args.url), trusted(args.ca_file) or True
    headers = {"Authorization": f"Bearer {args.key}"} if args.key else {}
    wide = None if sys.stdout.isatty() or "COLUMNS" in os.environ else PIPE_WIDTH
    console = Console(markup=False, emoji=False, highlight=False, width=wide)  # ids are plain text
    try:
        with httpx2.Client(base_url=url, timeout=TIMEOUT_S, trust_env=False, verify=verify, headers=headers) as client:
            answers, first = _look(client, screen)
            if args.json:
                while True:
                    print(json.dumps(answers, indent=None if watch else 2), flush=True)
                    if not watch:
                        return 0
                    time.sleep(REFRESH_S)
                    answers, _ = _look(client, screen)
            if not watch:
                console.print(first)
                return 0
            with Live(first, console=console, screen=True) as live:
                while True:
                    time.sleep(REFRESH_S)
                    live.update(_look(client, screen)[1])
    except httpx2.HTTPStatusError as error:
        status = error.response.status_code
        print(f"thunderagent: error: {refusal(url, status, has_key=bool(args.key))}", file=sys.stderr)
        return 1
    except (httpx2.HTTPError, httpx2.InvalidURL, OSError) as error:
        print(f"thunderagent: error: no proxy answers at {url}: {error}; --url gives another address", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        return 0


def _look(client: httpx2.Client, screen: _Screen) -> tuple[dict[str, Any], Group]:
    """Return the proxy's answers, and how they look; building that finds an answer that is not a proxy's."""
    with of_a_proxy():
        answers = {name: _get(client, path) for name, path in screen.paths.items()}
        return answers, screen.view(_shown(answers))


def _top_view(answers: dict[str, Any]) -> Group:
    summary, replicas, programs = answers["summary"], answers["replicas"]["replicas"], answers["programs"]
    rates, now = summary["rates"], summary["now"]
    demand, hits = summary["demand_ratio"], rates["hit_ratio"]
    head = Text(
        f"policy {summary['policy']}   programs {summary['programs_count']}   "
        f"replicas up {summary['replicas_up_count']} of {summary['replicas_count']}\n"
        f"turns/min {rates['turns_per_min']:,.0f}   output tokens/s {rates['output_tokens_per_s']:,.0f}   "
        f"prefix hits {_percent(hits)}\n"
        f"held {now['turns_held_count']}, the oldest for {_seconds(summary['longest_held_s'])}   "
        f"holds: median {_seconds(rates['held_p50_s'])}, p99 {_seconds(rates['held_p99_s'])}   "
        f"engines idle meanwhile {_percent(rates.get('idle_held_ratio'))}",
        style="bold",
    )
    head.append(_first_in_queue(answers["queue"]))
    bars = Text("memory").append(_bar(demand)).append(f"{_percent(demand)} claimed or waited for\n")
    for replica in replicas:
        capacity_tokens = replica["limit_tokens"] or replica["capacity_tokens"]
        ratio = replica["demand_tokens"] / capacity_tokens if capacity_tokens else None
        bars.append(f"{replica['replica_id']}").append(_bar(ratio))
        pool = f", pool {replica['pool']}" if replica["pool"] else ""
        bars.append(f"{_percent(ratio)}, {replica['turns_in_flight_count']} turns, {_health(replica)}{pool}\n")
    parts: list[Text | Table] = [head, bars, _program_table(programs)]
    if rates["mostly_anonymous"]:
        parts.insert(1, Text("Most turns name no program: see thunderagent doctor.", style="bold yellow"))
    return Group(*parts)


def _bar(ratio: float | None) -> str:
    full_count = 0 if ratio is None else round(min(1.0, ratio) * BAR_WIDTH)
    return f"  [{'|' * full_count}{' ' * (BAR_WIDTH - full_count)}] "


def _percent(ratio: float | None) -> str:
    return "unknown" if ratio is None else f"{ratio:.0%}"


def _seconds(value_s: float | None) -> str:
    return "-" if value_s is None else f"{value_s:.1f} s"


def _status_view(answers: dict[str, Any]) -> Group:
    replicas, programs, queue = answers["replicas"], answers["programs"], answers["queue"]
    tools, summary, now = answers["tools"], answers["summary"], answers["summary"]["now"]
    idle = _percent(summary["rates"].get("idle_held_ratio"))
    head = Text(
        f"policy {replicas['policy']}   programs {summary['programs_count']}: "
        f"{now['active_reasoning_count'] + now['active_acting_count']} active, {now['paused_reasoning_count']} held, "
        f"{now['paused_acting_count']} paused   turns held {now['turns_held_count']}\n"
        f"engines idle while programs are held: {idle} of the last minute\n"
        f"tools running {tools['running_count']}, {tools['mean_s']:.1f} s each   sandboxes {tools['sandbox_count']}"
        f"{_taken(tools['sandbox_disk_bytes'])}{_place(summary.get('cell'))}{_first_in_queue(queue)}",
        style="bold",
    )
    return Group(
        head,
        _replica_table(replicas["replicas"]),
        _cost_table(replicas["replicas"]),
        _program_table(programs),
        _queue_table(queue),
    )


def _first_in_queue(queue: dict[str, Any]) -> str:
    """Return a line that says what the program waits for that is let in next."""
    if not queue["waiting"] or not queue.get("first_needs"):
        return ""
    first = queue["waiting"][0]
    return f"\nnext {first['program_id']}, held {_seconds(first['held_for_s'])}: {queue['first_needs']}"


def _place(cell: dict[str, Any] | None) -> str:
    """Return a line about a scheduler with gateways, and about its standbys."""
    if cell is None:
        return ""
    line = (
        f"\nscheduler {cell['role']}, epoch {cell['epoch']}   gateways {cell['gateways_count']}, "
        f"links {cell['links_count']}, engines polled by them {cell['polled_by_gateways_count']}"
    )
    if cell["has_store"]:
        lag_s, store = cell["log_lag_p99_s"], "" if cell["store_answers"] else "   the store is away"
        lag = "" if lag_s is None else f"   log lag p99 {lag_s * 1000:.1f} ms"
        line += f"\nstandby {'there' if cell['has_standby'] else 'none'}{lag}{store}"
    if cell.get("counts_may_miss"):
        line += "\nturns may be missing in the counts: the store had lost data at a takeover"
    return line


def _taken(disk_bytes: int | None) -> str:
    return "" if disk_bytes is None else f", {_short(disk_bytes)}B on disk"


def json_of(body: bytes) -> Any:
    """Return an answer's JSON. Raises `httpx2.DecodingError` if it is none."""
    try:
        return json.loads(body)
    except (ValueError, RecursionError) as error:
        raise httpx2.DecodingError("what it sends is no JSON") from error


@contextmanager
def of_a_proxy() -> Iterator[None]:
    """Raise `httpx2.DecodingError` if JSON that is read in the block, or the function, is not what a proxy sends."""
    try:
        yield
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        raise httpx2.DecodingError("what it sends is not a proxy's") from error


def _get(client: httpx2.Client, path: str) -> Any:
    response, body = asked(client, "GET", path)
    response.raise_for_status()
    return json_of(body)


def asked(client: httpx2.Client, method: str, path: str, params: dict[str, str] | None = None) -> Asked:
    """Return the head of an answer, and its body, which is bounded in size and time.

    Raises `httpx2.DecodingError` beyond the one, `httpx2.ReadTimeout` beyond the other, and what the client does.
    """
    with client.stream(method, path, params=params, headers=UNPACKED_ONLY) as response:
        ends_s = time.monotonic() + TIMEOUT_S
        try:
            body = BoundedBody(MAX_ANSWER_BYTES, response.headers.get("Content-Encoding"))
            for piece in response.iter_raw():
                body.add(piece)
                if time.monotonic() > ends_s:
                    raise httpx2.ReadTimeout(f"{path} does not end")
        except ExcessError as error:
            raise httpx2.DecodingError(f"{path} {error}") from error
    return Asked(response, bytes(body.taken()))


def _shown(value: Any) -> Any:
    """Return a value of JSON with escapes for what a terminal obeys: names of models come from engines."""
    if isinstance(value, str):
        return escaped(value)
    if isinstance(value, list):
        return [_shown(each) for each in value]
    return {escaped(name): _shown(each) for name, each in value.items()} if isinstance(value, dict) else value


def _table(title: str, *columns: str, numbers: tuple[str, ...] = ()) -> Table:
    """Return an empty table; `numbers` are columns on the right, aligned right. Ids of 15 letters fit 80 columns."""
    table = Table(title=title, title_justify="left", box=box.SIMPLE_HEAD, pad_edge=False, padding=(0, 1, 0, 0))
    for column in columns:
        table.add_column(column, overflow="fold")
    for column in numbers:
        table.add_column(column, justify="right", no_wrap=True)
    return table


def _health(replica: dict[str, Any]) -> str:
    """Return the verdict with its reason, a breaker that is about to close, and the engine's plugin."""
    health = str(replica["verdict"])
    if replica["verdict_reason"]:
        health += f": {replica['verdict_reason']}"
    if replica["breaker"] == "half_open":
        health += ", breaker half-open"
    if replica["engine"].get("uncached_ranks_count"):
        health += ", prefix caching off"
    plugin = replica.get("plugin")  # an older proxy has no such field
    if plugin is None:
        return health
    if not plugin["on"]:
        return f"{health}, plugin off"
    pinned_count, total_count = plugin["pinned_blocks_count"], plugin["total_blocks_count"]
    pinned = f", {pinned_count / total_count:.0%} pinned" if pinned_count and total_count else ""
    return f"{health}, plugin on{pinned}"


def _pool_column(rows: list[dict[str, Any]]) -> tuple[str, ...]:
    """Return the column of pools, if there are several."""
    return ("pool",) if any(row["pool"] for row in rows) else ()


def _replica_table(replicas: list[dict[str, Any]]) -> Table:
    numbers = ("demand/capacity", "full", "reasoning", "acting", "turns", "hits")
    pool = _pool_column(replicas)
    table = _table("Replicas", "replica", *pool, "health", numbers=numbers)
    for replica in replicas:
        capacity = replica["capacity_tokens"]
        table.add_row(
            replica["replica_id"],
            *(replica[column] for column in pool),
            Text(_health(replica), style="green" if replica["up"] else "red"),
            f"{_short(replica['demand_tokens'])}/{_short(capacity) if capacity else 'unknown'}",
            f"{replica['demand_tokens'] / capacity:.0%}" if capacity else "?",
            str(replica["reasoning_count"]),
            str(replica["acting_count"]),
            str(replica["turns_in_flight_count"]),
            f"{replica['hit_ratio']:.0%}",
        )
    return table


def _cost_table(replicas: list[dict[str, Any]]) -> Table:
    terms = ("decode", "prefill", "recompute", "unused", "caching", "queued")
    table = _table("Costs in token-seconds", "replica", numbers=terms)
    for replica in replicas:
        table.add_row(replica["replica_id"], *(_short(replica["costs_token_s"][term]) for term in terms))
    return table


def _program_table(page: dict[str, Any]) -> Table:
    title = f"Programs ({len(page['programs'])} of {page['total']})"
    pool = _pool_column(page["programs"])
    numbers = ("tokens", "turns", "age s", "held s")
    table = _table(title, "program", *pool, "status", "phase", "replica", numbers=numbers)
    for program in page["programs"]:
        status = f"{program['status']}{', marked' if program['marked'] else ''}"
        table.add_row(
            program["program_id"],
            *(program[column] for column in pool),
            status,
            program["phase"],
            program["replica_id"] or "",
            f"{program['claim_tokens']:,}",
            str(program["turn_count"]),
            f"{program['age_s']:.0f}",
            f"{program['held_s_total'] + (program['held_for_s'] or 0.0):.1f}",
        )
    return table


def _queue_table(queue: dict[str, Any]) -> Table:
    title = f"Paused queue ({queue['waiting_count']} with a turn)"
    pool = _pool_column(queue["waiting"])
    table = _table(title, "program", *pool, "why", numbers=("tokens", "waits s"))
    for program in queue["waiting"]:
        waits_s = program["held_for_s"] or 0.0
        in_pool = [program[column] for column in pool]
        claim = f"{program['claim_tokens']:,}"
        table.add_row(
            program["program_id"], *in_pool, program["hold_reason"].replace("_", " "), claim, f"{waits_s:.1f}"
        )
    return table


def _short(number: float) -> str:
    for limit, suffix in ((1e9, "G"), (1e6, "M"), (1e3, "k")):
        if number >= limit:
            return f"{number / limit:.1f}{suffix}"
    return f"{number:.0f}"
