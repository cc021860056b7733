"""What an iteration computes, by which the virtual clock goes."""

from __future__ import annotations

import runpy
from pathlib import Path
from types import SimpleNamespace

STEPS = runpy.run_path(str(Path(__file__).with_name("steps.py")))  # a script for vLLM's environment


def test_a_prompt_costs_by_its_tokens_and_those_before_them_and_generating_by_what_is_in_memory() -> None:
    computed = {"begins": 100, "goes on": 300, "generates": 2000, "another": 50}
    requests = {name: SimpleNamespace(num_computed_tokens=count) for name, count in computed.items()}
    work = STEPS["work_of"]({"begins": 100, "goes on": 100, "generates": 1, "another": 1}, requests)
    assert dict(zip(STEPS["COSTS"], work, strict=True)) == {
        "base_s": 1.0,
        "prompt_s": 200.0,
        "prompt_context_s": 100 * 50 + 100 * 250,
        "context_s": 2050.0,
    }
