"""A plugin for vLLM that writes down which tokens the engine itself got and made, before any API touches them.

It is loaded by vLLM, as any of its plugins, and writes lines of JSON to the file that `TOKEN_TAP` names: a request with
its prompt, then its tokens as each step of the engine reports them.
"""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

PACKAGE = "token_tap"


def install(folder: Path) -> None:
    """Put the plugin into a folder for PYTHONPATH."""
    (folder / f"{PACKAGE}.py").write_text(Path(__file__).read_text())
    info = folder / f"{PACKAGE}-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {PACKAGE}\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text(f"[vllm.general_plugins]\ntap = {PACKAGE}:register\n")


def register() -> None:
    """Follow what passes between the engine's core and its server: only in its processes vLLM can be imported."""
    from vllm.v1.engine.output_processor import OutputProcessor  # type: ignore[import-not-found]  # noqa: PLC0415

    if getattr(OutputProcessor, "is_tapped", False):
        return
    out = Path(os.environ["TOKEN_TAP"]).open("a", buffering=1)  # noqa: SIM115 - as long as the engine
    add, process = OutputProcessor.add_request, OutputProcessor.process_outputs

    def add_request(self: Any, request: Any, prompt: Any, parent: Any = None, index: int = 0, queue: Any = None) -> Any:
        out.write(json.dumps({"id": request.request_id, "index": index, "prompt": request.prompt_token_ids}) + "\n")
        return add(self, request, prompt, parent, index, queue)

    def process_outputs(self: Any, outputs: list[Any], *args: Any, **kwargs: Any) -> Any:
        for each in outputs:
            said = {"id": each.request_id, "tokens": list(each.new_token_ids), "ended": each.finish_reason is not None}
            out.write(json.dumps(said) + "\n")
        return process(self, outputs, *args, **kwargs)

    OutputProcessor.add_request = add_request
    OutputProcessor.process_outputs = process_outputs
    OutputProcessor.is_tapped = True
