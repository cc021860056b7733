"""Loads that others wrote, as commands of their own: they bring programs, pace and figures.

ABench (Alibaba) keeps agents in a closed loop. It names a program by `X-SMG-Routing-Key` alone, and says no end: an arm
that reads other names sees single requests.

AIPerf (NVIDIA) replays recorded sessions with their gaps, some at a time, by the scenario of a public dashboard: each
begins somewhere in its middle, with a cache that has seen its past. It says no end, and names a program as the arm
reads it. By the scenario's own rules only runs over a corpus that it names itself are valid.
"""

from __future__ import annotations

import gzip
import json
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any, Final

from benchmarks import dynamo
from benchmarks.environments import RealEngineError, cache_dir, ensure_environment
from benchmarks.processes import running, tail

if TYPE_CHECKING:
    from benchmarks.load import LoadSpec

Figures = dict[str, float | int | None]
ABENCH: Final = "agentic-bench==0.2.0"
_SESSIONS_FOR_EACH: Final = 40
"""Sessions drawn for each place: more than a run can end."""


def abench_words(spec: LoadSpec, url: str, seconds: float, tokenizer: str, result: str) -> list[str]:
    """Return the module and options of ABench for a load of about the same shape."""
    named = {
        "--base-url": url,
        "--model": spec.model,
        "--tokenizer": tokenizer,
        "--backend": "openai",
        "--dataset-name": "random",
        "--turns": sum(spec.turns) // 2,
        "--system-prompt-len": spec.system_tokens,
        "--input-increment": sum(spec.tool_result_tokens) // 2,
        "--output-len": sum(spec.output_tokens) // 2,
        "--gap-policy": f"exponential:{spec.tool_mean_s * 1000:.0f}",
        "--max-concurrency": spec.programs,
        "--num-sessions": spec.programs * _SESSIONS_FOR_EACH,
        "--duration": f"{seconds:.0f}",
        "--seed": spec.seed,
        "--output-file": result,
    }
    words = [str(word) for pair in named.items() for word in pair]
    return ["abench", "run", *words, "--routing-key", *([] if spec.stream else ["--disable-stream"])]


async def run_abench(spec: LoadSpec, url: str, seconds: float, _traces: Path | None = None) -> Figures:
    """Run ABench for so long, and return its figures. Raises RealEngineError if it fails."""
    python = ensure_environment("abench", [ABENCH, "transformers"], "some 200 MB")
    tokenizer = str(dynamo.model_folder(is_text=True))
    log = cache_dir() / "logs" / "abench.log"
    with TemporaryDirectory(prefix="abench-") as folder:
        result = Path(folder) / "result.jsonl"
        words = abench_words(spec, url, seconds, tokenizer, str(result))
        async with running(str(python), "-m", *words, log_path=log, HF_HUB_OFFLINE="1") as process:
            status = await process.wait()
        if status or not result.exists():
            raise RealEngineError(f"ABench ended with status {status}; its log ends:\n{tail(log)}")
        return abench_figures(json.loads(result.read_text().splitlines()[-1])["metrics"])


def abench_figures(metrics: dict[str, Any]) -> Figures:
    """Return ABench's figures by our names; turns are those of its steady window."""
    window_s = metrics["steady_window_s"]
    return {
        "turns_per_min": metrics["steady_turns"] * 60 / window_s if window_s else 0.0,
        "hit_ratio": metrics["prefix_cache_ratio"],
        "program_mean_s": metrics["mean_trajectory_time_s"] or None,
        "latency_p50_s": metrics["e2e_overall"]["p50_ms"] / 1000,
        "latency_p99_s": metrics["e2e_overall"]["p99_ms"] / 1000,
        "first_token_p50_s": metrics["t2plus_ttft"]["p50_ms"] / 1000 or None,
        "turn_count": metrics["steady_turns"],
        "window_s": window_s,
        "failed_turn_count": metrics["total_turns"] - metrics["successful_turns"],
    }


# --- AIPerf -----------------------------------------------------------------------------------------------------------

AIPERF: Final = "aiperf==0.13.0"
SCENARIO: Final = "inferencex-agentx-mvp"
LARGEST_CONTEXT_TOKENS: Final = 100_000
"""Sessions with a larger context are left out."""
FEWEST_TURNS_COUNT: Final = 6
LONGEST_PAUSE_S: Final = 60.0
"""From one turn to the next: people were away for hours, and AIPerf first waits for the longest such pause."""
_BLOCK_TOKENS: Final = 64


def write_sessions(traces: Path, folder: Path) -> int:
    """Write recorded programs as AIPerf reads them (`weka_trace`), a file each; return how many.

    `traces` is JSONL as of `thunderagent record`, compressed or not. Blocks of 64 tokens that a turn shares with an
    earlier one have the same numbers. Sub-agents, sessions with few turns, and those with large contexts are left out;
    no pause is longer than `LONGEST_PAUSE_S`.
    Raises RealEngineError for a file that is not of this form.
    """
    count = 0
    try:
        with gzip.open(traces, "rt") if traces.suffix == ".gz" else traces.open() as lines:
            for row in map(json.loads, lines):
                turns = row["turns"]
                if row.get("parent") or len(turns) < FEWEST_TURNS_COUNT:
                    continue
                if max(turn[1] + turn[2] for turn in turns) > LARGEST_CONTEXT_TOKENS:
                    continue
                session = {"id": row["id"], "models": ["any"], "block_size": _BLOCK_TOKENS, "hash_id_scope": "local"}
                (folder / f"{count:03}.json").write_text(json.dumps({**session, "requests": _requests(turns)}))
                count += 1
    except (OSError, EOFError, ValueError, TypeError, KeyError, IndexError) as error:
        raise RealEngineError(f"{traces.name}: no recorded programs: {type(error).__name__}") from error
    if not count:
        raise RealEngineError(
            f"{traces.name}: no program of {FEWEST_TURNS_COUNT} turns up to {LARGEST_CONTEXT_TOKENS} tokens"
        )
    return count


def _requests(turns: list[list[Any]]) -> list[dict[str, Any]]:
    seen: list[list[int]] = []
    next_block, requests = 0, []
    at_s, before_s = 0.0, turns[0][0]
    for start_s, input_tokens, output_tokens, hit_tokens, api_s, _gap_s, stop in turns:
        at_s += min(LONGEST_PAUSE_S, max(0.0, start_s - before_s))
        before_s = start_s
        blocks_count = input_tokens // _BLOCK_TOKENS
        hit_count = min(hit_tokens // _BLOCK_TOKENS, blocks_count)
        # An engine that keeps answers hits more than any prompt before had.
        known = max(reversed(seen), key=lambda blocks: min(len(blocks), hit_count), default=[])[:hit_count]
        new_count = blocks_count - len(known)
        seen.append(known + list(range(next_block, next_block + new_count)))
        next_block += new_count
        sizes = {"in": input_tokens, "out": max(1, output_tokens), "hash_ids": seen[-1]}
        ended = {"stop": "" if stop == "unknown" else stop, "api_time": api_s}
        requests.append({"t": at_s, "type": "s", "model": "any", **sizes, **ended})
    return requests


def aiperf_words(spec: LoadSpec, url: str, seconds: float, tokenizer: str, sessions: str, folder: str) -> list[str]:
    """Return AIPerf's command line: the scenario, so many sessions at a time."""
    named = {
        "--model": spec.model,
        "--url": url,
        "--endpoint-type": "chat",
        "--tokenizer": tokenizer,
        "--input-file": sessions,
        "--custom-dataset-type": "weka_trace",
        "--scenario": SCENARIO,
        "--benchmark-duration": f"{seconds:.0f}",
        "--concurrency": spec.programs,
        "--random-seed": spec.seed,
        "--session-header": spec.program_header,
        "--artifact-dir": folder,
        "--ui": "none",
    }
    return ["profile", "--streaming", "--unsafe-override", *(str(word) for pair in named.items() for word in pair)]


async def run_aiperf(spec: LoadSpec, url: str, seconds: float, traces: Path | None) -> Figures:
    """Run AIPerf's scenario over recorded programs for so long. Raises RealEngineError if it fails."""
    if traces is None:
        raise RealEngineError("AIPerf replays recorded programs: name a file of them by --traces")
    if not spec.stream:
        raise RealEngineError("AIPerf's scenario streams: --answers streamed")
    python = ensure_environment("aiperf", [AIPERF], "some 900 MB")
    tokenizer = str(dynamo.model_folder(is_text=True))
    log = cache_dir() / "logs" / "aiperf.log"
    with TemporaryDirectory(prefix="aiperf-") as folder:
        sessions = Path(folder) / "sessions"
        sessions.mkdir()
        write_sessions(traces, sessions)
        words = aiperf_words(spec, url, seconds, tokenizer, str(sessions), folder)
        async with running(str(python.with_name("aiperf")), *words, log_path=log) as process:
            status = await process.wait()
        result = Path(folder) / "profile_export_aiperf.json"
        if status or not result.exists():
            raise RealEngineError(f"AIPerf ended with status {status}; its log ends:\n{tail(log)}")
        return aiperf_figures(json.loads(result.read_text()))


def aiperf_figures(found: Mapping[str, Any]) -> Figures:
    """Return AIPerf's figures by our names. Raises RealEngineError if there are none."""

    def value(name: str, statistic: str = "avg") -> float | None:
        each = found.get(name, {}).get(statistic)
        return None if each is None else float(each)

    def seconds(name: str, statistic: str) -> float | None:
        milliseconds = value(name, statistic)
        return None if milliseconds is None else milliseconds / 1000

    window_s, turns_count = value("benchmark_duration"), value("request_count")
    if not window_s or not turns_count:
        raise RealEngineError("AIPerf made no turn")
    hits = value("overall_usage_prompt_cache_read_pct")
    return {
        "turns_per_min": turns_count * 60 / window_s,
        "hit_ratio": None if hits is None else hits / 100,
        "latency_mean_s": seconds("request_latency", "avg"),
        "latency_p50_s": seconds("request_latency", "p50"),
        "latency_p99_s": seconds("request_latency", "p99"),
        "first_token_mean_s": seconds("time_to_first_token", "avg"),
        "first_token_p50_s": seconds("time_to_first_token", "p50"),
        "first_token_p99_s": seconds("time_to_first_token", "p99"),
        "output_tokens_per_s": value("output_token_throughput"),
        "turn_count": int(turns_count),
        "window_s": window_s,
        "failed_turn_count": int(value("error_request_count") or 0.0),
    }


@dataclass(frozen=True)
class Client:
    """A load of somebody else's: what is installed, and what runs it on a URL for so many seconds."""

    requirement: str
    run: Callable[[LoadSpec, str, float, Path | None], Awaitable[Figures]]


CLIENTS: Final[Mapping[str, Client]] = {"abench": Client(ABENCH, run_abench), "aiperf": Client(AIPERF, run_aiperf)}
