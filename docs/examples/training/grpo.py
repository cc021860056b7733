"""Train a model by TRL's GRPO on an agent of several turns, whose engines are behind the proxy.

Each turn a tool says a word, and the agent has to say the same word. The reward is the part of words that are right.

    thunderagent serve --backends http://localhost:8000,http://localhost:8001 --rollouts logprobs
    python grpo.py MODEL_FOLDER WEIGHTS_FOLDER STEPS [SEED]
"""

import json
import os
import random
import sys
import time
from concurrent.futures import ThreadPoolExecutor

import httpx2
from datasets import Dataset
from transformers import AutoModelForCausalLM, AutoTokenizer
from trl import GRPOConfig, GRPOTrainer

from thunderagent.client import program, rollouts

PROXY = os.environ.get("THUNDERAGENT_PROXY", "http://127.0.0.1:8300")
PROMPTS, SAMPLES, TURNS, AT_A_TIME = 8, 8, 3, 16
WORDS = [f"w{number}" for number in range(8)]

http = httpx2.Client(base_url=PROXY, timeout=3600, limits=httpx2.Limits(max_connections=None))


def post(path, body=None):
    return http.post(path, json=body or {}).raise_for_status()


def run(program_id, name, words):
    """Run the agent as a program that its last turn ends; return its reward. A turn without a word ends it, too."""
    p, messages, right = program(program_id, proxy=PROXY), [], 0
    for number, word in enumerate(words, start=1):
        messages.append({"role": "tool", "tool_call_id": "next", "content": word})
        body = {"model": name, "messages": messages, "max_tokens": 1, "temperature": 1.0}
        final = {"X-Program-Final": "1"} if number == len(words) else {}
        answer = http.post(f"{p.base_url}/chat/completions", json=body, headers=final).raise_for_status()
        said = answer.json()["choices"][0]["message"]["content"]
        if not said:
            p.release()
            break
        messages.append({"role": "assistant", "content": said})
        right += said.strip() == word
    return right / len(words)


def ended(after):
    """Return the rollouts that have ended after one, by program, and the number of the last."""
    found = list(rollouts.ended(proxy=PROXY, after=after))
    return {each["program_id"]: each for each in found}, max((each["seq"] for each in found), default=after)


def load(folder, version):
    """Give all engines the weights of a folder: held turns wait meanwhile, and later ones are stamped with them."""
    post("/weight_sync/begin")
    for replica in http.get("/replicas").json()["replicas"]:
        engine = f"/workers/{replica['replica_id']}"
        if replica["kind"] == "sglang":
            post(f"{engine}/update_weights_from_disk", {"model_path": folder, "weight_version": version})
        else:
            post(f"{engine}/pause?mode=wait")
            post(f"{engine}/collective_rpc", {"method": "reload_weights", "kwargs": {"weights_path": folder}})
            post(f"{engine}/resume")
    post("/weight_sync/end", {"weight_version": version})


def rollout_func(prompts, trainer):
    """Return what TRL trains on: tokens as the engines sampled them, one row for each prompt."""
    step = trainer.state.global_step
    trainer.save_model(f"{FOLDER}/step-{step}")
    load(f"{FOLDER}/step-{step}", str(step))
    ids = [f"step-{step}-{number}" for number in range(len(prompts))]
    with ThreadPoolExecutor(AT_A_TIME) as pool:
        rewards = list(pool.map(run, ids, [MODEL_NAME] * len(ids), [prompt.split() for prompt in prompts]))
    global LAST
    found = {}
    while not found.keys() >= set(ids):
        more, LAST = ended(LAST)
        found |= more
    assert not any(found[each]["mask_sample"] for each in ids)  # no failure is trained on as a reward of 0
    return {**rollouts.for_trl(found[each] for each in ids), "reward": rewards}


def rewarded(completions, reward, **_):
    """Return the rewards that the rollouts came with."""
    return reward


def train(model, steps, seed, rollout_func):
    """Train, and return the mean reward of each step."""
    draw = random.Random(seed)
    prompts = [" ".join(draw.choices(WORDS, k=TURNS)) for _ in range(PROMPTS * steps)]
    settings = GRPOConfig(
        output_dir=FOLDER,
        max_steps=steps,
        per_device_train_batch_size=PROMPTS * SAMPLES,
        num_generations=SAMPLES,
        learning_rate=3e-3,
        lr_scheduler_type="constant",
        max_grad_norm=1.0,
        gradient_checkpointing=False,
        logging_steps=1,
        save_strategy="no",
        report_to="none",
        use_cpu=True,
        bf16=False,
        seed=seed,
    )
    tokenizer = AutoTokenizer.from_pretrained(model)
    tokenizer.pad_token = tokenizer.eos_token
    trainer = GRPOTrainer(
        AutoModelForCausalLM.from_pretrained(model, dtype="float32"),
        reward_funcs=rewarded,
        args=settings,
        train_dataset=Dataset.from_dict({"prompt": prompts}),
        processing_class=tokenizer,
        rollout_func=rollout_func,
    )
    trainer.train()
    return [each["reward"] for each in trainer.state.log_history if "reward" in each]


if __name__ == "__main__":
    MODEL, FOLDER, STEPS, SEED = sys.argv[1], sys.argv[2], int(sys.argv[3]), int((*sys.argv, 0)[4])
    MODEL_NAME = http.get("/v1/models").json()["data"][0]["id"]
    LAST = ended(0)[1]  # what earlier runs left
    began = time.monotonic()
    rewards = train(MODEL, STEPS, SEED, rollout_func)
    print(json.dumps({"rewards": rewards, "took_s": time.monotonic() - began}))
