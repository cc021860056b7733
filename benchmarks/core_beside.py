"""The core compared with an earlier commit: that one, today's, and today's compiled take turns on one processor."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import tarfile
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory

from benchmarks.machine import ROOT, save_results

ONCE = Path(__file__).with_name("core_once.py")
BUILT_FROM = ("setup.py", "pyproject.toml", "README.md", "LICENSE")

Figures = dict[str, float]


def beside(revision: str, arguments: tuple[str, ...], rounds_count: int, *, compiles: bool) -> None:
    """Run each of them `rounds_count` times; print and store all runs, medians, and ratios to the earlier commit."""
    with TemporaryDirectory(prefix="thunderagent-core-") as folder:
        trees = {"before": unpacked(revision, Path(folder)), "interpreted": ROOT}
        if compiles:
            trees["compiled"] = compiled(Path(folder))
        runs: dict[str, list[Figures]] = {name: [] for name in trees}
        for _ in range(rounds_count):
            for name, tree in trees.items():
                runs[name].append(run_once(tree, arguments))
                print(name, json.dumps(runs[name][-1]), flush=True)
    figures = summary(runs)
    for name, of_build in figures.items():
        print(name, *(f"{figure}={value:.4g}" for figure, value in of_build.items()))
    kept = {"beside": revision, "arguments": arguments, "figures": figures, "runs": runs}
    print(f"kept in {save_results('core-beside', kept)}")


def summary(runs: dict[str, list[Figures]]) -> dict[str, Figures]:
    """Return the medians of each build, and its event time over the earlier commit's, round by round."""
    figures = {name: {key: median(run[key] for run in made) for key in made[0]} for name, made in runs.items()}
    for name, made in runs.items():
        ratios = [
            run["event_mean_ms"] / before["event_mean_ms"] for run, before in zip(made, runs["before"], strict=True)
        ]
        if name != "before":
            figures[name] |= {"event_ratio": median(ratios), "event_ratio_max": max(ratios)}
    return figures


def run_once(tree: Path, arguments: tuple[str, ...]) -> Figures:
    """Return the figures of one run of a tree's code, in a process of its own on the first processor."""
    first = min(os.sched_getaffinity(0))
    done = subprocess.run(
        ["taskset", "-c", str(first), sys.executable, str(ONCE), *arguments],
        cwd=tree,
        env={**os.environ, "PYTHONPATH": str(tree)},
        stdout=subprocess.PIPE,
        check=True,
    )
    figures: Figures = json.loads(done.stdout)
    return figures


def unpacked(revision: str, folder: Path) -> Path:
    """Return the tree of a commit."""
    archive, tree = folder / "before.tar", folder / "before"
    subprocess.run(["git", "-C", ROOT, "archive", "--output", archive, revision], check=True)
    with tarfile.open(archive) as packed:
        packed.extractall(tree, filter="data")
    return tree


def compiled(folder: Path) -> Path:
    """Return a tree of today's files with compiled hot modules, as for a release. Takes minutes."""
    source, wheels, tree = folder / "source", folder / "wheels", folder / "compiled"
    no_cache = shutil.ignore_patterns("__pycache__")
    shutil.copytree(ROOT / "thunderagent", source / "thunderagent", ignore=no_cache)
    for name in BUILT_FROM:
        shutil.copy(ROOT / name, source / name)
    pip = [sys.executable, "-m", "pip", "--quiet", "--disable-pip-version-check"]
    environment = {**os.environ, "THUNDERAGENT_COMPILE": "1"}
    subprocess.run([*pip, "wheel", "--no-deps", "--wheel-dir", wheels, "."], cwd=source, env=environment, check=True)
    subprocess.run([*pip, "install", "--no-deps", "--target", tree, *wheels.glob("*.whl")], check=True)
    shutil.copytree(ROOT / "benchmarks", tree / "benchmarks", ignore=shutil.ignore_patterns("__pycache__", "results"))
    return tree
