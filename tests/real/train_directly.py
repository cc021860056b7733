"""The example's training without the proxy: the same agents on the engines themselves, in turn, run by TRL's Python.

The engines are told to return their tokens, and here the samples are made of them.

    python train_directly.py MODEL_FOLDER WEIGHTS_FOLDER STEPS SEED URL_OF_VLLM URL_OF_SGLANG
"""

from __future__ import annotations

import json
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx2

from docs.examples.training import grpo

Row = dict[str, Any]
http = httpx2.Client(timeout=3600, limits=httpx2.Limits(max_connections=None))
SGLANG_HEADERS = {"x-sglext-return-input-ids": "1", "x-sglext-return-output-ids": "1"}


def converse(url: str, words: list[str]) -> tuple[Row, float]:
    """Run the agent on an engine; return its sample and its reward, as the example does."""
    messages: list[Row] = []
    whole: list[int] = []
    first, sampled, right = 0, dict[int, float](), 0
    is_vllm = url == VLLM
    asks = {"return_token_ids": True} if is_vllm else {}
    for word in words:
        messages.append({"role": "tool", "tool_call_id": "next", "content": word})
        body = {"model": "random-llama", "messages": messages, "max_tokens": 1, "temperature": 1.0, "logprobs": True}
        answer = http.post(
            f"{url}/v1/chat/completions", json=body | asks, headers={} if is_vllm else SGLANG_HEADERS
        ).raise_for_status()
        said = answer.json()
        choice = said["choices"][0]
        prompt, ids = (
            (said["prompt_token_ids"], choice["token_ids"])
            if is_vllm
            else (said["sglext"]["input_ids"], said["sglext"]["output_ids"])
        )
        prompt, ids = flat(prompt), flat(ids)
        assert prompt[: len(whole)] == whole
        first = first or len(prompt)
        whole = prompt + ids
        sampled[len(prompt)] = choice["logprobs"]["content"][0]["logprob"]
        text = choice["message"]["content"]
        if not text:
            break
        messages.append({"role": "assistant", "content": text})
        right += text.strip() == word
    after = range(first, len(whole))
    sample = {
        "prompt_ids": whole[:first],
        "completion_ids": whole[first:],
        "logprobs": [sampled.get(at, 0.0) for at in after],
        "env_mask": [int(at in sampled) for at in after],
    }
    return sample, right / len(words)


def flat(ids: list[Any]) -> list[int]:
    """Return the only list of a list of lists; otherwise the list."""
    return ids[0] if ids and isinstance(ids[0], list) else ids


def load(folder: str, version: str) -> None:
    """Give both engines the weights of a folder."""
    update = {"model_path": folder, "weight_version": version}
    http.post(f"{SGLANG}/update_weights_from_disk", json=update).raise_for_status()
    http.post(f"{VLLM}/pause?mode=wait").raise_for_status()
    asked = {"method": "reload_weights", "kwargs": {"weights_path": folder}}
    http.post(f"{VLLM}/collective_rpc", json=asked).raise_for_status()
    http.post(f"{VLLM}/resume").raise_for_status()


def rollout_func(prompts: list[str], trainer: Any) -> Row:
    """Return what TRL trains on."""
    folder = f"{grpo.FOLDER}/step-{trainer.state.global_step}"
    trainer.save_model(folder)
    load(folder, str(trainer.state.global_step))
    with ThreadPoolExecutor(grpo.AT_A_TIME) as pool:
        urls = [(VLLM, SGLANG)[number % 2] for number in range(len(prompts))]
        done = list(pool.map(converse, urls, [prompt.split() for prompt in prompts]))
    rows: Row = {name: [sample[name] for sample, _ in done] for name in done[0][0]}
    return {**rows, "reward": [reward for _, reward in done]}


if __name__ == "__main__":
    model, grpo.FOLDER, steps, seed, VLLM, SGLANG = sys.argv[1:]
    began = time.monotonic()
    rewards = grpo.train(model, int(steps), int(seed), rollout_func)
    print(json.dumps({"rewards": rewards, "took_s": time.monotonic() - began}))
