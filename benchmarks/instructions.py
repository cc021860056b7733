"""Count the instructions of a turn of `thunderagent serve` in past commits: the cost of a change, on a busy machine.

Each commit runs under valgrind's callgrind before an engine that answers at once, one turn after another. What the
process does beside turns is measured in some seconds without one, and subtracted. Instead of a commit a folder may be
named that holds the package: so compiled ones are counted.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import re
import subprocess
import sys
from pathlib import Path
from statistics import mean, median
from tempfile import TemporaryDirectory
from time import monotonic
from typing import Any

from benchmarks.instant import instant_engine
from benchmarks.machine import ROOT, save_results
from benchmarks.processes import die_with_parent
from thunderagent.provision.base import free_port

WARM_COUNT, PROGRAMS_COUNT = 400, 20
"""After so many turns the first fits are done."""

SLOWER = 50
IDLE_S = 4.0
START_S = 300.0

SLOWED = f"""
import runpy, time
real_s = time.monotonic
begun_s = real_s()
time.monotonic = lambda: begun_s + (real_s() - begun_s) / {SLOWER}
runpy.run_module("thunderagent", run_name="__main__")
"""
"""Starts it with a clock that is as slow as everything is here: else what it does every few seconds (prices are fitted
anew every fifteen) would weigh as much as all turns between."""


async def take_turn(reader: asyncio.StreamReader, writer: asyncio.StreamWriter, number: int) -> None:
    """Send one turn and read its whole answer."""
    message = {"role": "user", "content": f"{'x' * 2000}{number}"}
    body = json.dumps({"model": "m", "program_id": f"p{number % PROGRAMS_COUNT}", "messages": [message]}).encode()
    head = "POST /v1/chat/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"
    writer.write(f"{head}Content-Length: {len(body)}\r\n\r\n".encode() + body)
    answer = (await reader.readuntil(b"\r\n\r\n")).lower()
    length = re.search(rb"content-length: (\d+)", answer)
    if b" 200 " not in answer.partition(b"\r\n")[0] or length is None:
        raise RuntimeError(answer.decode())
    await reader.readexactly(int(length[1]))


async def connected(port: int) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    """Connect once the server listens."""
    async with asyncio.timeout(START_S):
        while True:
            try:
                return await asyncio.open_connection("127.0.0.1", port)
            except OSError:
                await asyncio.sleep(0.1)


async def measure(package: Path, turns_count: int) -> dict[str, float]:
    """Return the instructions of a turn, and of a second without one, for the package in a folder."""
    with TemporaryDirectory() as folder:
        port = free_port()
        out = Path(folder, "callgrind.out")

        def control(*words: str) -> None:
            subprocess.run(["callgrind_control", *words, str(process.pid)], check=True, capture_output=True)

        def counted(part: int) -> int:
            return int(re.findall(r"^totals: (\d+)", Path(f"{out}.{part}").read_text(), re.MULTILINE)[0])

        async with instant_engine() as engine_port:
            valgrind = ("valgrind", "--tool=callgrind", "--instr-atstart=no", f"--callgrind-out-file={out}")
            serve = ("-c", SLOWED, "serve", "--backends", f"http://127.0.0.1:{engine_port}")
            quiet = ("--port", str(port), "--poll-interval-s", "30", "--log-format", "json")
            process = subprocess.Popen(
                [*die_with_parent(), *valgrind, sys.executable, *serve, *quiet],
                cwd=package,
                env={**os.environ, "PYTHONHASHSEED": "0", "PYTHONPATH": str(package)},
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
            )
            try:
                reader, writer = await connected(port)
                await asyncio.sleep(IDLE_S)
                for number in range(WARM_COUNT):
                    await take_turn(reader, writer, number)
                control("-i", "on")
                control("-z")
                began_s = monotonic()
                for number in range(turns_count):
                    await take_turn(reader, writer, number)
                busy_s = monotonic() - began_s
                control("-d")
                began_s = monotonic()
                await asyncio.sleep(IDLE_S)
                idle_s = monotonic() - began_s
                control("-d")
                writer.close()
            finally:
                process.kill()
                process.wait()
        return {"turns": turns_count, "busy_s": busy_s, "busy": counted(1), "idle_per_s": counted(2) / idle_s}


async def measure_all(revisions: list[str], turns_count: int, rounds_count: int) -> dict[str, Any]:
    """Return the counts of each commit, in turn, and the mean of a turn."""
    runs: dict[str, list[dict[str, float]]] = {revision: [] for revision in revisions}
    with TemporaryDirectory() as folder:
        trees = {each: Path(each).resolve() for each in revisions if Path(each, "thunderagent").is_dir()}
        for revision in revisions:
            if revision in trees:
                continue
            trees[revision] = Path(folder, revision)
            trees[revision].mkdir()
            archive = subprocess.run(
                ["git", "archive", revision, "thunderagent"], cwd=ROOT, check=True, capture_output=True
            )
            subprocess.run(["tar", "-x", "-C", str(trees[revision])], input=archive.stdout, check=True)
        for _ in range(rounds_count):
            for revision in revisions:
                runs[revision].append(await measure(trees[revision], turns_count))
                print(revision, runs[revision][-1], flush=True)
    # A second without turns may include a poll: take the median second, of each commit its own.
    per_turn = {}
    for revision, of_revision in runs.items():
        idle_per_s = median(each["idle_per_s"] for each in of_revision)
        per_turn[revision] = [
            round((each["busy"] - idle_per_s * each["busy_s"]) / each["turns"]) for each in of_revision
        ]
    return {
        "runs": runs,
        "instructions_per_turn": per_turn,
        "mean": {revision: round(mean(each)) for revision, each in per_turn.items()},
    }


def main() -> None:
    """Measure, print and save the figures."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("revisions", nargs="+", metavar="REV", help="commits, or folders with the package")
    parser.add_argument("--turns", type=int, default=200, metavar="N", help="(200)")
    parser.add_argument("--rounds", type=int, default=3, metavar="N", help="(3)")
    parser.add_argument("--keep", action="store_true", help="keep the figures in benchmarks/results")
    args = parser.parse_args()
    found = asyncio.run(measure_all(args.revisions, args.turns, args.rounds))
    for revision, each in found["mean"].items():
        print(f"{revision}: {each:,} instructions a turn, runs {found['instructions_per_turn'][revision]}")
    if args.keep:
        print(save_results("instructions", found))


if __name__ == "__main__":
    main()
