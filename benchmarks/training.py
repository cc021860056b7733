"""Draw the rewards of `tests/real/test_training.py` by step, and say what they and the times come to.

    python -m benchmarks.training RESULT.json

RESULT.json is what TRAINING_RESULT named. It is kept as `results/training.json`, the figure as
`docs/assets/training.svg`.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from statistics import mean
from typing import Any

from benchmarks.machine import save_results
from thunderagent.simulator.figures.intervals import Interval

FIGURE = Path(__file__).parents[1] / "docs/assets/training.svg"
ARMS = {"through": "with the proxy", "direct": "without"}
LAST_COUNT = 5
"""Steps at the end whose mean reward is a run's."""
WIDTH, HEIGHT, LEFT, TOP, RIGHT, BOTTOM = 760, 340, 56, 20, 20, 44


def summary(runs: list[dict[str, Any]]) -> dict[str, float]:
    """Return the rewards at the end, with the 95 % interval of their difference, and the time of a step."""
    ends = {arm: [mean(run[arm]["rewards"][-LAST_COUNT:]) for run in runs] for arm in ARMS}
    found = {f"{arm}_{name}": value for arm in ARMS for name, value in _of_arm(runs, arm, ends[arm]).items()}
    difference = Interval.of([on - off for on, off in zip(ends["through"], ends["direct"], strict=True)])
    found["difference"] = difference.mean
    if len(runs) > 1:
        found |= {"difference_low": difference.low, "difference_high": difference.high}
    found["speed_ratio"] = found["direct_step_s"] / found["through_step_s"]
    return found


def _of_arm(runs: list[dict[str, Any]], arm: str, ends: list[float]) -> dict[str, float]:
    steps = len(runs[0][arm]["rewards"])
    first = mean(mean(run[arm]["rewards"][:LAST_COUNT]) for run in runs)
    return {"first": first, "last": mean(ends), "step_s": mean(run[arm]["took_s"] for run in runs) / steps}


def figure(runs: list[dict[str, Any]]) -> str:
    """Return an SVG: the mean reward of each step by arm, and each run behind it."""
    steps = len(runs[0]["direct"]["rewards"])

    def points(rewards: list[float]) -> str:
        x_px = (WIDTH - LEFT - RIGHT) / max(1, steps - 1)
        y_px = HEIGHT - TOP - BOTTOM
        return " ".join(f"{LEFT + x_px * at:.1f},{TOP + y_px * (1 - reward):.1f}" for at, reward in enumerate(rewards))

    lines = []
    for arm in ARMS:
        of_runs = [run[arm]["rewards"] for run in runs]
        lines += [f'  <polyline class="run {arm}" points="{points(each)}"/>' for each in of_runs]
        average = [mean(each[at] for each in of_runs) for at in range(steps)]
        lines.append(f'  <polyline class="mean {arm}" points="{points(average)}"/>')
    for at in range(5):
        y = TOP + (HEIGHT - TOP - BOTTOM) * (1 - at / 4)
        lines.append(f'  <line class="grid" x1="{LEFT}" x2="{WIDTH - RIGHT}" y1="{y:.0f}" y2="{y:.0f}"/>')
        lines.append(f'  <text class="faint" x="{LEFT - 8}" y="{y + 4:.0f}" text-anchor="end">{at / 4:.2f}</text>')
    lines.append(f'  <text class="faint" x="{LEFT}" y="{HEIGHT - 24}">step 0</text>')
    lines.append(
        f'  <text class="faint" x="{WIDTH - RIGHT}" y="{HEIGHT - 24}" text-anchor="end">step {steps - 1}</text>'
    )
    for at, (arm, name) in enumerate(ARMS.items()):
        lines.append(f'  <text class="name {arm}" x="{LEFT + 12}" y="{TOP + 22 + 20 * at}">{name}</text>')
    return f"""<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" width="{WIDTH}" height="{HEIGHT}"
     role="img" font-family="system-ui, -apple-system, 'Segoe UI', Helvetica, Arial, sans-serif" font-size="14">
  <title>Reward by step</title>
  <desc>The mean reward of {len(runs)} trainings with the proxy and as many without it, and each of them, over
    {steps} steps.</desc>
  <style>
    .ground {{ fill: #ffffff; stroke: #d0d7de }}
    .grid {{ stroke: #d0d7de }}
    .run {{ fill: none; stroke-width: 1; opacity: 0.35 }}
    .mean {{ fill: none; stroke-width: 2.6 }}
    .faint {{ fill: #57636f; font-size: 12px }}
    polyline.through {{ stroke: #2f66a8 }}
    polyline.direct {{ stroke: #b3541e }}
    .name {{ font-weight: 600 }}
    text.through {{ fill: #23568f }}
    text.direct {{ fill: #9a4515 }}
    @media (prefers-color-scheme: dark) {{
      .ground {{ fill: #12171d; stroke: #353d46 }}
      .grid {{ stroke: #353d46 }}
      .faint {{ fill: #a7b1bb }}
      polyline.through {{ stroke: #6ba4e8 }}
      polyline.direct {{ stroke: #f0975c }}
      text.through {{ fill: #6ba4e8 }}
      text.direct {{ fill: #f0975c }}
    }}
  </style>
  <rect class="ground" x="0.5" y="0.5" width="{WIDTH - 1}" height="{HEIGHT - 1}" rx="6"/>
{chr(10).join(lines)}
</svg>
"""


def main() -> None:
    """Print the summary; keep it, and the figure."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("result", type=Path, help="what TRAINING_RESULT named")
    result = json.loads(parser.parse_args().result.read_text())
    found = summary(result["runs"])
    for name, value in found.items():
        print(f"{name:20} {value:8.3f}")
    save_results("training", {**result, "summary": found})
    FIGURE.write_text(figure(result["runs"]))


if __name__ == "__main__":
    main()
