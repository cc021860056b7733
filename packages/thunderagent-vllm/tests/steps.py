"""What an iteration of a real engine computes, and how long it takes: where the harness's costs come from.

`--scheduler-cls steps.Scheduler` writes a line for each iteration into `$STEPS_FILE`; `python steps.py FILE...` fits the
costs to all of them by least squares, and prints a line of JSON. Both run in vLLM's environment.
"""

from __future__ import annotations

import json
import os
import sys
import time
from pathlib import Path
from typing import Any

COSTS = ("base_s", "prompt_s", "prompt_context_s", "context_s")
"""Of an iteration; a prompt's token; the same for each token before it; a token in memory of a request that generates."""


def work_of(scheduled_tokens: dict[str, int], requests: dict[str, Any]) -> list[float]:
    """Return how often each of `COSTS` is paid in an iteration that was just scheduled."""
    prompt = prompt_context = context = 0.0
    for request_id, tokens in scheduled_tokens.items():
        computed = requests[request_id].num_computed_tokens  # with these
        if tokens == 1:
            context += computed
        else:
            prompt += tokens
            prompt_context += tokens * (computed - tokens / 2)
    return [1.0, prompt, prompt_context, context]


def Scheduler(*args: Any, **kwargs: Any) -> Any:  # noqa: N802 - vLLM calls what it is told is a class
    """Return the plugin's scheduler, which writes its iterations."""
    from thunderagent_vllm.scheduler import Scheduler as Programs

    made = Programs(*args, **kwargs)
    schedule, update, open_steps = made.schedule, made.update_from_output, {}
    lines = Path(os.environ["STEPS_FILE"]).open("w", buffering=1)  # noqa: SIM115 - for the process
    ended_s = 0.0

    def scheduled(*args: Any, **kwargs: Any) -> Any:
        begun_s = time.monotonic()
        output = schedule(*args, **kwargs)
        open_steps[id(output)] = begun_s, work_of(output.num_scheduled_tokens, made.requests)
        return output

    def updated(output: Any, *args: Any, **kwargs: Any) -> Any:
        nonlocal ended_s
        begun_s, work = open_steps.pop(id(output))
        now_s = time.monotonic()
        if output.total_num_scheduled_tokens:  # vLLM schedules one ahead: it begins where the last one ended
            lines.write(json.dumps([*work, now_s - max(begun_s, ended_s)]) + "\n")
        ended_s = now_s
        return update(output, *args, **kwargs)

    made.schedule, made.update_from_output = scheduled, updated
    return made


def fitted(steps: list[list[float]]) -> dict[str, Any]:
    """Return the costs that explain the iterations best, and how much of their times' variance they explain."""
    import numpy as np

    work, times_s = np.array(steps)[:, :-1], np.array(steps)[:, -1]
    scale = work.max(axis=0)
    costs = np.linalg.lstsq(work / scale, times_s, rcond=None)[0] / scale
    unexplained = float(((times_s - work @ costs) ** 2).sum() / ((times_s - times_s.mean()) ** 2).sum())
    return {
        "costs": dict(zip(COSTS, map(float, costs), strict=True)),
        "explained_ratio": 1.0 - unexplained,
        "iterations_count": len(steps),
        "mean_s": float(times_s.mean()),
    }


if __name__ == "__main__":
    texts = [Path(path).read_text() for path in sys.argv[1:]]
    print(json.dumps(fitted([json.loads(line) for text in texts for line in text.splitlines()])))
