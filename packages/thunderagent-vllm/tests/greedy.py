"""A real model's greedy tokens; run in vLLM's environment: `python greedy.py MODEL_FOLDER MODE COUNT CACHING`.

MODE is `stock`, `default` or `mars`, the plugin with its defaults or with that preset.

COUNT requests of programs with four turns each, 16 at a time, in a pool that holds about half of them: they are
preempted. Each twentieth is aborted after its fifth token. Prints one line of JSON: the tokens of each request.
"""

from __future__ import annotations

import json
import os
import random
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))
os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")

from vllm.engine.arg_utils import EngineArgs
from vllm.sampling_params import SamplingParams
from vllm.v1.engine.llm_engine import LLMEngine

AT_A_TIME, TURNS, ABORTED_AFTER = 16, 4, 5


def main() -> None:
    model, mode, count, caching = sys.argv[1], sys.argv[2], int(sys.argv[3]), sys.argv[4] == "1"
    preset = {"preset": "mars"} if mode == "mars" else {}
    plugin = {
        "scheduler_cls": "thunderagent_vllm.scheduler.Scheduler",
        "additional_config": {"thunderagent": {**preset, "first_level_tokens": 128}},
    }
    engine = LLMEngine.from_engine_args(
        EngineArgs(
            model=model,
            dtype="float32",
            enforce_eager=True,
            block_size=32,
            max_model_len=1024,
            max_num_batched_tokens=256,
            max_num_seqs=32,
            num_gpu_blocks_override=72,
            enable_prefix_caching=caching,
            **(plugin if mode != "stock" else {}),
        )
    )
    tokens: dict[str, list[int]] = {}
    contexts: dict[int, list[int]] = {}
    live: dict[str, tuple[int, int]] = {}
    programs = iter(range(count // TURNS))

    def send(program: int, turn: int) -> None:
        rng = random.Random(program * 97 + turn)
        context = contexts.setdefault(program, [7 + number % 30 for number in range(64)])
        context += [rng.randrange(50, 1950) for _ in range(rng.randint(10, 120))]
        name = f"{program}.{turn}"
        sampling = SamplingParams(temperature=0, max_tokens=rng.randint(6, 40), ignore_eos=True)
        engine.add_request(name, {"prompt_token_ids": list(context)}, sampling, session_id=f"p{program}")
        live[name] = program, turn

    for program in [next(programs, None) for _ in range(AT_A_TIME)]:
        if program is not None:
            send(program, 0)
    aborted = 0
    while live:
        for output in engine.step():
            if (name := output.request_id) not in live:
                continue
            program, turn = live[name]
            got = list(output.outputs[0].token_ids)
            is_aborted = (program * TURNS + turn) % 20 == 3 and len(got) >= ABORTED_AFTER and not output.finished
            if is_aborted:
                engine.abort_request([name])
                got = got[:ABORTED_AFTER]
                aborted += 1
            if is_aborted or output.finished:
                del live[name]
                tokens[name] = got
                contexts[program] += got
                if turn + 1 < TURNS:
                    send(program, turn + 1)
                elif (following := next(programs, None)) is not None:
                    send(following, 0)
    scheduler = engine.engine_core.engine_core.scheduler
    report = scheduler.thunderagent_tell([]) if mode != "stock" else {}
    report.pop("pins", None)
    reset = scheduler.reset_prefix_cache()
    print(json.dumps({"tokens": tokens, "aborted": aborted, "report": report, "reset": reset}))


if __name__ == "__main__":
    main()
