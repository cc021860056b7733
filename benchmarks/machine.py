"""Store results with their origin: the machine, the commit, and a hash of the code."""

from __future__ import annotations

import datetime as dt
import functools
import hashlib
import json
import os
import platform
import subprocess
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
RESULTS = Path(os.environ.get("BENCHMARK_RESULTS") or ROOT / "benchmarks" / "results")
_written: set[Path] = set()
"""Results written by this process."""
PACKAGES = ("thunderagent", "aiohttp", "uvloop", "msgspec")


def describe_machine() -> dict[str, Any]:
    """Return the context of a figure: processor, cores, memory, versions, day."""
    return {
        "processor": _first_field(Path("/proc/cpuinfo"), "model name"),
        "cores_count": os.cpu_count(),
        "memory": _first_field(Path("/proc/meminfo"), "MemTotal"),
        "python": platform.python_version(),
        "packages": {name: _version(name) for name in PACKAGES},
        "date": dt.datetime.now(dt.UTC).date().isoformat(),
    }


@functools.cache
def code_hash() -> str:
    """Return a hash of all code behind a figure: the packages and the benchmarks, as the files are now."""
    digest = hashlib.sha256()
    for folder, endings in (("thunderagent", ("*.py", "*.toml")), ("packages", ("*.py",)), ("benchmarks", ("*.py",))):
        for path in sorted(path for ending in endings for path in (ROOT / folder).rglob(ending)):
            digest.update(f"{path.relative_to(ROOT)}\0".encode() + path.read_bytes() + b"\0")
    return digest.hexdigest()[:16]


@functools.cache
def describe_code() -> dict[str, str]:
    """Return the code version of a result: its hash, and the commit, with a `+` if files were changed since."""
    commit = _git("rev-parse", "HEAD")[:12] or "unknown"
    changed = _git("status", "--porcelain", "--", "thunderagent", "packages", "benchmarks/*.py")
    return {"commit": commit + ("+" if changed else ""), "code": code_hash()}


def save_results(name: str, results: dict[str, Any], folder: Path = RESULTS) -> Path:
    """Write `NAME.json` with its origin, and return its path.

    An existing result of another process is moved to `earlier/`, whatever it says: picking the better of two runs
    would be no result. A result of this process is overwritten.
    """
    path = folder / f"{name}.json"
    if path.exists() and path not in _written:
        earlier = folder / "earlier"
        earlier.mkdir(exist_ok=True)
        path.rename(earlier / f"{name}-{hashlib.sha256(path.read_bytes()).hexdigest()[:8]}.json")
    folder.mkdir(exist_ok=True)
    _written.add(path)
    path.write_text(json.dumps({**describe_code(), "machine": describe_machine(), **results}, indent=2) + "\n")
    return path


def _git(*arguments: str) -> str:
    """Return git's output in this folder; empty without git."""
    try:
        done = subprocess.run(["git", "-C", ROOT, *arguments], capture_output=True, text=True, check=False)
    except OSError:
        return ""
    return done.stdout.strip()


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
