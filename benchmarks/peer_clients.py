"""Loads that others wrote, as commands of their own: they bring programs, pace and figures.

ABench (Alibaba) keeps agents in a closed loop. It names a program by `X-SMG-Routing-Key` alone, and says no end: an arm
that reads other names sees single requests.
"""

from __future__ import annotations

import json
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any, Final

from benchmarks import dynamo
from benchmarks.environments import RealEngineError, cache_dir, ensure_environment
from benchmarks.processes import running, tail

if TYPE_CHECKING:
    from benchmarks.load import LoadSpec

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


async def run_abench(spec: LoadSpec, url: str, seconds: float) -> dict[str, float | int | None]:
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


def abench_figures(metrics: dict[str, Any]) -> dict[str, float | int | None]:
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
