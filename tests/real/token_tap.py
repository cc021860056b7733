"""A plugin for vLLM and SGLang: writes down which tokens the engine itself got and made, before any API touches them.

It is loaded by the engine, as any of its plugins, and writes lines of JSON to the file that `TOKEN_TAP` names: a
request with its prompt, then its tokens as each step of the engine reports them.
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
    groups = {"vllm.general_plugins": "register", "sglang.srt.plugins": "register_sglang"}
    lines = [f"[{group}]\ntap = {PACKAGE}:{name}\n" for group, name in groups.items()]
    (info / "entry_points.txt").write_text("\n".join(lines))


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


def register_sglang() -> None:
    """Follow what passes between SGLang's scheduler and its server."""
    from sglang.srt.managers.tokenizer_manager import TokenizerManager  # type: ignore[import-not-found]  # noqa: PLC0415

    if getattr(TokenizerManager, "is_tapped", False):
        return
    out = Path(os.environ["TOKEN_TAP"]).open("a", buffering=1)  # noqa: SIM115 - as long as the engine
    dispatch, handle = TokenizerManager._dispatch_to_scheduler, TokenizerManager._handle_batch_output
    prompts: dict[str, list[int]] = {}
    send = TokenizerManager._send_one_request

    async def send_one(self: Any, request: Any) -> Any:
        if getattr(request, "input_ids", None) is not None:
            prompts[request.rid] = list(request.input_ids)
        return await send(self, request)

    def dispatch_one(self: Any, request: Any) -> Any:
        prompt = prompts.pop(getattr(request, "rid", None) or "", None)
        if prompt is not None:
            out.write(json.dumps({"id": request.rid, "index": 0, "prompt": prompt}) + "\n")
        return dispatch(self, request)

    async def handle_output(self: Any, got: Any) -> Any:
        rows = zip(got.rids, got.output_ids or (), got.finished_reasons, strict=False)
        said = [{"id": each, "tokens": list(tokens), "ended": reason is not None} for each, tokens, reason in rows]
        out.writelines(json.dumps(each) + "\n" for each in said)
        return await handle(self, got)

    TokenizerManager._send_one_request = send_one
    TokenizerManager._dispatch_to_scheduler = dispatch_one
    TokenizerManager._handle_batch_output = handle_output
    TokenizerManager.is_tapped = True
