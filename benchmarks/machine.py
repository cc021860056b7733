"""The machine that a result was measured on, and where results are kept."""

from __future__ import annotations

import datetime as dt
import json
import os
import platform
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

RESULTS = Path(os.environ.get("THUNDERAGENT_RESULTS") or Path(__file__).parent / "results")
PACKAGES = ("thunderagent", "aiohttp", "uvloop", "msgspec")


def describe_machine() -> dict[str, Any]:
    """Return what a reader needs to judge a figure: processor, cores, memory, versions, day."""
    return {
        "processor": _first_field(Path("/proc/cpuinfo"), "model name"),
        "cores_count": os.cpu_count(),
        "memory": _first_field(Path("/proc/meminfo"), "MemTotal"),
        "python": platform.python_version(),
        "packages": {name: _version(name) for name in PACKAGES},
        "date": dt.datetime.now(dt.UTC).date().isoformat(),
    }


def save_results(name: str, results: dict[str, Any]) -> Path:
    """Write `benchmarks/results/NAME.json` and return its path."""
    RESULTS.mkdir(exist_ok=True)
    path = RESULTS / f"{name}.json"
    path.write_text(json.dumps(results, indent=2) + "\n")
    return path


def _first_field(path: Path, key: str) -> str:
    try:
        lines = path.read_text().splitlines()
    except OSError:
        return "unknown"
    return next((line.partition(":")[2].strip() for line in lines if line.startswith(key)), "unknown")


def _version(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:
        return "not installed"
